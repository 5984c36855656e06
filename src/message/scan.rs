//! A strict JSON scanner (RFC 8259) that keeps positions and decodes nothing by itself.
//!
//! One pass, no recursion on what comes from outside: a value of any depth is skipped with a stack of
//! one bit a level. UTF-8 is the caller's to check.

use std::ops::Range;

use super::text::Text;

/// Why the bytes are not JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bad {
    /// Where, in bytes from the start.
    pub(super) at: usize,
    /// What is wrong there.
    pub(super) what: &'static str,
}

/// The scanner: stands at a byte, goes forward only.
#[derive(Debug)]
pub(super) struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: usize,
    deepest: usize,
}

impl<'a> Scan<'a> {
    /// Stands at the start of `bytes`.
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self::from(bytes, 0)
    }

    /// Stands at `at`; positions stay those of `bytes`.
    pub(super) fn from(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at, depth: 0, deepest: 0 }
    }

    /// The deepest nesting seen so far; an object by itself is 1.
    pub(super) fn deepest(&self) -> usize {
        self.deepest
    }

    /// The bytes of a span that the scanner gave.
    pub(super) fn slice(&self, span: Range<usize>) -> &'a [u8] {
        self.bytes.get(span).unwrap_or_default()
    }

    /// The first byte of the next value.
    pub(super) fn peek_value(&mut self) -> Option<u8> {
        self.space();
        self.peek()
    }

    /// Nothing but white space is left.
    pub(super) fn end(&mut self) -> Result<(), Bad> {
        self.space();
        if self.at == self.bytes.len() { Ok(()) } else { Err(self.bad("trailing characters")) }
    }

    /// What was not looked at yet.
    pub(super) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    /// Skips a value of any kind.
    pub(super) fn value(&mut self) -> Result<Range<usize>, Bad> {
        self.space();
        let start = self.at;
        match self.peek() {
            Some(b'{' | b'[') => self.nested()?,
            _ => self.scalar()?,
        }
        Ok(start..self.at)
    }

    /// Skips a value; gives it if it is a string.
    pub(super) fn maybe_string(&mut self) -> Result<Option<Text<'a>>, Bad> {
        if self.peek_value() == Some(b'"') { self.string().map(Some) } else { self.value().map(|_| None) }
    }

    /// Reads an object and calls `member` with each key; `member` takes the value. Skips anything that is no object.
    /// Gives where the value lies, and whether it is an object.
    pub(super) fn maybe_object(
        &mut self,
        mut member: impl FnMut(&mut Self, Text<'a>) -> Result<(), Bad>,
    ) -> Result<(Range<usize>, bool), Bad> {
        if self.peek_value() != Some(b'{') {
            return Ok((self.value()?, false));
        }
        let start = self.enter();
        if !self.eat(b'}') {
            self.member(&mut member)?;
            self.members(member)?;
        }
        self.depth -= 1;
        Ok((start..self.at, true))
    }

    /// Behind a member of an object: reads those that follow, and the end of the object, as
    /// [`maybe_object`](Self::maybe_object) does.
    pub(super) fn members(
        &mut self,
        mut member: impl FnMut(&mut Self, Text<'a>) -> Result<(), Bad>,
    ) -> Result<(), Bad> {
        while !self.ends_with(b'}', "expected `,` or `}`")? {
            self.member(&mut member)?;
        }
        Ok(())
    }

    fn member(&mut self, member: &mut impl FnMut(&mut Self, Text<'a>) -> Result<(), Bad>) -> Result<(), Bad> {
        self.space();
        let key = self.string()?;
        self.colon()?;
        member(self, key)
    }

    /// Reads an array, which must be next, and calls `element` for each element; `element` takes the value.
    pub(super) fn array(
        &mut self,
        mut element: impl FnMut(&mut Self) -> Result<(), Bad>,
    ) -> Result<Range<usize>, Bad> {
        if self.peek_value() != Some(b'[') {
            return Err(self.bad("expected an array"));
        }
        let start = self.enter();
        if !self.eat(b']') {
            loop {
                element(self)?;
                if self.ends_with(b']', "expected `,` or `]`")? {
                    break;
                }
            }
        }
        self.depth -= 1;
        Ok(start..self.at)
    }

    /// Takes the bracket that opens an object or array.
    fn enter(&mut self) -> usize {
        let start = self.at;
        self.at += 1;
        self.depth += 1;
        self.deepest = self.deepest.max(self.depth);
        self.space();
        start
    }

    /// After a member or element: whether the bracket that closes came, and not a comma.
    fn ends_with(&mut self, close: u8, what: &'static str) -> Result<bool, Bad> {
        self.space();
        if self.eat(b',') {
            Ok(false)
        } else if self.eat(close) {
            Ok(true)
        } else {
            Err(self.bad(what))
        }
    }

    /// Skips an object or array, whatever its depth.
    fn nested(&mut self) -> Result<(), Bad> {
        let mut open = Open::default();
        loop {
            let (object, close) = match self.peek() {
                Some(b'{') => (true, b'}'),
                Some(b'[') => (false, b']'),
                _ => {
                    self.scalar()?;
                    if self.close(&mut open)? { return Ok(()) } else { continue }
                }
            };
            self.at += 1;
            open.push(object);
            self.deepest = self.deepest.max(self.depth + open.depth);
            self.space();
            if self.eat(close) {
                open.pop();
                if self.close(&mut open)? {
                    return Ok(());
                }
            } else if object {
                self.key()?;
            }
        }
    }

    /// After a value: takes every bracket that closes; true when nothing is open, else the next value is next.
    fn close(&mut self, open: &mut Open) -> Result<bool, Bad> {
        while open.depth > 0 {
            self.space();
            match (self.peek(), open.object()) {
                (Some(b','), true) => {
                    self.at += 1;
                    self.space();
                    self.key()?;
                    return Ok(false);
                }
                (Some(b','), false) => {
                    self.at += 1;
                    self.space();
                    return Ok(false);
                }
                (Some(b'}'), true) | (Some(b']'), false) => {
                    self.at += 1;
                    open.pop();
                }
                (_, true) => return Err(self.bad("expected `,` or `}`")),
                (_, false) => return Err(self.bad("expected `,` or `]`")),
            }
        }
        Ok(true)
    }

    /// A key and its colon, and the white space before its value.
    fn key(&mut self) -> Result<(), Bad> {
        self.string()?;
        self.colon()?;
        self.space();
        Ok(())
    }

    fn colon(&mut self) -> Result<(), Bad> {
        self.space();
        if self.eat(b':') { Ok(()) } else { Err(self.bad("expected `:`")) }
    }

    fn scalar(&mut self) -> Result<(), Bad> {
        match self.peek() {
            Some(b'"') => self.string().map(|_| ()),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.literal(b"true"),
            Some(b'f') => self.literal(b"false"),
            Some(b'n') => self.literal(b"null"),
            Some(_) => Err(self.bad("expected a value")),
            None => Err(self.bad("unexpected end")),
        }
    }

    fn literal(&mut self, word: &[u8]) -> Result<(), Bad> {
        if self.bytes[self.at..].starts_with(word) {
            self.at += word.len();
            Ok(())
        } else {
            Err(self.bad("expected a value"))
        }
    }

    fn number(&mut self) -> Result<(), Bad> {
        self.eat(b'-');
        if !self.eat(b'0') {
            self.digits()?;
        }
        if self.eat(b'.') {
            self.digits()?;
        }
        if self.eat(b'e') || self.eat(b'E') {
            if !self.eat(b'+') {
                self.eat(b'-');
            }
            self.digits()?;
        }
        Ok(())
    }

    /// Takes a whole number of so few digits that a double holds it exactly, if one is next.
    pub(super) fn whole(&mut self) -> Option<u64> {
        const EXACT: usize = 15;
        let digits = self.rest().iter().take(EXACT + 1).take_while(|byte| byte.is_ascii_digit());
        let (count, whole) =
            digits.fold((0, 0), |(count, whole), digit| (count + 1, whole * 10 + u64::from(digit - b'0')));
        let goes_on = matches!(self.bytes.get(self.at + count), Some(b'.' | b'e' | b'E'));
        let is_number = count == 1 || count > 1 && self.peek() != Some(b'0');
        if goes_on || !is_number || count > EXACT {
            return None;
        }
        self.at += count;
        Some(whole)
    }

    fn digits(&mut self) -> Result<(), Bad> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at > start { Ok(()) } else { Err(self.bad("expected a digit")) }
    }

    /// A string, which must be next.
    pub(super) fn string(&mut self) -> Result<Text<'a>, Bad> {
        let start = self.at;
        if !self.eat(b'"') {
            return Err(self.bad("expected a string"));
        }
        let mut escaped = false;
        loop {
            self.at = plain_end(self.bytes, self.at);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(Text { token: &self.bytes[start..self.at], start, escaped });
                }
                Some(b'\\') => {
                    escaped = true;
                    self.escape()?;
                }
                Some(_) => return Err(self.bad("a control character in a string")),
                None => return Err(self.bad("unexpected end in a string")),
            }
        }
    }

    fn escape(&mut self) -> Result<(), Bad> {
        let length = match self.bytes.get(self.at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 2,
            Some(b'u') => 6,
            _ => return Err(self.bad("an unknown escape")),
        };
        let digits = self.bytes.get(self.at + 2..self.at + length);
        if !digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)) {
            return Err(self.bad("an unknown escape"));
        }
        self.at += length;
        Ok(())
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn eat(&mut self, byte: u8) -> bool {
        let there = self.peek() == Some(byte);
        self.at += usize::from(there);
        there
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn bad(&self, what: &'static str) -> Bad {
        Bad { at: self.at, what }
    }
}

