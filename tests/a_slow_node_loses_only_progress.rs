//! The upstream is read on while the node is slow, progress is
//! merged and at capacity dropped with a mark, nothing else is ever lost, and memory stays bounded.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use flate2::{Compression, write::GzEncoder};
use serde_json::Value;
use socket2::{Domain, SockRef, Socket, Type};
use support::{
    BOUND, Client, Gate, Over, Post, Sidecar, Upstream, Watched,
    http::{Body, Head},
    http2::Node,
    mcp::{call, event, modern_call, progress, result},
    sse,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    runtime::{Builder, Runtime},
    time::Instant,
};

/// So small that the kernel holds little for a node that reads nothing.
const RECEIVE: usize = 4096;
/// Bytes of the queue in these tests.
const QUEUE: usize = 256 * 1024;
/// What a stream may hold beside its queue: a frame given out, what the connection has taken, a chunk just read.
const BESIDE: usize = 1 << 20;
/// What a connection holds that stands still: what hyper took, one frame of ours, and its buffers.
const PER_CONNECTION: usize = 512 * 1024;
/// KiB that the process may grow by for a single stream, most of it the allocator's own.
const ALONE: usize = 32 * 1024;

/// Without a rate limit, so that only what is adjacent is merged and the queue fills.
fn sidecar(upstream: &Upstream, more: &str) -> Sidecar {
    Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\n{more}\n[upstreams.mcp.progress]\nqueue_bytes = \"256KiB\"\nmin_interval = \"0\"\n\
         [upstreams.warm]\nurl = \"{}\"\n",
        upstream.url(),
        Upstream::sse(&[progress(1, 1), result(1)]).url()
    ))
}

/// Its memory, in KiB, after a first stream, which touches what every stream does.
fn warm(sidecar: &Sidecar) -> usize {
    sidecar.client().ask(&call(1).at("/warm"));
    sidecar.rss_kib()
}

/// The lines of `count` exchanges with the upstream under test.
fn lines(sidecar: &Sidecar, count: usize) -> Vec<Value> {
    let mine = |line: &Value| line["upstream"] == "mcp";
    let mut wanted = count;
    loop {
        let lines: Vec<Value> = sidecar.wait_lines(wanted).into_iter().filter(mine).collect();
        if lines.len() >= count {
            return lines;
        }
        wanted += 1;
    }
}

/// Connects, makes the call and reads nothing.
fn stalled(sidecar: &Sidecar, post: &Post) -> Client {
    let client = Client::stalled(&sidecar.listen, Some(RECEIVE));
    client.send(post);
    client
}

/// Progress with a message of `size` bytes.
fn padded(token: impl std::fmt::Display, n: usize, size: usize) -> String {
    let message = "p".repeat(size);
    progress(token, format!(r#"{n},"message":"{message}""#))
}

/// Anything that is no progress, of `size` bytes.
fn log(n: usize, size: usize) -> String {
    let text = "l".repeat(size);
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"info","data":{{"n":{n},"text":"{text}"}}}}}}"#
    )
}

/// The events that a script has written so far.
fn written(counter: &Watched<usize>, at_least: usize) {
    counter.wait_for(
        Duration::from_secs(60),
        &format!("{at_least} events to be taken"),
        |written| format!("{written} events were"),
        |written| (*written >= at_least).then_some(()),
    );
}

/// Waits until nothing has moved for a while: no event is written, and what stands unread in the sidecar's sockets to this
/// upstream stays the same. Gives that, in bytes: more than 0 when reading has paused.
fn stands_still(upstream: &Upstream, counter: &Watched<usize>) -> usize {
    let end = Instant::now() + Duration::from_secs(60);
    let (mut last, mut since) = ((0, 0), Instant::now());
    while since.elapsed() < Duration::from_millis(1000) || last.0 == 0 {
        assert!(Instant::now() < end, "still going on at {last:?}");
        thread::sleep(Duration::from_millis(20));
        let now = (*counter.lock(), unread(upstream));
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    last.1
}

/// Bytes in the receive queues of connections whose other end is this upstream (proc_net_tcp(5)).
fn unread(upstream: &Upstream) -> usize {
    let port: u16 = upstream.address.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0);
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let queued = table.lines().filter_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let theirs = columns.get(2)?.ends_with(&format!(":{port:04X}"));
        let queue = columns.get(4)?.split_once(':')?.1;
        usize::from_str_radix(queue, 16).ok().filter(|_| theirs)
    });
    queued.sum()
}

