//! `serve`: wires everything, and lives until a signal ends it.

use std::{
    convert::Infallible,
    io::{self, IsTerminal},
    process::ExitCode,
    sync::Arc,
};

use http::{Request, Response};
use hyper::body::Incoming;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{oneshot, watch},
    task::block_in_place,
    time::{MissedTickBehavior, interval},
};
use tower::Service;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{Layer, filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use super::{FAILED, USAGE, in_runtime};
use crate::{
    account::{
        log::{self, Sink, Writer},
        metrics::Metrics,
    },
    admin::Admin,
    clock::Clock,
    config::{Config, Flags, Log, process_environment, reload},
    proxy::{self, Sidecar},
    relay::body::Body,
    server::{self, Address, Listener},
};

/// Connections to the admin listener at a time: probes and scrapers, not nodes.
const ADMIN_CONNECTIONS: usize = 256;

/// Bytes of access-log lines held for a slow output.
const LOG_BUFFER: usize = 4 * 1024 * 1024;

/// Reads the configuration and serves under it.
pub fn run(flags: Flags) -> ExitCode {
    let loaded = Config::load(&flags, &process_environment);
    match loaded.and_then(|config| reload::Reloader::new(flags, config)) {
        Ok((reloader, settings)) => {
            diagnose(&reloader.current().log);
            in_runtime(serve(reloader, settings))
        }
        Err(problems) => {
            eprintln!("{problems}");
            ExitCode::from(USAGE)
        }
    }
}

/// The diagnostic log, on stderr. Other crates' lines below a warning stay out: some show header values.
fn diagnose(log: &Log) {
    let targets =
        Targets::new().with_default(log.level.min(LevelFilter::WARN)).with_target("mcp_sidecar", log.level);
    let lines = fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    let lines = if log.text { lines.boxed() } else { lines.json().boxed() };
    tracing_subscriber::registry().with(lines.with_filter(targets)).init();
}

/// Serves until a signal has ended it.
async fn serve(mut reloader: reload::Reloader, settings: proxy::Settings) -> ExitCode {
    let started =
        Signals::new().map_err(|error| format!("can't wait for signals: {error}")).and_then(|signals| {
            let (nodes, admin) = bind(reloader.current())?;
            Ok((signals, nodes, admin))
        });
    let (mut signals, listener, admin_listener) = match started {
        Ok(started) => started,
        Err(reason) => {
            tracing::error!(reason, "can't start");
            return ExitCode::from(FAILED);
        }
    };
    announce(reloader.current(), listener.address(), admin_listener.as_ref().map(Listener::address));

    let flow = match Flow::new(settings, &reloader.current().log) {
        Ok(flow) => flow,
        Err(error) => {
            tracing::error!(%error, "can't open the access log");
            return ExitCode::from(FAILED);
        }
    };
    let admin = admin_listener.map(|listener| serve_admin(listener, reloader.current(), &flow));
    let (stop, stopped) = oneshot::channel::<()>();
    let nodes = tokio::spawn(server::run(listener, reloader.server(), service(&flow.sidecar), async {
        // A sender that is gone means the same.
        let _ = stopped.await;
    }));

    live(&mut reloader, &flow, admin.as_ref(), &mut signals).await;

    let drain = reloader.current().drain;
    tracing::info!(drain = ?drain, "draining");
    let end = async {
        flow.sidecar.drain(drain).await;
        // A listener that is gone is stopped.
        let _ = stop.send(());
        // It has no result, and a panic of it was reported where it happened.
        let _ = nodes.await;
    };
    let code = tokio::select! {
        () = end => ExitCode::SUCCESS,
        () = signals.terminate() => {
            tracing::warn!("second signal: not waiting for calls in flight");
            ExitCode::from(FAILED)
        }
    };
    block_in_place(|| flow.writer.close());
    code
}

/// Runs until the first signal to end; reads the configuration again when asked to and when files change.
async fn live(reloader: &mut reload::Reloader, flow: &Flow, admin: Option<&Admin>, signals: &mut Signals) {
    let mut poll = interval(reload::POLL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let settings = tokio::select! {
            _ = signals.term.recv() => return,
            _ = signals.int.recv() => return,
            _ = signals.hup.recv() => {
                flow.sink.reopen();
                block_in_place(|| reloader.reload(&process_environment))
            }
            _ = poll.tick() => block_in_place(|| reloader.poll(&process_environment)),
        };
        if let Some(settings) = settings {
            if let Some(admin) = admin {
                admin.allow(&settings.auth);
            }
            flow.sidecar.reload(settings);
        }
    }
}

/// Both listeners, or which address can't be bound and why.
fn bind(config: &Config) -> Result<(Listener, Option<Listener>), String> {
    let bind = |address: &Address| Listener::bind(address).map_err(|error| format!("{address}: {error}"));
    Ok((bind(&config.listen)?, config.admin.as_ref().map(bind).transpose()?))
}

/// Says where it listens, and what an operator should know about the configuration.
fn announce(config: &Config, listen: &Address, admin: Option<&Address>) {
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    if !config.without_effect.is_empty() {
        tracing::warn!(keys = config.without_effect.join(", "), "set, but without effect yet");
    }
    tracing::info!(listen = %listen, admin = admin.map(tracing::field::display), "listening");
}

/// Serves the admin listener for as long as the process lives.
fn serve_admin(listener: Listener, config: &Config, flow: &Flow) -> Admin {
    let sidecar = flow.sidecar.clone();
    let ready = move || if sidecar.is_draining() { Err("draining") } else { Ok(()) };
    let auth = proxy::Auth {
        origins: config.auth.origins.clone(),
        hosts: config.auth.hosts.clone(),
        ..proxy::Auth::default()
    };
    let admin = Admin::new(flow.sink.metrics().clone(), Box::new(ready), listener.address().is_loopback());
    admin.allow(&auth);
    let limits = server::Limits { connections: ADMIN_CONNECTIONS, ..config.connections.clone() };
    let (settings, fixed) = watch::channel(Arc::new(server::Settings { limits, tls: None }));
    let service = admin.clone();
    tokio::spawn(async move {
        server::run(listener, fixed, service, std::future::pending()).await;
        drop(settings);
    });
    admin
}

/// What connections call.
pub(super) fn service(
    sidecar: &Arc<Sidecar>,
) -> impl Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    let sidecar = sidecar.clone();
    tower::service_fn(move |request| sidecar.clone().handle(request))
}

/// What the process is told from outside.
struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        let on = |kind| signal(kind);
        Ok(Self {
            term: on(SignalKind::terminate())?,
            int: on(SignalKind::interrupt())?,
            hup: on(SignalKind::hangup())?,
        })
    }

    /// Ends with the next signal to end.
    async fn terminate(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

/// The flow and its access log.
struct Flow {
    sidecar: Arc<Sidecar>,
    sink: Sink,
    writer: Writer,
}

impl Flow {
    fn new(settings: proxy::Settings, log: &Log) -> io::Result<Self> {
        let log = log::Settings { file: log.access.clone(), text: log.text, buffer: LOG_BUFFER };
        let (sink, writer) = Sink::open(&log, Arc::new(Metrics::new()))?;
        Ok(Self { sidecar: Sidecar::new(settings, sink.clone(), Clock::system()), sink, writer })
    }
}
