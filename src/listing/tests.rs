use serde_json::{Value, json};

use super::*;

/// The answer to a `tools/list`.
fn page(tools: &Value) -> Vec<u8> {
    json!({ "jsonrpc": "2.0", "id": 1, "result": { "tools": tools, "ttlMs": 5 } }).to_string().into_bytes()
}

fn read_only(name: &str) -> Value {
    json!({ "name": name, "annotations": { "readOnlyHint": true } })
}

fn keyed(name: &str) -> Value {
    json!({ "name": name, "annotations": { "idempotentHint": true },
            "_meta": { "oz0/idempotency_key": true, "oz0/resume": true } })
}

fn listing_of(tools: &Value) -> Listing {
    let listing = Listing::default();
    listing.learn("up", &page(tools));
    listing
}

fn approval(of: &Value) -> Rules {
    let tools = tools_of(&page(of)).into_iter().filter_map(|tool| Some((tool.name, tool.digest?))).collect();
    Rules { approved: Some(Arc::new(Approval::new(String::new(), tools))), ..Rules::default() }
}

fn overriding(name: &str, own: Override) -> Rules {
    Rules { overrides: [(name.to_owned(), own)].into(), ..Rules::default() }
}

#[test]
fn the_class_follows_from_the_hints() {
    let none = Rules::default();
    let only = |name: &str, idempotent, key| json!({ "name": name, "annotations": { "idempotentHint": idempotent }, "_meta": { "oz0/idempotency_key": key } });
    let tools = json!([read_only("get"), keyed("charge"), only("a", true, false), only("b", false, true), { "name": "c" }]);
    let listing = listing_of(&tools);
    let class = |tool| listing.known("up", &none, tool).class;
    assert_eq!([class("get"), class("charge")], [RetryClass::Safe, RetryClass::Conditional]);
    for tool in ["a", "b", "c", "never listed"] {
        assert_eq!(class(tool), RetryClass::Unsafe, "{tool}");
    }
    let charge = listing.known("up", &none, "charge");
    assert!(charge.listed && charge.idempotent && charge.honours_key && charge.resume && !charge.read_only);
    assert!(!charge.changed && charge.approved.is_none());
    assert!(!listing.known("up", &none, "never listed").listed);
    assert!(!listing.known("another", &none, "get").listed, "each upstream has its own tools");
    let names = [RetryClass::Safe, RetryClass::Conditional, RetryClass::Unsafe].map(RetryClass::name);
    assert_eq!(names, ["safe", "conditional", "unsafe"]);
}

#[test]
fn the_digest_is_that_of_the_canonical_form_of_the_whole_entry() {
    let one = br#"{"result":{"tools":[{"name":"a","n":1.0,"annotations":{"readOnlyHint":true}}]}}"#;
    let two =
        br#"{"id":7,"result":{"tools":[ {"annotations":{"readOnlyHint":true},"n":1,"name":"\u0061"} ]}}"#;
    let digest = tools_of(one)[0].digest.clone().unwrap();
    assert_eq!(Some(&digest), tools_of(two)[0].digest.as_ref());
    let form = br#"{"annotations":{"readOnlyHint":true},"n":1,"name":"a"}"#;
    assert_eq!(digest, hex(&Sha256::digest(form)));
    let other = br#"{"result":{"tools":[{"name":"a","n":2,"annotations":{"readOnlyHint":true}}]}}"#;
    assert_ne!(Some(digest), tools_of(other)[0].digest);
}

#[test]
fn overrides_win_member_by_member() {
    let listing = listing_of(&json!([read_only("get"), keyed("charge")]));
    let not_read_only = Override { read_only: Some(false), ..Override::default() };
    assert_eq!(listing.known("up", &overriding("get", not_read_only), "get").class, RetryClass::Unsafe);
    let keyless = Override { honours_key: Some(false), ..Override::default() };
    let charge = listing.known("up", &overriding("charge", keyless), "charge");
    assert!(charge.idempotent && charge.resume && !charge.honours_key);
    assert_eq!(charge.class, RetryClass::Unsafe);
}

