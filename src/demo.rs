//! The embedded demo upstream: a small, honest MCP server of both eras, for `mcp-sidecar demo` and for tests.
//!
//! It serves Streamable HTTP at `/mcp` (MCP 2025-06-18 and 2025-11-25 with sessions, 2026-07-28 without) and
//! counts what it sees ([`Snapshot`], also as JSON at `/stats`): a call that was stopped is counted where the
//! work stopped, which no log in front of the server can know.
//!
//! Some of its tools misbehave by themselves: they are slow, silent, busy, or flood their caller with progress. Others
//! change something: `charge` and `reserve_inventory` keep a durable [`ledger`] and honour the idempotency key,
//! `charge_unkeyed` does not, `reconcile` says what was committed under a key. `search` goes on from a resume token, and
//! `export` is a durable task for clients that take them. `subscriptions/listen` tells of changes of `inventory://SKU`.
//!
//! `POST /control` ([`Handle::control`] in the process) makes the next calls of any tool fail; it is no argument of the
//! call, so that a call that failed and the attempt after it are the same call. Its body is a JSON object of these:
//!
//! | member | does |
//! |---|---|
//! | `fault` | to the next `times` (1) calls of `tool`: `delay_ms`, `status` with `retry_after`, `fail_before` (the connection ends, nothing is done), `cut_after` (it ends after the progress of that value), `lose_response` (it ends once the work is done) |
//! | `listen` | `drop` or `end` every subscription; `refuse` the next `times` (1) with a status, and `retry_after`; `narrow` so many next acknowledgements |
//! | `tools_changed` | `true`: tells subscribers so |
//! | `checkpoints` | lets the workers of exports that `hold` pass so many |
//!
//! It has no authentication and is not made to face a network.

mod call;
mod control;
mod export;
pub mod ledger;
mod legacy;
mod listen;
mod listing;
mod modern;
mod orders;
mod resources;
mod rpc;
mod search;
mod shared;
mod stats;
mod stream;
mod tasks;
mod tools;

use std::{io, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
};

use crate::{headers::PROTOCOL_VERSION, relay::body::Body};

pub use stats::{Calls, Snapshot};

use shared::Shared;
use stream::Cut;

/// Bytes of a request body.
const REQUEST_BYTES: usize = 4 << 20;
/// A pause after an accept that failed (no more files, say): trying again at once would only spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The demo upstream.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    legacy: legacy::Legacy,
}

/// Holds a demo upstream that runs. Dropped, it stops: its connections are closed, its calls may go on.
#[derive(Debug)]
pub struct Handle {
    shared: Arc<Shared>,
    accepting: AbortHandle,
}

impl Server {
    /// Binds `addr` (port 0 for a free one) and serves. Gives the address bound to; the endpoint is `/mcp`. Its ledger is a
    /// file in a temporary folder, which goes with it.
    ///
    /// # Errors
    ///
    /// The address cannot be bound, or there is no place for the ledger.
    pub async fn start(addr: SocketAddr) -> io::Result<(SocketAddr, Handle)> {
        Self::serve_with(addr, None).await
    }

    /// The same with the ledger at `path`: made if it is not there, gone on with if it is. Several servers may use one;
    /// the tasks in it that are not over are gone on with by each that starts.
    ///
    /// # Errors
    ///
    /// The address cannot be bound, or the file is no ledger.
    pub async fn start_on(addr: SocketAddr, path: &Path) -> io::Result<(SocketAddr, Handle)> {
        Self::serve_with(addr, Some(path)).await
    }

    async fn serve_with(addr: SocketAddr, path: Option<&Path>) -> io::Result<(SocketAddr, Handle)> {
        let listener = TcpListener::bind(addr).await?;
        let bound = listener.local_addr()?;
        let shared = Shared::open(path)?;
        tasks::go_on(&shared).map_err(io::Error::other)?;
        let legacy = legacy::Legacy::new(Arc::clone(&shared));
        let server = Arc::new(Self { shared: Arc::clone(&shared), legacy });
        let accepting = tokio::spawn(server.accept(listener)).abort_handle();
        Ok((bound, Handle { shared, accepting }))
    }

