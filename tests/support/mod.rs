//! What the integration tests share: the real binary ([`Sidecar`]), a scripted raw server ([`Upstream`]), a raw
//! client ([`Client`]), and the messages they exchange ([`mcp`]).
//!
//! Everything blocks on threads and sockets, waits on the thing itself, and gives up after [`BOUND`] with a panic
//! that says what was waited for. Nothing sleeps, no port is fixed.
#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    clippy::needless_pass_by_value,
    clippy::unwrap_used,
    reason = "a test that meets the unexpected has to fail"
)]

pub mod client;
pub mod frames;
pub mod http;
pub mod http2;
pub mod keyed;
pub mod mcp;
pub mod port;
pub mod process;
pub mod redis;
pub mod sidecar;
pub mod sse;
pub mod store;
pub mod tls;
pub mod upstream;

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

pub use self::{
    client::Client, http::Request, mcp::Post, port::Port, process::Process, sidecar::Sidecar,
    upstream::Upstream,
};

/// How long any wait may take before the test fails.
pub const BOUND: Duration = Duration::from_secs(10);

/// A value that one thread changes and others wait on.
#[derive(Debug, Default)]
pub struct Watched<T>(Arc<(Mutex<T>, Condvar)>);

impl<T> Clone for Watched<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Watched<T> {
    pub fn new(value: T) -> Self {
        Self(Arc::new((Mutex::new(value), Condvar::new())))
    }

    /// The value now.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the value and wakes those who wait.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let changed = change(&mut self.lock());
        self.0.1.notify_all();
        changed
    }

    /// Waits until `seen` finds what it looks for.
    ///
    /// # Panics
    /// After [`BOUND`], with `what` and what `show` makes of the value.
    pub fn wait<R>(
        &self,
        what: &str,
        show: impl Fn(&T) -> String,
        seen: impl FnMut(&mut T) -> Option<R>,
    ) -> R {
        self.wait_for(BOUND, what, show, seen)
    }

    /// The same with a bound of its own.
    pub fn wait_for<R>(
        &self,
        bound: Duration,
        what: &str,
        show: impl Fn(&T) -> String,
        mut seen: impl FnMut(&mut T) -> Option<R>,
    ) -> R {
        let end = Instant::now() + bound;
        self.wait_unbounded(|value| {
            let found = seen(value);
            let over = found.is_none() && Instant::now() >= end;
            assert!(!over, "waited {bound:?} for {what}; there is:\n{}", show(value));
            found
        })
    }

    /// The same for a script's side, which waits as long as the test runs.
    pub fn wait_unbounded<R>(&self, mut seen: impl FnMut(&mut T) -> Option<R>) -> R {
        let mut value = self.lock();
        loop {
            if let Some(found) = seen(&mut value) {
                return found;
            }
            // Woken now and then, so that a bound in `seen` is noticed.
            let turn = self.0.1.wait_timeout(value, Duration::from_millis(100));
            value = turn.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Says that it is over when it is dropped, also by a panic: so that no thread of a scope goes on for ever.
#[derive(Debug)]
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A point at which a script waits for the test.
#[derive(Clone, Debug, Default)]
pub struct Gate(Watched<usize>);

impl Gate {
    pub fn new() -> Self {
        Self(Watched::new(0))
    }

    /// Lets one waiter through, now or when it comes.
    pub fn open(&self) {
        self.0.change(|passes| *passes += 1);
    }

    /// Waits for an [`open`](Self::open) of its own.
    pub fn pass(&self) {
        self.0.wait_unbounded(|passes| {
            *passes = passes.checked_sub(1)?;
            Some(())
        });
    }
}

/// Asks again and again until `holds`; for what becomes true by itself and tells nobody.
///
/// # Panics
/// After twice [`BOUND`].
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + 2 * BOUND;
    while !holds() {
        assert!(Instant::now() < end, "waited for: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
