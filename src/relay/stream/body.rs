//! The node's side of a stream: gives what the queue lets out, and a comment when nothing goes out for too long.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::Frame;
use tokio::{
    task::JoinHandle,
    time::{Instant, Sleep, sleep_until},
};

use super::Shared;
use crate::{account::Outcome, relay::body::BoxError, server::Peer};

/// What keeps an idle stream alive: a comment and an empty line (WHATWG HTML § 9.2.7).
const KEEPALIVE: &[u8] = b":\n\n";

/// What hyper polls on the node's side.
pub(super) struct StreamBody {
    pump: JoinHandle<()>,
    shared: Arc<Shared>,
    keepalive: Duration,
    sent: Instant,
    timer: Option<Pin<Box<Sleep>>>,
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
        loop {
            let now = Instant::now();
            let shared = this.shared.clone();
            let mut state = shared.lock();
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
            state.reader = Some(cx.waker().clone());
            drop(state);
            let due = (!this.keepalive.is_zero()).then(|| this.sent + this.keepalive);
            let timer = this.poll_timer(cx, release.into_iter().chain(due).min());
            if timer.is_pending() {
                ready!(this.poll_gone(cx));
                return Poll::Ready(Some(Err("the node is gone".into())));
            }
            if due.is_some_and(|due| Instant::now() >= due) && release.is_none_or(|at| at > now) {
                return Poll::Ready(Some(Ok(this.comment())));
            }
        }
    }
}

impl StreamBody {
    /// The body that owns `pump`.
    pub(super) fn new(pump: JoinHandle<()>, shared: Arc<Shared>, keepalive: Duration, peer: Peer) -> Self {
        Self { pump, shared, keepalive, sent: Instant::now(), timer: None, gone: None, peer }
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

    /// Ready when `next` has come; the timer is only moved when it would be late.
    fn poll_timer(&mut self, cx: &mut Context<'_>, next: Option<Instant>) -> Poll<()> {
        let Some(next) = next else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(next)));
        loop {
            if timer.is_elapsed() || timer.deadline() > next {
                timer.as_mut().reset(next);
            }
            ready!(timer.as_mut().poll(cx));
            if Instant::now() >= next {
                return Poll::Ready(());
            }
        }
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
        self.pump.abort();
    }
}
