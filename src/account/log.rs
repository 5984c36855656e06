//! The access log's dedicated writer: exchanges put lines into a bounded buffer, one thread writes them.
//!
//! Promises: [`Sink::write`] never blocks and never fails an exchange. Lines beyond the buffer, and lines that
//! the output refuses, are dropped and counted. [`Writer::close`] loses nothing that was written before it, as
//! long as the output takes it within [`CLOSE_WITHIN`].

use std::{
    cell::RefCell,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use tokio::sync::mpsc;

use super::{
    Record,
    metrics::{Kind, Metrics},
    shape,
};

/// How long [`Writer::close`] waits for an output that takes nothing.
pub const CLOSE_WITHIN: Duration = Duration::from_secs(5);
/// How long lines gather before a write: a busy sidecar makes few write calls, and a tail seems immediate.
const GATHER: Duration = Duration::from_millis(2);
/// How long an output that would block (a pipe that someone made non-blocking) is left alone.
const RETRY: Duration = Duration::from_millis(5);

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
    Buffer(Arc<Shared>),
    Channel(mpsc::Sender<String>),
}

/// Owns the writing thread. Dropped, it closes like [`Writer::close`].
#[derive(Debug)]
pub struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    text: bool,
    bound: usize,
    state: Mutex<State>,
    /// Tells the thread that there are lines, or that it is to close or reopen.
    wake: Condvar,
    /// Tells the closer that the thread has ended.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The file; `None`: what was open at the start.
    file: Option<PathBuf>,
    lines: Vec<u8>,
    /// Bytes that the thread took and has not written yet; they count against the bound.
    writing: usize,
    reopen: bool,
    closing: bool,
    ended: bool,
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
        let shared = Arc::new(Shared {
            text: settings.text,
            bound: settings.buffer,
            state: Mutex::new(State { file: settings.file.clone(), ..State::default() }),
            wake: Condvar::new(),
            ended: Condvar::new(),
        });
        let job = Job {
            shared: Arc::clone(&shared),
            output: Box::new(output),
            metrics: Arc::clone(&metrics),
            torn: false,
            failing: false,
        };
        let thread = std::thread::Builder::new().name("access-log".into()).spawn(move || job.run())?;
        let sink = Self { metrics, target: Target::Buffer(Arc::clone(&shared)) };
        Ok((sink, Writer { shared, thread: Some(thread) }))
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
        let kept = LINE.with_borrow_mut(|line| {
            line.clear();
            match &self.target {
                Target::Buffer(shared) if shared.text => shape::terminal(record, line),
                _ => shape::json(record, line),
            }
            match &self.target {
                Target::Buffer(shared) => shared.push(line),
                Target::Channel(lines) => {
                    lines.try_send(String::from_utf8_lossy(line.trim_ascii_end()).into_owned()).is_ok()
                }
            }
        });
        if !kept {
            self.metrics.log_lines_dropped.inc();
        }
    }

    /// Has the writer close the file and open its path again, as after a rotation. Lines in the buffer go to the
    /// new one. If that fails the old one stays, and the diagnostic log says so. Stdout: does nothing.
    pub fn reopen(&self) {
        if let Target::Buffer(shared) = &self.target {
            let mut state = shared.lock();
            state.reopen = state.file.is_some();
            shared.wake.notify_one();
        }
    }

    /// Has the writer go on in another file (`None`: stdout), if that is another one than now. Lines in the buffer go
    /// there. If it cannot be opened the old one stays until [`Sink::reopen`], and the diagnostic log says so.
    pub fn redirect(&self, file: Option<&Path>) {
        if let Target::Buffer(shared) = &self.target {
            let mut state = shared.lock();
            if state.file.as_deref() != file {
                state.file = file.map(Path::to_path_buf);
                state.reopen = true;
                shared.wake.notify_one();
            }
        }
    }

    /// Has `metrics` show how much waits for the output.
    pub fn show_in(&self, metrics: &Metrics) {
        if let Target::Buffer(shared) = &self.target {
            let shared = Arc::clone(shared);
            let help = "Bytes of access-log lines that wait for the output.";
            metrics.measure(Kind::Gauge, "log_buffer_bytes", help, move || {
                let state = shared.lock();
                state.lines.len() + state.writing
            });
        }
    }

    /// The metrics that go with it.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }
}

