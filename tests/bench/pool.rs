//! What a call and an event cost in CPU to relay, with this pool and with hyper-util's pooled client, whose
//! connections are driven by tasks of their own. `cargo bench --bench pool` (Linux)
//!
//! Three threads: the node, the hop, the upstream; only the hop's time on a CPU is counted. Rounds alternate between
//! the two, so that both see the same machine; the median is printed.

use std::{convert::Infallible, fs, future::Future, net::SocketAddr, sync::Arc, thread, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo},
};
use mcp_sidecar::{
    relay::body::BoxError,
    upstream::{Sent, Settings, Upstream},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime, spawn,
    sync::mpsc,
    task::JoinSet,
};

const ROUNDS: usize = 9;
const CALLERS: usize = 16;
const CALLS: usize = 1000;
const STREAMS: usize = 8;
const EVENTS: usize = 20_000;

fn main() {
    let upstream = on_a_thread(serve_upstream);
    let pool = Sender::Pool(Arc::new(Upstream::new(Settings {
        name: "bench".to_owned(),
        url: format!("http://{upstream}").parse().expect("a URL"),
        connect_timeout: Duration::from_secs(5),
        tls: None,
        http1_only: true,
        idle_connections: CALLERS,
        idle_timeout: Duration::from_secs(60),
    })));
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let spawned = Sender::Spawned(Arc::new(Client::builder(TokioExecutor::new()).build(connector)), upstream);
    let (pool, spawned, task) = on_a_thread(|tell| serve_hops(pool, spawned, tell));
    let measuring = runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    measuring.block_on(measure([pool, spawned], &task));
}

/// Runs `serve` on a thread of its own for ever, and waits for what it tells.
fn on_a_thread<T, F>(serve: impl FnOnce(mpsc::Sender<T>) -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = ()>,
{
    let (tell, mut told) = mpsc::channel(1);
    thread::spawn(move || {
        let serving = runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        serving.block_on(serve(tell));
    });
    told.blocking_recv().expect("it tells")
}

async fn measure(hops: [SocketAddr; 2], task: &str) {
    println!("us CPU, median of {ROUNDS} rounds       pool   spawned");
    for (what, path, callers, turns, units) in [
        ("a call (1 KiB of JSON)", "json", CALLERS, CALLS, 1),
        ("an event, one a write", "sse1", STREAMS, 1, EVENTS),
        ("an event, 32 a write", "sse32", STREAMS, 1, EVENTS),
    ] {
        let mut costs = [Vec::new(), Vec::new()];
        for round in 0..=ROUNDS {
            for side in [round % 2, 1 - round % 2] {
                let before = on_cpu(task);
                let mut callers_running = JoinSet::new();
                (0..callers).for_each(|_| drop(callers_running.spawn(call(hops[side], path, turns))));
                while let Some(ended) = callers_running.join_next().await {
                    ended.expect("no panic").expect("answers");
                }
                let spent = on_cpu(task) - before;
                if round > 0 {
                    costs[side].push(spent.as_secs_f64() * 1e6 / (callers * turns * units) as f64);
                }
            }
        }
        let [pool, spawned] = costs.map(|mut costs| {
            costs.sort_by(f64::total_cmp);
            costs[costs.len() / 2]
        });
        println!("{what:<34} {pool:>7.2} {spawned:>9.2}");
    }
}

/// The node: the same call over and over, each answer read to its end.
async fn call(hop: SocketAddr, path: &str, turns: usize) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(hop).await?;
    stream.set_nodelay(true)?;
    let request =
        format!("POST /{path} HTTP/1.1\r\nhost: hop\r\ncontent-length: 512\r\n\r\n{}", "x".repeat(512));
    let end: &[u8] = if path == "json" { b"jj!" } else { b"\r\n0\r\n\r\n" };
    let mut read = Vec::with_capacity(64 * 1024);
    for _ in 0..turns {
        stream.write_all(request.as_bytes()).await?;
        read.clear();
        while !read.ends_with(end) {
            let used = read.len().saturating_sub(end.len());
            read.drain(..used);
            assert_ne!(stream.read_buf(&mut read).await?, 0);
        }
    }
    Ok(())
}

/// The two ways to send.
#[derive(Clone)]
enum Sender {
    Pool(Arc<Upstream>),
    Spawned(Arc<Client<HttpConnector, Full<Bytes>>>, SocketAddr),
}

/// One listener for each; tells their addresses and the file with this thread's time.
async fn serve_hops(pool: Sender, spawned: Sender, tell: mpsc::Sender<(SocketAddr, SocketAddr, String)>) {
    let (pool, spawned) = (serve_hop(pool).await, serve_hop(spawned).await);
    let task = fs::read_link("/proc/thread-self").expect("Linux");
    let told = tell.send((pool, spawned, format!("/proc/{}/schedstat", task.display()))).await;
    told.expect("it waits");
    std::future::pending::<()>().await;
}

async fn serve_hop(sender: Sender) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            stream.set_nodelay(true).expect("a connection");
            let sender = sender.clone();
            let service = service_fn(move |request| relay(sender.clone(), request));
            spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    address
}

async fn relay(
    sender: Sender,
    request: Request<Incoming>,
) -> Result<Response<UnsyncBoxBody<Bytes, BoxError>>, Infallible> {
    let (mut head, body) = request.into_parts();
    let body = body.collect().await.expect("a body").to_bytes();
    Ok(match sender {
        Sender::Pool(upstream) => {
            let request = Request::from_parts(head, body);
            let response = upstream.send(request, &mut Sent::default()).await.expect("an answer");
            response.map(|body| body.map_err(BoxError::from).boxed_unsync())
        }
        Sender::Spawned(client, upstream) => {
            head.uri = format!("http://{upstream}{}", head.uri.path()).parse().expect("a URI");
            let request = Request::from_parts(head, Full::new(body));
            let response = client.request(request).await.expect("an answer");
            response.map(|body| body.map_err(BoxError::from).boxed_unsync())
        }
    })
}

/// How long the hop was running, from its `schedstat`.
fn on_cpu(task: &str) -> Duration {
    let text = fs::read_to_string(task).expect("it runs");
    Duration::from_nanos(text.split(' ').next().and_then(|nanos| nanos.parse().ok()).expect("a number"))
}

async fn serve_upstream(tell: mpsc::Sender<SocketAddr>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    tell.send(listener.local_addr().expect("an address")).await.expect("it waits");
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        spawn(answer(stream));
    }
}

async fn answer(mut stream: TcpStream) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let json = format!("HTTP/1.1 200 OK\r\ncontent-length: 1024\r\n\r\n{}!", "j".repeat(1023));
    let event = format!("data: {}\n\n", "e".repeat(192));
    let event = format!("{:x}\r\n{event}\r\n", event.len());
    let mut request = Vec::new();
    loop {
        // One request at a time, 512 bytes of body.
        while request
            .windows(4)
            .position(|four| four == b"\r\n\r\n")
            .is_none_or(|at| request.len() < at + 516)
        {
            if stream.read_buf(&mut request).await.ok()? == 0 {
                return None;
            }
        }
        let batch = match request.get(6..11)? {
            b"sse1 " => 1,
            b"sse32" => 32,
            _ => 0,
        };
        request.clear();
        if batch == 0 {
            stream.write_all(json.as_bytes()).await.ok()?;
            continue;
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.ok()?;
        for _ in 0..EVENTS / batch {
            stream.write_all(event.repeat(batch).as_bytes()).await.ok()?;
        }
        stream.write_all(b"0\r\n\r\n").await.ok()?;
    }
}
