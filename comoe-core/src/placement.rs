//! Which of several devices owns which record. Pure: the same weights give the same owners, always.

use crate::store::{Directory, RecordIndex};

/// An owner for each record of a directory.
///
/// Each device has a part of every layer that is proportional to its weight (its slots), so that every layer step is work
/// for all of them and misses go over all links. Records are dealt out one by one, each to the device that is furthest
/// behind its share; where a layer begins moves on by one expert from layer to layer, so that an expert number means
/// nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    devices: usize,
    /// By record: its owner, and its number among the owner's records of that layer.
    of: Vec<(u32, u32)>,
}

impl Placement {
    /// Owners for the records of `directory`: device `d` has a share of `weights[d]` of their sum. Where all weights are 0
    /// they count as equal.
    ///
    /// # Panics
    /// Without a device.
    pub fn new(directory: &Directory, weights: &[u64]) -> Self {
        assert!(!weights.is_empty(), "no device");
        let weights = match weights.iter().all(|&w| w == 0) {
            true => &vec![1; weights.len()],
            false => weights,
        };
        let sum: i128 = weights.iter().map(|&w| i128::from(w)).sum();
        // How far each device is behind its share, in parts of a record of which `sum` are one.
        let mut behind = vec![0i128; weights.len()];
        let mut of = vec![(0, 0); directory.len()];
        for (ordinal, layer) in directory.layers().iter().enumerate() {
            for place in 0..layer.experts {
                let expert = (place + ordinal) % layer.experts;
                behind.iter_mut().zip(weights).for_each(|(b, &w)| *b += i128::from(w));
                // Of equals the first; who has no weight gets nothing.
                let most = (0..weights.len())
                    .filter(|&d| weights[d] > 0)
                    .max_by_key(|&d| (behind[d], std::cmp::Reverse(d)));
                let owner = most.unwrap_or(0);
                behind[owner] -= sum;
                of[layer.first as usize + expert].0 = owner as u32;
            }
            let mut next = vec![0; weights.len()];
            for (owner, number) in &mut of[layer.first as usize..][..layer.experts] {
                *number = next[*owner as usize];
                next[*owner as usize] += 1;
            }
        }
        Self { devices: weights.len(), of }
    }

    /// How many devices there are.
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// Who owns `record`.
    pub fn owner(&self, record: RecordIndex) -> usize {
        self.of[record.0 as usize].0 as usize
    }

    /// The record's number among its owner's records of the same layer.
    pub fn number(&self, record: RecordIndex) -> u32 {
        self.of[record.0 as usize].1
    }

    /// How many records `device` owns.
    pub fn owned(&self, device: usize) -> usize {
        self.of.iter().filter(|(owner, _)| *owner as usize == device).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(state: &mut u64) -> u64 {
        // SplitMix64 (Steele et al. 2014, OOPSLA).
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    #[test]
    fn every_device_has_its_share_of_all_records_and_of_every_layer() {
        let mut state = 7;
        for case in 0..300 {
            let devices = 1 + draw(&mut state) as usize % 5;
            let layers = 1 + draw(&mut state) as usize % 6;
            let sizes: Vec<usize> = (0..layers).map(|_| 1 + draw(&mut state) as usize % 40).collect();
            let directory = Directory::new(sizes.iter().enumerate().map(|(l, &n)| (2 * l, n, 512))).unwrap();
            let most = [1, 3, 100, 1 << 40][case % 4];
            let mut weights: Vec<u64> = (0..devices).map(|_| draw(&mut state) % (most + 1)).collect();
            weights[case % devices] += 1;
            let sum: u64 = weights.iter().sum();
            let placement = Placement::new(&directory, &weights);
            assert_eq!(placement, Placement::new(&directory, &weights));
            let mut all = 0;
            for (d, &w) in weights.iter().enumerate() {
                let share = |n: usize| n as f64 * w as f64 / sum as f64;
                let off = placement.owned(d) as f64 - share(directory.len());
                assert!(off.abs() < 1.0 + 1e-6, "{weights:?}, device {d}: {off} off");
                assert!(w > 0 || placement.owned(d) == 0);
                for layer in directory.layers() {
                    let records = layer.first..layer.first + layer.experts as u32;
                    let mine: Vec<_> =
                        records.map(RecordIndex).filter(|&r| placement.owner(r) == d).collect();
                    let off = mine.len() as f64 - share(layer.experts);
                    assert!(off.abs() < 2.0, "{weights:?}, device {d}, layer of {}: {off}", layer.experts);
                    // Numbers are those that a part of the directory gives them.
                    assert!(mine.iter().enumerate().all(|(n, &r)| placement.number(r) == n as u32));
                }
                all += placement.owned(d);
            }
            assert_eq!(all, directory.len());
        }
    }

    #[test]
    fn who_has_a_slot_for_every_record_of_its_share_keeps_it_so() {
        let directory = Directory::new([(0, 8, 512), (1, 8, 512), (2, 5, 512)]).unwrap();
        for first in 0..=21 {
            let placement = Placement::new(&directory, &[first, 21 - first]);
            assert_eq!(placement.owned(0), first as usize);
        }
    }

    #[test]
    fn neighbours_go_to_different_devices_and_layers_begin_elsewhere() {
        let directory = Directory::new([(0, 4, 512), (1, 4, 512)]).unwrap();
        let placement = Placement::new(&directory, &[3, 3]);
        let owners: Vec<_> = (0..8).map(|r| placement.owner(RecordIndex(r))).collect();
        assert_eq!(owners, [0, 1, 0, 1, 1, 0, 1, 0]);
        assert_eq!(placement.devices(), 2);
        assert_eq!(Placement::new(&directory, &[0, 0]), placement, "no weight is equal weight");
    }
}
