mod again;
mod lasting;

use std::net::Ipv4Addr;

use http::HeaderValue;

use super::*;
use crate::{
    command::demo::client::{Answer, Client, LEGACY, MODERN},
    headers::{METHOD, NAME, SESSION_ID},
};

/// Long enough for any machine to see that the work goes on; no test waits for it.
const LONG: u64 = 3_600_000;

async fn start() -> (Client, Handle) {
    let (address, handle) = Server::start((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
    (Client::new(address, "/mcp"), handle)
}

async fn post(client: &Client, headers: &[(http::HeaderName, &str)], body: Value) -> (StatusCode, Value) {
    let headers =
        headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap())).collect();
    let answer = client.exchange(Method::POST, headers, body.to_string()).await.unwrap();
    let status = answer.status;
    (status, serde_json::from_slice(&answer.whole().await.unwrap()).unwrap_or_default())
}

/// Reads a progress stream to its end: the progress values, and the response.
async fn progress(mut answer: Answer) -> (Vec<u64>, Value) {
    let mut values = Vec::new();
    while let Some(message) = answer.message().await.unwrap() {
        if message["method"] != "notifications/progress" {
            return (values, message);
        }
        values.push(message["params"]["progress"].as_u64().unwrap());
    }
    panic!("no response after {values:?}");
}

#[tokio::test]
async fn a_modern_client_discovers_lists_and_calls() {
    let (client, handle) = start().await;
    let discovered = client.request("d".into(), "server/discover", json!({})).await.unwrap();
    let discovered = discovered.response().await.unwrap();
    assert_eq!(discovered["id"], "d");
    assert_eq!(discovered["result"]["supportedVersions"], json!([MODERN]));

    let listed = client.request(1.into(), "tools/list", json!({})).await.unwrap().response().await.unwrap();
    let tools = listed["result"]["tools"].as_array().unwrap();
    let names: Vec<_> = tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    let reading = ["echo", "add", "slow", "busy", "flood", "silent"];
    let ordering = ["charge", "reserve_inventory", "charge_unkeyed", "reconcile"];
    assert_eq!(names, [&reading[..], &ordering, &["search", "export"]].concat());
    let changing = tools.iter().filter(|tool| tool["annotations"]["readOnlyHint"] == false);
    let changing: Vec<_> = changing.map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(changing, ordering[..3]);
    assert_eq!(listed["result"]["resultType"], "complete");
    assert_eq!(listed["result"]["cacheScope"], "public");

    let answer = client.call(2, "add", json!({ "a": 2, "b": 40 }), false).await.unwrap();
    assert_eq!((answer.status, answer.content_type()), (StatusCode::OK, "application/json"));
    let called = answer.response().await.unwrap();
    assert_eq!(called["result"]["content"][0]["text"], "42");
    assert_eq!(called["result"]["structuredContent"]["sum"], 42);
    assert_eq!(called["result"]["resultType"], "complete");
    assert_eq!(handle.stats().tool("add"), Calls { started: 1, finished: 1, ..Calls::default() });
}

