//! One remote MCP server: sends a request once, over a connection from its pool or a new one.
//!
//! Words: a *connection* belongs to whoever drives it. An HTTP/1.1 connection is driven by the
//! exchange that uses it (its response future, then its [`Body`]), never by a task of its own:
//! a task switch for each chunk costs six to ten times the event.
//!
//! Promises: a request is written at most once. The only repeat is a pooled connection found
//! closed before one byte of the request was written. Dropping the future of [`Upstream::send`] or
//! the [`Body`] closes the upstream's stream.
//!
//! Leaves JSON-RPC, SSE and what a failure means to the node to others.

pub mod tls;

mod chunked;
mod connect;
mod gate;
mod http1;
mod http2;
mod pool;
mod socket;
#[cfg(test)]
mod tests;

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{
    HeaderValue, Method, Request, Response, Uri, Version,
    header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING, UPGRADE},
    uri::{Authority, PathAndQuery, Scheme},
};
use http_body::{Frame, SizeHint};
use http_body_util::Full;

use self::pool::{Pool, Taken};

/// What an upstream is, checked.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its name in the configuration.
    pub name: String,
    /// `http` or `https`, authority, path and query; no user info.
    pub url: Uri,
    /// Bound of DNS, connect and TLS together.
    pub connect_timeout: Duration,
    /// TLS, when the URL says https.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// Offer HTTP/1.1 only.
    pub http1_only: bool,
    /// Idle connections kept, and for how long.
    pub idle_connections: usize,
    /// How long an idle connection is kept; below what servers allow.
    pub idle_timeout: Duration,
}

/// A remote server and its connections.
#[derive(Debug)]
pub struct Upstream {
    settings: Settings,
    /// The URL's authority, its default port left out: the one `Host` that is ever sent.
    host: HeaderValue,
    pool: Arc<Pool>,
}

/// What sending told, for the access log.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sent {
    /// DNS, connect and TLS; `None` when the connection was reused.
    pub connect: Option<Duration>,
    /// The connection was used before.
    pub reused: bool,
    /// HTTP/2.
    pub http2: bool,
}

/// Why there is no (more) answer, and whether anything was sent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// DNS, connect or TLS failed: not one byte of the request was written.
    #[error("upstream unreachable: {0}")]
    Unreachable(String),
    /// The upstream said that it did not process the request (HTTP/2 `REFUSED_STREAM`, `GOAWAY`).
    #[error("upstream refused the stream: {0}")]
    Refused(String),
    /// Anything after the first byte may have been written: the outcome is unknown.
    #[error("upstream failed: {0}")]
    Failed(String),
}

impl Upstream {
    /// An upstream with no connection yet: none is opened before the first request.
    pub fn new(settings: Settings) -> Self {
        Self::build(settings, false)
    }

    /// The same for a server that speaks HTTP/2 on connections where nothing is negotiated (a plain `http` URL:
    /// RFC 9113 § 3.3), and will not be asked whether it does.
    pub fn with_prior_knowledge(settings: Settings) -> Self {
        Self::build(settings, true)
    }

    fn build(settings: Settings, prior_knowledge: bool) -> Self {
        let pool = Arc::new(Pool::new(&settings, prior_knowledge));
        Self { host: host(&settings.url), settings, pool }
    }

