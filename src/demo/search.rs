//! The tool `search`: reads in four steps, and goes on from where an attempt before it got to.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    rpc::{Resume, Step},
    stream::Cut,
    tools::{self, Progress, Refusal},
};

/// Pages of every search.
const PAGES: u64 = 4;

/// A call of it.
#[derive(Debug)]
pub(super) struct Search {
    asked: Asked,
    /// Pages that an attempt before has read.
    read: u64,
}

#[derive(Debug, Deserialize)]
struct Asked {
    q: String,
    #[serde(default = "step_ms")]
    step_ms: u64,
}

fn step_ms() -> u64 {
    20
}

impl Search {
    /// A token that it never gave means nothing to it: then it starts over.
    pub(super) fn read(arguments: Value, resume: Option<&Resume>) -> Result<Self, Refusal> {
        let token = resume.and_then(|resume| resume.token.as_deref());
        let read = token.and_then(|token| (1..=PAGES).find(|&page| self::token(page) == token));
        Ok(Self { asked: tools::typed(arguments)?, read: read.unwrap_or(0) })
    }

    pub(super) async fn run(self, progress: &Progress) -> Result<Value, Cut> {
        let Self { asked: Asked { q, step_ms }, read } = self;
        let mut hits = Vec::new();
        for page in read + 1..=PAGES {
            sleep(Duration::from_millis(step_ms)).await;
            hits.push(format!("{q}, page {page}"));
            let token = token(page);
            let step = Step { progress: page, total: PAGES, message: "", resume: Some(&token) };
            progress.report(step).await?;
        }
        let from = if read == 0 { "from the start".to_owned() } else { format!("after page {read}") };
        let text = format!("searched {from}: {} pages", hits.len());
        Ok(tools::told(&text, json!({ "started_after": read, "hits": hits })))
    }
}

fn token(page: u64) -> String {
    format!("page:{page}")
}
