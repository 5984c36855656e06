//! The clock of request heads on HTTP/1.1.
//!
//! hyper's own runs from the end of the response before, so a bound short enough against slow clients would close
//! connections that only wait for their next request. This one is as long as hyper says until a byte of the head has
//! come, and from then on as long as a head may take.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use hyper::rt;
use tokio::time::{Instant, Sleep, sleep_until};

use super::io::BytesRead;

/// Gives hyper its timers.
#[derive(Clone, Debug)]
pub(super) struct HeadTimer {
    read: BytesRead,
    /// The first head's first bytes came before hyper was there.
    first: Arc<AtomicBool>,
    header_timeout: Duration,
}

impl HeadTimer {
    pub(super) fn new(read: BytesRead, header_timeout: Duration) -> Self {
        Self { read, first: Arc::new(AtomicBool::new(true)), header_timeout }
    }

    fn head(&self, deadline: Instant) -> Pin<Box<dyn rt::Sleep>> {
        let mut sleep = HeadSleep {
            timer: Box::pin(sleep_until(deadline)),
            read: self.read.clone(),
            before: self.read.get(),
            began: false,
            header_timeout: self.header_timeout,
        };
        if self.first.swap(false, Ordering::Relaxed) {
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
