//! Reuse, cancellation, connecting, and that nothing is ever sent twice.

use std::{
    future::{Future, poll_fn},
    sync::Arc,
    task::Poll,
};

use http_body::Body as _;
use tokio::{net::TcpSocket, time::Instant};

use super::*;

#[tokio::test]
async fn a_connection_read_to_its_end_is_used_again() {
    let server = Server::start().await;
    let upstream = server.upstream();
    let serve = async {
        let mut peer = server.accept().await;
        for _ in 0..3 {
            peer.request().await;
            peer.write(OK).await;
        }
        peer.request().await;
        peer.write(&format!("{EVENTS}2\r\nok\r\n0\r\n\r\n")).await;
        peer.request().await;
        peer.write("HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n").await;
        peer.request().await;
        peer.write("HTTP/1.1 204 No Content\r\n\r\n").await;
        peer
    };
    let calls = async {
        let (_, body, sent) = exchange(&upstream, call("1")).await.unwrap();
        assert_eq!(body, "ok");
        assert!(!sent.reused && sent.connect.is_some() && !sent.http2);
        for _ in 0..5 {
            let (_, _, sent) = exchange(&upstream, call("2")).await.unwrap();
            assert!(sent.reused && sent.connect.is_none());
        }
    };
    let (_peer, ()) = tokio::join!(serve, calls);
    assert!(server.is_quiet().await);
}

#[tokio::test]
async fn a_body_that_is_known_to_have_ended_needs_no_poll_to_give_its_connection_back() {
    let server = Server::start().await;
    let upstream = server.upstream();
    let serve = async {
        let mut peer = server.accept().await;
        for answer in ["HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n", OK, OK] {
            peer.request().await;
            peer.write(answer).await;
        }
        peer
    };
    let calls = async {
        let empty = send(&upstream, call("1")).await.unwrap();
        assert!(empty.body().is_end_stream());
        let mut read = send(&upstream, call("2")).await.unwrap().into_body();
        assert_eq!(next(&mut read).await.unwrap().unwrap(), "ok");
        assert!(read.is_end_stream());
        let (_, _, sent) = exchange(&upstream, call("3")).await.unwrap();
        assert!(sent.reused);
        drop((empty, read));
    };
    tokio::join!(serve, calls);
    assert!(server.is_quiet().await);
}

#[tokio::test]
async fn the_target_is_as_given_and_the_only_host_is_the_configured_one() {
    let server = Server::start().await;
    let upstream = server.upstream();
    let port = server.address().port();
    let serve = async {
        let mut peer = server.accept().await;
        for target in ["/a%2fb/../c/?q=%20", "/", "/?only=query"] {
            let (head, body) = peer.request().await;
            assert!(head.starts_with(&format!("POST {target} HTTP/1.1\r\n")), "{head}");
            assert_eq!(head.matches("host: ").count(), 1, "{head}");
            assert!(head.contains(&format!("host: 127.0.0.1:{port}\r\n")), "{head}");
            assert_eq!(head.matches("content-length: ").count(), 1, "{head}");
            assert!(!head.contains("chunked"), "{head}");
            assert_eq!(body, b"body");
            peer.write(OK).await;
        }
    };
    let calls = async {
        for target in ["/a%2fb/../c/?q=%20", "http://elsewhere", "http://elsewhere:1?only=query"] {
            let request = Request::post(target)
                .version(http::Version::HTTP_10)
                .header("host", "elsewhere:8080")
                .header("content-length", "9")
                .header("transfer-encoding", "chunked")
                .body(Bytes::from("body"))
                .unwrap();
            exchange(&upstream, request).await.unwrap();
        }
    };
    tokio::join!(serve, calls);
}

#[test]
fn the_port_that_a_scheme_implies_is_left_out_of_host() {
    for (url, expected) in [
        ("https://example.com:443/mcp", "example.com"),
        ("http://example.com:80", "example.com"),
        ("http://example.com:443", "example.com:443"),
        ("https://[::1]:8443/", "[::1]:8443"),
    ] {
        assert_eq!(crate::upstream::host(&url.parse().unwrap()), expected);
    }
}

#[tokio::test]
async fn an_idle_connection_that_the_peer_closed_costs_nothing_but_a_new_one() {
    let server = Server::start().await;
    let upstream = server.upstream();
    for round in 0..20 {
        let serve = async {
            let mut peer = server.accept().await;
            assert_eq!(peer.request().await.1, format!("{round}").into_bytes());
            peer.write(OK).await;
            if round % 2 == 0 { drop(peer) } else { reset(peer) }
        };
        let (_, answer) = tokio::join!(serve, exchange(&upstream, call(format!("{round}"))));
        assert!(!answer.unwrap().2.reused);
    }
    assert!(server.is_quiet().await);
}

