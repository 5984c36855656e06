//! What the server asks of the bodies that it writes.

use std::{error::Error, task::Context};

use bytes::Bytes;

/// A body that may have work of its own to do while its client takes nothing: a relayed stream reads its upstream on.
pub trait Body:
    http_body::Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + Unpin + 'static
{
    /// Does that work. Who calls this does so with every poll, before it asks for a frame, and sees by itself when the
    /// client is gone.
    fn poll_beside(&mut self, _: &mut Context<'_>) {}

    /// Nobody will call [`Body::poll_beside`]: the work goes on by itself.
    fn detach(&mut self) {}
}