/// Streams `messages(id)` to every call, counted, and then the result; waits for the gate before the result, if any.
fn flood(
    messages: impl Fn(usize, &mut dyn FnMut(String)) + Send + Sync + 'static,
    last: impl Fn(&Value) -> String + Send + Sync + 'static,
) -> (Upstream, Watched<usize>) {
    let counter = Watched::new(0);
    let count = counter.clone();
    let upstream = Upstream::start(move |request, reply| {
        let id = &request.json()["id"];
        let number = id.as_u64().and_then(|id| usize::try_from(id).ok()).unwrap_or_default();
        reply.sse(&[]);
        messages(number, &mut |message| {
            reply.event(&message);
            count.change(|count| *count += 1);
        });
        reply.chunk(last(id));
        count.change(|count| *count += 1);
        reply.end();
    });
    (upstream, counter)
}

/// So large that 1,500 events are more than the kernel holds on both sides of the sidecar: once they are written, most of
/// them were read there, and some dropped.
const BEYOND: usize = 16 * 1024;

/// Progress of three tokens in turn, so that nothing is adjacent to its like.
fn turns(events: usize, size: usize) -> impl Fn(usize, &mut dyn FnMut(String)) + Send + Sync + 'static {
    move |id, send| {
        for n in 0..events {
            send(match n % 3 {
                0 => padded(id, n + 1, size),
                1 => padded("\"a\"", n + 1, size),
                _ => padded("\"b\"", n + 1, size),
            });
        }
    }
}

fn plain_result(id: &Value) -> String {
    event(result(id))
}

/// Every event's JSON, the progress values rising for each token.
fn told(body: &[u8]) -> Vec<Value> {
    let stream = sse::read(body);
    assert!(!stream.cut);
    let events: Vec<Value> = stream.events.iter().map(sse::Event::json).collect();
    let mut seen: Vec<(Value, f64)> = Vec::new();
    for event in &events {
        let params = &event["params"];
        let Some(value) = params["progress"].as_f64() else { continue };
        let token = params["progressToken"].clone();
        assert!(seen.iter().all(|(other, before)| *other != token || *before < value), "{token}: {value}");
        seen.push((token, value));
    }
    events
}

fn response_of(client: &Client) -> Vec<u8> {
    client.read_on();
    client.large_response().body
}

/// Calls of a healthy node, one after the other, with the time each took; until told to stop.
fn neighbour(sidecar: &Sidecar, stop: &AtomicBool) -> Vec<Duration> {
    let node = sidecar.client();
    let mut took = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        node.send(&call(1).at("/warm"));
        assert_eq!(told(&node.large_response().body).last().unwrap()["id"], 1);
        took.push(begun.elapsed());
        // A node thinks before it calls again.
        thread::sleep(Duration::from_millis(10));
    }
    took.sort();
    took
}

/// The middle one and the one that is slower than 99 of 100.
fn shown(took: &[Duration]) -> String {
    format!("{} calls, median {:?}, p99 {:?}", took.len(), took[took.len() / 2], took[took.len() * 99 / 100])
}

/// An upstream that floods whoever calls, all of them on one thread: so many progress events of three tokens in turn, as
/// fast as they are taken, and the result. Counts those that were read whole.
fn floods(events: usize, size: usize) -> (Runtime, String, Watched<usize>) {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let mut flood =
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n".to_vec();
    for n in 0..events {
        flood.extend_from_slice(event(padded(["\"a\"", "\"b\"", "\"c\""][n % 3], n + 1, size)).as_bytes());
    }
    let (flood, taken) = (Arc::new(flood), Watched::new(0));
    let count = taken.clone();
    runtime.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (flood, count) = (flood.clone(), count.clone());
            tokio::spawn(async move {
                let mut bytes = Vec::new();
                let request = loop {
                    assert!(stream.read_buf(&mut bytes).await.unwrap() > 0, "no request came");
                    let Some(head) = Head::read(&bytes) else { continue };
                    let body = Body::read(&head, &bytes[head.len..], false);
                    if body.wire.is_some() {
                        break serde_json::from_slice::<Value>(&body.bytes).unwrap();
                    }
                };
                stream.write_all(&flood).await.unwrap();
                stream.write_all(event(result(&request["id"])).as_bytes()).await.unwrap();
                // The sidecar closes its side when it has read all of it: until then some of it is the kernel's.
                stream.shutdown().await.unwrap();
                while stream.read_buf(&mut bytes).await.is_ok_and(|read| read > 0) {}
                count.change(|count| *count += 1);
            });
        }
    });
    (runtime, url, taken)
}

