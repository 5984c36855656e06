//! A scripted raw server: answers each request as a script says, and records every byte it gets and the moments at
//! which each connection opens and closes.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::Duration,
};

use socket2::SockRef;
use tempfile::TempDir;
use tokio::time::Instant;

use super::{
    Watched,
    http::{Body, Head, Request},
    mcp,
    tls::{Authority, Front},
};

/// The server. Its threads end with the test's process.
#[derive(Clone, Debug)]
pub struct Upstream {
    /// `HOST:PORT`.
    pub address: String,
    /// The certificate of the authority that signed its own, in PEM, if it speaks TLS.
    pub ca: Option<String>,
    seen: Watched<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    connections: Vec<Connection>,
    requests: Vec<Request>,
}

/// One connection as the server saw it.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Every byte that came.
    pub bytes: Vec<u8>,
    pub opened: Instant,
    /// When its end came, or when the script closed it.
    pub closed: Option<Instant>,
    /// Whether that end was an RST.
    pub reset: bool,
    parsed: usize,
}

impl Upstream {
    /// Answers each whole request with `script`, which runs on the connection's own thread. The connection is kept
    /// when the script returns, unless it closed it.
    pub fn start(script: impl Fn(&Request, &mut Reply) + Send + Sync + 'static) -> Self {
        Self::by_connection(move |reply| {
            let mut answered = 0;
            while let Some(request) = reply.next_request(answered) {
                script(&request, reply);
                answered += 1;
                if !reply.open {
                    break;
                }
            }
        })
    }

    /// Runs `script` once for each connection, from its first byte on. When it returns, the connection is left open.
    pub fn by_connection(script: impl Fn(&mut Reply) + Send + Sync + 'static) -> Self {
        Self::by_connection_at("127.0.0.1", script)
    }

