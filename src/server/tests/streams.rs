//! What is promised of event streams on HTTP/1.1: all that hyper would do, without it.

use std::pin::Pin;

use super::*;

/// What an answer's body gives, one by one.
type Frames = mpsc::UnboundedSender<Result<Bytes, &'static str>>;

struct Scripted {
    frames: mpsc::UnboundedReceiver<Result<Bytes, &'static str>>,
    _dropped: Option<DropSignal>,
}

impl http_body::Body for Scripted {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        self.frames.poll_recv(cx).map(|frame| frame.map(|frame| frame.map(Frame::data)))
    }
}

/// Answers with a stream of that kind, and gives the body's other end.
fn streaming(kind: &'static str, limits: Limits) -> (Running, mpsc::UnboundedReceiver<Frames>) {
    let (begun, answers) = mpsc::unbounded_channel();
    let running = Running::start("127.0.0.1:0", limits, None, move |request| {
        let begun = begun.clone();
        async move {
            if request.uri().path() == "/plain" {
                return describe(request).await;
            }
            let (frames, body) = mpsc::unbounded_channel();
            begun.send(frames).expect("the test waits");
            let mut response = Response::new(Body::new(Scripted { frames: body, _dropped: None }));
            response.headers_mut().insert("content-type", kind.parse().expect("a value"));
            response.headers_mut().append("x-two", "1".parse().expect("a value"));
            response.headers_mut().append("x-two", "2".parse().expect("a value"));
            response
        }
    });
    (running, answers)
}

fn event_streams() -> (Running, mpsc::UnboundedReceiver<Frames>) {
    streaming("text/event-stream", limits())
}

const GET: &str = "GET /stream HTTP/1.1\r\nHost: h\r\n\r\n";
const PLAIN: &str = "GET /plain HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
const LAST: &str = "\r\n0\r\n\r\n";

async fn begin(
    stream: &mut TcpStream,
    request: &str,
    answers: &mut mpsc::UnboundedReceiver<Frames>,
) -> Frames {
    stream.write_all(request.as_bytes()).await.expect("sent");
    timeout(FAR, answers.recv()).await.expect("in time").expect("asked")
}

/// The body of a chunked answer, and what follows it.
fn unchunked(mut text: &str) -> (String, &str) {
    let mut body = String::new();
    loop {
        let (size, rest) = text.split_once("\r\n").expect("a chunk");
        let size = usize::from_str_radix(size, 16).expect("a size");
        body.push_str(&rest[..size]);
        text = rest[size..].strip_prefix("\r\n").expect("the chunk's end");
        if size == 0 {
            return (body, text);
        }
    }
}

/// Frames of every size that is treated in a way of its own.
fn frames() -> Vec<Bytes> {
    let sizes =
        [1, 0, 15, 16, 8191, 8192, 8193, 3, 200_000, 5, 70_000, 40_000, 9000, 8000, 8000, 8000, 8000, 8000];
    sizes.iter().zip(b'a'..).map(|(size, letter)| Bytes::from(vec![letter; *size])).collect()
}

#[tokio::test]
async fn an_event_stream_is_written_as_hyper_writes_every_other() {
    let mut answered = Vec::new();
    for kind in ["text/event-stream", "Text/Event-Stream; charset=utf-8", "text/event", "text/plain"] {
        let (running, mut answers) = streaming(kind, limits());
        let mut stream = running.connect().await;
        let given = begin(&mut stream, GET, &mut answers).await;
        frames().into_iter().for_each(|frame| given.send(Ok(frame)).expect("it is read"));
        drop(given);
        stream.write_all(PLAIN.as_bytes()).await.expect("sent");
        let answer = text_until_close(&mut stream).await;
        let (head, rest) = answer.split_once("\r\n\r\n").expect("a head");
        let (body, next) = unchunked(rest);
        assert!(next.ends_with(" end"), "the next request is answered: {next}");
        let fields =
            head.lines().filter(|line| !line.starts_with("date: ")).map(|line| line.replace(kind, "KIND"));
        let mut fields: Vec<String> = fields.collect();
        fields.sort();
        answered.push((fields, body));
    }
    let frames = frames().concat();
    assert_eq!(answered[0].1.as_bytes(), frames);
    assert!(answered[0].0.contains(&"transfer-encoding: chunked".to_owned()), "{:?}", answered[0].0);
    assert!(answered.iter().all(|answer| *answer == answered[0]));
}

