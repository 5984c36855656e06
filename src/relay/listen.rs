//! A `subscriptions/listen` stream that heals: dropped by its upstream after its acknowledgement, it is asked for again,
//! and its node sees one subscription throughout.
//!
//! Words: each stream after the first is *reopened*, under an id of the sidecar's own. It counts once its
//! acknowledgement has come; an attempt that brings none is *dropped* like any other. What was missed meanwhile nobody
//! knows, so each thing that the first acknowledgement granted is told as *changed*, and the node fetches it again.
//!
//! Decides and keeps count; the pump of [`super::stream`] reads, queues and polls. Asking is `proxy`'s.

mod backoff;

use std::{
    future::Future as _,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::{Instant, Sleep, sleep, timeout};

use self::backoff::Backoff;
use super::{
    decode::Decoder,
    sse::{self, Event},
};
use crate::{
    error::Failure,
    limits::Held,
    message::{
        Id,
        subscription::{self, Filter, Said},
    },
    proxy::Asking,
    store::BoxFuture,
    upstream,
};

/// How long an attempt may take to bring its acknowledgement, which is the first thing that a server says: one that
/// says nothing counts as dropped.
const ANSWER: Duration = Duration::from_secs(30);
/// A subscription that has this many bytes to be remembered by is not: its node listens again itself.
const REMEMBERED: usize = 64 * 1024;

/// How the listen streams of one upstream are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether a dropped one is asked for again.
    pub reconnect: bool,
    /// For how long, from each drop on.
    pub give_up: Duration,
}

/// What came of asking again.
#[derive(Debug)]
pub enum Answer {
    /// An event stream, and what decodes it.
    Stream(upstream::Body, Option<Decoder>),
    /// Not now.
    Later {
        /// What happened.
        why: String,
        /// The wait that the upstream named.
        wait: Option<Duration>,
    },
    /// No: asking again would bring the same.
    Never(String),
}

/// One attempt: it waits, then asks. Dropping it ends it.
pub(super) type Attempt = BoxFuture<'static, Answer>;

/// One subscription, for as long as its node listens.
#[derive(Debug)]
pub struct Listen {
    asking: Arc<Asking>,
    give_up: Duration,
    /// The node's id.
    id: Id,
    /// The id of the stream at hand, where it is the sidecar's own.
    own: Option<Id>,
    /// What the first acknowledgement granted.
    granted: Option<Filter>,
    phase: Phase,
    backoff: Backoff,
    /// The wait that the upstream named last.
    named: Option<Duration>,
    /// How many changes were told since the last acknowledgement; `None`: all.
    told: Option<usize>,
    /// The next one to tell.
    change: Option<Event>,
    held: Held,
}

#[derive(Debug)]
enum Phase {
    /// No acknowledgement has come yet.
    Opening,
    /// It was acknowledged then.
    Open(Instant),
    /// It was dropped then, and a stream in its place is not acknowledged yet.
    Dropped {
        at: Instant,
        /// When the stream that is there must have been acknowledged.
        by: Option<Pin<Box<Sleep>>>,
    },
    /// Its end was told, or it can't be had again.
    Over,
}

/// What the pump does with an event.
#[derive(Debug)]
pub(super) enum Look {
    /// Relays it.
    Pass(Event),
    /// Keeps it to itself.
    Keep,
    /// Ends the node's stream: the subscription is not what it was.
    End,
}

impl Listen {
    /// A subscription that may be asked for again. `held` counts what it is remembered by.
    pub fn new(asking: Arc<Asking>, id: Id, give_up: Duration, mut held: Held) -> Self {
        held.set(asking.size());
        let phase = if asking.size() > REMEMBERED { Phase::Over } else { Phase::Opening };
        Self {
            asking,
            give_up,
            id,
            own: None,
            granted: None,
            phase,
            backoff: Backoff::default(),
            named: None,
            told: None,
            change: None,
            held,
        }
    }

    /// Whether the end of the stream at hand is no end for the node.
    pub(super) fn heals(&self) -> bool {
        matches!(self.phase, Phase::Open(_) | Phase::Dropped { .. })
    }

    /// The stream is at its end, `why` says how: the attempt that is made now, or `None` if the node's stream ends too.
    pub(super) fn again(&mut self, why: &str, now: Instant) -> Option<Attempt> {
        let at = match self.phase {
            Phase::Open(since) => {
                self.backoff.was_healthy(now - since);
                now
            }
            Phase::Dropped { at, .. } => at,
            Phase::Opening | Phase::Over => return None,
        };
        let upstream = self.asking.upstream();
        let named = self.named.take().unwrap_or_default();
        let left = (at + self.give_up).saturating_duration_since(now);
        let room = left.checked_sub(named).filter(|_| left > backoff::FIRST || now == at);
        let Some(room) = room else {
            tracing::info!(
                upstream,
                attempts = self.backoff.attempts(),
                why,
                "a dropped subscription is given up"
            );
            self.phase = Phase::Over;
            return None;
        };
        let wait = named + self.backoff.next(room, fastrand::f64());
        let attempt = self.backoff.attempts();
        tracing::debug!(upstream, attempt, ?wait, why, "a subscription was dropped, listening again");
        self.phase = Phase::Dropped { at, by: None };
        let id = Id::string(&format!("mcp-sidecar/listen/{:032x}", fastrand::u128(..)));
        self.own = Some(id.clone());
        let asking = self.asking.clone();
        let limit = left.saturating_sub(wait).clamp(backoff::FIRST, ANSWER);
        Some(Box::pin(async move {
            sleep(wait).await;
            let late = |_| Answer::Later { why: "no answer in time".to_owned(), wait: None };
            timeout(limit, asking.ask(&id)).await.unwrap_or_else(late)
        }))
    }

