//! TLS on the listener and toward upstreams, with certificates, authorities and tokens that change
//! while the sidecar runs: in place or as a mounted volume changes them (its `..data` link is swapped). No exchange is
//! dropped for it. What is wrong with a certificate is said at start or at the reload that brings it.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rustls::pki_types::CertificateDer;
use support::{
    Client, Gate, Sidecar, Upstream,
    mcp::{call, progress, result},
    sse,
    tls::{Authority, Front, Node, Pair},
};
use tempfile::TempDir;

/// Files as a mounted volume has them: `NAME` is a link to `..data/NAME`, and `..data` one to the folder that holds.
struct Volume {
    folder: TempDir,
    versions: usize,
}

impl Volume {
    fn new(files: &[(&str, impl AsRef<str>)]) -> Self {
        let mut volume = Self { folder: tempfile::tempdir().unwrap(), versions: 0 };
        volume.swap(files);
        for (name, _) in files {
            symlink(Path::new("..data").join(name), volume.path(name)).unwrap();
        }
        volume
    }

    /// Other contents, all at once.
    fn swap(&mut self, files: &[(&str, impl AsRef<str>)]) {
        self.versions += 1;
        let version = format!("..version-{}", self.versions);
        fs::create_dir(self.path(&version)).unwrap();
        for (name, text) in files {
            fs::write(self.path(&version).join(name), text.as_ref()).unwrap();
        }
        symlink(&version, self.path("..aside")).unwrap();
        fs::rename(self.path("..aside"), self.path("..data")).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Replaces a file as a whole.
fn replace(file: &Path, text: &str) {
    let aside = file.with_extension("aside");
    fs::write(&aside, text).unwrap();
    fs::rename(aside, file).unwrap();
}

/// Answers `by` calls with an event, and their result once the gate opens; others at once.
fn upstream(gate: &Gate) -> Upstream {
    let gate = gate.clone();
    Upstream::start(move |request, reply| {
        let id = request.json()["id"].clone();
        if request.head.field("x-by").is_none() {
            return reply.json(200, &[], &result(&id));
        }
        reply.sse(&[]);
        reply.event(&progress(&id, 1));
        gate.pass();
        reply.event(&result(&id));
        reply.end();
    })
}

fn serve(folder: TempDir, config: &str) -> Sidecar {
    let file = folder.path().join("sidecar.toml");
    fs::write(&file, config).unwrap();
    let mut command = Sidecar::command(&folder);
    command.arg("--config").arg(&file);
    Sidecar::spawn(command, folder)
}

#[test]
fn the_listener_s_certificate_changes_for_new_connections_and_the_old_ones_go_on() {
    let gate = Gate::new();
    let upstream = upstream(&gate);
    let authority = Authority::new();
    let pair = |pair: &Pair| [("server.pem", pair.cert.clone()), ("server.key", pair.key.clone())];
    let (first, second, third) = (authority.issue(), authority.issue(), authority.issue());
    let mut volume = Volume::new(&pair(&first));
    let config = format!(
        "[tls]\ncert = \"{}\"\nkey = \"{}\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        volume.path("server.pem").display(),
        volume.path("server.key").display(),
        upstream.url()
    );
    let sidecar = Sidecar::with_config(&config);
    let mut node = Node::connect(&sidecar.listen, &authority);
    assert_eq!(node.certificate(), first.der);
    node.send(&call(1).field("X-By", "1"));
    node.wait(&format!("{}\n\n\r\n", progress(1, 1)));

    volume.swap(&pair(&second));
    sidecar.wait_said("configuration reloaded", 1);
    assert_eq!(Node::connect(&sidecar.listen, &authority).certificate(), second.der);
    gate.open();
    node.wait("\r\n0\r\n\r\n");
    // The old connection serves on.
    node.send(&call(2));
    node.wait(&result(2));

    // In place, the certificate before its key: refused until both are there.
    fs::write(volume.path("server.pem"), &third.cert).unwrap();
    let said = sidecar.wait_stderr("configuration refused, the old one stays");
    assert!(said.contains("is not the key of the certificate in"), "{said}");
    assert_eq!(Node::connect(&sidecar.listen, &authority).certificate(), second.der);
    fs::write(volume.path("server.key"), &third.key).unwrap();
    sidecar.wait_said("configuration reloaded", 2);
    assert_eq!(Node::connect(&sidecar.listen, &authority).certificate(), third.der);
}

#[test]
fn certificates_that_expire_in_use_stay_and_hold_up_no_other_change() {
    let upstream = Upstream::json(result(1));
    let mutual = Mutual::before(&upstream);
    let folder = tempfile::tempdir().unwrap();
    let end = SystemTime::now() + Duration::from_secs(5);
    let own = mutual.clients.issue_until(end);
    own.write(folder.path(), "client");
    own.write(folder.path(), "server");
    fs::write(folder.path().join("ca.pem"), mutual.servers.pem()).unwrap();
    let tables =
        format!("[tls]\ncert = \"server.pem\"\nkey = \"server.key\"\n{}", mutual.config(folder.path()));
    let sidecar = serve(folder, &tables);
    let mut node = Node::connect(&sidecar.listen, &mutual.clients);
    assert_eq!(node.certificate(), own.der);
    std::thread::sleep(end.duration_since(SystemTime::now()).unwrap_or_default() + Duration::from_secs(1));
    replace(&sidecar.folder().path().join("sidecar.toml"), &format!("{tables}policy.deny = [\"slow\"]\n"));
    sidecar.wait_stderr("configuration reloaded");
    node.send(&call(1));
    assert!(node.wait("}}").contains("1403"), "the new policy holds");
    let told = refused(sidecar.folder().path(), &tables);
    assert!(told.contains("client.pem: the certificate expired at"), "a start is another matter: {told}");
}

/// An upstream that asks for a certificate of its clients, and shows who came.
struct Mutual {
    servers: Authority,
    clients: Authority,
    front: Front,
}

impl Mutual {
    fn before(upstream: &Upstream) -> Self {
        let (servers, clients) = (Authority::new(), Authority::new());
        let acceptor = servers.issue().acceptor(&["http/1.1"], Some(&clients));
        let front = Front::start(acceptor, &upstream.address);
        Self { servers, clients, front }
    }

    fn config(&self, folder: &Path) -> String {
        let file = |name: &str| folder.join(name).display().to_string();
        format!(
            "[upstreams.mcp]\nurl = \"{}\"\ntls = {{ ca = \"{}\", cert = \"{}\", key = \"{}\" }}\n",
            self.front.url(),
            file("ca.pem"),
            file("client.pem"),
            file("client.key")
        )
    }

    /// Who came last.
    fn shown(&self) -> Option<CertificateDer<'static>> {
        self.front.hellos().last()?.shown.clone()
    }
}

#[test]
fn a_client_certificate_and_an_authority_change_and_running_calls_go_on() {
    let gate = Gate::new();
    let upstream = upstream(&gate);
    let mutual = Mutual::before(&upstream);
    let (first, second) = (mutual.clients.issue(), mutual.clients.issue());
    let ca = mutual.servers.pem();
    let files = |pair: &Pair, ca: &str| {
        [("ca.pem", ca.to_owned()), ("client.pem", pair.cert.clone()), ("client.key", pair.key.clone())]
    };
    let mut volume = Volume::new(&files(&first, &ca));
    let sidecar = Sidecar::with_config(&mutual.config(volume.folder.path()));
    let running = sidecar.client();
    running.send(&call(1).field("X-By", "1"));
    running.events(1);
    assert_eq!(sidecar.client().ask(&call(2)).text(), result(2));
    assert_eq!(mutual.shown(), Some(first.der.clone()));

    volume.swap(&files(&second, &ca));
    sidecar.wait_said("configuration reloaded", 1);
    assert_eq!(sidecar.client().ask(&call(3)).text(), result(3));
    assert_eq!(mutual.shown(), Some(second.der.clone()));

    // The servers get another authority; the old one is not trusted any more.
    let other = Authority::new();
    mutual.front.replace(other.issue().acceptor(&["http/1.1"], Some(&mutual.clients)));
    volume.swap(&files(&second, &other.pem()));
    sidecar.wait_said("configuration reloaded", 2);
    assert_eq!(sidecar.client().ask(&call(4)).text(), result(4));
    mutual.front.replace(mutual.servers.issue().acceptor(&["http/1.1"], Some(&mutual.clients)));
    replace(
        &sidecar.folder().path().join("sidecar.toml"),
        &format!("drain = \"9s\"\n{}", mutual.config(volume.folder.path())),
    );
    sidecar.wait_said("configuration reloaded", 3);
    // Its connections are kept over a reload that changes nothing of them.
    assert_eq!(sidecar.client().ask(&call(5)).text(), result(5));

    gate.open();
    let told: Vec<_> = sse::read(&running.response().body).events.into_iter().map(|e| e.data).collect();
    assert_eq!(told, [progress(1, 1), result(1)], "under what it began with");
}

#[test]
fn a_server_that_wants_a_certificate_and_gets_none_is_a_failed_upstream() {
    let upstream = Upstream::json(result(1));
    let mutual = Mutual::before(&upstream);
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("ca.pem"), mutual.servers.pem()).unwrap();
    let config = format!(
        "[upstreams.mcp]\nurl = \"{}\"\ntls = {{ ca = \"{}\" }}\n",
        mutual.front.url(),
        folder.path().join("ca.pem").display()
    );
    let sidecar = Sidecar::with_config(&config);
    let error = sidecar.client().ask(&call(1)).json()["error"].clone();
    // TLS 1.3 tells it only after the request may have been written: nothing else may be claimed.
    assert_eq!((&error["code"], &error["data"]["source"]), (&1502.into(), &"mcp-sidecar".into()));
    assert_eq!(upstream.count(), 0);
}

