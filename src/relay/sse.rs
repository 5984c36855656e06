//! Finds events in a `text/event-stream` under any chunking (WHATWG HTML § 9.2.5, § 9.2.6).
//!
//! An *event* here is the bytes of one block, its ending blank line included, exactly as they came,
//! less its comment lines. The scanner keeps counters and, only for an event cut over chunks, its
//! beginning; an event that lies in one chunk is a slice of it. Blocks of nothing but comments and
//! blank lines give no event. Every byte is looked at once while it arrives and once when its event is
//! complete, so tiny chunks cost no more than large ones.

mod block;

use std::ops::Range;

use bytes::{Buf, Bytes};
use memchr::{memchr, memchr2};

use self::block::Block;

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// Its bytes as they came, comment lines cut out.
    pub bytes: Bytes,
    /// Bytes that came before it and mean something only if nothing of ours was sent in between: a
    /// byte-order mark at the start of the stream, or the LF of a CRLF whose CR ended the event before.
    /// An event with empty `bytes` is such a prefix alone.
    pub prefix: Bytes,
    /// The value of `data`: its lines joined by LF; `None` without a `data` field (then no event is dispatched).
    pub data: Option<Bytes>,
    /// `event:` if it is there and not empty.
    pub name: Option<Bytes>,
    /// `id:` if it is there and holds no NUL.
    pub id: Option<Bytes>,
    /// `retry:` in milliseconds, if it is digits only (saturating).
    pub retry: Option<u64>,
}

impl Event {
    /// The same event with other data, one `data:` line for each line of it in the place of the old ones. A byte-order mark or
    /// an LF before it, and every other line, stays as it came.
    pub fn with_data(&self, data: Bytes) -> Self {
        let mut bytes = Vec::with_capacity(self.bytes.len());
        let mut replaced = false;
        for line in lines(&self.bytes) {
            let content = line.strip_suffix(b"\n").unwrap_or(line);
            let content = content.strip_suffix(b"\r").unwrap_or(content);
            if content != b"data" && !content.starts_with(b"data:") {
                bytes.extend_from_slice(line);
                continue;
            }
            if std::mem::replace(&mut replaced, true) {
                continue;
            }
            for one in data.split(|byte| *byte == b'\n') {
                bytes.extend_from_slice(b"data: ");
                bytes.extend_from_slice(one);
                bytes.extend_from_slice(&line[content.len()..]);
            }
        }
        Self { bytes: bytes.into(), data: Some(data), ..self.clone() }
    }

    /// Gives an event that will be held for a while memory of its own: as a slice it keeps the whole chunk that it came
    /// in. Its fields say only that they are there from now on; a large event is not copied, as it is most of its chunk.
    pub fn detach(&mut self) {
        if self.bytes.len() <= LARGE {
            self.bytes = Bytes::copy_from_slice(&self.bytes);
        }
        self.prefix = Bytes::copy_from_slice(&self.prefix);
        for field in [&mut self.data, &mut self.name, &mut self.id].into_iter().flatten() {
            *field = Bytes::new();
        }
    }
}

/// An event beyond this is not copied to free its chunk.
const LARGE: usize = 256 * 1024;

/// The lines of a block, each with its own ending (LF, CRLF or CR).
fn lines(block: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = block;
    std::iter::from_fn(move || {
        let at = memchr2(b'\n', b'\r', rest)?;
        let crlf = rest[at] == b'\r' && rest.get(at + 1) == Some(&b'\n');
        let (line, after) = rest.split_at(at + 1 + usize::from(crlf));
        rest = after;
        Some(line)
    })
}

