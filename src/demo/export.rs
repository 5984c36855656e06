//! The tool `export`: works in steps, as an ordinary call or, for a modern client that takes them, as a task.

use std::{sync::Arc, time::Duration};

use serde::Deserialize;
use serde_json::Value;
use tokio::time::sleep;

use super::{
    rpc::Step,
    shared::Shared,
    stream::Cut,
    tools::{self, Progress, Refusal},
};

/// Steps of one export.
const STEPS: u64 = 10_000;
/// The longest step.
const STEP_MS: u64 = 86_400_000;

/// A call of it.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default)]
pub(super) struct Export {
    pub(super) steps: u64,
    pub(super) step_ms: u64,
    /// Waits at each checkpoint until `POST /control` lets it through.
    pub(super) hold: bool,
}

impl Default for Export {
    fn default() -> Self {
        Self { steps: 4, step_ms: 100, hold: false }
    }
}

impl Export {
    pub(super) fn read(arguments: Value) -> Result<Self, Refusal> {
        let export: Self = tools::typed(arguments)?;
        if !(1..=STEPS).contains(&export.steps) || export.step_ms > STEP_MS {
            return Err(Refusal::Arguments(format!("1 to {STEPS} steps of at most {STEP_MS} ms")));
        }
        Ok(export)
    }

    /// As an ordinary call.
    pub(super) async fn run(self, progress: &Progress, shared: &Arc<Shared>) -> Result<Value, Cut> {
        for step in 1..=self.steps {
            if !self.step(shared).await {
                return Err(Cut);
            }
            progress.report(Step { progress: step, total: self.steps, ..Step::default() }).await?;
        }
        Ok(self.result())
    }

    /// Works one step, up to its checkpoint. `false`: the server stops.
    pub(super) async fn step(&self, shared: &Shared) -> bool {
        if self.hold {
            return shared.checkpoints.acquire().await.map(tokio::sync::SemaphorePermit::forget).is_ok();
        }
        sleep(Duration::from_millis(self.step_ms)).await;
        true
    }

    /// What it ends with.
    pub(super) fn result(&self) -> Value {
        tools::said(&format!("{} steps exported", self.steps))
    }
}
