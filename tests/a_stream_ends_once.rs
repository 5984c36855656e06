//! How a stream ends. With its response, which completes the exchange whatever the node does
//! next; or broken, with one error event and never half an event; or, where its events have ids, just so.

mod support;

use std::time::Duration;

use support::{
    Gate, Post, Sidecar, Upstream,
    mcp::{self, call, event, modern_call, progress, result},
    sse,
    upstream::Reply,
};

fn with_idle(upstream: &Upstream, idle: &str) -> Sidecar {
    Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nidle_timeout = \"{idle}\"\n",
        upstream.url()
    ))
}

fn ended(sidecar: &Sidecar) -> serde_json::Value {
    sidecar.wait_line(|line| line["rpc"] == "tools/call")
}

#[test]
fn a_node_that_closes_right_after_the_final_event_has_cancelled_nothing() {
    for (post, reset) in [(call(1), false), (modern_call(1), false), (call(1), true), (modern_call(1), true)]
    {
        let upstream = Upstream::start(|_, reply| {
            reply.sse(&[]);
            reply.event(&progress(1, 1));
            reply.event(&result(1));
            reply.hang();
        });
        let sidecar = Sidecar::with_config(&format!(
            "[upstreams.mcp]\nurl = \"{}\"\nlegacy_disconnect = \"cancel\"\n",
            upstream.url()
        ));
        let client = sidecar.client();
        client.send(&post);
        client.body(|body| body.ends_with(event(result(1)).as_bytes()));
        if reset {
            client.reset();
        } else {
            client.close();
        }
        upstream.wait_closed(0);
        let line = ended(&sidecar);
        assert_eq!(line["outcome"], "ok");
        assert_eq!(line["cancelled_by"], serde_json::Value::Null);
        assert_eq!(upstream.count(), 1, "no notification was sent");
    }
}

#[test]
fn a_modern_stream_that_its_upstream_never_ends_is_ended_after_the_response() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.event(&result(1));
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&modern_call(1));
    assert_eq!(client.response().text(), event(result(1)));
    upstream.wait_closed(0);
    assert_eq!(ended(&sidecar)["outcome"], "ok");
    // The node's connection serves on.
    client.send(&modern_call(1));
    assert_eq!(client.response().text(), event(result(1)));
}

#[test]
fn a_legacy_stream_may_go_on_after_its_response() {
    let gate = Gate::new();
    let pass = gate.clone();
    let log = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"late"}}"#;
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        reply.event(&result(1));
        pass.pass();
        reply.event(log);
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    client.events(1);
    // Longer than a modern stream would be waited for.
    std::thread::sleep(Duration::from_millis(1000));
    gate.open();
    assert_eq!(client.response().text(), event(result(1)) + &event(log));
    assert_eq!(ended(&sidecar)["outcome"], "ok");
}

#[test]
fn a_legacy_stream_that_is_silent_after_its_response_ends_at_the_idle_time_as_completed() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.event(&result(1));
        reply.hang();
    });
    let sidecar = with_idle(&upstream, "300ms");
    let client = sidecar.client();
    client.send(&call(1));
    assert_eq!(client.response().text(), event(result(1)));
    upstream.wait_closed(0);
    assert_eq!(ended(&sidecar)["outcome"], "ok");
}

