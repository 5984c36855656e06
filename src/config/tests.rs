use crate::ledger;
use std::{collections::HashMap, fs, path::Path, time::Duration};

use tempfile::TempDir;

use super::{reload::Reloader, *};
use crate::proxy::{Credential, LegacyDisconnect};

fn nothing(_: &str) -> Option<String> {
    None
}

fn read(text: &str) -> Result<Config, Problems> {
    Config::from_text(text, Some(Path::new("/etc/sidecar/sidecar.toml")), &Flags::default(), &nothing)
}

fn with_flags(text: &str, flags: &Flags) -> Result<Config, Problems> {
    Config::from_text(text, Some(Path::new("/etc/sidecar/sidecar.toml")), flags, &nothing)
}

/// The problems of a text as `LINE: KEY: REASON`.
fn problems(text: &str) -> Vec<String> {
    let problems = read(text).expect_err("it is wrong");
    let shown = problems.to_string();
    shown
        .lines()
        .map(|line| line.strip_prefix("/etc/sidecar/sidecar.toml:").unwrap_or(line).to_owned())
        .collect()
}

#[track_caller]
fn one_problem(text: &str, starts: &str, says: &str) {
    let all = problems(text);
    assert_eq!(all.len(), 1, "{all:#?}");
    assert!(all[0].starts_with(starts) && all[0].contains(says), "{}", all[0]);
}

#[test]
fn every_key_has_its_documented_default() {
    let config = read("[upstreams.a]\nurl = \"http://127.0.0.1:1/mcp\"").expect("right");
    assert_eq!(config.listen.to_string(), "127.0.0.1:7080");
    assert_eq!(config.admin.as_ref().map(ToString::to_string).as_deref(), Some("127.0.0.1:7081"));
    assert_eq!(config.state, State::Memory, "without any home");
    assert_eq!(config.drain, Duration::from_secs(30));
    assert_eq!(
        config.log,
        Log { text: false, access: None, level: tracing::level_filters::LevelFilter::INFO }
    );
    let limits = &config.limits;
    assert_eq!([limits.request_body, limits.response_body], [4 << 20, 64 << 20]);
    assert_eq!([limits.event, limits.buffered], [16 << 20, 256 << 20]);
    assert_eq!([limits.calls, limits.streams, config.connections.connections], [1000, 10_000, 10_000]);
    assert_eq!(limits.body_timeout, Duration::from_secs(30));
    assert_eq!(limits.client_stall, Duration::from_secs(300));
    assert_eq!(config.connections.header_timeout, Duration::from_secs(10));
    assert!(!config.auth.open && config.auth.bearer.is_none() && config.tls.is_none());
    assert_eq!(config.ledger.results, ledger::Keep::Memory);
    assert_eq!([config.ledger.ttl.as_secs(), config.ledger.keys_ttl.as_secs()], [3600, 30 * 86400]);
    assert_eq!([config.ledger.max_result, config.ledger.max_total], [1 << 20, 64 << 20]);
    assert_eq!(config.ledger.max_keys, 1_000_000);
    let upstream = &config.upstreams["a"];
    assert_eq!(upstream.connection.connect_timeout, Duration::from_secs(5));
    assert_eq!([upstream.idle_timeout.as_secs(), upstream.max_timeout.as_secs()], [300, 3600]);
    assert_eq!(upstream.calls, 100);
    assert!(upstream.busy_503 && !upstream.idempotency_header && !upstream.connection.http1_only);
    assert_eq!(upstream.cancel_grace, Duration::from_secs(2));
    assert_eq!(upstream.legacy_disconnect, LegacyDisconnect::Auto);
    let relay = &upstream.relay;
    assert_eq!((relay.queue, relay.queue_bytes, relay.burst, relay.coalesce), (64, 1 << 20, 8, true));
    assert_eq!([relay.min_interval, relay.keepalive], [Duration::from_millis(100), Duration::from_secs(15)]);
    assert_eq!(
        upstream.listen,
        relay::listen::Settings { reconnect: true, give_up: Duration::from_secs(300) }
    );
    assert_eq!(upstream.policy, Policy::new(vec!["*".into()], vec![]));
    assert!(config.warnings().is_empty());
}

