//! Notices that files changed, by asking: a mounted volume swaps symlinks, which watchers of a path miss.

use std::{
    collections::BTreeMap,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// What a change of a file changes; `None` while it can't be asked. Symlinks are followed, so a swapped link is another inode.
pub(super) type Stamp = Option<(u64, u64, u64, i64, i64)>;

pub(super) fn stamp(path: &Path) -> Stamp {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()))
}

/// Files and how they looked.
#[derive(Debug, Default)]
pub(super) struct Watch {
    files: BTreeMap<PathBuf, (Stamp, Option<Stamp>)>,
}

impl Watch {
    /// Watches these files and no others; one that was watched before keeps how it looked.
    pub(super) fn set(&mut self, paths: impl IntoIterator<Item = PathBuf>) {
        let mut before = std::mem::take(&mut self.files);
        for path in paths {
            let seen = before.remove(&path).unwrap_or_else(|| (stamp(&path), None));
            self.files.insert(path, seen);
        }
    }

    /// The files that changed since, and look now as they did at the last call: one that is still being written is left
    /// for the next call.
    pub(super) fn changed(&mut self) -> Vec<PathBuf> {
        let mut changed = Vec::new();
        for (path, (known, candidate)) in &mut self.files {
            let now = stamp(path);
            if now == *known {
                *candidate = None;
            } else if *candidate == Some(now) {
                *known = now;
                *candidate = None;
                changed.push(path.clone());
            } else {
                *candidate = Some(now);
            }
        }
        changed
    }

    /// Takes how the files look now as known.
    pub(super) fn accept(&mut self) {
        for (path, seen) in &mut self.files {
            *seen = (stamp(path), None);
        }
    }
}
