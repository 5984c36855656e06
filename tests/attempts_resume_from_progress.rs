//! A call that has a key and may be made again is asked for progress, which is
//! kept with the call and kept from a node that did not ask; the next attempt goes on from the last good resume token, and
//! says so.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{collections::BTreeSet, fs};

use serde_json::{Value, json};
use support::{
    Gate, Post, Request, Sidecar, Upstream, Watched,
    http::Response,
    keyed::{Call, answering, assert_error, calls, done, list, message, meta, result, server, text},
    mcp, sse,
    store::Store,
    upstream::Reply,
};
use tempfile::TempDir;

/// What the sidecar's own tokens begin with.
const OURS: &str = "mcp-sidecar/";

fn line(sidecar: &Sidecar, response: &Response) -> Value {
    let id = response.head.field("x-request-id").unwrap().to_owned();
    sidecar.wait_line(|line| line["request"] == id.as_str())
}

fn resume(response: &Response) -> Option<&str> {
    response.head.field("oz0-resume")
}

/// Progress of a call, with `_meta`.
fn progress(request: &Request, progress: &str, meta_: &Value) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{},"progress":{progress},"message":"private-message","_meta":{meta_}}}}}"#,
        meta(request)["progressToken"]
    )
}

fn token(text: &str) -> Value {
    json!({ "oz0/resume": text })
}

