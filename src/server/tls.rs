//! TLS on a listener.

use std::{path::Path, sync::Arc};

use rustls::{ServerConfig, crypto::aws_lc_rs};
use tokio_rustls::TlsAcceptor;

use crate::certificate::{self, Own};

/// Reads a certificate chain and its key (PEM) and makes an acceptor that offers HTTP/2 and HTTP/1.1.
///
/// # Errors
///
/// A text that names the file and what is wrong with it.
pub fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, String> {
    let own = Own::read(cert, key)?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(own.chain, own.key)
        .map_err(|error| certificate::mismatch(cert, key, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
