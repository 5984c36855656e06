//! From the upstream's head, or what came instead of it, to the response that the node gets.

use std::{pin::pin, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use http_body::Body as _;
use tokio::time::Instant;

use super::{
    Asking, Sidecar, Turn,
    forward::Outgoing,
    left,
    post::{Asked, busy_body, trace, unavailable},
    read::{Coding, Read, off_thread, read, shed_form, spare},
    wait::{Cut, race},
};
use crate::{
    account::{self, CancelledBy, Outcome, Stream},
    busy::{self, Busy},
    error::{self, Failure, Reason},
    exchange::{self, Exchange, Resumes},
    headers,
    inflight::Sort,
    ledger::entry::State,
    limits::Held,
    message::{
        Era,
        answer::{self, Answer},
    },
    relay::{
        Body,
        clocks::{Clock, Clocks},
        decode::Decoder,
        held::{self, Rest},
        listen::Listen,
        stream::{self, Start},
    },
    server::Peer,
    upstream,
};

const JSON: HeaderValue = HeaderValue::from_static("application/json");
pub(super) const EVENT_STREAM: &str = "text/event-stream";
/// An answer up to here is read before its head is passed on, so that a break becomes an error that the node can read.
const SMALL: usize = 64 * 1024;
/// What some servers put before JSON, and some clients take away again (RFC 8259 § 8.1).
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

impl Sidecar {
    /// Sends a request and answers its node, whatever comes.
    pub(super) async fn forward(
        self: Arc<Self>,
        mut turn: Box<Turn>,
        asked: Asked,
        outgoing: Outgoing,
    ) -> Response<Body> {
        if let Some(claim) = &mut turn.exchange.claim {
            claim.ends(State::Unknown);
        }
        let running = turn.exchange.entry.as_ref().map(|entry| entry.running.clone());
        if running.as_ref().is_some_and(|running| running.is_closed()) {
            // While the ledger was asked: it is not sent any more.
            return self.cut(turn.exchange, &asked, Cut::Closed);
        }
        let peer = turn.peer.clone();
        let sent = {
            let work = pin!(self.send(&mut turn, outgoing));
            race(work, running.as_deref(), &asked.clocks, &peer).await
        };
        let response = match sent {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return self.failed(turn.exchange, &asked, &error.into()),
            Err(cut) => return self.cut(turn.exchange, &asked, cut),
        };
        match self.busy(&mut turn, &asked, &response) {
            None => self.answer(turn, asked, response).await,
            Some(told) => {
                Box::pin(spare(response.into_body())).await;
                settle(told, turn.exchange)
            }
        }
    }

    async fn answer(
        self: Arc<Self>,
        mut turn: Box<Turn>,
        asked: Asked,
        response: Response<upstream::Body>,
    ) -> Response<Body> {
        let (mut head, body) = response.into_parts();
        self.learn_session(&turn, &asked, head.status);
        headers::toward_node(&mut head.headers);
        let coding = Coding::of(&head.headers);
        let readable = coding.is_readable();
        let event_stream = headers::is_content_type(&head.headers, EVENT_STREAM);
        if head.status.is_success() && !readable && !event_stream && asked.calls && !turn.exchange.is_won() {
            // Whatever it says could not be checked. An event stream passes unread.
            let message = "the upstream's answer is encoded in a way that nobody asked for";
            return self.failed(turn.exchange, &asked, &Failure::upstream(message));
        }
        let decoder = coding.decoder();
        if head.status == StatusCode::OK && event_stream && readable {
            // What its events will say of the revision is not waited for: the node names it in a header from now on.
            self.learn_protocol(&mut turn, &asked, &head.headers, &[]);
            return stream_answer(
                &self,
                turn,
                asked.awaited,
                asked.clocks,
                asked.listen,
                asked.again,
                head.headers,
                body,
                decoder,
            );
        }
        if turn.exchange.is_won() {
            return self.cut(turn.exchange, &asked, Cut::Closed);
        }
        // An event stream under another status is none to this hop.
        if !head.status.is_success() || !readable || event_stream {
            return pass_through(turn, head, Default::default(), body, decoder, asked.clocks);
        }
        self.held_answer(turn, asked, head, body, decoder).await
    }

    /// An answer that is read before it is passed on: a call's whole, any other's as far as it is small.
    async fn held_answer(
        self: Arc<Self>,
        mut turn: Box<Turn>,
        asked: Asked,
        mut head: http::response::Parts,
        mut body: upstream::Body,
        mut decoder: Option<Decoder>,
    ) -> Response<Body> {
        let limits = &turn.settings.limits;
        let whole = asked.calls || turn.exchange.learns.is_some();
        let limit = if whole { limits.response_body } else { SMALL };
        let mut held = Held::new(self.held.clone(), limits.buffered);
        let running = turn.exchange.entry.as_ref().map(|entry| entry.running.clone());
        let compressed = decoder.is_some();
        let read = {
            let reading = pin!(read(&mut body, &mut held, &mut decoder, limit, limits.response_body));
            race(reading, running.as_deref(), &asked.clocks, &turn.peer).await
        };
        let read = match read {
            Ok(Ok(read)) => read,
            Ok(Err(failure)) => return self.failed(turn.exchange, &asked, &failure),
            Err(cut) => return self.cut(turn.exchange, &asked, cut),
        };
        if turn.exchange.is_won() {
            return self.cut(turn.exchange, &asked, Cut::Closed);
        }
        let bytes = match read {
            Read::Whole(bytes) => bytes,
            Read::Begun { .. } if asked.calls => {
                let message = format!("the upstream's answer exceeds {limit} bytes");
                return self.failed(turn.exchange, &asked, &Failure::upstream(message));
            }
            Read::Begun { first, encoded } => {
                return pass_through(turn, head, (first, encoded), body, decoder, asked.clocks);
            }
        };
        if !turn.exchange.answered() {
            return self.cut(turn.exchange, &asked, Cut::Closed);
        }
        let looked = off_thread(bytes.clone(), |bytes| answer::look(unmarked(bytes))).await.flatten();
        if asked.call && !looked.as_ref().is_some_and(|answer| is_answer_to(answer, &asked)) {
            let message = "the upstream's answer to a call is no JSON-RPC response to it";
            return self.failed(turn.exchange, &asked, &Failure::upstream(message));
        }
        self.learn_protocol(&mut turn, &asked, &head.headers, &bytes);
        let outcome = exchange::outcome(looked.as_ref());
        let forged = looked.as_ref().and_then(Answer::forged).filter(|_| asked.calls);
        if compressed || forged.is_some() {
            shed_form(&mut head.headers);
        }
        let bytes = match forged {
            Some(response) => {
                let mark = bytes.len() - unmarked(&bytes).len();
                let (cut, count) = answer::cut_forged(&bytes.slice(mark..), response);
                turn.exchange.account.forged(count as u64);
                if mark == 0 { cut } else { [BYTE_ORDER_MARK, &cut].concat().into() }
            }
            None => bytes,
        };
        if (turn.exchange.learns.is_some() || turn.exchange.claim.is_some())
            && let json = bytes.slice(bytes.len() - unmarked(&bytes).len()..)
            && let Some(answer) = answer::look(&json)
            && let Some(work) = turn.exchange.settle(&json, &answer)
        {
            work.await;
        }
        if !bytes.is_empty() {
            turn.exchange.account.record.stream = Some(Stream::Json);
        }
        turn.exchange.account.record.status = Some(head.status.as_u16());
        turn.exchange.held = Some(held);
        let mut response = Response::new(held::whole(turn.exchange, bytes, outcome));
        *response.status_mut() = head.status;
        *response.headers_mut() = head.headers;
        response
    }

    /// A busy upstream's answer, if this is one.
    fn busy(&self, turn: &mut Turn, asked: &Asked, response: &Response<upstream::Body>) -> Option<Told> {
        if !asked.converts {
            return None;
        }
        let wait = busy::retry_after(response.headers(), self.clock.now());
        let busy = match response.status() {
            StatusCode::TOO_MANY_REQUESTS => true,
            StatusCode::SERVICE_UNAVAILABLE => turn.route.busy_503 && wait.is_some(),
            _ => false,
        };
        if !busy || !turn.exchange.answered() {
            return None;
        }
        let status = response.status().as_u16();
        if let Some(claim) = &mut turn.exchange.claim {
            claim.ends(if status == 429 { State::Busy } else { State::BusyUnavailable });
        }
        let said = Busy { upstream: &turn.route.name, status: Some(status), retry_after: wait.as_deref() };
        let body = busy_body(&said, asked, turn.exchange.era);
        turn.exchange.account.record.retry_after = wait.and_then(|wait| account::token(wait.as_bytes()));
        let mut headers = response.headers().clone();
        headers::toward_node(&mut headers);
        headers::shed_content(&mut headers);
        headers.insert(headers::UPSTREAM_STATUS, HeaderValue::from(status));
        Some(Told { body, headers, accepts_json: asked.accepts_json, outcome: Outcome::Busy })
    }

    /// An answer of the sidecar's own, HTTP 200, as JSON or, where `Accept` excludes that, as one event.
    pub(super) fn told(
        exchange: Exchange,
        body: Bytes,
        accepts_json: bool,
        outcome: Outcome,
    ) -> Response<Body> {
        settle(Told { body, headers: HeaderMap::new(), accepts_json, outcome }, exchange)
    }

    /// A failure of the hop, told to the node.
    pub(super) fn failed(&self, exchange: Exchange, asked: &Asked, failure: &Failure) -> Response<Body> {
        let of_cancel =
            matches!(failure.reason, Reason::Killed | Reason::Policy | Reason::Draining | Reason::LeaseLost);
        if exchange.is_won() && !of_cancel {
            return self.cut(exchange, asked, Cut::Closed);
        }
        Self::tell(exchange, asked, failure)
    }

    /// The failure itself, whatever else came.
    fn tell(mut exchange: Exchange, asked: &Asked, failure: &Failure) -> Response<Body> {
        exchange.upstream_ended = failure.reason == Reason::UpstreamFailed;
        exchange.fail(failure);
        if asked.awaited.is_empty() {
            return told_by_status(exchange, failure);
        }
        let request = exchange.account.record.request.clone();
        let progress = exchange.progress();
        let errors: Vec<Bytes> = asked
            .awaited
            .iter()
            .map(|id| error::body(failure, Some(id), exchange.upstream(), &request, progress))
            .collect();
        let body = match errors.as_slice() {
            [one] if !asked.batch => one.clone(),
            all => [&b"["[..], &all.join(&b","[..]), b"]"].concat().into(),
        };
        let outcome = exchange.account.record.outcome.unwrap_or(Outcome::Failed);
        Self::told(exchange, body, asked.accepts_json, outcome)
    }

    /// What came instead of the upstream's answer. Once a cancel has won only the node's leaving is worth a look.
    fn cut(&self, mut exchange: Exchange, asked: &Asked, cut: Cut) -> Response<Body> {
        let failure = match cut {
            Cut::Gone => return left(exchange),
            Cut::Clock(Clock::Idle) if !exchange.is_won() => {
                Failure::unknown(Reason::IdleTimeout, "the upstream was silent for the idle timeout")
            }
            Cut::Clock(Clock::Max) if !exchange.is_won() => {
                Failure::unknown(Reason::MaxTimeout, "the call reached its maximum time")
            }
            Cut::Closed | Cut::Clock(_) => {
                let running = exchange.entry.as_ref().map(|entry| entry.running.clone());
                let by = running.as_ref().and_then(|running| running.cancelled());
                let lost = running.and_then(|running| exchange::lease_lost(&running));
                // Streams that a drain ends are closed without a cancel.
                match lost.or_else(|| exchange::told(by.map_or(CancelledBy::Drain, |(by, _)| by))) {
                    Some(failure) => failure,
                    None => return empty_stream(exchange),
                }
            }
        };
        exchange.notify_upstream();
        Self::tell(exchange, asked, &failure)
    }

    /// Everything that is no JSON-RPC request: `GET`, `DELETE`, other methods, and messages that have no answer.
    pub(super) async fn pass(self: Arc<Self>, mut turn: Box<Turn>, body: Bytes) -> Response<Body> {
        let method = turn.parts.method.clone();
        let get = method == Method::GET;
        let now = Instant::now();
        let mut clocks = Clocks::new(now, Some(turn.route.idle_timeout), Some(turn.route.max_timeout));
        if get {
            if let Err(()) = self.take_stream(&mut turn) {
                return unavailable(turn, None);
            }
            self.ledger.prepare().await;
            clocks = Clocks::new(now, None, None);
        }
        trace(&mut turn, None);
        let outgoing = self.outgoing(&turn, body, get || method == Method::POST);
        let running = turn.exchange.entry.as_ref().map(|entry| entry.running.clone());
        let peer = turn.peer.clone();
        let asked = Asked::nothing(self.scope(&turn), clocks);
        let message = method == Method::POST;
        let sent = if message {
            // Handed over: it goes on whatever its node does.
            let nobody = Peer::detached("", "");
            race(pin!(self.send(&mut turn, outgoing)), running.as_deref(), &asked.clocks, &nobody).await
        } else {
            race(pin!(self.send(&mut turn, outgoing)), running.as_deref(), &asked.clocks, &peer).await
        };
        let response = match sent {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return self.failed(turn.exchange, &asked, &error.into()),
            Err(cut) => return self.cut(turn.exchange, &asked, cut),
        };
        let (mut head, body) = response.into_parts();
        self.learn_session(&turn, &asked, head.status);
        headers::toward_node(&mut head.headers);
        if message {
            turn.exchange.end(by_status(head.status));
        }
        let coding = Coding::of(&head.headers);
        let event_stream = headers::is_content_type(&head.headers, EVENT_STREAM);
        let readable = coding.is_readable();
        let decoder = coding.decoder();
        if head.status == StatusCode::OK && event_stream && readable && method != Method::HEAD {
            return stream_answer(
                &self,
                turn,
                Vec::new(),
                asked.clocks,
                true,
                None,
                head.headers,
                body,
                decoder,
            );
        }
        // Of the others the node said itself what it takes.
        let decoder = decoder.filter(|_| get || message);
        pass_through(turn, head, Default::default(), body, decoder, asked.clocks)
    }

    /// A well-known document: relayed unread, with no credential of the upstream's.
    pub(super) async fn well_known(
        self: Arc<Self>,
        mut turn: Box<Turn>,
        path: String,
        body: Bytes,
    ) -> Response<Body> {
        let clocks = Clocks::new(Instant::now(), Some(turn.route.idle_timeout), Some(turn.route.max_timeout));
        let outgoing = self.outgoing_document(&turn, &path, body);
        let asked = Asked::nothing(self.scope(&turn), clocks);
        let peer = turn.peer.clone();
        let sent = {
            let work = pin!(self.send(&mut turn, outgoing));
            race(work, None, &asked.clocks, &peer).await
        };
        match sent {
            Ok(Ok(response)) => {
                let (mut head, body) = response.into_parts();
                headers::toward_node(&mut head.headers);
                pass_through(turn, head, Default::default(), body, None, asked.clocks)
            }
            Ok(Err(error)) => self.failed(turn.exchange, &asked, &error.into()),
            Err(cut) => self.cut(turn.exchange, &asked, cut),
        }
    }

    /// A `GET` stream's place. One that resumes may carry a call's response: a drain lets it pass.
    fn take_stream(self: &Arc<Self>, turn: &mut Turn) -> Result<(), ()> {
        let resumes = turn.parts.headers.get(headers::LAST_EVENT_ID);
        if self.is_draining() && resumes.is_none() {
            turn.exchange.account.record.reason = Some(Reason::Draining.name());
            return Err(());
        }
        let permit = self.streams.take(turn.settings.limits.streams).ok_or(())?;
        turn.exchange.permits.push(permit);
        let scope = self.scope(turn);
        if let Some(id) = resumes {
            self.canceller.resumed(&scope, id.as_bytes());
        }
        let sort = if resumes.is_some() { Sort::Uncancellable } else { Sort::Stream };
        let learns = self.learns(&turn.route.name, Vec::new());
        turn.exchange.resumes = Some(Resumes { ledger: self.ledger.clone(), scope: scope.clone(), learns });
        turn.exchange.entry = Some(self.registry.enter(scope, None, sort, Era::Legacy));
        Ok(())
    }
}

/// What the sidecar itself answers, in either form.
struct Told {
    body: Bytes,
    headers: HeaderMap,
    accepts_json: bool,
    outcome: Outcome,
}

fn settle(told: Told, mut exchange: Exchange) -> Response<Body> {
    let Told { body, mut headers, accepts_json, outcome } = told;
    let record = &mut exchange.account.record;
    record.status = Some(200);
    let body = if accepts_json {
        record.stream = Some(Stream::Json);
        headers.insert(header::CONTENT_TYPE, JSON);
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        held::whole(exchange, body, outcome)
    } else {
        record.stream = Some(Stream::Sse);
        record.events = Some(1);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(EVENT_STREAM));
        headers::force_stream(&mut headers);
        held::event_stream(exchange, event(&body), outcome)
    };
    let mut response = Response::new(body);
    *response.headers_mut() = headers;
    response
}

