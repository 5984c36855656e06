//! The tools of the demo upstream: what they take and what they do.
//!
//! Each stops where it waits when its future is dropped. What a tool of the ledger has begun to commit is committed.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json, value::RawValue};
use tokio::{sync::mpsc, time::sleep};

use super::{
    control,
    export::Export,
    orders::{Order, Reconcile},
    rpc::{self, Step},
    search::Search,
    shared::Shared,
    stream::{Cut, Piece},
};

/// One call's work, its arguments checked.
#[derive(Debug)]
pub(super) enum Work {
    Echo(Echo),
    Add(Add),
    Slow(Slow),
    Busy(Busy),
    Flood(Flood),
    Silent(Silent),
    Order(Order),
    Reconcile(Reconcile),
    Search(Search),
    Export(Export),
}

#[derive(Debug, Deserialize)]
pub(super) struct Echo {
    text: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Add {
    a: f64,
    b: f64,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
pub(super) struct Slow {
    steps: u64,
    step_ms: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Busy {
    pub(super) status: u16,
    /// A number, or any text at all: the wrong ones are what a client has to be robust against.
    retry_after: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
pub(super) struct Flood {
    events: u64,
    bytes: usize,
    log_every: u64,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
pub(super) struct Silent {
    ms: u64,
    head: bool,
}

impl Default for Slow {
    fn default() -> Self {
        Self { steps: 4, step_ms: 100 }
    }
}

impl Default for Flood {
    fn default() -> Self {
        Self { events: 1000, bytes: 0, log_every: 0 }
    }
}

impl Default for Silent {
    fn default() -> Self {
        Self { ms: 1000, head: false }
    }
}

impl Busy {
    /// The value of `Retry-After`, as it was asked for.
    pub(super) fn retry_after(&self) -> Option<String> {
        self.retry_after.as_ref().and_then(control::header_text)
    }
}

/// How the answer of a call is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// One JSON body, its head with it when the work is done.
    Json,
    /// A stream whose head goes out at once.
    Stream,
}

/// Why a call is not made.
#[derive(Debug)]
pub(super) enum Refusal {
    /// A JSON-RPC error.
    UnknownTool,
    /// A tool result with `isError`, so that a model can mend it.
    Arguments(String),
}

impl Work {
    /// Reads a call.
    ///
    /// # Errors
    ///
    /// [`Refusal`]; nothing was done.
    pub(super) fn read(tool: &str, arguments: Option<Value>, meta: &rpc::Meta) -> Result<Self, Refusal> {
        let arguments = arguments.unwrap_or_else(|| json!({}));
        if let Some(order) = Order::read(tool, &arguments, meta.idempotency_key.as_deref()) {
            return order.map(Self::Order);
        }
        match tool {
            "echo" => typed(arguments).map(Self::Echo),
            "add" => typed(arguments).map(Self::Add),
            "slow" => typed(arguments).map(Self::Slow),
            "flood" => typed(arguments).map(Self::Flood),
            "silent" => typed(arguments).map(Self::Silent),
            "reconcile" => typed(arguments).map(Self::Reconcile),
            "search" => Search::read(arguments, meta.resume.as_ref()).map(Self::Search),
            "export" => Export::read(arguments).map(Self::Export),
            "busy" => match typed::<Busy>(arguments)? {
                busy if matches!(busy.status, 429 | 503) => Ok(Self::Busy(busy)),
                _ => Err(Refusal::Arguments("status is 429 or 503".to_owned())),
            },
            _ => Err(Refusal::UnknownTool),
        }
    }

    /// Its tool's name.
    pub(super) fn tool(&self) -> &'static str {
        match self {
            Self::Echo(_) => "echo",
            Self::Add(_) => "add",
            Self::Slow(_) => "slow",
            Self::Busy(_) => "busy",
            Self::Flood(_) => "flood",
            Self::Silent(_) => "silent",
            Self::Order(order) => order.tool(),
            Self::Reconcile(_) => "reconcile",
            Self::Search(_) => "search",
            Self::Export(_) => "export",
        }
    }

    /// A stream where progress is asked for, but for what promises to be silent.
    pub(super) fn form(&self, progress_asked: bool) -> Form {
        match self {
            Self::Silent(silent) if silent.head => Form::Stream,
            Self::Silent(_) => Form::Json,
            _ if progress_asked => Form::Stream,
            _ => Form::Json,
        }
    }

    /// Does it and gives the tool's result. Stops where it waits when dropped.
    ///
    /// # Errors
    ///
    /// It was cut on request, amid its progress.
    pub(super) async fn run(self, progress: &Progress, shared: &Arc<Shared>) -> Result<Value, Cut> {
        Ok(match self {
            Self::Echo(echo) => said(&echo.text),
            Self::Add(Add { a, b }) => add(a, b),
            Self::Slow(Slow { steps, step_ms }) => {
                for step in 1..=steps {
                    sleep(Duration::from_millis(step_ms)).await;
                    progress.report(Step { progress: step, total: steps, ..Step::default() }).await?;
                }
                said(&format!("{steps} steps done"))
            }
            Self::Flood(flood) => flood.run(progress).await?,
            Self::Silent(Silent { ms, .. }) => {
                sleep(Duration::from_millis(ms)).await;
                said(&format!("silent for {ms} ms"))
            }
            // Answered before there is a call; a result would be a lie.
            Self::Busy(busy) => failed(&format!("answered {}", busy.status)),
            Self::Order(order) => order.run(shared).await,
            Self::Reconcile(reconcile) => reconcile.run(shared).await,
            Self::Search(search) => search.run(progress).await?,
            Self::Export(export) => export.run(progress, shared).await?,
        })
    }
}

impl Flood {
    async fn run(self, progress: &Progress) -> Result<Value, Cut> {
        let message = "x".repeat(self.bytes.min(MESSAGE_BYTES));
        for event in 1..=self.events {
            let step = Step { progress: event, total: self.events, message: &message, resume: None };
            progress.report(step).await?;
            // Its connection may wait for this very thread.
            tokio::task::yield_now().await;
            if self.log_every > 0 && event % self.log_every == 0 {
                progress.log(&format!("{event} events sent")).await;
            }
        }
        Ok(said(&format!("{} events sent", self.events)))
    }
}

fn add(a: f64, b: f64) -> Value {
    const EXACT: f64 = 9_007_199_254_740_992.0; // 2^53: every whole number below it is one double
    let sum = a + b;
    if !sum.is_finite() {
        return failed("the sum is beyond the range of a double");
    }
    let mut result = said(&sum.to_string());
    let whole = sum.fract() == 0.0 && sum.abs() < EXACT;
    result["structuredContent"] = json!({ "sum": if whole { json!(sum as i64) } else { json!(sum) } });
    result
}

/// The largest message of a flood's event.
const MESSAGE_BYTES: usize = 1 << 20;

pub(super) fn typed<T: DeserializeOwned>(arguments: Value) -> Result<T, Refusal> {
    serde_json::from_value(arguments).map_err(|error| Refusal::Arguments(error.to_string()))
}

/// Where a call's progress goes.
#[derive(Debug)]
pub(super) struct Progress {
    pub(super) token: Option<Box<RawValue>>,
    /// The client asked for log messages.
    pub(super) logs: bool,
    /// The progress after which the call is cut.
    pub(super) cut_after: Option<u64>,
    pub(super) events: mpsc::Sender<Piece>,
}

impl Progress {
    /// Sends one notification, waiting while the client is slow. Where nobody asked, or nobody is there any
    /// more, it does nothing: that alone stops no work.
    ///
    /// # Errors
    ///
    /// The call is to be cut here.
    pub(super) async fn report(&self, step: Step<'_>) -> Result<(), Cut> {
        if let Some(token) = &self.token {
            let _ = self.events.send(Ok(rpc::event(&rpc::progress(token, step)))).await;
        }
        if self.cut_after == Some(step.progress) { Err(Cut) } else { Ok(()) }
    }

    /// The same for a log message.
    async fn log(&self, data: &str) {
        if self.logs && self.token.is_some() {
            let _ = self.events.send(Ok(rpc::event(&rpc::log(data)))).await;
        }
    }
}

/// A tool's result that says `text`.
pub(super) fn said(text: &str) -> Value {
    json!({ "content": [{ "type": "text", "text": text }], "isError": false })
}

/// A tool's result that says what is wrong.
pub(super) fn failed(text: &str) -> Value {
    json!({ "content": [{ "type": "text", "text": text }], "isError": true })
}

/// A tool's result that says `text` and is `content` for programs.
pub(super) fn told(text: &str, content: Value) -> Value {
    let mut result = said(text);
    result["structuredContent"] = content;
    result
}
