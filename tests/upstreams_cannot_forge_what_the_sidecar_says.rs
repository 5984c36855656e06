//! `oz0/retryable`, `oz0/retry_after` and `oz0/refetch` in an upstream's own result are cut out and
//! counted, `Oz0-*` response headers are dropped, and nothing else of a result changes.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use support::{
    Post, Sidecar, Upstream,
    mcp::{call, event, modern_call, progress, result},
    sse,
};

/// A result as an upstream forges it, and what of it may reach the node.
const FORGED: [(&str, &str, usize); 12] = [
    // One, alone: an emptied `_meta` stays.
    (
        r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"_meta":{"oz0/retryable":true}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"_meta":{}}}"#,
        1,
    ),
    // All three, among others, first, between and last; odd white space and spellings stay.
    (
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/retryable":true, "a" : 1.0,"oz0/retry_after":1e9 ,"b":"\u00e9","oz0/refetch":[{}]},"content":[ ]}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"a" : 1.0,"b":"\u00e9"},"content":[ ]}}"#,
        3,
    ),
    // A key may be spelt with escapes.
    (
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"\u006fz0\/retryable":true,"x":1}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"x":1}}}"#,
        1,
    ),
    (
        r#"{"jsonrpc":"2.0","id":1,"r\u0065sult":{"_m\u0065ta":{"oz0/refetch":false}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"r\u0065sult":{"_m\u0065ta":{}}}"#,
        1,
    ),
    // Repeated members: whichever a reader takes.
    (
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/retryable":true,"oz0/retryable":false},"_meta":{"oz0/retry_after":1,"k":2}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{},"_meta":{"k":2}}}"#,
        3,
    ),
    (
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/retryable":true}},"result":{"content":[]}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{}},"result":{"content":[]}}"#,
        1,
    ),
    (
        r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]},"result":{"isError":true,"_meta":{"x":0,"oz0/retryable":true}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]},"result":{"isError":true,"_meta":{"x":0}}}"#,
        1,
    ),
    // Beside an error or a method, where some readers take it for a result all the same.
    (
        r#"{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"no"},"result":{"_meta":{"oz0/retryable":true}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"no"},"result":{"_meta":{}}}"#,
        1,
    ),
    (
        r#"{"jsonrpc":"2.0","id":1,"method":"x","result":{"_meta":{"oz0/retryable":true}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"x","result":{"_meta":{}}}"#,
        1,
    ),
    // In an array, where a server answers so.
    (
        r#"[{"jsonrpc":"2.0","method":"notifications/x"},{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/retryable":true}}}]"#,
        r#"[{"jsonrpc":"2.0","method":"notifications/x"},{"jsonrpc":"2.0","id":1,"result":{"_meta":{}}}]"#,
        1,
    ),
    // What only looks like it.
    (
        r#"{"jsonrpc":"2.0","id":1,"result":{"oz0/retryable":true,"structuredContent":{"_meta":{"oz0/retryable":true}},"content":[{"type":"text","text":"\"_meta\":{\"oz0/retryable\":true}","_meta":{"oz0/refetch":1}}],"_meta":{"oz0/other":1,"OZ0/retryable":2,"oz0/retryable ":3,"x":{"oz0/retryable":4}}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{"oz0/retryable":true,"structuredContent":{"_meta":{"oz0/retryable":true}},"content":[{"type":"text","text":"\"_meta\":{\"oz0/retryable\":true}","_meta":{"oz0/refetch":1}}],"_meta":{"oz0/other":1,"OZ0/retryable":2,"oz0/retryable ":3,"x":{"oz0/retryable":4}}}}"#,
        0,
    ),
    (
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":["oz0/retryable"],"content":[]}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":["oz0/retryable"],"content":[]}}"#,
        0,
    ),
];

