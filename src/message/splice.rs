//! The one rewrite on the way in: members of `params._meta`, cut out of and put into the bytes as
//! they came. Everything outside the splice is the same before and after.

use std::ops::Range;

use bytes::Bytes;

use super::{
    Kind, Message, Meta,
    scan::{Bad, Scan},
};

/// Puts `add` (key, raw JSON value) into `params._meta` and cuts the members named in `remove` out
/// of it, in one pass over the body. `_meta` and `params` are made where they are absent; where either
/// is there and is no object, the body is returned as it came. A key of `add` that is already there is left alone,
/// unless `remove` names it too: then its value is replaced.
///
/// Only requests and notifications are changed. Keys of `add` must need no JSON escape. Copies the body only if there is
/// something to do.
pub fn meta(body: &Bytes, message: &Message, add: &[(&str, &str)], remove: &[&str]) -> Bytes {
    if !matches!(message.kind, Kind::Request | Kind::Notification) {
        return body.clone();
    }
    match (&message.params.meta, &message.params.object, &message.params_value) {
        (Meta::NotObject, ..) => body.clone(),
        (Meta::Object(meta), ..) => within(body, &meta.object, add, remove),
        _ if add.is_empty() => body.clone(),
        (Meta::Absent, Some(params), _) => {
            let meta = format!("\"_meta\":{{{}}}", members(add.iter()));
            Edits::default().put_first(body, params, &meta, false).apply(body)
        }
        (Meta::Absent, None, None) => {
            // At the end, where `params` stands in messages that have one; a message with a method is never empty.
            let text = format!(",\"params\":{{\"_meta\":{{{}}}}}", members(add.iter()));
            let end = message.object.end.saturating_sub(1);
            let end = end
                - body
                    .get(..end)
                    .unwrap_or_default()
                    .iter()
                    .rev()
                    .take_while(|byte| byte.is_ascii_whitespace())
                    .count();
            Edits(vec![(end..end, text)]).apply(body)
        }
        (Meta::Absent, None, Some(_)) => body.clone(),
    }
}

/// Edits the members of the `_meta` that is there.
fn within(body: &Bytes, meta: &Range<usize>, add: &[(&str, &str)], remove: &[&str]) -> Bytes {
    let is = |key: &[u8], name: &str| key == name.as_bytes();
    let mut kept = vec![false; add.len()];
    let mut any_kept = false;
    let cut = cut(body, meta, |key| {
        let remove = remove.iter().any(|name| is(key, name));
        if !remove {
            any_kept = true;
            add.iter().zip(&mut kept).for_each(|((name, _), kept)| *kept |= is(key, name));
        }
        remove
    });
    // The body was classified, so this is an object; if not, nothing is done to it.
    let Ok(cut) = cut else { return body.clone() };
    let text = members(add.iter().zip(&kept).filter(|(_, kept)| !**kept).map(|(add, _)| add));
    let edits = Edits(cut);
    if text.is_empty() {
        edits.apply(body)
    } else {
        edits.put_first(body, meta, &text, !any_kept).apply(body)
    }
}

fn members<'a>(add: impl Iterator<Item = &'a (&'a str, &'a str)>) -> String {
    add.map(|(key, value)| format!("\"{key}\":{value}")).collect::<Vec<_>>().join(",")
}

/// Where the members of the object at `object` lie that `drop` wants cut, commas and white space so that the rest is
/// JSON again. `drop` is asked once for each member, with its key decoded.
pub(super) fn cut(
    bytes: &[u8],
    object: &Range<usize>,
    mut drop: impl FnMut(&[u8]) -> bool,
) -> Result<Vec<(Range<usize>, String)>, Bad> {
    let mut cuts = Vec::new();
    // Where the last member that stays ends, and where the run of cut ones after it begins and ends.
    let (mut stays, mut run) = (None, None::<Range<usize>>);
    Scan::from(bytes, object.start).maybe_object(|scan, key| {
        let start = key.start;
        let drop = drop(&key.bytes());
        let end = scan.value()?.end;
        if drop {
            run = Some(run.take().map_or(start, |run| run.start)..end);
        } else {
            // Up to the next key, so that the comma behind goes with it.
            cuts.extend(run.take().map(|run| (run.start..start, String::new())));
            stays = Some(end);
        }
        Ok(())
    })?;
    // The last ones: from the end of what stays, so that the comma before goes with it.
    cuts.extend(run.map(|run| (stays.unwrap_or(run.start)..run.end, String::new())));
    Ok(cuts)
}

/// Replacements, in order, none overlapping.
#[derive(Debug, Default)]
pub(super) struct Edits(pub(super) Vec<(Range<usize>, String)>);

impl Edits {
    /// Puts members first into the object at `object`; `emptied` says that no member of it stays.
    pub(super) fn put_first(
        mut self,
        bytes: &[u8],
        object: &Range<usize>,
        members: &str,
        emptied: bool,
    ) -> Self {
        let at = object.start + 1;
        let alone = emptied || Scan::from(bytes, at).peek_value() == Some(b'}');
        let comma = if alone { "" } else { "," };
        self.0.insert(0, (at..at, format!("{members}{comma}")));
        self
    }

    /// The bytes after the edits; a span that does not fit is passed over.
    pub(super) fn apply(&self, bytes: &Bytes) -> Bytes {
        if self.0.is_empty() {
            return bytes.clone();
        }
        let added: usize = self.0.iter().map(|(_, text)| text.len()).sum();
        let mut out = Vec::with_capacity(bytes.len() + added);
        let mut at = 0;
        for (span, text) in &self.0 {
            out.extend_from_slice(bytes.get(at..span.start).unwrap_or_default());
            out.extend_from_slice(text.as_bytes());
            at = span.end;
        }
        out.extend_from_slice(bytes.get(at..).unwrap_or_default());
        out.into()
    }
}

#[cfg(test)]
mod tests;
