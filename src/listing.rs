//! What is known of each tool, and what follows from it for a call.
//!
//! Words: a tool is *listed* once an answer to `tools/list` showed it, or if the configuration names it. Its *hints*
//! are what that answer says of it, untrusted; [`Rules`] are what the operator says: overrides, and an [`Approval`]
//! without whose digest a hint does not count. [`Known`] is both together.
//!
//! Promises: nothing learnt is ever answered to a node, it decides only what the sidecar adds to a call and whether one
//! may be made again. What is known stays until a listing says otherwise: a tool that a page leaves out may be on
//! another page, or in another caller's listing. Memory is bounded by [`MOST_TOOLS`] an upstream.
//!
//! Leaves the store to others: [`Listing::learn`] gives what has to be kept, [`Listing::load`] takes it back.

mod approval;

use std::{
    collections::{BTreeMap, HashMap, btree_map::Entry},
    sync::{Arc, PoisonError, RwLock},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::time::{Duration, Instant};

pub use approval::Approval;

use crate::message::{canonical::canonical, tools};

/// Tools that are remembered of one upstream; further ones count as never listed.
pub const MOST_TOOLS: usize = tools::MOST_ENTRIES;
/// Bytes of a name that is remembered. MCP asks for at most 128 characters.
const LONGEST_NAME: usize = 1024;
/// For so long what a listing showed here goes before what the store says: ample for the store to have it too.
const FRESH: Duration = Duration::from_secs(30);

/// May a call be made again?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RetryClass {
    /// It only reads.
    Safe,
    /// It is idempotent, and its server honours the key.
    Conditional,
    /// Any other, and any tool never seen in a listing.
    Unsafe,
}

impl RetryClass {
    /// Its name in logs and on the admin API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Safe => "safe",
            Self::Conditional => "conditional",
            Self::Unsafe => "unsafe",
        }
    }

    /// Whether a call of this class may be made again.
    pub fn may_be_made_again(self) -> bool {
        self != Self::Unsafe
    }
}

/// A tool as its server lists it. Its JSON is what the store keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// `annotations.readOnlyHint`.
    pub read_only: bool,
    /// `annotations.idempotentHint`.
    pub idempotent: bool,
    /// `_meta["oz0/idempotency_key"]`.
    pub honours_key: bool,
    /// `_meta["oz0/resume"]`.
    pub resume: bool,
    /// SHA-256 (hex) of the canonical form of its entry. `None`: only the configuration names it, or its entry has
    /// none any more; then no hint is set either.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// What the operator says of an upstream's tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// `[upstreams.NAME.tools.TOOL]`, by tool.
    pub overrides: HashMap<String, Override>,
    /// `approved`: hints count only for tools whose digest is in it.
    pub approved: Option<Arc<Approval>>,
}

/// What the operator knows better than the listing; `None`: as listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Override {
    /// It only reads.
    pub read_only: Option<bool>,
    /// Twice is as once.
    pub idempotent: Option<bool>,
    /// It honours the idempotency key.
    pub honours_key: Option<bool>,
    /// It takes part in resumption.
    pub resume: Option<bool>,
}

/// What counts for a call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// A listing showed it, or the configuration names it.
    pub listed: bool,
    /// It only reads.
    pub read_only: bool,
    /// Twice is as once.
    pub idempotent: bool,
    /// It honours the idempotency key.
    pub honours_key: bool,
    /// It takes part in resumption.
    pub resume: bool,
    /// Whether a call of it may be made again.
    pub class: RetryClass,
    /// There is an approval and the tool is not as approved: changed, or new. No hint counts, and attempts from the
    /// second on are refused.
    pub changed: bool,
    /// Its digest is approved; `None` where there is no approval, or no listing showed the tool yet.
    pub approved: Option<bool>,
    /// The digest of its entry, once a listing showed it.
    pub digest: Option<String>,
}

/// One tool as the store keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The upstream's name, NUL, and the tool's name.
    pub key: String,
    /// The [`Tool`] as JSON.
    pub value: Vec<u8>,
}

/// What the listings of all upstreams have shown.
#[derive(Debug, Default)]
pub struct Listing {
    upstreams: RwLock<HashMap<String, BTreeMap<String, Seen>>>,
}

/// A tool as it is known now.
#[derive(Clone, Debug)]
struct Seen {
    tool: Tool,
    /// When a listing showed it here; `None`: it came from the store.
    learnt: Option<Instant>,
    /// The store has not taken it yet: the next listing gives it again.
    owed: bool,
}

