//! Bodies that are no event stream: held whole, or pulled through chunk by chunk.
//!
//! Nothing is polled but by hyper: the node's connection pulls, and dropping the body drops what it holds upstream.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

use super::{
    body::{Body, BoxError},
    clocks::{Clock, Clocks},
    decode::Decoder,
};
use crate::{
    account::Outcome,
    error::{Failure, Reason},
    exchange::Exchange,
    ledger::Claim,
    server::Peer,
    store::BoxFuture,
    upstream,
};

/// A body that is known whole. The exchange is completed when hyper takes the last of it (at once if there is nothing to
/// take).
pub fn whole(exchange: Exchange, bytes: Bytes, outcome: Outcome) -> Body {
    Body::new(Whole::new(exchange, bytes, outcome, true))
}

/// The same as an event stream: whole too, but no stream names its length.
pub fn event_stream(exchange: Exchange, bytes: Bytes, outcome: Outcome) -> Body {
    Body::new(Whole::new(exchange, bytes, outcome, false))
}

struct Whole {
    /// The end of a call that has none of its upstream's; stored before its node can make the next attempt.
    settling: Option<BoxFuture<'static, ()>>,
    /// What was not taken yet.
    bytes: Bytes,
    names_length: bool,
    outcome: Outcome,
    exchange: Exchange,
}

/// Bytes given at once: hyper buffers little more, so what a slow node has not taken stays here, and stays counted.
const FRAME: usize = 64 * 1024;

impl Whole {
    fn new(mut exchange: Exchange, bytes: Bytes, outcome: Outcome, names_length: bool) -> Self {
        exchange.account.record.bytes_out = Some(0);
        if bytes.is_empty() {
            exchange.completed(outcome);
        }
        let settling = settling(&mut exchange);
        Self { settling, bytes, names_length, outcome, exchange }
    }
}

impl http_body::Body for Whole {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        ready!(poll_settled(&mut self.settling, cx));
        if self.bytes.is_empty() {
            return Poll::Ready(None);
        }
        let some = self.bytes.len().min(FRAME);
        let frame = self.bytes.split_to(some);
        let passed = &mut self.exchange.account.record.bytes_out;
        *passed = Some(passed.unwrap_or(0) + frame.len() as u64);
        if self.bytes.is_empty() {
            let outcome = self.outcome;
            self.exchange.completed(outcome);
        }
        Poll::Ready(Some(Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty() && self.names_length
    }

    fn size_hint(&self) -> SizeHint {
        if !self.names_length {
            return SizeHint::default();
        }
        SizeHint::with_exact(self.bytes.len() as u64)
    }
}

/// Writes the end of the exchange's claim, if it has one.
fn settling(exchange: &mut Exchange) -> Option<BoxFuture<'static, ()>> {
    exchange.claim.take().map(Claim::settle)
}

fn poll_settled(settling: &mut Option<BoxFuture<'static, ()>>, cx: &mut Context<'_>) -> Poll<()> {
    if let Some(work) = settling {
        ready!(work.as_mut().poll(cx));
        *settling = None;
    }
    Poll::Ready(())
}

/// Encoded bytes that are decoded at once: what comes of them has to be held, and that may be a thousand times as much.
pub const PIECE: usize = 256;

/// What of an upstream's body was not read yet.
#[derive(Debug)]
pub struct Rest {
    /// It.
    pub body: upstream::Body,
    /// What came of it and is still to be decoded, before the rest.
    pub encoded: Bytes,
    /// Its coding, when the upstream compressed although nobody asked for it.
    pub decoder: Option<Decoder>,
    /// No chunk may be larger than this when it is decoded.
    pub piece: usize,
}

impl Rest {
    /// Nothing more will come, and nothing is left to check.
    fn is_end(&self) -> bool {
        self.decoder.is_none() && (self.body.is_end_stream() || self.body.size_hint().exact() == Some(0))
    }

    /// The next bytes, decoded. Trailers belong to the hop they came over.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        loop {
            let data = if self.encoded.is_empty() {
                match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                    Some(Ok(frame)) => frame.into_data().ok(),
                    Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                    None => None,
                }
            } else {
                Some(self.encoded.split_to(PIECE.min(self.encoded.len())))
            };
            let Some(data) = data else {
                let finished = self.decoder.take().map_or(Ok(()), |mut decoder| decoder.finish());
                return Poll::Ready(finished.err().map(|error| Err(error.into())));
            };
            let Some(decoder) = &mut self.decoder else { return Poll::Ready(Some(Ok(data))) };
            match decoder.push(&data, self.piece) {
                Ok(decoded) if decoded.is_empty() => {}
                Ok(decoded) => return Poll::Ready(Some(Ok(decoded))),
                Err(error) => {
                    self.decoder = None;
                    return Poll::Ready(Some(Err(error.into())));
                }
            }
        }
    }
}

