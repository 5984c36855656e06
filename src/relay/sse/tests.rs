use proptest::prelude::*;

use super::*;

fn scan<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Vec<Event> {
    let mut scanner = Scanner::new(1 << 20);
    let mut events = Vec::new();
    for chunk in chunks {
        scanner.push(Bytes::copy_from_slice(chunk), |event| events.push(event)).unwrap();
    }
    events.extend(scanner.finish());
    events
}

/// The same, with every event taken as a plain one that is.
fn scan_plain<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Vec<Event> {
    let mut scanner = Scanner::new(1 << 20);
    let mut events = Vec::new();
    for chunk in chunks {
        let mut chunk = Bytes::copy_from_slice(chunk);
        while !chunk.is_empty() {
            let plain = plain(&chunk).filter(|_| scanner.is_between());
            if let Some((data, length)) = plain {
                let data = Some(chunk.slice(data));
                events.push(Event { bytes: chunk.split_to(length), data, ..Event::default() });
                scanner.passed_plain();
            } else {
                events.extend(scanner.next(&mut chunk).unwrap());
            }
        }
    }
    events.extend(scanner.finish());
    events
}

/// An event that names itself what it would be without a name is no other one.
fn unnamed((bytes, mut events): (Vec<u8>, Vec<Event>)) -> (Vec<u8>, Vec<Event>) {
    for event in &mut events {
        event.name = event.name.take().filter(|name| name != "message");
    }
    (bytes, events)
}

fn whole(stream: &[u8]) -> Vec<Event> {
    scan([stream])
}

/// What must not depend on chunking: the bytes in their order, and what each event says.
fn told(events: &[Event]) -> (Vec<u8>, Vec<Event>) {
    let mut bytes = Vec::new();
    for event in events {
        bytes.extend_from_slice(&event.prefix);
        bytes.extend_from_slice(&event.bytes);
    }
    let said = events.iter().filter(|event| !event.bytes.is_empty()).cloned().map(|event| {
        // The LF of a split CRLF may sit behind this event or before the next.
        let end = event.bytes.len() - usize::from(event.bytes.ends_with(b"\r\n"));
        Event { bytes: event.bytes.slice(..end), prefix: Bytes::new(), ..event }
    });
    (bytes, said.collect())
}

/// WHATWG HTML § 9.2.6 once more, written line by line over the whole stream: data, name, id and retry of each
/// block that is not empty, and the bytes that remain.
#[derive(Debug, Default, PartialEq)]
struct Said {
    data: Option<Vec<u8>>,
    name: Option<Vec<u8>>,
    id: Option<Vec<u8>>,
    retry: Option<u64>,
    bytes: Vec<u8>,
}

fn reference(stream: &[u8]) -> Vec<Said> {
    let stream = stream.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(stream);
    let mut lines: Vec<(&[u8], &[u8], bool)> = Vec::new();
    let mut rest = stream;
    while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n')) {
        let length = if rest[end..].starts_with(b"\r\n") { 2 } else { 1 };
        lines.push((&rest[..end], &rest[end..end + length], true));
        rest = &rest[end + length..];
    }
    // What the stream lacks at its end.
    let style = lines.last().map_or(&b"\n"[..], |line| line.1);
    if !rest.is_empty() {
        lines.push((rest, style, true));
    }
    lines.push((b"", style, false));
    let mut all = Vec::new();
    let mut said = Said::default();
    for (line, end, came) in lines {
        if line.first() == Some(&b':') || (line.is_empty() && said.bytes.is_empty()) {
            continue;
        }
        said.bytes.extend_from_slice(line);
        said.bytes.extend_from_slice(end);
        if line.is_empty() {
            let said = std::mem::take(&mut said);
            if came || said.data.is_some() {
                all.push(said);
            }
            continue;
        }
        let mut parts = line.splitn(2, |byte| *byte == b':');
        let field = parts.next().unwrap();
        let value = parts.next().unwrap_or_default();
        let value = value.strip_prefix(b" ").unwrap_or(value).to_vec();
        match field {
            b"data" => match &mut said.data {
                None => said.data = Some(value),
                Some(data) => {
                    data.push(b'\n');
                    data.extend(value);
                }
            },
            b"event" => said.name = Some(value).filter(|name| !name.is_empty()),
            b"id" if !value.contains(&0) => said.id = Some(value),
            b"retry" if value.iter().all(u8::is_ascii_digit) => {
                said.retry = std::str::from_utf8(&value).unwrap().parse().ok().or(said.retry);
            }
            _ => {}
        }
    }
    all
}

