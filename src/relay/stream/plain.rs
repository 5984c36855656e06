//! The short way of what most events of a busy stream are: notifications that only pass, and steps of one progress.
//!
//! They are looked at where they lie in their chunk. Those that go out at once do so as one piece of it; progress that
//! only replaces what waits is never made an event. Nothing is done here that the long way would not do too, and whatever
//! is not clear is left to it.

use std::{mem, ops::Range};

use bytes::{Buf, Bytes};
use tokio::time::Instant;

use super::{Pump, State, state::FRAME};
use crate::{
    message::{
        Id,
        plain::{Step, Steps, is_notification},
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

impl Pump {
    /// Takes what the chunk begins with, as long as that needs no closer look.
    pub(super) fn pass_plain(&mut self, chunk: &mut Bytes) {
        if self.listen.is_some() || self.source.answered || !self.backlog.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        if state.muted || !state.may_hold_more() {
            return;
        }
        let now = self.now;
        let mut way =
            Way { state: &mut state, chunk: &mut *chunk, now, at: 0, run: 0, events: 0, newest: None };
        while let Some((step, length)) = begins(&way.chunk[way.at..], self.known.as_mut())
            && length <= self.event_limit
        {
            let passed = match step.zip(self.known.as_ref()) {
                Some((step, known)) => way.progress(known, step, length),
                None => way.keep(length),
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
            chunk.advance(taken.min(chunk.len()));
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
            let wire = &seen.event.bytes;
            let steps = match sse::plain(wire) {
                Some((at, _)) if wire[at.clone()] == *data => Steps::like(wire, at),
                _ => Steps::like(data, 0..data.len()),
            };
            self.known = Some(Known { token: token.clone(), own, steps, missed });
        }
    }
}

impl Known {
    fn step(&mut self, data: &[u8]) -> Option<Step> {
        let step = self.steps.as_ref()?.step(data)?;
        self.missed = 0;
        Some(step)
    }

    fn next(&mut self, bytes: &[u8]) -> Option<(Step, usize)> {
        let next = self.steps.as_ref()?.next(bytes)?;
        self.missed = 0;
        Some(next)
    }
}

/// How long the event is that these bytes begin with, and what it says if it is a step; `None` if a closer look is needed.
fn begins(bytes: &[u8], mut known: Option<&mut Known>) -> Option<(Option<Step>, usize)> {
    if let Some((step, length)) = known.as_mut().and_then(|known| known.next(bytes)) {
        return Some((Some(step), length));
    }
    let (data, length) = sse::plain(bytes)?;
    let data = &bytes[data];
    let step = known.as_mut().and_then(|known| known.step(data));
    (step.is_some() || is_notification(data)).then_some((step, length))
}

/// What was taken of a chunk so far.
struct Way<'a> {
    state: &'a mut State,
    /// Empty once it went out whole.
    chunk: &'a mut Bytes,
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
            let is_whole = self.run == 0 && self.at == self.chunk.len();
            let run = if is_whole { mem::take(self.chunk) } else { self.chunk.slice(self.run..self.at) };
            self.state.put(run);
            self.state.events += mem::take(&mut self.events);
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
