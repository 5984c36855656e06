//! Counted places: so many requests in flight, so many streams, so many bytes held.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// A counter that several holders share. The limit is given at each use, so that a reload takes effect at once.
#[derive(Clone, Debug, Default)]
pub struct Places(Arc<AtomicUsize>);

impl Places {
    /// One place under `limit`, or none.
    pub fn take(&self, limit: usize) -> Option<Permit> {
        self.take_many(1, limit)
    }

    /// `count` places under `limit`, or none.
    pub fn take_many(&self, count: usize, limit: usize) -> Option<Permit> {
        let fits = |used: usize| used.checked_add(count).filter(|sum| *sum <= limit);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).ok()?;
        Some(Permit { places: self.clone(), count })
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

/// Places that are given back when this is dropped.
#[derive(Debug)]
pub struct Permit {
    places: Places,
    count: usize,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.places.0.fetch_sub(self.count, Ordering::AcqRel);
    }
}

/// Bytes that one stream holds, counted together with those of all others.
#[derive(Debug)]
pub struct Held {
    total: Places,
    limit: usize,
    mine: usize,
}

impl Held {
    /// Nothing held yet; `limit` bounds the sum over all that share `total`.
    pub fn new(total: Places, limit: usize) -> Self {
        Self { total, limit, mine: 0 }
    }

    /// Now `bytes` are held.
    pub fn set(&mut self, bytes: usize) {
        if bytes >= self.mine {
            self.total.0.fetch_add(bytes - self.mine, Ordering::AcqRel);
        } else {
            self.total.0.fetch_sub(self.mine - bytes, Ordering::AcqRel);
        }
        self.mine = bytes;
    }

    /// Whether more may be held. Who holds nothing may always take one thing, or nobody would ever go on.
    pub fn has_room(&self, holds_nothing: bool) -> bool {
        holds_nothing || self.total.taken() < self.limit
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.set(0);
    }
}
