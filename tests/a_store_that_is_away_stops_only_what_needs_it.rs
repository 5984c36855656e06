//! While the state store is away calls without identity go on, a call that needs the
//! store is busy and not sent, the log and `/readyz` say so, and the sidecar recovers by itself. A response is delivered at
//! once even if its commit fails, which is tried again.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{fs, time::Duration};

use serde_json::{Value, json};
use support::{
    Gate, Sidecar, Upstream,
    http::Response,
    keyed::{Call, answering, assert_busy, assert_error, calls, done, key, list, message, server, text},
    mcp,
    redis::Redis,
    until,
};
use tempfile::TempDir;

fn with_state(upstream: &Upstream, state: &str) -> Sidecar {
    Sidecar::with_flags(&["--upstream", &upstream.url(), "--state", state])
}

fn line(sidecar: &Sidecar, response: &Response) -> Value {
    let id = response.head.field("x-request-id").unwrap().to_owned();
    sidecar.wait_line(|line| line["request"] == id.as_str())
}

fn made(upstream: &Upstream, wanted: &str) -> usize {
    calls(upstream).iter().filter(|call| key(call).as_deref() == Some(wanted)).count()
}

fn is_ready(sidecar: &Sidecar) -> bool {
    match sidecar.admin("GET", "/readyz") {
        ready if ready.status() == 200 => true,
        not => {
            assert_eq!((not.status(), not.text().as_str()), (503, "the state store is away\n"));
            false
        }
    }
}

fn when_free(sidecar: &Sidecar, call: &Call) -> Response {
    let mut answer = None;
    until("the call not to be busy", || {
        let response = call.ask(sidecar);
        let free = message(&response)["result"]["_meta"]["oz0/retryable"] != true;
        answer = Some(response);
        free
    });
    answer.unwrap()
}

/// While the store is away: what needs it is busy, everything else goes on.
fn assert_away(upstream: &Upstream, sidecar: &Sidecar, round: &str) {
    let name = format!("job/{round}");
    for call in [
        Call::of("effect").activity("job", round),
        Call::of("read").activity("job", round).legacy(),
        Call::of("never_listed").key(&name),
        Call::of("mark").said(json!({ "job": "job", "session": 1, "session_start": "s", "activity": round })),
        Call::of("effect").field("Idempotency-Key", "\"k\""),
    ] {
        let busy = call.ask(sidecar);
        assert_busy(&busy);
        let line = line(sidecar, &busy);
        assert_eq!((&line["outcome"], &line["reason"]), (&json!("busy"), &json!("store_unavailable")));
    }
    assert!(calls(upstream).iter().all(|call| key(call).as_deref() != Some(&name)), "nothing was sent");
    let before = calls(upstream).len();
    for call in [Call::of("effect"), Call::of("never_listed"), Call::of("charge").legacy()] {
        assert!(text(&call.ask(sidecar)).starts_with("done "));
    }
    assert_eq!(calls(upstream).len(), before + 3);
    list(sidecar);
    until("readiness to say it", || !is_ready(sidecar));
    sidecar.wait_stderr("the state store is away");
    assert_eq!(sidecar.admin("GET", "/healthz").status(), 200, "it is alive all the same");
}

/// The store is back: so is everything.
fn assert_back(upstream: &Upstream, sidecar: &Sidecar, round: &str) {
    until("readiness to say that it is back", || is_ready(sidecar));
    sidecar.wait_stderr("the state store is back");
    let call = Call::of("effect").activity("job", round);
    let answer = when_free(sidecar, &call);
    assert!(text(&answer).starts_with("done "), "it was not sent before, and is not taken for lost");
    assert_eq!(made(upstream, &format!("job/{round}")), 1);
    let counted = Call::of("mark").said(
        json!({ "job": "job", "session": 1, "session_start": "s", "activity": format!("{round}-counted") }),
    );
    let answer = when_free(sidecar, &counted);
    let key = answer.head.field("oz0-idempotency-key").unwrap();
    assert!(key.starts_with("job/s1/mark#"), "what is known of the tool was not forgotten: {key}");
}

