//! The modern era (MCP 2026-07-28): every request stands for itself, and closing its stream cancels it.

use std::sync::Arc;

use base64::{Engine, prelude::BASE64_STANDARD};
use http::{HeaderMap, HeaderName, Response, StatusCode};
use serde_json::{Value, json, value::RawValue};

use crate::{
    headers::{METHOD, NAME, PROTOCOL_VERSION},
    relay::body::Body,
};

use super::{
    call::Call,
    export::Export,
    listing, resources,
    rpc::{self, Message},
    shared::Shared,
    tasks,
};

/// The one revision served in this era.
pub(super) const VERSION: &str = "2026-07-28";
/// `HeaderMismatch`, MCP 2026-07-28, Streamable HTTP § Server Validation.
const HEADER_MISMATCH: i64 = -32020;
/// `UnsupportedProtocolVersion`, MCP 2026-07-28, Versioning.
const UNSUPPORTED_VERSION: i64 = -32022;
/// For how long a client may keep a listing: the tools never change.
const TTL_MS: u64 = 300_000;

/// Answers a POST.
pub(super) async fn post(headers: &HeaderMap, message: Message, shared: &Arc<Shared>) -> Response<Body> {
    let Message { id, method, params } = message;
    let Some(method) = method else {
        return rpc::fault(
            StatusCode::BAD_REQUEST,
            None,
            rpc::INVALID_REQUEST,
            "responses are not taken in this revision",
        );
    };
    let Some(id) = id else {
        if method == "notifications/cancelled" {
            shared.stats.count(|seen| seen.cancelled_notifications += 1);
        }
        return rpc::bare(StatusCode::ACCEPTED);
    };
    if let Err(refusal) = check(headers, &id, &method, &params) {
        return *refusal;
    }
    match method.as_str() {
        "server/discover" => answer(
            &id,
            json!({
                "supportedVersions": [VERSION],
                "capabilities": {
                    "tools": { "listChanged": true },
                    "resources": { "subscribe": true },
                    "extensions": { rpc::TASKS: {} },
                },
                "ttlMs": TTL_MS,
                "cacheScope": "public",
            }),
        ),
        "tools/list" => {
            answer(&id, json!({ "tools": listing::listing(), "ttlMs": TTL_MS, "cacheScope": "public" }))
        }
        "tools/call" => call(id, params, shared).await,
        "resources/list" => resources::answer(shared, &id, None, cacheable).await,
        "resources/read" => {
            let uri = params.uri.unwrap_or_default();
            resources::answer(shared, &id, Some(&uri), cacheable).await
        }
        "tasks/get" | "tasks/cancel" | "tasks/update" => tasks::answer(shared, &id, &method, &params).await,
        "subscriptions/listen" => shared.hub.open(id, &params),
        _ => {
            let text = format!("unknown method: {method}");
            rpc::fault(StatusCode::NOT_FOUND, Some(&id), rpc::METHOD_NOT_FOUND, &text)
        }
    }
}

async fn call(id: Box<RawValue>, params: rpc::Params, shared: &Arc<Shared>) -> Response<Body> {
    if params.name.as_deref() == Some("export") && params.meta.takes_tasks() {
        // What it does not take is answered as for an ordinary call.
        if let Ok(export) = Export::read(params.arguments.clone().unwrap_or_else(|| json!({}))) {
            return tasks::create(shared, &id, export).await;
        }
    }
    match Call::read(id, params, shared, complete) {
        Ok(call) => {
            let running = call.start(shared, complete, std::future::pending());
            running.answer_or_stop(&shared.stats).await
        }
        Err(response) => *response,
    }
}

pub(super) fn answer(id: &RawValue, result: Value) -> Response<Body> {
    rpc::as_json(rpc::result(id, &complete(result)))
}

/// Adds what every result of this revision has.
fn complete(mut result: Value) -> Value {
    result["resultType"] = "complete".into();
    result["_meta"] = json!({ "io.modelcontextprotocol/serverInfo": super::server_info() });
    result
}

/// The same for what a client may keep, though not for long: it changes.
fn cacheable(mut result: Value) -> Value {
    result["ttlMs"] = 0.into();
    result["cacheScope"] = "public".into();
    complete(result)
}

/// Checks a request's `_meta`, then its headers against its body, then its revision.
fn check(
    headers: &HeaderMap,
    id: &RawValue,
    method: &str,
    params: &rpc::Params,
) -> Result<(), Box<Response<Body>>> {
    let refuse = |code, text: &str| Box::new(rpc::fault(StatusCode::BAD_REQUEST, Some(id), code, text));
    let Some(version) = params.meta.protocol_version.as_deref() else {
        return Err(refuse(rpc::INVALID_PARAMS, "_meta lacks io.modelcontextprotocol/protocolVersion"));
    };
    if params.meta.client_capabilities.is_none() {
        return Err(refuse(rpc::INVALID_PARAMS, "_meta lacks io.modelcontextprotocol/clientCapabilities"));
    }
    let mirrored = [(PROTOCOL_VERSION, Some(version)), (METHOD, Some(method))];
    // § Standard Headers; for tasks SEP-2663 § Routing Headers.
    let name = match method {
        "tools/call" => Some(&params.name),
        "resources/read" => Some(&params.uri),
        "tasks/get" | "tasks/cancel" | "tasks/update" => Some(&params.task_id),
        _ => None,
    };
    let name = name.map(|name| (NAME, name.as_deref()));
    for (header, value) in mirrored.into_iter().chain(name) {
        if !mirrors(headers, &header, value) {
            return Err(refuse(HEADER_MISMATCH, &format!("{header} is missing or contradicts the body")));
        }
    }
    if version != VERSION {
        let error = json!({
            "code": UNSUPPORTED_VERSION,
            "message": "unsupported protocol version",
            "data": { "supported": [VERSION], "requested": version },
        });
        return Err(Box::new(rpc::fault_with(StatusCode::BAD_REQUEST, Some(id), error)));
    }
    Ok(())
}

/// Whether the header is there once and says `value`, plainly or in the base64 form (§ Value Encoding).
fn mirrors(headers: &HeaderMap, header: &HeaderName, value: Option<&str>) -> bool {
    let mut values = headers.get_all(header).iter();
    let (Some(said), None) = (values.next(), values.next()) else { return false };
    let said = said.as_bytes().trim_ascii();
    let encoded = said.strip_prefix(b"=?base64?").and_then(|rest| rest.strip_suffix(b"?="));
    match (value, encoded) {
        (Some(value), Some(encoded)) => {
            BASE64_STANDARD.decode(encoded).is_ok_and(|plain| plain == value.as_bytes())
        }
        (Some(value), None) => said == value.as_bytes(),
        (None, _) => false,
    }
}
