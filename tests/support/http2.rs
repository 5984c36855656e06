//! HTTP/2 on either side of the sidecar: a server over TLS that answers stream by stream, and a node that speaks it
//! with prior knowledge and can reset one stream.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    sync::Arc,
};

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream, client, server::SendResponse};
use http::Request;
use tempfile::TempDir;
use tokio::{net::TcpStream, runtime::Runtime, time::timeout};

use super::{BOUND, Post, Watched, tls::Authority};

/// The server. It lives as long as this value.
#[derive(Debug)]
pub struct Server {
    port: u16,
    ca: String,
    seen: Watched<Seen>,
    _runtime: Runtime,
}

#[derive(Debug, Default)]
struct Seen {
    connections: usize,
    requests: usize,
    taken: usize,
    resets: VecDeque<Reason>,
}

impl Server {
    /// Answers each request with `answer`, which says with what its stream was reset, if it was. A body is read first.
    pub fn start<F>(answer: impl Fn(Request<Bytes>, SendResponse<Bytes>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Option<Reason>> + Send + 'static,
    {
        Self::with_limit(None, answer)
    }

    /// The same with so many streams at a time on one connection.
    pub fn with_limit<F>(
        limit: Option<u32>,
        answer: impl Fn(Request<Bytes>, SendResponse<Bytes>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Option<Reason>> + Send + 'static,
    {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        let authority = Authority::new();
        let (acceptor, ca) = (authority.issue().acceptor(&["h2"], None), authority.pem());
        let seen = Watched::new(Seen::default());
        let (into, answer) = (seen.clone(), Arc::new(answer));
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, seen, answer) = (acceptor.clone(), into.clone(), Arc::clone(&answer));
                tokio::spawn(async move {
                    let _ = stream.set_nodelay(true);
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let mut builder = h2::server::Builder::new();
                    if let Some(limit) = limit {
                        builder.max_concurrent_streams(limit);
                    }
                    let Ok(mut connection) = builder.handshake(stream).await else { return };
                    seen.change(|seen| seen.connections += 1);
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        let (seen, answer) = (seen.clone(), Arc::clone(&answer));
                        tokio::spawn(async move {
                            let (head, body) = request.into_parts();
                            let body = read(body).await;
                            seen.change(|seen| seen.requests += 1);
                            let ended = answer(Request::from_parts(head, body), respond).await;
                            seen.change(|seen| seen.resets.extend(ended));
                        });
                    }
                });
            }
        });
        Self { port, ca, seen, _runtime: runtime }
    }

    /// A configuration with this as upstream `mcp`; its authority's certificate is written to `folder`.
    pub fn config(&self, folder: &TempDir) -> String {
        let file = folder.path().join("ca.pem");
        std::fs::write(&file, &self.ca).unwrap();
        let (port, file) = (self.port, file.display());
        format!("[upstreams.mcp]\nurl = \"https://localhost:{port}/mcp\"\ntls = {{ ca = \"{file}\" }}\n")
    }

    /// How many connections came.
    pub fn connections(&self) -> usize {
        self.seen.lock().connections
    }

    /// How many requests came.
    pub fn count(&self) -> usize {
        self.seen.lock().requests
    }

    /// Waits until so many requests have come.
    pub fn wait_count(&self, count: usize) {
        self.seen.wait(
            &format!("{count} requests"),
            |seen| format!("{seen:?}"),
            |seen| (seen.requests >= count).then_some(()),
        );
    }

    /// Waits for the next request that no wait has taken.
    pub fn wait_request(&self) {
        self.seen.wait(
            "a request",
            |seen| format!("{seen:?}"),
            |seen| (seen.requests > seen.taken).then(|| seen.taken = seen.requests),
        );
    }

    /// Waits for the next reset.
    pub fn next_reset(&self) -> Reason {
        self.seen.wait(
            "a reset",
            |seen| format!("{seen:?}"),
            |seen| {
                seen.taken = seen.requests;
                seen.resets.pop_front()
            },
        )
    }
}

/// Waits until the request is reset before it was answered.
pub async fn until_reset(respond: &mut SendResponse<Bytes>) -> Reason {
    poll_fn(|cx| respond.poll_reset(cx)).await.unwrap()
}

