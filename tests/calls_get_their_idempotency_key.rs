//! What the node says of a call, in `oz0/call` or in `Oz0-*` headers, is consumed and becomes the
//! call's idempotency key. Arguments count by their digest, `k` counts up without ever being given twice, and an
//! activity's key stays what it was at its first attempt.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{collections::BTreeSet, thread};

use serde_json::{Value, json};
use support::{
    Post, Sidecar, Upstream,
    http::Response,
    keyed::{
        Call, EMPTY_DIGEST, answering, calls, done, is_call, key, list, list_post, listing, meta,
        server_with, text,
    },
    mcp::MODERN,
    redis::Redis,
};
use tempfile::TempDir;

const D: &str = EMPTY_DIGEST;

fn with_state(upstream: &Upstream, state: &str) -> Sidecar {
    Sidecar::with_flags(&["--upstream", &upstream.url(), "--state", state])
}

fn sqlite(folder: &TempDir) -> String {
    format!("sqlite:{}", folder.path().join("state.db").display())
}

/// A sidecar to which every tool is known, and its server.
fn known() -> (Upstream, Sidecar) {
    let upstream = answering();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    (upstream, sidecar)
}

/// The key that the server has received last.
fn last_key(upstream: &Upstream) -> Option<String> {
    key(calls(upstream).last().unwrap())
}

fn answered_key(response: &Response) -> Option<&str> {
    response.head.field("oz0-idempotency-key")
}

/// The digest of the arguments, out of the key of a session's call.
fn digest(response: &Response) -> String {
    let key = answered_key(response).unwrap();
    key.split_once('#').unwrap().1.split_once('/').unwrap().0.to_owned()
}

/// A session's call that the sidecar counts.
fn counted(activity: &str) -> Call {
    let said = json!({ "job": "job", "session": 1, "session_start": "s", "activity": activity });
    Call::of("mark").said(said)
}

const HEADERS: [(&str, &str); 9] = [
    ("job", "Oz0-Job"),
    ("activity", "Oz0-Activity"),
    ("continued", "Oz0-Continued"),
    ("session", "Oz0-Session"),
    ("session_start", "Oz0-Session-Start"),
    ("k", "Oz0-K"),
    ("attempt", "Oz0-Attempt"),
    ("time_limit", "Oz0-Time-Limit"),
    ("elapsed", "Oz0-Elapsed"),
];

/// The same call, said by headers.
fn by_headers(call: Call, said: &Value) -> Call {
    said.as_object().unwrap().iter().fold(call, |call, (member, value)| {
        let (_, header) = HEADERS.iter().find(|(name, _)| name == member).unwrap();
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        call.field(header, &value)
    })
}

#[test]
fn each_identity_has_its_form_of_key_said_by_the_object_or_by_headers() {
    let session = |rest: &str| Some(format!("job/{rest}"));
    // The tool is idempotent (`mark`) or not (`effect`).
    let cases = [
        ("effect", json!({ "job": "job", "activity": "act" }), session("act")),
        ("effect", json!({ "job": "job", "activity": "act2", "continued": 0 }), session("act2")),
        ("effect", json!({ "job": "job", "activity": "act3", "continued": 4 }), session("anr4/act3")),
        ("mark", json!({ "job": "job", "activity": "act4" }), session("act4")),
        ("mark", json!({ "job": "job", "session": 2, "k": 1 }), Some(format!("job/s2/mark#{D}/1"))),
        ("mark", json!({ "job": "job", "session": 0, "k": 7 }), Some(format!("job/s0/mark#{D}/7"))),
        (
            "mark",
            json!({ "job": "job", "session": 2, "k": 3, "continued": 5 }),
            Some(format!("job/r5/s2/mark#{D}/3")),
        ),
        (
            "mark",
            json!({ "job": "job", "session": 3, "session_start": "x", "activity": "act5" }),
            Some(format!("job/s3/mark#{D}/1")),
        ),
        (
            "mark",
            json!({ "job": "job", "session": 3, "session_start": "x", "activity": "act6", "continued": 1 }),
            Some(format!("job/r1/s3/mark#{D}/1")),
        ),
        (
            "mark",
            json!({ "job": "job", "session": 3, "k": 9, "activity": "act7" }),
            Some(format!("job/s3/mark#{D}/9")),
        ),
        // A session's call of a tool that is not idempotent has the key of its activity.
        ("effect", json!({ "job": "job", "session": 3, "k": 1, "activity": "act8" }), session("act8")),
        ("effect", json!({ "job": "job", "session": 3, "k": 1 }), None),
        ("effect", json!({ "job": "job" }), None),
        ("effect", json!({ "activity": "act" }), None),
        ("effect", json!({}), None),
    ];
    let (upstream, sidecar) = known();
    let (other_upstream, other) = known();
    for (tool, said, expected) in cases {
        let response = Call::of(tool).said(&said).ask(&sidecar);
        assert_eq!(response.status(), 200, "{}", response.text());
        assert_eq!(last_key(&upstream), expected, "{said}");
        assert_eq!(answered_key(&response), expected.as_deref(), "{said}");
        let response = by_headers(Call::of(tool), &said).ask(&other);
        assert_eq!(last_key(&other_upstream), expected, "{said}, by headers");
        let id = response.head.field("x-request-id").unwrap();
        let line = other.wait_line(|line| line["request"] == id);
        assert_eq!(line["key"].as_str(), expected.as_deref());
        assert_eq!(line["digest"].as_str(), expected.is_some().then_some(D));
        for member in ["job", "activity"] {
            assert_eq!(line[member], said[member], "{said}");
        }
    }
}

