//! The legacy era (MCP 2025-06-18 and 2025-11-25): `initialize`, sessions, the `GET` stream, cancel by message.
//!
//! As real servers do, a stream that is closed cancels nothing: only `notifications/cancelled` does, or the
//! end of the session.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json, value::RawValue};
use tokio::sync::{mpsc, oneshot};

use crate::{
    headers::{PROTOCOL_VERSION, SESSION_ID},
    relay::body::Body,
};

use super::{
    call::{Call, Running},
    listing, resources,
    rpc::{self, Message},
    shared::Shared,
    stream::{Events, Piece},
};

/// Newest first. 2025-03-26 is left out for its batches.
const VERSIONS: [&str; 2] = ["2025-11-25", "2025-06-18"];
/// Sessions that may exist at once.
const SESSIONS: usize = 10_000;

/// Every session of one server.
#[derive(Debug)]
pub(super) struct Legacy {
    shared: Arc<Shared>,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
}

/// One session. Dropped with its sender, its `GET` stream ends.
#[derive(Debug, Default)]
struct Session {
    /// How to stop what runs, by the text of the request's id, so that 1 is not "1". Used, it is `None`.
    calls: Mutex<HashMap<String, Option<oneshot::Sender<()>>>>,
    stream: Mutex<Option<mpsc::Sender<Piece>>>,
}

impl Legacy {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, sessions: Mutex::default() }
    }

    /// Answers a POST.
    pub(super) async fn post(&self, headers: &HeaderMap, message: Message) -> Response<Body> {
        if message.method.as_deref() == Some("initialize") {
            return match &message.id {
                Some(id) => self.initialize(id, message.params.protocol_version.as_deref()),
                None => refuse("initialize is a request"),
            };
        }
        let session = match self.session(headers) {
            Ok(session) => session,
            Err(response) => return *response,
        };
        if rpc::text(headers, &PROTOCOL_VERSION).is_some_and(|version| !VERSIONS.contains(&version)) {
            return refuse("unsupported MCP-Protocol-Version");
        }
        let Message { id, method, params } = message;
        match (id, method.as_deref()) {
            (Some(id), Some(method)) => self.request(&session, id, method, params).await,
            (None, Some(method)) => {
                if method == "notifications/cancelled" {
                    self.shared.stats.count(|seen| seen.cancelled_notifications += 1);
                    session.cancel(params.request_id.as_deref());
                }
                rpc::bare(StatusCode::ACCEPTED)
            }
            (_, None) => rpc::bare(StatusCode::ACCEPTED),
        }
    }

    /// Answers a GET with the session's one stream.
    pub(super) fn get(&self, headers: &HeaderMap) -> Response<Body> {
        let session = match self.session(headers) {
            Ok(session) => session,
            Err(response) => return *response,
        };
        let mut stream = lock(&session.stream);
        if stream.as_ref().is_some_and(|open| !open.is_closed()) {
            return rpc::fault(StatusCode::CONFLICT, None, rpc::INVALID_REQUEST, "one stream a session");
        }
        let (sender, events) = mpsc::channel(1);
        *stream = Some(sender);
        rpc::as_stream(Body::new(Events::new(events, Arc::clone(&self.shared.stats), None)))
    }

    /// Ends a session: its calls are stopped, its stream ends.
    pub(super) fn delete(&self, headers: &HeaderMap) -> Response<Body> {
        let session = match self.session(headers) {
            Ok(session) => session,
            Err(response) => return *response,
        };
        let id = rpc::text(headers, &SESSION_ID).unwrap_or_default();
        // Of two DELETEs at once only one finds it, so it is counted once.
        if lock(&self.sessions).remove(id).is_some() {
            self.shared.stats.count(|seen| seen.sessions -= 1);
        }
        for call in lock(&session.calls).values_mut() {
            *call = None;
        }
        *lock(&session.stream) = None;
        rpc::bare(StatusCode::OK)
    }

    fn initialize(&self, id: &RawValue, asked: Option<&str>) -> Response<Body> {
        let Some(name) = rpc::random_id() else {
            return rpc::bare(StatusCode::INTERNAL_SERVER_ERROR);
        };
        let mut sessions = lock(&self.sessions);
        if sessions.len() >= SESSIONS {
            return rpc::bare(StatusCode::SERVICE_UNAVAILABLE);
        }
        sessions.insert(name.clone(), Arc::default());
        drop(sessions);
        self.shared.stats.count(|seen| seen.sessions += 1);

        let version = VERSIONS.into_iter().find(|&known| Some(known) == asked).unwrap_or(VERSIONS[0]);
        let mut response = rpc::as_json(rpc::result(
            id,
            &json!({
                "protocolVersion": version,
                "capabilities": { "tools": {}, "resources": {} },
                "serverInfo": super::server_info(),
            }),
        ));
        // Hex digits are a header's value.
        if let Ok(name) = HeaderValue::try_from(name) {
            response.headers_mut().insert(SESSION_ID, name);
        }
        response
    }

    async fn request(
        &self,
        session: &Arc<Session>,
        id: Box<RawValue>,
        method: &str,
        params: rpc::Params,
    ) -> Response<Body> {
        match method {
            "ping" => rpc::as_json(rpc::result(&id, &json!({}))),
            "tools/list" => rpc::as_json(rpc::result(&id, &json!({ "tools": listing::listing() }))),
            "resources/list" => resources::answer(&self.shared, &id, None, as_it_is).await,
            "resources/read" => {
                let uri = params.uri.unwrap_or_default();
                resources::answer(&self.shared, &id, Some(&uri), as_it_is).await
            }
            "tools/call" => match Call::read(id.clone(), params, &self.shared, as_it_is) {
                Ok(call) => match session.start(&id, call, &self.shared) {
                    Some(running) => running.answer(&self.shared.stats).await,
                    None => refuse("a call with this id is running"),
                },
                Err(response) => *response,
            },
            _ => {
                let text = format!("unknown method: {method}");
                rpc::fault(StatusCode::OK, Some(&id), rpc::METHOD_NOT_FOUND, &text)
            }
        }
    }

    fn session(&self, headers: &HeaderMap) -> Result<Arc<Session>, Box<Response<Body>>> {
        let Some(id) = rpc::text(headers, &SESSION_ID) else {
            return Err(Box::new(refuse("missing session id")));
        };
        lock(&self.sessions).get(id).cloned().ok_or_else(|| {
            Box::new(rpc::fault(StatusCode::NOT_FOUND, None, rpc::INVALID_REQUEST, "no such session"))
        })
    }
}

