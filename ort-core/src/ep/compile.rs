//! Kernel compilation context: the node, its constants, and accounted memory for packed weights.

use std::path::Path;
use std::sync::Arc;

use ort_alloc::{Allocator, Budget, Buffer, Category, Reservation};
use smallvec::SmallVec;

use super::packed::Owner;
use super::{NodeView, PackedWeights};
use crate::cache::{Role, Store, tag};
use crate::ir::Attributes;
use crate::tensor::{Tensor, TensorView};
use crate::{Result, error};

/// The math mode of float32 GEMMs on the CPU provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// In float32.
    #[default]
    Fp32,
    /// bfloat16 with float32 accumulators. It needs a CPU with AVX512-BF16; on others the session
    /// fails to build.
    Bf16,
}

/// The context in which one kernel is compiled.
pub struct CompileCx<'a> {
    /// The node and its graph.
    pub node: NodeView<'a>,
    /// The threads that packing may use. The packed bytes must not depend on their number.
    pub threads: usize,
    /// The math mode.
    pub precision: Precision,
    pub(crate) account: Account<'a>,
    pub(crate) allocator: Arc<dyn Allocator>,
    pub(crate) consumed: SmallVec<[bool; 8]>,
    pub(crate) packing: Packing<'a>,
    pub(crate) cache_dir: Option<&'a Path>,
    /// Called with bytes of constants whose pages of the model's file are no longer needed.
    pub(crate) release: &'a dyn Fn(&[u8]),
    /// Bytes packed into memory; `cached_bytes` counts those in the compiled cache.
    pub(crate) packed_bytes: usize,
    pub(crate) cached_bytes: usize,
}

/// What [`CompileCx::pack`] does with weights.
#[derive(Clone, Copy)]
pub(crate) enum Packing<'a> {
    /// Packs them into memory.
    Now,
    /// Counts their bytes only. The kernel answers workspace queries and never runs.
    Counted,
    /// As `Counted`, but also reserves the bytes in the budget.
    Reserved,
    /// Maps them from an entry of the compiled cache. If the entry is being written, packs them
    /// into it, and the kernel never runs.
    Cached(&'a Store),
}

impl Packing<'_> {
    /// Whether nothing is packed, only counted.
    pub(crate) fn is_counted(self) -> bool {
        matches!(self, Packing::Counted | Packing::Reserved)
    }
}

/// How a session compiles its kernels.
#[derive(Clone, Copy)]
pub(crate) struct CompileSettings {
    /// The threads that packing may use.
    pub(crate) threads: usize,
    pub(crate) precision: Precision,
}

/// The budget and the owner of packed weights.
#[derive(Clone, Copy)]
pub(crate) struct Account<'a> {
    pub(crate) budget: &'a Arc<Budget>,
    pub(crate) owner: &'a Arc<Owner>,
}

impl<'a> CompileCx<'a> {
    /// The attributes.
    pub fn attrs(&self) -> &'a Attributes {
        self.node.attrs()
    }

    /// The folder of the session's compiled cache, or `None` without one. A device may keep its own
    /// files there ([`DeviceCache`](super::DeviceCache)).
    pub fn cache_dir(&self) -> Option<&'a Path> {
        self.cache_dir
    }

    /// Returns the constant behind an input, if it is one. Weights are mapped from the file, so
    /// they may be unaligned.
    pub fn constant(&self, index: usize) -> Option<TensorView<'a>> {
        self.node.constant(index).map(Tensor::view)
    }

    /// Returns what to call, while a large constant is packed, with the parts of it that have been
    /// read for good. Their pages of the model's file then leave memory before the constant is
    /// packed as a whole, so that it is not resident twice.
    pub fn release(&self) -> &'a dyn Fn(&[u8]) {
        self.release
    }

    /// Packs a weight of `bytes` bytes: `fill` writes it into 64-byte aligned memory that the
    /// budget counts.
    ///
    /// `fill` is not called if the session only sizes the kernel, or if the compiled cache has the
    /// bytes. So the bytes must be a function of the node, its constants, the precision and the
    /// [fingerprint](super::Device::fingerprint), for any number of threads. Only runs may read
    /// them, not the compilation. Equal packed weights of this process share one copy, across nodes
    /// and models.
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
        // The tag guards against a stale entry: blobs are read in the order of writing, so a
        // mismatch means that the build took another path.
        let tag = tag(Role::Packed, &[self.node.node.spec.name, &self.node.node.name]);
        if let Some(bytes) = store.take(tag, bytes)? {
            return Ok(PackedWeights::mapped(bytes));
        }
        // Freed right after `put`: sessions map the entry once it is complete.
        let (buffer, _reservation) = self.packed(bytes, fill)?;
        store.put(tag, buffer.bytes().unwrap_or(&[]))?;
        Ok(PackedWeights::nothing(None))
    }

    /// Reserves the bytes of a kernel that packs by itself; returns `None` if weights are only
    /// counted.
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

    /// Allocates and fills a buffer. The reservation comes first, so a limit refuses before the
    /// allocation.
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

    /// Whether the input at `index` was consumed so far.
    pub fn is_consumed(&self, index: usize) -> bool {
        self.consumed.get(index).copied().unwrap_or(false)
    }

    /// Declares that runs no longer read the constant input `index`, because it is packed or folded
    /// into the kernel. The input is then absent at run time, and its mapped pages can be released.
    pub fn consume(&mut self, index: usize) {
        if let Some(consumed) = self.consumed.get_mut(index) {
            *consumed = true;
        }
    }
}
