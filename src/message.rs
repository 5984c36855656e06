//! What a POSTed body is, as JSON-RPC and MCP see it, and where its parts lie.
//!
//! Bytes are only looked at: every part is a span of the body as it came, so that a rewrite is a
//! splice ([`splice`]) and everything else is forwarded unchanged. Knows no HTTP, no I/O, no time.

pub mod answer;
pub mod splice;

use std::{collections::BTreeMap, ops::Range};

use bytes::Bytes;

/// A JSON-RPC request id (or progress token): a string or a number, exactly as it was written.
///
/// Equality and hash see the JSON value: `"a"` equals `"\u0061"`, `1` differs from `"1"`, and
/// numbers compare by their text (`1` differs from `1.0`).
#[derive(Clone, Debug)]
pub struct Id {
    token: Bytes,
    key: Bytes,
}

/// What a message is, by its members (JSON-RPC 2.0 § 4 and § 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `method` and an id that is a string or a number.
    Request,
    /// `method` without `id`.
    Notification,
    /// `result` or `error`, no `method`.
    Response,
    /// An array (legal in 2025-03-26 only).
    Batch,
    /// Something else that is JSON-RPC enough to be the upstream's to judge (an id of `null`).
    Other,
}

/// A body that was read: what it is and where its parts lie. Spans index the body.
#[derive(Clone, Debug)]
pub struct Message {
    /// What it is.
    pub kind: Kind,
    /// Its id; for a batch none.
    pub id: Option<Id>,
    /// Its method, unescaped.
    pub method: Option<String>,
    /// What is known of `params`.
    pub params: Params,
    /// Where the message's object lies (white space around it excluded).
    pub object: Range<usize>,
    /// Where the value of `params` lies, if there is one, of whatever type.
    pub params_value: Option<Range<usize>>,
    /// The members of a batch, classified one by one; empty otherwise.
    pub batch: Vec<Message>,
}

/// What is known of `params`; all empty unless it is an object.
#[derive(Clone, Debug, Default)]
pub struct Params {
    /// Where the object lies; `None` if `params` is absent or not an object.
    pub object: Option<Range<usize>>,
    /// `name` (tools/call, prompts/get), unescaped, if it is a string.
    pub name: Option<String>,
    /// `uri` (resources/read), unescaped, if it is a string.
    pub uri: Option<String>,
    /// `taskId` (tasks/*), unescaped, if it is a string.
    pub task_id: Option<String>,
    /// Where the value of `arguments` lies.
    pub arguments: Option<Range<usize>>,
    /// `requestId` of `notifications/cancelled`.
    pub request_id: Option<Id>,
    /// `task` is present (2025-11-25 task augmentation).
    pub task: bool,
    /// `inputResponses` or `requestState` is present (MRTR leg, MCP 2026-07-28).
    pub leg: bool,
    /// `protocolVersion` of `initialize`.
    pub protocol_version: Option<String>,
    /// `clientInfo` of `initialize` as `name/version`.
    pub client: Option<String>,
    /// `_meta`.
    pub meta: Meta,
}

/// `params._meta`.
#[derive(Clone, Debug, Default)]
pub enum Meta {
    /// There is none.
    #[default]
    Absent,
    /// It is there and no object: nothing is injected.
    NotObject,
    /// An object.
    Object(MetaObject),
}

/// A `params._meta` that is an object.
#[derive(Clone, Debug, Default)]
pub struct MetaObject {
    /// Where it lies.
    pub object: Range<usize>,
    /// `io.modelcontextprotocol/protocolVersion`, if it is a string.
    pub protocol_version: Option<String>,
    /// `io.modelcontextprotocol/clientInfo` as `name/version`.
    pub client: Option<String>,
    /// `progressToken`, if it is a string or a number.
    pub progress_token: Option<Id>,
    /// `traceparent`, if it is a string.
    pub traceparent: Option<String>,
    /// Every member whose key begins with `oz0/`: where its value lies.
    pub oz0: BTreeMap<String, Range<usize>>,
}

/// Why a body is refused with 400.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// Not UTF-8 JSON: JSON-RPC −32700.
    #[error("the body is not valid JSON: {0}")]
    Json(String),
    /// JSON, but no JSON-RPC message, or an ambiguous one: JSON-RPC −32600.
    #[error("{reason}")]
    Message {
        /// What is wrong, naming the member.
        reason: String,
        /// The id, when it could be read.
        id: Option<Id>,
    },
}

/// Which MCP era a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Era {
    /// 2025-03-26, 2025-06-18, 2025-11-25: `initialize` and sessions.
    Legacy,
    /// 2026-07-28 and later: every request stands for itself.
    Modern,
}

/// Reads a POSTed body.
///
/// # Errors
///
/// [`Malformed`], as contract section 10 and say; nothing was sent.
pub fn classify(body: &Bytes) -> Result<Message, Malformed> {
    let _ = body;
    unimplemented!()
}

/// The era of a message, and the protocol revision as the log shows it.
///
/// `header` is `MCP-Protocol-Version`, trimmed; `session` is the revision that the session's
/// `initialize` negotiated, if it is remembered.
pub fn era(message: &Message, header: Option<&str>, session: Option<&str>) -> (Era, Option<String>) {
    let _ = (message, header, session);
    unimplemented!()
}
