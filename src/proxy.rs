//! The flow of one exchange, stage by stage.
//!
//! [`Sidecar::handle`] is the table of the crate's first page: admit the request, read its body, say what it is
//! (`post`), send it once (`forward`), and give the answer to the relay (`answer`). Whatever an exchange holds
//! lives in its future or in its response body, so that dropping either ends it.

mod admit;
mod answer;
mod forward;
mod gauges;
mod keyed;
mod learn;
mod listen;
mod post;
mod read;
mod session;
mod settings;
mod wait;

use std::{
    collections::HashMap,
    convert::Infallible,
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version, header, request::Parts};
use http_body::Body as _;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use tokio::{runtime::Handle, time};

use self::{forward::Via, read::Joined};
pub use listen::Asking;
pub use settings::{Auth, Credential, LegacyDisconnect, Limits, Route, RouteState, Settings};

use crate::{
    account::{Account, CancelledBy, Outcome, log::Sink},
    call::key::hex,
    cancel::Canceller,
    clock::Clock,
    error::Refusal,
    exchange::Exchange,
    headers,
    inflight::{Registry, Sort},
    ledger::Ledger,
    limits::{Held, Places},
    listing::Listing,
    relay::{Body, held, lane::Lane},
    server::{BadHead, Peer},
    session::Sessions,
    waits::Waits,
};

/// One sidecar: what all its exchanges share.
#[derive(Debug)]
pub struct Sidecar {
    settings: ArcSwap<Settings>,
    registry: Arc<Registry>,
    sessions: Sessions,
    listing: Listing,
    /// When the store was asked for what is known of an upstream's tools.
    recalled: tokio::sync::Mutex<HashMap<String, learn::Recalled>>,
    /// Requests for a listing whose streams have ended with event ids.
    listings: Mutex<Waits<()>>,
    ledger: Arc<Ledger>,
    canceller: Canceller,
    sink: Sink,
    clock: Clock,
    /// `Via`'s pseudonym, unique to this instance (RFC 9110 § 7.6.3).
    pseudonym: String,
    via: Via,
    /// Keys the hash of credentials.
    hash: RandomState,
    calls: Places,
    streams: Places,
    held: Places,
    lane: Arc<Lane>,
    detached: Places,
    draining: AtomicBool,
}

/// What a request has become once it is admitted. It goes from stage to stage in a box: each stage is a future that
/// would hold it twice, as what it was given and as what it works on.
struct Turn {
    settings: Arc<Settings>,
    route: Arc<Route>,
    parts: Parts,
    peer: Peer,
    exchange: Exchange,
    /// The bytes of its body, which is kept until the upstream's head has come.
    held: Held,
}

/// Where an admitted request goes.
enum Target {
    /// An upstream's endpoint.
    Endpoint(Arc<Route>),
    /// A well-known document of an upstream's origin, by its path.
    WellKnown(Arc<Route>, String),
}

impl Sidecar {
    /// A sidecar under these settings. Must be called within a runtime.
    pub fn new(settings: Settings, ledger: Arc<Ledger>, sink: Sink, clock: Clock) -> Arc<Self> {
        let pseudonym = format!("mcp-sidecar-{:016x}", fastrand::u64(..));
        Arc::new(Self {
            settings: ArcSwap::from_pointee(settings),
            registry: Arc::default(),
            sessions: Sessions::default(),
            listing: Listing::default(),
            recalled: tokio::sync::Mutex::default(),
            listings: Mutex::default(),
            ledger,
            canceller: Canceller::start(),
            sink,
            clock,
            via: Via::new(&pseudonym),
            pseudonym,
            hash: RandomState::new(),
            calls: Places::default(),
            streams: Places::default(),
            held: Places::default(),
            lane: Lane::new(Handle::current().metrics().num_workers()),
            detached: Places::default(),
            draining: AtomicBool::new(false),
        })
    }

    /// Takes new settings; exchanges in flight go on under what they began with, but calls that the new policy denies
    /// are cut.
    pub fn reload(&self, settings: Settings) {
        self.ledger.reload(settings.ledger.clone());
        let settings = Arc::new(settings);
        // First, so that whoever is not yet among what runs is asked by what holds now.
        self.settings.store(settings.clone());
        let denied = |upstream: &str, tool: &str| {
            settings.routes.get(upstream).is_some_and(|route| !route.policy.allows(tool))
        };
        for running in self.registry.all() {
            let Some((upstream, tools)) = running.calls.get() else { continue };
            if tools.iter().any(|tool| denied(upstream, tool)) {
                running.deny();
            }
        }
        // Then those whose streams have ended, and which run on.
        self.ledger.deny(denied);
    }

