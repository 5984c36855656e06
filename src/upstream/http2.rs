//! HTTP/2: one connection for many exchanges, driven by a task of its own.
//!
//! Built on `h2` itself: it says which stream failed how (`REFUSED_STREAM` and a `GOAWAY` that leaves a
//! stream out are the upstream's word that it did nothing), it knows a `GOAWAY` before a request is
//! given to it, and it needs no task for an exchange.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::{
    Ping, PingPong, Reason, RecvStream, SendStream,
    client::{Builder, Connection, SendRequest},
};
use http::{HeaderMap, Request, Response, StatusCode, header::CONTENT_LENGTH};
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, sleep, timeout};

use super::{Error, socket::Stream};

/// What one exchange may have unread: a slow one must not use up what all share.
const STREAM_WINDOW: u32 = 64 * 1024;

/// What all may have unread: 1024 of them. Half of it is also the bound of `h2` for small frames, beyond which it
/// closes the connection for everybody.
const CONNECTION_WINDOW: u32 = 64 * 1024 * 1024;

/// Bytes of a response head, counted as HTTP/2 does (RFC 9113 § 6.5.2).
const HEAD: usize = 64 * 1024;

/// Bytes of one that `h2` reads: it resets the stream of a larger one, and does not tell why.
const HEAD_READ: u32 = 4 * 64 * 1024;

/// How often the peer is asked whether it is there, and how long it may take to say so.
const PING: Duration = Duration::from_secs(20);

/// Stands for the peer's limit of streams until its settings have come; none can name it, theirs have 32 bits.
const UNSETTLED: usize = usize::MAX - 1;

/// A connection, shared by the exchanges that hold a [`Slot`].
#[derive(Debug)]
pub(super) struct Http2 {
    sender: SendRequest<Bytes>,
    streams: AtomicUsize,
    used: AtomicBool,
    idle_since: Mutex<Instant>,
}

impl Http2 {
    /// Shakes hands and waits for the peer's settings, so that its limit of streams is known before the first
    /// request is sent.
    pub(super) async fn open(stream: Stream) -> Result<Arc<Self>, String> {
        let (sender, mut connection) = Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(HEAD_READ)
            .initial_max_send_streams(UNSETTLED)
            // A peer that goes on writing to streams we have reset would else close the connection for all.
            .max_local_error_reset_streams(None)
            .enable_push(false)
            .handshake::<_, Bytes>(stream)
            .await
            .map_err(|error| report(&error))?;
        poll_fn(|cx| match Pin::new(&mut connection).poll(cx) {
            Poll::Ready(Ok(())) => Poll::Ready(Err("closed in the handshake".to_owned())),
            Poll::Ready(Err(error)) => Poll::Ready(Err(report(&error))),
            Poll::Pending if connection.max_concurrent_send_streams() == UNSETTLED => Poll::Pending,
            Poll::Pending => Poll::Ready(Ok(())),
        })
        .await?;
        tokio::spawn(drive(connection));
        Ok(Arc::new(Self {
            sender,
            streams: AtomicUsize::new(0),
            used: AtomicBool::new(false),
            idle_since: Mutex::new(Instant::now()),
        }))
    }

    /// The peer has closed it, or said that it will.
    pub(super) fn is_closed(&self) -> bool {
        let ready = self.sender.clone().poll_ready(&mut Context::from_waker(Waker::noop()));
        matches!(ready, Poll::Ready(Err(_)))
    }

    /// The peer lets another stream begin.
    pub(super) fn has_room(&self) -> bool {
        self.streams.load(Ordering::Relaxed) < self.sender.current_max_send_streams()
    }

    /// Exchanges that it carries.
    pub(super) fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Since when it carries none.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let since = *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner);
        (self.streams() == 0).then_some(since)
    }

    /// Takes a place on it. Takers are serialised by the pool's lock.
    pub(super) fn take(self: &Arc<Self>) -> Slot {
        self.streams.fetch_add(1, Ordering::Relaxed);
        Slot(self.clone())
    }
}

/// A place of one exchange on the connection; dropping it frees the place.
#[derive(Debug)]
pub(super) struct Slot(Arc<Http2>);

impl Slot {
    /// An exchange went over the connection before; the next one to ask hears yes.
    pub(super) fn was_used(&self) -> bool {
        self.0.used.swap(true, Ordering::Relaxed)
    }

