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
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
};

use super::{Body, Peer, head::Turn, prefixed::Prefixed};
use crate::headers::is_content_type;

/// Bytes of next requests that are read meanwhile. It takes reading to see that a client is gone.
const EARLY: usize = 8 << 10;

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
    pub(super) async fn pass(&self, asked: Asked, mut response: Response<B>, turn: &Turn) -> Response<B>
    where
        B: Body,
    {
        if !asked.may_stream || !is_stream(&response) || turn.is_unflushed() {
            response.body_mut().detach();
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
    io: &mut Prefixed<T>,
    answer: Answer<B>,
    peer: &Peer,
    told: &watch::Receiver<bool>,
) -> Result<End, Broken>
where
    T: AsyncRead + AsyncWrite + Unpin,
    B: Body,
{
    let (mut head, mut body) = answer.response.into_parts();
    let is_last = || answer.closes || *told.borrow();
    if is_last() {
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let mut writer = Writer { out: Out::new(head.headers), early: Vec::new(), gone: None, ended: None };
    poll_fn(|cx| writer.poll(cx, io, &mut body, peer)).await?;
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

/// What is about to be written: the answer's head if that is still to come, then a chunk (RFC 9112 § 7.1).
struct Out {
    head: Vec<u8>,
    size: Size,
    data: Bytes,
    end: &'static [u8],
    /// How much of all that was written.
    at: usize,
}

impl Out {
    const EMPTY: Self = Self { head: Vec::new(), size: Size::NONE, data: Bytes::new(), end: b"", at: 0 };

    fn new(mut headers: HeaderMap) -> Self {
        headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        Self { head: head(StatusCode::OK, headers), ..Self::EMPTY }
    }

    /// There is no chunk yet.
    fn has_room(&self) -> bool {
        self.end.is_empty()
    }

    /// Takes a chunk's data. Only with room.
    fn push(&mut self, data: Bytes) {
        if data.is_empty() {
            return;
        }
        (self.size, self.data, self.end) = (Size::of(data.len()), data, b"\r\n");
    }

    /// The body ends behind what there is.
    fn push_end(&mut self) {
        self.end = if self.data.is_empty() { b"0\r\n\r\n" } else { b"\r\n0\r\n\r\n" };
    }

    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        io: &mut (impl AsyncWrite + Unpin),
    ) -> Poll<io::Result<()>> {
        loop {
            let mut parts = [&self.head, self.size.line(), &self.data, self.end].map(IoSlice::new);
            let mut parts = &mut parts[..];
            IoSlice::advance_slices(&mut parts, self.at);
            if parts.is_empty() {
                break;
            }
            match ready!(Pin::new(&mut *io).poll_write_vectored(cx, parts))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.at += written,
            }
        }
        // A stream may be silent for long: it keeps no room for what it has said.
        *self = Self::EMPTY;
        Pin::new(io).poll_flush(cx)
    }
}

/// The line before a chunk's data.
struct Size {
    line: [u8; Self::LONGEST],
    /// Where it begins; it is written from its end.
    from: usize,
}

impl Size {
    const LONGEST: usize = 2 * size_of::<usize>() + 2;
    const NONE: Self = Self { line: [0; Self::LONGEST], from: Self::LONGEST };

    fn of(size: usize) -> Self {
        let mut line = [0; Self::LONGEST];
        let mut from = Self::LONGEST - 2;
        line[from..].copy_from_slice(b"\r\n");
        let mut left = size;
        while left > 0 {
            from -= 1;
            line[from] = b"0123456789abcdef"[left % 16];
            left /= 16;
        }
        Self { line, from }
    }

    fn line(&self) -> &[u8] {
        &self.line[self.from..]
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
        io: &mut Prefixed<T>,
        body: &mut B,
        peer: &Peer,
    ) -> Poll<Result<(), Broken>>
    where
        T: AsyncRead + AsyncWrite + Unpin,
        B: Body,
    {
        self.poll_early(cx, io, peer)?;
        body.poll_beside(cx);
        loop {
            let mut starved = false;
            while self.ended.is_none() && self.out.has_room() && !starved {
                match Pin::new(&mut *body).poll_frame(cx) {
                    Poll::Ready(Some(Ok(frame))) => {
                        self.out.push(frame.into_data().unwrap_or_default());
                        if body.is_end_stream() {
                            self.end();
                        }
                    }
                    Poll::Ready(Some(Err(error))) => self.ended = Some(Err(error.into())),
                    Poll::Ready(None) => self.end(),
                    Poll::Pending => starved = true,
                }
            }
            ready!(self.out.poll_write(cx, io.io()))?;
            if let Some(ended) = self.ended.take() {
                return Poll::Ready(ended);
            }
            if starved {
                return Poll::Pending;
            }
        }
    }

    fn end(&mut self) {
        self.ended = Some(Ok(()));
        self.out.push_end();
    }

    /// Reads what comes meanwhile, which is how the client's end is seen.
    fn poll_early<T: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        io: &mut Prefixed<T>,
        peer: &Peer,
    ) -> io::Result<()> {
        while self.early.len() < EARLY {
            // Few, since a stream seldom reads anything, and never keeps room for it.
            let mut bytes = [0; 256];
            let mut read = ReadBuf::new(&mut bytes);
            match io.poll_more(cx, &mut read) {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::BytesMut;
    use http_body::Frame;
    use tokio::io::{AsyncReadExt, duplex};

    use super::*;

    /// Always has another frame. Counts those it gave, and how often its own work was done.
    #[derive(Clone, Default)]
    struct Endless {
        given: Arc<AtomicUsize>,
        beside: Arc<AtomicUsize>,
    }

    impl http_body::Body for Endless {
        type Data = Bytes;
        type Error = Broken;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
            self.given.fetch_add(1, Ordering::Relaxed);
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 4096])))))
        }
    }

    impl Body for Endless {
        fn poll_beside(&mut self, _: &mut Context<'_>) {
            self.beside.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn a_body_works_on_while_its_client_takes_nothing_and_is_asked_for_no_frame() {
        let (io, mut client) = duplex(1024);
        let mut io = Prefixed::http1(BytesMut::new(), Turn::new(), io);
        let body = Endless::default();
        let answer = Answer { response: Response::new(body.clone()), closes: false };
        let (_closing, told) = watch::channel(false);
        let peer = Peer::detached("client", "client");
        let mut writing = pin!(write(&mut io, answer, &peer, &told));
        let counts = || (body.given.load(Ordering::Relaxed), body.beside.load(Ordering::Relaxed));
        for polls in 1..=3 {
            let blocked = poll_fn(|cx| Poll::Ready(writing.as_mut().poll(cx).is_pending())).await;
            assert!(blocked && counts() == (1, polls), "{:?} after {polls}", counts());
        }
        // Once it takes something it is given more.
        while counts().0 == 1 {
            client.read_u8().await.expect("there is more");
            assert!(poll_fn(|cx| Poll::Ready(writing.as_mut().poll(cx).is_pending())).await);
        }
    }
}
