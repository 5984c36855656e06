//! The progress tokens of a stream, and the rate of each.

use std::time::Duration;

use tokio::time::Instant;

use crate::{message::Id, relay::Settings};

/// The progress tokens of a stream that were seen last.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    pub(super) remembered: Vec<Token>,
    /// The one looked up last.
    current: usize,
    lookups: u64,
}

#[derive(Debug)]
pub(super) struct Token {
    pub(super) id: Id,
    /// Names the token in items; never given twice.
    pub(super) serial: u64,
    used: u64,
    /// The highest value taken.
    pub(super) newest: Option<f64>,
    /// When its newest item may go out, if it had to wait.
    pub(super) release: Option<Instant>,
    /// The token bucket, as a debt that time pays off: each event that is let through adds an interval.
    debt: Duration,
    at: Option<Instant>,
}

/// A stream has one token in modern and few in legacy; a bound keeps an upstream from growing this at will.
/// A token that was forgotten begins anew: full burst, any value.
pub(super) const MAX_TOKENS: usize = 64;

impl Tokens {
    pub(super) fn of(&mut self, id: Id) -> &mut Token {
        self.lookups += 1;
        if self.remembered.get(self.current).is_none_or(|token| token.id != id) {
            self.current = match self.remembered.iter().position(|token| token.id == id) {
                Some(index) => index,
                None => self.remember(id),
            };
        }
        let token = &mut self.remembered[self.current];
        token.used = self.lookups;
        token
    }

    /// The one looked up last.
    pub(super) fn current(&mut self) -> &mut Token {
        &mut self.remembered[self.current]
    }

    /// The same, if this is its id.
    pub(super) fn current_of(&mut self, id: &Id) -> Option<&mut Token> {
        self.remembered.get_mut(self.current).filter(|token| token.id == *id)
    }

    fn remember(&mut self, id: Id) -> usize {
        let used = self.lookups;
        let token =
            Token { id, serial: used, used, newest: None, release: None, debt: Duration::ZERO, at: None };
        if self.remembered.len() < MAX_TOKENS {
            self.remembered.push(token);
            return self.remembered.len() - 1;
        }
        let oldest = self.remembered.iter().enumerate().min_by_key(|(_, token)| token.used);
        let oldest = oldest.map_or(0, |(index, _)| index);
        self.remembered[oldest] = token;
        oldest
    }
}

impl Token {
    /// Takes one event from the bucket; gives when it may go out, `None` for at once. Never more than an
    /// interval away: what was let out before its time is not paid for twice.
    pub(super) fn draw(&mut self, settings: &Settings, now: Instant) -> Option<Instant> {
        let interval = settings.min_interval;
        let free = interval.saturating_mul(settings.burst.saturating_sub(1));
        let passed = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let debt = self.debt.saturating_sub(passed).min(free.saturating_add(interval));
        let wait = debt.saturating_sub(free);
        self.debt = debt.saturating_add(interval);
        self.at = Some(now);
        self.release = if wait.is_zero() { None } else { now.checked_add(wait) };
        self.release
    }
}
