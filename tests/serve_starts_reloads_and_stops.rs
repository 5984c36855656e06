//! The life of `serve` as an operator sees it: exit codes, signals, reloads, readiness, and
//! the commands that ask about it.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use support::{
    BOUND, Client, Gate, Process, Sidecar, Upstream,
    mcp::{call, result},
    store::Store,
};
use tempfile::TempDir;

/// A run of the binary with nothing of the test run's environment.
fn binary(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
    command.args(arguments).env_clear();
    command
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Replaces a file as a whole, as editors and deployments do.
fn replace(file: &Path, text: &str) {
    let aside = file.with_extension("aside");
    fs::write(&aside, text).unwrap();
    fs::rename(aside, file).unwrap();
}

/// A sidecar with a configuration file that the test changes.
fn with_file(text: &str) -> (Sidecar, PathBuf) {
    let sidecar = Sidecar::with_config(text);
    let file = sidecar.folder().path().join("sidecar.toml");
    (sidecar, file)
}

fn upstream_table(name: &str, upstream: &Upstream) -> String {
    format!("[upstreams.{name}]\nurl = \"{}\"\n", upstream.url())
}

#[test]
fn a_wrong_configuration_exits_with_2_and_names_every_problem() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("wrong.toml");
    fs::write(&file, "lissten = \"127.0.0.1:1\"\n\n[limits]\ncalls = 0\n").unwrap();
    let shown = file.display().to_string();
    for arguments in [["check", &shown].as_slice(), &["serve", "--config", &shown]] {
        let output = binary(arguments).output().unwrap();
        let told = told(&output);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains(&format!("{shown}:1: lissten: unknown key")), "{told}");
        assert!(told.contains(&format!("{shown}:4: limits.calls: ")), "{told}");
    }
}

