//! `notifications/cancelled` from the node: forwarded in legacy, kept in modern; it ends exactly the request that it names,
//! and nothing more is said about that one.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::time::Duration;

use support::{
    Client, Gate, Post, Request, Sidecar, Upstream,
    http::Response,
    http2::Node,
    mcp::{call, cancel, event, modern_call, progress, result},
    sse,
    upstream::Reply,
};
use tokio::time::Instant;

const CANCELLED: &str = "notifications/cancelled";

/// Far above the 100 ms promised, since the machine may be busy; far below every clock.
const AT_ONCE: Duration = Duration::from_secs(1);

fn modern_cancel(id: &str) -> Post {
    let body =
        format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
    Post::modern(CANCELLED, None, body)
}

fn is_cancel(request: &Request) -> bool {
    request.method() == "POST" && request.json()["method"] == CANCELLED
}

/// Takes notifications with 202 and leaves every call on a silent stream.
fn streaming(request: &Request, reply: &mut Reply) {
    if request.json().get("id").is_none() {
        return reply.json(202, &[], "");
    }
    reply.sse(&[]);
    reply.event(&progress(&request.json()["id"], 1));
    reply.hang();
}

/// The same without a head.
fn silent(request: &Request, reply: &mut Reply) {
    if request.json().get("id").is_none() {
        return reply.json(202, &[], "");
    }
    reply.hang();
}

/// The connection that carried the call of that id.
fn carrier(upstream: &Upstream, id: &serde_json::Value) -> usize {
    upstream.wait_request_where(|request| request.json()["id"] == *id).connection
}

fn is_an_empty_stream(response: &Response) {
    assert_eq!(response.status(), 200);
    assert_eq!(response.text(), "");
    let head = &response.head;
    assert_eq!(head.field("content-type"), Some("text/event-stream"));
    assert!(head.field("cache-control").is_some_and(|value| value.contains("no-cache")), "{head:?}");
    assert_eq!(head.field("x-accel-buffering"), Some("no"));
    assert_eq!(head.field("content-length"), None);
    assert_eq!(head.field("transfer-encoding"), Some("chunked"));
}

fn line_of(sidecar: &Sidecar, id: &serde_json::Value) -> serde_json::Value {
    sidecar.wait_line(|line| line["rpc"] == "tools/call" && line["id"] == *id)
}

fn is_cancelled_by_message(line: &serde_json::Value) {
    assert_eq!(line["outcome"], "cancelled", "{line}");
    assert_eq!(line["cancelled_by"], "notification", "{line}");
    assert!(line["cancel_ms"].as_f64().unwrap() < 5000.0, "{line}");
    assert_eq!((&line["status"], &line["stream"]), (&200.into(), &"sse".into()), "{line}");
}

#[test]
fn a_legacy_cancel_is_forwarded_as_it_is_and_the_call_s_stream_ends_without_a_response() {
    let upstream = Upstream::start(streaming);
    let sidecar = Sidecar::before(&upstream);
    let node = sidecar.client();
    node.send(&call(7));
    node.events(1);
    let post = Post::legacy(
        "{ \"params\":{\"reason\":\"no\\u0020more\", \"requestId\" : 7},\n\"method\":\"notifications/cancelled\",\"jsonrpc\":\"2.0\"}",
    );
    let answer = sidecar.client().ask(&post);
    assert_eq!(answer.status(), 202);
    let rest = node.response();
    assert_eq!(sse::read(&rest.body).events.len(), 1, "{}", rest.text());
    let forwarded = upstream.wait_request_where(is_cancel);
    assert_eq!(forwarded.body, post.body);
    assert_eq!(forwarded.head.field("mcp-session-id"), Some("sess-A"));
    upstream.wait_closed(carrier(&upstream, &7.into()));
    is_cancelled_by_message(&line_of(&sidecar, &7.into()));
    let line = sidecar.wait_line(|line| line["rpc"] == CANCELLED);
    assert_eq!((&line["outcome"], &line["status"]), (&"ok".into(), &202.into()), "{line}");
    assert_eq!(upstream.count(), 2);
    // The connections of both serve on.
    assert!(node.closed_yet().is_none());
}

