//! Reads the chunked body of an event stream from its connection (RFC 9112 § 7.1), holding no buffer while nothing comes.
//!
//! What is read at once is given at once, without the framing. Trailers are read and dropped: an event stream means
//! nothing by them.

use std::{
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use tokio::io::{AsyncRead, ReadBuf};

/// Bytes that are read at once: a TLS record.
const READ: usize = 16 * 1024;
/// Bytes of all chunk extensions together, and of the trailers; and lines of those.
const EXTENSIONS: usize = 16 * 1024;
const TRAILERS: usize = 16 * 1024;
const TRAILER_LINES: usize = 100;

/// A body that has not ended.
#[derive(Debug)]
pub(super) struct Chunked<T> {
    io: T,
    /// Bytes that were read and not looked at.
    rest: Bytes,
    place: Place,
    extensions: usize,
    /// What came before an error was given first.
    error: Option<&'static str>,
}

/// What the next byte is part of.
#[derive(Debug)]
enum Place {
    /// The first digit of a chunk's size.
    Start,
    /// A further one, or what follows them.
    Size(u64),
    /// White space behind a size.
    Space(u64),
    Extension(u64),
    /// The LF of the line with a size.
    SizeLf(u64),
    /// So many bytes of data.
    Data(u64),
    /// The CR and the LF behind the data.
    DataCr,
    DataLf,
    /// The trailers.
    Trailers(Box<Trailers>),
    /// Nothing: the body has ended.
    End,
}

#[derive(Debug, Default)]
struct Trailers {
    line: Vec<u8>,
    bytes: usize,
    lines: usize,
}

impl<T: AsyncRead + Unpin> Chunked<T> {
    /// The body that begins with `rest` and goes on with what is read.
    pub(super) fn new(io: T, rest: Bytes) -> Self {
        Self { io, rest, place: Place::Start, extensions: 0, error: None }
    }

    /// The next data; `None` at the end.
    pub(super) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, String>>> {
        let mut room = [const { MaybeUninit::uninit() }; READ];
        loop {
            if let Some(error) = self.error {
                return Poll::Ready(Some(Err(error.to_owned())));
            }
            if self.has_ended() {
                return Poll::Ready(None);
            }
            let rest = std::mem::take(&mut self.rest);
            let data = if rest.is_empty() {
                let mut read = ReadBuf::uninit(&mut room);
                match ready!(Pin::new(&mut self.io).poll_read(cx, &mut read)) {
                    Err(error) => return Poll::Ready(Some(Err(error.to_string()))),
                    Ok(()) if read.filled().is_empty() => {
                        self.error = Some("end of file before the last chunk");
                        continue;
                    }
                    Ok(()) => self.decode(read.filled()),
                }
            } else {
                self.decode(&rest)
            };
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(data)));
            }
        }
    }

    /// All data was given.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.place, Place::End) && self.error.is_none()
    }

    /// The connection, if the body has ended and nothing followed it.
    pub(super) fn into_io(self) -> Option<T> {
        (self.has_ended() && self.rest.is_empty()).then_some(self.io)
    }

    /// The data among these bytes.
    fn decode(&mut self, mut bytes: &[u8]) -> Bytes {
        let mut data = Vec::new();
        while !bytes.is_empty() && self.error.is_none() {
            let passed = match &mut self.place {
                Place::End => {
                    self.rest = Bytes::copy_from_slice(bytes);
                    break;
                }
                Place::Data(left) => {
                    let some = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    if data.is_empty() {
                        // Exact where this is all there is, as it is of a quiet stream.
                        let is_all = bytes.len() <= some + 2;
                        data.reserve_exact(if is_all { some } else { bytes.len() });
                    }
                    data.extend_from_slice(&bytes[..some]);
                    *left -= some as u64;
                    if *left == 0 {
                        self.place = Place::DataCr;
                    }
                    some
                }
                place => match line(place, bytes) {
                    Some((next, passed)) => {
                        *place = next;
                        passed
                    }
                    None => {
                        self.error = self.step(bytes[0]).err();
                        1
                    }
                },
            };
            bytes = &bytes[passed..];
        }
        data.into()
    }

    /// Takes a byte that is no data.
    fn step(&mut self, byte: u8) -> Result<(), &'static str> {
        let digit = char::from(byte).to_digit(16);
        self.place = match (&mut self.place, byte) {
            (Place::Start, _) => Place::Size(u64::from(digit.ok_or("invalid chunk size")?)),
            (Place::Size(size), _) if digit.is_some() => {
                let size = size.checked_mul(16).ok_or("invalid chunk size: overflow")?;
                Place::Size(size + u64::from(digit.unwrap_or_default()))
            }
            (Place::Size(size) | Place::Space(size), b'\t' | b' ') => Place::Space(*size),
            (Place::Size(size) | Place::Space(size), b';') => Place::Extension(*size),
            (Place::Size(size) | Place::Space(size) | Place::Extension(size), b'\r') => Place::SizeLf(*size),
            (Place::Size(_) | Place::Space(_), _) => return Err("invalid chunk size"),
            (Place::Extension(_), b'\n') => return Err("invalid chunk extension contains newline"),
            (Place::Extension(size), _) => {
                self.extensions += 1;
                if self.extensions >= EXTENSIONS {
                    return Err("chunk extensions over limit");
                }
                Place::Extension(*size)
            }
            (Place::SizeLf(0), b'\n') => Place::Trailers(Box::default()),
            (Place::SizeLf(size), b'\n') => Place::Data(*size),
            (Place::SizeLf(_), _) => return Err("invalid chunk size: no LF"),
            (Place::DataCr, b'\r') => Place::DataLf,
            (Place::DataLf, b'\n') => Place::Start,
            (Place::DataCr | Place::DataLf, _) => return Err("invalid chunk: no CRLF behind its data"),
            (Place::Trailers(trailers), _) => match trailers.take(byte)? {
                true => Place::End,
                false => return Ok(()),
            },
            (Place::Data(_) | Place::End, _) => return Ok(()),
        };
        Ok(())
    }
}

