//! Secrets come from files and from variables that the configuration names, never from flags;
//! a listener that others can reach lends an upstream's credential only where that was said (`[auth]`). A unix socket
//! counts as loopback, and is served like any other listener.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    process::Command,
};

use support::{
    BOUND, Client, Process, Sidecar, Upstream,
    mcp::{call, modern_call, progress, result},
};

fn binary(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
    command.args(arguments).env_clear();
    command
}

/// What it says when it refuses to start.
fn refused(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_flag_or_its_variable_with_a_credential_is_refused_without_repeating_it() {
    for url in
        ["http://user:hunter2@localhost/mcp", "a=https://hunter2@localhost/", "https://:hunter2@localhost/"]
    {
        let flag = binary(&["serve", "--upstream", url, "--listen", "127.0.0.1:0"]);
        let mut variable = binary(&["serve", "--listen", "127.0.0.1:0"]);
        variable.env("MCP_SIDECAR_UPSTREAM", url);
        for command in [flag, variable] {
            let told = refused(command);
            assert!(
                told.starts_with("--upstream: a credential is not taken from the command line"),
                "{told}"
            );
            assert!(!told.contains("hunter2"), "{told}");
        }
    }
    let state = ["serve", "--upstream", "http://localhost/", "--state", "redis://:hunter2@localhost/0"];
    let told = refused(binary(&state));
    assert!(told.starts_with("--state: a password is not taken from the command line"), "{told}");
    assert!(!told.contains("hunter2"), "{told}");
}

#[test]
fn in_the_file_a_credential_may_stand_and_is_sent() {
    let upstream = Upstream::json(result(1));
    let url = upstream.url().replace("http://", "http://user:hunter2@");
    let sidecar = Sidecar::with_config(&format!("[upstreams.mcp]\nurl = \"{url}\"\n"));
    assert_eq!(sidecar.client().ask(&call(1)).text(), result(1));
    let head = upstream.wait_request(0).head;
    assert_eq!(head.field("authorization"), Some("Basic dXNlcjpodW50ZXIy"));
    assert_eq!(head.field("host"), Some(upstream.address.as_str()));
}

fn serve(folder: &Path, text: &str) -> Command {
    let file = folder.join("sidecar.toml");
    fs::write(&file, text).unwrap();
    let mut command = binary(&["serve", "--config"]);
    command.arg(file).env("TOKEN", "t0ken");
    command
}

#[test]
fn a_listener_that_others_can_reach_lends_no_credential_unless_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let reachable = "listen = \"0.0.0.0:0\"\nadmin = \"\"\nstate = \"memory:\"\n";
    let bearer = "[upstreams.mcp]\nurl = \"http://127.0.0.1:1/\"\nbearer = { env = \"TOKEN\" }\n";
    let user_info = "[upstreams.mcp]\nurl = \"http://u:p@127.0.0.1:1/\"\n";
    for (upstream, key) in [(bearer, ":6: upstreams.mcp.bearer: "), (user_info, ":5: upstreams.mcp.url: ")] {
        let told = refused(serve(folder.path(), &format!("{reachable}{upstream}")));
        assert!(told.contains(key) && told.contains("set auth.bearer, or auth.open = true"), "{told}");
        assert!(!told.contains("t0ken"), "{told}");
        for allowed in [
            format!("{reachable}[auth]\nopen = true\n{upstream}"),
            format!("{reachable}[auth]\nbearer = {{ env = \"TOKEN\" }}\n{upstream}"),
            format!("{}{upstream}", reachable.replace("0.0.0.0", "127.0.0.1")),
            reachable.replace("0.0.0.0:0", &format!("unix:{}/s.sock", folder.path().display())) + upstream,
        ] {
            let mut process = Process::spawn(serve(folder.path(), &allowed));
            process.stderr.find("`listening`", |line| line.contains("listening").then_some(()));
            process.signal("TERM");
            assert_eq!(process.wait_exit(BOUND).code(), Some(0), "{allowed}");
        }
    }
}

