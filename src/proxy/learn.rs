//! Knowledge of tools: learnt from what passes, kept in the state store (contract section 5).

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::{Duration, Instant, sleep};

use super::Sidecar;
use crate::{
    listing::{Record, key_prefix},
    store::{self, Name, Table, View, Write, update_with},
};

/// The store is asked for what other sidecars learnt at most this often.
const RECALL: Duration = Duration::from_secs(2);
/// Listings whose tools wait to be stored, at once.
const KEEPING: usize = 64;
/// How often, and how long apart, storing a tool is tried.
const KEEP_TRIES: u32 = 120;
const KEEP_AGAIN: Duration = Duration::from_secs(5);
/// Answers from here on are read off the async threads; until that is done their calls wait.
const LARGE: usize = 256 * 1024;

impl Sidecar {
    /// Takes in what the store holds of an upstream's tools, if that was not done a moment ago.
    ///
    /// # Errors
    ///
    /// The store is away: what is known of the tool cannot be said.
    pub(super) async fn recall(&self, upstream: &str) -> Result<(), store::Error> {
        // Held over the look: a call that comes meanwhile must not take its tool for never listed.
        let mut recalled = self.recalled.lock().await;
        if recalled.get(upstream).is_some_and(|at| at.elapsed() < RECALL) {
            return Ok(());
        }
        let records = self.ledger.scan(Table::Tools, key_prefix(upstream)).await?;
        self.listing.load(upstream, records.into_iter().map(|(key, value)| Record { key, value }));
        recalled.insert(upstream.to_owned(), Instant::now());
        Ok(())
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
            let Some(permit) = self.keeping.take(KEEPING) else { return };
            let sidecar = self.clone();
            tokio::spawn(async move {
                keep(&sidecar, records).await;
                drop(permit);
            });
        }
    }
}

/// Stores what was learnt; while the store is away it is tried again for some time.
async fn keep(sidecar: &Sidecar, records: Vec<Record>) {
    for record in records {
        let mut tries = 0;
        while let Err(error) = keep_one(sidecar, &record).await {
            tries += 1;
            if tries == KEEP_TRIES {
                tracing::warn!(%error, "what was learnt of a tool is not stored");
                return;
            }
            sleep(KEEP_AGAIN).await;
        }
    }
}

async fn keep_one(sidecar: &Sidecar, record: &Record) -> Result<(), store::Error> {
    let value = record.value.clone();
    let names = vec![Name::new(Table::Tools, record.key.clone())];
    update_with(&**sidecar.ledger.store(), names, move |view: &View<'_>| {
        let room = view.records.first().is_some_and(Option::is_some) || (view.room)(Table::Tools);
        let write = if room { Write::Put { value: value.clone(), expires: None } } else { Write::Keep };
        (vec![write], ())
    })
    .await
}
