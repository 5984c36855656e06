//! HTTP/1.1 answers: whole, cut short, early, malformed.

use super::*;

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
            let frame = soon(body.frame()).await;
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
async fn a_silent_event_stream_holds_no_buffer_of_hypers_and_its_connection_is_used_again() {
    let server = Server::start().await;
    let upstream = server.upstream();
    let (rest, chunk) = tokio::sync::mpsc::unbounded_channel();
    let (all, mut chunk) = ("1\r\na\r\n0\r\n\r\n", chunk);
    let serve = async {
        let mut peer = server.accept().await;
        for behind in 0..all.len() {
            peer.request().await;
            peer.write(&format!("{EVENTS}{}", &all[..behind])).await;
            let () = chunk.recv().await.unwrap();
            peer.write(&all[behind..]).await;
        }
        peer
    };
    let calls = async {
        for n in 0..all.len() {
            let mut sent = Sent::default();
            let response = upstream.send(call("x"), &mut sent).await.unwrap();
            assert_eq!(sent.reused, n > 0);
            let mut body = response.into_body();
            assert!(format!("{body:?}").contains("Chunked"), "{body:?}");
            rest.send(()).unwrap();
            assert_eq!(next(&mut body).await.unwrap().unwrap(), "a");
            assert!(next(&mut body).await.is_none());
        }
    };
    tokio::join!(serve, calls);
}

#[tokio::test]
async fn an_event_stream_may_begin_before_its_request_has_been_read() {
    let server = Server::start().await;
    let upstream = server.upstream();
    let length = 16 << 20;
    let serve = async {
        let mut peer = server.accept().await;
        peer.more().await;
        peer.write(&format!("{EVENTS}5\r\nearly\r\n")).await;
        assert_eq!(peer.request().await.1.len(), length);
        peer.write("4\r\nlate\r\n0\r\n\r\n").await;
        peer.request().await;
        peer.write(OK).await;
    };
    let calls = async {
        let (_, body, _) = exchange(&upstream, call(vec![b'x'; length])).await.unwrap();
        assert_eq!(body, "earlylate");
        assert!(exchange(&upstream, call("x")).await.unwrap().2.reused);
    };
    tokio::join!(serve, calls);
}
