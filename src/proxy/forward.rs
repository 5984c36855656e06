//! The request as it goes upstream, sent once.

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header,
    uri::PathAndQuery,
};

use super::{Route, Sidecar, Turn};
use crate::{
    account::Account,
    headers,
    upstream::{self, Sent},
};

/// W3C Trace Context § 3.2.
pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// `Idempotency-Key`.
pub(super) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// What each request is signed with, by the version that it came in (RFC 9110 § 7.6.3).
#[derive(Debug)]
pub(super) struct Via([HeaderValue; 3]);

impl Via {
    pub(super) fn new(pseudonym: &str) -> Self {
        let value = |version| HeaderValue::try_from(format!("{version} {pseudonym}"));
        // A pseudonym is plain text: it can't fail.
        Self(
            ["1.0", "1.1", "2"].map(|version| {
                value(version).unwrap_or_else(|_| HeaderValue::from_static("1.1 mcp-sidecar"))
            }),
        )
    }

    fn of(&self, version: Version) -> &HeaderValue {
        match version {
            Version::HTTP_10 => &self.0[0],
            Version::HTTP_2 => &self.0[2],
            _ => &self.0[1],
        }
    }
}

/// What goes upstream.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl Sidecar {
    /// The node's request with this hop's headers. `identity`: the answer must be read, so it must not be compressed.
    pub(super) fn outgoing(&self, turn: &Turn, body: Bytes, identity: bool) -> Outgoing {
        let mut headers = turn.parts.headers.clone();
        headers::toward_upstream(&mut headers);
        self.sign(&mut headers, turn);
        if identity {
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        for (name, value) in &turn.route.headers {
            headers.insert(name, value.clone());
        }
        if let Some(credential) = &turn.route.credential {
            headers.remove(header::AUTHORIZATION);
            if let Some(value) = credential.authorization() {
                headers.insert(header::AUTHORIZATION, value);
            }
        } else if turn.settings.auth.bearer.is_some() {
            // What the node sent was for this hop.
            headers.remove(header::AUTHORIZATION);
        }
        let uri = turn.route.target(turn.parts.uri.query());
        Outgoing { method: turn.parts.method.clone(), uri, headers, body }
    }

    /// A request for a document of the upstream's origin: as it came, with nothing of the upstream's own added.
    pub(super) fn outgoing_document(&self, turn: &Turn, path: &str, body: Bytes) -> Outgoing {
        let mut headers = turn.parts.headers.clone();
        headers::toward_upstream(&mut headers);
        if turn.settings.auth.bearer.is_some() {
            // Not asked for here, but a node that sends it everywhere sends it for this hop.
            headers.remove(header::AUTHORIZATION);
        }
        self.sign(&mut headers, turn);
        let mut uri = turn.route.upstream.settings().url.clone().into_parts();
        let target = match turn.parts.uri.query() {
            Some(query) => format!("{path}?{query}").parse(),
            None => path.parse(),
        };
        uri.path_and_query = target.ok().or(uri.path_and_query);
        let uri = Uri::from_parts(uri).unwrap_or_else(|_| turn.route.upstream.settings().url.clone());
        Outgoing { method: turn.parts.method.clone(), uri, headers, body }
    }

    /// `Via` and the request id.
    fn sign(&self, headers: &mut HeaderMap, turn: &Turn) {
        headers.append(header::VIA, self.via.of(turn.parts.version).clone());
        if let Ok(id) = HeaderValue::try_from(&turn.exchange.account.record.request) {
            headers.insert(headers::REQUEST_ID, id);
        }
    }

    /// Sends it once, and notes in the account what that told.
    pub(super) async fn send(
        &self,
        turn: &mut Turn,
        outgoing: Outgoing,
    ) -> Result<Response<upstream::Body>, upstream::Error> {
        let account = &mut turn.exchange.account;
        send(&turn.route, turn.parts.uri.query(), outgoing, Some(account)).await
    }
}

/// Sends it once. A 307 or 308 to the upstream's own origin is followed once, and remembered: its first receiver said
/// that it did nothing. `query` is the node's.
pub(super) async fn send(
    route: &Route,
    query: Option<&str>,
    outgoing: Outgoing,
    mut account: Option<&mut Account>,
) -> Result<Response<upstream::Body>, upstream::Error> {
    let again = Outgoing {
        method: outgoing.method.clone(),
        uri: outgoing.uri.clone(),
        headers: outgoing.headers.clone(),
        body: outgoing.body.clone(),
    };
    let response = once(route, outgoing, account.as_deref_mut()).await?;
    if matches!(response.status(), StatusCode::NOT_FOUND | StatusCode::GONE) {
        // Perhaps the endpoint is back where it was; if not, the next request is told again.
        route.state.moved.store(None);
    }
    let Some(target) = same_origin_redirect(&response, &again.uri) else { return Ok(response) };
    drop(response);
    remember(route, &again.uri, &target, query);
    let again = Outgoing { uri: target, ..again };
    once(route, again, account).await
}

