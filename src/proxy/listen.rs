//! A `subscriptions/listen` request that can be made again: it only reads, and the specification leaves it to the
//! client to send it anew after a drop.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Method, Response, StatusCode, header};

use super::{
    Route, Turn,
    answer::EVENT_STREAM,
    forward::{self, Outgoing},
    read::Coding,
};
use crate::{
    busy,
    clock::Clock,
    headers,
    message::{
        Id,
        subscription::{self, Filter},
    },
    relay::listen::Answer,
    upstream,
};

/// The request as its node made it, credentials included: in memory only, and gone with the node's stream.
pub struct Asking {
    route: Arc<Route>,
    query: Option<String>,
    headers: HeaderMap,
    body: Bytes,
    filter: Filter,
    clock: Clock,
}

impl fmt::Debug for Asking {
    /// Shows no header and no body.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asking").field("upstream", &self.route.name).finish_non_exhaustive()
    }
}

impl Asking {
    /// The request that is about to be sent; `None` if it must not be made again: its filter says something that is not
    /// known here, or it is signed and could not carry another id.
    pub(super) fn of(turn: &Turn, outgoing: &Outgoing, clock: Clock) -> Option<Self> {
        let filter = subscription::filter(&outgoing.body).filter(Filter::is_plain)?;
        if !turn.route.listen.reconnect || headers::is_signed(&outgoing.headers) {
            return None;
        }
        let mut headers = outgoing.headers.clone();
        headers.remove(headers::LAST_EVENT_ID);
        headers::shed_digests(&mut headers);
        Some(Self {
            route: turn.route.clone(),
            query: turn.parts.uri.query().map(str::to_owned),
            headers,
            body: outgoing.body.clone(),
            filter,
            clock,
        })
    }

    /// The upstream's name.
    pub fn upstream(&self) -> &str {
        &self.route.name
    }

    /// What it asks for.
    pub fn filter(&self) -> &Filter {
        &self.filter
    }

    /// The bytes that it holds.
    pub fn size(&self) -> usize {
        let headers: usize = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
        self.body.len() + self.filter.size() + headers
    }

    /// Makes it again under `id`, with the upstream's own credential as it is now.
    pub async fn ask(&self, id: &Id) -> Answer {
        let mut headers = self.headers.clone();
        if let Some(value) = self.route.credential.as_ref().and_then(|credential| credential.authorization())
        {
            headers.insert(header::AUTHORIZATION, value);
        }
        let query = self.query.as_deref();
        let outgoing = Outgoing {
            method: Method::POST,
            uri: self.route.target(query),
            headers,
            body: subscription::with_id(&self.body, id),
        };
        match forward::send(&self.route, query, outgoing, None).await {
            Ok(response) => self.judge(response),
            Err(error) => Answer::Later { why: error.to_string(), wait: None },
        }
    }

    fn judge(&self, response: Response<upstream::Body>) -> Answer {
        let (head, body) = response.into_parts();
        let status = head.status;
        let why = format!("the upstream answered {}", status.as_u16());
        if status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error() {
            let wait = busy::retry_after(&head.headers, self.clock.now());
            let wait = wait.and_then(|wait| wait.parse().ok());
            let wait = wait.map(|wait| Duration::try_from_secs_f64(wait).unwrap_or(Duration::MAX));
            return Answer::Later { why, wait };
        }
        let coding = Coding::of(&head.headers);
        let event_stream = headers::is_content_type(&head.headers, EVENT_STREAM);
        if status == StatusCode::OK && event_stream && coding.is_readable() {
            return Answer::Stream(body, coding.decoder());
        }
        Answer::Never(why)
    }
}