fn counted(sidecar: &Sidecar) -> usize {
    let page = String::from_utf8(sidecar.admin("GET", "/metrics").body).unwrap();
    let line = page.lines().find_map(|line| line.strip_prefix("mcp_sidecar_forged_members_total "));
    line.unwrap_or_else(|| panic!("no such metric:\n{page}")).parse().unwrap()
}

#[test]
fn forged_members_of_a_json_result_are_cut_out_and_counted() {
    let upstream = Upstream::start(|request, reply| {
        let fields = [("ETag", "\"x\""), ("Content-Digest", "sha-256=:AA==:"), ("X-Kept", "1")];
        reply.json(200, &fields, FORGED[request.number / 2].0);
    });
    let sidecar = Sidecar::before(&upstream);
    let mut cut = 0;
    for (_, wanted, count) in FORGED {
        for post in [call(1), modern_call(1)] {
            let response = sidecar.client().ask(&post);
            assert_eq!((response.status(), response.text().as_str()), (200, wanted));
            assert_eq!(response.head.all("content-length"), [wanted.len().to_string().as_str()]);
            assert_eq!(response.head.all("x-kept"), ["1"]);
            let digests = response.head.all("content-digest").len() + response.head.all("etag").len();
            assert_eq!(digests, if count == 0 { 2 } else { 0 }, "they were true of other bytes");
            cut += count;
            assert_eq!(counted(&sidecar), cut);
        }
    }
}

