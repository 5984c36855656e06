//! `subscriptions/listen` (MCP 2026-07-28, Subscriptions): who listens, and what they are told.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json, value::RawValue};
use tokio::sync::mpsc;

use super::{
    control::{self, Listen},
    resources,
    rpc::{self, Params},
    stats::Stats,
    stream::{Cut, Events, Piece},
};
use crate::relay::body::Body;

/// Messages that wait for a slow client. One that is slower is cut: it refetches when it listens again.
const QUEUE: usize = 64;

/// Every open subscription.
#[derive(Debug)]
pub(super) struct Hub {
    stats: Arc<Stats>,
    open: Mutex<Vec<Subscription>>,
    orders: Mutex<Orders>,
}

/// One subscription. Dropped, its stream ends.
#[derive(Debug)]
struct Subscription {
    /// The id of its request, which every message carries.
    id: Box<RawValue>,
    tools: bool,
    uris: Vec<String>,
    messages: mpsc::Sender<Piece>,
}

/// What happens to the next ones.
#[derive(Debug, Default)]
struct Orders {
    refusals: u32,
    status: StatusCode,
    retry_after: Option<HeaderValue>,
    narrow: u32,
}

impl Hub {
    pub(super) fn new(stats: Arc<Stats>) -> Self {
        Self { stats, open: Mutex::default(), orders: Mutex::default() }
    }

    /// Opens a subscription: the acknowledgement is its first message.
    pub(super) fn open(&self, id: Box<RawValue>, params: &Params) -> Response<Body> {
        let Some(Value::Object(filter)) = &params.notifications else {
            let text = "params lack the filter, `notifications`";
            return rpc::fault(StatusCode::BAD_REQUEST, Some(&id), rpc::INVALID_PARAMS, text);
        };
        if filter.contains_key("taskIds") && !params.meta.takes_tasks() {
            return rpc::lacks_tasks(&id);
        }
        let narrow = {
            let mut orders = lock(&self.orders);
            if orders.refusals > 0 {
                orders.refusals -= 1;
                self.stats.count(|seen| seen.listen_refusals += 1);
                return refusal(&orders);
            }
            let narrow = orders.narrow > 0;
            orders.narrow = orders.narrow.saturating_sub(1);
            narrow
        };
        let tools = filter.get("toolsListChanged") == Some(&Value::Bool(true));
        let wanted = filter.get("resourceSubscriptions").and_then(Value::as_array);
        let uris =
            wanted.into_iter().flatten().filter_map(Value::as_str).filter(|uri| resources::is_one(uri));
        let uris: Vec<_> = uris.map(str::to_owned).take(if narrow { 0 } else { usize::MAX }).collect();
        let (messages, events) = mpsc::channel(QUEUE);
        let subscription = Subscription { id, tools, uris, messages };
        subscription.say("notifications/subscriptions/acknowledged", &subscription.granted());
        // Events are counted before the subscription can be found to have been opened.
        let body = Body::new(Events::new(events, Arc::clone(&self.stats), None));
        lock(&self.open).push(subscription);
        self.stats.count(|seen| seen.listens += 1);
        rpc::as_stream(body)
    }

    /// Tells whoever listens that a resource has changed.
    pub(super) fn updated(&self, uri: &str) {
        self.tell(|subscription| {
            !subscription.uris.iter().any(|wanted| wanted == uri)
                || subscription.say("notifications/resources/updated", &json!({ "uri": uri }))
        });
    }

    /// Tells whoever listens that the tools have changed.
    pub(super) fn tools_changed(&self) {
        self.tell(|subscription| {
            !subscription.tools || subscription.say("notifications/tools/list_changed", &json!({}))
        });
    }

    /// Does what a `POST /control` asks for.
    ///
    /// # Errors
    ///
    /// In words, what is wrong with it.
    pub(super) fn order(&self, asked: &Listen) -> Result<(), String> {
        {
            let mut orders = lock(&self.orders);
            if let Some(status) = asked.refuse {
                let status = StatusCode::from_u16(status).ok().filter(|status| status.as_u16() >= 400);
                orders.status = status.ok_or("a status is 400 to 999")?;
                let retry_after = asked.retry_after.as_ref().and_then(control::header_text);
                orders.retry_after = retry_after.and_then(|wait| wait.try_into().ok());
                orders.refusals = asked.times.unwrap_or(1);
            }
            if asked.narrow > 0 {
                orders.narrow = asked.narrow;
            }
        }
        if asked.drop || asked.end {
            let ended = std::mem::take(&mut *lock(&self.open));
            let alive = ended.iter().filter(|subscription| !subscription.messages.is_closed()).count();
            for Subscription { id, messages, .. } in ended {
                let last = if asked.drop { Err(Cut) } else { Ok(rpc::event(&rpc::subscription_ended(&id))) };
                // Where it is full the stream ends without it, which is abrupt too.
                let _ = messages.try_send(last);
            }
            if asked.drop {
                self.stats.count(|seen| seen.listen_drops += alive as u64);
            }
        }
        Ok(())
    }

    /// `say` gives whether the subscription is still there; one that is not is forgotten.
    fn tell(&self, say: impl Fn(&Subscription) -> bool) {
        lock(&self.open).retain(|subscription| !subscription.messages.is_closed() && say(subscription));
    }
}

impl Subscription {
    /// The filter that it was granted.
    fn granted(&self) -> Value {
        let mut granted = json!({});
        if self.tools {
            granted["toolsListChanged"] = true.into();
        }
        if !self.uris.is_empty() {
            granted["resourceSubscriptions"] = self.uris.clone().into();
        }
        json!({ "notifications": granted })
    }

    fn say(&self, method: &str, params: &Value) -> bool {
        self.messages.try_send(Ok(rpc::event(&rpc::subscribed(&self.id, method, params)))).is_ok()
    }
}

fn refusal(orders: &Orders) -> Response<Body> {
    let mut response = rpc::bare(orders.status);
    if let Some(wait) = &orders.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, wait.clone());
    }
    response
}

/// A poisoned lock only means that some thread panicked between two whole steps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
