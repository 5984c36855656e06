//! JSON-RPC as the demo server reads and writes it, and the HTTP answers it gives.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json, value::RawValue};

use super::stream::Cut;
use crate::relay::body::Body;

/// JSON-RPC 2.0 § 5.1: not a valid request.
pub(super) const INVALID_REQUEST: i64 = -32600;
/// No such method.
pub(super) const METHOD_NOT_FOUND: i64 = -32601;
/// Invalid parameters.
pub(super) const INVALID_PARAMS: i64 = -32602;
/// JSON-RPC 2.0 § 5.1: the server's own fault.
pub(super) const INTERNAL_ERROR: i64 = -32603;
/// `MissingRequiredClientCapability` (MCP 2026-07-28, basic § Per-request protocol fields).
const MISSING_CAPABILITY: i64 = -32021;
/// The extension of SEP-2663.
pub(super) const TASKS: &str = "io.modelcontextprotocol/tasks";
/// The request that a subscription's message belongs to.
const SUBSCRIPTION: &str = "io.modelcontextprotocol/subscriptionId";
/// Not JSON.
const PARSE_ERROR: i64 = -32700;

/// One message from a client. An id and a progress token keep the text they came with, so that they go back unchanged.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Message {
    #[serde(default, deserialize_with = "present")]
    pub(super) id: Option<Box<RawValue>>,
    #[serde(default)]
    pub(super) method: Option<String>,
    #[serde(default)]
    pub(super) params: Params,
}

/// What the demo server reads of `params`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Params {
    pub(super) name: Option<String>,
    pub(super) arguments: Option<Value>,
    pub(super) protocol_version: Option<String>,
    pub(super) request_id: Option<Box<RawValue>>,
    pub(super) uri: Option<String>,
    pub(super) task_id: Option<String>,
    /// The filter of a subscription.
    pub(super) notifications: Option<Value>,
    #[serde(rename = "_meta")]
    pub(super) meta: Meta,
}

/// What the demo server reads of `params._meta`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Meta {
    #[serde(rename = "progressToken")]
    pub(super) progress_token: Option<Box<RawValue>>,
    #[serde(rename = "io.modelcontextprotocol/protocolVersion")]
    pub(super) protocol_version: Option<String>,
    #[serde(rename = "io.modelcontextprotocol/clientCapabilities")]
    pub(super) client_capabilities: Option<Value>,
    #[serde(rename = "io.modelcontextprotocol/logLevel")]
    pub(super) log_level: Option<String>,
    #[serde(rename = "oz0/idempotency_key")]
    pub(super) idempotency_key: Option<String>,
    #[serde(rename = "oz0/resume")]
    pub(super) resume: Option<Resume>,
}

/// Where an attempt before this one got to.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Resume {
    pub(super) token: Option<String>,
}

impl Meta {
    /// Whether the client takes tasks (SEP-2663 § Capability Negotiation).
    pub(super) fn takes_tasks(&self) -> bool {
        let capabilities = self.client_capabilities.as_ref();
        capabilities.is_some_and(|said| said["extensions"].get(TASKS).is_some())
    }
}

/// Keeps `null` apart from absent: a request with the id `null` is an error, no notification.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(deserializer).map(Some)
}

impl Message {
    /// Reads a body.
    ///
    /// # Errors
    ///
    /// The 400 to answer: not JSON, a batch (no revision served here has them), or an id that is none.
    pub(super) fn read(body: &[u8]) -> Result<Self, Box<Response<Body>>> {
        // Derived readers would take an array for a struct's fields in their order.
        if body.trim_ascii_start().starts_with(b"[") {
            let text = "batches are not taken";
            return Err(Box::new(fault(StatusCode::BAD_REQUEST, None, INVALID_REQUEST, text)));
        }
        let message: Self = serde_json::from_slice(body).map_err(|error| {
            let code = if error.is_data() { INVALID_REQUEST } else { PARSE_ERROR };
            Box::new(fault(StatusCode::BAD_REQUEST, None, code, &error.to_string()))
        })?;
        let id = message.id.as_deref().map(RawValue::get);
        if id.is_some_and(|id| !id.starts_with(['"', '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9']))
        {
            let text = "an id is a string or a number";
            return Err(Box::new(fault(StatusCode::BAD_REQUEST, None, INVALID_REQUEST, text)));
        }
        Ok(message)
    }
}

/// The text of a response with a result.
pub(super) fn result(id: &RawValue, result: &Value) -> Bytes {
    #[derive(Serialize)]
    struct Answer<'a> {
        jsonrpc: &'a str,
        id: &'a RawValue,
        result: &'a Value,
    }
    encode(&Answer { jsonrpc: "2.0", id, result })
}

/// One step of a call, as its notification says it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Step<'a> {
    pub(super) progress: u64,
    pub(super) total: u64,
    /// Left out where it is empty.
    pub(super) message: &'a str,
    /// From where another attempt may go on.
    pub(super) resume: Option<&'a str>,
}

