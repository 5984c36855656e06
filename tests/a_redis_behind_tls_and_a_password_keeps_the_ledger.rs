//! `rediss://` with a password: two sidecars that trust the server's certificate and know the password share one ledger; one
//! that does not sends nothing that needs it, and no password is shown.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{fs, path::Path};

use support::{
    Sidecar, Upstream,
    keyed::{Call, answering, assert_busy, calls, list, text},
    redis::Redis,
    tls::{Authority, Front},
    until,
};
use tempfile::TempDir;

const PASSWORD: &str = "correct-horse";

/// A sidecar whose state is behind that front; `roots` is what it trusts.
fn start(upstream: &Upstream, front: &Front, password: &str, roots: &Path) -> Sidecar {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("sidecar.toml");
    let state = format!("rediss://:{password}@localhost:{}/2", front.port);
    let results = "[ledger]\nresults = \"store\"\n";
    let toml = format!("state = \"{state}\"\n{results}[upstreams.mcp]\nurl = \"{}\"\n", upstream.url());
    fs::write(&file, toml).unwrap();
    let mut command = Sidecar::command(&folder);
    command.arg("--config").arg(&file).env("SSL_CERT_FILE", roots).env_remove("SSL_CERT_DIR");
    Sidecar::spawn(command, folder)
}

#[test]
fn those_who_are_let_in_share_a_ledger_and_others_send_nothing_that_needs_it() {
    let (upstream, redis) = (answering(), Redis::start_with(&["--requirepass", PASSWORD]));
    let (authority, another, folder) = (Authority::new(), Authority::new(), TempDir::new().unwrap());
    let front = Front::start(authority.issue().acceptor(&[], None), &redis.address());
    let [trusted, unrelated] =
        [("trusted.pem", &authority), ("unrelated.pem", &another)].map(|(name, from)| {
            let path = folder.path().join(name);
            fs::write(&path, from.pem()).unwrap();
            path
        });
    let call = Call::of("effect").activity("job", "a");
    let mut first = start(&upstream, &front, PASSWORD, &trusted);
    list(&first);
    assert_eq!(text(&call.ask(&first)), "done 0");
    first.signal("KILL");
    first.wait_exit();
    let second = start(&upstream, &front, PASSWORD, &trusted);
    assert_eq!(text(&call.ask(&second)), "done 0", "replayed from the store");
    for (password, roots) in [("battery-staple", &trusted), (PASSWORD, &unrelated)] {
        let stranger = start(&upstream, &front, password, roots);
        assert_busy(&call.ask(&stranger));
        until("readiness to say it", || stranger.admin("GET", "/readyz").status() == 503);
        stranger.wait_stderr("the state store is away");
        let told = format!("{} {:?}", stranger.stderr(), stranger.lines());
        assert!(!told.contains(PASSWORD) && !told.contains("battery-staple"), "{told}");
    }
    assert_eq!(calls(&upstream).len(), 1);
}
