//! One connection: TLS if asked, then HTTP/1.1 or HTTP/2 as its first bytes say.

use std::{
    convert::Infallible,
    error::Error,
    future::Future,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use http::{Request, Response};
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    sync::watch,
    time::timeout,
};
use tower::{Service, ServiceExt};

use super::{
    Open, Phase, Settings,
    framing::Framing,
    head::HeadTimer,
    io::{BytesRead, Io, Peer, Socket},
};

/// How an HTTP/2 connection begins (RFC 9113 § 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of a request's head, beyond which it is refused with 431. Mirrored MCP headers carry what arguments say, so it
/// is generous.
const HEAD: u32 = 64 << 10;
/// Bytes that hyper holds for one stream or connection on top of our own queues.
const BUFFER: usize = 64 << 10;
/// How long a connection without a request is kept: longer than clients keep theirs (90 s in Go and reqwest), so
/// that it is not we who close under a request.
const KEEP_ALIVE: Duration = Duration::from_secs(120);
/// An HTTP/2 client that vanished is noticed after both.
const PING: Duration = Duration::from_secs(20);
/// Streams of one HTTP/2 connection at a time.
const STREAMS: u32 = 256;

/// An accepted connection.
pub(super) struct Connection {
    pub(super) socket: Arc<Socket>,
    pub(super) label: Arc<str>,
    pub(super) host: Arc<str>,
    pub(super) settings: Arc<Settings>,
    pub(super) told: watch::Receiver<Phase>,
    pub(super) _open: Open,
}

/// Why a connection ended early: never the server's fault, so it is only worth a debug line.
type Ended = Box<dyn Error + Send + Sync>;

impl Connection {
    /// Serves it to its end.
    pub(super) async fn serve<S, B>(self, service: S)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send + 'static,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let mut told = self.told.clone();
        let ended = tokio::select! {
            biased;
            // The sender lives until every connection has ended.
            _ = told.wait_for(|phase| *phase == Phase::Cut) => Ok(()),
            ended = self.handshake(service) => ended,
        };
        if let Err(error) = ended {
            let cause = error.source();
            tracing::debug!(peer = %self.label, %error, cause, "client left");
        }
    }

    async fn handshake<S, B>(&self, service: S) -> Result<(), Ended>
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send + 'static,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let io = Io::new(Arc::clone(&self.socket), self.settings.limits.client_stall);
        let read = io.bytes_read();
        match &self.settings.tls {
            None => self.speak(io, read, service).await,
            Some(acceptor) => {
                let stream = timeout(self.settings.limits.header_timeout, acceptor.accept(io)).await??;
                self.speak(stream, read, service).await
            }
        }
    }

    async fn speak<T, S, B>(&self, mut io: T, read: BytesRead, service: S) -> Result<(), Ended>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send + 'static,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let limits = &self.settings.limits;
        let mut told = self.told.clone();
        let first = tokio::select! {
            _ = told.wait_for(|phase| *phase >= Phase::Close) => return Ok(()),
            first = timeout(limits.header_timeout, first_bytes(&mut io)) => first??,
        };
        let Some((http2, mut first)) = first else { return Ok(()) };
        let mut framing = (!http2).then(Framing::default);
        if let Some(framing) = &mut framing {
            framing.watch(&mut first);
        }
        let io = TokioIo::new(Prefixed { prefix: first.freeze(), framing, io, ended: false });
        let socket = (!http2).then(|| Arc::clone(&self.socket));
        let peer = Peer { label: Arc::clone(&self.label), host: Arc::clone(&self.host), socket };
        let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer.clone());
            service.clone().oneshot(request)
        });
        let ended = if http2 {
            let connection = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .keep_alive_interval(PING)
                .keep_alive_timeout(PING)
                .max_concurrent_streams(STREAMS)
                .max_header_list_size(HEAD)
                .max_send_buf_size(BUFFER)
                .serve_connection(io, service);
            until_told(connection, http2::Connection::graceful_shutdown, told).await
        } else {
            let connection = http1::Builder::new()
                .timer(HeadTimer::new(read, limits.header_timeout))
                .header_read_timeout(KEEP_ALIVE)
                .max_header_size(HEAD as usize)
                .max_buf_size(BUFFER)
                .serve_connection(io, service);
            until_told(connection, http1::Connection::graceful_shutdown, told).await
        };
        ended.map_err(Into::into)
    }
}

/// Drives a connection to its end; when told to close, it ends after what is in flight.
async fn until_told<C: Future<Output = hyper::Result<()>>>(
    connection: C,
    close: impl FnOnce(Pin<&mut C>),
    mut told: watch::Receiver<Phase>,
) -> hyper::Result<()> {
    let mut connection = pin!(connection);
    tokio::select! {
        ended = &mut connection => return ended,
        _ = told.wait_for(|phase| *phase >= Phase::Close) => {}
    }
    close(connection.as_mut());
    connection.await
}

/// Reads until it is clear whether the client speaks HTTP/2; gives that and what was read. `None`: it said nothing.
///
/// hyper-util does the same, but waits for ever for a client that never says enough.
async fn first_bytes(io: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<(bool, BytesMut)>> {
    let mut bytes = BytesMut::with_capacity(4 << 10);
    while bytes.len() < PREFACE.len() && PREFACE.starts_with(&bytes) {
        if io.read_buf(&mut bytes).await? == 0 {
            return Ok(None);
        }
    }
    Ok(Some((bytes.starts_with(PREFACE), bytes)))
}

/// An IO with bytes that were read from it already, and whose end is told one turn late; what is read from it later is
/// watched.
///
/// hyper reads on while a request is served, and at the end of the input it drops what serves it, which may not have
/// been run since the last bytes came. A message that came whole with the FIN right behind it must be taken first.
struct Prefixed<T> {
    prefix: Bytes,
    framing: Option<Framing>,
    io: T,
    ended: bool,
}

impl<T: AsyncRead + Unpin> AsyncRead for Prefixed<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.prefix.is_empty() {
            let this = &mut *self;
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
            if buf.filled().len() == before
                && buf.remaining() > 0
                && !std::mem::replace(&mut this.ended, true)
            {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if let Some(framing) = &mut this.framing {
                framing.watch(&mut buf.filled_mut()[before..]);
            }
            return Poll::Ready(Ok(()));
        }
        let some = self.prefix.len().min(buf.remaining());
        buf.put_slice(&self.prefix[..some]);
        self.prefix.advance(some);
        if self.prefix.is_empty() {
            // Frees what it was a part of.
            self.prefix = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Prefixed<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
