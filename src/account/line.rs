//! A record as one line of JSON, written by hand: a line is written for each call, and a general serializer looks at every
//! name and asks for every value anew.

use std::time::Duration;

use super::{
    Record, Token,
    shape::{self, IDENTITY_BYTES, TEXT_BYTES, cut},
};

/// Writes the record as one JSON line into the empty `line`.
///
/// What a terminal or a reader that splits lines could take for control is escaped too: U+007F to U+009F, U+2028,
/// U+2029 (JSON itself demands it below U+0020 only). They lie in strings only, so the finished line is looked
/// at once; looking at each string costs a tenth of the whole.
pub(super) fn json(record: &Record, line: &mut Vec<u8>) {
    write(record, &mut Line(line));
    if !line.is_ascii() || memchr::memchr(0x7f, line).is_some() {
        *line = shape::escaped(&String::from_utf8_lossy(line)).into_bytes();
    }
    line.push(b'\n');
}

/// The fields in their order. Taken apart whole, so that a new one can't be forgotten here.
#[rustfmt::skip]
fn write(record: &Record, line: &mut Line<'_>) {
    let Record {
        ts, request, upstream, peer, http_method, path, era, protocol, rpc, id, tool, session, client, job, activity, key,
        digest, attempt, retry_class, replayed, resume, listing_changed, status, upstream_status, outcome, reason,
        retry_after, cancelled_by, cancel_ms, stream, events, progress_in, progress_out, progress_coalesced,
        progress_dropped, progress, total, refetch, keepalives, bytes_in, bytes_out, connect_ms, first_byte_ms,
        duration_ms, reused, http, upstream_http, trace, error,
    } = record;
    line.raw("{\"ts\":");
    line.value(ts);
    line.text(",\"request\":", Some(request));
    line.word(",\"upstream\":", upstream.as_deref());
    line.text(",\"peer\":", peer.as_deref());
    line.text(",\"http_method\":", http_method.as_deref());
    line.text(",\"path\":", path.as_deref());
    line.word(",\"era\":", era.map(shape::era_name));
    line.text(",\"protocol\":", protocol.as_deref());
    line.text(",\"rpc\":", rpc.as_deref());
    line.token(",\"id\":", id.as_ref());
    line.text(",\"tool\":", tool.as_deref());
    line.text(",\"session\":", session.as_deref());
    line.text(",\"client\":", client.as_deref());
    line.identity(",\"job\":", job.as_deref());
    line.identity(",\"activity\":", activity.as_deref());
    line.identity(",\"key\":", key.as_deref());
    line.text(",\"digest\":", digest.as_deref());
    line.whole(",\"attempt\":", *attempt);
    line.word(",\"retry_class\":", *retry_class);
    line.flag(",\"replayed\":", *replayed);
    line.text(",\"resume\":", resume.as_deref());
    line.flag(",\"listing_changed\":", *listing_changed);
    line.whole(",\"status\":", status.map(u64::from));
    line.whole(",\"upstream_status\":", upstream_status.map(u64::from));
    line.word(",\"outcome\":", outcome.map(super::Outcome::as_str));
    line.word(",\"reason\":", *reason);
    line.token(",\"retry_after\":", retry_after.as_ref());
    line.word(",\"cancelled_by\":", cancelled_by.map(super::CancelledBy::as_str));
    line.millis(",\"cancel_ms\":", *cancel_ms);
    line.word(",\"stream\":", stream.map(super::Stream::as_str));
    line.whole(",\"events\":", *events);
    line.whole(",\"progress_in\":", *progress_in);
    line.whole(",\"progress_out\":", *progress_out);
    line.whole(",\"progress_coalesced\":", *progress_coalesced);
    line.whole(",\"progress_dropped\":", *progress_dropped);
    line.number(",\"progress\":", *progress);
    line.number(",\"total\":", *total);
    line.flag(",\"refetch\":", *refetch);
    line.whole(",\"keepalives\":", *keepalives);
    line.whole(",\"bytes_in\":", *bytes_in);
    line.whole(",\"bytes_out\":", *bytes_out);
    line.millis(",\"connect_ms\":", *connect_ms);
    line.millis(",\"first_byte_ms\":", *first_byte_ms);
    line.millis(",\"duration_ms\":", *duration_ms);
    line.flag(",\"reused\":", *reused);
    line.word(",\"http\":", *http);
    line.word(",\"upstream_http\":", *upstream_http);
    line.text(",\"trace\":", trace.as_deref());
    line.text(",\"error\":", error.as_deref());
    line.raw("}");
}

/// A line under way. What is `None` is left out; a name comes with its comma, its quotes and its colon.
struct Line<'a>(&'a mut Vec<u8>);

impl Line<'_> {
    fn raw(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
    }

    /// A string, escaped as JSON has it.
    fn value(&mut self, text: &str) {
        let special = |byte: &u8| (*byte < 0x20) | (*byte == b'"') | (*byte == b'\\');
        if text.as_bytes().iter().fold(false, |any, byte| any | special(byte)) {
            // A string is always JSON, and a Vec takes every byte.
            let _ = serde_json::to_writer(&mut *self.0, text);
            return;
        }
        self.0.push(b'"');
        self.raw(text);
        self.0.push(b'"');
    }

    /// A value that is one of a few.
    fn word(&mut self, name: &str, word: Option<&str>) {
        if let Some(word) = word {
            self.raw(name);
            self.value(word);
        }
    }

    fn text(&mut self, name: &str, text: Option<&str>) {
        self.word(name, text.map(|text| cut(text, TEXT_BYTES)));
    }

    fn identity(&mut self, name: &str, text: Option<&str>) {
        self.word(name, text.map(|text| cut(text, IDENTITY_BYTES)));
    }

    fn token(&mut self, name: &str, token: Option<&Token>) {
        if let Some(token) = token {
            self.raw(name);
            self.raw(token.get());
        }
    }

    fn flag(&mut self, name: &str, flag: Option<bool>) {
        if let Some(flag) = flag {
            self.raw(name);
            self.raw(if flag { "true" } else { "false" });
        }
    }

    fn whole(&mut self, name: &str, number: Option<u64>) {
        if let Some(number) = number {
            self.raw(name);
            self.digits(number);
        }
    }

    fn digits(&mut self, number: u64) {
        // A number is always JSON, and a Vec takes every byte.
        let _ = serde_json::to_writer(&mut *self.0, &number);
    }

    /// Milliseconds with up to three decimals.
    fn millis(&mut self, name: &str, time: Option<Duration>) {
        let Some(time) = time else { return };
        self.raw(name);
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.digits(micros / 1000);
        let rest = (micros % 1000) as u16;
        if rest > 0 {
            let digits = [b'.', digit(rest / 100), digit(rest / 10 % 10), digit(rest % 10)];
            let zeros = digits.iter().rev().take_while(|digit| **digit == b'0').count();
            self.0.extend_from_slice(&digits[..digits.len() - zeros]);
        }
    }

    /// A number, without a fraction where it has none; one that JSON cannot say is null.
    fn number(&mut self, name: &str, number: Option<f64>) {
        const EXACT: f64 = 9_007_199_254_740_992.0; // 2^53: every whole number below it is one double
        let Some(number) = number else { return };
        self.raw(name);
        // A number is always JSON, and a Vec takes every byte.
        let _ = match number {
            whole if whole.fract() == 0.0 && whole.abs() < EXACT => {
                serde_json::to_writer(&mut *self.0, &(whole as i64))
            }
            other => serde_json::to_writer(&mut *self.0, &other),
        };
    }
}

fn digit(digit: u16) -> u8 {
    b'0' + digit as u8
}
