//! Event streams on HTTP/1.1, written without hyper.
//!
//! hyper keeps two buffers for as long as a response lasts, and a stream lasts for hours: so it hands the connection over with
//! the answer, and takes it again when the stream has ended.

use std::{
    error::Error,
    future::{Future, poll_fn},
    io::{self, IoSlice},
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::SystemTime,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body::Body;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
};

use super::{Peer, Phase, head::Turn};
use crate::headers::is_content_type;

/// Frames up to here are put together; a larger one is written from where it lies.
const SMALL: usize = 8 << 10;
/// What is written at once, one large frame aside.
const ENOUGH: usize = 32 << 10;
/// Bytes of next requests that are read meanwhile. It takes reading to see that a client is gone.
const EARLY: usize = 8 << 10;
/// The end of a chunked body (RFC 9112 § 7.1), behind the last chunk's.
const LAST: &[u8] = b"0\r\n\r\n";

/// An answer whose stream is to be written.
pub(super) struct Answer<B> {
    response: Response<B>,
    /// It is the connection's last one, as its client has asked.
    closes: bool,
}

/// Where the service leaves such an answer, and whoever drives hyper finds it.
pub(super) struct Handed<B>(Arc<Mutex<Option<Answer<B>>>>);

impl<B> Clone for Handed<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B> Handed<B> {
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    /// Drives hyper until it has handed an answer over, or has ended as the error says.
    pub(super) async fn or_ended<E>(&self, hyper: impl Future<Output = E>) -> Result<Answer<B>, E> {
        let mut hyper = pin!(hyper);
        poll_fn(|cx| match hyper.as_mut().poll(cx) {
            Poll::Ready(ended) => Poll::Ready(Err(ended)),
            Poll::Pending => self.lock().take().map_or(Poll::Pending, |answer| Poll::Ready(Ok(answer))),
        })
        .await
    }

    /// A poisoned lock means that a holder panicked, and none can.
    fn lock(&self) -> MutexGuard<'_, Option<Answer<B>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an event stream from hyper, and then never ends: hyper is dropped with who waits here. Everything else is given
    /// back for hyper to write: what is no event stream, what HTTP/1.0 or `HEAD` asked for, and a stream behind an answer
    /// that hyper has not written whole, since that would be lost with it.
    ///
    /// The request must have been read to its end: what hyper has of its body is read as the next one.
    pub(super) async fn pass(&self, asked: Asked, response: Response<B>, turn: &Turn) -> Response<B>
    where
        B: Body,
    {
        if !asked.may_stream || !is_stream(&response) || turn.is_unflushed() {
            return response;
        }
        let answer = Answer { response, closes: asked.closes };
        *self.lock() = Some(answer);
        std::future::pending().await
    }
}

/// What a request says of the form of its answer.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    may_stream: bool,
    closes: bool,
}

impl Asked {
    pub(super) fn of<T>(request: &Request<T>) -> Self {
        let closes = request.headers().get_all(header::CONNECTION).iter().any(|value| {
            value
                .as_bytes()
                .split(|byte| *byte == b',')
                .any(|token| token.trim_ascii().eq_ignore_ascii_case(b"close"))
        });
        let may_stream = request.version() == Version::HTTP_11 && request.method() != Method::HEAD;
        Self { may_stream, closes }
    }
}

fn is_stream<B: Body>(response: &Response<B>) -> bool {
    let headers = response.headers();
    let framed = [header::CONNECTION, header::CONTENT_LENGTH, header::TRANSFER_ENCODING];
    response.status() == StatusCode::OK
        && response.body().size_hint().exact().is_none()
        && is_content_type(headers, "text/event-stream")
        && !framed.iter().any(|name| headers.contains_key(name))
}

/// Why a stream can't be written to its end.
type Broken = Box<dyn Error + Send + Sync>;

/// How a stream has ended.
pub(super) enum End {
    /// The connection can go on, with these bytes of the next request.
    Whole(Vec<u8>),
    /// It was the last answer.
    Last,
}

/// Writes an answer to its end. Dropped, it drops the answer's body.
///
/// # Errors
///
/// When the client is gone, or the body breaks: the connection can't go on.
pub(super) async fn write<T, B>(
    io: &mut T,
    answer: Answer<B>,
    peer: &Peer,
    told: &watch::Receiver<Phase>,
) -> Result<End, Broken>
where
    T: AsyncRead + AsyncWrite + Unpin,
    B: Body<Data = Bytes>,
    B::Error: Into<Broken>,
{
    let (mut head, body) = answer.response.into_parts();
    let is_last = || answer.closes || *told.borrow() >= Phase::Close;
    if is_last() {
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let mut writer = Writer { out: Out::new(head.headers), early: Vec::new(), gone: None, ended: None };
    {
        let mut body = pin!(body);
        poll_fn(|cx| writer.poll(cx, io, body.as_mut(), peer)).await?;
    }
    Ok(if is_last() { End::Last } else { End::Whole(writer.early) })
}

/// The head of an answer as it is written, with a date (RFC 9110 § 6.6.1).
pub(super) fn head(status: StatusCode, mut headers: HeaderMap) -> Vec<u8> {
    let date = || HeaderValue::try_from(httpdate::fmt_http_date(SystemTime::now()));
    if !headers.contains_key(header::DATE)
        && let Ok(date) = date()
    {
        headers.insert(header::DATE, date);
    }
    let mut bytes = format!("HTTP/1.1 {status}\r\n").into_bytes();
    bytes.reserve(512);
    for (name, value) in &headers {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            bytes.extend_from_slice(part);
        }
    }
    bytes.extend_from_slice(b"\r\n");
    bytes
}