#[test]
fn a_tool_that_only_the_configuration_names_counts_as_listed() {
    let own = Override { idempotent: Some(true), honours_key: Some(true), ..Override::default() };
    let known = Listing::default().known("up", &overriding("charge", own), "charge");
    assert!(known.listed && !known.changed);
    assert_eq!((known.class, known.digest), (RetryClass::Conditional, None));
    let empty = Listing::default().known("up", &overriding("x", Override::default()), "x");
    assert!(empty.listed);
    assert_eq!(empty.class, RetryClass::Unsafe);
}

#[test]
fn with_an_approval_hints_count_only_for_tools_as_they_were_approved() {
    let rules = approval(&json!([read_only("get"), keyed("charge"), read_only("later")]));
    let mut louder = read_only("get");
    louder["description"] = "now with more".into();
    let listing = listing_of(&json!([louder, keyed("charge"), read_only("fresh")]));
    let charge = listing.known("up", &rules, "charge");
    assert_eq!((charge.class, charge.changed, charge.approved), (RetryClass::Conditional, false, Some(true)));
    for tool in ["get", "fresh"] {
        let known = listing.known("up", &rules, tool);
        assert!(known.listed && known.changed && !known.read_only && !known.resume, "{tool}");
        assert_eq!((known.class, known.approved), (RetryClass::Unsafe, Some(false)), "{tool}");
    }
}

#[test]
fn an_approved_tool_that_no_listing_showed_yet_has_not_changed() {
    let rules = approval(&json!([read_only("get")]));
    let known = Listing::default().known("up", &rules, "get");
    assert!(!known.listed && !known.changed && known.approved.is_none());
    assert_eq!(known.class, RetryClass::Unsafe, "no hint of it is known");
    assert!(Listing::default().known("up", &rules, "fresh").changed, "neither approved nor named: it is new");
}

#[test]
fn a_changed_tool_stays_changed_but_an_override_still_says_what_it_is() {
    let own = Override { read_only: Some(true), ..Override::default() };
    let rules = Rules { approved: approval(&json!([])).approved, ..overriding("get", own) };
    let seen = listing_of(&json!([read_only("get")])).known("up", &rules, "get");
    assert!(seen.changed && seen.read_only);
    assert_eq!(seen.class, RetryClass::Safe);
    assert!(
        !Listing::default().known("up", &rules, "get").changed,
        "the operator named what no listing showed"
    );
}

#[test]
fn learning_gives_only_what_is_new_or_has_changed() {
    let listing = Listing::default();
    let both = json!([read_only("get"), keyed("charge")]);
    let keys = |records: Vec<Record>| records.into_iter().map(|record| record.key).collect::<Vec<_>>();
    assert_eq!(keys(listing.learn("up", &page(&both))), ["up\0charge", "up\0get"]);
    assert!(listing.learn("up", &page(&both)).is_empty());
    assert_eq!(keys(listing.learn("up", &page(&json!([{ "name": "get" }])))), ["up\0get"]);
    assert_eq!(listing.known("up", &Rules::default(), "get").class, RetryClass::Unsafe, "at once");
    assert!(listing.known("up", &Rules::default(), "charge").listed, "another page may have it");
    for other in [&b"no json"[..], b"", br#"{"id":1,"error":{"code":-32601,"message":"no"}}"#] {
        assert!(listing.learn("up", other).is_empty());
    }
}

