//! What is said where RAM is short and nobody asked for less of it: [`CacheOptions::ram`].

use super::options::{CacheOptions, Capacity};
use crate::machine;
use crate::stats::human_bytes;
use crate::store::ExpertStore;

/// What to say where RAM is short and nothing was asked for.
pub(super) fn advice(options: &CacheOptions, store: &ExpertStore) -> Option<String> {
    let (total, available) = (store.directory().total_bytes(), machine::ram_available()?);
    advice_for(options, total, available).filter(|_| store.is_in_files())
}

fn advice_for(options: &CacheOptions, total: u64, available: u64) -> Option<String> {
    let short = options.ram.is_none() && total > available && options.capacity != Capacity::All;
    short.then(|| {
        format!(
            "the experts take {} and {} of RAM are available, so some are read from disk when they are needed: {}M of RAM \
             for those that are used most (--ram) has them read together, and ahead of use where they are prefetched",
            human_bytes(total),
            human_bytes(available),
            // What is left is for everything else.
            (available / 4 * 3) >> 20
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_ram_is_told_where_nothing_was_asked_for() {
        let quarter = CacheOptions { capacity: Capacity::Fraction(0.25), ..CacheOptions::default() };
        let text = advice_for(&quarter, 9 << 30, 4 << 30).unwrap();
        assert!(text.contains("9.0 GiB and 4.0 GiB") && text.contains("3072M"), "{text}");
        assert_eq!(advice_for(&quarter, 4 << 30, 4 << 30), None);
        assert_eq!(advice_for(&CacheOptions { ram: Some(1 << 30), ..quarter }, 9 << 30, 4 << 30), None);
    }
}
