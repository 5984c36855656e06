//! Each key bounds what it says, and what is beyond it is told as a busy result or an error; afterwards everything is as before. `calls` has its own file (`own_limits_answer_busy`), and `client_stall` is in
//! `two_clocks_bound_every_request`.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{thread, time::Duration};

use serde_json::Value;
use support::{
    BOUND, Client, Gate, Post, Sidecar, Upstream, Watched,
    http2::Node,
    mcp::{MODERN, call, modern_call, progress, result},
    sse,
};
use tokio::time::Instant;

fn sidecar(upstream: &Upstream, limits: &str) -> Sidecar {
    Sidecar::with_config(&format!("[limits]\n{limits}\n[upstreams.mcp]\nurl = \"{}\"\n", upstream.url()))
}

/// Answers a request with its result; a `GET` with a stream that stays open.
fn plain() -> Upstream {
    Upstream::start(|request, reply| {
        if request.method() == "GET" {
            reply.sse(&[]);
            return reply.hang();
        }
        match serde_json::from_slice::<Value>(&request.body).unwrap_or_default().get("id") {
            Some(id) => reply.json(200, &[], &result(id)),
            None => reply.head(202, &[("Content-Length", "0")]),
        }
    })
}

const BUFFERED: &str = "mcp_sidecar_buffered_bytes";

#[test]
fn connections_beyond_the_limit_wait_until_one_ends() {
    let upstream = plain();
    let sidecar = sidecar(&upstream, "connections = 2");
    let (first, second) = (sidecar.client(), sidecar.client());
    assert_eq!((first.ask(&call(1)).text(), second.ask(&call(2)).text()), (result(1), result(2)));
    let waiting: Vec<_> = (3..6)
        .map(|id| {
            let client = sidecar.client();
            client.send(&call(id));
            client
        })
        .collect();
    // Those that are let in are served, the others have come as far as the kernel.
    assert_eq!(first.ask(&call(9)).text(), result(9));
    assert_eq!((upstream.count(), sidecar.metric("mcp_sidecar_connections")), (3, 2));
    drop(first);
    for (id, client) in (3..).zip(waiting) {
        assert_eq!(client.response().text(), result(id));
    }
    assert_eq!(second.ask(&call(8)).text(), result(8));
    drop(second);
    sidecar.wait_metric("mcp_sidecar_connections", |open| open == 0);
}

fn listen(id: u32) -> Post {
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":{id},"method":"subscriptions/listen","params":{{"notifications":{{}},"_meta":{{"io.modelcontextprotocol/protocolVersion":"{MODERN}"}}}}}}"#
    );
    Post::modern("subscriptions/listen", None, body)
}

#[test]
fn streams_have_a_limit_of_their_own_and_calls_pass_beside_it() {
    let upstream = Upstream::start(|request, reply| {
        if request.method() == "GET" || request.json()["method"] == "subscriptions/listen" {
            reply.sse(&[]);
            return reply.hang();
        }
        reply.json(200, &[], &result(&request.json()["id"]));
    });
    let sidecar = sidecar(&upstream, "streams = 2\ncalls = 1");
    let open: Vec<_> = [Post::get(), listen(1)]
        .iter()
        .map(|post| {
            let client = sidecar.client();
            client.send(post);
            assert_eq!(client.head().status(), 200);
            client
        })
        .collect();
    for post in [Post::get(), listen(2)] {
        let refused = sidecar.client().ask(&post);
        assert_eq!((refused.status(), refused.head.field("retry-after")), (503, Some("1")));
        assert_eq!(refused.json()["error"]["code"], 1503);
    }
    assert_eq!(upstream.count(), 2, "nothing was sent");
    assert_eq!(sidecar.client().ask(&call(3)).text(), result(3));
    for (number, client) in open.into_iter().enumerate() {
        drop(client);
        upstream.wait_closed(number);
    }
    sidecar.wait_lines(5);
    let again = sidecar.client();
    again.send(&Post::get());
    assert_eq!(again.head().status(), 200);
}

