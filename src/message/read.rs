//! Reads a POSTed body in one pass: strict JSON, then the shape of JSON-RPC, then no ambiguous member.

use std::{collections::BTreeMap, ops::Range};

use bytes::Bytes;

use super::{
    Id, Kind, MAX_DEPTH, Malformed, Message, Meta, MetaObject, Params,
    scan::{Bad, Scan},
};

/// See [`super::classify`].
pub(super) fn body(body: &Bytes) -> Result<Message, Malformed> {
    if let Err(error) = std::str::from_utf8(body) {
        return Err(Malformed::Json(format!("invalid UTF-8 at byte {}", error.valid_up_to())));
    }
    if body.starts_with(b"\xEF\xBB\xBF") {
        return Err(Malformed::Json("it begins with a byte-order mark".to_owned()));
    }
    let mut scan = Scan::new(body);
    let draft =
        document(&mut scan).map_err(|bad| Malformed::Json(format!("{} at byte {}", bad.what, bad.at)))?;
    let refuse = |reason: &str, id| Err(Malformed::Message { reason: reason.to_owned(), id });
    if scan.deepest() > MAX_DEPTH {
        return refuse(&format!("nesting exceeds {MAX_DEPTH} levels"), draft.message.id);
    }
    if let Some(member) = draft.repeated {
        return refuse(&format!("member `{member}` is repeated"), draft.message.id);
    }
    match draft.shape {
        Some(reason) => refuse(reason, draft.message.id),
        None => Ok(draft.message),
    }
}

/// A message as far as it can be read, and what speaks against it.
struct Draft {
    message: Message,
    /// A member that occurs twice and must not.
    repeated: Option<String>,
    /// Why it is no message.
    shape: Option<&'static str>,
}

impl Draft {
    fn new(kind: Kind) -> Self {
        let message = Message {
            kind,
            id: None,
            method: None,
            params: Params::default(),
            object: 0..0,
            params_value: None,
            batch: Vec::new(),
        };
        Self { message, repeated: None, shape: None }
    }
}

fn document(scan: &mut Scan<'_>) -> Result<Draft, Bad> {
    let draft = if scan.peek_value() == Some(b'[') { batch(scan)? } else { message(scan)? };
    scan.end()?;
    Ok(draft)
}

fn batch(scan: &mut Scan<'_>) -> Result<Draft, Bad> {
    let mut draft = Draft::new(Kind::Batch);
    draft.message.object = scan.array(|scan| {
        // What is no message stays in its place, so that a caller can count and never takes the rest for the whole.
        let mut member = message(scan)?;
        if member.shape.is_some() {
            member.message.kind = Kind::Other;
        }
        // Whichever of two names the upstream would take, a policy that saw the other one would be fooled.
        draft.repeated = draft.repeated.take().or(member.repeated);
        draft.message.batch.push(member.message);
        Ok(())
    })?;
    Ok(draft)
}

/// Members of a message that must not be repeated.
const TOP: &[&str] = &["jsonrpc", "id", "method", "params"];

/// Members of `params` that must not be repeated: those the sidecar reads, and `taskId`, which a header mirrors too.
const PARAMS: &[&str] =
    &["_meta", "name", "uri", "arguments", "inputResponses", "requestState", "task", "requestId", "taskId"];

const VERSION: &str = "io.modelcontextprotocol/protocolVersion";
const CLIENT: &str = "io.modelcontextprotocol/clientInfo";

/// Members of `params._meta` that must not be repeated, beside `oz0/*`: the token, and the version, which a header mirrors.
const META: &[&str] = &["progressToken", VERSION];

/// Which of a few names were seen.
struct Seen {
    names: &'static [&'static str],
    bits: u16,
}

impl Seen {
    fn of(names: &'static [&'static str]) -> Self {
        Self { names, bits: 0 }
    }

    /// Notes `key`; true if it is one of the names and was there before.
    fn again(&mut self, key: &[u8]) -> bool {
        let Some(at) = self.names.iter().position(|name| name.as_bytes() == key) else { return false };
        let before = self.bits;
        self.bits |= 1 << at;
        before == self.bits
    }
}

