//! The CUDA device: claims and compiles nodes, and copies tensors.

use std::sync::Arc;

use ort_alloc::{Allocator, DeviceId, Stats};
use ort_core::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, Fingerprint, KernelTable, NodeView, ProviderOptions,
    new_device_id,
};
use ort_core::ops::fused::activation::Activation;
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, ensure, error};
use ort_gpu::{LaunchCache, NodeInfo, find_kernel};

use crate::choices::Choices;
use crate::driver::{Call, Context, Counters, Driver, Limits, NO_DEVICE};
use crate::kernels::{self, CudaKernel};
use crate::launch::Bounds;
use crate::libraries::{Libraries, LibraryReport};
use crate::memory::{address, arena};
use crate::modules::{Modules, OLDEST, TENSOR_CORES, too_old};
use crate::node::Node;
use crate::pool::PoolMemory;
use crate::provider::{Options, describe};
use crate::queue::Queue;

/// Bytes a thread loads from a matrix at once: one 16-byte vector load.
const MATRIX_VECTOR: usize = 16;

/// State shared by a device and its nodes.
pub(crate) struct Parts {
    pub(crate) id: DeviceId,
    pub(crate) limits: Limits,
    pub(crate) modules: Modules,
    pub(crate) libraries: Libraries,
    pub(crate) memory: Arc<dyn Allocator>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) choices: Choices,
}

impl Parts {
    /// The bounds for a kernel's launches. `room` is the workspace that a library may use, in
    /// bytes; with `None`, libraries may not be called.
    pub(crate) fn bounds(&self, room: Option<usize>) -> Bounds<'_> {
        let libraries = room.map(|_| &self.libraries);
        Bounds { limits: self.limits, libraries, room: room.unwrap_or(0), has_maps: false, turn: 0 }
    }

    /// Returns the free memory, or `None` if no library is loaded: only library workspaces are
    /// sized by it.
    pub(crate) fn left(&self) -> Option<Left> {
        if !self.libraries.any() {
            return None;
        }
        let stats = self.memory.stats();
        let free = || self.queue.context().memory().map_or(0, |(free, _)| free);
        let bytes = stats.limit.map_or_else(free, |limit| limit.saturating_sub(stats.in_use));
        Some(Left { bytes, is_of_limit: stats.limit.is_some() })
    }
}

/// The free memory of a device.
pub(crate) struct Left {
    pub(crate) bytes: usize,
    /// Whether `bytes` is what `gpu_mem_limit` leaves, rather than what the driver reports as free.
    pub(crate) is_of_limit: bool,
}

impl Drop for Parts {
    fn drop(&mut self) {
        // Tensors that outlive the device keep the queue alive, but the modules are unloaded now.
        // The queue must drop the graphs that refer to them.
        self.queue.close();
    }
}

/// An opened GPU as an execution device.
pub struct CudaDevice {
    info: DeviceInfo,
    parts: Arc<Parts>,
    table: KernelTable,
    prefers_channels_last: bool,
}

impl CudaDevice {
    /// Opens the device at `index` of [`CudaProvider::devices`](crate::CudaProvider), or the one
    /// that the option `device_id` names.
    ///
    /// # Errors
    ///
    /// Fails if there is no driver, the driver is too old, there is no such device, an option is
    /// unknown, or its value is invalid.
    pub fn open(index: usize, options: &ProviderOptions) -> Result<Arc<CudaDevice>> {
        let options = Options::parse(index, options)?;
        let driver = Driver::get()?;
        let (index, count) = (options.device_id, driver.count()?);
        if index >= count {
            return Err(
                error!(EpFail, "there is no device {index}: the NVIDIA driver shows {count}").help(NO_DEVICE)
            );
        }
        let physical = driver.device(index)?;
        let mut limits = physical.limits()?;
        if limits.capability < OLDEST {
            return Err(too_old(limits.capability));
        }
        limits.tf32 = options.tf32 && limits.capability >= TENSOR_CORES;
        let (id, context) = (new_device_id(), Context::open(physical)?);
        let queue = Arc::new(Queue::open(&context, &options)?);
        // The pool replaces the arena: it already reuses freed memory in stream order.
        let memory: Arc<dyn Allocator> = match options.pool {
            Some(config) => {
                ensure!(
                    physical.has_pools()?,
                    EpFail,
                    help = "leave the option out: memory then comes from the provider's arena",
                    "arena.use_cuda_mempool is asked for, but {} has no pools of memory",
                    physical.name()?
                );
                Arc::new(PoolMemory::new(id, &queue, config, options.arena.limit)?)
            }
            None => Arc::new(arena(id, &queue, options.arena)),
        };
        let libraries = Libraries::open(&context, &options.libraries)?;
        let info = describe(driver, physical, &libraries.reports)?;
        let modules = Modules::new(context, limits.capability);
        let parts =
            Arc::new(Parts { id, limits, modules, libraries, memory, queue, choices: Choices::default() });
        let prefers_channels_last = options.prefers_channels_last;
        Ok(Arc::new(CudaDevice { info, parts, table: kernel_table(), prefers_channels_last }))
    }

