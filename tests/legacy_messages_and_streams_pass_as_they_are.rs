//! What makes a legacy session more than request and response: messages that were handed over go on without their node, streams that end early are no failure and are resumed by the node alone,
//! and a stream's events need not begin with the answer.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::time::Duration;

use support::{
    Gate, Post, Sidecar, Upstream,
    http2::Node,
    mcp::{call, cancel, event, progress, result},
    sse,
};

fn notification(n: usize) -> Post {
    Post::legacy(format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/roots/list_changed","params":{{"n":{n}}}}}"#
    ))
}

fn response(n: usize) -> Post {
    Post::legacy(format!(r#"{{"jsonrpc":"2.0","id":{n},"result":{{"roots":[]}}}}"#))
}

fn failure(n: usize) -> Post {
    Post::legacy(format!(r#"{{"jsonrpc":"2.0","id":"{n}","error":{{"code":-1,"message":"no"}}}}"#))
}

fn large(n: usize) -> Post {
    Post::legacy(format!(r#"{{"jsonrpc":"2.0","id":{n},"result":{{"x":"{}"}}}}"#, "x".repeat(500_000)))
}

#[test]
fn a_message_that_was_handed_over_goes_on_although_its_node_leaves_at_once() {
    let upstream = Upstream::start(|_, reply| reply.json(202, &[], ""));
    let sidecar = Sidecar::before(&upstream);
    let makers = [notification, response, failure, large];
    for round in 0..25 {
        for (number, make) in makers.iter().enumerate() {
            let post = make(round);
            let node = sidecar.client();
            node.send(&post);
            drop(node);
            let before = round * makers.len() + number;
            assert_eq!(upstream.wait_request(before).body, post.body, "{before}");
        }
    }
    let lines = sidecar.wait_lines(100);
    assert!(lines.iter().all(|line| line["outcome"] == "ok"), "{lines:?}");
    assert_eq!(upstream.count(), 100);
}

/// Before the sidecar looks, all of it has come: the end of a stream, the message behind it, and the node's leaving.
#[test]
fn a_message_behind_a_stream_goes_on_although_its_node_leaves_at_once() {
    let (end, ended) = (Gate::new(), Gate::new());
    let (ends, told) = (end.clone(), ended.clone());
    let upstream = Upstream::start(move |request, reply| {
        if request.json()["method"] != "tools/call" {
            return reply.json(202, &[], "");
        }
        reply.sse(&[]);
        ends.pass();
        reply.event(&result(1));
        reply.end();
        told.open();
    });
    let sidecar = Sidecar::before(&upstream);
    for round in 0..5 {
        let node = sidecar.client();
        node.send(&call(1));
        node.head();
        sidecar.signal("STOP");
        end.open();
        ended.pass();
        node.send(&notification(round));
        node.half_close();
        sidecar.signal("CONT");
        upstream.wait_request_where(|request| request.body == notification(round).body);
    }
    assert_eq!(upstream.count(), 10);
}

#[test]
fn it_is_not_cut_while_the_upstream_takes_its_time() {
    let answer = Gate::new();
    let answered = answer.clone();
    let upstream = Upstream::start(move |_, reply| {
        answered.pass();
        reply.json(202, &[], "");
    });
    let sidecar = Sidecar::before(&upstream);
    for (number, post) in [notification(1), response(2), cancel(9)].into_iter().enumerate() {
        let node = sidecar.client();
        node.send(&post);
        upstream.wait_request(number);
        node.reset();
        // The node is known to be gone before the upstream answers.
        let other = Post::get().at("/nowhere");
        assert_eq!(sidecar.client().ask(&other).status(), 404);
        answer.open();
        sidecar.wait_line(|line| line["status"] == 202 && line["bytes_in"] == post.body.len());
    }
    assert_eq!(upstream.connections().len(), 1, "the connection was never closed");
}

#[test]
fn a_message_of_an_http2_node_goes_on_too() {
    let answer = Gate::new();
    let answered = answer.clone();
    let upstream = Upstream::start(move |_, reply| {
        answered.pass();
        reply.json(202, &[], "");
    });
    let sidecar = Sidecar::before(&upstream);
    for (number, whole_connection) in [false, true].into_iter().enumerate() {
        let node = Node::connect(&sidecar.listen);
        let stream = node.send(&notification(number));
        upstream.wait_request(number);
        if whole_connection {
            drop(node);
        } else {
            node.reset(stream);
        }
        assert_eq!(sidecar.client().ask(&Post::get().at("/nowhere")).status(), 404);
        answer.open();
        sidecar.wait_lines(2 * (number + 1));
    }
    assert_eq!(sidecar.lines().iter().filter(|line| line["status"] == 202).count(), 2);
    assert_eq!(upstream.connections().len(), 1, "the connection was never closed");
}

#[test]
fn a_message_is_whole_or_it_is_not_sent() {
    let upstream = Upstream::start(|_, reply| reply.json(202, &[], ""));
    let sidecar = Sidecar::before(&upstream);
    let bytes = notification(1).bytes(&sidecar.listen);
    let node = sidecar.client();
    node.write(&bytes[..bytes.len() - 1]);
    drop(node);
    sidecar.wait_lines(1);
    assert_eq!(upstream.count(), 0);
}

#[test]
fn a_response_with_the_id_of_an_open_call_does_not_touch_that_call() {
    let go = Gate::new();
    let going = go.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.method() == "GET" {
            reply.sse(&[]);
            reply.event(r#"{"jsonrpc":"2.0","id":"p1","method":"ping"}"#);
            return reply.hang();
        }
        if request.json().get("method").is_none() {
            return reply.json(202, &[], "");
        }
        reply.sse(&[]);
        going.pass();
        reply.event(&result(1));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let get = sidecar.client();
    get.send(&Post::get());
    assert_eq!(get.events(1)[0].data, r#"{"jsonrpc":"2.0","id":"p1","method":"ping"}"#);
    let node = sidecar.client();
    node.send(&call(1));
    node.head();
    let bodies = [
        r#"{"jsonrpc":"2.0","id":"p1","result":{}}"#,
        "{ \"result\" : {\"_meta\":{\"oz0/retryable\":true}}, \"id\":1,\n\"jsonrpc\":\"2.0\" }",
        r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"none"}}"#,
    ];
    for (number, body) in bodies.into_iter().enumerate() {
        assert_eq!(sidecar.client().ask(&Post::legacy(body)).status(), 202);
        assert_eq!(upstream.wait_request(2 + number).body, body.as_bytes());
    }
    go.open();
    assert!(node.response().text().contains(&result(1)));
    assert_eq!(upstream.count(), 5, "no ping is answered by the sidecar itself");
}

#[test]
fn the_first_event_need_not_be_the_answer() {
    let log = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info"}}"#;
    let asked = [
        r#"{"jsonrpc":"2.0","id":"s1","method":"ping"}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"roots/list"}"#,
    ];
    let cancelled = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"s1"}}"#;
    let events = [
        log.to_owned(),
        asked[0].to_owned(),
        asked[1].to_owned(),
        cancelled.to_owned(),
        progress(1, 1),
        result(1),
        log.to_owned(),
    ];
    let upstream = Upstream::sse(&events);
    let sidecar = Sidecar::before(&upstream);
    let initialize =
        r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}"#;
    for post in [call(1), Post::new(initialize)] {
        let answer = sidecar.client().ask(&post);
        let bytes: String = events.iter().map(event).collect();
        assert_eq!(answer.text(), bytes);
    }
    sidecar.wait_lines(2).iter().for_each(|line| assert_eq!(line["outcome"], "ok", "{line}"));
}

#[test]
fn a_server_s_request_of_the_call_s_id_is_no_answer_to_it() {
    let asked = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#.to_owned();
    let upstream = Upstream::sse(&[asked]);
    let answer = Sidecar::before(&upstream).client().ask(&call(1));
    let events = sse::read(&answer.body).events;
    assert_eq!(events[1].json()["error"]["data"]["reason"], "upstream_failed", "{}", answer.text());
}

#[test]
fn a_stream_with_event_ids_that_ends_early_just_ends_and_the_node_resumes_it() {
    let priming = "id: ev-1\nretry: 300\ndata: \n\n";
    let last = format!("id: ev-2\n{}", event(result(1)));
    for broken in [false, true] {
        let told = last.clone();
        let upstream = Upstream::start(move |request, reply| {
            reply.sse(&[]);
            if request.method() == "GET" {
                reply.chunk(&told);
                return reply.end();
            }
            reply.chunk(priming);
            if broken { reply.break_off() } else { reply.end() }
        });
        let sidecar = Sidecar::before(&upstream);
        let node = sidecar.client();
        let ended = node.ask(&call(1));
        assert_eq!(ended.text(), priming, "broken: {broken}");
        assert_eq!(ended.head.field("transfer-encoding"), Some("chunked"));
        // The sidecar itself never asks for the rest.
        std::thread::sleep(Duration::from_millis(600));
        assert_eq!(upstream.count(), 1);
        let resumed = node.ask(&Post::get().field("Last-Event-ID", "ev-1"));
        assert_eq!(resumed.text(), last);
        let get = upstream.wait_request(1);
        assert_eq!((get.method(), get.head.all("last-event-id")), ("GET", vec!["ev-1"]));
        assert_eq!(upstream.count(), 2);
        let lines = sidecar.wait_lines(2);
        assert!(lines.iter().all(|line| line["outcome"] == "ok"), "{lines:?}");
    }
}

#[test]
fn an_empty_resumed_stream_passes_and_nobody_but_the_node_comes_again() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.chunk("retry: 1500\n\n");
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    for id in ["7", "\"7 \u{fc}\"", "a:b, c; d"] {
        let before = upstream.count();
        let answer = sidecar.client().ask(&Post::get().field("Last-Event-ID", id));
        assert_eq!((answer.status(), answer.text()), (200, "retry: 1500\n\n".to_owned()));
        let bytes = &upstream.connections()[0].bytes;
        let line = format!("last-event-id: {id}\r\n");
        let at = bytes.windows(line.len()).rposition(|w| w.eq_ignore_ascii_case(line.as_bytes()));
        assert!(at.is_some(), "{id} in {}", String::from_utf8_lossy(bytes));
        assert_eq!(upstream.count(), before + 1);
    }
    std::thread::sleep(Duration::from_millis(2000));
    assert_eq!(upstream.count(), 3);
}
