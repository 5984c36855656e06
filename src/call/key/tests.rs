use super::*;

const D: &str = "44136fa355b3678a1146ad16f7e8649e";

fn identity(json: &str) -> Identity {
    Identity::read(Some(json), &HeaderMap::new()).unwrap()
}

fn of(json: &str, idempotent: bool) -> Derivation {
    derive(&identity(json), None, "charge", D, idempotent, &HeaderMap::new())
}

fn first(derivation: Derivation) -> First {
    match derivation {
        Derivation::Activity { first, .. } => first,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_digest_of_no_arguments_is_that_of_an_empty_object() {
    assert_eq!(digest(None).unwrap(), D);
    assert_eq!(digest(Some(b" { } ")).unwrap(), D);
    assert_ne!(digest(Some(b"{\"a\":1}")).unwrap(), D);
    assert_eq!(digest(Some(br#"{"a":1.0,"b":"\u00e9"}"#)), digest(Some("{\"b\":\"é\",\"a\":1}".as_bytes())));
    assert!(digest(Some(br#"{"a":1,"a":2}"#)).is_err());
}

#[test]
fn a_plain_calls_key_is_job_and_activity() {
    assert_eq!(first(of(r#"{"job":"j","activity":"a"}"#, false)), First::Key("j/a".into()));
    assert_eq!(first(of(r#"{"job":"j","activity":"a","continued":2}"#, true)), First::Key("j/anr2/a".into()));
    // A session's call of a tool that says nothing of idempotence is a plain call.
    assert_eq!(first(of(r#"{"job":"j","activity":"a","session":1,"k":1}"#, false)), First::Key("j/a".into()));
}

#[test]
fn a_sessions_call_of_an_idempotent_tool_is_named_by_its_arguments_and_ordinal() {
    let known = |json: &str| match of(json, true) {
        Derivation::Known { key, fixed: false } => key,
        other => panic!("{other:?}"),
    };
    assert_eq!(known(r#"{"job":"j","session":3,"k":2}"#), format!("j/s3/charge#{D}/2"));
    assert_eq!(known(r#"{"job":"j","session":3,"k":2,"continued":1}"#), format!("j/r1/s3/charge#{D}/2"));
    let with_activity = of(r#"{"job":"j","activity":"a","session":3,"k":2}"#, true);
    assert_eq!(first(with_activity), First::Key(format!("j/s3/charge#{D}/2")));
}

#[test]
fn a_session_that_does_not_count_is_counted_by_its_start() {
    let counted = |start: &str| {
        let json = format!(r#"{{"job":"j","activity":"a","session":3,"session_start":"{start}"}}"#);
        match first(of(&json, true)) {
            First::Counted { prefix, series } => (prefix, series),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(counted("x").0, format!("j/s3/charge#{D}/"));
    assert_ne!(counted("x").1, counted("y").1);
    assert_eq!(counted("x").0, counted("y").0);
}

#[test]
fn what_the_store_keeps_cannot_be_confused_by_slashes() {
    let activity = |json: &str| match of(json, false) {
        Derivation::Activity { activity, .. } => activity,
        other => panic!("{other:?}"),
    };
    assert_ne!(activity(r#"{"job":"a/b","activity":"c"}"#), activity(r#"{"job":"a","activity":"b/c"}"#));
}

#[test]
fn the_nodes_own_key_is_the_calls_identity() {
    let own =
        derive(&identity(r#"{"job":"j","activity":"a"}"#), Some("k-1"), "charge", D, true, &HeaderMap::new());
    assert_eq!(own, Derivation::Known { key: "k-1".into(), fixed: true });
}

#[test]
fn a_header_key_counts_where_there_is_no_job_and_activity() {
    let with = |value: &'static str, json: &str| {
        let mut headers = HeaderMap::new();
        headers.insert("idempotency-key", HeaderValue::from_static(value));
        derive(&identity(json), None, "charge", D, false, &headers)
    };
    let known = |key: &str| Derivation::Known { key: key.into(), fixed: true };
    assert_eq!(with("\"8e03\"", "{}"), known("8e03"));
    assert_eq!(with("plain", "{}"), known("plain"));
    assert_eq!(with(r#""a\"b\\c""#, "{}"), known(r#"a"b\c"#));
    assert_eq!(with("\"\"", "{}"), Derivation::None);
    assert_eq!(first(with("\"8e03\"", r#"{"job":"j","activity":"a"}"#)), First::Key("j/a".into()));
    assert_eq!(of("{}", true), Derivation::None);
}

#[test]
fn a_key_that_no_header_carries_is_encoded() {
    assert_eq!(header_value("j/a").unwrap(), "j/a");
    assert_eq!(header_value("j/工具#x/1").unwrap(), "=?base64?ai/lt6XlhbcjeC8x?=");
    assert_eq!(header_value(" a").unwrap(), "=?base64?IGE=?=");
    assert_eq!(header_value("=?base64?x?=").unwrap(), "=?base64?PT9iYXNlNjQ/eD89?=");
}

#[test]
fn a_call_without_anything_to_name_it_needs_no_digest() {
    let named = |json: &str| is_named(&identity(json), None, &HeaderMap::new());
    assert!(!named("{}"));
    assert!(!named(r#"{"job":"j","time_limit":5}"#));
    assert!(named(r#"{"job":"j","activity":"a"}"#));
    assert!(named(r#"{"job":"j","session":1,"k":1}"#));
    assert!(is_named(&Identity::default(), Some("k"), &HeaderMap::new()));
    let mut headers = HeaderMap::new();
    headers.insert("idempotency-key", HeaderValue::from_static("\"k\""));
    assert!(is_named(&Identity::default(), None, &headers));
}
