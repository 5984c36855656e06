//! The same call again: the ledger's tools, the failures on request, and the search that goes on.

use std::{
    path::PathBuf,
    sync::{Arc, Barrier},
};

use super::{
    super::ledger::{Effect, Error, Ledger, Operation},
    *,
};

fn order(amount: u64) -> Value {
    json!({ "order_id": "o-1", "amount": amount })
}

fn reserve(quantity: u64) -> Value {
    json!({ "tenant": "acme", "sku": "widget", "quantity": quantity })
}

fn reservation(tenant: &str, quantity: u64) -> Operation {
    let effect = Effect::Reserve { tenant: tenant.to_owned(), sku: "widget".to_owned(), quantity };
    Operation { name: "reserve_inventory", effect }
}

/// A call under a key; `None` if it got no answer.
async fn keyed(client: &Client, tool: &str, arguments: Value, key: &str) -> Option<Value> {
    let params = json!({ "name": tool, "arguments": arguments, "_meta": { "oz0/idempotency_key": key } });
    let answer = client.request(1.into(), "tools/call", params).await.ok()?;
    Some(answer.response().await.ok()?["result"].clone())
}

async fn plain(client: &Client, tool: &str, arguments: Value) -> Option<Value> {
    Some(client.call(1, tool, arguments, false).await.ok()?.response().await.ok()?["result"].clone())
}

fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("ledger.db");
    (folder, path)
}

#[tokio::test]
async fn a_key_makes_a_charge_once_in_both_eras() {
    let (client, handle) = start().await;
    let first = keyed(&client, "charge", order(5), "k").await.unwrap();
    assert_eq!(first["structuredContent"], json!({ "receipt": "ch-1", "order_id": "o-1" }));
    let legacy = client.initialize().await.unwrap();
    let again = keyed(&legacy, "charge", order(5), "k").await.unwrap();
    assert_eq!(again["structuredContent"], first["structuredContent"]);
    assert_eq!(again["content"], first["content"]);
    let seen = handle.stats().tool("charge");
    assert_eq!((seen.executions, seen.replays, seen.refusals), (1, 1, 0));
}

#[tokio::test]
async fn a_key_with_other_arguments_or_of_another_operation_is_refused() {
    let (client, handle) = start().await;
    keyed(&client, "reserve_inventory", reserve(2), "k").await.unwrap();
    let tenant = json!({ "tenant": "other", "sku": "widget", "quantity": 2 });
    let sku = json!({ "tenant": "acme", "sku": "gadget", "quantity": 2 });
    for other in [reserve(3), tenant, sku] {
        let refused = keyed(&client, "reserve_inventory", other, "k").await.unwrap();
        assert_eq!(refused["isError"], true);
    }
    assert_eq!(keyed(&client, "charge", order(5), "k").await.unwrap()["isError"], true);
    let seen = handle.stats();
    let reserved = seen.tool("reserve_inventory");
    assert_eq!((reserved.executions, reserved.refusals), (1, 3));
    assert_eq!((seen.tool("charge").executions, seen.tool("charge").refusals), (0, 1));
}

#[tokio::test]
async fn without_a_key_and_where_none_is_honoured_each_call_is_made() {
    let (client, handle) = start().await;
    for _ in 0..2 {
        plain(&client, "charge", order(5)).await.unwrap();
        keyed(&client, "charge_unkeyed", order(5), "k").await.unwrap();
    }
    let seen = handle.stats();
    assert_eq!((seen.tool("charge").executions, seen.tool("charge_unkeyed").executions), (2, 2));
    assert_eq!(seen.tool("charge_unkeyed").replays, 0);
}

