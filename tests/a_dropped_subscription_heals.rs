//! A `subscriptions/listen` stream that its upstream drops is asked for again, and its node sees one subscription
//! throughout.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    fmt::Display,
    io::{Read, Write},
    net::TcpListener,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use support::{
    Client, Gate, Port, Post, Request, Sidecar, Upstream, Watched, http2,
    mcp::{self, event},
    sse,
    upstream::Reply,
};
use tempfile::TempDir;
use tokio::time::Instant;

/// Everything that can be asked for.
const ALL: &str = r#"{"toolsListChanged":true,"resourcesListChanged":true, "resourceSubscriptions":["file:///a","file:///\u00e9"]}"#;
const TOOLS: &str = r#"{"toolsListChanged":true}"#;

fn body(id: impl Display, filter: &str) -> String {
    format!(
        r#"{{ "method":"subscriptions/listen","id" :{id}, "params":{{"notifications":{filter},"_meta":{{"io.modelcontextprotocol/protocolVersion":"{}","x":1.0}}}},"jsonrpc":"2.0"}}"#,
        mcp::MODERN
    )
}

fn listen(id: impl Display, filter: &str) -> Post {
    Post::modern("subscriptions/listen", None, body(id, filter))
}

fn acknowledged(id: impl Display, filter: &str) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{{"_meta":{{"io.modelcontextprotocol/subscriptionId":{id}}},"notifications":{filter}}}}}"#
    )
}

fn changed(kind: &str, id: impl Display) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/{kind}/list_changed","params":{{"_meta":{{"io.modelcontextprotocol/subscriptionId":{id}}}}}}}"#
    )
}

fn updated(uri: &str, id: impl Display) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{{"_meta":{{"io.modelcontextprotocol/subscriptionId":{id}}},"uri":{uri}}}}}"#
    )
}

/// The result with which a server ends a subscription.
fn ended(id: impl Display) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":{id},"result":{{"resultType":"complete","_meta":{{"io.modelcontextprotocol/subscriptionId":{id}}}}}}}"#
    )
}

fn cancelled(id: impl Display) -> String {
    format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#)
}

/// The id of a request as it stands there.
fn id(request: &Request) -> String {
    id_in(&request.body)
}

fn id_in(request: &[u8]) -> String {
    let body = String::from_utf8_lossy(request).into_owned();
    let after = body.split_once("\"id\" :").unwrap().1;
    after.split_once(", \"params\"").unwrap().0.to_owned()
}

/// Answers the listen requests in their turn, from 0.
fn upstream(script: impl Fn(usize, &Request, &mut Reply) + Send + Sync + 'static) -> Upstream {
    let turn = AtomicUsize::new(0);
    Upstream::start(move |request, reply| script(turn.fetch_add(1, Ordering::SeqCst), request, reply))
}

fn sidecar(upstream: &Upstream, keys: &str) -> Sidecar {
    Sidecar::with_config(&config(upstream, keys))
}

fn config(upstream: &Upstream, keys: &str) -> String {
    format!("[log]\nlevel = \"debug\"\n[upstreams.mcp]\nurl = \"{}\"\n{keys}\n", upstream.url())
}

fn open(sidecar: &Sidecar, post: &Post) -> Client {
    let node = sidecar.client();
    node.send(post);
    node
}

/// A stream that is acknowledged and at once dropped.
fn dropped(request: &Request, reply: &mut Reply, filter: &str) {
    reply.sse(&[]);
    reply.event(&acknowledged(id(request), filter));
    reply.break_off();
}

/// One that stays.
fn stays(request: &Request, reply: &mut Reply, filter: &str) {
    reply.sse(&[]);
    reply.event(&acknowledged(id(request), filter));
    reply.hang();
}

