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
use crate::device_info::describe;
use crate::device_state::DeviceState;
use crate::driver::{Call, Context, Counters, Driver, NO_DEVICE, TENSOR_CORES};
use crate::kernels::{self, CudaKernel};
use crate::libraries::{Libraries, LibraryReport};
use crate::memory::{address, arena};
use crate::modules::{Modules, OLDEST, too_old};
use crate::node::Node;
use crate::options::Options;
use crate::pool::PoolMemory;
use crate::queue::Queue;

/// Bytes a thread loads from a matrix at once: one 16-byte vector load.
const MATRIX_VECTOR: usize = 16;

/// An opened GPU as an execution device.
pub struct CudaDevice {
    info: DeviceInfo,
    state: Arc<DeviceState>,
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
        // TF32 exists on tensor cores of compute capability 8.0 and newer.
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
        let choices = Choices::default();
        let state = Arc::new(DeviceState { id, limits, modules, libraries, memory, queue, choices });
        let prefers_channels_last = options.prefers_channels_last;
        Ok(Arc::new(CudaDevice { info, state, table: kernel_table(), prefers_channels_last }))
    }

    /// Returns allocated and peak bytes and the arena's growth, under ONNX Runtime's names.
    pub fn stats(&self) -> Stats {
        self.state.memory.stats()
    }

    /// Returns NVIDIA's libraries that were looked for, and what replaces the missing ones.
    pub fn libraries(&self) -> &[LibraryReport] {
        &self.state.libraries.reports
    }

    /// Returns counters of the work submitted to the device so far, and the page-locked memory it
    /// holds.
    pub fn counters(&self) -> Counters {
        self.state.queue.counters()
    }

    /// Returns how many modules the driver has compiled. A run that repeats an earlier one adds
    /// none.
    pub fn modules(&self) -> usize {
        self.state.modules.count()
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
        self.state.id
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        self.state.memory.clone()
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        // Kernels compute a fused activation in their epilogue, which has code for some functions.
        if let Some(activation) = Activation::missing_of(node.node, kernels::has_activation) {
            return Err(format!("activation '{}' is no epilogue of its kernels", activation.name));
        }
        self.table.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        let kernel = find_kernel(&self.table, &cx.node, kernels::all(), |kernel: &CudaKernel| &kernel.def)?;
        let (info, state) = (NodeInfo::new(&cx.node), self.state.clone());
        Ok(Box::new(Node { kernel, info, state, cache: LaunchCache::default() }))
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        // The provider packs no weights, and its code alone decides which nodes it claims, so
        // hardware does not enter the fingerprint.
        let code = env!("ORT_CODE_HASH").to_owned();
        Some(Fingerprint { code, hardware: String::new() })
    }

    fn check(&self) -> Result<()> {
        self.state.queue.context().check_present()
    }

    fn end_of_run(&self) {
        self.state.queue.end_of_run();
    }

    fn synchronize(&self) -> Result<()> {
        self.state.queue.synchronize()
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        let same = from.dtype() == to.dtype() && from.shape() == to.shape();
        ensure!(same, Fail, "cannot copy between tensors of different types or shapes");
        let (queue, id) = (&self.state.queue, self.state.id);
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
                // An empty range has no address, and there is nothing to copy.
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
