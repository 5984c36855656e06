//! The bounded queue between upstream and node of one stream.
//!
//! Progress is replaceable, everything else is not. *Thinning* replaces progress that still waits by a
//! newer one of its token; *dropping* at capacity takes the oldest progress and leaves the refetch
//! mark. What comes out is a subsequence of what went in, in its order. The newest progress of a token
//! is never thinned away, and an event's `id` never goes without a later one: progress with an
//! `id` is replaced only by one that has an `id` too, and not dropped; with a `retry`, or an `event`
//! name other than `message`, it is kept.
//!
//! Pure: times come as arguments. Holds at most `queue` events and `queue_bytes` bytes (one event that is larger
//! alone still fits an empty queue), provided that the caller asks [`Queue::fits`] first.

mod tokens;

use std::collections::VecDeque;

use bytes::Bytes;
use tokio::time::Instant;

use crate::message::{
    Id,
    answer::{self, Answer},
};

use self::tokens::Tokens;
use super::{
    Settings,
    sse::{self, Event},
};

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
    /// The final response of the stream: as `Kept`.
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
    /// Progress events dropped at capacity, because their value did not rise, or as strays.
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
    /// It must carry the refetch mark ([`mark_refetch`]).
    pub refetch: bool,
}

/// The queue of one stream.
#[derive(Debug)]
pub struct Queue {
    settings: Settings,
    counts: Counts,
    items: VecDeque<Item>,
    bytes: usize,
    /// Of `items`, how many must not be dropped, and their bytes.
    held: usize,
    held_bytes: usize,
    /// Of `items`, how many let the progress before them out whatever its rate.
    barriers: usize,
    /// No item before this index may be dropped; saves looking for the oldest from the front each time.
    settled: usize,
    tokens: Tokens,
}

#[derive(Debug)]
struct Item {
    event: Event,
    kind: Kind,
    detached: bool,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Progress that may be thinned; it waits until `release`.
    Thin {
        serial: u64,
        release: Option<Instant>,
    },
    /// Progress that may not.
    Progress,
    Kept,
    Final,
}

impl Item {
    fn size(&self) -> usize {
        size(&self.event)
    }

    fn droppable(&self) -> bool {
        matches!(self.kind, Kind::Thin { .. }) && self.event.id.is_none()
    }

    fn barrier(&self) -> bool {
        !matches!(self.kind, Kind::Thin { .. })
    }
}

fn size(event: &Event) -> usize {
    event.prefix.len() + event.bytes.len()
}

