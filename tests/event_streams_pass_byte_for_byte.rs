//! An event stream reaches the node under forced headers with each event's bytes as they came, less
//! the upstream's comments and its coding; nothing is added. Section 10 for an event beyond its limit.

mod support;

use std::{io::Write, sync::Arc, thread};

use flate2::{Compression, write::GzEncoder};
use serde_json::Value;
use support::{
    Client, Gate, Post, Sidecar, Upstream,
    http::Response,
    mcp::{call, event, modern_call, progress, result},
    sse,
};

/// Answers everything with a stream of these chunks and its end.
fn upstream<C: AsRef<[u8]>>(chunks: impl IntoIterator<Item = C>) -> Upstream {
    let chunks: Vec<Vec<u8>> = chunks.into_iter().map(|chunk| chunk.as_ref().to_vec()).collect();
    Upstream::start(move |_, reply| {
        reply.sse(&[]);
        chunks.iter().for_each(|chunk| reply.chunk(chunk));
        reply.end();
    })
}

/// What a node gets of a stream of these chunks.
fn relayed<C: AsRef<[u8]>>(chunks: impl IntoIterator<Item = C>) -> Vec<u8> {
    let upstream = upstream(chunks);
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&call(1));
    assert_eq!(response.status(), 200);
    response.body
}

/// One event in each form of framing that a server may use, and what a client makes of it.
fn framings() -> Vec<Vec<u8>> {
    let result = result(1);
    let (head, tail) = result.split_at(17);
    [
        format!("data: {result}\n\n"),
        format!("data:{result}\r\n\r\n"),
        format!("data: {result}\r\r"),
        format!("event: message\r\ndata: {head}\r\ndata: {tail}\r\n\r\n"),
        format!("x-unknown: 1\ndata\nid\nevent:message\ndata:  {result}\n\n"),
        format!("data: {result}\nid: 7\nretry: 50\n\n"),
    ]
    .map(String::into_bytes)
    .into()
}

#[test]
fn every_form_of_framing_passes_as_it_came_wherever_it_is_cut() {
    for stream in framings() {
        let upstream = Upstream::start({
            let stream = stream.clone();
            move |request, reply| {
                let cut = request.number % stream.len();
                reply.sse(&[]);
                if cut > 0 {
                    reply.chunk(&stream[..cut]);
                }
                reply.chunk(&stream[cut..]);
                reply.end();
            }
        });
        let sidecar = Sidecar::before(&upstream);
        let client = sidecar.client();
        for cut in 0..stream.len() {
            let body = client.ask(&call(1)).body;
            assert_eq!(body, stream, "cut at {cut}: {}", String::from_utf8_lossy(&stream));
        }
    }
}

