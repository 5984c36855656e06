//! The idempotency key: where it comes from, and how it is written.

use http::{HeaderMap, HeaderName, HeaderValue};
use sha2::{Digest as _, Sha256};

use super::identity::Identity;
use crate::message::canonical::{self, canonical};

/// IETF draft § 2.
pub(crate) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The digest of a call's arguments: the first 32 hex digits of SHA-256 over their canonical form; absent ones count as
/// `{}`.
///
/// # Errors
///
/// The arguments have no canonical form.
pub fn digest(arguments: Option<&[u8]>) -> Result<String, canonical::Error> {
    let form = canonical(arguments.unwrap_or(b"{}"))?;
    Ok(hex(&Sha256::digest(form)[..16]))
}

/// Lower-case hex digits.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    // Digits are text.
    String::from_utf8(digits.map(|digit| DIGITS[usize::from(digit)]).collect()).unwrap_or_default()
}

/// Where a call's key comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Derivation {
    /// There is no identity: none.
    None,
    /// This is it: the node's own, one made of an ordinal that the node counts, or an `Idempotency-Key` header.
    Known {
        /// The key.
        key: String,
        /// It is the node's own, or another that stays as it is whatever the store knows.
        fixed: bool,
    },
    /// The activity's key is fixed at its first attempt; if the store holds none yet, it is `first`.
    Activity {
        /// The activity, within (upstream, job, continued): where the store keeps its key.
        activity: String,
        /// The key of a first attempt.
        first: First,
    },
}

/// The key of an activity's first attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum First {
    /// This.
    Key(String),
    /// This prefix, and the ordinal that the series counts up to.
    Counted {
        /// `<job>/s<n>/<function>#<digest>/`.
        prefix: String,
        /// What is counted: within (upstream, job, continued, session, `session_start`) the function with that digest.
        series: String,
    },
}

/// Whether anything is there that a key could be made of; only then the call needs a digest.
pub fn is_named(identity: &Identity, own: Option<&str>, headers: &HeaderMap) -> bool {
    let counted = identity.activity.is_some() || identity.session.is_some();
    own.is_some() || (identity.job.is_some() && counted) || header_key(headers) != Derivation::None
}

/// Whether the call's key is its `Idempotency-Key` header.
pub fn has_header_key(identity: &Identity, headers: &HeaderMap) -> bool {
    let named = identity.job.is_some() && (identity.activity.is_some() || identity.session.is_some());
    !named && header_key(headers) != Derivation::None
}

/// Derives a call's key. `own`: the key that the node put there; `idempotent`: the tool says `idempotentHint: true`.
pub fn derive(
    identity: &Identity,
    own: Option<&str>,
    function: &str,
    digest: &str,
    idempotent: bool,
    headers: &HeaderMap,
) -> Derivation {
    if let Some(own) = own {
        return Derivation::Known { key: own.to_owned(), fixed: true };
    }
    let Some(job) = &identity.job else { return header_key(headers) };
    let m = identity.continued;
    if let (Some(n), true) = (identity.session, idempotent) {
        let run = if m == 0 { String::new() } else { format!("r{m}/") };
        let prefix = format!("{job}/{run}s{n}/{function}#{digest}/");
        let counted = || First::Counted {
            series: join(&[
                job,
                &m.to_string(),
                &n.to_string(),
                identity.session_start.as_deref().unwrap_or_default(),
                function,
                digest,
            ]),
            prefix: prefix.clone(),
        };
        return match (&identity.activity, identity.k) {
            (None, Some(k)) => Derivation::Known { key: format!("{prefix}{k}"), fixed: false },
            (Some(activity), Some(k)) => Derivation::Activity {
                activity: join(&[job, &m.to_string(), activity]),
                first: First::Key(format!("{prefix}{k}")),
            },
            (Some(activity), None) => {
                Derivation::Activity { activity: join(&[job, &m.to_string(), activity]), first: counted() }
            }
            (None, None) => Derivation::None,
        };
    }
    let Some(activity) = &identity.activity else { return header_key(headers) };
    let key = if m == 0 { format!("{job}/{activity}") } else { format!("{job}/anr{m}/{activity}") };
    Derivation::Activity { activity: join(&[job, &m.to_string(), activity]), first: First::Key(key) }
}

/// Parts that cannot be confused: they hold no control characters.
fn join(parts: &[&str]) -> String {
    parts.join("\u{1}")
}

/// `Idempotency-Key` (IETF draft § 2.1: an sf-string), unquoted; one that is not quoted is taken as it stands.
fn header_key(headers: &HeaderMap) -> Derivation {
    let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
    let value = values.next().filter(|_| values.next().is_none()).and_then(|value| value.to_str().ok());
    let key = value.map(|value| unquote(value.trim())).filter(|key| !key.is_empty());
    key.map_or(Derivation::None, |key| Derivation::Known { key, fixed: true })
}

/// RFC 8941 § 3.3.3: `\"` and `\\` are the only escapes.
fn unquote(value: &str) -> String {
    let Some(inner) = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) else {
        return value.to_owned();
    };
    let mut out = String::with_capacity(inner.len());
    let mut chars = inner.chars();
    while let Some(char) = chars.next() {
        out.push(if char == '\\' { chars.next().unwrap_or(char) } else { char });
    }
    out
}

/// A key as a header can carry it: as it is, or in MCP's base64 sentinel form (MCP 2026-07-28, Streamable HTTP § Value
/// Encoding).
pub fn header_value(key: &str) -> Option<HeaderValue> {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let plain = key.bytes().all(|byte| matches!(byte, 0x20..=0x7e))
        && !key.starts_with(' ')
        && !key.ends_with(' ')
        && !key.starts_with("=?base64?");
    if plain {
        return HeaderValue::try_from(key).ok();
    }
    HeaderValue::try_from(format!("=?base64?{}?=", STANDARD.encode(key))).ok()
}

#[cfg(test)]
mod tests;