#[tokio::test]
async fn what_is_refused_for_its_arguments_or_the_stock_leaves_its_key_free() {
    let (client, handle) = start().await;
    let wrong = [
        reserve(101),
        reserve(0),
        json!({ "tenant": "acme", "sku": "widget", "quantity": 1, "card": "4111" }),
        json!({ "tenant": "acme", "sku": "none", "quantity": 1 }),
    ];
    for arguments in wrong {
        let refused = keyed(&client, "reserve_inventory", arguments, "k").await.unwrap();
        assert_eq!(refused["isError"], true, "{refused}");
    }
    assert_eq!(handle.stats().tool("reserve_inventory").executions, 0);
    let reserved = keyed(&client, "reserve_inventory", reserve(100), "k").await.unwrap();
    assert_eq!(reserved["structuredContent"]["quantity"], 100);
    assert_eq!(keyed(&client, "reserve_inventory", reserve(1), "l").await.unwrap()["isError"], true);
}

#[tokio::test]
async fn a_response_that_was_lost_is_found_by_its_key() {
    let (client, handle) = start().await;
    handle.control(&json!({ "fault": { "tool": "charge", "lose_response": true } })).unwrap();
    assert_eq!(keyed(&client, "charge", order(5), "k").await, None);
    assert_eq!(handle.stats().tool("charge").executions, 1);
    let found = plain(&client, "reconcile", json!({ "key": "k" })).await.unwrap();
    let told = json!({ "committed": true, "operation": "charge",
        "result": { "receipt": "ch-1", "order_id": "o-1" } });
    assert_eq!(found["structuredContent"], told);
    assert_eq!(
        keyed(&client, "charge", order(5), "k").await.unwrap()["structuredContent"]["receipt"],
        "ch-1"
    );

    handle.control(&json!({ "fault": { "tool": "charge", "fail_before": true } })).unwrap();
    assert_eq!(keyed(&client, "charge", order(5), "l").await, None);
    let found = plain(&client, "reconcile", json!({ "key": "l" })).await.unwrap();
    assert_eq!(found["structuredContent"], json!({ "committed": false }));
    let seen = handle.stats();
    assert_eq!((seen.tool("charge").executions, seen.cuts), (1, 2));
}

#[tokio::test]
async fn a_fault_lasts_as_many_calls_as_it_says_and_its_status_makes_nothing() {
    let (client, handle) = start().await;
    let fault = json!({ "tool": "charge", "status": 503, "retry_after": 1.5, "times": 2 });
    let page = client.at("/control");
    let body = json!({ "fault": fault }).to_string();
    let ordered = page.exchange(Method::POST, HeaderMap::new(), body).await.unwrap();
    assert_eq!(ordered.status, StatusCode::NO_CONTENT);
    for _ in 0..2 {
        let answer = client.call(1, "charge", order(5), false).await.unwrap();
        assert_eq!(
            (answer.status.as_u16(), &answer.headers["retry-after"]),
            (503, &HeaderValue::from_static("1.5"))
        );
    }
    assert_eq!(handle.stats().tool("charge"), Calls::default());
    assert!(plain(&client, "charge", order(5)).await.is_some());

    for wrong in [r#"{"fualt":{}}"#, r#"{"fault":{"tool":"charge","status":200}}"#, "{"] {
        let refused = page.exchange(Method::POST, HeaderMap::new(), wrong.to_owned()).await.unwrap();
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{wrong}");
    }
    assert_eq!(page.bare(Method::GET).await.unwrap().status, StatusCode::METHOD_NOT_ALLOWED);
    assert!(handle.control(&json!({ "checkpoints": 20_000 })).is_err());
}

#[tokio::test]
async fn two_connections_that_race_with_one_key_commit_once() {
    let (_folder, path) = file();
    // One key alone may miss the moment.
    const ROUNDS: u64 = 50;
    let barrier = Arc::new(Barrier::new(2));
    let racing = [(); 2].map(|()| {
        let (ledger, barrier) = (Ledger::open(&path).unwrap(), Arc::clone(&barrier));
        std::thread::spawn(move || {
            let round = |round: u64| {
                barrier.wait();
                ledger.commit(Some(&round.to_string()), &reservation("acme", 2)).unwrap()
            };
            (0..ROUNDS).map(round).collect::<Vec<_>>()
        })
    });
    let [one, other] = racing.map(|thread| thread.join().unwrap());
    for (one, other) in one.iter().zip(&other) {
        assert_eq!(one.result, other.result);
        assert!(one.replayed != other.replayed);
    }
    let ledger = Ledger::open(&path).unwrap();
    assert_eq!(ledger.executions().unwrap()["reserve_inventory"], ROUNDS);
    assert_eq!(ledger.stock().unwrap()["widget"], (100, 2 * ROUNDS));
}

