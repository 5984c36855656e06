//! What stands between the pump and the body of a stream.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    task::Waker,
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use crate::{
    account::Outcome,
    exchange::Exchange,
    limits::Held,
    relay::{
        queue::{Class, Queue, mark_refetch},
        sse::Event,
    },
};

/// Bytes that the body gives as one frame, unless one event alone is larger.
pub(super) const FRAME: usize = 64 * 1024;
/// The most of such an event.
const LARGEST: usize = 4 * FRAME;
/// Bytes that are copied rather than given as a frame of their own.
const SMALL: usize = FRAME / 2;
/// Later than any progress may wait for its rate.
const PAST_ALL_RATES: Duration = Duration::from_secs(365 * 24 * 3600);
/// Goes before the sidecar's own error when progress was dropped.
const REFETCH: &[u8] = b": refetch\n\n";

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
}

impl Shared {
    /// A poisoned lock means that a holder panicked between plain assignments; the stream ends with its exchange.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) queue: Queue,
    pub(super) held: Held,
    /// What the sidecar itself says at the end, after everything in the queue.
    pub(super) last_words: Option<Bytes>,
    /// They wait until the end of the call is stored: its node may make the next attempt as soon as it has them.
    pub(super) parting: bool,
    /// Nothing more will be pushed.
    pub(super) ended: bool,
    /// The node is given up: the body ends as broken.
    pub(super) cut: bool,
    /// A cancel won: the node gets nothing more.
    pub(super) muted: bool,
    /// The body was polled.
    pub(super) begun: bool,
    pub(super) reader: Option<Waker>,
    /// When progress that waits for its rate may go out, as that knows.
    pub(super) awaited: Option<Instant>,
    /// The pump, while it waits for the node to read.
    pub(super) pump: Option<Waker>,
    /// When the node last took something, or there was nothing to take.
    pub(super) taken: Instant,
    pub(super) final_outcome: Outcome,
    pub(super) events: u64,
    pub(super) bytes_out: u64,
    pub(super) keepalives: u64,
    /// Given out by the queue, not yet taken by the node's connection.
    pub(super) out: Vec<Bytes>,
    pub(super) out_bytes: usize,
    pub(super) out_final: bool,
    /// The last bytes to the node were a comment of ours.
    pub(super) ours_last: bool,
    /// Large, and seldom looked at.
    pub(super) exchange: Box<Exchange>,
}

impl State {
    /// Takes from the queue what it lets out now, up to a frame.
    pub(super) fn fill(&mut self, now: Instant) {
        // At the end nothing is worth waiting for its rate any more.
        let now = if self.ended { now + PAST_ALL_RATES } else { now };
        while self.out_bytes < FRAME && !self.muted {
            let Some(popped) = self.queue.pop(now) else { break };
            let bytes = if popped.refetch { mark_refetch(&popped.event) } else { popped.event.bytes };
            if !self.ours_last || self.out_bytes > 0 {
                self.put(popped.event.prefix);
            }
            self.events += u64::from(popped.event.data.is_some());
            self.out_final |= popped.is_final;
            self.put(bytes);
        }
    }

