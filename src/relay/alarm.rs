//! A timer for a deadline that moves on with each event.

use std::{
    fmt,
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
};

use tokio::{
    task::coop::unconstrained,
    time::{Instant, Sleep, sleep_until},
};

/// Rings once a deadline is over. Its timer is set anew only where that would run out too late: a deadline that moves on
/// costs nothing until the timer runs out for an earlier one, and is then set to where the deadline is by now.
#[derive(Default)]
pub(super) struct Alarm(Option<Set>);

struct Set {
    at: Instant,
    /// Whom it wakes.
    waker: Waker,
    sleep: Pin<Box<Sleep>>,
}

impl fmt::Debug for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Alarm").field(&self.0.as_ref().map(|set| set.at)).finish()
    }
}

impl Alarm {
    /// Ready when `at` has come, at once and each time: who polls this in a loop has to have a way out of it. `now` is the
    /// time, or was lately.
    pub(super) fn poll(&mut self, at: Instant, mut now: Instant, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if now >= at {
                return Poll::Ready(());
            }
            let set = self.0.get_or_insert_with(|| Set {
                at,
                waker: Waker::noop().clone(),
                sleep: Box::pin(sleep_until(at)),
            });
            let in_time = now < set.at && set.at <= at;
            if in_time && set.waker.will_wake(cx.waker()) {
                return Poll::Pending;
            }
            if !in_time {
                set.sleep.as_mut().reset(at);
                set.at = at;
            }
            // Within a task's budget it might wait for the next turn instead, and wake nobody later.
            if pin!(unconstrained(set.sleep.as_mut())).poll(cx).is_pending() {
                set.waker.clone_from(cx.waker());
                return Poll::Pending;
            }
            now = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, time::Duration};

    use super::*;

    const fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    async fn is_pending(alarm: &mut Alarm, at: Instant) -> bool {
        poll_fn(|cx| Poll::Ready(alarm.poll(at, Instant::now(), cx).is_pending())).await
    }

    /// Waits for it as a stream does that asks about another deadline with each event.
    async fn rings_at(alarm: &mut Alarm, at: Instant) {
        poll_fn(|cx| alarm.poll(at, Instant::now(), cx)).await;
        assert_eq!(Instant::now().duration_since(at), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn it_rings_at_the_deadline_wherever_that_has_moved() {
        let start = Instant::now();
        let mut alarm = Alarm::default();
        assert!(is_pending(&mut alarm, start + millis(100)).await);
        for later in [150, 400, 400, 300] {
            assert!(is_pending(&mut alarm, start + millis(later)).await);
        }
        rings_at(&mut alarm, start + millis(300)).await;
        rings_at(&mut alarm, start + millis(1000)).await;
        assert!(is_pending(&mut alarm, start + millis(5000)).await);
        rings_at(&mut alarm, start + millis(1100)).await;
        assert!(!is_pending(&mut alarm, start + millis(1100)).await, "it goes on ringing");
        assert!(!is_pending(&mut alarm, start).await);
    }

    #[tokio::test(start_paused = true)]
    async fn it_wakes_who_asked_last() {
        let at = Instant::now() + millis(100);
        let mut alarm = Alarm::default();
        assert!(alarm.poll(at, Instant::now(), &mut Context::from_waker(Waker::noop())).is_pending());
        rings_at(&mut alarm, at).await;
    }

    #[tokio::test(start_paused = true)]
    async fn it_wakes_also_where_a_task_has_used_its_turn_up() {
        let at = Instant::now() + millis(100);
        let mut alarm = Alarm::default();
        poll_fn(|cx| {
            while tokio::task::coop::has_budget_remaining() {
                assert!(pin!(tokio::task::coop::consume_budget()).poll(cx).is_ready());
            }
            assert!(alarm.poll(at, Instant::now(), cx).is_pending());
            Poll::Ready(())
        })
        .await;
        rings_at(&mut alarm, at).await;
    }
}