#[test]
fn streams_that_were_left_hold_nothing_and_many_that_stay_hold_up_no_call() {
    let upstream = plain();
    let sidecar = sidecar(&upstream, "");
    let open = |count: usize| -> Vec<Client> {
        (0..count)
            .map(|_| {
                let client = sidecar.client();
                client.send(&Post::get());
                client.head();
                client
            })
            .collect()
    };
    drop(open(300));
    (0..300).for_each(|number| drop(upstream.wait_closed(number)));
    let stay = open(300);
    assert_eq!(sidecar.client().ask(&call(1)).text(), result(1));
    assert_eq!(stay.len(), 300);
}

/// A call whose whole body has so many bytes.
fn sized(id: u32, size: usize) -> Post {
    let mut post = call(id);
    let short = String::from_utf8(post.body).unwrap();
    let filler = "x".repeat(size - short.len() - r#""text":"""#.len());
    post.body = short.replace(r#""arguments":{}"#, &format!(r#""arguments":{{"text":"{filler}"}}"#)).into();
    assert_eq!(post.body.len(), size);
    post
}

/// The same in chunks.
fn chunked(post: &Post) -> Post {
    let mut chunked = post.clone().field("Transfer-Encoding", "chunked");
    chunked.body = Vec::new();
    for piece in post.body.chunks(100_000) {
        chunked.body.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
        chunked.body.extend_from_slice(piece);
        chunked.body.extend_from_slice(b"\r\n");
    }
    chunked.body.extend_from_slice(b"0\r\n\r\n");
    chunked
}

#[test]
fn a_request_may_have_four_mebibytes_and_not_a_byte_more() {
    const MAX: usize = 4 << 20;
    let upstream = plain();
    let sidecar = sidecar(&upstream, "");
    for size in [150_000, (2 << 20) + 1, MAX] {
        for post in [sized(1, size), chunked(&sized(1, size))] {
            assert_eq!(sidecar.client().ask(&post).text(), result(1), "{size}");
        }
    }
    let count = upstream.count();
    assert_eq!(upstream.requests()[count - 1].body.len(), MAX);
    for post in [sized(1, MAX + 1), chunked(&sized(1, MAX + 1))] {
        let refused = sidecar.client().ask(&post);
        assert_eq!((refused.status(), &refused.json()["error"]["code"]), (413, &1413.into()));
    }
    // The declared length is enough: nothing of the body is waited for.
    let client = sidecar.client();
    client.send(&Post::legacy("").field("Content-Length", "99999999999"));
    assert_eq!(client.response().status(), 413);
    assert_eq!(upstream.count(), count);
    sidecar.wait_metric(BUFFERED, |bytes| bytes == 0);
}

/// A result of about so many bytes.
fn large(id: u32, size: usize) -> String {
    let text = "x".repeat(size);
    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"content":[{{"type":"text","text":"{text}"}}]}}}}"#)
}

#[test]
fn an_answer_that_must_be_held_and_an_event_have_their_limits() {
    let upstream = Upstream::start(|request, reply| {
        let size = request.head.field("x-size").unwrap().parse().unwrap();
        let id = u32::try_from(request.json()["id"].as_u64().unwrap()).unwrap();
        if request.head.field("x-event").is_none() {
            return reply.json(200, &[], &large(id, size));
        }
        reply.sse(&[]);
        reply.event(&progress(id, 1));
        reply.event(&large(id, size));
        reply.end();
    });
    let sidecar = sidecar(&upstream, "response_body = \"64KiB\"\nevent = \"32KiB\"");
    let list = |id: u32| Post::legacy(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"resources/read"}}"#));
    let mut id = 0;
    for _ in 0..2 {
        id += 1;
        let answer = sidecar.client().ask(&call(id).field("X-Size", "60000"));
        assert_eq!(answer.text(), large(id, 60_000));
        let error = sidecar.client().ask(&call(id).field("X-Size", "70000")).json();
        assert_eq!(error["error"]["data"]["reason"], "upstream_failed", "{error}");
        assert_eq!(error["error"]["data"]["outcome"], "unknown", "{error}");
        // What is no call need not be held.
        let other = sidecar.client().ask(&list(id).field("X-Size", "200000"));
        assert_eq!(other.text(), large(id, 200_000));
        for (size, told) in [("30000", large(id, 30_000)), ("33000", String::new())] {
            let response = sidecar.client().ask(&call(id).field("X-Size", size).field("X-Event", "1"));
            let events = sse::read(&response.body).events;
            assert_eq!((events.len(), &events[0].data), (2, &progress(id, 1)));
            match told.is_empty() {
                false => assert_eq!(events[1].data, told),
                true => assert_eq!(events[1].json()["error"]["data"]["reason"], "upstream_failed"),
            }
        }
    }
    sidecar.wait_metric(BUFFERED, |bytes| bytes == 0);
}

