//! What every request of one demo upstream shares.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::Semaphore;

use super::{
    control::{Control, Faults},
    ledger::Ledger,
    listen::Hub,
    rpc,
    stats::Stats,
};

/// Checkpoints that may be open at once.
const CHECKPOINTS: usize = 10_000;

/// The parts of a server that outlive a request.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) stats: Arc<Stats>,
    pub(super) ledger: Ledger,
    pub(super) faults: Faults,
    pub(super) hub: Hub,
    /// A permit lets one worker that is held pass one checkpoint. Closed, workers that are held end.
    pub(super) checkpoints: Semaphore,
    /// The ledger's, where it was not given. After the ledger, so that it goes when that is closed.
    #[cfg_attr(not(test), expect(dead_code, reason = "held for its drop"))]
    folder: Option<Folder>,
}

/// A folder of its own, which goes with it.
#[derive(Debug)]
struct Folder(PathBuf);

impl Shared {
    /// Opens the ledger at `path`, or one in a folder of its own.
    ///
    /// # Errors
    ///
    /// There is no place for the ledger, or it is none.
    pub(super) fn open(path: Option<&Path>) -> io::Result<Arc<Self>> {
        let folder = path.is_none().then(Folder::create).transpose()?;
        let own = folder.as_ref().map(|folder| folder.0.join("ledger.db"));
        let path = path.or(own.as_deref()).ok_or_else(|| io::Error::other("no place for the ledger"))?;
        let ledger = Ledger::open(path).map_err(io::Error::other)?;
        let stats = Arc::<Stats>::default();
        let executions = ledger.executions().map_err(io::Error::other)?;
        stats.count(|seen| {
            for (tool, count) in executions {
                seen.tools.entry(tool).or_default().executions = count;
            }
        });
        Ok(Arc::new(Self {
            hub: Hub::new(Arc::clone(&stats)),
            stats,
            ledger,
            faults: Faults::default(),
            checkpoints: Semaphore::new(0),
            folder,
        }))
    }

    /// The folder that goes with it.
    #[cfg(test)]
    pub(super) fn folder(&self) -> Option<&Path> {
        self.folder.as_ref().map(|folder| folder.0.as_path())
    }

    /// Does what a `POST /control` asks for.
    ///
    /// # Errors
    ///
    /// In words, what is wrong with it.
    pub(super) fn control(&self, asked: Control) -> Result<(), String> {
        if let Some(fault) = asked.fault {
            self.faults.order(fault)?;
        }
        if let Some(listen) = asked.listen {
            self.hub.order(&listen)?;
        }
        if asked.tools_changed {
            self.hub.tools_changed();
        }
        if asked.checkpoints > CHECKPOINTS.saturating_sub(self.checkpoints.available_permits()) {
            return Err(format!("more than {CHECKPOINTS} checkpoints"));
        }
        self.checkpoints.add_permits(asked.checkpoints);
        Ok(())
    }
}

impl Folder {
    fn create() -> io::Result<Self> {
        let name = rpc::random_id().ok_or_else(|| io::Error::other("no randomness"))?;
        let path = std::env::temp_dir().join(format!("mcp-sidecar-demo-{name}"));
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is left to the system's own tidying.
        let _ = fs::remove_dir_all(&self.0);
    }
}