/// One event with a message as its data, line by line: a replayed result has the line ends that its upstream wrote, and
/// any of CR, LF and both ends a line of an event (WHATWG HTML § 9.2.6).
fn event(message: &[u8]) -> Bytes {
    let mut event = b"event: message\ndata: ".to_vec();
    let mut rest = message;
    while let Some(end) = memchr::memchr2(b'\r', b'\n', rest) {
        event.extend_from_slice(&rest[..end]);
        event.extend_from_slice(b"\ndata: ");
        rest = &rest[end + if rest[end..].starts_with(b"\r\n") { 2 } else { 1 }..];
    }
    event.extend_from_slice(rest);
    event.extend_from_slice(b"\n\n");
    event.into()
}

/// A failure where there is no id to answer.
fn told_by_status(exchange: Exchange, failure: &Failure) -> Response<Body> {
    let request = exchange.account.record.request.clone();
    let body = error::body(failure, None, exchange.upstream(), &request, None);
    let mut exchange = exchange;
    let status = failure.reason.status();
    exchange.account.record.status = Some(status.as_u16());
    let outcome = exchange.account.record.outcome.unwrap_or(Outcome::Failed);
    let mut response = Response::new(held::whole(exchange, body, outcome));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, JSON);
    response
}

/// The end of a request whose cancel has won: a stream without a response.
fn empty_stream(mut exchange: Exchange) -> Response<Body> {
    exchange.settle_cancelled();
    exchange.account.record.status = Some(200);
    exchange.account.record.stream = Some(Stream::Sse);
    let mut response = Response::new(held::event_stream(exchange, Bytes::new(), Outcome::Cancelled));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(EVENT_STREAM));
    headers::force_stream(headers);
    response
}

