use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use rustls::ClientConfig;
use tempfile::TempDir;

use super::*;
use crate::{
    secret::Secret,
    store::{
        View,
        contract::{self, AMPLE, Place, get, increment, key, put},
        update_with,
    },
    upstream::tls,
};

/// A server of one test's own, gone with it.
struct Server {
    process: Child,
    folder: TempDir,
    port: u16,
    options: Vec<String>,
}

impl Server {
    fn start(options: &[&str]) -> Self {
        let folder = TempDir::new().expect("a folder");
        let options: Vec<_> = options.iter().map(|option| (*option).to_owned()).collect();
        // Between our look for a free port and its use another may take it: then the server ends, and we look again.
        for _ in 0..20 {
            let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
            let port = free.expect("a port").port();
            if let Some(process) = run(&folder, port, &options) {
                return Self { process, folder, port, options };
            }
        }
        panic!("no redis-server would start");
    }

    fn kill(&mut self) {
        self.process.kill().expect("killed");
        self.process.wait().expect("ended");
    }

    fn start_again(&mut self) {
        self.process = run(&self.folder, self.port, &self.options).expect("started");
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.process.id().to_string()]).status();
        assert!(sent.expect("started").success());
    }

    /// A client that is no store.
    fn client(&self) -> redis::Connection {
        let client = redis::Client::open(format!("redis://127.0.0.1:{}", self.port)).expect("a URL");
        client.get_connection().expect("connected")
    }

    fn settings(&self) -> Settings {
        settings(&format!("redis://127.0.0.1:{}", self.port))
    }

    async fn store(&self) -> Redis {
        Redis::open(self.settings(), AMPLE).await.expect("opened")
    }
}

