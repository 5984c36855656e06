//! Whatever is lost on the way, no effect is made twice: counted by the demo upstream itself, in its own file, for a tool of
//! each retry class. A conditional call is made again and answered from its server's record; an unsafe one is refused
//! until somebody has reconciled; one that only reads is simply made again.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{fs, net::Ipv4Addr, path::Path, sync::Arc, thread, time::Duration};

use mcp_sidecar::demo::{Handle, Server};
use serde_json::{Value, json};
use support::{
    Client, Post, Sidecar, keyed,
    mcp::{LEGACY, MODERN},
    until,
};
use tempfile::TempDir;
use tokio::{runtime::Runtime, time::Instant};

/// Conditional, unsafe, safe.
const TOOLS: [&str; 3] = ["charge", "charge_unkeyed", "search"];

/// The demo upstream and what it counts.
struct Shop {
    url: String,
    handle: Handle,
    _runtime: Runtime,
    _folder: TempDir,
}

impl Shop {
    fn open() -> Self {
        let (runtime, folder) = (Runtime::new().unwrap(), TempDir::new().unwrap());
        let file = folder.path().join("ledger.db");
        let start = Server::start_on((Ipv4Addr::LOCALHOST, 0).into(), &file);
        let (address, handle) = runtime.block_on(start).unwrap();
        Self { url: format!("http://{address}/mcp"), handle, _runtime: runtime, _folder: folder }
    }

    /// What happens to the next call of a tool.
    fn fault(&self, tool: &str, mut what: Value) {
        what["tool"] = tool.into();
        self.handle.control(&json!({ "fault": what })).unwrap();
    }

    /// How often a tool had its effect.
    fn executions(&self, tool: &str) -> u64 {
        self.handle.stats().tool(tool).executions
    }

    fn started(&self, tool: &str) -> u64 {
        self.handle.stats().tool(tool).started
    }

    /// A sidecar before it that has seen what it lists.
    fn sidecar(&self, more: &str) -> Sidecar {
        let sidecar = Sidecar::with_config(&format!("{more}\n[upstreams.mcp]\nurl = \"{}\"\n", self.url));
        let list = Post::modern("tools/list", None, message("tools/list", &json!({})));
        assert_eq!(sidecar.client().ask(&list).status(), 200);
        sidecar
    }
}

fn message(method: &str, params: &Value) -> String {
    let mut params = params.clone();
    params["_meta"]["io.modelcontextprotocol/protocolVersion"] = MODERN.into();
    params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({});
    json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string()
}

/// A call of a tool, an activity of its own.
fn call(tool: &str) -> Post {
    let arguments = match tool {
        "search" => json!({ "q": "x", "step_ms": 1 }),
        _ => json!({ "order_id": "o-1", "amount": 5 }),
    };
    let body = message("tools/call", &json!({ "name": tool, "arguments": arguments }));
    Post::modern("tools/call", Some(tool), body).field("Oz0-Job", "job").field("Oz0-Activity", tool)
}

fn ask(sidecar: &Sidecar, post: &Post) -> Value {
    keyed::message(&sidecar.client().ask(post))
}

/// Asks until the attempt before has ended.
fn settled(sidecar: &Sidecar, post: &Post) -> Value {
    let mut answer = Value::Null;
    until("the attempt before to have ended", || {
        answer = ask(sidecar, post);
        answer["result"]["_meta"]["oz0/retryable"] != true
    });
    answer
}

fn reason(answer: &Value) -> &str {
    answer["error"]["data"]["reason"].as_str().unwrap_or_default()
}

/// A further attempt of a call whose effect may have been made: what each retry class gets.
#[track_caller]
fn assert_next(shop: &Shop, tool: &str, answer: &Value, made: u64) {
    match tool {
        "charge_unkeyed" => assert_eq!(reason(answer), "outcome_unknown", "{answer}"),
        _ => assert_eq!(answer["result"]["isError"], false, "{answer}"),
    }
    let expected = if tool == "search" { 0 } else { made };
    assert_eq!(shop.executions(tool), expected, "{tool}: {answer}");
}

