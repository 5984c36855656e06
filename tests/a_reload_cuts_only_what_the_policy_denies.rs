//! A reload takes new settings for what begins after it; what is in flight goes on under what it
//! began with, also when its upstream is gone, except calls that the new policy denies (they are told
//! `policy`, and a legacy server is told too). Section 10: a call that the policy denies is answered and not sent.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        RwLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
};

use serde_json::{Value, json};
use support::{
    BOUND, Client, Gate, Over, Post, Request, Sidecar, Upstream,
    http::Response,
    mcp::{MODERN, progress, result},
    sse,
};
use tokio::time::Instant;

fn replace(file: &Path, text: &str) {
    let aside = file.with_extension("aside");
    fs::write(&aside, text).unwrap();
    fs::rename(aside, file).unwrap();
}

fn with_file(text: &str) -> (Sidecar, PathBuf) {
    let sidecar = Sidecar::with_config(text);
    let file = sidecar.folder().path().join("sidecar.toml");
    (sidecar, file)
}

/// Waits until stderr has `count` lines that contain `text`.
/// Reloads and waits until it is done, the `number`th time.
fn reload(sidecar: &Sidecar, file: &Path, text: &str, number: usize) {
    replace(file, text);
    sidecar.signal("HUP");
    sidecar.wait_said("configuration reloaded", number);
}

fn table(name: &str, upstream: &Upstream, more: &str) -> String {
    format!("[upstreams.{name}]\nurl = \"{}\"\n{more}\n", upstream.url())
}

fn call(id: u32, tool: &str) -> Post {
    let body = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": tool, "arguments": {},
        "_meta": {"progressToken": id}}});
    Post::legacy(body.to_string())
}

fn modern_call(id: u32, tool: &str) -> Post {
    let body = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": tool, "arguments": {},
        "_meta": {"progressToken": id, "io.modelcontextprotocol/protocolVersion": MODERN}}});
    Post::modern("tools/call", Some(tool), body.to_string())
}

fn is_held(request: &Request) -> bool {
    request.head.field("x-hold").is_some()
}

/// Answers held calls with a stream of one event (`sse`) or with no head yet (`json`), and the result when the gate
/// opens; what has no id with 202; the rest at once.
fn holding(gate: &Gate) -> Upstream {
    let gate = gate.clone();
    Upstream::start(move |request, reply| {
        let Ok(body) = serde_json::from_slice::<Value>(&request.body) else {
            return reply.json(200, &[], "{}");
        };
        if body.get("id").is_none() && !body.is_array() {
            return reply.head(202, &[("Content-Length", "0")]);
        }
        let id = &body["id"];
        if request.head.field("x-hold") == Some("sse") {
            reply.sse(&[]);
            reply.event(&progress(id, 1));
            gate.pass();
            reply.event(&result(id));
            return reply.end();
        }
        if is_held(request) {
            gate.pass();
        }
        reply.json(200, &[], &result(id));
    })
}

fn denied(error: &Value, id: u32, outcome: &str) {
    assert_eq!((&error["id"], &error["error"]["code"]), (&id.into(), &1403.into()), "{error}");
    let data = &error["error"]["data"];
    assert_eq!((&data["source"], &data["reason"]), (&"mcp-sidecar".into(), &"policy".into()), "{error}");
    assert_eq!(data["outcome"], outcome, "{error}");
}

