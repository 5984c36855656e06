//! What the official SDKs do directly, they do through the sidecar, in both eras: among the rest a server that asks the
//! client's user and its model in the middle of a call, and a call that is answered on a resumed stream. A rate limit
//! that is an exception without the sidecar (some clients lose their whole connection) is a tool result with it.
//!
//! Each pair runs directly first, so that a fault of the programs in `tests/sdk` and `tests/rmcp` is not laid at the
//! sidecar's door. What the server saw is read from the server's own output.

mod support;

use std::{path::Path, process::Command, time::Duration};

use support::{Process, Sidecar};

/// An SDK with its programs: `client URL ERA [--busy-fails]` and `server`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sdk {
    Python,
    TypeScript,
    Rust,
    /// The first versions of the two, which speak legacy alone.
    Python1,
    TypeScript1,
}

use Sdk::{Python, Python1, Rust, TypeScript, TypeScript1};

impl Sdk {
    /// The command that runs one of its programs.
    fn program(self, name: &str) -> Command {
        let sdk = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk");
        let folder = if matches!(self, Python1 | TypeScript1) { sdk.join("v1") } else { sdk.clone() };
        let (installed, command) = match self {
            Python | Python1 => {
                let python = folder.join(".venv/bin/python");
                let mut command = Command::new(&python);
                command.arg(folder.join(format!("{name}.py")));
                (python, command)
            }
            TypeScript | TypeScript1 => {
                let mut command = Command::new("node");
                command.arg(folder.join(format!("{name}.mjs")));
                (sdk.join("node_modules/@modelcontextprotocol/sdk"), command)
            }
            Rust => {
                let profile =
                    Path::new(env!("CARGO_BIN_EXE_mcp-sidecar")).parent().expect("it is in a folder");
                let program = profile.with_file_name("debug").join(format!("rmcp-{name}"));
                (program.clone(), Command::new(program))
            }
        };
        assert!(installed.exists(), "{} is not there: tests/run installs it", installed.display());
        command
    }

    /// Whether its server keeps the events of legacy streams, and so has a tool that ends its own stream.
    fn resumes(self) -> bool {
        matches!(self, Python | TypeScript1)
    }
}

/// What a client does, in this order.
fn scenarios(server: Sdk, era: &str) -> Vec<&'static str> {
    let mut all = vec!["list", "call", "progress", "cancel", "busy", "notifications", "ask"];
    if era == "legacy" && server.resumes() {
        all.push("resume");
    }
    all.extend(["call again", "close"]);
    all
}

/// Starts a server and says where it listens.
fn server(sdk: Sdk) -> (Process, String) {
    let server = Process::spawn(sdk.program("server"));
    let line = server.stdout.find_json(|line| line["event"] == "listening");
    (server, line["url"].as_str().unwrap_or_default().to_owned())
}

/// Runs a client to its end; every scenario has to pass.
fn run_client(sdk: Sdk, server: Sdk, url: &str, era: &str, flags: &[&str]) {
    let mut command = sdk.program("client");
    command.args([url, era]).args(flags);
    let mut client = Process::spawn(command);
    let status = client.wait_exit(Duration::from_secs(90));
    let told = client.stdout.json();
    for line in &told {
        assert_eq!(line["ok"], true, "{}: {}", line["scenario"], line["detail"]);
    }
    let names: Vec<_> = told.iter().map(|line| line["scenario"].as_str().unwrap_or_default()).collect();
    assert_eq!(names, scenarios(server, era), "the client ended with {status}");
    assert!(status.success(), "{status}");
}

/// What the server has to have seen of one run of the scenarios.
fn check_server(server: &Process, sdk: Sdk, era: &str) {
    let mut expected = vec!["cancelled", "busy"];
    match era {
        "legacy" => expected.extend(["get", "delete"]),
        _ => expected.push("listen"),
    }
    if era == "legacy" && sdk.resumes() {
        expected.push("resume");
    }
    for name in expected {
        server.stdout.find_json(|line| line["event"] == name);
    }
    let told = server.stdout.json();
    for name in ["cancelled", "busy"] {
        let times = told.iter().filter(|line| line["event"] == name).count();
        assert_eq!(times, 1, "the server saw `{name}` {times} times");
    }
}

fn check(client: Sdk, sdk: Sdk, era: &str) {
    let (direct, url) = server(sdk);
    run_client(client, sdk, &url, era, &["--busy-fails"]);
    check_server(&direct, sdk, era);

    let (behind, url) = server(sdk);
    let mut sidecar = Sidecar::with_flags(&["--upstream", &url]);
    run_client(client, sdk, &sidecar.url("/mcp"), era, &[]);
    check_server(&behind, sdk, era);
    assert!(sidecar.terminate().success());

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
    for l in sidecar.lines() {
        println!("{l}");
    }
}

macro_rules! pairs {
    ($($name:ident: $client:ident, $server:ident, $era:literal;)*) => {
        $(
            #[test]
            fn $name() {
                check($client, $server, $era);
            }
        )*
    };
}

pairs! {
    python_client_and_python_server_legacy: Python, Python, "legacy";
    python_client_and_python_server_modern: Python, Python, "modern";
    python_client_and_typescript_server_legacy: Python, TypeScript, "legacy";
    python_client_and_typescript_server_modern: Python, TypeScript, "modern";
    python_client_and_rust_server_modern: Python, Rust, "modern";
    python_client_and_typescript_1_server: Python, TypeScript1, "legacy";

    typescript_client_and_python_server_legacy: TypeScript, Python, "legacy";
    typescript_client_and_python_server_modern: TypeScript, Python, "modern";
    typescript_client_and_typescript_server_legacy: TypeScript, TypeScript, "legacy";
    typescript_client_and_typescript_server_modern: TypeScript, TypeScript, "modern";
    typescript_client_and_rust_server_legacy: TypeScript, Rust, "legacy";
    typescript_client_and_python_1_server: TypeScript, Python1, "legacy";

    rust_client_and_python_server_legacy: Rust, Python, "legacy";
    rust_client_and_python_server_modern: Rust, Python, "modern";
    rust_client_and_typescript_server_legacy: Rust, TypeScript, "legacy";
    rust_client_and_typescript_server_modern: Rust, TypeScript, "modern";
    rust_client_and_rust_server_legacy: Rust, Rust, "legacy";
    rust_client_and_rust_server_modern: Rust, Rust, "modern";

    python_1_client_and_python_server: Python1, Python, "legacy";
    python_1_client_and_typescript_server: Python1, TypeScript, "legacy";
    python_1_client_and_typescript_1_server: Python1, TypeScript1, "legacy";

    typescript_1_client_and_python_server: TypeScript1, Python, "legacy";
    typescript_1_client_and_typescript_server: TypeScript1, TypeScript, "legacy";
    typescript_1_client_and_python_1_server: TypeScript1, Python1, "legacy";
}
