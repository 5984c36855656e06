use bytes::Bytes;

use super::*;
use crate::message::{classify, era};

/// Header lines as they would come, `Name: value`.
fn lines(text: &[&str]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in text {
        let (name, value) = line.split_once(':').unwrap();
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.append(
            name,
            HeaderValue::from_bytes(value.strip_prefix(' ').unwrap_or(value).as_bytes()).unwrap(),
        );
    }
    headers
}

/// Every line, sorted: only lines of one name have an order.
fn shown(headers: &HeaderMap) -> Vec<String> {
    let mut lines: Vec<_> =
        headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
    lines.sort();
    lines
}

/// Checks a body under headers, the era being what [`era`] makes of them.
fn mirrored(body: &str, text: &[&str]) -> Result<(), Refusal> {
    let headers = lines(text);
    let message = classify(&Bytes::copy_from_slice(body.as_bytes())).unwrap();
    let version = headers.get(PROTOCOL_VERSION).and_then(|version| version.to_str().ok()).map(str::trim);
    let (era, _) = era(&message, version, None);
    check_mirrored(&headers, &message, era)
}

fn is_mismatch(result: &Result<(), Refusal>, named: &str) -> bool {
    matches!(result, Err(Refusal::Mismatch(reason)) if reason.contains(named))
}

const META: &str = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}"#;
const VERSION: &str = "MCP-Protocol-Version: 2026-07-28";

