//! A client of one remote MCP server, for the commands that ask one themselves.
//!
//! Words: a *modern* client's requests each stand for themselves (MCP 2026-07-28); a *legacy* one has done the
//! handshake and may hold a session (2025-11-25 and before).
//!
//! Promises: each request is sent once, never again by itself. [`Client::request`] takes at most
//! [`Settings::patience`], and nothing that is read exceeds [`Settings::max_message`]. Dropping a future or an
//! [`Answer`] closes the server's stream, which a modern server takes as a cancellation. Errors name the request and
//! what became of it, never a header or an argument; what they quote of the server is escaped and cut.
//!
//! Leaves which server, under which credential, and what the answers mean to the commands.

mod answer;
mod era;
mod error;
mod tools;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, header};
use serde_json::{Map, Value, json};
use tokio::time::timeout;

pub use answer::Answer;
pub use error::{Error, Problem};
pub use tools::{Pages, list_tools};

use crate::{
    headers::{self, METHOD, NAME, PROTOCOL_VERSION, SESSION_ID},
    message::{
        Era, Id,
        answer::{Answer as Message, look},
    },
    upstream::{Sent, Upstream},
};

/// The modern revision that is spoken.
pub const MODERN: &str = "2026-07-28";
/// The legacy revision that is asked for.
pub const LEGACY: &str = "2025-11-25";

/// How a server is asked.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it is, and the connections to it.
    pub upstream: Arc<Upstream>,
    /// Sent with every request, credentials among them. Nothing here replaces what the protocol asks for.
    pub headers: HeaderMap,
    /// From a request until its whole response.
    pub patience: Duration,
    /// Bytes of one message, and of one JSON body.
    pub max_message: usize,
}

/// A client of one server, in one era.
#[derive(Debug)]
pub struct Client {
    settings: Settings,
    era: Era,
    version: HeaderValue,
    session: Option<HeaderValue>,
    introduction: Option<Bytes>,
    ids: AtomicU64,
}

impl Client {
    /// A modern client. Sends nothing yet: that era has no handshake.
    pub fn modern(settings: Settings) -> Self {
        Self {
            settings,
            era: Era::Modern,
            version: HeaderValue::from_static(MODERN),
            session: None,
            introduction: None,
            ids: AtomicU64::new(1),
        }
    }

    /// Its era.
    pub fn era(&self) -> Era {
        self.era
    }

    /// The revision it speaks: [`MODERN`], or what `initialize` settled.
    pub fn version(&self) -> &str {
        self.version.to_str().unwrap_or_default()
    }

    /// The server's answer to `initialize`, as it came (legacy).
    pub fn introduction(&self) -> Option<&Bytes> {
        self.introduction.as_ref()
    }

    /// Makes a request and gives the whole response, as it came, which is a result.
    ///
    /// # Errors
    ///
    /// See [`Problem`]; a JSON-RPC error is [`Problem::Refused`].
    pub async fn request(&self, method: &str, params: Map<String, Value>) -> Result<Bytes, Error> {
        self.request_with(method, params).await.map(|(bytes, _)| bytes)
    }

    /// The same with the head of the answer.
    async fn request_with(
        &self,
        method: &str,
        params: Map<String, Value>,
    ) -> Result<(Bytes, HeaderMap), Error> {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let id = Id::parse(id.to_string().as_bytes());
        let patience = self.settings.patience;
        let responded = timeout(patience, async {
            let mut answer = self.open(method, params, id.as_ref()).await?;
            let response = answer.response(id.as_ref()).await?;
            Ok((response, answer.into_headers()))
        });
        responded
            .await
            .unwrap_or(Err(Problem::TimedOut(patience)))
            .map_err(|problem| Error::new(method, problem))
    }

    /// Begins a request under this id, or a notification without one, and gives the answer, whose body is yet to be
    /// read. Waits for its head as long as it takes.
    ///
    /// # Errors
    ///
    /// No answer, or one whose status is no success.
    pub async fn open(
        &self,
        method: &str,
        mut params: Map<String, Value>,
        id: Option<&Id>,
    ) -> Result<Answer, Problem> {
        let mut headers = self.headers();
        if self.era == Era::Modern {
            mirror(&mut headers, method, &params);
            add_meta(&mut params);
        }
        let mut body = json!({ "jsonrpc": "2.0", "method": method, "params": params });
        if let Some(id) = id {
            body["id"] = serde_json::from_slice(id.token()).unwrap_or_default();
        }
        let answer = self.exchange(Method::POST, headers, body.to_string().into()).await?;
        if answer.status().is_success() { Ok(answer) } else { Err(answer.refusal().await) }
    }

