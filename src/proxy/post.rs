//! A POSTed message: what it is decides how it travels.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use tokio::time::{self, Duration, Instant};

use super::{
    Asking, LegacyDisconnect, Route, Sidecar, Turn, admit,
    forward::{IDEMPOTENCY_KEY, Outgoing, TRACEPARENT},
    keyed::{self, Going, OWN_CALL},
    refuse,
};
use crate::{
    account::{self, CancelledBy, Outcome},
    busy::{self, Busy},
    call::key::hex,
    cancel::Notice,
    error::{Failure, Reason, Refusal},
    exchange::{Learns, Request},
    headers,
    inflight::{Scope, Sort},
    ledger::entry::State,
    message::{self, Era, Id, Kind, Message, Meta, splice},
    relay::{Body, clocks::Clocks, held},
};

const INITIALIZE: &str = "initialize";
pub(super) const CALL: &str = "tools/call";
const LIST: &str = "tools/list";
const LISTEN: &str = "subscriptions/listen";
const CANCELLED: &str = "notifications/cancelled";

/// The idempotency key, as a node puts it there.
pub(super) const KEY: &str = "oz0/idempotency_key";

/// Notifications and responses that travel on although their node has hung up, at once.
const DETACHED: usize = 4096;

/// What the later stages must know of a request.
#[derive(Debug)]
pub(super) struct Asked {
    /// The ids that await a response: one, or a batch's.
    pub(super) awaited: Vec<Id>,
    /// A single `tools/call`.
    pub(super) call: bool,
    /// A `tools/call`, or a batch that has one: the answer is known whole before it is passed on.
    pub(super) calls: bool,
    /// Its 429 becomes a busy tool result: a call (not a legacy task), or a batch of nothing but calls.
    pub(super) converts: bool,
    /// It is `initialize`, with the client's name.
    pub(super) initialize: Option<Option<String>>,
    /// The message was an array.
    pub(super) batch: bool,
    /// A stream without clocks.
    pub(super) listen: bool,
    /// A subscription that may be asked for again.
    pub(super) again: Option<Arc<Asking>>,
    /// Its revision is one the sidecar knows; else it is forwarded with nothing added.
    pub(super) known: bool,
    /// The answer may be told as JSON.
    pub(super) accepts_json: bool,
    pub(super) scope: Scope,
    /// The idle timeout that the clocks were made with.
    pub(super) idle: Option<Duration>,
    pub(super) clocks: Clocks,
}

impl Asked {
    /// What no JSON-RPC request stands behind.
    pub(super) fn nothing(scope: Scope, clocks: Clocks) -> Self {
        Self {
            awaited: Vec::new(),
            call: false,
            calls: false,
            converts: false,
            initialize: None,
            batch: false,
            listen: false,
            again: None,
            known: true,
            accepts_json: true,
            scope,
            idle: None,
            clocks,
        }
    }
}

impl Sidecar {
    pub(super) async fn post(self: Arc<Self>, mut turn: Box<Turn>, body: Bytes) -> Response<Body> {
        // Not on another thread, however long it is: a node may leave right behind a message, and what then waits is dropped.
        let message = match message::classify(&body) {
            Ok(message) => message,
            Err(malformed) => return refuse(turn.exchange, &malformed.into(), None),
        };
        let scope = self.scope(&turn);
        let era = self.describe(&mut turn, &message, &scope);
        if let Err(refusal) = headers::check_mirrored(&turn.parts.headers, &message, era) {
            let refusal = Refusal { id: message.id.clone(), ..admit::from_headers(refusal) };
            return refuse(turn.exchange, &refusal, None);
        }
        if let Some(denied) = denied(&turn.route, &message) {
            let asked = asked(&turn, &message, scope);
            return self.failed(turn.exchange, &asked, &denied);
        }
        if let Some(refusal) = keyed::unanswerable(&turn, &message) {
            return refuse(turn.exchange, &refusal, None);
        }
        for answered in message.batch.iter().chain([&message]).filter(|one| one.kind == Kind::Response) {
            if let Some(id) = &answered.id {
                self.registry.node_answers(&scope, id);
            }
        }
        match message.kind {
            Kind::Batch if message.batch.iter().all(|one| one.kind != Kind::Request) => {
                Box::pin(self.hand_over(turn, body)).await
            }
            Kind::Request | Kind::Batch => self.request(turn, &message, &body, scope).await,
            Kind::Notification if message.method.as_deref() == Some(CANCELLED) => {
                Box::pin(self.cancelled(turn, &message, body, scope)).await
            }
            Kind::Notification | Kind::Response => Box::pin(self.hand_over(turn, body)).await,
            Kind::Other => Box::pin(self.pass(turn, body)).await,
        }
    }

