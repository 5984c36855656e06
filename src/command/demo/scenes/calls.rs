//! One call and its stream: what passes, what is busy, what is cancelled, what a clock ends.

use std::io;

use serde_json::{Value, json};

use crate::command::demo::{
    client::{Answer, Client, Event},
    stage::{Seen, Stage},
};

/// Work that nobody waits for the end of.
const ENDLESS_MS: u64 = 3_600_000;

pub(super) async fn list_and_call(
    stage: &mut Stage,
    seen: &mut Seen,
    client: &Client,
    era: Value,
) -> io::Result<()> {
    let (list, call) = (stage.id(), stage.id());
    let listed = client.request(list.into(), "tools/list", json!({})).await?.response().await?;
    let tools = listed["result"]["tools"].as_array().map_or(0, Vec::len);
    seen.expect_that(tools > 0, "tools/list names tools");
    let answer = client.call(call, "add", json!({ "a": 2, "b": 40 }), false).await?;
    seen.expect("HTTP status", answer.status.as_u16(), 200);
    seen.expect("Content-Type", answer.content_type(), "application/json");
    let called = answer.response().await?;
    seen.expect("id", &called["id"], call);
    seen.expect("text", &called["result"]["content"][0]["text"], "42");
    seen.say(format!("tools/list: {tools} tools; add(2, 40): {}", called["result"]["content"][0]["text"]));

    let record = stage.record(list, seen).await?;
    seen.expect_fields(&record, &json!({ "rpc": "tools/list", "outcome": "ok", "status": 200 }));
    seen.expect_fields(&record, &era);
    let record = stage.record(call, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "rpc": "tools/call", "tool": "add", "outcome": "ok", "status": 200, "upstream": "demo",
            "upstream_status": 200, "stream": "json", "cancelled_by": null }),
    );
    seen.expect_fields(&record, &era);
    let session = record["session"].as_str().map_or(0, str::len);
    seen.expect("length of session", session, if era["era"] == "legacy" { 8 } else { 0 });
    Ok(())
}

pub(super) async fn progress(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    let id = stage.id();
    let mut answer = stage.modern().call(id, "slow", json!({ "steps": 4, "step_ms": 50 }), true).await?;
    seen.expect("Content-Type", answer.content_type(), "text/event-stream");
    let values = progress_values(&mut answer).await?;
    seen.expect("progress", format!("{:?}", values.0), "[1, 2, 3, 4]");
    let text = &values.1["result"]["content"][0]["text"];
    seen.expect("text", text, "4 steps done");
    seen.say(format!("progress {:?} of 4, then {text}", values.0));

    let record = stage.record(id, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "ok", "stream": "sse", "events": 5, "progress_in": 4, "progress_out": 4,
            "progress": 4, "total": 4 }),
    );
    Ok(())
}

/// Reads a stream to its end: the progress values, and the last other message (`null` if there was none).
pub(super) async fn progress_values(answer: &mut Answer) -> io::Result<(Vec<u64>, Value)> {
    let (mut values, mut last) = (Vec::new(), Value::Null);
    while let Some(message) = answer.message().await? {
        match message["params"]["progress"].as_u64() {
            Some(value) if message["method"] == "notifications/progress" => values.push(value),
            _ => last = message,
        }
    }
    Ok((values, last))
}

pub(super) async fn busy(
    stage: &mut Stage,
    seen: &mut Seen,
    arguments: Value,
    wait: Option<Value>,
) -> io::Result<()> {
    let id = stage.id();
    let status = arguments["status"].clone();
    let answer = stage.modern().call(id, "busy", arguments, false).await?;
    let header = |name: &str| {
        let value = answer.headers.get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or("absent").to_owned()
    };
    let named = wait.as_ref().map_or_else(|| "absent".to_owned(), Value::to_string);
    seen.expect("HTTP status", answer.status.as_u16(), 200);
    seen.expect("Oz0-Upstream-Status", header("oz0-upstream-status"), status.to_string());
    seen.expect("Retry-After", header("retry-after"), named);
    let response = answer.response().await?;
    let result = &response["result"];
    seen.expect("id", &response["id"], id);
    seen.expect("resultType", &result["resultType"], "complete");
    seen.expect("isError", &result["isError"], true);
    let wait = wait.unwrap_or_default();
    seen.expect_fields(&result["_meta"], &json!({ "oz0/retryable": true, "oz0/retry_after": wait }));
    seen.say(format!("the model reads {}", result["content"][0]["text"]));
    seen.say(format!("the platform reads {}", result["_meta"]));

    let record = stage.record(id, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "busy", "status": 200, "upstream_status": status, "retry_after": wait }),
    );
    Ok(())
}

pub(super) async fn cancel_by_closing(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    let before = stage.upstream();
    let id = stage.id();
    let arguments = json!({ "steps": ENDLESS_MS, "step_ms": 20 });
    let mut answer = stage.modern().call(id, "slow", arguments, true).await?;
    let first = answer.message().await?.unwrap_or_default();
    seen.expect("first progress", &first["params"]["progress"], 1);
    drop(answer);
    let after = stage.upstream_until(|now| now.tool("slow").cancelled > before.tool("slow").cancelled).await;
    let messages = after.cancelled_notifications - before.cancelled_notifications;
    seen.expect("notifications/cancelled upstream", messages, 0);
    seen.say("one progress event, then the client closes: the upstream says that the work was cancelled");

    let record = stage.record(id, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "cancelled", "cancelled_by": "disconnect", "status": 200, "stream": "sse" }),
    );
    seen.expect_that(record["cancel_ms"].is_number(), "the log says how long the cancel took");
    Ok(())
}

