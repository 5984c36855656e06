//! The access log: each exchange puts its line into a bounded buffer, which one thread writes.
//!
//! Promises: [`Sink::write`] never blocks and never fails an exchange. What becomes of the lines, [`lines`] promises.

use std::{
    cell::RefCell,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::mpsc;

use super::{
    Record, line,
    metrics::{Kind, Metrics},
    shape,
};
use crate::lines::{self, Lines, Trouble, Writer};

/// How long [`Writer::close`] waits for an output that takes nothing.
pub const CLOSE_WITHIN: Duration = Duration::from_secs(5);
/// How long lines gather before a write. Each write wakes the thread twice, which a few lines a millisecond should share;
/// a tail still seems immediate.
const GATHER: Duration = Duration::from_millis(10);

/// Where lines go, and in which form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `None`: stdout. A file is reopened by [`Sink::reopen`].
    pub file: Option<PathBuf>,
    /// For a terminal instead of JSON.
    pub text: bool,
    /// Bytes of lines held for a slow output; lines beyond are counted and dropped.
    pub buffer: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { file: None, text: false, buffer: 4 << 20 }
    }
}

/// The end that exchanges write to. Clones are one sink.
#[derive(Clone, Debug)]
pub struct Sink {
    metrics: Arc<Metrics>,
    target: Target,
}

#[derive(Clone, Debug)]
enum Target {
    Output(Arc<Output>),
    Channel(mpsc::Sender<String>),
}

#[derive(Debug)]
struct Output {
    lines: Arc<Lines>,
    text: bool,
    /// What is written to, or was to be opened; `None`: what was open at the start.
    file: Mutex<Option<PathBuf>>,
}

impl Sink {
    /// Opens the output and starts the writing thread.
    ///
    /// # Errors
    ///
    /// The file cannot be opened (the error names it), or no thread can be started.
    pub fn open(settings: &Settings, metrics: Arc<Metrics>) -> io::Result<(Self, Writer)> {
        Self::start(open(settings.file.as_deref())?, settings, metrics)
    }

    /// The same over an output that is already open; `settings.file` is what [`Sink::reopen`] opens.
    ///
    /// # Errors
    ///
    /// No thread can be started.
    pub fn start(
        output: impl Write + Send + 'static,
        settings: &Settings,
        metrics: Arc<Metrics>,
    ) -> io::Result<(Self, Writer)> {
        let (buffer, dropped) = (settings.buffer, metrics.log_lines_dropped.clone());
        let writer =
            lines::Settings { name: "access-log", buffer, gather: GATHER, close_within: CLOSE_WITHIN, say };
        let (lines, writer) = lines::start(output, writer, dropped)?;
        let output = Output { lines, text: settings.text, file: Mutex::new(settings.file.clone()) };
        Ok((Self { metrics, target: Target::Output(Arc::new(output)) }, writer))
    }

    /// A sink whose JSON lines (without their line feed) are received in this process: for the demo and for tests.
    /// Lines beyond `capacity` that nobody received are counted and dropped.
    pub fn lines(capacity: usize, metrics: Arc<Metrics>) -> (Self, mpsc::Receiver<String>) {
        let (sender, receiver) = mpsc::channel(capacity);
        (Self { metrics, target: Target::Channel(sender) }, receiver)
    }

    /// Puts a line into the buffer. Never blocks beyond a short lock.
    pub fn write(&self, record: &Record) {
        thread_local!(static LINE: RefCell<Vec<u8>> = RefCell::new(Vec::with_capacity(1024)));
        LINE.with_borrow_mut(|bytes| {
            bytes.clear();
            match &self.target {
                Target::Output(output) => {
                    if output.text {
                        shape::terminal(record, bytes)
                    } else {
                        line::json(record, bytes)
                    }
                    output.lines.push(bytes);
                }
                Target::Channel(lines) => {
                    line::json(record, bytes);
                    let line = String::from_utf8_lossy(bytes.trim_ascii_end()).into_owned();
                    if lines.try_send(line).is_err() {
                        self.metrics.log_lines_dropped.inc();
                    }
                }
            }
        });
    }

    /// Has the writer close the file and open its path again, as after a rotation. Lines in the buffer go to the
    /// new one. If that fails the old one stays, and the diagnostic log says so. Stdout: does nothing.
    pub fn reopen(&self) {
        if let Target::Output(output) = &self.target {
            let file = output.file();
            if file.is_some() {
                output.reopen(&file);
            }
        }
    }

    /// Has the writer go on in another file (`None`: stdout), if that is another one than now. Lines in the buffer go
    /// there. If it cannot be opened the old one stays until [`Sink::reopen`], and the diagnostic log says so.
    pub fn redirect(&self, file: Option<&Path>) {
        if let Target::Output(output) = &self.target {
            let mut current = output.file();
            if current.as_deref() != file {
                *current = file.map(Path::to_path_buf);
                output.reopen(&current);
            }
        }
    }

    /// Has `metrics` show how much waits for the output.
    pub fn show_in(&self, metrics: &Metrics) {
        if let Target::Output(output) = &self.target {
            let output = Arc::clone(output);
            let help = "Bytes of access-log lines that wait for the output.";
            metrics.measure(Kind::Gauge, "log_buffer_bytes", help, move || output.lines.held());
        }
    }

    /// The metrics that go with it.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }
}

impl Output {
    /// A poisoned lock only means that some thread panicked between two whole steps: the path is good.
    fn file(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reopen(&self, file: &Option<PathBuf>) {
        let file = file.clone();
        self.lines.reopen(move || {
            let unopened =
                |error: &_| tracing::error!(%error, "access log is not reopened, the old file stays");
            open(file.as_deref()).inspect_err(unopened).ok()
        });
    }
}

fn say(trouble: Trouble<'_>) {
    match trouble {
        Trouble::Refused(error) => tracing::warn!(%error, "access log lines are lost"),
        Trouble::LeftOver => tracing::warn!("access log output takes nothing, its last lines are lost"),
        // A counter shows them.
        Trouble::Lost(_) => {}
    }
}

fn open(file: Option<&Path>) -> io::Result<File> {
    let Some(path) = file else {
        // A file of its own, so that the writer holds no lock that `println!` waits for.
        return Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?));
    };
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}
