//! The idle clock and the maximum: what resets, stops and never moves them, what has none, and what the node and the
//! upstream see when one runs out. And `client_stall`, which bounds the node.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{thread, time::Duration};

use serde_json::json;
use support::{
    Client, Gate, Post, Sidecar, Upstream,
    http::Response,
    http2::Node,
    keyed::{self, Call},
    mcp::{call, modern_call, progress, result},
    sse,
};
use tokio::time::Instant;

/// Far above what a clock may be late on a busy machine; far below the other clocks.
const LATE: Duration = Duration::from_secs(3);

fn sidecar(upstream: &Upstream, settings: &str) -> Sidecar {
    Sidecar::with_config(&format!("[upstreams.mcp]\nurl = \"{}\"\n{settings}\n", upstream.url()))
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The error that the sidecar ends a request with, as the last event of a stream or as the whole answer.
fn lost(response: &Response, id: &serde_json::Value, reason: &str) {
    assert_eq!(response.status(), 200);
    let error = match response.head.field("content-type") {
        Some("text/event-stream") => sse::read(&response.body).events.last().unwrap().json(),
        _ => response.json(),
    };
    assert_eq!(error["id"], *id, "{error}");
    assert_eq!(error["error"]["code"], 1504, "{error}");
    assert_eq!(error["error"]["data"]["reason"], reason, "{error}");
    assert_eq!(error["error"]["data"]["outcome"], "unknown", "{error}");
}

#[test]
fn a_slow_tool_is_called_once_and_its_loss_is_told_at_the_clock_and_not_before() {
    for (clock, post) in [
        ("idle_timeout", modern_call(1)),
        ("max_timeout", modern_call(1)),
        ("idle_timeout", call(1)),
        ("max_timeout", call(1)),
    ] {
        let upstream = Upstream::silent();
        let sidecar = sidecar(&upstream, &format!("{clock} = \"600ms\""));
        let begun = Instant::now();
        let answer = sidecar.client().ask(&post);
        let took = begun.elapsed();
        assert!(took >= millis(600) && took < LATE, "{took:?}");
        lost(&answer, &1.into(), clock);
        assert_eq!(answer.head.field("content-type"), Some("application/json"));
        upstream.wait_closed(0);
        let line = sidecar.wait_lines(1)[0].clone();
        assert_eq!((&line["outcome"], &line["reason"]), (&clock.into(), &clock.into()), "{line}");
        assert_eq!(line["status"], 200);
        assert_eq!(line.get("cancelled_by"), None, "{line}");
        thread::sleep(millis(500));
        let calls = upstream.requests().iter().filter(|one| one.json()["method"] == "tools/call").count();
        assert_eq!(calls, 1);
    }
}

#[test]
fn comments_and_what_is_no_message_reset_nothing() {
    for noise in [": ka\n\n", "\n", "retry: 50\n\n", "data: \n\n", "id: 7\n\n", "event: ping\ndata: \n\n"] {
        let upstream = Upstream::start(move |request, reply| {
            if request.json().get("id").is_none() {
                return reply.json(202, &[], "");
            }
            reply.sse(&[]);
            while !reply.closed() {
                reply.chunk(noise);
                thread::sleep(millis(50));
            }
        });
        let sidecar = sidecar(
            &upstream,
            "idle_timeout = \"600ms\"\nmax_timeout = \"20s\"\n[upstreams.mcp.keepalive]\ninterval = \"100ms\"",
        );
        for post in [call(1), modern_call(1)] {
            let begun = Instant::now();
            let answer = sidecar.client().ask(&post);
            let took = begun.elapsed();
            assert!(took >= millis(600) && took < LATE, "{noise:?} {took:?}");
            assert_eq!(answer.head.field("transfer-encoding"), Some("chunked"));
            lost(&answer, &1.into(), "idle_timeout");
        }
        assert!(upstream.connections().len() <= 3);
        sidecar.wait_line(|line| line["outcome"] == "idle_timeout");
    }
}

#[test]
fn each_message_resets_the_idle_clock() {
    let log = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{}}"#.to_owned();
    let unknown = r#"{"jsonrpc":"2.0","method":"x/y"}"#.to_owned();
    for message in [None, Some(log), Some(unknown)] {
        let upstream = Upstream::start(move |_, reply| {
            reply.sse(&[]);
            for n in 1..=8 {
                thread::sleep(millis(300));
                match &message {
                    Some(message) => reply.event(message),
                    None => reply.event(&progress(1, n)),
                }
            }
            reply.event(&result(1));
            reply.end();
        });
        let sidecar = sidecar(&upstream, "idle_timeout = \"1s\"");
        let answer = sidecar.client().ask(&call(1));
        assert!(answer.text().contains(&result(1)), "{}", answer.text());
    }
}

