//! Whatever is no call's result passes with its status, headers and body as the upstream wrote it,
//! however it comes: early, in bits, without a body, in another version of HTTP.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use support::{
    Post, Request, Sidecar, Upstream,
    http::{Head, Response},
    mcp::{call, event, progress, result},
};

const NOTE: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
const INITIALIZE: &str =
    r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}"#;

/// What one request became on its other side.
fn crossed(upstream: &Upstream, sidecar: &Sidecar, post: &Post) -> (Request, Response) {
    let number = upstream.count();
    let response = sidecar.client().ask(post);
    (upstream.wait_request(number), response)
}

#[test]
fn a_lost_session_is_told_with_the_upstreams_own_status() {
    const STATUSES: [u16; 4] = [404, 400, 401, 410];
    let body = "{\"jsonrpc\":\"2.0\",\"id\":null,\"error\":{\"code\":-32000,\"message\":\"lost\"}}\n";
    let upstream = Upstream::start(move |request, reply| match request.head.field("mcp-session-id") {
        Some("sess-OLD") => {
            let kind = [("Content-Type", "application/json; charset=utf-8")];
            reply.json(STATUSES[request.number / 3], &kind, body);
        }
        _ => reply.json(200, &[], &result(0)),
    });
    let sidecar = Sidecar::before(&upstream);
    for status in STATUSES {
        for post in [call(1), Post::get(), Post::delete()] {
            let response = sidecar.client().ask(&post.field("Mcp-Session-Id", "sess-OLD"));
            assert_eq!((response.status(), response.text().as_str()), (status, body));
            assert_eq!(response.head.all("content-type"), ["application/json; charset=utf-8"]);
        }
    }
    assert_eq!(upstream.count(), 3 * STATUSES.len(), "nothing is initialized by the sidecar");
    assert_eq!(sidecar.client().ask(&Post::new(INITIALIZE)).text(), result(0));
}

#[test]
fn a_challenge_and_a_refusal_of_the_upstream_are_its_own() {
    let challenge =
        "Bearer resource_metadata=\"https://api.example/.well-known/oauth-protected-resource/mcp\"";
    let upstream = Upstream::start(move |request, reply| match request.number {
        0 => reply.json(401, &[("WWW-Authenticate", challenge), ("WWW-Authenticate", "Basic")], "{\"a\":1}"),
        1 => reply.json(403, &[("Content-Type", "text/plain")], "foreign Origin"),
        2 => reply.json(421, &[("Content-Type", "text/plain")], "foreign Host"),
        3 => reply.head(401, &[("Content-Length", "0")]),
        _ => reply.json(200, &[], &result(1)),
    });
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&call(1));
    assert_eq!((response.status(), response.text().as_str()), (401, "{\"a\":1}"));
    assert_eq!(response.head.all("www-authenticate"), [challenge, "Basic"]);
    for (status, body) in [(403, "foreign Origin"), (421, "foreign Host"), (401, "")] {
        let response = sidecar.client().ask(&call(1));
        assert_eq!((response.status(), response.text().as_str()), (status, body));
    }
    assert_eq!(sidecar.client().ask(&call(1)).text(), result(1));
}

#[test]
fn a_401_ends_no_other_exchange_of_its_session() {
    let gate = support::Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |request, reply| match request.number {
        0 => {
            reply.sse(&[]);
            reply.event(&progress(1, 1));
            pass.pass();
            reply.event(&result(1));
            reply.end();
        }
        _ => reply.json(401, &[("WWW-Authenticate", "Bearer")], "{}"),
    });
    let sidecar = Sidecar::before(&upstream);
    let running = sidecar.client();
    running.send(&call(1));
    running.events(1);
    assert_eq!(sidecar.client().ask(&call(2)).status(), 401);
    gate.open();
    assert_eq!(running.response().text(), event(progress(1, 1)) + &event(result(1)));
}