    /// The same at another address of this host.
    pub fn by_connection_at(host: &str, script: impl Fn(&mut Reply) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen = Watched::new(Seen::default());
        let upstream = Self { address, ca: None, seen: seen.clone() };
        let script = Arc::new(script);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (mut reply, script) = (Reply::new(stream, &seen), Arc::clone(&script));
                thread::spawn(move || {
                    script(&mut reply);
                    if reply.open {
                        reply.hang();
                    }
                });
            }
        });
        upstream
    }

    /// Answers every request with 200, this body and `application/json`.
    pub fn json(body: impl Into<String>) -> Self {
        let body = body.into();
        Self::start(move |_, reply| reply.json(200, &[], &body))
    }

    /// Answers every request with a whole event stream of these messages.
    pub fn sse(messages: &[String]) -> Self {
        let messages = messages.to_vec();
        Self::start(move |_, reply| {
            reply.sse(&[]);
            messages.iter().for_each(|json| reply.event(json));
            reply.end();
        })
    }

    /// Reads requests and never answers.
    pub fn silent() -> Self {
        Self::start(|_, reply| reply.hang())
    }

    /// The same behind TLS, with a certificate for `localhost`. The bytes recorded are those inside.
    pub fn tls(script: impl Fn(&Request, &mut Reply) + Send + Sync + 'static) -> Self {
        Self::start(script).behind_tls(&["http/1.1"])
    }

    /// This one behind TLS that offers these versions of HTTP.
    pub fn behind_tls(self, alpn: &[&str]) -> Self {
        let authority = Authority::new();
        let front = Front::start(authority.issue().acceptor(alpn, None), &self.address);
        Self { address: format!("127.0.0.1:{}", front.port), ca: Some(authority.pem()), seen: self.seen }
    }

    /// A configuration with this as upstream `mcp`; its authority's certificate, if it has one, is written to `folder`.
    pub fn config(&self, folder: &TempDir) -> String {
        let mut table = format!("[upstreams.mcp]\nurl = \"{}\"\n", self.url());
        if let Some(ca) = &self.ca {
            let file = folder.path().join("ca.pem");
            std::fs::write(&file, ca).unwrap();
            table += &format!("tls = {{ ca = \"{}\" }}\n", file.display());
        }
        table
    }

    /// Its endpoint.
    pub fn url(&self) -> String {
        match self.ca {
            Some(_) => format!("https://localhost:{}/mcp", self.address.rsplit(':').next().unwrap()),
            None => format!("http://{}/mcp", self.address),
        }
    }

    /// How many whole requests came.
    pub fn count(&self) -> usize {
        self.seen.lock().requests.len()
    }

    /// Waits for request `number`, counted from 0 over all connections.
    pub fn wait_request(&self, number: usize) -> Request {
        self.seen.wait(&format!("request {number}"), show, |seen| seen.requests.get(number).cloned())
    }

    /// Waits for the first request that `wanted` is true of.
    pub fn wait_request_where(&self, wanted: impl Fn(&Request) -> bool) -> Request {
        self.seen.wait("a request", show, |seen| seen.requests.iter().find(|r| wanted(r)).cloned())
    }

    /// Waits until `count` requests have come that `wanted` is true of.
    pub fn wait_requests(&self, wanted: impl Fn(&Request) -> bool, count: usize) {
        self.seen.wait(&format!("{count} requests"), show, |seen| {
            (seen.requests.iter().filter(|request| wanted(request)).count() >= count).then_some(())
        });
    }

    /// Every whole request so far.
    pub fn requests(&self) -> Vec<Request> {
        self.seen.lock().requests.clone()
    }

    /// Waits until connection `number`, counted from 0, has been closed.
    pub fn wait_closed(&self, number: usize) -> Connection {
        let what = format!("connection {number} to close");
        self.seen
            .wait(&what, show, |seen| seen.connections.get(number).filter(|c| c.closed.is_some()).cloned())
    }

    /// Returns when every byte that was written here has been read by the other side, as the kernel counts it: nothing but
    /// a look at its table tells.
    pub fn wait_taken(&self) {
        let port: u16 = self.address.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0);
        let port = format!(":{port:04X}");
        let queued = || -> usize {
            let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
            let sockets = table.lines().filter_map(|line| {
                let columns: Vec<&str> = line.split_whitespace().collect();
                let (sent, received) = columns.get(4)?.split_once(':')?;
                let ours = columns.get(1)?.ends_with(&port).then_some(sent);
                let theirs = columns.get(2)?.ends_with(&port).then_some(received);
                usize::from_str_radix(ours.or(theirs)?, 16).ok()
            });
            sockets.sum()
        };
        let began = Instant::now();
        while queued() > 0 {
            assert!(began.elapsed() < super::BOUND, "{} bytes are not taken", queued());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Every connection so far.
    pub fn connections(&self) -> Vec<Connection> {
        self.seen.lock().connections.clone()
    }
}

fn show(seen: &Seen) -> String {
    let requests =
        seen.requests.iter().map(|r| format!("{} {:?}\n", r.head.line, String::from_utf8_lossy(&r.body)));
    format!("{} connections, requests:\n{}", seen.connections.len(), requests.collect::<String>())
}

/// What a script writes its answer to. A write to a peer that has gone is dropped.
#[derive(Debug)]
pub struct Reply {
    stream: TcpStream,
    connection: usize,
    seen: Watched<Seen>,
    open: bool,
}

impl Reply {
    fn new(stream: TcpStream, seen: &Watched<Seen>) -> Self {
        stream.set_nodelay(true).unwrap();
        let opened = Instant::now();
        let connection = seen.change(|seen| {
            let new = Connection { bytes: Vec::new(), opened, closed: None, reset: false, parsed: 0 };
            seen.connections.push(new);
            seen.connections.len() - 1
        });
        let (from, into) = (stream.try_clone().unwrap(), seen.clone());
        thread::spawn(move || record(from, connection, &into));
        Self { stream, connection, seen: seen.clone(), open: true }
    }

    /// The connection's request of that number, from 0, or `None` when it ends without one.
    pub fn request(&self, number: usize) -> Option<Request> {
        self.next_request(number)
    }

