//! Which upstream a path means, what the request looks like when it gets there, and on what the sidecar listens.
//!
//! `/NAME` and `/NAME/` are the endpoint, anything else below is 404; the upstream's own path and
//! query are kept and the node's query is appended; well-known documents are relayed unread.
#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected has to fail")]

mod support;

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    process::Command,
    sync::Arc,
};

use rcgen::{CertificateParams, KeyPair};
use support::{
    Post, Sidecar, Upstream,
    http::{Head, Response},
    mcp::{call, modern_call, result},
};
use tempfile::TempDir;

/// What reaches an upstream of this URL path when a node asks at `path`, as its request line.
fn line(sidecar: &Sidecar, upstream: &Upstream, post: &Post) -> String {
    let number = upstream.count();
    let response = sidecar.client().ask(post);
    assert_eq!(response.status(), 200, "{}: {}", post.path, response.text());
    upstream.wait_request(number).head.line
}

#[test]
fn the_target_is_what_was_configured_to_the_letter() {
    let upstream = Upstream::json(result(1));
    let at = &upstream.address;
    for (configured, target) in [
        ("/team/a/mcp", "/team/a/mcp"),
        ("/mcp/", "/mcp/"),
        ("/mcp", "/mcp"),
        ("", "/"),
        ("/", "/"),
        ("/a//b/../c%2Fd/%7Ee", "/a//b/../c%2Fd/%7Ee"),
        ("/mcp?key=a%2Fb", "/mcp?key=a%2Fb"),
        ("/mcp/?a=1&b", "/mcp/?a=1&b"),
        ("?x=1", "/?x=1"),
    ] {
        let sidecar = Sidecar::with_flags(&["--upstream", &format!("x=http://{at}{configured}")]);
        for path in ["/x", "/x/"] {
            assert_eq!(line(&sidecar, &upstream, &call(1).at(path)), format!("POST {target} HTTP/1.1"));
        }
        for (query, joint) in [("?q=%2F&r=a+b", "q=%2F&r=a+b"), ("?q=a?b", "q=a?b"), ("?", ""), ("?&", "&")] {
            let joint = match (target.contains('?'), joint) {
                (_, "") => String::new(),
                (true, _) => format!("&{joint}"),
                (false, _) => format!("?{joint}"),
            };
            let told = line(&sidecar, &upstream, &call(1).at(&format!("/x{query}")));
            assert_eq!(told, format!("POST {target}{joint} HTTP/1.1"));
        }
    }
}

