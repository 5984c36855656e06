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

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, Uri};

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
        Self { settings }
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
        let _ = (request, sent);
        unimplemented!()
    }
}

/// An upstream's response body; owns the HTTP/1.1 connection it comes over and drives it.
///
/// Read to its end, an HTTP/1.1 connection goes back to the pool; dropped before, it is closed. An
/// HTTP/2 stream dropped before its end is reset with `CANCEL`.
#[derive(Debug)]
pub struct Body {
    _private: (),
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Error>>> {
        unimplemented!()
    }
}
