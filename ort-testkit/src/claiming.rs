//! A device that only claims, to query a provider's kernels without its hardware.

use std::sync::Arc;

use ort_alloc::{Allocator, DeviceId, HostAllocator};
use ort_core::ep::{Claim, CompileCx, Device, DeviceInfo, Executable, KernelTable, NodeView, new_device_id};
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, error};

/// A provider's kernel table as a device that runs nothing.
pub struct ClaimingDevice {
    info: DeviceInfo,
    memory: DeviceId,
    table: KernelTable,
}

impl ClaimingDevice {
    /// A device of the provider with this name.
    pub fn new(provider: &'static str, table: KernelTable) -> Arc<ClaimingDevice> {
        let info = DeviceInfo {
            provider,
            name: "a table of kernels".to_owned(),
            memory_bytes: None,
            facts: Vec::new(),
        };
        Arc::new(ClaimingDevice { info, memory: new_device_id(), table })
    }
}

impl Device for ClaimingDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceId {
        self.memory
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        // Nothing runs, so no tensor is ever in a device's memory.
        HostAllocator::global().clone()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        self.table.claim(node)
    }

    fn compile(&self, _: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        Err(error!(NotImplemented, "this device of {} only claims", self.info.provider))
    }

    fn copy(&self, _: TensorView<'_>, _: TensorMut<'_>) -> Result<()> {
        Err(error!(NotImplemented, "this device of {} only claims", self.info.provider))
    }
}
