//! `notifications/cancelled` that the sidecar POSTs itself, to legacy upstreams only.
//!
//! One named task with a bounded queue, since such a notice outlives the exchange it is about. It is sent once; its answer
//! is discarded. A notice about a stream whose events had ids waits first: a node that resumes by `GET` has not gone.

use std::{
    collections::{HashSet, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use tokio::{
    sync::{Semaphore, mpsc, oneshot, watch},
    task::JoinSet,
    time::{self, Instant},
};

use crate::{inflight::Scope, ledger::Ledger, message::Id, proxy::Route, upstream::Sent};

/// Notices that wait to be taken up; beyond it they are dropped, and the log says so.
const QUEUE: usize = 1024;
/// Notices taken up at once: most of them wait for a node that may resume.
const TAKEN_UP: usize = 4096;
/// Notices being POSTed at once.
const POSTED: usize = 64;
/// How long the answer to a notice is awaited.
const ANSWER: Duration = Duration::from_secs(10);
/// The longest that a notice waits for its node to resume, whatever the stream's `retry:` says.
const LONGEST_WAIT: Duration = Duration::from_secs(120);
/// Event ids remembered of one stream, newest first.
const EVENT_IDS: usize = 256;
/// Resuming `GET`s remembered: one may come before its node's hang-up is seen.
const RESUMED: usize = 1024;
/// How long they are.
const REMEMBERED: Duration = Duration::from_secs(30);

/// The end that exchanges hold.
#[derive(Clone, Debug)]
pub struct Canceller {
    queue: mpsc::Sender<Notice>,
    resumes: Arc<Mutex<Resumes>>,
    open: watch::Sender<usize>,
    dropped: Arc<AtomicUsize>,
}

/// Who waits for a resuming `GET`, and which have come.
#[derive(Debug, Default)]
struct Resumes {
    waiting: Vec<Waiting>,
    /// By their session: a credential that was rotated meanwhile makes no other node of it.
    recent: VecDeque<(Instant, Scope, u64)>,
}

#[derive(Debug)]
struct Waiting {
    scope: Scope,
    ids: HashSet<u64>,
    resumed: oneshot::Sender<()>,
}

/// A notice that may have to be sent.
#[derive(Clone, Debug)]
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
    /// Where the call's claim is parked while its node may resume; with the notice that is over.
    pub ledger: Arc<Ledger>,
}

impl Notice {
    /// Hands it to the task. Never blocks.
    pub fn send(self) {
        let canceller = self.canceller.clone();
        canceller.open.send_modify(|open| *open += 1);
        if canceller.queue.try_send(self).is_err() {
            canceller.open.send_modify(|open| *open -= 1);
            canceller.dropped.fetch_add(1, Ordering::Relaxed);
            tracing::warn!("too many cancel notices wait, one is dropped");
        }
    }

    /// Sends it although its node may yet resume, and in place of one about the same stream that waits for that.
    pub fn send_now(mut self) {
        self.now = true;
        if let Some(id) = self.event_ids.last() {
            self.canceller.not_sent(self.scope.of_session(), *id);
        }
        self.send();
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
        let resumes = Arc::<Mutex<Resumes>>::default();
        let open = watch::Sender::new(0);
        tokio::spawn(run(notices, resumes.clone(), open.clone()));
        Self { queue, resumes, open, dropped: Arc::default() }
    }

    /// Notices that wait to be sent or answered.
    pub fn open(&self) -> usize {
        *self.open.borrow()
    }

    /// Notices that wait for a node that may resume.
    pub fn waiting(&self) -> usize {
        lock(&self.resumes).waiting.len()
    }

    /// Notices that found no place.
    pub fn dropped(&self) -> usize {
        self.dropped.load(Ordering::Relaxed)
    }

    /// A node resumes: the notice about the stream that had this event id is not sent.
    pub fn resumed(&self, scope: &Scope, last_event_id: &[u8]) {
        self.not_sent(scope.of_session(), hash(last_event_id));
    }

    fn not_sent(&self, scope: Scope, id: u64) {
        let mut resumes = lock(&self.resumes);
        if let Some(at) = resumes.waiting.iter().position(|one| one.scope == scope && one.ids.contains(&id)) {
            let _ = resumes.waiting.swap_remove(at).resumed.send(());
            return;
        }
        if resumes.recent.len() == RESUMED {
            resumes.recent.pop_front();
        }
        resumes.recent.push_back((Instant::now(), scope, id));
    }

    /// Ends when every notice that was sent has been POSTed and answered, or waits for a node that may resume: before
    /// the process ends, which loses those.
    pub async fn settled(&self) {
        // The sender is held here.
        let _ = self.open.subscribe().wait_for(|open| *open == 0).await;
    }
}

async fn run(mut notices: mpsc::Receiver<Notice>, resumes: Arc<Mutex<Resumes>>, open: watch::Sender<usize>) {
    let posting = Arc::new(Semaphore::new(POSTED));
    let mut taken_up = JoinSet::new();
    while let Some(notice) = notices.recv().await {
        while taken_up.len() >= TAKEN_UP {
            taken_up.join_next().await;
        }
        while taken_up.try_join_next().is_some() {}
        let (resumes, open, posting) = (resumes.clone(), open.clone(), posting.clone());
        taken_up.spawn(async move {
            if !notice.now && !notice.event_ids.is_empty() {
                open.send_modify(|open| *open -= 1);
                let resumed = comes_back(&notice, &resumes).await;
                open.send_modify(|open| *open += 1);
                if resumed {
                    return open.send_modify(|open| *open -= 1);
                }
            }
            // Closed by nobody.
            let _place = posting.acquire().await;
            post(notice).await;
            open.send_modify(|open| *open -= 1);
        });
    }
    while taken_up.join_next().await.is_some() {}
}

/// Whether a resuming `GET` comes within the grace, or came already.
async fn comes_back(notice: &Notice, resumes: &Mutex<Resumes>) -> bool {
    let asked = notice.route.cancel_grace.max(notice.retry).max(Duration::from_secs(2));
    // An upstream's `retry:` must not hold a place for ever.
    let grace = asked.min(LONGEST_WAIT.max(notice.route.cancel_grace));
    let (resumed, comes) = oneshot::channel();
    let ids: HashSet<u64> = notice.event_ids.iter().copied().collect();
    let session = notice.scope.of_session();
    {
        let mut resumes = lock(resumes);
        let came = |(at, scope, id): &(Instant, Scope, u64)| {
            at.elapsed() < REMEMBERED && *scope == session && ids.contains(id)
        };
        if resumes.recent.iter().any(came) {
            return true;
        }
        resumes.waiting.push(Waiting { scope: session, ids, resumed });
    }
    let came = matches!(time::timeout(grace, comes).await, Ok(Ok(())));
    lock(resumes).waiting.retain(|one| !one.resumed.is_closed());
    came
}

fn lock(resumes: &Mutex<Resumes>) -> MutexGuard<'_, Resumes> {
    resumes.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn post(notice: Notice) {
    // Dropping the claim settles it: the end is unknown.
    drop(notice.ledger.unpark(&notice.scope, &notice.id));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        clock::Clock,
        config::{Config, Flags},
        store,
    };

    #[tokio::test]
    async fn notices_beyond_what_may_wait_are_dropped_and_counted() {
        // It is connected to, and answers nothing.
        let upstream = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let text = format!("[upstreams.up]\nurl = \"http://{}/mcp\"\n", upstream.local_addr().unwrap());
        let config = Config::from_text(&text, None, &Flags::default(), &|_| None).unwrap();
        let settings = config.proxy_settings().unwrap();
        let bounds = store::Bounds { max_keys: 1, max_result_bytes: 1 };
        let store = Arc::new(store::Memory::new(bounds, Clock::system()));
        let ledger = Ledger::start(store, settings.ledger.clone());
        let canceller = Canceller::start();
        let send = |n: usize| {
            let notice = Notice {
                canceller: canceller.clone(),
                route: settings.routes["up"].clone(),
                headers: HeaderMap::new(),
                id: Id::string(&n.to_string()),
                scope: Scope { upstream: "up".into(), principal: None, session: None, host: None },
                event_ids: Vec::new(),
                retry: Duration::ZERO,
                now: true,
                ledger: ledger.clone(),
            };
            notice.send();
        };
        let mut sent = 0;
        while canceller.dropped() == 0 {
            (0..QUEUE / 2).for_each(send);
            sent += QUEUE / 2;
            // The task takes up what it may.
            for _ in 0..2 * TAKEN_UP {
                tokio::task::yield_now().await;
            }
        }
        // One more is in its hands.
        assert!(
            (TAKEN_UP + QUEUE..=TAKEN_UP + QUEUE + 1).contains(&canceller.open()),
            "{}",
            canceller.open()
        );
        assert_eq!(canceller.open() + canceller.dropped(), sent);
    }
}
