//! Tokens as a CUDA graph records them.

use candle_core::{Device, Tensor};
use comoe_core::{ExpertCache, Result, TokenOutcome};
use cudarc::driver::{CudaGraph, sys};

/// What `run` enqueues on the device's stream, as a graph whose launches free what it allocates, and what `run` returned.
pub(crate) fn captured<R>(device: &Device, run: impl FnOnce() -> R) -> (CudaGraph, R) {
    let stream = device.as_cuda_device().expect("cuda").cuda_stream();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).expect("capture");
    let result = run();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    (stream.end_capture(flags).expect("capture").expect("a graph"), result)
}

/// One token of one row whose steps, which `run` makes or replays, the device drives, and which is done at once.
pub(crate) fn driven_token(cache: &ExpertCache, top_k: usize, run: impl FnOnce()) {
    let mut token = cache.begin_token(1, top_k).expect("a token");
    assert!(token.is_on_device());
    run();
    assert_eq!(token.end().expect("a token"), TokenOutcome::Done);
}

/// One token through all layers: a layer's result is the next one's input. `ids` and `weights` `[1, top_k]`.
pub(crate) fn through(cache: &ExpertCache, x: &Tensor, ids: &[Tensor], weights: &Tensor) -> Result<Tensor> {
    let mut y = x.clone();
    for (layer, ids) in ids.iter().enumerate() {
        y = cache.layer(layer).forward(&y, ids, weights)?;
    }
    Ok(y)
}