#[test]
fn progress_that_is_coalesced_away_resets_the_idle_clock_too() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        for n in 1..=40 {
            reply.event(&progress(1, n));
            thread::sleep(millis(60));
        }
        reply.event(&result(1));
        reply.end();
    });
    let sidecar = sidecar(
        &upstream,
        "idle_timeout = \"1s\"\n[upstreams.mcp.progress]\nburst = 1\nmin_interval = \"1h\"",
    );
    let answer = sidecar.client().ask(&call(1));
    assert!(answer.text().contains(&result(1)), "{}", answer.text());
    let line = sidecar.wait_lines(1)[0].clone();
    assert!(line["progress_coalesced"].as_u64().unwrap() > 30, "{line}");
}

#[test]
fn progress_never_moves_the_maximum() {
    for post in [call(1), modern_call(1)] {
        let upstream = Upstream::start(|request, reply| {
            if request.json().get("id").is_none() {
                return reply.json(202, &[], "");
            }
            reply.sse(&[]);
            for n in 1.. {
                if reply.closed() {
                    return;
                }
                reply.event(&progress(1, n));
                thread::sleep(millis(50));
            }
        });
        let sidecar = sidecar(&upstream, "idle_timeout = \"500ms\"\nmax_timeout = \"1200ms\"");
        let begun = Instant::now();
        let answer = sidecar.client().ask(&post);
        assert!(begun.elapsed() >= millis(1200) && begun.elapsed() < LATE);
        lost(&answer, &1.into(), "max_timeout");
        let told = &sse::read(&answer.body).events.last().unwrap().json()["error"]["data"]["oz0/progress"];
        assert!(told["progress"].as_u64().unwrap() > 3, "{told}");
        upstream.wait_closed(0);
    }
}

#[test]
fn silence_after_the_last_message_ends_the_call_at_the_idle_clock() {
    // As a path that drops all packets: nothing comes any more, not even an end.
    let upstream = Upstream::start(|request, reply| {
        if request.method() == "GET" {
            reply.sse(&[]);
            return reply.hang();
        }
        if request.json().get("id").is_none() {
            return reply.json(202, &[], "");
        }
        reply.sse(&[]);
        thread::sleep(millis(400));
        reply.event(&progress(1, 1));
        reply.hang();
    });
    let sidecar = sidecar(&upstream, "idle_timeout = \"700ms\"");
    let get = sidecar.client();
    get.send(&Post::get());
    get.head();
    let node = sidecar.client();
    node.send(&call(1));
    node.events(1);
    let begun = Instant::now();
    let answer = node.response();
    assert!(begun.elapsed() >= millis(600) && begun.elapsed() < LATE, "{:?}", begun.elapsed());
    lost(&answer, &1.into(), "idle_timeout");
    assert_eq!(sse::read(&answer.body).events[0].data, progress(1, 1));
    let line = sidecar.wait_line(|line| line["rpc"] == "tools/call");
    assert_eq!(line["reason"], "idle_timeout");
    assert!(get.closed_yet().is_none(), "a GET may be silent");
}