#[tokio::test]
async fn a_ledger_that_is_opened_again_holds_its_results_whoever_changed_a_copy() {
    let (_folder, path) = file();
    let mut copy = {
        let ledger = Ledger::open(&path).unwrap();
        ledger.commit(Some("k"), &reservation("acme", 2)).unwrap().result
    };
    copy["quantity"] = 99.into();
    let ledger = Ledger::open(&path).unwrap();
    let again = ledger.commit(Some("k"), &reservation("acme", 2)).unwrap();
    assert_eq!((&again.result["quantity"], again.replayed, again.executions), (&json!(2), true, 1));
    assert_eq!(ledger.reconcile("k").unwrap(), Some(("reserve_inventory".to_owned(), again.result)));
    let other = ledger.commit(Some("k"), &reservation("other", 2));
    assert!(matches!(other, Err(Error::KeyMismatch)), "{other:?}");
}

#[tokio::test]
async fn a_server_on_the_file_of_another_goes_on_with_its_counts() {
    let (_folder, path) = file();
    for replays in 0..2 {
        let (address, handle) = Server::start_on((Ipv4Addr::LOCALHOST, 0).into(), &path).await.unwrap();
        let client = Client::new(address, "/mcp");
        assert_eq!(handle.stats().tool("charge").executions, replays, "before any call");
        keyed(&client, "charge", order(5), "k").await.unwrap();
        let seen = handle.stats().tool("charge");
        assert_eq!((seen.executions, seen.replays), (1, replays));
    }
}

#[tokio::test]
async fn a_search_that_was_cut_goes_on_after_its_token() {
    let (client, handle) = start().await;
    handle.control(&json!({ "fault": { "tool": "search", "cut_after": 2 } })).unwrap();
    let mut answer = client.call(1, "search", json!({ "q": "x", "step_ms": 1 }), true).await.unwrap();
    let mut last = Value::Null;
    while let Ok(Some(message)) = answer.message().await {
        assert_eq!(message["params"]["total"], 4);
        last = message["params"].clone();
    }
    assert_eq!(last["progress"], 2, "all that came before the cut came");
    let token = &last["_meta"]["oz0/resume"];
    let params = json!({ "name": "search", "arguments": { "q": "x", "step_ms": 1 },
        "_meta": { "oz0/resume": { "token": token, "progress": 2 } } });
    let resumed = client.request(2.into(), "tools/call", params).await.unwrap().response().await.unwrap();
    let content = &resumed["result"]["structuredContent"];
    assert_eq!(content, &json!({ "started_after": 2, "hits": ["x, page 3", "x, page 4"] }));
    assert_eq!(resumed["result"]["content"][0]["text"], "searched after page 2: 2 pages");
    assert_eq!(handle.stats().cuts, 1);
}

#[tokio::test]
async fn a_flood_says_in_between_how_far_it_is_where_the_client_wants_a_log() {
    let (client, _handle) = start().await;
    for (level, logs) in [(json!("info"), 2), (Value::Null, 0)] {
        let mut meta = json!({ "progressToken": 1 });
        if !level.is_null() {
            meta["io.modelcontextprotocol/logLevel"] = level;
        }
        let params = json!({ "name": "flood", "arguments": { "events": 4, "log_every": 2 }, "_meta": meta });
        let mut answer = client.request(1.into(), "tools/call", params).await.unwrap();
        let mut seen = 0;
        while let Some(message) = answer.message().await.unwrap() {
            seen += usize::from(message["method"] == "notifications/message");
        }
        assert_eq!(seen, logs);
    }
}

#[tokio::test]
async fn the_folder_of_a_ledger_that_was_not_given_goes_with_the_server() {
    let shared = Shared::open(None).unwrap();
    let folder = shared.folder().unwrap().to_owned();
    assert!(folder.join("ledger.db").exists());
    drop(shared);
    assert!(!folder.exists());
}