/// The text of a progress notification.
pub(super) fn progress(token: &RawValue, step: Step<'_>) -> Bytes {
    #[derive(Serialize)]
    struct Notification<'a> {
        jsonrpc: &'a str,
        method: &'a str,
        params: Progress<'a>,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Progress<'a> {
        progress_token: &'a RawValue,
        progress: u64,
        total: u64,
        #[serde(skip_serializing_if = "str::is_empty")]
        message: &'a str,
        #[serde(rename = "_meta", skip_serializing_if = "Option::is_none")]
        meta: Option<Value>,
    }
    let Step { progress, total, message, resume } = step;
    let meta = resume.map(|token| json!({ "oz0/resume": token }));
    let params = Progress { progress_token: token, progress, total, message, meta };
    encode(&Notification { jsonrpc: "2.0", method: "notifications/progress", params })
}

/// The text of a log message.
pub(super) fn log(data: &str) -> Bytes {
    let params = json!({ "level": "info", "logger": "demo", "data": data });
    encode(&json!({ "jsonrpc": "2.0", "method": "notifications/message", "params": params }))
}

/// The text of a notification on the stream of a subscription; its id keeps its text.
pub(super) fn subscribed(id: &RawValue, method: &str, params: &Value) -> Bytes {
    #[derive(Serialize)]
    struct Notification<'a> {
        jsonrpc: &'a str,
        method: &'a str,
        params: Params<'a>,
    }
    #[derive(Serialize)]
    struct Params<'a> {
        #[serde(rename = "_meta")]
        meta: BTreeMap<&'a str, &'a RawValue>,
        #[serde(flatten)]
        members: &'a Value,
    }
    let params = Params { meta: BTreeMap::from([(SUBSCRIPTION, id)]), members: params };
    encode(&Notification { jsonrpc: "2.0", method, params })
}

/// The text of the response that ends a subscription.
pub(super) fn subscription_ended(id: &RawValue) -> Bytes {
    #[derive(Serialize)]
    struct Answer<'a> {
        jsonrpc: &'a str,
        id: &'a RawValue,
        result: Ended<'a>,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Ended<'a> {
        result_type: &'a str,
        #[serde(rename = "_meta")]
        meta: BTreeMap<&'a str, &'a RawValue>,
    }
    let meta = BTreeMap::from([(SUBSCRIPTION, id)]);
    encode(&Answer { jsonrpc: "2.0", id, result: Ended { result_type: "complete", meta } })
}

fn encode(value: &impl Serialize) -> Bytes {
    // Maps with string keys into memory: it cannot fail.
    serde_json::to_vec(value).unwrap_or_default().into()
}

/// One event of a stream.
pub(super) fn event(data: &[u8]) -> Bytes {
    [b"event: message\ndata: ", data, b"\n\n"].concat().into()
}

/// An error response with an HTTP status; without an id where none is known.
pub(super) fn fault(status: StatusCode, id: Option<&RawValue>, code: i64, message: &str) -> Response<Body> {
    fault_with(status, id, json!({ "code": code, "message": message }))
}

/// The same with an `error` of one's own.
pub(super) fn fault_with(status: StatusCode, id: Option<&RawValue>, error: Value) -> Response<Body> {
    #[derive(Serialize)]
    struct Answer<'a> {
        jsonrpc: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<&'a RawValue>,
        error: Value,
    }
    with_status(status, as_json(encode(&Answer { jsonrpc: "2.0", id, error })))
}

/// The refusal of a request that needs the tasks extension.
pub(super) fn lacks_tasks(id: &RawValue) -> Response<Body> {
    let error = json!({
        "code": MISSING_CAPABILITY,
        "message": "missing required client capability",
        "data": { "requiredCapabilities": { "extensions": { TASKS: {} } } },
    });
    fault_with(StatusCode::BAD_REQUEST, Some(id), error)
}

/// No answer: the connection ends.
pub(super) fn cut() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(Cut);
    response
}

/// 200 with one JSON body.
pub(super) fn as_json(body: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::full(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// 200 with an event stream.
pub(super) fn as_stream(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(crate::headers::ACCEL_BUFFERING, HeaderValue::from_static("no"));
    response
}

/// 405, which names what there is.
pub(super) fn not_allowed(allowed: &'static str) -> Response<Body> {
    let mut response = bare(StatusCode::METHOD_NOT_ALLOWED);
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

/// A status without a body.
pub(super) fn bare(status: StatusCode) -> Response<Body> {
    with_status(status, Response::new(Body::empty()))
}

fn with_status(status: StatusCode, mut response: Response<Body>) -> Response<Body> {
    *response.status_mut() = status;
    response
}

/// 128 unpredictable bits as hex: who knows a session's or a task's id can act in it.
pub(super) fn random_id() -> Option<String> {
    let mut bits = [0; 16];
    rustls::crypto::aws_lc_rs::default_provider().secure_random.fill(&mut bits).ok()?;
    Some(format!("{:032x}", u128::from_be_bytes(bits)))
}

/// A header's value as text; `None` if it is absent or no text.
pub(super) fn text<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}