#[test]
fn the_object_wins_member_by_member() {
    let (upstream, sidecar) = known();
    let call = Call::of("effect").said(json!({ "job": "object", "continued": 2 }));
    let headers = json!({ "job": "header", "activity": "header", "continued": 9, "attempt": 1 });
    by_headers(call, &headers).ask(&sidecar);
    assert_eq!(last_key(&upstream).unwrap(), "object/anr2/header");
}

#[test]
fn a_header_that_is_malformed_is_refused_unless_the_object_says_it() {
    let (upstream, sidecar) = known();
    let call = Call::of("effect").activity("job", "a");
    for call in [call.clone().field("Oz0-Job", ""), call.field("Oz0-Job", "b").field("Oz0-Job", "c")] {
        assert_eq!(call.ask(&sidecar).status(), 200);
        assert_eq!(last_key(&upstream).unwrap(), "job/a");
    }
}

#[test]
fn nothing_that_is_the_sidecars_reaches_the_upstream() {
    let (upstream, sidecar) = known();
    let said = json!({ "job": "job", "activity": "a", "continued": 1, "session": 1, "session_start": "s", "k": 1,
        "attempt": 1, "time_limit": 60, "elapsed": 0.5 });
    by_headers(Call::of("effect").said(&said), &said).ask(&sidecar);
    by_headers(Call::of("effect").said(json!({})), &json!({ "elapsed": 1 }))
        .field("Oz0-Other", "x")
        .ask(&sidecar);
    Call::of("effect").legacy().said(&said).key("own").ask(&sidecar);
    sidecar.client().ask(&list_post("{}").field("Oz0-Job", "job"));
    let requests = upstream.requests();
    assert_eq!(requests.iter().filter(|request| is_call(request)).count(), 3);
    for request in requests {
        let strange = request.head.fields.iter().find(|(name, _)| name.to_lowercase().starts_with("oz0-"));
        assert_eq!(strange, None);
        let text = String::from_utf8(request.body.clone()).unwrap();
        assert!(!text.contains("oz0/call"), "{text}");
    }
}

