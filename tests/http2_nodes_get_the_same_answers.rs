//! A node that speaks HTTP/2 on the plain listener (prior knowledge, RFC 9113 § 3.3) is served as one that speaks
//! HTTP/1.1: the same answers, the same refusals, the same lines in the log. What HTTP/2 itself calls malformed is never
//! forwarded (RFC 9113 § 8.1.1, § 8.2, § 8.3).
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::io::{Read, Write};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use support::{
    Post, Sidecar, Upstream,
    mcp::{LEGACY, call, modern_call, progress, result},
};

/// An answer over HTTP/2.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.body))
    }
}

/// Asks over one HTTP/2 connection, all at once; gives the answers in order.
fn ask(sidecar: &Sidecar, requests: Vec<(Request<()>, Bytes)>) -> Vec<Answer> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(&sidecar.listen).await.unwrap();
        let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let mut open = Vec::new();
        for (request, body) in requests {
            client = client.ready().await.unwrap();
            let (response, mut sending) = client.send_request(request, body.is_empty()).unwrap();
            if !body.is_empty() {
                sending.send_data(body, true).unwrap();
            }
            open.push(response);
        }
        let mut answers = Vec::new();
        for response in open {
            let (head, mut incoming) = response.await.unwrap().into_parts();
            let mut body = Vec::new();
            while let Some(data) = incoming.data().await {
                let data = data.unwrap();
                incoming.flow_control().release_capacity(data.len()).unwrap();
                body.extend_from_slice(&data);
            }
            answers.push(Answer { status: head.status, headers: head.headers, body: body.into() });
        }
        answers
    })
}

/// The same request as `post`, for HTTP/2.
fn request(sidecar: &Sidecar, post: &Post) -> (Request<()>, Bytes) {
    let host = post.fields.iter().find(|(name, _)| name.eq_ignore_ascii_case("host"));
    let authority = host.map_or(sidecar.listen.as_str(), |(_, value)| value);
    let mut request = Request::builder()
        .method(Method::from_bytes(post.method.as_bytes()).unwrap())
        .uri(format!("http://{authority}{}", post.path));
    for (name, value) in post.fields.iter().filter(|(name, _)| !name.eq_ignore_ascii_case("host")) {
        request = request.header(name, value);
    }
    (request.body(()).unwrap(), Bytes::from(post.body.clone()))
}