    /// Takes what an attempt brought: the stream.
    ///
    /// # Errors
    ///
    /// There is none: it counts as dropped once more, or [`Listen::heals`] no longer.
    pub(super) fn reopened(&mut self, answer: Answer) -> Result<(upstream::Body, Option<Decoder>), Failure> {
        match answer {
            Answer::Stream(body, decoder) => {
                if let Phase::Dropped { at, by } = &mut self.phase {
                    let left = (*at + self.give_up).saturating_duration_since(Instant::now());
                    *by = Some(Box::pin(sleep(left.clamp(backoff::FIRST, ANSWER))));
                }
                Ok((body, decoder))
            }
            Answer::Later { why, wait } => {
                self.named = wait;
                Err(Failure::upstream(why))
            }
            Answer::Never(why) => {
                tracing::info!(
                    upstream = self.asking.upstream(),
                    why,
                    "a dropped subscription can't be had again"
                );
                self.phase = Phase::Over;
                Err(Failure::upstream(why))
            }
        }
    }

    /// Ready when the stream that was reopened should have been acknowledged.
    pub(super) fn poll_overdue(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.phase {
            Phase::Dropped { by: Some(by), .. } => by.as_mut().poll(cx),
            _ => Poll::Pending,
        }
    }

    /// Looks at the stream's next event.
    pub(super) fn see(&mut self, mut event: Event, now: Instant) -> Look {
        let said = event.data.as_deref().and_then(subscription::look);
        if self.own.is_some() && matches!(self.phase, Phase::Dropped { .. }) {
            // A byte-order mark belongs to the start of a stream, and the node's has long begun.
            event.prefix = Bytes::new();
        }
        match said {
            Some(Said::Acknowledged(granted)) => {
                let granted = granted.unwrap_or_else(|| self.asking.filter().clone());
                match self.phase {
                    Phase::Opening => self.granted(granted, now),
                    Phase::Dropped { at, .. } => return self.granted_again(&granted, at, now),
                    Phase::Open(_) | Phase::Over if self.own.is_some() => return Look::Keep,
                    Phase::Open(_) | Phase::Over => {}
                }
            }
            Some(Said::Cancelled(Some(id))) if id == *self.own.as_ref().unwrap_or(&self.id) => {
                self.phase = Phase::Over;
            }
            Some(Said::Cancelled(_)) | None => {}
        }
        Look::Pass(self.renamed(event))
    }

    /// The event under the node's id.
    pub(super) fn renamed(&self, event: Event) -> Event {
        let Some((own, data)) = self.own.as_ref().zip(event.data.as_ref()) else { return event };
        let Some(renamed) = subscription::rename(data, own, &self.id) else { return event };
        let mut lines = sse::fields(&event.bytes).filter(|(field, _)| *field == b"data");
        match (lines.next(), lines.next()) {
            (Some((_, value)), None) => {
                let parts = [&event.bytes[..value.start], &renamed, &event.bytes[value.end..]];
                Event { bytes: parts.concat().into(), data: Some(renamed), ..event.clone() }
            }
            _ => event.with_data(renamed),
        }
    }

    fn granted(&mut self, granted: Filter, now: Instant) {
        let size = self.asking.size() + granted.size();
        let again = granted.is_plain() && size <= REMEMBERED;
        self.phase = if again { Phase::Open(now) } else { Phase::Over };
        if again {
            self.held.set(size);
            self.granted = Some(granted);
        }
    }

    fn granted_again(&mut self, granted: &Filter, dropped: Instant, now: Instant) -> Look {
        let upstream = self.asking.upstream();
        if !self.granted.as_ref().is_some_and(|before| granted.covers(before)) {
            tracing::info!(upstream, "a dropped subscription was granted less than before");
            self.phase = Phase::Over;
            return Look::End;
        }
        let attempt = self.backoff.attempts();
        tracing::info!(upstream, attempt, after = ?(now - dropped), "a dropped subscription is back");
        self.phase = Phase::Open(now);
        self.told = Some(0);
        Look::Keep
    }

    /// The next change that the node has to be told before anything else, if there is one; it stays until it is
    /// [taken](Listen::take_change).
    pub(super) fn change(&mut self) -> Option<&Event> {
        if let (None, Some(told)) = (&self.change, self.told) {
            let change = self.granted.as_ref().and_then(|granted| granted.change(told, &self.id));
            self.told = change.is_some().then_some(told + 1);
            self.change = change.map(|json| {
                let bytes = Bytes::from([b"event: message\ndata: ", &json[..], b"\n\n"].concat());
                Event { bytes, data: Some(json.into()), ..Event::default() }
            });
        }
        self.change.as_ref()
    }

    /// Takes it.
    pub(super) fn take_change(&mut self) -> Option<Event> {
        self.change.take()
    }
}