    /// The settings that new exchanges begin with.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.load_full()
    }

    /// Whether a drain has begun.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Whether the state store did not answer when it was last asked, a second ago at most.
    pub fn is_store_away(&self) -> bool {
        self.ledger.is_away()
    }

    /// Begins the drain: streams that no call owns end at once, new calls are busy. Returns when nothing runs any more,
    /// or `limit` has passed and what still ran was cut.
    pub async fn drain(&self, limit: Duration) {
        self.draining.store(true, Ordering::Release);
        // Said once it is true: who reads the line may ask at once.
        tracing::info!(drain = ?limit, "draining");
        for running in self.registry.all() {
            if running.sort == Sort::Stream {
                running.close();
            }
        }
        if time::timeout(limit, self.registry.empty()).await.is_err() {
            for running in self.registry.all() {
                running.cancel(CancelledBy::Drain);
                running.close();
            }
        }
        // What is cut still has to be told to its node, and in legacy to its server.
        let told = async {
            self.registry.empty().await;
            self.canceller.settled().await;
        };
        let _ = time::timeout(LAST_WORDS, told).await;
    }

    /// Answers one request. Never fails: every failure is an answer, and every exchange has its line in the log.
    ///
    /// Boxed, because a connection keeps room for what answers its requests for as long as it lives, and a stream outlives
    /// its answer's beginning by far.
    pub fn handle(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Pin<Box<impl Future<Output = Result<Response<Body>, Infallible>> + Send + use<>>> {
        Box::pin(self.answer_to(request))
    }

    /// Answers what is no request, with its line in the log. Nothing is known of it but who sent it.
    pub fn refuse(&self, peer: &Peer, why: &BadHead) -> Response<Body> {
        let request_id = new_request_id();
        let exchange = Exchange::new(self.account(peer, "1.1", &request_id));
        let mut response = refuse(exchange, &Refusal::new(why.status(), why.to_string()), None);
        response.headers_mut().insert(headers::REQUEST_ID, request_id);
        response
    }

    async fn answer_to(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let settings = self.settings.load_full();
        let (mut parts, body) = request.into_parts();
        let peer = parts.extensions.remove::<Peer>().unwrap_or_else(|| Peer::detached("unknown", "unknown"));
        headers::mark_sensitive(&mut parts.headers);
        let request_id = request_id(&mut parts.headers);
        let exchange = self.open(&parts, &peer, &request_id);
        let mut response = match self.admit(&settings, &parts) {
            Err(refusal) => refuse(exchange, &refusal, drainable(&parts, body)),
            Ok(target) => {
                let (route, document) = match target {
                    Target::Endpoint(route) => (route, None),
                    Target::WellKnown(route, path) => (route, Some(path)),
                };
                let held = Held::new(self.held.clone(), settings.limits.buffered);
                let turn = Box::new(Turn { settings, route, parts, peer, exchange, held });
                self.clone().proceed(turn, document, body).await
            }
        };
        response.headers_mut().insert(headers::REQUEST_ID, request_id);
        Ok(response)
    }

    async fn proceed(
        self: Arc<Self>,
        mut turn: Box<Turn>,
        document: Option<String>,
        body: Incoming,
    ) -> Response<Body> {
        let limits = &turn.settings.limits;
        if let Err(refusal) = admit::check_body(&turn.parts, &body, limits, document.is_none()) {
            return refuse(turn.exchange, &refusal, drainable(&turn.parts, body));
        }
        let body = match read(body, limits, &mut turn.held).await {
            Ok(body) => body,
            Err(Unread::Refused(refusal, rest)) => return refuse(turn.exchange, &refusal, rest),
            Err(Unread::Left) => return left(turn.exchange),
        };
        turn.exchange.account.record.bytes_in = Some(body.len() as u64);
        turn.exchange.account.record.upstream = Some(turn.route.name.clone());
        turn.exchange.route = Some(turn.route.clone());
        // What is rare has a box of its own, so that a call's future is no larger than a call needs.
        match document {
            Some(path) => Box::pin(self.well_known(turn, path, body)).await,
            None if turn.parts.method == Method::POST => self.post(turn, body).await,
            None => {
                self.describe_bare(&mut turn);
                Box::pin(self.pass(turn, body)).await
            }
        }
    }

    fn open(&self, parts: &Parts, peer: &Peer, request_id: &HeaderValue) -> Exchange {
        let http = if parts.version == Version::HTTP_2 { "2" } else { "1.1" };
        let mut account = self.account(peer, http, request_id);
        account.record.http_method = Some(parts.method.as_str().to_owned());
        account.record.path = Some(parts.uri.path().to_owned());
        Exchange::new(account)
    }

    fn account(&self, peer: &Peer, http: &'static str, request_id: &HeaderValue) -> Account {
        let request_id = request_id.to_str().unwrap_or_default().to_owned();
        let mut account = Account::open(self.sink.clone(), self.clock.now(), request_id);
        account.record.peer = Some(peer.label.as_ref().to_owned());
        account.record.http = Some(http);
        account
    }

    /// A keyed hash of the node's credential: what tells clients apart, and is no secret itself.
    fn principal(&self, headers: &HeaderMap) -> Option<u64> {
        headers.get(header::AUTHORIZATION).map(|value| self.hash.hash_one(value.as_bytes()))
    }
}

