//! Where a decode step begins and ends.

use std::sync::Arc;

use candle_core::DType;
use comoe_core::Result;
use cudarc::driver::CudaStream;

use super::norm::rounded;
use super::{DecodeKernels, dtype_code, grid, tokens_of, within};

/// Columns of a block.
const COLUMNS: usize = 8 * 128;

/// Arguments of [`DecodeKernels::embed`]; addresses are device memory.
#[derive(Debug, Clone, Copy)]
pub struct EmbedArgs {
    /// `[tokens]`, u32.
    pub ids: u64,
    /// `[vocab, width]`
    pub table: u64,
    /// Factor on the rows; 1 is none.
    pub scale: f32,
    /// Result `[tokens, width]`.
    pub out: u64,
    /// Tokens, 1 to 32.
    pub tokens: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Columns of the table.
    pub width: usize,
    /// F32, BF16 or F16.
    pub dtype: DType,
    /// One u32, set to 1 + a token whose id the table does not have (its row becomes zeros), else left alone.
    pub error: u64,
}

/// Arguments of [`DecodeKernels::advance`]; addresses are device memory, or host memory where it says so. All are u32.
#[derive(Debug, Clone, Copy)]
pub struct AdvanceArgs {
    /// What was sampled.
    pub token: u64,
    /// `[errors_len]` error words, or 0.
    pub errors: u64,
    /// Error words.
    pub errors_len: usize,
    /// Where the next step finds its token.
    pub input: u64,
    /// Position of the step's token; becomes the next step's.
    pub position: u64,
    /// Steps so far; counts on.
    pub step: u64,
    /// `[history_len]` ids by position, or 0: the sampled one is written at its own.
    pub history: u64,
    /// Room in the history.
    pub history_len: usize,
    /// Records that the experts' cache has missed so far, or 0.
    pub missed: u64,
    /// `[ring_len]` entries of three words: token, 1 + which error word is set first (or 0), and `missed`: page-locked host memory as
    /// the device addresses it. Step `s` goes to entry `s % ring_len`, so the host must not have more steps under way than that.
    pub ring: u64,
    /// Entries in the ring.
    pub ring_len: usize,
}

/// As kernels/embed.cu has them.
#[repr(C)]
#[derive(Clone, Copy)]
struct Embed {
    ids: u64,
    table: u64,
    out: u64,
    error: u64,
    vocab: u32,
    width: u32,
    dtype: u32,
    scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Advance {
    token: u64,
    errors: u64,
    input: u64,
    position: u64,
    step: u64,
    history: u64,
    missed: u64,
    ring: u64,
    ring_len: u32,
    history_len: u32,
    errors_len: u32,
    pad: u32,
}

impl DecodeKernels {
    /// Enqueues the look-up of the tokens' rows in the embedding table.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for sizes or a dtype that the kernel cannot do,
    /// [`comoe_core::Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    pub unsafe fn embed(&self, stream: &Arc<CudaStream>, args: &EmbedArgs) -> Result<()> {
        let device = Embed {
            ids: args.ids,
            table: args.table,
            out: args.out,
            error: args.error,
            vocab: within("rows of an embedding table", args.vocab, 1, u32::MAX as usize)?,
            width: within("columns of an embedding table", args.width, 1, 1 << 24)?,
            dtype: dtype_code("an embedding table", args.dtype)?,
            scale: rounded(args.scale, args.dtype),
        };
        let tokens = tokens_of(args.tokens)? as usize;
        let config = grid(args.width.div_ceil(COLUMNS), tokens, 1, COLUMNS / 8, 0);
        // SAFETY: `Embed` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("embed", stream, &self.embed, config, &device) }
    }

    /// Enqueues the end of a step of one token: tells the host what was sampled, and makes it the next step's input, so
    /// that steps can follow each other without the host. With an error word set, only the host is told: count, position
    /// and input stay, and the steps behind it do the same again, into the same entry.
    ///
    /// # Errors
    /// [`comoe_core::Error::BadArgument`] for a ring without room, [`comoe_core::Error::Device`] when the launch fails.
    ///
    /// # Safety
    /// Every address in `args` must be valid on the stream's GPU, for the sizes documented, until the kernel is done.
    pub unsafe fn advance(&self, stream: &Arc<CudaStream>, args: &AdvanceArgs) -> Result<()> {
        let device = Advance {
            token: args.token,
            errors: args.errors,
            input: args.input,
            position: args.position,
            step: args.step,
            history: args.history,
            missed: args.missed,
            ring: args.ring,
            ring_len: within("entries of a token ring", args.ring_len, 1, 1 << 30)?,
            history_len: within("room in a history", args.history_len, 0, 1 << 30)?,
            errors_len: within("error words", args.errors_len, 0, 1 << 20)?,
            pad: 0,
        };
        // SAFETY: `Advance` is the kernel's struct; the addresses are the caller's promise.
        unsafe { self.launch("advance", stream, &self.advance, grid(1, 1, 1, 32, 0), &device) }
    }
}

#[cfg(test)]
mod tests {
    super::super::mirrored!((super::Embed, super::Advance), 48 + 80);
}