#[test]
fn a_modern_cancel_is_not_forwarded_and_gets_202() {
    let upstream = Upstream::start(streaming);
    let sidecar = Sidecar::before(&upstream);
    let node = sidecar.client();
    node.send(&modern_call(7));
    node.events(1);
    let asked = Instant::now();
    let answer = sidecar.client().ask(&modern_cancel("7"));
    assert_eq!((answer.status(), answer.body.len()), (202, 0));
    assert_eq!(sse::read(&node.response().body).events.len(), 1);
    let closed = upstream.wait_closed(0).closed.unwrap();
    assert!(closed.saturating_duration_since(asked) < AT_ONCE);
    is_cancelled_by_message(&line_of(&sidecar, &7.into()));
    assert_eq!(upstream.count(), 1);
}

#[test]
fn before_the_head_the_exchange_ends_as_an_empty_event_stream() {
    let upstream = Upstream::start(silent);
    let sidecar = Sidecar::before(&upstream);
    for (number, (post, cancels)) in
        [(call(7), cancel(7)), (modern_call("\"m\""), modern_cancel("\"m\""))].into_iter().enumerate()
    {
        let node = sidecar.client();
        node.send(&post);
        let id = upstream.wait_request_where(|one| one.body == post.body).json()["id"].clone();
        assert_eq!(sidecar.client().ask(&cancels).status(), 202);
        is_an_empty_stream(&node.response());
        upstream.wait_closed(carrier(&upstream, &id));
        is_cancelled_by_message(&line_of(&sidecar, &id));
        // The node's connection goes on.
        node.send(&Post::get().at("/nowhere"));
        assert_eq!(node.response().status(), 404, "{number}");
    }
}

#[test]
fn with_json_pending_too() {
    let gate = Gate::new();
    let reached = gate.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.json().get("id").is_none() {
            return reply.json(202, &[], "");
        }
        reply.head(200, &[("Content-Type", "application/json"), ("Content-Length", "1000")]);
        reply.raw("{\"jsonrpc\"");
        reached.open();
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    for (post, cancels) in [(call(7), cancel(7)), (modern_call(8), modern_cancel("8"))] {
        let node = sidecar.client();
        node.send(&post);
        gate.pass();
        assert_eq!(sidecar.client().ask(&cancels).status(), 202);
        is_an_empty_stream(&node.response());
        upstream.wait_closed(carrier(
            &upstream,
            &serde_json::from_slice::<serde_json::Value>(&post.body).unwrap()["id"],
        ));
    }
}

#[test]
fn to_an_http2_node_too() {
    let upstream = Upstream::start(silent);
    let sidecar = Sidecar::before(&upstream);
    let node = Node::connect(&sidecar.listen);
    let mut waiting = node.send(&call(7));
    upstream.wait_request(0);
    let mut cancels = node.send(&cancel(7));
    assert_eq!(node.head(&mut cancels).status(), 202);
    let head = node.head(&mut waiting);
    assert_eq!(head.status(), 200);
    assert_eq!(head.headers()["content-type"], "text/event-stream");
    assert_eq!(head.headers().get("content-length"), None);
    assert_eq!(node.rest(&mut waiting), "");
    is_cancelled_by_message(&line_of(&sidecar, &7.into()));
}

