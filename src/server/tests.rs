mod streams;

use std::{
    net::{SocketAddr, TcpStream as BlockingStream},
    sync::atomic::{AtomicUsize, Ordering},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, StatusCode, Version};
use http_body::Frame;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    sync::{Notify, mpsc, oneshot},
    task::JoinHandle,
};

use super::*;
use crate::relay::body::Body;

/// Longer than anything here takes: a test that waits for it has failed.
const FAR: Duration = Duration::from_secs(20);

fn limits() -> Limits {
    Limits { connections: 100, header_timeout: FAR, client_stall: FAR }
}

/// A running server; dropped, it is gone.
struct Running {
    address: Address,
    settings: watch::Sender<Arc<Settings>>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Running {
    fn start<F, A>(address: &str, limits: Limits, tls: Option<tokio_rustls::TlsAcceptor>, answer: F) -> Self
    where
        F: Fn(Request<Incoming>) -> A + Clone + Send + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        let listener = Listener::bind(&address.parse().expect("an address")).expect("bound");
        let address = listener.address().clone();
        let (settings, watched) = watch::channel(Arc::new(Settings { limits, tls }));
        let (stop, stopped) = oneshot::channel::<()>();
        let service = tower::service_fn(move |request| {
            let answer = answer(request);
            async move { Ok(answer.await) }
        });
        let task = tokio::spawn(async move {
            let stop = async {
                let _ = stopped.await;
            };
            run(listener, watched, service, refuse, &Gauge::default(), stop).await;
        });
        Self { address, settings, stop: Some(stop), task }
    }

    fn tcp(&self) -> SocketAddr {
        match &self.address {
            Address::Tcp(address) => *address,
            Address::Unix(_) => panic!("it is a unix socket"),
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.tcp()).await.expect("connected")
    }

    fn stop(&mut self) {
        self.stop.take().expect("once").send(()).expect("it runs");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Says what was wrong.
fn refuse(peer: &Peer, why: &BadHead) -> Response<Body> {
    let body = Body::full(format!("{}: {why}", peer.host));
    Response::builder().status(why.status()).header("x-refused", "yes").body(body).expect("a response")
}

/// Says what it knows of the request.
async fn describe(request: Request<Incoming>) -> Response<Body> {
    let peer = request.extensions().get::<Peer>().expect("every request has its peer").clone();
    let (head, body) = request.into_parts();
    let length = body.collect().await.map_or(0, |body| body.to_bytes().len());
    let text = format!("{} {} {length} {} {} end", head.method, head.uri, peer.label, peer.host);
    Response::new(Body::full(text))
}

async fn text_until_close(stream: &mut (impl AsyncReadExt + Unpin)) -> String {
    let mut text = Vec::new();
    // A reset after the answer is an end too.
    let _ = timeout(FAR, stream.read_to_end(&mut text)).await.expect("it ends");
    String::from_utf8(text).expect("text")
}

async fn raw(running: &Running, request: &[u8]) -> String {
    let mut stream = running.connect().await;
    stream.write_all(request).await.expect("sent");
    text_until_close(&mut stream).await
}

/// Reads until `end` has come.
async fn text_until(stream: &mut (impl AsyncReadExt + Unpin), end: &str) -> String {
    let mut text = Vec::new();
    while !text.ends_with(end.as_bytes()) {
        let byte = timeout(FAR, stream.read_u8()).await.expect("in time").expect("not the end yet");
        text.push(byte);
    }
    String::from_utf8(text).expect("text")
}

#[tokio::test]
async fn requests_over_tcp_carry_their_peer() {
    let running = Running::start("127.0.0.1:0", limits(), None, describe);
    let mut stream = running.connect().await;
    let local = stream.local_addr().expect("bound");
    stream
        .write_all(b"POST /a?b HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc")
        .await
        .expect("sent");
    let answer = text_until_close(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.ends_with(&format!("\r\n\r\nPOST /a?b 3 {local} 127.0.0.1 end")), "{answer}");
}

#[tokio::test]
async fn http2_without_tls_is_spoken_to_who_begins_with_its_preface() {
    let running = Running::start("127.0.0.1:0", limits(), None, |request| async move {
        let peer = request.extensions().get::<Peer>().expect("there").clone();
        assert!(peer.socket.is_none(), "hyper sees the end of a stream itself");
        assert_eq!(request.version(), Version::HTTP_2);
        describe(request).await
    });
    let io = TokioIo::new(running.connect().await);
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.expect("h2");
    tokio::spawn(connection);
    let request = Request::post("http://h/x").body(Full::new(Bytes::from("hello"))).expect("a request");
    let response = sender.send_request(request).await.expect("answered");
    let body = response.into_body().collect().await.expect("whole").to_bytes();
    assert!(body.starts_with(b"POST http://h/x 5 127.0.0.1:"), "{body:?}");
}

#[tokio::test]
async fn a_unix_socket_is_served_and_its_file_goes_with_the_listener() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("sidecar.sock");
    // What a killed process leaves.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("bound"));
    let mut running = Running::start(&format!("unix:{}", path.display()), limits(), None, describe);
    assert!(
        Listener::bind(&running.address).is_err_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
    );

    let mut stream = UnixStream::connect(&path).await.expect("connected");
    stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").await.expect("sent");
    assert!(text_until_close(&mut stream).await.ends_with("GET / 0 unix unix end"));

    running.stop();
    timeout(FAR, &mut running.task).await.expect("in time").expect("no panic");
    assert!(!path.exists());
    std::fs::write(&path, "").expect("written");
    assert!(Listener::bind(&running.address).is_err(), "a file that is no socket is not replaced");
}

/// A certificate for `localhost`, as PEM files, and a client that trusts it.
fn certificate(folder: &TempDir) -> (tokio_rustls::TlsAcceptor, rustls::ClientConfig) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).expect("written");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("written");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).expect("a root");
    let client =
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
    (tls::acceptor(&cert, &key).expect("an acceptor"), client)
}

