//! Failures on request: what `POST /control` takes, and what it makes of the next calls.
//!
//! A failure is an order for a tool's next calls, and no argument of theirs, so that a call that failed and the one after
//! it are the same call.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::Deserialize;
use serde_json::Value;

/// Orders of one tool that may wait.
const ORDERS: usize = 1000;

/// One `POST /control`. Whatever it names is done, in this order.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Control {
    /// What happens to a tool's next calls.
    pub(super) fault: Option<Fault>,
    /// What happens to subscriptions.
    pub(super) listen: Option<Listen>,
    /// Tells subscribers that the tools have changed.
    pub(super) tools_changed: bool,
    /// Lets workers of tasks that are held pass so many checkpoints.
    pub(super) checkpoints: usize,
}

/// What happens to the next `times` calls of a tool.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fault {
    pub(super) tool: String,
    #[serde(default = "once")]
    pub(super) times: u32,
    /// The HTTP request is answered with this; nothing is done.
    pub(super) status: Option<u16>,
    /// A number, or any text at all.
    pub(super) retry_after: Option<Value>,
    /// Waits before anything else.
    #[serde(default)]
    pub(super) delay_ms: u64,
    /// The connection ends before anything is done.
    #[serde(default)]
    pub(super) fail_before: bool,
    /// The stream ends after the progress of this value.
    pub(super) cut_after: Option<u64>,
    /// The work is done, then the connection ends without an answer.
    #[serde(default)]
    pub(super) lose_response: bool,
}

/// What happens to subscriptions.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Listen {
    /// Ends every open one abruptly.
    pub(super) drop: bool,
    /// Ends every open one with its final response.
    pub(super) end: bool,
    /// Answers the next `times` new ones with this status.
    pub(super) refuse: Option<u16>,
    /// With this `Retry-After`.
    pub(super) retry_after: Option<Value>,
    /// How many of the next are refused; once if it is not said.
    pub(super) times: Option<u32>,
    /// The acknowledgements of so many next ones leave the resources out.
    pub(super) narrow: u32,
}

fn once() -> u32 {
    1
}

/// The orders that wait, by tool, in the order they came.
#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<HashMap<String, VecDeque<Fault>>>);

impl Faults {
    /// Keeps an order.
    ///
    /// # Errors
    ///
    /// Too many wait, or its status is none.
    pub(super) fn order(&self, fault: Fault) -> Result<(), String> {
        if fault.status.is_some_and(|status| !(400..600).contains(&status)) {
            return Err("a status is 400 to 599".to_owned());
        }
        let mut waiting = self.lock();
        let total: usize = waiting.values().map(VecDeque::len).sum();
        if total >= ORDERS {
            return Err(format!("more than {ORDERS} orders wait"));
        }
        if fault.times > 0 {
            waiting.entry(fault.tool.clone()).or_default().push_back(fault);
        }
        Ok(())
    }

    /// What happens to the call of `tool` that comes now.
    pub(super) fn take(&self, tool: &str) -> Option<Fault> {
        let mut waiting = self.lock();
        let orders = waiting.get_mut(tool)?;
        let first = orders.front_mut()?;
        first.times -= 1;
        if first.times > 0 {
            return Some(first.clone());
        }
        orders.pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, VecDeque<Fault>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The text of a `Retry-After`, as it was asked for.
pub(super) fn header_text(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}
