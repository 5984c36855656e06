//! Bodies pass in both directions exactly as they came. The only splices on the way in are the
//! sidecar's own member, cut out, and a trace context that the node sent as a header, put in.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use serde_json::Value;
use support::{
    Gate, Post, Request, Sidecar, Upstream,
    mcp::{MODERN, call, event, modern_call, progress, result},
    sse,
};

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

/// Answers what has an id with a result under that id's own characters, the rest with 202.
fn echoing() -> Upstream {
    Upstream::start(|request, reply| {
        let text = String::from_utf8_lossy(&request.body).into_owned();
        match serde_json::from_str::<Value>(&text).ok().and_then(|json| json.get("id").cloned()) {
            None => reply.head(202, &[("Content-Length", "0")]),
            Some(Value::Null) => reply.json(400, &[], r#"{"error":{"code":-32600}}"#),
            Some(_) => {
                let (_, rest) = text.split_once("\"id\":").unwrap();
                let id = &rest[..rest.find([',', '}']).unwrap()];
                reply.json(200, &[], &result(id));
            }
        }
    })
}

fn params(params: &str) -> Post {
    Post::legacy(format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{params}}}"#))
}

fn text(request: &Request) -> String {
    String::from_utf8(request.body.clone()).unwrap()
}

#[test]
fn what_a_node_posts_reaches_the_upstream_byte_for_byte() {
    let bodies = [
        // Odd white space, a repeated key, numbers and escapes in every spelling.
        " { \"jsonrpc\" : \"2.0\" ,\r\n\t\"id\":1, \"method\":\"tools/call\",\"params\":{\"name\":\"slow\" , \"arguments\": { \"z\":1 ,\"a\":2, \"z\":3,\"m\":{\"b\":0,\"a\":0} } } }\n",
        r#"{"params":{"arguments":{"n":[1.0,1e2,-0,0.1e-7,9223372036854775808,123456789012345678901234567890,1E400]},"name":"slow"},"method":"tools/call","id":1,"jsonrpc":"2.0"}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","arguments":{"a":"\u00e9é","b":"\/","c":"\ud83d\ude00","d":"\ud800","e":"\u0000","f":"\u2028"}}}"#,
        // Unknown members, at every level.
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","x":[{}],"params":{"name":"slow","y":null,"_meta":{"com.example/z":{"_meta":1},"progressToken":"t","oz0/else":[1]}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","_meta":7}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[1]}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call"}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{ },"clientInfo":{"version":"1","name":"n"}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"x/unknown","params":{"oz0/call":1,"b":2,"a":1}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"cursor":"\u0063","_meta":{"x":1.0}}}"#,
        r#"{"method":"notifications/x","jsonrpc":"2.0","params":{"b":[ ],"a":1e5}}"#,
        r#"{"jsonrpc":"2.0","id":"p1","result":{"b":1,"a":{ }}}"#,
        r#"{"jsonrpc":"2.0","id":"p1","error":{"message":"no","code":-1.0e0}}"#,
    ];
    let upstream = echoing();
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    for (number, body) in bodies.iter().enumerate() {
        assert!(client.ask(&Post::legacy(*body)).status() < 300, "{body}");
        assert_eq!(text(&upstream.wait_request(number)), *body);
    }
    assert_eq!(upstream.count(), bodies.len());
}

#[test]
fn a_batch_passes_whole_with_nothing_put_in_or_cut_out() {
    let one = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","_meta":{"oz0/call":{"job":"j","activity":"a"}}}}"#;
    let list = r#"{"jsonrpc":"2.0","id":"2","method":"tools/list"}"#;
    let body = format!(" [ {one} ,{list}\n, {{\"jsonrpc\":\"2.0\",\"method\":\"n/x\"}}]");
    let answer = "[ {\"jsonrpc\":\"2.0\",\"id\":\"2\",\"result\":{\"b\":1.0,\"a\":[ ]}} ,{\"jsonrpc\":\"2.0\",\"id\":1,\"error\":{\"code\":1,\"message\":\"\\u00e9\"}}]\n";
    let upstream = Upstream::json(answer);
    let sidecar = Sidecar::before(&upstream);
    let post =
        Post::legacy(body.as_str()).field("MCP-Protocol-Version", "2025-03-26").field("traceparent", PARENT);
    let response = sidecar.client().ask(&post);
    assert_eq!((response.status(), response.text().as_str()), (200, answer));
    assert_eq!(text(&upstream.wait_request(0)), body);
}

