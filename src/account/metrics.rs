//! Counters and gauges, as `GET /metrics` shows them.
//!
//! Every label value is bounded: names of upstreams come from the configuration, all others from enums. Nothing
//! that a node or an upstream sends becomes a label.

mod measured;

use std::sync::Arc;

use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

pub use self::measured::{Kind, Look};
use self::measured::{Measured, Measures};
use super::Record;

/// Every metric of one sidecar. Names begin with `mcp_sidecar_`, counters end with `_total`.
#[derive(Debug)]
pub struct Metrics {
    /// Exchanges that have begun and not ended.
    pub in_flight: Gauge,
    /// Access-log lines that a slow output lost.
    pub log_lines_dropped: Counter,
    /// Nodes' connections that are open.
    pub connections: Gauge,
    /// Connections to the admin listener that are open.
    pub admin_connections: Gauge,
    /// `oz0/` members cut out of upstreams' results because only the sidecar may say them.
    pub forged_members: Counter,
    /// Progress events that a newer one replaced.
    pub progress_coalesced: Counter,
    /// Progress events dropped.
    pub progress_dropped: Counter,
    measures: Arc<Measures>,
    exchanges: Family<ExchangeLabels, Counter>,
    durations: Family<UpstreamLabel, Histogram, fn() -> Histogram>,
    registry: Registry,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ExchangeLabels {
    upstream: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UpstreamLabel {
    upstream: String,
}

impl Metrics {
    /// All at zero.
    pub fn new() -> Self {
        let mut metrics = Self {
            in_flight: Gauge::default(),
            log_lines_dropped: Counter::default(),
            connections: Gauge::default(),
            admin_connections: Gauge::default(),
            forged_members: Counter::default(),
            progress_coalesced: Counter::default(),
            progress_dropped: Counter::default(),
            measures: Arc::default(),
            exchanges: Family::default(),
            durations: Family::new_with_constructor(duration_histogram),
            registry: Registry::with_prefix("mcp_sidecar"),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register(
            "exchanges",
            "Exchanges that ended, by upstream and outcome",
            self.exchanges.clone(),
        );
        registry.register(
            "exchange_duration_seconds",
            "From the beginning of an exchange to its end, by upstream",
            self.durations.clone(),
        );
        registry.register(
            "exchanges_in_flight",
            "Exchanges that have begun and not ended",
            self.in_flight.clone(),
        );
        registry.register(
            "log_lines_dropped",
            "Access-log lines that a slow output lost",
            self.log_lines_dropped.clone(),
        );
        registry.register("connections", "Open connections of nodes", self.connections.clone());
        registry.register(
            "admin_connections",
            "Open connections to the admin listener",
            self.admin_connections.clone(),
        );
        registry.register(
            "forged_members",
            "oz0/ members cut out of upstreams' results",
            self.forged_members.clone(),
        );
        registry.register(
            "progress_coalesced",
            "Progress events that a newer one replaced",
            self.progress_coalesced.clone(),
        );
        registry.register("progress_dropped", "Progress events dropped", self.progress_dropped.clone());
        registry.register_collector(Box::new(Arc::clone(&self.measures)));
    }

    /// Counts an exchange that ended. One that reached no upstream counts under the empty name.
    pub(super) fn ended(&self, record: &Record) {
        let upstream = record.upstream.clone().unwrap_or_default();
        let outcome = record.outcome.map_or("", super::Outcome::as_str);
        if let Some(duration) = record.duration_ms {
            let label = UpstreamLabel { upstream: upstream.clone() };
            self.durations.get_or_create(&label).observe(duration.as_secs_f64());
        }
        self.exchanges.get_or_create(&ExchangeLabels { upstream, outcome }).inc();
        self.progress_coalesced.inc_by(record.progress_coalesced.unwrap_or(0));
        self.progress_dropped.inc_by(record.progress_dropped.unwrap_or(0));
    }

    /// Shows what `read` says each time: for what is counted elsewhere anyway. `help` is one sentence.
    pub fn measure(
        &self,
        kind: Kind,
        name: &'static str,
        help: &'static str,
        read: impl Fn() -> usize + Send + Sync + 'static,
    ) {
        self.measures.add(Measured::one(kind, name, help, read));
    }

    /// The same of several, by their label, whose values must be few.
    pub fn measure_each(
        &self,
        kind: Kind,
        name: &'static str,
        help: &'static str,
        label: &'static str,
        read: impl Fn() -> Vec<(String, usize)> + Send + Sync + 'static,
    ) {
        self.measures.add(Measured::each(kind, name, help, label, read));
    }

    /// Has `look` find out, each time before the page is shown, what a measure then reads.
    pub fn look_first(&self, look: impl Fn() -> Look + Send + Sync + 'static) {
        self.measures.look_first(look);
    }

    /// The OpenMetrics text of what is known now.
    pub async fn page(&self) -> String {
        self.measures.look().await;
        self.encode()
    }

    /// The same without a look at what is kept elsewhere.
    pub fn encode(&self) -> String {
        let mut page = String::new();
        // Only the String could fail, and it takes everything.
        let _ = text::encode(&mut page, &self.registry);
        page
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// From a local JSON answer to a tool that takes the maximum of an hour.
fn duration_histogram() -> Histogram {
    Histogram::new([0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0, 1800.0, 3600.0])
}
