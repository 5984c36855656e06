//! `serve`: wires everything, and lives until a signal ends it.

mod diagnostics;

use std::{
    convert::Infallible,
    fs::File,
    io::{self, IsTerminal},
    os::fd::AsFd,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use http::{Request, Response};
use hyper::body::Incoming;
use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{oneshot, watch},
    task::spawn_blocking,
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use tower::Service;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    Layer, Registry, filter::Targets, fmt, layer::SubscriberExt, reload as filter_reload,
    util::SubscriberInitExt,
};

use super::{FAILED, USAGE, in_one_thread};
use crate::{
    account::{log::Sink, metrics::Metrics},
    admin::{self, Admin},
    clock::Clock,
    config::{Config, Flags, Log, process_environment, reload},
    ledger::Ledger,
    lines::{Lines, Writer},
    proxy::{self, Sidecar},
    relay::Body,
    server::{self, Address, BadHead, Listener, Peer},
};

/// Connections to the admin listener at a time: probes and scrapers, not nodes.
const ADMIN_CONNECTIONS: usize = 256;

/// How long exchanges may take to end once their connections are gone.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Reads the configuration and serves under it.
pub fn run(flags: Flags) -> ExitCode {
    let loaded = Config::load(&flags, &process_environment);
    match loaded.and_then(|config| reload::Reloader::new(flags, config)) {
        Ok((reloader, settings)) => {
            let (level, lines, writer) = match diagnose(&reloader.current().log) {
                Ok(diagnosing) => diagnosing,
                Err(error) => {
                    eprintln!("mcp-sidecar: can't start: {error}");
                    return ExitCode::from(FAILED);
                }
            };
            let code = in_one_thread(serve(reloader, settings, level, &lines));
            writer.close();
            code
        }
        Err(problems) => {
            eprintln!("{problems}");
            ExitCode::from(USAGE)
        }
    }
}

/// Changes the level of the diagnostic log.
type Level = filter_reload::Handle<Targets, Registry>;

/// The diagnostic log, on stderr, from a thread of its own.
fn diagnose(log: &Log) -> io::Result<(Level, Arc<Lines>, Writer)> {
    let (targets, level) = filter_reload::Layer::new(targets(log.level));
    // A file of its own, so that a thread that waits for it holds no lock that `eprintln!` and panics wait for.
    let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let (lines, writer) = diagnostics::start(stderr)?;
    let layer = fmt::layer().with_writer(Arc::clone(&lines)).with_ansi(io::stderr().is_terminal());
    let layer = if log.text { layer.boxed() } else { layer.json().boxed() };
    tracing_subscriber::registry().with(layer.with_filter(targets)).init();
    Ok((level, lines, writer))
}

/// Other crates' lines below a warning stay out: some show header values.
fn targets(level: LevelFilter) -> Targets {
    Targets::new().with_default(level.min(LevelFilter::WARN)).with_target("mcp_sidecar", level)
}

/// Serves until a signal has ended it.
async fn serve(
    reloader: reload::Reloader,
    settings: proxy::Settings,
    level: Level,
    lines: &Arc<Lines>,
) -> ExitCode {
    let started =
        Signals::new().map_err(|error| format!("can't wait for signals: {error}")).and_then(|signals| {
            let (nodes, admin) = bind(reloader.current())?;
            Ok((signals, nodes, admin))
        });
    let (mut signals, listener, admin_listener) = match started {
        Ok(started) => started,
        Err(reason) => return failed(&reason),
    };
    let metrics = Arc::new(Metrics::new());
    let (sink, log) = match Sink::open(&reloader.current().access_log(), Arc::clone(&metrics)) {
        Ok(opened) => opened,
        Err(error) => return failed(&format!("can't open the access log: {error}")),
    };
    let store = match reloader.current().open_store().await {
        Ok(store) => store,
        Err(reason) => return failed(&reason),
    };
    let ledger = Ledger::start(store, settings.ledger.clone());
    announce(reloader.current(), listener.address(), admin_listener.as_ref().map(Listener::address));

    let sidecar = Sidecar::new(settings, Arc::clone(&ledger), sink.clone(), Clock::system());
    sidecar.show_in(&metrics);
    ledger.show_in(&metrics);
    sink.show_in(&metrics);
    diagnostics::show_in(&metrics, lines);
    let admin = admin_listener.map(|listener| {
        serve_admin(listener, reloader.current(), Arc::clone(&metrics), Arc::clone(&sidecar))
    });
    let (stop, stopped) = oneshot::channel::<()>();
    let nodes = tokio::spawn({
        let (server, service, refuse) = (reloader.server(), service(&sidecar), refuse(&sidecar));
        async move {
            let stop = async {
                // A sender that is gone means the same.
                let _ = stopped.await;
            };
            server::run(listener, server, service, refuse, &metrics.connections, stop).await;
        }
    });

    let logs = Logs { sink: sink.clone(), level };
    let reloader = live(reloader, &sidecar, &logs, admin.as_ref(), &mut signals).await;

    let drain = reloader.current().drain;
    let code = tokio::select! {
        () = sidecar.drain(drain) => ExitCode::SUCCESS,
        () = signals.terminate() => {
            tracing::warn!("second signal: not waiting for calls in flight");
            sidecar.drain(Duration::ZERO).await;
            ExitCode::SUCCESS
        }
    };
    // A listener that is gone is stopped.
    let _ = stop.send(());
    // It has no result, and a panic of it was reported where it happened.
    let _ = nodes.await;
    settled(&sink.metrics().in_flight).await;
    ledger.close().await;
    // It has told what it could not write. It blocks, and nothing else is left to run.
    let _ = log.close();
    code
}

