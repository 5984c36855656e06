//! TLS toward upstreams: roots, custom CA, client certificates.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{ClientConfig, RootCertStore, crypto::aws_lc_rs};

use crate::certificate::{self, Own};

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
/// Without a `ca` the roots are those built in and those of the machine (`SSL_CERT_FILE`, `SSL_CERT_DIR`, else its
/// store), as far as they can be read.
///
/// # Errors
///
/// A text that names the file and what is wrong with it (unreadable, no certificate, one that is not valid now, key of
/// another certificate).
pub fn client(files: &Files, http1_only: bool) -> Result<Arc<ClientConfig>, String> {
    let roots = match &files.ca {
        Some(path) => own_roots(path)?,
        None => public_roots(),
    };
    // Never the process default: whoever links another provider must not decide this.
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let mut config = match (&files.cert, &files.key) {
        (None, None) => builder.with_no_client_auth(),
        (Some(cert), Some(key)) => {
            let own = Own::read(cert, key)?;
            builder
                .with_client_auth_cert(own.chain, own.key)
                .map_err(|error| certificate::mismatch(cert, key, &error))?
        }
        (Some(cert), None) => return Err(format!("{}: a client certificate needs its key", cert.display())),
        (None, Some(key)) => return Err(format!("{}: a key needs its certificate", key.display())),
    };
    config.alpn_protocols = match http1_only {
        true => vec![b"http/1.1".to_vec()],
        false => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
    };
    Ok(Arc::new(config))
}

fn public_roots() -> RootCertStore {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn own_roots(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificate::chain(path)? {
        roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(roots)
}