    async fn accept(self: Arc<Self>, listener: TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        connections.spawn(Arc::clone(&self).serve(stream));
                    }
                    Err(error) => {
                        tracing::debug!(%error, "demo upstream cannot accept");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = connections.join_next() => {}
            }
        }
    }

    async fn serve(self: Arc<Self>, stream: TcpStream) {
        let _counted = Connected::open(Arc::clone(&self.shared.stats));
        // Each event is a write of its own, and none may wait for the acknowledgement of the one before.
        let _ = stream.set_nodelay(true);
        let service = service_fn(move |request| {
            let server = Arc::clone(&self);
            async move {
                let response = server.answer(request).await;
                // hyper sends nothing where there is no response: it closes the connection, or resets the stream.
                if response.extensions().get::<Cut>().is_some() { Err(Cut) } else { Ok(response) }
            }
        });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new());
        // It ends in an error whenever a client leaves amid an answer: that is no error of ours.
        let _ = builder.serve_connection(TokioIo::new(stream), service).await;
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let (head, body) = request.into_parts();
        match head.uri.path() {
            "/stats" if head.method == Method::GET => return self.stats_page(),
            "/mcp" => self.shared.stats.count(|seen| seen.requests += 1),
            "/control" => {}
            _ => return rpc::bare(StatusCode::NOT_FOUND),
        }
        if !origin_is_local(&head.headers) {
            return rpc::bare(StatusCode::FORBIDDEN);
        }
        if head.uri.path() == "/control" {
            return if head.method == Method::POST {
                self.control(body).await
            } else {
                rpc::not_allowed("POST")
            };
        }
        match head.method {
            Method::POST => self.post(&head.headers, body).await,
            // In the modern era neither exists; without a session legacy answers 400.
            Method::GET | Method::DELETE if is_modern(&head.headers, None) => rpc::not_allowed("POST"),
            Method::GET if !legacy::takes_stream(&head.headers) => rpc::bare(StatusCode::NOT_ACCEPTABLE),
            Method::GET => self.legacy.get(&head.headers),
            Method::DELETE => self.legacy.delete(&head.headers),
            _ => rpc::not_allowed("GET, POST, DELETE"),
        }
    }

    async fn post(&self, headers: &HeaderMap, body: Incoming) -> Response<Body> {
        let Ok(body) = Limited::new(body, REQUEST_BYTES).collect().await else {
            return rpc::bare(StatusCode::PAYLOAD_TOO_LARGE);
        };
        let message = match rpc::Message::read(&body.to_bytes()) {
            Ok(message) => message,
            Err(refusal) => return *refusal,
        };
        if is_modern(headers, Some(&message)) {
            modern::post(headers, message, &self.shared).await
        } else {
            self.legacy.post(headers, message).await
        }
    }

    async fn control(&self, body: Incoming) -> Response<Body> {
        let Ok(body) = Limited::new(body, REQUEST_BYTES).collect().await else {
            return rpc::bare(StatusCode::PAYLOAD_TOO_LARGE);
        };
        let asked = serde_json::from_slice(&body.to_bytes()).map_err(|error| error.to_string());
        match asked.and_then(|asked| self.shared.control(asked)) {
            Ok(()) => rpc::bare(StatusCode::NO_CONTENT),
            Err(text) => rpc::fault(StatusCode::BAD_REQUEST, None, rpc::INVALID_REQUEST, &text),
        }
    }

    fn stats_page(&self) -> Response<Body> {
        rpc::as_json(serde_json::to_vec(&self.shared.stats.snapshot()).unwrap_or_default().into())
    }
}

impl Handle {
    /// What the server has seen by now.
    pub fn stats(&self) -> Snapshot {
        self.shared.stats.snapshot()
    }

    /// Does what a `POST /control` with this body does.
    ///
    /// # Errors
    ///
    /// In words, what is wrong with it.
    pub fn control(&self, asked: &Value) -> Result<(), String> {
        let asked =
            serde::Deserialize::deserialize(asked).map_err(|error: serde_json::Error| error.to_string())?;
        self.shared.control(asked)
    }

    /// Waits until what the server has seen is `enough`, and gives it. Waits for ever if that never comes.
    pub async fn until(&self, enough: impl FnMut(&Snapshot) -> bool) -> Snapshot {
        let mut seen = self.shared.stats.subscribe();
        // The sender lives in `self.shared`, so it cannot be gone.
        seen.wait_for(enough).await.map(|seen| seen.clone()).unwrap_or_default()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.accepting.abort();
        self.shared.checkpoints.close();
    }
}

/// Counts a connection.
struct Connected(Arc<stats::Stats>);

impl Connected {
    fn open(stats: Arc<stats::Stats>) -> Self {
        stats.count(|seen| seen.connections_opened += 1);
        Self(stats)
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.count(|seen| seen.connections_closed += 1);
    }
}

/// Whether a request is of the modern era: its body says a revision in `_meta`, or its header one that is not
/// legacy. Revisions are dates, so they sort as text. `initialize` is legacy by its name, whatever it asks for.
fn is_modern(headers: &HeaderMap, message: Option<&rpc::Message>) -> bool {
    if message.is_some_and(|message| message.method.as_deref() == Some("initialize")) {
        return false;
    }
    message.is_some_and(|message| message.params.meta.protocol_version.is_some())
        || rpc::text(headers, &PROTOCOL_VERSION).is_some_and(|version| version >= modern::VERSION)
}

/// Whether a web page that asks is one of this machine (MCP, Streamable HTTP § Security: DNS rebinding).
fn origin_is_local(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return true };
    let uri = origin.to_str().ok().and_then(|origin| origin.parse::<http::Uri>().ok());
    uri.and_then(|uri| uri.host().map(|host| matches!(host, "localhost" | "127.0.0.1" | "[::1]")))
        .unwrap_or(false)
}

fn server_info() -> Value {
    json!({ "name": "mcp-sidecar-demo", "version": env!("CARGO_PKG_VERSION") })
}

#[cfg(test)]
mod tests;
