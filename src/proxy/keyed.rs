//! A single `tools/call` with all that keys it: its identity, its key, its claim, and what goes into its
//! `_meta`.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response};
use tokio::time::Instant;

use super::{
    LegacyDisconnect, Sidecar, Turn,
    post::{Asked, CALL, KEY},
    refuse,
};
use crate::{
    account::Outcome,
    call::{
        identity::Identity,
        key::{self, header_value},
    },
    error::{Effect, Failure, INVALID_REQUEST, Reason, Refusal},
    headers,
    ledger::{
        self, Claimed, Named,
        entry::{Attempt, Verdict, own_resume_text, resume_text},
    },
    listing::Known,
    message::{Era, Kind, Message, Meta, MetaObject},
    relay::{Body, clocks},
    store,
};

/// The key, as answered to the node.
const KEY_HEADER: HeaderName = HeaderName::from_static("oz0-idempotency-key");
/// How an attempt of 2 and up began.
const RESUME_HEADER: HeaderName = HeaderName::from_static("oz0-resume");
/// The resume token and its progress, into a call.
const RESUME: &str = "oz0/resume";
/// The sidecar's own object, consumed here.
pub(super) const OWN_CALL: &str = "oz0/call";
/// Arguments from here on are canonicalised off the async threads.
const LARGE: usize = 128 * 1024;

/// What a call goes upstream with, beyond what the node sent.
#[derive(Debug, Default)]
pub(super) struct Going {
    /// Members for `params._meta`: key and raw JSON value.
    pub(super) add: Vec<(&'static str, String)>,
    /// The key, for the `Idempotency-Key` header.
    pub(super) key: Option<String>,
    /// Headers of the answer to the node, whatever it is.
    pub(super) answer: Vec<(HeaderName, HeaderValue)>,
}

/// Why a call does not go upstream: the answer that the node gets.
type Stopped = Box<Response<Body>>;

impl Sidecar {
    /// Everything that happens to a call before it is sent. What stops it is answered.
    pub(super) async fn keyed(
        self: &Arc<Self>,
        mut turn: Box<Turn>,
        message: &Message,
        body: &Bytes,
        asked: &mut Asked,
    ) -> Result<(Box<Turn>, Going), Stopped> {
        let tool = message.params.name.as_deref().unwrap_or_default();
        let meta = match &message.params.meta {
            Meta::Object(meta) => Some(meta),
            _ => None,
        };
        let raw = |meta: &MetaObject, key: &str| meta.oz0.get(key).map(|at| body.slice(at.clone()));
        let own = meta.and_then(|meta| raw(meta, KEY));
        let said = meta.and_then(|meta| raw(meta, OWN_CALL));
        let own = match own.as_deref().map(serde_json::from_slice::<String>) {
            None => None,
            Some(Ok(own)) if !own.is_empty() => Some(own),
            Some(_) => {
                return Err(invalid(turn, message, "oz0/idempotency_key is no string, or an empty one"));
            }
        };
        let said = said.as_deref().map(|said| std::str::from_utf8(said).unwrap_or_default());
        let identity = Identity::read(said, &turn.parts.headers).and_then(|identity| {
            let keyed = own.is_some() || key::has_header_key(&identity, &turn.parts.headers);
            identity.check(keyed, message.params.leg).map(|()| identity)
        });
        let identity = match identity {
            Ok(identity) => identity,
            Err(error) => return Err(invalid(turn, message, &error.to_string())),
        };
        // A key that cannot be put into the call names nothing to its server.
        let fits = takes_more(&turn, message);
        let named = (fits || own.is_some()) && key::is_named(&identity, own.as_deref(), &turn.parts.headers);
        let (known, recalled) = self.known(&turn.route, tool, named).await;
        note(&mut turn, &identity, &known);
        if known.changed && identity.attempt.is_some_and(|attempt| attempt >= 2) {
            // With a key or without.
            return Err(self.refused(turn, asked, &Verdict::Changed).into());
        }
        if !limit(&mut turn, &identity, asked) {
            let failure = Failure::not_sent(Reason::MaxTimeout, "the tool's time limit has passed");
            return Err(self.failed(turn.exchange, asked, &failure).into());
        }
        if !named {
            return Ok((turn, Going::default()));
        }
        if let Err(error) = recalled {
            // The key's form, and whether it may be sent at all, hang on what is known of the tool.
            return Err(self.away(turn, asked, &error));
        }
        let digest = match digest(message, body).await {
            Ok(digest) => digest,
            Err(error) => {
                return Err(invalid(turn, message, &format!("the arguments have no digest: {error}")));
            }
        };
        let derivation =
            key::derive(&identity, own.as_deref(), tool, &digest, known.idempotent, &turn.parts.headers);
        let key = match self.ledger.key(&turn.route.name, derivation).await {
            Ok(Named::Key(key)) => key,
            Ok(Named::Nothing) => return Ok((turn, Going::default())),
            Ok(Named::Full) => return Err(self.refused(turn, asked, &Verdict::Full).into()),
            Err(error) => return Err(self.away(turn, asked, &error)),
        };
        turn.exchange.account.record.key = Some(key.clone());
        turn.exchange.account.record.digest = Some(digest.clone());
        let resume = meta.and_then(|meta| raw(meta, RESUME));
        let call = Keyed { identity, known, own: own.is_some(), resume, key, digest };
        Box::pin(self.claim(turn, message, meta, asked, call)).await
    }

