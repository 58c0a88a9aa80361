//! The device: what it claims, compiles and copies.

use std::sync::Arc;

use ort_alloc::{Allocator, DeviceId, Stats};
use ort_core::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, Fingerprint, KernelTable, NodeView, ProviderOptions,
    new_device_id,
};
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, ensure, error};
use parking_lot::Mutex;

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

/// The bytes that a thread reads of a matrix at once.
const MATRIX_VECTOR: usize = 16;

/// What a device and its nodes share.
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
    /// What bounds kernels, with the libraries where they may have so much workspace.
    pub(crate) fn bounds(&self, room: Option<usize>) -> Bounds<'_> {
        let libraries = room.map(|_| &self.libraries);
        Bounds { limits: self.limits, libraries, room: room.unwrap_or(0), has_maps: false, turn: 0 }
    }

    /// The bytes that are left. None where no library asks for them.
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

/// What of a device's memory is left.
pub(crate) struct Left {
    pub(crate) bytes: usize,
    /// Of `gpu_mem_limit`, rather than of what the driver has.
    pub(crate) is_of_limit: bool,
}

impl Drop for Parts {
    fn drop(&mut self) {
        // Memory that somebody holds still keeps the queue, while the modules go now.
        self.queue.close();
    }
}

/// An opened GPU as a device of ort-runtime.
pub struct CudaDevice {
    info: DeviceInfo,
    parts: Arc<Parts>,
    table: KernelTable,
    prefers_channels_last: bool,
}

impl CudaDevice {
    /// Opens the device at `index` of [`CudaProvider::devices`](crate::CudaProvider), or that of
    /// the option `device_id`.
    ///
    /// # Errors
    ///
    /// There is no driver, one that is too old, no such device, or an option is unknown or its
    /// value not one.
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

    /// Allocated and peak bytes, and how the arena grew, by ONNX Runtime's names.
    pub fn stats(&self) -> Stats {
        self.parts.memory.stats()
    }

    /// NVIDIA's libraries that were looked for, and what serves in their place.
    pub fn libraries(&self) -> &[LibraryReport] {
        &self.parts.libraries.reports
    }

    /// What was asked of the device so far, and the pinned memory that it holds.
    pub fn counters(&self) -> Counters {
        self.parts.queue.counters()
    }

    /// How many modules the driver has compiled: a run like one before adds none.
    pub fn modules(&self) -> usize {
        self.parts.modules.count()
    }
}

/// The kernels of the provider, to claim with where there is no device.
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
        self.table.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        let def = self.table.find(&cx.node).map_err(|reason| error!(NotImplemented, "{reason}"))?;
        let kernel: &'static CudaKernel = kernels::all()
            .find(|kernel| std::ptr::eq(&kernel.def, def))
            .ok_or_else(|| error!(Fail, "operator {} has no kernel", def.op))?;
        let node = cx.node.node;
        Ok(Box::new(Node {
            kernel,
            op: node.spec.name,
            attrs: node.attrs.clone(),
            input_types: (0..node.inputs.len()).map(|index| cx.node.dtype(index)).collect(),
            output_types: (0..node.outputs.len()).map(|index| cx.node.output_dtype(index)).collect(),
            parts: self.parts.clone(),
            kept: Mutex::default(),
        }))
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        // It packs nothing; which nodes are left to others follows from its code.
        Some(Fingerprint { code: env!("ORT_CODE_HASH").to_owned(), hardware: String::new() })
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
        ensure!(same, Fail, "a copy between tensors of two types or shapes");
        let (queue, id) = (&self.parts.queue, self.parts.id);
        match (from.device_range(), to.device_range()) {
            (None, Some(range)) => {
                let bytes = from.bytes()?;
                ensure!(bytes.len() == range.len, Fail, "a copy of {} bytes into {}", bytes.len(), range.len);
                address(id, range)?.map_or(Ok(()), |to| queue.upload(bytes, to))
            }
            (Some(range), None) => {
                let bytes = to.bytes_mut()?;
                ensure!(bytes.len() == range.len, Fail, "a copy of {} bytes into {}", range.len, bytes.len());
                address(id, range)?.map_or(Ok(()), |from| queue.download(from, bytes))
            }
            (Some(source), Some(target)) => {
                ensure!(source.len == target.len, Fail, "a copy of {} bytes into {}", source.len, target.len);
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
        1
    }
}
