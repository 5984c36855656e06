//! Durations and sizes, with errors that say how they are written.

use std::time::Duration;

use bytesize::ByteSize;

/// Longer is a slip; it also keeps sums with a moment in range.
const LONGEST: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
/// Larger is a slip: no machine this runs on holds it.
const LARGEST: u64 = 1 << 40;

/// `"250ms"`, `"1h 30m"`; `"0"` is none at all.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    const FORM: &str = "a duration is a number with its unit, such as \"250ms\", \"30s\" or \"1h 30m\"";
    let text = text.trim();
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    if text.is_empty() || text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(FORM.into());
    }
    let duration = humantime::parse_duration(text).map_err(|error| format!("{FORM} ({error})"))?;
    if duration > LONGEST { Err("longer than ten years".into()) } else { Ok(duration) }
}

/// `"4MiB"`, `"500kB"`.
pub(super) fn size(text: &str) -> Result<usize, String> {
    const FORM: &str = "a size is a number with its unit, such as \"64KiB\", \"4MiB\" or \"1GB\"";
    let text = text.trim();
    if !text.starts_with(|c: char| c.is_ascii_digit()) || !text.ends_with(|c: char| c.is_ascii_alphabetic()) {
        return Err(FORM.into());
    }
    // bytesize's own words name parser states, not what was wrong.
    let bytes = text.parse::<ByteSize>().map_err(|_| FORM.to_owned())?.as_u64();
    if bytes == 0 {
        return Err("must be larger than 0".into());
    }
    if bytes > LARGEST {
        return Err("larger than 1TiB".into());
    }
    usize::try_from(bytes).map_err(|_| "larger than this machine can address".into())
}
