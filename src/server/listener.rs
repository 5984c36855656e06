//! A bound listener and what it accepts.

use std::{
    io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpSocket, UnixListener};

use super::{Address, io::Socket};

/// Connections that wait to be accepted: also what comes while the limit of connections is reached.
const BACKLOG: u32 = 1024;

/// Data that is not acknowledged for this long means a vanished client. So does silence to probes for this long, and data
/// may be written just before that is noticed: twice this, and what the kernel's timers add, is below the 60 s promised.
pub(super) const USER_TIMEOUT: Duration = Duration::from_secs(27);

/// A bound listener. Dropped, it accepts no more, and a unix socket's file is gone.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
    address: Address,
}

#[derive(Debug)]
enum Kind {
    Tcp(TcpListener),
    Unix {
        listener: UnixListener,
        /// Held for its drop.
        _file: SocketFile,
    },
}

impl Listener {
    /// Binds. A unix socket's file that nobody listens at is replaced.
    ///
    /// # Errors
    ///
    /// As the system says; `AddrInUse` also for a unix socket that somebody listens at.
    pub fn bind(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp(address) => {
                let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
                socket.set_reuseaddr(true)?;
                socket.bind(*address)?;
                let listener = socket.listen(BACKLOG)?;
                let address = Address::Tcp(listener.local_addr()?);
                Ok(Self { kind: Kind::Tcp(listener), address })
            }
            Address::Unix(path) => {
                remove_stale(path)?;
                let listener = UnixListener::bind(path)?;
                let file = SocketFile { inode: std::fs::metadata(path)?.ino(), path: path.clone() };
                Ok(Self { kind: Kind::Unix { listener, _file: file }, address: address.clone() })
            }
        }
    }

    /// Where it listens, with the port it got.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The next connection, with its peer's label and host.
    pub(super) async fn accept(&self) -> io::Result<(Arc<Socket>, Arc<str>, Arc<str>)> {
        match &self.kind {
            Kind::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // A client that is gone already fails here; reading from it says so too.
                if let Err(error) = tune(&stream) {
                    tracing::debug!(%error, "can't set socket options");
                }
                let host = address.ip().to_canonical();
                let label = std::net::SocketAddr::new(host, address.port());
                Ok((Arc::new(Socket::Tcp(stream)), label.to_string().into(), host.to_string().into()))
            }
            Kind::Unix { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                Ok((Arc::new(Socket::Unix(stream)), "unix".into(), "unix".into()))
            }
        }
    }
}

/// No delay, and a client that vanished without a FIN is noticed: by the user time-out while data is unacknowledged, by
/// keep-alive probes while there is none.
fn tune(stream: &tokio::net::TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new()
        .with_time(Duration::from_secs(15))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    socket.set_tcp_keepalive(&probes)?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))
}

fn remove_stale(path: &Path) -> io::Result<()> {
    let Ok(meta) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !meta.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the file is there and is no socket"));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(io::ErrorKind::AddrInUse.into()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Err(error) => Err(error),
    }
}

/// The file of a unix socket, removed when dropped unless another process has put its own there.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if std::fs::metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode) {
            // Nothing is left to do about a file that can't be removed: the next start replaces it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
