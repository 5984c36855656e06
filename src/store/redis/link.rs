//! One connection that all questions share, made when it is needed and given up at the first sign of trouble.

use std::{fmt, sync::Arc, time::Duration};

use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, RedisConnectionInfo, RedisError, ServerErrorKind, Value,
    aio::MultiplexedConnection,
};
use rustls::pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::Mutex,
    task::AbortHandle,
    time::{Instant, timeout_at},
};
use tokio_rustls::TlsConnector;

use super::settings::Settings;
use crate::store::Error;

/// The scripts, each behind the common part.
#[derive(Clone, Copy, Debug)]
pub(super) enum Script {
    Read,
    Write,
    Usage,
    Scan,
}

const SCRIPTS: [&str; 4] = [
    concat!(include_str!("common.lua"), include_str!("read.lua")),
    concat!(include_str!("common.lua"), include_str!("write.lua")),
    concat!(include_str!("common.lua"), include_str!("usage.lua")),
    concat!(include_str!("common.lua"), include_str!("scan.lua")),
];

/// `KEYS` and `ARGV` of a script.
pub(super) struct Arguments {
    keys: usize,
    all: Vec<Vec<u8>>,
}

impl Arguments {
    pub(super) fn new(
        keys: impl IntoIterator<Item = String>,
        others: impl IntoIterator<Item = String>,
    ) -> Self {
        let mut all: Vec<_> = keys.into_iter().map(String::into_bytes).collect();
        let keys = all.len();
        all.extend(others.into_iter().map(String::into_bytes));
        Self { keys, all }
    }

    pub(super) fn push(&mut self, argument: impl Into<Vec<u8>>) {
        self.all.push(argument.into());
    }
}

/// The way to the server.
pub(super) struct Link {
    settings: Settings,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connection: Option<Arc<Connection>>,
    /// When the last try to connect failed, and why.
    failed: Option<(Instant, Error)>,
}

struct Connection {
    channel: MultiplexedConnection,
    /// The digests of [`SCRIPTS`] on this server.
    digests: Vec<String>,
    driver: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// For connecting, and for each answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// After a failure to connect, who asks is told that for so long without another try.
const PAUSE: Duration = Duration::from_millis(250);
/// A newer layout is announced here, whatever its prefix.
const SCHEMA_KEY: &str = "mcp-sidecar:schema";
const SCHEMA: i64 = 1;

/// Why there is no answer.
enum Trouble {
    /// Nothing was sent, or the server refused.
    Nothing(Error),
    /// The server does not know the scripts any more: it did nothing.
    Forgotten,
    /// The connection broke: it may have been done.
    Broken,
    /// No answer in time: it may have been done, or may be done yet.
    Late,
}

impl Link {
    pub(super) fn new(settings: Settings) -> Self {
        Self { settings, state: Mutex::default() }
    }

    /// Runs a script that only reads; a second time if the connection turns out to be an old one.
    pub(super) async fn ask(
        &self,
        script: Script,
        arguments: &Arguments,
        deadline: Instant,
    ) -> Result<Value, Error> {
        let mut outcome = self.run(script, arguments, deadline).await;
        if matches!(outcome, Err(Trouble::Broken | Trouble::Forgotten)) {
            outcome = self.run(script, arguments, deadline).await;
        }
        outcome.map_err(|trouble| trouble.error(""))
    }

    /// Runs a script that writes; a second time only where the first did nothing.
    pub(super) async fn change(
        &self,
        script: Script,
        arguments: &Arguments,
        deadline: Instant,
    ) -> Result<Value, Error> {
        let mut outcome = self.run(script, arguments, deadline).await;
        if matches!(outcome, Err(Trouble::Forgotten)) {
            outcome = self.run(script, arguments, deadline).await;
        }
        outcome.map_err(|trouble| trouble.error("; a change may have been applied"))
    }

    /// Writes a key that expires at once: reading would not tell a full server or a replica.
    pub(super) async fn write_something(&self, prefix: &str, deadline: Instant) -> Result<(), Error> {
        let mut command = redis::cmd("SET");
        command.arg(format!("{prefix}ping")).arg(1).arg("PX").arg(1000);
        let mut outcome = self.send(&command, deadline).await;
        if matches!(outcome, Err(Trouble::Broken)) {
            outcome = self.send(&command, deadline).await;
        }
        outcome.map(drop).map_err(|trouble| trouble.error(""))
    }

    async fn run(&self, script: Script, arguments: &Arguments, deadline: Instant) -> Result<Value, Trouble> {
        let connection = self.connection(deadline).await.map_err(Trouble::Nothing)?;
        let mut command = redis::cmd("EVALSHA");
        command.arg(&connection.digests[script as usize]).arg(arguments.keys).arg(&arguments.all);
        self.send_over(&connection, &command, deadline).await
    }

    async fn send(&self, command: &Cmd, deadline: Instant) -> Result<Value, Trouble> {
        let connection = self.connection(deadline).await.map_err(Trouble::Nothing)?;
        self.send_over(&connection, command, deadline).await
    }