#[test]
fn half_an_event_is_never_sent_and_one_error_tells_the_break() {
    let whole = event(progress(1, 3));
    let half = &event(result(1))[..60];
    type Break = fn(&mut Reply);
    let breaks: [(&str, Break); 4] = [
        ("the connection closed", Reply::break_off),
        ("the connection reset", Reply::reset),
        ("the stream ended cleanly", Reply::end),
        ("the chunk was cut", |reply| {
            reply.raw("ff\r\ndata: {\"jsonrpc\"");
            reply.break_off();
        }),
    ];
    for (what, how) in breaks {
        for post in [call(1), modern_call(1), call("\"x\""), modern_call("\"x\"")] {
            let id = serde_json::from_slice::<serde_json::Value>(&post.body).unwrap()["id"].clone();
            let gate = Gate::new();
            let (pass, sent) = (gate.clone(), format!("{whole}{half}"));
            let upstream = Upstream::start(move |_, reply| {
                reply.sse(&[]);
                reply.chunk(&sent);
                // A reset would overtake what was sent before it.
                pass.pass();
                how(reply);
            });
            let sidecar = Sidecar::before(&upstream);
            let client = sidecar.client();
            client.send(&post);
            // Progress under the token 1 is a stray one in a modern call whose token is "x".
            let strays = id == "x" && post.fields.iter().any(|(_, value)| value == mcp::MODERN);
            let first = if strays { "" } else { &whole };
            client.body(|body| body == first.as_bytes());
            gate.open();
            let told = client.response().text();
            let rest = told.strip_prefix(first).unwrap();
            let read = sse::read(rest.as_bytes());
            assert!(!read.cut, "{what}: {told}");
            assert_eq!(read.events.len(), 1, "{what}: {told}");
            let error = read.events[0].json();
            assert_eq!(error["id"], id);
            assert_eq!(error["error"]["code"], 1502);
            assert_eq!(error["error"]["data"]["source"], "mcp-sidecar");
            assert_eq!(error["error"]["data"]["reason"], "upstream_failed");
            assert_eq!(error["error"]["data"]["outcome"], "unknown");
            assert!(!rest.contains("\nid:") && !rest.contains("retry:"), "{rest}");
            let line = ended(&sidecar);
            assert_eq!(
                (&line["outcome"], &line["reason"]),
                (&"failed".into(), &"upstream_failed".into()),
                "{what}"
            );
            assert_eq!((&line["status"], &line["upstream_status"]), (&200.into(), &200.into()));
        }
    }
}

/// The node resumes with the last id; an error made up here would beat the response that waits for it.
#[test]
fn a_legacy_stream_whose_events_have_ids_just_ends_when_it_breaks() {
    let whole = format!("id: 7\ndata: {}\n\n", progress(1, 1));
    for how in [Reply::break_off as fn(&mut Reply), Reply::reset, Reply::end] {
        let gate = Gate::new();
        let (pass, sent) = (gate.clone(), format!("{whole}id: 8\ndata: {{\"jsonrpc\""));
        let upstream = Upstream::start(move |_, reply| {
            reply.sse(&[]);
            reply.chunk(&sent);
            pass.pass();
            how(reply);
        });
        let sidecar = Sidecar::before(&upstream);
        let client = sidecar.client();
        client.send(&call(1));
        client.body(|body| body == whole.as_bytes());
        gate.open();
        assert_eq!(client.response().text(), whole);
        ended(&sidecar);
    }
}

/// Ids mean nothing in the modern era, and an empty `id` takes the resume point away (WHATWG HTML § 9.2.6).
#[test]
fn ids_that_nobody_can_resume_from_leave_the_error_in_place() {
    let modern = format!("id: 7\ndata: {}\n\n", progress(1, 1));
    let emptied = format!("id: 7\ndata: {}\n\nid\ndata: {}\n\n", progress(1, 1), progress(1, 2));
    for (post, stream) in [(modern_call(1), modern), (call(1), emptied)] {
        let sent = stream.clone();
        let upstream = Upstream::start(move |_, reply| {
            reply.sse(&[]);
            reply.chunk(&sent);
            reply.end();
        });
        let sidecar = Sidecar::before(&upstream);
        let told = sidecar.client().ask(&post).text();
        let rest = told.strip_prefix(&stream).unwrap();
        assert_eq!(sse::read(rest.as_bytes()).events[0].json()["error"]["data"]["reason"], "upstream_failed");
    }
}

