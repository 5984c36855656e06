//! Where two readers could see two messages, the sidecar sees none: the request is refused with 400, the connection is
//! closed, nothing is sent upstream, and what was smuggled behind it is not read as a request.
//!
//! As seen from outside: RFC 9112 § 2.2, § 3.2, § 5, § 6.1 to § 6.3, § 7.1, § 11.2. Further: bodies and
//! heads that come too slowly, and uploads that are too large.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    io::{Read, Write},
    net::TcpStream,
    thread,
    time::Duration,
};

use support::{
    Client, Post, Sidecar, Upstream,
    http::{Head, Response},
    mcp::{call, modern_call, result},
};

const BODY: &str = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;

/// A second request behind the first one, as an attacker would hide it.
const SMUGGLED: &str = "POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Smuggled: yes\r\nContent-Length: 40\r\n\r\n{\"jsonrpc\":\"2.0\",\"id\":2,\"method\":\"ping\"}";

/// A head with these further lines, and what follows it.
fn post(lines: &str, rest: &str) -> String {
    format!("POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{lines}\r\n{rest}")
}

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

struct Framing {
    upstream: Upstream,
    sidecar: Sidecar,
}

impl Framing {
    fn new() -> Self {
        let upstream = Upstream::json(result(1));
        Self { sidecar: Sidecar::before(&upstream), upstream }
    }

    /// One answer of status 400, then the end, and nothing upstream.
    #[track_caller]
    fn refuse(&self, what: &str, bytes: &str) {
        let client = self.sidecar.client();
        client.write(bytes);
        client.closed();
        let told = String::from_utf8_lossy(&client.bytes()).into_owned();
        assert!(told.starts_with("HTTP/1.1 400 "), "{what}: {told}");
        assert_eq!(told.matches("HTTP/1.1 ").count(), 1, "{what}: one answer: {told}");
        assert_eq!(self.upstream.count(), 0, "{what}: nothing is sent");
        assert!(self.upstream.connections().iter().all(|c| c.bytes.is_empty()), "{what}: not a byte is sent");
    }
}

#[test]
fn a_length_that_is_not_one_number_is_refused() {
    let framing = Framing::new();
    let n = BODY.len();
    for (what, lines) in [
        ("two unlike", format!("Content-Length: {n}\r\nContent-Length: {}\r\n", n + 1)),
        ("two alike", format!("Content-Length: {n}\r\nContent-Length: {n}\r\n")),
        ("a list of unlike", format!("Content-Length: {n}, {}\r\n", n + 1)),
        ("a list of alike", format!("Content-Length: {n}, {n}\r\n")),
        ("a sign", format!("Content-Length: +{n}\r\n")),
        ("a negative one", "Content-Length: -1\r\n".to_owned()),
        ("hexadecimal", format!("Content-Length: 0x{n:x}\r\n")),
        ("a fraction", format!("Content-Length: {n}.0\r\n")),
        ("a word", "Content-Length: all\r\n".to_owned()),
        ("an empty one", "Content-Length: \r\n".to_owned()),
        ("beyond 64 bits", "Content-Length: 18446744073709551657\r\n".to_owned()),
    ] {
        framing.refuse(what, &post(&lines, &format!("{BODY}{SMUGGLED}")));
    }
}

#[test]
fn a_length_beside_a_transfer_coding_is_refused() {
    let framing = Framing::new();
    let n = BODY.len();
    let chunked = format!("{}0\r\n\r\n", chunk(BODY));
    for (what, lines, body) in [
        ("CL.TE", format!("Content-Length: {n}\r\nTransfer-Encoding: chunked\r\n"), &chunked),
        ("TE.CL", format!("Transfer-Encoding: chunked\r\nContent-Length: {n}\r\n"), &chunked),
        (
            "CL.TE, the length right",
            format!("Content-Length: {}\r\nTransfer-Encoding: chunked\r\n", chunked.len()),
            &chunked,
        ),
        ("CL.TE, no length", "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n".to_owned(), &chunked),
        ("other spellings", format!("content-LENGTH:{n}\r\ntransfer-ENCODING:\tChunked\r\n"), &chunked),
        (
            "fields between",
            format!("Transfer-Encoding: chunked\r\nX-A: b\r\nX-C: d\r\nContent-Length: {n}\r\n"),
            &chunked,
        ),
    ] {
        framing.refuse(what, &post(&lines, &format!("{body}{SMUGGLED}")));
    }
}

