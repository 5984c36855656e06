//! What an upstream's answers tell of sessions: which began, under which revision, and which are over.

use http::{HeaderMap, Method, StatusCode};

use super::{
    Sidecar, Turn,
    post::{Asked, fingerprint},
};
use crate::{headers, session::Session};

impl Sidecar {
    /// A session that the upstream ended or does not know is forgotten.
    pub(super) fn learn_session(&self, turn: &Turn, asked: &Asked, status: StatusCode) {
        let deleted = turn.parts.method == Method::DELETE && status.is_success();
        if asked.scope.session.is_some() && (deleted || status == StatusCode::NOT_FOUND) {
            self.sessions.closed(&asked.scope);
        }
    }

    /// What a successful `initialize` settled; only the log and the era rule use it.
    pub(super) fn learn_protocol(&self, turn: &mut Turn, asked: &Asked, headers: &HeaderMap, bytes: &[u8]) {
        let (Some(client), Some(session)) = (&asked.initialize, headers.get(headers::SESSION_ID)) else {
            return;
        };
        turn.exchange.account.record.session = Some(fingerprint(session.as_bytes()));
        let protocol =
            serde_json::from_slice::<Initialized>(bytes).ok().map(|answer| answer.result.protocol_version);
        let mut scope = self.scope(turn);
        scope.session = Some(session.as_bytes().into());
        scope.host = None;
        self.sessions.opened(scope, Session { protocol, client: client.clone() });
    }
}

#[derive(serde::Deserialize)]
struct Initialized {
    result: InitializeResult,
}

#[derive(serde::Deserialize)]
struct InitializeResult {
    #[serde(rename = "protocolVersion")]
    protocol_version: String,
}
