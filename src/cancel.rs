//! `notifications/cancelled` that the sidecar POSTs itself, to legacy upstreams only.
//!
//! One named task with a bounded queue, since such a notice outlives the exchange it is about. It is sent once; its answer
//! is discarded. A notice about a stream whose events had ids waits first: a node that resumes by `GET` has not gone.

use std::{
    collections::{HashSet, VecDeque},
    hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState},
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

use crate::{
    inflight::Scope,
    ledger::Ledger,
    limits::{Permit, Places},
    message::Id,
    proxy::Route,
    upstream::Sent,
};

/// Notices that wait to be taken up; beyond it they are dropped, and the log says so.
const QUEUE: usize = 1024;
/// Notices taken up at once: most of them wait for a node that may resume.
const TAKEN_UP: usize = 4096;
/// Bytes of all of these; others choose how long ids and sessions are. Beyond it they are dropped too.
const BYTES: usize = 16 << 20;
/// Notices being POSTed at once.
const POSTED: usize = 64;
/// How long the answer to a notice is awaited.
const ANSWER: Duration = Duration::from_secs(10);
/// The longest that a notice waits for its node to resume, whatever the stream's `retry:` says.
const LONGEST_WAIT: Duration = Duration::from_secs(120);
/// Event ids remembered of one stream, newest first.
const EVENT_IDS: usize = 256;
/// Resuming `GET`s remembered, hashed: one may come before its node's hang-up is seen.
const RESUMED: usize = 1024;
/// How long they are.
const REMEMBERED: Duration = Duration::from_secs(30);

/// The end that exchanges hold.
#[derive(Clone, Debug)]
pub struct Canceller {
    queue: mpsc::Sender<(Notice, Permit)>,
    held: Places,
    resumes: Arc<Mutex<Resumes>>,
    open: watch::Sender<usize>,
    dropped: Arc<AtomicUsize>,
}

/// Who waits for a resuming `GET`, and which have come.
#[derive(Debug, Default)]
struct Resumes {
    waiting: Vec<Waiting>,
    recent: VecDeque<(Instant, Session, u64)>,
    keys: RandomState,
}

impl Resumes {
    fn session(&self, scope: &Scope) -> Session {
        Session(self.keys.hash_one(scope.of_session()))
    }
}

/// A session, hashed: others choose how long its id is. A credential that was rotated meanwhile makes no other one of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Session(u64);