/// Also behind requests that were good, whichever way those were framed.
#[test]
fn a_length_beside_a_transfer_coding_is_refused_on_a_connection_in_use() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let n = BODY.len();
    let chunked = format!("{}0\r\n\r\n", chunk(BODY));
    let trailers = format!("{}0\r\nX-Content-Length: 1\r\nContent-Length: 3\r\n\r\n", chunk(BODY));
    let extended = format!("{n:x};a=b\r\n{BODY}\r\n0;c\r\n\r\n");
    // A body may say what it likes.
    let quoting =
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","x":{:?}}}"#, post("Content-Length: 1\r\n", ""));
    let good = [
        post(&format!("Content-Length: {n}\r\n"), BODY),
        post("Transfer-Encoding: chunked\r\n", &chunked),
        post("Transfer-Encoding: chunked\r\n", &trailers),
        post("Transfer-Encoding: chunked\r\n", &extended),
        post(&format!("Content-Length: {}\r\n", quoting.len()), &quoting),
        post("Transfer-Encoding: chunked\r\n", &format!("{}0\r\n\r\n", chunk(&quoting))),
        "DELETE /mcp HTTP/1.1\r\nHost: localhost\r\n\r\n".to_owned(),
    ];
    let bad = post(&format!("Transfer-Encoding: chunked\r\nContent-Length: {n}\r\n"), &chunked);
    let repeated = post(&format!("Content-Length: {n}\r\nContent-Length: {n}\r\n"), BODY);
    for (number, good) in good.iter().enumerate() {
        for bad in [&bad, &repeated] {
            for pipelined in [false, true] {
                let before = upstream.count();
                let client = sidecar.client();
                if pipelined {
                    client.write(format!("{good}{bad}{SMUGGLED}"));
                    assert_eq!(client.response().status(), 200, "{number}");
                } else {
                    // Byte by byte, so that no boundary helps.
                    good.as_bytes().chunks(1).for_each(|byte| client.write(byte));
                    assert_eq!(client.response().status(), 200, "{number}");
                    client.write(format!("{bad}{SMUGGLED}"));
                }
                let refused = client.response();
                assert_eq!(refused.status(), 400, "{number}, pipelined {pipelined}: {}", refused.text());
                client.closed();
                assert_eq!(upstream.count(), before + 1, "{number}, pipelined {pipelined}");
            }
        }
    }
    assert!(upstream.connections().iter().all(|c| !String::from_utf8_lossy(&c.bytes).contains("X-Smuggled")));
}

#[test]
fn a_transfer_coding_that_is_not_chunked_is_refused() {
    let framing = Framing::new();
    let chunked = format!("{}0\r\n\r\n", chunk(BODY));
    for value in [
        "chunked, gzip",
        "gzip",
        "identity",
        "xchunked",
        "chunkedx",
        "\"chunked\"",
        "chunked;a=b",
        "chunked,",
        "",
    ] {
        framing.refuse(
            value,
            &post(&format!("Transfer-Encoding: {value}\r\n"), &format!("{chunked}{SMUGGLED}")),
        );
    }
    let two = "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n";
    framing.refuse("two lines", &post(two, &format!("{chunked}{SMUGGLED}")));
    let old = post("Transfer-Encoding: chunked\r\n", &chunked).replacen("HTTP/1.1", "HTTP/1.0", 1);
    framing.refuse("in HTTP/1.0", &format!("{old}{SMUGGLED}"));
}

