//! Keyed calls: a server with tools of each retry class, and the calls that a node makes of them.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Post, Request, Sidecar, Upstream,
    http::Response,
    mcp::{LEGACY, MODERN},
    upstream::Reply,
};

/// A tool that only reads, and resumes.
pub const READ: &str = r#"{"name":"read","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true},"_meta":{"oz0/resume":true}}"#;
/// A tool that writes, honours the key, and resumes: conditional.
pub const CHARGE: &str = r#"{"name":"charge","inputSchema":{"type":"object"},"annotations":{"idempotentHint":true},"_meta":{"oz0/idempotency_key":true,"oz0/resume":true}}"#;
/// The same without resumption.
pub const PAY: &str = r#"{"name":"pay","inputSchema":{"type":"object"},"annotations":{"idempotentHint":true},"_meta":{"oz0/idempotency_key":true}}"#;
/// A tool that is idempotent and says nothing of the key: unsafe, with keys of a session's form.
pub const MARK: &str =
    r#"{"name":"mark","inputSchema":{"type":"object"},"annotations":{"idempotentHint":true}}"#;
/// A tool that does something each time: unsafe.
pub const EFFECT: &str = r#"{"name":"effect","inputSchema":{"type":"object"}}"#;
/// All of them.
pub const TOOLS: [&str; 5] = [READ, CHARGE, PAY, MARK, EFFECT];

/// The first 32 hex digits of the SHA-256 of `{}`.
pub const EMPTY_DIGEST: &str = "44136fa355b3678a1146ad16f7e8649e";

/// A server with [`TOOLS`]; `script` answers its calls and is told how many came before.
pub fn server(script: impl Fn(usize, &Request, &mut Reply) + Send + Sync + 'static) -> Upstream {
    server_with(|_| listing(&TOOLS), script)
}

/// A server whose listing is what `list` makes of the request's `params`.
pub fn server_with(
    list: impl Fn(&Value) -> Value + Send + Sync + 'static,
    script: impl Fn(usize, &Request, &mut Reply) + Send + Sync + 'static,
) -> Upstream {
    let calls = Arc::new(AtomicUsize::new(0));
    Upstream::start(move |request, reply| match method(request).as_deref() {
        Some("tools/list") => {
            let message = request.json();
            let answer = json!({ "jsonrpc": "2.0", "id": message["id"], "result": list(&message["params"]) });
            reply.json(200, &[], &answer.to_string());
        }
        Some("tools/call") => script(calls.fetch_add(1, Ordering::SeqCst), request, reply),
        Some(method) if method.starts_with("notifications/") => reply.json(202, &[], ""),
        _ => script(usize::MAX, request, reply),
    })
}

/// A server that answers every call with [`done`].
pub fn answering() -> Upstream {
    server(|n, request, reply| reply.json(200, &[], &done(request, n)))
}

/// A listing's result.
pub fn listing(tools: &[&str]) -> Value {
    let tools: Vec<Value> = tools.iter().map(|tool| serde_json::from_str(tool).unwrap()).collect();
    json!({ "tools": tools })
}

