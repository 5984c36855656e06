//! The ledger: what is known of each keyed call, so that a second attempt is answered, resumed, held back or
//! refused.
//!
//! [`entry`] decides, purely; the state store makes each decision one atomic step; this module holds what lives only as
//! long as the process: claims, their leases, the results in memory, and the one task that settles what an exchange could
//! not settle itself.
//!
//! A *claim* is an attempt's right to run. It is a lease: renewed while the attempt runs, so that a sidecar that died does
//! not block its key for long. Dropped without an end it counts as unknown.
//!
//! The claim is not atomic with the upstream's effect: who closes that gap is said by the retry class.

mod claim;
pub mod entry;
mod gauges;
#[cfg(test)]
mod model;
mod parked;
mod results;
mod secret;
mod settle;
mod step;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use tokio::{
    sync::{OnceCell, mpsc},
    time,
};

use self::{
    claim::Lease,
    entry::{Attempt, Go, Verdict},
    results::Results,
    secret::Secret,
    settle::Settle,
    step::{Decided, decide, fix, short},
};
pub use self::{
    claim::{Claim, owner},
    parked::Waiting,
    step::Named,
};
use crate::{
    call::key::{Derivation, First},
    inflight::{Running, Scope},
    listing,
    message::{Id, answer::Progress},
    store::{self, Name, Store, Table, Usage, View, update_with},
    waits::Whose,
};

/// How long a claim stands without renewal: a sidecar that died blocks its keys for no longer.
const LEASE: Duration = Duration::from_secs(20);
/// The same in milliseconds, as the store counts.
pub const LEASE_MS: u64 = LEASE.as_millis() as u64;
/// How long the end of the process waits for the store.
const LAST_SETTLES: Duration = Duration::from_secs(2);

/// Where committed results wait for a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Nowhere.
    Off,
    /// In this process.
    Memory,
    /// In the state store.
    Store,
}

/// `[ledger]` of the configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where results wait.
    pub results: Keep,
    /// For how long.
    pub ttl: Duration,
    /// Bytes of one result; a larger one is not held.
    pub max_result: usize,
    /// Bytes of all results in memory.
    pub max_total: usize,
    /// How long marks and counters are kept.
    pub keys_ttl: Duration,
}

/// One sidecar's ledger.
#[derive(Debug)]
pub struct Ledger {
    store: Arc<dyn Store>,
    settings: ArcSwap<Settings>,
    results: Arc<Results>,
    secret: OnceCell<Secret>,
    settling: mpsc::Sender<Settle>,
    leases: Mutex<HashMap<String, Lease>>,
    parked: Mutex<parked::Parked>,
    away: AtomicBool,
    /// Ends that found no place to be settled.
    unsettled: AtomicUsize,
    /// What the store's tables held when somebody last asked.
    usage: Mutex<Vec<(Table, Usage)>>,
}

/// What became of an attempt that asked to run.
#[derive(Debug)]
pub enum Claimed {
    /// It runs.
    Run(Box<Claim>, Go),
    /// The committed result, as the upstream wrote it.
    Replay(Bytes),
    /// It does not run.
    Refused(Verdict),
}

impl Ledger {
    /// A ledger on this store; starts its task. The store may be away.
    pub fn start(store: Arc<dyn Store>, settings: Settings) -> Arc<Self> {
        let (settling, settles) = mpsc::channel(settle::QUEUE);
        let ledger = Arc::new(Self {
            store,
            settings: ArcSwap::from_pointee(settings),
            results: Arc::default(),
            secret: OnceCell::new(),
            settling,
            leases: Mutex::default(),
            parked: Mutex::default(),
            away: AtomicBool::new(false),
            unsettled: AtomicUsize::new(0),
            usage: Mutex::default(),
        });
        tokio::spawn(settle::run(Arc::downgrade(&ledger), settles));
        tokio::spawn(settle::renew(Arc::downgrade(&ledger)));
        tokio::spawn(settle::let_go(Arc::downgrade(&ledger)));
        tokio::spawn(settle::watch(Arc::downgrade(&ledger)));
        ledger
    }

    /// Takes new settings.
    pub fn reload(&self, settings: Settings) {
        self.settings.store(Arc::new(settings));
    }

    /// The store behind it.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Bytes of committed results in this process, and of what stands around each.
    pub fn result_bytes(&self) -> usize {
        self.results.bytes()
    }

    /// What the store holds of an upstream's tools.
    ///
    /// # Errors
    ///
    /// The store is away.
    pub async fn tools(&self, upstream: &str) -> Result<Vec<listing::Record>, store::Error> {
        let held = self.watch(self.store.scan(Table::Tools, listing::key_prefix(upstream)).await)?;
        Ok(held.into_iter().map(|(key, value)| listing::Record { key, value }).collect())
    }

    /// Reads what has to be known before a stream of a process before this one is relayed. A store that is away is not
    /// waited for.
    pub async fn prepare(&self) {
        if self.secret.get().is_none() && !self.is_away() {
            // Said where a call needs it.
            let _ = self.watch(self.secret().await);
        }
    }

    /// Whether the store answers.
    ///
    /// # Errors
    ///
    /// It does not.
    pub async fn ping(&self) -> Result<(), store::Error> {
        self.watch(self.store.ping().await)
    }

