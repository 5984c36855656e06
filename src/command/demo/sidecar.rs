//! The sidecar that the scenes are played before: all they know of it is an address and its access-log lines.

use std::net::SocketAddr;

use tokio::sync::mpsc;

/// Where it serves the demo upstream.
pub(super) const PATH: &str = "/demo";

/// A sidecar that serves in this process.
#[derive(Debug)]
pub(super) struct Sidecar {
    /// Where it listens.
    pub(super) address: SocketAddr,
    /// Its access-log lines, JSON.
    pub(super) lines: mpsc::Receiver<String>,
}

/// Its configuration: clocks that nobody needs to wait long for. The scenes count on their order: the keepalive
/// comes well before the idle clock, and that before the maximum.
pub(super) fn settings(upstream: SocketAddr) -> String {
    format!(
        r#"
        listen = "127.0.0.1:0"
        admin = ""
        state = "memory:"
        [upstreams.demo]
        url = "http://{upstream}/mcp"
        idle_timeout = "1s"
        max_timeout = "2s"
        cancel_grace = "500ms"
        [upstreams.demo.keepalive]
        interval = "150ms"
        "#
    )
}

impl Sidecar {
    /// Starts it before the upstream.
    ///
    /// # Errors
    ///
    /// In words: no free port, or a configuration that is refused.
    pub(super) async fn start(upstream: SocketAddr) -> Result<Self, String> {
        let _ = settings(upstream);
        Err("this build has no sidecar to show".to_owned())
    }
}
