//! The parts of the bench, and the table that they fill.

use std::{
    collections::HashMap,
    fs, io,
    time::{Duration, SystemTime},
};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    load::{Target, text},
    process::Process,
};

/// The first eight are measured in rounds.
pub(crate) const PARTS: [&str; 13] = [
    "json",
    "rate",
    "log",
    "one",
    "many",
    "progress",
    "burst",
    "paced",
    "identity",
    "idle",
    "cancel",
    "slow",
    "neighbour",
];

/// Streams of the parts that hold many; a process may have 20,000 files, and the hop has two for each.
const MANY: usize = 9_000;

pub(crate) struct Options {
    rounds: usize,
    quick: bool,
    only: Vec<String>,
}

impl Options {
    pub(crate) fn parse(arguments: &[&str]) -> Option<Self> {
        let mut options = Self { rounds: 5, quick: false, only: PARTS.map(str::to_owned).to_vec() };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match *argument {
                "--quick" => (options.quick, options.rounds) = (true, 1),
                "--rounds" => options.rounds = arguments.next()?.parse().ok().filter(|rounds| *rounds > 0)?,
                "--only" => options.only = arguments.next()?.split(',').map(str::to_owned).collect(),
                _ => return None,
            }
        }
        options.only.iter().all(|part| PARTS.contains(&part.as_str())).then_some(options)
    }
}

/// A hop under its name in the table.
struct Hop {
    name: &'static str,
    process: Process,
    target: Target,
}

pub(crate) struct Bench {
    options: Options,
    dir: tempfile::TempDir,
    _mock: Process,
    /// The upstream itself.
    direct: Target,
    https: String,
    /// What was measured in each round, by part and hop.
    costs: HashMap<(&'static str, &'static str), Vec<f64>>,
    table: Vec<[String; 5]>,
    notes: Vec<String>,
}

impl Bench {
    pub(crate) fn start(options: Options) -> io::Result<Self> {
        let dir = tempfile::tempdir()?;
        let (mock, told) = Process::role(&["mock", &dir.path().to_string_lossy()])?;
        let tls = told.split_whitespace().nth(1).unwrap_or_default();
        let port = tls.rsplit(':').next().unwrap_or_default();
        Ok(Self {
            options,
            direct: Target::new(mock.address, "/mcp"),
            https: format!("https://localhost:{port}/mcp"),
            dir,
            _mock: mock,
            costs: HashMap::new(),
            table: Vec::new(),
            notes: Vec::new(),
        })
    }

    pub(crate) async fn run(mut self) -> io::Result<()> {
        let (began, load) = (Instant::now(), load_average());
        self.rounds().await?;
        self.identities().await?;
        self.idle().await?;
        self.cancel().await?;
        self.slow().await?;
        self.neighbour().await?;
        self.compare();
        println!("| goal | ask for | measured | sidecar | peer |\n|---|---|---|---|---|");
        for row in &self.table {
            println!("| {} |", row.join(" | "));
        }
        println!("\n{}", self.notes.join("\n"));
        println!(
            "{} rounds in {:.0} s; load average {load} before, {} after",
            self.options.rounds,
            began.elapsed().as_secs_f64(),
            load_average()
        );
        Ok(())
    }

    fn wants(&self, part: &str) -> bool {
        self.options.only.iter().any(|only| only == part)
    }

    fn hop(&self, name: &'static str) -> io::Result<Hop> {
        let upstream = self.direct.address;
        let url = format!("http://{upstream}/mcp");
        let dir = self.dir.path();
        let (process, path) = match name {
            "nginx" => (Process::nginx(dir, upstream, false)?, "/mcp"),
            "nginx + log" => (Process::nginx(dir, upstream, true)?, "/mcp"),
            "bare hyper" => (Process::role(&["bare", &upstream.to_string()])?.0, "/mcp"),
            "sidecar, h2" => (Process::sidecar(dir, &[("up", &self.https)], "memory:")?, "/up"),
            _ => (Process::sidecar(dir, &[("up", &url)], "memory:")?, "/up"),
        };
        let target = Target::new(process.address, path);
        Ok(Hop { name, process, target })
    }

    /// Bounded counts: what takes long in `--quick` is a tenth of it.
    fn count(&self, count: usize) -> usize {
        if self.options.quick { count / 10 } else { count }
    }