/// A body that passes as it comes: `first` was read already, the rest is the upstream's.
pub fn pulled(
    mut exchange: Exchange,
    first: Bytes,
    rest: Rest,
    clocks: Clocks,
    outcome: Outcome,
    never_sent: bool,
    peer: &Peer,
) -> Body {
    exchange.account.record.bytes_out = Some(0);
    if never_sent || (first.is_empty() && rest.is_end()) {
        exchange.completed(outcome);
    }
    let settling = settling(&mut exchange);
    let timer = clocks.deadline().map(|(at, _)| Box::pin(sleep_until(at)));
    let gone = Box::pin(peer.closed());
    Body::new(Pulled {
        settling,
        first: Some(first).filter(|first| !first.is_empty()),
        rest,
        clocks,
        timer,
        gone,
        outcome,
        exchange,
    })
}

struct Pulled<G> {
    settling: Option<BoxFuture<'static, ()>>,
    first: Option<Bytes>,
    rest: Rest,
    clocks: Clocks,
    timer: Option<Pin<Box<Sleep>>>,
    gone: Pin<Box<G>>,
    outcome: Outcome,
    exchange: Exchange,
}

impl<G> Pulled<G> {
    /// Counts what passes; the last byte completes the exchange, whether or not hyper asks once more.
    fn pass(&mut self, bytes: Bytes) -> Frame<Bytes> {
        self.clocks.message(Instant::now());
        let passed = &mut self.exchange.account.record.bytes_out;
        *passed = Some(passed.unwrap_or(0) + bytes.len() as u64);
        if self.is_done() {
            self.complete();
        }
        Frame::data(bytes)
    }

    fn is_done(&self) -> bool {
        self.first.is_none() && self.rest.is_end()
    }

    fn complete(&mut self) {
        let outcome = self.outcome;
        // A cancel that was first finds most of the answer sent: it only shows in the log.
        let _ = self.exchange.answered();
        self.exchange.completed(outcome);
    }

    /// A status was sent, so all that can be said is that the body is broken.
    fn cut(&mut self, failure: &Failure) -> BoxError {
        self.exchange.fail(failure);
        if failure.reason != Reason::UpstreamFailed {
            self.exchange.notify_upstream();
        }
        failure.message.clone().into()
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<BoxError> {
        while let Some(timer) = &mut self.timer {
            if timer.as_mut().poll(cx).is_pending() {
                break;
            }
            let Some((at, clock)) = self.clocks.deadline() else {
                self.timer = None;
                break;
            };
            if at > Instant::now() {
                timer.as_mut().reset(at);
                continue;
            }
            let failure = match clock {
                Clock::Idle => Failure::unknown(Reason::IdleTimeout, "the upstream was silent"),
                Clock::Max => Failure::unknown(Reason::MaxTimeout, "the request reached its maximum time"),
            };
            return Poll::Ready(self.cut(&failure));
        }
        let running = self.exchange.entry.as_ref().map(|entry| entry.running.clone());
        if running.is_some_and(|running| running.poll_closed(cx).is_ready()) {
            return Poll::Ready("the request was cancelled".into());
        }
        Poll::Pending
    }
}

impl<G: Future<Output = ()>> http_body::Body for Pulled<G> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        ready!(poll_settled(&mut this.settling, cx));
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(this.pass(first))));
        }
        match this.rest.poll(cx) {
            Poll::Ready(Some(Ok(data))) => Poll::Ready(Some(Ok(this.pass(data)))),
            Poll::Ready(Some(Err(failure))) => Poll::Ready(Some(Err(this.cut(&failure)))),
            Poll::Ready(None) => {
                this.complete();
                Poll::Ready(None)
            }
            Poll::Pending => {
                if let Poll::Ready(error) = this.poll_cut(cx) {
                    return Poll::Ready(Some(Err(error)));
                }
                if this.gone.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Some(Err("the node is gone".into())));
                }
                Poll::Pending
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.decoder.is_none() && self.rest.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.as_ref().map_or(0, |first| first.len() as u64);
        match self.rest.body.size_hint().exact().filter(|_| self.rest.decoder.is_none()) {
            Some(rest) => SizeHint::with_exact(first + rest),
            None => SizeHint::default(),
        }
    }
}