#[test]
fn a_head_or_a_body_that_comes_too_slowly_ends_its_connection_and_no_other() {
    let upstream = plain();
    let sidecar = sidecar(&upstream, "header_timeout = \"400ms\"\nbody_timeout = \"400ms\"");
    let patient = sidecar.client();
    assert_eq!(patient.ask(&call(1)).text(), result(1));
    // A byte now and then does not help: the whole head has its time.
    let slow = sidecar.client();
    let began = Instant::now();
    slow.write("POST /mcp HTTP/1.1\r\nX-Slow: ");
    while slow.closed_yet().is_none() {
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| slow.write("x")));
        thread::sleep(Duration::from_millis(20));
        assert!(began.elapsed() < BOUND, "it goes on");
    }
    let body = sidecar.client();
    body.write("POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{");
    let refused = body.response();
    assert_eq!((refused.status(), &refused.json()["error"]["code"]), (408, &1408.into()));
    body.closed();
    assert_eq!(upstream.count(), 1);
    assert_eq!(patient.ask(&call(2)).text(), result(2), "between its requests a connection may rest");
}

/// Answers each call with a JSON body of about `size` bytes, in two halves; the second comes when the gate opens if the
/// call says so.
fn halves(size: usize, gate: &Gate) -> Upstream {
    let gate = gate.clone();
    Upstream::start(move |request, reply| {
        let id = u32::try_from(request.json()["id"].as_u64().unwrap()).unwrap();
        let whole = large(id, size);
        let (first, second) = whole.split_at(whole.len() / 2);
        reply.head(200, &[("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]);
        reply.chunk(first);
        if request.head.field("x-hold").is_some() {
            gate.pass();
        }
        reply.chunk(second);
        reply.end();
    })
}

#[test]
fn answers_that_are_larger_together_than_may_be_held_all_arrive() {
    const SIZE: usize = 3 << 20;
    let upstream = halves(SIZE, &Gate::new());
    let sidecar = sidecar(&upstream, "buffered = \"4MiB\"");
    let began = Instant::now();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..12)
            .map(|id| {
                let client = sidecar.client();
                client.send(&call(id));
                (id, client)
            })
            .collect();
        for (id, client) in clients {
            scope.spawn(move || {
                let answer = client.response();
                // One that came while the limit was reached is busy, and says so.
                let busy = answer.body.len() < 1000 && answer.json()["result"]["isError"] == true;
                assert!(busy || answer.text() == large(id, SIZE), "{} bytes", answer.body.len());
            });
        }
    });
    assert!(began.elapsed() < Duration::from_secs(30), "no clock was waited for");
    let lines = sidecar.wait_lines(12);
    assert!(lines.iter().filter(|line| line["outcome"] == "ok").count() >= 2, "{lines:?}");
    assert!(lines.iter().all(|line| line["outcome"] == "ok" || line["outcome"] == "busy"), "{lines:?}");
    sidecar.wait_metric(BUFFERED, |bytes| bytes == 0);
}

