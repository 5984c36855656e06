//! The ten requirements of the reliability lesson's practice lab, `reserve_inventory` with a durable ledger: a real sidecar
//! in front of the demo upstream, whose own counters and whose own file say what was done. Where the sidecar would answer
//! by itself, the server is asked directly as well: both have to hold.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

use mcp_sidecar::demo::{Handle, Server, Snapshot, ledger::Ledger};
use serde_json::{Value, json};
use support::{Client, Post, Sidecar, http::Response, mcp::MODERN, sse};
use tempfile::TempDir;
use tokio::runtime::Runtime;

const TOOL: &str = "reserve_inventory";
const KEY: &str = "checkout-7";
const WIDGET: &str = "inventory://widget";
/// Keys that two connections race with: one alone may miss the moment.
const ROUNDS: u64 = 40;
/// The sidecar does not answer from its own record: an attempt reaches the server.
const FORGETS: &str = "[ledger]\nresults = \"off\"\n";

/// A ledger file and the servers on it.
struct Lab {
    runtime: Runtime,
    _folder: TempDir,
    path: PathBuf,
}

/// One demo upstream.
struct Shop {
    address: SocketAddr,
    handle: Handle,
}

impl Lab {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("ledger.db");
        Self { runtime: Runtime::new().unwrap(), _folder: folder, path }
    }

    /// A server on the lab's file, with a connection of its own.
    fn open(&self) -> Shop {
        let start = Server::start_on((Ipv4Addr::LOCALHOST, 0).into(), &self.path);
        let (address, handle) = self.runtime.block_on(start).unwrap();
        Shop { address, handle }
    }

    /// How much of the widgets is reserved, as the file says.
    fn reserved(&self) -> u64 {
        Ledger::open(&self.path).unwrap().stock().unwrap()["widget"].1
    }

    /// How many reservations were made, as the file says.
    fn executions(&self) -> u64 {
        let counted = Ledger::open(&self.path).unwrap().executions().unwrap();
        counted.get(TOOL).copied().unwrap_or_default()
    }
}

impl Shop {
    fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }

    fn stats(&self) -> Snapshot {
        self.handle.stats()
    }

    fn asked(&self) -> u64 {
        self.stats().tool(TOOL).started
    }

    /// The next reservation is made, its response lost.
    fn lose_response(&self) {
        self.handle.control(&json!({ "fault": { "tool": TOOL, "lose_response": true } })).unwrap();
    }

    /// A call past the sidecar.
    fn ask(&self, params: &Value) -> Value {
        let client = Client::connect(&self.address.to_string());
        last(&client.ask(&post("tools/call", params).at("/mcp")))
    }
}

/// A sidecar before these servers, at `/shop0` and on, which has seen what they list.
fn sidecar(shops: &[&Shop], more: &str) -> Sidecar {
    let mut config = more.to_owned();
    for (number, shop) in shops.iter().enumerate() {
        config += &format!(
            "[upstreams.shop{number}]\nurl = \"{}\"\n[upstreams.shop{number}.listen]\nreconnect = false\n",
            shop.url()
        );
    }
    let sidecar = Sidecar::with_config(&config);
    for number in 0..shops.len() {
        let listed = sidecar.client().ask(&post("tools/list", &json!({})).at(&format!("/shop{number}")));
        assert_eq!(listed.status(), 200);
    }
    sidecar
}

/// A modern request.
fn post(method: &str, params: &Value) -> Post {
    let mut params = params.clone();
    params["_meta"]["io.modelcontextprotocol/protocolVersion"] = MODERN.into();
    params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({});
    let name = ["name", "uri"].into_iter().find_map(|member| params[member].as_str()).map(str::to_owned);
    let body = json!({ "jsonrpc": "2.0", "id": 7, "method": method, "params": params });
    Post::modern(method, name.as_deref(), body.to_string()).at("/shop0")
}

/// The response: the JSON body, or the last event.
fn last(response: &Response) -> Value {
    if response.head.field("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")) {
        return sse::read(&response.body).events.last().expect("an event").json();
    }
    response.json()
}

fn reservation(tenant: &str, sku: &str, quantity: u64) -> Value {
    json!({ "tenant": tenant, "sku": sku, "quantity": quantity })
}

/// `params` of a call, under a key that the node makes.
fn keyed(tool: &str, arguments: &Value, key: &str) -> Value {
    json!({ "name": tool, "arguments": arguments, "_meta": { "oz0/idempotency_key": key } })
}