#[test]
fn well_known_documents_are_relayed_by_their_path_and_made_by_nobody() {
    let upstream = Upstream::start(|request, reply| match request.head.line.split(' ').nth(1).unwrap() {
        "/.well-known/oauth-protected-resource/mcp" => reply.json(200, &[], "{ \"resource\" : 1.0 }"),
        _ => reply.json(404, &[("Content-Type", "text/plain")], "no"),
    });
    let sidecar = Sidecar::before(&upstream);
    let ask = |path: &str| sidecar.client().ask(&Post::get().at(path).field("Accept", "application/json"));
    let found = ask("/.well-known/oauth-protected-resource/mcp");
    assert_eq!((found.status(), found.text().as_str()), (200, "{ \"resource\" : 1.0 }"));
    for path in ["/.well-known/oauth-protected-resource", "/.well-known/oauth-authorization-server"] {
        let missing = ask(path);
        assert_eq!((missing.status(), missing.text().as_str()), (404, "no"));
    }
    let paths: Vec<_> = (0..3).map(|number| upstream.wait_request(number).head.line).collect();
    assert_eq!(
        paths,
        [
            "GET /.well-known/oauth-protected-resource/mcp HTTP/1.1",
            "GET /.well-known/oauth-protected-resource HTTP/1.1",
            "GET /.well-known/oauth-authorization-server HTTP/1.1"
        ]
    );
}

#[test]
fn edge_answers_to_get_and_delete_are_not_altered() {
    let body = "{\"jsonrpc\":\"2.0\",\"error\":{\"code\":-32000,\"message\":\"no\"}}";
    let upstream = Upstream::start(move |request, reply| match request.number {
        0 => reply.json(405, &[("Allow", "POST, DELETE")], body),
        1 | 5 => reply.json(404, &[], body),
        2 => reply.json(406, &[], body),
        3 => reply.head(200, &[("Content-Length", "0")]),
        4 => reply.head(204, &[]),
        _ => reply.json(405, &[("Allow", "POST")], body),
    });
    let sidecar = Sidecar::before(&upstream);
    for (status, allow) in [(405, Some("POST, DELETE")), (404, None), (406, None)] {
        let (request, response) = crossed(&upstream, &sidecar, &Post::get());
        assert_eq!((response.status(), response.text().as_str()), (status, body));
        assert_eq!(response.head.field("allow"), allow);
        assert_eq!((request.method(), request.head.field("content-length")), ("GET", None));
        assert_eq!(request.head.all("accept"), ["text/event-stream"]);
    }
    for (status, allow, body) in
        [(200, None, ""), (204, None, ""), (404, None, body), (405, Some("POST"), body)]
    {
        let (request, response) = crossed(&upstream, &sidecar, &Post::delete());
        assert_eq!((response.status(), response.text().as_str()), (status, body));
        assert_eq!(response.head.field("allow"), allow);
        assert_eq!((request.method(), request.body.len()), ("DELETE", 0));
        if status == 204 {
            assert_eq!(response.head.all("content-length").len(), 0);
            assert_eq!(response.head.all("transfer-encoding").len(), 0);
        }
    }
    let outcomes = sidecar.wait_lines(7);
    assert!(outcomes.iter().all(|line| line["outcome"] != "failed"), "{outcomes:?}");
}

#[test]
fn head_and_options_are_carried_too() {
    let upstream = Upstream::start(|request, reply| match request.method() {
        "HEAD" => reply.head(200, &[("Content-Length", "1234"), ("Content-Type", "application/json")]),
        _ => {
            let cors = [
                ("Access-Control-Allow-Origin", "http://127.0.0.1:6274"),
                ("Access-Control-Allow-Headers", "mcp-session-id"),
                ("Allow", "GET, POST"),
            ];
            reply.head(204, &cors);
        }
    });
    let sidecar = Sidecar::before(&upstream);
    let mut head = Post::get().field("Connection", "close");
    head.method = "HEAD";
    let client = sidecar.client();
    client.send(&head);
    client.closed();
    let bytes = client.bytes();
    let answer = Head::read(&bytes).unwrap();
    assert_eq!((answer.status(), answer.len), (200, bytes.len()), "no body follows");
    assert_eq!(answer.all("content-length"), ["1234"]);
    let mut options =
        Post::get().field("Origin", "http://127.0.0.1:6274").field("Access-Control-Request-Method", "POST");
    options.method = "OPTIONS";
    let (request, response) = crossed(&upstream, &sidecar, &options);
    assert_eq!((request.method(), response.status()), ("OPTIONS", 204));
    assert_eq!(request.head.all("access-control-request-method"), ["POST"]);
    assert_eq!(response.head.all("access-control-allow-origin"), ["http://127.0.0.1:6274"]);
    assert_eq!(response.head.all("access-control-allow-headers"), ["mcp-session-id"]);
    assert_eq!(response.head.all("allow"), ["GET, POST"]);
    let methods: Vec<_> = sidecar.wait_lines(2).iter().map(|line| line["http_method"].clone()).collect();
    assert_eq!(methods, ["HEAD", "OPTIONS"]);
}

