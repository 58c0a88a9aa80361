//! The context in which programs are built: devices, budget, and how weights are packed.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ort_alloc::{Budget, Reservation};

use super::Update;
use super::copies::ConstantCopies;
use crate::Result;
use crate::ep::{Account, CompileCx, CompileSettings, Device, NodeView, Owner, Packing, Precision};
use crate::tensor::Tensor;

/// The context of compilation, apart from the graph.
pub(crate) struct BuildCx<'a> {
    pub(crate) devices: &'a [Arc<dyn Device>],
    pub(crate) budget: &'a Arc<Budget>,
    pub(crate) owner: &'a Arc<Owner>,
    /// The threads that pack weights.
    pub(crate) load_threads: usize,
    pub(crate) precision: Precision,
    /// Called with a weight whose file pages are not needed any more.
    pub(crate) release: &'a dyn Fn(&Tensor),
    /// The number of programs so far: the outermost one and those of subgraphs.
    pub(crate) programs: usize,
    /// The bytes of packed weights that always stay in memory.
    pub(crate) packed_bytes: usize,
    /// The bytes of packed weights in the compiled cache.
    pub(crate) cached_bytes: usize,
    /// Reservations for memory that is only counted.
    pub(crate) reserved: Vec<Reservation>,
    /// Whether a constant is aligned for its type by its offset in the model's file.
    pub(crate) is_aligned_in_file: &'a dyn Fn(&Tensor) -> bool,
    /// Whether a weight is in a mapped file, so that it can be read again at any time.
    pub(crate) is_mapped: &'a dyn Fn(&Tensor) -> bool,
    /// Whether a constant was computed by this build.
    pub(crate) is_folded: &'a dyn Fn(&Tensor) -> bool,
    /// Whether packed weights may be streamed: evicted, and packed again from the file.
    pub(crate) streams: bool,
    /// Whether weights may be packed later, before the first run that needs them.
    pub(crate) defers: bool,
    /// The bytes set aside for such weights.
    pub(crate) deferred_bytes: usize,
    /// Whether constants in device memory may be streamed. If a limit bounds the session, those of
    /// all devices may; otherwise those of devices with a limit of their own.
    pub(crate) windows: ConstantStreaming,
    pub(crate) packing: Packing<'a>,
    /// The folder of the compiled cache, for the files that devices keep there themselves.
    pub(crate) cache_dir: Option<&'a Path>,
    /// Whether the program runs once.
    pub(crate) runs_once: bool,
    /// Outputs of the outermost graph that are new values of its inputs.
    pub(crate) updates: Vec<Update>,
    /// The deadline of the build.
    pub(crate) until: Option<Instant>,
    pub(crate) copies: ConstantCopies,
}

/// The devices whose constants are streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConstantStreaming {
    /// Those of no device.
    Never,
    /// Those of devices with a memory limit of their own.
    OfBounded,
    /// Those of every device.
    Always,
}

impl BuildCx<'_> {
    pub(super) fn next_number(&mut self) -> usize {
        self.programs += 1;
        self.programs - 1
    }

    /// The context for compiling one kernel.
    pub(super) fn kernel<'k>(
        &'k self,
        view: NodeView<'k>,
        device: &dyn Device,
        packing: Packing<'k>,
    ) -> Result<CompileCx<'k>> {
        let account = Account { budget: self.budget, owner: self.owner };
        let settings = CompileSettings { threads: self.load_threads, precision: self.precision };
        let cx = CompileCx::new(view, device, settings, account, packing)?;
        Ok(CompileCx { cache_dir: self.cache_dir, ..cx })
    }
}
