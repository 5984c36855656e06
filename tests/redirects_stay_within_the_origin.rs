//! A 307 or 308 within the same origin is followed once, remembered and logged; every other redirect
//! is the node's to judge, and no credential ever follows one to another origin.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use support::{
    Post, Sidecar, Upstream,
    http::Response,
    mcp::{call, modern_call, result},
    upstream::Reply,
};

fn redirect(reply: &mut Reply, status: u16, location: &str) {
    reply.json(status, &[("Location", location), ("X-Kept", "1")], "{\"moved\":true}");
}

fn assert_passed(response: &Response, status: u16, location: &str) {
    assert_eq!((response.status(), response.text().as_str()), (status, "{\"moved\":true}"));
    assert_eq!(response.head.all("location"), [location]);
    assert_eq!(response.head.all("x-kept"), ["1"]);
}

fn path(request: &support::Request) -> &str {
    request.head.line.split(' ').nth(1).unwrap()
}

/// An upstream whose endpoint has moved from `/mcp` to wherever `location` says, seen from its own address.
fn moved(status: u16, location: &'static str) -> Upstream {
    Upstream::start(move |request, reply| {
        if path(request).starts_with("/mcp") && !path(request).starts_with("/mcp/") {
            let host = request.head.field("host").unwrap();
            return redirect(reply, status, &location.replace("HOST", host));
        }
        reply.json(200, &[], &result(1));
    })
}

#[test]
fn a_redirect_within_the_origin_is_followed_once_with_everything_it_had() {
    let locations =
        ["http://HOST/mcp/", "/mcp/", "//HOST/mcp/", "HTTP://HOST/mcp/", "mcp/", "./mcp/", "/mcp/#top"];
    for location in locations {
        for status in [307, 308] {
            let upstream = moved(status, location);
            let sidecar = Sidecar::before(&upstream);
            let post = modern_call(1).field("Authorization", "Bearer T").field("X-Api-Key", "K");
            let response = sidecar.client().ask(&post);
            assert_eq!((response.status(), response.text()), (200, result(1)), "{location}");
            let (first, second) = (upstream.wait_request(0), upstream.wait_request(1));
            assert_eq!((path(&first), path(&second)), ("/mcp", "/mcp/"), "{location}");
            assert_eq!((second.method(), &second.body), ("POST", &post.body));
            assert_eq!((&first.body, &first.head.fields), (&second.body, &second.head.fields));
            assert_eq!(upstream.count(), 2);
        }
    }
}

#[test]
fn where_it_led_is_remembered_and_logged() {
    let upstream = moved(308, "/mcp/");
    let sidecar = Sidecar::before(&upstream);
    for _ in 0..3 {
        assert_eq!(sidecar.client().ask(&call(1)).text(), result(1));
    }
    assert_eq!(sidecar.client().ask(&call(1).at("/mcp?a=b")).text(), result(1));
    let paths: Vec<_> = (0..5).map(|number| path(&upstream.wait_request(number)).to_owned()).collect();
    assert_eq!(paths, ["/mcp", "/mcp/", "/mcp/", "/mcp/", "/mcp/?a=b"]);
    sidecar.wait_stderr("/mcp/");
    assert_eq!(sidecar.wait_lines(4).len(), 4, "one line a call, followed or not");
}

#[test]
fn where_it_led_is_forgotten_when_nothing_is_there_any_more() {
    let upstream = Upstream::start(|request, reply| match (request.number, path(request)) {
        (0, _) => redirect(reply, 307, "/moved"),
        (1, _) | (_, "/mcp") => reply.json(200, &[], &result(1)),
        _ => reply.json(404, &[], "{\"lost\":1}"),
    });
    let sidecar = Sidecar::before(&upstream);
    assert_eq!(sidecar.client().ask(&call(1)).text(), result(1));
    let lost = sidecar.client().ask(&call(1));
    assert_eq!((lost.status(), lost.text().as_str()), (404, "{\"lost\":1}"));
    assert_eq!(sidecar.client().ask(&call(1)).text(), result(1));
    let paths: Vec<_> = (0..4).map(|number| path(&upstream.wait_request(number)).to_owned()).collect();
    assert_eq!(paths, ["/mcp", "/moved", "/moved", "/mcp"]);
}

