//! What the node reads when the way to its server fails: one JSON-RPC error under the request's id that says why and
//! whether anything was sent, a status where there is no id, and never a second try.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::net::TcpListener;

use support::{
    Gate, Post, Request, Sidecar, Upstream,
    http::Response,
    http2,
    mcp::{call, modern_call, progress, result},
    sse,
    upstream::Reply,
};

type Script = fn(&Request, &mut Reply);

fn at(url: &str) -> Sidecar {
    Sidecar::with_config(&format!("[upstreams.mcp]\nurl = \"{url}\"\n"))
}

/// The error, bit by bit but for its message, which is not empty.
fn is_error(body: &[u8], id: &str, code: u32, reason: &str, outcome: &str, request: &str, progress: &str) {
    let text = String::from_utf8(body.to_vec()).unwrap();
    let id = if id.is_empty() { String::new() } else { format!("\"id\":{id},") };
    let head = format!("{{\"jsonrpc\":\"2.0\",{id}\"error\":{{\"code\":{code},\"message\":\"");
    let tail = format!(
        "\",\"data\":{{\"source\":\"mcp-sidecar\",\"reason\":\"{reason}\",\"outcome\":\"{outcome}\",\"upstream\":\"mcp\",\"request\":\"{request}\"{progress}}}}}}}"
    );
    assert!(text.starts_with(&head), "{text}\nshould begin with {head}");
    assert!(text.ends_with(&tail), "{text}\nshould end with {tail}");
    assert!(text.len() > head.len() + tail.len(), "no message: {text}");
    assert!(!text.contains("oz0/retryable"), "{text}");
}

/// Nothing of the request but its id may be told.
const SECRET: &str = "Bearer s3cr3t";

fn secretive(post: &Post, request: &str) -> Post {
    post.clone().field("Authorization", SECRET).field("X-Request-Id", request)
}

/// Every kind of message toward an upstream that fails before or after anything was sent.
fn fails(sidecar: &Sidecar, reason: &str, code: u32, outcome: &str) {
    for (number, (post, id)) in
        [(call("\"\\u0061\""), "\"\\u0061\""), (modern_call("-0.50"), "-0.50"), (call(7), "7")]
            .into_iter()
            .enumerate()
    {
        let request = format!("r-{number}");
        let answer = sidecar.client().ask(&secretive(&post, &request));
        assert_eq!(answer.status(), 200, "{}", answer.text());
        assert_eq!(answer.head.field("content-type"), Some("application/json"));
        assert_eq!(answer.head.field("x-request-id"), Some(request.as_str()));
        is_error(&answer.body, id, code, reason, outcome, &request, "");
        assert!(!answer.text().contains("s3cr3t"), "{}", answer.text());
        let line = sidecar.wait_line(|line| line["request"] == request.as_str());
        assert_eq!((&line["outcome"], &line["reason"]), (&"failed".into(), &reason.into()), "{line}");
    }
    // Where JSON is excluded it is one event.
    let answer = sidecar.client().ask(&secretive(&call(1), "r-e").field("Accept", "text/event-stream"));
    assert_eq!(answer.head.field("content-type"), Some("text/event-stream"));
    assert_eq!(answer.head.field("content-length"), None);
    let events = sse::read(&answer.body).events;
    assert_eq!(events.len(), 1);
    is_error(events[0].data.as_bytes(), "1", code, reason, outcome, "r-e", "");
    // A batch: an array, one for each id that awaits an answer.
    let batch = Post::legacy(
        r#"[{"jsonrpc":"2.0","id":1,"method":"a"},{"jsonrpc":"2.0","method":"b"},{"jsonrpc":"2.0","id":"1","method":"c"}]"#,
    );
    let answer = sidecar.client().ask(&batch.field("MCP-Protocol-Version", "2025-03-26"));
    assert_eq!(answer.status(), 200);
    let told = answer.json();
    let ids: Vec<_> = told.as_array().unwrap().iter().map(|one| one["id"].clone()).collect();
    assert_eq!(ids, [serde_json::json!(1), serde_json::json!("1")], "{told}");
    assert_eq!(told[1]["error"]["data"]["reason"], reason);
}

