//! A node that gives one exchange up closes the upstream's stream of that one exchange, whichever
//! version of HTTP is spoken on either side, and no other exchange notices (HTTP/2: `RST_STREAM` with `CANCEL`).
//! Section 3: one slow or chatty stream never costs another one its connection.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{sync::Arc, thread};

use bytes::Bytes;
use h2::{Reason, server::SendResponse};
use support::{
    Client, Gate, Post, Sidecar, Upstream,
    http2::{self, Node, Server},
    mcp::{call, cancel, modern_call, progress, result},
    sse,
    tls::{Authority, Front},
};
use tokio::sync::Semaphore;

/// What the upstream does with a call, as its header says.
const WAY: &str = "x-way";

/// An upstream of either version. `mute`: no head ever; `open`: one event and then nothing; `bystander`: one event, and
/// the result once the gate opens; anything else: the result at once.
enum Behind {
    One(Upstream, Gate),
    Two(Server, Arc<Semaphore>),
}

impl Behind {
    fn http1() -> Self {
        let gate = Gate::new();
        let pass = gate.clone();
        let upstream = Upstream::start(move |request, reply| {
            let id = request.json()["id"].clone();
            let way = request.head.field(WAY).unwrap_or_default().to_owned();
            match way.as_str() {
                "mute" => reply.hang(),
                "open" | "bystander" => {
                    reply.sse(&[]);
                    reply.event(&progress(&id, 1));
                    if way == "open" {
                        return reply.hang();
                    }
                    pass.pass();
                    reply.event(&result(&id));
                    reply.end();
                }
                _ => reply.json(200, &[], &result(&id)),
            }
        });
        Self::One(upstream, gate)
    }

    fn http2(limit: Option<u32>) -> Self {
        let gate = Arc::new(Semaphore::new(0));
        let pass = gate.clone();
        let server =
            Server::with_limit(limit, move |request, respond| answer(request, respond, pass.clone()));
        Self::Two(server, gate)
    }

    fn config(&self, folder: &tempfile::TempDir) -> String {
        match self {
            Self::One(upstream, _) => upstream.config(folder),
            Self::Two(server, _) => server.config(folder),
        }
    }

    /// Waits until the exchange has come whose header says this, the `number`th of all.
    fn wait_request(&self, way: &str, number: usize) {
        match self {
            Self::One(upstream, _) => drop(upstream.wait_request_where(|r| r.head.field(WAY) == Some(way))),
            Self::Two(server, _) => server.wait_count(number),
        }
    }

    /// Waits until that exchange was closed by the sidecar.
    fn is_cancelled(&self, way: &str) {
        match self {
            Self::One(upstream, _) => {
                let request = upstream.wait_request_where(|r| r.head.field(WAY) == Some(way));
                upstream.wait_closed(request.connection);
            }
            Self::Two(server, _) => assert_eq!(server.next_reset(), Reason::CANCEL),
        }
    }

    fn open(&self, count: usize) {
        match self {
            Self::One(_, gate) => (0..count).for_each(|_| gate.open()),
            Self::Two(_, gate) => gate.add_permits(count),
        }
    }
}

fn event_stream() -> http::Response<()> {
    http::Response::builder().header("content-type", "text/event-stream").body(()).unwrap()
}

async fn answer(
    request: http::Request<Bytes>,
    mut respond: SendResponse<Bytes>,
    pass: Arc<Semaphore>,
) -> Option<Reason> {
    let id = serde_json::from_slice::<serde_json::Value>(request.body()).unwrap()["id"].clone();
    let way = request.headers().get(WAY).map(|way| way.to_str().unwrap().to_owned()).unwrap_or_default();
    match way.as_str() {
        "mute" => Some(http2::until_reset(&mut respond).await),
        "open" | "bystander" => {
            let mut stream = respond.send_response(event_stream(), false).unwrap();
            stream.send_data(support::mcp::event(progress(&id, 1)).into(), false).unwrap();
            if way == "open" {
                return Some(http2::until_stream_reset(&mut stream).await);
            }
            pass.acquire().await.unwrap().forget();
            stream.send_data(support::mcp::event(result(&id)).into(), true).unwrap();
            None
        }
        _ if id.is_null() => {
            respond.send_response(http::Response::builder().status(202).body(()).unwrap(), true).unwrap();
            None
        }
        _ => {
            let head = http::Response::builder().header("content-type", "application/json").body(()).unwrap();
            respond.send_response(head, false).unwrap().send_data(result(&id).into(), true).unwrap();
            None
        }
    }
}