#[test]
fn every_event_stream_carries_the_headers_that_forbid_buffering_once_each() {
    let variants: [&[(&str, &str)]; 8] = [
        &[],
        &[("Cache-Control", "no-cache")],
        &[("Cache-Control", "public, max-age=60")],
        &[("X-Accel-Buffering", "yes"), ("X-Accel-Buffering", "yes")],
        &[("Cache-Control", "no-store"), ("Cache-Control", "private")],
        &[("Cache-Control", "no-cache, no-transform"), ("X-Upstream", "kept")],
        &[("Content-Type", "Text/Event-Stream; charset=utf-8")],
        &[("Content-Length", "LENGTH")],
    ];
    let upstream = Upstream::start(move |request, reply| {
        let body = event(result(1));
        let length = body.len().to_string();
        let mut fields = variants[request.number].to_vec();
        if !fields.iter().any(|(name, _)| *name == "Content-Type") {
            fields.push(("Content-Type", "text/event-stream"));
        }
        match fields.iter_mut().find(|(name, _)| *name == "Content-Length") {
            Some(field) => {
                field.1 = &length;
                reply.head(200, &fields);
                reply.raw(body);
            }
            None => {
                reply.head(200, &[&fields[..], &[("Transfer-Encoding", "chunked")]].concat());
                reply.chunk(body);
                reply.end();
            }
        }
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    for variant in variants {
        let response = client.ask(&call(1));
        let head = &response.head;
        let content_type = head.all("content-type");
        assert_eq!(content_type.len(), 1, "{variant:?}");
        assert!(content_type[0].to_lowercase().starts_with("text/event-stream"), "{variant:?}: {head:?}");
        assert_eq!(head.all("x-accel-buffering"), ["no"], "{variant:?}");
        let cache = head.all("cache-control");
        assert_eq!(cache.len(), 1, "{variant:?}: {cache:?}");
        let directives: Vec<&str> = cache[0].split(',').map(str::trim).collect();
        assert!(directives.contains(&"no-cache"), "{variant:?}: {cache:?}");
        for stays in ["no-transform", "no-store", "private"] {
            let sent = variant.iter().any(|(name, value)| *name == "Cache-Control" && value.contains(stays));
            assert!(!sent || directives.contains(&stays), "{variant:?}: {cache:?}");
        }
        assert!(!cache[0].contains("public") && !cache[0].contains("max-age"), "{cache:?}");
        assert_eq!(head.field("content-length"), None, "{variant:?}");
        assert_eq!(head.field("content-encoding"), None, "{variant:?}");
        if variant.iter().any(|(name, _)| *name == "X-Upstream") {
            assert_eq!(head.field("x-upstream"), Some("kept"));
        }
        assert_eq!(response.text(), event(result(1)));
    }
}

#[test]
fn a_json_answer_keeps_its_own_cache_headers() {
    let upstream = Upstream::start(|_, reply| {
        reply.json(200, &[("Cache-Control", "private, max-age=5")], &result(1));
    });
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&call(1));
    assert_eq!(response.head.all("cache-control"), ["private, max-age=5"]);
    assert_eq!(response.head.field("x-accel-buffering"), None);
    assert_eq!(response.text(), result(1));
}

#[test]
fn text_of_many_bytes_a_character_survives_one_byte_at_a_time_in_both_directions() {
    let text = "naïve 那 🌍";
    let stream = event(result(1).replace("\"ok\"", &format!("\"{text}\"")));
    let upstream = upstream(stream.bytes().map(|byte| [byte]));
    let sidecar = Sidecar::before(&upstream);
    let mut post = call(1);
    post.body = String::from_utf8(post.body)
        .unwrap()
        .replace(r#""arguments":{}"#, &format!(r#""arguments":{{"t":"{text}"}}"#))
        .into_bytes();
    let client = sidecar.client();
    for byte in post.bytes(&sidecar.listen) {
        client.write([byte]);
    }
    let response = client.response();
    assert_eq!(response.text(), stream);
    assert_eq!(upstream.wait_request(0).body, post.body);
    assert!(!response.body.windows(3).any(|bytes| bytes == b"\xef\xbf\xbd"));
}

#[test]
fn unicode_line_separators_end_no_line() {
    let text = "a\u{2028}b\u{2029}c\u{85}d\u{b}e\u{c}f";
    let escaped = text.replace('\u{b}', "\\u000b").replace('\u{c}', "\\u000c");
    let stream = event(result(1).replace("\"ok\"", &format!("\"{escaped}\"")));
    let upstream = upstream([&stream]);
    let sidecar = Sidecar::before(&upstream);
    let mut post = call(1);
    post.body = String::from_utf8(post.body)
        .unwrap()
        .replace(r#""arguments":{}"#, &format!(r#""arguments":{{"t":"{escaped}"}}"#))
        .into_bytes();
    let body = sidecar.client().ask(&post).body;
    assert_eq!(body, stream.as_bytes());
    assert_eq!(sse::read(&body).events[0].json()["result"]["content"][0]["text"], text);
    assert_eq!(upstream.wait_request(0).body, post.body);
}

#[test]
fn a_crlf_cut_in_two_is_one_line_end() {
    let chunks =
        ["data: {\"jsonrpc\":\"2.0\",\r", "\ndata: \"id\":1,\"result\":{\"content\":[]}}\r", "\n\r", "\n"];
    let body = relayed(chunks);
    assert_eq!(body, chunks.concat().as_bytes());
    assert_eq!(sse::read(&body).events.len(), 1);
}

#[test]
fn a_byte_order_mark_passes_before_the_first_event_however_it_is_cut() {
    let answer = format!("data: {}\n\n", result(1));
    let marked = [b"\xef\xbb\xbf", answer.as_bytes()].concat();
    for upstream in [
        upstream([&marked]),
        upstream([&marked[..1], &marked[1..2], &marked[2..3], &marked[3..]]),
        upstream(marked.chunks(1)),
    ] {
        let sidecar = Sidecar::before(&upstream);
        assert_eq!(sidecar.client().ask(&call(1)).body, marked);
        let line = sidecar.wait_line(|line| line["rpc"] == "tools/call");
        assert_eq!((&line["outcome"], &line["events"]), (&"ok".into(), &1.into()));
    }
}

#[test]
fn a_byte_order_mark_before_a_later_event_is_no_mark_and_hides_that_event() {
    let late = format!("\u{feff}data: {}\n\n", result(1));
    let first = event(progress(1, 1));
    let body = relayed([first.clone(), late.clone()]);
    let told = String::from_utf8(body).unwrap();
    let rest = told.strip_prefix(&format!("{first}{late}")).unwrap();
    let events = sse::read(rest.as_bytes()).events;
    assert_eq!(events.len(), 1, "the call had no answer: {told}");
    assert_eq!(events[0].json()["error"]["data"]["reason"], "upstream_failed");
}

#[test]
fn upstream_comments_are_swallowed_wherever_they_stand_and_nothing_else_is() {
    let answer = result(1);
    let body = relayed([
        ": hello\n\n:\n\n:ping\r\n\r\n".to_owned(),
        format!("event: message\n: in the middle\ndata: {answer}\n:\n\n: after\n\n"),
        ": a long one ".to_owned() + &"x".repeat(100_000),
        "\n\n".to_owned(),
    ]);
    assert_eq!(String::from_utf8(body).unwrap(), format!("event: message\ndata: {answer}\n\n"));
}

#[test]
fn what_comes_before_and_after_the_response_passes_in_order_and_position_decides_nothing() {
    let log = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"a"}}"#;
    let ping = r#"{"jsonrpc":"2.0","id":"s1","method":"ping"}"#;
    let same_id = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    let other = result("\"1\"");
    let initialized = r#"{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"s","version":"1"}}}"#;
    let initialize = Post::new(
        r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"c","version":"1"}}}"#,
    );
    for (post, answer) in [(call(1), result(1)), (initialize, initialized.to_owned())] {
        let events = [log, ping, same_id, &other, &progress(1, 1), &answer, log].map(event);
        let upstream = upstream(&events);
        let sidecar = Sidecar::before(&upstream);
        let body = sidecar.client().ask(&post).body;
        assert_eq!(String::from_utf8(body).unwrap(), events.concat());
        let line = sidecar.wait_line(|line| line["stream"] == "sse");
        assert_eq!((&line["outcome"], &line["events"]), (&"ok".into(), &7.into()));
    }
}