#[test]
fn a_dropped_subscription_goes_on_under_its_nodes_id_until_the_upstream_ends_it() {
    let drops = [Reply::break_off as fn(&mut Reply), Reply::reset, Reply::end];
    for (name, how) in ["7", "0", "\"7\"", r#""\u00e9/7""#].into_iter().zip(drops.into_iter().cycle()) {
        let gate = Gate::new();
        let pass = gate.clone();
        let upstream = upstream(move |turn, request, reply| {
            let id = id(request);
            reply.sse(&[]);
            reply.event(&acknowledged(&id, ALL));
            reply.event(&changed("tools", &id));
            pass.pass();
            if turn == 0 {
                return how(reply);
            }
            reply.event(&ended(&id));
            reply.end();
        });
        let sidecar = sidecar(&upstream, "");
        let node = open(&sidecar, &listen(name, ALL));
        node.events(2);
        gate.open();
        let refetch = [
            changed("tools", name),
            changed("resources", name),
            updated("\"file:///a\"", name),
            updated("\"file:///é\"", name),
        ];
        node.events(2 + refetch.len() + 1);
        gate.open();
        let mut expected = vec![acknowledged(name, ALL), changed("tools", name)];
        expected.extend(refetch);
        expected.extend([changed("tools", name), ended(name)]);
        let text: String = expected.iter().map(event).collect();
        assert_eq!(node.response().text(), text);
        let line = sidecar.wait_line(|line| line["rpc"] == "subscriptions/listen");
        assert_eq!((&line["outcome"], &line["events"]), (&"ok".into(), &expected.len().into()), "{line}");
        assert_eq!(sidecar.lines().len(), 1);
        assert_eq!(upstream.count(), 2);
    }
}

/// Over HTTP/2 a stream can be dropped, or refused, while its connection stays.
#[test]
fn a_stream_that_is_reset_heals_too() {
    let turn = AtomicUsize::new(0);
    let upstream = http2::Server::start(move |request, mut respond| {
        let turn = turn.fetch_add(1, Ordering::SeqCst);
        async move {
            if turn == 1 {
                respond.send_reset(h2::Reason::REFUSED_STREAM);
                return None;
            }
            let head =
                http::Response::builder().header("content-type", "text/event-stream").body(()).unwrap();
            let mut stream = respond.send_response(head, false).unwrap();
            let acknowledged = event(acknowledged(id_in(request.body()), TOOLS));
            stream.send_data(acknowledged.into(), false).unwrap();
            if turn > 1 {
                return Some(http2::until_stream_reset(&mut stream).await);
            }
            // A reset may overtake what is not written yet.
            tokio::time::sleep(Duration::from_millis(300)).await;
            stream.send_reset(h2::Reason::INTERNAL_ERROR);
            None
        }
    });
    let folder = TempDir::new().unwrap();
    let sidecar = Sidecar::with_config(&upstream.config(&folder));
    let node = open(&sidecar, &listen(1, TOOLS));
    assert_eq!(node.events(2)[1].data, changed("tools", 1));
    assert_eq!((upstream.count(), upstream.connections()), (3, 1));
    node.close();
    assert_eq!(upstream.next_reset(), h2::Reason::CANCEL);
}