    /// Sends a notification.
    ///
    /// # Errors
    ///
    /// It was not taken.
    pub async fn notify(&self, method: &str, params: Map<String, Value>) -> Result<(), Error> {
        let patience = self.settings.patience;
        let sent = timeout(patience, self.open(method, params, None)).await;
        let sent = sent.unwrap_or(Err(Problem::TimedOut(patience)));
        sent.map(drop).map_err(|problem| Error::new(method, problem))
    }

    /// Sends one HTTP request and gives its answer, whatever the status. Waits for its head as long as it takes.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn exchange(&self, method: Method, headers: HeaderMap, body: Bytes) -> Result<Answer, Problem> {
        let mut request = Request::new(body);
        *request.method_mut() = method;
        *request.uri_mut() = self.settings.upstream.settings().url.clone();
        *request.headers_mut() = headers;
        let response = self.settings.upstream.send(request, &mut Sent::default()).await?;
        Ok(Answer::new(response, self.settings.max_message))
    }

    /// What every request of this client carries.
    pub fn headers(&self) -> HeaderMap {
        let mut headers = self.settings.headers.clone();
        let agent = HeaderValue::from_static(concat!("mcp-sidecar/", env!("CARGO_PKG_VERSION")));
        headers.entry(header::USER_AGENT).or_insert(agent);
        let mut set = |name: HeaderName, value| headers.insert(name, HeaderValue::from_static(value));
        set(header::ACCEPT, "application/json, text/event-stream");
        set(header::ACCEPT_ENCODING, "identity");
        set(header::CONTENT_TYPE, "application/json");
        // `initialize` itself settles the version, so it carries none.
        if self.era == Era::Modern || self.introduction.is_some() {
            headers.insert(PROTOCOL_VERSION, self.version.clone());
        }
        if let Some(session) = &self.session {
            headers.insert(SESSION_ID, session.clone());
        }
        headers
    }
}

impl Answer {
    /// Reads until the response with this id; what comes before is passed over. The response must be a result.
    async fn response(&mut self, id: Option<&Id>) -> Result<Bytes, Problem> {
        while let Some(bytes) = self.next().await? {
            let Some(Message::Response(response)) = look(&bytes) else { continue };
            // An error about a request that the server could not read has no id.
            let ours = response.id.as_ref() == id || (response.id.is_none() && response.result.is_none());
            match response.result {
                _ if !ours => {}
                Some(_) => return Ok(bytes),
                None => return Err(Problem::of_error(&bytes)),
            }
        }
        Err(self.no_response())
    }
}

/// The headers that mirror a modern body (MCP 2026-07-28, Streamable HTTP § Standard Request Headers).
fn mirror(headers: &mut HeaderMap, method: &str, params: &Map<String, Value>) {
    let name = match method {
        "tools/call" | "prompts/get" => params.get("name"),
        "resources/read" => params.get("uri"),
        "tasks/get" | "tasks/update" | "tasks/cancel" => params.get("taskId"),
        _ => None,
    };
    headers.remove(NAME);
    headers.extend(name.and_then(Value::as_str).and_then(mirrored).map(|name| (NAME, name)));
    headers.extend(mirrored(method).map(|method| (METHOD, method)));
}

/// A value as such a header carries it (§ Value Encoding): plain, or in the base64 form where that would change it.
fn mirrored(text: &str) -> Option<HeaderValue> {
    let plain = text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
        && text.trim_ascii() == text
        && !text.starts_with("=?base64?");
    let encoded;
    let text = if plain {
        text
    } else {
        encoded = format!("=?base64?{}?=", BASE64_STANDARD.encode(text));
        &encoded
    };
    HeaderValue::try_from(text).ok()
}

/// What a modern request says of its client; a member that is there already stays.
fn add_meta(params: &mut Map<String, Value>) {
    let meta = params.entry("_meta").or_insert_with(|| json!({}));
    let Some(meta) = meta.as_object_mut() else { return };
    for (key, value) in
        [("protocolVersion", json!(MODERN)), ("clientInfo", client_info()), ("clientCapabilities", json!({}))]
    {
        meta.entry(format!("io.modelcontextprotocol/{key}")).or_insert(value);
    }
}

fn client_info() -> Value {
    json!({ "name": "mcp-sidecar", "version": env!("CARGO_PKG_VERSION") })
}

#[cfg(test)]
mod tests;
