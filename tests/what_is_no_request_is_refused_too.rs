//! Bytes on an HTTP/1.1 connection that are no request, because they can't be read as one, are too many, or do not come:
//! they are refused as requests are, with a JSON-RPC error and one line in the log; the answer is the connection's last,
//! and stands behind those to what came before.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    os::unix::net::UnixStream,
    process::Command,
};

use serde_json::Value;
use support::{
    BOUND, Client, Gate, Sidecar, Upstream,
    http::{Body, Head, Response},
    mcp::{call, progress, result},
    tls::Authority,
    until,
};
use tempfile::TempDir;

/// A head with these lines in it.
fn head(lines: &str) -> String {
    format!("POST /mcp HTTP/1.1\r\nHost: localhost\r\n{lines}\r\nContent-Length: 2\r\n\r\n{{}}")
}

/// What can't be read as a request, each for another reason.
fn malformed() -> Vec<(&'static str, Vec<u8>)> {
    let line = |line: &str| format!("{line}\r\nHost: localhost\r\n\r\n").into_bytes();
    let field = |field: &str| head(field).into_bytes();
    vec![
        ("a bad method", line("G@T /mcp HTTP/1.1")),
        ("no method", line(" /mcp HTTP/1.1")),
        ("no target", line("GET HTTP/1.1")),
        ("no version", line("GET /mcp")),
        ("a later version", line("GET /mcp HTTP/1.2")),
        ("a version of two", line("GET /mcp HTTP/2.0")),
        ("another protocol", line("GET /mcp ICY/1.1")),
        ("a space in the target", line("GET /a b HTTP/1.1")),
        ("a control character in the target", line("GET /a\u{1} HTTP/1.1")),
        ("a target that is none", line("GET http:// HTTP/1.1")),
        ("a fragment in the target", line("GET /mcp#a HTTP/1.1")),
        ("a bad name", field("X@: 1")),
        ("an empty name", field(": 1")),
        ("a space before the colon", field("X : 1")),
        ("no colon", field("nothing")),
        ("a NUL in a value", field("X: \0")),
        ("a bare CR", field("X: 1\r2")),
        ("a folded line", field("X: 1\r\n 2")),
        ("a space before the first name", field(" X: 1")),
        ("two lengths", field("Content-Length: 2")),
        ("a length beside a coding", field("Transfer-Encoding: chunked")),
        ("an unknown coding", field("Transfer-Encoding: xchunked\r\nX: 1")),
        ("a TLS handshake", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n".to_vec()),
        ("the beginning of HTTP/2, but for its last line", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n".to_vec()),
    ]
}

/// What is more than is read of a head.
fn too_large() -> Vec<(&'static str, Vec<u8>)> {
    let target = format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "x".repeat(70 << 10));
    vec![
        ("one field", head(&format!("X: {}", "x".repeat(1 << 20))).into_bytes()),
        ("small fields, and not too many bytes", head(&"X: 1\r\n".repeat(200)).into_bytes()),
        ("many small fields", head(&"X-Field: 1\r\n".repeat(100_000)).into_bytes()),
        ("a target", target.into_bytes()),
        ("a method", vec![b'X'; 100 << 10]),
        ("a name", head(&format!("{}: 1", "x".repeat(100 << 10))).into_bytes()),
    ]
}

/// All of these, with their status.
fn bad() -> impl Iterator<Item = (&'static str, Vec<u8>, u16)> {
    let malformed = malformed().into_iter().map(|(what, bytes)| (what, bytes, 400));
    malformed.chain(too_large().into_iter().map(|(what, bytes)| (what, bytes, 431)))
}

/// A sidecar before an upstream that must not be asked anything but good calls.
struct Refusing {
    upstream: Upstream,
    sidecar: Sidecar,
}

impl Refusing {
    fn new() -> Self {
        let upstream = Upstream::json(result(1));
        Self { sidecar: Sidecar::before(&upstream), upstream }
    }

    fn with_config(config: &str) -> Self {
        let upstream = Upstream::json(result(1));
        let config = format!("{config}\n[upstreams.mcp]\nurl = \"{}\"\n", upstream.url());
        Self { sidecar: Sidecar::with_config(&config), upstream }
    }

    fn over_tls(authority: &Authority, folder: &TempDir) -> Self {
        authority.issue().write(folder.path(), "server");
        let file = |name| folder.path().join(name).display().to_string();
        let (cert, key) = (file("server.pem"), file("server.key"));
        Self::with_config(&format!("[tls]\ncert = \"{cert}\"\nkey = \"{key}\""))
    }

    fn connect_tls(&self, authority: &Authority) -> rustls::StreamOwned<rustls::ClientConnection, TcpStream> {
        let name = "localhost".try_into().unwrap();
        let tls = rustls::ClientConnection::new(authority.client(&["http/1.1"]), name).unwrap();
        rustls::StreamOwned::new(tls, connect(&self.sidecar.listen))
    }

    /// These bytes, after whatever was answered before, are answered with a refusal, which is logged.
    #[track_caller]
    fn check(&self, what: &str, told: &[u8], status: u16) {
        let Some(head) = Head::read(told) else { panic!("{what}: {}", String::from_utf8_lossy(told)) };
        let body = Body::read(&head, &told[head.len..], true);
        assert_eq!(body.wire, Some(told.len() - head.len), "{what}: nothing follows");
        let response = Response { head, body: body.bytes };
        check_refusal(what, &response, status);
        let request = response.head.field("x-request-id").unwrap().to_owned();
        let line = self.sidecar.wait_line(|line| line["request"] == *request);
        assert_line(what, &line, &response);
    }
}

#[track_caller]
fn check_refusal(what: &str, response: &Response, status: u16) {
    assert_eq!(response.status(), status, "{what}: {}", response.text());
    let field = |name| response.head.field(name);
    assert_eq!(field("connection"), Some("close"), "{what}");
    assert_eq!(field("content-type"), Some("application/json"), "{what}");
    assert!(field("date").is_some_and(|date| date.ends_with(" GMT")), "{what}");
    assert!(field("x-request-id").is_some_and(|id| id.len() == 32), "{what}");
    let json = response.json();
    assert_eq!(json["jsonrpc"], "2.0", "{what}");
    assert!(json.get("id").is_none(), "{what}");
    assert_eq!(json["error"]["code"], 1000 + i64::from(status), "{what}: {json}");
    let message = json["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("the request head "), "{what}: {message}");
}

/// Who asked, how it ended, and nothing of what could not be read.
#[track_caller]
fn assert_line(what: &str, line: &Value, response: &Response) {
    let mut names: Vec<&String> = line.as_object().unwrap().keys().collect();
    names.sort();
    let expected =
        ["bytes_out", "duration_ms", "error", "http", "outcome", "peer", "request", "status", "ts"];
    assert_eq!(names, expected, "{what}: {line}");
    assert_eq!(line["outcome"], "refused", "{what}");
    assert_eq!(line["status"], response.status(), "{what}");
    assert_eq!(line["http"], "1.1", "{what}");
    assert_eq!(line["bytes_out"], response.body.len(), "{what}");
    assert_eq!(line["error"], response.json()["error"]["message"], "{what}");
}

/// A client may be refused before it has written all.
fn write_some(mut to: impl Write, bytes: &[u8]) {
    let _ = to.write_all(bytes);
    let _ = to.flush();
}

/// All that comes until the end, however that comes.
fn read_all(mut from: impl Read) -> Vec<u8> {
    let mut all = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut piece) {
        all.extend_from_slice(&piece[..n]);
    }
    all
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream
}

/// What is told to these bytes on a connection of their own.
fn tell(address: &str, bytes: &[u8]) -> Vec<u8> {
    let stream = connect(address);
    write_some(&stream, bytes);
    read_all(&stream)
}

#[test]
fn a_head_that_cannot_be_read_is_refused_with_400() {
    let refusing = Refusing::new();
    let cases = malformed();
    for (what, bytes) in &cases {
        refusing.check(what, &tell(&refusing.sidecar.listen, bytes), 400);
    }
    assert_eq!(refusing.sidecar.lines().len(), cases.len());
    assert!(refusing.upstream.connections().is_empty());
}

#[test]
fn a_head_of_more_than_is_read_is_refused_with_431() {
    let refusing = Refusing::new();
    let cases = too_large();
    for (what, bytes) in &cases {
        refusing.check(what, &tell(&refusing.sidecar.listen, bytes), 431);
    }
    assert_eq!(refusing.sidecar.lines().len(), cases.len());
    assert!(refusing.upstream.connections().is_empty());
    let metrics = refusing.sidecar.admin("GET", "/metrics").text();
    let counted = format!(r#"mcp_sidecar_exchanges_total{{upstream="",outcome="refused"}} {}"#, cases.len());
    assert!(metrics.lines().any(|line| line == counted), "{metrics}");
    assert!(metrics.lines().any(|line| line == "mcp_sidecar_exchanges_in_flight 0"), "{metrics}");
}

#[test]
fn on_a_connection_in_use_the_answers_before_it_are_whole() {
    let refusing = Refusing::new();
    let good = call(1).bytes("localhost");
    for at_once in [false, true] {
        for (what, bytes, status) in bad() {
            let stream = connect(&refusing.sidecar.listen);
            let first = if at_once {
                write_some(&stream, &[&good[..], &bytes].concat());
                read_all(&stream)
            } else {
                write_some(&stream, &good);
                let mut first = Vec::new();
                let mut byte = [0];
                while !first.ends_with(result(1).as_bytes()) {
                    (&stream).read_exact(&mut byte).unwrap();
                    first.extend(byte);
                }
                write_some(&stream, &bytes);
                first.extend(read_all(&stream));
                first
            };
            let head = Head::read(&first).unwrap();
            assert_eq!(head.status(), 200, "{what}");
            let end = head.len + Body::read(&head, &first[head.len..], true).wire.unwrap();
            assert_eq!(first[head.len..end], *result(1).as_bytes(), "{what}");
            refusing.check(what, &first[end..], status);
        }
    }
}

#[test]
fn behind_a_stream_it_waits_for_the_stream_s_end() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        reply.event(&progress(1, 1));
        pass.pass();
        reply.event(&result(1));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let bad = [malformed().remove(0).1, too_large().remove(1).1];
    for (bad, status) in bad.iter().zip([400, 431]) {
        let client = sidecar.client();
        client.write([&call(1).bytes("localhost")[..], bad].concat());
        client.events(1);
        gate.open();
        let stream = client.response();
        assert_eq!(stream.status(), 200);
        assert!(stream.text().ends_with(&format!("{}\n\n", result(1))), "{}", stream.text());
        check_refusal("behind a stream", &client.response(), status);
        client.closed();
    }
    assert_eq!(upstream.count(), 2);
    let lines = sidecar.wait_lines(4);
    assert_eq!(lines.iter().filter(|line| line["outcome"] == "refused").count(), 2);
}

/// A node that leaves amid its stream has asked nothing else.
#[test]
fn behind_a_stream_that_its_node_leaves_there_is_no_line() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.event(&progress(1, 1));
        reply.hang();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.write([&call(1).bytes("localhost")[..], b"G@T / HTTP/1.1\r\n\r\n"].concat());
    client.events(1);
    client.close();
    sidecar.wait_line(|line| line["outcome"] == "cancelled");
    assert_eq!(sidecar.client().ask(&call(2).at("/nowhere")).status(), 404);
    assert_eq!(sidecar.wait_lines(2).len(), 2);
}