    /// The parts that are measured in CPU time of a piece of work.
    async fn rounds(&mut self) -> io::Result<()> {
        let parts: Vec<_> = PARTS[..8].iter().copied().filter(|part| self.wants(part)).collect();
        if parts.is_empty() {
            return Ok(());
        }
        let hops: Vec<Hop> = ["nginx", "nginx + log", "bare hyper", "sidecar"]
            .into_iter()
            .map(|name| self.hop(name))
            .collect::<Result<_, _>>()?;
        for hop in &hops {
            hop.target.calls(16, 1600, "json").await?;
        }
        for round in 0..self.options.rounds {
            for part in &parts {
                for turn in 0..hops.len() {
                    let hop = &hops[(round + turn) % hops.len()];
                    self.one_turn(part, hop).await?;
                }
                if *part == "rate" {
                    let took = self.direct.each_millisecond(self.count(2000) as u32).await?;
                    self.costs.entry(("p50", "direct")).or_default().push(at(&took, 50));
                }
            }
            eprintln!("round {} of {}", round + 1, self.options.rounds);
        }
        Ok(())
    }

    async fn one_turn(&mut self, part: &'static str, hop: &Hop) -> io::Result<()> {
        let quick = if self.options.quick { 4 } else { 1 };
        let opened = match part {
            "burst" => Some(hop.target.open(20).await?),
            "paced" => Some(hop.target.open(100).await?),
            _ => None,
        };
        let before = hop.process.cpu();
        let units = match part {
            "json" => {
                let calls = 16_000 / quick;
                hop.target.calls(16, calls, "json").await?;
                calls
            }
            "rate" => {
                let calls = self.count(2000);
                let took = hop.target.each_millisecond(calls as u32).await?;
                self.costs.entry(("p50", hop.name)).or_default().push(at(&took, 50));
                calls
            }
            "log" | "one" | "many" => {
                let (streams, events) = match part {
                    "log" => (8, 400_000),
                    "one" => (1, 100_000),
                    _ => (200, 400_000),
                };
                let events = events / quick;
                let came = hop.target.streams(streams, "log", events / streams).await?;
                assert_eq!(came, events as u64, "no log message is lost");
                events
            }
            "progress" => {
                let events = 400_000 / quick;
                hop.target.streams(8, "progress", events / 8).await?;
                events
            }
            _ => {
                let (rate, burst) = if part == "burst" { (200, 20) } else { (2000, 1) };
                let ms = 2000 / quick as u64;
                let open = opened.as_ref().expect("opened above");
                open.emit(&self.direct, rate, burst, ms).await? as usize
            }
        };
        let spent = hop.process.cpu() - before;
        self.costs.entry((part, hop.name)).or_default().push(spent.as_secs_f64() * 1e6 / units as f64);
        if let Some(open) = opened {
            if part == "paced" {
                open.emit(&self.direct, 1000, 1, 2000 / quick as u64).await?;
                let took = open.took();
                for (name, percent) in [("delay p50", 50), ("delay p99", 99)] {
                    self.costs.entry((name, hop.name)).or_default().push(at(&took, percent));
                }
            }
            self.direct.once("end", "").await?;
            drop(open);
            sleep(Duration::from_millis(50)).await;
            self.direct.once("closed", "").await?;
        }
        Ok(())
    }

    /// A call with identity, in each store.
    async fn identities(&mut self) -> io::Result<()> {
        if !self.wants("identity") {
            return Ok(());
        }
        let dir = self.dir.path().to_owned();
        let url = format!("http://{}/mcp", self.direct.address);
        let redis = Process::redis();
        let mut stores = vec![
            ("memory", "memory:".to_owned()),
            ("SQLite", format!("sqlite:{}", dir.join("state.db").display())),
        ];
        stores.extend(redis.as_ref().map(|redis| ("Redis", format!("redis://{}/0", redis.address))));
        for (name, state) in stores {
            let process = Process::sidecar(&dir, &[("up", &url)], &state)?;
            let plain = Target::new(process.address, "/up");
            let keyed = Target { identity: true, ..plain.clone() };
            plain.calls(16, 1600, "json").await?;
            let calls = self.count(8000) / 16 * 16;
            for round in 0..self.options.rounds {
                for turn in 0..2 {
                    let (part, target) =
                        if (round + turn) % 2 == 0 { ("plain", &plain) } else { ("keyed", &keyed) };
                    let before = process.cpu();
                    target.calls(16, calls, "json").await?;
                    let spent = (process.cpu() - before).as_secs_f64() * 1e6 / calls as f64;
                    self.costs.entry((part, name)).or_default().push(spent);
                }
            }
            for turn in 0..2 * self.options.rounds {
                let (parts, target) = match turn % 2 {
                    0 => (["plain p50", "plain p99"], &plain),
                    _ => (["keyed p50", "keyed p99"], &keyed),
                };
                let took = target.each_millisecond(self.count(2000) as u32).await?;
                for (part, percent) in parts.into_iter().zip([50, 99]) {
                    self.costs.entry((part, name)).or_default().push(at(&took, percent));
                }
            }
            let added = |keyed, plain| (self.median(keyed, name) - self.median(plain, name)) / 1e3;
            self.notes.push(format!(
                "identity, {name}: added at 1000 calls/s p50 {:.2}, p99 {:.2} ms; {:.0} calls per CPU second, {:.0} without",
                added("keyed p50", "plain p50"),
                added("keyed p99", "plain p99"),
                1e6 / self.median("keyed", name),
                1e6 / self.median("plain", name),
            ));
            let times = self.ratio("keyed", name, "plain", name);
            let cost = |part| us(self.median(part, name));
            let row = [cost("keyed"), cost("plain")];
            self.row(
                format!("a call with identity, {name}: CPU against one without"),
                "-",
                format!("{times:.2} x"),
                row,
            );
        }
        Ok(())
    }