/// An example of everything, with files that a test has, and without the two keys that need others.
const EVERYTHING: &str = r#"
listen = "unix:/run/sidecar.sock"
admin  = ""
state  = "sqlite:state.db"
drain  = "1m 30s"
[log]
format = "text"
access = "logs/access.log"
level  = "debug"
[limits]
request_body   = "1MiB"
response_body  = "2MiB"
event          = "500kB"
header_timeout = "1s"
body_timeout   = "2s"
connections    = 1_0
calls          = 11
streams        = 12
buffered       = "3MiB"
client_stall   = "3s"
[auth]
open    = false
bearer  = { env = "TOKEN" }
origins = ["https://app.example.com"]
hosts   = ["sidecar.local"]
[tls]
cert = "server.pem"
key  = "/abs/server.key"
[ledger]
results    = "store"
ttl        = "2h"
max_result = "2MiB"
max_total  = "4MiB"
keys_ttl   = "1d"
max_keys   = 5
[upstreams.github]
url     = "https://api.example.com/mcp?x=1"
headers = { "X-Team" = "agents" }
bearer  = { env = "GITHUB" }
tls     = { ca = "ca.pem", cert = "client.pem", key = "client.key" }
connect_timeout = "6s"
idle_timeout    = "7s"
max_timeout     = "8s"
calls           = 9
busy_503        = false
http1_only      = true
idempotency_header = true
cancel_grace    = "0"
legacy_disconnect = "cancel"
approved        = "github.approved.json"
[upstreams.github.progress]
queue        = 1
queue_bytes  = "2KiB"
burst        = 3
min_interval = "0"
coalesce     = false
[upstreams.github.keepalive]
interval     = "0"
[upstreams.github.listen]
reconnect    = false
give_up      = "1m"
[upstreams.github.policy]
allow = ["get_*"]
deny  = ["get_secret"]
[upstreams.github.tools.charge]
read_only = false
idempotent = true
honours_key = true
resume = false
[upstreams.github.tools."odd.name"]
"#;

#[test]
fn every_documented_key_is_taken_and_relative_paths_are_the_files() {
    let environment = |name: &str| Some(format!("secret of {name}"));
    let file = Path::new("/etc/sidecar/sidecar.toml");
    let config = Config::from_text(EVERYTHING, Some(file), &Flags::default(), &environment).expect("right");
    assert_eq!(config.listen, Address::Unix("/run/sidecar.sock".into()));
    assert_eq!(config.admin, None);
    assert_eq!(config.state, State::Sqlite("/etc/sidecar/state.db".into()));
    assert_eq!(config.drain, Duration::from_secs(90));
    assert_eq!(config.log.access.as_deref(), Some(Path::new("/etc/sidecar/logs/access.log")));
    assert_eq!([config.limits.event, config.connections.connections], [500_000, 10]);
    assert!(config.auth.bearer.as_ref().is_some_and(|bearer| bearer.matches(b"secret of TOKEN")));
    let tls = Tls::new("/etc/sidecar/server.pem".into(), "/abs/server.key".into());
    assert_eq!(config.tls, Some(tls));
    let upstream = &config.upstreams["github"];
    assert_eq!(upstream.connection.url.to_string(), "https://api.example.com/mcp?x=1");
    assert_eq!(upstream.connection.tls.ca.as_deref(), Some(Path::new("/etc/sidecar/ca.pem")));
    assert_eq!(upstream.headers["x-team"], "agents");
    assert!(
        matches!(&upstream.credential, Some(Credential::Bearer(s)) if s.matches(b"secret of GITHUB")),
        "{:?}",
        upstream.credential
    );
    assert_eq!(upstream.legacy_disconnect, LegacyDisconnect::Cancel);
    assert_eq!(upstream.approved.as_deref(), Some(Path::new("/etc/sidecar/github.approved.json")));
    assert_eq!([upstream.relay.min_interval, upstream.relay.keepalive], [Duration::ZERO; 2]);
    assert!(upstream.connection.http1_only && !upstream.relay.coalesce && !upstream.listen.reconnect);
    assert_eq!(upstream.policy, Policy::new(vec!["get_*".into()], vec!["get_secret".into()]));
    assert_eq!(upstream.tools["charge"].idempotent, Some(true));
    assert_eq!(upstream.tools["odd.name"], listing::Override::default());
}

