//! What a kernel's constructor sees: the node, its constants, and memory for packed weights.

use std::sync::Arc;

use ort_alloc::{Allocator, Budget, Buffer, Category, allocate_in};

use smallvec::SmallVec;

use super::NodeView;
use crate::Result;
use crate::ir::Attributes;
use crate::tensor::{Tensor, TensorView};

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
    pub(crate) packed_bytes: usize,
}

impl<'a> CompileCx<'a> {
    /// The attributes.
    pub fn attrs(&self) -> &'a Attributes {
        self.node.attrs()
    }

    /// The constant that an input is, where it is one. Weights come straight from the file: unaligned.
    pub fn constant(&self, index: usize) -> Option<TensorView<'a>> {
        self.node.constant(index).map(Tensor::view)
    }

    /// Memory for a packed weight, counted in the budget.
    pub fn allocate_packed(&mut self, bytes: usize) -> Result<Buffer> {
        self.packed_bytes += bytes;
        Ok(allocate_in(self.budget, Category::PackedWeights, &*self.allocator, bytes, 64)?)
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