#[test]
fn a_field_line_that_two_readers_could_read_unlike_is_refused() {
    let framing = Framing::new();
    let n = BODY.len();
    for (what, line) in [
        ("a space before the colon", "X-A : b\r\n"),
        ("a tab before the colon", "X-A\t: b\r\n"),
        ("a folded line", "X-A: b\r\n c\r\n"),
        ("a folded length", "Content-Length:\r\n 3\r\n"),
        ("a line that begins with a space", " X-A: b\r\n"),
        ("a bare CR in a value", "X-A: b\rX-C: d\r\n"),
        ("a bare CR in a name", "X\rA: b\r\n"),
        ("a NUL in a value", "X-A: b\0c\r\n"),
        ("a NUL in a name", "X\0A: b\r\n"),
        ("no colon", "X-A\r\n"),
        ("no name", ": b\r\n"),
        ("a bad name", "X@A: b\r\n"),
        ("a space in a name", "X A: b\r\n"),
        ("a name beyond ASCII", "X-\u{e9}: b\r\n"),
        ("a control in a value", "X-A: b\u{7f}\r\n"),
    ] {
        framing.refuse(what, &post(&format!("{line}Content-Length: {n}\r\n"), &format!("{BODY}{SMUGGLED}")));
    }
}

#[test]
fn a_request_line_that_is_none_is_refused() {
    let framing = Framing::new();
    for line in [
        "POST /mcp",
        "POST  /mcp HTTP/1.1",
        "POST /mcp HTTP/1.2",
        "POST /mcp HTTP/3.0",
        "POST /mcp http/1.1",
        "POST /m cp HTTP/1.1",
        "P@ST /mcp HTTP/1.1",
        "POST /mcp\u{1} HTTP/1.1",
        "POST /mcp#part HTTP/1.1",
        " POST /mcp HTTP/1.1",
        "POST\t/mcp\tHTTP/1.1",
        "POST /mcp HTTP/1.1 x",
    ] {
        let head = format!(
            "{line}\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            BODY.len()
        );
        framing.refuse(line, &format!("{head}{BODY}{SMUGGLED}"));
    }
}

#[test]
fn a_target_that_names_a_host_and_no_path_is_for_connect_alone() {
    let framing = Framing::new();
    for target in ["mcp", "localhost", "localhost:80", "*"] {
        let response = framing.sidecar.client().ask(&call(1).at(target));
        assert!([400, 404].contains(&response.status()), "{target}: {}", response.text());
        assert_eq!(response.json()["error"]["code"], if target == "*" { 1404 } else { -32600 }, "{target}");
    }
    assert_eq!(framing.upstream.count(), 0);
}

#[test]
fn chunks_that_are_not_what_they_say_are_refused() {
    let framing = Framing::new();
    let n = BODY.len();
    for (what, body) in [
        ("no number", format!("zz\r\n{BODY}\r\n0\r\n\r\n")),
        ("an empty size", format!("\r\n{BODY}\r\n0\r\n\r\n")),
        ("a negative size", format!("-{n:x}\r\n{BODY}\r\n0\r\n\r\n")),
        ("a signed size", format!("+{n:x}\r\n{BODY}\r\n0\r\n\r\n")),
        ("a prefixed size", format!("0x{n:x}\r\n{BODY}\r\n0\r\n\r\n")),
        ("a size beyond 64 bits", format!("10000000000000028\r\n{BODY}\r\n0\r\n\r\n")),
        ("a chunk longer than its size", format!("{:x}\r\n{BODY}\r\n0\r\n\r\n", n - 1)),
        ("a size ended by LF", format!("{n:x}\n{BODY}\r\n0\r\n\r\n")),
        ("a chunk ended by LF", format!("{n:x}\r\n{BODY}\n0\r\n\r\n")),
        ("an extension ended by LF", format!("{n:x};a\n{BODY}\r\n0\r\n\r\n")),
        ("a space in the size", format!("2 8\r\n{BODY}\r\n0\r\n\r\n")),
        ("a CR alone", format!("{n:x}\r{BODY}\r\n0\r\n\r\n")),
    ] {
        framing.refuse(what, &post("Transfer-Encoding: chunked\r\n", &format!("{body}{SMUGGLED}")));
    }
}

