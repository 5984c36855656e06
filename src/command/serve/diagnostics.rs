//! The diagnostic log's lines on their way to stderr, which may take nothing for as long as it likes.
//!
//! Promises: saying something never blocks. What is lost is counted, and the log says so once it goes on.
//!
//! What is no line of this log goes to stderr directly: a configuration that is wrong, a panic.

use std::{
    io::{self, Write},
    sync::Arc,
    time::Duration,
};

use prometheus_client::metrics::counter::Counter;

use crate::{
    account::metrics::{Kind, Metrics},
    lines::{self, Lines, Settings, Trouble, Writer},
};

const SETTINGS: Settings = Settings {
    name: "diagnostics",
    buffer: 1 << 20,
    gather: Duration::ZERO,
    close_within: Duration::from_secs(1),
    say,
};

/// Starts the thread that writes to `output`.
///
/// # Errors
///
/// No thread can be started.
pub(super) fn start(output: impl Write + Send + 'static) -> io::Result<(Arc<Lines>, Writer)> {
    lines::start(output, SETTINGS, Counter::default())
}

/// Has `metrics` show what waits, and what was lost.
pub(super) fn show_in(metrics: &Metrics, lines: &Arc<Lines>) {
    let (held, dropped) = (Arc::clone(lines), Arc::clone(lines));
    let help = "Bytes of diagnostic lines that wait for stderr.";
    metrics.measure(Kind::Gauge, "diagnostics_buffer_bytes", help, move || held.held());
    let help = "Diagnostic lines that a slow stderr lost.";
    metrics.measure(Kind::Counter, "diagnostics_lines_dropped", help, move || dropped.dropped() as usize);
}

/// While stderr takes nothing, nobody can be told.
fn say(trouble: Trouble<'_>) {
    if let Trouble::Lost(lines) = trouble {
        tracing::warn!(lines, "diagnostic lines were lost, stderr took them too slowly");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lines::tests::Full;

    #[test]
    fn a_full_disk_tears_no_later_line() {
        let output = Full::default();
        let (lines, writer) = start(output.clone()).unwrap();
        (&*lines).write_all(b"{\"message\":\"first\"}\n").unwrap();
        while lines.dropped() == 0 {
            std::thread::yield_now();
        }
        output.make_room();
        (&*lines).write_all(b"{\"message\":\"second\"}\n").unwrap();
        assert!(writer.close());
        assert_eq!(output.text(), "{\"message\"\n{\"message\":\"second\"}\n");
    }
}
