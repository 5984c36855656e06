//! The tables as SQL, within one transaction, with what each holds kept beside them.

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};

use super::{Failure, Name, Table, Usage};
use crate::store::{Error, Records};

/// Expired records that one sweep removes from a table at most.
const SWEEP: i64 = 256;

/// Expired records that are looked at for one number.
const LOOKED_AT: i64 = 10_000;

/// One transaction; rolled back unless it is committed.
pub(super) struct Tables<'a> {
    transaction: Transaction<'a>,
    held: [Usage; Table::ALL.len()],
    stored: [Usage; Table::ALL.len()],
}

/// One record.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) id: i64,
    pub(super) value: Vec<u8>,
    expires: Option<i64>,
}

impl Row {
    /// Whether it has not expired.
    pub(super) fn is_live(&self, now: u64) -> bool {
        self.expires.is_none_or(|expires| expires > time(now))
    }

    /// What it counts for.
    pub(super) fn size(&self, key: &str) -> u64 {
        size(key, &self.value)
    }
}

fn size(key: &str, value: &[u8]) -> u64 {
    u64::try_from(key.len() + value.len()).unwrap_or(u64::MAX)
}

/// SQLite's integers are signed.
fn time(millis: u64) -> i64 {
    i64::try_from(millis).unwrap_or(i64::MAX)
}

impl<'a> Tables<'a> {
    /// Begins; with `writes` no other process writes until the end.
    pub(super) fn begin(connection: &'a mut Connection, writes: bool) -> Result<Self, Failure> {
        let behaviour = if writes { TransactionBehavior::Immediate } else { TransactionBehavior::Deferred };
        let transaction = connection.transaction_with_behavior(behaviour)?;
        let mut held = [Usage::default(); Table::ALL.len()];
        {
            let mut statement = transaction.prepare_cached("SELECT name, records, bytes FROM usage")?;
            let mut rows = statement.query([])?;
            while let Some(row) = rows.next()? {
                let name = row.get_ref(0)?.as_str().map_err(rusqlite::Error::from)?;
                let table = Table::ALL.into_iter().find(|table| table.name() == name);
                let held = table.and_then(|table| held.get_mut(table.index()));
                let Some(held) = held else { continue };
                *held = Usage { records: row.get(1)?, bytes: row.get(2)? };
            }
        }
        Ok(Self { transaction, held, stored: held })
    }

    /// Ends the transaction: from here on what it wrote lasts.
    pub(super) fn commit(self) -> Result<(), Failure> {
        for (table, (held, stored)) in Table::ALL.into_iter().zip(self.held.iter().zip(&self.stored)) {
            if held != stored {
                let mut statement = self
                    .transaction
                    .prepare_cached("UPDATE usage SET records = ?1, bytes = ?2 WHERE name = ?3")?;
                statement.execute(params![held.records, held.bytes, table.name()])?;
            }
        }
        self.transaction.commit().map_err(|error| {
            let failure = Failure::from(error);
            match failure.error {
                Error::Unavailable(text) if !failure.is_busy => {
                    // What has reached the log although its flush failed may be found there again.
                    Error::Unavailable(format!("{text}; a change may have been applied")).into()
                }
                error => Failure { error, is_busy: failure.is_busy },
            }
        })
    }

    /// Records in a table, expired ones that were not swept included.
    pub(super) fn records(&self, table: Table) -> u64 {
        self.held[table.index()].records
    }

    /// The record, expired or not.
    pub(super) fn find(&self, table: Table, key: &str) -> Result<Option<Row>, Failure> {
        let sql = format!("SELECT id, value, expires FROM {} WHERE key = ?1", table.name());
        let mut statement = self.transaction.prepare_cached(&sql)?;
        let row = statement
            .query_row([key], |row| Ok(Row { id: row.get(0)?, value: row.get(1)?, expires: row.get(2)? }));
        Ok(row.optional()?)
    }