#[test]
fn a_break_after_the_response_is_no_failure() {
    for post in [call(1), modern_call(1)] {
        for how in [Reply::break_off as fn(&mut Reply), Reply::reset] {
            let gate = Gate::new();
            let pass = gate.clone();
            let upstream = Upstream::start(move |_, reply| {
                reply.sse(&[]);
                reply.event(&result(1));
                reply.chunk("data: {\"half");
                pass.pass();
                how(reply);
            });
            let sidecar = Sidecar::before(&upstream);
            let client = sidecar.client();
            client.send(&post);
            client.events(1);
            gate.open();
            assert_eq!(client.response().text(), event(result(1)));
            assert_eq!(ended(&sidecar)["outcome"], "ok");
        }
    }
}

/// Strict clients drop a last event without its empty line, so the sidecar completes it where it is the response.
#[test]
fn a_last_event_without_its_empty_line_is_completed_if_it_is_the_response() {
    let answer = result(1);
    let endings = [
        (format!("data: {answer}\n"), "\n"),
        (format!("data: {answer}"), "\n\n"),
        (format!("data: {answer}\r\n"), "\r\n"),
        (format!("event: message\r\ndata: {answer}\r\n\r"), ""),
        (format!("event: message\ndata: {answer}\nid: 3"), "\n\n"),
    ];
    for (stream, completion) in endings {
        for post in [call(1), modern_call(1)] {
            let sent = stream.clone();
            let upstream = Upstream::start(move |_, reply| {
                reply.sse(&[]);
                reply.chunk(&sent);
                reply.end();
            });
            let sidecar = Sidecar::before(&upstream);
            let body = sidecar.client().ask(&post).body;
            assert_eq!(String::from_utf8(body.clone()).unwrap(), format!("{stream}{completion}"));
            let read = sse::read(&body);
            assert!(!read.cut);
            assert_eq!(read.events.len(), 1);
            assert_eq!(ended(&sidecar)["outcome"], "ok");
        }
    }
}

#[test]
fn a_batch_of_responses_without_its_empty_line_is_completed_too() {
    let stream = format!("data: [{}]\n", result(1));
    let sent = stream.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        reply.chunk(&sent);
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let post = Post::new(r#"[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow"}}]"#)
        .field("MCP-Protocol-Version", "2025-03-26");
    assert_eq!(sidecar.client().ask(&post).text(), stream + "\n");
}

#[test]
fn a_last_event_without_its_empty_line_that_is_not_the_response_is_dropped() {
    let first = event(progress(1, 1));
    for last in [
        format!("data: {}\n", progress(1, 2)),
        format!("data: {}\n", result(2)),
        format!("data: {}\n", result("\"1\"")),
        "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"resu\n".to_owned(),
        format!(": {}\n", result(1)),
    ] {
        let sent = format!("{first}{last}");
        let upstream = Upstream::start(move |_, reply| {
            reply.sse(&[]);
            reply.chunk(&sent);
            reply.end();
        });
        let sidecar = Sidecar::before(&upstream);
        let told = sidecar.client().ask(&call(1)).text();
        let rest = told.strip_prefix(&first).unwrap();
        let read = sse::read(rest.as_bytes());
        assert_eq!(read.events.len(), 1, "{last}: {told}");
        assert_eq!(read.events[0].json()["error"]["data"]["reason"], "upstream_failed");
    }
}

#[test]
fn no_progress_follows_the_response_of_a_modern_stream() {
    let log = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"late"}}"#;
    let sent = [progress(1, 1), result(1), progress(1, 2), log.to_owned()];
    let upstream = Upstream::sse(&sent);
    let sidecar = Sidecar::before(&upstream);
    let told = sidecar.client().ask(&modern_call(1)).text();
    assert_eq!(told, [progress(1, 1), result(1), log.to_owned()].map(event).concat());
    assert_eq!(ended(&sidecar)["outcome"], "ok");
}

