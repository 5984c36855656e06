//! The same call again: what a second attempt under a key comes to.

use std::{io, time::Duration};

use serde_json::{Value, json};

use super::calls::progress_values;
use crate::command::demo::{
    client::Answer,
    stage::{Seen, Stage},
};

/// An attempt at the call of an activity, as a node makes it: a new request, the same identity.
async fn attempt(
    stage: &Stage,
    id: u64,
    activity: &str,
    tool: &str,
    arguments: &Value,
) -> io::Result<Answer> {
    let meta = json!({ "progressToken": id, "oz0/call": { "job": "demo", "activity": activity } });
    let params = json!({ "name": tool, "arguments": arguments, "_meta": meta });
    stage.patient().request(id.into(), "tools/call", params).await
}

/// The next attempt. While the one before is not settled it is answered busy: then it waits as long as it is told.
async fn next_attempt(
    stage: &mut Stage,
    activity: &str,
    tool: &str,
    arguments: &Value,
) -> io::Result<(u64, Answer)> {
    loop {
        let id = stage.id();
        let answer = attempt(stage, id, activity, tool, arguments).await?;
        let Ok(wait) = header(&answer, "retry-after").parse() else { return Ok((id, answer)) };
        tokio::time::sleep(Duration::from_secs(wait)).await;
    }
}

fn header<'a>(answer: &'a Answer, name: &str) -> &'a str {
    answer.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("absent")
}

fn text(response: &Value) -> &str {
    response["result"]["content"][0]["text"].as_str().unwrap_or("no text")
}

/// The error that a call broken off is told with.
fn expect_error(seen: &mut Seen, response: &Value, code: u64, data: &Value) {
    seen.expect("error code", &response["error"]["code"], code);
    seen.expect_fields(&response["error"]["data"], data);
    seen.say(format!("the client reads {}", response["error"]["message"]));
}

pub(super) async fn twice(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    stage.list().await?;
    let before = stage.upstream();
    let order = json!({ "order_id": "o-1", "amount": 500 });
    let (first, second) = (stage.id(), stage.id());
    let answer = attempt(stage, first, "twice", "charge", &order).await?;
    seen.expect("Oz0-Idempotency-Key", header(&answer, "oz0-idempotency-key"), "demo/twice");
    let made = answer.response().await?;
    let again = attempt(stage, second, "twice", "charge", &order).await?.response().await?;
    seen.expect("id", &again["id"], second);
    seen.expect("the second result", &again["result"], &made["result"]);
    let after = stage.upstream();
    let executions = after.tool("charge").executions - before.tool("charge").executions;
    seen.expect("executions upstream", executions, 1);
    seen.expect("requests upstream", after.requests - before.requests, 1);
    seen.say(format!(
        "charged {}, and the second time {} again: {executions} execution",
        text(&made),
        text(&again)
    ));

    let record = stage.record(first, seen).await?;
    seen.expect_fields(&record, &json!({ "outcome": "ok", "attempt": 1, "retry_class": "conditional" }));
    let record = stage.record(second, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "ok", "replayed": true, "key": "demo/twice", "upstream_status": null }),
    );
    Ok(())
}

pub(super) async fn lost_response(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    stage.list().await?;
    stage.control(&json!({ "fault": { "tool": "charge", "lose_response": true } }))?;
    let before = stage.upstream().tool("charge");
    let order = json!({ "order_id": "o-2", "amount": 500 });
    let first = stage.id();
    let lost = attempt(stage, first, "lost", "charge", &order).await?.response().await?;
    expect_error(seen, &lost, 1502, &json!({ "reason": "upstream_failed", "outcome": "unknown" }));
    let (second, answer) = next_attempt(stage, "lost", "charge", &order).await?;
    let resume = "started over: the server does not take part";
    seen.expect("Oz0-Resume", header(&answer, "oz0-resume"), resume);
    let answered = answer.response().await?;
    seen.expect("isError", &answered["result"]["isError"], false);
    let after = stage.upstream().tool("charge");
    seen.expect("executions upstream", after.executions - before.executions, 1);
    seen.expect("answers from the upstream's own record", after.replays - before.replays, 1);
    seen.say(format!("the next attempt is answered {}: charged once, told twice", text(&answered)));

    let record = stage.record(first, seen).await?;
    seen.expect_fields(&record, &json!({ "outcome": "failed", "reason": "upstream_failed", "attempt": 1 }));
    let record = stage.record(second, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "ok", "attempt": 2, "retry_class": "conditional", "key": "demo/lost",
            "replayed": null, "resume": resume }),
    );
    Ok(())
}