#[tokio::test]
async fn tls_is_spoken_with_http2_and_http1_offered() {
    let folder = TempDir::new().expect("a folder");
    let (acceptor, client) = certificate(&folder);
    let running = Running::start("127.0.0.1:0", limits(), Some(acceptor), describe);
    let connect = async |protocols: &[&[u8]]| {
        let mut client = client.clone();
        client.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        let name = "localhost".try_into().expect("a name");
        tokio_rustls::TlsConnector::from(Arc::new(client))
            .connect(name, running.connect().await)
            .await
            .expect("a handshake")
    };
    for protocols in [&[b"http/1.1".as_slice()][..], &[]] {
        let mut stream = connect(protocols).await;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").await.expect("sent");
        assert!(text_until_close(&mut stream).await.starts_with("HTTP/1.1 200"));
    }
    let stream = connect(&[b"h2", b"http/1.1"]).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("h2");
    tokio::spawn(connection);
    let request = Request::get("https://localhost/").body(Full::new(Bytes::new())).expect("a request");
    assert_eq!(sender.send_request(request).await.expect("answered").status(), StatusCode::OK);
}

#[test]
fn files_that_are_no_certificate_and_key_are_named() {
    let folder = TempDir::new().expect("a folder");
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    let reason = |text: &str| {
        std::fs::write(&key, text).expect("written");
        tls::acceptor(&cert, &key).err().expect("refused")
    };
    assert!(reason("").contains("cert.pem"));
    std::fs::write(&cert, made.cert.pem()).expect("written");
    assert!(reason("no key").contains("key.pem"));
    assert!(reason(&other.signing_key.serialize_pem()).contains("key.pem"), "another certificate's key");
}