#[test]
fn the_new_request_differs_in_its_id_alone() {
    let upstream = upstream(|turn, request, reply| match turn {
        0 | 1 => dropped(request, reply, ALL),
        _ => stays(request, reply, ALL),
    });
    let sidecar = sidecar(&upstream, "headers = { \"X-Team\" = \"agents\" }");
    let post = listen(1, ALL)
        .field("Authorization", "Bearer the node's")
        .field("X-Own", "as it came")
        .field("Cookie", "a=b")
        .field("Last-Event-ID", "5")
        .field("Content-Digest", "sha-256=:AAAA:")
        .at("/mcp?a=b");
    let _node = open(&sidecar, &post);
    let first = upstream.wait_request(0);
    assert_eq!(first.body, body(1, ALL).into_bytes());
    let mut ids = vec!["1".to_owned()];
    for number in [1, 2] {
        let again = upstream.wait_request(number);
        let own = id(&again);
        assert!(own.starts_with("\"mcp-sidecar/") && !ids.contains(&own), "{own} in {ids:?}");
        assert_eq!(again.body, body(&own, ALL).into_bytes());
        assert_eq!(again.head.line, first.head.line);
        let fields = |request: &Request| {
            // What speaks of the body's bytes, and what a stream that can't be resumed must not say.
            let gone = ["content-length", "content-digest", "last-event-id"];
            let mut fields = request.head.fields.clone();
            fields.retain(|(name, _)| !gone.contains(&name.to_ascii_lowercase().as_str()));
            fields.sort();
            fields
        };
        assert_eq!(fields(&again), fields(&first));
        assert_eq!(again.head.field("last-event-id"), None);
        assert_eq!(again.head.field("content-digest"), None);
        assert_eq!(again.head.field("authorization"), Some("Bearer the node's"));
        ids.push(own);
    }
}

#[test]
fn the_upstreams_own_credential_is_read_anew() {
    let folder = TempDir::new().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "first\n").unwrap();
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = upstream(move |turn, request, reply| {
        if turn > 0 {
            return stays(request, reply, TOOLS);
        }
        reply.sse(&[]);
        reply.event(&acknowledged(id(request), TOOLS));
        pass.pass();
        reply.break_off();
    });
    let sidecar = sidecar(&upstream, &format!("bearer = {{ file = \"{}\" }}", token.display()));
    let node = open(&sidecar, &listen(1, TOOLS));
    node.events(1);
    let next = folder.path().join("next");
    std::fs::write(&next, "second\n").unwrap();
    std::fs::rename(&next, &token).unwrap();
    sidecar.wait_stderr("secret replaced");
    gate.open();
    assert_eq!(upstream.wait_request(1).head.field("authorization"), Some("Bearer second"));
}

#[test]
fn it_heals_as_often_as_it_is_dropped() {
    const DROPS: usize = 4;
    let upstream = upstream(|turn, request, reply| match turn {
        0..DROPS => dropped(request, reply, TOOLS),
        _ => {
            reply.sse(&[]);
            reply.event(&acknowledged(id(request), TOOLS));
            reply.event(&ended(id(request)));
            reply.end();
        }
    });
    let sidecar = sidecar(&upstream, "");
    let node = open(&sidecar, &listen("\"s\"", TOOLS));
    let changes = event(changed("tools", "\"s\"")).repeat(DROPS);
    let expected = event(acknowledged("\"s\"", TOOLS)) + &changes + &event(ended("\"s\""));
    assert_eq!(node.response().text(), expected);
    assert_eq!(upstream.count(), DROPS + 1);
    for attempt in 1..=DROPS {
        sidecar.wait_stderr(&format!("\"attempt\":{attempt},"));
    }
}

/// Bytes of a message but for the id stay as they came, whatever the form of its event.
#[test]
fn the_nodes_id_is_put_into_events_of_any_form() {
    let form = |id: &str| {
        format!(
            "id: 5\r\nevent: message\r\nretry: 10\r\ndata:{{\"method\":\"notifications/x\" , \"params\":{{\"_meta\":{{\"io.modelcontextprotocol\\/subscriptionId\" : {id} ,\"y\":1.0}}}}}}\r\n\r\n\
             data: {{\"method\":\"notifications/y\",\ndata: \"params\":{{\"_meta\":{{\ndata: \"io.modelcontextprotocol/subscriptionId\": {id}\ndata: }}}}}}\n\n\
             data: not JSON, {id}\n\n\
             data: {{\"method\":\"n\",\"params\":{{\"_meta\":{{\"io.modelcontextprotocol/subscriptionId\":\"another\"}}}}}}\n\n"
        )
    };
    let text = form("\"OWN\"");
    let upstream = upstream(move |turn, request, reply| {
        if turn == 0 {
            return dropped(request, reply, "{}");
        }
        let own = id(request);
        reply.sse(&[]);
        reply.chunk(format!("\u{feff}{}", event(acknowledged(&own, "{}"))));
        reply.chunk(text.replace("\"OWN\"", &own));
        // Without its empty line, which is added.
        reply.chunk(format!("data: {}\n", ended(&own)));
        reply.end();
    });
    let sidecar = sidecar(&upstream, "");
    let node = open(&sidecar, &listen(0, "{}"));
    let text = node.response().text();
    let own = id(&upstream.wait_request(1));
    let tail = form("0").replace("not JSON, 0", &format!("not JSON, {own}"));
    let expected = event(acknowledged(0, "{}")) + &tail + &format!("data: {}\n\n", ended(0));
    assert_eq!(text, expected);
}