/// Makes a call and reads nothing of its answer; the kernel holds little for it, since its segments are small.
fn stalled_for_good(sidecar: &Sidecar, post: &Post) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(RECEIVE).unwrap();
    socket.set_tcp_mss(1000).unwrap();
    socket.connect(&sidecar.listen.parse::<SocketAddr>().unwrap().into()).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.write_all(&post.clone().field("Connection", "close").bytes(&sidecar.listen)).unwrap();
    stream
}

/// Reads what waited for a node of [`floods`]: the result, marked, and the newest progress of each token.
fn took_all_but_progress(mut node: TcpStream, id: usize, events: usize) {
    node.set_read_timeout(Some(6 * BOUND)).unwrap();
    SockRef::from(&node).set_recv_buffer_size(1 << 20).unwrap();
    let mut bytes = Vec::new();
    node.read_to_end(&mut bytes).unwrap();
    let head = Head::read(&bytes).unwrap();
    let told = told(&Body::read(&head, &bytes[head.len..], true).bytes);
    let last = told.last().unwrap();
    assert_eq!((&last["id"], &last["result"]["_meta"]["oz0/refetch"]), (&id.into(), &true.into()));
    for token in ["a", "b", "c"] {
        let newest = told.iter().rev().find(|event| event["params"]["progressToken"] == token).unwrap();
        assert!(newest["params"]["progress"].as_u64().unwrap() > events as u64 - 3);
    }
}

#[test]
fn five_hundred_stalled_nodes_hold_no_more_than_their_queues_and_all_get_their_results() {
    const NODES: usize = 500;
    // More than the queue, the connection and the kernel take together, so that every queue is at its bound.
    const EVENTS: usize = 128;
    let (_runtime, url, taken) = floods(EVENTS, 8192);
    let warm_url = Upstream::sse(&[progress(1, 1), result(1)]).url();
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{url}\"\ncalls = 1000\n[upstreams.mcp.progress]\nqueue_bytes = \"256KiB\"\n\
         min_interval = \"0\"\n[upstreams.warm]\nurl = \"{warm_url}\"\n"
    ));
    let base = warm(&sidecar);
    let (first, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let (nodes, peak, alone, beside) = thread::scope(|scope| {
        let alone = scope.spawn(|| neighbour(&sidecar, &first));
        thread::sleep(Duration::from_millis(500));
        drop(Over(&first));
        let alone = alone.join().unwrap();
        let beside = scope.spawn(|| neighbour(&sidecar, &stop));
        let over = Over(&stop);
        let nodes: Vec<_> = (0..NODES).map(|id| stalled_for_good(&sidecar, &call(100 + id))).collect();
        let (mut peak, end) = (0, Instant::now() + Duration::from_secs(240));
        while *taken.lock() < NODES {
            assert!(Instant::now() < end, "{} of {NODES} floods were taken", *taken.lock());
            peak = peak.max(sidecar.rss_kib());
            thread::sleep(Duration::from_millis(5));
        }
        peak = peak.max(sidecar.rss_kib());
        drop(over);
        (nodes, peak, alone, beside.join().unwrap())
    });
    let bound = NODES * (QUEUE + PER_CONNECTION) / 1024 + ALONE;
    println!("peak {peak} KiB, {base} KiB before, {bound} KiB more are allowed, {NODES} floods");
    println!("a healthy neighbour alone: {}; beside the floods: {}", shown(&alone), shown(&beside));
    assert!(peak - base < bound, "grew by {} KiB, {bound} KiB are allowed", peak - base);
    // A few at a time, so that the test does not hold all of them.
    let nodes = Mutex::new(nodes.into_iter().enumerate());
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                loop {
                    let Some((n, node)) = nodes.lock().unwrap().next() else { return };
                    took_all_but_progress(node, 100 + n, EVENTS);
                }
            });
        }
    });
    let lines = lines(&sidecar, NODES);
    for line in &lines {
        assert_eq!((&line["outcome"], &line["refetch"]), (&"ok".into(), &true.into()), "{line}");
        let count = |name: &str| line[name].as_u64().unwrap();
        assert_eq!(count("progress_in"), EVENTS as u64);
        let told = count("progress_out") + count("progress_coalesced") + count("progress_dropped");
        assert_eq!(told, EVENTS as u64);
        // Its queue was full.
        assert!(count("progress_dropped") > 0);
        assert_eq!(count("events"), count("progress_out") + 1);
    }
}

