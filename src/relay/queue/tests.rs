use std::time::Duration;

use proptest::prelude::*;

use super::{tokens::MAX_TOKENS, *};

mod model;

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn settings() -> Settings {
    Settings {
        queue: 64,
        queue_bytes: 1 << 20,
        burst: 8,
        min_interval: millis(100),
        coalesce: true,
        keepalive: Duration::ZERO,
    }
}

fn unlimited() -> Settings {
    Settings { min_interval: Duration::ZERO, ..settings() }
}

fn event(text: &str) -> Event {
    Event {
        bytes: format!("data: {text}\n\n").into(),
        data: Some(Bytes::copy_from_slice(text.as_bytes())),
        ..Event::default()
    }
}

fn with_id(mut event: Event) -> Event {
    event.id = Some(Bytes::from_static(b"7"));
    event
}

fn progress(token: u64, value: impl Into<Option<f64>>) -> Class {
    Class::Progress { token: Id::parse(token.to_string().as_bytes()).unwrap(), progress: value.into() }
}

/// Pushes progress whose text is `token:value`.
fn push(queue: &mut Queue, token: u64, value: f64, now: Instant) {
    queue.push(event(&format!("{token}:{value}")), progress(token, value), now);
}

fn keep(queue: &mut Queue, text: &str, now: Instant) {
    queue.push(event(text), Class::Kept, now);
}

/// The data of everything that may go out.
fn drain(queue: &mut Queue, now: Instant) -> Vec<String> {
    std::iter::from_fn(|| queue.pop(now)).map(|popped| text(&popped.event)).collect()
}

fn text(event: &Event) -> String {
    String::from_utf8(event.data.clone().unwrap().into()).unwrap()
}

#[test]
fn adjacent_progress_of_one_token_coalesces_to_the_newest() {
    let now = Instant::now();
    let mut queue = Queue::new(unlimited());
    for (token, value) in [(1, 1.0), (1, 2.0), (2, 1.0), (1, 3.0), (1, 4.0)] {
        push(&mut queue, token, value, now);
    }
    keep(&mut queue, "log", now);
    push(&mut queue, 1, 5.0, now);
    assert_eq!(drain(&mut queue, now), ["1:2", "2:1", "1:4", "log", "1:5"]);
    let counts = queue.counts();
    assert_eq!((counts.progress_in, counts.progress_out, counts.coalesced), (6, 4, 2));
    assert!(!counts.refetch);
}

#[test]
fn a_token_that_is_a_string_is_not_the_number() {
    let now = Instant::now();
    let mut queue = Queue::new(unlimited());
    push(&mut queue, 1, 2.0, now);
    let string = Class::Progress { token: Id::parse(b"\"1\"").unwrap(), progress: Some(1.0) };
    queue.push(event("string"), string, now);
    assert_eq!(drain(&mut queue, now), ["1:2", "string"]);
}

#[test]
fn a_burst_passes_at_once_and_then_one_per_interval() {
    let start = Instant::now();
    let mut queue = Queue::new(settings());
    let mut out = Vec::new();
    for step in 0..200_u32 {
        let now = start + millis(5) * step;
        push(&mut queue, 1, f64::from(step), now);
        out.extend(drain(&mut queue, now));
    }
    // The bucket fills by one each 100 ms, from the first event on; in between the newest waits.
    assert_eq!(out[..8], [0, 1, 2, 3, 4, 5, 6, 7].map(|value| format!("1:{value}")));
    let paced = (1..=9).map(|interval| format!("1:{}", interval * 20));
    assert_eq!(out[8..], paced.collect::<Vec<_>>());
    let release = queue.next_release().unwrap();
    assert_eq!(release, start + millis(1000));
    assert_eq!(drain(&mut queue, release), ["1:199"]);
    assert!(!queue.counts().refetch);
}

#[test]
fn the_bucket_fills_again_in_silence() {
    let start = Instant::now();
    let mut queue = Queue::new(settings());
    let mut value = 0.0;
    for round in 0..3 {
        let now = start + millis(1000) * round;
        for _ in 0..8 {
            value += 1.0;
            push(&mut queue, 1, value, now);
            assert_eq!(drain(&mut queue, now).len(), 1);
        }
        value += 1.0;
        push(&mut queue, 1, value, now);
        assert_eq!(drain(&mut queue, now + millis(99)), [""; 0]);
        assert_eq!(drain(&mut queue, now + millis(100)).len(), 1);
    }
}

