//! The connections of one upstream.
//!
//! HTTP/1.1: a list of idle ones, the last one given back is the first one taken. HTTP/2: a few that are
//! shared. None is opened without a request that waits for it, and none stays when it has been idle for
//! too long or the peer has closed it: one task looks after them for as long as there are any.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep},
};

use super::{
    Error, Sent, Settings,
    connect::{Connector, Opened},
    http1::Http1,
    http2::{Http2, Slot},
};

/// HTTP/2 connections to one upstream. Further ones are opened only when the peer's limit of streams is reached on
/// all that are there, so that no call waits for another one's end; beyond this many, requests wait for a stream. Servers
/// allow a hundred streams and more, and what is in flight has limits of its own: it is reached by one that allows a few.
const SHARED: usize = 1024;

/// How often idle connections are looked after.
const SWEEP: Duration = Duration::from_secs(2);

/// The connections.
#[derive(Debug)]
pub(super) struct Pool {
    connector: Connector,
    may_share: bool,
    idle_connections: usize,
    idle_timeout: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The oldest first.
    idle: VecDeque<Idle>,
    shared: Vec<Arc<Http2>>,
    /// The one attempt to open a connection that may be shared, for as long as somebody waits for it.
    dial: Weak<Dial>,
    /// The upstream chose HTTP/1.1 last time: there is nothing to wait for together.
    chose_http1: bool,
    swept: bool,
}

#[derive(Debug)]
struct Idle {
    connection: Box<Http1>,
    since: Instant,
}

/// A connection for one exchange.
#[derive(Debug)]
pub(super) enum Taken {
    Http1(Box<Http1>),
    Http2(Slot),
}

enum Next {
    Use(Taken),
    /// Wait for this attempt, then look again.
    Wait(Arc<Dial>),
    /// Open one of one's own.
    Open,
}

impl Pool {
    pub(super) fn new(settings: &Settings, prior_knowledge: bool) -> Self {
        let https = settings.url.scheme() == Some(&http::uri::Scheme::HTTPS);
        Self {
            connector: Connector::new(settings, prior_knowledge),
            may_share: prior_knowledge || (https && !settings.http1_only),
            idle_connections: settings.idle_connections,
            idle_timeout: settings.idle_timeout,
            state: Mutex::default(),
        }
    }

    /// Takes a connection that is there, or opens one. Dropping the future stops an attempt that nobody else waits
    /// for.
    pub(super) async fn take(self: &Arc<Self>, sent: &mut Sent) -> Result<Taken, Error> {
        let began = Instant::now();
        let mut waited = false;
        loop {
            let taken = match self.next() {
                Next::Use(taken) => taken,
                Next::Wait(dial) => {
                    waited = true;
                    match dial.wait().await.map_err(Error::Unreachable)? {
                        Some(connection) => Taken::Http1(connection),
                        None => continue,
                    }
                }
                Next::Open => {
                    waited = true;
                    match self.connector.open().await.map_err(Error::Unreachable)? {
                        Opened::Http1(connection) => Taken::Http1(connection),
                        Opened::Http2(connection) => {
                            self.share(connection);
                            continue;
                        }
                    }
                }
            };
            sent.connect = waited.then(|| began.elapsed());
            sent.http2 = matches!(taken, Taken::Http2(_));
            sent.reused = match &taken {
                Taken::Http1(connection) => connection.used,
                Taken::Http2(slot) => slot.was_used(),
            };
            return Ok(taken);
        }
    }

    fn next(self: &Arc<Self>) -> Next {
        loop {
            let mut state = self.lock();
            state.shared.retain(|connection| !connection.is_closed());
            if let Some(free) = state.shared.iter().find(|connection| connection.has_room()) {
                return Next::Use(Taken::Http2(free.take()));
            }
            let least = state.shared.iter().min_by_key(|connection| connection.streams());
            // One that carries nothing and has no room lets no stream begin yet, and nor would a further one.
            if let Some(least) = least.filter(|least| state.shared.len() >= SHARED || least.streams() == 0) {
                return Next::Use(Taken::Http2(least.take()));
            }
            let Some(mut idle) = state.idle.pop_back() else {
                if !self.may_share || state.chose_http1 {
                    return Next::Open;
                }
                let dial = state.dial.upgrade().unwrap_or_else(|| Dial::start(self.clone()));
                state.dial = Arc::downgrade(&dial);
                return Next::Wait(dial);
            };
            if idle.since.elapsed() >= self.idle_timeout {
                // The others are older.
                state.idle.clear();
                continue;
            }
            drop(state);
            if idle.connection.is_alive() {
                return Next::Use(Taken::Http1(idle.connection));
            }
        }
    }

