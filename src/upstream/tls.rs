//! TLS toward upstreams: roots, custom CA, client certificates.

use std::{path::PathBuf, sync::Arc};

/// What the configuration says of TLS to one upstream. All optional.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// PEM of the CA to trust instead of the public roots.
    pub ca: Option<PathBuf>,
    /// PEM of the client certificate chain.
    pub cert: Option<PathBuf>,
    /// PEM of its private key.
    pub key: Option<PathBuf>,
}

/// Reads the files and makes a client configuration (aws-lc-rs provider, ALPN as `http1_only` says).
///
/// # Errors
///
/// A text that names the file and what is wrong with it (unreadable, no certificate, key of another certificate, expired).
pub fn client(files: &Files, http1_only: bool) -> Result<Arc<rustls::ClientConfig>, String> {
    let _ = (files, http1_only);
    unimplemented!()
}
