//! What the official SDKs do directly, they do through the sidecar, in both eras; and a rate limit that is an
//! exception without it (some clients lose their whole connection) is a tool result with it.
//!
//! Each combination runs directly first, so that a fault of the programs in `tests/sdk` is not laid at the sidecar's
//! door. What the server saw is read from the server's own output.

mod support;

use std::{path::Path, process::Command, time::Duration};

use support::{Process, Sidecar};

const SCENARIOS: [&str; 8] =
    ["list", "call", "progress", "cancel", "busy", "notifications", "call again", "close"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sdk {
    Python,
    TypeScript,
}

use Sdk::{Python, TypeScript};

/// The command that runs a program of `tests/sdk`.
fn program(sdk: Sdk, name: &str) -> Command {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk");
    let (run, needs, ending) = match sdk {
        Python => (folder.join(".venv/bin/python"), folder.join(".venv/bin/python"), "py"),
        TypeScript => ("node".into(), folder.join("node_modules/@modelcontextprotocol/server"), "mjs"),
    };
    assert!(
        needs.exists(),
        "an official SDK is not installed (no {}): tests/run installs it",
        needs.display()
    );
    let mut command = Command::new(run);
    command.arg(folder.join(format!("{name}.{ending}")));
    command
}

/// Starts a server and says where it listens.
fn server(sdk: Sdk) -> (Process, String) {
    let server = Process::spawn(program(sdk, "server"));
    let line = server.stdout.find_json(|line| line["event"] == "listening");
    (server, line["url"].as_str().unwrap_or_default().to_owned())
}

/// Runs a client to its end; every scenario has to pass.
fn run_client(sdk: Sdk, url: &str, era: &str, flags: &[&str]) {
    let mut command = program(sdk, "client");
    command.args([url, era]).args(flags);
    let mut client = Process::spawn(command);
    let status = client.wait_exit(Duration::from_secs(90));
    let told = client.stdout.json();
    for line in &told {
        assert_eq!(line["ok"], true, "{}: {}", line["scenario"], line["detail"]);
    }
    let names: Vec<_> = told.iter().map(|line| line["scenario"].as_str().unwrap_or_default()).collect();
    assert_eq!(names, SCENARIOS);
    assert!(status.success(), "{status}");
}

/// What the server has to have seen of one run of the scenarios.
fn check_server(server: &Process, era: &str) {
    let expected: &[&str] = if era == "legacy" {
        &["get", "cancelled", "busy", "delete"]
    } else {
        &["cancelled", "busy", "listen"]
    };
    for name in expected {
        server.stdout.find_json(|line| line["event"] == *name);
    }
    let told = server.stdout.json();
    for name in ["cancelled", "busy"] {
        let times = told.iter().filter(|line| line["event"] == name).count();
        assert_eq!(times, 1, "the server saw `{name}` {times} times");
    }
}

fn check(client: Sdk, sdk: Sdk, era: &str) {
    let (direct, url) = server(sdk);
    run_client(client, &url, era, &["--busy-fails"]);
    check_server(&direct, era);

    let (behind, url) = server(sdk);
    let sidecar = Sidecar::with_flags(&["--upstream", &url]);
    run_client(client, &sidecar.url("/mcp"), era, &[]);
    check_server(&behind, era);

    let busy = sidecar.wait_line(|line| line["tool"] == "busy");
    assert_eq!((&busy["outcome"], &busy["upstream_status"]), (&"busy".into(), &429.into()), "{busy}");
    assert_eq!(busy["retry_after"], 7, "{busy}");
    let cancelled = sidecar.wait_line(|line| line["tool"] == "wait");
    let by = if era == "legacy" { "notification" } else { "disconnect" };
    assert_eq!(
        (&cancelled["outcome"], &cancelled["cancelled_by"]),
        (&"cancelled".into(), &by.into()),
        "{cancelled}"
    );
}

#[test]
fn python_client_and_python_server_legacy() {
    check(Python, Python, "legacy");
}

#[test]
fn python_client_and_python_server_modern() {
    check(Python, Python, "modern");
}

#[test]
fn python_client_and_typescript_server_legacy() {
    check(Python, TypeScript, "legacy");
}

#[test]
fn python_client_and_typescript_server_modern() {
    check(Python, TypeScript, "modern");
}

#[test]
fn typescript_client_and_python_server_legacy() {
    check(TypeScript, Python, "legacy");
}

#[test]
fn typescript_client_and_python_server_modern() {
    check(TypeScript, Python, "modern");
}

#[test]
fn typescript_client_and_typescript_server_legacy() {
    check(TypeScript, TypeScript, "legacy");
}

#[test]
fn typescript_client_and_typescript_server_modern() {
    check(TypeScript, TypeScript, "modern");
}