pub(super) async fn cancel_before_the_head(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    let before = stage.upstream().tool("silent");
    let (id, client) = (stage.id(), stage.modern());
    let arguments = json!({ "ms": ENDLESS_MS });
    let waiting = client.call(id, "silent", arguments, false);
    tokio::select! {
        answer = waiting => return Err(io::Error::other(format!("a silent call was answered {}", answer?.status))),
        // Over first: the future that waits is dropped, and its connection with it.
        _ = stage.upstream_until(|now| now.tool("silent").started > before.started) => {}
    }
    stage.upstream_until(|now| now.tool("silent").cancelled > before.cancelled).await;
    seen.say("no byte of an answer yet, the client leaves: the upstream says that the work was cancelled");

    let record = stage.record(id, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "cancelled", "cancelled_by": "disconnect", "status": null, "upstream_status": null }),
    );
    Ok(())
}

pub(super) async fn cancel_by_notification(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    let client = stage.legacy().await?;
    let before = stage.upstream();
    let id = stage.id();
    let arguments = json!({ "steps": ENDLESS_MS, "step_ms": 20 });
    let mut answer = client.call(id, "slow", arguments, true).await?;
    let first = answer.message().await?.unwrap_or_default();
    seen.expect("first progress", &first["params"]["progress"], 1);
    let status = client.notify("notifications/cancelled", json!({ "requestId": id })).await?;
    seen.expect("HTTP status of the notification", status.as_u16(), 202);
    let (_, last) = progress_values(&mut answer).await?;
    seen.expect("the response", last, Value::Null);
    let after = stage.upstream_until(|now| now.tool("slow").cancelled > before.tool("slow").cancelled).await;
    let messages = after.cancelled_notifications - before.cancelled_notifications;
    seen.expect("notifications/cancelled upstream", messages, 1);
    seen.say("the upstream got the notification and says that the work was cancelled; the stream just ended");

    let record = stage.record(id, seen).await?;
    seen.expect_fields(&record, &json!({ "outcome": "cancelled", "cancelled_by": "notification" }));
    Ok(())
}

/// The error that a clock's end is told with.
fn expect_timeout(seen: &mut Seen, id: u64, response: &Value, reason: &str) {
    let error = &response["error"];
    seen.expect("id", &response["id"], id);
    seen.expect("error code", &error["code"], 1504);
    seen.expect_fields(
        &error["data"],
        &json!({ "source": "mcp-sidecar", "reason": reason, "outcome": "unknown", "upstream": "demo" }),
    );
    seen.say(format!("the client reads {error}"));
}

pub(super) async fn idle_clock(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    let before = stage.upstream().tool("silent");
    let id = stage.id();
    let answer = stage.modern().call(id, "silent", json!({ "ms": ENDLESS_MS }), false).await?;
    seen.expect("HTTP status", answer.status.as_u16(), 200);
    let response = answer.response().await?;
    expect_timeout(seen, id, &response, "idle_timeout");
    stage.upstream_until(|now| now.tool("silent").cancelled > before.cancelled).await;
    seen.say("the upstream says that the work was cancelled");

    let record = stage.record(id, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "idle_timeout", "reason": "idle_timeout", "status": 200, "cancelled_by": null }),
    );
    Ok(())
}

pub(super) async fn maximum_clock(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    let before = stage.upstream().tool("slow");
    let id = stage.id();
    let arguments = json!({ "steps": ENDLESS_MS, "step_ms": 200 });
    let mut answer = stage.modern().call(id, "slow", arguments, true).await?;
    let (values, response) = progress_values(&mut answer).await?;
    seen.say(format!("progress {values:?}, still coming"));
    seen.expect_that(values.len() >= 2, "progress came until the end");
    expect_timeout(seen, id, &response, "max_timeout");
    let told = response["error"]["data"]["oz0/progress"]["progress"].as_f64();
    let last = values.last().map(|&last| last as f64);
    seen.expect_that(told.is_some() && told >= last, "the error says how far it got");
    stage.upstream_until(|now| now.tool("slow").cancelled > before.cancelled).await;
    seen.say("the upstream says that the work was cancelled");

    let record = stage.record(id, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "max_timeout", "reason": "max_timeout", "status": 200, "stream": "sse",
            "cancelled_by": null }),
    );
    seen.expect_that(record["progress"].as_f64() == told, "so does the log");
    Ok(())
}

pub(super) async fn keepalive(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    let id = stage.id();
    // Longer than the keepalive's interval, shorter than the idle clock.
    let mut answer = stage.modern().call(id, "silent", json!({ "ms": 600, "head": true }), false).await?;
    seen.expect("Content-Type", answer.content_type(), "text/event-stream");
    let (mut comments, mut response) = (0, Value::Null);
    while let Some(event) = answer.event().await? {
        match event {
            Event::Comment => comments += 1,
            Event::Message(message) => response = message,
        }
    }
    seen.expect_that(comments >= 1, "a comment came while the upstream was silent");
    seen.expect("text", &response["result"]["content"][0]["text"], "silent for 600 ms");
    seen.say(format!("{comments} comments, then {}", response["result"]["content"][0]["text"]));

    let record = stage.record(id, seen).await?;
    seen.expect_fields(&record, &json!({ "outcome": "ok", "stream": "sse", "keepalives": comments }));
    Ok(())
}
