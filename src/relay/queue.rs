//! The bounded queue between upstream and node of one stream (contract section 9, rules 1 to 5).
//!
//! Pure: times come as arguments. Holds at most `queue` events and `queue_bytes` bytes (one event that is larger
//! alone still fits an empty queue).

use bytes::Bytes;
use tokio::time::Instant;

use crate::message::Id;

use super::{Settings, sse::Event};

/// What an event is to the queue.
#[derive(Clone, Debug)]
pub enum Class {
    /// Progress that a newer one of the same token replaces.
    Progress {
        /// Its token.
        token: Id,
        /// Its value: only rising ones pass. `None`: not a number, passes and replaces nothing's order.
        progress: Option<f64>,
    },
    /// Everything else: never dropped.
    Kept,
    /// The final response of the stream: as `Kept`, and nothing but `Kept` follows.
    Final,
}

/// What the queue did, for the access log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Progress events taken.
    pub progress_in: u64,
    /// Progress events given out.
    pub progress_out: u64,
    /// Progress events replaced by a newer one (adjacent, or waiting for the rate).
    pub coalesced: u64,
    /// Progress events dropped at capacity, or because their value did not rise.
    pub dropped: u64,
    /// An event was dropped at capacity: the final response says so.
    pub refetch: bool,
}

/// An event that goes out.
#[derive(Debug)]
pub struct Popped {
    /// The event.
    pub event: Event,
    /// It is the final response.
    pub is_final: bool,
    /// It must carry the refetch mark.
    pub refetch: bool,
}

/// The queue of one stream.
#[derive(Debug)]
pub struct Queue {
    settings: Settings,
    counts: Counts,
}

impl Queue {
    /// An empty queue.
    pub fn new(settings: Settings) -> Self {
        Self { settings, counts: Counts::default() }
    }

    /// Takes an event. Call it only when [`Queue::has_room`]; the rules may drop or merge progress.
    pub fn push(&mut self, event: Event, class: Class, now: Instant) {
        let _ = (event, class, now, &self.settings);
        unimplemented!()
    }

    /// Whether another event may be pushed: false only when it is full of events that are never dropped.
    pub fn has_room(&self) -> bool {
        unimplemented!()
    }

    /// The next event that may go out now, in order; `Final` carries the mark that `Counts::refetch` asks for when it is popped by the caller.
    pub fn pop(&mut self, now: Instant) -> Option<Popped> {
        let _ = now;
        unimplemented!()
    }

    /// When [`Queue::pop`] will give something although nothing is pushed; `None` if nothing waits for its rate.
    pub fn next_release(&self) -> Option<Instant> {
        unimplemented!()
    }

    /// Fits.
    pub fn fits(&self, event: &Event) -> bool {
        let _ = event;
        unimplemented!()
    }

    /// Nothing is left.
    pub fn is_empty(&self) -> bool {
        unimplemented!()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        unimplemented!()
    }

    /// What it did so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

/// Puts `"oz0/refetch":true` into the `result._meta` of a final response's event by splice, or, where that cannot
/// be (an error response, a `_meta` that is no object, data over several lines), a comment `: refetch` before it.
pub fn mark_refetch(event: &Event) -> Bytes {
    event.bytes.clone()
}