#[test]
fn a_redis_that_dies_and_comes_back() {
    let (upstream, mut redis) = (answering(), Redis::start());
    let sidecar = with_state(&upstream, &redis.state());
    assert!(is_ready(&sidecar));
    list(&sidecar);
    let before = Call::of("effect").activity("job", "before");
    assert_eq!(text(&before.ask(&sidecar)), "done 0");
    redis.kill();
    assert_away(&upstream, &sidecar, "r1");
    assert_busy(&before.ask(&sidecar));
    redis.start_again();
    assert_back(&upstream, &sidecar, "r1");
    assert_eq!(text(&before.ask(&sidecar)), "done 0", "and the marks are where they were");
    assert_eq!(made(&upstream, "job/before"), 1);
}

#[test]
fn a_redis_that_does_not_answer() {
    let (upstream, redis) = (answering(), Redis::start());
    let sidecar = with_state(&upstream, &redis.state());
    list(&sidecar);
    Call::of("effect").activity("job", "before").ask(&sidecar);
    redis.signal("STOP");
    assert_away(&upstream, &sidecar, "r1");
    redis.signal("CONT");
    assert_back(&upstream, &sidecar, "r1");
}

#[test]
fn a_redis_that_is_away_when_the_sidecar_starts() {
    let (upstream, mut redis) = (answering(), Redis::start());
    let first = with_state(&upstream, &redis.state());
    list(&first);
    drop(first);
    redis.kill();
    let sidecar = with_state(&upstream, &redis.state());
    let named = Call::of("charge").key("k");
    assert_busy(&named.ask(&sidecar));
    assert!(text(&Call::of("charge").ask(&sidecar)).starts_with("done "));
    until("readiness to say it", || !is_ready(&sidecar));
    redis.start_again();
    until("readiness to say that it is back", || is_ready(&sidecar));
    let answer = when_free(&sidecar, &named);
    assert_eq!(line(&sidecar, &answer)["retry_class"], "conditional", "known from the store");
    assert_eq!(made(&upstream, "k"), 1);
}

#[test]
fn a_file_that_is_gone_and_comes_back() {
    let (upstream, folder) = (answering(), TempDir::new().unwrap());
    let (here, away) = (folder.path().join("state"), folder.path().join("moved"));
    let sidecar = with_state(&upstream, &format!("sqlite:{}", here.join("state.db").display()));
    list(&sidecar);
    let before = Call::of("effect").activity("job", "before");
    assert_eq!(text(&before.ask(&sidecar)), "done 0");
    fs::rename(&here, &away).unwrap();
    assert_away(&upstream, &sidecar, "r1");
    fs::rename(&away, &here).unwrap();
    assert_back(&upstream, &sidecar, "r1");
    assert_eq!(text(&before.ask(&sidecar)), "done 0");
    assert_eq!(made(&upstream, "job/before"), 1);
}

#[test]
fn a_file_that_another_process_holds() {
    let (upstream, folder) = (answering(), TempDir::new().unwrap());
    let file = folder.path().join("state.db");
    let sidecar = with_state(&upstream, &format!("sqlite:{}", file.display()));
    list(&sidecar);
    let before = Call::of("effect").activity("job", "before");
    assert_eq!(text(&before.ask(&sidecar)), "done 0");
    let other = rusqlite::Connection::open(&file).unwrap();
    other.busy_timeout(support::BOUND).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert_away(&upstream, &sidecar, "r1");
    other.execute_batch("ROLLBACK").unwrap();
    assert_back(&upstream, &sidecar, "r1");
    assert_eq!(text(&before.ask(&sidecar)), "done 0");
    assert_eq!(made(&upstream, "job/before"), 1);
}

