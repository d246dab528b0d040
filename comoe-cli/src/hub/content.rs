//! What a file's content is known by: the hub names it with a hash, and so does the cache.

use std::fmt;
use std::fs::File;
use std::io::Read;

use ring::digest::{self, Context};

/// The hash of a file's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ContentId {
    /// Of the bytes: large files.
    Sha256(String),
    /// Of git's blob: small files.
    Git(String),
    /// Something that a mirror calls it by, and that cannot be checked.
    Opaque(String),
}

impl ContentId {
    /// The id behind an `ETag`; `None` when it could not be a file's name.
    pub(super) fn from_etag(etag: &str) -> Option<Self> {
        let tag = etag.trim().trim_start_matches("W/").trim_matches('"');
        let hex = tag.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match tag.len() {
            64 if hex => Some(Self::Sha256(tag.to_owned())),
            40 if hex => Some(Self::Git(tag.to_owned())),
            1..=128 if tag.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') => {
                Some(Self::Opaque(tag.to_owned()))
            }
            _ => None,
        }
    }

    /// Name of the blob in the cache.
    pub(super) fn as_str(&self) -> &str {
        match self {
            Self::Sha256(id) | Self::Git(id) | Self::Opaque(id) => id,
        }
    }

    /// Begins to hash a file of `size` bytes.
    pub(super) fn hasher(&self, size: u64) -> Hasher {
        Hasher(match self {
            Self::Sha256(_) => Some(Context::new(&digest::SHA256)),
            Self::Git(_) => {
                let mut context = Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                Some(context)
            }
            Self::Opaque(_) => None,
        })
    }
}

impl fmt::Display for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A hash under way.
pub(super) struct Hasher(Option<Context>);

impl Hasher {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        if let Some(context) = &mut self.0 {
            context.update(bytes);
        }
    }

    /// Hashes what is left of `file`.
    pub(super) fn update_from(&mut self, file: &mut File) -> std::io::Result<()> {
        if self.0.is_none() {
            return Ok(());
        }
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(()),
                n => self.update(&buffer[..n]),
            }
        }
    }

    /// Whether the content is what `id` says; if not, what it is.
    pub(super) fn check(self, id: &ContentId) -> Result<(), String> {
        let Some(context) = self.0 else { return Ok(()) };
        let found: String = context.finish().as_ref().iter().map(|b| format!("{b:02x}")).collect();
        if found == id.as_str() { Ok(()) } else { Err(found) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_git_and_of_the_bytes() {
        // `git hash-object` and `sha256sum` of "hello\n".
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        let sha = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        for id in [git, sha] {
            let id = ContentId::from_etag(&format!("\"{id}\"")).unwrap();
            let mut hasher = id.hasher(6);
            hasher.update(b"hel");
            hasher.update(b"lo\n");
            assert_eq!(hasher.check(&id), Ok(()));
            let mut other = id.hasher(6);
            other.update(b"hello ");
            assert!(other.check(&id).is_err());
        }
    }

    #[test]
    fn an_id_is_a_safe_file_name() {
        let opaque = ContentId::from_etag("W/\"33a64df5-1b\"").unwrap();
        assert_eq!(opaque, ContentId::Opaque("33a64df5-1b".into()));
        assert_eq!(opaque.hasher(1).check(&opaque), Ok(()));
        for bad in ["", "\"\"", "\"../x\"", "\"a/b\"", "\"a b\""] {
            assert_eq!(ContentId::from_etag(bad), None, "{bad}");
        }
    }
}
