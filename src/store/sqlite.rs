//! The store in a file: SQLite in WAL mode, which several processes of one host may share.
//!
//! One thread owns the connection. It takes what waits in its queue and runs all of it in one transaction, so that
//! many updates share one flush to the disk; nobody is answered before that is done (group commit). Each update's
//! change is still run by itself, on what the updates before it have written.
//!
//! The file is opened again whenever it was in trouble, and when its path leads to another file than the one at hand:
//! one that was deleted would take writes until the process ends, and keep none. At run time the folder is not made
//! again: if it is gone, so is a volume, and an empty file in its stead would forget every mark.
//!
//! Never on NFS: WAL needs shared memory.

mod file;
mod tables;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use rusqlite::ErrorCode;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout_at},
};

use self::{file::File, tables::Tables};
use super::{
    Bounds, BoxFuture, Change, Error, Name, Records, Store, Table, Usage, Write,
    change::{self, Counts},
    check, check_names, millis,
};
use crate::clock::Clock;

/// A handle of the thread that owns the file; it ends when the handle is dropped.
pub struct Sqlite {
    path: Arc<Path>,
    jobs: mpsc::Sender<Job>,
}

impl Sqlite {
    /// Opens the file at `path`, or creates it (mode 0600) and its folder (mode 0700).
    ///
    /// # Errors
    ///
    /// It can't be opened or created, is damaged, no database of the sidecar, or of a newer version.
    pub async fn open(path: &Path, bounds: Bounds, clock: Clock) -> Result<Self, Error> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let (jobs, queue) = mpsc::channel(QUEUE);
        let (opened, outcome) = oneshot::channel();
        let owner = Owner { path: path.clone(), file: None, failing: false, swept: 0, bounds, clock };
        thread::Builder::new()
            .name("state".into())
            .spawn(move || owner.run(queue, opened))
            .map_err(|error| Error::Unavailable(format!("its thread can't be started: {error}")))?;
        outcome.await.unwrap_or_else(|_| Err(gone()))?;
        Ok(Self { path: path.into(), jobs })
    }

    /// Hands a job to the thread and waits for its answer, both within [`BOUND`].
    async fn ask<T>(&self, job: impl FnOnce(Reply<T>) -> Job) -> Result<T, Error> {
        let deadline = Instant::now() + BOUND;
        let (reply, answer) = oneshot::channel();
        match timeout_at(deadline, self.jobs.send(job(reply))).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(gone()),
            Err(_) => return Err(Error::Unavailable("its queue is full".into())),
        }
        match timeout_at(deadline, answer).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(gone())),
            Err(_) => Err(Error::Unavailable("no answer in time; a change may have been applied".into())),
        }
    }
}

impl Store for Sqlite {
    fn update(&self, names: Vec<Name>, change: Change) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async move {
            check_names(&names)?;
            self.ask(|reply| Job::Update { names, change, reply }).await
        })
    }

    fn get(&self, name: Name) -> BoxFuture<'_, Result<Option<Vec<u8>>, Error>> {
        Box::pin(async move {
            check(&name)?;
            self.ask(|reply| Job::Get { name, reply }).await
        })
    }

    fn scan(&self, table: Table, prefix: String) -> BoxFuture<'_, Result<Records, Error>> {
        Box::pin(self.ask(move |reply| Job::Scan { table, prefix, reply }))
    }

    fn usage(&self, table: Table) -> BoxFuture<'_, Result<Usage, Error>> {
        Box::pin(self.ask(move |reply| Job::Usage { table, reply }))
    }

    fn waiting(&self) -> usize {
        QUEUE - self.jobs.capacity()
    }

    fn ping(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.ask(|reply| Job::Ping { reply }))
    }
}

impl fmt::Debug for Sqlite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqlite").field("path", &self.path).finish_non_exhaustive()
    }
}

/// From the question to the answer, the wait in the queue included.
const BOUND: Duration = Duration::from_secs(1);
/// Jobs that wait for the thread.
const QUEUE: usize = 1024;
/// Jobs of one transaction.
const BATCH: usize = 256;
/// How often what has expired is removed, in milliseconds.
const SWEEP: u64 = 1000;

type Reply<T> = oneshot::Sender<Result<T, Error>>;

