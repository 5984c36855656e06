//! HTTP/2 frame by frame: shared fate, refusals, limits.

use std::sync::Arc;

use tokio::task::JoinHandle;

use super::*;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// `:status: 200` from the static table (RFC 7541, appendix A).
const STATUS_200: &[u8] = &[0x88];

const NO_ERROR: u32 = 0;
const REFUSED: u32 = 7;
const CANCEL: u32 = 8;

fn shared(server: &Server) -> Arc<Upstream> {
    let settings = settings(&format!("http://{}/mcp", server.address()));
    Arc::new(Upstream::with_prior_knowledge(settings))
}

/// Reads and writes frames as they are.
struct Frames(Peer<TcpStream>);

struct Frame {
    kind: u8,
    stream: u32,
    payload: Vec<u8>,
}

impl Frames {
    /// Accepts a connection and its preface; `limit` is the most streams it may have.
    async fn accept(server: &Server, limit: Option<u32>) -> Self {
        let mut peer = server.accept().await;
        while peer.unread.len() < 24 {
            peer.more().await;
        }
        assert_eq!(peer.unread.drain(..24).collect::<Vec<_>>(), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        let mut frames = Self(peer);
        let limit = limit.map(|limit| [&[0, 3], &limit.to_be_bytes()[..]].concat());
        frames.write(SETTINGS, 0, 0, &limit.unwrap_or_default()).await;
        frames
    }

    async fn write(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
        soon(self.0.stream.write_all(&[&head, payload].concat())).await.unwrap();
    }

    async fn head(&mut self, stream: u32) {
        self.write(HEADERS, END_HEADERS, stream, STATUS_200).await;
    }

    async fn data(&mut self, stream: u32, data: &str, end: bool) {
        self.write(DATA, if end { END_STREAM } else { 0 }, stream, data.as_bytes()).await;
    }

    async fn reset(&mut self, stream: u32, code: u32) {
        self.write(RST_STREAM, 0, stream, &code.to_be_bytes()).await;
    }

    async fn go_away(&mut self, last: u32) {
        let secret = b"secret";
        self.write(GOAWAY, 0, 0, &[&last.to_be_bytes(), &NO_ERROR.to_be_bytes(), &secret[..]].concat()).await;
    }

    /// The next frame of this kind.
    async fn next(&mut self, kind: u8) -> Frame {
        loop {
            while self.0.unread.len() < 9 {
                self.0.more().await;
            }
            let head: Vec<u8> = self.0.unread.drain(..9).collect();
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            while self.0.unread.len() < length {
                self.0.more().await;
            }
            let payload = self.0.unread.drain(..length).collect();
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            if head[3] == kind {
                return Frame { kind, stream, payload };
            }
        }
    }

    async fn is_reset(&mut self, stream: u32, code: u32) {
        let frame = self.next(RST_STREAM).await;
        assert_eq!(
            (frame.kind, frame.stream, frame.payload),
            (RST_STREAM, stream, code.to_be_bytes().to_vec())
        );
    }
}

/// Sends in a task of its own, so that the order of things is the server's.
fn spawn(upstream: &Arc<Upstream>, body: &str) -> JoinHandle<Result<(Response<Body>, Sent), Error>> {
    let (upstream, request) = (upstream.clone(), call(body.to_owned()));
    tokio::spawn(async move {
        let mut sent = Sent::default();
        let response = upstream.send(request, &mut sent).await?;
        Ok((response, sent))
    })
}

async fn text(response: Response<Body>) -> Result<Bytes, Error> {
    Ok(soon(response.into_body().collect()).await?.to_bytes())
}

#[tokio::test]
async fn the_request_is_whole_and_names_the_configured_authority() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let authority = server.address().to_string();
    let serve = async {
        let mut connection = h2::server::handshake(server.accept().await.stream).await.unwrap();
        let (request, mut respond) = soon(connection.accept()).await.unwrap().unwrap();
        tokio::spawn(async move { while connection.accept().await.is_some() {} });
        let (parts, mut body) = request.into_parts();
        assert_eq!(parts.uri.to_string(), format!("http://{authority}/mcp?x=1"));
        assert_eq!(parts.headers["content-length"], "4194304");
        assert!(!parts.headers.contains_key("host"));
        let mut length = 0;
        while let Some(chunk) = soon(body.data()).await {
            let chunk = chunk.unwrap();
            length += chunk.len();
            body.flow_control().release_capacity(chunk.len()).unwrap();
        }
        assert_eq!(length, 4 << 20);
        let mut stream = respond.send_response(Response::new(()), false).unwrap();
        stream.send_data(Bytes::from("o"), false).unwrap();
        stream.send_data(Bytes::from("k"), true).unwrap();
    };
    let request =
        Request::post("/mcp?x=1").header("host", "elsewhere").body(Bytes::from(vec![b'x'; 4 << 20])).unwrap();
    let ((), answer) = tokio::join!(serve, exchange(&upstream, request));
    let (_, body, sent) = answer.unwrap();
    assert_eq!(body, "ok");
    assert!(sent.http2 && !sent.reused && sent.connect.is_some());
}

