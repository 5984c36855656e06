//! Drives an MCP endpoint with the official Rust SDK: rmcp-client URL legacy|modern [--busy-fails].
//!
//! Prints one JSON line per scenario; the exit code is 1 if one failed. `--busy-fails` expects what the SDK does
//! without a sidecar: a 429 is an error, not a tool result.
#![allow(deprecated, reason = "sampling is deprecated, and still spoken")]

use std::{
    env,
    error::Error,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::Duration,
};

use rmcp::{
    ClientHandler, ClientLifecycleMode, ClientServiceExt, ErrorData,
    model::{
        CallToolRequestParams, CallToolResult, ClientCapabilities, ClientConfig, CreateMessageRequestParams,
        CreateMessageResult, ElicitRequestParams, ElicitResult, ElicitationAction, Implementation,
        ProgressNotificationParam, ProtocolVersion, SamplingMessage, SubscriptionFilter,
    },
    service::{NotificationContext, RequestContext, RoleClient, RunningService},
    transport::{StreamableHttpClientTransport, streamable_http_client::StreamableHttpClientTransportConfig},
};
use serde_json::{Value, json};
use tokio::{sync::Notify, time};

type Failure = Box<dyn Error + Send + Sync>;

/// What has come from the server besides results.
#[derive(Clone, Default)]
struct Node(Arc<Heard>);

#[derive(Default)]
struct Heard {
    progress: Mutex<Vec<f64>>,
    moved: Notify,
    changed: Notify,
}

impl Heard {
    /// Waits until the progress that has come is as wanted.
    async fn until(&self, wanted: impl Fn(&[f64]) -> bool) {
        while !wanted(&self.progress.lock().expect("no panic holds it")) {
            self.moved.notified().await;
        }
    }
}

impl ClientHandler for Node {
    fn get_info(&self) -> ClientConfig {
        let able = ClientCapabilities::builder().enable_elicitation().enable_sampling().build();
        ClientConfig::new(able, Implementation::new("rust-client", "1.0"))
    }

    async fn create_elicitation(
        &self,
        _: ElicitRequestParams,
        _: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        Ok(ElicitResult::new(ElicitationAction::Accept).with_content(json!({"name": "Ada"})))
    }

    async fn create_message(
        &self,
        _: CreateMessageRequestParams,
        _: RequestContext<RoleClient>,
    ) -> Result<CreateMessageResult, ErrorData> {
        Ok(CreateMessageResult::new(SamplingMessage::assistant_text("Good day"), "none".to_owned()))
    }

    async fn on_progress(&self, told: ProgressNotificationParam, _: NotificationContext<RoleClient>) {
        self.0.progress.lock().expect("no panic holds it").push(told.progress);
        self.0.moved.notify_one();
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.0.changed.notify_one();
    }
}

struct Scenarios {
    client: RunningService<RoleClient, Node>,
    heard: Arc<Heard>,
    modern: bool,
    busy_fails: bool,
}

impl Scenarios {
    async fn call(&self, name: &'static str, arguments: Value) -> Result<CallToolResult, Failure> {
        let arguments = arguments.as_object().cloned().unwrap_or_default();
        Ok(self.client.call_tool(CallToolRequestParams::new(name).with_arguments(arguments)).await?)
    }

    async fn says(&self, words: &str, name: &'static str, arguments: Value) -> Result<Value, Failure> {
        let result = self.call(name, arguments).await?;
        check(text(&result) == words, &result)?;
        Ok(words.into())
    }

    async fn add(&self) -> Result<Value, Failure> {
        self.says("42", "add", json!({"a": 2, "b": 40})).await
    }

    async fn list(&self) -> Result<Value, Failure> {
        let names: Vec<_> =
            self.client.list_all_tools().await?.iter().map(|tool| tool.name.to_string()).collect();
        for name in ["add", "count", "wait", "busy", "announce", "ask"] {
            check(names.iter().any(|listed| listed == name), &names)?;
        }
        Ok(json!(names))
    }

    async fn progress(&self) -> Result<Value, Failure> {
        self.heard.progress.lock().expect("no panic holds it").clear();
        self.says("counted", "count", json!({"steps": 5})).await?;
        // The SDK handles each in a task of its own: some may still run, and their order is lost.
        self.heard.until(|seen| seen.contains(&5.0)).await;
        let mut seen = self.heard.progress.lock().expect("no panic holds it").clone();
        seen.sort_by(f64::total_cmp);
        check(seen.len() >= 3 && seen.windows(2).all(|two| two[0] < two[1]), &seen)?;
        Ok(json!(seen))
    }

