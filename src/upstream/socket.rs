//! The byte stream under a connection: TCP, with or without TLS.
//!
//! Two things differ from a plain socket. A failed write is told by the read side, so that an answer
//! which came before the peer closed is still read (an early 401, 413 or 429 while the request's body
//! was on its way). And a [`Probe`] lets the next read ask the kernel even if the runtime has not been
//! told yet that the peer has closed.

use std::{
    io::{self, IoSlice, Read},
    mem::MaybeUninit,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::client::TlsStream;

/// A TCP connection.
#[derive(Debug)]
pub(super) struct Socket {
    tcp: TcpStream,
    probe: Probe,
    /// Why writing ended; reading goes on.
    write_error: Option<io::ErrorKind>,
}

/// While set, reads ask the kernel first.
#[derive(Clone, Debug, Default)]
pub(super) struct Probe(Arc<AtomicBool>);

impl Probe {
    pub(super) fn set(&self, on: bool) {
        self.0.store(on, Ordering::Relaxed);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Socket {
    pub(super) fn new(tcp: TcpStream) -> Self {
        Self { tcp, probe: Probe::default(), write_error: None }
    }

    /// What the kernel holds, read past the runtime's idea of readiness. False: nothing is there.
    fn read_now(&self, buf: &mut ReadBuf<'_>) -> io::Result<bool> {
        let socket = SockRef::from(&self.tcp);
        match socket.peek(&mut [MaybeUninit::uninit()]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            peeked => peeked?,
        };
        let n = (&*socket).read(buf.initialize_unfilled())?;
        buf.advance(n);
        Ok(true)
    }

    /// Holds a write error of a closed peer back: the peer may have answered before it closed. The read side then
    /// gives that answer, or the end, and whoever drives the connection is woken by it.
    fn hold_back(&mut self, wrote: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match wrote {
            Poll::Ready(Err(error)) if is_closed_by_peer(error.kind()) => {
                self.write_error = Some(error.kind());
                Poll::Pending
            }
            wrote => wrote,
        }
    }
}

fn is_closed_by_peer(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut};
    matches!(kind, BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut)
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.probe.is_set() && this.read_now(buf)? {
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.tcp).poll_read(cx, buf))?;
        match this.write_error {
            // The kernel tells a reset once, and the write took it: the end that is left here is none.
            Some(kind) if buf.filled().len() == before && buf.remaining() > 0 => {
                Poll::Ready(Err(kind.into()))
            }
            _ => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.write_error.is_some() {
            return Poll::Pending;
        }
        let wrote = Pin::new(&mut this.tcp).poll_write(cx, buf);
        this.hold_back(wrote)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.write_error.is_some() {
            return Poll::Pending;
        }
        let wrote = Pin::new(&mut this.tcp).poll_write_vectored(cx, bufs);
        this.hold_back(wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_shutdown(cx)
    }
}

/// A connection's bytes, as HTTP reads and writes them.
#[derive(Debug)]
pub(super) enum Stream {
    /// TCP alone.
    Plain(Socket),
    /// TLS over it.
    Tls(Box<TlsStream<Socket>>),
}

impl Stream {
    /// Its probe.
    pub(super) fn probe(&self) -> Probe {
        match self {
            Self::Plain(socket) => socket.probe.clone(),
            Self::Tls(tls) => tls.get_ref().0.probe.clone(),
        }
    }

    /// The handshake chose HTTP/2.
    pub(super) fn chose_http2(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(tls) => tls.get_ref().1.alpn_protocol() == Some(b"h2"),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            Self::Tls(tls) => Pin::new(tls).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write(cx, buf),
            Self::Tls(tls) => Pin::new(tls).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write_vectored(cx, bufs),
            Self::Tls(tls) => Pin::new(tls).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(socket) => socket.is_write_vectored(),
            Self::Tls(tls) => tls.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Self::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}