    /// Writes a record; `row` is what is there under its name.
    pub(super) fn put(
        &mut self,
        name: &Name,
        row: Option<&Row>,
        value: &[u8],
        expires: Option<u64>,
    ) -> Result<(), Failure> {
        let (table, key) = (name.table, &name.key);
        let expires = expires.map(time);
        match row {
            // A result written anew is the newest: its id says so.
            Some(row) if table == Table::Results => self.delete(table, row.id, row.size(key))?,
            Some(row) => {
                let sql = format!("UPDATE {} SET value = ?1, expires = ?2 WHERE id = ?3", table.name());
                self.transaction.prepare_cached(&sql)?.execute(params![value, expires, row.id])?;
                let held = &mut self.held[table.index()];
                held.bytes = held.bytes.saturating_sub(row.size(key)) + size(key, value);
                return Ok(());
            }
            None => {}
        }
        let sql = format!("INSERT INTO {} (key, value, expires) VALUES (?1, ?2, ?3)", table.name());
        self.transaction.prepare_cached(&sql)?.execute(params![key, value, expires])?;
        let held = &mut self.held[table.index()];
        held.records += 1;
        held.bytes += size(key, value);
        Ok(())
    }

    /// Removes a record of `size` bytes.
    pub(super) fn delete(&mut self, table: Table, id: i64, size: u64) -> Result<(), Failure> {
        let sql = format!("DELETE FROM {} WHERE id = ?1", table.name());
        self.transaction.prepare_cached(&sql)?.execute([id])?;
        let held = &mut self.held[table.index()];
        held.records = held.records.saturating_sub(1);
        held.bytes = held.bytes.saturating_sub(size);
        Ok(())
    }

    /// Removes some of what has expired.
    pub(super) fn sweep(&mut self, table: Table, now: u64) -> Result<(), Failure> {
        let sql = format!(
            "SELECT id, octet_length(key) + octet_length(value) FROM {}
             WHERE expires <= ?1 ORDER BY expires LIMIT {SWEEP}",
            table.name()
        );
        for (id, size) in self.sizes(&sql, Some(time(now)))? {
            self.delete(table, id, size)?;
        }
        Ok(())
    }

    /// Removes the oldest results until no more than `most` bytes are left.
    pub(super) fn evict(&mut self, most: u64) -> Result<(), Failure> {
        const OLDEST: &str =
            "SELECT id, octet_length(key) + octet_length(value) FROM results ORDER BY id LIMIT 16";
        while self.held[Table::Results.index()].bytes > most {
            let oldest = self.sizes(OLDEST, None)?;
            if oldest.is_empty() {
                break;
            }
            for (id, size) in oldest {
                if self.held[Table::Results.index()].bytes > most {
                    self.delete(Table::Results, id, size)?;
                }
            }
        }
        Ok(())
    }

    fn sizes(&self, sql: &str, parameter: Option<i64>) -> Result<Vec<(i64, u64)>, Failure> {
        let mut statement = self.transaction.prepare_cached(sql)?;
        let rows = statement
            .query_map(rusqlite::params_from_iter(parameter), |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Live records whose key begins with `prefix`.
    pub(super) fn scan(&self, table: Table, prefix: &str, now: u64) -> Result<Records, Failure> {
        let sql = format!(
            "SELECT key, value FROM {} WHERE key >= ?1 AND (expires IS NULL OR expires > ?2) ORDER BY key",
            table.name()
        );
        let mut statement = self.transaction.prepare_cached(&sql)?;
        let mut rows = statement.query(params![prefix, time(now)])?;
        let mut found = Vec::new();
        while let Some(row) = rows.next()? {
            let key: String = row.get(0)?;
            if !key.starts_with(prefix) {
                break;
            }
            found.push((key, row.get(1)?));
        }
        Ok(found)
    }

    /// What a table holds, without what has expired; of very much that has, the rest counts until it is swept: whoever
    /// asks for a number must not hold up every call.
    pub(super) fn usage(&self, table: Table, now: u64) -> Result<Usage, Failure> {
        let sql = format!(
            "SELECT count(*), coalesce(sum(size), 0) FROM
             (SELECT octet_length(key) + octet_length(value) AS size FROM {} WHERE expires <= ?1 LIMIT {LOOKED_AT})",
            table.name()
        );
        let mut statement = self.transaction.prepare_cached(&sql)?;
        let (records, bytes): (u64, u64) =
            statement.query_row([time(now)], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let held = self.held[table.index()];
        Ok(Usage { records: held.records.saturating_sub(records), bytes: held.bytes.saturating_sub(bytes) })
    }

    /// Writes something, so that a commit tells whether writing is possible.
    pub(super) fn touch(&self) -> Result<(), Failure> {
        self.transaction.prepare_cached("UPDATE usage SET records = records")?.execute([])?;
        Ok(())
    }
}
