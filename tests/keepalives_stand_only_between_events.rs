//! After `keepalive.interval` without a byte to the node a comment is sent, only between events, also
//! before the first one, never before the upstream's head is known and never on an answer that is no event stream.

mod support;

use support::{
    Client, Gate, Post, Sidecar, Upstream,
    mcp::{call, cancel, event, modern_call, result},
    sse,
};

const COMMENT: &[u8] = b":\n\n";

fn sidecar(upstream: &Upstream) -> Sidecar {
    Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\n[upstreams.mcp.keepalive]\ninterval = \"100ms\"\n",
        upstream.url()
    ))
}

/// Waits until `count` more comments have come.
fn wait_comments(client: &Client, count: usize) {
    let comments = |bytes: &[u8]| sse::read(bytes).comments.len();
    let before = comments(&client.body(|_| true));
    client.body(|bytes| comments(bytes) >= before + count);
}

/// Takes every comment of ours out, wherever it stands.
fn without_comments(bytes: &[u8]) -> Vec<u8> {
    String::from_utf8_lossy(bytes).replace(":\n\n", "").into_bytes()
}

/// A call whose stream sends these pieces, each after two comments have come since the one before. Gives the body.
fn paused(post: &Post, pieces: &[&[u8]]) -> Vec<u8> {
    let gate = Gate::new();
    let (pass, sent) = (gate.clone(), pieces.iter().map(|piece| piece.to_vec()).collect::<Vec<_>>());
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        for piece in &sent {
            pass.pass();
            reply.chunk(piece);
        }
        pass.pass();
        reply.end();
    });
    let sidecar = sidecar(&upstream);
    let client = sidecar.client();
    client.send(post);
    client.head();
    for _ in pieces {
        wait_comments(&client, 2);
        gate.open();
    }
    // Everything, the last piece included, has passed when a comment follows it.
    wait_comments(&client, 2);
    gate.open();
    client.response().body
}

#[test]
fn no_comment_lands_in_an_event_that_pauses_half_way() {
    let whole = event(result(1));
    let crlf = format!("event: message\r\ndata: {}\r\n\r\n", result(1));
    let (line, second) = ("event: message\n".len(), crlf.len() - 3);
    let cuts: [(&str, usize); 6] = [
        (&whole, whole.len() / 2),
        (&whole, line),
        (&whole, whole.len() - 1),
        (&crlf, "event: message\r".len()),
        (&crlf, second),
        (&crlf, crlf.len() - 4),
    ];
    for (stream, cut) in cuts {
        for post in [call(1), modern_call(1)] {
            let (first, rest) = stream.as_bytes().split_at(cut);
            let body = paused(&post, &[first, rest]);
            let at = body.windows(stream.len()).position(|part| part == stream.as_bytes());
            let at = at.unwrap_or_else(|| panic!("cut at {cut}: {:?}", String::from_utf8_lossy(&body)));
            assert_eq!(body[..at], COMMENT.repeat(at / 3), "cut at {cut}");
            let after = &body[at + stream.len()..];
            assert_eq!(after, COMMENT.repeat(after.len() / 3), "cut at {cut}");
            let read = sse::read(&body);
            assert_eq!(read.events.len(), 1);
            assert_eq!(read.events[0].data, result(1));
        }
    }
}

/// The empty line's CR ends the event; a comment after it is between events, and the LF that comes then means nothing.
#[test]
fn an_event_that_ends_in_a_cr_is_given_at_once_and_its_late_lf_does_no_harm() {
    let stream = format!("data: {}\r\n\r", result(1));
    let body = paused(&call(1), &[stream.as_bytes(), b"\n", event("{}").as_bytes()]);
    let told = without_comments(&body);
    let told = String::from_utf8(told).unwrap();
    assert!(
        told == format!("{stream}{}", event("{}")) || told == format!("{stream}\n{}", event("{}")),
        "{told:?}"
    );
    let events = sse::read(&body).events;
    assert_eq!(events.iter().map(|e| e.data.as_str()).collect::<Vec<_>>(), [&result(1), "{}"]);
}

#[test]
fn a_byte_order_mark_behind_a_comment_of_ours_is_left_out_and_never_cut_by_one() {
    let answer = format!("data: {}\n\n", result(1));
    for pieces in [
        &[&b"\xef\xbb\xbf"[..], answer.as_bytes()][..],
        &[&b"\xef"[..], &b"\xbb"[..], &b"\xbf"[..], answer.as_bytes()],
    ] {
        let body = paused(&call(1), pieces);
        assert!(!body.windows(3).any(|part| part == b"\xef\xbb\xbf"));
        assert_eq!(without_comments(&body), answer.as_bytes());
        assert_eq!(sse::read(&body).events.len(), 1);
    }
}

