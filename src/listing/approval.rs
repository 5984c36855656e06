//! The file of `approved`: which tools an operator has looked at, each pinned by its digest. Made by
//! `mcp-sidecar approve`.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use crate::message::canonical::canonical;

/// An approved listing. Its JSON is the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Approval {
    /// Where the listing came from, for whoever reads the file; decides nothing, since one server has many addresses.
    #[serde(default)]
    pub upstream: String,
    /// The digest of each tool's entry, by name.
    tools: BTreeMap<String, String>,
}

impl Approval {
    /// An approval of these tools, each with the digest of its entry.
    pub fn new(upstream: String, tools: BTreeMap<String, String>) -> Self {
        Self { upstream, tools }
    }

    /// Reads the file.
    ///
    /// # Errors
    ///
    /// A text that names the file and what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("the file {} cannot be read: {error}", path.display()))?;
        Self::parse(&text)
            .map_err(|reason| format!("the file {} is no approved listing: {reason}", path.display()))
    }

    /// Reads the text of such a file.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let approval: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        // A name that stands twice, which the reader above takes silently.
        canonical(text.as_bytes()).map_err(|error| error.to_string())?;
        let digest = |text: &String| {
            text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        match approval.tools.iter().find(|(_, text)| !digest(text)) {
            Some((name, _)) => Err(format!("the digest of {name:?} is not 64 lower-case hexadecimal digits")),
            None => Ok(approval),
        }
    }

    /// The text of the file: sorted by name, one tool a line.
    pub fn text(&self) -> String {
        // Texts only: nothing in it can fail to be written.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Whether the tool is approved as it is now; one whose entry has no digest never is.
    pub fn covers(&self, tool: &str, digest: Option<&str>) -> bool {
        digest.is_some_and(|digest| self.tools.get(tool).is_some_and(|approved| approved == digest))
    }

    /// Whether any form of the tool is approved.
    pub fn names(&self, tool: &str) -> bool {
        self.tools.contains_key(tool)
    }

    /// How many tools are approved.
    pub fn len(&self) -> usize {
        self.tools.len()
    }

    /// Whether no tool is approved.
    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }
}
