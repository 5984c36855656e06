//! Who may talk to the listener, as `Origin` and `Host` tell: what keeps web pages and DNS rebinding out (MCP, Transports § Security Warning).

use std::net::{Ipv4Addr, Ipv6Addr};

use http::{HeaderMap, header};

/// Whether `Origin` may talk to this listener. `allowed` are the configured ones; loopback origins count when `loopback_listener`.
/// Absent: yes. `null`, malformed, repeated: no.
pub fn origin_allowed(headers: &HeaderMap, allowed: &[String], loopback_listener: bool) -> bool {
    let mut lines = headers.get_all(header::ORIGIN).iter();
    let Some(line) = lines.next() else { return true };
    let (Ok(origin), None) = (line.to_str(), lines.next()) else { return false };
    let origin = origin.trim();
    let same =
        |allowed: &String| allowed.trim_end_matches('/').eq_ignore_ascii_case(origin.trim_end_matches('/'));
    // `null` is the origin of every page that has none: it can't be configured.
    let configured = origin.contains("://") && allowed.iter().any(same);
    configured
        || (loopback_listener && web_authority(origin).is_some_and(|authority| authority.is_loopback()))
}

/// Whether `Host` (or `:authority`) may be asked on a loopback listener: a loopback name, address or one configured. An entry of `allowed`
/// without a port allows any port.
pub fn host_allowed(authority: &str, allowed: &[String]) -> bool {
    let Some(asked) = Authority::parse(authority.trim()) else { return false };
    let configured = |entry: &String| {
        // An IPv6 address may be configured without its brackets.
        let entry = match entry.parse::<Ipv6Addr>() {
            Ok(_) => Some(Authority { host: entry, port: None }),
            Err(_) => Authority::parse(entry.trim()),
        };
        entry.is_some_and(|entry| entry.names(&asked))
    };
    asked.is_loopback() || allowed.iter().any(configured)
}

/// The authority of a web page's origin (RFC 6454 § 6.2). Pages served from loopback count as local, other schemes (an editor's, an extension's)
/// only if configured.
fn web_authority(origin: &str) -> Option<Authority<'_>> {
    let (scheme, authority) = origin.split_once("://")?;
    let web = scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https");
    web.then(|| Authority::parse(authority))?
}

/// A host and perhaps a port (RFC 3986 § 3.2), without user info.
struct Authority<'a> {
    /// An IPv6 address is without its brackets, a name without its trailing dot.
    host: &'a str,
    port: Option<u16>,
}