#[test]
fn a_batch_as_the_data_of_an_event_passes_whole() {
    let batch = format!(
        "[{},{}]",
        progress(1, 1),
        r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}"#
    );
    let answers = format!("[ {} ,{}]", result(1), result("\"b\""));
    let stream = event(&batch) + &event(&answers);
    let upstream = upstream([&stream]);
    let sidecar = Sidecar::before(&upstream);
    let post = Post::new(
        r#"[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow"}},{"jsonrpc":"2.0","id":"b","method":"tools/call","params":{"name":"slow"}}]"#,
    )
    .field("MCP-Protocol-Version", "2025-03-26");
    assert_eq!(sidecar.client().ask(&post).text(), stream);
    assert_eq!(sidecar.wait_line(|line| line["stream"] == "sse")["outcome"], "ok");
}

#[test]
fn a_response_larger_than_the_whole_queue_passes() {
    let answer = result(1).replace("\"ok\"", &format!("\"{}\"", "y".repeat(300_000)));
    let upstream = Upstream::sse(&[progress(1, 1), answer.clone()]);
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nprogress = {{ queue_bytes = \"4KiB\" }}\n",
        upstream.url()
    ));
    assert_eq!(sidecar.client().ask(&call(1)).text(), event(progress(1, 1)) + &event(answer));
}