/// How an HTTP status counts in the log.
fn by_status(status: StatusCode) -> Outcome {
    if status.is_client_error() || status.is_server_error() { Outcome::RpcError } else { Outcome::Ok }
}

/// A JSON text without the byte-order mark that it should not have.
fn unmarked(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

/// Whether an answer is one to this call. An error whose id is null is: its sender could not read the id.
fn is_answer_to(answer: &Answer, asked: &Asked) -> bool {
    match answer {
        Answer::Response(response) => match &response.id {
            Some(id) => asked.awaited.contains(id),
            None => response.result.is_none(),
        },
        other => other.answers(),
    }
}

/// Whether a status says that a call was not made: a 4xx, or a redirect that asks for the same request elsewhere. What asks for
/// another one instead (303, and 301 and 302 as they came to be used) may answer a call that was (RFC 9110 § 15.4).
fn declines(status: StatusCode) -> bool {
    status.is_client_error()
        || matches!(status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT)
}

/// Status, headers and body as they came, but for a coding that nobody asked for.
fn pass_through(
    mut turn: Box<Turn>,
    mut head: http::response::Parts,
    (first, encoded): (Bytes, Bytes),
    rest: upstream::Body,
    decoder: Option<Decoder>,
    clocks: Clocks,
) -> Response<Body> {
    let piece = turn.settings.limits.response_body;
    // A head that no body follows describes another answer's.
    let decoder = decoder.filter(|_| !first.is_empty() || !rest.is_end_stream());
    if decoder.is_some() {
        shed_form(&mut head.headers);
    }
    let rest = Rest { body: rest, encoded, decoder, piece };
    turn.exchange.account.record.status = Some(head.status.as_u16());
    if let Some(claim) = &mut turn.exchange.claim {
        claim.ends(if declines(head.status) { State::Failed } else { State::Unknown });
    }
    // A stream that can't be read, since its coding is not known, must not be held up behind this hop either.
    if head.status == StatusCode::OK && headers::is_content_type(&head.headers, EVENT_STREAM) {
        headers::force_stream(&mut head.headers);
    }
    let never_sent = turn.parts.method == Method::HEAD;
    let outcome = by_status(head.status);
    let mut response =
        Response::new(held::pulled(turn.exchange, first, rest, clocks, outcome, never_sent, &turn.peer));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    response
}

/// An event stream, relayed event by event.
#[allow(clippy::too_many_arguments, reason = "the parts of one answer, each used once")]
fn stream_answer(
    sidecar: &Sidecar,
    mut turn: Box<Turn>,
    awaited: Vec<crate::message::Id>,
    clocks: Clocks,
    endless: bool,
    again: Option<Arc<Asking>>,
    mut headers: HeaderMap,
    upstream: upstream::Body,
    decoder: Option<Decoder>,
) -> Response<Body> {
    let limits = &turn.settings.limits;
    // Validators and digests are of other bytes: comments are cut out, and a coding is undone.
    headers::shed_digests(&mut headers);
    headers.remove(header::ETAG);
    if decoder.is_some() {
        shed_form(&mut headers);
    }
    headers::force_stream(&mut headers);
    turn.exchange.account.record.status = Some(200);
    turn.exchange.account.record.stream = Some(Stream::Sse);
    let held = || Held::new(sidecar.held.clone(), limits.buffered);
    let listen = again.zip(awaited.first().cloned());
    let listen = listen.map(|(asking, id)| Listen::new(asking, id, turn.route.listen.give_up, held()));
    let body = stream::relay(Start {
        exchange: turn.exchange,
        awaited,
        endless,
        upstream,
        ledger: sidecar.ledger.clone(),
        decoder,
        settings: turn.route.relay.clone(),
        clocks: if endless { Clocks::new(Instant::now(), None, None) } else { clocks },
        event_limit: limits.event,
        client_stall: limits.client_stall,
        idle_timeout: turn.route.idle_timeout,
        held: held(),
        lane: sidecar.lane.clone(),
        listen,
        peer: turn.peer,
    });
    let mut response = Response::new(body);
    *response.headers_mut() = headers;
    response
}
