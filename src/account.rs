//! What an exchange amounted to: an [`Account`] travels with it and becomes exactly one [`Record`], written
//! when the exchange ends, whatever its end.
//!
//! Words: a *record* is one line of the access log; an *outcome* is how the exchange ended. An account is
//! owned by one exchange: first by the future that answers it, then by the response body. Whoever owns it
//! last ends it, by dropping it.
//!
//! Knows no contents and no secrets: every field is a number, a name or a hash. Leaves writing to [`log`]
//! and counting to [`metrics`].

mod line;
pub mod log;
pub mod metrics;
mod shape;

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use crate::message::Era;

pub use shape::{Token, clean, token};

/// One access-log line. Keys and their order are stable; what is `None` is absent.
///
/// Text is bounded where it is written (255 bytes, identities 1024), so a caller need not [`clean`] it. A
/// [`Duration`] is written in milliseconds with up to three decimals.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// When it began, RFC 3339 with milliseconds.
    pub ts: String,
    /// The `x-request-id`.
    pub request: String,
    /// The upstream's name in the configuration, never what the node asked for: it is a metric's label too.
    pub upstream: Option<Arc<str>>,
    /// The node, `ip:port` or `unix`.
    pub peer: Option<String>,
    /// The request's HTTP method.
    pub http_method: Option<String>,
    /// The request's path, without its query.
    pub path: Option<String>,
    /// `legacy` or `modern`.
    pub era: Option<Era>,
    /// The protocol revision.
    pub protocol: Option<String>,
    /// The JSON-RPC method.
    pub rpc: Option<String>,
    /// The JSON-RPC id as its token stood, see [`token`].
    pub id: Option<Token>,
    /// The tool of a `tools/call`.
    pub tool: Option<String>,
    /// The first 8 hex digits of the session id's SHA-256.
    pub session: Option<String>,
    /// The client as `name/version`.
    pub client: Option<String>,
    /// The job's id.
    pub job: Option<String>,
    /// The call's activity.
    pub activity: Option<String>,
    /// The idempotency key.
    pub key: Option<String>,
    /// The digest of the call's arguments.
    pub digest: Option<String>,
    /// Which attempt of the call it was, from 1.
    pub attempt: Option<u64>,
    /// `safe`, `conditional` or `unsafe`.
    pub retry_class: Option<&'static str>,
    /// The committed result was answered again, nothing was sent.
    pub replayed: Option<bool>,
    /// How an attempt of 2 and up began.
    pub resume: Option<String>,
    /// The tool is not the approved one.
    pub listing_changed: Option<bool>,
    /// The HTTP status to the node.
    pub status: Option<u16>,
    /// The upstream's HTTP status.
    pub upstream_status: Option<u16>,
    /// How it ended.
    pub outcome: Option<Outcome>,
    /// The reason in the error's `data`.
    pub reason: Option<&'static str>,
    /// The wait that was named, seconds, as the token stands in the answer.
    pub retry_after: Option<Token>,
    /// Who cancelled.
    pub cancelled_by: Option<CancelledBy>,
    /// From the signal until the upstream's stream was closed.
    pub cancel_ms: Option<Duration>,
    /// The form of the answer to the node.
    pub stream: Option<Stream>,
    /// Events sent to the node.
    pub events: Option<u64>,
    /// Progress events from upstream.
    pub progress_in: Option<u64>,
    /// Progress events sent to the node.
    pub progress_out: Option<u64>,
    /// Progress events that a newer one replaced.
    pub progress_coalesced: Option<u64>,
    /// Progress events dropped.
    pub progress_dropped: Option<u64>,
    /// The last progress value.
    pub progress: Option<f64>,
    /// Its total.
    pub total: Option<f64>,
    /// The final response was marked `oz0/refetch`.
    pub refetch: Option<bool>,
    /// Keepalive comments sent to the node.
    pub keepalives: Option<u64>,
    /// Bytes of the body from the node.
    pub bytes_in: Option<u64>,
    /// Bytes of the body to the node.
    pub bytes_out: Option<u64>,
    /// DNS, connect and TLS toward the upstream; absent for a reused connection.
    pub connect_ms: Option<Duration>,
    /// From the beginning until the first byte of the upstream's answer.
    pub first_byte_ms: Option<Duration>,
    /// From the beginning to the end; filled in when the account ends.
    pub duration_ms: Option<Duration>,
    /// The upstream's connection had been used before.
    pub reused: Option<bool>,
    /// HTTP on the node's side, `1.1` or `2`.
    pub http: Option<&'static str>,
    /// HTTP on the upstream's side.
    pub upstream_http: Option<&'static str>,
    /// The trace id (W3C).
    pub trace: Option<String>,
    /// What went wrong, in words without contents.
    pub error: Option<String>,
}

/// How an exchange ended, as the log's `outcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// One JSON body.
    Json,
    /// `text/event-stream`.
    Sse,
}

impl Stream {
    /// Its name in the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Sse => "sse",
        }
    }
}

/// The open account of one exchange. It writes its record once, when it is dropped.
///
/// Dropped without an outcome it says `cancelled` by `disconnect`: nobody lets go of an exchange before its
/// end but hyper, when the node has left. While a panic unwinds it says `failed`.
#[derive(Debug)]
pub struct Account {
    /// What will be written; boxed, because an account moves with its exchange from stage to stage.
    pub record: Box<Record>,
    sink: log::Sink,
    opened: Instant,
    closed: bool,
}

impl Account {
    /// Opens an account; `ts` is the wall clock's now, `duration_ms` counts from here.
    pub fn open(sink: log::Sink, ts: SystemTime, request: String) -> Self {
        let ts = humantime::format_rfc3339_millis(ts).to_string();
        let record = Box::new(Record { ts, request, ..Record::default() });
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
    #[cfg(test)]
    pub(crate) fn finish(mut self, outcome: Outcome) {
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
