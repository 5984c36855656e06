//! Wall time, behind a value that tests can set. Monotonic time is `tokio::time` everywhere.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, SystemTime},
};

/// The wall clock, as the log and `Retry-After` dates need it.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    manual: Option<Arc<AtomicI64>>,
}

impl Clock {
    /// The system's clock.
    pub fn system() -> Self {
        Self::default()
    }

    /// A clock that stands at `millis` since the epoch until it is set.
    pub fn manual(millis: i64) -> Self {
        Self { manual: Some(Arc::new(AtomicI64::new(millis))) }
    }

    /// Now.
    pub fn now(&self) -> SystemTime {
        match &self.manual {
            None => SystemTime::now(),
            Some(at) => {
                let millis = u64::try_from(at.load(Ordering::Relaxed)).unwrap_or(0);
                SystemTime::UNIX_EPOCH + Duration::from_millis(millis)
            }
        }
    }

    /// Sets a manual clock; does nothing to the system's.
    pub fn set(&self, millis: i64) {
        if let Some(at) = &self.manual {
            at.store(millis, Ordering::Relaxed);
        }
    }
}