fn run(folder: &TempDir, port: u16, options: &[String]) -> Option<Child> {
    let mut process = Command::new("redis-server")
        .args(["--bind", "127.0.0.1", "--save", "", "--loglevel", "notice"])
        .arg("--port")
        .arg(if options.iter().any(|option| option == "--tls-port") { "0".into() } else { port.to_string() })
        .args(options.iter().map(|option| option.replace("PORT", &port.to_string())))
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .expect("these tests need redis-server: tests/run installs it");
    let lines = BufReader::new(process.stdout.take().expect("piped")).lines();
    let is_ready = lines.map_while(Result::ok).any(|line| line.contains("Ready to accept connections"));
    if !is_ready {
        process.wait().expect("ended");
    }
    is_ready.then_some(process)
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Place for Server {
    async fn open(&self, bounds: Bounds) -> Arc<dyn Store> {
        Arc::new(Redis::open(self.settings(), bounds).await.expect("opened"))
    }

    async fn pass(&self, passed: u64) {
        sleep(Duration::from_millis(passed)).await;
    }
}

contract::every_test!(Server::start(&[]));

fn trusting(ca: Option<std::path::PathBuf>) -> Arc<ClientConfig> {
    tls::client(&tls::Files { ca, ..tls::Files::default() }, false).expect("a configuration")
}

fn settings(url: &str) -> Settings {
    Settings::from_url(url, &trusting(None)).expect("a URL")
}

fn is_unavailable(outcome: &Result<(), Error>) -> bool {
    matches!(outcome, Err(Error::Unavailable(_)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_runs_again_when_a_record_has_changed_meanwhile() {
    let server = Server::start(&[]);
    let (store, other) = (server.store().await, Arc::new(server.store().await));
    put(&store, key("a"), b"1").await.expect("put");
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let said = update_with(&store, vec![key("a"), key("b")], move |view| {
        if counted.fetch_add(1, Ordering::Relaxed) == 0 {
            let other = Arc::clone(&other);
            tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(async { put(&*other, key("b"), b"2").await })
            })
            .expect("put");
        }
        let seen = view.records[1].map(<[u8]>::to_vec);
        (vec![Write::Put { value: b"mine".to_vec(), expires: None }, Write::Keep], seen)
    });
    assert_eq!(said.await, Ok(Some(b"2".to_vec())));
    assert_eq!(runs.load(Ordering::Relaxed), 2);
    assert_eq!(get(&store, key("a")).await, Some(b"mine".to_vec()));
}

/// What the sorted sets and sums say must always be what the records say.
#[tokio::test]
async fn its_books_stay_right_over_many_writes() {
    let server = Server::start(&[]);
    let store =
        Redis::open(server.settings(), Bounds { max_keys: 50, max_result_bytes: 600 }).await.expect("opened");
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..1500 {
        let name = Name::new(Table::ALL[random.usize(..5)], random.u8(..30).to_string());
        let (dice, size, after) = (random.u8(..10), random.usize(..60), random.u64(..200));
        let change = move |view: &View<'_>| {
            let value = vec![0; size];
            vec![match dice {
                0 => Write::Delete,
                1 => Write::Put { value, expires: None },
                _ => Write::Put { value, expires: Some(view.now + after) },
            }]
        };
        store.update(vec![name], Box::new(change)).await.expect("there is room");
    }
    // What is left with an expiry must not expire between the two looks.
    sleep(Duration::from_millis(250)).await;
    for table in Table::ALL {
        let held = store.scan(table, String::new()).await.expect("scanned");
        let bytes =
            held.iter().map(|(key, value)| u64::try_from(key.len() + value.len()).expect("small")).sum();
        let records = u64::try_from(held.len()).expect("small");
        assert_eq!(store.usage(table).await, Ok(Usage { records, bytes }), "{table:?}");
    }
    let by_age: u64 = redis::cmd("ZCARD").arg("mcp-sidecar:1:@r").query(&mut server.client()).expect("asked");
    assert_eq!(store.usage(Table::Results).await.map(|usage| usage.records), Ok(by_age));
}

/// What has expired is taken off the books some at a time, here not before its key is put anew.
#[tokio::test]
async fn a_result_put_anew_is_not_mistaken_for_the_one_that_expired() {
    let server = Server::start(&[]);
    let store = server.store().await;
    let result = |key: &str| Name::new(Table::Results, key);
    let expires = update_with(&store, vec![result("first")], |view| {
        let expires = view.now + 500;
        (vec![Write::Put { value: vec![0], expires: Some(expires + 1) }], expires)
    });
    let expires = Some(expires.await.expect("put"));
    let others: Vec<_> = (0..248).map(|other| result(&other.to_string())).collect();
    for some in others.chunks(8) {
        let change = move |_: &View<'_>| vec![Write::Put { value: vec![0], expires }; 8];
        store.update(some.to_vec(), Box::new(change)).await.expect("put");
    }
    sleep(Duration::from_millis(510)).await;
    let narrow =
        Redis::open(server.settings(), Bounds { max_result_bytes: 400, ..AMPLE }).await.expect("opened");
    put(&narrow, result("first"), &[1; 200]).await.expect("put");
    assert_eq!(get(&narrow, result("first")).await, Some(vec![1; 200]));
    let held = narrow.scan(Table::Results, String::new()).await;
    assert_eq!(held, Ok(vec![("first".into(), vec![1; 200])]));
    assert_eq!(narrow.usage(Table::Results).await, Ok(Usage { records: 1, bytes: 205 }));
}

#[tokio::test]
async fn all_it_stores_stands_under_its_prefix() {
    let server = Server::start(&[]);
    let store = server.store().await;
    for table in Table::ALL {
        put(&store, Name::new(table, "a"), b"v").await.expect("put");
    }
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut server.client()).expect("asked");
    assert!(keys.iter().all(|key| key.starts_with("mcp-sidecar:")), "{keys:?}");
}

#[tokio::test]
async fn a_server_that_dies_is_an_error_until_it_is_back_with_what_it_kept() {
    let mut server = Server::start(&["--appendonly", "yes", "--appendfsync", "always"]);
    let store = server.store().await;
    put(&store, key("a"), b"v").await.expect("put");
    server.kill();
    assert!(is_unavailable(&put(&store, key("a"), b"lost").await));
    assert!(is_unavailable(&store.ping().await));
    server.start_again();
    while store.ping().await.is_err() {
        tokio::task::yield_now().await;
    }
    assert_eq!(get(&store, key("a")).await, Some(b"v".to_vec()));
}

#[tokio::test]
async fn a_server_that_was_restarted_between_two_updates_is_no_error() {
    let mut server = Server::start(&["--appendonly", "yes", "--appendfsync", "always"]);
    let store = server.store().await;
    assert_eq!(increment(&store, key("n")).await, Ok(1));
    server.kill();
    server.start_again();
    assert_eq!(increment(&store, key("n")).await, Ok(2));
}

