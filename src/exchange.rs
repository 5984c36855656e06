//! One exchange while it is open: what its end has to settle, whoever ends it.
//!
//! It moves from the response future into the response body (for a stream, both the body and the pump hold it). When
//! the last holder is gone its place in the registry is freed and its one access-log line is written. An exchange that
//! nobody ended was left by its node: that is a cancellation.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use bytes::Bytes;
use tokio::time::Instant;

use crate::{
    account::{Account, CancelledBy, Outcome},
    cancel::Notice,
    error::{Effect, Failure, Progress, Reason},
    inflight::{Entry, Running, Scope},
    ledger::{Claim, Ledger, Waiting, entry},
    limits::{Held, Permit},
    message::{
        Era, Id,
        answer::{Answer, Response},
    },
    proxy::{Route, Sidecar},
    relay::terminal::State,
    store::BoxFuture,
};

/// What only requests have.
#[derive(Debug)]
pub struct Request {
    /// The request's id; none for a batch.
    pub id: Option<Id>,
    /// It is a single `tools/call`.
    pub call: bool,
    /// The node's progress token.
    pub progress_token: Option<Id>,
    /// The token that the sidecar added: its progress is kept back.
    pub added_token: Option<Id>,
    /// When its maximum is reached.
    pub until: Instant,
    /// The tool's progress may carry resume tokens.
    pub resumable: bool,
    /// A legacy node that hangs up means `notifications/cancelled` too.
    pub cancels_on_disconnect: bool,
    /// The `notifications/cancelled` that a clock, a drain or a hang-up sends; none in modern and where it must not be sent.
    pub notice: Option<Notice>,
}

/// Where the tools of an answer are learnt.
#[derive(Debug)]
pub struct Learns {
    /// By whom.
    pub sidecar: Arc<Sidecar>,
    /// Of which upstream.
    pub upstream: Arc<str>,
    /// The ids of the requests for a listing whose answers are to come: one, or those of a batch.
    pub ids: Vec<Id>,
}

impl Learns {
    /// Learns the tools of what is, or holds, an answer to a request for a listing. `None`: there is nothing to learn.
    pub fn learn(&mut self, data: &Bytes, answer: &Answer) -> Option<BoxFuture<'static, ()>> {
        let responses = answer.responses().into_iter().filter(|response| {
            let awaited = self.ids.iter().position(|id| response.id.as_ref() == Some(id));
            awaited.map(|at| self.ids.swap_remove(at)).is_some() && response.result.is_some()
        });
        let batch = matches!(answer, Answer::Batch(_));
        let listings: Vec<Bytes> = responses.filter_map(|response| listing(data, response, batch)).collect();
        let (sidecar, upstream) = (self.sidecar.clone(), self.upstream.clone());
        (!listings.is_empty()).then(|| -> BoxFuture<'static, ()> {
            Box::pin(async move {
                for listing in listings {
                    sidecar.learn(&upstream, listing).await;
                }
            })
        })
    }
}

