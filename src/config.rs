//! Text to checked settings: a TOML file, flags and defaults become one [`Config`], or every problem at once.
//!
//! Precedence is flag, environment, file, default. Flags and their environment variables
//! arrive as [`Flags`]; the environment is otherwise only asked for secrets and for where state lives, through a
//! function, so that tests need not set variables.
//!
//! No module imports this one: it fills the settings types that the others define.

mod problem;
mod read;
pub mod reload;
mod remote;
mod secret;
mod table;
mod units;
mod upstream;
mod watch;

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use http::HeaderMap;

pub use problem::{Problem, Problems};
pub(crate) use read::ADMIN;
pub use remote::Remote;
pub use secret::SecretFile;
pub use upstream::Connection;

use crate::{
    account, certificate, ledger, listing,
    policy::Policy,
    proxy, relay,
    secret::Secret,
    server::{self, Address},
    store::{self, Store},
    upstream::tls,
};

/// The environment, asked by name.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What the process' environment says.
pub fn process_environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The flags of `serve`, each with its environment variable.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Flags {
    /// The configuration file (TOML)
    #[arg(long, value_name = "FILE", env = "MCP_SIDECAR_CONFIG")]
    pub config: Option<PathBuf>,
    /// Where nodes connect: IP:PORT, localhost:PORT or unix:/path [default: 127.0.0.1:7080]
    #[arg(long, value_name = "ADDR", env = "MCP_SIDECAR_LISTEN")]
    pub listen: Option<String>,
    /// Where health and metrics are served; an empty value turns it off [default: 127.0.0.1:7081]
    #[arg(long, value_name = "ADDR", env = "MCP_SIDECAR_ADMIN")]
    pub admin: Option<String>,
    /// A remote MCP server, served at /NAME (at /mcp without a name); may be given several times, in the
    /// environment separated by spaces. Of an upstream that the file names too, it replaces the URL
    #[arg(long, value_name = "[NAME=]URL", env = "MCP_SIDECAR_UPSTREAM", hide_env_values = true)]
    pub upstream: Vec<String>,
    /// Where state lives: memory:, sqlite:PATH, redis://HOST:PORT/DB or rediss://... [default: a file in the
    /// state directory]
    #[arg(long, value_name = "SPEC", env = "MCP_SIDECAR_STATE", hide_env_values = true)]
    pub state: Option<String>,
}

/// Everything the configuration says, checked.
#[derive(Debug)]
pub struct Config {
    /// Where nodes connect.
    pub listen: Address,
    /// Health, metrics and the admin API; `None`: off.
    pub admin: Option<Address>,
    /// Where state lives.
    pub state: State,
    /// How long calls in flight may finish at SIGTERM.
    pub drain: Duration,
    /// Both logs.
    pub log: Log,
    /// Bounds of the flow.
    pub limits: proxy::Limits,
    /// Bounds of connections.
    pub connections: server::Limits,
    /// Who may ask.
    pub auth: Auth,
    /// TLS on `listen`.
    pub tls: Option<Tls>,
    /// How committed results are kept.
    pub ledger: Ledger,
    /// The upstreams by name.
    pub upstreams: BTreeMap<String, Upstream>,
    /// The secrets that live in files.
    pub secrets: Vec<SecretFile>,
    /// The file this came from.
    pub file: Option<PathBuf>,
}

/// `[log]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// For a terminal instead of JSON; both logs.
    pub text: bool,
    /// The access log's file; `None`: stdout.
    pub access: Option<PathBuf>,
    /// Of the diagnostic log.
    pub level: tracing::level_filters::LevelFilter,
}

/// `[auth]`.
#[derive(Clone, Debug, Default)]
pub struct Auth {
    /// A listener beyond loopback may lend an upstream's credential to anyone.
    pub open: bool,
    /// Asked of every node.
    pub bearer: Option<Secret>,
    /// Further `Origin` values.
    pub origins: Vec<String>,
    /// Further `Host` values on a loopback listener.
    pub hosts: Vec<String>,
}

/// `[tls]`: PEM files. Equal while they name the same files and those look as they did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// How the files looked when this was read.
    stamps: [watch::Stamp; 2],
}

impl Tls {
    fn new(cert: PathBuf, key: PathBuf) -> Self {
        let stamps = [watch::stamp(&cert), watch::stamp(&key)];
        Self { cert, key, stamps }
    }
}

/// Where state lives.
#[derive(Clone, PartialEq, Eq)]
pub enum State {
    /// Gone with the process.
    Memory,
    /// A database file.
    Sqlite(PathBuf),
    /// A shared server, as its URL, which may hold a password.
    Redis(String),
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("Memory"),
            Self::Sqlite(path) => f.debug_tuple("Sqlite").field(path).finish(),
            Self::Redis(_) => f.write_str("Redis"),
        }
    }
}

