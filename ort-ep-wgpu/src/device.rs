//! The [`Device`] implementation: claims and compiles nodes, copies tensors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_alloc::{Allocator, DeviceId};
use ort_core::dtype::DType;
use ort_core::ep::{
    Claim, CompileCx, Device, DeviceInfo, Executable, Fingerprint, KernelTable, NodeView, ProviderOptions,
    new_device_id,
};
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, ensure, error};
use ort_gpu::{LaunchCache, NodeInfo, find_kernel};

use crate::adapters::{NO_ADAPTER, adapters, describe};
use crate::bindings::BindGroups;
use crate::device_state::DeviceState;
use crate::gpu::{Gpu, NUMBERS};
use crate::kernels::{self, WgpuKernel};
use crate::memory::{Memory, Region};
use crate::node::{Node, likeness};
use crate::options::Options;
use crate::pipeline_cache::{CacheFolders, PipelineCache};
use crate::pipelines::{DeviceCompiler, Pipelines};
use crate::recorder::{ALL_NUMBERS, At, Recorder};
use crate::staging::Staging;

/// Counts of what was created on a device since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Buffers, including staging buffers.
    pub buffers: usize,
    /// Bind groups.
    pub bind_groups: usize,
    /// Compiled compute pipelines.
    pub pipelines: usize,
    /// Pipelines that were compiled ahead of the run that uses them. A run compiled the others.
    pub pipelines_ahead: usize,
    /// Pipelines compiled ahead because a cache lists them for an earlier device.
    pub pipelines_listed: usize,
    /// Queue submissions.
    pub submissions: usize,
    /// Dispatches.
    pub dispatches: usize,
}

/// An opened adapter as a device of ort-runtime.
pub struct WgpuDevice {
    info: DeviceInfo,
    state: Arc<DeviceState>,
    table: KernelTable,
    folders: CacheFolders,
    /// The folder of option `pipeline_cache`, for sessions without a compiled cache.
    cache: Option<Arc<PipelineCache>>,
}

impl WgpuDevice {
    /// Opens the adapter at `index` of [`WgpuProvider::devices`](crate::WgpuProvider).
    ///
    /// # Errors
    ///
    /// There is no such adapter, an option is unknown or has an invalid value, or the adapter
    /// refuses to open a device.
    pub fn open(index: usize, options: &ProviderOptions) -> Result<Arc<WgpuDevice>> {
        let options = Options::parse(options)?;
        let found = adapters();
        let count = found.len();
        let adapter = found.into_iter().nth(index).ok_or_else(|| {
            error!(EpFail, "there is no adapter {index}: Vulkan, Metal, D3D12 and GL show {count}")
                .help(NO_ADAPTER)
        })?;
        let info = describe(&adapter);
        let gpu = Arc::new(Gpu::open(&adapter, options.minimum_limits)?);
        // One uniform buffer serves all programs, because dynamic offsets select a dispatch's
        // part.
        let numbers = gpu.buffer(ALL_NUMBERS, wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST)?;
        let nothing = gpu.buffer(NUMBERS as usize, wgpu::BufferUsages::STORAGE)?;
        let groups = Arc::new(BindGroups::new(gpu.clone(), numbers.clone()));
        let memory = Memory::new(new_device_id(), gpu.clone(), groups.clone(), options.memory_limit);
        let pipelines = Arc::new(Pipelines::new(DeviceCompiler::new(gpu.clone(), groups.clone())));
        let staging = Arc::new(Staging::new(gpu.clone()));
        let recorder = Recorder::new(gpu.clone(), staging, numbers);
        let state = Arc::new(DeviceState { gpu, memory, groups, pipelines, recorder, nothing });
        let (table, folders) = (kernel_table(), CacheFolders::default());
        let cache = options.pipeline_cache.map(|folder| folders.get(&state.gpu, &folder)).transpose()?;
        Ok(Arc::new(WgpuDevice { info, state, table, folders, cache }))
    }

    /// Returns the adapter's name.
    pub fn adapter(&self) -> &str {
        &self.info.name
    }

    /// Returns the counters. A run that repeats an earlier one's shapes only adds submissions and
    /// dispatches.
    pub fn counters(&self) -> Counters {
        let made = &self.state.gpu.made;
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        Counters {
            buffers: count(&made.buffers),
            bind_groups: count(&made.bind_groups),
            pipelines: count(&made.pipelines),
            pipelines_ahead: count(&made.pipelines_ahead),
            pipelines_listed: count(&made.pipelines_listed),
            submissions: count(&made.submissions),
            dispatches: count(&made.dispatches),
        }
    }

    /// Returns whether the driver lost the device. Nothing runs on a lost device.
    pub fn is_lost(&self) -> bool {
        self.state.gpu.is_lost()
    }

    /// Destroys the device, as a driver reset would. Every later run on it fails.
    pub fn destroy(&self) {
        let _exclusive = self.state.gpu.exclusive();
        self.state.gpu.device.destroy();
    }
}

/// Returns the kernels of the provider. Claiming with them needs no adapter.
pub fn kernel_table() -> KernelTable {
    KernelTable::new(kernels::all().map(|kernel| &kernel.def))
}

impl Drop for WgpuDevice {
    fn drop(&mut self) {
        // Stop the compile threads first, so that the saved driver's cache has what they compiled.
        self.state.pipelines.stop();
        self.folders.save();
    }
}

