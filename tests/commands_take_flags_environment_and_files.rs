//! The command line of `serve`, `check` and `health`: flags, their environment variables, which of them wins, and the
//! exit codes 0 (done), 1 (failed at run time), 2 (wrong usage or configuration).
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    fs,
    net::TcpListener,
    process::{Command, Output},
};

use support::{
    Process, Sidecar, Upstream,
    mcp::{call, result},
};
use tempfile::TempDir;

/// The program with these arguments, nothing of the test run's own environment, and a state folder of its own.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MCP_SIDECAR_") {
            command.env_remove(name);
        }
    }
    command.env_remove("STATE_DIRECTORY").env_remove("RUST_LOG");
    command
}

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    told(&command(arguments).output().unwrap())
}

fn told(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path.display().to_string()
    }
}

#[test]
fn wrong_usage_is_2_and_says_what_is_wrong_on_stderr() {
    for arguments in [
        &[][..],
        &["nonsense"],
        &["serve", "--nonsense"],
        &["serve", "--upstream"],
        &["serve", "extra"],
        &["check"],
        &["check", "a", "b"],
        &["health", "nonsense"],
        &["health", "localhost"],
        // Secrets are never taken from flags.
        &["serve", "--bearer", "secret"],
        &["serve", "--token", "secret"],
    ] {
        let (code, stdout, stderr) = run(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}");
        assert!(stdout.is_empty() && !stderr.is_empty(), "{arguments:?}: {stdout}");
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
}

#[test]
fn a_configuration_that_can_not_be_served_is_2_and_names_the_key_or_flag() {
    let folder = Folder::new();
    let file = folder.write(
        "sidecar.toml",
        "listen = \"127.0.0.1:0\"\nlimts = {}\n[upstreams.a]\nurl = \"http://localhost/\"\n",
    );
    let cut = folder.write("cut.toml", "listen = \"127.0.0.1:0\"\n[upstreams");
    for (arguments, says) in [
        (&["serve"][..], "upstream"),
        (&["serve", "--upstream", "ftp://localhost/"], "--upstream"),
        (&["serve", "--upstream", "a b=http://localhost/"], "--upstream"),
        (&["serve", "--upstream", "http://localhost/", "--upstream", "http://localhost/2"], "twice"),
        (&["serve", "--upstream", "http://localhost/", "--listen", "nonsense"], "--listen"),
        (&["serve", "--upstream", "http://localhost/", "--admin", "nonsense"], "--admin"),
        (&["serve", "--upstream", "http://localhost/", "--state", "nonsense"], "--state"),
        (&["serve", "--config", "/nonexistent/sidecar.toml"], "/nonexistent/sidecar.toml"),
        (&["serve", "--config", &file], "sidecar.toml:2: limts"),
        (&["serve", "--config", &cut], "cut.toml:2:"),
    ] {
        let (code, stdout, stderr) = run(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(says) && stdout.is_empty(), "{arguments:?}: {stderr}");
    }
}

#[test]
fn what_fails_while_it_starts_is_1() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (listen, admin) in [(address.as_str(), ""), ("127.0.0.1:0", address.as_str())] {
        let (code, _, stderr) =
            run(&["serve", "--upstream", "http://localhost/", "--listen", listen, "--admin", admin]);
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains(&address), "it names the address: {stderr}");
    }
    let folder = Folder::new();
    let file = folder.write(
        "sidecar.toml",
        "listen = \"127.0.0.1:0\"\nadmin = \"\"\n[log]\naccess = \"missing/access.log\"\n[upstreams.a]\nurl = \"http://localhost/\"\n",
    );
    let (code, _, stderr) = run(&["serve", "--config", &file]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("missing/access.log"), "it names the file: {stderr}");
}

