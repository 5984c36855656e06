//! The body of an event stream, counted while it is open.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::Frame;
use tokio::sync::mpsc;

use super::{call::StopOnDrop, stats::Stats};

/// The connection ends here, without a word.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the connection was cut on request")]
pub(super) struct Cut;

/// A piece of a stream, or its abrupt end.
pub(super) type Piece = Result<Bytes, Cut>;

/// Sends what comes out of a channel, and ends when its senders are gone.
#[derive(Debug)]
pub(super) struct Events {
    events: mpsc::Receiver<Piece>,
    /// The cut has come; it waits until what came before is written.
    cutting: bool,
    stats: Arc<Stats>,
    /// Goes with the stream.
    _stop: Option<StopOnDrop>,
}

impl Events {
    pub(super) fn new(events: mpsc::Receiver<Piece>, stats: Arc<Stats>, stop: Option<StopOnDrop>) -> Self {
        stats.count(|seen| seen.open_streams += 1);
        Self { events, cutting: false, stats, _stop: stop }
    }
}

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.cutting {
            return Poll::Ready(Some(Err(Cut)));
        }
        match ready!(self.events.poll_recv(cx)) {
            Some(Ok(event)) => Poll::Ready(Some(Ok(Frame::data(event)))),
            Some(Err(Cut)) => {
                // hyper writes out what it holds when there is nothing more for the moment, and drops it at an error.
                self.cutting = true;
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            None => Poll::Ready(None),
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.stats.count(|seen| seen.open_streams -= 1);
    }
}
