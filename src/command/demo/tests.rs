//! The scenes before a stand-in that keeps the promises as far as they look, and before one that only forwards.

use std::{
    collections::HashMap,
    convert::Infallible,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::SystemTime,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, header};
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc},
    time::{Instant, timeout_at},
};

use super::{
    client::{Answer, Client, Event},
    *,
};
use crate::{
    account::{self, Account, CancelledBy, Outcome, log::Sink, metrics::Metrics, token},
    headers::{PROTOCOL_VERSION, SESSION_ID},
    message::Era,
    relay::body::Body,
};

const IDLE: Duration = Duration::from_millis(400);
const MAXIMUM: Duration = Duration::from_millis(900);
const KEEPALIVE: Duration = Duration::from_millis(100);

/// Stands in for the sidecar.
struct StandIn {
    upstream: Client,
    sink: Sink,
    /// It forwards and logs, and does nothing else that is promised.
    forwards_only: bool,
    running: Mutex<HashMap<(String, String), Arc<Notify>>>,
}

async fn stage(forwards_only: bool) -> Stage {
    let (upstream, server) = Server::start((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
    let (sink, lines) = Sink::lines(1024, Arc::new(Metrics::new()));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let upstream = Client::new(upstream, "/mcp");
    let stand_in = Arc::new(StandIn { upstream, sink, forwards_only, running: Mutex::default() });
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            stream.set_nodelay(true).unwrap();
            let stand_in = Arc::clone(&stand_in);
            let service = service_fn(move |request| {
                let stand_in = Arc::clone(&stand_in);
                async move { Ok::<_, Infallible>(stand_in.answer(request).await.unwrap()) }
            });
            tokio::spawn(
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
            );
        }
    });
    Stage::new(Sidecar { address, lines, _serving: tokio::task::JoinSet::new() }, server)
}

impl StandIn {
    async fn answer(&self, request: Request<Incoming>) -> io::Result<Response<Body>> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let message: Value = serde_json::from_slice(&body).unwrap_or_default();
        let mut account = self.open(&head.headers, &message);
        let session = text(&head.headers, SESSION_ID.as_str());
        if message["method"] == "notifications/cancelled" {
            let call = (session.clone(), message["params"]["requestId"].to_string());
            if let Some(cancel) = self.running.lock().unwrap().get(&call) {
                cancel.notify_one();
            }
        }
        let headers = head.headers.into_iter().filter_map(|(name, value)| Some((name?, value)));
        let ours = [header::HOST, header::CONTENT_LENGTH, header::CONTENT_TYPE, header::ACCEPT];
        let headers = headers.filter(|(name, _)| !ours.contains(name)).collect();
        let (upstream, body) = (self.upstream.clone(), String::from_utf8(body.to_vec()).unwrap());
        let sent = async move { upstream.exchange(head.method, headers, body).await };
        if self.forwards_only {
            // Detached, it goes on when the node has left.
            let answer = tokio::spawn(sent).await.unwrap()?;
            return self.pass(answer, session, &message["id"], account).await;
        }
        let Ok(answer) = timeout_at(Instant::now() + IDLE, sent).await else {
            account.record.status = Some(200);
            account.record.reason = Some("idle_timeout");
            account.finish(Outcome::IdleTimeout);
            return Ok(json_response(&timeout(&message["id"], "idle_timeout", None)));
        };
        self.pass(answer?, session, &message["id"], account).await
    }

    async fn pass(
        &self,
        answer: Answer,
        session: String,
        id: &Value,
        mut account: Account,
    ) -> io::Result<Response<Body>> {
        account.record.upstream_status = Some(answer.status.as_u16());
        account.record.status = Some(answer.status.as_u16());
        if !self.forwards_only && matches!(answer.status.as_u16(), 429 | 503) {
            return Ok(busy(&answer, id, account));
        }
        if answer.content_type() == "text/event-stream" {
            let cancel = Arc::new(Notify::new());
            self.running.lock().unwrap().insert((session, id.to_string()), Arc::clone(&cancel));
            return Ok(self.stream(answer, id.clone(), account, cancel));
        }
        account.record.stream = Some(account::Stream::Json);
        account.finish(Outcome::Ok);
        let (status, headers) = (answer.status, answer.headers.clone());
        let mut response = Response::new(Body::full(answer.whole().await?));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        Ok(response)
    }

    fn open(&self, headers: &HeaderMap, message: &Value) -> Account {
        let mut account = Account::open(self.sink.clone(), SystemTime::now(), "r".to_owned());
        let record = &mut account.record;
        let known = |value: &Value| value.as_str().map(str::to_owned);
        record.upstream = Some("demo".into());
        record.rpc = known(&message["method"]);
        record.tool = known(&message["params"]["name"]);
        record.id = message.get("id").and_then(|id| token(id.to_string().as_bytes()));
        let version = text(headers, PROTOCOL_VERSION.as_str());
        record.era = Some(if version == client::MODERN { Era::Modern } else { Era::Legacy });
        record.protocol = Some(version);
        record.session = headers.get(SESSION_ID).map(|_| "0badcafe".to_owned());
        account
    }

    fn stream(&self, answer: Answer, id: Value, account: Account, cancel: Arc<Notify>) -> Response<Body> {
        let (sender, receiver) = mpsc::channel::<Bytes>(64);
        let forwards_only = self.forwards_only;
        tokio::spawn(async move {
            pump(answer, &id, &sender, forwards_only, &cancel, account).await.unwrap();
        });
        let mut response = Response::new(Body::new(Receiving(receiver)));
        response.headers_mut().insert(header::CONTENT_TYPE, "text/event-stream".parse().unwrap());
        response
    }
}