#[test]
fn what_was_stored_is_the_same_after_a_restart() {
    let listing = listing_of(&json!([read_only("get"), keyed("charge")]));
    let again = Listing::default();
    again.load("up", listing.stored("up"));
    let rules = Rules::default();
    assert_eq!(again.all("up", &rules), listing.all("up", &rules));
    assert!(listing.stored("up").iter().all(|record| record.key.starts_with(&key_prefix("up"))));

    let newer = listing_of(&json!([{ "name": "get" }]));
    newer.load("up", listing.stored("up"));
    assert!(!newer.known("up", &rules, "get").read_only, "what was learnt since is newer");
    let odd = |key: &str, value: &str| Record { key: key.into(), value: value.into() };
    let none = Listing::default();
    none.load("up", [odd("up\0x", "{"), odd("other\0x", r#"{"name":"x"}"#), odd("up\0x", r#"{"name":"y"}"#)]);
    assert!(none.all("up", &rules).is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_another_sidecar_learnt_is_taken_once_what_was_learnt_here_is_no_longer_fresh() {
    let rules = Rules::default();
    let here = listing_of(&json!([read_only("get")]));
    let elsewhere = listing_of(&json!([{ "name": "get" }]));
    here.load("up", elsewhere.stored("up"));
    assert!(here.known("up", &rules, "get").read_only, "the store may not have it yet");
    tokio::time::advance(FRESH).await;
    here.load("up", elsewhere.stored("up"));
    assert!(!here.known("up", &rules, "get").read_only);
    here.load("up", listing_of(&json!([read_only("get")])).stored("up"));
    assert!(here.known("up", &rules, "get").read_only, "what came from the store goes with the store");
}

#[test]
fn an_entry_that_has_no_one_meaning_is_not_learnt_and_takes_back_what_was_known() {
    let none = Rules::default();
    let twice =
        br#"{"result":{"tools":[{"name":"get","annotations":{"readOnlyHint":false,"readOnlyHint":true}}]}}"#;
    let unlike = page(&json!([read_only("get"), { "name": "get" }]));
    for answer in [&twice[..], &unlike] {
        assert!(tools_of(answer).is_empty());
        let listing = Listing::default();
        assert!(listing.learn("up", answer).is_empty());
        assert!(!listing.known("up", &none, "get").listed);
        let listing = listing_of(&json!([read_only("get")]));
        assert_eq!(listing.learn("up", answer).len(), 1);
        let known = listing.known("up", &none, "get");
        assert_eq!((known.listed, known.class, known.digest), (true, RetryClass::Unsafe, None));
        assert!(listing.known("up", &approval(&json!([read_only("get")])), "get").changed);
    }
    assert_eq!(
        tools_of(&page(&json!([read_only("get"), read_only("get")]))).len(),
        1,
        "twice the same is one"
    );
    let odd = json!([{ "name": "" }, { "name": 5 }, { "name": "x".repeat(2000) }, 7, null, read_only("get")]);
    assert_eq!(tools_of(&page(&odd)).len(), 1);
}

#[test]
fn memory_is_bounded_and_what_is_known_can_still_change() {
    let listing = Listing::default();
    let tools: Vec<_> = (0..MOST_TOOLS).map(|n| json!({ "name": format!("t{n}") })).collect();
    assert_eq!(listing.learn("up", &page(&tools.into())).len(), MOST_TOOLS);
    let more = page(&json!([read_only("one more"), read_only("t0")]));
    assert_eq!(listing.learn("up", &more).len(), 1);
    let none = Rules::default();
    assert!(!listing.known("up", &none, "one more").listed && listing.known("up", &none, "t0").read_only);
    assert_eq!(listing.all("up", &none).len(), MOST_TOOLS);
}

#[test]
fn an_operator_sees_every_tool_by_name_also_those_only_the_configuration_names() {
    let listing = listing_of(&json!([keyed("charge"), read_only("get")]));
    let own = Override { read_only: Some(true), ..Override::default() };
    let rules = Rules {
        overrides: [("by hand".to_owned(), own), ("get".to_owned(), Override::default())].into(),
        ..approval(&json!([keyed("charge")]))
    };
    let all = listing.all("up", &rules);
    let seen: Vec<_> =
        all.iter().map(|(tool, known)| (&*tool.name, known.class.name(), known.approved)).collect();
    assert_eq!(
        seen,
        [("by hand", "safe", None), ("charge", "conditional", Some(true)), ("get", "unsafe", Some(false))]
    );
}

#[test]
fn the_file_of_an_approval_is_strict_and_reads_back() {
    let digest = "ab".repeat(32);
    let approval = Approval::new("http://x/mcp".into(), [("get".to_owned(), digest.clone())].into());
    assert_eq!(Approval::parse(&approval.text()), Ok(approval));
    for (text, says) in [
        ("", "EOF"),
        ("[]", "invalid length"),
        ("{}", "missing field `tools`"),
        (r#"{"tools":{},"tool":{}}"#, "unknown field `tool`"),
        (&format!(r#"{{"tools":{{"get":"{}"}}}}"#, digest.to_uppercase()), "64 lower-case"),
        (&format!(r#"{{"tools":{{"get":"{digest}","get":"{digest}"}}}}"#), "duplicate members"),
    ] {
        let error = Approval::parse(text).expect_err(text);
        assert!(error.contains(says), "{text}: {error}");
    }
}
