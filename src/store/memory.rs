//! The store that ends with the process: one lock, and per table a slab of records behind a hash index.
//!
//! Made for a million small records: a record is one allocation (key and value together) and some 80 bytes around it.
//! Each table keeps its records by expiry, so what has expired is known and goes at the next touch, without a sweep
//! over what has not.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{Mutex, MutexGuard, PoisonError},
};

use hashbrown::HashTable;

use super::{
    Bounds, BoxFuture, Change, Error, Name, Records, Store, Table, Usage, Write,
    change::{self, Counts},
    check, check_names, millis,
};
use crate::clock::Clock;

/// The store of one process.
pub struct Memory {
    clock: Clock,
    bounds: Bounds,
    shelves: Mutex<[Shelf; Table::ALL.len()]>,
}

impl Memory {
    /// An empty one.
    pub fn new(bounds: Bounds, clock: Clock) -> Self {
        Self { clock, bounds, shelves: Mutex::new(Table::ALL.map(Shelf::of)) }
    }

    /// The tables without what has expired by now.
    fn at(&self, now: u64) -> MutexGuard<'_, [Shelf; Table::ALL.len()]> {
        // Writes are applied after all that could panic, so a poisoned lock guards whole tables.
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        shelves.iter_mut().for_each(|shelf| shelf.expire(now));
        shelves
    }

    fn change(&self, names: &[Name], mut change: Change) -> Result<(), Error> {
        check_names(names)?;
        let now = millis(&self.clock);
        let mut shelves = self.at(now);
        let records: Vec<_> = names
            .iter()
            .map(|name| shelves[name.table.index()].find(&name.key, now).map(Record::value))
            .collect();
        let held: Counts = shelves.each_ref().map(Shelf::records);
        let writes = change::run(&mut change, names, &records, now, &held, &self.bounds)?;
        for (name, write) in names.iter().zip(writes) {
            let shelf = &mut shelves[name.table.index()];
            match write {
                Write::Keep => {}
                Write::Delete => shelf.remove(&name.key),
                Write::Put { value, expires } => shelf.put(&name.key, &value, expires.unwrap_or(NEVER)),
            }
        }
        shelves[Table::Results.index()].evict(self.bounds.result_bytes());
        Ok(())
    }
}

impl Store for Memory {
    fn update(&self, names: Vec<Name>, change: Change) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async move { self.change(&names, change) })
    }

    fn get(&self, name: Name) -> BoxFuture<'_, Result<Option<Vec<u8>>, Error>> {
        Box::pin(async move {
            check(&name)?;
            let now = millis(&self.clock);
            let shelves = self.at(now);
            Ok(shelves[name.table.index()].find(&name.key, now).map(|record| record.value().to_vec()))
        })
    }

    fn scan(&self, table: Table, prefix: String) -> BoxFuture<'_, Result<Records, Error>> {
        Box::pin(async move {
            let now = millis(&self.clock);
            Ok(self.at(now)[table.index()].scan(&prefix, now))
        })
    }

    fn usage(&self, table: Table) -> BoxFuture<'_, Result<Usage, Error>> {
        Box::pin(async move {
            let shelves = self.at(millis(&self.clock));
            let shelf = &shelves[table.index()];
            Ok(Usage { records: shelf.records(), bytes: shelf.bytes })
        })
    }

    fn ping(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("bounds", &self.bounds).finish_non_exhaustive()
    }
}

/// No expiry.
const NEVER: u64 = u64::MAX;
/// Expired records that one touch removes from a table at most, so that none waits long for the lock.
const SWEEP: usize = 1024;

/// One record, or a free place.
struct Record {
    /// Key and value in one allocation.
    bytes: Box<[u8]>,
    key_len: u32,
    /// [`NEVER`]: none.
    expires: u64,
    /// The time under which the shelf's `by_expiry` holds it; [`NEVER`]: it does not.
    queued: u64,
    /// Its place in the order of writes.
    age: u64,
}

impl Record {
    const fn free(bytes: Box<[u8]>) -> Self {
        Self { bytes, key_len: 0, expires: NEVER, queued: NEVER, age: 0 }
    }

    fn key(&self) -> &[u8] {
        &self.bytes[..self.key_len as usize]
    }

    fn value(&self) -> &[u8] {
        &self.bytes[self.key_len as usize..]
    }

    fn size(&self) -> u64 {
        u64::try_from(self.bytes.len()).unwrap_or(u64::MAX)
    }
}