/// Waits until the answer's stream is reset.
pub async fn until_stream_reset(stream: &mut SendStream<Bytes>) -> Reason {
    poll_fn(|cx| stream.poll_reset(cx)).await.unwrap()
}

async fn read(mut body: RecvStream) -> Bytes {
    let mut all = Vec::new();
    while let Some(Ok(piece)) = body.data().await {
        let _ = body.flow_control().release_capacity(piece.len());
        all.extend_from_slice(&piece);
    }
    all.into()
}

/// A node on one HTTP/2 connection.
#[derive(Debug)]
pub struct Node {
    runtime: Runtime,
    host: String,
    sender: client::SendRequest<Bytes>,
}

/// One of its requests.
#[derive(Debug)]
pub struct Stream {
    request: SendStream<Bytes>,
    response: client::ResponseFuture,
    body: Option<RecvStream>,
    read: Vec<u8>,
}

impl Node {
    /// Connects in clear text.
    pub fn connect(address: &str) -> Self {
        Self::with_window(address, 65_535)
    }

    /// The same, and grants each stream so many bytes at first.
    pub fn with_window(address: &str, window: u32) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let sender = runtime.block_on(async {
            let stream = TcpStream::connect(address).await.unwrap();
            let mut builder = client::Builder::new();
            let (sender, connection) = builder
                .initial_window_size(window)
                .initial_connection_window_size(1 << 24)
                .handshake(stream)
                .await
                .unwrap();
            tokio::spawn(connection);
            sender.ready().await.unwrap()
        });
        Self { runtime, host: address.to_owned(), sender }
    }

    /// Sends a whole request.
    pub fn send(&self, post: &Post) -> Stream {
        let mut request =
            Request::builder().method(post.method).uri(format!("http://{}{}", self.host, post.path));
        for (name, value) in &post.fields {
            request = request.header(name, value);
        }
        let (response, mut body) =
            self.sender.clone().send_request(request.body(()).unwrap(), false).unwrap();
        body.send_data(post.body.clone().into(), true).unwrap();
        Stream { request: body, response, body: None, read: Vec::new() }
    }

    /// Waits for the head of its response.
    pub fn head(&self, stream: &mut Stream) -> http::Response<()> {
        let response = self.runtime.block_on(async { timeout(BOUND, &mut stream.response).await });
        let (head, body) = response.expect("no head").unwrap().into_parts();
        stream.body = Some(body);
        http::Response::from_parts(head, ())
    }

    /// Reads on until the body contains `text` or ends; gives what has come of it.
    pub fn wait_body(&self, stream: &mut Stream, text: &str) -> String {
        if stream.body.is_none() {
            self.head(stream);
        }
        self.runtime.block_on(async {
            let body = stream.body.as_mut().unwrap();
            loop {
                let told = String::from_utf8_lossy(&stream.read).into_owned();
                if told.contains(text) {
                    return told;
                }
                match timeout(BOUND, body.data()).await.unwrap_or_else(|_| panic!("no {text}: {told}")) {
                    Some(piece) => {
                        let piece = piece.unwrap();
                        let _ = body.flow_control().release_capacity(piece.len());
                        stream.read.extend_from_slice(&piece);
                    }
                    None => return told,
                }
            }
        })
    }

    /// Reads the body to its end.
    pub fn rest(&self, stream: &mut Stream) -> String {
        self.wait_body(stream, "\u{0}")
    }

    /// Takes what comes of the body and grants no more, until the other side resets the stream; says with what.
    pub fn wait_reset(&self, stream: &mut Stream) -> Reason {
        if stream.body.is_none() {
            self.head(stream);
        }
        self.runtime.block_on(async {
            let body = stream.body.as_mut().unwrap();
            loop {
                match timeout(BOUND, body.data()).await.expect("no reset") {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return error.reason().unwrap(),
                    None => panic!("the body ended"),
                }
            }
        })
    }

    /// Resets one stream with CANCEL.
    pub fn reset(&self, mut stream: Stream) {
        stream.request.send_reset(Reason::CANCEL);
    }
}