#[test]
fn one_that_stands_still_at_the_limit_holds_up_no_other_that_is_on_its_way() {
    const SIZE: usize = 3 << 20;
    let gate = Gate::new();
    let upstream = halves(SIZE, &gate);
    let sidecar = sidecar(&upstream, "buffered = \"4MiB\"");
    // Half of each is there: 6 MiB, where 4 may be held.
    let held: Vec<_> = (1..=4)
        .map(|id| {
            let client = sidecar.client();
            client.send(&call(id).field("X-Hold", "1"));
            client
        })
        .collect();
    sidecar.wait_metric(BUFFERED, |bytes| bytes >= 4 << 20);
    let busy = sidecar.client().ask(&call(5));
    assert_eq!(busy.json()["result"]["_meta"]["oz0/retry_after"], 1, "new calls are busy");
    assert_eq!(busy.head.field("retry-after"), Some("1"));
    assert_eq!(upstream.count(), 4);
    // One of them never goes on; the others do.
    for client in &held[1..] {
        assert!(client.closed_yet().is_none());
    }
    (0..4).for_each(|_| gate.open());
    for (id, client) in (1..).zip(&held) {
        assert_eq!(client.response().text(), large(id, SIZE));
    }
    sidecar.wait_metric(BUFFERED, |bytes| bytes == 0);
    assert_eq!(sidecar.client().ask(&call(6)).text(), large(6, SIZE), "and it is left again");
}

#[test]
fn what_is_held_in_all_stays_below_its_limit_and_so_does_the_memory_of_the_process() {
    const KIB: usize = 1024;
    // More than the kernel takes for a node that does not read.
    const SIZE: usize = 7 << 20;
    let upstream = Upstream::start(|request, reply| {
        let id = u32::try_from(request.json()["id"].as_u64().unwrap()).unwrap();
        match id % 3 {
            // A result that is held whole for a node that does not read.
            0 => reply.json(200, &[], &large(id, SIZE)),
            // One large event.
            1 => {
                reply.sse(&[]);
                reply.event(&large(id, SIZE));
                reply.end();
            }
            // A flood that nothing of may be dropped.
            _ => {
                reply.sse(&[]);
                let note = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"DATA"}}"#;
                let note = note.replace("DATA", &"x".repeat(4000));
                while !reply.closed() {
                    reply.event(&note);
                }
            }
        }
    });
    for http2 in [false, true] {
        let sidecar = Sidecar::with_config(&format!(
            "[limits]\nbuffered = \"24MiB\"\nresponse_body = \"8MiB\"\nevent = \"8MiB\"\n\
             [upstreams.mcp]\nurl = \"{}\"\nprogress.queue = 1024\ncalls = 200\n",
            upstream.url()
        ));
        assert_eq!(sidecar.client().ask(&call(0)).status(), 200);
        let before = sidecar.rss_kib();
        // 80 results and events of 7 MiB, 40 floods, and nobody reads.
        let node = Node::connect(&sidecar.listen);
        let (mut clients, mut streams) = (Vec::new(), Vec::new());
        for id in 0..120 {
            if http2 {
                streams.push(node.send(&call(id)));
            } else {
                let client = Client::stalled(&sidecar.listen, Some(4096));
                client.send(&call(id));
                clients.push(client);
            }
        }
        sidecar.wait_metric(BUFFERED, |bytes| bytes >= 24 << 20);
        let mut most = (0, 0);
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            most = (most.0.max(sidecar.metric(BUFFERED)), most.1.max(sidecar.rss_kib()));
            thread::sleep(Duration::from_millis(20));
        }
        let grown = most.1.saturating_sub(before);
        println!("HTTP/2 {http2}: {grown} KiB more than before, {} bytes held", most.0);
        assert!(most.0 <= (24 + 8 + 8) << 20, "{} bytes are held", most.0);
        assert!(grown < (24 + 8 + 64) * KIB, "{grown} KiB more than before, {} bytes held", most.0);
        assert_eq!(sidecar.client().ask(&call(999)).json()["result"]["isError"], true, "busy");
        drop((clients, streams, node));
        sidecar.wait_metric(BUFFERED, |bytes| bytes == 0);
        assert_eq!(sidecar.client().ask(&call(999)).status(), 200);
    }
}