#[test]
fn help_names_every_flag_its_variable_its_default_and_the_exit_codes() {
    for (arguments, says) in [
        (
            &["serve", "--help"][..],
            &[
                "--config",
                "--listen",
                "--admin",
                "--upstream",
                "--state",
                "MCP_SIDECAR_CONFIG",
                "MCP_SIDECAR_LISTEN",
                "MCP_SIDECAR_ADMIN",
                "MCP_SIDECAR_UPSTREAM",
                "MCP_SIDECAR_STATE",
                "127.0.0.1:7080",
                "127.0.0.1:7081",
                "unix:",
                "sqlite:",
                "memory:",
                "redis",
                "SIGTERM",
                "SIGHUP",
                "Exit codes: 0",
                "1 failed",
                "2 wrong",
            ][..],
        ),
        (&["check", "--help"], &["<FILE>", "Exit codes: 0", "2 it is not"]),
        (
            &["health", "--help"],
            &["[ADDR]", "MCP_SIDECAR_ADMIN", "127.0.0.1:7081", "readyz", "Exit codes: 0"],
        ),
        (&["--help"], &["serve", "demo", "check", "health", "Exit codes: 0"]),
    ] {
        let (code, stdout, stderr) = run(arguments);
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{arguments:?}");
        for text in says {
            assert!(stdout.contains(text), "{arguments:?} says nothing of {text}:\n{stdout}");
        }
    }
    let (code, stdout, _) = run(&["--version"]);
    assert_eq!(code, Some(0));
    assert!(stdout.contains(env!("CARGO_PKG_VERSION")), "{stdout}");
}

/// A variable may hold a password in a URL: help shows names, not values.
#[test]
fn help_shows_no_value_of_the_environment_that_may_be_secret() {
    let mut command = command(&["serve", "--help"]);
    command
        .env("MCP_SIDECAR_UPSTREAM", "http://user:SECRET@localhost/")
        .env("MCP_SIDECAR_STATE", "redis://:SECRET@h/0");
    let (_, stdout, stderr) = told(&command.output().unwrap());
    assert!(!stdout.contains("SECRET") && !stderr.contains("SECRET"), "{stdout}");
}

#[test]
fn a_flag_goes_before_the_environment_and_that_before_the_file() {
    let file = Upstream::json(result(1));
    let environment = Upstream::json(result(1));
    let flag = Upstream::json(result(1));
    let folder = Folder::new();
    let text = format!(
        "listen = \"127.0.0.1:1\"\nadmin = \"127.0.0.1:1\"\n[upstreams.a]\nurl = \"{}\"\n[upstreams.b]\nurl = \"{}\"\n",
        file.url(),
        file.url()
    );
    let config = folder.write("sidecar.toml", &text);
    let of = |upstream: &Upstream| format!("a={}", upstream.url());
    for (with_environment, with_flag, expected) in
        [(false, false, &file), (true, false, &environment), (false, true, &flag), (true, true, &flag)]
    {
        let mut serve = command(&["serve"]);
        // A port that the file names can't be had: these are taken from wherever they come first.
        serve
            .env("MCP_SIDECAR_LISTEN", "127.0.0.1:0")
            .env("MCP_SIDECAR_ADMIN", "")
            .env("MCP_SIDECAR_STATE", "memory:");
        if with_environment {
            serve.env("MCP_SIDECAR_UPSTREAM", of(&environment)).env("MCP_SIDECAR_CONFIG", &config);
        } else {
            serve.args(["--config", &config]);
        }
        if with_flag {
            serve.args(["--upstream", &of(&flag), "--listen", "127.0.0.1:0"]);
            serve.env("MCP_SIDECAR_LISTEN", "nonsense");
        }
        let before = expected.count();
        let sidecar = Sidecar::spawn(serve, TempDir::new().unwrap());
        assert_eq!(sidecar.client().ask(&call(1).at("/a")).status(), 200);
        assert_eq!(expected.count(), before + 1, "environment {with_environment}, flag {with_flag}");
        assert_eq!(sidecar.client().ask(&call(1).at("/b")).status(), 200, "the rest of the file stays");
        assert_eq!(sidecar.admin, "", "the admin listener is off");
    }
    assert_eq!((environment.count(), flag.count()), (1, 2));
}

#[test]
fn the_environment_takes_several_upstreams_separated_by_spaces() {
    let (one, two) = (Upstream::json(result(1)), Upstream::json(result(1)));
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--admin", ""]);
    serve.env("MCP_SIDECAR_UPSTREAM", format!(" one={}  {}?a=b ", one.url(), two.url()));
    let sidecar = Sidecar::spawn(serve, TempDir::new().unwrap());
    assert_eq!(sidecar.client().ask(&call(1).at("/one")).status(), 200);
    assert_eq!(sidecar.client().ask(&call(1).at("/mcp")).status(), 200, "without a name it is /mcp");
    assert_eq!((one.count(), two.wait_request(0).head.line.as_str()), (1, "POST /mcp?a=b HTTP/1.1"));
}

