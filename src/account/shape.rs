//! How the values of a record are written: bounded, and nothing in them that could forge a line.

use std::{borrow::Cow, fmt::Display, time::Duration};

use serde_json::value::RawValue;

use crate::message::Era;

use super::Record;

/// Bytes of one value; a line has a few dozen of them, so a line is bounded too.
pub(super) const TEXT_BYTES: usize = 255;
/// Bytes of a job, activity or key, which may be longer than other text.
pub(super) const IDENTITY_BYTES: usize = 1024;

/// Bounds a value for the log to 255 bytes, on a character boundary. Control characters stay: they are escaped
/// where the line is written.
pub fn clean(value: &str) -> Cow<'_, str> {
    Cow::Borrowed(cut(value, TEXT_BYTES))
}

/// A JSON scalar for the log, as its token stands: a number with its exact digits, a string as a string.
/// A string beyond 255 bytes is cut; what readers of JSON may refuse (lone surrogates, numbers beyond a double) is shown
/// as the text of its token. `None` if it is no JSON scalar.
pub fn token(raw: &[u8]) -> Option<Token> {
    let raw = std::str::from_utf8(raw).ok()?.trim_ascii();
    if is_plain_number(raw) {
        return Some(Token(raw.into()));
    }
    if raw.starts_with(['{', '[']) {
        return None;
    }
    if raw.len() <= TEXT_BYTES && is_readable(raw) {
        let valid = serde_json::from_str::<&RawValue>(raw).is_ok();
        return valid.then(|| Token(raw.into()));
    }
    let text = serde_json::from_str::<String>(raw).unwrap_or_else(|_| raw.to_owned());
    serde_json::to_string(cut(&text, TEXT_BYTES)).ok().map(|text| Token(text.into()))
}

/// A JSON scalar as its token stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token(Box<str>);

impl Token {
    /// The token.
    pub fn get(&self) -> &str {
        &self.0
    }
}

/// A whole number as nearly every id is one; anything else takes a closer look.
fn is_plain_number(raw: &str) -> bool {
    let plain = (1..=18).contains(&raw.len()) && raw.bytes().all(|byte| byte.is_ascii_digit());
    plain && (raw == "0" || !raw.starts_with('0'))
}

/// Whether every reader of JSON takes this scalar, if it is one.
fn is_readable(raw: &str) -> bool {
    match raw.as_bytes().first() {
        Some(b'"') => !raw.contains("\\u") || serde_json::from_str::<String>(raw).is_ok(),
        Some(b'-' | b'0'..=b'9') => raw.parse::<f64>().map_or(true, f64::is_finite),
        _ => true,
    }
}

pub(super) fn cut(value: &str, bytes: usize) -> &str {
    &value[..value.floor_char_boundary(bytes)]
}

pub(super) fn era_name(era: Era) -> &'static str {
    match era {
        Era::Legacy => "legacy",
        Era::Modern => "modern",
    }
}

pub(super) fn as_millis(value: Duration) -> f64 {
    // Below 2^53 microseconds (285 years) this is the decimal number itself.
    value.as_micros() as f64 / 1000.0
}

pub(super) fn is_control(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}')
}

pub(super) fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if is_control(c) {
            safe.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            safe.push(c);
        }
    }
    safe
}

/// Writes the record as one line for a terminal: what one looks for first, then the rest as `name=value`.
pub(super) fn terminal(record: &Record, line: &mut Vec<u8>) {
    let mut row = Row(line);
    row.word(&record.ts);
    row.word(record.outcome.map_or("-", super::Outcome::as_str));
    row.word(&record.status.map_or_else(|| "-".to_owned(), |status| status.to_string()));
    row.word(record.upstream.as_deref().unwrap_or("-"));
    row.word(record.rpc.as_deref().or(record.http_method.as_deref()).unwrap_or("-"));
    if let Some(tool) = &record.tool {
        row.word(cut(tool, TEXT_BYTES));
    }
    row.word(&format!("{}ms", as_millis(record.duration_ms.unwrap_or_default())));
    row.pair("upstream_status", record.upstream_status);
    row.pair("reason", record.reason);
    row.token("retry_after", record.retry_after.as_ref());
    row.pair("cancelled_by", record.cancelled_by.map(super::CancelledBy::as_str));
    row.pair("cancel_ms", record.cancel_ms.map(as_millis));
    row.pair("era", record.era.map(era_name));
    row.token("id", record.id.as_ref());
    row.pair("session", record.session.as_deref());
    row.pair("client", record.client.as_deref());
    row.pair("job", record.job.as_deref());
    row.pair("key", record.key.as_deref());
    row.pair("attempt", record.attempt);
    row.pair("resume", record.resume.as_deref());
    row.pair("progress", record.progress);
    row.pair("total", record.total);
    row.pair("refetch", record.refetch);
    row.pair("request", Some(record.request.as_str()));
    row.pair("error", record.error.as_deref());
    line.push(b'\n');
}

/// One line under way; nothing gets into it unescaped, unbounded, or looking like more than one value.
struct Row<'a>(&'a mut Vec<u8>);

impl Row<'_> {
    fn word(&mut self, text: &str) {
        self.space();
        self.value(text);
    }

    fn pair(&mut self, name: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.name(name);
            self.value(&value.to_string());
        }
    }

    /// A JSON token brings its own quotes.
    fn token(&mut self, name: &str, token: Option<&Token>) {
        if let Some(token) = token {
            self.name(name);
            self.0.extend_from_slice(escaped(token.get()).as_bytes());
        }
    }

    fn space(&mut self) {
        if !self.0.is_empty() {
            self.0.push(b' ');
        }
    }

    fn name(&mut self, name: &str) {
        self.space();
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'=');
    }

    fn value(&mut self, text: &str) {
        let text = cut(text, IDENTITY_BYTES);
        let quoted = text.contains(|c: char| c.is_whitespace() || c == '"');
        // A string is always JSON.
        let quoted = quoted.then(|| serde_json::to_string(text).unwrap_or_default());
        self.0.extend_from_slice(escaped(quoted.as_deref().unwrap_or(text)).as_bytes());
    }
}
