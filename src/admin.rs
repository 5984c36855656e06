//! The admin listener: health, readiness, metrics, and a page to look at.
//!
//! Asks for no credential: `Host` (on a loopback listener) and `Origin` are checked, so that a page in a browser on
//! the same host can't ask.

use std::{convert::Infallible, fmt, sync::Arc, task::Poll};

use arc_swap::ArcSwap;
use http::{HeaderValue, Method, Request, Response, StatusCode, header, request::Parts};

use crate::{
    account::metrics::Metrics,
    headers, proxy,
    relay::Body,
    server::{BadHead, Peer},
    store::BoxFuture,
};

/// What OpenMetrics text is called.
const METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const PAGE: &str = "<!doctype html>
<meta charset=utf-8>
<title>mcp-sidecar</title>
<h1>mcp-sidecar</h1>
<ul>
<li><a href=healthz>healthz</a>: alive
<li><a href=readyz>readyz</a>: ready for calls
<li><a href=metrics>metrics</a>: for Prometheus
</ul>
";

/// Says why the sidecar is not ready, in a few words.
pub type Readiness = Box<dyn Fn() -> Result<(), &'static str> + Send + Sync>;

/// Answers admin requests. A tower service; clones are the same.
#[derive(Clone)]
pub struct Admin {
    shared: Arc<Shared>,
}

struct Shared {
    metrics: Arc<Metrics>,
    readiness: Readiness,
    loopback: bool,
    auth: ArcSwap<proxy::Auth>,
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").field("loopback", &self.shared.loopback).finish_non_exhaustive()
    }
}

impl Admin {
    /// Shows `metrics`, and asks `readiness` each time; `loopback`: the listener is bound to loopback.
    pub fn new(metrics: Arc<Metrics>, readiness: Readiness, loopback: bool) -> Self {
        Self { shared: Arc::new(Shared { metrics, readiness, loopback, auth: ArcSwap::default() }) }
    }

    /// Takes over the origins and hosts that nodes are allowed, at start and at each reload.
    pub fn allow(&self, auth: &proxy::Auth) {
        self.shared.auth.store(Arc::new(auth.clone()));
    }

    async fn answer(&self, request: &Parts) -> Response<Body> {
        if let Some(refusal) = self.refusal(request) {
            return refusal;
        }
        let answer = match request.uri.path() {
            "/healthz" => text(StatusCode::OK, "ok\n"),
            "/readyz" => match (self.shared.readiness)() {
                Ok(()) => text(StatusCode::OK, "ok\n"),
                Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, &format!("{reason}\n")),
            },
            "/metrics" => typed(StatusCode::OK, METRICS, &self.shared.metrics.page().await),
            "/" => typed(StatusCode::OK, "text/html; charset=utf-8", PAGE),
            _ => return text(StatusCode::NOT_FOUND, "no such path\n"),
        };
        if request.method == Method::GET || request.method == Method::HEAD {
            return answer;
        }
        let mut refusal = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
        refusal.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
        refusal
    }

    /// As on the listener for nodes.
    fn refusal(&self, request: &Parts) -> Option<Response<Body>> {
        let loopback = self.shared.loopback;
        let auth = self.shared.auth.load();
        let target = request.uri.authority().map(|authority| Some(authority.as_str()));
        let hosts = request.headers.get_all(header::HOST).iter().map(|host| host.to_str().ok());
        let mut named = hosts.chain(target).peekable();
        let here = |name: Option<&str>| name.is_some_and(|name| headers::host_allowed(name, &auth.hosts));
        if loopback && (named.peek().is_none() || !named.all(here)) {
            return Some(text(StatusCode::MISDIRECTED_REQUEST, "this Host is not served here\n"));
        }
        let allowed = headers::origin_allowed(&request.headers, &auth.origins, loopback);
        (!allowed).then(|| text(StatusCode::FORBIDDEN, "this Origin may not ask\n"))
    }
}

/// Answers what is no request.
pub fn refuse(_: &Peer, why: &BadHead) -> Response<Body> {
    text(why.status(), &format!("{why}\n"))
}

fn text(status: StatusCode, body: &str) -> Response<Body> {
    typed(status, "text/plain; charset=utf-8", body)
}

fn typed(status: StatusCode, content_type: &'static str, body: &str) -> Response<Body> {
    let mut response = Response::new(Body::full(body.to_owned()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

impl<B> tower::Service<Request<B>> for Admin {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let admin = self.clone();
        let (request, _) = request.into_parts();
        Box::pin(async move { Ok(admin.answer(&request).await) })
    }
}

#[cfg(test)]
mod tests;
