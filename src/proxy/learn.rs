//! Knowledge of tools: learnt from what passes, kept in the state store (contract section 5).

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::{Duration, Instant};

use super::Sidecar;
use crate::{
    listing::{Record, key_prefix},
    store::{Name, Table, View, Write, update_with},
};

/// The store is asked for what other sidecars learnt at most this often.
const RECALL: Duration = Duration::from_secs(2);
/// Answers from here on are read off the async threads; until that is done their calls wait.
const LARGE: usize = 256 * 1024;

impl Sidecar {
    /// Takes in what the store holds of an upstream's tools, if that was not done a moment ago.
    pub(super) async fn recall(&self, upstream: &str) {
        {
            let mut recalled = self.recalled.lock().await;
            if recalled.get(upstream).is_some_and(|at| at.elapsed() < RECALL) {
                return;
            }
            recalled.insert(upstream.to_owned(), Instant::now());
        }
        let held = self.ledger.store().scan(Table::Tools, key_prefix(upstream)).await;
        // A store that is away is said where a call needs it.
        if let Ok(records) = held {
            let records = records.into_iter().map(|(key, value)| Record { key, value });
            self.listing.load(upstream, records);
        }
    }

    /// Learns from an answer to `tools/list`, before it is passed on: the call that follows it must find its tool known.
    pub(crate) async fn learn(self: &Arc<Self>, upstream: &str, answer: Bytes) {
        let records = if answer.len() < LARGE {
            self.listing.learn(upstream, &answer)
        } else {
            let (sidecar, name) = (self.clone(), upstream.to_owned());
            let learnt = tokio::task::spawn_blocking(move || sidecar.listing.learn(&name, &answer));
            learnt.await.unwrap_or_default()
        };
        if !records.is_empty() {
            // What the store does not take now is learnt again from the next listing.
            tokio::spawn(keep(self.clone(), records));
        }
    }
}

async fn keep(sidecar: Arc<Sidecar>, records: Vec<Record>) {
    for record in records {
        let value = record.value;
        let names = vec![Name::new(Table::Tools, record.key)];
        let kept = update_with(&**sidecar.ledger.store(), names, move |view: &View<'_>| {
            let room = view.records[0].is_some() || (view.room)(Table::Tools);
            let write = if room { Write::Put { value: value.clone(), expires: None } } else { Write::Keep };
            (vec![write], ())
        })
        .await;
        if let Err(error) = kept {
            tracing::warn!(%error, "what was learnt of a tool is not stored");
            return;
        }
    }
}
