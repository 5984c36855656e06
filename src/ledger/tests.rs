//! What is kept for how long, and what is answered then; what a late end changes; what can't be read. On a clock that only
//! these tests move.

use tempfile::TempDir;

use super::{entry::State, *};
use crate::{
    clock::Clock,
    listing::RetryClass,
    message::Era,
    store::{Bounds, Memory, Sqlite, Write},
};

const BEGAN: i64 = 1_000_000;
const DAY: u64 = 24 * 3600 * 1000;

/// A store on a clock.
struct Place {
    clock: Clock,
    now: i64,
    store: Arc<dyn Store>,
    _folder: Option<TempDir>,
}

impl Place {
    fn memory() -> Self {
        let clock = Clock::manual(BEGAN);
        let store = Arc::new(Memory::new(BOUNDS, clock.clone()));
        Self { clock, now: BEGAN, store, _folder: None }
    }

    async fn sqlite() -> Self {
        let clock = Clock::manual(BEGAN);
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("state.db");
        let store = Arc::new(Sqlite::open(&file, BOUNDS, clock.clone()).await.unwrap());
        Self { clock, now: BEGAN, store, _folder: Some(folder) }
    }

    async fn both() -> [Self; 2] {
        [Self::memory(), Self::sqlite().await]
    }

    fn ledger(&self, results: Keep) -> Arc<Ledger> {
        Ledger::start(self.store.clone(), settings(results))
    }

    fn pass(&mut self, millis: u64) {
        self.now += i64::try_from(millis).unwrap();
        self.clock.set(self.now);
    }

    async fn put(&self, name: Name, value: &[u8]) {
        let value = value.to_vec();
        let write = move |_: &View<'_>| (vec![Write::Put { value: value.clone(), expires: None }], ());
        update_with(&*self.store, vec![name], write).await.unwrap();
    }
}

const BOUNDS: Bounds = Bounds { max_keys: 100, max_result_bytes: 1 << 20 };

fn settings(results: Keep) -> Settings {
    Settings {
        results,
        ttl: Duration::from_millis(DAY / 2),
        max_result: 1 << 20,
        max_total: 1 << 20,
        keys_ttl: Duration::from_millis(DAY),
    }
}

fn attempt(class: RetryClass) -> Attempt {
    Attempt {
        function: "f".into(),
        digest: "d".into(),
        owner: owner(),
        principal: "p".into(),
        era: Era::Modern,
        class,
        read_only: class == RetryClass::Safe,
        listed: true,
        changed: false,
        number: None,
        leg: false,
        task: false,
        lease: LEASE_MS,
    }
}

async fn ask(ledger: &Arc<Ledger>, key: &str, class: RetryClass) -> Claimed {
    ledger.claim("up", key, attempt(class), None).await.unwrap()
}

async fn run(ledger: &Arc<Ledger>, key: &str, class: RetryClass) -> (Claim, Go) {
    match ask(ledger, key, class).await {
        Claimed::Run(claim, go) => (*claim, go),
        other => panic!("{other:?}"),
    }
}

async fn refused(ledger: &Arc<Ledger>, key: &str, class: RetryClass) -> Verdict {
    match ask(ledger, key, class).await {
        Claimed::Refused(verdict) => verdict,
        other => panic!("{other:?}"),
    }
}

async fn done(claim: Claim, result: &'static str) {
    claim.finish(State::Done, Some(Bytes::from_static(result.as_bytes())), None).await;
}

