//! What may cross the hop in each direction, and what the mirrored MCP headers must say.
//!
//! Hop-by-hop rules: RFC 9110 § 7.6.1. Mirrored headers: MCP 2026-07-28, Streamable HTTP § Server Validation.
//! Knows no bodies beyond a classified [`Message`](crate::message::Message).

mod access;
mod mirrored;

use http::{HeaderMap, HeaderName, HeaderValue, header};

pub use access::{host_allowed, origin_allowed};
pub use mirrored::{Refusal, check_head, check_mirrored, decode_sentinel};

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

/// Fields that end at this hop beside those that `Connection` names (RFC 9110 § 7.6.1, § 11.7, § 6.5.1).
fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "proxy-connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// The options that `Connection` names, as they were written, trimmed.
fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let lines = headers.get_all(header::CONNECTION).iter();
    lines.flat_map(|line| line.as_bytes().split(|&byte| byte == b',')).map(<[u8]>::trim_ascii)
}

/// Marks what must never be shown, whoever prints a request: credentials, cookies and the session id.
pub fn mark_sensitive(headers: &mut HeaderMap) {
    for (name, value) in headers.iter_mut() {
        if matches!(name.as_str(), "authorization" | "proxy-authorization" | "cookie" | "mcp-session-id") {
            value.set_sensitive(true);
        }
    }
}

/// Removes what belongs to one hop only, in place, in either direction: `Connection` and every field it names, `Keep-Alive`,
/// `Proxy-Connection`, `Proxy-Authorization`, `Proxy-Authenticate`, `TE`, `Trailer`, `Transfer-Encoding`, `Upgrade`.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    strip(headers, |_| false);
}

/// Removes what belongs to one hop only, and what else `also` names: one look at each field that is there costs less than
/// to ask for each one that may be.
fn strip(headers: &mut HeaderMap, also: impl Fn(&str) -> bool) {
    let named = connection_options(headers).filter_map(|option| HeaderName::from_bytes(option).ok());
    let ends = |name: &str| is_hop_by_hop(name) || also(name);
    let ended = headers.keys().filter(|name| ends(name.as_str())).cloned();
    let names: Vec<_> = named.chain(ended).collect();
    for name in names {
        headers.remove(name);
    }
}

/// Makes the node's request headers fit for the upstream, in place: hop-by-hop, `Host`, `Content-Length`, `Expect`, `Oz0-*` fields and
/// `X-Forwarded-*`/`Forwarded` are removed, and the crumbs of a cookie are joined. Adds nothing.
pub fn toward_upstream(headers: &mut HeaderMap) {
    strip(headers, |name| {
        matches!(name, "host" | "content-length" | "expect" | "forwarded")
            || name.starts_with("oz0-")
            || name.starts_with("x-forwarded-")
    });
    join_cookies(headers);
}

/// HTTP/2 lets a client send one cookie as several fields; HTTP/1.1 has one (RFC 9113 § 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let crumbs: Vec<_> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if crumbs.len() < 2 {
        return;
    }
    // Values that were valid by themselves are valid together.
    if let Ok(mut whole) = HeaderValue::from_bytes(&crumbs.join(&b"; "[..])) {
        whole.set_sensitive(true);
        headers.insert(header::COOKIE, whole);
    }
}

/// Makes the upstream's response headers fit for the node, in place: hop-by-hop, `Alt-Svc` (it would speak for our origin) and forged
/// `Oz0-*` are removed.
pub fn toward_node(headers: &mut HeaderMap) {
    if headers.contains_key(header::TRANSFER_ENCODING) {
        // The coding framed the body; a length beside it is not true of it (RFC 9112 § 6.3).
        headers.remove(header::CONTENT_LENGTH);
    }
    strip(headers, |name| name == "alt-svc" || name.starts_with("oz0-"));
}

/// Sets what every SSE answer carries: content type as it came, `Cache-Control` with `no-cache` and `no-transform` beside
/// the upstream's `no-store` and `private`, `X-Accel-Buffering: no`, each once; no `Content-Length`.
pub fn force_stream(headers: &mut HeaderMap) {
    let has = |directive: &str| {
        let lines = headers.get_all(header::CACHE_CONTROL).iter().filter_map(|line| line.to_str().ok());
        lines.flat_map(|line| line.split([',', '='])).any(|part| part.trim().eq_ignore_ascii_case(directive))
    };
    let cache = match (has("no-store"), has("private")) {
        (false, false) => "no-cache, no-transform",
        (true, false) => "no-cache, no-transform, no-store",
        (false, true) => "no-cache, no-transform, private",
        (true, true) => "no-cache, no-transform, no-store, private",
    };
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
    headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
    headers.remove(header::CONTENT_LENGTH);
}

