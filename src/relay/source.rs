//! What the events of one stream mean to its relay: which is the response, what is progress and whose, what a server
//! asks.

use std::sync::Arc;

use super::{queue::Class, sse::Event};
use crate::{
    account::Outcome,
    exchange,
    ledger::Ledger,
    message::{
        Era, Id,
        answer::{self, Answer},
    },
};

/// Bytes of a progress token that is remembered, unless the node chose it.
const LONGEST_TOKEN: usize = 1024;

/// What is known of the stream's content so far.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) era: Era,
    /// The node's progress token.
    pub(super) token: Option<Id>,
    /// The progress token that the sidecar added: what names it is kept back.
    pub(super) added: Option<Id>,
    /// Knows the tokens that sidecars on its store add.
    pub(super) ledger: Arc<Ledger>,
    pub(super) awaited: Vec<Id>,
    /// Which of them have had theirs.
    pub(super) had: Vec<Id>,
    pub(super) endless: bool,
    /// The node has an event id to resume from (legacy). An empty one takes it away (WHATWG HTML § 9.2.6).
    pub(super) ids_seen: bool,
    /// Every awaited response has come.
    pub(super) answered: bool,
}

/// What one event means to the pump.
pub(super) struct Seen {
    pub(super) class: Option<Class>,
    pub(super) event: Event,
    pub(super) outcome: Option<Outcome>,
    pub(super) message: bool,
    pub(super) asks: Option<Id>,
    /// The response that it holds.
    pub(super) response: Option<answer::Response>,
    /// Progress of the request: value, total, and the resume token that came with it.
    pub(super) progress: Option<(f64, Option<f64>, Option<String>)>,
    /// Progress on a `GET`, and its token: a call's whose stream ended before its response, perhaps.
    pub(super) parked: Option<(Id, answer::Progress)>,
    /// Progress that only the sidecar asked for.
    pub(super) kept_back: bool,
    pub(super) forged: u64,
}

impl Source {
    /// Looks at one event.
    pub(super) fn see(&mut self, event: Event) -> Seen {
        let mut seen = Seen {
            class: Some(Class::Kept),
            event,
            outcome: None,
            message: false,
            asks: None,
            response: None,
            progress: None,
            parked: None,
            kept_back: false,
            forged: 0,
        };
        let answer = seen.event.data.as_deref().and_then(answer::look);
        let Some(answer) = answer else { return seen };
        seen.message = true;
        match answer {
            Answer::Response(response) => self.response(&mut seen, response),
            Answer::Batch(answers) => {
                if let Some(forged) = answers.iter().find_map(Answer::forged) {
                    seen.cut_forged(forged);
                }
                let before = self.awaited.len();
                for answer in &answers {
                    if let Answer::Response(response) = answer {
                        self.awaited.retain(|id| response.id.as_ref() != Some(id));
                    }
                }
                if self.awaited.len() < before {
                    self.all_answered(&mut seen, Outcome::Ok);
                }
            }
            Answer::Request { id, .. } if self.era == Era::Legacy => seen.asks = Some(id),
            Answer::Progress(progress) => self.progress(&mut seen, progress),
            Answer::Request { .. } | Answer::Notification(_) => {}
        }
        seen
    }

    fn response(&mut self, seen: &mut Seen, response: answer::Response) {
        if response.forged {
            seen.cut_forged(&response);
            // Its parts lie elsewhere now.
            seen.response = match seen.event.data.as_deref().and_then(answer::look) {
                Some(Answer::Response(response)) => Some(response),
                _ => None,
            };
        } else {
            seen.response = Some(response.clone());
        }
        if response.id.as_ref().is_some_and(|id| self.had.contains(id)) {
            // A second answer to the same request: the first one stands, what comes later is not sent.
            seen.response = None;
            seen.class = None;
            seen.kept_back = true;
            return;
        }
        let before = self.awaited.len();
        self.awaited.retain(|id| response.id.as_ref() != Some(id));
        if self.awaited.len() < before {
            self.had.extend(response.id.clone());
            let outcome = exchange::outcome(Some(&Answer::Response(response)));
            self.all_answered(seen, outcome);
        }
    }

    /// Whether this is, or holds, a response that the stream is there for; on a `GET` that may be any.
    pub(super) fn awaits(&self, answer: &Answer) -> bool {
        match answer {
            Answer::Response(response) if self.endless && self.awaited.is_empty() => response.id.is_some(),
            Answer::Response(response) => response.id.as_ref().is_some_and(|id| self.awaited.contains(id)),
            Answer::Batch(answers) => answers.iter().any(|answer| self.awaits(answer)),
            _ => false,
        }
    }

    fn all_answered(&mut self, seen: &mut Seen, outcome: Outcome) {
        if self.awaited.is_empty() && !self.answered {
            self.answered = true;
            seen.class = Some(Class::Final);
            seen.outcome = Some(outcome);
        }
    }

    /// Whether progress passes at all; that its values must rise is the queue's rule.
    fn progress(&mut self, seen: &mut Seen, progress: answer::Progress) {
        let added = progress.token.is_some() && progress.token == self.added;
        let asked = progress.token.is_some() && progress.token == self.token;
        let others = || progress.token.as_ref().is_some_and(|token| self.ledger.is_own_token(token));
        seen.kept_back = !asked && (added || others());
        let own = added || asked;
        if self.endless && self.awaited.is_empty() {
            seen.parked = progress.token.clone().map(|token| (token, progress.clone()));
        }
        if own && !self.answered {
            seen.progress = progress.progress.map(|value| (value, progress.total, progress.resume));
        }
        let stray = seen.kept_back || self.era == Era::Modern && (self.answered || !own);
        seen.class = match progress.token {
            _ if stray => None,
            // It is remembered for as long as the stream lasts: one that nobody would choose is not.
            Some(token) if !asked && token.token().len() > LONGEST_TOKEN => Some(Class::Kept),
            Some(token) => Some(Class::Progress { token, progress: progress.progress }),
            None => Some(Class::Kept),
        };
    }
}

impl Seen {
    /// Cuts out what only the sidecar may say.
    fn cut_forged(&mut self, response: &answer::Response) {
        let Some(data) = &self.event.data else { return };
        let (cut, count) = answer::cut_forged(data, response);
        if count > 0 {
            self.event = self.event.with_data(cut);
            self.forged = count as u64;
        }
    }
}
