//! What the flow is told by the configuration.

use std::{collections::HashMap, sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use http::{HeaderMap, HeaderValue, Uri, uri::PathAndQuery};

use crate::{
    ledger, limits::Places, listing::Rules, policy::Policy, relay, secret::Secret, upstream::Upstream,
};

/// Everything a reload may change, as one value: an exchange goes on under the one it began with.
#[derive(Debug)]
pub struct Settings {
    /// Bounds.
    pub limits: Limits,
    /// Who may ask.
    pub auth: Auth,
    /// How long what is known of keyed calls is kept.
    pub ledger: ledger::Settings,
    /// The upstreams by the first segment of the path they are served at.
    pub routes: HashMap<String, Arc<Route>>,
}

/// Bounds of one sidecar.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of a request body; larger: 413.
    pub request_body: usize,
    /// Bytes of a response body, where it must be held whole.
    pub response_body: usize,
    /// Bytes of one SSE event from upstream.
    pub event: usize,
    /// How long a node may take to send its body.
    pub body_timeout: Duration,
    /// Requests in flight over all upstreams.
    pub calls: usize,
    /// `GET` and listen streams.
    pub streams: usize,
    /// Bytes held for streams and bodies together.
    pub buffered: usize,
    /// A node that takes no byte for this long is closed.
    pub client_stall: Duration,
}

/// Who may ask.
#[derive(Clone, Debug, Default)]
pub struct Auth {
    /// Asked of every node.
    pub bearer: Option<Secret>,
    /// Further `Origin` values allowed.
    pub origins: Vec<String>,
    /// Further `Host` values allowed on a loopback listener.
    pub hosts: Vec<String>,
    /// The listener is bound to loopback (a unix socket counts).
    pub loopback: bool,
}

/// One upstream as the flow needs it.
#[derive(Debug)]
pub struct Route {
    /// Its name.
    pub name: Arc<str>,
    /// Its connections.
    pub upstream: Arc<Upstream>,
    /// Added to every request.
    pub headers: HeaderMap,
    /// Sent instead of the node's `Authorization`.
    pub credential: Option<Credential>,
    /// No useful activity on a call.
    pub idle_timeout: Duration,
    /// From the start of the attempt.
    pub max_timeout: Duration,
    /// Requests in flight to this upstream.
    pub calls: usize,
    /// A 503 that names a wait is busy too.
    pub busy_503: bool,
    /// Also send `Idempotency-Key`.
    pub idempotency_header: bool,
    /// How long a legacy cancel waits for its answer.
    pub cancel_grace: Duration,
    /// What a legacy node's hang-up means.
    pub legacy_disconnect: LegacyDisconnect,
    /// How its streams are relayed.
    pub relay: relay::Settings,
    /// How its listen streams are kept.
    pub listen: relay::listen::Settings,
    /// What the operator says of its tools.
    pub listing: Rules,
    /// Which of its tools may be called.
    pub policy: Policy,
    /// What it keeps while it runs.
    pub state: RouteState,
}

/// What a route keeps while it runs; begins empty.
#[derive(Debug, Default)]
pub struct RouteState {
    /// Requests in flight.
    pub in_flight: Places,
    /// Where a 307 or 308 of the upstream moved the endpoint to, within its origin.
    pub moved: ArcSwapOption<PathAndQuery>,
}

impl Route {
    /// The target of a request: the upstream's own path and query, with the node's query appended as it came.
    pub fn target(&self, query: Option<&str>) -> Uri {
        let url = &self.upstream.settings().url;
        let moved = self.state.moved.load();
        let query = query.filter(|query| !query.is_empty());
        if moved.is_none() && query.is_none() {
            return url.clone();
        }
        let own = moved.as_deref().or(url.path_and_query());
        let own = own.cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let target = match query {
            None => own,
            Some(query) => {
                let joint = if own.query().is_some() { '&' } else { '?' };
                // Both halves were valid by themselves, and so is what they make together.
                PathAndQuery::try_from(format!("{own}{joint}{query}")).unwrap_or(own)
            }
        };
        let mut parts = url.clone().into_parts();
        parts.path_and_query = Some(target);
        Uri::from_parts(parts).unwrap_or_else(|_| url.clone())
    }
}

/// The upstream's own credential.
#[derive(Clone, Debug)]
pub enum Credential {
    /// `bearer` of the configuration.
    Bearer(Secret),
    /// User info of the configured URL, as the (sensitive) value of `Authorization: Basic`.
    Basic(HeaderValue),
}

impl Credential {
    /// The value of `Authorization`; `None` if the secret holds bytes no header can carry.
    pub fn authorization(&self) -> Option<HeaderValue> {
        match self {
            Self::Bearer(secret) => secret.authorization(),
            Self::Basic(value) => Some(value.clone()),
        }
    }
}

/// What a legacy node's hang-up means beyond closing the upstream's stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LegacyDisconnect {
    /// `cancel` for calls that have a key.
    #[default]
    Auto,
    /// Nothing more.
    Close,
    /// `notifications/cancelled` is POSTed.
    Cancel,
}