#[test]
fn what_an_upstream_answers_reaches_the_node_byte_for_byte() {
    const ANSWERS: [&str; 7] = [
        "{\n\t\"result\": {\n\t\t\"z\": 1.0,\n\t\t\"a\": [ 1e2, 18446744073709551616 ],\r\n\t\t\"m\": \"\\u00e9\\/\\ud800\"\n\t},\n\t\"id\": 1,\n\t\"jsonrpc\": \"2.0\"\n}\n",
        r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"content":[],"resultType":"odd","ttlMs":1,"x-mcp-header":{}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":7}"#,
        r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32042,"message":"m","data":{"oz0/retryable":true}}}"#,
        r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"m"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/mine":1,"io.modelcontextprotocol/serverInfo":{"name":"s"}}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":null,"error":{"code":1.0,"message":""}}"#,
    ];
    let upstream = Upstream::start(|request, reply| {
        let answer = ANSWERS[request.number / 3 % ANSWERS.len()];
        if request.number.is_multiple_of(3) {
            return reply.json(200, &[("Content-Type", "application/json; charset=utf-8")], answer);
        }
        if request.number % 3 == 1 {
            return reply.json(418, &[("Content-Type", "application/problem+json")], answer);
        }
        reply.sse(&[]);
        reply.chunk(event(answer.replace(['\n', '\r'], " ")));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let list = Post::legacy(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#);
    for post in [call(1), modern_call(1), list] {
        for answer in ANSWERS {
            let json = sidecar.client().ask(&post);
            assert_eq!((json.status(), json.text().as_str()), (200, answer));
            assert_eq!(json.head.all("content-type"), ["application/json; charset=utf-8"]);
            assert_eq!(json.head.all("content-length"), [answer.len().to_string().as_str()]);
            let refused = sidecar.client().ask(&post);
            assert_eq!((refused.status(), refused.text().as_str()), (418, answer));
            assert_eq!(refused.head.all("content-type"), ["application/problem+json"]);
            // A stream whose only message answers nobody ends with the sidecar's own word, after it.
            let stream = sidecar.client().ask(&post).text();
            assert!(stream.starts_with(&event(answer.replace(['\n', '\r'], " "))), "{stream}");
        }
    }
}

#[test]
fn the_sidecars_own_member_is_cut_out_and_nothing_else_moves() {
    let upstream = echoing();
    let sidecar = Sidecar::before(&upstream);
    // Arguments that have a digest: what has none is refused where a digest is needed.
    let arguments = r#""arguments": {"z":1.0 ,"a":"\u00e9","y":[ ]} ,"name":"slow""#;
    let own = |n| format!(r#""oz0/call":{{"job":"j","activity":"a{n}","attempt":1}}"#);
    let escaped = r#""\u006fz0\/call":{"job":"j","activity":"a2","attempt":1}"#;
    let cases = [
        (format!(r#"{{"_meta":{{{}}},{arguments}}}"#, own(0)), format!(r#"{{"_meta":{{}},{arguments}}}"#)),
        (
            format!(r#"{{{arguments},"_meta":{{"progressToken":0, {} ,"b":1.0}}}}"#, own(1)),
            format!(r#"{{{arguments},"_meta":{{"progressToken":0, "b":1.0}}}}"#),
        ),
        (
            format!(r#"{{{arguments},"_meta":{{"b":1.0,{escaped}}} }}"#),
            format!(r#"{{{arguments},"_meta":{{"b":1.0}} }}"#),
        ),
    ];
    for (number, (sent, wanted)) in cases.iter().enumerate() {
        // What the upstream gets of `_meta` gains the key; it never loses or moves another member.
        sidecar.client().ask(&params(sent));
        let got = text(&upstream.wait_request(number));
        let whole = String::from_utf8(params(wanted).body).unwrap();
        let key = format!(r#""oz0/idempotency_key":"j/a{number}""#);
        assert!(got.contains(&key), "{got}");
        let without_key = got.replace(&format!("{key},"), "").replace(&key, "");
        assert_eq!(without_key, whole);
    }
}

#[test]
fn ids_of_every_kind_come_back_as_they_were_written() {
    let upstream = echoing();
    let sidecar = Sidecar::before(&upstream);
    for id in
        ["0", "-1", "1", "\"1\"", "\"0\"", "\"\"", "\"\\u00fc/\\\"x\"", "9007199254740993", "1.0", "1e2"]
    {
        let response = sidecar.client().ask(&call(id).without("X"));
        assert_eq!((response.status(), response.text()), (200, result(id)));
    }
}

#[test]
fn a_notification_gains_no_id_and_a_null_id_is_the_upstreams_to_judge() {
    let upstream = echoing();
    let sidecar = Sidecar::before(&upstream);
    let note = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
    let accepted = sidecar.client().ask(&Post::legacy(note));
    assert_eq!((accepted.status(), accepted.body.len()), (202, 0));
    assert_eq!(text(&upstream.wait_request(0)), note);
    let null = r#"{"jsonrpc":"2.0","id":null,"method":"tools/call","params":{"name":"slow"}}"#;
    let refused = sidecar.client().ask(&Post::legacy(null));
    assert_eq!((refused.status(), refused.text().as_str()), (400, r#"{"error":{"code":-32600}}"#));
    assert_eq!(text(&upstream.wait_request(1)), null);
}

#[test]
fn escapes_and_lone_surrogates_survive_a_splice_and_the_log() {
    let arguments =
        r#"{"a":"\u00e9é","b":"\/","c":"\ud83d\ude00","d":"\ud800","e":"\u0000","f":"\u2028","\ud800":1}"#;
    let upstream = Upstream::start(move |request, reply| {
        let body = String::from_utf8(request.body.clone()).unwrap();
        let (_, rest) = body.split_once("\"arguments\":").unwrap();
        let (echo, _) = rest.split_once(",\"name\"").unwrap();
        let answer = format!(
            r#"{{"jsonrpc":"2.0","id":1,"result":{{"content":[],"structuredContent":{echo},"_meta":{{"oz0/refetch":1}}}}}}"#
        );
        reply.json(200, &[], &answer);
    });
    let sidecar = Sidecar::before(&upstream);
    let post =
        params(&format!(r#"{{"arguments":{arguments},"name":"\ud800"}}"#)).field("traceparent", PARENT);
    let response = sidecar.client().ask(&post);
    let wanted = format!(
        r#"{{"jsonrpc":"2.0","id":1,"result":{{"content":[],"structuredContent":{arguments},"_meta":{{}}}}}}"#
    );
    assert_eq!(response.text(), wanted);
    assert!(text(&upstream.wait_request(0)).contains(arguments));
    assert_eq!(sidecar.wait_lines(1)[0]["outcome"], "ok");
}

#[test]
fn progress_tokens_keep_their_type_and_none_is_invented() {
    let upstream = Upstream::start(|request, reply| {
        let body = String::from_utf8(request.body.clone()).unwrap();
        let token = body.split_once("\"progressToken\":").map(|(_, rest)| {
            let end = rest.find(['}']).unwrap();
            rest[..end].to_owned()
        });
        reply.sse(&[]);
        for value in 1..=2 {
            reply.event(&progress(token.as_deref().unwrap_or("\"stranger\""), value));
        }
        reply.event(&result(7));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let with = |token: &str| params(&format!(r#"{{"name":"slow","_meta":{{"progressToken":{token}}}}}"#));
    let all = |token: &str| [progress(token, 1), progress(token, 2)].map(event).concat();
    for token in ["1", "\"1\"", "0", "\"a\\\"b\"", "9007199254740993", "\"\""] {
        let response = sidecar.client().ask(&with(token)).text();
        assert!(response.starts_with(&all(token)), "{token}: {response}");
    }
    let none = params(r#"{"name":"slow"}"#);
    let response = sidecar.client().ask(&none).text();
    assert!(response.starts_with(&all("\"stranger\"")), "a legacy stream may carry other tokens: {response}");
    assert_eq!(upstream.wait_request(6).body, none.body);
}

#[test]
fn calls_at_once_with_tokens_that_differ_in_type_are_never_mixed_up() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |request, reply| {
        let id = request.json()["id"].to_string();
        reply.sse(&[]);
        reply.event(&progress(&id, 1));
        pass.pass();
        reply.event(&progress(&id, 2));
        reply.event(&result(&id));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let clients = ["1", "\"1\""].map(|id| {
        let client = sidecar.client();
        client.send(&call(id));
        client.events(1);
        (id, client)
    });
    gate.open();
    gate.open();
    for (id, client) in clients {
        let wanted = [progress(id, 1), progress(id, 2), result(id)].map(event).concat();
        assert_eq!(client.response().text(), wanted);
    }
}

#[test]
fn an_answer_goes_to_its_own_post_and_to_no_other_stream() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |request, reply| match (request.method(), request.number) {
        ("GET", number) => {
            reply.sse(&[]);
            if number == 0 {
                pass.pass();
                let ask = r#"{"jsonrpc":"2.0","id":90,"method":"elicitation/create","params":{}}"#;
                reply.event(ask);
            }
            reply.hang();
        }
        (_, 2) => {
            reply.sse(&[]);
            reply.event(&progress(1, 1));
            reply.event(&progress(1, 2));
            reply.event(&result(1));
            reply.end();
        }
        (_, 3) => reply.json(200, &[], &result(1)),
        (_, 4) => reply.json(429, &[("Retry-After", "1")], "{}"),
        _ => reply.break_off(),
    });
    let sidecar = Sidecar::before(&upstream);
    let (mine, other) = (sidecar.client(), sidecar.client());
    mine.send(&Post::get());
    mine.head();
    other.send(&Post::get().field("Mcp-Session-Id", "sess-B"));
    other.head();
    let answered: Vec<_> = (0..4).map(|_| sidecar.client().ask(&call(1)).text()).collect();
    assert_eq!(answered[0], [progress(1, 1), progress(1, 2), result(1)].map(event).concat());
    assert_eq!(answered[1], result(1));
    assert!(answered[2].contains("oz0/retryable") && answered[3].contains("upstream_failed"));
    gate.open();
    let events = mine.events(1);
    assert_eq!((events.len(), events[0].json()["id"].clone()), (1, 90.into()));
    assert_eq!(sse::read(&other.body(|_| true)).events, []);
}

#[test]
fn a_nodes_answers_to_the_servers_requests_get_through() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |request, reply| match request.method() {
        "GET" => {
            reply.sse(&[]);
            reply.event(r#"{"jsonrpc":"2.0","id":"p1","method":"ping"}"#);
            reply.hang();
        }
        _ if request.json().get("method").is_some() => {
            reply.sse(&[]);
            reply.event(&progress(1, 1));
            pass.pass();
            reply.event(&result(1));
            reply.end();
        }
        _ => reply.head(202, &[("Content-Length", "0")]),
    });
    let sidecar = Sidecar::before(&upstream);
    let listening = sidecar.client();
    listening.send(&Post::get());
    assert_eq!(listening.events(1)[0].json()["method"], "ping");
    let calling = sidecar.client();
    calling.send(&call(1));
    calling.events(1);
    // Also under the id of the node's own open call, which is another space of ids.
    let answers = [
        r#"{"jsonrpc":"2.0","id":"p1","result":{ }}"#,
        r#"{"jsonrpc":"2.0", "id":"p1","error":{"code":-32601,"message":"no"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
    ];
    for (number, answer) in answers.iter().enumerate() {
        let response = sidecar.client().ask(&Post::legacy(*answer));
        assert_eq!((response.status(), response.body.len()), (202, 0));
        assert_eq!(text(&upstream.wait_request(2 + number)), *answer);
    }
    assert_eq!(upstream.count(), 5, "the sidecar answers no ping itself");
    gate.open();
    assert_eq!(calling.response().text(), event(progress(1, 1)) + &event(result(1)));
}

fn meta_of(request: &Request) -> Value {
    request.json()["params"]["_meta"].clone()
}

#[test]
fn the_trace_of_a_header_goes_on_unchanged_and_into_a_call_that_has_none() {
    let upstream = echoing();
    let sidecar = Sidecar::before(&upstream);
    let none = [
        params(r#"{"name":"slow","arguments":{"b":1.0,"a":2}}"#),
        params(r#"{"name":"slow","arguments":{"b":1.0,"a":2},"_meta":{"progressToken":1}}"#),
        params(r#"{"name":"slow","_meta":{ },"arguments":{"b":1.0,"a":2}}"#),
    ];
    for (number, post) in none.iter().enumerate() {
        let post = post.clone().field("traceparent", PARENT).field("tracestate", "a=1,b=2");
        sidecar.client().ask(&post);
        let request = upstream.wait_request(number);
        assert_eq!(request.head.all("traceparent"), [PARENT]);
        assert_eq!(request.head.all("tracestate"), ["a=1,b=2"]);
        assert_eq!(meta_of(&request)["traceparent"], PARENT);
        assert!(text(&request).contains(r#""arguments":{"b":1.0,"a":2}"#));
        let mut json = request.json();
        let meta = json["params"]["_meta"].as_object_mut().unwrap();
        meta.remove("traceparent");
        if number == 0 {
            json["params"].as_object_mut().unwrap().remove("_meta");
        }
        assert_eq!(json, serde_json::from_slice::<Value>(&post.body).unwrap());
    }
    assert!(sidecar.wait_lines(3).iter().all(|line| line["trace"] == TRACE));
}

#[test]
fn a_trace_in_a_calls_meta_is_never_changed() {
    let upstream = echoing();
    let sidecar = Sidecar::before(&upstream);
    let other = PARENT.replace("0af7", "1111");
    let own = params(&format!(r#"{{"name":"slow","_meta":{{"traceparent" : "{other}"}}}}"#));
    let both = own.clone().field("traceparent", PARENT);
    for (number, (post, header)) in [(own, other.as_str()), (both, PARENT)].into_iter().enumerate() {
        sidecar.client().ask(&post);
        let request = upstream.wait_request(number);
        assert_eq!(request.body, post.body);
        assert_eq!(request.head.all("traceparent"), [header]);
    }
    let traces: Vec<_> = sidecar.wait_lines(2).into_iter().map(|line| line["trace"].clone()).collect();
    assert_eq!(traces, [&TRACE.replace("0af7", "1111"), TRACE]);
}

#[test]
fn a_trace_is_made_where_there_is_none_and_the_body_stays() {
    let upstream = echoing();
    let sidecar = Sidecar::before(&upstream);
    let list = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    let mut traces = Vec::new();
    for (number, post) in [call(1), modern_call(1), Post::legacy(list), Post::delete()].iter().enumerate() {
        sidecar.client().ask(post);
        let request = upstream.wait_request(number);
        assert_eq!(request.body, post.body);
        let parent = request.head.field("traceparent").unwrap().to_owned();
        let parts: Vec<_> = parent.split('-').map(str::len).collect();
        assert_eq!((parts, &parent[..2]), (vec![2, 32, 16, 2], "00"));
        assert!(
            parent.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit() || byte.is_ascii_lowercase())
        );
        assert_eq!(sidecar.wait_lines(number + 1)[number]["trace"], parent[3..35]);
        traces.push(parent);
    }
    traces.sort();
    traces.dedup();
    assert_eq!(traces.len(), 4);
}

#[test]
fn only_a_call_gets_a_trace_put_in_and_only_a_valid_one() {
    let upstream = echoing();
    let sidecar = Sidecar::before(&upstream);
    let list = Post::legacy(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"_meta":{}}}"#);
    let note = Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/x","params":{"_meta":{}}}"#);
    let zeros = "00-00000000000000000000000000000000-b7ad6b7169203331-01";
    let cases = [(list, PARENT), (note, PARENT), (call(1), "00-junk"), (call(1), zeros), (call(1), "")];
    for (number, (post, parent)) in cases.into_iter().enumerate() {
        let post = post.field("traceparent", parent);
        sidecar.client().ask(&post);
        let request = upstream.wait_request(number);
        assert_eq!((&request.body, request.head.all("traceparent")), (&post.body, vec![parent]));
    }
}

#[test]
fn modern_calls_pass_with_their_metadata_as_it_was() {
    let upstream = echoing();
    let sidecar = Sidecar::before(&upstream);
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"_meta":{{"io.modelcontextprotocol/protocolVersion":"{MODERN}","io.modelcontextprotocol/clientCapabilities":{{}} ,"x":1.0}},"arguments":{{}},"name":"slow","inputResponses":{{ }},"requestState":"\u0041"}}}}"#
    );
    sidecar.client().ask(&Post::modern("tools/call", Some("slow"), body.as_str()));
    assert_eq!(text(&upstream.wait_request(0)), body);
}
