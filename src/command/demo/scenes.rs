//! The scenes: each does one thing through the sidecar, says what happened, and compares it with what is promised.

mod again;
mod calls;
mod lasting;

use std::{io, pin::Pin};

use http::Method;
use serde_json::json;

use super::{
    client::{LEGACY, MODERN},
    stage::{Seen, Stage},
};
use calls::list_and_call;

/// One scene.
#[derive(Debug)]
pub(super) struct Scene {
    pub(super) title: &'static str,
    pub(super) play: for<'a> fn(&'a mut Stage, &'a mut Seen) -> Playing<'a>,
}

/// A scene under way. An error breaks it off.
pub(super) type Playing<'a> = Pin<Box<dyn Future<Output = io::Result<()>> + Send + 'a>>;

/// All of them, in the order they are played.
pub(super) const SCENES: &[Scene] = &[
    Scene {
        title: "modern: a listing and a call",
        play: |stage, seen| {
            Box::pin(async {
                let client = stage.modern();
                list_and_call(stage, seen, &client, json!({ "era": "modern", "protocol": MODERN })).await
            })
        },
    },
    Scene {
        title: "legacy: a session, a listing and a call",
        play: |stage, seen| {
            Box::pin(async {
                let client = stage.legacy().await?;
                let era = json!({ "era": "legacy", "protocol": LEGACY });
                list_and_call(stage, seen, &client, era).await?;
                let ended = client.bare(Method::DELETE).await?.status;
                seen.expect("HTTP status of DELETE", ended.as_u16(), 200);
                seen.expect("sessions left upstream", stage.upstream().sessions, 0);
                Ok(())
            })
        },
    },
    Scene {
        title: "progress passes on the stream of the call, event by event",
        play: |stage, seen| Box::pin(calls::progress(stage, seen)),
    },
    Scene {
        title: "busy: a 429 that names a wait becomes a tool result",
        play: |stage, seen| {
            Box::pin(calls::busy(stage, seen, json!({ "status": 429, "retry_after": 2 }), Some(json!(2))))
        },
    },
    Scene {
        title: "busy: a 429 without a wait becomes one that names none",
        play: |stage, seen| Box::pin(calls::busy(stage, seen, json!({ "status": 429 }), None)),
    },
    Scene {
        title: "busy: so does a 503 that names a wait",
        play: |stage, seen| {
            Box::pin(calls::busy(
                stage,
                seen,
                json!({ "status": 503, "retry_after": "1.5" }),
                Some(json!(1.5)),
            ))
        },
    },
    Scene {
        title: "modern: closing the stream stops the work upstream, without a message",
        play: |stage, seen| Box::pin(calls::cancel_by_closing(stage, seen)),
    },
    Scene {
        title: "modern: leaving before any answer stops the work as well",
        play: |stage, seen| Box::pin(calls::cancel_before_the_head(stage, seen)),
    },
    Scene {
        title: "legacy: notifications/cancelled stops the work, the stream ends without a response",
        play: |stage, seen| Box::pin(calls::cancel_by_notification(stage, seen)),
    },
    Scene {
        title: "the idle clock ends a call that says nothing",
        play: |stage, seen| Box::pin(calls::idle_clock(stage, seen)),
    },
    Scene {
        title: "the maximum ends a call although its progress still comes",
        play: |stage, seen| Box::pin(calls::maximum_clock(stage, seen)),
    },
    Scene {
        title: "a silent stream is kept alive by comments",
        play: |stage, seen| Box::pin(calls::keepalive(stage, seen)),
    },
    Scene {
        title: "the same charge twice under one key is made once",
        play: |stage, seen| Box::pin(again::twice(stage, seen)),
    },
    Scene {
        title: "a response that was lost is answered by the next attempt, under the same key",
        play: |stage, seen| Box::pin(again::lost_response(stage, seen)),
    },
    Scene {
        title: "a call that may not be made again is not, when its outcome is unknown",
        play: |stage, seen| Box::pin(again::outcome_unknown(stage, seen)),
    },
    Scene {
        title: "a key with other arguments is refused",
        play: |stage, seen| Box::pin(again::key_mismatch(stage, seen)),
    },
    Scene {
        title: "an attempt that was cut amid its progress is resumed by the next one",
        play: |stage, seen| Box::pin(again::resumed(stage, seen)),
    },
    Scene {
        title: "a task's cancel that is acknowledged is not its end",
        play: |stage, seen| Box::pin(lasting::task(stage, seen)),
    },
    Scene {
        title: "a flood to a slow node: progress is merged and dropped, the rest arrives, marked",
        play: |stage, seen| Box::pin(lasting::flood(stage, seen)),
    },
    Scene {
        title: "a subscription that its server drops heals, and the node learns what to refetch",
        play: |stage, seen| Box::pin(lasting::healed(stage, seen)),
    },
];
