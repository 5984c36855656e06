//! At the sidecar's own limit a call gets the busy result, any other
//! request 503, and what needs no answer is never counted.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use support::{
    Gate, Post, Sidecar, Upstream,
    http::Response,
    mcp::{MODERN, call, cancel, modern_call, progress, result},
    sse,
};

/// Holds whatever came with an argument or a method named `hold` until the gate opens, answers the rest at once.
fn holding(gate: &Gate) -> Upstream {
    let gate = gate.clone();
    Upstream::start(move |request, reply| {
        let held = request.head.field("x-hold").is_some();
        if held {
            gate.pass();
        }
        match request.json_or_null()["id"].as_u64() {
            Some(id) => reply.json(200, &[], &result(id)),
            None => reply.head(202, &[("Content-Length", "0")]),
        }
    })
}

trait OrNull {
    fn json_or_null(&self) -> serde_json::Value;
}

impl OrNull for support::Request {
    fn json_or_null(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

fn one_call(upstream: &Upstream) -> Sidecar {
    Sidecar::with_config(&format!("[upstreams.mcp]\nurl = \"{}\"\ncalls = 1\n", upstream.url()))
}

fn held(post: Post) -> Post {
    post.field("X-Hold", "1")
}

fn request(method: &str) -> Post {
    Post::legacy(format!(r#"{{"jsonrpc":"2.0","id":7,"method":"{method}"}}"#))
}

/// The busy result of the sidecar's own limit.
fn assert_busy(response: &Response, answer: &serde_json::Value) {
    assert_eq!(response.status(), 200, "{}", response.text());
    assert_eq!(response.head.all("retry-after"), ["1"]);
    assert_eq!(response.head.field("oz0-upstream-status"), None);
    let result = &answer["result"];
    assert_eq!(result["isError"], true);
    assert_eq!(result["_meta"], serde_json::json!({"oz0/retryable": true, "oz0/retry_after": 1}));
    assert!(!result["content"][0]["text"].as_str().unwrap().is_empty());
}

fn assert_unavailable(response: &Response) {
    assert_eq!(response.status(), 503, "{}", response.text());
    assert_eq!(response.head.all("retry-after"), ["1"]);
    assert_eq!(response.head.all("content-type"), ["application/json"]);
    assert_eq!(response.json()["error"]["code"], 1503);
}

#[test]
fn a_call_beyond_the_limit_is_busy_and_nothing_is_sent() {
    let gate = Gate::new();
    let upstream = holding(&gate);
    let sidecar = one_call(&upstream);
    let first = sidecar.client();
    first.send(&held(call(1)));
    upstream.wait_request(0);
    for (post, modern) in [(call("\"b\""), false), (modern_call(3), true)] {
        let response = sidecar.client().ask(&post);
        assert_busy(&response, &response.json());
        assert_eq!(response.json()["result"].get("resultType").is_some(), modern);
        let event = sidecar.client().ask(&post.field("Accept", "text/event-stream"));
        assert_eq!(event.head.all("content-type"), ["text/event-stream"]);
        assert_busy(&event, &sse::read(&event.body).events[0].json());
    }
    assert_eq!(upstream.count(), 1);
    let line = sidecar.wait_line(|line| line["id"] == "b");
    let told = ["outcome", "status", "retry_after", "upstream_status"].map(|name| line[name].clone());
    assert_eq!(serde_json::json!(told), serde_json::json!(["busy", 200, 1, null]));
    gate.open();
    assert_eq!(first.response().text(), result(1));
    sidecar.wait_line(|line| line["id"] == 1);
    assert_eq!(sidecar.client().ask(&call(4)).text(), result(4), "its place is free again");
}

#[test]
fn any_other_request_and_a_legacy_task_get_503_that_names_a_wait() {
    let gate = Gate::new();
    let upstream = holding(&gate);
    let sidecar = one_call(&upstream);
    let first = sidecar.client();
    first.send(&held(call(1)));
    upstream.wait_request(0);
    let task = |more: &str| {
        format!(
            r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{{"name":"slow","task":{{}},"_meta":{{{more}}}}}}}"#
        )
    };
    let list = r#"{"jsonrpc":"2.0","id":8,"method":"tools/list"}"#;
    let in_batch = String::from_utf8(call(9).body).unwrap();
    let batch = Post::legacy(format!("[{list},{in_batch}]")).field("MCP-Protocol-Version", "2025-03-26");
    for post in [request("tools/list"), request("initialize"), request("ping"), Post::legacy(task("")), batch]
    {
        assert_unavailable(&sidecar.client().ask(&post));
    }
    assert_eq!(sidecar.client().ask(&request("ping")).json()["id"], 7);
    let version = format!(r#""io.modelcontextprotocol/protocolVersion":"{MODERN}""#);
    let modern = sidecar.client().ask(&Post::modern("tools/call", Some("slow"), task(&version)));
    assert_busy(&modern, &modern.json());
    assert_eq!(upstream.count(), 1);
    gate.open();
}

#[test]
fn a_batch_of_nothing_but_calls_gets_one_busy_result_a_call() {
    let gate = Gate::new();
    let upstream = holding(&gate);
    let sidecar = one_call(&upstream);
    let first = sidecar.client();
    first.send(&held(call(1)));
    upstream.wait_request(0);
    let [two, three] = [2, 3].map(|id| String::from_utf8(call(id).body).unwrap());
    let batch = Post::legacy(format!("[{two},{three}]")).field("MCP-Protocol-Version", "2025-03-26");
    let response = sidecar.client().ask(&batch);
    let answers = response.json();
    assert_eq!(answers.as_array().unwrap().len(), 2);
    for (at, id) in [(0, 2), (1, 3)] {
        assert_eq!(answers[at]["id"], id);
        assert_busy(&response, &answers[at]);
    }
    gate.open();
}

#[test]
fn what_needs_no_answer_passes_although_the_limit_is_reached() {
    let gate = Gate::new();
    let upstream = holding(&gate);
    let sidecar = one_call(&upstream);
    let first = sidecar.client();
    first.send(&held(call(1)));
    upstream.wait_request(0);
    let passing = [
        Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#),
        Post::legacy(r#"[{"jsonrpc":"2.0","method":"notifications/x"}]"#)
            .field("MCP-Protocol-Version", "2025-03-26"),
        Post::legacy(r#"{"jsonrpc":"2.0","id":"e1","result":{}}"#),
        Post::delete(),
        cancel(55),
    ];
    for post in &passing {
        assert!(sidecar.client().ask(post).status() < 300, "{post:?}");
    }
    assert_eq!(upstream.count(), 1 + passing.len());
    gate.open();
}

#[test]
fn what_needs_no_answer_takes_no_place() {
    let gate = Gate::new();
    let upstream = holding(&gate);
    let sidecar = one_call(&upstream);
    let posts = [
        Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#),
        Post::legacy(r#"{"jsonrpc":"2.0","id":"e1","error":{"code":1,"message":"no"}}"#),
        Post::delete(),
    ];
    let clients: Vec<_> = posts
        .into_iter()
        .enumerate()
        .map(|(number, post)| {
            let client = sidecar.client();
            client.send(&held(post));
            upstream.wait_request(number);
            client
        })
        .collect();
    assert_eq!(sidecar.client().ask(&call(1)).text(), result(1));
    clients.iter().for_each(|_| gate.open());
    for client in &clients {
        assert!(client.response().status() < 300);
    }
}

#[test]
fn a_stream_keeps_its_place_until_it_ends() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.number > 0 {
            return reply.json(200, &[], &result(2));
        }
        reply.sse(&[]);
        reply.event(&progress(1, 1));
        pass.pass();
        reply.event(&result(1));
        reply.end();
    });
    let sidecar = one_call(&upstream);
    let first = sidecar.client();
    first.send(&call(1));
    first.events(1);
    let busy = sidecar.client().ask(&call(2));
    assert_busy(&busy, &busy.json());
    gate.open();
    assert_eq!(sse::read(&first.response().body).events.len(), 2);
    sidecar.wait_line(|line| line["id"] == 1);
    assert_eq!(sidecar.client().ask(&call(2)).text(), result(2));
}

#[test]
fn a_node_that_leaves_gives_its_place_back() {
    let gate = Gate::new();
    let upstream = holding(&gate);
    let sidecar = one_call(&upstream);
    let first = sidecar.client();
    first.send(&held(call(1)));
    upstream.wait_request(0);
    first.close();
    sidecar.wait_line(|line| line["outcome"] == "cancelled");
    assert_eq!(sidecar.client().ask(&call(2)).text(), result(2));
    gate.open();
}

#[test]
fn the_limit_over_all_upstreams_counts_them_together() {
    let gate = Gate::new();
    let (upstream, other) = (holding(&gate), holding(&gate));
    let sidecar = Sidecar::with_config(&format!(
        "[limits]\ncalls = 1\n[upstreams.a]\nurl = \"{}\"\n[upstreams.b]\nurl = \"{}\"\n",
        upstream.url(),
        other.url()
    ));
    let first = sidecar.client();
    first.send(&held(call(1)).at("/a"));
    upstream.wait_request(0);
    let busy = sidecar.client().ask(&call(2).at("/b"));
    assert_busy(&busy, &busy.json());
    assert_unavailable(&sidecar.client().ask(&request("tools/list").at("/b")));
    assert_eq!(other.count(), 0);
    let note = Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#).at("/b");
    assert_eq!(sidecar.client().ask(&note).status(), 202);
    gate.open();
    assert_eq!(first.response().text(), result(1));
    sidecar.wait_line(|line| line["id"] == 1);
    assert_eq!(sidecar.client().ask(&call(3).at("/b")).text(), result(3));
}

#[test]
fn one_upstreams_limit_is_not_anothers() {
    let gate = Gate::new();
    let (upstream, other) = (holding(&gate), holding(&gate));
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.a]\nurl = \"{}\"\ncalls = 1\n[upstreams.b]\nurl = \"{}\"\ncalls = 1\n",
        upstream.url(),
        other.url()
    ));
    let first = sidecar.client();
    first.send(&held(call(1)).at("/a"));
    upstream.wait_request(0);
    assert_eq!(sidecar.client().ask(&call(2).at("/b")).text(), result(2));
    gate.open();
}
