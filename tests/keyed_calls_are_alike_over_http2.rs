//! A node that speaks HTTP/2 gets for its keyed calls what one that speaks HTTP/1.1 gets: the key of the same identity, the
//! same replay, the same refusals, and how an attempt began. The ledger knows calls, not connections.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use http::HeaderMap;
use serde_json::{Value, json};
use support::{
    Gate, Post, Sidecar, Upstream,
    http2::Node,
    keyed::{Call, answering, calls, done, key, list, meta, server},
    sse,
};

/// What came back over HTTP/2.
struct Answer {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    fn field(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The response: the body, or the last event.
    fn message(&self) -> Value {
        if self.field("content-type") == Some("text/event-stream") {
            return sse::read(self.body.as_bytes()).events.last().expect("an event").json();
        }
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    fn text(&self) -> String {
        let message = self.message();
        message["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{message}")).to_owned()
    }
}

fn ask(node: &Node, post: &Post) -> Answer {
    let mut stream = node.send(post);
    let head = node.head(&mut stream);
    let body = node.rest(&mut stream);
    Answer { status: head.status().as_u16(), headers: head.headers().clone(), body }
}

fn made(upstream: &Upstream, wanted: &str) -> usize {
    calls(upstream).iter().filter(|call| key(call).as_deref() == Some(wanted)).count()
}

#[test]
fn an_identity_in_headers_or_in_the_object_makes_the_same_key() {
    let upstream = answering();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let node = Node::connect(&sidecar.listen);
    let said =
        json!({ "job": "j", "continued": 2, "session": 3, "k": 4, "activity": "by-object", "attempt": 1 });
    let in_headers = [
        ("Oz0-Job", "j"),
        ("Oz0-Continued", "2"),
        ("Oz0-Session", "3"),
        ("Oz0-K", "4"),
        ("Oz0-Activity", "by-header"),
        ("Oz0-Attempt", "1"),
        ("Oz0-Time-Limit", "30"),
        ("Oz0-Elapsed", "0.5"),
    ];
    let by_header = in_headers.iter().fold(Call::of("mark"), |call, (name, value)| call.field(name, value));
    let expected = format!("j/r2/s3/mark#{}/4", support::keyed::EMPTY_DIGEST);
    for (n, call) in [by_header, Call::of("mark").said(said)].into_iter().enumerate() {
        let answer = ask(&node, &call.post());
        assert_eq!(answer.field("oz0-idempotency-key"), Some(expected.as_str()));
        assert_eq!(answer.text(), "done 0", "the second is the same call, and replayed");
        let line = sidecar.wait_line(|line| line["activity"] == ["by-header", "by-object"][n]);
        assert_eq!((&line["http"], &line["key"], &line["job"]), (&json!("2"), &json!(expected), &json!("j")));
    }
    let [sent] = &calls(&upstream)[..] else { panic!("one call is made") };
    assert_eq!(key(sent).as_deref(), Some(expected.as_str()));
    assert_eq!(meta(sent)["oz0/call"], Value::Null);
    assert!(sent.head.fields.iter().all(|(name, _)| !name.to_lowercase().starts_with("oz0-")), "stripped");
}

#[test]
fn what_is_done_is_replayed_over_either_version() {
    let upstream = answering();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let node = Node::connect(&sidecar.listen);
    for (n, first_over_two) in [true, false].into_iter().enumerate() {
        let name = format!("job/{n}");
        let call = Call::of("effect").activity("job", &n.to_string()).field("Authorization", "Bearer a");
        let first =
            if first_over_two { ask(&node, &call.post()).body.into_bytes() } else { call.ask(&sidecar).body };
        for again in [&node, &Node::connect(&sidecar.listen)] {
            let replay = ask(again, &call.post());
            assert_eq!((replay.status, replay.body.as_bytes()), (200, &first[..]));
            assert_eq!(replay.field("oz0-idempotency-key"), Some(name.as_str()));
            assert_eq!(replay.field("content-type"), Some("application/json"));
        }
        let one = call.ask(&sidecar);
        assert_eq!(one.body, first);
        let as_event = ask(&node, &call.clone().field("Accept", "text/event-stream").post());
        assert_eq!(as_event.message(), one.json());
        let stranger = ask(&node, &call.clone().field("Authorization", "Bearer b").post());
        assert_eq!(stranger.message()["error"]["data"]["reason"], "already_done");
        assert_eq!(made(&upstream, &name), 1);
    }
    let replays = sidecar.lines().into_iter().filter(|line| line["replayed"] == true);
    assert!(replays.filter(|line| line["http"] == "2").count() >= 4);
}

#[test]
fn streams_of_one_connection_are_attempts_that_never_overlap() {
    let gate = Gate::new();
    let waits = gate.clone();
    let upstream = server(move |n, request, reply| {
        waits.pass();
        reply.json(200, &[], &done(request, n));
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let node = Node::connect(&sidecar.listen);
    let call = Call::of("effect").activity("job", "a");
    let mut first = node.send(&call.post());
    upstream.wait_request_where(|request| key(request).as_deref() == Some("job/a"));
    let busy = ask(&node, &call.clone().id(2).post());
    assert_eq!(busy.message()["result"]["_meta"]["oz0/retry_after"], 1);
    assert_eq!((busy.status, busy.field("retry-after")), (200, Some("1")));
    let mismatch = ask(&node, &call.clone().arguments("{\"a\":1}").post());
    assert_eq!(mismatch.message()["error"]["data"]["reason"], "key_mismatch");
    gate.open();
    assert!(node.rest(&mut first).contains("done 0"));
    assert_eq!(ask(&node, &call.id(3).post()).text(), "done 0");
    assert_eq!(made(&upstream, "job/a"), 1);
}

#[test]
fn an_attempt_after_a_reset_stream_says_what_it_goes_on_from() {
    let upstream = server(|n, request, reply| {
        if n > 0 {
            return reply.json(200, &[], &done(request, n));
        }
        reply.sse(&[]);
        let token = meta(request)["progressToken"].clone();
        reply.event(&format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":2,"total":4,"_meta":{{"oz0/resume":"t2"}}}}}}"#
        ));
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let node = Node::connect(&sidecar.listen);
    let call = Call::of("charge").activity("job", "a").meta("progressToken", "\"mine\"");
    let mut first = node.send(&call.post());
    node.wait_body(&mut first, "\"progress\":2");
    node.reset(first);
    let mut next = None;
    support::until("the first attempt to have ended", || {
        let answer = ask(&node, &call.post());
        let is_free = answer.message()["result"]["_meta"]["oz0/retryable"] != true;
        next = Some(answer);
        is_free
    });
    let next = next.unwrap();
    assert_eq!(next.text(), "done 1");
    assert_eq!(next.field("oz0-resume"), Some("resumed from progress 2 of 4"));
    assert_eq!(meta(&calls(&upstream)[1])["oz0/resume"], json!({ "token": "t2", "progress": 2 }));
    // A replay is no attempt, and says nothing of one.
    assert_eq!(ask(&node, &call.post()).field("oz0-resume"), None);
}

#[test]
fn what_is_malformed_in_the_headers_is_refused_and_not_sent() {
    let upstream = answering();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let node = Node::connect(&sidecar.listen);
    for (name, value) in
        [("oz0-attempt", "x"), ("oz0-k", "0"), ("oz0-time-limit", "0"), ("oz0-activity", "a b")]
    {
        let call = Call::of("effect").field("Oz0-Job", "j").field("Oz0-Activity", "a").field(name, value);
        let refused = ask(&node, &call.post());
        assert_eq!((refused.status, &refused.message()["error"]["code"]), (400, &json!(-32600)), "{name}");
    }
    assert!(calls(&upstream).is_empty());
}