const FIXTURES: &[&[u8]] = &[
    b"data: a\n\n",
    b"data: a\r\n\r\ndata: b\r\n\r\n",
    b"data: a\r\rdata: b\r\r",
    b"data: a\r\r\ndata: b\n\r\ndata: c\r\n\r",
    b"\xEF\xBB\xBFdata: {\"id\":1}\n\ndata: 2\n\n",
    b"\xEF\xBB\xBF:c\n\n\xEF\xBB\xBFdata: no\n\ndata: x\n\n",
    b"\xEF\xBBdata: no\n\n",
    b"\xEF",
    b"event: message\nid: 7\nretry: 3000\ndata: one\ndata: two\ndata\n\n",
    b": keep\n\n:\r\n\r\n:\r\rdata: a\n: in between\ndata: b\n:end\n\n\n\n",
    b":\r\ndata: a\r\n:\r\n:\r\n\r\n:\r\n\r\n",
    b"retry: 10\n\nid: x\n\nid: y\ndata: \n\nid\ndata\n\n",
    b"id: a\0b\nid: c\nretry: 1x\nretry:\nevent: x\nevent\ndata:  two spaces\ndata:none\n\n",
    "data: a\u{2028}b\u{2029}c\u{85}d\u{b}\u{c}e\n\n".as_bytes(),
    b"foo: bar\n\nDATA: no\n\ndata : no\n\n data: no\n\n",
    b"event: message\ndata: {}\n\nevent: message\ndata:1\n\nevent: messages\ndata: 2\n\ndata: 3\n\ndata: 4\n: c\n\n",
    b"data: a\n\nevent: message\ndata: b\r\n\ndata: c\rd\n\ndata:\n\ndata: d\n\nid: 1\ndata: e",
    b"data: cut off",
    b"data: a\r\n\r\ndata: cut off\r\n: comment",
    b"data: a\r\rdata: b\r:",
    b"event: ping\n",
    b"data: \xFF\xFE\0\n\n",
    b"\n\n\r\n\r\rdata:\n\n",
];

#[test]
fn every_fixture_reads_the_same_however_it_is_cut() {
    for fixture in FIXTURES {
        let expected = told(&whole(fixture));
        assert_eq!(told(&scan(fixture.chunks(1))), expected, "{}", fixture.escape_ascii());
        for first in 0..=fixture.len() {
            for second in first..=fixture.len() {
                let chunks = [&fixture[..first], &fixture[first..second], &fixture[second..]];
                assert_eq!(told(&scan(chunks)), expected, "{} at {first}, {second}", fixture.escape_ascii());
                assert_eq!(unnamed(told(&scan_plain(chunks))), unnamed(expected.clone()));
            }
        }
    }
}

#[test]
fn every_fixture_reads_as_the_standard_says() {
    for fixture in FIXTURES {
        as_the_standard_says(fixture, &whole(fixture));
    }
}

fn as_the_standard_says(stream: &[u8], events: &[Event]) {
    let read = told(events).1.into_iter().map(|event| Said {
        data: event.data.map(Into::into),
        name: event.name.map(Into::into),
        id: event.id.map(Into::into),
        retry: event.retry,
        bytes: event.bytes.into(),
    });
    let expected = reference(stream).into_iter().map(|mut said| {
        said.bytes.truncate(said.bytes.len() - usize::from(said.bytes.ends_with(b"\r\n")));
        said
    });
    assert_eq!(read.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{}", stream.escape_ascii());
}

#[test]
fn fields_are_read_as_the_standard_says() {
    let events = whole(b"event: message\nid: 7\nretry: 3000\nfoo: x\ndata: one\ndata:two\ndata\n\n");
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].data.as_deref(), Some(&b"one\ntwo\n"[..]));
    assert_eq!(events[0].name.as_deref(), Some(&b"message"[..]));
    assert_eq!(events[0].id.as_deref(), Some(&b"7"[..]));
    assert_eq!(events[0].retry, Some(3000));
    assert_eq!(
        events[0].bytes,
        &b"event: message\nid: 7\nretry: 3000\nfoo: x\ndata: one\ndata:two\ndata\n\n"[..]
    );
}

