//! The store on a Redis server (7.0 or newer, or Valkey; no cluster), which several hosts may share.
//!
//! An update is optimistic: one script fetches the records together with the server's time and how full the tables
//! are, the change decides here, and a second script writes only if none of the records has changed meanwhile.
//! Otherwise the change is run again on what is there now. Each value carries a random version for that comparison.
//!
//! What is on the server, all under `mcp-sidecar:1:`, with `x` the table's letter:
//!
//! | key | |
//! |---|---|
//! | `x:KEY` | a record: 8 bytes of version, then the value; with its expiry |
//! | `#x` | sorted set of the table's records by expiry, each as `SIZE KEY` |
//! | `=x` | the sum of the sizes |
//! | `@r`, `!r` | the results by order of writing, and how many there have been |
//!
//! How durable a write is, and whether it outlives a failover, is the server's configuration. Where the server may
//! evict keys by itself (`maxmemory-policy` other than `noeviction`) no promise of the store holds; that is logged.

mod link;
mod settings;

use std::{fmt, time::Duration};

use redis::Value;
use tokio::time::{Instant, sleep};

use self::link::{Arguments, Link, Script};
pub use self::settings::Settings;
use super::{
    Bounds, BoxFuture, Change, Error, Name, Records, Store, Table, Usage, Write,
    change::{self, Counts},
    check, check_names,
};

/// A handle of one server. Connects when it is used, and again after it was away.
pub struct Redis {
    link: Link,
    bounds: Bounds,
}

impl Redis {
    /// A handle; tries once whether the server is there.
    ///
    /// # Errors
    ///
    /// A newer version has written to it. That it is away is no error yet.
    pub async fn open(settings: Settings, bounds: Bounds) -> Result<Self, Error> {
        let store = Self { link: Link::new(settings), bounds };
        match store.ping().await {
            Ok(()) | Err(Error::Unavailable(_)) => Ok(store),
            Err(error) => Err(error),
        }
    }

    async fn change(&self, names: &[Name], mut change: Change) -> Result<(), Error> {
        check_names(names)?;
        let deadline = Instant::now() + BOUND;
        let mut pause = FIRST_PAUSE;
        loop {
            let fetched = self.fetch(names, deadline).await?;
            let records: Vec<_> = fetched.values.iter().map(|value| value.as_deref().map(payload)).collect();
            let writes = change::run(&mut change, names, &records, fetched.now, &fetched.held, &self.bounds)?;
            // Nothing to write needs no second look: all was read in one step.
            if writes.iter().all(|write| *write == Write::Keep) {
                return Ok(());
            }
            let arguments = self.writing(names, &fetched.values, &writes);
            match self.link.change(Script::Write, &arguments, deadline).await? {
                Value::Int(WRITTEN) => return Ok(()),
                // Someone else was faster. Full jitter, so that many who want one record do not keep step.
                Value::Int(CHANGED) => sleep(pause.mul_f32(fastrand::f32())).await,
                _ => return Err(unexpected()),
            }
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }

    async fn fetch(&self, names: &[Name], deadline: Instant) -> Result<Fetched, Error> {
        let indices = Table::ALL.map(|table| format!("{PREFIX}#{}", letter(table)));
        let arguments = Arguments::new(names.iter().map(record_key), indices);
        let answer = self.link.ask(Script::Read, &arguments, deadline).await?;
        Fetched::from(answer, names.len()).ok_or_else(unexpected)
    }

    /// What the writing script takes; it says what each argument is.
    fn writing(&self, names: &[Name], had: &[Option<Vec<u8>>], writes: &[Write]) -> Arguments {
        let mut arguments = Arguments::new(names.iter().map(record_key), [PREFIX.to_owned()]);
        arguments.push(self.bounds.result_bytes().to_string());
        for ((name, had), write) in names.iter().zip(had).zip(writes) {
            arguments.push(letter(name.table));
            arguments.push(had.as_deref().map_or_else(Vec::new, |had| version(had).to_vec()));
            arguments.push(had.as_deref().map_or_else(String::new, |had| member(name, payload(had).len())));
            match write {
                Write::Keep | Write::Delete => {
                    arguments.push(if *write == Write::Keep { "keep" } else { "delete" });
                    (0..3).for_each(|_| arguments.push(""));
                }
                Write::Put { value, expires } => {
                    arguments.push("put");
                    arguments.push([&fastrand::u64(..).to_be_bytes()[..], value].concat());
                    arguments.push(expires.map_or_else(String::new, |at| at.to_string()));
                    arguments.push(member(name, value.len()));
                }
            }
            let most = self.bounds.records(name.table);
            arguments.push(most.map_or_else(String::new, |most| most.to_string()));
        }
        arguments
    }

    async fn find(&self, name: Name) -> Result<Option<Vec<u8>>, Error> {
        check(&name)?;
        let fetched = self.fetch(&[name], Instant::now() + BOUND).await?;
        Ok(fetched.values.into_iter().next().flatten().map(|value| payload(&value).to_vec()))
    }

    async fn all(&self, table: Table, prefix: String) -> Result<Records, Error> {
        let mut arguments = Arguments::new([], [PREFIX, letter(table)].map(str::to_owned));
        arguments.push(prefix);
        let Value::Array(answer) = self.link.ask(Script::Scan, &arguments, Instant::now() + BOUND).await?
        else {
            return Err(unexpected());
        };
        let mut found = Vec::with_capacity(answer.len() / 2);
        for pair in answer.chunks_exact(2) {
            let [Value::BulkString(key), Value::BulkString(value)] = pair else { return Err(unexpected()) };
            found.push((String::from_utf8_lossy(key).into_owned(), payload(value).to_vec()));
        }
        found.sort_unstable();
        Ok(found)
    }

    async fn held(&self, table: Table) -> Result<Usage, Error> {
        let arguments = Arguments::new([], [PREFIX, letter(table)].map(str::to_owned));
        match self.link.ask(Script::Usage, &arguments, Instant::now() + BOUND).await? {
            Value::Array(numbers) => match numbers.as_slice() {
                [Value::Int(records), Value::Int(bytes)] => Ok(Usage {
                    records: u64::try_from(*records).unwrap_or(0),
                    bytes: u64::try_from(*bytes).unwrap_or(0),
                }),
                _ => Err(unexpected()),
            },
            _ => Err(unexpected()),
        }
    }
}

impl Store for Redis {
    fn update(&self, names: Vec<Name>, change: Change) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async move { self.change(&names, change).await })
    }

    fn get(&self, name: Name) -> BoxFuture<'_, Result<Option<Vec<u8>>, Error>> {
        Box::pin(self.find(name))
    }

    fn scan(&self, table: Table, prefix: String) -> BoxFuture<'_, Result<Records, Error>> {
        Box::pin(self.all(table, prefix))
    }

    fn usage(&self, table: Table) -> BoxFuture<'_, Result<Usage, Error>> {
        Box::pin(self.held(table))
    }

    fn ping(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.link.write_something(PREFIX, Instant::now() + BOUND))
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("link", &self.link).finish_non_exhaustive()
    }
}

