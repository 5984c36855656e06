//! A legacy call whose stream ended with event ids is still running, until its response passes on a
//! `GET` of that session, a cancel, or the clock.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use serde_json::{Value, json};
use support::{
    Gate, Post, Request, Sidecar, Upstream, Watched,
    http::Response,
    keyed::{
        Call, assert_busy, assert_error, calls, done, key, list, message, meta, method, result, server, text,
    },
    mcp, sse, until,
    upstream::Reply,
};

/// How a call's first attempt ends, beside having told an event id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Clean,
    Reset,
    Hangs,
}

/// A legacy server: the first call under each key gets an event with an id and no response; a `GET` with `Last-Event-ID` is
/// answered by `resume`, which is given that first call.
fn resumable(ending: Ending, resume: impl Fn(&Request, &mut Reply) + Send + Sync + 'static) -> Upstream {
    let firsts = Watched::new(Vec::<Request>::new());
    server(move |n, request, reply| {
        if request.method() == "GET" {
            let first = firsts.lock().last().cloned().unwrap();
            reply.sse(&[]);
            resume(&first, reply);
            return reply.end();
        }
        let is_first = firsts.change(|firsts| {
            let known = firsts.iter().any(|first| key(first) == key(request));
            firsts.extend((!known).then(|| request.clone()));
            !known
        });
        if !is_first {
            return reply.json(200, &[], &done(request, n));
        }
        reply.sse(&[]);
        reply.chunk("id: e1\ndata:\n\n");
        match ending {
            Ending::Clean => reply.end(),
            Ending::Reset => reply.break_off(),
            Ending::Hangs => reply.hang(),
        }
    })
}

fn answers(first: &Request, reply: &mut Reply) {
    reply.chunk(format!("id: e2\ndata: {}\n\n", done(first, 0)));
}

fn call(tool: &str, activity: &str) -> Call {
    Call::of(tool).legacy().activity("job", activity)
}

fn resuming() -> Post {
    Post::get().field("Last-Event-ID", "e1")
}

fn made(upstream: &Upstream, wanted: &str) -> usize {
    calls(upstream).iter().filter(|call| key(call).as_deref() == Some(wanted)).count()
}

fn when_free(sidecar: &Sidecar, call: &Call) -> Response {
    let mut answer = None;
    until("the call to have ended", || {
        let response = call.ask(sidecar);
        let free = message(&response)["result"]["_meta"]["oz0/retryable"] != true;
        answer = Some(response);
        free
    });
    answer.unwrap()
}

#[test]
fn the_call_runs_until_its_response_passes_on_a_get() {
    for ending in [Ending::Clean, Ending::Reset] {
        let upstream = resumable(ending, answers);
        let sidecar = Sidecar::before(&upstream);
        list(&sidecar);
        for tool in ["effect", "charge"] {
            let (call, name) = (call(tool, tool), format!("job/{tool}"));
            let first = call.ask(&sidecar);
            let events = sse::read(&first.body).events;
            assert!(events.iter().all(|event| event.data.is_empty()), "it just ends: {}", first.text());
            for _ in 0..2 {
                assert_busy(&call.clone().id(2).ask(&sidecar));
            }
            assert_eq!(made(&upstream, &name), 1);
            let resumed = sidecar.client().ask(&resuming());
            let events = sse::read(&resumed.body).events;
            assert_eq!((events.len(), events[0].id.as_str()), (1, "e2"));
            assert_eq!(events[0].json()["result"]["content"][0]["text"], "done 0", "relayed as it came");
            // It has committed before it passed.
            assert_eq!(text(&call.clone().id(3).ask(&sidecar)), "done 0");
            assert_eq!(made(&upstream, &name), 1, "{tool} after {ending:?}");
        }
    }
}