/// What is kept are the bytes of an event, not of the piece that it arrived in.
#[test]
fn a_small_event_that_waits_does_not_keep_the_large_piece_it_came_in() {
    const NODES: usize = 20;
    const ROUNDS: usize = 50;
    let counter = Watched::new(0);
    let count = counter.clone();
    let upstream = Upstream::start(move |request, reply| {
        let id = &request.json()["id"];
        reply.sse(&[]);
        // First fill what lies between the sidecar and a node that reads nothing.
        turns(1500, 4096)(1, &mut |message| reply.event(&message));
        for round in 0..ROUNDS {
            let large = (0..32).map(|n| event(padded(["\"c\"", "\"d\""][n % 2], 32 * round + n + 1, 4096)));
            reply.chunk(large.collect::<String>() + &event(log(round, 10)));
        }
        reply.event(&result(id));
        reply.end();
        count.change(|count| *count += 1);
    });
    let sidecar = sidecar(&upstream, "");
    let base = warm(&sidecar);
    let clients: Vec<Client> = (0..NODES).map(|id| stalled(&sidecar, &call(id))).collect();
    written(&counter, NODES);
    let grown = sidecar.rss_kib() - base;
    let bound = NODES * (QUEUE + BESIDE) / 1024;
    assert!(grown < bound, "grew by {grown} KiB, {bound} KiB are allowed");
    for client in &clients {
        let events = told(&response_of(client));
        let logs: Vec<u64> =
            events.iter().filter_map(|event| event["params"]["data"]["n"].as_u64()).collect();
        assert!(logs.iter().copied().eq(0..ROUNDS as u64), "{logs:?}");
    }
}

/// A stream that is small only on the wire is decoded as the node takes it.
#[test]
fn a_compressed_flood_is_not_unpacked_at_once() {
    const NODES: usize = 8;
    const EVENTS: usize = 400;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    for n in 0..EVENTS {
        encoder.write_all(event(log(n, 64 * 1024)).as_bytes()).unwrap();
    }
    encoder.write_all(event(result(1)).as_bytes()).unwrap();
    let packed = encoder.finish().unwrap();
    let counter = Watched::new(0);
    let count = counter.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[("Content-Encoding", "gzip")]);
        for chunk in packed.chunks(1000) {
            reply.chunk(chunk);
        }
        reply.end();
        count.change(|count| *count += 1);
    });
    let sidecar = sidecar(&upstream, "");
    let base = warm(&sidecar);
    let clients: Vec<Client> = (0..NODES).map(|_| stalled(&sidecar, &call(1))).collect();
    stands_still(&upstream, &counter);
    let grown = sidecar.rss_kib() - base;
    let bound = ALONE + NODES * (QUEUE + BESIDE) / 1024;
    assert!(grown < bound, "grew by {grown} KiB, {bound} KiB are allowed");
    let events = told(&response_of(&clients[0]));
    assert_eq!(events.len(), EVENTS + 1);
    assert_eq!(events[EVENTS]["id"], 1);
}

