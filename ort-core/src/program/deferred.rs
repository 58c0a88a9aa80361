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

/// A kernel that is packed before its first run and stays packed.
pub(crate) struct DeferredKernel {
    /// A kernel that only reports workspaces: its weights were counted, not packed.
    counted: Box<dyn Executable>,
    /// The bytes that its packed weights take.
    pub(crate) packed_bytes: usize,
    packed: OnceLock<Box<dyn Executable>>,
    /// The bytes set aside for the packed weights; `None` once they are packed. Behind an `Arc`, so
    /// that the lock, for which forks wait, is not held while they are packed.
    set_aside: Mutex<Option<Arc<Advance>>>,
}

impl DeferredKernel {
    pub(super) fn new(
        counted: Box<dyn Executable>,
        packed_bytes: usize,
        set_aside: Advance,
    ) -> DeferredKernel {
        let set_aside = Mutex::new(Some(Arc::new(set_aside)));
        DeferredKernel { counted, packed_bytes, packed: OnceLock::new(), set_aside }
    }

    /// The kernel with its packed weights, once they are packed.
    pub(crate) fn packed(&self) -> Option<&dyn Executable> {
        self.packed.get().map(|kernel| &**kernel)
    }

    /// The kernel to ask for its workspace.
    pub(super) fn any(&self) -> &dyn Executable {
        self.packed().unwrap_or(&*self.counted)
    }

    /// Packs the weights unless they are packed: `make` compiles the kernel within the budget that
    /// has their bytes set aside. Returns whether it did. If `make` fails, a later run tries again.
    ///
    /// Only one thread at a time may call it, or the weights would be packed twice.
    pub(crate) fn pack(
        &self,
        make: impl FnOnce(&Arc<Budget>) -> Result<Box<dyn Executable>>,
    ) -> Result<bool> {
        let Some(set_aside) = self.set_aside.lock().clone() else { return Ok(false) };
        let kernel = make(set_aside.budget())?;
        let mut left = self.set_aside.lock();
        // Under the lock, so that no fork leaves the cell half set in the child.
        self.packed.set(kernel).ok();
        *left = None;
        Ok(true)
    }
}