#[test]
fn what_is_added_in_a_silence_is_comments_alone_and_the_log_counts_them() {
    let ping = "event: ping\ndata: {}\n\n";
    let answer = format!("event: message\nid: 9\ndata: {}\n\n", result(1));
    let gate = Gate::new();
    let (pass, last) = (gate.clone(), answer.clone());
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        pass.pass();
        reply.chunk(ping);
        reply.chunk(&last);
        reply.end();
    });
    let sidecar = sidecar(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    client.head();
    wait_comments(&client, 3);
    gate.open();
    let body = client.response().body;
    assert_eq!(without_comments(&body), format!("{ping}{answer}").as_bytes());
    let read = sse::read(&body);
    assert_eq!(
        read.events.iter().map(|e| (e.name.as_str(), e.id.as_str())).collect::<Vec<_>>(),
        [("ping", ""), ("message", "9")]
    );
    assert_eq!(read.retry, None);
    let line = sidecar.wait_line(|line| line["stream"] == "sse");
    assert_eq!(line["keepalives"], read.comments.len());
    assert_eq!(line["bytes_out"], body.len());
    assert_eq!(line["events"], 2);
    assert_eq!(line["outcome"], "ok");
}

/// To look alive before the upstream has spoken would be to choose the status for it.
#[test]
fn nothing_is_written_before_the_upstreams_status_is_known() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |request, reply| {
        pass.pass();
        match request.number {
            0 => reply.json(401, &[("WWW-Authenticate", "Bearer realm=\"x\"")], "{}"),
            1 => reply.json(404, &[], "{}"),
            2 => reply.json(405, &[("Allow", "GET")], "{}"),
            3 => reply.json(429, &[("Retry-After", "3")], "{}"),
            4 => reply.head(202, &[("Content-Length", "0")]),
            _ => reply.json(200, &[], &result(1)),
        }
    });
    let sidecar = sidecar(&upstream);
    let mut told = Vec::new();
    for number in 0..6 {
        let client = sidecar.client();
        client.send(&if number == 4 { cancel(99) } else { call(1) });
        upstream.wait_request(number);
        // Five intervals, in which nothing may come.
        std::thread::sleep(std::time::Duration::from_millis(500));
        assert_eq!(client.bytes(), b"");
        gate.open();
        let response = client.response();
        assert!(!response.text().contains(":\n"), "{}", response.text());
        told.push((response.status(), response));
    }
    let statuses: Vec<u16> = told.iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [401, 404, 405, 200, 202, 200]);
    assert_eq!(told[0].1.head.field("www-authenticate"), Some("Bearer realm=\"x\""));
    assert_eq!(told[3].1.json()["result"]["_meta"]["oz0/retry_after"], 3);
    assert_eq!(told[5].1.text(), result(1));
}

#[test]
fn a_json_body_that_pauses_gets_no_comment() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |_, reply| {
        let body = result(1);
        let length = body.len().to_string();
        reply.head(200, &[("Content-Type", "application/json"), ("Content-Length", &length)]);
        reply.raw(&body[..10]);
        pass.pass();
        reply.raw(&body[10..]);
    });
    let sidecar = sidecar(&upstream);
    let client = sidecar.client();
    client.send(&call(1));
    upstream.wait_request(0);
    std::thread::sleep(std::time::Duration::from_millis(500));
    gate.open();
    assert_eq!(client.response().text(), result(1));
}

#[test]
fn a_silent_get_stream_has_its_head_at_once_and_is_kept_alive() {
    let upstream = Upstream::start(|_, reply| {
        reply.sse(&[]);
        reply.hang();
    });
    let sidecar = sidecar(&upstream);
    let client = sidecar.client();
    client.send(&Post::get());
    assert_eq!(client.head().status(), 200);
    wait_comments(&client, 3);
    let body = client.body(|_| true);
    assert_eq!(body, COMMENT.repeat(body.len() / 3));
}

#[test]
fn an_interval_of_zero_sends_no_comment() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        pass.pass();
        reply.event(&result(1));
        reply.end();
    });
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nkeepalive = {{ interval = \"0\" }}\n",
        upstream.url()
    ));
    let client = sidecar.client();
    client.send(&call(1));
    client.head();
    std::thread::sleep(std::time::Duration::from_millis(300));
    gate.open();
    assert_eq!(client.response().text(), event(result(1)));
    assert_eq!(sidecar.wait_line(|line| line["stream"] == "sse")["keepalives"], 0);
}