/// It pauses in the middle of calls, some times for longer than it is waited for: some calls are busy, none is made twice.
#[test]
fn a_redis_that_is_slow() {
    let (upstream, redis) = (answering(), Redis::start());
    let sidecar = with_state(&upstream, &redis.state());
    list(&sidecar);
    for (round, pause) in [10, 300, 900, 1100, 1600].into_iter().enumerate() {
        let call = Call::of("effect").activity("job", &format!("a{round}"));
        let node = sidecar.client();
        redis.signal("STOP");
        node.send(&call.post());
        std::thread::sleep(Duration::from_millis(pause));
        redis.signal("CONT");
        node.response();
        assert!(text(&when_free(&sidecar, &call)).starts_with("done "), "round {round}");
        assert_eq!(made(&upstream, &format!("job/a{round}")), 1);
    }
}

#[test]
fn a_response_is_delivered_although_its_commit_fails_and_is_committed_later() {
    let gate = Gate::new();
    let waits = gate.clone();
    let upstream = server(move |n, request, reply| {
        waits.pass();
        if request.head.field("mcp-session-id").is_none() {
            return reply.json(200, &[], &done(request, n));
        }
        reply.sse(&[]);
        reply.event(&done(request, n));
        reply.end();
    });
    let mut redis = Redis::start();
    let sidecar = with_state(&upstream, &redis.state());
    list(&sidecar);
    for round in ["frozen", "dead"] {
        let both = [
            Call::of("effect").key(&format!("{round}-json")),
            Call::of("effect").legacy().key(&format!("{round}-sse")),
        ];
        let nodes: Vec<_> = both
            .iter()
            .map(|call| {
                let node = sidecar.client();
                node.send(&call.post());
                node
            })
            .collect();
        upstream.wait_requests(|request| key(request).is_some_and(|key| key.starts_with(round)), 2);
        if round == "frozen" {
            redis.signal("STOP")
        } else {
            redis.kill()
        }
        gate.open();
        gate.open();
        let answers: Vec<String> = nodes.iter().map(|node| text(&node.response())).collect();
        sidecar.wait_stderr("commit_failed");
        for call in &both {
            assert_busy(&call.ask(&sidecar));
        }
        if round == "frozen" {
            redis.signal("CONT")
        } else {
            redis.start_again()
        }
        for (call, answer) in both.iter().zip(answers) {
            assert_eq!(text(&when_free(&sidecar, call)), answer, "{round}: the commit was tried again");
        }
        for name in ["json", "sse"] {
            assert_eq!(made(&upstream, &format!("{round}-{name}")), 1);
        }
    }
}

#[test]
fn a_call_whose_claim_cannot_be_renewed_is_closed_before_another_may_begin() {
    let upstream = server(|n, request, reply| {
        if n == 1 {
            reply.sse(&[]);
            reply.event(&mcp::progress(&support::keyed::meta(request)["progressToken"], 1));
        }
        match n {
            0 | 1 => reply.hang(),
            _ => reply.json(200, &[], &done(request, n)),
        }
    });
    let mut redis = Redis::start();
    let sidecar = with_state(&upstream, &redis.state());
    list(&sidecar);
    let [silent, stream] = ["silent", "stream"].map(|name| (Call::of("charge").key(name), sidecar.client()));
    silent.1.send(&silent.0.post());
    let first = upstream.wait_request_where(|request| key(request).as_deref() == Some("silent"));
    stream.1.send(&stream.0.post());
    let second = upstream.wait_request_where(|request| key(request).as_deref() == Some("stream"));
    let unnamed = sidecar.client();
    redis.kill();
    // The bound of every wait is 10 s, and the lease 20 s: the one is waited for in two turns.
    until("the calls to be closed", || upstream.connections()[first.connection].closed.is_some());
    upstream.wait_closed(second.connection);
    for node in [&silent.1, &stream.1] {
        let lost = node.response();
        assert_error(&lost, 1503, "lease_lost", "unknown");
        let line = line(&sidecar, &lost);
        assert_eq!((&line["outcome"], &line["reason"]), (&json!("failed"), &json!("lease_lost")));
    }
    drop(unnamed);
    redis.start_again();
    for call in [&silent.0, &stream.0] {
        let next = when_free(&sidecar, call);
        assert!(text(&next).starts_with("done "), "then it is made again");
    }
}
