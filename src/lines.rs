//! The writer that both logs share: whoever has a line puts it into a bounded buffer, and a thread of its own writes to an
//! output that may take nothing for as long as it likes.
//!
//! Promises: [`Lines::push`] never blocks beyond a short lock. Lines beyond the buffer, and lines that the output refuses,
//! are dropped and counted. An output that took half a line gets a line feed before the next one. [`Writer::close`] loses
//! nothing that was pushed before it, as long as the output takes it within [`Settings::close_within`].
//!
//! Leaves to each log what a line is, where it goes, and what is said of its [`Trouble`].

use std::{
    fmt,
    fs::File,
    io::{self, Write},
    mem,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use prometheus_client::metrics::counter::Counter;

/// How long an output that would block (a pipe that someone made non-blocking) is left alone.
const RETRY: Duration = Duration::from_millis(5);

/// What differs from log to log.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The thread's name.
    pub name: &'static str,
    /// Bytes of lines held for a slow output, those that are being written among them.
    pub buffer: usize,
    /// How long lines gather before a write.
    pub gather: Duration,
    /// How long [`Writer::close`] waits for an output that takes nothing.
    pub close_within: Duration,
    /// Says it where it can be read. A log of which lines are lost may be the one to say so: each is told once.
    pub say: fn(Trouble<'_>),
}

/// What a writer has to say of itself.
#[derive(Clone, Copy, Debug)]
pub enum Trouble<'a> {
    /// The output refuses lines. Not said again before it has taken some.
    Refused(&'a io::Error),
    /// The output takes lines, after so many were lost.
    Lost(u64),
    /// The output took too long to take the last lines.
    LeftOver,
}

/// The end that lines are pushed to.
pub struct Lines {
    settings: Settings,
    dropped: Counter,
    state: Mutex<State>,
    /// Tells the thread that there are lines, or that it is to close or reopen.
    wake: Condvar,
    /// Tells the closer that the thread has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    lines: Vec<u8>,
    /// Bytes that the thread took and has not written yet; they count against the bound.
    writing: usize,
    reopen: Option<Box<dyn FnOnce() -> Option<File> + Send>>,
    closing: bool,
    ended: bool,
}

/// Owns the writing thread. Dropped, it closes like [`Writer::close`].
#[derive(Debug)]
pub struct Writer {
    lines: Arc<Lines>,
    thread: Option<JoinHandle<()>>,
}

/// Starts the thread that writes to `output`. Lines that are lost count in `dropped`.
///
/// # Errors
///
/// No thread can be started.
pub fn start(
    output: impl Write + Send + 'static,
    settings: Settings,
    dropped: Counter,
) -> io::Result<(Arc<Lines>, Writer)> {
    let lines = Arc::new(Lines {
        settings,
        dropped,
        state: Mutex::default(),
        wake: Condvar::new(),
        ended: Condvar::new(),
    });
    let job = Job { lines: lines.clone(), output: Box::new(output), torn: false, failing: false, told: 0 };
    let thread = thread::Builder::new().name(lines.settings.name.into()).spawn(move || job.run())?;
    Ok((lines.clone(), Writer { lines, thread: Some(thread) }))
}

impl Lines {
    /// Takes a whole line, its line feed included, or counts it as dropped.
    pub fn push(&self, line: &[u8]) {
        let mut state = self.lock();
        if state.closing || state.lines.len() + state.writing + line.len() > self.settings.buffer {
            drop(state);
            self.dropped.inc();
            return;
        }
        let was_empty = state.lines.is_empty();
        state.lines.extend_from_slice(line);
        drop(state);
        if was_empty {
            self.wake.notify_one();
        }
    }

    /// Has the thread call `open` and go on in what it gives; the lines in the buffer go there. If it gives nothing the old
    /// output stays.
    pub fn reopen(&self, open: impl FnOnce() -> Option<File> + Send + 'static) {
        self.lock().reopen = Some(Box::new(open));
        self.wake.notify_one();
    }

    /// Bytes that wait for the output.
    pub fn held(&self) -> usize {
        let state = self.lock();
        state.lines.len() + state.writing
    }

    /// Lines that were lost.
    pub fn dropped(&self) -> u64 {
        self.dropped.get()
    }

    /// A poisoned lock only means that some thread panicked between two whole steps: the lines are good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for &Lines {
    /// Takes a whole line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lines").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Writer {
    /// Writes what is in the buffer and ends the thread; lines that come later are counted and dropped. Gives whether
    /// everything was written: `false` when the output takes nothing for too long. Blocks.
    pub fn close(mut self) -> bool {
        self.end(self.lines.settings.close_within)
    }

    pub(crate) fn end(&mut self, within: Duration) -> bool {
        let Some(thread) = self.thread.take() else { return true };
        let mut state = self.lines.lock();
        state.closing = true;
        self.lines.wake.notify_one();
        let waited = self.lines.ended.wait_timeout_while(state, within, |state| !state.ended);
        let ended = waited.unwrap_or_else(PoisonError::into_inner).0.ended;
        if ended {
            // It has nothing left to do but return.
            let _ = thread.join();
        } else {
            (self.lines.settings.say)(Trouble::LeftOver);
        }
        ended
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end(self.lines.settings.close_within);
    }
}

/// What the writing thread works on.
struct Job {
    lines: Arc<Lines>,
    output: Box<dyn Write + Send>,
    /// The output ends amid a line: the next batch begins with a line feed.
    torn: bool,
    /// The last batch could not be written.
    failing: bool,
    /// Lost lines that were said to be.
    told: u64,
}

impl Job {
    fn run(mut self) {
        let (mut batch, mut last) = (Vec::new(), false);
        while !last {
            last = self.take(&mut batch);
            let written = self.write(&batch);
            batch.clear();
            // One burst must not hold its memory for good.
            batch.shrink_to(64 << 10);
            // Before anything is said: there is room for it then.
            self.lines.lock().writing = 0;
            self.tell(&written);
        }
        self.lines.lock().ended = true;
        self.lines.ended.notify_all();
    }

    /// Waits for lines, lets a few gather, and takes them all into `batch`; opens what is to be written to. Gives whether
    /// that was all: nothing comes into the buffer once it closes.
    fn take(&mut self, batch: &mut Vec<u8>) -> bool {
        let Lines { settings, wake, .. } = &*self.lines;
        let called = |state: &State| state.closing || state.reopen.is_some();
        let idle = |state: &mut State| state.lines.is_empty() && !called(state);
        let state = wake.wait_while(self.lines.lock(), idle).unwrap_or_else(PoisonError::into_inner);
        let waited = wake.wait_timeout_while(state, settings.gather, |state| !called(state));
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        mem::swap(&mut state.lines, batch);
        state.writing = batch.len();
        let (reopen, closing) = (state.reopen.take(), state.closing);
        drop(state);
        if let Some(output) = reopen.and_then(|open| open()) {
            self.output = Box::new(output);
            self.torn = false;
        }
        closing
    }

    /// Writes all, or counts what is lost.
    fn write(&mut self, batch: &[u8]) -> io::Result<()> {
        let repaired = if self.torn { self.write_all(b"\n") } else { Ok(()) };
        self.torn = repaired.is_err();
        let written = repaired.map_err(|(_, error)| (0, error)).and_then(|()| self.write_all(batch));
        written.map_err(|(written, error)| {
            let lost = &batch[written..];
            self.lines.dropped.inc_by(memchr::memchr_iter(b'\n', lost).count() as u64);
            self.torn |= batch[..written].last().is_some_and(|last| *last != b'\n');
            error
        })
    }

    /// Writes all, or says how much it wrote before the error.
    fn write_all(&mut self, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
        let mut written = 0;
        while written < bytes.len() {
            match self.output.write(&bytes[written..]) {
                Ok(0) => return Err((written, io::ErrorKind::WriteZero.into())),
                Ok(more) => written += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(RETRY),
                Err(error) => return Err((written, error)),
            }
        }
        self.output.flush().map_err(|error| (written, error))
    }

    fn tell(&mut self, written: &io::Result<()>) {
        let (say, lost) = (self.lines.settings.say, self.lines.dropped());
        match written {
            Err(error) if !self.failing => say(Trouble::Refused(error)),
            Ok(()) if lost > self.told => {
                say(Trouble::Lost(lost - self.told));
                self.told = lost;
            }
            _ => {}
        }
        self.failing = written.is_err();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An output that is full after half a line, until it is emptied. Clones are one.
    #[derive(Clone, Default)]
    pub(crate) struct Full(Arc<Mutex<(Vec<u8>, bool)>>);

    impl Full {
        /// How much it takes while it is full.
        pub(crate) const HALF: usize = 10;

        /// From now on it takes everything.
        pub(crate) fn make_room(&self) {
            self.0.lock().unwrap().1 = true;
        }

        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().0.clone()).unwrap()
        }
    }

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let (taken, has_room) = &mut *self.0.lock().unwrap();
            let takes = if *has_room { bytes.len() } else { bytes.len().min(Self::HALF - taken.len()) };
            if takes == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            taken.extend_from_slice(&bytes[..takes]);
            Ok(takes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What a writer over [`Full`] said, of two lines that were lost apart and one that was not.
    #[test]
    fn a_failure_is_said_once_and_then_how_many_lines_it_cost() {
        static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let settings = Settings {
            name: "lines",
            buffer: 1000,
            gather: Duration::ZERO,
            close_within: Duration::from_secs(5),
            say: |trouble| SAID.lock().unwrap().push(format!("{trouble:?}")),
        };
        let output = Full::default();
        let (lines, writer) = start(output.clone(), settings, Counter::default()).unwrap();
        for lost in 1..=2 {
            lines.push(b"one of the lines\n");
            while lines.dropped() < lost || lines.held() > 0 {
                thread::yield_now();
            }
        }
        output.make_room();
        lines.push(b"whole\n");
        assert!(writer.close());
        assert_eq!(output.text(), "one of the\nwhole\n");
        assert_eq!(*SAID.lock().unwrap(), ["Refused(Kind(StorageFull))", "Lost(2)"]);
    }
}
