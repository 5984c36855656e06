//! The demo upstream's own ledger: what it did, and under which idempotency key, in a SQLite file.
//!
//! A key is bound to an operation's name and its arguments. The check of the key, the effect, the execution counter and
//! the stored result are one `BEGIN IMMEDIATE` transaction: two connections that race with one key commit once, and a
//! crash leaves either all of it or nothing. Results are stored as JSON text and read back from it, so nobody ever holds
//! the ledger's own copy.
//!
//! What a charge or a reservation *is* here are rows of the same file. That is what makes it atomic; an effect in another
//! service is not, unless that service takes the same key.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use rusqlite::{Connection, OpenFlags, OptionalExtension, Transaction, TransactionBehavior};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// What there is of each SKU when the file is made.
const STOCK: [(&str, u64); 3] = [("widget", 100), ("gadget", 10), ("gizmo", 1)];
/// How long to wait for another connection's transaction.
const BUSY: Duration = Duration::from_secs(10);

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS records (
        key TEXT PRIMARY KEY, operation TEXT NOT NULL, fingerprint TEXT NOT NULL, result TEXT NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS executions (operation TEXT PRIMARY KEY, count INTEGER NOT NULL) STRICT;
    CREATE TABLE IF NOT EXISTS charges (
        number INTEGER PRIMARY KEY AUTOINCREMENT, order_id TEXT NOT NULL, amount INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS stock (sku TEXT PRIMARY KEY, amount INTEGER NOT NULL) STRICT;
    CREATE TABLE IF NOT EXISTS reservations (
        number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, sku TEXT NOT NULL, quantity INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS tasks (
        id TEXT PRIMARY KEY, status TEXT NOT NULL, step INTEGER NOT NULL, steps INTEGER NOT NULL,
        step_ms INTEGER NOT NULL, hold INTEGER NOT NULL, cancel INTEGER NOT NULL,
        created INTEGER NOT NULL, updated INTEGER NOT NULL
    ) STRICT;";

/// One connection to a ledger file. Several may be open on one file, also in several processes.
#[derive(Debug)]
pub struct Ledger {
    connection: Mutex<Connection>,
}

/// What is to be done once per key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The operation's name, which the key is bound to as well.
    pub name: &'static str,
    /// What it does.
    pub effect: Effect,
}

/// An effect, and the arguments that its key is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Charges an order.
    Charge {
        /// The order.
        order_id: String,
        /// In the smallest unit of the currency.
        amount: u64,
    },
    /// Takes something out of the stock.
    Reserve {
        /// For whom.
        tenant: String,
        /// Of what.
        sku: String,
        /// How many.
        quantity: u64,
    },
}

/// An operation that is committed, now or before.
#[derive(Clone, Debug, PartialEq)]
pub struct Committed {
    /// The receipt, read from the stored JSON: the caller's own copy.
    pub result: Value,
    /// It was committed before, under this key; nothing was done now.
    pub replayed: bool,
    /// How often this operation has been executed, by whoever uses the file.
    pub executions: u64,
}

/// Why nothing was done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The key stands for an operation of another name or with other arguments.
    #[error("the idempotency key stands for other arguments or another operation; nothing was done")]
    KeyMismatch,
    /// There is no such thing.
    #[error("no such SKU; nothing was done")]
    UnknownSku,
    /// There is not enough of it.
    #[error("not enough in stock; nothing was done")]
    OutOfStock,
    /// Nobody waited for it any more.
    #[error("the server stops")]
    Stopped,
    /// The file did not take it.
    #[error("the ledger failed: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// What the file holds is not what was written.
    #[error("the ledger holds no JSON: {0}")]
    Json(#[from] serde_json::Error),
}

impl Operation {
    /// SHA-256 over the name and every argument, hex. A hash, so that the record holds none of them.
    fn fingerprint(&self) -> String {
        let arguments = match &self.effect {
            Effect::Charge { order_id, amount } => json!([self.name, order_id, amount]),
            Effect::Reserve { tenant, sku, quantity } => json!([self.name, tenant, sku, quantity]),
        };
        format!("{:x}", Sha256::digest(arguments.to_string()))
    }
}

impl Ledger {
    /// Opens the file at `path`, or creates it.
    ///
    /// # Errors
    ///
    /// It is no ledger, or cannot be made.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(BUSY)?;
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        transaction.execute_batch(SCHEMA)?;
        for (sku, amount) in STOCK {
            transaction.execute("INSERT OR IGNORE INTO stock VALUES (?1, ?2)", (sku, amount))?;
        }
        transaction.commit()?;
        Ok(Self { connection: Mutex::new(connection) })
    }

    /// Does `operation` once under `key`, or gives what was done under it before. Without a key it is done each time.
    /// Waits for the disk, and for another connection's transaction.
    ///
    /// # Errors
    ///
    /// Nothing was done.
    pub fn commit(&self, key: Option<&str>, operation: &Operation) -> Result<Committed, Error> {
        self.within(|transaction| {
            let fingerprint = operation.fingerprint();
            if let Some(key) = key {
                let sql = "SELECT fingerprint, result FROM records WHERE key = ?1";
                let found = transaction
                    .query_row(sql, [key], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)));
                if let Some((bound, result)) = found.optional()? {
                    if bound != fingerprint {
                        return Err(Error::KeyMismatch);
                    }
                    let executions = executed(transaction, operation.name)?;
                    return Ok(Committed {
                        result: serde_json::from_str(&result)?,
                        replayed: true,
                        executions,
                    });
                }
            }
            let result = perform(transaction, &operation.effect)?.to_string();
            transaction.execute(
                "INSERT INTO executions VALUES (?1, 1) ON CONFLICT DO UPDATE SET count = count + 1",
                [operation.name],
            )?;
            if let Some(key) = key {
                let row = (key, operation.name, &fingerprint, &result);
                transaction.execute("INSERT INTO records VALUES (?1, ?2, ?3, ?4)", row)?;
            }
            let executions = executed(transaction, operation.name)?;
            Ok(Committed { result: serde_json::from_str(&result)?, replayed: false, executions })
        })
    }

    /// What was committed under `key`: the operation's name and its result. `None`: nothing was.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn reconcile(&self, key: &str) -> Result<Option<(String, Value)>, Error> {
        self.within(|transaction| {
            let sql = "SELECT operation, result FROM records WHERE key = ?1";
            let found = transaction
                .query_row(sql, [key], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)));
            found.optional()?.map(|(name, result)| Ok((name, serde_json::from_str(&result)?))).transpose()
        })
    }

    /// How often each operation was executed.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn executions(&self) -> Result<BTreeMap<String, u64>, Error> {
        self.within(|transaction| {
            let mut counted = transaction.prepare("SELECT operation, count FROM executions")?;
            let rows = counted.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// What there was of each SKU, and how much of it is reserved.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn stock(&self) -> Result<BTreeMap<String, (u64, u64)>, Error> {
        self.within(|transaction| {
            let sql = "SELECT sku, amount, (SELECT coalesce(sum(quantity), 0) FROM reservations r \
                       WHERE r.sku = stock.sku) FROM stock";
            let mut stock = transaction.prepare(sql)?;
            let rows = stock.query_map([], |row| Ok((row.get(0)?, (row.get(1)?, row.get(2)?))))?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Runs `step` in one `BEGIN IMMEDIATE` transaction: all of it, or nothing where it fails.
    pub(super) fn within<T>(
        &self,
        step: impl FnOnce(&Transaction<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        // Dropped without a commit it is rolled back.
        let done = step(&transaction)?;
        transaction.commit()?;
        Ok(done)
    }
}

fn executed(transaction: &Transaction<'_>, name: &str) -> Result<u64, Error> {
    let sql = "SELECT count FROM executions WHERE operation = ?1";
    Ok(transaction.query_row(sql, [name], |row| row.get(0)).optional()?.unwrap_or_default())
}

/// The effect, and its receipt: what the caller needs to name it later, and nothing of how it was paid.
fn perform(transaction: &Transaction<'_>, effect: &Effect) -> Result<Value, Error> {
    match effect {
        Effect::Charge { order_id, amount } => {
            let sql = "INSERT INTO charges (order_id, amount) VALUES (?1, ?2)";
            transaction.execute(sql, (order_id, amount))?;
            Ok(json!({ "receipt": format!("ch-{}", transaction.last_insert_rowid()), "order_id": order_id }))
        }
        Effect::Reserve { tenant, sku, quantity } => {
            let sql = "SELECT amount - (SELECT coalesce(sum(quantity), 0) FROM reservations WHERE sku = ?1) \
                       FROM stock WHERE sku = ?1";
            let left = transaction.query_row(sql, [sku], |row| row.get::<_, u64>(0)).optional()?;
            if left.ok_or(Error::UnknownSku)? < *quantity {
                return Err(Error::OutOfStock);
            }
            let sql = "INSERT INTO reservations (tenant, sku, quantity) VALUES (?1, ?2, ?3)";
            transaction.execute(sql, (tenant, sku, quantity))?;
            let number = format!("rs-{}", transaction.last_insert_rowid());
            Ok(json!({ "reservation": number, "tenant": tenant, "sku": sku, "quantity": quantity }))
        }
    }
}
