//! What the sidecar knows of a tool comes from the `tools/list` answers that pass, is kept in the
//! state store, is overridden by the configuration, and counts only as approved where there is an approval. It decides
//! what the sidecar adds to a call, and is never answered to a node.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{fs, path::Path};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::{
    Post, Sidecar, Upstream, Watched,
    http::Response,
    keyed::{
        CHARGE, Call, EFFECT, MARK, PAY, READ, TOOLS, answering, assert_error, calls, done, is_call, list,
        list_post, listing, meta, method, server, server_with, text,
    },
    sse,
};
use tempfile::TempDir;

/// How the sidecar sees a tool now, as the log says after a call of it.
fn class(sidecar: &Sidecar, tool: &str) -> String {
    line_of(sidecar, &Call::of(tool))["retry_class"].as_str().unwrap().to_owned()
}

/// Makes a call and gives its line.
fn line_of(sidecar: &Sidecar, call: &Call) -> Value {
    let response = call.ask(sidecar);
    line(sidecar, &response)
}

fn line(sidecar: &Sidecar, response: &Response) -> Value {
    let id = response.head.field("x-request-id").unwrap().to_owned();
    sidecar.wait_line(|line| line["request"] == id.as_str())
}

/// The digest that pins a tool's entry.
fn pin(entry: &str) -> String {
    let form = serde_json_canonicalizer::to_vec(&serde_json::from_str::<Value>(entry).unwrap()).unwrap();
    Sha256::digest(form).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn approve(file: &Path, tools: &[(&str, &str)]) {
    let tools: serde_json::Map<String, Value> =
        tools.iter().map(|(name, entry)| ((*name).to_owned(), pin(entry).into())).collect();
    fs::write(file, json!({ "upstream": "x", "tools": tools }).to_string()).unwrap();
}

fn with_state(upstream: &Upstream, state: &str) -> Sidecar {
    Sidecar::with_flags(&["--upstream", &upstream.url(), "--state", state])
}

fn sqlite(folder: &TempDir) -> String {
    format!("sqlite:{}", folder.path().join("state.db").display())
}

#[test]
fn a_listing_tells_each_tools_retry_class() {
    let key_only = r#"{"name":"key_only","inputSchema":{},"_meta":{"oz0/idempotency_key":true}}"#;
    let wordy = r#"{"name":"wordy","annotations":{"readOnlyHint":"true","idempotentHint":1},"_meta":{"oz0/idempotency_key":"yes"}}"#;
    let upstream = server_with(
        move |_| listing(&[READ, CHARGE, MARK, EFFECT, key_only, wordy]),
        |n, request, reply| reply.json(200, &[], &done(request, n)),
    );
    let sidecar = Sidecar::before(&upstream);
    assert_eq!(class(&sidecar, "read"), "unsafe", "a tool never seen in a listing");
    list(&sidecar);
    let expected = [
        ("read", "safe"),
        ("charge", "conditional"),
        ("mark", "unsafe"),
        ("effect", "unsafe"),
        ("key_only", "unsafe"),
        ("wordy", "unsafe"),
        ("absent", "unsafe"),
    ];
    for (tool, expected) in expected {
        assert_eq!(class(&sidecar, tool), expected, "{tool}");
    }
}

#[test]
fn a_listing_of_either_era_and_form_is_learnt() {
    for legacy in [false, true] {
        for event_stream in [false, true] {
            let upstream = Upstream::start(move |request, reply| {
                if is_call(request) {
                    return reply.json(200, &[], &done(request, 0));
                }
                let id = request.json()["id"].clone();
                let answer = json!({ "jsonrpc": "2.0", "id": id, "result": listing(&TOOLS) }).to_string();
                if !event_stream {
                    return reply.json(200, &[], &answer);
                }
                reply.sse(&[]);
                reply.chunk(":\n\n");
                // Told before it is over: the next call must find its tool known as soon as the listing was read.
                reply.event(&answer);
                reply.end();
            });
            let sidecar = Sidecar::before(&upstream);
            let body = r#"{"jsonrpc":"2.0","id":"l","method":"tools/list"}"#;
            let asked = if legacy { Post::legacy(body) } else { list_post("{}") };
            let client = sidecar.client();
            client.send(&asked);
            if event_stream {
                client.events(1).len()
            } else {
                client.response().body.len()
            };
            let call = if legacy { Call::of("charge").legacy() } else { Call::of("charge") };
            let line = line_of(&sidecar, &call);
            assert_eq!(line["retry_class"], "conditional", "legacy: {legacy}, event stream: {event_stream}");
        }
    }
}

#[test]
fn every_page_of_a_listing_counts() {
    let upstream = server_with(
        |params| match params["cursor"].as_str() {
            None => {
                let mut page = listing(&[READ]);
                page["nextCursor"] = "".into();
                page
            }
            Some(_) => listing(&[CHARGE]),
        },
        |n, request, reply| reply.json(200, &[], &done(request, n)),
    );
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    sidecar.client().ask(&list_post(r#"{"cursor":""}"#));
    assert_eq!(class(&sidecar, "charge"), "conditional");
    assert_eq!(class(&sidecar, "read"), "safe", "a page says nothing of what is on another");
}

#[test]
fn a_newer_listing_goes_before_an_older_one() {
    let now = Watched::new(CHARGE.to_owned());
    let shown = now.clone();
    let upstream = server_with(
        move |_| listing(&[&shown.lock()]),
        |n, request, reply| reply.json(200, &[], &done(request, n)),
    );
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    assert_eq!(class(&sidecar, "charge"), "conditional");
    now.change(|tool| *tool = EFFECT.replace("effect", "charge"));
    list(&sidecar);
    assert_eq!(class(&sidecar, "charge"), "unsafe");
}

#[test]
fn nothing_learnt_is_answered_to_a_node() {
    let upstream = answering();
    let sidecar = Sidecar::before(&upstream);
    let first = list(&sidecar);
    let second = list(&sidecar);
    let lists = upstream.requests().into_iter().filter(|r| method(r).as_deref() == Some("tools/list"));
    assert_eq!(lists.count(), 2, "each listing is the upstream's own");
    assert_eq!(first.json()["result"], listing(&TOOLS));
    assert_eq!(first.body, second.body);
}

#[test]
fn the_configuration_knows_better_than_the_listing() {
    let upstream = answering();
    let toml = format!(
        "[upstreams.mcp]\nurl = \"{}\"\n\
         [upstreams.mcp.tools.effect]\nidempotent = true\nhonours_key = true\n\
         [upstreams.mcp.tools.read]\nread_only = false\n\
         [upstreams.mcp.tools.mark]\nread_only = true\nresume = true\n\
         [upstreams.mcp.tools.charge]\nhonours_key = false\n\
         [upstreams.mcp.tools.pay]\nresume = true\n",
        upstream.url()
    );
    let sidecar = Sidecar::with_config(&toml);
    assert_eq!(class(&sidecar, "effect"), "conditional", "what it says counts before any listing");
    list(&sidecar);
    let expected = [
        ("effect", "conditional"),
        ("read", "unsafe"),
        ("mark", "safe"),
        ("charge", "unsafe"),
        ("pay", "conditional"),
    ];
    for (tool, expected) in expected {
        assert_eq!(class(&sidecar, tool), expected, "{tool}");
    }
}

#[test]
fn a_tool_that_only_the_configuration_names_counts_as_listed() {
    let upstream = server(|_, _, reply| reply.break_off());
    let toml = format!(
        "[upstreams.mcp]\nurl = \"{}\"\n[upstreams.mcp.tools.named]\nread_only = false\n",
        upstream.url()
    );
    let sidecar = Sidecar::with_config(&toml);
    for tool in ["named", "never_seen"] {
        let call = Call::of(tool).activity(tool, "a");
        assert_error(&call.ask(&sidecar), 1502, "upstream_failed", "unknown");
        let second = call.ask(&sidecar);
        let sent = calls(&upstream).iter().filter(|call| call.json()["params"]["name"] == tool).count();
        if tool == "named" {
            assert_error(&second, 1409, "outcome_unknown", "unknown");
            assert_eq!(sent, 1);
        } else {
            assert_error(&second, 1502, "upstream_failed", "unknown");
            assert_eq!(sent, 2, "there the node's judgement stands");
        }
    }
}

#[test]
fn what_was_learnt_survives_a_restart() {
    let (upstream, folder) = (answering(), TempDir::new().unwrap());
    let mut sidecar = with_state(&upstream, &sqlite(&folder));
    list(&sidecar);
    // As hard as it gets, right after the listing has passed.
    sidecar.signal("KILL");
    sidecar.wait_exit();
    let sidecar = with_state(&upstream, &sqlite(&folder));
    let many: Vec<_> = (0..8)
        .map(|n| {
            let client = sidecar.client();
            client.send(&Call::of(["read", "charge"][n % 2]).id(n).post());
            client
        })
        .collect();
    for (n, client) in many.iter().enumerate() {
        let line = line(&sidecar, &client.response());
        assert_eq!(line["retry_class"], ["safe", "conditional"][n % 2], "of the very first calls too");
    }
}

#[test]
fn sidecars_on_one_store_share_what_they_learn() {
    let (now, folder) = (Watched::new(CHARGE.to_owned()), TempDir::new().unwrap());
    let shown = now.clone();
    let upstream = server_with(
        move |_| listing(&[&shown.lock()]),
        |n, request, reply| reply.json(200, &[], &done(request, n)),
    );
    let (one, other) = (with_state(&upstream, &sqlite(&folder)), with_state(&upstream, &sqlite(&folder)));
    list(&one);
    assert_eq!(class(&other, "charge"), "conditional", "the other has seen no listing");
    now.change(|tool| *tool = EFFECT.replace("effect", "charge"));
    list(&one);
    // What it knew it may go by for some seconds.
    support::until("the other learns of the change", || class(&other, "charge") == "unsafe");
}

fn approving(upstream: &Upstream, folder: &TempDir, state: &str) -> Sidecar {
    let file = folder.path().join("approved.json");
    Sidecar::with_config(&format!(
        "state = \"{state}\"\n[upstreams.mcp]\nurl = \"{}\"\napproved = \"{}\"\n",
        upstream.url(),
        file.display()
    ))
}

#[test]
fn hints_count_only_for_tools_as_they_were_approved() {
    let folder = TempDir::new().unwrap();
    // `charge` stands there in another spelling of the same entry, `pay` with another entry, `read` not at all.
    let spelled = CHARGE.replace("\"name\":\"charge\",", "").replace('}', "} ").trim_end().to_owned();
    let spelled = format!("{},\"name\":\"ch\\u0061rge\"}}", spelled.strip_suffix('}').unwrap());
    let file = folder.path().join("approved.json");
    approve(&file, &[("charge", CHARGE), ("pay", &PAY.replace("object", "array")), ("effect", EFFECT)]);
    let upstream = server_with(
        move |_| listing(&[READ, &spelled, PAY, EFFECT]),
        |n, request, reply| reply.json(200, &[], &done(request, n)),
    );
    let sidecar = approving(&upstream, &folder, "memory:");
    list(&sidecar);
    let expected = [
        ("charge", "conditional", Value::Null),
        ("pay", "unsafe", json!(true)),
        ("read", "unsafe", json!(true)),
        ("effect", "unsafe", Value::Null),
        ("unheard_of", "unsafe", json!(true)),
    ];
    for (tool, class, changed) in expected {
        let line = line_of(&sidecar, &Call::of(tool));
        assert_eq!((&line["retry_class"], &line["listing_changed"]), (&json!(class), &changed), "{tool}");
    }
}

#[test]
fn without_an_approval_every_tool_counts_as_listed() {
    let upstream = answering();
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    for tool in ["read", "unheard_of"] {
        assert_eq!(line_of(&sidecar, &Call::of(tool))["listing_changed"], Value::Null);
    }
}

#[test]
fn a_second_attempt_or_a_replay_of_a_changed_tool_is_refused() {
    let folder = TempDir::new().unwrap();
    approve(&folder.path().join("approved.json"), &[("charge", CHARGE), ("read", READ)]);
    let now = Watched::new([CHARGE, READ].map(str::to_owned));
    let shown = now.clone();
    let upstream = server_with(
        move |_| listing(&shown.lock().each_ref().map(String::as_str)),
        |n, request, reply| match n {
            0 => reply.break_off(),
            _ => reply.json(200, &[], &done(request, n)),
        },
    );
    let sidecar = approving(&upstream, &folder, "memory:");
    list(&sidecar);
    let lost = Call::of("charge").activity("job", "lost");
    assert_error(&lost.ask(&sidecar), 1502, "upstream_failed", "unknown");
    let committed = Call::of("charge").activity("job", "committed");
    assert_eq!(text(&committed.ask(&sidecar)), "done 1");
    let reading = Call::of("read").activity("job", "reading");
    assert_eq!(text(&reading.ask(&sidecar)), "done 2");

    now.change(|tools| tools.iter_mut().for_each(|tool| *tool = tool.replace("object", "array")));
    list(&sidecar);
    let said = |attempt: u64| {
        Call::of("charge").said(json!({ "job": "job", "activity": "other", "attempt": attempt }))
    };
    let unnamed = Call::of("charge").said(json!({ "activity": "no-job", "attempt": 2 }));
    let with_header = Call::of("charge").field("Idempotency-Key", "\"x\"").field("Oz0-Attempt", "2");
    let with_header = with_header.field("Oz0-Activity", "y");
    for call in [&lost, &committed, &reading, &said(2), &unnamed, &with_header] {
        let response = call.ask(&sidecar);
        assert_error(&response, 1403, "policy", "not_sent");
        let line = line(&sidecar, &response);
        assert_eq!((&line["listing_changed"], &line["outcome"]), (&json!(true), &json!("refused")));
        assert_eq!(line["reason"], "policy");
    }
    assert_eq!(calls(&upstream).len(), 3, "nothing was sent");
    // A first attempt is sent, as a call of which nothing is known.
    let first = said(1).ask(&sidecar);
    assert_eq!(text(&first), "done 3");
    assert_eq!(line(&sidecar, &first)["retry_class"], "unsafe");
    assert_eq!(meta(&calls(&upstream)[3])["progressToken"], Value::Null);

    // Approved as it is now, it is what it was.
    let changed = now.lock().clone();
    approve(&folder.path().join("approved.json"), &[("charge", &changed[0]), ("read", &changed[1])]);
    sidecar.signal("HUP");
    sidecar.wait_stderr("configuration reloaded");
    assert_eq!(text(&committed.ask(&sidecar)), "done 1", "replayed");
    assert_eq!(text(&lost.ask(&sidecar)), "done 4", "made again");
    assert_eq!(calls(&upstream).len(), 5);
}

#[test]
fn a_leg_of_a_changed_tools_first_attempt_is_no_second_one() {
    let folder = TempDir::new().unwrap();
    approve(&folder.path().join("approved.json"), &[]);
    let upstream = server(|n, request, reply| match n {
        0 => {
            let asks = r#"{"resultType":"input_required","inputRequests":{},"requestState":"s"}"#;
            reply.json(200, &[], &support::keyed::result(request, asks));
        }
        _ => reply.json(200, &[], &done(request, n)),
    });
    let sidecar = approving(&upstream, &folder, "memory:");
    list(&sidecar);
    let call = Call::of("effect").activity("job", "asks");
    assert_eq!(call.ask(&sidecar).json()["result"]["resultType"], "input_required");
    let leg = call.id(2).param("requestState", "\"s\"").param("inputResponses", "{}");
    assert_eq!(text(&leg.ask(&sidecar)), "done 1");
    assert_error(&leg.ask(&sidecar), 1403, "policy", "not_sent");
    assert_eq!(calls(&upstream).len(), 2);
}

#[test]
fn a_listing_that_passes_as_events_is_not_changed() {
    let answer = json!({ "jsonrpc": "2.0", "id": 0, "result": listing(&TOOLS) }).to_string();
    let upstream = Upstream::sse(std::slice::from_ref(&answer));
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&list_post("{}"));
    assert_eq!(sse::read(&response.body).events[0].data, answer);
}

#[test]
fn tools_are_known_of_their_upstream_alone() {
    let (one, other) = (answering(), answering());
    let toml =
        format!("[upstreams.one]\nurl = \"{}\"\n[upstreams.other]\nurl = \"{}\"\n", one.url(), other.url());
    let sidecar = Sidecar::with_config(&toml);
    sidecar.client().ask(&list_post("{}").at("/one"));
    for (path, class) in [("/one", "conditional"), ("/other", "unsafe")] {
        let response = sidecar.client().ask(&Call::of("charge").post().at(path));
        assert_eq!(line(&sidecar, &response)["retry_class"], class, "{path}");
    }
}

/// A page of a listing, as the answer to this request.
fn page(id: &Value, tool: &str) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "result": listing(&[tool]) })
}

