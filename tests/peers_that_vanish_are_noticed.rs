//! A node that vanishes without a FIN is noticed within 60 s. An upstream that vanishes under an open
//! stream is too: neither side is left with a stream that is none.
//!
//! The sidecar runs in a network namespace of its own, and links to it are taken down. That needs root and Linux, and real
//! minutes: `cargo test --test peers_that_vanish_are_noticed -- --ignored --nocapture`.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{process::Command, thread, time::Duration};

use support::{
    Client, Post, Sidecar, Upstream,
    frames::Frames,
    http2::Node,
    mcp::{call, modern_call, progress},
    tls::{Authority, Front},
};
use tokio::time::Instant;

/// What is promised of nodes.
const PROMISED: Duration = Duration::from_secs(60);
/// What the sidecar's own probes of upstreams come to.
const OF_UPSTREAMS: Duration = Duration::from_secs(90);

/// A namespace with links from this one, `198.18.N.1` here and `198.18.N.2` there.
struct Network {
    name: String,
}

impl Network {
    fn new(links: u8) -> Self {
        let network = Self { name: format!("vanish{}", std::process::id() % 10_000) };
        let name = network.name.as_str();
        ip(&["netns", "add", name]);
        ip(&["-n", name, "link", "set", "lo", "up"]);
        for link in 0..links {
            let (here, there) = (network.link(link), format!("{}-{link}t", name.replace("vanish", "v")));
            ip(&["link", "add", &here, "type", "veth", "peer", "name", &there, "netns", name]);
            ip(&["addr", "add", &format!("198.18.{link}.1/24"), "dev", &here]);
            ip(&["link", "set", &here, "up"]);
            ip(&["-n", name, "addr", "add", &format!("198.18.{link}.2/24"), "dev", &there]);
            ip(&["-n", name, "link", "set", &there, "up"]);
        }
        network
    }

    fn link(&self, link: u8) -> String {
        format!("{}-{link}h", self.name.replace("vanish", "v"))
    }

    /// From now on no packet passes, and nobody is told.
    fn cut(&self, link: u8) -> Instant {
        ip(&["link", "set", &self.link(link), "down"]);
        Instant::now()
    }

    fn serve(&self, config: &str) -> Sidecar {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sidecar.toml");
        let top = "listen = \"0.0.0.0:0\"\nadmin = \"\"\nstate = \"memory:\"\n";
        std::fs::write(&file, format!("{top}{config}")).unwrap();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, env!("CARGO_BIN_EXE_mcp-sidecar"), "serve", "--config"]);
        command.arg(&file);
        Sidecar::spawn(command, folder)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().unwrap();
    assert!(output.status.success(), "ip {arguments:?} (root is needed): {output:?}");
}

