//! `approve URL`: prints a server's listing as the pin that `approved` names.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    process::ExitCode,
};

use super::{FAILED, USAGE};
use crate::{
    client::{Pages, list_tools},
    config::{Remote, process_environment},
    listing::{self, Approval},
    message::Era,
};

/// The era in which a server is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Asked {
    /// 2026-07-28.
    Modern,
    /// 2025-11-25 and before.
    Legacy,
}

impl From<Asked> for Era {
    fn from(asked: Asked) -> Self {
        match asked {
            Asked::Modern => Self::Modern,
            Asked::Legacy => Self::Legacy,
        }
    }
}

/// Asks for all pages and prints the pin.
pub async fn run(remote: &Remote, era: Option<Asked>) -> ExitCode {
    let settings = match remote.settings(&process_environment) {
        Ok(settings) => settings,
        Err(reason) => {
            eprintln!("mcp-sidecar: {reason}");
            return ExitCode::from(USAGE);
        }
    };
    let url = remote.shown_url();
    let pages = match list_tools(&settings, era.map(Into::into)).await {
        Ok(pages) => pages,
        Err(failed) => {
            for (era, error) in failed {
                eprintln!("mcp-sidecar: {url}, asked as a {} client: {error}", name(era));
            }
            return ExitCode::from(FAILED);
        }
    };
    let (approval, left_out) = pin(url.clone(), &pages);
    for tool in left_out {
        eprintln!("mcp-sidecar: {tool:?} is left out: its entry is ambiguous and can't be pinned");
    }
    eprintln!("mcp-sidecar: {} tools of {url}, {} ({})", approval.len(), name(pages.era), pages.version);
    match writeln!(io::stdout(), "{}", approval.text()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mcp-sidecar: stdout: {error}");
            ExitCode::from(FAILED)
        }
    }
}

fn name(era: Era) -> &'static str {
    match era {
        Era::Modern => "modern",
        Era::Legacy => "legacy",
    }
}

/// The pin of a listing, and the names of the tools that nobody can pin.
fn pin(url: String, pages: &Pages) -> (Approval, Vec<String>) {
    let mut tools: BTreeMap<String, Option<String>> = BTreeMap::new();
    for answer in &pages.answers {
        let (clear, unclear) = listing::read(answer);
        for (name, digest) in clear
            .into_iter()
            .map(|tool| (tool.name, tool.digest))
            .chain(unclear.into_iter().map(|name| (name, None)))
        {
            let place = tools.entry(name).or_insert_with(|| digest.clone());
            if *place != digest {
                *place = None;
            }
        }
    }
    let left_out =
        tools.iter().filter(|(_, digest)| digest.is_none()).map(|(name, _)| name.clone()).collect();
    let tools = tools.into_iter().filter_map(|(name, digest)| Some((name, digest?))).collect();
    (Approval::new(url, tools), left_out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_that_stands_twice_with_unlike_entries_is_not_pinned() {
        let page = |tools: &str| format!(r#"{{"id":1,"result":{{"tools":[{tools}]}}}}"#).into();
        let pages = Pages {
            era: Era::Modern,
            version: String::new(),
            answers: vec![
                page(r#"{"name":"same"},{"name":"unlike"},{"name":"odd","a":1,"a":2}"#),
                page(r#"{"name":"same"},{"name":"unlike","title":"x"},{"name":"last"}"#),
            ],
        };
        let (approval, left_out) = pin("http://x/mcp".into(), &pages);
        assert_eq!(left_out, ["odd", "unlike"]);
        assert!(approval.names("same") && approval.names("last") && approval.len() == 2);
    }
}