#[tokio::test]
async fn an_idle_connection_on_which_the_peer_spoke_is_not_used() {
    let server = Server::start().await;
    let upstream = server.upstream();
    for _ in 0..2 {
        let serve = async {
            let mut peer = server.accept().await;
            peer.request().await;
            peer.write(OK).await;
            peer
        };
        let (mut peer, answer) = tokio::join!(serve, exchange(&upstream, call("1")));
        assert!(!answer.unwrap().2.reused);
        peer.write("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged").await;
    }
}

#[tokio::test]
async fn a_request_whose_connection_dies_fails_and_is_never_sent_again() {
    let server = Server::start().await;
    let upstream = server.upstream();
    for (answer, by_reset) in [("", false), ("", true), ("HTTP/1.1 200", false), ("HTTP/1.1 200", true)] {
        let serve = async {
            let mut peer = server.accept().await;
            peer.request().await;
            peer.write(OK).await;
            assert_eq!(peer.request().await.1, b"once");
            peer.write(answer).await;
            if by_reset { reset(peer) } else { drop(peer) }
        };
        let calls = async {
            exchange(&upstream, call("first")).await.unwrap();
            exchange(&upstream, call("once")).await
        };
        let ((), failed) = tokio::join!(serve, calls);
        assert!(matches!(failed, Err(Error::Failed(_))), "{failed:?}");
        assert!(server.is_quiet().await, "nobody came back");
    }
}

#[tokio::test]
async fn dropping_the_future_before_the_head_closes_the_connection() {
    let server = Server::start().await;
    let upstream = server.upstream();
    let mut sent = Sent::default();
    let mut waiting = Box::pin(upstream.send(call("x"), &mut sent));
    let accepted = async {
        let mut peer = server.accept().await;
        peer.request().await;
        peer
    };
    let peer = tokio::select! {
        _ = &mut waiting => panic!("answered"),
        peer = accepted => peer,
    };
    drop(waiting);
    assert_eq!(peer.closed().await, b"");
    assert!(sent.connect.is_some(), "what is known of the connection is told all the same");
}

#[tokio::test]
async fn dropping_a_body_before_its_end_closes_the_connection() {
    let server = Server::start().await;
    let upstream = server.upstream();
    for answer in
        [format!("{EVENTS}6\r\ndata:\n\r\n"), "HTTP/1.1 200 OK\r\ncontent-length: 900000\r\n\r\n123".into()]
    {
        let serve = async {
            let mut peer = server.accept().await;
            peer.request().await;
            peer.write(&answer).await;
            peer
        };
        let (peer, response) = tokio::join!(serve, send(&upstream, call("x")));
        let mut body = response.unwrap().into_body();
        next(&mut body).await.unwrap().unwrap();
        drop(body);
        peer.closed().await;
    }
}

#[tokio::test]
async fn a_body_dropped_just_before_its_last_chunk_keeps_its_connection() {
    let server = Server::start().await;
    let upstream = server.upstream();
    let serve = async {
        let mut peer = server.accept().await;
        peer.request().await;
        peer.write(&format!("{EVENTS}7\r\ndata: x\r\n0\r\n\r\n")).await;
        peer.request().await;
        peer.write(OK).await;
        peer
    };
    let calls = async {
        let mut body = send(&upstream, call("1")).await.unwrap().into_body();
        assert_eq!(next(&mut body).await.unwrap().unwrap(), "data: x");
        drop(body);
        assert!(exchange(&upstream, call("2")).await.unwrap().2.reused);
    };
    tokio::join!(serve, calls);
}

#[tokio::test]
async fn nobody_listening_is_unreachable() {
    let server = Server::start().await;
    let upstream = server.upstream();
    drop(server);
    let failed = exchange(&upstream, call("x")).await;
    assert!(matches!(failed, Err(Error::Unreachable(_))), "{failed:?}");
}

#[tokio::test]
async fn a_name_that_does_not_exist_is_unreachable() {
    let upstream = Upstream::new(settings("http://nowhere.invalid/mcp"));
    let failed = exchange(&upstream, call("x")).await;
    assert!(matches!(failed, Err(Error::Unreachable(_))), "{failed:?}");
}

