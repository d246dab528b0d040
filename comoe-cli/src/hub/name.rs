//! A model's name on the hub.

use std::fmt;
use std::str::FromStr;

use super::error::Error;

/// The revision when none is given.
const MAIN: &str = "main";
/// Longest part of a name that the hub takes.
const LONGEST: usize = 96;

/// `ORG/NAME` at a revision: a branch, a tag or a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RepoName {
    /// `ORG/NAME`.
    pub(crate) id: String,
    pub(crate) revision: String,
}

impl FromStr for RepoName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = |reason| Error::BadName { text: text.to_owned(), reason };
        let (id, revision) = text.split_once('@').unwrap_or((text, MAIN));
        let parts: Vec<&str> = id.split('/').collect();
        if parts.len() != 2 {
            return Err(bad("it needs exactly one slash"));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        for part in parts {
            if part.is_empty() || part.len() > LONGEST {
                return Err(bad("both parts need 1 to 96 letters"));
            }
            if !part.chars().all(allowed) {
                return Err(bad("only letters, digits and -_. occur in names"));
            }
            // The hub's own rules; they also keep a name from leaving the cache folder, where / becomes --.
            if part.starts_with(['.', '-'])
                || part.ends_with(['.', '-'])
                || part.contains("..")
                || part.contains("--")
            {
                return Err(bad("names do not begin or end with . or -, and have no .. or -- in them"));
            }
        }
        let in_revision = |c: char| allowed(c) || matches!(c, '/' | '+');
        let outside = revision.split('/').any(|part| part.is_empty() || part.starts_with('.'));
        if outside || !revision.chars().all(in_revision) {
            return Err(bad("what follows @ is a branch, a tag or a commit"));
        }
        Ok(Self { id: id.to_owned(), revision: revision.to_owned() })
    }
}

impl fmt::Display for RepoName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)?;
        if self.revision == MAIN { Ok(()) } else { write!(f, "@{}", self.revision) }
    }
}

/// Whether `text` is a commit, as the hub names them.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_revisions_are_told_apart() {
        let name: RepoName = "Org-1/Model_2.5-A3B".parse().unwrap();
        assert_eq!((name.id.as_str(), name.revision.as_str()), ("Org-1/Model_2.5-A3B", "main"));
        let name: RepoName = "a/b@refs/pr/7".parse().unwrap();
        assert_eq!((name.id.as_str(), name.revision.as_str()), ("a/b", "refs/pr/7"));
        assert_eq!(name.to_string(), "a/b@refs/pr/7");
        assert_eq!("a/b@main".parse::<RepoName>().unwrap().to_string(), "a/b");
    }

    #[test]
    fn what_could_leave_the_cache_or_the_path_is_no_name() {
        for text in [
            "",
            "a",
            "/",
            "a/",
            "/b",
            "a/b/c",
            "../b",
            "a/..",
            "./b",
            "a b/c",
            "a/b@",
            "a/b@../../x",
            "a/b@x y",
            "a/b@/x",
            "a--b/c",
            "-a/b",
            "a/b.",
            "a/b?x=1",
            "a/b#c",
            "ä/b",
            "a/b@.hidden",
            "a/b@x//y",
            "a\\b/c",
        ] {
            assert!(text.parse::<RepoName>().is_err(), "{text:?}");
        }
        let long = format!("a/{}", "b".repeat(97));
        assert!(long.parse::<RepoName>().is_err());
    }

    #[test]
    fn commits_are_forty_hexadecimal_digits() {
        assert!(is_commit("0123456789abcdef0123456789abcdef01234567"));
        assert!(!is_commit("main") && !is_commit("0123456789ABCDEF0123456789abcdef01234567"));
    }
}
