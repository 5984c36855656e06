//! The ledger against a model of it: attempts, ends, crashes, leases that run out and sidecars that start anew, in any
//! order. Whatever the order: never two attempts under a key at once, never a replay of what did not commit, never a commit
//! that is lost.

use proptest::prelude::*;

use super::{entry::State, *};
use crate::{clock::Clock, listing::RetryClass, message::Era, store::Bounds};

const KEYS: usize = 2;
const SIDECARS: usize = 2;

#[derive(Clone, Debug)]
enum Step {
    /// An attempt asks to run, in one of the sidecars.
    Ask { sidecar: usize, key: usize, asks: Asks },
    /// One of those that run gets its answer.
    End { which: usize, state: State },
    /// One of those that run is dropped: its node left.
    Leave { which: usize },
    /// Time passes.
    Pass { millis: u64 },
    /// A renewal of one of those that run.
    Renew { which: usize },
    /// A sidecar dies with all that runs in it, and starts anew.
    Crash { sidecar: usize },
}

#[derive(Clone, Copy, Debug)]
struct Asks {
    other_digest: bool,
    class: RetryClass,
    principal: u8,
    modern: bool,
    leg: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let class = prop_oneof![
        3 => Just(RetryClass::Unsafe),
        2 => Just(RetryClass::Conditional),
        1 => Just(RetryClass::Safe),
    ];
    let asks =
        (prop::bool::weighted(0.05), class, 0..2_u8, prop::bool::weighted(0.8), prop::bool::weighted(0.1));
    let asks = asks.prop_map(|(other_digest, class, principal, modern, leg)| Asks {
        other_digest,
        class,
        principal,
        modern,
        leg,
    });
    let state = prop_oneof![
        4 => Just(State::Done),
        1 => Just(State::Failed),
        1 => Just(State::Unknown),
        1 => Just(State::Busy),
        1 => Just(State::BusyUnavailable),
        1 => Just(State::NotSent),
        1 => Just(State::Waiting),
    ];
    prop_oneof![
        8 => (0..SIDECARS, 0..KEYS, asks).prop_map(|(sidecar, key, asks)| Step::Ask { sidecar, key, asks }),
        5 => (0..8_usize, state).prop_map(|(which, state)| Step::End { which, state }),
        1 => (0..8_usize).prop_map(|which| Step::Leave { which }),
        1 => (0..LEASE_MS + 5000).prop_map(|millis| Step::Pass { millis }),
        2 => (0..8_usize).prop_map(|which| Step::Renew { which }),
        1 => (0..SIDECARS).prop_map(|sidecar| Step::Crash { sidecar }),
    ]
}

/// What the model holds of a key.
#[derive(Clone, Debug, Default)]
struct Model {
    /// The attempt that was let run last, and until when without renewal; none once it has ended.
    runs: Option<(u64, u64)>,
    /// How the last attempt ended, as far as it did.
    ended: Option<State>,
    /// A result was committed.
    committed: bool,
    /// Where it waits: in each sidecar's memory the last that it saw, in the store (the first place) the last of all; for
    /// whom, in which era, and what.
    held: HashMap<usize, (u8, bool, String)>,
}

/// What an attempt has to be told.
#[derive(Debug, PartialEq)]
enum Told {
    Runs,
    Replay(String),
    Refused(Verdict),
}

impl Model {
    fn ask(&self, asks: Asks, sidecar: usize, keep: Keep, now: u64) -> Told {
        if self.runs.is_none() && self.ended.is_none() {
            return Told::Runs;
        }
        if asks.other_digest {
            return Told::Refused(Verdict::Mismatch);
        }
        if self.runs.is_some_and(|(_, until)| now < until) {
            return Told::Refused(Verdict::Busy);
        }
        if asks.class == RetryClass::Safe {
            return Told::Runs;
        }
        if self.committed {
            let held = self.held.get(&place(keep, sidecar));
            return match held.filter(|held| (held.0, held.1) == (asks.principal, asks.modern)) {
                Some((.., result)) => Told::Replay(result.clone()),
                None if asks.class == RetryClass::Unsafe => Told::Refused(Verdict::AlreadyDone),
                None => Told::Runs,
            };
        }
        // What is still said to run has run out of its lease.
        let ended = self.ended.filter(|_| self.runs.is_none()).unwrap_or(State::Unknown);
        let unsure = matches!(ended, State::Unknown | State::BusyUnavailable);
        match asks.class {
            RetryClass::Unsafe if unsure => Told::Refused(Verdict::OutcomeUnknown),
            _ => Told::Runs,
        }
    }
}

/// Where a sidecar's results wait.
fn place(keep: Keep, sidecar: usize) -> usize {
    if keep == Keep::Memory { sidecar } else { 0 }
}

/// An attempt that runs.
struct Runs {
    serial: u64,
    key: usize,
    sidecar: usize,
    asks: Asks,
    claim: Claim,
}

struct World {
    keep: Keep,
    clock: Clock,
    now: u64,
    store: Arc<dyn Store>,
    sidecars: Vec<Arc<Ledger>>,
    keys: Vec<Model>,
    running: Vec<Runs>,
    serial: u64,
}

impl World {
    async fn new(keep: Keep) -> Self {
        let clock = Clock::manual(1_000_000);
        let bounds = Bounds { max_keys: 100, max_result_bytes: 1 << 20 };
        let store: Arc<dyn Store> = Arc::new(store::Memory::new(bounds, clock.clone()));
        let mut world = Self {
            keep,
            clock,
            now: 1_000_000,
            store,
            sidecars: Vec::new(),
            keys: vec![Model::default(); KEYS],
            running: Vec::new(),
            serial: 0,
        };
        for _ in 0..SIDECARS {
            let sidecar = world.start().await;
            world.sidecars.push(sidecar);
        }
        world
    }

