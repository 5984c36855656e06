//! Streams that lose their upstream at once do not come back at once: full jitter, each for itself. A recovering server must not fall over those that waited for it.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{collections::HashSet, thread, time::Duration};

use serde_json::Value;
use support::{BOUND, Port, Sidecar, Watched, mcp};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    sync::watch,
    task::JoinHandle,
    time::Instant,
};

const STREAMS: usize = 1000;

/// An upstream that acknowledges whoever listens.
struct Upstream {
    runtime: Runtime,
    port: Port,
    accepting: Option<JoinHandle<()>>,
    /// The moment of each request.
    requests: Watched<Vec<Instant>>,
    /// Changes when all streams are dropped.
    drops: watch::Sender<usize>,
}

impl Upstream {
    fn start() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (requests, drops) = (Watched::default(), watch::Sender::new(0));
        let mut upstream = Self { runtime, port: Port::reserve(2), accepting: None, requests, drops };
        upstream.come_up();
        upstream
    }

    fn come_up(&mut self) {
        let listener = self.port.open();
        listener.set_nonblocking(true).unwrap();
        let (requests, drops) = (self.requests.clone(), self.drops.clone());
        self.accepting = Some(self.runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(acknowledge(stream, requests.clone(), drops.subscribe()));
            }
        }));
    }

    /// Drops every stream; says when.
    fn drop_all(&self) -> Instant {
        self.requests.change(Vec::clear);
        let now = Instant::now();
        self.drops.send_modify(|drops| *drops += 1);
        now
    }

    /// Listens no more, and drops every stream.
    fn go_down(&mut self) {
        let accepting = self.accepting.take().unwrap();
        accepting.abort();
        assert!(self.runtime.block_on(accepting).unwrap_err().is_cancelled());
        self.drop_all();
    }

    fn wait_requests(&self) -> Vec<Instant> {
        self.requests.wait_for(
            6 * BOUND,
            "all to come",
            |requests| requests.len().to_string(),
            |requests| (requests.len() == STREAMS).then(|| requests.clone()),
        )
    }

    fn sidecar(&self) -> Sidecar {
        Sidecar::with_config(&format!(
            "[log]\nlevel = \"debug\"\n[upstreams.mcp]\nurl = \"http://{}/mcp\"\n",
            self.port.address
        ))
    }

    /// Nodes that listen.
    fn nodes(&self, sidecar: &Sidecar) -> Watched<Read> {
        let read = Watched::new(Read::default());
        for number in 0..STREAMS {
            self.runtime.spawn(node(sidecar.listen.clone(), number, read.clone()));
        }
        wait(&read, |read| read.acknowledged == STREAMS);
        read
    }
}

async fn acknowledge(
    mut stream: TcpStream,
    requests: Watched<Vec<Instant>>,
    mut drops: watch::Receiver<usize>,
) {
    let mut request = Vec::new();
    while !request.ends_with(b"}}") {
        if stream.read_buf(&mut request).await.unwrap_or(0) == 0 {
            return;
        }
    }
    requests.change(|requests| requests.push(Instant::now()));
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
    let acknowledged = mcp::event(
        r#"{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"notifications":{"toolsListChanged":true}}}"#,
    );
    let _ = stream.write_all(format!("{head}{acknowledged}").as_bytes()).await;
    let _ = drops.changed().await;
}

/// How many events all nodes together have read.
#[derive(Debug, Default)]
struct Read {
    acknowledged: usize,
    changed: usize,
    ended: usize,
    /// Of these, how many with their terminator, and with nothing but an acknowledgement.
    ended_as_drained: usize,
}

async fn node(address: String, number: usize, read: Watched<Read>) {
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":{number},"method":"subscriptions/listen","params":{{"notifications":{{"toolsListChanged":true}}}}}}"#
    );
    let post = mcp::Post::modern("subscriptions/listen", None, body);
    let mut stream = TcpStream::connect(&address).await.unwrap();
    stream.write_all(&post.bytes(&address)).await.unwrap();
    let (mut bytes, mut seen) = (Vec::new(), [0; 2]);
    while stream.read_buf(&mut bytes).await.unwrap_or(0) > 0 {
        let text = String::from_utf8_lossy(&bytes);
        let count =
            ["subscriptions/acknowledged", "tools/list_changed"].map(|name| text.matches(name).count());
        read.change(|read| {
            read.acknowledged += count[0] - seen[0];
            read.changed += count[1] - seen[1];
        });
        seen = count;
    }
    let text = String::from_utf8_lossy(&bytes);
    let as_drained = text.ends_with("\r\n0\r\n\r\n") && text.matches("data: ").count() == 1;
    read.change(|read| {
        read.ended += 1;
        read.ended_as_drained += usize::from(as_drained);
    });
}

fn wait(read: &Watched<Read>, wanted: impl Fn(&Read) -> bool) {
    read.wait_for(
        6 * BOUND,
        "all nodes to read on",
        |read| format!("{read:?}"),
        |read| wanted(read).then_some(()),
    );
}