#[tokio::test]
async fn what_is_there_goes_out_while_the_body_is_silent() {
    let (running, mut answers) = event_streams();
    let mut stream = running.connect().await;
    let frames = begin(&mut stream, GET, &mut answers).await;
    text_until(&mut stream, "\r\n\r\n").await;
    for text in ["data: 1\n\n", ":\n\n"] {
        frames.send(Ok(text.into())).expect("it is read");
        assert_eq!(text_until(&mut stream, "\n\n\r\n").await, format!("{:x}\r\n{text}\r\n", text.len()));
    }
}

#[tokio::test]
async fn requests_behind_a_stream_are_answered_after_it_in_whatever_pieces_they_come() {
    let (running, mut answers) = event_streams();
    let behind = format!(
        "POST /plain HTTP/1.1\r\nHost: h\r\nContent-Length: 20000\r\n\r\n{}{PLAIN}",
        "x".repeat(20_000)
    );
    for at in [0, 1, 40, 90, 8000, 15_000, behind.len()] {
        let mut stream = running.connect().await;
        let frames = begin(&mut stream, &format!("{GET}{}", &behind[..at]), &mut answers).await;
        text_until(&mut stream, "\r\n\r\n").await;
        frames.send(Ok("data: 1\n\n".into())).expect("it is read");
        text_until(&mut stream, "\n\n\r\n").await;
        let rest = &behind[at..];
        let middle = rest.len() / 2;
        // What its buffers do not take waits until the stream has ended.
        let (mut reader, mut writer) = stream.into_split();
        let (before, after) = (rest[..middle].to_owned(), rest[middle..].to_owned());
        let sending = tokio::spawn(async move {
            writer.write_all(before.as_bytes()).await.expect("sent");
            drop(frames);
            writer.write_all(after.as_bytes()).await.expect("sent");
            writer
        });
        let rest = text_until_close(&mut reader).await;
        assert!(rest.starts_with("0\r\n\r\nHTTP/1.1 200 OK\r\n"), "cut at {at}: {rest}");
        assert!(rest.contains("POST /plain 20000") && rest.contains("GET /plain 0"), "cut at {at}: {rest}");
        drop(sending.await);
    }
}

#[tokio::test]
async fn an_answer_that_its_client_has_not_taken_is_not_lost_to_the_stream_behind_it() {
    let (begun, mut answers) = mpsc::unbounded_channel();
    let running = Running::start("127.0.0.1:0", limits(), None, move |request| {
        let begun = begun.clone();
        async move {
            if request.uri().path() == "/large" {
                return Response::new(Body::full("x".repeat(16 << 20)));
            }
            let (frames, body) = mpsc::unbounded_channel::<Result<Bytes, &'static str>>();
            frames.send(Ok("data: 1\n\n".into())).expect("it is read");
            begun.send(()).expect("the test waits");
            let mut response = Response::new(Body::new(Scripted { frames: body, _dropped: None }));
            response.headers_mut().insert("content-type", "text/event-stream".parse().expect("a value"));
            response
        }
    });
    let mut stream = running.connect().await;
    let requests = format!("GET /large HTTP/1.1\r\nHost: h\r\n\r\n{GET}{PLAIN}").replace("/plain", "/large");
    stream.write_all(requests.as_bytes()).await.expect("sent");
    // hyper asks for the next answer when it has given the last of this one to the socket, or none of it: both are right.
    let asked = timeout(Duration::from_millis(300), answers.recv()).await;
    let answer = text_until_close(&mut stream).await;
    let parts: Vec<&str> = answer.split("HTTP/1.1 200 OK\r\n").collect();
    assert_eq!(parts.len(), 4, "{} answers, asked for the second early: {}", parts.len() - 1, asked.is_ok());
    for (part, end) in [(1, "x"), (2, LAST), (3, "x")] {
        assert!(parts[part].ends_with(end), "answer {part}");
    }
    assert!(parts[1].len() > 16 << 20 && parts[3].len() > 16 << 20);
}

