//! The diagnostic log goes to stderr, which may be a pipe that nobody reads: exchanges go on, lines beyond the buffer are
//! counted and told, and the process ends all the same.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use serde_json::Value;
use support::{
    BOUND, Client, Post, Upstream,
    mcp::{call, result},
};
use tempfile::TempDir;
use tokio::time::Instant;

/// More than a pipe takes, and enough of them more than is held.
const LINES: usize = 2000;
const DROPPED: &str = "mcp_sidecar_diagnostics_lines_dropped_total";
const HELD: &str = "mcp_sidecar_diagnostics_buffer_bytes";

/// The program, whose stderr is read only when a test wants it to be.
struct Silent {
    child: Child,
    stderr: Option<BufReader<ChildStderr>>,
    listen: String,
    admin: String,
    _folder: TempDir,
}

impl Silent {
    fn before(upstream: &Upstream) -> Self {
        let folder = TempDir::new().unwrap();
        let config = format!("[log]\nlevel = \"debug\"\n[upstreams.mcp]\nurl = \"{}\"\n", upstream.url());
        let file = folder.path().join("sidecar.toml");
        std::fs::write(&file, config).unwrap();
        let mut command = support::Sidecar::command(&folder);
        command.arg("--config").arg(&file);
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let listening = loop {
            let mut line = String::new();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "it ended");
            let line: Value = serde_json::from_str(&line).unwrap();
            if line["fields"]["message"] == "listening" {
                break line;
            }
        };
        let at = |name: &str| listening["fields"][name].as_str().unwrap().to_owned();
        let (listen, admin) = (at("listen"), at("admin"));
        Self { child, stderr: Some(stderr), listen, admin, _folder: folder }
    }

    /// Has it say [`LINES`] lines.
    fn say(&self) {
        let listing = Post::legacy(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#);
        assert_eq!(Client::connect(&self.listen).ask(&listing).status(), 200);
    }

    fn metric(&self, name: &str) -> usize {
        let post = Post { method: "GET", ..Post::new("").at("/metrics") };
        let page = Client::connect(&self.admin).ask(&post).text();
        page.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().parse().unwrap()
    }

    /// Says more and more, until some of it is lost; gives how many lines that were.
    fn fill(&self) -> usize {
        let mut said = 0;
        while self.metric(DROPPED) == 0 {
            assert!(said < 100 * LINES, "the buffer has no bound");
            self.say();
            said += LINES;
        }
        said
    }

    fn terminate(&self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    }

    fn wait_exit(&mut self) -> ExitStatus {
        let end = Instant::now() + BOUND;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "it does not end");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Its listing has tools without a name, for each of which there is a line at `debug`.
fn upstream() -> Upstream {
    let tools = vec!["{}"; LINES].join(",");
    let listing = format!(r#"{{"jsonrpc":"2.0","id":1,"result":{{"tools":[{tools}]}}}}"#);
    Upstream::start(move |request, reply| match request.json()["method"] == "tools/list" {
        true => reply.json(200, &[], &listing),
        false => reply.json(200, &[], &result(1)),
    })
}

#[test]
fn calls_pass_and_the_process_ends_while_nobody_reads() {
    let upstream = upstream();
    let mut sidecar = Silent::before(&upstream);
    sidecar.fill();
    let node = Client::connect(&sidecar.listen);
    for _ in 0..10 {
        assert_eq!(node.ask(&call(1)).json()["id"], 1);
        sidecar.say();
    }
    sidecar.terminate();
    assert!(sidecar.wait_exit().success());
}

#[test]
fn whoever_reads_again_reads_whole_lines_up_to_the_last_and_how_many_were_lost() {
    let upstream = upstream();
    let mut sidecar = Silent::before(&upstream);
    let said = sidecar.fill();
    let lost = sidecar.metric(DROPPED);
    assert!((1000 * 1000..=1 << 20).contains(&sidecar.metric(HELD)), "{}", sidecar.metric(HELD));
    let mut stderr = sidecar.stderr.take().unwrap();
    let reading = thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        text
    });
    support::until("all is written", || sidecar.metric(HELD) == 0);
    sidecar.terminate();
    assert!(sidecar.wait_exit().success());
    let text = reading.join().unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let messages = |text: &str| lines.iter().filter(|line| line["fields"]["message"] == *text).count();
    assert_eq!(messages("a tool without a usable name is not learnt"), said - lost);
    assert_eq!(messages("draining"), 1);
    let told = lines.iter().find(|line| line["fields"]["lines"].is_u64()).unwrap();
    assert_eq!(told["fields"]["lines"], lost);
}
