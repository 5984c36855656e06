//! How the values of a record are written: bounded, and nothing in them that could forge a line.

use std::{borrow::Cow, fmt::Display, time::Duration};

use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::message::Era;

use super::Record;

/// Bytes of one value; a line has a few dozen of them, so a line is bounded too.
const TEXT_BYTES: usize = 255;
/// Bytes of a job, activity or key, which may be longer than other text.
const IDENTITY_BYTES: usize = 1024;

/// Bounds a value for the log to 255 bytes, on a character boundary. Control characters stay: they are escaped
/// where the line is written.
pub fn clean(value: &str) -> Cow<'_, str> {
    Cow::Borrowed(cut(value, TEXT_BYTES))
}

/// A JSON scalar for the log, as its token stands: a number with its exact digits, a string as a string.
/// A string beyond 255 bytes is cut; what readers of JSON may refuse (lone surrogates, numbers beyond a double) is shown
/// as the text of its token. `None` if it is no JSON scalar.
pub fn token(raw: &[u8]) -> Option<Box<RawValue>> {
    let raw = std::str::from_utf8(raw).ok()?.trim_ascii();
    if raw.starts_with(['{', '[']) {
        return None;
    }
    if raw.len() <= TEXT_BYTES && is_readable(raw) {
        return RawValue::from_string(raw.to_owned()).ok();
    }
    let text = serde_json::from_str::<String>(raw).unwrap_or_else(|_| raw.to_owned());
    serde_json::value::to_raw_value(cut(&text, TEXT_BYTES)).ok()
}

/// Whether every reader of JSON takes this scalar, if it is one.
fn is_readable(raw: &str) -> bool {
    match raw.as_bytes().first() {
        Some(b'"') => !raw.contains("\\u") || serde_json::from_str::<String>(raw).is_ok(),
        Some(b'-' | b'0'..=b'9') => raw.parse::<f64>().map_or(true, f64::is_finite),
        _ => true,
    }
}

fn cut(value: &str, bytes: usize) -> &str {
    &value[..value.floor_char_boundary(bytes)]
}

pub(super) fn text<S: Serializer>(value: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cut(value, TEXT_BYTES))
}

pub(super) fn option_text<S: Serializer>(value: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    value.as_deref().map(|value| cut(value, TEXT_BYTES)).serialize(serializer)
}

pub(super) fn option_identity<S: Serializer>(
    value: &Option<String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    value.as_deref().map(|value| cut(value, IDENTITY_BYTES)).serialize(serializer)
}

pub(super) fn era<S: Serializer>(value: &Option<Era>, serializer: S) -> Result<S::Ok, S::Error> {
    value.map(era_name).serialize(serializer)
}

pub(super) fn era_name(era: Era) -> &'static str {
    match era {
        Era::Legacy => "legacy",
        Era::Modern => "modern",
    }
}

/// Milliseconds with up to three decimals.
pub(super) fn millis<S: Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    number(&value.map(as_millis), serializer)
}

pub(super) fn as_millis(value: Duration) -> f64 {
    // Below 2^53 microseconds (285 years) this is the decimal number itself.
    value.as_micros() as f64 / 1000.0
}

/// A number, without a fraction where it has none; one that JSON cannot say is null.
pub(super) fn number<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    const EXACT: f64 = 9_007_199_254_740_992.0; // 2^53: every whole number below it is one double
    match value {
        Some(value) if value.fract() == 0.0 && value.abs() < EXACT => serializer.serialize_i64(*value as i64),
        other => other.serialize(serializer),
    }
}

/// Writes the record as one JSON line into the empty `line`.
///
/// What a terminal or a reader that splits lines could take for control is escaped too: U+007F to U+009F, U+2028,
/// U+2029 (JSON itself demands it below U+0020 only). They lie in strings only, so the finished line is looked
/// at once; looking at each string costs a tenth of the whole.
pub(super) fn json(record: &Record, line: &mut Vec<u8>) {
    // Every value is a scalar and a Vec takes every byte: it cannot fail.
    let _ = serde_json::to_writer(&mut *line, record);
    if !line.is_ascii() || memchr::memchr(0x7f, line).is_some() {
        *line = escaped(&String::from_utf8_lossy(line)).into_bytes();
    }
    line.push(b'\n');
}

pub(super) fn is_control(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}')
}

fn escaped(text: &str) -> String {
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
    row.token("retry_after", record.retry_after.as_deref());
    row.pair("cancelled_by", record.cancelled_by.map(super::CancelledBy::as_str));
    row.pair("cancel_ms", record.cancel_ms.map(as_millis));
    row.pair("era", record.era.map(era_name));
    row.token("id", record.id.as_deref());
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
    fn token(&mut self, name: &str, token: Option<&RawValue>) {
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
