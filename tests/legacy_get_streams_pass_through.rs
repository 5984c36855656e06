//! The legacy `GET` stream and resumption pass through, event ids and `Last-Event-ID` included.
//! The sidecar opens no `GET` itself, and what belongs to a POST never shows on a `GET`.

mod support;

use std::time::Duration;

use serde_json::Value;
use support::{
    Client, Gate, Post, Sidecar, Upstream,
    mcp::{call, event, progress, result},
    sse,
};

fn get(session: &str) -> Post {
    Post::get().field("Mcp-Session-Id", session)
}

fn resuming(id: &str) -> Post {
    Post::get().field("Last-Event-ID", id)
}

/// A sidecar whose streams show a comment soon, so that a comment tells that nothing else was there to be sent.
fn sidecar(upstream: &Upstream) -> Sidecar {
    Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nkeepalive = {{ interval = \"100ms\" }}\n",
        upstream.url()
    ))
}

/// A client with an open `GET` stream.
fn listening(sidecar: &Sidecar, session: &str) -> Client {
    let client = sidecar.client();
    client.send(&get(session));
    assert_eq!(client.head().status(), 200);
    client
}

/// Nothing but comments has come, and one comes after this moment.
fn is_silent(client: &Client) {
    let before = client.body(|_| true).len();
    let body = client.body(|body| body.len() >= before + 2 * b":\n\n".len());
    assert_eq!(sse::read(&body).events, []);
    assert_eq!(String::from_utf8_lossy(&body).replace(":\n\n", ""), "");
}

#[test]
fn what_answers_a_post_shows_on_that_post_alone() {
    type Answer = fn(&mut support::upstream::Reply);
    let answers: [(Answer, &str); 4] = [
        (
            |reply| {
                reply.sse(&[]);
                reply.event(&progress(1, 1));
                reply.event(&progress(1, 2));
                reply.event(&result(1));
                reply.end();
            },
            "result",
        ),
        (|reply| reply.json(200, &[], &result(1)), "result"),
        (|reply| reply.json(429, &[("Retry-After", "3")], "{}"), "result"),
        (
            |reply| {
                reply.sse(&[]);
                reply.end();
            },
            "error",
        ),
    ];
    for (answer, member) in answers {
        let upstream = Upstream::start(move |request, reply| {
            if request.method() == "GET" {
                reply.sse(&[]);
                reply.hang();
            } else {
                answer(reply);
            }
        });
        let sidecar = sidecar(&upstream);
        let (a, b) = (listening(&sidecar, "sess-A"), listening(&sidecar, "sess-B"));
        let response = sidecar.client().ask(&call(1));
        let told = match response.head.field("content-type") {
            Some("text/event-stream") => sse::read(&response.body).events.last().unwrap().json(),
            _ => response.json(),
        };
        assert_eq!(told["id"], 1);
        assert_ne!(told[member], Value::Null);
        is_silent(&a);
        is_silent(&b);
        assert_eq!(upstream.count(), 3);
    }
}

#[test]
fn a_server_s_request_shows_once_on_the_stream_where_it_was_put() {
    let question = r#"{"jsonrpc":"2.0","id":90,"method":"elicitation/create","params":{"message":"?","requestedSchema":{"type":"object","properties":{}}}}"#;
    let (ask, finish) = (Gate::new(), Gate::new());
    let (asks, finishes) = (ask.clone(), finish.clone());
    let upstream = Upstream::start(move |request, reply| {
        let session = request.head.field("mcp-session-id").unwrap_or_default().to_owned();
        reply.sse(&[]);
        match (request.method(), session.as_str()) {
            ("GET", "sess-A") => {
                asks.pass();
                reply.event(question);
                reply.hang();
            }
            ("GET", _) => reply.hang(),
            _ => {
                finishes.pass();
                reply.event(&result(1));
                reply.end();
            }
        }
    });
    let sidecar = sidecar(&upstream);
    let (a, b) = (listening(&sidecar, "sess-A"), listening(&sidecar, "sess-B"));
    let caller = sidecar.client();
    caller.send(&call(1));
    caller.head();
    ask.open();
    assert_eq!(a.events(1)[0].data, question);
    is_silent(&b);
    finish.open();
    let body = caller.response().body;
    let read = sse::read(&body);
    assert_eq!(read.events.iter().map(|event| event.data.as_str()).collect::<Vec<_>>(), [result(1)]);
    assert_eq!(sse::read(&a.body(|_| true)).events.len(), 1);
}

