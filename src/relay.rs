//! Gives the upstream's answer to the node: chooses how, by content type.
//!
//! [`sse`] finds the events, [`queue`] holds them for a slow node, [`body`] is what hyper sends.

mod alarm;
pub mod assembly;
pub mod body;
pub mod clocks;
pub mod decode;
pub mod held;
pub mod lane;
pub mod listen;
pub mod queue;
mod source;
pub mod sse;
pub mod stream;
pub mod terminal;

use std::time::Duration;

pub use body::Body;

/// How streams of one upstream are relayed.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Events held for a slow node, per stream.
    pub queue: usize,
    /// Bytes held for a slow node, per stream.
    pub queue_bytes: usize,
    /// Progress events of a token that pass at once.
    pub burst: u32,
    /// Then one per token and interval; zero: no rate limit.
    pub min_interval: Duration,
    /// False: nothing is thinned, pressure always pauses reading.
    pub coalesce: bool,
    /// A comment after this long without a byte to the node; zero: none.
    pub keepalive: Duration,
}