/// What stands between the data of two chunks, or before the first, as most lines do: whole, and with a size alone; or the
/// end of one chunk with nothing behind it. Gives what the next byte is part of, and how many bytes that was.
fn line(place: &Place, bytes: &[u8]) -> Option<(Place, usize)> {
    const DIGITS: usize = 8;
    let line = match place {
        Place::Start => bytes,
        Place::DataCr => bytes.strip_prefix(b"\r\n")?,
        _ => return None,
    };
    let passed = bytes.len() - line.len();
    if line.is_empty() {
        return Some((Place::Start, passed));
    }
    let digits = line.iter().take(DIGITS).map_while(|byte| char::from(*byte).to_digit(16));
    let (count, size) = digits.fold((0, 0), |(count, size), digit| (count + 1, size * 16 + u64::from(digit)));
    (size > 0 && line[count..].starts_with(b"\r\n")).then_some((Place::Data(size), passed + count + 2))
}

impl Trailers {
    /// Takes a byte; true if it ends them.
    fn take(&mut self, byte: u8) -> Result<bool, &'static str> {
        self.bytes += 1;
        if self.bytes >= TRAILERS {
            return Err("chunk trailers over limit");
        }
        if byte != b'\n' {
            self.line.push(byte);
            return Ok(false);
        }
        let line = self.line.strip_suffix(b"\r").ok_or("invalid chunk trailers")?;
        if line.is_empty() {
            return Ok(true);
        }
        self.lines += 1;
        let colon = memchr::memchr(b':', line).ok_or("invalid chunk trailers")?;
        let name = HeaderName::from_bytes(&line[..colon]);
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii());
        if name.is_err() || value.is_err() || self.lines > TRAILER_LINES {
            return Err("invalid chunk trailers");
        }
        self.line.clear();
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// What comes of these bytes when they come in pieces of `size`, and whether the connection can be used again.
    fn decoded(bytes: &str, size: usize) -> (String, Result<bool, String>) {
        let mut body = Chunked::new(&[][..], Bytes::new());
        let mut data = String::new();
        for piece in bytes.as_bytes().chunks(size) {
            body.rest = [&body.rest[..], piece].concat().into();
            loop {
                let rest = std::mem::take(&mut body.rest);
                if rest.is_empty() || body.has_ended() {
                    body.rest = rest;
                    break;
                }
                data.push_str(std::str::from_utf8(&body.decode(&rest)).unwrap());
            }
        }
        match body.poll_data(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(None) => (data, Ok(body.into_io().is_some())),
            Poll::Ready(Some(Err(error))) => (data, Err(error)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_data_of_all_chunks_is_given_in_any_pieces() {
        for (bytes, expected, again) in [
            ("0\r\n\r\n", "", true),
            ("2\r\nab\r\n0\r\n\r\n", "ab", true),
            ("2\r\na\n\r\n00B\r\n0123456789a\r\n0;x=\"y\"\r\n\r\n", "a\n0123456789a", true),
            ("3 ;a\r\nabc\r\n1\t\r\nd\r\n000\r\nTrailer: x\r\nb:\r\n\r\n", "abcd", true),
            ("1\r\na\r\n0\r\n\r\nHTTP/1.1 200", "a", false),
        ] {
            for size in 1..=bytes.len() {
                assert_eq!(decoded(bytes, size), (expected.to_owned(), Ok(again)), "{bytes:?} by {size}");
            }
            let whole = bytes.find("\r\n\r\n").unwrap() + 4;
            for end in 0..whole {
                let (data, ended) = decoded(&bytes[..end], end.max(1));
                assert!(expected.starts_with(&data) && ended.is_err(), "{bytes:?} up to {end}: {ended:?}");
            }
        }
    }

    #[test]
    fn what_is_no_chunk_is_an_error_after_the_data_before_it() {
        let long = "x".repeat(EXTENSIONS);
        for wrong in [
            "\r\n",
            "g\r\n",
            "-1\r\n",
            "+1\r\n",
            "1 2\r\n",
            "1\nb",
            "1\r\r",
            "1\r\nbc\r\n",
            "1\r\nb\n",
            "1\r\nb\r\r",
            "11112222333344445\r\n",
            "1;a\nb",
            &format!("1;{long}"),
            "0\r\n\n",
            "0\r\nno colon\r\n",
            "0\r\na b: c\r\n",
            "0\r\na: b\n",
            &format!("0\r\na: {long}"),
            &format!("0\r\n{}", "a: b\r\n".repeat(TRAILER_LINES + 1)),
        ] {
            let all = format!("1\r\na\r\n{wrong}");
            for size in [1, all.len()] {
                let (data, ended) = decoded(&all, size);
                assert!(
                    data.starts_with('a') && data.len() <= 2 && ended.is_err(),
                    "{wrong:?}: {data:?} {ended:?}"
                );
            }
        }
    }
}
