//! Traces made up for tests.

use super::{Choice, Phase, Token, Trace, TraceBuilder, TraceInfo};
use crate::store::Directory;

/// What a made-up trace was recorded from: layers as (number, experts), records of 512 bytes.
pub(crate) fn info(layers: &[(usize, usize)], top_k: usize) -> TraceInfo {
    let directory = Directory::new(layers.iter().map(|&(layer, experts)| (layer, experts, 512))).unwrap();
    TraceInfo { model: "made up".into(), top_k, directory }
}

/// A trace of made-up choices: `tokens[t]` gives turn, whether it was generated, and the choices of each layer.
pub(crate) fn made(info: &TraceInfo, tokens: &[(u32, bool, Vec<Vec<u32>>)]) -> Trace {
    let mut builder = TraceBuilder::new(info.clone());
    for (turn, decode, layers) in tokens {
        let phase = if *decode { Phase::Decode } else { Phase::Prompt };
        builder.token(Token { turn: *turn, phase }, |l| Choice { experts: &layers[l], ..Choice::default() });
    }
    builder.finish()
}