#[test]
fn tokens_change_in_both_ways_for_the_calls_that_begin_then() {
    let gate = Gate::new();
    let upstream = upstream(&gate);
    let mut volume = Volume::new(&[("upstream", "first\n"), ("node", "alpha\n")]);
    let config = format!(
        "[auth]\nbearer = {{ file = \"{}\" }}\n[upstreams.mcp]\nurl = \"{}\"\nbearer = {{ file = \"{}\" }}\n",
        volume.path("node").display(),
        upstream.url(),
        volume.path("upstream").display()
    );
    let sidecar = Sidecar::with_config(&config);
    let ask = |id: u32, token: &str| {
        sidecar.client().ask(&call(id).field("Authorization", &format!("Bearer {token}")))
    };
    let running = sidecar.client();
    running.send(&call(1).field("X-By", "1").field("Authorization", "Bearer alpha"));
    running.events(1);
    assert_eq!(ask(2, "beta").status(), 401);

    volume.swap(&[("upstream", "second\n"), ("node", "beta\n")]);
    sidecar.wait_said("secret replaced", 2);
    assert_eq!(ask(3, "alpha").status(), 401);
    assert_eq!(ask(4, "beta").text(), result(4));

    fs::write(volume.path("upstream"), "third").unwrap();
    sidecar.wait_said("secret replaced", 3);
    assert_eq!(ask(5, "beta").text(), result(5));
    // One that is empty, or gone, is not taken.
    fs::write(volume.path("upstream"), "").unwrap();
    sidecar.wait_said("secret refused, the old one stays", 1);
    fs::remove_file(volume.path("node")).unwrap();
    sidecar.wait_said("secret refused, the old one stays", 2);
    assert_eq!(ask(6, "beta").text(), result(6));

    gate.open();
    assert_eq!(sse::read(&running.response().body).events.len(), 2);
    let sent: Vec<_> = upstream
        .requests()
        .iter()
        .map(|request| request.head.field("authorization").unwrap().to_owned())
        .collect();
    assert_eq!(sent, ["Bearer first", "Bearer second", "Bearer third", "Bearer third"]);
    assert!(!["first", "second", "alpha", "beta"].iter().any(|token| sidecar.stderr().contains(token)));
}

