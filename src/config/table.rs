//! Reads TOML tables key by key: whatever was not asked for is unknown, and every problem is kept, not only the first.
//!
//! The parser's own serde support stops at the first error, and loses the places of keys that a check over several of
//! them needs.

use std::{
    cell::RefCell,
    path::{Path, PathBuf},
    time::Duration,
};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    Problems, problem,
    secret::{self, SecretFile},
    units,
};

/// A file while it is read.
pub(super) struct Source<'a> {
    /// Its text.
    pub(super) text: &'a str,
    /// Where it is; relative paths count from its folder.
    pub(super) file: Option<&'a Path>,
    /// The environment.
    pub(super) environment: super::Environment<'a>,
    /// What was wrong so far.
    pub(super) problems: RefCell<Problems>,
    /// The secrets that files hold.
    pub(super) secrets: RefCell<Vec<SecretFile>>,
}

impl Source<'_> {
    /// The line of a place in the text, from 1.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
    }

    /// A path of the file.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.file.and_then(Path::parent).unwrap_or_else(|| Path::new("")).join(path)
    }

    pub(super) fn problem(&self, line: Option<usize>, key: &str, reason: impl Into<String>) {
        self.problems.borrow_mut().add(line, key, reason);
    }
}

/// One table.
pub(super) struct Table<'a> {
    source: &'a Source<'a>,
    path: Vec<String>,
    line: Option<usize>,
    entries: Option<&'a DeTable<'a>>,
    asked: Vec<&'static str>,
}

impl<'a> Table<'a> {
    pub(super) fn root(source: &'a Source<'a>, entries: &'a DeTable<'a>) -> Self {
        Self { source, path: Vec::new(), line: None, entries: Some(entries), asked: Vec::new() }
    }

    /// A table that is not there: every key has its default.
    pub(super) fn absent(source: &'a Source<'a>, path: Vec<String>) -> Self {
        Self { source, path, line: None, entries: None, asked: Vec::new() }
    }

    /// The file.
    pub(super) fn source(&self) -> &'a Source<'a> {
        self.source
    }

    /// Where the table begins.
    pub(super) fn line(&self) -> Option<usize> {
        self.line
    }

    /// The full name of one of its keys.
    pub(super) fn key(&self, key: &str) -> String {
        let path = self.path.iter().map(String::as_str).chain(Some(key));
        path.map(problem::quoted).collect::<Vec<_>>().join(".")
    }

    /// The line of one of its keys, if it is set.
    pub(super) fn line_of(&self, key: &str) -> Option<usize> {
        let (key, _) = self.entries?.get_key_value(key)?;
        Some(self.source.line(key.span().start))
    }

    /// A problem with one of its keys.
    pub(super) fn problem(&self, key: &str, reason: impl Into<String>) {
        self.source.problem(self.line_of(key).or(self.line), &self.key(key), reason);
    }

    fn raw(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.asked.push(key);
        self.entries?.get(key)
    }