#[test]
fn what_has_no_clock_outlives_both_and_tasks_result_the_idle_one() {
    let upstream = Upstream::start(|request, reply| {
        if request.head.field("x-silent").is_none() {
            reply.sse(&[]);
        }
        reply.hang();
    });
    let sidecar = sidecar(&upstream, "idle_timeout = \"200ms\"\nmax_timeout = \"1500ms\"");
    let listen = Post::modern(
        "subscriptions/listen",
        None,
        r#"{"jsonrpc":"2.0","id":1,"method":"subscriptions/listen","params":{"notifications":{}}}"#,
    );
    let open = |post: &Post| {
        let node = sidecar.client();
        node.send(post);
        node
    };
    let silent = |post: &Post| open(&post.clone().field("X-Silent", "1"));
    let endless = [
        open(&Post::get()),
        silent(&Post::get()),
        open(&Post::get().field("Last-Event-ID", "7")),
        open(&listen),
        silent(&listen),
    ];
    let task = Post::legacy(r#"{"jsonrpc":"2.0","id":1,"method":"tasks/result","params":{"taskId":"t"}}"#);
    let begun = Instant::now();
    let tasks = [open(&task), silent(&task)];
    for node in tasks {
        lost(&node.response(), &1.into(), "max_timeout");
    }
    assert!(begun.elapsed() >= millis(1400));
    // The other task methods have it.
    let get = Post::legacy(r#"{"jsonrpc":"2.0","id":1,"method":"tasks/get","params":{"taskId":"t"}}"#);
    lost(&silent(&get).response(), &1.into(), "idle_timeout");
    assert!(endless.iter().all(|node| node.closed_yet().is_none()));
    let alive = upstream.connections().iter().filter(|one| one.closed.is_none()).count();
    assert!(alive >= 5, "{alive}");
}

#[test]
fn an_answer_in_json_is_bound_by_the_same_clocks() {
    for clock in ["idle_timeout", "max_timeout"] {
        let upstream = Upstream::start(|request, reply| {
            if request.json().get("id").is_none() {
                return reply.json(202, &[], "");
            }
            reply.head(200, &[("Content-Type", "application/json"), ("Content-Length", "100000")]);
            reply.raw("{\"jsonrpc\"");
            reply.hang();
        });
        let sidecar = sidecar(&upstream, &format!("{clock} = \"400ms\""));
        lost(&sidecar.client().ask(&call(1)), &1.into(), clock);
        upstream.wait_closed(0);
    }
}

/// The messages a server may ask its node with in the middle of a call.
fn elicits(id: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"elicitation/create","params":{{"message":"?"}}}}"#)
}

#[test]
fn the_idle_clock_stands_still_while_a_server_s_request_awaits_the_node() {
    for id in ["\"s1\"", "1"] {
        let answered = Gate::new();
        let told = answered.clone();
        let upstream = Upstream::start(move |request, reply| {
            let json = request.json();
            if json.get("method").is_none() {
                reply.json(202, &[], "");
                return told.open();
            }
            if json.get("id").is_none() {
                return reply.json(202, &[], "");
            }
            reply.sse(&[]);
            reply.event(&elicits(id));
            answered.pass();
            reply.event(&result(1));
            reply.end();
        });
        let sidecar = sidecar(&upstream, "idle_timeout = \"400ms\"");
        let node = sidecar.client();
        node.send(&call(1));
        // The server's request of the same id does not complete the call.
        assert_eq!(node.events(1)[0].data, elicits(id));
        thread::sleep(millis(1200));
        let answer =
            Post::legacy(format!(r#"{{ "jsonrpc":"2.0","id":{id},"result":{{"action":"accept"}} }}"#));
        assert_eq!(sidecar.client().ask(&answer).status(), 202);
        assert!(node.response().text().contains(&result(1)));
        assert_eq!(upstream.wait_request(1).body, answer.body, "as it came");
    }
}

#[test]
fn it_goes_on_once_all_of_them_are_answered() {
    let upstream = Upstream::start(|request, reply| {
        if request.json()["method"] != "tools/call" {
            return reply.json(202, &[], "");
        }
        reply.sse(&[]);
        reply.event(&elicits("\"a\""));
        reply.event(&elicits("\"b\""));
        reply.hang();
    });
    let sidecar = sidecar(&upstream, "idle_timeout = \"500ms\"");
    let node = sidecar.client();
    node.send(&call(1));
    node.events(2);
    let respond = |id: &str, session: &str| {
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-1,"message":"no"}}}}"#);
        let answer = sidecar.client().ask(&Post::legacy(body).field("Mcp-Session-Id", session));
        assert_eq!(answer.status(), 202);
    };
    respond("\"a\"", "sess-A");
    // One of another session, and one that nobody asked for, answer nothing.
    respond("\"b\"", "sess-B");
    respond("1", "sess-A");
    thread::sleep(millis(1200));
    let last = Instant::now();
    respond("\"b\"", "sess-A");
    lost(&node.response(), &1.into(), "idle_timeout");
    assert!(last.elapsed() < LATE);
}