#[test]
fn relative_paths_are_the_files_own_or_those_of_the_working_directory() {
    let folder = Folder::new();
    let upstream = Upstream::json(result(1));
    folder.write("etc/token", "a-token\n");
    folder.write(
        "etc/sidecar.toml",
        &format!(
            "[log]\naccess = \"access.log\"\n[upstreams.mcp]\nurl = \"{}\"\nbearer = {{ file = \"token\" }}\n",
            upstream.url()
        ),
    );
    let mut serve =
        command(&["serve", "--config", "etc/sidecar.toml", "--listen", "unix:listen.sock", "--admin", ""]);
    serve.current_dir(folder.0.path());
    let mut process = Process::spawn(serve);
    process.stderr.find("listening", |line| line.contains("listening").then_some(()));
    assert!(folder.0.path().join("etc/access.log").exists());
    assert!(folder.0.path().join("listen.sock").exists());
    process.signal("TERM");
    assert!(process.wait_exit(support::BOUND).success());
}

#[test]
fn check_says_ok_or_every_problem_with_its_line_key_and_reason() {
    let folder = Folder::new();
    folder.write("token", "a-token");
    let right = folder.write(
        "right.toml",
        "[auth]\nbearer = { env = \"CHECK_TOKEN\" }\n[upstreams.a]\nurl = \"https://localhost/mcp\"\nbearer = { file = \"token\" }\n",
    );
    let (code, stdout, stderr) = told(&command(&["check", &right]).env("CHECK_TOKEN", "x").output().unwrap());
    assert_eq!((code, stdout.trim(), stderr.as_str()), (Some(0), format!("{right}: ok").as_str(), ""));
    let (code, _, stderr) = run(&["check", &right]);
    assert_eq!(code, Some(2), "the secrets it names are looked for");
    assert!(stderr.contains("right.toml:2: auth.bearer: ") && stderr.contains("CHECK_TOKEN"), "{stderr}");

    let wrong = folder.write(
        "wrong.toml",
        "listen = \"nowhere\"\n[limits]\nrequst_body = \"1MiB\"\nbody_timeout = \"30\"\n[upstreams.a]\nurl = \"x\"\n\
         [upstreams.a.tls]\nca = \"missing.pem\"\n[upstreams.b]\nurl = \"https://localhost/\"\nbearer = \"plain text\"\n",
    );
    let (code, stdout, stderr) = run(&["check", &wrong]);
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    for says in [
        ":1: listen: ",
        ":3: limits.requst_body: ",
        "request_body",
        ":4: limits.body_timeout: ",
        ":6: upstreams.a.url: ",
        ":11: upstreams.b.bearer: ",
    ] {
        assert!(stderr.contains(says), "nothing of {says}:\n{stderr}");
    }
    assert!(!stderr.contains("plain text"), "a secret is not repeated: {stderr}");
    let certificate = folder.write(
        "tls.toml",
        "[upstreams.a]\nurl = \"https://localhost/\"\n[upstreams.a.tls]\nca = \"missing.pem\"\n",
    );
    let (code, _, stderr) = run(&["check", &certificate]);
    assert!(
        code == Some(2) && stderr.contains("tls.toml:3: upstreams.a.tls: ") && stderr.contains("missing.pem"),
        "{stderr}"
    );
    assert_eq!(run(&["check", "/nonexistent.toml"]).0, Some(2));
}

#[test]
fn a_credential_is_not_lent_to_whoever_reaches_the_listener() {
    let folder = Folder::new();
    folder.write("token", "a-token");
    let upstream = Upstream::json(result(1));
    let text = |auth: &str| {
        format!(
            "listen = \"0.0.0.0:0\"\nadmin = \"\"\n{auth}[upstreams.mcp]\nurl = \"{}\"\nbearer = {{ file = \"token\" }}\n",
            upstream.url()
        )
    };
    let closed = folder.write("closed.toml", &text(""));
    for arguments in [&["serve", "--config", &closed][..], &["check", &closed]] {
        let (code, _, stderr) = run(arguments);
        assert!(code == Some(2) && stderr.contains("upstreams.mcp.bearer"), "{code:?} {stderr}");
    }
    for (number, auth) in
        ["[auth]\nopen = true\n", "[auth]\nbearer = { file = \"token\" }\n"].iter().enumerate()
    {
        let open = folder.write(&format!("open-{number}.toml"), &text(auth));
        assert_eq!(run(&["check", &open]).0, Some(0), "{auth}");
        let _started = Sidecar::spawn(command(&["serve", "--config", &open]), TempDir::new().unwrap());
    }
}

