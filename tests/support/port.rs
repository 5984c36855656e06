//! A port that refuses connections until it is opened, and between two openings: nobody else can take it meanwhile.

use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Socket, Type};

/// The port. It is held for as long as this lives.
#[derive(Debug)]
pub struct Port {
    sockets: Vec<Socket>,
    /// `HOST:PORT`.
    pub address: String,
}

impl Port {
    /// One that may be opened so many times.
    pub fn reserve(times: usize) -> Self {
        let mut address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let mut sockets = Vec::new();
        for _ in 0..times {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.set_reuse_address(true).unwrap();
            socket.bind(&address.into()).unwrap();
            address = socket.local_addr().unwrap().as_socket().unwrap();
            sockets.push(socket);
        }
        Self { sockets, address: address.to_string() }
    }

    /// Opens it until the listener is dropped.
    pub fn open(&mut self) -> TcpListener {
        let socket = self.sockets.pop().unwrap();
        socket.listen(4096).unwrap();
        socket.into()
    }
}
