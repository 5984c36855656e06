//! A stream that an HTTP/2 upstream says it did not process is the failure
//! `upstream_refused`, with `not_sent`, and never sent again by the sidecar (RFC 9113 § 6.8, § 8.7). What the
//! upstream accepted before it goes away runs to its end. Its limit of streams holds up no call.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{collections::BTreeMap, thread};

use support::{
    Client, Gate, Sidecar, Upstream, Watched,
    frames::{CANCEL, Frames, REFUSED_STREAM, requests, resets},
    mcp::{call, cancel, modern_call, progress, result},
    sse,
    upstream::Reply,
};
use tempfile::TempDir;

/// A server that speaks HTTP/2 as the script writes it.
fn upstream(script: impl Fn(&mut Reply) + Send + Sync + 'static) -> Upstream {
    Upstream::by_connection(script).behind_tls(&["h2"])
}

fn before(upstream: &Upstream, more: &str) -> (Sidecar, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    (Sidecar::with_config(&(upstream.config(&folder) + more)), folder)
}

/// How often each request arrived, over all connections, by its id.
fn arrivals(upstream: &Upstream) -> BTreeMap<String, usize> {
    let mut arrivals = BTreeMap::new();
    for connection in upstream.connections() {
        for (_, body) in requests(&connection.bytes) {
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            *arrivals.entry(body["id"].to_string()).or_default() += 1;
        }
    }
    arrivals
}

fn refused(body: &serde_json::Value, id: u32) {
    let error = &body["error"];
    assert_eq!((&body["id"], &error["code"]), (&id.into(), &1502.into()), "{body}");
    assert_eq!(error["data"]["reason"], "upstream_refused", "{body}");
    assert_eq!(error["data"]["outcome"], "not_sent", "{body}");
}

#[test]
fn after_a_goaway_what_was_accepted_runs_on_and_what_was_not_is_refused_and_not_sent_again() {
    let (both, go) = (Gate::new(), Gate::new());
    let upstream = upstream({
        let (both, go) = (both.clone(), go.clone());
        move |reply| {
            let mut frames = Frames::begin(reply, None);
            let Some((first, body)) = frames.request(0) else { return };
            if String::from_utf8_lossy(&body).contains("\"id\":5") {
                frames.sse(first);
                frames.event(first, &result(5));
                return frames.end(first);
            }
            frames.sse(first);
            frames.event(first, &progress(1, 1));
            frames.request(1);
            both.open();
            frames.go_away(first);
            go.pass();
            for n in 2..=3 {
                frames.event(first, &progress(1, n));
            }
            frames.event(first, &result(1));
            frames.end(first);
        }
    });
    let (sidecar, _folder) = before(&upstream, "progress.min_interval = \"0\"\n");
    let first = sidecar.client();
    first.send(&call(1));
    first.events(1);
    let third = sidecar.client();
    third.send(&modern_call(3));
    both.pass();
    // By itself the connection would be kept: the first stream is still open.
    let answer = third.response();
    assert_eq!(answer.status(), 200);
    refused(&answer.json(), 3);
    let fifth = sidecar.client().ask(&call(5));
    assert_eq!(sse::read(&fifth.body).events[0].data, result(5));
    go.open();
    let told: Vec<_> = sse::read(&first.response().body).events.into_iter().map(|event| event.data).collect();
    assert_eq!(told, [progress(1, 1), progress(1, 2), progress(1, 3), result(1)]);
    assert_eq!(upstream.connections().len(), 2);
    assert!(arrivals(&upstream).values().all(|count| *count == 1), "{:?}", arrivals(&upstream));
    let line = sidecar.wait_line(|line| line["id"] == 3);
    let told = [&line["outcome"], &line["reason"], &line["upstream_http"]];
    assert_eq!(told, ["failed", "upstream_refused", "2"], "{line}");
}

