//! What the answer to a `tools/list` says of each tool (MCP 2026-07-28, Tools § Tool; the `oz0/` keys are the
//! sidecar's). Reads hints, judges nothing.

use std::ops::Range;

use super::scan::{Bad, Scan};

/// Entries of one answer that are looked at; servers have tens, the largest some thousands.
pub const MOST_ENTRIES: usize = 10_000;

/// One page of a listing.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// Its entries in their order, at most [`MOST_ENTRIES`].
    pub entries: Vec<Entry>,
    /// `nextCursor`, if it is a string.
    pub cursor: Option<String>,
}

/// One entry of `result.tools`. A hint counts only if it is `true` itself.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// Where it lies in the answer, whatever it is.
    pub value: Range<usize>,
    /// `name`, unescaped, if it is a string.
    pub name: Option<String>,
    /// `annotations.readOnlyHint`.
    pub read_only: bool,
    /// `annotations.idempotentHint`.
    pub idempotent: bool,
    /// `_meta["oz0/idempotency_key"]`.
    pub honours_key: bool,
    /// `_meta["oz0/resume"]`.
    pub resume: bool,
}

/// Reads the answer to a `tools/list`. `None`: it is no result with a list of tools.
///
/// Of repeated members the last counts, as it does for most readers; whoever acts on an entry should ask for its
/// [canonical form](super::canonical), which one with repeated members does not have.
pub fn page(answer: &[u8]) -> Option<Page> {
    let mut scan = Scan::new(answer);
    let (mut page, mut listed, mut method, mut error) = (Page::default(), false, false, false);
    scan.maybe_object(|scan, key| {
        match &*key.bytes() {
            b"result" => listed = page.read(scan)?,
            b"method" => (method, _) = (true, scan.value()?),
            b"error" => (error, _) = (scan.peek_value() != Some(b'n'), scan.value()?),
            _ => _ = scan.value()?,
        }
        Ok(())
    })
    .ok()?;
    scan.end().ok()?;
    (listed && !method && !error).then_some(page)
}

impl Page {
    /// Reads a `result`; says whether it lists tools.
    fn read(&mut self, scan: &mut Scan<'_>) -> Result<bool, Bad> {
        *self = Self::default();
        let mut listed = false;
        scan.maybe_object(|scan, key| {
            match &*key.bytes() {
                b"tools" => listed = self.read_tools(scan)?,
                b"nextCursor" => self.cursor = scan.maybe_string()?.and_then(|text| text.string()),
                _ => _ = scan.value()?,
            }
            Ok(())
        })?;
        Ok(listed)
    }

    fn read_tools(&mut self, scan: &mut Scan<'_>) -> Result<bool, Bad> {
        self.entries.clear();
        if scan.peek_value() != Some(b'[') {
            return scan.value().map(|_| false);
        }
        scan.array(|scan| {
            if self.entries.len() < MOST_ENTRIES {
                self.entries.push(Entry::read(scan)?);
            } else {
                scan.value()?;
            }
            Ok(())
        })?;
        Ok(true)
    }
}

impl Entry {
    fn read(scan: &mut Scan<'_>) -> Result<Self, Bad> {
        let mut entry = Self::default();
        let (value, _) = scan.maybe_object(|scan, key| {
            match &*key.bytes() {
                b"name" => entry.name = scan.maybe_string()?.and_then(|text| text.string()),
                b"annotations" => entry.read_annotations(scan)?,
                b"_meta" => entry.read_meta(scan)?,
                _ => _ = scan.value()?,
            }
            Ok(())
        })?;
        entry.value = value;
        Ok(entry)
    }

    fn read_annotations(&mut self, scan: &mut Scan<'_>) -> Result<(), Bad> {
        (self.read_only, self.idempotent) = (false, false);
        scan.maybe_object(|scan, key| {
            match &*key.bytes() {
                b"readOnlyHint" => self.read_only = is_true(scan)?,
                b"idempotentHint" => self.idempotent = is_true(scan)?,
                _ => _ = scan.value()?,
            }
            Ok(())
        })
        .map(|_| ())
    }

