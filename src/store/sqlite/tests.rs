use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use rusqlite::Connection;
use tempfile::TempDir;

use super::*;
use crate::store::contract::{self, AMPLE, Place, get, increment, key, put};

/// A folder with one file, on a clock that stands still.
struct Folder {
    clock: Clock,
    folder: TempDir,
}

impl Folder {
    fn new() -> Self {
        Self { clock: Clock::manual(1_700_000_000_000), folder: TempDir::new().expect("a folder") }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("state/state.db")
    }

    async fn store(&self) -> Sqlite {
        Sqlite::open(&self.path(), AMPLE, self.clock.clone()).await.expect("opened")
    }

    /// Another process' view of the file.
    fn other(&self) -> Connection {
        Connection::open(self.path()).expect("opened")
    }
}

impl Place for Folder {
    async fn open(&self, bounds: Bounds) -> Arc<dyn Store> {
        Arc::new(Sqlite::open(&self.path(), bounds, self.clock.clone()).await.expect("opened"))
    }

    async fn pass(&self, passed: u64) {
        self.clock.set(i64::try_from(millis(&self.clock) + passed).expect("small"));
    }
}

contract::every_test!(Folder::new());

fn is_unavailable(outcome: &Result<(), Error>) -> bool {
    matches!(outcome, Err(Error::Unavailable(_)))
}

#[tokio::test]
async fn of_very_much_that_has_expired_a_part_is_looked_at() {
    let folder = Folder::new();
    let store = folder.store().await;
    folder
        .other()
        .execute_batch(
            "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 10100)
             INSERT INTO keys (key, value, expires) SELECT 'k' || n, x'00', n FROM n;
             UPDATE usage SET records = 10101, bytes = 100000 WHERE name = 'keys';",
        )
        .expect("expired records, and one more that is counted");
    assert_eq!(store.usage(Table::Keys).await.expect("told").records, 101);
}

#[tokio::test]
async fn a_restart_keeps_everything() {
    let folder = Folder::new();
    let store = folder.store().await;
    for table in Table::ALL {
        put(&store, Name::new(table, "kept"), b"v").await.expect("put");
    }
    drop(store);
    let store = folder.store().await;
    for table in Table::ALL {
        assert_eq!(get(&store, Name::new(table, "kept")).await, Some(b"v".to_vec()));
        assert_eq!(store.usage(table).await, Ok(Usage { records: 1, bytes: 5 }));
    }
}