/// The tools of one page of a listing: of the JSON-RPC answer to a `tools/list`; none for any other bytes.
///
/// A tool whose entry has no canonical form, or whose name stands twice with unlike entries, is left out: nobody can
/// say which of its readings a client takes.
pub fn tools_of(answer: &[u8]) -> Vec<Tool> {
    read(answer).0
}

/// The tools of a page, and the names of those left out.
pub(crate) fn read(answer: &[u8]) -> (Vec<Tool>, Vec<String>) {
    let page = tools::page(answer).unwrap_or_default();
    let mut tools: BTreeMap<String, Option<Tool>> = BTreeMap::new();
    for entry in page.entries {
        let Some(name) = entry.name.filter(|name| !name.is_empty() && name.len() <= LONGEST_NAME) else {
            tracing::debug!("a tool without a usable name is not learnt");
            continue;
        };
        let tool = match canonical(answer.get(entry.value).unwrap_or_default()) {
            Ok(form) => Some(Tool {
                name: name.clone(),
                read_only: entry.read_only,
                idempotent: entry.idempotent,
                honours_key: entry.honours_key,
                resume: entry.resume,
                digest: Some(hex(&Sha256::digest(form))),
            }),
            Err(error) => {
                tracing::debug!(tool = name, %error, "a tool without canonical form is not learnt");
                None
            }
        };
        match tools.entry(name) {
            Entry::Vacant(place) => _ = place.insert(tool),
            Entry::Occupied(mut place) if *place.get() != tool => _ = place.insert(None),
            Entry::Occupied(_) => {}
        }
    }
    let (mut clear, mut unclear) = (Vec::new(), Vec::new());
    for (name, tool) in tools {
        match tool {
            Some(tool) => clear.push(tool),
            None => unclear.push(name),
        }
    }
    (clear, unclear)
}

impl Listing {
    /// How many tools are known, of all upstreams.
    pub fn len(&self) -> usize {
        let upstreams = self.upstreams.read().unwrap_or_else(PoisonError::into_inner);
        upstreams.values().map(BTreeMap::len).sum()
    }

    /// None is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the answer to a `tools/list` of this upstream, or one page of it; any other bytes change nothing. Gives
    /// the tools that are new or have changed, to be stored.
    ///
    /// Reads every byte and hashes each entry, on the caller's thread: some 10 ms a MiB. An async caller gives a large
    /// answer to a blocking thread.
    pub fn learn(&self, upstream: &str, answer: &[u8]) -> Vec<Record> {
        let (tools, unclear) = read(answer);
        if tools.is_empty() && unclear.is_empty() {
            return Vec::new();
        }
        let mut upstreams = self.upstreams.write().unwrap_or_else(PoisonError::into_inner);
        let known = upstreams.entry(upstream.to_owned()).or_default();
        let mut news = Vec::new();
        let mut changed = 0;
        // What a known tool was says nothing of what it has become.
        let unclear = unclear.into_iter().filter(|name| known.contains_key(name));
        let unclear: Vec<_> = unclear.map(|name| Tool { name, ..Tool::default() }).collect();
        for tool in tools.into_iter().chain(unclear) {
            let room = known.len() < MOST_TOOLS;
            let seen = Seen { tool: tool.clone(), learnt: Some(Instant::now()), owed: false };
            match known.entry(tool.name.clone()) {
                Entry::Vacant(place) if room => _ = place.insert(seen),
                Entry::Vacant(_) => {
                    tracing::debug!(upstream, "more tools than are remembered");
                    continue;
                }
                Entry::Occupied(mut place) => {
                    let before = place.insert(seen);
                    if before.tool != tool {
                        changed += 1;
                    } else if !before.owed {
                        continue;
                    }
                }
            }
            news.push(tool);
        }
        drop(upstreams);
        if changed > 0 {
            tracing::info!(upstream, tools = changed, "tools have changed in the listing");
        }
        news.iter().map(|tool| tool.record(upstream)).collect()
    }

