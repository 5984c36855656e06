//! The JSON answer to a call is known whole before it is passed on (at most `response_body`), an
//! answer that is compressed although nobody asked for it is decoded and its label removed, and everything else passes
//! however large it is.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::io::Write;

use flate2::{
    Compression,
    write::{DeflateEncoder, GzEncoder, ZlibEncoder},
};
use support::{
    Post, Sidecar, Upstream,
    http::Response,
    mcp::{call, event, modern_call, progress, result},
    upstream::Reply,
};

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn zlib(text: &str) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn raw_deflate(text: &str) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn encoded(reply: &mut Reply, status: u16, coding: &str, kind: &str, body: &[u8]) {
    let length = body.len().to_string();
    let fields = [
        ("Content-Type", kind),
        ("Content-Encoding", coding),
        ("Content-Length", &length),
        ("ETag", "\"gz\""),
        ("Content-Digest", "sha-256=:AA==:"),
        ("X-Kept", "1"),
    ];
    reply.head(status, &fields);
    reply.raw(body);
}

fn list(id: u32) -> Post {
    Post::legacy(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"resources/list"}}"#))
}

/// A list's answer of about so many bytes, that compression does not make small.
fn tools(bytes: usize) -> String {
    let mut seed = 1_u64;
    let mut text = String::from(r#"{"jsonrpc":"2.0","id":1,"result":{"tools":["#);
    while text.len() < bytes {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text += &format!(r#"{{"name":"t{seed:x}","inputSchema":{{}}}},"#);
    }
    text.pop();
    text + "]}}"
}

fn assert_decoded(response: &Response, status: u16, body: &str) {
    assert_eq!(response.status(), status, "{}", response.text());
    assert!(response.text() == body, "{} bytes of {}", response.body.len(), body.len());
    for name in ["content-encoding", "etag", "content-digest"] {
        assert_eq!(response.head.field(name), None, "{name}");
    }
    assert_eq!(response.head.all("x-kept"), ["1"]);
    if let Some(length) = response.head.field("content-length") {
        assert_eq!(length, response.body.len().to_string());
    }
}

/// The error of a call whose upstream failed after the call was sent.
fn assert_failed(response: &Response, id: &str) {
    assert_eq!(response.status(), 200, "{}", response.text());
    let answer = response.json();
    assert_eq!(answer["id"].to_string(), id);
    assert_eq!(answer["error"]["code"], 1502);
    let data = &answer["error"]["data"];
    assert_eq!((&data["reason"], &data["outcome"]), (&"upstream_failed".into(), &"unknown".into()));
    assert_eq!((&data["source"], &data["upstream"]), (&"mcp-sidecar".into(), &"mcp".into()));
    assert_eq!(data["request"], response.head.field("x-request-id").unwrap());
    assert!(!response.text().contains("oz0/retryable"), "a failure is no busy upstream");
}

#[test]
fn a_compressed_answer_is_decoded_and_its_label_removed() {
    let upstream = Upstream::start(|request, reply| {
        let text = result(1);
        let (coding, body) = match request.number % 4 {
            0 => ("gzip", gzip(&text)),
            1 => ("X-GZIP", gzip(&text)),
            2 => ("deflate", zlib(&text)),
            _ => ("deflate", raw_deflate(&text)),
        };
        encoded(reply, 200, coding, "application/json", &body);
    });
    let sidecar = Sidecar::before(&upstream);
    for accept_encoding in [Some("gzip, deflate, br"), None, Some("identity")] {
        for post in [call(1), modern_call(1), list(1), call(1)] {
            let post = match accept_encoding {
                Some(accept) => post.field("Accept-Encoding", accept),
                None => post,
            };
            assert_decoded(&sidecar.client().ask(&post), 200, &result(1));
        }
    }
    assert_eq!(upstream.wait_request(0).head.all("accept-encoding"), ["identity"]);
}

#[test]
fn a_compressed_stream_is_decoded_event_by_event() {
    let gate = support::Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[("Content-Encoding", "gzip"), ("ETag", "\"gz\"")]);
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        for json in [progress(1, 1), result(1)] {
            encoder.write_all(event(json).as_bytes()).unwrap();
            encoder.flush().unwrap();
            reply.chunk(std::mem::take(encoder.get_mut()));
            pass.pass();
        }
        reply.chunk(encoder.finish().unwrap());
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    assert_eq!(client.events(1)[0].data, progress(1, 1), "it does not wait for the next");
    gate.open();
    client.events(2);
    gate.open();
    let response = client.response();
    assert_eq!(response.text(), event(progress(1, 1)) + &event(result(1)));
    assert_eq!(response.head.field("content-encoding"), None);
    assert_eq!(response.head.field("etag"), None);
}

#[test]
fn a_compressed_error_and_a_large_compressed_list_are_decoded_too() {
    let large = tools(3 << 20);
    let body = large.clone();
    let upstream = Upstream::start(move |request, reply| match request.number {
        0 => encoded(reply, 404, "gzip", "application/json", &gzip("{\"lost\":1}")),
        _ => encoded(reply, 200, "gzip", "application/json", &gzip(&body)),
    });
    let sidecar = Sidecar::before(&upstream);
    assert_decoded(&sidecar.client().ask(&call(1)), 404, "{\"lost\":1}");
    let node = sidecar.client();
    node.send(&list(1));
    assert_decoded(&node.large_response(), 200, &large);
}

#[test]
fn a_compressed_answer_that_is_broken_or_cut_off_is_a_failure() {
    let upstream = Upstream::start(|request, reply| {
        let mut body = gzip(&result(1));
        match request.number / 2 {
            // The text is whole, what proves it is missing.
            0 => body.truncate(body.len() - 4),
            1 => body.truncate(body.len() / 2),
            _ => body = b"not gzip at all".to_vec(),
        }
        encoded(reply, 200, "gzip", "application/json", &body);
    });
    let sidecar = Sidecar::before(&upstream);
    for _ in 0..3 {
        assert_failed(&sidecar.client().ask(&call(1)), "1");
        assert_failed(&sidecar.client().ask(&list(1)), "1");
    }
}

#[test]
fn a_large_compressed_list_that_is_cut_off_is_not_passed_off_as_whole() {
    let upstream = Upstream::start(|_, reply| {
        let mut body = gzip(&tools(1 << 20));
        body.truncate(body.len() - 4);
        encoded(reply, 200, "gzip", "application/json", &body);
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&list(1));
    client.closed();
    assert!(
        !client.bytes().ends_with(b"0\r\n\r\n"),
        "a chunked body without its end is broken for all to see"
    );
    sidecar.wait_line(|line| line["outcome"] == "failed" && line["reason"] == "upstream_failed");
}

#[test]
fn what_is_compressed_as_nobody_can_read_it_passes_where_nothing_is_read() {
    let upstream = Upstream::start(|_, reply| encoded(reply, 200, "br", "application/json", b"\x01\x02\x03"));
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&list(1));
    assert_eq!((response.status(), response.body.as_slice()), (200, &b"\x01\x02\x03"[..]));
    assert_eq!(response.head.all("content-encoding"), ["br"]);
    assert_eq!(response.head.all("content-length"), ["3"]);
}

#[test]
fn a_delete_and_an_options_speak_for_themselves_about_codings() {
    let upstream = Upstream::start(|_, reply| encoded(reply, 200, "gzip", "text/plain", &gzip("gone")));
    let sidecar = Sidecar::before(&upstream);
    let mut options = Post::delete().field("Accept-Encoding", "gzip;q=0.5");
    for method in ["DELETE", "OPTIONS"] {
        options.method = method;
        let response = sidecar.client().ask(&options);
        assert_eq!(response.body, gzip("gone"));
        assert_eq!(response.head.all("content-encoding"), ["gzip"]);
    }
    assert_eq!(upstream.wait_request(0).head.all("accept-encoding"), ["gzip;q=0.5"]);
}

fn limited(upstream: &Upstream) -> Sidecar {
    Sidecar::with_config(&format!(
        "[limits]\nresponse_body = \"128KiB\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    ))
}

#[test]
fn a_calls_answer_beyond_the_limit_is_a_failure_that_the_node_can_read() {
    let text = "x".repeat(128 * 1024);
    let big = result(1).replace("ok", &text);
    let upstream = Upstream::start(move |request, reply| match request.number {
        0 => reply.json(200, &[], &big),
        1 => {
            reply.head(200, &[("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]);
            reply.chunk(&big);
            reply.hang();
        }
        2 => encoded(reply, 200, "gzip", "application/json", &gzip(&big)),
        _ => reply.json(200, &[], &result(4)),
    });
    let sidecar = limited(&upstream);
    for number in 0..3 {
        assert_failed(&sidecar.client().ask(&call("\"a\"")), "\"a\"");
        if number == 1 {
            upstream.wait_closed(upstream.wait_request(1).connection);
        }
    }
    assert_eq!(sidecar.client().ask(&call(4)).text(), result(4));
    let lines = sidecar.wait_lines(4);
    let failed = lines.iter().filter(|line| line["outcome"] == "failed" && line["status"] == 200);
    assert_eq!(failed.count(), 3, "{lines:?}");
}

#[test]
fn a_calls_answer_within_the_limit_passes_however_it_is_framed() {
    let big = result(1).replace("ok", &"x".repeat(100 * 1024));
    let body = big.clone();
    let upstream = Upstream::start(move |request, reply| match request.number {
        0 => reply.json(200, &[], &body),
        1 => {
            reply.head(200, &[("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]);
            body.as_bytes().chunks(999).for_each(|piece| reply.chunk(piece));
            reply.end();
        }
        _ => {
            reply.head(200, &[("Content-Type", "application/json"), ("Connection", "close")]);
            reply.raw(&body);
            reply.break_off();
        }
    });
    let sidecar = limited(&upstream);
    let client = sidecar.client();
    for _ in 0..3 {
        let response = client.ask(&call(1));
        assert!(response.text() == big);
        assert_eq!(response.head.all("content-length"), [big.len().to_string().as_str()]);
    }
}

#[test]
fn a_list_larger_than_anything_that_is_held_passes_as_it_comes() {
    let large = tools(20 << 20);
    let body = large.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.number == 0 {
            return reply.json(200, &[("X-Kept", "1")], &body);
        }
        let fields =
            [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked"), ("X-Kept", "1")];
        reply.head(200, &fields);
        body.as_bytes().chunks(1 << 20).for_each(|piece| reply.chunk(piece));
        reply.end();
    });
    let sidecar = limited(&upstream);
    let before = sidecar.rss_kib();
    for length in [Some(large.len().to_string()), None] {
        let response = sidecar.client().ask(&list(1));
        assert_decoded(&response, 200, &large);
        assert_eq!(response.head.field("content-length"), length.as_deref());
    }
    assert!(sidecar.rss_kib() < before + 16 * 1024, "it was held");
}

#[test]
fn a_call_that_is_answered_with_no_response_has_failed() {
    let answers: [(u16, &str, &str); 9] = [
        (200, "application/json", ""),
        (200, "application/json", "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"content\":["),
        (200, "application/json", "null"),
        (200, "application/json", "{}"),
        (200, "application/json", "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}"),
        (200, "application/json", "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/x\"}"),
        (200, "text/html", "<html>sign in</html>"),
        (202, "text/plain", ""),
        (200, "text/plain", "Accepted"),
    ];
    let upstream = Upstream::start(move |request, reply| {
        let (status, kind, body) = answers[request.number];
        reply.json(status, &[("Content-Type", kind)], body);
    });
    let sidecar = Sidecar::before(&upstream);
    for _ in answers {
        assert_failed(&sidecar.client().ask(&call(1)), "1");
    }
}

#[test]
fn a_calls_answer_that_breaks_off_has_failed() {
    let upstream = Upstream::start(|request, reply| {
        match request.number {
            0 => reply.head(200, &[("Content-Type", "application/json"), ("Content-Length", "500")]),
            1 => reply.head(200, &[("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]),
            _ => {}
        }
        if request.number == 1 {
            reply.chunk(result(1));
        } else if request.number == 0 {
            reply.raw(result(1));
        } else {
            reply.raw("HTTP/1.1 200 OK\r\nContent-Len");
        }
        reply.break_off();
    });
    let sidecar = Sidecar::before(&upstream);
    for sent in 1..=3 {
        assert_failed(&sidecar.client().ask(&call(1)), "1");
        assert_eq!(upstream.count(), sent);
    }
}

#[test]
fn a_failure_is_told_as_an_event_where_accept_excludes_json() {
    let sidecar = Sidecar::before(&Upstream::json("{}"));
    let response = sidecar.client().ask(&call("\"q\"").field("Accept", "text/event-stream"));
    let events = support::sse::read(&response.body).events;
    assert_eq!(events.len(), 1);
    let answer = events[0].json();
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&"q".into(), &1502.into()));
    assert!(response.text().ends_with("\n\n"));
}

#[test]
fn an_answer_to_another_request_is_none_to_this_call() {
    for answer in
        [result(2), result("\"1\""), r#"{"jsonrpc":"2.0","id":null,"result":{"content":[]}}"#.into()]
    {
        let upstream = Upstream::json(answer);
        let sidecar = Sidecar::before(&upstream);
        let told = sidecar.client().ask(&call(1)).json();
        assert_eq!((&told["id"], &told["error"]["data"]["reason"]), (&1.into(), &"upstream_failed".into()));
    }
    // Its sender could not read the id: the error is all there is.
    let unread = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"m"}}"#;
    let upstream = Upstream::json(unread);
    assert_eq!(Sidecar::before(&upstream).client().ask(&call(1)).text(), unread);
}

#[test]
fn a_length_beside_a_transfer_coding_is_not_believed() {
    let upstream = Upstream::start(|_, reply| {
        let body = result(1);
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 3\r\n";
        reply.raw(format!("{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len()));
    });
    let sidecar = Sidecar::before(&upstream);
    for post in [call(1), list(1)] {
        assert_eq!(sidecar.client().ask(&post).text(), result(1));
    }
}

#[test]
fn a_second_response_to_the_same_request_is_not_sent() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.event(&result(1));
        reply.event(r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"late":true}}"#);
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    for post in [call(1), modern_call(1)] {
        let text = sidecar.client().ask(&post).text();
        assert!(text.contains(&result(1)) && !text.contains("late"), "{text}");
    }
}
