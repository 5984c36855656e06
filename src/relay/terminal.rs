//! How an exchange ended: one terminal state, and the first one wins.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::message::Era;

/// The state of an exchange. All but `Running` are terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has not ended.
    Running,
    /// The response has been written to the node.
    Completed,
    /// The node, an operator, a policy or a drain ended it.
    Cancelled,
    /// No useful activity for too long.
    IdleTimeout,
    /// It took too long, whatever happened.
    MaxTimeout,
    /// The upstream, or the way to it, failed.
    Failed,
}

/// The terminal state of one exchange. Shared by everyone who may end it; never waits.
#[derive(Debug, Default)]
pub struct Terminal(AtomicU8);

impl Terminal {
    /// An exchange that runs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the exchange. True for exactly one caller, the first; who gets false was too late, and what it
    /// had to say is not sent. `Running` ends nothing.
    pub fn end(&self, state: State) -> bool {
        state != State::Running
            && self.0.compare_exchange(RUNNING, code(state), Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The state now.
    pub fn state(&self) -> State {
        ENDS.into_iter().find(|end| code(*end) == self.0.load(Ordering::Acquire)).unwrap_or(State::Running)
    }

    /// Whether it has ended.
    pub fn ended(&self) -> bool {
        self.state() != State::Running
    }
}

const RUNNING: u8 = 0;

const ENDS: [State; 5] =
    [State::Completed, State::Cancelled, State::IdleTimeout, State::MaxTimeout, State::Failed];

fn code(state: State) -> u8 {
    match state {
        State::Running => RUNNING,
        State::Completed => 1,
        State::Cancelled => 2,
        State::IdleTimeout => 3,
        State::MaxTimeout => 4,
        State::Failed => 5,
    }
}

/// What tells the other end that a request is no longer wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The request's response stream is closed, and nothing is POSTed (MCP 2026-07-28, Streamable HTTP § Cancellation).
    CloseStream,
    /// `notifications/cancelled` naming the request; over HTTP the stream is closed after it.
    Notification,
}

impl Signal {
    /// Over stdio, in either era: one channel is shared, so there is no stream to close.
    pub const STDIO: Self = Self::Notification;
}

/// The signal over Streamable HTTP.
pub fn signal(era: Era) -> Signal {
    match era {
        Era::Modern => Signal::CloseStream,
        Era::Legacy => Signal::Notification,
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use tokio::time::Instant;

    use super::*;
    use crate::relay::clocks::{Clock, Clocks};

    /// One request as the orderings below see it: what went out, and what was ignored.
    #[derive(Debug)]
    struct Request {
        terminal: Terminal,
        clocks: Clocks,
        signal: Signal,
        response: bool,
        on_the_wire: Option<Signal>,
        ignored: Vec<&'static str>,
    }

    impl Request {
        fn start(now: Instant, signal: Signal) -> Self {
            Self {
                terminal: Terminal::new(),
                clocks: Clocks::new(now, Some(Duration::from_millis(500)), Some(Duration::from_secs(2))),
                signal,
                response: false,
                on_the_wire: None,
                ignored: Vec::new(),
            }
        }

        fn complete(&mut self) {
            if self.terminal.end(State::Completed) {
                self.response = true;
            } else {
                self.ignored.push("response");
            }
        }

        fn cancel(&mut self) {
            if self.terminal.end(State::Cancelled) {
                self.on_the_wire = Some(self.signal);
            } else {
                self.ignored.push("cancellation");
            }
        }

        fn progress(&mut self, now: Instant) {
            self.tick(now);
            if self.terminal.ended() {
                self.ignored.push("progress");
            } else {
                self.clocks.message(now);
            }
        }

        fn tick(&mut self, now: Instant) {
            let state = match self.clocks.expired(now) {
                None => return,
                Some(Clock::Idle) => State::IdleTimeout,
                Some(Clock::Max) => State::MaxTimeout,
            };
            if self.terminal.end(state) {
                self.on_the_wire = Some(self.signal);
            }
        }
    }

    #[test]
    fn a_cancelled_before_it_completes_gives_no_response() {
        let mut a = Request::start(Instant::now(), signal(Era::Legacy));
        a.cancel();
        a.complete();
        assert_eq!(a.terminal.state(), State::Cancelled);
        assert!(!a.response);
        assert_eq!(a.on_the_wire, Some(Signal::Notification));
        assert_eq!(a.ignored, ["response"]);
    }

    #[test]
    fn b_completed_before_the_cancellation_keeps_its_response() {
        let mut b = Request::start(Instant::now(), signal(Era::Modern));
        b.complete();
        b.cancel();
        assert_eq!(b.terminal.state(), State::Completed);
        assert!(b.response);
        assert_eq!(b.on_the_wire, None);
        assert_eq!(b.ignored, ["cancellation"]);
    }

    #[test]
    fn c_with_progress_before_every_idle_deadline_ends_at_the_maximum() {
        let start = Instant::now();
        let mut c = Request::start(start, signal(Era::Modern));
        for millis in [400, 800, 1200, 1600, 1999] {
            c.progress(start + Duration::from_millis(millis));
            assert_eq!(c.terminal.state(), State::Running);
        }
        c.tick(start + Duration::from_secs(2));
        c.progress(start + Duration::from_millis(2001));
        c.complete();
        assert_eq!(c.terminal.state(), State::MaxTimeout);
        assert!(!c.response);
        assert_eq!(c.on_the_wire, Some(Signal::CloseStream));
        assert_eq!(c.ignored, ["progress", "response"]);
    }

    #[test]
    fn d_is_cancelled_by_closing_its_stream_over_http_and_by_a_message_over_stdio() {
        for (over, expected) in
            [(signal(Era::Modern), Signal::CloseStream), (Signal::STDIO, Signal::Notification)]
        {
            let mut d = Request::start(Instant::now(), over);
            d.cancel();
            d.complete();
            assert_eq!(d.terminal.state(), State::Cancelled);
            assert!(!d.response);
            assert_eq!(d.on_the_wire, Some(expected));
            assert_eq!(d.ignored, ["response"]);
        }
    }

    #[test]
    fn the_first_end_wins_whatever_it_is() {
        for first in ENDS {
            let terminal = Terminal::new();
            assert!(!terminal.end(State::Running));
            assert!(!terminal.ended());
            assert!(terminal.end(first));
            for later in ENDS {
                assert!(!terminal.end(later));
                assert_eq!(terminal.state(), first);
            }
        }
    }

    #[test]
    fn of_many_that_end_it_at_once_exactly_one_wins() {
        for _ in 0..100 {
            let terminal = Arc::new(Terminal::new());
            let start = Arc::new(std::sync::Barrier::new(ENDS.len()));
            let enders = ENDS.map(|end| {
                let (terminal, start) = (Arc::clone(&terminal), Arc::clone(&start));
                std::thread::spawn(move || {
                    start.wait();
                    terminal.end(end).then_some(end)
                })
            });
            let winners: Vec<_> = enders.into_iter().filter_map(|ender| ender.join().unwrap()).collect();
            assert_eq!(winners, [terminal.state()]);
        }
    }
}