async fn once(
    route: &Route,
    outgoing: Outgoing,
    account: Option<&mut Account>,
) -> Result<Response<upstream::Body>, upstream::Error> {
    let mut request = Request::new(outgoing.body);
    *request.method_mut() = outgoing.method;
    *request.uri_mut() = outgoing.uri;
    *request.headers_mut() = outgoing.headers;
    let mut noted = Noted { sent: Sent::default(), account };
    let response = route.upstream.send(request, &mut noted.sent).await;
    if let (Ok(response), Some(account)) = (&response, &mut noted.account) {
        account.record.first_byte_ms = Some(account.opened().elapsed());
        account.record.upstream_status = Some(response.status().as_u16());
    }
    response
}

/// Notes what sending told in the account, also when the answer never comes.
struct Noted<'a> {
    sent: Sent,
    account: Option<&'a mut Account>,
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        let Some(record) = self.account.as_mut().map(|account| &mut account.record) else { return };
        if self.sent.connect.is_some() || self.sent.reused {
            record.connect_ms = self.sent.connect;
            record.reused = Some(self.sent.reused);
            record.upstream_http = Some(if self.sent.http2 { "2" } else { "1.1" });
        }
    }
}

/// The target of a 307 or 308 that stays within scheme, host and port (RFC 9110 § 15.4.8, § 15.4.9).
fn same_origin_redirect(response: &Response<upstream::Body>, sent: &Uri) -> Option<Uri> {
    if !matches!(response.status(), StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT) {
        return None;
    }
    let mut locations = response.headers().get_all(header::LOCATION).iter();
    let (Some(location), None) = (locations.next(), locations.next()) else { return None };
    let location = location.to_str().ok()?.trim();
    let target = within_origin(location.split('#').next()?, sent)?;
    let mut parts = sent.clone().into_parts();
    (parts.path_and_query.as_ref() != Some(&target)).then_some(())?;
    parts.path_and_query = Some(target);
    Uri::from_parts(parts).ok()
}

/// The path and query that a reference means, seen from `base`; none if it leaves the origin, or is one that no server
/// writes (RFC 3986 § 5.2).
fn within_origin(reference: &str, base: &Uri) -> Option<PathAndQuery> {
    let path_ends = reference.find('?').unwrap_or(reference.len());
    let (path, query) = reference.split_at(path_ends);
    let absolute = match path {
        _ if path.starts_with("//") => format!("{}:{reference}", base.scheme_str()?),
        _ if path.starts_with('/') => return reference.parse().ok(),
        _ if path.contains(':') => reference.to_owned(),
        "" if query.is_empty() => return None,
        "" => return format!("{}{query}", base.path()).parse().ok(),
        _ => {
            let (folder, _) = base.path().rsplit_once('/')?;
            let path = path.strip_prefix("./").unwrap_or(path);
            let dots = path.split('/').any(|segment| matches!(segment, "." | ".."));
            return (!dots).then(|| format!("{folder}/{path}{query}").parse().ok())?;
        }
    };
    let target: Uri = absolute.parse().ok()?;
    let same = target.scheme() == base.scheme()
        && target.host()?.eq_ignore_ascii_case(base.host()?)
        && port(&target) == port(base);
    target.into_parts().path_and_query.filter(|_| same)
}

fn port(uri: &Uri) -> Option<u16> {
    let default = match uri.scheme_str() {
        Some("https") => 443,
        Some("http") => 80,
        _ => return None,
    };
    Some(uri.port_u16().unwrap_or(default))
}

/// Remembers where the endpoint is now, if the redirect moved its path and nothing else.
fn remember(route: &Route, sent: &Uri, target: &Uri, query: Option<&str>) {
    if sent.query() != target.query() || *sent.path() == *target.path() {
        return;
    }
    let moved = match (query.filter(|query| !query.is_empty()), route.upstream.settings().url.query()) {
        (None, _) => target.path_and_query().cloned(),
        (Some(_), Some(own)) => format!("{}?{own}", target.path()).parse().ok(),
        (Some(_), None) => target.path().parse().ok(),
    };
    let url = route.upstream.settings();
    tracing::warn!(upstream = %url.name, path = %target.path(), "the upstream moved its endpoint, the configured URL is stale");
    route.state.moved.store(moved.map(std::sync::Arc::new));
}