#[test]
fn what_goes_upstream_has_exactly_one_framing_and_neither_trailers_nor_extensions() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let half = BODY.len() / 2;
    let body = format!(
        "{:x};name=value\r\n{}\r\n{:X}\r\n{}\r\n0\r\nX-Trailer: t\r\nMcp-Method: tools/call\r\n\r\n",
        half,
        &BODY[..half],
        BODY.len() - half,
        &BODY[half..]
    );
    let client = sidecar.client();
    client.write(post("TE: trailers\r\nTrailer: X-Trailer\r\nTransfer-Encoding: chunked\r\n", &body));
    assert_eq!(client.response().status(), 200);
    let request = upstream.wait_request(0);
    assert_eq!(request.body, BODY.as_bytes());
    let framing = [request.head.all("content-length"), request.head.all("transfer-encoding")].concat();
    assert_eq!(framing, [BODY.len().to_string()]);
    for name in ["te", "trailer", "x-trailer", "mcp-method"] {
        assert_eq!(request.head.field(name), None, "{name}");
    }
    let seen = String::from_utf8(upstream.connections()[0].bytes.clone()).unwrap();
    assert!(!seen.contains("name=value") && !seen.contains("X-Trailer"), "{seen}");
}

#[test]
fn an_absolute_target_chooses_no_upstream() {
    let (upstream, other) = (Upstream::json(result(1)), Upstream::json(result(1)));
    let sidecar = Sidecar::before(&upstream);
    for target in [format!("http://{}/mcp", other.address), "http://evil.example/mcp?x=1".to_owned()] {
        assert_eq!(sidecar.client().ask(&call(1).at(&target)).status(), 200, "{target}");
    }
    let request = upstream.wait_request(1);
    assert_eq!(request.head.line, "POST /mcp?x=1 HTTP/1.1");
    assert_eq!(request.head.all("host"), [upstream.address.as_str()]);
    let elsewhere = format!("http://{}/other", other.address);
    assert_eq!(sidecar.client().ask(&call(1).at(&elsewhere)).status(), 404);
    assert_eq!((upstream.count(), other.count()), (2, 0));
}

#[test]
fn hop_by_hop_fields_end_here_and_all_others_pass_in_order() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let post = modern_call(1)
        .field("Connection", "X-Hop, keep-alive")
        .field("X-Hop", "1")
        .field("Keep-Alive", "timeout=5")
        .field("Proxy-Connection", "keep-alive")
        .field("Proxy-Authorization", "Basic eDp5")
        .field("TE", "trailers")
        .field("Upgrade", "h2c")
        .field("Mcp_Method", "tools/other")
        .field("X-End", "1")
        .more("X-End", "2")
        .field("Mcp-Param-Region", "")
        .field("DPoP", "proof");
    assert_eq!(sidecar.client().ask(&post).status(), 200);
    let head = upstream.wait_request(0).head;
    for name in ["x-hop", "keep-alive", "proxy-connection", "proxy-authorization", "te", "upgrade"] {
        assert_eq!(head.field(name), None, "{name}");
    }
    assert_eq!(head.all("x-end"), ["1", "2"]);
    assert_eq!(
        (head.field("mcp_method"), head.field("mcp-method")),
        (Some("tools/other"), Some("tools/call"))
    );
    assert_eq!((head.field("mcp-param-region"), head.field("dpop")), (Some(""), Some("proof")));
    assert_eq!(head.all("host"), [upstream.address.as_str()]);
}

fn limited(limits: &str) -> (Upstream, Sidecar) {
    let upstream = Upstream::json(result(1));
    let config = format!("[limits]\n{limits}\n[upstreams.mcp]\nurl = \"{}\"\n", upstream.url());
    (upstream, Sidecar::with_config(&config))
}