/// Which of the brackets that are open belong to objects: one bit each, so that a hostile depth costs next to nothing.
#[derive(Debug, Default)]
struct Open {
    /// The innermost up to 64, the last one lowest.
    bits: u64,
    /// The others, 64 a word.
    spill: Vec<u64>,
    depth: usize,
}

impl Open {
    fn push(&mut self, object: bool) {
        if self.depth > 0 && self.depth.is_multiple_of(64) {
            self.spill.push(self.bits);
        }
        self.bits = self.bits << 1 | u64::from(object);
        self.depth += 1;
    }

    fn pop(&mut self) {
        self.depth -= 1;
        self.bits >>= 1;
        if self.depth > 0 && self.depth.is_multiple_of(64) {
            self.bits = self.spill.pop().unwrap_or(0);
        }
    }

    fn object(&self) -> bool {
        self.bits & 1 == 1
    }
}

/// The first quote, backslash or control character at or after `at`; many bytes at a time, since strings are most of a
/// message: eight, which ends most, then thirty-two while they last, which become a few vector instructions.
fn plain_end(bytes: &[u8], mut at: usize) -> usize {
    /// So many bytes are no long string yet.
    const SHORT: usize = 16;
    let ends = |byte: &u8| (*byte < 0x20) | (*byte == b'"') | (*byte == b'\\');
    let long = at + SHORT;
    while let Some(plain) = plain_of_word(bytes, at) {
        at += plain;
        if plain < 8 {
            return at;
        }
        if at == long {
            while let Some(chunk) = bytes.get(at..).and_then(|rest| rest.first_chunk::<32>()) {
                if chunk.iter().fold(false, |found, byte| found | ends(byte)) {
                    break;
                }
                at += 32;
            }
        }
    }
    while bytes.get(at).is_some_and(|&byte| byte >= 0x20 && byte != b'"' && byte != b'\\') {
        at += 1;
    }
    at
}

/// How many of the eight bytes at `at` come before the first quote, backslash or control character; `None` if there are
/// no eight.
fn plain_of_word(bytes: &[u8], at: usize) -> Option<usize> {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGHS: u64 = 0x8080_8080_8080_8080;
    // The high bit of each byte of `word` that is below `n` (n ≤ 128). A borrow can spoil only bytes above a true one,
    // and the lowest is what counts.
    let below = |word: u64, n: u64| word.wrapping_sub(ONES * n) & !word & HIGHS;
    let word = u64::from_le_bytes(*bytes.get(at..)?.first_chunk::<8>()?);
    let found = below(word, 0x20)
        | below(word ^ (ONES * u64::from(b'"')), 1)
        | below(word ^ (ONES * u64::from(b'\\')), 1);
    Some(found.trailing_zeros() as usize / 8)
}

#[cfg(test)]
mod tests;
