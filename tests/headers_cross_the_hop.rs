//! Which headers pass, which end at the hop, and which the sidecar adds.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use support::{
    Post, Request, Sidecar, Upstream,
    http::{Head, Response},
    mcp::{MODERN, call, event, modern_call, result},
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

fn names(head: &Head) -> Vec<String> {
    head.fields.iter().map(|(name, _)| name.to_ascii_lowercase()).collect()
}

#[test]
fn headers_of_one_hop_end_there_in_both_directions() {
    let upstream = Upstream::start(|_, reply| {
        let fields = [
            ("Connection", "close, X-Hop"),
            ("Connection", "X-Other"),
            ("X-Hop", "1"),
            ("x-other", "1"),
            ("Keep-Alive", "timeout=5"),
            ("Proxy-Authenticate", "Basic"),
            ("Proxy-Connection", "close"),
            ("Upgrade", "h2c"),
            ("Trailer", "X-T"),
            ("X-Anything", "a  b"),
            ("Retry-After", "3"),
            ("WWW-Authenticate", "Bearer"),
        ];
        reply.json(200, &fields, &result(1));
        reply.break_off();
    });
    let sidecar = Sidecar::before(&upstream);
    let post = call(1)
        .field("Connection", "keep-alive, X-Priv")
        .more("Connection", "x-more")
        .field("X-Priv", "1")
        .field("X-More", "1")
        .field("Proxy-Authorization", "Basic Zm9v")
        .field("TE", "trailers")
        .field("Keep-Alive", "300")
        .field("Upgrade", "h2c")
        .field("Proxy-Connection", "x")
        .field("Trailer", "X-T")
        .field("Authorization", "Bearer T")
        .field("X-Anything", "a  b")
        .field("User-Agent", "node/1");
    let client = sidecar.client();
    let response = client.ask(&post);
    let request = upstream.wait_request(0);
    for name in ["x-priv", "x-more", "proxy-authorization", "te", "keep-alive", "upgrade", "proxy-connection"]
    {
        assert_eq!(request.head.field(name), None, "{name}");
    }
    assert!(request.head.all("connection").is_empty() && request.head.all("trailer").is_empty());
    for (name, value) in [("authorization", "Bearer T"), ("x-anything", "a  b"), ("user-agent", "node/1")] {
        assert_eq!(request.head.all(name), [value]);
    }
    for name in [
        "connection",
        "x-hop",
        "x-other",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "upgrade",
        "trailer",
    ] {
        assert_eq!(response.head.field(name), None, "{name}");
    }
    for (name, value) in [("x-anything", "a  b"), ("retry-after", "3"), ("www-authenticate", "Bearer")] {
        assert_eq!(response.head.all(name), [value]);
    }
    assert_eq!(client.ask(&call(1)).status(), 200, "the node's connection is its own");
}

#[test]
fn what_goes_upstream_is_the_nodes_and_little_more() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let (request, response) = crossed(&upstream, &sidecar, &call(1));
    let mut names = names(&request.head);
    names.sort();
    assert_eq!(
        names,
        [
            "accept",
            "accept-encoding",
            "content-length",
            "content-type",
            "host",
            "mcp-protocol-version",
            "mcp-session-id",
            "traceparent",
            "via",
            "x-request-id"
        ]
    );
    assert_eq!(request.head.all("accept-encoding"), ["identity"]);
    assert_eq!(request.head.field("x-request-id"), response.head.field("x-request-id"));
    assert_eq!(request.head.field("content-length"), Some("114"));
}

#[test]
fn via_names_this_instance_and_its_own_name_coming_in_is_a_loop() {
    let upstream = Upstream::json(result(1));
    let (sidecar, other) = (Sidecar::before(&upstream), Sidecar::before(&upstream));
    let post = call(1).field("Via", "1.0 fred, HTTP/2 edge:8080 (a, comment)");
    let (request, response) = crossed(&upstream, &sidecar, &post);
    let via = request.head.all("via");
    let own = via[1].strip_prefix("1.1 ").unwrap().to_owned();
    assert_eq!(via, ["1.0 fred, HTTP/2 edge:8080 (a, comment)", &format!("1.1 {own}")]);
    assert_eq!(response.head.field("via"), None, "Via goes on requests");
    let (request, _) = crossed(&upstream, &other, &call(1).field("Via", &format!("1.1 {own}")));
    assert_eq!(request.head.all("via").len(), 2, "another instance's is none");
    assert_ne!(request.head.all("via")[1], format!("1.1 {own}"));
    let seen = upstream.count();
    for via in [format!("1.1 {own}"), format!("1.1 x,2\t  {own} (again)"), format!("HTTP/1.1 {own}")] {
        for post in [call(1), Post::legacy(NOTE), Post::get(), Post::delete()] {
            let response = sidecar.client().ask(&post.field("Via", "1.1 a").more("Via", &via));
            assert_eq!(response.status(), 502, "{via}");
        }
    }
    assert_eq!(upstream.count(), seen);
}