#[test]
fn the_maximum_runs_on_while_the_node_is_asked() {
    let upstream = Upstream::start(|request, reply| {
        if request.json()["method"] != "tools/call" {
            return reply.json(202, &[], "");
        }
        reply.sse(&[]);
        reply.event(&elicits("\"a\""));
        reply.hang();
    });
    let sidecar = sidecar(&upstream, "idle_timeout = \"300ms\"\nmax_timeout = \"1s\"");
    lost(&sidecar.client().ask(&call(1)), &1.into(), "max_timeout");
}

#[test]
fn the_clocks_end_with_the_response_and_a_slow_node_still_gets_it() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[("Connection", "close")]);
        let filler = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/message","params":"{}"}}"#,
            "x".repeat(200_000)
        );
        (0..30).for_each(|_| reply.event(&filler));
        reply.event(&result(1));
        reply.end();
    });
    let sidecar = sidecar(
        &upstream,
        "idle_timeout = \"400ms\"\nmax_timeout = \"2s\"\n[upstreams.mcp.progress]\nqueue_bytes = \"16MiB\"",
    );
    let node = Client::stalled(&sidecar.listen, Some(65536));
    node.send(&call(1));
    upstream.wait_closed(0);
    thread::sleep(millis(2200));
    node.read_on();
    let events = sse::read(&node.response().body).events;
    assert_eq!((events.len(), events[30].data.as_str()), (31, result(1).as_str()));
    assert_eq!(sidecar.wait_lines(1)[0]["outcome"], "ok");
}

#[test]
fn the_idle_clock_stands_still_while_reading_is_paused_for_a_slow_node() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        let filler = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/message","params":"{}"}}"#,
            "x".repeat(100_000)
        );
        (0..150).for_each(|_| reply.event(&filler));
        reply.event(&result(1));
        reply.end();
    });
    let sidecar = sidecar(&upstream, "idle_timeout = \"400ms\"");
    let node = Client::stalled(&sidecar.listen, Some(65536));
    node.send(&call(1));
    thread::sleep(millis(1500));
    node.read_on();
    assert_eq!(sse::read(&node.response().body).events.len(), 151);
}

#[test]
fn a_node_that_takes_nothing_is_closed_and_so_is_its_upstream() {
    for slow in [modern_call(1), Post::get()] {
        let upstream = Upstream::start(|_, reply| {
            reply.sse(&[]);
            let filler = format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/message","params":"{}"}}"#,
                "x".repeat(100_000)
            );
            while !reply.closed() {
                reply.event(&filler);
            }
        });
        let sidecar = Sidecar::with_config(&format!(
            "[limits]\nclient_stall = \"600ms\"\n[upstreams.mcp]\nurl = \"{}\"\n",
            upstream.url()
        ));
        let node = Client::stalled(&sidecar.listen, Some(65536));
        let begun = Instant::now();
        node.send(&slow);
        upstream.wait_closed(0);
        assert!(begun.elapsed() >= millis(600), "{:?}", begun.elapsed());
        let line = sidecar.wait_lines(1)[0].clone();
        assert_eq!(
            (&line["outcome"], &line["cancelled_by"]),
            (&"cancelled".into(), &"disconnect".into()),
            "{line}"
        );
        node.read_on();
        node.closed();
    }
}

