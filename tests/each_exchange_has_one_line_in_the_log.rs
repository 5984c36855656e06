//! The access log: one line per exchange, written when it ends, whatever its end; which fields are there and which are
//! not; nothing in a line that forges another one; and a slow reader of stdout that blocks nobody.
//!
//! `no_secret_reaches_a_log.rs`.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::Read,
    process::Command,
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use support::{
    Client, Gate, Post, Process, Sidecar, Upstream, Watched,
    mcp::{LEGACY, MODERN, call, cancel, modern_call, progress, result},
};
use tempfile::TempDir;

/// There in every line.
const ALWAYS: [&str; 9] =
    ["ts", "request", "peer", "http_method", "path", "outcome", "duration_ms", "http", "bytes_out"];
/// There in addition once it is known which upstream is asked.
const ASKED: [&str; 3] = ["upstream", "bytes_in", "status"];
/// There in addition once an upstream has answered.
const ANSWERED: [&str; 5] = ["upstream_status", "upstream_http", "reused", "first_byte_ms", "trace"];
/// There in addition for a JSON-RPC request.
const REQUEST: [&str; 4] = ["era", "protocol", "rpc", "id"];
/// There in addition for an event stream.
const STREAM: [&str; 7] = [
    "stream",
    "events",
    "keepalives",
    "progress_in",
    "progress_out",
    "progress_coalesced",
    "progress_dropped",
];

/// The line has these fields and no others; but for `connect_ms`, which every first exchange of a connection has.
#[track_caller]
fn fields(line: &Value, groups: &[&[&str]]) {
    let expected: BTreeSet<&str> = groups.iter().flat_map(|group| group.iter().copied()).collect();
    let mut there: BTreeSet<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
    let connected = there.remove("connect_ms");
    if line["reused"] == json!(true) {
        assert!(!connected, "nothing was connected: {line}");
    }
    assert_eq!(there, expected, "{line}");
}

#[track_caller]
fn says(line: &Value, expected: &[(&str, Value)]) {
    for (name, value) in expected {
        assert_eq!(&line[name], value, "{name} in {line}");
    }
}

fn tool(name: &str) -> Post {
    let mut post = call(1);
    post.body = String::from_utf8(post.body).unwrap().replace("slow", name).into_bytes();
    post
}

/// One exchange with an upstream of this script, to its end; gives its line, and checks that it is the only one.
fn line(post: &Post, script: impl Fn(&mut support::upstream::Reply) + Send + Sync + 'static) -> Value {
    line_under("", post, script)
}

fn line_under(
    settings: &str,
    post: &Post,
    script: impl Fn(&mut support::upstream::Reply) + Send + Sync + 'static,
) -> Value {
    let upstream = Upstream::start(move |_, reply| script(reply));
    let mut sidecar =
        Sidecar::with_config(&format!("[upstreams.up]\nurl = \"{}\"\n{settings}", upstream.url()));
    let client = sidecar.client();
    client.send(&post.clone().at("/up?query=1"));
    client.response();
    sidecar.wait_lines(1);
    assert!(sidecar.terminate().success());
    let lines = sidecar.lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    lines[0].clone()
}

