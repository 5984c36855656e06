//! Durable tasks (SEP-2663): an `export` that outlives its request, and this process too.
//!
//! A task lives in the ledger's file. `tasks/cancel` only notes that the client gave it up: its worker looks at that at
//! its next checkpoint, and until then the task is `working`. A server that is started on the file of one that ended
//! goes on with the tasks that were not over.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::{Response, StatusCode};
use rusqlite::{OptionalExtension, Row, Transaction};
use serde_json::{Value, json, value::RawValue};

use super::{
    call::Counted,
    export::Export,
    ledger::Error,
    modern,
    rpc::{self, Params},
    shared::Shared,
};
use crate::relay::body::Body;

/// How long a task is kept, from its creation.
const TTL_MS: u64 = 3_600_000;
/// How often a client may ask.
const POLL_MS: u64 = 50;

/// One task as the file holds it.
#[derive(Clone, Debug)]
struct Task {
    id: String,
    status: String,
    step: u64,
    export: Export,
    /// Its client gave it up; the worker has not looked yet.
    cancel: bool,
    created: u64,
    updated: u64,
}

/// Makes an export a task and starts its worker. It is in the file before its handle is answered.
pub(super) async fn create(shared: &Arc<Shared>, id: &RawValue, export: Export) -> Response<Body> {
    let Some(name) = rpc::random_id() else {
        return rpc::bare(StatusCode::INTERNAL_SERVER_ERROR);
    };
    let now = now();
    let task = Task {
        id: name,
        status: "working".into(),
        step: 0,
        export,
        cancel: false,
        created: now,
        updated: now,
    };
    let (kept, of) = (task.clone(), Arc::clone(shared));
    match in_file(&of, move |transaction| insert(transaction, &kept)).await {
        Ok(()) => {}
        Err(error) => return failed(id, &error),
    }
    let mut handle = task.told();
    start(Arc::clone(shared), task);
    handle["resultType"] = "task".into();
    handle["statusMessage"] = "exporting".into();
    rpc::as_json(rpc::result(id, &handle))
}

/// Answers `tasks/get`, `tasks/cancel` and `tasks/update`.
pub(super) async fn answer(
    shared: &Arc<Shared>,
    id: &RawValue,
    method: &str,
    params: &Params,
) -> Response<Body> {
    if !params.meta.takes_tasks() {
        return rpc::lacks_tasks(id);
    }
    let name = params.task_id.clone().unwrap_or_default();
    let cancels = method == "tasks/cancel";
    let found = in_file(shared, move |transaction| {
        let found = find(transaction, &name)?;
        if cancels && found.is_some() {
            transaction.execute("UPDATE tasks SET cancel = 1 WHERE id = ?1", [&name])?;
        }
        Ok(found)
    });
    match found.await {
        Ok(Some(task)) if method == "tasks/get" => modern::answer(id, task.told()),
        // An acknowledgement says nothing of the task. No task here ever asks for input, so an update has no more to do.
        Ok(Some(_)) => modern::answer(id, json!({})),
        Ok(None) => rpc::fault(StatusCode::OK, Some(id), rpc::INVALID_PARAMS, "no such task"),
        Err(error) => failed(id, &error),
    }
}

/// Goes on with every task that is not over.
///
/// # Errors
///
/// The file cannot be read.
pub(super) fn go_on(shared: &Arc<Shared>) -> Result<(), Error> {
    let open = shared.ledger.within(|transaction| {
        let mut open = transaction.prepare(&format!("{COLUMNS} WHERE status = 'working'"))?;
        Ok(open.query_map([], Task::read)?.collect::<Result<Vec<_>, _>>()?)
    })?;
    for task in open {
        start(Arc::clone(shared), task);
    }
    Ok(())
}

fn start(shared: Arc<Shared>, task: Task) {
    let counted = Counted::start(Arc::clone(&shared.stats), "export");
    tokio::spawn(async move {
        while task.export.step(&shared).await {
            let id = task.id.clone();
            match in_file(&shared, move |transaction| checkpoint(transaction, &id)).await.as_deref() {
                Ok("working") => {}
                Ok("completed") => return counted.finish(),
                Ok(_) => return,
                Err(error) => return tracing::debug!(%error, "a task's worker ends"),
            }
        }
    });
}

/// A step is done. Here, and nowhere else, a worker learns that it is to stop; gives the status from now on.
fn checkpoint(transaction: &Transaction<'_>, id: &str) -> Result<String, Error> {
    let Some(mut task) = find(transaction, id)? else { return Ok("gone".to_owned()) };
    if task.status == "working" {
        if task.cancel {
            task.status = "cancelled".to_owned();
        } else {
            task.step += 1;
            if task.step >= task.export.steps {
                task.status = "completed".to_owned();
            }
        }
        let sql = "UPDATE tasks SET status = ?2, step = ?3, updated = ?4 WHERE id = ?1";
        transaction.execute(sql, (id, &task.status, task.step, now()))?;
    }
    Ok(task.status)
}

const COLUMNS: &str = "SELECT id, status, step, steps, step_ms, hold, cancel, created, updated FROM tasks";

fn insert(transaction: &Transaction<'_>, task: &Task) -> Result<(), Error> {
    let gone = task.created.saturating_sub(TTL_MS);
    transaction.execute("DELETE FROM tasks WHERE created < ?1", [gone])?;
    let Export { steps, step_ms, hold } = task.export;
    transaction.execute(
        "INSERT INTO tasks VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        (&task.id, &task.status, task.step, steps, step_ms, hold, task.cancel, task.created, task.updated),
    )?;
    Ok(())
}

fn find(transaction: &Transaction<'_>, id: &str) -> Result<Option<Task>, Error> {
    let found = transaction.query_row(&format!("{COLUMNS} WHERE id = ?1"), [id], Task::read);
    Ok(found.optional()?)
}

impl Task {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            id: row.get(0)?,
            status: row.get(1)?,
            step: row.get(2)?,
            export: Export { steps: row.get(3)?, step_ms: row.get(4)?, hold: row.get(5)? },
            cancel: row.get(6)?,
            created: row.get(7)?,
            updated: row.get(8)?,
        })
    }

    /// As its client sees it.
    fn told(&self) -> Value {
        let mut told = json!({
            "taskId": self.id,
            "status": self.status,
            "statusMessage": format!("step {} of {}", self.step, self.export.steps),
            "createdAt": date(self.created),
            "lastUpdatedAt": date(self.updated),
            "ttlMs": TTL_MS,
            "pollIntervalMs": POLL_MS,
        });
        if self.status == "completed" {
            told["result"] = self.export.result();
        }
        told
    }
}

/// One transaction, off the async threads.
async fn in_file<T: Send + 'static>(
    shared: &Arc<Shared>,
    step: impl FnOnce(&Transaction<'_>) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let shared = Arc::clone(shared);
    let done = tokio::task::spawn_blocking(move || shared.ledger.within(step)).await;
    // The step panics nowhere; the runtime may be going down.
    done.unwrap_or(Err(Error::Stopped))
}

fn failed(id: &RawValue, error: &Error) -> Response<Body> {
    rpc::fault(StatusCode::OK, Some(id), rpc::INTERNAL_ERROR, &error.to_string())
}

/// Milliseconds since the epoch.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn date(millis: u64) -> String {
    humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + Duration::from_millis(millis)).to_string()
}
