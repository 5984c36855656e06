//! Whom we trust, who we are, and which HTTP the handshake chooses.

use std::{fs, path::PathBuf, sync::Arc};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tempfile::TempDir;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::*;
use crate::upstream::tls::{Files, client};

/// A certificate authority, and the folder its files are in.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let authority = Self { issuer, folder: tempfile::tempdir().unwrap() };
        fs::write(authority.path("ca.pem"), authority.issuer.pem()).unwrap();
        authority
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Issues a certificate and writes `name.pem` and `name.key`.
    fn issue(&self, name: &str) -> Files {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let (cert, file) = (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        fs::write(&cert, certificate.pem()).unwrap();
        fs::write(&file, key.serialize_pem()).unwrap();
        Files { ca: Some(self.path("ca.pem")), cert: Some(cert), key: Some(file) }
    }

    fn trusted(&self) -> Files {
        Files { ca: Some(self.path("ca.pem")), cert: None, key: None }
    }

    /// A server for `localhost`.
    fn acceptor(&self, alpn: &[&str], ask_client: bool) -> TlsAcceptor {
        let files = self.issue("server");
        let chain = vec![CertificateDer::from_pem_file(files.cert.unwrap()).unwrap()];
        let key = PrivateKeyDer::from_pem_file(files.key.unwrap()).unwrap();
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = if ask_client {
            let mut roots = RootCertStore::empty();
            roots.add(self.issuer.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        } else {
            builder.with_no_client_auth()
        };
        let mut config = builder.with_single_cert(chain, key).unwrap();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }
}

fn upstream(server: &Server, files: &Files, http1_only: bool) -> Upstream {
    let mut settings = settings(&format!("https://localhost:{}/mcp", server.address().port()));
    settings.tls = Some(client(files, http1_only).unwrap());
    settings.http1_only = http1_only;
    Upstream::new(settings)
}

async fn accept(server: &Server, acceptor: &TlsAcceptor) -> std::io::Result<Peer<TlsStream<TcpStream>>> {
    let peer = server.accept().await;
    Ok(Peer::new(soon(acceptor.accept(peer.stream)).await?))
}

/// Answers HTTP/1.1 requests until the connection ends; gives how many.
async fn serve_http1(server: &Server, acceptor: &TlsAcceptor, requests: usize) {
    let mut peer = accept(server, acceptor).await.unwrap();
    for _ in 0..requests {
        peer.request().await;
        peer.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    }
}

#[tokio::test]
async fn an_own_ca_is_trusted_and_the_connection_used_again() {
    let authority = Authority::new();
    let server = Server::start().await;
    for (offered, http1_only) in [(&["http/1.1"][..], false), (&["h2", "http/1.1"], true), (&[], false)] {
        let acceptor = authority.acceptor(offered, false);
        let upstream = upstream(&server, &authority.trusted(), http1_only);
        let calls = async {
            for reused in [false, true, true] {
                let (_, body, sent) = exchange(&upstream, call("x")).await.unwrap();
                assert_eq!((&body[..], sent.reused, sent.http2), (&b"ok"[..], reused, false));
            }
        };
        tokio::join!(serve_http1(&server, &acceptor, 3), calls);
    }
}

#[tokio::test]
async fn http2_is_spoken_where_the_handshake_chooses_it() {
    let authority = Authority::new();
    let server = Server::start().await;
    let acceptor = authority.acceptor(&["h2", "http/1.1"], false);
    let upstream = upstream(&server, &authority.trusted(), false);
    let serve = async {
        let peer = accept(&server, &acceptor).await.unwrap();
        let mut connection = h2::server::handshake(peer.stream).await.unwrap();
        while let Some(accepted) = connection.accept().await {
            let (request, mut respond) = accepted.unwrap();
            assert_eq!(request.uri().scheme_str(), Some("https"));
            respond
                .send_response(Response::new(()), false)
                .unwrap()
                .send_data(Bytes::from("ok"), true)
                .unwrap();
        }
    };
    let calls = async {
        let (one, two) = tokio::join!(exchange(&upstream, call("1")), exchange(&upstream, call("2")));
        for answer in [one, two, exchange(&upstream, call("3")).await] {
            let (_, body, sent) = answer.unwrap();
            assert_eq!((&body[..], sent.http2), (&b"ok"[..], true));
        }
    };
    tokio::select! {
        () = serve => panic!("closed"),
        () = calls => {}
    }
    assert!(server.is_quiet().await, "the callers of a cold start share one connection");
}

#[tokio::test]
async fn callers_of_a_cold_start_each_get_a_connection_where_http1_is_chosen() {
    let authority = Authority::new();
    let server = Server::start().await;
    let acceptor = authority.acceptor(&["http/1.1"], false);
    let upstream = upstream(&server, &authority.trusted(), false);
    let serve = async {
        tokio::join!(serve_http1(&server, &acceptor, 1), serve_http1(&server, &acceptor, 1));
    };
    let ((), one, two) = tokio::join!(serve, exchange(&upstream, call("1")), exchange(&upstream, call("2")));
    assert!(!one.unwrap().2.reused && !two.unwrap().2.reused);
}

#[tokio::test]
async fn another_ca_is_unreachable_and_sees_no_request() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = Server::start().await;
    let acceptor = authority.acceptor(&["http/1.1"], false);
    let upstream = upstream(&server, &other.trusted(), false);
    let (accepted, failed) = tokio::join!(accept(&server, &acceptor), exchange(&upstream, call("x")));
    assert!(accepted.is_err());
    let failed = failed.unwrap_err();
    assert!(matches!(&failed, Error::Unreachable(text) if text.contains("TLS")), "{failed:?}");
}