    /// The store has not taken what was learnt of these tools: they are given again with the next listing.
    pub fn not_stored<'a>(&self, keys: impl IntoIterator<Item = &'a str>) {
        let mut upstreams = self.upstreams.write().unwrap_or_else(PoisonError::into_inner);
        for key in keys {
            let seen =
                key.split_once('\0').and_then(|(upstream, tool)| upstreams.get_mut(upstream)?.get_mut(tool));
            if let Some(seen) = seen {
                seen.owed = true;
            }
        }
    }

    /// What counts for a call of this tool.
    pub fn known(&self, upstream: &str, rules: &Rules, tool: &str) -> Known {
        let upstreams = self.upstreams.read().unwrap_or_else(PoisonError::into_inner);
        rules.judge(tool, upstreams.get(upstream).and_then(|tools| tools.get(tool)).map(|seen| &seen.tool))
    }

    /// Every tool of an upstream that a listing showed or the configuration names, by name, with what counts.
    pub fn all(&self, upstream: &str, rules: &Rules) -> Vec<(Tool, Known)> {
        let upstreams = self.upstreams.read().unwrap_or_else(PoisonError::into_inner);
        let seen = upstreams.get(upstream).cloned().unwrap_or_default();
        drop(upstreams);
        let named = rules.overrides.keys().filter(|name| !seen.contains_key(*name)).cloned();
        let named = named.map(|name| {
            let known = rules.judge(&name, None);
            (Tool { name, ..Tool::default() }, known)
        });
        let mut all: Vec<_> = named.collect();
        all.extend(seen.into_values().map(|Seen { tool, .. }| {
            let known = rules.judge(&tool.name, Some(&tool));
            (tool, known)
        }));
        all.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        all
    }

    /// All that is to be stored of an upstream, by key.
    pub fn stored(&self, upstream: &str) -> Vec<Record> {
        let upstreams = self.upstreams.read().unwrap_or_else(PoisonError::into_inner);
        let tools = upstreams.get(upstream).into_iter().flat_map(BTreeMap::values);
        tools.map(|seen| seen.tool.record(upstream)).collect()
    }

    /// Takes what the store kept of an upstream, also by another sidecar. What a listing showed here a moment ago is
    /// newer and stays; a record that can't be read is passed over.
    pub fn load(&self, upstream: &str, records: impl IntoIterator<Item = Record>) {
        let mut upstreams = self.upstreams.write().unwrap_or_else(PoisonError::into_inner);
        let known = upstreams.entry(upstream.to_owned()).or_default();
        for record in records {
            let tool = serde_json::from_slice::<Tool>(&record.value).ok();
            let Some(tool) = tool.filter(|tool| record.key == key(upstream, &tool.name)) else {
                tracing::debug!(upstream, "a stored tool that can't be read is passed over");
                continue;
            };
            let room = known.len() < MOST_TOOLS;
            let take = match known.get(&tool.name) {
                Some(seen) => seen.learnt.is_none_or(|at| at.elapsed() >= FRESH),
                None => room,
            };
            if take {
                known.insert(tool.name.clone(), Seen { tool, learnt: None, owed: false });
            }
        }
    }
}

impl Tool {
    fn record(&self, upstream: &str) -> Record {
        // Texts and flags: nothing in it can fail to be written.
        Record { key: key(upstream, &self.name), value: serde_json::to_vec(self).unwrap_or_default() }
    }
}

/// What the keys of all of an upstream's records begin with.
pub fn key_prefix(upstream: &str) -> String {
    key(upstream, "")
}

/// An upstream's name has no NUL, so no two pairs have one key.
fn key(upstream: &str, tool: &str) -> String {
    format!("{upstream}\0{tool}")
}

impl Rules {
    /// What counts for a call of the tool `name`; `seen` is how a listing showed it.
    fn judge(&self, name: &str, seen: Option<&Tool>) -> Known {
        let digest = seen.and_then(|tool| tool.digest.as_deref());
        let named = self.overrides.get(name);
        let approved = seen.and(self.approved.as_ref()).map(|approval| approval.covers(name, digest));
        // One that no listing showed yet can't have changed. It is new if neither the approval nor the operator knows it.
        let new = seen.is_none()
            && named.is_none()
            && self.approved.as_ref().is_some_and(|approval| !approval.names(name));
        let hints = seen.filter(|_| approved != Some(false));
        let own = named.copied().unwrap_or_default();
        let count =
            |own: Option<bool>, hint: fn(&Tool) -> bool| own.unwrap_or_else(|| hints.is_some_and(hint));
        let read_only = count(own.read_only, |tool| tool.read_only);
        let idempotent = count(own.idempotent, |tool| tool.idempotent);
        let honours_key = count(own.honours_key, |tool| tool.honours_key);
        let class = match () {
            () if read_only => RetryClass::Safe,
            () if idempotent && honours_key => RetryClass::Conditional,
            () => RetryClass::Unsafe,
        };
        Known {
            listed: seen.is_some() || named.is_some(),
            read_only,
            idempotent,
            honours_key,
            resume: count(own.resume, |tool| tool.resume),
            class,
            changed: new || approved == Some(false),
            approved,
            digest: digest.map(str::to_owned),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing into a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests;
