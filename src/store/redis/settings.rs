//! Where the server is, and as whom it is asked.

use std::{fmt, sync::Arc};

use redis::{ConnectionAddr, IntoConnectionInfo};
use rustls::ClientConfig;

use crate::secret::Secret;

/// How a server is reached.
#[derive(Clone)]
pub struct Settings {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) database: i64,
    pub(super) user: Option<String>,
    pub(super) password: Option<Secret>,
    pub(super) tls: Option<Arc<ClientConfig>>,
}

impl Settings {
    /// Reads `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]`, or `rediss://…` for TLS, which `tls` then says how to do.
    ///
    /// # Errors
    ///
    /// A text that repeats nothing of the URL, since that may hold a password.
    pub fn from_url(url: &str, tls: &Arc<ClientConfig>) -> Result<Self, String> {
        let (is_tls, rest) = match (url.strip_prefix("rediss://"), url.strip_prefix("redis://")) {
            (Some(rest), _) => (true, rest),
            (_, Some(rest)) => (false, rest),
            _ => return Err("must begin with redis:// or rediss://".into()),
        };
        // TLS is ours, so the URL is read as one without.
        let info = format!("redis://{rest}").into_connection_info();
        let info = info.map_err(|_| "must be redis://HOST:PORT/DB with a number as DB".to_owned())?;
        let ConnectionAddr::Tcp(host, port) = info.addr() else {
            return Err("must name a host".into());
        };
        let redis = info.redis_settings();
        Ok(Self {
            host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: *port,
            database: redis.db(),
            user: redis.username().map(str::to_owned),
            password: redis.password().map(|password| Secret::new(password.to_owned())),
            tls: is_tls.then(|| Arc::new(without_alpn(tls))),
        })
    }

    /// The same with a password that stands in no URL; it is read anew for each connection.
    #[must_use]
    pub fn with_password(mut self, password: Secret) -> Self {
        self.password = Some(password);
        self
    }
}

/// Redis has no name in ALPN, and a TLS terminator before it may refuse HTTP's.
fn without_alpn(config: &ClientConfig) -> ClientConfig {
    let mut config = config.clone();
    config.alpn_protocols.clear();
    config
}

/// Where the server is, without who asks it.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls.is_some() { "rediss" } else { "redis" };
        write!(f, "{scheme}://{}:{}/{}", self.host, self.port, self.database)
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("host", &self.host)
            .field("port", &self.port)
            .field("database", &self.database)
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}
