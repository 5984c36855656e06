//! `demo`: the main job, seen.

use std::process::ExitCode;

/// Not there yet.
pub async fn run() -> ExitCode {
    eprintln!("mcp-sidecar: the demo is not there yet");
    ExitCode::from(super::FAILED)
}