#[test]
fn host_is_the_upstreams_own_and_alone() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let port = sidecar.listen.rsplit(':').next().unwrap();
    for host in [sidecar.listen.clone(), format!("localhost:{port}"), "localhost".to_owned()] {
        let (request, _) = crossed(&upstream, &sidecar, &call(1).field("Host", &host));
        assert_eq!(request.head.all("host"), [upstream.address.as_str()]);
    }
}

#[test]
fn origin_and_authorization_are_forwarded() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let post = call(1).field("Origin", "http://localhost:6274").field("Authorization", "Bearer a.b-c=");
    let (request, _) = crossed(&upstream, &sidecar, &post);
    assert_eq!(request.head.all("origin"), ["http://localhost:6274"]);
    assert_eq!(request.head.all("authorization"), ["Bearer a.b-c="]);
    let (request, _) = crossed(&upstream, &sidecar, &call(1));
    assert_eq!((request.head.field("origin"), request.head.field("authorization")), (None, None));
}

#[test]
fn an_upstream_with_a_bearer_of_its_own_is_sent_that_one_only() {
    let upstream = Upstream::json(result(1));
    let folder = tempfile::TempDir::new().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "own-token\n").unwrap();
    let sidecar = Sidecar::with_config(&format!(
        "[auth]\nopen = true\n[upstreams.mcp]\nurl = \"{}\"\nbearer = {{ file = \"{}\" }}\nheaders = {{ \"X-Team\" = \"agents\" }}\n",
        upstream.url(),
        token.display()
    ));
    for post in [call(1), Post::legacy(NOTE), Post::get(), Post::delete()] {
        let post =
            post.field("Authorization", "Bearer node").more("Authorization", "Basic x").field("X-Team", "no");
        let (request, _) = crossed(&upstream, &sidecar, &post);
        assert_eq!(request.head.all("authorization"), ["Bearer own-token"]);
        assert_eq!(request.head.all("x-team"), ["agents"]);
    }
}

#[test]
fn a_session_id_comes_and_goes_unchanged_and_once() {
    let upstream = Upstream::start(|request, reply| match request.number {
        0 => reply.json(200, &[("Mcp-Session-Id", "sess-A"), ("X-Trace", "1")], &result(0)),
        1 => {
            reply.sse(&[("Mcp-Session-Id", "sess-A"), ("X-Trace", "1")]);
            reply.event(&result(0));
            reply.end();
        }
        2 => reply.json(200, &[("mcp-session-id", "sess-A"), ("X-Trace", "1")], &result(0)),
        _ => reply.json(200, &[], &result(1)),
    });
    let sidecar = Sidecar::before(&upstream);
    for _ in 0..3 {
        let response = sidecar.client().ask(&Post::new(INITIALIZE));
        assert_eq!(response.head.all("mcp-session-id"), ["sess-A"]);
        assert_eq!(response.head.all("x-trace"), ["1"]);
    }
    for post in [Post::legacy(NOTE), call(1), Post::get(), Post::delete()] {
        let post = post.field("MCP-SESSION-ID", "sess-A").field("Last-Event-ID", "7/\"x\"");
        let (request, response) = crossed(&upstream, &sidecar, &post);
        assert_eq!(request.head.all("mcp-session-id"), ["sess-A"]);
        assert_eq!(request.head.all("mcp-protocol-version"), ["2025-11-25"]);
        assert_eq!(request.head.all("last-event-id"), ["7/\"x\""]);
        assert_eq!(response.head.field("mcp-session-id"), None);
        let (request, _) = crossed(&upstream, &sidecar, &post.without("MCP-SESSION-ID"));
        assert_eq!(request.head.field("mcp-session-id"), None, "none is added");
    }
    let seen = upstream.count();
    let twice = call(1).more("Mcp-Session-Id", "sess-B");
    assert_eq!(sidecar.client().ask(&twice).status(), 400, "none is picked or joined");
    assert_eq!(upstream.count(), seen);
}

#[test]
fn cookies_pass_and_are_kept_for_nobody() {
    let upstream = Upstream::start(|_, reply| {
        let cookies = [("Set-Cookie", "lb=node-b; Path=/; HttpOnly"), ("Set-Cookie", "x=1")];
        reply.json(200, &cookies, &result(1));
    });
    let sidecar = Sidecar::before(&upstream);
    let (_, response) = crossed(&upstream, &sidecar, &Post::new(INITIALIZE));
    assert_eq!(response.head.all("set-cookie"), ["lb=node-b; Path=/; HttpOnly", "x=1"]);
    let (request, _) = crossed(&upstream, &sidecar, &call(1).field("Cookie", "lb=node-b; x=1"));
    assert_eq!(request.head.all("cookie"), ["lb=node-b; x=1"]);
    let (request, _) = crossed(&upstream, &sidecar, &call(1));
    assert_eq!(request.head.field("cookie"), None);
}