/// Memory is the bound here: the event may be held whole, but not many times.
#[test]
fn a_large_event_in_tiny_chunks_arrives_whole_and_is_not_held_many_times() {
    let size = 8 << 20;
    let answer = event(result(1).replace("\"ok\"", &format!("\"{}\"", "z".repeat(size))));
    let wire: Vec<u8> = answer
        .as_bytes()
        .chunks(64)
        .flat_map(|chunk| [format!("{:x}\r\n", chunk.len()).as_bytes(), chunk, b"\r\n"].concat())
        .collect();
    let wire = Arc::new(wire);
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        reply.raw(&wire[..]);
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let before = sidecar.rss_kib();
    let client = sidecar.client();
    client.send(&call(1));
    let peak = thread::scope(|scope| {
        let sampled = scope.spawn(|| {
            let mut peak = 0;
            while sidecar.lines().is_empty() {
                peak = peak.max(sidecar.rss_kib());
            }
            peak
        });
        assert!(client.response().body == answer.as_bytes(), "other bytes");
        sampled.join().unwrap()
    });
    assert_eq!(sidecar.wait_lines(1)[0]["outcome"], "ok");
    let grown = peak.saturating_sub(before);
    // Beside the event, 20 MiB for what any first stream touches, and what the allocator keeps.
    let bound = 3 * size / 1024 + 20 * 1024;
    assert!(grown < bound, "grew by {grown} KiB for an event of {} KiB", size / 1024);
}

#[test]
fn an_event_beyond_its_limit_is_never_begun_and_ends_the_call_with_one_error() {
    for post in [call(1), modern_call(1)] {
        let large = event(result(1).replace("\"ok\"", &format!("\"{}\"", "x".repeat(70_000))));
        let first = event(progress(1, 1));
        let upstream = upstream([first.clone(), large]);
        let sidecar = Sidecar::with_config(&format!(
            "[limits]\nevent = \"64KiB\"\n[upstreams.mcp]\nurl = \"{}\"\n",
            upstream.url()
        ));
        let told = sidecar.client().ask(&post).text();
        let rest = told.strip_prefix(&first).unwrap();
        let events = sse::read(rest.as_bytes()).events;
        assert_eq!(events.len(), 1, "{told}");
        let error = &events[0].json();
        assert_eq!(error["id"], 1);
        assert_eq!(error["error"]["code"], 1502);
        assert_eq!(error["error"]["data"]["reason"], "upstream_failed");
        assert_eq!(error["error"]["data"]["outcome"], "unknown");
        assert_eq!(error["error"]["data"]["oz0/progress"]["progress"], 1);
        upstream.wait_closed(0);
        assert_eq!(sidecar.wait_line(|line| line["stream"] == "sse")["outcome"], "failed");
    }
}