    /// Whose ids these are.
    pub(super) fn scope(&self, turn: &Turn) -> Scope {
        let principal = self.principal(&turn.parts.headers);
        let session = turn.parts.headers.get(headers::SESSION_ID).map(|id| id.as_bytes().into());
        let host = (principal.is_none() && session.is_none()).then(|| turn.peer.host.clone());
        Scope { upstream: turn.route.name.clone(), principal, session, host }
    }

    /// The era, and what the log says of the message.
    fn describe(&self, turn: &mut Turn, message: &Message, scope: &Scope) -> Era {
        let session = scope.session.as_ref().and_then(|_| self.sessions.find(scope));
        let negotiated = session.as_ref().and_then(|session| session.protocol.as_deref());
        let (era, protocol) = message::era(message, version(turn), negotiated);
        turn.exchange.era = era;
        let record = &mut turn.exchange.account.record;
        record.era = Some(era);
        record.protocol = protocol;
        record.rpc.clone_from(&message.method);
        record.id = message.id.as_ref().and_then(|id| account::token(id.token()));
        if message.method.as_deref() == Some(CALL) {
            record.tool.clone_from(&message.params.name);
        }
        record.session = scope.session.as_deref().map(fingerprint);
        record.client = match &message.params.meta {
            Meta::Object(meta) => meta.client.clone(),
            _ => None,
        }
        .or_else(|| message.params.client.clone())
        .or_else(|| session.as_ref().and_then(|session| session.client.clone()));
        era
    }

    /// What the log says of a request that carries no message: `GET`, `DELETE` and the like.
    pub(super) fn describe_bare(&self, turn: &mut Turn) {
        let scope = self.scope(turn);
        let session = self.sessions.find(&scope);
        let negotiated = session.as_ref().and_then(|session| session.protocol.as_deref());
        let protocol = version(turn).filter(|version| !version.is_empty()).or(negotiated).map(str::to_owned);
        let record = &mut turn.exchange.account.record;
        record.era = protocol.as_deref().map(message::era_of);
        record.protocol = protocol;
        record.session = scope.session.as_deref().map(fingerprint);
        record.client = session.and_then(|session| session.client.clone());
    }

    /// A request (or a batch), from its place among what runs to its answer.
    async fn request(
        self: Arc<Self>,
        mut turn: Box<Turn>,
        message: &Message,
        body: &Bytes,
        scope: Scope,
    ) -> Response<Body> {
        let mut asked = asked(&turn, message, scope);
        if let Err(()) = self.take_places(&mut turn, &asked) {
            return self.too_many(turn, &asked);
        }
        let meta = match &message.params.meta {
            Meta::Object(meta) => meta.traceparent.as_deref(),
            _ => None,
        };
        let parent = trace(&mut turn, meta);
        let mut outgoing = self.outgoing(&turn, body.clone(), true);
        if asked.listen {
            asked.again = Asking::of(&turn, &outgoing, self.clock.clone()).map(Arc::new);
        }
        self.enter(&mut turn, message, &mut asked, &outgoing);
        // A reload that came before this was entered did not see it.
        let current = self.settings.load();
        let now = current.routes.get(&*turn.route.name).filter(|_| !Arc::ptr_eq(&current, &turn.settings));
        if let Some(denied) = now.and_then(|route| denied(route, message)) {
            return self.failed(turn.exchange, &asked, &denied);
        }
        drop(current);
        if !asked.call || !asked.known {
            return self.forward(turn, asked, outgoing).await;
        }
        let (turn, mut going) = match self.keyed(turn, message, body, &mut asked).await {
            Ok(keyed) => keyed,
            Err(stopped) => return *stopped,
        };
        let parent = parent.map(|parent| format!("\"{parent}\""));
        going.add.extend(parent.map(|parent| ("traceparent", parent)));
        prepare(&turn, message, &going, &mut outgoing);
        let mut response = self.forward(turn, asked, outgoing).await;
        response.headers_mut().extend(going.answer);
        response
    }

