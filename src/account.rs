//! What an exchange amounted to: an [`Account`] travels with it and becomes exactly one [`Record`], written
//! when the exchange ends, whatever its end.
//!
//! Words: a *record* is one line of the access log; an *outcome* is how the exchange ended. An account is
//! owned by one exchange: first by the future that answers it, then by the response body. Whoever owns it
//! last ends it, by [`Account::finish`] or by being dropped.
//!
//! Knows no contents and no secrets: every field is a number, a name or a hash. Leaves writing to [`log`]
//! and counting to [`metrics`].

pub mod log;
pub mod metrics;
mod shape;

use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use crate::message::Era;

pub use shape::{clean, token};

/// One access-log line. Keys and their order are stable; what is `None` is absent.
///
/// Text is bounded where it is written (255 bytes, identities 1024), so a caller need not [`clean`] it. A
/// [`Duration`] is written in milliseconds with up to three decimals.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Record {
    /// When it began, RFC 3339 with milliseconds.
    pub ts: String,
    /// The `x-request-id`.
    #[serde(serialize_with = "shape::text")]
    pub request: String,
    /// The upstream's name in the configuration, never what the node asked for: it is a metric's label too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// The node, `ip:port` or `unix`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub peer: Option<String>,
    /// The request's HTTP method.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub http_method: Option<String>,
    /// The request's path, without its query.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub path: Option<String>,
    /// `legacy` or `modern`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::era")]
    pub era: Option<Era>,
    /// The protocol revision.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub protocol: Option<String>,
    /// The JSON-RPC method.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub rpc: Option<String>,
    /// The JSON-RPC id as its token stood, see [`token`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<Box<RawValue>>,
    /// The tool of a `tools/call`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub tool: Option<String>,
    /// The first 8 hex digits of the session id's SHA-256.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub session: Option<String>,
    /// The client as `name/version`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub client: Option<String>,
    /// The job's id.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_identity")]
    pub job: Option<String>,
    /// The call's activity.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_identity")]
    pub activity: Option<String>,
    /// The idempotency key.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_identity")]
    pub key: Option<String>,
    /// The digest of the call's arguments.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub digest: Option<String>,
    /// Which attempt of the call it was, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u64>,
    /// `safe`, `conditional` or `unsafe`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_class: Option<&'static str>,
    /// The committed result was answered again, nothing was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replayed: Option<bool>,
    /// How an attempt of 2 and up began.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub resume: Option<String>,
    /// The tool is not the approved one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listing_changed: Option<bool>,
    /// The HTTP status to the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The upstream's HTTP status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_status: Option<u16>,
    /// How it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// The reason in the error's `data`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    /// The wait that was named, seconds, as the token stands in the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<Box<RawValue>>,
    /// Who cancelled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cancelled_by: Option<CancelledBy>,
    /// From the signal until the upstream's stream was closed.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::millis")]
    pub cancel_ms: Option<Duration>,
    /// The form of the answer to the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<Stream>,
    /// Events sent to the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<u64>,
    /// Progress events from upstream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_in: Option<u64>,
    /// Progress events sent to the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_out: Option<u64>,
    /// Progress events that a newer one replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_coalesced: Option<u64>,
    /// Progress events dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_dropped: Option<u64>,
    /// The last progress value.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::number")]
    pub progress: Option<f64>,
    /// Its total.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::number")]
    pub total: Option<f64>,
    /// The final response was marked `oz0/refetch`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refetch: Option<bool>,
    /// Keepalive comments sent to the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keepalives: Option<u64>,
    /// Bytes of the body from the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_in: Option<u64>,
    /// Bytes of the body to the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_out: Option<u64>,
    /// DNS, connect and TLS toward the upstream; absent for a reused connection.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::millis")]
    pub connect_ms: Option<Duration>,
    /// From the beginning until the first byte of the upstream's answer.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::millis")]
    pub first_byte_ms: Option<Duration>,
    /// From the beginning to the end; filled in when the account ends.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::millis")]
    pub duration_ms: Option<Duration>,
    /// The upstream's connection had been used before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reused: Option<bool>,
    /// HTTP on the node's side, `1.1` or `2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<&'static str>,
    /// HTTP on the upstream's side.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_http: Option<&'static str>,
    /// The trace id (W3C).
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub trace: Option<String>,
    /// What went wrong, in words without contents.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shape::option_text")]
    pub error: Option<String>,
}

