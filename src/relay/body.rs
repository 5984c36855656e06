//! The one body type that goes out to nodes.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};

use super::stream::StreamBody;
use crate::server;

/// Any error a body can end with; hyper only cuts the connection for it.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A response body toward the node. Boxed once, here.
pub struct Body(Kind);

enum Kind {
    Plain(UnsyncBoxBody<Bytes, BoxError>),
    Stream(Box<StreamBody>),
}

impl Body {
    /// Boxes a body.
    pub fn new<B>(body: B) -> Self
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self(Kind::Plain(body.map_err(Into::into).boxed_unsync()))
    }

    /// A relayed stream.
    pub(super) fn stream(body: StreamBody) -> Self {
        Self(Kind::Stream(Box::new(body)))
    }

    /// A body of exactly these bytes.
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        Self::new(Full::new(bytes.into()))
    }

    /// No body.
    pub fn empty() -> Self {
        Self::full(Bytes::new())
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Body").finish_non_exhaustive()
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            Kind::Plain(body) => Pin::new(body).poll_frame(cx),
            Kind::Stream(body) => Pin::new(&mut **body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Plain(body) => body.is_end_stream(),
            Kind::Stream(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Plain(body) => body.size_hint(),
            Kind::Stream(body) => body.size_hint(),
        }
    }
}

impl server::Body for Body {
    fn poll_beside(&mut self, cx: &mut Context<'_>) {
        if let Kind::Stream(body) = &mut self.0 {
            body.poll_beside(cx);
        }
    }

    fn detach(&mut self) {
        if let Kind::Stream(body) = &mut self.0 {
            body.detach();
        }
    }
}
