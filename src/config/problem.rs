//! What is wrong with a configuration, all of it, each with its place.

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The line in the file, from 1; `None`: it is in a flag, or in no place of the file.
    pub line: Option<usize>,
    /// The key as TOML writes it, or the flag.
    pub key: String,
    /// Why, in words; never with a secret.
    pub reason: String,
}

/// Everything that is wrong; shown one a line as `FILE:LINE: KEY: REASON`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    file: Option<PathBuf>,
    list: Vec<Problem>,
}

impl Problems {
    pub(super) fn of(file: Option<&Path>) -> Self {
        Self { file: file.map(Path::to_path_buf), list: Vec::new() }
    }

    pub(super) fn unreadable(file: &Path, error: &std::io::Error) -> Self {
        let mut problems = Self::of(Some(file));
        problems.add(None, "", format!("cannot be read: {error}"));
        problems
    }

    pub(super) fn add(&mut self, line: Option<usize>, key: &str, reason: impl Into<String>) {
        self.list.push(Problem { line, key: key.into(), reason: reason.into() });
    }

    /// `Ok` if there are none, else all of them in the order of the file.
    pub(super) fn none(&mut self) -> Result<(), Self> {
        if self.list.is_empty() {
            return Ok(());
        }
        self.list.sort_by_key(|problem| problem.line);
        Err(Self { file: self.file.take(), list: std::mem::take(&mut self.list) })
    }

    /// Each, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.list.iter()
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.list.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            // A flag has no line, and the file is not its place.
            if let Some(file) = self.file.as_ref().filter(|_| !problem.key.starts_with("--")) {
                write!(f, "{}:", file.display())?;
                if let Some(line) = problem.line {
                    write!(f, "{line}:")?;
                }
                f.write_str(" ")?;
            }
            if !problem.key.is_empty() {
                write!(f, "{}: ", problem.key)?;
            }
            f.write_str(&problem.reason)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// A key as TOML would write it: bare where that is allowed.
pub(super) fn quoted(key: &str) -> String {
    let bare = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !key.is_empty() && key.bytes().all(bare) { key.into() } else { format!("{key:?}") }
}
