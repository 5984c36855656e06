//! Watches the bytes of an HTTP/1.1 connection for heads that two readers could read unlike, which hyper mends instead of refusing:
//! it drops a `Content-Length` that stands beside `Transfer-Encoding`, one of two lengths that are alike, and the fragment of a target. A
//! hop behind or before this one may decide otherwise, so they are refused (RFC 9112 § 3.2, § 6.3, § 11.2).
//!
//! The end of such a head is spoilt, so that hyper can't read it, and it is refused as every head that hyper can't read. Everything
//! else passes as it came.

use memchr::memchr;

/// Follows one connection from its first byte.
#[derive(Debug, Default)]
pub(super) struct Framing {
    state: State,
    head: Head,
    /// The beginning of the line under way, as far as it came in an earlier piece.
    line: Vec<u8>,
}

/// What the next byte is part of.
#[derive(Debug, Default)]
enum State {
    /// A line of a head.
    #[default]
    Head,
    /// So many bytes of a body.
    Body(u64),
    /// The line with a chunk's size.
    Size,
    /// So many bytes of a chunk, its line end included.
    Chunk(u64),
    /// A line of the trailers.
    Trailers,
    /// Nothing that hyper would read: it has refused, or will.
    Over,
}

/// What is known of the head under way.
#[derive(Debug, Default)]
struct Head {
    /// Its request line has come.
    begun: bool,
    length: Option<u64>,
    chunked: bool,
    doubtful: bool,
}

/// What ends every head.
pub(super) const END: &[u8] = b"\r\n\r\n";

/// Bytes of a line that are kept; a field that says how long the body is has far fewer.
const LINE: usize = 256;

impl Framing {
    /// Follows the next bytes, and spoils the end of a doubtful head among them. Then it is true, and hyper has to be
    /// given an [`END`] behind them: of a head that came in pieces it looks at nothing before it sees one.
    #[must_use]
    pub(super) fn watch(&mut self, mut bytes: &mut [u8]) -> bool {
        while !bytes.is_empty() {
            let passed = match &mut self.state {
                State::Over => return false,
                State::Body(left) | State::Chunk(left) => {
                    let passed = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    *left -= passed as u64;
                    if *left == 0 {
                        self.state =
                            if matches!(self.state, State::Body(_)) { State::Head } else { State::Size };
                    }
                    passed
                }
                State::Head | State::Size | State::Trailers => match self.watch_line(bytes) {
                    Some(passed) => passed,
                    None => return true,
                },
            };
            bytes = &mut bytes[passed..];
        }
        false
    }

    /// Follows a line, or a part of one; gives how many bytes that was. `None`: it was spoilt.
    fn watch_line(&mut self, bytes: &mut [u8]) -> Option<usize> {
        let end = memchr(b'\n', bytes);
        let part = &bytes[..end.unwrap_or(bytes.len())];
        if matches!(self.state, State::Head) && !self.head.begun && memchr(b'#', part).is_some() {
            self.head.doubtful = true;
        }
        let Some(end) = end else {
            let room = LINE.saturating_sub(self.line.len()).min(part.len());
            self.line.extend_from_slice(&part[..room]);
            return Some(part.len());
        };
        let spoil = if self.line.is_empty() {
            self.end_line(&bytes[..end])
        } else {
            let mut line = std::mem::take(&mut self.line);
            let room = LINE.saturating_sub(line.len()).min(end);
            line.extend_from_slice(&bytes[..room]);
            let spoil = self.end_line(&line);
            line.clear();
            self.line = line;
            spoil
        };
        if spoil {
            bytes[end] = 0;
            return None;
        }
        Some(end + 1)
    }

    /// Takes a whole line without its line feed; true if it ends a doubtful head.
    fn end_line(&mut self, line: &[u8]) -> bool {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        match self.state {
            State::Head if line.is_empty() => return self.head.begun && self.end_head(),
            State::Head if self.head.begun => self.head.field(line),
            State::Head => self.head.begun = true,
            State::Size => self.state = chunk(line),
            State::Trailers if line.is_empty() => self.state = State::Head,
            State::Trailers | State::Body(_) | State::Chunk(_) | State::Over => {}
        }
        false
    }

    fn end_head(&mut self) -> bool {
        let head = std::mem::take(&mut self.head);
        self.state = match head.length {
            _ if head.doubtful => State::Over,
            _ if head.chunked => State::Size,
            None | Some(0) => State::Head,
            Some(length) => State::Body(length),
        };
        head.doubtful
    }
}

impl Head {
    fn field(&mut self, line: &[u8]) {
        if !matches!(line.first(), Some(b'c' | b'C' | b't' | b'T')) {
            return;
        }
        let Some(colon) = memchr(b':', line) else { return };
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        if name.eq_ignore_ascii_case(b"content-length") {
            let digits = std::str::from_utf8(value.trim_ascii()).ok();
            let length = digits.and_then(|digits| digits.parse().ok());
            self.doubtful |= self.length.is_some() || length.is_none();
            self.length = length.or(Some(0));
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            self.chunked = true;
        } else {
            return;
        }
        self.doubtful |= line.len() >= LINE || self.chunked && self.length.is_some();
    }
}

/// What follows a line with this chunk size.
fn chunk(line: &[u8]) -> State {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let digits = std::str::from_utf8(&line[..digits]).unwrap_or_default();
    match u64::from_str_radix(digits, 16) {
        Ok(0) => State::Trailers,
        Ok(size) => size.checked_add(2).map_or(State::Over, State::Chunk),
        Err(_) => State::Over,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of these bytes when they come in pieces of `size`.
    fn watched(bytes: &str, size: usize) -> Vec<u8> {
        let mut framing = Framing::default();
        let mut bytes = bytes.as_bytes().to_vec();
        bytes.chunks_mut(size).for_each(|piece| {
            let spoilt = framing.watch(piece);
            assert_eq!(spoilt, piece.contains(&0));
        });
        bytes
    }

    const GOOD: &str = "\r\nPOST / HTTP/1.1\r\nContent-Length: 9\r\nX: transfer-encoding: chunked\r\n\r\nA: b\r\n\r\n.\
        PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1a;x=\"y\"\r\nContent-Length: 1\r\n\r\nHi \r\n\r\n\
        2\n\r\n\r\n0\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n\
        GET /a HTTP/1.1\nHost: h\n\nGET / HTTP/1.1\r\nContent-Length: 0\r\n\r\n";

    #[test]
    fn good_messages_pass_as_they_came_in_any_pieces() {
        for size in 1..GOOD.len() {
            assert_eq!(watched(GOOD, size), GOOD.as_bytes(), "in pieces of {size}");
        }
    }

    #[test]
    fn a_doubtful_head_is_spoilt_at_its_end_wherever_it_comes_and_in_any_pieces() {
        let long = format!("POST / HTTP/1.1\r\nContent-Length: {}1\r\n\r\n", "0".repeat(300));
        for head in [
            "POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nA: b\r\ncontent-length:\t1 \r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
            "POST / HTTP/1.1\nContent-Length: 1\nContent-Length: 1\n\n",
            "POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
            "GET /a#b HTTP/1.1\r\n\r\n",
            &long,
        ] {
            for before in ["", GOOD] {
                let all = format!("{before}{head}");
                let mut spoilt = all.clone().into_bytes();
                let end = spoilt.len() - 1;
                spoilt[end] = 0;
                for size in 1..all.len() {
                    assert_eq!(watched(&all, size), spoilt, "{head} in pieces of {size}");
                }
            }
        }
    }
}