    async fn claim(
        self: &Arc<Self>,
        mut turn: Box<Turn>,
        message: &Message,
        meta: Option<&MetaObject>,
        asked: &Asked,
        call: Keyed,
    ) -> Result<(Box<Turn>, Going), Stopped> {
        let Keyed { identity, known, own, resume, key, digest } = call;
        let authorization = turn.parts.headers.get(http::header::AUTHORIZATION).cloned();
        let principal = self.ledger.principal(authorization.as_ref().map(HeaderValue::as_bytes)).await;
        let principal = match principal {
            Ok(principal) => principal,
            Err(error) => return Err(self.away(turn, asked, &error)),
        };
        let attempt = Attempt {
            function: message.params.name.clone().unwrap_or_default(),
            digest,
            owner: ledger::owner(),
            principal,
            era: turn.exchange.era,
            class: known.class,
            read_only: known.read_only,
            listed: known.listed,
            changed: known.changed,
            number: identity.attempt,
            leg: message.params.leg,
            task: turn.exchange.era == Era::Legacy && message.params.task,
            lease: ledger::LEASE_MS,
        };
        let running = turn.exchange.entry.as_ref().map(|entry| entry.running.clone());
        let claimed = self.ledger.claim(&turn.route.name, &key, attempt, running).await;
        let mut going = Going { key: Some(key.clone()), ..Going::default() };
        going.answer.extend(header_value(&key).map(|value| (KEY_HEADER, value)));
        let go = match claimed {
            Ok(Claimed::Run(claim, mut go)) => {
                // What is not put into the call is not gone on from.
                go.resume = go.resume.filter(|_| resume.is_none() && takes_more(&turn, message));
                turn.exchange.claim = Some(*claim);
                go
            }
            Ok(Claimed::Replay(result)) => return Err(with(replay(turn, asked, &result), going.answer)),
            Ok(Claimed::Refused(verdict)) => {
                return Err(with(self.refused(turn, asked, &verdict), going.answer));
            }
            Err(error) => return Err(self.away(turn, asked, &error)),
        };
        turn.exchange.account.record.attempt = Some(go.attempt);
        let again = known.class.may_be_made_again();
        if go.attempt >= 2 {
            let text = match &resume {
                Some(own) => own_resume_text(own),
                None => resume_text(&go, again, known.resume),
            };
            going.answer.extend(HeaderValue::try_from(&text).ok().map(|text| (RESUME_HEADER, text)));
            turn.exchange.account.record.resume = Some(text);
        }
        if !own {
            going.add.push((KEY, quoted(&key)));
        }
        if let Some(resume) = go.resume.filter(|_| again && known.resume) {
            let value = serde_json::json!({ "token": resume.token, "progress": number(resume.at.progress) });
            going.add.push((RESUME, value.to_string()));
        }
        let auto = turn.route.legacy_disconnect == LegacyDisconnect::Auto;
        if let Some(request) = &mut turn.exchange.request {
            request.resumable = known.resume;
            // The node of a keyed call makes another attempt: this one is to stop.
            request.cancels_on_disconnect |= auto && request.notice.is_some();
        }
        self.ask_for_progress(&mut turn, message, meta, again, &mut going).await;
        Ok((turn, going))
    }