    /// Memory of idle streams, and the cost of an event among them; each hop is started afresh.
    async fn idle(&mut self) -> io::Result<()> {
        if !self.wants("idle") {
            return Ok(());
        }
        let many = self.count(MANY);
        let (mut idle, mut costs) = (HashMap::new(), Vec::new());
        for name in ["nginx + log", "bare hyper", "sidecar", "sidecar, h2"] {
            let mut line = Vec::new();
            for streams in [1, 100, 1000, many] {
                let hop = self.hop(name)?;
                let h2 = name == "sidecar, h2";
                if h2 && streams < 1000.min(many) {
                    continue;
                }
                let start = hop.process.rss();
                let open = hop.target.open(streams).await?;
                sleep(Duration::from_millis(300)).await;
                let each = (hop.process.rss().saturating_sub(start)) as f64 / streams as f64 / 1000.0;
                if streams == 1 && name == "sidecar" {
                    let start = start as f64 / 1e6;
                    self.row(
                        "resident memory at start".to_owned(),
                        "<= 12 MB",
                        good(start <= 12.0),
                        [format!("{start:.1} MB"), "-".to_owned()],
                    );
                }
                if streams >= 1000.min(many) {
                    idle.insert((name, streams), each);
                }
                if !h2 {
                    let before = hop.process.cpu();
                    let events = open.emit(&self.direct, 2000, 1, 2000).await?;
                    let spent = (hop.process.cpu() - before).as_secs_f64() * 1e6 / events as f64;
                    line.push(format!("{streams}: {spent:.1}"));
                }
                drop(open);
                sleep(Duration::from_millis(200)).await;
                self.direct.once("closed", "").await?;
            }
            if !line.is_empty() {
                costs.push(format!("{name} {}", line.join(", ")));
            }
        }
        self.notes
            .push(format!("us CPU of an event that comes alone, by streams open: {}", costs.join("; ")));
        for streams in [1000, many] {
            let each = |name| idle.get(&(name, streams)).copied().unwrap_or(f64::NAN);
            let peers = format!("nginx + log {:.1}, bare {:.1} kB", each("nginx + log"), each("bare hyper"));
            let (h1, h2) = (each("sidecar"), each("sidecar, h2"));
            self.row(
                format!("idle stream of {streams}, h1 upstream"),
                "<= 24 kB",
                good(h1 <= 24.0),
                [format!("{h1:.1} kB"), peers],
            );
            self.row(
                format!("idle stream of {streams}, h2 upstream"),
                "<= 16 kB",
                good(h2 <= 16.0),
                [format!("{h2:.1} kB"), "-".to_owned()],
            );
        }
        Ok(())
    }

    /// From the node's close to the upstream's notice of it.
    async fn cancel(&mut self) -> io::Result<()> {
        if !self.wants("cancel") {
            return Ok(());
        }
        let mut told = Vec::new();
        for name in ["nginx + log", "sidecar"] {
            let hop = self.hop(name)?;
            let mut left = HashMap::new();
            for _ in 0..200 {
                let open = hop.target.open(1).await?;
                let id = open.streams[0].0;
                sleep(Duration::from_millis(5)).await;
                left.insert(id, SystemTime::now());
                drop(open);
            }
            sleep(Duration::from_millis(200)).await;
            let closed = self.direct.once("closed", "").await?;
            let closed: Vec<(u64, u64)> = serde_json::from_str(text(&closed)).map_err(io::Error::other)?;
            let mut took: Vec<f64> = closed
                .iter()
                .filter_map(|(id, at)| {
                    let left = left.get(id)?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
                    Some(Duration::from_nanos(*at).saturating_sub(left).as_secs_f64() * 1e3)
                })
                .collect();
            took.sort_by(f64::total_cmp);
            let at = |part: usize| took.get(took.len() * part / 100).copied().unwrap_or(f64::INFINITY);
            told.push((took.len(), at(50), at(99)));
        }
        let text = |(all, p50, p99)| format!("{all} of 200, p50 {p50:.2}, p99 {p99:.1} ms");
        let (all, p50, p99) = told[1];
        let met = all == 200 && p50 <= 1.0 && p99 <= 10.0;
        self.row(
            "cancel seen upstream".to_owned(),
            "all; p50 <= 1, p99 <= 10 ms",
            good(met),
            [text(told[1]), text(told[0])],
        );
        Ok(())
    }

