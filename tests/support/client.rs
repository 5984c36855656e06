//! A raw client: writes the bytes it is given, time-stamps what it reads.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use socket2::{Domain, SockRef, Socket, Type};
use tokio::time::Instant;

use super::{
    BOUND, Gate, Post, Watched,
    http::{Body, Head, Response},
    sse,
};

/// One connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    host: String,
    received: Watched<Received>,
    reading: Gate,
    reset: bool,
}

/// What came over a connection.
#[derive(Debug, Default)]
pub struct Received {
    /// Bytes not yet taken as a response.
    bytes: Vec<u8>,
    /// Every piece as one `read` gave it, with its moment.
    pub pieces: Vec<(Instant, Vec<u8>)>,
    /// When the end came: FIN or RST.
    pub closed: Option<Instant>,
}

impl Received {
    fn response(&self) -> Option<(Head, Body)> {
        let head = Head::read(&self.bytes)?;
        let body = Body::read(&head, &self.bytes[head.len..], self.closed.is_some());
        Some((head, body))
    }
}

fn show_length(received: &Received) -> String {
    format!("{} bytes, closed: {}", received.bytes.len(), received.closed.is_some())
}

fn show(received: &Received) -> String {
    format!("{:?}, closed: {}", String::from_utf8_lossy(&received.bytes), received.closed.is_some())
}

impl Client {
    /// Connects and reads whatever comes.
    pub fn connect(address: &str) -> Self {
        let client = Self::stalled(address, None);
        client.read_on();
        client
    }

    /// The same from a local address of its own, another host's in the sidecar's eyes.
    pub fn from(local: &str, address: &str) -> Self {
        let client = Self::open(address, None, Some(local));
        client.read_on();
        client
    }

    /// Connects and reads nothing until [`read_on`](Self::read_on); with `buffer` as the size of the receive buffer.
    pub fn stalled(address: &str, buffer: Option<usize>) -> Self {
        Self::open(address, buffer, None)
    }

    fn open(address: &str, buffer: Option<usize>, local: Option<&str>) -> Self {
        let to: SocketAddr = address.parse().unwrap();
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
        if let Some(size) = buffer {
            socket.set_recv_buffer_size(size).unwrap();
        }
        if let Some(local) = local {
            let local = SocketAddr::new(local.parse().unwrap(), 0);
            socket.bind(&local.into()).unwrap();
        }
        socket.connect(&to.into()).unwrap();
        socket.set_tcp_nodelay(true).unwrap();
        let stream = TcpStream::from(socket);
        let (received, reading) = (Watched::new(Received::default()), Gate::new());
        let mut from = stream.try_clone().unwrap();
        let (into, gate) = (received.clone(), reading.clone());
        thread::spawn(move || {
            gate.pass();
            let mut piece = [0; 65536];
            while let Ok(n @ 1..) = from.read(&mut piece) {
                into.change(|received| {
                    received.bytes.extend_from_slice(&piece[..n]);
                    received.pieces.push((Instant::now(), piece[..n].to_vec()));
                });
            }
            drop(from);
            into.change(|received| received.closed = Some(Instant::now()));
        });
        Self { stream, host: address.to_owned(), received, reading, reset: false }
    }

    /// Begins to read.
    pub fn read_on(&self) {
        self.reading.open();
    }

    /// Writes bytes.
    pub fn write(&self, bytes: impl AsRef<[u8]>) {
        (&self.stream).write_all(bytes.as_ref()).unwrap();
    }

    /// Writes a whole request.
    pub fn send(&self, post: &Post) {
        self.write(post.bytes(&self.host));
    }

    /// Writes a request and waits for its whole response.
    pub fn ask(&self, post: &Post) -> Response {
        self.send(post);
        self.response()
    }

    /// Waits for the head of the next response, which is not taken.
    pub fn head(&self) -> Head {
        self.received.wait("a response head", show, |received| Head::read(&received.bytes))
    }

    /// Waits for the next whole response and takes it.
    pub fn response(&self) -> Response {
        self.received.wait("a whole response", show, |received| {
            let (head, body) = received.response()?;
            received.bytes.drain(..head.len + body.wire?);
            Some(Response { head, body: body.bytes })
        })
    }

    /// Waits for the next whole response, a chunked one, and takes it. Where it is large this is the cheaper way: what has
    /// come is looked at from its end, and read once.
    pub fn large_response(&self) -> Response {
        self.received.wait_for(6 * BOUND, "a terminal chunk", show_length, |received| {
            (received.bytes.ends_with(b"0\r\n\r\n") || received.closed.is_some()).then_some(())
        });
        self.response()
    }

    /// Waits until the body of the next response, as far as it has come, is what `wanted` looks for.
    pub fn body(&self, wanted: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        self.received.wait("a body", show, |received| {
            received.response().map(|(_, body)| body.bytes).filter(|bytes| wanted(bytes))
        })
    }

    /// Waits until the next response's stream holds `count` events.
    pub fn events(&self, count: usize) -> Vec<sse::Event> {
        sse::read(&self.body(|bytes| sse::read(bytes).events.len() >= count)).events
    }

    /// Waits until the other side has closed; says when.
    pub fn closed(&self) -> Instant {
        self.received.wait("the connection's end", show, |received| received.closed)
    }

    /// When the other side closed, if it has.
    pub fn closed_yet(&self) -> Option<Instant> {
        self.received.lock().closed
    }

    /// Every piece so far, with its moment.
    pub fn pieces(&self) -> Vec<(Instant, Vec<u8>)> {
        self.received.lock().pieces.clone()
    }

    /// Every byte so far.
    pub fn bytes(&self) -> Vec<u8> {
        self.pieces().into_iter().flat_map(|(_, piece)| piece).collect()
    }

    /// Closes the connection with FIN, both ways.
    pub fn close(&self) -> Instant {
        let _ = self.stream.shutdown(Shutdown::Both);
        Instant::now()
    }

    /// FIN for its own direction only; goes on reading.
    pub fn half_close(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }

    /// Closes the connection with RST.
    pub fn reset(mut self) {
        SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).unwrap();
        // The reading thread holds another handle of the socket, and only the last one to go sends the RST.
        let _ = self.stream.shutdown(Shutdown::Read);
        self.read_on();
        self.closed();
        self.reset = true;
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.reset {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        self.reading.open();
    }
}
