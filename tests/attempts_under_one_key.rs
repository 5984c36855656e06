//! Attempts under one key never overlap, stand for one call alone, and are made again only where
//! that can do no harm. What was made is counted by the upstream itself.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    collections::HashMap,
    fs,
    net::TcpListener,
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::{Value, json};
use support::{
    Client, Gate, Post, Request, Sidecar, Upstream, Watched,
    http::Response,
    keyed::{
        Call, answering, assert_busy, assert_error, calls, done, key, list, message, result, server, text,
    },
    mcp,
    store::Store,
    until,
    upstream::Reply,
};
use tempfile::TempDir;
use tokio::time::Instant;

fn with_state(upstream: &Upstream, state: &str) -> Sidecar {
    Sidecar::with_flags(&["--upstream", &upstream.url(), "--state", state])
}

fn sqlite(folder: &TempDir) -> String {
    format!("sqlite:{}", folder.path().join("state.db").display())
}

/// How often the server has received a call under this key: its own count.
fn made(upstream: &Upstream, wanted: &str) -> usize {
    calls(upstream).iter().filter(|call| key(call).as_deref() == Some(wanted)).count()
}

fn line(sidecar: &Sidecar, response: &Response) -> Value {
    let id = response.head.field("x-request-id").unwrap().to_owned();
    sidecar.wait_line(|line| line["request"] == id.as_str())
}

/// Asks until the answer is no busy one: for what ends a moment after its signal.
fn ask_when_free(sidecar: &Sidecar, call: &Call) -> Response {
    let mut answer = None;
    until("the attempt before to have ended", || {
        let response = call.ask(sidecar);
        let free = message(&response)["result"]["_meta"]["oz0/retryable"] != true;
        answer = Some(response);
        free
    });
    answer.unwrap()
}

/// A server that answers the first call under each key as its `how` says, and any further one with a result.
fn ending() -> Upstream {
    let seen = Mutex::new(HashMap::<String, usize>::new());
    server(move |n, request, reply| {
        let before = {
            let mut seen = seen.lock().unwrap();
            let count = seen.entry(key(request).unwrap_or_default()).or_default();
            *count += 1;
            *count - 1
        };
        if before > 0 {
            return reply.json(200, &[], &done(request, n));
        }
        let how = request.json()["params"]["arguments"]["how"].as_str().unwrap_or_default().to_owned();
        end(&how, request, reply);
    })
}

