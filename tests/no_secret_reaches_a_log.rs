//! Tokens, keys, cookies, session ids, query strings, arguments and results are in no log: not on stdout, not on stderr,
//! not in a file, at no level, whatever happens to the exchange. Nor are they in an error that the sidecar makes.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::fs;

use support::{
    Post, Sidecar, Upstream,
    mcp::{MODERN, progress},
};
use tempfile::TempDir;

/// A secret in every place that can hold one; each begins alike.
const MARK: &str = "SECRET-";

/// A call full of secrets, in either era.
fn call(modern: bool) -> Post {
    let meta = if modern {
        format!(r#","io.modelcontextprotocol/protocolVersion":"{MODERN}""#)
    } else {
        String::new()
    };
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"slow","arguments":{{"password":"SECRET-ARGUMENT"}},"_meta":{{"progressToken":"SECRET-TOKEN","x":"SECRET-META"{meta}}}}}}}"#
    );
    let post = if modern { Post::modern("tools/call", Some("slow"), body) } else { Post::legacy(body) };
    let post = if modern { post } else { post.field("Mcp-Session-Id", "SECRET-SESSION") };
    post.field("Authorization", "Bearer SECRET-BEARER")
        .field("Proxy-Authorization", "Basic SECRET-PROXY")
        .field("X-Api-Key", "SECRET-KEY")
        .field("Cookie", "a=SECRET-COOKIE")
        .field("Last-Event-ID", "SECRET-EVENT")
        .field("Mcp-Param-Region", "SECRET-PARAM")
        .field("User-Agent", "SECRET-AGENT")
        .field("baggage", "user=SECRET-BAGGAGE")
        .field("tracestate", "x=SECRET-STATE")
        .at("/mcp?token=SECRET-QUERY")
}

const RESULT: &str =
    r#"{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"SECRET-RESULT"}]}}"#;
const ERROR: &str =
    r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"SECRET-ERROR","data":"SECRET-DATA"}}"#;

/// How an upstream of secrets answers its requests, one after another.
fn answer(number: usize, reply: &mut support::upstream::Reply) {
    let fields = [
        ("Set-Cookie", "lb=SECRET-SET-COOKIE"),
        ("Mcp-Session-Id", "SECRET-NEW-SESSION"),
        ("WWW-Authenticate", "Bearer realm=\"SECRET-REALM\""),
        ("X-Secret", "SECRET-FIELD"),
        ("Location", "http://127.0.0.1:1/?SECRET-LOCATION"),
    ];
    match number {
        0 => reply.json(200, &fields, RESULT),
        1 => reply.json(200, &fields, ERROR),
        2 => {
            reply.sse(&fields);
            reply
                .event(&progress("\"SECRET-TOKEN\"", 1).replace("1}}", "1,\"message\":\"SECRET-MESSAGE\"}}"));
            reply.event(RESULT);
            reply.end();
        }
        3 => reply.json(401, &fields, "SECRET-BODY"),
        4 => reply.json(429, &[&fields[..], &[("Retry-After", "SECRET-RETRY")]].concat(), "SECRET-BODY"),
        5 => reply.json(307, &fields, "SECRET-BODY"),
        6 => reply.json(308, &[("Location", "/moved?SECRET-MOVED")], "SECRET-BODY"),
        7 => reply.json(404, &fields, "SECRET-BODY"),
        8 => reply.json(200, &fields, "SECRET-NO-JSON"),
        9 => {
            reply.sse(&fields);
            reply.event("SECRET-NO-JSON-EVENT");
            reply.break_off();
        }
        10 => {
            reply.raw("SECRET-NO-HTTP\r\n\r\n");
            reply.break_off();
        }
        11 => {
            reply.raw("HTTP/1.1 200 OK\r\nX-Secret : SECRET-FAULT\r\nContent-Length: SECRET\r\n\r\n");
            reply.break_off();
        }
        12 => {
            reply.head(
                200,
                &[
                    ("Content-Type", "application/json"),
                    ("Content-Encoding", "gzip"),
                    ("Content-Length", "11"),
                ],
            );
            reply.raw("SECRET-GZIP");
        }
        13 => reply.hang(),
        _ => reply.json(200, &fields, RESULT),
    }
}

