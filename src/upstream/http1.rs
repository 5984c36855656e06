//! HTTP/1.1: one exchange at a time, driven by whoever has it.
//!
//! hyper's connection future is polled by the response future and then by the [`Body`], in the task
//! that reads them. It is never spawned. The body of an event stream is read without hyper, so that a silent stream keeps
//! none of hyper's buffers; behind its end hyper takes the connection again.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::Full;
use hyper::{
    body::Incoming,
    client::conn::http1::{Builder, Connection, SendRequest},
};
use hyper_util::rt::TokioIo;

use super::{
    Error,
    chunked::Chunked,
    gate::{Gate, Keeper},
    pool::Pool,
    report,
    socket::{Probe, Stream},
};

/// Bytes of a response head.
const HEAD: usize = 64 * 1024;

/// The most that is read at once. Reads begin with 8 KiB and grow only with a peer that fills them.
const READ_BUFFER: usize = 64 * 1024;

/// A connection.
#[derive(Debug)]
pub(super) struct Http1 {
    sender: SendRequest<Full<Bytes>>,
    /// `None` once it is finished.
    connection: Option<Connection<TokioIo<Gate<Stream>>, Full<Bytes>>>,
    probe: Probe,
    keeper: Keeper,
    /// An exchange went over it.
    pub(super) used: bool,
}

/// Why there is no response.
pub(super) enum SendError {
    /// The connection was found closed; not one byte of the request was written, here it is.
    Unsent(Box<Request<Full<Bytes>>>),
    /// Final.
    Failed(Error),
}

impl Http1 {
    pub(super) async fn open(stream: Stream) -> Result<Self, hyper::Error> {
        let probe = stream.probe();
        let keeper = Keeper::default();
        let (sender, connection) = Builder::new()
            .max_buf_size(READ_BUFFER)
            .max_header_size(HEAD)
            // RFC 9112 §§ 5.1, 5.2: what a proxy must mend in a response.
            .allow_spaces_after_header_name_in_responses(true)
            .allow_obsolete_multiline_headers_in_responses(true)
            .handshake(TokioIo::new(Gate::new(stream, keeper.clone())))
            .await?;
        Ok(Self { sender, connection: Some(connection), probe, keeper, used: false })
    }

    /// Whether the connection can take a request: it is idle, and as far as the kernel knows the peer has neither
    /// closed it nor sent anything.
    pub(super) fn is_alive(&mut self) -> bool {
        self.probe.set(true);
        let finished = self.poll(&mut Context::from_waker(Waker::noop()));
        self.probe.set(false);
        !finished && self.sender.is_ready()
    }

    /// Drives the connection; true when it is finished.
    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(connection) = &mut self.connection else { return true };
        if Pin::new(connection).poll(cx).is_pending() {
            return false;
        }
        // Dropped at once: then hyper tells whoever waits for something from it.
        self.connection = None;
        true
    }

    /// Sends a request and waits for the response's head. Dropping the future closes the connection.
    pub(super) async fn send(
        mut self: Box<Self>,
        request: Request<Full<Bytes>>,
        pool: &Arc<Pool>,
    ) -> Result<Response<Body>, SendError> {
        self.keeper.sends(&request);
        let answer = self.sender.try_send_request(request);
        let mut answer = pin!(answer);
        let answered = poll_fn(|cx| {
            self.poll(cx);
            answer.as_mut().poll(cx)
        })
        .await;
        let response = match answered {
            Ok(response) => response,
            Err(mut error) => {
                return Err(match error.take_message() {
                    Some(request) => SendError::Unsent(Box::new(request)),
                    None => SendError::Failed(Error::Failed(report(error.error()))),
                });
            }
        };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Err(SendError::Failed(Error::Failed(
                "the upstream switched protocols unasked".to_owned(),
            )));
        }
        self.used = true;
        Ok(response.map(|incoming| Body::new(incoming, self, pool.clone())))
    }

    /// The connection without hyper, which has read the head of an event stream and no more.
    fn into_chunked(mut self) -> Option<Chunked<Stream>> {
        let parts = self.connection.take()?.into_parts();
        let (stream, rest) = parts.io.into_inner().into_parts();
        let read = parts.read_buf;
        Some(Chunked::new(stream, if read.is_empty() { rest } else { [read, rest].concat().into() }))
    }

    /// The connection with hyper again. `None` only if hyper were to wait for something, which it has no cause to.
    fn again(stream: Stream) -> Option<Self> {
        match pin!(Self::open(stream)).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(http1)) => Some(Self { used: true, ..http1 }),
            Poll::Ready(Err(_)) | Poll::Pending => None,
        }
    }
}