impl Queue {
    /// An empty queue.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            counts: Counts::default(),
            items: VecDeque::new(),
            bytes: 0,
            held: 0,
            held_bytes: 0,
            barriers: 0,
            settled: 0,
            tokens: Tokens::default(),
        }
    }

    /// Takes an event. Call it only when it [fits](Queue::fits); the rules may drop or merge progress. An
    /// event that does not fit is taken all the same, beyond the bound.
    ///
    /// Give out what the node takes at once ([`Queue::pop`]) between two pushes: what is adjacent in
    /// the queue coalesces, so events that came in one chunk would otherwise lose their burst.
    pub fn push(&mut self, event: Event, class: Class, now: Instant) {
        let kind = match class {
            Class::Kept => Kind::Kept,
            Class::Final => Kind::Final,
            Class::Progress { token, progress } => match self.progress(&event, token, progress, now) {
                Some(kind) => kind,
                None => return,
            },
        };
        self.insert(Item { event, kind, detached: false });
    }

    fn insert(&mut self, item: Item) {
        self.make_room(item.size());
        self.bytes += item.size();
        if !item.droppable() {
            self.held += 1;
            self.held_bytes += item.size();
        }
        self.barriers += usize::from(item.barrier());
        self.items.push_back(item);
    }

    /// Takes progress that only replaces what was pushed last, if that is how it is; otherwise it has to be pushed. What
    /// is replaced stays until [`Queue::renew`] is called, which has to follow before anything else but more of this.
    ///
    /// `read`: the node waits for more, so what may go out has gone.
    pub fn replace(&mut self, token: &Id, progress: f64, now: Instant, read: bool) -> bool {
        let Some(Item { event, kind: Kind::Thin { serial, release }, .. }) = self.items.back() else {
            return false;
        };
        let waits = release.is_some_and(|release| release > now);
        let Some(token) = self.tokens.current_of(token).filter(|token| token.serial == *serial) else {
            return false;
        };
        // An event's id never goes without a later one.
        let replaces = event.id.is_none() && (waits || !read);
        if !replaces || token.newest.is_none_or(|newest| progress <= newest) {
            return false;
        }
        token.newest = Some(progress);
        self.counts.progress_in += 1;
        self.counts.coalesced += 1;
        true
    }

    /// The event of the progress that was taken last by [`Queue::replace`], in memory of its own.
    pub fn renew(&mut self, event: Event) {
        let Some(replaced) = self.remove(self.items.len().wrapping_sub(1)) else { return };
        self.insert(Item { event, kind: replaced.kind, detached: true });
    }

    /// Counts progress that does not belong on the stream and is not pushed.
    pub fn stray(&mut self) {
        self.counts.progress_in += 1;
        self.counts.dropped += 1;
    }

    /// What was pushed last, if it is still here, has to wait: it gets memory of its own ([`Event::detach`]).
    pub fn detach_newest(&mut self) {
        if let Some(item) = self.items.back_mut().filter(|item| !item.detached) {
            item.event.detach();
            item.detached = true;
        }
    }

    /// Whether another event may be pushed: false only when it is full of events that are never dropped.
    pub fn has_room(&self) -> bool {
        self.fits(1)
    }

    /// Whether an event of `bytes` bytes may be pushed: false only when it would go beyond the bounds by
    /// events that are never dropped. Then reading from upstream pauses.
    pub fn fits(&self, bytes: usize) -> bool {
        self.items.is_empty()
            || self.held < self.settings.queue
                && self.held_bytes.saturating_add(bytes) <= self.settings.queue_bytes
    }

    /// The next event that may go out now, in order.
    pub fn pop(&mut self, now: Instant) -> Option<Popped> {
        if self.next_release().is_some_and(|release| release > now) {
            return None;
        }
        let item = self.remove(0)?;
        if matches!(item.kind, Kind::Thin { .. } | Kind::Progress) {
            self.counts.progress_out += 1;
        }
        let is_final = matches!(item.kind, Kind::Final);
        Some(Popped { event: item.event, is_final, refetch: is_final && self.counts.refetch })
    }

    /// When [`Queue::pop`] will give something although nothing is pushed; `None` if nothing waits for its
    /// rate. Ask it after `pop` gave nothing; at most `min_interval` away then.
    pub fn next_release(&self) -> Option<Instant> {
        // Any later event but progress lets the waiting ones out first.
        if self.barriers > 0 {
            return None;
        }
        match self.items.front()?.kind {
            Kind::Thin { release, .. } => release,
            _ => None,
        }
    }

    /// Forgets what is held: none of it goes out.
    pub fn clear(&mut self) {
        while self.remove(0).is_some() {}
    }

    /// Nothing is left.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Events held.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What it did so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// What a progress event is to be held as, after it has replaced what it supersedes; `None` if it is not
    /// forwarded.
    fn progress(&mut self, event: &Event, token: Id, progress: Option<f64>, now: Instant) -> Option<Kind> {
        self.counts.progress_in += 1;
        let message = event.name.as_ref().is_none_or(|name| name == "message");
        let Some(value) = progress.filter(|value| message && !value.is_nan()) else {
            return Some(Kind::Progress);
        };
        let token = self.tokens.of(token);
        if token.newest.is_some_and(|newest| value <= newest) {
            if event.id.is_some() || event.retry.is_some() {
                return Some(Kind::Progress);
            }
            self.counts.dropped += 1;
            return None;
        }
        token.newest = Some(value);
        if !self.settings.coalesce || event.retry.is_some() {
            return Some(Kind::Progress);
        }
        let serial = token.serial;
        let waits = token.release.is_some_and(|release| release > now);
        let superseded = self.superseded(event, serial, waits, now).and_then(|index| self.remove(index));
        if let Some(superseded) = superseded {
            self.counts.coalesced += 1;
            // The newer one goes out when the older would have, and takes nothing more from the bucket.
            return Some(superseded.kind);
        }
        let release = self.tokens.current().draw(&self.settings, now);
        Some(Kind::Thin { serial, release })
    }

    /// The waiting progress that `event` replaces: the last event if it is of the same token, or, if that
    /// token waits for its rate, the one that does, with nothing but other progress behind it.
    fn superseded(&self, event: &Event, serial: u64, waits: bool, now: Instant) -> Option<usize> {
        let behind = if waits { usize::MAX } else { 1 };
        for (index, item) in self.items.iter().enumerate().rev().take(behind) {
            let Kind::Thin { serial: other, release } = item.kind else { return None };
            if other == serial {
                let adjacent = index + 1 == self.items.len();
                let waits = release.is_some_and(|release| release > now);
                let id_follows = item.event.id.is_none() || event.id.is_some();
                return ((adjacent || waits) && id_follows).then_some(index);
            }
        }
        None
    }

    /// Drops the oldest progress until an event of `size` bytes fits, or nothing is left to drop.
    fn make_room(&mut self, size: usize) {
        while !self.items.is_empty()
            && (self.items.len() >= self.settings.queue
                || self.bytes.saturating_add(size) > self.settings.queue_bytes)
        {
            while self.items.get(self.settled).is_some_and(|item| !item.droppable()) {
                self.settled += 1;
            }
            if self.remove(self.settled).is_none() {
                return;
            }
            self.counts.dropped += 1;
            self.counts.refetch = true;
        }
    }

    fn remove(&mut self, index: usize) -> Option<Item> {
        let item = if index == 0 { self.items.pop_front() } else { self.items.remove(index) }?;
        self.bytes -= item.size();
        if !item.droppable() {
            self.held -= 1;
            self.held_bytes -= item.size();
        }
        self.barriers -= usize::from(item.barrier());
        if index < self.settled {
            self.settled -= 1;
        }
        Some(item)
    }
}