/// What a sidecar at this level has told anyone about a row of exchanges: its logs, and the errors of its own.
fn told(level: &str, modern: bool) -> Vec<(&'static str, String)> {
    let upstream = Upstream::start(|request, reply| answer(request.number, reply));
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("sidecar.toml");
    fs::write(folder.path().join("token"), "SECRET-OF-THE-UPSTREAM").unwrap();
    let text = format!(
        "[log]\nlevel = \"{level}\"\naccess = \"access.log\"\n\
         [upstreams.mcp]\nurl = \"http://user:SECRET-PASSWORD@{at}/mcp?api_key=SECRET-IN-URL\"\nidle_timeout = \"300ms\"\n\
         headers = {{ \"X-Team\" = \"SECRET-HEADER\" }}\n\
         [upstreams.two]\nurl = \"http://{at}/mcp?api_key=SECRET-IN-URL\"\nbearer = {{ file = \"token\" }}\n\
         [upstreams.gone]\nurl = \"http://user:SECRET-PASSWORD@127.0.0.1:1/mcp?api_key=SECRET-IN-URL\"\n\
         [upstreams.nowhere]\nurl = \"http://nowhere.invalid/mcp?api_key=SECRET-IN-URL\"\nconnect_timeout = \"500ms\"\n\
         [upstreams.tls]\nurl = \"https://{at}/mcp?api_key=SECRET-IN-URL\"\nconnect_timeout = \"500ms\"\n",
        at = upstream.address
    );
    fs::write(&file, text).unwrap();
    let log = folder.path().join("access.log");
    let mut command = Sidecar::command(&folder);
    command.arg("--config").arg(&file);
    let mut sidecar = Sidecar::spawn(command, folder);

    let mut own = String::new();
    let mut expected = 0;
    let mut ask = |post: &Post, ours: bool| {
        let client = sidecar.client();
        client.send(post);
        let response = client.response();
        // On an open stream the sidecar's own error is an event behind the upstream's.
        let text = response.text();
        own.extend(
            text.lines().filter(|line| ours || line.contains("mcp-sidecar")).flat_map(|line| [line, "\n"]),
        );
        expected += 1;
    };
    for _ in 0..14 {
        ask(&call(modern), false);
    }
    for path in ["/gone", "/nowhere", "/tls", "/other", "/mcp/SECRET"] {
        // A path is in the log, so that one that is no endpoint is as it came.
        ask(&call(modern).at(&format!("{}?token=SECRET-QUERY", path.replace("/SECRET", "/x"))), true);
    }
    ask(&call(modern).at("/two?token=SECRET-QUERY"), false);
    ask(&call(modern).field("Origin", "http://SECRET-ORIGIN.example"), true);
    ask(&call(modern).field("Host", "SECRET-HOST.example"), true);
    ask(&call(modern).field("Content-Type", "text/SECRET-TYPE"), true);
    ask(&call(modern).field("Expect", "SECRET-EXPECTATION"), true);
    ask(&call(modern).more("Mcp-Session-Id", "SECRET-1").more("Mcp-Session-Id", "SECRET-2"), true);
    ask(&call(modern).field("X-Large", &format!("SECRET-LARGE{}", "x".repeat(40_000))), true);
    ask(&Post { body: b"{\"SECRET-CUT".to_vec(), ..call(modern) }, true);
    ask(
        &Post {
            body: br#"{"jsonrpc":"2.0","id":1,"method":"ping","params":"SECRET-SHAPE","params":1}"#.to_vec(),
            ..call(modern)
        },
        true,
    );
    if modern {
        ask(&call(modern).field("Mcp-Name", "SECRET-NAME"), true);
        ask(&call(modern).field("Mcp-Method", "SECRET-METHOD"), true);
        ask(&call(modern).field("MCP-Protocol-Version", "SECRET-VERSION"), true);
    }
    let garbage = sidecar.client();
    garbage.write("POST /SECRET-GARBAGE\r\n\r\n");
    own += &garbage.response().text();
    expected += 1;
    garbage.closed();
    let page = sidecar.admin("GET", "/metrics").text() + &sidecar.admin("GET", "/").text();
    assert!(sidecar.terminate().success());
    let lines = fs::read_to_string(log).unwrap();
    assert_eq!(lines.lines().count(), expected, "one line each");
    let stdout = sidecar.lines().iter().map(ToString::to_string).collect();
    vec![
        ("the access log", lines),
        ("stdout", stdout),
        ("stderr", sidecar.stderr()),
        ("errors", own),
        ("the admin pages", page),
    ]
}

#[track_caller]
fn check(level: &str, modern: bool) {
    let told = told(level, modern);
    for (what, text) in &told {
        let leaked: Vec<_> = text.lines().filter(|line| line.to_uppercase().contains(MARK)).collect();
        assert!(leaked.is_empty(), "level {level}, {what}: {leaked:#?}");
        // What a credential is sent as: `Basic` of the user info.
        for coded in ["dXNlcjpTRUNSRVQtUEFTU1dPUkQ", "U0VDUkVU"] {
            assert!(!text.contains(coded), "level {level}, {what}: encoded");
        }
    }
    let lines = &told[0].1;
    for name in ["tools/call", "\"slow\"", "\"bytes_in\"", "\"status\""] {
        assert!(lines.contains(name), "nothing of {name} in {lines}");
    }
    if !modern {
        assert!(lines.contains("\"session\""), "the session is there as a hash");
    }
}

/// The levels below tell less of the same.
#[test]
fn at_the_level_of_every_day() {
    check("info", false);
    check("info", true);
}

#[test]
fn at_the_level_for_looking_for_faults() {
    check("debug", false);
    check("debug", true);
}

#[test]
fn at_the_level_that_tells_most() {
    check("trace", false);
    check("trace", true);
}

/// A wrong configuration is told with its keys, and without what was secret in it.
#[test]
fn problems_of_the_configuration_repeat_no_secret() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("token"), "SECRET-1\nSECRET-2").unwrap();
    let file = folder.path().join("sidecar.toml");
    let text = "state = \"redis://:SECRET-3@host/x\"\n[auth]\nbearer = \"SECRET-4\"\n\
                [upstreams.a]\nurl = \"ftp://user:SECRET-5@host/\"\nbearer = { file = \"token\" }\n\
                [upstreams.b]\nurl = \"http://user:SECRET-6@host:port/\"\nheaders = { authorization = \"SECRET-7\" }\n\
                [upstreams.c]\nurl = \"http://user:SECRET-8@host/#x\"\n[upstreams.d]\nurl = 7\nbearer = { env = \"UNSET\" }\n";
    fs::write(&file, text).unwrap();
    for (command, arguments) in [
        ("check", vec![file.display().to_string()]),
        ("serve", vec!["--config".into(), file.display().to_string()]),
        ("serve", vec!["--upstream".into(), "http://user:SECRET-9@host:port/".into()]),
        ("serve", vec!["--upstream".into(), "x=ftp://user:SECRET-10@host/".into()]),
        ("serve", vec!["--state".into(), "redis://:SECRET-11@/".into()]),
    ] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"))
            .arg(command)
            .args(&arguments)
            .env("MCP_SIDECAR_ADMIN", "")
            .output()
            .unwrap();
        let said =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(!said.contains(MARK), "{said}");
    }
}