    /// Returns allocated and peak bytes and the arena's growth, under ONNX Runtime's names.
    pub fn stats(&self) -> Stats {
        self.parts.memory.stats()
    }

    /// Returns NVIDIA's libraries that were looked for, and what replaces the missing ones.
    pub fn libraries(&self) -> &[LibraryReport] {
        &self.parts.libraries.reports
    }

    /// Returns counters of the work submitted to the device so far, and the page-locked memory it
    /// holds.
    pub fn counters(&self) -> Counters {
        self.parts.queue.counters()
    }

    /// Returns how many modules the driver has compiled. A run that repeats an earlier one adds
    /// none.
    pub fn modules(&self) -> usize {
        self.parts.modules.count()
    }
}

/// Returns the provider's kernel table, which can claim nodes without a device.
pub fn kernel_table() -> KernelTable {
    KernelTable::new(kernels::all().map(|kernel| &kernel.def))
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceId {
        self.parts.id
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        self.parts.memory.clone()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        if let Some(activation) = Activation::missing_of(node.node, kernels::has_activation) {
            return Err(format!("activation '{}' is no epilogue of its kernels", activation.name));
        }
        self.table.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        let kernel = find_kernel(&self.table, &cx.node, kernels::all(), |kernel: &CudaKernel| &kernel.def)?;
        let (info, parts) = (NodeInfo::new(&cx.node), self.parts.clone());
        Ok(Box::new(Node { kernel, info, parts, cache: LaunchCache::default() }))
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        // The provider packs no weights, and its code alone decides which nodes it claims, so
        // hardware does not enter the fingerprint.
        let code = env!("ORT_CODE_HASH").to_owned();
        Some(Fingerprint { code, hardware: String::new() })
    }

    fn check(&self) -> Result<()> {
        self.parts.queue.context().check_present()
    }

    fn end_of_run(&self) {
        self.parts.queue.end_of_run();
    }

    fn synchronize(&self) -> Result<()> {
        self.parts.queue.synchronize()
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        let same = from.dtype() == to.dtype() && from.shape() == to.shape();
        ensure!(same, Fail, "cannot copy between tensors of different types or shapes");
        let (queue, id) = (&self.parts.queue, self.parts.id);
        match (from.device_range(), to.device_range()) {
            (None, Some(range)) => {
                let bytes = from.bytes()?;
                ensure!(
                    bytes.len() == range.len,
                    Fail,
                    "cannot copy {} bytes into {} bytes",
                    bytes.len(),
                    range.len
                );
                address(id, range)?.map_or(Ok(()), |to| queue.upload(bytes, to))
            }
            (Some(range), None) => {
                let bytes = to.bytes_mut()?;
                ensure!(
                    bytes.len() == range.len,
                    Fail,
                    "cannot copy {} bytes into {} bytes",
                    range.len,
                    bytes.len()
                );
                address(id, range)?.map_or(Ok(()), |from| queue.download(from, bytes))
            }
            (Some(source), Some(target)) => {
                ensure!(
                    source.len == target.len,
                    Fail,
                    "cannot copy {} bytes into {} bytes",
                    source.len,
                    target.len
                );
                match (address(id, source)?, address(id, target)?) {
                    (Some(from), Some(to)) => queue.ask(Call::Copy { from, to, bytes: source.len as u64 }),
                    _ => Ok(()),
                }
            }
            (None, None) => Err(error!(Fail, "neither side of a copy is in the device's memory")),
        }
    }

    fn prefers_channels_last(&self) -> bool {
        self.prefers_channels_last
    }

    fn vector_bytes(&self) -> usize {
        MATRIX_VECTOR
    }

    fn copy_alignment(&self) -> usize {
        // The driver copies from and to any address.
        1
    }
}
