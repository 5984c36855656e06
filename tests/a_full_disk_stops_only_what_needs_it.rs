//! While the state file can't grow, a keyed call that can't be claimed is busy and not sent, every other call goes on, the log
//! and `/readyz` say so; nothing that is known is lost, and when there is room again the sidecar recovers by itself.
//!
//! The disk is a limit of the process on the size of its files: a write beyond it fails as one to a full disk does.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::process::Command;

use serde_json::{Value, json};
use support::{
    Sidecar, Upstream,
    http::Response,
    keyed::{Call, answering, assert_busy, calls, key, list, message, text},
    until,
};
use tempfile::TempDir;

/// Kilobytes that a file may have: a few times as many as an empty one.
const ROOM: usize = 256;

/// A sidecar whose files may have no more than [`ROOM`], until [`give_room`].
fn without_room(upstream: &Upstream) -> Sidecar {
    let folder = TempDir::new().unwrap();
    let serve = Sidecar::command(&folder);
    let mut command = Command::new("sh");
    // In units of 512 bytes.
    command.arg("-c").arg(format!("ulimit -S -f {}; exec \"$0\" \"$@\"", 2 * ROOM));
    command.arg(serve.get_program()).args(serve.get_args()).args(["--upstream", &upstream.url()]);
    for (name, value) in serve.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    Sidecar::spawn(command, folder)
}

fn give_room(sidecar: &Sidecar) {
    let pid = sidecar.pid().to_string();
    let given = Command::new("prlimit").args(["--pid", &pid, "--fsize=unlimited:"]).status().unwrap();
    assert!(given.success());
}

/// Its key is long, so that the file is soon full.
fn call(n: usize) -> Call {
    Call::of("effect").key(&name(n))
}

fn name(n: usize) -> String {
    format!("{n:0>1000}")
}

fn made(upstream: &Upstream, n: usize) -> usize {
    calls(upstream).iter().filter(|call| key(call).as_deref() == Some(&name(n))).count()
}

fn is_busy(response: &Response) -> bool {
    message(response)["result"]["_meta"]["oz0/retryable"] == true
}

fn is_ready(sidecar: &Sidecar) -> bool {
    sidecar.admin("GET", "/readyz").status() == 200
}

fn line(sidecar: &Sidecar, response: &Response) -> Value {
    let id = response.head.field("x-request-id").unwrap().to_owned();
    sidecar.wait_line(|line| line["request"] == id.as_str())
}

#[test]
fn a_state_file_that_can_t_grow() {
    let upstream = answering();
    let sidecar = without_room(&upstream);
    list(&sidecar);
    // SQLite's log is full before its file is, and makes room for a while: until nothing fits any more.
    let (mut answers, mut busy_in_a_row) = (Vec::new(), 0);
    while busy_in_a_row < 20 {
        let answer = call(answers.len()).ask(&sidecar);
        busy_in_a_row = if is_busy(&answer) { busy_in_a_row + 1 } else { 0 };
        answers.push(answer);
        assert!(answers.len() < 2000, "it is never full");
    }
    let full = answers.len() - busy_in_a_row;
    assert!(full > 20, "there was room for some: {full}");
    for (n, answer) in answers.iter().enumerate() {
        // Its own count: what is busy was not sent, and an answer is delivered although its commit may have failed.
        if is_busy(answer) {
            assert_busy(answer);
            assert_eq!(made(&upstream, n), 0, "call {n}: {}", answer.text());
        } else {
            assert!(text(answer).starts_with("done "), "call {n}");
            assert_eq!(made(&upstream, n), 1, "call {n}");
        }
    }
    let told = line(&sidecar, answers.last().unwrap());
    assert_eq!((&told["outcome"], &told["reason"]), (&json!("busy"), &json!("store_unavailable")));
    sidecar.wait_stderr("the state file can't be used");
    sidecar.wait_stderr("the state store is away: calls that need it are busy");
    until("readiness to say it", || !is_ready(&sidecar));

    let before = calls(&upstream).len();
    for call in [Call::of("effect"), Call::of("charge").legacy(), Call::of("never_listed")] {
        assert!(text(&call.ask(&sidecar)).starts_with("done "), "what needs no store goes on");
    }
    list(&sidecar);
    assert_eq!(calls(&upstream).len(), before + 3);
    // Nothing has to be written for one that is done, but what does may stand in its way.
    let again = call(0).ask(&sidecar);
    assert!(is_busy(&again) || text(&again) == text(&answers[0]), "{}", again.text());
    assert_eq!(made(&upstream, 0), 1);

    give_room(&sidecar);
    until("readiness to say that there is room", || is_ready(&sidecar));
    sidecar.wait_stderr("the state store is back");
    for (n, answer) in answers.iter().enumerate() {
        let mut again = None;
        until("the end of the call to be stored", || {
            again = Some(call(n).ask(&sidecar)).filter(|answer| !is_busy(answer));
            again.is_some()
        });
        if !is_busy(answer) {
            assert_eq!(text(&again.unwrap()), text(answer), "call {n} was committed, then or later");
        }
        assert_eq!(made(&upstream, n), 1, "call {n}");
    }
}