#[test]
fn what_may_not_be_lost_stops_the_reading_until_the_node_goes_on() {
    const EVENTS: usize = 1500;
    let (upstream, counter) = flood(
        |_, send| (0..EVENTS).for_each(|n| send(log(n, 16 * 1024))),
        |id| {
            // Alone larger than the queue.
            event(result(id).replace("\"ok\"", &format!("\"{}\"", "y".repeat(2 * QUEUE))))
        },
    );
    // The idle clock stands still while reading is paused: that is longer than a second here.
    let sidecar = sidecar(&upstream, "idle_timeout = \"1s\"");
    for post in [call(1), modern_call(1)] {
        *counter.lock() = 0;
        let client = stalled(&sidecar, &post);
        let unread = stands_still(&upstream, &counter);
        assert!(unread > 0, "all of it was taken");
        assert_eq!(stands_still(&upstream, &counter), unread);
        let events = told(&response_of(&client));
        assert_eq!(events.len(), EVENTS + 1);
        for (n, event) in events[..EVENTS].iter().enumerate() {
            assert_eq!(event["params"]["data"]["n"], n);
        }
        let result = &events[EVENTS]["result"];
        assert_eq!(result["_meta"], Value::Null, "nothing was lost");
        assert_eq!(result["content"][0]["text"].as_str().unwrap().len(), 2 * QUEUE);
    }
    for line in lines(&sidecar, 2) {
        assert_eq!((&line["outcome"], &line["refetch"]), (&"ok".into(), &Value::Null));
    }
}