/// `[ledger]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// Where committed results wait for a replay.
    pub results: ledger::Keep,
    /// How long they wait.
    pub ttl: Duration,
    /// Bytes of one.
    pub max_result: usize,
    /// Bytes of all.
    pub max_total: usize,
    /// How long the marks of keys are kept.
    pub keys_ttl: Duration,
    /// How many marks are kept.
    pub max_keys: usize,
    /// Bytes of all results that wait in the state store: what [`Ledger::max_total`] was when that was opened.
    pub store_total: usize,
}

impl Ledger {
    fn settings(&self) -> ledger::Settings {
        ledger::Settings {
            results: self.results,
            ttl: self.ttl,
            max_result: self.max_result,
            max_total: self.max_total,
            keys_ttl: self.keys_ttl,
        }
    }
}

/// One `[upstreams.NAME]`.
#[derive(Debug)]
pub struct Upstream {
    /// What its connections depend on.
    pub connection: Connection,
    /// Added to every request.
    pub headers: HeaderMap,
    /// Its own credential.
    pub credential: Option<proxy::Credential>,
    /// No useful activity on a call.
    pub idle_timeout: Duration,
    /// From the start of the attempt.
    pub max_timeout: Duration,
    /// Requests in flight.
    pub calls: usize,
    /// A 503 that names a wait is busy too.
    pub busy_503: bool,
    /// Also send `Idempotency-Key`.
    pub idempotency_header: bool,
    /// How long a legacy cancel waits for its answer.
    pub cancel_grace: Duration,
    /// What a legacy node's hang-up means.
    pub legacy_disconnect: proxy::LegacyDisconnect,
    /// The listing pin.
    pub approved: Option<PathBuf>,
    /// How its streams are relayed.
    pub relay: relay::Settings,
    /// How its listen streams are kept.
    pub listen: relay::listen::Settings,
    /// Which tools may be called.
    pub policy: Policy,
    /// What the operator knows better than the listing, by tool.
    pub tools: HashMap<String, listing::Override>,
    /// The line of what lends its credential, for the check against an open relay.
    credential_place: Option<(Option<usize>, String)>,
    /// The line of `approved`.
    approved_line: Option<usize>,
}

/// The upstreams as they are in use: their connections are kept over reloads as long as what they depend on stays, and
/// what is in flight goes on being counted.
#[derive(Debug, Default)]
pub struct Pools(HashMap<String, (Connection, Arc<proxy::Route>)>);

impl Config {
    /// Reads the file that the flags name, and the flags.
    ///
    /// # Errors
    ///
    /// Every problem there is, each with its place, key and reason.
    pub fn load(flags: &Flags, environment: Environment<'_>) -> Result<Self, Problems> {
        let file = flags.config.as_deref().filter(|path| !path.as_os_str().is_empty());
        let text = match file {
            None => String::new(),
            Some(path) => {
                std::fs::read_to_string(path).map_err(|error| Problems::unreadable(path, &error))?
            }
        };
        Self::from_text(&text, file, flags, environment)
    }

    /// The same from a text that is at hand; `file` is where it came from.
    ///
    /// # Errors
    ///
    /// As [`Config::load`].
    pub fn from_text(
        text: &str,
        file: Option<&Path>,
        flags: &Flags,
        environment: Environment<'_>,
    ) -> Result<Self, Problems> {
        read::config(text, file, flags, environment)
    }

    /// Refuses a configuration that serves nothing, such as a file that was cut short.
    pub(crate) fn require_upstream(&self) -> Result<(), Problems> {
        let mut problems = Problems::of(self.file.as_deref());
        if self.upstreams.is_empty() {
            problems.add(None, "upstreams", "no upstream: name one as [upstreams.NAME] or with --upstream");
        }
        problems.none()
    }

    /// The settings of the flow, with new connections.
    ///
    /// # Errors
    ///
    /// TLS files and approved listings that can't be used.
    pub fn proxy_settings(&self) -> Result<proxy::Settings, Problems> {
        self.proxy_settings_over(&mut Pools::default())
    }