impl<'a> Authority<'a> {
    /// `None` for what is no host with an optional port; user info (`localhost@evil`) makes it none.
    fn parse(text: &'a str) -> Option<Self> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']')?;
                host.parse::<Ipv6Addr>().ok()?;
                (host, port)
            }
            None => {
                let (host, port) = text.split_at(text.find(':').unwrap_or(text.len()));
                let host = host.strip_suffix('.').unwrap_or(host);
                let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~*".contains(&byte);
                if host.is_empty() || !host.bytes().all(fits) {
                    return None;
                }
                (host, port)
            }
        };
        let port = match port.strip_prefix(':') {
            Some("") => None,
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => Some(digits.parse().ok()?),
            None if port.is_empty() => None,
            _ => return None,
        };
        Some(Self { host, port })
    }

    /// Only names that resolvers must keep local (RFC 6761 § 6.3) and whole addresses: `127.1` is no address here.
    fn is_loopback(&self) -> bool {
        let name = self.host.to_ascii_lowercase();
        name == "localhost"
            || name.strip_suffix(".localhost").is_some_and(|label| !label.is_empty())
            || name.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback())
            || name.parse().is_ok_and(|address: Ipv6Addr| address.to_canonical().is_loopback())
    }

    /// As a configured entry: whether it means the authority asked for.
    fn names(&self, asked: &Self) -> bool {
        let address = |host: &str| host.parse::<Ipv6Addr>().ok();
        let same = match (address(self.host), address(asked.host)) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => self.host.eq_ignore_ascii_case(asked.host),
        };
        same && (self.port.is_none() || self.port == asked.port)
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn allowed(lines: &[&[u8]], configured: &[&str], loopback: bool) -> bool {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(header::ORIGIN, HeaderValue::from_bytes(line).unwrap());
        }
        let configured: Vec<_> = configured.iter().map(|origin| origin.to_string()).collect();
        origin_allowed(&headers, &configured, loopback)
    }

    #[test]
    fn a_request_without_origin_is_no_web_page() {
        assert!(allowed(&[], &[], true));
        assert!(allowed(&[], &[], false));
    }

    #[test]
    fn foreign_and_unreadable_origins_are_refused() {
        for origin in [
            &b"http://evil.example"[..],
            b"null",
            b"%%%",
            b"",
            b"\xFF",
            b"http://localhost\xFF",
            b"localhost",
            b"http://",
            b"://localhost",
            b"http://localhost.evil.example",
            b"http://localhost@evil.example",
            b"http://evil.example#localhost",
            b"http://localhost/path",
            b"http://localhost:99999",
            b"http://localhost:80:80",
            b"http://127.0.0.1.evil.example",
            b"http://127.1",
            b"http://0.0.0.0",
            b"http://[::2]",
            b"http://[::1",
            b"http://.localhost",
            b"http://localhost, http://evil.example",
            b"chrome-extension://localhost",
        ] {
            assert!(!allowed(&[origin], &[], true), "{}", String::from_utf8_lossy(origin));
        }
        assert!(!allowed(&[b"http://localhost", b"http://localhost"], &[], true));
    }

    #[test]
    fn loopback_origins_count_on_a_loopback_listener_only() {
        for origin in [
            "http://localhost:8080",
            "https://LOCALHOST",
            "http://app.localhost:1",
            "http://127.8.9.1",
            "http://[::1]:7080",
        ] {
            assert!(allowed(&[origin.as_bytes()], &[], true), "{origin}");
            assert!(!allowed(&[origin.as_bytes()], &[], false), "{origin}");
        }
    }

    #[test]
    fn configured_origins_count_on_any_listener() {
        let configured =
            ["https://agents.example", "vscode-webview://abc", "http://b.example:8080/", "file://"];
        for origin in [
            "https://agents.example",
            "HTTPS://Agents.Example",
            "vscode-webview://abc",
            "http://b.example:8080",
            "file://",
        ] {
            assert!(allowed(&[origin.as_bytes()], &configured, false), "{origin}");
        }
        for origin in [
            "http://agents.example",
            "https://agents.example:8443",
            "https://agents.example.evil",
            "http://b.example",
        ] {
            assert!(!allowed(&[origin.as_bytes()], &configured, false), "{origin}");
        }
        assert!(!allowed(&[b"null"], &["null"], false));
    }

    #[test]
    fn loopback_names_and_addresses_may_be_asked() {
        for host in [
            "localhost",
            "localhost:7080",
            "LocalHost.",
            "localhost.:80",
            "a.b.localhost",
            "127.0.0.1",
            "127.255.0.3:1",
            "[::1]",
            "[::1]:7080",
            "[0:0:0:0:0:0:0:1]",
            "[::ffff:127.0.0.1]",
            "localhost:",
        ] {
            assert!(host_allowed(host, &[]), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "notlocalhost",
            "localhost@evil.example",
            "evil@localhost",
            "localhost:x",
            "localhost:80:80",
            "localhost..",
            ".localhost",
            "::1",
            "[::1",
            "[::1]x",
            "[localhost]",
            "128.0.0.1",
            "127.1",
            "0x7f000001",
            "2130706433",
            "0.0.0.0",
            "[::]",
            "local host",
            "localhost/",
        ] {
            assert!(!host_allowed(host, &[]), "{host}");
        }
    }

    #[test]
    fn configured_hosts_may_be_asked_at_any_port_unless_they_name_one() {
        let hosts = ["sidecar.internal", "b.example:8443", "fd00::1", "[fd00::2]:1"].map(str::to_owned);
        for host in [
            "sidecar.internal",
            "SIDECAR.internal.:9",
            "b.example:8443",
            "[fd00::1]:5",
            "[fd00:0::1]",
            "[fd00::2]:1",
        ] {
            assert!(host_allowed(host, &hosts), "{host}");
        }
        for host in ["a.sidecar.internal", "b.example", "b.example:8080", "[fd00::2]", "[fd00::3]"] {
            assert!(!host_allowed(host, &hosts), "{host}");
        }
    }
}
