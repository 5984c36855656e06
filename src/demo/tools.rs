//! The tools of the demo upstream: what they take, what they do, how they are listed.
//!
//! Each stops where it waits when its future is dropped, and all of them only read.

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json, value::RawValue};
use tokio::{sync::mpsc, time::sleep};

use super::rpc;

/// One call's work, its arguments checked.
#[derive(Debug)]
pub(super) enum Work {
    Echo(Echo),
    Add(Add),
    Slow(Slow),
    Busy(Busy),
    Flood(Flood),
    Silent(Silent),
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
        Self { events: 1000, bytes: 0 }
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
        match self.retry_after.as_ref()? {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        }
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
    pub(super) fn read(tool: &str, arguments: Option<Value>) -> Result<Self, Refusal> {
        let arguments = arguments.unwrap_or_else(|| json!({}));
        match tool {
            "echo" => typed(arguments).map(Self::Echo),
            "add" => typed(arguments).map(Self::Add),
            "slow" => typed(arguments).map(Self::Slow),
            "flood" => typed(arguments).map(Self::Flood),
            "silent" => typed(arguments).map(Self::Silent),
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
    pub(super) async fn run(self, progress: Progress) -> Value {
        match self {
            Self::Echo(echo) => said(&echo.text),
            Self::Add(Add { a, b }) => add(a, b),
            Self::Slow(Slow { steps, step_ms }) => {
                for step in 1..=steps {
                    sleep(Duration::from_millis(step_ms)).await;
                    progress.report(step, steps, "").await;
                }
                said(&format!("{steps} steps done"))
            }
            Self::Flood(Flood { events, bytes }) => {
                let message = "x".repeat(bytes.min(MESSAGE_BYTES));
                for event in 1..=events {
                    progress.report(event, events, &message).await;
                }
                said(&format!("{events} events sent"))
            }
            Self::Silent(Silent { ms, .. }) => {
                sleep(Duration::from_millis(ms)).await;
                said(&format!("silent for {ms} ms"))
            }
            // Answered before there is a call; a result would be a lie.
            Self::Busy(busy) => failed(&format!("answered {}", busy.status)),
        }
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

fn typed<T: DeserializeOwned>(arguments: Value) -> Result<T, Refusal> {
    serde_json::from_value(arguments).map_err(|error| Refusal::Arguments(error.to_string()))
}

/// Where a call's progress goes.
#[derive(Debug)]
pub(super) struct Progress {
    pub(super) token: Option<Box<RawValue>>,
    pub(super) events: mpsc::Sender<Bytes>,
}

impl Progress {
    /// Sends one notification, waiting while the client is slow. Where nobody asked, or nobody is there any
    /// more, it does nothing: that alone stops no work.
    async fn report(&self, progress: u64, total: u64, message: &str) {
        if let Some(token) = &self.token {
            let notification = rpc::progress(token, progress, total, message);
            let _ = self.events.send(rpc::event(&notification)).await;
        }
    }
}

/// A tool's result that says `text`.
fn said(text: &str) -> Value {
    json!({ "content": [{ "type": "text", "text": text }], "isError": false })
}

/// A tool's result that says what is wrong.
pub(super) fn failed(text: &str) -> Value {
    json!({ "content": [{ "type": "text", "text": text }], "isError": true })
}

/// The entries of `tools/list`, always in this order.
pub(super) fn listing() -> Value {
    let whole = |what: &str| json!({ "type": "integer", "minimum": 0, "description": what });
    let number = json!({ "type": "number" });
    let mut add = entry("add", "Adds two numbers", &json!({ "a": number, "b": number }), &["a", "b"]);
    add["outputSchema"] =
        json!({ "type": "object", "properties": { "sum": { "type": "number" } }, "required": ["sum"] });
    json!([
        entry("echo", "Says what it is told", &json!({ "text": { "type": "string" } }), &["text"]),
        add,
        entry(
            "slow",
            "Works in steps and reports progress after each",
            &json!({ "steps": whole("how many, 4"), "step_ms": whole("how long each takes, 100") }),
            &[],
        ),
        entry(
            "busy",
            "Answers the HTTP request itself with 429 or 503",
            &json!({
                "status": { "type": "integer", "enum": [429, 503] },
                "retry_after": { "type": ["number", "string"], "description": "the Retry-After to send" },
            }),
            &["status"],
        ),
        entry(
            "flood",
            "Reports progress as fast as the connection takes it",
            &json!({ "events": whole("how many, 1000"), "bytes": whole("of each one's message, 0") }),
            &[],
        ),
        entry(
            "silent",
            "Sends not one byte until it is done",
            &json!({
                "ms": whole("how long, 1000"),
                "head": { "type": "boolean", "description": "send the head of a stream at once" },
            }),
            &[],
        ),
    ])
}

fn entry(name: &str, description: &str, properties: &Value, required: &[&str]) -> Value {
    json!({
        "name": name,
        "description": description,
        "inputSchema": { "type": "object", "properties": properties, "required": required },
        "annotations": { "readOnlyHint": true, "idempotentHint": true, "openWorldHint": false },
    })
}