/// The number is the layout's version: another layout gets another one.
const PREFIX: &str = "mcp-sidecar:1:";
/// From the question to the answer, connecting and repetitions included: more than for a file, since both may take
/// their second.
const BOUND: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// What the writing script answers.
const WRITTEN: i64 = 1;
const CHANGED: i64 = 0;
/// Bytes of a value's version.
const VERSION: usize = 8;

const fn letter(table: Table) -> &'static str {
    match table {
        Table::Keys => "k",
        Table::Counters => "c",
        Table::Results => "r",
        Table::Tools => "t",
        Table::Secrets => "s",
    }
}

fn record_key(name: &Name) -> String {
    format!("{PREFIX}{}:{}", letter(name.table), name.key)
}

fn member(name: &Name, value: usize) -> String {
    format!("{} {}", name.key.len() + value, name.key)
}

fn version(stored: &[u8]) -> &[u8] {
    &stored[..stored.len().min(VERSION)]
}

fn payload(stored: &[u8]) -> &[u8] {
    stored.get(VERSION..).unwrap_or_default()
}

fn unexpected() -> Error {
    Error::Corrupt("the server's answer is not the script's".into())
}

/// What the reading script answers.
struct Fetched {
    now: u64,
    /// As stored, version and all.
    values: Vec<Option<Vec<u8>>>,
    held: Counts,
}

impl Fetched {
    fn from(answer: Value, asked: usize) -> Option<Self> {
        let Value::Array(answer) = answer else { return None };
        let mut answer = answer.into_iter();
        let Value::BulkString(now) = answer.next()? else { return None };
        let now = std::str::from_utf8(&now).ok()?.parse().ok()?;
        let values = answer.by_ref().take(asked).map(|value| match value {
            Value::Nil => Some(None),
            Value::BulkString(value) => Some(Some(value)),
            _ => None,
        });
        let values = values.collect::<Option<Vec<_>>>()?;
        let mut held = Counts::default();
        for count in &mut held {
            let Value::Int(records) = answer.next()? else { return None };
            *count = u64::try_from(records).ok()?;
        }
        (values.len() == asked).then_some(Self { now, values, held })
    }
}

#[cfg(test)]
mod tests;
