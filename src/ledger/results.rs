//! Committed results that wait in memory for a replay: bounded in bytes and age, the oldest go first.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use crate::message::Era;

/// A committed result, as the upstream wrote it.
#[derive(Clone, Debug)]
pub struct Held {
    /// The value of `result`.
    pub result: Bytes,
    /// Who may have it again: a keyed hash of the node's credential.
    pub principal: String,
    /// The era it was made for.
    pub era: Era,
}

impl Held {
    /// Whether it may be replayed to this principal in this era.
    pub fn is_for(&self, principal: &str, era: Era) -> bool {
        self.principal == principal && self.era == era
    }
}

/// The results held in memory.
#[derive(Debug, Default)]
pub struct Results {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    held: HashMap<String, (Held, Instant, u64)>,
    /// Names in the order they came, by the serial of their entry.
    order: BTreeMap<u64, String>,
    bytes: usize,
    serial: u64,
}

impl Table {
    fn remove(&mut self, name: &str) {
        if let Some((held, _, serial)) = self.held.remove(name) {
            self.bytes -= size(name, &held);
            self.order.remove(&serial);
        }
    }

    /// The one that came first, and when its time is over.
    fn oldest(&self) -> Option<(String, Instant)> {
        let (_, name) = self.order.first_key_value()?;
        let (_, until, _) = self.held.get(name)?;
        Some((name.clone(), *until))
    }
}

fn size(name: &str, held: &Held) -> usize {
    name.len() + held.result.len() + held.principal.len()
}

impl Results {
    /// Holds a result for `ttl`, within `max_total` bytes for all.
    pub fn hold(&self, name: &str, mut held: Held, ttl: Duration, max_total: usize) {
        // It may be a small part of what was read with it, which is not counted and must not stay.
        held.result = Bytes::copy_from_slice(&held.result);
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.remove(name);
        table.serial += 1;
        let serial = table.serial;
        table.bytes += size(name, &held);
        let now = Instant::now();
        table.held.insert(name.to_owned(), (held, now + ttl, serial));
        table.order.insert(serial, name.to_owned());
        while let Some((oldest, until)) = table.oldest() {
            if until > now && table.bytes <= max_total {
                break;
            }
            table.remove(&oldest);
        }
    }

    /// Forgets the result under a name.
    pub fn forget(&self, name: &str) {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }

    /// The result under a name, if it is still held.
    pub fn get(&self, name: &str) -> Option<Held> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let (held, until, _) = table.held.get(name)?;
        (*until > Instant::now()).then(|| held.clone())
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(text: &str) -> Held {
        Held { result: Bytes::copy_from_slice(text.as_bytes()), principal: "p".into(), era: Era::Modern }
    }

    const LONG: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn a_result_is_held_until_its_time_is_over() {
        let results = Results::default();
        results.hold("a", held("{}"), Duration::from_secs(1), 1000);
        assert_eq!(results.get("a").unwrap().result, "{}");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(results.get("a").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn beyond_the_bound_the_oldest_go() {
        let results = Results::default();
        for name in ["a", "b", "c"] {
            results.hold(name, held("0123456789"), LONG, 30);
        }
        assert!(results.get("a").is_none());
        assert!(results.get("b").is_some() && results.get("c").is_some());
        assert!(results.bytes() <= 30);
        results.hold("b", held("x"), LONG, 30);
        results.hold("d", held("01234567890123456789"), LONG, 30);
        // "b" was made anew after "c".
        assert!(results.get("c").is_none());
        assert_eq!(results.get("b").unwrap().result, "x");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_larger_than_all_is_not_held() {
        let results = Results::default();
        results.hold("a", held(&"x".repeat(100)), LONG, 30);
        assert!(results.get("a").is_none());
        assert_eq!(results.bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_is_held_anew_takes_one_place() {
        let results = Results::default();
        results.hold("a", held("{}"), LONG, 1000);
        for _ in 0..1000 {
            results.hold("b", held("{}"), LONG, 1000);
        }
        results.forget("a");
        let table = results.table.lock().expect("whole");
        assert_eq!((table.held.len(), table.order.len()), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_read_with_a_result_is_not_kept() {
        let results = Results::default();
        let read = Bytes::from(vec![b'x'; 1000]);
        results.hold("a", Held { result: read.slice(..10), ..held("") }, LONG, 1000);
        assert!(read.is_unique());
    }

    #[test]
    fn a_result_is_for_its_principal_and_era_alone() {
        assert!(held("").is_for("p", Era::Modern));
        assert!(!held("").is_for("q", Era::Modern));
        assert!(!held("").is_for("p", Era::Legacy));
    }
}