#[test]
fn all_problems_are_reported_at_once_with_line_and_key_in_the_order_of_the_file() {
    let all = problems(
        "drain = 30\n[limits]\ncalls = 0\nevent = \"4 apples\"\n[upstreams.x]\nidle_timeout = \"soon\"\n[log]\nlevel = 3\n",
    );
    let starts = [
        "1: drain: ",
        "3: limits.calls: must be from 1",
        "4: limits.event: a size is a number with its unit",
        "5: upstreams.x.url: is missing",
        "6: upstreams.x.idle_timeout: a duration is a number with its unit",
        "8: log.level: must be text in quotes, not integer",
    ];
    assert_eq!(all.len(), starts.len(), "{all:#?}");
    for (problem, start) in all.iter().zip(starts) {
        assert!(problem.starts_with(start), "{problem} does not start with {start}");
    }
}

#[test]
fn an_unknown_key_names_its_line_and_the_nearest_known_key() {
    one_problem("\n\nlissten = \"127.0.0.1:1\"", "3: lissten: ", "`listen`");
    one_problem("[limits]\nrequest_size = \"1MiB\"", "2: limits.request_size: ", "`request_body`");
    one_problem("[upstream.a]\nurl = \"http://localhost/\"", "1: upstream: ", "`upstreams`");
    one_problem("[upstreams.a]\nurl = \"http://localhost/\"\nidle-timeout = \"1s\"", "3: ", "`idle_timeout`");
    one_problem(
        "[upstreams.a]\nurl = \"http://localhost/\"\ntools.t.idempotant = true",
        "3: ",
        "`idempotent`",
    );
    one_problem("[auth]\nbearer = { fil = \"x\" }", "2: auth.bearer.fil: ", "`file`");
    one_problem("[limits]\n\"zzz\" = 1", "2: limits.zzz: ", "unknown key");
}

#[test]
fn a_bare_number_is_no_duration_and_no_size() {
    one_problem("drain = \"30\"", "1: drain: ", "\"30s\"");
    one_problem("drain = 30", "1: drain: ", "\"30s\"");
    one_problem("[limits]\nevent = 4096", "2: limits.event: ", "\"4MiB\"");
    one_problem("[limits]\nevent = \"4096\"", "2: limits.event: ", "\"4MiB\"");
    one_problem("[limits]\nevent = \"0B\"", "2: limits.event: ", "larger than 0");
    one_problem("[limits]\nevent = \"-1MiB\"", "2: limits.event: ", "a size is");
    one_problem("[limits]\nclient_stall = \"0\"", "2: limits.client_stall: ", "longer than 0");
    one_problem("drain = \"9999years\"", "1: drain: ", "longer than ten years");
    assert_eq!(read("drain = \"1h 30m\"").expect("right").drain, Duration::from_secs(5400));
}

#[test]
fn a_text_that_is_no_toml_says_where() {
    let all = problems("listen = \"127.0.0.1:1\"\ndrain = = 3\n");
    assert!(all[0].starts_with("2: "), "{all:?}");
    let all = problems("drain = \"1s\"\ndrain = \"2s\"\n");
    assert!(all[0].starts_with("2: ") && all[0].contains("duplicate"), "{all:?}");
}