#[test]
fn a_server_may_close_after_a_priming_event_and_answer_on_a_resuming_get() {
    let priming = "id: ev-1\nretry: 300\ndata: \n\n";
    let answer = format!("id: ev-2\ndata: {}\n\n", result(1));
    let last = answer.clone();
    let upstream = Upstream::start(move |request, reply| {
        reply.sse(&[]);
        reply.chunk(if request.method() == "GET" { &last } else { priming });
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    assert_eq!(client.ask(&call(1)).text(), priming);
    // The time that the server named: nothing is asked in it.
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(upstream.count(), 1);
    assert_eq!(client.ask(&resuming("ev-1")).text(), answer);
    let resumed = upstream.wait_request(1);
    assert_eq!((resumed.method(), resumed.head.field("last-event-id")), ("GET", Some("ev-1")));
    assert_eq!(resumed.head.field("mcp-session-id"), Some("sess-A"));
    assert_eq!(upstream.count(), 2);
    for line in sidecar.wait_lines(2) {
        assert_eq!(line["outcome"], "ok");
    }
}

/// What a hop that reconnects by itself would make a storm of.
#[test]
fn an_empty_resumed_stream_ends_cleanly_and_is_not_asked_for_again() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.chunk("retry: 100\n\n");
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    assert_eq!(client.ask(&resuming("7")).text(), "retry: 100\n\n");
    // Ten times what `retry` asks of whoever reconnects.
    std::thread::sleep(Duration::from_millis(1000));
    assert_eq!(upstream.count(), 1);
    let line = &sidecar.wait_lines(1)[0];
    assert_eq!((&line["outcome"], &line["events"]), (&"ok".into(), &0.into()));
}

#[test]
fn last_event_id_reaches_the_upstream_byte_for_byte() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    for (number, id) in ["7", "7 ü", "a/b=c;d,e \"f\"", "{\"stream\":1}"].iter().enumerate() {
        let client = sidecar.client();
        let mut post = resuming(id);
        if number % 2 == 1 {
            // On a POST too: nobody but the upstream knows what it means there.
            post = call(1).field("Last-Event-ID", id);
        }
        client.send(&post);
        client.head();
        let sent = upstream.wait_request(number);
        let connection = &upstream.connections()[sent.connection];
        let field = format!("last-event-id: {id}\r\n").into_bytes();
        let found = connection.bytes.windows(field.len()).any(|part| part.eq_ignore_ascii_case(&field));
        assert!(found, "{id}: {}", String::from_utf8_lossy(&connection.bytes));
    }
}

#[test]
fn everything_on_a_get_stream_passes_as_it_came_and_its_break_just_ends_it() {
    let changed = r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#;
    let stream = [
        "id: 0\ndata:\n\n".to_owned(),
        format!("id: 1\nevent: message\ndata: {changed}\n\n"),
        event(progress("\"task-7\"", 1)),
        event(progress(3, 1)),
        event(r#"{"jsonrpc":"2.0","id":"ping-1","method":"ping"}"#),
        format!("id: 4\ndata: {}\n\n", result(12)),
        "retry: 5\n\n".to_owned(),
    ]
    .concat();
    for clean in [true, false] {
        let gate = Gate::new();
        let (pass, sent) = (gate.clone(), stream.clone());
        let upstream = Upstream::start(move |_, reply| {
            reply.sse(&[]);
            reply.chunk(&sent);
            reply.chunk(": comment\n\ndata: half");
            pass.pass();
            if clean { reply.end() } else { reply.reset() }
        });
        let sidecar = Sidecar::before(&upstream);
        let client = sidecar.client();
        client.send(&Post::get());
        client.body(|body| body == stream.as_bytes());
        gate.open();
        assert_eq!(client.response().text(), stream);
        assert_eq!(upstream.count(), 1);
        assert_eq!(sidecar.wait_lines(1)[0]["http_method"], "GET");
    }
}

/// A response that a resumed stream brings is completed like any other.
#[test]
fn a_resumed_response_without_its_empty_line_is_completed() {
    let stream = format!("id: 9\ndata: {}\n", result(1));
    let sent = stream.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        reply.chunk(&sent);
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    assert_eq!(sidecar.client().ask(&resuming("8")).text(), stream + "\n");
}

#[test]
fn a_get_stream_has_no_clocks() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        pass.pass();
        reply.event(&progress(1, 1));
        reply.end();
    });
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nidle_timeout = \"200ms\"\nmax_timeout = \"400ms\"\n",
        upstream.url()
    ));
    let client = sidecar.client();
    client.send(&Post::get());
    client.head();
    std::thread::sleep(Duration::from_millis(1200));
    gate.open();
    assert_eq!(client.response().text(), event(progress(1, 1)));
}

#[test]
fn a_refused_get_passes_and_is_not_tried_again() {
    let upstream = Upstream::start(|_, reply| reply.json(405, &[("Allow", "POST")], ""));
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&Post::get());
    assert_eq!((response.status(), response.head.field("allow")), (405, Some("POST")));
    assert_eq!(upstream.count(), 1);
}
