//! A secret that a file or the environment holds: read at start, re-read when it changes, never shown.

use std::{fmt, sync::Arc};

use arc_swap::ArcSwap;
use http::HeaderValue;

/// A bearer token, swapped in place when its source changes. Its `Debug` prints nothing of it.
#[derive(Clone)]
pub struct Secret {
    token: Arc<ArcSwap<String>>,
}

impl Secret {
    /// A secret that now says `token`.
    pub fn new(token: String) -> Self {
        Self { token: Arc::new(ArcSwap::from_pointee(token)) }
    }

    /// Replaces it everywhere it is held.
    pub fn replace(&self, token: String) {
        self.token.store(Arc::new(token));
    }

    /// What it says now, for whoever has to send it in a form of its own.
    pub(crate) fn expose(&self) -> Arc<String> {
        self.token.load_full()
    }

    /// As the value of `Authorization`, marked sensitive. `None` if it holds bytes no header can carry.
    pub fn authorization(&self) -> Option<HeaderValue> {
        let mut value = HeaderValue::try_from(format!("Bearer {}", self.token.load())).ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    /// Whether `presented` is it, in time that does not depend on where they differ.
    pub fn matches(&self, presented: &[u8]) -> bool {
        let token = self.token.load();
        let differ = token.len() ^ presented.len();
        let folded = token.bytes().cycle().zip(presented).fold(0, |all, (a, b)| all | (a ^ b));
        differ == 0 && folded == 0 && !token.is_empty()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}