#[test]
fn a_reload_can_not_open_the_relay_either() {
    let upstream = Upstream::json(result(1));
    let folder = tempfile::tempdir().unwrap();
    let top = "listen = \"0.0.0.0:0\"\nadmin = \"127.0.0.1:0\"\nstate = \"memory:\"\n";
    let table = format!("[upstreams.mcp]\nurl = \"{}\"\n", upstream.url());
    let command = serve(folder.path(), &format!("{top}{table}"));
    let sidecar = Sidecar::spawn(command, folder);
    let file = sidecar.folder().path().join("sidecar.toml");
    let bearer = format!("{table}bearer = {{ env = \"TOKEN\" }}\n");
    // Claiming another listener does not help: the one that is there stays.
    fs::write(&file, format!("{}{bearer}", top.replace("0.0.0.0", "127.0.0.1"))).unwrap();
    sidecar.signal("HUP");
    let said = sidecar.wait_stderr("configuration refused, the old one stays");
    assert!(said.contains("auth.open = true"), "{said}");
    let port = sidecar.listen.rsplit(':').next().unwrap();
    let client = Client::connect(&format!("127.0.0.1:{port}"));
    assert_eq!(client.ask(&call(1)).text(), result(1));
    assert_eq!(upstream.wait_request(0).head.field("authorization"), None);
}

#[test]
fn beyond_loopback_any_host_may_be_named_and_no_page_may_ask() {
    let upstream = Upstream::json(result(1));
    let folder = tempfile::tempdir().unwrap();
    let text = format!(
        "listen = \"0.0.0.0:0\"\nadmin = \"\"\nstate = \"memory:\"\n[auth]\norigins = [\"https://app.example\"]\n\
         [upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    );
    let sidecar = Sidecar::spawn(serve(folder.path(), &text), folder);
    let address = format!("127.0.0.1:{}", sidecar.listen.rsplit(':').next().unwrap());
    let status =
        |name: &str, value: &str| Client::connect(&address).ask(&call(1).field(name, value)).status();
    assert_eq!(status("Host", "sidecar.example"), 200);
    assert_eq!(status("Origin", "https://app.example"), 200);
    for origin in ["http://localhost:3000", "http://127.0.0.1", "https://other.example", "null"] {
        assert_eq!(status("Origin", origin), 403, "{origin}");
    }
    assert_eq!(upstream.count(), 2);
}

#[test]
fn over_a_unix_socket_streams_pass_and_a_hang_up_cancels() {
    let upstream = Upstream::start(|request, reply| {
        let id = request.json()["id"].clone();
        reply.sse(&[]);
        reply.event(&progress(&id, 1));
        if id == 1 {
            reply.event(&result(1));
            return reply.end();
        }
        reply.hang();
    });
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("sidecar.sock");
    let mut command = binary(&["serve", "--upstream", &upstream.url(), "--admin", "", "--state", "memory:"]);
    command.arg("--listen").arg(format!("unix:{}", socket.display()));
    let process = Process::spawn(command);
    process.stderr.find("`listening`", |line| line.contains("listening").then_some(()));
    let ask = |post: &support::Post| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream.write_all(&post.bytes("localhost")).unwrap();
        stream
    };
    let mut whole = String::new();
    ask(&call(1).field("Connection", "close")).read_to_string(&mut whole).unwrap();
    assert!(whole.contains(&result(1)) && whole.ends_with("0\r\n\r\n"), "{whole}");
    let mut open = ask(&modern_call(2));
    let mut told = String::new();
    while !told.contains(&progress(2, 1)) {
        let mut piece = [0; 1024];
        let read = open.read(&mut piece).unwrap();
        told += &String::from_utf8_lossy(&piece[..read]);
    }
    drop(open);
    let carrier = upstream.wait_request(1).connection;
    upstream.wait_closed(carrier);
    let line = process.stdout.find_json(|line| line["id"] == 2);
    assert_eq!([&line["outcome"], &line["cancelled_by"], &line["peer"]], ["cancelled", "disconnect", "unix"]);
    // A page in a browser is no node here either, and a Host that is none is turned away.
    let mut refusal = String::new();
    ask(&call(3).field("Host", "evil.example").field("Connection", "close"))
        .read_to_string(&mut refusal)
        .unwrap();
    assert!(refusal.starts_with("HTTP/1.1 421 "), "{refusal}");
}
