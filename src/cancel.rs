//! `notifications/cancelled` that the sidecar POSTs itself, to legacy upstreams only (contract section 8, J-01).
//!
//! One named task with a bounded queue, since such a notice outlives the exchange it is about. It is sent once; its answer
//! is discarded. A notice about a stream whose events had ids waits first: a node that resumes by `GET` has not gone.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use tokio::{sync::mpsc, sync::oneshot, task::JoinSet, time};

use crate::{inflight::Scope, message::Id, proxy::Route, upstream::Sent};

/// Notices that wait to be sent; beyond it they are dropped, and the log says so.
const QUEUE: usize = 1024;
/// Notices under way at once.
const CONCURRENT: usize = 64;
/// How long the answer to a notice is awaited.
const ANSWER: Duration = Duration::from_secs(10);
/// Event ids remembered of one stream, newest first.
const EVENT_IDS: usize = 256;

/// The end that exchanges hold.
#[derive(Clone, Debug)]
pub struct Canceller {
    queue: mpsc::Sender<Notice>,
    waiting: Arc<Mutex<Vec<Waiting>>>,
}

#[derive(Debug)]
struct Waiting {
    scope: Scope,
    ids: HashSet<u64>,
    resumed: oneshot::Sender<()>,
}

/// A notice that may have to be sent.
#[derive(Debug)]
pub struct Notice {
    /// Who sends it.
    pub canceller: Canceller,
    /// Where to.
    pub route: Arc<Route>,
    /// The session, version and credential headers of the request it is about, as they went upstream.
    pub headers: HeaderMap,
    /// The request's id.
    pub id: Id,
    /// The request's scope.
    pub scope: Scope,
    /// The ids of the stream's events (hashed, the newest of them); with any, the notice waits for a resuming `GET`.
    pub event_ids: Vec<u64>,
    /// The last `retry:` of the stream.
    pub retry: Duration,
    /// The sidecar gives up (clock, drain): it does not wait.
    pub now: bool,
}

impl Notice {
    /// Hands it to the task. Never blocks.
    pub fn send(self) {
        let canceller = self.canceller.clone();
        if canceller.queue.try_send(self).is_err() {
            tracing::warn!("too many cancel notices wait, one is dropped");
        }
    }

    /// Remembers the id of an event that was relayed.
    pub fn event_id(&mut self, id: &[u8]) {
        if self.event_ids.len() == EVENT_IDS {
            self.event_ids.remove(0);
        }
        self.event_ids.push(hash(id));
    }

    fn message(&self) -> Bytes {
        let mut body =
            br#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"#.to_vec();
        body.extend_from_slice(self.id.token());
        body.extend_from_slice(br#","reason":"the call was given up"}}"#);
        body.into()
    }
}

impl Canceller {
    /// Starts the task; it ends when the last holder is gone and the queue is empty.
    pub fn start() -> Self {
        let (queue, notices) = mpsc::channel(QUEUE);
        let waiting = Arc::new(Mutex::new(Vec::new()));
        tokio::spawn(run(notices, waiting.clone()));
        Self { queue, waiting }
    }

    /// A node resumes: the notice about the stream that had this event id is not sent.
    pub fn resumed(&self, scope: &Scope, last_event_id: &[u8]) {
        let id = hash(last_event_id);
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = waiting.iter().position(|one| one.scope == *scope && one.ids.contains(&id)) {
            let _ = waiting.swap_remove(at).resumed.send(());
        }
    }
}

async fn run(mut notices: mpsc::Receiver<Notice>, waiting: Arc<Mutex<Vec<Waiting>>>) {
    let mut under_way = JoinSet::new();
    while let Some(notice) = notices.recv().await {
        while under_way.len() >= CONCURRENT {
            under_way.join_next().await;
        }
        while under_way.try_join_next().is_some() {}
        let waiting = waiting.clone();
        under_way.spawn(async move {
            if notice.now || notice.event_ids.is_empty() || !comes_back(&notice, &waiting).await {
                post(notice).await;
            }
        });
    }
    while under_way.join_next().await.is_some() {}
}

/// Whether a resuming `GET` comes within the grace.
async fn comes_back(notice: &Notice, waiting: &Mutex<Vec<Waiting>>) -> bool {
    let grace = notice.route.cancel_grace.max(notice.retry).max(Duration::from_secs(2));
    let (resumed, comes) = oneshot::channel();
    let ids = notice.event_ids.iter().copied().collect();
    let entry = Waiting { scope: notice.scope.clone(), ids, resumed };
    waiting.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
    let came = matches!(time::timeout(grace, comes).await, Ok(Ok(())));
    waiting.lock().unwrap_or_else(PoisonError::into_inner).retain(|one| !one.resumed.is_closed());
    came
}

async fn post(notice: Notice) {
    let mut request = Request::new(notice.message());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = notice.route.target(None);
    *request.headers_mut() = notice.headers;
    let mut sent = Sent::default();
    match time::timeout(ANSWER, notice.route.upstream.send(request, &mut sent)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::debug!(upstream = %notice.route.name, %error, "cancel notice failed"),
        Err(_) => tracing::debug!(upstream = %notice.route.name, "cancel notice was not answered"),
    }
}

fn hash(id: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    hasher.finish()
}
