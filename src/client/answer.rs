//! One HTTP answer as the messages in it, JSON body or event stream.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response, StatusCode, header};
use http_body_util::BodyExt;

use super::{Problem, error::quoted, headers};
use crate::{
    relay::{
        decode::Decoder,
        sse::{Event, Scanner},
    },
    upstream,
};

/// Bytes of an error's body that are read.
const REFUSAL: usize = 64 << 10;

/// An answer whose body is read message by message. Dropped before its end, the server's stream is closed.
#[derive(Debug)]
pub struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: upstream::Body,
    decoder: Option<Decoder>,
    limit: usize,
    form: Form,
}

#[derive(Debug)]
enum Form {
    /// One body; true once it was given.
    Whole(bool),
    Stream {
        scanner: Box<Scanner>,
        ready: VecDeque<Bytes>,
    },
}

impl Answer {
    pub(super) fn new(response: Response<upstream::Body>, limit: usize) -> Self {
        let (head, body) = response.into_parts();
        let stream = headers::is_content_type(&head.headers, "text/event-stream");
        let coding = head.headers.get(header::CONTENT_ENCODING).and_then(|coding| coding.to_str().ok());
        let form = if stream {
            Form::Stream { scanner: Box::new(Scanner::new(limit)), ready: VecDeque::new() }
        } else {
            Form::Whole(false)
        };
        let decoder = coding.and_then(Decoder::new);
        Self { status: head.status, headers: head.headers, body, decoder, limit, form }
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The HTTP headers.
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    pub(super) fn into_headers(self) -> HeaderMap {
        self.headers
    }

    /// Whether it is an event stream.
    pub fn is_stream(&self) -> bool {
        matches!(self.form, Form::Stream { .. })
    }

    /// The next message, as it came: the data of the next event, or the whole body; `None` at the end. A last event
    /// that lacks its empty line is none.
    ///
    /// # Errors
    ///
    /// The body broke off, is too large, or its coding is wrong.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Problem> {
        match &mut self.form {
            Form::Whole(true) => Ok(None),
            Form::Whole(given) => {
                *given = true;
                let body = self.whole(self.limit).await?;
                Ok((!body.is_empty()).then_some(body))
            }
            Form::Stream { .. } => self.event().await,
        }
    }

    async fn event(&mut self) -> Result<Option<Bytes>, Problem> {
        loop {
            if let Form::Stream { ready, .. } = &mut self.form
                && let Some(data) = ready.pop_front()
            {
                return Ok(Some(data));
            }
            let Some(chunk) = self.chunk(self.limit).await? else { return Ok(None) };
            if let Form::Stream { scanner, ready } = &mut self.form {
                let pushed = scanner.push(chunk, |event| ready.extend(message(event)));
                pushed.map_err(|error| Problem::Unreadable(error.to_string()))?;
            }
        }
    }

    /// The whole body, at most `limit` bytes.
    async fn whole(&mut self, limit: usize) -> Result<Bytes, Problem> {
        let mut all = BytesMut::new();
        while let Some(chunk) = self.chunk(limit).await? {
            if all.len() + chunk.len() > limit {
                return Err(Problem::Unreadable(format!("the answer exceeds {limit} bytes")));
            }
            all.extend_from_slice(&chunk);
        }
        Ok(all.freeze())
    }

    /// The next bytes, decoded; at most `limit` where they are.
    async fn chunk(&mut self, limit: usize) -> Result<Option<Bytes>, Problem> {
        while let Some(frame) = self.body.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            let Some(decoder) = &mut self.decoder else { return Ok(Some(data)) };
            let decoded = decoder.push(&data, limit);
            return decoded.map(Some).map_err(|error| Problem::Unreadable(error.to_string()));
        }
        Ok(None)
    }

    /// What an answer that is no success says.
    pub(super) async fn refusal(mut self) -> Problem {
        // A body that can't be read, or is too large, leaves the status to speak.
        let body = self.whole(REFUSAL).await.unwrap_or_default();
        let location = self.headers.get(header::LOCATION).and_then(|location| location.to_str().ok());
        Problem::of_status(self.status, &body, location)
    }

    /// Why an answer that ended without the response did.
    pub(super) fn no_response(&self) -> Problem {
        let media = headers::content_type(&self.headers).unwrap_or_default();
        Problem::Unreadable(match media.as_str() {
            _ if self.is_stream() => "the stream ended without the response".to_owned(),
            "" | "application/json" => format!("the answer (HTTP {}) is no response", self.status.as_u16()),
            other => format!("the answer is {}, not JSON", quoted(other)),
        })
    }
}

/// The data of an event that carries a message (WHATWG HTML § 9.2.6: without a name it is a `message`).
fn message(event: Event) -> Option<Bytes> {
    let named = event.name.is_some_and(|name| &name[..] != b"message");
    event.data.filter(|data| !named && !data.is_empty())
}
