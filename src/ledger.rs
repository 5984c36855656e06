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

pub mod entry;
mod gauges;
#[cfg(test)]
mod model;
mod parked;
pub mod results;
mod settle;

use std::{
    borrow::Cow,
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::{
    sync::{OnceCell, mpsc},
    time::{self, Instant},
};

pub use self::parked::Waiting;
use self::{
    entry::{Attempt, Entry, Go, Reached, Report, State, Verdict},
    results::{Held, Results},
    settle::Settle,
};
use crate::{
    call::key::{Derivation, First, hex},
    inflight::{Running, Scope},
    listing,
    message::{Era, Id, answer::Progress},
    store::{self, BoxFuture, MAX_VALUE, Name, Store, Table, Usage, View, Write, update_with},
};

/// How long a claim stands without renewal: a sidecar that died blocks its keys for no longer.
const LEASE: Duration = Duration::from_secs(20);
/// The same in milliseconds, as the store counts.
pub const LEASE_MS: u64 = LEASE.as_millis() as u64;
/// How often claims are renewed.
const RENEWAL: Duration = Duration::from_secs(5);
/// An attempt whose lease has less than this left and cannot be renewed is closed.
const LAST_MOMENT: Duration = Duration::from_secs(4);
/// A commit is awaited this long before the response is passed on all the same.
const COMMIT: Duration = Duration::from_secs(1);
/// How long the end of the process waits for the store.
const LAST_SETTLES: Duration = Duration::from_secs(2);
/// Progress of a running attempt is stored at most this often.
const REPORT: Duration = Duration::from_millis(250);

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
    results: Results,
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

/// What all that share the store share. Its `Debug` prints nothing of it.
struct Secret {
    key: [u8; 32],
    tag: String,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[derive(Debug)]
struct Lease {
    name: Name,
    until: Instant,
    running: Option<Arc<Running>>,
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

/// A result as the store keeps it.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    principal: String,
    modern: bool,
    result: String,
}

/// An ordinal that is counted up.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Counter {
    n: u64,
}

impl Ledger {
    /// A ledger on this store; starts its task. The store may be away.
    pub fn start(store: Arc<dyn Store>, settings: Settings) -> Arc<Self> {
        let (settling, settles) = mpsc::channel(settle::QUEUE);
        let ledger = Arc::new(Self {
            store,
            settings: ArcSwap::from_pointee(settings),
            results: Results::default(),
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

    /// What the store holds of an upstream's tools.
    ///
    /// # Errors
    ///
    /// The store is away.
    pub async fn tools(&self, upstream: &str) -> Result<Vec<listing::Record>, store::Error> {
        let held = self.watch(self.store.scan(Table::Tools, listing::key_prefix(upstream)).await)?;
        Ok(held.into_iter().map(|(key, value)| listing::Record { key, value }).collect())
    }

    /// What must be the same for all that share the store: made once, by whoever comes first.
    async fn secret(&self) -> Result<&Secret, store::Error> {
        self.secret
            .get_or_try_init(|| async {
                let fresh = fresh_secret();
                let fresh = fresh?;
                let names = vec![Name::new(Table::Secrets, "principal")];
                let key = update_with(&*self.store, names, move |view: &View<'_>| {
                    match view
                        .records
                        .first()
                        .copied()
                        .flatten()
                        .and_then(|held| <[u8; 32]>::try_from(held).ok())
                    {
                        Some(held) => (vec![Write::Keep], held),
                        None => (vec![Write::Put { value: fresh.to_vec(), expires: None }], fresh),
                    }
                })
                .await;
                let key = self.watch(key)?;
                let tag = keyed(&key, b"tag")[..8].to_owned();
                Ok(Secret { key, tag })
            })
            .await
    }

    /// Whose a call is: a keyed hash of the `Authorization` that the node sent, none being one too.
    ///
    /// # Errors
    ///
    /// The store is away, and was when the process began.
    pub async fn principal(&self, authorization: Option<&[u8]>) -> Result<String, store::Error> {
        let secret = self.secret().await?;
        Ok(match authorization {
            Some(value) => keyed(&secret.key, &[b"authorization ", value].concat()),
            None => keyed(&secret.key, b"none"),
        })
    }

    /// A progress token that no client has, and that every sidecar on this store knows for one of theirs.
    ///
    /// # Errors
    ///
    /// As [`Ledger::principal`].
    pub async fn progress_token(&self) -> Result<String, store::Error> {
        let tag = &self.secret().await?.tag;
        Ok(format!("{TOKEN_PREFIX}{tag}/{:032x}", fastrand::u128(..)))
    }

    /// Whether a progress token is one that a sidecar on this store added. While the store's tag is not known any token of
    /// that form counts as one: better one too many is kept back than one shown to a node that did not offer it.
    pub fn is_own_token(&self, token: &Id) -> bool {
        match self.secret.get() {
            Some(secret) => token.has_prefix(&format!("{TOKEN_PREFIX}{}/", secret.tag)),
            None => token.has_prefix(TOKEN_PREFIX),
        }
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
    /// The store is away or has no room.
    pub async fn key(&self, upstream: &str, derivation: Derivation) -> Result<Option<String>, store::Error> {
        let (activity, first) = match derivation {
            Derivation::None => return Ok(None),
            Derivation::Known { key, .. } => return Ok(Some(key)),
            Derivation::Activity { activity, first } => (activity, first),
        };
        let mut names =
            vec![Name::new(Table::Counters, format!("a\u{1}{upstream}\u{1}{}", short(&activity)))];
        if let First::Counted { series, .. } = &first {
            names.push(Name::new(Table::Counters, format!("k\u{1}{upstream}\u{1}{}", short(series))));
        }
        let ttl = millis(self.settings.load().keys_ttl);
        let fixed = update_with(&*self.store, names, move |view: &View<'_>| fix(view, &first, ttl)).await;
        self.watch(fixed)?
            .map(Some)
            .ok_or(store::Error::Unavailable("there is no room for another counter".into()))
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
        let (verdict, result) = match self.watch(decided) {
            Ok(decided) => decided,
            Err(error) => {
                claim.settled = !error.may_be_applied();
                return Err(error);
            }
        };
        claim.settled = true;
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
    pub fn park(&self, scope: Scope, id: Id, call: Waiting) {
        let let_go = self.parked().put(scope, id, call);
        // Dropping a claim settles it.
        drop(let_go);
    }

    /// The claim of a parked call: its response came, or it was cancelled.
    pub fn unpark(&self, scope: &Scope, id: &Id) -> Option<Claim> {
        self.parked().take(scope, id).map(|waiting| waiting.claim)
    }

    /// Progress of a parked call, on a `GET` of its session.
    pub fn parked_progress(&self, scope: &Scope, token: &Id, progress: &Progress) {
        if let (Some(waiting), Some(value)) = (self.parked().by_token(scope, token), progress.progress) {
            let token = progress.resume.as_deref().filter(|_| waiting.resumable);
            waiting.claim.progress(value, progress.total, token);
        }
    }

    fn parked(&self) -> std::sync::MutexGuard<'_, parked::Parked> {
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

    fn leases(&self) -> std::sync::MutexGuard<'_, HashMap<String, Lease>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unlease(&self, owner: &str) {
        self.leases().remove(owner);
    }

    /// Writes the end of an attempt. `Ok` also where the attempt has no say any more. `again`: it may have been written
    /// before.
    async fn finish(&self, end: &Finish, again: bool) -> Result<(), store::Error> {
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
        let held = result.filter(|_| settings.results == Keep::Memory);
        if let Some(held) = held {
            // Before the key says that it is done: who reads that must find it.
            self.results.hold(&end.name.key, held.clone(), hold, settings.max_total);
        }
        let (owner, state, report) = (end.owner.clone(), end.state, end.report.clone());
        let hold_ms = millis(hold);
        let written = update_with(&*self.store, names, move |view: &View<'_>| {
            let next = entry_of(view).and_then(|entry| entry.finished(&owner, state, &report));
            let writes = [
                put(next.as_ref(), view.now + ttl),
                match (&next, &stored) {
                    (Some(_), Some(stored)) => {
                        Write::Put { value: stored.clone(), expires: Some(view.now + hold_ms) }
                    }
                    _ => Write::Keep,
                },
            ];
            (writes[..view.records.len()].to_vec(), next.is_some())
        })
        .await;
        let stands = self.watch(written)?;
        if !stands && !again && held.is_some() {
            // Another attempt has the key now; after a repeated write it is this one's own end that stands.
            self.results.forget(&end.name.key);
        }
        Ok(())
    }
}

/// What all tokens of ours begin with.
const TOKEN_PREFIX: &str = "mcp-sidecar/";

/// An attempt's right to run, and what it reports. Dropped without an end it counts as unknown.
#[derive(Debug)]
pub struct Claim {
    ledger: Arc<Ledger>,
    name: Name,
    owner: String,
    principal: String,
    era: Era,
    task: bool,
    report: Report,
    stored: Option<Instant>,
    ends: State,
    /// The end that is being written: what a drop in the middle of it hands over.
    finishing: Option<Finish>,
    settled: bool,
}

/// The end of an attempt, ready to be written.
#[derive(Clone, Debug)]
struct Finish {
    name: Name,
    owner: String,
    state: State,
    report: Report,
    result: Option<Held>,
    /// A task handle is held no longer than its own time.
    ttl: Option<Duration>,
}

impl Claim {
    /// A claim that the store is being asked for: if it is dropped now, nothing was sent.
    fn asked(ledger: Arc<Ledger>, name: Name, attempt: &Attempt) -> Self {
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
    fn runs(&mut self, running: Option<Arc<Running>>) {
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
        let error = match time::timeout(COMMIT, self.ledger.finish(&finish, false)).await {
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

/// One step of [`Ledger::key`]: the activity's key as it is fixed, or the first one, counted if need be. `None`: no room.
fn fix(view: &View<'_>, first: &First, ttl: u64) -> (Vec<Write>, Option<String>) {
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

/// One step of [`Ledger::claim`]: the verdict, and the result that a replay answers.
fn decide(
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

fn entry_of(view: &View<'_>) -> Option<Entry> {
    serde_json::from_slice(view.records.first().copied().flatten()?).ok()
}

/// A key as the store knows it: a very long one by its hash.
fn short(key: &str) -> Cow<'_, str> {
    if key.len() <= LONG_KEY { key.into() } else { format!("\u{1}{}", hex(&Sha256::digest(key))).into() }
}

/// Longer keys are not stored in full.
const LONG_KEY: usize = 1024;

/// Written as it is from now on; nothing: as it was.
fn put(entry: Option<&Entry>, expires: u64) -> Write {
    match entry.and_then(|entry| serde_json::to_vec(entry).ok()) {
        Some(value) => Write::Put { value, expires: Some(expires) },
        None => Write::Keep,
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 4)
}

/// HMAC-SHA256, 32 hex digits of it.
fn keyed(key: &[u8; 32], message: &[u8]) -> String {
    // A key of any length fits.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return String::new() };
    mac.update(message);
    hex(&mac.finalize().into_bytes()[..16])
}

/// A token that only one attempt has.
pub fn owner() -> String {
    STANDARD.encode(fastrand::u128(..).to_le_bytes())
}

/// 32 bytes from the TLS provider's generator: they key hashes of credentials.
fn fresh_secret() -> Result<[u8; 32], store::Error> {
    let mut secret = [0; 32];
    let random = rustls::crypto::aws_lc_rs::default_provider().secure_random;
    random.fill(&mut secret).map_err(|_| store::Error::Unavailable("the system has no randomness".into()))?;
    Ok(secret)
}
