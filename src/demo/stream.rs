//! The body of an event stream, counted while it is open.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::Frame;
use tokio::sync::mpsc;

use super::{call::StopOnDrop, stats::Stats};

/// Sends what comes out of a channel, and ends when its senders are gone.
#[derive(Debug)]
pub(super) struct Events {
    events: mpsc::Receiver<Bytes>,
    stats: Arc<Stats>,
    /// Goes with the stream.
    _stop: Option<StopOnDrop>,
}

impl Events {
    pub(super) fn new(events: mpsc::Receiver<Bytes>, stats: Arc<Stats>, stop: Option<StopOnDrop>) -> Self {
        stats.count(|seen| seen.open_streams += 1);
        Self { events, stats, _stop: stop }
    }
}

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.events.poll_recv(cx).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.stats.count(|seen| seen.open_streams -= 1);
    }
}
