//! `approve` asks a server of either era for its whole listing and prints the pin, and a sidecar with that pin notices
//! a tool that has changed.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    fs,
    net::Ipv4Addr,
    process::{Command, Output},
};

use mcp_sidecar::{
    config::{Config, Flags},
    listing::{Approval, Listing, RetryClass, tools_of},
};
use serde_json::{Value, json};
use support::{
    Request, Upstream,
    mcp::{LEGACY, MODERN},
    upstream::Reply,
};
use tempfile::TempDir;

/// A run of `approve` with nothing of the test run's environment.
fn approve(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
    command.arg("approve").args(arguments).env_clear().envs(environment.iter().copied());
    command.output().unwrap()
}

fn pin(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", told(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn tool(name: &str) -> Value {
    json!({ "name": name, "description": "does it", "annotations": { "readOnlyHint": true } })
}

/// The result of `tools/list` for this request: two pages, `b` and `a` on the first.
fn two_pages(request: &Value) -> Value {
    match request["params"].get("cursor") {
        None => json!({ "tools": [tool("b"), tool("a")], "nextCursor": "page 2" }),
        Some(cursor) => {
            assert_eq!(cursor, "page 2");
            json!({ "tools": [tool("c")] })
        }
    }
}

fn answer(id: &Value, mut result: Value) -> String {
    result["resultType"] = "complete".into();
    json!({ "jsonrpc": "2.0", "id": id, "result": result }).to_string()
}

/// A server of 2026-07-28 with two pages, the first as JSON, the second as a stream.
fn modern() -> Upstream {
    Upstream::start(|request, reply| {
        let message = request.json();
        assert_eq!(request.head.field("mcp-protocol-version"), Some(MODERN));
        assert_eq!(request.head.all("mcp-method"), ["tools/list"]);
        let meta = &message["params"]["_meta"];
        assert_eq!(meta["io.modelcontextprotocol/protocolVersion"], MODERN);
        assert!(meta["io.modelcontextprotocol/clientCapabilities"].is_object());
        let page = answer(&message["id"], two_pages(&message));
        if message["params"].get("cursor").is_none() {
            return reply.json(200, &[], &page);
        }
        reply.sse(&[]);
        reply.chunk(": ping\r\n\r\n");
        reply
            .event(&json!({ "jsonrpc": "2.0", "method": "notifications/message", "params": {} }).to_string());
        reply.event(&page);
        reply.end();
    })
}

/// A server of 2025-11-25 with two pages, each as a stream: asks for its session, as the SDKs do.
fn legacy() -> Upstream {
    Upstream::start(|request, reply| legacy_script(request, reply, &[("Mcp-Session-Id", "sess-1")]))
}

fn legacy_script(request: &Request, reply: &mut Reply, session: &[(&str, &str)]) {
    if request.method() == "DELETE" {
        return reply.json(200, &[], "");
    }
    let message = request.json();
    if message["method"] == "initialize" {
        assert_eq!(request.head.field("mcp-protocol-version"), None);
        let hello = json!({ "protocolVersion": message["params"]["protocolVersion"], "capabilities": {},
                            "serverInfo": { "name": "old", "version": "1" } });
        return reply.json(
            200,
            session,
            &json!({ "jsonrpc": "2.0", "id": message["id"], "result": hello }).to_string(),
        );
    }
    if request.head.field("mcp-session-id") != session.first().map(|(_, id)| *id)
        || request.head.field("mcp-protocol-version") != Some(LEGACY)
    {
        let error = json!({ "code": -32600, "message": "Bad Request: Missing session ID" });
        let body = json!({ "jsonrpc": "2.0", "id": "server-error", "error": error });
        return reply.json(400, &[], &body.to_string());
    }
    if message["method"] == "notifications/initialized" {
        return reply.json(202, &[], "");
    }
    assert!(message["params"].get("_meta").is_none());
    reply.sse(&[]);
    reply.event(&json!({ "jsonrpc": "2.0", "id": message["id"], "result": two_pages(&message) }).to_string());
    reply.end();
}

#[test]
fn all_pages_of_a_modern_server_are_pinned_in_the_order_of_names() {
    let server = modern();
    let output = approve(&[&server.url()], &[]);
    let pin = pin(&output);
    assert_eq!(pin["upstream"], server.url());
    let names: Vec<_> = pin["tools"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["a", "b", "c"]);
    let listed = json!({ "result": { "tools": [tool("a")] } }).to_string();
    assert_eq!(pin["tools"]["a"].as_str(), tools_of(listed.as_bytes())[0].digest.as_deref());
    assert_eq!(server.count(), 2, "no handshake");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text.lines().count(), 8, "one tool a line: {text}");
}

#[test]
fn a_legacy_server_is_asked_in_a_session_that_is_ended() {
    let server = legacy();
    let listed = pin(&approve(&[&server.url()], &[]));
    assert_eq!(listed["tools"], pin(&approve(&[&modern().url()], &[]))["tools"]);
    let asked: Vec<_> = (0..6).map(|number| server.wait_request(number)).collect();
    let methods: Vec<_> = asked.iter().take(5).map(|request| request.json()["method"].clone()).collect();
    assert_eq!(
        methods,
        ["tools/list", "initialize", "notifications/initialized", "tools/list", "tools/list"]
    );
    assert_eq!(asked[5].method(), "DELETE");
    assert_eq!(asked[5].head.field("mcp-session-id"), Some("sess-1"));
    assert_eq!(server.count(), 6);
}

#[test]
fn a_legacy_server_without_sessions_has_none_to_end() {
    let server = Upstream::start(|request, reply| legacy_script(request, reply, &[]));
    let listed = pin(&approve(&["--era", "legacy", &server.url()], &[]));
    assert_eq!(listed["tools"].as_object().unwrap().len(), 3);
    assert_eq!(server.count(), 4);
}