/// Passes the events on until the stream ends, a clock runs out, the node leaves, or it is cancelled.
async fn pump(
    mut answer: Answer,
    id: &Value,
    node: &mpsc::Sender<Bytes>,
    forwards_only: bool,
    cancel: &Notify,
    mut account: Account,
) -> io::Result<()> {
    let maximum = account.opened() + MAXIMUM;
    account.record.stream = Some(account::Stream::Sse);
    loop {
        let keepalive = Instant::now() + KEEPALIVE;
        let event = tokio::select! {
            event = answer.event() => event?,
            () = node.closed(), if !forwards_only => {
                account.record.cancel_ms = Some(Duration::ZERO);
                account.record.cancelled_by = Some(CancelledBy::Disconnect);
                account.finish(Outcome::Cancelled);
                return Ok(());
            }
            () = cancel.notified(), if !forwards_only => {
                account.record.cancelled_by = Some(CancelledBy::Notification);
                account.finish(Outcome::Cancelled);
                return Ok(());
            }
            () = tokio::time::sleep_until(maximum), if !forwards_only => {
                let error = timeout(id, "max_timeout", account.record.progress);
                let _ = node.send(format!("data: {error}\n\n").into()).await;
                account.record.reason = Some("max_timeout");
                account.finish(Outcome::MaxTimeout);
                return Ok(());
            }
            () = tokio::time::sleep_until(keepalive), if !forwards_only => Some(Event::Comment),
        };
        let record = &mut account.record;
        let sent = match event {
            None => break,
            Some(Event::Comment) => {
                *record.keepalives.get_or_insert(0) += 1;
                ":\n\n".to_owned()
            }
            Some(Event::Message(message)) => {
                *record.events.get_or_insert(0) += 1;
                if message["method"] == "notifications/progress" {
                    *record.progress_in.get_or_insert(0) += 1;
                    *record.progress_out.get_or_insert(0) += 1;
                    record.progress = message["params"]["progress"].as_f64();
                    record.total = message["params"]["total"].as_f64();
                }
                format!("data: {message}\n\n")
            }
        };
        let _ = node.send(sent.into()).await;
    }
    account.finish(Outcome::Ok);
    Ok(())
}

