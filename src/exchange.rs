//! One exchange while it is open: what its end has to settle, whoever ends it.
//!
//! It moves from the response future into the response body (for a stream, both the body and the pump hold it). When
//! the last holder is gone its place in the registry is freed and its one access-log line is written. An exchange that
//! nobody ended was left by its node: that is a cancellation.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    account::{Account, CancelledBy, Outcome},
    cancel::Notice,
    error::{Failure, Progress, Reason},
    inflight::Entry,
    limits::{Held, Permit},
    message::{Era, Id, answer::Answer},
    proxy::Route,
    relay::terminal::State,
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
    /// A legacy node that hangs up means `notifications/cancelled` too (contract section 8, J-01).
    pub cancels_on_disconnect: bool,
    /// The `notifications/cancelled` that a clock, a drain or a hang-up sends; none in modern and where it must not be sent.
    pub notice: Option<Notice>,
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
    /// Its place among what runs.
    pub entry: Option<Entry>,
    /// When its node was seen to be gone.
    pub left: Option<Instant>,
    /// The upstream ended its stream before the node left.
    pub upstream_ended: bool,
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
            entry: None,
            left: None,
            upstream_ended: false,
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
            Reason::Policy => (State::Cancelled, Outcome::Cancelled, Some(CancelledBy::Policy)),
            Reason::UpstreamUnreachable | Reason::UpstreamRefused | Reason::UpstreamFailed => {
                (State::Failed, Outcome::Failed, None)
            }
        };
        if let Some(entry) = &self.entry {
            entry.running.terminal.end(state);
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
        // Where the response is complete there is nothing left to cancel, delivered or not (J-01).
        let answered = self.entry.as_ref().is_some_and(|entry| entry.running.is_answered());
        if by == CancelledBy::Disconnect && cancels && !answered && !self.upstream_ended {
            self.notify_upstream();
        }
    }

    /// Ends it now, with all that a drop would do, where its owner can't be dropped yet.
    pub fn close(&mut self) {
        self.settle_cancelled();
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

/// How a response counts in the log.
pub fn outcome(answer: Option<&Answer>) -> Outcome {
    match answer {
        Some(Answer::Response(response)) if response.result.is_none() => Outcome::RpcError,
        Some(Answer::Response(response)) if response.is_error => Outcome::ToolError,
        _ => Outcome::Ok,
    }
}
