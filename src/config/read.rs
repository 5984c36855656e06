//! The keys, their defaults, and what must hold between them.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use http::Uri;
use tracing::level_filters::LevelFilter;

use super::{
    Auth, Config, Environment, Flags, Ledger, Log, Problems, State, Tls, problem,
    table::{Source, Table},
    upstream,
};
use crate::{proxy, server, server::Address};

/// The default of `listen`.
const LISTEN: &str = "127.0.0.1:7080";
/// The default of `admin`.
pub(crate) const ADMIN: &str = "127.0.0.1:7081";

pub(super) fn config(
    text: &str,
    file: Option<&Path>,
    flags: &Flags,
    environment: Environment<'_>,
) -> Result<Config, Problems> {
    let (root, errors) = toml::de::DeTable::parse_recoverable(text);
    let source = Source {
        text,
        file,
        environment,
        problems: RefCell::new(Problems::of(file)),
        secrets: RefCell::default(),
    };
    if !errors.is_empty() {
        for error in errors {
            let line = error.span().map(|span| source.line(span.start));
            source.problem(line, "", error.message());
        }
        // What is left of a text that is no TOML would only bring problems that are none.
        source.problems.borrow_mut().none()?;
    }

    let mut table = Table::root(&source, root.get_ref());
    let listen =
        address(&mut table, "listen", flags.listen.as_deref().filter(|flag| !flag.is_empty()), LISTEN);
    let admin = address(&mut table, "admin", flags.admin.as_deref(), ADMIN);
    let (limits, connections) = limits(table.table("limits"));
    let config = Config {
        state: state(&mut table, flags),
        drain: table.duration("drain").unwrap_or(Duration::from_secs(30)),
        log: log(table.table("log")),
        auth: auth(table.table("auth")),
        tls: tls(&mut table),
        ledger: ledger(table.table("ledger")),
        upstreams: upstreams(&mut table, flags),
        // One that is wrong is a problem already.
        listen: listen.unwrap_or(Address::Tcp(([127, 0, 0, 1], 7080).into())),
        admin,
        limits,
        connections,
        secrets: source.secrets.take(),
        file: file.map(Path::to_path_buf),
    };
    table.finish();
    let mut problems = source.problems.into_inner();
    config.check_between_keys(&mut problems);
    problems.none()?;
    Ok(config)
}

impl Config {
    /// What no single key can say.
    pub(super) fn check_between_keys(&self, problems: &mut Problems) {
        if self.admin.as_ref() == Some(&self.listen) && self.listen.port() != Some(0) {
            problems.add(None, "admin", "is the same address as listen");
        }
        if self.auth.open || self.auth.bearer.is_some() || self.listen.is_loopback() {
            return;
        }
        for upstream in self.upstreams.values() {
            if let Some((line, key)) = &upstream.credential_place {
                let reason = format!(
                    "whoever reaches {} would use this credential: set auth.bearer, or auth.open = true to allow it",
                    self.listen
                );
                problems.add(*line, key, reason);
            }
        }
    }
}

/// Where a listener is; `None`: nowhere, which only `admin` may say, or a problem.
fn address(table: &mut Table<'_>, key: &'static str, flag: Option<&str>, default: &str) -> Option<Address> {
    let parse = |text: &str| match text {
        "" if key == "admin" => Ok(None),
        text => text.parse().map(Some),
    };
    let set = table.line_of(key).is_some();
    let in_file = table.text(key, parse);
    match flag {
        Some(flag) => parse(flag)
            .map_err(|reason| table.source().problem(None, &format!("--{key}"), reason))
            .unwrap_or_default(),
        None if set => in_file.flatten(),
        None => default.parse().ok(),
    }
}

fn state(table: &mut Table<'_>, flags: &Flags) -> State {
    let source = table.source();
    let from_file = table.text("state", |text| {
        state_spec(text).map(|state| match state {
            State::Sqlite(path) => State::Sqlite(source.path(&path.to_string_lossy())),
            other => other,
        })
    });
    match flags.state.as_deref().filter(|flag| !flag.is_empty()) {
        Some(flag) => state_spec(flag)
            .and_then(without_password)
            .map_err(|reason| source.problem(None, "--state", reason))
            .unwrap_or(State::Memory),
        None => from_file.unwrap_or_else(|| default_state(source.environment)),
    }
}