    /// The value of a key as `parse` reads it; `None` if it is not there or is wrong, which is then a problem.
    pub(super) fn value<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&DeValue<'a>) -> Result<T, String>,
    ) -> Option<T> {
        let value = self.raw(key)?;
        parse(value.get_ref()).map_err(|reason| self.problem(key, reason)).ok()
    }

    pub(super) fn text<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        self.value(key, |value| parse(text_of(value)?))
    }

    pub(super) fn flag(&mut self, key: &'static str) -> Option<bool> {
        self.value(key, |value| value.as_bool().ok_or_else(|| wants("true or false", value)))
    }

    /// A number from 1 on.
    pub(super) fn count(&mut self, key: &'static str) -> Option<usize> {
        self.value(key, |value| {
            let integer = value.as_integer().ok_or_else(|| wants("a number", value))?;
            let number = i64::from_str_radix(integer.as_str(), integer.radix()).ok();
            let number = number.and_then(|number| u32::try_from(number).ok()).filter(|number| *number > 0);
            number.map(|number| number as usize).ok_or_else(|| format!("must be from 1 to {}", u32::MAX))
        })
    }

    /// A duration that may be zero.
    pub(super) fn duration(&mut self, key: &'static str) -> Option<Duration> {
        self.text_with_unit(key, units::duration)
    }

    /// A duration above zero.
    pub(super) fn timeout(&mut self, key: &'static str) -> Option<Duration> {
        self.text_with_unit(key, |text| match units::duration(text)? {
            Duration::ZERO => Err("must be longer than 0".into()),
            duration => Ok(duration),
        })
    }

    pub(super) fn size(&mut self, key: &'static str) -> Option<usize> {
        self.text_with_unit(key, units::size)
    }

    /// A bare number is the likely slip, so it gets the error that shows a unit rather than one about types.
    fn text_with_unit<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        self.value(key, |value| match value {
            DeValue::Integer(number) => {
                parse(number.as_str()).and(Err("must be text with a unit, in quotes".into()))
            }
            value => parse(text_of(value)?),
        })
    }

    pub(super) fn strings(&mut self, key: &'static str) -> Option<Vec<String>> {
        self.value(key, |value| {
            let items = value.as_array().ok_or_else(|| wants("a list of texts", value))?;
            items.iter().map(|item| text_of(item.get_ref()).map(str::to_owned)).collect()
        })
    }

    pub(super) fn path(&mut self, key: &'static str) -> Option<PathBuf> {
        let source = self.source;
        self.text(
            key,
            |text| {
                if text.is_empty() { Err("must name a file".into()) } else { Ok(source.path(text)) }
            },
        )
    }

    /// A secret, `{ file = "…" }` or `{ env = "…" }`.
    pub(super) fn secret(&mut self, key: &'static str) -> Option<crate::secret::Secret> {
        let value = self.raw(key)?;
        if !value.get_ref().is_table() {
            self.problem(key, "a secret is not written here: name { file = \"…\" } or { env = \"…\" }");
            return None;
        }
        let mut table = self.table_at(key, value)?;
        let file = table.path("file");
        let env = table.text("env", |name| Ok(name.to_owned()));
        let before = table.finish();
        let secret = match (file, env) {
            (Some(path), None) => secret::from_file(&path).inspect(|secret| {
                let file = SecretFile { key: self.key(key), path, secret: secret.clone() };
                self.source.secrets.borrow_mut().push(file);
            }),
            (None, Some(name)) => secret::from_environment(&name, self.source.environment),
            _ if before => return None,
            _ => Err("needs either file or env".into()),
        };
        secret.map_err(|reason| self.problem(key, reason)).ok()
    }

    /// A table below this one; an absent one has all defaults.
    pub(super) fn table(&mut self, key: &'static str) -> Self {
        let path = self.path.iter().cloned().chain(Some(key.into())).collect();
        self.raw(key)
            .and_then(|value| self.table_at(key, value))
            .unwrap_or_else(|| Self::absent(self.source, path))
    }

    /// A table below this one, if it is there.
    pub(super) fn optional_table(&mut self, key: &'static str) -> Option<Self> {
        let value = self.raw(key)?;
        self.table_at(key, value)
    }

    /// The tables below this one, whatever their names.
    pub(super) fn tables(&mut self) -> Vec<(String, Self)> {
        let entries = self.entries.take();
        let entries = entries.into_iter().flatten();
        entries
            .filter_map(|(key, value)| {
                Some((key.get_ref().to_string(), self.table_at(key.get_ref(), value)?))
            })
            .collect()
    }

    /// The texts in this table, whatever their names, with the line of each.
    pub(super) fn texts(&mut self) -> Vec<(String, String)> {
        let entries = self.entries.take();
        let mut texts = Vec::new();
        for (key, value) in entries.into_iter().flatten() {
            match text_of(value.get_ref()) {
                Ok(text) => texts.push((key.get_ref().to_string(), text.to_owned())),
                Err(reason) => {
                    let line = self.source.line(key.span().start);
                    self.source.problem(Some(line), &self.key(key.get_ref()), reason);
                }
            }
        }
        texts
    }

    fn table_at(&self, key: &str, value: &'a Spanned<DeValue<'a>>) -> Option<Self> {
        let line = Some(self.source.line(value.span().start));
        let Some(entries) = value.get_ref().as_table() else {
            self.source.problem(line, &self.key(key), wants("a table", value.get_ref()));
            return None;
        };
        let path = self.path.iter().cloned().chain(Some(key.into())).collect();
        Some(Self { source: self.source, path, line, entries: Some(entries), asked: Vec::new() })
    }

    /// Reports every key that nobody asked for, with the nearest one; says if there was any.
    pub(super) fn finish(self) -> bool {
        let mut any = false;
        for key in self.entries.into_iter().flatten().map(|(key, _)| key) {
            let name = key.get_ref().as_ref();
            if self.asked.contains(&name) {
                continue;
            }
            any = true;
            let reason = match nearest(name, &self.asked) {
                Some(near) => format!("unknown key; the nearest known one is `{near}`"),
                None => format!("unknown key; known here: {}", self.asked.join(", ")),
            };
            self.source.problem(Some(self.source.line(key.span().start)), &self.key(name), reason);
        }
        any
    }
}

/// The known key that was most likely meant.
fn nearest<'k>(key: &str, known: &[&'k str]) -> Option<&'k str> {
    let near = known.iter().map(|known| (strsim::jaro_winkler(key, known), *known));
    near.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > 0.5).map(|(_, known)| known)
}

fn text_of<'v>(value: &'v DeValue<'_>) -> Result<&'v str, String> {
    value.as_str().ok_or_else(|| wants("text in quotes", value))
}

fn wants(what: &str, value: &DeValue<'_>) -> String {
    format!("must be {what}, not {}", value.type_str())
}
