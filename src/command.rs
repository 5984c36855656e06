//! The command line: one file per subcommand.

pub mod approve;
pub mod check;
pub mod demo;
pub mod health;
pub mod serve;

use std::{env, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use tokio::runtime::Builder;

use crate::config;

/// Failed at run time.
pub const FAILED: u8 = 1;
/// Wrong usage or configuration; clap uses the same for wrong flags.
pub const USAGE: u8 = 2;

/// A sidecar between an agent node (an MCP client) and the remote MCP servers it calls
#[derive(Debug, Parser)]
#[command(name = "mcp-sidecar", version, about, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed at run time, 2 wrong usage or configuration";

const SERVE: &str = "\
Serves each upstream at http://ADDR/NAME. A flag goes before its environment variable, that before the file, and
that before the default. Secrets are only read from files and environment variables that the configuration file names.

Signals: SIGTERM and SIGINT drain (calls in flight may finish for `drain`, 30s by default) and end; a second one ends
at once. SIGHUP, or a changed file, reads the configuration again and reopens the access log.

Exit codes: 0 done (also after a drain that had to cut calls), 1 failed at run time, 2 wrong usage or configuration";

const APPROVE: &str = "\
Secrets are only read from the environment variables and files that flags name.

Exit codes: 0 done, 1 the server gave no listing, 2 wrong usage";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the sidecar
    #[command(after_help = SERVE)]
    Serve(config::Flags),
    /// Show the sidecar at work: an embedded MCP server, a sidecar in front of it and a client
    #[command(after_help = EXIT_CODES)]
    Demo,
    /// Validate a configuration file, with the secrets and certificates it names
    ///
    /// Prints `FILE: ok`, or every problem as `FILE:LINE: KEY: REASON`.
    #[command(after_help = "Exit codes: 0 the file is right, 2 it is not")]
    Check {
        /// The configuration file (TOML)
        file: PathBuf,
    },
    /// Print the pin of a remote server's listing, for the `approved` file of its upstream
    ///
    /// Asks for all pages of tools/list, as a client of 2026-07-28 first, else of 2025-11-25, and prints the SHA-256 of
    /// each tool's entry as JSON on stdout. Roots beyond the built-in ones are taken from SSL_CERT_FILE or SSL_CERT_DIR.
    #[command(after_help = APPROVE)]
    Approve {
        /// The server
        #[command(flatten)]
        remote: config::Remote,
        /// Ask only in this era: the one in which the nodes speak, where a server lists its tools differently in each
        #[arg(long, env = "MCP_SIDECAR_ERA")]
        era: Option<approve::Asked>,
    },
    /// Ask a running sidecar whether it is ready
    ///
    /// Asks GET /readyz of its admin listener: a probe for images without a shell.
    #[command(after_help = "Exit codes: 0 it is ready, 1 it is not or can't be reached, 2 wrong usage")]
    Health {
        /// The admin listener: IP:PORT, localhost:PORT or unix:/path
        #[arg(value_name = "ADDR", env = "MCP_SIDECAR_ADMIN", default_value = config::ADMIN)]
        address: String,
    },
}

impl Cli {
    /// Runs the command to its end.
    pub fn run(self) -> ExitCode {
        match self.command {
            Command::Serve(flags) => serve::run(flags),
            Command::Demo => in_runtime(demo::run()),
            Command::Check { file } => check::run(&file),
            Command::Approve { remote, era } => in_runtime(approve::run(&remote, era)),
            Command::Health { address } => in_runtime(health::run(&address)),
        }
    }
}

/// Runs a command on all cores.
fn in_runtime(command: impl Future<Output = ExitCode>) -> ExitCode {
    run(&mut Builder::new_multi_thread(), command)
}

/// Runs the sidecar on one thread, unless `TOKIO_WORKER_THREADS`, which the runtime reads by itself, names how many. It is
/// the small neighbour of one node, and of little work for many threads each piece costs more than on one: they wake
/// each other and take each other's tasks. What would hold the others up on it goes to threads of its own.
///
/// Not one worker of several that could be: its queue is bounded, and what falls out of it waits behind all that floods.
fn in_one_thread(command: impl Future<Output = ExitCode>) -> ExitCode {
    match env::var_os("TOKIO_WORKER_THREADS") {
        Some(_) => in_runtime(command),
        None => run(&mut Builder::new_current_thread(), command),
    }
}

fn run(builder: &mut Builder, command: impl Future<Output = ExitCode>) -> ExitCode {
    match builder.enable_all().build() {
        Ok(runtime) => {
            let code = runtime.block_on(command);
            // A look-up of a name that is never answered must not hold up the end.
            runtime.shutdown_background();
            code
        }
        Err(error) => {
            eprintln!("mcp-sidecar: can't start: {error}");
            ExitCode::from(FAILED)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use tokio::{runtime::Handle, task::spawn_blocking};

    use super::*;

    #[test]
    fn the_sidecar_runs_on_one_thread_unless_more_are_named() {
        let named = env::var("TOKIO_WORKER_THREADS").ok().and_then(|named| named.parse().ok());
        let code = in_one_thread(async move {
            ExitCode::from(u8::from(Handle::current().metrics().num_workers() != named.unwrap_or(1)))
        });
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::SUCCESS));
    }

    #[test]
    fn what_still_blocks_a_thread_does_not_hold_up_the_end() {
        let (release, held) = mpsc::channel::<()>();
        let (ended, told) = mpsc::channel();
        thread::spawn(move || {
            in_one_thread(async move {
                spawn_blocking(move || held.recv());
                ExitCode::SUCCESS
            });
            ended.send(())
        });
        assert_eq!(told.recv_timeout(Duration::from_secs(10)), Ok(()));
        drop(release);
    }
}