#[test]
fn a_client_that_sends_its_head_slowly_is_closed() {
    let (upstream, sidecar) = limited("header_timeout = \"300ms\"");
    for begun in ["", "PO", "POST /mcp HTTP/1.1\r\nHost: localhost\r\nX-Slow: "] {
        let client = sidecar.client();
        client.write(begun);
        client.closed();
        let told = client.bytes();
        assert!(told.is_empty() || told.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&told));
    }
    // A byte now and then is no way around it.
    let mut stream = TcpStream::connect(&sidecar.listen).unwrap();
    let dripping = thread::spawn(move || {
        let head = b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nX: ".iter().chain(std::iter::repeat(&b'x'));
        for byte in head.take(400) {
            if stream.write_all(&[*byte]).is_err() {
                return true;
            }
            thread::sleep(Duration::from_millis(50));
        }
        false
    });
    assert!(dripping.join().unwrap(), "it is closed although it sends");
    // Nor is a good head on a kept connection: the next one is bounded too.
    let client = sidecar.client();
    client.ask(&call(1));
    client.write("POST /mcp HT");
    client.closed();
    assert_eq!(upstream.count(), 1);
}

#[test]
fn a_body_that_comes_slowly_gets_408_and_the_connection_is_closed() {
    let (upstream, sidecar) = limited("body_timeout = \"300ms\"");
    for lines in ["Content-Length: 40\r\n", "Transfer-Encoding: chunked\r\n"] {
        let client = sidecar.client();
        client.write(post(lines, ""));
        let response = client.response();
        assert_eq!(response.status(), 408);
        assert_eq!(response.json()["error"]["code"], 1408, "{}", response.text());
        assert_eq!(response.head.field("connection"), Some("close"));
        client.closed();
    }
    // A byte now and then is no way around it.
    let mut stream = TcpStream::connect(&sidecar.listen).unwrap();
    stream.write_all(post("Content-Length: 4000\r\n", "").as_bytes()).unwrap();
    let mut reader = stream.try_clone().unwrap();
    let dripping = thread::spawn(move || {
        while stream.write_all(b" ").is_ok() {
            thread::sleep(Duration::from_millis(50));
        }
    });
    let mut told = Vec::new();
    let _ = reader.read_to_end(&mut told);
    assert!(told.starts_with(b"HTTP/1.1 408 "), "{}", String::from_utf8_lossy(&told));
    drop(reader);
    dripping.join().unwrap();
    assert_eq!(upstream.count(), 0);
    for line in sidecar.wait_lines(3) {
        assert_eq!((&line["status"], &line["outcome"]), (&408.into(), &"refused".into()), "{line}");
    }
}

#[test]
fn bodies_up_to_the_limit_pass_and_one_byte_more_is_413() {
    let (upstream, sidecar) = limited("request_body = \"4KiB\"");
    let of_size = |size: usize| {
        let empty =
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","arguments":{"x":""}}}"#;
        empty.replacen("\"x\":\"\"", &format!("\"x\":\"{}\"", "y".repeat(size - empty.len())), 1)
    };
    let chunked = |body: &str| {
        Post::legacy(format!("{}{}0\r\n\r\n", chunk(&body[..100]), chunk(&body[100..])))
            .field("Transfer-Encoding", "chunked")
    };
    for post in [Post::legacy(of_size(4096)), chunked(&of_size(4096))] {
        assert_eq!(sidecar.client().ask(&post).status(), 200);
    }
    assert_eq!(upstream.wait_request(1).body, of_size(4096).as_bytes());
    for post in [Post::legacy(of_size(4097)), chunked(&of_size(4097))] {
        let response = sidecar.client().ask(&post);
        assert_eq!((response.status(), &response.json()["error"]["code"]), (413, &1413.into()));
    }
    assert_eq!(upstream.count(), 2);
    sidecar.wait_line(|line| line["status"] == 413 && line["outcome"] == "refused");
}