fn call(name: &str) -> String {
    format!(r#"{{"id":1,"method":"tools/call","params":{{"name":{name},{META}}}}}"#)
}

#[test]
fn one_line_of_an_mcp_header_is_the_most_there_can_be() {
    for name in ["Mcp-Method", "mcp-name", "MCP-Protocol-Version", "MCP-SESSION-ID"] {
        let line = format!("{name}: a");
        assert!(check_head(&lines(&[&line])).is_ok());
        assert!(matches!(check_head(&lines(&[&line, &line])), Err(Refusal::Unusable(_))), "{name}");
    }
    assert!(check_head(&lines(&["Mcp-Param-X: a", "Mcp-Param-X: b", "X-Foo: 1", "X-Foo: 2"])).is_ok());
    // One line with a comma is one literal value.
    assert!(check_head(&lines(&["Mcp-Session-Id: a, a"])).is_ok());
}

#[test]
fn connection_must_not_name_what_the_request_needs() {
    for option in [
        "Mcp-Method",
        "mcp-param-x",
        "MCP-Protocol-Version",
        "authorization",
        "Content-Type",
        "Content-Length",
        "Host",
        "ACCEPT",
        "Last-Event-ID",
        "origin",
    ] {
        for line in [format!("Connection: {option}"), format!("Connection: close,  {option}\t, x")] {
            assert!(matches!(check_head(&lines(&[&line])), Err(Refusal::Unusable(_))), "{line}");
        }
        assert!(check_head(&lines(&["Connection: x", &format!("Connection: {option}")])).is_err());
    }
    for option in ["close", "keep-alive, X-Priv", "Accept-Encoding", "", ",,", "Mcp_Method"] {
        assert!(check_head(&lines(&[&format!("Connection: {option}")])).is_ok(), "{option}");
    }
}

#[test]
fn a_version_of_unusable_bytes_is_refused_in_any_era_and_a_name_only_in_modern() {
    assert!(matches!(check_head(&lines(&["MCP-Protocol-Version: 2025é"])), Err(Refusal::Unusable(_))));
    assert!(check_head(&lines(&["Mcp-Name: é"])).is_ok());
    let result = mirrored(&call("\"é\""), &[VERSION, "Mcp-Method: tools/call", "Mcp-Name: é"]);
    assert!(is_mismatch(&result, "Mcp-Name"));
}

#[test]
fn the_version_header_says_what_the_body_says() {
    let ping = |version: &str| {
        format!(
            r#"{{"id":1,"method":"ping","params":{{"_meta":{{"io.modelcontextprotocol/protocolVersion":"{version}"}}}}}}"#
        )
    };
    let method = "Mcp-Method: ping";
    assert_eq!(mirrored(&ping("2026-07-28"), &[VERSION, method]), Ok(()));
    assert_eq!(mirrored(&ping("2026-07-28"), &["mcp-protocol-version:  \t2026-07-28 ", method]), Ok(()));
    // Unknown, and equal in both places: the upstream's to judge.
    assert_eq!(mirrored(&ping("v999.0.0"), &["MCP-Protocol-Version: v999.0.0", method]), Ok(()));
    assert!(is_mismatch(&mirrored(&ping("v999.0.0"), &[VERSION, method]), "MCP-Protocol-Version"));
    assert!(is_mismatch(
        &mirrored(&ping("2026-07-28"), &["MCP-Protocol-Version: 2025-11-25", method]),
        "MCP-Protocol-Version"
    ));
    assert!(is_mismatch(&mirrored(&ping("2026-07-28"), &[method]), "MCP-Protocol-Version is missing"));
    // No version in the body: not a mismatch.
    for body in [
        r#"{"id":1,"method":"ping"}"#,
        r#"{"id":1,"method":"ping","params":{"_meta":{}}}"#,
        r#"{"id":1,"method":"ping","params":{"_meta":null}}"#,
        r#"{"id":1,"method":"ping","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":7}}}"#,
    ] {
        assert_eq!(mirrored(body, &[VERSION, method]), Ok(()), "{body}");
    }
}

#[test]
fn the_method_header_is_required_and_exact() {
    let name = "Mcp-Name: a";
    let body = call("\"a\"");
    for line in ["Mcp-Method: tools/call", "MCP-METHOD:   tools/call  ", "mcp-method: tools/call"] {
        assert_eq!(mirrored(&body, &[VERSION, name, line]), Ok(()), "{line}");
    }
    for line in [
        "Mcp-Method: tools/list",
        "Mcp-Method: TOOLS/CALL",
        "Mcp-Method:",
        "Mcp-Method: =?base64?dG9vbHMvY2FsbA==?=",
        "X-Y: z",
        "Mcp_Method: tools/call",
    ] {
        assert!(is_mismatch(&mirrored(&body, &[VERSION, name, line]), "Mcp-Method"), "{line}");
    }
    // A method and an id of null: a server may run it, so it is checked as a request.
    let null = r#"{"id":null,"method":"ping"}"#;
    assert!(is_mismatch(&mirrored(null, &[VERSION]), "Mcp-Method"));
    assert_eq!(mirrored(null, &[VERSION, "Mcp-Method: ping"]), Ok(()));
}

#[test]
fn the_name_header_is_required_where_the_body_has_a_source_for_it() {
    for (method, field) in [("tools/call", "name"), ("prompts/get", "name"), ("resources/read", "uri")] {
        let body = format!(r#"{{"id":1,"method":"{method}","params":{{"{field}":"a/b c",{META}}}}}"#);
        let method = format!("Mcp-Method: {method}");
        assert_eq!(mirrored(&body, &[VERSION, &method, "Mcp-Name:   a/b c\t"]), Ok(()));
        assert_eq!(mirrored(&body, &[VERSION, &method, "Mcp-Name: =?base64?YS9iIGM=?="]), Ok(()));
        for name in [
            "Mcp-Name: other",
            "Mcp-Name: A/B C",
            "Mcp-Name: a%2Fb c",
            "Mcp-Name: a/b c, a/b c",
            "Mcp-Name:",
            "X-Y: z",
        ] {
            assert!(is_mismatch(&mirrored(&body, &[VERSION, &method, name]), "Mcp-Name"), "{method} {name}");
        }
    }
    // Nothing in the body that it could repeat.
    let none = format!(r#"{{"id":1,"method":"tools/call","params":{{"name":5,{META}}}}}"#);
    assert!(is_mismatch(&mirrored(&none, &[VERSION, "Mcp-Method: tools/call", "Mcp-Name: 5"]), "Mcp-Name"));
    let list = format!(r#"{{"id":1,"method":"tools/list","params":{{{META}}}}}"#);
    assert_eq!(mirrored(&list, &[VERSION, "Mcp-Method: tools/list", "Mcp-Name: x"]), Ok(()));
}

#[test]
fn a_name_is_compared_after_decoding_and_never_normalised() {
    for (name, header, fits) in [
        ("\"测试\"", "=?base64?5rWL6K+V?=", true),
        ("\"\\u6d4b\\u8bd5\"", "=?base64?5rWL6K+V?=", true),
        ("\"=?base64?abc?=\"", "=?base64?PT9iYXNlNjQ/YWJjPz0=?=", true),
        ("\"=?base64?abc?=\"", "=?base64?abc?=", false),
        ("\"=?BASE64?YQ==?=\"", "=?BASE64?YQ==?=", true),
        ("\"Hello\"", "=?base64?SGVsbG8=?=", true),
        ("\"Hello\"", "=?base64?SGVsbG8?=", false),
        ("\"Hello\"", "=?base64?SGVs!!!bG8=?=", false),
        ("\"Hello\"", "=?BASE64?SGVsbG8=?=", false),
        ("\"a \"", "=?base64?YSA=?=", true),
        ("\"a \"", "a ", false),
        // NFC against NFD.
        ("\"\\u00e9\"", "=?base64?ZcyB?=", false),
        ("\"\\ud800\"", "=?base64?7aCA?=", false),
    ] {
        let result =
            mirrored(&call(name), &[VERSION, "Mcp-Method: tools/call", &format!("Mcp-Name: {header}")]);
        assert_eq!(result.is_ok(), fits, "{name} {header}");
    }
}

#[test]
fn a_task_id_header_may_be_absent_but_not_wrong() {
    for method in ["tasks/get", "tasks/update", "tasks/cancel"] {
        let body = format!(r#"{{"id":1,"method":"{method}","params":{{"taskId":"t1",{META}}}}}"#);
        let method = format!("Mcp-Method: {method}");
        assert_eq!(mirrored(&body, &[VERSION, &method]), Ok(()));
        assert_eq!(mirrored(&body, &[VERSION, &method, "Mcp-Name: t1"]), Ok(()));
        assert!(is_mismatch(&mirrored(&body, &[VERSION, &method, "Mcp-Name: t2"]), "Mcp-Name"));
    }
}

#[test]
fn of_a_modern_notification_nothing_is_required_but_what_is_there_is_right() {
    let body = format!(r#"{{"method":"notifications/cancelled","params":{{{META}}}}}"#);
    assert_eq!(mirrored(&body, &[]), Ok(()));
    assert_eq!(mirrored(&body, &[VERSION, "Mcp-Method: notifications/cancelled"]), Ok(()));
    assert!(is_mismatch(&mirrored(&body, &[VERSION, "Mcp-Method: tools/call"]), "Mcp-Method"));
    assert!(is_mismatch(&mirrored(&body, &["MCP-Protocol-Version: 2025-11-25"]), "MCP-Protocol-Version"));
    assert_eq!(mirrored(r#"{"id":1,"result":{}}"#, &[VERSION, "Mcp-Method: x"]), Ok(()));
}

#[test]
fn legacy_requests_are_never_refused_for_mirrored_headers() {
    let body = r#"{"id":1,"method":"tools/call","params":{"name":"a"}}"#;
    for version in ["X-Y: z", "MCP-Protocol-Version: 2025-11-25", "MCP-Protocol-Version: DRAFT-1"] {
        assert_eq!(
            mirrored(body, &[version, "Mcp-Method: tools/list", "Mcp-Name: =?base64?!?=", "Mcp-Param-A: é"]),
            Ok(())
        );
        assert_eq!(mirrored(&format!("[{body}]"), &[version]), Ok(()));
    }
}

#[test]
fn a_modern_batch_is_unusable() {
    for (body, header) in [
        ("[]", VERSION),
        (r#"[{"id":1,"method":"a"}]"#, VERSION),
        (&format!("[{}]", call("\"a\"")), "X-Y: z"),
    ] {
        assert!(matches!(mirrored(body, &[header]), Err(Refusal::Unusable(_))), "{body}");
    }
}

#[test]
fn the_sentinel_is_decoded_strictly_or_taken_literally() {
    let decoded =
        |value: &str| decode_sentinel(value.as_bytes()).map(|value| String::from_utf8(value).unwrap());
    for (value, expected) in [
        ("=?base64?SGVsbG8sIOS4lueVjA==?=", Some("Hello, 世界")),
        ("=?base64?IHBhZGRlZCA=?=", Some(" padded ")),
        ("=?base64?bGluZTEKbGluZTI=?=", Some("line1\nline2")),
        ("=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?=", Some("=?base64?literal?=")),
        ("=?base64??=", Some("")),
        ("us-west1", Some("us-west1")),
        ("=?base64?SGVsbG8=", Some("=?base64?SGVsbG8=")),
        ("SGVsbG8=?=", Some("SGVsbG8=?=")),
        ("=?Base64?SGVsbG8=?=", Some("=?Base64?SGVsbG8=?=")),
        // Too short to have both ends.
        ("=?base64?=", Some("=?base64?=")),
        ("=?base64?SGVsbG8?=", None),
        ("=?base64?SGVs bG8=?=", None),
        ("=?base64?SGVsbG8-?=", None),
        ("=?base64?SGVsbG9=?=", None),
        ("=?base64?/w==?=", None),
    ] {
        assert_eq!(decoded(value).as_deref(), expected, "{value}");
    }
}

#[test]
fn hop_by_hop_fields_and_those_that_connection_names_end_here() {
    let mut headers = lines(&[
        "Connection: keep-alive, X-Priv",
        "Connection: x-other,, bad name",
        "X-Priv: 1",
        "X-Other: 1",
        "X-Other: 2",
        "Proxy-Authorization: Basic Zm9v",
        "Proxy-Authenticate: Basic",
        "Proxy-Connection: x",
        "TE: trailers",
        "Trailer: X-T",
        "Keep-Alive: 300",
        "Upgrade: h2c",
        "Transfer-Encoding: chunked",
        "Authorization: Bearer t",
        "WWW-Authenticate: Bearer",
        "Retry-After: 1",
        "X-Anything: 1",
        "traceparent: 00-1",
    ]);
    strip_hop_by_hop(&mut headers);
    assert_eq!(
        shown(&headers),
        [
            "authorization: Bearer t",
            "retry-after: 1",
            "traceparent: 00-1",
            "www-authenticate: Bearer",
            "x-anything: 1"
        ]
    );
}

#[test]
fn toward_the_upstream_only_the_ends_own_fields_pass_and_in_order() {
    let kept = [
        "accept: text/event-stream, application/json",
        "authorization: Bearer t",
        "cookie: a=1",
        "idempotency-key: \"k\"",
        "last-event-id: 7 x",
        "mcp-method: tools/call",
        "mcp-name: =?base64?YQ==?=",
        "mcp-param-region: eu",
        "mcp-param-empty: ",
        "mcp-protocol-version: 2026-07-28",
        "mcp-session-id: s",
        "mcp_method: x",
        "origin: http://localhost",
        "traceparent: 00-1",
        "x-foo: 1",
        "x-foo: 2",
        "x-forward: 1",
        "content-type: application/json",
        "dpop: x",
    ];
    let mut headers = lines(&kept);
    for line in [
        "Host: a",
        "Content-Length: 5",
        "Expect: 100-continue",
        "Forwarded: for=1",
        "X-Forwarded-For: 1",
        "X-Forwarded-Proto: http",
        "Oz0-Job: j",
        "OZ0-ANYTHING: 1",
        "Connection: close",
    ] {
        let (name, value) = line.split_once(": ").unwrap();
        headers.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_static(value));
    }
    toward_upstream(&mut headers);
    let mut kept = kept.to_vec();
    kept.sort_unstable();
    assert_eq!(shown(&headers), kept);
    assert_eq!(headers.get_all("x-foo").iter().collect::<Vec<_>>(), ["1", "2"]);
}

#[test]
fn toward_the_node_nothing_forged_and_nothing_of_the_last_hop_passes() {
    let mut headers = lines(&[
        "Connection: close, X-Hop",
        "X-Hop: 1",
        "Alt-Svc: h3=\":443\"",
        "Oz0-Upstream-Status: 429",
        "oz0-resume: x",
        "Retry-After: 9",
        "RateLimit-Policy: 20;w=900",
        "Set-Cookie: a=1",
        "Set-Cookie: b=2",
        "Mcp-Session-Id: s",
    ]);
    toward_node(&mut headers);
    assert_eq!(
        shown(&headers),
        [
            "mcp-session-id: s",
            "ratelimit-policy: 20;w=900",
            "retry-after: 9",
            "set-cookie: a=1",
            "set-cookie: b=2"
        ]
    );
}

#[test]
fn every_stream_forbids_caching_transforming_and_buffering_once() {
    for (cache, expected) in [
        (&[][..], "no-cache, no-transform"),
        (&["Cache-Control: no-cache"], "no-cache, no-transform"),
        (&["Cache-Control: public, max-age=60"], "no-cache, no-transform"),
        (
            &["Cache-Control: No-Store", "Cache-Control: private=\"x\", no-transform"],
            "no-cache, no-transform, no-store, private",
        ),
        (&["Cache-Control: max-age=0,private"], "no-cache, no-transform, private"),
        (&["Cache-Control: no-store"], "no-cache, no-transform, no-store"),
    ] {
        let mut headers = lines(&["X-Accel-Buffering: yes", "X-Accel-Buffering: yes", "Content-Length: 5"]);
        headers.extend(lines(cache));
        headers.append(header::CONTENT_TYPE, HeaderValue::from_static("Text/Event-Stream;charset=utf-8"));
        force_stream(&mut headers);
        let expected = format!("cache-control: {expected}");
        assert_eq!(
            shown(&headers),
            [&expected, "content-type: Text/Event-Stream;charset=utf-8", "x-accel-buffering: no"]
        );
    }
}

#[test]
fn the_content_type_is_its_essence() {
    for (line, expected) in [
        ("Content-Type: application/json", Some("application/json")),
        ("Content-Type: Application/JSON; charset=utf-8", Some("application/json")),
        ("Content-Type:  text/event-stream;charset=utf-8 ", Some("text/event-stream")),
        ("Content-Type: text/plain", Some("text/plain")),
        ("Content-Type: application/jsonp", Some("application/jsonp")),
        ("Content-Type: é", None),
        ("X-Y: z", None),
    ] {
        assert_eq!(content_type(&lines(&[line])).as_deref(), expected, "{line}");
    }
    assert_eq!(content_type(&lines(&["Content-Type: application/json", "Content-Type: text/plain"])), None);
}

#[test]
fn accept_decides_by_its_most_specific_range() {
    for (text, json, sse) in [
        (&[][..], true, true),
        (&["Accept:"], true, true),
        (&["Accept: application/json, text/event-stream"], true, true),
        (&["Accept: text/event-stream"], false, true),
        (&["Accept: Application/JSON;q=0.5"], true, false),
        (&["Accept: */*"], true, true),
        (&["Accept: text/*"], false, true),
        (&["Accept: text/plain", "Accept: application/json"], true, false),
        (&["Accept: application/json;q=0, */*"], false, true),
        (&["Accept: */*, application/json; q=0.000"], false, true),
        (&["Accept: */*;q=0, text/*"], false, true),
        (&["Accept: application/json;version=1;q=0.1"], true, false),
        (&["Accept: application/json;q=x"], true, false),
        (&["Accept: text/html"], false, false),
    ] {
        let headers = lines(text);
        let found = (accepts(&headers, "application/json"), accepts(&headers, "text/event-stream"));
        assert_eq!(found, (json, sse), "{text:?}");
    }
}

#[test]
fn a_coded_request_body_is_refused() {
    for (text, refused) in [
        (&[][..], false),
        (&["Content-Encoding: identity"], false),
        (&["Content-Encoding: Identity , "], false),
        (&["Content-Encoding: gzip"], true),
        (&["Content-Encoding: identity", "Content-Encoding: br"], true),
        (&["Content-Encoding: identity, gzip"], true),
    ] {
        assert_eq!(content_encoding_refused(&lines(text)), refused, "{text:?}");
    }
}

#[test]
fn what_described_the_old_body_goes_with_it() {
    let mut headers = lines(&[
        "Content-Length: 1",
        "Content-Type: text/plain",
        "Content-Encoding: gzip",
        "Content-Language: en",
        "ETag: x",
        "Last-Modified: x",
        "Accept-Ranges: bytes",
        "Content-MD5: x",
        "Content-Digest: x",
        "Repr-Digest: x",
        "Retry-After: 7",
        "RateLimit: x",
        "Set-Cookie: a=1",
        "Access-Control-Allow-Origin: *",
    ]);
    shed_content(&mut headers);
    assert_eq!(
        shown(&headers),
        ["access-control-allow-origin: *", "ratelimit: x", "retry-after: 7", "set-cookie: a=1"]
    );
    assert!(is_signed(&lines(&["Signature-Input: x"])) && !is_signed(&headers));
}