/// Puts `"oz0/refetch":true` into the `result._meta` of a final response's event by splice, or, where that cannot
/// be (an error response, a `_meta` that is no object, data over several lines), a comment `: refetch` before it.
/// The event's prefix is not in what it gives. Members that only the sidecar may say must have been cut out before.
pub fn mark_refetch(event: &Event) -> Bytes {
    let parts = match refetch_splice(event) {
        Some((at, member)) => [&event.bytes[..at], &member, &event.bytes[at..]].concat(),
        None => [b": refetch\n\n", &event.bytes[..]].concat(),
    };
    parts.into()
}

/// Where the mark goes into the event's bytes, and its text.
fn refetch_splice(event: &Event) -> Option<(usize, Vec<u8>)> {
    let mut values = sse::fields(&event.bytes).filter(|(field, _)| *field == b"data").map(|(_, value)| value);
    let value = values.next()?;
    if values.next().is_some() {
        return None;
    }
    let data = &event.bytes[value.clone()];
    let Some(Answer::Response(response)) = answer::look(data) else { return None };
    if response.meta_not_object {
        return None;
    }
    let (object, mut member) = match response.meta {
        Some(meta) => (meta, br#""oz0/refetch":true"#.to_vec()),
        None => (response.result?, br#""_meta":{"oz0/refetch":true}"#.to_vec()),
    };
    let inside = data.get(object.clone())?.strip_prefix(b"{")?;
    if inside.trim_ascii_start() != b"}" {
        member.push(b',');
    }
    Some((value.start + object.start + 1, member))
}

#[cfg(test)]
mod tests;
