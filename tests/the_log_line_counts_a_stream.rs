//! One line per exchange, written when it ends, with what the stream amounted to.

mod support;

use std::time::Duration;

use serde_json::Value;
use support::{
    Gate, Sidecar, Upstream,
    mcp::{call, event, modern_call, progress, result},
    upstream::Reply,
};

const LOG: &str =
    r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}"#;

fn sidecar(upstream: &Upstream) -> Sidecar {
    Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nidle_timeout = \"500ms\"\n",
        upstream.url()
    ))
}

#[test]
fn the_line_of_a_stream_comes_at_its_end_with_its_counts_and_its_duration() {
    for post in [call(1), modern_call(1)] {
        let gate = Gate::new();
        let pass = gate.clone();
        let upstream = Upstream::start(move |_, reply| {
            reply.sse(&[]);
            reply.event(&progress(1, 1));
            pass.pass();
            reply.chunk(": comment\n\n");
            reply.event(LOG);
            reply.event(&progress(1, 1));
            reply.event(&progress(1, r#"2.5,"total":4"#));
            reply.event(&result(1));
            reply.end();
        });
        let sidecar = Sidecar::before(&upstream);
        let client = sidecar.client();
        client.send(&post);
        client.events(1);
        let began = tokio::time::Instant::now();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(sidecar.lines(), [] as [Value; 0], "no line before the end");
        let lasted = began.elapsed().as_secs_f64() * 1000.0;
        gate.open();
        let body = client.response().body;
        let line = sidecar.wait_line(|_| true);
        let expected = [
            ("outcome", Value::from("ok")),
            ("status", 200.into()),
            ("upstream_status", 200.into()),
            ("stream", "sse".into()),
            ("rpc", "tools/call".into()),
            ("tool", "slow".into()),
            ("events", 4.into()),
            ("progress_in", 3.into()),
            ("progress_out", 2.into()),
            ("progress_coalesced", 0.into()),
            ("progress_dropped", 1.into()),
            ("keepalives", 0.into()),
            ("progress", 2.5.into()),
            ("total", 4.into()),
            ("refetch", Value::Null),
            ("cancelled_by", Value::Null),
            ("bytes_in", post.body.len().into()),
            ("bytes_out", body.len().into()),
        ];
        for (name, value) in expected {
            assert_eq!(line[name], value, "{name} in {line}");
        }
        let duration = line["duration_ms"].as_f64().unwrap();
        assert!(duration >= lasted, "{duration} of at least {lasted}");
        let first = line["first_byte_ms"].as_f64().unwrap();
        assert!(first <= duration - lasted, "the head came before the pause: {first} of {duration}");
        assert_eq!(sidecar.lines().len(), 1);
    }
}

#[test]
fn the_ways_a_stream_can_end_are_told_apart() {
    type Script = fn(&mut Reply, &Gate);
    let scripts: [(Script, &str, Value, Value); 5] = [
        (
            |reply, _| {
                reply.sse(&[]);
                reply.event(&result(1));
                reply.end();
            },
            "ok",
            Value::Null,
            200.into(),
        ),
        (
            |reply, gate| {
                reply.sse(&[]);
                reply.event(&progress(1, 1));
                gate.pass();
                reply.reset();
            },
            "failed",
            "upstream_failed".into(),
            200.into(),
        ),
        (
            |reply, _| {
                reply.sse(&[]);
                reply.event(&progress(1, 1));
                reply.hang();
            },
            "cancelled",
            Value::Null,
            200.into(),
        ),
        (
            |reply, gate| {
                reply.sse(&[]);
                reply.event(&progress(1, 1));
                gate.pass();
                reply.hang();
            },
            "idle_timeout",
            "idle_timeout".into(),
            200.into(),
        ),
        (|reply, _| reply.json(429, &[], ""), "busy", Value::Null, 429.into()),
    ];
    for (script, outcome, reason, upstream_status) in scripts {
        let gate = Gate::new();
        let pass = gate.clone();
        let upstream = Upstream::start(move |_, reply| script(reply, &pass));
        let sidecar = sidecar(&upstream);
        let client = sidecar.client();
        client.send(&call(1));
        let leaves = outcome == "cancelled";
        if !matches!(outcome, "ok" | "busy") {
            client.body(|body| body.starts_with(event(progress(1, 1)).as_bytes()));
        }
        if leaves {
            client.close();
        } else {
            gate.open();
            client.response();
        }
        let line = sidecar.wait_line(|_| true);
        assert_eq!((&line["outcome"], &line["reason"]), (&outcome.into(), &reason), "{line}");
        assert_eq!((&line["status"], &line["upstream_status"]), (&200.into(), &upstream_status), "{line}");
        assert_eq!(line["cancelled_by"] == "disconnect", leaves, "{line}");
        if !matches!(outcome, "ok" | "busy") {
            assert_eq!((&line["progress_in"], &line["progress"]), (&1.into(), &1.into()), "{line}");
        }
        assert_eq!(sidecar.lines().len(), 1, "exactly one line");
    }
}