#[test]
fn progress_that_waits_for_its_rate_goes_out_before_any_later_event() {
    let now = Instant::now();
    let mut queue = Queue::new(Settings { burst: 1, ..settings() });
    push(&mut queue, 1, 1.0, now);
    push(&mut queue, 2, 1.0, now);
    assert_eq!(drain(&mut queue, now), ["1:1", "2:1"]);
    push(&mut queue, 1, 2.0, now);
    push(&mut queue, 2, 2.0, now);
    push(&mut queue, 1, 3.0, now);
    assert_eq!(drain(&mut queue, now), [""; 0]);
    assert_eq!(queue.next_release(), Some(now + millis(100)));
    queue.push(event("final"), Class::Final, now);
    assert_eq!(queue.next_release(), None);
    assert_eq!(drain(&mut queue, now), ["2:2", "1:3", "final"]);
}

#[test]
fn what_was_let_out_before_its_time_delays_the_next_by_one_interval_at_most() {
    let now = Instant::now();
    let mut queue = Queue::new(Settings { burst: 1, ..settings() });
    for value in 0..100 {
        push(&mut queue, 1, f64::from(value), now);
        keep(&mut queue, "log", now);
        assert_eq!(drain(&mut queue, now).len(), 2);
    }
    push(&mut queue, 1, 100.0, now);
    assert_eq!(queue.next_release(), Some(now + millis(100)));
}

#[test]
fn at_capacity_the_oldest_progress_is_dropped_and_the_final_is_marked() {
    let now = Instant::now();
    let mut queue = Queue::new(Settings { queue: 3, ..unlimited() });
    keep(&mut queue, "a", now);
    push(&mut queue, 1, 1.0, now);
    push(&mut queue, 2, 1.0, now);
    assert!(queue.has_room());
    push(&mut queue, 1, 2.0, now);
    assert!(queue.counts().refetch);
    queue.push(event("final"), Class::Final, now);
    assert_eq!(queue.counts().dropped, 2);
    let out: Vec<_> =
        std::iter::from_fn(|| queue.pop(now)).map(|popped| (text(&popped.event), popped.refetch)).collect();
    assert_eq!(out, [("a".into(), false), ("1:2".into(), false), ("final".into(), true)]);
}

#[test]
fn a_final_is_marked_for_nothing_but_a_drop_at_capacity() {
    let now = Instant::now();
    let mut queue = Queue::new(unlimited());
    for value in [1.0, 2.0, 2.0, 1.0] {
        push(&mut queue, 1, value, now);
    }
    queue.push(event("final"), Class::Final, now);
    assert!(queue.pop(now).is_some_and(|popped| !popped.refetch));
    assert!(queue.pop(now).is_some_and(|popped| !popped.refetch));
}

#[test]
fn the_byte_bound_drops_progress_too_and_is_never_passed() {
    let now = Instant::now();
    let one = size(&event("1:1"));
    let mut queue = Queue::new(Settings { queue_bytes: 2 * one, ..unlimited() });
    for token in 1..10 {
        push(&mut queue, token, 1.0, now);
        assert!(queue.bytes() <= 2 * one);
    }
    assert_eq!(drain(&mut queue, now), ["8:1", "9:1"]);
    assert_eq!(queue.bytes(), 0);
}

#[test]
fn there_is_no_room_when_only_what_is_never_dropped_is_left() {
    let now = Instant::now();
    let mut queue = Queue::new(Settings { queue: 2, ..unlimited() });
    keep(&mut queue, "a", now);
    push(&mut queue, 1, 1.0, now);
    assert!(queue.has_room());
    keep(&mut queue, "b", now);
    assert!(!queue.has_room());
    assert_eq!(queue.pop(now).unwrap().event, event("a"));
    assert!(queue.has_room());
    assert_eq!(drain(&mut queue, now), ["b"]);
}

#[test]
fn an_event_larger_than_the_byte_bound_fits_an_empty_queue_alone() {
    let now = Instant::now();
    let mut queue = Queue::new(Settings { queue_bytes: 10, ..unlimited() });
    assert!(queue.fits(1000));
    queue.push(event(&"x".repeat(1000)), Class::Final, now);
    assert!(!queue.has_room());
    assert!(queue.pop(now).is_some());
    assert!(queue.has_room());
}

