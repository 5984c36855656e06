//! `subscriptions/listen` (MCP 2026-07-28, Subscriptions): what a filter asks and an acknowledgement grants, which
//! subscription a message names, and the two splices that let one subscription live under two ids.

use std::{collections::HashSet, ops::Range};

use bytes::Bytes;

use super::{
    Id,
    scan::{Bad, Scan},
    splice::Edits,
};

/// Names the subscription in `_meta` of every message of its stream.
const SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";
const ACKNOWLEDGED: &[u8] = b"notifications/subscriptions/acknowledged";
const CANCELLED: &[u8] = b"notifications/cancelled";

/// Kinds of lists: the member of a filter, and the notification that tells their change.
const LISTS: [(&[u8], &str); 3] = [
    (b"toolsListChanged", "notifications/tools/list_changed"),
    (b"promptsListChanged", "notifications/prompts/list_changed"),
    (b"resourcesListChanged", "notifications/resources/list_changed"),
];
const RESOURCES: &[u8] = b"resourceSubscriptions";

/// A `notifications` object: what a client asks for, or what a server grants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Which of [`LISTS`].
    lists: [bool; 3],
    /// Each resource once, in their order.
    uris: Vec<String>,
    /// It has a member that is not known here, or not of the type it should have.
    odd: bool,
}

impl Filter {
    /// Whether it says nothing that is not known here (`taskIds`, for one).
    pub fn is_plain(&self) -> bool {
        !self.odd
    }

    /// Whether everything of `other` is in it.
    pub fn covers(&self, other: &Self) -> bool {
        let uris: HashSet<&String> = self.uris.iter().collect();
        let lists = self.lists.iter().zip(other.lists).all(|(mine, other)| *mine || !other);
        lists && other.uris.iter().all(|uri| uris.contains(uri))
    }

    /// The bytes that it holds.
    pub fn size(&self) -> usize {
        self.uris.iter().map(|uri| uri.len() + size_of::<String>()).sum()
    }

    /// The notification that the `number`th thing of it has changed, from 0, first the lists, then the resources; under
    /// the subscription `id`. `None` when there are no more.
    pub fn change(&self, number: usize, id: &Id) -> Option<Vec<u8>> {
        let mut lists =
            LISTS.iter().zip(self.lists).filter(|(_, granted)| *granted).map(|((_, method), _)| method);
        let (method, uri) = match lists.nth(number) {
            Some(method) => (*method, None),
            None => {
                let before = self.lists.iter().filter(|granted| **granted).count();
                ("notifications/resources/updated", Some(self.uris.get(number - before)?))
            }
        };
        let mut out =
            format!(r#"{{"jsonrpc":"2.0","method":"{method}","params":{{"_meta":{{"{SUBSCRIPTION_ID}":"#)
                .into_bytes();
        out.extend_from_slice(id.token());
        out.push(b'}');
        if let Some(uri) = uri {
            out.extend_from_slice(b",\"uri\":");
            out.extend_from_slice(Id::string(uri).token());
        }
        out.extend_from_slice(b"}}");
        Some(out)
    }

    /// Reads the next value.
    fn next(scan: &mut Scan<'_>) -> Result<Self, Bad> {
        let mut filter = Self::default();
        let (_, is_object) = scan.maybe_object(|scan, key| {
            let key = key.bytes();
            if let Some(list) = LISTS.iter().position(|(member, _)| **member == *key) {
                let first = scan.peek_value();
                filter.lists[list] = first == Some(b't');
                filter.odd |= !matches!(first, Some(b't' | b'f'));
                scan.value()?;
            } else if *key == *RESOURCES && scan.peek_value() == Some(b'[') {
                scan.array(|scan| {
                    match scan.maybe_string()?.and_then(|uri| uri.string()) {
                        Some(uri) => filter.uris.push(uri),
                        None => filter.odd = true,
                    }
                    Ok(())
                })?;
            } else {
                filter.odd = true;
                scan.value()?;
            }
            Ok(())
        })?;
        filter.odd |= !is_object;
        let mut seen = HashSet::new();
        filter.uris.retain(|uri| seen.insert(uri.clone()));
        Ok(filter)
    }
}

/// What a message of a subscription's stream says of the subscription itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// `notifications/subscriptions/acknowledged`, and what it grants, if it says so.
    Acknowledged(Option<Filter>),
    /// `notifications/cancelled`, and the request it names.
    Cancelled(Option<Id>),
}

