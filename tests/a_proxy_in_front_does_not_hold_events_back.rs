//! A reverse proxy in front of the sidecar, as it comes from its package: nginx holds a stream back in its buffers unless
//! the answer says `X-Accel-Buffering: no`, which every event stream of the sidecar does (MCP 2026-07-28, Streamable HTTP
//! § Receiving Messages).

mod support;

use std::{
    fs,
    net::{TcpListener, TcpStream},
    process::Command,
    thread,
    time::Duration,
};

use support::{
    Client, Gate, Process, Sidecar, Upstream,
    mcp::{call, event, progress, result},
};
use tempfile::TempDir;

/// nginx on a free port with its default buffering, before `address`.
struct Nginx {
    address: String,
    _process: Process,
    _folder: TempDir,
}

impl Nginx {
    fn before(address: &str) -> Self {
        let folder = TempDir::new().expect("a folder");
        let port =
            TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
        let root = folder.path().display();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|kind| format!("{kind}_temp_path {root}/{kind};\n"))
            .collect();
        let configuration = format!(
            "daemon off; master_process off; pid {root}/pid; error_log stderr;\nevents {{}}\nhttp {{ access_log off;\n{temporary}\
             server {{ listen 127.0.0.1:{port};\n\
             location / {{ proxy_pass http://{address}; proxy_set_header Host {address}; }} }} }}\n"
        );
        let file = folder.path().join("nginx.conf");
        fs::write(&file, configuration).expect("written");
        let mut command = Command::new("nginx");
        command.arg("-p").arg(folder.path()).arg("-c").arg(&file).arg("-e").arg("stderr");
        let process = Process::spawn(command);
        let address = format!("127.0.0.1:{port}");
        support::until("nginx to listen", || TcpStream::connect(&address).is_ok());
        Self { address, _process: process, _folder: folder }
    }
}

/// An event and then the answer, each when the gate is opened for it: what comes with the head nginx passes on with it.
fn streaming(gate: &Gate) -> Upstream {
    let gate = gate.clone();
    Upstream::start(move |_, reply| {
        // As HTTP/1.0 has it, which nginx speaks unless it is told otherwise.
        reply.raw("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n");
        gate.pass();
        reply.raw(event(progress(1, 1)));
        gate.pass();
        reply.raw(event(result(1)));
        reply.break_off();
    })
}

#[test]
fn an_event_passes_a_buffering_proxy_at_once_because_the_sidecar_says_so() {
    let gate = Gate::new();
    let upstream = streaming(&gate);
    let sidecar = Sidecar::before(&upstream);
    let nginx = Nginx::before(&sidecar.listen);
    let client = Client::connect(&nginx.address);
    client.send(&call(1));
    client.head();
    gate.open();
    // The upstream holds its answer: what arrives was not held back.
    assert_eq!(client.events(1)[0].data, progress(1, 1));
    gate.open();
    assert!(client.response().text().contains(&result(1)));
}

/// The same without the sidecar: the proxy does hold the event back, so the test above can fail.
#[test]
fn without_the_sidecars_header_the_same_proxy_holds_the_event_back() {
    let gate = Gate::new();
    let upstream = streaming(&gate);
    let nginx = Nginx::before(&upstream.address);
    let client = Client::connect(&nginx.address);
    client.send(&call(1));
    upstream.wait_request(0);
    // The head is on its way, or there.
    thread::sleep(Duration::from_millis(300));
    upstream.wait_taken();
    gate.open();
    thread::sleep(Duration::from_millis(300));
    upstream.wait_taken();
    // It has had the event: what it does not pass on within this time it holds back.
    thread::sleep(Duration::from_millis(300));
    assert!(!String::from_utf8_lossy(&client.bytes()).contains("progressToken"));
    gate.open();
    assert!(client.response().text().contains(&progress(1, 1)));
}