#[test]
fn every_answer_is_the_one_that_http1_gets() {
    let upstream = Upstream::start(|request, reply| match request.method() {
        "GET" => reply.json(405, &[("Allow", "POST")], "{}"),
        "DELETE" => reply.json(200, &[], ""),
        _ => reply.json(200, &[("X-End", "1"), ("Mcp-Session-Id", "sess-A")], &result(1)),
    });
    let sidecar = Sidecar::before(&upstream);
    let bad = |body: &str| Post::legacy(body);
    let posts = [
        call(1),
        modern_call(1),
        Post::get(),
        Post::delete(),
        bad("{"),
        bad("{}"),
        bad(r#"{"jsonrpc":"2.0","id":1,"id":1,"method":"ping"}"#),
        modern_call("\"x\"").without("Mcp-Method"),
        modern_call("\"x\"").field("Mcp-Name", "other"),
        call(1).at("/other"),
        call(1).field("Content-Type", "text/plain"),
        call(1).field("Origin", "http://evil.example"),
        call(1).field("Host", "evil.example"),
        call(1).field("Expect", "other"),
        call(1).more("Mcp-Session-Id", "again"),
        call(1).field("X-Large", &"x".repeat(48 << 10)),
    ];
    let answers = ask(&sidecar, posts.iter().map(|post| request(&sidecar, post)).collect());
    for (post, two) in posts.iter().zip(answers) {
        let one = sidecar.client().ask(post);
        let what = format!("{} {} {:?}", post.method, post.path, String::from_utf8_lossy(&post.body));
        assert_eq!((two.status.as_u16(), &two.body[..]), (one.status(), &one.body[..]), "{what}");
        for name in ["content-type", "x-end", "mcp-session-id", "allow", "cache-control"] {
            let two = two.headers.get(name).map(|value| value.to_str().unwrap());
            assert_eq!(two, one.head.field(name), "{what}: {name}");
        }
    }
    let lines = sidecar.wait_lines(2 * posts.len());
    for http in ["2", "1.1"] {
        assert_eq!(lines.iter().filter(|line| line["http"] == http).count(), posts.len(), "{http}");
    }
    for path in upstream.connections().iter().map(|c| String::from_utf8_lossy(&c.bytes).into_owned()) {
        assert!(!path.contains("HTTP/2") && !path.contains("\r\n:"), "{path}");
    }
}

/// Its size is counted as HTTP/2 does (RFC 9113 § 6.5.2): many small fields are large too.
#[test]
fn a_head_that_is_too_large_is_refused_as_any_other_request_and_the_others_of_its_connection_go_on() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let mut many = call(1);
    for n in 0..900 {
        many = many.field(&format!("X-{n}"), "1");
    }
    let large = |size: usize| Post::get().field("X-Large", &"x".repeat(size));
    let posts = [call(1), large(48 << 10), large(80 << 10), large(240 << 10), many, call(1)];
    let answers = ask(&sidecar, posts.iter().map(|post| request(&sidecar, post)).collect());
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.status.as_u16()).collect();
    assert_eq!(statuses, [200, 431, 431, 431, 431, 200]);
    for refused in &answers[1..5] {
        assert_eq!(refused.headers["content-type"], "application/json");
        let (json, id) = (refused.json(), refused.headers["x-request-id"].to_str().unwrap());
        assert_eq!(json["error"]["code"], 1431, "{json}");
        assert_eq!(json["error"]["message"], "the request head exceeds 32768 bytes", "{json}");
        let line = sidecar.wait_line(|line| line["request"] == *id);
        assert_eq!((&line["outcome"], &line["status"]), (&"refused".into(), &431.into()), "{line}");
        assert_eq!((&line["http"], &line["path"]), (&"2".into(), &"/mcp".into()), "{line}");
    }
    assert_eq!(sidecar.wait_lines(posts.len()).len(), posts.len());
    assert_eq!(upstream.count(), 2);
}

#[test]
fn what_a_head_of_http2_may_have_is_counted_to_the_byte() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let size = |request: &Request<()>| {
        let uri = request.uri();
        let pseudo = [
            (":method", request.method().as_str()),
            (":scheme", uri.scheme_str().unwrap()),
            (":authority", uri.authority().unwrap().as_str()),
            (":path", uri.path_and_query().unwrap().as_str()),
        ];
        let fields = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 32);
        fields.sum::<usize>()
            + pseudo.iter().map(|(name, value)| name.len() + value.len() + 32).sum::<usize>()
    };
    for (beyond, status) in [(0, 200), (1, 431)] {
        let (mut request, body) = request(&sidecar, &call(1).field("X-Large", ""));
        let value = "x".repeat((32 << 10) + beyond - size(&request));
        request.headers_mut().insert("x-large", value.parse().unwrap());
        assert_eq!(ask(&sidecar, vec![(request, body)])[0].status, status);
    }
}

/// What is far beyond has no more than a status; but it ends nothing else on its connection.
#[test]
fn a_head_far_beyond_what_is_read_gets_431_and_the_others_of_its_connection_go_on() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let posts = [call(1), Post::get().field("X-Large", &"x".repeat(300 << 10)), call(1)];
    let answers = ask(&sidecar, posts.iter().map(|post| request(&sidecar, post)).collect());
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.status.as_u16()).collect();
    assert_eq!(statuses, [200, 431, 200]);
    assert_eq!(upstream.count(), 2);
}

#[test]
fn a_stream_is_relayed_and_many_requests_share_a_connection() {
    let upstream = Upstream::sse(&[progress(1, 1), result(1)]);
    let sidecar = Sidecar::before(&upstream);
    let answers = ask(&sidecar, (0..20).map(|_| request(&sidecar, &modern_call(1))).collect());
    for answer in answers {
        assert_eq!(answer.status, 200);
        assert_eq!(answer.headers["content-type"], "text/event-stream");
        assert!(
            !answer.headers.contains_key("connection") && !answer.headers.contains_key("transfer-encoding")
        );
        let events = support::sse::read(&answer.body).events;
        assert_eq!(
            events.iter().map(|event| event.data.clone()).collect::<Vec<_>>(),
            [progress(1, 1), result(1)]
        );
    }
    let peers: std::collections::BTreeSet<_> =
        sidecar.wait_lines(20).iter().map(|line| line["peer"].as_str().unwrap().to_owned()).collect();
    assert_eq!(peers.len(), 1, "{peers:?}");
}

