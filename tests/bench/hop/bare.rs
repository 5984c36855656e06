//! The least that hyper can do for a hop: every byte passes, nothing is read, no connection is counted. What the sidecar
//! does on top of it is measured against this.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Frame, SizeHint};
use hyper::{
    body::Incoming,
    client::conn::http1::{SendRequest, handshake},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    spawn,
};

type Idle = Arc<Mutex<Vec<SendRequest<Incoming>>>>;

/// Serves for ever, and tells its address on stdout.
pub(crate) async fn serve(upstream: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let idle = Idle::default();
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let idle = idle.clone();
        let service = service_fn(move |request| relay(request, upstream, idle.clone()));
        spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

async fn relay(
    request: Request<Incoming>,
    upstream: SocketAddr,
    idle: Idle,
) -> io::Result<Response<Passing>> {
    let mut taken = idle.lock().expect("whole").pop();
    if let Some(sender) = &mut taken
        && sender.ready().await.is_err()
    {
        taken = None;
    }
    let mut sender = match taken {
        Some(sender) => sender,
        None => {
            let stream = TcpStream::connect(upstream).await?;
            stream.set_nodelay(true)?;
            let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
            spawn(connection);
            sender
        }
    };
    let response = sender.send_request(request).await.map_err(io::Error::other)?;
    Ok(response.map(|body| Passing { body, sender: Some(sender), idle }))
}

/// A body that gives its connection back at its end.
struct Passing {
    body: Incoming,
    sender: Option<SendRequest<Incoming>>,
    idle: Idle,
}

impl http_body::Body for Passing {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if (matches!(polled, Poll::Ready(None)) || self.body.is_end_stream())
            && let Some(sender) = self.sender.take()
        {
            self.idle.lock().expect("whole").push(sender);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