/// The event that `bytes` begin with, if the whole of it is there and it is of the plainest form, as most are: no name
/// but `message`, one line of data, no comment, and line feeds alone. Gives where its data lies, and where it ends.
pub fn plain(bytes: &[u8]) -> Option<(Range<usize>, usize)> {
    const NAME: &[u8] = b"event: message\n";
    const DATA: &[u8] = b"data:";
    let name = if bytes.starts_with(NAME) { NAME.len() } else { 0 };
    let value = bytes.get(name..)?.strip_prefix(DATA)?;
    let data = name + DATA.len() + usize::from(value.first() == Some(&b' '));
    let end = data + memchr2(b'\n', b'\r', bytes.get(data..)?)?;
    bytes[end..].starts_with(b"\n\n").then_some((data..end, end + 2))
}

/// One event is larger than the limit.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("an event exceeds {0} bytes")]
pub struct TooLarge(pub usize);

/// Finds the events of one stream.
#[derive(Debug)]
pub struct Scanner {
    limit: usize,
    /// How much of a byte-order mark the stream began with so far; `None` once that is decided.
    mark: Option<usize>,
    /// For the next event.
    prefix: Bytes,
    /// What earlier chunks held of the unfinished block, comment lines cut out. At most `limit` bytes.
    block: Block,
    /// Where in a line the last chunk ended.
    place: Place,
    /// What an LF at the start of the next chunk belongs to, if the last one ended with a CR.
    after_cr: AfterCr,
    /// The last line end seen.
    line_end: &'static [u8],
    too_large: bool,
}

/// Where in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Start,
    Field,
    Comment,
}

/// What the CR at the end of a chunk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AfterCr {
    /// The chunk ended with no CR.
    No,
    /// A line of a block: an LF is part of it.
    Field,
    /// An event, which was given at once: an LF becomes a prefix.
    Event,
    /// A comment, or the blank line of an empty block: an LF goes with it.
    Nothing,
}

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

