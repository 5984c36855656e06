//! What the ledger does in one atomic step of the store: reads a record, decides, writes what was decided.

use std::borrow::Cow;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::entry::{self, Attempt, Entry, Verdict};
use crate::{
    call::key::{First, hex},
    message::Era,
    store::{Table, View, Write},
};

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

/// A step of [`Ledger::key`](super::Ledger::key): the activity's key as it is fixed, or the first one, counted if need be. `None`: no room.
pub(super) fn fix(view: &View<'_>, first: &First, ttl: u64) -> (Vec<Write>, Option<String>) {
    let keep = vec![Write::Keep; view.records.len()];
    let expires = Some(view.now + ttl);
    if let Some(key) = view.records.first().copied().flatten() {
        // Renewed, so that it lives as long as its call goes on.
        let mut writes = keep;
        writes[0] = Write::Put { value: key.to_vec(), expires };
        return (writes, String::from_utf8(key.to_vec()).ok());
    }
    if !(view.room)(Table::Counters) {
        return (keep, None);
    }
    match first {
        First::Key(key) => (vec![Write::Put { value: key.clone().into_bytes(), expires }], Some(key.clone())),
        First::Counted { prefix, .. } => {
            let counter = view.records.get(1).copied().flatten();
            let counted = counter.and_then(|held| serde_json::from_slice::<Counter>(held).ok());
            let n = counted.unwrap_or_default().n + 1;
            let key = format!("{prefix}{n}");
            let counter = serde_json::to_vec(&Counter { n }).unwrap_or_default();
            let writes = vec![
                Write::Put { value: key.clone().into_bytes(), expires },
                Write::Put { value: counter, expires },
            ];
            (writes, Some(key))
        }
    }
}

/// A step of [`Ledger::claim`](super::Ledger::claim): the verdict, and the result that a replay answers.
pub(super) fn decide(
    view: &View<'_>,
    attempt: &Attempt,
    in_memory: Option<Bytes>,
    ttl: u64,
) -> (Vec<Write>, (Verdict, Option<Bytes>)) {
    let stored = view
        .records
        .get(1)
        .copied()
        .flatten()
        .and_then(|held| serde_json::from_slice::<Stored>(held).ok())
        .filter(|held| held.principal == attempt.principal && held.modern == (attempt.era == Era::Modern));
    let result = in_memory.or(stored.map(|held| held.result.into()));
    let entry = entry_of(view);
    let room = (view.room)(Table::Keys);
    let (verdict, next) = entry::claim(entry.as_ref(), attempt, view.now, room, result.is_some());
    let mut writes = vec![Write::Keep; view.records.len()];
    writes[0] = put(next.as_ref(), view.now + ttl);
    (writes, (verdict, result))
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

/// Written as it is from now on; nothing: as it was.
pub(super) fn put(entry: Option<&Entry>, expires: u64) -> Write {
    match entry.and_then(|entry| serde_json::to_vec(entry).ok()) {
        Some(value) => Write::Put { value, expires: Some(expires) },
        None => Write::Keep,
    }
}
