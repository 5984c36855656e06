//! What the node says of a call: the object `params._meta["oz0/call"]` and the `Oz0-*` headers; the object wins member by
//! member.

use std::time::Duration;

use http::HeaderMap;
use serde::{Deserialize, Deserializer, de};

/// The longest text of an identity, bytes.
const MAX_TEXT: usize = 256;

/// What the node said of a call. Every member is checked by itself; [`Identity::check`] looks at them together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Identity {
    /// The job's id.
    pub job: Option<String>,
    /// The call's activity: the same on each attempt.
    pub activity: Option<String>,
    /// How often the job continued as new; 0: never.
    pub continued: u64,
    /// The number of the harness session whose call this is.
    pub session: Option<u64>,
    /// Changes when a fresh session starts that session again.
    pub session_start: Option<String>,
    /// The call's ordinal, if the node counts itself.
    pub k: Option<u64>,
    /// Which attempt this is, from 1.
    pub attempt: Option<u64>,
    /// The tool's time limit.
    pub time_limit: Option<Duration>,
    /// Since the attempt started on the node.
    pub elapsed: Duration,
    /// The node said anything at all.
    pub said: bool,
}

/// Why an identity is refused: names the member.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{member}: {reason}")]
pub struct Invalid {
    /// The member, as in `oz0/call`.
    pub member: &'static str,
    /// What is wrong with it.
    pub reason: &'static str,
}

fn invalid(member: &'static str, reason: &'static str) -> Invalid {
    Invalid { member, reason }
}

/// The object as it came. A member of another type than it must have fails by its name.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Said {
    #[serde(deserialize_with = "given")]
    job: Option<Given<String>>,
    #[serde(deserialize_with = "given")]
    activity: Option<Given<String>>,
    #[serde(deserialize_with = "given")]
    continued: Option<Given<Whole>>,
    #[serde(deserialize_with = "given")]
    session: Option<Given<Whole>>,
    #[serde(deserialize_with = "given")]
    session_start: Option<Given<String>>,
    #[serde(deserialize_with = "given")]
    k: Option<Given<Whole>>,
    #[serde(deserialize_with = "given")]
    attempt: Option<Given<Whole>>,
    #[serde(deserialize_with = "given")]
    time_limit: Option<Given<f64>>,
    #[serde(deserialize_with = "given")]
    elapsed: Option<Given<f64>>,
}

/// `null` is a value of the wrong type too.
fn given<'de, D: Deserializer<'de>, T: de::DeserializeOwned>(
    deserializer: D,
) -> Result<Option<Given<T>>, D::Error> {
    Given::deserialize(deserializer).map(Some)
}

/// A value of the right type, or the fact that it is not.
#[derive(Debug)]
struct Given<T>(Option<T>);

impl<'de, T: de::DeserializeOwned> Deserialize<'de> for Given<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&serde_json::value::RawValue>::deserialize(deserializer)?;
        Ok(Self(serde_json::from_str(raw.get()).ok()))
    }
}

/// A whole number, however JSON spells it: `1`, `1.0`, `1e0`.
#[derive(Debug, Deserialize)]
#[serde(try_from = "serde_json::Number")]
struct Whole(u64);

impl TryFrom<serde_json::Number> for Whole {
    type Error = &'static str;

    fn try_from(number: serde_json::Number) -> Result<Self, Self::Error> {
        // A double beyond 2^53 may stand for several.
        let exact = |number: &f64| number.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(number);
        let double = || number.as_f64().filter(exact).map(|number| number as u64);
        number.as_u64().or_else(double).map(Self).ok_or("no whole number")
    }
}

impl Identity {
    /// Reads the object (its JSON, if the node sent one) and the headers.
    ///
    /// # Errors
    ///
    /// [`Invalid`], naming the member that is not what it must be.
    pub fn read(object: Option<&str>, headers: &HeaderMap) -> Result<Self, Invalid> {
        let said = match object {
            None => Said::default(),
            Some(object) if object.trim_start().starts_with('{') => serde_json::from_str(object)
                .map_err(|_| invalid("oz0/call", "a member stands twice, or it is no object"))?,
            Some(_) => return Err(invalid("oz0/call", "it is no object")),
        };
        // Most messages have none of these fields: that is one look at what is there, not nine for what may be.
        let any = headers.keys().any(|name| name.as_str().starts_with("oz0-"));
        let field = |name: &'static str| if any { Field::find(headers, name) } else { Field(Ok(None)) };
        let elapsed = seconds("elapsed", said.elapsed.as_ref(), field("oz0-elapsed"), 0.0)?;
        let mut identity = Self {
            job: text("job", said.job, field("oz0-job"))?,
            activity: text("activity", said.activity, field("oz0-activity"))?,
            session_start: text("session_start", said.session_start, field("oz0-session-start"))?,
            continued: whole("continued", said.continued.as_ref(), field("oz0-continued"), 0)?.unwrap_or(0),
            session: whole("session", said.session.as_ref(), field("oz0-session"), 0)?,
            k: whole("k", said.k.as_ref(), field("oz0-k"), 1)?,
            attempt: whole("attempt", said.attempt.as_ref(), field("oz0-attempt"), 1)?,
            time_limit: seconds(
                "time_limit",
                said.time_limit.as_ref(),
                field("oz0-time-limit"),
                f64::MIN_POSITIVE,
            )?,
            elapsed: elapsed.unwrap_or_default(),
            said: object.is_some() || elapsed.is_some(),
        };
        identity.said |= identity != Self { said: identity.said, ..Self::default() };
        Ok(identity)
    }