#[test]
fn cookie_crumbs_are_one_field_toward_http1_and_repeated_fields_stay_in_order() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let post = call(1).field("Cookie", "a=1").more("Cookie", "b=2").field("X-End", "1").more("X-End", "2");
    assert_eq!(ask(&sidecar, vec![request(&sidecar, &post)])[0].status, 200);
    let head = upstream.wait_request(0).head;
    assert_eq!(head.all("cookie"), ["a=1; b=2"]);
    assert_eq!(head.all("x-end"), ["1", "2"]);
    assert_eq!(head.all("host"), [upstream.address.as_str()]);
    assert!(head.field("via").unwrap().starts_with("2 "), "the version that was received (RFC 9110 § 7.6.3)");
}

#[test]
fn a_body_that_is_too_large_is_413_and_one_that_is_slow_is_408() {
    let upstream = Upstream::json(result(1));
    let config = format!(
        "[limits]\nrequest_body = \"1KiB\"\nbody_timeout = \"300ms\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    );
    let sidecar = Sidecar::with_config(&config);
    let large = Post::legacy("x".repeat(200 << 10));
    let answer = &ask(&sidecar, vec![request(&sidecar, &large)])[0];
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (413, &1413.into()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let status = runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(&sidecar.listen).await.unwrap();
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let mut client = client.ready().await.unwrap();
        let (response, _never_ended) = client.send_request(request(&sidecar, &call(1)).0, false).unwrap();
        response.await.unwrap().status()
    });
    assert_eq!(status, 408);
    assert_eq!(upstream.count(), 0);
}

/// A raw HTTP/2 client: it can say what a library would not.
struct Raw(std::net::TcpStream);

/// How the sidecar ended a stream or a connection.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// `RST_STREAM`, with its code.
    Reset(u32),
    /// `GOAWAY`, with its code.
    GoAway(u32),
    /// A head of an answer.
    Answered,
    /// The end of the connection.
    Closed,
}

impl Raw {
    fn connect(sidecar: &Sidecar) -> Self {
        let mut stream = std::net::TcpStream::connect(&sidecar.listen).unwrap();
        stream.set_read_timeout(Some(support::BOUND)).unwrap();
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        let mut raw = Self(stream);
        raw.frame(4, 0, 0, &[]);
        raw
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = &(payload.len() as u32).to_be_bytes()[1..];
        let frame = [length, &[kind, flags], &stream.to_be_bytes(), payload].concat();
        let _ = self.0.write_all(&frame);
    }

    /// A head of these fields, each literal and not indexed (RFC 7541 § 6.2.2), on stream 1.
    fn head(&mut self, fields: &[(&str, &str)], end: bool) {
        let mut block = Vec::new();
        for (name, value) in fields {
            block.push(0);
            for text in [name, value] {
                assert!(text.len() < 127);
                block.push(text.len() as u8);
                block.extend_from_slice(text.as_bytes());
            }
        }
        self.frame(1, if end { 5 } else { 4 }, 1, &block);
    }

    /// What ends stream 1 or the connection, first.
    fn end(&mut self) -> End {
        loop {
            let mut head = [0; 9];
            if self.0.read_exact(&mut head).is_err() {
                return End::Closed;
            }
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let mut payload = vec![0; length];
            self.0.read_exact(&mut payload).unwrap();
            let code = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
            match head[3] {
                1 => return End::Answered,
                3 => return End::Reset(code(0)),
                7 => return End::GoAway(code(4)),
                _ => {}
            }
        }
    }
}

const PING: &str = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;