#[test]
fn a_call_that_is_answered_with_json() {
    let post = call(1)
        .field("X-Request-Id", "abc-123")
        .field("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    let line = line(&post, |reply| reply.json(200, &[], &result(1)));
    fields(&line, &[&ALWAYS, &ASKED, &ANSWERED, &REQUEST, &["tool", "retry_class", "session", "stream"]]);
    says(
        &line,
        &[
            ("request", json!("abc-123")),
            ("upstream", json!("up")),
            ("http_method", json!("POST")),
            ("path", json!("/up")),
            ("era", json!("legacy")),
            ("protocol", json!(LEGACY)),
            ("rpc", json!("tools/call")),
            ("id", json!(1)),
            ("tool", json!("slow")),
            // The first 8 hex digits of the SHA-256 of `sess-A`.
            ("session", json!("d153a3a4")),
            ("status", json!(200)),
            ("upstream_status", json!(200)),
            ("outcome", json!("ok")),
            ("stream", json!("json")),
            ("bytes_in", json!(post.body.len())),
            ("bytes_out", json!(result(1).len())),
            ("reused", json!(false)),
            ("http", json!("1.1")),
            ("upstream_http", json!("1.1")),
            ("trace", json!("0af7651916cd43dd8448eb211c80319c")),
        ],
    );
    assert!(line["connect_ms"].is_number(), "{line}");
    let ts = line["ts"].as_str().unwrap();
    assert!(
        ts.len() == 24 && ts.ends_with('Z') && ts.as_bytes()[10] == b'T' && ts.as_bytes()[19] == b'.',
        "{ts}"
    );
    let ms = |name: &str| line[name].as_f64().unwrap();
    assert!(ms("connect_ms") <= ms("first_byte_ms") && ms("first_byte_ms") <= ms("duration_ms"), "{line}");
    assert!(line["peer"].as_str().unwrap().starts_with("127.0.0.1:"), "{line}");
}

#[test]
fn a_call_that_is_answered_with_a_stream() {
    let line = line(&call("\"x\""), |reply| {
        reply.sse(&[]);
        for n in 1..=3 {
            reply.event(
                &progress("\"x\"", n)
                    .replace(&format!("\"progress\":{n}"), &format!("\"progress\":{n},\"total\":4")),
            );
        }
        reply.event(&result("\"x\""));
        reply.end();
    });
    fields(
        &line,
        &[
            &ALWAYS,
            &ASKED,
            &ANSWERED,
            &REQUEST,
            &STREAM,
            &["tool", "retry_class", "session", "progress", "total"],
        ],
    );
    says(
        &line,
        &[
            ("id", json!("x")),
            ("outcome", json!("ok")),
            ("stream", json!("sse")),
            ("events", json!(4)),
            ("progress_in", json!(3)),
            ("progress_out", json!(3)),
            ("progress_coalesced", json!(0)),
            ("progress_dropped", json!(0)),
            ("keepalives", json!(0)),
            ("progress", json!(3)),
            ("total", json!(4)),
        ],
    );
}

#[test]
fn a_modern_call_has_no_session_and_the_client_of_its_meta() {
    let body = String::from_utf8(modern_call(7).body).unwrap();
    let body = body.replace(
        "\"_meta\":{",
        "\"_meta\":{\"io.modelcontextprotocol/clientInfo\":{\"name\":\"agent\",\"version\":\"2.1\"},",
    );
    let line =
        line(&Post::modern("tools/call", Some("slow"), body), |reply| reply.json(200, &[], &result(7)));
    fields(&line, &[&ALWAYS, &ASKED, &ANSWERED, &REQUEST, &["tool", "retry_class", "client", "stream"]]);
    says(&line, &[("era", json!("modern")), ("protocol", json!(MODERN)), ("client", json!("agent/2.1"))]);
}

#[test]
fn a_request_that_is_no_call_has_no_tool() {
    let list = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"name":"no tool"}}"#;
    let line = line(&Post::legacy(list), |reply| {
        reply.json(200, &[], r#"{"jsonrpc":"2.0","id":1,"result":{"tools":[]}}"#)
    });
    fields(&line, &[&ALWAYS, &ASKED, &ANSWERED, &REQUEST, &["session", "stream"]]);
    assert_eq!(line["rpc"], "tools/list");
}

