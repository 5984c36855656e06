//! The admin listener: alive, ready, metrics and a page to look at. Asking it makes no request upstream, whatever
//! becomes of the upstreams; no web page can ask it.
//!
//! `Origin` and `Host` are checked there too.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Socket, Type};
use support::{
    Client, Gate, Post, Sidecar, Upstream,
    http::Response,
    keyed,
    mcp::{call, progress, result},
    redis::Redis,
};

fn get(path: &str) -> Post {
    let mut get = Post::new("").at(path).without("Content-Type");
    get.method = "GET";
    get
}

fn ask(sidecar: &Sidecar, post: &Post) -> Response {
    Client::connect(&sidecar.admin).ask(post)
}

/// The value of a sample, its labels as they are written.
fn sample(page: &str, name: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn each_page_answers_what_it_is_for() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    for (path, kind) in [
        ("/healthz", "text/plain"),
        ("/readyz", "text/plain"),
        ("/metrics", "application/openmetrics-text"),
        ("/", "text/html"),
        ("/healthz?full=1", "text/plain"),
    ] {
        let response = ask(&sidecar, &get(path));
        assert_eq!(response.status(), 200, "{path}");
        assert!(response.head.field("content-type").unwrap().starts_with(kind), "{path}");
        assert!(!response.body.is_empty(), "{path}");
        assert_eq!(response.head.field("cache-control"), Some("no-store"), "{path}");
    }
    assert_eq!(ask(&sidecar, &get("/nothing")).status(), 404);
    assert_eq!(ask(&sidecar, &get("/mcp")).status(), 404, "no upstream is served there");
    for path in ["/healthz", "/readyz", "/metrics", "/"] {
        let response = ask(&sidecar, &Post::new("{}").at(path));
        assert_eq!((response.status(), response.head.field("allow")), (405, Some("GET, HEAD")), "{path}");
    }
    assert_eq!(sidecar.client().ask(&get("/healthz")).status(), 404, "nor are they on the nodes' listener");
    assert_eq!(upstream.connections().len(), 0);
}

#[test]
fn no_web_page_can_ask() {
    let upstream = Upstream::json(result(1));
    let config = format!(
        "[auth]\norigins = [\"https://app.example\"]\nhosts = [\"sidecar.internal\"]\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    );
    let sidecar = Sidecar::with_config(&config);
    for path in ["/healthz", "/readyz", "/metrics", "/", "/nothing"] {
        for origin in ["http://evil.example", "null", "%%%"] {
            assert_eq!(ask(&sidecar, &get(path).field("Origin", origin)).status(), 403, "{path} {origin}");
        }
        for host in ["evil.example", "evil.example:7081", "10.0.0.1"] {
            assert_eq!(ask(&sidecar, &get(path).field("Host", host)).status(), 421, "{path} {host}");
        }
    }
    for post in [
        get("/healthz").field("Origin", "http://localhost:3000"),
        get("/healthz").field("Origin", "https://app.example"),
        get("/healthz").field("Host", "sidecar.internal"),
    ] {
        assert_eq!(ask(&sidecar, &post).status(), 200);
    }
}

/// Probes make no session, kill no route and do not hang on an upstream that is away.
#[test]
fn probes_reach_no_upstream_and_an_upstream_that_is_away_is_no_illness() {
    // A port that is kept and refuses until somebody listens at it.
    let place = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    place.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = place.local_addr().unwrap().as_socket().unwrap();
    let sidecar = Sidecar::with_flags(&["--upstream", &format!("http://{address}/mcp")]);
    let probe = || {
        for path in ["/healthz", "/readyz"] {
            assert_eq!(ask(&sidecar, &get(path)).status(), 200, "{path}");
        }
    };
    for _ in 0..50 {
        probe();
    }
    let client = sidecar.client();
    let failed = client.ask(&call(1));
    assert_eq!(
        (failed.status(), &failed.json()["error"]["data"]["reason"]),
        (200, &"upstream_unreachable".into())
    );
    probe();
    // Back again: the next call succeeds, without a restart.
    place.listen(8).unwrap();
    let back = TcpListener::from(place);
    let serving = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = back.accept().unwrap();
        let (mut seen, mut piece) = (Vec::new(), [0; 4096]);
        while !seen.ends_with(&call(2).body) {
            let n = stream.read(&mut piece).unwrap();
            seen.extend_from_slice(&piece[..n]);
        }
        let body = result(2);
        write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        String::from_utf8(seen).unwrap()
    });
    assert_eq!(client.ask(&call(2)).text(), result(2));
    assert_eq!(serving.join().unwrap().matches("HTTP/1.1").count(), 1, "the call alone came");
    probe();
    assert!(sidecar.lines().iter().all(|line| line["path"] == "/mcp"), "probes are not exchanges");
}

