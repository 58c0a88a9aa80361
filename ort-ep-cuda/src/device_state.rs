//! The state of a device that its nodes share: limits, code, libraries, memory and queue.

use std::sync::Arc;

use ort_alloc::{Allocator, DeviceId};

use crate::choices::Choices;
use crate::driver::Limits;
use crate::launch::Bounds;
use crate::libraries::Libraries;
use crate::modules::Modules;
use crate::queue::Queue;

/// State shared by a device and its nodes.
pub(crate) struct DeviceState {
    pub(crate) id: DeviceId,
    pub(crate) limits: Limits,
    pub(crate) modules: Modules,
    pub(crate) libraries: Libraries,
    pub(crate) memory: Arc<dyn Allocator>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) choices: Choices,
}

impl DeviceState {
    /// The bounds for a kernel's launches. `room` is the workspace that a library may use, in
    /// bytes; with `None`, libraries may not be called.
    pub(crate) fn bounds(&self, room: Option<usize>) -> Bounds<'_> {
        let libraries = room.map(|_| &self.libraries);
        Bounds { limits: self.limits, libraries, room: room.unwrap_or(0), has_maps: false, turn: 0 }
    }

    /// Returns the free memory, or `None` if no library is loaded: only library workspaces are
    /// sized by it.
    pub(crate) fn free_memory(&self) -> Option<FreeMemory> {
        if !self.libraries.any() {
            return None;
        }
        let stats = self.memory.stats();
        let free = || self.queue.context().memory().map_or(0, |(free, _)| free);
        let bytes = stats.limit.map_or_else(free, |limit| limit.saturating_sub(stats.in_use));
        Some(FreeMemory { bytes, is_of_limit: stats.limit.is_some() })
    }
}

/// The free memory of a device.
pub(crate) struct FreeMemory {
    pub(crate) bytes: usize,
    /// Whether `bytes` is what `gpu_mem_limit` leaves, rather than what the driver reports as free.
    pub(crate) is_of_limit: bool,
}

impl Drop for DeviceState {
    fn drop(&mut self) {
        // Tensors that outlive the device keep the queue alive, but the modules are unloaded now.
        // The queue must drop the graphs that refer to them.
        self.queue.close();
    }
}