/// A response body and the connection it comes over.
#[derive(Debug)]
pub(super) struct Body {
    source: Source,
    pool: Arc<Pool>,
}

/// Where the body comes from.
#[derive(Debug)]
enum Source {
    /// hyper, which drives the connection. `None` at the end: it was given back, or closed.
    Hyper(Incoming, Option<Box<Http1>>),
    /// The connection itself. `None` likewise.
    Chunked(Option<Box<Chunked<Stream>>>),
}

impl Body {
    fn new(incoming: Incoming, connection: Box<Http1>, pool: Arc<Pool>) -> Self {
        if connection.keeper.is_closed() && connection.connection.is_some() {
            let chunked = connection.into_chunked().map(Box::new);
            return Self { source: Source::Chunked(chunked), pool };
        }
        let ended = incoming.is_end_stream();
        let mut body = Self { source: Source::Hyper(incoming, Some(connection)), pool };
        if ended {
            // Whoever sends it on may never poll it.
            body.finish();
        }
        body
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match &mut self.source {
            Source::Hyper(..) => self.poll_hyper(cx),
            Source::Chunked(_) => self.poll_chunked(cx),
        }
    }

    fn poll_hyper(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let Source::Hyper(incoming, connection) = &mut self.source else { return Poll::Ready(None) };
        if let Some(connection) = connection {
            connection.poll(cx);
        }
        // Only the connection above brings data, in this very task: nobody else has to be woken for it, and a real
        // waker here would have each chunk wake the task that is already running.
        match Pin::new(&mut *incoming).poll_frame(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => {
                self.finish();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Ok(frame))) => {
                if incoming.is_end_stream() {
                    self.finish();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                *connection = None;
                Poll::Ready(Some(Err(Error::Failed(report(&error)))))
            }
        }
    }

    fn poll_chunked(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let Source::Chunked(Some(chunked)) = &mut self.source else { return Poll::Ready(None) };
        let data = ready!(chunked.poll_data(cx));
        if chunked.has_ended() {
            self.finish();
        }
        if let Some(Err(_)) = &data {
            self.source = Source::Chunked(None);
        }
        Poll::Ready(data.map(|data| match data {
            Ok(data) => Ok(Frame::data(data)),
            Err(error) => Err(Error::Failed(format!("error reading a body from connection: {error}"))),
        }))
    }

    pub(super) fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Hyper(incoming, _) => incoming.is_end_stream(),
            Source::Chunked(chunked) => chunked.is_none(),
        }
    }

    /// hyper gives each chunk by itself.
    pub(super) fn comes_in_pieces(&self) -> bool {
        matches!(self.source, Source::Hyper(..))
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Hyper(incoming, _) => incoming.size_hint(),
            Source::Chunked(Some(_)) => SizeHint::default(),
            Source::Chunked(None) => SizeHint::with_exact(0),
        }
    }

    /// The body has ended: the connection goes back if both sides are done with the exchange, else it is closed
    /// (a request body that the upstream did not wait for: RFC 9112 § 9.3).
    fn finish(&mut self) {
        let connection = match &mut self.source {
            Source::Hyper(_, connection) => connection.take(),
            Source::Chunked(chunked) => {
                let stream = chunked.take().and_then(|chunked| chunked.into_io());
                stream.and_then(Http1::again).map(Box::new)
            }
        };
        let Some(mut connection) = connection else { return };
        if !connection.sender.is_ready() && connection.poll(&mut Context::from_waker(Waker::noop())) {
            return;
        }
        if connection.sender.is_ready() {
            self.pool.give_back(connection);
        }
    }

    fn is_open(&self) -> bool {
        match &self.source {
            Source::Hyper(_, connection) => connection.is_some(),
            Source::Chunked(chunked) => chunked.is_some(),
        }
    }
}

impl Drop for Body {
    /// Closes the connection, unless the rest of the body has already arrived: SSE readers often leave with the
    /// response, just before the last chunk.
    fn drop(&mut self) {
        for _ in 0..4 {
            if !self.is_open() {
                return;
            }
            let polled = self.poll_frame(&mut Context::from_waker(Waker::noop()));
            if !matches!(polled, Poll::Ready(Some(Ok(_)))) {
                return;
            }
        }
    }
}