/// A text of the environment may hold a password: no error repeats it.
fn state_spec(text: &str) -> Result<State, String> {
    if text == "memory:" {
        return Ok(State::Memory);
    }
    if let Some(path) = text.strip_prefix("sqlite:").filter(|path| !path.is_empty()) {
        return Ok(State::Sqlite(path.into()));
    }
    if text.starts_with("redis://") || text.starts_with("rediss://") {
        let url = text.parse::<Uri>().ok().filter(|url| url.host().is_some_and(|host| !host.is_empty()));
        let database = url.as_ref().map(|url| url.path().trim_start_matches('/'));
        if database.is_some_and(|database| database.is_empty() || database.parse::<u32>().is_ok()) {
            return Ok(State::Redis(text.into()));
        }
        return Err("must be \"redis://HOST:PORT/DB\" with a number as DB".into());
    }
    Err("must be \"memory:\", \"sqlite:PATH\", \"redis://HOST:PORT/DB\" or \"rediss://HOST:PORT/DB\"".into())
}

/// A flag shows in the list of processes.
fn without_password(state: State) -> Result<State, String> {
    match &state {
        State::Redis(url) if url.contains('@') => {
            Err("a password is not taken from the command line: write the URL into a file".into())
        }
        _ => Ok(state),
    }
}

/// The state directory that systemd names, else the XDG base directory. Without a home there is no place that outlives
/// the process.
fn default_state(environment: Environment<'_>) -> State {
    let set = |name| environment(name).filter(|value| !value.is_empty());
    // systemd separates several directories by a colon.
    let named = set("STATE_DIRECTORY").and_then(|list| list.split(':').next().map(PathBuf::from));
    let folder = named
        .or_else(|| set("XDG_STATE_HOME").map(|home| Path::new(&home).join("mcp-sidecar")))
        .or_else(|| set("HOME").map(|home| Path::new(&home).join(".local/state/mcp-sidecar")));
    folder.map_or(State::Memory, |folder| State::Sqlite(folder.join("state.db")))
}

fn log(mut table: Table<'_>) -> Log {
    let source = table.source();
    let text = table.text("format", |text| match text {
        "json" => Ok(false),
        "text" => Ok(true),
        _ => Err("must be \"json\" or \"text\"".into()),
    });
    let access = table.text("access", |text| match text {
        "" => Err("must be \"stdout\" or name a file".into()),
        "stdout" => Ok(None),
        path => Ok(Some(source.path(path))),
    });
    let level = table.text("level", |text| match text {
        "off" | "error" | "warn" | "info" | "debug" | "trace" => {
            text.parse::<LevelFilter>().map_err(|error| error.to_string())
        }
        _ => Err("must be \"off\", \"error\", \"warn\", \"info\", \"debug\" or \"trace\"".into()),
    });
    table.finish();
    Log { text: text.unwrap_or(false), access: access.flatten(), level: level.unwrap_or(LevelFilter::INFO) }
}

fn limits(mut table: Table<'_>) -> (proxy::Limits, server::Limits) {
    let client_stall = table.timeout("client_stall").unwrap_or(Duration::from_secs(5 * 60));
    let flow = proxy::Limits {
        request_body: table.size("request_body").unwrap_or(4 << 20),
        response_body: table.size("response_body").unwrap_or(64 << 20),
        event: table.size("event").unwrap_or(16 << 20),
        body_timeout: table.timeout("body_timeout").unwrap_or(Duration::from_secs(30)),
        calls: table.count("calls").unwrap_or(1000),
        streams: table.count("streams").unwrap_or(10_000),
        buffered: table.size("buffered").unwrap_or(256 << 20),
        client_stall,
    };
    let connections = server::Limits {
        connections: table.count("connections").unwrap_or(10_000),
        header_timeout: table.timeout("header_timeout").unwrap_or(Duration::from_secs(10)),
        client_stall,
    };
    table.finish();
    (flow, connections)
}

