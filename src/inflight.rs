//! What runs now: every exchange that waits for an upstream, so that a notification, an operator, a policy or a
//! drain can end it.
//!
//! Words: a request is *found* by its scope (upstream, principal, session, and the peer's host where there is neither)
//! and its id, and only if exactly one matches. A cancel first *wins* (nothing more is sent to the node), then the
//! exchange is *closed* (its upstream stream is dropped); both at once except in legacy, where the forwarded
//! notification has a grace to be answered.
//!
//! Knows no sockets and no bytes on the wire.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    task::{Context, Poll, Waker},
};

use tokio::{sync::Notify, time::Instant};

use crate::{
    account::CancelledBy,
    message::{Era, Id},
    relay::terminal::{State, Terminal},
};

/// Where ids are unique: one client's requests to one upstream.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scope {
    /// The upstream's name.
    pub upstream: Arc<str>,
    /// A keyed hash of the node's `Authorization`.
    pub principal: Option<u64>,
    /// `Mcp-Session-Id`.
    pub session: Option<Box<[u8]>>,
    /// The peer's host, where there is neither principal nor session.
    pub host: Option<Arc<str>>,
}

impl Scope {
    /// The same whatever its credential, where there is a session: all that one session asks for.
    pub fn of_session(&self) -> Self {
        Self { principal: self.principal.filter(|_| self.session.is_none()), ..self.clone() }
    }
}

/// What an exchange is, as far as ending it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// A request that a notification may cancel.
    Request,
    /// A request that is never cancelled by message: `initialize`, a batch, a legacy `params.task`.
    Uncancellable,
    /// A `GET` or `subscriptions/listen` stream: closed when a drain begins.
    Stream,
}

/// One exchange that runs.
#[derive(Debug)]
pub struct Running {
    /// What it is.
    pub sort: Sort,
    /// Its era.
    pub era: Era,
    /// The terminal state; the first to end it wins.
    pub terminal: Terminal,
    /// When it began.
    pub started: Instant,
    /// The upstream and the tools that are called: one, or those of a batch.
    pub calls: OnceLock<(Arc<str>, Vec<String>)>,
    answered: AtomicBool,
    lease_lost: AtomicBool,
    denied: AtomicBool,
    phase: AtomicU8,
    waiter: Mutex<Option<Waker>>,
    cancel: Mutex<Option<(CancelledBy, Instant)>>,
    server_requests: Mutex<HashSet<Id>>,
}

/// Nothing was asked of the exchange.
const RUNS: u8 = 0;
/// A cancel won: nothing more goes to the node.
const WON: u8 = 1;
/// The upstream stream is to be closed now.
const CLOSED: u8 = 2;

impl Running {
    fn new(sort: Sort, era: Era) -> Self {
        Self {
            sort,
            era,
            terminal: Terminal::new(),
            started: Instant::now(),
            calls: OnceLock::new(),
            answered: AtomicBool::new(false),
            lease_lost: AtomicBool::new(false),
            denied: AtomicBool::new(false),
            phase: AtomicU8::new(RUNS),
            waiter: Mutex::new(None),
            cancel: Mutex::new(None),
            server_requests: Mutex::new(HashSet::new()),
        }
    }

    /// The upstream's response is complete in the sidecar: cancels by message and clocks end here. False if a cancel came
    /// first: then the response is not sent.
    pub fn answered(&self) -> bool {
        let cancel = lock(&self.cancel);
        let first = cancel.is_none();
        if first {
            self.answered.store(true, Ordering::Release);
        }
        drop(cancel);
        first
    }

    /// Whether [`Running::answered`] was said.
    pub fn is_answered(&self) -> bool {
        self.answered.load(Ordering::Acquire)
    }

    /// A cancel. True if it won: from now on nothing more is sent to the node. False if the answer or another end
    /// came first.
    pub fn cancel(&self, by: CancelledBy) -> bool {
        let mut cancel = lock(&self.cancel);
        if self.is_answered() || !self.terminal.end(State::Cancelled) {
            return false;
        }
        *cancel = Some((by, Instant::now()));
        self.phase.fetch_max(WON, Ordering::AcqRel);
        drop(cancel);
        self.wake();
        true
    }

    /// Closes the upstream stream, after [`Running::cancel`] or as the end of a stream that no request owns.
    pub fn close(&self) {
        self.phase.fetch_max(CLOSED, Ordering::AcqRel);
        self.wake();
    }

    /// A new policy denies its tool: it is cut, unless its answer or another end came first.
    pub fn deny(&self) {
        self.denied.store(true, Ordering::Release);
        if self.cancel(CancelledBy::Policy) {
            self.close();
        }
    }

    /// The upstream and the tool of a single call, if [`Running::deny`] was said.
    pub fn denied(&self) -> Option<(&str, &str)> {
        let (upstream, tools) = self.calls.get().filter(|_| self.denied.load(Ordering::Acquire))?;
        Some((upstream, tools.first()?))
    }

    /// Its claim could not be renewed: it is closed before another attempt may begin, unless its answer came first.
    pub fn lose_lease(&self) {
        if !self.is_answered() && self.terminal.end(State::Failed) {
            self.lease_lost.store(true, Ordering::Release);
            self.close();
        }
    }

    /// Whether [`Running::lose_lease`] closed it.
    pub fn is_lease_lost(&self) -> bool {
        self.lease_lost.load(Ordering::Acquire)
    }

