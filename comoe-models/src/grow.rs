//! A sequence that outgrows what was planned for it: its KV cache takes the bytes from the experts' slots, and gives them
//! back when it is cut.

use candle_core::Device;
use comoe_core::{cuda_give_back, cuda_memory};

use crate::blocks::kv_cache::KvCache;
use crate::decoder::Decoder;
use crate::error::{Error, Result};

/// A cache grows by at least this part of itself, so that it moves seldom.
const STEP: usize = 2;
/// And to a multiple of so many tokens.
const ROUND: usize = 64;
/// Slots give up at least so many bytes for a step that found too little: the driver's pool takes memory in large pieces.
const LEAST_WAY: u64 = 256 << 20;

impl Decoder {
    /// Makes room for `tokens` tokens in all in `kv`, and for some more, if it has none. The bytes come from the experts'
    /// slots, byte for byte; where every expert has a slot and memory has no limit set, slots leave only when there is none.
    /// What is in the cache stays as it is, at other addresses.
    ///
    /// # Errors
    /// [`Error::ContextTooLarge`] beyond [`Self::most_context`]; [`Error::ContextCannotGrow`] when there is no memory for it
    /// and the slots cannot give up any more. The cache then holds what it held.
    pub fn make_room(&self, kv: &mut KvCache, tokens: usize) -> Result<()> {
        let (context, most) = (kv.capacity(), self.most_context());
        if tokens <= context {
            return Ok(());
        }
        if tokens > most {
            return Err(Error::ContextTooLarge { asked: tokens, available: most });
        }
        let wanted = (context + context / STEP).max(tokens).next_multiple_of(ROUND).min(most);
        // Where slots cannot give up so much: less, but not token by token before there is no more.
        let mut grown = self.grow(kv, wanted);
        for less in [tokens.next_multiple_of(ROUND), tokens] {
            if grown.is_err() && less < wanted {
                grown = self.grow(kv, less);
            }
        }
        grown.map_err(|e| Error::ContextCannotGrow { context, tokens, reason: e.to_string() })
    }

    /// Cuts `kv` back to the planned context, if it has grown and what it holds fits, and gives the experts their memory
    /// back.
    ///
    /// # Errors
    /// When the device fails.
    pub fn cut_back(&self, kv: &mut KvCache) -> Result<()> {
        let is_cut = kv.capacity() <= self.context() && kv.lent == 0;
        if is_cut || kv.len() > self.context() {
            return Ok(());
        }
        match kv.set_capacity(self.context(), || self.reclaim()) {
            // A layer is there twice while it moves: another time, then.
            Err(e) if e.is_out_of_memory() => return Ok(()),
            moved => moved?,
        }
        self.return_lent(kv, 0)
    }

    /// Bytes that a KV cache for `capacity` tokens takes more than `kv`, with the rotary tables.
    fn more_bytes(&self, kv: &KvCache, capacity: usize) -> u64 {
        let element = self.dtype().size_in_bytes();
        let of_kv = (capacity - kv.capacity()) * self.plan().kv_bytes_per_token(element, self.kv_format());
        (of_kv + self.more_rope_bytes(capacity)) as u64
    }

    fn grow(&self, kv: &mut KvCache, capacity: usize) -> Result<()> {
        // A layer is there twice while it moves.
        let twice = kv.largest_layer() as u64 * capacity as u64 / kv.capacity().max(1) as u64;
        let (more, before) = (self.more_bytes(kv, capacity), kv.lent);
        let grown = match self.is_short() {
            true => self.lend(kv, more + twice).and_then(|()| self.move_to(kv, capacity)),
            false => self.move_to(kv, capacity).or_else(|_| {
                let free = match self.device() {
                    Device::Cuda(_) => cuda_memory(self.device())?.0,
                    _ => 0,
                };
                self.lend(kv, (more + twice).saturating_sub(free))?;
                self.move_to(kv, capacity)
            }),
        };
        let kept = before + if grown.is_ok() { more.min(kv.lent - before) } else { 0 };
        self.return_lent(kv, kept)?;
        grown
    }

    fn move_to(&self, kv: &mut KvCache, capacity: usize) -> Result<()> {
        let before = kv.capacity();
        let moved = self.grow_ropes(capacity).and_then(|()| kv.set_capacity(capacity, || self.reclaim()));
        if moved.is_err() {
            // As far as that goes: a layer that stays larger than it counts is no harm.
            let _ = kv.set_capacity(before, || self.reclaim());
        }
        moved
    }

    /// After `error`, memory of a GPU that ran out under a step's activations: has slots give up as much as the largest step's
    /// are planned to take, or what they can, for good. `false` where they can give up nothing.
    pub(crate) fn make_way(&self, error: &Error) -> Result<bool> {
        self.reclaim()?;
        let planned = self.memory_plan().map_or(0, |plan| plan.device.workspace);
        let lent = match self.experts().lend(planned.max(LEAST_WAY)) {
            Err(comoe_core::Error::NothingToLend { most, .. }) if most > 0 => self.experts().lend(most),
            lent => lent,
        };
        match lent {
            Ok(force) => {
                tracing::warn!("{error}: the experts' slots made room, {} are left", force.slots);
                Ok(true)
            }
            Err(comoe_core::Error::NothingToLend { .. } | comoe_core::Error::FixedSlots { .. }) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Whether memory is short: it has a limit, or experts have fewer slots than there are experts.
    fn is_short(&self) -> bool {
        self.is_budgeted() || self.experts().slots_in_force().most < self.experts().directory().len()
    }

    fn lend(&self, kv: &mut KvCache, bytes: u64) -> Result<()> {
        match self.experts().lend(bytes) {
            Ok(_) => kv.lent += bytes,
            // Perhaps there is room all the same.
            Err(comoe_core::Error::FixedSlots { .. }) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(())
    }

    /// Gives the slots back what they gave up, but for `kept` bytes.
    fn return_lent(&self, kv: &mut KvCache, kept: u64) -> Result<()> {
        let back = kv.lent - kept;
        kv.lent = kept;
        if back > 0 {
            self.experts().take_back(back)?;
        }
        Ok(())
    }

    /// Gives memory that tensors have left back to the device, so that slots, or larger tensors, can have it.
    fn reclaim(&self) -> Result<()> {
        Ok(cuda_give_back(self.device())?)
    }
}