impl Scanner {
    /// A scanner at the start of a stream; an event may have at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            mark: Some(0),
            prefix: Bytes::new(),
            block: Block::default(),
            place: Place::Start,
            after_cr: AfterCr::No,
            line_end: b"\n",
            too_large: false,
        }
    }

    /// Takes the next chunk and gives every event that is now complete; see [`Scanner::next`].
    ///
    /// # Errors
    ///
    /// [`TooLarge`], as soon as it is known and before more is held; events before it were given.
    /// Every later call fails too.
    pub fn push(&mut self, mut chunk: Bytes, mut give: impl FnMut(Event)) -> Result<(), TooLarge> {
        while let Some(event) = self.next(&mut chunk)? {
            give(event);
        }
        Ok(())
    }

    /// Takes the next chunk up to the end of the first event that is now complete, or the whole of it.
    ///
    /// A blank line that ends with a CR at the chunk's end completes its event at once; an LF that
    /// then begins the next chunk is the prefix of the next event, or, if none is complete in that
    /// chunk, an event of its own with empty `bytes`.
    ///
    /// # Errors
    ///
    /// [`TooLarge`], as soon as it is known and before more is held. Every later call fails too.
    pub fn next(&mut self, chunk: &mut Bytes) -> Result<Option<Event>, TooLarge> {
        if self.too_large {
            return Err(TooLarge(self.limit));
        }
        if chunk.is_empty() {
            return Ok(None);
        }
        // `from` is where the unfinished block's part in this chunk begins, `at` where scanning goes on.
        let mut at = self.byte_order_mark(chunk);
        let mut from = at;
        self.line_feed(chunk, &mut from, &mut at);
        while at < chunk.len() {
            if self.place == Place::Start {
                match chunk[at] {
                    b'\n' | b'\r' => {
                        let blank = at;
                        at = self.after_line_end(chunk, blank);
                        let complete = !self.block.is_empty() || from < blank;
                        if self.after_cr != AfterCr::No {
                            self.after_cr = if complete { AfterCr::Event } else { AfterCr::Nothing };
                        }
                        if complete {
                            let event = self.event(chunk, from..at)?;
                            chunk.advance(at);
                            return Ok(Some(event));
                        }
                        from = at;
                        continue;
                    }
                    b':' => {
                        self.place = Place::Comment;
                        self.hold(&chunk[from..at])?;
                        from = at;
                    }
                    _ => self.place = Place::Field,
                }
            }
            let Some(length) = memchr2(b'\n', b'\r', &chunk[at..]) else { break };
            at = self.after_line_end(chunk, at + length);
            if self.place == Place::Comment {
                from = at;
                if self.after_cr != AfterCr::No {
                    self.after_cr = AfterCr::Nothing;
                }
            }
            self.place = Place::Start;
        }
        if self.place != Place::Comment {
            self.hold(&chunk[from..])?;
        }
        chunk.clear();
        // A byte-order mark waits for its event, since only our own bytes could come between; the LF
        // must not wait: nothing says when the next event comes.
        let alone = self.prefix == b"\n"[..];
        Ok(alone.then(|| Event { prefix: std::mem::take(&mut self.prefix), ..Event::default() }))
    }

    /// Whether the stream stands between two events, with nothing held that belongs to the next one: whoever knows where
    /// that ends may take it by [`plain`] instead.
    pub fn is_between(&self) -> bool {
        self.mark.is_none()
            && self.place == Place::Start
            && self.after_cr == AfterCr::No
            && self.block.is_empty()
            && self.prefix.is_empty()
            && !self.too_large
    }

    /// Some were taken by [`plain`].
    pub fn passed_plain(&mut self) {
        self.line_end = b"\n";
    }

    /// Bytes held of the unfinished event.
    pub fn held(&self) -> usize {
        self.block.len()
    }

    /// The stream ended: the last event if it lacks its blank line, completed with the line ends it lacks
    /// (in the style the stream last used). The caller decides whether it counts. `None` if nothing is
    /// left, or no `data`. The scanner is at the end of its life then.
    pub fn finish(&mut self) -> Option<Event> {
        let mut block = self.block.take(&[]);
        if block.is_empty() || self.too_large {
            return None;
        }
        // A comment that was cut began a line of its own, so only an unfinished field lacks its line end.
        if self.place == Place::Field {
            block.extend_from_slice(self.line_end);
        }
        block.extend_from_slice(self.line_end);
        let event = Event::read(block.into(), std::mem::take(&mut self.prefix));
        event.data.is_some().then_some(event)
    }

    /// Skips a byte-order mark at the start of the stream, however it is cut; gives how much of the chunk it took.
    fn byte_order_mark(&mut self, chunk: &[u8]) -> usize {
        let Some(seen) = self.mark else { return 0 };
        let wanted = &BYTE_ORDER_MARK[seen..];
        let length = wanted.len().min(chunk.len());
        if chunk[..length] != wanted[..length] {
            // What looked like one is the beginning of a line.
            self.mark = None;
            if seen > 0 {
                self.block.extend_from_slice(&BYTE_ORDER_MARK[..seen]);
                self.place = Place::Field;
            }
            return 0;
        }
        if length == wanted.len() {
            self.mark = None;
            self.prefix = Bytes::from_static(BYTE_ORDER_MARK);
        } else {
            self.mark = Some(seen + length);
        }
        length
    }

    /// Gives an LF that completes the CR of the chunk before to what that CR ended.
    fn line_feed(&mut self, chunk: &Bytes, from: &mut usize, at: &mut usize) {
        let Some(first) = chunk.get(*at) else { return };
        let after_cr = std::mem::replace(&mut self.after_cr, AfterCr::No);
        if after_cr == AfterCr::No || *first != b'\n' {
            return;
        }
        self.line_end = b"\r\n";
        *at += 1;
        match after_cr {
            AfterCr::Field => {}
            AfterCr::Event => {
                self.prefix = Bytes::from_static(b"\n");
                *from = *at;
            }
            AfterCr::Nothing | AfterCr::No => *from = *at,
        }
    }

    /// Where the line end that begins at `at` ends in this chunk.
    fn after_line_end(&mut self, chunk: &[u8], at: usize) -> usize {
        if chunk[at] == b'\n' {
            self.line_end = b"\n";
            return at + 1;
        }
        match chunk.get(at + 1) {
            Some(b'\n') => {
                self.line_end = b"\r\n";
                return at + 2;
            }
            Some(_) => {}
            None => self.after_cr = AfterCr::Field,
        }
        self.line_end = b"\r";
        at + 1
    }

    /// The event that ends with this part of the chunk.
    fn event(&mut self, chunk: &Bytes, part: Range<usize>) -> Result<Event, TooLarge> {
        // The LF of the blank line's CRLF does not count: whether it is here is a matter of chunking.
        let mut length = self.block.len() + part.len();
        if chunk[..part.end].ends_with(b"\r\n") && part.len() > 1 {
            length -= 1;
        }
        self.check(length)?;
        let bytes =
            if self.block.is_empty() { chunk.slice(part) } else { self.block.take(&chunk[part]).into() };
        Ok(Event::read(bytes, std::mem::take(&mut self.prefix)))
    }

    /// Copies a part of the unfinished block.
    fn hold(&mut self, part: &[u8]) -> Result<(), TooLarge> {
        self.check(self.block.len() + part.len())?;
        self.block.extend_from_slice(part);
        Ok(())
    }

    fn check(&mut self, length: usize) -> Result<(), TooLarge> {
        if length <= self.limit {
            return Ok(());
        }
        self.too_large = true;
        self.block = Block::default();
        Err(TooLarge(self.limit))
    }
}