#[test]
fn when_the_response_is_lost() {
    for results in ["memory", "store", "off"] {
        let shop = Shop::open();
        let sidecar = shop.sidecar(&format!("[ledger]\nresults = \"{results}\""));
        for tool in TOOLS {
            shop.fault(tool, json!({ "lose_response": true }));
            assert_eq!(reason(&ask(&sidecar, &call(tool))), "upstream_failed");
            for _ in 0..3 {
                assert_next(&shop, tool, &settled(&sidecar, &call(tool)), 1);
            }
        }
    }
}

#[test]
fn when_an_attempt_times_out() {
    let shop = Shop::open();
    let sidecar = shop.sidecar("");
    for tool in TOOLS {
        shop.fault(tool, json!({ "delay_ms": 60_000 }));
        let timed_out = ask(&sidecar, &call(tool).field("Oz0-Time-Limit", "3"));
        assert_eq!(reason(&timed_out), "max_timeout");
        // Its work was stopped before it had an effect, which nobody in front of the server can know.
        let made = u64::from(tool == "charge");
        assert_next(&shop, tool, &settled(&sidecar, &call(tool)), made);
    }
}

#[test]
fn when_the_token_is_rotated() {
    let shop = Shop::open();
    let sidecar = shop.sidecar("");
    let as_ = |tool: &str, token: &str| call(tool).field("Authorization", &format!("Bearer {token}"));
    for tool in TOOLS {
        assert_eq!(ask(&sidecar, &as_(tool, "old"))["result"]["isError"], false);
        let next = ask(&sidecar, &as_(tool, "new"));
        match tool {
            "charge_unkeyed" => assert_eq!(reason(&next), "already_done"),
            _ => assert_eq!(next["result"]["isError"], false, "{next}"),
        }
        assert_eq!(shop.executions(tool), u64::from(tool != "search"));
    }
}

#[test]
fn when_the_result_has_expired() {
    for results in ["memory", "store"] {
        let shop = Shop::open();
        let sidecar = shop.sidecar(&format!("[ledger]\nresults = \"{results}\"\nttl = \"500ms\""));
        for tool in TOOLS {
            assert_eq!(ask(&sidecar, &call(tool))["result"]["isError"], false);
        }
        until("the unsafe call's result to have expired", || {
            reason(&ask(&sidecar, &call("charge_unkeyed"))) == "already_done"
        });
        until("the conditional call to be made again", || {
            ask(&sidecar, &call("charge"));
            shop.started("charge") > 1
        });
        assert_eq!([shop.executions("charge"), shop.executions("charge_unkeyed")], [1, 1], "{results}");
    }
}

#[test]
fn when_the_ledger_is_full() {
    let shop = Shop::open();
    let sidecar = shop.sidecar("[ledger]\nmax_keys = 1");
    assert_eq!(ask(&sidecar, &call("charge_unkeyed"))["result"]["isError"], false);
    for tool in ["charge", "search"] {
        for _ in 0..3 {
            let busy = ask(&sidecar, &call(tool));
            assert_eq!(busy["result"]["_meta"]["oz0/retryable"], true, "{busy}");
        }
        assert_eq!(shop.started(tool), 0, "nothing was sent");
    }
    assert_eq!(
        ask(&sidecar, &call("charge_unkeyed"))["result"]["isError"],
        false,
        "what is known is replayed"
    );
    assert_eq!(shop.executions("charge_unkeyed"), 1);
}

#[test]
fn when_the_store_goes_in_the_middle_of_a_call() {
    let shop = Shop::open();
    let folder = TempDir::new().unwrap();
    let (here, away) = (folder.path().join("state"), folder.path().join("away"));
    let sidecar = Arc::new(shop.sidecar(&format!("state = \"sqlite:{}\"", here.join("state.db").display())));
    for tool in TOOLS {
        shop.fault(tool, json!({ "delay_ms": 300 }));
        let before = shop.started(tool);
        let asking = thread::spawn({
            let sidecar = sidecar.clone();
            move || ask(&sidecar, &call(tool))
        });
        until("the call to have come", || shop.started(tool) > before);
        fs::rename(&here, &away).unwrap();
        let first = asking.join().unwrap();
        assert_eq!(first["result"]["isError"], false, "it is delivered all the same: {first}");
        assert_eq!(ask(&sidecar, &call(tool))["result"]["_meta"]["oz0/retryable"], true);
        fs::rename(&away, &here).unwrap();
        let next = settled(&sidecar, &call(tool));
        assert_eq!(next["result"]["isError"], false, "committed after all: {next}");
        assert_eq!(shop.executions(tool), u64::from(tool != "search"));
    }
}

