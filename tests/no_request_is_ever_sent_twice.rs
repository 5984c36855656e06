//! The sidecar never makes a request again by itself. The only repeat is a connection that was found
//! closed before one byte of the request was written. The upstream's own count is what decides.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};

use support::{
    Post, Sidecar, Upstream,
    http::Response,
    mcp::{call, cancel, modern_call, result},
};

fn assert_lost(response: &Response, id: u32, reason: &str, outcome: &str) {
    assert_eq!(response.status(), 200, "{}", response.text());
    let answer = response.json();
    assert_eq!(answer["id"], id);
    let data = &answer["error"]["data"];
    assert_eq!((&data["reason"], &data["outcome"]), (&reason.into(), &outcome.into()));
    assert!(!response.text().contains("oz0/retryable"));
    assert_eq!(response.head.field("retry-after"), None);
}

#[test]
fn a_connection_that_dies_under_a_request_is_not_replaced() {
    for reset in [false, true] {
        let upstream = Upstream::start(move |request, reply| match request.number {
            0 | 2 => reply.json(200, &[], &result(request.number)),
            _ if reset => reply.reset(),
            _ => reply.break_off(),
        });
        let sidecar = Sidecar::before(&upstream);
        sidecar.client().ask(&call(0));
        assert_lost(&sidecar.client().ask(&call(1)), 1, "upstream_failed", "unknown");
        assert_eq!(upstream.wait_request(1).connection, 0, "it was a connection from the pool");
        assert_eq!(upstream.count(), 2);
        assert_eq!(sidecar.client().ask(&call(2)).text(), result(2));
        let calls: Vec<_> = (0..3).map(|number| upstream.wait_request(number).json()["id"].clone()).collect();
        assert_eq!(calls, [0, 1, 2]);
        assert_eq!(sidecar.wait_line(|line| line["id"] == 1)["reused"], true);
    }
}

#[test]
fn nothing_that_is_posted_is_sent_again_whatever_it_is() {
    let note = |method: &str| Post::legacy(format!(r#"{{"jsonrpc":"2.0","method":"{method}"}}"#));
    let request = |method: &str| Post::legacy(format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}"}}"#));
    let posts = [
        call(1),
        modern_call(1),
        request("initialize"),
        request("tools/list"),
        request("ping"),
        note("notifications/initialized"),
        cancel(9),
        Post::legacy(r#"{"jsonrpc":"2.0","id":"e","result":{}}"#),
        Post::legacy(format!("[{}]", String::from_utf8(call(1).body).unwrap()))
            .field("MCP-Protocol-Version", "2025-03-26"),
        Post::get(),
        Post::delete(),
    ];
    for fresh in [true, false] {
        for post in &posts {
            let first = usize::from(!fresh);
            let upstream = Upstream::start(move |request, reply| {
                if request.number < first {
                    return reply.json(200, &[], &result(0));
                }
                reply.break_off();
            });
            let sidecar = Sidecar::before(&upstream);
            if !fresh {
                sidecar.client().ask(&call(0));
            }
            let response = sidecar.client().ask(post);
            let status = response.status();
            let answers = response.text().contains("\"id\":1");
            assert_eq!(status, if answers { 200 } else { 502 }, "{post:?}");
            sidecar.wait_lines(first + 1);
            assert_eq!(upstream.count(), first + 1, "{post:?}");
        }
    }
}

#[test]
fn a_connection_that_was_closed_while_it_was_idle_is_replaced() {
    // Two answers, after each of which the connection is closed although it was not announced.
    let upstream = Upstream::start(|request, reply| {
        reply.json(200, &[], &result(request.number));
        reply.break_off();
    });
    let sidecar = Sidecar::before(&upstream);
    for number in 0..20 {
        let response = sidecar.client().ask(&call(number));
        assert_eq!(response.text(), result(number));
        // The close is known to the sidecar's side of the socket before the next request.
        upstream.wait_closed(number);
        assert_eq!(upstream.count(), number + 1);
    }
}

#[test]
fn bytes_that_nobody_asked_for_end_an_idle_connection() {
    let late = AtomicUsize::new(0);
    let upstream = Upstream::start(move |request, reply| {
        reply.json(200, &[], &result(request.number));
        if late.fetch_add(1, Ordering::Relaxed) == 0 {
            reply.raw("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    assert_eq!(client.ask(&call(0)).text(), result(0));
    upstream.wait_closed(0);
    assert_eq!(client.ask(&call(1)).text(), result(1), "no answer is another request's");
    assert_eq!(upstream.count(), 2);
}

#[test]
fn a_server_that_cannot_be_reached_got_nothing() {
    // Bound, so that nobody else gets the port, but not listening.
    let deaf = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    deaf.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let url = format!("http://{}/mcp", deaf.local_addr().unwrap().as_socket().unwrap());
    let sidecar = Sidecar::with_flags(&["--upstream", &url]);
    assert_lost(&sidecar.client().ask(&call(1)), 1, "upstream_unreachable", "not_sent");
    let line = sidecar.wait_line(|line| line["id"] == 1);
    let told = ["status", "outcome", "reason", "upstream_status"].map(|name| line[name].clone());
    assert_eq!(serde_json::json!(told), serde_json::json!([200, "failed", "upstream_unreachable", null]));
    let note = Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    assert_eq!(sidecar.client().ask(&note).status(), 502);
}

#[test]
fn an_error_status_is_passed_and_not_tried_again() {
    let statuses = [400, 401, 403, 404, 408, 409, 425, 500, 502, 503, 504];
    let upstream = Upstream::start(move |request, reply| {
        reply.json(statuses[request.number], &[("Connection", "close")], "{\"no\":1}");
        reply.break_off();
    });
    let sidecar = Sidecar::before(&upstream);
    for (number, status) in statuses.into_iter().enumerate() {
        let response = sidecar.client().ask(&call(1));
        assert_eq!((response.status(), response.text().as_str()), (status, "{\"no\":1}"));
        assert_eq!(upstream.count(), number + 1);
    }
}
