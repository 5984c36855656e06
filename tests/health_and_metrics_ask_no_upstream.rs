//! The admin listener: alive, ready, metrics and a page to look at. Asking it makes no request upstream, whatever
//! becomes of the upstreams; no web page can ask it.
//!
//! `Origin` and `Host` are checked there too.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Socket, Type};
use support::{
    BOUND, Client, Gate, Post, Sidecar, Upstream,
    http::Response,
    mcp::{call, progress, result},
};
use tokio::time::Instant;

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

/// Waits until the metrics page says so.
fn wait_metric(sidecar: &Sidecar, name: &str, value: f64) {
    let end = Instant::now() + BOUND;
    loop {
        let page = ask(sidecar, &get("/metrics")).text();
        if sample(&page, name) == Some(value) {
            return;
        }
        assert!(Instant::now() < end, "waited for {name} {value} in:\n{page}");
    }
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
        (r#"upstream="up",outcome="ok""#, 2.0),
        (r#"upstream="up",outcome="busy""#, 1.0),
        (r#"upstream="up",outcome="rpc_error""#, 1.0),
        (r#"upstream="up",outcome="refused""#, 3.0),
        (r#"upstream="",outcome="refused""#, 1.0),
    ] {
        wait_metric(&sidecar, &format!("mcp_sidecar_exchanges_total{{{labels}}}"), count);
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
    wait_metric(&sidecar, "mcp_sidecar_connections", 0.0);
    let clients: Vec<_> = (0..3).map(|_| sidecar.client()).collect();
    wait_metric(&sidecar, "mcp_sidecar_connections", 3.0);
    wait_metric(&sidecar, "mcp_sidecar_exchanges_in_flight", 0.0);
    for client in &clients {
        client.send(&call(1));
        client.events(1);
    }
    wait_metric(&sidecar, "mcp_sidecar_exchanges_in_flight", 3.0);
    drop(clients);
    wait_metric(&sidecar, "mcp_sidecar_exchanges_in_flight", 0.0);
    wait_metric(&sidecar, "mcp_sidecar_connections", 0.0);
    wait_metric(&sidecar, "mcp_sidecar_buffered_bytes", 0.0);
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
    let end = Instant::now() + BOUND;
    loop {
        let page = ask(&sidecar, &get("/metrics")).text();
        if sample(&page, "mcp_sidecar_buffered_bytes").unwrap() >= f64::from(4 << 20) {
            break;
        }
        assert!(Instant::now() < end, "{page}");
    }
    client.close();
    wait_metric(&sidecar, "mcp_sidecar_buffered_bytes", 0.0);
}