#[test]
fn the_listings_in_a_legacy_batch_are_learnt_and_the_batch_passes_as_it_is() {
    for form in ["array", "events", "event"] {
        let upstream = Upstream::start(move |request, reply| {
            let asked = request.json();
            let Some(asked) = asked.as_array() else { return reply.json(200, &[], &done(request, 0)) };
            let answers: Vec<Value> = asked
                .iter()
                .filter(|one| one["id"].is_i64())
                .map(|one| match one["params"]["cursor"].as_str() {
                    Some("read") => page(&one["id"], READ),
                    Some(_) => page(&one["id"], CHARGE),
                    // Not asked for a listing.
                    None => page(&one["id"], PAY),
                })
                .collect();
            let all = Value::from(answers.clone()).to_string();
            match form {
                "array" => reply.json(200, &[], &all),
                "event" => {
                    reply.sse(&[]);
                    reply.event(&all);
                    reply.end();
                }
                _ => {
                    reply.sse(&[]);
                    answers.iter().for_each(|answer| reply.event(&answer.to_string()));
                    reply.end();
                }
            }
        });
        let sidecar = Sidecar::before(&upstream);
        let list = |id: u64, cursor: &str| json!({ "jsonrpc": "2.0", "id": id, "method": "tools/list", "params": { "cursor": cursor } });
        let batch = json!([
            list(1, "read"),
            { "jsonrpc": "2.0", "method": "notifications/initialized" },
            { "jsonrpc": "2.0", "id": 2, "method": "resources/list" },
            list(3, "charge"),
        ]);
        let body = batch.to_string();
        let response =
            sidecar.client().ask(&Post::legacy(body.clone()).field("MCP-Protocol-Version", "2025-03-26"));
        assert_eq!(response.status(), 200);
        assert_eq!(upstream.requests()[0].body, body.as_bytes(), "nothing is put into it");
        let told = match form {
            "array" => response.text(),
            _ => sse::read(&response.body).events.iter().map(|event| event.data.clone()).collect(),
        };
        for (id, tool) in [(1, READ), (2, PAY), (3, CHARGE)] {
            assert!(told.contains(&page(&json!(id), tool).to_string()), "{form}: {told}");
        }
        for (tool, class_) in [("read", "safe"), ("charge", "conditional"), ("pay", "unsafe")] {
            assert_eq!(class(&sidecar, tool), class_, "{form}: {tool}");
        }
    }
}

