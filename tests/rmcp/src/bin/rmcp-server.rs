//! An MCP server of both eras on the official Rust SDK, for the tests.
//!
//! Prints one JSON line per event on stdout: first `{"event":"listening","url":…}`, later `cancelled`, `busy`, `get`,
//! `resume` (a GET with `Last-Event-ID`), `listen` and `delete`. The tool `busy` never reaches the SDK: its HTTP
//! exchange is answered 429 with `Retry-After: 7`, as a rate limiter in front of a server does.
#![allow(deprecated, reason = "sampling is deprecated, and still spoken")]

use std::{convert::Infallible, error::Error, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{Method, Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use rmcp::{
    ErrorData, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, CreateMessageRequest,
        CreateMessageRequestParams, ElicitRequest, ElicitRequestParams, Implementation, InputRequest,
        InputRequests, InputRequiredResult, ListToolsResult, PaginatedRequestParams,
        ProgressNotificationParam, ProtocolVersion, SamplingMessage, ServerCapabilities, ServerConfig,
        SubscriptionFilter, Tool, ToolAnnotations,
    },
    service::{RequestContext, RoleServer, SubscriptionContext},
    transport::streamable_http_server::{StreamableHttpService, session::local::LocalSessionManager},
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::broadcast, time};

fn event(name: &str) {
    println!("{}", json!({"event": name}));
}

/// Tells that the work of `wait` ended: nothing but a cancellation ends it, by the token or by dropping the future.
struct TellsCancelled;

impl Drop for TellsCancelled {
    fn drop(&mut self) {
        event("cancelled");
    }
}

#[derive(Clone)]
struct Tools {
    /// Says to every listen stream that the tools have changed.
    changed: broadcast::Sender<()>,
}

impl ServerHandler for Tools {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().enable_tool_list_changed().build())
            .with_server_info(Implementation::new("rust-server", "1.0"))
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let tool = |name: &'static str, properties: Value| {
            let schema = json!({"type": "object", "properties": properties});
            Tool::new(name, name, Arc::new(schema.as_object().cloned().unwrap_or_default()))
        };
        let number = json!({"type": "number"});
        Ok(ListToolsResult::with_all_items(vec![
            tool("add", json!({"a": number, "b": number}))
                .with_annotations(ToolAnnotations::new().read_only(true)),
            tool("count", json!({"steps": number})),
            tool("wait", json!({})),
            tool("busy", json!({})),
            tool("announce", json!({})),
            tool("ask", json!({})),
        ]))
    }

    async fn call_tool(
        &self,
        call: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let argument = |name| call.arguments.as_ref().and_then(|all| all[name].as_i64()).unwrap_or_default();
        match &*call.name {
            "add" => Ok(text((argument("a") + argument("b")).to_string())),
            "count" => {
                for step in 1..=argument("steps") {
                    progress(&context, step, argument("steps")).await?;
                    time::sleep(Duration::from_millis(20)).await; // the tool's own work
                }
                Ok(text("counted"))
            }
            "wait" => {
                let _told = TellsCancelled;
                progress(&context, 1, 2).await?;
                context.ct.cancelled().await;
                Ok(text("never"))
            }
            "announce" => {
                if modern(&context) {
                    let _ = self.changed.send(());
                } else {
                    context.peer.notify_tool_list_changed().await.map_err(failed)?;
                }
                Ok(text("announced"))
            }
            "ask" if modern(&context) => Ok(ask_by_result(&call)),
            "ask" => ask_by_request(&context).await,
            name => Err(ErrorData::invalid_params(format!("no tool {name}"), None)),
        }
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(requested.clone())
    }

    async fn listen(&self, stream: SubscriptionContext) -> Result<(), ErrorData> {
        let mut changed = self.changed.subscribe();
        loop {
            tokio::select! {
                () = stream.cancelled() => return Ok(()),
                told = changed.recv() => {
                    told.map_err(failed)?;
                    stream.sink().notify_tool_list_changed().await.map_err(failed)?;
                }
            }
        }
    }
}

fn text(words: impl Into<String>) -> CallToolResponse {
    CallToolResult::success(vec![ContentBlock::text(words)]).into()
}

fn failed(error: impl Error) -> ErrorData {
    ErrorData::internal_error(error.to_string(), None)
}