/// Removes, in place, what described a body that the sidecar puts another one in place of: length, type, coding, validators, ranges,
/// digests. Everything else of the answer stays.
pub fn shed_content(headers: &mut HeaderMap) {
    for name in [
        header::CONTENT_LENGTH,
        header::CONTENT_TYPE,
        header::CONTENT_ENCODING,
        header::CONTENT_LANGUAGE,
        header::CONTENT_LOCATION,
        header::CONTENT_RANGE,
        header::CONTENT_DISPOSITION,
        header::ACCEPT_RANGES,
        header::ETAG,
        header::LAST_MODIFIED,
    ] {
        headers.remove(name);
    }
    shed_digests(headers);
}

/// Removes, in place, digests of a body that was changed.
pub fn shed_digests(headers: &mut HeaderMap) {
    for name in ["content-md5", "content-digest", "repr-digest", "digest"] {
        headers.remove(name);
    }
}

/// The message is signed (RFC 9421), so its body must not be changed.
pub fn is_signed(headers: &HeaderMap) -> bool {
    const SIGNATURE: HeaderName = HeaderName::from_static("signature");
    const SIGNATURE_INPUT: HeaderName = HeaderName::from_static("signature-input");
    headers.contains_key(SIGNATURE) || headers.contains_key(SIGNATURE_INPUT)
}

/// The essence of `Content-Type`: `application/json`, `text/event-stream`, lower case, no parameters. `None` if it is absent, repeated or
/// not ASCII.
pub fn content_type(headers: &HeaderMap) -> Option<String> {
    let mut lines = headers.get_all(header::CONTENT_TYPE).iter();
    let (line, None) = (lines.next()?, lines.next()) else { return None };
    Some(essence(line.to_str().ok()?).to_ascii_lowercase())
}

/// Whether `Content-Type` is this one, which is lower case; as [`content_type`] reads it.
pub fn is_content_type(headers: &HeaderMap, media: &str) -> bool {
    let mut lines = headers.get_all(header::CONTENT_TYPE).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else { return false };
    line.to_str().is_ok_and(|line| essence(line).eq_ignore_ascii_case(media))
}

/// The body of a request has a coding that nobody here can read.
pub fn content_encoding_refused(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(header::CONTENT_ENCODING).iter();
    let mut codings =
        lines.flat_map(|line| line.as_bytes().split(|&byte| byte == b',')).map(<[u8]>::trim_ascii);
    codings.any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity"))
}

/// A media type or range without its parameters.
fn essence(media: &str) -> &str {
    media.split(';').next().unwrap_or_default().trim()
}

/// Whether `Accept` lets `media` through (absent: yes). RFC 9110 § 12.5.1: the most specific of `type/subtype`, `type/*` and `*/*` decides, `q=0`
/// says no. Parameters beside `q` are not looked at.
pub fn accepts(headers: &HeaderMap, media: &str) -> bool {
    let kind = media.split('/').next().unwrap_or_default();
    let mut best = None;
    let mut empty = true;
    for line in headers.get_all(header::ACCEPT) {
        let Ok(line) = line.to_str() else { continue };
        for range in line.split(',').filter(|range| !range.trim().is_empty()) {
            empty = false;
            let name = essence(range);
            let specific = match name.split_once('/') {
                _ if name.eq_ignore_ascii_case(media) => 3,
                Some(("*", "*")) => 1,
                Some((of, "*")) if of.eq_ignore_ascii_case(kind) => 2,
                _ => continue,
            };
            // Of two as specific, the one that says yes.
            best = best.max(Some((specific, !refuses(range))));
        }
    }
    empty || best.is_some_and(|(_, yes)| yes)
}

/// Whether a media range has a weight of 0. One that can't be read counts as 1.
fn refuses(range: &str) -> bool {
    let weight = range.split(';').skip(1).find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("q").then(|| value.trim().parse::<f32>().unwrap_or(1.0))
    });
    weight.is_some_and(|weight| weight <= 0.0)
}

#[cfg(test)]
mod tests;