#[test]
fn notifications_gets_and_deletes_are_followed_like_calls() {
    let note = Post::legacy(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    for post in [note, Post::get(), Post::delete()] {
        let upstream = moved(307, "/mcp/");
        let sidecar = Sidecar::before(&upstream);
        assert_eq!(sidecar.client().ask(&post).status(), 200);
        let second = upstream.wait_request(1);
        assert_eq!((second.method(), path(&second), &second.body), (post.method, "/mcp/", &post.body));
    }
}

#[test]
fn a_redirect_to_another_origin_passes_and_nothing_is_sent_there() {
    let other = Upstream::json(result(1));
    let port = other.address.rsplit(':').next().unwrap().to_owned();
    let locations = [
        format!("http://{}/mcp", other.address),
        format!("//{}/x", other.address),
        format!("http://localhost:{port}/mcp"),
        format!("http://user:secret@{}/mcp", other.address),
        "http://127.0.0.1/mcp".to_owned(),
        "https://OWN/mcp/".to_owned(),
        "http://OWN.evil.example/mcp/".to_owned(),
        "http://OWN@127.0.0.1:1/mcp/".to_owned(),
        "ftp://OWN/mcp/".to_owned(),
        "file:///etc/passwd".to_owned(),
        "http:/mcp/".to_owned(),
        "mcp:x".to_owned(),
        "http://".to_owned(),
        "//".to_owned(),
        "http://[".to_owned(),
        "..//../x".to_owned(),
        String::new(),
    ];
    let told = locations.clone();
    let upstream = Upstream::start(move |request, reply| {
        let own = request.head.field("host").unwrap();
        let status = 307 + u16::try_from(request.number % 2).unwrap();
        redirect(reply, status, &told[request.number / 2].replace("OWN", own));
    });
    let sidecar = Sidecar::before(&upstream);
    for (number, location) in locations.iter().enumerate() {
        for status in [307, 308] {
            let post = call(1).field("Authorization", "Bearer T").field("X-Api-Key", "K");
            let response = sidecar.client().ask(&post);
            assert_passed(&response, status, &location.replace("OWN", &upstream.address));
        }
        assert_eq!(upstream.count(), 2 * (number + 1), "{location}");
    }
    assert_eq!(other.connections().len(), 0);
}

#[test]
fn a_plain_location_is_no_way_out_of_tls() {
    let upstream = Upstream::tls(|request, reply| {
        let own = request.head.field("host").unwrap();
        redirect(reply, 307, &format!("http://{own}/mcp/"));
    });
    let folder = tempfile::TempDir::new().unwrap();
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, upstream.ca.as_ref().unwrap()).unwrap();
    let toml =
        format!("[upstreams.mcp]\nurl = \"{}\"\ntls = {{ ca = \"{}\" }}\n", upstream.url(), ca.display());
    let sidecar = Sidecar::with_config(&toml);
    let response = sidecar.client().ask(&call(1));
    assert_eq!(response.status(), 307);
    assert_eq!(upstream.count(), 1);
}

#[test]
fn other_redirects_are_never_followed() {
    for status in [300, 301, 302, 303, 305, 306] {
        let upstream = moved(status, "/mcp/");
        let sidecar = Sidecar::before(&upstream);
        for post in [call(1), Post::get(), Post::delete()] {
            assert_passed(&sidecar.client().ask(&post), status, "/mcp/");
        }
        let seen: Vec<_> = (0..3).map(|number| upstream.wait_request(number).head.line).collect();
        assert_eq!(seen, ["POST /mcp HTTP/1.1", "GET /mcp HTTP/1.1", "DELETE /mcp HTTP/1.1"]);
        assert_eq!(upstream.count(), 3);
    }
}

#[test]
fn a_loop_ends_after_one_follow_with_the_upstreams_own_redirect() {
    let upstream = Upstream::start(|request, reply| {
        let location = if path(request) == "/mcp" { "/mcp/" } else { "/mcp" };
        redirect(reply, 307, location);
    });
    let sidecar = Sidecar::before(&upstream);
    assert_passed(&sidecar.client().ask(&call(1)), 307, "/mcp");
    assert_eq!(upstream.count(), 2);
    sidecar.client().ask(&call(1));
    assert_eq!(upstream.count(), 4, "the next call makes at most one more as well");
}

#[test]
fn a_redirect_to_itself_is_not_followed() {
    let upstream = Upstream::start(|request, reply| {
        let host = request.head.field("host").unwrap();
        redirect(reply, 307, &format!("http://{host}/mcp"));
    });
    let sidecar = Sidecar::before(&upstream);
    assert_eq!(sidecar.client().ask(&call(1)).status(), 307);
    assert_eq!(upstream.count(), 1);
}

#[test]
fn a_redirect_without_one_location_passes() {
    let upstream = Upstream::start(|request, reply| match request.number {
        0 => reply.json(307, &[], "{}"),
        _ => reply.json(307, &[("Location", "/a"), ("Location", "/b")], "{}"),
    });
    let sidecar = Sidecar::before(&upstream);
    assert_eq!(sidecar.client().ask(&call(1)).status(), 307);
    let two = sidecar.client().ask(&call(1));
    assert_eq!((two.status(), two.head.all("location")), (307, vec!["/a", "/b"]));
    assert_eq!(upstream.count(), 2);
}

#[test]
fn busy_is_seen_behind_a_redirect_too() {
    let upstream = Upstream::start(|request, reply| match path(request) {
        "/mcp" => redirect(reply, 307, "/mcp/"),
        _ => reply.json(429, &[("Retry-After", "3")], "{}"),
    });
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&call(1));
    assert_eq!(response.json()["result"]["_meta"]["oz0/retry_after"], 3);
    assert_eq!(sidecar.wait_lines(1)[0]["upstream_status"], 429);
}