/// Why there is no whole body.
enum Unread {
    /// It is refused; with the rest of one that is too large, so that the refusal can be read.
    Refused(Refusal, Option<Incoming>),
    /// The node left amid its body.
    Left,
}

/// Reads a node's body whole. Where too much is held already, reading pauses.
async fn read(body: Incoming, limits: &Limits, held: &mut Held) -> Result<Bytes, Unread> {
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let mut body = body;
    let deadline = time::Instant::now() + limits.body_timeout;
    let mut all = Joined::expecting(body.size_hint().exact(), limits.request_body);
    loop {
        let frame = match time::timeout_at(deadline, body.frame()).await {
            Err(_) => return Err(Unread::Refused(admit::too_slow(limits), None)),
            Ok(None) => break,
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(error))) if is_malformed(&error) => {
                return Err(Unread::Refused(admit::bad_framing(), None));
            }
            Ok(Some(Err(_))) => return Err(Unread::Left),
        };
        let Ok(data) = frame.into_data() else { continue };
        if all.len() + data.len() > limits.request_body {
            return Err(Unread::Refused(admit::too_large(limits), Some(body)));
        }
        if time::timeout_at(deadline, held.room(limits.request_body)).await.is_err() {
            return Err(Unread::Refused(admit::too_full(), Some(body)));
        }
        all.push(data);
        held.set(all.len());
    }
    held.pass_turn();
    Ok(all.into())
}

/// Whether the node's chunks were not what they say, and not its connection that ended.
fn is_malformed(error: &hyper::Error) -> bool {
    use std::io::ErrorKind::{InvalidData, InvalidInput};
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<std::io::Error>());
    cause.is_some_and(|cause| matches!(cause.kind(), InvalidData | InvalidInput))
}

/// The node's request id, or a new one; one that is not plain is replaced.
fn request_id(headers: &mut HeaderMap) -> HeaderValue {
    let plain = |value: &&HeaderValue| {
        (1..=128).contains(&value.len()) && value.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    if let Some(id) = headers.get(headers::REQUEST_ID).filter(plain) {
        return id.clone();
    }
    new_request_id()
}

fn new_request_id() -> HeaderValue {
    let id = HeaderValue::try_from(hex(&fastrand::u128(..).to_be_bytes()));
    id.unwrap_or_else(|_| HeaderValue::from_static("0"))
}

/// A body worth draining after a refusal. A node that waits for `100 Continue` sends none.
fn drainable(parts: &Parts, body: Incoming) -> Option<Incoming> {
    (!body.is_end_stream() && !parts.headers.contains_key(header::EXPECT)).then_some(body)
}

/// The node is gone, which cancels; the answer only ends its connection.
fn left(mut exchange: Exchange) -> Response<Body> {
    exchange.left = Some(time::Instant::now());
    exchange.settle_cancelled();
    let mut response = Response::new(held::whole(exchange, Bytes::new(), Outcome::Cancelled));
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// How long a drain waits for what it has cut.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How much of a refused body is read so that the node can read the refusal, and for how long.
const DRAIN_BYTES: usize = 16 * 1024 * 1024;
const DRAIN_TIME: Duration = Duration::from_secs(10);

/// Refuses the HTTP request. The answer goes out at once; what the node still sends is read and dropped for a while,
/// since closing on unread bytes would reset the connection under the answer.
fn refuse(mut exchange: Exchange, refusal: &Refusal, rest: Option<Incoming>) -> Response<Body> {
    exchange.account.record.error = Some(refusal.message.clone());
    exchange.account.record.status = Some(refusal.status.as_u16());
    exchange.end(Outcome::Refused);
    if let Some(rest) = rest {
        tokio::spawn(time::timeout(DRAIN_TIME, async move {
            let mut rest = Limited::new(rest, DRAIN_BYTES);
            while let Some(Ok(_)) = rest.frame().await {}
        }));
    }
    let mut response = Response::new(held::whole(exchange, refusal.body(), Outcome::Refused));
    *response.status_mut() = refusal.status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    for (name, value) in &refusal.headers {
        headers.insert(name, value.clone());
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size of what a function gives in a box.
    fn boxed<A, F>(_: impl FnOnce(Arc<Sidecar>, A) -> Pin<Box<F>>) -> usize {
        size_of::<F>()
    }

    #[test]
    fn what_answers_a_request_is_small() {
        // It is made and moved for each request: whatever waits for the rare has to be boxed.
        let size = boxed(Sidecar::handle);
        assert!(size <= 8 * 1024, "{size} bytes");
    }
}