fn end(how: &str, request: &Request, reply: &mut Reply) {
    let id = request.json()["id"].clone();
    let error = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32603,"message":"no"}}}}"#);
    let is_error = result(request, r#"{"content":[],"isError":true}"#);
    let asks = result(request, r#"{"resultType":"input_required","inputRequests":{},"requestState":"s"}"#);
    match how {
        "lost" => reply.break_off(),
        "reset" => reply.reset(),
        "cut stream" => {
            reply.sse(&[]);
            reply.event(&mcp::progress("\"x\"", 1));
            reply.break_off();
        }
        "ended stream" => {
            reply.sse(&[]);
            reply.end();
        }
        "no response" => reply.json(200, &[("Content-Type", "text/html")], "<html>"),
        "silent" => reply.hang(),
        "event id" => {
            reply.sse(&[]);
            reply.chunk("id: e1\ndata:\n\n");
            reply.end();
        }
        "silent stream" => {
            reply.sse(&[]);
            reply.hang();
        }
        "500" => reply.json(500, &[], &error),
        "503" => reply.json(503, &[], "away"),
        "429" => reply.json(429, &[("Retry-After", "3")], "busy"),
        "busy 503" => reply.json(503, &[("Retry-After", "3")], "busy"),
        "302" | "303" => reply.json(how.parse().unwrap(), &[("Location", "/made")], ""),
        "308" => reply.json(308, &[("Location", "http://127.0.0.1:1/mcp")], ""),
        "400" => reply.json(400, &[], &error),
        "401" => reply.json(401, &[], ""),
        "is error" => reply.json(200, &[], &is_error),
        "is error event" => {
            reply.sse(&[]);
            reply.event(&is_error);
            reply.end();
        }
        "rpc error" => reply.json(200, &[], &error),
        "input required" => reply.json(200, &[], &asks),
        other => panic!("{other}"),
    }
}

/// How the first attempt ends, and whether an unsafe call may be sent again then.
const ENDINGS: [(&str, bool); 20] = [
    ("lost", false),
    ("reset", false),
    ("cut stream", false),
    ("ended stream", false),
    ("no response", false),
    ("silent", false),
    ("silent stream", false),
    ("500", false),
    ("503", false),
    ("busy 503", false),
    ("302", false),
    ("303", false),
    ("308", true),
    ("429", true),
    ("400", true),
    ("401", true),
    ("is error", true),
    ("is error event", true),
    ("rpc error", true),
    ("input required", true),
];

/// `tool`, made twice after each ending, in each era. Whether the second attempt was sent must be as `sent` says.
fn assert_second_attempts(store: &Store, tool: &str, sent: impl Fn(bool) -> bool) {
    let upstream = ending();
    let sidecar = store.before(&upstream);
    list(&sidecar);
    for (how, harmless) in ENDINGS {
        for legacy in [false, true] {
            let activity = format!("{}-{legacy}", how.replace(' ', "-"));
            let name = format!("job/{activity}");
            let said = json!({ "job": "job", "activity": activity, "time_limit": 1 });
            let call = Call::of(tool).said(said).arguments(&json!({ "how": how }).to_string());
            let call = if legacy { call.legacy() } else { call };
            let first = call.ask(&sidecar);
            if how.starts_with("silent") {
                assert_error(&first, 1504, "max_timeout", "unknown");
            }
            assert_eq!(line(&sidecar, &first)["attempt"], 1);
            let second = call.clone().id("\"second\"").ask(&sidecar);
            let made = made(&upstream, &name);
            if sent(harmless) {
                let told = format!("{tool} after {how}, legacy: {legacy}: {}", second.text());
                assert_eq!(made, 2, "{told}");
                assert!(text(&second).starts_with("done "), "{told}");
                assert_eq!(line(&sidecar, &second)["attempt"], 2);
                let ids: Vec<Value> = calls(&upstream)
                    .iter()
                    .filter(|call| key(call).as_deref() == Some(&name))
                    .map(|call| call.json()["id"].clone())
                    .collect();
                assert_eq!(ids, [json!(1), json!("second")], "under a new JSON-RPC id, the same key");
            } else {
                assert_eq!(made, 1, "{tool} after {how}, legacy: {legacy}: {}", second.text());
                assert_error(&second, 1409, "outcome_unknown", "unknown");
                let line = line(&sidecar, &second);
                assert_eq!(
                    (&line["outcome"], &line["reason"]),
                    (&json!("refused"), &json!("outcome_unknown"))
                );
                assert_eq!(line["upstream_status"], Value::Null);
                // However often it is asked, and whatever attempt the node says it is.
                let third = call.clone().field("Oz0-Attempt", "1").ask(&sidecar);
                assert_error(&third, 1409, "outcome_unknown", "unknown");
            }
        }
    }
}

#[test]
fn an_unsafe_call_is_made_again_only_after_an_end_that_shows_it_was_not_made() {
    for store in Store::each() {
        assert_second_attempts(&store, "effect", |harmless| harmless);
    }
}

#[test]
fn a_safe_call_is_made_again_after_every_end() {
    assert_second_attempts(&Store::sqlite(), "read", |_| true);
}

#[test]
fn a_conditional_call_is_made_again_after_every_end() {
    assert_second_attempts(&Store::sqlite(), "charge", |_| true);
}

#[test]
fn of_a_tool_never_seen_listed_the_nodes_judgement_stands() {
    assert_second_attempts(&Store::sqlite(), "never_listed", |_| true);
}

#[test]
fn a_call_that_was_not_sent_may_be_sent() {
    let nowhere = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let upstream = answering();
    let toml = |url: &str| {
        format!("[upstreams.mcp]\nurl = \"{url}\"\n[upstreams.mcp.tools.effect]\nread_only = false\n")
    };
    let sidecar = Sidecar::with_config(&toml(&format!("http://{nowhere}/mcp")));
    let call = Call::of("effect").activity("job", "a");
    for attempt in 1..=2 {
        let response = call.ask(&sidecar);
        assert_error(&response, 1502, "upstream_unreachable", "not_sent");
        assert_eq!(line(&sidecar, &response)["attempt"], attempt);
    }
    fs::write(sidecar.folder().path().join("sidecar.toml"), toml(&upstream.url())).unwrap();
    sidecar.signal("HUP");
    sidecar.wait_stderr("configuration reloaded");
    assert_eq!(text(&call.ask(&sidecar)), "done 0");
    assert_eq!(calls(&upstream).len(), 1);
}

#[test]
fn a_call_whose_node_hung_up_or_cancelled_may_have_been_made() {
    let upstream = ending();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    for how in ["silent", "silent stream"] {
        for (tool, is_sent) in [("effect", false), ("charge", true)] {
            for by in ["hang-up", "message"] {
                let name = format!("{by}-{tool}-{}", how.replace(' ', "-"));
                let call =
                    Call::of(tool).activity("job", &name).arguments(&json!({ "how": how }).to_string());
                let call = if by == "message" { call.legacy() } else { call };
                let (node, name) = (sidecar.client(), format!("job/{name}"));
                node.send(&call.id(7).post());
                let request = upstream.wait_request_where(|request| key(request).as_deref() == Some(&name));
                if how == "silent stream" {
                    node.head();
                }
                if by == "message" {
                    assert_eq!(sidecar.client().ask(&mcp::cancel(7)).status(), 202);
                    node.response();
                } else {
                    node.close();
                }
                upstream.wait_closed(request.connection);
                let call = Call::of(tool).key(&name).arguments(&json!({ "how": how }).to_string());
                let second = ask_when_free(&sidecar, &call);
                assert_eq!(made(&upstream, &name), if is_sent { 2 } else { 1 }, "{name}");
                if !is_sent {
                    assert_error(&second, 1409, "outcome_unknown", "unknown");
                }
            }
        }
    }
}

/// A server whose calls wait for the gate.
fn gated() -> (Upstream, Gate) {
    let gate = Gate::new();
    let waits = gate.clone();
    let upstream = server(move |n, request, reply| {
        waits.pass();
        reply.json(200, &[], &done(request, n));
    });
    (upstream, gate)
}

/// Two attempts at once, over these sidecars: the second is told to wait, and nothing is sent.
fn assert_overlap(upstream: &Upstream, gate: &Gate, first: &Sidecar, second: &Sidecar) {
    list(first);
    list(second);
    for tool in ["effect", "charge", "read", "never_listed"] {
        let call = Call::of(tool).activity("job", tool);
        let (node, name) = (first.client(), format!("job/{tool}"));
        node.send(&call.post());
        upstream.wait_request_where(|request| key(request).as_deref() == Some(&name));
        let before = calls(upstream).len();
        for era in [call.clone(), call.clone().legacy()] {
            let busy = era.clone().id("\"again\"").ask(second);
            assert_busy(&busy);
            assert_eq!(busy.json()["id"], "again");
            let modern = !era.body().contains("2026") || busy.json()["result"]["resultType"] == "complete";
            assert!(modern, "{}", busy.text());
            assert_eq!(busy.head.field("oz0-idempotency-key"), Some(name.as_str()));
            let line = line(second, &busy);
            assert_eq!((&line["outcome"], &line["retry_after"]), (&json!("busy"), &json!(1)));
        }
        let as_event = call.clone().field("Accept", "text/event-stream").ask(second);
        assert_eq!(as_event.head.field("content-type"), Some("text/event-stream"));
        assert_busy(&as_event);
        let mismatch = call.clone().arguments("{\"a\":1}").ask(second);
        assert_error(&mismatch, 1422, "key_mismatch", "not_sent");
        assert_eq!(calls(upstream).len(), before, "nothing was sent");
        gate.open();
        assert!(text(&node.response()).starts_with("done "));
        if tool == "read" || tool == "charge" && !std::ptr::eq(first, second) {
            // It is sent again: the one only reads, the other's result is another sidecar's.
            gate.open();
        }
        let after = call.ask(second);
        assert!(message(&after)["result"]["_meta"]["oz0/retryable"].is_null(), "{}", after.text());
    }
}

#[test]
fn while_an_attempt_runs_another_one_is_told_to_wait() {
    let (upstream, gate) = gated();
    let sidecar = Sidecar::before(&upstream);
    assert_overlap(&upstream, &gate, &sidecar, &sidecar);
}

#[test]
fn attempts_in_two_sidecars_on_one_file_never_overlap() {
    let ((upstream, gate), store) = (gated(), Store::sqlite());
    assert_overlap(&upstream, &gate, &store.before(&upstream), &store.before(&upstream));
}

#[test]
fn attempts_in_two_sidecars_on_one_redis_never_overlap() {
    let ((upstream, gate), store) = (gated(), Store::redis());
    assert_overlap(&upstream, &gate, &store.before(&upstream), &store.before(&upstream));
}

#[test]
fn of_many_attempts_at_once_over_two_sidecars_one_is_made() {
    for store in Store::lasting() {
        assert_one_is_made(&store);
    }
}

fn assert_one_is_made(store: &Store) {
    let upstream = answering();
    let sidecars = [store.before(&upstream), store.before(&upstream)];
    sidecars.iter().for_each(|sidecar| _ = list(sidecar));
    for round in 0..10 {
        let call = Call::of("effect").activity("job", &format!("a{round}"));
        let clients: Vec<Client> = (0..16).map(|n| sidecars[n % 2].client()).collect();
        clients.iter().for_each(|client| client.send(&call.post()));
        for client in &clients {
            let answer = client.response().json();
            let result = &answer["result"];
            // Whoever is not the first is told to wait, is answered from the record, or, in the sidecar that did not make it,
            // learns that it is done.
            let fine = result["content"][0]["text"] == format!("done {round}")
                || result["_meta"]["oz0/retry_after"] == 1
                || answer["error"]["data"]["reason"] == "already_done";
            assert!(fine, "{answer}");
        }
        assert_eq!(made(&upstream, &format!("job/a{round}")), 1);
    }
}

#[test]
fn a_key_stands_for_one_function_and_one_digest() {
    for store in Store::each() {
        assert_stands_for_one_call(&store);
    }
}

fn assert_stands_for_one_call(store: &Store) {
    let upstream = ending();
    let sidecar = store.before(&upstream);
    list(&sidecar);
    for how in ["is error", "lost", "429", "input required", "done"] {
        let name = how.replace(' ', "-");
        let arguments = json!({ "how": how, "n": 1.0 }).to_string();
        let call = Call::of("charge").key(&name).arguments(&arguments);
        if how == "done" {
            // The first under a key ends as it says: here it is the second that commits.
            let first = Call::of("charge").key("done-first").arguments("{\"how\":\"lost\"}");
            first.ask(&sidecar);
            assert!(text(&first.ask(&sidecar)).starts_with("done "));
            let other = Call::of("charge").key("done-first").arguments("{\"how\":\"other\"}");
            assert_error(&other.ask(&sidecar), 1422, "key_mismatch", "not_sent");
            assert_eq!(made(&upstream, "done-first"), 2);
            continue;
        }
        call.ask(&sidecar);
        let other_arguments =
            Call::of("charge").key(&name).arguments(&json!({ "how": how, "n": 2 }).to_string());
        let other_function = Call::of("pay").key(&name).arguments(&arguments);
        for call in [other_arguments, other_function] {
            let refused = call.ask(&sidecar);
            assert_error(&refused, 1422, "key_mismatch", "not_sent");
            assert_eq!(refused.head.field("oz0-idempotency-key"), Some(name.as_str()));
            assert_eq!(line(&sidecar, &refused)["outcome"], "refused");
        }
        assert_eq!(made(&upstream, &name), 1, "nothing was sent");
        // The same call in another spelling is no other call.
        let spelled = Call::of("charge").key(&name).arguments(&format!("{{\"n\":1,\"how\":\"{how}\"}}"));
        assert!(text(&spelled.ask(&sidecar)).starts_with("done "));
        assert_eq!(made(&upstream, &name), 2);
    }
}

#[test]
fn an_attempt_is_one_more_than_was_counted_or_what_the_node_says() {
    let upstream = server(|_, request, reply| {
        reply.json(200, &[], &result(request, r#"{"content":[],"isError":true}"#));
    });
    let sidecar = Sidecar::before(&upstream);
    let attempt = |said: Value| {
        let mut call = json!({ "job": "job", "activity": "a" });
        call["attempt"] = said.clone();
        let call = if said.is_null() { json!({ "job": "job", "activity": "a" }) } else { call };
        line(&sidecar, &Call::of("effect").said(call).ask(&sidecar))["attempt"].as_u64().unwrap()
    };
    assert_eq!(attempt(Value::Null), 1);
    assert_eq!(attempt(Value::Null), 2);
    assert_eq!(attempt(json!(7)), 7);
    assert_eq!(attempt(Value::Null), 8);
    assert_eq!(attempt(json!(2)), 2);
    assert_eq!(attempt(Value::Null), 9);
}

#[test]
fn a_rotated_token_neither_doubles_a_call_nor_shows_anothers_result() {
    for store in Store::each() {
        assert_rotates(&store);
    }
}

fn assert_rotates(store: &Store) {
    let upstream = answering();
    let sidecar = store.before(&upstream);
    list(&sidecar);
    let as_ = |call: &Call, token: Option<&str>| {
        let call = call.clone();
        let call = match token {
            Some(token) => call.field("Authorization", &format!("Bearer {token}")),
            None => call,
        };
        call.ask(&sidecar)
    };
    let tokens = [Some("old"), Some("new"), None];
    for (n, first) in tokens.into_iter().enumerate() {
        let call = Call::of("effect").activity("job", &format!("unsafe{n}"));
        let made_by_first = text(&as_(&call, first));
        for token in tokens.into_iter().filter(|token| *token != first) {
            let refused = as_(&call, token);
            assert_error(&refused, 1409, "already_done", "done");
            assert!(!refused.text().contains(&made_by_first));
            assert_eq!(line(&sidecar, &refused)["replayed"], Value::Null);
        }
        assert_eq!(text(&as_(&call, first)), made_by_first, "its own it may have again");
        assert_eq!(made(&upstream, &format!("job/unsafe{n}")), 1);
    }
    let call = Call::of("charge").activity("job", "conditional");
    assert_eq!(text(&as_(&call, Some("old"))), "done 3");
    assert_eq!(text(&as_(&call, Some("new"))), "done 4", "its server answers from its own record");
    assert_eq!(text(&as_(&call, Some("new"))), "done 4");
    assert_eq!(made(&upstream, "job/conditional"), 2);
    let keys: Vec<_> = calls(&upstream).iter().filter_map(key).skip(3).collect();
    assert_eq!(keys, ["job/conditional"; 2], "under its key");
    let other = Call::of("charge").activity("job", "conditional").arguments("{\"a\":1}");
    assert_error(&as_(&other, Some("new")), 1422, "key_mismatch", "not_sent");
}

#[test]
fn an_unsafe_call_that_was_lost_under_another_token_is_not_made_again() {
    let upstream = ending();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("effect").activity("job", "a").arguments("{\"how\":\"lost\"}");
    call.clone().field("Authorization", "Bearer old").ask(&sidecar);
    let refused = call.field("Authorization", "Bearer new").ask(&sidecar);
    assert_error(&refused, 1409, "outcome_unknown", "unknown");
    assert_eq!(made(&upstream, "job/a"), 1);
}

fn is_ready(sidecar: &Sidecar) -> bool {
    sidecar.admin("GET", "/readyz").status() == 200
}

#[test]
fn a_ledger_that_is_full_takes_no_new_key_and_keeps_the_old_ones() {
    let upstream = ending();
    let toml = format!("[ledger]\nmax_keys = 2\n[upstreams.mcp]\nurl = \"{}\"\n", upstream.url());
    let sidecar = Sidecar::with_config(&toml);
    list(&sidecar);
    let call =
        |name: &str, how: &str| Call::of("effect").key(name).arguments(&json!({ "how": how }).to_string());
    call("a", "is error").ask(&sidecar);
    call("b", "lost").ask(&sidecar);
    for _ in 0..2 {
        let busy = call("c", "is error").ask(&sidecar);
        assert_busy(&busy);
        let line = line(&sidecar, &busy);
        assert_eq!((&line["outcome"], &line["reason"]), (&json!("busy"), &json!("ledger_full")));
        assert_eq!(line["error"], "the ledger holds as many keys as it may, nothing was sent");
    }
    // So are calls whose key would have to be fixed first, for which there is room a while longer.
    for n in 0..12 {
        let busy = Call::of("effect").activity("job", &n.to_string()).ask(&sidecar);
        assert_busy(&busy);
        assert_eq!(line(&sidecar, &busy)["reason"], "ledger_full");
    }
    assert!(is_ready(&sidecar), "the store is there");
    assert_eq!(made(&upstream, "c"), 0, "nothing was sent");
    // Nothing that is known was dropped for it.
    assert!(text(&call("a", "is error").ask(&sidecar)).starts_with("done "));
    assert!(text(&call("a", "is error").ask(&sidecar)).starts_with("done "));
    assert_error(&call("b", "lost").ask(&sidecar), 1409, "outcome_unknown", "unknown");
    assert_eq!((made(&upstream, "a"), made(&upstream, "b")), (2, 1));
    // A call that needs no key goes on.
    Call::of("effect").arguments("{\"how\":\"400\"}").ask(&sidecar);
    assert_eq!(calls(&upstream).iter().filter(|call| key(call).is_none()).count(), 1);
}

#[test]
fn marks_and_counters_go_when_their_time_is_over() {
    let (upstream, folder) = (ending(), TempDir::new().unwrap());
    let toml = format!(
        "state = \"{}\"\n[ledger]\nkeys_ttl = \"1s\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        sqlite(&folder),
        upstream.url()
    );
    let sidecar = Sidecar::with_config(&toml);
    list(&sidecar);
    let lost = Call::of("effect").key("k").arguments("{\"how\":\"lost\"}");
    lost.ask(&sidecar);
    let counted = |activity: &str| {
        let said = json!({ "job": "job", "session": 1, "session_start": "s", "activity": activity });
        Call::of("mark").said(said).arguments("{\"how\":\"is error\"}").ask(&sidecar)
    };
    assert!(counted("first").head.field("oz0-idempotency-key").unwrap().ends_with("/1"));
    let mut last = None;
    until("the mark's time to be over", || {
        let response = lost.ask(&sidecar);
        let is_sent = message(&response)["error"].is_null();
        last = Some(response);
        is_sent
    });
    assert_eq!(line(&sidecar, &last.unwrap())["attempt"], 1, "of a new key");
    assert!(counted("another").head.field("oz0-idempotency-key").unwrap().ends_with("/1"), "counted anew");
}

#[test]
fn the_policy_goes_before_the_ledger() {
    let upstream = ending();
    let toml = |deny: &str| {
        format!("[upstreams.mcp]\nurl = \"{}\"\n[upstreams.mcp.policy]\ndeny = [{deny}]\n", upstream.url())
    };
    let sidecar = Sidecar::with_config(&toml(""));
    list(&sidecar);
    let call = |how: &str| Call::of("effect").key(how).arguments(&json!({ "how": how }).to_string());
    call("is error").ask(&sidecar);
    assert!(text(&call("is error").ask(&sidecar)).starts_with("done "));
    let running = sidecar.client();
    running.send(&call("silent").post());
    upstream.wait_request_where(|request| key(request).as_deref() == Some("silent"));
    let file = sidecar.folder().path().join("sidecar.toml");
    fs::write(&file, toml("\"eff*\"")).unwrap();
    sidecar.signal("HUP");
    assert_error(&running.response(), 1403, "policy", "unknown");
    // Neither a replay, nor a mismatch, nor a new key: the policy alone is told.
    for call in [call("is error"), call("is error").arguments("{}"), call("lost"), Call::of("effect")] {
        assert_error(&call.ask(&sidecar), 1403, "policy", "not_sent");
    }
    assert_eq!(made(&upstream, "lost"), 0);
    fs::write(&file, toml("")).unwrap();
    sidecar.signal("HUP");
    until("the tool is allowed again", || {
        message(&call("silent").ask(&sidecar))["error"]["data"]["reason"] == "outcome_unknown"
    });
    assert_eq!(made(&upstream, "silent"), 1, "what was cut may have been made");
    assert!(text(&call("is error").ask(&sidecar)).starts_with("done "));
    assert_eq!(made(&upstream, "is error"), 2);
}

#[test]
fn a_sidecar_that_died_blocks_its_keys_for_no_longer_than_their_lease() {
    let (gate, folder) = (Gate::new(), TempDir::new().unwrap());
    let waits = gate.clone();
    let upstream = server(move |n, request, reply| {
        if n < 3 {
            waits.pass();
        }
        reply.json(200, &[], &done(request, n));
    });
    let (mut dies, lives) =
        (with_state(&upstream, &sqlite(&folder)), with_state(&upstream, &sqlite(&folder)));
    list(&dies);
    list(&lives);
    let call = |tool: &str| Call::of(tool).activity("job", tool);
    let long = Call::of("charge").activity("job", "long");
    let long_node = lives.client();
    long_node.send(&long.post());
    let lost = [dies.client(), dies.client()];
    lost[0].send(&call("effect").post());
    lost[1].send(&call("charge").post());
    upstream.wait_requests(support::keyed::is_call, 3);
    dies.signal("KILL");
    dies.wait_exit();
    let died = Instant::now();
    assert_busy(&call("effect").ask(&lives));
    assert_busy(&call("charge").ask(&lives));
    let bound = Duration::from_secs(30);
    let answer = loop {
        let response = call("charge").ask(&lives);
        if message(&response)["result"]["_meta"]["oz0/retryable"] != true {
            break response;
        }
        assert!(died.elapsed() < bound, "blocked for longer than 30 s");
        std::thread::sleep(Duration::from_millis(200));
    };
    assert_eq!(text(&answer), "done 3", "a conditional call is made again");
    assert_eq!(line(&lives, &answer)["attempt"], 2);
    let refused = ask_when_free(&lives, &call("effect"));
    assert_error(&refused, 1409, "outcome_unknown", "unknown");
    assert_eq!((made(&upstream, "job/effect"), made(&upstream, "job/charge")), (1, 2));
    // A claim of a sidecar that lives is renewed for as long as its call runs.
    assert_busy(&long.ask(&lives));
    for _ in 0..3 {
        gate.open();
    }
    assert!(text(&long_node.response()).starts_with("done "));
    assert!(text(&long.ask(&lives)).starts_with("done "), "and it commits");
    assert_eq!(made(&upstream, "job/long"), 1);
}

#[test]
fn a_call_that_a_drain_cuts_has_an_unknown_end_at_once() {
    let folder = TempDir::new().unwrap();
    let upstream = ending();
    let start = || {
        Sidecar::with_config(&format!(
            "drain = \"100ms\"\nstate = \"{}\"\n[upstreams.mcp]\nurl = \"{}\"\n",
            sqlite(&folder),
            upstream.url()
        ))
    };
    let mut sidecar = start();
    list(&sidecar);
    let call = |tool: &str| Call::of(tool).key(tool).arguments("{\"how\":\"silent\"}");
    let nodes = ["effect", "charge"].map(|tool| {
        let node = sidecar.client();
        node.send(&call(tool).post());
        upstream.wait_request_where(|request| key(request).as_deref() == Some(tool));
        node
    });
    // A legacy call whose node may still resume it ends with the process too.
    let parked = Call::of("effect").legacy().key("parked").arguments("{\"how\":\"event id\"}");
    parked.ask(&sidecar);
    sidecar.terminate();
    for node in nodes {
        assert_error(&node.response(), 1503, "draining", "unknown");
    }
    let sidecar = start();
    assert_error(&call("effect").ask(&sidecar), 1409, "outcome_unknown", "unknown");
    assert_error(&parked.ask(&sidecar), 1409, "outcome_unknown", "unknown");
    assert!(text(&call("charge").ask(&sidecar)).starts_with("done "));
    assert_eq!(["effect", "parked", "charge"].map(|key| made(&upstream, key)), [1, 1, 2]);
}

#[test]
fn a_leg_goes_on_under_its_calls_key_and_is_no_new_attempt() {
    for store in Store::each() {
        assert_legs_go_on(&store);
    }
}

fn assert_legs_go_on(store: &Store) {
    let legs = Watched::new(Vec::<Value>::new());
    let seen = legs.clone();
    let upstream = server(move |n, request, reply| {
        seen.change(|legs| legs.push(request.json()["params"]["requestState"].clone()));
        match n {
            0 | 1 => {
                let asks = format!(
                    r#"{{"resultType":"input_required","inputRequests":{{}},"requestState":"s{n}"}}"#
                );
                reply.json(200, &[], &result(request, &asks));
            }
            _ => reply.json(200, &[], &done(request, n)),
        }
    });
    let sidecar = store.before(&upstream);
    list(&sidecar);
    let call = Call::of("effect").activity("job", "asks");
    let first = call.ask(&sidecar);
    assert_eq!(first.json()["result"]["requestState"], "s0", "relayed as it came");
    let leg = |state: &str| {
        call.clone().id(9).param("requestState", &format!("\"{state}\"")).param("inputResponses", "{}")
    };
    let second = leg("s0").ask(&sidecar);
    assert_eq!(second.json()["result"]["requestState"], "s1");
    let third = leg("s1").ask(&sidecar);
    assert_eq!(text(&third), "done 2");
    for response in [&first, &second, &third] {
        assert_eq!(line(&sidecar, response)["attempt"], 1);
        assert_eq!(response.head.field("oz0-resume"), None);
    }
    assert_eq!(*legs.lock(), [Value::Null, json!("s0"), json!("s1")]);
    assert_eq!(made(&upstream, "job/asks"), 3, "one key");
    // After it is done it is replayed, leg or not.
    assert_eq!(text(&leg("s1").ask(&sidecar)), "done 2");
    assert_eq!(text(&call.ask(&sidecar)), "done 2");
    assert_eq!(made(&upstream, "job/asks"), 3);
}

#[test]
fn a_busy_answer_ends_the_attempt_before_it_is_told() {
    let upstream = server(|n, request, reply| match n % 2 {
        0 => reply.json(429, &[("Retry-After", "0")], ""),
        _ => reply.json(500, &[], &done(request, n)),
    });
    let folder = TempDir::new().unwrap();
    let sidecar = with_state(&upstream, &sqlite(&folder));
    list(&sidecar);
    let client = sidecar.client();
    for attempt in 0..40 {
        // Each as soon as the one before was answered: none is told that another one runs.
        let response = client.ask(&Call::of("charge").activity("job", "a").id(attempt).post());
        assert_eq!(calls(&upstream).len(), attempt + 1, "{}", response.text());
    }
}

#[test]
fn a_failure_ends_the_attempt_before_it_is_told() {
    let upstream = server(|n, request, reply| {
        if n % 2 == 0 {
            return reply.break_off();
        }
        reply.sse(&[]);
        reply.event(&mcp::progress(&support::keyed::meta(request)["progressToken"], 1));
        reply.break_off();
    });
    let folder = TempDir::new().unwrap();
    let sidecar = with_state(&upstream, &sqlite(&folder));
    list(&sidecar);
    let client = sidecar.client();
    for attempt in 0..40 {
        let response = client.ask(&Call::of("charge").activity("job", "a").id(attempt).post());
        assert_error(&response, 1502, "upstream_failed", "unknown");
        assert_eq!(calls(&upstream).len(), attempt + 1);
    }
}

#[test]
fn a_node_that_leaves_while_its_call_is_claimed_blocks_nothing() {
    let upstream = answering();
    let folder = TempDir::new().unwrap();
    let sidecar = Arc::new(with_state(&upstream, &sqlite(&folder)));
    list(&sidecar);
    let call = |n: usize| Call::of("effect").activity("job", &format!("a{n}"));
    for n in 0..40 {
        let node = sidecar.client();
        node.send(&call(n).post());
        node.reset();
    }
    for n in 0..40 {
        // Either it was sent, or it was not: in no case is the key held until its lease runs out.
        let response = ask_when_free(&sidecar, &call(n));
        let answer = message(&response);
        let unsure = answer["error"]["data"]["reason"] == "outcome_unknown";
        let made = made(&upstream, &format!("job/a{n}"));
        assert!(unsure || answer["result"]["content"][0]["text"].is_string(), "{answer}");
        assert!(made == 1 || unsure && made == 0, "{made}: {answer}");
    }
}

#[test]
fn a_call_that_a_legacy_task_makes_is_told_to_wait_by_its_status() {
    let (upstream, gate) = gated();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("effect").legacy().activity("job", "a").param("task", "{\"ttl\":60000}");
    let node = sidecar.client();
    node.send(&call.post());
    upstream.wait_request_where(|request| key(request).is_some());
    let busy = call.ask(&sidecar);
    assert_eq!((busy.status(), busy.head.field("retry-after")), (503, Some("1")));
    assert_eq!(calls(&upstream).len(), 1);
    gate.open();
    node.response();
}

#[test]
fn a_key_is_a_key_of_its_upstream_alone() {
    let (one, other) = (answering(), answering());
    let toml =
        format!("[upstreams.one]\nurl = \"{}\"\n[upstreams.other]\nurl = \"{}\"\n", one.url(), other.url());
    let sidecar = Sidecar::with_config(&toml);
    let post = |path: &str, arguments: &str| -> Post {
        Call::of("effect").key("same").arguments(arguments).post().at(path)
    };
    assert_eq!(text(&sidecar.client().ask(&post("/one", "{}"))), "done 0");
    assert_eq!(text(&sidecar.client().ask(&post("/other", "{\"a\":1}"))), "done 0");
    assert_eq!((calls(&one).len(), calls(&other).len()), (1, 1));
}
