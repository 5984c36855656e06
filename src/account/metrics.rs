//! Counters and gauges, as `GET /metrics` shows them.
