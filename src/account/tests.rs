use std::{
    io::{self, Read},
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde_json::Value;

use super::{
    log::{Settings, Sink},
    metrics::Metrics,
    *,
};
use crate::lines::tests::Full;

/// The documented fields, in their order.
const FIELDS: &str = "ts request upstream peer http_method path era protocol rpc id tool session client job \
    activity key digest attempt retry_class replayed resume listing_changed status upstream_status outcome reason \
    retry_after cancelled_by cancel_ms stream events progress_in progress_out progress_coalesced progress_dropped \
    progress total refetch keepalives bytes_in bytes_out connect_ms first_byte_ms duration_ms reused http \
    upstream_http trace error";

fn full() -> Record {
    let text = |value: &str| Some(value.to_owned());
    Record {
        ts: "2026-11-29T12:00:00.000Z".to_owned(),
        request: "r-1".to_owned(),
        upstream: Some("github".into()),
        peer: text("127.0.0.1:5000"),
        http_method: text("POST"),
        path: text("/github"),
        era: Some(Era::Modern),
        protocol: text("2026-07-28"),
        rpc: text("tools/call"),
        id: token(b"1"),
        tool: text("add"),
        session: text("0badcafe"),
        client: text("node/1"),
        job: text("j"),
        activity: text("a"),
        key: text("j/a"),
        digest: text("44136fa355b3678a1146ad16f7e8649e"),
        attempt: Some(1),
        retry_class: Some("safe"),
        replayed: Some(false),
        resume: text("started over: no token"),
        listing_changed: Some(false),
        status: Some(200),
        upstream_status: Some(200),
        outcome: Some(Outcome::Ok),
        reason: Some("killed"),
        retry_after: token(b"1.50"),
        cancelled_by: Some(CancelledBy::Admin),
        cancel_ms: Some(Duration::from_micros(1500)),
        stream: Some(Stream::Sse),
        events: Some(1),
        progress_in: Some(1),
        progress_out: Some(1),
        progress_coalesced: Some(2),
        progress_dropped: Some(3),
        progress: Some(2.0),
        total: Some(4.5),
        refetch: Some(true),
        keepalives: Some(0),
        bytes_in: Some(1),
        bytes_out: Some(1),
        connect_ms: Some(Duration::ZERO),
        first_byte_ms: Some(Duration::from_nanos(12_345_678)),
        duration_ms: Some(Duration::from_secs(3)),
        reused: Some(false),
        http: Some("1.1"),
        upstream_http: Some("2"),
        trace: text("0af7651916cd43dd8448eb211c80319c"),
        error: text("none"),
    }
}

fn line(record: &Record) -> String {
    let mut bytes = Vec::new();
    line::json(record, &mut bytes);
    String::from_utf8(bytes).unwrap()
}

fn sink() -> (Sink, tokio::sync::mpsc::Receiver<String>) {
    Sink::lines(16, Arc::new(Metrics::new()))
}

#[test]
fn the_fields_are_the_documented_ones_in_their_order() {
    let line = line(&full());
    let positions: Vec<_> =
        FIELDS.split_whitespace().map(|name| line.find(&format!("\"{name}\":"))).collect();
    assert!(positions.iter().all(Option::is_some) && positions.is_sorted(), "{line}");
    let value: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(value.as_object().unwrap().len(), FIELDS.split_whitespace().count());
}

#[test]
fn what_is_meaningless_is_absent() {
    let record = Record { ts: "t".to_owned(), request: "r".to_owned(), ..Record::default() };
    assert_eq!(line(&record), "{\"ts\":\"t\",\"request\":\"r\"}\n");
}

#[test]
fn times_are_milliseconds_with_up_to_three_decimals_and_whole_numbers_have_no_fraction() {
    let line = line(&full());
    for part in [
        r#""cancel_ms":1.5,"#,
        r#""connect_ms":0,"#,
        r#""first_byte_ms":12.345,"#,
        r#""duration_ms":3000,"#,
        r#""progress":2,"total":4.5,"#,
    ] {
        assert!(line.contains(part), "{part} in {line}");
    }
}

#[test]
fn an_id_stands_with_its_type_and_its_exact_digits() {
    let shown = |raw: &str| {
        let record = Record { id: token(raw.as_bytes()), ..Record::default() };
        line(&record).split_once("\"id\":").map(|(_, id)| id.trim_end_matches("}\n").to_owned())
    };
    for raw in ["0", "\"0\"", "12345678901234567890123", "1.0", r#""a\u0000b""#] {
        assert_eq!(shown(raw).as_deref(), Some(raw));
    }
    // What strict readers of JSON refuse is shown as text.
    assert_eq!(shown(r#""\ud800""#).as_deref(), Some(r#""\"\\ud800\"""#));
    assert_eq!(shown("-1e999").as_deref(), Some("\"-1e999\""));
    let long = shown(&format!("\"{}\"", "é".repeat(200))).unwrap();
    assert_eq!(long, format!("\"{}\"", "é".repeat(127)));
    assert_eq!(shown("{}"), None);
    assert_eq!(shown("not json"), None);
}

#[test]
fn a_value_is_bounded_on_a_character_boundary_and_an_identity_stays_whole() {
    assert_eq!(clean(&"é".repeat(200)).len(), 254);
    assert_eq!(clean("short"), "short");
    let record = Record {
        tool: Some("t".repeat(10_000)),
        key: Some(format!("{}/{}", "j".repeat(256), "a".repeat(256))),
        ..Record::default()
    };
    let value: Value = serde_json::from_str(&line(&record)).unwrap();
    assert_eq!(value["tool"].as_str().unwrap().len(), 255);
    assert_eq!(value["key"].as_str().unwrap().len(), 513);
}

/// Else a node could forge a line of the log with a line separator in the name of a tool.
#[test]
fn control_characters_are_escaped_in_both_forms() {
    let evil = "a\nb\r\u{1b}[31m\u{7f}\u{85}\u{9f}\u{2028}\u{2029}é\u{a0}";
    let record = Record {
        tool: Some(evil.to_owned()),
        id: token("\"\u{85}\u{2028}\"".as_bytes()),
        error: Some(evil.to_owned()),
        ..Record::default()
    };
    let json = line(&record);
    let mut text = Vec::new();
    shape::terminal(&record, &mut text);
    let text = String::from_utf8(text).unwrap();
    for line in [&json, &text] {
        let body = line.strip_suffix('\n').unwrap();
        assert!(!body.chars().any(shape::is_control), "{body:?}");
        assert!(body.contains("\\u007f\\u0085\\u009f\\u2028\\u2029é"), "{body}");
    }
    let value: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(value["tool"], evil);
    assert_eq!(value["id"], "\u{85}\u{2028}");
}

#[test]
fn a_terminal_gets_one_readable_line() {
    let mut text = Vec::new();
    shape::terminal(&full(), &mut text);
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("2026-11-29T12:00:00.000Z ok 200 github tools/call add 3000ms "), "{text}");
    assert!(text.contains(" resume=\"started over: no token\" "), "{text}");
    assert_eq!(text.matches('\n').count(), 1);
}

#[test]
fn a_name_cannot_look_like_further_values_to_a_terminal() {
    let mut text = Vec::new();
    let evil = "add 1ms reason=\"none\"".to_owned();
    let record = Record { tool: Some(evil), error: Some("\" x".to_owned()), ..Record::default() };
    shape::terminal(&record, &mut text);
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.contains(r#" "add 1ms reason=\"none\"" 0ms "#) && text.ends_with("error=\"\\\" x\"\n"),
        "{text}"
    );
}

#[tokio::test]
async fn an_account_writes_one_line_however_it_ends() {
    let (sink, mut lines) = sink();
    let open = |name: &str| Account::open(sink.clone(), SystemTime::UNIX_EPOCH, name.to_owned());

    open("finished").finish(Outcome::Ok);
    let mut set = open("set before");
    set.record.outcome = Some(Outcome::Busy);
    set.finish(Outcome::Ok);
    drop(open("dropped"));
    let mut idle = open("dropped with an outcome");
    idle.record.outcome = Some(Outcome::IdleTimeout);
    drop(idle);
    let account = open("moved into a task");
    tokio::spawn(async move { drop(account) }).await.unwrap();
    let account = open("panicked");
    let panicked = tokio::spawn(async move {
        let _held = account;
        panic!("on purpose");
    });
    assert!(panicked.await.is_err());
    drop(sink);

    let mut seen = Vec::new();
    while let Some(line) = lines.recv().await {
        let value: Value = serde_json::from_str(&line).unwrap();
        assert!(value["duration_ms"].is_number() && value["ts"] == "1970-01-01T00:00:00.000Z", "{line}");
        let by = value["cancelled_by"].as_str().unwrap_or("-");
        seen.push(format!(
            "{}: {} {by}",
            value["request"].as_str().unwrap(),
            value["outcome"].as_str().unwrap()
        ));
    }
    assert_eq!(
        seen,
        [
            "finished: ok -",
            "set before: busy -",
            "dropped: cancelled disconnect",
            "dropped with an outcome: idle_timeout -",
            "moved into a task: cancelled disconnect",
            "panicked: failed -",
        ]
    );
}

#[test]
fn an_ended_account_is_counted_by_upstream_and_outcome() {
    let (sink, _lines) = sink();
    let mut account = Account::open(sink.clone(), SystemTime::UNIX_EPOCH, "r".to_owned());
    account.record.upstream = Some("github".into());
    account.record.progress_coalesced = Some(5);
    assert_eq!(sink.metrics().in_flight.get(), 1);
    account.finish(Outcome::Ok);

    let page = sink.metrics().encode();
    for row in [
        "mcp_sidecar_exchanges_total{upstream=\"github\",outcome=\"ok\"} 1",
        "mcp_sidecar_exchanges_in_flight 0",
        "mcp_sidecar_exchange_duration_seconds_count{upstream=\"github\"} 1",
        "mcp_sidecar_progress_coalesced_total 5",
        "mcp_sidecar_log_lines_dropped_total 0",
        "mcp_sidecar_connections 0",
        "mcp_sidecar_forged_members_total 0",
    ] {
        assert!(page.contains(row), "{row} in {page}");
    }
}

fn small(buffer: usize) -> Settings {
    Settings { buffer, ..Settings::default() }
}

#[test]
fn closing_loses_no_line_written_before_it() {
    let (mut reader, output) = io::pipe().unwrap();
    let read = std::thread::spawn(move || {
        let mut all = String::new();
        reader.read_to_string(&mut all).unwrap();
        all
    });
    let metrics = Arc::new(Metrics::new());
    let (sink, writer) = Sink::start(output, &Settings::default(), Arc::clone(&metrics)).unwrap();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let sink = sink.clone();
            std::thread::spawn(move || (0..500).for_each(|_| sink.write(&full())))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());

    assert!(writer.close());
    let all = read.join().unwrap();
    assert_eq!(all.lines().count(), 2000);
    assert!(all.lines().all(|one| one == line(&full()).trim_end()));
    assert_eq!(metrics.log_lines_dropped.get(), 0);

    sink.write(&full());
    assert_eq!(metrics.log_lines_dropped.get(), 1, "a line after the end is counted");
}

/// If a write blocked, this test would never end: nobody reads the pipe.
#[test]
fn a_pipe_nobody_reads_blocks_no_write_and_its_lost_lines_are_counted() {
    let (reader, output) = io::pipe().unwrap();
    let metrics = Arc::new(Metrics::new());
    let (sink, mut writer) = Sink::start(output, &small(100_000), Arc::clone(&metrics)).unwrap();
    let per_line = line(&full()).len();
    // The buffer, what the pipe takes (64 KiB) and then as much again.
    let written = (2 * (100_000 + 65_536) / per_line) as u64;
    (0..written).for_each(|_| sink.write(&full()));
    let dropped = metrics.log_lines_dropped.get();
    assert!(dropped > 0 && dropped < written, "{dropped} of {written}");

    assert!(!writer.end(Duration::from_millis(20)), "the end is bounded");
    drop(reader);
}

#[test]
fn a_full_disk_tears_no_later_line() {
    let output = Full::default();
    let metrics = Arc::new(Metrics::new());
    let (sink, writer) = Sink::start(output.clone(), &Settings::default(), Arc::clone(&metrics)).unwrap();
    sink.write(&full());
    while metrics.log_lines_dropped.get() == 0 {
        std::thread::yield_now();
    }
    output.make_room();
    sink.write(&full());
    assert!(writer.close());
    assert_eq!(output.text(), format!("{}\n{}", &line(&full())[..Full::HALF], line(&full())));
}

#[test]
fn a_rotated_file_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let (path, old) = (folder.path().join("access.log"), folder.path().join("access.log.1"));
    let settings = Settings { file: Some(path.clone()), ..Settings::default() };
    let (sink, writer) = Sink::open(&settings, Arc::new(Metrics::new())).unwrap();
    sink.write(&full());
    while std::fs::metadata(&path).unwrap().len() == 0 {
        std::thread::yield_now();
    }
    std::fs::rename(&path, &old).unwrap();
    sink.reopen();
    sink.write(&full());
    assert!(writer.close());
    assert_eq!(std::fs::read_to_string(old).unwrap(), line(&full()));
    assert_eq!(std::fs::read_to_string(path).unwrap(), line(&full()));
}

#[test]
fn a_file_that_cannot_be_opened_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { file: Some(folder.path().to_owned()), ..Settings::default() };
    let error = Sink::open(&settings, Arc::new(Metrics::new())).unwrap_err().to_string();
    assert!(error.contains(&*folder.path().to_string_lossy()), "{error}");
}
