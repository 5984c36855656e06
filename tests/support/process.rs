//! A program under observation: its lines on stdout and stderr, its end. Dropped, it is killed.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use serde_json::Value;

use super::{BOUND, Watched};

/// The running program.
#[derive(Debug)]
pub struct Process {
    child: Child,
    pub stdout: Lines,
    pub stderr: Lines,
}

/// What one of its outputs has said.
#[derive(Clone, Debug)]
pub struct Lines(Watched<Output>);

#[derive(Debug, Default)]
struct Output {
    lines: Vec<String>,
    ended: bool,
}

impl Process {
    pub fn spawn(mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let stdout = Lines::collect(child.stdout.take().unwrap());
        let stderr = Lines::collect(child.stderr.take().unwrap());
        Self { child, stdout, stderr }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, `TERM` or `HUP`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("sh").arg("-c").arg(format!("kill -{name} {}", self.pid())).status().unwrap();
        assert!(sent.success());
    }

    /// Waits for its end; every line it wrote is there afterwards.
    pub fn wait_exit(&mut self, bound: Duration) -> ExitStatus {
        for output in [&self.stdout, &self.stderr] {
            output.0.wait_for(bound, "the program to end", show, |output| output.ended.then_some(()));
        }
        self.child.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("--- stderr of process {}\n{}", self.pid(), self.stderr.all().join("\n"));
        }
    }
}

impl Lines {
    fn collect(pipe: impl Read + Send + 'static) -> Self {
        let output = Watched::new(Output::default());
        let into = output.clone();
        thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                into.change(|output| output.lines.push(line));
            }
            into.change(|output| output.ended = true);
        });
        Self(output)
    }

    /// Every line so far.
    pub fn all(&self) -> Vec<String> {
        self.0.lock().lines.clone()
    }

    /// Every line so far, as JSON.
    pub fn json(&self) -> Vec<Value> {
        self.all().iter().map(|l| parse(l)).collect()
    }

    /// Waits until `count` lines are there.
    pub fn wait_count(&self, count: usize) -> Vec<String> {
        let enough = |output: &mut Output| (output.lines.len() >= count).then(|| output.lines.clone());
        self.0.wait(&format!("{count} lines"), show, enough)
    }

    /// Waits for a line in which `wanted` finds something.
    ///
    /// # Panics
    /// After [`BOUND`], or when the output ends without such a line.
    pub fn find<R>(&self, what: &str, wanted: impl Fn(&str) -> Option<R>) -> R {
        self.0.wait_for(BOUND, what, show, |output| {
            let found = output.lines.iter().find_map(|l| wanted(l));
            assert!(found.is_some() || !output.ended, "ended without {what}:\n{}", show(output));
            found
        })
    }

    /// Waits until `count` lines contain `text`.
    pub fn find_all(&self, text: &str, count: usize) {
        self.0.wait(&format!("{text}, {count} times"), show, |output| {
            (output.lines.iter().filter(|line| line.contains(text)).count() >= count).then_some(())
        });
    }

    /// Waits for a JSON line of which `wanted` is true.
    pub fn find_json(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        self.find("a JSON line", |line| Some(parse(line)).filter(|line| wanted(line)))
    }
}

fn show(output: &Output) -> String {
    output.lines.join("\n")
}

fn parse(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|e| panic!("{e} in the line {line}"))
}