#[test]
fn only_what_the_first_acknowledgement_granted_is_told_as_changed() {
    let granted = r#"{"promptsListChanged":true,"toolsListChanged":false,"resourceSubscriptions":["b"]}"#;
    let asked = r#"{"promptsListChanged":true,"toolsListChanged":true,"resourceSubscriptions":["a","b"]}"#;
    let upstream = upstream(move |turn, request, reply| match turn {
        0 => dropped(request, reply, granted),
        // More than before is no reason to end it.
        _ => stays(request, reply, asked),
    });
    let sidecar = sidecar(&upstream, "");
    let node = open(&sidecar, &listen(1, asked));
    let data: Vec<String> = node.events(3).into_iter().map(|event| event.data).collect();
    assert_eq!(data, [acknowledged(1, granted), changed("prompts", 1), updated("\"b\"", 1)]);
}

/// Expects that the node's stream ends cleanly, with nothing but its acknowledgement, after `count` listen requests.
fn ends_after(
    sidecar: &Sidecar,
    upstream: &Upstream,
    node: &Client,
    granted: &str,
    count: usize,
    what: &str,
) {
    assert_eq!(node.response().text(), event(acknowledged(1, granted)), "{what}");
    let line = sidecar.wait_line(|line| line["rpc"] == "subscriptions/listen");
    assert_eq!((&line["outcome"], &line["status"]), (&"ok".into(), &200.into()), "{what}: {line}");
    assert_eq!(upstream.count(), count, "{what}");
}

#[test]
fn a_narrower_acknowledgement_ends_the_nodes_stream() {
    for less in [
        r#"{"toolsListChanged":true,"resourcesListChanged":true,"resourceSubscriptions":["file:///a"]}"#,
        r#"{"resourcesListChanged":true,"resourceSubscriptions":["file:///a","file:///é"]}"#,
        "{}",
    ] {
        let upstream = upstream(move |turn, request, reply| match turn {
            0 => dropped(request, reply, ALL),
            _ => stays(request, reply, less),
        });
        let sidecar = sidecar(&upstream, "");
        let node = open(&sidecar, &listen(1, ALL));
        ends_after(&sidecar, &upstream, &node, ALL, 2, less);
        upstream.wait_closed(1);
    }
}

#[test]
fn a_refusal_ends_the_nodes_stream() {
    for status in [200, 202, 302, 400, 401, 403, 404, 408, 410, 422] {
        let upstream = upstream(move |turn, request, reply| match turn {
            0 => dropped(request, reply, TOOLS),
            _ => reply.json(status, &[("Location", "http://127.0.0.1:1/"), ("Retry-After", "0")], "{}"),
        });
        let sidecar = sidecar(&upstream, "");
        let node = open(&sidecar, &listen(1, TOOLS));
        ends_after(&sidecar, &upstream, &node, TOOLS, 2, &status.to_string());
    }
}