/// What `serve` and `check` say of a configuration that they refuse.
fn refused(folder: &Path, config: &str) -> String {
    let file = folder.join("sidecar.toml");
    fs::write(&file, config).unwrap();
    let file = file.to_str().unwrap();
    let mut told = String::new();
    for arguments in [&["check", file][..], &["serve", "--config", file, "--listen", "127.0.0.1:0"]] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
        let output = command.args(arguments).env_clear().output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?} {output:?}");
        told = String::from_utf8(output.stderr).unwrap();
    }
    told
}

#[test]
fn what_is_wrong_with_a_certificate_is_said_at_start_with_its_file() {
    let authority = Authority::new();
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let good = authority.issue();
    good.write(at, "good");
    authority.issue().write(at, "other");
    authority.issue_between(2019, 2020).write(at, "old");
    authority.issue_between(3000, 3001).write(at, "early");
    fs::write(at.join("none.pem"), "").unwrap();
    // A key in the wrong place must not be quoted.
    fs::write(at.join("broken.pem"), "-----BEGIN PRIVATE KEY-----\nHUNTER2!\n-----END PRIVATE KEY-----\n")
        .unwrap();
    for (cert, key, says) in [
        ("absent.pem", "good.key", "absent.pem: No such file"),
        ("good.pem", "absent.key", "absent.key: No such file"),
        ("none.pem", "good.key", "none.pem: holds no PEM certificate"),
        ("good.pem", "good.pem", "good.pem: holds no PEM private key"),
        ("good.pem", "broken.pem", "broken.pem: is not valid PEM"),
        ("good.pem", "other.key", "other.key: is not the key of the certificate in"),
        ("old.pem", "old.key", "old.pem: the certificate expired at 2020-01-01T00:00:00Z"),
        ("early.pem", "early.key", "early.pem: the certificate is not valid before 3000-01-01T00:00:00Z"),
    ] {
        let listener = format!(
            "[tls]\ncert = \"{cert}\"\nkey = \"{key}\"\n[upstreams.a]\nurl = \"https://localhost/\"\n"
        );
        let told = refused(at, &listener);
        assert!(told.contains(says) && told.contains("tls: ") && !told.contains("HUNTER2"), "{told}");
        let upstream = format!(
            "[upstreams.a]\nurl = \"https://localhost/\"\ntls = {{ cert = \"{cert}\", key = \"{key}\" }}\n"
        );
        let told = refused(at, &upstream);
        assert!(told.contains(says) && told.contains("upstreams.a.tls: "), "{told}");
        assert!(!told.contains("HUNTER2"), "{told}");
    }
}

