//! A device that leaves chosen operators to their decompositions.

use std::sync::Arc;

use ort_alloc::{Allocator, DeviceId};
use ort_core::Result;
use ort_core::ep::{Claim, CompileCx, Device, DeviceInfo, Executable, NodeView};
use ort_core::spec::OpSpec;
use ort_core::tensor::{TensorMut, TensorView};

/// A wrapper of a device without the kernels of some operators. Sessions then decompose these, so
/// that a test can compare the decomposition with the kernel.
pub struct DecomposingDevice {
    device: Arc<dyn Device>,
    refused: Vec<&'static OpSpec>,
}

impl DecomposingDevice {
    /// Wraps `device`, refusing to claim the operators in `refused`.
    pub fn new(device: Arc<dyn Device>, refused: &[&'static OpSpec]) -> Arc<DecomposingDevice> {
        Arc::new(DecomposingDevice { device, refused: refused.to_vec() })
    }
}

impl Device for DecomposingDevice {
    fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    fn memory(&self) -> DeviceId {
        self.device.memory()
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        self.device.allocator()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        // Records are statics, so their address identifies an operator.
        if self.refused.iter().any(|spec| std::ptr::eq(*spec, node.node.spec)) {
            return Err(format!("{} is left to its decomposition", node.node.spec.name));
        }
        self.device.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        self.device.compile(cx)
    }

    fn prefers_channels_last(&self) -> bool {
        self.device.prefers_channels_last()
    }

    fn vector_bytes(&self) -> usize {
        self.device.vector_bytes()
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        self.device.copy(from, to)
    }
}
