//! The file of the store: made, opened, given its schema, and told from another one.

use std::{
    fs::{DirBuilder, OpenOptions},
    io::{self, ErrorKind},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::Path,
    thread,
    time::Duration,
};

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::{Failure, Table};
use crate::store::Error;

/// The newest schema that is known here, as `user_version` says it.
const SCHEMA: i64 = 1;
/// "mcps", as `application_id`: tells the file from another program's.
const APPLICATION: i64 = 0x6d63_7073;

/// An open file.
#[derive(Debug)]
pub(super) struct File {
    connection: Connection,
    /// Device and inode.
    identity: (u64, u64),
}

impl File {
    /// Opens the file, or creates an empty one in its folder.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let away = |error: &io::Error| Error::Unavailable(format!("{}: {error}", path.display()));
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(away(&error)),
        }
        let identity = identity(path).map_err(|error| away(&error))?;
        let connection = prepare(path).map_err(|failure| failure.error)?;
        Ok(Self { connection, identity })
    }

    pub(super) fn connection(&mut self) -> &mut Connection {
        &mut self.connection
    }

    /// Whether `path` leads to it.
    pub(super) fn is_at(&self, path: &Path) -> bool {
        identity(path).is_ok_and(|identity| identity == self.identity)
    }
}

/// Makes the folder of the file, for its owner alone.
pub(super) fn create_folder(path: &Path) -> Result<(), Error> {
    let Some(folder) = path.parent() else { return Ok(()) };
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| Error::Unavailable(format!("{}: {error}", folder.display())))
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|file| (file.dev(), file.ino()))
}

fn prepare(path: &Path) -> Result<Connection, Failure> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags)?;
    connection.busy_handler(Some(wait))?;
    connection.set_prepared_statement_cache_capacity(64);
    // Before anything is changed in a file that may be someone else's. In one transaction: another process may be about
    // to commit the schema.
    let is_new = is_new(&*connection.unchecked_transaction()?)?;
    enter_wal(&connection)?;
    // Over a power loss too; the WAL is kept within 64 MiB, the page cache within 8 MiB.
    connection.execute_batch(
        "PRAGMA synchronous = FULL; PRAGMA journal_size_limit = 67108864; PRAGMA cache_size = -8192;",
    )?;
    if is_new {
        create(&mut connection)?;
    }
    Ok(connection)
}

/// Waits for another process' lock, for about 0.8 s in all. Short waits: between two transactions of a busy process
/// the lock is free for microseconds only, and SQLite's own pace (up to 100 ms) would miss it for ever.
fn wait(tries: i32) -> bool {
    let pause = if tries < 400 { 500 } else { 1000 };
    if tries < 900 {
        thread::sleep(Duration::from_micros(pause + fastrand::u64(..200)));
    }
    tries < 900
}

/// Two processes that open a new file at once are in each other's way here, where SQLite does not wait.
fn enter_wal(connection: &Connection) -> Result<(), Failure> {
    let mut tries = 0;
    loop {
        let entered = connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get::<_, String>(0));
        match entered.map_err(Failure::from) {
            Ok(mode) if mode == "wal" => return Ok(()),
            Ok(_) => return Err(Error::Unavailable("the file system has no shared memory".into()).into()),
            Err(failure) if failure.is_busy && tries < 100 => {
                tries += 1;
                thread::sleep(Duration::from_millis(5));
            }
            Err(failure) => return Err(failure),
        }
    }
}

/// Whether the file holds nothing yet.
///
/// # Errors
///
/// It holds something that this version can't work with.
fn is_new(connection: &Connection) -> Result<bool, Failure> {
    let number = |sql: &str| connection.query_row(sql, [], |row| row.get::<_, i64>(0));
    let ours = number("PRAGMA application_id")? == APPLICATION;
    match number("PRAGMA user_version")? {
        0 if !ours && number("SELECT count(*) FROM sqlite_schema")? == 0 => Ok(true),
        _ if !ours => Err(Error::Corrupt("the file is another program's database".into()).into()),
        SCHEMA => Ok(false),
        found if found > SCHEMA => Err(Error::Newer { found, known: SCHEMA }.into()),
        _ => Err(Error::Corrupt("the file has no schema of any version".into()).into()),
    }
}

/// Makes the schema of this version, unless another process just did. A later version's steps from older schemas
/// belong here, each one transaction.
fn create(connection: &mut Connection) -> Result<(), Failure> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if !is_new(&transaction)? {
        return Ok(());
    }
    transaction.execute_batch(
        "CREATE TABLE usage (
            name TEXT PRIMARY KEY, records INTEGER NOT NULL, bytes INTEGER NOT NULL
         ) STRICT, WITHOUT ROWID;",
    )?;
    for name in Table::ALL.map(Table::name) {
        transaction.execute_batch(&format!(
            "CREATE TABLE {name} (
                id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value BLOB NOT NULL, expires INTEGER
             ) STRICT;
             CREATE INDEX {name}_by_expiry ON {name} (expires) WHERE expires IS NOT NULL;
             INSERT INTO usage VALUES ('{name}', 0, 0);"
        ))?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION)?;
    transaction.pragma_update(None, "user_version", SCHEMA)?;
    Ok(transaction.commit()?)
}
