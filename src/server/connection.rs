//! One connection: TLS if asked, then HTTP/1.1 or HTTP/2 as its first bytes say.

use std::{
    convert::Infallible,
    error::Error,
    future::Future,
    io,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use bytes::BytesMut;
use http::{Request, Response};
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::watch,
    time::timeout,
};
use tower::{Service, ServiceExt};

use super::{
    BadHead, Body, Open, Settings,
    bad_head::{self, HEAD},
    head::{HeadTimer, Turn},
    io::{BytesRead, Io, Peer, Socket},
    prefixed::Prefixed,
    stall::{Streams, Told},
    stream::{self, Handed},
};

/// How an HTTP/2 connection begins (RFC 9113 § 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of a head that `h2` reads. What is beyond it answers by itself, with a status that nobody knows of; so this is far
/// beyond what the service takes.
const HTTP2_HEAD: u32 = 4 * HEAD;
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
    /// Whether it is to end after what is in flight.
    pub(super) told: watch::Receiver<bool>,
    pub(super) _open: Open,
}

/// Why a connection ended early: never the server's fault, so it is only worth a debug line.
type Ended = Box<dyn Error + Send + Sync>;

impl Connection {
    /// Serves it to its end.
    pub(super) async fn serve<S, R, B>(self, service: S, refuse: R)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send + 'static,
        R: FnOnce(&Peer, &BadHead) -> Response<B> + Send,
        B: Body,
    {
        if let Err(error) = self.handshake(service, refuse).await {
            let cause = error.source();
            tracing::debug!(peer = %self.label, %error, cause, "client left");
        }
    }

    async fn handshake<S, R, B>(&self, service: S, refuse: R) -> Result<(), Ended>
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send + 'static,
        R: FnOnce(&Peer, &BadHead) -> Response<B> + Send,
        B: Body,
    {
        let io = Io::new(Arc::clone(&self.socket), self.settings.limits.client_stall);
        let read = io.bytes_read();
        match &self.settings.tls {
            None => self.speak(io, read, service, refuse).await,
            // Boxed, as HTTP/2 is: a connection keeps no room for what it does not speak.
            Some(acceptor) => {
                Box::pin(async move {
                    let accepted = Box::pin(acceptor.accept(io));
                    let stream = timeout(self.settings.limits.header_timeout, accepted).await??;
                    self.speak(Box::new(stream), read, service, refuse).await
                })
                .await
            }
        }
    }