    async fn send_over(
        &self,
        connection: &Arc<Connection>,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, Trouble> {
        let until = deadline.min(Instant::now() + PATIENCE);
        let mut channel = connection.channel.clone();
        let trouble = match timeout_at(until, command.query_async::<Value>(&mut channel)).await {
            Ok(Ok(value)) => return Ok(value),
            Err(_) => Trouble::Late,
            Ok(Err(error)) => match error.kind() {
                ErrorKind::Server(ServerErrorKind::NoScript) => Trouble::Forgotten,
                ErrorKind::Server(_) | ErrorKind::Extension => {
                    let refused = Trouble::Nothing(refused(&error));
                    // Any other refusal is about the question. These are about the server: another may be there now.
                    match error.code() {
                        Some("READONLY" | "MASTERDOWN" | "LOADING" | "NOAUTH") => refused,
                        _ => return Err(refused),
                    }
                }
                _ => Trouble::Broken,
            },
        };
        let mut state = self.state.lock().await;
        if state.connection.as_ref().is_some_and(|is| Arc::ptr_eq(is, connection)) {
            state.connection = None;
        }
        Err(trouble)
    }

    /// The connection that is there, or a new one.
    async fn connection(&self, deadline: Instant) -> Result<Arc<Connection>, Error> {
        let late = |_| Error::Unavailable("connecting takes too long".into());
        let mut state = timeout_at(deadline, self.state.lock()).await.map_err(late)?;
        if let Some(connection) = &state.connection {
            return Ok(Arc::clone(connection));
        }
        if let Some((at, error)) = &state.failed
            && at.elapsed() < PAUSE
        {
            return Err(error.clone());
        }
        let until = deadline.min(Instant::now() + PATIENCE);
        match timeout_at(until, self.settings.connect()).await.unwrap_or_else(|elapsed| Err(late(elapsed))) {
            Ok(connection) => {
                if state.failed.take().is_some() {
                    tracing::info!("the state store is back");
                }
                Ok(Arc::clone(state.connection.insert(Arc::new(connection))))
            }
            Err(error) => {
                if state.failed.replace((Instant::now(), error.clone())).is_none() {
                    tracing::warn!(%error, "the state store can't be reached");
                }
                Err(error)
            }
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.fmt(f)
    }
}

impl Trouble {
    fn error(self, doubt: &str) -> Error {
        match self {
            Self::Nothing(error) => error,
            Self::Forgotten => Error::Unavailable("the server forgets scripts".into()),
            Self::Broken => Error::Unavailable(format!("the connection broke{doubt}")),
            Self::Late => Error::Unavailable(format!("no answer in time{doubt}")),
        }
    }
}

/// The error's code only: its text may repeat what was sent.
fn refused(error: &RedisError) -> Error {
    let code = error.code().unwrap_or("an unknown error");
    Error::Unavailable(format!("the server answers {code}"))
}

impl Settings {
    async fn connect(&self) -> Result<Connection, Error> {
        let away =
            |error: &std::io::Error| Error::Unavailable(format!("{}:{}: {error}", self.host, self.port));
        let stream =
            TcpStream::connect((self.host.as_str(), self.port)).await.map_err(|error| away(&error))?;
        stream.set_nodelay(true).map_err(|error| away(&error))?;
        // An idle connection that a firewall has dropped is found before the next call needs it.
        let keepalive =
            TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5));
        SockRef::from(&stream).set_tcp_keepalive(&keepalive).map_err(|error| away(&error))?;
        match &self.tls {
            None => self.greet(stream).await,
            Some(config) => {
                let name = ServerName::try_from(self.host.clone())
                    .map_err(|_| Error::Unavailable("its host is no name for TLS".into()))?;
                let stream = TlsConnector::from(Arc::clone(config)).connect(name, stream).await;
                self.greet(stream.map_err(|error| away(&error))?).await
            }
        }
    }

    /// Signs in, looks who has written there, and hands over the scripts.
    async fn greet<S>(&self, stream: S) -> Result<Connection, Error>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut login = RedisConnectionInfo::default().set_db(self.database).set_skip_set_lib_name();
        if let Some(user) = &self.user {
            login = login.set_username(user);
        }
        if let Some(password) = &self.password {
            login = login.set_password(password.expose().as_str());
        }
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let (channel, driver) = MultiplexedConnection::new_with_config(&login, stream, config)
            .await
            .map_err(|error| failed_greeting(&error))?;
        let driver = tokio::spawn(driver).abort_handle();
        let mut connection = Connection { channel, digests: Vec::new(), driver };
        connection.prepare().await?;
        Ok(connection)
    }
}

impl Connection {
    async fn prepare(&mut self) -> Result<(), Error> {
        let mut greeting = redis::pipe();
        greeting.cmd("SET").arg(SCHEMA_KEY).arg(SCHEMA).arg("NX").ignore();
        greeting.cmd("GET").arg(SCHEMA_KEY);
        for script in SCRIPTS {
            greeting.cmd("SCRIPT").arg("LOAD").arg(script);
        }
        let (schema, read, write, usage, scan): (String, String, String, String, String) =
            greeting.query_async(&mut self.channel).await.map_err(|error| failed_greeting(&error))?;
        let found = schema.parse().map_err(|_| Error::Corrupt("its schema is no number".into()))?;
        if found > SCHEMA {
            return Err(Error::Newer { found, known: SCHEMA });
        }
        self.digests = vec![read, write, usage, scan];
        self.look_for_eviction().await;
        Ok(())
    }

    /// A server that drops what it likes keeps no promise; whoever may not ask it has to know.
    async fn look_for_eviction(&mut self) {
        let info = redis::cmd("INFO").arg("memory").query_async::<String>(&mut self.channel).await;
        let info = info.unwrap_or_default();
        let says = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        let policy = says("maxmemory_policy:");
        if !matches!(says("maxmemory:"), "" | "0") && policy != "noeviction" {
            tracing::warn!(policy, "the state store may evict records: set maxmemory-policy to noeviction");
        }
    }
}

fn failed_greeting(error: &RedisError) -> Error {
    match error.kind() {
        ErrorKind::AuthenticationFailed => Error::Unavailable("the server refuses the credentials".into()),
        ErrorKind::Server(_) | ErrorKind::Extension => refused(error),
        ErrorKind::Io => Error::Unavailable("the connection broke at the greeting".into()),
        _ => Error::Unavailable("what answers does not speak as Redis does".into()),
    }
}