/// A node of either version; over HTTP/2 all its exchanges share a connection.
enum Front1or2<'a> {
    One(&'a Sidecar),
    Two(Node),
}

enum Open {
    One(Client),
    Two(Box<http2::Stream>),
}

impl Front1or2<'_> {
    fn send(&self, post: &Post) -> Open {
        match self {
            Self::One(sidecar) => {
                let client = sidecar.client();
                client.send(post);
                Open::One(client)
            }
            Self::Two(node) => Open::Two(Box::new(node.send(post))),
        }
    }

    fn wait_event(&self, open: &mut Open) {
        match (self, open) {
            (_, Open::One(client)) => drop(client.events(1)),
            (Self::Two(node), Open::Two(stream)) => drop(node.wait_body(stream, "\"progress\":1")),
            _ => unreachable!("a node opens its own"),
        }
    }

    fn leave(&self, open: Open) {
        match (self, open) {
            (_, Open::One(client)) => drop(client),
            (Self::Two(node), Open::Two(stream)) => node.reset(*stream),
            _ => unreachable!("a node opens its own"),
        }
    }

    fn rest(&self, open: &mut Open) -> Vec<u8> {
        match (self, open) {
            (_, Open::One(client)) => client.response().body,
            (Self::Two(node), Open::Two(stream)) => node.rest(stream).into_bytes(),
            _ => unreachable!("a node opens its own"),
        }
    }
}

/// Both ways to give up, beside two bystanders.
fn cancels(behind: &Behind, speaks_http2: bool, upstream_http: &str) {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::with_config(&behind.config(&folder));
    let node = match speaks_http2 {
        false => Front1or2::One(&sidecar),
        true => Front1or2::Two(Node::connect(&sidecar.listen)),
    };
    let mut bystanders: Vec<_> = [modern_call(1), call(2)]
        .into_iter()
        .map(|post| {
            let mut open = node.send(&post.field(WAY, "bystander"));
            node.wait_event(&mut open);
            open
        })
        .collect();
    for (number, (id, post, way)) in
        [(3, modern_call(3), "mute"), (4, modern_call(4), "open")].into_iter().enumerate()
    {
        let mut open = node.send(&post.field(WAY, way));
        behind.wait_request(way, 3 + number);
        if way == "open" {
            node.wait_event(&mut open);
        }
        node.leave(open);
        behind.is_cancelled(way);
        let line = sidecar.wait_line(|line| line["id"] == id);
        let told = [&line["outcome"], &line["cancelled_by"], &line["http"], &line["upstream_http"]];
        let http = if speaks_http2 { "2" } else { "1.1" };
        assert_eq!(told, ["cancelled", "disconnect", http, upstream_http], "{line}");
    }
    behind.open(2);
    for (at, open) in bystanders.iter_mut().enumerate() {
        let events = sse::read(&node.rest(open)).events;
        assert_eq!(events.last().unwrap().data, result(at + 1), "the others go on to their ends");
    }
    match behind {
        Behind::One(upstream, _) => assert_eq!(upstream.count(), 4, "no notification is invented"),
        Behind::Two(server, _) => assert_eq!((server.count(), server.connections()), (4, 1)),
    }
}

#[test]
fn from_http1_to_http1() {
    cancels(&Behind::http1(), false, "1.1");
}

#[test]
fn from_http1_to_http2() {
    cancels(&Behind::http2(None), false, "2");
}

#[test]
fn from_http2_to_http1() {
    cancels(&Behind::http1(), true, "1.1");
}

#[test]
fn from_http2_to_http2() {
    cancels(&Behind::http2(None), true, "2");
}

#[test]
fn six_thousand_cancels_of_chatty_streams_cost_a_bystander_nothing() {
    const WORKERS: usize = 4;
    const EACH: usize = 1500;
    let gate = Arc::new(Semaphore::new(0));
    let pass = gate.clone();
    let server = Server::start(move |request, mut respond| {
        let pass = pass.clone();
        async move {
            if request.headers().contains_key(WAY) {
                return answer(request, respond, pass).await;
            }
            let mut stream = respond.send_response(event_stream(), false).unwrap();
            // Small frames, as a server writes that flushes each event: HTTP/2 libraries count those.
            for n in 1..=100 {
                let event = Bytes::from(support::mcp::event(progress("\"c\"", n)));
                if stream.send_data(event, false).is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            let _ = std::future::poll_fn(|cx| stream.poll_reset(cx)).await;
            None
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::with_config(&server.config(&folder));
    let bystander = sidecar.client();
    bystander.send(&call(1).field(WAY, "bystander"));
    bystander.events(1);
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                let node = Node::connect(&sidecar.listen);
                for _ in 0..EACH {
                    let mut stream = node.send(&modern_call("\"c\""));
                    node.wait_body(&mut stream, "\"progress\":");
                    node.reset(stream);
                }
            });
        }
    });
    gate.add_permits(1);
    assert_eq!(sse::read(&bystander.response().body).events.last().unwrap().data, result(1));
    assert_eq!(server.connections(), 1, "all over one connection");
    assert_eq!(server.count(), WORKERS * EACH + 1);
}