    /// Who cancelled it, and when.
    pub fn cancelled(&self) -> Option<(CancelledBy, Instant)> {
        *lock(&self.cancel)
    }

    /// A cancel has won, and what still comes is not sent; or the stream was closed, which is more.
    pub fn is_won(&self) -> bool {
        self.phase.load(Ordering::Acquire) >= WON
    }

    /// The upstream stream is to be closed.
    pub fn is_closed(&self) -> bool {
        self.phase.load(Ordering::Acquire) >= CLOSED
    }

    /// Ready when the upstream stream is to be closed. One waiter at a time: the response future, then the pump. It is
    /// also woken when [`Running::is_won`] or [`Running::awaits_node`] changes.
    pub fn poll_closed(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_closed() {
            return Poll::Ready(());
        }
        let mut waiter = lock(&self.waiter);
        if !waiter.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            *waiter = Some(cx.waker().clone());
        }
        drop(waiter);
        if self.is_closed() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// A server's request in the middle of this exchange awaits the node's answer (legacy).
    pub fn awaits_node(&self) -> bool {
        self.era == Era::Legacy && !lock(&self.server_requests).is_empty()
    }

    fn wake(&self) {
        let waiter = lock(&self.waiter).take();
        if let Some(waker) = waiter {
            waker.wake();
        }
    }
}

/// How many server requests one exchange keeps open on its idle clock.
const SERVER_REQUESTS: usize = 64;
/// Bytes of the id of such a request.
const LONGEST_ASKED: usize = 1024;

/// Everything that runs.
#[derive(Debug, Default)]
pub struct Registry {
    table: Mutex<Table>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Table {
    serial: u64,
    all: HashMap<u64, Arc<Running>>,
    ids: HashMap<(Scope, Id), Vec<u64>>,
    asked: HashMap<(Scope, Id), u64>,
}

impl Registry {
    /// Enters an exchange; dropping the entry takes it out again.
    pub fn enter(self: &Arc<Self>, scope: Scope, id: Option<Id>, sort: Sort, era: Era) -> Entry {
        let running = Arc::new(Running::new(sort, era));
        let mut table = lock(&self.table);
        table.serial += 1;
        let serial = table.serial;
        table.all.insert(serial, running.clone());
        if let Some(id) = &id {
            table.ids.entry((scope.clone(), id.clone())).or_default().push(serial);
        }
        drop(table);
        Entry { registry: self.clone(), serial, scope, id, running }
    }

    /// The one request that `id` names in `scope`; `None` if there is none, or more than one.
    pub fn find(&self, scope: &Scope, id: &Id) -> Option<Arc<Running>> {
        let table = lock(&self.table);
        let serials = table.ids.get(&(scope.clone(), id.clone()))?;
        let [serial] = serials.as_slice() else { return None };
        table.all.get(serial).cloned()
    }

    /// The node answered a server's request: the exchange that waits for it (if any) goes on with its idle clock.
    pub fn node_answers(&self, scope: &Scope, id: &Id) {
        let mut table = lock(&self.table);
        let Some(serial) = table.asked.remove(&(scope.clone(), id.clone())) else { return };
        let running = table.all.get(&serial).cloned();
        drop(table);
        if let Some(running) = running {
            lock(&running.server_requests).remove(id);
            running.wake();
        }
    }

    /// All that run now.
    pub fn all(&self) -> Vec<Arc<Running>> {
        lock(&self.table).all.values().cloned().collect()
    }

    /// How many run now.
    pub fn len(&self) -> usize {
        lock(&self.table).all.len()
    }

    /// Nothing runs.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ends when nothing runs any more.
    pub async fn empty(&self) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.is_empty() {
                return;
            }
            changed.await;
        }
    }
}

/// An exchange's place in the registry.
#[derive(Debug)]
pub struct Entry {
    registry: Arc<Registry>,
    serial: u64,
    scope: Scope,
    id: Option<Id>,
    /// The exchange.
    pub running: Arc<Running>,
}

impl Entry {
    /// Where its id is unique.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// The server asks the node something in the middle of this exchange (legacy): its idle clock stands still until
    /// the node's answer passes. Beyond the bound the clock is simply not stopped once more.
    pub fn server_asks(&self, id: Id) {
        let mut asked = lock(&self.running.server_requests);
        if id.token().len() > LONGEST_ASKED || asked.len() >= SERVER_REQUESTS || !asked.insert(id.clone()) {
            return;
        }
        drop(asked);
        lock(&self.registry.table).asked.insert((self.scope.clone(), id), self.serial);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let asked: Vec<Id> = lock(&self.running.server_requests).drain().collect();
        let mut table = lock(&self.registry.table);
        table.all.remove(&self.serial);
        for id in asked {
            table.asked.remove(&(self.scope.clone(), id));
        }
        if let Some(id) = self.id.take() {
            forget(&mut table.ids, (self.scope.clone(), id), self.serial);
        }
        let empty = table.all.is_empty();
        drop(table);
        if empty {
            self.registry.changed.notify_waiters();
        }
    }
}

fn forget(index: &mut HashMap<(Scope, Id), Vec<u64>>, key: (Scope, Id), serial: u64) {
    if let std::collections::hash_map::Entry::Occupied(mut held) = index.entry(key) {
        held.get_mut().retain(|other| *other != serial);
        if held.get().is_empty() {
            held.remove();
        }
    }
}

/// A poisoned lock means that a holder panicked between two plain assignments: the value is still whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
