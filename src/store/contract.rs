//! What every store promises, as tests that each of them runs (see `store.rs`).

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{Bounds, Change, Error, MAX_KEY, MAX_VALUE, Name, Store, Table, Usage, View, Write, update_with};

/// Where stores are opened; all that one place opens hold the same records.
pub(super) trait Place {
    fn open(&self, bounds: Bounds) -> impl Future<Output = Arc<dyn Store>>;

    /// Lets time pass on the store's clock.
    fn pass(&self, millis: u64) -> impl Future<Output = ()>;
}

/// Runs every test against the place that an expression makes.
macro_rules! every_test {
    ($place:expr; $($test:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                crate::store::contract::$test($place).await;
            }
        )*
    };
    ($place:expr) => {
        crate::store::contract::every_test! { $place;
            what_is_put_is_there_until_it_is_deleted
            any_text_is_a_key_and_any_bytes_are_a_value
            one_key_in_two_tables_is_two_records
            a_change_sees_its_records_in_the_order_asked
            a_change_can_say_something
            fifty_increments_at_once_make_fifty
            two_records_change_as_one
            a_change_that_breaks_a_rule_writes_nothing
            what_breaks_a_rule_before_it_runs_is_refused
            an_expired_record_is_as_absent
            what_has_expired_takes_no_room
            an_expiry_can_be_kept_moved_and_taken_away
            what_is_put_with_a_past_expiry_is_absent
            at_its_bound_a_table_has_no_room_and_forgets_nothing
            room_means_room_for_all_that_is_asked
            counters_have_four_times_the_room
            the_oldest_results_make_room
            a_result_over_the_bound_is_not_kept
            a_scan_finds_what_begins_with_the_prefix
            usage_counts_records_and_bytes
            it_answers_a_ping
        }
    };
}
pub(super) use every_test;

pub(super) const AMPLE: Bounds = Bounds { max_keys: 1000, max_result_bytes: 1 << 20 };

pub(super) fn key(key: &str) -> Name {
    Name::new(Table::Keys, key)
}

