use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn id(token: &str) -> Id {
    Id::parse(token.as_bytes()).unwrap()
}

fn granted(filter: &str) -> Filter {
    let data = format!(
        r#"{{"jsonrpc":"2.0","params":{{"notifications":{filter}}},"method":"notifications/subscriptions/acknowledged"}}"#
    );
    match look(data.as_bytes()) {
        Some(Said::Acknowledged(Some(filter))) => filter,
        other => panic!("{data}: {other:?}"),
    }
}

fn renamed(data: &str, from: &str, to: &str) -> Option<String> {
    let bytes = rename(&Bytes::from(data.to_owned()), &id(from), &id(to))?;
    Some(String::from_utf8(bytes.to_vec()).unwrap())
}

#[test]
fn a_filter_is_plain_if_it_says_only_what_is_known() {
    for plain in [
        "{}",
        r#"{"toolsListChanged":true,"promptsListChanged":false,"resourcesListChanged":true}"#,
        r#"{"resourceSubscriptions":["a","b\u002fc"]}"#,
        r#"{"resourceSubscriptions":[]}"#,
    ] {
        assert!(granted(plain).is_plain(), "{plain}");
    }
    for odd in [
        "[]",
        "null",
        r#"{"taskIds":["t"]}"#,
        r#"{"taskIds":[]}"#,
        r#"{"somethingNew":false}"#,
        r#"{"toolsListChanged":"yes"}"#,
        r#"{"toolsListChanged":null}"#,
        r#"{"resourceSubscriptions":"a"}"#,
        r#"{"resourceSubscriptions":["a",1]}"#,
        r#"{"resourceSubscriptions":["\ud800"]}"#,
    ] {
        assert!(!granted(odd).is_plain(), "{odd}");
    }
    let body =
        br#"{"id":1,"method":"subscriptions/listen","params":{"notifications":{"taskIds":[]},"_meta":{}}}"#;
    assert!(!filter(body).unwrap().is_plain());
    assert_eq!(filter(br#"{"id":1,"params":{"_meta":{"notifications":{}}}}"#), None);
}

#[test]
fn a_filter_covers_one_that_asks_no_more() {
    let all = granted(r#"{"toolsListChanged":true,"resourceSubscriptions":["a","b"]}"#);
    for within in [
        "{}",
        r#"{"toolsListChanged":true}"#,
        r#"{"resourceSubscriptions":["b"],"promptsListChanged":false}"#,
        r#"{"resourceSubscriptions":["b","\u0061"],"toolsListChanged":true}"#,
    ] {
        assert!(all.covers(&granted(within)), "{within}");
    }
    for beyond in [r#"{"promptsListChanged":true}"#, r#"{"resourceSubscriptions":["a","b","c"]}"#] {
        assert!(!all.covers(&granted(beyond)), "{beyond}");
    }
}

#[test]
fn there_is_one_change_for_each_kind_and_each_resource() {
    let filter = granted(
        r#"{"resourceSubscriptions":["a\"b","c","a\u0022b"],"resourcesListChanged":true,"toolsListChanged":true}"#,
    );
    let changes: Vec<Value> = (0..)
        .map_while(|n| filter.change(n, &id("0")))
        .map(|json| serde_json::from_slice(&json).unwrap())
        .collect();
    let told: Vec<_> =
        changes.iter().map(|one| (one["method"].as_str().unwrap(), &one["params"]["uri"])).collect();
    assert_eq!(
        told,
        [
            ("notifications/tools/list_changed", &Value::Null),
            ("notifications/resources/list_changed", &Value::Null),
            ("notifications/resources/updated", &"a\"b".into()),
            ("notifications/resources/updated", &"c".into()),
        ]
    );
    for change in changes {
        assert_eq!(change["params"]["_meta"][SUBSCRIPTION_ID], 0);
        assert_eq!(change["jsonrpc"], "2.0");
    }
    assert_eq!(granted("{}").change(0, &id("1")), None);
}

#[test]
fn only_an_acknowledgement_and_a_cancel_speak_of_the_subscription_itself() {
    let cancelled = br#"{"method":"notifications\/cancelled","params":{"requestId":"1","reason":"r"}}"#;
    assert_eq!(look(cancelled), Some(Said::Cancelled(Some(id("\"1\"")))));
    assert_eq!(look(br#"{"method":"notifications/cancelled"}"#), Some(Said::Cancelled(None)));
    for other in [
        &br#"{"method":"notifications/tools/list_changed","params":{"notifications":{}}}"#[..],
        br#"{"id":1,"result":{}}"#,
        br#"{"method":"notifications/cancelled"} x"#,
        b"[]",
        b"",
    ] {
        assert_eq!(look(other), None);
    }
}

#[test]
fn a_request_under_another_id_differs_in_nothing_else() {
    let body = Bytes::from_static(br#"{ "params":{"id":7, "x":1.0},"id" : 7 ,"method":"m\u0061" }"#);
    let again = with_id(&body, &id("\"new\""));
    assert_eq!(again, &br#"{ "params":{"id":7, "x":1.0},"id" : "new" ,"method":"m\u0061" }"#[..]);
}

#[test]
fn a_message_names_the_other_subscription_with_its_type() {
    for to in ["7", "\"7\"", "0", "\"\\u00e9\""] {
        let message = |id: &str| {
            format!(
                r#"{{"method":"n", "params":{{"_meta":{{ "a":"new","io.modelcontextprotocol\/subscriptionId" : {id} }},"id":"new"}}}}"#
            )
        };
        assert_eq!(renamed(&message("\"new\""), "\"new\"", to), Some(message(to)));
        let result = |id: &str| {
            format!(
                r#"{{"id":{id},"result":{{"_meta":{{"io.modelcontextprotocol/subscriptionId":{id}}},"resultType":"complete"}}}}"#
            )
        };
        assert_eq!(renamed(&result("\"n\\u0065w\""), "\"new\"", to), Some(result(to)));
        let cancel =
            |id: &str| format!(r#"{{"method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
        assert_eq!(renamed(&cancel("\"new\""), "\"new\"", to), Some(cancel(to)));
    }
}

#[test]
fn what_names_another_subscription_or_none_stays() {
    for data in [
        r#"{"method":"n","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":"other"}}}"#,
        r#"{"method":"n","params":{"io.modelcontextprotocol/subscriptionId":"new","_meta":"new"}}"#,
        r#"{"method":"n","params":["new"]}"#,
        r#"{"id":null,"error":{"data":"new"}}"#,
        r#"["new"]"#,
        "\"new\"",
        "{",
    ] {
        assert_eq!(renamed(data, "\"new\"", "1"), None, "{data}");
    }
}

proptest! {
    #[test]
    fn renaming_there_and_back_gives_the_same_bytes(space in "[ \t\n]{0,3}", text in "\\PC{0,8}", number in any::<u32>()) {
        let text = serde_json::to_string(&text).unwrap();
        let data = format!(
            r#"{space}{{"method":{text},{space}"params":{{"x":{number}.0,"_meta":{{{space}"io.modelcontextprotocol/subscriptionId":{number}{space}}}}}}}"#
        );
        let there = renamed(&data, &number.to_string(), "\"unlike anything\"").unwrap();
        prop_assert_eq!(renamed(&there, "\"unlike anything\"", &number.to_string()), Some(data));
    }
}
