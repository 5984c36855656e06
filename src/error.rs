//! Failures of the hop itself, as the node reads them: one table.
//!
//! A request that was taken gets HTTP 200 and a JSON-RPC error under its id, since SDK clients take that as the
//! call's error and keep their session. What has no id to answer gets an HTTP status.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode};
use serde::{Serialize, Serializer};

use crate::{
    message::{Id, Malformed},
    relay::decode,
    upstream,
};

/// Why the sidecar itself ended a request that it had taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// DNS, connect or TLS failed: no byte was sent.
    UpstreamUnreachable,
    /// HTTP/2 `REFUSED_STREAM`, or a `GOAWAY` that leaves the stream out.
    UpstreamRefused,
    /// Reset, truncated, malformed or too large.
    UpstreamFailed,
    /// No useful activity for the idle timeout.
    IdleTimeout,
    /// The maximum from the start of the attempt has passed.
    MaxTimeout,
    /// The drain ended before the call did.
    Draining,
    /// Ended by the operator.
    Killed,
    /// The tool is denied.
    Policy,
    /// The same key stands for another call.
    KeyMismatch,
    /// The call is done, and its result is not held any more.
    AlreadyDone,
    /// An earlier attempt of an unsafe call may have been made.
    OutcomeUnknown,
    /// The attempt's claim could not be renewed.
    LeaseLost,
}

/// What is known of the effect, for whoever decides about another attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Not one byte of the request was sent, or the upstream said it did nothing.
    NotSent,
    /// The upstream may have done it.
    Unknown,
    /// It was done by an earlier attempt.
    Done,
}

impl Reason {
    /// As `data.reason` and the log's `reason`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::UpstreamUnreachable => "upstream_unreachable",
            Self::UpstreamRefused => "upstream_refused",
            Self::UpstreamFailed => "upstream_failed",
            Self::IdleTimeout => "idle_timeout",
            Self::MaxTimeout => "max_timeout",
            Self::Draining => "draining",
            Self::Killed => "killed",
            Self::Policy => "policy",
            Self::KeyMismatch => "key_mismatch",
            Self::AlreadyDone => "already_done",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::LeaseLost => "lease_lost",
        }
    }

    /// The status where there is no id to answer.
    pub const fn status(self) -> StatusCode {
        match self {
            Self::UpstreamUnreachable | Self::UpstreamRefused | Self::UpstreamFailed => {
                StatusCode::BAD_GATEWAY
            }
            Self::IdleTimeout | Self::MaxTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Draining | Self::Killed | Self::LeaseLost => StatusCode::SERVICE_UNAVAILABLE,
            Self::Policy => StatusCode::FORBIDDEN,
            Self::KeyMismatch => StatusCode::UNPROCESSABLE_ENTITY,
            Self::AlreadyDone | Self::OutcomeUnknown => StatusCode::CONFLICT,
        }
    }

    /// The JSON-RPC code: 1000 + status, outside of what JSON-RPC and MCP reserve.
    pub fn code(self) -> i32 {
        1000 + i32::from(self.status().as_u16())
    }
}

/// A failure of one exchange, ready to be told.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Why.
    pub reason: Reason,
    /// What is known of the effect.
    pub effect: Effect,
    /// One short sentence; no secret, no header value, no argument.
    pub message: String,
}

impl Failure {
    /// A failure after which the effect is unknown.
    pub fn unknown(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, effect: Effect::Unknown, message: message.into() }
    }

    /// A failure before anything was sent.
    pub fn not_sent(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, effect: Effect::NotSent, message: message.into() }
    }

    /// An answer of the upstream that cannot be passed on.
    pub fn upstream(message: impl Into<String>) -> Self {
        Self::unknown(Reason::UpstreamFailed, message)
    }
}

impl From<upstream::Error> for Failure {
    fn from(error: upstream::Error) -> Self {
        let message = error.to_string();
        match error {
            upstream::Error::Unreachable(_) => Self::not_sent(Reason::UpstreamUnreachable, message),
            upstream::Error::Refused(_) => Self::not_sent(Reason::UpstreamRefused, message),
            upstream::Error::Failed(_) => Self::unknown(Reason::UpstreamFailed, message),
        }
    }
}

