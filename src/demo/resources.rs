//! The resources of the demo upstream: `inventory://SKU`, what there is of it and how much of that is reserved.

use std::sync::Arc;

use http::{Response, StatusCode};
use serde_json::{Value, json, value::RawValue};

use super::{rpc, shared::Shared};
use crate::relay::body::Body;

const SCHEME: &str = "inventory://";

/// The address of a SKU's record.
pub(super) fn uri(sku: &str) -> String {
    format!("{SCHEME}{sku}")
}

/// Whether `uri` names a record, of a SKU that there is or not.
pub(super) fn is_one(uri: &str) -> bool {
    uri.strip_prefix(SCHEME).is_some_and(|sku| !sku.is_empty())
}

/// Answers `resources/list` and `resources/read`; `finish` makes a result the era's own.
pub(super) async fn answer(
    shared: &Arc<Shared>,
    id: &RawValue,
    read: Option<&str>,
    finish: fn(Value) -> Value,
) -> Response<Body> {
    let held = Arc::clone(shared);
    let Ok(Ok(stock)) = tokio::task::spawn_blocking(move || held.ledger.stock()).await else {
        return rpc::fault(StatusCode::OK, Some(id), rpc::INTERNAL_ERROR, "the ledger cannot be read");
    };
    let result = match read {
        None => {
            let entry = |sku| json!({ "uri": uri(sku), "name": sku, "mimeType": "application/json" });
            json!({ "resources": stock.keys().map(|sku| entry(sku)).collect::<Vec<_>>() })
        }
        Some(wanted) => {
            let sku = wanted.strip_prefix(SCHEME).unwrap_or_default();
            let Some((amount, reserved)) = stock.get(sku) else {
                return rpc::fault(StatusCode::OK, Some(id), rpc::INVALID_PARAMS, "no such resource");
            };
            let record = json!({
                "sku": sku, "stock": amount, "reserved": reserved, "available": amount.saturating_sub(*reserved),
            });
            let content =
                json!({ "uri": wanted, "mimeType": "application/json", "text": record.to_string() });
            json!({ "contents": [content] })
        }
    };
    rpc::as_json(rpc::result(id, &finish(result)))
}
