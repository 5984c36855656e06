//! Where secrets come from: a file or a variable that the configuration names, nothing else.

use std::path::{Path, PathBuf};

use super::Environment;
use crate::secret::Secret;

/// A secret that a file holds, replaced in place when the file changes.
#[derive(Clone, Debug)]
pub struct SecretFile {
    /// The key that names it.
    pub key: String,
    /// The file.
    pub path: PathBuf,
    /// What holds it.
    pub secret: Secret,
}

impl SecretFile {
    /// Reads the file again.
    ///
    /// # Errors
    ///
    /// Why the old value stays.
    pub fn refresh(&self) -> Result<(), String> {
        self.secret.replace(read(&self.path)?);
        Ok(())
    }
}

pub(super) fn from_file(path: &Path) -> Result<Secret, String> {
    read(path).map(Secret::new)
}

pub(super) fn from_environment(name: &str, environment: Environment<'_>) -> Result<Secret, String> {
    let token = environment(name).ok_or_else(|| format!("the environment variable {name} is not set"))?;
    usable(&token).map_err(|reason| format!("the environment variable {name} {reason}")).map(Secret::new)
}

fn read(path: &Path) -> Result<String, String> {
    let token = std::fs::read_to_string(path)
        .map_err(|error| format!("the file {} cannot be read: {error}", path.display()))?;
    usable(&token).map_err(|reason| format!("the file {} {reason}", path.display()))
}

/// The token without the line end that editors add.
fn usable(text: &str) -> Result<String, &'static str> {
    let token = text.trim_end_matches(['\r', '\n']);
    if token.is_empty() {
        return Err("is empty");
    }
    match Secret::new(token.into()).authorization() {
        Some(_) => Ok(token.into()),
        None => Err("holds characters that no header can carry"),
    }
}
