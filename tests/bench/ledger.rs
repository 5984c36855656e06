//! What the ledger costs under many keys: `cargo bench --bench ledger [-- --quick] [-- --only STORE,…]` (Linux)
//!
//! Each store is filled to its `max_keys` by a process of its own, as calls would fill it: a key is made and fixed, claimed,
//! and finished with a result. On the way, with none, 100,000 and a million keys held, it measures what a call costs in CPU
//! (this process, and the Redis server where there is one), what is resident, and what is held of what may be. Every result
//! is offered to be kept, far more than may be; at the end every key is taken, and one call more has to be busy.
//!
//! `--quick` is a tenth of all. It ends with exit code 1 if a bound does not hold, a cost grows with the keys, or a store is not there.

#[path = "hop/process.rs"]
#[allow(dead_code, reason = "the other bench starts more kinds of processes")]
mod process;

use std::{
    env, fs, io,
    process::{Command, ExitCode},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use mcp_sidecar::{
    call::key::{Derivation, First},
    ledger::{
        Claimed, Keep, LEASE_MS, Ledger, Named, Settings,
        entry::{Attempt, State, Verdict},
        owner,
    },
    listing::RetryClass,
    message::Era,
    store::{self, Bounds, RedisSettings, Table},
};
use process::{Process, cpu, rss};
use rustls::{ClientConfig, RootCertStore};
use tokio::{runtime, task::JoinSet, time::Instant};

/// As the program's own.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Each store, and where it keeps results: as `state` and `ledger.results` say it.
const CASES: [(&str, &str); 5] = [
    ("memory", "memory"),
    ("memory", "store"),
    ("sqlite", "memory"),
    ("sqlite", "store"),
    ("redis", "store"),
];
/// One in so many of the keys is a call that is measured, at each level.
const MEASURED: usize = 50;
/// Calls under way at once.
const AT_ONCE: usize = 64;
/// Bytes of a result.
const RESULT: usize = 1024;
/// Bytes of results a key that may be held: far fewer than are offered.
const TOTAL: usize = 64;
/// How many times as much a call may cost with ten times the keys: a search tree that fits into no cache is slower by some, and
/// whatever is looked through costs ten times.
const GROWTH: f64 = 2.0;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let met = match arguments.as_slice() {
        ["fill", state, results, keys] => fill(state, results, keys.parse().expect("a number")),
        options => {
            let (keys, options) = match options {
                ["--quick", options @ ..] => (100_000, options),
                options => (1_000_000, options),
            };
            match options {
                [] => all(keys, |_| true),
                ["--only", only] => all(keys, |store| only.split(',').any(|one| one == store)),
                _ => {
                    eprintln!("usage: cargo bench --bench ledger -- [--quick] [--only memory,sqlite,redis]");
                    return ExitCode::from(2);
                }
            }
        }
    };
    match met {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Every case that is wanted, each in a process of its own; whether all of them met what is asked.
fn all(keys: usize, wants: impl Fn(&str) -> bool) -> io::Result<bool> {
    let total = keys * TOTAL;
    println!(
        "| store | results in | keys held | a new call, CPU | a replay, CPU | resident | result bytes, of {total} |"
    );
    println!("|---|---|---|---|---|---|---|");
    let mut met = true;
    for (store, results) in CASES.into_iter().filter(|(store, _)| wants(store)) {
        let folder = tempfile::tempdir()?;
        let state = match store {
            "sqlite" => format!("sqlite:{}", folder.path().join("state.db").display()),
            "redis" => "redis".to_owned(),
            _ => "memory".to_owned(),
        };
        let filled =
            Command::new(env::current_exe()?).args(["fill", &state, results, &keys.to_string()]).status()?;
        met &= filled.success();
    }
    Ok(met)
}

/// One case, as this process.
fn fill(state: &str, results: &str, keys: usize) -> io::Result<bool> {
    let redis = (state == "redis").then(Process::redis);
    if redis.as_ref().is_some_and(Option::is_none) {
        return Err(io::Error::other("redis-server is not installed; --only leaves it out"));
    }
    let measuring = runtime::Builder::new_current_thread().enable_all().build()?;
    measuring.block_on(async {
        let place = Place::open(state, results, keys, redis.flatten()).await?;
        place.measure().await
    })
}

/// A ledger that is filled.
struct Place {
    store: &'static str,
    results: Keep,
    /// How many keys it may hold.
    keys: usize,
    ledger: Arc<Ledger>,
    file: Option<String>,
    redis: Option<Process>,
}

/// What was measured with so many keys held.
struct Level {
    new: f64,
    replay: f64,
}

impl Place {
    async fn open(state: &str, results: &str, keys: usize, redis: Option<Process>) -> io::Result<Self> {
        let file = state.strip_prefix("sqlite:").map(str::to_owned);
        let (store, spec) = match (&file, &redis) {
            (Some(file), _) => ("sqlite", store::Spec::Sqlite(file.into())),
            (None, Some(redis)) => {
                let settings = RedisSettings::from_url(&format!("redis://{}/0", redis.address), &no_tls()?);
                ("redis", store::Spec::Redis(settings.map_err(io::Error::other)?))
            }
            (None, None) => ("memory", store::Spec::Memory),
        };
        let bounds = Bounds { max_keys: keys, max_result_bytes: keys * TOTAL };
        let opened = store::open(&spec, bounds).await.map_err(io::Error::other)?;
        let results = if results == "store" { Keep::Store } else { Keep::Memory };
        let day = Duration::from_secs(24 * 3600);
        let settings =
            Settings { results, ttl: day, max_result: 1 << 20, max_total: keys * TOTAL, keys_ttl: 30 * day };
        Ok(Self { store, results, keys, ledger: Ledger::start(opened, settings), file, redis })
    }

    async fn measure(&self) -> io::Result<bool> {
        let (mut levels, mut held, mut met) = (Vec::new(), 0, true);
        let measured = self.keys / MEASURED;
        // The last one ends where everything is full.
        for upto in [0, self.keys / 10, self.keys - measured] {
            self.calls(held, upto).await;
            let began = self.cpu();
            self.calls(upto, upto + measured).await;
            let new = self.cpu() - began;
            let began = self.cpu();
            self.replays(upto, upto + measured).await;
            let replay = self.cpu() - began;
            held = upto + measured;
            let each = |spent: Duration| spent.as_secs_f64() * 1e6 / measured as f64;
            let level = Level { new: each(new), replay: each(replay) };
            met &= self.tell(upto, held, &level).await?;
            levels.push(level);
        }
        // With none held nothing is evicted either, which is work of its own.
        if let [.., before, last] = levels.as_slice() {
            let growth = (last.new / before.new).max(last.replay / before.replay);
            let flat = growth <= GROWTH;
            println!("| {} | | | {growth:.2} times as much at most: {} | | | |", self.store, good(flat));
            met &= flat;
        }
        met &= self.is_full().await;
        Ok(met)
    }

    /// A row of the table; whether what is held is within its bounds.
    async fn tell(&self, before: usize, held: usize, level: &Level) -> io::Result<bool> {
        let usage = async |table| self.ledger.store().usage(table).await.map_err(io::Error::other);
        let (keys, stored) = (usage(Table::Keys).await?, usage(Table::Results).await?);
        let bytes = match self.results {
            Keep::Store => stored.bytes,
            _ => self.ledger.result_bytes() as u64,
        };
        let file = self.file.iter().flat_map(fs::metadata).map(|file| file.len()).sum::<u64>();
        let server = self.redis.as_ref().map_or(0, Process::rss);
        let beside = match (self.file.is_some(), server) {
            (true, _) => format!(", file {} MB", file / 1_000_000),
            (false, 0) => String::new(),
            (false, server) => format!(", server {} MB", server / 1_000_000),
        };
        println!(
            "| {} | {} | {before} | {:.1} us | {:.1} us | {} MB{beside} | {bytes} |",
            self.store,
            if self.results == Keep::Store { "the store" } else { "memory" },
            level.new,
            level.replay,
            rss("self") / 1_000_000,
        );
        let within = bytes <= (self.keys * TOTAL) as u64 && keys.records == held as u64;
        if !within {
            println!("{} keys, {bytes} bytes of results: missed", keys.records);
        }
        Ok(within)
    }

    /// Whether a call more is busy, and those that are known go on.
    async fn is_full(&self) -> bool {
        let full = matches!(
            self.ledger.claim("up", "one more", attempt(), None).await,
            Ok(Claimed::Refused(Verdict::Full))
        );
        self.replays(self.keys - 1, self.keys).await;
        println!("| {} | | {} | one more is busy: {} | | | |", self.store, self.keys, good(full));
        full
    }

    /// Makes the calls of these numbers, each for the first time.
    async fn calls(&self, from: usize, to: usize) {
        each(from, to, &self.ledger, |ledger, number| async move {
            let key = name(&ledger, number).await;
            let Ok(Claimed::Run(claim, _)) = ledger.claim("up", &key, attempt(), None).await else {
                panic!("call {number} does not run");
            };
            claim.finish(State::Done, Some(Bytes::from(vec![b'x'; RESULT])), None).await;
        })
        .await;
    }

    /// Makes the calls of these numbers again, while their results are held.
    async fn replays(&self, from: usize, to: usize) {
        each(from, to, &self.ledger, |ledger, number| async move {
            let key = name(&ledger, number).await;
            let Ok(Claimed::Replay(_)) = ledger.claim("up", &key, attempt(), None).await else {
                panic!("call {number} is not replayed");
            };
        })
        .await;
    }

    /// Time on a CPU, of this process and of its server.
    fn cpu(&self) -> Duration {
        cpu("self") + self.redis.as_ref().map_or(Duration::ZERO, Process::cpu)
    }
}

/// Does something for each number, some at a time.
async fn each<F: Future<Output = ()> + Send + 'static>(
    from: usize,
    to: usize,
    ledger: &Arc<Ledger>,
    work: impl Fn(Arc<Ledger>, usize) -> F,
) {
    let (began, mut running) = (Instant::now(), JoinSet::new());
    for number in from..to {
        if running.len() >= AT_ONCE {
            running.join_next().await.expect("one runs").expect("no panic");
        }
        running.spawn(work(ledger.clone(), number));
    }
    running.join_all().await;
    if to - from > 50_000 {
        let rate = (to - from) as f64 / began.elapsed().as_secs_f64();
        eprintln!("{} calls, {rate:.0} a second", to - from);
    }
}

/// The key of a call that an activity of a job makes. Each is another job's, and their ids have no order: nothing that was
/// looked at for one call helps the next.
async fn name(ledger: &Ledger, number: usize) -> String {
    let job = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).swap_bytes();
    let key = format!("{:016x}{job:016x}/1", job.rotate_left(23));
    let derivation = Derivation::Activity { activity: key.clone(), first: First::Key(key) };
    match ledger.key("up", derivation).await {
        Ok(Named::Key(key)) => key,
        other => panic!("call {number} is not named: {other:?}"),
    }
}

fn attempt() -> Attempt {
    Attempt {
        function: "reserve_inventory".into(),
        digest: "0123456789abcdef0123456789abcdef".into(),
        owner: owner(),
        principal: "fedcba9876543210fedcba9876543210".into(),
        era: Era::Modern,
        class: RetryClass::Unsafe,
        read_only: false,
        listed: true,
        changed: false,
        number: None,
        leg: false,
        task: false,
        lease: LEASE_MS,
    }
}

/// What is asked for although nothing here is reached over TLS.
fn no_tls() -> io::Result<Arc<ClientConfig>> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(io::Error::other)?.with_root_certificates(RootCertStore::empty());
    Ok(Arc::new(config.with_no_client_auth()))
}

fn good(met: bool) -> &'static str {
    if met { "met" } else { "missed" }
}
