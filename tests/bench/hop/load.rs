//! The node: calls over plain sockets, as many as a part of the bench asks for.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep, sleep_until, timeout},
};

/// Ids are told apart over the whole run.
static ID: AtomicU64 = AtomicU64::new(1);
/// Longer than any part of the bench; what takes longer is broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where calls go.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    pub(crate) path: &'static str,
    /// Each call says which one it is.
    pub(crate) identity: bool,
}

impl Target {
    pub(crate) fn new(address: SocketAddr, path: &'static str) -> Self {
        Self { address, path, identity: false }
    }

    async fn connect(&self) -> io::Result<Connection> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, target: self.clone(), input: Vec::with_capacity(16 * 1024) })
    }

    /// A modern `tools/call`, and its id.
    fn request(&self, tool: &str, arguments: &str) -> (u64, Vec<u8>) {
        let id = ID.fetch_add(1, Ordering::Relaxed);
        let said = match self.identity {
            true => format!(r#","oz0/call":{{"job":"bench-{}","activity":"{id}"}}"#, std::process::id()),
            false => String::new(),
        };
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"{tool}","arguments":{{{arguments}}},"_meta":{{"progressToken":{id},"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{{"name":"bench","version":"1"}},"io.modelcontextprotocol/clientCapabilities":{{}},"pad":"{}"{said}}}}}}}"#,
            "x".repeat(200)
        );
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: {}\r\nAccept: application/json, text/event-stream\r\nContent-Type: application/json\r\nMCP-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\nMcp-Name: {tool}\r\nUser-Agent: bench\r\nContent-Length: {}\r\n\r\n",
            self.path,
            self.address,
            body.len()
        );
        (id, (head + &body).into_bytes())
    }

    /// One call on a connection of its own; gives the last message of its answer.
    pub(crate) async fn once(&self, tool: &str, arguments: &str) -> io::Result<String> {
        let mut connection = self.connect().await?;
        let answer = connection.call(tool, arguments).await?;
        Ok(String::from_utf8_lossy(&answer.event).into_owned())
    }

    /// `calls` of `tool` over `connections`, one after the other on each.
    pub(crate) async fn calls(&self, connections: usize, calls: usize, tool: &'static str) -> io::Result<()> {
        let mut tasks = JoinSet::new();
        for _ in 0..connections {
            let mut connection = self.connect().await?;
            tasks.spawn(async move {
                for _ in 0..calls / connections {
                    let last = connection.call(tool, "").await?.event;
                    assert!(last.ends_with(b"[]}}"), "an answer: {}", String::from_utf8_lossy(&last));
                }
                Ok(())
            });
        }
        all(tasks).await
    }

    /// A call each millisecond over 32 connections; gives their times, sorted.
    pub(crate) async fn each_millisecond(&self, calls: u32) -> io::Result<Vec<Duration>> {
        const CONNECTIONS: u32 = 32;
        let began = Instant::now() + Duration::from_millis(5);
        let mut tasks = JoinSet::new();
        for first in 0..CONNECTIONS {
            let mut connection = self.connect().await?;
            tasks.spawn(async move {
                let mut took = Vec::new();
                for n in (first..calls).step_by(CONNECTIONS as usize) {
                    sleep_until(began + Duration::from_millis(u64::from(n))).await;
                    let sent = Instant::now();
                    connection.call("json", "").await?;
                    took.push(sent.elapsed());
                }
                Ok::<_, io::Error>(took)
            });
        }
        let mut took = Vec::new();
        while let Some(some) = tasks.join_next().await {
            took.extend(some.expect("no panic")?);
        }
        took.sort();
        Ok(took)
    }

    /// Calls of one node for that long, each a while after the last was answered; gives their times, sorted.
    pub(crate) async fn one_after_the_other(&self, time: Duration) -> io::Result<Vec<Duration>> {
        let (mut connection, until) = (self.connect().await?, Instant::now() + time);
        let mut took = Vec::new();
        while took.is_empty() || Instant::now() < until {
            let sent = Instant::now();
            connection.call("json", "").await?;
            took.push(sent.elapsed());
            sleep(Duration::from_millis(5)).await;
        }
        took.sort();
        Ok(took)
    }

    /// Calls a tool that floods, and reads nothing.
    pub(crate) async fn stalled(&self) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(4096)?;
        let mut stream = socket.connect(self.address).await?;
        let (_, request) = self.request("torrent", "");
        stream.write_all(&request).await?;
        Ok(stream)
    }

    /// `streams` at full speed, with `events` of the upstream on each; gives how many came.
    pub(crate) async fn streams(&self, streams: usize, tool: &'static str, events: usize) -> io::Result<u64> {
        let count = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        for _ in 0..streams {
            let (mut connection, count) = (self.connect().await?, count.clone());
            tasks.spawn(async move {
                let answer = connection.call(tool, &format!(r#""events":{events}"#)).await?;
                let is_final = memchr::memmem::find(&answer.event, b"\"result\"").is_some();
                assert!(is_final, "the response comes last");
                count.fetch_add(answer.events - 1, Ordering::Relaxed);
                Ok(())
            });
        }
        all(tasks).await?;
        Ok(count.load(Ordering::Relaxed))
    }

    /// Opens streams that stay open.
    pub(crate) async fn open(&self, streams: usize) -> io::Result<Open> {
        let came = Came::default();
        let mut open = Vec::new();
        while open.len() < streams {
            let mut opening = JoinSet::new();
            for _ in 0..(streams - open.len()).min(64) {
                let (target, came) = (self.clone(), came.clone());
                opening.spawn(async move { target.open_one(came).await });
            }
            while let Some(opened) = opening.join_next().await {
                open.push(opened.expect("no panic")?);
            }
        }
        Ok(Open { streams: open, came })
    }

    async fn open_one(&self, came: Came) -> io::Result<(u64, JoinHandle<()>)> {
        let (id, request) = self.request("open", "");
        let mut connection = self.connect().await?;
        connection.stream.write_all(&request).await?;
        let mut body = connection.head().await?;
        while body.events == 0 {
            connection.more(&mut body).await?;
        }
        let reader = tokio::spawn(async move {
            loop {
                let before = body.events;
                if body.ended || connection.more(&mut body).await.is_err() {
                    return;
                }
                came.note(body.events - before, &body.event);
            }
        });
        Ok((id, reader))
    }

    /// Reads a flood of `ms` slowly, 64 KiB a second; gives how long after its end the response came, if within
    /// `patience`.
    pub(crate) async fn slow(&self, ms: u64, patience: Duration) -> io::Result<Option<Duration>> {
        let socket = TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(64 * 1024)?;
        let mut stream = socket.connect(self.address).await?;
        let (_, request) = self.request("flood", &format!(r#""ms":{ms}"#));
        stream.write_all(&request).await?;
        let until = Instant::now() + Duration::from_millis(ms) + patience;
        let (mut piece, mut tail) = (vec![0; 6554], Vec::new());
        while Instant::now() < until {
            sleep(Duration::from_millis(100)).await;
            match timeout(Duration::from_millis(1), stream.read(&mut piece)).await {
                Ok(Ok(0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => tail.extend_from_slice(&piece[..read?]),
                Err(_) => {}
            }
            if let Some(at) = memchr::memmem::find(&tail, b"\"text\":\"") {
                let text = String::from_utf8_lossy(&tail[at + 8..]);
                if let Some((ended, _)) = text.split_once('"') {
                    let ended = Duration::from_nanos(ended.parse().map_err(io::Error::other)?);
                    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                    return Ok(Some(now.unwrap_or_default().saturating_sub(ended)));
                }
            }
            tail.drain(..tail.len().saturating_sub(1024));
        }
        Ok(None)
    }
}

async fn all(mut tasks: JoinSet<io::Result<()>>) -> io::Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended.expect("no panic")?;
    }
    Ok(())
}

/// The events of all streams that are open.
#[derive(Clone, Default)]
struct Came {
    count: Arc<AtomicU64>,
    /// How long the last one of each read was under way.
    took: Arc<Mutex<Vec<Duration>>>,
}

impl Came {
    fn note(&self, events: u64, last: &[u8]) {
        self.count.fetch_add(events, Ordering::Relaxed);
        let sent = memchr::memmem::find(last, b"\"data\":\"").and_then(|at| {
            let digits = last[at + 8..].iter().take_while(|byte| byte.is_ascii_digit());
            digits.map(|digit| char::from(*digit)).collect::<String>().parse().ok()
        });
        if let Some(sent) = sent {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            self.took.lock().expect("whole").push(now.saturating_sub(Duration::from_nanos(sent)));
        }
    }
}

/// Streams that are open; dropped, they are closed.
pub(crate) struct Open {
    pub(crate) streams: Vec<(u64, JoinHandle<()>)>,
    came: Came,
}

impl Open {
    /// Has the upstream visit them `rate` times a second for `ms`, with `burst` events each time; waits for all of them,
    /// and gives how many that were.
    pub(crate) async fn emit(&self, upstream: &Target, rate: u64, burst: u64, ms: u64) -> io::Result<u64> {
        let before = self.came.count.load(Ordering::Relaxed);
        self.came.took.lock().expect("whole").clear();
        let asked = format!(r#""rate":{rate},"burst":{burst},"ms":{ms}"#);
        let emitted = text(&upstream.once("emit", &asked).await?).parse::<u64>().expect("a number");
        let all = async {
            while self.came.count.load(Ordering::Relaxed) < before + emitted {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, all).await?;
        Ok(emitted)
    }

    /// How long the events of the last [`emit`](Self::emit) were under way, sorted.
    pub(crate) fn took(&self) -> Vec<Duration> {
        let mut took = std::mem::take(&mut *self.came.took.lock().expect("whole"));
        took.sort();
        took
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.streams.iter().for_each(|(_, reader)| reader.abort());
    }
}

/// The text of a tool's result.
pub(crate) fn text(message: &str) -> &str {
    message.split("\"text\":\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or_default()
}

struct Connection {
    stream: TcpStream,
    target: Target,
    input: Vec<u8>,
}

impl Connection {
    /// Makes a call and reads its answer to the end.
    async fn call(&mut self, tool: &str, arguments: &str) -> io::Result<Answer> {
        let (_, request) = self.target.request(tool, arguments);
        self.stream.write_all(&request).await?;
        let mut body = self.head().await?;
        while !body.ended {
            timeout(PATIENCE, self.more(&mut body)).await??;
        }
        Ok(body)
    }

    /// Reads the head of an answer, and what came with it.
    async fn head(&mut self) -> io::Result<Answer> {
        loop {
            if let Some(end) = memchr::memmem::find(&self.input, b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&self.input[..end]).to_ascii_lowercase();
                assert!(head.starts_with("http/1.1 200 "), "a good answer: {head}");
                let length = head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
                self.input.drain(..end + 4);
                let length = length.and_then(|length| length.parse().ok());
                let mut answer = Answer {
                    left: length.unwrap_or(0),
                    chunked: length.is_none(),
                    ended: false,
                    events: 0,
                    event: Vec::new(),
                };
                answer.take(&mut self.input);
                return Ok(answer);
            }
            self.read().await?;
        }
    }

    async fn more(&mut self, answer: &mut Answer) -> io::Result<()> {
        if !answer.ended {
            self.read().await?;
            answer.take(&mut self.input);
        }
        Ok(())
    }

    async fn read(&mut self) -> io::Result<()> {
        match self.stream.read_buf(&mut self.input).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}

/// The body of an answer as it comes.
struct Answer {
    /// Bytes of the body or of the chunk that are still to come.
    left: usize,
    chunked: bool,
    ended: bool,
    /// Events that are complete; comments are none.
    events: u64,
    /// The newest event, or the JSON body.
    event: Vec<u8>,
}

impl Answer {
    fn take(&mut self, input: &mut Vec<u8>) {
        let mut at = 0;
        while !self.ended {
            if self.chunked && self.left == 0 {
                let Some(line) = memchr::memchr(b'\n', &input[at..]) else { break };
                let size = std::str::from_utf8(&input[at..at + line]).unwrap_or_default().trim();
                at += line + 1;
                match (size, usize::from_str_radix(size, 16)) {
                    ("", _) => {}
                    (_, Ok(size)) => {
                        self.left = size;
                        if size == 0 && input.len() < at + 2 {
                            at -= line + 1;
                            break;
                        }
                        self.ended = size == 0;
                        at += if self.ended { 2 } else { 0 };
                    }
                    (bad, Err(_)) => panic!("no chunk size: {bad}"),
                }
                continue;
            }
            let some = self.left.min(input.len() - at);
            if self.chunked {
                self.events(&input[at..at + some]);
            } else {
                self.event.extend_from_slice(&input[at..at + some]);
            }
            at += some;
            self.left -= some;
            self.ended = !self.chunked && self.left == 0;
            if at == input.len() {
                break;
            }
        }
        input.drain(..at);
    }

    fn events(&mut self, mut data: &[u8]) {
        while let Some(line) = memchr::memchr(b'\n', data) {
            if self.event.ends_with(b"\n\n") {
                self.event.clear();
            }
            self.event.extend_from_slice(&data[..=line]);
            data = &data[line + 1..];
            self.events += u64::from(self.event.ends_with(b"\n\n") && self.event[0] != b':');
        }
        if !data.is_empty() && self.event.ends_with(b"\n\n") {
            self.event.clear();
        }
        self.event.extend_from_slice(data);
    }
}
