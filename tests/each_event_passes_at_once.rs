//! The head goes out as soon as the upstream's has come, and each event is passed on at once, so that
//! a server may ask its client in mid-call. "At once" is asserted as an order: the upstream goes on only when the node
//! has what came before.

mod support;

use std::sync::Arc;

use support::{
    Client, Gate, Post, Sidecar, Upstream,
    mcp::{call, event, modern_call, progress, result},
    sse,
};

/// Without a rate limit, so that nothing but a slow node could thin progress.
fn unlimited(upstream: &Upstream) -> Sidecar {
    Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nprogress = {{ min_interval = \"0\" }}\n",
        upstream.url()
    ))
}

#[test]
fn the_head_goes_out_before_the_first_byte_of_the_body() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    for post in [Post::get(), call(1), modern_call(1)] {
        let client = sidecar.client();
        client.send(&post);
        assert_eq!(client.head().status(), 200);
        assert_eq!(client.head().field("content-type"), Some("text/event-stream"));
    }
}

#[test]
fn the_head_goes_out_over_http2_before_the_first_byte_of_the_body() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let socket = tokio::net::TcpStream::connect(&sidecar.listen).await.unwrap();
        let (mut client, connection) = h2::client::handshake(socket).await.unwrap();
        tokio::spawn(connection);
        let request = http::Request::get(sidecar.url("/mcp"))
            .header("accept", "text/event-stream")
            .header("mcp-protocol-version", "2025-11-25")
            .header("mcp-session-id", "sess-A");
        let (response, _) = client.send_request(request.body(()).unwrap(), true).unwrap();
        let response = tokio::time::timeout(support::BOUND, response).await.unwrap().unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-accel-buffering"], "no");
    });
}

/// Two hundred small events, each sent when the one before was read: neither Nagle nor a flush interval nor a full
/// buffer may be waited for, and a node that reads loses none.
#[test]
fn no_event_waits_for_the_next_one() {
    const EVENTS: usize = 200;
    for post in [call(1), modern_call(1)] {
        let seen = Gate::new();
        let next = seen.clone();
        let upstream = Upstream::start(move |_, reply| {
            reply.sse(&[]);
            for n in 1..=EVENTS {
                reply.event(&progress(1, n));
                next.pass();
            }
            reply.event(&result(1));
            reply.end();
        });
        let sidecar = unlimited(&upstream);
        let client = sidecar.client();
        client.send(&post);
        for n in 1..=EVENTS {
            let last = event(progress(1, n));
            client.body(|body| body.ends_with(last.as_bytes()));
            seen.open();
        }
        let sent = (1..=EVENTS).map(|n| event(progress(1, n))).collect::<String>() + &event(result(1));
        assert_eq!(client.response().text(), sent);
        let line = sidecar.wait_line(|line| line["stream"] == "sse");
        assert_eq!((&line["progress_in"], &line["progress_out"]), (&EVENTS.into(), &EVENTS.into()));
        assert_eq!((&line["progress_coalesced"], &line["progress_dropped"]), (&0.into(), &0.into()));
        assert_eq!(line["events"], EVENTS + 1);
    }
}

/// An event that ends in a bare CR is complete: whether an LF follows is not waited for.
#[test]
fn an_event_of_bare_crs_is_given_without_another_byte() {
    let stream = format!("data: {}\r\r", result(1));
    let sent = stream.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        reply.chunk(&sent);
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    client.body(|body| body == stream.as_bytes());
}

