//! What the ledger and its store hold, as the metrics page shows it.

use std::sync::{Arc, PoisonError};

use super::{Ledger, Usage, settle};
use crate::{
    account::metrics::{Kind, Metrics},
    store::Table,
};

impl Ledger {
    /// Has `metrics` show what this ledger and its store hold now, for as long as it lives.
    pub fn show_in(self: &Arc<Self>, metrics: &Metrics) {
        let show = |kind, name, help, read: fn(&Self) -> usize| {
            let ledger = Arc::downgrade(self);
            metrics.measure(kind, name, help, move || ledger.upgrade().map_or(0, |ledger| read(&ledger)));
        };
        let settling = "Ends and reports of calls that wait for the state store.";
        show(Kind::Gauge, "settling", settling, |ledger| settle::QUEUE - ledger.settling.capacity());
        let unsettled = "Ends of calls dropped because too many waited for the state store.";
        let dropped = |ledger: &Self| ledger.unsettled.load(std::sync::atomic::Ordering::Relaxed);
        show(Kind::Counter, "settling_dropped", unsettled, dropped);
        let leases = "Keyed attempts that run, or whose end is not stored yet.";
        show(Kind::Gauge, "leases", leases, |ledger| ledger.leases().len());
        let parked = "Legacy calls whose response may still come on a GET.";
        show(Kind::Gauge, "parked_calls", parked, |ledger| ledger.parked().len());
        let results = "Bytes of committed results in memory, of ledger.max_total.";
        show(Kind::Gauge, "result_bytes", results, Self::result_bytes);
        let away = "1 while the state store does not answer.";
        show(Kind::Gauge, "store_away", away, |ledger| usize::from(ledger.is_away()));
        let queue = "Questions that wait for the state store's thread.";
        show(Kind::Gauge, "store_queue", queue, |ledger| ledger.store.waiting());
        self.show_store(metrics);
    }

    /// The tables, which only the store knows: it is asked each time, and what it does not tell is not shown.
    fn show_store(self: &Arc<Self>, metrics: &Metrics) {
        let ledger = Arc::downgrade(self);
        metrics.look_first(move || {
            let ledger = ledger.upgrade();
            Box::pin(async move {
                if let Some(ledger) = ledger {
                    let usage = ledger.look().await;
                    *ledger.usage.lock().unwrap_or_else(PoisonError::into_inner) = usage;
                }
            })
        });
        let each = |name, help, read: fn(&Usage) -> u64| {
            let ledger = Arc::downgrade(self);
            metrics.measure_each(Kind::Gauge, name, help, "table", move || {
                let ledger = ledger.upgrade();
                let usage = ledger
                    .iter()
                    .flat_map(|ledger| ledger.usage.lock().unwrap_or_else(PoisonError::into_inner).clone());
                let number = |usage: &Usage| usize::try_from(read(usage)).unwrap_or(usize::MAX);
                usage.map(|(table, usage)| (table.name().to_owned(), number(&usage))).collect()
            });
        };
        each("store_records", "Records in a table of the state store.", |usage| usage.records);
        each("store_bytes", "Bytes of keys and values in a table of the state store.", |usage| usage.bytes);
    }

    /// What each table holds; those that the store does not tell are left out, and a store that is away is not asked.
    async fn look(&self) -> Vec<(Table, Usage)> {
        let mut all = Vec::new();
        for table in Table::ALL {
            if self.is_away() {
                break;
            }
            if let Ok(usage) = self.watch(self.store.usage(table).await) {
                all.push((table, usage));
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt, future::pending, time::Duration};

    use super::*;
    use crate::{
        ledger::{Claim, Keep, LEASE_MS, Settings, entry::Attempt, owner},
        listing::RetryClass,
        message::Era,
        store::{BoxFuture, Change, Error, Name, Records, Store},
    };

    /// A store that answers nothing.
    #[derive(Debug)]
    struct Silent;

    impl Store for Silent {
        fn update(&self, _: Vec<Name>, _: Change) -> BoxFuture<'_, Result<(), Error>> {
            Box::pin(pending())
        }

        fn get(&self, _: Name) -> BoxFuture<'_, Result<Option<Vec<u8>>, Error>> {
            Box::pin(pending())
        }

        fn scan(&self, _: Table, _: String) -> BoxFuture<'_, Result<Records, Error>> {
            Box::pin(pending())
        }

        fn usage(&self, _: Table) -> BoxFuture<'_, Result<Usage, Error>> {
            Box::pin(pending())
        }

        fn ping(&self) -> BoxFuture<'_, Result<(), Error>> {
            Box::pin(pending())
        }
    }

    fn shown(metrics: &Metrics, name: impl fmt::Display) -> usize {
        let page = metrics.encode();
        let value = page.lines().find_map(|line| line.strip_prefix(&format!("mcp_sidecar_{name} ")));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {page}"))
    }

    #[tokio::test]
    async fn ends_beyond_what_may_wait_for_the_store_are_dropped_counted_and_hold_no_lease() {
        let settings = Settings {
            results: Keep::Off,
            ttl: Duration::from_secs(1),
            max_result: 1,
            max_total: 1,
            keys_ttl: Duration::from_secs(1),
        };
        let ledger = Ledger::start(Arc::new(Silent), settings);
        let metrics = Metrics::new();
        ledger.show_in(&metrics);
        let attempt = |n: usize| Attempt {
            function: "f".into(),
            digest: "d".into(),
            owner: owner(),
            principal: n.to_string(),
            era: Era::Modern,
            class: RetryClass::Unsafe,
            read_only: false,
            listed: true,
            changed: false,
            number: None,
            leg: false,
            task: false,
            lease: LEASE_MS,
        };
        let end = |n: usize| {
            let mut claim = Claim::asked(ledger.clone(), Name::new(Table::Keys, n.to_string()), &attempt(n));
            claim.runs(None);
        };
        // Nothing else runs until all are there.
        (0..settle::QUEUE).for_each(end);
        assert_eq!(
            (shown(&metrics, "settling"), shown(&metrics, "settling_dropped_total")),
            (settle::QUEUE, 0)
        );
        (0..10).for_each(end);
        assert_eq!(shown(&metrics, "settling_dropped_total"), 10);
        assert_eq!(shown(&metrics, "leases"), settle::QUEUE);
    }
}