#[tokio::test]
async fn a_stream_is_the_last_answer_where_its_client_asked_for_that() {
    let (running, mut answers) = event_streams();
    for asked in ["close", "keep-alive, Close", "close\r\nConnection: x"] {
        let mut stream = running.connect().await;
        let request = format!("GET / HTTP/1.1\r\nHost: h\r\nConnection: {asked}\r\n\r\n");
        let frames = begin(&mut stream, &request, &mut answers).await;
        frames.send(Ok("data: 1\n\n".into())).expect("it is read");
        drop(frames);
        let answer = text_until_close(&mut stream).await;
        assert!(answer.ends_with(LAST) && answer.contains("\r\nconnection: close\r\n"), "{answer}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_also_while_it_takes_nothing() {
    for sent in [0, 100, 100_000] {
        let (running, mut answers) = event_streams();
        let mut stream = running.connect().await;
        let frames = begin(&mut stream, GET, &mut answers).await;
        stream.write_all(&vec![b'x'; sent]).await.expect("sent");
        // Far more than the sockets take.
        for _ in 0..400 {
            frames.send(Ok(Bytes::from(vec![b'x'; 64 << 10]))).expect("it is read");
        }
        sleep(Duration::from_millis(50)).await;
        socket2::SockRef::from(&stream).shutdown(std::net::Shutdown::Write).expect("shut down");
        let dropped = timeout(FAR / 2, frames.closed()).await;
        assert!(dropped.is_ok(), "although {sent} bytes came");
    }
}

#[tokio::test]
async fn clients_without_chunks_and_without_bodies_get_none() {
    let (running, mut answers) = event_streams();
    let mut stream = running.connect().await;
    let frames = begin(&mut stream, "GET / HTTP/1.0\r\nHost: h\r\n\r\n", &mut answers).await;
    frames.send(Ok("data: 1\n\n".into())).expect("it is read");
    drop(frames);
    let answer = text_until_close(&mut stream).await;
    assert!(answer.ends_with("\r\n\r\ndata: 1\n\n"), "{answer}");
    let mut stream = running.connect().await;
    let frames =
        begin(&mut stream, &format!("HEAD / HTTP/1.1\r\nHost: h\r\n\r\n{PLAIN}"), &mut answers).await;
    let answer = text_until_close(&mut stream).await;
    let (_, behind) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(behind.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    drop(frames);
}

#[tokio::test]
async fn a_body_that_breaks_ends_the_connection_without_the_last_chunk() {
    let (running, mut answers) = event_streams();
    let mut stream = running.connect().await;
    let frames = begin(&mut stream, GET, &mut answers).await;
    frames.send(Ok("data: 1\n\n".into())).expect("it is read");
    frames.send(Err("broken")).expect("it is read");
    let answer = text_until_close(&mut stream).await;
    assert!(answer.ends_with("9\r\ndata: 1\n\n\r\n"), "what came before it is written: {answer}");
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_drops_its_body_whatever_it_has_sent() {
    for sent in [0, 100, 8192, 100_000] {
        let dropped = Arc::new(Notify::new());
        let running = Running::start("127.0.0.1:0", limits(), None, {
            let dropped = Arc::clone(&dropped);
            move |request: Request<Incoming>| {
                let peer = request.extensions().get::<Peer>().expect("there").clone();
                let signal = DropSignal(Arc::clone(&dropped));
                let (frames, body) = mpsc::unbounded_channel();
                frames.send(Ok("data: 1\n\n".into())).expect("it is read");
                // As every body does that may wait for long.
                tokio::spawn(async move {
                    peer.closed().await;
                    drop(frames);
                });
                let mut response =
                    Response::new(Body::new(Scripted { frames: body, _dropped: Some(signal) }));
                response.headers_mut().insert("content-type", "text/event-stream".parse().expect("a value"));
                std::future::ready(response)
            }
        });
        let mut stream = running.connect().await;
        stream.write_all(GET.as_bytes()).await.expect("sent");
        text_until(&mut stream, "\n\n\r\n").await;
        stream.write_all(&vec![b'x'; sent]).await.expect("sent");
        drop(stream);
        timeout(FAR, dropped.notified())
            .await
            .unwrap_or_else(|_| panic!("dropped, though {sent} bytes came"));
    }
}

#[tokio::test]
async fn a_client_that_takes_nothing_of_a_stream_is_closed() {
    let stall = Limits { client_stall: Duration::from_millis(300), ..limits() };
    let (running, mut answers) = streaming("text/event-stream", stall);
    let mut stream = running.connect().await;
    let frames = begin(&mut stream, GET, &mut answers).await;
    let flood = async {
        while frames.send(Ok(Bytes::from(vec![b'x'; 64 << 10]))).is_ok() {
            tokio::task::yield_now().await;
        }
    };
    timeout(FAR, flood).await.expect("the body is dropped");
}

#[tokio::test]
async fn after_a_stream_a_head_has_its_time_from_its_first_byte_on() {
    let quick = Limits { header_timeout: Duration::from_millis(300), ..limits() };
    let (running, mut answers) = streaming("text/event-stream", quick);
    // Longer than a head may take, and nothing of it has come.
    let mut stream = running.connect().await;
    drop(begin(&mut stream, GET, &mut answers).await);
    text_until(&mut stream, "0\r\n\r\n").await;
    sleep(Duration::from_millis(900)).await;
    stream.write_all(PLAIN.as_bytes()).await.expect("sent");
    assert!(text_until_close(&mut stream).await.contains("GET /plain"));
    // It was begun while the stream ran, or after it.
    for (before, after) in [("GET /", ""), ("", "GET /")] {
        let mut stream = running.connect().await;
        let frames = begin(&mut stream, &format!("{GET}{before}"), &mut answers).await;
        text_until(&mut stream, "\r\n\r\n").await;
        drop(frames);
        stream.write_all(after.as_bytes()).await.expect("sent");
        let answer = text_until_close(&mut stream).await;
        assert!(answer.starts_with("0\r\n\r\nHTTP/1.1 408 "), "{before:?}, {after:?}: {answer}");
    }
}

#[tokio::test]
async fn doubtful_framing_behind_a_stream_is_refused_as_ever() {
    let (running, mut answers) = event_streams();
    let doubtful = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n";
    for at in [0, 30, doubtful.len()] {
        let mut stream = running.connect().await;
        let frames = begin(&mut stream, &format!("{GET}{}", &doubtful[..at]), &mut answers).await;
        text_until(&mut stream, "\r\n\r\n").await;
        stream.write_all(&doubtful.as_bytes()[at..]).await.expect("sent");
        drop(frames);
        let answer = text_until_close(&mut stream).await;
        assert!(answer.starts_with("0\r\n\r\nHTTP/1.1 400 "), "cut at {at}: {answer}");
    }
}

#[tokio::test]
async fn a_stream_that_ends_after_the_stop_is_its_connections_last_answer() {
    let (mut running, mut answers) = event_streams();
    let mut stream = running.connect().await;
    let frames = begin(&mut stream, GET, &mut answers).await;
    text_until(&mut stream, "\r\n\r\n").await;
    running.stop();
    frames.send(Ok("data: 1\n\n".into())).expect("it is read");
    drop(frames);
    assert_eq!(text_until_close(&mut stream).await, "9\r\ndata: 1\n\n\r\n0\r\n\r\n");
}