#[test]
fn an_id_with_nul_and_a_retry_with_letters_are_ignored() {
    let events = whole(b"id: ok\nid: a\0b\nretry: 5\nretry: 5s\nretry: -1\nretry:\ndata\n\n");
    assert_eq!(events[0].id.as_deref(), Some(&b"ok"[..]));
    assert_eq!(events[0].retry, Some(5));
    assert_eq!(whole(b"retry: 99999999999999999999999\n\n")[0].retry, Some(u64::MAX));
}

#[test]
fn a_priming_event_has_empty_data_and_a_retry_alone_has_none() {
    let events = whole(b"id: x\ndata: \n\nretry: 10\n\nid: y\n\n");
    let data: Vec<_> = events.iter().map(|event| event.data.as_deref()).collect();
    assert_eq!(data, [Some(&b""[..]), None, None]);
    assert_eq!(events[1].bytes, &b"retry: 10\n\n"[..]);
}

#[test]
fn blocks_of_comments_and_blank_lines_give_no_event() {
    assert_eq!(whole(b": a\n\n\n:\r\n\r\n\r\r: b"), []);
}

#[test]
fn comments_are_cut_out_of_an_event() {
    let events = whole(b":x\ndata: a\n: y\ndata: b\n:z\n\n");
    assert_eq!(events[0].bytes, &b"data: a\ndata: b\n\n"[..]);
    assert_eq!(events[0].data.as_deref(), Some(&b"a\nb"[..]));
}

#[test]
fn an_event_inside_one_chunk_is_a_slice_of_it() {
    let chunk = Bytes::from_static(b"data: a\n\n: no\ndata: b\n\n");
    let mut events = Vec::new();
    Scanner::new(100).push(chunk.clone(), |event| events.push(event)).unwrap();
    assert!(std::ptr::eq(events[0].bytes.as_ptr(), chunk.as_ptr()));
    assert!(std::ptr::eq(events[1].bytes.as_ptr(), &raw const chunk[14]));
    assert!(std::ptr::eq(events[1].data.as_ref().unwrap().as_ptr(), &raw const chunk[20]));
}

// An event is held for nothing that comes after its blank line.
#[test]
fn a_cr_that_ends_a_chunk_ends_the_event_at_once() {
    let mut scanner = Scanner::new(100);
    let mut events = Vec::new();
    scanner.push(Bytes::from_static(b"data: a\r\n\r"), |event| events.push(event)).unwrap();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].bytes, &b"data: a\r\n\r"[..]);
    events.clear();
    scanner.push(Bytes::from_static(b"\n"), |event| events.push(event)).unwrap();
    assert_eq!(events, [Event { prefix: Bytes::from_static(b"\n"), ..Event::default() }]);
    events.clear();
    scanner.push(Bytes::from_static(b"data: b\r\r"), |event| events.push(event)).unwrap();
    scanner.push(Bytes::from_static(b"\ndata: c\n\n"), |event| events.push(event)).unwrap();
    assert_eq!(events[0].prefix, &b""[..]);
    assert_eq!(events[1].prefix, &b"\n"[..]);
    assert_eq!(events[1].bytes, &b"data: c\n\n"[..]);
}

#[test]
fn a_byte_order_mark_is_a_prefix_at_the_start_and_part_of_the_field_later() {
    for cut in 0..=3 {
        let stream = b"\xEF\xBB\xBFdata: a\n\n\xEF\xBB\xBFdata: b\n\n";
        let events = scan([&stream[..cut], &stream[cut..]]);
        assert_eq!(events[0].prefix, BYTE_ORDER_MARK);
        assert_eq!(events[0].data.as_deref(), Some(&b"a"[..]));
        assert_eq!(events[1].prefix, &b""[..]);
        assert_eq!(events[1].data, None);
    }
}

#[test]
fn a_last_event_without_its_blank_line_is_completed_in_the_streams_own_style() {
    for (stream, last) in [
        (&b"data: a\n\ndata: b"[..], &b"data: b\n\n"[..]),
        (b"data: a\r\n\r\ndata: b", b"data: b\r\n\r\n"),
        (b"data: a\r\n\r\ndata: b\r\n", b"data: b\r\n\r\n"),
        (b"data: a\r\rdata: b", b"data: b\r\r"),
        (b"data: a\r\rdata: b\r", b"data: b\r\r"),
        (b"data: b", b"data: b\n\n"),
        (b"data: b\n: comm", b"data: b\n\n"),
    ] {
        assert_eq!(whole(stream).last().unwrap().bytes, last);
    }
    assert_eq!(whole(b"data: a\n\nevent: x\n").len(), 1);
}

