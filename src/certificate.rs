//! Certificates and keys in PEM files, for the listener and toward upstreams alike.
//!
//! A certificate of one's own that no peer would take today (expired, not yet valid) is refused when it is read: at
//! start, or at the reload that brings it. One that expires while it is in use stays in use. No error quotes a file: it
//! may be a key.

use std::path::Path;

use rustls::{
    CertificateError, Error, RootCertStore,
    client::verify_server_cert_signed_by_trust_anchor,
    pki_types::{
        CertificateDer, PrivateKeyDer, UnixTime,
        pem::{self, PemObject},
    },
    server::ParsedCertificate,
};

/// A chain, its own certificate first, and its private key.
#[derive(Debug)]
pub struct Own {
    /// The chain.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key.
    pub key: PrivateKeyDer<'static>,
}

impl Own {
    /// Reads both files.
    ///
    /// # Errors
    ///
    /// A text that names the file and what is wrong with it: unreadable, no PEM, not valid now.
    pub fn read(cert: &Path, key: &Path) -> Result<Self, String> {
        let chain = chain(cert)?;
        let dates = chain.first().and_then(|own| unfit_dates(own, UnixTime::now()));
        if let Some(unfit) = dates {
            return Err(format!("{}: the certificate {unfit}", cert.display()));
        }
        Ok(Self { chain, key: private_key(key)? })
    }
}

/// What `rustls` says against the pair, in words.
pub fn mismatch(cert: &Path, key: &Path, error: &Error) -> String {
    match error {
        Error::InconsistentKeys(_) => {
            format!("{}: is not the key of the certificate in {}", key.display(), cert.display())
        }
        error => format!("{} with {}: {error}", cert.display(), key.display()),
    }
}

/// The certificates of a file, at least one.
///
/// # Errors
///
/// A text that names the file and what is wrong with it.
pub fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(none) if none.is_empty() => Err(format!("{}: holds no PEM certificate", path.display())),
        read => read.map_err(|error| unusable(path, &error)),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| match error {
        pem::Error::NoItemsFound => format!("{}: holds no PEM private key", path.display()),
        error => unusable(path, &error),
    })
}

fn unusable(path: &Path, error: &pem::Error) -> String {
    match error {
        pem::Error::Io(error) => format!("{}: {error}", path.display()),
        _ => format!("{}: is not valid PEM", path.display()),
    }
}

/// Says of a file of authorities that none of them is valid now. They are trusted all the same, as TLS libraries do, but
/// what they sign is hardly.
pub fn stale_authorities(path: &Path) -> Option<String> {
    let now = UnixTime::now();
    let mut unfit = chain(path).ok()?.into_iter().map(|one| unfit_dates(&one, now));
    let first = unfit.next()??;
    unfit.all(|one| one.is_some()).then(|| format!("{}: the certificate {first}", path.display()))
}

/// Why the dates of a certificate do not fit `now`: asked of the verifier that peers of a handshake use, which looks at
/// them before it looks for an issuer. What else it has against a certificate is not told here.
fn unfit_dates(certificate: &CertificateDer<'_>, now: UnixTime) -> Option<String> {
    let certificate = ParsedCertificate::try_from(certificate).ok()?;
    let nobody = RootCertStore::empty();
    match verify_server_cert_signed_by_trust_anchor(&certificate, &nobody, &[], now, &[]) {
        Err(Error::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. })) => {
            Some(format!("expired at {}", date(not_after)))
        }
        Err(Error::InvalidCertificate(CertificateError::NotValidYetContext { not_before, .. })) => {
            Some(format!("is not valid before {}", date(not_before)))
        }
        _ => None,
    }
}

fn date(time: UnixTime) -> String {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(time.as_secs());
    humantime::format_rfc3339_seconds(time).to_string()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    /// 2026-11-29.
    const NOW: UnixTime = UnixTime::since_unix_epoch(Duration::from_secs(1_795_910_400));

    fn between(from: i32, to: i32, authority: bool) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(["localhost".to_owned()]).expect("a name");
        params.not_before = date_time_ymd(from, 1, 1);
        params.not_after = date_time_ymd(to, 1, 1);
        if authority {
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        }
        params.self_signed(&KeyPair::generate().expect("a key")).expect("a certificate").into()
    }

    #[test]
    fn dates_that_do_not_fit_are_told() {
        for authority in [false, true] {
            let told = |from, to| unfit_dates(&between(from, to, authority), NOW);
            assert_eq!(told(2020, 2021).as_deref(), Some("expired at 2021-01-01T00:00:00Z"));
            assert_eq!(told(2030, 2031).as_deref(), Some("is not valid before 2030-01-01T00:00:00Z"));
            assert_eq!(told(2020, 2030), None);
            // From 2050 on dates have another form (RFC 5280 § 4.1.2.5).
            assert_eq!(told(2020, 2060), None);
            assert_eq!(told(2055, 2060).as_deref(), Some("is not valid before 2055-01-01T00:00:00Z"));
        }
        assert_eq!(unfit_dates(&CertificateDer::from(vec![0x30, 0]), NOW), None, "no certificate at all");
    }

    #[test]
    fn authorities_are_stale_once_all_of_them_are() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ca.pem");
        let pem = |certificates: &[CertificateDer<'_>]| {
            let encode = |one: &CertificateDer<'_>| {
                let text = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, one);
                format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
            };
            std::fs::write(&path, certificates.iter().map(encode).collect::<String>()).expect("written");
        };
        let (old, good) = (between(2020, 2021, true), between(2020, 2060, true));
        pem(&[old.clone(), good]);
        assert_eq!(stale_authorities(&path), None);
        pem(&[old]);
        assert!(stale_authorities(&path).expect("stale").contains("ca.pem: the certificate expired at 2021"));
        assert_eq!(stale_authorities(&folder.path().join("none")), None);
    }
}
