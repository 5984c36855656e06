//! What the ledger holds under one key, and what it says to the next attempt: pure, one function a
//! rule. Times come as arguments (milliseconds of the store's clock).

use serde::{Deserialize, Serialize};

use crate::{listing::RetryClass, message::Era};

/// How the last attempt under a key ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// An attempt runs, or its lease has not run out yet.
    Running,
    /// A result was committed.
    Done,
    /// 429: nothing was made.
    Busy,
    /// 503 that names a wait: what was made is not sure.
    BusyUnavailable,
    /// Not one byte was sent.
    NotSent,
    /// `input_required`: the next leg goes on.
    Waiting,
    /// The upstream answered with an error: it may be sent again.
    Failed,
    /// Broken off, 5xx, timed out, cancelled, or its lease ran out.
    Unknown,
}

/// What the store keeps under a key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The tool.
    pub function: String,
    /// The digest of its arguments.
    pub digest: String,
    /// How the last attempt stands.
    pub state: State,
    /// Attempts so far.
    pub attempts: u64,
    /// Who runs it: a token that only one attempt has.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub owner: String,
    /// Until when the running attempt may go on without renewal.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lease: u64,
    /// A result was committed by an earlier attempt than the last one: a call that is done stays so, however it goes when it is
    /// sent again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub committed: bool,
    /// The last progress of any attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Reached>,
    /// Where the next attempt may go on from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume: Option<Resume>,
    /// A resume token came that is none, and no good one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub invalid_token: bool,
}

/// How far an attempt got.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reached {
    /// The value of the last progress.
    pub progress: f64,
    /// Its total.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<f64>,
}

/// A resume token and where it stands; readable only for the principal whose attempt it came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resume {
    /// The token.
    pub token: String,
    /// The progress it came with.
    pub at: Reached,
    /// A keyed hash of the node's credential.
    pub principal: String,
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// An attempt that asks to run.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The tool.
    pub function: String,
    /// The digest of its arguments.
    pub digest: String,
    /// Who asks.
    pub owner: String,
    /// A keyed hash of the node's credential.
    pub principal: String,
    /// Its era: a result is replayed only in the one it was made for.
    pub era: Era,
    /// The retry class of the tool.
    pub class: RetryClass,
    /// The tool only reads: it is sent, never replayed.
    pub read_only: bool,
    /// The tool was seen in a listing, or the configuration names it.
    pub listed: bool,
    /// The tool is not the one that was approved: only a first attempt may be sent.
    pub changed: bool,
    /// The node's own count of attempts.
    pub number: Option<u64>,
    /// It goes on with an MRTR exchange: no new attempt.
    pub leg: bool,
    /// It is a legacy call with `params.task`: its result is a task's handle.
    pub task: bool,
    /// How long it may run without renewal, milliseconds.
    pub lease: u64,
}

/// What the ledger says.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Send it.
    Run(Go),
    /// The tool has changed since it was approved, and this is no first attempt.
    Changed,
    /// The same key stands for another call.
    Mismatch,
    /// Another attempt runs under the key: busy.
    Busy,
    /// There is no room for a new key: busy.
    Full,
    /// It is done, and its result is held: answer it again.
    Replay,
    /// Reconcile first: an earlier attempt of an unsafe call may have been made.
    OutcomeUnknown,
    /// It is done, and its result is not held any more.
    AlreadyDone,
}

/// What an attempt goes with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Go {
    /// Which attempt it is, from 1.
    pub attempt: u64,
    /// The ledger knew the key.
    pub known: bool,
    /// How far the attempts before got.
    pub progress: Option<Reached>,
    /// Where it may go on from.
    pub resume: Option<Resume>,
    /// Only tokens came that are none.
    pub invalid_token: bool,
}

/// Decides about an attempt, in one atomic step with the store: gives the verdict and, if it may run, the entry that
/// stands from then on. `room`: a new key may be stored. `held`: a committed result that may be replayed to this attempt
/// is held (asked only where the key is done).
pub fn claim(
    entry: Option<&Entry>,
    attempt: &Attempt,
    now: u64,
    room: bool,
    held: bool,
) -> (Verdict, Option<Entry>) {
    // A leg of the first attempt is no second one.
    let goes_on = |entry: &Entry| attempt.leg && entry.state == State::Waiting && entry.attempts <= 1;
    let again = entry.is_some_and(|entry| !goes_on(entry));
    if attempt.changed && (again || attempt.number.is_some_and(|number| number >= 2)) {
        return (Verdict::Changed, None);
    }
    let Some(entry) = entry else {
        if !room {
            return (Verdict::Full, None);
        }
        let number = attempt.number.unwrap_or(1);
        let go = Go { attempt: number, ..Go::default() };
        return (Verdict::Run(go), Some(attempt.first(number, now)));
    };
    if entry.function != attempt.function || entry.digest != attempt.digest {
        return (Verdict::Mismatch, None);
    }
    let state = entry.state_at(now);
    match state {
        State::Running => return (Verdict::Busy, None),
        State::Done if !attempt.read_only => {
            if held {
                return (Verdict::Replay, None);
            }
            if attempt.class == RetryClass::Unsafe {
                return (Verdict::AlreadyDone, None);
            }
        }
        State::Unknown | State::BusyUnavailable if attempt.class == RetryClass::Unsafe && attempt.listed => {
            return (Verdict::OutcomeUnknown, None);
        }
        _ => {}
    }
    let resume = entry.resume.clone().filter(|resume| resume.principal == attempt.principal);
    let counted = if attempt.leg { entry.attempts.max(1) } else { entry.attempts.saturating_add(1) };
    let number = attempt.number.unwrap_or(counted);
    let go = Go {
        attempt: number,
        known: true,
        progress: entry.progress,
        resume,
        invalid_token: entry.invalid_token,
    };
    let next = Entry {
        state: State::Running,
        attempts: number.max(entry.attempts),
        owner: attempt.owner.clone(),
        lease: now + attempt.lease,
        committed: entry.committed || state == State::Done,
        ..entry.clone()
    };
    (Verdict::Run(go), Some(next))
}