enum Job {
    Update { names: Vec<Name>, change: Change, reply: Reply<()> },
    Get { name: Name, reply: Reply<Option<Vec<u8>>> },
    Scan { table: Table, prefix: String, reply: Reply<Records> },
    Usage { table: Table, reply: Reply<Usage> },
    Ping { reply: Reply<()> },
}

impl Job {
    /// Whether nobody waits for it any more: then it is not begun.
    fn is_abandoned(&self) -> bool {
        match self {
            Self::Update { reply, .. } | Self::Ping { reply } => reply.is_closed(),
            Self::Get { reply, .. } => reply.is_closed(),
            Self::Scan { reply, .. } => reply.is_closed(),
            Self::Usage { reply, .. } => reply.is_closed(),
        }
    }

    /// Tells whoever waits why it was not done.
    fn fail(self, error: Error) {
        match self {
            Self::Update { reply, .. } | Self::Ping { reply } => drop(reply.send(Err(error))),
            Self::Get { reply, .. } => drop(reply.send(Err(error))),
            Self::Scan { reply, .. } => drop(reply.send(Err(error))),
            Self::Usage { reply, .. } => drop(reply.send(Err(error))),
        }
    }
}

/// An answer that waits for how the transaction ends; a failure of that is everyone's.
type Answer = Box<dyn FnOnce(Result<(), Error>)>;

fn answer<T: 'static>(reply: Reply<T>, outcome: Result<T, Error>) -> Answer {
    // Who does not wait any more needs no answer.
    Box::new(move |committed| drop(reply.send(committed.and(outcome))))
}

fn gone() -> Error {
    Error::Unavailable("its thread has ended; a change may have been applied".into())
}

/// What the thread owns.
struct Owner {
    path: PathBuf,
    file: Option<File>,
    /// Whether the last transaction that should have written did not.
    failing: bool,
    swept: u64,
    bounds: Bounds,
    clock: Clock,
}

impl Owner {
    fn run(mut self, mut queue: mpsc::Receiver<Job>, opened: Reply<()>) {
        let outcome = file::create_folder(&self.path).and_then(|()| File::open(&self.path));
        let failed = outcome.is_err();
        drop(opened.send(outcome.map(|file| self.file = Some(file))));
        if failed {
            return;
        }
        let mut batch = Vec::new();
        while queue.blocking_recv_many(&mut batch, BATCH) > 0 {
            batch.retain(|job| !job.is_abandoned());
            if !batch.is_empty() {
                self.batch(&mut batch);
            }
        }
    }

    /// Does all jobs in one transaction, or fails them all for one reason.
    fn batch(&mut self, batch: &mut Vec<Job>) {
        let writes = batch.iter().any(|job| match job {
            Job::Update { .. } => true,
            Job::Ping { .. } => self.failing,
            Job::Get { .. } | Job::Scan { .. } | Job::Usage { .. } => false,
        });
        let mut answers = Vec::with_capacity(batch.len());
        let outcome = self.transaction(writes, batch, &mut answers);
        if let Err(failure) = &outcome {
            if !failure.is_busy {
                self.file = None;
            }
            if !self.failing {
                tracing::warn!(error = %failure.error, "the state file can't be used");
            }
        } else if writes && self.failing {
            tracing::info!("the state file can be used again");
        }
        self.failing = outcome.is_err() || (self.failing && !writes);
        let outcome = outcome.map_err(|failure| failure.error);
        for answer in answers {
            answer(outcome.clone());
        }
        if let Err(error) = outcome {
            batch.drain(..).for_each(|job| job.fail(error.clone()));
        }
        batch.clear();
    }

    fn transaction(
        &mut self,
        writes: bool,
        batch: &mut Vec<Job>,
        answers: &mut Vec<Answer>,
    ) -> Result<(), Failure> {
        if let Some(file) = self.file.take_if(|file| !file.is_at(&self.path)) {
            tracing::warn!("the state file is another one now");
            drop(file);
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(File::open(&self.path).map_err(Failure::from)?),
        };
        let now = millis(&self.clock);
        let mut tables = Tables::begin(file.connection(), writes)?;
        if writes && now.abs_diff(self.swept) >= SWEEP {
            self.swept = now;
            Table::ALL.into_iter().try_for_each(|table| tables.sweep(table, now))?;
        }
        for job in batch.drain(..) {
            let (failed, answer) = perform(job, &mut tables, self.failing, &self.bounds, &self.clock);
            answers.push(answer);
            failed?;
        }
        tables.commit()
    }
}