    async fn start(&self) -> Arc<Ledger> {
        let hour = Duration::from_secs(3600);
        let settings = Settings {
            results: self.keep,
            ttl: hour,
            max_result: 1 << 20,
            max_total: 1 << 20,
            keys_ttl: 1000 * hour,
        };
        let ledger = Ledger::start(self.store.clone(), settings);
        // Its tasks look round at once; from then on nothing renews a lease but the steps.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        ledger
    }

    async fn take(&mut self, step: Step) {
        match step {
            Step::Ask { sidecar, key, asks } => self.ask(sidecar, key, asks).await,
            Step::End { which, state } => {
                if let Some(runs) = self.pick(which) {
                    let result = (state == State::Done).then(|| format!("{{\"n\":{}}}", runs.serial));
                    let owner = runs.claim.owner.clone();
                    runs.claim.finish(state, result.clone().map(Bytes::from), None).await;
                    assert!(!self.sidecars[runs.sidecar].leases().contains_key(&owner), "it was written");
                    self.ended(
                        runs.key,
                        runs.serial,
                        state,
                        result.map(|result| (runs.sidecar, runs.asks, result)),
                    );
                }
            }
            Step::Leave { which } => {
                if let Some(mut runs) = self.pick(which) {
                    let owner = runs.claim.owner.clone();
                    runs.claim.ends(State::Unknown);
                    drop(runs.claim);
                    while self.sidecars[runs.sidecar].leases().contains_key(&owner) {
                        tokio::task::yield_now().await;
                    }
                    self.ended(runs.key, runs.serial, State::Unknown, None);
                }
            }
            Step::Pass { millis } => {
                self.now += millis;
                self.clock.set(self.now.try_into().unwrap());
            }
            Step::Renew { which } => self.renew(which).await,
            Step::Crash { sidecar } => {
                let (dead, alive) =
                    std::mem::take(&mut self.running).into_iter().partition(|r| r.sidecar == sidecar);
                self.running = alive;
                // Nothing of it is written any more.
                let dead: Vec<Runs> = dead;
                dead.into_iter().for_each(|runs| std::mem::forget(runs.claim));
                self.sidecars[sidecar] = self.start().await;
                if self.keep == Keep::Memory {
                    self.keys.iter_mut().for_each(|model| _ = model.held.remove(&sidecar));
                }
            }
        }
    }

    fn pick(&mut self, which: usize) -> Option<Runs> {
        (!self.running.is_empty()).then(|| self.running.swap_remove(which % self.running.len()))
    }

    async fn ask(&mut self, sidecar: usize, key: usize, asks: Asks) {
        let attempt = Attempt {
            function: "f".into(),
            digest: if asks.other_digest { "other" } else { "d" }.into(),
            owner: owner(),
            principal: format!("p{}", asks.principal),
            era: if asks.modern { Era::Modern } else { Era::Legacy },
            class: asks.class,
            read_only: asks.class == RetryClass::Safe,
            listed: true,
            changed: false,
            number: None,
            leg: asks.leg,
            task: false,
            lease: LEASE_MS,
        };
        // The first digest under a key is the one that counts.
        let asks = match &self.keys[key] {
            Model { runs: None, ended: None, .. } => Asks { other_digest: false, ..asks },
            _ => asks,
        };
        let attempt = Attempt { digest: if asks.other_digest { "other" } else { "d" }.into(), ..attempt };
        let expected = self.keys[key].ask(asks, sidecar, self.keep, self.now);
        let claimed = self.sidecars[sidecar].claim("up", &format!("k{key}"), attempt, None).await.unwrap();
        let told = match claimed {
            Claimed::Run(claim, _) => {
                let alone = self.keys[key].runs.is_none_or(|(_, until)| until <= self.now);
                assert!(alone, "another attempt holds the key");
                self.serial += 1;
                self.keys[key].runs = Some((self.serial, self.now + LEASE_MS));
                self.running.push(Runs { serial: self.serial, key, sidecar, asks, claim: *claim });
                Told::Runs
            }
            Claimed::Replay(result) => Told::Replay(String::from_utf8(result.to_vec()).unwrap()),
            Claimed::Refused(verdict) => Told::Refused(verdict),
        };
        assert_eq!(told, expected, "{asks:?} of {:?} at {}", self.keys[key], self.now);
    }

    /// An attempt that another one has followed has no say any more; one whose lease merely ran out still has.
    fn ended(&mut self, key: usize, serial: u64, state: State, result: Option<(usize, Asks, String)>) {
        let model = &mut self.keys[key];
        if model.runs.is_none_or(|(runs, _)| runs != serial) {
            return;
        }
        model.runs = None;
        model.ended = Some(state);
        if let Some((sidecar, asks, result)) = result {
            model.committed = true;
            if self.keep != Keep::Off {
                model.held.insert(place(self.keep, sidecar), (asks.principal, asks.modern, result));
            }
        }
    }

    async fn renew(&mut self, which: usize) {
        if self.running.is_empty() {
            return;
        }
        let runs = &self.running[which % self.running.len()];
        let (ledger, owner) = (self.sidecars[runs.sidecar].clone(), runs.claim.owner.clone());
        settle::renew_one(ledger, owner, runs.claim.name.clone()).await;
        if let Some((serial, until)) = &mut self.keys[runs.key].runs
            && *serial == runs.serial
        {
            *until = self.now + LEASE_MS;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_in_whatever_order_the_ledger_keeps_its_promises(
        keep in prop_oneof![Just(Keep::Off), Just(Keep::Memory), Just(Keep::Store)],
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut world = World::new(keep).await;
            for step in steps {
                world.take(step).await;
            }
        });
    }
}