/// One table.
#[derive(Default)]
struct Shelf {
    hasher: RandomState,
    /// Places in `slots`, by the hash of the key.
    index: HashTable<u32>,
    slots: Vec<Record>,
    free: Vec<u32>,
    /// Soonest first. A record with an expiry is in it once: under that, or under an earlier one that it had, and
    /// then again when that passes. Entries that no `queued` matches are left-overs.
    by_expiry: BinaryHeap<Reverse<(u64, u32)>>,
    /// Oldest first; `None` where nothing is ever evicted.
    by_age: Option<BTreeMap<u64, u32>>,
    writes: u64,
    bytes: u64,
}

impl Shelf {
    fn of(table: Table) -> Self {
        Self { by_age: (table == Table::Results).then(BTreeMap::new), ..Self::default() }
    }

    fn records(&self) -> u64 {
        u64::try_from(self.index.len()).unwrap_or(u64::MAX)
    }

    fn place(&self, key: &[u8]) -> Option<u32> {
        let hash = self.hasher.hash_one(key);
        self.index.find(hash, |slot| self.slots[*slot as usize].key() == key).copied()
    }

    fn find(&self, key: &str, now: u64) -> Option<&Record> {
        let record = &self.slots[self.place(key.as_bytes())? as usize];
        (record.expires > now).then_some(record)
    }

    fn scan(&self, prefix: &str, now: u64) -> Records {
        let records = self.index.iter().map(|slot| &self.slots[*slot as usize]);
        let mut found: Vec<_> = records
            .filter(|record| record.expires > now && record.key().starts_with(prefix.as_bytes()))
            .map(|record| (String::from_utf8_lossy(record.key()).into_owned(), record.value().to_vec()))
            .collect();
        found.sort_unstable();
        found
    }

    fn put(&mut self, key: &str, value: &[u8], expires: u64) {
        let slot = self.place(key.as_bytes()).unwrap_or_else(|| self.add(key.as_bytes()));
        self.writes += 1;
        let record = &mut self.slots[slot as usize];
        if let Some(by_age) = &mut self.by_age {
            by_age.remove(&record.age);
            by_age.insert(self.writes, slot);
        }
        self.bytes -= record.size();
        record.bytes = [key.as_bytes(), value].concat().into_boxed_slice();
        self.bytes += record.size();
        record.expires = expires;
        record.age = self.writes;
        if expires < record.queued {
            record.queued = expires;
            self.by_expiry.push(Reverse((expires, slot)));
            self.drop_leftovers();
        }
    }

    /// A place for a new record, without a value yet.
    fn add(&mut self, key: &[u8]) -> u32 {
        let mut record = Record::free(key.into());
        // Keys are far below 4 GiB, and so is the number of records that fit into memory.
        record.key_len = u32::try_from(key.len()).unwrap_or(u32::MAX);
        self.bytes += record.size();
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Record::free(Box::default()));
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        self.slots[slot as usize] = record;
        let (hasher, slots) = (&self.hasher, &self.slots);
        let hash = |slot: &u32| hasher.hash_one(slots[*slot as usize].key());
        self.index.insert_unique(hasher.hash_one(key), slot, hash);
        slot
    }

    fn remove(&mut self, key: &str) {
        if let Some(slot) = self.place(key.as_bytes()) {
            self.take(slot);
        }
    }

    fn take(&mut self, slot: u32) {
        let record = std::mem::replace(&mut self.slots[slot as usize], Record::free(Box::default()));
        if let Ok(entry) = self.index.find_entry(self.hasher.hash_one(record.key()), |is| *is == slot) {
            entry.remove();
        }
        if let Some(by_age) = &mut self.by_age {
            by_age.remove(&record.age);
        }
        self.bytes -= record.size();
        self.free.push(slot);
    }

    fn expire(&mut self, now: u64) {
        for _ in 0..SWEEP {
            let Some(Reverse((at, slot))) =
                self.by_expiry.peek().copied().filter(|Reverse((at, _))| *at <= now)
            else {
                return;
            };
            self.by_expiry.pop();
            let record = &mut self.slots[slot as usize];
            if record.queued != at {
                continue;
            }
            if record.expires <= now {
                self.take(slot);
            } else {
                record.queued = record.expires;
                if record.expires != NEVER {
                    self.by_expiry.push(Reverse((record.expires, slot)));
                }
            }
        }
    }

    /// Left-overs are at most as many as records.
    fn drop_leftovers(&mut self) {
        if self.by_expiry.len() > 2 * self.index.len() + SWEEP {
            let slots = &self.slots;
            self.by_expiry.retain(|Reverse((at, slot))| slots[*slot as usize].queued == *at);
        }
    }

    fn evict(&mut self, most: u64) {
        while self.bytes > most {
            let Some((_, slot)) = self.by_age.as_ref().and_then(|by_age| by_age.first_key_value()) else {
                return;
            };
            self.take(*slot);
        }
    }
}

#[cfg(test)]
mod tests;
