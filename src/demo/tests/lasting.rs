//! What outlives a request: tasks and subscriptions.

use super::*;

const TASKS: &str = "io.modelcontextprotocol/tasks";

/// A request of a client that takes tasks.
async fn asked(client: &Client, method: &str, mut params: Value) -> Value {
    params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({ "extensions": { TASKS: {} } });
    client.request(1.into(), method, params).await.unwrap().response().await.unwrap()
}

async fn export(client: &Client, arguments: Value) -> String {
    let created = asked(client, "tools/call", json!({ "name": "export", "arguments": arguments })).await;
    assert_eq!(
        (&created["result"]["resultType"], &created["result"]["status"]),
        (&json!("task"), &json!("working"))
    );
    created["result"]["taskId"].as_str().unwrap().to_owned()
}

async fn get(client: &Client, id: &str) -> Value {
    asked(client, "tasks/get", json!({ "taskId": id })).await["result"].clone()
}

/// Asks until the task is no longer `working`.
async fn ended(client: &Client, id: &str) -> Value {
    loop {
        let task = get(client, id).await;
        if task["status"] != "working" {
            return task;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_acknowledged_cancel_leaves_a_task_working_until_its_checkpoint() {
    let (client, handle) = start().await;
    let id = export(&client, json!({ "hold": true })).await;
    let acknowledged = asked(&client, "tasks/cancel", json!({ "taskId": id })).await;
    assert_eq!(acknowledged["result"]["resultType"], "complete");
    assert_eq!(acknowledged["result"].get("status"), None);
    assert_eq!(get(&client, &id).await["status"], "working");

    handle.control(&json!({ "checkpoints": 1 })).unwrap();
    let seen = handle.until(|seen| seen.tool("export").cancelled == 1).await;
    assert_eq!(seen.tool("export").finished, 0);
    assert_eq!(get(&client, &id).await["status"], "cancelled");
}

#[tokio::test]
async fn a_cancel_that_comes_after_the_end_changes_nothing() {
    let (client, handle) = start().await;
    let id = export(&client, json!({ "steps": 2, "step_ms": 1 })).await;
    handle.until(|seen| seen.tool("export").finished == 1).await;
    assert!(asked(&client, "tasks/cancel", json!({ "taskId": id })).await.get("result").is_some());
    let task = get(&client, &id).await;
    assert_eq!((&task["status"], &task["resultType"]), (&json!("completed"), &json!("complete")));
    assert_eq!(task["result"]["content"][0]["text"], "2 steps exported");
}

#[tokio::test]
async fn a_task_goes_on_in_the_server_that_comes_after() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("ledger.db");
    let (address, handle) = Server::start_on((Ipv4Addr::LOCALHOST, 0).into(), &path).await.unwrap();
    let id = export(&Client::new(address, "/mcp"), json!({ "steps": 1, "hold": true })).await;
    drop(handle);

    let (address, handle) = Server::start_on((Ipv4Addr::LOCALHOST, 0).into(), &path).await.unwrap();
    let client = Client::new(address, "/mcp");
    assert_eq!(get(&client, &id).await["status"], "working");
    handle.control(&json!({ "checkpoints": 1 })).unwrap();
    assert_eq!(ended(&client, &id).await["status"], "completed");
}

#[tokio::test]
async fn a_client_that_takes_no_tasks_gets_an_ordinary_result_and_no_task() {
    let (client, _handle) = start().await;
    let arguments = json!({ "steps": 2, "step_ms": 1 });
    for client in [client.initialize().await.unwrap(), client.clone()] {
        let answer = client.call(1, "export", arguments.clone(), true).await.unwrap();
        let (values, response) = progress(answer).await;
        assert_eq!(values, [1, 2]);
        assert_eq!(response["result"]["content"][0]["text"], "2 steps exported");
    }
    let refused = client.request(1.into(), "tasks/get", json!({ "taskId": "x" })).await.unwrap();
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    let error = &refused.response().await.unwrap()["error"];
    assert_eq!(
        (&error["code"], &error["data"]["requiredCapabilities"]["extensions"][TASKS]),
        (&json!(-32021), &json!({}))
    );
    for method in ["tasks/get", "tasks/cancel", "tasks/update"] {
        assert_eq!(asked(&client, method, json!({ "taskId": "x" })).await["error"]["code"], -32602);
    }
}

async fn listen(client: &Client, id: Value, filter: Value) -> Answer {
    client.request(id, "subscriptions/listen", json!({ "notifications": filter })).await.unwrap()
}

async fn next(stream: &mut Answer) -> Value {
    stream.message().await.unwrap().unwrap()
}

const WIDGET: &str = "inventory://widget";

fn both() -> Value {
    json!({ "toolsListChanged": true, "promptsListChanged": true, "resourceSubscriptions": [WIDGET] })
}

async fn reserve(client: &Client, sku: &str) {
    let arguments = json!({ "tenant": "acme", "sku": sku, "quantity": 1 });
    client.call(9, "reserve_inventory", arguments, false).await.unwrap().whole().await.unwrap();
}

#[tokio::test]
async fn a_subscription_is_acknowledged_first_and_every_message_carries_its_id() {
    let (client, handle) = start().await;
    let mut stream = listen(&client, "s-1".into(), both()).await;
    assert_eq!(stream.content_type(), "text/event-stream");
    let subscription = "io.modelcontextprotocol/subscriptionId";
    let acknowledged = next(&mut stream).await;
    assert_eq!(acknowledged["method"], "notifications/subscriptions/acknowledged");
    let granted = json!({ "toolsListChanged": true, "resourceSubscriptions": [WIDGET] });
    assert_eq!(acknowledged["params"]["notifications"], granted, "what is not there is not granted");
    assert_eq!(acknowledged["params"]["_meta"][subscription], "s-1");

    reserve(&client, "gadget").await;
    reserve(&client, "widget").await;
    handle.control(&json!({ "tools_changed": true })).unwrap();
    let updated = next(&mut stream).await;
    assert_eq!(
        (&updated["method"], &updated["params"]["uri"], &updated["params"]["_meta"][subscription]),
        (&json!("notifications/resources/updated"), &json!(WIDGET), &json!("s-1"))
    );
    assert_eq!(next(&mut stream).await["method"], "notifications/tools/list_changed");

    let read = client.request(2.into(), "resources/read", json!({ "uri": WIDGET })).await.unwrap();
    let read = read.response().await.unwrap();
    let record: Value =
        serde_json::from_str(read["result"]["contents"][0]["text"].as_str().unwrap()).unwrap();
    assert_eq!(record, json!({ "sku": "widget", "stock": 100, "reserved": 1, "available": 99 }));

    handle.control(&json!({ "listen": { "end": true } })).unwrap();
    let last = next(&mut stream).await;
    assert_eq!((&last["id"], &last["result"]["resultType"]), (&json!("s-1"), &json!("complete")));
    assert_eq!(last["result"]["_meta"][subscription], "s-1");
    assert_eq!(stream.message().await.unwrap(), None);
}

#[tokio::test]
async fn an_abrupt_end_comes_amid_the_stream_after_what_was_said() {
    let (client, handle) = start().await;
    let mut stream = listen(&client, 7.into(), both()).await;
    next(&mut stream).await;
    reserve(&client, "widget").await;
    handle.control(&json!({ "listen": { "drop": true } })).unwrap();
    assert_eq!(next(&mut stream).await["method"], "notifications/resources/updated");
    assert!(stream.message().await.is_err(), "that was no orderly end");
    let seen = handle.until(|seen| seen.open_streams == 0).await;
    assert_eq!((seen.listens, seen.listen_drops), (1, 1));
}

#[tokio::test]
async fn subscriptions_are_refused_for_a_while_and_acknowledged_more_narrowly() {
    let (client, handle) = start().await;
    let refuse = json!({ "refuse": 503, "times": 2, "retry_after": 1, "narrow": 1 });
    handle.control(&json!({ "listen": refuse })).unwrap();
    for _ in 0..2 {
        let refused = listen(&client, 1.into(), both()).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.headers["retry-after"]),
            (503, &HeaderValue::from_static("1"))
        );
    }
    let granted = [json!({ "toolsListChanged": true }), both()];
    for granted in granted {
        let mut stream = listen(&client, 1.into(), both()).await;
        let acknowledged = next(&mut stream).await;
        let resources = &acknowledged["params"]["notifications"]["resourceSubscriptions"];
        assert_eq!(resources, &granted["resourceSubscriptions"]);
    }
    assert_eq!((handle.stats().listen_refusals, handle.stats().listens), (2, 2));
    let tasks = listen(&client, 1.into(), json!({ "taskIds": ["x"] })).await;
    assert_eq!(tasks.response().await.unwrap()["error"]["code"], -32021);
    let none = client.request(1.into(), "subscriptions/listen", json!({})).await.unwrap();
    assert_eq!(none.response().await.unwrap()["error"]["code"], -32602);
}