/// How many requests came in each 100 ms after `from`; printed.
fn histogram(from: Instant, requests: &[Instant]) -> Vec<usize> {
    let mut slots = Vec::new();
    for at in requests {
        let slot = usize::try_from(at.saturating_duration_since(from).as_millis() / 100).unwrap();
        slots.resize(slots.len().max(slot + 1), 0);
        slots[slot] += 1;
    }
    for (slot, count) in slots.iter().enumerate() {
        println!("{:>5} ms {count:>5} {}", slot * 100, "#".repeat(count / 10));
    }
    slots
}

/// The waits before the first attempts, as the sidecar says them.
fn first_waits(sidecar: &Sidecar) -> Vec<Duration> {
    let lines = sidecar.stderr();
    let fields =
        lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()?.get("fields").cloned());
    let first = fields.filter(|fields| fields["attempt"] == 1 && fields["wait"].is_string());
    first.map(|fields| duration(fields["wait"].as_str().unwrap())).collect()
}

/// A duration as `Debug` shows it.
fn duration(text: &str) -> Duration {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap();
    let unit = [("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)]
        .into_iter()
        .find(|unit| unit.0 == &text[end..]);
    Duration::from_secs_f64(text[..end].parse::<f64>().unwrap() * unit.unwrap().1)
}

#[test]
fn a_thousand_that_are_dropped_at_once_are_all_back_and_not_at_once() {
    let upstream = Upstream::start();
    let sidecar = upstream.sidecar();
    let read = upstream.nodes(&sidecar);
    let dropped = upstream.drop_all();
    let requests = upstream.wait_requests();
    wait(&read, |read| read.changed == STREAMS);
    assert_eq!(read.lock().ended, 0);
    // Only to be looked at: on a busy machine what was spread arrives together.
    histogram(dropped, &requests);
    // Up to 250 ms, with the same chance at any moment of them.
    let waits = first_waits(&sidecar);
    assert_eq!(waits.len(), STREAMS);
    assert!(waits.iter().collect::<HashSet<_>>().len() > STREAMS * 99 / 100);
    for from in [0, 50, 100, 150, 200] {
        let within = waits.iter().filter(|wait| (from..from + 50).contains(&wait.as_millis())).count();
        assert!(
            (STREAMS / 10..STREAMS * 3 / 10).contains(&within),
            "{within} of the waits are of {from} ms and more"
        );
    }
}

#[test]
fn a_thousand_that_wait_for_an_upstream_which_is_down_are_all_back_when_it_is() {
    let mut upstream = Upstream::start();
    let sidecar = upstream.sidecar();
    let read = upstream.nodes(&sidecar);
    upstream.go_down();
    // So long that every wait has grown to its longest.
    thread::sleep(Duration::from_secs(60));
    assert_eq!(upstream.requests.lock().len(), 0);
    let up = Instant::now();
    upstream.come_up();
    let requests = upstream.wait_requests();
    wait(&read, |read| read.changed == STREAMS);
    assert_eq!(read.lock().ended, 0);
    assert_eq!(read.lock().acknowledged, STREAMS);
    let slots = histogram(up, &requests);
    assert!(slots.iter().all(|count| *count <= STREAMS / 3), "{slots:?}");
}

/// Those that wait hold up no end: each node's stream ends as one that is open does, and each exchange has its line.
#[test]
fn a_thousand_that_wait_for_an_upstream_which_is_gone_end_at_once_with_the_drain() {
    for answers_nothing in [false, true] {
        let mut upstream = Upstream::start();
        let mut sidecar = upstream.sidecar();
        let read = upstream.nodes(&sidecar);
        upstream.go_down();
        let asked: Vec<_> = match answers_nothing {
            true => upstream.port.open().incoming().take(STREAMS).collect(),
            // So often that the next waits are seconds.
            false => {
                sidecar.wait_said("listening again", 5 * STREAMS);
                Vec::new()
            }
        };
        let begun = Instant::now();
        sidecar.signal("TERM");
        wait(&read, |read| read.ended == STREAMS);
        assert!(sidecar.wait_exit().success());
        let took = begun.elapsed();
        println!("ended after {took:?}");
        // Far above what it takes on a busy machine, and far below what a drain may take.
        assert!(took < Duration::from_secs(15), "{took:?}");
        assert_eq!(read.lock().ended_as_drained, STREAMS, "{read:?}");
        assert_eq!(read.lock().changed, 0);
        let lines = sidecar.lines();
        let ids: HashSet<_> = lines.iter().map(|line| line["id"].as_u64()).collect();
        assert_eq!((lines.len(), ids.len()), (STREAMS, STREAMS));
        for line in &lines {
            assert_eq!((&line["outcome"], &line["cancelled_by"]), (&"cancelled".into(), &"drain".into()));
            assert_eq!((&line["status"], &line["events"]), (&200.into(), &1.into()), "{line}");
        }
        drop(asked);
    }
}
