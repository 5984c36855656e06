//! A call under a key that is done is answered with the committed result, byte for byte,
//! under the new JSON-RPC id, and nothing is sent; in the era and to the principal it was made for, and for as long as it is
//! held.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use serde_json::{Value, json};
use support::{
    Client, Gate, Request, Sidecar, Upstream, Watched,
    http::Response,
    keyed::{Call, answering, assert_error, calls, done, key, list, message, result, server, text},
    mcp, sse,
    store::Store,
    until,
};

/// Results that nobody would write alike twice.
const ODD: &str = "{ \"content\" : [ {\"type\":\"text\", \"text\":\"\\u00e9 \\/ \u{1F600}\"} ],\n\t\"structuredContent\": {\"b\":1.50, \"a\": 1e2, \"n\":12345678901234567890123, \"a\": null},\r\n \"x-unknown\":[ ], \"_meta\" : {\"k\" : 0.0 } }";

/// Where results may wait for a replay: the kind of store, and `ledger.results`.
fn places() -> Vec<(Store, &'static str)> {
    let stored = Store::each().map(|store| (store, "store"));
    [(Store::sqlite(), "memory")].into_iter().chain(stored).collect()
}

fn line(sidecar: &Sidecar, response: &Response) -> Value {
    let id = response.head.field("x-request-id").unwrap().to_owned();
    sidecar.wait_line(|line| line["request"] == id.as_str())
}

fn made(upstream: &Upstream, wanted: &str) -> usize {
    calls(upstream).iter().filter(|call| key(call).as_deref() == Some(wanted)).count()
}

/// A server that answers with [`ODD`], as JSON or, where the arguments say so, as an event.
fn odd() -> Upstream {
    server(|_, request, reply| {
        let answer = result(request, ODD);
        if !request.json()["params"]["arguments"]["sse"].is_boolean() {
            return reply.json(200, &[], &answer);
        }
        reply.sse(&[]);
        let lines = answer.split_inclusive('\n').map(|line| format!("data: {}\n", line.trim_end()));
        reply.chunk(lines.collect::<String>() + "\n");
        reply.end();
    })
}

#[test]
fn a_replay_has_the_results_bytes_under_the_new_id() {
    for (store, results) in places() {
        let upstream = odd();
        let sidecar = store.with_ledger(&upstream, &format!("results = \"{results}\""));
        list(&sidecar);
        assert_replays_bytes(&upstream, &sidecar);
    }
}

fn assert_replays_bytes(upstream: &Upstream, sidecar: &Sidecar) {
    for (name, arguments) in [("json", "{}"), ("sse", "{\"sse\":true}")] {
        for legacy in [false, true] {
            let name = format!("{name}-{legacy}");
            let call = Call::of("effect").key(&name).arguments(arguments);
            let call = if legacy { call.legacy() } else { call };
            call.ask(sidecar);
            // An event's lines are joined by LF, and their ends are not part of them.
            let committed = if name.starts_with("sse") {
                ODD.split('\n').map(str::trim_end).collect::<Vec<_>>().join("\n")
            } else {
                ODD.to_owned()
            };
            for id in ["2", "\"\"", "0", "-7", "\"a\\u0062\\\"\"", "12345678901234567890", "1.5e1"] {
                let replay = call.clone().id(id).ask(sidecar);
                let expected = format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{committed}}}"#);
                assert_eq!(replay.text(), expected);
                assert_eq!(
                    (replay.status(), replay.head.field("content-type")),
                    (200, Some("application/json"))
                );
                assert_eq!(replay.head.field("content-length"), Some(expected.len().to_string().as_str()));
                assert_eq!(replay.head.field("oz0-idempotency-key"), Some(name.as_str()));
                assert_eq!(replay.head.field("oz0-resume"), None);
            }
            assert_eq!(made(upstream, &name), 1, "nothing was sent");
        }
    }
}

