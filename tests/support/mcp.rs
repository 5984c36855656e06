//! The messages of the test cases: a call in either era, its answers, its progress, its cancellation.
//!
//! Ids and tokens are JSON text, so `"1"` is the number and `"\"1\""` the string.

use std::fmt::Display;

/// The legacy revision the tests speak.
pub const LEGACY: &str = "2025-11-25";
/// The modern one.
pub const MODERN: &str = "2026-07-28";

/// A request to be written. The length and the host are added when it is.
#[derive(Clone, Debug)]
pub struct Post {
    pub method: &'static str,
    pub path: String,
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Post {
    /// A request of a legacy session `sess-A`.
    pub fn legacy(body: impl Into<Vec<u8>>) -> Self {
        Self::new(body).field("MCP-Protocol-Version", LEGACY).field("Mcp-Session-Id", "sess-A")
    }

    /// A modern request, with the headers that mirror its body.
    pub fn modern(method: &str, name: Option<&str>, body: impl Into<Vec<u8>>) -> Self {
        let post = Self::new(body).field("MCP-Protocol-Version", MODERN).field("Mcp-Method", method);
        match name {
            Some(name) => post.field("Mcp-Name", name),
            None => post,
        }
    }

    /// A request without any MCP header.
    pub fn new(body: impl Into<Vec<u8>>) -> Self {
        let post = Self { method: "POST", path: "/mcp".to_owned(), fields: Vec::new(), body: body.into() };
        post.field("Accept", "application/json, text/event-stream").field("Content-Type", "application/json")
    }

    /// A `GET` of the legacy notification stream.
    pub fn get() -> Self {
        let mut get = Self::legacy("").field("Accept", "text/event-stream").without("Content-Type");
        get.method = "GET";
        get
    }

    /// A `DELETE` of the legacy session.
    pub fn delete() -> Self {
        let mut delete = Self::legacy("").without("Content-Type");
        delete.method = "DELETE";
        delete
    }

    /// Sets a header field, in place of one of that name.
    pub fn field(self, name: &str, value: &str) -> Self {
        self.without(name).more(name, value)
    }

    /// Adds a header field, beside one of that name.
    pub fn more(mut self, name: &str, value: &str) -> Self {
        self.fields.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn without(mut self, name: &str) -> Self {
        self.fields.retain(|(n, _)| !n.eq_ignore_ascii_case(name));
        self
    }

    pub fn at(mut self, path: &str) -> Self {
        path.clone_into(&mut self.path);
        self
    }

    /// The bytes on the wire. A field `Host` or `Content-Length` of its own wins.
    pub fn bytes(&self, host: &str) -> Vec<u8> {
        let has = |name: &str| self.fields.iter().any(|(n, _)| n.eq_ignore_ascii_case(name));
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.path);
        if !has("host") {
            head += &format!("Host: {host}\r\n");
        }
        for (name, value) in &self.fields {
            head += &format!("{name}: {value}\r\n");
        }
        if self.method == "POST" && !has("content-length") && !has("transfer-encoding") {
            head += &format!("Content-Length: {}\r\n", self.body.len());
        }
        [head.as_bytes(), b"\r\n", &self.body].concat()
    }
}

/// `CALL(id)`: a legacy `tools/call` of `slow`, with its id as progress token.
pub fn call(id: impl Display) -> Post {
    Post::legacy(format!(
        r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"slow","arguments":{{}},"_meta":{{"progressToken":{id}}}}}}}"#
    ))
}

/// `MCALL(id)`: the same in the modern era.
pub fn modern_call(id: impl Display) -> Post {
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"slow","arguments":{{}},"_meta":{{"progressToken":{id},"io.modelcontextprotocol/protocolVersion":"{MODERN}"}}}}}}"#
    );
    Post::modern("tools/call", Some("slow"), body)
}

/// `CXL(id)`: the legacy cancellation of request `id`.
pub fn cancel(id: impl Display) -> Post {
    Post::legacy(format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#
    ))
}

/// `RES(id)`: the result of a call.
pub fn result(id: impl Display) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"content":[{{"type":"text","text":"ok"}}]}}}}"#)
}

/// `PRG(token,n)`: progress.
pub fn progress(token: impl Display, n: impl Display) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":{n}}}}}"#
    )
}

/// `EV{json}`: one event, LF framing.
pub fn event(json: impl Display) -> String {
    format!("event: message\ndata: {json}\n\n")
}
