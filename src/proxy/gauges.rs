//! What is used of each bound, as the metrics page shows it. Read when somebody asks, from what is counted anyway.

use std::sync::Arc;

use super::Sidecar;
use crate::account::metrics::{Kind, Metrics};

impl Sidecar {
    /// Has `metrics` show what this sidecar holds now, for as long as it lives.
    pub fn show_in(self: &Arc<Self>, metrics: &Metrics) {
        let gauge = |name, help, read: fn(&Self) -> usize| {
            let sidecar = Arc::downgrade(self);
            let read = move || sidecar.upgrade().map_or(0, |sidecar| read(&sidecar));
            metrics.measure(Kind::Gauge, name, help, read);
        };
        let held = "Bytes held in queues and for whole bodies, of limits.buffered.";
        gauge("buffered_bytes", held, |sidecar| sidecar.held.taken());
        let calls = "Requests in flight over all upstreams, of limits.calls.";
        gauge("calls", calls, |sidecar| sidecar.calls.taken());
        let streams = "GET and listen streams, of limits.streams.";
        gauge("streams", streams, |sidecar| sidecar.streams.taken());
        let lane = "Streams with ever more to read that wait for their next turn.";
        gauge("streams_in_lane", lane, |sidecar| sidecar.lane.waiting());
        let detached = "Notifications and responses on their way that do not end with their node.";
        gauge("detached_messages", detached, |sidecar| sidecar.detached.taken());
        let sessions = "Legacy sessions whose revision and client are remembered.";
        gauge("sessions", sessions, |sidecar| sidecar.sessions.len());
        gauge("tools", "Tools known from listings.", |sidecar| sidecar.listing.len());
        let notices = "Cancel notices to legacy upstreams that wait to be sent or answered.";
        gauge("cancel_notices", notices, |sidecar| sidecar.canceller.open());
        let held = "Bytes of all cancel notices.";
        gauge("cancel_notice_bytes", held, |sidecar| sidecar.canceller.held());
        let resumes = "Resuming GETs remembered for a while, whose hang-ups may still be seen.";
        gauge("resumes_remembered", resumes, |sidecar| sidecar.canceller.remembered());
        let waiting = "Cancel notices that wait for a node that may resume.";
        gauge("cancel_notices_waiting", waiting, |sidecar| sidecar.canceller.waiting());
        let canceller = self.canceller.clone();
        let dropped = "Cancel notices dropped because too many waited.";
        metrics.measure(Kind::Counter, "cancel_notices_dropped", dropped, move || canceller.dropped());
        self.show_upstreams(metrics);
    }

    /// What each upstream has of its own. One that a reload took away is shown no more.
    fn show_upstreams(self: &Arc<Self>, metrics: &Metrics) {
        let each = |name, help, read: fn(&super::Route) -> usize| {
            let sidecar = Arc::downgrade(self);
            metrics.measure_each(Kind::Gauge, name, help, "upstream", move || {
                let settings = sidecar.upgrade().map(|sidecar| sidecar.settings());
                let routes = settings.iter().flat_map(|settings| settings.routes.values());
                routes.map(|route| (route.name.to_string(), read(route))).collect()
            });
        };
        let calls = "Requests in flight to an upstream, of its calls.";
        each("upstream_calls", calls, |route| route.state.in_flight.taken());
        let connections =
            "Connections to an upstream that are kept: idle ones, and those that requests share.";
        each("upstream_connections", connections, |route| route.upstream.connections());
    }
}
