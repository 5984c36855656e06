//! What an upstream's message is: one quick look at its top level, without decoding it.
//!
//! Used on JSON answers and on the data of each SSE event. It never fails: what can't be read is no
//! message, and is passed on as it came.

use std::ops::Range;

use bytes::Bytes;

use super::{
    Id,
    scan::{Bad, Scan},
    splice::{self, Edits},
};

/// One message from upstream. Spans index the bytes that were looked at.
#[derive(Clone, Debug)]
pub enum Answer {
    /// A response: `result` or `error`, no `method`.
    Response(Response),
    /// A server's request: `method` and `id`.
    Request {
        /// Its id, in the server's own space of ids.
        id: Id,
        /// Its method.
        method: String,
    },
    /// `notifications/progress`.
    Progress(Progress),
    /// Any other notification, by its method.
    Notification(String),
    /// A legacy batch (2025-03-26): each member.
    Batch(Vec<Self>),
}

impl Answer {
    /// It is a response, or a batch that may hold some.
    pub fn answers(&self) -> bool {
        matches!(self, Self::Response(_) | Self::Batch(_))
    }

    /// The responses that it is or holds.
    pub fn responses(&self) -> Vec<&Response> {
        match self {
            Self::Response(response) => vec![response],
            Self::Batch(answers) => answers.iter().flat_map(Self::responses).collect(),
            Self::Request { .. } | Self::Progress(_) | Self::Notification(_) => Vec::new(),
        }
    }

    /// The response, alone or in a batch, that says what only the sidecar may say.
    pub fn forged(&self) -> Option<&Response> {
        match self {
            Self::Response(response) => Some(response).filter(|response| response.forged),
            Self::Batch(answers) => answers.iter().find_map(Self::forged),
            Self::Request { .. } | Self::Progress(_) | Self::Notification(_) => None,
        }
    }
}

/// A response.
#[derive(Clone, Debug, Default)]
pub struct Response {
    /// Its id (`None`: null or absent).
    pub id: Option<Id>,
    /// Where the value of `result` lies; `None` for an error response.
    pub result: Option<Range<usize>>,
    /// Where `result._meta` lies, when it is there and an object.
    pub meta: Option<Range<usize>>,
    /// `result._meta` is there and no object.
    pub meta_not_object: bool,
    /// `result.isError` is true.
    pub is_error: bool,
    /// `result.resultType`.
    pub result_type: Option<String>,
    /// A `result._meta` has a member that only the sidecar may say (`oz0/retryable`, `oz0/retry_after`, `oz0/refetch`).
    pub forged: bool,
}

/// A `notifications/progress`.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// `params.progressToken`, if it is a string or a number.
    pub token: Option<Id>,
    /// `params.progress`, if it is a number (in the range of a double).
    pub progress: Option<f64>,
    /// `params.total`, if it is a number (in the range of a double).
    pub total: Option<f64>,
    /// `params._meta["oz0/resume"]`; empty, which is no token, if it is there and no string.
    pub resume: Option<String>,
}

/// Members of `result._meta` that only the sidecar may say.
const OURS: [&[u8]; 3] = [b"oz0/retryable", b"oz0/retry_after", b"oz0/refetch"];

/// Looks at one message. `None`: not a JSON-RPC message.
///
/// Decodes nothing but ids, methods and what progress says; of repeated members the last counts, as it does for most
/// readers behind us. Does not check UTF-8 (an event's text is the node's to decode).
pub fn look(data: &[u8]) -> Option<Answer> {
    let mut scan = Scan::new(data);
    let answer = if scan.peek_value() == Some(b'[') {
        let mut members = Vec::new();
        let array = scan.array(|scan| {
            members.extend(one(scan)?);
            Ok(())
        });
        array.ok().map(|_| Answer::Batch(members))
    } else {
        one(&mut scan).ok()?
    };
    scan.end().ok()?;
    answer
}

fn one(scan: &mut Scan<'_>) -> Result<Option<Answer>, Bad> {
    let (mut has_id, mut method, mut progress) = (false, None, Progress::default());
    let (mut result, mut error) = (None, None);
    let mut response = Response::default();
    scan.maybe_object(|scan, key| {
        match &*key.bytes() {
            b"id" => (has_id, response.id) = (true, Id::next(scan)?),
            b"method" => method = Some(scan.maybe_string()?),
            // Whatever the method will turn out to be: a second pass over them would cost more.
            b"params" => progress = Progress::read(scan)?,
            b"result" => result = Some(response.read_result(scan)?),
            // Some servers write `"error":null` beside a result.
            b"error" => (error, _) = (Some(scan.peek_value() != Some(b'n')), scan.value()?),
            _ => _ = scan.value()?,
        }
        Ok(())
    })?;
    // With a method beside it a forged result is no response; a reader that takes it for one must not be told either.
    let Some(method) = method.filter(|_| !response.forged) else {
        let answered = result.is_some() || error.is_some();
        response.result = result.filter(|_| error != Some(true));
        return Ok(answered.then_some(Answer::Response(response)));
    };
    let Some(method) = method else { return Ok(None) };
    // With an id of `null` it is neither request nor notification; what counts as the latter is passed on whatever comes.
    if !has_id && *method.bytes() == *b"notifications/progress" {
        return Ok(Some(Answer::Progress(progress)));
    }
    Ok(method.string().map(|method| match response.id {
        Some(id) => Answer::Request { id, method },
        None => Answer::Notification(method),
    }))
}