impl Writer {
    /// Writes what is in the buffer and ends the thread; lines that come later are counted and dropped. Gives
    /// whether everything was written: `false` after [`CLOSE_WITHIN`], when the output takes nothing. Blocks.
    pub fn close(mut self) -> bool {
        self.end(CLOSE_WITHIN)
    }

    pub(super) fn end(&mut self, within: Duration) -> bool {
        let Some(thread) = self.thread.take() else { return true };
        let mut state = self.shared.lock();
        state.closing = true;
        self.shared.wake.notify_one();
        let waited = self.shared.ended.wait_timeout_while(state, within, |state| !state.ended);
        let ended = waited.unwrap_or_else(PoisonError::into_inner).0.ended;
        if ended {
            // It has nothing left to do but return.
            let _ = thread.join();
        } else {
            tracing::warn!("access log output takes nothing, its last lines are lost");
        }
        ended
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end(CLOSE_WITHIN);
    }
}

impl Shared {
    fn push(&self, line: &[u8]) -> bool {
        let mut state = self.lock();
        if state.closing || state.lines.len() + state.writing + line.len() > self.bound {
            return false;
        }
        let was_empty = state.lines.is_empty();
        state.lines.extend_from_slice(line);
        drop(state);
        if was_empty {
            self.wake.notify_one();
        }
        true
    }

    /// A poisoned lock only means that some thread panicked between two whole steps: the lines are good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the writing thread works on.
struct Job {
    shared: Arc<Shared>,
    output: Box<dyn Write + Send>,
    metrics: Arc<Metrics>,
    /// The output ends amid a line: the next batch begins with a line feed.
    torn: bool,
    /// The last batch could not be written: said once, not for each batch.
    failing: bool,
}

impl Job {
    fn run(mut self) {
        let mut batch = Vec::new();
        loop {
            let (reopen, last) = self.take(&mut batch);
            if let Some(file) = reopen {
                self.reopen(file.as_deref());
            }
            self.write(&batch);
            batch.clear();
            // One burst must not hold its memory for good.
            batch.shrink_to(64 << 10);
            let mut state = self.shared.lock();
            state.writing = 0;
            if last && state.lines.is_empty() {
                state.ended = true;
                drop(state);
                self.shared.ended.notify_all();
                return;
            }
        }
    }

    /// Waits for lines, lets a few gather, and takes them all into `batch`. Gives what to open
    /// instead and whether to end.
    fn take(&self, batch: &mut Vec<u8>) -> (Option<Option<PathBuf>>, bool) {
        let idle = |state: &mut State| state.lines.is_empty() && !state.reopen && !state.closing;
        let state = self.shared.lock();
        let state = self.shared.wake.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
        let gathering = |state: &mut State| !state.closing && !state.reopen;
        let waited = self.shared.wake.wait_timeout_while(state, GATHER, gathering);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        std::mem::swap(&mut state.lines, batch);
        state.writing = batch.len();
        let reopen = std::mem::take(&mut state.reopen).then(|| state.file.clone());
        (reopen, state.closing)
    }

    fn reopen(&mut self, file: Option<&Path>) {
        match open(file) {
            Ok(file) => {
                self.output = Box::new(file);
                self.torn = false;
            }
            Err(error) => tracing::error!(%error, "access log is not reopened, the old file stays"),
        }
    }

    fn write(&mut self, batch: &[u8]) {
        if batch.is_empty() {
            return;
        }
        if self.torn && self.write_all(b"\n").is_ok() {
            self.torn = false;
        }
        let Err((written, error)) = self.write_all(batch) else {
            self.failing = false;
            return;
        };
        let lost = &batch[written..];
        self.metrics.log_lines_dropped.inc_by(memchr::memchr_iter(b'\n', lost).count() as u64);
        self.torn |= written > 0 && batch[written - 1] != b'\n';
        if !self.failing {
            tracing::warn!(%error, "access log lines are lost");
        }
        self.failing = true;
    }

    /// Writes all, or says how much it wrote before the error.
    fn write_all(&mut self, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
        let mut written = 0;
        while written < bytes.len() {
            match self.output.write(&bytes[written..]) {
                Ok(0) => return Err((written, io::ErrorKind::WriteZero.into())),
                Ok(more) => written += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(RETRY),
                Err(error) => return Err((written, error)),
            }
        }
        self.output.flush().map_err(|error| (written, error))
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
