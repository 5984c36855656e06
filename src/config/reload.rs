//! Reads the configuration again while the sidecar runs.
//!
//! A wrong file is refused whole and the old configuration stays. Upstreams whose connections would be made as before
//! keep them. `listen`, `admin`, `state`, `log.format` and the bounds of the state store stay as they were at start.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::sync::watch::Sender;

use super::{Config, Environment, Flags, Pools, Problems, watch::Watch};
use crate::{ledger::Keep, proxy, server};

/// How often files are asked whether they changed. A change counts once two askings agree, so that a file that is
/// still being written is not read.
pub const POLL: Duration = Duration::from_secs(1);

/// The configuration that holds, and how to read it again.
#[derive(Debug)]
pub struct Reloader {
    pub(super) flags: Flags,
    current: Config,
    pools: Pools,
    watch: Watch,
    server: Sender<Arc<server::Settings>>,
}

impl Reloader {
    /// Begins with a configuration that was loaded with `flags`; gives the settings of the flow too.
    ///
    /// # Errors
    ///
    /// No upstream, or TLS files that can't be used.
    pub fn new(flags: Flags, config: Config) -> Result<(Self, proxy::Settings), Problems> {
        config.require_upstream()?;
        let mut pools = Pools::default();
        let settings = config.proxy_settings_over(&mut pools)?;
        let (server, _) = tokio::sync::watch::channel(Arc::new(config.server_settings()?));
        let mut reloader = Self { flags, current: config, pools, watch: Watch::default(), server };
        reloader.watch_current();
        Ok((reloader, settings))
    }

    /// The configuration that holds now.
    pub fn current(&self) -> &Config {
        &self.current
    }

    /// The settings of the listener, now and after each reload.
    pub fn server(&self) -> tokio::sync::watch::Receiver<Arc<server::Settings>> {
        self.server.subscribe()
    }

    /// Looks whether files changed: secrets are replaced in place, any other change is a [`Reloader::reload`], whose
    /// settings are given. Blocks on the file system.
    pub fn poll(&mut self, environment: Environment<'_>) -> Option<proxy::Settings> {
        let changed = self.watch.changed();
        if changed.is_empty() {
            return None;
        }
        let files = self.current.files();
        if changed.iter().any(|path| files.contains(path)) {
            return self.reload(environment);
        }
        self.refresh_secrets(&changed);
        None
    }

    /// Reads everything again; who takes the settings into use says that it was reloaded. `None`: it was refused, the log
    /// says why, and nothing changed. Blocks on the file system.
    pub fn reload(&mut self, environment: Environment<'_>) -> Option<proxy::Settings> {
        self.watch.accept();
        match self.try_reload(environment) {
            // That it holds is for the caller to say, who puts it into force.
            Ok(settings) => Some(settings),
            Err(problems) => {
                for problem in problems.iter() {
                    tracing::error!(
                        line = problem.line,
                        key = problem.key,
                        reason = problem.reason,
                        "configuration refused, the old one stays"
                    );
                }
                None
            }
        }
    }

    fn try_reload(&mut self, environment: Environment<'_>) -> Result<proxy::Settings, Problems> {
        let mut config = Config::load(&self.flags, environment)?;
        config.require_upstream()?;
        let restart = config.keep_from(&self.current);
        let mut problems = Problems::of(config.file.as_deref());
        config.check_between_keys(&mut problems);
        problems.none()?;
        let server = config.server_settings_over(&self.current, &self.server.borrow())?;
        let settings = config.proxy_settings_over(&mut self.pools)?;
        self.server.send_replace(Arc::new(server));
        self.current = config;
        self.watch_current();
        for key in restart {
            tracing::warn!(key, "takes effect at a restart");
        }
        for stale in self.current.stale_authorities() {
            tracing::warn!("{stale}");
        }
        Ok(settings)
    }

    fn refresh_secrets(&self, changed: &[PathBuf]) {
        for file in self.current.secrets.iter().filter(|file| changed.contains(&file.path)) {
            match file.refresh() {
                Ok(()) => tracing::info!(key = file.key, "secret replaced"),
                Err(reason) => tracing::error!(key = file.key, reason, "secret refused, the old one stays"),
            }
        }
    }

    fn watch_current(&mut self) {
        let secrets = self.current.secrets.iter().map(|file| file.path.clone());
        self.watch.set(self.current.files().into_iter().chain(secrets));
    }
}

impl Config {
    /// Takes over what only a restart changes; gives the keys that differ.
    fn keep_from(&mut self, old: &Self) -> Vec<&'static str> {
        let mut changed = Vec::new();
        let mut keep = |key, differs: bool| {
            if differs {
                changed.push(key);
            }
        };
        keep("listen", self.listen != old.listen);
        keep("admin", self.admin != old.admin);
        keep("state", self.state != old.state);
        keep("log.format", self.log.text != old.log.text);
        // What the store was opened with.
        keep("ledger.max_keys", self.ledger.max_keys != old.ledger.max_keys);
        let in_store = self.ledger.results == Keep::Store;
        keep("ledger.max_total", in_store && self.ledger.max_total != old.ledger.store_total);
        self.listen.clone_from(&old.listen);
        self.admin.clone_from(&old.admin);
        self.state.clone_from(&old.state);
        self.log.text = old.log.text;
        self.ledger.max_keys = old.ledger.max_keys;
        self.ledger.store_total = old.ledger.store_total;
        changed
    }
}