    /// Slow nodes under a flood of progress.
    async fn slow(&mut self) -> io::Result<()> {
        if !self.wants("slow") {
            return Ok(());
        }
        const STREAMS: u64 = 20;
        const PATIENCE: Duration = Duration::from_secs(3);
        let ms = self.count(3000) as u64;
        let mut told = Vec::new();
        for name in ["nginx + log", "sidecar"] {
            let hop = self.hop(name)?;
            let start = hop.process.rss();
            let mut readers = JoinSet::new();
            for _ in 0..STREAMS {
                let target = hop.target.clone();
                readers.spawn(async move { target.slow(ms, PATIENCE).await });
            }
            let (mut peak, mut finals, mut last) = (0, 0, Duration::ZERO);
            while !readers.is_empty() {
                tokio::select! {
                    Some(read) = readers.join_next() => if let Some(after) = read.expect("no panic")? {
                        finals += 1;
                        last = last.max(after);
                    },
                    () = sleep(Duration::from_millis(50)) => peak = peak.max(hop.process.rss()),
                }
            }
            let each = peak.saturating_sub(start) as f64 / STREAMS as f64 / 1e6;
            told.push((each, finals, last.as_secs_f64()));
        }
        let text = |(each, finals, last)| {
            format!("{each:.2} MB, {finals} of {STREAMS} finals, the last after {last:.2} s")
        };
        let (each, finals, last) = told[1];
        let met = each <= 1.0 && finals == STREAMS && last <= 1.0;
        self.row(
            "slow reader under a flood, a stream".to_owned(),
            "<= 1 MB; the final within 1 s of its end",
            good(met),
            [text(told[1]), text(told[0])],
        );
        Ok(())
    }

    /// A healthy node's calls while others are flooded with progress and read nothing. The floods have an upstream of
    /// their own, so that it is the hop that the calls wait for.
    async fn neighbour(&mut self) -> io::Result<()> {
        if !self.wants("neighbour") {
            return Ok(());
        }
        const FLOODS: usize = 500;
        let time = Duration::from_millis(self.count(10_000) as u64);
        let dir = self.dir.path().join("floods");
        fs::create_dir_all(&dir)?;
        let (_floods, told) = Process::role(&["mock", &dir.to_string_lossy()])?;
        let floods = told.split_whitespace().next().unwrap_or_default();
        let upstreams = [self.direct.address.to_string(), floods.to_owned()];
        let [up, floods] = upstreams.map(|address| format!("http://{address}/mcp"));
        let hop = Process::sidecar(&dir, &[("up", &up), ("floods", &floods)], "memory:")?;
        let node = Target::new(hop.address, "/up");
        node.calls(16, 1600, "json").await?;
        let flooded = Target::new(hop.address, "/floods");
        let start = hop.rss();
        let mut told = Vec::new();
        let mut streams = Vec::new();
        for beside in [0, 8, FLOODS] {
            while streams.len() < beside {
                streams.push(flooded.stalled().await?);
            }
            // Until all their queues are full.
            sleep(Duration::from_secs(1)).await;
            let (before, began) = (hop.cpu(), Instant::now());
            let took = node.one_after_the_other(time).await?;
            let busy = (hop.cpu() - before).as_secs_f64() / began.elapsed().as_secs_f64();
            let at = |percent| at(&took, percent) / 1e3;
            let said = format!("p50 {:.2}, p99 {:.1} ms", at(50), at(99));
            self.notes.push(format!(
                "a neighbour's call beside {beside} floods: {said} of {} calls, the hop's CPU {:.0} % busy",
                took.len(),
                busy * 100.0
            ));
            told.push((at(50), at(99), said));
        }
        let held = hop.rss().saturating_sub(start) as f64 / 1e6;
        self.notes
            .push(format!("{FLOODS} floods to nodes that read nothing: {held:.0} MB more than at the start"));
        let (p50, p99, said) = told.pop().unwrap_or_default();
        self.row(
            format!("a neighbour's call beside {FLOODS} floods"),
            "p50 <= 10, p99 <= 50 ms",
            good(p50 <= 10.0 && p99 <= 50.0),
            [said, format!("alone {}", told[0].2)],
        );
        Ok(())
    }