#[test]
fn a_response_that_is_an_error_ends_it_too() {
    let upstream = resumable(Ending::Clean, |first, reply| {
        reply.event(&result(first, r#"{"content":[],"isError":true}"#));
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = call("effect", "a");
    call.ask(&sidecar);
    assert_busy(&call.ask(&sidecar));
    sidecar.client().ask(&resuming());
    assert!(text(&call.ask(&sidecar)).starts_with("done "), "it may be sent again");
    assert_eq!(made(&upstream, "job/a"), 2);
}

#[test]
fn only_a_get_of_that_session_ends_it() {
    let upstream = resumable(Ending::Clean, answers);
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = call("effect", "a");
    call.ask(&sidecar);
    let others = [
        resuming().field("Mcp-Session-Id", "sess-B"),
        resuming().without("Mcp-Session-Id"),
        resuming().field("Mcp-Session-Id", "sess-B").field("Authorization", "Bearer b"),
    ];
    for other in others {
        assert!(sidecar.client().ask(&other).text().contains("done 0"), "it passes all the same");
        assert_busy(&call.ask(&sidecar));
    }
    sidecar.client().ask(&resuming());
    assert_eq!(text(&call.ask(&sidecar)), "done 0");
    assert_eq!(made(&upstream, "job/a"), 1);
}

#[test]
fn a_get_of_that_session_ends_it_although_its_credential_was_rotated() {
    let upstream = resumable(Ending::Clean, answers);
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let as_ = |post: Post, token: &str| post.field("Authorization", &format!("Bearer {token}"));
    for (tool, sent_again) in [("effect", false), ("charge", true)] {
        let (call, name) = (call(tool, tool), format!("job/{tool}"));
        let ask = |token: &str| sidecar.client().ask(&as_(call.post(), token));
        ask("old");
        assert_busy(&ask("new"));
        let resumed = sidecar.client().ask(&as_(resuming(), "new"));
        assert!(resumed.text().contains("done 0"));
        assert_eq!(text(&ask("old")), "done 0", "it has committed, for whom it was made");
        let other = ask("new");
        if sent_again {
            assert!(text(&other).starts_with("done ") && text(&other) != "done 0");
        } else {
            assert_error(&other, 1409, "already_done", "done");
        }
        assert_eq!(made(&upstream, &name), if sent_again { 2 } else { 1 });
    }
}

#[test]
fn where_clients_share_a_session_id_each_ends_its_own() {
    let upstream = resumable(Ending::Clean, |_, reply| reply.event(&mcp::result(1)));
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let as_ = |post: Post, token: &str| post.field("Authorization", &format!("Bearer {token}"));
    let ask = |who: &str| sidecar.client().ask(&as_(call("effect", who).post(), who));
    for who in ["a", "b"] {
        ask(who);
    }
    sidecar.client().ask(&as_(resuming(), "stranger"));
    for who in ["a", "b"] {
        assert_busy(&ask(who));
    }
    sidecar.client().ask(&as_(resuming(), "b"));
    assert_eq!(text(&ask("b")), "ok");
    assert_busy(&ask("a"));
}

#[test]
fn a_response_in_a_batch_on_the_get_ends_it_too() {
    let upstream = resumable(Ending::Clean, |first, reply| {
        reply.event(&format!("[{},{}]", mcp::result("\"another\""), done(first, 0)));
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = call("effect", "a");
    call.ask(&sidecar);
    assert!(sidecar.client().ask(&resuming()).text().contains("done 0"));
    assert_eq!(text(&call.ask(&sidecar)), "done 0");
    assert_eq!(made(&upstream, "job/a"), 1);
}

#[test]
fn another_id_is_another_call() {
    let upstream = resumable(Ending::Clean, |_, reply| {
        ["\"1\"", "2"].iter().for_each(|id| reply.event(&mcp::result(id)));
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = call("effect", "a").id(1);
    call.ask(&sidecar);
    sidecar.client().ask(&resuming());
    assert_busy(&call.ask(&sidecar));
}

#[test]
fn a_cancel_ends_it() {
    let upstream = resumable(Ending::Clean, answers);
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    for (tool, sent) in [("effect", 1), ("charge", 2)] {
        let call = call(tool, tool).id(7);
        call.ask(&sidecar);
        assert_busy(&call.ask(&sidecar));
        assert_eq!(sidecar.client().ask(&mcp::cancel(8)).status(), 202, "another call's");
        assert_busy(&call.ask(&sidecar));
        assert_eq!(sidecar.client().ask(&mcp::cancel(7)).status(), 202);
        let next = when_free(&sidecar, &call);
        if sent == 1 {
            assert_error(&next, 1409, "outcome_unknown", "unknown");
        }
        assert_eq!(made(&upstream, &format!("job/{tool}")), sent);
    }
    let forwarded = upstream.requests();
    let cancels = forwarded.iter().filter(|r| method(r).as_deref() == Some("notifications/cancelled"));
    assert_eq!(cancels.count(), 4);
}

#[test]
fn its_clock_ends_it() {
    let upstream = resumable(Ending::Clean, answers);
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nmax_timeout = \"1s\"\n[upstreams.long]\nurl = \"{}\"\n",
        upstream.url(),
        upstream.url()
    ));
    list(&sidecar);
    let call = call("effect", "max");
    call.ask(&sidecar);
    assert_busy(&call.ask(&sidecar));
    assert_error(&when_free(&sidecar, &call), 1409, "outcome_unknown", "unknown");
    // The node's own limit is a clock too.
    let limited =
        Call::of("effect").legacy().said(json!({ "job": "job", "activity": "limit", "time_limit": 1 }));
    let post = |call: &Call| call.post().at("/long");
    sidecar.client().ask(&Post { path: "/long".into(), ..support::keyed::list_post("{}") });
    sidecar.client().ask(&post(&limited));
    until("the limit to be over", || {
        message(&sidecar.client().ask(&post(&limited)))["error"]["data"]["reason"] == "outcome_unknown"
    });
    assert_eq!((made(&upstream, "job/max"), made(&upstream, "job/limit")), (1, 1));
    // Nobody waits for them any more: their server is told to stop, each once.
    let cancels = || {
        let all = upstream.requests().into_iter();
        all.filter(|r| method(r).as_deref() == Some("notifications/cancelled")).collect::<Vec<_>>()
    };
    until("the server to be told", || cancels().len() >= 2);
    for cancel in cancels() {
        assert_eq!(cancel.json()["params"]["requestId"], 1);
        assert_eq!(cancel.head.field("mcp-session-id"), Some("sess-A"));
    }
    assert_eq!(cancels().len(), 2);
}

#[test]
fn a_policy_that_denies_its_tool_ends_it() {
    let upstream = resumable(Ending::Clean, answers);
    let config =
        |deny: &str| format!("[upstreams.mcp]\nurl = \"{}\"\npolicy.deny = [{deny}]\n", upstream.url());
    let sidecar = Sidecar::with_config(&config(""));
    let reload = |deny: &str, number: usize| {
        std::fs::write(sidecar.folder().path().join("sidecar.toml"), config(deny)).unwrap();
        sidecar.signal("HUP");
        sidecar.wait_said("configuration reloaded", number);
    };
    list(&sidecar);
    let (denied, other) = (call("effect", "denied").id(7), call("charge", "other").id(8));
    for call in [&denied, &other] {
        call.ask(&sidecar);
        assert_busy(&call.ask(&sidecar));
    }
    reload("\"eff*\"", 1);
    let cancel = upstream.wait_request_where(|r| method(r).as_deref() == Some("notifications/cancelled"));
    assert_eq!(cancel.json()["params"]["requestId"], 7);
    assert_eq!(cancel.head.field("mcp-session-id"), Some("sess-A"), "as on the call that it is about");
    assert_error(&denied.ask(&sidecar), 1403, "policy", "not_sent");
    assert_busy(&other.ask(&sidecar));
    reload("", 2);
    assert_error(&when_free(&sidecar, &denied), 1409, "outcome_unknown", "unknown");
    assert_busy(&other.ask(&sidecar));
    let cancels = upstream.requests();
    let cancels = cancels.iter().filter(|r| method(r).as_deref() == Some("notifications/cancelled"));
    assert_eq!((cancels.count(), made(&upstream, "job/denied"), made(&upstream, "job/other")), (1, 1, 1));
}

#[test]
fn a_policy_that_denies_the_tool_of_a_node_that_left_tells_its_server_once() {
    let upstream = resumable(Ending::Hangs, answers);
    let config = |more: &str| {
        format!("[upstreams.mcp]\nurl = \"{}\"\ncancel_grace = \"3s\"\n{more}\n", upstream.url())
    };
    let sidecar = Sidecar::with_config(&config(""));
    list(&sidecar);
    let node = sidecar.client();
    node.send(&call("effect", "a").id(7).post());
    node.body(|bytes| bytes.starts_with(b"id: e1"));
    node.close();
    sidecar.wait_line(|line| line["outcome"] == "cancelled");
    std::fs::write(sidecar.folder().path().join("sidecar.toml"), config("policy.deny = [\"effect\"]"))
        .unwrap();
    sidecar.signal("HUP");
    let is_cancel = |request: &Request| method(request).as_deref() == Some("notifications/cancelled");
    upstream.wait_request_where(is_cancel);
    // Had it been forgotten, the notice that waited for the node would be sent when that one's time is over.
    sidecar.wait_metric("mcp_sidecar_cancel_notices_waiting", |waiting| waiting == 0);
    sidecar.wait_metric("mcp_sidecar_cancel_notices", |open| open == 0);
    assert_eq!(upstream.requests().iter().filter(|request| is_cancel(request)).count(), 1);
}

#[test]
fn a_call_that_was_answered_on_a_get_is_not_cancelled_by_its_clock() {
    let upstream = resumable(Ending::Clean, answers);
    let config = format!("[upstreams.mcp]\nurl = \"{}\"\nmax_timeout = \"1500ms\"\n", upstream.url());
    let sidecar = Sidecar::with_config(&config);
    list(&sidecar);
    let (answered, waits) = (call("effect", "answered"), call("effect", "waits").id(2));
    answered.ask(&sidecar);
    sidecar.client().ask(&resuming());
    assert_eq!(text(&answered.ask(&sidecar)), "done 0");
    waits.ask(&sidecar);
    let cancel = upstream.wait_request_where(|r| method(r).as_deref() == Some("notifications/cancelled"));
    assert_eq!(cancel.json()["params"]["requestId"], 2, "the later one's, and no other came");
}

#[test]
fn a_node_that_hangs_up_and_comes_back_gets_its_response_and_it_commits() {
    let upstream = resumable(Ending::Hangs, answers);
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = call("effect", "a");
    let node = sidecar.client();
    node.send(&call.post());
    node.events(0);
    let request = upstream.wait_request_where(|request| key(request).as_deref() == Some("job/a"));
    node.body(|bytes| bytes.starts_with(b"id: e1"));
    node.close();
    upstream.wait_closed(request.connection);
    assert_busy(&call.ask(&sidecar));
    assert!(sidecar.client().ask(&resuming()).text().contains("done 0"));
    assert_eq!(text(&call.ask(&sidecar)), "done 0");
    assert_eq!(made(&upstream, "job/a"), 1);
}

#[test]
fn a_node_that_hangs_up_and_stays_away_has_cancelled() {
    let upstream = resumable(Ending::Hangs, answers);
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = call("effect", "a").id(5);
    let node = sidecar.client();
    node.send(&call.post());
    node.body(|bytes| bytes.starts_with(b"id: e1"));
    node.close();
    let cancel = upstream.wait_request_where(|r| method(r).as_deref() == Some("notifications/cancelled"));
    assert_eq!(cancel.json()["params"]["requestId"], 5, "a keyed call's node makes another attempt");
    assert_error(&when_free(&sidecar, &call), 1409, "outcome_unknown", "unknown");
    assert_eq!(made(&upstream, "job/a"), 1);
}

#[test]
fn progress_on_the_get_counts_for_the_call() {
    let gate = Gate::new();
    let waits = gate.clone();
    let upstream = resumable(Ending::Clean, move |first, reply| {
        let token = meta(first)["progressToken"].clone();
        reply.event(&format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":3,"total":4,"_meta":{{"oz0/resume":"t3"}}}}}}"#
        ));
        reply.event(&mcp::progress("\"another's\"", 1));
        waits.pass();
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    for own in [false, true] {
        let call = call("charge", &format!("a-{own}"));
        let call = if own { call.id(9).meta("progressToken", 55) } else { call.id(9) };
        call.ask(&sidecar);
        let node = sidecar.client();
        node.send(&resuming());
        // What the sidecar asked for is kept back, and the rest passes.
        node.events(if own { 2 } else { 1 });
        gate.open();
        node.response();
        assert_busy(&call.ask(&sidecar));
        sidecar.client().ask(&mcp::cancel(9));
        let next = when_free(&sidecar, &call);
        assert_eq!(next.head.field("oz0-resume"), Some("resumed from progress 3 of 4"));
        let sent = meta(calls(&upstream).last().unwrap());
        assert_eq!(sent["oz0/resume"], json!({ "token": "t3", "progress": 3 }));
    }
}

#[test]
fn a_stream_without_ids_or_of_the_modern_era_has_failed() {
    let upstream = server(|_, request, reply| {
        let with_id = request.head.field("mcp-session-id").is_none();
        reply.sse(&[]);
        reply.chunk(if with_id { "id: e1\ndata:\n\n" } else { "data:\n\n" });
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    for call in [Call::of("effect").legacy().key("legacy"), Call::of("effect").key("modern")] {
        assert_error(&call.ask(&sidecar), 1502, "upstream_failed", "unknown");
        assert_error(&call.ask(&sidecar), 1409, "outcome_unknown", "unknown");
    }
    assert_eq!(calls(&upstream).len(), 2);
}

#[test]
fn an_empty_id_takes_it_back() {
    let upstream = server(|_, _, reply| {
        reply.sse(&[]);
        reply.chunk("id: e1\ndata:\n\nid:\ndata:\n\n");
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = call("effect", "a");
    assert_error(&call.ask(&sidecar), 1502, "upstream_failed", "unknown");
    assert_error(&call.ask(&sidecar), 1409, "outcome_unknown", "unknown");
}

#[test]
fn its_end_is_in_the_log_of_the_exchange_that_ended() {
    let upstream = resumable(Ending::Clean, answers);
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let response = call("effect", "a").ask(&sidecar);
    let id = response.head.field("x-request-id").unwrap().to_owned();
    let line = sidecar.wait_line(|line| line["request"] == id.as_str());
    assert_eq!((&line["outcome"], &line["key"]), (&json!("ok"), &json!("job/a")));
    assert_eq!(line["reason"], Value::Null);
}