/// One write, whatever is there.
pub(super) async fn write(store: &dyn Store, name: Name, write: Write) -> Result<(), Error> {
    store.update(vec![name], Box::new(move |_: &View<'_>| vec![write.clone()])).await
}

pub(super) async fn put(store: &dyn Store, name: Name, value: &[u8]) -> Result<(), Error> {
    write(store, name, Write::Put { value: value.to_vec(), expires: None }).await
}

/// Puts a record that expires `millis` after the store's now.
async fn put_for(store: &dyn Store, name: Name, millis: u64) {
    let change: Change = Box::new(move |view: &View<'_>| {
        vec![Write::Put { value: b"v".to_vec(), expires: Some(view.now + millis) }]
    });
    store.update(vec![name], change).await.expect("put");
}

pub(super) async fn get(store: &dyn Store, name: Name) -> Option<Vec<u8>> {
    store.get(name).await.expect("got")
}

async fn has_room(store: &dyn Store, names: Vec<Name>) -> bool {
    let table = names[0].table;
    let count = names.len();
    update_with(store, names, move |view| (vec![Write::Keep; count], (view.room)(table)))
        .await
        .expect("asked")
}

/// Adds one to a number, and says what it is then.
pub(super) async fn increment(store: &dyn Store, name: Name) -> Result<u64, Error> {
    update_with(store, vec![name], |view| {
        let next = number(view.records[0]) + 1;
        (vec![Write::Put { value: next.to_string().into_bytes(), expires: None }], next)
    })
    .await
}

fn number(value: Option<&[u8]>) -> u64 {
    value.map_or(0, |value| std::str::from_utf8(value).expect("text").parse().expect("number"))
}

pub(super) async fn what_is_put_is_there_until_it_is_deleted(place: impl Place) {
    let store = place.open(AMPLE).await;
    assert_eq!(get(&*store, key("a")).await, None);
    put(&*store, key("a"), b"1").await.expect("put");
    assert_eq!(get(&*store, key("a")).await, Some(b"1".to_vec()));
    put(&*store, key("a"), b"longer").await.expect("put");
    write(&*store, key("a"), Write::Keep).await.expect("kept");
    let other = place.open(AMPLE).await;
    assert_eq!(get(&*other, key("a")).await, Some(b"longer".to_vec()));
    write(&*other, key("a"), Write::Delete).await.expect("deleted");
    assert_eq!(get(&*store, key("a")).await, None);
    write(&*store, key("a"), Write::Delete).await.expect("deleting what is not there is nothing");
    assert_eq!(store.usage(Table::Keys).await, Ok(Usage::default()));
}

pub(super) async fn any_text_is_a_key_and_any_bytes_are_a_value(place: impl Place) {
    let store = place.open(AMPLE).await;
    let keys = ["", " ", "a b\nc\0d", "%_*?[x]'\";--", "12 ключ 鍵", &"k".repeat(MAX_KEY)];
    let values: [&[u8]; 6] = [b"", b"\0", b"\xff\xfe", b"\r\n$5\r\n", b"'", &[7; 70_000]];
    for (name, value) in keys.iter().zip(values) {
        put(&*store, key(name), value).await.expect("put");
    }
    for (name, value) in keys.iter().zip(values) {
        assert_eq!(get(&*store, key(name)).await.as_deref(), Some(value), "{name:?}");
    }
    let largest = vec![1; MAX_VALUE];
    put(&*store, Name::new(Table::Tools, "large"), &largest).await.expect("put");
    assert_eq!(get(&*store, Name::new(Table::Tools, "large")).await, Some(largest));
}

pub(super) async fn one_key_in_two_tables_is_two_records(place: impl Place) {
    let store = place.open(AMPLE).await;
    for table in Table::ALL {
        put(&*store, Name::new(table, "same"), table.name().as_bytes()).await.expect("put");
    }
    for table in Table::ALL {
        assert_eq!(get(&*store, Name::new(table, "same")).await.as_deref(), Some(table.name().as_bytes()));
    }
}

pub(super) async fn a_change_sees_its_records_in_the_order_asked(place: impl Place) {
    let store = place.open(AMPLE).await;
    put(&*store, key("a"), b"1").await.expect("put");
    put(&*store, Name::new(Table::Counters, "b"), b"2").await.expect("put");
    let names = vec![Name::new(Table::Counters, "b"), key("none"), key("a")];
    let seen = update_with(&*store, names.clone(), |view| {
        let seen: Vec<_> = view.records.iter().map(|record| record.map(<[u8]>::to_vec)).collect();
        let put = Write::Put { value: b"new".to_vec(), expires: None };
        (vec![Write::Delete, put, Write::Keep], seen)
    });
    assert_eq!(seen.await, Ok(vec![Some(b"2".to_vec()), None, Some(b"1".to_vec())]));
    let mut now = Vec::new();
    for name in names {
        now.push(get(&*store, name).await);
    }
    assert_eq!(now, [None, Some(b"new".to_vec()), Some(b"1".to_vec())]);
}

pub(super) async fn a_change_can_say_something(place: impl Place) {
    let store = place.open(AMPLE).await;
    assert_eq!(update_with(&*store, vec![key("a")], |_| (vec![Write::Keep], "said")).await, Ok("said"));
    let refused = update_with(&*store, vec![key("a")], |_| (vec![], "not committed")).await;
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
}

pub(super) async fn fifty_increments_at_once_make_fifty(place: impl Place) {
    let stores = [place.open(AMPLE).await, place.open(AMPLE).await];
    let name = Name::new(Table::Counters, "n");
    let tasks: Vec<_> = (0..50)
        .map(|i: usize| {
            let (store, name) = (stores[i % 2].clone(), name.clone());
            tokio::spawn(async move { increment(&*store, name).await })
        })
        .collect();
    let mut counted = Vec::new();
    for task in tasks {
        counted.push(task.await.expect("no panic").expect("counted"));
    }
    counted.sort_unstable();
    assert_eq!(counted, (1..=50).collect::<Vec<_>>(), "each number is handed out once");
    assert_eq!(get(&*stores[0], name).await, Some(b"50".to_vec()));
}

pub(super) async fn two_records_change_as_one(place: impl Place) {
    let stores = [place.open(AMPLE).await, place.open(AMPLE).await];
    put(&*stores[0], key("from"), b"1000").await.expect("put");
    let tasks: Vec<_> = (0..40)
        .map(|i: usize| {
            let store = stores[i % 2].clone();
            tokio::spawn(async move {
                // Every second one names them the other way round.
                let (from, to) = if i % 4 < 2 { (0, 1) } else { (1, 0) };
                let mut names = vec![key("from"), key("to")];
                if from == 1 {
                    names.reverse();
                }
                update_with(&*store, names, move |view| {
                    let held = [number(view.records[from]), number(view.records[to])];
                    let put =
                        |value: u64| Write::Put { value: value.to_string().into_bytes(), expires: None };
                    let mut writes = vec![put(held[0] - 1), put(held[1] + 1)];
                    if from == 1 {
                        writes.reverse();
                    }
                    (writes, held[0] + held[1])
                })
                .await
            })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.expect("no panic"), Ok(1000), "nobody sees one without the other");
    }
    assert_eq!(get(&*stores[1], key("from")).await, Some(b"960".to_vec()));
    assert_eq!(get(&*stores[1], key("to")).await, Some(b"40".to_vec()));
}

pub(super) async fn a_change_that_breaks_a_rule_writes_nothing(place: impl Place) {
    let store = place.open(AMPLE).await;
    put(&*store, key("a"), b"old").await.expect("put");
    let new = || Write::Put { value: b"new".to_vec(), expires: None };
    let large = || Write::Put { value: vec![0; MAX_VALUE + 1], expires: None };
    let changes: [Change; 4] = [
        Box::new(move |_| vec![new()]),
        Box::new(move |_| vec![new(), new(), new()]),
        Box::new(move |_| vec![new(), large()]),
        Box::new(|_| panic!("as a test of what comes of it")),
    ];
    for change in changes {
        let outcome = store.update(vec![key("a"), key("b")], change).await;
        assert!(matches!(outcome, Err(Error::Refused(_))), "{outcome:?}");
        assert_eq!(get(&*store, key("a")).await, Some(b"old".to_vec()));
        assert_eq!(get(&*store, key("b")).await, None);
    }
    put(&*store, key("a"), b"and on").await.expect("the store goes on");
}

pub(super) async fn what_breaks_a_rule_before_it_runs_is_refused(place: impl Place) {
    let store = place.open(AMPLE).await;
    let many = (0..9).map(|i| key(&i.to_string())).collect();
    let long = key(&"k".repeat(MAX_KEY + 1));
    for names in [vec![], many, vec![key("a"), key("a")], vec![long.clone()]] {
        let ran = Arc::new(AtomicUsize::new(0));
        let runs = Arc::clone(&ran);
        let change: Change = Box::new(move |view| {
            runs.fetch_add(1, Ordering::Relaxed);
            vec![Write::Keep; view.records.len()]
        });
        let outcome = store.update(names, change).await;
        assert!(matches!(outcome, Err(Error::Refused(_))), "{outcome:?}");
        assert_eq!(ran.load(Ordering::Relaxed), 0);
    }
    assert!(matches!(store.get(long).await, Err(Error::Refused(_))));
}

pub(super) async fn an_expired_record_is_as_absent(place: impl Place) {
    let store = place.open(AMPLE).await;
    for table in Table::ALL {
        put_for(&*store, Name::new(table, "soon"), 300).await;
        put_for(&*store, Name::new(table, "later"), 600_000).await;
        assert_eq!(get(&*store, Name::new(table, "later")).await, Some(b"v".to_vec()));
    }
    place.pass(310).await;
    for table in Table::ALL {
        assert_eq!(get(&*store, Name::new(table, "soon")).await, None);
        assert_eq!(store.scan(table, String::new()).await, Ok(vec![("later".into(), b"v".to_vec())]));
        assert_eq!(store.usage(table).await, Ok(Usage { records: 1, bytes: 6 }));
        let seen = update_with(&*store, vec![Name::new(table, "soon")], |view| {
            (vec![Write::Put { value: b"new".to_vec(), expires: None }], view.records[0].is_none())
        });
        assert_eq!(seen.await, Ok(true));
        assert_eq!(get(&*store, Name::new(table, "soon")).await, Some(b"new".to_vec()));
        assert_eq!(store.usage(table).await, Ok(Usage { records: 2, bytes: 6 + 7 }));
    }
}

pub(super) async fn what_has_expired_takes_no_room(place: impl Place) {
    let store = place.open(Bounds { max_keys: 3, ..AMPLE }).await;
    for name in ["a", "b", "c"] {
        put_for(&*store, key(name), 300).await;
    }
    assert!(!has_room(&*store, vec![key("new")]).await);
    place.pass(310).await;
    assert!(has_room(&*store, vec![key("new"), key("a"), key("b")]).await);
    for name in ["new", "a", "b"] {
        put(&*store, key(name), b"v").await.expect("there is room");
    }
    assert!(!has_room(&*store, vec![key("c")]).await);
    assert_eq!(store.usage(Table::Keys).await, Ok(Usage { records: 3, bytes: 8 }));
}

pub(super) async fn an_expiry_can_be_kept_moved_and_taken_away(place: impl Place) {
    let store = place.open(AMPLE).await;
    for name in ["kept", "longer", "for ever"] {
        put_for(&*store, key(name), 400).await;
    }
    put_for(&*store, key("shorter"), 600_000).await;
    write(&*store, key("kept"), Write::Keep).await.expect("kept");
    put_for(&*store, key("longer"), 600_000).await;
    put(&*store, key("for ever"), b"v").await.expect("put");
    put_for(&*store, key("shorter"), 300).await;
    place.pass(410).await;
    let mut there = Vec::new();
    for name in ["kept", "longer", "for ever", "shorter"] {
        there.push(get(&*store, key(name)).await.is_some());
    }
    assert_eq!(there, [false, true, true, false]);
    assert_eq!(store.usage(Table::Keys).await.map(|usage| usage.records), Ok(2));
}

pub(super) async fn what_is_put_with_a_past_expiry_is_absent(place: impl Place) {
    let store = place.open(AMPLE).await;
    put(&*store, key("a"), b"old").await.expect("put");
    put_for(&*store, key("a"), 0).await;
    put_for(&*store, key("b"), 0).await;
    write(&*store, key("c"), Write::Put { value: vec![], expires: Some(0) }).await.expect("put");
    for name in ["a", "b", "c"] {
        assert_eq!(get(&*store, key(name)).await, None);
    }
    assert_eq!(store.usage(Table::Keys).await, Ok(Usage::default()));
}

pub(super) async fn at_its_bound_a_table_has_no_room_and_forgets_nothing(place: impl Place) {
    let bounds = Bounds { max_keys: 3, ..AMPLE };
    let stores = [place.open(bounds).await, place.open(bounds).await];
    for (i, name) in ["a", "b", "c"].into_iter().enumerate() {
        assert!(has_room(&*stores[i % 2], vec![key(name)]).await);
        put(&*stores[i % 2], key(name), b"v").await.expect("put");
    }
    for store in &stores {
        assert!(!has_room(&**store, vec![key("new")]).await);
        assert!(has_room(&**store, vec![key("a")]).await, "what is there needs no room");
        assert_eq!(put(&**store, key("new"), b"v").await, Err(Error::Refused("no room for a new record")));
        put(&**store, key("a"), b"changed").await.expect("what is there can change");
        assert!(has_room(&**store, vec![Name::new(Table::Counters, "x")]).await, "other tables are others");
    }
    write(&*stores[0], key("b"), Write::Delete).await.expect("deleted");
    assert!(has_room(&*stores[1], vec![key("new")]).await);
    put(&*stores[1], key("new"), b"v").await.expect("put");
    let held = stores[0].scan(Table::Keys, String::new()).await.expect("scanned");
    assert_eq!(held.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), ["a", "c", "new"]);
}

