//! One `[upstreams.NAME]`.

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, Uri, uri::Authority};

use super::{
    Upstream,
    table::Table,
    watch::{self, Stamp},
};
use crate::{
    listing::{Approval, Override, Rules},
    policy::Policy,
    proxy::{self, Credential, LegacyDisconnect},
    relay,
    upstream::{self, tls},
};

/// How long an unused connection is kept. Servers that MCP is often built on close theirs after 5 s (uvicorn,
/// Node.js), and a request that meets that close has an unknown outcome.
const IDLE_CONNECTION: Duration = Duration::from_secs(4);
/// The default of `connect_timeout`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Unused connections kept per upstream: the default of `calls`, so that a burst's connections serve the next one.
const IDLE_CONNECTIONS: usize = 100;

/// What an upstream's connections depend on: while it is equal they are kept.
#[derive(Clone, Debug)]
pub struct Connection {
    /// The endpoint, without user info.
    pub url: Uri,
    /// Bound of DNS, connect and TLS together.
    pub connect_timeout: Duration,
    /// TLS files, all optional.
    pub tls: tls::Files,
    /// Offer HTTP/1.1 only.
    pub http1_only: bool,
    /// How the TLS files looked when this was read.
    stamps: Vec<Stamp>,
    pub(super) tls_line: Option<usize>,
}

impl PartialEq for Connection {
    fn eq(&self, other: &Self) -> bool {
        let parts = |c: &Self| (c.url.clone(), c.connect_timeout, c.http1_only, c.tls_paths());
        parts(self) == parts(other) && self.stamps == other.stamps
    }
}

impl Connection {
    fn tls_paths(&self) -> [Option<PathBuf>; 3] {
        [self.tls.ca.clone(), self.tls.cert.clone(), self.tls.key.clone()]
    }

    /// The TLS files there are.
    pub(super) fn files(&self) -> impl Iterator<Item = PathBuf> {
        self.tls_paths().into_iter().flatten()
    }

    /// An upstream with these connections, none made yet.
    pub(super) fn open(&self, name: &str) -> Result<Arc<upstream::Upstream>, String> {
        let https = self.url.scheme() == Some(&http::uri::Scheme::HTTPS);
        let tls = if https { Some(tls::client(&self.tls, self.http1_only)?) } else { None };
        Ok(Arc::new(upstream::Upstream::new(upstream::Settings {
            name: name.into(),
            url: self.url.clone(),
            connect_timeout: self.connect_timeout,
            tls,
            http1_only: self.http1_only,
            idle_connections: IDLE_CONNECTIONS,
            idle_timeout: IDLE_CONNECTION,
        })))
    }

    /// Whether requests leave this host unencrypted.
    pub(super) fn is_plain_beyond_loopback(&self) -> bool {
        let host = self.url.host().unwrap_or_default().trim_matches(['[', ']']);
        let loopback = host.eq_ignore_ascii_case("localhost")
            || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.to_canonical().is_loopback());
        self.url.scheme() == Some(&http::uri::Scheme::HTTP) && !loopback
    }
}

/// A file of an upstream that can't be used.
pub(super) struct Unusable {
    pub(super) line: Option<usize>,
    /// The key within the upstream's table that names it.
    pub(super) key: &'static str,
    pub(super) reason: String,
}

impl Upstream {
    /// The route of this upstream, over what an earlier one of its name has that still holds.
    pub(super) fn route_over(
        &self,
        name: &str,
        earlier: Option<&(Connection, Arc<proxy::Route>)>,
    ) -> Result<proxy::Route, Unusable> {
        let rules = self.rules()?;
        let open = || {
            let line = self.connection.tls_line;
            self.connection.open(name).map_err(|reason| Unusable { line, key: "tls", reason })
        };
        let Some((connection, earlier)) = earlier else {
            return Ok(self.route(name, open()?, rules, proxy::RouteState::default()));
        };
        let mut state =
            proxy::RouteState { in_flight: earlier.state.in_flight.clone(), ..proxy::RouteState::default() };
        if *connection != self.connection {
            return Ok(self.route(name, open()?, rules, state));
        }
        state.moved = earlier.state.moved.load_full().into();
        Ok(self.route(name, Arc::clone(&earlier.upstream), rules, state))
    }

