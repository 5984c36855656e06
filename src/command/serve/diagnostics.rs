//! The diagnostic log's writer: whoever says something puts its line into a bounded buffer, and a thread of its own writes
//! to stderr, which may take nothing for as long as it likes.
//!
//! Promises: saying something never blocks. Lines beyond the buffer, and what stderr refuses, are dropped and counted, and
//! the log says so once it goes on. [`Writer::close`] loses nothing that was said before it, as long as stderr takes it
//! within [`CLOSE_WITHIN`].
//!
//! What is no line of this log goes to stderr directly: a configuration that is wrong, a panic.

use std::{
    io::{self, Write},
    mem,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use tracing_subscriber::fmt::MakeWriter;

use crate::account::metrics::{Kind, Metrics};

/// Bytes of lines that are held for a slow stderr.
const BUFFER: usize = 1 << 20;
/// How long [`Writer::close`] waits for a stderr that takes nothing.
const CLOSE_WITHIN: Duration = Duration::from_secs(1);
/// How long a stderr that would block (a pipe that someone made non-blocking) is left alone.
const RETRY: Duration = Duration::from_millis(5);

/// The end that lines are said to. Clones are one.
#[derive(Clone, Debug)]
pub(super) struct Lines(Arc<Shared>);

/// Owns the writing thread. Dropped, it closes like [`Writer::close`].
#[derive(Debug)]
pub(super) struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    dropped: AtomicUsize,
    /// Tells the thread that there are lines, or that it is to close.
    wake: Condvar,
    /// Tells the closer that the thread has ended.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: Vec<u8>,
    /// Bytes that the thread took and has not written yet; they count against the bound.
    writing: usize,
    closing: bool,
    ended: bool,
}

/// Starts the thread that writes to `output`.
///
/// # Errors
///
/// No thread can be started.
pub(super) fn start(output: impl Write + Send + 'static) -> io::Result<(Lines, Writer)> {
    let shared = Arc::new(Shared::default());
    let job = Arc::clone(&shared);
    let thread = thread::Builder::new().name("diagnostics".into()).spawn(move || write(&job, output))?;
    Ok((Lines(Arc::clone(&shared)), Writer { shared, thread: Some(thread) }))
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = &'a Shared;

    fn make_writer(&'a self) -> Self::Writer {
        &self.0
    }
}

impl Write for &Shared {
    /// Takes a whole line, as the log gives it.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut state = self.lock();
        if state.closing || state.lines.len() + state.writing + line.len() > BUFFER {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return Ok(line.len());
        }
        let was_empty = state.lines.is_empty();
        state.lines.extend_from_slice(line);
        drop(state);
        if was_empty {
            self.wake.notify_one();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    /// A poisoned lock only means that some thread panicked between two whole steps: the lines are good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writer {
    /// Has `metrics` show what waits, and what was lost.
    pub(super) fn show_in(&self, metrics: &Metrics) {
        let shared = Arc::clone(&self.shared);
        let help = "Bytes of diagnostic lines that wait for stderr.";
        metrics.measure(Kind::Gauge, "diagnostics_buffer_bytes", help, move || {
            let state = shared.lock();
            state.lines.len() + state.writing
        });
        let shared = Arc::clone(&self.shared);
        let help = "Diagnostic lines that a slow stderr lost.";
        metrics.measure(Kind::Counter, "diagnostics_lines_dropped", help, move || {
            shared.dropped.load(Ordering::Relaxed)
        });
    }

    /// Writes what is in the buffer and ends the thread; what is said later is dropped. Waits for [`CLOSE_WITHIN`] at most.
    pub(super) fn close(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let mut state = self.shared.lock();
        state.closing = true;
        self.shared.wake.notify_one();
        let waited = self.shared.ended.wait_timeout_while(state, CLOSE_WITHIN, |state| !state.ended);
        if waited.unwrap_or_else(PoisonError::into_inner).0.ended {
            // It has nothing left to do but return.
            let _ = thread.join();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Writes until it is told to close.
fn write(shared: &Shared, mut output: impl Write) {
    let (mut batch, mut told) = (Vec::new(), 0);
    loop {
        let idle = |state: &mut State| state.lines.is_empty() && !state.closing;
        let state = shared.wake.wait_while(shared.lock(), idle);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        mem::swap(&mut state.lines, &mut batch);
        state.writing = batch.len();
        let last = state.closing;
        drop(state);
        let written = write_all(&mut output, &batch);
        if let Err(rest) = written {
            shared.dropped.fetch_add(memchr::memchr_iter(b'\n', rest).count(), Ordering::Relaxed);
        }
        let goes_on = written.is_ok();
        batch.clear();
        // One burst must not hold its memory for good.
        batch.shrink_to(64 << 10);
        shared.lock().writing = 0;
        let lost = shared.dropped.load(Ordering::Relaxed);
        if goes_on && lost > told {
            // There is room for it: what was written has made some.
            tracing::warn!(lines = lost - told, "diagnostic lines were lost, stderr took them too slowly");
            told = lost;
        }
        let mut state = shared.lock();
        if last && state.lines.is_empty() {
            state.ended = true;
            drop(state);
            shared.ended.notify_all();
            return;
        }
    }
}

/// Writes all, or gives what it could not write.
fn write_all<'a>(output: &mut impl Write, mut bytes: &'a [u8]) -> Result<(), &'a [u8]> {
    while !bytes.is_empty() {
        match output.write(bytes) {
            Ok(0) => return Err(bytes),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(RETRY),
            Err(_) => return Err(bytes),
        }
    }
    Ok(())
}