#[test]
fn health_asks_the_admin_listener_and_tells_by_its_exit_code() {
    let upstream = Upstream::silent();
    let mut sidecar = Sidecar::before(&upstream);
    let (code, stdout, _) = run(&["health", &sidecar.admin]);
    assert_eq!((code, stdout.trim()), (Some(0), "ok"));
    let (code, ..) = told(&command(&["health"]).env("MCP_SIDECAR_ADMIN", &sidecar.admin).output().unwrap());
    assert_eq!(code, Some(0), "the address may come from the environment");
    let port = sidecar.admin.rsplit(':').next().unwrap().to_owned();
    assert_eq!(run(&["health", &format!("localhost:{port}")]).0, Some(0));
    assert_eq!(upstream.connections().len(), 0, "no upstream is asked");

    let client = sidecar.client();
    client.send(&call(1));
    upstream.wait_request(0);
    sidecar.signal("TERM");
    sidecar.wait_stderr("draining");
    let (code, _, stderr) = run(&["health", &sidecar.admin]);
    assert!(code == Some(1) && stderr.contains("503") && stderr.contains("draining"), "{code:?} {stderr}");
    client.close();
    assert!(sidecar.wait_exit().success());
    let (code, _, stderr) = run(&["health", &sidecar.admin]);
    assert!(code == Some(1) && stderr.contains(&sidecar.admin), "nobody is there: {stderr}");
}

#[test]
fn health_asks_a_unix_socket_too_and_takes_no_other_server_for_ready() {
    let folder = Folder::new();
    let upstream = Upstream::json("{}");
    let admin = format!("unix:{}", folder.0.path().join("admin.sock").display());
    let serve =
        command(&["serve", "--listen", "127.0.0.1:0", "--admin", &admin, "--upstream", &upstream.url()]);
    let _sidecar = Sidecar::spawn(serve, TempDir::new().unwrap());
    assert_eq!(run(&["health", &admin]).0, Some(0));
    let ill = Upstream::start(|_, reply| {
        reply.json(500, &[], "{}");
        reply.break_off();
    });
    let mute = Upstream::by_connection(|reply| reply.break_off());
    let odd = Upstream::by_connection(|reply| {
        reply.raw("SSH-2.0-OpenSSH\r\n");
        reply.break_off();
    });
    for other in [ill, mute, odd] {
        let (code, _, stderr) = run(&["health", &other.address]);
        assert!(code == Some(1) && !stderr.is_empty(), "{code:?} {stderr}");
    }
}

#[test]
fn the_end_is_0_also_after_a_drain_that_had_to_cut_calls() {
    let idle = Upstream::json(result(1));
    for signal in ["TERM", "INT"] {
        let mut sidecar = Sidecar::before(&idle);
        sidecar.client().ask(&call(1));
        sidecar.signal(signal);
        assert_eq!(sidecar.wait_exit().code(), Some(0), "{signal}");
    }
    let silent = Upstream::silent();
    let mut sidecar =
        Sidecar::with_config(&format!("drain = \"300ms\"\n[upstreams.mcp]\nurl = \"{}\"\n", silent.url()));
    let client = sidecar.client();
    client.send(&call(1));
    silent.wait_request(0);
    assert_eq!(sidecar.terminate().code(), Some(0));
    assert_eq!(client.response().json()["error"]["data"]["reason"], "draining");
    let line = sidecar.wait_line(|line| line["tool"] == "slow");
    assert_eq!((&line["outcome"], &line["cancelled_by"]), (&"cancelled".into(), &"drain".into()), "{line}");
}

/// Nothing but access-log lines goes to stdout, and where it listens is said once.
#[test]
fn stdout_is_the_access_logs_alone() {
    let upstream = Upstream::json(result(1));
    let mut sidecar = Sidecar::before(&upstream);
    sidecar.client().ask(&call(1));
    assert!(sidecar.terminate().success());
    let lines = sidecar.lines();
    assert_eq!((lines.len(), &lines[0]["tool"]), (1, &"slow".into()));
    assert_eq!(sidecar.stderr().matches("\"listening\"").count(), 1, "{}", sidecar.stderr());
    for line in sidecar.stderr().lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    }
}
