//! Waiting for an upstream while everything that may end the exchange is watched.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::Poll,
};

use tokio::time::{Instant, sleep_until};

use crate::{
    inflight::Running,
    relay::clocks::{Clock, Clocks},
    server::Peer,
};

/// What came instead of the upstream's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// The exchange is to be closed: a cancel, a drain, an operator.
    Closed,
    /// A clock ran out.
    Clock(Clock),
    /// The node is gone.
    Gone,
}

/// Awaits `work`, or what cuts it short. Dropping the work, which is the caller's, is what closes the upstream's stream.
pub(super) async fn race<T>(
    mut work: Pin<&mut impl Future<Output = T>>,
    running: Option<&Running>,
    clocks: &Clocks,
    peer: &Peer,
) -> Result<T, Cut> {
    let mut gone = pin!(peer.closed());
    let deadline = clocks.deadline();
    // Never polled where there is no deadline.
    let mut timer = pin!(sleep_until(deadline.map_or_else(Instant::now, |(at, _)| at)));
    poll_fn(|cx| {
        if let Poll::Ready(done) = work.as_mut().poll(cx) {
            return Poll::Ready(Ok(done));
        }
        if running.is_some_and(|running| running.poll_closed(cx).is_ready()) {
            return Poll::Ready(Err(Cut::Closed));
        }
        if let Some((_, clock)) = deadline
            && timer.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(Cut::Clock(clock)));
        }
        gone.as_mut().poll(cx).map(|()| Err(Cut::Gone))
    })
    .await
}
