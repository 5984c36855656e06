//! HTTP/1.1 messages as bytes: heads, lengths and chunks, read independently of the code under test.

/// A head: its first line and its fields, in order, as they came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    pub line: String,
    pub fields: Vec<(String, String)>,
    /// Bytes up to and with the empty line.
    pub len: usize,
}

impl Head {
    /// The head that `bytes` begin with, once it is whole.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let len = bytes.windows(4).position(|w| w == b"\r\n\r\n")? + 4;
        let text = String::from_utf8_lossy(&bytes[..len - 4]).into_owned();
        let mut lines = text.split("\r\n");
        let line = lines.next()?.to_owned();
        let fields = lines.filter_map(|l| l.split_once(':'));
        let fields = fields.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect();
        Some(Self { line, fields, len })
    }

    /// The status of a response.
    pub fn status(&self) -> u16 {
        self.line
            .split(' ')
            .nth(1)
            .and_then(|s| s.parse().ok())
            .unwrap_or_else(|| panic!("no status: {}", self.line))
    }

    /// The first field of that name.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.all(name).first().copied()
    }

    /// Every field of that name.
    pub fn all(&self, name: &str) -> Vec<&str> {
        let named = self.fields.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name));
        named.map(|(_, value)| value.as_str()).collect()
    }
}

/// A body as far as it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    pub bytes: Vec<u8>,
    /// How many bytes it took on the wire; `None` while more must come.
    pub wire: Option<usize>,
}

impl Body {
    /// The body behind `head`, from the `bytes` that follow it; `ended` says that no more will come.
    pub fn read(head: &Head, bytes: &[u8], ended: bool) -> Self {
        let response = head.line.starts_with("HTTP/");
        if response && (head.status() < 200 || matches!(head.status(), 204 | 304)) {
            return Self { bytes: Vec::new(), wire: Some(0) };
        }
        if head.field("transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case("chunked")) {
            return chunks(bytes);
        }
        match head.field("content-length").map(|v| v.parse::<usize>().unwrap()) {
            Some(len) if bytes.len() >= len => Self { bytes: bytes[..len].to_vec(), wire: Some(len) },
            Some(_) => Self { bytes: bytes.to_vec(), wire: None },
            None if response => Self { bytes: bytes.to_vec(), wire: ended.then_some(bytes.len()) },
            None => Self { bytes: Vec::new(), wire: Some(0) },
        }
    }
}

fn chunks(bytes: &[u8]) -> Body {
    let mut body = Body { bytes: Vec::new(), wire: None };
    let mut at = 0;
    while let Some(line) = bytes[at..].windows(2).position(|w| w == b"\r\n") {
        let size = String::from_utf8_lossy(&bytes[at..at + line]).into_owned();
        let size = usize::from_str_radix(size.split(';').next().unwrap().trim(), 16).unwrap();
        let begin = at + line + 2;
        let end = begin + size;
        if bytes.len() < end + 2 {
            body.bytes.extend_from_slice(&bytes[begin..end.min(bytes.len())]);
            break;
        }
        body.bytes.extend_from_slice(&bytes[begin..end]);
        at = end + 2;
        if size == 0 {
            body.wire = Some(at);
            break;
        }
    }
    body
}

/// A whole request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub head: Head,
    pub body: Vec<u8>,
    /// The number of whole requests this upstream had received before, over all its connections.
    pub number: usize,
    /// The number of its connection, from 0.
    pub connection: usize,
}

impl Request {
    pub fn method(&self) -> &str {
        self.head.line.split(' ').next().unwrap_or_default()
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// A whole response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub head: Head,
    pub body: Vec<u8>,
}

impl Response {
    pub fn status(&self) -> u16 {
        self.head.status()
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}