/// A legacy session with the server, through the sidecar.
fn session(sidecar: &Sidecar) -> String {
    let params = json!({ "protocolVersion": LEGACY, "capabilities": {}, "clientInfo": { "name": "t", "version": "1" } });
    let body = json!({ "jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params });
    let opened = sidecar.client().ask(&Post::new(body.to_string()));
    let session = opened.head.field("mcp-session-id").expect("a session").to_owned();
    let ready = Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    assert_eq!(sidecar.client().ask(&ready.field("Mcp-Session-Id", &session)).status(), 202);
    session
}

/// The same call in a legacy session: there a connection that ends stops no work.
fn legacy(tool: &str, session: &str) -> Post {
    let body: Value = serde_json::from_slice(&call(tool).body).unwrap();
    let params = json!({ "name": tool, "arguments": body["params"]["arguments"] });
    let body = json!({ "jsonrpc": "2.0", "id": tool, "method": "tools/call", "params": params });
    let post = Post::new(body.to_string()).field("MCP-Protocol-Version", LEGACY);
    post.field("Mcp-Session-Id", session)
        .field("Oz0-Job", "job")
        .field("Oz0-Activity", &format!("dead-{tool}"))
}

/// Nobody else writes to the file until this is dropped.
fn lock(file: &Path) -> rusqlite::Connection {
    let other = rusqlite::Connection::open(file).unwrap();
    other.busy_timeout(support::BOUND).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    other
}

#[test]
fn when_the_sidecar_dies_before_the_effect_or_between_the_effect_and_the_commit() {
    let shop = Shop::open();
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("state.db");
    let start = || shop.sidecar(&format!("state = \"sqlite:{}\"", file.display()));
    let mut sidecar = start();
    let session = session(&sidecar);
    // What this asks is never answered.
    let send = |sidecar: &Sidecar, post: &Post| -> Client {
        let node = sidecar.client();
        node.send(post);
        node
    };
    let order = ["charge", "charge_unkeyed"];
    order.iter().for_each(|tool| shop.fault(tool, json!({ "delay_ms": 1000 })));
    let mut nodes = Vec::from(order.map(|tool| send(&sidecar, &legacy(tool, &session))));
    until("the legacy calls to have come", || order.iter().all(|tool| shop.started(tool) == 1));
    order.iter().for_each(|tool| shop.fault(tool, json!({ "delay_ms": 200 })));
    nodes.extend(order.map(|tool| send(&sidecar, &call(tool))));
    until("the modern calls to have come", || order.iter().all(|tool| shop.started(tool) == 2));
    let held = lock(&file);
    until("the effects of the modern calls", || order.iter().all(|tool| shop.executions(tool) >= 1));
    sidecar.signal("KILL");
    sidecar.wait_exit();
    drop(held);
    // The legacy ones go on without it, and the modern ones have ended, one way or the other.
    until("the calls to have ended", || {
        let ended = |tool: &str| shop.handle.stats().tool(tool);
        order.map(ended).iter().all(|calls| calls.finished + calls.cancelled == 2)
    });
    let made = shop.executions("charge_unkeyed");
    assert!(made >= 1);
    let sidecar = start();
    for tool in order {
        for post in [call(tool), legacy(tool, &session)] {
            let next = free(&sidecar, &post);
            match tool {
                "charge_unkeyed" => assert_eq!(reason(&next), "outcome_unknown", "{next}"),
                _ => assert_eq!(next["result"]["isError"], false, "{next}"),
            }
        }
    }
    assert_eq!(shop.executions("charge"), 2, "each once");
    assert_eq!(shop.executions("charge_unkeyed"), made, "none again");
}

/// Asks until no attempt runs: the lease of one whose sidecar died has to run out first.
fn free(sidecar: &Sidecar, post: &Post) -> Value {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let answer = ask(sidecar, post);
        if answer["result"]["_meta"]["oz0/retryable"] != true {
            return answer;
        }
        assert!(Instant::now() < end, "blocked for longer than 30 s");
        thread::sleep(Duration::from_millis(200));
    }
}
