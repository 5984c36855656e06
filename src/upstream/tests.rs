//! Against servers scripted byte by byte: what they saw is the promise.

mod answer;
mod http1;
mod http2;
mod socket;
mod tls;

use std::{future::Future, net::SocketAddr, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use super::{Body, Error, Sent, Settings, Upstream};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
const EVENTS: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// Waits for what must happen soon: a test that would hang fails instead.
async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(10), future).await.expect("it happens soon")
}

fn settings(url: &str) -> Settings {
    Settings {
        name: "test".to_owned(),
        url: url.parse().expect("a URL"),
        connect_timeout: Duration::from_secs(5),
        tls: None,
        http1_only: false,
        idle_connections: 8,
        idle_timeout: Duration::from_secs(60),
    }
}

fn call(body: impl Into<Bytes>) -> Request<Bytes> {
    Request::post("/mcp?x=1").header("content-type", "application/json").body(body.into()).expect("a request")
}

/// Sends and reads the answer to its end.
async fn exchange(upstream: &Upstream, request: Request<Bytes>) -> Result<(StatusCode, Bytes, Sent), Error> {
    let mut sent = Sent::default();
    let response = soon(upstream.send(request, &mut sent)).await?;
    let status = response.status();
    let body = soon(response.into_body().collect()).await?.to_bytes();
    Ok((status, body, sent))
}

async fn send(upstream: &Upstream, request: Request<Bytes>) -> Result<Response<Body>, Error> {
    soon(upstream.send(request, &mut Sent::default())).await
}

/// The next chunk.
async fn next(body: &mut Body) -> Option<Result<Bytes, Error>> {
    Some(soon(body.frame()).await?.map(|frame| frame.into_data().expect("data")))
}

/// A listener on a free port.
struct Server(TcpListener);

impl Server {
    async fn start() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    fn upstream(&self) -> Upstream {
        Upstream::new(settings(&format!("http://{}/mcp", self.address())))
    }

    async fn accept(&self) -> Peer<TcpStream> {
        Peer::new(soon(self.0.accept()).await.unwrap().0)
    }

    /// Nobody has connected who was not accepted.
    async fn is_quiet(&self) -> bool {
        timeout(Duration::from_millis(50), self.0.accept()).await.is_err()
    }
}

/// The server's end of one connection.
struct Peer<S> {
    stream: S,
    unread: Vec<u8>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Peer<S> {
    fn new(stream: S) -> Self {
        Self { stream, unread: Vec::new() }
    }

    /// Reads one request: its head as text, and its body.
    async fn request(&mut self) -> (String, Vec<u8>) {
        let end = loop {
            if let Some(end) = self.unread.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
            self.more().await;
        };
        let head = String::from_utf8(self.unread.drain(..end).collect()).unwrap();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.map_or(0, |length| length.parse().unwrap());
        while self.unread.len() < length {
            self.more().await;
        }
        (head, self.unread.drain(..length).collect())
    }

    async fn more(&mut self) {
        let n = soon(self.stream.read_buf(&mut self.unread)).await.unwrap();
        assert_ne!(n, 0, "the connection ended within a request");
    }

    async fn write(&mut self, text: &str) {
        soon(self.stream.write_all(text.as_bytes())).await.unwrap();
        soon(self.stream.flush()).await.unwrap();
    }

    /// Waits until the other side has closed; gives what came before.
    async fn closed(mut self) -> Vec<u8> {
        let _ = soon(self.stream.read_to_end(&mut self.unread)).await;
        self.unread
    }
}

/// Closes with a reset instead of a FIN.
fn reset(Peer { stream, .. }: Peer<TcpStream>) {
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}