#[test]
fn while_it_drains_it_is_alive_and_not_ready() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |_, reply| {
        pass.pass();
        reply.json(200, &[], &result(1));
    });
    let mut sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    upstream.wait_request(0);
    sidecar.signal("TERM");
    sidecar.wait_stderr("draining");
    let ready = ask(&sidecar, &get("/readyz"));
    assert_eq!((ready.status(), ready.text().trim()), (503, "draining"));
    assert_eq!(ask(&sidecar, &get("/healthz")).status(), 200);
    gate.open();
    assert_eq!(client.response().status(), 200);
    assert!(sidecar.wait_exit().success());
}

#[test]
fn the_admin_listener_can_be_off() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::with_config(&format!("[upstreams.mcp]\nurl = \"{}\"\n", upstream.url()));
    assert!(!sidecar.admin.is_empty());
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "", "--upstream", &upstream.url()]);
    let sidecar = Sidecar::spawn(command, tempfile::TempDir::new().unwrap());
    assert_eq!(sidecar.admin, "");
    assert_eq!(sidecar.client().ask(&call(1)).status(), 200);
}

#[test]
fn metrics_count_exchanges_by_upstream_and_outcome() {
    let upstream = Upstream::start(|request, reply| match request.number {
        0 | 1 => reply.json(200, &[], &result(1)),
        2 => reply.json(429, &[], "{}"),
        _ => reply.json(500, &[], "{}"),
    });
    let sidecar = Sidecar::with_flags(&["--upstream", &format!("up={}", upstream.url())]);
    let client = sidecar.client();
    for _ in 0..4 {
        client.ask(&call(1).at("/up"));
    }
    for name in ["evil\"}\n# x", "a", "b"] {
        client
            .ask(&Post::legacy(format!(r#"{{"jsonrpc":"2.0","id":1,"id":1,"method":{name:?}}}"#)).at("/up"));
    }
    client.ask(&call(1).at("/other-path"));
    for (labels, count) in [
        (r#"upstream="up",outcome="ok""#, 2),
        (r#"upstream="up",outcome="busy""#, 1),
        (r#"upstream="up",outcome="rpc_error""#, 1),
        (r#"upstream="up",outcome="refused""#, 3),
        (r#"upstream="",outcome="refused""#, 1),
    ] {
        sidecar.wait_metric(&format!("mcp_sidecar_exchanges_total{{{labels}}}"), |value| value == count);
    }
    let page = ask(&sidecar, &get("/metrics")).text();
    assert!(page.ends_with("# EOF\n"), "{page}");
    assert_eq!(sample(&page, r#"mcp_sidecar_exchange_duration_seconds_count{upstream="up"}"#), Some(7.0));
    assert_eq!(sample(&page, "mcp_sidecar_log_lines_dropped_total"), Some(0.0));
    for text in ["evil", "other-path", "tools/call"] {
        assert!(!page.contains(text), "nothing that a node sends becomes a label: {page}");
    }
}

#[test]
fn gauges_show_what_is_open_now() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.event(&progress(1, 1));
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    sidecar.wait_metric("mcp_sidecar_connections", |value| value == 0);
    let clients: Vec<_> = (0..3).map(|_| sidecar.client()).collect();
    sidecar.wait_metric("mcp_sidecar_connections", |value| value == 3);
    sidecar.wait_metric("mcp_sidecar_exchanges_in_flight", |value| value == 0);
    for client in &clients {
        client.send(&call(1));
        client.events(1);
    }
    sidecar.wait_metric("mcp_sidecar_exchanges_in_flight", |value| value == 3);
    drop(clients);
    sidecar.wait_metric("mcp_sidecar_exchanges_in_flight", |value| value == 0);
    sidecar.wait_metric("mcp_sidecar_connections", |value| value == 0);
    sidecar.wait_metric("mcp_sidecar_buffered_bytes", |value| value == 0);
}

/// What waits for a node that does not read is in the gauge of held bytes.
#[test]
fn held_bytes_are_shown_while_they_are_held() {
    let large = "x".repeat(8 << 20);
    let answer =
        format!(r#"{{"jsonrpc":"2.0","id":1,"result":{{"content":[{{"type":"text","text":"{large}"}}]}}}}"#);
    let upstream = Upstream::start(move |_, reply| {
        let half = answer.len() / 2;
        reply.head(
            200,
            &[("Content-Type", "application/json"), ("Content-Length", &answer.len().to_string())],
        );
        reply.raw(&answer[..half]);
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    sidecar.wait_metric("mcp_sidecar_buffered_bytes", |bytes| bytes >= 4 << 20);
    client.close();
    sidecar.wait_metric("mcp_sidecar_buffered_bytes", |value| value == 0);
}

/// Every bound that a sidecar has, at what it holds at rest.
const AT_REST: [&str; 16] = [
    "connections",
    "exchanges_in_flight",
    "calls",
    "streams",
    "buffered_bytes",
    "detached_messages",
    "sessions",
    "tools",
    "cancel_notices",
    "cancel_notices_waiting",
    "settling",
    "leases",
    "parked_calls",
    "result_bytes",
    "store_queue",
    "store_away",
];

fn named(name: &str) -> String {
    format!("mcp_sidecar_{name}")
}

#[test]
fn each_bound_shows_what_is_held_of_it_and_that_it_is_left_again() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.method() == "GET" {
            reply.sse(&[]);
            return reply.hang();
        }
        match keyed::method(request).as_deref() {
            Some("initialize") => reply.json(
                200,
                &[("Mcp-Session-Id", "sess-A")],
                &keyed::result(request, r#"{"protocolVersion":"2025-11-25"}"#),
            ),
            Some("tools/list") => {
                let listing = keyed::listing(&keyed::TOOLS).to_string();
                reply.json(200, &[], &keyed::result(request, &listing));
            }
            Some("tools/call") => {
                pass.pass();
                reply.json(200, &[], &keyed::done(request, 0));
            }
            _ if request.method() == "DELETE" => reply.head(204, &[]),
            _ => {
                pass.pass();
                reply.head(202, &[("Content-Length", "0")]);
            }
        }
    });
    let sidecar =
        Sidecar::with_config(&format!("state = \"memory:\"\n[upstreams.up]\nurl = \"{}\"\n", upstream.url()));
    AT_REST.iter().for_each(|name| sidecar.wait_metric(&named(name), |value| value == 0));
    let is = |name: &str, value: usize| sidecar.wait_metric(&named(name), |now| now == value);
    let keys = r#"store_records{table="keys"}"#;
    is(keys, 0);
    is("admin_connections", 1);

    let node = sidecar.client();
    let initialize = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"n","version":"1"}}}"#;
    assert_eq!(node.ask(&Post::new(initialize).at("/up")).status(), 200);
    is("sessions", 1);
    assert_eq!(node.ask(&keyed::list_post("{}").at("/up")).status(), 200);
    is("tools", keyed::TOOLS.len());
    is(r#"upstream_connections{upstream="up"}"#, 1);

    let streams: Vec<_> = (0..2).map(|_| sidecar.client()).collect();
    for stream in &streams {
        stream.send(&Post::get().at("/up"));
        stream.head();
    }
    is("streams", 2);
    let keyed_call = keyed::Call::of("charge").key("one").post().at("/up");
    let calls = [keyed_call, call(2).at("/up")];
    let nodes = calls.map(|call| {
        let node = sidecar.client();
        node.send(&call);
        node
    });
    let note = sidecar.client();
    note.send(&Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#).at("/up"));
    is("calls", 2);
    is(r#"upstream_calls{upstream="up"}"#, 2);
    is("detached_messages", 1);
    is("leases", 1);
    is(keys, 1);
    (0..3).for_each(|_| gate.open());
    nodes.iter().for_each(|node| assert_eq!(node.response().status(), 200));
    assert_eq!(note.response().status(), 202);
    drop(streams);
    assert_eq!(node.ask(&Post::delete().at("/up")).status(), 204);
    drop((node, nodes, note));
    // What is known is kept.
    let bytes = sidecar.metric(&named("result_bytes"));
    assert!(bytes > 0 && sidecar.metric(&named(r#"store_bytes{table="keys"}"#)) > 0);
    is(keys, 1);
    for name in AT_REST.iter().filter(|name| !["tools", "result_bytes"].contains(name)) {
        is(name, 0);
    }
}

#[test]
fn notices_and_calls_that_wait_for_a_node_are_shown_while_they_wait() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |request, reply| {
        if keyed::method(request).as_deref() == Some("notifications/cancelled") {
            pass.pass();
            return reply.head(202, &[("Content-Length", "0")]);
        }
        reply.sse(&[]);
        if keyed::key(request).as_deref() == Some("ends") {
            reply.chunk("id: 1\ndata:\n\n");
            return reply.end();
        }
        if keyed::key(request).as_deref() == Some("told") {
            reply.chunk("id: 1\ndata:\n\n");
        } else {
            reply.event(&progress(1, 1));
        }
        reply.hang();
    });
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nlegacy_disconnect = \"cancel\"\n",
        upstream.url()
    ));
    let is = |name: &str, value: usize| sidecar.wait_metric(&named(name), |now| now == value);
    let begin = |key: &str| {
        let node = sidecar.client();
        node.send(&keyed::Call::of("t").legacy().id(format!("\"{key}\"")).key(key).post());
        node.events(1);
        node
    };
    drop(begin("ends"));
    is("parked_calls", 1);
    drop(begin("told"));
    is("parked_calls", 2);
    is("cancel_notices_waiting", 1);
    is("cancel_notices", 0);
    drop(begin("left"));
    is("cancel_notices", 1);
    gate.open();
    is("cancel_notices", 0);
    // Its time to resume is over.
    is("cancel_notices_waiting", 0);
    is("cancel_notices", 1);
    gate.open();
    is("cancel_notices", 0);
    is("parked_calls", 1);
    assert_eq!(sidecar.metric("mcp_sidecar_cancel_notices_dropped_total"), 0);
}

#[test]
fn a_store_that_is_away_is_shown_and_does_not_hold_up_the_page() {
    let upstream = Upstream::json(result(1));
    let mut redis = Redis::start();
    let sidecar = Sidecar::with_flags(&["--upstream", &upstream.url(), "--state", &redis.state()]);
    let keys = named(r#"store_records{table="keys"}"#);
    sidecar.wait_metric(&keys, |keys| keys == 0);
    redis.kill();
    sidecar.wait_metric(&named("store_away"), |away| away == 1);
    assert_eq!(sidecar.sample(&keys), None, "nobody knows");
    redis.start_again();
    sidecar.wait_metric(&named("store_away"), |away| away == 0);
    assert_eq!(sidecar.metric(&keys), 0);
}