#[test]
fn notifications_responses_and_batches_have_no_id_or_method_that_they_do_not_have() {
    let accepted = |reply: &mut support::upstream::Reply| reply.json(202, &[], "");
    let told = line(&Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#), accepted);
    fields(&told, &[&ALWAYS, &ASKED, &ANSWERED, &["era", "protocol", "rpc", "session"]]);
    says(&told, &[("status", json!(202)), ("outcome", json!("ok")), ("bytes_out", json!(0))]);
    let told = line(&Post::legacy(r#"{"jsonrpc":"2.0","id":"e-1","result":{}}"#), accepted);
    fields(&told, &[&ALWAYS, &ASKED, &ANSWERED, &["era", "protocol", "id", "session"]]);
    let batch = format!("[{}]", String::from_utf8(call(1).body).unwrap());
    let batch = Post::legacy(batch).field("MCP-Protocol-Version", "2025-03-26");
    let told = line(&batch, |reply| reply.json(200, &[], &format!("[{}]", result(1))));
    fields(&told, &[&ALWAYS, &ASKED, &ANSWERED, &["era", "protocol", "session", "stream"]]);
}

#[test]
fn get_and_delete_have_the_session_and_the_revision_that_their_headers_name() {
    let told = line(&Post::get(), |reply| {
        reply.sse(&[]);
        reply.event(r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#);
        reply.end();
    });
    fields(&told, &[&ALWAYS, &ASKED, &ANSWERED, &STREAM, &["era", "protocol", "session"]]);
    says(
        &told,
        &[
            ("http_method", json!("GET")),
            ("protocol", json!(LEGACY)),
            ("session", json!("d153a3a4")),
            ("events", json!(1)),
            ("outcome", json!("ok")),
        ],
    );
    let told = line(&Post::delete(), |reply| reply.json(204, &[], ""));
    fields(&told, &[&ALWAYS, &ASKED, &ANSWERED, &["era", "protocol", "session"]]);
    let bare = Post::get().without("MCP-Protocol-Version").without("Mcp-Session-Id");
    let told = line(&bare, |reply| reply.json(405, &[("Allow", "POST")], ""));
    fields(&told, &[&ALWAYS, &ASKED, &ANSWERED]);
    says(&told, &[("status", json!(405)), ("outcome", json!("rpc_error"))]);
}

#[test]
fn the_client_and_the_session_of_a_legacy_call_are_those_of_its_initialize() {
    for sse in [false, true] {
        let opened =
            r#"{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-06-18","capabilities":{}}}"#;
        let upstream = Upstream::start(move |request, reply| match (request.method(), request.number) {
            ("DELETE", _) => reply.json(200, &[], ""),
            (_, 0) if sse => {
                reply.sse(&[("Mcp-Session-Id", "sess-A")]);
                reply.event(opened);
                reply.end();
            }
            (_, 0) => reply.json(200, &[("Mcp-Session-Id", "sess-A")], opened),
            _ => reply.json(200, &[], &result(1)),
        });
        let sidecar = Sidecar::before(&upstream);
        let client = sidecar.client();
        let body = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","clientInfo":{"name":"agent","version":"1.2"}}}"#;
        let posts = [
            Post::new(body),
            call(1).field("MCP-Protocol-Version", "2025-06-18"),
            Post::delete().field("MCP-Protocol-Version", "2025-06-18"),
            call(1),
        ];
        for (number, post) in posts.into_iter().enumerate() {
            client.ask(&post.field("X-Request-Id", &number.to_string()));
        }
        // The line of a stream may come behind that of the next exchange.
        let mut lines = sidecar.wait_lines(4);
        lines.sort_by_key(|line| line["request"].to_string());
        for line in &lines {
            assert_eq!(line["session"], "d153a3a4", "sse {sse}: {line}");
        }
        for line in &lines[..3] {
            assert_eq!(line["client"], "agent/1.2", "sse {sse}: {line}");
        }
        says(&lines[0], &[("rpc", json!("initialize")), ("protocol", json!("2025-11-25"))]);
        says(&lines[1], &[("protocol", json!("2025-06-18"))]);
        assert!(lines[3].get("client").is_none(), "the session was deleted: {}", lines[3]);
    }
}

#[test]
fn what_the_upstream_answers_and_what_the_node_gets_are_told_apart() {
    let told = line(&tool("t"), |reply| reply.json(429, &[("Retry-After", "7")], "{}"));
    fields(
        &told,
        &[&ALWAYS, &ASKED, &ANSWERED, &REQUEST, &["tool", "retry_class", "session", "stream", "retry_after"]],
    );
    says(
        &told,
        &[
            ("outcome", json!("busy")),
            ("status", json!(200)),
            ("upstream_status", json!(429)),
            ("retry_after", json!(7)),
        ],
    );
    let told = line(&tool("t"), |reply| reply.json(429, &[], "{}"));
    fields(&told, &[&ALWAYS, &ASKED, &ANSWERED, &REQUEST, &["tool", "retry_class", "session", "stream"]]);
    let error = r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"isError":true}}"#;
    let told = line(&tool("t"), move |reply| reply.json(200, &[], error));
    says(&told, &[("outcome", json!("tool_error")), ("status", json!(200)), ("upstream_status", json!(200))]);
    let told = line(&tool("t"), move |reply| {
        reply.sse(&[]);
        reply.event(error);
        reply.end();
    });
    says(&told, &[("outcome", json!("tool_error")), ("stream", json!("sse")), ("events", json!(1))]);
    let told = line(&tool("t"), |reply| {
        reply.json(200, &[], r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"no"}}"#);
    });
    says(&told, &[("outcome", json!("rpc_error")), ("status", json!(200))]);
    for status in [400, 401, 403, 404, 500, 503] {
        let told = line(&tool("t"), move |reply| reply.json(status, &[], "{}"));
        fields(&told, &[&ALWAYS, &ASKED, &ANSWERED, &REQUEST, &["tool", "retry_class", "session"]]);
        says(
            &told,
            &[("outcome", json!("rpc_error")), ("status", json!(status)), ("upstream_status", json!(status))],
        );
    }
}

#[test]
fn what_broke_off_is_failed_with_its_reason_and_what_had_come() {
    let told = line(&tool("t"), |reply| {
        reply.sse(&[]);
        reply.event(&progress(1, 2));
        reply.break_off();
    });
    fields(
        &told,
        &[
            &ALWAYS,
            &ASKED,
            &ANSWERED,
            &REQUEST,
            &STREAM,
            &["tool", "retry_class", "session", "reason", "error", "progress"],
        ],
    );
    says(
        &told,
        &[
            ("outcome", json!("failed")),
            ("reason", json!("upstream_failed")),
            ("status", json!(200)),
            ("upstream_status", json!(200)),
            ("progress_in", json!(1)),
            ("progress", json!(2)),
        ],
    );
    let told = line(&tool("t"), |reply| reply.break_off());
    says(
        &told,
        &[("outcome", json!("failed")), ("reason", json!("upstream_failed")), ("status", json!(200))],
    );
    assert!(told.get("upstream_status").is_none() && told.get("first_byte_ms").is_none(), "{told}");

    let sidecar = Sidecar::with_flags(&["--upstream", "http://127.0.0.1:1/mcp"]);
    sidecar.client().ask(&tool("t"));
    sidecar.client().ask(&Post::delete());
    let lines = sidecar.wait_lines(2);
    fields(
        &lines[0],
        &[
            &ALWAYS,
            &ASKED,
            &REQUEST,
            &["tool", "retry_class", "session", "stream", "trace", "reason", "error"],
        ],
    );
    says(
        &lines[0],
        &[("outcome", json!("failed")), ("reason", json!("upstream_unreachable")), ("status", json!(200))],
    );
    says(
        &lines[1],
        &[("outcome", json!("failed")), ("reason", json!("upstream_unreachable")), ("status", json!(502))],
    );
}

#[test]
fn clocks_that_run_out_are_outcomes_of_their_own() {
    for (settings, outcome) in
        [("idle_timeout = \"300ms\"", "idle_timeout"), ("max_timeout = \"300ms\"", "max_timeout")]
    {
        let told = line_under(settings, &tool("t"), |reply| reply.hang());
        fields(
            &told,
            &[
                &ALWAYS,
                &ASKED,
                &REQUEST,
                &[
                    "tool",
                    "retry_class",
                    "session",
                    "stream",
                    "trace",
                    "reason",
                    "error",
                    "reused",
                    "upstream_http",
                ],
            ],
        );
        says(&told, &[("outcome", json!(outcome)), ("reason", json!(outcome)), ("status", json!(200))]);
        let duration = told["duration_ms"].as_f64().unwrap();
        assert!((300.0..5000.0).contains(&duration), "written at its end: {told}");
    }
}

#[test]
fn a_node_that_leaves_is_cancelled_by_disconnect() {
    let upstream = Upstream::start(|request, reply| {
        if request.number == 1 {
            reply.sse(&[]);
            reply.event(&progress(1, 1));
        }
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    // Before the upstream's head came, and amid its stream.
    for number in 0..2 {
        let client: Client = sidecar.client();
        client.send(&call(1));
        upstream.wait_request(number);
        if number == 1 {
            client.events(1);
        }
        client.close();
        let line = sidecar.wait_lines(number + 1)[number].clone();
        says(
            &line,
            &[
                ("outcome", json!("cancelled")),
                ("cancelled_by", json!("disconnect")),
                ("tool", json!("slow")),
            ],
        );
        assert!(line["cancel_ms"].is_number(), "{line}");
        assert!(line.get("reason").is_none() && line.get("error").is_none(), "{line}");
        assert_eq!(line.get("upstream_status").is_some(), number == 1, "{line}");
    }
}

#[test]
fn a_cancelled_call_names_who_cancelled_and_how_long_it_took() {
    let upstream = Upstream::start(|request, reply| {
        if request.json()["method"] == "notifications/cancelled" {
            reply.json(202, &[], "");
        } else {
            reply.sse(&[]);
            reply.hang();
        }
    });
    let sidecar = Sidecar::before(&upstream);
    let (calling, cancelling) = (sidecar.client(), sidecar.client());
    calling.send(&call(1));
    calling.head();
    assert_eq!(cancelling.ask(&cancel(1)).status(), 202);
    calling.response();
    let line = sidecar.wait_line(|line| line["tool"] == "slow");
    says(
        &line,
        &[("outcome", json!("cancelled")), ("cancelled_by", json!("notification")), ("events", json!(0))],
    );
    assert!(line["cancel_ms"].as_f64().unwrap() <= line["duration_ms"].as_f64().unwrap(), "{line}");
    let line = sidecar.wait_line(|line| line["rpc"] == "notifications/cancelled");
    says(&line, &[("outcome", json!("ok")), ("status", json!(202))]);
    assert_eq!(sidecar.wait_lines(2).len(), 2);
}

#[test]
fn a_refusal_has_what_was_known_when_it_was_refused() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    let refused = ["status", "error"];
    for (post, status, more) in [
        (call(1).at("/other"), 404, &[][..]),
        (call(1).field("Origin", "http://evil.example"), 403, &[]),
        (call(1).field("Content-Type", "text/plain"), 415, &[]),
        (Post::legacy("{"), 400, &["upstream", "bytes_in"]),
        (
            modern_call(1).without("Mcp-Name"),
            400,
            &["upstream", "bytes_in", "era", "protocol", "rpc", "id", "tool"],
        ),
    ] {
        let number = sidecar.lines().len();
        let response = sidecar.client().ask(&post);
        assert_eq!(response.status(), status);
        let line = sidecar.wait_lines(number + 1)[number].clone();
        // Which upstream a refused path would have meant, and how much of its body had come, may be told or not.
        let mut bare = line.clone();
        for name in ["upstream", "bytes_in"] {
            if !more.contains(&name) {
                bare.as_object_mut().unwrap().remove(name);
            }
        }
        fields(&bare, &[&ALWAYS, &refused, more]);
        says(
            &line,
            &[
                ("outcome", json!("refused")),
                ("status", json!(status)),
                ("bytes_out", json!(response.body.len())),
            ],
        );
    }
    drop(client);
}

#[test]
fn the_request_id_is_the_nodes_or_made_and_goes_both_ways() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let longest = "x".repeat(128);
    let mut seen = BTreeSet::new();
    for (number, given) in
        [Some("abc-1"), Some(longest.as_str()), None, None, Some("has space"), Some("\u{e9}"), Some("")]
            .into_iter()
            .enumerate()
    {
        let post = given.iter().fold(call(1), |post, id| post.field("X-Request-Id", id));
        let answered = sidecar.client().ask(&post).head.all("x-request-id").join("|");
        assert_eq!(upstream.wait_request(number).head.all("x-request-id"), [&answered]);
        assert_eq!(sidecar.wait_lines(number + 1)[number]["request"], answered);
        if number < 2 {
            assert_eq!(Some(answered.as_str()), given);
        }
        assert!(!answered.is_empty() && answered.bytes().all(|byte| byte.is_ascii_graphic()), "{answered}");
        assert!(seen.insert(answered), "each its own");
    }
    let refused = sidecar.client().ask(&call(1).at("/other").field("X-Request-Id", "abc-2"));
    assert_eq!(refused.head.field("x-request-id"), Some("abc-2"), "of a refusal too");
}

#[test]
fn a_kept_connection_is_reused_and_each_exchange_has_its_own_line() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    for _ in 0..3 {
        client.ask(&call(1));
    }
    let lines = sidecar.wait_lines(3);
    let reused: Vec<_> = lines.iter().map(|line| line["reused"].as_bool().unwrap()).collect();
    assert_eq!(reused, [false, true, true]);
    let traces: BTreeSet<_> = lines.iter().map(|line| line["trace"].to_string()).collect();
    assert_eq!(traces.len(), 3, "a trace is made where the node names none");
}

