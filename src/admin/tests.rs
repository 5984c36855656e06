use std::sync::atomic::{AtomicBool, Ordering};

use http_body_util::BodyExt;
use tower::ServiceExt;

use super::*;

fn admin(loopback: bool, ready: Readiness) -> Admin {
    Admin::new(Arc::new(Metrics::new()), ready, loopback)
}

fn ready() -> Readiness {
    Box::new(|| Ok(()))
}

async fn ask(admin: &Admin, method: &str, path: &str, headers: &[(&str, &str)]) -> (Response<()>, String) {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(()).expect("a request");
    let response = admin.clone().oneshot(request).await.expect("it never fails");
    let (head, body) = response.into_parts();
    let body = body.collect().await.expect("whole").to_bytes();
    (Response::from_parts(head, ()), String::from_utf8(body.into()).expect("text"))
}

async fn status(admin: &Admin, method: &str, path: &str, headers: &[(&str, &str)]) -> u16 {
    ask(admin, method, path, headers).await.0.status().as_u16()
}

const LOCAL: (&str, &str) = ("host", "localhost:7081");

#[tokio::test]
async fn health_is_alive_and_readiness_says_why_not() {
    let draining = Arc::new(AtomicBool::new(false));
    let admin = admin(true, {
        let draining = Arc::clone(&draining);
        Box::new(move || if draining.load(Ordering::Relaxed) { Err("draining") } else { Ok(()) })
    });
    assert_eq!(ask(&admin, "GET", "/healthz", &[LOCAL]).await.1, "ok\n");
    assert_eq!(ask(&admin, "GET", "/readyz", &[LOCAL]).await.1, "ok\n");
    draining.store(true, Ordering::Relaxed);
    let (response, body) = ask(&admin, "GET", "/readyz", &[LOCAL]).await;
    assert_eq!((response.status().as_u16(), body.as_str()), (503, "draining\n"));
    assert_eq!(status(&admin, "GET", "/healthz", &[LOCAL]).await, 200);
}

#[tokio::test]
async fn metrics_are_open_metrics_text_and_the_page_is_html() {
    let admin = admin(true, ready());
    let (response, body) = ask(&admin, "GET", "/metrics", &[LOCAL]).await;
    assert!(body.contains("mcp_sidecar_connections 0") && body.ends_with("# EOF\n"), "{body}");
    assert!(response.headers()["content-type"].to_str().is_ok_and(|kind| kind.contains("openmetrics")));
    let (response, _) = ask(&admin, "GET", "/", &[LOCAL]).await;
    assert_eq!(response.headers()["content-type"], "text/html; charset=utf-8");
}

#[tokio::test]
async fn other_paths_are_not_found_and_other_methods_not_allowed() {
    let admin = admin(true, ready());
    assert_eq!(status(&admin, "GET", "/nothing", &[LOCAL]).await, 404);
    assert_eq!(status(&admin, "POST", "/nothing", &[LOCAL]).await, 404);
    assert_eq!(status(&admin, "HEAD", "/readyz", &[LOCAL]).await, 200);
    let (response, _) = ask(&admin, "POST", "/readyz", &[LOCAL]).await;
    assert_eq!(
        (response.status().as_u16(), &response.headers()["allow"]),
        (405, &"GET, HEAD".parse().expect("a value"))
    );
}

#[tokio::test]
async fn a_page_in_a_browser_can_t_ask() {
    let local = admin(true, ready());
    for (host, expected) in [("127.0.0.1:7081", 200), ("[::1]", 200), ("rebound.example", 421), ("", 421)] {
        assert_eq!(status(&local, "GET", "/readyz", &[("host", host)]).await, expected, "{host}");
    }
    assert_eq!(status(&local, "GET", "/readyz", &[]).await, 421, "no Host");
    assert_eq!(status(&local, "GET", "/readyz", &[LOCAL, ("host", "evil")]).await, 421, "two of them");
    for origin in ["https://evil.example", "null"] {
        assert_eq!(status(&local, "GET", "/metrics", &[LOCAL, ("origin", origin)]).await, 403, "{origin}");
    }
    assert_eq!(status(&local, "GET", "/", &[LOCAL, ("origin", "http://localhost:3000")]).await, 200);

    local.allow(&proxy::Auth {
        hosts: vec!["sidecar.local".into()],
        origins: vec!["https://ops.example".into()],
        ..proxy::Auth::default()
    });
    let allowed = [("host", "sidecar.local"), ("origin", "https://ops.example")];
    assert_eq!(status(&local, "GET", "/", &allowed).await, 200, "as on the listener for nodes");

    let open = admin(false, ready());
    assert_eq!(status(&open, "GET", "/readyz", &[("host", "sidecar.svc:7081")]).await, 200);
    assert_eq!(status(&open, "GET", "/", &[("host", "a"), ("origin", "http://localhost")]).await, 403);
}