impl Event {
    /// Reads the fields of a complete block (WHATWG HTML § 9.2.6).
    fn read(bytes: Bytes, prefix: Bytes) -> Self {
        let mut event = Self { prefix, ..Self::default() };
        let mut joined: Option<Vec<u8>> = None;
        for (field, value) in fields(&bytes) {
            let text = &bytes[value.clone()];
            match field {
                b"data" => match (&event.data, &mut joined) {
                    (None, _) => event.data = Some(bytes.slice(value)),
                    (Some(_), Some(joined)) => {
                        joined.push(b'\n');
                        joined.extend_from_slice(text);
                    }
                    (Some(first), None) => {
                        let mut lines = Vec::with_capacity(bytes.len());
                        lines.extend_from_slice(first);
                        lines.push(b'\n');
                        lines.extend_from_slice(text);
                        joined = Some(lines);
                    }
                },
                b"event" => event.name = (!text.is_empty()).then(|| bytes.slice(value)),
                b"id" if memchr(0, text).is_none() => event.id = Some(bytes.slice(value)),
                b"retry" if !text.is_empty() && text.iter().all(u8::is_ascii_digit) => {
                    event.retry = Some(text.iter().fold(0, |millis: u64, digit| {
                        millis.saturating_mul(10).saturating_add(u64::from(digit - b'0'))
                    }));
                }
                _ => {}
            }
        }
        if let Some(joined) = joined {
            event.data = Some(joined.into());
        }
        event.bytes = bytes;
        event
    }
}

/// The fields of a complete block in their order: each name, and where its value lies.
pub(super) fn fields(block: &[u8]) -> impl Iterator<Item = (&[u8], Range<usize>)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        // An empty line, or the LF of a CRLF, is no field.
        while matches!(block.get(at), Some(b'\n' | b'\r')) {
            at += 1;
        }
        let line = block.get(at..).filter(|rest| !rest.is_empty())?;
        let start = at;
        let end = start + memchr2(b'\n', b'\r', line).unwrap_or(line.len());
        at = end;
        let Some(colon) = memchr(b':', &block[start..end]) else {
            return Some((&block[start..end], end..end));
        };
        let colon = start + colon;
        let space = usize::from(block[colon + 1..end].first() == Some(&b' '));
        Some((&block[start..colon], colon + 1 + space..end))
    })
}

#[cfg(test)]
mod tests;
