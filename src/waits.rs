//! What waits, under the id of a legacy request, for its response on a `GET` of the session: its own stream has ended with
//! event ids (MCP 2025-11-25, Streamable HTTP § Resumability and Redelivery).
//!
//! The session is what a response is found by. The credential of its node may have been rotated since; only where several
//! clients use one session id, or there is none, the credential has to tell whose it is.
//!
//! Bounded in number and in time: the oldest are let go, and whoever holds it takes out what is over.

use std::collections::HashMap;

use tokio::time::Instant;

use crate::{inflight::Scope, message::Id};

/// The most that wait.
const MOST: usize = 10_000;

/// Whose they may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// That client's alone.
    Own,
    /// The only one of that session too.
    Session,
}

/// All that wait.
#[derive(Debug)]
pub(crate) struct Waits<T> {
    held: HashMap<(Scope, Id), Vec<One<T>>>,
    count: usize,
}

#[derive(Debug)]
struct One<T> {
    principal: Option<u64>,
    until: Instant,
    what: T,
}

impl<T> Default for Waits<T> {
    fn default() -> Self {
        Self { held: HashMap::new(), count: 0 }
    }
}

impl<T> Waits<T> {
    /// Takes one in, in place of the client's own under that id; gives those that are let go for it.
    pub(crate) fn put(&mut self, scope: &Scope, id: Id, until: Instant, what: T) -> Vec<T> {
        let mut let_go = Vec::from_iter(self.take(scope, &id, Whose::Own));
        if self.count >= MOST {
            let all = self.held.iter().flat_map(|(name, waiting)| waiting.iter().map(move |one| (name, one)));
            let oldest =
                all.min_by_key(|(_, one)| one.until).map(|(name, one)| (name.clone(), one.principal));
            let_go.extend(oldest.and_then(|(name, principal)| self.remove(&name, principal)));
        }
        let one = One { principal: scope.principal, until, what };
        self.held.entry((scope.of_session(), id)).or_default().push(one);
        self.count += 1;
        let_go
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Takes one out.
    pub(crate) fn take(&mut self, scope: &Scope, id: &Id, whose: Whose) -> Option<T> {
        let (name, principal) = self.name(scope, id, whose)?;
        self.remove(&name, principal)
    }

    /// The client's own under that id, or the only one of its session.
    pub(crate) fn find(&mut self, scope: &Scope, id: &Id) -> Option<&mut T> {
        let (name, principal) = self.name(scope, id, Whose::Session)?;
        let waiting = self.held.get_mut(&name)?;
        waiting.iter_mut().find(|one| one.principal == principal).map(|one| &mut one.what)
    }

    /// Takes out those whose time is over.
    pub(crate) fn over(&mut self, now: Instant) -> Vec<T> {
        let mut over = Vec::new();
        self.held.retain(|_, waiting| {
            over.extend(waiting.extract_if(.., |one| one.until <= now).map(|one| one.what));
            !waiting.is_empty()
        });
        self.count -= over.len();
        over
    }

    /// Takes out those that are `wanted`, each with whose it is.
    pub(crate) fn those(&mut self, mut wanted: impl FnMut(&Scope, &T) -> bool) -> Vec<(Scope, T)> {
        let mut taken = Vec::new();
        self.held.retain(|(scope, _), waiting| {
            let those = waiting.extract_if(.., |one| wanted(scope, &one.what));
            taken.extend(those.map(|one| (Scope { principal: one.principal, ..scope.clone() }, one.what)));
            !waiting.is_empty()
        });
        self.count -= taken.len();
        taken
    }

    fn name(&self, scope: &Scope, id: &Id, whose: Whose) -> Option<((Scope, Id), Option<u64>)> {
        if self.count == 0 {
            return None;
        }
        let name = (scope.of_session(), id.clone());
        let waiting = self.held.get(&name)?;
        let own = waiting.iter().find(|one| one.principal == scope.principal);
        let found = match (own, waiting.as_slice(), whose) {
            (Some(own), ..) => own,
            (None, [only], Whose::Session) => only,
            _ => return None,
        };
        Some((name, found.principal))
    }

    fn remove(&mut self, name: &(Scope, Id), principal: Option<u64>) -> Option<T> {
        let waiting = self.held.get_mut(name)?;
        let at = waiting.iter().position(|one| one.principal == principal)?;
        let one = waiting.swap_remove(at);
        if waiting.is_empty() {
            self.held.remove(name);
        }
        self.count -= 1;
        Some(one.what)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn scope(principal: Option<u64>, session: Option<&str>) -> Scope {
        let session = session.map(|session| session.as_bytes().into());
        Scope { upstream: "up".into(), principal, session, host: None }
    }

    fn id(number: usize) -> Id {
        Id::parse(number.to_string().as_bytes()).unwrap()
    }

    fn later(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    #[test]
    fn a_response_is_found_by_its_session_although_the_credential_was_rotated() {
        let mut waits = Waits::default();
        waits.put(&scope(Some(1), Some("s")), id(7), later(9), "a");
        let rotated = scope(Some(2), Some("s"));
        assert!(waits.take(&rotated, &id(7), Whose::Own).is_none());
        for other in [scope(Some(1), Some("t")), scope(Some(1), None)] {
            assert!(waits.take(&other, &id(7), Whose::Session).is_none());
        }
        assert!(waits.find(&rotated, &id(8)).is_none());
        assert_eq!(waits.find(&rotated, &id(7)).copied(), Some("a"));
        assert_eq!(waits.take(&rotated, &id(7), Whose::Session), Some("a"));
        assert!(waits.take(&rotated, &id(7), Whose::Session).is_none());
    }

    #[test]
    fn where_it_could_be_several_clients_the_credential_tells_whose_it_is() {
        let mut waits = Waits::default();
        for principal in [1, 2] {
            waits.put(&scope(Some(principal), Some("s")), id(7), later(9), principal);
            waits.put(&scope(Some(principal), None), id(7), later(9), 10 * principal);
        }
        assert!(waits.take(&scope(Some(3), Some("s")), &id(7), Whose::Session).is_none());
        assert!(waits.take(&scope(Some(3), None), &id(7), Whose::Session).is_none());
        assert_eq!(waits.take(&scope(Some(2), Some("s")), &id(7), Whose::Session), Some(2));
        assert_eq!(waits.take(&scope(Some(1), None), &id(7), Whose::Session), Some(10));
    }

    #[test]
    fn one_that_is_put_again_stands_in_place_of_the_first() {
        let mut waits = Waits::default();
        let own = scope(Some(1), Some("s"));
        assert!(waits.put(&own, id(7), later(9), "a").is_empty());
        assert_eq!(waits.put(&own, id(7), later(9), "b"), ["a"]);
        assert_eq!(waits.take(&own, &id(7), Whose::Own), Some("b"));
    }

    #[test]
    fn those_that_are_wanted_are_taken_out_of_one_name_too() {
        let mut waits = Waits::default();
        for principal in [1, 2] {
            waits.put(&scope(Some(principal), Some("s")), id(7), later(9), principal);
        }
        waits.put(&scope(Some(2), Some("t")), id(7), later(9), 2);
        let mut taken = waits.those(|_, what| *what == 2);
        taken.sort_by_key(|(scope, _)| scope.session.clone());
        assert_eq!(taken, [(scope(Some(2), Some("s")), 2), (scope(Some(2), Some("t")), 2)]);
        assert_eq!((waits.len(), waits.take(&scope(Some(1), Some("s")), &id(7), Whose::Own)), (1, Some(1)));
        assert!(waits.those(|scope, _| &*scope.upstream == "up").is_empty());
    }

    #[test]
    fn those_whose_time_is_over_go_and_beyond_the_bound_the_oldest() {
        let mut waits = Waits::default();
        let own = scope(Some(1), Some("s"));
        for number in 0..MOST {
            assert!(waits.put(&own, id(number), later(100 + number as u64), number).is_empty());
        }
        assert_eq!(waits.put(&own, id(MOST), later(9), MOST), [0]);
        assert_eq!(waits.over(later(10)), [MOST]);
        assert!(waits.take(&own, &id(0), Whose::Session).is_none());
        assert_eq!(waits.take(&own, &id(1), Whose::Session), Some(1));
        assert_eq!(waits.over(later(1_000_000)).len(), MOST - 2);
    }
}
