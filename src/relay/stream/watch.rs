//! The clocks of a stream: idle and maximum of its request, and how long a node may take nothing.

use std::task::{Context, Poll, ready};

use tokio::time::Instant;

use super::Pump;
use crate::{
    error::{Failure, Reason},
    relay::clocks::Clock,
};

impl Pump {
    /// The idle clock stands still while the node owes an answer, or does not read.
    pub(super) fn stand_still(&mut self) {
        let asking = self.running.as_ref().is_some_and(|running| running.awaits_node());
        let blocked = !self.backlog.is_empty() || self.assembly.waits();
        for (was, is) in [(&mut self.asking, asking), (&mut self.blocked, blocked)] {
            if *was != is {
                if is {
                    self.clocks.pause(self.now)
                } else {
                    self.clocks.resume(self.now)
                }
                *was = is;
            }
        }
    }

    /// Runs the timer; ready when the upstream has ended and the node has taken everything.
    pub(super) fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.poll_parted(cx));
            let stall = {
                let mut state = self.shared.lock();
                let drained = state.drained();
                if self.upstream.is_none() {
                    if drained {
                        return Poll::Ready(());
                    }
                    state.pump = Some(cx.waker().clone());
                }
                (!drained).then(|| state.taken + self.client_stall)
            };
            let clock = self.upstream.as_ref().and_then(|_| self.clocks.deadline()).map(|(at, _)| at);
            let linger = self.upstream.as_ref().and(self.linger);
            let Some(next) = [stall, clock, linger].into_iter().flatten().min() else {
                return Poll::Pending;
            };
            ready!(self.alarm.poll(next, self.now, cx));
            self.now = Instant::now();
            self.expired(self.now);
        }
    }

    fn expired(&mut self, now: Instant) {
        if self.upstream.is_some() {
            if let Some(clock) = self.clocks.expired(now) {
                let (reason, message) = match clock {
                    Clock::Idle => (Reason::IdleTimeout, "the upstream was silent for the idle timeout"),
                    Clock::Max => (Reason::MaxTimeout, "the call reached its maximum time"),
                };
                self.scan_rest();
                self.deliver_all();
                if self.source.answered {
                    return self.flush();
                }
                return self.fail(&Failure::unknown(reason, message));
            }
            if self.linger.is_some_and(|at| now >= at) {
                return self.end();
            }
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        if !state.drained() && now >= state.taken + self.client_stall {
            self.let_go();
            state.cut = true;
            state.mute();
            state.exchange.left = Some(now);
            state.tell();
            // An HTTP/2 stream without a window is not asked for its body any more, and holds on to it.
            state.exchange.close();
            state.end();
        }
    }
}
