//! SIGTERM: what runs may finish within `drain`, what is new is turned away, what is left is cut and told so, and the
//! process ends with every line written.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::time::Duration;

use support::{
    Client, Gate, Post, Request, Sidecar, Upstream,
    http::Response,
    http2::Node,
    mcp::{call, modern_call, progress, result},
    sse,
    upstream::Reply,
};
use tokio::time::Instant;

/// Far above what a drain may be late on a busy machine.
const LATE: Duration = Duration::from_secs(4);

fn sidecar(upstream: &Upstream, drain: &str) -> Sidecar {
    Sidecar::with_config(&format!("drain = \"{drain}\"\n[upstreams.mcp]\nurl = \"{}\"\n", upstream.url()))
}

/// Notifications and the like get 202; `brief` is answered; everything else hangs, on a stream unless `X-Silent` is there.
fn script(request: &Request, reply: &mut Reply) {
    let json: Option<serde_json::Value> = serde_json::from_slice(&request.body).ok();
    let request_or_batch = |json: &serde_json::Value| {
        json.is_array() || json.get("method").is_some() && json.get("id").is_some()
    };
    if request.method() == "DELETE" || json.is_some_and(|json| !request_or_batch(&json)) {
        return reply.json(202, &[], "");
    }
    if request.head.field("x-silent").is_none() {
        reply.sse(&[]);
        if request.method() == "POST" {
            reply.event(&progress(&request.json()["id"], 1));
        }
    }
    reply.hang();
}

fn open(sidecar: &Sidecar, post: &Post) -> Client {
    let node = sidecar.client();
    node.send(post);
    node.head();
    node
}

fn begin(sidecar: &Sidecar) -> Instant {
    let begun = Instant::now();
    sidecar.signal("TERM");
    sidecar.wait_stderr("draining");
    begun
}

/// The error of a call that the drain cut, with no message of its own checked.
fn is_cut(error: &serde_json::Value, id: &serde_json::Value) {
    assert_eq!(error["id"], *id, "{error}");
    assert_eq!(error["error"]["code"], 1503, "{error}");
    assert_eq!(error["error"]["data"]["reason"], "draining", "{error}");
    assert_eq!(error["error"]["data"]["outcome"], "unknown", "{error}");
}

fn is_cancelled_by_drain(line: &serde_json::Value) {
    assert_eq!((&line["outcome"], &line["cancelled_by"]), (&"cancelled".into(), &"drain".into()), "{line}");
    assert!(line["duration_ms"].as_f64().unwrap() > 0.0, "{line}");
}

fn listen() -> Post {
    let body = r#"{"jsonrpc":"2.0","id":"l","method":"subscriptions/listen","params":{"notifications":{}}}"#;
    Post::modern("subscriptions/listen", None, body)
}

#[test]
fn what_runs_may_finish_what_only_listens_ends_at_once_and_the_rest_is_cut_at_the_limit() {
    let finish = Gate::new();
    let finishing = finish.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.method() == "POST" && request.json()["id"] == 2 {
            reply.sse(&[]);
            finishing.pass();
            reply.event(&result(2));
            return reply.end();
        }
        script(request, reply);
    });
    let mut sidecar = sidecar(&upstream, "1500ms");
    let (get, listening) = (open(&sidecar, &Post::get()), open(&sidecar, &listen()));
    let brief = open(&sidecar, &call(2));
    let (endless, modern) = (open(&sidecar, &call(3)), open(&sidecar, &modern_call("\"m\"")));
    // Connections on which nothing is asked hold up no end.
    let (unused, http2) = (sidecar.client(), Node::connect(&sidecar.listen));
    let begun = begin(&sidecar);
    for stream in [&get, &listening] {
        // With its terminator, and without a word.
        let ended = stream.response();
        assert!(!ended.text().contains("error") && !ended.text().contains("\"result\""), "{}", ended.text());
    }
    assert!(begun.elapsed() < Duration::from_millis(1400), "{:?}", begun.elapsed());
    finish.open();
    assert!(brief.response().text().contains(&result(2)));
    for (node, id) in [(&endless, 3.into()), (&modern, "m".into())] {
        let cut = node.response();
        assert!(begun.elapsed() >= Duration::from_millis(1500));
        let events = sse::read(&cut.body).events;
        assert_eq!(events.len(), 2, "{}", cut.text());
        is_cut(&events[1].json(), &id);
        assert_eq!(events[1].json()["error"]["data"]["oz0/progress"]["progress"], 1);
    }
    assert!(sidecar.wait_exit().success());
    assert!(begun.elapsed() < LATE, "{:?}", begun.elapsed());
    unused.closed();
    drop(http2);
    (0..5).for_each(|number| drop(upstream.wait_closed(number)));
    let lines = sidecar.lines();
    assert_eq!(lines.len(), 5, "{lines:?}");
    let ok: Vec<_> = lines.iter().filter(|line| line["outcome"] == "ok").collect();
    assert_eq!((ok.len(), &ok[0]["id"]), (1, &2.into()));
    lines.iter().filter(|line| line["outcome"] != "ok").for_each(is_cancelled_by_drain);
    // The legacy server is told, before the process is gone; the modern one is not.
    let told: Vec<_> = upstream
        .requests()
        .into_iter()
        .filter(|one| one.method() == "POST" && one.json()["method"] == "notifications/cancelled")
        .collect();
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].json()["params"]["requestId"], 3);
    assert_eq!(told[0].head.field("mcp-session-id"), Some("sess-A"));
}

