//! What a kernel's constructor sees: the node, its constants, and memory for packed weights.

use std::sync::Arc;

use ort_alloc::{Allocator, Budget, Buffer, Category, allocate_in};

use smallvec::{SmallVec, smallvec};

use super::{Device, NodeView};
use crate::ir::Attributes;
use crate::tensor::{Tensor, TensorView};
use crate::{Result, error};

/// How the CPU provider multiplies matrices of `float`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// In float32.
    #[default]
    Fp32,
    /// In bfloat16 with float32 sums, which needs a CPU with AVX512-BF16: others refuse the session.
    Bf16,
}

/// The context of one kernel's construction.
pub struct CompileCx<'a> {
    /// The node and its graph.
    pub node: NodeView<'a>,
    /// The threads that runs will use.
    pub threads: usize,
    /// The math mode.
    pub precision: Precision,
    pub(crate) budget: &'a Arc<Budget>,
    pub(crate) allocator: Arc<dyn Allocator>,
    pub(crate) consumed: SmallVec<[bool; 8]>,
    pub(crate) packing: Packing,
    pub(crate) packed_bytes: usize,
}

/// What becomes of the weights that a kernel packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// They are packed.
    Now,
    /// They are only counted: the kernel tells its workspace and never runs.
    Counted,
}

/// Weights that a kernel rearranged for speed, in memory that the session counts.
#[derive(Debug)]
pub struct PackedWeights(Option<Buffer>);

impl PackedWeights {
    /// The bytes as they were packed, at a 64-byte boundary.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_ref().and_then(Buffer::bytes).unwrap_or(&[])
    }
}

impl<'a> CompileCx<'a> {
    /// The context of a node's kernel on a device.
    pub(crate) fn new(
        node: NodeView<'a>,
        device: &dyn Device,
        (threads, precision): (usize, Precision),
        budget: &'a Arc<Budget>,
        packing: Packing,
    ) -> CompileCx<'a> {
        let (allocator, consumed) = (device.allocator(), smallvec![false; node.node.inputs.len()]);
        CompileCx { node, threads, precision, budget, allocator, consumed, packing, packed_bytes: 0 }
    }

    /// The attributes.
    pub fn attrs(&self) -> &'a Attributes {
        self.node.attrs()
    }

    /// The constant that an input is, where it is one. Weights come straight from the file: unaligned.
    pub fn constant(&self, index: usize) -> Option<TensorView<'a>> {
        self.node.constant(index).map(Tensor::view)
    }

    /// A packed weight of `bytes` bytes, written by `fill` into memory at a 64-byte boundary that the budget counts. `fill` is not called where
    /// the session only asks how much memory the kernel would take: what is packed may only be read by runs.
    pub fn pack(
        &mut self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<PackedWeights> {
        self.packed_bytes = self.packed_bytes.saturating_add(bytes);
        if self.packing == Packing::Counted {
            return Ok(PackedWeights(None));
        }
        let mut buffer = allocate_in(self.budget, Category::PackedWeights, &*self.allocator, bytes, 64)?;
        fill(buffer.bytes_mut().ok_or_else(|| error!(Fail, "packed weights are not in host memory"))?)?;
        Ok(PackedWeights(Some(buffer)))
    }

    /// Whether the input at `index` is consumed so far.
    pub fn is_consumed(&self, index: usize) -> bool {
        self.consumed.get(index).copied().unwrap_or(false)
    }

    /// Says that runs will not read the constant input `index` any more: it is packed, or folded into the kernel.
    /// The run then finds no such input, and the pages of the file may go.
    pub fn consume(&mut self, index: usize) {
        if let Some(consumed) = self.consumed.get_mut(index) {
            *consumed = true;
        }
    }
}
