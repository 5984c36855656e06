//! A node that hangs up, in whatever way and at whatever moment, ends what its call holds upstream, at once, and nothing
//! else.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{thread, time::Duration};

use support::{
    Client, Gate, Post, Request, Sidecar, Upstream,
    http2::{self, Node},
    mcp::{call, modern_call, progress, result},
    tls::{self, Authority},
    upstream::Reply,
};
use tokio::time::Instant;

/// Far above the 100 ms promised, since the machine may be busy; far below every clock.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Where the exchange stands when the node leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    BeforeTheHead,
    WithJsonPending,
    OnASilentStream,
    OnABusyStream,
}

const PHASES: [Phase; 4] =
    [Phase::BeforeTheHead, Phase::WithJsonPending, Phase::OnASilentStream, Phase::OnABusyStream];

/// How it leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Fin,
    Rst,
    HalfClose,
}

const WAYS: [Way; 3] = [Way::Fin, Way::Rst, Way::HalfClose];

/// An upstream that brings every call to that phase and leaves it there; `reached` opens when it has.
fn upstream_in(phase: Phase, reached: &Gate) -> impl Fn(&Request, &mut Reply) + Send + Sync + 'static {
    let reached = reached.clone();
    move |request, reply| {
        if request.json()["params"]["name"] != "slow" {
            return reply.json(200, &[], &result(&request.json()["id"]));
        }
        match phase {
            Phase::BeforeTheHead => {}
            Phase::WithJsonPending => {
                reply.head(200, &[("Content-Type", "application/json"), ("Content-Length", "1000")]);
                reply.raw(r#"{"jsonrpc":"2.0","#);
            }
            Phase::OnASilentStream => reply.sse(&[]),
            Phase::OnABusyStream => {
                reply.sse(&[]);
                reached.open();
                for n in 1.. {
                    if reply.closed() {
                        return;
                    }
                    reply.event(&progress(1, n));
                    thread::sleep(Duration::from_millis(20));
                }
            }
        }
        reached.open();
        reply.hang();
    }
}

fn config(upstream: &Upstream, more: &str) -> String {
    format!(
        "[upstreams.mcp]\nurl = \"{}\"\n{more}\n[upstreams.mcp.keepalive]\ninterval = \"0\"\n",
        upstream.url()
    )
}

fn brief(id: usize) -> Post {
    Post::legacy(format!(
        r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"brief"}}}}"#
    ))
}

/// Sends the call, lets it come to `phase`, leaves, and gives the moment.
fn leave(client: Client, post: &Post, phase: Phase, way: Way, reached: &Gate, extra: &str) -> Instant {
    client.send(post);
    reached.pass();
    match phase {
        Phase::OnASilentStream => drop(client.head()),
        Phase::OnABusyStream => drop(client.events(2)),
        Phase::BeforeTheHead | Phase::WithJsonPending => {}
    }
    client.write(extra);
    let now = Instant::now();
    match way {
        Way::Fin => drop(client),
        Way::Rst => client.reset(),
        Way::HalfClose => {
            client.half_close();
            client.closed();
        }
    }
    now
}

fn is_cancelled(sidecar: &Sidecar, line: usize) {
    let line = &sidecar.wait_lines(line + 1)[line];
    assert_eq!(line["outcome"], "cancelled", "{line}");
    assert_eq!(line["cancelled_by"], "disconnect", "{line}");
    assert!(line["cancel_ms"].as_f64().unwrap() < 1000.0, "{line}");
}

