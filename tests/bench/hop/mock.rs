//! The upstream: one thread, no HTTP library, so that it is never what is measured. The called tool says how it answers.
//!
//! Every event is a chunk of its own. Streams of the tool `open` stay open; the tools `emit`, `end` and `closed`, called
//! past the hop, have all of them say something, end them, and tell when which was closed. The tool `torrent` never ends.

use std::{
    collections::HashMap,
    convert::Infallible,
    fs, io,
    path::Path,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::PrivateKeyDer;
use serde::Deserialize;
use tokio::{
    net::{TcpListener, TcpStream},
    spawn,
    time::{Instant, interval},
};
use tokio_rustls::TlsAcceptor;

const JSON: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
const SSE: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
/// Bytes of a write of a stream at full speed.
const WRITE: usize = 8 * 1024;

/// Serves for ever; tells its plain and its TLS address on stdout and leaves its certificate in `dir`.
pub(crate) async fn serve(dir: &Path) -> io::Result<()> {
    let plain = TcpListener::bind("127.0.0.1:0").await?;
    let tls = TcpListener::bind("127.0.0.1:0").await?;
    let acceptor = acceptor(dir);
    println!("{} {}", plain.local_addr()?, tls.local_addr()?);
    spawn(async move {
        loop {
            let (stream, _) = tls.accept().await.expect("a connection");
            spawn(serve_http2(stream, acceptor.clone()));
        }
    });
    let streams = Arc::new(Streams::default());
    loop {
        let (stream, _) = plain.accept().await?;
        spawn(serve_connection(Arc::new(stream), streams.clone()));
    }
}

#[derive(Default)]
struct Streams {
    open: Mutex<HashMap<u64, Arc<TcpStream>>>,
    /// Id and nanoseconds since the epoch.
    closed: Mutex<Vec<(u64, u64)>>,
}

#[derive(Deserialize)]
struct Call {
    id: u64,
    params: Params,
}

#[derive(Deserialize)]
struct Params {
    #[serde(default)]
    name: String,
    #[serde(default)]
    arguments: Arguments,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Arguments {
    events: u64,
    ms: u64,
    /// Visits of a stream in a second, and events at each.
    rate: u64,
    burst: usize,
}

async fn serve_connection(stream: Arc<TcpStream>, streams: Arc<Streams>) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let mut input = Vec::new();
    let mut opened = None;
    loop {
        let call = next_call(&stream, &mut input).await;
        if let Some(id) = opened.take()
            && streams.open.lock().expect("whole").remove(&id).is_some()
        {
            streams.closed.lock().expect("whole").push((id, nanos(SystemTime::now())));
        }
        let Call { id, params } = call?;
        let asked = params.arguments;
        match params.name.as_str() {
            "open" => {
                write_all(&stream, &[SSE.as_bytes(), &chunk(&log(0))].concat()).await?;
                streams.open.lock().expect("whole").insert(id, stream.clone());
                opened = Some(id);
            }
            "log" | "progress" => {
                let progress = params.name == "progress";
                let mut output = SSE.as_bytes().to_vec();
                for n in 1..=asked.events {
                    output.extend(chunk(&if progress { progressed(id, n) } else { log(n) }));
                    if output.len() >= WRITE {
                        write_all(&stream, &output).await?;
                        output.clear();
                    }
                }
                output.extend(last(id, "done"));
                write_all(&stream, &output).await?;
            }
            "flood" => {
                write_all(&stream, SSE.as_bytes()).await?;
                let until = Instant::now() + Duration::from_millis(asked.ms);
                let ends = nanos(SystemTime::now() + Duration::from_millis(asked.ms));
                let mut n = 0;
                while Instant::now() < until {
                    let batch: Vec<u8> = (n..n + 32).flat_map(|n| chunk(&progressed(id, n))).collect();
                    n += 32;
                    write_all(&stream, &batch).await?;
                    tokio::task::yield_now().await;
                }
                write_all(&stream, &last(id, &ends.to_string())).await?;
            }
            "torrent" => {
                write_all(&stream, SSE.as_bytes()).await?;
                let mut batch = Torrent::new(id);
                loop {
                    write_all(&stream, batch.next()).await?;
                    tokio::task::yield_now().await;
                }
            }
            "emit" => {
                let emitted = emit(&streams, &asked).await;
                write_all(&stream, &json(id, &emitted.to_string())).await?;
            }
            "end" => {
                let open: Vec<_> = streams.open.lock().expect("whole").drain().collect();
                for (id, stream) in open {
                    write_all(&stream, &last(id, "done")).await?;
                }
                write_all(&stream, &json(id, "")).await?;
            }
            "closed" => {
                let closed = std::mem::take(&mut *streams.closed.lock().expect("whole"));
                write_all(&stream, &json(id, &serde_json::to_string(&closed).ok()?)).await?;
            }
            // A listing too: of no tool.
            _ => write_all(&stream, &json(id, &"j".repeat(900))).await?,
        }
    }
}

/// Visits the open streams in turn, evenly spread over the time; gives how many events that made.
async fn emit(streams: &Streams, asked: &Arguments) -> u64 {
    let open: Vec<_> = streams.open.lock().expect("whole").values().cloned().collect();
    let began = Instant::now();
    let mut tick = interval(Duration::from_millis(1));
    let visits = asked.rate * asked.ms / 1000;
    let mut visited = 0;
    while visited < visits {
        tick.tick().await;
        let due = began.elapsed().as_micros() as u64 * asked.rate / 1_000_000;
        while visited < due.min(visits) {
            let event = chunk(&log(nanos(SystemTime::now()))).repeat(asked.burst);
            let wrote = open[visited as usize % open.len()].try_write(&event);
            assert_eq!(wrote.ok(), Some(event.len()), "nobody falls behind at this rate");
            visited += 1;
        }
    }
    visits * asked.burst as u64
}

async fn next_call(stream: &TcpStream, input: &mut Vec<u8>) -> Option<Call> {
    loop {
        if let Some(head) = memchr::memmem::find(input, b"\r\n\r\n") {
            let text = std::str::from_utf8(&input[..head]).ok()?.to_ascii_lowercase();
            let length = text.split("content-length:").nth(1)?.lines().next()?.trim();
            let end = head + 4 + length.parse::<usize>().ok()?;
            if input.len() >= end {
                let call = serde_json::from_slice(&input[head + 4..end]).expect("a call of the bench");
                input.drain(..end);
                return Some(call);
            }
        }
        stream.readable().await.ok()?;
        match stream.try_read_buf(input) {
            Ok(0) => return None,
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return None,
            _ => {}
        }
    }
}

async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> Option<()> {
    while !bytes.is_empty() {
        match stream.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.writable().await.ok()?,
            Err(_) => return None,
        }
    }
    Some(())
}