#[test]
fn only_what_the_sidecar_adds_is_changed() {
    let (upstream, sidecar) = known();
    let body = format!(
        r#" {{"jsonrpc" : "2.0","id":  1.0e0 ,"params":{{"arguments":{{"b":1e2,"a":"\u00e9"}},"x-unknown":[1 , 2],"_meta":{{ "y/z" : 1.50, "oz0/call":{{"job":"j","activity":"a"}}, "io.modelcontextprotocol/protocolVersion":"{MODERN}" }},"name":"effect"}},"method":"tools/call"}}"#
    );
    sidecar.client().ask(&Post::modern("tools/call", Some("effect"), body.clone()));
    let sent = String::from_utf8(calls(&upstream)[0].body.clone()).unwrap();
    let key = r#""oz0/idempotency_key":"j/a""#;
    let rest = sent.replacen(key, "", 1);
    assert_ne!(rest, sent);
    let squeezed = |text: &str| text.replace([',', ' '], "");
    assert_eq!(squeezed(&rest), squeezed(&body.replacen(r#""oz0/call":{"job":"j","activity":"a"},"#, "", 1)));
    assert_eq!(calls(&upstream)[0].json()["params"]["arguments"], json!({ "b": 1e2, "a": "é" }));
}

#[test]
fn a_key_that_the_node_put_there_is_left_and_is_the_calls_identity() {
    let (upstream, sidecar) = known();
    let call = Call::of("effect").meta("oz0/idempotency_key", r#""the \u006eode's""#).activity("job", "a");
    let response = call.ask(&sidecar);
    let sent = String::from_utf8(calls(&upstream)[0].body.clone()).unwrap();
    assert!(sent.contains(r#""oz0/idempotency_key":"the \u006eode's""#), "{sent}");
    assert_eq!(sent.matches("oz0/").count(), 1, "{sent}");
    assert_eq!(answered_key(&response), Some("the node's"));
    // It is the call's identity: the same call again is the same call.
    assert_eq!(text(&Call::of("effect").key("the node's").id(2).ask(&sidecar)), "done 0");
    assert_eq!(calls(&upstream).len(), 1);
}

#[test]
fn an_idempotency_key_header_is_the_identity_of_a_call_without_job_and_activity() {
    let (upstream, sidecar) = known();
    for (header, expected) in [
        ("\"8e03978e-40d5\"", "8e03978e-40d5"),
        ("not-quoted", "not-quoted"),
        (r#""a \"quoted\" \\ one""#, r#"a "quoted" \ one"#),
    ] {
        let response = Call::of("effect").field("Idempotency-Key", header).ask(&sidecar);
        let sent = calls(&upstream).pop().unwrap();
        assert_eq!(key(&sent).as_deref(), Some(expected));
        assert_eq!(sent.head.all("idempotency-key"), [header], "forwarded as it came");
        assert_eq!(answered_key(&response), Some(expected));
    }
    let both = Call::of("effect").field("Idempotency-Key", "\"unused\"").activity("job", "a");
    both.ask(&sidecar);
    assert_eq!(last_key(&upstream).unwrap(), "job/a");
    let job_alone = Call::of("effect").field("Idempotency-Key", "\"used\"").said(json!({ "job": "job" }));
    job_alone.ask(&sidecar);
    assert_eq!(last_key(&upstream).unwrap(), "used");
    let own = Call::of("effect").field("Idempotency-Key", "\"unused\"").key("own");
    own.ask(&sidecar);
    assert_eq!(last_key(&upstream).unwrap(), "own");
}

#[test]
fn without_identity_no_key_is_invented() {
    let (upstream, sidecar) = known();
    for call in [Call::of("effect"), Call::of("charge"), Call::of("effect").legacy()] {
        let response = call.ask(&sidecar);
        assert_eq!(calls(&upstream).last().unwrap().body, call.post().body, "byte for byte");
        assert_eq!(answered_key(&response), None);
    }
    // Twice the same is two calls.
    assert_eq!(calls(&upstream).len(), 3);
    Call::of("effect").ask(&sidecar);
    assert_eq!(calls(&upstream).len(), 4);
}

#[test]
fn the_key_goes_as_a_header_too_where_the_operator_wants_it() {
    let upstream = answering();
    let toml = format!("[upstreams.mcp]\nurl = \"{}\"\nidempotency_header = true\n", upstream.url());
    let sidecar = Sidecar::with_config(&toml);
    Call::of("effect").activity("jo\"b", "a").ask(&sidecar);
    assert_eq!(calls(&upstream)[0].head.all("idempotency-key"), [r#""jo\"b/a""#]);
    Call::of("effect").activity("job", "b").field("Idempotency-Key", "\"mine\"").ask(&sidecar);
    assert_eq!(calls(&upstream)[1].head.all("idempotency-key"), ["\"mine\""], "the node's own stays");
    Call::of("effect").ask(&sidecar);
    assert_eq!(calls(&upstream)[2].head.field("idempotency-key"), None);
    let (plain, sidecar) = known();
    Call::of("effect").activity("job", "a").ask(&sidecar);
    assert_eq!(calls(&plain)[0].head.field("idempotency-key"), None, "off by default");
}

#[test]
fn a_key_that_no_header_can_carry_is_answered_in_the_sentinel_form() {
    let (_, sidecar) = known();
    for (own, expected) in [
        ("schl\u{fc}ssel", "=?base64?c2NobMO8c3NlbA==?="),
        ("a\nb", "=?base64?YQpi?="),
        (" a", "=?base64?IGE=?="),
        ("a b", "a b"),
    ] {
        let response = Call::of("effect").key(own).ask(&sidecar);
        assert_eq!(answered_key(&response), Some(expected), "{own:?}");
    }
}

#[test]
fn what_breaks_the_rules_of_an_identity_is_refused_and_not_sent() {
    let (upstream, sidecar) = known();
    let long = "x".repeat(257);
    let base = json!({ "job": "job", "activity": "a" });
    let with = |member: &str, value: Value| {
        let mut said = base.clone();
        said[member] = value;
        said
    };
    let mut both = vec![
        json!({ "job": "", "activity": "a" }),
        json!({ "job": "two words", "activity": "a" }),
        json!({ "job": "j", "activity": "" }),
        with("session", json!(-1)),
        with("session", json!(1.5)),
        with("continued", json!(-1)),
        with("continued", json!("x")),
        with("k", json!(0)),
        with("attempt", json!(0)),
        with("attempt", json!("second")),
        with("time_limit", json!(0)),
        with("time_limit", json!(-5)),
        with("elapsed", json!(-0.1)),
        with("session_start", json!("a b")),
        // `session` needs `k`, or `session_start` with `activity`.
        json!({ "job": "j", "session": 1 }),
        json!({ "job": "j", "session": 1, "activity": "a" }),
        json!({ "job": "j", "session": 1, "session_start": "s" }),
        // From the second attempt on a call must be named.
        json!({ "job": "j", "attempt": 2 }),
        json!({ "attempt": 2 }),
    ];
    for member in ["job", "activity", "session_start"] {
        both.push(with(member, json!(long)));
    }
    let objects = [
        with("job", json!(7)),
        with("job", json!("\u{e9}")),
        with("job", json!("a\tb")),
        with("activity", Value::Null),
        with("session", json!("1")),
        with("k", json!(null)),
        with("elapsed", json!("0")),
        json!("job"),
        json!(null),
        json!([]),
    ];
    let mut calls_: Vec<Call> = Vec::new();
    calls_.extend(both.iter().map(|said| by_headers(Call::of("mark"), said)));
    calls_.extend(both.iter().chain(&objects).map(|said| Call::of("mark").said(said)));
    calls_.push(Call::of("mark").said(r#"{"job":"a","job":"a","activity":"b"}"#));
    for own in ["\"\"", "7", "null", "{}", "\"\\ud800\""] {
        calls_.push(Call::of("mark").meta("oz0/idempotency_key", own));
    }
    // A leg needs a name where there is any identity at all.
    for leg in [("inputResponses", "{}"), ("requestState", "\"s\"")] {
        calls_.push(Call::of("mark").said(json!({ "job": "j" })).param(leg.0, leg.1));
        calls_.push(Call::of("mark").field("Oz0-Session-Start", "x").param(leg.0, leg.1));
    }
    for (n, call) in calls_.iter().enumerate() {
        let call = call.clone().id(format!("\"n{n}\""));
        let response = call.ask(&sidecar);
        let told = response.text();
        assert_eq!(response.status(), 400, "{} {:?}: {told}", call.body(), call.post().fields);
        let answer = response.json();
        assert_eq!(
            (&answer["error"]["code"], &answer["id"]),
            (&json!(-32600), &json!(format!("n{n}"))),
            "{told}"
        );
    }
    assert_eq!(calls(&upstream).len(), 0, "nothing was sent");
}

#[test]
fn a_call_that_says_which_it_is_and_has_no_id_is_refused_and_not_sent() {
    let (upstream, sidecar) = known();
    let named = [
        Call::of("effect").activity("job", "a"),
        Call::of("effect").said(json!({})),
        Call::of("effect").key("own"),
        Call::of("effect").field("Oz0-Job", "job"),
        Call::of("effect").field("Idempotency-Key", "\"k\""),
    ];
    for id in ["null", "true", "{}", "[1]", ""] {
        for call in named.iter().flat_map(|call| [call.clone(), call.clone().legacy()]) {
            let mut post = call.post();
            let with = if id.is_empty() { String::new() } else { format!("\"id\":{id},") };
            post.body = call.body().replacen("\"id\":1,", &with, 1).into();
            let response = sidecar.client().ask(&post);
            assert_eq!(response.status(), 400, "{id}: {}", response.text());
            assert_eq!(response.json()["error"]["code"], -32600);
        }
    }
    assert_eq!(calls(&upstream).len(), 0, "nothing was sent");
    let post = Call::of("effect").legacy();
    let body = post.body().replacen("\"id\":1,", "\"id\":null,", 1);
    sidecar.client().ask(&Post { body: body.into(), ..post.post() });
    assert_eq!(calls(&upstream).len(), 1, "without any it is the upstream's to judge");
}

#[test]
fn what_keeps_the_rules_of_an_identity_is_sent() {
    let (upstream, sidecar) = known();
    let longest = "x".repeat(256);
    let said = [
        json!({ "job": longest, "activity": "~!\"#/%&'()*+" }),
        json!({ "job": "j", "activity": "b", "continued": 0, "session": 0, "k": 1, "attempt": 1 }),
        json!({ "job": "j", "activity": "c", "attempt": 2, "time_limit": 0.5, "elapsed": 0.0 }),
        json!({ "job": "j", "session": 1, "k": 1, "attempt": 3 }),
        json!({ "job": "j", "activity": "d", "unknown": { "member": 1 } }),
    ];
    for said in &said {
        let response = Call::of("mark").said(said).ask(&sidecar);
        assert_eq!(response.status(), 200, "{said}: {}", response.text());
    }
    let leg = Call::of("mark").param("requestState", "\"s\"");
    assert_eq!(leg.ask(&sidecar).status(), 200, "a leg without any identity");
    assert_eq!(leg.clone().key("own").ask(&sidecar).status(), 200);
    assert_eq!(leg.activity("j", "leg").ask(&sidecar).status(), 200);
    assert_eq!(calls(&upstream).len(), said.len() + 3);
}

#[test]
fn the_same_arguments_have_one_digest_however_they_are_spelled() {
    let (_, sidecar) = known();
    let digest_of = |n: usize, arguments: Option<&str>| {
        let call = counted(&format!("a{n}"));
        let call = match arguments {
            Some(arguments) => call.arguments(arguments),
            None => call.without_arguments(),
        };
        let response = call.ask(&sidecar);
        assert_eq!(response.status(), 200, "{}", response.text());
        digest(&response)
    };
    let same = [
        vec![Some("{}"), None, Some(" { } ")],
        vec![
            Some(r#"{"a":1,"b":"é"}"#),
            Some(r#"{ "b" : "\u00e9", "a" : 1.0 }"#),
            Some(r#"{"\u0061":10e-1,"b":"é"}"#),
        ],
        vec![Some(r#"{"a":[1,2]}"#), Some("{\"a\":[1.0,\n2e0]}")],
        vec![Some(r#"{"n":9007199254740993}"#)],
        vec![Some(r#"{"n":9007199254740992}"#)],
        vec![Some(r#"{"n":-9007199254740993}"#)],
        vec![Some(r#"{"n":1e999}"#)],
        vec![Some(r#"{"n":1e998}"#)],
        vec![Some(r#"{"a":[2,1]}"#)],
        vec![Some(r#"{"a":"1"}"#)],
        vec![Some(r#"{"a":null}"#)],
        vec![Some("{\"a\":\"e\u{301}\"}")],
    ];
    let mut n = 0;
    let mut all = BTreeSet::new();
    for group in same {
        let digests: BTreeSet<String> = group
            .iter()
            .map(|arguments| {
                n += 1;
                digest_of(n, *arguments)
            })
            .collect();
        assert_eq!(digests.len(), 1, "{group:?}");
        let digest = digests.into_iter().next().unwrap();
        assert!(digest.len() == 32 && digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')));
        assert!(all.insert(digest), "{group:?} is another call than the ones before");
    }
    assert!(all.contains(D), "of no arguments");
    // SHA-256 of `{"a":1,"b":"é"}`, by another implementation.
    assert!(all.contains("09ad9fd2fb648cb2f62141215828ea00"), "{all:?}");
}

#[test]
fn arguments_without_a_digest_are_refused_where_one_is_needed() {
    let (upstream, sidecar) = known();
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(130), "]".repeat(130));
    let none = [r#"{"a":1,"a":1}"#, r#"{"b":{"a":1,"\u0061":2}}"#, r#"{"a":"\ud800"}"#, deep.as_str()];
    for (n, arguments) in none.iter().enumerate() {
        let named = Call::of("mark").arguments(arguments).activity("job", &format!("a{n}")).id(7);
        let response = named.ask(&sidecar);
        assert_eq!(response.status(), 400, "{arguments}");
        assert_eq!((&response.json()["error"]["code"], &response.json()["id"]), (&json!(-32600), &json!(7)));
        assert_eq!(Call::of("mark").arguments(arguments).key("own").ask(&sidecar).status(), 400);
        assert_eq!(calls(&upstream).len(), n);
        let unnamed = Call::of("mark").arguments(arguments);
        assert_eq!(unnamed.ask(&sidecar).status(), 200, "no digest is needed");
        assert_eq!(calls(&upstream)[n].body, unnamed.post().body);
    }
    // As deep as it may be.
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(127), "]".repeat(127));
    assert_eq!(Call::of("mark").arguments(&deep).activity("job", "deep").ask(&sidecar).status(), 200);
}

#[test]
fn large_arguments_are_digested_too() {
    let (upstream, sidecar) = known();
    let large = |text: &str| format!(r#"{{"text":"{}{text}"}}"#, "x".repeat(1 << 20));
    for (activity, end) in [("a", "1"), ("b", "2")] {
        assert_eq!(counted(activity).arguments(&large(end)).ask(&sidecar).status(), 200);
        assert!(last_key(&upstream).unwrap().ends_with("/1"));
    }
}

#[test]
fn k_counts_the_calls_of_a_function_with_the_same_arguments_in_one_session() {
    let (upstream, sidecar) = known();
    let ask = |said: Value, arguments: &str| {
        let response = Call::of("mark").said(&said).arguments(arguments).ask(&sidecar);
        assert_eq!(response.status(), 200, "{}", response.text());
        answered_key(&response).unwrap().to_owned()
    };
    let said =
        |activity: &str| json!({ "job": "job", "session": 1, "session_start": "s", "activity": activity });
    let with = |activity: &str, member: &str, value: Value| {
        let mut said = said(activity);
        said[member] = value;
        said
    };
    let open = r#"{"status":"open"}"#;
    let first = ask(said("a1"), open);
    assert!(first.ends_with("/1"));
    assert!(ask(said("a2"), r#"{"status":"closed"}"#).ends_with("/1"), "other arguments");
    assert!(ask(said("a3"), open).ends_with("/2"), "the same arguments again");
    assert!(ask(said("a4"), r#"{ "status" : "\u006fpen" }"#).ends_with("/3"), "in another spelling too");
    assert_eq!(ask(said("a1"), open), first, "an attempt of a call already counted");
    assert!(ask(said("a3"), open).ends_with("/2"));
    assert!(ask(said("a5"), open).ends_with("/4"));
    assert!(ask(with("a6", "session", json!(2)), open).ends_with("/1"), "another session");
    assert!(ask(with("a7", "continued", json!(1)), open).ends_with("/1"), "after it continued as new");
    assert!(ask(with("a8", "job", json!("other")), open).ends_with("/1"), "another job");
    // A fresh session that starts session 1 again makes the lost one's calls again, under the same keys.
    let sent = calls(&upstream).len();
    for (activity, k) in [("b1", 1), ("b3", 2), ("b4", 3), ("b5", 4)] {
        let key = ask(with(activity, "session_start", json!("again")), open);
        assert_eq!(key, format!("{}/{k}", first.strip_suffix("/1").unwrap()));
    }
    assert_eq!(calls(&upstream).len(), sent, "all of them are done: answered from the record");
    assert!(ask(with("b6", "session_start", json!("again")), open).ends_with("/5"));
    assert_eq!(calls(&upstream).len(), sent + 1);
}

#[test]
fn k_is_counted_for_each_upstream() {
    let (one, other) = (answering(), answering());
    let toml = format!(
        "[upstreams.one]\nurl = \"{}\"\n[upstreams.other]\nurl = \"{}\"\n\
         [upstreams.one.tools.mark]\nidempotent = true\n[upstreams.other.tools.mark]\nidempotent = true\n",
        one.url(),
        other.url()
    );
    let sidecar = Sidecar::with_config(&toml);
    for (path, upstream) in [("/one", &one), ("/other", &other)] {
        sidecar.client().ask(&counted("a").post().at(path));
        assert_eq!(last_key(upstream).unwrap(), format!("job/s1/mark#{D}/1"));
    }
    assert_eq!((calls(&one).len(), calls(&other).len()), (1, 1), "each upstream has its own calls");
}

#[test]
fn the_key_of_an_activity_is_fixed_at_its_first_attempt() {
    let upstream = server_with(
        |_| listing(&[support::keyed::MARK]),
        |n, request, reply| match n % 2 {
            0 => reply.json(200, &[], &support::keyed::result(request, r#"{"content":[],"isError":true}"#)),
            _ => reply.json(200, &[], &done(request, n)),
        },
    );
    let sidecar = Sidecar::before(&upstream);
    // Not known as idempotent yet.
    counted("before").ask(&sidecar);
    assert_eq!(last_key(&upstream).unwrap(), "job/before");
    list(&sidecar);
    counted("before").ask(&sidecar);
    assert_eq!(last_key(&upstream).unwrap(), "job/before", "what was learnt since does not change it");
    counted("after").ask(&sidecar);
    assert_eq!(last_key(&upstream).unwrap(), format!("job/s1/mark#{D}/1"));
    // What is learnt later takes nothing back either.
    let unlisted = support::keyed::MARK.replace("true", "false");
    let other = server_with(
        move |_| listing(&[&unlisted]),
        |n, request, reply| reply.json(200, &[], &done(request, n)),
    );
    let folder = TempDir::new().unwrap();
    let first = with_state(&upstream, &sqlite(&folder));
    list(&first);
    counted("a").ask(&first);
    assert_eq!(last_key(&upstream).unwrap(), format!("job/s1/mark#{D}/1"));
    drop(first);
    let second = with_state(&other, &sqlite(&folder));
    list(&second);
    let response = counted("a").ask(&second);
    assert_eq!(answered_key(&response), Some(format!("job/s1/mark#{D}/1").as_str()));
    let response = counted("b").ask(&second);
    assert_eq!(answered_key(&response), Some("job/b"));
}

/// Makes 50 calls at once, spread over the sidecars, and gives the key of each activity.
fn fifty(sidecars: &[&Sidecar], prefix: &str) -> Vec<String> {
    thread::scope(|scope| {
        let calls: Vec<_> = (0..50)
            .map(|n| {
                let sidecar = sidecars[n % sidecars.len()];
                let call = counted(&format!("{prefix}{n}"));
                scope.spawn(move || {
                    let response = call.ask(sidecar);
                    assert_eq!(response.status(), 200, "{}", response.text());
                    answered_key(&response).unwrap().to_owned()
                })
            })
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

/// The ordinals of keys.
fn ks(keys: &[String]) -> BTreeSet<usize> {
    keys.iter().map(|key| key.rsplit('/').next().unwrap().parse().unwrap()).collect()
}

/// 50 calls at once, twice, over these sidecars: no ordinal twice, none left out, each activity keeps its own.
fn assert_counts(upstream: &Upstream, sidecars: &[&Sidecar]) -> Vec<String> {
    sidecars.iter().for_each(|sidecar| _ = list(sidecar));
    let keys = fifty(sidecars, "a");
    assert_eq!(ks(&keys), (1..=50).collect());
    let turned: Vec<&Sidecar> = sidecars.iter().rev().copied().collect();
    assert_eq!(fifty(&turned, "a"), keys, "the same activities, asked of the other sidecar");
    let distinct: BTreeSet<String> = calls(upstream).iter().filter_map(key).collect();
    assert_eq!(distinct, keys.iter().cloned().collect(), "what was answered is what the server got");
    keys
}

#[test]
fn fifty_calls_at_once_get_fifty_keys_that_survive_a_kill() {
    let (upstream, folder) = (answering(), TempDir::new().unwrap());
    let mut sidecar = with_state(&upstream, &sqlite(&folder));
    let keys = assert_counts(&upstream, &[&sidecar]);
    assert_eq!(calls(&upstream).len(), 50, "and the second time they were answered from the record");
    sidecar.signal("KILL");
    sidecar.wait_exit();
    let sidecar = with_state(&upstream, &sqlite(&folder));
    let again: Vec<String> =
        (0..50).map(|n| answered_key(&counted(&format!("a{n}")).ask(&sidecar)).unwrap().to_owned()).collect();
    assert_eq!(again, keys);
    assert_eq!(calls(&upstream).len(), 50, "nothing was made twice");
    assert_eq!(ks(&fifty(&[&sidecar], "b")), (51..=100).collect(), "and it counts on from there");
}

#[test]
fn two_sidecars_on_one_file_never_give_one_k_twice() {
    let (upstream, folder) = (answering(), TempDir::new().unwrap());
    let sidecars = [with_state(&upstream, &sqlite(&folder)), with_state(&upstream, &sqlite(&folder))];
    assert_counts(&upstream, &[&sidecars[0], &sidecars[1]]);
}

#[test]
fn two_sidecars_on_one_redis_never_give_one_k_twice() {
    let (upstream, redis) = (answering(), Redis::start());
    let sidecars = [with_state(&upstream, &redis.state()), with_state(&upstream, &redis.state())];
    assert_counts(&upstream, &[&sidecars[0], &sidecars[1]]);
}

#[test]
fn a_call_in_a_batch_has_no_key() {
    let (upstream, sidecar) = known();
    let call = Call::of("effect").legacy().activity("job", "a").body();
    let batch =
        Post::new(format!("[{call}]")).field("MCP-Protocol-Version", "2025-03-26").field("Oz0-Job", "j");
    let response = sidecar.client().ask(&batch.clone().field("Oz0-Activity", "a"));
    assert_eq!(answered_key(&response), None);
    let sent = upstream.requests().pop().unwrap();
    assert_eq!(sent.body, batch.body, "it passes whole");
}

#[test]
fn a_call_whose_meta_is_no_object_gets_nothing_put_into_it() {
    let (upstream, sidecar) = known();
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"charge","_meta":[]}}"#;
    let post = Post::legacy(body).field("Oz0-Job", "j").field("Oz0-Activity", "a");
    assert_eq!(sidecar.client().ask(&post).status(), 200);
    assert_eq!(calls(&upstream)[0].body, body.as_bytes());
    assert_eq!(meta(&calls(&upstream)[0]), json!([]));
}

#[test]
fn a_call_whose_content_is_signed_goes_as_it_came_and_has_a_key_only_of_its_own() {
    let (upstream, sidecar) = known();
    let sign = |call: Call| {
        let call =
            call.field("Signature", "sig1=:AAAA:").field("Signature-Input", "sig1=(\"content-digest\")");
        call.field("Content-Digest", "sha-256=:AAAA:")
    };
    // A key that cannot be put into the call would name nothing to its server.
    for (n, call) in
        [Call::of("charge").activity("job", "a"), Call::of("charge").key("own")].into_iter().enumerate()
    {
        let call = sign(call);
        let response = call.ask(&sidecar);
        let sent = calls(&upstream).pop().unwrap();
        assert_eq!(sent.body, call.post().body);
        assert_eq!(sent.head.field("content-digest"), Some("sha-256=:AAAA:"));
        assert_eq!(answered_key(&response), [None, Some("own")][n]);
        assert_eq!(text(&call.ask(&sidecar)), ["done 1", "done 2"][n]);
    }
    assert_eq!(calls(&upstream).len(), 3, "its own is its identity");
}

#[test]
fn a_digest_of_the_content_does_not_outlive_a_change_of_it() {
    let (upstream, sidecar) = known();
    let digests =
        [("Content-Digest", "sha-256=:AAAA:"), ("Repr-Digest", "sha-256=:AAAA:"), ("Content-MD5", "AAAA")];
    let with = |call: Call| digests.iter().fold(call, |call, (name, value)| call.field(name, value));
    with(Call::of("effect").activity("job", "a")).ask(&sidecar);
    with(Call::of("effect")).ask(&sidecar);
    let sent = calls(&upstream);
    for (name, value) in digests {
        assert_eq!(sent[0].head.field(name), None, "{name} is of other bytes");
        assert_eq!(sent[1].head.field(name), Some(value), "{name}");
    }
}

#[test]
fn nothing_but_a_single_call_gets_anything_put_into_it() {
    let (upstream, sidecar) = known();
    let meta = r#""_meta":{"oz0/call":{"job":"j","activity":"a"}}"#;
    for body in [
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tasks/get","params":{{"taskId":"t",{meta}}}}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tasks/result","params":{{"taskId":"t",{meta}}}}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"prompts/get","params":{{"name":"charge",{meta}}}}}"#),
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","params":{{{meta}}}}}"#),
        format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"unknown/method","params":{{"name":"charge",{meta}}}}}"#
        ),
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":1,"progress":1,{meta}}}}}"#
        ),
        format!(r#"{{"jsonrpc":"2.0","id":1,"result":{{{meta}}}}}"#),
    ] {
        let post = Post::legacy(body.clone()).field("Oz0-Job", "j").field("Oz0-Activity", "a");
        let response = sidecar.client().ask(&post);
        let sent = upstream.requests().pop().unwrap();
        assert_eq!(String::from_utf8(sent.body).unwrap(), body);
        assert_eq!(answered_key(&response), None);
        assert_eq!(sent.head.field("oz0-job"), None);
    }
}
