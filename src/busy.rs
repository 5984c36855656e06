//! A busy upstream, as a tool result (contract section 4).

use std::time::SystemTime;

use bytes::Bytes;
use http::HeaderMap;

use crate::message::{Era, Id};

/// What a busy answer says.
#[derive(Clone, Debug)]
pub struct Busy<'a> {
    /// The upstream's name.
    pub upstream: &'a str,
    /// The upstream's status; `None` when it is the sidecar's own limit.
    pub status: Option<u16>,
    /// The wait as a JSON number of seconds, as text.
    pub retry_after: Option<&'a str>,
}

/// The wait that `Retry-After` names, as the text of a JSON number of seconds (RFC 9110 § 10.2.3; R-091): delta-seconds, a decimal fraction as it
/// stands, an HTTP-date (three forms) minus the response's `Date`, else minus `now`, a past one `0`. Repeated, negative, junk: `None`.
pub fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<String> {
    let _ = (headers, now);
    unimplemented!()
}

/// The JSON-RPC response with the busy tool result, under the id's own token; modern ones carry `resultType`.
pub fn result(busy: &Busy<'_>, id: &Id, era: Era) -> Bytes {
    let _ = (busy, id, era);
    unimplemented!()
}

/// The same for a batch of nothing but calls (2025-03-26): an array, one result a call.
pub fn results(busy: &Busy<'_>, ids: &[&Id]) -> Bytes {
    let _ = (busy, ids);
    unimplemented!()
}
