//! `health [ADDR]`: asks a running sidecar whether it is ready.

use std::{io, process::ExitCode, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    time::timeout,
};

use super::{FAILED, USAGE};
use crate::server::Address;

/// An admin listener on the same host that takes longer is not well.
const PATIENCE: Duration = Duration::from_secs(5);
/// The answer is a status line, a few headers and a word.
const ANSWER: u64 = 16 << 10;

/// Prints what the admin listener says.
pub async fn run(address: &str) -> ExitCode {
    let address: Address = match address.parse() {
        Ok(address) => address,
        Err(reason) => {
            eprintln!("mcp-sidecar: the admin listener's address {reason}");
            return ExitCode::from(USAGE);
        }
    };
    let asked = timeout(PATIENCE, ask(&address)).await;
    match asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok((200, body)) => {
            println!("{body}");
            ExitCode::SUCCESS
        }
        Ok((status, body)) => {
            eprintln!("{status}: {body}");
            ExitCode::from(FAILED)
        }
        Err(error) => {
            eprintln!("mcp-sidecar: {address}: {error}");
            ExitCode::from(FAILED)
        }
    }
}

/// The status and body of `GET /readyz`.
async fn ask(address: &Address) -> io::Result<(u16, String)> {
    match address {
        Address::Tcp(address) => exchange(TcpStream::connect(address).await?).await,
        Address::Unix(path) => exchange(UnixStream::connect(path).await?).await,
    }
}

async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<(u16, String)> {
    // The listener is on this host, whatever address it is bound to.
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.take(ANSWER).read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no HTTP answer"))?;
    Ok((status, body.trim().to_owned()))
}
