//! The processes that are measured: each alone, on a port that was free, with its files in one directory.

use std::{
    fs,
    io::{self, BufRead, BufReader},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

/// A process; dropped, it is ended.
pub(crate) struct Process {
    child: Child,
    /// Its children end with it only if it is asked to end.
    asked: bool,
    pub(crate) address: SocketAddr,
}

impl Process {
    /// This program in another role, and what it told first.
    pub(crate) fn role(arguments: &[&str]) -> io::Result<(Self, String)> {
        let mut child =
            Command::new(std::env::current_exe()?).args(arguments).stdout(Stdio::piped()).spawn()?;
        let mut told = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut told)?;
        }
        let address = told.split_whitespace().next().unwrap_or_default();
        let address = address.parse().map_err(io::Error::other)?;
        Ok((Self { child, asked: false, address }, told))
    }

    /// nginx with one worker; with a log of 12 fields, or none.
    pub(crate) fn nginx(dir: &Path, upstream: SocketAddr, log: bool) -> io::Result<Self> {
        let address = free()?;
        let dir = dir.join(format!("nginx-{}", address.port()));
        fs::create_dir_all(&dir)?;
        let access_log = if log { "access.log json" } else { "off" };
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|what| format!("{what}_temp_path {what};\n"))
            .concat();
        let fields = [
            ("ts", "$time_iso8601"),
            ("request", "$request_id"),
            ("peer", "$remote_addr:$remote_port"),
            ("http_method", "$request_method"),
            ("path", "$uri"),
            ("rpc", "$http_mcp_method"),
            ("tool", "$http_mcp_name"),
            ("status", "$status"),
            ("upstream_status", "$upstream_status"),
            ("bytes_in", "$request_length"),
            ("bytes_out", "$body_bytes_sent"),
            ("duration", "$request_time"),
        ]
        .map(|(name, value)| format!("\"{name}\":\"{value}\""))
        .join(",");
        let conf = format!(
            "daemon off; pid nginx.pid; error_log stderr crit; worker_processes 1; worker_rlimit_nofile 20000;
            events {{ worker_connections 40000; }}
            http {{
                {temporary}
                log_format json escape=json '{{{fields}}}';
                access_log {access_log};
                client_body_buffer_size 64k; keepalive_requests 100000000; keepalive_timeout 1h;
                upstream up {{ server {upstream}; keepalive 256; keepalive_requests 100000000; }}
                server {{
                    listen {address} backlog=4096;
                    location / {{
                        proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection '';
                        proxy_buffering off; proxy_read_timeout 1h;
                    }}
                }}
            }}"
        );
        fs::write(dir.join("nginx.conf"), conf)?;
        let mut nginx = Command::new("nginx");
        nginx.arg("-p").arg(&dir).args(["-c", "nginx.conf", "-e", "stderr"]);
        Self::start(nginx, address, true)
    }

    /// The sidecar with its log on and what it does by itself, but for the limits.
    pub(crate) fn sidecar(dir: &Path, upstreams: &[(&str, &str)], state: &str) -> io::Result<Self> {
        let (address, admin) = (free()?, free()?);
        let upstreams: String = upstreams
            .iter()
            .map(|(name, url)| {
                let ca = if url.starts_with("https") { "tls = { ca = \"ca.pem\" }" } else { "" };
                format!("[upstreams.{name}]\nurl = \"{url}\"\ncalls = 20000\n{ca}\n")
            })
            .collect();
        let path = dir.join(format!("sidecar-{}.toml", address.port()));
        let log = path.with_extension("log");
        let config = format!(
            "listen = \"{address}\"\nadmin = \"{admin}\"\nstate = \"{state}\"\n[log]\naccess = {log:?}\n\
            [limits]\nconnections = 20000\ncalls = 20000\n{upstreams}"
        );
        fs::write(&path, config)?;
        let mut sidecar = Command::new(env!("CARGO_BIN_EXE_mcp-sidecar"));
        sidecar.arg("serve").arg("--config").arg(path).stderr(Stdio::null());
        Self::start(sidecar, address, false)
    }

    /// Redis without a file, if it is installed.
    pub(crate) fn redis() -> Option<Self> {
        let address = free().ok()?;
        let mut redis = Command::new("redis-server");
        let port = address.port().to_string();
        redis.args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
        redis.stdout(Stdio::null());
        Self::start(redis, address, false).ok()
    }

    fn start(mut command: Command, address: SocketAddr, asked: bool) -> io::Result<Self> {
        let child = command.stdin(Stdio::null()).spawn()?;
        let process = Self { child, asked, address };
        for _ in 0..1000 {
            if TcpStream::connect(address).is_ok() {
                return Ok(process);
            }
            thread::sleep(Duration::from_millis(10));
        }
        Err(io::Error::other(format!("{command:?} does not listen on {address}")))
    }

    /// Its time on a CPU, that of its children with it.
    pub(crate) fn cpu(&self) -> Duration {
        self.pids().iter().map(|pid| cpu(pid)).sum()
    }

    /// Its resident bytes, and its children's.
    pub(crate) fn rss(&self) -> u64 {
        self.pids().iter().map(|pid| rss(pid)).sum()
    }

    fn pids(&self) -> Vec<String> {
        let pid = self.child.id().to_string();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        children.split_whitespace().map(str::to_owned).chain([pid]).collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let pid = self.child.id().to_string();
        if !(self.asked && Command::new("kill").arg(pid).status().is_ok_and(|status| status.success())) {
            // It may have ended by itself.
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// The time on a CPU of all threads of one process; `self` is this one.
pub(crate) fn cpu(pid: &str) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let nanos = tasks.filter_map(|task| fs::read_to_string(task.path().join("schedstat")).ok());
    Duration::from_nanos(nanos.filter_map(|nanos| nanos.split(' ').next()?.parse::<u64>().ok()).sum())
}

/// The resident bytes of one process; none if it has ended.
pub(crate) fn rss(pid: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim_end_matches("kB").trim().parse::<u64>().map_or(0, |kilobytes| kilobytes * 1024)
}

/// An address that nobody listens on.
fn free() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}