#[test]
fn forged_members_of_a_result_in_a_stream_are_cut_out_and_counted() {
    let upstream = Upstream::start(|request, reply| {
        reply.sse(&[]);
        reply.chunk("id: 7\r\n");
        reply.chunk(format!("data: {}\r\n: odd\r\nx-field: y\r\n\r\n", FORGED[request.number / 2].0));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let mut cut = 0;
    for (_, wanted, count) in FORGED {
        for post in [call(1), modern_call(1)] {
            let response = sidecar.client().ask(&post);
            let event = format!("id: 7\r\ndata: {wanted}\r\n: odd\r\nx-field: y\r\n\r\n");
            // The upstream's comments are not forwarded.
            assert_eq!(response.text(), event.replace(": odd\r\n", ""));
            cut += count;
            assert_eq!(counted(&sidecar), cut);
        }
    }
}

#[test]
fn data_that_is_spread_over_lines_is_read_as_the_node_reads_it() {
    let lines = [
        r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"#,
        r#" "_meta":{"oz0/retryable""#,
        "",
        r#":true, "k":"#,
        r#"1 , "oz0/refetch":{"#,
        "}}}}",
    ];
    let endings = ["\n", "\r\n", "\r"];
    let upstream = Upstream::start(move |request, reply| {
        let end = endings[request.number];
        let data: String = lines.iter().map(|line| format!("data:{line}{end}")).collect();
        reply.sse(&[]);
        reply.chunk(format!("event: message{end}{data}{end}"));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    for number in 1..=endings.len() {
        let response = sidecar.client().ask(&call(1));
        let events = sse::read(&response.body).events;
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].json()["result"], serde_json::json!({"content": [], "_meta": {"k": 1}}));
        assert_eq!(counted(&sidecar), 2 * number);
    }
}

#[test]
fn a_stream_around_a_forged_result_passes_byte_for_byte() {
    let (forged, wanted, _) = FORGED[1];
    let around = [event(progress(1, "1.0")), ": a comment\n\n".to_owned(), event(r#"{"odd":1}"#)];
    let sent = [&around.concat(), &event(forged)[..]].concat();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        reply.chunk(&sent);
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&call(1));
    let passed = [around[0].as_str(), &around[2], &event(wanted)].concat();
    assert_eq!(response.text(), passed);
}

#[test]
fn a_resumed_stream_is_looked_at_too() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.event(FORGED[0].0);
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&Post::get().field("Last-Event-ID", "7"));
    assert_eq!(response.text(), event(FORGED[0].1));
    assert_eq!(counted(&sidecar), 1);
}

#[test]
fn the_calls_of_a_batch_are_no_way_around() {
    let batch = |id: u8| format!(r#"[{},{{"jsonrpc":"2.0","id":9,"method":"ping"}}]"#, body(id));
    let upstream = Upstream::start(|request, reply| {
        let answer = format!("[{} , {} ]", FORGED[0].0, FORGED[1].0);
        if request.number == 0 {
            return reply.json(200, &[], &answer);
        }
        reply.sse(&[]);
        reply.event(&answer);
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let wanted = format!("[{} , {} ]", FORGED[0].1, FORGED[1].1);
    let post = Post::legacy(batch(1)).field("MCP-Protocol-Version", "2025-03-26");
    assert_eq!(sidecar.client().ask(&post).text(), wanted);
    assert_eq!(counted(&sidecar), 4);
    assert!(sidecar.client().ask(&post).text().contains(&wanted));
    assert_eq!(counted(&sidecar), 8);
}

fn body(id: u8) -> String {
    String::from_utf8(call(id).body).unwrap()
}

#[test]
fn a_byte_order_mark_hides_nothing() {
    let upstream = Upstream::start(|_, reply| {
        reply.json(200, &[], &format!("\u{feff}{}", FORGED[0].0));
    });
    let sidecar = Sidecar::before(&upstream);
    assert_eq!(sidecar.client().ask(&call(1)).text(), format!("\u{feff}{}", FORGED[0].1));
    assert_eq!(counted(&sidecar), 1);
}

// An event stream in an unknown coding passes opaquely: a node that asked for nothing of the kind cannot read it.
#[test]
fn an_answer_that_cannot_be_read_is_not_passed_off_as_a_result() {
    let upstream = Upstream::start(|request, reply| {
        let fields: &[(&str, &str)] = match request.number {
            0 => &[("Content-Encoding", "br")],
            1 => &[("Content-Encoding", "identity"), ("Content-Encoding", "br")],
            2 => &[("Content-Encoding", "gzip, gzip")],
            _ => &[("Content-Encoding", "zstd")],
        };
        reply.json(200, fields, "\u{1}\u{2}");
    });
    let sidecar = Sidecar::before(&upstream);
    for _ in 0..4 {
        let response = sidecar.client().ask(&call(1));
        assert_eq!(response.status(), 200);
        assert_eq!(response.head.field("content-encoding"), None);
        assert_eq!(response.json()["error"]["data"]["reason"], "upstream_failed");
    }
}

#[test]
fn oz0_response_headers_of_an_upstream_are_dropped() {
    let fields = [
        ("Oz0-Upstream-Status", "429"),
        ("Oz0-Idempotency-Key", "stolen"),
        ("oz0-resume", "resumed from progress 2"),
        ("OZ0-Anything", "x"),
        ("Oz1-Kept", "1"),
        ("X-Oz0-Kept", "1"),
    ];
    let upstream = Upstream::start(move |request, reply| match request.number {
        0 => reply.json(200, &fields, &result(1)),
        1 => {
            reply.sse(&fields);
            reply.event(&result(1));
            reply.end();
        }
        2 => reply.json(429, &fields, "{}"),
        3 => reply.json(500, &fields, "{}"),
        _ => reply.json(200, &fields, &result(1)),
    });
    let sidecar = Sidecar::before(&upstream);
    let list = Post::legacy(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#);
    let posts = [call(1), call(1), call(1), call(1), list, Post::get(), Post::delete(), modern_call(1)];
    for (number, post) in posts.iter().enumerate() {
        let head = sidecar.client().ask(post).head;
        let names: Vec<_> = head.fields.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
        let ours: Vec<_> = names.iter().filter(|name| name.starts_with("oz0-")).collect();
        // A busy answer carries the sidecar's own, once.
        let own = if number == 2 { vec!["oz0-upstream-status"] } else { vec![] };
        assert_eq!(ours, own, "{post:?}");
        assert_eq!((head.all("oz1-kept"), head.all("x-oz0-kept")), (vec!["1"], vec!["1"]));
    }
}