/// The bound over all streams (`limits.buffered`): at it reading pauses and new calls are busy, and nobody is stuck.
#[test]
fn all_queues_together_have_a_bound_of_their_own() {
    const NODES: usize = 4;
    const EVENTS: usize = 800;
    let (upstream, counter) =
        flood(|_, send| (0..EVENTS).for_each(|n| send(log(n, 16 * 1024))), plain_result);
    let sidecar = Sidecar::with_config(&format!(
        "[limits]\nbuffered = \"128KiB\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    ));
    let clients: Vec<Client> = (0..NODES).map(|id| stalled(&sidecar, &call(id))).collect();
    assert!(stands_still(&upstream, &counter) > 0, "all of it was taken");
    let busy = sidecar.client().ask(&call(9)).json();
    assert_eq!(busy["result"]["_meta"]["oz0/retryable"], true);
    for client in &clients {
        client.read_on();
    }
    for (n, client) in clients.iter().enumerate() {
        let events = told(&client.large_response().body);
        assert_eq!((events.len(), &events[EVENTS]["id"]), (EVENTS + 1, &n.into()));
    }
    let after = sidecar.client();
    after.send(&call(9));
    assert_eq!(told(&after.large_response().body).len(), EVENTS + 1);
}

/// Mixed: progress gives way to what may not be lost, and then reading pauses.
#[test]
fn progress_gives_way_and_everything_else_arrives_in_order() {
    const PAIRS: usize = 1200;
    let pairs = |id: usize, send: &mut dyn FnMut(String)| {
        for n in 0..PAIRS {
            send(padded(id, n + 1, 4096));
            send(log(n, 4096));
        }
    };
    let (upstream, counter) = flood(pairs, plain_result);
    let sidecar = sidecar(&upstream, "");
    let client = stalled(&sidecar, &modern_call(1));
    assert!(stands_still(&upstream, &counter) > 0, "reading did not pause");
    let events = told(&response_of(&client));
    let logs = events.iter().filter_map(|event| event["params"]["data"]["n"].as_u64());
    assert!(logs.eq(0..PAIRS as u64));
    let last = events.last().unwrap();
    assert_eq!((&last["id"], &last["result"]["_meta"]["oz0/refetch"]), (&1.into(), &true.into()));
    // Progress n stands directly before log n, where it stands at all.
    for pair in events.windows(2) {
        if let Some(value) = pair[0]["params"]["progress"].as_u64() {
            assert_eq!(pair[1]["params"]["data"]["n"], value - 1);
        }
    }
}

#[test]
fn a_stalled_node_s_progress_of_one_token_coalesces_and_is_no_loss() {
    const EVENTS: usize = 3000;
    let (upstream, counter) =
        flood(|id, send| (0..EVENTS).for_each(|n| send(padded(id, n + 1, 4096))), plain_result);
    let sidecar = sidecar(&upstream, "");
    for post in [call(1), modern_call(1)] {
        *counter.lock() = 0;
        let client = stalled(&sidecar, &post);
        written(&counter, EVENTS + 1);
        let events = told(&response_of(&client));
        assert!(events.len() < EVENTS);
        let [.., newest, last] = &events[..] else { panic!("{} events", events.len()) };
        assert_eq!(newest["params"]["progress"], EVENTS);
        assert_eq!(last["result"]["_meta"], Value::Null);
    }
    for line in lines(&sidecar, 2) {
        let count = |name: &str| line[name].as_u64().unwrap();
        assert_eq!(count("progress_in"), EVENTS as u64);
        assert_eq!(count("progress_out") + count("progress_coalesced"), EVENTS as u64);
        assert_eq!((count("progress_dropped"), &line["refetch"]), (0, &Value::Null));
    }
}

#[test]
fn the_final_says_that_progress_was_lost_in_the_way_its_form_allows() {
    let bare = "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}";
    let with_meta = r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"_meta":{"a":1}}}"#;
    let empty_meta = r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{ }}}"#;
    let not_object = r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":7}}"#;
    let error = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32603,"message":"no"}}"#;
    let forged = r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/refetch":false,"b":2}}}"#;
    let cases = [
        (event(bare), event(r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/refetch":true}}}"#)),
        (
            event(with_meta),
            event(r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"_meta":{"oz0/refetch":true,"a":1}}}"#),
        ),
        (event(empty_meta), event(r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/refetch":true }}}"#)),
        (event(forged), event(r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/refetch":true,"b":2}}}"#)),
        (event(not_object), format!(": refetch\n\n{}", event(not_object))),
        (event(error), format!(": refetch\n\n{}", event(error))),
        (
            format!("data: {}\r\ndata: {}\r\n\r\n", &bare[..17], &bare[17..]),
            format!(": refetch\n\ndata: {}\r\ndata: {}\r\n\r\n", &bare[..17], &bare[17..]),
        ),
    ];
    for (last, wanted) in cases {
        let (upstream, counter) = flood(turns(1500, BEYOND), move |_| last.clone());
        let sidecar = sidecar(&upstream, "");
        let client = stalled(&sidecar, &call(1));
        written(&counter, 1501);
        let body = String::from_utf8(response_of(&client)).unwrap();
        let tail: String = body.chars().skip(body.len() - wanted.len() - 20).collect();
        assert!(body.ends_with(&format!("\n\n{wanted}")), "{tail}, wanted {wanted}");
        assert_eq!(body.matches("refetch").count(), 1);
        assert_eq!(sidecar.wait_lines(1)[0]["refetch"], true);
    }
}

/// The clocks end when the response is complete in the sidecar, also behind an event that came in two pieces and has no room
/// yet.
#[test]
fn a_response_that_came_whole_stands_although_the_clock_runs_out_before_the_node_has_it() {
    const KEPT: usize = 64;
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        turns(1500, 4096)(1, &mut |message| reply.event(&message));
        // As many as the queue holds, none of which may be dropped, and the beginning of one more.
        let all: String = (0..=KEPT).map(|n| event(log(n, 10))).collect();
        let (before, after) = all.split_at(all.len() - 20);
        reply.chunk(before);
        // It has to be read alone.
        thread::sleep(Duration::from_millis(500));
        reply.chunk(after.to_owned() + &event(result(1)));
        reply.end();
    });
    let sidecar = sidecar(&upstream, "max_timeout = \"4s\"");
    let client = stalled(&sidecar, &call(1));
    // The clock runs out meanwhile, and nothing is to come of it that could be waited for.
    thread::sleep(Duration::from_secs(5));
    let events = told(&response_of(&client));
    assert_eq!(
        events.last().unwrap()["result"]["content"],
        serde_json::from_str::<Value>(&result(1)).unwrap()["result"]["content"]
    );
    assert_eq!(sidecar.wait_lines(1)[0]["outcome"], "ok");
}

/// The error that the sidecar makes of a break is a final too.
#[test]
fn the_sidecar_s_own_error_says_that_progress_was_lost() {
    let counter = Watched::new(0);
    let count = counter.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        turns(1500, BEYOND)(1, &mut |message| reply.event(&message));
        reply.end();
        count.change(|count| *count += 1);
    });
    let sidecar = sidecar(&upstream, "");
    let client = stalled(&sidecar, &call(1));
    written(&counter, 1);
    // The end has been read, and the upstream is done with, before the node goes on.
    let body = String::from_utf8(response_of(&client)).unwrap();
    let (before, error) = body.split_once(": refetch\n\n").expect("no mark");
    assert!(before.ends_with("\n\n"));
    let events = sse::read(error.as_bytes()).events;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].json()["error"]["data"]["reason"], "upstream_failed");
    let line = &sidecar.wait_lines(1)[0];
    assert_eq!((&line["refetch"], &line["outcome"]), (&true.into(), &"failed".into()));
}