/// Does one job. A failure that is the file's own comes first and ends the transaction.
fn perform(
    job: Job,
    tables: &mut Tables<'_>,
    failing: bool,
    bounds: &Bounds,
    clock: &Clock,
) -> (Result<(), Failure>, Answer) {
    let now = millis(clock);
    match job {
        Job::Update { names, mut change, reply } => {
            split(reply, update(tables, &names, &mut change, now, bounds))
        }
        Job::Get { name, reply } => {
            let found = tables.find(name.table, &name.key);
            split(reply, found.map(|row| Ok(row.filter(|row| row.is_live(now)).map(|row| row.value))))
        }
        Job::Scan { table, prefix, reply } => split(reply, tables.scan(table, &prefix, now).map(Ok)),
        Job::Usage { table, reply } => split(reply, tables.usage(table, now).map(Ok)),
        Job::Ping { reply } => split(reply, if failing { tables.touch() } else { Ok(()) }.map(Ok)),
    }
}

fn split<T: 'static>(
    reply: Reply<T>,
    outcome: Result<Result<T, Error>, Failure>,
) -> (Result<(), Failure>, Answer) {
    match outcome {
        Ok(outcome) => (Ok(()), answer(reply, outcome)),
        Err(failure) => {
            let told = answer(reply, Err(failure.error.clone()));
            (Err(failure), told)
        }
    }
}

/// One update: the outer failure is the file's, the inner one the change's own.
fn update(
    tables: &mut Tables<'_>,
    names: &[Name],
    change: &mut Change,
    now: u64,
    bounds: &Bounds,
) -> Result<Result<(), Error>, Failure> {
    for table in Table::ALL {
        let asked = names.iter().filter(|name| name.table == table).count();
        let wanted = tables.records(table).saturating_add(u64::try_from(asked).unwrap_or(u64::MAX));
        if asked > 0 && bounds.records(table).is_some_and(|most| wanted > most) {
            tables.sweep(table, now)?;
        }
    }
    let rows: Vec<_> =
        names.iter().map(|name| tables.find(name.table, &name.key)).collect::<Result<_, _>>()?;
    let records: Vec<_> = rows
        .iter()
        .map(|row| row.as_ref().filter(|row| row.is_live(now)).map(|row| row.value.as_slice()))
        .collect();
    let held: Counts = Table::ALL.map(|table| tables.records(table));
    let writes = match change::run(change, names, &records, now, &held, bounds) {
        Ok(writes) => writes,
        Err(error) => return Ok(Err(error)),
    };
    for ((name, row), write) in names.iter().zip(&rows).zip(writes) {
        match (write, row) {
            (Write::Keep, _) | (Write::Delete, None) => {}
            (Write::Delete, Some(row)) => tables.delete(name.table, row.id, row.size(&name.key))?,
            (Write::Put { value, expires }, row) => {
                tables.put(name, row.as_ref(), &value, expires)?;
            }
        }
    }
    tables.evict(bounds.result_bytes())?;
    Ok(Ok(()))
}

/// A failure of the file, and whether it is only that another process holds it.
#[derive(Debug)]
struct Failure {
    error: Error,
    is_busy: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, is_busy: false }
    }
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Self {
        let (code, extended) = match &error {
            rusqlite::Error::SqliteFailure(error, _) => (error.code, error.extended_code),
            // What is there has not the form that it was written in.
            _ => return Error::Corrupt("the file holds what was not written by the sidecar".into()).into(),
        };
        // SQLite's own text may quote what is stored; the code's does not.
        let text = rusqlite::ffi::code_to_str(extended);
        match code {
            ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked => Self {
                error: Error::Unavailable("another process holds the file for too long".into()),
                is_busy: true,
            },
            ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase => Error::Corrupt(text.into()).into(),
            _ => Error::Unavailable(text.into()).into(),
        }
    }
}

#[cfg(test)]
mod tests;