#[test]
fn a_result_that_comes_after_a_legacy_cancel_is_not_sent_and_the_id_may_be_used_again() {
    let cancelled = Gate::new();
    let upstream = Upstream::start(move |request, reply| {
        if is_cancel(request) {
            cancelled.open();
            // Its 202 never comes: the late answer finds the stream open.
            return reply.hang();
        }
        reply.sse(&[]);
        reply.event(&progress(7, 1));
        if request.number == 0 {
            cancelled.pass();
            reply.event(r#"{"jsonrpc":"2.0","id":7,"error":{"code":0,"message":"cancelled"}}"#);
        } else {
            reply.event(&result(&request.json()["id"]));
        }
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let node = sidecar.client();
    node.send(&call(7));
    node.events(1);
    let canceller = sidecar.client();
    canceller.send(&cancel(7));
    let ended = node.response();
    assert_eq!(sse::read(&ended.body).events.len(), 1, "{}", ended.text());
    is_cancelled_by_message(&line_of(&sidecar, &7.into()));
    for id in [8, 7] {
        let answer = node.ask(&call(id));
        assert!(answer.text().contains(&result(id)), "{}", answer.text());
    }
}

#[test]
fn a_json_result_that_comes_after_a_legacy_cancel_is_not_sent_either() {
    let cancelled = Gate::new();
    let upstream = Upstream::start(move |request, reply| {
        if request.json().get("id").is_none() {
            cancelled.open();
            return reply.hang();
        }
        cancelled.pass();
        reply.json(200, &[], &result(7));
    });
    let sidecar = Sidecar::before(&upstream);
    let node = sidecar.client();
    node.send(&call(7));
    upstream.wait_request(0);
    let canceller = sidecar.client();
    canceller.send(&cancel(7));
    is_an_empty_stream(&node.response());
    is_cancelled_by_message(&line_of(&sidecar, &7.into()));
}

#[test]
fn a_failure_after_a_cancel_is_no_failure() {
    // What the upstream does once it has been told: it breaks the call's stream or connection, before or after the head.
    for (head, reset) in [(true, false), (true, true), (false, false), (false, true)] {
        let cancelled = Gate::new();
        let upstream = Upstream::start(move |request, reply| {
            if request.json().get("id").is_none() {
                cancelled.open();
                return reply.hang();
            }
            if head {
                reply.sse(&[]);
            }
            cancelled.pass();
            if reset { reply.reset() } else { reply.break_off() }
        });
        let sidecar = Sidecar::before(&upstream);
        let node = sidecar.client();
        node.send(&call(7));
        upstream.wait_request(0);
        if head {
            node.head();
        }
        let canceller = sidecar.client();
        canceller.send(&cancel(7));
        is_an_empty_stream(&node.response());
        is_cancelled_by_message(&line_of(&sidecar, &7.into()));
    }
}

#[test]
fn a_clock_that_runs_out_after_a_cancel_changes_nothing() {
    for stream in [true, false] {
        let upstream = Upstream::start(move |request, reply| {
            if stream && request.json().get("id").is_some() {
                reply.sse(&[]);
            }
            reply.hang();
        });
        let sidecar = Sidecar::with_config(&format!(
            "[upstreams.mcp]\nurl = \"{}\"\nmax_timeout = \"600ms\"\ncancel_grace = \"10s\"\n",
            upstream.url()
        ));
        let node = sidecar.client();
        node.send(&call(7));
        upstream.wait_request(0);
        let canceller = sidecar.client();
        canceller.send(&cancel(7));
        is_an_empty_stream(&node.response());
        is_cancelled_by_message(&line_of(&sidecar, &7.into()));
    }
}

#[test]
fn the_grace_bounds_the_wait_for_the_cancel_s_answer_but_not_the_cancel_itself() {
    let answer = Gate::new();
    let answered = answer.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.json().get("id").is_none() {
            answered.pass();
            return reply.json(202, &[], "");
        }
        reply.sse(&[]);
        reply.hang();
    });
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\ncancel_grace = \"300ms\"\n",
        upstream.url()
    ));
    let node = sidecar.client();
    node.send(&call(7));
    node.head();
    let canceller = sidecar.client();
    let asked = Instant::now();
    canceller.send(&cancel(7));
    is_an_empty_stream(&node.response());
    assert!(asked.elapsed() >= Duration::from_millis(300));
    upstream.wait_closed(carrier(&upstream, &7.into()));
    answer.open();
    assert_eq!(canceller.response().status(), 202);
}

/// Whoever writes the node's stream: in each version of HTTP it is another part of the sidecar.
#[test]
fn progress_that_waits_for_its_rate_as_a_cancel_wins_goes_nowhere_and_keeps_no_thread_busy() {
    let upstream = Upstream::start(|request, reply| {
        let Some(id) = request.json().get("id").cloned() else {
            // The cancel is not answered: the grace bounds how long the stream stays.
            return reply.hang();
        };
        reply.sse(&[]);
        // In one piece: when the last that may pass at once has come, the next one waits.
        reply.chunk((1..=9).map(|n| event(progress(&id, n))).collect::<String>());
        reply.hang();
    });
    // The stream stays longer than its progress waits for its rate.
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\ncancel_grace = \"1s\"\n\
         [upstreams.mcp.progress]\nburst = 8\nmin_interval = \"500ms\"\n",
        upstream.url()
    ));
    const LAST: &str = r#""progress":8}"#;
    let is_late = |body: &[u8]| String::from_utf8_lossy(body).contains(LAST);
    let canceller = sidecar.client();
    let node = sidecar.client();
    node.send(&call(7));
    node.body(is_late);
    canceller.send(&cancel(7));
    let told = node.response().text();
    assert!(!told.contains("result"), "{told}");
    is_cancelled_by_message(&line_of(&sidecar, &7.into()));

    let old = String::from_utf8(call(8).bytes(&sidecar.listen)).unwrap().replacen("HTTP/1.1", "HTTP/1.0", 1);
    let node = sidecar.client();
    node.write(old);
    node.body(is_late);
    sidecar.client().send(&cancel(8));
    node.closed();
    is_cancelled_by_message(&line_of(&sidecar, &8.into()));

    let node = Node::connect(&sidecar.listen);
    let mut waiting = node.send(&call(9));
    node.wait_body(&mut waiting, LAST);
    let _cancel = node.send(&cancel(9));
    node.rest(&mut waiting);
    is_cancelled_by_message(&line_of(&sidecar, &9.into()));
    upstream.wait_closed(carrier(&upstream, &9.into()));
}

