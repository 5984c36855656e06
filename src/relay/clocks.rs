//! The two clocks of an exchange.
//!
//! *Idle* runs from the last JSON-RPC message from upstream and stands still while the exchange waits
//! for the node (an answer to a server's request, or a slow reader). *Max* runs from the start of the
//! attempt, whatever happens. Pure: times come as arguments; who owns the clocks sleeps until
//! [`Clocks::deadline`] and asks [`Clocks::expired`] before it looks at what has come since.

use std::time::Duration;

use tokio::time::Instant;

/// Which clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// No useful activity for too long.
    Idle,
    /// Too long since the start of the attempt.
    Max,
}

/// The clocks of one exchange.
#[derive(Clone, Debug)]
pub struct Clocks {
    idle: Option<Duration>,
    running: Idle,
    max: Option<Instant>,
}

/// How the idle clock stands. A deadline of `None` is one too far away to be an instant.
#[derive(Clone, Copy, Debug)]
enum Idle {
    Until(Option<Instant>),
    Paused { left: Duration, times: u32 },
}

impl Clocks {
    /// Clocks that start now; `None` is a clock that never runs out.
    pub fn new(now: Instant, idle: Option<Duration>, max: Option<Duration>) -> Self {
        let running = Idle::Until(idle.and_then(|idle| now.checked_add(idle)));
        Self { idle, running, max: max.and_then(|max| now.checked_add(max)) }
    }

    /// A JSON-RPC message came from upstream: the idle clock begins anew. Comments, empty events and
    /// `retry:` are no messages. Never moves the maximum.
    pub fn message(&mut self, now: Instant) {
        let Some(idle) = self.idle else { return };
        match &mut self.running {
            Idle::Until(deadline) => *deadline = now.checked_add(idle),
            Idle::Paused { left, .. } => *left = idle,
        }
    }

    /// The idle clock stands still from now, until [`Clocks::resume`] was called as often as this.
    pub fn pause(&mut self, now: Instant) {
        match &mut self.running {
            Idle::Until(deadline) => {
                let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(now));
                self.running = Idle::Paused { left, times: 1 };
            }
            Idle::Paused { times, .. } => *times = times.saturating_add(1),
        }
    }

    /// Takes one [`Clocks::pause`] back; without one it does nothing.
    pub fn resume(&mut self, now: Instant) {
        if let Idle::Paused { left, times } = &mut self.running {
            *times -= 1;
            if *times == 0 {
                self.running = Idle::Until(self.idle.and(now.checked_add(*left)));
            }
        }
    }

    /// When the next clock runs out, and which. The earlier one; at the same time `Max`.
    pub fn deadline(&self) -> Option<(Instant, Clock)> {
        let idle = match self.running {
            Idle::Until(at) => at.map(|at| (at, Clock::Idle)),
            Idle::Paused { .. } => None,
        };
        match (idle, self.max) {
            (Some(idle), Some(max)) if idle.0 < max => Some(idle),
            (_, Some(max)) => Some((max, Clock::Max)),
            (idle, None) => idle,
        }
    }

    /// The clock that has run out, if one has: of both, the one that did so first.
    pub fn expired(&self, now: Instant) -> Option<Clock> {
        self.deadline().filter(|(at, _)| *at <= now).map(|(_, clock)| clock)
    }
}