#[tokio::test]
async fn dropping_one_stream_cancels_it_and_leaves_the_others_alone() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let (one, two, three) = (spawn(&upstream, "1"), spawn(&upstream, "2"), spawn(&upstream, "3"));
    let mut peer = Frames::accept(&server, None).await;
    for stream in [1, 3, 5] {
        assert_eq!(peer.next(HEADERS).await.stream, stream);
    }
    // The order in which they got on is theirs.
    peer.head(1).await;
    peer.data(1, "begun", false).await;
    peer.head(3).await;
    let mut heads = [one, two, three].map(|call| Some(Box::pin(call)));
    let mut open = Vec::new();
    while open.len() < 2 {
        for head in &mut heads {
            if let Some(call) = head
                && let Ok(answered) = timeout(Duration::from_millis(5), call).await
            {
                *head = None;
                open.push(answered.unwrap().unwrap().0.into_body());
            }
        }
    }
    let waiting = heads.into_iter().flatten().next().unwrap();
    waiting.abort();
    peer.is_reset(5, CANCEL).await;
    drop(open.remove(0));
    let gone = peer.next(RST_STREAM).await;
    let left = if gone.stream == 1 { 3 } else { 1 };
    assert_eq!(gone.payload, CANCEL.to_be_bytes());
    peer.data(left, "end", true).await;
    let rest = soon(open.remove(0).collect()).await.unwrap().to_bytes();
    assert!(rest.ends_with(b"end"));
    assert!(server.is_quiet().await, "one connection for all");
}

#[tokio::test]
async fn the_first_to_dial_may_leave_without_harm_to_the_others() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let first = spawn(&upstream, "1");
    let others = [spawn(&upstream, "2"), spawn(&upstream, "3")];
    let mut accepted = server.accept().await;
    accepted.more().await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    while accepted.unread.len() < 24 {
        accepted.more().await;
    }
    accepted.unread.drain(..24);
    let mut peer = Frames(accepted);
    peer.write(SETTINGS, 0, 0, &[]).await;
    for stream in [1, 3] {
        assert_eq!(peer.next(HEADERS).await.stream, stream);
        peer.head(stream).await;
        peer.data(stream, "ok", true).await;
    }
    for other in others {
        assert_eq!(text(soon(other).await.unwrap().unwrap().0).await.unwrap(), "ok");
    }
}

#[tokio::test]
async fn a_dial_that_nobody_waits_for_any_more_is_given_up() {
    let server = Server::start().await;
    let mut patient = settings(&format!("http://{}/mcp", server.address()));
    patient.connect_timeout = Duration::from_secs(60);
    let upstream = Arc::new(Upstream::with_prior_knowledge(patient));
    let only = spawn(&upstream, "1");
    let accepted = server.accept().await;
    only.abort();
    accepted.closed().await;
}

#[tokio::test]
async fn a_refused_stream_is_known_not_to_be_processed_and_not_sent_again() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let refused = spawn(&upstream, "1");
    let mut peer = Frames::accept(&server, None).await;
    peer.next(HEADERS).await;
    peer.reset(1, REFUSED).await;
    let error = soon(refused).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Refused(_)), "{error:?}");

    let reset = spawn(&upstream, "2");
    assert_eq!(peer.next(HEADERS).await.stream, 3);
    peer.reset(3, 2).await;
    let error = soon(reset).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Failed(_)), "{error:?}");

    // After the head the word means nothing any more.
    let begun = spawn(&upstream, "3");
    assert_eq!(peer.next(HEADERS).await.stream, 5);
    peer.head(5).await;
    let (response, sent) = soon(begun).await.unwrap().unwrap();
    peer.reset(5, REFUSED).await;
    assert!(matches!(text(response).await, Err(Error::Failed(_))));
    assert!(sent.reused);
    assert!(server.is_quiet().await);
}