#[test]
fn a_denied_call_is_answered_and_not_sent() {
    let upstream = holding(&Gate::new());
    let config = table("mcp", &upstream, "policy = { allow = [\"get_*\", \"pay\"], deny = [\"*_secret\"] }");
    let (sidecar, _) = with_file(&config);
    for (id, tool) in [(1, "pays"), (2, "get_secret"), (3, "Get_x")] {
        for post in [call(id, tool), modern_call(id, tool)] {
            let answer = sidecar.client().ask(&post);
            assert_eq!(answer.status(), 200);
            denied(&answer.json(), id, "not_sent");
            let event = sidecar.client().ask(&post.field("Accept", "text/event-stream"));
            denied(&sse::read(&event.body).events[0].json(), id, "not_sent");
        }
        let line = sidecar.wait_line(|line| line["id"] == id);
        let told = ["outcome", "reason", "status", "tool"].map(|name| line[name].clone());
        assert_eq!(json!(told), json!(["refused", "policy", 200, tool]));
    }
    assert_eq!(upstream.count(), 0);
    for (id, tool) in [(4, "get_x"), (5, "pay"), (6, "get_")] {
        assert_eq!(sidecar.client().ask(&call(id, tool)).text(), result(id));
    }
    let other = Post::legacy(r#"{"jsonrpc":"2.0","id":7,"method":"tools/list","params":{"name":"pays"}}"#);
    assert_eq!(sidecar.client().ask(&other).text(), result(7), "the policy is about calls");
}

/// A batch of a call of each tool.
fn batch(tools: &[&str]) -> Post {
    let calls = (1..).zip(tools).map(|(id, tool)| String::from_utf8(call(id, tool).body).unwrap());
    let list = r#"{"jsonrpc":"2.0","id":90,"method":"tools/list"}"#.to_owned();
    let all: Vec<String> = calls.chain([list]).collect();
    Post::legacy(format!("[{}]", all.join(","))).field("MCP-Protocol-Version", "2025-03-26")
}

#[test]
fn a_batch_with_a_denied_tool_is_refused_whole() {
    let upstream = Upstream::json("[]");
    let (sidecar, _) = with_file(&table("mcp", &upstream, "policy.deny = [\"pay\"]"));
    let answers = sidecar.client().ask(&batch(&["a", "pay", "b"])).json();
    assert_eq!(answers.as_array().unwrap().len(), 4);
    for (answer, id) in answers.as_array().unwrap().iter().zip([1, 2, 3, 90]) {
        denied(answer, id, "not_sent");
    }
    assert_eq!(upstream.count(), 0);
    assert_eq!(sidecar.client().ask(&batch(&["a", "b"])).text(), "[]");
}

fn held(sidecar: &Sidecar, upstream: &Upstream, post: Post, how: &str) -> Client {
    let client = sidecar.client();
    let post = post.field("X-Hold", how);
    client.send(&post);
    if how == "sse" {
        client.events(1);
    }
    upstream.wait_request_where(|request| request.body == post.body);
    client
}

fn error_of(response: &Response, how: &str) -> Value {
    assert_eq!(response.status(), 200);
    match how {
        "sse" => sse::read(&response.body).events.last().unwrap().json(),
        _ => response.json(),
    }
}

#[test]
fn calls_that_the_new_policy_denies_are_cut_and_no_others() {
    let gate = Gate::new();
    let upstream = holding(&gate);
    let other = holding(&gate);
    let tables = |policy: &str| table("mcp", &upstream, policy) + &table("other", &other, "");
    let (sidecar, file) = with_file(&tables(""));
    let mut cut = Vec::new();
    let mut kept = Vec::new();
    for (at, how) in ["json", "sse"].into_iter().enumerate() {
        let id = 10 * u32::try_from(at).unwrap();
        cut.push((id + 1, how, held(&sidecar, &upstream, call(id + 1, "pay"), how)));
        cut.push((id + 2, how, held(&sidecar, &upstream, modern_call(id + 2, "pay"), how)));
        kept.push((id + 3, how, held(&sidecar, &upstream, call(id + 3, "get"), how)));
        kept.push((id + 4, how, held(&sidecar, &upstream, modern_call(id + 4, "get"), how)));
        kept.push((id + 5, how, held(&sidecar, &other, call(id + 5, "pay").at("/other"), how)));
    }
    let in_a_batch = held(&sidecar, &upstream, batch(&["get", "pay"]), "json");

    reload(&sidecar, &file, &tables("policy.deny = [\"pay\"]"), 1);
    for (id, how, client) in &cut {
        denied(&error_of(&client.response(), how), *id, "unknown");
        let line = sidecar.wait_line(|line| line["id"] == *id);
        let told = ["outcome", "cancelled_by", "reason", "status"].map(|name| line[name].clone());
        assert_eq!(json!(told), json!(["cancelled", "policy", "policy", 200]), "{line}");
        assert!(line["cancel_ms"].is_number(), "{line}");
        let carrier = upstream.wait_request_where(|r| r.body.starts_with(b"{") && r.json()["id"] == *id);
        upstream.wait_closed(carrier.connection);
    }
    for (answer, id) in in_a_batch.response().json().as_array().unwrap().iter().zip([1, 2, 90]) {
        denied(answer, id, "unknown");
    }
    // The legacy servers are told, once each; in modern the closed stream says it.
    let is_notice =
        |request: &Request| String::from_utf8_lossy(&request.body).contains("notifications/cancelled");
    upstream.wait_requests(is_notice, 2);
    let mut told: Vec<_> = upstream
        .requests()
        .iter()
        .filter(|request| is_notice(request))
        .map(|request| request.json()["params"]["requestId"].as_u64().unwrap())
        .collect();
    told.sort_unstable();
    assert_eq!(told, [1, 11]);
    denied(&sidecar.client().ask(&call(50, "pay")).json(), 50, "not_sent");

    // The scripts of those that were cut wait at it too.
    (0..kept.len() + cut.len() + 1).for_each(|_| gate.open());
    for (id, how, client) in &kept {
        let response = client.response();
        let answer = if *how == "sse" { error_of(&response, how).to_string() } else { response.text() };
        assert_eq!(
            serde_json::from_str::<Value>(&answer).unwrap(),
            serde_json::from_str::<Value>(&result(id)).unwrap()
        );
        assert_eq!(sidecar.wait_line(|line| line["id"] == *id)["outcome"], "ok");
    }
    assert!(!other.requests().iter().any(is_notice));
}

#[test]
fn an_upstream_that_is_taken_out_ends_nothing_that_runs() {
    let gate = Gate::new();
    let (upstream, other) = (holding(&gate), holding(&gate));
    let both = table("mcp", &upstream, "") + &table("other", &other, "");
    let (sidecar, file) = with_file(&both);
    let pending = held(&sidecar, &upstream, call(1, "a"), "json");
    let stream = held(&sidecar, &upstream, call(2, "a"), "sse");
    reload(&sidecar, &file, &table("other", &other, ""), 1);
    assert_eq!(sidecar.client().ask(&call(3, "a")).status(), 404);
    gate.open();
    gate.open();
    assert_eq!(pending.response().text(), result(1));
    assert_eq!(sse::read(&stream.response().body).events.last().unwrap().data, result(2));
    // One that comes back is served again.
    reload(&sidecar, &file, &both, 2);
    assert_eq!(sidecar.client().ask(&call(4, "a")).text(), result(4));
}

#[test]
fn a_hundred_calls_and_their_streams_live_through_twenty_reloads() {
    const NODES: u32 = 10;
    let gate = Gate::new();
    let upstream = holding(&gate);
    let tables = |turn: usize| {
        let limits = format!("[limits]\ncalls = {}\n", 1000 + turn);
        // Another time-out means other connections.
        let more =
            format!("connect_timeout = \"{}s\"\ncalls = 500\npolicy.deny = [\"no{turn}\"]", 5 + turn % 2);
        limits + &table("mcp", &upstream, &more)
    };
    let (sidecar, file) = with_file(&tables(0));
    let streams: Vec<_> = (0..50).map(|id| held(&sidecar, &upstream, call(id, "a"), "sse")).collect();
    let pending: Vec<_> =
        (50..100).map(|id| held(&sidecar, &upstream, modern_call(id, "a"), "json")).collect();
    let (done, asked) = (AtomicBool::new(false), AtomicU32::new(1000));
    thread::scope(|scope| {
        for _ in 0..NODES {
            scope.spawn(|| {
                let client = sidecar.client();
                while !done.load(Ordering::Relaxed) {
                    let id = asked.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(client.ask(&call(id, "a")).text(), result(id));
                }
            });
        }
        for turn in 1..=20 {
            reload(&sidecar, &file, &tables(turn), turn);
        }
        done.store(true, Ordering::Relaxed);
    });
    (0..100).for_each(|_| gate.open());
    for (id, client) in streams.iter().enumerate() {
        let told: Vec<_> = sse::read(&client.response().body).events.into_iter().map(|e| e.data).collect();
        assert_eq!(told, [progress(id, 1), result(id)]);
    }
    for (id, client) in (50..).zip(&pending) {
        assert_eq!(client.response().text(), result(id));
    }
    let all = usize::try_from(asked.load(Ordering::Relaxed)).unwrap() - 1000 + 100;
    assert!(sidecar.wait_lines(all).iter().all(|line| line["outcome"] == "ok"));
}

#[test]
fn a_policy_that_changes_under_load_lets_nothing_through_afterwards() {
    let upstream = holding(&Gate::new());
    let tables = |policy: &str| table("mcp", &upstream, policy);
    let (sidecar, file) = with_file(&tables(""));
    let done = AtomicBool::new(false);
    // Whether the policy is known to deny: calls that begin then say so. It changes only between calls.
    let denies = RwLock::new(false);
    thread::scope(|scope| {
        let over = Over(&done);
        for worker in 0..4 {
            let (sidecar, done, denies) = (&sidecar, &done, &denies);
            scope.spawn(move || {
                let client = sidecar.client();
                while !done.load(Ordering::Relaxed) {
                    let denies = denies.read().unwrap();
                    let post = call(worker, "pay");
                    let post = if *denies { post.field("X-Denied", "1") } else { post };
                    let answer = client.ask(&post);
                    drop(denies);
                    let is_denied = answer.json()["error"]["code"] == 1403;
                    assert!(is_denied || answer.text() == result(worker), "{}", answer.text());
                }
            });
        }
        for turn in 0..10 {
            reload(&sidecar, &file, &tables("policy.deny = [\"pay\"]"), 2 * turn + 1);
            *denies.write().unwrap() = true;
            for _ in 0..5 {
                let post = call(9, "pay").field("X-Denied", "1");
                denied(&sidecar.client().ask(&post).json(), 9, "not_sent");
            }
            *denies.write().unwrap() = false;
            reload(&sidecar, &file, &tables(""), 2 * turn + 2);
        }
        drop(over);
    });
    let denied = |request: &&Request| request.head.field("x-denied").is_some();
    assert_eq!(upstream.requests().iter().filter(denied).count(), 0);
    assert!(upstream.count() > 0);
}

#[test]
fn limits_are_those_of_the_newest_file() {
    let gate = Gate::new();
    let upstream = holding(&gate);
    let tables = |limits: &str, calls: usize| {
        format!("[limits]\n{limits}\n{}", table("mcp", &upstream, &format!("calls = {calls}")))
    };
    let (sidecar, file) = with_file(&tables("request_body = \"1KiB\"", 1));
    let large =
        || Post::legacy(format!("{}{}", String::from_utf8(call(2, "a").body).unwrap(), " ".repeat(2048)));
    assert_eq!(sidecar.client().ask(&large()).status(), 413);
    let first = held(&sidecar, &upstream, call(1, "a"), "json");
    assert_eq!(sidecar.client().ask(&call(3, "a")).json()["result"]["isError"], true);
    reload(&sidecar, &file, &tables("request_body = \"8KiB\"", 2), 1);
    assert_eq!(sidecar.client().ask(&large()).text(), result(2));
    // What was in flight goes on being counted.
    let second = held(&sidecar, &upstream, call(4, "a"), "json");
    assert_eq!(sidecar.client().ask(&call(5, "a")).json()["result"]["isError"], true);
    gate.open();
    gate.open();
    assert_eq!((first.response().text(), second.response().text()), (result(1), result(4)));
}

#[test]
fn a_swapped_link_is_a_change_and_a_wrong_file_is_refused_whole() {
    let (one, two) = (Upstream::json(result(1)), Upstream::json(result(2)));
    let folder = tempfile::tempdir().unwrap();
    let version = |name: &str, text: &str| {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join("sidecar.toml"), text).unwrap();
        let aside = folder.path().join("..aside");
        std::os::unix::fs::symlink(name, &aside).unwrap();
        fs::rename(aside, folder.path().join("..data")).unwrap();
    };
    version("..1", &table("one", &one, ""));
    let file = folder.path().join("sidecar.toml");
    std::os::unix::fs::symlink("..data/sidecar.toml", &file).unwrap();
    let state = tempfile::tempdir().unwrap();
    let mut command = Sidecar::command(&state);
    command.arg("--config").arg(&file);
    let sidecar = Sidecar::spawn(command, state);
    version("..2", &(table("one", &one, "") + &table("two", &two, "calls = 0")));
    let said = sidecar.wait_stderr("configuration refused, the old one stays");
    assert!(said.contains("upstreams.two.calls"), "{said}");
    let ask = |path: &str| sidecar.client().ask(&call(1, "a").at(path)).status();
    assert_eq!((ask("/one"), ask("/two")), (200, 404));
    assert_eq!(sidecar.admin("GET", "/readyz").status(), 200, "the old one holds, and serves");
    version("..3", &(table("one", &one, "") + &table("two", &two, "")));
    sidecar.wait_stderr("configuration reloaded");
    assert_eq!((ask("/one"), ask("/two")), (200, 200));
}