/// How an exchange ended, as the log's `outcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Answered.
    Ok,
    /// A tool result with `isError`.
    ToolError,
    /// A JSON-RPC error of the upstream, or an HTTP status of 400 and up.
    RpcError,
    /// Busy: the upstream, or a limit here.
    Busy,
    /// Cancelled.
    Cancelled,
    /// The idle clock ran out.
    IdleTimeout,
    /// The maximum ran out.
    MaxTimeout,
    /// Broken off.
    Failed,
    /// Refused by the sidecar, nothing sent.
    Refused,
}

impl Outcome {
    /// Its name in the log and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ToolError => "tool_error",
            Self::RpcError => "rpc_error",
            Self::Busy => "busy",
            Self::Cancelled => "cancelled",
            Self::IdleTimeout => "idle_timeout",
            Self::MaxTimeout => "max_timeout",
            Self::Failed => "failed",
            Self::Refused => "refused",
        }
    }
}

/// Who cancelled, as the log's `cancelled_by`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelledBy {
    /// The node closed its stream or connection.
    Disconnect,
    /// `notifications/cancelled`.
    Notification,
    /// The admin API.
    Admin,
    /// A policy that a reload brought.
    Policy,
    /// The drain's end.
    Drain,
}

impl CancelledBy {
    /// Its name in the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Disconnect => "disconnect",
            Self::Notification => "notification",
            Self::Admin => "admin",
            Self::Policy => "policy",
            Self::Drain => "drain",
        }
    }
}

/// The form of an answer, as the log's `stream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// One JSON body.
    Json,
    /// `text/event-stream`.
    Sse,
}

/// The open account of one exchange. It writes its record once: by [`Account::finish`], or when it is dropped.
///
/// Dropped without an outcome it says `cancelled` by `disconnect`: nobody lets go of an exchange before its
/// end but hyper, when the node has left. While a panic unwinds it says `failed`.
#[derive(Debug)]
pub struct Account {
    /// What will be written.
    pub record: Record,
    sink: log::Sink,
    opened: Instant,
    closed: bool,
}

impl Account {
    /// Opens an account; `ts` is the wall clock's now, `duration_ms` counts from here.
    pub fn open(sink: log::Sink, ts: SystemTime, request: String) -> Self {
        let record =
            Record { ts: humantime::format_rfc3339_millis(ts).to_string(), request, ..Record::default() };
        sink.metrics().in_flight.inc();
        Self { record, sink, opened: Instant::now(), closed: false }
    }

    /// When it was opened: what `first_byte_ms` and the like are measured from.
    pub fn opened(&self) -> Instant {
        self.opened
    }

    /// Counts members that were cut out of an answer because only the sidecar may say them.
    pub fn forged(&self, members: u64) {
        self.sink.metrics().forged_members.inc_by(members);
    }

    /// Ends the exchange with `outcome`, unless one was set before: the first wins.
    pub fn finish(mut self, outcome: Outcome) {
        self.record.outcome.get_or_insert(outcome);
    }

    /// Ends the exchange now, where its owner can't be dropped yet. What is set later is not written.
    pub fn close(&mut self) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        self.record.duration_ms = Some(self.opened.elapsed());
        if self.record.outcome.is_none() {
            if std::thread::panicking() {
                self.record.outcome = Some(Outcome::Failed);
            } else {
                self.record.outcome = Some(Outcome::Cancelled);
                self.record.cancelled_by.get_or_insert(CancelledBy::Disconnect);
            }
        }
        self.sink.metrics().ended(&self.record);
        self.sink.write(&self.record);
        // Last: the end of the process waits for it.
        self.sink.metrics().in_flight.dec();
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests;
