//! HTTP/1.1: one exchange at a time, driven by whoever has it.
//!
//! hyper's connection future is polled by the response future and then by the [`Body`], in the task
//! that reads them. It is never spawned.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
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
    pool::Pool,
    report,
    socket::{Probe, Stream},
};

/// Bytes of a response head.
const HEAD: usize = 64 * 1024;

/// The most that is read at once. Reads begin with 8 KiB and grow only with a peer that fills them, so a quiet
/// stream holds no more than that.
const READ_BUFFER: usize = 64 * 1024;

/// A connection.
#[derive(Debug)]
pub(super) struct Http1 {
    sender: SendRequest<Full<Bytes>>,
    /// `None` once it is finished.
    connection: Option<Connection<TokioIo<Stream>, Full<Bytes>>>,
    probe: Probe,
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
        let (sender, connection) = Builder::new()
            .max_buf_size(READ_BUFFER)
            .max_header_size(HEAD)
            // RFC 9112 §§ 5.1, 5.2: what a proxy must mend in a response.
            .allow_spaces_after_header_name_in_responses(true)
            .allow_obsolete_multiline_headers_in_responses(true)
            .handshake(TokioIo::new(stream))
            .await?;
        Ok(Self { sender, connection: Some(connection), probe, used: false })
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
}

/// A response body and the connection it comes over.
#[derive(Debug)]
pub(super) struct Body {
    incoming: Incoming,
    /// `None` at the end: given back, or closed.
    connection: Option<Box<Http1>>,
    pool: Arc<Pool>,
}

impl Body {
    fn new(incoming: Incoming, connection: Box<Http1>, pool: Arc<Pool>) -> Self {
        let mut body = Self { incoming, connection: Some(connection), pool };
        if body.incoming.is_end_stream() {
            // Whoever sends it on may never poll it.
            body.finish();
        }
        body
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if let Some(connection) = &mut self.connection {
            connection.poll(cx);
        }
        // Only the connection above brings data, in this very task: nobody else has to be woken for it, and a real
        // waker here would have each chunk wake the task that is already running.
        match Pin::new(&mut self.incoming).poll_frame(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => {
                self.finish();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Ok(frame))) => {
                if self.incoming.is_end_stream() {
                    self.finish();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                self.connection = None;
                Poll::Ready(Some(Err(Error::Failed(report(&error)))))
            }
        }
    }

    pub(super) fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }

    /// The body has ended: the connection goes back if both sides are done with the exchange, else it is closed
    /// (a request body that the upstream did not wait for: RFC 9112 § 9.3).
    fn finish(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        if !connection.sender.is_ready() && connection.poll(&mut Context::from_waker(Waker::noop())) {
            return;
        }
        if connection.sender.is_ready() {
            self.pool.give_back(connection);
        }
    }
}

impl Drop for Body {
    /// Closes the connection, unless the rest of the body has already arrived: SSE readers often leave with the
    /// response, just before the last chunk.
    fn drop(&mut self) {
        for _ in 0..4 {
            let polled = match self.connection {
                Some(_) => self.poll_frame(&mut Context::from_waker(Waker::noop())),
                None => return,
            };
            if !matches!(polled, Poll::Ready(Some(Ok(_)))) {
                return;
            }
        }
    }
}