#[test]
fn a_listing_that_comes_on_a_resumed_get_is_learnt() {
    let upstream = Upstream::start(|request, reply| {
        if is_call(request) {
            return reply.json(200, &[], &done(request, 0));
        }
        reply.sse(&[]);
        if request.method() == "GET" {
            // The second was not asked for by anyone.
            reply.event(&page(&json!("l"), CHARGE).to_string());
            reply.event(&page(&json!("other"), PAY).to_string());
            reply.event(&Value::from(vec![page(&json!(3), READ)]).to_string());
            return reply.end();
        }
        reply.chunk("id: e1\ndata:\n\n");
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let list = r#"{"jsonrpc":"2.0","id":"l","method":"tools/list"}"#;
    let batch =
        r#"[{"jsonrpc":"2.0","id":3,"method":"tools/list"},{"jsonrpc":"2.0","id":4,"method":"ping"}]"#;
    for body in [list, batch] {
        sidecar.client().ask(&Post::legacy(body).field("Authorization", "Bearer old"));
    }
    assert_eq!(class(&sidecar, "charge"), "unsafe", "nothing was listed yet");
    // Its credential was rotated meanwhile: it is the same session.
    let get = Post::get().field("Last-Event-ID", "e1").field("Authorization", "Bearer new");
    let other = sidecar.client().ask(&get.clone().field("Mcp-Session-Id", "sess-B"));
    assert_eq!(sse::read(&other.body).events.len(), 3);
    assert_eq!(class(&sidecar, "charge"), "unsafe", "another session's");
    let resumed = sidecar.client().ask(&get);
    assert_eq!(sse::read(&resumed.body).events[0].json(), page(&json!("l"), CHARGE), "relayed as it came");
    for (tool, class_) in [("charge", "conditional"), ("read", "safe"), ("pay", "unsafe")] {
        assert_eq!(class(&sidecar, tool), class_, "{tool}");
    }
}

#[test]
fn a_listing_behind_a_byte_order_mark_is_learnt() {
    let upstream = Upstream::start(|request, reply| match method(request).as_deref() {
        Some("tools/list") => {
            reply.json(200, &[], &format!("\u{feff}{}", page(&request.json()["id"], CHARGE)));
        }
        _ => reply.json(200, &[], &done(request, 0)),
    });
    let sidecar = Sidecar::before(&upstream);
    list(&sidecar);
    assert_eq!(class(&sidecar, "charge"), "conditional");
}
