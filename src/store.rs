//! The durable map behind the ledger: opaque keys, opaque bytes, and times.
//!
//! A *record* has a table, a key, a value and perhaps an expiry. What its bytes mean is the caller's matter; the store
//! knows only how to change a few records in one atomic step ([`Store::update`]).
//!
//! What every store promises:
//! - An update is atomic and isolated: its [`Change`] sees records that no one else changes before the writes are in,
//!   whether that other is a task, a process or another host.
//! - Once an update has returned `Ok` its writes are as durable as the store is: `memory` until the process ends,
//!   `sqlite` over a power loss, `redis` as its server is configured.
//! - An expired record is as absent. Expiry is judged by the store's own clock, which every change is shown.
//! - Nothing in `Keys`, `Counters`, `Tools` and `Secrets` is dropped before it expires: at a table's bound there is no
//!   room for a new record, and the change is told so. `Results` drops its oldest instead.
//! - Every wait is bounded, and a store that was away is found again without a restart.
//!
//! What they leave to others: meaning, encryption, and deciding what to do while a store is away.

mod change;
#[cfg(test)]
mod contract;
mod memory;
mod redis;
mod sqlite;

use std::{
    collections::HashSet,
    fmt,
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
};

pub use self::{memory::Memory, redis::Redis, sqlite::Sqlite};
use crate::clock::Clock;

/// Keys with their values.
pub type Records = Vec<(String, Vec<u8>)>;

/// A future of a store.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Which map a record lives in; each has its own bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Table {
    /// The marks: which key ended how. At most [`Bounds::max_keys`].
    Keys,
    /// What counts calls. At most four times [`Bounds::max_keys`].
    Counters,
    /// Committed results. At most [`Bounds::max_result_bytes`]; beyond that the oldest go.
    Results,
    /// What is known of tools. At most 100,000.
    Tools,
    /// What must be the same for all that share the store. At most 1,000.
    Secrets,
}

impl Table {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Keys, Self::Counters, Self::Results, Self::Tools, Self::Secrets];

    /// In lower case, as SQL and metrics call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Counters => "counters",
            Self::Results => "results",
            Self::Tools => "tools",
            Self::Secrets => "secrets",
        }
    }

    /// Its place in [`Table::ALL`].
    const fn index(self) -> usize {
        self as usize
    }
}

/// Where a record lives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// The map.
    pub table: Table,
    /// Any text of at most [`MAX_KEY`] bytes.
    pub key: String,
}

impl Name {
    /// The record `key` of `table`.
    pub fn new(table: Table, key: impl Into<String>) -> Self {
        Self { table, key: key.into() }
    }
}

/// What becomes of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// It stays as it is, expiry included.
    Keep,
    /// It is this from now on.
    Put {
        /// At most [`MAX_VALUE`] bytes.
        value: Vec<u8>,
        /// From when on it is as absent: milliseconds since the epoch, by the store's clock. `None`: never.
        expires: Option<u64>,
    },
    /// It is gone.
    Delete,
}

/// What a change sees.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// The records in the order they were asked for; `None`: absent or expired.
    pub records: &'a [Option<&'a [u8]>],
    /// The store's clock, milliseconds since the epoch.
    pub now: u64,
    /// Whether a table has room for all of the asked records that it does not hold.
    pub room: &'a dyn Fn(Table) -> bool,
}

impl fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").field("now", &self.now).field("records", &self.records.len()).finish()
    }
}

/// Decides what becomes of each record it is shown: one [`Write`] a record, in the same order.
///
/// May run more than once for one update; what the last run decided is what was written. It runs while the store
/// holds its lock: it must be short and must not block.
pub type Change = Box<dyn FnMut(&View<'_>) -> Vec<Write> + Send>;

/// What a table holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Live records.
    pub records: u64,
    /// Bytes of their keys and values, without the store's own overhead. Records that have just expired may count.
    pub bytes: u64,
}

/// How much may be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Records in [`Table::Keys`].
    pub max_keys: usize,
    /// Bytes in [`Table::Results`], keys and values.
    pub max_result_bytes: usize,
}

impl Bounds {
    /// How many records a table takes; `None`: it is bounded by bytes.
    fn records(&self, table: Table) -> Option<u64> {
        let keys = u64::try_from(self.max_keys).unwrap_or(u64::MAX);
        match table {
            Table::Keys => Some(keys),
            Table::Counters => Some(keys.saturating_mul(4)),
            Table::Results => None,
            Table::Tools => Some(100_000),
            Table::Secrets => Some(1_000),
        }
    }

    fn result_bytes(&self) -> u64 {
        u64::try_from(self.max_result_bytes).unwrap_or(u64::MAX)
    }
}