pub(super) async fn room_means_room_for_all_that_is_asked(place: impl Place) {
    let store = place.open(Bounds { max_keys: 3, ..AMPLE }).await;
    put(&*store, key("a"), b"v").await.expect("put");
    assert!(has_room(&*store, vec![key("b"), key("c"), key("a")]).await);
    assert!(!has_room(&*store, vec![key("b"), key("c"), key("d")]).await);
}

pub(super) async fn counters_have_four_times_the_room(place: impl Place) {
    let store = place.open(Bounds { max_keys: 2, ..AMPLE }).await;
    for i in 0..8 {
        put(&*store, Name::new(Table::Counters, i.to_string()), b"v").await.expect("put");
    }
    assert!(!has_room(&*store, vec![Name::new(Table::Counters, "new")]).await);
}

pub(super) async fn the_oldest_results_make_room(place: impl Place) {
    let store = place.open(Bounds { max_result_bytes: 400, ..AMPLE }).await;
    let result = |key: &str| Name::new(Table::Results, key);
    for name in ["a", "b", "c", "d"] {
        put(&*store, result(name), &[0; 99]).await.expect("put");
    }
    assert_eq!(store.usage(Table::Results).await, Ok(Usage { records: 4, bytes: 400 }));
    put(&*store, result("a"), &[1; 99]).await.expect("put");
    put(&*store, result("e"), &[0; 149]).await.expect("put");
    let held = store.scan(Table::Results, String::new()).await.expect("scanned");
    let held: BTreeMap<_, _> = held.into_iter().map(|(key, value)| (key, value.len())).collect();
    assert_eq!(held, BTreeMap::from([("a".into(), 99), ("d".into(), 99), ("e".into(), 149)]));
    assert_eq!(store.usage(Table::Results).await, Ok(Usage { records: 3, bytes: 350 }));
    assert!(has_room(&*store, vec![result("new")]).await);
}