#[test]
fn what_waits_for_a_restart_is_named_and_the_rest_holds() {
    let upstream = Upstream::json(result(1));
    // The flags of the tests name the listeners, so they are left out here.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sidecar.toml");
    let text = |ports: &str, more: &str| format!("{ports}{more}{}", table("mcp", &upstream, ""));
    let ports = "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nstate = \"memory:\"\n";
    fs::write(&file, text(ports, "")).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
    command.arg("serve").arg("--config").arg(&file).env_clear();
    let sidecar = Sidecar::spawn(command, folder);
    let other = "listen = \"127.0.0.1:1\"\nadmin = \"\"\nstate = \"sqlite:other.db\"\n";
    reload(&sidecar, &file, &text(other, "[limits]\nrequest_body = \"1KiB\"\n"), 1);
    for key in ["listen", "admin", "state"] {
        let said = sidecar.stderr();
        let named =
            |line: &str| line.contains("takes effect at a restart") && line.contains(&format!("\"{key}\""));
        assert!(said.lines().any(named), "{key}: {said}");
    }
    assert_eq!(sidecar.stderr().matches("takes effect at a restart").count(), 3);
    assert_eq!(sidecar.client().ask(&Post::legacy(" ".repeat(2048))).status(), 413);
    assert_eq!(sidecar.admin("GET", "/healthz").status(), 200);
    assert!(!sidecar.folder().path().join("other.db").exists());
    // The bounds of the store, which was opened with them; those of results in memory follow.
    reload(
        &sidecar,
        &file,
        &text(ports, "[ledger]\nmax_keys = 2\nmax_total = \"1MiB\"\nmax_result = \"1KiB\"\n"),
        2,
    );
    let said = |key: &str| {
        let stderr = sidecar.stderr();
        let lines = stderr.lines().filter(|line| line.contains("takes effect at a restart"));
        lines.filter(|line| line.contains(&format!("\"{key}\""))).count()
    };
    assert_eq!((said("ledger.max_keys"), said("ledger.max_total")), (1, 0));
    let stored = "[ledger]\nmax_keys = 1000000\nmax_total = \"2MiB\"\nresults = \"store\"\n";
    reload(&sidecar, &file, &text(ports, stored), 3);
    assert_eq!((said("ledger.max_keys"), said("ledger.max_total")), (1, 1));
    reload(&sidecar, &file, &text(ports, "[ledger]\nmax_total = \"64MiB\"\nresults = \"store\"\n"), 4);
    assert_eq!(sidecar.stderr().matches("takes effect at a restart").count(), 5);
}