/// Reads one message; it is left to the caller what is done about its faults.
fn message(scan: &mut Scan<'_>) -> Result<Draft, Bad> {
    let mut draft = Draft::new(Kind::Other);
    let (mut seen, mut repeated) = (Seen::of(TOP), None);
    let (mut has_id, mut id_repeated, mut has_method, mut answers) = (false, false, None, false);
    let message = &mut draft.message;
    let (object, is_object) = scan.maybe_object(|scan, key| {
        let key = key.bytes();
        if seen.again(&key) {
            id_repeated |= *key == *b"id";
            note(&mut repeated, &key);
        }
        match &*key {
            b"id" => (has_id, message.id) = (true, Id::next(scan)?),
            b"method" => {
                let method = scan.maybe_string()?;
                has_method = Some(method.is_some());
                message.method = method.and_then(|method| method.string());
            }
            b"params" => message.params_value = Some(params(scan, &mut message.params, &mut repeated)?),
            b"result" | b"error" => (answers, _) = (true, scan.value()?),
            _ => _ = scan.value()?,
        }
        Ok(())
    })?;
    message.object = object;
    if id_repeated {
        message.id = None;
    }
    match (has_method, answers) {
        _ if !is_object => draft.shape = Some("the body is neither an object nor an array"),
        (Some(false), _) => draft.shape = Some("`method` is not a string"),
        (None, false) => draft.shape = Some("the message has no `method`, `result` or `error`"),
        (None, true) => message.kind = Kind::Response,
        (Some(true), _) if message.id.is_some() => message.kind = Kind::Request,
        (Some(true), _) if has_id => message.kind = Kind::Other,
        (Some(true), _) => message.kind = Kind::Notification,
    }
    draft.repeated = repeated;
    Ok(draft)
}

/// Keeps the first member found repeated; of a name that has no end, its beginning.
fn note(repeated: &mut Option<String>, key: &[u8]) {
    repeated.get_or_insert_with(|| String::from_utf8_lossy(&key[..key.len().min(64)]).into_owned());
}

fn params(
    scan: &mut Scan<'_>,
    params: &mut Params,
    repeated: &mut Option<String>,
) -> Result<Range<usize>, Bad> {
    let mut seen = Seen::of(PARAMS);
    let (span, is_object) = scan.maybe_object(|scan, key| {
        let key = key.bytes();
        if seen.again(&key) {
            note(repeated, &key);
        }
        match &*key {
            b"name" => params.name = decoded(scan)?,
            b"uri" => params.uri = decoded(scan)?,
            b"taskId" => params.task_id = decoded(scan)?,
            b"protocolVersion" => params.protocol_version = decoded(scan)?,
            b"clientInfo" => params.client = client(scan)?,
            b"requestId" => params.request_id = Id::next(scan)?,
            b"arguments" => params.arguments = Some(scan.value()?),
            b"task" => params.task |= given(scan)?,
            b"inputResponses" | b"requestState" => params.leg |= given(scan)?,
            b"_meta" => params.meta = meta(scan, repeated)?,
            _ => _ = scan.value()?,
        }
        Ok(())
    })?;
    params.object = is_object.then(|| span.clone());
    Ok(span)
}

fn meta(scan: &mut Scan<'_>, repeated: &mut Option<String>) -> Result<Meta, Bad> {
    let mut meta = MetaObject { oz0: BTreeMap::new(), ..MetaObject::default() };
    let mut seen = Seen::of(META);
    let (span, is_object) = scan.maybe_object(|scan, key| {
        let text = key.bytes();
        if seen.again(&text) {
            note(repeated, &text);
        }
        match &*text {
            b"progressToken" => {
                meta.has_progress_token = true;
                meta.progress_token = Id::next(scan)?;
            }
            b"traceparent" => meta.traceparent = decoded(scan)?,
            key if key == VERSION.as_bytes() => meta.protocol_version = decoded(scan)?,
            key if key == CLIENT.as_bytes() => meta.client = client(scan)?,
            key if key.starts_with(b"oz0/") => {
                let name = String::from_utf8_lossy(key).into_owned();
                if meta.oz0.insert(name, scan.value()?).is_some() {
                    note(repeated, key);
                }
            }
            _ => _ = scan.value()?,
        }
        Ok(())
    })?;
    meta.object = span;
    Ok(if is_object { Meta::Object(meta) } else { Meta::NotObject })
}

/// The next value, decoded, if it is a string that can be.
fn decoded(scan: &mut Scan<'_>) -> Result<Option<String>, Bad> {
    Ok(scan.maybe_string()?.and_then(|text| text.string()))
}

/// Whether the next value is anything but `null`: serializers write `null` for what their caller left out.
fn given(scan: &mut Scan<'_>) -> Result<bool, Bad> {
    let null = scan.peek_value() == Some(b'n');
    scan.value()?;
    Ok(!null)
}

/// An `Implementation` object (MCP schema) as `name/version`.
fn client(scan: &mut Scan<'_>) -> Result<Option<String>, Bad> {
    let (mut name, mut version) = (None, None);
    scan.maybe_object(|scan, key| {
        match &*key.bytes() {
            b"name" => name = decoded(scan)?,
            b"version" => version = decoded(scan)?,
            _ => _ = scan.value()?,
        }
        Ok(())
    })?;
    Ok(match (name, version) {
        (Some(name), Some(version)) => Some(format!("{name}/{version}")),
        (name, _) => name,
    })
}
