//! Where a listener is.

use std::{fmt, net::SocketAddr, path::PathBuf, str::FromStr};

/// An address to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// An IP address and a port; port 0: any that is free.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

impl Address {
    /// Only this host reaches it; a unix socket counts.
    pub fn is_loopback(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().to_canonical().is_loopback(),
            Self::Unix(_) => true,
        }
    }

    /// The port, where there is one.
    pub fn port(&self) -> Option<u16> {
        match self {
            Self::Tcp(address) => Some(address.port()),
            Self::Unix(_) => None,
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "must be IP:PORT, localhost:PORT or unix:/path";
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(FORM.into()) } else { Ok(Self::Unix(path.into())) };
        }
        if let Some(port) = text.strip_prefix("localhost:") {
            return port
                .parse()
                .map(|port| Self::Tcp(([127, 0, 0, 1], port).into()))
                .map_err(|_| FORM.into());
        }
        text.parse().map(Self::Tcp).map_err(|_| FORM.into())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
