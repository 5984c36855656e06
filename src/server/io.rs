//! The socket of a connection, shared between who reads and writes it, and [`Peer`], which only watches it.

use std::{
    future::Future,
    io,
    net::Shutdown,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf, Ready},
    net::{TcpStream, UnixStream},
    time::{Instant, Sleep, sleep},
};

use super::listener::USER_TIMEOUT;

/// After how long a socket is asked again whether its peer is gone, while bytes wait unread: readiness says only that
/// there is something, again and again. At first, and at the longest.
const ASK: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(80));

/// The other end of a node's connection.
#[derive(Clone, Debug)]
pub struct Peer {
    /// `ip:port`, or `unix`.
    pub label: Arc<str>,
    /// The address without its port; two connections of one client share it.
    pub host: Arc<str>,
    /// The socket, where hyper needs help to see its end.
    pub(super) socket: Option<Arc<Socket>>,
}

impl Peer {
    /// A peer without a socket, as tests and other fronts have it: [`Peer::closed`] never ends.
    pub fn detached(label: &str, host: &str) -> Self {
        Self { label: label.into(), host: host.into(), socket: None }
    }

    /// Ends when the peer is gone (FIN, RST), also while bytes of a next request wait unread, which hyper
    /// does not notice: it reads nothing more until the exchange is over. Never ends for HTTP/2, where hyper sees it.
    /// A FIN behind more bytes than the socket's buffers take has not arrived, and can't be seen.
    ///
    /// Costs nothing until it is polled, and then one registration with the socket.
    pub fn closed(&self) -> impl Future<Output = ()> + Send + 'static {
        let socket = self.socket.clone();
        async move {
            let Some(socket) = socket else { return std::future::pending().await };
            let mut ask = ASK.0;
            loop {
                match socket.readable().await {
                    Ok(ready) if !ready.is_read_closed() && !ready.is_error() => sleep(ask).await,
                    _ => return,
                }
                ask = (2 * ask).min(ASK.1);
            }
        }
    }
}

/// An accepted socket.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// The same expression on either socket.
macro_rules! on {
    ($socket:expr, $stream:ident => $call:expr) => {
        match $socket {
            Socket::Tcp($stream) => $call,
            Socket::Unix($stream) => $call,
        }
    };
}

impl Socket {
    async fn readable(&self) -> io::Result<Ready> {
        on!(self, stream => stream.ready(Interest::READABLE).await)
    }

    fn set_user_timeout(&self, timeout: Duration) {
        if let Self::Tcp(stream) = self {
            // Fails only for a socket that is gone, which the next write says.
            let _ = SockRef::from(stream).set_tcp_user_timeout(Some(timeout));
        }
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        on!(self, stream => SockRef::from(stream).shutdown(how))
    }
}

/// How many bytes a connection has read; what a head's time-out is measured by.
#[derive(Clone, Debug, Default)]
pub(super) struct BytesRead(Arc<AtomicU64>);

impl BytesRead {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Reads and writes a socket for hyper. A write that stays blocked for `stall` fails with `TimedOut`, which ends the
/// connection; no timer is armed while writes go through.
///
/// Dropped, it ends the connection, whoever else still holds the socket.
#[derive(Debug)]
pub(super) struct Io {
    socket: Arc<Socket>,
    read: BytesRead,
    stall: Duration,
    blocked: Option<Blocked>,
    linger: Option<Pin<Box<Sleep>>>,
}

/// How long a connection that was shut down takes what its client still sends. A close with bytes unread is a reset,
/// and that may destroy the answer on its way (RFC 9112 § 9.6): a 413 is answered to a client that is still sending.
pub(super) const LINGER: Duration = Duration::from_millis(500);

/// A write that waits for the client to take something.
#[derive(Debug)]
struct Blocked {
    until: Instant,
    timer: Pin<Box<Sleep>>,
    patient: bool,
}

/// A client may be slow for longer than the user time-out, which would end the connection: it runs for a closed window
/// too (Linux 5.11 and later). So it is lifted, well before it runs out, and then only the stall bounds the wait.
const PATIENCE: Duration = Duration::from_secs(5);

impl Io {
    pub(super) fn new(socket: Arc<Socket>, stall: Duration) -> Self {
        Self { socket, read: BytesRead::default(), stall, blocked: None, linger: None }
    }

    pub(super) fn bytes_read(&self) -> BytesRead {
        self.read.clone()
    }

    /// One try of `write` each time the socket is writable; the stall clock runs in between.
    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&Socket) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            if on!(&*self.socket, stream => stream.poll_write_ready(cx))?.is_pending() {
                return self.poll_stall(cx);
            }
            match write(&self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => {
                    if self.blocked.take().is_some_and(|blocked| blocked.patient) {
                        self.socket.set_user_timeout(USER_TIMEOUT);
                    }
                    return Poll::Ready(written);
                }
            }
        }
    }

    fn poll_stall(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let stall = self.stall;
        let blocked = self.blocked.get_or_insert_with(|| Blocked {
            until: Instant::now() + stall,
            timer: Box::pin(sleep(stall.min(PATIENCE))),
            patient: false,
        });
        while blocked.timer.as_mut().poll(cx).is_ready() {
            if Instant::now() >= blocked.until {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the client takes no more bytes",
                )));
            }
            blocked.patient = true;
            self.socket.set_user_timeout(stall + USER_TIMEOUT);
            blocked.timer.as_mut().reset(blocked.until);
        }
        Poll::Pending
    }
}

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(on!(&*self.socket, stream => stream.poll_read_ready(cx)))?;
            let room = buf.remaining();
            let mut read = None;
            // A read that leaves room has taken all there was (epoll(7)): told here that it would block, the runtime waits
            // for the next bytes by itself, where another read would only ask in vain.
            let tried = on!(&*self.socket, stream => stream.try_io(Interest::READABLE, || {
                let taken = *read.insert(stream.try_read_buf(buf)?);
                if (1..room).contains(&taken) { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
            }));
            if let Some(read) = read {
                self.read.0.fetch_add(read as u64, Ordering::Relaxed);
                return Poll::Ready(Ok(()));
            }
            match tried {
                Ok(()) => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |socket| on!(socket, stream => stream.try_write(buf)))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |socket| on!(socket, stream => stream.try_write_vectored(bufs)))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.linger.is_none() {
            this.socket.shutdown(Shutdown::Write)?;
        }
        let mut scratch = [0; 4096];
        // A client that sends as fast as this reads must not keep the thread.
        for _ in 0..16 {
            let read = on!(&*this.socket, stream => stream.try_read(&mut scratch));
            let blocked = matches!(&read, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
            if this.linger.is_none() && matches!(read, Ok(1..)) {
                this.linger = Some(Box::pin(sleep(LINGER)));
            }
            // Only a client that is sending is waited for: one that is idle may not look for long.
            let Some(linger) = &mut this.linger else { return Poll::Ready(Ok(())) };
            if !blocked && !matches!(read, Ok(1..)) || linger.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            if blocked {
                ready!(on!(&*this.socket, stream => stream.poll_read_ready(cx)))?;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        // A peer that is gone already has nothing left to shut down.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}