#[test]
fn a_replay_is_one_event_where_accept_excludes_json() {
    let upstream = odd();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("effect").key("k");
    call.ask(&sidecar);
    let replay = call.id("\"again\"").field("Accept", "text/event-stream").ask(&sidecar);
    assert_eq!(replay.head.field("content-type"), Some("text/event-stream"));
    assert_eq!(replay.head.field("content-length"), None);
    let stream = sse::read(&replay.body);
    assert_eq!(stream.events.len(), 1, "{}", replay.text());
    assert!(!stream.cut);
    let expected = format!(r#"{{"jsonrpc":"2.0","id":"again","result":{ODD}}}"#).replace("\r\n", "\n");
    assert_eq!(stream.events[0].data, expected, "the JSON is the same, but for the ends of its lines");
    assert_eq!(calls(&upstream).len(), 1);
}

#[test]
fn the_log_tells_a_replay() {
    let upstream = answering();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("effect").activity("job", "a");
    let first = line(&sidecar, &call.ask(&sidecar));
    assert_eq!(first["replayed"], Value::Null);
    let replay = line(&sidecar, &call.ask(&sidecar));
    assert_eq!((&replay["replayed"], &replay["outcome"]), (&json!(true), &json!("ok")));
    assert_eq!((&replay["key"], &replay["job"]), (&json!("job/a"), &json!("job")));
    assert_eq!((&replay["upstream_status"], &replay["status"]), (&Value::Null, &json!(200)));
    assert_eq!(replay["stream"], "json");
}

#[test]
fn a_result_is_replayed_only_in_the_era_it_was_made_for() {
    for (store, results) in places() {
        let upstream = answering();
        let sidecar = store.with_ledger(&upstream, &format!("results = \"{results}\""));
        list(&sidecar);
        for legacy_first in [false, true] {
            let call = |tool: &str, legacy: bool| {
                let call = Call::of(tool).key(&format!("{tool}-{legacy_first}"));
                if legacy == legacy_first { call.legacy() } else { call }
            };
            call("effect", true).ask(&sidecar);
            assert_error(&call("effect", false).ask(&sidecar), 1409, "already_done", "done");
            assert_eq!(made(&upstream, &format!("effect-{legacy_first}")), 1, "{store:?}");
            let first = text(&call("charge", true).ask(&sidecar));
            assert_ne!(text(&call("charge", false).ask(&sidecar)), first, "sent again under its key");
            assert_eq!(made(&upstream, &format!("charge-{legacy_first}")), 2, "{store:?}");
        }
    }
}

#[test]
fn a_tool_that_only_reads_is_sent_each_time() {
    let upstream = answering();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("read").activity("job", "a");
    for n in 0..3 {
        let response = call.ask(&sidecar);
        assert_eq!(text(&response), format!("done {n}"));
        assert_eq!(line(&sidecar, &response)["replayed"], Value::Null);
    }
    assert_eq!(made(&upstream, "job/a"), 3);
}

/// Makes both calls, has their results go, and sees what becomes of the next attempts.
fn assert_not_held(upstream: &Upstream, sidecar: &Sidecar, done: &[(Call, &str)], by: &str) {
    for (call, name) in done {
        let before = made(upstream, name);
        let again = call.ask(sidecar);
        if name.starts_with("effect") {
            assert_error(&again, 1409, "already_done", "done");
            assert_eq!(made(upstream, name), before, "{by}");
            let line = line(sidecar, &again);
            assert_eq!((&line["outcome"], &line["reason"]), (&json!("refused"), &json!("already_done")));
        } else {
            assert!(text(&again).starts_with("done "), "{by}");
            assert_eq!(made(upstream, name), before + 1, "{by}: its server answers from its own record");
            assert_eq!(again.head.field("oz0-idempotency-key"), Some(*name));
        }
    }
}

fn both() -> [(Call, &'static str); 2] {
    [(Call::of("effect").key("effect"), "effect"), (Call::of("charge").key("charge"), "charge")]
}

#[test]
fn without_results_only_conditional_calls_are_sent_again() {
    for store in Store::each() {
        let upstream = answering();
        let sidecar = store.with_ledger(&upstream, "results = \"off\"");
        list(&sidecar);
        both().iter().for_each(|(call, _)| _ = call.ask(&sidecar));
        assert_not_held(&upstream, &sidecar, &both(), "off");
        assert_not_held(&upstream, &sidecar, &both(), "off, once more");
    }
}

#[test]
fn results_in_memory_are_gone_with_a_restart_and_their_marks_are_not() {
    for store in Store::lasting() {
        let upstream = answering();
        let mut sidecar = store.with_ledger(&upstream, "results = \"memory\"");
        list(&sidecar);
        for (call, name) in both() {
            call.ask(&sidecar);
            call.ask(&sidecar);
            assert_eq!(made(&upstream, name), 1);
        }
        sidecar.signal("KILL");
        sidecar.wait_exit();
        let sidecar = store.with_ledger(&upstream, "results = \"memory\"");
        assert_not_held(&upstream, &sidecar, &both(), "restarted");
    }
}

#[test]
fn results_in_the_store_outlive_a_kill_and_serve_every_sidecar_on_it() {
    for store in Store::lasting() {
        let upstream = odd();
        let start = || store.with_ledger(&upstream, "results = \"store\"");
        let mut sidecar = start();
        list(&sidecar);
        let calls_ = both().map(|(call, name)| (call.field("Authorization", "Bearer a"), name));
        let mut first = Vec::new();
        for (call, _) in &calls_ {
            first.push(call.ask(&sidecar).body);
        }
        // What was answered is committed.
        sidecar.signal("KILL");
        sidecar.wait_exit();
        let (again, other) = (start(), start());
        for sidecar in [&again, &other] {
            for ((call, name), first) in calls_.iter().zip(&first) {
                let replay = call.ask(sidecar);
                assert_eq!(&replay.body, first, "{store:?}");
                assert_eq!(line(sidecar, &replay)["replayed"], true);
                assert_eq!(made(&upstream, name), 1);
            }
        }
        // The secret behind the principals is in the store too.
        let stranger = Call::of("effect").key("effect").field("Authorization", "Bearer b");
        assert_error(&stranger.ask(&other), 1409, "already_done", "done");
    }
}

#[test]
fn no_store_holds_a_credential_or_more_than_it_must() {
    let (upstream, store) = (odd(), Store::sqlite());
    let sidecar = store.with_ledger(&upstream, "results = \"off\"");
    list(&sidecar);
    let call = Call::of("effect").key("k").arguments("{\"secret\":\"argument-value\"}");
    call.field("Authorization", "Bearer credential-value").ask(&sidecar);
    drop(sidecar);
    for file in std::fs::read_dir(store.folder().path()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        for secret in ["credential-value", "argument-value", "structuredContent"] {
            assert!(!bytes.windows(secret.len()).any(|window| window == secret.as_bytes()), "{secret}");
        }
    }
}

#[test]
fn a_result_that_is_too_large_is_committed_and_not_held() {
    for (store, results) in places() {
        let upstream = server(|n, request, reply| {
            let large = "x".repeat(3000);
            let answer = format!(r#"{{"content":[{{"type":"text","text":"done {n} {large}"}}]}}"#);
            reply.json(200, &[], &result(request, &answer));
        });
        let ledger = format!("results = \"{results}\"\nmax_result = \"2KiB\"");
        let sidecar = store.with_ledger(&upstream, &ledger);
        list(&sidecar);
        both().iter().for_each(|(call, _)| assert!(text(&call.ask(&sidecar)).len() > 3000));
        assert_not_held(&upstream, &sidecar, &both(), store.state());
    }
}

#[test]
fn beyond_max_total_the_oldest_results_go() {
    for (store, results) in places() {
        let upstream = server(|n, request, reply| {
            let large = "x".repeat(3000);
            let answer = format!(r#"{{"content":[{{"type":"text","text":"done {n} {large}"}}]}}"#);
            reply.json(200, &[], &result(request, &answer));
        });
        let sidecar =
            store.with_ledger(&upstream, &format!("results = \"{results}\"\nmax_total = \"16KiB\""));
        list(&sidecar);
        let call = |n: usize| Call::of("effect").key(&format!("effect{n}"));
        for n in 0..10 {
            call(n).ask(&sidecar);
        }
        assert_error(&call(0).ask(&sidecar), 1409, "already_done", "done");
        assert!(text(&call(9).ask(&sidecar)).starts_with("done 9"), "{store:?}");
        assert_eq!(calls(&upstream).len(), 10);
    }
}

#[test]
fn a_result_is_held_for_its_time() {
    for (store, results) in places() {
        let upstream = answering();
        let sidecar = store.with_ledger(&upstream, &format!("results = \"{results}\"\nttl = \"1s\""));
        list(&sidecar);
        // The one that is waited for comes last, so that its time is over last.
        both().iter().rev().for_each(|(call, _)| _ = call.ask(&sidecar));
        let (effect, _) = &both()[0];
        until("the result's time to be over", || message(&effect.ask(&sidecar))["error"].is_object());
        assert_not_held(&upstream, &sidecar, &both(), store.state());
    }
}

#[test]
fn a_tasks_handle_is_held_no_longer_than_the_task() {
    let upstream = server(|n, request, reply| {
        let ttl = request.json()["params"]["arguments"]["ttl"].clone();
        let answer = match request.head.field("mcp-session-id") {
            None => {
                json!({ "resultType": "task", "taskId": format!("t{n}"), "status": "working", "ttlMs": ttl })
            }
            Some(_) => json!({ "task": { "taskId": format!("t{n}"), "status": "working", "ttl": ttl } }),
        };
        reply.json(200, &[], &result(request, &answer.to_string()));
    });
    for (store, results) in places() {
        assert_held_no_longer_than_the_task(
            &store.with_ledger(&upstream, &format!("results = \"{results}\"")),
        );
    }
    assert_eq!(calls(&upstream).len(), 4 * 6);
}

fn assert_held_no_longer_than_the_task(sidecar: &Sidecar) {
    list(sidecar);
    for legacy in [false, true] {
        let call = |ttl: &str| {
            let call = Call::of("effect").key(&format!("{legacy}-{ttl}"));
            let call = call.arguments(&format!("{{\"ttl\":{ttl}}}"));
            if legacy { call.legacy().param("task", "{}") } else { call }
        };
        let (short, long, endless) = (call("700"), call("60000"), call("null"));
        let first: Vec<_> = [&short, &long, &endless].map(|call| call.ask(sidecar).body).into();
        assert_eq!([&long, &endless].map(|call| call.ask(sidecar).body)[..], first[1..]);
        until("the task's time to be over", || {
            let again = short.ask(sidecar);
            again.body != first[0] && message(&again)["error"]["data"]["reason"] == "already_done"
        });
        assert_eq!([&long, &endless].map(|call| call.ask(sidecar).body)[..], first[1..]);
    }
}

#[test]
fn a_result_commits_although_its_node_does_not_take_it() {
    let (gate, large) = (Gate::new(), "x".repeat(700_000));
    let waits = gate.clone();
    let upstream = server(move |n, request, reply| {
        waits.pass();
        let answer = format!(r#"{{"content":[{{"type":"text","text":"done {n}{large}"}}]}}"#);
        if request.json()["params"]["arguments"]["sse"].is_boolean() {
            reply.sse(&[]);
            reply.event(&result(request, &answer));
            return reply.end();
        }
        reply.json(200, &[], &result(request, &answer));
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    for (n, arguments) in ["{}", "{\"sse\":true}"].iter().enumerate() {
        for legacy in [false, true] {
            let n = 2 * n + usize::from(legacy);
            let call = Call::of("effect").key(&format!("k{n}")).arguments(arguments);
            let call = if legacy { call.legacy() } else { call };
            let node = Client::stalled(&sidecar.listen, Some(4096));
            node.send(&call.post());
            let name = format!("k{n}");
            upstream.wait_request_where(|request| key(request).as_deref() == Some(&name));
            gate.open();
            node.read_on();
            node.head();
            // The sidecar has all of it, and its node goes before it has.
            upstream.wait_taken();
            node.reset();
            let mut answer = None;
            until("the attempt to have ended", || {
                let response = call.ask(&sidecar);
                let is_busy = message(&response)["result"]["_meta"]["oz0/retryable"] == true;
                answer = Some(response);
                !is_busy
            });
            assert!(text(&answer.unwrap()).starts_with(&format!("done {n}x")), "replayed");
            assert_eq!(made(&upstream, &format!("k{n}")), 1);
        }
    }
}

#[test]
fn what_only_the_sidecar_may_say_is_not_in_a_replay() {
    let forged =
        r#"{"content":[],"_meta":{"oz0/retryable":true,"a":1,"oz0/retry_after":5,"oz0/refetch":true}}"#;
    let upstream = server(move |n, request, reply| {
        if n % 2 == 0 {
            return reply.json(200, &[], &result(request, forged));
        }
        reply.sse(&[]);
        reply.event(&result(request, forged));
        reply.end();
    });
    for (store, results) in places() {
        let sidecar = store.with_ledger(&upstream, &format!("results = \"{results}\""));
        list(&sidecar);
        for n in 0..2 {
            let call = Call::of("effect").key(&format!("k{n}"));
            let first = message(&call.ask(&sidecar));
            assert_eq!(first["result"], json!({ "content": [], "_meta": { "a": 1 } }));
            assert_eq!(message(&call.ask(&sidecar)), first);
        }
    }
    assert_eq!(calls(&upstream).len(), 8, "two in each place");
}

#[test]
fn the_refetch_mark_is_not_in_a_replay() {
    let written = Watched::new(false);
    let tell = written.clone();
    let upstream = server(move |n, request, reply| {
        reply.sse(&[]);
        // More than the node's side takes unread. Two tokens in turn: nothing is adjacent, so at capacity it is dropped.
        let text = "x".repeat(5000);
        for step in 1..=1000 {
            for token in ["\"mine\"", "\"another\""] {
                reply.event(&mcp::progress(token, format!("{step},\"message\":\"{text}\"")));
            }
        }
        reply.event(&done(request, n));
        reply.end();
        tell.change(|written| *written = true);
    });
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\n[upstreams.mcp.progress]\nqueue = 8\nmin_interval = \"0\"\n",
        upstream.url()
    ));
    list(&sidecar);
    let call = Call::of("effect").legacy().key("k").meta("progressToken", "\"mine\"");
    let node = Client::stalled(&sidecar.listen, Some(4096));
    node.send(&call.post());
    written.wait("all to be written", |written| written.to_string(), |written| written.then_some(()));
    upstream.wait_taken();
    node.read_on();
    let first = message(&node.large_response());
    assert_eq!(first["result"]["_meta"], json!({ "oz0/refetch": true }), "the node is told");
    let replay = call.ask(&sidecar).json();
    assert_eq!(replay["result"]["content"][0]["text"], "done 0");
    assert_eq!(replay["result"]["_meta"], Value::Null);
    assert_eq!(made(&upstream, "k"), 1);
}

#[test]
fn a_result_behind_a_byte_order_mark_commits() {
    let upstream = server(|n, request, reply| {
        reply.json(200, &[], &format!("\u{feff}{}", done(request, n)));
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("effect").key("k");
    call.ask(&sidecar);
    assert_eq!(text(&call.ask(&sidecar)), "done 0");
    assert_eq!(calls(&upstream).len(), 1);
}

#[test]
fn an_event_that_lacks_its_empty_line_commits() {
    let upstream = server(|n, request, reply| {
        reply.sse(&[]);
        reply.chunk(format!("data: {}\n", done(request, n)));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("effect").key("k");
    assert_eq!(text(&call.ask(&sidecar)), "done 0");
    assert_eq!(text(&call.ask(&sidecar)), "done 0");
    assert_eq!(calls(&upstream).len(), 1);
}

#[test]
fn a_call_that_is_done_stays_done_when_it_is_sent_again_and_fails() {
    for (store, results) in places() {
        let upstream = server(|n, request: &Request, reply| match n {
            0 => reply.json(200, &[], &done(request, n)),
            _ => reply.break_off(),
        });
        let sidecar = store.with_ledger(&upstream, &format!("results = \"{results}\""));
        list(&sidecar);
        let call = Call::of("charge").key("k");
        assert_eq!(text(&call.ask(&sidecar)), "done 0");
        let stranger = call.clone().field("Authorization", "Bearer b");
        assert_error(&stranger.ask(&sidecar), 1502, "upstream_failed", "unknown");
        assert_eq!(text(&call.ask(&sidecar)), "done 0", "the committed result is still there: {store:?}");
        assert_eq!(calls(&upstream).len(), 2);
    }
}
