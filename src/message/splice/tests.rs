use proptest::prelude::*;
use serde_json::Value;

use super::{super::classify, *};

fn spliced(body: &str, add: &[(&str, &str)], remove: &[&str]) -> String {
    let body = Bytes::copy_from_slice(body.as_bytes());
    let message = classify(&body).unwrap();
    String::from_utf8(meta(&body, &message, add, remove).to_vec()).unwrap()
}

const KEY: (&str, &str) = ("oz0/idempotency_key", "\"j/a\"");

#[test]
fn a_member_is_added_where_the_rest_leaves_room() {
    const META: &str = r#"{"oz0/idempotency_key":"j/a"}"#;
    for (before, after) in [
        (
            r#"{"params":{"_meta":{"a":1}},METHOD}"#,
            r#"{"params":{"_meta":{"oz0/idempotency_key":"j/a","a":1}},METHOD}"#,
        ),
        (
            r#"{"params":{"_meta":{ }},METHOD}"#,
            r#"{"params":{"_meta":{"oz0/idempotency_key":"j/a" }},METHOD}"#,
        ),
        (r#"{"params":{"_meta":{}},METHOD}"#, r#"{"params":{"_meta":META},METHOD}"#),
        (r#"{"params":{},METHOD}"#, r#"{"params":{"_meta":META},METHOD}"#),
        ("{METHOD,\"params\": {\n}}", "{METHOD,\"params\": {\"_meta\":META\n}}"),
        (r#"{METHOD,"params":{ "name":"n"}}"#, r#"{METHOD,"params":{"_meta":META, "name":"n"}}"#),
        (r#"{METHOD}"#, r#"{METHOD,"params":{"_meta":META}}"#),
        (" {METHOD \n} ", " {METHOD,\"params\":{\"_meta\":META} \n} "),
    ] {
        let whole = |json: &str| json.replace("METHOD", r#""id":1,"method":"m""#).replace("META", META);
        assert_eq!(spliced(&whole(before), &[KEY], &[]), whole(after), "{before}");
    }
}

#[test]
fn a_member_is_cut_with_its_comma_wherever_it_stands() {
    let body = |meta: &str| format!(r#"{{"id":1,"method":"m","params":{{"_meta":{meta}}}}}"#);
    for (before, after) in [
        (r#"{"oz0/call":{"a":[1]},"x":1}"#, r#"{"x":1}"#),
        (r#"{"x":1,"oz0/call":{}}"#, r#"{"x":1}"#),
        (r#"{ "x" : 1 , "oz0/call" : {} , "y" : 2 }"#, r#"{ "x" : 1 , "y" : 2 }"#),
        (r#"{ "x" : 1 , "oz0/call" : {} }"#, r#"{ "x" : 1 }"#),
        (r#"{ "oz0/call" : {} }"#, r#"{  }"#),
        (r#"{"oz0/call":1}"#, r#"{}"#),
        (r#"{"oz0/call":1,"gone":2}"#, r#"{}"#),
        (r#"{"oz0/call":1,"x":0,"gone":2}"#, r#"{"x":0}"#),
        (r#"{"x":0,"oz0/call":1,"gone":2}"#, r#"{"x":0}"#),
        (r#"{"oz0/call":1,"gone":2,"x":0}"#, r#"{"x":0}"#),
        (r#"{"gone":1,"gone":2,"x":0,"g\u006fne":3}"#, r#"{"x":0}"#),
        (r#"{"x":{"gone":1}}"#, r#"{"x":{"gone":1}}"#),
    ] {
        assert_eq!(spliced(&body(before), &[], &["oz0/call", "gone"]), body(after), "{before}");
    }
}

#[test]
fn cutting_and_adding_in_one_pass_leaves_the_commas_right() {
    let body = |meta: &str| format!(r#"{{"id":1,"method":"m","params":{{"_meta":{meta},"name":"n"}}}}"#);
    for (before, after) in [
        (r#"{"oz0/call":{}}"#, r#"{"oz0/idempotency_key":"j/a"}"#),
        (r#"{"oz0/call":{},"x":1}"#, r#"{"oz0/idempotency_key":"j/a","x":1}"#),
        (r#"{"x":1,"oz0/call":{}}"#, r#"{"oz0/idempotency_key":"j/a","x":1}"#),
        (r#"{}"#, r#"{"oz0/idempotency_key":"j/a"}"#),
    ] {
        assert_eq!(spliced(&body(before), &[KEY], &["oz0/call"]), body(after), "{before}");
    }
    // Named by both, it is replaced.
    let replaced = spliced(&body(r#"{"oz0/idempotency_key":1}"#), &[KEY], &["oz0/idempotency_key"]);
    assert_eq!(replaced, body(r#"{"oz0/idempotency_key":"j/a"}"#));
}

#[test]
fn what_the_node_set_is_never_overwritten() {
    for set in [r#""""#, "null", "1", r#""k""#] {
        for key in ["oz0/idempotency_key", "oz0\\/idempotency_key", "\\u006fz0/idempotency_key"] {
            let body = format!(r#"{{"id":1,"method":"m","params":{{"_meta":{{"{key}":{set}}}}}}}"#);
            assert_eq!(spliced(&body, &[KEY], &[]), body);
        }
    }
}

#[test]
fn what_cannot_or_need_not_be_changed_is_the_same_buffer() {
    for body in [
        r#"{"id":1,"method":"m","params":[]}"#,
        r#"{"id":1,"method":"m","params":null}"#,
        r#"{"id":1,"method":"m","params":{"_meta":[]}}"#,
        r#"{"id":1,"method":"m","params":{"_meta":null}}"#,
        r#"{"id":1,"method":"m","params":{"_meta":"{}"}}"#,
        r#"{"id":null,"method":"m","params":{"_meta":{"oz0/call":1}}}"#,
        r#"{"id":1,"result":{}}"#,
        r#"[{"id":1,"method":"m","params":{}}]"#,
        r#"[]"#,
    ] {
        let body = Bytes::from(body);
        let message = classify(&body).unwrap();
        let after = meta(&body, &message, &[KEY], &["oz0/call"]);
        assert_eq!((after.as_ptr(), after.len()), (body.as_ptr(), body.len()), "{body:?}");
    }
    let body = Bytes::from(r#"{"id":1,"method":"m"}"#);
    let message = classify(&body).unwrap();
    assert_eq!(meta(&body, &message, &[], &["oz0/call"]).as_ptr(), body.as_ptr());
}

/// JSON text as odd as clients write it: white space, huge numbers, escapes, repeated keys.
fn odd_json() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(vec![
        "null",
        "true",
        "1.0",
        "1e2",
        "-0",
        "9223372036854775808",
        "123456789012345678901234567890",
        "\"\\u00e9\"",
        "\"\\/\"",
        "\"a\\\"}{\"",
        "\"é😀\"",
        "\"\"",
    ])
    .prop_map(str::to_owned);
    leaf.prop_recursive(4, 24, 4, |inner| {
        let key = prop::sample::select(vec![
            "\"a\"",
            "\"\\u0061\"",
            "\"b\"",
            "\"_meta\"",
            "\"name\"",
            "\"oz0/call\"",
        ]);
        let member = (space(), key, space(), inner.clone())
            .prop_map(|(a, key, b, value)| format!("{a}{key}{b}:{value}"));
        prop_oneof![
            (prop::collection::vec(member, 0..4), space())
                .prop_map(|(of, end)| format!("{{{}{end}}}", of.join(","))),
            (prop::collection::vec(inner, 0..4), space())
                .prop_map(|(of, end)| format!("[{}{end}]", of.join(" , "))),
        ]
    })
}

fn space() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["", " ", "\n", "\t \r\n"])
}

/// A `_meta`, `params` and message around `odd_json`, members in any order and each there or not.
fn odd_message() -> impl Strategy<Value = String> {
    let object = |keys: &'static [&'static str], values: Vec<BoxedStrategy<String>>| {
        let members: Vec<_> = keys
            .iter()
            .zip(values)
            .map(|(key, value)| {
                (any::<bool>(), space(), space(), value).prop_map(move |(there, a, b, value)| {
                    there.then(|| format!("{a}\"{key}\"{b}:{a}{value}{b}"))
                })
            })
            .collect();
        (members, space(), any::<prop::sample::Index>()).prop_map(|(members, end, turn)| {
            let mut members: Vec<_> = members.into_iter().flatten().collect();
            if !members.is_empty() {
                let by = turn.index(members.len());
                members.rotate_left(by);
            }
            format!("{{{}{end}}}", members.join(","))
        })
    };
    let odd = || odd_json().boxed();
    let meta = object(&["x", "oz0/call", "oz0/idempotency_key", "y"], vec![odd(), odd(), odd(), odd()]);
    let meta = prop_oneof![4 => meta, 1 => odd_json()].boxed();
    let params = object(&["arguments", "_meta", "z"], vec![odd(), meta, odd()]);
    let params = prop_oneof![6 => params, 1 => odd_json()].boxed();
    object(&["jsonrpc", "params", "extra"], vec![Just("\"2.0\"".to_owned()).boxed(), params, odd()]).prop_map(
        |object| {
            format!(
                " {{\"id\":1,\"method\":\"tools/call\"{}{}",
                if object[1..].trim() == "}" { "" } else { "," },
                &object[1..]
            )
        },
    )
}

/// The message without the members under test, as values.
fn without(json: &str, keys: &[&str]) -> Value {
    let mut value: Value = serde_json::from_str(json).unwrap();
    let params = value.get_mut("params");
    if let Some(meta) = params.and_then(|params| params.get_mut("_meta")).and_then(Value::as_object_mut) {
        keys.iter().for_each(|key| _ = meta.remove(*key));
    }
    value
}

proptest! {
    #[test]
    fn the_result_says_the_same_but_for_our_members(body in odd_message()) {
        // Repeated members inside `params` and `_meta` that count are refused before any splice.
        let bytes = Bytes::copy_from_slice(body.as_bytes());
        prop_assume!(classify(&bytes).is_ok());
        let message = classify(&bytes).unwrap();
        let add = [KEY, ("oz0/resume", "{\"token\":\"t\",\"progress\":1}")];
        let after = spliced(&body, &add, &["oz0/call"]);

        // Outside the splice, byte for byte.
        let around = match (&message.params.meta, &message.params.object) {
            (Meta::Object(meta), _) => meta.object.start + 1..meta.object.end - 1,
            (_, Some(params)) => params.start + 1..params.start + 1,
            _ => message.object.end - 1..message.object.end - 1,
        };
        let tail = &body[around.end..];
        prop_assert!(after.starts_with(body[..around.start].trim_end()));
        prop_assert!(after.ends_with(tail));
        if let Some(arguments) = &message.params.arguments {
            let again = classify(&Bytes::copy_from_slice(after.as_bytes())).unwrap();
            prop_assert_eq!(&after[again.params.arguments.unwrap()], &body[arguments.clone()]);
        }

        // And in meaning; ours are there, and what was there before stands.
        let said: Value = serde_json::from_str(&after).unwrap();
        let may_have_meta = message.params.object.is_some() || message.params_value.is_none();
        if may_have_meta && !matches!(message.params.meta, Meta::NotObject) {
                let meta = &said["params"]["_meta"];
                prop_assert!(meta.get("oz0/call").is_none());
                prop_assert_eq!(&meta["oz0/resume"]["token"], "t");
                let before: Value = serde_json::from_str(&body).unwrap();
                let key = before.pointer("/params/_meta/oz0~1idempotency_key").cloned();
                prop_assert_eq!(&meta["oz0/idempotency_key"], &key.unwrap_or("j/a".into()));
        }
        let ours = ["oz0/call", "oz0/idempotency_key", "oz0/resume"];
        let mut emptied = without(&after, &ours);
        let before = without(&body, &ours);
        if matches!(message.params.meta, Meta::Absent) && before != emptied {
            // Made by us, and empty without ours.
            prop_assert_eq!(&emptied["params"]["_meta"], &Value::Object(Default::default()));
            let params = emptied["params"].as_object_mut().unwrap();
            params.remove("_meta");
            if message.params_value.is_none() {
                prop_assert!(params.is_empty());
                emptied.as_object_mut().unwrap().remove("params");
            }
        }
        prop_assert_eq!(before, emptied);
    }
}