#[test]
fn names_of_upstreams_are_one_path_segment() {
    let url = "url = \"http://localhost/\"";
    for name in ["\"a/b\"", "\".well-known\"", "\"..\"", "\"\"", "\"a b\""] {
        one_problem(&format!("[upstreams.{name}]\n{url}"), &format!("1: upstreams.{name}: "), "");
    }
    read(&format!("[upstreams.\"a.B-c_d~1\"]\n{url}")).expect("right");
}

#[test]
fn urls_of_upstreams_are_http_and_their_user_info_is_a_credential() {
    for url in [
        "ftp://h/",
        "localhost:80",
        "/mcp",
        "http:///mcp",
        "http://h:/",
        "http://h:99999/",
        "http://h/#f",
        "http://h h/",
        "",
    ] {
        one_problem(&format!("[upstreams.a]\nurl = \"{url}\""), "2: upstreams.a.url: ", "");
    }
    let config = read("[upstreams.a]\nurl = \"http://us%20er:p%40ss@localhost:8/mcp?q\"").expect("right");
    let upstream = &config.upstreams["a"];
    assert_eq!(upstream.connection.url, "http://localhost:8/mcp?q");
    let Some(Credential::Basic(value)) = &upstream.credential else { panic!("{:?}", upstream.credential) };
    assert_eq!(value.as_bytes(), b"Basic dXMgZXI6cEBzcw==");
    assert!(value.is_sensitive());
    assert!(!format!("{config:?}").contains("p%40ss"));
    let all = problems("[upstreams.a]\nurl = \"ftp://user:hunter2@localhost/\"");
    assert!(!all[0].contains("hunter2"));
}

#[test]
fn plain_http_beyond_this_host_is_allowed_with_a_warning() {
    let warnings =
        |url: &str| read(&format!("[upstreams.a]\nurl = \"{url}\"")).expect("right").warnings().len();
    assert_eq!(warnings("http://10.0.0.1/mcp"), 1);
    assert_eq!(warnings("https://10.0.0.1/mcp"), 0);
    for loopback in ["http://127.9.0.1/", "http://[::1]:8/", "http://LOCALHOST/"] {
        assert_eq!(warnings(loopback), 0, "{loopback}");
    }
}

#[test]
fn secrets_come_from_files_and_the_environment_only() {
    let folder = TempDir::new().expect("a folder");
    let secret = folder.path().join("token");
    let text = "[auth]\nbearer = { file = \"token\" }";
    let file = folder.path().join("sidecar.toml");
    let load = || Config::from_text(text, Some(&file), &Flags::default(), &nothing);
    assert!(load().expect_err("no such file").to_string().contains("auth.bearer: the file"));
    fs::write(&secret, "\n").expect("written");
    assert!(load().expect_err("empty").to_string().contains("is empty"));
    fs::write(&secret, "sesame\r\n").expect("written");
    assert!(load().expect("right").auth.bearer.expect("set").matches(b"sesame"));

    one_problem("[auth]\nbearer = \"sesame\"", "2: auth.bearer: ", "{ env = ");
    one_problem("[auth]\nbearer = { env = \"NO\" }", "2: auth.bearer: ", "NO is not set");
    one_problem("[auth]\nbearer = { env = \"A\", file = \"b\" }", "2: auth.bearer: ", "either file or env");
    one_problem("[auth]\nbearer = {}", "2: auth.bearer: ", "either file or env");
    let odd = |_: &str| Some("a\nb".to_owned());
    let text = "[auth]\nbearer = { env = \"A\" }";
    assert!(Config::from_text(text, None, &Flags::default(), &odd).is_err());
}