/// Looks at one message; `None` for every other one.
pub fn look(data: &[u8]) -> Option<Said> {
    let (mut method, mut filter, mut request) = (None, None, None);
    let mut scan = Scan::new(data);
    let read = scan.maybe_object(|scan, key| {
        match &*key.bytes() {
            b"method" => method = scan.maybe_string()?.map(|method| method.bytes().into_owned()),
            b"params" => {
                _ = scan.maybe_object(|scan, key| {
                    match &*key.bytes() {
                        b"notifications" => filter = Some(Filter::next(scan)?),
                        b"requestId" => request = Id::next(scan)?,
                        _ => _ = scan.value()?,
                    }
                    Ok(())
                })?
            }
            _ => _ = scan.value()?,
        }
        Ok(())
    });
    read.and_then(|_| scan.end()).ok()?;
    match method.as_deref()? {
        ACKNOWLEDGED => Some(Said::Acknowledged(filter)),
        CANCELLED => Some(Said::Cancelled(request)),
        _ => None,
    }
}

/// The filter that a `subscriptions/listen` request asks for; `None` without one.
pub fn filter(body: &[u8]) -> Option<Filter> {
    let mut filter = None;
    let params = |scan: &mut Scan<'_>| {
        scan.maybe_object(|scan, key| {
            if *key.bytes() == *b"notifications" {
                filter = Some(Filter::next(scan)?);
                return Ok(());
            }
            scan.value().map(|_| ())
        })
    };
    members(body, "params", params).ok()?;
    filter
}

/// The same request under another id.
pub fn with_id(body: &Bytes, id: &Id) -> Bytes {
    let mut edits = Edits::default();
    let found = members(body, "id", |scan| {
        let span = scan.value()?;
        edits.0.push((span, text(id)));
        Ok(())
    });
    // It was classified, so this can't fail; if it does, nothing is done to it.
    found.map_or_else(|_| body.clone(), |()| edits.apply(body))
}

/// Calls `value` with each member of that name of the message's object.
fn members<'a, T>(
    body: &'a [u8],
    name: &str,
    mut value: impl FnMut(&mut Scan<'a>) -> Result<T, Bad>,
) -> Result<(), Bad> {
    let mut scan = Scan::new(body);
    let object = scan.maybe_object(|scan, key| {
        if *key.bytes() == *name.as_bytes() { value(scan).map(|_| ()) } else { scan.value().map(|_| ()) }
    });
    object.map(|_| ())
}

/// The message with `to` wherever it names the subscription `from`: `subscriptionId` in the `_meta` of its params or
/// result, its own id, and `requestId` of a cancel. Everything else stays as it came; `None` where nothing names it.
pub fn rename(data: &Bytes, from: &Id, to: &Id) -> Option<Bytes> {
    let mut edits = Edits::default();
    let mut named = |scan: &mut Scan<'_>| {
        let span = scan.value()?;
        if Id::parse(scan.slice(span.clone())).as_ref() == Some(from) {
            edits.0.push((span, text(to)));
        }
        Ok(())
    };
    let mut scan = Scan::new(data);
    let read = scan.maybe_object(|scan, key| match &*key.bytes() {
        b"id" => named(scan),
        b"params" | b"result" => inside(scan, &mut named),
        _ => scan.value().map(|_| ()),
    });
    read.ok()?;
    (!edits.0.is_empty()).then(|| edits.apply(data))
}

/// Calls `named` with what names a subscription in the params or result that is next.
fn inside(scan: &mut Scan<'_>, named: &mut impl FnMut(&mut Scan<'_>) -> Result<(), Bad>) -> Result<(), Bad> {
    let object = scan.maybe_object(|scan, key| match &*key.bytes() {
        b"_meta" => {
            let meta = scan.maybe_object(|scan, key| {
                if *key.bytes() == *SUBSCRIPTION_ID.as_bytes() {
                    return named(scan);
                }
                scan.value().map(|_| ())
            });
            meta.map(|_| ())
        }
        b"requestId" => named(scan),
        _ => scan.value().map(|_| ()),
    });
    object.map(|_: (Range<usize>, bool)| ())
}

/// An id's token as text; a body's is UTF-8.
fn text(id: &Id) -> String {
    String::from_utf8_lossy(id.token()).into_owned()
}

#[cfg(test)]
mod tests;