#[test]
fn answers_to_notifications_are_not_altered() {
    let upstream = Upstream::start(|request, reply| match request.number {
        0 => reply.head(202, &[("Content-Length", "0")]),
        1 => reply.json(202, &[("Content-Type", "text/plain")], "Accepted"),
        2 => reply.head(204, &[]),
        3 => reply.head(200, &[("Content-Length", "0"), ("Content-Type", "application/json")]),
        4 => reply.head(200, &[("Content-Length", "0")]),
        _ => reply.json(400, &[], "{\"no\":1}"),
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    let wanted = [
        (202, None, ""),
        (202, Some("text/plain"), "Accepted"),
        (204, None, ""),
        (200, Some("application/json"), ""),
        (200, None, ""),
        (400, Some("application/json"), "{\"no\":1}"),
    ];
    for (status, kind, body) in wanted {
        let response = client.ask(&Post::legacy(NOTE));
        assert_eq!((response.status(), response.text().as_str()), (status, body));
        assert_eq!(response.head.field("content-type"), kind);
        assert_eq!(response.head.all("transfer-encoding").len(), 0);
        if status == 204 {
            assert_eq!(response.head.all("content-length").len(), 0);
        }
    }
    let got = String::from_utf8(client.bytes()).unwrap();
    assert_eq!(got.matches("HTTP/1.1 ").count(), wanted.len(), "all over one connection");
}

#[test]
fn a_node_that_expects_100_is_told_to_go_on_by_the_sidecar() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let body = String::from_utf8(call(1).body)
        .unwrap()
        .replace("{}", &format!("{{\"a\":\"{}\"}}", "x".repeat(4096)));
    let post = Post::legacy(body).field("Expect", "100-continue");
    let whole = post.bytes(&sidecar.listen);
    let head = whole.len() - post.body.len();
    let client = sidecar.client();
    client.write(&whole[..head]);
    assert_eq!(client.response().head.line, "HTTP/1.1 100 Continue");
    assert_eq!(upstream.count(), 0);
    client.write(&whole[head..]);
    assert_eq!(client.response().text(), result(1));
    let request = upstream.wait_request(0);
    assert_eq!((request.head.field("expect"), &request.body), (None, &post.body));
    let other = sidecar.client().ask(&call(1).field("Expect", "the-impossible"));
    assert_eq!(other.status(), 417);
}

#[test]
fn an_upstream_may_answer_before_it_has_read_the_request() {
    const HEADS: [&str; 3] = [
        "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 5\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno",
        "HTTP/1.1 413 Payload Too Large\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno",
    ];
    let number = std::sync::atomic::AtomicUsize::new(0);
    let upstream = Upstream::by_connection(move |reply| {
        let number = number.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        reply.received(|bytes| bytes.len() > 2048);
        reply.raw(HEADS[number % 3]);
        if number >= 3 {
            // Closed on what it did not read: the answer has to survive the reset.
            reply.break_off();
        }
    });
    let sidecar = Sidecar::before(&upstream);
    let body = String::from_utf8(call(1).body)
        .unwrap()
        .replace("{}", &format!("{{\"a\":\"{}\"}}", "x".repeat(4_000_000)));
    let post = Post::legacy(body);
    for sent in [3, 6] {
        let busy = sidecar.client().ask(&post);
        assert_eq!(busy.json()["result"]["_meta"]["oz0/retry_after"], 5, "{}", busy.text());
        let refused = sidecar.client().ask(&post);
        assert_eq!((refused.status(), refused.text().as_str()), (401, "no"));
        assert_eq!(refused.head.all("www-authenticate"), ["Bearer"]);
        assert_eq!(sidecar.client().ask(&post).status(), 413);
        assert_eq!(upstream.connections().len(), sent, "each call went out once");
    }
}

#[test]
fn an_interim_response_is_not_taken_for_the_answer() {
    let upstream = Upstream::start(|request, reply| {
        let early = "HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n";
        reply.raw(format!("{early}HTTP/1.1 102 Processing\r\n\r\n{early}"));
        match request.number {
            0 => reply.json(200, &[], &result(1)),
            _ => reply.json(429, &[("Retry-After", "2")], "{}"),
        }
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    let last = || loop {
        // Whether the interim ones are passed on is not the point.
        let response = client.response();
        if response.status() >= 200 {
            break response;
        }
    };
    client.send(&call(1));
    assert_eq!(last().text(), result(1));
    client.send(&call(1));
    assert_eq!(last().json()["result"]["_meta"]["oz0/retry_after"], 2);
}

#[test]
fn an_upstream_that_switches_protocols_unasked_has_failed() {
    let upstream = Upstream::start(|_, reply| {
        reply.raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
        reply.raw(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}", result(1).len(), result(1)));
    });
    let sidecar = Sidecar::before(&upstream);
    let response =
        sidecar.client().ask(&call(1).field("Connection", "Upgrade").field("Upgrade", "websocket"));
    assert_eq!(response.status(), 200);
    assert_eq!(response.json()["error"]["data"]["reason"], "upstream_failed");
    assert_eq!(sidecar.client().ask(&Post::get()).status(), 502);
    assert_eq!(upstream.count(), 2);
}

#[test]
fn an_http_1_0_client_is_answered_without_chunks() {
    let upstream = Upstream::start(|request, reply| match request.number {
        0 => reply.json(200, &[], &result(1)),
        1 => {
            reply.sse(&[]);
            reply.event(&progress(1, 1));
            reply.event(&result(1));
            reply.end();
        }
        _ => {
            reply.raw("HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n");
            reply.raw(result(1));
            reply.break_off();
        }
    });
    let sidecar = Sidecar::before(&upstream);
    let bodies = [result(1), event(progress(1, 1)) + &event(result(1)), result(1)];
    for (number, body) in bodies.iter().enumerate() {
        let whole = String::from_utf8(call(1).bytes(&sidecar.listen)).unwrap();
        let client = sidecar.client();
        client.write(whole.replacen("HTTP/1.1", "HTTP/1.0", 1));
        client.closed();
        let bytes = client.bytes();
        let head = Head::read(&bytes).unwrap();
        assert_eq!(head.status(), 200);
        assert_eq!(head.field("transfer-encoding"), None);
        assert_eq!(String::from_utf8_lossy(&bytes[head.len..]), *body);
        let request = upstream.wait_request(number);
        assert!(request.head.line.ends_with(" HTTP/1.1"), "each hop speaks its own version");
        assert!(request.head.all("via")[0].starts_with("1.0 "));
    }
}

#[test]
fn what_the_upstream_does_is_not_asked_of_it_by_itself() {
    let upstream = Upstream::start(|request, reply| match request.number % 2 {
        0 => reply.json(401, &[("WWW-Authenticate", "Bearer")], "{}"),
        _ => reply.break_off(),
    });
    let sidecar = Sidecar::before(&upstream);
    assert_eq!(upstream.connections().len(), 0);
    for asked in 1..=10 {
        sidecar.client().ask(&call(1));
        assert_eq!(upstream.count(), asked);
    }
    sidecar.wait_lines(10);
    assert!(upstream.connections().len() <= 10);
}