    /// Sends a request and waits for the response's head. Dropping the future resets the stream with `CANCEL`.
    pub(super) async fn send(self, request: Request<()>, body: Bytes) -> Result<Response<Body>, Error> {
        let mut sender = self.0.sender.clone();
        let (answer, stream) =
            sender.send_request(request, body.is_empty()).map_err(|error| failure(&error))?;
        let mut upload = (!body.is_empty()).then_some(Upload { stream, rest: body });
        let mut answer = pin!(answer);
        let response = poll_fn(|cx| {
            poll_upload(&mut upload, cx);
            answer.as_mut().poll(cx)
        })
        .await
        .map_err(|error| failure(&error))?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Err(Error::Failed("the upstream switched protocols unasked".to_owned()));
        }
        // Dropped with its stream, which that resets.
        if head_size(response.headers()) > HEAD {
            return Err(Error::Failed(format!("the response head exceeds {HEAD} bytes")));
        }
        let length =
            response.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        Ok(response.map(|stream| Body::new(stream, length, upload, self)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.idle_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Reads and writes the connection until it has closed: by the peer, by a peer that answers no ping, or because
/// the pool and every exchange have let go of it.
async fn drive(mut connection: Connection<Stream, Bytes>) {
    let ping = connection.ping_pong();
    let mut peer_gone = pin!(peer_gone(ping));
    poll_fn(|cx| {
        if let Poll::Ready(ended) = Pin::new(&mut connection).poll(cx) {
            if let Err(error) = ended {
                tracing::debug!(error = report(&error), "HTTP/2 connection ended");
            }
            return Poll::Ready(());
        }
        peer_gone.as_mut().poll(cx)
    })
    .await;
}

/// Ends when a ping is not answered in time.
async fn peer_gone(ping: Option<PingPong>) {
    let Some(mut ping) = ping else { return std::future::pending().await };
    loop {
        sleep(PING).await;
        if !matches!(timeout(PING, ping.ping(Ping::opaque())).await, Ok(Ok(_))) {
            return;
        }
    }
}

/// A request body on its way.
#[derive(Debug)]
struct Upload {
    stream: SendStream<Bytes>,
    rest: Bytes,
}

/// Writes what the peer lets us; a stream that takes no more ends the upload, and its answer tells why.
fn poll_upload(upload: &mut Option<Upload>, cx: &mut Context<'_>) {
    if let Some(running) = upload
        && running.poll(cx).is_ready()
    {
        *upload = None;
    }
}

impl Upload {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while !self.rest.is_empty() {
            self.stream.reserve_capacity(self.rest.len());
            let mut room = self.stream.capacity();
            if room == 0 {
                match ready!(self.stream.poll_capacity(cx)) {
                    Some(Ok(more)) => room = more,
                    Some(Err(_)) | None => return Poll::Ready(()),
                }
            }
            let chunk = self.rest.split_to(room.min(self.rest.len()));
            if self.stream.send_data(chunk, self.rest.is_empty()).is_err() {
                return Poll::Ready(());
            }
        }
        Poll::Ready(())
    }
}

/// A response body. Dropped before its end, its stream is reset with `CANCEL`.
#[derive(Debug)]
pub(super) struct Body {
    stream: RecvStream,
    upload: Option<Upload>,
    data_ended: bool,
    /// Bytes to come, if the head told its length; `h2` checks that they come.
    left: Option<u64>,
    slot: Option<Slot>,
}

impl Body {
    fn new(stream: RecvStream, length: Option<u64>, upload: Option<Upload>, slot: Slot) -> Self {
        let left = if stream.is_end_stream() { Some(0) } else { length };
        let ended = stream.is_end_stream() && upload.is_none();
        Self { stream, upload, data_ended: false, left, slot: (!ended).then_some(slot) }
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        poll_upload(&mut self.upload, cx);
        if !self.data_ended {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(chunk)) => {
                    // Given back as soon as it is taken: what is not taken fills the stream's window.
                    let _ = self.stream.flow_control().release_capacity(chunk.len());
                    self.left = self.left.map(|left| left.saturating_sub(chunk.len() as u64));
                    return Poll::Ready(Some(Ok(Frame::data(chunk))));
                }
                // Also a reset with `NO_ERROR`: `h2` gives it only if the end of the stream had not come.
                Some(Err(error)) => return Poll::Ready(Some(Err(self.failed(&error)))),
                None => self.data_ended = true,
            }
        }
        match ready!(self.stream.poll_trailers(cx)) {
            Ok(Some(trailers)) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
            Ok(None) => {
                self.upload = None;
                self.slot = None;
                Poll::Ready(None)
            }
            Err(error) => Poll::Ready(Some(Err(self.failed(&error)))),
        }
    }

    fn failed(&mut self, error: &h2::Error) -> Error {
        self.slot = None;
        // The head had come: whatever the reason says, the upstream has begun.
        Error::Failed(report(error))
    }

    pub(super) fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        match self.left {
            Some(left) => SizeHint::with_exact(left),
            None => SizeHint::default(),
        }
    }
}

/// Of its fields; `:status` is the only other one.
fn head_size(headers: &HeaderMap) -> usize {
    let fields = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32);
    fields.sum::<usize>() + ":status".len() + "200".len() + 32
}

/// What a stream that ended without a response head means.
fn failure(error: &h2::Error) -> Error {
    let refused = error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM);
    // `h2` gives the peer's GOAWAY only to streams above the last one that it names; those below end otherwise.
    if error.is_remote() && (refused || error.is_go_away()) {
        return Error::Refused(report(error));
    }
    Error::Failed(report(error))
}

/// In words, without what the peer wrote into a `GOAWAY`.
fn report(error: &h2::Error) -> String {
    match (error.reason(), error.get_io()) {
        (Some(reason), _) => {
            let frame = if error.is_go_away() { "GOAWAY" } else { "reset" };
            let from = if error.is_remote() { "received" } else { "sent" };
            format!("HTTP/2 {frame} {from}: {}", reason.description())
        }
        (None, Some(error)) => error.to_string(),
        (None, None) => error.to_string(),
    }
}
