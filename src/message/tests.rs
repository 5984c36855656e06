use super::*;

fn read(body: &str) -> Message {
    classify(&Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

/// The reason and the id's token of a refusal with −32600.
fn refused(body: &str) -> (String, Option<String>) {
    match classify(&Bytes::copy_from_slice(body.as_bytes())) {
        Err(Malformed::Message { reason, id }) => (reason, id.map(|id| id.to_string())),
        other => panic!("{body}: {other:?}"),
    }
}

#[test]
fn a_message_is_what_its_members_say() {
    for (body, kind) in [
        (r#"{"jsonrpc":"2.0","id":1,"method":"a"}"#, Kind::Request),
        (r#"{"id":0,"method":"a"}"#, Kind::Request),
        (r#"{"id":"","method":"a"}"#, Kind::Request),
        (r#"{"id":-99999999999999999999,"method":"a"}"#, Kind::Request),
        (r#"{"id":1.0,"method":"a","result":{}}"#, Kind::Request),
        (r#"{"jsonrpc":"2.0","method":"a"}"#, Kind::Notification),
        (r#"{"id":1,"result":{}}"#, Kind::Response),
        (r#"{"id":"p1","error":{"code":1}}"#, Kind::Response),
        (r#"{"error":{"code":1}}"#, Kind::Response),
        (r#"{"id":null,"method":"tools/call"}"#, Kind::Other),
        (r#"{"id":{},"method":"a"}"#, Kind::Other),
        (r#"{"id":true,"method":"a"}"#, Kind::Other),
        (r#"{"id":[1],"method":"a"}"#, Kind::Other),
        (r#"[]"#, Kind::Batch),
        (r#" [ {"method":"a"} ] "#, Kind::Batch),
    ] {
        assert_eq!(read(body).kind, kind, "{body}");
    }
}

#[test]
fn what_is_no_json_is_a_parse_error() {
    let long = format!("{{\"method\":\"a\"}}{}", "[".repeat(100_000));
    for body in [
        &b""[..],
        b" ",
        b"{",
        b"{\"method\":\"a\"}x",
        b"{\"method\":\"a\"} {}",
        b"{\"method\":\"a\",}",
        b"{'method':'a'}",
        b"{\"method\":\"a\",\"params\":NaN}",
        b"{\"method\":\"a\",\"params\":01}",
        b"{\"method\":\"a\xFF\"}",
        b"{\"method\":\"a\n\"}",
        b"\xEF\xBB\xBF{\"method\":\"a\"}",
        b"{\"a\":\"\\x\"}",
        b"// no\n{}",
        long.as_bytes(),
    ] {
        let body = Bytes::copy_from_slice(body);
        assert!(matches!(classify(&body), Err(Malformed::Json(_))), "{body:?}");
    }
}

#[test]
fn json_that_is_no_message_is_refused_with_its_id() {
    for (body, id) in [
        ("1", None),
        ("null", None),
        ("\"{}\"", None),
        ("{}", None),
        (r#"{"jsonrpc":"2.0","id":7}"#, Some("7")),
        (r#"{"id":"x","method":5}"#, Some("\"x\"")),
        (r#"{"method":null,"result":{},"id":2}"#, Some("2")),
    ] {
        assert_eq!(refused(body).1.as_deref(), id, "{body}");
    }
}

#[test]
fn an_ambiguous_member_is_refused_and_named() {
    for (body, member, id) in [
        (r#"{"id":1,"method":"a","method":"b"}"#, "method", Some("1")),
        (r#"{"id":1,"method":"a","m\u0065thod":"a"}"#, "method", Some("1")),
        (r#"{"id":1,"method":"a","id":2}"#, "id", None),
        (r#"{"jsonrpc":"2.0","id":1,"method":"a","jsonrpc":"2.0"}"#, "jsonrpc", Some("1")),
        (r#"{"params":{},"id":1,"method":"a","params":{}}"#, "params", Some("1")),
        (r#"{"params":{"name":"a","name":"b"},"id":1,"method":"a"}"#, "name", Some("1")),
        (r#"{"params":{"name":"a","\u006eame":1},"method":"a"}"#, "name", None),
        (r#"{"params":{"uri":"a","uri":"b"},"id":1,"method":"a"}"#, "uri", Some("1")),
        (r#"{"params":{"taskId":"a","taskId":"b"},"id":1,"method":"a"}"#, "taskId", Some("1")),
        (r#"{"params":{"arguments":{},"arguments":{}},"id":1,"method":"a"}"#, "arguments", Some("1")),
        (r#"{"params":{"inputResponses":{},"inputResponses":{}},"method":"a"}"#, "inputResponses", None),
        (r#"{"params":{"requestState":"","requestState":""},"method":"a"}"#, "requestState", None),
        (r#"{"params":{"task":{},"task":{}},"method":"a"}"#, "task", None),
        (r#"{"params":{"requestId":1,"requestId":2},"method":"a"}"#, "requestId", None),
        (r#"{"params":{"_meta":{},"_meta":{}},"method":"a"}"#, "_meta", None),
        (r#"{"params":{"_meta":{"progressToken":1,"progressToken":1}},"method":"a"}"#, "progressToken", None),
        (r#"{"params":{"_meta":{"oz0/x":1,"oz0\/x":1}},"method":"a"}"#, "oz0/x", None),
        (r#"[{"id":1,"method":"a","params":{"name":"a","name":"b"}}]"#, "name", None),
    ] {
        let (reason, refused_id) = refused(body);
        assert_eq!(reason, format!("member `{member}` is repeated"), "{body}");
        assert_eq!(refused_id.as_deref(), id, "{body}");
    }
}

#[test]
fn repeated_members_that_mean_nothing_here_pass() {
    for body in [
        r#"{"id":1,"method":"a","params":{"arguments":{"z":1,"z":2,"name":1,"name":2,"_meta":{"oz0/a":1,"oz0/a":1}}}}"#,
        r#"{"id":1,"method":"a","x":1,"x":2,"params":{"y":1,"y":2,"_meta":{"a":1,"a":2}}}"#,
        r#"{"id":1,"result":{"name":1,"name":2}}"#,
    ] {
        read(body);
    }
}

#[test]
fn depth_is_bounded_and_the_id_still_told() {
    let body = |depth: usize| {
        let (open, close) = ("[".repeat(depth - 2), "]".repeat(depth - 2));
        format!(r#"{{"method":"a","params":{{"arguments":{open}{close}}},"id":3}}"#)
    };
    assert!(read(&body(MAX_DEPTH)).id.is_some());
    assert_eq!(
        refused(&body(MAX_DEPTH + 1)),
        ("nesting exceeds 512 levels".to_owned(), Some("3".to_owned()))
    );
    assert_eq!(refused(&body(100_000)).1.as_deref(), Some("3"));
}

#[test]
fn the_parts_of_a_call_are_found_where_they_lie() {
    let body = r#" {"jsonrpc":"2.0","id":"q-1","method":"tools/c\u0061ll","params": {"name":"t\u00e9st","arguments": { "a" : 1 } ,
        "task":{},"inputResponses":{},"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",
        "io.modelcontextprotocol/clientInfo":{"name":"c","version":"1"},"progressToken":"t","traceparent":"00-x",
        "oz0/call": {"job":"j"} ,"oz0/idempotency_key":"k","x":1}} } "#;
    let message = read(body);
    assert!(message.is_call());
    assert_eq!(message.id.as_ref().unwrap().token(), b"\"q-1\"");
    assert_eq!(&body[message.object.clone()], body.trim());
    assert_eq!(message.params.object, message.params_value);
    let params = &message.params;
    assert_eq!(params.name.as_deref(), Some("tést"));
    assert_eq!(&body[params.arguments.clone().unwrap()], r#"{ "a" : 1 }"#);
    assert!(params.task && params.leg);
    let Meta::Object(meta) = &params.meta else { panic!() };
    assert!(
        body[meta.object.clone()].starts_with("{\"io.") && body[meta.object.clone()].ends_with("\"x\":1}")
    );
    assert_eq!(meta.protocol_version.as_deref(), Some("2026-07-28"));
    assert_eq!(meta.client.as_deref(), Some("c/1"));
    assert_eq!(meta.progress_token, Some(Id::string("t")));
    assert_eq!(meta.traceparent.as_deref(), Some("00-x"));
    let oz0: Vec<_> = meta.oz0.iter().map(|(key, span)| (key.as_str(), &body[span.clone()])).collect();
    assert_eq!(oz0, [("oz0/call", "{\"job\":\"j\"}"), ("oz0/idempotency_key", "\"k\"")]);
}

#[test]
fn other_methods_tell_their_parts_too() {
    let message = read(
        r#"{"id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","clientInfo":{"version":"2","name":"n"}}}"#,
    );
    assert_eq!(message.params.protocol_version.as_deref(), Some("2025-11-25"));
    assert_eq!(message.params.client.as_deref(), Some("n/2"));
    let message = read(r#"{"method":"notifications/cancelled","params":{"requestId":"7"}}"#);
    assert_eq!(message.params.request_id, Some(Id::string("7")));
    let message = read(r#"{"id":1,"method":"resources/read","params":{"uri":"file:///a"}}"#);
    assert_eq!(message.params.uri.as_deref(), Some("file:///a"));
    let message =
        read(r#"{"id":1,"method":"tasks/get","params":{"taskId":"t","task":null,"requestState":null}}"#);
    assert_eq!(message.params.task_id.as_deref(), Some("t"));
    assert!(!message.params.task && !message.params.leg);
}

#[test]
fn params_and_meta_of_any_type_pass() {
    for params in ["null", "[]", "[{\"name\":1,\"name\":2}]", "\"x\"", "1"] {
        let message = read(&format!(r#"{{"id":1,"method":"a","params":{params}}}"#));
        assert!(message.params.object.is_none() && message.params_value.is_some());
        assert!(matches!(message.params.meta, Meta::Absent));
        let message = read(&format!(r#"{{"id":1,"method":"a","params":{{"_meta":{params},"name":{{}}}}}}"#));
        assert!(matches!(message.params.meta, Meta::NotObject));
        assert_eq!(message.params.name, None);
    }
}

#[test]
fn a_lone_surrogate_fails_nothing_that_does_not_need_it() {
    let message = read(
        r#"{"id":"\ud800","method":"tools/call","params":{"name":"\udc00","arguments":{"a":"\u00e9é","b":"\/","d":"\ud800","e":"\u0000"}}}"#,
    );
    assert!(message.is_call());
    assert_eq!(message.id.unwrap().token(), br#""\ud800""#);
    assert_eq!(message.params.name, None);
}

#[test]
fn a_batch_tells_whether_it_is_nothing_but_calls() {
    let call = r#"{"id":1,"method":"tools/call","params":{"name":"a"}}"#;
    assert!(read(&format!("[{call},{call}]")).is_batch_of_calls());
    assert_eq!(read(&format!("[{call},{call}]")).batch[1].params.name.as_deref(), Some("a"));
    for other in [
        r#"{"id":1,"method":"ping"}"#,
        r#"{"method":"tools/call"}"#,
        r#"{"id":null,"method":"tools/call"}"#,
        r#"{"id":1,"result":{}}"#,
        r#"{"id":1,"method":7}"#,
        "5",
        "null",
        "{}",
        "[]",
        "[[]]",
    ] {
        let message = read(&format!("[{call},{other}]"));
        assert!(!message.is_batch_of_calls(), "{other}");
        assert_eq!((message.kind, message.batch.len()), (Kind::Batch, 2), "{other}");
    }
    assert!(!read("[]").is_batch_of_calls());
    assert!(!read(call).is_batch_of_calls());
}

#[test]
fn the_era_is_decided_by_body_then_header_then_session() {
    const MODERN: &str = r#"{"id":1,"method":"METHOD","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"VERSION"}}}"#;
    let modern = |method: &str, version: &str| MODERN.replace("METHOD", method).replace("VERSION", version);
    let call = r#"{"id":1,"method":"tools/call","params":{}}"#.to_owned();
    let initialize = r#"{"id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18"}}"#.to_owned();
    let odd = r#"{"id":1,"method":"a","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":5}}}"#
        .to_owned();
    let batch = format!("[{call},{}]", modern("a", "2026-07-28"));
    use Era::{Legacy, Modern};
    for (body, header, session, expected) in [
        (&modern("tools/call", "2026-07-28"), Some("2026-07-28"), None, (Modern, "2026-07-28")),
        (&modern("tools/call", "2026-07-28"), None, None, (Modern, "2026-07-28")),
        (&modern("tools/call", "2026-07-28"), Some("2025-11-25"), Some("2025-11-25"), (Modern, "2026-07-28")),
        (&modern("tools/call", "v999.0.0"), Some("v999.0.0"), None, (Modern, "v999.0.0")),
        (&modern("tools/call", "DRAFT-1"), Some("DRAFT-1"), None, (Modern, "DRAFT-1")),
        (&modern("initialize", "2026-07-28"), None, None, (Modern, "2026-07-28")),
        (&call, Some("2026-07-28"), None, (Modern, "2026-07-28")),
        (&call, Some("2027-01-01"), None, (Modern, "2027-01-01")),
        (&call, Some("2026-07-27"), None, (Legacy, "2026-07-27")),
        (&call, Some("2025-11-25"), Some("2025-03-26"), (Legacy, "2025-11-25")),
        (&call, Some("DRAFT-1"), None, (Legacy, "DRAFT-1")),
        (&call, Some("3026-7-281"), None, (Legacy, "3026-7-281")),
        (&call, None, Some("2025-06-18"), (Legacy, "2025-06-18")),
        (&call, Some(""), None, (Legacy, "2025-03-26")),
        (&call, None, None, (Legacy, "2025-03-26")),
        (&initialize, None, None, (Legacy, "2025-06-18")),
        (&odd, None, None, (Legacy, "2025-03-26")),
        (&batch, None, None, (Modern, "2026-07-28")),
        (&format!("[{call}]"), Some("2025-06-18"), None, (Legacy, "2025-06-18")),
    ] {
        let (found, protocol) = era(&read(body), header, session);
        assert_eq!((found, protocol.as_deref()), (expected.0, Some(expected.1)), "{body} {header:?}");
    }
}

#[test]
fn a_version_that_is_no_date_is_unknown_unless_the_body_is_modern() {
    let call = read(r#"{"id":1,"method":"tools/call","params":{}}"#);
    let modern = read(
        r#"{"id":1,"method":"tools/call","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"DRAFT-1"}}}"#,
    );
    assert!(revision_unknown(&call, Some("DRAFT-1")));
    assert!(!revision_unknown(&call, Some("2025-06-18")));
    assert!(!revision_unknown(&call, Some("2031-01-01")));
    assert!(!revision_unknown(&call, Some("")));
    assert!(!revision_unknown(&call, None));
    assert!(!revision_unknown(&modern, Some("DRAFT-1")));
}
