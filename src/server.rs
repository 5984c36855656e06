//! Accepts connections and serves them: TCP, TLS and unix sockets in, requests out to a service.
//!
//! Knows no JSON and no MCP. Each request carries its [`Peer`] as an extension.
//!
//! At the limit of connections nothing is accepted until one ends. A connection whose client takes no byte for
//! [`Limits::client_stall`], sends its first bytes or a request's head slower than [`Limits::header_timeout`], or
//! vanishes (noticed within 60 s) is closed. What comes on HTTP/1.1 and is no request is a [`BadHead`]: it is answered
//! too, and ends its connection. Closing one drops the service's futures and bodies: see the
//! cancellation contract in the crate's documentation.

mod address;
mod bad_head;
mod body;
mod connection;
mod framing;
mod head;
mod io;
mod listener;
mod prefixed;
mod stall;
mod stream;
pub mod tls;

use std::{convert::Infallible, future::Future, sync::Arc, time::Duration};

use http::{Request, Response};
use hyper::body::Incoming;
use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower::Service;

pub use address::Address;
pub use bad_head::BadHead;
pub use body::Body;
pub use io::Peer;
pub use listener::Listener;

/// How long connections may take to end once nothing new is accepted; what is left then is cut.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Bounds of connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// How long the first bytes of a connection, its TLS handshake, and each request's head (from its first byte)
    /// may take.
    pub header_timeout: Duration,
    /// A client that takes no byte of what waits for it for this long is closed.
    pub client_stall: Duration,
}

/// What a reload may change; a connection goes on under what it began with.
#[derive(Clone)]
pub struct Settings {
    /// Bounds.
    pub limits: Limits,
    /// TLS, if the listener speaks it.
    pub tls: Option<tokio_rustls::TlsAcceptor>,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings").field("limits", &self.limits).field("tls", &self.tls.is_some()).finish()
    }
}

/// Serves connections of `listener` until `stop` ends; then accepts no more, lets each connection end with what it has
/// in flight for at most a second, and cuts the rest. Returns when all have ended.
///
/// `refuse` answers what is no request, in the service's place. `connections` shows how many are open.
///
/// A drain comes before `stop`: until it is over, connections are accepted and requests come in as ever.
pub async fn run<S, R, B>(
    listener: Listener,
    mut settings: watch::Receiver<Arc<Settings>>,
    service: S,
    refuse: R,
    connections: &Gauge,
    stop: impl Future<Output = ()>,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
    R: FnOnce(&Peer, &BadHead) -> Response<B> + Clone + Send + 'static,
    B: Body,
{
    let (closing, told) = watch::channel(false);
    let mut open = JoinSet::new();
    let mut complaint = Complaint::default();
    let mut stop = std::pin::pin!(stop);
    loop {
        let limit = settings.borrow_and_update().limits.connections;
        let accepted = tokio::select! {
            biased;
            () = &mut stop => break,
            // A closed channel is no change: the settings just stay.
            Ok(()) = settings.changed() => continue,
            // A panic has been reported already.
            Some(_) = open.join_next() => continue,
            accepted = listener.accept(), if open.len() < limit => accepted,
        };
        match accepted {
            Ok((socket, label, host)) => {
                let settings = Arc::clone(&settings.borrow());
                let connection = connection::Connection {
                    socket,
                    label,
                    host,
                    settings,
                    told: told.clone(),
                    _open: Open::one_more(connections),
                };
                open.spawn(connection.serve(service.clone(), refuse.clone()));
            }
            Err(error) => complaint.pause(&error).await,
        }
    }
    drop(listener);
    closing.send_replace(true);
    let all_ended = async { while open.join_next().await.is_some() {} };
    // Those that take longer are cut.
    let _ = timeout(LAST_WORDS, all_ended).await;
    open.shutdown().await;
}

/// One open connection, shown until it is dropped.
struct Open(Gauge);

impl Open {
    fn one_more(connections: &Gauge) -> Self {
        connections.inc();
        Self(connections.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Says why nothing can be accepted, once a second at most.
#[derive(Default)]
struct Complaint {
    last: Option<Instant>,
}

impl Complaint {
    /// A connection that went before it was accepted is no reason to wait; running out of files is, because
    /// accepting would fail again at once.
    async fn pause(&mut self, error: &std::io::Error) {
        use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
        if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
            return;
        }
        if self.last.is_none_or(|last| last.elapsed() >= Duration::from_secs(1)) {
            self.last = Some(Instant::now());
            tracing::error!(%error, "can't accept a connection");
        }
        sleep(Duration::from_millis(50)).await;
    }
}

#[cfg(test)]
mod tests;
