//! How the tools of the demo upstream are listed: the hints that a client goes by.

use serde_json::{Value, json};

/// The entries of `tools/list`, always in this order.
pub(super) fn listing() -> Value {
    let mut entries = reading();
    entries.extend(ordering());
    entries.extend(streaming());
    entries.into()
}

/// Tools that only read and have no tricks of the ledger's.
fn reading() -> Vec<Value> {
    let number = json!({ "type": "number" });
    let mut add = entry("add", "Adds two numbers", &json!({ "a": number, "b": number }), &["a", "b"]);
    add["outputSchema"] =
        json!({ "type": "object", "properties": { "sum": { "type": "number" } }, "required": ["sum"] });
    let entries = vec![
        entry("echo", "Says what it is told", &json!({ "text": { "type": "string" } }), &["text"]),
        add,
        entry(
            "slow",
            "Works in steps and reports progress after each",
            &json!({ "steps": whole("how many, 4"), "step_ms": whole("how long each takes, 100") }),
            &[],
        ),
        entry(
            "busy",
            "Answers the HTTP request itself with 429 or 503",
            &json!({
                "status": { "type": "integer", "enum": [429, 503] },
                "retry_after": { "type": ["number", "string"], "description": "the Retry-After to send" },
            }),
            &["status"],
        ),
        entry(
            "flood",
            "Reports progress as fast as the connection takes it",
            &json!({
                "events": whole("how many, 1000"),
                "bytes": whole("of each one's message, 0"),
                "log_every": whole("a log message after so many, where the client asked for them; 0: none"),
            }),
            &[],
        ),
        entry(
            "silent",
            "Sends not one byte until it is done",
            &json!({
                "ms": whole("how long, 1000"),
                "head": { "type": "boolean", "description": "send the head of a stream at once" },
            }),
            &[],
        ),
    ];
    entries
        .into_iter()
        .map(|entry| hinted(entry, &json!({ "readOnlyHint": true, "idempotentHint": true })))
        .collect()
}

/// Tools of the ledger.
fn ordering() -> Vec<Value> {
    let text = json!({ "type": "string", "minLength": 1, "maxLength": 256 });
    let order = json!({ "order_id": text, "amount": whole("in the smallest unit of the currency") });
    let charge = ["order_id", "amount"];
    let reserve = json!({ "tenant": text, "sku": text, "quantity": whole("how many, at least 1") });
    let keyed = |entry| {
        let mut entry = hinted(entry, &json!({ "readOnlyHint": false, "idempotentHint": true }));
        entry["_meta"] = json!({ "oz0/idempotency_key": true });
        entry
    };
    let unkeyed = entry("charge_unkeyed", "Charges an order, again whenever it is called", &order, &charge);
    let reconcile = entry(
        "reconcile",
        "Says what was committed under an idempotency key",
        &json!({ "key": { "type": "string" } }),
        &["key"],
    );
    vec![
        keyed(entry("charge", "Charges an order, once per idempotency key", &order, &charge)),
        keyed(entry(
            "reserve_inventory",
            "Takes something out of the stock, once per idempotency key",
            &reserve,
            &["tenant", "sku", "quantity"],
        )),
        hinted(unkeyed, &json!({ "readOnlyHint": false })),
        hinted(reconcile, &json!({ "readOnlyHint": true })),
    ]
}

/// Tools that take their time.
fn streaming() -> Vec<Value> {
    let search = entry(
        "search",
        "Reads four pages, and goes on from where an attempt before got to",
        &json!({ "q": { "type": "string" }, "step_ms": whole("how long each page takes, 20") }),
        &["q"],
    );
    let mut search = hinted(search, &json!({ "readOnlyHint": true }));
    search["_meta"] = json!({ "oz0/resume": true });
    let export = entry(
        "export",
        "Works in steps; for a client that takes tasks it is one",
        &json!({
            "steps": whole("how many, 4"),
            "step_ms": whole("how long each takes, 100"),
            "hold": { "type": "boolean", "description": "wait at each checkpoint until it is let through" },
        }),
        &[],
    );
    vec![search, hinted(export, &json!({ "readOnlyHint": true }))]
}

fn whole(what: &str) -> Value {
    json!({ "type": "integer", "minimum": 0, "description": what })
}

fn entry(name: &str, description: &str, properties: &Value, required: &[&str]) -> Value {
    json!({
        "name": name,
        "description": description,
        "inputSchema": { "type": "object", "properties": properties, "required": required },
    })
}

fn hinted(mut entry: Value, annotations: &Value) -> Value {
    entry["annotations"] = annotations.clone();
    entry["annotations"]["openWorldHint"] = false.into();
    entry
}
