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
/// Bytes of a session id; one that is longer is not remembered. Others choose it, and what the rest of an entry says.
const LONGEST_ID: usize = 1024;
/// Bytes of what is remembered of a client's name and version.
const LONGEST_CLIENT: usize = 1024;
/// Bytes of a revision that there may be.
const LONGEST_PROTOCOL: usize = 64;

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
    pub fn opened(&self, scope: Scope, mut session: Session) {
        if scope.session.as_ref().is_some_and(|id| id.len() > LONGEST_ID) {
            return;
        }
        session.protocol = session.protocol.filter(|protocol| protocol.len() <= LONGEST_PROTOCOL);
        if let Some(client) = &mut session.client {
            client.truncate(client.floor_char_boundary(LONGEST_CLIENT));
            client.shrink_to_fit();
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(id: &str) -> Scope {
        Scope { upstream: "up".into(), principal: None, session: Some(id.as_bytes().into()), host: None }
    }

    #[test]
    fn the_oldest_is_forgotten_first_and_one_that_is_opened_anew_takes_one_place() {
        let sessions = Sessions::default();
        for n in 0..=SESSIONS {
            sessions.opened(scope(&n.to_string()), Session::default());
            sessions.opened(scope(&n.to_string()), Session::default());
        }
        assert_eq!(sessions.len(), SESSIONS);
        assert!(sessions.find(&scope("0")).is_none());
        sessions.closed(&scope("1"));
        sessions.closed(&scope("0"));
        assert_eq!(sessions.len(), SESSIONS - 1);
        assert!(sessions.find(&scope("2")).is_some());
    }

    #[test]
    fn what_others_say_is_remembered_only_so_far() {
        let sessions = Sessions::default();
        sessions.opened(scope(&"x".repeat(LONGEST_ID + 1)), Session::default());
        assert!(sessions.is_empty());
        let long = Some("é".repeat(LONGEST_CLIENT));
        sessions.opened(scope("a"), Session { protocol: long.clone(), client: long });
        let session = sessions.find(&scope("a")).expect("it is remembered");
        assert_eq!(session.protocol, None);
        assert_eq!(session.client, Some("é".repeat(LONGEST_CLIENT / 2)));
    }
}
