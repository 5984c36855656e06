//! What the ledger does in one atomic step of the store: reads a record, decides, writes what was decided.

use std::borrow::Cow;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::entry::{self, Attempt, Entry, Verdict};
use crate::{
    call::key::{First, hex},
    message::Era,
    store::{self, Table, View, Write},
};

/// A record is there that says nothing the ledger wrote.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unreadable;

impl From<Unreadable> for store::Error {
    fn from(_: Unreadable) -> Self {
        Self::Corrupt("it holds what the ledger has not written".into())
    }
}

/// A result as the store keeps it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Stored {
    pub(super) principal: String,
    pub(super) modern: bool,
    pub(super) result: String,
}

/// An ordinal that is counted up.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Counter {
    n: u64,
}

/// What a call is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    /// This.
    Key(String),
    /// Nothing: it has no identity.
    Nothing,
    /// There is no room for what would have to be fixed or counted.
    Full,
}

/// A step of [`Ledger::key`](super::Ledger::key): the activity's key as it is fixed, or the first one, counted if need be.
/// `Err`: what is stored can't be read, so nobody knows what was fixed or how far was counted.
pub(super) fn fix(view: &View<'_>, first: &First, ttl: u64) -> (Vec<Write>, Result<Named, Unreadable>) {
    let keep = vec![Write::Keep; view.records.len()];
    let put = |value: Vec<u8>| Write::Put { value, expires: Some(view.now + ttl) };
    if let Some(key) = view.records.first().copied().flatten() {
        let Ok(named) = String::from_utf8(key.to_vec()) else { return (keep, Err(Unreadable)) };
        // Renewed, its series too, so that they live as long as the call goes on.
        let renew = |held: &Option<&[u8]>| held.map_or(Write::Keep, |held| put(held.to_vec()));
        return (view.records.iter().map(renew).collect(), Ok(Named::Key(named)));
    }
    if !(view.room)(Table::Counters) {
        return (keep, Ok(Named::Full));
    }
    match first {
        First::Key(key) => (vec![put(key.clone().into_bytes())], Ok(Named::Key(key.clone()))),
        First::Counted { prefix, .. } => {
            let counter = match view.records.get(1).copied().flatten().map(serde_json::from_slice::<Counter>)
            {
                None => Counter::default(),
                Some(Ok(counter)) => counter,
                Some(Err(_)) => return (keep, Err(Unreadable)),
            };
            let n = counter.n + 1;
            let key = format!("{prefix}{n}");
            let counter = serde_json::to_vec(&Counter { n }).unwrap_or_default();
            (vec![put(key.clone().into_bytes()), put(counter)], Ok(Named::Key(key)))
        }
    }
}

/// What becomes of an attempt.
#[derive(Debug)]
pub(super) struct Decided {
    pub(super) verdict: Verdict,
    /// The result that a replay answers.
    pub(super) result: Option<Bytes>,
}

/// A step of [`Ledger::claim`](super::Ledger::claim). `Err`: what is stored can't be read, so nobody knows whether the call was made.
pub(super) fn decide(
    view: &View<'_>,
    attempt: &Attempt,
    in_memory: Option<Bytes>,
    ttl: u64,
) -> (Vec<Write>, Result<Decided, Unreadable>) {
    let stored = view
        .records
        .get(1)
        .copied()
        .flatten()
        .and_then(|held| serde_json::from_slice::<Stored>(held).ok())
        .filter(|held| held.principal == attempt.principal && held.modern == (attempt.era == Era::Modern));
    let result = in_memory.or(stored.map(|held| held.result.into()));
    let mut writes = vec![Write::Keep; view.records.len()];
    let entry = entry_of(view);
    if entry.is_none() && view.records.first().copied().flatten().is_some() {
        // A mark, whatever it said: the call may have been made.
        return (writes, Err(Unreadable));
    }
    let room = (view.room)(Table::Keys);
    let (verdict, next) = entry::claim(entry.as_ref(), attempt, view.now, room, result.is_some());
    writes[0] = put(next.as_ref(), view.now + ttl);
    (writes, Ok(Decided { verdict, result }))
}

/// What is known of the key that a view begins with.
pub(super) fn entry_of(view: &View<'_>) -> Option<Entry> {
    serde_json::from_slice(view.records.first().copied().flatten()?).ok()
}

/// A key as the store knows it: a very long one by its hash.
pub(super) fn short(key: &str) -> Cow<'_, str> {
    if key.len() <= LONG_KEY { key.into() } else { format!("\u{1}{}", hex(&Sha256::digest(key))).into() }
}

/// Longer keys are not stored in full.
const LONG_KEY: usize = 1024;

/// Written as it is from now on; nothing: as it was. An attempt that runs is not forgotten, however short marks are kept.
pub(super) fn put(entry: Option<&Entry>, expires: u64) -> Write {
    let written = entry.and_then(|entry| Some((entry.lease, serde_json::to_vec(entry).ok()?)));
    match written {
        Some((lease, value)) => Write::Put { value, expires: Some(expires.max(lease)) },
        None => Write::Keep,
    }
}
