//! Deferred weight packing: kernels whose weights are packed before the first run that needs them.
//!
//! Packing would take most of the time of a build. So a build only counts the bytes of packed
//! weights and sets them aside in the budget: plans and refusals are those of packed weights from
//! then on. Kernels of sessions with a memory limit are [`StreamedKernel`](super::StreamedKernel)s
//! instead, because their weights may have to be packed more than once.

use std::sync::{Arc, OnceLock};

use ort_alloc::fork::Mutex;
use ort_alloc::{Advance, Budget};

use crate::Result;
use crate::ep::Executable;
use crate::ir::Graph;

/// A kernel that is packed before its first run and stays packed.
pub(crate) struct DeferredKernel {
    /// A kernel that only reports workspaces: its weights were counted, not packed.
    counted: Box<dyn Executable>,
    /// The bytes that its packed weights take.
    pub(crate) packed_bytes: usize,
    packed: OnceLock<Box<dyn Executable>>,
    /// What packing takes; `None` once the weights are packed. Behind an `Arc`, so that the lock,
    /// for which forks wait, is not held while they are packed.
    waiting: Mutex<Option<Arc<Waiting>>>,
}

/// What packing the weights of a kernel takes.
pub(crate) struct Waiting {
    /// The bytes set aside for the packed weights.
    set_aside: Advance,
    /// The node alone, if it reads folded constants. They are in no file, so they are freed once
    /// they are packed. `None` for a node of the program's graph.
    pub(crate) alone: Option<Graph>,
}

impl Waiting {
    /// The budget that has the bytes of the packed weights set aside.
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        self.set_aside.budget()
    }
}

impl DeferredKernel {
    pub(super) fn new(
        counted: Box<dyn Executable>,
        packed_bytes: usize,
        set_aside: Advance,
        alone: Option<Graph>,
    ) -> DeferredKernel {
        let waiting = Mutex::new(Some(Arc::new(Waiting { set_aside, alone })));
        DeferredKernel { counted, packed_bytes, packed: OnceLock::new(), waiting }
    }

    /// What packing takes, until the weights are packed.
    pub(crate) fn waiting(&self) -> Option<Arc<Waiting>> {
        self.waiting.lock().clone()
    }

    /// The kernel with its packed weights, once they are packed.
    pub(crate) fn packed(&self) -> Option<&dyn Executable> {
        self.packed.get().map(|kernel| &**kernel)
    }

    /// The kernel to ask for its workspace.
    pub(super) fn any(&self) -> &dyn Executable {
        self.packed().unwrap_or(&*self.counted)
    }

    /// Packs the weights unless they are packed: `make` compiles the kernel with what packing
    /// takes. Returns whether it did. If `make` fails, a later run tries again.
    ///
    /// Only one thread at a time may call it, or the weights would be packed twice.
    pub(crate) fn pack(&self, make: impl FnOnce(&Waiting) -> Result<Box<dyn Executable>>) -> Result<bool> {
        let Some(waiting) = self.waiting() else { return Ok(false) };
        let kernel = make(&waiting)?;
        let mut left = self.waiting.lock();
        // Under the lock, so that no fork leaves the cell half set in the child.
        self.packed.set(kernel).ok();
        *left = None;
        Ok(true)
    }
}
