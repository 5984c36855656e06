//! A JSON string as it stands in the bytes. What it says is decoded only where somebody asks for it, so that an escaped lone surrogate in a part
//! that nobody reads fails nothing.

use std::borrow::Cow;

/// A string as it stands in the bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Text<'a> {
    /// Its token, quotes included.
    pub(super) token: &'a [u8],
    /// Where its opening quote is.
    pub(super) start: usize,
    /// It has escapes.
    pub(super) escaped: bool,
}

impl<'a> Text<'a> {
    /// What is between its quotes.
    pub(super) fn raw(&self) -> &'a [u8] {
        self.token.get(1..self.token.len() - 1).unwrap_or_default()
    }

    /// What it says; a lone surrogate as the three bytes that UTF-8 would have for it, so that unlike strings stay unlike.
    pub(super) fn bytes(&self) -> Cow<'a, [u8]> {
        if self.escaped { Cow::Owned(unescape(self.raw())) } else { Cow::Borrowed(self.raw()) }
    }

    /// What it says; `None` with a lone surrogate or invalid UTF-8.
    pub(super) fn string(&self) -> Option<String> {
        String::from_utf8(self.bytes().into_owned()).ok()
    }
}

/// Decodes the escapes of a string that the scanner has passed.
fn unescape(raw: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(slash) = memchr::memchr(b'\\', rest) {
        out.extend_from_slice(&rest[..slash]);
        let (code, length) = escaped(&rest[slash..]);
        push_code(&mut out, code);
        rest = rest.get(slash + length..).unwrap_or_default();
    }
    out.extend_from_slice(rest);
    out
}

/// The code point that an escape at the start of `at` stands for, and the escape's length (12 for a surrogate pair).
fn escaped(at: &[u8]) -> (u32, usize) {
    let simple = match at.get(1) {
        Some(b'b') => 0x08,
        Some(b'f') => 0x0C,
        Some(b'n') => 0x0A,
        Some(b'r') => 0x0D,
        Some(b't') => 0x09,
        Some(b'u') => {
            let high = hex(at.get(2..6));
            let low = if at.get(6..8) == Some(b"\\u") { hex(at.get(8..12)) } else { 0 };
            if (0xD800..0xDC00).contains(&high) && (0xDC00..0xE000).contains(&low) {
                return (0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00), 12);
            }
            return (high, 6);
        }
        Some(&byte) => u32::from(byte),
        None => u32::from(b'\\'),
    };
    (simple, 2)
}

fn hex(digits: Option<&[u8]>) -> u32 {
    digits
        .unwrap_or_default()
        .iter()
        .fold(0, |code, &digit| code << 4 | char::from(digit).to_digit(16).unwrap_or(0))
}

/// Writes a code point as UTF-8; a surrogate as the three bytes the scheme would have for it.
fn push_code(out: &mut Vec<u8>, code: u32) {
    match char::from_u32(code) {
        Some(char) => out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        None => out.extend_from_slice(&[0xED, 0x80 | (code >> 6 & 0x3F) as u8, 0x80 | (code & 0x3F) as u8]),
    }
}