#[test]
fn what_http2_calls_malformed_is_never_forwarded() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let good = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/mcp"),
        (":authority", "localhost"),
        ("content-type", "application/json"),
        ("mcp-protocol-version", LEGACY),
    ];
    let without = |name: &str| good.iter().copied().filter(|(n, _)| *n != name).collect::<Vec<_>>();
    let with = |name: &'static str, value: &'static str| [&good[..], &[(name, value)]].concat();
    let instead = |name: &'static str, value: &'static str| {
        good.iter().map(|&(n, v)| (n, if n == name { value } else { v })).collect::<Vec<_>>()
    };
    let mut late = good.to_vec();
    late.swap(3, 4);
    for (what, fields) in [
        ("no method", without(":method")),
        ("no scheme", without(":scheme")),
        ("no path", without(":path")),
        ("an empty path", instead(":path", "")),
        ("a path that is none", instead(":path", "mcp")),
        ("two methods", with(":method", "GET")),
        ("two paths", with(":path", "/other")),
        ("a late pseudo-field", late),
        ("an unknown pseudo-field", [&[(":other", "x")], &good[..]].concat()),
        ("a pseudo-field of answers", [&[(":status", "200")], &good[..]].concat()),
        ("a name in capitals", with("X-Upper", "1")),
        ("a line feed in a value", with("x-a", "b\r\nx-smuggled: yes")),
        ("a NUL in a value", with("x-a", "b\0c")),
        ("a line feed in a name", with("x-a\r\nx-smuggled", "yes")),
        ("an empty name", with("", "x")),
        ("Connection", with("connection", "close")),
        ("Transfer-Encoding", with("transfer-encoding", "chunked")),
        ("Keep-Alive", with("keep-alive", "timeout=5")),
        ("Upgrade", with("upgrade", "h2c")),
        ("TE", with("te", "gzip")),
    ] {
        let mut raw = Raw::connect(&sidecar);
        raw.head(&fields, false);
        raw.frame(0, 1, 1, PING.as_bytes());
        let end = raw.end();
        assert_ne!(end, End::Reset(0), "{what}");
        assert_ne!(end, End::Answered, "{what}");
        assert_eq!(upstream.count(), 0, "{what}");
    }
    // A length unlike the bytes that came.
    for length in ["10", "41", "4000"] {
        let mut raw = Raw::connect(&sidecar);
        raw.head(&[&good[..], &[("content-length", length)]].concat(), false);
        raw.frame(0, 1, 1, PING.as_bytes());
        assert_ne!(raw.end(), End::Answered, "{length}");
    }
    assert_eq!(upstream.count(), 0);
    // The same without a fault.
    let mut raw = Raw::connect(&sidecar);
    raw.head(&[&good[..], &[("content-length", "40"), ("te", "trailers")]].concat(), false);
    raw.frame(0, 1, 1, PING.as_bytes());
    assert_eq!(raw.end(), End::Answered);
    assert_eq!(upstream.wait_request(0).body, PING.as_bytes());
}

#[test]
fn host_and_authority_must_agree() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let ask_with = |host: Option<&str>| {
        let (mut request, body) = request(&sidecar, &call(1));
        if let Some(host) = host {
            request.headers_mut().insert("host", host.parse().unwrap());
        }
        ask(&sidecar, vec![(request, body)]).remove(0)
    };
    assert_eq!(ask_with(None).status, 200);
    assert_eq!(ask_with(Some(&sidecar.listen)).status, 200);
    let differs = ask_with(Some("localhost:1"));
    assert_eq!((differs.status.as_u16(), &differs.json()["error"]["code"]), (400, &(-32600).into()));
    assert_eq!(upstream.count(), 2);
}

#[test]
fn connect_and_trace_get_405_with_allow() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let connect = Request::builder().method("CONNECT").uri("localhost:443").body(()).unwrap();
    let trace = Request::builder().method("TRACE").uri(sidecar.url("/mcp")).body(()).unwrap();
    for request in [connect, trace] {
        let answer = ask(&sidecar, vec![(request, Bytes::new())]).remove(0);
        assert_eq!(answer.status, 405);
        assert!(answer.headers["allow"].to_str().unwrap().contains("POST"));
        assert_eq!(answer.json()["error"]["code"], 1405);
    }
    assert_eq!(upstream.count(), 0);
}
