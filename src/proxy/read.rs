//! Reading an upstream's body that is not streamed on as it is: whole, as far as it is small, or not at all.

use std::{future::poll_fn, pin::Pin, task::Poll};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, header};
use http_body::Body as _;
use http_body_util::BodyExt;
use tokio::{task::yield_now, time};

use crate::{
    error::Failure,
    headers,
    limits::Held,
    relay::{assembly::STARVED_AFTER, decode::Decoder, held},
    upstream,
};

/// How much of a busy upstream's body is read, if it is there already, to keep the connection.
const BUSY_BODY: usize = 64 * 1024;

/// How an answer's body is coded.
#[derive(Debug)]
pub(super) enum Coding {
    /// As it is.
    Identity,
    /// Compressed although nobody asked for it.
    Compressed(Decoder),
    /// In a way that is not known here.
    Unknown,
}

impl Coding {
    /// As `Content-Encoding` says, over all its lines (RFC 9110 § 8.4).
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let lines = headers.get_all(header::CONTENT_ENCODING).iter();
        let mut codings = lines
            .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
            .map(<[u8]>::trim_ascii)
            .filter(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity"));
        match (codings.next(), codings.next()) {
            (None, _) => Self::Identity,
            (Some(one), None) => {
                let decoder = std::str::from_utf8(one).ok().and_then(Decoder::new);
                decoder.map_or(Self::Unknown, Self::Compressed)
            }
            (Some(_), Some(_)) => Self::Unknown,
        }
    }

    /// Whether the body can be read.
    pub(super) fn is_readable(&self) -> bool {
        !matches!(self, Self::Unknown)
    }

    /// What decodes the body, where that is needed and possible.
    pub(super) fn decoder(self) -> Option<Decoder> {
        match self {
            Self::Compressed(decoder) => Some(decoder),
            Self::Identity | Self::Unknown => None,
        }
    }
}

/// Removes, in place, what was true of the bytes as they came and no longer is, since they were decoded or cut.
pub(super) fn shed_form(headers: &mut HeaderMap) {
    const FORM: [HeaderName; 4] =
        [header::CONTENT_LENGTH, header::CONTENT_ENCODING, header::ETAG, header::ACCEPT_RANGES];
    headers::shed_digests(headers);
    for name in FORM {
        headers.remove(name);
    }
}

/// Reads what is already there of a body that nobody wants, so that its connection may serve again; never waits.
pub(super) async fn spare(mut body: upstream::Body) {
    let mut read = 0;
    poll_fn(|cx| {
        while read < BUSY_BODY {
            let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut body).poll_frame(cx) else { break };
            read += frame.data_ref().map_or(0, Bytes::len);
        }
        Poll::Ready(())
    })
    .await;
}

/// From here on reading through bytes takes long enough to hold up what else the thread serves.
const LARGE: usize = 256 * 1024;

/// Reads through bytes, on a thread of its own if they are many. `None`: that could not be done, or panicked.
pub(super) async fn off_thread<T, R>(bytes: Bytes, read: R) -> Option<T>
where
    T: Send + 'static,
    R: FnOnce(&Bytes) -> T + Send + 'static,
{
    if bytes.len() < LARGE {
        return Some(read(&bytes));
    }
    Box::pin(tokio::task::spawn_blocking(move || read(&bytes))).await.ok()
}

/// What was read of a body.
#[derive(Debug)]
pub(super) enum Read {
    /// All of it.
    Whole(Bytes),
    /// More than the limit; this much, and the rest is still to come.
    Begun {
        /// What was read.
        first: Bytes,
        /// What came with it and is still to be decoded.
        encoded: Bytes,
    },
}

