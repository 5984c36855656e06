//! The node's side of the demo: an MCP client as plain as can be, so that what it does to a connection is what
//! the scene says. One connection per request; dropping the answer, or the future that waits for it, closes it.

use std::{io, net::SocketAddr};

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{net::TcpSocket, task::JoinSet};

use crate::headers::{METHOD, NAME, PROTOCOL_VERSION, SESSION_ID};

/// The revision that the demo speaks in the modern era.
pub(crate) const MODERN: &str = "2026-07-28";
/// The revision that the demo speaks in the legacy era.
pub(crate) const LEGACY: &str = "2025-11-25";

/// A client of one endpoint.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    address: SocketAddr,
    path: String,
    /// `Some` makes it a legacy client in this session.
    session: Option<String>,
    /// How much its socket holds for it, where it is slow.
    receive_buffer: Option<u32>,
}

/// An HTTP answer, its body yet to be read. Owns the connection.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    body: Incoming,
    read: BytesMut,
    /// Of `read`, in how much no event ends.
    searched: usize,
    _connection: Connection,
}

/// One block of an event stream.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// Nothing but comment lines.
    Comment,
    /// A JSON message.
    Message(Value),
}

/// The task that drives a connection; closes it when dropped.
#[derive(Debug)]
struct Connection {
    _task: JoinSet<()>,
}

impl Client {
    /// A modern client of `http://ADDRESS/PATH`.
    pub(crate) fn new(address: SocketAddr, path: &str) -> Self {
        Self { address, path: path.to_owned(), session: None, receive_buffer: None }
    }

    /// The same client with a socket that holds little for it: what it does not read stands still at once.
    pub(crate) fn slow(&self) -> Self {
        Self { receive_buffer: Some(16 * 1024), ..self.clone() }
    }

    /// The same client of another path.
    #[cfg(test)]
    pub(crate) fn at(&self, path: &str) -> Self {
        Self { path: path.to_owned(), ..self.clone() }
    }

    /// Does the legacy handshake and gives the client of the new session.
    pub(crate) async fn initialize(&self) -> io::Result<Self> {
        let hello = json!({
            "jsonrpc": "2.0", "id": 0, "method": "initialize",
            "params": {
                "protocolVersion": LEGACY,
                "capabilities": {},
                "clientInfo": { "name": "demo", "version": env!("CARGO_PKG_VERSION") },
            },
        });
        let answer = self.exchange(Method::POST, HeaderMap::new(), hello.to_string()).await?;
        let session = answer.headers.get(SESSION_ID).and_then(|id| id.to_str().ok()).map(str::to_owned);
        let session = session.ok_or_else(|| io::Error::other("initialize was answered without a session"))?;
        answer.whole().await?;
        let client = Self { session: Some(session), ..self.clone() };
        client.notify("notifications/initialized", json!({})).await?;
        Ok(client)
    }