#[test]
fn without_coalescing_nothing_is_thinned_for_a_slow_node() {
    const EVENTS: usize = 1000;
    let (upstream, counter) =
        flood(|id, send| (0..EVENTS).for_each(|n| send(padded(id, n + 1, 16 * 1024))), plain_result);
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nprogress = {{ coalesce = false, queue_bytes = \"256KiB\" }}\n",
        upstream.url()
    ));
    let client = stalled(&sidecar, &modern_call(1));
    assert!(stands_still(&upstream, &counter) > 0, "reading did not pause");
    let events = told(&response_of(&client));
    assert_eq!(events.len(), EVENTS + 1);
    let line = &sidecar.wait_lines(1)[0];
    assert_eq!(line["progress_out"], EVENTS);
}

/// Values that do not rise are thinned; what is no number has no order and passes.
#[test]
fn values_that_stall_or_fall_stay_here_and_nothing_is_ever_computed() {
    let message = |n: usize, value: &str| {
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":1,{value}"message":"m{n}"}}}}"#
        )
    };
    let values = [
        "\"progress\":1,",
        "\"progress\":1,",
        "\"progress\":0.5,",
        "\"progress\":2,\"total\":1,",
        "\"progress\":-3,",
        "\"progress\":\"7\",",
        "",
        "\"progress\":1e308,",
    ];
    let sent: Vec<String> = values.iter().enumerate().map(|(n, value)| message(n, value)).collect();
    let passing: String = [0, 3, 5, 6, 7].map(|n| event(&sent[n])).concat() + &event(result(1));
    for post in [call(1), modern_call(1)] {
        let gate = Gate::new();
        let (pass, messages) = (gate.clone(), sent.clone());
        let upstream = Upstream::start(move |_, reply| {
            reply.sse(&[]);
            pass.pass();
            reply.chunk(messages.iter().map(event).collect::<String>() + &event(result(1)));
            reply.end();
        });
        let sidecar = Sidecar::before(&upstream);
        let client = sidecar.client();
        client.send(&post);
        client.head();
        gate.open();
        assert_eq!(client.response().text(), passing);
        let line = &sidecar.wait_lines(1)[0];
        assert_eq!((&line["progress_in"], &line["progress_out"]), (&8.into(), &5.into()));
        assert_eq!(line["progress_dropped"], 3);
        assert_eq!(line["refetch"], Value::Null);
    }
    // To a node that reads only at the end: a subsequence, and the newest is the last before the answer.
    let late = sent.clone();
    let fill = move |_: usize, send: &mut dyn FnMut(String)| {
        (0..1500).for_each(|n| send(padded("\"fill\"", n + 1, 4096)));
        late.iter().for_each(|message| send(message.clone()));
    };
    let (upstream, counter) = flood(fill, plain_result);
    let sidecar = sidecar(&upstream, "");
    let client = stalled(&sidecar, &call(1));
    written(&counter, 1500 + 8 + 1);
    let body = String::from_utf8(response_of(&client)).unwrap();
    let mine: Vec<&String> = sent.iter().filter(|message| body.contains(&event(message))).collect();
    assert_eq!(mine.last(), Some(&&sent[7]));
    assert!(body.ends_with(&(event(&sent[7]) + &event(result(1)))));
}

