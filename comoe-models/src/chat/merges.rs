//! Merges that are found anew from a table of tokens: how long that may take.

/// Most that the squares of all tokens' lengths may sum up to: finding the parts of a token looks at its every stretch.
/// Published tables are below 2^23.
const MOST: usize = 1 << 26;

/// Sees that the merges of tokens of these lengths are found in a few seconds.
pub(super) fn check_lengths(lengths: impl Iterator<Item = usize>) -> Result<(), &'static str> {
    let mut left = MOST;
    for length in lengths {
        let taken = length.checked_mul(length).and_then(|square| left.checked_sub(square));
        left = taken.ok_or("has tokens that are too long to be a model's")?;
    }
    Ok(())
}