/// Answers never, and says when the peer of a request is gone.
fn watching(
    gone: mpsc::UnboundedSender<()>,
) -> impl Fn(Request<Incoming>) -> std::future::Pending<Response<Body>> + Clone {
    move |request| {
        let closed = request.extensions().get::<Peer>().expect("there").closed();
        let gone = gone.clone();
        tokio::spawn(async move {
            closed.await;
            let _ = gone.send(());
        });
        std::future::pending()
    }
}

/// hyper drops the service's future of a connection that it sees end, and notices nothing of one with surplus bytes:
/// the exchange would run on unbounded.
#[tokio::test]
async fn a_peer_that_is_gone_is_noticed_although_bytes_of_a_next_request_wait() {
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n";
    let (sender, mut gone) = mpsc::unbounded_channel();
    let running = Running::start("127.0.0.1:0", limits(), None, watching(sender));
    for surplus in [&b""[..], b"\r\n", REQUEST, &[b'x'; 100_000]] {
        for reset in [false, true] {
            let mut stream = running.connect().await;
            stream.write_all(REQUEST).await.expect("sent");
            stream.write_all(surplus).await.expect("sent");
            assert!(
                timeout(Duration::from_millis(60), gone.recv()).await.is_err(),
                "a peer that is there is not gone"
            );
            if reset {
                stream.set_zero_linger().expect("an option");
            }
            drop(stream);
            let noticed = timeout(FAR, gone.recv()).await;
            assert!(noticed.is_ok(), "{} surplus bytes, reset: {reset}", surplus.len());
        }
    }
}

#[tokio::test]
async fn a_peer_is_gone_once_the_connection_was_closed_from_this_side() {
    let (sender, mut gone) = mpsc::unbounded_channel();
    let mut running = Running::start("127.0.0.1:0", limits(), None, watching(sender));
    let mut stream = running.connect().await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").await.expect("sent");
    assert!(timeout(Duration::from_millis(60), gone.recv()).await.is_err());
    running.stop();
    timeout(FAR, gone.recv()).await.expect("noticed");
    assert_eq!(text_until_close(&mut stream).await, "");
}

#[tokio::test]
async fn at_the_limit_of_connections_nothing_is_accepted_until_one_ends() {
    let running = Running::start("127.0.0.1:0", Limits { connections: 1, ..limits() }, None, describe);
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n";
    let mut first = running.connect().await;
    first.write_all(REQUEST).await.expect("sent");
    text_until(&mut first, " end").await;
    let mut second = running.connect().await;
    second.write_all(REQUEST).await.expect("sent");
    assert!(timeout(Duration::from_millis(60), second.read_u8()).await.is_err());
    drop(first);
    text_until(&mut second, " end").await;

    let mut third = running.connect().await;
    third.write_all(REQUEST).await.expect("sent");
    assert!(timeout(Duration::from_millis(60), third.read_u8()).await.is_err());
    running.settings.send_modify(|settings| {
        let limits = Limits { connections: 2, ..settings.limits.clone() };
        *settings = Arc::new(Settings { limits, tls: None });
    });
    text_until(&mut third, " end").await;
}

/// A body without an end; says when it is dropped, and counts what was taken.
struct Endless {
    taken: Arc<AtomicUsize>,
    chunk: Option<Bytes>,
    _dropped: DropSignal,
}

struct DropSignal(Arc<Notify>);

impl Drop for DropSignal {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(chunk) = &self.chunk else { return Poll::Pending };
        self.taken.fetch_add(chunk.len(), Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(chunk.clone()))))
    }
}

/// Answers with endless bodies, of chunks or of silence.
#[derive(Clone, Default)]
struct Endlessly {
    chunk: Option<Bytes>,
    taken: Arc<AtomicUsize>,
    dropped: Arc<Notify>,
}

impl Endlessly {
    fn start(&self, limits: Limits) -> Running {
        let this = self.clone();
        Running::start("127.0.0.1:0", limits, None, move |_| {
            let _dropped = DropSignal(Arc::clone(&this.dropped));
            let body = Endless { taken: Arc::clone(&this.taken), chunk: this.chunk.clone(), _dropped };
            std::future::ready(Response::new(Body::new(body)))
        })
    }
}