/// What is about to be written: `small`, then `large` with its end.
struct Out {
    small: Vec<u8>,
    /// How much of `small` was written.
    at: usize,
    large: Bytes,
    tail: &'static [u8],
}

impl Out {
    fn new(mut headers: HeaderMap) -> Self {
        headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        Self { small: head(StatusCode::OK, headers), at: 0, large: Bytes::new(), tail: b"" }
    }

    fn is_empty(&self) -> bool {
        self.at == self.small.len() && self.large.is_empty() && self.tail.is_empty()
    }

    /// Whether there is room for another frame.
    fn has_room(&self) -> bool {
        self.large.is_empty() && self.tail.is_empty() && self.small.len() < ENOUGH
    }

    /// Takes a frame, as one chunk. Only with room.
    fn push(&mut self, data: Bytes) {
        use std::io::Write;
        if data.is_empty() {
            return;
        }
        // A Vec takes every byte.
        let _ = write!(self.small, "{:x}\r\n", data.len());
        if data.len() > SMALL {
            (self.large, self.tail) = (data, b"\r\n");
            return;
        }
        self.small.extend_from_slice(&data);
        self.small.extend_from_slice(b"\r\n");
    }

    fn end(&mut self) {
        self.small.extend_from_slice(LAST);
    }

    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        io: &mut (impl AsyncWrite + Unpin),
    ) -> Poll<io::Result<()>> {
        while !self.is_empty() {
            let parts =
                [IoSlice::new(&self.small[self.at..]), IoSlice::new(&self.large), IoSlice::new(self.tail)];
            let parts = if self.at == self.small.len() { &parts[1..] } else { &parts[..] };
            let parts = if self.tail.is_empty() { &parts[..1] } else { parts };
            let mut written = ready!(Pin::new(&mut *io).poll_write_vectored(cx, parts))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_small = written.min(self.small.len() - self.at);
            self.at += of_small;
            written -= of_small;
            let of_large = written.min(self.large.len());
            let _ = self.large.split_to(of_large);
            self.tail = &self.tail[written - of_large..];
        }
        // A stream may be silent for long: it keeps no room for what it has said.
        self.small = Vec::new();
        self.at = 0;
        self.large = Bytes::new();
        Pin::new(io).poll_flush(cx)
    }
}

struct Writer {
    out: Out,
    early: Vec<u8>,
    /// Sees the client's end where nothing more is read.
    gone: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// How the body has ended: what is in `out` is the last.
    ended: Option<Result<(), Broken>>,
}

impl Writer {
    fn poll<T, B>(
        &mut self,
        cx: &mut Context<'_>,
        io: &mut T,
        mut body: Pin<&mut B>,
        peer: &Peer,
    ) -> Poll<Result<(), Broken>>
    where
        T: AsyncRead + AsyncWrite + Unpin,
        B: Body<Data = Bytes>,
        B::Error: Into<Broken>,
    {
        self.poll_early(cx, io, peer)?;
        loop {
            let mut starved = false;
            while self.ended.is_none() && !starved && self.out.has_room() {
                match body.as_mut().poll_frame(cx) {
                    Poll::Ready(Some(Ok(frame))) => self.out.push(frame.into_data().unwrap_or_default()),
                    Poll::Ready(Some(Err(error))) => self.ended = Some(Err(error.into())),
                    Poll::Ready(None) => {
                        self.ended = Some(Ok(()));
                        self.out.end();
                    }
                    Poll::Pending => starved = true,
                }
            }
            ready!(self.out.poll_write(cx, io))?;
            if let Some(ended) = self.ended.take() {
                return Poll::Ready(ended);
            }
            if starved {
                return Poll::Pending;
            }
        }
    }

    /// Reads what comes meanwhile, which is how the client's end is seen.
    fn poll_early<T: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        io: &mut T,
        peer: &Peer,
    ) -> io::Result<()> {
        while self.early.len() < EARLY {
            // Few, since a stream seldom reads anything, and never keeps room for it.
            let mut bytes = [0; 256];
            let mut read = ReadBuf::new(&mut bytes);
            match Pin::new(&mut *io).poll_read(cx, &mut read) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Ok(())) if !read.filled().is_empty() => {
                    self.early.extend_from_slice(read.filled())
                }
                Poll::Ready(Ok(())) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Poll::Ready(Err(error)) => return Err(error),
            }
        }
        match self.gone.get_or_insert_with(|| Box::pin(peer.closed())).as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::ErrorKind::UnexpectedEof.into()),
            Poll::Pending => Ok(()),
        }
    }
}
