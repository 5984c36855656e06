//! What a legacy server is told when its node hangs up or a clock runs out: `notifications/cancelled`, within bounds,
//! once, and never in modern.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{thread, time::Duration};

use support::{
    Client, Gate, Post, Request, Sidecar, Upstream,
    http2::Node,
    mcp::{call, modern_call, progress, result},
    upstream::Reply,
};
use tokio::time::Instant;

const CANCELLED: &str = "notifications/cancelled";

/// Far above what is at once, since the machine may be busy; below the grace of 2 s.
const AT_ONCE: Duration = Duration::from_millis(1500);

fn keyed(id: impl std::fmt::Display) -> Post {
    Post::legacy(format!(
        r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"slow","_meta":{{"oz0/idempotency_key":"k{}"}}}}}}"#,
        id.to_string().replace('"', "")
    ))
}

fn request(method: &str) -> Post {
    Post::legacy(format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{{"name":"slow","taskId":"t"}}}}"#
    ))
}

fn is_notice(request: &Request) -> bool {
    request.method() == "POST" && request.json()["method"] == CANCELLED
}

fn is_marker(request: &Request) -> bool {
    request.method() == "POST" && request.json()["method"] == "marker"
}

/// Answers markers and notices; begins a stream for a `GET` and whatever has an id, and leaves it there.
fn open_streams(request: &Request, reply: &mut Reply) {
    if is_marker(request) {
        return reply.json(200, &[], r#"{"jsonrpc":"2.0","id":"m","result":{}}"#);
    }
    if is_notice(request) {
        return reply.json(202, &[], "");
    }
    if request.head.field("x-silent").is_none() {
        reply.sse(&[]);
        reply.chunk(": open\n\n");
        if let Some(id) = request.head.field("x-event-id") {
            reply.chunk(format!("id: {id}\ndata: \n\n"));
        }
        if let Some(retry) = request.head.field("x-retry") {
            reply.chunk(format!("retry: {retry}\nid: r\ndata: \n\n"));
        }
    }
    reply.hang();
}

fn sidecar(upstream: &Upstream, more: &str) -> Sidecar {
    Sidecar::with_config(&format!("[upstreams.mcp]\nurl = \"{}\"\n{more}\n", upstream.url()))
}

fn notices(upstream: &Upstream) -> Vec<Request> {
    upstream.requests().into_iter().filter(is_notice).collect()
}

/// Two exchanges that come after whatever was to be sent at once.
fn later(sidecar: &Sidecar) {
    let marker = Post::legacy(r#"{"jsonrpc":"2.0","id":"m","method":"marker"}"#);
    for _ in 0..2 {
        assert_eq!(sidecar.client().ask(&marker).status(), 200);
    }
}

/// Opens the exchange, hangs up on it once the upstream has it (and the node a head, unless it is `silent`), and waits
/// until all is settled.
fn hang_up(sidecar: &Sidecar, upstream: &Upstream, post: &Post, silent: bool) {
    let before = upstream.count();
    let lines = sidecar.lines().len();
    let node = sidecar.client();
    node.send(&if silent { post.clone().field("X-Silent", "1") } else { post.clone() });
    upstream.wait_request(before);
    if !silent {
        node.head();
    }
    drop(node);
    sidecar.wait_lines(lines + 1);
    later(sidecar);
}

#[test]
fn who_is_told_by_setting() {
    let task = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","task":{"ttl":1},"_meta":{"oz0/idempotency_key":"k"}}}"#;
    let batch = r#"[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","_meta":{"oz0/idempotency_key":"k"}}}]"#;
    let initialize =
        r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}"#;
    // What is asked; who is told under `close`, `cancel` and `auto`.
    let table = [
        ("a call", call(1), [0, 1, 0]),
        ("a call with a key", keyed(1), [0, 1, 1]),
        ("another request", request("resources/read"), [0, 1, 0]),
        ("a prompt", request("prompts/get"), [0, 1, 0]),
        ("a call of the first revision", keyed(1).field("MCP-Protocol-Version", "2025-03-26"), [0, 1, 1]),
        ("a call without a version", keyed(1).without("MCP-Protocol-Version"), [0, 1, 1]),
        ("an unknown era", keyed(1).field("MCP-Protocol-Version", "draft"), [0, 0, 0]),
        ("a modern call", modern_call(1), [0, 0, 0]),
        ("initialize", Post::new(initialize), [0, 0, 0]),
        ("ping", request("ping"), [0, 0, 0]),
        ("tasks/get", request("tasks/get"), [0, 0, 0]),
        ("tasks/result", request("tasks/result"), [0, 0, 0]),
        ("tasks/cancel", request("tasks/cancel"), [0, 0, 0]),
        ("tasks/list", request("tasks/list"), [0, 0, 0]),
        ("params.task", Post::legacy(task), [0, 0, 0]),
        ("a batch", Post::legacy(batch).field("MCP-Protocol-Version", "2025-03-26"), [0, 0, 0]),
        ("GET", Post::get(), [0, 0, 0]),
    ];
    let settings = ["close", "cancel", "auto"];
    thread::scope(|scope| {
        for (column, setting) in settings.into_iter().enumerate() {
            let table = &table;
            scope.spawn(move || {
                let upstream = Upstream::start(open_streams);
                let sidecar = sidecar(&upstream, &format!("legacy_disconnect = \"{setting}\""));
                for (what, post, told) in table {
                    for silent in [true, false] {
                        if silent && post.method == "GET" {
                            continue;
                        }
                        let before = notices(&upstream).len();
                        hang_up(&sidecar, &upstream, post, silent);
                        if told[column] == 1 {
                            upstream.wait_requests(is_notice, before + 1);
                        }
                        assert_eq!(
                            notices(&upstream).len() - before,
                            told[column],
                            "{what} under {setting}, silent: {silent}"
                        );
                    }
                }
            });
        }
    });
}

#[test]
fn auto_is_the_default() {
    let upstream = Upstream::start(open_streams);
    let sidecar = sidecar(&upstream, "");
    hang_up(&sidecar, &upstream, &call(1), false);
    hang_up(&sidecar, &upstream, &keyed(2), false);
    assert_eq!(upstream.wait_request_where(is_notice).json()["params"]["requestId"], 2);
    assert_eq!(notices(&upstream).len(), 1);
}

#[test]
fn the_notice_speaks_for_its_request_and_comes_at_once() {
    let upstream = Upstream::start(open_streams);
    let sidecar = sidecar(&upstream, "");
    for (number, id) in ["1", "-7.50", "\"\\u0061\\/b\"", "12345678901234567890"].into_iter().enumerate() {
        let node = sidecar.client();
        node.send(
            &keyed(id).field("Authorization", "Bearer of-the-node").field("X-Team", "a").at("/mcp?q=%2F"),
        );
        node.head();
        let left = Instant::now();
        drop(node);
        upstream.wait_requests(is_notice, number + 1);
        assert!(left.elapsed() < AT_ONCE);
        let notice = notices(&upstream).pop().unwrap();
        let body = String::from_utf8(notice.body.clone()).unwrap();
        assert!(body.contains(&format!("\"requestId\":{id}")), "the id's own bytes: {body}");
        assert_eq!(notice.json()["jsonrpc"], "2.0");
        assert_eq!(notice.json().get("id"), None);
        assert!(notice.head.line.starts_with("POST /mcp"), "{}", notice.head.line);
        let expected = [
            ("mcp-session-id", "sess-A"),
            ("mcp-protocol-version", "2025-11-25"),
            ("authorization", "Bearer of-the-node"),
            ("content-type", "application/json"),
        ];
        for (name, value) in expected {
            assert_eq!(notice.head.all(name), [value], "{name}");
        }
        assert_eq!(notice.head.field("host"), Some(upstream.address.as_str()));
        assert_eq!(notice.head.all("content-length"), [notice.body.len().to_string()]);
    }
}

#[test]
fn an_upstream_s_own_credential_and_headers_are_the_notice_s_too() {
    let upstream = Upstream::start(open_streams);
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("token");
    std::fs::write(&secret, "own").unwrap();
    let more =
        format!("headers = {{ \"X-Team\" = \"agents\" }}\nbearer = {{ file = \"{}\" }}", secret.display());
    let sidecar = sidecar(&upstream, &more);
    hang_up(&sidecar, &upstream, &keyed(1).field("Authorization", "Bearer node"), false);
    let notice = upstream.wait_request_where(is_notice);
    assert_eq!(notice.head.all("authorization"), ["Bearer own"]);
    assert_eq!(notice.head.all("x-team"), ["agents"]);
}

#[test]
fn an_http2_node_that_resets_one_stream_is_told_for_too() {
    let upstream = Upstream::start(open_streams);
    let sidecar = sidecar(&upstream, "");
    let node = Node::connect(&sidecar.listen);
    let mut stream = node.send(&keyed(1));
    node.head(&mut stream);
    node.reset(stream);
    upstream.wait_request_where(is_notice);
}

#[test]
fn where_events_had_ids_the_notice_waits_for_a_get_that_resumes() {
    // Each of these nodes hangs up at the same time; a GET then comes for some.
    let upstream = Upstream::start(open_streams);
    let sidecar = sidecar(&upstream, "");
    let leave = |id: &str, event: &str| {
        let node = sidecar.client();
        node.send(&keyed(format!("\"{id}\"")).field("X-Event-Id", event));
        node.body(|bytes| bytes.ends_with(b"data: \n\n"));
        node
    };
    let nodes: Vec<(&str, Client)> =
        [("resumed", "e1"), ("gone", "e2"), ("other-event", "e3"), ("other-session", "e4"), ("early", "e5")]
            .map(|(id, event)| (id, leave(id, event)))
            .into();
    let resume = |event: &str, session: &str| {
        let get = sidecar.client();
        get.send(&Post::get().field("Last-Event-ID", event).field("Mcp-Session-Id", session));
        get.head();
        get
    };
    // It may come before its node's hang-up.
    let early = resume("e5", "sess-A");
    let left = Instant::now();
    drop(nodes);
    sidecar.wait_lines(5);
    let gets = [resume("e1", "sess-A"), resume("e33", "sess-A"), resume("e4", "sess-B")];
    upstream.wait_requests(is_notice, 3);
    assert!(left.elapsed() >= Duration::from_secs(2), "the grace is at least 2 s: {:?}", left.elapsed());
    thread::sleep(Duration::from_millis(700));
    let mut told: Vec<String> = notices(&upstream)
        .iter()
        .map(|one| one.json()["params"]["requestId"].as_str().unwrap().to_owned())
        .collect();
    told.sort();
    assert_eq!(told, ["gone", "other-event", "other-session"]);
    drop((gets, early));
}

#[test]
fn the_grace_is_as_long_as_the_last_retry_and_as_cancel_grace() {
    thread::scope(|scope| {
        for (retry, grace) in [(Some("2700"), "2s"), (None, "2700ms")] {
            scope.spawn(move || {
                let upstream = Upstream::start(open_streams);
                let sidecar = sidecar(&upstream, &format!("cancel_grace = \"{grace}\""));
                let node = sidecar.client();
                let post = keyed(1).field("X-Event-Id", "e1");
                node.send(&match retry {
                    Some(retry) => post.field("X-Retry", retry),
                    None => post,
                });
                node.body(|bytes| {
                    bytes.ends_with(if retry.is_some() {
                        b"id: r\ndata: \n\n"
                    } else {
                        b"id: e1\ndata: \n\n"
                    })
                });
                let left = Instant::now();
                drop(node);
                upstream.wait_request_where(is_notice);
                assert!(left.elapsed() >= Duration::from_millis(2700), "{:?}", left.elapsed());
            });
        }
    });
}

#[test]
fn notices_that_wait_hold_up_no_other() {
    let upstream = Upstream::start(open_streams);
    let sidecar = sidecar(&upstream, "cancel_grace = \"1h\"");
    for number in 0..70 {
        let node = sidecar.client();
        node.send(&keyed(number).field("X-Event-Id", &format!("e{number}")));
        node.body(|bytes| bytes.ends_with(b"data: \n\n"));
    }
    sidecar.wait_lines(70);
    hang_up(&sidecar, &upstream, &keyed(99), false);
    assert_eq!(upstream.wait_request_where(is_notice).json()["params"]["requestId"], 99);
}

#[test]
fn a_call_that_is_over_is_told_to_nobody() {
    let upstream = Upstream::start(|request, reply| {
        if is_marker(request) || is_notice(request) {
            return open_streams(request, reply);
        }
        let id = request.json()["id"].clone();
        match request.head.field("x-way").unwrap() {
            // The answer was relayed; the last chunk has not come.
            "answered" => {
                reply.sse(&[]);
                reply.event(&result(&id));
                reply.hang();
            }
            // The upstream ended its stream so that the node comes again.
            "ended" => {
                reply.sse(&[]);
                reply.chunk("id: 1\nretry: 10\ndata: \n\n");
                reply.end();
            }
            "json" => reply.json(200, &[], &result(&id)),
            // Complete in the sidecar, and on its way to a node that does not read.
            _ => {
                reply.sse(&[("Connection", "close")]);
                let filler = format!(
                    r#"{{"jsonrpc":"2.0","method":"notifications/message","params":"{}"}}"#,
                    "x".repeat(200_000)
                );
                (0..30).for_each(|_| reply.event(&filler));
                reply.event(&result(&id));
                reply.end();
            }
        }
    });
    let sidecar = sidecar(
        &upstream,
        "legacy_disconnect = \"cancel\"\n[upstreams.mcp.progress]\nqueue_bytes = \"16MiB\"",
    );
    for (number, way) in ["answered", "ended", "json"].into_iter().enumerate() {
        let node = sidecar.client();
        node.send(&keyed(number).field("X-Way", way));
        node.body(|bytes| bytes.windows(4).any(|w| w == b"data" || w == b"json"));
        drop(node);
        sidecar.wait_line(|line| line["id"] == number);
        later(&sidecar);
    }
    let node = Client::stalled(&sidecar.listen, Some(4096));
    node.send(&keyed(4).field("X-Way", "slow"));
    let slow = upstream.wait_request_where(|request| request.head.field("x-way") == Some("slow"));
    upstream.wait_closed(slow.connection);
    drop(node);
    sidecar.wait_line(|line| line["id"] == 4);
    later(&sidecar);
    assert_eq!(notices(&upstream).len(), 0);
}

/// Every request that a clock ends, and how many notices that makes.
fn timed() -> Vec<(&'static str, Post, usize)> {
    let task = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","task":{"ttl":1}}}"#;
    let batch = r#"[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow"}}]"#;
    let initialize =
        r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}"#;
    vec![
        ("a call", call(1), 1),
        ("a call with ids", call(1).field("X-Event-Id", "e1"), 1),
        ("another request", request("resources/read"), 1),
        ("a modern call", modern_call(1), 0),
        ("initialize", Post::new(initialize), 0),
        ("params.task", Post::legacy(task), 0),
        ("a batch", Post::legacy(batch).field("MCP-Protocol-Version", "2025-03-26"), 0),
        ("an unknown era", call(1).field("MCP-Protocol-Version", "draft"), 0),
    ]
}

