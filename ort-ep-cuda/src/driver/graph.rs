//! CUDA graphs: calls that are captured once and asked for again as one.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use ort_core::Result;

use super::context::Counts;
use super::{Call, Context, Stream};

/// Calls as one launch. The modules of its functions must stay loaded, and its memory allocated, as
/// long as it is launched.
#[derive(Debug)]
pub(crate) struct Graph {
    context: Arc<Context>,
    graph: sys::CUgraphExec,
}

// SAFETY: as for the context.
unsafe impl Send for Graph {}
// SAFETY: as for the context.
unsafe impl Sync for Graph {}

impl Graph {
    /// The graph of these calls, captured on a stream that is used for nothing else.
    pub(crate) fn capture(stream: &Stream, calls: &[Call]) -> Result<Graph> {
        let context = &stream.context;
        context.enter()?;
        // Other threads allocate meanwhile.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live, and captures nothing yet.
        let code = unsafe { sys::cuStreamBeginCapture_v2(stream.stream, mode) };
        context.check(code, "cuStreamBeginCapture")?;
        let asked = calls.iter().try_for_each(|call| stream.ask(call));
        let mut captured = Captured(ptr::null_mut());
        // SAFETY: the capture was begun by this thread; writes one handle, which is destroyed
        // below.
        let code = unsafe { sys::cuStreamEndCapture(stream.stream, &mut captured.0) };
        let ended = context.check(code, "cuStreamEndCapture");
        asked.and(ended)?;
        let mut graph = ptr::null_mut();
        // SAFETY: the graph is live; writes one handle, which is destroyed when this is dropped;
        // there are no flags.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut graph, captured.0, 0) };
        context.check(code, "cuGraphInstantiate")?;
        Counts::add(&context.counts.captures);
        Ok(Graph { context: context.clone(), graph })
    }

    /// Asks a stream for all of it.
    pub(crate) fn launch(&self, stream: &Stream) -> Result<()> {
        self.context.enter()?;
        Counts::add(&self.context.counts.replays);
        // SAFETY: both are live. That its memory and modules are still there is what its keeper
        // sees to.
        self.context.check(unsafe { sys::cuGraphLaunch(self.graph, stream.stream) }, "cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: it is live; the driver lets a launch of it end first.
            let _ = unsafe { sys::cuGraphExecDestroy(self.graph) };
        }
    }
}

/// A graph that was captured and is not needed once it is instantiated.
struct Captured(sys::CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it is live, and of the context of this thread.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}
