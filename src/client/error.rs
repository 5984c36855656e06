//! Why a server gave no result.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use serde_json::Value;

use crate::upstream;

/// A request that came to nothing: which one, and why.
#[derive(Debug, thiserror::Error)]
#[error("{asked}: {problem}")]
pub struct Error {
    /// The JSON-RPC method.
    pub asked: String,
    /// What became of it.
    #[source]
    pub problem: Problem,
}

/// What became of a request.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// There is no answer, or it broke off.
    #[error(transparent)]
    Upstream(#[from] upstream::Error),
    /// An HTTP status that is no success.
    #[error("the server answered HTTP {status}{}", said(says.as_deref()))]
    Status {
        /// The status.
        status: StatusCode,
        /// What the answer says of it, if it can be read: a JSON-RPC error, or where the endpoint has moved to.
        says: Option<String>,
    },
    /// A JSON-RPC error.
    #[error("the server answered with error {code}: {message}")]
    Refused {
        /// Its code.
        code: i64,
        /// Its message.
        message: String,
    },
    /// The answer can't be understood.
    #[error("{0}")]
    Unreadable(String),
    /// The response was not there in time.
    #[error("no response within {0:?}")]
    TimedOut(Duration),
}

impl Error {
    /// An error of this request.
    pub fn new(asked: &str, problem: Problem) -> Self {
        Self { asked: asked.to_owned(), problem }
    }
}

impl Problem {
    /// Of a JSON-RPC error response.
    pub(super) fn of_error(response: &Bytes) -> Self {
        match error_of(response) {
            Some((code, message)) => Self::Refused { code, message },
            None => Self::Unreadable("the server answered with an error that can't be read".to_owned()),
        }
    }

    /// Of an HTTP answer that is no success.
    pub(super) fn of_status(status: StatusCode, body: &Bytes, location: Option<&str>) -> Self {
        let says = match error_of(body) {
            Some((code, message)) => Some(format!("error {code}: {message}")),
            // The query may hold a secret.
            None => location
                .filter(|_| status.is_redirection())
                .and_then(|location| location.split(['?', '#']).next())
                .map(|location| format!("the endpoint is at {}", quoted(location))),
        };
        Self::Status { status, says }
    }

    /// Whether it may come of the era: the server answered, and neither asked for a credential nor for patience.
    pub(super) fn may_be_of_the_era(&self) -> bool {
        match self {
            Self::Status { status, .. } => {
                status.is_client_error() && !matches!(status.as_u16(), 401 | 403 | 407 | 408 | 429)
            }
            Self::Refused { .. } | Self::Unreadable(_) => true,
            Self::Upstream(_) | Self::TimedOut(_) => false,
        }
    }
}

fn said(says: Option<&str>) -> String {
    says.map(|says| format!(" ({says})")).unwrap_or_default()
}

fn error_of(body: &Bytes) -> Option<(i64, String)> {
    let message: Value = serde_json::from_slice(body).ok()?;
    let error = message.get("error")?;
    let text = error.get("message").and_then(Value::as_str).unwrap_or_default();
    Some((error.get("code")?.as_i64()?, quoted(text)))
}

/// A server's text for a terminal: no control characters, and not too much of it.
pub(super) fn quoted(text: &str) -> String {
    const MOST: usize = 200;
    let mut quoted: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    if text.chars().nth(MOST).is_some() {
        quoted.push('…');
    }
    quoted
}
