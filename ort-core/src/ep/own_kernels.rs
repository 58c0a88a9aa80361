//! Nodes that bring their inference and kernels along, instead of those of their record and device.

use crate::Result;
use crate::ir::Attributes;
use crate::spec::InferCx;

use super::{Claim, Device, Executable, NodeView};

/// What a node brings along.
pub(crate) trait OwnKernels: Send + Sync {
    /// Infers the outputs of the node.
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<()>;
    /// Decides whether a device runs the node.
    fn claim(&self, device: &dyn Device, node: &NodeView<'_>) -> Result<Claim, String>;
    /// Makes the kernel for a device that claimed the node.
    fn kernel(&self, device: &dyn Device, node: &NodeView<'_>) -> Result<Box<dyn Executable>>;
}

/// The owner of a node's attributes ([`Attributes::owner`]).
pub(crate) struct KernelOwner(pub(crate) Box<dyn OwnKernels>);

/// Returns what a node with these attributes brings along.
pub(crate) fn own_kernels(attrs: &Attributes) -> Option<&dyn OwnKernels> {
    let owner = attrs.owner()?.downcast_ref::<KernelOwner>()?;
    Some(&*owner.0)
}