/// The answer to a request for a listing: the message itself, or what says the same of one in a batch.
fn listing(data: &Bytes, response: &Response, batch: bool) -> Option<Bytes> {
    if !batch {
        return Some(data.clone());
    }
    let result = data.get(response.result.clone()?)?;
    Some([&br#"{"result":"#[..], result, b"}"].concat().into())
}

/// Whose calls may be answered on a `GET` stream.
#[derive(Debug)]
pub struct Resumes {
    /// Where they are parked.
    pub ledger: Arc<Ledger>,
    /// The session's.
    pub scope: Scope,
    /// Where the tools of a listing are learnt that was asked for before.
    pub learns: Learns,
}

impl Resumes {
    /// What has to be done before a response goes out: the end of its call is stored, its tools are learnt.
    pub fn settle(&mut self, data: &Bytes, answer: &Answer) -> Vec<BoxFuture<'static, ()>> {
        let mut work = Vec::new();
        for response in answer.responses() {
            let Some(id) = &response.id else { continue };
            if let Some(claim) = self.ledger.resumed(&self.scope, id) {
                let (ends, result, ttl) = settlement(data, response, claim.is_task());
                work.push(claim.finish(ends, result, ttl));
            } else if self.learns.sidecar.listing_came(&self.scope, id) {
                self.learns.ids.push(id.clone());
            }
        }
        work.extend(self.learns.learn(data, answer));
        work
    }
}

/// One open exchange.
#[derive(Debug)]
pub struct Exchange {
    /// Where it goes.
    pub route: Option<Arc<Route>>,
    /// Its era.
    pub era: Era,
    /// Set for requests.
    pub request: Option<Request>,
    /// Its claim, if it is a keyed call; settled when its end is known, at the latest with the exchange.
    pub claim: Option<Claim>,
    /// The answer shows tools.
    pub learns: Option<Learns>,
    /// A `GET` stream, on which the responses of earlier calls may come.
    pub resumes: Option<Resumes>,
    /// Its place among what runs.
    pub entry: Option<Entry>,
    /// When its node was seen to be gone.
    pub left: Option<Instant>,
    /// The upstream ended its stream before the node left.
    pub upstream_ended: bool,
    /// The node has an event id of a legacy stream to resume from.
    pub may_resume: bool,
    /// Freed with the exchange: its place under the limits.
    pub permits: Vec<Permit>,
    /// The bytes of a body that is held whole.
    pub held: Option<Held>,
    /// Its line; written last.
    pub account: Account,
}

impl Exchange {
    /// An exchange of which only its account is known.
    pub fn new(account: Account) -> Self {
        Self {
            route: None,
            era: Era::Legacy,
            request: None,
            claim: None,
            learns: None,
            resumes: None,
            entry: None,
            left: None,
            upstream_ended: false,
            may_resume: false,
            permits: Vec::new(),
            held: None,
            account,
        }
    }

    /// The request's id, for an answer of the sidecar's own.
    pub fn id(&self) -> Option<&Id> {
        self.request.as_ref().and_then(|request| request.id.as_ref())
    }

    /// The upstream's name, as errors and texts show it.
    pub fn upstream(&self) -> &str {
        self.route.as_ref().map_or("", |route| &route.name)
    }

    /// Ends the exchange; the first end stands.
    pub fn end(&mut self, outcome: Outcome) {
        let record = &mut self.account.record;
        if record.outcome.is_none() {
            record.outcome = Some(outcome);
        }
    }

    /// Ends the exchange by a failure of the hop, which becomes its terminal state if none was reached before.
    pub fn fail(&mut self, failure: &Failure) {
        let (state, outcome, by) = match failure.reason {
            Reason::IdleTimeout => (State::IdleTimeout, Outcome::IdleTimeout, None),
            Reason::MaxTimeout => (State::MaxTimeout, Outcome::MaxTimeout, None),
            Reason::Draining => (State::Cancelled, Outcome::Cancelled, Some(CancelledBy::Drain)),
            Reason::Killed => (State::Cancelled, Outcome::Cancelled, Some(CancelledBy::Admin)),
            Reason::Policy if failure.effect == Effect::Unknown => {
                (State::Cancelled, Outcome::Cancelled, Some(CancelledBy::Policy))
            }
            Reason::Policy | Reason::KeyMismatch | Reason::AlreadyDone | Reason::OutcomeUnknown => {
                (State::Failed, Outcome::Refused, None)
            }
            Reason::LeaseLost => (State::Failed, Outcome::Failed, None),
            Reason::UpstreamUnreachable | Reason::UpstreamRefused | Reason::UpstreamFailed => {
                (State::Failed, Outcome::Failed, None)
            }
        };
        if let Some(entry) = &self.entry {
            entry.running.terminal.end(state);
        }
        if let Some(claim) = self.claim.as_mut().filter(|_| failure.effect == Effect::NotSent) {
            claim.ends(entry::State::NotSent);
        }
        let cancel = self.entry.as_ref().and_then(|entry| entry.running.cancelled());
        let record = &mut self.account.record;
        if record.outcome.is_none() {
            record.outcome = Some(outcome);
            record.cancelled_by = by;
            record.cancel_ms = by.and(cancel).map(|(_, at)| at.elapsed());
            record.reason = Some(failure.reason.name());
            record.error = Some(failure.message.clone());
        }
    }

    /// The upstream's response is complete in the sidecar. False if a cancel came first: then it is not sent.
    #[must_use]
    pub fn answered(&self) -> bool {
        self.entry.as_ref().is_none_or(|entry| entry.running.answered())
    }

    /// The response has been handed to the node's connection: completed, whatever the node does next.
    pub fn completed(&mut self, outcome: Outcome) {
        if let Some(entry) = &self.entry {
            entry.running.terminal.end(State::Completed);
        }
        self.end(outcome);
    }

    /// A cancel has won: nothing more goes to the node.
    pub fn is_won(&self) -> bool {
        self.entry.as_ref().is_some_and(|entry| entry.running.is_won())
    }

    /// The last progress that was seen, for errors.
    pub fn progress(&self) -> Option<Progress> {
        let record = &self.account.record;
        record.progress.map(|progress| Progress { progress, total: record.total })
    }

    /// What has to be done before a response goes out: the end of its call is stored, its tools are learnt.
    pub fn settle(&mut self, data: &Bytes, answer: &Answer) -> Option<BoxFuture<'static, ()>> {
        let mut work = Vec::new();
        let own = answer.responses().into_iter().find(|response| response.id.as_ref() == self.id());
        if let Some(response) = own.filter(|response| response.id.is_some())
            && let Some(claim) = self.claim.take()
        {
            let (ends, result, ttl) = settlement(data, response, claim.is_task());
            work.push(claim.finish(ends, result, ttl));
        }
        work.extend(self.learns.as_mut().and_then(|learns| learns.learn(data, answer)));
        work.extend(self.resumes.iter_mut().flat_map(|resumes| resumes.settle(data, answer)));
        (!work.is_empty()).then(|| all(work))
    }

    /// What is still awaited may come on a `GET` of the session: a call's claim waits for that until its clock runs out, and so
    /// does what is learnt.
    pub fn park(&mut self) {
        let Some((request, entry)) = self.request.as_ref().zip(self.entry.as_ref()) else { return };
        if let (Some(claim), Some(id)) = (self.claim.take(), request.id.clone()) {
            let ledger = claim.ledger();
            let waiting = Waiting {
                claim,
                tool: entry.running.calls.get().and_then(|(_, tools)| tools.first().cloned()),
                until: request.until,
                token: request.added_token.clone().or_else(|| request.progress_token.clone()),
                resumable: request.resumable,
                notice: request.notice.clone(),
            };
            ledger.park(entry.scope(), id, waiting);
            // A reload looks at what runs, then at what is parked: one that looked before has marked what runs.
            if let Some((upstream, tool)) = entry.running.denied() {
                ledger.deny(|of, denied| of == upstream && denied == tool);
            }
        }
        if let Some(Learns { sidecar, ids, .. }) = self.learns.take() {
            ids.into_iter().for_each(|id| sidecar.await_listing(entry.scope(), id, request.until));
        }
    }

    /// POSTs the legacy `notifications/cancelled`, if this exchange has one to send. At most once.
    pub fn notify_upstream(&mut self) {
        if let Some(notice) = self.request.as_mut().and_then(|request| request.notice.take()) {
            notice.send();
        }
    }

    /// The exchange was cancelled, by a signal or because its node is gone, and nothing is held upstream any more. The first end
    /// stands.
    pub fn settle_cancelled(&mut self) {
        if self.account.record.outcome.is_some() {
            return;
        }
        let signal = self.entry.as_ref().and_then(|entry| {
            entry.running.terminal.end(State::Cancelled);
            entry.running.cancelled()
        });
        let (by, at) = match signal {
            Some((by, at)) => (by, Some(at)),
            None => (CancelledBy::Disconnect, self.left),
        };
        let record = &mut self.account.record;
        record.outcome = Some(Outcome::Cancelled);
        record.cancelled_by = Some(by);
        // Without a moment of its own the hang-up is this drop: what was held upstream was dropped just before.
        record.cancel_ms = Some(at.map_or(Duration::ZERO, |at| at.elapsed()));
        let cancels = self.request.as_ref().is_some_and(|request| request.cancels_on_disconnect);
        // Where the response is complete there is nothing left to cancel, delivered or not.
        let answered = self.entry.as_ref().is_some_and(|entry| entry.running.is_answered());
        if by != CancelledBy::Disconnect || answered {
            return;
        }
        if self.may_resume {
            self.park();
        }
        if cancels && !self.upstream_ended {
            self.notify_upstream();
        }
    }

    /// Ends it now, with all that a drop would do, where its owner can't be dropped yet.
    pub fn close(&mut self) {
        self.settle_cancelled();
        self.claim = None;
        self.learns = None;
        self.entry = None;
        self.permits.clear();
        self.held = None;
        self.account.close();
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.settle_cancelled();
    }
}

