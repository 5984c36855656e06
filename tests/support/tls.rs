//! Certificates made for a test, and TLS in front of a plain server, whose certificate can be changed while it runs.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, SystemTime},
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer},
    server::WebPkiClientVerifier,
};
use socket2::SockRef;
use tokio_rustls::TlsAcceptor;

use super::{BOUND, Post, Watched};

/// A certificate authority.
#[derive(Debug)]
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// Whom certificates are for: the last are for hosts on networks of a test's own (RFC 2544 leaves the range to tests).
const NAMES: [&str; 3] = ["localhost", "127.0.0.1", "198.18.1.1"];

/// A certificate for this host and its key.
#[derive(Debug)]
pub struct Pair {
    pub der: CertificateDer<'static>,
    pub cert: String,
    pub key: String,
    key_der: Vec<u8>,
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate that is valid now.
    pub fn issue(&self) -> Pair {
        self.issue_between(2020, 4000)
    }

    /// One that is valid between the beginnings of two years.
    pub fn issue_between(&self, from: i32, to: i32) -> Pair {
        self.make(|params| {
            params.not_before = date_time_ymd(from, 1, 1);
            params.not_after = date_time_ymd(to, 1, 1);
        })
    }

    /// One that is valid until then, to the second.
    pub fn issue_until(&self, end: SystemTime) -> Pair {
        let end = end.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        self.make(|params| params.not_after = date_time_ymd(1970, 1, 1) + end)
    }

    fn make(&self, dates: impl FnOnce(&mut CertificateParams)) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(NAMES.map(str::to_owned)).unwrap();
        dates(&mut params);
        let cert = params.signed_by(&key, &self.0).unwrap();
        Pair {
            der: cert.der().clone(),
            cert: cert.pem(),
            key: key.serialize_pem(),
            key_der: key.serialize_der(),
        }
    }

    /// A client that trusts it.
    pub fn client(&self, alpn: &[&str]) -> Arc<ClientConfig> {
        let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.roots())
            .with_no_client_auth();
        config.alpn_protocols = bytes(alpn);
        Arc::new(config)
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        roots
    }
}

impl Pair {
    /// Writes `STEM.pem` and `STEM.key`.
    pub fn write(&self, folder: &Path, stem: &str) {
        fs::write(folder.join(format!("{stem}.pem")), &self.cert).unwrap();
        fs::write(folder.join(format!("{stem}.key")), &self.key).unwrap();
    }

    /// A server with this certificate; with `clients` it asks for one of theirs.
    pub fn acceptor(&self, alpn: &[&str], clients: Option<&Authority>) -> TlsAcceptor {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let roots = Arc::new(authority.roots());
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
                builder.with_client_cert_verifier(verifier.build().unwrap())
            }
        };
        let key = PrivateKeyDer::try_from(self.key_der.clone()).unwrap();
        let mut config = builder.with_single_cert(vec![self.der.clone()], key).unwrap();
        config.alpn_protocols = bytes(alpn);
        TlsAcceptor::from(Arc::new(config))
    }
}

fn bytes(alpn: &[&str]) -> Vec<Vec<u8>> {
    alpn.iter().map(|name| name.as_bytes().to_vec()).collect()
}

/// A node that speaks TLS and HTTP/1.1.
#[derive(Debug)]
pub struct Node {
    tls: ClientConnection,
    tcp: TcpStream,
}

impl Node {
    /// Connects, and trusts what this authority signed for `localhost`.
    pub fn connect(address: &str, trusted: &Authority) -> Self {
        let name = "localhost".try_into().unwrap();
        let mut tls = ClientConnection::new(trusted.client(&["http/1.1"]), name).unwrap();
        let mut tcp = TcpStream::connect(address).unwrap();
        tcp.set_read_timeout(Some(BOUND)).unwrap();
        while tls.is_handshaking() {
            tls.complete_io(&mut tcp).unwrap();
        }
        Self { tls, tcp }
    }