impl Device for WgpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceId {
        self.state.memory.device()
    }

    fn allocator(&self) -> Arc<dyn Allocator> {
        Arc::new(self.state.memory.clone())
    }

    fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        self.table.claim(node)
    }

    fn compile(&self, cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
        let kernel = find_kernel(&self.table, &cx.node, kernels::all(), |kernel: &WgpuKernel| &kernel.def)?;
        // The session's compiled cache takes precedence over the device's option.
        let cache = match cx.cache_dir() {
            Some(folder) => Some(self.folders.get(&self.state.gpu, folder)?),
            None => self.cache.clone(),
        };
        let compiled = Node {
            remembered: cache.map(|cache| (cache, likeness(&cx.node, &kernel.def))),
            kernel,
            info: NodeInfo::new(&cx.node),
            state: self.state.clone(),
            cache: LaunchCache::default(),
        };
        compiled.compile_ahead(&cx.node, cx.threads);
        Ok(Box::new(compiled))
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        // No weights are packed, so only the claims of nodes matter, and those depend on the code
        // alone.
        let code = env!("ORT_CODE_HASH").to_owned();
        Some(Fingerprint { code, hardware: String::new() })
    }

    fn end_of_build(&self) {
        self.state.pipelines.finish_listed();
        self.folders.save();
    }

    fn end_of_run(&self) {
        self.folders.save();
    }

    fn check(&self) -> Result<()> {
        // `Gpu::check` would also consume a command's error that no call has reported yet.
        self.state.gpu.check_present()
    }

    fn synchronize(&self) -> Result<()> {
        let _exclusive = self.state.gpu.exclusive();
        self.state.recorder.flush()?;
        self.state.gpu.wait()
    }

    fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        let same = from.dtype() == to.dtype() && from.shape() == to.shape();
        ensure!(same, Fail, "cannot copy between tensors of different types or shapes");
        let _exclusive = self.state.gpu.exclusive();
        let resolve = |range| self.state.memory.resolve(range);
        match (from.device_range(), to.device_range()) {
            (None, Some(range)) => match resolve(range)? {
                Some(region) => self.state.upload(from, &region),
                // An empty tensor has no region, and nothing to copy.
                None => Ok(()),
            },
            (Some(range), None) => match resolve(range)? {
                Some(region) => self.state.download(&region, to.bytes_mut()?),
                None => Ok(()),
            },
            (Some(from), Some(to)) => match (resolve(from)?, resolve(to)?) {
                (Some(from), Some(to)) => self.state.move_within(&from, &to),
                _ => Ok(()),
            },
            (None, None) => Err(error!(Fail, "neither side of a copy is in the device's memory")),
        }
    }
}

impl DeviceState {
    // Writes host bytes to a region, in whole words.
    fn upload(&self, from: TensorView<'_>, to: &Region) -> Result<()> {
        let bytes = from.bytes()?;
        check_range(from.dtype(), bytes)?;
        ensure!(
            bytes.len() == to.len && to.offset.is_multiple_of(4),
            Fail,
            "a copy must begin at a multiple of 4 bytes"
        );
        let at = |offset| At { buffer: &to.buffer, offset };
        // Tensors are aligned to more than a word, so the rest of the last word belongs to no other
        // tensor.
        let (whole, rest) = bytes.split_at(bytes.len() / 4 * 4);
        self.recorder.write(whole, at(to.offset))?;
        if rest.is_empty() {
            return Ok(());
        }
        let mut word = [0; 4];
        word.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
        self.recorder.write(&word, at(to.offset + whole.len()))
    }

    fn download(&self, from: &Region, to: &mut [u8]) -> Result<()> {
        ensure!(to.len() == from.len, Fail, "cannot copy {} bytes into {} bytes", from.len, to.len());
        let at = |offset| At { buffer: &from.buffer, offset };
        // Copies move whole words: read from the word boundary before, then cut the bytes out.
        // A view of narrow elements may begin inside of a word.
        let skipped = from.offset % 4;
        if skipped == 0 && to.len().is_multiple_of(4) {
            return self.recorder.read(at(from.offset), to);
        }
        let mut words = vec![0; (skipped + to.len()).next_multiple_of(4)];
        self.recorder.read(at(from.offset - skipped), &mut words)?;
        let bytes = words.get(skipped..skipped + to.len());
        to.copy_from_slice(bytes.ok_or_else(|| error!(Fail, "too few bytes were read"))?);
        Ok(())
    }

    fn move_within(&self, from: &Region, to: &Region) -> Result<()> {
        // wgpu rejects copies within one buffer. Allocations are padded to whole words, so the
        // length may be rounded up.
        let whole = from.len == to.len && from.offset.is_multiple_of(4) && to.offset.is_multiple_of(4);
        ensure!(
            whole && from.handle != to.handle,
            Fail,
            "a copy within the device must begin at a multiple of 4 bytes"
        );
        let at = |region: &Region| (region.buffer.clone(), region.offset);
        let ((source, start), (target, place)) = (at(from), at(to));
        let from_at = At { buffer: &source, offset: start };
        self.recorder.copy(from_at, At { buffer: &target, offset: place }, from.len.next_multiple_of(4))
    }
}

/// Rejects integers of more than 32 bits: shaders have no wider type.
fn check_range(dtype: DType, bytes: &[u8]) -> Result<()> {
    let words = bytes.as_chunks::<8>().0;
    let beyond = match dtype {
        DType::I64 => words
            .iter()
            .map(|word| i64::from_le_bytes(*word))
            .find(|value| i32::try_from(*value).is_err())
            .map(|value| value.to_string()),
        DType::U64 => words
            .iter()
            .map(|word| u64::from_le_bytes(*word))
            .find(|value| u32::try_from(*value).is_err())
            .map(|value| value.to_string()),
        _ => None,
    };
    match beyond {
        None => Ok(()),
        Some(value) => Err(error!(
            NotImplemented,
            "the {} {value} does not fit into the 32 bits of the device's integers",
            dtype.name()
        )
        .help("run the model on another provider, or keep such values out of it")),
    }
}
