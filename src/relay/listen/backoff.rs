//! How long to wait before asking again: exponential, capped, with full jitter, so that streams which were dropped at
//! once do not come back at once.

use std::time::Duration;

/// The longest first wait.
pub(super) const FIRST: Duration = Duration::from_millis(250);
/// The longest wait.
const LONGEST: Duration = Duration::from_secs(8);
/// After so long without a drop the waits begin anew.
const HEALTHY: Duration = Duration::from_secs(60);

/// The waits of one subscription.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    attempts: u32,
}

impl Backoff {
    /// The next wait: anything up to a limit that doubles from 250 ms to 8 s, and is never more than `room`. `jitter` is
    /// a random number from 0 to 1.
    pub(super) fn next(&mut self, room: Duration, jitter: f64) -> Duration {
        let limit = FIRST.saturating_mul(1 << self.attempts.min(16)).min(LONGEST);
        self.attempts = self.attempts.saturating_add(1);
        limit.min(room).mul_f64(jitter.clamp(0.0, 1.0))
    }

    /// How many attempts there were since the subscription was last healthy.
    pub(super) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// The stream was there for so long.
    pub(super) fn was_healthy(&mut self, lasted: Duration) {
        if lasted >= HEALTHY {
            self.attempts = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Duration = Duration::from_secs(300);

    #[test]
    fn the_longest_wait_doubles_up_to_eight_seconds() {
        let mut backoff = Backoff::default();
        let longest: Vec<u128> = (0..40).map(|_| backoff.next(ROOM, 1.0).as_millis()).collect();
        assert_eq!(longest[..7], [250, 500, 1000, 2000, 4000, 8000, 8000]);
        assert!(longest[7..].iter().all(|wait| *wait == 8000));
        assert_eq!(backoff.attempts(), 40);
    }

    #[test]
    fn a_wait_is_anything_up_to_the_longest_with_the_same_chance() {
        let mut slots = [0; 10];
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..10_000 {
            let wait = Backoff::default().next(ROOM, random.f64());
            slots[usize::try_from(wait.as_micros() / 25_000).unwrap()] += 1;
        }
        assert!(slots.iter().all(|count| (850..1150).contains(count)), "{slots:?}");
        assert_eq!(Backoff::default().next(ROOM, 0.0), Duration::ZERO);
    }

    #[test]
    fn a_wait_is_never_longer_than_there_is_time_and_still_spread() {
        let mut backoff = Backoff::default();
        (0..6).for_each(|_| _ = backoff.next(ROOM, 1.0));
        let room = Duration::from_secs(1);
        assert_eq!(backoff.next(room, 1.0), room);
        assert_eq!(backoff.next(room, 0.5), room / 2);
    }

    #[test]
    fn only_a_minute_without_a_drop_begins_the_waits_anew() {
        let mut backoff = Backoff::default();
        (0..6).for_each(|_| _ = backoff.next(ROOM, 1.0));
        backoff.was_healthy(HEALTHY - Duration::from_millis(1));
        assert_eq!(backoff.next(ROOM, 1.0), LONGEST);
        backoff.was_healthy(HEALTHY);
        assert_eq!((backoff.attempts(), backoff.next(ROOM, 1.0)), (0, FIRST));
    }

    #[test]
    fn two_that_were_dropped_at_once_wait_differently() {
        let waits: std::collections::HashSet<Duration> =
            (0..1000).map(|_| Backoff::default().next(ROOM, fastrand::f64())).collect();
        assert!(waits.len() > 990, "{}", waits.len());
    }
}