    /// Takes the request's place under the limits; none are given to new requests while a drain goes on.
    fn take_places(&self, turn: &mut Turn, asked: &Asked) -> Result<(), ()> {
        if self.is_draining() {
            return Err(());
        }
        let limits = &turn.settings.limits;
        let permits = &mut turn.exchange.permits;
        if asked.listen {
            permits.push(self.streams.take(limits.streams).ok_or(())?);
            return Ok(());
        }
        if self.held.taken() >= limits.buffered {
            return Err(());
        }
        permits.push(turn.route.state.in_flight.take(turn.route.calls).ok_or(())?);
        permits.push(self.calls.take(limits.calls).ok_or(())?);
        Ok(())
    }

    /// The sidecar's own limit, or a drain: nothing was made.
    pub(super) fn too_many(&self, mut turn: Box<Turn>, asked: &Asked) -> Response<Body> {
        if self.is_draining() {
            turn.exchange.account.record.reason = Some(Reason::Draining.name());
        }
        if let Some(claim) = &mut turn.exchange.claim {
            claim.ends(State::NotSent);
        }
        if asked.converts {
            let busy = Busy { upstream: &turn.route.name, status: None, retry_after: Some("1") };
            let body = busy_body(&busy, asked, turn.exchange.era);
            turn.exchange.account.record.retry_after = account::token(b"1");
            turn.exchange.account.record.status = Some(200);
            let accepts_json = asked.accepts_json;
            let mut response = Self::told(turn.exchange, body, accepts_json, Outcome::Busy);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            return response;
        }
        unavailable(turn, asked.awaited.first().filter(|_| !asked.batch))
    }

    /// Enters the request among what runs.
    fn enter(self: &Arc<Self>, turn: &mut Turn, message: &Message, asked: &mut Asked, outgoing: &Outgoing) {
        let era = turn.exchange.era;
        let method = message.method.as_deref().unwrap_or_default();
        let task = era == Era::Legacy && message.params.task;
        let sort = match () {
            () if asked.listen => Sort::Stream,
            () if asked.batch || task || asked.initialize.is_some() => Sort::Uncancellable,
            () => Sort::Request,
        };
        let entry = self.registry.enter(asked.scope.clone(), message.id.clone(), sort, era);
        let calls = message.batch.iter().chain([message]).filter(|one| one.is(CALL));
        let tools: Vec<String> = calls.filter_map(|one| one.params.name.clone()).collect();
        if !tools.is_empty() {
            // The entry is new.
            let _ = entry.running.calls.set((asked.scope.upstream.clone(), tools));
        }
        let meta = match &message.params.meta {
            Meta::Object(meta) => Some(meta),
            _ => None,
        };
        let legacy = era == Era::Legacy && sort == Sort::Request && asked.known;
        let wanted = match turn.route.legacy_disconnect {
            // `auto` is decided with the key.
            LegacyDisconnect::Auto | LegacyDisconnect::Close => false,
            LegacyDisconnect::Cancel => true,
        };
        let notice = message.id.clone().filter(|_| legacy).map(|id| Notice {
            canceller: self.canceller.clone(),
            route: turn.route.clone(),
            headers: notice_headers(outgoing),
            id,
            scope: asked.scope.clone(),
            event_ids: Vec::new(),
            retry: Duration::ZERO,
            now: false,
            ledger: self.ledger.clone(),
        });
        turn.exchange.request = Some(Request {
            id: message.id.clone(),
            call: asked.call,
            progress_token: meta.and_then(|meta| meta.progress_token.clone()),
            added_token: None,
            until: turn.exchange.account.opened() + turn.route.max_timeout,
            resumable: false,
            cancels_on_disconnect: legacy && wanted && method != "ping" && !method.starts_with("tasks/"),
            notice,
        });
        let lists =
            message.batch.iter().chain([message]).filter(|one| one.kind == Kind::Request && one.is(LIST));
        let ids: Vec<Id> = lists.filter_map(|one| one.id.clone()).collect();
        turn.exchange.learns = (!ids.is_empty()).then(|| self.learns(&turn.route.name, ids));
        turn.exchange.entry = Some(entry);
    }

    /// What learns from the answers to these requests for a listing.
    pub(super) fn learns(self: &Arc<Self>, upstream: &Arc<str>, ids: Vec<Id>) -> Learns {
        Learns { sidecar: self.clone(), upstream: upstream.clone(), ids }
    }