/// Reads a body whole, or until it exceeds `limit`. What is compressed may be small only on the wire: no piece of it may
/// be larger than `piece` when it is decoded. Where many bodies are held together, reading pauses; and others have their
/// turn where few bytes become many.
pub(super) async fn read<B>(
    body: &mut B,
    held: &mut Held,
    decoder: &mut Option<Decoder>,
    limit: usize,
    piece: usize,
) -> Result<Read, Failure>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    Failure: From<B::Error>,
{
    let mut decoded = 0;
    let mut all = Joined::expecting(body.size_hint().exact().filter(|_| decoder.is_none()), limit);
    while let Some(frame) = next(body, held).await {
        let Ok(mut chunk) = frame?.into_data() else { continue };
        while !chunk.is_empty() {
            let some = match decoder {
                Some(decoder) => decoder.push(&chunk.split_to(held::PIECE.min(chunk.len())), piece)?,
                None => std::mem::take(&mut chunk),
            };
            held.room(piece).await;
            if decoder.is_some() {
                decoded += some.len();
                if decoded >= LARGE {
                    decoded = 0;
                    yield_now().await;
                }
            }
            all.push(some);
            if all.len() > limit {
                return Ok(Read::Begun { first: all.into(), encoded: chunk });
            }
            held.set(all.len());
        }
    }
    if let Some(mut decoder) = decoder.take() {
        decoder.finish()?;
    }
    held.pass_turn();
    Ok(Read::Whole(all.into()))
}

async fn next<B>(body: &mut B, held: &mut Held) -> Option<Result<http_body::Frame<Bytes>, B::Error>>
where
    B: http_body::Body<Data = Bytes> + Unpin,
{
    if held.has_turn() {
        if let Ok(frame) = time::timeout(STARVED_AFTER, body.frame()).await {
            return frame;
        }
        held.pass_turn();
    }
    body.frame().await
}

/// Chunks as one; the only one there is is not copied.
#[derive(Debug, Default)]
pub(super) struct Joined {
    first: Bytes,
    all: BytesMut,
    expected: usize,
}

impl Joined {
    /// Nothing yet, of so many bytes if that is known; no more than `limit` is believed.
    pub(super) fn expecting(length: Option<u64>, limit: usize) -> Self {
        let length = length.and_then(|length| usize::try_from(length).ok()).unwrap_or(0);
        Self { expected: length.min(limit), ..Self::default() }
    }

    pub(super) fn push(&mut self, chunk: Bytes) {
        if self.len() == 0 {
            self.first = chunk;
            return;
        }
        if self.all.is_empty() {
            self.all.reserve(self.expected);
            self.all.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.all.extend_from_slice(&chunk);
    }

    pub(super) fn len(&self) -> usize {
        self.first.len() + self.all.len()
    }
}

impl From<Joined> for Bytes {
    fn from(joined: Joined) -> Self {
        if joined.all.is_empty() { joined.first } else { joined.all.freeze() }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::Future as _, io::Write as _, pin::pin, task::Context};

    use flate2::{Compression, write::GzEncoder};
    use http_body_util::Full;

    use super::*;
    use crate::limits::Places;

    /// A body that is there at once must not be decoded at once: a few KiB can be megabytes.
    #[tokio::test]
    async fn others_have_their_turn_while_few_bytes_become_many() {
        const ALL: usize = 32 << 20;
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(&vec![b' '; ALL]).unwrap();
        let encoded = encoder.finish().unwrap();
        assert!(encoded.len() < 64 << 10, "it comes at once");
        let mut body = Full::new(Bytes::from(encoded)).map_err(|never| -> upstream::Error { match never {} });
        let mut held = Held::new(Places::default(), ALL);
        let mut decoder = Decoder::new("gzip");
        let mut reading = pin!(read(&mut body, &mut held, &mut decoder, ALL, ALL));
        let mut turns = 1;
        let read = poll_fn(|cx: &mut Context<'_>| {
            let polled = reading.as_mut().poll(cx);
            turns += usize::from(polled.is_pending());
            polled
        })
        .await;
        assert!(matches!(read, Ok(Read::Whole(all)) if all.len() == ALL));
        assert!(turns > ALL / (2 * LARGE + (256 << 10)), "{turns} turns");
    }

    #[tokio::test]
    async fn only_many_bytes_are_read_on_a_thread_of_their_own() {
        let here = std::thread::current().id();
        let reads = |_: &Bytes| std::thread::current().id();
        assert_eq!(off_thread(vec![b' '; LARGE - 1].into(), reads).await, Some(here));
        let there = off_thread(vec![b' '; LARGE].into(), reads).await;
        assert!(there.is_some_and(|there| there != here));
    }
}