    /// A call that may be made again is asked for progress; where the node did not ask, what comes is kept here.
    async fn ask_for_progress(
        &self,
        turn: &mut Turn,
        message: &Message,
        meta: Option<&MetaObject>,
        again: bool,
        going: &mut Going,
    ) {
        let task = turn.exchange.era == Era::Legacy && message.params.task;
        let asks = meta.is_some_and(|meta| meta.has_progress_token);
        let streams = headers::accepts(&turn.parts.headers, "text/event-stream");
        if !again || asks || task || !streams {
            return;
        }
        if let Ok(token) = self.ledger.progress_token().await {
            going.add.push(("progressToken", quoted(&token)));
            if let Some(request) = &mut turn.exchange.request {
                request.added_token = crate::message::Id::parse(quoted(&token).as_bytes());
            }
        }
    }

    /// The state store is away: nothing is sent whose key could not be claimed.
    fn away(&self, mut turn: Box<Turn>, asked: &Asked, error: &store::Error) -> Stopped {
        turn.exchange.account.record.reason = Some("store_unavailable");
        turn.exchange.account.record.error = Some(error.to_string());
        self.too_many(turn, asked).into()
    }

    fn refused(&self, mut turn: Box<Turn>, asked: &Asked, verdict: &Verdict) -> Response<Body> {
        let (reason, effect, message) = match verdict {
            Verdict::Mismatch => (
                Reason::KeyMismatch,
                Effect::NotSent,
                "the key stands for a call with another tool or other arguments",
            ),
            Verdict::Changed => {
                (Reason::Policy, Effect::NotSent, "the tool has changed since it was approved")
            }
            Verdict::AlreadyDone => {
                (Reason::AlreadyDone, Effect::Done, "the call is done, its result is not held any more")
            }
            Verdict::OutcomeUnknown => (
                Reason::OutcomeUnknown,
                Effect::Unknown,
                "an earlier attempt may have been made, this one was not sent: reconcile first",
            ),
            Verdict::Busy | Verdict::Run(_) | Verdict::Replay => {
                turn.exchange.account.record.reason = Some("overlap");
                return self.too_many(turn, asked);
            }
            Verdict::Full => {
                turn.exchange.account.record.reason = Some("ledger_full");
                let full = "the ledger holds as many keys as it may, nothing was sent";
                turn.exchange.account.record.error = Some(full.to_owned());
                return self.too_many(turn, asked);
            }
        };
        self.failed(turn.exchange, asked, &Failure { reason, effect, message: message.into() })
    }
}

/// A call whose key is known.
struct Keyed {
    identity: Identity,
    known: Known,
    own: bool,
    /// The node's own `oz0/resume`, which is left alone.
    resume: Option<Bytes>,
    key: String,
    digest: String,
}

/// Why a call that says which call it is, and has no id to be answered under, is refused: it can't be claimed, and its server
/// may make it all the same.
pub(super) fn unanswerable(turn: &Turn, message: &Message) -> Option<Refusal> {
    let other = matches!(message.kind, Kind::Notification | Kind::Other);
    if !other || message.method.as_deref() != Some(CALL) {
        return None;
    }
    let said = match &message.params.meta {
        Meta::Object(meta) => [OWN_CALL, KEY].iter().any(|key| meta.oz0.contains_key(*key)),
        _ => false,
    };
    let headers = &turn.parts.headers;
    let named = said
        || headers.contains_key(key::IDEMPOTENCY_KEY)
        || headers.keys().any(|name| name.as_str().starts_with("oz0-"));
    named.then(|| {
        Refusal::bad_request(INVALID_REQUEST, "a call with an identity has an id, a string or a number", None)
    })
}

/// What the log says of an identity and its tool.
fn note(turn: &mut Turn, identity: &Identity, known: &Known) {
    let record = &mut turn.exchange.account.record;
    record.job.clone_from(&identity.job);
    record.activity.clone_from(&identity.activity);
    record.attempt = identity.attempt;
    record.retry_class = Some(known.class.name());
    record.listing_changed = known.changed.then_some(true);
}

/// Lowers the maximum to what the node's time limit leaves, counted from the start of the attempt. False: nothing.
fn limit(turn: &mut Turn, identity: &Identity, asked: &mut Asked) -> bool {
    let Some(limit) = identity.time_limit else { return true };
    let left = clocks::time_limit(limit, identity.elapsed).min(turn.route.max_timeout);
    if left.is_zero() {
        return false;
    }
    let opened = turn.exchange.account.opened();
    let until = opened.checked_add(left);
    let now = Instant::now();
    asked.clocks =
        clocks::Clocks::new(now, asked.idle, until.map(|until| until.saturating_duration_since(now)));
    if let (Some(request), Some(until)) = (&mut turn.exchange.request, until) {
        request.until = until;
    }
    true
}

/// The digest of the call's arguments.
async fn digest(message: &Message, body: &Bytes) -> Result<String, String> {
    let arguments = message.params.arguments.clone().map(|at| body.slice(at));
    let of = |arguments: Option<Bytes>| key::digest(arguments.as_deref()).map_err(|error| error.to_string());
    match arguments {
        Some(large) if large.len() > LARGE => tokio::task::spawn_blocking(move || of(Some(large)))
            .await
            .unwrap_or_else(|_| Err("it could not be computed".into())),
        arguments => of(arguments),
    }
}

/// The committed result, byte for byte, under the new id.
fn replay(mut turn: Box<Turn>, asked: &Asked, result: &Bytes) -> Response<Body> {
    turn.exchange.account.record.replayed = Some(true);
    // A cancel that came first is told nothing more than this answer.
    let _ = turn.exchange.answered();
    let id = asked.awaited.first().map(|id| id.token().to_vec()).unwrap_or_default();
    let body = [&br#"{"jsonrpc":"2.0","id":"#[..], &id, br#","result":"#, result, b"}"].concat();
    Sidecar::told(turn.exchange, body.into(), asked.accepts_json, Outcome::Ok)
}

/// A call that is refused as the request that it is: nothing was sent.
fn invalid(turn: Box<Turn>, message: &Message, reason: &str) -> Stopped {
    refuse(turn.exchange, &Refusal::bad_request(INVALID_REQUEST, reason, message.id.clone()), None).into()
}

fn with(mut response: Response<Body>, answer: Vec<(HeaderName, HeaderValue)>) -> Stopped {
    response.headers_mut().extend(answer);
    response.into()
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Whether anything is put into a call: not where its content is signed, or has no place for it.
fn takes_more(turn: &Turn, message: &Message) -> bool {
    let has_place = message.params.object.is_some() || message.params_value.is_none();
    has_place && !matches!(message.params.meta, Meta::NotObject) && !headers::is_signed(&turn.parts.headers)
}

/// A whole number is written as one.
fn number(value: f64) -> serde_json::Value {
    if value.fract() == 0.0 && value.abs() < 9_007_199_254_740_992.0 {
        (value as i64).into()
    } else {
        value.into()
    }
}