#[test]
fn in_every_phase_in_every_way_and_in_both_eras() {
    for phase in PHASES {
        let reached = Gate::new();
        let upstream = Upstream::start(upstream_in(phase, &reached));
        let sidecar = Sidecar::with_config(&config(&upstream, ""));
        let mut count = 0;
        for post in [call(1), modern_call(1)] {
            for way in WAYS {
                let left = leave(sidecar.client(), &post, phase, way, &reached, "");
                let closed = upstream.wait_closed(count).closed.unwrap();
                assert!(closed.saturating_duration_since(left) < AT_ONCE, "{phase:?} {way:?}");
                is_cancelled(&sidecar, count);
                count += 1;
                assert_eq!(upstream.count(), count, "nothing is POSTed: {phase:?} {way:?}");
            }
        }
        // Nothing is left of it, and nothing was said later.
        assert_eq!(upstream.connections().iter().filter(|one| one.closed.is_none()).count(), 0);
        assert!(
            !sidecar.stderr().contains("WARN") && !sidecar.stderr().contains("panic"),
            "{}",
            sidecar.stderr()
        );
    }
}

#[test]
fn with_bytes_of_a_next_request_unread() {
    for extra in ["P", &format!("POST /mcp HTTP/1.1\r\nX: {}", "x".repeat(75))] {
        for phase in PHASES {
            let reached = Gate::new();
            let upstream = Upstream::start(upstream_in(phase, &reached));
            let sidecar = Sidecar::with_config(&config(&upstream, ""));
            for (number, way) in WAYS.into_iter().enumerate() {
                let left = leave(sidecar.client(), &call(1), phase, way, &reached, extra);
                let closed = upstream.wait_closed(number).closed.unwrap();
                assert!(closed.saturating_duration_since(left) < AT_ONCE, "{phase:?} {way:?}");
                is_cancelled(&sidecar, number);
            }
        }
    }
}

#[test]
fn with_a_whole_next_request_unread_which_is_then_never_made() {
    let reached = Gate::new();
    let upstream = Upstream::start(upstream_in(Phase::OnASilentStream, &reached));
    let sidecar = Sidecar::with_config(&config(&upstream, ""));
    let client = sidecar.client();
    let next = String::from_utf8(brief(2).bytes(&sidecar.listen)).unwrap();
    leave(client, &call(1), Phase::OnASilentStream, Way::Fin, &reached, &next);
    upstream.wait_closed(0);
    is_cancelled(&sidecar, 0);
    assert_eq!(upstream.count(), 1);
}

#[test]
fn on_a_connection_that_has_carried_ten_calls() {
    for way in WAYS {
        let reached = Gate::new();
        let upstream = Upstream::start(upstream_in(Phase::OnASilentStream, &reached));
        let sidecar = Sidecar::with_config(&config(&upstream, ""));
        let client = sidecar.client();
        for id in 0..10 {
            assert_eq!(client.ask(&brief(id)).status(), 200);
        }
        let left = leave(client, &call(1), Phase::OnASilentStream, way, &reached, "x");
        let closed = upstream.wait_closed(0).closed.unwrap();
        assert!(closed.saturating_duration_since(left) < AT_ONCE, "{way:?}");
        is_cancelled(&sidecar, 10);
    }
}

#[test]
fn over_tls_upstream() {
    for phase in PHASES {
        let reached = Gate::new();
        let upstream = Upstream::tls(upstream_in(phase, &reached));
        let folder = tempfile::tempdir().unwrap();
        let ca = folder.path().join("ca.pem");
        std::fs::write(&ca, upstream.ca.as_deref().unwrap()).unwrap();
        let tls = format!("tls = {{ ca = \"{}\" }}", ca.display());
        let sidecar = Sidecar::with_config(&config(&upstream, &tls));
        for (number, way) in WAYS.into_iter().enumerate() {
            let left = leave(sidecar.client(), &modern_call(1), phase, way, &reached, "");
            let closed = upstream.wait_closed(number).closed.unwrap();
            assert!(closed.saturating_duration_since(left) < AT_ONCE, "{phase:?} {way:?}");
            is_cancelled(&sidecar, number);
        }
    }
}