#[test]
fn over_tls_and_on_a_unix_socket_it_is_the_same() {
    let (authority, folder) = (Authority::new(), TempDir::new().unwrap());
    let refusing = Refusing::over_tls(&authority, &folder);
    let bad = [(400, malformed().remove(0)), (431, too_large().remove(0)), (431, too_large().remove(1))];
    for (status, (what, bytes)) in &bad {
        let mut stream = refusing.connect_tls(&authority);
        write_some(&mut stream, bytes);
        refusing.check(what, &read_all(&mut stream), *status);
    }
    assert!(refusing.upstream.connections().is_empty());

    let socket = folder.path().join("listen.sock");
    let upstream = Upstream::json(result(1));
    let mut command = Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
    command.args(["serve", "--admin", "", "--state", "memory:", "--upstream", &upstream.url()]);
    command.arg("--listen").arg(format!("unix:{}", socket.display()));
    let refusing = Refusing { sidecar: Sidecar::spawn(command, folder), upstream };
    for (status, (what, bytes)) in &bad {
        let stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        write_some(&stream, bytes);
        refusing.check(what, &read_all(&stream), *status);
    }
    assert!(refusing.sidecar.lines().iter().all(|line| line["peer"] == "unix"));
}

/// hyper shuts no connection down that was once asked for an upgrade, which Java's client does unless told otherwise.
#[test]
fn a_tls_connection_says_that_it_ends() {
    let (authority, folder) = (Authority::new(), TempDir::new().unwrap());
    let refusing = Refusing::over_tls(&authority, &folder);
    let good = call(1).field("Connection", "close");
    let upgrade = call(1).field("Connection", "Upgrade, close").field("Upgrade", "h2c");
    for (status, bytes) in [
        ("200", good.bytes("localhost")),
        ("200", upgrade.bytes("localhost")),
        ("400", b"G@T / HTTP/1.1\r\n\r\n".to_vec()),
    ] {
        let mut stream = refusing.connect_tls(&authority);
        stream.write_all(&bytes).unwrap();
        let mut told = String::new();
        // An error if there is no end but that of the connection below.
        stream.read_to_string(&mut told).unwrap();
        assert!(told.starts_with(&format!("HTTP/1.1 {status} ")), "{told}");
    }
}