#[test]
fn progress_that_does_not_rise_is_not_forwarded_and_asks_for_no_refetch() {
    let now = Instant::now();
    for coalesce in [true, false] {
        let mut queue = Queue::new(Settings { coalesce, ..unlimited() });
        let mut out = Vec::new();
        for value in [1.0, 1.0, 0.5, 2.0, -3.0, 1e308] {
            push(&mut queue, 1, value, now);
            out.extend(drain(&mut queue, now));
        }
        queue.push(event("seven"), progress(1, None), now);
        out.extend(drain(&mut queue, now));
        assert_eq!(out, ["1:1".into(), "1:2".into(), format!("1:{}", 1e308), "seven".into()]);
        let counts = queue.counts();
        assert_eq!((counts.progress_in, counts.progress_out, counts.dropped), (7, 4, 3));
        assert!(!counts.refetch);
    }
}

#[test]
fn without_coalescing_nothing_is_thinned_or_dropped_and_pressure_takes_the_room() {
    let now = Instant::now();
    let mut queue = Queue::new(Settings { coalesce: false, queue: 20, ..settings() });
    for value in 0..20 {
        assert!(queue.has_room());
        push(&mut queue, 1, f64::from(value), now);
    }
    assert!(!queue.has_room());
    assert_eq!(drain(&mut queue, now).len(), 20);
}

// A legacy call may have become a task, whose progress goes on; what is a stray is not for the queue to know.
#[test]
fn progress_behind_the_final_response_passes() {
    let now = Instant::now();
    let mut queue = Queue::new(unlimited());
    queue.push(event("final"), Class::Final, now);
    push(&mut queue, 1, 1.0, now);
    keep(&mut queue, "log", now);
    assert_eq!(drain(&mut queue, now), ["final", "1:1", "log"]);
    queue.stray();
    assert_eq!((queue.counts().progress_in, queue.counts().dropped), (2, 1));
}

// The node's resume point moves as if nothing had been thinned.
#[test]
fn an_id_never_goes_without_a_later_one() {
    let now = Instant::now();
    let mut queue = Queue::new(Settings { queue: 3, ..unlimited() });
    queue.push(with_id(event("a")), progress(1, 1.0), now);
    queue.push(with_id(event("b")), progress(1, 2.0), now);
    queue.push(event("c"), progress(1, 3.0), now);
    queue.push(event("d"), progress(1, 4.0), now);
    assert_eq!(queue.counts().coalesced, 2);
    queue.push(with_id(event("falls")), progress(1, 0.0), now);
    assert!(queue.has_room());
    keep(&mut queue, "log", now);
    assert!(!queue.has_room());
    assert_eq!(drain(&mut queue, now), ["b", "falls", "log"]);
}

#[test]
fn events_with_a_retry_or_another_name_are_never_thinned() {
    let now = Instant::now();
    let mut queue = Queue::new(unlimited());
    queue.push(Event { retry: Some(10), ..event("a") }, progress(1, 1.0), now);
    queue.push(Event { retry: Some(10), ..event("b") }, progress(1, 1.0), now);
    queue.push(Event { name: Some("ping".into()), ..event("c") }, progress(1, 0.0), now);
    queue.push(Event { name: Some("message".into()), ..event("d") }, progress(1, 2.0), now);
    queue.push(Event { name: Some("message".into()), ..event("e") }, progress(1, 3.0), now);
    assert_eq!(drain(&mut queue, now), ["a", "b", "c", "e"]);
}

#[test]
fn only_so_many_tokens_are_remembered() {
    let now = Instant::now();
    let mut queue = Queue::new(unlimited());
    push(&mut queue, 0, 1000.0, now);
    for token in 1..=1000 {
        push(&mut queue, 0, 1.0, now);
        push(&mut queue, token, 5.0, now);
    }
    assert_eq!(queue.tokens.remembered.len(), MAX_TOKENS);
    // The one in use was never forgotten, an old one is.
    push(&mut queue, 1, 1.0, now);
    let out = drain(&mut queue, now);
    assert_eq!(out.len(), 64);
    assert!(!out.contains(&"0:1".to_owned()));
    assert_eq!(out.last().unwrap(), "1:1");
}

