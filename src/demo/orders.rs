//! The tools of the ledger: `charge`, `reserve_inventory`, `charge_unkeyed` and `reconcile`.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    ledger::{Committed, Effect, Error, Ledger, Operation},
    resources,
    shared::Shared,
    tools::{self, Refusal},
};

/// A call that changes something.
#[derive(Debug)]
pub(super) struct Order {
    operation: Operation,
    key: Option<String>,
}

/// A question for what was committed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Reconcile {
    key: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Charge {
    order_id: String,
    amount: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reserve {
    tenant: String,
    sku: String,
    quantity: u64,
}

/// Amounts that the ledger's file can hold.
const MOST: u64 = 1 << 53;
/// Bytes of an order's, a tenant's or a SKU's name.
const NAME_BYTES: usize = 256;

impl Order {
    /// Reads the call, if the tool is one of these. An argument that is unknown is refused: the key would not be
    /// bound to it.
    pub(super) fn read(tool: &str, arguments: &Value, key: Option<&str>) -> Option<Result<Self, Refusal>> {
        let keyed = |name, effect: Result<Effect, Refusal>| {
            effect.map(|effect| Self { operation: Operation { name, effect }, key: key.map(str::to_owned) })
        };
        Some(match tool {
            "charge" => keyed("charge", charge(arguments)),
            "reserve_inventory" => keyed("reserve_inventory", reserve(arguments)),
            "charge_unkeyed" => charge(arguments)
                .map(|effect| Self { operation: Operation { name: "charge_unkeyed", effect }, key: None }),
            _ => return None,
        })
    }

    pub(super) fn tool(&self) -> &'static str {
        self.operation.name
    }

    /// Commits it. Dropped, it is committed and counted all the same: a synchronous write cannot be stopped.
    pub(super) async fn run(self, shared: &Arc<Shared>) -> Value {
        let shared = Arc::clone(shared);
        let done = tokio::task::spawn_blocking(move || self.commit(&shared)).await;
        done.unwrap_or_else(|_| tools::failed("the ledger gave no answer"))
    }

    fn commit(&self, shared: &Shared) -> Value {
        let committed = shared.ledger.commit(self.key.as_deref(), &self.operation);
        shared.stats.count(|seen| {
            let calls = seen.tools.entry(self.operation.name.to_owned()).or_default();
            match &committed {
                Ok(Committed { replayed, executions, .. }) => {
                    calls.executions = calls.executions.max(*executions);
                    calls.replays += u64::from(*replayed);
                }
                Err(Error::KeyMismatch) => calls.refusals += 1,
                Err(_) => {}
            }
        });
        match committed {
            Ok(Committed { result, replayed, .. }) => {
                if let (Effect::Reserve { sku, .. }, false) = (&self.operation.effect, replayed) {
                    shared.hub.updated(&resources::uri(sku));
                }
                // Derived from nothing but what is stored: the same whenever it is told.
                tools::told(&receipt(&result), result)
            }
            Err(error) => tools::failed(&error.to_string()),
        }
    }
}

impl Reconcile {
    pub(super) async fn run(self, shared: &Arc<Shared>) -> Value {
        let shared = Arc::clone(shared);
        let found = tokio::task::spawn_blocking(move || look_up(&shared.ledger, &self.key)).await;
        found.unwrap_or_else(|_| tools::failed("the ledger gave no answer"))
    }
}

fn look_up(ledger: &Ledger, key: &str) -> Value {
    match ledger.reconcile(key) {
        Ok(Some((operation, result))) => {
            let text = format!("{operation} was committed: {}", receipt(&result));
            tools::told(&text, json!({ "committed": true, "operation": operation, "result": result }))
        }
        Ok(None) => tools::told("nothing was committed under this key", json!({ "committed": false })),
        Err(error) => tools::failed(&error.to_string()),
    }
}

fn receipt(result: &Value) -> String {
    let number = result.get("receipt").or_else(|| result.get("reservation"));
    number.and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn charge(arguments: &Value) -> Result<Effect, Refusal> {
    let Charge { order_id, amount } = tools::typed(arguments.clone())?;
    check(&[&order_id], amount)?;
    Ok(Effect::Charge { order_id, amount })
}

fn reserve(arguments: &Value) -> Result<Effect, Refusal> {
    let Reserve { tenant, sku, quantity } = tools::typed(arguments.clone())?;
    check(&[&tenant, &sku], quantity)?;
    Ok(Effect::Reserve { tenant, sku, quantity })
}

fn check(names: &[&str], amount: u64) -> Result<(), Refusal> {
    if names.iter().any(|name| !(1..=NAME_BYTES).contains(&name.len())) {
        return Err(Refusal::Arguments(format!("a name is 1 to {NAME_BYTES} bytes")));
    }
    if !(1..=MOST).contains(&amount) {
        return Err(Refusal::Arguments(format!("an amount is 1 to {MOST}")));
    }
    Ok(())
}
