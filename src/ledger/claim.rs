//! An attempt that runs: its lease, what it reports, and how its end is written.

use std::{
    collections::HashMap,
    sync::{Arc, MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use tokio::time::{self, Instant};

use super::{
    Keep, LEASE, Ledger,
    entry::{Attempt, Reached, Report, State},
    millis,
    results::Held,
    settle::{self, Settle},
    step::{Stored, entry_of, put},
};
use crate::{
    inflight::Running,
    message::Era,
    store::{self, BoxFuture, MAX_VALUE, Name, Table, View, Write, update_with},
};

/// A commit is awaited this long before the response is passed on all the same.
const COMMIT: Duration = Duration::from_secs(1);
/// Progress of a running attempt is stored at most this often.
const REPORT: Duration = Duration::from_millis(250);

/// Until when an attempt may run, as far as this process knows.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) name: Name,
    pub(super) until: Instant,
    pub(super) running: Option<Arc<Running>>,
}

/// An attempt's right to run, and what it reports. Dropped without an end it counts as unknown.
#[derive(Debug)]
pub struct Claim {
    ledger: Arc<Ledger>,
    pub(super) name: Name,
    pub(super) owner: String,
    principal: String,
    era: Era,
    task: bool,
    report: Report,
    stored: Option<Instant>,
    ends: State,
    /// The end that is being written: what a drop in the middle of it hands over.
    finishing: Option<Finish>,
    /// Nothing is left to write.
    pub(super) settled: bool,
}

/// The end of an attempt, ready to be written.
#[derive(Clone, Debug)]
pub(super) struct Finish {
    name: Name,
    pub(super) owner: String,
    state: State,
    report: Report,
    result: Option<Held>,
    /// A task handle is held no longer than its own time.
    ttl: Option<Duration>,
}

impl Claim {
    /// A claim that the store is being asked for: if it is dropped now, nothing was sent.
    pub(super) fn asked(ledger: Arc<Ledger>, name: Name, attempt: &Attempt) -> Self {
        Self {
            ledger,
            name,
            owner: attempt.owner.clone(),
            principal: attempt.principal.clone(),
            era: attempt.era,
            task: attempt.task,
            report: Report::default(),
            stored: None,
            ends: State::NotSent,
            finishing: None,
            settled: false,
        }
    }

    /// The store has granted it.
    pub(super) fn runs(&mut self, running: Option<Arc<Running>>) {
        let lease = Lease { name: self.name.clone(), until: Instant::now() + LEASE, running };
        self.ledger.leases().insert(self.owner.clone(), lease);
        // Until it is sent it ends as what it is: not sent.
        self.settled = false;
    }

    /// Takes one progress notification; stores it now and then.
    pub fn progress(&mut self, progress: f64, total: Option<f64>, token: Option<&str>) {
        self.report.take(Reached { progress, total }, token, &self.principal);
        let due = self.stored.is_none_or(|at| at.elapsed() >= REPORT);
        // Ends come first: while the store is away, or behind, they carry the report.
        let idle = self.ledger.settling.capacity() > settle::QUEUE / 2;
        if due && idle && !self.ledger.away.load(Ordering::Relaxed) {
            self.stored = Some(Instant::now());
            let (name, owner, report) = (self.name.clone(), self.owner.clone(), self.report.clone());
            // What a full queue loses is written with the end.
            let _ = self.ledger.settling.try_send(Settle::Report { name, owner, report });
        }
    }

    /// It is a legacy call with `params.task`: its result is a handle.
    pub fn is_task(&self) -> bool {
        self.task
    }

    /// The ledger that it is of.
    pub fn ledger(&self) -> Arc<Ledger> {
        self.ledger.clone()
    }

    /// How the attempt stands if it is dropped now.
    pub fn ends(&mut self, state: State) {
        self.ends = state;
    }

    /// The attempt has its answer. Ready when that is written, or after a moment, in which case it is written later: the
    /// answer goes out in any case. It counts from the call of this, polled or not. `result`: the bytes of a result that
    /// commits.
    pub fn finish(
        mut self,
        state: State,
        result: Option<Bytes>,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, ()> {
        let held = result.map(|result| Held { result, principal: self.principal.clone(), era: self.era });
        let finish = self.finishes(state, held, ttl);
        self.finishing = Some(finish.clone());
        Box::pin(self.write(finish))
    }

    /// The attempt has ended without a result, as [`Claim::ends`] said; as [`Claim::finish`].
    pub fn settle(self) -> BoxFuture<'static, ()> {
        let state = self.ends;
        self.finish(state, None, None)
    }

    async fn write(mut self, finish: Finish) {
        let error = match time::timeout(COMMIT, self.ledger.finish(&finish)).await {
            Ok(Ok(())) => {
                self.settled = true;
                return self.ledger.unlease(&self.owner);
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the state store is slow".to_owned(),
        };
        tracing::error!(
            error,
            reason = "commit_failed",
            "the end of a call is not stored yet, it is tried again"
        );
    }

    fn finishes(&self, state: State, result: Option<Held>, ttl: Option<Duration>) -> Finish {
        Finish {
            name: self.name.clone(),
            owner: self.owner.clone(),
            state,
            report: self.report.clone(),
            result,
            ttl,
        }
    }

    /// Hands the end to the settling task. If that is full the lease runs out by itself.
    fn hand_over(&self, finish: Finish) {
        if self.ledger.settling.try_send(Settle::Finish(finish)).is_err() {
            self.ledger.unsettled.fetch_add(1, Ordering::Relaxed);
            tracing::error!(reason = "commit_failed", "too many calls wait for the state store");
            self.ledger.unlease(&self.owner);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.settled {
            let finish = self.finishing.take().unwrap_or_else(|| self.finishes(self.ends, None, None));
            self.hand_over(finish);
        }
    }
}

impl Ledger {
    pub(super) fn leases(&self) -> MutexGuard<'_, HashMap<String, Lease>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn unlease(&self, owner: &str) {
        self.leases().remove(owner);
    }

    /// Writes the end of an attempt. `Ok` also where the attempt has no say any more.
    pub(super) async fn finish(&self, end: &Finish) -> Result<(), store::Error> {
        let settings = self.settings.load();
        let ttl = millis(settings.keys_ttl);
        let mut names = vec![end.name.clone()];
        let result = end.result.as_ref().filter(|held| held.result.len() <= settings.max_result);
        let hold = end.ttl.map_or(settings.ttl, |ttl| ttl.min(settings.ttl));
        let stored = result.filter(|_| settings.results == Keep::Store).and_then(|held| {
            let modern = held.era == Era::Modern;
            let result = String::from_utf8(held.result.to_vec()).ok()?;
            let stored = Stored { principal: held.principal.clone(), modern, result };
            // What the store would refuse must not keep the mark from being written.
            serde_json::to_vec(&stored).ok().filter(|stored| stored.len() <= MAX_VALUE)
        });
        if stored.is_some() {
            names.push(Name::new(Table::Results, end.name.key.clone()));
        }
        let in_memory = result.filter(|_| settings.results == Keep::Memory).cloned();
        let (results, key, max_total) = (self.results.clone(), end.name.key.clone(), settings.max_total);
        let (owner, state, report) = (end.owner.clone(), end.state, end.report.clone());
        let mut is_held = false;
        let written = update_with(&*self.store, names, move |view: &View<'_>| {
            let next = entry_of(view).and_then(|entry| entry.finished(&owner, state, &report));
            match &in_memory {
                // In the same step, before the key says that it is done: who reads that must find it.
                Some(held) if next.is_some() => {
                    results.hold(&key, held, hold, max_total);
                    is_held = true;
                }
                // It runs again, and another attempt has the key now.
                Some(_) if is_held => results.forget(&key),
                _ => {}
            }
            let writes = [
                put(next.as_ref(), view.now + ttl),
                match (&next, &stored) {
                    (Some(_), Some(stored)) => {
                        Write::Put { value: stored.clone(), expires: Some(view.now + millis(hold)) }
                    }
                    _ => Write::Keep,
                },
            ];
            (writes[..view.records.len()].to_vec(), ())
        })
        .await;
        self.watch(written)
    }
}

/// A token that only one attempt has.
pub fn owner() -> String {
    STANDARD.encode(fastrand::u128(..).to_le_bytes())
}