#[tokio::test]
async fn a_client_that_takes_no_byte_is_closed_and_one_that_is_slow_is_not() {
    let body = Endlessly { chunk: Some(Bytes::from_static(&[b'x'; 16 << 10])), ..Endlessly::default() };
    let stall = Duration::from_millis(300);
    let running = body.start(Limits { client_stall: stall, ..limits() });
    let mut stream = running.connect().await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").await.expect("sent");
    // Slow for three times as long as a stall may be.
    let mut some = vec![0; 1 << 20];
    for _ in 0..9 {
        sleep(stall / 3).await;
        stream.read_exact(&mut some).await.expect("it is served");
    }
    assert!(timeout(Duration::ZERO, body.dropped.notified()).await.is_err());
    timeout(FAR, body.dropped.notified()).await.expect("closed");
    assert!(body.taken.load(Ordering::Relaxed) < 64 << 20, "backpressure held");
}

#[tokio::test]
async fn a_silent_stream_is_no_stall() {
    let body = Endlessly::default();
    let running = body.start(Limits { client_stall: Duration::from_millis(50), ..limits() });
    let mut stream = running.connect().await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").await.expect("sent");
    assert!(timeout(Duration::from_millis(300), body.dropped.notified()).await.is_err());
}

#[tokio::test]
async fn a_client_that_sends_its_first_bytes_or_head_slowly_is_closed() {
    let limits = Limits { header_timeout: Duration::from_millis(150), ..limits() };
    let running = Running::start("127.0.0.1:0", limits, None, describe);
    for beginning in [&b""[..], b"\r\n"] {
        assert_eq!(raw(&running, beginning).await, "");
    }
    for beginning in [&b"PRI * HTTP"[..], b"GET / HTTP/1.1\r\nHost: h\r\n"] {
        assert_refused(&raw(&running, beginning).await, "408", "a head");
    }
    // Bytes that go on coming do not move the end.
    let mut stream = running.connect().await;
    stream.write_all(b"GET / HTTP/1.1\r\nX: ").await.expect("sent");
    let dribble = async {
        while stream.write_all(b"x").await.is_ok() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(FAR, dribble).await.expect("closed");
}

#[tokio::test]
async fn a_connection_between_requests_is_not_closed_by_the_time_out_of_heads() {
    let header_timeout = Duration::from_millis(100);
    let running = Running::start("127.0.0.1:0", Limits { header_timeout, ..limits() }, None, describe);
    let mut stream = running.connect().await;
    for _ in 0..2 {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").await.expect("sent");
        text_until(&mut stream, " end").await;
        sleep(header_timeout * 3).await;
    }
    stream.write_all(b"GET / HT").await.expect("sent");
    assert_refused(&text_until_close(&mut stream).await, "408", "a later head is bounded too");
}

#[tokio::test]
async fn an_answer_before_the_body_was_read_reaches_a_client_that_is_still_sending() {
    let running = Running::start("127.0.0.1:0", limits(), None, |_| async {
        let mut response = Response::new(Body::full("too large"));
        *response.status_mut() = StatusCode::PAYLOAD_TOO_LARGE;
        response
    });
    let address = running.tcp();
    let answer = tokio::task::spawn_blocking(move || {
        use std::io::{Read, Write};
        let mut stream = BlockingStream::connect(address).expect("connected");
        stream.write_all(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 8000000\r\n\r\n").expect("sent");
        // Until the server has had enough of it.
        let _ = stream.write_all(&vec![b'x'; 8_000_000]);
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    });
    let answer = timeout(FAR, answer).await.expect("in time").expect("no panic");
    assert!(answer.starts_with("HTTP/1.1 413") && answer.ends_with("too large"), "{answer}");
}

#[tokio::test]
async fn until_the_stop_connections_are_accepted_and_then_what_is_in_flight_is_finished() {
    let (called, mut calls) = mpsc::unbounded_channel();
    let go = Arc::new(Notify::new());
    let mut running = Running::start("127.0.0.1:0", limits(), None, {
        let go = Arc::clone(&go);
        move |request| {
            let (called, go) = (called.clone(), Arc::clone(&go));
            async move {
                let _ = called.send(());
                go.notified().await;
                describe(request).await
            }
        }
    });
    let mut idle = running.connect().await;
    let mut busy = running.connect().await;
    busy.write_all(b"GET /busy HTTP/1.1\r\nHost: h\r\n\r\n").await.expect("sent");
    timeout(FAR, calls.recv()).await.expect("called");
    running.stop();
    assert_eq!(text_until_close(&mut idle).await, "");
    go.notify_one();
    let answer = text_until_close(&mut busy).await;
    assert!(answer.contains("GET /busy"), "{answer}");
    timeout(FAR, &mut running.task).await.expect("in time").expect("no panic");
    assert!(TcpStream::connect(running.tcp()).await.is_err());
}

#[tokio::test]
async fn a_stream_that_does_not_end_is_cut_a_second_after_the_stop() {
    let body = Endlessly::default();
    let mut running = body.start(limits());
    let mut stream = running.connect().await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").await.expect("sent");
    text_until(&mut stream, "\r\n\r\n").await;
    running.stop();
    timeout(FAR, &mut running.task).await.expect("in time").expect("no panic");
    timeout(FAR, body.dropped.notified()).await.expect("dropped");
}

/// What hyper can't read, so that it is refused in the service's place. `requests_that_hyper_lets_through` has what it does not.
#[tokio::test]
async fn requests_with_doubtful_framing_are_refused_and_the_connection_is_closed() {
    let running = Running::start("127.0.0.1:0", limits(), None, describe);
    let rest = "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n";
    let cases = [
        ("unlike lengths", "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
        ("lengths alike", "Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd"),
        ("a length and a coding", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("a coding and a length", "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"),
        ("a length list", "Content-Length: 3, 4\r\n\r\nabcd"),
        ("a signed length", "Content-Length: +3\r\n\r\nabc"),
        ("a negative length", "Content-Length: -1\r\n\r\n"),
        ("a length beyond 64 bits", "Content-Length: 99999999999999999999\r\n\r\n"),
        ("another last coding", "Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
        ("an unknown coding", "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
        ("a space before the colon", "X : 1\r\n\r\n"),
        ("a bad name", "X@: 1\r\n\r\n"),
        ("a folded line", "X: 1\r\n 2\r\n\r\n"),
        ("a bare CR", "X: 1\r2\r\n\r\n"),
        ("a NUL", "X: \0\r\n\r\n"),
        ("a bad chunk size", "Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n"),
        ("a chunk size beyond 64 bits", "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n\r\n"),
        ("a chunk longer than it says", "Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n"),
    ];
    for (what, fields) in cases {
        let request = format!("POST / HTTP/1.1\r\nHost: h\r\n{fields}{rest}");
        let head = request.find("\r\n\r\n").expect("a head") + 4;
        for cut in [0, 1, 20, head - 6, head - 3, head - 1, head] {
            let mut stream = running.connect().await;
            stream.set_nodelay(true).expect("set");
            stream.write_all(&request.as_bytes()[..cut]).await.expect("sent");
            if cut > 0 {
                // Long enough for it to be read alone, mostly; either way the answer is the same.
                sleep(Duration::from_millis(10)).await;
            }
            // It may be refused already.
            let _ = stream.write_all(&request.as_bytes()[cut..]).await;
            let answer = text_until_close(&mut stream).await;
            assert!(!answer.contains("smuggled"), "{what}, cut at {cut}: {answer}");
            if !what.contains("chunk ") {
                assert_refused(&answer, "400", &format!("{what}, cut at {cut}"));
            }
        }
    }
    assert_refused(&raw(&running, b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n").await, "400", "no preface");
    for (what, line) in [
        ("no version", "GET /"),
        ("another version", "GET / HTTP/1.2"),
        ("a space in the target", "GET /a b HTTP/1.1"),
        ("a bad byte in the target", "GET /a\u{1} HTTP/1.1"),
        ("a bad method", "G@T / HTTP/1.1"),
    ] {
        let answer = raw(&running, format!("{line}\r\nHost: h\r\n\r\n{rest}").as_bytes()).await;
        assert!(!answer.contains("smuggled"), "{what}: {answer}");
        assert_refused(&answer, "400", what);
    }
    let large = format!("GET / HTTP/1.1\r\nHost: h\r\nX: {}\r\n\r\n", "x".repeat(80 << 10));
    assert_refused(&raw(&running, large.as_bytes()).await, "431", "a large field");
    let many = format!("GET / HTTP/1.1\r\nHost: h\r\n{}\r\n", "X: 1\r\n".repeat(200));
    assert_refused(&raw(&running, many.as_bytes()).await, "431", "many fields");
}

/// The one answer is not hyper's.
fn assert_refused(answer: &str, status: &str, what: &str) {
    assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{what}: {answer}");
    assert!(answer.contains("\r\nx-refused: yes\r\n"), "{what}: {answer}");
    assert!(answer.contains("\r\n\r\n127.0.0.1: the request head "), "{what}: {answer}");
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{what}: {answer}");
}

/// What hyper lets through, so that the flow refuses it: the flow sees all it needs for that.
#[tokio::test]
async fn requests_that_hyper_lets_through_show_the_flow_what_is_wrong() {
    let running = Running::start("127.0.0.1:0", limits(), None, |request| async move {
        let values = |headers: &HeaderMap, name| headers.get_all(name).iter().count();
        let (method, uri) = (request.method(), request.uri());
        let hosts = values(request.headers(), http::header::HOST);
        let length = values(request.headers(), http::header::CONTENT_LENGTH);
        let coding = values(request.headers(), http::header::TRANSFER_ENCODING);
        let seen = format!("{method} {uri} host {hosts} length {length} coding {coding}");
        // A success has no body where the method is CONNECT.
        Response::builder().status(StatusCode::IM_A_TEAPOT).body(Body::full(seen)).expect("a response")
    });
    for (request, seen) in [
        ("GET / HTTP/1.1\r\n", "GET / host 0 length 0 coding 0"),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n", "GET / host 2 length 0 coding 0"),
        ("GET http://evil/ HTTP/1.1\r\nHost: h\r\n", "GET http://evil/ host 1 length 0 coding 0"),
        ("CONNECT evil:80 HTTP/1.1\r\nHost: h\r\n", "CONNECT evil:80 host 1 length 0 coding 0"),
        ("TRACE / HTTP/1.1\r\nHost: h\r\n", "TRACE / host 1 length 0 coding 0"),
    ] {
        let answer = raw(&running, format!("{request}Connection: close\r\n\r\n").as_bytes()).await;
        assert!(answer.ends_with(seen), "{request}: {answer}");
    }
}

#[tokio::test]
async fn a_connection_keeps_no_room_for_tls_or_http2() {
    let (socket, _client) = UnixStream::pair().expect("a pair");
    let (_closing, told) = watch::channel(false);
    let connection = connection::Connection {
        socket: Arc::new(io::Socket::Unix(socket)),
        label: "unix".into(),
        host: "unix".into(),
        settings: Arc::new(Settings { limits: limits(), tls: None }),
        told,
        _open: Open::one_more(&Gauge::default()),
    };
    let service = tower::service_fn(|request| async { Ok::<_, Infallible>(describe(request).await) });
    let bytes = size_of_val(&connection.serve(service, refuse));
    assert!(bytes <= 2560, "a connection takes {bytes} bytes");
}
