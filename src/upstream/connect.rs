//! Opens connections: DNS, TCP, TLS, and the HTTP version that came of it.
//!
//! Everything here happens before a byte of a request is written. Proxy variables of the environment
//! (`HTTP_PROXY` and its kin) are not read: the only way to an upstream is the one configured.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustls::{ClientConfig, pki_types::ServerName};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    net::{TcpStream, lookup_host},
    time::{Instant, timeout, timeout_at},
};
use tokio_rustls::TlsConnector;

use super::{
    Settings,
    http1::Http1,
    http2::Http2,
    report,
    socket::{Socket, Stream},
};

/// A peer that answers no probe or acknowledges nothing for this long is gone.
const PEER_GONE: Duration = Duration::from_secs(30);

/// An open connection that nobody uses yet.
#[derive(Debug)]
pub(super) enum Opened {
    Http1(Box<Http1>),
    Http2(Arc<Http2>),
}

/// Opens connections to one upstream.
#[derive(Debug)]
pub(super) struct Connector {
    host: String,
    port: u16,
    /// For an `https` URL: the configuration and the name to verify, or why there is none.
    tls: Option<Result<(Arc<ClientConfig>, ServerName<'static>), &'static str>>,
    prior_knowledge: bool,
    timeout: Duration,
    /// The address that worked last: a session stays on it while it is reachable.
    last_good: Mutex<Option<SocketAddr>>,
}

impl Connector {
    pub(super) fn new(settings: &Settings, prior_knowledge: bool) -> Self {
        let https = settings.url.scheme() == Some(&http::uri::Scheme::HTTPS);
        let host = settings.url.host().unwrap_or_default();
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host).to_owned();
        let tls = https.then(|| {
            let config = settings.tls.clone().ok_or("no TLS settings")?;
            let name = ServerName::try_from(host.clone()).map_err(|_| "the host is no name to verify")?;
            Ok((config, name))
        });
        Self {
            host,
            port: settings.url.port_u16().unwrap_or(if https { 443 } else { 80 }),
            tls,
            prior_knowledge,
            timeout: settings.connect_timeout,
            last_good: Mutex::default(),
        }
    }

    /// Opens a connection. The error's text names the step that failed.
    pub(super) async fn open(&self) -> Result<Opened, String> {
        match timeout(self.timeout, self.open_unbounded()).await {
            Ok(opened) => opened,
            Err(_) => Err(format!("no connection within {}", humantime::format_duration(self.timeout))),
        }
    }

    async fn open_unbounded(&self) -> Result<Opened, String> {
        let tcp = self.tcp().await?;
        let stream = match &self.tls {
            None => Stream::Plain(Socket::new(tcp)),
            Some(Err(reason)) => return Err(format!("TLS: {reason}")),
            Some(Ok((config, name))) => {
                let tls = TlsConnector::from(config.clone()).connect(name.clone(), Socket::new(tcp)).await;
                Stream::Tls(Box::new(tls.map_err(|error| format!("TLS: {error}"))?))
            }
        };
        if self.prior_knowledge || stream.chose_http2() {
            let opened = Http2::open(stream).await.map_err(|error| format!("HTTP/2: {error}"))?;
            return Ok(Opened::Http2(opened));
        }
        let opened = Http1::open(stream).await.map_err(|error| format!("HTTP/1.1: {}", report(&error)))?;
        Ok(Opened::Http1(Box::new(opened)))
    }

    /// Tries the addresses in order, the last good one first; each may take its share of the time that is left.
    async fn tcp(&self) -> Result<TcpStream, String> {
        let deadline = Instant::now() + self.timeout;
        let found = lookup_host((self.host.as_str(), self.port)).await;
        let mut addresses: Vec<_> = found.map_err(|error| format!("DNS: {error}"))?.collect();
        let last_good = *self.last_good.lock().unwrap_or_else(PoisonError::into_inner);
        // Stable: false sorts before true.
        addresses.sort_by_key(|address| Some(*address) != last_good);

        let mut failure = "DNS: the name has no address".to_owned();
        for (tried, address) in addresses.iter().enumerate() {
            let now = Instant::now();
            let left = u32::try_from(addresses.len() - tried).unwrap_or(u32::MAX);
            let share = deadline.saturating_duration_since(now) / left;
            match timeout_at(now + share, connect(*address)).await {
                Ok(Ok(tcp)) => {
                    *self.last_good.lock().unwrap_or_else(PoisonError::into_inner) = Some(*address);
                    return Ok(tcp);
                }
                Ok(Err(error)) => failure = format!("connect: {error}"),
                Err(_) => failure = "connect: no answer".to_owned(),
            }
        }
        Err(failure)
    }
}

async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let tcp = TcpStream::connect(address).await?;
    tcp.set_nodelay(true)?;
    let socket = SockRef::from(&tcp);
    let keepalive =
        TcpKeepalive::new().with_time(PEER_GONE).with_interval(Duration::from_secs(10)).with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(PEER_GONE))?;
    Ok(tcp)
}