/// What has no id to answer gets a status.
fn fails_without_id(sidecar: &Sidecar, reason: &str, code: u32, outcome: &str) {
    let posts = [
        Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#),
        Post::legacy(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#),
        Post::get(),
        Post::delete(),
    ];
    for (number, post) in posts.into_iter().enumerate() {
        let request = format!("n-{number}");
        let answer = sidecar.client().ask(&secretive(&post, &request));
        assert_eq!(u32::from(answer.status()) + 1000, code, "{}", answer.text());
        assert_eq!(answer.head.field("content-type"), Some("application/json"));
        is_error(&answer.body, "", code, reason, outcome, &request, "");
        let line = sidecar.wait_line(|line| line["request"] == request.as_str());
        assert_eq!((&line["outcome"], &line["reason"]), (&"failed".into(), &reason.into()), "{line}");
        assert_eq!(line["status"], code - 1000);
    }
}

#[test]
fn a_closed_port_is_unreachable_and_nothing_was_sent() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let sidecar = at(&format!("http://127.0.0.1:{port}/mcp"));
    fails(&sidecar, "upstream_unreachable", 1502, "not_sent");
    fails_without_id(&sidecar, "upstream_unreachable", 1502, "not_sent");
}

#[test]
fn a_name_that_is_none_is_unreachable() {
    let sidecar = at("http://no-such-host.invalid/mcp");
    let answer = sidecar.client().ask(&call(1).field("X-Request-Id", "r"));
    is_error(&answer.body, "1", 1502, "upstream_unreachable", "not_sent", "r", "");
}

#[test]
fn a_certificate_that_is_not_trusted_is_unreachable_and_no_byte_of_the_request_is_shown() {
    let upstream = Upstream::tls(|_, reply| reply.json(200, &[], &result(1)));
    let sidecar = at(&upstream.url());
    fails(&sidecar, "upstream_unreachable", 1502, "not_sent");
    fails_without_id(&sidecar, "upstream_unreachable", 1502, "not_sent");
    assert_eq!(upstream.count(), 0);
}

