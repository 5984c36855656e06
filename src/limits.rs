//! Counted places: so many requests in flight, so many streams, so many bytes held.

use std::{
    cmp,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// A counter that several holders share. The limit is given at each use, so that a reload takes effect at once.
#[derive(Clone, Debug, Default)]
pub struct Places(Arc<Counter>);

#[derive(Debug)]
struct Counter {
    taken: AtomicUsize,
    /// Some are given back.
    freed: Notify,
    /// The one holder that may go beyond the limit.
    beyond: Arc<Semaphore>,
}

impl Default for Counter {
    fn default() -> Self {
        Self { taken: AtomicUsize::new(0), freed: Notify::new(), beyond: Arc::new(Semaphore::new(1)) }
    }
}

impl Places {
    /// One place under `limit`, or none.
    pub fn take(&self, limit: usize) -> Option<Permit> {
        self.take_many(1, limit)
    }

    /// `count` places under `limit`, or none.
    pub fn take_many(&self, count: usize, limit: usize) -> Option<Permit> {
        let fits = |used: usize| used.checked_add(count).filter(|sum| *sum <= limit);
        self.0.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).ok()?;
        Some(Permit { places: self.clone(), count })
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        self.0.taken.load(Ordering::Acquire)
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
        self.places.0.taken.fetch_sub(self.count, Ordering::AcqRel);
    }
}

/// Bytes that one stream or body holds, counted together with those of all others.
#[derive(Debug)]
pub struct Held {
    total: Places,
    limit: usize,
    mine: usize,
    /// It is this one's turn to go beyond the limit.
    turn: Option<OwnedSemaphorePermit>,
}

impl Held {
    /// Nothing held yet; `limit` bounds the sum over all that share `total`.
    pub fn new(total: Places, limit: usize) -> Self {
        Self { total, limit, mine: 0, turn: None }
    }

    /// Another holder under the same limit, with nothing yet.
    pub fn another(&self) -> Self {
        Self::new(self.total.clone(), self.limit)
    }

    /// Now `bytes` are held.
    pub fn set(&mut self, bytes: usize) {
        let counter = &self.total.0;
        match bytes.cmp(&self.mine) {
            cmp::Ordering::Equal => return,
            cmp::Ordering::Greater => {
                counter.taken.fetch_add(bytes - self.mine, Ordering::AcqRel);
            }
            cmp::Ordering::Less => {
                counter.taken.fetch_sub(self.mine - bytes, Ordering::AcqRel);
                counter.freed.notify_one();
            }
        }
        self.mine = bytes;
    }

    /// Whether more may be held. Who holds nothing may always take one thing, or nobody would ever go on.
    pub fn has_room(&self, holds_nothing: bool) -> bool {
        holds_nothing || self.total.taken() < self.limit
    }

    /// Waits until one thing more may be held. Several that hold half of what they need would wait for each other for
    /// ever: so at the limit one of them at a time, in the order they came, goes on beyond it, by `beyond` at most, until
    /// it is dropped or [`Held::pass_turn`].
    pub async fn room(&mut self, beyond: usize) {
        if self.has_room(self.mine == 0) {
            return;
        }
        let total = self.total.clone();
        let mut turn = pin!(total.0.beyond.clone().acquire_owned());
        loop {
            let mut freed = pin!(total.0.freed.notified());
            freed.as_mut().enable();
            let limit = self.limit.saturating_add(if self.turn.is_some() { beyond } else { 0 });
            if total.taken() < limit {
                // There may be room for the next one too.
                total.0.freed.notify_one();
                return;
            }
            tokio::select! {
                biased;
                // Closed by nobody.
                Ok(permit) = &mut turn, if self.turn.is_none() => self.turn = Some(permit),
                () = freed => {}
            }
        }
    }

    /// Whether it is this one's turn to go beyond the limit.
    pub fn has_turn(&self) -> bool {
        self.turn.is_some()
    }

    /// Lets the next one go beyond the limit: this one has nothing to go on with.
    pub fn pass_turn(&mut self) {
        self.turn = None;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, task::Poll};

    use super::*;

    async fn is_pending(work: impl Future) -> bool {
        let mut work = pin!(work);
        poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx).is_pending())).await
    }

    #[tokio::test]
    async fn of_several_that_hold_half_one_goes_on_and_the_others_follow() {
        let total = Places::default();
        let held = |bytes| {
            let mut held = Held::new(total.clone(), 10);
            held.set(bytes);
            held
        };
        let (mut first, mut second) = (held(5), held(5));
        first.room(4).await;
        assert!(first.has_turn());
        assert!(is_pending(second.room(4)).await);
        first.set(9);
        assert!(is_pending(first.room(4)).await, "no more than so much beyond");
        assert!(held(0).has_room(true));
        drop(first);
        second.room(4).await;
        assert!(!second.has_turn(), "there is room again");
    }

    #[tokio::test]
    async fn who_has_nothing_to_go_on_with_passes_its_turn() {
        let total = Places::default();
        let (mut first, mut second) = (Held::new(total.clone(), 10), Held::new(total.clone(), 10));
        first.set(5);
        second.set(5);
        first.room(4).await;
        {
            let mut waits = pin!(second.room(4));
            assert!(is_pending(waits.as_mut()).await);
            first.pass_turn();
            waits.await;
        }
        assert!(second.has_turn());
    }

    #[tokio::test]
    async fn room_that_comes_is_told_to_all_who_wait_for_it() {
        let total = Places::default();
        let mut large = Held::new(total.clone(), 10);
        large.set(20);
        let mut waiting: Vec<_> = (0..3).map(|_| Held::new(total.clone(), 10)).collect();
        waiting.iter_mut().for_each(|held| held.set(1));
        let rooms: Vec<_> =
            waiting.into_iter().map(|mut held| tokio::spawn(async move { held.room(1).await })).collect();
        tokio::task::yield_now().await;
        large.set(0);
        for room in rooms {
            room.await.expect("it ends");
        }
    }
}
