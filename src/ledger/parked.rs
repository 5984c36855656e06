//! Claims of legacy calls whose stream ended with event ids: their responses may still come on a `GET` of the session.

use std::collections::HashMap;

use tokio::time::Instant;

use super::Claim;
use crate::{inflight::Scope, message::Id};

/// The most that wait; the oldest are let go.
const MOST: usize = 10_000;

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
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Parked {
    calls: HashMap<(Scope, Id), Waiting>,
    tokens: HashMap<(Scope, Id), Id>,
}

impl Parked {
    /// Takes one in; gives those that are let go for it.
    pub(super) fn put(&mut self, scope: Scope, id: Id, call: Waiting) -> Vec<Waiting> {
        let mut let_go = Vec::new();
        if self.calls.len() >= MOST {
            let oldest = self.calls.iter().min_by_key(|(_, call)| call.until).map(|(name, _)| name.clone());
            let_go.extend(oldest.and_then(|(scope, id)| self.take(&scope, &id)));
        }
        let_go.extend(self.take(&scope, &id));
        if let Some(token) = &call.token {
            self.tokens.insert((scope.clone(), token.clone()), id.clone());
        }
        self.calls.insert((scope, id), call);
        let_go
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    /// Takes one out.
    pub(super) fn take(&mut self, scope: &Scope, id: &Id) -> Option<Waiting> {
        if self.calls.is_empty() {
            return None;
        }
        let call = self.calls.remove(&(scope.clone(), id.clone()))?;
        if let Some(token) = &call.token {
            self.tokens.remove(&(scope.clone(), token.clone()));
        }
        Some(call)
    }

    /// The one whose progress names this token.
    pub(super) fn by_token(&mut self, scope: &Scope, token: &Id) -> Option<&mut Waiting> {
        if self.tokens.is_empty() {
            return None;
        }
        let id = self.tokens.get(&(scope.clone(), token.clone()))?;
        self.calls.get_mut(&(scope.clone(), id.clone()))
    }

    /// Takes out those whose time is over.
    pub(super) fn over(&mut self, now: Instant) -> Vec<Waiting> {
        let over: Vec<(Scope, Id)> =
            self.calls.iter().filter(|(_, call)| call.until <= now).map(|(name, _)| name.clone()).collect();
        over.iter().filter_map(|(scope, id)| self.take(scope, id)).collect()
    }
}