/// Waits until every exchange has written its line: their connections are gone, but what the runtime has not dropped yet
/// still holds some.
async fn settled(in_flight: &Gauge) {
    let settled = async {
        while in_flight.get() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    if timeout(LAST_LINES, settled).await.is_err() {
        tracing::warn!(exchanges = in_flight.get(), "ends with exchanges open");
    }
}

fn failed(reason: &str) -> ExitCode {
    tracing::error!(reason, "can't start");
    ExitCode::from(FAILED)
}

/// The flow, as connections call it.
fn service(
    sidecar: &Arc<Sidecar>,
) -> impl Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ use<> {
    let sidecar = Arc::clone(sidecar);
    tower::service_fn(move |request| Arc::clone(&sidecar).handle(request))
}

/// What connections answer to what is no request.
fn refuse(sidecar: &Arc<Sidecar>) -> impl FnOnce(&Peer, &BadHead) -> Response<Body> + Clone + Send + use<> {
    let sidecar = Arc::clone(sidecar);
    move |peer, why| sidecar.refuse(peer, why)
}

/// Runs until the first signal to end; reads the configuration again when asked to and when files change. Gives the
/// reloader back.
async fn live(
    mut reloader: reload::Reloader,
    sidecar: &Sidecar,
    logs: &Logs,
    admin: Option<&Admin>,
    signals: &mut Signals,
) -> reload::Reloader {
    let mut poll = interval(reload::POLL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let asked = tokio::select! {
            _ = signals.term.recv() => return reloader,
            _ = signals.int.recv() => return reloader,
            _ = signals.hup.recv() => {
                logs.sink.reopen();
                true
            }
            _ = poll.tick() => false,
        };
        let settings;
        (reloader, settings) = look(reloader, asked).await;
        if let Some(settings) = settings {
            if let Some(admin) = admin {
                admin.allow(&settings.auth);
            }
            sidecar.reload(settings);
            logs.follow(&reloader.current().log);
            // Said once it is true: who reads the line may ask at once.
            tracing::info!("configuration reloaded");
        }
    }
}

/// Reads the configuration again where no exchange waits for it: if `asked`, else if its files have changed.
async fn look(mut reloader: reload::Reloader, asked: bool) -> (reload::Reloader, Option<proxy::Settings>) {
    let read = spawn_blocking(move || {
        let settings = match asked {
            true => reloader.reload(&process_environment),
            false => reloader.poll(&process_environment),
        };
        (reloader, settings)
    });
    // It can't be cancelled once it runs: all that fails it is a panic, which is not for here to end.
    read.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

/// Both logs, as far as a reload changes them.
struct Logs {
    sink: Sink,
    level: Level,
}

impl Logs {
    fn follow(&self, log: &Log) {
        self.sink.redirect(log.access.as_deref());
        // Fails only where nothing is logged any more.
        let _ = self.level.reload(targets(log.level));
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
    tracing::info!(listen = %listen, admin = admin.map(tracing::field::display), "listening");
}

/// Serves the admin listener for as long as the process lives.
fn serve_admin(listener: Listener, config: &Config, metrics: Arc<Metrics>, sidecar: Arc<Sidecar>) -> Admin {
    let auth = sidecar.settings().auth.clone();
    let ready = move || match () {
        () if sidecar.is_draining() => Err("draining"),
        () if sidecar.is_store_away() => Err("the state store is away"),
        () => Ok(()),
    };
    let admin = Admin::new(Arc::clone(&metrics), Box::new(ready), listener.address().is_loopback());
    admin.allow(&auth);
    let limits = server::Limits { connections: ADMIN_CONNECTIONS, ..config.connections.clone() };
    let (settings, fixed) = watch::channel(Arc::new(server::Settings { limits, tls: None }));
    let service = admin.clone();
    tokio::spawn(async move {
        let (open, never) = (&metrics.admin_connections, std::future::pending());
        server::run(listener, fixed, service, admin::refuse, open, never).await;
        drop(settings);
    });
    admin
}

/// A write beyond the limit of a file's size (`ulimit -f`) is to fail as one to a full disk does, and not to end the process:
/// what is handled does not. The number is that of Linux, but for MIPS, and of the BSDs.
const SIGXFSZ: i32 = 25;

/// What the process is told from outside.
struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        let on = |kind| signal(kind);
        // It stays handled when the handle is gone.
        drop(on(SignalKind::from_raw(SIGXFSZ))?);
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