fn ours() -> Value {
    keyed(TOOL, &reservation("acme", "widget", 2), KEY)
}

/// A call through the sidecar.
fn ask(sidecar: &Sidecar, params: &Value) -> Value {
    settled(sidecar, &post("tools/call", params))
}

/// The answer to a call. While the attempt before is not settled it is busy: then it is sent again when it says.
fn settled(sidecar: &Sidecar, post: &Post) -> Value {
    loop {
        let answer = last(&sidecar.client().ask(post));
        let Some(wait) = answer["result"]["_meta"]["oz0/retry_after"].as_u64() else { return answer };
        thread::sleep(Duration::from_secs(wait));
    }
}

fn reconciled(sidecar: &Sidecar, key: &str) -> Value {
    let found = ask(sidecar, &json!({ "name": "reconcile", "arguments": { "key": key } }));
    found["result"]["structuredContent"].clone()
}

fn receipt(response: &Value) -> Value {
    response["result"]["structuredContent"].clone()
}

/// The inventory's record, from the authoritative method.
fn inventory(sidecar: &Sidecar) -> Value {
    let read = last(&sidecar.client().ask(&post("resources/read", &json!({ "uri": WIDGET }))));
    serde_json::from_str(read["result"]["contents"][0]["text"].as_str().unwrap()).unwrap()
}

fn assert_refused_by_the_sidecar(response: &Value) {
    let error = &response["error"];
    assert_eq!((&error["code"], &error["data"]["reason"]), (&json!(1422), &json!("key_mismatch")));
    assert_eq!(error["data"]["outcome"], "not_sent");
}

/// An error that says that nobody knows what was done.
fn assert_unknown(response: &Value) {
    let data = &response["error"]["data"];
    assert_eq!((&data["reason"], &data["outcome"]), (&json!("upstream_failed"), &json!("unknown")));
}

#[test]
fn requirement_1_the_key_binds_sku_quantity_tenant_and_operation() {
    let lab = Lab::new();
    let shop = lab.open();
    let sidecar = sidecar(&[&shop], "");
    assert_eq!(ask(&sidecar, &ours())["result"]["isError"], false);
    let others = [
        keyed(TOOL, &reservation("acme", "gadget", 2), KEY),
        keyed(TOOL, &reservation("acme", "widget", 3), KEY),
        keyed(TOOL, &reservation("other", "widget", 2), KEY),
        keyed("charge", &json!({ "order_id": "o-1", "amount": 2 }), KEY),
    ];
    for other in &others {
        assert_refused_by_the_sidecar(&ask(&sidecar, other));
        assert_eq!(shop.ask(other)["result"]["isError"], true, "{other}");
    }
    let seen = shop.stats();
    assert_eq!((seen.tool(TOOL).executions, seen.tool(TOOL).refusals), (1, 3));
    assert_eq!((seen.tool("charge").executions, seen.tool("charge").refusals), (0, 1));
}

#[test]
fn requirement_2_a_retry_with_the_same_key_and_arguments_returns_the_first_reservation() {
    let lab = Lab::new();
    let shop = lab.open();
    let remembering = sidecar(&[&shop], "");
    let first = ask(&remembering, &ours());
    let again = ask(&remembering, &ours());
    assert_eq!(again["result"], first["result"]);
    assert_eq!(shop.asked(), 1, "the sidecar answered from its own record");
    assert_eq!(remembering.wait_line(|line| line["replayed"] == true)["key"], KEY);

    let forgetting = sidecar(&[&shop], FORGETS);
    for _ in 0..2 {
        assert_eq!(ask(&forgetting, &ours())["result"], first["result"]);
    }
    let seen = shop.stats().tool(TOOL);
    assert_eq!((seen.executions, seen.replays), (1, 2), "the server answered from its own");
    assert_eq!(forgetting.wait_line(|line| line["attempt"] == 2)["retry_class"], "conditional");
    assert_eq!(lab.reserved(), 2);
}

#[test]
fn requirement_3_a_retry_with_a_changed_quantity_fails_without_another_reservation() {
    let lab = Lab::new();
    let shop = lab.open();
    let sidecar = sidecar(&[&shop], FORGETS);
    ask(&sidecar, &ours());
    let changed = keyed(TOOL, &reservation("acme", "widget", 3), KEY);
    assert_refused_by_the_sidecar(&ask(&sidecar, &changed));
    assert_eq!(shop.asked(), 1, "nothing was sent");
    assert_eq!(shop.ask(&changed)["result"]["isError"], true);
    assert_eq!((lab.executions(), lab.reserved()), (1, 2));
}

