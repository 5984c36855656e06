//! JSON-RPC ids and progress tokens, kept as they were written.

use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

use super::{
    scan::{Bad, Scan},
    text::Text,
};

/// A JSON-RPC request id (or progress token): a string or a number, exactly as it was written.
///
/// Equality and hash see the JSON value: `"a"` equals `"\u0061"`, `1` differs from `"1"`, and
/// numbers compare by their text (`1` differs from `1.0`). Holds a copy, never the body it came in. Cheap to clone.
#[derive(Clone)]
pub struct Id {
    token: Arc<[u8]>,
    /// What it is compared by where that is not the token: a string with escapes, decoded, between its quotes.
    decoded: Option<Arc<[u8]>>,
}

impl Id {
    /// Reads a raw JSON token; `None` if it is neither a string nor a number.
    pub fn parse(token: &[u8]) -> Option<Self> {
        let mut scan = Scan::new(token);
        let id = Self::next(&mut scan).ok()?;
        scan.end().ok()?;
        id
    }

    /// The id that is this string.
    pub fn string(text: &str) -> Self {
        let token = serde_json::Value::from(text).to_string();
        Self::parse(token.as_bytes())
            .unwrap_or_else(|| Self { token: token.into_bytes().into(), decoded: None })
    }

    /// The raw JSON token, quotes and escapes included: what is written where the id is answered.
    pub fn token(&self) -> &[u8] {
        &self.token
    }

    /// Whether it is a string (and no number).
    pub fn is_string(&self) -> bool {
        self.token.first() == Some(&b'"')
    }

    /// Whether it is a string that begins with `prefix`.
    pub fn has_prefix(&self, prefix: &str) -> bool {
        self.is_string() && self.key()[1..].starts_with(prefix.as_bytes())
    }

    /// Takes the next value; `None` if it is neither a string nor a number.
    pub(super) fn next(scan: &mut Scan<'_>) -> Result<Option<Self>, Bad> {
        Ok(match scan.peek_value() {
            Some(b'"') => Some(Self::of(scan.string()?)),
            Some(b'-' | b'0'..=b'9') => {
                let span = scan.value()?;
                Some(Self { token: scan.slice(span).into(), decoded: None })
            }
            _ => scan.value().map(|_| None)?,
        })
    }

    fn of(text: Text<'_>) -> Self {
        let decoded = || [b"\"", &*text.bytes(), b"\""].concat().into();
        Self { token: text.token.into(), decoded: text.escaped.then(decoded) }
    }

    fn key(&self) -> &[u8] {
        self.decoded.as_deref().unwrap_or(&self.token)
    }
}

impl PartialEq for Id {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Id {}

impl Hash for Id {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

/// The raw token.
impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.token))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Id({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(token: &str) -> Id {
        Id::parse(token.as_bytes()).unwrap()
    }

    #[test]
    fn the_token_stays_as_it_was_written() {
        for token in [
            "0",
            "-1",
            "1",
            "\"1\"",
            "\"0\"",
            "\"\"",
            "\"ü/\\\"x\"",
            "9007199254740993",
            "1.0",
            "1e2",
            "\"\\ud800\"",
        ] {
            assert_eq!(id(token).token(), token.as_bytes());
            assert_eq!(id(token).to_string(), token);
        }
    }

    #[test]
    fn one_and_the_string_one_are_never_the_same() {
        assert_ne!(id("1"), id("\"1\""));
        assert_ne!(id("1"), id("1.0"));
        assert_ne!(id("0"), id("\"\""));
        assert_ne!(id("9007199254740993"), id("9007199254740992"));
    }

    #[test]
    fn escapes_make_no_other_id() {
        assert_eq!(id(r#""a""#), id(r#""\u0061""#));
        assert_eq!(id(r#""é/""#), id(r#""\u00e9\/""#));
        assert_ne!(id(r#""\ud800""#), id(r#""\udc00""#));
        assert_ne!(id(r#""a\"""#), id(r#""a""#));
    }

    #[test]
    fn what_is_neither_string_nor_number_is_no_id() {
        for token in ["null", "true", "{}", "[1]", "", "1 2", "\"a", "nan"] {
            assert!(Id::parse(token.as_bytes()).is_none(), "{token}");
        }
    }

    #[test]
    fn a_prefix_is_seen_through_escapes() {
        assert!(id(r#""mcp-sidecar/1""#).has_prefix("mcp-sidecar/"));
        assert!(id(r#""mcp-sidecar\/1""#).has_prefix("mcp-sidecar/"));
        assert!(!id("12").has_prefix("1"));
        assert_eq!(Id::string("a\"\n").token(), br#""a\"\n""#);
        assert_eq!(Id::string("a\"\n"), id(r#""a\u0022\u000a""#));
    }
}