#[test]
fn routing_headers_pass_and_belong_to_their_request_alone() {
    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    let own = [
        ("Mcp-Protocol-Version", MODERN),
        ("Mcp-Method", "tools/call"),
        ("Mcp-Name", "slow"),
        ("Mcp-Param-Region", "eu"),
        ("Mcp-Param-Odd", "=?base64?5rWL6K+V?="),
        ("Mcp-Unknown", "1"),
        ("traceparent", PARENT),
    ];
    let post = own.iter().fold(modern_call(1), |post, (name, value)| post.field(name, value));
    client.ask(&post);
    client.ask(&Post::new(INITIALIZE));
    let (first, second) = (upstream.wait_request(0), upstream.wait_request(1));
    for (name, value) in own {
        assert_eq!(first.head.all(name), [value]);
        assert_ne!(second.head.field(name), Some(value), "{name}");
    }
    assert!(names(&second.head).iter().all(|name| !name.starts_with("mcp-")));
}

#[test]
fn a_name_that_is_encoded_in_its_header_passes_as_it_came() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let body = |name: &str| String::from_utf8(modern_call(1).body).unwrap().replace("slow", name);
    let named = |name: &str, header: &str| Post::modern("tools/call", Some(header), body(name));
    let right = [
        ("测试", "=?base64?5rWL6K+V?="),
        ("=?base64?abc?=", "=?base64?PT9iYXNlNjQ/YWJjPz0=?="),
        ("\\u0073low", "slow"),
    ];
    for (name, header) in right {
        let (request, response) = crossed(&upstream, &sidecar, &named(name, header));
        assert_eq!(response.status(), 200, "{header}");
        assert_eq!(request.head.all("mcp-name"), [header]);
        assert_eq!(String::from_utf8(request.body).unwrap(), body(name));
    }
    let seen = upstream.count();
    let wrong = [
        named("slow", "other"),
        named("slow", "slow").field("Mcp-Method", "tools/list"),
        named("slow", "slow").without("Mcp-Name"),
        named("slow", "slow").without("Mcp-Method"),
    ];
    for post in wrong {
        let response = sidecar.client().ask(&post);
        assert_eq!((response.status(), response.json()["error"]["code"].clone()), (400, (-32020).into()));
    }
    assert_eq!(upstream.count(), seen, "nothing runs under another name");
    let (request, _) = crossed(&upstream, &sidecar, &call(1).field("Mcp-Name", "other"));
    assert_eq!(request.head.all("mcp-name"), ["other"], "in legacy it means nothing");
}

#[test]
fn date_is_kept_or_added_and_alt_svc_does_not_speak_for_the_sidecar() {
    let upstream = Upstream::start(|request, reply| {
        let mut fields = vec![("Alt-Svc", "h3=\":443\"; ma=86400"), ("Server", "theirs")];
        if !request.number.is_multiple_of(2) {
            fields.push(("Date", "Sun, 29 Nov 2026 12:00:00 GMT"));
        }
        match request.number {
            0 | 1 => reply.json(200, &fields, &result(1)),
            2 | 3 => {
                reply.sse(&fields);
                reply.event(&result(1));
                reply.end();
            }
            _ => reply.json(500, &fields, "{}"),
        }
    });
    let sidecar = Sidecar::before(&upstream);
    for _ in 0..3 {
        let added = sidecar.client().ask(&call(1)).head;
        assert!(httpdate::parse_http_date(added.all("date")[0]).is_ok());
        let kept = sidecar.client().ask(&call(1)).head;
        assert_eq!(kept.all("date"), ["Sun, 29 Nov 2026 12:00:00 GMT"]);
        for head in [added, kept] {
            assert_eq!((head.field("alt-svc"), head.all("server")), (None, vec!["theirs"]));
        }
    }
}

#[test]
fn trailers_end_at_the_hop() {
    let list = Post::legacy(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#);
    let upstream = Upstream::start(|request, reply| {
        let kind = if request.number == 2 { "text/event-stream" } else { "application/json" };
        reply.head(
            if request.number == 3 { 500 } else { 200 },
            &[("Content-Type", kind), ("Transfer-Encoding", "chunked"), ("Trailer", "X-T")],
        );
        reply.chunk(if request.number == 2 { event(result(1)) } else { result(1) });
        reply.raw("0\r\nX-T: 1\r\nOz0-Upstream-Status: 429\r\n\r\n");
    });
    let sidecar = Sidecar::before(&upstream);
    for post in [call(1), list, call(1), call(1)] {
        let client = sidecar.client();
        let response = client.ask(&post.field("TE", "trailers"));
        assert!(response.text().contains(&result(1)));
        let all = String::from_utf8(client.bytes()).unwrap();
        assert!(!all.contains("X-T") && !all.to_ascii_lowercase().contains("oz0-upstream-status"), "{all}");
    }
}