    /// What the other side showed.
    pub fn certificate(&self) -> CertificateDer<'static> {
        self.tls.peer_certificates().unwrap()[0].clone().into_owned()
    }

    pub fn send(&mut self, post: &Post) {
        self.write(post.bytes("localhost"));
    }

    pub fn write(&mut self, bytes: impl AsRef<[u8]>) {
        rustls::Stream::new(&mut self.tls, &mut self.tcp).write_all(bytes.as_ref()).unwrap();
    }

    /// Reads until what was told ends with this.
    pub fn wait(&mut self, end: &str) -> String {
        let mut told = Vec::new();
        let mut piece = [0; 4096];
        while !told.ends_with(end.as_bytes()) {
            let read = rustls::Stream::new(&mut self.tls, &mut self.tcp).read(&mut piece).unwrap();
            assert_ne!(read, 0, "{}", String::from_utf8_lossy(&told));
            told.extend_from_slice(&piece[..read]);
        }
        String::from_utf8(told).unwrap()
    }

    /// Says that it closes, and closes with FIN.
    pub fn close(mut self) {
        self.tls.send_close_notify();
        while self.tls.wants_write() {
            self.tls.write_tls(&mut self.tcp).unwrap();
        }
    }

    /// Closes with RST.
    pub fn reset(self) {
        SockRef::from(&self.tcp).set_linger(Some(Duration::ZERO)).unwrap();
    }
}

/// TLS in front of a plain server. Its thread ends with the test's process.
#[derive(Clone)]
pub struct Front {
    pub port: u16,
    acceptor: Arc<Mutex<TlsAcceptor>>,
    hellos: Watched<Vec<Hello>>,
}

impl std::fmt::Debug for Front {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Front").field("port", &self.port).finish_non_exhaustive()
    }
}

/// What came of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub alpn: Option<String>,
    /// The certificate that the client showed.
    pub shown: Option<CertificateDer<'static>>,
}

impl Front {
    /// Passes what is inside on to `plain`.
    pub fn start(acceptor: TlsAcceptor, plain: &str) -> Self {
        Self::start_at("127.0.0.1", acceptor, plain)
    }

    /// The same at another address of this host.
    pub fn start_at(host: &str, acceptor: TlsAcceptor, plain: &str) -> Self {
        let listener = TcpListener::bind((host, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let front = Self { port, acceptor: Arc::new(Mutex::new(acceptor)), hellos: Watched::new(Vec::new()) };
        let (this, plain) = (front.clone(), plain.to_owned());
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                while let Ok((stream, _)) = listener.accept().await {
                    stream.set_nodelay(true).unwrap();
                    let acceptor = this.acceptor.lock().unwrap().clone();
                    let (hellos, plain) = (this.hellos.clone(), plain.clone());
                    tokio::spawn(async move {
                        let Ok(mut tls) = acceptor.accept(stream).await else { return };
                        let session = tls.get_ref().1;
                        let alpn =
                            session.alpn_protocol().map(|name| String::from_utf8_lossy(name).into_owned());
                        let shown = session.peer_certificates().and_then(|chain| chain.first().cloned());
                        let shown = shown.map(CertificateDer::into_owned);
                        hellos.change(|hellos| hellos.push(Hello { alpn, shown }));
                        let mut inner = tokio::net::TcpStream::connect(plain).await.unwrap();
                        inner.set_nodelay(true).unwrap();
                        let _ = tokio::io::copy_bidirectional(&mut tls, &mut inner).await;
                    });
                }
            });
        });
        front
    }

    /// New connections get this one from now on.
    pub fn replace(&self, acceptor: TlsAcceptor) {
        *self.acceptor.lock().unwrap() = acceptor;
    }

    /// The handshakes so far.
    pub fn hellos(&self) -> Vec<Hello> {
        self.hellos.lock().clone()
    }

    pub fn url(&self) -> String {
        format!("https://localhost:{}/mcp", self.port)
    }
}
