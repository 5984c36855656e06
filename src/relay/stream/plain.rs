//! The short way of what most events of a busy stream are: notifications that only pass, and steps of one progress.
//!
//! They are looked at where they lie in their chunk. Those that go out at once do so as one piece of it; progress that
//! only replaces what waits is never made an event. Nothing is done here that the long way would not do too, and whatever
//! is not clear is left to it.

use std::ops::Range;

use bytes::{Buf, Bytes};
use tokio::time::Instant;

use super::{Pump, State, state::FRAME};
use crate::{
    message::{
        Id,
        plain::{Steps, is_notification},
    },
    relay::{
        queue::Class,
        source::Seen,
        sse::{self, Event},
    },
};

/// Progress as the long way saw it.
pub(super) struct Known {
    token: Id,
    /// It is the request's own.
    own: bool,
    /// `None`: what comes may not be like it.
    steps: Option<Steps>,
    /// How often in a row nothing came of what was learnt.
    missed: u8,
}

/// After so many nothing more is learnt: the steps are not alike, or of several in turn.
const MISSES: u8 = 8;

/// What a step says: its value and its total.
type Step = (f64, Option<f64>);

impl Pump {
    /// Takes what the chunk begins with, as long as that needs no closer look.
    pub(super) fn pass_plain(&mut self, chunk: &mut Bytes) {
        if self.listen.is_some() || self.source.answered || !self.backlog.is_empty() {
            return;
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        if state.muted || !state.may_hold_more() {
            return;
        }
        let now = Instant::now();
        let mut way = Way { state: &mut state, chunk, now, at: 0, run: 0, events: 0, newest: None };
        while let Some((data, length)) =
            sse::plain(&chunk[way.at..]).filter(|(_, length)| *length <= self.event_limit)
        {
            let data = &chunk[way.at + data.start..way.at + data.end];
            let known = self.known.as_mut();
            let step = known.and_then(|known| known.step(data).map(|step| (&*known, step)));
            let passed = match step {
                Some((known, step)) => way.progress(known, step, length),
                None => is_notification(data) && way.keep(length),
            };
            if !passed {
                break;
            }
        }
        way.settle();
        let taken = way.at;
        if taken > 0 {
            self.scanner.passed_plain();
            self.clocks.message(now);
            state.count_held();
            chunk.advance(taken);
        }
    }

    /// Notes how the progress begins that this is a step of.
    pub(super) fn learn(&mut self, seen: &Seen) {
        let Some(Class::Progress { token, progress: Some(_) }) = &seen.class else { return };
        let Some(data) = seen.event.data.as_deref().filter(|_| seen.parked.is_none()) else { return };
        if self.known.as_mut().is_some_and(|known| known.step(data).is_some()) {
            // It is like the others, and only had to go the long way.
            return;
        }
        let missed = self.known.as_ref().map_or(0, |known| known.missed + 1);
        if missed < MISSES {
            let own = seen.progress.is_some();
            self.known = Some(Known { token: token.clone(), own, steps: Steps::like(data), missed });
        }
    }
}

impl Known {
    fn step(&mut self, data: &[u8]) -> Option<Step> {
        let step = self.steps.as_ref()?.step(data)?;
        self.missed = 0;
        Some(step)
    }
}

/// What was taken of a chunk so far.
struct Way<'a> {
    state: &'a mut State,
    chunk: &'a Bytes,
    now: Instant,
    /// Up to here.
    at: usize,
    /// From here on it goes out as one piece, of so many events.
    run: usize,
    events: u64,
    /// The newest of the steps that replace what waits.
    newest: Option<Newest>,
}

struct Newest {
    place: Range<usize>,
    step: Step,
    own: bool,
}

impl Way<'_> {
    /// Takes the next event, which only passes; false if there is no room for it.
    fn keep(&mut self, length: usize) -> bool {
        let state = &mut *self.state;
        let run = self.at - self.run;
        if state.queue.is_empty() && state.is_read() && state.out_bytes + run < FRAME {
            self.events += 1;
            self.at += length;
            return true;
        }
        self.settle();
        if !self.state.queue.fits(length) {
            return false;
        }
        self.push(length, Class::Kept);
        true
    }

    /// Takes the next event, which is a step of this progress; false if there is no room for it.
    fn progress(&mut self, known: &Known, step: Step, length: usize) -> bool {
        let (value, total) = step;
        let read = self.state.is_read();
        if !self.state.queue.fits(length) {
            return false;
        }
        if self.state.queue.replace(&known.token, value, self.now, read) {
            let place = self.at..self.at + length;
            self.at = place.end;
            self.run = place.end;
            self.newest = Some(Newest { place, step, own: known.own });
            return true;
        }
        self.settle();
        if known.own {
            self.state.progress(value, total, None);
        }
        self.push(length, Class::Progress { token: known.token.clone(), progress: Some(value) });
        true
    }

    fn push(&mut self, length: usize, class: Class) {
        let end = self.at + length;
        let event = event(self.chunk.slice(self.at..end));
        self.state.push(event, class, self.now);
        (self.at, self.run) = (end, end);
    }

    /// What was taken stands in the queue, or goes out.
    fn settle(&mut self) {
        if self.events > 0 {
            self.state.put(self.chunk.slice(self.run..self.at));
            self.state.events += std::mem::take(&mut self.events);
            self.state.taken = self.now;
        }
        if let Some(Newest { place, step: (value, total), own }) = self.newest.take() {
            // The rest of its chunk would be held with it.
            self.state.queue.renew(event(Bytes::copy_from_slice(&self.chunk[place])));
            if own {
                self.state.progress(value, total, None);
            }
        }
        self.run = self.at;
    }
}

/// An event of the plainest form; what its data says was looked at.
fn event(bytes: Bytes) -> Event {
    Event { bytes, data: Some(Bytes::new()), ..Event::default() }
}