#[test]
fn a_server_that_does_not_speak_tls_is_unreachable() {
    let upstream = Upstream::by_connection(|reply| {
        reply.received(|bytes| !bytes.is_empty());
        reply.raw("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        reply.break_off();
    });
    let port = upstream.address.rsplit(':').next().unwrap();
    let sidecar = at(&format!("https://localhost:{port}/mcp"));
    let answer = sidecar.client().ask(&call(1).field("X-Request-Id", "r"));
    is_error(&answer.body, "1", 1502, "upstream_unreachable", "not_sent", "r", "");
}

#[test]
fn a_refused_stream_is_no_reason_to_send_again() {
    let upstream = http2::Server::start(|_, mut respond| async move {
        respond.send_reset(h2::Reason::REFUSED_STREAM);
        None
    });
    let folder = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::with_config(&upstream.config(&folder));
    fails(&sidecar, "upstream_refused", 1502, "not_sent");
    assert_eq!(upstream.count(), 5);
    fails_without_id(&sidecar, "upstream_refused", 1502, "not_sent");
    assert_eq!(upstream.count(), 9);
}

#[test]
fn any_other_reset_leaves_the_effect_unknown() {
    let upstream = http2::Server::start(|_, mut respond| async move {
        respond.send_reset(h2::Reason::INTERNAL_ERROR);
        None
    });
    let folder = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::with_config(&upstream.config(&folder));
    fails(&sidecar, "upstream_failed", 1502, "unknown");
    fails_without_id(&sidecar, "upstream_failed", 1502, "unknown");
    assert_eq!(upstream.count(), 9);
}

/// Every way to break off or to answer what is no answer, before a status can be passed on.
const BROKEN: [(&str, Script); 12] = [
    ("FIN without a head", |_, reply| reply.break_off()),
    ("RST without a head", |_, reply| reply.reset()),
    ("half a head", |_, reply| {
        reply.raw("HTTP/1.1 200 OK\r\nContent-");
        reply.break_off();
    }),
    ("no HTTP", |_, reply| {
        reply.raw("220 smtp ready\r\n\r\n");
        reply.break_off();
    }),
    ("a length that is no number", |_, reply| {
        reply.head(200, &[("Content-Type", "application/json"), ("Content-Length", "ten")]);
        reply.hang();
    }),
    ("two lengths", |_, reply| {
        reply.head(
            200,
            &[("Content-Type", "application/json"), ("Content-Length", "2"), ("Content-Length", "3")],
        );
        reply.hang();
    }),
    ("a head that is too large", |_, reply| {
        let large = "x".repeat(100_000);
        reply.head(200, &[("X", &large)]);
        reply.hang();
    }),
    ("a body that is cut short", |_, reply| {
        reply.head(200, &[("Content-Type", "application/json"), ("Content-Length", "100")]);
        reply.raw("{\"jsonrpc\":\"2.0\",");
        reply.break_off();
    }),
    ("a body that is reset", |_, reply| {
        reply.head(200, &[("Content-Type", "application/json"), ("Content-Length", "100")]);
        reply.raw("{\"jsonrpc\":\"2.0\",");
        reply.reset();
    }),
    ("chunks without an end", |_, reply| {
        reply.head(200, &[("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]);
        reply.chunk("{\"jsonrpc\":\"2.0\"}");
        reply.break_off();
    }),
    ("chunks that are none", |_, reply| {
        reply.head(200, &[("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]);
        reply.raw("zz\r\n{}\r\n");
        reply.hang();
    }),
    ("a stream that only begins", |_, reply| {
        reply.head(
            200,
            &[("Content-Type", "application/json"), ("Content-Encoding", "gzip"), ("Content-Length", "3")],
        );
        reply.raw("abc");
    }),
];

#[test]
fn what_breaks_after_it_was_sent_failed_with_an_unknown_effect_and_is_not_sent_again() {
    for (what, script) in BROKEN {
        let upstream = Upstream::start(script);
        let sidecar = at(&upstream.url());
        println!("{what}");
        fails(&sidecar, "upstream_failed", 1502, "unknown");
        assert_eq!(upstream.count(), 5, "{what}");
    }
    for (what, script) in &BROKEN[..7] {
        let upstream = Upstream::start(script);
        let sidecar = at(&upstream.url());
        println!("{what}, without an id");
        fails_without_id(&sidecar, "upstream_failed", 1502, "unknown");
        assert_eq!(upstream.count(), 4, "{what}");
    }
}

#[test]
fn an_answer_to_a_call_that_is_no_message_or_too_large_failed_too() {
    let bodies = ["", "null", "{", "<html></html>", "{\"jsonrpc\":\"2.0\"}x"];
    for body in bodies {
        let upstream = Upstream::json(body);
        let answer = at(&upstream.url()).client().ask(&call(1).field("X-Request-Id", "r"));
        println!("{body:?}");
        is_error(&answer.body, "1", 1502, "upstream_failed", "unknown", "r", "");
    }
    let upstream = Upstream::json(format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{{\"x\":\"{}\"}}}}",
        "x".repeat(3000)
    ));
    let sidecar = Sidecar::with_config(&format!(
        "[limits]\nresponse_body = \"2KiB\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    ));
    let answer = sidecar.client().ask(&call(1).field("X-Request-Id", "r"));
    is_error(&answer.body, "1", 1502, "upstream_failed", "unknown", "r", "");
}

#[test]
fn on_an_open_stream_the_error_is_its_last_event_and_the_stream_ends_properly() {
    let ways: [(&str, Script); 5] = [
        ("FIN", |_, reply| reply.break_off()),
        ("RST", |_, reply| reply.reset()),
        ("a proper end", |_, reply| reply.end()),
        ("another request's response", |_, reply| {
            reply.event(&result(8));
            reply.end();
        }),
        ("an event that is too large", |_, reply| {
            reply.chunk(format!("data: {}", "x".repeat(5000)));
            reply.hang();
        }),
    ];
    for (what, way) in ways {
        for (post, id) in [(call(7), "7"), (modern_call("\"m\""), "\"m\"")] {
            let upstream = Upstream::start(move |request, reply| {
                reply.sse(&[]);
                let token = request.json()["params"]["_meta"]["progressToken"].to_string();
                reply.event(&progress(&token, 2).replace("\"progress\":2", "\"progress\":2,\"total\":4"));
                // The broken stream must not overtake what it carried.
                way(request, reply);
            });
            let sidecar = Sidecar::with_config(&format!(
                "[limits]\nevent = \"4KiB\"\n[upstreams.mcp]\nurl = \"{}\"\n",
                upstream.url()
            ));
            println!("{what} {id}");
            let answer = sidecar.client().ask(&secretive(&post, "r"));
            let events = sse::read(&answer.body).events;
            assert_eq!(answer.status(), 200);
            assert_eq!(answer.head.field("transfer-encoding"), Some("chunked"));
            let last = events.last().unwrap();
            let reached = if what == "RST" && events.len() == 1 {
                ""
            } else {
                ",\"oz0/progress\":{\"progress\":2,\"total\":4}"
            };
            is_error(last.data.as_bytes(), id, 1502, "upstream_failed", "unknown", "r", reached);
            assert_eq!(upstream.count(), 1);
            let line = sidecar.wait_lines(1)[0].clone();
            assert_eq!(
                (&line["outcome"], &line["reason"]),
                (&"failed".into(), &"upstream_failed".into()),
                "{line}"
            );
        }
    }
}

#[test]
fn a_stream_of_a_get_that_breaks_just_ends() {
    for reset in [false, true] {
        let upstream = Upstream::start(move |_, reply| {
            reply.sse(&[]);
            reply.chunk(": hello\n\nid: 1\ndata: {}\n\n");
            if reset { reply.reset() } else { reply.break_off() }
        });
        let answer = at(&upstream.url()).client().ask(&Post::get());
        assert_eq!(answer.status(), 200);
        assert!(sse::read(&answer.body).events.len() <= 1, "{}", answer.text());
        assert!(!answer.text().contains("error"));
    }
}

#[test]
fn a_reused_connection_that_dies_with_the_request_does_not_make_it_twice() {
    for reset in [false, true] {
        let upstream = Upstream::start(move |request, reply| match request.number {
            1 if reset => reply.reset(),
            1 => reply.break_off(),
            _ => reply.json(200, &[], &result(&request.json()["id"])),
        });
        let sidecar = at(&upstream.url());
        let node = sidecar.client();
        assert_eq!(node.ask(&call(1)).text(), result(1));
        let lost = node.ask(&call(2).field("X-Request-Id", "r"));
        is_error(&lost.body, "2", 1502, "upstream_failed", "unknown", "r", "");
        assert_eq!(upstream.wait_request(1).connection, 0, "it was reused");
        assert_eq!(node.ask(&call(3)).text(), result(3));
        let bodies: Vec<_> = upstream.requests().into_iter().map(|one| one.body).collect();
        assert_eq!(bodies.iter().filter(|body| **body == call(2).body).count(), 1);
        assert_eq!(bodies.len(), 3);
    }
}

#[test]
fn a_connection_found_closed_before_the_first_byte_is_replaced() {
    let closing = Gate::new();
    let close = closing.clone();
    let upstream = Upstream::start(move |request, reply| {
        reply.json(200, &[], &result(&request.json()["id"]));
        if request.number == 0 {
            close.pass();
            reply.break_off();
        }
    });
    let sidecar = at(&upstream.url());
    let node = sidecar.client();
    assert_eq!(node.ask(&call(1)).text(), result(1));
    closing.open();
    upstream.wait_closed(0);
    assert_eq!(node.ask(&call(2)).text(), result(2));
    assert_eq!((upstream.count(), upstream.connections().len()), (2, 2));
}

#[test]
fn a_status_of_the_upstream_s_own_is_no_failure_and_passes_as_it_came() {
    for status in [400, 401, 403, 404, 405, 409, 422, 500, 502, 503, 504] {
        let body = format!("{{\"error\" : {status}}}");
        let told = body.clone();
        let upstream = Upstream::start(move |_, reply| {
            reply.json(
                status,
                &[("WWW-Authenticate", "Bearer resource_metadata=\"x\""), ("X-Own", "1")],
                &told,
            );
        });
        let sidecar = at(&upstream.url());
        for post in [call(1), modern_call(1), Post::get(), Post::delete()] {
            let answer: Response = sidecar.client().ask(&post);
            assert_eq!((answer.status(), answer.text()), (status, body.clone()));
            assert_eq!(answer.head.field("x-own"), Some("1"));
            assert_eq!(answer.head.field("www-authenticate"), Some("Bearer resource_metadata=\"x\""));
        }
    }
}
