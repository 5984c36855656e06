//! How the values of a record are written: bounded, and nothing in them that could forge a line.

use std::{borrow::Cow, io, time::Duration};

use serde::{Serialize, Serializer};
use serde_json::{ser::Formatter, value::RawValue};

use crate::message::Era;

use super::Record;

/// Bytes of one value; a line has a few dozen of them, so a line is bounded too.
const TEXT_BYTES: usize = 255;
/// Bytes of a job, activity or key, which contract section 6 lets be longer than other text.
const IDENTITY_BYTES: usize = 1024;

/// Bounds a value for the log to 255 bytes, on a character boundary. Control characters stay: they are escaped
/// where the line is written.
pub fn clean(value: &str) -> Cow<'_, str> {
    Cow::Borrowed(cut(value, TEXT_BYTES))
}

/// A JSON scalar for the log, as its token stands: a number with its exact digits, a string as a string.
/// A string beyond 255 bytes is cut. `None` if it is no JSON scalar.
pub fn token(raw: &[u8]) -> Option<Box<RawValue>> {
    let raw = std::str::from_utf8(raw).ok()?.trim_ascii();
    if raw.starts_with(['{', '[']) {
        return None;
    }
    if raw.len() <= TEXT_BYTES {
        return RawValue::from_string(raw.to_owned()).ok();
    }
    // Too long: a string is cut as text; digits that many, or lone surrogates, are shown as text too.
    let text = serde_json::from_str::<String>(raw).unwrap_or_else(|_| raw.to_owned());
    serde_json::value::to_raw_value(cut(&text, TEXT_BYTES)).ok()
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

/// Writes the record as one JSON line.
pub(super) fn json(record: &Record, line: &mut Vec<u8>) {
    let mut serializer = serde_json::Serializer::with_formatter(&mut *line, Escaping);
    // Every value is a scalar and a Vec takes every byte: it cannot fail.
    let _ = record.serialize(&mut serializer);
    line.push(b'\n');
}

/// Compact JSON in which what a terminal or a line-splitting reader could take for control is escaped too:
/// U+007F to U+009F, U+2028, U+2029 (JSON itself demands it below U+0020 only).
struct Escaping;

impl Formatter for Escaping {
    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        escape(writer, text)
    }

    // A token's bytes beyond ASCII lie in its strings, so they may be escaped in place.
    fn write_raw_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        escape(writer, text)
    }
}

pub(super) fn is_control(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}')
}

fn escape<W: ?Sized + io::Write>(writer: &mut W, text: &str) -> io::Result<()> {
    if text.bytes().all(|byte| byte < 0x7f) {
        return writer.write_all(text.as_bytes());
    }
    let mut written = 0;
    for (at, c) in text.char_indices().filter(|&(_, c)| is_control(c)) {
        writer.write_all(&text.as_bytes()[written..at])?;
        write!(writer, "\\u{:04x}", u32::from(c))?;
        written = at + c.len_utf8();
    }
    writer.write_all(&text.as_bytes()[written..])
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
    row.pair("retry_after", record.retry_after.as_ref());
    row.pair("cancelled_by", record.cancelled_by.map(super::CancelledBy::as_str));
    row.pair("cancel_ms", record.cancel_ms.map(as_millis));
    row.pair("era", record.era.map(era_name));
    row.pair("id", record.id.as_ref());
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

/// One line under way; nothing gets into it unescaped or unbounded.
struct Row<'a>(&'a mut Vec<u8>);

impl Row<'_> {
    fn word(&mut self, text: &str) {
        if !self.0.is_empty() {
            self.0.push(b' ');
        }
        self.escaped(cut(text, IDENTITY_BYTES));
    }

    fn pair(&mut self, name: &str, value: Option<impl std::fmt::Display>) {
        let Some(value) = value else { return };
        let value = value.to_string();
        self.word(name);
        self.0.push(b'=');
        // The quotes of what came as a JSON token are its own.
        if value.contains(char::is_whitespace) && !value.starts_with('"') {
            self.0.push(b'"');
            self.escaped(cut(&value, IDENTITY_BYTES));
            self.0.push(b'"');
        } else {
            self.escaped(cut(&value, IDENTITY_BYTES));
        }
    }

    fn escaped(&mut self, text: &str) {
        for c in text.chars() {
            if is_control(c) {
                self.0.extend_from_slice(format!("\\u{:04x}", u32::from(c)).as_bytes());
            } else {
                self.0.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
            }
        }
    }
}
