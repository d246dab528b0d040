//! A cheap key of a checkpoint's content: how a converted file is matched to what it was made from.

use std::fmt;
use std::time::UNIX_EPOCH;

use super::shard::Shard;

/// Samples of each shard's data that go into the key.
const SAMPLES: usize = 8;
/// Bytes of one sample.
const SAMPLE_BYTES: usize = 4096;

/// Identifies the content of a set of shards without reading all of it.
///
/// Hashes, for each shard in order: file name, length, modification time, the whole header (names, types, shapes),
/// and 8 samples of 4 KiB spread evenly over the data. A file that is replaced, edited by any tool, or retrained in
/// place gives another key; only a change that keeps the length and the modification time and misses all samples
/// goes unseen. Copying a model without its modification times costs one new conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Fingerprint(u128);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Fingerprint {
    /// The key of `shards`.
    pub(super) fn of(shards: &[Shard]) -> Self {
        let mut hash = Fnv::new();
        for shard in shards {
            let bytes = shard.bytes();
            hash.field(shard.path().file_name().unwrap_or_default().as_encoded_bytes());
            hash.field(&(bytes.len() as u64).to_le_bytes());
            let modified = shard.modified().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
            hash.field(&modified.map_or(0, |t| t.as_nanos()).to_le_bytes());
            let (header, data) = bytes.split_at(shard.data_start());
            hash.field(header);
            let last = data.len().saturating_sub(SAMPLE_BYTES);
            for sample in 0..SAMPLES {
                let start = (last as u128 * sample as u128 / (SAMPLES as u128 - 1)) as usize;
                hash.field(&data[start..data.len().min(start + SAMPLE_BYTES)]);
            }
        }
        Self(hash.0)
    }

    /// The key of the same shards read in a certain way.
    pub(super) fn with(self, recipe: &[u8]) -> Self {
        let mut hash = Fnv::new();
        hash.field(&self.0.to_le_bytes());
        hash.field(recipe);
        Self(hash.0)
    }
}

/// FNV-1a of 128 bits (Fowler, Noll, Vo): the same on every machine and in every release, which the standard
/// library's hashers do not promise. Not proof against forgery, and nothing here needs that.
struct Fnv(u128);

impl Fnv {
    fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    /// Adds a field and its length, so that neighbouring fields cannot run into each other.
    fn field(&mut self, bytes: &[u8]) {
        let length = (bytes.len() as u64).to_le_bytes();
        for byte in length.iter().chain(bytes) {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul((1 << 88) + 0x13b);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;
    use std::time::Duration;

    use safetensors::Dtype;

    use super::super::testing::Shards;
    use super::*;

    fn key(path: &Path) -> String {
        Fingerprint::of(&[Shard::open(path).unwrap()]).to_string()
    }

    #[test]
    fn any_change_gives_another_key_and_no_change_the_same() {
        let made = Shards::new().with("m.safetensors", "x", Dtype::U8, &[40_000], &[0; 40_000]).write();
        let path = made.path().join("m.safetensors");
        let before = key(&path);
        assert_eq!(key(&path), before);
        assert_eq!(before.len(), 32);
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        let restore = |t| File::options().write(true).open(&path).unwrap().set_modified(t).unwrap();

        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() = 1;
        std::fs::write(&path, &bytes).unwrap();
        restore(time);
        assert_ne!(key(&path), before, "a sampled byte");

        *bytes.last_mut().unwrap() = 0;
        std::fs::write(&path, &bytes).unwrap();
        restore(time);
        assert_eq!(key(&path), before, "as it was");
        restore(time + Duration::from_secs(1));
        assert_ne!(key(&path), before, "modification time");
        restore(time);

        let renamed = made.path().join("n.safetensors");
        std::fs::rename(&path, &renamed).unwrap();
        assert_ne!(key(&renamed), before, "name");
        let shard = [Shard::open(&renamed).unwrap()];
        assert_ne!(Fingerprint::of(&shard), Fingerprint::of(&shard).with(b"recipe"));
    }

    #[test]
    fn matches_the_published_fnv_vectors() {
        // FNV-1a 128 of "a" is d228cb696f1a8caf78912b704e4a8964; a field adds its length first, so feed it raw.
        let mut hash = Fnv::new();
        hash.0 = (hash.0 ^ u128::from(b'a')).wrapping_mul((1 << 88) + 0x13b);
        assert_eq!(hash.0, 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}