#[test]
fn the_limit_holds_however_the_event_is_cut() {
    let stream = b"data: small\r\n\r\ndata: 0123456789\r\n\r\n";
    // The last LF does not count: 19 bytes.
    for size in 1..=stream.len() {
        for (limit, expected) in [(18, 1), (19, 2)] {
            let mut scanner = Scanner::new(limit);
            let mut events = 0;
            let mut failed = false;
            for chunk in stream.chunks(size) {
                let count = |event: Event| events += usize::from(!event.bytes.is_empty());
                failed |= scanner.push(Bytes::copy_from_slice(chunk), count).is_err();
            }
            assert_eq!((events, failed), (expected, expected == 1), "{limit} in chunks of {size}");
        }
    }
}

#[test]
fn no_more_than_the_limit_is_held_and_a_comment_is_not_held_at_all() {
    let mut scanner = Scanner::new(10);
    let comment = Bytes::from(vec![b':'; 1000]);
    for _ in 0..10 {
        scanner.push(comment.clone(), |_| ()).unwrap();
    }
    assert!(scanner.block.is_empty());
    scanner.push(Bytes::from_static(b"\ndata: 6789"), |_| ()).unwrap();
    assert!(scanner.push(Bytes::from_static(b"0"), |_| ()).is_err());
    assert!(scanner.push(Bytes::from_static(b"\n\ndata: x\n\n"), |_| ()).is_err());
    assert_eq!(scanner.finish(), None);
}

// With rescans this would look at 8 GiB.
#[test]
fn a_large_event_in_tiny_chunks_is_read_in_one_pass() {
    let mut scanner = Scanner::new(16 << 20);
    scanner.push(Bytes::from_static(b"data: "), |_| ()).unwrap();
    let chunk = Bytes::from(vec![b'x'; 64]);
    for _ in 0..(8 << 20) / 64 {
        scanner.push(chunk.clone(), |_| ()).unwrap();
    }
    let mut events = Vec::new();
    scanner.push(Bytes::from_static(b"\n\n"), |event| events.push(event)).unwrap();
    assert_eq!(events[0].data.as_ref().unwrap().len(), 8 << 20);
    assert_eq!(events[0].bytes.len(), (8 << 20) + 8);
}

/// Streams that are mostly what matters: line ends, field names, marks.
fn streams() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        6 => prop::sample::select(vec![&b"\n"[..], b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n"]),
        4 => prop::sample::select(vec![&b"data"[..], b"event", b"id", b"retry", b"foo"]),
        3 => prop::sample::select(vec![&b":"[..], b": ", b":  ", b" "]),
        3 => prop::sample::select(vec![&b"data: x\n\n"[..], b"event: message\ndata:y\n\n"]),
        3 => prop::sample::select(vec![&b"x"[..], b"42", b"\0", b"\xFF", b"{\"a\":1}", b"\xE2\x80\xA8"]),
        1 => prop::sample::select(vec![&b"\xEF\xBB\xBF"[..], b"\xEF", b"\xBB"]),
    ];
    prop::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_stream_reads_the_same_however_it_is_cut(
        stream in streams(),
        sizes in prop::collection::vec(0_usize..9, 1..80),
    ) {
        let mut chunks = Vec::new();
        let mut rest = &stream[..];
        for size in sizes {
            let (chunk, after) = rest.split_at(size.min(rest.len()));
            chunks.push(chunk);
            rest = after;
        }
        chunks.push(rest);
        prop_assert_eq!(unnamed(told(&scan_plain(chunks.clone()))), unnamed(told(&whole(&stream))));
        prop_assert_eq!(told(&scan(chunks)), told(&whole(&stream)));
    }

    #[test]
    fn any_stream_reads_as_the_standard_says(stream in streams()) {
        as_the_standard_says(&stream, &scan(stream.chunks(3)));
    }

    #[test]
    fn any_bytes_are_read_without_panic(stream in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert_eq!(told(&scan(stream.chunks(7))), told(&whole(&stream)));
    }
}
