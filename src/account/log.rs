//! The access log's dedicated writer: exchanges put lines into a bounded buffer, one thread writes them.

use std::path::PathBuf;

use super::Record;

/// Where lines go, and in which form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `None`: stdout. A file is reopened by [`Sink::reopen`].
    pub file: Option<PathBuf>,
    /// For a terminal instead of JSON.
    pub text: bool,
    /// Bytes of lines held for a slow output; lines beyond are counted and dropped.
    pub buffer: usize,
}

/// The end that exchanges write to.
#[derive(Clone, Debug)]
pub struct Sink {}

impl Sink {
    /// Never blocks.
    pub fn write(&self, record: &Record) {
        let _ = record;
    }
}
