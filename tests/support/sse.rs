//! A reference reader of event streams, line by line as the WHATWG text has it (HTML § 9.2.6), so that what a client
//! would understand is known independently of the code under test.

/// What a client would have been handed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The `event` field; `message` without one.
    pub name: String,
    pub data: String,
    /// The last event id at that moment.
    pub id: String,
}

impl Event {
    /// The data as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.data).unwrap_or_else(|e| panic!("{e}: {}", self.data))
    }
}

/// What a stream held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stream {
    pub events: Vec<Event>,
    pub comments: Vec<String>,
    /// The last valid `retry`.
    pub retry: Option<u64>,
    /// Whether the stream ended within an event; that one is lost.
    pub cut: bool,
}

/// Reads a whole stream, or the part that has come.
pub fn read(bytes: &[u8]) -> Stream {
    let text = String::from_utf8_lossy(bytes);
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let mut stream = Stream::default();
    let (mut name, mut data, mut id) = (String::new(), String::new(), String::new());
    let mut rest = text;
    while let Some(end) = rest.find(['\r', '\n']) {
        let line = &rest[..end];
        rest = &rest[end + if rest[end..].starts_with("\r\n") { 2 } else { 1 }..];
        if line.is_empty() {
            if let Some(data) = data.strip_suffix('\n') {
                let name = if name.is_empty() { "message" } else { &name };
                stream.events.push(Event { name: name.to_owned(), data: data.to_owned(), id: id.clone() });
            }
            name.clear();
            data.clear();
            continue;
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "" => stream.comments.push(value.to_owned()),
            "event" => value.clone_into(&mut name),
            "data" => data.extend([value, "\n"]),
            "id" if !value.contains('\0') => value.clone_into(&mut id),
            "retry" if value.bytes().all(|b| b.is_ascii_digit()) => stream.retry = value.parse().ok(),
            _ => {}
        }
    }
    stream.cut = !rest.is_empty() || !data.is_empty() || !name.is_empty();
    stream
}