#[test]
fn what_is_busy_or_broken_is_waited_out() {
    let upstream = upstream(|turn, request, reply| match turn {
        0 => dropped(request, reply, TOOLS),
        1 => reply.json(503, &[], "{}"),
        2 => reply.json(500, &[("Retry-After", "soon")], "{}"),
        3 => reply.json(429, &[], "{}"),
        4 => reply.break_off(),
        5 => {
            reply.sse(&[]);
            reply.break_off();
        }
        _ => stays(request, reply, TOOLS),
    });
    let sidecar = sidecar(&upstream, "");
    let node = open(&sidecar, &listen(1, TOOLS));
    upstream.wait_requests(|_| true, 4);
    upstream.wait_requests(|_| true, 6);
    upstream.wait_requests(|_| true, 7);
    let data: Vec<String> = node.events(2).into_iter().map(|event| event.data).collect();
    assert_eq!(data, [acknowledged(1, TOOLS), changed("tools", 1)]);
}

#[test]
fn the_wait_that_a_busy_upstream_names_is_kept() {
    for (status, named) in [(429, "1"), (503, "1.2")] {
        let moments = Watched::new(Vec::new());
        let came = moments.clone();
        let upstream = upstream(move |turn, request, reply| {
            came.change(|came| came.push(Instant::now()));
            match turn {
                0 => dropped(request, reply, TOOLS),
                1 => reply.json(status, &[("Retry-After", named)], "{}"),
                _ => stays(request, reply, TOOLS),
            }
        });
        let sidecar = sidecar(&upstream, "");
        let node = open(&sidecar, &listen(1, TOOLS));
        node.events(2);
        let moments = moments.lock().clone();
        let waited = moments[2] - moments[1];
        assert!(waited >= Duration::from_secs_f64(named.parse().unwrap()), "{waited:?}");
    }
}

#[test]
fn a_wait_beyond_the_time_to_give_up_ends_the_nodes_stream() {
    let upstream = upstream(|turn, request, reply| match turn {
        0 => dropped(request, reply, TOOLS),
        _ => reply.json(503, &[("Retry-After", "3600")], "{}"),
    });
    let sidecar = sidecar(&upstream, "listen.give_up = \"2s\"");
    let node = open(&sidecar, &listen(1, TOOLS));
    ends_after(&sidecar, &upstream, &node, TOOLS, 2, "3600 s");
}

/// Takes one connection, answers it, and closes both.
fn serve_one(listener: TcpListener, answer: impl Fn(&str) -> String) {
    let (mut stream, _) = listener.accept().unwrap();
    drop(listener);
    let (mut request, mut piece) = (Vec::new(), [0; 4096]);
    while !request.ends_with(b"\"jsonrpc\":\"2.0\"}") {
        let n = stream.read(&mut piece).unwrap();
        request.extend_from_slice(&piece[..n]);
    }
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
    stream.write_all(format!("{head}{}", answer(&id_in(&request))).as_bytes()).unwrap();
}

#[test]
fn an_upstream_that_is_down_for_a_while_is_waited_for() {
    let mut port = Port::reserve(2);
    let sidecar = Sidecar::with_config(&format!(
        "[log]\nlevel = \"debug\"\n[upstreams.mcp]\nurl = \"http://{}/mcp\"\n",
        port.address
    ));
    let listener = port.open();
    let node = open(&sidecar, &listen(1, TOOLS));
    serve_one(listener, |id| event(acknowledged(id, TOOLS)));
    sidecar.wait_stderr("\"attempt\":4");
    assert!(sidecar.stderr().contains("unreachable"), "{}", sidecar.stderr());
    assert_eq!(node.closed_yet(), None);
    serve_one(port.open(), |id| event(acknowledged(id, TOOLS)) + &event(ended(id)));
    let expected =
        [acknowledged(1, TOOLS), changed("tools", 1), ended(1)].iter().map(event).collect::<String>();
    assert_eq!(node.response().text(), expected);
}