    /// Whether the members hold together. `keyed`: the node put a key of its own; `leg`: the call goes on with an MRTR
    /// exchange.
    ///
    /// # Errors
    ///
    /// [`Invalid`], naming the member that lacks another.
    pub fn check(&self, keyed: bool, leg: bool) -> Result<(), Invalid> {
        if self.session.is_some() && !keyed {
            if self.job.is_none() {
                return Err(invalid("session", "it needs job"));
            }
            let counted = self.session_start.is_some() && self.activity.is_some();
            if self.k.is_none() && !counted {
                return Err(invalid("session", "it needs k, or session_start with activity"));
            }
        }
        let named = self.activity.is_some() || self.k.is_some() || keyed;
        if self.attempt.is_some_and(|attempt| attempt >= 2) && !named {
            return Err(invalid("attempt", "from the second on it needs activity, k or a key"));
        }
        let any = self.job.is_some() || self.session.is_some() || self.session_start.is_some();
        if leg && (any || self.attempt.is_some()) && !named {
            return Err(invalid("inputResponses", "with an identity it needs activity, k or a key"));
        }
        Ok(())
    }
}

/// One header that stands for a member. What is wrong with it matters only where the object does not say that.
struct Field(Result<Option<String>, Invalid>);

impl Field {
    fn find(headers: &HeaderMap, name: &'static str) -> Self {
        let mut values = headers.get_all(name).iter();
        let Some(value) = values.next() else { return Self(Ok(None)) };
        let readable = value.to_str().ok().filter(|_| values.next().is_none());
        let value = readable.map(|value| Some(value.trim().to_owned()));
        Self(value.ok_or_else(|| invalid(name, "the header is repeated or not readable")))
    }
}

/// 1 to 256 visible ASCII characters.
fn text(member: &'static str, given: Option<Given<String>>, field: Field) -> Result<Option<String>, Invalid> {
    let value = match given {
        Some(Given(value)) => Some(value.ok_or_else(|| invalid(member, "it is no string"))?),
        None => field.0?,
    };
    let fits = |value: &String| {
        (1..=MAX_TEXT).contains(&value.len()) && value.bytes().all(|byte| byte.is_ascii_graphic())
    };
    if value.as_ref().is_some_and(|value| !fits(value)) {
        return Err(invalid(member, "it is not 1 to 256 visible ASCII characters"));
    }
    Ok(value)
}

/// A whole number of at least `least`.
fn whole(
    member: &'static str,
    given: Option<&Given<Whole>>,
    field: Field,
    least: u64,
) -> Result<Option<u64>, Invalid> {
    let bad = || invalid(member, "it is no whole number, or too small");
    let value = match given {
        Some(Given(value)) => value.as_ref().ok_or_else(bad)?.0,
        None => match field.0? {
            None => return Ok(None),
            Some(text) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                text.parse().map_err(|_| bad())?
            }
            Some(_) => return Err(bad()),
        },
    };
    if value < least { Err(bad()) } else { Ok(Some(value)) }
}

/// Seconds of at least `least`; more than a duration holds counts as the longest.
fn seconds(
    member: &'static str,
    given: Option<&Given<f64>>,
    field: Field,
    least: f64,
) -> Result<Option<Duration>, Invalid> {
    let bad = || invalid(member, "it is no number of seconds, or too small");
    let value = match given {
        Some(Given(value)) => (*value).ok_or_else(bad)?,
        None => match field.0? {
            None => return Ok(None),
            Some(text) => text.parse::<f64>().map_err(|_| bad())?,
        },
    };
    if !value.is_finite() || value < least {
        return Err(bad());
    }
    Ok(Some(Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX)))
}

#[cfg(test)]
mod tests;