    /// The rows of what was measured in rounds.
    fn compare(&mut self) {
        let rows = std::mem::take(&mut self.table);
        for (part, what, peer, least) in [
            ("json", "JSON calls", "nginx + log", 0.90),
            ("json", "JSON calls", "bare hyper", 0.85),
            ("log", "SSE at full speed, log messages", "nginx + log", 0.80),
            ("one", "the same through one stream", "nginx + log", 0.80),
            ("many", "the same through 200 streams", "nginx + log", 0.80),
            ("progress", "SSE progress flood, coalesced", "nginx + log", 1.3),
            ("burst", "SSE bursts of 20", "nginx + log", 0.75),
            ("paced", "SSE paced, 20/s", "nginx + log", 0.85),
        ] {
            if self.wants(part) {
                let ratio = self.ratio(part, peer, part, "sidecar");
                let costs = [us(self.median(part, "sidecar")), us(self.median(part, peer))];
                let met = format!("{ratio:.2}: {}", good(ratio >= least));
                self.row(
                    format!("{what}: work per CPU second vs {peer}"),
                    &format!(">= {least:.2}"),
                    met,
                    costs,
                );
            }
        }
        if self.wants("rate") {
            let direct = self.median("p50", "direct");
            let added = |name| self.median("p50", name) - direct;
            let (sidecar, nginx) = (added("sidecar"), added("nginx + log"));
            let ratio = sidecar / nginx;
            let met = format!("{ratio:.2}: {}", good(ratio <= 1.2));
            let rate = |name| format!("{} ({:.0} us CPU)", us(added(name)), self.median("rate", name));
            self.row(
                "added p50 at 1000 calls/s vs nginx + log".to_owned(),
                "<= 1.2",
                met,
                [rate("sidecar"), rate("nginx + log")],
            );
            let all = ["nginx", "nginx + log", "bare hyper", "sidecar"]
                .map(|name| format!("{name} {:.1}", self.median("json", name)));
            self.notes.push(format!("us CPU of a JSON call: {}", all.join(", ")));
        }
        let all = ["nginx", "nginx + log", "bare hyper", "sidecar"];
        for part in ["one", "many", "log"] {
            if !self.wants(part) {
                continue;
            }
            let rates = all.map(|name| format!("{name} {:.2}", 1.0 / self.median(part, name)));
            self.notes.push(format!("million events per CPU second, {part}: {}", rates.join(", ")));
        }
        if self.wants("paced") {
            let delay = |part, name| self.median(part, name) / 1e3;
            let delays = all.map(|name| {
                format!("{name} {:.2} and {:.1}", delay("delay p50", name), delay("delay p99", name))
            });
            self.notes.push(format!("an event's way at 1000/s, p50 and p99, ms: {}", delays.join(", ")));
        }
        self.table.extend(rows);
    }

    fn row(&mut self, goal: String, ask: &str, met: String, [sidecar, peer]: [String; 2]) {
        self.table.push([goal, ask.to_owned(), met, sidecar, peer]);
    }

    fn median(&self, part: &'static str, hop: &'static str) -> f64 {
        median(self.costs.get(&(part, hop)).cloned().unwrap_or_default())
    }

    /// How many times as much the first costs as the second, within a round.
    fn ratio(&self, part: &'static str, hop: &'static str, to_part: &'static str, to: &'static str) -> f64 {
        let (some, others) = (self.costs.get(&(part, hop)), self.costs.get(&(to_part, to)));
        let pairs = some.into_iter().flatten().zip(others.into_iter().flatten());
        median(pairs.map(|(one, other)| one / other).collect())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A percentile of sorted times, in microseconds.
fn at(took: &[Duration], percent: usize) -> f64 {
    took.get(took.len() * percent / 100).map_or(f64::NAN, |took| took.as_secs_f64() * 1e6)
}

fn us(value: f64) -> String {
    format!("{value:.2} us")
}

fn good(met: bool) -> String {
    if met { "met" } else { "missed" }.to_owned()
}

fn load_average() -> String {
    let told = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    told.split(' ').next().unwrap_or_default().to_owned()
}