#[test]
fn a_credential_is_not_lent_beyond_loopback_unless_that_is_said() {
    let token = |_: &str| Some("t".to_owned());
    let load = |listen: &str, more: &str, upstream: &str| {
        let text = format!("listen = \"{listen}\"\n[auth]\n{more}\n[upstreams.a]\n{upstream}\n");
        Config::from_text(&text, None, &Flags::default(), &token)
    };
    let bearer = "url = \"http://localhost/\"\nbearer = { env = \"A\" }";
    let refused = load("0.0.0.0:80", "", bearer).expect_err("refused").to_string();
    assert!(refused.starts_with("upstreams.a.bearer: ") && refused.contains("auth.open"), "{refused}");
    load("0.0.0.0:80", "", "url = \"http://u:p@localhost/\"").expect_err("user info counts");
    load("0.0.0.0:80", "", "url = \"http://localhost/\"").expect("nothing is lent");
    load("0.0.0.0:80", "open = true", bearer).expect("it is said");
    load("0.0.0.0:80", "bearer = { env = \"B\" }", bearer).expect("nodes are asked");
    for loopback in ["127.0.0.1:80", "[::1]:80", "[::ffff:127.0.0.1]:80", "localhost:80", "unix:/s"] {
        load(loopback, "", bearer).expect(loopback);
    }
}

#[test]
fn headers_that_are_secrets_or_framing_are_refused() {
    let header = |name: &str| format!("[upstreams.a]\nurl = \"http://localhost/\"\nheaders.{name} = \"v\"");
    one_problem(&header("Authorization"), "3: upstreams.a.headers.Authorization: ", "use bearer");
    one_problem(&header("host"), "3: upstreams.a.headers.host: ", "set by the sidecar");
    one_problem(&header("\"a b\""), "3: upstreams.a.headers.\"a b\": ", "not the name of a header");
    one_problem(
        "[upstreams.a]\nurl = \"http://localhost/\"\nheaders.x = 1",
        "3: upstreams.a.headers.x: ",
        "text",
    );
}

#[test]
fn tls_files_come_in_pairs() {
    one_problem("[tls]\ncert = \"a\"", "1: tls.key: ", "missing");
    let upstream =
        |scheme: &str, tls: &str| format!("[upstreams.a]\nurl = \"{scheme}://localhost/\"\ntls = {tls}");
    one_problem(&upstream("https", "{ cert = \"a\" }"), "3: upstreams.a.tls.key: ", "both");
    one_problem(&upstream("http", "{ ca = \"a\" }"), "3: upstreams.a.tls: ", "no effect");
}

#[test]
fn further_values_are_checked() {
    one_problem("listen = \"7080\"", "1: listen: ", "IP:PORT");
    one_problem("listen = \"\"", "1: listen: ", "IP:PORT");
    one_problem("listen = \"127.0.0.1:9\"\nadmin = \"127.0.0.1:9\"", " admin: ", "same address");
    one_problem("state = \"mysql://x\"", "1: state: ", "memory:");
    one_problem("state = \"redis://h/x\"", "1: state: ", "number as DB");
    one_problem("[log]\nlevel = \"loud\"", "2: log.level: ", "\"info\"");
    one_problem("[log]\nformat = \"xml\"", "2: log.format: ", "\"text\"");
    one_problem("[ledger]\nresults = \"disk\"", "2: ledger.results: ", "\"store\"");
    one_problem("[auth]\norigins = [\"https://a/b\"]", "2: auth.origins: ", "scheme://host");
    one_problem("[auth]\nhosts = [1]", "2: auth.hosts: ", "text");
    one_problem("limits = 3", "1: limits: ", "must be a table");
    let upstream = "[upstreams.a]\nurl = \"http://localhost/\"\n";
    one_problem(
        &format!("{upstream}legacy_disconnect = \"no\""),
        "3: upstreams.a.legacy_disconnect: ",
        "auto",
    );
    one_problem(&format!("{upstream}policy.deny = [\"\"]"), "3: upstreams.a.policy.deny: ", "empty");
    read("state = \"rediss://user:pw@h:1/2\"").expect("right");
    assert!(!format!("{:?}", read("state = \"redis://:pw1@h\"").expect("right")).contains("pw1"));
}

