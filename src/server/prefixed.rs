//! What hyper reads and writes a connection through.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{
    framing::{END, Framing},
    head::Turn,
};

/// An IO with bytes that were read from it already, and whose end is told one turn late to each who reads it.
///
/// hyper reads on while a request is served, and at the end of the input it drops what serves it, which may not have
/// been run since the last bytes came. A message that came whole with the FIN right behind it must be taken first.
///
/// On HTTP/1.1 what is read is watched. What hyper would answer by itself to what is no request is kept back, and the
/// connection is not shut down by it: both are left to who gets the IO back.
pub(super) struct Prefixed<T> {
    prefix: Bytes,
    http1: Option<Http1>,
    io: T,
    ended: bool,
}

/// What is known of an HTTP/1.1 connection.
struct Http1 {
    framing: Framing,
    turn: Turn,
}

impl<T> Prefixed<T> {
    /// An HTTP/2 connection.
    pub(super) fn http2(prefix: BytesMut, io: T) -> Self {
        Self { prefix: prefix.freeze(), http1: None, io, ended: false }
    }

    /// An HTTP/1.1 connection.
    pub(super) fn http1(mut prefix: BytesMut, turn: Turn, io: T) -> Self {
        let mut framing = Framing::default();
        if framing.watch(&mut prefix) {
            prefix.extend_from_slice(END);
        }
        let http1 = Some(Http1 { framing, turn });
        Self { prefix: prefix.freeze(), http1, io, ended: false }
    }

    /// The same connection for another hyper, with bytes that were read from it here. The end is told that one late too.
    pub(super) fn again(mut self, read: Bytes, turn: Turn) -> Self {
        self.read_again(read);
        self.ended = false;
        if let Some(http1) = &mut self.http1 {
            http1.turn = turn;
        }
        self
    }

    /// Has these bytes read once more, before all others.
    pub(super) fn read_again(&mut self, read: Bytes) {
        if !read.is_empty() {
            let rest = std::mem::take(&mut self.prefix);
            self.prefix = if rest.is_empty() { read } else { [read, rest].concat().into() };
        }
    }

    /// What is read from and written to without hyper.
    pub(super) fn io(&mut self) -> &mut T {
        &mut self.io
    }

    /// Gives the IO back. `None` if an answer was not written to its end: nothing can follow it.
    pub(super) fn into_inner(self) -> Option<T> {
        let unflushed = self.http1.is_some_and(|http1| http1.turn.is_unflushed());
        (!unflushed).then_some(self.io)
    }
}

impl<T: AsyncRead + Unpin> Prefixed<T> {
    /// Reads, and nobody is told.
    pub(super) fn poll_more(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.prefix.is_empty() {
            let some = self.prefix.len().min(buf.remaining());
            buf.put_slice(&self.prefix[..some]);
            self.prefix.advance(some);
            if self.prefix.is_empty() {
                // Frees what it was a part of.
                self.prefix = Bytes::new();
            }
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        std::task::ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        if buf.filled().len() == before && buf.remaining() > 0 && !std::mem::replace(&mut self.ended, true) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(http1) = &mut self.http1
            && http1.framing.watch(&mut buf.filled_mut()[before..])
        {
            self.prefix = Bytes::from_static(END);
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Prefixed<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = self.poll_more(cx, buf);
        if let Some(http1) = &self.http1 {
            http1.turn.read(buf.filled().len() > before);
        }
        polled
    }
}

impl Http1 {
    /// hyper writes; true if that is kept back.
    fn keeps_back(&mut self) -> bool {
        let failed = self.turn.has_failed();
        if !failed {
            self.turn.set_unflushed(true);
        }
        failed
    }

    /// hyper has written all it had; true if that was kept back.
    fn flushed(&mut self) -> bool {
        let failed = self.turn.has_failed();
        if !failed {
            self.turn.set_unflushed(false);
        }
        failed
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Prefixed<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.http1.as_mut().is_some_and(Http1::keeps_back) {
            return Poll::Ready(Ok(buf.len()));
        }
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.http1.as_mut().is_some_and(Http1::keeps_back) {
            return Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()));
        }
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.http1.as_mut().is_some_and(Http1::flushed) {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.http1.is_some() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    /// A connection of which `GE` was read already, and its other end.
    fn begun() -> (Prefixed<DuplexStream>, Turn, DuplexStream) {
        let (near, far) = duplex(1024);
        let turn = Turn::new();
        turn.begin();
        (Prefixed::http1(BytesMut::from("GE"), turn.clone(), near), turn, far)
    }

    async fn read(io: &mut Prefixed<DuplexStream>, expected: &str) {
        let mut bytes = vec![0; expected.len()];
        io.read_exact(&mut bytes).await.expect("there");
        assert_eq!(String::from_utf8_lossy(&bytes), expected);
    }

    /// Asks for bytes that have not come.
    async fn starve(io: &mut Prefixed<DuplexStream>) {
        let nothing = std::future::poll_fn(|cx| {
            let mut bytes = [0; 8];
            let polled = Pin::new(&mut *io).poll_read(cx, &mut ReadBuf::new(&mut bytes));
            Poll::Ready(polled.is_pending())
        });
        assert!(nothing.await);
    }

    #[tokio::test]
    async fn each_hyper_is_told_of_the_end_one_turn_late() {
        let (mut io, _, far) = begun();
        read(&mut io, "GE").await;
        drop(far);
        for message in ["", "GET", "POST"] {
            io = io.again(Bytes::from_static(message.as_bytes()), Turn::new());
            read(&mut io, message).await;
            starve(&mut io).await;
            assert_eq!(io.read(&mut [0; 8]).await.expect("the end"), 0, "behind {message:?}");
        }
    }

    /// What comes out at the other end.
    async fn told(io: Prefixed<DuplexStream>, mut far: DuplexStream) -> (String, bool) {
        let whole = io.into_inner().is_some();
        let mut told = String::new();
        far.read_to_string(&mut told).await.expect("text");
        (told, whole)
    }

    #[tokio::test]
    async fn what_hyper_says_of_bytes_it_did_not_take_is_kept_back() {
        let (mut io, _, far) = begun();
        read(&mut io, "GE").await;
        io.write_all(b"bad").await.expect("taken");
        io.flush().await.expect("taken");
        io.shutdown().await.expect("taken");
        assert_eq!(told(io, far).await, (String::new(), true));
    }

    #[tokio::test]
    async fn what_it_writes_of_an_answer_passes_also_while_it_waits_for_the_next_head() {
        let (mut io, turn, far) = begun();
        read(&mut io, "GE").await;
        turn.end();
        io.write_all(b"first, ").await.expect("written");
        turn.begin();
        starve(&mut io).await;
        io.write_all(b"and the rest").await.expect("written");
        io.flush().await.expect("flushed");
        assert_eq!(told(io, far).await, ("first, and the rest".to_owned(), true));
    }

    #[tokio::test]
    async fn nothing_can_follow_an_answer_of_which_hyper_has_the_rest() {
        let (mut io, turn, mut far) = begun();
        read(&mut io, "GE").await;
        turn.end();
        io.write_all(b"first, ").await.expect("written");
        turn.begin();
        starve(&mut io).await;
        far.write_all(b"bad").await.expect("written");
        read(&mut io, "bad").await;
        io.write_all(b"the rest, and what hyper says").await.expect("taken");
        io.flush().await.expect("taken");
        assert_eq!(told(io, far).await, ("first, ".to_owned(), false));
    }
}
