//! Pool, cancellation, truncation, and that nothing is ever sent twice (R-101, R-223, R-225, R-226, R-230; J-26).

use std::{sync::Arc, task::Poll};

use futures::{next, poll_once};
use http_body::Body as _;
use tokio::{net::TcpSocket, time::Instant};

use super::*;

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
const EVENTS: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// What a test needs of futures.
mod futures {
    use std::{
        future::{Future, poll_fn},
        pin::Pin,
        task::Poll,
    };

    use bytes::Bytes;

    use super::super::{Body, Error, soon};

    /// The next chunk.
    pub(super) async fn next(body: &mut Body) -> Option<Result<Bytes, Error>> {
        let frame = soon(poll_fn(|cx| http_body::Body::poll_frame(Pin::new(&mut *body), cx))).await?;
        Some(frame.map(|frame| frame.into_data().expect("data")))
    }

    pub(super) async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
        poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx))).await
    }
}

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
async fn chunks_that_are_there_together_are_joined_and_their_end_comes_after_them() {
    let server = Server::start().await;
    let upstream = server.upstream();
    let part = "p".repeat(6000);
    for (ending, whole) in [("0\r\n\r\n", true), ("0\r\nx-checksum: 1\r\n\r\n", true), ("", false)] {
        let serve = async {
            let mut peer = server.accept().await;
            peer.request().await;
            let chunk = format!("1770\r\n{part}\r\n");
            peer.write(&format!("{EVENTS}1\r\na\r\n1\r\nb\r\n{}{ending}", chunk.repeat(3))).await;
        };
        let (response, ()) = tokio::join!(send(&upstream, call("x")), serve);
        let mut body = response.unwrap().into_body();
        let first = next(&mut body).await.unwrap().unwrap();
        assert!(first.starts_with(b"ab") && first.len() <= 16 * 1024, "{}", first.len());
        let mut length = first.len();
        let end = loop {
            let frame = soon(std::future::poll_fn(|cx| std::pin::Pin::new(&mut body).poll_frame(cx))).await;
            match frame.map(|frame| frame.map(http_body::Frame::into_data)) {
                Some(Ok(Ok(more))) => length += more.len(),
                Some(Ok(Err(trailers))) => assert!(trailers.is_trailers()),
                Some(Err(error)) => break Err(error),
                None => break Ok(()),
            }
        };
        assert_eq!(length, 2 + 3 * 6000);
        assert_eq!(end.is_ok(), whole, "{end:?}");
    }
}

#[tokio::test]
async fn a_truncated_body_ends_in_an_error() {
    let server = Server::start().await;
    let upstream = server.upstream();
    for answer in [
        format!("{EVENTS}5\r\nhello\r\n"),
        format!("{EVENTS}5\r\nhel"),
        format!("{EVENTS}5\r\nhello\r\n0\r\n"),
        format!("{EVENTS}5\r\nhello\r\nzz\r\n"),
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello".to_owned(),
    ] {
        for by_reset in [false, true] {
            let serve = async {
                let mut peer = server.accept().await;
                peer.request().await;
                peer.write(&answer).await;
                if by_reset { reset(peer) } else { drop(peer) }
            };
            let (answer, ()) = tokio::join!(exchange(&upstream, call("x")), serve);
            assert!(matches!(answer, Err(Error::Failed(_))), "{answer:?}");
        }
    }
    assert!(server.is_quiet().await);
}

#[tokio::test]
async fn a_body_that_ends_with_the_connection_is_whole_only_without_a_reset() {
    let server = Server::start().await;
    let upstream = server.upstream();
    for by_reset in [false, true] {
        let serve = async {
            let mut peer = server.accept().await;
            peer.request().await;
            peer.write("HTTP/1.0 200 OK\r\n\r\nhello").await;
            if by_reset { reset(peer) } else { drop(peer) }
        };
        let (answer, ()) = tokio::join!(exchange(&upstream, call("x")), serve);
        assert_eq!(answer.is_ok(), !by_reset, "{answer:?}");
    }
}

#[tokio::test]
async fn an_early_answer_arrives_although_the_upstream_stops_reading_and_closes() {
    let server = Server::start().await;
    let upstream = server.upstream();
    for pause in [50, 0] {
        let serve = async {
            let mut peer = server.accept().await;
            while peer.unread.len() < 1024 {
                peer.more().await;
            }
            peer.write(
                "HTTP/1.1 429 Too Many Requests\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 4\r\n\r\nslow",
            )
            .await;
            tokio::time::sleep(Duration::from_millis(pause)).await;
        };
        let body = vec![b'x'; 4 << 20];
        let (answer, ()) = tokio::join!(exchange(&upstream, call(body)), serve);
        let (status, body, _) = answer.unwrap();
        assert_eq!((status.as_u16(), &body[..]), (429, &b"slow"[..]));
        assert!(server.is_quiet().await);
    }
}

#[tokio::test]
async fn an_early_answer_over_a_connection_that_stays_open_is_not_reused() {
    let server = Server::start().await;
    let upstream = server.upstream();
    let serve = async {
        let mut peer = server.accept().await;
        peer.more().await;
        peer.write("HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\nno").await;
        peer.closed().await;
        let mut peer = server.accept().await;
        peer.request().await;
        peer.write(OK).await;
    };
    let calls = async {
        let (status, ..) = exchange(&upstream, call(vec![b'x'; 16 << 20])).await.unwrap();
        assert_eq!(status, StatusCode::UNAUTHORIZED);
        assert!(!exchange(&upstream, call("x")).await.unwrap().2.reused);
    };
    tokio::join!(serve, calls);
}

#[tokio::test]
async fn what_a_proxy_must_mend_in_a_response_head_is_mended_and_the_rest_fails() {
    let server = Server::start().await;
    let upstream = server.upstream();
    for (head, whole) in [
        ("HTTP/1.1 200 OK\r\nx-folded: a\r\n b\r\ncontent-length : 0\r\n\r\n", true),
        ("HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", true),
        ("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", false),
        ("HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", false),
        ("HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\na", false),
        ("HTTP/1.1 200 OK\r\nx y: 1\r\ncontent-length: 0\r\n\r\n", false),
        ("ICY 200 OK\r\n\r\n", false),
    ] {
        let serve = async {
            let mut peer = server.accept().await;
            peer.request().await;
            peer.write(head).await;
        };
        let (answer, ()) = tokio::join!(send(&upstream, call("x")), serve);
        match answer {
            Ok(response) if whole => {
                if let Some(folded) = response.headers().get("x-folded") {
                    assert_eq!(folded.to_str().unwrap().split_whitespace().collect::<Vec<_>>(), ["a", "b"]);
                }
            }
            Err(Error::Failed(_)) if !whole => {}
            other => panic!("{head:?}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_head_of_30_kilobytes_is_read_and_one_without_end_is_not() {
    let server = Server::start().await;
    let upstream = server.upstream();
    for (kilobytes, whole) in [(30, true), (80, false)] {
        let serve = async {
            let mut peer = server.accept().await;
            peer.request().await;
            let line = format!("x-filler: {}\r\n", "f".repeat(1012));
            let _ = peer
                .stream
                .write_all(
                    format!("HTTP/1.1 200 OK\r\n{}content-length: 0\r\n\r\n", line.repeat(kilobytes))
                        .as_bytes(),
                )
                .await;
        };
        let (answer, ()) = tokio::join!(send(&upstream, call("x")), serve);
        assert_eq!(answer.is_ok(), whole, "{kilobytes} kilobytes");
    }
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
        if let Poll::Ready(stream) = poll_once(&mut connect).await {
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