/// What a node's time limit leaves of the maximum: `limit` − min(2 s, `limit` / 10) − `elapsed`, so that the
/// sidecar's error still reaches the node. Zero: the time is already over. It only ever lowers the
/// upstream's own maximum; the caller takes the smaller one.
pub fn time_limit(limit: Duration, elapsed: Duration) -> Duration {
    let reserve = (limit / 10).min(Duration::from_secs(2));
    limit.saturating_sub(reserve).saturating_sub(elapsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn progress_resets_the_idle_clock_and_never_the_maximum() {
        let start = Instant::now();
        let mut clocks = Clocks::new(start, Some(millis(500)), Some(millis(2000)));
        for at in [400, 800, 1200] {
            assert_eq!(clocks.expired(start + millis(at)), None);
            clocks.message(start + millis(at));
        }
        assert_eq!(clocks.expired(start + millis(1500)), None);
        clocks.message(start + millis(1600));
        clocks.message(start + millis(1999));
        assert_eq!(clocks.expired(start + millis(1999)), None);
        assert_eq!(clocks.deadline(), Some((start + millis(2000), Clock::Max)));
        assert_eq!(clocks.expired(start + millis(2000)), Some(Clock::Max));
    }

    #[test]
    fn silence_runs_the_idle_clock_out_to_the_millisecond() {
        let start = Instant::now();
        let mut clocks = Clocks::new(start, Some(millis(500)), Some(millis(2000)));
        clocks.message(start + millis(100));
        assert_eq!(clocks.expired(start + millis(599)), None);
        assert_eq!(clocks.expired(start + millis(600)), Some(Clock::Idle));
    }

    #[test]
    fn the_earlier_deadline_wins_and_at_a_tie_the_maximum() {
        let start = Instant::now();
        let late = start + millis(10_000);
        let clocks = |idle, max| Clocks::new(start, Some(millis(idle)), Some(millis(max)));
        assert_eq!(clocks(500, 501).expired(late), Some(Clock::Idle));
        assert_eq!(clocks(501, 500).expired(late), Some(Clock::Max));
        assert_eq!(clocks(500, 500).expired(late), Some(Clock::Max));
    }

    #[test]
    fn the_idle_clock_stands_still_while_paused_and_the_maximum_does_not() {
        let start = Instant::now();
        let mut clocks = Clocks::new(start, Some(millis(500)), Some(millis(2000)));
        clocks.pause(start + millis(300));
        assert_eq!(clocks.deadline(), Some((start + millis(2000), Clock::Max)));
        assert_eq!(clocks.expired(start + millis(1500)), None);
        clocks.resume(start + millis(1500));
        assert_eq!(clocks.deadline(), Some((start + millis(1700), Clock::Idle)));
        clocks.pause(start + millis(1600));
        assert_eq!(clocks.expired(start + millis(2000)), Some(Clock::Max));
    }

    #[test]
    fn pauses_nest_and_a_message_during_one_counts_in_full_after_it() {
        let start = Instant::now();
        let mut clocks = Clocks::new(start, Some(millis(500)), None);
        clocks.pause(start + millis(100));
        clocks.pause(start + millis(200));
        clocks.resume(start + millis(1000));
        assert_eq!(clocks.deadline(), None);
        clocks.message(start + millis(1100));
        clocks.resume(start + millis(2000));
        assert_eq!(clocks.deadline(), Some((start + millis(2500), Clock::Idle)));
        clocks.resume(start + millis(2100));
        assert_eq!(clocks.deadline(), Some((start + millis(2500), Clock::Idle)));
    }

    #[test]
    fn clocks_that_are_off_or_beyond_time_never_run_out() {
        let start = Instant::now();
        for duration in [None, Some(Duration::MAX)] {
            let mut clocks = Clocks::new(start, duration, duration);
            clocks.message(start);
            clocks.pause(start);
            clocks.resume(start + millis(1));
            assert_eq!(clocks.deadline(), None);
            assert_eq!(clocks.expired(start + Duration::from_secs(1 << 30)), None);
        }
    }

    #[test]
    fn a_time_limit_leaves_a_tenth_but_no_more_than_two_seconds() {
        assert_eq!(time_limit(millis(10_000), millis(0)), millis(9000));
        assert_eq!(time_limit(millis(60_000), millis(1000)), millis(57_000));
        assert_eq!(time_limit(millis(1000), millis(900)), Duration::ZERO);
        assert_eq!(time_limit(millis(1000), millis(5000)), Duration::ZERO);
    }
}