/// The default of 4 MiB, measured against what the node sent: what the sidecar itself adds never refuses a call.
#[test]
fn the_limit_is_four_mebibytes_and_counts_what_the_node_sent() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let size = 4 << 20;
    let empty =
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","arguments":{"x":""}}}"#;
    let of_size = |size: usize| {
        empty.replacen("\"x\":\"\"", &format!("\"x\":\"{}\"", "y".repeat(size - empty.len())), 1)
    };
    // `traceparent` is added where the node's header has it.
    let traced =
        |post: Post| post.field("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    for (number, bytes) in [150_000, (2 << 20) + 1, size].into_iter().enumerate() {
        assert_eq!(sidecar.client().ask(&traced(Post::legacy(of_size(bytes)))).status(), 200, "{bytes}");
        let added = upstream.wait_request(number).body.len() - bytes;
        assert!((1..256).contains(&added), "{added} bytes are added");
    }
    assert_eq!(sidecar.client().ask(&traced(Post::legacy(of_size(size + 1)))).status(), 413);
    let line = sidecar.wait_line(|line| line["bytes_in"] == size);
    assert_eq!(line["status"], 200);
}

/// What the sidecar adds may push a body over the upstream's limit: then the node reads the upstream's own words.
#[test]
fn a_413_of_the_upstream_passes_unchanged() {
    let upstream = Upstream::start(|_, reply| {
        reply.json(413, &[("X-Limit", "4096")], r#"{"error":"too large for me"}"#);
    });
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&call(1));
    assert_eq!((response.status(), response.text().as_str()), (413, r#"{"error":"too large for me"}"#));
    assert_eq!(response.head.field("x-limit"), Some("4096"));
    let line = sidecar.wait_line(|line| line["status"] == 413);
    assert_eq!((&line["upstream_status"], &line["outcome"]), (&413.into(), &"rpc_error".into()));
    assert_eq!(line["bytes_in"], call(1).body.len());
}

#[test]
fn a_node_can_read_that_its_upload_is_too_large_while_it_still_sends_it() {
    let (upstream, sidecar) = limited("request_body = \"64KiB\"");
    for (what, lines, size) in [
        ("declared", "Content-Length: 8388608\r\n", 8 << 20),
        ("chunked", "Transfer-Encoding: chunked\r\n", 8 << 20),
        // More than is drained: whatever comes of the rest, the answer was there to be read.
        ("without end", "Transfer-Encoding: chunked\r\n", usize::MAX),
    ] {
        let mut stream = TcpStream::connect(&sidecar.listen).unwrap();
        stream.write_all(post(lines, "").as_bytes()).unwrap();
        let mut reader = stream.try_clone().unwrap();
        let reading = thread::spawn(move || {
            let (mut told, mut piece) = (Vec::new(), [0; 4096]);
            while let Ok(n @ 1..) = reader.read(&mut piece) {
                told.extend_from_slice(&piece[..n]);
            }
            told
        });
        let chunked = lines.starts_with("Transfer");
        let piece = "x".repeat(64 << 10);
        let piece = if chunked { chunk(&piece) } else { piece };
        let mut sent = 0;
        while sent < size && stream.write_all(piece.as_bytes()).is_ok() {
            sent += 64 << 10;
        }
        if chunked {
            let _ = stream.write_all(b"0\r\n\r\n");
        }
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let told = reading.join().unwrap();
        let head = Head::read(&told).unwrap_or_else(|| panic!("{what}: no answer after {sent} bytes"));
        assert_eq!(head.status(), 413, "{what}");
        let response = Response { body: told[head.len..].to_vec(), head };
        assert_eq!(response.json()["error"]["code"], 1413, "{what}");
    }
    assert_eq!(upstream.count(), 0);
}

#[test]
fn a_node_that_leaves_amid_its_body_is_a_disconnect_and_nothing_is_sent() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let client: Client = sidecar.client();
    client.write(post("Content-Length: 40\r\n", "{\"jsonrpc\""));
    client.close();
    let line = sidecar.wait_line(|_| true);
    assert_eq!(
        (&line["outcome"], &line["cancelled_by"]),
        (&"cancelled".into(), &"disconnect".into()),
        "{line}"
    );
    assert_eq!((line.get("status"), line.get("error")), (None, None), "nobody was told anything: {line}");
    assert_eq!(upstream.count(), 0);
}
