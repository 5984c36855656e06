//! The support of the integration tests, against itself: a raw client and a scripted server, without a sidecar.

mod support;

use support::{
    Client, Gate, Upstream,
    mcp::{self, call, modern_call, progress, result},
    sse,
};

#[test]
fn a_json_answer_arrives_whole_and_the_request_is_recorded_byte_for_byte() {
    let upstream = Upstream::json(result(1));
    let client = Client::connect(&upstream.address);
    let response = client.ask(&call(1));
    assert_eq!(response.status(), 200);
    assert_eq!(response.text(), result(1));
    client.ask(&modern_call("\"x\""));
    assert_eq!(upstream.count(), 2);
    assert_eq!(upstream.wait_request(1).head.field("mcp-name"), Some("slow"));
    assert_eq!(upstream.connections()[0].bytes[..], {
        let host = &upstream.address;
        [call(1).bytes(host), modern_call("\"x\"").bytes(host)].concat()
    });
}

#[test]
fn the_call_of_the_test_cases_has_the_length_it_is_documented_with() {
    assert_eq!(call(1).body.len(), 114);
}

#[test]
fn events_arrive_as_the_test_lets_them_through() {
    let gate = Gate::new();
    let pass = gate.clone();
    let upstream = Upstream::start(move |_, reply| {
        reply.sse(&[]);
        pass.pass();
        reply.event(&progress(1, 1));
        pass.pass();
        reply.event(&result(1));
        reply.end();
    });
    let client = Client::connect(&upstream.address);
    client.send(&call(1));
    assert_eq!(client.head().field("content-type"), Some("text/event-stream"));
    gate.open();
    assert_eq!(client.events(1)[0].data, progress(1, 1));
    gate.open();
    assert_eq!(sse::read(&client.response().body).events[1].json()["id"], 1);
}

#[test]
fn a_client_that_leaves_is_seen_with_the_way_it_left() {
    let upstream = Upstream::silent();
    let client = Client::connect(&upstream.address);
    client.send(&call(1));
    upstream.wait_request(0);
    client.close();
    assert!(!upstream.wait_closed(0).reset);
    let client = Client::connect(&upstream.address);
    client.send(&call(2));
    upstream.wait_request(1);
    client.reset();
    assert!(upstream.wait_closed(1).reset);
}

#[test]
fn a_server_can_break_off_and_reset() {
    let upstream = Upstream::start(|request, reply| {
        reply.sse(&[]);
        if request.number == 0 { reply.break_off() } else { reply.reset() }
    });
    for _ in 0..2 {
        let client = Client::connect(&upstream.address);
        client.send(&call(1));
        client.closed();
    }
}

#[test]
fn a_server_can_answer_before_it_has_the_whole_request() {
    let upstream = Upstream::by_connection(|reply| {
        reply.received(|bytes| bytes.windows(4).any(|w| w == b"\r\n\r\n"));
        reply.json(413, &[("Connection", "close")], "{}");
        reply.break_off();
    });
    let client = Client::connect(&upstream.address);
    client.send(&call(1).field("Content-Length", "1000000"));
    assert_eq!(client.response().status(), 413);
    assert_eq!(upstream.count(), 0);
}

#[test]
fn the_reference_reader_follows_the_whatwg_rules() {
    let stream = sse::read(
        b"\xef\xbb\xbf: hi\rid: 7\r\ndata: a\rdata:  b\n\nevent: x\ndata\n\nid: 8\n\nretry: 20\ndata: lost\n",
    );
    let told: Vec<_> =
        stream.events.iter().map(|e| (e.name.as_str(), e.data.as_str(), e.id.as_str())).collect();
    assert_eq!(told, [("message", "a\n b", "7"), ("x", "", "7")]);
    assert_eq!((stream.comments, stream.retry, stream.cut), (vec!["hi".to_owned()], Some(20), true));
    assert_eq!(sse::read(mcp::event("{}").as_bytes()).events[0].data, "{}");
}

#[test]
fn the_tls_variant_shows_a_certificate_of_its_own_authority() {
    let upstream = Upstream::tls(|_, reply| reply.json(200, &[], &result(1)));
    assert!(upstream.url().starts_with("https://localhost:"));
    assert!(upstream.ca.unwrap().contains("BEGIN CERTIFICATE"));
    let plaintext = Client::connect(&upstream.address);
    plaintext.send(&call(1));
    plaintext.closed();
}