mod marking {
    use super::*;

    fn marked(data: &str) -> String {
        String::from_utf8(mark_refetch(&event(data)).into()).unwrap()
    }

    #[test]
    fn a_result_gets_the_mark_into_its_meta() {
        for (data, expected) in [
            (
                r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{ "a" : 1 },"content":[]}}"#,
                r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/refetch":true, "a" : 1 },"content":[]}}"#,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{ }}}"#,
                r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/refetch":true }}}"#,
            ),
            (
                r#"{"id":1,"result":{"content":[]},"jsonrpc":"2.0"}"#,
                r#"{"id":1,"result":{"_meta":{"oz0/refetch":true},"content":[]},"jsonrpc":"2.0"}"#,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
                r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":{"oz0/refetch":true}}}"#,
            ),
        ] {
            serde_json::from_str::<serde_json::Value>(expected).unwrap();
            assert_eq!(marked(data), format!("data: {expected}\n\n"));
        }
    }

    #[test]
    fn everything_else_gets_a_comment_before_it() {
        for data in [
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"no"}}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":null}}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{"_meta":[]}}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":"text"}"#,
            r#"[{"jsonrpc":"2.0","id":1,"result":{}}]"#,
            "not JSON",
        ] {
            assert_eq!(marked(data), format!(": refetch\n\ndata: {data}\n\n"));
        }
    }

    #[test]
    fn other_fields_and_line_ends_stay_and_data_over_lines_gets_the_comment() {
        let scan = |stream: &'static str| {
            let mut events = Vec::new();
            let mut scanner = sse::Scanner::new(1000);
            scanner.push(Bytes::from_static(stream.as_bytes()), |event| events.push(event)).unwrap();
            events.remove(0)
        };
        let one =
            scan("id: 1\r\ndata:{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\r\nevent: message\r\n\r\n");
        let expected = String::from_utf8(one.bytes.to_vec()).unwrap();
        let expected = expected.replace("{}", r#"{"_meta":{"oz0/refetch":true}}"#);
        assert_eq!(mark_refetch(&one), expected);
        let two = scan("data: {\"jsonrpc\":\"2.0\",\"id\":1,\ndata: \"result\":{}}\n\n");
        assert_eq!(mark_refetch(&two), [b": refetch\n\n", &two.bytes[..]].concat());
    }
}

proptest! {
    /// One of two queues is told at once what only replaces what waits; the events of that come later.
    #[test]
    fn replacing_does_what_pushing_would(
        steps in prop::collection::vec((0_u64..2, 0_u32..40, 0_u64..60, 0_u8..8, any::<bool>(), 1_usize..30), 1..60),
        bytes in 60_usize..600,
    ) {
        let settings = Settings { queue: 5, queue_bytes: bytes, burst: 2, ..settings() };
        let (mut pushed, mut replaced) = (Queue::new(settings.clone()), Queue::new(settings));
        let (mut now, mut newest) = (Instant::now(), None);
        let event = |text: &str, size: usize| event(&format!("{text}:{}", "x".repeat(size)));
        for (token, value, passed, other, read, size) in steps {
            let text = format!("{token}:{value}");
            let Class::Progress { token: id, .. } = progress(token, 0.0) else { unreachable!() };
            if other > 1 && replaced.fits(200) && replaced.replace(&id, value.into(), now, read) {
                // The events between are never there, so they leave the size of the queue alone.
                newest = Some(event(&text, 10));
                pushed.push(event(&text, 10), progress(token, f64::from(value)), now);
                continue;
            }
            if let Some(newest) = newest.take() {
                replaced.renew(newest);
            }
            let size = if other == 0 { size } else { 10 };
            for queue in [&mut pushed, &mut replaced] {
                if other == 0 {
                    queue.push(event("kept", size), Class::Kept, now);
                } else {
                    queue.push(event(&text, size), progress(token, f64::from(value)), now);
                }
            }
            let popped = [&mut pushed, &mut replaced].map(|queue| if read { drain(queue, now) } else { vec![] });
            prop_assert_eq!(&popped[0], &popped[1]);
            prop_assert_eq!(pushed.counts(), replaced.counts());
            prop_assert_eq!(pushed.bytes(), replaced.bytes());
            now += millis(passed);
        }
    }
}
