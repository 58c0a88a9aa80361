//! CUDA graphs: call sequences captured once and replayed as one launch.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use ort_core::Result;

use super::context::Counts;
use super::{Call, Context, Stream};

/// An instantiated graph. The modules of its functions must stay loaded, and its memory allocated,
/// as long as it is launched.
#[derive(Debug)]
pub(crate) struct Graph {
    context: Arc<Context>,
    graph: sys::CUgraphExec,
}

// SAFETY: driver handles may be used from any thread, as for `Context`.
unsafe impl Send for Graph {}
// SAFETY: as for `Context`.
unsafe impl Sync for Graph {}

impl Graph {
    /// Captures calls on a stream that is used for nothing else.
    pub(crate) fn capture(stream: &Stream, calls: &[Call]) -> Result<Graph> {
        let context = &stream.context;
        context.enter()?;
        // The default mode would make allocations by other threads fail during the capture.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live and is not capturing: each capture ends below.
        let code = unsafe { sys::cuStreamBeginCapture_v2(stream.stream, mode) };
        context.check(code, "cuStreamBeginCapture")?;
        // The capture must end even if a call failed, or the stream would stay in capture mode.
        let asked = calls.iter().try_for_each(|call| stream.ask(call));
        let mut captured = Captured(ptr::null_mut());
        // SAFETY: this thread began the capture. The driver writes one handle, which `Captured`
        // destroys.
        let code = unsafe { sys::cuStreamEndCapture(stream.stream, &mut captured.0) };
        let ended = context.check(code, "cuStreamEndCapture");
        asked.and(ended)?;
        let mut graph = ptr::null_mut();
        // SAFETY: the captured graph is live. The driver writes one handle, which `Drop` destroys.
        // There are no flags.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut graph, captured.0, 0) };
        context.check(code, "cuGraphInstantiate")?;
        Counts::add(&context.counts.captures);
        Ok(Graph { context: context.clone(), graph })
    }

    /// Replays the graph on a stream.
    pub(crate) fn launch(&self, stream: &Stream) -> Result<()> {
        self.context.enter()?;
        Counts::add(&self.context.counts.replays);
        // SAFETY: graph and stream are live. Whoever keeps the graph keeps its memory and modules:
        // `Queue::close` drops all graphs before the modules go.
        self.context.check(unsafe { sys::cuGraphLaunch(self.graph, stream.stream) }, "cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the graph is live; the driver lets a running launch finish first.
            let _ = unsafe { sys::cuGraphExecDestroy(self.graph) };
        }
    }
}

/// A captured graph, which is not needed once it is instantiated.
struct Captured(sys::CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the handle is live, and it belongs to this thread's current context.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}