#[test]
fn flags_go_before_the_file() {
    let text = "listen = \"127.0.0.1:1\"\nadmin = \"127.0.0.1:2\"\nstate = \"memory:\"\n\
                [upstreams.a]\nurl = \"http://localhost/file\"\ncalls = 3\n";
    let flags = Flags {
        listen: Some("127.0.0.1:3".into()),
        admin: Some(String::new()),
        state: Some("sqlite:rel.db".into()),
        upstream: vec![
            "a=http://localhost/flag http://localhost/mcp?a=b".into(),
            "c=http://localhost/c".into(),
        ],
        ..Flags::default()
    };
    let config = with_flags(text, &flags).expect("right");
    assert_eq!(config.listen.to_string(), "127.0.0.1:3");
    assert_eq!(config.admin, None);
    assert_eq!(config.state, State::Sqlite("rel.db".into()), "relative to the working directory");
    let urls: Vec<_> = config.upstreams.iter().map(|(n, u)| format!("{n} {}", u.connection.url)).collect();
    assert_eq!(urls, ["a http://localhost/flag", "c http://localhost/c", "mcp http://localhost/mcp?a=b"]);
    assert_eq!(config.upstreams["a"].calls, 3, "the rest of its table stays");
}

#[test]
fn wrong_flags_are_problems_that_name_the_flag() {
    let flags = Flags {
        listen: Some("nowhere".into()),
        admin: Some("nowhere".into()),
        state: Some("nowhere".into()),
        upstream: ["http://a/", "http://b/", "a/b=x", "c=ftp://u:pw@c/"].map(Into::into).to_vec(),
        ..Flags::default()
    };
    let problems = with_flags("", &flags).expect_err("wrong");
    let shown = problems.to_string();
    for flag in [
        "--listen: ",
        "--admin: ",
        "--state: ",
        "--upstream: mcp is given twice",
        "--upstream: must be an http",
    ] {
        assert!(shown.lines().any(|line| line.starts_with(flag)), "{flag} is not in {shown}");
    }
    assert!(!shown.contains("pw"));
}

#[test]
fn no_flag_takes_a_secret() {
    let flags = Flags {
        state: Some("redis://:pw1@localhost/0".into()),
        upstream: vec!["a=https://user:pw2@localhost/ b=https://pw3@localhost/".into()],
        ..Flags::default()
    };
    let shown = with_flags("", &flags).expect_err("refused").to_string();
    assert_eq!(shown.matches("is not taken from the command line").count(), 3, "{shown}");
    assert!(!shown.contains("pw"), "{shown}");
}

#[test]
fn state_lives_in_the_first_directory_that_the_environment_names() {
    let with = |variables: &[(&str, &str)]| {
        let set: HashMap<_, _> = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let environment = move |name: &str| set.get(name).cloned();
        Config::from_text("", None, &Flags::default(), &environment).expect("right").state
    };
    let sqlite = |path: &str| State::Sqlite(path.into());
    let (home, xdg) = (("HOME", "/home/u"), ("XDG_STATE_HOME", "/xdg"));
    assert_eq!(with(&[home, xdg, ("STATE_DIRECTORY", "/var/lib/a:/b")]), sqlite("/var/lib/a/state.db"));
    assert_eq!(with(&[home, xdg]), sqlite("/xdg/mcp-sidecar/state.db"));
    assert_eq!(with(&[home, ("XDG_STATE_HOME", "")]), sqlite("/home/u/.local/state/mcp-sidecar/state.db"));
}

#[test]
fn a_file_that_can_t_be_read_is_a_problem() {
    let flags = Flags { config: Some("/no/such/file.toml".into()), ..Flags::default() };
    let shown = Config::load(&flags, &nothing).expect_err("no file").to_string();
    assert!(shown.starts_with("/no/such/file.toml: cannot be read"), "{shown}");
}