/// What one attempt reports before its stream breaks: progress as JSON (with a total behind it), and `_meta`.
type Reports = Vec<(&'static str, Value)>;

/// A server whose attempts report what is planned for them and break; one without a plan answers.
fn reporting(plan: Vec<Reports>) -> Upstream {
    server(move |n, request, reply| match plan.get(n) {
        Some(reports) => {
            reply.sse(&[]);
            reports.iter().for_each(|(value, meta)| reply.event(&progress(request, value, meta)));
            reply.break_off();
        }
        None => reply.json(200, &[], &done(request, n)),
    })
}

/// Runs the plan, a call of `tool`, and gives each attempt's `Oz0-Resume`, and the `oz0/resume` that the server got.
fn attempts(tool: &str, plan: Vec<Reports>) -> Vec<(Option<String>, Value)> {
    let count = plan.len() + 1;
    let upstream = reporting(plan);
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of(tool).activity("job", "a");
    (0..count)
        .map(|n| {
            let response = call.clone().id(n).ask(&sidecar);
            let said = resume(&response).map(str::to_owned);
            assert_eq!(line(&sidecar, &response)["resume"].as_str(), said.as_deref());
            let sent = calls(&upstream);
            assert_eq!(sent.len(), n + 1);
            (said, meta(&sent[n])["oz0/resume"].clone())
        })
        .collect()
}

fn said(text: &str, sent: Value) -> (Option<String>, Value) {
    (Some(text.to_owned()), sent)
}

const NONE: (Option<String>, Value) = (None, Value::Null);

#[test]
fn only_a_keyed_call_that_may_be_made_again_is_asked_for_progress() {
    let upstream = answering();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let mut tokens = BTreeSet::new();
    for (tool, asked) in [
        ("read", true),
        ("charge", true),
        ("pay", true),
        ("mark", false),
        ("effect", false),
        ("never_listed", false),
    ] {
        for legacy in [false, true] {
            let call = Call::of(tool).activity("job", &format!("{tool}-{legacy}"));
            let call = if legacy { call.legacy() } else { call };
            call.ask(&sidecar);
            match meta(&calls(&upstream).pop().unwrap())["progressToken"].as_str() {
                Some(token) => {
                    assert!(asked, "{tool}");
                    assert!(token.starts_with(OURS) && token.len() > OURS.len() + 20, "{token}");
                    assert!(tokens.insert(token.to_owned()), "each its own");
                }
                None => assert!(!asked, "{tool}"),
            }
        }
    }
    let unkeyed = Call::of("charge");
    unkeyed.ask(&sidecar);
    assert_eq!(calls(&upstream).last().unwrap().body, unkeyed.post().body);
}

#[test]
fn a_token_is_added_only_where_an_event_stream_may_come_and_the_call_is_no_task() {
    let upstream = answering();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let cases = [
        (Call::of("charge").field("Accept", "application/json"), false),
        (Call::of("charge").field("Accept", "application/json, text/event-stream;q=0"), false),
        (Call::of("charge").field("Accept", "text/event-stream"), true),
        (Call::of("charge").field("Accept", "*/*"), true),
        (Call::of("charge").legacy().param("task", "{}"), false),
        (Call::of("charge").legacy(), true),
    ];
    for (n, (call, added)) in cases.into_iter().enumerate() {
        call.activity("job", &format!("a{n}")).ask(&sidecar);
        let token = meta(&calls(&upstream)[n])["progressToken"].clone();
        assert_eq!(token.is_string(), added, "{n}: {token}");
    }
}

#[test]
fn the_nodes_own_token_is_used_and_its_progress_passes() {
    for (n, own) in ["\"mine\"", "0", "1", "\"\"", "\"mcp-sidecar/mine\""].into_iter().enumerate() {
        let upstream = reporting(vec![vec![("1,\"total\":4", token("t1")), ("2,\"total\":4", token("t2"))]]);
        let sidecar = Sidecar::before(&upstream);
        list(&sidecar);
        let call = Call::of("charge").activity("job", "a").meta("progressToken", own);
        let call = if n % 2 == 0 { call } else { call.legacy() };
        let first = call.ask(&sidecar);
        let token: Value = serde_json::from_str(own).unwrap();
        let events = sse::read(&first.body).events;
        let got: Vec<Value> =
            events.iter().map(|event| event.json()["params"]["progressToken"].clone()).collect();
        assert_eq!(got[..2], [token.clone(), token.clone()], "both events, with its own token");
        let second = call.ask(&sidecar);
        assert_eq!(resume(&second), Some("resumed from progress 2 of 4"));
        for sent in calls(&upstream) {
            assert_eq!(meta(&sent)["progressToken"], token);
        }
    }
}

#[test]
fn progress_that_the_node_did_not_ask_for_is_kept_from_it() {
    for legacy in [false, true] {
        let upstream = server(|n, request, reply| {
            reply.sse(&[]);
            reply.event(&progress(request, "1", &json!({})));
            reply.event(&progress(request, "2,\"total\":3", &token("t")));
            reply.event(&done(request, n));
            reply.end();
        });
        let sidecar = Sidecar::before(&upstream);
        list(&sidecar);
        let call = Call::of("charge").activity("job", "a");
        let call = if legacy { call.legacy() } else { call };
        let response = call.ask(&sidecar);
        let events = sse::read(&response.body).events;
        assert_eq!(events.len(), 1, "{}", response.text());
        assert_eq!(text(&response), "done 0");
        assert!(!response.text().contains(OURS));
        let line = line(&sidecar, &response);
        assert_eq!((&line["progress"], &line["total"], &line["events"]), (&json!(2), &json!(3), &json!(1)));
    }
}

/// A legacy server where the call's stream ends with an event id, and a `GET` tells what `tell` says of the call.
fn telling_on_get(tell: impl Fn(&Request, &mut Reply) + Send + Sync + 'static) -> Upstream {
    let call = Watched::new(None::<Request>);
    server(move |n, request, reply| {
        if n != usize::MAX {
            call.change(|call| *call = Some(request.clone()));
            reply.sse(&[]);
            reply.chunk("id: e1\ndata:\n\n");
            return reply.end();
        }
        let call = call.lock().clone().unwrap();
        reply.sse(&[]);
        tell(&call, reply);
        reply.end();
    })
}

#[test]
fn it_is_kept_back_on_a_get_stream_too_and_by_every_sidecar_on_the_store() {
    let upstream = telling_on_get(|call, reply| {
        reply.event(&progress(call, "1", &json!({})));
        reply.event(&mcp::progress("\"another's\"", 1));
        reply.event(&done(call, 0));
    });
    let folder = TempDir::new().unwrap();
    let state = format!("sqlite:{}", folder.path().join("state.db").display());
    let start = || Sidecar::with_flags(&["--upstream", &upstream.url(), "--state", &state]);
    let mut first = start();
    list(&first);
    Call::of("charge").legacy().activity("job", "a").ask(&first);
    let told = |sidecar: &Sidecar| {
        let response = sidecar.client().ask(&Post::get().field("Last-Event-ID", "e1"));
        assert!(!response.text().contains(OURS), "{}", response.text());
        sse::read(&response.body).events.len()
    };
    assert_eq!(told(&first), 2, "the other progress, and the response");
    let other = start();
    assert_eq!(told(&other), 2, "another sidecar, whose first stream this is");
    first.signal("KILL");
    first.wait_exit();
    assert_eq!(told(&start()), 2, "after a restart");
}

#[test]
fn it_is_kept_back_on_another_requests_stream() {
    let gate = Gate::new();
    let waits = gate.clone();
    let first = Watched::new(None::<Request>);
    let upstream = server(move |n, request, reply| {
        if request.json()["params"]["name"] == "charge" {
            first.change(|first| *first = Some(request.clone()));
            waits.pass();
            return reply.json(200, &[], &done(request, n));
        }
        let first = first.wait_unbounded(|first| first.clone());
        reply.sse(&[]);
        reply.event(&progress(&first, "1", &json!({})));
        reply.event(&mcp::progress("\"another's\"", 1));
        reply.event(&done(request, n));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let node = sidecar.client();
    node.send(&Call::of("charge").legacy().activity("job", "a").id(1).post());
    upstream.wait_requests(support::keyed::is_call, 1);
    let second = Call::of("effect").legacy().id(2).ask(&sidecar);
    assert_eq!(sse::read(&second.body).events.len(), 2, "{}", second.text());
    assert!(!second.text().contains(OURS));
    gate.open();
    node.response();
}

#[test]
fn an_error_tells_how_far_the_call_got() {
    for own in [false, true] {
        let upstream = reporting(vec![
            vec![("1", json!({})), ("2.5,\"total\":4", json!({}))],
            vec![("3", json!({}))],
            vec![],
        ]);
        let sidecar = Sidecar::before(&upstream);
        list(&sidecar);
        let call = Call::of("charge").activity("job", "a");
        let call = if own { call.meta("progressToken", 7) } else { call };
        for expected in [json!({ "progress": 2.5, "total": 4 }), json!({ "progress": 3 }), Value::Null] {
            let response = call.ask(&sidecar);
            assert_error(&response, 1502, "upstream_failed", "unknown");
            assert_eq!(message(&response)["error"]["data"]["oz0/progress"], expected);
        }
    }
}

#[test]
fn the_next_attempt_goes_on_from_the_last_token() {
    for tool in ["charge", "read"] {
        let got = attempts(
            tool,
            vec![
                vec![("1,\"total\":4", token("one")), ("2,\"total\":4", token("two"))],
                vec![("3", token("three"))],
                vec![("3.5", token("a._:~+/=-Z9"))],
            ],
        );
        assert_eq!(
            got,
            [
                NONE,
                said("resumed from progress 2 of 4", json!({ "token": "two", "progress": 2 })),
                said("resumed from progress 3", json!({ "token": "three", "progress": 3 })),
                said("resumed from progress 3.5", json!({ "token": "a._:~+/=-Z9", "progress": 3.5 })),
            ]
        );
    }
}

#[test]
fn an_attempt_that_fails_before_any_progress_passes_on_what_it_was_given() {
    let resumed = || said("resumed from progress 2 of 4", json!({ "token": "t", "progress": 2 }));
    let got = attempts("charge", vec![vec![("2,\"total\":4", token("t"))], vec![], vec![]]);
    assert_eq!(got, [NONE, resumed(), resumed(), resumed()]);
}

#[test]
fn a_token_stands_with_its_own_progress() {
    let got = attempts("charge", vec![vec![("1", token("t")), ("2,\"total\":9", json!({}))]]);
    assert_eq!(got[1], said("resumed from progress 1", json!({ "token": "t", "progress": 1 })));
}

#[test]
fn what_is_no_token_is_ignored() {
    let long = "x".repeat(257);
    let bad = [
        json!(""),
        json!("a b"),
        json!("\u{e9}"),
        json!(long),
        json!(7),
        json!(null),
        json!({ "token": "t" }),
        json!("a\nb"),
        json!("a\""),
    ];
    for bad in bad {
        let bad = json!({ "oz0/resume": bad });
        let got = attempts("charge", vec![vec![("1", bad.clone())]]);
        assert_eq!(got[1], said("started over: invalid token", Value::Null), "{bad}");
        // After a good one it changes nothing: the good one stands, with its progress.
        let got = attempts(
            "charge",
            vec![vec![("1,\"total\":3", token("good")), ("2,\"total\":3", bad.clone())], vec![("3", bad)]],
        );
        let resumed = || said("resumed from progress 1 of 3", json!({ "token": "good", "progress": 1 }));
        assert_eq!(got[1..], [resumed(), resumed()]);
    }
    let longest = json!({ "oz0/resume": "x".repeat(256) });
    let got = attempts("charge", vec![vec![("1", longest.clone())]]);
    assert_eq!(got[1].1["token"], longest["oz0/resume"]);
    // A good one after it stands.
    let got = attempts("charge", vec![vec![("1", json!({ "oz0/resume": "" })), ("2", token("good"))]]);
    assert_eq!(got[1], said("resumed from progress 2", json!({ "token": "good", "progress": 2 })));
}

#[test]
fn an_attempt_that_starts_over_says_why() {
    let got = attempts("charge", vec![vec![]]);
    assert_eq!(got[1], said("started over: no progress reported", Value::Null));
    let got = attempts("charge", vec![vec![("1", json!({}))]]);
    assert_eq!(got[1], said("started over: no token", Value::Null));
    let got = attempts("pay", vec![vec![("1", token("t"))]]);
    assert_eq!(got[1], said("started over: the server does not take part", Value::Null));
    let got = attempts("pay", vec![vec![]]);
    assert_eq!(got[1], said("started over: the server does not take part", Value::Null));
    let got = attempts("never_listed", vec![vec![]]);
    assert_eq!(got[1], said("started over: the call may not be made again", Value::Null));

    let upstream = server(|_, request, reply| reply.json(400, &[], &done(request, 0)));
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let unsafe_ = Call::of("effect").activity("job", "a");
    assert_eq!(resume(&unsafe_.ask(&sidecar)), None, "a first attempt says nothing");
    assert_eq!(resume(&unsafe_.ask(&sidecar)), Some("started over: the call may not be made again"));
    for (tool, expected) in [
        ("charge", "started over: state lost"),
        ("pay", "started over: the server does not take part"),
        ("effect", "started over: the call may not be made again"),
    ] {
        let call = Call::of(tool).said(json!({ "job": "job", "activity": tool, "attempt": 2 }));
        let response = call.ask(&sidecar);
        assert_eq!(resume(&response), Some(expected));
        assert_eq!(line(&sidecar, &response)["resume"], expected);
    }
}

#[test]
fn a_committed_result_ends_it() {
    let upstream = server(|n, request, reply| match n {
        0 => {
            reply.sse(&[]);
            reply.event(&progress(request, "1", &token("t")));
            reply.break_off();
        }
        1 => {
            reply.sse(&[]);
            reply.event(&progress(request, "2", &token("u")));
            reply.event(&done(request, n));
            reply.end();
        }
        _ => reply.json(200, &[], &done(request, n)),
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    // One that only reads is sent again after it is done.
    let call = Call::of("read").activity("job", "a");
    let said: Vec<_> = (0..3).map(|_| resume(&call.ask(&sidecar)).map(str::to_owned)).collect();
    assert_eq!(said[1].as_deref(), Some("resumed from progress 1"));
    assert!(said[2].as_deref().unwrap().starts_with("started over: no "), "{said:?}");
    let sent: Vec<Value> = calls(&upstream).iter().map(|call| meta(call)["oz0/resume"].clone()).collect();
    assert_eq!(sent, [Value::Null, json!({ "token": "t", "progress": 1 }), Value::Null]);
}

#[test]
fn a_token_is_shown_only_to_the_principal_whose_attempt_it_came_from() {
    let upstream = reporting(vec![vec![("1,\"total\":2", token("secret"))], vec![]]);
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = |credential: &str| Call::of("charge").activity("job", "a").field("Authorization", credential);
    call("Bearer a").ask(&sidecar);
    let other = call("Bearer b").ask(&sidecar);
    assert_eq!(resume(&other), Some("started over: no token"));
    let own = call("Bearer a").ask(&sidecar);
    assert_eq!(resume(&own), Some("resumed from progress 1 of 2"));
    let sent: Vec<Value> =
        calls(&upstream).iter().map(|call| meta(call)["oz0/resume"]["token"].clone()).collect();
    assert_eq!(sent, [Value::Null, Value::Null, json!("secret")]);
}

#[test]
fn a_node_that_sends_its_own_resume_is_left_alone() {
    let upstream = reporting(vec![vec![("1,\"total\":2", token("ours"))]]);
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("charge").activity("job", "a");
    call.ask(&sidecar);
    let own = r#"{ "token" : "the \u006eode's", "progress":0.50 }"#;
    let response = call.meta("oz0/resume", own).ask(&sidecar);
    let sent = String::from_utf8(calls(&upstream)[1].body.clone()).unwrap();
    assert!(sent.contains(&format!("\"oz0/resume\":{own}")), "{sent}");
    assert_eq!(sent.matches("oz0/resume").count(), 1, "{sent}");
    assert_eq!(resume(&response), Some("resumed from progress 0.5"), "what was sent is what is said");
}

#[test]
fn what_was_not_sent_is_not_said_to_be_resumed_from() {
    let upstream = reporting(vec![vec![("1,\"total\":2", token("t"))], vec![]]);
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("charge").key("own");
    call.ask(&sidecar);
    let signed =
        call.clone().field("Signature", "sig1=:AAAA:").field("Signature-Input", "sig1=()").ask(&sidecar);
    assert_eq!(resume(&signed), Some("started over: no token"));
    assert_eq!(calls(&upstream)[1].body, call.post().body, "it goes as it came");
    let broken = call.meta("oz0/resume", "7").ask(&sidecar);
    assert_eq!(resume(&broken), Some("started over: invalid token"));
}

#[test]
fn the_configuration_says_whether_a_server_takes_part() {
    for (tool, takes_part) in [("charge", false), ("pay", true)] {
        let upstream = reporting(vec![vec![("1", token("t"))]]);
        let sidecar = Sidecar::with_config(&format!(
            "[upstreams.mcp]\nurl = \"{}\"\n[upstreams.mcp.tools.{tool}]\nresume = {takes_part}\n",
            upstream.url()
        ));
        list(&sidecar);
        let call = Call::of(tool).activity("job", "a");
        call.ask(&sidecar);
        let expected = if takes_part {
            "resumed from progress 1"
        } else {
            "started over: the server does not take part"
        };
        assert_eq!(resume(&call.ask(&sidecar)), Some(expected));
    }
}

#[test]
fn another_sidecar_on_the_store_goes_on_from_there_and_no_message_is_kept() {
    for store in Store::lasting() {
        let upstream = reporting(vec![vec![("1", token("t1")), ("2,\"total\":4", token("t2"))]]);
        let (one, other) = (store.before(&upstream), store.before(&upstream));
        list(&one);
        let call = Call::of("charge").activity("job", "a");
        let lost = call.ask(&one);
        assert!(!line(&one, &lost).to_string().contains("private-message"));
        let resumed = call.ask(&other);
        assert_eq!(resume(&resumed), Some("resumed from progress 2 of 4"), "{store:?}");
        assert_eq!(line(&other, &resumed)["attempt"], 2);
        drop((one, other));
        for file in fs::read_dir(store.folder().path()).unwrap() {
            let bytes = fs::read(file.unwrap().path()).unwrap();
            assert!(!bytes.windows(15).any(|window| window == b"private-message"));
        }
    }
}

#[test]
fn an_attempt_that_ran_past_its_time_is_gone_on_from() {
    let upstream = server(|n, request, reply| match n {
        0 => {
            reply.sse(&[]);
            reply.event(&progress(request, "1,\"total\":2", &token("t")));
            reply.hang();
        }
        _ => reply.json(200, &[], &done(request, n)),
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("charge").said(json!({ "job": "job", "activity": "a", "time_limit": 1 }));
    let late = call.ask(&sidecar);
    assert_error(&late, 1504, "max_timeout", "unknown");
    assert_eq!(message(&late)["error"]["data"]["oz0/progress"], json!({ "progress": 1, "total": 2 }));
    assert_eq!(resume(&call.ask(&sidecar)), Some("resumed from progress 1 of 2"));
    assert_eq!(text(&call.ask(&sidecar)), "done 1");
}

#[test]
fn is_error_is_gone_on_from_as_well() {
    let upstream = server(|n, request, reply| match n {
        0 => {
            reply.sse(&[]);
            reply.event(&progress(request, "1", &token("t")));
            reply.event(&result(request, r#"{"content":[],"isError":true}"#));
            reply.end();
        }
        _ => reply.json(200, &[], &done(request, n)),
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    let call = Call::of("charge").activity("job", "a");
    call.ask(&sidecar);
    assert_eq!(resume(&call.ask(&sidecar)), Some("resumed from progress 1"));
}
