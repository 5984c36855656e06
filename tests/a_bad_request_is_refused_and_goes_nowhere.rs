//! What the sidecar refuses about the HTTP request itself, before there is a call: the status, a JSON-RPC error under
//! the id where that could be read, no byte upstream, and one line in the log.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use serde_json::Value;
use support::{
    Client, Post, Sidecar, Upstream,
    http::Response,
    mcp::{LEGACY, MODERN, call, cancel, modern_call, result},
};

/// The JSON-RPC error of a refusal.
#[track_caller]
fn check(what: &str, response: &Response, status: u16, code: i64, id: Option<&str>) {
    assert_eq!(response.status(), status, "{what}: {}", response.text());
    assert_eq!(response.head.field("content-type"), Some("application/json"), "{what}");
    let json = response.json();
    assert_eq!(json["jsonrpc"], "2.0", "{what}");
    assert_eq!(json["error"]["code"], code, "{what}: {json}");
    assert!(json["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{what}: {json}");
    match id {
        Some(id) => assert!(response.text().contains(&format!(r#""id":{id},"#)), "{what}: {json}"),
        None => assert!(json.get("id").is_none(), "{what}: {json}"),
    }
}

/// Refusals, one after another; afterwards none of them has reached the upstream, and each has its line.
struct Refusals {
    upstream: Upstream,
    sidecar: Sidecar,
    asked: usize,
}

impl Refusals {
    fn new() -> Self {
        let upstream = Upstream::json(result(1));
        let sidecar = Sidecar::before(&upstream);
        Self { upstream, sidecar, asked: 0 }
    }

    fn with_config(top: &str, sections: &str) -> Self {
        let upstream = Upstream::json(result(1));
        let url = upstream.url();
        let sidecar = Sidecar::with_config(&format!("{top}\n[upstreams.mcp]\nurl = \"{url}\"\n{sections}"));
        Self { upstream, sidecar, asked: 0 }
    }

    #[track_caller]
    fn refuse(&mut self, what: &str, post: &Post, status: u16, code: i64, id: Option<&str>) -> Response {
        let response = self.sidecar.client().ask(post);
        check(what, &response, status, code, id);
        self.asked += 1;
        response
    }

    fn end(self) -> Vec<Value> {
        assert_eq!(self.upstream.count(), 0, "nothing is sent");
        let lines = self.sidecar.wait_lines(self.asked);
        assert_eq!(lines.len(), self.asked);
        for line in &lines {
            assert_eq!(line["outcome"], "refused", "{line}");
            assert!(line["error"].is_string() && line.get("upstream_status").is_none(), "{line}");
        }
        lines
    }
}

fn legacy(body: &str) -> Post {
    Post::legacy(body)
}

#[test]
fn a_body_that_is_no_json_is_a_parse_error_without_an_id() {
    let mut refusals = Refusals::new();
    let good = String::from_utf8(call(1).body).unwrap();
    let bodies: Vec<(&str, Vec<u8>)> = vec![
        ("an empty body", b"".to_vec()),
        ("white space", b"  \n".to_vec()),
        ("no JSON", b"hello".to_vec()),
        ("a cut object", good.as_bytes()[..good.len() - 1].to_vec()),
        ("trailing bytes", format!("{good} x").into_bytes()),
        ("two messages", format!("{good}\n{good}").into_bytes()),
        ("a trailing comma", br#"{"jsonrpc":"2.0","id":1,"method":"ping",}"#.to_vec()),
        ("a comment", br#"{"jsonrpc":"2.0","id":1,"method":"ping"/**/}"#.to_vec()),
        ("a leading zero", br#"{"jsonrpc":"2.0","id":01,"method":"ping"}"#.to_vec()),
        ("NaN", br#"{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":NaN}}"#.to_vec()),
        ("a raw line feed in a string", b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"pi\nng\"}".to_vec()),
        ("a byte-order mark", [b"\xef\xbb\xbf", good.as_bytes()].concat()),
        (
            "invalid UTF-8",
            b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\",\"params\":{\"x\":\"\xff\"}}".to_vec(),
        ),
        ("UTF-16", "{}".encode_utf16().flat_map(u16::to_le_bytes).collect()),
    ];
    for (what, body) in bodies {
        refusals.refuse(what, &Post::legacy(body), 400, -32700, None);
    }
    for line in refusals.end() {
        assert_eq!(line["status"], 400, "{line}");
    }
}

#[test]
fn json_that_is_no_message_is_an_invalid_request() {
    let mut refusals = Refusals::new();
    let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    for (what, body, id) in [
        ("a number", "7".to_owned(), None),
        ("a string", r#""x""#.to_owned(), None),
        ("null", "null".to_owned(), None),
        ("an empty object", "{}".to_owned(), None),
        ("an id alone", r#"{"jsonrpc":"2.0","id":7}"#.to_owned(), Some("7")),
        ("a method that is no string", r#"{"jsonrpc":"2.0","id":"x","method":7}"#.to_owned(), Some("\"x\"")),
        (
            "nesting beyond every use",
            format!(r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{{"x":{}}}}}"#, deep(5000)),
            Some("7"),
        ),
    ] {
        refusals.refuse(what, &legacy(&body), 400, -32600, id);
    }
    refusals.end();
}

/// A call in which the member of that name, at its place, stands twice; `second` is how the second one is spelt.
fn twice(name: &str, second: &str) -> String {
    let member = |name: &str, at: &str| {
        let value = match (at, name.split('/').next().unwrap()) {
            ("top", "jsonrpc") => r#""2.0""#,
            ("top", "id") => "7",
            ("top", "method") => r#""tools/call""#,
            (_, "name" | "uri" | "requestState") => r#""slow""#,
            ("params", "requestId") | ("meta", "progressToken") => "7",
            _ => "{}",
        };
        format!(r#""{name}":{value}"#)
    };
    let object = |at: &str, mut members: Vec<String>, mine: bool| {
        if mine {
            let first = member(name, at);
            members.retain(|other| !other.starts_with(&format!(r#""{name}":"#)));
            members.push(first.clone());
            members.push(first.replacen(name, second, 1));
        }
        format!("{{{}}}", members.join(","))
    };
    let at = match name {
        "jsonrpc" | "id" | "method" | "params" => "top",
        "progressToken" => "meta",
        _ if name.starts_with("oz0/") => "meta",
        _ => "params",
    };
    let meta = object("meta", vec![member("progressToken", "meta")], at == "meta");
    let params = vec![member("name", "params"), member("arguments", "params"), format!(r#""_meta":{meta}"#)];
    let params = object("params", params, at == "params");
    let top = vec![
        member("jsonrpc", "top"),
        member("id", "top"),
        member("method", "top"),
        format!(r#""params":{params}"#),
    ];
    object("top", top, at == "top")
}

/// Whichever of the two an upstream would take, a check that saw the other one would be fooled.
#[test]
fn a_member_that_decides_something_must_not_stand_twice() {
    let mut refusals = Refusals::new();
    for name in [
        "jsonrpc",
        "id",
        "method",
        "params",
        "_meta",
        "name",
        "uri",
        "arguments",
        "inputResponses",
        "requestState",
        "task",
        "requestId",
        "progressToken",
        "oz0/call",
        "oz0/idempotency_key",
        "oz0/resume",
        "oz0/anything",
    ] {
        let escaped = format!("\\u{:04x}{}", u32::from(name.chars().next().unwrap()), &name[1..]);
        for second in [name, &escaped] {
            let body = twice(name, second);
            // An id that stands twice could not be read.
            let id = (name != "id").then_some("7");
            refusals.refuse(&format!("{name} and {second}: {body}"), &legacy(&body), 400, -32600, id);
        }
    }
    let batch = format!(r#"[{{"jsonrpc":"2.0","method":"notifications/x"}},{}]"#, twice("name", "name"));
    let old = legacy(&batch).field("MCP-Protocol-Version", "2025-03-26");
    refusals.refuse("in a batch", &old, 400, -32600, None);
    refusals.end();
}

#[test]
fn members_that_decide_nothing_may_stand_twice_and_pass_as_they_came() {
    let upstream = Upstream::json(result(7));
    let sidecar = Sidecar::before(&upstream);
    let bodies = [
        r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"slow","arguments":{"name":1,"name":2,"_meta":1,"_meta":2}}}"#,
        r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","x":1,"x":2,"params":{"name":"slow","y":1,"y":2,"_meta":{"z":1,"z":2}}}"#,
    ];
    for (number, body) in bodies.iter().enumerate() {
        assert_eq!(sidecar.client().ask(&legacy(body)).status(), 200);
        assert_eq!(upstream.wait_request(number).body, body.as_bytes());
    }
}

/// Every kind of modern request, with the headers that belong to it: `(method, params, Mcp-Name)`.
const METHODS: [(&str, &str, Option<&str>); 9] = [
    ("tools/call", r#""name":"slow","arguments":{}"#, Some("slow")),
    ("prompts/get", r#""name":"slow""#, Some("slow")),
    ("resources/read", r#""uri":"file:///a%2Fb""#, Some("file:///a%2Fb")),
    ("tools/list", "", None),
    ("resources/list", "", None),
    ("ping", "", None),
    ("server/discover", "", None),
    ("subscriptions/listen", r#""notifications":{"toolsListChanged":true}"#, None),
    ("x/unknown", r#""name":"slow""#, None),
];

fn modern(method: &str, params: &str, name: Option<&str>) -> Post {
    let comma = if params.is_empty() { "" } else { "," };
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":"m-1","method":"{method}","params":{{{params}{comma}"_meta":{{"io.modelcontextprotocol/protocolVersion":"{MODERN}"}}}}}}"#
    );
    Post::modern(method, name, body)
}

#[test]
fn the_headers_of_a_modern_request_must_be_there_and_say_what_the_body_says() {
    let mut refusals = Refusals::new();
    let id = Some("\"m-1\"");
    for (method, params, name) in METHODS {
        let good = modern(method, params, name);
        let mut bad = vec![
            ("no version", good.clone().without("MCP-Protocol-Version")),
            ("a legacy version", good.clone().field("MCP-Protocol-Version", LEGACY)),
            ("a later version", good.clone().field("MCP-Protocol-Version", "2026-12-31")),
            ("no method", good.clone().without("Mcp-Method")),
            ("an empty method", good.clone().field("Mcp-Method", "")),
            ("another method", good.clone().field("Mcp-Method", "tools/other")),
            ("a method in capitals", good.clone().field("Mcp-Method", &method.to_uppercase())),
            ("a field of another name", good.clone().without("Mcp-Method").field("Mcp_Method", method)),
        ];
        if name.is_some() {
            bad.extend([
                ("no name", good.clone().without("Mcp-Name")),
                ("another name", good.clone().field("Mcp-Name", "fast")),
                ("a name in another case", good.clone().field("Mcp-Name", "SLOW")),
                ("a name that is no base64", good.clone().field("Mcp-Name", "=?base64?c2!vdw==?=")),
                ("a name without its padding", good.clone().field("Mcp-Name", "=?base64?c2xvdw?=")),
                ("a name whose base64 is no UTF-8", good.clone().field("Mcp-Name", "=?base64?/w==?=")),
                ("a sentinel in capitals is literal", good.clone().field("Mcp-Name", "=?BASE64?c2xvdw==?=")),
            ]);
        }
        for (what, post) in bad {
            refusals.refuse(&format!("{method}: {what}"), &post, 400, -32020, id);
        }
    }
    refusals.end();
}

#[test]
fn the_headers_of_a_modern_request_that_say_the_same_in_any_form_pass_as_they_came() {
    let upstream = Upstream::json(result("\"m-1\""));
    let sidecar = Sidecar::before(&upstream);
    let mut sent = 0;
    let mut pass = |what: &str, post: Post| {
        let response = sidecar.client().ask(&post);
        assert_eq!(response.status(), 200, "{what}: {}", response.text());
        let request = upstream.wait_request(sent);
        for name in ["Mcp-Method", "Mcp-Name", "MCP-Protocol-Version"] {
            let as_sent = post.fields.iter().find(|(n, _)| n == name).map(|(_, value)| value.trim());
            assert_eq!(request.head.field(name), as_sent, "{what}");
        }
        assert_eq!(request.body, post.body, "{what}");
        sent += 1;
    };
    for (method, params, name) in METHODS {
        pass(method, modern(method, params, name));
    }
    let good = modern_call(1);
    pass("encoded although plain", good.clone().field("Mcp-Name", "=?base64?c2xvdw==?="));
    pass("white space around", good.field("Mcp-Name", " \t slow \t "));
    let name = r#""name":"caf\u00e9 ✓","arguments":{}"#;
    pass("beyond ASCII", modern("tools/call", name, Some("=?base64?Y2Fmw6kg4pyT?=")));
    pass("a name where none belongs", modern("tools/list", "", Some("x")));
    // Nothing in the body to compare with: the upstream's to judge.
    let bare = r#"{"jsonrpc":"2.0","id":"m-1","method":"tools/list"}"#;
    pass("no _meta", Post::modern("tools/list", None, bare));
    // A version nobody knows, the same in both places: the upstream's to judge.
    let future = String::from_utf8(modern("tools/list", "", None).body).unwrap().replace(MODERN, "v999.0.0");
    let future = Post::modern("tools/list", None, future).field("MCP-Protocol-Version", "v999.0.0");
    pass("an unknown version", future);
}

#[test]
fn a_modern_notification_needs_no_headers_but_must_not_contradict_itself() {
    let upstream = Upstream::start(|_, reply| reply.json(202, &[], ""));
    let sidecar = Sidecar::before(&upstream);
    let body = format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/x","params":{{"_meta":{{"io.modelcontextprotocol/protocolVersion":"{MODERN}"}}}}}}"#
    );
    assert_eq!(sidecar.client().ask(&Post::new(body.clone())).status(), 202);
    let wrong = Post::modern("notifications/y", None, body);
    check("another method", &sidecar.client().ask(&wrong), 400, -32020, None);
    assert_eq!(upstream.count(), 1);
}

#[test]
fn a_legacy_request_is_never_refused_for_what_its_mirrored_headers_say() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    for post in [
        call(1).field("Mcp-Name", "other").field("Mcp-Method", "tools/list"),
        call(1).field("Mcp_Method", "tools/list").field("Mcp-Param-X", "y"),
        call(1).without("MCP-Protocol-Version"),
        call(1).field("MCP-Protocol-Version", "2025-03-26"),
    ] {
        assert_eq!(sidecar.client().ask(&post).status(), 200);
    }
    assert_eq!(upstream.wait_request(1).head.field("mcp_method"), Some("tools/list"));
}

#[test]
fn an_mcp_header_that_stands_twice_or_holds_bytes_no_value_has_is_refused() {
    let mut refusals = Refusals::new();
    for name in ["MCP-Protocol-Version", "Mcp-Method", "Mcp-Name", "Mcp-Session-Id"] {
        let twice = modern_call(1).field("Mcp-Session-Id", "s");
        let value = twice.fields.iter().find(|(n, _)| n == name).unwrap().1.clone();
        refusals.refuse(name, &twice.clone().more(name, &value), 400, -32600, None);
        refusals.refuse(name, &twice.more(&name.to_lowercase(), "other"), 400, -32600, None);
    }
    for (name, code) in [("Mcp-Method", -32020), ("Mcp-Name", -32020), ("MCP-Protocol-Version", -32600)] {
        let id = (code == -32020).then_some("1");
        refusals.refuse(name, &modern_call(1).field(name, "slöw"), 400, code, id);
    }
    refusals.end();
}

#[test]
fn a_modern_batch_is_refused() {
    let mut refusals = Refusals::new();
    let body = format!("[{}]", String::from_utf8(modern_call(1).body).unwrap());
    refusals.refuse("a batch", &Post::modern("tools/call", None, body), 400, -32600, None);
    refusals.end();
}

#[test]
fn connection_must_not_name_a_header_that_the_request_needs() {
    let mut refusals = Refusals::new();
    for option in [
        "Mcp-Method",
        "mcp-name",
        "MCP-Protocol-Version",
        "Mcp-Session-Id",
        "Mcp-Param-X",
        "Authorization",
        "Content-Type",
        "content-length",
        "Host",
        "Accept",
        "Last-Event-ID",
        "Origin",
        "close, mcp-method",
    ] {
        refusals.refuse(option, &modern_call(1).field("Connection", option), 400, -32600, None);
    }
    refusals.end();
}

#[test]
fn a_web_page_can_not_drive_the_sidecar() {
    let mut refusals = Refusals::new();
    for origin in [
        "http://evil.example",
        "null",
        "%%%",
        "http://localhost.evil.example",
        "http://127.0.0.1@evil.example",
        "http://localhost, http://evil.example",
        "ö",
        "chrome-extension://abcdef",
        "file://",
    ] {
        refusals.refuse(origin, &call(1).field("Origin", origin), 403, 1403, None);
    }
    let two = call(1).field("Origin", "http://localhost").more("Origin", "http://localhost");
    refusals.refuse("two", &two, 403, 1403, None);
    for host in ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "0.0.0.0", "10.0.0.1", "[::]"]
    {
        refusals.refuse(host, &call(1).field("Host", host), 421, 1421, None);
    }
    // Before the body is read: none of it is there.
    let client = refusals.sidecar.client();
    client.send(&call(1).field("Origin", "http://evil.example").field("Content-Length", "1000"));
    check("before the body", &client.response(), 403, 1403, None);
    refusals.asked += 1;
    for line in refusals.end() {
        assert!(line["status"] == 403 || line["status"] == 421, "{line}");
    }
}

#[test]
fn local_pages_and_what_the_configuration_names_are_let_in() {
    let upstream = Upstream::json(result(1));
    let config = format!(
        "[auth]\norigins = [\"https://app.example\"]\nhosts = [\"sidecar.internal\"]\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    );
    let sidecar = Sidecar::with_config(&config);
    let origins = ["http://localhost:8080", "http://127.0.0.1", "http://[::1]:3000", "https://app.example"];
    for (number, origin) in origins.iter().enumerate() {
        assert_eq!(sidecar.client().ask(&call(1).field("Origin", origin)).status(), 200, "{origin}");
        assert_eq!(upstream.wait_request(number).head.field("origin"), Some(*origin), "{origin}");
    }
    for host in ["localhost", "localhost:1", "127.0.0.1:7080", "[::1]", "sidecar.internal:9"] {
        assert_eq!(sidecar.client().ask(&call(1).field("Host", host)).status(), 200, "{host}");
    }
    let other = sidecar.client().ask(&call(1).field("Origin", "https://other.example"));
    check("another", &other, 403, 1403, None);
}

#[test]
fn a_request_without_one_host_is_refused() {
    let mut refusals = Refusals::new();
    refusals.refuse("two", &call(1).field("Host", "localhost").more("Host", "localhost"), 400, -32600, None);
    let client = refusals.sidecar.client();
    client.write("POST /mcp HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}");
    check("none", &client.response(), 400, -32600, None);
    refusals.asked += 1;
    refusals.end();
}

fn bearer() -> Refusals {
    let mut command = Sidecar::command(&tempfile::TempDir::new().unwrap());
    let folder = tempfile::TempDir::new().unwrap();
    let upstream = Upstream::json(result(1));
    let file = folder.path().join("sidecar.toml");
    let text = format!(
        "[auth]\nbearer = {{ env = \"SIDECAR_TOKEN\" }}\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    );
    std::fs::write(&file, text).unwrap();
    command.arg("--config").arg(&file).env("SIDECAR_TOKEN", "let-me-in");
    Refusals { upstream, sidecar: Sidecar::spawn(command, folder), asked: 0 }
}

#[test]
fn who_does_not_bring_the_bearer_is_refused_with_a_challenge() {
    let mut refusals = bearer();
    let good = call(1).field("Authorization", "Bearer let-me-in");
    for (what, post) in [
        ("none", call(1)),
        ("another", call(1).field("Authorization", "Bearer let-me-out")),
        ("a part", call(1).field("Authorization", "Bearer let-me")),
        ("more", call(1).field("Authorization", "Bearer let-me-in-2")),
        ("no scheme", call(1).field("Authorization", "let-me-in")),
        ("another scheme", call(1).field("Authorization", "Basic let-me-in")),
        ("an empty one", call(1).field("Authorization", "Bearer ")),
        ("two", good.clone().more("Authorization", "Bearer let-me-in")),
        ("on a path that does not exist", call(1).at("/other")),
    ] {
        let response = refusals.refuse(what, &post, 401, 1401, None);
        let challenge = response.head.field("www-authenticate").unwrap();
        assert!(challenge.starts_with("Bearer"), "{what}: {challenge}");
        assert!(!response.text().contains("let-me"), "{what}");
    }
    // `Host` and `Origin` come before it.
    refusals.refuse("Host first", &call(1).field("Host", "evil.example"), 421, 1421, None);
    refusals.refuse("Origin first", &call(1).field("Origin", "http://evil.example"), 403, 1403, None);
    let (upstream, sidecar) = (refusals.upstream.clone(), &refusals.sidecar);
    assert_eq!(upstream.count(), 0);
    for post in [good.clone(), good.field("Authorization", "bearer let-me-in")] {
        assert_eq!(sidecar.client().ask(&post).status(), 200);
    }
    assert_eq!(upstream.wait_request(0).head.field("authorization"), None, "it is never forwarded");
}

#[test]
fn what_is_no_endpoint_is_not_found() {
    let mut refusals = Refusals::new();
    for path in [
        "/",
        "/other",
        "/mcp/x",
        "/mcp//",
        "//mcp",
        "/mcp/../mcp",
        "/MCP",
        "/%6dcp",
        "/mcp%2f",
        "/other/../mcp",
    ] {
        refusals.refuse(path, &call(1).at(path), 404, 1404, None);
        let get = Post::get().at(path);
        refusals.refuse(path, &get, 404, 1404, None);
    }
    refusals.end();
}

#[test]
fn methods_that_no_hop_can_carry_get_405_with_allow() {
    let mut refusals = Refusals::new();
    for line in ["TRACE /mcp", "CONNECT evil.example:443"] {
        let client = refusals.sidecar.client();
        client.write(format!("{line} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        let response = client.response();
        check(line, &response, 405, 1405, None);
        let allow = response.head.field("allow").unwrap();
        for method in ["GET", "POST", "DELETE"] {
            assert!(allow.contains(method), "{allow}");
        }
        refusals.asked += 1;
    }
    refusals.end();
}

#[test]
fn a_post_that_is_not_json_is_an_unsupported_media_type() {
    let mut refusals = Refusals::new();
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json-rpc",
        "application/jsonp",
        "json",
        "",
    ] {
        refusals.refuse(kind, &call(1).field("Content-Type", kind), 415, 1415, None);
    }
    refusals.refuse("none", &call(1).without("Content-Type"), 415, 1415, None);
    refusals.refuse("two", &call(1).more("Content-Type", "text/plain"), 415, 1415, None);
    refusals.refuse("gzip", &call(1).field("Content-Encoding", "gzip"), 415, 1415, None);
    let (upstream, sidecar) = (refusals.upstream.clone(), &refusals.sidecar);
    for kind in ["Application/JSON", "application/json; charset=utf-8", "application/json;charset=UTF-8"] {
        let number = upstream.count();
        assert_eq!(sidecar.client().ask(&call(1).field("Content-Type", kind)).status(), 200, "{kind}");
        assert_eq!(upstream.wait_request(number).head.field("content-type"), Some(kind));
    }
}

#[test]
fn an_expectation_that_can_not_be_met_is_refused_and_100_continue_is_told_after_the_checks() {
    let mut refusals = Refusals::with_config("[limits]\nrequest_body = \"1KiB\"", "");
    refusals.refuse("another", &call(1).field("Expect", "200-ok"), 417, 1417, None);
    let large = call(1).field("Expect", "100-continue").field("Content-Length", "1025");
    let client = refusals.sidecar.client();
    client.write(Post { body: Vec::new(), ..large }.bytes("localhost"));
    check("too large", &client.response(), 413, 1413, None);
    refusals.asked += 1;
    let (upstream, sidecar) = (refusals.upstream.clone(), &refusals.sidecar);
    assert_eq!(upstream.count(), 0);
    let post = call(1);
    let head =
        post.clone().field("Expect", "100-continue").field("Content-Length", &post.body.len().to_string());
    let client = sidecar.client();
    client.write(Post { body: Vec::new(), ..head }.bytes("localhost"));
    assert_eq!(client.response().status(), 100);
    client.write(&post.body);
    assert_eq!(client.response().status(), 200);
    assert_eq!(upstream.wait_request(0).head.field("expect"), None);
}

#[test]
fn a_head_of_more_than_a_client_can_need_gets_431() {
    let mut refusals = Refusals::new();
    let large = call(1).field("X-Large", &"x".repeat(48 << 10));
    refusals.refuse("one large field", &large, 431, 1431, None);
    let mut many = call(1);
    for n in 0..90 {
        many = many.field(&format!("X-{n}"), &"x".repeat(600));
    }
    refusals.refuse("many fields", &many, 431, 1431, None);
    let upstream = refusals.upstream.clone();
    refusals.refuse("far beyond", &call(1).field("X-Large", &"x".repeat(100 << 10)), 431, 1431, None);
    assert_eq!(refusals.sidecar.client().ask(&call(1).field("X-Large", &"x".repeat(24 << 10))).status(), 200);
    assert_eq!(upstream.count(), 1);
}

/// A request that fails every check, mended one by one: the order in which the checks answer.
#[test]
fn of_several_faults_the_first_in_the_order_of_the_checks_is_told() {
    let mut refusals = bearer();
    let doubled = format!(
        r#"{{"jsonrpc":"2.0","id":1,"id":1,"method":"tools/call","params":{{"name":"slow","_meta":{{"io.modelcontextprotocol/protocolVersion":"{MODERN}"}}}}}}"#
    );
    let single = doubled.replacen(r#""id":1,"#, "", 1);
    let large = vec![b'x'; (4 << 20) + 1];
    let mut post = Post::new(large)
        .field("Host", "evil.example")
        .field("Origin", "http://evil.example")
        .field("Content-Type", "text/plain")
        .field("Mcp-Method", "x")
        .field("Mcp-Name", "x")
        .field("MCP-Protocol-Version", LEGACY);
    let mut step = |what: &str, post: &Post, status, code, id| {
        refusals.refuse(what, post, status, code, id).json()["error"]["message"].as_str().unwrap().to_owned()
    };
    step("Host", &post, 421, 1421, None);
    post = post.field("Host", "localhost");
    step("Origin", &post, 403, 1403, None);
    post = post.without("Origin");
    step("bearer", &post, 401, 1401, None);
    post = post.field("Authorization", "Bearer let-me-in");
    step("size", &post, 413, 1413, None);
    post.body = b"{".to_vec();
    step("content type", &post, 415, 1415, None);
    post = post.field("Content-Type", "application/json");
    step("JSON", &post, 400, -32700, None);
    post.body = b"{}".to_vec();
    step("shape", &post, 400, -32600, None);
    post.body = doubled.into_bytes();
    step("duplicates", &post, 400, -32600, None);
    post.body = single.into_bytes();
    assert!(step("version", &post, 400, -32020, Some("1")).contains("MCP-Protocol-Version"));
    post = post.field("MCP-Protocol-Version", MODERN);
    assert!(step("method", &post, 400, -32020, Some("1")).contains("Mcp-Method"));
    post = post.field("Mcp-Method", "tools/call");
    assert!(step("name", &post, 400, -32020, Some("1")).contains("Mcp-Name"));
    refusals.end();
}

#[test]
fn a_request_that_passed_this_sidecar_before_is_a_loop() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    assert_eq!(sidecar.client().ask(&call(1).field("Via", "1.0 fred, 1.1 example")).status(), 200);
    let via = upstream.wait_request(0).head.all("via").join(", ");
    let own = via.rsplit(' ').next().unwrap();
    assert!(via.starts_with("1.0 fred, 1.1 example, 1.1 "), "{via}");
    for via in [format!("1.1 {own}"), format!("1.0 fred, 1.1 {own} (comment)"), format!("2 {own}, 1.1 x")] {
        check(&via, &sidecar.client().ask(&call(1).field("Via", &via)), 502, 1502, None);
    }
    assert_eq!(upstream.count(), 1);
}

#[test]
fn a_refusal_leaves_the_connection_usable_where_nothing_is_left_unread() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::before(&upstream);
    let client: Client = sidecar.client();
    assert_eq!(client.ask(&call(1).at("/other")).status(), 404);
    assert_eq!(client.ask(&legacy("{")).status(), 400);
    assert_eq!(client.ask(&call(1)).status(), 200);
    // A notification that is malformed has no id to answer.
    let mut late = cancel(1);
    late.body.truncate(20);
    check("a cut notification", &client.ask(&late), 400, -32700, None);
}