/// It is told as what it is; `h2` by itself resets the stream of such a head as that of any that is wrong.
#[tokio::test]
async fn a_head_that_is_too_large_fails_its_exchange_and_no_other() {
    const CONTINUATION: u8 = 9;
    let server = Server::start().await;
    let upstream = shared(&server);
    let large = spawn(&upstream, "1");
    let mut peer = Frames::accept(&server, None).await;
    peer.next(HEADERS).await;
    // A literal field (RFC 7541 § 6.2.2) of 16,000 bytes in each frame.
    let length = [0x7f, 0x80 | ((16_000 - 127) & 0x7f) as u8, ((16_000 - 127) >> 7) as u8];
    let field = [&[0, 1, b'x'][..], &length, &[b'v'; 16_000]].concat();
    peer.write(HEADERS, 0, 1, STATUS_200).await;
    for n in 1..=5 {
        peer.write(CONTINUATION, if n == 5 { END_HEADERS } else { 0 }, 1, &field).await;
    }
    let error = soon(large).await.unwrap().unwrap_err();
    assert!(
        matches!(&error, Error::Failed(why) if why == "the response head exceeds 65536 bytes"),
        "{error:?}"
    );
    peer.is_reset(1, CANCEL).await;

    let other = spawn(&upstream, "2");
    assert_eq!(peer.next(HEADERS).await.stream, 3);
    peer.head(3).await;
    peer.data(3, "{}", true).await;
    assert_eq!(text(soon(other).await.unwrap().unwrap().0).await.unwrap(), "{}");
    assert!(server.is_quiet().await);
}

#[tokio::test]
async fn a_goaway_refuses_what_it_leaves_out_and_lets_the_rest_end() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let served = spawn(&upstream, "1");
    let mut peer = Frames::accept(&server, None).await;
    peer.next(HEADERS).await;
    peer.head(1).await;
    let (served, _) = soon(served).await.unwrap().unwrap();
    let left_out = spawn(&upstream, "3");
    assert_eq!(peer.next(HEADERS).await.stream, 3);
    peer.go_away(1).await;
    let error = soon(left_out).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Refused(_)), "{error:?}");
    assert!(!error.to_string().contains("secret"), "{error}");

    let next = spawn(&upstream, "5");
    let mut other = Frames::accept(&server, None).await;
    let stream = other.next(HEADERS).await.stream;
    other.head(stream).await;
    other.data(stream, "elsewhere", true).await;
    assert_eq!(text(soon(next).await.unwrap().unwrap().0).await.unwrap(), "elsewhere");

    peer.data(1, "still ", false).await;
    peer.data(1, "served", true).await;
    assert_eq!(text(served).await.unwrap(), "still served");
    peer.0.closed().await;
}

#[tokio::test]
async fn a_goaway_that_covers_the_stream_does_not_make_its_end_a_refusal() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let call = spawn(&upstream, "1");
    let mut peer = Frames::accept(&server, None).await;
    peer.next(HEADERS).await;
    peer.go_away(1).await;
    drop(peer);
    let error = soon(call).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Failed(_)), "{error:?}");
    assert!(server.is_quiet().await);
}

#[tokio::test]
async fn a_connection_that_went_away_while_idle_is_replaced() {
    let server = Server::start().await;
    let upstream = shared(&server);
    for close in [false, true] {
        let answered = spawn(&upstream, "x");
        let mut peer = Frames::accept(&server, None).await;
        let stream = peer.next(HEADERS).await.stream;
        peer.head(stream).await;
        peer.data(stream, "", true).await;
        let (response, sent) = soon(answered).await.unwrap().unwrap();
        text(response).await.unwrap();
        assert!(!sent.reused);
        if close {
            drop(peer);
        } else {
            peer.go_away(stream).await;
            peer.0.closed().await;
        }
    }
}

#[tokio::test]
async fn a_connection_that_dies_fails_its_streams_and_sends_nothing_again() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let (one, two) = (spawn(&upstream, "1"), spawn(&upstream, "2"));
    let mut peer = Frames::accept(&server, None).await;
    peer.next(HEADERS).await;
    peer.next(HEADERS).await;
    drop(peer);
    for call in [one, two] {
        let error = soon(call).await.unwrap().unwrap_err();
        assert!(matches!(error, Error::Failed(_)), "{error:?}");
    }
    assert!(server.is_quiet().await);
}

