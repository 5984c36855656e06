//! What legacy sessions negotiated: the protocol revision and the client, for the era rule and the log.
//!
//! Bounded in number; losing an entry only means that a request without a version header counts as 2025-03-26.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use crate::inflight::Scope;

/// Sessions remembered at once; the oldest is forgotten first.
const SESSIONS: usize = 10_000;

/// What an `initialize` settled.
#[derive(Debug, Default)]
pub struct Session {
    /// `result.protocolVersion`.
    pub protocol: Option<String>,
    /// The client as `name/version`.
    pub client: Option<String>,
}

/// The sessions of all upstreams, each found by its whole scope: a session id alone proves nothing.
#[derive(Debug, Default)]
pub struct Sessions {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    sessions: HashMap<Scope, Arc<Session>>,
    order: VecDeque<Scope>,
}

impl Sessions {
    /// Remembers a session that an `initialize` opened.
    pub fn opened(&self, scope: Scope, session: Session) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.sessions.insert(scope.clone(), Arc::new(session)).is_none() {
            table.order.push_back(scope);
        }
        while table.order.len() > SESSIONS {
            if let Some(oldest) = table.order.pop_front() {
                table.sessions.remove(&oldest);
            }
        }
    }

    /// Forgets a session that was deleted, or that the upstream does not know any more.
    pub fn closed(&self, scope: &Scope) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.sessions.remove(scope).is_some() {
            table.order.retain(|other| other != scope);
        }
    }

    /// What is known of a session.
    pub fn find(&self, scope: &Scope) -> Option<Arc<Session>> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.sessions.get(scope).cloned()
    }

    /// How many are remembered.
    pub fn len(&self) -> usize {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).sessions.len()
    }

    /// None is remembered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