#[test]
fn a_certificate_that_is_not_valid_now_is_refused_by_a_reload_and_the_old_one_stays() {
    let upstream = Upstream::json(result(1));
    let mutual = Mutual::before(&upstream);
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("ca.pem"), mutual.servers.pem()).unwrap();
    let good = mutual.clients.issue();
    good.write(folder.path(), "client");
    let config = mutual.config(folder.path());
    let sidecar = serve(folder, &config);
    mutual.clients.issue_between(2019, 2020).write(sidecar.folder().path(), "client");
    let said = sidecar.wait_stderr("configuration refused, the old one stays");
    assert!(said.contains("client.pem: the certificate expired at 2020"), "{said}");
    assert_eq!(sidecar.client().ask(&call(1)).text(), result(1));
    assert_eq!(mutual.shown(), Some(good.der));
}

#[test]
fn an_authority_that_has_expired_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    // Any certificate may be trusted.
    let old = Authority::new().issue_between(2019, 2020);
    old.write(folder.path(), "ca");
    let config = "[upstreams.a]\nurl = \"https://localhost:1/\"\ntls = { ca = \"ca.pem\" }\n";
    let sidecar = serve(folder, config);
    let said = sidecar.stderr();
    assert!(said.contains("the ca of upstream a: ") && said.contains("expired at 2020"), "{said}");
}

#[test]
fn a_node_that_takes_its_time_over_the_handshake_holds_up_no_other_and_is_closed() {
    let upstream = Upstream::json(result(1));
    let authority = Authority::new();
    let folder = tempfile::tempdir().unwrap();
    authority.issue().write(folder.path(), "server");
    let sidecar = serve(
        folder,
        &format!(
            "[limits]\nheader_timeout = \"500ms\"\n[tls]\ncert = \"server.pem\"\nkey = \"server.key\"\n\
             [upstreams.mcp]\nurl = \"{}\"\n",
            upstream.url()
        ),
    );
    let silent = Client::connect(&sidecar.listen);
    let mut node = Node::connect(&sidecar.listen, &authority);
    node.send(&call(1));
    node.wait(&result(1));
    silent.closed();
}
