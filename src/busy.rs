//! A busy upstream, as a tool result.
//!
//! The text is the sidecar's own: what the upstream wrote is untrusted and would reach a model.

use std::{borrow::Cow, time::SystemTime};

use bytes::Bytes;
use http::{HeaderMap, header};

use crate::message::{Era, Id};

/// What a busy answer says.
#[derive(Clone, Debug)]
pub struct Busy<'a> {
    /// The upstream's name.
    pub upstream: &'a str,
    /// The upstream's status; `None` when it is the sidecar's own limit.
    pub status: Option<u16>,
    /// The wait as a JSON number of seconds, as text.
    pub retry_after: Option<&'a str>,
}

/// The wait that `Retry-After` names, as the text of a JSON number of seconds (RFC 9110 § 10.2.3): delta-seconds, a decimal fraction as it
/// stands, an HTTP-date (three forms) minus the response's `Date`, else minus `now`, a past one `0`. Repeated (unless equal), negative, junk: `None`.
pub fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<String> {
    let value = single(headers, &header::RETRY_AFTER)?;
    if value.starts_with(|first: char| first.is_ascii_digit()) {
        return seconds(value).map(str::to_owned);
    }
    let until = httpdate::parse_http_date(value).ok()?;
    let said = single(headers, &header::DATE).and_then(|date| httpdate::parse_http_date(date).ok());
    let wait = until.duration_since(said.unwrap_or(now)).unwrap_or_default();
    // Up, so that nobody comes back a fraction too early.
    Some((wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).to_string())
}

/// The trimmed value of a header whose lines all say the same.
fn single<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> Option<&'a str> {
    let mut lines = headers.get_all(name).iter().map(|value| value.to_str().map(str::trim).ok());
    let first = lines.next()??;
    lines.all(|line| line == Some(first)).then_some(first)
}

/// Digits, or digits with a fraction, as JSON has them: no zero ahead of another digit (RFC 8259 § 6).
fn seconds(value: &str) -> Option<&str> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let whole = value.split_once('.').map_or(value, |(whole, _)| whole);
    let fraction = value.split_once('.').is_none_or(|(_, fraction)| digits(fraction));
    let zeros = whole.bytes().take_while(|&byte| byte == b'0').count().min(whole.len().saturating_sub(1));
    let short = value.len() - zeros <= LONGEST;
    (digits(whole) && fraction && short).then(|| &value[zeros..])
}

/// A number of more characters is no wait, and some readers of JSON refuse it.
const LONGEST: usize = 300;

/// The JSON-RPC response with the busy tool result, under the id's own token; modern ones carry `resultType`.
pub fn result(busy: &Busy<'_>, id: &Id, era: Era) -> Bytes {
    let mut out = Vec::with_capacity(512);
    write(&mut out, &tool_result(busy, era), id);
    out.into()
}

/// The same for a batch of nothing but calls (2025-03-26): an array, one result a call.
pub fn results(busy: &Busy<'_>, ids: &[&Id]) -> Bytes {
    let result = tool_result(busy, Era::Legacy);
    let mut out = vec![b'['];
    for (at, id) in ids.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write(&mut out, &result, id);
    }
    out.push(b']');
    out.into()
}

fn write(out: &mut Vec<u8>, result: &str, id: &Id) {
    out.extend_from_slice(b"{\"jsonrpc\":\"2.0\",\"id\":");
    out.extend_from_slice(id.token());
    out.extend_from_slice(b",\"result\":");
    out.extend_from_slice(result.as_bytes());
    out.push(b'}');
}

/// A `CallToolResult`. `resultType` belongs to modern ones alone (MCP 2026-07-28, Base Protocol § ResultType).
fn tool_result(busy: &Busy<'_>, era: Era) -> String {
    let kind = if era == Era::Modern { "\"resultType\":\"complete\"," } else { "" };
    let text = serde_json::Value::from(text(busy));
    let wait = busy.retry_after.map(|wait| format!(",\"oz0/retry_after\":{wait}")).unwrap_or_default();
    format!(
        "{{{kind}\"content\":[{{\"type\":\"text\",\"text\":{text}}}],\"isError\":true,\"_meta\":{{\"oz0/retryable\":true{wait}}}}}"
    )
}

/// What the model reads.
fn text(busy: &Busy<'_>) -> String {
    let upstream = busy.upstream;
    let busy_is = match busy.status {
        Some(status) => format!("The server \"{upstream}\" is busy (it answered HTTP status {status})."),
        None => format!(
            "The sidecar in front of the server \"{upstream}\" is busy; nothing was sent to the server."
        ),
    };
    let wait: Cow<'_, str> = match busy.retry_after {
        Some("0") => "The same call may be made again now.".into(),
        Some("1") => "The same call may be made again after 1 second.".into(),
        Some(wait) => format!("The same call may be made again after {wait} seconds.").into(),
        None => "It named no wait. The same call may be made again later.".into(),
    };
    format!("{busy_is} {wait}")
}

#[cfg(test)]
mod tests;