#[test]
fn a_clock_tells_a_legacy_server_once_whatever_a_hang_up_would() {
    thread::scope(|scope| {
        for clock in ["idle_timeout", "max_timeout"] {
            scope.spawn(move || {
                let upstream = Upstream::start(open_streams);
                let sidecar =
                    sidecar(&upstream, &format!("{clock} = \"300ms\"\nlegacy_disconnect = \"close\""));
                for (what, post, told) in timed() {
                    for silent in [true, false] {
                        let before = notices(&upstream).len();
                        let node = sidecar.client();
                        let post = if silent { post.clone().field("X-Silent", "1") } else { post.clone() };
                        let answer = node.ask(&post);
                        assert!(
                            answer.text().contains(&format!("\"reason\":\"{clock}\"")),
                            "{what}: {}",
                            answer.text()
                        );
                        drop(node);
                        later(&sidecar);
                        if told == 1 {
                            upstream.wait_requests(is_notice, before + 1);
                        }
                        assert_eq!(
                            notices(&upstream).len() - before,
                            told,
                            "{what}, {clock}, silent: {silent}"
                        );
                    }
                }
                let answered = notices(&upstream).pop().unwrap();
                assert_eq!(answered.head.field("mcp-session-id"), Some("sess-A"));
            });
        }
    });
}

#[test]
fn progress_of_a_call_that_nobody_cancels_makes_no_notice() {
    let go = Gate::new();
    let on = go.clone();
    let upstream = Upstream::start(move |request, reply| {
        if is_marker(request) || is_notice(request) {
            return open_streams(request, reply);
        }
        reply.sse(&[]);
        reply.event(&progress(1, 1));
        on.pass();
        reply.event(&result(1));
        reply.end();
    });
    let sidecar = sidecar(&upstream, "legacy_disconnect = \"cancel\"");
    let node = sidecar.client();
    node.send(&keyed(1));
    node.events(1);
    go.open();
    node.response();
    drop(node);
    later(&sidecar);
    assert_eq!(notices(&upstream).len(), 0);
}