struct Receiving(mpsc::Receiver<Bytes>);

impl http_body::Body for Receiving {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}

fn busy(answer: &Answer, id: &Value, mut account: Account) -> Response<Body> {
    let wait = text(&answer.headers, "retry-after");
    let mut meta = json!({ "oz0/retryable": true });
    if !wait.is_empty() {
        meta["oz0/retry_after"] = serde_json::from_str(&wait).unwrap();
        account.record.retry_after = token(wait.as_bytes());
    }
    account.record.status = Some(200);
    account.finish(Outcome::Busy);
    let content = json!([{ "type": "text", "text": "busy" }]);
    let result = json!({ "content": content, "isError": true, "resultType": "complete", "_meta": meta });
    let mut response = json_response(&json!({ "jsonrpc": "2.0", "id": id, "result": result }));
    response.headers_mut().insert("oz0-upstream-status", answer.status.as_str().parse().unwrap());
    if !wait.is_empty() {
        response.headers_mut().insert(header::RETRY_AFTER, wait.parse().unwrap());
    }
    response
}

fn timeout(id: &Value, reason: &str, progress: Option<f64>) -> Value {
    let data = json!({ "source": "mcp-sidecar", "reason": reason, "outcome": "unknown", "upstream": "demo",
        "oz0/progress": { "progress": progress.map(|value| value as u64) } });
    json!({ "jsonrpc": "2.0", "id": id, "error": { "code": 1504, "message": reason, "data": data } })
}

fn json_response(body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::full(body.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
    response
}

fn text(headers: &HeaderMap, name: &str) -> String {
    headers.get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
}

/// Where the scenes end that the stand-in can play: it has no ledger, and no queue.
const PLAIN: usize = 12;

#[tokio::test]
async fn every_scene_is_right_before_one_that_keeps_the_promises() {
    let mut out = Vec::new();
    let right = perform(&mut stage(false).await, &SCENES[..PLAIN], &mut out).await.unwrap();
    let out = String::from_utf8(out).unwrap();
    assert!(right, "{out}");
    assert!(out.ends_with(&format!("\nall {PLAIN} scenes came out as promised\n")), "{out}");
    for (number, scene) in (1..).zip(&SCENES[..PLAIN]) {
        let (_, shown) = out.split_once(&format!("\n{number}. {}\n", scene.title)).unwrap();
        let shown = shown.split("\n\n").next().unwrap();
        assert!(shown.lines().any(|line| line.starts_with("   log {")), "{shown}");
        assert!(shown.lines().any(|line| !line.starts_with("   log {")), "{shown}");
    }
}

#[tokio::test]
async fn the_sidecar_itself_plays_every_scene_right() {
    let mut out = Vec::new();
    let right = perform(&mut set_up().await.unwrap(), SCENES, &mut out).await.unwrap();
    assert!(right, "{}", String::from_utf8_lossy(&out));
}

#[tokio::test]
async fn every_scene_but_the_plain_ones_is_wrong_before_one_that_only_forwards() {
    // A task needs nothing of a sidecar but that it keeps its hands off.
    let task = SCENES.iter().position(|scene| scene.title.starts_with("a task's cancel")).unwrap();
    let plain = [0, 1, 2, task];
    let mut playing = tokio::task::JoinSet::new();
    for (number, scene) in SCENES.iter().enumerate() {
        // Most of the others wait for what never comes.
        let within = if plain.contains(&number) { SCENE_WITHIN } else { Duration::from_secs(2) };
        playing.spawn(async move {
            let mut stage = stage(true).await;
            (number, play(scene, &mut stage, within).await.wrong.is_empty())
        });
    }
    let mut right: Vec<_> =
        playing.join_all().await.into_iter().filter(|played| played.1).map(|(number, _)| number).collect();
    right.sort_unstable();
    assert_eq!(right, plain);
}