impl Response {
    /// Reads a `result`; what an earlier one said is forgotten, but for its forgeries.
    fn read_result(&mut self, scan: &mut Scan<'_>) -> Result<Range<usize>, Bad> {
        *self = Self { id: self.id.take(), forged: self.forged, ..Self::default() };
        let (span, _) = scan.maybe_object(|scan, key| {
            match &*key.bytes() {
                b"_meta" => {
                    let (span, is_object) = scan.maybe_object(|scan, key| {
                        self.forged |= OURS.contains(&&*key.bytes());
                        scan.value().map(|_| ())
                    })?;
                    self.meta = is_object.then_some(span);
                    self.meta_not_object = !is_object;
                }
                b"isError" => (self.is_error, _) = (scan.peek_value() == Some(b't'), scan.value()?),
                b"resultType" => self.result_type = scan.maybe_string()?.and_then(|text| text.string()),
                _ => _ = scan.value()?,
            }
            Ok(())
        })?;
        Ok(span)
    }
}

impl Progress {
    fn read(scan: &mut Scan<'_>) -> Result<Self, Bad> {
        let mut progress = Self::default();
        scan.maybe_object(|scan, key| {
            match &*key.bytes() {
                b"progressToken" => progress.token = Id::next(scan)?,
                b"progress" => progress.progress = number(scan)?,
                b"total" => progress.total = number(scan)?,
                b"_meta" => {
                    progress.resume = None;
                    scan.maybe_object(|scan, key| {
                        if *key.bytes() == *b"oz0/resume" {
                            let token = scan.maybe_string()?.and_then(|text| text.string());
                            progress.resume = Some(token.unwrap_or_default());
                        } else {
                            scan.value()?;
                        }
                        Ok(())
                    })?;
                }
                _ => _ = scan.value()?,
            }
            Ok(())
        })?;
        Ok(progress)
    }
}

/// The next value, if it is a number that a double can hold.
pub(super) fn number(scan: &mut Scan<'_>) -> Result<Option<f64>, Bad> {
    let digits = matches!(scan.peek_value(), Some(b'-' | b'0'..=b'9'));
    // Most numbers are whole.
    if let Some(whole) = scan.whole() {
        return Ok(Some(whole as f64));
    }
    let span = scan.value()?;
    let text = std::str::from_utf8(scan.slice(span)).ok().filter(|_| digits);
    Ok(text.and_then(|text| text.parse().ok()).filter(|number: &f64| number.is_finite()))
}

/// Cuts every forged `oz0/` member out of `result._meta`; gives the bytes and how many were cut.
/// Everything else stays as it came (an emptied `_meta` stays, empty). A repeated `result` or `_meta` is cut too, whichever a reader takes, and so
/// is every response of a batch: `response` may be any of its.
pub fn cut_forged(data: &Bytes, response: &Response) -> (Bytes, usize) {
    if !response.forged {
        return (data.clone(), 0);
    }
    let mut metas = Vec::new();
    let mut scan = Scan::new(data);
    let found = match scan.peek_value() {
        Some(b'[') => scan.array(|scan| result_metas(scan, &mut metas)).map(|_| ()),
        _ => result_metas(&mut scan, &mut metas),
    };
    // It was looked at before, so this can't fail; if it does, nothing is done to it.
    if found.is_err() {
        return (data.clone(), 0);
    }
    let (mut cuts, mut count) = (Vec::new(), 0);
    for meta in &metas {
        let cut = splice::cut(data, meta, |key| {
            let forged = OURS.contains(&key);
            count += usize::from(forged);
            forged
        });
        cuts.extend(cut.unwrap_or_default());
    }
    (Edits(cuts).apply(data), count)
}

/// Where every `_meta` of every `result` of the next message lies.
fn result_metas(scan: &mut Scan<'_>, metas: &mut Vec<Range<usize>>) -> Result<(), Bad> {
    let message = scan.maybe_object(|scan, key| {
        if *key.bytes() != *b"result" {
            return scan.value().map(|_| ());
        }
        let result = scan.maybe_object(|scan, key| {
            let value = scan.value()?;
            metas.extend((*key.bytes() == *b"_meta").then_some(value));
            Ok(())
        });
        result.map(|_| ())
    });
    message.map(|_| ())
}

#[cfg(test)]
mod tests;