    /// Sends a request; `params` gets what its era asks for.
    pub(crate) async fn request(&self, id: Value, method: &str, mut params: Value) -> io::Result<Answer> {
        // A task's methods and a resource's are named by it (MCP 2026-07-28, Streamable HTTP § Standard Headers; SEP-2663).
        let name = ["name", "uri", "taskId"].into_iter().find_map(|member| params[member].as_str());
        let headers = self.headers(Some(method), name)?;
        if self.session.is_none() {
            params["_meta"]["io.modelcontextprotocol/protocolVersion"] = MODERN.into();
            params["_meta"]["io.modelcontextprotocol/clientInfo"] =
                json!({ "name": "demo", "version": env!("CARGO_PKG_VERSION") });
            let capabilities = &mut params["_meta"]["io.modelcontextprotocol/clientCapabilities"];
            if capabilities.is_null() {
                *capabilities = json!({});
            }
        }
        let body = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params });
        self.exchange(Method::POST, headers, body.to_string()).await
    }

    /// Calls a tool, with progress asked for under the request's id if `progress`.
    pub(crate) async fn call(
        &self,
        id: u64,
        tool: &str,
        arguments: Value,
        progress: bool,
    ) -> io::Result<Answer> {
        let mut params = json!({ "name": tool, "arguments": arguments });
        if progress {
            params["_meta"] = json!({ "progressToken": id });
        }
        self.request(id.into(), "tools/call", params).await
    }

    /// Sends a notification and gives the status of its answer.
    pub(crate) async fn notify(&self, method: &str, params: Value) -> io::Result<StatusCode> {
        let body = json!({ "jsonrpc": "2.0", "method": method, "params": params });
        let headers = self.headers(Some(method), None)?;
        Ok(self.exchange(Method::POST, headers, body.to_string()).await?.status)
    }

    /// Sends a request without a body: `GET` for the session's stream, `DELETE` for its end.
    pub(crate) async fn bare(&self, method: Method) -> io::Result<Answer> {
        self.exchange(method, self.headers(None, None)?, String::new()).await
    }

    /// One exchange, over a connection of its own.
    pub(crate) async fn exchange(
        &self,
        method: Method,
        headers: HeaderMap,
        body: String,
    ) -> io::Result<Answer> {
        let socket = if self.address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        if let Some(size) = self.receive_buffer {
            socket.set_recv_buffer_size(size)?;
        }
        let stream = socket.connect(self.address).await?;
        stream.set_nodelay(true)?;
        let (mut sender, driver) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            // How it ends shows in the answer or its body.
            let _ = driver.await;
        });
        let connection = Connection { _task: task };
        let mut request = Request::builder()
            .method(method)
            .uri(self.path.as_str())
            .header(header::HOST, self.address.to_string())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, text/event-stream")
            .body(Full::new(Bytes::from(body)))
            .map_err(io::Error::other)?;
        request.headers_mut().extend(headers);
        let (head, body) = sender.send_request(request).await.map_err(io::Error::other)?.into_parts();
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            body,
            read: BytesMut::new(),
            searched: 0,
            _connection: connection,
        })
    }

    fn headers(&self, method: Option<&str>, name: Option<&str>) -> io::Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        let version = if self.session.is_some() { LEGACY } else { MODERN };
        let mut set = |header, value: Option<&str>| -> io::Result<()> {
            if let Some(value) = value {
                headers.insert(header, value.parse().map_err(io::Error::other)?);
            }
            Ok(())
        };
        set(PROTOCOL_VERSION, Some(version))?;
        set(SESSION_ID, self.session.as_deref())?;
        if self.session.is_none() {
            set(METHOD, method)?;
            set(NAME, name)?;
        }
        Ok(headers)
    }
}

impl Answer {
    /// The essence of the content type.
    pub(crate) fn content_type(&self) -> &str {
        let value = self.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().split(';').next().unwrap_or_default().trim()
    }

    /// The next block of the event stream; `None` at its end.
    pub(crate) async fn event(&mut self) -> io::Result<Option<Event>> {
        loop {
            if let Some(end) = memchr::memmem::find(&self.read[self.searched..], b"\n\n") {
                let block = self.read.split_to(self.searched + end + 2);
                self.searched = 0;
                return Ok(Some(parse(&block)?));
            }
            // The first half of the end may have come already.
            self.searched = self.read.len().saturating_sub(1);
            match self.body.frame().await {
                Some(frame) => match frame.map_err(io::Error::other)?.into_data() {
                    Ok(data) => self.read.extend_from_slice(data.chunk()),
                    Err(_trailers) => {}
                },
                None if self.read.is_empty() => return Ok(None),
                None => return Err(io::Error::other("the stream ends amid an event")),
            }
        }
    }

    /// The next JSON message of the event stream; `None` at its end.
    pub(crate) async fn message(&mut self) -> io::Result<Option<Value>> {
        loop {
            match self.event().await? {
                Some(Event::Message(message)) => return Ok(Some(message)),
                Some(Event::Comment) => {}
                None => return Ok(None),
            }
        }
    }

    /// The last message of an event stream, or the JSON body: the response, when all went well.
    pub(crate) async fn response(mut self) -> io::Result<Value> {
        if self.content_type() != "text/event-stream" {
            return Ok(serde_json::from_slice(&self.whole().await?)?);
        }
        let mut last = Value::Null;
        while let Some(message) = self.message().await? {
            last = message;
        }
        Ok(last)
    }

    /// The whole body.
    pub(crate) async fn whole(self) -> io::Result<Bytes> {
        Ok(self.body.collect().await.map_err(io::Error::other)?.to_bytes())
    }
}

fn parse(block: &[u8]) -> io::Result<Event> {
    let mut data = Vec::new();
    for line in block.split(|&byte| byte == b'\n') {
        if let Some(value) = line.strip_prefix(b"data:") {
            data.extend_from_slice(value);
        }
    }
    if data.is_empty() { Ok(Event::Comment) } else { Ok(Event::Message(serde_json::from_slice(&data)?)) }
}