#[tokio::test]
async fn a_connect_that_hangs_is_unreachable_in_time() {
    // A listener whose queue is full drops every further SYN.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let filling: Vec<_> = (0..4).map(|_| Box::pin(TcpStream::connect(address))).collect();
    let mut connected = Vec::new();
    for mut connect in filling {
        if let Poll::Ready(stream) = poll_fn(|cx| Poll::Ready(connect.as_mut().poll(cx))).await {
            connected.push(stream);
        }
        connected
            .push(timeout(Duration::from_millis(50), connect).await.unwrap_or_else(|late| Err(late.into())));
    }
    let mut slow = settings(&format!("http://{address}/mcp"));
    slow.connect_timeout = Duration::from_millis(200);
    let began = Instant::now();
    let failed = exchange(&Upstream::new(slow), call("x")).await;
    assert!(matches!(failed, Err(Error::Unreachable(_))), "{failed:?}");
    assert!(began.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn idle_connections_are_bounded_in_number() {
    let server = Server::start().await;
    let mut few = settings(&format!("http://{}/mcp", server.address()));
    few.idle_connections = 1;
    let upstream = Upstream::new(few);
    let serve = async {
        let (mut a, mut b) = (server.accept().await, server.accept().await);
        for peer in [&mut a, &mut b] {
            peer.request().await;
            peer.write(OK).await;
        }
        (a, b)
    };
    let ((mut a, mut b), first, second) =
        tokio::join!(serve, exchange(&upstream, call("1")), exchange(&upstream, call("2")));
    first.and(second).unwrap();
    let (mut byte, mut other) = ([0], [0]);
    let kept = tokio::select! {
        closed = soon(a.stream.read(&mut byte)) => closed.map(|n| (n, &mut b)),
        closed = soon(b.stream.read(&mut other)) => closed.map(|n| (n, &mut a)),
    };
    let (n, kept) = kept.unwrap();
    assert_eq!(n, 0);
    let serve = async {
        kept.request().await;
        kept.write(OK).await;
    };
    let ((), third) = tokio::join!(serve, exchange(&upstream, call("3")));
    assert!(third.unwrap().2.reused);
}

#[tokio::test]
async fn idle_connections_are_closed_when_their_time_is_over() {
    let server = Server::start().await;
    let mut brief = settings(&format!("http://{}/mcp", server.address()));
    brief.idle_timeout = Duration::from_millis(100);
    let upstream = Upstream::new(brief);
    let serve = async {
        let mut peer = server.accept().await;
        peer.request().await;
        peer.write(OK).await;
        peer
    };
    let (peer, answer) = tokio::join!(serve, exchange(&upstream, call("x")));
    answer.unwrap();
    peer.closed().await;
    assert!(server.is_quiet().await, "nothing is opened without a request");
}

#[tokio::test]
async fn a_dropped_upstream_closes_its_idle_connections_and_lets_running_bodies_end() {
    let server = Server::start().await;
    let upstream = server.upstream();
    let serve = async {
        let mut idle = server.accept().await;
        idle.request().await;
        idle.write(OK).await;
        idle
    };
    let (mut idle, answer) = tokio::join!(serve, exchange(&upstream, call("x")));
    answer.unwrap();
    let serve = async {
        idle.request().await;
        idle.write(&format!("{EVENTS}2\r\nab\r\n")).await;
    };
    let ((), response) = tokio::join!(serve, send(&upstream, call("x")));
    let mut body = response.unwrap().into_body();
    assert_eq!(next(&mut body).await.unwrap().unwrap(), "ab");
    drop(upstream);
    idle.write("2\r\ncd\r\n0\r\n\r\n").await;
    assert_eq!(soon(body.collect()).await.unwrap().to_bytes(), "cd");
    idle.closed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_each_get_their_own_answer() {
    let server = Server::start().await;
    let upstream = Arc::new(server.upstream());
    let serving = tokio::spawn(async move {
        loop {
            let mut peer = server.accept().await;
            tokio::spawn(async move {
                loop {
                    let (_, body) = peer.request().await;
                    let body = String::from_utf8(body).unwrap();
                    peer.write(&format!("{EVENTS}{:x}\r\n{body}\r\n0\r\n\r\n", body.len())).await;
                }
            });
        }
    });
    let calls: Vec<_> = (0..16)
        .map(|caller| {
            let upstream = upstream.clone();
            tokio::spawn(async move {
                for turn in 0..50 {
                    let body = format!("{caller}/{turn}");
                    let (_, answer, _) = exchange(&upstream, call(body.clone())).await.unwrap();
                    assert_eq!(answer, body);
                }
            })
        })
        .collect();
    for running in calls {
        running.await.unwrap();
    }
    serving.abort();
}