    /// The key of a call, as its derivation says; what must be fixed or counted is, in one atomic step.
    ///
    /// # Errors
    ///
    /// The store is away, or damaged.
    pub async fn key(&self, upstream: &str, derivation: Derivation) -> Result<Named, store::Error> {
        let (activity, first) = match derivation {
            Derivation::None => return Ok(Named::Nothing),
            Derivation::Known { key, .. } => return Ok(Named::Key(key)),
            Derivation::Activity { activity, first } => (activity, first),
        };
        let mut names =
            vec![Name::new(Table::Counters, format!("a\u{1}{upstream}\u{1}{}", short(&activity)))];
        if let First::Counted { series, .. } = &first {
            names.push(Name::new(Table::Counters, format!("k\u{1}{upstream}\u{1}{}", short(series))));
        }
        let ttl = millis(self.settings.load().keys_ttl);
        let fixed = update_with(&*self.store, names, move |view: &View<'_>| fix(view, &first, ttl)).await;
        Ok(self.watch(fixed)??)
    }

    /// Claims a key for an attempt: claim, mismatch check and state are one atomic step.
    ///
    /// # Errors
    ///
    /// The store is away: nothing may be sent.
    pub async fn claim(
        self: &Arc<Self>,
        upstream: &str,
        key: &str,
        attempt: Attempt,
        running: Option<Arc<Running>>,
    ) -> Result<Claimed, store::Error> {
        let name = Name::new(Table::Keys, format!("{upstream}\u{1}{}", short(key)));
        let settings = self.settings.load();
        let mut names = vec![name.clone()];
        if settings.results == Keep::Store {
            names.push(Name::new(Table::Results, name.key.clone()));
        }
        let ttl = millis(settings.keys_ttl);
        let (ledger, key) = (self.clone(), name.key.clone());
        let in_memory = settings.results == Keep::Memory;
        // From here on the store may hold the claim, even if nobody waits for its answer any more.
        let mut claim = Claim::asked(self.clone(), name, &attempt);
        let decided = update_with(&*self.store, names, move |view: &View<'_>| {
            // Looked up in the same step: a result is held before its key says that it is done.
            let held = in_memory.then(|| ledger.results.get(&key)).flatten();
            let held = held.filter(|held| held.is_for(&attempt.principal, attempt.era));
            decide(view, &attempt, held.map(|held| held.result), ttl)
        })
        .await;
        let decided = match self.watch(decided) {
            Ok(decided) => decided,
            Err(error) => {
                claim.settled = !error.may_be_applied();
                return Err(error);
            }
        };
        claim.settled = true;
        let Decided { verdict, result } = decided?;
        Ok(match (verdict, result) {
            (Verdict::Run(go), _) => {
                claim.runs(running);
                Claimed::Run(Box::new(claim), go)
            }
            (Verdict::Replay, Some(result)) => Claimed::Replay(result),
            (Verdict::Replay, None) => Claimed::Refused(Verdict::Busy),
            (refused, _) => Claimed::Refused(refused),
        })
    }

    /// Whether the store answers; what the log says when that changes.
    fn watch<T>(&self, result: Result<T, store::Error>) -> Result<T, store::Error> {
        let away = result.as_ref().is_err_and(|error| !matches!(error, store::Error::Refused(_)));
        if self.away.swap(away, Ordering::Relaxed) != away {
            match &result {
                Err(error) => tracing::error!(%error, "the state store is away: calls that need it are busy"),
                Ok(_) => tracing::info!("the state store is back"),
            }
        }
        result
    }

    /// The store did not answer when it was last asked.
    pub fn is_away(&self) -> bool {
        self.away.load(Ordering::Relaxed)
    }

    /// Keeps a legacy call's claim after its stream ended with event ids: its response may still come on a `GET` of that
    /// session.
    pub fn park(&self, scope: &Scope, id: Id, call: Waiting) {
        let let_go = self.parked().put(scope, id, call);
        // Dropping a claim settles it.
        drop(let_go);
    }

    /// Ends parked calls of tools that `denied` names, given an upstream and a tool: their servers are told, and their ends
    /// are unknown.
    pub fn deny(&self, denied: impl Fn(&str, &str) -> bool) {
        let denied = self.parked().denied(denied);
        if !denied.is_empty() {
            tracing::info!(
                calls = denied.len(),
                "the policy denies calls whose response is awaited on a GET"
            );
        }
        denied.into_iter().for_each(Waiting::give_up);
    }

    /// The claim of a parked call whose response has come on a `GET` of its session.
    pub fn resumed(&self, scope: &Scope, id: &Id) -> Option<Claim> {
        self.parked().take(scope, id, Whose::Session).map(|waiting| waiting.claim)
    }

    /// The claim of a parked call that its node has cancelled.
    pub fn unpark(&self, scope: &Scope, id: &Id) -> Option<Claim> {
        self.parked().take(scope, id, Whose::Own).map(|waiting| waiting.claim)
    }

    /// Progress of a parked call, on a `GET` of its session.
    pub fn parked_progress(&self, scope: &Scope, token: &Id, progress: &Progress) {
        if let (Some(waiting), Some(value)) = (self.parked().by_token(scope, token), progress.progress) {
            let token = progress.resume.as_deref().filter(|_| waiting.resumable);
            waiting.claim.progress(value, progress.total, token);
        }
    }

    fn parked(&self) -> MutexGuard<'_, parked::Parked> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Settles what is still open, for at most two seconds: calls that wait for a resuming `GET` have an unknown end.
    pub async fn close(&self) {
        let parked = std::mem::take(&mut *self.parked());
        drop(parked);
        let settled = async {
            while !self.leases().is_empty() {
                time::sleep(Duration::from_millis(5)).await;
            }
        };
        if time::timeout(LAST_SETTLES, settled).await.is_err() {
            tracing::warn!("the state store takes nothing: calls that just ended count as unknown");
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 4)
}

#[cfg(test)]
mod tests;