#[test]
fn the_grace_ends_although_the_canceller_hangs_up_at_once() {
    let upstream = Upstream::start(streaming);
    let sidecar = Sidecar::before(&upstream);
    let node = sidecar.client();
    node.send(&call(7));
    node.events(1);
    let canceller = sidecar.client();
    canceller.send(&cancel(7));
    drop(canceller);
    upstream.wait_request_where(is_cancel);
    node.response();
    is_cancelled_by_message(&line_of(&sidecar, &7.into()));
}

#[test]
fn an_id_s_json_type_belongs_to_it_and_a_cancel_waits_behind_nothing() {
    let upstream = Upstream::start(streaming);
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\ncalls = 22\n[limits]\ncalls = 22\n",
        upstream.url()
    ));
    let open = |id: String| {
        let node = sidecar.client();
        node.send(&call(&id));
        node.events(1);
        node
    };
    let number = open("101".into());
    let text = open("\"101\"".into());
    let others: Vec<Client> = (0..20).map(|id| open(id.to_string())).collect();
    let asked = Instant::now();
    assert_eq!(sidecar.client().ask(&cancel(101)).status(), 202);
    let forwarded = upstream.wait_request_where(is_cancel);
    assert!(asked.elapsed() < AT_ONCE);
    assert_eq!(forwarded.body, cancel(101).body);
    number.response();
    upstream.wait_closed(carrier(&upstream, &101.into()));
    let alive = upstream.connections().iter().filter(|one| one.closed.is_none()).count();
    assert!(alive >= 21, "{alive}");
    assert!(text.closed_yet().is_none() && others.iter().all(|node| node.closed_yet().is_none()));
    assert_eq!(sidecar.client().ask(&cancel("\"101\"")).status(), 202);
    text.response();
    upstream.wait_closed(carrier(&upstream, &"101".into()));
    is_cancelled_by_message(&line_of(&sidecar, &"101".into()));
}

#[test]
fn a_spelling_of_the_same_id_names_the_same_request() {
    let upstream = Upstream::start(streaming);
    let sidecar = Sidecar::before(&upstream);
    let node = sidecar.client();
    node.send(&modern_call("\"\\u0061\""));
    node.head();
    assert_eq!(sidecar.client().ask(&modern_cancel("\"a\"")).status(), 202);
    node.response();
    upstream.wait_closed(0);
}