#[derive(Debug)]
struct Waiting {
    session: Session,
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
        let held = canceller.held.take_many(self.size(), BYTES);
        if held.is_none_or(|held| canceller.queue.try_send((self, held)).is_err()) {
            canceller.open.send_modify(|open| *open -= 1);
            canceller.dropped.fetch_add(1, Ordering::Relaxed);
            tracing::warn!("too many cancel notices wait, one is dropped");
        }
    }

    /// Sends it although its node may yet resume, and in place of one about the same stream that waits for that.
    pub fn send_now(mut self) {
        self.now = true;
        if let Some(id) = self.event_ids.last() {
            self.canceller.not_sent(&self.scope, *id);
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

    /// The bytes that it holds, but for a few.
    fn size(&self) -> usize {
        let headers: usize = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
        let session = self.scope.session.as_ref().map_or(0, |session| session.len());
        // Each is held where it waits, too.
        let event_ids = 4 * size_of::<u64>() * self.event_ids.len();
        size_of::<Self>() + headers + self.id.token().len() + session + event_ids
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
        Self { queue, held: Places::default(), resumes, open, dropped: Arc::default() }
    }

    /// Bytes of all notices.
    pub fn held(&self) -> usize {
        self.held.taken()
    }

    /// Resuming `GET`s that are remembered.
    pub fn remembered(&self) -> usize {
        lock(&self.resumes).recent.len()
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
        self.not_sent(scope, hash(last_event_id));
    }

    fn not_sent(&self, scope: &Scope, id: u64) {
        let mut resumes = lock(&self.resumes);
        let session = resumes.session(scope);
        let is_it = |one: &Waiting| one.session == session && one.ids.contains(&id);
        if let Some(at) = resumes.waiting.iter().position(is_it) {
            let _ = resumes.waiting.swap_remove(at).resumed.send(());
            return;
        }
        if resumes.recent.len() == RESUMED {
            resumes.recent.pop_front();
        }
        resumes.recent.push_back((Instant::now(), session, id));
    }

    /// Ends when every notice that was sent has been POSTed and answered, or waits for a node that may resume: before
    /// the process ends, which loses those.
    pub async fn settled(&self) {
        // The sender is held here.
        let _ = self.open.subscribe().wait_for(|open| *open == 0).await;
    }
}

async fn run(
    mut notices: mpsc::Receiver<(Notice, Permit)>,
    resumes: Arc<Mutex<Resumes>>,
    open: watch::Sender<usize>,
) {
    let posting = Arc::new(Semaphore::new(POSTED));
    let mut taken_up = JoinSet::new();
    while let Some((notice, held)) = notices.recv().await {
        while taken_up.len() >= TAKEN_UP {
            taken_up.join_next().await;
        }
        while taken_up.try_join_next().is_some() {}
        let (resumes, open, posting) = (resumes.clone(), open.clone(), posting.clone());
        taken_up.spawn(async move {
            let _held = held;
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
    {
        let mut resumes = lock(resumes);
        let session = resumes.session(&notice.scope);
        let came = |(at, other, id): &(Instant, Session, u64)| {
            at.elapsed() < REMEMBERED && *other == session && ids.contains(id)
        };
        if resumes.recent.iter().any(came) {
            return true;
        }
        resumes.waiting.push(Waiting { session, ids, resumed });
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

    /// A canceller, and what makes notices about an upstream that is connected to and answers nothing.
    fn canceller() -> (Canceller, impl Fn(Id) -> Notice, std::net::TcpListener) {
        let upstream = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let text = format!("[upstreams.up]\nurl = \"http://{}/mcp\"\n", upstream.local_addr().unwrap());
        let config = Config::from_text(&text, None, &Flags::default(), &|_| None).unwrap();
        let settings = config.proxy_settings().unwrap();
        let bounds = store::Bounds { max_keys: 1, max_result_bytes: 1 };
        let store = Arc::new(store::Memory::new(bounds, Clock::system()));
        let ledger = Ledger::start(store, settings.ledger.clone());
        let canceller = Canceller::start();
        let its = canceller.clone();
        let notice = move |id| Notice {
            canceller: its.clone(),
            route: settings.routes["up"].clone(),
            headers: HeaderMap::new(),
            id,
            scope: scope("s"),
            event_ids: Vec::new(),
            retry: Duration::ZERO,
            now: true,
            ledger: ledger.clone(),
        };
        (canceller, notice, upstream)
    }

    fn scope(session: &str) -> Scope {
        Scope { upstream: "up".into(), principal: None, session: Some(session.as_bytes().into()), host: None }
    }

    #[tokio::test]
    async fn notices_beyond_what_may_wait_are_dropped_and_counted() {
        let (canceller, notice, _upstream) = canceller();
        let mut sent = 0;
        while canceller.dropped() == 0 {
            (0..QUEUE / 2).for_each(|n| notice(Id::string(&n.to_string())).send());
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
        assert!(canceller.held() < BYTES, "it was their number: {} bytes", canceller.held());
    }

    #[tokio::test]
    async fn notices_of_many_bytes_are_dropped_before_there_are_many() {
        const LARGE: usize = 1 << 20;
        let (canceller, notice, upstream) = canceller();
        (0..100).for_each(|_| notice(Id::string(&"x".repeat(LARGE))).send());
        assert_eq!((canceller.open(), canceller.dropped()), (BYTES / LARGE - 1, 101 - BYTES / LARGE));
        assert!((BYTES - 2 * LARGE..=BYTES).contains(&canceller.held()), "{}", canceller.held());
        // A small one still finds room, and what is done gives it back.
        notice(Id::string("small")).send();
        assert_eq!(canceller.open(), BYTES / LARGE);
        drop(upstream);
        time::timeout(Duration::from_secs(10), canceller.settled()).await.unwrap();
        while canceller.held() > 0 {
            tokio::task::yield_now().await;
        }
        notice(Id::string(&"x".repeat(LARGE))).send();
        assert_eq!(canceller.open(), 1);
    }

    #[tokio::test]
    async fn resumes_are_remembered_by_their_number_whatever_their_sessions_are() {
        let (canceller, notice, _upstream) = canceller();
        let long = "s".repeat(64 << 10);
        canceller.resumed(&scope("first"), b"7");
        (1..RESUMED).for_each(|_| canceller.resumed(&scope(&long), b"7"));
        assert_eq!(canceller.remembered(), RESUMED);
        assert!(size_of::<(Instant, Session, u64)>() <= 32);
        let waits = async |session: &str, id: &[u8]| {
            let mut notice = Notice { scope: scope(session), ..notice(Id::string("1")) };
            notice.event_id(id);
            let waiting = comes_back(&notice, &canceller.resumes);
            time::timeout(Duration::from_millis(20), waiting).await.is_err()
        };
        assert!(!waits("first", b"7").await && !waits(&long, b"7").await);
        assert!(waits("first", b"8").await && waits("other", b"7").await);
        // One more, and the oldest is forgotten.
        canceller.resumed(&scope(&long), b"7");
        assert_eq!(canceller.remembered(), RESUMED);
        assert!(waits("first", b"7").await);
    }
}