/// A value that looks like the end of a line and the begin of another stays a value; long ones are cut at 255 bytes.
#[test]
fn nothing_in_a_request_forges_a_line_or_makes_one_long() {
    let name = "a\\nb\\u001b[31m\\u0085\\u2028\\r\\t\\u0000{\\\"outcome\\\":\\\"ok\\\"}";
    let long = "é".repeat(3000);
    let session = "s".repeat(4096);
    let bodies = [
        format!(r#"{{"jsonrpc":"2.0","id":"{name}","method":"tools/call","params":{{"name":"{name}"}}}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":"{long}","method":"tools/call","params":{{"name":"{long}"}}}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":{},"method":"{name}"}}"#, "7".repeat(3000)),
        r#"{"jsonrpc":"2.0","id":"\ud800","method":"tools/call","params":{"name":"\ud800"}}"#.to_owned(),
        r#"{"jsonrpc":"2.0","id":1e999,"method":"ping"}"#.to_owned(),
    ];
    let upstream = Upstream::json(result(1));
    let mut sidecar = Sidecar::before(&upstream);
    for (number, body) in bodies.iter().enumerate() {
        let mut bytes = Post::legacy(body.clone())
            .field("Mcp-Session-Id", &session)
            .field("MCP-Protocol-Version", "2025-11-25")
            .at(&format!("/mcp/?{}", "q".repeat(3000)))
            .bytes(&sidecar.listen);
        // Bytes beyond ASCII in a header, as they are.
        let at = bytes.windows(8).position(|w| w == b"Accept: ").unwrap();
        bytes.splice(at..at, b"User-Agent: \x80\xff\r\n".iter().copied());
        let client = sidecar.client();
        client.write(&bytes);
        client.response();
        let seen = upstream.wait_request(number);
        assert_eq!(seen.body, body.as_bytes(), "the upstream gets what was sent");
        let connection = &upstream.connections()[seen.connection].bytes;
        assert!(
            connection.windows(14).any(|w| w.eq_ignore_ascii_case(b"user-agent: \x80\xff")),
            "{connection:?}"
        );
    }
    let missing = format!("/{}", "p".repeat(3000));
    sidecar.client().ask(&call(1).at(&missing));
    assert!(sidecar.terminate().success());
    let lines = sidecar.lines();
    assert_eq!(lines.len(), bodies.len() + 1);
    assert_eq!(lines[0]["tool"].as_str().unwrap(), "a\nb\u{1b}[31m\u{85}\u{2028}\r\t\0{\"outcome\":\"ok\"}");
    assert_eq!(lines[1]["tool"].as_str().unwrap(), &long[..254]);
    // What readers of JSON refuse is shown as the text it was.
    assert_eq!((&lines[3]["id"], &lines[4]["id"]), (&json!("\"\\ud800\""), &json!("1e999")));
    for line in &lines {
        for (name, value) in line.as_object().unwrap() {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            assert!(text.len() <= 255, "{name}: {text}");
        }
    }
}

/// Not even a terminal is fooled: whatever would move its cursor is escaped.
#[test]
fn a_line_holds_no_control_character() {
    for format in ["json", "text"] {
        let upstream = Upstream::json(result(1));
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("sidecar.toml");
        fs::write(
            &file,
            format!(
                "[log]\nformat = \"{format}\"\naccess = \"access.log\"\n[upstreams.mcp]\nurl = \"{}\"\n",
                upstream.url()
            ),
        )
        .unwrap();
        let log = folder.path().join("access.log");
        let mut command = Sidecar::command(&folder);
        command.arg("--config").arg(&file);
        let mut sidecar = Sidecar::spawn(command, folder);
        let body = r#"{"jsonrpc":"2.0","id":"\u001b]0;x\u0007","method":"tools/call","params":{"name":"a\n2026 ok\u009b31m\u2028"}}"#;
        sidecar.client().ask(&Post::legacy(body));
        assert!(sidecar.terminate().success());
        let text = fs::read_to_string(log).unwrap();
        assert_eq!(text.lines().count(), 1, "{format}: {text:?}");
        let controls: Vec<_> =
            text.trim_end_matches('\n').chars().filter(|c| c.is_control() || *c == '\u{2028}').collect();
        assert!(controls.is_empty(), "{format}: {controls:?}");
        assert!(text.contains("tools/call"), "{text}");
    }
}

#[test]
fn a_file_takes_the_lines_and_is_reopened_after_a_rotation() {
    let upstream = Upstream::json(result(1));
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("sidecar.toml");
    fs::write(
        &file,
        format!("[log]\naccess = \"access.log\"\n[upstreams.mcp]\nurl = \"{}\"\n", upstream.url()),
    )
    .unwrap();
    let (log, old) = (folder.path().join("access.log"), folder.path().join("access.log.1"));
    fs::write(&log, "{\"kept\":true}\n").unwrap();
    let mut command = Sidecar::command(&folder);
    command.arg("--config").arg(&file);
    let mut sidecar = Sidecar::spawn(command, folder);
    sidecar.client().ask(&tool("before"));
    while !fs::read_to_string(&log).unwrap().contains("before") {
        thread::yield_now();
    }
    fs::rename(&log, &old).unwrap();
    sidecar.signal("HUP");
    sidecar.wait_stderr("reloaded");
    sidecar.client().ask(&tool("after"));
    assert!(sidecar.terminate().success());
    let (first, second) = (fs::read_to_string(old).unwrap(), fs::read_to_string(log).unwrap());
    assert!(
        first.starts_with("{\"kept\":true}\n") && first.contains("before"),
        "what was there stays: {first}"
    );
    assert!(second.contains("after") && !second.contains("before"), "{second}");
    assert_eq!((first.lines().count(), second.lines().count()), (2, 1));
    assert!(sidecar.lines().is_empty(), "stdout has none");
}

#[test]
fn no_line_is_lost_at_the_end() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |request, reply| {
        if String::from_utf8_lossy(&request.body).contains("held") {
            pass.pass();
        }
        reply.json(200, &[], &result(1));
    });
    let mut sidecar = Sidecar::before(&upstream);
    let held = sidecar.client();
    held.send(&tool("held"));
    upstream.wait_request(0);
    let client = sidecar.client();
    for _ in 0..200 {
        client.ask(&call(1));
    }
    sidecar.signal("TERM");
    sidecar.wait_stderr("draining");
    gate.open();
    held.response();
    assert!(sidecar.wait_exit().success());
    let lines = sidecar.lines();
    assert_eq!(lines.len(), 201);
    assert_eq!(lines.iter().filter(|line| line["tool"] == "held").count(), 1);
}

