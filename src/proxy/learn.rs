//! Knowledge of tools: learnt from what passes, kept in the state store.

use std::sync::{Arc, PoisonError};

use bytes::Bytes;
use tokio::{
    task::JoinSet,
    time::{self, Duration, Instant},
};

use super::{Route, Sidecar, read::off_thread};
use crate::{
    inflight::Scope,
    listing::{Known, Record},
    message::Id,
    store::{self, MAX_NAMES, Name, Table, View, Write, update_with},
    waits::Whose,
};

/// The store is asked for tools that nobody here has seen at most this often ...
const RECALL: Duration = Duration::from_secs(2);
/// ... or this often, after it did not answer; until then it counts as away.
const ASK_AGAIN: Duration = Duration::from_millis(250);
/// For so long what is known of a tool is gone by; then the store is asked for what other sidecars have learnt since.
const REFRESH: Duration = Duration::from_secs(5);
/// A listing waits for the store this long before it is passed on all the same.
const KEEP: Duration = Duration::from_secs(1);

/// When the store was asked for an upstream's tools, and whether it answered.
#[derive(Debug)]
pub(super) struct Recalled {
    at: Instant,
    answer: Result<(), store::Error>,
}

impl Recalled {
    fn is_fresh(&self) -> bool {
        self.at.elapsed() < if self.answer.is_ok() { RECALL } else { ASK_AGAIN }
    }
}

impl Sidecar {
    /// What is known of a tool. One that is not known here may be known to another sidecar on the same store, or to the
    /// one that this one was before a restart; a call that nothing names (`named`) does not wait for a store that is away.
    ///
    /// # Errors
    ///
    /// The tool is not known here, and the store does not say what else is known.
    pub(super) async fn known(
        self: &Arc<Self>,
        route: &Arc<Route>,
        tool: &str,
        named: bool,
    ) -> (Known, Result<(), store::Error>) {
        let known = self.listing.known(&route.name, &route.listing, tool);
        if known.listed {
            self.refresh(route);
            return (known, Ok(()));
        }
        if !named && self.ledger.is_away() {
            return (known, Ok(()));
        }
        let recalled = self.recall(&route.name).await;
        (self.listing.known(&route.name, &route.listing, tool), recalled)
    }

    /// Takes in what the store holds of an upstream's tools, if that was not done a moment ago.
    async fn recall(&self, upstream: &str) -> Result<(), store::Error> {
        // Held over the question: whoever comes meanwhile must not go by less than its answer.
        let mut recalled = self.recalled.lock().await;
        if let Some(recalled) = recalled.get(upstream).filter(|recalled| recalled.is_fresh()) {
            return recalled.answer.clone();
        }
        let answer = self.ledger.tools(upstream).await.map(|records| self.listing.load(upstream, records));
        recalled.insert(upstream.to_owned(), Recalled { at: Instant::now(), answer: answer.clone() });
        answer
    }

    /// Asks the store, now and then and in the background, whether another sidecar has seen a newer listing.
    fn refresh(self: &Arc<Self>, route: &Arc<Route>) {
        // Whoever holds it is asking.
        let Ok(mut recalled) = self.recalled.try_lock() else { return };
        let now = Instant::now();
        match recalled.get_mut(&*route.name) {
            Some(recalled) if recalled.at + REFRESH > now => return,
            Some(recalled) => recalled.at = now,
            None => _ = recalled.insert(route.name.to_string(), Recalled { at: now, answer: Ok(()) }),
        }
        drop(recalled);
        let (sidecar, route) = (self.clone(), route.clone());
        tokio::spawn(async move {
            if let Ok(records) = sidecar.ledger.tools(&route.name).await {
                sidecar.listing.load(&route.name, records);
            }
        });
    }

    /// The answer to a request for a listing may still come on a `GET` of its session.
    pub(crate) fn await_listing(&self, scope: &Scope, id: Id, until: Instant) {
        let mut awaited = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
        awaited.over(Instant::now());
        awaited.put(scope, id, until, ());
    }

    /// Whether a response on a `GET` is one that was awaited so; then it is not any more.
    pub(crate) fn listing_came(&self, scope: &Scope, id: &Id) -> bool {
        let mut awaited = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
        awaited.take(scope, id, Whose::Session).is_some()
    }

    /// Learns from an answer to `tools/list`, before it is passed on: the call that follows it must find its tool known,
    /// here and after a restart.
    pub(crate) async fn learn(self: &Arc<Self>, upstream: &str, answer: Bytes) {
        let (sidecar, name) = (self.clone(), upstream.to_owned());
        let learnt = off_thread(answer, move |answer| sidecar.listing.learn(&name, answer));
        let records = learnt.await.unwrap_or_default();
        if !records.is_empty() {
            // On a task of its own, so that it is done also when the node hangs up or the store is slow.
            let kept = tokio::spawn(keep(self.clone(), records));
            let _ = time::timeout(KEEP, kept).await;
        }
    }
}

/// Stores what was learnt. What the store does not take is learnt again from the next listing.
async fn keep(sidecar: Arc<Sidecar>, records: Vec<Record>) {
    let mut kept = JoinSet::new();
    for some in records.chunks(MAX_NAMES) {
        let (sidecar, some) = (sidecar.clone(), some.to_vec());
        kept.spawn(async move {
            let names = some.iter().map(|record| Name::new(Table::Tools, record.key.as_str())).collect();
            let values: Vec<Vec<u8>> = some.iter().map(|record| record.value.clone()).collect();
            let stored = update_with(&**sidecar.ledger.store(), names, move |view: &View<'_>| {
                let room = (view.room)(Table::Tools);
                let write = |(value, held): (&Vec<u8>, &Option<&[u8]>)| match held.is_some() || room {
                    true => Write::Put { value: value.clone(), expires: None },
                    false => Write::Keep,
                };
                (values.iter().zip(view.records).map(write).collect(), ())
            });
            if let Err(error) = stored.await {
                sidecar.listing.not_stored(some.iter().map(|record| record.key.as_str()));
                tracing::warn!(%error, "what was learnt of tools is not stored");
            }
        });
    }
    while kept.join_next().await.is_some() {}
}
