use proptest::prelude::*;

use super::*;

/// What serde_json says of the same bytes: valid JSON, any number, any escape.
fn valid(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes)
        .is_ok_and(|text| serde_json::from_str::<&serde_json::value::RawValue>(text).is_ok())
}

fn scanned(bytes: &[u8]) -> Result<Range<usize>, Bad> {
    let mut scan = Scan::new(bytes);
    let value = scan.value()?;
    scan.end()?;
    Ok(value)
}

/// Text made of the pieces JSON is made of, so that near misses are frequent.
fn nearly_json() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "\"a\"",
        "\"b\":",
        "\\",
        "\\u00e9",
        "\\ud800",
        "\\n",
        "0",
        "1",
        "-",
        ".",
        "e",
        "E+",
        "12",
        "true",
        "false",
        "null",
        "nul",
        " ",
        "\n",
        "\t",
        "\u{1}",
        "é",
        "\"\\u12\"",
        "{}",
        "[]",
        "[1,2]",
        "{\"a\":1}",
        "long enough for a whole word",
    ]);
    prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn it_accepts_exactly_what_serde_json_accepts(text in nearly_json()) {
        prop_assert_eq!(scanned(text.as_bytes()).is_ok(), valid(text.as_bytes()), "{}", text);
    }

    #[test]
    fn it_survives_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let taken = scanned(&bytes).is_ok();
        if std::str::from_utf8(&bytes).is_ok() {
            prop_assert_eq!(taken, valid(&bytes));
        }
    }

    #[test]
    fn a_string_says_what_serde_json_says(text in any::<String>(), prefix in 0usize..9) {
        let mut json = " ".repeat(prefix);
        json.push_str(&serde_json::to_string(&text).unwrap());
        let escaped: String = text.encode_utf16().map(|unit| format!("\\u{unit:04X}")).collect();
        for json in [json, format!("\"{escaped}\"")] {
            let said = Scan::new(json.as_bytes()).maybe_string().unwrap().unwrap();
            prop_assert_eq!(said.string(), Some(text.clone()));
            prop_assert_eq!(said.token, json.trim_start().as_bytes());
        }
    }
}

#[test]
fn every_cut_of_a_document_is_refused_and_nothing_panics() {
    let json = br#"{"a":[1,-2.5e+3,{"b":"\u00e9\n"},true,false,null],"c":{}}"#;
    for end in 0..json.len() {
        assert!(scanned(&json[..end]).is_err(), "{end}");
    }
    assert_eq!(scanned(json), Ok(0..json.len()));
}

#[test]
fn a_special_byte_is_found_at_every_place_of_a_word() {
    for special in [b'"', b'\\', 0x00, 0x1F, b'\n'] {
        for place in 0..40 {
            for fill in [b'a', 0x20, 0x21, 0x23, 0x5B, 0x5D, 0x7F, 0x80, 0xA2, 0xDC, 0xFF] {
                let mut bytes = vec![fill; 40];
                bytes[place] = special;
                assert_eq!(plain_end(&bytes, 0), place);
            }
        }
    }
}

#[test]
fn a_million_levels_are_skipped_without_a_deep_stack_or_much_memory() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}"), ("[{\"a\":", "}]")] {
        let json = format!("{}1{}", open.repeat(1_000_000), close.repeat(1_000_000));
        let mut scan = Scan::new(json.as_bytes());
        assert_eq!(scan.value().map(|span| span.len()), Ok(json.len()));
        assert_eq!(scan.deepest(), 1_000_000 * open.chars().filter(|c| "[{".contains(*c)).count());
        assert!(scanned(open.repeat(100_000).as_bytes()).is_err());
    }
}

#[test]
fn brackets_that_do_not_match_are_refused_at_any_depth() {
    for depth in [1, 2, 63, 64, 65, 127, 128, 129, 200] {
        let mut json = "[".repeat(depth) + "{\"a\":1}" + &"]".repeat(depth);
        assert!(scanned(json.as_bytes()).is_ok());
        let one = json.len() - depth / 2 - 1;
        json.replace_range(one..=one, "}");
        assert!(scanned(json.as_bytes()).is_err(), "{depth}");
    }
}

#[test]
fn lone_surrogates_decode_to_nothing_and_stay_apart() {
    let text = |json: &'static str| Scan::new(json.as_bytes()).string().unwrap();
    assert_eq!(text(r#""\ud800""#).string(), None);
    assert_ne!(text(r#""\ud800""#).bytes(), text(r#""\ud801""#).bytes());
    assert_eq!(text(r#""\ud83d\ude00""#).string().as_deref(), Some("😀"));
    assert_eq!(text(r#""\ud83d\u0041""#).string(), None);
}