#[test]
fn a_refused_stream_is_told_and_the_connection_goes_on() {
    let upstream = upstream(|reply| {
        let mut frames = Frames::begin(reply, None);
        for number in 0.. {
            let Some((stream, body)) = frames.request(number) else { return };
            if number % 2 == 0 {
                frames.reset(stream, REFUSED_STREAM);
                continue;
            }
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            frames.sse(stream);
            frames.event(stream, &result(&body["id"]));
            frames.end(stream);
        }
    });
    let (sidecar, _folder) = before(&upstream, "");
    for id in [1, 3, 5] {
        refused(&sidecar.client().ask(&call(id)).json(), id);
        let answer = sidecar.client().ask(&call(id + 1));
        assert_eq!(sse::read(&answer.body).events[0].data, result(id + 1));
    }
    assert_eq!(upstream.connections().len(), 1);
    assert!(arrivals(&upstream).values().all(|count| *count == 1), "{:?}", arrivals(&upstream));
}

#[test]
fn a_connection_that_ends_under_its_streams_leaves_their_effect_unknown() {
    let upstream = upstream(|reply| {
        let mut frames = Frames::begin(reply, None);
        frames.request(0);
        reply.break_off();
    });
    let (sidecar, _folder) = before(&upstream, "");
    let error = sidecar.client().ask(&call(1)).json()["error"].clone();
    assert_eq!((&error["code"], &error["data"]["outcome"]), (&1502.into(), &"unknown".into()));
    assert_eq!(error["data"]["reason"], "upstream_failed");
    assert_eq!(upstream.connections().len(), 1);
}

/// Answers `stream` calls with an event and nothing more, others with their result; tells which stream carries which id.
fn limited(limit: u32) -> Upstream {
    upstream(move |reply| {
        let mut frames = Frames::begin(reply, Some(limit));
        for number in 0.. {
            let Some((stream, body)) = frames.request(number) else { return };
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            frames.sse(stream);
            match body["id"].as_u64() {
                Some(id @ ..=50) => frames.event(stream, &progress(id, 1)),
                Some(id) => {
                    frames.event(stream, &result(id));
                    frames.end(stream);
                }
                None => frames.end(stream),
            }
        }
    })
}

fn streams(sidecar: &Sidecar, ids: std::ops::RangeInclusive<u32>) -> Vec<Client> {
    let open = |id| {
        let client = sidecar.client();
        client.send(&call(id));
        client.events(1);
        client
    };
    ids.map(open).collect()
}

#[test]
fn a_call_beyond_the_upstreams_limit_of_streams_goes_over_another_connection() {
    let upstream = limited(4);
    let (sidecar, _folder) = before(&upstream, "");
    let open = streams(&sidecar, 1..=4);
    assert_eq!(upstream.connections().len(), 1);
    let answer = sidecar.client().ask(&call(55));
    assert_eq!(sse::read(&answer.body).events[0].data, result(55));
    assert_eq!(upstream.connections().len(), 2);
    // A cancel gets through although the connection of its call is full.
    assert!(sidecar.client().ask(&cancel(2)).status() < 300);
    open[1].response();
    let reset = Watched::new(());
    reset.wait(
        "a reset of the second stream",
        |()| format!("{:?}", resets(&upstream.connections()[0].bytes)),
        |()| (resets(&upstream.connections()[0].bytes) == [(3, CANCEL)]).then_some(()),
    );
    drop(open);
}

#[test]
fn however_low_that_limit_is_no_call_waits_for_another_one() {
    let upstream = limited(1);
    let (sidecar, _folder) = before(&upstream, "");
    let open = streams(&sidecar, 1..=40);
    assert_eq!(open.len(), 40);
    let ids: Vec<u32> = (60..68).collect();
    thread::scope(|scope| {
        for id in ids {
            let sidecar = &sidecar;
            scope.spawn(move || {
                let answer = sidecar.client().ask(&call(id));
                assert_eq!(sse::read(&answer.body).events[0].data, result(id));
            });
        }
    });
    assert!(arrivals(&upstream).values().all(|count| *count == 1), "{:?}", arrivals(&upstream));
}

#[test]
fn a_server_that_lets_no_stream_begin_is_waited_for_on_few_connections() {
    let upstream = upstream(|reply| {
        Frames::begin(reply, Some(0));
        reply.hang();
    });
    let (sidecar, _folder) = before(&upstream, "idle_timeout = \"700ms\"\n");
    let clients: Vec<_> = (1..=3)
        .map(|id| {
            let client = sidecar.client();
            client.send(&call(id));
            client
        })
        .collect();
    for client in clients {
        assert_eq!(client.response().json()["error"]["data"]["reason"], "idle_timeout");
    }
    assert!(upstream.connections().len() <= 3, "{}", upstream.connections().len());
}