/// A legacy call may have become a task, whose progress goes on under the same token: it passes. (A stricter client-side
/// wish, that nothing at all may follow, yields to the queue's rule for late progress.)
#[test]
fn late_progress_of_a_legacy_stream_passes() {
    let sent = [progress(1, 1), result(1), progress(1, 2), progress("\"task\"", 1)];
    let upstream = Upstream::sse(&sent);
    let sidecar = Sidecar::before(&upstream);
    assert_eq!(sidecar.client().ask(&call(1)).text(), sent.map(event).concat());
}

#[test]
fn a_modern_stream_carries_no_progress_but_its_own_request_s() {
    let sent = [progress(2, 1), progress("\"1\"", 1), progress(1, 1), progress("1.0", 5), result(1)];
    let upstream = Upstream::sse(&sent);
    let sidecar = Sidecar::before(&upstream);
    assert_eq!(sidecar.client().ask(&modern_call(1)).text(), event(progress(1, 1)) + &event(result(1)));
    let line = ended(&sidecar);
    assert_eq!(line["progress"], 1);
    // A request that offered no token has none to be named.
    let mut post = modern_call(1);
    post.body = String::from_utf8(post.body).unwrap().replace(r#""progressToken":1,"#, "").into_bytes();
    assert_eq!(sidecar.client().ask(&post).text(), event(result(1)));
}

#[test]
fn a_legacy_stream_carries_progress_of_several_tokens_each_rising_on_its_own() {
    let sent = [
        progress(1, 5),
        progress("\"1\"", 1),
        progress(2, 3),
        progress(1, 6),
        progress("\"1\"", 2),
        result(1),
    ];
    let upstream = Upstream::sse(&sent);
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nprogress = {{ min_interval = \"0\" }}\n",
        upstream.url()
    ));
    assert_eq!(sidecar.client().ask(&call(1)).text(), sent.map(event).concat());
}

/// A subscription that its upstream drops is closed, so that the node listens again: it gets no answer made up here.
#[test]
fn a_dropped_subscription_just_ends() {
    let acknowledged = r#"{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":4}}}"#;
    let listen = format!(
        r#"{{"jsonrpc":"2.0","id":4,"method":"subscriptions/listen","params":{{"notifications":{{"toolsListChanged":true}},"_meta":{{"io.modelcontextprotocol/protocolVersion":"{}"}}}}}}"#,
        mcp::MODERN
    );
    for how in [Reply::break_off as fn(&mut Reply), Reply::reset, Reply::end] {
        let gate = Gate::new();
        let pass = gate.clone();
        let upstream = Upstream::start(move |_, reply| {
            reply.sse(&[]);
            reply.event(acknowledged);
            pass.pass();
            how(reply);
        });
        let sidecar = Sidecar::with_config(&format!(
            "[upstreams.mcp]\nurl = \"{}\"\nlisten = {{ reconnect = false }}\n",
            upstream.url()
        ));
        let client = sidecar.client();
        client.send(&Post::modern("subscriptions/listen", None, listen.clone()));
        client.events(1);
        gate.open();
        assert_eq!(client.response().text(), event(acknowledged));
    }
}

/// Cancel has won once it was forwarded: what the upstream still says of the call stays here, its result included.
#[test]
fn nothing_of_a_cancelled_legacy_call_goes_to_the_node_any_more() {
    let (told, said) = (Gate::new(), Gate::new());
    let upstream = Upstream::start(move |request, reply| {
        if request.json()["method"] == "notifications/cancelled" {
            said.open();
            told.pass();
            reply.head(202, &[("Content-Length", "0")]);
            return;
        }
        reply.sse(&[]);
        reply.event(&progress(1, 1));
        said.pass();
        (2..10).for_each(|n| reply.event(&progress(1, n)));
        reply.event(&result(1));
        told.open();
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    client.events(1);
    assert_eq!(sidecar.client().ask(&mcp::cancel(1)).status(), 202);
    assert_eq!(client.response().text(), event(progress(1, 1)));
    let line = ended(&sidecar);
    assert_eq!((&line["outcome"], &line["cancelled_by"]), (&"cancelled".into(), &"notification".into()));
}
