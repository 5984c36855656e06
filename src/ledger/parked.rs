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
    /// When its clock runs out.
    pub until: Instant,
    /// What its progress names: the node's token, or the one that was added.
    pub token: Option<Id>,
    /// Its progress may carry resume tokens.
    pub resumable: bool,
    /// What its server is told when its clock runs out.
    pub notice: Option<Notice>,
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

    /// Takes out those whose time is over.
    pub(super) fn over(&mut self, now: Instant) -> Vec<Waiting> {
        self.tokens.over(now);
        self.calls.over(now)
    }
}