    /// The settings of the flow; upstreams whose connections would be made as before keep them. `pools` is left as
    /// it was if there is an error.
    ///
    /// # Errors
    ///
    /// As [`Config::proxy_settings`].
    pub fn proxy_settings_over(&self, pools: &mut Pools) -> Result<proxy::Settings, Problems> {
        let mut problems = Problems::of(self.file.as_deref());
        let mut kept = HashMap::new();
        let mut routes = HashMap::new();
        for (name, upstream) in &self.upstreams {
            match upstream.route_over(name, pools.0.get(name)) {
                Ok(route) => {
                    let route = Arc::new(route);
                    kept.insert(name.clone(), (upstream.connection.clone(), Arc::clone(&route)));
                    routes.insert(name.clone(), route);
                }
                Err(unusable) => problems.add(
                    unusable.line,
                    &format!("upstreams.{}.{}", problem::quoted(name), unusable.key),
                    unusable.reason,
                ),
            }
        }
        problems.none()?;
        pools.0 = kept;
        let auth = proxy::Auth {
            bearer: self.auth.bearer.clone(),
            origins: self.auth.origins.clone(),
            hosts: self.auth.hosts.clone(),
            loopback: self.listen.is_loopback(),
        };
        Ok(proxy::Settings { limits: self.limits.clone(), auth, ledger: self.ledger.settings(), routes })
    }

    /// Opens the state store. Where the default file can't be made the error says how to choose another.
    ///
    /// # Errors
    ///
    /// In words: the store can't be opened, or is of a newer version.
    pub async fn open_store(&self) -> Result<Arc<dyn Store>, String> {
        let (spec, place) = match &self.state {
            State::Memory => (store::Spec::Memory, "memory".to_owned()),
            State::Sqlite(path) => (store::Spec::Sqlite(path.clone()), path.display().to_string()),
            State::Redis(url) => {
                let tls = tls::client(&tls::Files::default(), true)?;
                let settings =
                    store::RedisSettings::from_url(url, &tls).map_err(|error| format!("state: {error}"))?;
                let place = settings.to_string();
                (store::Spec::Redis(settings), place)
            }
        };
        let bounds =
            store::Bounds { max_keys: self.ledger.max_keys, max_result_bytes: self.ledger.store_total };
        store::open(&spec, bounds).await.map_err(|error| format!("state: {place}: {error}"))
    }

    /// The settings of the listener for nodes.
    ///
    /// # Errors
    ///
    /// TLS files that can't be used.
    pub fn server_settings(&self) -> Result<server::Settings, Problems> {
        let tls = self.tls.as_ref().map(|tls| server::tls::acceptor(&tls.cert, &tls.key)).transpose();
        let tls = tls.map_err(|reason| {
            let mut problems = Problems::of(self.file.as_deref());
            problems.add(None, "tls", reason);
            problems
        })?;
        Ok(server::Settings { limits: self.connections.clone(), tls })
    }

    /// The same after `earlier`, which was made of `old`: certificates that did not change are not read again, so that
    /// one that has expired meanwhile does not stand in the way of another change.
    fn server_settings_over(
        &self,
        old: &Self,
        earlier: &server::Settings,
    ) -> Result<server::Settings, Problems> {
        if self.tls.is_some() && self.tls == old.tls {
            return Ok(server::Settings { limits: self.connections.clone(), tls: earlier.tls.clone() });
        }
        self.server_settings()
    }

    /// The settings of the access log.
    pub fn access_log(&self) -> account::log::Settings {
        // Enough for a burst of some 10,000 lines while a slow reader of stdout catches up.
        const BUFFER: usize = 8 << 20;
        account::log::Settings { file: self.log.access.clone(), text: self.log.text, buffer: BUFFER }
    }

    /// What an operator should hear at start although it is allowed.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for (name, upstream) in &self.upstreams {
            if upstream.connection.is_plain_beyond_loopback() {
                warnings.push(format!("upstream {name} is reached without TLS beyond this host"));
            }
        }
        warnings.extend(self.stale_authorities());
        if self.admin.as_ref().is_some_and(|address| !address.is_loopback()) {
            warnings.push("the admin listener is beyond loopback and asks for no credential".into());
        }
        warnings
    }

    /// Of each upstream whose `ca` has no certificate that is valid now.
    fn stale_authorities(&self) -> Vec<String> {
        let stale = self.upstreams.iter().filter_map(|(name, upstream)| {
            let stale = certificate::stale_authorities(upstream.connection.tls.ca.as_deref()?)?;
            Some(format!("the ca of upstream {name}: {stale}"))
        });
        stale.collect()
    }

    /// Every file whose change means that the configuration is read again.
    pub fn files(&self) -> Vec<PathBuf> {
        let upstreams = self.upstreams.values();
        let upstreams =
            upstreams.flat_map(|upstream| upstream.connection.files().chain(upstream.approved.clone()));
        let listener = self.tls.iter().flat_map(|tls| [tls.cert.clone(), tls.key.clone()]);
        self.file.iter().cloned().chain(listener).chain(upstreams).collect()
    }
}

#[cfg(test)]
mod tests;