/// What else a cancel may come with and about; none of it ends the call 7 of `sess-A`.
fn strangers() -> Vec<(&'static str, Post)> {
    vec![
        ("another session", cancel(7).field("Mcp-Session-Id", "sess-B")),
        ("no session", cancel(7).without("Mcp-Session-Id")),
        ("a credential", cancel(7).field("Authorization", "Bearer x")),
        ("another id", cancel(8)),
        ("the id as text", cancel("\"7\"")),
        ("null", cancel("null")),
        ("no params", Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/cancelled"}"#)),
        (
            "params that are no object",
            Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":[7]}"#),
        ),
        ("an id that is no id", cancel("{\"a\":7}")),
    ]
}

#[test]
fn in_legacy_what_is_foreign_unknown_or_malformed_is_forwarded_and_ends_nothing() {
    let go = Gate::new();
    let on = go.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.json().get("id").is_none() {
            return reply.json(202, &[], "");
        }
        reply.sse(&[]);
        on.pass();
        reply.event(&result(7));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let node = sidecar.client();
    node.send(&call(7));
    node.head();
    for (count, (what, post)) in strangers().into_iter().enumerate() {
        assert_eq!(sidecar.client().ask(&post).status(), 202, "{what}");
        assert_eq!(upstream.wait_request(count + 1).body, post.body, "{what}");
    }
    go.open();
    assert!(node.response().text().contains(&result(7)));
    assert_eq!(sidecar.client().ask(&cancel(7)).status(), 202, "one that is finished");
    assert_eq!(upstream.count(), strangers().len() + 2);
    assert_eq!(line_of(&sidecar, &7.into())["outcome"], "ok");
}

#[test]
fn in_modern_what_is_foreign_unknown_or_malformed_gets_202_and_nothing_else() {
    let go = Gate::new();
    let on = go.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        on.pass();
        reply.event(&result(7));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let node = sidecar.client();
    node.send(&modern_call(7));
    node.head();
    let bare = |body: &str| Post::modern(CANCELLED, None, body);
    let strangers = [
        modern_cancel("8"),
        modern_cancel("\"7\""),
        modern_cancel("null"),
        modern_cancel("7").field("Authorization", "Bearer x"),
        modern_cancel("7").field("Mcp-Session-Id", "sess-A"),
        bare(r#"{"jsonrpc":"2.0","method":"notifications/cancelled"}"#),
        bare(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{}}"#),
        bare(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":[]}"#),
    ];
    for post in strangers {
        let answer = sidecar.client().ask(&post);
        assert_eq!((answer.status(), answer.text()), (202, String::new()), "{post:?}");
    }
    let elsewhere = Client::from("127.0.0.2", &sidecar.listen);
    assert_eq!(elsewhere.ask(&modern_cancel("7")).status(), 202);
    go.open();
    assert!(node.response().text().contains(&result(7)));
    assert_eq!(sidecar.client().ask(&modern_cancel("7")).status(), 202, "one that is finished");
    assert_eq!(upstream.count(), 1);
}

#[test]
fn without_credential_and_session_the_address_must_match_and_with_one_it_need_not() {
    let upstream = Upstream::start(streaming);
    let sidecar = Sidecar::before(&upstream);
    let anonymous = sidecar.client();
    anonymous.send(&modern_call(1));
    anonymous.events(1);
    let known = sidecar.client();
    known.send(&modern_call(2).field("Authorization", "Bearer a"));
    known.events(1);
    let elsewhere = Client::from("127.0.0.2", &sidecar.listen);
    elsewhere.ask(&modern_cancel("1"));
    elsewhere.ask(&modern_cancel("2").field("Authorization", "Bearer a"));
    known.response();
    upstream.wait_closed(carrier(&upstream, &2.into()));
    assert!(anonymous.closed_yet().is_none());
    assert_eq!(upstream.connections().iter().filter(|one| one.closed.is_none()).count(), 1);
    sidecar.client().ask(&modern_cancel("1"));
    anonymous.response();
    upstream.wait_closed(carrier(&upstream, &1.into()));
}

#[test]
fn another_upstream_s_request_is_another_request() {
    let (one, two) = (Upstream::start(streaming), Upstream::start(streaming));
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.one]\nurl = \"{}\"\n[upstreams.two]\nurl = \"{}\"\n",
        one.url(),
        two.url()
    ));
    let nodes = ["/one", "/two"].map(|path| {
        let node = sidecar.client();
        node.send(&call(7).at(path));
        node.events(1);
        node
    });
    assert_eq!(sidecar.client().ask(&cancel(7).at("/two")).status(), 202);
    nodes[1].response();
    two.wait_closed(0);
    assert!(one.connections()[0].closed.is_none());
    assert_eq!((one.count(), two.count()), (1, 2));
}

#[test]
fn an_id_in_flight_twice_names_none_of_both() {
    let go = Gate::new();
    let on = go.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.json().get("id").is_none() {
            return reply.json(202, &[], "");
        }
        reply.sse(&[]);
        on.pass();
        reply.event(&result(&request.json()["id"]));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    for (number, (post, cancels)) in
        [(call(7), cancel(7)), (modern_call(7), modern_cancel("7"))].into_iter().enumerate()
    {
        let nodes = [0, 1].map(|_| {
            let node = sidecar.client();
            node.send(&post);
            node.head();
            node
        });
        let before = upstream.count();
        assert_eq!(sidecar.client().ask(&cancels).status(), 202);
        assert_eq!(upstream.count() - before, 1 - number, "forwarded once in legacy, never in modern");
        nodes.iter().for_each(|_| go.open());
        for node in nodes {
            assert!(node.response().text().contains(&result(7)));
        }
    }
}