    fn share(self: &Arc<Self>, connection: Arc<Http2>) {
        let mut state = self.lock();
        state.chose_http1 = false;
        state.shared.push(connection);
        self.look_after(&mut state);
    }

    /// Keeps a connection whose exchange has ended well.
    pub(super) fn give_back(self: &Arc<Self>, connection: Box<Http1>) {
        if self.idle_connections == 0 {
            return;
        }
        let mut state = self.lock();
        if state.idle.len() >= self.idle_connections {
            state.idle.pop_front();
        }
        state.idle.push_back(Idle { connection, since: Instant::now() });
        self.look_after(&mut state);
    }

    fn look_after(self: &Arc<Self>, state: &mut State) {
        if state.swept {
            return;
        }
        // Without a runtime (it is shutting down) nothing has to be looked after.
        let Ok(runtime) = Handle::try_current() else { return };
        state.swept = true;
        runtime.spawn(sweep(Arc::downgrade(self), self.idle_timeout.clamp(SWEEP / 40, SWEEP)));
    }

    /// Closes what is stale; false when nothing is left to look after.
    fn sweep(&self) -> bool {
        let mut state = self.lock();
        state.idle.retain_mut(|idle| idle.since.elapsed() < self.idle_timeout && idle.connection.is_alive());
        state.shared.retain(|connection| {
            let stale = connection.idle_since().is_some_and(|since| since.elapsed() >= self.idle_timeout);
            !stale && !connection.is_closed()
        });
        state.swept = !state.idle.is_empty() || !state.shared.is_empty();
        state.swept
    }

    /// How many are kept: an HTTP/1.1 connection that carries an exchange belongs to that.
    pub(super) fn len(&self) -> usize {
        let state = self.lock();
        state.idle.len() + state.shared.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn sweep(pool: Weak<Pool>, every: Duration) {
    loop {
        sleep(every).await;
        let Some(pool) = pool.upgrade() else { return };
        if !pool.sweep() {
            return;
        }
    }
}

/// An attempt to open a connection for everybody who waits for it. It has a task of its own, so that no waiter
/// that leaves fails the others; it stops when the last one has left.
#[derive(Debug)]
struct Dial {
    /// `None` while it runs, then how it ended. A connection for one exchange only goes to the first who asks.
    ended: watch::Receiver<Option<Result<(), String>>>,
    single: Arc<Mutex<Option<Box<Http1>>>>,
    task: JoinHandle<()>,
}

impl Dial {
    fn start(pool: Arc<Pool>) -> Arc<Self> {
        let (end, ended) = watch::channel(None);
        let single = Arc::new(Mutex::new(None));
        let handed = single.clone();
        let task = tokio::spawn(async move {
            let opened = pool.connector.open().await.map(|opened| match opened {
                Opened::Http2(connection) => pool.share(connection),
                Opened::Http1(connection) => {
                    pool.lock().chose_http1 = true;
                    *handed.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection);
                }
            });
            pool.lock().dial = Weak::new();
            let _ = end.send(Some(opened));
        });
        Arc::new(Self { ended, single, task })
    }

    /// Waits for the end of the attempt. `Some`: a connection for the caller alone; `None`: look again.
    async fn wait(&self) -> Result<Option<Box<Http1>>, String> {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(end) => end.clone().unwrap_or(Ok(()))?,
            Err(_) => return Err("the runtime is shutting down".to_owned()),
        }
        Ok(self.single.lock().unwrap_or_else(PoisonError::into_inner).take())
    }
}

impl Drop for Dial {
    fn drop(&mut self) {
        self.task.abort();
    }
}