#[tokio::test]
async fn a_client_certificate_is_shown_when_asked_for() {
    let authority = Authority::new();
    let server = Server::start().await;
    let acceptor = authority.acceptor(&["http/1.1"], true);
    let known = upstream(&server, &authority.issue("client"), false);
    let (answer, ()) = tokio::join!(exchange(&known, call("x")), serve_http1(&server, &acceptor, 1));
    assert_eq!(answer.unwrap().1, "ok");

    let unknown = upstream(&server, &authority.trusted(), false);
    let (failed, accepted) = tokio::join!(exchange(&unknown, call("x")), accept(&server, &acceptor));
    assert!(failed.is_err() && accepted.is_err());
}

#[tokio::test]
async fn an_idle_connection_that_was_closed_with_a_notice_is_replaced() {
    let authority = Authority::new();
    let server = Server::start().await;
    let acceptor = authority.acceptor(&["http/1.1"], false);
    let upstream = upstream(&server, &authority.trusted(), false);
    for _ in 0..3 {
        let serve = async {
            let mut peer = accept(&server, &acceptor).await.unwrap();
            peer.request().await;
            peer.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            peer.stream.shutdown().await.unwrap();
        };
        let (answer, ()) = tokio::join!(exchange(&upstream, call("x")), serve);
        assert!(!answer.unwrap().2.reused);
    }
}

#[tokio::test]
async fn a_body_that_ends_with_the_connection_needs_the_notice() {
    let authority = Authority::new();
    let server = Server::start().await;
    let acceptor = authority.acceptor(&["http/1.1"], false);
    let upstream = upstream(&server, &authority.trusted(), false);
    for notice in [true, false] {
        let serve = async {
            let mut peer = accept(&server, &acceptor).await.unwrap();
            peer.request().await;
            peer.write("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello").await;
            if notice {
                peer.stream.shutdown().await.unwrap();
            }
        };
        let (answer, ()) = tokio::join!(exchange(&upstream, call("x")), serve);
        assert_eq!(answer.is_ok(), notice, "{answer:?}");
    }
}

#[tokio::test]
async fn dropping_the_future_closes_the_connection_below_tls_too() {
    let authority = Authority::new();
    let server = Server::start().await;
    let acceptor = authority.acceptor(&["http/1.1"], false);
    let upstream = upstream(&server, &authority.trusted(), false);
    let mut sent = Sent::default();
    let mut waiting = Box::pin(upstream.send(call("x"), &mut sent));
    let accepted = async {
        let mut peer = accept(&server, &acceptor).await.unwrap();
        peer.request().await;
        peer
    };
    let peer = tokio::select! {
        _ = &mut waiting => panic!("answered"),
        peer = accepted => peer,
    };
    drop(waiting);
    peer.closed().await;
}

#[test]
fn what_is_wrong_with_a_file_is_said_with_its_name() {
    let authority = Authority::new();
    let (one, other) = (authority.issue("one"), authority.issue("other"));
    let garbage = authority.path("garbage.pem");
    fs::write(&garbage, "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n").unwrap();
    let empty = authority.path("empty.pem");
    fs::write(&empty, "").unwrap();
    let missing = authority.path("missing.pem");
    for (files, name, what) in [
        (Files { ca: Some(missing.clone()), ..Files::default() }, "missing.pem", "No such file"),
        (Files { ca: Some(empty.clone()), ..Files::default() }, "empty.pem", "no PEM certificate"),
        (Files { ca: Some(garbage), ..Files::default() }, "garbage.pem", "not valid PEM"),
        (Files { key: other.key, ..one.clone() }, "other.key", "not the key of the certificate"),
        (Files { key: None, ..one.clone() }, "one.pem", "needs its key"),
        (Files { cert: None, ..one.clone() }, "one.key", "needs its certificate"),
        (Files { key: Some(empty), ..one.clone() }, "empty.pem", "no PEM private key"),
        (Files { key: Some(missing), ..one.clone() }, "missing.pem", "No such file"),
    ] {
        let text = client(&files, false).unwrap_err();
        assert!(text.contains(name) && text.contains(what), "{text}");
    }
    assert!(client(&one, false).is_ok());
    assert!(client(&Files::default(), true).is_ok());
}
