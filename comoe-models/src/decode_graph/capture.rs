//! A step as one CUDA graph.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaGraph, CudaStream, DriverError};

use crate::error::{Error, Result};

/// What was enqueued once, to be enqueued again.
pub(super) struct Captured {
    graph: CudaGraph,
    /// Kernels, copies and allocations in it.
    pub(super) nodes: usize,
}

// SAFETY: the driver's graphs belong to no thread; they want one caller at a time, and every use goes through
// `&mut self`.
unsafe impl Send for Captured {}

pub(super) fn doing(what: &str) -> impl Fn(DriverError) -> Error {
    move |error| comoe_core::Error::Cuda { what: what.to_owned(), reason: error.to_string() }.into()
}

impl Captured {
    /// Records what `enqueue` puts on `stream`; nothing of it runs.
    ///
    /// # Errors
    /// Those of `enqueue`, and the driver's when something in it cannot be recorded.
    pub(super) fn of(stream: &Arc<CudaStream>, enqueue: impl FnOnce() -> Result<()>) -> Result<Self> {
        // Other threads may go on allocating and copying meanwhile.
        stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(doing("recording a step"))?;
        let enqueued = enqueue();
        // Also after an error: the stream must not stay in capture.
        let graph = stream.end_capture(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
        enqueued?;
        let graph = graph.map_err(doing("recording a step"))?;
        let graph =
            graph.ok_or_else(|| Error::Candle(candle_core::Error::msg("recording a step gave nothing")))?;
        graph.upload().map_err(doing("preparing a graph"))?;
        let mut nodes = 0;
        // SAFETY: the graph lives, and with a null array the call only counts.
        unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut nodes) }
            .result()
            .map_err(doing("counting a graph's nodes"))?;
        Ok(Self { graph, nodes })
    }

    /// Enqueues it on the stream it was recorded from.
    pub(super) fn launch(&mut self) -> std::result::Result<(), DriverError> {
        self.graph.launch()
    }
}