impl From<decode::Error> for Failure {
    fn from(error: decode::Error) -> Self {
        Self::upstream(format!("the upstream's encoding is broken: {error}"))
    }
}

/// How far a call had got when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Progress {
    /// The last progress value.
    #[serde(serialize_with = "number")]
    pub progress: f64,
    /// Its total, if one was named.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "total")]
    pub total: Option<f64>,
}

/// A whole number is written as one: `2`, not `2.0`.
fn number<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.fract() == 0.0 && value.abs() < EXACT {
        serializer.serialize_i64(*value as i64)
    } else {
        serializer.serialize_f64(*value)
    }
}

fn total<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    number(&value.unwrap_or_default(), serializer)
}

/// Up to here a double holds every whole number exactly.
const EXACT: f64 = 9_007_199_254_740_992.0;

#[derive(Serialize)]
struct Data<'a> {
    source: &'static str,
    reason: &'static str,
    outcome: Effect,
    upstream: &'a str,
    request: &'a str,
    #[serde(rename = "oz0/progress", skip_serializing_if = "Option::is_none")]
    progress: Option<Progress>,
}

/// The JSON-RPC error of a failure, under the id's own token; without one, without `id`.
pub fn body(
    failure: &Failure,
    id: Option<&Id>,
    upstream: &str,
    request: &str,
    progress: Option<Progress>,
) -> Bytes {
    let data = Data {
        source: "mcp-sidecar",
        reason: failure.reason.name(),
        outcome: failure.effect,
        upstream,
        request,
        progress,
    };
    let data = serde_json::to_string(&data).unwrap_or_default();
    envelope(failure.reason.code(), &failure.message, id, Some(&data))
}

/// A refusal of the HTTP request itself.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The status.
    pub status: StatusCode,
    /// The JSON-RPC code.
    pub code: i32,
    /// One short sentence.
    pub message: String,
    /// The id, when it could be read.
    pub id: Option<Id>,
    /// Headers that the answer carries.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl Refusal {
    /// A refusal whose code is 1000 + status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            code: 1000 + i32::from(status.as_u16()),
            message: message.into(),
            id: None,
            headers: Vec::new(),
        }
    }

    /// A refusal with 400 and one of JSON-RPC's or MCP's own codes.
    pub fn bad_request(code: i32, message: impl Into<String>, id: Option<Id>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, code, message: message.into(), id, headers: Vec::new() }
    }

    /// Its JSON-RPC error.
    pub fn body(&self) -> Bytes {
        envelope(self.code, &self.message, self.id.as_ref(), None)
    }
}

impl From<Malformed> for Refusal {
    fn from(malformed: Malformed) -> Self {
        let message = malformed.to_string();
        match malformed {
            Malformed::Json(_) => Self::bad_request(PARSE_ERROR, message, None),
            Malformed::Message { id, .. } => Self::bad_request(INVALID_REQUEST, message, id),
        }
    }
}

/// JSON-RPC 2.0 § 5.1: invalid JSON was received.
pub const PARSE_ERROR: i32 = -32700;
/// JSON-RPC 2.0 § 5.1: not a valid request.
pub const INVALID_REQUEST: i32 = -32600;
/// MCP 2026-07-28, Streamable HTTP § Server Validation: a mirrored header contradicts the body.
pub const HEADER_MISMATCH: i32 = -32020;

fn envelope(code: i32, message: &str, id: Option<&Id>, data: Option<&str>) -> Bytes {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(br#"{"jsonrpc":"2.0","#);
    if let Some(id) = id {
        out.extend_from_slice(br#""id":"#);
        out.extend_from_slice(id.token());
        out.push(b',');
    }
    out.extend_from_slice(format!(r#""error":{{"code":{code},"message":"#).as_bytes());
    // Writing a string into a vector cannot fail.
    let _ = serde_json::to_writer(&mut out, message);
    if let Some(data) = data {
        out.extend_from_slice(br#","data":"#);
        out.extend_from_slice(data.as_bytes());
    }
    out.extend_from_slice(b"}}");
    out.into()
}