    fn next_request(&self, answered: usize) -> Option<Request> {
        let me = self.connection;
        self.seen.wait_unbounded(|seen| {
            match seen.requests.iter().filter(|r| r.connection == me).nth(answered) {
                Some(request) => Some(Some(request.clone())),
                None => seen.connections[me].closed.is_some().then_some(None),
            }
        })
    }

    /// Waits until what came over the connection, whole requests or not, is what `wanted` looks for, or until it ends.
    pub fn received(&self, wanted: impl Fn(&[u8]) -> bool) {
        let me = self.connection;
        self.seen.wait_unbounded(|seen| {
            let this = &seen.connections[me];
            (wanted(&this.bytes) || this.closed.is_some()).then_some(())
        });
    }

    /// Bytes as they are.
    pub fn raw(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.write_all(bytes.as_ref());
    }

    /// A whole JSON answer.
    pub fn json(&mut self, status: u16, fields: &[(&str, &str)], body: &str) {
        let mut fields = fields.to_vec();
        if !fields.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
            fields.push(("Content-Type", "application/json"));
        }
        let length = body.len().to_string();
        fields.push(("Content-Length", &length));
        self.head(status, &fields);
        self.raw(body);
    }

    /// A head alone.
    pub fn head(&mut self, status: u16, fields: &[(&str, &str)]) {
        let fields: String = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        self.raw(format!("HTTP/1.1 {status} Status\r\n{fields}\r\n"));
    }

    /// The head of a chunked event stream.
    pub fn sse(&mut self, fields: &[(&str, &str)]) {
        let own = [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")];
        self.head(200, &[&own[..], fields].concat());
    }

    /// One message as an event, in a chunk of its own.
    pub fn event(&mut self, json: &str) {
        self.chunk(mcp::event(json));
    }

    /// One chunk.
    pub fn chunk(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.raw([format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat());
    }

    /// The terminal chunk.
    pub fn end(&mut self) {
        self.raw("0\r\n\r\n");
    }

    /// Waits until the peer closes.
    pub fn hang(&mut self) {
        let me = self.connection;
        self.seen.wait_unbounded(|seen| seen.connections[me].closed);
    }

    /// Every byte that has come over the connection.
    pub fn bytes(&self) -> Vec<u8> {
        self.seen.lock().connections[self.connection].bytes.clone()
    }

    /// Whether the peer has closed.
    pub fn closed(&self) -> bool {
        self.seen.lock().connections[self.connection].closed.is_some()
    }

    /// Closes with FIN.
    pub fn break_off(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        self.open = false;
    }

    /// Closes with RST.
    pub fn reset(&mut self) {
        SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).unwrap();
        // The recording thread holds another handle of the socket, and only the last one to go sends the RST.
        let _ = self.stream.shutdown(Shutdown::Read);
        self.hang();
        self.open = false;
    }
}

fn record(mut from: TcpStream, connection: usize, into: &Watched<Seen>) {
    let mut piece = [0; 65536];
    let reset = loop {
        match from.read(&mut piece) {
            Ok(0) => break false,
            Ok(n) => into.change(|seen| {
                seen.connections[connection].bytes.extend_from_slice(&piece[..n]);
                while let Some(request) = seen.next(connection) {
                    seen.requests.push(request);
                }
            }),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break true,
        }
    };
    drop(from);
    into.change(|seen| {
        let this = &mut seen.connections[connection];
        (this.closed, this.reset) = (Some(Instant::now()), reset);
    });
}

impl Seen {
    /// The next whole request among the bytes of a connection.
    fn next(&mut self, connection: usize) -> Option<Request> {
        let number = self.requests.len();
        let this = &mut self.connections[connection];
        let bytes = &this.bytes[this.parsed..];
        let head = Head::read(bytes)?;
        let body = Body::read(&head, &bytes[head.len..], false);
        this.parsed += head.len + body.wire?;
        Some(Request { head, body: body.bytes, number, connection })
    }
}