#[test]
fn the_access_log_and_the_level_follow() {
    let upstream = Upstream::json(result(1));
    let text = |log: &str| format!("[log]\n{log}\n{}", table("mcp", &upstream, ""));
    let (mut sidecar, file) = with_file(&text("level = \"info\""));
    sidecar.client().ask(&call(1, "a"));
    sidecar.wait_lines(1);
    reload(&sidecar, &file, &text("level = \"debug\"\naccess = \"one.log\""), 1);
    sidecar.client().ask(&call(2, "a"));
    let log = |name: &str| sidecar.folder().path().join(name);
    let lines = |name: &str, count: usize| {
        let end = Instant::now() + BOUND;
        loop {
            let lines: Vec<Value> = fs::read_to_string(log(name))
                .unwrap_or_default()
                .lines()
                .map(|line| serde_json::from_str(line).unwrap())
                .collect();
            if lines.len() >= count {
                return lines;
            }
            assert!(Instant::now() < end, "{lines:?}");
            thread::yield_now();
        }
    };
    assert_eq!(lines("one.log", 1)[0]["id"], 2);
    // A place where no file can be: the old one stays.
    reload(&sidecar, &file, &text("level = \"debug\"\naccess = \"absent/two.log\""), 2);
    sidecar.wait_stderr("access log is not reopened, the old file stays");
    sidecar.client().ask(&call(3, "a"));
    assert_eq!(lines("one.log", 2)[1]["id"], 3);
    // Diagnostic lines below the old level are there now, and gone again.
    drop(sidecar.client());
    let client = sidecar.client();
    client.write("GET");
    drop(client);
    sidecar.wait_stderr("\"level\":\"DEBUG\"");
    replace(&file, &text("level = \"error\"\naccess = \"stdout\""));
    sidecar.signal("HUP");
    let end = Instant::now() + BOUND;
    while sidecar.lines().len() < 2 {
        sidecar.client().ask(&call(4, "a"));
        assert!(Instant::now() < end);
    }
    assert_eq!(sidecar.stderr().matches("configuration reloaded").count(), 2, "an info line");
    assert_eq!(sidecar.terminate().code(), Some(0));
}

#[test]
fn readiness_and_life_are_told_the_same_through_reloads() {
    let upstream = Upstream::json(result(1));
    let (sidecar, file) = with_file(&table("mcp", &upstream, ""));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = Over(&done);
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for path in ["/healthz", "/readyz"] {
                    assert_eq!(sidecar.admin("GET", path).status(), 200, "{path}");
                }
            }
        });
        for number in 1..=5 {
            reload(&sidecar, &file, &table("mcp", &upstream, &format!("calls = {number}")), number);
        }
        replace(&file, "nonsense = 1\n");
        sidecar.signal("HUP");
        sidecar.wait_stderr("configuration refused, the old one stays");
        drop(over);
    });
    assert_eq!(sidecar.admin("GET", "/readyz").status(), 200);
}
