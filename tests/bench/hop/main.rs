//! What the sidecar costs, next to nginx and to a bare hyper hop: `tests/bench/run [--rounds N] [--quick] [--only PART,…]`
//!
//! The node (this process), the upstream and what is measured are processes of their own on one machine, over loopback.
//! They share its cores, so work is counted in CPU time of the hop alone. In each round each hop has its turn in each
//! part, in rotated order; what is printed is the median over the rounds of the ratio within a round.

mod bare;
mod load;
mod mock;
mod parts;
mod process;

use std::{env, future::Future, io, path::Path, process::ExitCode};

use parts::{Bench, Options};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ended = match arguments.as_slice() {
        ["mock", dir] => in_runtime(mock::serve(Path::new(dir))),
        ["bare", upstream] => in_runtime(bare::serve(upstream.parse().expect("an address"))),
        options => match Options::parse(options) {
            Some(options) => in_runtime(async { Bench::start(options)?.run().await }),
            None => {
                eprintln!(
                    "usage: tests/bench/run [--rounds N] [--quick] [--only PART,...]\nparts: {}",
                    parts::PARTS.join(", ")
                );
                return ExitCode::from(2);
            }
        },
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn in_runtime(work: impl Future<Output = io::Result<()>>) -> io::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}
