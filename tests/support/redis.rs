//! A real Redis server of one test's own, gone with it.

use std::{
    io::{BufRead, BufReader},
    net::TcpListener,
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

/// The server. Every write is in its file before it is answered, so that it can be killed and started again.
#[derive(Debug)]
pub struct Redis {
    process: Child,
    port: u16,
    folder: TempDir,
    options: Vec<String>,
}

impl Redis {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// With these options too.
    pub fn start_with(options: &[&str]) -> Self {
        let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        let folder = TempDir::new().unwrap();
        // Between our look for a free port and its use another may take it: then the server ends, and we look again.
        for _ in 0..20 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            if let Some(process) = run(&folder, port, &options) {
                return Self { process, port, folder, options };
            }
        }
        panic!("no redis-server would start");
    }

    /// As `--state` takes it.
    pub fn state(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port)
    }

    /// Where it listens.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub fn start_again(&mut self) {
        self.process = run(&self.folder, self.port, &self.options).expect("it starts on its port again");
    }

    /// Sends a signal, `STOP` or `CONT`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.process.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }
}

fn run(folder: &TempDir, port: u16, options: &[String]) -> Option<Child> {
    let mut process = Command::new("redis-server")
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync", "always"])
        .args(["--loglevel", "notice", "--port", &port.to_string()])
        .args(options)
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .expect("these tests need redis-server: tests/run installs it");
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
    let is_ready = lines.any(|line| line.contains("Ready to accept connections"));
    if is_ready {
        // Its log must not block it.
        std::thread::spawn(move || lines.count());
        return Some(process);
    }
    process.wait().unwrap();
    None
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
