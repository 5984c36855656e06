//! From what was found in the upstream's stream to the queue.

use std::{task::Context, time::Duration};

use super::{Closing, LINGER, Pump, Settling, State};
use crate::{
    message::Era,
    relay::{clocks::Clocks, listen::Look, queue::Class, sse::Event},
};

impl Pump {
    /// Moves what was found into the queue. False: the queue has no room, the body will wake the pump.
    pub(super) fn deliver(&mut self, cx: &mut Context<'_>) -> bool {
        if self.upcoming().is_none() {
            return true;
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        while self.settling.is_none() && state.has_room(self.upcoming()) {
            if !self.give_next(&mut state) {
                state.count_held();
                return true;
            }
        }
        if self.settling.is_some() {
            return true;
        }
        state.count_held();
        state.pump = Some(cx.waker().clone());
        false
    }

    /// The stream is at its end: what was found goes into the queue although it may be full, since reading stopped.
    pub(super) fn deliver_all(&mut self) {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        while self.settling.is_none() && self.give_next(&mut state) {}
    }

    /// What goes out next: the sidecar's own words on a subscription that is back, or what was found.
    fn upcoming(&mut self) -> Option<&Event> {
        self.listen.as_mut().and_then(|listen| listen.change()).or(self.backlog.front())
    }

    /// Gives that; false if there is nothing.
    fn give_next(&mut self, state: &mut State) -> bool {
        if let Some(listen) = &mut self.listen
            && listen.change().is_some()
        {
            if let Some(change) = listen.take_change() {
                state.push(change, Class::Kept, self.now);
            }
            return true;
        }
        let Some(event) = self.backlog.pop_front() else { return false };
        self.give(state, event);
        true
    }

    fn give(&mut self, state: &mut State, event: Event) {
        let now = self.now;
        let look = match &mut self.listen {
            Some(listen) => listen.see(event, now),
            None => Look::Pass(event),
        };
        let event = match look {
            Look::Pass(event) => event,
            Look::Keep => return,
            Look::End => {
                self.backlog.clear();
                self.closing = Some(Closing::Finished);
                return;
            }
        };
        if let Some(id) = &event.id {
            self.source.ids_seen = !id.is_empty();
            state.exchange.may_resume = self.source.era == Era::Legacy && self.source.ids_seen;
            if let Some(notice) = state.exchange.request.as_mut().and_then(|request| request.notice.as_mut())
            {
                notice.event_id(id);
                notice.retry = event.retry.map_or(notice.retry, Duration::from_millis);
            }
        }
        if event.bytes.is_empty() {
            // The LF of a CRLF whose CR ended the event before: it follows that event directly, or is needless.
            if state.queue.is_empty() && !state.ours_last && !state.muted {
                state.put(event.prefix);
            }
            return;
        }
        let seen = self.source.see(event);
        self.learn(&seen);
        if seen.message {
            self.clocks.message(now);
        }
        if seen.forged > 0 {
            state.exchange.account.forged(seen.forged);
        }
        if let (Some(id), Some(entry)) = (&seen.asks, &state.exchange.entry) {
            entry.server_asks(id.clone());
        }
        if let Some((progress, total, token)) = &seen.progress {
            state.progress(*progress, *total, token.as_deref());
        }
        if let (Some((call, progress)), Some(resumes)) = (&seen.parked, &state.exchange.resumes) {
            resumes.ledger.parked_progress(&resumes.scope, call, progress);
        }
        if let Some(outcome) = seen.outcome {
            if !state.exchange.answered() {
                // A cancel came first, and is told at the next turn: the response stays awaited.
                self.source.answered = false;
                self.source.awaited.extend(state.exchange.id().cloned());
                return;
            }
            state.final_outcome = outcome;
            self.clocks = Clocks::new(now, None, None);
            let grace = if self.source.era == Era::Modern { LINGER } else { self.idle_timeout };
            self.linger = Some(now + grace);
        } else if self.source.answered && self.source.era == Era::Legacy {
            self.linger = Some(now + self.idle_timeout);
        }
        let Some(class) = seen.class.clone() else {
            if !seen.kept_back {
                state.queue.stray();
            }
            return;
        };
        let settles = seen.answer.as_ref().zip(seen.event.data.as_ref());
        match settles.and_then(|(answer, data)| state.exchange.settle(data, answer)) {
            Some(work) => self.settling = Some(Box::new(Settling { work, event: seen.event, class })),
            None => state.push(seen.event, class, now),
        }
    }
}