/// An upstream that answers with more than anything buffers: in the form that the path's query names, and at once where it
/// names none.
fn large() -> Upstream {
    Upstream::start(|request, reply| {
        let filler = "x".repeat(100_000);
        let id = (!request.body.is_empty()).then(|| request.json()["id"].clone()).unwrap_or_default();
        match request.head.line.split_whitespace().nth(1).and_then(|path| path.split('?').nth(1)) {
            Some("events") => {
                reply.sse(&[]);
                while !reply.closed() {
                    reply.event(&format!(
                        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":"{filler}"}}"#
                    ));
                }
            }
            Some("chunks") => {
                reply.head(200, &[("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]);
                while !reply.closed() {
                    reply.chunk(&filler);
                }
            }
            Some("json") => reply.json(
                200,
                &[],
                &format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"x":"{}"}}}}"#, filler.repeat(20)),
            ),
            _ => reply.json(200, &[], &result(&id)),
        }
    })
}

#[test]
fn an_http2_node_that_grants_no_window_to_a_stream_loses_that_stream() {
    let list = || Post::legacy(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#);
    for (post, open) in [
        (modern_call(1).at("/mcp?events"), true),
        (Post::get().at("/mcp?events"), true),
        // Pulled through, without an end.
        (list().at("/mcp?chunks"), true),
        (Post::get().at("/mcp?chunks"), true),
        // Held whole: its upstream has nothing to do with it any more.
        (modern_call(1).at("/mcp?json"), false),
    ] {
        let upstream = large();
        let sidecar = Sidecar::with_config(&format!(
            "[limits]\nclient_stall = \"600ms\"\n[upstreams.mcp]\nurl = \"{}\"\n",
            upstream.url()
        ));
        let node = Node::connect(&sidecar.listen);
        let begun = Instant::now();
        let mut stalled = node.send(&post);
        node.head(&mut stalled);
        if open {
            upstream.wait_closed(0);
        }
        let line = sidecar.wait_lines(1)[0].clone();
        assert!(begun.elapsed() >= millis(600), "{:?}", begun.elapsed());
        assert_eq!(
            (&line["outcome"], &line["cancelled_by"]),
            (&"cancelled".into(), &"disconnect".into()),
            "{line}"
        );
        assert_eq!(node.wait_reset(&mut stalled), h2::Reason::CANCEL, "{line}");
        let page = sidecar.admin("GET", "/metrics").text();
        assert!(page.contains("\nmcp_sidecar_buffered_bytes 0\n"), "{page}");
        // The connection's other streams go on.
        let mut other = node.send(&modern_call(2));
        assert_eq!(node.rest(&mut other), result(2));
    }
}

#[test]
fn an_http2_node_that_grants_no_window_at_all_is_not_waited_for_either() {
    let upstream = large();
    let sidecar = Sidecar::with_config(&format!(
        "[limits]\nclient_stall = \"600ms\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    ));
    let node = Node::with_window(&sidecar.listen, 0);
    let mut stalled = node.send(&modern_call(2));
    assert_eq!(node.wait_reset(&mut stalled), h2::Reason::CANCEL);
}

#[test]
fn a_node_that_takes_nothing_of_a_json_answer_is_closed_too() {
    let body = format!(r#"{{"jsonrpc":"2.0","id":1,"result":{{"x":"{}"}}}}"#, "x".repeat(12_000_000));
    let upstream = Upstream::json(body);
    let sidecar = Sidecar::with_config(&format!(
        "[limits]\nclient_stall = \"600ms\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    ));
    let before = sidecar.fds();
    let node = Client::stalled(&sidecar.listen, Some(65536));
    node.send(&call(1));
    sidecar.wait_lines(1);
    let end = Instant::now() + support::BOUND;
    while sidecar.fds() > before + 1 {
        assert!(Instant::now() < end, "{} files, {before} before", sidecar.fds());
        thread::sleep(millis(50));
    }
    node.read_on();
    node.closed();
}

#[test]
fn what_has_no_id_is_told_by_504() {
    let upstream = Upstream::silent();
    let sidecar = sidecar(&upstream, "idle_timeout = \"300ms\"");
    let posts = [
        Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#),
        Post::legacy(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#),
        Post::delete(),
    ];
    for (number, post) in posts.into_iter().enumerate() {
        let answer = sidecar.client().ask(&post);
        assert_eq!(answer.status(), 504, "{}", answer.text());
        let error = answer.json();
        assert_eq!((&error["error"]["code"], error.get("id")), (&1504.into(), None), "{error}");
        assert_eq!(error["error"]["data"]["reason"], "idle_timeout");
        upstream.wait_closed(number);
    }
    assert_eq!(upstream.count(), 3);
}

fn limited(said: &serde_json::Value) -> Call {
    Call::of("effect").said(said)
}

/// How long the call took until the sidecar ended it.
fn ended_after(sidecar: &Sidecar, call: &Call) -> Duration {
    let began = Instant::now();
    keyed::assert_error(&call.ask(sidecar), 1504, "max_timeout", "unknown");
    began.elapsed()
}

#[test]
fn a_nodes_time_limit_lowers_the_maximum_less_a_tenth_and_what_has_elapsed() {
    let upstream = Upstream::silent();
    let sidecar = Sidecar::before(&upstream);
    // 2 s less a tenth; 10 s less a tenth and 8.2 s; 60 s less 2 s and 57.2 s.
    for (said, left) in [
        (json!({ "time_limit": 2 }), 1800),
        (json!({ "time_limit": 10.0, "elapsed": 8.2 }), 800),
        (json!({ "time_limit": 60, "elapsed": 57.2, "job": "j", "activity": "a" }), 800),
    ] {
        let took = ended_after(&sidecar, &limited(&said));
        // Not earlier; later is the machine's.
        assert!(took >= Duration::from_millis(left - 10), "{said}: {took:?}");
        let headers = Call::of("effect");
        let headers = headers.field("Oz0-Time-Limit", &said["time_limit"].to_string());
        let headers = match said["elapsed"].as_f64() {
            Some(elapsed) => headers.field("Oz0-Elapsed", &elapsed.to_string()),
            None => headers,
        };
        let took = ended_after(&sidecar, &headers);
        assert!(took >= Duration::from_millis(left - 10), "{said}, by headers: {took:?}");
    }
}

#[test]
fn a_nodes_time_limit_never_raises_the_maximum() {
    let upstream = Upstream::silent();
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nmax_timeout = \"600ms\"\n",
        upstream.url()
    ));
    for limit in [json!(3600), json!(1e300)] {
        let took = ended_after(&sidecar, &limited(&json!({ "time_limit": limit })));
        assert!(took >= Duration::from_millis(590) && took < support::BOUND, "{took:?}");
    }
}

#[test]
fn progress_does_not_move_a_nodes_time_limit() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        for n in 1.. {
            reply.event(&progress("\"p\"", n));
            if reply.closed() {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
    });
    let sidecar = Sidecar::before(&upstream);
    let call = limited(&json!({ "time_limit": 1 })).meta("progressToken", "\"p\"");
    ended_after(&sidecar, &call);
    upstream.wait_closed(0);
}

#[test]
fn a_time_limit_that_has_passed_is_told_at_once_and_nothing_is_sent() {
    let upstream = keyed::answering();
    let sidecar = Sidecar::before(&upstream);
    keyed::list(&sidecar);
    for (n, said) in [
        json!({ "time_limit": 1, "elapsed": 0.9 }),
        json!({ "time_limit": 30, "elapsed": 28 }),
        json!({ "time_limit": 5, "elapsed": 1e300 }),
        json!({ "time_limit": 1e-300, "elapsed": 1 }),
    ]
    .iter()
    .enumerate()
    {
        let mut said = said.clone();
        said["job"] = "j".into();
        said["activity"] = format!("a{n}").into();
        let response = limited(&said).ask(&sidecar);
        keyed::assert_error(&response, 1504, "max_timeout", "not_sent");
        let id = response.head.field("x-request-id").unwrap().to_owned();
        let line = sidecar.wait_line(|line| line["request"] == id.as_str());
        assert_eq!((&line["outcome"], &line["reason"]), (&json!("max_timeout"), &json!("max_timeout")));
        assert!(keyed::calls(&upstream).is_empty());
    }
    // So the next attempt, of a call that is not safe, is made.
    let next = Call::of("effect").activity("j", "a0").ask(&sidecar);
    assert_eq!(keyed::text(&next), "done 0");
}