fn nanos(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

fn result(id: u64, text: &str) -> String {
    let text = text.replace('"', "'");
    format!(
        r#"{{"jsonrpc":"2.0","id":{id},"result":{{"resultType":"complete","content":[{{"type":"text","text":"{text}"}}],"tools":[]}}}}"#
    )
}

fn json(id: u64, text: &str) -> Vec<u8> {
    let body = result(id, text);
    format!("{JSON}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn log(n: u64) -> String {
    let pad = "l".repeat(100);
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"info","data":"{n} {pad}"}}}}"#
    )
}

fn progressed(token: u64, n: u64) -> String {
    let pad = "p".repeat(60);
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":{n},"message":"{pad}"}}}}"#
    )
}

fn chunk(data: &str) -> Vec<u8> {
    let event = format!("event: message\ndata: {data}\n\n");
    format!("{:x}\r\n{event}\r\n", event.len()).into_bytes()
}

/// Progress that rises for ever, at no more than the cost of its writes.
struct Torrent {
    batch: Vec<u8>,
    /// Where the numbers stand, all of as many digits.
    places: Vec<usize>,
    number: u64,
}

impl Torrent {
    fn new(token: u64) -> Self {
        let number = 1_000_000_000;
        let batch = chunk(&progressed(token, number)).repeat(32);
        let places = memchr::memmem::find_iter(&batch, number.to_string().as_bytes()).collect();
        Self { batch, places, number }
    }

    fn next(&mut self) -> &[u8] {
        for place in &self.places {
            self.number += 1;
            let digits = self.number.to_string();
            self.batch[*place..place + digits.len()].copy_from_slice(digits.as_bytes());
        }
        &self.batch
    }
}

/// The final response and the end of the stream.
fn last(id: u64, text: &str) -> Vec<u8> {
    [&chunk(&result(id, text))[..], b"0\r\n\r\n"].concat()
}

fn acceptor(dir: &Path) -> TlsAcceptor {
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    fs::write(dir.join("ca.pem"), signed.cert.pem()).expect("the directory of the bench");
    let key = PrivateKeyDer::try_from(signed.signing_key.serialize_der()).expect("a key");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![signed.cert.der().clone()], key);
    let mut config = config.expect("its own certificate");
    config.alpn_protocols = vec![b"h2".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// HTTP/2 serves idle streams alone.
async fn serve_http2(stream: TcpStream, acceptor: TlsAcceptor) {
    let Ok(stream) = acceptor.accept(stream).await else { return };
    let service = service_fn(|request: Request<Incoming>| async {
        // A stream that is reset is dropped by hyper.
        let _ = request.into_body().collect().await;
        let event = format!("event: message\ndata: {}\n\n", log(0));
        let response = Response::new(Open(Some(event.into())));
        let typed = Response::builder().header("content-type", "text/event-stream");
        Ok::<_, Infallible>(typed.body(response.into_body()).expect("a response"))
    });
    let mut http2 = http2::Builder::new(TokioExecutor::new());
    // A client that leaves is no failure.
    let _ = http2.max_concurrent_streams(20_000).serve_connection(TokioIo::new(stream), service).await;
}

/// One event, and never an end.
struct Open(Option<Bytes>);

impl http_body::Body for Open {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.0.take() {
            Some(event) => Poll::Ready(Some(Ok(Frame::data(event)))),
            None => Poll::Pending,
        }
    }
}