/// What a metric says now.
fn metric(admin: &str, name: &str) -> f64 {
    let page = Client::connect(admin).ask(&Post { method: "GET", ..Post::new("").at("/metrics") }).text();
    let line = page.lines().find(|line| line.split([' ', '{']).next() == Some(name));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in {page}"))
}

/// The reader of stdout takes nothing: every exchange goes on, lines beyond the buffer are counted, and whoever reads
/// again reads whole lines.
#[test]
fn a_slow_stdout_blocks_no_exchange_and_what_it_loses_is_counted() {
    let folder = TempDir::new().unwrap();
    let pipe = folder.path().join("stdout");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // Opened both ways, so that neither side waits for the other.
    let mut reader: File = OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
    let inner = Sidecar::command(&folder);
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$@\" > \"$PIPE\"", "sh"]).arg(inner.get_program()).args(inner.get_args());
    command
        .args(["--upstream", "http://127.0.0.1:1/mcp"])
        .env("PIPE", &pipe)
        .env("XDG_STATE_HOME", folder.path());
    command.env("MCP_SIDECAR_STATE", "memory:");
    let mut process = Process::spawn(command);
    let started =
        process.stderr.find("listening", |line| line.contains("listening").then(|| line.to_owned()));
    let started: Value = serde_json::from_str(&started).unwrap();
    let at = |name: &str| started["fields"][name].as_str().unwrap().to_owned();
    let (listen, admin) = (at("listen"), at("admin"));

    let dropped = "mcp_sidecar_log_lines_dropped_total";
    let client = Client::connect(&listen);
    // Refused, so quick; with all the text that a line can hold, 1.5 KiB, so that few thousand fill the buffer of 4 MiB.
    let wide = "\u{1}".repeat(255).replace('\u{1}', "\\u0001");
    let post = Post::modern(
        "tools/call",
        Some("x"),
        format!(
            r#"{{"jsonrpc":"2.0","id":"{wide}","method":"tools/call","params":{{"name":"{wide}","_meta":{{"io.modelcontextprotocol/protocolVersion":"{MODERN}"}}}}}}"#
        ),
    );
    let mut asked = 0;
    while metric(&admin, dropped) == 0.0 {
        for _ in 0..100 {
            assert_eq!(client.ask(&post).status(), 400);
            asked += 1;
        }
        assert!(asked < 20_000, "the buffer has no bound");
    }
    let lost = metric(&admin, dropped);

    // Somebody reads again: nothing is torn, and nothing is lost but what was counted.
    let lines = Watched::new(Vec::new());
    let into = lines.clone();
    thread::spawn(move || {
        let mut piece = [0; 65536];
        while let Ok(n @ 1..) = reader.read(&mut piece) {
            into.change(|lines: &mut Vec<u8>| lines.extend_from_slice(&piece[..n]));
        }
    });
    process.signal("TERM");
    assert!(process.wait_exit(support::BOUND).success());
    let kept = asked - lost as usize;
    let count = |lines: &Vec<u8>| lines.iter().filter(|byte| **byte == b'\n').count();
    lines.wait(
        "the last line",
        |lines| count(lines).to_string(),
        |lines| (count(lines) == kept).then_some(()),
    );
    for line in String::from_utf8(lines.lock().clone()).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert_eq!(line["outcome"], "refused");
    }
}

/// `duration_ms` is the time to the end of the stream, and the line is not there before.
#[test]
fn the_line_of_a_stream_is_written_at_its_end() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        reply.event(&progress(1, 1));
        pass.pass();
        thread::sleep(Duration::from_millis(300));
        reply.event(&result(1));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    client.events(1);
    // Another exchange has come and gone meanwhile.
    sidecar.client().ask(&call(1).at("/other"));
    let lines = sidecar.wait_lines(1);
    assert_eq!((lines.len(), &lines[0]["outcome"]), (1, &json!("refused")));
    gate.open();
    client.response();
    let line = sidecar.wait_line(|line| line["tool"] == "slow");
    assert!(line["duration_ms"].as_f64().unwrap() >= 300.0, "{line}");
    assert!(line["first_byte_ms"].as_f64().unwrap() < line["duration_ms"].as_f64().unwrap(), "{line}");
    says(&line, &[("outcome", json!("ok")), ("events", json!(2))]);
}