#[tokio::test]
async fn a_frozen_server_is_an_error_that_says_that_it_may_have_been_done() {
    let server = Server::start(&[]);
    let store = server.store().await;
    put(&store, key("a"), b"v").await.expect("put");
    server.signal("-STOP");
    assert!(is_unavailable(&store.ping().await));
    assert!(is_unavailable(&put(&store, key("a"), b"new").await));
    server.signal("-CONT");
    while store.ping().await.is_err() {
        tokio::task::yield_now().await;
    }
    // Frozen between the look and the write.
    let process = server.process.id().to_string();
    let frozen = store.update(
        vec![key("b")],
        Box::new(move |_| {
            Command::new("kill").args(["-STOP", &process]).status().expect("sent");
            vec![Write::Put { value: b"v".to_vec(), expires: None }]
        }),
    );
    let frozen = frozen.await.expect_err("no answer").to_string();
    assert!(frozen.contains("may have been applied"), "{frozen}");
    server.signal("-CONT");
    while get_or_error(&store).await.is_err() {
        tokio::task::yield_now().await;
    }
    assert_eq!(get_or_error(&store).await, Ok(Some(b"v".to_vec())), "here it was");
}

async fn get_or_error(store: &Redis) -> Result<Option<Vec<u8>>, Error> {
    store.get(key("b")).await
}

#[tokio::test]
async fn a_server_that_is_away_at_the_start_is_found_later() {
    let mut server = Server::start(&[]);
    server.kill();
    let store = server.store().await;
    assert!(is_unavailable(&store.ping().await));
    server.start_again();
    while store.ping().await.is_err() {
        tokio::task::yield_now().await;
    }
    put(&store, key("a"), b"v").await.expect("put");
}

#[tokio::test]
async fn what_says_nothing_is_given_up_on() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("bound");
    let url = format!("redis://:hush-hush@{}", silent.local_addr().expect("bound"));
    let store = Redis::open(settings(&url), AMPLE).await.expect("away is no error yet");
    let outcome = store.ping().await;
    assert!(is_unavailable(&outcome), "{outcome:?}");
    assert!(!format!("{outcome:?} {store:?}").contains("hush"));
}

#[tokio::test]
async fn a_server_that_forgot_the_scripts_is_given_them_again() {
    let server = Server::start(&[]);
    let store = server.store().await;
    assert_eq!(increment(&store, key("n")).await, Ok(1));
    let name = key("n");
    let port = server.port;
    // Between the look and the write too.
    let forget = move || {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
        let mut client = client.get_connection().expect("connected");
        redis::cmd("SCRIPT").arg("FLUSH").query::<()>(&mut client).expect("flushed");
    };
    forget();
    let change = move |_: &View<'_>| {
        forget();
        vec![Write::Delete]
    };
    store.update(vec![name.clone()], Box::new(change)).await.expect("deleted");
    assert_eq!(get(&store, name).await, None);
}

#[tokio::test]
async fn a_full_server_is_an_error_until_there_is_room() {
    let server = Server::start(&[]);
    let store = server.store().await;
    put(&store, key("a"), b"v").await.expect("put");
    let limit = |bytes: &str| {
        let mut client = server.client();
        redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).query::<()>(&mut client).expect("set");
    };
    limit("1000");
    let outcome = put(&store, key("b"), b"v").await;
    assert!(is_unavailable(&outcome), "{outcome:?}");
    assert!(is_unavailable(&store.ping().await));
    assert_eq!(get(&store, key("a")).await, Some(b"v".to_vec()), "reading goes on");
    limit("0");
    put(&store, key("b"), b"v").await.expect("put");
}

#[tokio::test]
async fn a_newer_layout_is_refused() {
    let server = Server::start(&[]);
    redis::cmd("SET").arg("mcp-sidecar:schema").arg(2).query::<()>(&mut server.client()).expect("set");
    let refused = Redis::open(server.settings(), AMPLE).await.map(drop);
    assert_eq!(refused, Err(Error::Newer { found: 2, known: 1 }));
}

