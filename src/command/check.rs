//! `check FILE`: everything that `serve` would refuse about a file.

use std::{path::Path, process::ExitCode};

use super::USAGE;
use crate::config::{Config, Flags, process_environment};

/// Prints `FILE: ok`, or every problem.
pub fn run(file: &Path) -> ExitCode {
    let flags = Flags { config: Some(file.into()), ..Flags::default() };
    let checked = Config::load(&flags, &process_environment).and_then(|config| {
        config.server_settings()?;
        config.proxy_settings()
    });
    match checked {
        Ok(_) => {
            println!("{}: ok", file.display());
            ExitCode::SUCCESS
        }
        Err(problems) => {
            eprintln!("{problems}");
            ExitCode::from(USAGE)
        }
    }
}
