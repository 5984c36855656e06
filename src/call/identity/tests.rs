use http::HeaderValue;

use super::*;

fn object(json: &str) -> Result<Identity, Invalid> {
    Identity::read(Some(json), &HeaderMap::new())
}

fn header(name: &'static str, value: &str) -> Result<Identity, Invalid> {
    let mut headers = HeaderMap::new();
    headers.insert(name, HeaderValue::try_from(value).unwrap());
    Identity::read(None, &headers)
}

#[test]
fn nothing_said_is_no_identity() {
    let identity = Identity::read(None, &HeaderMap::new()).unwrap();
    assert_eq!(identity, Identity::default());
    assert!(!identity.said);
    identity.check(false, true).unwrap();
}

#[test]
fn every_member_is_read_from_the_object() {
    let identity = object(
        r#"{"job":"j","activity":"a","continued":1,"session":2,"session_start":"x","k":3,
            "attempt":4,"time_limit":1.5,"elapsed":0.25,"unknown":[1]}"#,
    )
    .unwrap();
    let expected = Identity {
        job: Some("j".into()),
        activity: Some("a".into()),
        continued: 1,
        session: Some(2),
        session_start: Some("x".into()),
        k: Some(3),
        attempt: Some(4),
        time_limit: Some(Duration::from_millis(1500)),
        elapsed: Duration::from_millis(250),
        said: true,
    };
    assert_eq!(identity, expected);
}

#[test]
fn every_member_is_read_from_its_header_and_the_object_wins_member_by_member() {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("oz0-job", "j"),
        ("oz0-activity", "a"),
        ("oz0-continued", "1"),
        ("oz0-session", "2"),
        ("oz0-session-start", "x"),
        ("oz0-k", "3"),
        ("oz0-attempt", "4"),
        ("oz0-time-limit", "1.5"),
        ("oz0-elapsed", "0.25"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let identity = Identity::read(Some(r#"{"activity":"b"}"#), &headers).unwrap();
    assert_eq!((identity.job.as_deref(), identity.activity.as_deref()), (Some("j"), Some("b")));
    assert_eq!(
        (identity.continued, identity.session, identity.k, identity.attempt),
        (1, Some(2), Some(3), Some(4))
    );
    assert_eq!(identity.time_limit, Some(Duration::from_millis(1500)));
    assert_eq!(identity.elapsed, Duration::from_millis(250));
}

#[test]
fn what_a_member_must_not_be_is_refused_by_its_name() {
    let long = "x".repeat(257);
    for (member, bad) in [
        ("job", "1"),
        ("job", "\"\""),
        ("job", "\"a b\""),
        ("activity", "\"é\""),
        ("session_start", &format!("\"{long}\"")),
        ("session", "-1"),
        ("session", "1.5"),
        ("session", "\"1\""),
        ("k", "0"),
        ("attempt", "0"),
        ("continued", "null"),
        ("time_limit", "0"),
        ("time_limit", "-1"),
        ("elapsed", "-0.1"),
        ("elapsed", "true"),
    ] {
        let error = object(&format!(r#"{{"{member}":{bad}}}"#)).unwrap_err();
        assert_eq!(error.member, member, "{bad}");
    }
    for object_itself in ["[]", "1", "null", r#"{"job":"a","job":"b"}"#] {
        assert_eq!(object(object_itself).unwrap_err().member, "oz0/call");
    }
    assert_eq!(header("oz0-k", "+1").unwrap_err().member, "k");
    assert_eq!(header("oz0-time-limit", "inf").unwrap_err().member, "time_limit");
    assert_eq!(header("oz0-job", "").unwrap_err().member, "job");
}

#[test]
fn a_whole_number_may_be_spelled_as_any_number() {
    for (spelled, number) in [("3", 3), ("3.0", 3), ("0.3e1", 3), ("9007199254740992.0", 1 << 53)] {
        let identity = object(&format!("{{\"k\":{spelled},\"attempt\":{spelled}}}")).unwrap();
        assert_eq!((identity.k, identity.attempt), (Some(number), Some(number)), "{spelled}");
    }
    assert_eq!(object("{\"continued\":18446744073709551615}").unwrap().continued, u64::MAX);
    assert_eq!(object("{\"session\":-0}").unwrap().session, Some(0));
    for no in ["1.5", "-1", "-1.0", "1e17", "1e400", "18446744073709551616", "\"1\"", "true", "[1]"] {
        assert_eq!(object(&format!("{{\"session\":{no}}}")).unwrap_err().member, "session", "{no}");
    }
}

#[test]
fn a_repeated_header_is_refused() {
    let mut headers = HeaderMap::new();
    headers.append("oz0-job", HeaderValue::from_static("a"));
    headers.append("oz0-job", HeaderValue::from_static("b"));
    assert_eq!(Identity::read(None, &headers).unwrap_err().member, "oz0-job");
}

#[test]
fn a_session_needs_an_ordinal_or_what_it_can_be_counted_by() {
    let check = |json: &str| object(json).unwrap().check(false, false);
    assert!(check(r#"{"job":"j","session":1}"#).is_err());
    assert!(check(r#"{"job":"j","session":1,"activity":"a"}"#).is_err());
    assert!(check(r#"{"job":"j","session":1,"session_start":"s"}"#).is_err());
    assert!(check(r#"{"session":1,"k":1}"#).is_err());
    check(r#"{"job":"j","session":1,"k":1}"#).unwrap();
    check(r#"{"job":"j","session":1,"session_start":"s","activity":"a"}"#).unwrap();
}

#[test]
fn a_further_attempt_or_leg_must_say_which_call_it_is() {
    let identity = object(r#"{"job":"j","attempt":2}"#).unwrap();
    assert_eq!(identity.check(false, false).unwrap_err().member, "attempt");
    identity.check(true, false).unwrap();
    object(r#"{"job":"j","activity":"a","attempt":2}"#).unwrap().check(false, false).unwrap();
    object(r#"{"job":"j","attempt":1}"#).unwrap().check(false, false).unwrap();
    let leg = object(r#"{"job":"j"}"#).unwrap();
    assert_eq!(leg.check(false, true).unwrap_err().member, "inputResponses");
    leg.check(true, true).unwrap();
}