#[test]
fn before_a_head_the_cut_is_told_as_the_answer() {
    let upstream = Upstream::start(script);
    let mut sidecar = sidecar(&upstream, "300ms");
    let posts = [
        call(1),
        modern_call(2),
        Post::legacy(r#"[{"jsonrpc":"2.0","id":3,"method":"a"}]"#)
            .field("MCP-Protocol-Version", "2025-03-26"),
    ];
    let nodes: Vec<Client> = posts
        .iter()
        .enumerate()
        .map(|(number, post)| {
            let node = sidecar.client();
            node.send(&post.clone().field("X-Silent", "1"));
            upstream.wait_request(number);
            node
        })
        .collect();
    begin(&sidecar);
    is_cut(&nodes[0].response().json(), &1.into());
    is_cut(&nodes[1].response().json(), &2.into());
    is_cut(&nodes[2].response().json()[0], &3.into());
    assert!(sidecar.wait_exit().success());
    let lines = sidecar.lines();
    assert_eq!(lines.len(), 3);
    lines.iter().for_each(is_cancelled_by_drain);
}

/// What a request gets while the drain goes on.
fn during(sidecar: &Sidecar, post: &Post) -> Response {
    sidecar.client().ask(post)
}

#[test]
fn while_it_goes_on_what_is_new_is_turned_away_and_what_belongs_to_a_running_call_passes() {
    let upstream = Upstream::start(script);
    let mut sidecar = sidecar(&upstream, "4s");
    let running = open(&sidecar, &call(1));
    begin(&sidecar);
    assert_eq!(sidecar.admin("GET", "/healthz").status(), 200);
    assert_eq!(sidecar.admin("GET", "/readyz").status(), 503);
    let count = upstream.count();

    // New calls are busy, in the form of a busy upstream.
    for (post, id) in [(call(2), 2), (modern_call(3), 3)] {
        let busy = during(&sidecar, &post);
        assert_eq!((busy.status(), busy.head.field("retry-after")), (200, Some("1")), "{}", busy.text());
        let told = busy.json();
        assert_eq!((&told["id"], &told["result"]["isError"]), (&id.into(), &true.into()), "{told}");
        assert_eq!(told["result"]["_meta"]["oz0/retryable"], true);
        assert_eq!(told["result"]["_meta"]["oz0/retry_after"], 1);
        assert_eq!(busy.head.field("oz0-upstream-status"), None);
    }
    // Other new requests and streams get 503.
    let task = r#"{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"slow","task":{"ttl":1}}}"#;
    let turned_away = [
        Post::legacy(r#"{"jsonrpc":"2.0","id":4,"method":"tools/list"}"#),
        Post::new(r#"{"jsonrpc":"2.0","id":4,"method":"initialize","params":{}}"#),
        Post::legacy(task),
        listen(),
        Post::get(),
    ];
    for post in &turned_away {
        let answer = during(&sidecar, post);
        assert_eq!((answer.status(), answer.head.field("retry-after")), (503, Some("1")), "{post:?}");
        let line = sidecar.wait_line(|line| line["status"] == 503);
        assert_eq!((&line["outcome"], &line["reason"]), (&"refused".into(), &"draining".into()), "{line}");
    }
    assert_eq!(upstream.count(), count, "nothing of these was sent");

    // Responses, notifications, DELETE and resuming GETs pass.
    let pass = [
        Post::legacy(r#"{"jsonrpc":"2.0","id":"s","result":{}}"#),
        Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{}}"#),
        Post::delete(),
    ];
    for post in &pass {
        assert_eq!(during(&sidecar, post).status(), 202, "{post:?}");
    }
    let resuming = open(&sidecar, &Post::get().field("Last-Event-ID", "7"));
    assert_eq!(upstream.count(), count + 4);
    let cancel = support::mcp::cancel(1);
    assert_eq!(during(&sidecar, &cancel).status(), 202);
    running.response();

    // The resuming GET runs until the end of the drain, and then just ends.
    let ended = resuming.response();
    assert!(!ended.text().contains("error"), "{}", ended.text());
    assert!(sidecar.wait_exit().success());
}

#[test]
fn with_nothing_in_flight_it_is_over_at_once_and_idle_connections_are_closed() {
    let upstream = Upstream::json(result(1));
    let mut sidecar = sidecar(&upstream, "60s");
    let idle = sidecar.client();
    idle.ask(&call(1));
    let unused = sidecar.client();
    let begun = Instant::now();
    assert!(sidecar.terminate().success());
    assert!(begun.elapsed() < LATE, "{:?}", begun.elapsed());
    idle.closed();
    unused.closed();
    assert!(std::net::TcpStream::connect(&sidecar.listen).is_err());
}

#[test]
fn an_http2_node_is_told_too() {
    let upstream = Upstream::start(script);
    let mut sidecar = sidecar(&upstream, "300ms");
    let node = Node::connect(&sidecar.listen);
    let mut stream = node.send(&call(1));
    node.head(&mut stream);
    begin(&sidecar);
    let told = node.rest(&mut stream);
    is_cut(&sse::read(told.as_bytes()).events.last().unwrap().json(), &1.into());
    assert!(sidecar.wait_exit().success());
}

#[test]
fn a_drain_of_no_time_cuts_at_once() {
    let upstream = Upstream::start(script);
    let mut sidecar = sidecar(&upstream, "0");
    let node = open(&sidecar, &call(1));
    let begun = begin(&sidecar);
    is_cut(&sse::read(&node.response().body).events.last().unwrap().json(), &1.into());
    assert!(sidecar.wait_exit().success());
    assert!(begun.elapsed() < LATE);
}

#[test]
fn a_second_signal_ends_it_at_once_and_no_line_is_lost() {
    let upstream = Upstream::start(script);
    let mut sidecar = sidecar(&upstream, "60s");
    let nodes = [open(&sidecar, &call(1)), open(&sidecar, &modern_call(2))];
    let silent = sidecar.client();
    silent.send(&call(3).field("X-Silent", "1"));
    upstream.wait_request(2);
    begin(&sidecar);
    let again = Instant::now();
    sidecar.signal("TERM");
    sidecar.wait_exit();
    assert!(again.elapsed() < LATE, "{:?}", again.elapsed());
    for node in &nodes {
        node.closed();
    }
    let lines = sidecar.lines();
    assert_eq!(lines.len(), 3, "{lines:?}");
    lines.iter().for_each(is_cancelled_by_drain);
}

#[test]
fn a_node_that_does_not_read_holds_it_up_no_longer_than_its_limit() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        let filler = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/message","params":"{}"}}"#,
            "x".repeat(100_000)
        );
        while !reply.closed() {
            reply.event(&filler);
        }
    });
    let mut sidecar = sidecar(&upstream, "300ms");
    let node = Client::stalled(&sidecar.listen, Some(4096));
    node.send(&call(1));
    // Its queue is full.
    sidecar.wait_metric("mcp_sidecar_buffered_bytes", |bytes| bytes >= 800_000);
    let begun = begin(&sidecar);
    assert!(sidecar.wait_exit().success());
    assert!(begun.elapsed() < LATE, "{:?}", begun.elapsed());
    assert_eq!(sidecar.lines().len(), 1);
}