    /// `notifications/cancelled` from the node.
    async fn cancelled(
        self: Arc<Self>,
        mut turn: Box<Turn>,
        message: &Message,
        body: Bytes,
        scope: Scope,
    ) -> Response<Body> {
        let named = message.params.request_id.as_ref();
        if let Some(mut claim) = named.and_then(|id| self.ledger.unpark(&scope, id)) {
            claim.ends(State::Unknown);
        }
        let found = named.and_then(|id| self.registry.find(&scope, id));
        let target = found
            .filter(|running| running.sort != Sort::Uncancellable)
            .filter(|running| running.cancel(CancelledBy::Notification));
        if turn.exchange.era == Era::Modern {
            if let Some(running) = target {
                running.close();
            }
            turn.exchange.end(Outcome::Ok);
            turn.exchange.account.record.status = Some(202);
            let mut response = Response::new(held::whole(turn.exchange, Bytes::new(), Outcome::Ok));
            *response.status_mut() = StatusCode::ACCEPTED;
            return response;
        }
        let Some(running) = target else { return self.hand_over(turn, body).await };
        let grace = turn.route.cancel_grace;
        let closing = running.clone();
        // The grace bounds how long the call's own stream stays open; the notification itself may take longer.
        let grace = tokio::spawn(async move {
            time::sleep(grace).await;
            closing.close();
        });
        let sidecar = self.clone();
        let delivery = tokio::spawn(async move {
            let response = sidecar.pass(turn, body).await;
            running.close();
            grace.abort();
            response
        });
        delivery.await.unwrap_or_else(|_| Response::new(Body::empty()))
    }

    /// Sends a message that has no answer of its own, on a task that goes on when its node hangs up: it was handed over.
    async fn hand_over(self: Arc<Self>, mut turn: Box<Turn>, body: Bytes) -> Response<Body> {
        let Some(permit) = self.detached.take(DETACHED) else { return self.pass(turn, body).await };
        turn.exchange.permits.push(permit);
        let delivery = tokio::spawn(async move { self.pass(turn, body).await });
        delivery.await.unwrap_or_else(|_| Response::new(Body::empty()))
    }
}

/// `MCP-Protocol-Version`, trimmed.
fn version(turn: &Turn) -> Option<&str> {
    let version = turn.parts.headers.get(headers::PROTOCOL_VERSION)?;
    version.to_str().ok().map(str::trim)
}

fn asked(turn: &Turn, message: &Message, scope: Scope) -> Asked {
    let era = turn.exchange.era;
    let method = message.method.as_deref().unwrap_or_default();
    let batch = message.kind == Kind::Batch;
    let call = !batch && method == CALL;
    let listen = !batch && era == Era::Modern && method == LISTEN;
    let task = era == Era::Legacy && message.params.task;
    let calls_only = message.is_batch_of_calls() && message.batch.iter().all(|one| !one.params.task);
    let awaited = if batch {
        message
            .batch
            .iter()
            .filter(|one| one.kind == Kind::Request)
            .filter_map(|one| one.id.clone())
            .collect()
    } else {
        message.id.iter().cloned().collect()
    };
    let (idle, max) = match () {
        () if listen => (None, None),
        () if method == "tasks/result" => (None, Some(turn.route.max_timeout)),
        () => (Some(turn.route.idle_timeout), Some(turn.route.max_timeout)),
    };
    Asked {
        awaited,
        call,
        calls: call || message.batch.iter().any(|one| one.method.as_deref() == Some(CALL)),
        converts: (call && !task) || calls_only,
        initialize: (!batch && method == INITIALIZE).then(|| message.params.client.clone()),
        batch,
        listen,
        again: None,
        known: !message::revision_unknown(message, version(turn)),
        accepts_json: headers::accepts(&turn.parts.headers, "application/json"),
        scope,
        idle,
        clocks: Clocks::new(Instant::now(), idle, max),
    }
}

/// The busy answer of a call, or of a batch of calls.
pub(super) fn busy_body(busy: &Busy<'_>, asked: &Asked, era: Era) -> Bytes {
    match asked.awaited.as_slice() {
        [id] if !asked.batch => busy::result(busy, id, era),
        ids => busy::results(busy, &ids.iter().collect::<Vec<_>>()),
    }
}

/// 503 that names a wait, for what is no call.
pub(super) fn unavailable(turn: Box<Turn>, id: Option<&Id>) -> Response<Body> {
    let mut refusal =
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the sidecar is at its limit, nothing was sent");
    refusal.id = id.cloned();
    refusal.headers.push((header::RETRY_AFTER, HeaderValue::from_static("1")));
    refuse(turn.exchange, &refusal, None)
}