    fn read_meta(&mut self, scan: &mut Scan<'_>) -> Result<(), Bad> {
        (self.honours_key, self.resume) = (false, false);
        scan.maybe_object(|scan, key| {
            match &*key.bytes() {
                b"oz0/idempotency_key" => self.honours_key = is_true(scan)?,
                b"oz0/resume" => self.resume = is_true(scan)?,
                _ => _ = scan.value()?,
            }
            Ok(())
        })
        .map(|_| ())
    }
}

fn is_true(scan: &mut Scan<'_>) -> Result<bool, Bad> {
    let is_true = scan.peek_value() == Some(b't');
    scan.value().map(|_| is_true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"{"jsonrpc":"2.0","id":1,"result":{"resultType":"complete","tools":[
        {"name":"get","annotations":{"title":"x","readOnlyHint":true},"inputSchema":{"name":"no"}},
        {"_meta":{"oz0/idempotency_key":true,"oz0/resume":true},"name":"ch\u0061rge","annotations":{"idempotentHint":true}}
        ],"nextCursor":"p2","ttlMs":1}}"#;

    #[test]
    fn a_page_gives_each_tools_hints_and_the_cursor() {
        let page = page(PAGE.as_bytes()).unwrap();
        assert_eq!(page.cursor.as_deref(), Some("p2"));
        let [get, charge] = &page.entries[..] else { panic!("{page:?}") };
        assert_eq!(get.name.as_deref(), Some("get"));
        assert_eq!([get.read_only, get.idempotent, get.honours_key, get.resume], [true, false, false, false]);
        assert_eq!(charge.name.as_deref(), Some("charge"));
        let hints = [charge.read_only, charge.idempotent, charge.honours_key, charge.resume];
        assert_eq!(hints, [false, true, true, true]);
        assert!(
            PAGE[get.value.clone()].starts_with("{\"name\":\"get\"")
                && PAGE[get.value.clone()].ends_with("}}")
        );
    }

    #[test]
    fn a_hint_that_is_not_true_itself_is_none() {
        let text = r#"{"id":1,"result":{"tools":[{"name":"a","annotations":{"readOnlyHint":"true","idempotentHint":1},
            "_meta":{"oz0/idempotency_key":null,"oz0/resume":{"a":true}}},{"name":"b","annotations":[true],"_meta":true},7]}}"#;
        let page = page(text.as_bytes()).unwrap();
        assert_eq!(page.entries.len(), 3);
        for entry in &page.entries {
            assert!(
                !entry.read_only && !entry.idempotent && !entry.honours_key && !entry.resume,
                "{entry:?}"
            );
        }
        assert_eq!(page.entries[2].name, None);
    }

    #[test]
    fn what_is_no_listing_is_none_wherever_it_is_cut() {
        for text in [
            r#"{"id":1,"error":{"code":1,"message":""},"result":{"tools":[]}}"#,
            r#"{"id":1,"method":"tools/list","result":{"tools":[]}}"#,
            r#"{"id":1,"result":{"tools":{}}}"#,
            r#"{"id":1,"result":{}}"#,
            r#"[{"id":1,"result":{"tools":[]}}]"#,
            "",
        ] {
            assert!(page(text.as_bytes()).is_none(), "{text}");
        }
        assert!(page(br#"{"id":1,"error":null,"result":{"tools":[]}}"#).is_some());
        for cut in 0..PAGE.len() {
            assert!(page(&PAGE.as_bytes()[..cut]).is_none(), "{cut}");
        }
    }

    #[test]
    fn entries_beyond_the_bound_are_passed_over() {
        let many = vec!["{}"; MOST_ENTRIES + 5].join(",");
        let text = format!("{{\"result\":{{\"tools\":[{many}],\"nextCursor\":\"on\"}}}}");
        let page = page(text.as_bytes()).unwrap();
        assert_eq!((page.entries.len(), page.cursor.as_deref()), (MOST_ENTRIES, Some("on")));
    }
}
