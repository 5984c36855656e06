//! The node's side of a stream: gives what the queue lets out, and a comment when nothing goes out for too long.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::Frame;
use tokio::{task::AbortHandle, time::Instant};

use super::{Pump, Shared};
use crate::{
    account::Outcome,
    relay::{alarm::Alarm, body::BoxError},
    server::Peer,
};

/// What keeps an idle stream alive: a comment and an empty line (WHATWG HTML § 9.2.7).
const KEEPALIVE: &[u8] = b":\n\n";

/// What is polled on the node's side.
pub(crate) struct StreamBody {
    /// Polled with the body; `None` once it has ended, or has a task of its own.
    pump: Option<Pump>,
    task: Option<AbortHandle>,
    /// Whoever writes the body polls the pump too.
    beside: bool,
    shared: Arc<Shared>,
    keepalive: Duration,
    sent: Instant,
    /// When there is something for the node although nothing comes.
    next: Option<Instant>,
    alarm: Alarm,
    gone: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    peer: Peer,
}

impl http_body::Body for StreamBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if !this.beside {
            this.detach();
        }
        // What is due goes out in the second turn at the latest.
        for _ in 0..2 {
            let now = Instant::now();
            let mut state = this.shared.lock();
            // A pump that is polled beside wakes no reader before there is enough: it may be gathering a large piece.
            if this.beside
                && state.reader.is_some()
                && poll_at(&mut this.alarm, this.next, now, cx).is_pending()
            {
                return Poll::Pending;
            }
            state.begun = true;
            if state.cut {
                return Poll::Ready(Some(Err("the node took nothing for too long".into())));
            }
            if let Some(bytes) = state.take(now) {
                this.sent = now;
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            if state.ended && state.drained() {
                // A resumable stream that ended early, a `GET` that the upstream ended: nothing went wrong.
                if !state.exchange.is_won() {
                    state.exchange.end(Outcome::Ok);
                }
                return Poll::Ready(None);
            }
            let release = state.queue.next_release();
            // A pump that is polled beside has been by then, and what it finds later is asked for behind it.
            let waker = if this.beside { Waker::noop() } else { cx.waker() };
            state.reader = Some(waker.clone());
            state.awaited = release;
            drop(state);
            let due = (!this.keepalive.is_zero()).then(|| this.sent + this.keepalive);
            this.next = release.into_iter().chain(due).min();
            if poll_at(&mut this.alarm, this.next, now, cx).is_pending() {
                if this.beside {
                    return Poll::Pending;
                }
                ready!(this.poll_gone(cx));
                return Poll::Ready(Some(Err("the node is gone".into())));
            }
            if due.is_some_and(|due| Instant::now() >= due) && release.is_none_or(|at| at > now) {
                return Poll::Ready(Some(Ok(this.comment())));
            }
        }
        // Nothing here may keep the thread, whatever the timers say.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Nothing but what is taken already: the last frame goes out with the stream's end.
    fn is_end_stream(&self) -> bool {
        let state = self.shared.lock();
        state.ended && state.drained() && !state.cut && state.exchange.is_won()
    }
}

fn poll_at(alarm: &mut Alarm, at: Option<Instant>, now: Instant, cx: &mut Context<'_>) -> Poll<()> {
    at.map_or(Poll::Pending, |at| alarm.poll(at, now, cx))
}

impl StreamBody {
    /// The body that owns `pump`.
    pub(super) fn new(pump: Pump, shared: Arc<Shared>, keepalive: Duration, peer: Peer) -> Self {
        Self {
            pump: Some(pump),
            task: None,
            beside: false,
            shared,
            keepalive,
            sent: Instant::now(),
            next: None,
            alarm: Alarm::default(),
            gone: None,
            peer,
        }
    }

    /// Polls the pump.
    pub(crate) fn poll_beside(&mut self, cx: &mut Context<'_>) {
        self.beside = true;
        if self.pump.as_mut().is_some_and(|pump| Pin::new(pump).poll(cx).is_ready()) {
            self.pump = None;
        }
    }

    /// Gives the pump a task of its own.
    pub(crate) fn detach(&mut self) {
        if let Some(pump) = self.pump.take() {
            self.task = Some(tokio::spawn(pump).abort_handle());
        }
    }

    fn comment(&mut self) -> Frame<Bytes> {
        let mut state = self.shared.lock();
        state.keepalives += 1;
        state.bytes_out += KEEPALIVE.len() as u64;
        state.ours_last = true;
        drop(state);
        self.sent = Instant::now();
        Frame::data(Bytes::from_static(KEEPALIVE))
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let peer = &self.peer;
        self.gone.get_or_insert_with(|| Box::pin(peer.closed())).as_mut().poll(cx)
    }
}

impl Drop for StreamBody {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.exchange.left.get_or_insert_with(Instant::now);
        drop(state);
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}
