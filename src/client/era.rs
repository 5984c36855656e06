//! The legacy era's session: how it begins and ends.

use http::{HeaderMap, HeaderValue, Method};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::{Client, Error, LEGACY, Problem, Settings, client_info};
use crate::{headers::SESSION_ID, message::Era};

impl Client {
    /// Does the legacy handshake: `initialize`, then `notifications/initialized`.
    ///
    /// # Errors
    ///
    /// The server refused either; no session is left behind.
    pub async fn initialize(settings: Settings) -> Result<Self, Error> {
        let mut client =
            Self { era: Era::Legacy, version: HeaderValue::from_static(LEGACY), ..Self::modern(settings) };
        let hello: Map<String, Value> = [
            ("protocolVersion".to_owned(), json!(LEGACY)),
            ("capabilities".to_owned(), json!({})),
            ("clientInfo".to_owned(), client_info()),
        ]
        .into_iter()
        .collect();
        let (introduction, headers) = client.request_with("initialize", hello).await?;
        client.session = headers.get(SESSION_ID).cloned();
        client.version = settled(&introduction).map_err(|problem| Error::new("initialize", problem))?;
        client.introduction = Some(introduction);
        match client.notify("notifications/initialized", Map::new()).await {
            Ok(()) => Ok(client),
            Err(error) => {
                client.close().await;
                Err(error)
            }
        }
    }

    /// Ends the session, if there is one. A server need not let it (405), so nothing is made of the answer.
    pub async fn close(self) {
        if self.session.is_none() {
            return;
        }
        let headers: HeaderMap = self.headers();
        let _ =
            timeout(self.settings.patience, self.exchange(Method::DELETE, headers, Default::default())).await;
    }
}

#[derive(Deserialize)]
struct Introduction {
    result: Settled,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Settled {
    protocol_version: String,
}

/// The revision that the server chose.
fn settled(introduction: &[u8]) -> Result<HeaderValue, Problem> {
    let introduction: Introduction = serde_json::from_slice(introduction)
        .map_err(|_| Problem::Unreadable("the server named no protocolVersion".to_owned()))?;
    HeaderValue::try_from(introduction.result.protocol_version)
        .map_err(|_| Problem::Unreadable("the server's protocolVersion is none".to_owned()))
}