#[tokio::test]
async fn a_body_reset_without_error_before_its_end_is_truncated_and_after_it_whole() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let cut = spawn(&upstream, "1");
    let mut peer = Frames::accept(&server, None).await;
    peer.next(HEADERS).await;
    peer.head(1).await;
    peer.data(1, "half", false).await;
    peer.reset(1, NO_ERROR).await;
    assert!(matches!(text(soon(cut).await.unwrap().unwrap().0).await, Err(Error::Failed(_))));

    // An early answer, the request body still on its way (RFC 9113 § 8.1).
    let early = spawn(&upstream, &"x".repeat(1 << 20));
    peer.next(HEADERS).await;
    peer.next(DATA).await;
    peer.head(3).await;
    peer.data(3, "whole", true).await;
    peer.reset(3, NO_ERROR).await;
    assert_eq!(text(soon(early).await.unwrap().unwrap().0).await.unwrap(), "whole");
    assert!(server.is_quiet().await);
}

#[tokio::test]
async fn beyond_the_peers_limit_of_streams_another_connection_is_opened() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let mut streams = Vec::new();
    let first = spawn(&upstream, "0");
    let mut peer = Frames::accept(&server, Some(4)).await;
    assert_eq!(peer.next(HEADERS).await.stream, 1);
    peer.head(1).await;
    streams.push(soon(first).await.unwrap().unwrap().0);
    for stream in [3, 5, 7] {
        let call = spawn(&upstream, "stream");
        assert_eq!(peer.next(HEADERS).await.stream, stream);
        peer.head(stream).await;
        streams.push(soon(call).await.unwrap().unwrap().0);
    }
    let fifth = spawn(&upstream, "5");
    let mut other = Frames::accept(&server, Some(4)).await;
    assert_eq!(other.next(HEADERS).await.stream, 1);
    other.head(1).await;
    other.data(1, "ok", true).await;
    assert_eq!(text(soon(fifth).await.unwrap().unwrap().0).await.unwrap(), "ok");

    drop(streams.remove(0));
    peer.is_reset(1, CANCEL).await;
    let sixth = spawn(&upstream, "6");
    assert_eq!(peer.next(HEADERS).await.stream, 9);
    peer.head(9).await;
    peer.data(9, "room again", true).await;
    assert_eq!(text(soon(sixth).await.unwrap().unwrap().0).await.unwrap(), "room again");
}

#[tokio::test]
async fn a_slow_reader_does_not_stop_the_others() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let slow = spawn(&upstream, "slow");
    let mut peer = Frames::accept(&server, None).await;
    peer.next(HEADERS).await;
    peer.head(1).await;
    let slow = soon(slow).await.unwrap().unwrap().0;
    for _ in 0..1000 {
        peer.data(1, &"x".repeat(64), false).await;
    }
    let quick = spawn(&upstream, "quick");
    assert_eq!(peer.next(HEADERS).await.stream, 3);
    peer.head(3).await;
    peer.data(3, "ok", true).await;
    assert_eq!(text(soon(quick).await.unwrap().unwrap().0).await.unwrap(), "ok");
    peer.data(1, "", true).await;
    assert_eq!(text(slow).await.unwrap().len(), 64_000);
}

#[tokio::test]
async fn an_idle_connection_is_closed_when_its_time_is_over() {
    let server = Server::start().await;
    let mut brief = settings(&format!("http://{}/mcp", server.address()));
    brief.idle_timeout = Duration::from_millis(100);
    let upstream = Arc::new(Upstream::with_prior_knowledge(brief));
    let call = spawn(&upstream, "1");
    let mut peer = Frames::accept(&server, None).await;
    peer.next(HEADERS).await;
    peer.head(1).await;
    let response = soon(call).await.unwrap().unwrap().0;
    tokio::time::sleep(Duration::from_millis(300)).await;
    peer.data(1, "not idle while a stream is open", true).await;
    text(response).await.unwrap();
    peer.0.closed().await;
    assert!(server.is_quiet().await);
}

#[tokio::test]
async fn a_server_that_speaks_something_else_is_unreachable_and_sees_no_request() {
    let server = Server::start().await;
    let upstream = shared(&server);
    let call = spawn(&upstream, "1");
    let mut peer = server.accept().await;
    peer.more().await;
    peer.write("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
    let error = soon(call).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Unreachable(_)), "{error:?}");
}