impl Session {
    /// `None` if a call with this id is running.
    fn start(self: &Arc<Self>, id: &RawValue, call: Call, shared: &Arc<Shared>) -> Option<Running> {
        let (stop, stopped) = oneshot::channel();
        match lock(&self.calls).entry(id.get().to_owned()) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(place) => place.insert(Some(stop)),
        };
        let listed = Listed { session: Arc::clone(self), id: id.get().to_owned() };
        Some(call.start(shared, as_it_is, async move {
            let _listed = listed;
            // Nothing is ever sent: it ends when the other end is dropped.
            let _ = stopped.await;
        }))
    }

    /// Unknown, finished and malformed ones are ignored (MCP 2025-11-25, Cancellation § Error Handling).
    fn cancel(&self, id: Option<&RawValue>) {
        let Some(id) = id else { return };
        if let Some(stop) = lock(&self.calls).get_mut(id.get()) {
            *stop = None;
        }
    }
}

/// A call's place among its session's; goes with its task.
struct Listed {
    session: Arc<Session>,
    id: String,
}

impl Drop for Listed {
    fn drop(&mut self) {
        lock(&self.session.calls).remove(&self.id);
    }
}

fn as_it_is(result: Value) -> Value {
    result
}

fn refuse(message: &str) -> Response<Body> {
    rpc::fault(StatusCode::BAD_REQUEST, None, rpc::INVALID_REQUEST, message)
}

/// A poisoned lock only means that some thread panicked between two whole steps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the client takes an event stream (RFC 9110 § 12.5.1, as far as MCP clients use it).
pub(super) fn takes_stream(headers: &HeaderMap) -> bool {
    let accept = rpc::text(headers, &header::ACCEPT);
    accept.is_some_and(|accept| accept.contains("text/event-stream") || accept.contains("*/*"))
}
