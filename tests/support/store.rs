//! Every kind of state store, for what must be the same on each.

use tempfile::TempDir;

use super::{Sidecar, Upstream, redis::Redis};

/// A state store of one test's own. It outlives the sidecars on it, but for the one in memory.
#[derive(Debug)]
pub struct Store {
    state: String,
    folder: TempDir,
    _redis: Option<Redis>,
}

impl Store {
    pub fn memory() -> Self {
        Self { state: "memory:".into(), folder: TempDir::new().unwrap(), _redis: None }
    }

    pub fn sqlite() -> Self {
        let folder = TempDir::new().unwrap();
        let state = format!("sqlite:{}", folder.path().join("state.db").display());
        Self { state, folder, _redis: None }
    }

    pub fn redis() -> Self {
        let redis = Redis::start();
        Self { state: redis.state(), folder: TempDir::new().unwrap(), _redis: Some(redis) }
    }

    /// One of each kind. A test that fails shows which one by [`Store::state`].
    pub fn each() -> [Self; 3] {
        [Self::memory(), Self::sqlite(), Self::redis()]
    }

    /// One of each kind that outlives a sidecar, and that several may share.
    pub fn lasting() -> [Self; 2] {
        [Self::sqlite(), Self::redis()]
    }

    /// As `--state` takes it.
    pub fn state(&self) -> &str {
        &self.state
    }

    /// Where its file is, if it has one.
    pub fn folder(&self) -> &TempDir {
        &self.folder
    }

    /// A sidecar on it, served at `/mcp`, everything else at its default.
    pub fn before(&self, upstream: &Upstream) -> Sidecar {
        Sidecar::with_flags(&["--upstream", &upstream.url(), "--state", &self.state])
    }

    /// A sidecar on it with this in its `[ledger]`, served at `/mcp`.
    pub fn with_ledger(&self, upstream: &Upstream, ledger: &str) -> Sidecar {
        Sidecar::with_config(&format!(
            "state = \"{}\"\n[ledger]\n{ledger}\n[upstreams.mcp]\nurl = \"{}\"\n",
            self.state,
            upstream.url()
        ))
    }
}
