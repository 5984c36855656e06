//! HTTP/2 frame by frame (RFC 9113 § 4), for a script of [`Upstream::by_connection`](super::Upstream::by_connection)
//! behind TLS: it can say what a library would not, such as a `GOAWAY` in the middle of things.

use super::upstream::Reply;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

pub const REFUSED_STREAM: u32 = 7;
pub const CANCEL: u32 = 8;

/// A frame as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

/// The whole frames of what a client sent on one connection.
pub fn read(bytes: &[u8]) -> Vec<Frame> {
    let mut rest = bytes.get(24..).unwrap_or_default();
    let mut frames = Vec::new();
    while rest.len() >= 9 {
        let length = u32::from_be_bytes([0, rest[0], rest[1], rest[2]]) as usize;
        if rest.len() < 9 + length {
            break;
        }
        let stream = u32::from_be_bytes([rest[5] & 0x7f, rest[6], rest[7], rest[8]]);
        frames.push(Frame { kind: rest[3], flags: rest[4], stream, payload: rest[9..9 + length].to_vec() });
        rest = &rest[9 + length..];
    }
    frames
}

/// The bodies of the whole requests of one connection, with their streams, in the order of their ends.
pub fn requests(bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let frames = read(bytes);
    let ends = frames.iter().filter(|frame| frame.kind <= HEADERS && frame.flags & END_STREAM != 0);
    ends.map(|end| {
        let data = frames.iter().filter(|frame| frame.kind == DATA && frame.stream == end.stream);
        (end.stream, data.flat_map(|frame| frame.payload.clone()).collect())
    })
    .collect()
}

/// The streams that were reset, with their codes.
pub fn resets(bytes: &[u8]) -> Vec<(u32, u32)> {
    let resets = read(bytes).into_iter().filter(|frame| frame.kind == RST_STREAM);
    resets.map(|frame| (frame.stream, u32::from_be_bytes(frame.payload[..4].try_into().unwrap()))).collect()
}

/// The server's side of one connection.
#[derive(Debug)]
pub struct Frames<'a>(pub &'a mut Reply);

impl<'a> Frames<'a> {
    /// Begins; `limit` is the most streams at a time.
    pub fn begin(reply: &'a mut Reply, limit: Option<u32>) -> Self {
        let limit = limit.map(|limit| [&[0, 3], &limit.to_be_bytes()[..]].concat());
        let mut frames = Self(reply);
        frames.write(SETTINGS, 0, 0, &limit.unwrap_or_default());
        frames
    }

    fn write(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = &u32::try_from(payload.len()).unwrap().to_be_bytes()[1..];
        self.0.raw([length, &[kind, flags], &stream.to_be_bytes(), payload].concat());
    }

    /// Waits for request `number` of this connection; `None` when the connection ends first.
    pub fn request(&mut self, number: usize) -> Option<(u32, Vec<u8>)> {
        self.0.received(|bytes| requests(bytes).len() > number);
        requests(&self.0.bytes()).into_iter().nth(number)
    }

    /// The head of an event stream: `:status: 200` from the static table, then a literal field (RFC 7541 § 6).
    pub fn sse(&mut self, stream: u32) {
        let field = [&[0x88, 0, 12][..], b"content-type", &[17], b"text/event-stream"].concat();
        self.write(HEADERS, END_HEADERS, stream, &field);
    }

    pub fn event(&mut self, stream: u32, json: &str) {
        self.write(DATA, 0, stream, super::mcp::event(json).as_bytes());
    }

    pub fn end(&mut self, stream: u32) {
        self.write(DATA, END_STREAM, stream, &[]);
    }

    pub fn reset(&mut self, stream: u32, code: u32) {
        self.write(RST_STREAM, 0, stream, &code.to_be_bytes());
    }

    /// `GOAWAY` without an error; streams above `last` are not served.
    pub fn go_away(&mut self, last: u32) {
        self.write(GOAWAY, 0, 0, &[last.to_be_bytes(), [0; 4]].concat());
    }
}