#[test]
fn of_a_node_over_tls_too_whatever_it_left_unread() {
    let authority = Authority::new();
    let folder = tempfile::tempdir().unwrap();
    authority.issue().write(folder.path(), "server");
    let file = |name: &str| folder.path().join(name).display().to_string();
    let tls = format!("[tls]\ncert = \"{}\"\nkey = \"{}\"\n", file("server.pem"), file("server.key"));
    for phase in [Phase::BeforeTheHead, Phase::WithJsonPending, Phase::OnASilentStream] {
        let reached = Gate::new();
        let upstream = Upstream::start(upstream_in(phase, &reached));
        let sidecar = Sidecar::with_config(&(tls.clone() + &config(&upstream, "")));
        let mut count = 0;
        for extra in ["", "P", &String::from_utf8(brief(2).bytes("localhost")).unwrap()] {
            for way in ["notify and fin", "fin", "rst"] {
                let mut node = tls::Node::connect(&sidecar.listen, &authority);
                node.send(&modern_call(1));
                reached.pass();
                node.write(extra);
                let left = Instant::now();
                match way {
                    "notify and fin" => node.close(),
                    "fin" => drop(node),
                    _ => node.reset(),
                }
                let closed = upstream.wait_closed(count).closed.unwrap();
                assert!(closed.saturating_duration_since(left) < AT_ONCE, "{phase:?} {way} {extra}");
                is_cancelled(&sidecar, count);
                count += 1;
                assert_eq!(upstream.count(), count, "{phase:?} {way} {extra}");
            }
        }
    }
}

#[test]
fn over_http2_upstream_as_a_reset_stream_on_a_connection_that_lives() {
    let upstream = http2::Server::start(|request, mut respond| async move {
        if request.uri().query() == Some("before") {
            return Some(http2::until_reset(&mut respond).await);
        }
        let response =
            http::Response::builder().header("content-type", "text/event-stream").body(()).unwrap();
        let mut stream = respond.send_response(response, false).unwrap();
        stream.send_data(support::mcp::event(progress(1, 1)).into(), false).unwrap();
        Some(http2::until_stream_reset(&mut stream).await)
    });
    let folder = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::with_config(&upstream.config(&folder));
    for post in [modern_call(1), call(1)] {
        let client = sidecar.client();
        client.send(&post);
        client.events(1);
        drop(client);
        assert_eq!(upstream.next_reset(), h2::Reason::CANCEL);
        let client = sidecar.client();
        client.send(&post.at("/mcp?before"));
        upstream.wait_request();
        drop(client);
        assert_eq!(upstream.next_reset(), h2::Reason::CANCEL);
    }
    assert_eq!(upstream.connections(), 1);
    (0..4).for_each(|line| is_cancelled(&sidecar, line));
}

#[test]
fn a_stream_that_an_http2_node_resets_while_its_other_streams_go_on() {
    let go = Gate::new();
    let on = go.clone();
    let upstream = Upstream::start(move |request, reply| {
        let id = request.json()["id"].clone();
        reply.sse(&[]);
        reply.event(&progress(&id, 1));
        reply.event(&progress(&id, 2));
        if id == 3 {
            on.pass();
            reply.event(&result(3));
            return reply.end();
        }
        reply.hang();
    });
    let sidecar = Sidecar::with_config(&config(&upstream, ""));
    let node = Node::connect(&sidecar.listen);
    let mut first = node.send(&call(1));
    upstream.wait_request(0);
    let mut third = node.send(&call(3));
    upstream.wait_request(1);
    node.wait_body(&mut first, "\"progress\":2");
    node.wait_body(&mut third, "\"progress\":2");
    let left = Instant::now();
    node.reset(first);
    let closed = upstream.wait_closed(0).closed.unwrap();
    assert!(closed.saturating_duration_since(left) < AT_ONCE);
    is_cancelled(&sidecar, 0);
    go.open();
    let body = node.wait_body(&mut third, &result(3));
    assert!(body.contains(&result(3)));
    let lines = sidecar.wait_lines(2);
    assert_eq!((&lines[1]["outcome"], &lines[1]["http"]), (&"ok".into(), &"2".into()));
    assert_eq!(upstream.count(), 2, "no notification is invented");
}

