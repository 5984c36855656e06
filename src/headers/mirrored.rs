//! Headers that repeat what the body says: `MCP-Protocol-Version`, `Mcp-Method`, `Mcp-Name` (MCP 2026-07-28, Streamable HTTP § Standard Request
//! Headers, § Server Validation; SEP-2243). The body is the truth; a header that says otherwise would let two hops see two requests.

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName};

use crate::message::{Era, Kind, Message, Meta};

use super::{METHOD, NAME, PROTOCOL_VERSION, SESSION_ID};

/// Why a request's headers are refused.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// 400 with JSON-RPC −32020: a mirrored header is missing, unreadable or contradicts the body.
    Mismatch(String),
    /// 400 with JSON-RPC −32600: repeated, unusable or forbidden.
    Unusable(String),
}

/// Headers of which one line is the most there can be, as the specifications spell them.
static SINGLE: [(HeaderName, &str); 4] = [
    (METHOD, "Mcp-Method"),
    (NAME, "Mcp-Name"),
    (PROTOCOL_VERSION, "MCP-Protocol-Version"),
    (SESSION_ID, "Mcp-Session-Id"),
];

/// Checks that hold for every request before its body is read: repeated Mcp headers, a version with bytes that no version has, a `Connection`
/// option that names a header we depend on. (`Mcp-Method` and `Mcp-Name` may hold anything in a legacy request; see [`check_mirrored`].)
///
/// # Errors
///
/// [`Refusal::Unusable`].
pub fn check_head(headers: &HeaderMap) -> Result<(), Refusal> {
    for (name, spelt) in &SINGLE {
        if headers.get_all(name).iter().nth(1).is_some() {
            return Err(Refusal::Unusable(format!("{spelt} is repeated")));
        }
    }
    if headers.get(PROTOCOL_VERSION).is_some_and(|version| !is_plain(version.as_bytes())) {
        return Err(Refusal::Unusable("MCP-Protocol-Version has invalid characters".to_owned()));
    }
    // To obey would be to strip a header that was checked, or that the request does not work without.
    if super::connection_options(headers).any(is_needed) {
        return Err(Refusal::Unusable("Connection names a header that the request needs".to_owned()));
    }
    Ok(())
}

fn is_needed(option: &[u8]) -> bool {
    let option = option.to_ascii_lowercase();
    let names: [&[u8]; 5] = [b"authorization", b"host", b"accept", b"last-event-id", b"origin"];
    option.starts_with(b"mcp-") || option.starts_with(b"content-") || names.contains(&&*option)
}

/// Visible ASCII, space and tab (MCP 2026-07-28, Streamable HTTP § Value Encoding).
fn is_plain(value: &[u8]) -> bool {
    value.iter().all(|&byte| byte == b'\t' || (0x20..0x7F).contains(&byte))
}

/// Checks the mirrored headers of a modern message against its body. Legacy messages always pass.
///
/// Of a request everything is required; of a notification nothing, but what is there must be right. What has a method and an id of `null` is
/// taken for a request.
///
/// # Errors
///
/// [`Refusal::Mismatch`] naming the header; [`Refusal::Unusable`] for a modern batch.
pub fn check_mirrored(headers: &HeaderMap, message: &Message, era: Era) -> Result<(), Refusal> {
    let required = match (era, message.kind) {
        (Era::Legacy, _) | (_, Kind::Response) => return Ok(()),
        (_, Kind::Batch) => {
            return Err(Refusal::Unusable("a batch is not a message of this protocol version".to_owned()));
        }
        (_, kind) => kind != Kind::Notification,
    };
    check_version(headers, message, required)?;
    match value(headers, &METHOD, "Mcp-Method")? {
        Some(method) if message.method.as_deref().map(str::as_bytes) != Some(method) => {
            return Err(differs("Mcp-Method", "method"));
        }
        None if required => return Err(missing("Mcp-Method")),
        _ => {}
    }
    check_name(headers, message, required)
}

/// Without the field in the body there is nothing to compare: its absence, or a value that is no string, is the upstream's to judge.
fn check_version(headers: &HeaderMap, message: &Message, required: bool) -> Result<(), Refusal> {
    let Meta::Object(meta) = &message.params.meta else { return Ok(()) };
    let Some(version) = &meta.protocol_version else { return Ok(()) };
    match value(headers, &PROTOCOL_VERSION, "MCP-Protocol-Version")? {
        Some(said) if said != version.as_bytes() => Err(differs("MCP-Protocol-Version", "protocol version")),
        None if required => Err(missing("MCP-Protocol-Version")),
        _ => Ok(()),
    }
}

fn check_name(headers: &HeaderMap, message: &Message, required: bool) -> Result<(), Refusal> {
    let params = &message.params;
    let (source, field, required) = match message.method.as_deref() {
        Some("tools/call" | "prompts/get") => (&params.name, "params.name", required),
        Some("resources/read") => (&params.uri, "params.uri", required),
        // SEP-2663 asks for it, in an extension: its absence is the upstream's to judge.
        Some("tasks/get" | "tasks/update" | "tasks/cancel") => (&params.task_id, "params.taskId", false),
        _ => return Ok(()),
    };
    match value(headers, &NAME, "Mcp-Name")? {
        Some(said) => match decode_sentinel(said) {
            None => Err(Refusal::Mismatch("Mcp-Name is not valid base64 of UTF-8".to_owned())),
            Some(said) if source.as_deref().map(str::as_bytes) != Some(&*said) => {
                Err(differs("Mcp-Name", field))
            }
            Some(_) => Ok(()),
        },
        None if required => Err(missing("Mcp-Name")),
        None => Ok(()),
    }
}

/// The value of a mirrored header without the white space around it.
fn value<'a>(headers: &'a HeaderMap, name: &HeaderName, spelt: &str) -> Result<Option<&'a [u8]>, Refusal> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    if is_plain(value.as_bytes()) {
        Ok(Some(value.as_bytes().trim_ascii()))
    } else {
        Err(Refusal::Mismatch(format!("{spelt} has invalid characters")))
    }
}

/// Neither value is told: both come from a model or an attacker.
fn differs(header: &str, field: &str) -> Refusal {
    Refusal::Mismatch(format!("{header} differs from the {field} in the body"))
}

fn missing(header: &str) -> Refusal {
    Refusal::Mismatch(format!("{header} is missing"))
}

/// Decodes the `=?base64?…?=` form of a mirrored value; `None` if it claims to be one and is not valid. Prefix and suffix count only as
/// they are written here: anything else is a literal value and is given as it came.
pub fn decode_sentinel(value: &[u8]) -> Option<Vec<u8>> {
    let Some(encoded) = value.strip_prefix(b"=?base64?").and_then(|rest| rest.strip_suffix(b"?=")) else {
        return Some(value.to_vec());
    };
    let decoded = STANDARD.decode(encoded).ok()?;
    std::str::from_utf8(&decoded).is_ok().then_some(decoded)
}
