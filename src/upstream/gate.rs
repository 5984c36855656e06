//! Stops hyper behind the head of an event stream, so that its body is read without hyper.
//!
//! hyper holds four buffers for a connection, whatever goes over it, and an event stream is open for long and mostly
//! silent. Where a response begins with the head of a chunked event stream, and that is beyond all doubt, hyper gets the
//! head and nothing more; what was read behind it waits here. Every other response passes as it came.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use memchr::memmem;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes of a request's header fields that hyper certainly takes together with the body before it writes.
const TOGETHER: usize = 16 * 1024;

/// The bytes of a connection, as hyper's client reads and writes them.
#[derive(Debug)]
pub(super) struct Gate<T> {
    io: T,
    keeper: Keeper,
    /// What was read behind the head.
    rest: Bytes,
}

/// Says when a gate may close, and whether it has.
#[derive(Clone, Debug, Default)]
pub(super) struct Keeper(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// The next bytes that are read begin a response that may have a body.
    awaits: AtomicBool,
    /// hyper has the head of an event stream, and reads nothing more.
    closed: AtomicBool,
    /// Bytes of the request are still with hyper.
    unflushed: AtomicBool,
}

impl Keeper {
    /// A request is sent next.
    pub(super) fn sends<B>(&self, request: &Request<B>) {
        let has_body = matches!(*request.method(), Method::GET | Method::POST);
        self.0.closed.store(false, Ordering::Relaxed);
        self.0.awaits.store(has_body && length(request.headers()) <= TOGETHER, Ordering::Relaxed);
    }

    /// Whether the body can be read without hyper. If not, hyper reads on.
    pub(super) fn is_closed(&self) -> bool {
        let closed = self.0.closed.swap(false, Ordering::Relaxed);
        closed && !self.0.unflushed.load(Ordering::Relaxed)
    }
}

fn length(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum()
}

impl<T> Gate<T> {
    /// An open gate, at the start of a connection.
    pub(super) fn new(io: T, keeper: Keeper) -> Self {
        Self { io, keeper, rest: Bytes::new() }
    }

    /// Gives the IO back, and what was read from it already.
    pub(super) fn into_parts(self) -> (T, Bytes) {
        (self.io, self.rest)
    }

    fn wrote<R>(&self, wrote: Poll<R>) -> Poll<R> {
        self.keeper.0.unflushed.store(true, Ordering::Relaxed);
        wrote
    }
}

/// Where a response's head ends, if it is whole and that of a chunked event stream on a connection that stays, beyond all
/// doubt.
fn head(bytes: &[u8]) -> Option<usize> {
    let end = memmem::find(bytes, b"\r\n\r\n")?;
    let lines = bytes[..end].strip_prefix(b"HTTP/1.1 200 ")?;
    // Most answers are none; then this is all that is looked for.
    memmem::find(lines, b"text/event-stream")?;
    let mut lines = lines.split(|byte| *byte == b'\n');
    lines.next()?.strip_suffix(b"\r")?;
    let (mut streams, mut codings) = (0, 0);
    let mut lines = lines.peekable();
    while let Some(line) = lines.next() {
        let line = if lines.peek().is_some() { line.strip_suffix(b"\r")? } else { line };
        let colon = memchr::memchr(b':', line)?;
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if !name.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')) {
            return None;
        }
        if name.eq_ignore_ascii_case(b"content-type") {
            streams += if value.starts_with(b"text/event-stream") { 1 } else { 2 };
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            codings += if value.eq_ignore_ascii_case(b"chunked") { 1 } else { 2 };
        } else if name.eq_ignore_ascii_case(b"content-length")
            || name.eq_ignore_ascii_case(b"connection") && !value.eq_ignore_ascii_case(b"keep-alive")
        {
            return None;
        }
    }
    (streams == 1 && codings == 1).then_some(end + 4)
}

impl<T: AsyncRead + Unpin> AsyncRead for Gate<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let state = &this.keeper.0;
        if state.closed.load(Ordering::Relaxed) {
            // Whoever opens it reads again.
            return Poll::Pending;
        }
        if !this.rest.is_empty() {
            let some = this.rest.split_to(this.rest.len().min(buf.remaining()));
            buf.put_slice(&some);
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        if state.awaits.swap(false, Ordering::Relaxed)
            && let Some(head) = head(&buf.filled()[before..])
        {
            this.rest = Bytes::copy_from_slice(&buf.filled()[before + head..]);
            buf.set_filled(before + head);
            state.closed.store(true, Ordering::Relaxed);
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Gate<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.io).poll_write(cx, buf);
        this.wrote(wrote)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.io).poll_write_vectored(cx, bufs);
        this.wrote(wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    /// hyper flushes when it has nothing left to write.
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.io).poll_flush(cx))?;
        this.keeper.0.unflushed.store(false, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_head_of_a_chunked_event_stream_is_taken() {
        let plain =
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        let more = "HTTP/1.1 200 \r\nDate: x: y\r\nContent-Type:text/event-stream; charset=utf-8\r\n\
            Connection: Keep-Alive\r\nTransfer-Encoding: Chunked\r\n\r\n";
        for whole in [plain, more] {
            assert_eq!(head(whole.as_bytes()), Some(whole.len()));
            assert_eq!(head(format!("{whole}5\r\n").as_bytes()), Some(whole.len()));
            for end in 0..whole.len() {
                assert_eq!(head(&whole.as_bytes()[..end]), None, "{end}");
            }
        }
        for (from, to) in [
            ("HTTP/1.1", "HTTP/1.0"),
            ("200", "201"),
            ("200 OK\r\n", "200 OK\n"),
            ("\r\ntransfer", "\ntransfer"),
            ("content-type", " content-type"),
            ("content-type", "content-type "),
            ("event-stream", "html"),
            ("chunked", "gzip, chunked"),
            ("chunked", "chunked\r\ntransfer-encoding: chunked"),
            ("chunked", "chunked\r\ncontent-length: 5"),
            ("chunked", "chunked\r\nconnection: close"),
            ("chunked", "chunked\r\nconnection: upgrade"),
            ("chunked", "chunked\r\nno colon"),
            ("transfer-encoding: chunked", "x: y"),
        ] {
            assert_eq!(head(plain.replacen(from, to, 1).as_bytes()), None, "{to}");
        }
    }
}