#[tokio::test]
async fn a_legacy_client_initializes_lists_calls_and_deletes() {
    let (client, handle) = start().await;
    let session = client.initialize().await.unwrap();
    assert_eq!(handle.stats().sessions, 1);

    let listed = session.request(1.into(), "tools/list", json!({})).await.unwrap().response().await.unwrap();
    assert_eq!(listed["result"]["tools"].as_array().unwrap().len(), 12);
    let called = session.call(2, "echo", json!({ "text": "hi" }), false).await.unwrap();
    let called = called.response().await.unwrap();
    assert_eq!(called["result"]["content"][0]["text"], "hi");
    assert_eq!(called["result"].get("resultType"), None);

    assert_eq!(session.bare(Method::DELETE).await.unwrap().status, StatusCode::OK);
    assert_eq!(handle.stats().sessions, 0);
    let gone = session.request(3.into(), "tools/list", json!({})).await.unwrap();
    assert_eq!(gone.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn progress_is_streamed_in_both_eras_and_only_when_asked_for() {
    let (client, _handle) = start().await;
    for client in [client.initialize().await.unwrap(), client] {
        let steps = json!({ "steps": 3, "step_ms": 1 });
        let answer = client.call(7, "slow", steps.clone(), true).await.unwrap();
        assert_eq!(answer.content_type(), "text/event-stream");
        assert_eq!(answer.headers["x-accel-buffering"], "no");
        let (values, response) = progress(answer).await;
        assert_eq!((values, &response["id"]), (vec![1, 2, 3], &json!(7)));

        let answer = client.call(8, "slow", steps, false).await.unwrap();
        assert_eq!(answer.content_type(), "application/json");
    }
}

#[tokio::test]
async fn an_id_and_a_token_come_back_with_their_exact_text() {
    let (client, _handle) = start().await;
    let session = client.initialize().await.unwrap();
    let ping = session.request("1".into(), "ping", json!({})).await.unwrap().whole().await.unwrap();
    assert_eq!(ping, r#"{"jsonrpc":"2.0","id":"1","result":{}}"#);

    let raw = r#"{"jsonrpc":"2.0","id":12345678901234567890123,"method":"tools/call","params":{"name":"slow",
        "arguments":{"steps":1,"step_ms":1},"_meta":{"progressToken":"t\u0041"}}}"#;
    let message = rpc::Message::read(raw.as_bytes()).unwrap();
    let id = message.id.unwrap();
    assert!(rpc::result(&id, &json!({})).starts_with(br#"{"jsonrpc":"2.0","id":12345678901234567890123,"#));
    let token = message.params.meta.progress_token.unwrap();
    let step = rpc::Step { progress: 1, total: 1, ..rpc::Step::default() };
    let text = String::from_utf8(rpc::progress(&token, step).to_vec()).unwrap();
    assert!(text.contains(r#""progressToken":"t\u0041","progress":1"#), "{text}");
}

#[tokio::test]
async fn closing_a_modern_stream_cancels_the_call() {
    let (client, handle) = start().await;
    let mut answer = client.call(1, "slow", json!({ "steps": LONG, "step_ms": 1 }), true).await.unwrap();
    assert!(answer.message().await.unwrap().is_some());
    drop(answer);
    let seen = handle.until(|seen| seen.tool("slow").cancelled == 1).await;
    assert_eq!(seen.tool("slow").finished, 0);
    handle.until(|seen| seen.open_streams == 0).await;
}

#[tokio::test]
async fn leaving_before_the_head_cancels_a_modern_call() {
    let (client, handle) = start().await;
    let waiting =
        tokio::spawn(async move { client.call(1, "silent", json!({ "ms": LONG }), false).await.is_ok() });
    handle.until(|seen| seen.tool("silent").started == 1).await;
    waiting.abort();
    handle.until(|seen| seen.tool("silent").cancelled == 1).await;
}

#[tokio::test]
async fn closing_a_legacy_stream_cancels_nothing() {
    let (client, handle) = start().await;
    let session = client.initialize().await.unwrap();
    let mut answer = session.call(1, "slow", json!({ "steps": 20, "step_ms": 5 }), true).await.unwrap();
    assert!(answer.message().await.unwrap().is_some());
    drop(answer);
    handle.until(|seen| seen.open_streams == 0).await;
    let seen = handle.until(|seen| seen.tool("slow").finished + seen.tool("slow").cancelled == 1).await;
    assert_eq!(seen.tool("slow"), Calls { started: 1, finished: 1, ..Calls::default() });
}

#[tokio::test]
async fn a_legacy_call_is_cancelled_by_its_session_and_id_and_its_stream_ends_without_a_response() {
    let (client, handle) = start().await;
    let (session, other) = (client.initialize().await.unwrap(), client.initialize().await.unwrap());
    let mut answer = session.call(1, "slow", json!({ "steps": 1, "step_ms": LONG }), true).await.unwrap();
    let json = {
        let session = session.clone();
        tokio::spawn(async move { session.call(2, "silent", json!({ "ms": LONG }), false).await })
    };
    handle.until(|seen| seen.tool("silent").started == 1).await;

    // Another session's, another type's, an unknown one, a malformed one: ignored.
    let cancelled = "notifications/cancelled";
    other.notify(cancelled, json!({ "requestId": 1 })).await.unwrap();
    for wrong in [json!({ "requestId": "1" }), json!({ "requestId": 9 }), json!({})] {
        assert_eq!(session.notify(cancelled, wrong).await.unwrap(), StatusCode::ACCEPTED);
    }
    assert_eq!(handle.stats().tool("slow").cancelled, 0);

    for id in [1, 2] {
        let status = session.notify(cancelled, json!({ "requestId": id })).await.unwrap();
        assert_eq!(status, StatusCode::ACCEPTED);
    }
    assert_eq!(answer.message().await.unwrap(), None);
    let empty = json.await.unwrap().unwrap();
    assert_eq!(empty.content_type(), "text/event-stream");
    assert!(empty.whole().await.unwrap().is_empty());
    let seen =
        handle.until(|seen| seen.tool("slow").cancelled == 1 && seen.tool("silent").cancelled == 1).await;
    assert_eq!(seen.cancelled_notifications, 6);
}

#[tokio::test]
async fn a_session_has_one_get_stream_and_its_end_ends_the_stream() {
    let (client, handle) = start().await;
    let session = client.initialize().await.unwrap();
    let first = session.bare(Method::GET).await.unwrap();
    assert_eq!((first.status, first.content_type()), (StatusCode::OK, "text/event-stream"));
    assert_eq!(session.bare(Method::GET).await.unwrap().status, StatusCode::CONFLICT);

    drop(first);
    handle.until(|seen| seen.open_streams == 0).await;
    let mut second = session.bare(Method::GET).await.unwrap();
    assert_eq!(second.status, StatusCode::OK);
    session.bare(Method::DELETE).await.unwrap();
    assert_eq!(second.event().await.unwrap(), None);
}

#[tokio::test]
async fn a_legacy_request_needs_a_session_that_exists() {
    let (client, _handle) = start().await;
    let ping = json!({ "jsonrpc": "2.0", "id": 1, "method": "ping" });
    assert_eq!(post(&client, &[], ping.clone()).await.0, StatusCode::BAD_REQUEST);
    assert_eq!(post(&client, &[(SESSION_ID, "none")], ping.clone()).await.0, StatusCode::NOT_FOUND);
    let version = [(PROTOCOL_VERSION, LEGACY)];
    assert_eq!(post(&client, &version, ping).await.0, StatusCode::BAD_REQUEST);
    let batch = json!([{ "jsonrpc": "2.0", "id": 1, "method": "ping" }]);
    assert_eq!(post(&client, &version, batch).await.1["error"]["code"], -32600);
    let null = json!({ "jsonrpc": "2.0", "id": null, "method": "ping" });
    assert_eq!(post(&client, &version, null).await.1["error"]["code"], -32600);
}

#[tokio::test]
async fn a_modern_request_is_refused_without_its_meta_or_with_headers_that_contradict_it() {
    let (client, _handle) = start().await;
    let call = |meta: Value| {
        json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call",
            "params": { "name": "écho", "arguments": { "text": "x" }, "_meta": meta } })
    };
    let meta = |version: &str| {
        json!({ "io.modelcontextprotocol/protocolVersion": version,
            "io.modelcontextprotocol/clientCapabilities": {} })
    };
    let good = [(PROTOCOL_VERSION, MODERN), (METHOD, "tools/call"), (NAME, "=?base64?w6ljaG8=?=")];
    let refusal = |answer: (StatusCode, Value)| (answer.0.as_u16(), answer.1["error"]["code"].as_i64());

    assert_eq!(refusal(post(&client, &good, call(json!({}))).await), (400, Some(-32602)));
    assert_eq!(
        refusal(post(&client, &good, call(meta(MODERN))).await),
        (200, Some(-32602)),
        "the headers are right and the tool is unknown"
    );
    for missing in 0..good.len() {
        let mut headers = good.to_vec();
        headers.remove(missing);
        assert_eq!(refusal(post(&client, &headers, call(meta(MODERN))).await), (400, Some(-32020)));
    }
    for wrong in [(PROTOCOL_VERSION, "2027-01-01"), (METHOD, "tools/list"), (NAME, "echo")] {
        let mut headers = good.to_vec();
        headers.retain(|(name, _)| *name != wrong.0);
        headers.push(wrong);
        assert_eq!(refusal(post(&client, &headers, call(meta(MODERN))).await), (400, Some(-32020)));
    }
    let future = [(PROTOCOL_VERSION, "2027-01-01"), good[1].clone(), good[2].clone()];
    let (status, body) = post(&client, &future, call(meta("2027-01-01"))).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (400, &json!(-32022)));
    assert_eq!(body["error"]["data"]["supported"], json!([MODERN]));

    let unknown = client.request(1.into(), "prompts/list", json!({})).await.unwrap();
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    assert_eq!(unknown.response().await.unwrap()["error"]["code"], -32601);
    assert_eq!(client.bare(Method::GET).await.unwrap().status, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn busy_answers_the_http_request_itself_with_the_wait_as_asked() {
    let (client, handle) = start().await;
    for (arguments, status, wait) in [
        (json!({ "status": 429 }), 429, None),
        (json!({ "status": 429, "retry_after": 1.5 }), 429, Some("1.5")),
        (
            json!({ "status": 503, "retry_after": "Sun, 29 Nov 2026 12:00:00 GMT" }),
            503,
            Some("Sun, 29 Nov 2026 12:00:00 GMT"),
        ),
    ] {
        let answer = client.call(1, "busy", arguments, true).await.unwrap();
        assert_eq!(answer.status, status);
        assert_eq!(answer.headers.get("retry-after").map(|value| value.to_str().unwrap()), wait);
    }
    assert_eq!(handle.stats().tool("busy"), Calls::default(), "nothing was made");
    let wrong =
        client.call(1, "busy", json!({ "status": 200 }), false).await.unwrap().response().await.unwrap();
    assert_eq!(wrong["result"]["isError"], true);
}

#[tokio::test]
async fn a_flood_is_whole_and_a_silent_stream_sends_its_head_at_once() {
    let (client, handle) = start().await;
    let flood = client.call(1, "flood", json!({ "events": 500, "bytes": 300 }), true).await.unwrap();
    let (values, _) = progress(flood).await;
    assert_eq!(values, (1..=500).collect::<Vec<_>>());

    let silent = client.call(2, "silent", json!({ "ms": LONG, "head": true }), false).await.unwrap();
    assert_eq!((silent.status, silent.content_type()), (StatusCode::OK, "text/event-stream"));
    handle.until(|seen| seen.open_streams == 1).await;
}

#[tokio::test]
async fn stats_are_answered_as_json_and_count_connections() {
    let (client, handle) = start().await;
    client.call(1, "echo", json!({ "text": "x" }), false).await.unwrap().whole().await.unwrap();
    handle.until(|seen| seen.connections_closed == 1).await;
    let page = client.exchange(Method::GET, HeaderMap::new(), String::new()).await.unwrap();
    assert_eq!(page.status, StatusCode::BAD_REQUEST, "that was the endpoint, not /stats");
    let snapshot: Snapshot = {
        let stats = client.at("/stats");
        let page = stats.exchange(Method::GET, HeaderMap::new(), String::new()).await.unwrap();
        serde_json::from_slice(&page.whole().await.unwrap()).unwrap()
    };
    assert_eq!((snapshot.requests, snapshot.connections_opened), (2, 3));
    assert_eq!(snapshot.tool("echo").finished, 1);
}

#[tokio::test]
async fn a_web_page_of_another_machine_is_refused() {
    let (client, _handle) = start().await;
    let ping = json!({ "jsonrpc": "2.0", "id": 1, "method": "ping" });
    for (origin, status) in [("http://evil.example", 403), ("null", 403), ("http://localhost:3000", 400)] {
        assert_eq!(post(&client, &[(header::ORIGIN, origin)], ping.clone()).await.0, status, "{origin}");
    }
}