    /// Connections that are kept: idle ones, and those that requests share.
    pub fn connections(&self) -> usize {
        self.pool.len()
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Sends the request once. The request has an absolute or origin-form URI (path and query are used), its
    /// end-to-end headers and its whole body; `Host` and framing are set here.
    ///
    /// `sent` is filled as soon as the connection is there, also when the answer never comes.
    ///
    /// # Errors
    ///
    /// See [`Error`]. Dropping the future closes the connection (HTTP/1.1) or resets the stream.
    pub async fn send(&self, request: Request<Bytes>, sent: &mut Sent) -> Result<Response<Body>, Error> {
        let mut request = self.outgoing(request);
        loop {
            match self.pool.take(sent).await? {
                Taken::Http2(slot) => {
                    let (head, body) = self.for_http2(request)?;
                    // Boxed, so that it takes no room in the future of an HTTP/1.1 exchange.
                    let response = Box::pin(slot.send(head, body)).await?;
                    return Ok(response.map(|body| Body::new(Stream::Http2(body))));
                }
                Taken::Http1(connection) => match connection.send(request, &self.pool).await {
                    Ok(response) => return Ok(response.map(|body| Body::new(Stream::Http1(body)))),
                    Err(http1::SendError::Failed(error)) => return Err(error),
                    // Closed since it was looked at, and hyper gave the request back: it was never begun. Each turn
                    // uses up an idle connection; a new one gets no second chance.
                    Err(http1::SendError::Unsent(unsent)) if sent.reused => request = *unsent,
                    Err(http1::SendError::Unsent(_)) => {
                        return Err(Error::Unreachable("closed before the request was written".to_owned()));
                    }
                },
            }
        }
    }

    /// The request as HTTP/1.1 has it: origin form, one `Host`, and no framing but hyper's.
    fn outgoing(&self, request: Request<Bytes>) -> Request<Full<Bytes>> {
        let (from, body) = request.into_parts();
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = from.method;
        let target = from.uri.into_parts().path_and_query;
        *request.uri_mut() = Uri::from(target.unwrap_or_else(|| PathAndQuery::from_static("/")));
        *request.headers_mut() = from.headers;
        let headers = request.headers_mut();
        for framing in [CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING, UPGRADE] {
            headers.remove(framing);
        }
        headers.insert(HOST, self.host.clone());
        request
    }

    /// The same as HTTP/2 has it: the authority in the URI, and a length.
    fn for_http2(&self, request: Request<Full<Bytes>>) -> Result<(Request<()>, Bytes), Error> {
        let (mut parts, body) = request.into_parts();
        let body = body.into_inner().unwrap_or_default();
        parts.headers.remove(HOST);
        if !body.is_empty() || matches!(parts.method, Method::POST | Method::PUT | Method::PATCH) {
            parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        }
        let mut uri = parts.uri.into_parts();
        uri.scheme = self.settings.url.scheme().cloned();
        uri.authority = Authority::try_from(self.host.as_bytes()).ok();
        parts.uri =
            Uri::from_parts(uri).map_err(|_| Error::Unreachable("the URL has no authority".to_owned()))?;
        parts.version = Version::HTTP_2;
        Ok((Request::from_parts(parts, ()), body))
    }
}

/// The URL's authority without user info, and without the port that its scheme implies.
fn host(url: &Uri) -> HeaderValue {
    let host = url.host().unwrap_or_default();
    let implied = if url.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    let authority = match url.port_u16() {
        Some(port) if port != implied => format!("{host}:{port}"),
        _ => host.to_owned(),
    };
    // A `Uri` holds no byte that a header cannot.
    HeaderValue::try_from(authority).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// Chunks that are ready together are joined up to this many bytes: each chunk costs whoever passes it on more than
/// the copy. A quiet stream has nothing to join, and nothing waits for more to come.
const JOIN: usize = 16 * 1024;

/// An upstream's response body; owns the HTTP/1.1 connection it comes over and drives it.
///
/// Read to its end, an HTTP/1.1 connection goes back to the pool; dropped before, it is closed, unless what was
/// missing of the end has already arrived. An HTTP/2 stream dropped before its end is reset with `CANCEL`.
///
/// A chunk may be a slice of a larger buffer (8 to 64 KiB): whoever keeps a small one for long should copy it.
#[derive(Debug)]
pub struct Body {
    stream: Stream,
    /// What came after the chunk that was given last, and could not be joined to it.
    held: Option<Option<Result<Frame<Bytes>, Error>>>,
}

#[derive(Debug)]
enum Stream {
    Http1(http1::Body),
    Http2(http2::Body),
}

impl Stream {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self {
            Self::Http1(body) => body.poll_frame(cx),
            Self::Http2(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http1(body) => body.is_end_stream(),
            Self::Http2(body) => body.is_end_stream(),
        }
    }

    /// It gives less at a time than may be there.
    fn comes_in_pieces(&self) -> bool {
        match self {
            Self::Http1(body) => body.comes_in_pieces(),
            Self::Http2(_) => true,
        }
    }
}

impl Body {
    fn new(stream: Stream) -> Self {
        Self { stream, held: None }
    }

    /// Joins to `first` what is there already.
    fn join(&mut self, first: Bytes, cx: &mut Context<'_>) -> Bytes {
        let mut joined = BytesMut::new();
        while first.len() < JOIN && self.stream.comes_in_pieces() && !self.stream.is_end_stream() {
            let Poll::Ready(next) = self.stream.poll_frame(cx) else { break };
            let used = joined.len().max(first.len());
            match next.as_ref().and_then(|next| next.as_ref().ok()?.data_ref()) {
                Some(more) if used + more.len() <= JOIN => {
                    if joined.is_empty() {
                        joined.reserve(JOIN);
                        joined.extend_from_slice(&first);
                    }
                    joined.extend_from_slice(more);
                }
                _ => {
                    self.held = Some(next);
                    break;
                }
            }
        }
        if joined.is_empty() { first } else { joined.freeze() }
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Error;

    /// # Errors
    ///
    /// [`Error::Failed`] when the body ends before its end: short of its length, without its last chunk, reset.
    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = self.get_mut();
        let next = match this.held.take() {
            Some(held) => held,
            None => ready!(this.stream.poll_frame(cx)),
        };
        let Some(Ok(frame)) = next else { return Poll::Ready(next) };
        Poll::Ready(Some(Ok(match frame.into_data() {
            Ok(first) => Frame::data(this.join(first, cx)),
            Err(trailers) => trailers,
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_none() && self.stream.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let left = match &self.stream {
            Stream::Http1(body) => body.size_hint(),
            Stream::Http2(body) => body.size_hint(),
        };
        match (&self.held, left.exact()) {
            (Some(Some(Ok(held))), Some(left)) => {
                SizeHint::with_exact(left + held.data_ref().map_or(0, |data| data.len() as u64))
            }
            _ => left,
        }
    }
}

/// An error of hyper and its causes in one line. None of them quotes a header or a body.
fn report(error: &hyper::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
