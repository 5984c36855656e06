//! The real binary under test, with its log lines and its numbers in `/proc`.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    process::{Command, ExitStatus},
};

use serde_json::Value;
use tempfile::TempDir;
use tokio::time::Instant;

use super::{
    BOUND, Client, Process, Upstream,
    http::{Body, Head, Response},
};

/// A running `mcp-sidecar serve`. Dropped, it is killed.
#[derive(Debug)]
pub struct Sidecar {
    process: Process,
    /// Where nodes connect, `HOST:PORT`.
    pub listen: String,
    /// The admin listener.
    pub admin: String,
    folder: TempDir,
}

impl Sidecar {
    /// In front of one upstream, served at `/mcp`, everything else at its default.
    pub fn before(upstream: &Upstream) -> Self {
        Self::with_flags(&["--upstream", &upstream.url()])
    }

    /// With a configuration file of that text.
    pub fn with_config(toml: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("sidecar.toml");
        fs::write(&file, toml).unwrap();
        let mut command = Self::command(&folder);
        command.arg("--config").arg(&file);
        Self::spawn(command, folder)
    }

    /// With these flags of `serve`.
    pub fn with_flags(flags: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let mut command = Self::command(&folder);
        command.args(flags);
        Self::spawn(command, folder)
    }

    /// The command that the others run: free ports, state in `folder`, nothing taken from the environment of the
    /// test run. To be changed and given to [`spawn`](Self::spawn).
    pub fn command(folder: &TempDir) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("MCP_SIDECAR_") {
                command.env_remove(name);
            }
        }
        command.env("XDG_STATE_HOME", folder.path()).env_remove("STATE_DIRECTORY").env_remove("RUST_LOG");
        command
    }

    /// Starts it and waits until it says where it listens.
    pub fn spawn(command: Command, folder: TempDir) -> Self {
        let process = Process::spawn(command);
        let line = process.stderr.find("`listening`", |l| l.contains("listening").then(|| l.to_owned()));
        let listen = field(&line, "listen").unwrap_or_default();
        let admin = field(&line, "admin").unwrap_or_default();
        Self { process, listen, admin, folder }
    }

    /// The URL of an endpoint, `path` with its slash.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.listen)
    }

    /// The folder of its state and its configuration.
    pub fn folder(&self) -> &TempDir {
        &self.folder
    }

    /// A new connection to it.
    pub fn client(&self) -> Client {
        Client::connect(&self.listen)
    }

    /// Every access-log line so far.
    pub fn lines(&self) -> Vec<Value> {
        self.process.stdout.json()
    }

    /// Waits for an access-log line of which `wanted` is true.
    pub fn wait_line(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        self.process.stdout.find_json(wanted)
    }

    /// Waits until `count` access-log lines are there.
    pub fn wait_lines(&self, count: usize) -> Vec<Value> {
        self.process.stdout.wait_count(count);
        self.lines()
    }

    /// What it has written to stderr so far.
    pub fn stderr(&self) -> String {
        self.process.stderr.all().join("\n")
    }

    /// Waits for a line on stderr that contains `text`.
    pub fn wait_stderr(&self, text: &str) -> String {
        self.process.stderr.find(text, |line| line.contains(text).then(|| line.to_owned()))
    }

    /// Waits until `count` lines on stderr contain `text`.
    pub fn wait_said(&self, text: &str, count: usize) {
        self.process.stderr.find_all(text, count);
    }

    /// A request of the admin listener.
    pub fn admin(&self, method: &str, path: &str) -> Response {
        let mut stream = TcpStream::connect(&self.admin).unwrap();
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.admin)
            .unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let head = Head::read(&bytes).unwrap();
        let body = Body::read(&head, &bytes[head.len..], true).bytes;
        Response { head, body }
    }

    /// The value of a sample of the metrics page, its labels as they are written; none that is not shown.
    pub fn sample(&self, name: &str) -> Option<f64> {
        let page = self.admin("GET", "/metrics").text();
        page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    }

    /// The value of a sample that counts something.
    pub fn metric(&self, name: &str) -> usize {
        let value = self.sample(name).unwrap_or_else(|| panic!("no {name}"));
        format!("{value}").parse().unwrap_or_else(|_| panic!("{name} is {value}"))
    }

    /// Waits until a sample is as `wanted`.
    pub fn wait_metric(&self, name: &str, wanted: impl Fn(usize) -> bool) {
        let end = Instant::now() + BOUND;
        while !wanted(self.metric(name)) {
            assert!(Instant::now() < end, "{name} is {}", self.metric(name));
            std::thread::yield_now();
        }
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends a signal, `TERM` or `HUP`.
    pub fn signal(&self, name: &str) {
        self.process.signal(name);
    }

    /// Sends SIGTERM and waits for the end.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal("TERM");
        self.process.wait_exit(BOUND)
    }

    /// Waits for the end; every line it wrote is there afterwards.
    pub fn wait_exit(&mut self) -> ExitStatus {
        self.process.wait_exit(BOUND)
    }

    /// Open file descriptors.
    pub fn fds(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    pub fn threads(&self) -> usize {
        self.status("Threads:")
    }

    /// Resident memory in KiB.
    pub fn rss_kib(&self) -> usize {
        self.status("VmRSS:")
    }

    fn status(&self, name: &str) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }
}

/// A field of a diagnostic line, in its text form (`name=value`) or as JSON.
fn field(line: &str, name: &str) -> Option<String> {
    if let Ok(json) = serde_json::from_str::<Value>(line) {
        let value = json.get("fields").and_then(|f| f.get(name)).or_else(|| json.get(name))?;
        return Some(value.as_str()?.to_owned());
    }
    let value = line.split_once(&format!("{name}="))?.1;
    Some(value.split_whitespace().next()?.trim_matches('"').to_owned())
}