#[test]
fn the_demo_upstream_is_pinned_alike_in_both_eras() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let start = mcp_sidecar::demo::Server::start((Ipv4Addr::LOCALHOST, 0).into());
    let (address, demo) = runtime.block_on(start).unwrap();
    let url = format!("http://{address}/mcp");
    let modern = pin(&approve(&[&url], &[]));
    let legacy = pin(&approve(&["--era", "legacy", &url], &[]));
    assert_eq!(modern, legacy);
    let names: Vec<_> = modern["tools"].as_object().unwrap().keys().map(String::as_str).collect();
    assert!(["add", "echo", "slow"].iter().all(|name| names.contains(name)), "{names:?}");
    assert_eq!(demo.stats().sessions, 0, "the session was ended");
}

#[test]
fn a_sidecar_with_the_pin_notices_a_tool_that_has_changed() {
    let server = modern();
    let output = approve(&[&server.url()], &[]);
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("up.approved.json"), &output.stdout).unwrap();
    let file = folder.path().join("sidecar.toml");
    fs::write(
        &file,
        format!("[upstreams.up]\nurl = \"{}\"\napproved = \"up.approved.json\"\n", server.url()),
    )
    .unwrap();
    let config = Config::load(&Flags { config: Some(file), ..Flags::default() }, &|_| None).unwrap();
    let settings = config.proxy_settings_over(&mut Default::default()).unwrap();
    let rules = &settings.routes["up"].listing;

    let listing = Listing::default();
    let page = |tools: Value| answer(&json!(1), json!({ "tools": tools })).into_bytes();
    listing.learn("up", &page(json!([tool("a"), tool("b")])));
    let known = listing.known("up", rules, "a");
    assert_eq!((known.class, known.changed), (RetryClass::Safe, false));
    let mut changed = tool("a");
    changed["description"] = "does it, and sends the rest elsewhere".into();
    listing.learn("up", &page(json!([changed, tool("new")])));
    for name in ["a", "new"] {
        let known = listing.known("up", rules, name);
        assert_eq!((known.class, known.changed), (RetryClass::Unsafe, true), "{name}");
    }
    assert!(!listing.known("up", rules, "b").changed);
}

#[test]
fn credentials_come_from_what_a_flag_names_and_are_shown_nowhere() {
    let folder = TempDir::new().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "s3cret-file\n").unwrap();
    let server = modern();
    let url = format!("{}?key=s3cret-query", server.url());
    let first =
        approve(&[&url, "--bearer-env", "TOKEN", "--header", "X-Team: agents"], &[("TOKEN", "s3cret-env")]);
    let second = approve(&[&url, "--bearer-file", token.to_str().unwrap()], &[]);
    let asked = server.wait_request(0);
    assert_eq!(asked.head.field("authorization"), Some("Bearer s3cret-env"));
    assert_eq!(asked.head.field("x-team"), Some("agents"));
    assert!(asked.head.line.contains("?key=s3cret-query"));
    assert_eq!(server.wait_request(2).head.field("authorization"), Some("Bearer s3cret-file"));
    for output in [first, second] {
        assert_eq!(pin(&output)["upstream"], server.url());
        assert!(!format!("{} {}", told(&output), String::from_utf8_lossy(&output.stdout)).contains("s3cret"));
    }
    let refused = approve(&["http://user:s3cret@127.0.0.1:1/mcp"], &[]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(!told(&refused).contains("s3cret"), "{}", told(&refused));
}

#[test]
fn a_server_that_gives_no_listing_is_named_with_what_it_said_and_the_exit_code_is_1() {
    let nobody = approve(&["http://127.0.0.1:1/mcp"], &[]);
    assert!(
        told(&nobody)
            .contains("http://127.0.0.1:1/mcp, asked as a modern client: tools/list: upstream unreachable")
    );
    assert!(!told(&nobody).contains("legacy"), "an unreachable server is not asked again: {}", told(&nobody));

    let locked = Upstream::start(|_, reply| reply.json(401, &[("WWW-Authenticate", "Bearer")], ""));
    let locked_out = approve(&[&locked.url()], &[]);
    assert!(told(&locked_out).contains("HTTP 401"), "{}", told(&locked_out));
    assert_eq!(locked.count(), 1, "a credential is not a matter of the era");

    let page = Upstream::start(|_, reply| reply.json(200, &[("Content-Type", "text/html")], "<html>"));
    let neither = approve(&[&page.url()], &[]);
    assert!(
        told(&neither).contains("modern client: tools/list: the answer is text/html"),
        "{}",
        told(&neither)
    );
    assert!(
        told(&neither).contains("legacy client: initialize: the answer is text/html"),
        "{}",
        told(&neither)
    );

    let cut = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.end();
    });
    let ended = approve(&["--era", "modern", &cut.url()], &[]);
    assert!(told(&ended).contains("the stream ended without the response"), "{}", told(&ended));

    let circle = Upstream::start(|request, reply| {
        let page = json!({ "tools": [tool("a")], "nextCursor": "again" });
        reply.json(200, &[], &answer(&request.json()["id"], page));
    });
    let endless = approve(&["--era", "modern", &circle.url()], &[]);
    assert!(told(&endless).contains("the pages of the listing do not end"), "{}", told(&endless));
    assert_eq!(circle.count(), 2);

    for output in [nobody, locked_out, neither, ended, endless] {
        assert_eq!(output.status.code(), Some(1), "{}", told(&output));
        assert!(output.stdout.is_empty(), "no pin of half a listing");
    }
}

#[test]
fn the_printed_pin_is_the_file_that_the_configuration_takes() {
    let output = approve(&[&modern().url()], &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(Approval::parse(&text).unwrap().len(), 3);
}