/// The result of a call, with the number of the execution in it.
pub fn done(request: &Request, n: usize) -> String {
    result(request, &format!(r#"{{"content":[{{"type":"text","text":"done {n}"}}]}}"#))
}

/// The response to a request with this result.
pub fn result(request: &Request, result: &str) -> String {
    let id = top(request).map(|top| top.id).unwrap_or_default();
    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#)
}

/// What is looked at of a message whose arguments may be anything.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Top {
    id: Value,
    method: Option<String>,
}

fn top(request: &Request) -> Option<Top> {
    serde_json::from_slice(&request.body).ok()
}

/// The JSON-RPC method of a request.
pub fn method(request: &Request) -> Option<String> {
    top(request)?.method
}

/// The calls that the server has received: its own count of executions.
pub fn calls(upstream: &Upstream) -> Vec<Request> {
    upstream.requests().into_iter().filter(is_call).collect()
}

pub fn is_call(request: &Request) -> bool {
    method(request).as_deref() == Some("tools/call")
}

/// `params._meta` of a call as the server received it.
pub fn meta(request: &Request) -> Value {
    request.json()["params"]["_meta"].clone()
}

/// The key that a call carried.
pub fn key(request: &Request) -> Option<String> {
    Some(meta(request)["oz0/idempotency_key"].as_str()?.to_owned())
}

/// Has a listing pass, so that every tool is known.
pub fn list(sidecar: &Sidecar) -> Response {
    let response = sidecar.client().ask(&list_post("{}"));
    assert_eq!(response.status(), 200, "{}", response.text());
    response
}

/// A modern `tools/list`.
pub fn list_post(params: &str) -> Post {
    let mut params: Value = serde_json::from_str(params).unwrap();
    params["_meta"] = json!({ "io.modelcontextprotocol/protocolVersion": MODERN });
    let body = json!({ "jsonrpc": "2.0", "id": 0, "method": "tools/list", "params": params });
    Post::modern("tools/list", None, body.to_string())
}

/// A call to be made; modern unless said otherwise.
#[derive(Clone, Debug)]
pub struct Call {
    pub id: String,
    tool: String,
    arguments: Option<String>,
    meta: Vec<(String, String)>,
    params: Vec<(String, String)>,
    fields: Vec<(String, String)>,
    legacy: bool,
}

impl Call {
    pub fn of(tool: &str) -> Self {
        Self {
            id: "1".to_owned(),
            tool: tool.to_owned(),
            arguments: Some("{}".to_owned()),
            meta: Vec::new(),
            params: Vec::new(),
            fields: Vec::new(),
            legacy: false,
        }
    }

    /// In a legacy session.
    pub fn legacy(mut self) -> Self {
        self.legacy = true;
        self
    }

    /// Its id, JSON.
    pub fn id(mut self, id: impl std::fmt::Display) -> Self {
        self.id = id.to_string();
        self
    }

    /// Its arguments, JSON.
    pub fn arguments(mut self, arguments: &str) -> Self {
        self.arguments = Some(arguments.to_owned());
        self
    }

    pub fn without_arguments(mut self) -> Self {
        self.arguments = None;
        self
    }

    /// A member of `_meta`: key and JSON value.
    pub fn meta(mut self, key: &str, value: impl std::fmt::Display) -> Self {
        self.meta.push((key.to_owned(), value.to_string()));
        self
    }

    /// A member of `params`: key and JSON value.
    pub fn param(mut self, key: &str, value: &str) -> Self {
        self.params.push((key.to_owned(), value.to_owned()));
        self
    }

    /// `oz0/call`.
    pub fn said(self, object: impl std::fmt::Display) -> Self {
        self.meta("oz0/call", object)
    }

    /// `oz0/call` with a job and an activity.
    pub fn activity(self, job: &str, activity: &str) -> Self {
        self.said(json!({ "job": job, "activity": activity }))
    }

    /// A header field.
    pub fn field(mut self, name: &str, value: &str) -> Self {
        self.fields.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The node's own key.
    pub fn key(self, key: &str) -> Self {
        self.meta("oz0/idempotency_key", json!(key))
    }

    pub fn body(&self) -> String {
        let mut meta = self.meta.clone();
        if !self.legacy {
            meta.push(("io.modelcontextprotocol/protocolVersion".to_owned(), format!("\"{MODERN}\"")));
        }
        let mut params = vec![("name".to_owned(), json!(self.tool).to_string())];
        params.extend(self.arguments.clone().map(|arguments| ("arguments".to_owned(), arguments)));
        params.extend(self.params.clone());
        if !meta.is_empty() {
            params.push(("_meta".to_owned(), object(&meta)));
        }
        format!(r#"{{"jsonrpc":"2.0","id":{},"method":"tools/call","params":{}}}"#, self.id, object(&params))
    }

    pub fn post(&self) -> Post {
        let post = match self.legacy {
            true => {
                Post::new(self.body()).field("MCP-Protocol-Version", LEGACY).field("Mcp-Session-Id", "sess-A")
            }
            false => Post::modern("tools/call", Some(&self.tool), self.body()),
        };
        self.fields.iter().fold(post, |post, (name, value)| post.field(name, value))
    }

    /// Makes it on a connection of its own.
    pub fn ask(&self, sidecar: &Sidecar) -> Response {
        sidecar.client().ask(&self.post())
    }
}

fn object(members: &[(String, String)]) -> String {
    let members: Vec<String> = members.iter().map(|(key, value)| format!("{}:{value}", json!(key))).collect();
    format!("{{{}}}", members.join(","))
}

/// The message of an answer: its JSON, or the last event of a stream.
pub fn message(response: &Response) -> Value {
    if response.head.field("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")) {
        return super::sse::read(&response.body).events.last().expect("an event").json();
    }
    response.json()
}

/// The text of a tool's result.
#[track_caller]
pub fn text(response: &Response) -> String {
    let message = message(response);
    let text = message["result"]["content"][0]["text"].as_str();
    text.unwrap_or_else(|| panic!("no result: {message}")).to_owned()
}

/// Asserts the failure's documented shape.
#[track_caller]
pub fn assert_error(response: &Response, code: i32, reason: &str, outcome: &str) {
    let message = message(response);
    let error = &message["error"];
    assert_eq!(
        (response.status(), error["code"].as_i64(), error["data"]["reason"].as_str()),
        (200, Some(code.into()), Some(reason)),
        "{message}"
    );
    assert_eq!(error["data"]["outcome"], outcome, "{message}");
    assert_eq!(error["data"]["source"], "mcp-sidecar", "{message}");
}

/// Asserts the busy result of the sidecar itself: wait a second, nothing was sent.
#[track_caller]
pub fn assert_busy(response: &Response) {
    let message = message(response);
    assert_eq!(response.status(), 200, "{message}");
    let result = &message["result"];
    assert_eq!(
        (&result["isError"], &result["_meta"]["oz0/retryable"]),
        (&json!(true), &json!(true)),
        "{message}"
    );
    assert_eq!(result["_meta"]["oz0/retry_after"], 1, "{message}");
    assert_eq!(response.head.field("retry-after"), Some("1"));
    assert_eq!(response.head.field("oz0-upstream-status"), None, "the upstream has said nothing");
}