pub(super) async fn outcome_unknown(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    stage.list().await?;
    stage.control(&json!({ "fault": { "tool": "charge_unkeyed", "lose_response": true } }))?;
    let before = stage.upstream().tool("charge_unkeyed");
    let order = json!({ "order_id": "o-3", "amount": 500 });
    let first = stage.id();
    let lost = attempt(stage, first, "unsafe", "charge_unkeyed", &order).await?.response().await?;
    expect_error(seen, &lost, 1502, &json!({ "reason": "upstream_failed", "outcome": "unknown" }));
    let (second, refused) = next_attempt(stage, "unsafe", "charge_unkeyed", &order).await?;
    let refused = refused.response().await?;
    expect_error(seen, &refused, 1409, &json!({ "reason": "outcome_unknown", "outcome": "unknown" }));
    let after = stage.upstream().tool("charge_unkeyed");
    seen.expect("executions upstream", after.executions - before.executions, 1);
    seen.say("it was charged, and not a second time: somebody has to look");

    stage.record(first, seen).await?;
    let record = stage.record(second, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "refused", "reason": "outcome_unknown", "retry_class": "unsafe",
            "upstream_status": null }),
    );
    Ok(())
}

pub(super) async fn key_mismatch(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    stage.list().await?;
    let before = stage.upstream();
    let reserve = |quantity| json!({ "tenant": "acme", "sku": "widget", "quantity": quantity });
    let (first, second) = (stage.id(), stage.id());
    let made = attempt(stage, first, "mismatch", "reserve_inventory", &reserve(2)).await?.response().await?;
    let changed =
        attempt(stage, second, "mismatch", "reserve_inventory", &reserve(3)).await?.response().await?;
    expect_error(seen, &changed, 1422, &json!({ "reason": "key_mismatch", "outcome": "not_sent" }));
    let after = stage.upstream();
    let tool = "reserve_inventory";
    seen.expect("executions upstream", after.tool(tool).executions - before.tool(tool).executions, 1);
    seen.expect("requests upstream", after.requests - before.requests, 1);
    seen.say(format!("2 are reserved ({}), the 3 under the same key are not", text(&made)));

    stage.record(first, seen).await?;
    let record = stage.record(second, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "refused", "reason": "key_mismatch", "upstream_status": null }),
    );
    Ok(())
}

pub(super) async fn resumed(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    stage.list().await?;
    stage.control(&json!({ "fault": { "tool": "search", "cut_after": 2 } }))?;
    let question = json!({ "q": "sidecar" });
    let first = stage.id();
    let mut answer = attempt(stage, first, "resume", "search", &question).await?;
    let (values, cut) = progress_values(&mut answer).await?;
    seen.expect("progress", format!("{values:?}"), "[1, 2]");
    expect_error(
        seen,
        &cut,
        1502,
        &json!({ "reason": "upstream_failed", "oz0/progress": { "progress": 2, "total": 4 } }),
    );
    let (second, mut answer) = next_attempt(stage, "resume", "search", &question).await?;
    let resume = "resumed from progress 2 of 4";
    seen.expect("Oz0-Resume", header(&answer, "oz0-resume"), resume);
    let (values, found) = progress_values(&mut answer).await?;
    seen.expect("progress", format!("{values:?}"), "[3, 4]");
    seen.expect("text", text(&found), "searched after page 2: 2 pages");
    seen.say(format!("the next attempt is {resume}, and says \"{}\"", text(&found)));

    let record = stage.record(first, seen).await?;
    seen.expect_fields(&record, &json!({ "outcome": "failed", "attempt": 1, "progress": 2, "total": 4 }));
    let record = stage.record(second, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "ok", "attempt": 2, "retry_class": "safe", "resume": resume, "progress": 4 }),
    );
    Ok(())
}