pub(super) async fn a_result_over_the_bound_is_not_kept(place: impl Place) {
    let store = place.open(Bounds { max_result_bytes: 400, ..AMPLE }).await;
    let names = vec![key("mark"), Name::new(Table::Results, "large")];
    let change: Change = Box::new(|_| {
        let put = |bytes| Write::Put { value: vec![0; bytes], expires: None };
        vec![put(10), put(500)]
    });
    store.update(names, change).await.expect("the rest is written");
    assert_eq!(get(&*store, key("mark")).await, Some(vec![0; 10]));
    assert_eq!(store.usage(Table::Results).await, Ok(Usage::default()));
}

pub(super) async fn a_scan_finds_what_begins_with_the_prefix(place: impl Place) {
    let store = place.open(AMPLE).await;
    for name in ["b/2", "a/1", "b/1", "b", "b%", "c", "б/1"] {
        put(&*store, Name::new(Table::Tools, name), name.as_bytes()).await.expect("put");
    }
    let scan = async |prefix: &str| -> Vec<String> {
        let found = store.scan(Table::Tools, prefix.into()).await.expect("scanned");
        assert!(found.iter().all(|(key, value)| key.as_bytes() == value));
        found.into_iter().map(|(key, _)| key).collect()
    };
    assert_eq!(scan("b/").await, ["b/1", "b/2"]);
    assert_eq!(scan("b%").await, ["b%"]);
    assert_eq!(scan("б").await, ["б/1"]);
    assert_eq!(scan("x").await, Vec::<String>::new());
    assert_eq!(scan("").await.len(), 7);
}

pub(super) async fn usage_counts_records_and_bytes(place: impl Place) {
    let store = place.open(AMPLE).await;
    for (name, bytes) in [("a", 10), ("bb", 20), ("a", 5)] {
        put(&*store, key(name), &vec![0; bytes]).await.expect("put");
    }
    assert_eq!(store.usage(Table::Keys).await, Ok(Usage { records: 2, bytes: 6 + 22 }));
    write(&*store, key("bb"), Write::Delete).await.expect("deleted");
    assert_eq!(store.usage(Table::Keys).await, Ok(Usage { records: 1, bytes: 6 }));
    assert_eq!(store.usage(Table::Tools).await, Ok(Usage::default()));
}

pub(super) async fn it_answers_a_ping(place: impl Place) {
    let store = place.open(AMPLE).await;
    assert_eq!(store.ping().await, Ok(()));
}