#[test]
fn an_upstream_that_does_not_come_back_is_given_up() {
    let mut port = Port::reserve(2);
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"http://{}/mcp\"\nlisten.give_up = \"900ms\"\n",
        port.address
    ));
    let begun = Instant::now();
    let listener = port.open();
    let node = open(&sidecar, &listen(1, TOOLS));
    serve_one(listener, |id| event(acknowledged(id, TOOLS)));
    assert_eq!(node.response().text(), event(acknowledged(1, TOOLS)));
    // Given up where the next wait would find no time.
    assert!(begun.elapsed() > Duration::from_millis(500), "{:?}", begun.elapsed());
    sidecar.wait_stderr("given up");
    assert_eq!(sidecar.wait_lines(1)[0]["outcome"], "ok");
}

#[test]
fn an_upstream_that_answers_nothing_is_given_up_too() {
    for head in [false, true] {
        let upstream = upstream(move |turn, request, reply| {
            if turn == 0 {
                return dropped(request, reply, TOOLS);
            }
            if head {
                reply.sse(&[]);
            }
            reply.hang();
        });
        let sidecar = sidecar(&upstream, "listen.give_up = \"900ms\"");
        let node = open(&sidecar, &listen(1, TOOLS));
        assert_eq!(node.response().text(), event(acknowledged(1, TOOLS)));
        upstream.wait_closed(1);
    }
}

/// On the first stream as on the one in its place.
#[test]
fn a_subscription_whose_end_was_told_is_not_asked_for_again() {
    let error =
        |id: String| format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32603,"message":"m"}}}}"#);
    for end in [ended as fn(String) -> String, cancelled, error] {
        for last in [0, 1] {
            let upstream = upstream(move |turn, request, reply| {
                if turn < last {
                    return dropped(request, reply, "{}");
                }
                reply.sse(&[]);
                reply.event(&acknowledged(id(request), "{}"));
                reply.event(&end(id(request)));
                reply.break_off();
            });
            let sidecar = sidecar(&upstream, "");
            let node = open(&sidecar, &listen(5, "{}"));
            let expected = event(acknowledged(5, "{}")) + &event(end("5".to_owned()));
            assert_eq!(node.response().text(), expected);
            sidecar.wait_lines(1);
            assert_eq!(upstream.count(), last + 1);
        }
    }
}

#[test]
fn a_cancel_of_another_request_ends_nothing() {
    let upstream = upstream(|turn, request, reply| {
        if turn > 0 {
            return stays(request, reply, TOOLS);
        }
        reply.sse(&[]);
        reply.event(&acknowledged(id(request), TOOLS));
        // The string is another id than the number.
        reply.event(&cancelled("\"1\""));
        reply.break_off();
    });
    let sidecar = sidecar(&upstream, "");
    let node = open(&sidecar, &listen(1, TOOLS));
    assert_eq!(node.events(3)[2].data, changed("tools", 1));
}

#[test]
fn an_answer_in_place_of_the_acknowledgement_is_the_nodes() {
    let refused =
        |id: &str| format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32601,"message":"m"}}}}"#);
    let upstream = upstream(move |turn, request, reply| {
        if turn == 0 {
            return dropped(request, reply, TOOLS);
        }
        reply.sse(&[]);
        reply.event(&refused(&id(request)));
        reply.end();
    });
    let sidecar = sidecar(&upstream, "");
    let node = open(&sidecar, &listen(1, TOOLS));
    assert_eq!(node.response().text(), event(acknowledged(1, TOOLS)) + &event(refused("1")));
    assert_eq!(sidecar.wait_lines(1)[0]["outcome"], "rpc_error");
}