    async fn speak<T, S, R, B>(&self, mut io: T, read: BytesRead, service: S, refuse: R) -> Result<(), Ended>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send + 'static,
        R: FnOnce(&Peer, &BadHead) -> Response<B> + Send,
        B: Body,
    {
        let limits = &self.settings.limits;
        let mut told = self.told.clone();
        let mut first = BytesMut::with_capacity(4 << 10);
        let begun = tokio::select! {
            _ = told.wait_for(|closing| *closing) => return Ok(()),
            begun = timeout(limits.header_timeout, begins_http2(&mut io, &mut first)) => begun,
        };
        let mut peer = Peer { label: Arc::clone(&self.label), host: Arc::clone(&self.host), socket: None };
        let http2 = match begun {
            Ok(begun) => begun?,
            Err(late) if first.is_empty() => return Err(late.into()),
            // It may have been a head of HTTP/1.1 as well: the beginning is the same.
            Err(_) => {
                let refusal = refuse(&peer, &BadHead::TooSlow(limits.header_timeout));
                return Ok(Box::pin(bad_head::answer(io, refusal)).await?);
            }
        };
        let Some(http2) = http2 else { return Ok(()) };
        peer.socket = (!http2).then(|| Arc::clone(&self.socket));
        let from = peer.clone();
        let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(from.clone());
            service.clone().oneshot(request)
        });
        if http2 {
            return Box::pin(self.speak_http2(Prefixed::http2(first, io), service)).await;
        }
        let turn = Turn::new();
        let io = Prefixed::http1(first, turn.clone(), io);
        self.speak_http1(io, turn, read, service, &peer, refuse).await
    }

    async fn speak_http2<T, S, B>(&self, io: Prefixed<T>, service: S) -> Result<(), Ended>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        S: hyper::service::Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
        S::Future: Send + 'static,
        B: Body,
    {
        let service = hyper::service::service_fn(move |request| {
            let answer = service.call(request);
            async move {
                let mut response = answer.await?;
                response.body_mut().detach();
                Ok::<_, Infallible>(response.map(Told::new))
            }
        });
        let streams = Streams { stall: self.settings.limits.client_stall };
        let connection = http2::Builder::new(streams)
            .timer(TokioTimer::new())
            .keep_alive_interval(PING)
            .keep_alive_timeout(PING)
            .max_concurrent_streams(STREAMS)
            .max_header_list_size(HTTP2_HEAD)
            .max_send_buf_size(BUFFER)
            .serve_connection(TokioIo::new(io), service);
        let connection = pin!(connection);
        Ok(until_told(connection, http2::Connection::graceful_shutdown, self.told.clone()).await?)
    }

    /// hyper reads the requests and writes the answers, but for streams: for as long as one lasts there is no hyper.
    async fn speak_http1<T, S, R, B>(
        &self,
        mut io: Prefixed<T>,
        mut turn: Turn,
        read: BytesRead,
        service: S,
        peer: &Peer,
        refuse: R,
    ) -> Result<(), Ended>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        S: hyper::service::Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone,
        S::Future: Send + 'static,
        R: FnOnce(&Peer, &BadHead) -> Response<B> + Send,
        B: Body,
    {
        let limits = &self.settings.limits;
        loop {
            let handed = Handed::new();
            let (left, about, plain) = (handed.clone(), turn.clone(), service.clone());
            let service = hyper::service::service_fn(move |request| {
                let asked = stream::Asked::of(&request);
                let (answer, left, about) = (plain.call(request), left.clone(), about.clone());
                async move { Ok::<_, Infallible>(left.pass(asked, answer.await?, &about).await) }
            });
            let connection = http1::Builder::new()
                .timer(HeadTimer::new(read.clone(), turn, limits.header_timeout))
                .header_read_timeout(KEEP_ALIVE)
                .max_header_size(HEAD as usize)
                .max_buf_size(BUFFER)
                .writev(false)
                .serve_connection(TokioIo::new(io), service);
            // Boxed, so that a stream keeps no room for it.
            let mut connection = Box::new(connection);
            let close = http1::Connection::graceful_shutdown;
            let driven = until_told(Pin::new(&mut *connection), close, self.told.clone());
            let ended = handed.or_ended(driven).await;
            let parts = connection.into_parts();
            let answer = match ended {
                Ok(answer) => answer,
                // Boxed, so that a connection keeps no room for its end while it lives.
                Err(ended) => {
                    let refuse = |why: &BadHead| refuse(peer, why);
                    return Box::pin(end(parts, ended, limits.header_timeout, refuse)).await;
                }
            };
            io = parts.io.into_inner();
            io.read_again(parts.read_buf);
            // It reads through the same IO, and so is told what that tells.
            match stream::write(&mut io, answer, peer, &self.told).await? {
                stream::End::Whole(early) => {
                    turn = Turn::again(&early);
                    io = io.again(early.into(), turn.clone());
                }
                stream::End::Last => {
                    if let Some(mut io) = io.into_inner() {
                        io.shutdown().await?;
                    }
                    return Ok(());
                }
            }
        }
    }
}

/// Ends an HTTP/1.1 connection, with an answer to what hyper could not read. hyper would end it too, but not where a client
/// has once asked for an upgrade.
async fn end<T, S, B>(
    parts: http1::Parts<TokioIo<Prefixed<T>>, S>,
    ended: hyper::Result<()>,
    header_timeout: Duration,
    refuse: impl FnOnce(&BadHead) -> Response<B>,
) -> Result<(), Ended>
where
    T: AsyncRead + AsyncWrite + Unpin,
    B: Body,
{
    let http1::Parts { io, read_buf, .. } = parts;
    let io = io.into_inner().into_inner();
    let Err(error) = ended else {
        if let Some(mut io) = io {
            io.shutdown().await?;
        }
        return Ok(());
    };
    let bad_head = BadHead::of(&error, &read_buf, header_timeout);
    let (Some(io), Some(bad_head)) = (io, bad_head) else { return Err(error.into()) };
    drop(read_buf);
    bad_head::answer(io, refuse(&bad_head)).await?;
    Ok(())
}

/// Drives a connection to its end; when told to close, it ends after what is in flight.
async fn until_told<C: Future<Output = hyper::Result<()>>>(
    mut connection: Pin<&mut C>,
    close: impl FnOnce(Pin<&mut C>),
    mut told: watch::Receiver<bool>,
) -> hyper::Result<()> {
    tokio::select! {
        ended = &mut connection => return ended,
        _ = told.wait_for(|closing| *closing) => {}
    }
    close(connection.as_mut());
    connection.await
}

/// Reads into `bytes` until it is clear whether the client speaks HTTP/2. `None`: it left before.
///
/// hyper-util does the same, but waits for ever for a client that never says enough.
async fn begins_http2(io: &mut (impl AsyncRead + Unpin), bytes: &mut BytesMut) -> io::Result<Option<bool>> {
    while bytes.len() < PREFACE.len() && PREFACE.starts_with(bytes) {
        if io.read_buf(bytes).await? == 0 {
            return Ok(None);
        }
    }
    Ok(Some(bytes.starts_with(PREFACE)))
}
