//! Finds events in a `text/event-stream` under any chunking (WHATWG HTML § 9.2.5, § 9.2.6).
//!
//! An *event* here is the bytes of one block, its ending blank line included, exactly as they came,
//! less its comment lines. The scanner keeps counters and, only for an event cut over chunks, its
//! beginning; an event that lies in one chunk is a slice of it.

use bytes::Bytes;

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
    /// `retry:` in milliseconds, if it is digits only.
    pub retry: Option<u64>,
}

/// One event is larger than the limit.
#[derive(Debug, thiserror::Error)]
#[error("an event exceeds {0} bytes")]
pub struct TooLarge(pub usize);

/// Finds the events of one stream.
#[derive(Debug)]
pub struct Scanner {
    limit: usize,
}

impl Scanner {
    /// A scanner at the start of a stream; an event may have at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { limit }
    }

    /// Takes the next chunk and gives every event that is now complete.
    ///
    /// # Errors
    ///
    /// [`TooLarge`]; events before it were given.
    pub fn push(&mut self, chunk: Bytes, mut give: impl FnMut(Event)) -> Result<(), TooLarge> {
        let _ = (&chunk, &mut give, self.limit);
        unimplemented!()
    }

    /// The stream ended: the last event if it lacks its blank line, completed with the line ends it lacks.
    /// The caller decides whether it counts.
    pub fn finish(&mut self) -> Option<Event> {
        unimplemented!()
    }
}
