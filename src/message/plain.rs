//! What most messages of a busy stream are, seen without taking memory: notifications that only pass, and steps of one
//! progress. Whatever is not clear at once is neither, and [`answer::look`](super::answer::look) is to be asked.

use std::ops::Range;

use super::{
    answer::number,
    scan::{Bad, Scan},
    text::Text,
};

/// Not what was looked for.
const NOT: Bad = Bad { at: 0, what: "another message" };
/// A beginning or an end beyond this is not kept.
const KEPT: usize = 1024;

/// Whether this is a notification, and none of progress.
pub fn is_notification(data: &[u8]) -> bool {
    let mut scan = Scan::new(data);
    let mut method = None;
    let message = scan.maybe_object(|scan, key| match raw(&key)? {
        b"method" => {
            method = scan.maybe_string()?;
            Ok(())
        }
        b"id" | b"result" | b"error" => Err(NOT),
        _ => scan.value().map(|_| ()),
    });
    let clear = |method: Text<'_>| {
        !method.escaped && method.raw().is_ascii() && method.raw() != b"notifications/progress"
    };
    message.is_ok() && method.is_some_and(clear) && scan.end().is_ok()
}

/// The steps of one progress: they begin alike, up to where the value is, and often end alike.
#[derive(Debug)]
pub struct Steps {
    /// What they begin with, and what stands before that on the wire.
    head: Vec<u8>,
    /// Bytes of the latter.
    before: usize,
    /// The total that stands in the former.
    total: Option<f64>,
    end: Option<End>,
}

/// What followed the value of the first step: behind another value it says the same.
#[derive(Debug)]
struct End {
    bytes: Vec<u8>,
    /// So many of them are the message's.
    message: usize,
    total: Option<f64>,
}

/// What a step says: its value and its total.
pub type Step = (f64, Option<f64>);

impl Steps {
    /// The steps that begin as this one does, which is the part `message` of what came on the wire; `None` if method and
    /// token do not come before the value, or if what comes before it may be another one's.
    pub fn like(wire: &[u8], message: Range<usize>) -> Option<Self> {
        let (before, behind) = (message.start, wire.get(message.end..)?);
        let data = wire.get(message)?;
        let mut scan = Scan::new(data);
        let (mut is_progress, mut value, mut total) = (false, None, None);
        let message = scan.maybe_object(|scan, key| match raw(&key)? {
            b"method" => {
                let method = scan.maybe_string()?.ok_or(NOT)?;
                is_progress = method.token == b"\"notifications/progress\"" && value.is_none();
                if is_progress { Ok(()) } else { Err(NOT) }
            }
            b"params" if is_progress && value.is_none() => {
                let mut token = false;
                total = None;
                let params = scan.maybe_object(|scan, key| match raw(&key)? {
                    b"progressToken" => {
                        token =
                            value.is_none() && matches!(scan.peek_value(), Some(b'"' | b'-' | b'0'..=b'9'));
                        if token { scan.value().map(|_| ()) } else { Err(NOT) }
                    }
                    b"progress" if token && value.is_none() => {
                        value = Some(scan.value()?.start);
                        Ok(())
                    }
                    b"total" if value.is_none() => {
                        total = number(scan)?;
                        Ok(())
                    }
                    b"progress" => Err(NOT),
                    b"_meta" if value.is_none() => Err(NOT),
                    _ => scan.value().map(|_| ()),
                });
                params.map(|_| ())
            }
            b"id" | b"result" | b"error" | b"params" => Err(NOT),
            _ => scan.value().map(|_| ()),
        });
        let head = wire.get(..before + value?)?;
        if message.is_err() || head.len() > KEPT {
            return None;
        }
        let mut steps = Self { head: head.to_vec(), before, total, end: None };
        if let (Some((_, total)), Some((_, scan))) = (steps.step(data), value_behind(&head[before..], data)) {
            let message = scan.rest().len();
            steps.end = Some(End { bytes: [scan.rest(), behind].concat(), message, total })
                .filter(|end| end.bytes.len() <= KEPT);
        }
        Some(steps)
    }