#[test]
fn a_stream_that_an_http2_node_resets_before_there_is_a_head() {
    for phase in [Phase::BeforeTheHead, Phase::WithJsonPending] {
        let reached = Gate::new();
        let upstream = Upstream::start(upstream_in(phase, &reached));
        let sidecar = Sidecar::with_config(&config(&upstream, ""));
        let node = Node::connect(&sidecar.listen);
        let call = node.send(&modern_call(1));
        reached.pass();
        node.reset(call);
        upstream.wait_closed(0);
        is_cancelled(&sidecar, 0);
    }
}

#[test]
fn what_is_no_call_too() {
    let get = |_: &Request, reply: &mut Reply| {
        reply.sse(&[]);
        reply.hang();
    };
    let upstream = Upstream::start(get);
    let sidecar = Sidecar::with_config(&config(&upstream, ""));
    let listen = Post::modern(
        "subscriptions/listen",
        None,
        r#"{"jsonrpc":"2.0","id":1,"method":"subscriptions/listen","params":{"notifications":{}}}"#,
    );
    let initialize = Post::new(
        r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}"#,
    );
    for (number, post) in [Post::get(), listen, initialize].into_iter().enumerate() {
        let client = sidecar.client();
        client.send(&post);
        client.head();
        drop(client);
        upstream.wait_closed(number);
        is_cancelled(&sidecar, number);
    }
    assert_eq!(upstream.count(), 3);
}

#[test]
fn a_reset_at_the_moment_of_the_answer_disturbs_nobody_else() {
    const ROUNDS: usize = 200;
    let (go, stop) = (Gate::new(), Gate::new());
    let (going, stopping) = (go.clone(), stop.clone());
    let upstream = Upstream::start(move |request, reply| {
        if request.json()["id"] != "b" {
            going.pass();
            reply.sse(&[]);
            reply.event(&result(&request.json()["id"]));
            return reply.end();
        }
        reply.sse(&[]);
        for n in 0..ROUNDS {
            reply.event(&format!(r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{n}}}"#));
            thread::sleep(Duration::from_millis(1));
        }
        stopping.pass();
        reply.event(&result("\"b\""));
        reply.end();
    });
    let sidecar = Sidecar::with_config(&config(&upstream, ""));
    let other = sidecar.client();
    other.send(&call("\"b\""));
    other.head();
    // Warm: what threads and pools keep is there before it is counted.
    let round = |n: usize| {
        let client = sidecar.client();
        client.send(&call(n));
        upstream.wait_request_where(|request| request.json()["id"] == n);
        let racing = go.clone();
        let answers = thread::spawn(move || racing.open());
        // On either side of the answer, by turns.
        thread::sleep(Duration::from_micros((n as u64 * 97) % 4000));
        client.reset();
        answers.join().unwrap();
    };
    (0..20).for_each(round);
    sidecar.wait_lines(20);
    let before = sidecar.fds();
    (20..ROUNDS).for_each(round);
    sidecar.wait_lines(ROUNDS);
    stop.open();
    let events = support::sse::read(&other.response().body).events;
    assert_eq!(events.len(), ROUNDS + 1, "the other stream misses no event");
    assert!(sidecar.fds() <= before + 2, "{} files after {before}", sidecar.fds());
    assert!(!sidecar.stderr().contains("panic"), "{}", sidecar.stderr());
    assert_eq!(sidecar.client().ask(&Post::get().at("/none")).status(), 404);
}

#[test]
fn a_connection_before_its_request_is_whole_makes_nothing() {
    let upstream = Upstream::silent();
    let sidecar = Sidecar::with_config(&config(&upstream, ""));
    let whole = call(1).bytes(&sidecar.listen);
    for cut in [whole.len() - 1, whole.len() - 114] {
        let client = sidecar.client();
        client.write(&whole[..cut]);
        drop(client);
    }
    let lines = sidecar.wait_lines(2);
    assert!(lines.iter().all(|line| line["outcome"] == "cancelled"), "{lines:?}");
    assert_eq!(upstream.connections().len(), 0);
}