#[test]
fn a_stream_that_its_node_does_not_read_costs_the_others_of_its_upstream_connection_nothing() {
    let gate = Arc::new(Semaphore::new(0));
    let server = Server::start({
        move |request, mut respond| {
            let gate = gate.clone();
            async move {
                if request.headers().contains_key(WAY) {
                    return answer(request, respond, gate).await;
                }
                let mut stream = respond.send_response(event_stream(), false).unwrap();
                let note = format!(
                    r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"info","data":"{}"}}}}"#,
                    "x".repeat(100)
                );
                let event = Bytes::from(support::mcp::event(note));
                // More than both hold, and then what the other side still lets in.
                for _ in 0..100_000 {
                    stream.reserve_capacity(event.len());
                    while stream.capacity() < event.len() {
                        match std::future::poll_fn(|cx| stream.poll_capacity(cx)).await {
                            Some(Ok(_)) => {}
                            _ => return None,
                        }
                    }
                    if stream.send_data(event.clone(), false).is_err() {
                        return None;
                    }
                }
                None
            }
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let config = server.config(&folder) + "progress.queue_bytes = \"64KiB\"\n";
    let sidecar = Sidecar::with_config(&config);
    let slow = Client::stalled(&sidecar.listen, Some(4096));
    slow.send(&call(1));
    server.wait_count(1);
    // A stalled stream fills whatever is shared; meanwhile the others are served.
    for id in 2..100 {
        assert_eq!(sidecar.client().ask(&call(id).field(WAY, "json")).text(), result(id));
    }
    assert_eq!(server.connections(), 1);
}

#[test]
fn a_cancel_waits_neither_for_a_stream_of_the_connection_nor_for_a_place_among_the_calls() {
    let behind = Behind::http2(Some(1));
    let Behind::Two(server, _) = &behind else { unreachable!("it is HTTP/2") };
    let folder = tempfile::tempdir().unwrap();
    let config = server.config(&folder) + "calls = 1\ncancel_grace = \"1h\"\n";
    let sidecar = Sidecar::with_config(&config);
    let first = sidecar.client();
    first.send(&call(1).field(WAY, "open"));
    first.events(1);
    assert_eq!(sidecar.client().ask(&call(2)).json()["result"]["_meta"]["oz0/retryable"], true);
    assert_eq!(sidecar.client().ask(&cancel(1)).status(), 202, "answered by the upstream");
    assert_eq!(server.next_reset(), Reason::CANCEL);
    assert_eq!(sse::read(&first.response().body).events.len(), 1);
    assert_eq!((server.count(), server.connections()), (2, 2), "over a connection of its own");
}

#[test]
fn http1_only_is_what_is_offered_then() {
    let upstream = Upstream::start(|request, reply| {
        let id = request.json()["id"].clone();
        reply.json(200, &[], &result(&id));
    });
    let authority = Authority::new();
    let front = Front::start(authority.issue().acceptor(&["h2", "http/1.1"], None), &upstream.address);
    let folder = tempfile::tempdir().unwrap();
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, authority.pem()).unwrap();
    let table = format!("url = \"{}\"\ntls = {{ ca = \"{}\" }}\n", front.url(), ca.display());
    let sidecar = Sidecar::with_config(&format!("[upstreams.mcp]\n{table}http1_only = true\n"));
    assert_eq!(sidecar.client().ask(&call(1)).text(), result(1));
    assert_eq!(sidecar.wait_line(|line| line["id"] == 1)["upstream_http"], "1.1");
    assert_eq!(front.hellos()[0].alpn.as_deref(), Some("http/1.1"));
    // Without it HTTP/2 is chosen, which this server only claims to speak.
    let sidecar = Sidecar::with_config(&format!("[upstreams.mcp]\n{table}"));
    let answer = sidecar.client().ask(&call(2));
    assert_eq!(answer.json()["error"]["data"]["reason"], "upstream_unreachable");
    assert_eq!(front.hellos()[1].alpn.as_deref(), Some("h2"));
}