fn auth(mut table: Table<'_>) -> Auth {
    let auth = Auth {
        open: table.flag("open").unwrap_or(false),
        bearer: table.secret("bearer"),
        origins: table.strings("origins").unwrap_or_default(),
        hosts: table.strings("hosts").unwrap_or_default(),
    };
    // An origin is `scheme://host[:port]` (RFC 6454 § 6.2): one with a path would never match.
    let origin = |text: &String| {
        let rest = text.split_once("://").map_or("", |(_, rest)| rest);
        !rest.is_empty() && !rest.contains(['/', '?', '#', '@', ' '])
    };
    if !auth.origins.iter().all(origin) {
        table.problem("origins", "each must be scheme://host or scheme://host:port");
    }
    if auth.hosts.iter().any(|host| host.is_empty() || host.contains(['/', '@', ' '])) {
        table.problem("hosts", "each must be a host, with or without a port");
    }
    table.finish();
    auth
}

fn tls(table: &mut Table<'_>) -> Option<Tls> {
    let mut table = table.optional_table("tls")?;
    let (cert, key) = (table.path("cert"), table.path("key"));
    for name in ["cert", "key"] {
        if table.line_of(name).is_none() {
            table.problem(name, "is missing");
        }
    }
    table.finish();
    Some(Tls::new(cert?, key?))
}

fn ledger(mut table: Table<'_>) -> Ledger {
    let results = table.text("results", |text| match text {
        "off" => Ok(crate::ledger::Keep::Off),
        "memory" => Ok(crate::ledger::Keep::Memory),
        "store" => Ok(crate::ledger::Keep::Store),
        _ => Err("must be \"off\", \"memory\" or \"store\"".into()),
    });
    let max_total = table.size("max_total").unwrap_or(64 << 20);
    let ledger = Ledger {
        results: results.unwrap_or(crate::ledger::Keep::Memory),
        ttl: table.timeout("ttl").unwrap_or(Duration::from_secs(3600)),
        max_result: table.size("max_result").unwrap_or(1 << 20),
        max_total,
        keys_ttl: table.timeout("keys_ttl").unwrap_or(Duration::from_secs(30 * 24 * 3600)),
        max_keys: table.count("max_keys").unwrap_or(1_000_000),
        store_total: max_total,
    };
    table.finish();
    ledger
}

fn upstreams(table: &mut Table<'_>, flags: &Flags) -> BTreeMap<String, super::Upstream> {
    let source = table.source();
    let mut urls = flag_urls(source, flags);
    let mut upstreams = BTreeMap::new();
    let mut tables = table.table("upstreams");
    for (name, table) in tables.tables() {
        if let Some(reason) = upstream::unfit_name(&name) {
            source.problem(table.line(), &format!("upstreams.{}", problem::quoted(&name)), reason);
        }
        let url = urls.remove(&name);
        upstreams.extend(upstream::read(table, url.as_deref()).map(|upstream| (name, upstream)));
    }
    for (name, url) in urls {
        let table = Table::absent(source, vec!["upstreams".into(), name.clone()]);
        upstreams.extend(upstream::read(table, Some(&url)).map(|upstream| (name, upstream)));
    }
    upstreams
}

/// The URLs of `--upstream`, by name.
fn flag_urls(source: &Source<'_>, flags: &Flags) -> BTreeMap<String, String> {
    let mut urls = BTreeMap::new();
    for value in flags.upstream.iter().flat_map(|value| value.split_whitespace()) {
        // A `=` may also be in a URL's query: what is before it is a name only if it looks like none.
        let (name, url) = match value.split_once('=') {
            Some((name, url)) if !name.contains([':', '/', '?']) => (name, url),
            _ => ("mcp", value),
        };
        if let Some(reason) = upstream::unfit_name(name) {
            source.problem(None, "--upstream", reason);
        }
        if urls.insert(name.to_owned(), url.to_owned()).is_some() {
            source.problem(None, "--upstream", format!("{name} is given twice"));
        }
    }
    urls
}