#[tokio::test]
async fn a_password_is_asked_for_at_each_connect_and_never_shown() {
    let server = Server::start(&["--requirepass", "correct horse/@"]);
    let port = server.port;
    let by_url = settings(&format!("redis://:correct%20horse%2F%40@127.0.0.1:{port}/3"));
    let store = Redis::open(by_url.clone(), AMPLE).await.expect("opened");
    put(&store, key("a"), b"v").await.expect("put");
    assert!(!format!("{store:?} {by_url:?}").contains("correct"));

    let secret = Secret::new("wrong-one".into());
    let apart = settings(&format!("redis://127.0.0.1:{port}/3")).with_password(secret.clone());
    let store = Redis::open(apart, AMPLE).await.expect("opened");
    let outcome = store.ping().await;
    assert!(is_unavailable(&outcome) && !format!("{outcome:?}").contains("wrong-one"), "{outcome:?}");
    secret.replace("correct horse/@".into());
    while store.ping().await.is_err() {
        tokio::task::yield_now().await;
    }
    assert_eq!(get(&store, key("a")).await, Some(b"v".to_vec()), "the same database");
}

/// What a user needs to be allowed.
#[tokio::test]
async fn a_user_with_few_rights_will_do() {
    let server = Server::start(&[]);
    let mut client = server.client();
    let mut allow = redis::cmd("ACL");
    allow.arg("SETUSER").arg("sidecar").arg("on").arg(">pw").arg("~mcp-sidecar:*");
    allow.arg("+@read").arg("+@write").arg("+@scripting").arg("+time");
    allow.query::<()>(&mut client).expect("set");
    let url = format!("redis://sidecar:pw@127.0.0.1:{}", server.port);
    let store = Redis::open(settings(&url), AMPLE).await.expect("opened");
    assert_eq!(store.ping().await, Ok(()));
    put(&store, key("a"), b"v").await.expect("put");
    assert_eq!(store.usage(Table::Keys).await, Ok(Usage { records: 1, bytes: 2 }));
    assert_eq!(store.scan(Table::Keys, String::new()).await.map(|found| found.len()), Ok(1));
}

#[tokio::test]
async fn a_server_is_reached_over_tls_if_its_certificate_is_trusted() {
    let folder = TempDir::new().expect("a folder");
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let [cert, private] = ["cert.pem", "key.pem"].map(|name| folder.path().join(name));
    fs::write(&cert, made.cert.pem()).expect("written");
    fs::write(&private, made.signing_key.serialize_pem()).expect("written");
    let [cert_option, key_option] = [&cert, &private].map(|path| path.to_str().expect("text").to_owned());
    let server = Server::start(&[
        "--tls-port",
        "PORT",
        "--tls-cert-file",
        &cert_option,
        "--tls-key-file",
        &key_option,
        "--tls-ca-cert-file",
        &cert_option,
        "--tls-auth-clients",
        "no",
    ]);
    let url = format!("rediss://localhost:{}", server.port);
    let trusted = Settings::from_url(&url, &trusting(Some(cert))).expect("a URL");
    let store = Redis::open(trusted, AMPLE).await.expect("opened");
    put(&store, key("a"), b"v").await.expect("put");
    let stranger = Redis::open(settings(&url), AMPLE).await.expect("away is no error yet");
    assert!(is_unavailable(&stranger.ping().await));
}

#[test]
fn a_url_is_read_whole_and_never_repeated() {
    let read = settings("rediss://me:p%40ss@[::1]:7000/9");
    assert_eq!((read.host.as_str(), read.port, read.database), ("::1", 7000, 9));
    assert_eq!(read.user.as_deref(), Some("me"));
    assert_eq!(read.password.map(|password| password.expose().to_string()).as_deref(), Some("p@ss"));
    assert!(read.tls.is_some_and(|tls| tls.alpn_protocols.is_empty()));
    let short = settings("redis://db.example.com");
    assert_eq!((short.host.as_str(), short.port, short.database), ("db.example.com", 6379, 0));
    assert!(short.user.is_none() && short.password.is_none() && short.tls.is_none());
    for wrong in ["http://:hush@h", "redis://:hush@h/x", "redis://:hush@h:x", "redis://"] {
        let refused = Settings::from_url(wrong, &trusting(None)).expect_err(wrong);
        assert!(!refused.contains("hush"), "{refused}");
    }
}