    /// A call that is dropped when its first progress has come.
    async fn cancel(&self) -> Result<Value, Failure> {
        self.heard.progress.lock().expect("no panic holds it").clear();
        tokio::select! {
            () = self.heard.until(|seen| !seen.is_empty()) => {}
            result = self.call("wait", json!({})) => return Err(format!("it was answered: {result:?}").into()),
        }
        self.add().await
    }

    async fn busy(&self) -> Result<Value, Failure> {
        if self.busy_fails {
            return match self.call("busy", json!({})).await {
                Ok(result) => Err(format!("it was answered: {result:?}").into()),
                Err(error) => Ok(error.to_string().into()),
            };
        }
        let result = self.call("busy", json!({})).await?;
        let meta = serde_json::to_value(&result.meta)?;
        check(result.is_error == Some(true), &result)?;
        check(meta["oz0/retryable"] == true && meta["oz0/retry_after"] == 7, &result)?;
        self.add().await?;
        Ok(text(&result).into())
    }

    /// What is announced before the stream stands is lost, so it is announced until it is heard.
    async fn notifications(&self) -> Result<Value, Failure> {
        if self.modern {
            let filter = SubscriptionFilter::builder().tools_list_changed().build();
            let mut stream = self.client.listen(filter).await?;
            self.call("announce", json!({})).await?;
            let event = stream.next().await?;
            check(event.is_some(), &event)?;
            stream.cancel().await?;
        } else {
            let heard = self.heard.changed.notified();
            tokio::pin!(heard);
            loop {
                self.call("announce", json!({})).await?;
                if time::timeout(Duration::from_millis(500), &mut heard).await.is_ok() {
                    break;
                }
            }
        }
        Ok("heard".into())
    }
}

fn text(result: &CallToolResult) -> &str {
    result.content.first().and_then(|block| block.as_text()).map_or("", |block| &block.text)
}

fn check(holds: bool, seen: &impl std::fmt::Debug) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(format!("{seen:?}").into()) }
}

/// Runs one scenario under a bound and prints what came of it.
async fn scenario(name: &str, run: impl Future<Output = Result<Value, Failure>>) -> bool {
    let came = time::timeout(Duration::from_secs(20), run).await.unwrap_or_else(|late| Err(late.into()));
    let (ok, detail) = match came {
        Ok(detail) => (true, detail),
        Err(error) => (false, error.to_string().into()),
    };
    println!("{}", json!({"scenario": name, "ok": ok, "detail": detail}));
    ok
}

#[tokio::main]
async fn main() -> Result<ExitCode, Failure> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [url, era, flags @ ..] = &arguments[..] else { return Err("rmcp-client URL legacy|modern".into()) };
    let modern = era == "modern";
    let lifecycle = if modern {
        ClientLifecycleMode::Discover { preferred_versions: vec![ProtocolVersion::V_2026_07_28] }
    } else {
        ClientLifecycleMode::Initialize
    };
    let node = Node::default();
    let heard = Arc::clone(&node.0);
    let transport = StreamableHttpClientTransport::from_config(
        StreamableHttpClientTransportConfig::with_uri(url.as_str()),
    );
    let client = node.serve_with_lifecycle(transport, lifecycle).await?;
    let run =
        Scenarios { client, heard, modern, busy_fails: flags.iter().any(|flag| flag == "--busy-fails") };

    let mut ok = scenario("list", run.list()).await;
    let resumes = !modern && run.client.list_all_tools().await?.iter().any(|tool| tool.name == "resume");
    ok &= scenario("call", run.add()).await;
    ok &= scenario("progress", run.progress()).await;
    ok &= scenario("cancel", run.cancel()).await;
    ok &= scenario("busy", run.busy()).await;
    ok &= scenario("notifications", run.notifications()).await;
    ok &= scenario("ask", run.says("Ada: Good day", "ask", json!({}))).await;
    if resumes {
        ok &= scenario("resume", run.says("resumed", "resume", json!({}))).await;
    }
    ok &= scenario("call again", run.add()).await;
    ok &= scenario("close", async { Ok(format!("{:?}", run.client.cancel().await?).into()) }).await;
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
