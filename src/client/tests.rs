//! What needs no server; the rest is in `tests/approve_pins_a_listing.rs`.

use super::*;

#[test]
fn names_are_mirrored_plainly_or_in_the_base64_form() {
    for (text, mirrored_as) in [
        ("get_user", "get_user"),
        ("two words", "two words"),
        (" padded", "=?base64?IHBhZGRlZA==?="),
        ("é", "=?base64?w6k=?="),
        ("=?base64?x?=", "=?base64?PT9iYXNlNjQ/eD89?="),
        ("a\nb", "=?base64?YQpi?="),
        ("", ""),
    ] {
        let value = mirrored(text).unwrap();
        assert_eq!(value, mirrored_as, "{text}");
        assert_eq!(headers::decode_sentinel(value.as_bytes()).as_deref(), Some(text.as_bytes()));
    }
}

#[test]
fn a_request_says_who_asks_and_keeps_what_its_meta_says() {
    let mut params = json!({ "_meta": { "progressToken": 0, "io.modelcontextprotocol/clientInfo": 1 } });
    let params = params.as_object_mut().unwrap();
    add_meta(params);
    let meta = &params["_meta"];
    assert_eq!(meta["progressToken"], 0);
    assert_eq!(meta["io.modelcontextprotocol/clientInfo"], 1);
    assert_eq!(meta["io.modelcontextprotocol/protocolVersion"], MODERN);
    assert_eq!(meta["io.modelcontextprotocol/clientCapabilities"], json!({}));
}

#[test]
fn what_a_server_says_is_fit_for_a_terminal() {
    let response = r#"{"error":{"code":-32601,"message":"no\u001b[31m\nsuch"}}"#;
    let problem = Problem::of_error(&response.into());
    assert_eq!(problem.to_string(), r"the server answered with error -32601: no\u{1b}[31m\nsuch");
    assert!(error::quoted(&"x".repeat(5000)).chars().count() < 250);
    let moved =
        Problem::of_status(http::StatusCode::TEMPORARY_REDIRECT, &Bytes::new(), Some("/mcp/?key=secret"));
    assert!(moved.to_string().ends_with("(the endpoint is at /mcp/)"), "{moved}");
}