#[test]
fn what_cannot_be_asked_again_just_ends() {
    let unknown = [r#"{"taskIds":["t"]}"#, r#"{"toolsListChanged":true,"somethingNew":{}}"#, "[]"];
    let cases = unknown.map(|filter| (listen(1, filter), ""));
    let large = format!(r#"{{"resourceSubscriptions":["{}"]}}"#, "x".repeat(70_000));
    let large = (listen(1, &large), "");
    let signed = listen(1, TOOLS).field("Signature-Input", "s=()").field("Signature", "s=:AA==:");
    let off = (listen(1, TOOLS), "listen.reconnect = false");
    for (post, keys) in cases.into_iter().chain([(signed, ""), large, off]) {
        let upstream = upstream(|_, request, reply| dropped(request, reply, TOOLS));
        let sidecar = sidecar(&upstream, keys);
        let node = open(&sidecar, &post);
        ends_after(&sidecar, &upstream, &node, TOOLS, 1, keys);
    }
}

#[test]
fn one_that_was_never_acknowledged_is_not_asked_for_again() {
    let upstream = upstream(|_, _, reply| {
        reply.sse(&[]);
        reply.event(&changed("tools", 1));
        reply.break_off();
    });
    let sidecar = sidecar(&upstream, "");
    let node = open(&sidecar, &listen(1, TOOLS));
    assert_eq!(node.response().text(), event(changed("tools", 1)));
    sidecar.wait_lines(1);
    assert_eq!(upstream.count(), 1);
}

/// An upstream that is away for a second after each drop.
fn away(turn: usize, request: &Request, reply: &mut Reply) {
    match turn {
        0 => dropped(request, reply, TOOLS),
        1 => reply.json(503, &[("Retry-After", "1")], "{}"),
        _ => stays(request, reply, TOOLS),
    }
}

#[test]
fn keepalives_go_on_while_the_upstream_is_away() {
    let upstream = upstream(away);
    let sidecar = sidecar(&upstream, "keepalive.interval = \"100ms\"");
    let node = open(&sidecar, &listen(1, TOOLS));
    upstream.wait_request(1);
    let before = sse::read(&node.body(|_| true)).comments.len();
    upstream.wait_request(2);
    let after = sse::read(&node.body(|_| true)).comments.len();
    // Ten would fit.
    assert!(after >= before + 4, "{before}, {after}");
}

/// Neither the node's close, nor a cancel, nor a drain leaves anything behind that would listen again.
#[test]
fn what_ends_the_nodes_stream_ends_the_wait() {
    let cancel = Post::modern("notifications/cancelled", None, cancelled(1));
    for how in ["close", "cancel", "reset"] {
        let upstream = upstream(away);
        let sidecar = sidecar(&upstream, "");
        let node = open(&sidecar, &listen(1, TOOLS));
        upstream.wait_request(1);
        match how {
            "close" => _ = node.close(),
            "reset" => node.reset(),
            _ => {
                assert_eq!(sidecar.client().ask(&cancel).status(), 202);
                assert_eq!(node.response().text(), event(acknowledged(1, TOOLS)));
            }
        }
        let line = sidecar.wait_line(|line| line["rpc"] == "subscriptions/listen");
        assert_eq!(line["outcome"], "cancelled", "{how}: {line}");
        // When it would have come back: a second, and a quarter of a second at most.
        thread::sleep(Duration::from_millis(1500));
        assert_eq!(upstream.count(), 2, "{how}");
    }
}

#[test]
fn the_nodes_close_ends_a_stream_that_was_reopened() {
    let upstream = upstream(|turn, request, reply| match turn {
        0 => dropped(request, reply, TOOLS),
        _ => stays(request, reply, TOOLS),
    });
    let sidecar = sidecar(&upstream, "");
    let node = open(&sidecar, &listen(1, TOOLS));
    node.events(2);
    node.close();
    upstream.wait_closed(1);
    assert_eq!(sidecar.wait_lines(1)[0]["cancelled_by"], "disconnect");
}

#[test]
fn a_drain_ends_the_nodes_stream_at_once_and_without_a_result() {
    for away_now in [true, false] {
        let upstream = upstream(move |turn, request, reply| match turn {
            1 if !away_now => stays(request, reply, TOOLS),
            _ => away(turn, request, reply),
        });
        let mut sidecar = sidecar(&upstream, "");
        let node = open(&sidecar, &listen(1, TOOLS));
        let mut expected = event(acknowledged(1, TOOLS));
        if away_now {
            upstream.wait_request(1);
        } else {
            node.events(2);
            expected += &event(changed("tools", 1));
        }
        let begun = Instant::now();
        assert!(sidecar.terminate().success());
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert_eq!(node.response().text(), expected);
        assert_eq!(upstream.count(), 2);
        assert_eq!(sidecar.lines()[0]["cancelled_by"], "drain");
    }
}

#[test]
fn the_streams_of_one_node_stay_independent() {
    let prompts = r#"{"promptsListChanged":true}"#;
    let (drop_one, tell) = (Gate::new(), Gate::new());
    let (dropping, telling) = (drop_one.clone(), tell.clone());
    let upstream = Upstream::start(move |request, reply| {
        let id = id(request);
        reply.sse(&[]);
        if request.json()["params"]["notifications"]["toolsListChanged"] == true {
            reply.event(&acknowledged(&id, TOOLS));
            if id == "1" {
                dropping.pass();
                return reply.break_off();
            }
            return reply.hang();
        }
        reply.event(&acknowledged(&id, prompts));
        telling.pass();
        reply.event(&changed("prompts", &id));
        reply.hang();
    });
    let sidecar = sidecar(&upstream, "");
    let tools = open(&sidecar, &listen(1, TOOLS));
    let other = open(&sidecar, &listen("\"1\"", prompts));
    tools.events(1);
    other.events(1);
    drop_one.open();
    assert_eq!(tools.events(2)[1].data, changed("tools", 1));
    tell.open();
    let told = other.events(2);
    assert_eq!(told[1].data, changed("prompts", "\"1\""));
    assert_eq!((told.len(), tools.events(2).len()), (2, 2));
    assert_eq!(upstream.count(), 3);
}

#[test]
fn a_legacy_stream_is_never_asked_for_again() {
    let ack = acknowledged(1, TOOLS);
    let legacy = Post::legacy(
        r#"{"jsonrpc":"2.0","id":1,"method":"subscriptions/listen","params":{"notifications":{"toolsListChanged":true}}}"#,
    );
    for post in [Post::get(), legacy] {
        let said = ack.clone();
        let upstream = upstream(move |_, _, reply| {
            reply.sse(&[]);
            reply.chunk(format!("id: 1\n{}", event(&said)));
            reply.end();
        });
        let sidecar = sidecar(&upstream, "");
        let node = open(&sidecar, &post);
        assert_eq!(node.response().text(), format!("id: 1\n{}", event(&ack)));
        sidecar.wait_lines(1);
        assert_eq!(upstream.count(), 1);
    }
}

/// The queue's rules hold across a drop: while the node does not read nothing is asked for again, and nothing is lost.
#[test]
fn a_node_that_is_slow_loses_nothing_of_it() {
    const EVENTS: usize = 300;
    let large = |n: usize| {
        let filler = "x".repeat(64 * 1024);
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"n":{n},"data":"{filler}"}}}}"#
        )
    };
    let upstream = upstream(move |turn, request, reply| {
        reply.sse(&[]);
        reply.event(&acknowledged(id(request), TOOLS));
        if turn > 0 {
            return reply.hang();
        }
        (0..EVENTS).for_each(|n| reply.event(&large(n)));
        reply.break_off();
    });
    let sidecar = sidecar(&upstream, "progress = { queue = 4, queue_bytes = \"100KiB\" }");
    let node = Client::stalled(&sidecar.listen, Some(4096));
    node.send(&listen(1, TOOLS));
    upstream.wait_request(0);
    thread::sleep(Duration::from_millis(500));
    assert_eq!(upstream.count(), 1);
    node.read_on();
    upstream.wait_request(1);
    let events = node.events(EVENTS + 2);
    for (n, event) in events[1..=EVENTS].iter().enumerate() {
        assert!(event.data.contains(&format!("\"n\":{n},")));
    }
    assert_eq!(events[EVENTS + 1].data, changed("tools", 1));
}
