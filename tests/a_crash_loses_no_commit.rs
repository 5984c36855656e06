//! Whatever moment the sidecar is killed at, no commit that was answered is lost, no unsafe call is made
//! twice, no ordinal is given twice, and no key is blocked for longer than its lease. The file is whole after every kill.
//!
//! `CRASH_ROUNDS` says how often it is killed; 10 times if unset.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    env,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use serde_json::json;
use support::{
    Post, Sidecar, Upstream,
    http::{Body, Head, Response},
    keyed::{self, Call, done, key, message, server},
};
use tempfile::TempDir;
use tokio::time::Instant;

/// Calls at a time.
const NODES: usize = 8;

/// A call as its node knows it.
#[derive(Clone, Debug)]
struct Made {
    call: Call,
    /// What was answered; `None`: the sidecar died before.
    answer: Option<(String, String)>,
}

/// The key and the text of an answer that has a result.
fn answer(response: &Response) -> Option<(String, String)> {
    let key = response.head.field("oz0-idempotency-key")?.to_owned();
    let text = message(response)["result"]["content"][0]["text"].as_str()?.to_owned();
    (message(response)["result"]["isError"] != true).then_some((key, text))
}

/// One request on a connection that may end at any moment.
fn ask(address: &str, post: &Post) -> Option<Response> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.write_all(&post.bytes(address)).ok()?;
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        if let Some(head) = Head::read(&bytes) {
            let body = Body::read(&head, &bytes[head.len..], false);
            if body.wire.is_some() {
                return Some(Response { head, body: body.bytes });
            }
        }
        match stream.read(&mut piece) {
            Ok(n @ 1..) => bytes.extend_from_slice(&piece[..n]),
            _ => return None,
        }
    }
}

/// The executions that the server has counted, by key.
type Executions = Arc<Mutex<HashMap<String, usize>>>;

fn counting() -> (Upstream, Executions) {
    let executions = Executions::default();
    let counted = Arc::clone(&executions);
    let upstream = server(move |n, request, reply| {
        *counted.lock().unwrap().entry(key(request).unwrap()).or_default() += 1;
        thread::sleep(Duration::from_micros(fastrand::u64(0..4000)));
        reply.json(200, &[], &done(request, n));
    });
    (upstream, executions)
}

fn start(upstream: &Upstream, file: &Path) -> Sidecar {
    Sidecar::with_config(&format!(
        "state = \"sqlite:{}\"\n[ledger]\nresults = \"store\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        file.display(),
        upstream.url()
    ))
}

/// Call after call, each a new one, until the sidecar is gone.
fn load(address: &str, round: usize, node: usize) -> Vec<Made> {
    let mut all = Vec::new();
    for n in 0.. {
        let activity = format!("{round}-{node}-{n}");
        let call = if node == 0 {
            let said = json!({ "job": "job", "session": 1, "session_start": "s", "activity": activity });
            Call::of("mark").said(said)
        } else {
            Call::of(["effect", "charge"][node % 2]).activity("job", &activity)
        };
        let response = ask(address, &call.post());
        let is_over = response.is_none();
        let answer = response.map(|response| {
            answer(&response).unwrap_or_else(|| panic!("a first attempt fails: {}", response.text()))
        });
        all.push(Made { call, answer });
        if is_over {
            break;
        }
    }
    all
}

/// The file by another reader's eyes.
fn assert_whole(file: &Path) {
    let connection = rusqlite::Connection::open(file).unwrap();
    let verdict: String = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(verdict, "ok");
}

/// After a kill: what was answered is there, what was not is not made twice. Gives the calls whose keys are still claimed.
fn assert_kept(
    sidecar: &Sidecar,
    made: Vec<Made>,
    executions: &Executions,
    keys: &mut BTreeSet<String>,
) -> Vec<Call> {
    let mut claimed = Vec::new();
    for Made { call, answer: before } in made {
        let response = ask(&sidecar.listen, &call.clone().id(2).post()).unwrap();
        let key = response.head.field("oz0-idempotency-key").unwrap().to_owned();
        assert!(keys.insert(key.clone()), "{key} was given twice");
        let again = answer(&response);
        if before.is_some() {
            assert_eq!(again, before, "{}", response.text());
        } else if again.is_none() {
            let told = message(&response);
            let is_busy = told["result"]["_meta"]["oz0/retryable"] == true;
            assert!(is_busy, "its lease has not run out: {told}");
            claimed.push(call);
        }
        let executed = executions.lock().unwrap().get(&key).copied().unwrap_or_default();
        assert!(executed <= 1, "{key} was made {executed} times");
    }
    claimed
}

#[test]
fn a_sidecar_that_is_killed_at_any_moment_loses_nothing_it_has_answered() {
    let rounds = env::var("CRASH_ROUNDS").ok().map_or(10, |rounds| rounds.parse().unwrap());
    let (upstream, executions) = counting();
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("state.db");
    let mut sidecar = start(&upstream, &file);
    keyed::list(&sidecar);
    let mut keys = BTreeSet::new();
    // By the moment of the kill that left them claimed.
    let mut claimed: BTreeMap<Instant, Vec<Call>> = BTreeMap::new();
    let (mut answered, mut unanswered) = (0, 0);
    for round in 0..rounds {
        let nodes: Vec<_> = (0..NODES)
            .map(|node| {
                let address = sidecar.listen.clone();
                thread::spawn(move || load(&address, round, node))
            })
            .collect();
        // A random moment is what this is about.
        thread::sleep(Duration::from_millis(fastrand::u64(5..150)));
        sidecar.signal("KILL");
        sidecar.wait_exit();
        let killed = Instant::now();
        let made: Vec<Made> = nodes.into_iter().flat_map(|node| node.join().unwrap()).collect();
        assert_whole(&file);
        sidecar = start(&upstream, &file);
        answered += made.iter().filter(|made| made.answer.is_some()).count();
        unanswered += made.iter().filter(|made| made.answer.is_none()).count();
        claimed.insert(killed, assert_kept(&sidecar, made, &executions, &mut keys));
    }
    assert!(answered > rounds && unanswered >= rounds, "{answered} answered, {unanswered} not");
    let left: usize = claimed.values().map(Vec::len).sum();
    println!("{rounds} kills: {answered} calls answered, {unanswered} not, {left} of them claimed");
    for (killed, calls) in claimed {
        for call in calls {
            let response = loop {
                let response = ask(&sidecar.listen, &call.post()).unwrap();
                let is_busy = message(&response)["result"]["_meta"]["oz0/retryable"] == true;
                if !is_busy {
                    break response;
                }
                assert!(killed.elapsed() < Duration::from_secs(30), "blocked for longer than its lease");
                thread::sleep(Duration::from_millis(100));
            };
            let key = response.head.field("oz0-idempotency-key").unwrap().to_owned();
            let executed = executions.lock().unwrap().get(&key).copied().unwrap_or_default();
            let is_conditional = call.body().contains("\"charge\"");
            if is_conditional {
                assert!(answer(&response).is_some() && executed <= 2, "{}", response.text());
            } else {
                keyed::assert_error(&response, 1409, "outcome_unknown", "unknown");
                assert!(executed <= 1, "{key} was made {executed} times");
            }
        }
    }
    assert_whole(&file);
}
