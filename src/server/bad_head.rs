//! What becomes of bytes on an HTTP/1.1 connection that are no request: an answer, and the connection's end.
//!
//! hyper would answer by itself, with a status alone, and nobody would know.

use std::{io, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::BodyExt;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

use super::{io::LINGER, stream};

/// Bytes of a request's head, beyond which it is not read. Mirrored MCP headers carry what arguments say, so it is
/// generous.
pub(super) const HEAD: u32 = 64 << 10;
/// Fields that hyper reads of a head. It can be told another number, and then allocates for each head.
const FIELDS: usize = 100;

/// Why bytes are no request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadHead {
    /// They can't be read as one. In hyper's words, which have none of them.
    #[error("the request head is malformed: {0}")]
    Malformed(String),
    /// They are too many.
    #[error("the request head exceeds {HEAD} bytes or {FIELDS} fields")]
    TooLarge,
    /// The rest did not come for so long.
    #[error("the request head did not come within {0:?}")]
    TooSlow(Duration),
}

impl BadHead {
    /// The status to answer with.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::TooSlow(_) => StatusCode::REQUEST_TIMEOUT,
        }
    }

    /// What hyper's error says of the bytes it had; `None` for all that is no fault of theirs.
    pub(super) fn of(error: &hyper::Error, unread: &[u8], header_timeout: Duration) -> Option<Self> {
        if error.is_parse_too_large() {
            Some(Self::TooLarge)
        } else if error.is_parse() {
            Some(Self::Malformed(error.to_string()))
        } else {
            // A connection that only waited for its next request ends in silence.
            let begun = unread.iter().any(|byte| !matches!(byte, b'\r' | b'\n'));
            (error.is_timeout() && begun).then_some(Self::TooSlow(header_timeout))
        }
    }
}

/// Writes an answer, the last one of its connection, and lets the client read it: what it still sends is taken for a
/// while, since closing on it would reset the connection under the answer.
pub(super) async fn answer<T, B>(mut io: T, response: Response<B>) -> io::Result<()>
where
    T: AsyncRead + AsyncWrite + Unpin,
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (head, body) = response.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let mut headers = head.headers;
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    let mut bytes = stream::head(head.status, headers);
    bytes.extend_from_slice(&body);
    io.write_all(&bytes).await?;
    io.flush().await?;
    let rest = async {
        io.shutdown().await?;
        let mut scratch = [0; 4096];
        while io.read(&mut scratch).await? > 0 {}
        Ok(())
    };
    // Whoever still sends then has had its time.
    timeout(LINGER, rest).await.unwrap_or(Ok(()))
}
