//! What is checked before a body is read, in this order: framing, `Host`, `Origin`, the node's bearer, the path,
//! the method, size and content type.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header, request::Parts};
use http_body::Body as _;
use hyper::body::Incoming;

use super::{Limits, Route, Settings, Sidecar, Target};
use crate::{
    error::{INVALID_REQUEST, Refusal},
    headers,
};

/// Where OAuth documents live (RFC 8615, RFC 9728).
const WELL_KNOWN: &str = "/.well-known/";
/// RFC 9728 § 3.1.
const PROTECTED_RESOURCE: &str = "/.well-known/oauth-protected-resource";

/// What may be done to such a document.
const DOCUMENT_METHODS: [Method; 3] = [Method::GET, Method::HEAD, Method::OPTIONS];

impl Sidecar {
    /// Whether the request may pass, and where to.
    pub(super) fn admit(&self, settings: &Settings, parts: &Parts) -> Result<Target, Refusal> {
        let auth = &settings.auth;
        let host = host(parts)?;
        if auth.loopback && !headers::host_allowed(host, &auth.hosts) {
            return Err(Refusal::new(StatusCode::MISDIRECTED_REQUEST, "this Host is not served here"));
        }
        if !headers::origin_allowed(&parts.headers, &auth.origins, auth.loopback) {
            return Err(Refusal::new(StatusCode::FORBIDDEN, "this Origin is not allowed"));
        }
        if parts.method != Method::CONNECT && parts.uri.authority().is_some() && parts.uri.scheme().is_none()
        {
            // Authority-form (RFC 9112 § 3.2.3).
            return Err(bad_request("the target of the request is not a path"));
        }
        let path = parts.uri.path();
        let well_known = path.starts_with(WELL_KNOWN);
        if !well_known {
            self.authenticate(settings, &parts.headers)?;
        }
        check_head_size(parts)?;
        if matches!(parts.method, Method::CONNECT | Method::TRACE) {
            return Err(method_not_allowed());
        }
        if self.is_loop(&parts.headers) {
            return Err(Refusal::new(StatusCode::BAD_GATEWAY, "the request has passed this sidecar before"));
        }
        headers::check_head(&parts.headers).map_err(from_headers)?;
        if well_known {
            let target = well_known_target(settings, path).ok_or_else(no_such_upstream)?;
            return if DOCUMENT_METHODS.contains(&parts.method) { Ok(target) } else { Err(no_document()) };
        }
        endpoint(settings, path).map(Target::Endpoint).ok_or_else(no_such_upstream)
    }

    fn authenticate(&self, settings: &Settings, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(bearer) = &settings.auth.bearer else { return Ok(()) };
        let mut values = headers.get_all(header::AUTHORIZATION).iter();
        let presented = values.next().filter(|_| values.next().is_none()).and_then(|value| {
            let (scheme, token) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(token.trim_ascii())
        });
        if presented.is_some_and(|token| bearer.matches(token)) {
            return Ok(());
        }
        let mut refusal = Refusal::new(StatusCode::UNAUTHORIZED, "the sidecar asks for its bearer token");
        refusal.headers.push((header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")));
        Err(refusal)
    }

    /// RFC 9110 § 7.6.3: our own pseudonym in `Via` is a loop.
    fn is_loop(&self, headers: &HeaderMap) -> bool {
        headers.get_all(header::VIA).iter().any(|via| {
            let entries = via.as_bytes().split(|byte| *byte == b',');
            entries
                .filter_map(|entry| {
                    let mut words = entry.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
                    words.nth(1)
                })
                .any(|by| by == self.pseudonym.as_bytes())
        })
    }
}

/// Bytes of the target and of all fields, beyond which a head is refused. Below what the listener reads at all, so
/// that the refusal can say what it is; mirrored MCP headers carry what arguments say, so it is generous.
const HEAD_BYTES: usize = 32 << 10;
/// What a field adds to its name and value: a colon, a space and a line's end, or what HTTP/2 says (RFC 9113 § 6.5.2).
const FIELD: usize = 4;
const HTTP2_FIELD: usize = 32;

fn check_head_size(parts: &Parts) -> Result<(), Refusal> {
    let http2 = parts.version == Version::HTTP_2;
    let field = if http2 { HTTP2_FIELD } else { FIELD };
    let fields = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + field);
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    // `:method`, `:scheme`, `:authority` and `:path` are fields too; of the target only the path was counted.
    let pseudo = if http2 {
        let scheme = parts.uri.scheme_str().map_or(0, str::len);
        let authority = parts.uri.authority().map_or(0, |authority| authority.as_str().len());
        ":method:scheme:authority:path".len() + 4 * field + parts.method.as_str().len() + scheme + authority
    } else {
        0
    };
    if fields.sum::<usize>() + target + pseudo > HEAD_BYTES {
        let message = format!("the request head exceeds {HEAD_BYTES} bytes");
        return Err(Refusal::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message));
    }
    Ok(())
}

/// The one authority a request names.
fn host(parts: &Parts) -> Result<&str, Refusal> {
    let mut values = parts.headers.get_all(header::HOST).iter();
    let header = values.next();
    if values.next().is_some() {
        return Err(bad_request("the Host header is repeated"));
    }
    let header = match header {
        Some(value) => Some(value.to_str().map_err(|_| bad_request("the Host header is not readable"))?),
        None => None,
    };
    let target = parts.uri.authority().map(http::uri::Authority::as_str);
    match (header, target) {
        (None, None) => Err(bad_request("there is no Host header")),
        // In HTTP/1.1 an absolute-form target is allowed, and chooses no upstream.
        (Some(header), Some(target)) if parts.version == Version::HTTP_2 && header != target => {
            Err(bad_request("Host and :authority differ"))
        }
        (Some(header), _) => Ok(header),
        (None, Some(target)) => Ok(target),
    }
}

