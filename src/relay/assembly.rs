//! The part of an event that has come so far, counted together with everything else that is held.
//!
//! An event goes out whole, so several that are half there would wait for each other at the limit: see
//! [`Held::room`]. Polled by the pump of a stream.

use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Sleep, sleep};

use crate::{limits::Held, store::BoxFuture};

/// Who goes beyond the limit and then gets nothing to go on with for so long lets another one go on.
pub const STARVED_AFTER: Duration = Duration::from_secs(1);

/// The bytes of one stream's unfinished event.
pub struct Assembly {
    place: Place,
    /// How far one may go beyond the limit.
    beyond: usize,
    /// Runs while it is this one's turn and nothing comes.
    starved: Option<Pin<Box<Sleep>>>,
}

enum Place {
    Has(Held),
    Waits(BoxFuture<'static, Held>),
    /// In between the two, and at the end.
    Gone,
}

impl fmt::Debug for Assembly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Assembly").field("waits", &self.waits()).finish_non_exhaustive()
    }
}

impl Assembly {
    /// Nothing has come; an event of the stream has at most `largest` bytes.
    pub fn new(held: Held, largest: usize) -> Self {
        Self { place: Place::Has(held), beyond: largest, starved: None }
    }

    /// Ready when the stream may be read on, of whose next event `bytes` are there.
    pub fn poll_room(&mut self, bytes: usize, cx: &mut Context<'_>) -> Poll<()> {
        if let Place::Has(held) = &mut self.place {
            held.set(bytes);
            if bytes == 0 {
                held.pass_turn();
            }
            if held.has_room(bytes == 0) {
                return Poll::Ready(());
            }
            let Place::Has(mut held) = mem::replace(&mut self.place, Place::Gone) else {
                return Poll::Ready(());
            };
            let beyond = self.beyond;
            self.place = Place::Waits(Box::pin(async move {
                held.room(beyond).await;
                held
            }));
        }
        if let Place::Waits(waiting) = &mut self.place {
            let held = ready!(waiting.as_mut().poll(cx));
            self.place = Place::Has(held);
        }
        Poll::Ready(())
    }

    /// Nothing more will come.
    pub fn end(&mut self) {
        self.place = Place::Gone;
    }

    /// Reading is paused here.
    pub fn waits(&self) -> bool {
        matches!(self.place, Place::Waits(_))
    }

    /// Something came.
    pub fn fed(&mut self) {
        self.starved = None;
    }

    /// Nothing is there to read: after a while the turn is another one's.
    pub fn poll_starved(&mut self, cx: &mut Context<'_>) {
        let Place::Has(held) = &mut self.place else { return };
        if !held.has_turn() {
            return;
        }
        let starved = self.starved.get_or_insert_with(|| Box::pin(sleep(STARVED_AFTER)));
        if starved.as_mut().poll(cx).is_ready() {
            held.pass_turn();
            self.starved = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;
    use crate::limits::Places;

    async fn may_go_on(assembly: &mut Assembly, bytes: usize) -> bool {
        poll_fn(|cx| Poll::Ready(assembly.poll_room(bytes, cx).is_ready())).await
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_limit_one_goes_on_until_its_event_is_whole_or_it_starves() {
        let total = Places::default();
        let mut all: Vec<_> = (0..3).map(|_| Assembly::new(Held::new(total.clone(), 10), 8)).collect();
        let [one, two, three] = all.as_mut_slice() else { unreachable!("there are three") };
        assert!(may_go_on(one, 5).await);
        assert!(may_go_on(two, 5).await, "it is its turn");
        assert!(!may_go_on(one, 5).await && one.waits());
        assert!(!may_go_on(three, 1).await);
        assert!(may_go_on(two, 6).await);
        // Whole: the next one goes on.
        assert!(may_go_on(two, 0).await);
        assert!(may_go_on(one, 5).await && may_go_on(three, 1).await);
        assert!(!may_go_on(two, 5).await, "it is the turn of the one that waited");
        poll_fn(|cx| {
            one.poll_starved(cx);
            if one.starved.is_some() { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        assert!(may_go_on(two, 5).await, "the other one had nothing to go on with");
        drop(all);
        assert_eq!(total.taken(), 0);
    }
}