#[test]
fn what_is_never_cancelled_by_message_runs_on() {
    let go = Gate::new();
    let on = go.clone();
    let upstream = Upstream::start(move |request, reply| {
        let json = request.json();
        if json.is_object() && json.get("id").is_none() {
            return reply.json(202, &[], "");
        }
        reply.sse(&[]);
        on.pass();
        reply.event(&result(7));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let initialize =
        r#"{"jsonrpc":"2.0","id":7,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}"#;
    let task = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"slow","task":{"ttl":1}}}"#;
    let batch = r#"[{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"slow"}}]"#;
    for (number, body) in [initialize, task, batch].into_iter().enumerate() {
        let node = sidecar.client();
        node.send(&Post::legacy(body).field("MCP-Protocol-Version", "2025-03-26"));
        node.head();
        assert_eq!(sidecar.client().ask(&cancel(7)).status(), 202, "{body}");
        assert_eq!(upstream.count(), 2 * (number + 1), "forwarded: {body}");
        go.open();
        assert!(node.response().text().contains(&result(7)), "{body}");
    }
}

#[test]
fn a_request_of_any_other_method_is_cancelled_like_a_call() {
    let upstream = Upstream::start(streaming);
    let sidecar = Sidecar::before(&upstream);
    for method in ["resources/read", "tasks/result", "x/unknown"] {
        let id = format!("\"{method}\"");
        let node = sidecar.client();
        node.send(&Post::legacy(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}"}}"#)));
        node.events(1);
        assert_eq!(sidecar.client().ask(&cancel(&id)).status(), 202);
        node.response();
        upstream.wait_closed(carrier(&upstream, &method.into()));
    }
    let listen =
        r#"{"jsonrpc":"2.0","id":"l","method":"subscriptions/listen","params":{"notifications":{}}}"#;
    let node = sidecar.client();
    node.send(&Post::modern("subscriptions/listen", None, listen));
    node.head();
    assert_eq!(sidecar.client().ask(&modern_cancel("\"l\"")).status(), 202);
    node.response();
    upstream.wait_closed(carrier(&upstream, &"l".into()));
}

#[test]
fn tasks_cancel_is_an_ordinary_request_and_closes_nothing() {
    let go = Gate::new();
    let on = go.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.json()["method"] == "tasks/cancel" {
            return reply.json(
                200,
                &[],
                r#"{"jsonrpc":"2.0","id":8,"result":{"taskId":"t","status":"cancelled"}}"#,
            );
        }
        reply.sse(&[]);
        on.pass();
        reply.event(&result(7));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let node = sidecar.client();
    node.send(&Post::legacy(r#"{"jsonrpc":"2.0","id":7,"method":"tasks/result","params":{"taskId":"t"}}"#));
    node.head();
    let cancel = Post::legacy(r#"{"jsonrpc":"2.0","id":8,"method":"tasks/cancel","params":{"taskId":"t"}}"#);
    assert!(sidecar.client().ask(&cancel).text().contains("cancelled"));
    go.open();
    assert!(node.response().text().contains(&result(7)));
}

#[test]
fn a_cancel_that_comes_when_the_response_is_complete_in_the_sidecar_is_too_late() {
    let upstream = Upstream::start(|request, reply| {
        if request.json().get("id").is_none() {
            return reply.json(202, &[], "");
        }
        reply.sse(&[("Connection", "close")]);
        let filler = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/message","params":"{}"}}"#,
            "x".repeat(200_000)
        );
        // More than the sockets take, less than the queue.
        (0..30).for_each(|_| reply.event(&filler));
        reply.event(&result(7));
        reply.end();
    });
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\n[upstreams.mcp.progress]\nqueue_bytes = \"16MiB\"\n",
        upstream.url()
    ));
    let node = Client::stalled(&sidecar.listen, Some(4096));
    node.send(&call(7));
    upstream.wait_closed(0);
    upstream.wait_taken();
    assert_eq!(sidecar.client().ask(&cancel(7)).status(), 202);
    node.read_on();
    let events = sse::read(&node.response().body).events;
    assert_eq!(events.len(), 31);
    assert_eq!(line_of(&sidecar, &7.into())["outcome"], "ok");
}
