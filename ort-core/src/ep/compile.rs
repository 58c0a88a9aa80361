//! What a kernel's constructor sees: the node, its constants, and memory for packed weights.

use std::path::Path;
use std::sync::Arc;

use ort_alloc::{Allocator, Budget, Buffer, Category, DeviceId, Reservation};
use smallvec::{SmallVec, smallvec};

use super::packed::Owner;
use super::{Device, NodeView, PackedWeights, guard};
use crate::cache::{Role, Store, tag};
use crate::ir::Attributes;
use crate::tensor::{Tensor, TensorView};
use crate::{Result, error};

/// How the CPU provider multiplies matrices of `float`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// In float32.
    #[default]
    Fp32,
    /// In bfloat16 with float32 sums, which needs a CPU with AVX512-BF16: others refuse the
    /// session.
    Bf16,
}

/// The context of one kernel's construction.
pub struct CompileCx<'a> {
    /// The node and its graph.
    pub node: NodeView<'a>,
    /// The threads that packing may use; what is packed does not depend on them.
    pub threads: usize,
    /// The math mode.
    pub precision: Precision,
    pub(crate) account: Account<'a>,
    pub(crate) allocator: Arc<dyn Allocator>,
    pub(crate) consumed: SmallVec<[bool; 8]>,
    pub(crate) packing: Packing<'a>,
    pub(crate) cache_dir: Option<&'a Path>,
    /// The bytes packed into memory, and those in the compiled cache.
    pub(crate) packed_bytes: usize,
    pub(crate) cached_bytes: usize,
}

/// What becomes of the weights that a kernel packs.
#[derive(Clone, Copy)]
pub(crate) enum Packing<'a> {
    /// They are packed.
    Now,
    /// They are only counted: the kernel tells its workspace and never runs.
    Counted,
    /// The same, and the budget counts them as if they were there.
    Reserved,
    /// They are taken from an entry of the compiled cache, or packed into it: then the kernel never
    /// runs.
    Cached(&'a Store),
}

impl Packing<'_> {
    /// Whether kernels only tell what they would pack.
    pub(crate) fn is_counted(self) -> bool {
        matches!(self, Packing::Counted | Packing::Reserved)
    }
}

/// What packed weights count against, and whose they are.
#[derive(Clone, Copy)]
pub(crate) struct Account<'a> {
    pub(crate) budget: &'a Arc<Budget>,
    pub(crate) owner: &'a Arc<Owner>,
}

impl<'a> CompileCx<'a> {
    /// The context of a node's kernel on a device.
    pub(crate) fn new(
        node: NodeView<'a>,
        device: &dyn Device,
        (threads, precision): (usize, Precision),
        account: Account<'a>,
        packing: Packing<'a>,
    ) -> Result<CompileCx<'a>> {
        let packing = match packing {
            // The cache holds what the host reads.
            Packing::Cached(_) if device.memory() != DeviceId::HOST => Packing::Now,
            packing => packing,
        };
        let (allocator, consumed) = (guard::allocator(device)?, smallvec![false; node.node.inputs.len()]);
        Ok(CompileCx {
            node,
            threads,
            precision,
            account,
            allocator,
            consumed,
            packing,
            cache_dir: None,
            packed_bytes: 0,
            cached_bytes: 0,
        })
    }

    /// The attributes.
    pub fn attrs(&self) -> &'a Attributes {
        self.node.attrs()
    }

    /// The folder of the session's compiled cache, where a device may keep files of its own
    /// ([`DeviceCache`](super::DeviceCache)); none where the session has no cache.
    pub fn cache_dir(&self) -> Option<&'a Path> {
        self.cache_dir
    }

    /// The constant that an input is, where it is one. Weights come straight from the file:
    /// unaligned.
    pub fn constant(&self, index: usize) -> Option<TensorView<'a>> {
        self.node.constant(index).map(Tensor::view)
    }

    /// A packed weight of `bytes` bytes, written by `fill` into memory at a 64-byte boundary that
    /// the budget counts. `fill` is not called where the session only asks how much memory the
    /// kernel would take, or where the compiled cache has the bytes: what is packed may only be
    /// read by runs, and must follow from the node, its constants, the precision and the
    /// [fingerprint](Device::fingerprint), on any number of threads. Where this process holds the
    /// same bytes already, packed for whatever node, there is one copy for both.
    pub fn pack(
        &mut self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<PackedWeights> {
        let Packing::Cached(store) = self.packing else {
            self.packed_bytes = self.packed_bytes.saturating_add(bytes);
            if self.packing.is_counted() {
                return Ok(PackedWeights::nothing(self.reserved(bytes)?));
            }
            let (buffer, reservation) = self.packed(bytes, fill)?;
            return Ok(PackedWeights::in_memory(buffer, reservation, self.account.owner));
        };
        self.cached_bytes = self.cached_bytes.saturating_add(bytes);
        let tag = tag(Role::Packed, &[self.node.node.spec.name, &self.node.node.name]);
        if let Some(bytes) = store.take(tag, bytes)? {
            return Ok(PackedWeights::mapped(bytes));
        }
        let (buffer, _reservation) = self.packed(bytes, fill)?;
        store.put(tag, buffer.bytes().unwrap_or(&[]))?;
        Ok(PackedWeights::nothing(None))
    }

    /// Counts what a kernel keeps that packs in its own way; nothing is held where it only counts.
    #[cfg(feature = "provider-libraries")]
    pub(crate) fn reserve_packed(&mut self, bytes: usize) -> Result<Option<Reservation>> {
        self.packed_bytes = self.packed_bytes.saturating_add(bytes);
        self.reserved(bytes)
    }

    fn reserved(&self, bytes: usize) -> Result<Option<Reservation>> {
        match self.packing {
            Packing::Counted => Ok(None),
            _ => Ok(Some(self.account.budget.reserve(Category::PackedWeights, bytes)?)),
        }
    }

    fn packed(
        &self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<(Buffer, Reservation)> {
        let reservation = self.account.budget.reserve(Category::PackedWeights, bytes)?;
        let mut buffer = self.allocator.allocate(bytes, 64)?;
        fill(buffer.bytes_mut().ok_or_else(|| error!(Fail, "packed weights are not in host memory"))?)?;
        Ok((buffer, reservation))
    }

    /// Whether the input at `index` is consumed so far.
    pub fn is_consumed(&self, index: usize) -> bool {
        self.consumed.get(index).copied().unwrap_or(false)
    }

    /// Says that runs will not read the constant input `index` any more: it is packed, or folded
    /// into the kernel. The run then finds no such input, and the pages of the file may go.
    pub fn consume(&mut self, index: usize) {
        if let Some(consumed) = self.consumed.get_mut(index) {
            *consumed = true;
        }
    }
}
