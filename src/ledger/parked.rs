//! Claims of legacy calls whose stream ended with event ids: their responses may still come on a `GET` of the session.

use tokio::time::Instant;

use super::Claim;
use crate::{
    cancel::Notice,
    inflight::Scope,
    message::Id,
    waits::{Waits, Whose},
};

/// A call that waits for its response.
#[derive(Debug)]
pub struct Waiting {
    /// Its claim.
    pub claim: Claim,
    /// The tool that it calls.
    pub tool: Option<String>,
    /// When its clock runs out.
    pub until: Instant,
    /// What its progress names: the node's token, or the one that was added.
    pub token: Option<Id>,
    /// Its progress may carry resume tokens.
    pub resumable: bool,
    /// What its server is told when its clock runs out, or the policy denies its tool.
    pub notice: Option<Notice>,
}

impl Waiting {
    /// Nobody waits for it any more: its server is told to stop, and its claim is settled.
    pub(super) fn give_up(mut self) {
        if let Some(notice) = self.notice.take() {
            notice.send_now();
        }
        // Dropping its claim settles it.
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Parked {
    calls: Waits<Waiting>,
    tokens: Waits<Id>,
}

impl Parked {
    /// Takes one in; gives those that are let go for it.
    pub(super) fn put(&mut self, scope: &Scope, id: Id, call: Waiting) -> Vec<Waiting> {
        let mut let_go = Vec::from_iter(self.take(scope, &id, Whose::Own));
        if let Some(token) = call.token.clone() {
            self.tokens.put(scope, token, call.until, id.clone());
        }
        let_go.extend(self.calls.put(scope, id, call.until, call));
        let_go
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    /// Takes one out.
    pub(super) fn take(&mut self, scope: &Scope, id: &Id, whose: Whose) -> Option<Waiting> {
        let call = self.calls.take(scope, id, whose)?;
        if let Some(token) = &call.token {
            self.tokens.take(scope, token, whose);
        }
        Some(call)
    }

    /// The one whose progress names this token.
    pub(super) fn by_token(&mut self, scope: &Scope, token: &Id) -> Option<&mut Waiting> {
        let id = self.tokens.find(scope, token)?.clone();
        self.calls.find(scope, &id)
    }

    /// Takes out those that call a tool which `denied` names, given its upstream and itself.
    pub(super) fn denied(&mut self, denied: impl Fn(&str, &str) -> bool) -> Vec<Waiting> {
        let is_denied = |scope: &Scope, call: &Waiting| {
            call.tool.as_ref().is_some_and(|tool| denied(&scope.upstream, tool))
        };
        let calls = self.calls.those(is_denied);
        for (scope, call) in &calls {
            if let Some(token) = &call.token {
                self.tokens.take(scope, token, Whose::Own);
            }
        }
        calls.into_iter().map(|(_, call)| call).collect()
    }

    /// Takes out those whose time is over.
    pub(super) fn over(&mut self, now: Instant) -> Vec<Waiting> {
        self.tokens.over(now);
        self.calls.over(now)
    }
}
