//! What the demo upstream saw: the side of the story that a sidecar's own log cannot tell.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// Everything counted since the start, as `GET /stats` answers it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Snapshot {
    /// Requests to the MCP endpoint, refused ones too.
    pub requests: u64,
    /// Connections accepted.
    pub connections_opened: u64,
    /// Connections that have ended.
    pub connections_closed: u64,
    /// Legacy sessions that exist now.
    pub sessions: u64,
    /// Event streams that are open now.
    pub open_streams: u64,
    /// `notifications/cancelled` received, whatever they named.
    pub cancelled_notifications: u64,
    /// `subscriptions/listen` streams acknowledged.
    pub listens: u64,
    /// Of these, how many were ended abruptly on request.
    pub listen_drops: u64,
    /// `subscriptions/listen` requests refused on request.
    pub listen_refusals: u64,
    /// Calls whose connection was ended on request, before an answer or amid it.
    pub cuts: u64,
    /// Calls by tool; a tool that was never called is not there.
    pub tools: BTreeMap<String, Calls>,
}

/// The calls of one tool. A call that was answered busy did nothing and counts nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Calls {
    /// Work begun.
    pub started: u64,
    /// Work done to its end, whether or not anybody still wanted the answer.
    pub finished: u64,
    /// Work stopped where it waited.
    pub cancelled: u64,
    /// Effects made, as the ledger's file counts them: over restarts, and by whoever else uses the file.
    pub executions: u64,
    /// Calls answered with what was committed under their key before.
    pub replays: u64,
    /// Calls refused because their key stands for something else.
    pub refusals: u64,
}

impl Snapshot {
    /// The calls of a tool; zeros if it was never called.
    pub fn tool(&self, name: &str) -> Calls {
        self.tools.get(name).copied().unwrap_or_default()
    }
}

/// The counters of one server. Whoever waits for a change is woken by it.
#[derive(Debug, Default)]
pub(super) struct Stats {
    snapshot: watch::Sender<Snapshot>,
}

impl Stats {
    pub(super) fn count(&self, change: impl FnOnce(&mut Snapshot)) {
        self.snapshot.send_modify(change);
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        self.snapshot.borrow().clone()
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Snapshot> {
        self.snapshot.subscribe()
    }
}
