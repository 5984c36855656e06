//! What may cross the hop in each direction, and what the mirrored MCP headers must say.
//!
//! Hop-by-hop rules: RFC 9110 § 7.6.1. Mirrored headers: MCP 2026-07-28, Streamable HTTP § Server Validation.
//! Knows no bodies beyond a classified [`Message`].

use http::{HeaderMap, HeaderName};

use crate::message::{Era, Message};

/// `MCP-Protocol-Version`.
pub const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
/// `Mcp-Session-Id`.
pub const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
/// `Mcp-Method`.
pub const METHOD: HeaderName = HeaderName::from_static("mcp-method");
/// `Mcp-Name`.
pub const NAME: HeaderName = HeaderName::from_static("mcp-name");
/// `Last-Event-ID`.
pub const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// `X-Request-Id`.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// `X-Accel-Buffering`.
pub const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
/// `Oz0-Upstream-Status`.
pub const UPSTREAM_STATUS: HeaderName = HeaderName::from_static("oz0-upstream-status");

/// Why a request's headers are refused.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// 400 with JSON-RPC −32020: a mirrored header is missing or contradicts the body.
    Mismatch(String),
    /// 400 with JSON-RPC −32600: repeated, unusable or forbidden.
    Unusable(String),
}

/// Checks that hold for every request before its body is read: repeated Mcp headers, bytes that no validated header may have, a `Connection`
/// option that names a header we depend on.
///
/// # Errors
///
/// [`Refusal::Unusable`].
pub fn check_head(headers: &HeaderMap) -> Result<(), Refusal> {
    let _ = headers;
    unimplemented!()
}

/// Checks the mirrored headers of a modern message against its body. Legacy messages always pass.
///
/// # Errors
///
/// [`Refusal::Mismatch`] naming the header; [`Refusal::Unusable`] for a modern batch.
pub fn check_mirrored(headers: &HeaderMap, message: &Message, era: Era) -> Result<(), Refusal> {
    let _ = (headers, message, era);
    unimplemented!()
}

/// Removes what belongs to one hop only, in place, in either direction: `Connection` and every field it names, `Keep-Alive`,
/// `Proxy-Connection`, `Proxy-Authorization`, `Proxy-Authenticate`, `TE`, `Trailer`, `Transfer-Encoding`, `Upgrade`.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let _ = headers;
}

/// Makes the node's request headers fit for the upstream, in place: hop-by-hop, `Host`, `Content-Length`, `Expect`, `Oz0-*` fields and
/// `X-Forwarded-*`/`Forwarded` are removed. Adds nothing.
pub fn toward_upstream(headers: &mut HeaderMap) {
    let _ = headers;
}

/// Makes the upstream's response headers fit for the node, in place: hop-by-hop, `Alt-Svc` and forged `Oz0-*` are removed.
pub fn toward_node(headers: &mut HeaderMap) {
    let _ = headers;
}

/// Sets what every SSE answer carries (contract section 9): content type as it came, `Cache-Control` with `no-cache` beside the
/// upstream's `no-transform`, `no-store` and `private`, `X-Accel-Buffering: no` once; no `Content-Length`.
pub fn force_stream(headers: &mut HeaderMap) {
    let _ = headers;
}

/// The essence of `Content-Type`: `application/json`, `text/event-stream`, lower case, no parameters.
pub fn content_type(headers: &HeaderMap) -> Option<String> {
    let _ = headers;
    unimplemented!()
}

/// Whether `Accept` lets `media` through (absent: yes). RFC 9110 § 12.5.1: `*/*`, `type/*`, `q=0`.
pub fn accepts(headers: &HeaderMap, media: &str) -> bool {
    let _ = (headers, media);
    unimplemented!()
}

/// Decodes the `=?base64?…?=` form of a mirrored value; `None` if it claims to be one and is not valid.
pub fn decode_sentinel(value: &[u8]) -> Option<Vec<u8>> {
    let _ = value;
    unimplemented!()
}

/// Whether `Origin` may talk to this listener. `allowed` are the configured ones; loopback origins count when `loopback_listener`.
/// Absent: yes. `null`, malformed, repeated: no.
pub fn origin_allowed(headers: &HeaderMap, allowed: &[String], loopback_listener: bool) -> bool {
    let _ = (headers, allowed, loopback_listener);
    unimplemented!()
}

/// Whether `Host` (or `:authority`) may be asked on a loopback listener: a loopback name, address or one configured, any port.
pub fn host_allowed(authority: &str, allowed: &[String]) -> bool {
    let _ = (authority, allowed);
    unimplemented!()
}
