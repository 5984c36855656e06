//! Which tools may be called at all: globs on their names.

use std::str::Chars;

/// The policy of one upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    allow: Vec<String>,
    deny: Vec<String>,
}

impl Default for Policy {
    /// Every tool may be called.
    fn default() -> Self {
        Self { allow: vec!["*".into()], deny: Vec::new() }
    }
}

impl Policy {
    /// A tool may be called if a glob of `allow` matches its name and none of `deny` does. In a glob `*` is any
    /// characters, also none, and `?` is one; letters count as they are written.
    pub fn new(allow: Vec<String>, deny: Vec<String>) -> Self {
        Self { allow, deny }
    }

    /// Whether the tool may be called.
    pub fn allows(&self, tool: &str) -> bool {
        let one_of = |globs: &[String]| globs.iter().any(|glob| matches(glob, tool));
        one_of(&self.allow) && !one_of(&self.deny)
    }
}

/// Whether the whole name is what the glob says. Goes back to the last `*` only: what an earlier one took can't help.
fn matches(glob: &str, name: &str) -> bool {
    let (mut glob, mut name) = (glob.chars(), name.chars());
    let mut star: Option<(Chars<'_>, Chars<'_>)> = None;
    loop {
        let wanted = glob.next();
        if wanted == Some('*') {
            star = Some((glob.clone(), name.clone()));
            continue;
        }
        match (wanted, name.next()) {
            (None, None) => return true,
            // Every further try would have even less of the name.
            (Some(_), None) => return false,
            (Some(wanted), Some(found)) if wanted == '?' || wanted == found => {}
            _ => {
                let Some((after, from)) = &mut star else { return false };
                from.next();
                (glob, name) = (after.clone(), from.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_whole_names() {
        for (glob, name) in [
            ("*", ""),
            ("*", "anything"),
            ("get_*", "get_"),
            ("get_*", "get_user"),
            ("*_user", "get_user_user"),
            ("a*b*c", "a--b-b-c-c"),
            ("a*b*c", "abc"),
            ("g?t", "gét"),
            ("?", "é"),
            ("**", "x"),
            ("*a*a*a", "aaaa"),
            ("exact", "exact"),
            ("", ""),
        ] {
            assert!(matches(glob, name), "{glob} is {name}");
        }
        for (glob, name) in [
            ("get_*", "xget_user"),
            ("*_user", "get_user_x"),
            ("a*b*c", "acb"),
            ("?", ""),
            ("?", "ab"),
            ("get", "Get"),
            ("get", "gets"),
            ("", "x"),
            ("*a*a*a", "aa"),
            ("[ab]", "a"),
        ] {
            assert!(!matches(glob, name), "{glob} is not {name}");
        }
    }

    #[test]
    fn deny_wins_over_allow_and_what_is_not_allowed_is_denied() {
        let policy = Policy::new(vec!["get_*".into(), "ping".into()], vec!["*secret*".into()]);
        assert!(policy.allows("get_user") && policy.allows("ping"));
        assert!(!policy.allows("get_secrets") && !policy.allows("delete_user"));
        assert!(Policy::default().allows("anything"));
        assert!(!Policy::new(vec![], vec![]).allows("anything"));
    }

    #[test]
    fn a_glob_of_many_stars_on_a_long_name_is_no_trap() {
        let name = "a".repeat(10_000);
        assert!(!matches(&format!("{}b", "*a".repeat(20)), &name));
    }
}