    /// What the operator says of its tools. The approved listing is read here, at start and at each reload.
    fn rules(&self) -> Result<Rules, Unusable> {
        let approved = self.approved.as_deref().map(Approval::read).transpose();
        let approved =
            approved.map_err(|reason| Unusable { line: self.approved_line, key: "approved", reason })?;
        Ok(Rules { overrides: self.tools.clone(), approved: approved.map(Arc::new) })
    }

    fn route(
        &self,
        name: &str,
        upstream: Arc<upstream::Upstream>,
        listing: Rules,
        state: proxy::RouteState,
    ) -> proxy::Route {
        proxy::Route {
            name: name.into(),
            upstream,
            headers: self.headers.clone(),
            credential: self.credential.clone(),
            idle_timeout: self.idle_timeout,
            max_timeout: self.max_timeout,
            calls: self.calls,
            busy_503: self.busy_503,
            idempotency_header: self.idempotency_header,
            cancel_grace: self.cancel_grace,
            legacy_disconnect: self.legacy_disconnect,
            relay: self.relay.clone(),
            listen: self.listen.clone(),
            listing,
            policy: self.policy.clone(),
            state,
        }
    }
}

/// Why a name can't be the first segment of a path that nodes ask; `None`: it can.
pub(super) fn unfit_name(name: &str) -> Option<&'static str> {
    let fit = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    if name.is_empty() || !name.bytes().all(fit) {
        return Some("an upstream's name is one path segment of letters, digits, `-`, `.`, `_` and `~`");
    }
    [".well-known", ".", ".."].contains(&name).then_some("this name is not free for an upstream")
}

/// A URL taken apart: where to connect, and the credential that its user info is. No error repeats the text, which
/// may hold a password.
pub(super) fn url(text: &str) -> Result<(Uri, Option<Credential>), String> {
    const FORM: &str = "must be an http or https URL such as \"https://api.example.com/mcp\"";
    if text.contains('#') {
        return Err("a URL of an upstream has no fragment".into());
    }
    let uri: Uri = text.parse().map_err(|_| FORM.to_owned())?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(FORM.into());
    }
    let mut parts = uri.into_parts();
    let authority = parts.authority.take().ok_or(FORM)?;
    let (user_info, host) = match authority.as_str().rsplit_once('@') {
        Some((user_info, host)) => (Some(user_info), host),
        None => (None, authority.as_str()),
    };
    let host: Authority = host.parse().map_err(|_| FORM.to_owned())?;
    let has_port = host.as_str().len() > host.host().len();
    if host.host().is_empty() || has_port && host.port_u16().is_none() {
        return Err(FORM.into());
    }
    let credential = user_info.map(basic).transpose()?;
    parts.authority = Some(host);
    let uri = Uri::from_parts(parts).map_err(|_| FORM.to_owned())?;
    Ok((uri, credential))
}

/// `Authorization: Basic` of a URL's user info (RFC 7617 § 2; percent-encoding: RFC 3986 § 3.2.1).
fn basic(user_info: &str) -> Result<Credential, String> {
    let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
    let mut pair = percent_decoded(user);
    pair.push(b':');
    pair.extend(percent_decoded(password));
    let mut value = HeaderValue::try_from(format!("Basic {}", BASE64_STANDARD.encode(pair)))
        .map_err(|_| "user info that can't be sent".to_owned())?;
    value.set_sensitive(true);
    Ok(Credential::Basic(value))
}