#[test]
fn a_head_that_does_not_come_whole_is_refused_with_408() {
    let refusing = Refusing::with_config("[limits]\nheader_timeout = \"200ms\"");
    let slow = b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nX-Secret: 1234";
    refusing.check("the first head", &tell(&refusing.sidecar.listen, slow), 408);
    // What HTTP/2 begins with too.
    for beginning in [&b"P"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n"] {
        refusing.check("a beginning", &tell(&refusing.sidecar.listen, beginning), 408);
    }
    let client = refusing.sidecar.client();
    assert_eq!(client.ask(&call(1)).status(), 200);
    client.write(slow);
    check_refusal("a later head", &client.response(), 408);
    client.closed();
    assert_eq!(refusing.sidecar.wait_lines(5).len(), 5);
}

/// Nobody has asked anything.
#[test]
fn a_connection_without_a_head_ends_in_silence() {
    let refusing = Refusing::with_config("[limits]\nheader_timeout = \"200ms\"");
    for beginning in [&b""[..], b"\r\n\r\n"] {
        assert_eq!(String::from_utf8_lossy(&tell(&refusing.sidecar.listen, beginning)), "");
    }
    // A node that leaves amid its head has no use for an answer.
    let stream = connect(&refusing.sidecar.listen);
    write_some(&stream, b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nX-");
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(String::from_utf8_lossy(&read_all(&stream)), "");
    refusing.check("a bad one", &tell(&refusing.sidecar.listen, b"G@T / HTTP/1.1\r\n\r\n"), 400);
    assert_eq!(refusing.sidecar.lines().len(), 1);
}

/// The answer must not be lost to a reset because bytes of a body were still to come.
#[test]
fn a_client_that_goes_on_sending_can_read_why_it_was_refused() {
    let refusing = Refusing::new();
    let stream = connect(&refusing.sidecar.listen);
    write_some(&stream, b"G@T / HTTP/1.1\r\n\r\n");
    let mut first = [0; 12];
    (&stream).read_exact(&mut first).unwrap();
    assert_eq!(first, *b"HTTP/1.1 400");
    (&stream).write_all(b"what follows").unwrap();
    let rest = read_all(&stream);
    refusing.check("in between", &[&first[..], &rest].concat(), 400);
}

#[test]
fn the_admin_listener_says_it_in_words_and_writes_no_line() {
    let refusing = Refusing::new();
    for (status, bytes) in [(400, malformed().remove(0).1), (431, too_large().remove(0).1)] {
        let told = tell(&refusing.sidecar.admin, &bytes);
        let head = Head::read(&told).unwrap();
        assert_eq!(head.status(), status);
        assert_eq!(head.field("content-type"), Some("text/plain; charset=utf-8"));
        assert_eq!(head.field("connection"), Some("close"));
        let told = String::from_utf8(told[head.len..].to_vec()).unwrap();
        assert!(told.starts_with("the request head ") && told.ends_with('\n'), "{told}");
    }
    assert_eq!(refusing.sidecar.admin("GET", "/healthz").status(), 200);
    assert!(refusing.sidecar.lines().is_empty());
}

/// Each refused connection is gone after its answer, also where its client does not look.
#[test]
fn refused_connections_are_not_kept() {
    let refusing = Refusing::new();
    let clients: Vec<Client> = (0..20).map(|_| refusing.sidecar.client()).collect();
    for client in &clients {
        client.write("G@T / HTTP/1.1\r\n\r\n");
    }
    for client in &clients {
        client.closed();
    }
    until("no connection is open", || {
        let metrics = refusing.sidecar.admin("GET", "/metrics").text();
        metrics.lines().any(|line| line == "mcp_sidecar_connections 0")
    });
}
