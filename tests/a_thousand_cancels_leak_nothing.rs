//! Whatever ends an exchange, nothing of it stays: no file, no thread, no place among what runs, no memory: the
//! sidecar lives as long as its node's machine.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use support::{
    BOUND, Post, Request, Sidecar, Upstream,
    http2::Node,
    mcp::{call, cancel, modern_call, progress},
    upstream::Reply,
};
use tokio::time::Instant;

const WORKERS: usize = 8;

fn script(request: &Request, reply: &mut Reply) {
    if request.json().get("id").is_none() {
        return reply.json(202, &[], "");
    }
    if request.head.field("x-silent").is_none() {
        reply.sse(&[]);
        reply.event(&progress(&request.json()["id"], 1));
    }
    reply.hang();
}

/// One call that is cancelled, in one of several ways.
fn cancelled(sidecar: &Sidecar, upstream: &Upstream, number: usize) {
    let node = sidecar.client();
    let id = format!("\"c{number}\"");
    let arrived = |node: &Post| {
        let body = node.body.clone();
        upstream.wait_request_where(|request| request.body == body);
    };
    match number % 5 {
        0 => {
            node.send(&call(&id));
            node.events(1);
        }
        1 => {
            let post = modern_call(&id).field("X-Silent", "1");
            node.send(&post);
            arrived(&post);
            node.reset();
        }
        2 => {
            node.send(&call(&id));
            node.events(1);
            assert_eq!(sidecar.client().ask(&cancel(&id)).status(), 202);
            node.response();
        }
        3 => {
            let body = format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#
            );
            let post = modern_call(&id).field("X-Silent", "1");
            node.send(&post);
            arrived(&post);
            let cancels = Post::modern("notifications/cancelled", None, body);
            assert_eq!(sidecar.client().ask(&cancels).status(), 202);
            node.response();
        }
        _ => {
            let h2 = Node::connect(&sidecar.listen);
            let mut stream = h2.send(&call(&id));
            h2.head(&mut stream);
            h2.reset(stream);
        }
    }
}

fn many(sidecar: &Sidecar, upstream: &Upstream, from: usize, to: usize) {
    let next = AtomicUsize::new(from);
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= to {
                        return;
                    }
                    cancelled(sidecar, upstream, number);
                }
            });
        }
    });
}

/// Waits until nothing runs.
fn quiet(sidecar: &Sidecar, upstream: &Upstream) {
    sidecar.wait_metric("mcp_sidecar_exchanges_in_flight", |running| running == 0);
    // Idle connections may stay for the next call; a cancelled call's may not.
    let carriers: Vec<usize> = upstream
        .requests()
        .iter()
        .filter(|request| request.json().get("id").is_some())
        .map(|request| request.connection)
        .collect();
    carriers.into_iter().for_each(|number| drop(upstream.wait_closed(number)));
}

#[test]
fn files_threads_places_and_memory_are_as_before() {
    let upstream = Upstream::start(script);
    let sidecar = Sidecar::with_config(&format!(
        "[limits]\ncalls = 16\nstreams = 16\n[upstreams.mcp]\nurl = \"{}\"\ncalls = 16\nlegacy_disconnect = \"cancel\"\n",
        upstream.url()
    ));
    // What pools and the allocator keep is there after the first of them.
    many(&sidecar, &upstream, 0, 200);
    quiet(&sidecar, &upstream);
    let (fds, threads, rss) = (sidecar.fds(), sidecar.threads(), sidecar.rss_kib());
    many(&sidecar, &upstream, 200, 1200);
    quiet(&sidecar, &upstream);
    let end = Instant::now() + BOUND;
    while sidecar.fds() > fds + WORKERS {
        assert!(Instant::now() < end, "{} files after {fds}", sidecar.fds());
        thread::yield_now();
    }
    assert!(sidecar.threads() <= threads + 2, "{} threads after {threads}", sidecar.threads());
    assert!(sidecar.rss_kib() < rss + 16 * 1024, "{} KiB after {rss}", sidecar.rss_kib());
    assert_eq!(sidecar.metric("mcp_sidecar_buffered_bytes"), 0);

    let lines = sidecar.lines();
    let calls: Vec<_> = lines.iter().filter(|line| line["rpc"] == "tools/call").collect();
    assert_eq!(calls.len(), 1200);
    for line in calls {
        assert_eq!(line["outcome"], "cancelled", "{line}");
        assert!(line["cancel_ms"].is_number(), "{line}");
    }
    // Every place is free again.
    let open: Vec<_> = (0..16)
        .map(|number| {
            let node = sidecar.client();
            node.send(&call(number));
            assert_eq!(node.head().field("content-type"), Some("text/event-stream"));
            node
        })
        .collect();
    assert_eq!(sidecar.client().ask(&call(16)).json()["result"]["_meta"]["oz0/retryable"], true);
    drop(open);
    assert!(!sidecar.stderr().contains("panic"), "{}", sidecar.stderr());
}
