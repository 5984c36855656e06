//! What a socket tells of a peer that has closed.

use std::{future::poll_fn, io::ErrorKind, pin::Pin, task::Poll};

use super::*;
use crate::upstream::socket::Socket;

/// A write fails before the runtime has been told that there is something to read: the moment in which an early
/// answer would be lost.
#[tokio::test]
async fn a_failed_write_is_told_after_what_the_peer_wrote_before_it_closed() {
    let server = Server::start().await;
    let (tcp, mut peer) = tokio::join!(TcpStream::connect(server.address()), server.accept());
    let mut socket = Socket::new(tcp.unwrap());
    socket.write_all(b"request").await.unwrap();
    peer.more().await;
    socket.write_all(b"more of it").await.unwrap();
    peer.stream.readable().await.unwrap();
    peer.write("answer").await;
    // Closed with bytes unread: a reset.
    drop(peer);

    let mut wrote = Vec::new();
    for _ in 0..3 {
        let polled = poll_fn(|cx| Poll::Ready(Pin::new(&mut socket).poll_write(cx, b"the rest"))).await;
        wrote.push(polled.is_pending());
    }
    assert!(wrote[2], "the peer has closed");
    let mut read = Vec::new();
    let end = soon(socket.read_to_end(&mut read)).await.unwrap_err();
    assert_eq!(read, b"answer");
    assert!(matches!(end.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{end}");
}
