//! The canonical form of a JSON value (RFC 8785), with one deviation: a number written as an integer beyond ±(2^53 − 1)
//! keeps its exact digits, and one beyond the range of a double its characters as they came. As doubles they would make
//! unlike calls alike.

use super::scan::{Bad, Scan};
use super::text::Text;

/// Deeper nesting has no canonical form here.
const MAX_DEPTH: usize = 128;

/// Why a value has no canonical form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A member name stands twice in one object: readers differ on which one counts.
    #[error("duplicate members")]
    Duplicate,
    /// A string holds half a surrogate pair: it is no Unicode text.
    #[error("a lone surrogate")]
    LoneSurrogate,
    /// Nested beyond 128 levels.
    #[error("nesting beyond 128 levels")]
    TooDeep,
    /// Not JSON.
    #[error("not JSON")]
    NotJson,
}

impl From<Bad> for Error {
    fn from(_: Bad) -> Self {
        Self::NotJson
    }
}

/// The canonical form of one value.
///
/// # Errors
///
/// See [`Error`].
pub fn canonical(value: &[u8]) -> Result<Vec<u8>, Error> {
    if std::str::from_utf8(value).is_err() {
        return Err(Error::NotJson);
    }
    let mut scan = Scan::new(value);
    let mut out = Vec::with_capacity(value.len());
    write(&mut scan, &mut out, 0)?;
    scan.end()?;
    Ok(out)
}

fn write(scan: &mut Scan<'_>, out: &mut Vec<u8>, depth: usize) -> Result<(), Error> {
    match scan.peek_value() {
        Some(b'{' | b'[') if depth == MAX_DEPTH => Err(Error::TooDeep),
        Some(b'{') => object(scan, out, depth),
        Some(b'[') => array(scan, out, depth),
        Some(b'"') => {
            let text = scan.maybe_string()?.ok_or(Error::NotJson)?;
            string(&decode(&text)?, out);
            Ok(())
        }
        _ => {
            let span = scan.value()?;
            scalar(scan.slice(span), out);
            Ok(())
        }
    }
}

/// Members in the order of their names' UTF-16 code units (RFC 8785 § 3.2.3).
fn object(scan: &mut Scan<'_>, out: &mut Vec<u8>, depth: usize) -> Result<(), Error> {
    let mut members: Vec<(Vec<u16>, String, Vec<u8>)> = Vec::new();
    let mut failed = None;
    scan.maybe_object(|scan, key| {
        let mut value = Vec::new();
        let read = decode(&key).and_then(|name| write(scan, &mut value, depth + 1).map(|()| name));
        match read {
            Ok(name) => members.push((name.encode_utf16().collect(), name, value)),
            Err(error) => {
                failed = Some(error);
                return Err(Bad { at: 0, what: "no canonical form" });
            }
        }
        Ok(())
    })
    .map_err(|bad| failed.unwrap_or(bad.into()))?;
    members.sort_by(|a, b| a.0.cmp(&b.0));
    if members.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(Error::Duplicate);
    }
    out.push(b'{');
    for (index, (_, name, value)) in members.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        string(name, out);
        out.push(b':');
        out.extend_from_slice(value);
    }
    out.push(b'}');
    Ok(())
}

fn array(scan: &mut Scan<'_>, out: &mut Vec<u8>, depth: usize) -> Result<(), Error> {
    out.push(b'[');
    let mut failed = None;
    let mut first = true;
    scan.array(|scan| {
        if !std::mem::replace(&mut first, false) {
            out.push(b',');
        }
        write(scan, out, depth + 1).map_err(|error| {
            failed = Some(error);
            Bad { at: 0, what: "no canonical form" }
        })
    })
    .map_err(|bad| failed.unwrap_or(bad.into()))?;
    out.push(b']');
    Ok(())
}

fn decode(text: &Text<'_>) -> Result<String, Error> {
    text.string().ok_or(Error::LoneSurrogate)
}

/// serde_json escapes exactly what RFC 8785 § 3.2.2.2 asks for.
fn string(text: &str, out: &mut Vec<u8>) {
    // Writing into a vector cannot fail.
    let _ = serde_json::to_writer(out, text);
}

/// A number, `true`, `false` or `null`.
fn scalar(token: &[u8], out: &mut Vec<u8>) {
    let text = std::str::from_utf8(token).unwrap_or_default();
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
    // Not nothing, and too small for a double to hold.
    let vanishes = number == Some(0.0)
        && text
            .bytes()
            .take_while(|byte| !matches!(byte, b'e' | b'E'))
            .any(|byte| matches!(byte, b'1'..=b'9'));
    let whole = !text.bytes().any(|byte| matches!(byte, b'.' | b'e' | b'E'));
    match number {
        Some(number) if !(vanishes || whole && number.abs() > MAX_SAFE) => {
            // Only what is not finite could fail.
            let _ = serde_json_canonicalizer::to_writer(&number, out);
        }
        _ => out.extend_from_slice(token),
    }
}