fn percent_decoded(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let hex = |at: usize| bytes.get(at).and_then(|byte| char::from(*byte).to_digit(16));
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        match (bytes[at], hex(at + 1), hex(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push(u8::try_from(high * 16 + low).unwrap_or(b'%'));
                at += 3;
            }
            (byte, ..) => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    decoded
}

/// Reads one upstream; `flag` is the URL that a flag gives it.
pub(super) fn read(mut table: Table<'_>, flag: Option<&str>) -> Option<Upstream> {
    let from_file = table.text("url", url);
    let found = match flag {
        Some(text) => {
            let found = url(text).and_then(|(url, user_info)| match user_info {
                None => Ok((url, None)),
                Some(_) => {
                    Err("a credential is not taken from the command line: name a bearer in a file".into())
                }
            });
            found.map_err(|reason: String| table.source().problem(None, "--upstream", reason)).ok()
        }
        None => {
            if from_file.is_none() && table.line_of("url").is_none() {
                table.problem("url", "is missing");
            }
            from_file
        }
    };
    let user_info = found.as_ref().and_then(|(_, credential)| credential.clone());
    let bearer = table.secret("bearer").map(Credential::Bearer);
    if user_info.is_some() && bearer.is_some() {
        table.problem("bearer", "the URL has user info: an upstream has one credential");
    }
    let credential_key = if bearer.is_some() { "bearer" } else { "url" };
    let credential = bearer.or(user_info);
    let connection = connection(&mut table, found.map(|(url, _)| url));
    let upstream = Upstream {
        credential_place: credential
            .as_ref()
            .map(|_| (table.line_of(credential_key), table.key(credential_key))),
        connection: connection.unwrap_or_else(Connection::nowhere),
        headers: headers(&mut table),
        credential,
        idle_timeout: table.timeout("idle_timeout").unwrap_or(Duration::from_secs(5 * 60)),
        max_timeout: table.timeout("max_timeout").unwrap_or(Duration::from_secs(3600)),
        calls: table.count("calls").unwrap_or(100),
        busy_503: table.flag("busy_503").unwrap_or(true),
        idempotency_header: table.flag("idempotency_header").unwrap_or(false),
        cancel_grace: table.duration("cancel_grace").unwrap_or(Duration::from_secs(2)),
        legacy_disconnect: table.text("legacy_disconnect", disconnect).unwrap_or_default(),
        approved_line: table.line_of("approved"),
        approved: table.path("approved"),
        relay: relay_settings(&mut table),
        listen: listen(table.table("listen")),
        policy: policy(table.table("policy")),
        tools: tools(&mut table),
    };
    table.finish();
    Some(upstream)
}

impl Connection {
    /// Stands in where the URL was wrong: the configuration is refused anyway, but the rest of it is still checked.
    fn nowhere() -> Self {
        Self::of(Uri::from_static("http://localhost/"))
    }

    /// Connections to this URL, everything else at its default.
    pub(super) fn of(url: Uri) -> Self {
        Self {
            url,
            connect_timeout: CONNECT_TIMEOUT,
            tls: tls::Files::default(),
            http1_only: false,
            stamps: Vec::new(),
            tls_line: None,
        }
    }
}

fn connection(table: &mut Table<'_>, url: Option<Uri>) -> Option<Connection> {
    let connect_timeout = table.timeout("connect_timeout").unwrap_or(CONNECT_TIMEOUT);
    let http1_only = table.flag("http1_only").unwrap_or(false);
    let mut files = tls::Files::default();
    let mut tls_line = None;
    if let Some(mut tls) = table.optional_table("tls") {
        tls_line = tls.line();
        files = tls::Files { ca: tls.path("ca"), cert: tls.path("cert"), key: tls.path("key") };
        if files.cert.is_some() != files.key.is_some() {
            let missing = if files.cert.is_none() { "cert" } else { "key" };
            tls.problem(missing, "is missing: a client certificate has both cert and key");
        }
        tls.finish();
        if url.as_ref().is_some_and(|url| url.scheme_str() == Some("http")) {
            table.problem("tls", "the URL says http: TLS settings would have no effect");
        }
    }
    let mut connection =
        Connection { url: url?, connect_timeout, tls: files, http1_only, stamps: Vec::new(), tls_line };
    connection.stamps = connection.files().map(|path| watch::stamp(&path)).collect();
    Some(connection)
}

/// Headers that are the sidecar's own affair on the way upstream: framing, hop by hop (RFC 9110 § 7.6.1), target.
pub(super) const NOT_CONFIGURABLE: &[&str] = &[
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "via",
];

fn headers(table: &mut Table<'_>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let Some(mut entries) = table.optional_table("headers") else { return headers };
    for (name, value) in entries.texts() {
        let parsed = HeaderName::try_from(&name).map_err(|_| "not the name of a header");
        let parsed = parsed.and_then(|name| match name.as_str() {
            "authorization" => Err("a credential is not written here: use bearer"),
            other if NOT_CONFIGURABLE.contains(&other) => Err("this header is set by the sidecar"),
            _ => Ok(name),
        });
        let value = HeaderValue::try_from(&value).map_err(|_| "not a value that a header can carry");
        match parsed.and_then(|name| Ok((name, value?))) {
            Ok((name, mut value)) => {
                // It may be an API key.
                value.set_sensitive(true);
                headers.append(name, value);
            }
            Err(reason) => entries.problem(&name, reason),
        }
    }
    headers
}

fn disconnect(text: &str) -> Result<LegacyDisconnect, String> {
    match text {
        "auto" => Ok(LegacyDisconnect::Auto),
        "close" => Ok(LegacyDisconnect::Close),
        "cancel" => Ok(LegacyDisconnect::Cancel),
        _ => Err("must be \"auto\", \"close\" or \"cancel\"".into()),
    }
}

fn relay_settings(table: &mut Table<'_>) -> relay::Settings {
    let mut keepalive = table.table("keepalive");
    let mut progress = table.table("progress");
    let settings = relay::Settings {
        queue: progress.count("queue").unwrap_or(64),
        queue_bytes: progress.size("queue_bytes").unwrap_or(1 << 20),
        burst: progress.count("burst").and_then(|burst| u32::try_from(burst).ok()).unwrap_or(8),
        min_interval: progress.duration("min_interval").unwrap_or(Duration::from_millis(100)),
        coalesce: progress.flag("coalesce").unwrap_or(true),
        keepalive: keepalive.duration("interval").unwrap_or(Duration::from_secs(15)),
    };
    progress.finish();
    keepalive.finish();
    settings
}

fn listen(mut table: Table<'_>) -> relay::listen::Settings {
    let listen = relay::listen::Settings {
        reconnect: table.flag("reconnect").unwrap_or(true),
        give_up: table.timeout("give_up").unwrap_or(Duration::from_secs(5 * 60)),
    };
    table.finish();
    listen
}

fn policy(mut table: Table<'_>) -> Policy {
    let mut globs = |key| {
        let globs = table.strings(key)?;
        if globs.iter().any(String::is_empty) {
            table.problem(key, "a pattern must not be empty");
        }
        Some(globs)
    };
    let allow = globs("allow").unwrap_or_else(|| vec!["*".into()]);
    let policy = Policy::new(allow, globs("deny").unwrap_or_default());
    table.finish();
    policy
}

fn tools(table: &mut Table<'_>) -> HashMap<String, Override> {
    let Some(mut tools) = table.optional_table("tools") else { return HashMap::new() };
    let read = |(name, mut table): (String, Table<'_>)| {
        let tool = Override {
            read_only: table.flag("read_only"),
            idempotent: table.flag("idempotent"),
            honours_key: table.flag("honours_key"),
            resume: table.flag("resume"),
        };
        table.finish();
        (name, tool)
    };
    tools.tables().into_iter().map(read).collect()
}
