//! The remote server that a command asks, as its flags name it.

use std::{path::PathBuf, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};

use super::{Environment, secret, upstream};
use crate::client;

/// From a request until its whole response: servers answer what a command asks at once, or not at all.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of one answer.
const MAX_MESSAGE: usize = 16 << 20;

/// A remote server. No flag takes a secret: they name what holds one.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Remote {
    /// The server's endpoint, an http or https URL
    #[arg(value_name = "URL", env = "MCP_SIDECAR_URL", hide_env_values = true)]
    pub url: String,
    /// Send the bearer token that the environment variable NAME holds
    #[arg(long, value_name = "NAME", env = "MCP_SIDECAR_BEARER_ENV", conflicts_with = "bearer_file")]
    pub bearer_env: Option<String>,
    /// Send the bearer token that the file holds
    #[arg(long, value_name = "PATH", env = "MCP_SIDECAR_BEARER_FILE")]
    pub bearer_file: Option<PathBuf>,
    /// Send this header, which is no secret; may be given several times, in the environment one a line
    #[arg(long, value_name = "NAME: VALUE", env = "MCP_SIDECAR_HEADER", value_delimiter = '\n')]
    pub header: Vec<String>,
    /// Send a header whose value the environment variable VARIABLE holds; may be given several times, in the
    /// environment one a line
    #[arg(long, value_name = "NAME: VARIABLE", env = "MCP_SIDECAR_HEADER_ENV", value_delimiter = '\n')]
    pub header_env: Vec<String>,
}

impl Remote {
    /// How the server is asked; no connection is made yet.
    ///
    /// # Errors
    ///
    /// Which flag is wrong, and why; never with a secret.
    pub fn settings(&self, environment: Environment<'_>) -> Result<client::Settings, String> {
        let (url, user_info) = upstream::url(&self.url).map_err(|reason| format!("the URL: {reason}"))?;
        if user_info.is_some() {
            return Err("the URL: a credential is not taken from the command line: use --bearer-env, \
                        --bearer-file or --header-env"
                .to_owned());
        }
        let mut headers = HeaderMap::new();
        for text in &self.header {
            let (name, value) = pair(text).map_err(|reason| format!("--header: {reason}"))?;
            if CREDENTIALS.contains(&name.as_str()) {
                return Err(format!(
                    "--header: {name} holds a credential: use --bearer-env, --bearer-file or --header-env"
                ));
            }
            headers.append(name, usable(value).map_err(|reason| format!("--header: {reason}"))?);
        }
        for text in &self.header_env {
            let (name, variable) = pair(text).map_err(|reason| format!("--header-env: {reason}"))?;
            let value = environment(variable)
                .ok_or_else(|| format!("--header-env: the environment variable {variable} is not set"))?;
            headers.append(name, usable(&value).map_err(|reason| format!("--header-env: {reason}"))?);
        }
        if let Some(bearer) = self.bearer(environment)? {
            headers.insert(header::AUTHORIZATION, bearer);
        }
        Ok(client::Settings {
            upstream: upstream::Connection::of(url).open("remote")?,
            headers,
            patience: PATIENCE,
            max_message: MAX_MESSAGE,
        })
    }

    fn bearer(&self, environment: Environment<'_>) -> Result<Option<HeaderValue>, String> {
        let secret = match (&self.bearer_env, &self.bearer_file) {
            (Some(name), _) => secret::from_environment(name, environment)
                .map_err(|reason| format!("--bearer-env: {reason}"))?,
            (None, Some(path)) => {
                secret::from_file(path).map_err(|reason| format!("--bearer-file: {reason}"))?
            }
            (None, None) => return Ok(None),
        };
        // Both checked that a header can carry it.
        Ok(secret.authorization())
    }

    /// The URL as it may be shown: its query, which can hold a key, is left out.
    pub fn shown_url(&self) -> String {
        let Ok(url) = self.url.parse::<Uri>() else { return String::new() };
        let authority = url.authority().map(|authority| authority.as_str()).unwrap_or_default();
        let host = authority.rsplit('@').next().unwrap_or_default();
        format!("{}://{host}{}", url.scheme_str().unwrap_or_default(), url.path())
    }
}

/// Headers that hold a credential and nothing else: a flag shows in the list of processes.
const CREDENTIALS: &[&str] = &["authorization", "cookie", "x-api-key", "api-key"];

/// `NAME: REST`, of a header that may be set.
fn pair(text: &str) -> Result<(HeaderName, &str), String> {
    let (name, rest) = text.split_once(':').ok_or("must be written NAME: VALUE")?;
    let name = HeaderName::try_from(name.trim()).map_err(|_| "not the name of a header")?;
    if upstream::NOT_CONFIGURABLE.contains(&name.as_str()) {
        return Err(format!("{name} is set by the client itself"));
    }
    Ok((name, rest.trim()))
}

fn usable(value: &str) -> Result<HeaderValue, &'static str> {
    let mut value = HeaderValue::try_from(value.trim_end_matches(['\r', '\n']))
        .map_err(|_| "not a value that a header can carry")?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str) -> Remote {
        Remote { url: url.into(), ..Remote::default() }
    }

    fn environment(name: &str) -> Option<String> {
        (name == "TOKEN").then(|| "s3cret".to_owned())
    }

    #[test]
    fn secrets_come_from_what_the_flags_name() {
        let remote = Remote {
            bearer_env: Some("TOKEN".into()),
            header: vec!["X-Team: agents".into()],
            header_env: vec!["X-Api-Key: TOKEN".into()],
            ..of("https://mcp.example.com/mcp?key=k")
        };
        let settings = remote.settings(&environment).expect("right");
        assert_eq!(settings.headers["authorization"], "Bearer s3cret");
        assert_eq!([&settings.headers["x-api-key"], &settings.headers["x-team"]], ["s3cret", "agents"]);
        assert!(settings.headers.values().all(HeaderValue::is_sensitive));
        assert_eq!(settings.upstream.settings().url, "https://mcp.example.com/mcp?key=k");
        assert_eq!(remote.shown_url(), "https://mcp.example.com/mcp");
        assert!(!format!("{settings:?}").contains("s3cret"));
    }

    #[test]
    fn a_wrong_flag_is_named_and_no_credential_is_taken_from_one() {
        let plain = of("http://localhost/mcp");
        let header = |text: &str| Remote { header: vec![text.into()], ..plain.clone() };
        for (remote, says) in [
            (of("localhost"), "the URL: must be an http or https URL"),
            (of("http://user:s3cret@localhost/mcp"), "the URL: a credential is not taken"),
            (header("Authorization: Bearer s3cret"), "--header: authorization holds a credential"),
            (header("Cookie: s3cret"), "--header: cookie holds a credential"),
            (header("X-Team"), "--header: must be written NAME: VALUE"),
            (header("X Team: a"), "--header: not the name of a header"),
            (header("Host: a"), "--header: host is set by the client itself"),
            (header("X-Team: a\u{1}"), "--header: not a value"),
            (
                Remote { header_env: vec!["X-Key: NONE".into()], ..plain.clone() },
                "--header-env: the environment",
            ),
            (Remote { bearer_env: Some("NONE".into()), ..plain.clone() }, "--bearer-env: the environment"),
            (
                Remote { bearer_file: Some("/no/file".into()), ..plain.clone() },
                "--bearer-file: the file /no/file",
            ),
        ] {
            let reason = remote.settings(&environment).expect_err(says);
            assert!(reason.starts_with(says) && !reason.contains("s3cret"), "{reason}");
        }
        assert_eq!(of("http://user:s3cret@localhost/mcp").shown_url(), "http://localhost/mcp");
    }
}