    /// The step that these bytes of the wire begin with, if it is like the first one in all but its value; and how many
    /// bytes that is.
    pub fn next(&self, wire: &[u8]) -> Option<(Step, usize)> {
        // Without anything around it a message is not what stands on the wire.
        let end = self.end.as_ref().filter(|_| self.before > 0)?;
        // White space before a value might be a line end, which would mean something on the wire.
        if !matches!(wire.get(self.head.len())?, b'-' | b'0'..=b'9') {
            return None;
        }
        let (value, scan) = value_behind(&self.head, wire)?;
        let rest = scan.rest().strip_prefix(&*end.bytes)?;
        Some(((value, end.total), wire.len() - rest.len()))
    }

    /// What this message says, if it is another step.
    pub fn step(&self, data: &[u8]) -> Option<Step> {
        let (value, mut scan) = value_behind(&self.head[self.before..], data)?;
        if let Some(end) = &self.end
            && scan.rest() == &end.bytes[..end.message]
        {
            return Some((value, end.total));
        }
        let mut total = self.total;
        scan.members(|scan, key| match raw(&key)? {
            b"total" => {
                total = number(scan)?;
                Ok(())
            }
            b"progress" | b"progressToken" | b"_meta" => Err(NOT),
            _ => scan.value().map(|_| ()),
        })
        .ok()?;
        scan.members(|scan, key| match raw(&key)? {
            b"method" | b"params" | b"id" | b"result" | b"error" => Err(NOT),
            _ => scan.value().map(|_| ()),
        })
        .ok()?;
        scan.end().ok()?;
        Some((value, total))
    }
}

/// The value behind such a head, and what follows.
fn value_behind<'a>(head: &[u8], data: &'a [u8]) -> Option<(f64, Scan<'a>)> {
    if !data.starts_with(head) {
        return None;
    }
    let mut scan = Scan::from(data, head.len());
    let value = number(&mut scan).ok()??;
    Some((value, scan))
}