#[test]
fn requirement_4_an_execution_that_committed_but_lost_its_response_is_reconciled_by_key() {
    let lab = Lab::new();
    let shop = lab.open();
    let sidecar = sidecar(&[&shop], "");
    assert_eq!(reconciled(&sidecar, KEY), json!({ "committed": false }));
    shop.lose_response();
    assert_unknown(&ask(&sidecar, &ours()));
    assert_eq!(shop.asked(), 1, "the sidecar makes nothing again by itself");
    let found = reconciled(&sidecar, KEY);
    assert_eq!((&found["committed"], &found["operation"]), (&json!(true), &json!(TOOL)));
    assert_eq!(found["result"]["quantity"], 2);
    let answered = ask(&sidecar, &ours());
    assert_eq!(receipt(&answered), found["result"], "the node's own retry finds the same");
    let seen = shop.stats().tool(TOOL);
    assert_eq!((seen.executions, seen.replays), (1, 1));
}

#[test]
fn requirement_5_the_result_records_no_secret_or_payment_data() {
    let lab = Lab::new();
    let shop = lab.open();
    let sidecar = sidecar(&[&shop], "");
    let (token, card) = ("a-secret-token", "4111111111111111");
    let mut params = ours();
    params["_meta"]["example/payment"] = json!({ "card": card });
    let call = post("tools/call", &params).field("Authorization", &format!("Bearer {token}"));
    let made = last(&sidecar.client().ask(&call));
    let members: Vec<_> = made["result"]["structuredContent"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(members, ["quantity", "reservation", "sku", "tenant"]);

    let mut paying = reservation("acme", "widget", 1);
    paying["card"] = card.into();
    assert_eq!(ask(&sidecar, &keyed(TOOL, &paying, "checkout-8"))["result"]["isError"], true);
    assert_eq!(lab.executions(), 1);
    for file in fs::read_dir(lab.path.parent().unwrap()).unwrap() {
        let bytes = fs::read(file.unwrap().path()).unwrap();
        for secret in [token, card] {
            assert!(!bytes.windows(secret.len()).any(|part| part == secret.as_bytes()), "{secret}");
        }
    }
    assert_eq!(reconciled(&sidecar, KEY)["result"], made["result"]["structuredContent"]);
}

#[test]
fn requirement_6_automatic_retry_is_disabled_when_the_client_gave_no_key() {
    let lab = Lab::new();
    let shop = lab.open();
    let sidecar = sidecar(&[&shop], "");
    let unkeyed = json!({ "name": TOOL, "arguments": reservation("acme", "widget", 2) });
    shop.lose_response();
    assert_unknown(&ask(&sidecar, &unkeyed));
    let line = sidecar.wait_line(|line| line["rpc"] == "tools/call");
    assert_eq!((&line["key"], &line["attempt"]), (&Value::Null, &Value::Null), "no key is invented");
    assert_eq!((shop.asked(), lab.executions()), (1, 1), "no second attempt was made");

    // What the client sends once more is another reservation: nobody can know that it was meant as the same.
    assert_eq!(ask(&sidecar, &unkeyed)["result"]["isError"], false);
    assert_eq!((shop.asked(), lab.executions(), lab.reserved()), (2, 2, 4));

    // With an identity, but at a server that takes no key: its second attempt is not even sent.
    let order = json!({ "order_id": "o-1", "amount": 500 });
    let charge = post("tools/call", &json!({ "name": "charge_unkeyed", "arguments": order }));
    let charge = charge.field("Oz0-Job", "job").field("Oz0-Activity", "charge");
    shop.handle.control(&json!({ "fault": { "tool": "charge_unkeyed", "lose_response": true } })).unwrap();
    assert_unknown(&settled(&sidecar, &charge));
    let refused = settled(&sidecar, &charge);
    assert_eq!(refused["error"]["data"]["reason"], "outcome_unknown");
    assert_eq!(shop.stats().tool("charge_unkeyed").executions, 1);
}

#[test]
fn requirement_7_after_a_subscription_drop_the_inventory_is_refetched_before_anything_is_decided() {
    let lab = Lab::new();
    let shop = lab.open();
    let sidecar = sidecar(&[&shop], "");
    let listening = sidecar.client();
    let filter = json!({ "resourceSubscriptions": [WIDGET] });
    listening.send(&post("subscriptions/listen", &json!({ "notifications": filter })));
    let acknowledged = listening.events(1).remove(0).json();
    assert_eq!(acknowledged["params"]["notifications"], filter);
    let before = inventory(&sidecar);
    assert_eq!(before["reserved"], 0);

    // The drop comes first: what changes after it is told to nobody.
    shop.handle.control(&json!({ "listen": { "drop": true } })).unwrap();
    let ended = sse::read(&listening.response().body);
    assert_eq!(ended.events.len(), 1, "neither an update nor the final response came");
    shop.lose_response();
    assert_unknown(&ask(&sidecar, &ours()));

    // So the node refetches, and sees that its reservation stands: nothing is to be made again.
    let now = inventory(&sidecar);
    assert_eq!((&now["reserved"], &now["available"]), (&json!(2), &json!(98)));
    assert_eq!(reconciled(&sidecar, KEY)["committed"], true);
    let seen = shop.stats();
    assert_eq!((seen.tool(TOOL).executions, seen.listens, seen.listen_drops), (1, 1, 1));
}

#[test]
fn requirement_8_two_ledger_connections_that_get_one_key_at_once_commit_one_reservation() {
    let lab = Lab::new();
    let (left, right) = (lab.open(), lab.open());
    let sidecar = sidecar(&[&left, &right], "");
    let barrier = Arc::new(Barrier::new(2));
    let racing = ["/shop0", "/shop1"].map(|path| {
        // Another upstream is another ledger entry of the sidecar's: both calls are sent.
        let (client, barrier) = (sidecar.client(), Arc::clone(&barrier));
        thread::spawn(move || {
            let round = |round| {
                let arguments = reservation("acme", "widget", 2);
                let post =
                    post("tools/call", &keyed(TOOL, &arguments, &format!("checkout-{round}"))).at(path);
                barrier.wait();
                receipt(&last(&client.ask(&post)))
            };
            (1..=ROUNDS).map(round).collect::<Vec<_>>()
        })
    });
    let [one, other] = racing.map(|thread| thread.join().unwrap());
    assert_eq!(one, other);
    let numbers = one.iter().map(|made| made["reservation"].as_str().unwrap());
    assert!(numbers.eq((1..=ROUNDS).map(|round| format!("rs-{round}"))), "{one:?}");
    assert_eq!((lab.executions(), lab.reserved()), (ROUNDS, 2 * ROUNDS));
    let (left, right) = (left.stats().tool(TOOL), right.stats().tool(TOOL));
    assert_eq!((left.started, right.started, left.replays + right.replays), (ROUNDS, ROUNDS, ROUNDS));
}

#[test]
fn requirement_9_a_changed_copy_of_the_first_reservation_changes_no_replay() {
    let lab = Lab::new();
    let shop = lab.open();
    for more in ["", FORGETS] {
        let sidecar = sidecar(&[&shop], more);
        let mut first = ask(&sidecar, &ours());
        first["result"]["structuredContent"]["quantity"] = 99.into();
        first["result"]["structuredContent"]["reservation"] = "rs-99".into();
        let kept = json!({ "reservation": "rs-1", "tenant": "acme", "sku": "widget", "quantity": 2 });
        assert_eq!(receipt(&ask(&sidecar, &ours())), kept);
        assert_eq!(reconciled(&sidecar, KEY)["result"], kept);
    }
    assert_eq!(lab.executions(), 1);
}

#[test]
fn requirement_10_a_ledger_that_is_closed_and_opened_again_is_reconciled_by_key() {
    let lab = Lab::new();
    let shop = lab.open();
    let before = sidecar(&[&shop], "");
    shop.lose_response();
    assert_unknown(&ask(&before, &ours()));
    drop((before, shop));

    let shop = lab.open();
    let after = sidecar(&[&shop], "");
    assert_eq!(shop.stats().tool(TOOL).executions, 1, "the counter is in the file");
    let found = reconciled(&after, KEY);
    assert_eq!((&found["committed"], &found["result"]["reservation"]), (&json!(true), &json!("rs-1")));
    assert_eq!(receipt(&ask(&after, &ours())), found["result"]);
    let seen = shop.stats().tool(TOOL);
    assert_eq!((seen.executions, seen.replays), (1, 1));
}