/// Why a store did not do what it was asked. No text holds a password, a key or a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It is away, locked, full or too slow: try again later. Where the text says so, and only there, an update may
    /// have been applied or may be applied yet.
    #[error("the state store is unavailable: {0}")]
    Unavailable(String),
    /// A newer version of the sidecar has written to it.
    #[error("the state store has schema {found}, this version knows up to {known}: use the newer version")]
    Newer {
        /// What it says.
        found: i64,
        /// The newest that is known here.
        known: i64,
    },
    /// What is stored is not what the sidecar stores.
    #[error("the state store is damaged: {0}")]
    Corrupt(String),
    /// What was asked breaks the store's rules: nothing was written.
    #[error("the state store refuses: {0}")]
    Refused(&'static str),
}

impl Error {
    /// Whether the update may have been applied all the same, or may be yet.
    pub fn may_be_applied(&self) -> bool {
        matches!(self, Self::Unavailable(text) if text.ends_with(MAY_BE_APPLIED))
    }
}

/// How the text of an [`Error::Unavailable`] ends where an update may have been applied.
const MAY_BE_APPLIED: &str = "a change may have been applied";

/// A durable map. Dropping a future of it gives up the answer, not always the update.
pub trait Store: Send + Sync + fmt::Debug {
    /// Reads 1 to [`MAX_NAMES`] records, lets `change` decide, writes what it decided; atomically.
    ///
    /// # Errors
    ///
    /// See [`Error`]: after `Unavailable` with a text that says so it may have been applied, else it was not.
    fn update(&self, names: Vec<Name>, change: Change) -> BoxFuture<'_, Result<(), Error>>;

    /// The value of one record.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    fn get(&self, name: Name) -> BoxFuture<'_, Result<Option<Vec<u8>>, Error>>;

    /// Every record of a table whose key begins with `prefix`, by key. Reads the whole table in some stores: for
    /// [`Table::Tools`] and [`Table::Secrets`] only.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    fn scan(&self, table: Table, prefix: String) -> BoxFuture<'_, Result<Records, Error>>;

    /// What a table holds.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    fn usage(&self, table: Table) -> BoxFuture<'_, Result<Usage, Error>>;

    /// How many questions wait for it in this process, where they wait in a queue.
    fn waiting(&self) -> usize {
        0
    }

    /// Whether it answers now, and takes writes as far as it knows.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    fn ping(&self) -> BoxFuture<'_, Result<(), Error>>;
}

/// [`Store::update`] of a change that also has something to say: what the run that was committed said.
///
/// # Errors
///
/// As [`Store::update`].
pub async fn update_with<R: Send + 'static>(
    store: &dyn Store,
    names: Vec<Name>,
    mut change: impl FnMut(&View<'_>) -> (Vec<Write>, R) + Send + 'static,
) -> Result<R, Error> {
    let said = Arc::new(Mutex::new(None));
    let says = Arc::clone(&said);
    let change = move |view: &View<'_>| {
        let (writes, answer) = change(view);
        *says.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        writes
    };
    store.update(names, Box::new(change)).await?;
    let answer = said.lock().unwrap_or_else(PoisonError::into_inner).take();
    answer.ok_or(Error::Refused("the change did not run"))
}

/// Which store, and how it is reached.
#[derive(Clone, Debug)]
pub enum Spec {
    /// Gone with the process.
    Memory,
    /// A database file, which several processes of one host may share.
    Sqlite(PathBuf),
    /// A server that several hosts may share.
    Redis(redis::Settings),
}

pub use self::redis::Settings as RedisSettings;

/// Opens the store.
///
/// A Redis that is away is no error here: it is found when it comes back, until then everything but this fails.
///
/// # Errors
///
/// A file that can't be opened or created, is damaged, or is of a newer version; a server of a newer version.
pub async fn open(spec: &Spec, bounds: Bounds) -> Result<Arc<dyn Store>, Error> {
    Ok(match spec {
        Spec::Memory => Arc::new(Memory::new(bounds, Clock::system())),
        Spec::Sqlite(path) => Arc::new(Sqlite::open(path, bounds, Clock::system()).await?),
        Spec::Redis(settings) => Arc::new(Redis::open(settings.clone(), bounds).await?),
    })
}

/// Bytes of a value.
pub const MAX_VALUE: usize = 16 << 20;
/// Bytes of a key.
pub const MAX_KEY: usize = 8 << 10;
/// Records of one update.
pub const MAX_NAMES: usize = 8;

fn check(name: &Name) -> Result<(), Error> {
    match name.key.len() {
        0..=MAX_KEY => Ok(()),
        _ => Err(Error::Refused("a key exceeds 8192 bytes")),
    }
}

fn check_names(names: &[Name]) -> Result<(), Error> {
    if names.is_empty() || names.len() > MAX_NAMES {
        return Err(Error::Refused("an update takes 1 to 8 records"));
    }
    if names.iter().collect::<HashSet<_>>().len() < names.len() {
        return Err(Error::Refused("an update names one record twice"));
    }
    names.iter().try_for_each(check)
}

/// Milliseconds since the epoch.
fn millis(clock: &Clock) -> u64 {
    let since = clock.now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