/// An event just within the limit passes; the limit counts one event, not the stream.
#[test]
fn events_within_the_limit_pass_however_many_there_are() {
    let log = format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"info","data":"{}"}}}}"#,
        "x".repeat(60_000)
    );
    let stream = event(&log).repeat(5) + &event(result(1));
    let upstream = upstream([&stream]);
    let sidecar = Sidecar::with_config(&format!(
        "[limits]\nevent = \"64KiB\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    ));
    assert_eq!(sidecar.client().ask(&call(1)).text(), stream);
}

#[test]
fn a_gzip_stream_is_decoded_event_by_event_and_its_label_removed() {
    let seen = Gate::new();
    let next = seen.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[("Content-Encoding", "gzip"), ("ETag", "\"1\""), ("Content-Digest", "sha-256=:x:")]);
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        for message in [progress(1, 1), progress(1, 2), result(1)] {
            encoder.write_all(event(message).as_bytes()).unwrap();
            encoder.flush().unwrap();
            reply.chunk(std::mem::take(encoder.get_mut()));
            next.pass();
        }
        reply.chunk(encoder.finish().unwrap());
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    for count in 1..=3 {
        client.events(count);
        seen.open();
    }
    let response = client.response();
    for name in ["content-encoding", "content-length", "etag", "content-digest"] {
        assert_eq!(response.head.field(name), None, "{name} describes other bytes");
    }
    assert_eq!(response.text(), [progress(1, 1), progress(1, 2), result(1)].map(event).concat());
    assert_eq!(upstream.wait_request(0).head.field("accept-encoding"), Some("identity"));
}

#[test]
fn a_stream_in_a_coding_that_is_not_known_passes_opaquely() {
    let opaque = b"\x0b\x02\x80: hi\n\ndata: \xff\n\n\x03";
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[("Content-Encoding", "br")]);
        reply.chunk(opaque);
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&call(1));
    assert_eq!(response.head.field("content-encoding"), Some("br"));
    assert_eq!(response.head.field("x-accel-buffering"), Some("no"));
    assert_eq!(response.body, opaque);
}

#[test]
fn an_event_stream_under_another_status_is_relayed_raw() {
    for status in [400, 401, 404, 500] {
        let raw = ": why\n\ndata: not json\n\ndata: half";
        let upstream = Upstream::start(move |_, reply| {
            reply.head(status, &[("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")]);
            reply.chunk(raw);
            reply.end();
        });
        let sidecar = Sidecar::before(&upstream);
        let response: Response = sidecar.client().ask(&call(1));
        assert_eq!(response.status(), status);
        assert_eq!(response.text(), raw);
    }
}

#[test]
fn an_event_that_is_no_json_passes_and_is_not_the_answer() {
    let odd =
        ["event: ping\ndata: {}\n\n", "data: plain text\n\n", "event: endpoint\ndata: /x\n\n", "data\n\n"];
    let stream = odd.concat() + &event(result(1));
    let body = relayed([&stream]);
    assert_eq!(String::from_utf8(body).unwrap(), stream);
}

/// A legacy node may send requests while a stream is open on another connection; nothing of one shows on the other.
#[test]
fn streams_of_one_session_do_not_mix() {
    let gates: Arc<[Gate; 3]> = Arc::new([Gate::new(), Gate::new(), Gate::new()]);
    let script = gates.clone();
    let upstream = Upstream::start(move |request, reply| {
        let id = request.json()["id"].as_u64().unwrap();
        reply.sse(&[]);
        reply.event(&progress(id, 1));
        script[usize::try_from(id).unwrap()].pass();
        reply.event(&result(id));
        reply.end();
    });
    let sidecar = Sidecar::before(&upstream);
    let clients: Vec<Client> = (0..3)
        .map(|id| {
            let client = sidecar.client();
            client.send(&call(id));
            client.events(1);
            client
        })
        .collect();
    for id in [1, 2, 0] {
        gates[id].open();
        let events: Vec<Value> =
            sse::read(&clients[id].response().body).events.iter().map(sse::Event::json).collect();
        assert_eq!(events.len(), 2);
        assert_eq!((&events[0]["params"]["progressToken"], &events[1]["id"]), (&id.into(), &id.into()));
    }
}