/// Waits until `seen` has a moment to tell, for longer than any bound of a test.
fn wait(what: &str, since: Instant, bound: Duration, seen: impl Fn() -> Option<Instant>) {
    let began = Instant::now();
    loop {
        if let Some(at) = seen() {
            let took = at.saturating_duration_since(since);
            println!("{what}: noticed after {took:.1?}");
            assert!(took <= bound, "{what} took {took:?}");
            return;
        }
        assert!(began.elapsed() < bound + Duration::from_secs(10), "{what} was not noticed");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Link of what stays, of nodes that vanish, of upstreams that vanish.
const STAYS: u8 = 0;
const UPSTREAMS: u8 = 1;
const NODES: u8 = 2;

fn open_stream(reply: &mut support::upstream::Reply) {
    let Some(request) = reply.request(0) else { return };
    if request.head.field("x-silent").is_none() {
        reply.sse(&[]);
        reply.event(&progress(1, 1));
    }
    reply.hang();
}

#[test]
#[ignore = "takes minutes of real time and root; run by hand"]
fn a_node_within_a_minute_and_an_upstream_soon() {
    let network = Network::new(3);
    let stays = Upstream::by_connection_at("198.18.0.1", open_stream);
    let vanishes = Upstream::by_connection_at("198.18.1.1", open_stream);
    let behind = Upstream::by_connection(|reply| {
        let mut frames = Frames::begin(reply, None);
        if let Some((stream, _)) = frames.request(0) {
            frames.sse(stream);
            frames.event(stream, &progress(1, 1));
        }
        reply.hang();
    });
    let authority = Authority::new();
    let front = Front::start_at("198.18.1.1", authority.issue().acceptor(&["h2"], None), &behind.address);
    let ca = tempfile::tempdir().unwrap();
    std::fs::write(ca.path().join("ca.pem"), authority.pem()).unwrap();
    let sidecar = network.serve(&format!(
        "[upstreams.stays]\nurl = \"{}\"\n[upstreams.quiet]\nurl = \"{}\"\nkeepalive.interval = \"0\"\n\
         [upstreams.late]\nurl = \"{}\"\nkeepalive.interval = \"28s\"\n\
         [upstreams.one]\nurl = \"{}\"\n[upstreams.two]\nurl = \"https://198.18.1.1:{}/mcp\"\ntls = {{ ca = \"{}\" }}\n",
        stays.url(),
        stays.url(),
        stays.url(),
        vanishes.url(),
        front.port,
        ca.path().join("ca.pem").display()
    ));
    let port = sidecar.listen.rsplit(':').next().unwrap();
    let at = |link: u8| format!("198.18.{link}.2:{port}");

    // Nodes over their link, each with an upstream connection that has to end.
    let silent = Client::connect(&at(NODES));
    silent.send(&modern_call(1).at("/stays").field("X-Silent", "1"));
    stays.wait_request(0);
    let quiet = Client::connect(&at(NODES));
    quiet.send(&call(2).at("/quiet"));
    quiet.events(1);
    let commented = Client::connect(&at(NODES));
    commented.send(&call(3).at("/stays"));
    commented.events(1);
    let late = Client::connect(&at(NODES));
    late.send(&call(6).at("/late"));
    late.events(1);
    let http2 = Node::connect(&at(NODES));
    let mut stream = http2.send(&call(4).at("/quiet"));
    http2.wait_body(&mut stream, "\"progress\":1");

    // Nodes that stay, of upstreams that will not.
    let get = Client::connect(&at(STAYS));
    get.send(&Post::get().at("/one"));
    get.events(1);
    let get2 = Client::connect(&at(STAYS));
    get2.send(&Post::get().at("/two"));
    get2.events(1);
    let calls = Client::connect(&at(STAYS));
    calls.send(&call(5).at("/one"));
    calls.events(1);

    let nodes_gone = network.cut(NODES);
    let upstreams_gone = network.cut(UPSTREAMS);
    thread::scope(|scope| {
        let kinds = [
            "a pending answer",
            "a quiet stream",
            "a stream with comments",
            "a stream with a comment just before it is noticed",
            "an HTTP/2 stream",
        ];
        for (number, what) in kinds.into_iter().enumerate() {
            let stays = &stays;
            scope.spawn(move || {
                wait(&format!("node, {what}"), nodes_gone, PROMISED, || stays.connections()[number].closed)
            });
        }
        scope.spawn(|| {
            wait("upstream, GET over HTTP/1.1", upstreams_gone, OF_UPSTREAMS, || {
                get.bytes().ends_with(b"0\r\n\r\n").then(Instant::now)
            });
        });
        scope.spawn(|| {
            wait("upstream, GET over HTTP/2", upstreams_gone, OF_UPSTREAMS, || {
                get2.bytes().ends_with(b"0\r\n\r\n").then(Instant::now)
            });
        });
        scope.spawn(|| {
            wait("upstream, a call's stream", upstreams_gone, OF_UPSTREAMS, || {
                calls.bytes().ends_with(b"0\r\n\r\n").then(Instant::now)
            });
        });
    });
    assert!(String::from_utf8_lossy(&calls.bytes()).contains("upstream_failed"));
    for line in sidecar.wait_lines(8) {
        println!("{} {} {} {}", line["http_method"], line["upstream"], line["outcome"], line["error"]);
    }
}
