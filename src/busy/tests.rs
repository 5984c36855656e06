use std::time::Duration;

use http::{HeaderName, HeaderValue};
use serde_json::{Value, json};

use super::*;

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let line = |(name, value): &(&'static str, &str)| {
        (HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).unwrap())
    };
    let mut map = HeaderMap::new();
    lines.iter().map(line).for_each(|(name, value)| _ = map.append(name, value));
    map
}

fn noon() -> SystemTime {
    httpdate::parse_http_date("Sun, 29 Nov 2026 12:00:00 GMT").unwrap()
}

fn wait(value: &str) -> Option<String> {
    retry_after(&headers(&[("retry-after", value)]), noon())
}

#[test]
fn seconds_are_taken_as_they_stand() {
    for (value, expected) in [
        ("7", "7"),
        ("0", "0"),
        (" 7\t", "7"),
        ("007", "7"),
        ("000", "0"),
        ("1.5", "1.5"),
        ("0.250", "0.250"),
        ("00.5", "0.5"),
        ("86400000", "86400000"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
    ] {
        let found = wait(value);
        assert_eq!(found.as_deref(), Some(expected), "{value}");
        assert!(serde_json::from_str::<f64>(&found.unwrap()).is_ok());
    }
}

#[test]
fn what_names_no_wait_is_left_out() {
    for value in [
        "",
        "-1",
        "+5",
        "1e3",
        "soon",
        "1.",
        ".5",
        "1.5.2",
        "1,5",
        "7 s",
        "0x7",
        "1_000",
        "Sun, 99 Nov 2026",
        "７",
    ] {
        assert_eq!(wait(value), None, "{value}");
    }
    assert_eq!(retry_after(&headers(&[("ratelimit", "limit=10;w=60")]), noon()), None);
    assert_eq!(retry_after(&headers(&[("retry-after", "7"), ("retry-after", "8")]), noon()), None);
    assert_eq!(
        retry_after(&headers(&[("retry-after", "7"), ("retry-after", " 7")]), noon()).as_deref(),
        Some("7")
    );
}

#[test]
fn a_date_counts_from_the_servers_own_date() {
    let skewed = noon() + Duration::from_secs(3600);
    for (until, expected) in [
        ("Sun, 29 Nov 2026 12:00:30 GMT", "30"),
        ("Sunday, 29-Nov-26 12:00:30 GMT", "30"),
        ("Sun Nov 29 12:00:30 2026", "30"),
        ("Sun, 29 Nov 2026 11:00:00 GMT", "0"),
        ("Sun, 29 Nov 2026 12:00:00 GMT", "0"),
        ("Sun, 29 Nov 2026 13:30:00 GMT", "5400"),
        ("Sat, 29 Nov 2036 12:00:00 GMT", "315619200"),
    ] {
        let with_date = headers(&[("retry-after", until), ("date", "Sun, 29 Nov 2026 12:00:00 GMT")]);
        assert_eq!(retry_after(&with_date, skewed).as_deref(), Some(expected), "{until}");
        assert_eq!(wait(until).as_deref(), Some(expected), "{until}");
    }
    let bad_date = headers(&[("retry-after", "Sun, 29 Nov 2026 12:00:30 GMT"), ("date", "yesterday")]);
    assert_eq!(retry_after(&bad_date, noon()).as_deref(), Some("30"));
    assert_eq!(retry_after(&bad_date, noon() + Duration::from_millis(500)).as_deref(), Some("30"));
}

#[test]
fn the_result_is_of_the_documented_shape_in_each_era() {
    let busy = Busy { upstream: "github", status: Some(429), retry_after: Some("7") };
    let id = Id::string("q-1");
    let text = "The server \"github\" is busy (it answered HTTP status 429). The same call may be made again after 7 seconds.";
    let legacy = json!({"jsonrpc": "2.0", "id": "q-1", "result": {
        "content": [{"type": "text", "text": text}], "isError": true, "_meta": {"oz0/retryable": true, "oz0/retry_after": 7},
    }});
    let mut modern = legacy.clone();
    modern["result"]["resultType"] = "complete".into();
    assert_eq!(serde_json::from_slice::<Value>(&result(&busy, &id, Era::Legacy)).unwrap(), legacy);
    assert_eq!(serde_json::from_slice::<Value>(&result(&busy, &id, Era::Modern)).unwrap(), modern);
}

#[test]
fn the_wait_is_there_only_if_one_was_named_and_digit_for_digit() {
    let busy = |retry_after| Busy { upstream: "a", status: Some(503), retry_after };
    let id = Id::parse(b"1").unwrap();
    let text =
        |retry_after| String::from_utf8(result(&busy(retry_after), &id, Era::Legacy).to_vec()).unwrap();
    assert!(text(None).ends_with(r#""_meta":{"oz0/retryable":true}}}"#));
    assert!(text(Some("1.50")).ends_with(r#""_meta":{"oz0/retryable":true,"oz0/retry_after":1.50}}}"#));
    assert!(text(Some("1")).contains("after 1 second."));
    assert!(text(Some("0")).contains("again now."));
    assert!(text(None).contains("named no wait"));
}

#[test]
fn the_sidecars_own_limit_says_that_nothing_was_sent() {
    let busy = Busy { upstream: "a", status: None, retry_after: Some("1") };
    let answer = result(&busy, &Id::parse(b"1").unwrap(), Era::Modern);
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    let text = answer["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("The sidecar") && text.contains("nothing was sent"), "{text}");
}

#[test]
fn the_id_is_answered_byte_for_byte() {
    for token in [
        "0",
        "-1",
        "1",
        "\"1\"",
        "\"\"",
        "\"ü/\\\"x\"",
        "\"\\u0061\"",
        "9007199254740993",
        "1.0",
        "12345678901234567890",
    ] {
        let id = Id::parse(token.as_bytes()).unwrap();
        let busy = Busy { upstream: "q\"uote\n", status: Some(429), retry_after: None };
        let answer = String::from_utf8(result(&busy, &id, Era::Legacy).to_vec()).unwrap();
        assert!(answer.starts_with(&format!("{{\"jsonrpc\":\"2.0\",\"id\":{token},\"result\":")), "{answer}");
        assert!(serde_json::from_str::<Value>(&answer).is_ok());
    }
}

#[test]
fn a_batch_gets_one_result_a_call() {
    let (one, two) = (Id::parse(b"1").unwrap(), Id::parse(b"\"1\"").unwrap());
    let busy = Busy { upstream: "a", status: Some(429), retry_after: Some("2") };
    let answer: Value = serde_json::from_slice(&results(&busy, &[&one, &two])).unwrap();
    let alone: Value = serde_json::from_slice(&result(&busy, &two, Era::Legacy)).unwrap();
    assert_eq!(answer.as_array().unwrap().len(), 2);
    assert_eq!(answer[0]["id"], 1);
    assert_eq!(answer[1], alone);
}