/// 2^53 − 1.
const MAX_SAFE: f64 = 9_007_199_254_740_991.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn form(json: &str) -> String {
        String::from_utf8(canonical(json.as_bytes()).unwrap()).unwrap()
    }

    #[test]
    fn the_rfcs_own_example_comes_out_as_the_rfc_says() {
        let json = r#"{
            "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
            "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
            "literals": [null, true, false]
        }"#;
        assert_eq!(
            form(json),
            r#"{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}"#
        );
    }

    #[test]
    fn members_are_sorted_by_utf16_code_units() {
        let json = r#"{"\u20ac":"Euro Sign","\r":"Carriage Return","\ufb33":"Hebrew Letter Dalet With Dagesh",
            "1":"One","\ud83d\ude00":"Emoji: Grinning Face","\u0080":"Control","\u00f6":"Latin Small Letter O With Diaeresis"}"#;
        let order: Vec<String> = form(json)
            .split("\":\"")
            .skip(1)
            .map(|part| part.split('"').next().unwrap_or_default().to_owned())
            .collect();
        assert_eq!(
            order,
            [
                "Carriage Return",
                "One",
                "Control",
                "Latin Small Letter O With Diaeresis",
                "Euro Sign",
                "Emoji: Grinning Face",
                "Hebrew Letter Dalet With Dagesh"
            ]
        );
    }

    #[test]
    fn the_rfcs_numbers_are_written_as_ecmascript_does() {
        // RFC 8785, appendix B, by the bits of the double.
        for (bits, text) in [
            (0x0000_0000_0000_0000, "0"),
            (0x8000_0000_0000_0000, "0"),
            (0x0000_0000_0000_0001, "5e-324"),
            (0x7fef_ffff_ffff_ffff, "1.7976931348623157e+308"),
            (0x4340_0000_0000_0000, "9007199254740992"),
            (0x4430_0000_0000_0000, "295147905179352830000"),
            (0x44b5_2d02_c7e1_4af5, "9.999999999999997e+22"),
            (0x44b5_2d02_c7e1_4af6, "1e+23"),
            (0x444b_1ae4_d6e2_ef50, "1e+21"),
            (0x3eb0_c6f7_a0b5_ed8d, "0.000001"),
            (0x41b3_de43_5555_5553, "333333333.3333332"),
            (0xbecb_f647_612f_3696, "-0.0000033333333333333333"),
        ] {
            let number = f64::from_bits(bits);
            // A fraction or an exponent: it is read as a double.
            assert_eq!(form(&format!("{number:e}")), text, "{bits:x}");
        }
    }

    #[test]
    fn equal_spellings_have_one_form() {
        assert_eq!(form(r#"{"b":1.0,"a":"\u00e9"}"#), form(r#" { "a" : "é" , "b" : 1 } "#));
        assert_eq!(form("-0"), form("0"));
        assert_eq!(form("1e2"), form("100"));
    }

    #[test]
    fn unlike_numbers_stay_unlike_beyond_what_a_double_holds() {
        assert_eq!(form("9007199254740993"), "9007199254740993");
        assert_ne!(form("9007199254740992"), form("9007199254740993"));
        assert_eq!(form("-123456789012345678901234567890"), "-123456789012345678901234567890");
        assert_eq!(form("1e999"), "1e999");
        assert_eq!(form("-0.1e-400"), "-0.1e-400");
        assert_eq!((form("0e400"), form("0.00e-400")), ("0".into(), "0".into()));
        assert_eq!(form("9007199254740991"), "9007199254740991");
    }

    #[test]
    fn what_is_ambiguous_or_too_deep_has_no_form() {
        assert_eq!(canonical(br#"{"a":1,"\u0061":2}"#), Err(Error::Duplicate));
        assert_eq!(canonical(br#"[{"x":{"a":1,"a":1}}]"#), Err(Error::Duplicate));
        assert_eq!(canonical(br#"["\ud800"]"#), Err(Error::LoneSurrogate));
        assert_eq!(canonical(br#"{"\ud800":1}"#), Err(Error::LoneSurrogate));
        assert!(canonical(format!("{}{}", "[".repeat(128), "]".repeat(128)).as_bytes()).is_ok());
        assert_eq!(canonical("[".repeat(129).as_bytes()), Err(Error::TooDeep));
        assert_eq!(canonical(b"[1,]"), Err(Error::NotJson));
        assert_eq!(canonical(b"\"\xff\""), Err(Error::NotJson));
    }
}
