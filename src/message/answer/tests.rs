use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn response(data: &str) -> Response {
    match look(data.as_bytes()) {
        Some(Answer::Response(response)) => response,
        other => panic!("{data}: {other:?}"),
    }
}

fn progress(data: &str) -> Progress {
    match look(data.as_bytes()) {
        Some(Answer::Progress(progress)) => progress,
        other => panic!("{data}: {other:?}"),
    }
}

#[test]
fn a_response_tells_its_parts() {
    let data = r#"{"result" : {"content":[{"isError":true}],"isError":true,"resultType":"complete","_meta": {"a":1} },"id":"x"}"#;
    let found = response(data);
    assert_eq!(found.id, Some(Id::string("x")));
    assert!(data[found.result.unwrap()].starts_with("{\"content\""));
    assert_eq!(&data[found.meta.unwrap()], "{\"a\":1}");
    assert_eq!((found.is_error, found.result_type.as_deref(), found.forged), (true, Some("complete"), false));
    let found = response(r#"{"id":1,"result":{"_meta":[],"isError":"true"}}"#);
    assert!(found.meta.is_none() && found.meta_not_object && !found.is_error);
    let found = response(r#"{"id":1,"result":{}}"#);
    assert!(found.meta.is_none() && !found.meta_not_object);
    for data in
        [r#"{"id":1,"result":null}"#, r#"{"id":1,"result":[]}"#, r#"{"id":1,"result":{},"error":null}"#]
    {
        assert!(response(data).result.is_some(), "{data}");
    }
}

#[test]
fn an_error_is_a_response_without_a_result() {
    for data in [
        r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"m"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"error":null}"#,
        r#"{"id":1,"error":{"code":1},"result":null}"#,
    ] {
        assert!(response(data).result.is_none());
    }
    assert_eq!(response(r#"{"id":null,"error":{}}"#).id, None);
    assert_eq!(response(r#"{"error":{}}"#).id, None);
}

#[test]
fn requests_and_notifications_are_told_apart() {
    let data = br#"{"id":0,"method":"elicitation/create","params":{"result":1}}"#;
    assert!(
        matches!(look(data), Some(Answer::Request { id, method }) if id.token() == b"0" && method == "elicitation/create")
    );
    let data = br#"{"method":"notifications/tools/list_ch\u0061nged"}"#;
    assert!(
        matches!(look(data), Some(Answer::Notification(method)) if method == "notifications/tools/list_changed")
    );
    // Neither of the two, so nothing that may be dropped as progress is.
    let data = br#"{"id":null,"method":"notifications/progress","params":{"progressToken":1,"progress":1}}"#;
    assert!(matches!(look(data), Some(Answer::Notification(_))));
    let data = br#"{"id":4,"method":"notifications/progress"}"#;
    assert!(matches!(look(data), Some(Answer::Request { .. })));
}

#[test]
fn progress_tells_token_value_total_and_resume() {
    let found = progress(
        r#"{"params":{"progressToken":"t","progress":2.5,"total":4,"message":"m","_meta":{"x":1,"oz0\/resume":"r-1"}},"method":"notifications/progress"}"#,
    );
    assert_eq!(found.token, Some(Id::string("t")));
    assert_eq!((found.progress, found.total, found.resume.as_deref()), (Some(2.5), Some(4.0), Some("r-1")));
}

#[test]
fn progress_that_is_odd_is_still_progress() {
    let with =
        |params: &str| progress(&format!(r#"{{"method":"notifications/progress","params":{params}}}"#));
    assert_eq!(progress(r#"{"method":"notifications/progress"}"#).token, None);
    assert_eq!(with("[]").token, None);
    assert_eq!(with(r#"{"progressToken":null}"#).token, None);
    assert_eq!(with(r#"{"progressToken":9007199254740993}"#).token.unwrap().token(), b"9007199254740993");
    assert_eq!(with(r#"{"progress":"7"}"#).progress, None);
    assert_eq!(with(r#"{"progress":-3}"#).progress, Some(-3.0));
    assert_eq!(with(r#"{"progress":1e308}"#).progress, Some(1e308));
    assert_eq!(with(r#"{"progress":1e999}"#).progress, None);
    assert_eq!(with(r#"{"_meta":{"oz0/resume":5}}"#).resume.as_deref(), Some(""));
    assert_eq!(with(r#"{"_meta":{"oz0/resume":"\ud800"}}"#).resume.as_deref(), Some(""));
    assert_eq!(with(r#"{"_meta":{}}"#).resume, None);
}

#[test]
fn a_batch_gives_each_member_that_is_a_message() {
    let data = br#"[{"id":1,"result":{}}, 5, [], {}, {"method":"notifications/progress","params":{"progress":1}},{"id":"2","error":{}}]"#;
    let Some(Answer::Batch(members)) = look(data) else { panic!() };
    assert!(matches!(
        &members[..],
        [Answer::Response(_), Answer::Progress(Progress { progress: Some(1.0), .. }), Answer::Response(last)] if last.id == Some(Id::string("2"))
    ));
    assert!(matches!(look(b"[]"), Some(Answer::Batch(members)) if members.is_empty()));
}

#[test]
fn what_is_no_message_is_none() {
    for data in [
        "",
        " ",
        "5",
        "null",
        "{}",
        "{\"id\":1}",
        "{\"method\":5}",
        "{\"id\":1,\"result\":{}",
        "{\"id\":1,\"result\":{}}x",
        "[",
        "[1,]",
        "\u{FEFF}{\"id\":1,\"result\":{}}",
    ] {
        assert!(look(data.as_bytes()).is_none(), "{data}");
    }
    assert!(look("[".repeat(1_000_000).as_bytes()).is_none());
}

#[test]
fn what_only_the_sidecar_may_say_is_cut_however_it_is_spelt() {
    for (before, after, count) in [
        (r#"{"id":1,"result":{"_meta":{"oz0/retryable":true}}}"#, r#"{"id":1,"result":{"_meta":{}}}"#, 1),
        (
            r#"{"id":1,"result":{"_meta": { "a":1, "oz0/retry_after":2, "oz0/x":3, "oz0\/refetch":true }, "c":1}}"#,
            r#"{"id":1,"result":{"_meta": { "a":1, "oz0/x":3 }, "c":1}}"#,
            2,
        ),
        (
            r#"{"id":1,"result":{"_meta":{"\u006Fz0/retry\u0061ble":1,"oz0/retryable":true,"b":0}}}"#,
            r#"{"id":1,"result":{"_meta":{"b":0}}}"#,
            2,
        ),
        (
            r#"{"id":1,"result":{"_meta":{"oz0/refetch":1},"_m\u0065ta":{"oz0/refetch":1}}}"#,
            r#"{"id":1,"result":{"_meta":{},"_m\u0065ta":{}}}"#,
            2,
        ),
        (
            r#"{"id":1,"result":{"_meta":{"oz0/refetch":1}},"result":{"a":1}}"#,
            r#"{"id":1,"result":{"_meta":{}},"result":{"a":1}}"#,
            1,
        ),
        // Elsewhere it is the upstream's own word.
        (r#"{"id":1,"result":{"oz0/refetch":1,"structuredContent":{"_meta":{"oz0/refetch":1}}}}"#, "", 0),
        (r#"{"id":1,"result":{"_meta":["oz0/refetch"]}}"#, "", 0),
        (r#"{"id":1,"error":{"_meta":{"oz0/refetch":1}}}"#, "", 0),
    ] {
        let data = Bytes::from(before);
        let response = response(before);
        assert_eq!(response.forged, count > 0, "{before}");
        let (cut, found) = cut_forged(&data, &response);
        assert_eq!(found, count, "{before}");
        assert_eq!(cut, if count > 0 { after } else { before });
        if count == 0 {
            assert_eq!(cut.as_ptr(), data.as_ptr());
        }
    }
}

/// What `look` should say, by way of a parser that decodes everything.
fn expected(value: &Value) -> Option<String> {
    let id = |value: &Value| value.get("id").filter(|id| id.is_string() || id.is_number()).cloned();
    let object = value.as_object()?;
    if let Some(method) = object.get("method") {
        let method = method.as_str()?;
        return Some(match id(value) {
            Some(id) => format!("request {id} {method}"),
            None if object.contains_key("id") || method != "notifications/progress" => {
                format!("notification {method}")
            }
            None => format!("progress {:?}", value.pointer("/params/progress").and_then(Value::as_f64)),
        });
    }
    let error = object.get("error").is_some_and(|error| !error.is_null());
    let result = object.get("result").filter(|_| !error);
    (object.contains_key("result") || object.contains_key("error")).then(|| {
        let meta = object.get("result").and_then(|result| result.get("_meta"));
        format!("response {:?} {} {}", id(value), result.is_some(), meta.is_some_and(Value::is_object))
    })
}

fn said(answer: &Answer) -> String {
    let id = |id: &Id| serde_json::from_slice::<Value>(id.token()).unwrap();
    match answer {
        Answer::Request { id: of, method } => format!("request {} {method}", id(of)),
        Answer::Notification(method) => format!("notification {method}"),
        Answer::Progress(progress) => format!("progress {:?}", progress.progress),
        Answer::Response(response) => {
            format!(
                "response {:?} {} {}",
                response.id.as_ref().map(id),
                response.result.is_some(),
                response.meta.is_some()
            )
        }
        Answer::Batch(members) => format!("{:?}", members.iter().map(said).collect::<Vec<_>>()),
    }
}

fn nearly_a_message() -> impl Strategy<Value = String> {
    let value = prop::sample::select(vec![
        "null",
        "1",
        "-1.5e3",
        "\"a\"",
        "\"notifications/progress\"",
        "{}",
        "[]",
        "{\"_meta\":{\"oz0/refetch\":true}}",
        "{\"_meta\":{},\"isError\":true}",
        "{\"progress\":1.5,\"progressToken\":\"t\"}",
        "[[{\"id\":1}]]",
        "\"\\u00e9\\\"\"",
    ]);
    let key = prop::sample::select(vec![
        "id",
        "method",
        "params",
        "result",
        "error",
        "jsonrpc",
        "resul\\u0074",
        "x",
    ]);
    prop::collection::vec((key, value, prop::sample::select(vec!["", " ", "\n"])), 0..6).prop_map(|members| {
        let members: Vec<_> = members
            .iter()
            .map(|(key, value, space)| format!("{space}\"{key}\":{space}{value}{space}"))
            .collect();
        format!("{{{}}}", members.join(","))
    })
}

/// A result that is forged counts as one beside a method too, which no parser says.
fn is_mixed(message: &str) -> bool {
    message.contains("\"method\"") && message.contains("oz0/")
}

#[test]
fn a_forged_result_is_cut_beside_a_method_and_within_a_batch() {
    let forged = r#"{"id":1,"method":"x","result":{"_meta":{"oz0/refetch":1}}}"#;
    let alone = r#"{"id":1,"result":{"_meta":{"a":1,"oz0/retryable":2}}}"#;
    let data = Bytes::from(format!(r#"[{forged}, 7 ,{alone}, {{"id":2,"result":{{}}}}]"#));
    let answer = look(&data).unwrap();
    let (cut, count) = cut_forged(&data, answer.forged().unwrap());
    assert_eq!(count, 2);
    assert_eq!(
        cut,
        r#"[{"id":1,"method":"x","result":{"_meta":{}}}, 7 ,{"id":1,"result":{"_meta":{"a":1}}}, {"id":2,"result":{}}]"#
    );
    assert!(look(&cut).unwrap().forged().is_none());
}

proptest! {
    #[test]
    fn on_json_it_agrees_with_a_parser(messages in prop::collection::vec(nearly_a_message(), 1..3)) {
        prop_assume!(!messages.iter().any(|message| is_mixed(message)));
        let parse = |json: &str| serde_json::from_str::<Value>(json).unwrap();
        let one = look(messages[0].as_bytes());
        prop_assert_eq!(one.as_ref().map(said), expected(&parse(&messages[0])), "{}", messages[0]);
        let batch = format!("[{}]", messages.join(","));
        let each: Vec<_> = messages.iter().filter_map(|message| expected(&parse(message))).collect();
        prop_assert_eq!(look(batch.as_bytes()).as_ref().map(said), Some(format!("{each:?}")));
    }

    #[test]
    fn after_the_cut_nothing_is_forged_and_the_rest_says_the_same(message in nearly_a_message()) {
        prop_assume!(!is_mixed(&message));
        let data = Bytes::copy_from_slice(message.as_bytes());
        if let Some(Answer::Response(response)) = look(&data) {
            let (cut, count) = cut_forged(&data, &response);
            prop_assert_eq!(count > 0, response.forged);
            let Some(Answer::Response(again)) = look(&cut) else { panic!() };
            prop_assert!(!again.forged);
            let mut before: Value = serde_json::from_slice(&data).unwrap();
            if let Some(meta) = before.pointer_mut("/result/_meta").and_then(Value::as_object_mut) {
                meta.remove("oz0/refetch");
            }
            prop_assert_eq!(before, serde_json::from_slice::<Value>(&cut).unwrap());
        }
    }

    #[test]
    fn no_bytes_make_it_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..80),
        message in nearly_a_message(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        look(&bytes);
        let mut spoilt = message.into_bytes();
        let at = at.index(spoilt.len());
        look(&spoilt[..at]);
        spoilt[at] = byte;
        if let Some(Answer::Response(response)) = look(&spoilt) {
            let spoilt = Bytes::from(spoilt);
            cut_forged(&spoilt, &response);
        }
        // Spans of other bytes do no harm either.
        if let Some(Answer::Response(response)) = look(br#"{"result":{"_meta":{"oz0/refetch":1}                       }}"#) {
            let bytes = Bytes::from(bytes);
            cut_forged(&bytes, &response);
        }
    }
}
