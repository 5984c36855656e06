//! The official conformance suite has the same verdict on a server whether it is asked directly or through the
//! sidecar, in both eras: 73 scenarios, among them elicitation, sampling, `input_required`, resumption, the mirrored
//! headers, and the protection against DNS rebinding (in which the sidecar itself refuses).
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{fs, path::Path, process::Command, time::Duration};

use serde_json::Value;
use support::{Process, Sidecar};
use tempfile::TempDir;

/// A command of `tests/sdk` that Node runs.
fn node(program: &str) -> Command {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk");
    let suite = folder.join("node_modules/@modelcontextprotocol/conformance");
    assert!(suite.exists(), "the suite is not there (no {}): tests/run installs it", suite.display());
    let mut command = Command::new("node");
    command.arg(folder.join(program));
    command
}

/// Scenario, check and status of each check that is one, in the order of the scenarios' names.
fn verdicts(url: &str, revision: &str) -> Vec<(String, String, String)> {
    let results = TempDir::new().unwrap();
    let mut command = node("conformance.mjs");
    command.args(["server", "--suite", "all", "--spec-version", revision, "--url", url]);
    command.arg("--output-dir").arg(results.path());
    let mut suite = Process::spawn(command);
    suite.wait_exit(Duration::from_secs(120));
    let mut verdicts = Vec::new();
    let mut scenarios: Vec<_> =
        fs::read_dir(results.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    scenarios.sort();
    for folder in scenarios {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let scenario = &name[..name.len() - "-2026-07-28T00-00-00-000Z".len()];
        let checks = fs::read(folder.join("checks.json")).unwrap();
        for check in serde_json::from_slice::<Vec<Value>>(&checks).unwrap() {
            let [id, status] =
                ["id", "status"].map(|member| check[member].as_str().unwrap_or_default().to_owned());
            if status != "INFO" {
                let status = format!("{status} {}", check["errorMessage"].as_str().unwrap_or_default());
                verdicts.push((scenario.to_owned(), id, status));
            }
        }
    }
    verdicts
}

/// `checks` is how many there are: none may vanish unseen.
fn compare(revision: &str, checks: usize) {
    let server = Process::spawn(node("everything.mjs"));
    let url =
        server.stdout.find_json(|line| line["event"] == "listening")["url"].as_str().unwrap().to_owned();
    let direct = verdicts(&url, revision);
    let failed: Vec<_> = direct.iter().filter(|(_, _, status)| status != "SUCCESS ").collect();
    assert!(failed.is_empty(), "the server itself is not as described: {failed:#?}");
    assert_eq!(direct.len(), checks);

    let sidecar = Sidecar::with_flags(&["--upstream", &url]);
    let through = verdicts(&sidecar.url("/mcp"), revision);
    let differ: Vec<_> = through.iter().filter(|verdict| !direct.contains(verdict)).collect();
    assert!(differ.is_empty(), "through the sidecar: {differ:#?}");
    assert_eq!(through, direct);
}

#[test]
fn legacy_verdicts_are_the_same() {
    compare("2025-11-25", 84);
}

#[test]
fn modern_verdicts_are_the_same() {
    compare("2026-07-28", 152);
}