/// A configuration file in a folder of its own, and what reloads it.
struct Reloads {
    folder: TempDir,
    reloader: Reloader,
    first: proxy::Settings,
}

impl Reloads {
    fn of(text: &str) -> Self {
        let folder = TempDir::new().expect("a folder");
        let file = folder.path().join("sidecar.toml");
        fs::write(folder.path().join("token"), "one\n").expect("written");
        fs::write(&file, text).expect("written");
        let flags = Flags { config: Some(file), ..Flags::default() };
        let config = Config::load(&flags, &nothing).expect("right");
        let (reloader, first) = Reloader::new(flags, config).expect("right");
        Self { folder, reloader, first }
    }

    fn write(&self, name: &str, text: &str) {
        // Written aside and moved: another inode, whatever the clock's grain.
        let aside = self.folder.path().join("aside");
        fs::write(&aside, text).expect("written");
        fs::rename(aside, self.folder.path().join(name)).expect("moved");
    }

    fn poll(&mut self) -> Option<proxy::Settings> {
        self.reloader.poll(&nothing)
    }
}

const TWO: &str = "listen = \"127.0.0.1:0\"\n[upstreams.a]\nurl = \"http://localhost/a\"\nbearer.file = \"token\"\n\
                   [upstreams.b]\nurl = \"http://localhost/b\"\n";

#[test]
fn a_changed_file_is_read_again_and_upstreams_that_stay_keep_their_connections() {
    let mut reloads = Reloads::of(TWO);
    assert!(reloads.poll().is_none() && reloads.poll().is_none());
    reloads.write(
        "sidecar.toml",
        &TWO.replace("localhost/b", "localhost/other").replace("/a\"\n", "/a\"\ncalls = 5\n"),
    );
    assert!(reloads.poll().is_none(), "it may still be written");
    let after = reloads.poll().expect("it changed");
    assert!(Arc::ptr_eq(&after.routes["a"].upstream, &reloads.first.routes["a"].upstream));
    assert!(!Arc::ptr_eq(&after.routes["b"].upstream, &reloads.first.routes["b"].upstream));
    assert_eq!(after.routes["a"].calls, 5);
    assert!(reloads.poll().is_none());
}

#[test]
fn a_wrong_file_is_refused_whole_and_the_old_configuration_stays() {
    let mut reloads = Reloads::of(TWO);
    for wrong in [TWO.replace("bearer", "bearr").as_str(), "", "listen = "] {
        reloads.write("sidecar.toml", wrong);
        assert!(reloads.poll().is_none() && reloads.poll().is_none());
        assert_eq!(reloads.reloader.current().upstreams.len(), 2);
    }
    reloads.write("sidecar.toml", TWO);
    reloads.poll();
    let after = reloads.poll().expect("it is right again");
    assert!(Arc::ptr_eq(&after.routes["a"].upstream, &reloads.first.routes["a"].upstream));
}

#[test]
fn a_secret_is_replaced_in_place_when_its_file_changes_and_a_wrong_one_is_not_taken() {
    let mut reloads = Reloads::of(TWO);
    let Some(Credential::Bearer(secret)) = reloads.first.routes["a"].credential.clone() else {
        panic!("it has a bearer")
    };
    assert!(secret.matches(b"one"));
    // As a mounted volume does it: a symlink is swapped.
    fs::write(reloads.folder.path().join("token.2"), "two\n").expect("written");
    std::os::unix::fs::symlink("token.2", reloads.folder.path().join("link")).expect("linked");
    fs::rename(reloads.folder.path().join("link"), reloads.folder.path().join("token")).expect("moved");
    assert!(reloads.poll().is_none() && reloads.poll().is_none());
    assert!(secret.matches(b"two"));
    reloads.write("token", "");
    assert!(reloads.poll().is_none() && reloads.poll().is_none());
    assert!(secret.matches(b"two"));
}