/// A server that knows only one spelling is asked in that one, and never twice.
#[test]
fn a_404_of_the_upstream_passes_and_no_other_spelling_is_tried() {
    let upstream = Upstream::start(|request, reply| {
        if request.head.line.starts_with("POST /mcp/ ") {
            reply.json(200, &[], &result(1));
        } else {
            reply.json(404, &[], r#"{"detail":"not here"}"#);
        }
    });
    let sidecar = Sidecar::before(&upstream);
    let response = sidecar.client().ask(&call(1));
    assert_eq!((response.status(), response.text().as_str()), (404, r#"{"detail":"not here"}"#));
    assert_eq!(upstream.count(), 1);
    let slash = format!("{}/", upstream.url());
    let sidecar = Sidecar::with_flags(&["--upstream", &slash]);
    assert_eq!(sidecar.client().ask(&call(1)).status(), 200);
    assert_eq!(upstream.count(), 2);
}

#[test]
fn each_name_is_one_upstream_and_nothing_else_is_any() {
    let (a, b) = (Upstream::json(result(1)), Upstream::json(result(1)));
    let sidecar = Sidecar::with_flags(&[
        "--upstream",
        &format!("a={}", a.url()),
        "--upstream",
        &format!("b-2.x_y~z=http://{}/other", b.address),
    ]);
    assert_eq!(line(&sidecar, &a, &call(1).at("/a")), "POST /mcp HTTP/1.1");
    assert_eq!(line(&sidecar, &b, &call(1).at("/b-2.x_y~z/")), "POST /other HTTP/1.1");
    for path in [
        "/",
        "/mcp",
        "/c",
        "/a/b",
        "/a/../b-2.x_y~z",
        "/x/../a",
        "/%61",
        "/a%2f",
        "/a;x",
        "/A",
        "/.well-known",
        "/.well-known/oauth-protected-resource",
        "/.well-known/oauth-protected-resource/c",
        "/.well-known/oauth-authorization-server/a",
        "/.well-known/openid-configuration",
    ] {
        let response = sidecar.client().ask(&call(1).at(path));
        assert_eq!((response.status(), &response.json()["error"]["code"]), (404, &1404.into()), "{path}");
    }
    let lines = sidecar.wait_lines(17);
    assert_eq!((&lines[0]["upstream"], &lines[1]["upstream"]), (&"a".into(), &"b-2.x_y~z".into()));
    assert!(lines[2..].iter().all(|line| line.get("upstream").is_none()), "{lines:?}");
    assert_eq!((a.count(), b.count()), (1, 1));
}

/// `_meta`, headers and targets can name any host they like.
#[test]
fn nothing_in_a_request_adds_a_destination() {
    let (upstream, other) = (Upstream::json(result(1)), Upstream::json(result(1)));
    let sidecar = Sidecar::before(&upstream);
    let elsewhere = format!("http://{}/", other.address);
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{elsewhere}","arguments":{{"url":"{elsewhere}"}},"_meta":{{"url":"{elsewhere}"}}}}}}"#
    );
    let post = Post::legacy(body)
        .field("X-Forwarded-Host", &other.address)
        .field("Forwarded", &format!("host={}", other.address))
        .field("X-Original-URL", &elsewhere)
        .field("Referer", &elsewhere)
        .at(&format!("/mcp?url={elsewhere}"));
    assert_eq!(sidecar.client().ask(&post).status(), 200);
    let head = upstream.wait_request(0).head;
    assert_eq!(head.all("host"), [upstream.address.as_str()]);
    assert_eq!((head.field("x-forwarded-host"), head.field("forwarded")), (None, None));
    assert_eq!(other.connections().len(), 0);
}

#[test]
fn a_redirect_is_followed_within_its_origin_only_and_then_remembered() {
    let other = Upstream::json(result(1));
    let target = format!("http://{}/mcp", other.address);
    let away = Upstream::start(move |_, reply| reply.json(307, &[("Location", &target)], "{}"));
    let sidecar = Sidecar::before(&away);
    let response = sidecar.client().ask(&call(1).field("Authorization", "Bearer of-the-node"));
    assert_eq!(response.status(), 307);
    assert_eq!((away.count(), other.connections().len()), (1, 0));

    let moved = Upstream::start(|request, reply| {
        if request.head.line.starts_with("POST /mcp ") {
            reply.json(308, &[("Location", "/mcp/")], "{}");
        } else {
            reply.json(200, &[], &result(1));
        }
    });
    let sidecar = Sidecar::before(&moved);
    for _ in 0..2 {
        assert_eq!(sidecar.client().ask(&call(1)).status(), 200);
    }
    let lines: Vec<_> = (0..3).map(|number| moved.wait_request(number).head.line).collect();
    assert_eq!(lines, ["POST /mcp HTTP/1.1", "POST /mcp/ HTTP/1.1", "POST /mcp/ HTTP/1.1"]);
    sidecar.wait_stderr("moved");
}

#[test]
fn well_known_documents_are_relayed_from_the_path_of_their_upstream() {
    let document = "{ \"resource\": \"https://api.example/team/mcp\",\n\"x\": 1.0 }";
    let upstream = Upstream::start(move |request, reply| {
        let line = request.head.line.clone();
        let status = if line.contains("missing") { 404 } else { 200 };
        reply.json(status, &[("X-Line", &line), ("Cache-Control", "max-age=60")], document);
    });
    let other = Upstream::json("{}");
    let get = |path: &str| {
        let mut get = Post::get().at(path).without("MCP-Protocol-Version").without("Mcp-Session-Id");
        get.fields.retain(|(name, _)| name != "Content-Type");
        get
    };
    let url = format!("http://{}/team/mcp?key=SECRET", upstream.address);
    let one = Sidecar::with_flags(&["--upstream", &format!("one={url}")]);
    for (asked, target) in [
        ("/.well-known/oauth-protected-resource/one", "/.well-known/oauth-protected-resource/team/mcp"),
        (
            "/.well-known/oauth-protected-resource/one?a=b",
            "/.well-known/oauth-protected-resource/team/mcp?a=b",
        ),
        ("/.well-known/oauth-protected-resource", "/.well-known/oauth-protected-resource"),
        ("/.well-known/oauth-authorization-server/one", "/.well-known/oauth-authorization-server/team/mcp"),
        ("/.well-known/oauth-authorization-server", "/.well-known/oauth-authorization-server"),
        ("/.well-known/openid-configuration", "/.well-known/openid-configuration"),
        ("/.well-known/missing", "/.well-known/missing"),
    ] {
        let response = one.client().ask(&get(asked));
        assert_eq!(response.status(), if asked.ends_with("missing") { 404 } else { 200 }, "{asked}");
        assert_eq!(response.text(), document, "{asked}");
        assert_eq!(response.head.field("x-line"), Some(format!("GET {target} HTTP/1.1").as_str()), "{asked}");
        assert_eq!(response.head.field("cache-control"), Some("max-age=60"), "{asked}");
    }
    let line = one.wait_line(|line| line["path"] == "/.well-known/openid-configuration");
    assert_eq!((&line["upstream"], &line["status"]), (&"one".into(), &200.into()), "{line}");

    let several = Sidecar::with_flags(&[
        "--upstream",
        &format!("one={url}"),
        "--upstream",
        &format!("two={}", other.url()),
    ]);
    let response = several.client().ask(&get("/.well-known/oauth-protected-resource/one"));
    assert_eq!(
        response.head.field("x-line"),
        Some("GET /.well-known/oauth-protected-resource/team/mcp HTTP/1.1")
    );
    for path in ["oauth-protected-resource", "oauth-protected-resource/three", "openid-configuration"] {
        assert_eq!(several.client().ask(&get(&format!("/.well-known/{path}"))).status(), 404, "{path}");
    }
    assert_eq!(other.count(), 0);
}

/// No bearer is asked for them, so that they must lead nowhere else.
#[test]
fn a_well_known_path_leads_to_documents_alone() {
    let upstream = Upstream::json("{}");
    let sidecar = Sidecar::before(&upstream);
    for path in [
        "/.well-known/../admin",
        "/.well-known/x/../../admin",
        "/.well-known/%2e%2e/admin",
        "/.well-known/.%2E/admin",
        "/.well-known/./x",
        "/.well-known/..",
        "/.well-known/..%2fadmin",
        "/.well-known/..%5cadmin",
        "/.well-known/..\\admin",
        "/.well-known//x/..;/admin",
        "/.well-known/",
    ] {
        let response = sidecar.client().ask(&Post::get().at(path));
        assert!([400, 404].contains(&response.status()), "{path}: {}", response.status());
    }
    for method in ["POST", "PUT", "DELETE"] {
        let mut post = call(1).at("/.well-known/openid-configuration");
        post.method = method;
        post.body.clear();
        let response = sidecar.client().ask(&post);
        assert_eq!(response.status(), 405, "{method}");
        assert_eq!(response.head.field("allow"), Some("GET, HEAD, OPTIONS"), "{method}");
    }
    assert_eq!(upstream.count(), 0);
}

fn with_secrets(config: &str) -> Sidecar {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("sidecar.toml");
    fs::write(&file, config).unwrap();
    fs::write(folder.path().join("upstream-token"), "of-the-upstream\n").unwrap();
    let mut command = Sidecar::command(&folder);
    command.arg("--config").arg(&file).env("SIDECAR_TOKEN", "of-the-sidecar");
    Sidecar::spawn(command, folder)
}

const AUTH: &str = "[auth]\nbearer = { env = \"SIDECAR_TOKEN\" }\n";
const BEARER: &str = "bearer = { file = \"upstream-token\" }\n";

/// `Authorization` as it reaches the upstream when the node sends `sent`.
fn authorization(auth: &str, bearer: &str, sent: Option<&str>, path: &str) -> Option<String> {
    let upstream = Upstream::json(result(1));
    let sidecar = with_secrets(&format!("{auth}[upstreams.mcp]\nurl = \"{}\"\n{bearer}", upstream.url()));
    let post = if path.starts_with("/.well") { Post::get() } else { call(1) }.at(path);
    let post = sent.iter().fold(post, |post, sent| post.field("Authorization", sent));
    let response = sidecar.client().ask(&post);
    assert_eq!(response.status(), 200, "{}", response.text());
    upstream.wait_request(0).head.field("authorization").map(str::to_owned)
}

#[test]
fn each_credential_goes_only_where_it_was_set_for() {
    let (node, own) = (Some("Bearer of-the-node"), Some("Bearer of-the-sidecar"));
    assert_eq!(authorization("", "", node, "/mcp").as_deref(), node);
    assert_eq!(authorization("", "", None, "/mcp"), None);
    assert_eq!(authorization("", BEARER, node, "/mcp").as_deref(), Some("Bearer of-the-upstream"));
    assert_eq!(authorization("", BEARER, None, "/mcp").as_deref(), Some("Bearer of-the-upstream"));
    assert_eq!(authorization(AUTH, "", own, "/mcp"), None);
    assert_eq!(authorization(AUTH, BEARER, own, "/mcp").as_deref(), Some("Bearer of-the-upstream"));
}

/// Neither `[auth]` nor the upstream's bearer applies to them; what the node sent for this hop ends here all the same.
#[test]
fn well_known_documents_are_asked_without_credentials_of_the_configuration() {
    let document = "/.well-known/oauth-protected-resource/mcp";
    assert_eq!(authorization(AUTH, BEARER, None, document), None);
    assert_eq!(authorization(AUTH, "", Some("Bearer of-the-sidecar"), document), None);
    assert_eq!(authorization(AUTH, BEARER, Some("Bearer of-the-sidecar"), document), None);
    assert_eq!(authorization("", BEARER, None, document), None);
}

#[test]
fn headers_of_the_configuration_are_added_to_every_request() {
    let upstream = Upstream::json(result(1));
    let sidecar = Sidecar::with_config(&format!(
        "[upstreams.mcp]\nurl = \"{}\"\nheaders = {{ \"X-Team\" = \"agents\", \"X-Two\" = \"b\" }}\n",
        upstream.url()
    ));
    for (number, post) in [call(1), modern_call(1), Post::get(), Post::delete()].iter().enumerate() {
        sidecar.client().ask(&post.clone().field("X-Two", "of the node"));
        let head = upstream.wait_request(number).head;
        assert_eq!((head.all("x-team"), head.all("x-two")), (vec!["agents"], vec!["b"]), "{}", head.line);
    }
}

/// A page in a browser needs the upstream's own answers about origins, and only those.
#[test]
fn what_the_upstream_says_about_other_origins_passes_once_and_unchanged() {
    let cors = [
        ("Access-Control-Allow-Origin", "http://127.0.0.1:6274"),
        ("Access-Control-Allow-Headers", "content-type, mcp-session-id"),
        ("Access-Control-Expose-Headers", "Mcp-Session-Id"),
    ];
    let upstream = Upstream::start(move |request, reply| match request.method() {
        "OPTIONS" => {
            reply.head(204, &cors);
        }
        _ => reply.json(200, &cors, &result(1)),
    });
    let sidecar = Sidecar::before(&upstream);
    let mut flight = Post::new("").without("Content-Type").field("Access-Control-Request-Method", "POST");
    flight.method = "OPTIONS";
    for (number, post) in [flight, call(1)].into_iter().enumerate() {
        let response = sidecar.client().ask(&post.field("Origin", "http://127.0.0.1:6274"));
        for (name, value) in cors {
            assert_eq!(response.head.all(name), [value], "{name}");
        }
        let others =
            response.head.fields.iter().filter(|(name, _)| name.starts_with("access-control-")).count();
        assert_eq!(others, cors.len());
        assert_eq!(upstream.wait_request(number).head.field("origin"), Some("http://127.0.0.1:6274"));
    }
    let line = sidecar.wait_line(|line| line["http_method"] == "OPTIONS");
    assert_eq!((&line["status"], &line["outcome"]), (&204.into(), &"ok".into()), "{line}");
    let bare = Upstream::json(result(1));
    let sidecar = Sidecar::before(&bare);
    let response = sidecar.client().ask(&call(1).field("Origin", "http://localhost"));
    assert!(
        !response.head.fields.iter().any(|(name, _)| name.starts_with("access-control-")),
        "none is added"
    );
}

#[test]
fn head_is_forwarded_and_answered_without_a_body() {
    let upstream = Upstream::start(|_, reply| reply.head(200, &[("Content-Length", "10"), ("X-End", "1")]));
    let sidecar = Sidecar::before(&upstream);
    let mut head = Post::get();
    head.method = "HEAD";
    let client = sidecar.client();
    client.send(&head);
    let told = client.head();
    assert_eq!((told.status(), told.field("x-end")), (200, Some("1")));
    assert_eq!(upstream.wait_request(0).method(), "HEAD");
    sidecar.wait_line(|line| line["http_method"] == "HEAD" && line["outcome"] == "ok");
}

/// The environment of a container may name a proxy; an upstream on this host must not be asked through it.
#[test]
fn proxies_that_the_environment_names_are_not_used() {
    let (upstream, proxy) = (Upstream::json(result(1)), Upstream::json("{}"));
    for no_proxy in [None, Some(""), Some("127.0.0.1")] {
        let folder = TempDir::new().unwrap();
        let mut command = Sidecar::command(&folder);
        command.args(["--upstream", &upstream.url()]);
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
            command.env(name, format!("http://{}", proxy.address));
        }
        for name in ["NO_PROXY", "no_proxy"] {
            command.env_remove(name);
            no_proxy.map(|value| command.env(name, value));
        }
        let sidecar = Sidecar::spawn(command, folder);
        assert_eq!(sidecar.client().ask(&call(1)).status(), 200);
    }
    assert_eq!((upstream.count(), proxy.connections().len()), (3, 0));
}

#[test]
fn a_unix_socket_can_be_listened_at() {
    let upstream = Upstream::json(result(1));
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("sidecar.sock");
    let listen = format!("unix:{}", socket.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
    command.args(["serve", "--admin", "", "--listen", &listen, "--upstream", &upstream.url()]);
    let mut sidecar = Sidecar::spawn(command, folder);
    assert_eq!(sidecar.listen, listen);
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(&call(1).field("Connection", "close").bytes("localhost")).unwrap();
    let mut told = Vec::new();
    stream.read_to_end(&mut told).unwrap();
    assert!(told.starts_with(b"HTTP/1.1 200 ") && told.ends_with(result(1).as_bytes()));
    assert_eq!(sidecar.wait_line(|_| true)["peer"], "unix");
    assert!(sidecar.terminate().success());
    assert!(!socket.exists(), "its file goes with it");
}

#[test]
fn tls_can_be_listened_with_and_offers_both_versions_of_http() {
    let upstream = Upstream::json(result(1));
    let folder = TempDir::new().unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
    fs::write(folder.path().join("server.pem"), certificate.pem()).unwrap();
    fs::write(folder.path().join("server.key"), key.serialize_pem()).unwrap();
    let file = folder.path().join("sidecar.toml");
    let text = format!(
        "[tls]\ncert = \"server.pem\"\nkey = \"server.key\"\n[upstreams.mcp]\nurl = \"{}\"\n",
        upstream.url()
    );
    fs::write(&file, text).unwrap();
    let mut command = Sidecar::command(&folder);
    command.arg("--config").arg(&file);
    let sidecar = Sidecar::spawn(command, folder);
    for (offered, chosen) in
        [(vec![], None), (vec!["h2", "http/1.1"], Some("h2")), (vec!["http/1.1"], Some("http/1.1"))]
    {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = offered.iter().map(|name: &&str| name.as_bytes().to_vec()).collect();
        let name = "localhost".try_into().unwrap();
        let mut tls = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let mut tcp = std::net::TcpStream::connect(&sidecar.listen).unwrap();
        tcp.set_read_timeout(Some(support::BOUND)).unwrap();
        while tls.is_handshaking() {
            tls.complete_io(&mut tcp).unwrap();
        }
        assert_eq!(tls.alpn_protocol(), chosen.map(str::as_bytes));
        if chosen == Some("h2") {
            continue;
        }
        let mut stream = rustls::Stream::new(&mut tls, &mut tcp);
        stream.write_all(&call(1).field("Connection", "close").bytes("localhost")).unwrap();
        let mut told = Vec::new();
        // A close without close_notify still ends what was told.
        let _ = stream.read_to_end(&mut told);
        let head = Head::read(&told).unwrap();
        let response = Response { body: told[head.len..].to_vec(), head };
        assert_eq!((response.status(), response.text()), (200, result(1)));
    }
    let plain = sidecar.client();
    plain.send(&call(1));
    plain.closed();
    assert_eq!(upstream.count(), 2);
}
