//! The clock of request heads on HTTP/1.1, and what it tells of hyper.
//!
//! hyper's own runs from the end of the response before, so a bound short enough against slow clients would close
//! connections that only wait for their next request. This one is as long as hyper says until a byte of the head has
//! come, and from then on as long as a head may take.
//!
//! hyper takes a timer when it begins to read a head, and drops it once it has one: that is how [`Turn`] knows whether
//! a write is an answer of the service, or one that hyper gives by itself to what it could not read.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use hyper::rt;
use tokio::time::{Instant, Sleep, sleep_until};

use super::io::BytesRead;

/// What hyper is about on a connection. One task drives both it and what is told here, so nothing is ordered by this.
#[derive(Clone, Debug)]
pub(super) struct Turn(Arc<About>);

#[derive(Debug, Default)]
struct About {
    hyper: AtomicU8,
    /// Something of an answer is still with hyper.
    unflushed: AtomicBool,
}

/// Nothing was read yet.
const FRESH: u8 = 0;
/// It has bytes of a head to read.
const READING: u8 = 1;
/// It has read all that came of a head, and waits for more.
const WAITING: u8 = 2;
/// It has a head, and the exchange is not over.
const SERVING: u8 = 3;

impl Turn {
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    /// What hyper finds that takes a connection again: it waits for the next head, of which these bytes have come.
    pub(super) fn again(read: &[u8]) -> Self {
        let turn = Self::new();
        if read.is_empty() {
            turn.end();
        }
        turn
    }

    /// hyper has asked for bytes, and got some or none.
    pub(super) fn read(&self, some: bool) {
        if matches!(self.0.hyper.load(Ordering::Relaxed), READING | WAITING) {
            self.0.hyper.store(if some { READING } else { WAITING }, Ordering::Relaxed);
        }
    }

    /// Asked where hyper writes: whether it has given up on what it read. Otherwise it would first have asked for more, or
    /// have a head.
    pub(super) fn has_failed(&self) -> bool {
        self.0.hyper.load(Ordering::Relaxed) == READING
    }

    /// It begins to read a head. True for the first one.
    pub(super) fn begin(&self) -> bool {
        self.0.hyper.swap(READING, Ordering::Relaxed) == FRESH
    }

    /// It has the head, or has given up waiting.
    pub(super) fn end(&self) {
        self.0.hyper.store(SERVING, Ordering::Relaxed);
    }

    pub(super) fn is_unflushed(&self) -> bool {
        self.0.unflushed.load(Ordering::Relaxed)
    }

    pub(super) fn set_unflushed(&self, unflushed: bool) {
        self.0.unflushed.store(unflushed, Ordering::Relaxed);
    }
}

/// Gives hyper its timers.
#[derive(Clone, Debug)]
pub(super) struct HeadTimer {
    read: BytesRead,
    turn: Turn,
    header_timeout: Duration,
}

impl HeadTimer {
    pub(super) fn new(read: BytesRead, turn: Turn, header_timeout: Duration) -> Self {
        Self { read, turn, header_timeout }
    }

    fn head(&self, deadline: Instant) -> Pin<Box<dyn rt::Sleep>> {
        let mut sleep = HeadSleep {
            timer: Box::pin(sleep_until(deadline)),
            read: self.read.clone(),
            before: self.read.get(),
            began: false,
            turn: self.turn.clone(),
            header_timeout: self.header_timeout,
        };
        if self.turn.begin() {
            // The first head's first bytes came before hyper was there.
            sleep.begin();
        }
        Box::pin(sleep)
    }
}

impl rt::Timer for HeadTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn rt::Sleep>> {
        self.head(Instant::now() + duration)
    }

    #[allow(
        clippy::disallowed_types,
        reason = "hyper's trait is in terms of the type that is otherwise banned"
    )]
    fn sleep_until(&self, deadline: std::time::Instant) -> Pin<Box<dyn rt::Sleep>> {
        self.head(Instant::from_std(deadline))
    }

    #[allow(
        clippy::disallowed_types,
        reason = "hyper's trait is in terms of the type that is otherwise banned"
    )]
    fn now(&self) -> std::time::Instant {
        Instant::now().into_std()
    }
}

struct HeadSleep {
    timer: Pin<Box<Sleep>>,
    read: BytesRead,
    before: u64,
    began: bool,
    turn: Turn,
    header_timeout: Duration,
}

impl HeadSleep {
    fn begin(&mut self) {
        self.began = true;
        self.timer.as_mut().reset(Instant::now() + self.header_timeout);
    }
}

impl rt::Sleep for HeadSleep {}

impl Future for HeadSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // hyper polls this after each read that did not complete the head.
        if !self.began && self.read.get() != self.before {
            self.begin();
        }
        self.timer.as_mut().poll(cx)
    }
}

impl Drop for HeadSleep {
    fn drop(&mut self) {
        self.turn.end();
    }
}
