//! What a POSTed body is, as JSON-RPC and MCP see it, and where its parts lie.
//!
//! Bytes are only looked at: every part is a span of the body as it came, so that a rewrite is a
//! splice ([`splice`]) and everything else is forwarded unchanged. Knows no HTTP, no I/O, no time.

pub mod answer;
pub mod canonical;
mod id;
pub mod plain;
mod read;
mod scan;
pub mod splice;
pub mod subscription;
mod text;
pub mod tools;

use std::{collections::BTreeMap, ops::Range};

use bytes::Bytes;

pub use id::Id;

/// What a message is, by its members (JSON-RPC 2.0 § 4 and § 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `method` and an id that is a string or a number, whatever else is there.
    Request,
    /// `method` without `id`.
    Notification,
    /// `result` or `error`, no `method`.
    Response,
    /// An array (legal in 2025-03-26 only).
    Batch,
    /// `method` and an id that is neither a string nor a number (`null`): the upstream's to judge, nothing is added.
    Other,
}

/// A body that was read: what it is and where its parts lie. Spans index the body.
#[derive(Clone, Debug)]
pub struct Message {
    /// What it is.
    pub kind: Kind,
    /// Its id; for a batch none.
    pub id: Option<Id>,
    /// Its method, unescaped; `None` also if it holds a lone surrogate.
    pub method: Option<String>,
    /// What is known of `params`.
    pub params: Params,
    /// Where the message's object lies (white space around it excluded).
    pub object: Range<usize>,
    /// Where the value of `params` lies, if there is one, of whatever type.
    pub params_value: Option<Range<usize>>,
    /// The members of a batch, one by one and in order; empty otherwise. A member that is no message is [`Kind::Other`] without a method.
    pub batch: Vec<Self>,
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
    /// `task` is present and not `null` (2025-11-25 task augmentation).
    pub task: bool,
    /// `inputResponses` or `requestState` is present and not `null` (MRTR leg, MCP 2026-07-28).
    pub leg: bool,
    /// `protocolVersion` of `initialize`.
    pub protocol_version: Option<String>,
    /// `clientInfo` of `initialize` as `name/version`, or as `name` without a version.
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
    /// `progressToken` is there, whatever it is.
    pub has_progress_token: bool,
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

/// The deepest nesting a body may have; deeper ones are refused. Real calls stay below ten.
pub const MAX_DEPTH: usize = 512;

/// Reads a POSTed body.
///
/// # Errors
///
/// [`Malformed`]; nothing was sent.
pub fn classify(body: &Bytes) -> Result<Message, Malformed> {
    read::body(body)
}

/// The first revision that is [`Era::Modern`].
const FIRST_MODERN: &str = "2026-07-28";

/// What is assumed where nothing names a revision (MCP 2025-06-18, Transports § Protocol Version Header).
const ASSUMED: &str = "2025-03-26";

/// The era of a message, and the protocol revision as the log shows it.
///
/// `header` is `MCP-Protocol-Version`, trimmed; `session` is the revision that the session's
/// `initialize` negotiated, if it is remembered. The body wins: a header that contradicts it is for
/// [`crate::headers::check_mirrored`] to refuse. A batch is modern if one of its members is.
pub fn era(message: &Message, header: Option<&str>, session: Option<&str>) -> (Era, Option<String>) {
    let header = header.filter(|header| !header.is_empty());
    if let Some(revision) = message.modern_version() {
        return (Era::Modern, Some(revision.to_owned()));
    }
    if let Some(revision) = header.filter(|header| is_modern(header)) {
        return (Era::Modern, Some(revision.to_owned()));
    }
    let asked = message.params.protocol_version.as_deref().filter(|_| message.is("initialize"));
    (Era::Legacy, Some(asked.or(header).or(session).unwrap_or(ASSUMED).to_owned()))
}

/// The era of a revision; one that nobody knows counts as legacy, as in [`era`].
pub fn era_of(revision: &str) -> Era {
    if is_modern(revision) { Era::Modern } else { Era::Legacy }
}

/// Whether the revision of a message is one whose era nobody can tell: a version header that is no date, and a body that does not
/// say it is modern. [`era`] counts it as legacy; it is to be forwarded with nothing added.
pub fn revision_unknown(message: &Message, header: Option<&str>) -> bool {
    message.modern_version().is_none() && header.is_some_and(|header| !header.is_empty() && !is_date(header))
}

/// A revision of 2026-07-28 or later. Dates of this form sort as text.
fn is_modern(revision: &str) -> bool {
    is_date(revision) && revision >= FIRST_MODERN
}

/// Whether it has the form YYYY-MM-DD.
fn is_date(revision: &str) -> bool {
    revision.len() == 10
        && revision.bytes().enumerate().all(|(at, byte)| match at {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        })
}

impl Message {
    /// Whether this is its method. Look at this and not at `kind` where a policy hangs on it: a server may run what has an id of `null`.
    pub fn is(&self, method: &str) -> bool {
        self.method.as_deref() == Some(method)
    }

    /// A single `tools/call` request: has an id, can be answered.
    pub fn is_call(&self) -> bool {
        self.kind == Kind::Request && self.is("tools/call")
    }

    /// A batch of nothing but `tools/call` requests with ids, and at least one.
    pub fn is_batch_of_calls(&self) -> bool {
        !self.batch.is_empty() && self.batch.iter().all(Self::is_call)
    }

    /// `io.modelcontextprotocol/protocolVersion` of the message, or of the first member of a batch that has one.
    fn modern_version(&self) -> Option<&str> {
        match &self.params.meta {
            Meta::Object(meta) => meta.protocol_version.as_deref(),
            _ => self.batch.iter().find_map(Self::modern_version),
        }
    }
}

#[cfg(test)]
mod tests;
