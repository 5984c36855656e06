//! The sidecar that the scenes are played before: all they know of it is an address and its access-log lines.

use std::{net::SocketAddr, sync::Arc};

use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};

use crate::{
    account::{log::Sink, metrics::Metrics},
    clock::Clock,
    config::{self, Config, Flags},
    ledger::Ledger,
    proxy,
    server::{self, Address, BadHead, Listener, Peer},
};

/// Where it serves the demo upstream.
pub(super) const PATH: &str = "/demo";

/// Where it serves the same upstream with the clocks that it has by default.
pub(super) const PATIENT: &str = "/patient";

/// A sidecar that serves in this process.
#[derive(Debug)]
pub(super) struct Sidecar {
    /// Where it listens.
    pub(super) address: SocketAddr,
    /// Its access-log lines, JSON.
    pub(super) lines: mpsc::Receiver<String>,
    /// Its task; ends with it.
    pub(super) _serving: JoinSet<()>,
}

/// Lines that may wait for a scene to ask for them.
const LINES: usize = 1024;

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
        [upstreams.patient]
        url = "http://{upstream}/mcp"
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
        let words = |problems: config::Problems| problems.to_string();
        let nothing = |_: &str| None;
        let config =
            Config::from_text(&settings(upstream), None, &Flags::default(), &nothing).map_err(words)?;
        let listener = Listener::bind(&config.listen).map_err(|error| format!("no free port: {error}"))?;
        let Address::Tcp(address) = *listener.address() else {
            return Err("the demo listens on TCP".to_owned());
        };
        let (sink, lines) = Sink::lines(LINES, Arc::new(Metrics::new()));
        let settings = config.proxy_settings().map_err(words)?;
        let ledger = Ledger::start(config.open_store().await?, settings.ledger.clone());
        let flow = proxy::Sidecar::new(settings, ledger, sink, Clock::system());
        let refuse = {
            let flow = Arc::clone(&flow);
            move |peer: &Peer, why: &BadHead| flow.refuse(peer, why)
        };
        let service = tower::service_fn(move |request| Arc::clone(&flow).handle(request));
        let (keep, fixed) = watch::channel(Arc::new(config.server_settings().map_err(words)?));
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            server::run(listener, fixed, service, refuse, &Gauge::default(), std::future::pending()).await;
            drop(keep);
        });
        Ok(Self { address, lines, _serving: serving })
    }
}
