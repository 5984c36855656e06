//! All pages of a server's listing, in whichever era it answers.

use std::collections::HashSet;

use bytes::Bytes;
use serde_json::{Map, Value};

use super::{Client, Error, Problem, Settings};
use crate::message::{Era, tools};

/// A listing has tens of entries and rarely more than one page; this ends one that never does.
const MOST_PAGES: usize = 1000;
/// Bytes of all pages together.
const MOST_BYTES: usize = 64 << 20;

/// The pages of a listing.
#[derive(Clone, Debug)]
pub struct Pages {
    /// The era they were asked for in.
    pub era: Era,
    /// The revision.
    pub version: String,
    /// The answers to `tools/list`, as they came.
    pub answers: Vec<Bytes>,
}

/// Asks for the whole listing: in `era`, else as a modern client, and as a legacy one where the server's answer may
/// come of that (MCP 2026-07-28, Streamable HTTP § Backward Compatibility). A legacy session is ended.
///
/// # Errors
///
/// What each era came to.
pub async fn list_tools(settings: &Settings, era: Option<Era>) -> Result<Pages, Vec<(Era, Error)>> {
    let mut failed = Vec::new();
    if era != Some(Era::Legacy) {
        match Client::modern(settings.clone()).pages().await {
            Ok(pages) => return Ok(pages),
            Err(error) => {
                let fall_back = era.is_none() && error.problem.may_be_of_the_era();
                failed.push((Era::Modern, error));
                if !fall_back {
                    return Err(failed);
                }
            }
        }
    }
    let listed = async {
        let client = Client::initialize(settings.clone()).await?;
        let pages = client.pages().await;
        client.close().await;
        pages
    };
    listed.await.map_err(|error| {
        failed.push((Era::Legacy, error));
        failed
    })
}

impl Client {
    /// All pages of `tools/list`, in their order.
    ///
    /// # Errors
    ///
    /// A page that did not come, is none, or leads back to an earlier one; more pages or bytes than any listing has.
    pub async fn pages(&self) -> Result<Pages, Error> {
        const LIST: &str = "tools/list";
        let wrong = |text: &str| Error::new(LIST, Problem::Unreadable(text.to_owned()));
        let mut pages = Pages { era: self.era(), version: self.version().to_owned(), answers: Vec::new() };
        let (mut cursors, mut bytes) = (HashSet::new(), 0);
        let mut params = Map::new();
        loop {
            let answer = self.request(LIST, params).await?;
            let page = tools::page(&answer).ok_or_else(|| wrong("the result lists no tools"))?;
            bytes += answer.len();
            pages.answers.push(answer);
            if bytes > MOST_BYTES || page.entries.len() >= tools::MOST_ENTRIES {
                return Err(wrong("the listing is too large"));
            }
            let Some(cursor) = page.cursor else { return Ok(pages) };
            if pages.answers.len() >= MOST_PAGES || !cursors.insert(cursor.clone()) {
                return Err(wrong("the pages of the listing do not end"));
            }
            params = [("cursor".to_owned(), Value::from(cursor))].into_iter().collect();
        }
    }
}