/// The first 8 hex digits of a session id's SHA-256: what the log may show of it.
pub(super) fn fingerprint(session: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    let digest = Sha256::digest(session);
    hex(&digest[..4])
}

/// What a cancel notice says of itself: as the request did, less what belonged to that request alone.
fn notice_headers(outgoing: &Outgoing) -> http::HeaderMap {
    let mut headers = outgoing.headers.clone();
    for name in [header::CONTENT_LENGTH, headers::LAST_EVENT_ID, headers::METHOD, headers::NAME] {
        headers.remove(name);
    }
    headers.remove(IDEMPOTENCY_KEY);
    headers
}

/// The call as it goes upstream: the sidecar's own member is cut out of its `_meta`, and what it goes with is put in.
fn prepare(turn: &Turn, message: &Message, going: &Going, outgoing: &mut Outgoing) {
    if let Some(key) = going.key.as_ref().filter(|_| turn.route.idempotency_header)
        && !outgoing.headers.contains_key(IDEMPOTENCY_KEY)
        && let Some(value) = sf_string(key)
    {
        outgoing.headers.insert(IDEMPOTENCY_KEY, value);
    }
    if headers::is_signed(&outgoing.headers) {
        return;
    }
    let said = matches!(&message.params.meta, Meta::Object(meta) if meta.oz0.contains_key(OWN_CALL));
    if going.add.is_empty() && !said {
        return;
    }
    let add: Vec<(&str, &str)> = going.add.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let spliced = splice::meta(&outgoing.body, message, &add, &[OWN_CALL]);
    if spliced != outgoing.body {
        headers::shed_digests(&mut outgoing.headers);
        outgoing.body = spliced;
    }
}

/// RFC 8941 § 3.3.3; `None` for what no sf-string can hold.
fn sf_string(text: &str) -> Option<HeaderValue> {
    let plain = text.bytes().all(|byte| matches!(byte, 0x20..=0x7e));
    plain.then(|| {
        HeaderValue::try_from(format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))).ok()
    })?
}

/// A call of a tool that the policy denies, in whatever form: a request, a notification, an id that is none, an unknown
/// revision. A batch with one is refused whole.
fn denied(route: &Route, message: &Message) -> Option<Failure> {
    let mut calls = message.batch.iter().chain([message]).filter(|one| one.is(CALL));
    let denied = calls.any(|one| !route.policy.allows(one.params.name.as_deref().unwrap_or_default()));
    denied.then(|| Failure::not_sent(Reason::Policy, "the tool is denied by the sidecar's policy"))
}

/// The trace of an exchange: from the node's header, else from `_meta`, else made; the header goes upstream (W3C Trace
/// Context § 3.2). Gives what the node's header said, for a call whose `_meta` says nothing.
pub(super) fn trace(turn: &mut Turn, meta: Option<&str>) -> Option<String> {
    let mut values = turn.parts.headers.get_all(TRACEPARENT).iter();
    let record = &mut turn.exchange.account.record;
    if let Some(first) = values.next() {
        // What is repeated or malformed is passed on and means nothing.
        let parent =
            first.to_str().ok().filter(|parent| values.next().is_none() && is_traceparent(parent))?;
        record.trace = Some(parent[3..35].to_owned());
        return meta.is_none().then(|| parent.to_owned());
    }
    let parent = match meta.filter(|parent| is_traceparent(parent)) {
        Some(parent) => parent.to_owned(),
        None => {
            let trace = hex(&fastrand::u128(1..).to_be_bytes());
            let parent = hex(&fastrand::u64(1..).to_be_bytes());
            ["00-", &trace, "-", &parent, "-00"].concat()
        }
    };
    record.trace = Some(parent[3..35].to_owned());
    if let Ok(value) = HeaderValue::try_from(parent) {
        turn.parts.headers.insert(TRACEPARENT, value);
    }
    None
}

fn is_traceparent(text: &str) -> bool {
    let hex = |part: &str, len| {
        part.len() == len && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let mut parts = text.split('-');
    let (version, trace, parent, flags) = (parts.next(), parts.next(), parts.next(), parts.next());
    version.is_some_and(|version| {
        hex(version, 2) && version != "ff" && (version != "00" || parts.next().is_none())
    }) && trace.is_some_and(|trace| hex(trace, 32) && trace.bytes().any(|byte| byte != b'0'))
        && parent.is_some_and(|parent| hex(parent, 16) && parent.bytes().any(|byte| byte != b'0'))
        && flags.is_some_and(|flags| hex(flags, 2))
}