/// What came in one piece with the head is no sign of a slow node.
#[test]
fn a_burst_that_comes_at_once_passes_whole() {
    let stream = (1..=8).map(|n| event(progress(1, n))).collect::<String>() + &event(result(1));
    let sent = stream.clone();
    let upstream = Upstream::start(move |_, reply| {
        let mut bytes =
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                .to_vec();
        bytes.extend(format!("{:x}\r\n{sent}\r\n0\r\n\r\n", sent.len()).bytes());
        reply.raw(bytes);
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    for _ in 0..20 {
        assert_eq!(client.ask(&call(1)).text(), stream);
    }
}

/// Token bucket: eight at once, then the newest after the interval; anything else lets what waits out first.
#[test]
fn beyond_the_burst_progress_waits_and_the_newest_goes_out() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        pass.pass();
        reply.chunk((1..=20).map(|n| event(progress(1, n))).collect::<String>());
        pass.pass();
        reply.chunk((21..=30).map(|n| event(progress(1, n))).collect::<String>() + &event(result(1)));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    client.head();
    gate.open();
    let values = |events: &[sse::Event]| -> Vec<u64> {
        events.iter().filter_map(|event| event.json()["params"]["progress"].as_u64()).collect()
    };
    let events = client.events(9);
    assert_eq!(values(&events), [1, 2, 3, 4, 5, 6, 7, 8, 20]);
    gate.open();
    let events = sse::read(&client.response().body).events;
    let told = values(&events);
    // How many of the second ten pass depends on what the bucket held by then: at least the newest.
    assert_eq!(told[..9], [1, 2, 3, 4, 5, 6, 7, 8, 20]);
    assert_eq!(told.last(), Some(&30));
    assert!(told.is_sorted());
    assert_eq!(events.last().unwrap().json()["id"], 1);
    let line = sidecar.wait_line(|line| line["stream"] == "sse");
    assert_eq!(line["progress_in"], 30);
    assert_eq!(line["progress_out"], told.len());
    assert_eq!(line["progress_coalesced"], 30 - told.len());
    assert_eq!(line["progress_dropped"], 0);
    assert_eq!(line["refetch"], serde_json::Value::Null, "thinning is no loss");
}

const QUESTION: &str = r#"{"jsonrpc":"2.0","id":"e1","method":"elicitation/create","params":{"message":"?","requestedSchema":{"type":"object","properties":{}}}}"#;
const ANSWER: &str = r#"{"jsonrpc":"2.0","id":"e1","result":{"action":"decline"}}"#;

/// Asks in mid-call and goes on when it was answered; with progress before and behind the question, if `busy`.
fn asking(busy: bool) -> Upstream {
    let answered = Arc::new(Gate::new());
    Upstream::start(move |request, reply| {
        if request.json()["id"] == "e1" {
            reply.head(202, &[("Content-Length", "0")]);
            answered.open();
            return;
        }
        reply.sse(&[]);
        if busy {
            (1..=50).for_each(|n| reply.event(&progress(1, n)));
        }
        reply.event(QUESTION);
        if busy {
            (51..=100).for_each(|n| reply.event(&progress(1, n)));
        }
        answered.pass();
        reply.event(&result(1));
        reply.end();
    })
}

fn answer_when_asked(sidecar: &Sidecar, client: &Client) {
    client.body(|body| sse::read(body).events.iter().any(|event| event.data == QUESTION));
    let answered = sidecar.client().ask(&Post::legacy(ANSWER));
    assert_eq!(answered.status(), 202);
    assert_eq!(answered.text(), "");
}

#[test]
fn a_server_asks_in_mid_call_and_is_answered_while_its_stream_is_open() {
    for busy in [false, true] {
        let upstream = asking(busy);
        let sidecar = Sidecar::before(&upstream);
        let client = sidecar.client();
        client.send(&call(1));
        answer_when_asked(&sidecar, &client);
        let events = sse::read(&client.response().body).events;
        assert_eq!(events.last().unwrap().data, result(1));
        assert_eq!(events.iter().filter(|event| event.data == QUESTION).count(), 1);
        let posted = upstream.wait_request_where(|request| request.json()["id"] == "e1");
        assert_eq!(posted.body, ANSWER.as_bytes());
        assert_eq!(posted.head.field("mcp-session-id"), Some("sess-A"));
        assert_eq!(upstream.count(), 2);
        if busy {
            let at = events.iter().position(|event| event.data == QUESTION).unwrap();
            let value = |event: &sse::Event| event.json()["params"]["progress"].as_u64().unwrap();
            assert_eq!(value(&events[at - 1]), 50, "the newest goes out before the question");
            assert_eq!(value(&events[events.len() - 2]), 100, "and before the result");
        }
        let line = sidecar.wait_line(|line| line["rpc"] == "tools/call");
        assert_eq!(line["outcome"], "ok");
    }
}

/// The idle clock stands still while the node owes the answer, also beyond its time.
#[test]
fn a_person_may_take_longer_to_answer_than_the_idle_time() {
    let upstream = asking(false);
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nidle_timeout = \"500ms\"\n",
        upstream.url()
    ));
    let client = sidecar.client();
    client.send(&call(1));
    client.events(1);
    std::thread::sleep(std::time::Duration::from_millis(1200));
    answer_when_asked(&sidecar, &client);
    assert_eq!(sse::read(&client.response().body).events[1].data, result(1));
}
