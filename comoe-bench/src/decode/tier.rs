//! RAM that holds fewer experts than there are, in front of a packed store on disk.

use std::sync::Arc;

use candle_core::Device;
use comoe_core::ExpertStore;
use comoe_core::machine::gb_per_s;
use comoe_core::store::{TierOptions, TierStats, TieredSource};
use serde::Serialize;

use super::Decode;
use crate::error::{Error, Result};

/// Where experts were when they were needed, in numbers a token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tiers {
    /// Experts that RAM holds, on the CPU beside the slots.
    pub ram_experts: usize,
    /// In a slot.
    pub hot: f64,
    /// In RAM.
    pub warm: f64,
    /// On disk.
    pub cold: f64,
    /// Of the cold ones, those that had been read when they were needed.
    pub early: f64,
    /// GB/s of reads while some were under way.
    pub disk_gb_per_s: f64,
    /// Time that slots waited for reads, added up, ms.
    pub waited_ms: f64,
}

impl Tiers {
    pub(super) fn of(tier: &TierStats, hits: u64, tokens: usize) -> Self {
        let each = |n: u64| n as f64 / tokens.max(1) as f64;
        Self {
            ram_experts: tier.places,
            hot: each(hits),
            warm: each(tier.warm),
            cold: each(tier.cold),
            early: each(tier.early),
            disk_gb_per_s: gb_per_s(tier.read_bytes, tier.reading),
            waited_ms: tier.waited.as_secs_f64() * 1e3 / tokens.max(1) as f64,
        }
    }
}

impl Decode {
    /// What [`Self::ram`] leaves beside the slots, in front of `store`.
    pub(super) fn tier(&self, store: &ExpertStore, device: &Device) -> Result<Option<Arc<TieredSource>>> {
        let Some(ram) = self.ram else { return Ok(None) };
        let bad = |expected: String| Error::BadOption { option: "--ram", value: ram.to_string(), expected };
        if self.store.is_none() {
            return Err(bad("it wants experts on disk: give --store FILE".to_owned()));
        }
        let record = store.directory().largest_record() as u64;
        let slots = self.slots_per_layer.unwrap_or(self.shape.experts) * self.shape.layers;
        let in_slots = if device.is_cpu() { slots as u64 * record } else { 0 };
        let places = (ram.saturating_sub(in_slots) / record) as usize;
        if places == 0 {
            return Err(bad(format!(
                "{slots} slots take {in_slots} bytes of it, and an expert beside them {record}"
            )));
        }
        let options = TierOptions { places, policy: self.policy, top_k: self.shape.top_k };
        Ok(Some(Arc::new(TieredSource::new(store.source(), options)?)))
    }
}