#[tokio::test]
async fn the_file_and_its_folder_are_for_their_owner_alone() {
    let folder = Folder::new();
    let store = folder.store().await;
    put(&store, key("a"), b"v").await.expect("put");
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode(folder.path().parent().expect("a folder")), 0o700);
    for file in ["state.db", "state.db-wal", "state.db-shm"] {
        assert_eq!(mode(&folder.path().with_file_name(file)), 0o600, "{file}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_who_open_a_new_file_at_once_all_can() {
    let folder = Folder::new();
    let opening: Vec<_> = (0..8)
        .map(|_| {
            let (path, clock) = (folder.path(), folder.clock.clone());
            tokio::spawn(async move { Sqlite::open(&path, AMPLE, clock).await })
        })
        .collect();
    for store in opening {
        let store = store.await.expect("no panic").expect("opened");
        increment(&store, key("n")).await.expect("counted");
    }
    assert_eq!(get(&folder.store().await, key("n")).await, Some(b"8".to_vec()));
}

#[tokio::test]
async fn a_newer_schema_is_refused_and_left_alone() {
    let folder = Folder::new();
    drop(folder.store().await);
    folder.other().pragma_update(None, "user_version", 7).expect("set");
    let refused = Sqlite::open(&folder.path(), AMPLE, Clock::system()).await.map(drop);
    assert_eq!(refused, Err(Error::Newer { found: 7, known: 1 }));
    assert!(refused.expect_err("refused").to_string().contains("schema 7"));
}

#[tokio::test]
async fn the_database_of_another_program_is_refused_and_left_alone() {
    let folder = Folder::new();
    file::create_folder(&folder.path()).expect("made");
    folder.other().execute_batch("CREATE TABLE theirs (x)").expect("made");
    let before = fs::read(folder.path()).expect("read");
    let refused = Sqlite::open(&folder.path(), AMPLE, Clock::system()).await;
    assert!(matches!(refused, Err(Error::Corrupt(_))), "{refused:?}");
    assert_eq!(fs::read(folder.path()).expect("read"), before);
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused() {
    let folder = Folder::new();
    file::create_folder(&folder.path()).expect("made");
    fs::write(folder.path(), "not a database, though long enough for a header of one".repeat(100))
        .expect("written");
    let refused = Sqlite::open(&folder.path(), AMPLE, Clock::system()).await;
    assert!(matches!(refused, Err(Error::Corrupt(_))), "{refused:?}");
}

#[tokio::test]
async fn a_path_that_cannot_be_is_an_error_that_names_it() {
    let folder = Folder::new();
    fs::write(folder.folder.path().join("state"), "a file").expect("written");
    let refused = Sqlite::open(&folder.path(), AMPLE, Clock::system()).await.map(drop);
    assert!(is_unavailable(&refused), "{refused:?}");
    assert!(refused.expect_err("refused").to_string().contains("state"));
}

#[tokio::test]
async fn a_lock_that_another_holds_for_too_long_is_an_error_until_it_is_released() {
    let folder = Folder::new();
    let store = folder.store().await;
    let other = folder.other();
    other.execute_batch("BEGIN IMMEDIATE").expect("locked");
    let outcome = put(&store, key("a"), b"v").await;
    assert!(is_unavailable(&outcome), "{outcome:?}");
    let ping = store.ping().await;
    assert!(is_unavailable(&ping), "it says so as long as it can't write: {ping:?}");
    other.execute_batch("ROLLBACK").expect("released");
    assert_eq!(store.ping().await, Ok(()));
    assert_eq!(get(&store, key("a")).await, None, "what failed was not written");
    put(&store, key("a"), b"v").await.expect("put");
}

#[tokio::test]
async fn an_update_that_nobody_waits_for_is_not_begun() {
    let folder = Folder::new();
    let store = folder.store().await;
    let other = folder.other();
    other.execute_batch("BEGIN IMMEDIATE").expect("locked");
    let mut first = Box::pin(put(&store, key("first"), b"v"));
    let mut second = Box::pin(put(&store, key("second"), b"v"));
    // Both are on their way, the second one behind the first.
    std::future::poll_fn(|context| {
        let waits = first.as_mut().poll(context).is_pending();
        assert!(waits && second.as_mut().poll(context).is_pending());
        std::task::Poll::Ready(())
    })
    .await;
    drop(second);
    other.execute_batch("ROLLBACK").expect("released");
    assert_eq!(first.await, Ok(()));
    assert_eq!(get(&store, key("second")).await, None);
}

#[tokio::test]
async fn a_change_that_fails_does_no_harm_to_those_in_its_transaction() {
    let folder = Folder::new();
    let store = folder.store().await;
    let other = folder.other();
    other.execute_batch("BEGIN IMMEDIATE").expect("locked");
    let before = put(&store, key("before"), b"v");
    let fails = store.update(vec![key("fails")], Box::new(|_| panic!("as a test")));
    let refused = put(&store, key("refused"), &[0; crate::store::MAX_VALUE + 1]);
    let after = put(&store, key("after"), b"v");
    let release = async { other.execute_batch("ROLLBACK").expect("released") };
    let (before, fails, refused, after, ()) = tokio::join!(before, fails, refused, after, release);
    assert_eq!((before, after), (Ok(()), Ok(())));
    assert!(matches!((&fails, &refused), (Err(Error::Refused(_)), Err(Error::Refused(_)))));
    assert_eq!(get(&store, key("before")).await, get(&store, key("after")).await);
}

#[tokio::test]
async fn a_folder_that_goes_is_an_error_until_it_is_back() {
    let folder = Folder::new();
    let store = folder.store().await;
    put(&store, key("a"), b"v").await.expect("put");
    let (here, away) = (folder.folder.path().join("state"), folder.folder.path().join("away"));
    fs::rename(&here, &away).expect("moved");
    let outcome = put(&store, key("a"), b"lost").await;
    assert!(is_unavailable(&outcome), "{outcome:?}");
    assert!(is_unavailable(&store.ping().await));
    assert!(!here.exists(), "an empty store in its stead would forget every mark");
    fs::rename(&away, &here).expect("moved back");
    assert_eq!(store.ping().await, Ok(()));
    assert_eq!(get(&store, key("a")).await, Some(b"v".to_vec()));
}

#[tokio::test]
async fn a_file_that_was_replaced_is_opened_anew() {
    let folder = Folder::new();
    let store = folder.store().await;
    put(&store, key("a"), b"v").await.expect("put");
    for file in ["state.db", "state.db-wal", "state.db-shm"] {
        fs::remove_file(folder.path().with_file_name(file)).expect("removed");
    }
    put(&store, key("b"), b"v").await.expect("put");
    drop(store);
    let store = folder.store().await;
    assert_eq!(get(&store, key("a")).await, None);
    assert_eq!(get(&store, key("b")).await, Some(b"v".to_vec()), "not written into the void");
}

#[tokio::test]
async fn a_damaged_file_is_an_error_until_a_good_one_is_there() {
    let folder = Folder::new();
    let store = folder.store().await;
    put(&store, key("a"), b"v").await.expect("put");
    let away = folder.folder.path().join("good");
    fs::create_dir(&away).expect("made");
    let files = ["state.db", "state.db-wal", "state.db-shm"];
    let good = folder.path();
    let path = |file: &str| good.with_file_name(file);
    files.iter().for_each(|file| fs::rename(path(file), away.join(file)).expect("moved"));
    fs::write(&good, [b'x'; 8192]).expect("written");
    let outcome = put(&store, key("a"), b"lost").await;
    assert!(matches!(outcome, Err(Error::Corrupt(_))), "{outcome:?}");
    assert!(matches!(store.ping().await, Err(Error::Corrupt(_))));
    files.iter().for_each(|file| fs::rename(away.join(file), path(file)).expect("moved back"));
    assert_eq!(store.ping().await, Ok(()));
    assert_eq!(get(&store, key("a")).await, Some(b"v".to_vec()));
}

/// Where a child of a test finds its file.
const CHILD_PATH: &str = "MCP_SIDECAR_TEST_STATE";

/// This test binary again, to run one of the ignored tests below. `shell` runs before it.
fn child(test: &str, path: &Path, shell: &str) -> Child {
    Command::new("sh")
        .arg("-c")
        .arg(format!("{shell} exec \"$0\" \"$@\""))
        .arg(std::env::current_exe().expect("known"))
        .args(["--exact", &format!("store::sqlite::tests::{test}"), "--ignored", "--nocapture"])
        .env(CHILD_PATH, path)
        .stdout(Stdio::piped())
        .spawn()
        .expect("started")
}

#[tokio::test]
async fn what_was_acknowledged_is_there_after_a_kill() {
    let folder = Folder::new();
    file::create_folder(&folder.path()).expect("made");
    let mut child = child("writes_until_it_is_killed", &folder.path(), "");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines().map(|line| line.expect("text"));
    let acknowledged = lines.filter_map(|line| line.strip_prefix("wrote ").map(str::to_owned));
    let mut acknowledged = acknowledged.peekable();
    let mut seen = acknowledged.by_ref().take(500).collect::<Vec<_>>();
    child.kill().expect("killed");
    seen.extend(acknowledged);
    child.wait().expect("ended");
    assert!(seen.len() >= 500);
    let store = folder.store().await;
    for name in &seen {
        assert_eq!(get(&store, key(name)).await.as_deref(), Some(name.as_bytes()), "{name}");
    }
    let intact: String =
        folder.other().query_row("PRAGMA integrity_check", [], |row| row.get(0)).expect("checked");
    assert_eq!(intact, "ok");
    let held = folder.other().query_row("SELECT count(*) FROM keys", [], |row| row.get(0)).expect("counted");
    assert_eq!(store.usage(Table::Keys).await.map(|usage| usage.records), Ok(held));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "is the child of another test"]
async fn writes_until_it_is_killed() {
    let path = std::env::var(CHILD_PATH).expect("run by its parent");
    let bounds = Bounds { max_keys: usize::MAX, ..AMPLE };
    let store = Arc::new(Sqlite::open(Path::new(&path), bounds, Clock::system()).await.expect("opened"));
    let writers = (0..16).map(|writer| {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            for i in 0.. {
                let name = format!("{writer}/{i}");
                put(&*store, key(&name), name.as_bytes()).await.expect("put");
                println!("wrote {name}");
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.expect("no panic");
    }
}

/// A file size limit stands for a disk that is full.
#[test]
fn a_full_disk_is_an_error_until_there_is_room() {
    let folder = Folder::new();
    let limited = "trap '' XFSZ; ulimit -S -f 600;";
    let child = child("fills_the_disk", &folder.path(), limited);
    let output = child.wait_with_output().expect("ended");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("1 passed"), "{told}");
}

#[tokio::test]
#[ignore = "is the child of another test"]
async fn fills_the_disk() {
    let path = std::env::var(CHILD_PATH).expect("run by its parent");
    let store = Sqlite::open(Path::new(&path), AMPLE, Clock::system()).await.expect("opened");
    let mut written = 0;
    let large = || Name::new(Table::Tools, "large");
    let failed = loop {
        match put(&store, Name::new(Table::Tools, written.to_string()), &[0; 20_000]).await {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
        assert!(written < 1000, "the limit does not hold");
    };
    assert!(matches!(failed, Error::Unavailable(_)), "{failed:?}");
    assert!(is_unavailable(&put(&store, large(), &[0; 1 << 20]).await));
    let held = store.scan(Table::Tools, String::new()).await.expect("reading goes on").len();
    assert!(held >= written, "{held} of {written}");
    let room = Command::new("prlimit")
        .args(["--fsize=unlimited", "--pid", &std::process::id().to_string()])
        .status();
    assert!(room.expect("started").success());
    assert_eq!(store.ping().await, Ok(()));
    assert_eq!(put(&store, large(), &[0; 1 << 20]).await, Ok(()));
}