    pub(super) fn put(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.out_bytes += bytes.len();
            self.out.push(bytes);
        }
    }

    /// Everything for the node, as one frame.
    pub(super) fn take(&mut self, now: Instant) -> Option<Bytes> {
        if self.muted {
            return None;
        }
        self.fill(now);
        if self.queue.is_empty()
            && !self.parting
            && let Some(words) = self.last_words.take()
        {
            self.events += 1;
            if self.queue.counts().refetch {
                self.put(Bytes::from_static(REFETCH));
            }
            self.put(words);
        }
        let mut bytes = self.next_frame()?;
        // What was taken is counted no more, so that is no more than a slow node may hold up.
        let rest = bytes.split_off(bytes.len().min(LARGEST));
        if !rest.is_empty() {
            self.out.insert(0, rest);
        }
        self.out_bytes -= bytes.len();
        self.ours_last = false;
        self.taken = now;
        self.bytes_out += bytes.len() as u64;
        self.count_held();
        if self.out.is_empty() && std::mem::take(&mut self.out_final) {
            let outcome = self.final_outcome;
            self.exchange.completed(outcome);
        }
        if let Some(pump) = self.pump.take() {
            pump.wake();
        }
        Some(bytes)
    }

    /// The bytes that go out next, in one piece: what is small is put together, what is large stays as it is.
    fn next_frame(&mut self) -> Option<Bytes> {
        let small = self.out.iter().take_while(|bytes| bytes.len() < SMALL).count();
        if small <= 1 {
            return (!self.out.is_empty()).then(|| self.out.remove(0));
        }
        let frame = self.out[..small].concat().into();
        self.out.drain(..small);
        Some(frame)
    }

    /// Takes one event for the node.
    pub(super) fn push(&mut self, event: Event, class: Class, now: Instant) {
        if self.muted {
            return;
        }
        if self.queue.is_empty() {
            self.taken = now;
        }
        self.queue.push(event, class, now);
        // While the node keeps up its connection waits for more, or has not begun to: what may go out goes out as it
        // came, and only what is behind that can become adjacent and coalesce.
        if self.is_read() {
            self.fill(now);
        }
        self.queue.detach_newest();
    }

    /// The node waits for more, or has not begun to.
    pub(super) fn is_read(&self) -> bool {
        self.reader.is_some() || !self.begun
    }

    /// Notes the request's progress.
    pub(super) fn progress(&mut self, progress: f64, total: Option<f64>, token: Option<&str>) {
        let record = &mut self.exchange.account.record;
        if record.progress.is_none_or(|before| progress > before) {
            record.progress = Some(progress);
            record.total = total;
        }
        let takes_part = self.exchange.request.as_ref().is_some_and(|request| request.resumable);
        if let Some(claim) = &mut self.exchange.claim {
            claim.progress(progress, total, token.filter(|_| takes_part));
        }
    }

    /// Whether the pump may push this event. A muted stream takes everything, and forgets it.
    pub(super) fn has_room(&self, event: Option<&Event>) -> bool {
        self.muted
            || event.is_none_or(|event| self.queue.fits(event.bytes.len() + event.prefix.len()))
                && self.may_hold_more()
    }

    /// Whether all streams together leave room for more.
    pub(super) fn may_hold_more(&self) -> bool {
        self.held.has_room(self.queue.is_empty() && self.out.is_empty())
    }

    pub(super) fn count_held(&mut self) {
        let bytes = self.queue.bytes() + self.out_bytes;
        self.held.set(bytes);
    }

    /// There may be more for the node than its connection knows of. Progress that waits for its rate is awaited already, however
    /// often newer takes its place.
    pub(super) fn has_news(&self) -> bool {
        if self.drained() {
            return false;
        }
        let only_waits = self.out.is_empty() && self.last_words.is_none();
        let is_awaited =
            self.reader.is_some() && self.awaited.is_some() && self.queue.next_release() == self.awaited;
        !(only_waits && is_awaited)
    }

    pub(super) fn wake_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
        self.wake_reader();
    }

    pub(super) fn mute(&mut self) {
        self.muted = true;
        // What waits here is awaited, and would never be let out.
        self.queue.clear();
        self.out.clear();
        self.out_bytes = 0;
        self.held.set(0);
    }

    /// Nothing waits for the node.
    pub(super) fn drained(&self) -> bool {
        self.muted || self.cut || (self.queue.is_empty() && self.out.is_empty() && self.last_words.is_none())
    }
}

impl State {
    /// Tells the exchange what passed.
    pub(super) fn tell(&mut self) {
        let counts = self.queue.counts();
        let record = &mut self.exchange.account.record;
        record.events = Some(self.events);
        record.bytes_out = Some(self.bytes_out);
        record.keepalives = Some(self.keepalives);
        record.progress_in = Some(counts.progress_in);
        record.progress_out = Some(counts.progress_out);
        record.progress_coalesced = Some(counts.coalesced);
        record.progress_dropped = Some(counts.dropped);
        record.refetch = counts.refetch.then_some(true);
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.tell();
    }
}