fn modern(context: &RequestContext<RoleServer>) -> bool {
    context
        .protocol_version()
        .is_some_and(|version| version.as_str() >= ProtocolVersion::V_2026_07_28.as_str())
}

async fn progress(context: &RequestContext<RoleServer>, step: i64, of: i64) -> Result<(), ErrorData> {
    let Some(token) = context.meta.get_progress_token() else { return Ok(()) };
    let told = ProgressNotificationParam::new(token, step as f64).with_total(of as f64);
    context.peer.notify_progress(told).await.map_err(failed)
}

fn question() -> ElicitRequestParams {
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]});
    ElicitRequestParams::FormElicitationParams {
        meta: None,
        message: "Who is there?".to_owned(),
        requested_schema: serde_json::from_value(schema).expect("it is a schema"),
    }
}

fn prompt(name: &str) -> CreateMessageRequestParams {
    CreateMessageRequestParams::new(vec![SamplingMessage::user_text(format!("Greet {name}."))], 20)
}

/// Asks the client's user for a name, then its model for a greeting: requests on the call's own stream.
async fn ask_by_request(context: &RequestContext<RoleServer>) -> Result<CallToolResponse, ErrorData> {
    let answer = context.peer.create_elicitation(question()).await.map_err(failed)?;
    let name = answer.content.unwrap_or_default()["name"].as_str().unwrap_or_default().to_owned();
    let greeting = context.peer.create_message(prompt(&name)).await.map_err(failed)?;
    let greeting = serde_json::to_value(greeting).map_err(failed)?;
    Ok(text(format!("{name}: {}", greeting["content"]["text"].as_str().unwrap_or_default())))
}

/// The same in the modern way: the client sends the call again with each answer.
fn ask_by_result(call: &CallToolRequestParams) -> CallToolResponse {
    let answers = serde_json::to_value(&call.input_responses).unwrap_or_default();
    let name = call.request_state.as_deref().or(answers["person"]["content"]["name"].as_str());
    let Some(name) = name else {
        let asked = InputRequest::Elicitation(ElicitRequest::new(question()));
        return InputRequiredResult::from_input_requests(InputRequests::from([("person".to_owned(), asked)]))
            .into();
    };
    if let Some(greeting) = answers["greeting"]["content"]["text"].as_str() {
        return text(format!("{name}: {greeting}"));
    }
    let asked = InputRequest::CreateMessage(CreateMessageRequest::new(prompt(name)));
    let asked = InputRequests::from([("greeting".to_owned(), asked)]);
    InputRequiredResult::new(Some(asked), Some(name.to_owned())).into()
}

type Answer = Response<BoxBody<Bytes, Infallible>>;

/// Answers `busy` with 429 and tells what arrives; everything else goes to the SDK.
async fn front(
    request: Request<Incoming>,
    sdk: StreamableHttpService<Tools, LocalSessionManager>,
) -> Result<Answer, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    if head.method == Method::POST {
        let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
        if sent["method"] == "subscriptions/listen" {
            event("listen");
        }
        if sent["method"] == "tools/call" && sent["params"]["name"] == "busy" {
            event("busy");
            let busy = Response::builder()
                .status(429)
                .header("Retry-After", "7")
                .header("Content-Type", "text/plain");
            return Ok(busy.body(Full::from("slow down").boxed()).expect("its parts are valid"));
        }
    } else if head.headers.contains_key("last-event-id") {
        event("resume");
    } else {
        event(&head.method.as_str().to_lowercase());
    }
    Ok(sdk.handle(Request::from_parts(head, Full::new(body))).await)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let tools = Tools { changed: broadcast::channel(16).0 };
    let sdk = StreamableHttpService::new(
        move || Ok(tools.clone()),
        Arc::new(LocalSessionManager::default()),
        Default::default(),
    );
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/mcp", listener.local_addr()?);
    println!("{}", json!({"event": "listening", "url": url}));
    loop {
        let (stream, _) = listener.accept().await?;
        let sdk = sdk.clone();
        tokio::spawn(
            http1::Builder::new().serve_connection(
                TokioIo::new(stream),
                service_fn(move |request| front(request, sdk.clone())),
            ),
        );
    }
}
