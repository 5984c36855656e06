//! One running `tools/call`: its task, its counts, its answer.

use std::{sync::Arc, time::Duration};

use http::{Response, StatusCode, header};
use serde_json::{Value, value::RawValue};
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinHandle},
};

use crate::relay::body::Body;

use super::{
    control::{self, Fault},
    rpc,
    shared::Shared,
    stats::Stats,
    stream::{Cut, Events, Piece},
    tools::{self, Form, Progress, Refusal, Work},
};

/// Events that wait for a slow client before the tool waits.
const QUEUE: usize = 64;

/// A call that was read and may be started.
#[derive(Debug)]
pub(super) struct Call {
    id: Box<RawValue>,
    work: Work,
    form: Form,
    token: Option<Box<RawValue>>,
    logs: bool,
    fault: Option<Fault>,
}

/// A call's task. Dropping it stops nothing.
#[derive(Debug)]
pub(super) struct Running {
    task: JoinHandle<()>,
    events: mpsc::Receiver<Piece>,
    form: Form,
}

impl Call {
    /// Reads the call, or gives what to answer at once: a refusal, or a busy status. `finish` makes a tool's
    /// result the era's own.
    ///
    /// # Errors
    ///
    /// The answer; nothing was started.
    pub(super) fn read(
        id: Box<RawValue>,
        params: rpc::Params,
        shared: &Shared,
        finish: fn(Value) -> Value,
    ) -> Result<Self, Box<Response<Body>>> {
        let tool = params.name.as_deref().unwrap_or_default();
        let work = Work::read(tool, params.arguments, &params.meta);
        let token = params.meta.progress_token;
        let logs = params.meta.log_level.is_some();
        match work {
            Ok(Work::Busy(busy)) => Err(Box::new(answer_busy(busy.status, busy.retry_after()))),
            Ok(work) => {
                let fault = shared.faults.take(tool);
                if let Some(Fault { status: Some(status), retry_after, .. }) = &fault {
                    let wait = retry_after.as_ref().and_then(control::header_text);
                    return Err(Box::new(answer_busy(*status, wait)));
                }
                Ok(Self { form: work.form(token.is_some()), id, work, token, logs, fault })
            }
            Err(Refusal::UnknownTool) => {
                let text = format!("unknown tool: {tool}");
                Err(Box::new(rpc::fault(StatusCode::OK, Some(&id), rpc::INVALID_PARAMS, &text)))
            }
            Err(Refusal::Arguments(text)) => {
                Err(Box::new(rpc::as_json(rpc::result(&id, &finish(tools::failed(&text))))))
            }
        }
    }

    /// Starts its task. It is stopped where it waits when `stop` is over; `stop` lives as long as the task.
    pub(super) fn start(
        self,
        shared: &Arc<Shared>,
        finish: fn(Value) -> Value,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Running {
        let (sender, events) = mpsc::channel(QUEUE);
        let Self { id, work, form, token, logs, fault } = self;
        let counted = Counted::start(Arc::clone(&shared.stats), work.tool());
        let shared = Arc::clone(shared);
        let task = tokio::spawn(async move {
            let cut_after = fault.as_ref().and_then(|fault| fault.cut_after);
            let progress = Progress { token, logs, cut_after, events: sender.clone() };
            let mut stop = std::pin::pin!(stop);
            let result = tokio::select! {
                biased;
                () = &mut stop => return,
                result = run(work, &progress, fault.as_ref(), &shared) => result,
            };
            if result.is_ok() {
                counted.finish();
            }
            let lost = fault.is_some_and(|fault| fault.lose_response);
            let piece = match result {
                Ok(result) if !lost => {
                    let response = rpc::result(&id, &finish(result));
                    Ok(if form == Form::Stream { rpc::event(&response) } else { response })
                }
                _ => {
                    shared.stats.count(|seen| seen.cuts += 1);
                    Err(Cut)
                }
            };
            // Nobody may be there any more; the work is done all the same.
            let _ = sender.send(piece).await;
        });
        Running { task, events, form }
    }
}

impl Running {
    /// The HTTP answer, for a client whose leaving cancels nothing (legacy).
    pub(super) async fn answer(self, stats: &Arc<Stats>) -> Response<Body> {
        self.respond(stats, None).await
    }

    /// The HTTP answer, for a client whose leaving is the cancellation (modern): dropping this future, or the
    /// body it gives, stops the call.
    pub(super) async fn answer_or_stop(self, stats: &Arc<Stats>) -> Response<Body> {
        let stop = StopOnDrop(self.task.abort_handle());
        self.respond(stats, Some(stop)).await
    }

    async fn respond(mut self, stats: &Arc<Stats>, stop: Option<StopOnDrop>) -> Response<Body> {
        if self.form == Form::Json {
            // No answer means that it was cancelled: then there is no response to give, as on a stream.
            return match self.events.recv().await {
                Some(Ok(body)) => rpc::as_json(body),
                Some(Err(Cut)) => rpc::cut(),
                None => rpc::as_stream(Body::empty()),
            };
        }
        rpc::as_stream(Body::new(Events::new(self.events, Arc::clone(stats), stop)))
    }
}

/// Stops a call when it goes.
#[derive(Debug)]
pub(super) struct StopOnDrop(AbortHandle);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Counts a call's beginning, and its end as finished or cancelled.
#[derive(Debug)]
pub(super) struct Counted {
    stats: Arc<Stats>,
    tool: &'static str,
    finished: bool,
}

impl Counted {
    pub(super) fn start(stats: Arc<Stats>, tool: &'static str) -> Self {
        stats.count(|seen| seen.tools.entry(tool.to_owned()).or_default().started += 1);
        Self { stats, tool, finished: false }
    }

    pub(super) fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.stats.count(|seen| {
            let calls = seen.tools.entry(self.tool.to_owned()).or_default();
            if self.finished {
                calls.finished += 1;
            } else {
                calls.cancelled += 1;
            }
        });
    }
}

/// The work, unless it is to fail before it begins.
async fn run(
    work: Work,
    progress: &Progress,
    fault: Option<&Fault>,
    shared: &Arc<Shared>,
) -> Result<Value, Cut> {
    if let Some(fault) = fault {
        tokio::time::sleep(Duration::from_millis(fault.delay_ms)).await;
        if fault.fail_before {
            return Err(Cut);
        }
    }
    work.run(progress, shared).await
}

fn answer_busy(status: u16, wait: Option<String>) -> Response<Body> {
    let mut response = Response::new(Body::full("busy"));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain"));
    // Text that no header can carry is left out.
    if let Some(wait) = wait.and_then(|wait| wait.try_into().ok()) {
        response.headers_mut().insert(header::RETRY_AFTER, wait);
    }
    response
}