/// A key as it stands there; one with escapes may be any.
fn raw<'a>(key: &Text<'a>) -> Result<&'a [u8], Bad> {
    if key.escaped { Err(NOT) } else { Ok(key.raw()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::message::answer::{self, Answer};

    #[test]
    fn notifications_are_told_from_everything_else() {
        for plain in [
            r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}"#,
            r#" { "method" : "x" } "#,
            r#"{"method":"notifications/progress","method":"x","params":[{"id":1}]}"#,
        ] {
            assert!(is_notification(plain.as_bytes()), "{plain}");
            assert!(matches!(answer::look(plain.as_bytes()), Some(Answer::Notification(_))), "{plain}");
        }
        for other in [
            r#"{"method":"x","id":1}"#,
            r#"{"method":"x","\u0069d":1}"#,
            r#"{"method":"x","id":null}"#,
            r#"{"method":"x","result":{}}"#,
            r#"{"method":"x","error":null}"#,
            r#"{"id":1,"result":{}}"#,
            r#"{"method":"notifications/progress"}"#,
            r#"{"method":"notifications\/progress"}"#,
            r#"{"method":"x","method":"notifications/progress"}"#,
            r#"{"method":1}"#,
            r#"{"params":{"method":"x"}}"#,
            r#"[{"method":"x"}]"#,
            r#"{"method":"x"} 1"#,
            r#"{"method":"x","params":{"a":tru}}"#,
            r#"{"method":"x""#,
            "",
            "{}",
            "\"method\"",
        ] {
            assert!(!is_notification(other.as_bytes()), "{other}");
        }
    }

    fn steps(data: &str) -> Option<Steps> {
        Steps::like(data.as_bytes(), 0..data.len())
    }

    #[test]
    fn steps_begin_alike_and_differ_in_value_and_what_follows() {
        let head = r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"a","#;
        let first = format!(r#"{head}"progress":1,"total":9,"message":"m"}}}}"#);
        let steps = steps(&first).unwrap();
        for (tail, told) in [
            (r#"1,"total":9,"message":"m"}}"#, Some((1.0, Some(9.0)))),
            (r#"2.5e1,"total":9,"message":"m"}}"#, Some((25.0, Some(9.0)))),
            (r#"-2,"total":9,"message":"n"}}"#, Some((-2.0, Some(9.0)))),
            (r#"02,"total":9,"message":"m"}}"#, None),
            (r#""2","total":9,"message":"m"}}"#, None),
            (r#"2,"total":9,"message":"m"}} 1"#, None),
            (r#"22}}"#, Some((22.0, None))),
            (r#" 2.5e1 , "x":{"progress":1} , "total":null } , "y":[1] } "#, Some((25.0, None))),
            (r#"123456789012345678,"total":1,"total":2}}"#, Some((123_456_789_012_345_678.0, Some(2.0)))),
            (r#""2"}}"#, None),
            (r#"null}}"#, None),
            (r#"1e999}}"#, None),
            (r#"01}}"#, None),
            (r#"2,"progress":3}}"#, None),
            (r#"2,"progressToken":"b"}}"#, None),
            (r#"2,"_meta":{"oz0/resume":"r"}}}"#, None),
            (r#"2,"\u005fmeta":{}}}"#, None),
            (r#"2},"id":1}"#, None),
            (r#"2},"method":"x"}"#, None),
            (r#"2},"params":{}}"#, None),
            (r#"2},"result":{}}"#, None),
            (r#"2}}}"#, None),
            (r#"2}"#, None),
            (r#"2"#, None),
            ("", None),
        ] {
            let data = format!(r#"{head}"progress":{tail}"#);
            assert_eq!(steps.step(data.as_bytes()), told, "{data}");
        }
        let other = first.replace("\"a\"", "\"b\"");
        assert_eq!(steps.step(other.as_bytes()), None);
    }

    #[test]
    fn what_is_no_step_to_its_end_is_no_model_for_others() {
        for tail in [r#","_meta":{}}}"#, r#"},"id":1}"#, r#"}} 1"#, "}"] {
            let head = r#"{"method":"notifications/progress","params":{"progressToken":1,"progress":"#;
            let steps = steps(&format!("{head}1{tail}"));
            assert_eq!(
                steps.and_then(|steps| steps.step(format!("{head}2{tail}").as_bytes())),
                None,
                "{tail}"
            );
        }
    }

    #[test]
    fn on_the_wire_a_step_is_seen_by_what_stands_around_it_too() {
        let head = r#"{"method":"notifications/progress","params":{"progressToken":1,"progress":"#;
        let wire = format!("data: {head}1,\"message\":\"m\"}}}}\n\n");
        let alone = steps(&wire[6..wire.len() - 2]).unwrap();
        assert_eq!(alone.next(&wire.as_bytes()[6..]), None);
        let steps = Steps::like(wire.as_bytes(), 6..wire.len() - 2).unwrap();
        for (begins, more, told) in [
            ("data: ", "2,\"message\":\"m\"}}\n\n", Some(2.0)),
            ("data: ", "-2.5e1,\"message\":\"m\"}}\n\n", Some(-25.0)),
            ("data:", "2,\"message\":\"m\"}}\n\n", None),
            ("data: ", " 2,\"message\":\"m\"}}\n\n", None),
            ("data: ", "\n2,\"message\":\"m\"}}\n\n", None),
            ("data: ", "2,\"message\":\"n\"}}\n\n", None),
            ("data: ", "2,\"message\":\"m\"}}\n", None),
            ("data: ", "2,\"message\":\"m\"}}\ndata: 1\n\n", None),
            ("data: ", "2", None),
            ("data: ", "", None),
        ] {
            let wire = format!("{begins}{head}{more}");
            let whole = told.map(|value| ((value, None), wire.len()));
            assert_eq!(steps.next(wire.as_bytes()), whole, "{wire}");
            assert_eq!(steps.next(format!("{wire}data: ").as_bytes()), whole, "{wire} and more");
        }
        let data = format!("{head}2,\"message\":\"n\"}}}}");
        assert_eq!(steps.step(data.as_bytes()), Some((2.0, None)));
    }

    #[test]
    fn a_total_before_the_value_counts() {
        let data =
            r#"{"method":"notifications/progress","params":{"total":5,"progressToken":1,"progress":2}}"#;
        assert_eq!(steps(data).unwrap().step(data.as_bytes()), Some((2.0, Some(5.0))));
    }

    #[test]
    fn nothing_is_learnt_from_what_does_not_begin_with_its_method_and_token() {
        for data in [
            r#"{"params":{"progressToken":1,"progress":2},"method":"notifications/progress"}"#,
            r#"{"method":"notifications/progress","params":{"progress":2,"progressToken":1}}"#,
            r#"{"method":"notifications/progress","params":{"progressToken":null,"progress":2}}"#,
            r#"{"method":"notifications/progress","params":{"progressToken":1,"_meta":{},"progress":2}}"#,
            r#"{"method":"notifications/progress","params":{"progressToken":1,"progress":2},"params":{}}"#,
            r#"{"method":"notifications/progress","params":{"progressToken":1,"progress":2},"method":"x"}"#,
            r#"{"id":null,"method":"notifications/progress","params":{"progressToken":1,"progress":2}}"#,
            r#"{"method":"notifications/progress","params":{"progressToken":1,"progress":2,"progress":3}}"#,
            r#"{"method":"notifications/progress","params":{"progressToken":1}}"#,
            r#"{"method":"notifications/message","params":{"progressToken":1,"progress":2}}"#,
            r#"{"method":"notifications/progress","params":{"progressToken":1,"progress":2}"#,
            "[]",
        ] {
            assert!(steps(data).is_none_or(|steps| steps.step(data.as_bytes()).is_none()), "{data}");
        }
    }

    /// Members of messages, in any order, some of them odd.
    fn members(
        names: &'static [&'static str],
        values: &'static [&'static str],
    ) -> impl Strategy<Value = String> {
        let member = (prop::sample::select(names), prop::sample::select(values));
        prop::collection::vec(member, 0..6).prop_map(|members| {
            let members: Vec<_> = members.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
            format!("{{{}}}", members.join(","))
        })
    }

    fn message() -> impl Strategy<Value = String> {
        const TOP: &[&str] =
            &["method", "method", "params", "params", "params", "id", "result", "jsonrpc", "\\u0069d"];
        const VALUES: &[&str] = &[
            "\"notifications/progress\"",
            "\"notifications/progress\"",
            "\"x\"",
            "1",
            "null",
            "P",
            "P",
            "P",
        ];
        const PARAMS: &[&str] =
            &["progressToken", "progressToken", "progress", "progress", "total", "_meta", "message"];
        const INNER: &[&str] = &["1", "2", "2.5", "\"t\"", "null", "{\"oz0/resume\":\"r\"}", "1e999"];
        (members(TOP, VALUES), members(PARAMS, INNER))
            .prop_map(|(message, params)| message.replace('P', &params))
    }

    #[test]
    fn a_total_is_of_the_params_that_say_the_progress() {
        let data = r#"{"method":"notifications/progress","params":{"progressToken":1,"total":9},"params":{"progressToken":1,"progress":2}}"#;
        assert_eq!(steps(data).unwrap().step(data.as_bytes()), Some((2.0, None)));
    }

    proptest! {
        #[test]
        fn what_is_seen_at_once_is_what_a_closer_look_sees(one in message(), other in message()) {
            for data in [&one, &other] {
                let look = answer::look(data.as_bytes());
                if is_notification(data.as_bytes()) {
                    prop_assert!(matches!(look, Some(Answer::Notification(_))), "{}", data);
                }
            }
            if let Some(steps) = steps(&one) {
                let Some(Answer::Progress(first)) = answer::look(one.as_bytes()) else {
                    return Err(TestCaseError::fail(one));
                };
                let on_wire = |data: &str| format!("event: message\ndata: {data}\n\n");
                let wire = on_wire(&one);
                let begins = Steps::like(wire.as_bytes(), 21..wire.len() - 2);
                for data in [&one, &other] {
                    let wire = on_wire(data);
                    let next = begins.as_ref().and_then(|steps| steps.next(wire.as_bytes()));
                    if let Some((step, length)) = next {
                        prop_assert_eq!((Some(step), length), (steps.step(data.as_bytes()), wire.len()));
                    }
                    if let Some((value, total)) = steps.step(data.as_bytes()) {
                        let Some(Answer::Progress(progress)) = answer::look(data.as_bytes()) else {
                            return Err(TestCaseError::fail(data.clone()));
                        };
                        prop_assert_eq!(&progress.token, &first.token);
                        prop_assert_eq!((progress.progress, progress.total), (Some(value), total));
                        prop_assert_eq!(progress.resume, None);
                    }
                }
            }
        }
    }
}