/// Tokens, ids of requests and what an `initialize` says are chosen by others.
#[test]
fn what_is_remembered_of_others_words_is_short() {
    const LONG: usize = 64 << 10;
    const STREAMS: usize = 12;
    let written = Watched::new(0);
    let count = written.clone();
    let upstream = Upstream::start(move |request, reply| {
        let long = |n: usize| format!("\"{n}{}\"", "x".repeat(LONG));
        if request.json()["method"] == "initialize" {
            let session = format!("{}{}", request.number, "s".repeat(10_000));
            let answer = format!(r#"{{"jsonrpc":"2.0","id":1,"result":{{"protocolVersion":{}}}}}"#, long(0));
            return reply.json(200, &[("Mcp-Session-Id", &session)], &answer);
        }
        reply.sse(&[]);
        for n in 0..60 {
            reply.event(&progress(long(n), n + 1));
            reply.event(&format!(r#"{{"jsonrpc":"2.0","id":{},"method":"elicitation/create"}}"#, long(n)));
        }
        count.change(|count| *count += 1);
        reply.hang();
    });
    let sidecar = sidecar(&upstream, "");
    let stream = || {
        let node = sidecar.client();
        node.send(&call(1));
        node.head();
        node
    };
    let initialize = |id: usize| {
        let client = "c".repeat(LONG);
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"initialize","params":{{"clientInfo":{{"name":"{client}","version":"{client}"}}}}}}"#
        );
        assert_eq!(sidecar.client().ask(&Post::new(body)).status(), 200);
    };
    let passed = |streams: usize| {
        written.wait("streams to be written", |n| n.to_string(), |n| (*n >= streams).then_some(()));
        upstream.wait_taken();
        sidecar.wait_metric(BUFFERED, |bytes| bytes == 0);
        sidecar.rss_kib()
    };
    let first = stream();
    initialize(1);
    let before = passed(1);
    let more: Vec<_> = (0..STREAMS).map(|_| stream()).collect();
    (0..400).for_each(initialize);
    let grown = passed(1 + STREAMS).saturating_sub(before);
    println!("{grown} KiB more than before");
    // Each kind alone would be more than 75 MiB.
    assert!(grown < 40 * 1024, "{grown} KiB more than before");
    drop((first, more));
}

#[test]
fn what_nodes_upload_counts_too() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |request, reply| {
        if request.head.field("x-hold").is_some() {
            pass.pass();
        }
        reply.json(200, &[], &result(&request.json()["id"]));
    });
    let sidecar = sidecar(&upstream, "buffered = \"4MiB\"");
    let first = sidecar.client();
    first.send(&sized(1, 3 << 20).field("X-Hold", "1"));
    upstream.wait_request(0);
    assert_eq!(sidecar.metric(BUFFERED), 3 << 20);
    // One at a time is still taken in, and then its call is busy.
    thread::scope(|scope| {
        for id in 2..5 {
            let sidecar = &sidecar;
            scope.spawn(move || {
                let answer = sidecar.client().ask(&sized(id, 2 << 20)).json();
                assert_eq!(answer["result"]["_meta"]["oz0/retryable"], true, "{answer}");
            });
        }
    });
    assert_eq!(upstream.count(), 1);
    sidecar.wait_metric(BUFFERED, |bytes| bytes == 3 << 20);
    assert_eq!(sidecar.client().ask(&call(6)).text(), result(6));
    gate.open();
    assert_eq!(first.response().text(), result(1));
    sidecar.wait_metric(BUFFERED, |bytes| bytes == 0);
    assert_eq!(sidecar.client().ask(&sized(7, 2 << 20)).text(), result(7));
}

#[test]
fn an_http2_node_may_open_many_streams_and_one_that_it_does_not_read_takes_no_place_of_the_others() {
    let upstream = plain();
    let sidecar = sidecar(&upstream, "calls = 1000");
    let node = Node::connect(&sidecar.listen);
    let mut streams: Vec<_> = (0..100).map(|id| node.send(&modern_call(id))).collect();
    for (id, stream) in streams.iter_mut().enumerate() {
        assert_eq!(node.rest(stream), result(id));
    }
}
