//! What a scene plays on, and what is seen of it.

use std::{collections::VecDeque, fmt::Display, io, net::SocketAddr};

use serde_json::{Value, json};

use crate::demo::{Handle, Snapshot};

use super::{
    client::Client,
    sidecar::{PATH, PATIENT, Sidecar},
};

/// The upstream, the sidecar before it, and a client before that.
#[derive(Debug)]
pub(super) struct Stage {
    sidecar: Sidecar,
    server: Handle,
    /// Lines that came before the one a scene asked for.
    records: VecDeque<(Value, String)>,
    last_id: u64,
}

/// What one scene showed.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// What happened, in words.
    pub(super) said: Vec<String>,
    /// Access-log lines as they came.
    pub(super) records: Vec<String>,
    /// What differs from what is promised.
    pub(super) wrong: Vec<String>,
}

impl Stage {
    pub(super) fn new(sidecar: Sidecar, server: Handle) -> Self {
        Self { sidecar, server, records: VecDeque::new(), last_id: 0 }
    }

    /// Where the sidecar listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.sidecar.address
    }

    /// A modern client of the sidecar.
    pub(super) fn modern(&self) -> Client {
        Client::new(self.sidecar.address, PATH)
    }

    /// A modern client that no clock hurries.
    pub(super) fn patient(&self) -> Client {
        Client::new(self.sidecar.address, PATIENT)
    }

    /// A legacy client of the sidecar, in a session of its own.
    pub(super) async fn legacy(&self) -> io::Result<Client> {
        self.modern().initialize().await
    }

    /// Has the patient upstream listed through the sidecar, so that it knows the tools.
    pub(super) async fn list(&mut self) -> io::Result<()> {
        let id = self.id();
        self.patient().request(id.into(), "tools/list", json!({})).await?.whole().await.map(drop)
    }

    /// Makes the upstream fail, or go on: a `POST /control` to it.
    pub(super) fn control(&self, asked: &Value) -> io::Result<()> {
        self.server.control(asked).map_err(io::Error::other)
    }

    /// A request id that no scene had before: records are found by it.
    pub(super) fn id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// What the upstream has seen by now.
    pub(super) fn upstream(&self) -> Snapshot {
        self.server.stats()
    }

    /// Waits until the upstream has seen `enough`.
    pub(super) async fn upstream_until(&self, enough: impl FnMut(&Snapshot) -> bool) -> Snapshot {
        self.server.until(enough).await
    }

    /// Waits for the access-log line of the request `id`, and shows it.
    ///
    /// # Errors
    ///
    /// The sidecar is gone, or a line is no JSON.
    pub(super) async fn record(&mut self, id: u64, seen: &mut Seen) -> io::Result<Value> {
        let is_it = |record: &Value| record["id"] == id && record["rpc"] != "notifications/cancelled";
        loop {
            if let Some(at) = self.records.iter().position(|(record, _)| is_it(record)) {
                let (record, line) = self.records.remove(at).unwrap_or_default();
                seen.records.push(line);
                return Ok(record);
            }
            let line = self.sidecar.lines.recv().await;
            let line = line.ok_or_else(|| io::Error::other("the access log has ended"))?;
            self.records.push_back((serde_json::from_str(&line)?, line));
        }
    }
}

impl Seen {
    /// Tells what happened.
    pub(super) fn say(&mut self, text: impl Into<String>) {
        self.said.push(text.into());
    }

    /// Compares what came with what is promised.
    #[expect(clippy::needless_pass_by_value, reason = "scenes compare numbers, texts and values alike")]
    pub(super) fn expect<G: Display + PartialEq<W>, W: Display>(&mut self, what: &str, got: G, wanted: W) {
        if got != wanted {
            self.wrong.push(format!("{what} is {got}, promised is {wanted}"));
        }
    }

    /// Compares fields of an access-log line (or of any JSON object); `null` means absent.
    pub(super) fn expect_fields(&mut self, record: &Value, wanted: &Value) {
        for (name, wanted) in wanted.as_object().into_iter().flatten() {
            self.expect(name, &record[name], wanted);
        }
    }

    /// Notes a promise that is broken.
    pub(super) fn expect_that(&mut self, kept: bool, promise: &str) {
        if !kept {
            self.wrong.push(format!("not so: {promise}"));
        }
    }
}