#[test]
fn what_only_a_restart_changes_stays_and_a_reload_can_t_open_the_relay() {
    let mut reloads = Reloads::of(TWO);
    let moved = TWO.replace("127.0.0.1:0", "127.0.0.1:9").replace("/b\"", "/c\"");
    reloads.write("sidecar.toml", &moved);
    let after = reloads.reloader.reload(&nothing).expect("right");
    assert_eq!(after.routes["b"].upstream.settings().url, "http://localhost/c");
    assert_eq!(reloads.reloader.current().listen.to_string(), "127.0.0.1:0");

    let text =
        TWO.replace("127.0.0.1:0", "0.0.0.0:0").replace("[upstreams.a]", "auth.open = true\n[upstreams.a]");
    let mut reloads = Reloads::of(&text);
    reloads.write("sidecar.toml", TWO);
    assert!(reloads.reloader.reload(&nothing).is_none(), "it still listens beyond loopback");
}

#[test]
fn limits_of_connections_change_with_a_reload() {
    let mut reloads = Reloads::of(TWO);
    let server = reloads.reloader.server();
    reloads.write("sidecar.toml", &format!("{TWO}[limits]\nconnections = 7\n"));
    reloads.reloader.reload(&nothing).expect("right");
    assert_eq!(server.borrow().limits.connections, 7);
}

#[test]
fn what_the_operator_says_of_tools_is_carried_to_the_route() {
    let digest = "0".repeat(64);
    let text =
        format!("{TWO}approved = \"b.json\"\ntools.charge.honours_key = true\npolicy.deny = [\"drop_*\"]\n");
    let mut reloads = Reloads::of(TWO);
    reloads.write("b.json", &format!("{{\"upstream\":\"x\",\"tools\":{{\"get\":\"{digest}\"}}}}"));
    reloads.write("sidecar.toml", &text);
    let after = reloads.reloader.reload(&nothing).expect("right");
    let route = &after.routes["b"];
    assert_eq!(route.listing.overrides["charge"].honours_key, Some(true));
    assert!(route.listing.approved.as_ref().is_some_and(|approval| approval.covers("get", Some(&digest))));
    assert!(route.policy.allows("charge") && !route.policy.allows("drop_all"));
    let other = &after.routes["a"];
    assert_eq!(other.listing, listing::Rules::default());
    assert!(other.policy.allows("drop_all"));
}

#[test]
fn an_approved_listing_is_read_again_when_its_file_changes_and_a_wrong_one_is_refused() {
    let text = format!("{TWO}approved = \"b.json\"\n");
    let mut reloads = Reloads::of(TWO);
    reloads.write("sidecar.toml", &text);
    assert!(reloads.reloader.reload(&nothing).is_none(), "there is no such file");
    let config = Config::load(&reloads.reloader.flags, &nothing).expect("the text is right");
    let shown = config.proxy_settings().expect_err("no file").to_string();
    assert!(shown.contains("sidecar.toml:7: upstreams.b.approved: the file "), "{shown}");
    assert!(shown.contains("b.json cannot be read: "), "{shown}");

    reloads.write("b.json", "{\"tools\":{}}");
    reloads.reloader.reload(&nothing).expect("right");
    reloads.write("b.json", "{\"tools\":{\"get\":\"soon\"}}");
    assert!(reloads.poll().is_none() && reloads.poll().is_none());
    let shown = config.proxy_settings().expect_err("no digest").to_string();
    assert!(shown.contains("b.json is no approved listing: the digest of \"get\""), "{shown}");
    reloads.write("b.json", &format!("{{\"tools\":{{\"get\":\"{}\"}}}}", "1".repeat(64)));
    assert!(reloads.poll().is_none(), "it may still be written");
    let after = reloads.poll().expect("it changed");
    assert_eq!(after.routes["b"].listing.approved.as_ref().map(|approval| approval.len()), Some(1));
}