impl Attempt {
    fn first(&self, number: u64, now: u64) -> Entry {
        Entry {
            function: self.function.clone(),
            digest: self.digest.clone(),
            state: State::Running,
            attempts: number,
            owner: self.owner.clone(),
            lease: now + self.lease,
            committed: false,
            progress: None,
            resume: None,
            invalid_token: false,
        }
    }
}

impl Entry {
    /// The state as it stands now: a running attempt whose lease has run out has an unknown end.
    pub fn state_at(&self, now: u64) -> State {
        match self.state {
            State::Running if now < self.lease => State::Running,
            State::Running if self.committed => State::Done,
            State::Running => State::Unknown,
            ended => ended,
        }
    }

    /// Whether `owner` still runs it. An attempt that lost its lease to another one has no say any more; one whose lease
    /// merely ran out still has.
    pub fn is_run_by(&self, owner: &str) -> bool {
        self.state == State::Running && self.owner == owner
    }

    /// Renews the lease of `owner`; `None` if it has none any more.
    pub fn renewed(&self, owner: &str, until: u64) -> Option<Self> {
        (self.is_run_by(owner)).then(|| Self { lease: until, ..self.clone() })
    }

    /// What `owner` has reported so far.
    pub fn reported(&self, owner: &str, report: &Report) -> Option<Self> {
        self.is_run_by(owner).then(|| report.on(self.clone()))
    }

    /// The end of `owner`'s attempt.
    pub fn finished(&self, owner: &str, state: State, report: &Report) -> Option<Self> {
        self.is_run_by(owner).then(|| {
            let mut entry = report.on(self.clone());
            entry.state = if self.committed { State::Done } else { state };
            entry.owner = String::new();
            entry.lease = 0;
            entry.committed = false;
            if entry.state == State::Done {
                entry.resume = None;
                entry.invalid_token = false;
            }
            entry
        })
    }
}

/// What one attempt's progress notifications said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The last value and total.
    pub progress: Option<Reached>,
    /// The last good resume token.
    pub resume: Option<Resume>,
    /// One came that is no token.
    pub invalid_token: bool,
}

impl Report {
    /// Takes one progress notification. A token that is none changes nothing about a good one before it.
    pub fn take(&mut self, at: Reached, token: Option<&str>, principal: &str) {
        self.progress = Some(at);
        match token {
            None => {}
            Some(token) if is_token(token) => {
                self.resume = Some(Resume { token: token.to_owned(), at, principal: principal.to_owned() });
            }
            Some(_) => self.invalid_token = true,
        }
    }

    fn on(&self, mut entry: Entry) -> Entry {
        if self.progress.is_some() {
            entry.progress = self.progress;
        }
        if self.resume.is_some() {
            entry.resume.clone_from(&self.resume);
        }
        entry.invalid_token = entry.resume.is_none() && (entry.invalid_token || self.invalid_token);
        entry
    }
}

/// 1 to 256 of letters, digits and `._:~+/=-`.
pub fn is_token(token: &str) -> bool {
    (1..=256).contains(&token.len())
        && token.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._:~+/=-".contains(&byte))
}

/// What attempt 2 and up says of how it began; the first reason that applies.
pub fn resume_text(go: &Go, may_be_made_again: bool, takes_part: bool) -> String {
    if let (Some(resume), true, true) = (&go.resume, may_be_made_again, takes_part) {
        let progress = text(resume.at.progress);
        return match resume.at.total {
            Some(total) => format!("resumed from progress {progress} of {}", text(total)),
            None => format!("resumed from progress {progress}"),
        };
    }
    let reason = match () {
        () if !may_be_made_again => "the call may not be made again",
        () if !takes_part => "the server does not take part",
        () if !go.known => "state lost",
        () if go.progress.is_none() => "no progress reported",
        () if go.invalid_token => "invalid token",
        () => "no token",
    };
    format!("started over: {reason}")
}

/// The same where the node sent an `oz0/resume` of its own: what that says.
pub fn own_resume_text(own: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Own {
        progress: f64,
    }
    match serde_json::from_slice::<Own>(own) {
        Ok(Own { progress }) => format!("resumed from progress {}", text(progress)),
        Err(_) => "started over: invalid token".to_owned(),
    }
}

/// A number as a person writes it: `2`, not `2.0`.
fn text(number: f64) -> String {
    // Rust's display of a whole double has no fraction. Nothing is no less than nothing.
    (number + 0.0).to_string()
}

#[cfg(test)]
mod tests;