/// Progress is activity when it comes from upstream, whether or not it ever reaches the node.
#[test]
fn progress_that_is_merged_away_keeps_the_call_alive() {
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        (0..1500).for_each(|n| reply.event(&padded(1, n + 1, 4096)));
        let end = Instant::now() + Duration::from_millis(3000);
        let mut n = 1500;
        while Instant::now() < end {
            n += 1;
            reply.event(&progress(1, n));
            thread::sleep(Duration::from_millis(50));
        }
        reply.event(&result(1));
        reply.end();
    });
    let sidecar = sidecar(&upstream, "idle_timeout = \"1s\"");
    let client = stalled(&sidecar, &call(1));
    upstream.wait_request(0);
    thread::sleep(Duration::from_millis(3500));
    let events = told(&response_of(&client));
    assert_eq!(events.last().unwrap()["id"], 1);
    assert_eq!(sidecar.wait_lines(1)[0]["outcome"], "ok");
}

#[test]
fn a_node_that_takes_no_byte_for_the_stall_time_is_closed_and_its_upstream_too() {
    let (upstream, _) = flood(|_, send| (0..2000).for_each(|n| send(log(n, 16 * 1024))), plain_result);
    let sidecar = Sidecar::with_config(&format!(
        "[limits]\nclient_stall = \"500ms\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    ));
    let _client = stalled(&sidecar, &modern_call(1));
    upstream.wait_closed(0);
    let line = &sidecar.wait_lines(1)[0];
    assert_eq!((&line["outcome"], &line["cancelled_by"]), (&"cancelled".into(), &"disconnect".into()));
}

/// Nothing is asked of a body that there is no room for, and the reading must not wait for that.
#[test]
fn a_node_that_grants_no_window_at_all_does_not_stop_the_reading() {
    let (upstream, counter) = flood(turns(1500, BEYOND), plain_result);
    let sidecar = sidecar(&upstream, "");
    let node = Node::with_window(&sidecar.listen, 0);
    let _stalled = node.send(&call(1));
    written(&counter, 1501);
}

/// One connection of HTTP/2, whose streams share nothing but it.
#[test]
fn a_stream_that_is_not_read_does_not_hold_up_the_others_of_its_http2_connection() {
    const EVENTS: usize = 300;
    let (upstream, counter) = flood(turns(EVENTS, 4096), plain_result);
    let sidecar = sidecar(&upstream, "");
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let bounded = async {
        let socket = tokio::net::TcpStream::connect(&sidecar.listen).await.unwrap();
        let mut builder = h2::client::Builder::new();
        builder.initial_connection_window_size(16 << 20);
        let (client, connection) = builder.handshake::<_, bytes::Bytes>(socket).await.unwrap();
        tokio::spawn(connection);
        let mut streams = Vec::new();
        for id in 0..20 {
            let post = call(id);
            let mut request = http::Request::post(sidecar.url("/mcp"));
            for (name, value) in &post.fields {
                request = request.header(name.as_str(), value.as_str());
            }
            let mut client = client.clone().ready().await.unwrap();
            let (response, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
            body.send_data(post.body.into(), true).unwrap();
            streams.push(response.await.unwrap().into_body());
        }
        let read = async |stream: &mut h2::RecvStream| {
            let mut body = Vec::new();
            while let Some(data) = stream.data().await {
                let data = data.unwrap();
                stream.flow_control().release_capacity(data.len()).unwrap();
                body.extend_from_slice(&data);
            }
            body
        };
        let mut not_read = streams.remove(0);
        for (n, stream) in streams.iter_mut().enumerate() {
            assert_eq!(told(&read(stream).await).last().unwrap()["id"], n + 1);
        }
        // All of it was taken, that of the stream nobody reads included.
        written(&counter, 20 * (EVENTS + 1));
        let events = told(&read(&mut not_read).await);
        assert_eq!(events.last().unwrap()["id"], 0);
        assert_eq!(events.last().unwrap()["result"]["_meta"]["oz0/refetch"], true);
    };
    runtime.block_on(async { tokio::time::timeout(6 * BOUND, bounded).await.unwrap() });
}