fn endpoint(settings: &Settings, path: &str) -> Option<Arc<Route>> {
    let name = path.strip_prefix('/')?;
    let name = name.strip_suffix('/').unwrap_or(name);
    settings.routes.get(name).cloned()
}

/// `/.well-known/DOCUMENT/NAME` is the same document of the upstream's path at its origin; a single upstream also serves
/// the others as they are named.
fn well_known_target(settings: &Settings, path: &str) -> Option<Target> {
    if !stays_below(path.strip_prefix(WELL_KNOWN)?) {
        return None;
    }
    let single = (settings.routes.len() == 1).then(|| settings.routes.values().next()).flatten();
    let (document, name) = path.rsplit_once('/').unwrap_or((path, ""));
    if let Some(route) = settings.routes.get(name)
        && (document == PROTECTED_RESOURCE || (single.is_some() && document.len() > WELL_KNOWN.len()))
    {
        let own = route.upstream.settings().url.path().trim_end_matches('/');
        return Some(Target::WellKnown(route.clone(), format!("{document}{own}")));
    }
    single.map(|route| Target::WellKnown(route.clone(), path.to_owned()))
}

/// Whether no reader of this path would climb out of where it begins: nobody is asked for a bearer there. Some servers
/// decode before they resolve dots, and some drop what follows a `;`.
fn stays_below(path: &str) -> bool {
    let path = path.to_ascii_lowercase();
    let hidden = ["%2e", "%2f", "%5c", "\\"].iter().any(|hidden| path.contains(hidden));
    let climbs = |segment: &str| matches!(segment.split(';').next(), None | Some("" | "." | ".."));
    !hidden && !path.split('/').any(climbs)
}

/// Checks of the body's head: RFC 9110 § 10.1.1, and a declared length over the limit.
pub(super) fn check_body(
    parts: &Parts,
    body: &Incoming,
    limits: &Limits,
    endpoint: bool,
) -> Result<(), Refusal> {
    let expects = parts.headers.get(header::EXPECT).map(HeaderValue::as_bytes);
    if expects.is_some_and(|expect| !expect.eq_ignore_ascii_case(b"100-continue")) {
        return Err(Refusal::new(StatusCode::EXPECTATION_FAILED, "the expectation cannot be met"));
    }
    let mut codings = parts.headers.get_all(header::TRANSFER_ENCODING).iter();
    if codings.any(|coding| !coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked")) {
        // RFC 9112 § 6.1: a coding that is not understood.
        let mut refusal = Refusal::new(StatusCode::NOT_IMPLEMENTED, "the transfer coding is not supported");
        refusal.headers.push((header::CONNECTION, HeaderValue::from_static("close")));
        return Err(refusal);
    }
    if body.size_hint().lower() > limits.request_body as u64 {
        return Err(too_large(limits));
    }
    if !endpoint || parts.method != Method::POST {
        return Ok(());
    }
    if !headers::is_content_type(&parts.headers, "application/json") {
        return Err(Refusal::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "the content type is not application/json",
        ));
    }
    if headers::content_encoding_refused(&parts.headers) {
        return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "the request body is encoded"));
    }
    Ok(())
}

pub(super) fn too_large(limits: &Limits) -> Refusal {
    let message = format!("the request body exceeds {} bytes", limits.request_body);
    Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, message)
}

pub(super) fn too_slow(limits: &Limits) -> Refusal {
    let message = format!("the request body did not come within {:?}", limits.body_timeout);
    let mut refusal = Refusal::new(StatusCode::REQUEST_TIMEOUT, message);
    refusal.headers.push((header::CONNECTION, HeaderValue::from_static("close")));
    refusal
}

/// Too much is held for others to take the body in.
pub(super) fn too_full() -> Refusal {
    let message = "the sidecar holds as much as it may, nothing was sent";
    let mut refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, message);
    refusal.headers.push((header::RETRY_AFTER, HeaderValue::from_static("1")));
    refusal
}

/// The connection can't serve another request: nobody knows where that would begin.
pub(super) fn bad_framing() -> Refusal {
    let mut refusal = bad_request("the chunks of the request body are malformed");
    refusal.headers.push((header::CONNECTION, HeaderValue::from_static("close")));
    refusal
}

pub(super) fn from_headers(refusal: headers::Refusal) -> Refusal {
    match refusal {
        headers::Refusal::Mismatch(message) => {
            Refusal::bad_request(crate::error::HEADER_MISMATCH, message, None)
        }
        headers::Refusal::Unusable(message) => bad_request(message),
    }
}

fn bad_request(message: impl Into<String>) -> Refusal {
    Refusal::bad_request(INVALID_REQUEST, message, None)
}

fn no_such_upstream() -> Refusal {
    Refusal::new(StatusCode::NOT_FOUND, "there is no upstream at this path")
}

fn method_not_allowed() -> Refusal {
    not_allowed("this method is not carried", "GET, POST, DELETE, OPTIONS, HEAD")
}

fn no_document() -> Refusal {
    not_allowed("a well-known document is only read", "GET, HEAD, OPTIONS")
}

fn not_allowed(message: &str, allowed: &'static str) -> Refusal {
    let mut refusal = Refusal::new(StatusCode::METHOD_NOT_ALLOWED, message);
    refusal.headers.push((header::ALLOW, HeaderValue::from_static(allowed)));
    refusal
}
