//! How a stream ends: with its upstream's, with the sidecar's own words, or because somebody ended it.

use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};

use super::{Closing, Pump, State, Upstream};
use crate::{
    account::{CancelledBy, Outcome},
    error::{self, Failure, Reason},
    exchange,
    ledger::Claim,
    message::{Era, answer},
    relay::{decode::Decoder, source::Source},
    store::BoxFuture,
};

impl Pump {
    /// A cancel, a drain or an operator ended the stream.
    pub(super) fn poll_ended_from_outside(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(running) = &self.running else { return false };
        let closed = running.poll_closed(cx).is_ready();
        if !running.is_won() {
            return false;
        }
        let running = running.clone();
        let by = running.cancelled().map(|(by, _)| by);
        if matches!(by, Some(CancelledBy::Notification)) {
            self.shared.lock().mute();
        }
        if !closed {
            return false;
        }
        self.release();
        self.let_go();
        let mut state = self.shared.lock();
        match by.and_then(exchange::told).or_else(|| exchange::lease_lost(&running)) {
            Some(failure) => self.parting = fail(&mut state, &self.source, &failure),
            // The response is complete: what of it still waits for the node goes out, within the last words.
            None if self.source.answered && by.is_none() => {}
            // A cancel by message, or a stream that ends as the drain begins: it just ends.
            None => {
                state.exchange.end(Outcome::Cancelled);
                let record = &mut state.exchange.account.record;
                record.cancelled_by = Some(by.unwrap_or(CancelledBy::Drain));
                record.cancel_ms = running.cancelled().map(|(_, at)| at.elapsed());
            }
        }
        state.parting = self.parting.is_some();
        state.end();
        true
    }

    /// Ready when no last words wait for the end of their call to be stored.
    pub(super) fn poll_parted(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(parting) = &mut self.parting {
            ready!(parting.as_mut().poll(cx));
            self.parting = None;
            let mut state = self.shared.lock();
            state.parting = false;
            state.wake_reader();
        }
        Poll::Ready(())
    }

    /// The upstream ended its stream cleanly. The last event still counts if it lacks its empty line and is what the stream
    /// is there for.
    pub(super) fn finished(&mut self) -> Closing {
        if let Some(Err(error)) = self.decoder.as_mut().map(Decoder::finish) {
            return Closing::Broken(Failure::upstream(format!("upstream's encoding: {error}")));
        }
        let last = self.scanner.finish();
        let last = match &self.listen {
            Some(listen) => last.map(|last| listen.renamed(last)),
            None => last,
        };
        if let Some(last) = last
            && last.data.as_deref().and_then(answer::look).is_some_and(|last| self.source.awaits(&last))
        {
            self.backlog.push_back(last);
        }
        Closing::Finished
    }

    /// Whether the end of the upstream's stream is none for the node.
    pub(super) fn heals(&self) -> bool {
        let dropped = matches!(self.closing, Some(Closing::Finished | Closing::Broken(_)));
        dropped && !self.source.answered && self.listen.as_ref().is_some_and(|listen| listen.heals())
    }

    /// Asks for a dropped subscription again; false if it is given up.
    fn listen_again(&mut self) -> bool {
        let why = match &self.closing {
            Some(Closing::Broken(failure)) => &failure.message,
            _ => "the upstream ended its stream",
        };
        let attempt = self.listen.as_mut().and_then(|listen| listen.again(why, self.now));
        let Some(attempt) = attempt else { return false };
        self.upstream = Some(Upstream::Dropped(attempt));
        self.closing = None;
        self.rest = Bytes::new();
        true
    }

    /// Holds nothing of the upstream's any more, nor what would ask it again.
    pub(super) fn let_go(&mut self) {
        self.upstream = None;
        self.listen = None;
    }

    /// Everything that was found has gone out: ends the node's stream as the upstream's ended.
    pub(super) fn close(&mut self) {
        if self.heals() && self.listen_again() {
            return;
        }
        let lost = !self.source.awaited.is_empty();
        match self.closing.take() {
            Some(Closing::Unfit(failure)) => self.fail(&failure),
            Some(Closing::Broken(failure)) if lost && !self.resumable() => self.fail(&failure),
            Some(Closing::Finished) if lost && !self.resumable() => {
                self.fail(&Failure::upstream("the upstream ended its stream without the response"));
            }
            _ => self.end(),
        }
    }

    /// Legacy streams with event ids just end: the node resumes. A subscription that is
    /// dropped does too: the node listens again.
    fn resumable(&self) -> bool {
        self.source.endless || self.source.era == Era::Legacy && self.source.ids_seen
    }

    pub(super) fn end(&mut self) {
        self.release();
        self.let_go();
        let mut state = self.shared.lock();
        state.exchange.upstream_ended = true;
        if self.source.ids_seen {
            // Its response may still come on a `GET` of the session.
            state.exchange.park();
        }
        state.end();
    }

    /// Ends with the failure's error, unless a cancel has won or everything is answered.
    pub(super) fn fail(&mut self, failure: &Failure) {
        self.let_go();
        let mut state = self.shared.lock();
        self.parting = fail(&mut state, &self.source, failure);
        state.parting = self.parting.is_some();
        state.exchange.upstream_ended = failure.reason == Reason::UpstreamFailed;
        state.end();
    }
}

/// The error a node reads as the stream's last events, one for each id that still awaits its response. Gives what has to be
/// done first: the end of the call is stored.
fn fail(state: &mut State, source: &Source, failure: &Failure) -> Option<BoxFuture<'static, ()>> {
    let cancelled = state.exchange.entry.as_ref().and_then(|entry| entry.running.cancelled());
    let cancelled = cancelled.map(|(by, _)| exchange::told(by));
    let failure = match &cancelled {
        _ if state.muted => return None,
        Some(None) => return None,
        Some(Some(told)) => told,
        None => failure,
    };
    state.exchange.fail(failure);
    if failure.reason != Reason::UpstreamFailed {
        if let Some(notice) = state.exchange.request.as_mut().and_then(|request| request.notice.as_mut()) {
            notice.now = true;
        }
        state.exchange.notify_upstream();
    }
    let mut words = BytesMut::new();
    for id in &source.awaited {
        let request = &state.exchange.account.record.request;
        let body =
            error::body(failure, Some(id), state.exchange.upstream(), request, state.exchange.progress());
        words.extend_from_slice(b"event: message\ndata: ");
        words.extend_from_slice(&body);
        words.extend_from_slice(b"\n\n");
    }
    state.last_words = (!words.is_empty()).then(|| words.freeze());
    state.exchange.claim.take().map(Claim::settle)
}