#[test]
fn wrong_usage_exits_with_2_and_nothing_to_serve_is_one() {
    for arguments in [&["serve"][..], &["serve", "--nonsense"], &["nonsense"], &[], &["health", "nowhere"]] {
        assert_eq!(binary(arguments).output().unwrap().status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn a_right_file_is_ok() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("right.toml");
    fs::write(&file, "[upstreams.a]\nurl = \"https://api.example.com/mcp\"\n").unwrap();
    let output = binary(&["check", file.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(told(&output), format!("{}: ok\n", file.display()));
}

#[test]
fn an_address_that_can_t_be_bound_exits_with_1_and_names_it() {
    let upstream = Upstream::json(result(1));
    let output =
        binary(&["serve", "--upstream", &upstream.url(), "--listen", &upstream.address]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(told(&output).contains(&upstream.address), "{}", told(&output));
}

/// Starts a sidecar on that state, which has to refuse it, and gives what it says.
fn refused(state: &str) -> String {
    let serve = ["serve", "--listen", "127.0.0.1:0", "--admin", "", "--upstream", "http://127.0.0.1:1/mcp"];
    let output = binary(&[&serve[..], &["--state", state]].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    assert!(!told(&output).contains("listening"), "{}", told(&output));
    told(&output)
}

#[test]
fn a_state_of_a_newer_version_is_refused_by_name_and_version_and_left_alone() {
    let upstream = Upstream::json("{}");
    let store = Store::sqlite();
    drop(store.before(&upstream));
    let file = store.folder().path().join("state.db");
    let other = rusqlite::Connection::open(&file).unwrap();
    other.pragma_update(None, "user_version", 7).unwrap();
    drop(other);
    let before = fs::read(&file).unwrap();
    let told = refused(store.state());
    assert!(
        told.contains(&format!(
            "{}: the state store has schema 7, this version knows up to 1",
            file.display()
        )),
        "{told}"
    );
    assert_eq!(fs::read(&file).unwrap(), before);

    let store = Store::redis();
    let address = store.state().strip_prefix("redis://").unwrap().strip_suffix("/0").unwrap();
    let mut server = std::net::TcpStream::connect(address).unwrap();
    server.write_all(b"SET mcp-sidecar:schema 2\r\n").unwrap();
    server.read_exact(&mut [0; 5]).unwrap();
    let told = refused(store.state());
    assert!(
        told.contains(&format!(
            "redis://{address}/0: the state store has schema 2, this version knows up to 1"
        )),
        "{told}"
    );
}

#[test]
fn a_state_of_another_program_is_refused_by_name() {
    let store = Store::sqlite();
    let file = store.folder().path().join("state.db");
    rusqlite::Connection::open(&file).unwrap().execute_batch("CREATE TABLE theirs (x)").unwrap();
    let told = refused(store.state());
    assert!(told.contains(&format!("{}: the state store is damaged: ", file.display())), "{told}");
}

#[test]
fn flags_come_from_the_environment_too_and_several_upstreams_are_separated_by_spaces() {
    let (one, two) = (Upstream::json(result(1)), Upstream::json(result(2)));
    let folder = TempDir::new().unwrap();
    let mut command = Sidecar::command(&folder);
    command.env("MCP_SIDECAR_UPSTREAM", format!("one={} {}", one.url(), two.url()));
    let sidecar = Sidecar::spawn(command, folder);
    assert_eq!(sidecar.client().ask(&call(1).at("/one")).text(), result(1));
    assert_eq!(sidecar.client().ask(&call(2).at("/mcp")).text(), result(2));
}

#[test]
fn health_asks_the_admin_listener() {
    let upstream = Upstream::json(result(1));
    let mut sidecar = Sidecar::before(&upstream);
    let output = binary(&["health", &sidecar.admin]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", told(&output));
    let output = binary(&["health"]).env("MCP_SIDECAR_ADMIN", &sidecar.admin).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", told(&output));
    sidecar.terminate();
    let output = binary(&["health", &sidecar.admin]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
}

#[test]
fn a_drain_finishes_what_is_in_flight_and_exits_with_0() {
    let gate = Gate::new();
    let upstream = Upstream::start({
        let gate = gate.clone();
        move |_, reply| {
            gate.pass();
            reply.json(200, &[], &result(1));
        }
    });
    let mut sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    upstream.wait_request(0);
    sidecar.signal("TERM");
    sidecar.wait_stderr("draining");
    let ready = sidecar.admin("GET", "/readyz");
    assert_eq!((ready.status(), ready.text().as_str()), (503, "draining\n"));
    assert_eq!(sidecar.client().ask(&call(2)).status(), 200, "the listener goes on, and says busy");
    gate.open();
    assert_eq!(client.response().text(), result(1));
    assert_eq!(sidecar.wait_exit().code(), Some(0));
    assert_eq!(sidecar.lines().len(), 2, "no line of the access log is lost");
}

#[test]
fn a_second_signal_ends_the_drain_at_once() {
    let upstream = Upstream::silent();
    let mut sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    upstream.wait_request(0);
    sidecar.signal("TERM");
    sidecar.wait_stderr("draining");
    sidecar.signal("INT");
    // A drain that had to cut calls is an end like any other: the log tells.
    assert_eq!(sidecar.wait_exit().code(), Some(0));
    client.closed();
}

#[test]
fn a_changed_file_is_taken_without_a_signal_and_a_wrong_one_is_refused() {
    let (one, two) = (Upstream::json(result(1)), Upstream::json(result(2)));
    let (sidecar, file) = with_file(&upstream_table("one", &one));
    assert_eq!(sidecar.client().ask(&call(2).at("/two")).status(), 404);
    let both = upstream_table("one", &one) + &upstream_table("two", &two);
    replace(&file, &format!("{both}nonsense = 1\n"));
    sidecar.wait_stderr("configuration refused, the old one stays");
    assert_eq!(sidecar.client().ask(&call(1).at("/one")).text(), result(1));
    replace(&file, &format!("drain = \"1s\"\nlisten = \"127.0.0.1:9\"\n{both}"));
    sidecar.wait_stderr("configuration reloaded");
    assert_eq!(sidecar.client().ask(&call(2).at("/two")).text(), result(2));
}

#[test]
fn sighup_reads_the_file_again_and_reopens_the_access_log() {
    let (one, two) = (Upstream::json(result(1)), Upstream::json(result(2)));
    let log = "[log]\naccess = \"access.log\"\n";
    let (sidecar, file) = with_file(&format!("{log}{}", upstream_table("one", &one)));
    let access = sidecar.folder().path().join("access.log");
    sidecar.client().ask(&call(1).at("/one"));
    // Lines that are not written yet go to the new file.
    let until = tokio::time::Instant::now() + BOUND;
    while fs::read_to_string(&access).unwrap().is_empty() && tokio::time::Instant::now() < until {
        std::thread::yield_now();
    }
    fs::rename(&access, access.with_extension("1")).unwrap();
    replace(&file, &format!("{log}{}{}", upstream_table("one", &one), upstream_table("two", &two)));
    sidecar.signal("HUP");
    sidecar.wait_stderr("configuration reloaded");
    assert_eq!(sidecar.client().ask(&call(2).at("/two")).text(), result(2));
    let mut sidecar = sidecar;
    assert_eq!(sidecar.terminate().code(), Some(0));
    assert_eq!(fs::read_to_string(access.with_extension("1")).unwrap().lines().count(), 1);
    let after = fs::read_to_string(&access).unwrap();
    assert!(after.lines().count() == 1 && after.contains("\"/two\""), "{after}");
}

#[test]
fn a_secret_that_changes_is_sent_without_a_reload() {
    let upstream = Upstream::json(result(1));
    let folder = TempDir::new().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "first\n").unwrap();
    let bearer = format!("bearer = {{ file = \"{}\" }}\n", token.display());
    let (sidecar, _) = with_file(&format!("{}{bearer}", upstream_table("one", &upstream)));
    sidecar.client().ask(&call(1).at("/one"));
    assert_eq!(upstream.wait_request(0).head.field("authorization"), Some("Bearer first"));
    replace(&token, "second\n");
    sidecar.wait_stderr("secret replaced");
    sidecar.client().ask(&call(1).at("/one"));
    assert_eq!(upstream.wait_request(1).head.field("authorization"), Some("Bearer second"));
}

#[test]
fn a_unix_socket_is_served_and_gone_at_exit() {
    let upstream = Upstream::json(result(1));
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("sidecar.sock");
    let mut command = binary(&["serve", "--upstream", &upstream.url(), "--admin", ""]);
    command.arg("--listen").arg(format!("unix:{}", socket.display()));
    let mut process = Process::spawn(command);
    process.stderr.find("`listening`", |line| line.contains("listening").then_some(()));
    let answer = {
        use std::io::{Read, Write};
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        stream.write_all(&call(1).field("Connection", "close").bytes("localhost")).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(answer.ends_with(&result(1)), "{answer}");
    process.signal("TERM");
    assert_eq!(process.wait_exit(BOUND).code(), Some(0));
    assert!(!socket.exists());
}

#[test]
fn the_admin_listener_shows_metrics_and_refuses_other_pages_of_a_browser() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let open = Client::connect(&sidecar.listen);
    open.ask(&call(1));
    let metrics = sidecar.admin("GET", "/metrics").text();
    assert!(metrics.contains("mcp_sidecar_connections 1\n"), "{metrics}");
    assert_eq!(sidecar.admin("POST", "/metrics").status(), 405);
    assert_eq!(sidecar.admin("GET", "/nothing").status(), 404);
}