/// A session's call, counted within the series.
async fn counted(ledger: &Ledger, activity: &str) -> String {
    let first = First::Counted { prefix: "j/s1/f#d/".into(), series: "series".into() };
    let derivation = Derivation::Activity { activity: activity.into(), first };
    match ledger.key("up", derivation).await.unwrap() {
        Named::Key(key) => key,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_mark_is_kept_for_its_time_and_no_shorter() {
    for mut place in Place::both().await {
        let ledger = place.ledger(Keep::Off);
        for (key, end) in [("unknown", State::Unknown), ("done", State::Done)] {
            let (claim, _) = run(&ledger, key, RetryClass::Unsafe).await;
            claim.finish(end, None, None).await;
        }
        place.pass(DAY - 1);
        assert_eq!(refused(&ledger, "unknown", RetryClass::Unsafe).await, Verdict::OutcomeUnknown);
        assert_eq!(refused(&ledger, "done", RetryClass::Unsafe).await, Verdict::AlreadyDone);
        place.pass(1);
        for key in ["unknown", "done"] {
            let (claim, go) = run(&ledger, key, RetryClass::Unsafe).await;
            assert_eq!((go.attempt, go.known), (1, false), "{key} is a new key");
            done(claim, "{}").await;
        }
    }
}

#[tokio::test]
async fn each_attempt_keeps_its_mark_for_another_time() {
    for mut place in Place::both().await {
        let ledger = place.ledger(Keep::Off);
        for attempt in 1..=3 {
            let (claim, go) = run(&ledger, "k", RetryClass::Conditional).await;
            assert_eq!(go.attempt, attempt);
            claim.finish(State::Failed, None, None).await;
            place.pass(DAY - 1);
        }
    }
}

#[tokio::test]
async fn a_counter_is_kept_for_its_time_and_no_shorter() {
    for mut place in Place::both().await {
        let ledger = place.ledger(Keep::Off);
        assert_eq!(counted(&ledger, "a").await, "j/s1/f#d/1");
        assert_eq!(counted(&ledger, "b").await, "j/s1/f#d/2");
        place.pass(DAY - 1);
        assert_eq!(counted(&ledger, "a").await, "j/s1/f#d/1", "an attempt of a call that was counted");
        place.pass(1);
        // `b` is over, and not what `a` has kept: what was counted in this series.
        assert_eq!(counted(&ledger, "b").await, "j/s1/f#d/3");
        assert_eq!(counted(&ledger, "a").await, "j/s1/f#d/1");
        place.pass(DAY);
        assert_eq!(counted(&ledger, "a").await, "j/s1/f#d/1", "nobody has asked for a day: it begins anew");
        assert_eq!(counted(&ledger, "b").await, "j/s1/f#d/2");
    }
}

#[tokio::test]
async fn an_attempt_that_runs_is_not_forgotten_however_short_marks_are_kept() {
    for mut place in Place::both().await {
        let ledger = place.ledger(Keep::Off);
        ledger.reload(Settings { keys_ttl: Duration::from_millis(1), ..settings(Keep::Off) });
        let (claim, _) = run(&ledger, "k", RetryClass::Conditional).await;
        place.pass(LEASE_MS - 1);
        assert_eq!(refused(&ledger, "k", RetryClass::Conditional).await, Verdict::Busy);
        claim.finish(State::Unknown, None, None).await;
        place.pass(1);
        assert_eq!(run(&ledger, "k", RetryClass::Unsafe).await.1.attempt, 1, "then it is");
    }
}

#[tokio::test]
async fn a_stored_result_is_answered_for_its_time_and_the_mark_says_what_follows() {
    for mut place in Place::both().await {
        let ledger = place.ledger(Keep::Store);
        for (key, class) in [("unsafe", RetryClass::Unsafe), ("conditional", RetryClass::Conditional)] {
            done(run(&ledger, key, class).await.0, "{\"n\":1}").await;
        }
        place.pass(DAY / 2 - 1);
        for (key, class) in [("unsafe", RetryClass::Unsafe), ("conditional", RetryClass::Conditional)] {
            assert!(
                matches!(ask(&ledger, key, class).await, Claimed::Replay(result) if result == "{\"n\":1}")
            );
        }
        place.pass(1);
        assert_eq!(refused(&ledger, "unsafe", RetryClass::Unsafe).await, Verdict::AlreadyDone);
        let (claim, go) = run(&ledger, "conditional", RetryClass::Conditional).await;
        assert_eq!(go.attempt, 2, "its server answers from its own record");
        done(claim, "{\"n\":2}").await;
        assert!(matches!(
            ask(&ledger, "conditional", RetryClass::Conditional).await,
            Claimed::Replay(result) if result == "{\"n\":2}"
        ));
    }
}

#[tokio::test]
async fn results_are_kept_where_the_settings_say_from_now_on() {
    let place = Place::memory();
    let ledger = place.ledger(Keep::Off);
    let results = async || place.store.usage(Table::Results).await.unwrap().records;
    for (key, keep, stored, held) in
        [("off", Keep::Off, 0, false), ("memory", Keep::Memory, 0, true), ("store", Keep::Store, 1, true)]
    {
        ledger.reload(settings(keep));
        done(run(&ledger, key, RetryClass::Unsafe).await.0, "{}").await;
        assert_eq!(results().await, stored, "{key}");
        match ask(&ledger, key, RetryClass::Unsafe).await {
            Claimed::Replay(_) => assert!(held, "{key}"),
            Claimed::Refused(verdict) => assert_eq!((verdict, held), (Verdict::AlreadyDone, false), "{key}"),
            Claimed::Run(..) => panic!("{key} is made twice"),
        }
    }
    ledger.reload(settings(Keep::Off));
    for key in ["memory", "store"] {
        assert_eq!(
            refused(&ledger, key, RetryClass::Unsafe).await,
            Verdict::AlreadyDone,
            "what is off is off"
        );
    }
}

#[tokio::test]
async fn the_late_end_of_an_attempt_that_another_has_followed_changes_nothing() {
    for keep in [Keep::Memory, Keep::Store] {
        for mut place in Place::both().await {
            let ledger = place.ledger(keep);
            let (late, _) = run(&ledger, "k", RetryClass::Conditional).await;
            place.pass(LEASE_MS);
            let (next, go) = run(&ledger, "k", RetryClass::Conditional).await;
            assert_eq!(go.attempt, 2);
            done(next, "{\"second\":true}").await;
            done(late, "{\"first\":true}").await;
            let told = ask(&ledger, "k", RetryClass::Conditional).await;
            assert!(
                matches!(&told, Claimed::Replay(result) if result == "{\"second\":true}"),
                "{keep:?}: {told:?}"
            );
        }
    }
}

#[tokio::test]
async fn what_the_ledger_has_not_written_is_no_new_key() {
    for place in Place::both().await {
        let ledger = place.ledger(Keep::Memory);
        let damaged = |answer: store::Error| assert!(matches!(answer, store::Error::Corrupt(_)), "{answer}");
        place.put(Name::new(Table::Keys, "up\u{1}k"), b"not what it was").await;
        damaged(ledger.claim("up", "k", attempt(RetryClass::Safe), None).await.unwrap_err());
        place.put(Name::new(Table::Counters, "k\u{1}up\u{1}series"), b"{\"n\":").await;
        let first = First::Counted { prefix: "j/s1/f#d/".into(), series: "series".into() };
        let derivation = Derivation::Activity { activity: "a".into(), first };
        damaged(ledger.key("up", derivation.clone()).await.unwrap_err());
        place.put(Name::new(Table::Counters, "a\u{1}up\u{1}a"), b"\xff").await;
        damaged(ledger.key("up", derivation).await.unwrap_err());
        assert!(!ledger.is_away(), "it answers for every other key");
        run(&ledger, "other", RetryClass::Unsafe).await;
    }
}

#[tokio::test]
async fn a_full_ledger_names_no_call_and_lets_none_run() {
    let clock = Clock::manual(BEGAN);
    let bounds = Bounds { max_keys: 1, max_result_bytes: 1 << 20 };
    let ledger = Ledger::start(Arc::new(Memory::new(bounds, clock.clone())), settings(Keep::Memory));
    let activity =
        |n: usize| Derivation::Activity { activity: n.to_string(), first: First::Key(format!("j/{n}")) };
    for n in 0..4 {
        assert_eq!(ledger.key("up", activity(n)).await, Ok(Named::Key(format!("j/{n}"))));
    }
    assert_eq!(ledger.key("up", activity(4)).await, Ok(Named::Full), "four counters a key");
    assert_eq!(ledger.key("up", activity(3)).await, Ok(Named::Key("j/3".into())), "what is known goes on");
    let (claim, _) = run(&ledger, "j/0", RetryClass::Unsafe).await;
    assert_eq!(refused(&ledger, "j/1", RetryClass::Unsafe).await, Verdict::Full);
    done(claim, "{}").await;
    assert_eq!(
        refused(&ledger, "j/1", RetryClass::Unsafe).await,
        Verdict::Full,
        "what is done is not dropped"
    );
    assert!(matches!(ask(&ledger, "j/0", RetryClass::Unsafe).await, Claimed::Replay(_)));
    clock.set(BEGAN + i64::try_from(DAY).unwrap());
    run(&ledger, "j/1", RetryClass::Unsafe).await;
}