/// Does all of it at once.
fn all(mut work: Vec<BoxFuture<'static, ()>>) -> BoxFuture<'static, ()> {
    Box::pin(poll_fn(move |cx| {
        work.retain_mut(|one| one.as_mut().poll(cx).is_pending());
        if work.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }))
}

/// How a response ends a claim: the state, the result that commits, and the longest that it may be held (a task handle's own
/// time). `task`: a legacy call with `params.task`, whose result is a handle.
pub fn settlement(
    data: &Bytes,
    response: &Response,
    task: bool,
) -> (entry::State, Option<Bytes>, Option<Duration>) {
    let Some(result) = response.result.clone().filter(|_| !response.is_error) else {
        return (entry::State::Failed, None, None);
    };
    match response.result_type.as_deref() {
        Some("input_required") => (entry::State::Waiting, None, None),
        kind => {
            let result = data.slice(result);
            let handle = kind == Some("task") || kind.is_none() && task;
            let ttl = handle.then(|| task_ttl(&result)).flatten();
            (entry::State::Done, Some(result), ttl)
        }
    }
}

/// A task's own time in milliseconds, from its creation: `ttlMs` (SEP-2663), in legacy `task.ttl` (MCP 2025-11-25, Tasks §
/// Data Types); none: without end.
fn task_ttl(result: &[u8]) -> Option<Duration> {
    #[derive(serde::Deserialize)]
    struct Handle {
        #[serde(rename = "ttlMs")]
        ttl_ms: Option<f64>,
        task: Option<Task>,
    }
    #[derive(serde::Deserialize)]
    struct Task {
        ttl: Option<f64>,
    }
    let handle: Handle = serde_json::from_slice(result).ok()?;
    let millis = handle.ttl_ms.or_else(|| handle.task?.ttl)?;
    Duration::try_from_secs_f64(millis / 1000.0).ok()
}

/// What the node is told of a cancel that is not its own; nothing of one that is.
pub fn told(by: CancelledBy) -> Option<Failure> {
    let (reason, message) = match by {
        CancelledBy::Admin => (Reason::Killed, "the call was ended by the operator"),
        CancelledBy::Policy => (Reason::Policy, "the tool is denied now"),
        CancelledBy::Drain => (Reason::Draining, "the sidecar is shutting down"),
        CancelledBy::Notification | CancelledBy::Disconnect => return None,
    };
    Some(Failure::unknown(reason, message))
}

/// What the node is told where the claim was lost.
pub fn lease_lost(running: &Running) -> Option<Failure> {
    let message = "the call's claim could not be renewed, the call was closed";
    running.is_lease_lost().then(|| Failure::unknown(Reason::LeaseLost, message))
}

/// How a response counts in the log.
pub fn outcome(answer: Option<&Answer>) -> Outcome {
    match answer {
        Some(Answer::Response(response)) if response.result.is_none() => Outcome::RpcError,
        Some(Answer::Response(response)) if response.is_error => Outcome::ToolError,
        _ => Outcome::Ok,
    }
}
