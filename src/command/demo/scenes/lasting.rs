//! What lasts: a task that outlives its request, and a stream that is slower than its source.

use std::{io, time::Duration};

use serde_json::{Value, json};

use crate::{
    command::demo::{
        client::Answer,
        stage::{Seen, Stage},
    },
    demo::Snapshot,
};

/// A request about a task, of a client that takes them; gives its id and its result.
async fn asked(stage: &mut Stage, method: &str, mut params: Value) -> io::Result<(u64, Value)> {
    let extensions = json!({ "extensions": { "io.modelcontextprotocol/tasks": {} } });
    params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = extensions;
    let id = stage.id();
    let response = stage.patient().request(id.into(), method, params).await?.response().await?;
    Ok((id, response["result"].clone()))
}

pub(super) async fn task(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    let export = json!({ "name": "export", "arguments": { "hold": true } });
    let (call, created) = asked(stage, "tools/call", export).await?;
    seen.expect_fields(&created, &json!({ "resultType": "task", "status": "working" }));
    let named = json!({ "taskId": created["taskId"] });
    let (cancel, acknowledged) = asked(stage, "tasks/cancel", named.clone()).await?;
    seen.expect_fields(&acknowledged, &json!({ "resultType": "complete", "status": null }));
    let (_, task) = asked(stage, "tasks/get", named.clone()).await?;
    seen.expect("the task's status after the acknowledgement", &task["status"], "working");
    seen.say("tasks/cancel is acknowledged, and tasks/get says \"working\": its worker has not looked yet");

    stage.control(&json!({ "checkpoints": 1 }))?;
    let wait = Duration::from_millis(task["pollIntervalMs"].as_u64().unwrap_or(50));
    let ended = loop {
        let (_, task) = asked(stage, "tasks/get", named.clone()).await?;
        if task["status"] != "working" {
            break task;
        }
        tokio::time::sleep(wait).await;
    };
    seen.expect("the task's status at the end", &ended["status"], "cancelled");
    seen.say(format!("the worker passes its checkpoint, and tasks/get says {}", ended["status"]));

    let record = stage.record(call, seen).await?;
    seen.expect_fields(&record, &json!({ "outcome": "ok", "tool": "export", "cancelled_by": null }));
    let record = stage.record(cancel, seen).await?;
    seen.expect_fields(&record, &json!({ "rpc": "tasks/cancel", "outcome": "ok", "cancelled_by": null }));
    Ok(())
}

/// Events of the flood, and the bytes of each: more together than the sockets on the way hold.
const FLOOD: (u64, u64) = (40, 512 << 10);
/// A log message, which is never dropped, stands between so many of them.
const LOG_EVERY: u64 = 2;

pub(super) async fn flood(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    let before = stage.upstream().tool("flood");
    let id = stage.id();
    let (events, bytes) = FLOOD;
    let params = json!({
        "name": "flood",
        "arguments": { "events": events, "bytes": bytes, "log_every": LOG_EVERY },
        "_meta": { "progressToken": id, "io.modelcontextprotocol/logLevel": "info" },
    });
    let mut answer = stage.patient().slow().request(id.into(), "tools/call", params).await?;
    let over = |now: &Snapshot| now.tool("flood").finished > before.finished && now.open_streams == 0;
    stage.upstream_until(over).await;
    seen.say(format!(
        "the upstream has sent {events} events of {} KiB, the node has read none yet",
        bytes >> 10
    ));
    let (mut progress, mut logs, mut last) = (0, 0, Value::Null);
    while let Some(message) = answer.message().await? {
        match message["method"].as_str() {
            Some("notifications/progress") => progress += 1,
            Some("notifications/message") => logs += 1,
            _ => last = message,
        }
    }
    seen.expect("log messages", logs, events / LOG_EVERY);
    seen.expect("text", &last["result"]["content"][0]["text"], format!("{events} events sent").as_str());
    seen.expect("oz0/refetch", &last["result"]["_meta"]["oz0/refetch"], true);
    seen.say(format!(
        "it reads {progress} of the progress, each of {logs} log messages, and the result, marked"
    ));

    let record = stage.record(id, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "outcome": "ok", "refetch": true, "progress_in": events, "progress_out": progress }),
    );
    let count = |name: &str| record[name].as_u64().unwrap_or(0);
    seen.expect_that(count("progress_dropped") > 0, "the log says how much was dropped");
    let thinned = count("progress_coalesced") + count("progress_dropped");
    seen.expect("progress merged or dropped", thinned, events - progress);
    Ok(())
}

const WIDGET: &str = "inventory://widget";

/// The next message of a subscription: its method, and the resource it names. Its id has to be the node's.
async fn told(seen: &mut Seen, stream: &mut Answer, id: u64) -> io::Result<(String, String)> {
    let message = stream.message().await?.unwrap_or_default();
    let params = &message["params"];
    seen.expect("subscriptionId", &params["_meta"]["io.modelcontextprotocol/subscriptionId"], id);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok((text(&message["method"]), text(&params["uri"])))
}

pub(super) async fn healed(stage: &mut Stage, seen: &mut Seen) -> io::Result<()> {
    let before = stage.upstream();
    let id = stage.id();
    let filter = json!({ "toolsListChanged": true, "resourceSubscriptions": [WIDGET] });
    let params = json!({ "notifications": filter });
    let mut stream = stage.patient().request(id.into(), "subscriptions/listen", params).await?;
    let (method, _) = told(seen, &mut stream, id).await?;
    seen.expect("the first message", method.as_str(), "notifications/subscriptions/acknowledged");

    stage.control(&json!({ "listen": { "refuse": 503, "drop": true } }))?;
    let mut changes = [told(seen, &mut stream, id).await?, told(seen, &mut stream, id).await?];
    changes.sort_unstable();
    let [resource, tools] = changes;
    seen.expect("a change", resource.0.as_str(), "notifications/resources/updated");
    seen.expect("its resource", resource.1.as_str(), WIDGET);
    seen.expect("a change", tools.0.as_str(), "notifications/tools/list_changed");
    let now = stage.upstream();
    seen.expect("subscriptions dropped upstream", now.listen_drops - before.listen_drops, 1);
    seen.expect("subscriptions refused upstream", now.listen_refusals - before.listen_refusals, 1);
    seen.expect("subscriptions opened upstream", now.listens - before.listens, 2);
    seen.say(
        "the server drops the stream and refuses the next: the node's stays open, and is told to refetch",
    );

    let call = stage.id();
    let order = json!({ "tenant": "acme", "sku": "widget", "quantity": 1 });
    stage.patient().call(call, "reserve_inventory", order, false).await?.whole().await?;
    let (method, uri) = told(seen, &mut stream, id).await?;
    seen.expect("what a reservation is told by", method.as_str(), "notifications/resources/updated");
    seen.expect("its resource", uri.as_str(), WIDGET);
    seen.say(format!("a reservation is made: {uri} has changed, on the same stream under the same id"));
    drop(stream);

    let record = stage.record(id, seen).await?;
    seen.expect_fields(
        &record,
        &json!({ "rpc": "subscriptions/listen", "status": 200, "stream": "sse", "cancelled_by": "disconnect" }),
    );
    Ok(())
}
