//! The `mcp-sidecar` program.

use std::process::ExitCode;

use clap::Parser;
use mcp_sidecar::command::Cli;

/// The system's allocators are several times slower under load, musl's most of all.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    Cli::parse().run()
}
