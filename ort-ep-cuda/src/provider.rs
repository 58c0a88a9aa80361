//! The CUDA execution provider: device discovery and provider options.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use ort_alloc::{ArenaConfig, ExtendStrategy};
use ort_core::ep::{Device, DeviceInfo, ExecutionProvider, ProviderEntry, ProviderOptions, check_options};
use ort_core::{Result, ensure, error};
use parking_lot::Mutex;

use crate::device::CudaDevice;
use crate::driver::{Driver, NO_DEVICE, PhysicalDevice};
use crate::libraries::{ConvOptions, LibraryReport, Search, reports};
use crate::pool::PoolConfig;

/// The name of the provider.
const NAME: &str = "cuda";

/// The CUDA execution provider, with one [`CudaDevice`] per GPU that the NVIDIA driver shows.
///
/// Its options have ONNX Runtime's names:
///
/// | option | value |
/// | --- | --- |
/// | `device_id` | the device number, as `nvidia-smi` counts; default: the opened device |
/// | `gpu_mem_limit` | the most bytes of device memory the arena holds; default: no limit |
/// | `arena_extend_strategy` | `kNextPowerOfTwo` (the default) or `kSameAsRequested` |
/// | `do_copy_in_default_stream` | `0`: copies have own streams; `1` (the default): they do not |
/// | `user_compute_stream` | address of the caller's compute stream; 0 or absent: our own |
/// | `library_path` | the folder of NVIDIA's libraries; without it they are searched for |
/// | `use_cublas` | `1` (the default): cuBLASLt computes GEMMs, if found; `0`: it is not used |
/// | `arena.use_cuda_mempool` | `1`: a stream-ordered pool replaces the arena; `0` (the default) |
/// | `arena.cuda_mempool_release_threshold` | free bytes the pool keeps at a sync; default: 0 |
/// | `arena.cuda_mempool_bytes_to_keep_on_shrink` | bytes that a trim leaves; default: 0 |
/// | `use_cudnn` | `1` (the default): cuDNN computes convolutions, if found; `0`: it is not used |
/// | `cudnn_conv_algo_search` | `EXHAUSTIVE` (the default), `HEURISTIC` or `DEFAULT` |
/// | `cudnn_conv_use_max_workspace` | `1` (the default): up to all free memory; `0`: 32 MiB |
/// | `cudnn_conv1d_pad_to_nc1d` | `1`: 1-D convolutions as NC1D; `0` (the default): as NCD1 |
/// | `prefer_nhwc` | `1`: convolutions and the nodes between them run in NHWC; `0` (the default) |
/// | `enable_cuda_graph` | `1`: runs of the same shapes replay CUDA graphs; `0` (the default) |
/// | `use_tf32` | `1` (the default): float32 GEMMs and convolutions may use TF32; `0`: never |
#[derive(Debug)]
pub struct CudaProvider;

inventory::submit! { ProviderEntry(&CudaProvider) }

impl ExecutionProvider for CudaProvider {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let driver = Driver::get()?;
        let count = driver.count()?;
        ensure!(count > 0, EpFail, help = NO_DEVICE, "the NVIDIA driver shows no device");
        let libraries = reports();
        (0..count).map(|index| describe(driver, driver.device(index)?, &libraries)).collect()
    }

    fn open(&self, index: usize, options: &ProviderOptions) -> Result<Arc<dyn Device>> {
        // Sessions with the same options share a device, and with it the compiled modules and the
        // free memory. A device whose context is broken is dropped from the list.
        static OPEN: Mutex<Vec<(Options, Weak<CudaDevice>)>> = Mutex::new(Vec::new());
        let parsed = Options::parse(index, options)?;
        let mut open = OPEN.lock();
        open.retain(|(_, device)| device.upgrade().is_some_and(|device| device.check().is_ok()));
        let same = open.iter().find(|(options, _)| *options == parsed);
        if let Some(device) = same.and_then(|(_, device)| device.upgrade()) {
            return Ok(device);
        }
        let device = CudaDevice::open(index, options)?;
        open.push((parsed, Arc::downgrade(&device)));
        Ok(device)
    }
}

/// Options of ONNX Runtime's CUDA provider that have no counterpart here yet.
const NOT_YET: &[&str] = &[
    "default_memory_arena_cfg",
    "enable_skip_layer_norm_strict_mode",
    "fuse_conv_bias",
    "gpu_external_alloc",
    "gpu_external_empty_cache",
    "gpu_external_free",
    "has_user_compute_stream",
    "min_num_runs_before_cuda_graph_capture",
    "sdpa_kernel",
    "tunable_op_enable",
    "tunable_op_max_tuning_duration_ms",
    "tunable_op_tuning_enable",
    "use_ep_level_unified_stream",
];

/// The supported options.
const KNOWN: &[&str] = &[
    "arena.cuda_mempool_bytes_to_keep_on_shrink",
    "arena.cuda_mempool_release_threshold",
    "arena.use_cuda_mempool",
    "arena_extend_strategy",
    "cudnn_conv1d_pad_to_nc1d",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "device_id",
    "do_copy_in_default_stream",
    "enable_cuda_graph",
    "gpu_mem_limit",
    "library_path",
    "prefer_nhwc",
    "use_cublas",
    "use_cudnn",
    "use_tf32",
    "user_compute_stream",
];

/// The options for NVIDIA's libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LibraryOptions {
    /// The only folder to load them from, if set.
    pub(crate) path: Option<PathBuf>,
    pub(crate) cublas: bool,
    pub(crate) cudnn: bool,
    pub(crate) convolutions: ConvOptions,
}

impl Default for LibraryOptions {
    fn default() -> LibraryOptions {
        LibraryOptions { path: None, cublas: true, cudnn: true, convolutions: ConvOptions::default() }
    }
}

/// The parsed options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) device_id: usize,
    pub(crate) arena: ArenaConfig,
    /// The pool that replaces the arena.
    pub(crate) pool: Option<PoolConfig>,
    /// Whether copies between host and device have their own streams.
    pub(crate) separate_copies: bool,
    /// The address of the caller's compute stream.
    pub(crate) user_stream: Option<usize>,
    /// Whether repeated launch sequences are replayed as CUDA graphs.
    pub(crate) graphs: bool,
    pub(crate) libraries: LibraryOptions,
    /// Whether convolutions and the nodes between them run in NHWC.
    pub(crate) prefers_channels_last: bool,
    /// Whether float32 GEMMs and convolutions may run in TF32.
    pub(crate) tf32: bool,
}

impl Options {
    pub(crate) fn parse(index: usize, options: &ProviderOptions) -> Result<Options> {
        if let Some(name) = options.keys().find(|name| NOT_YET.contains(&name.as_str())) {
            return Err(error!(NotImplemented, "the {NAME} provider has no option '{name}' yet")
                .help(format!("leave this option of ONNX Runtime's out; there are {}", KNOWN.join(", "))));
        }
        check_options(NAME, options, KNOWN)?;
        // The arena frees regions that no request fits before it asks for more. With shapes that
        // grow from run to run, it then holds only what the last run needs.
        let arena = ArenaConfig { replace_free_regions: true, ..ArenaConfig::default() };
        let mut parsed = Options {
            device_id: index,
            arena,
            pool: None,
            separate_copies: false,
            user_stream: None,
            graphs: false,
            tf32: true,
            libraries: LibraryOptions::default(),
            prefers_channels_last: false,
        };
        // The pool's options may come before the one that enables it, so we build it at the end.
        let (mut uses_pool, mut pool) = (false, PoolConfig::default());
        for (name, value) in options {
            let set = match name.as_str() {
                "arena.use_cuda_mempool" => switch(value).map(|is_on| uses_pool = is_on),
                "arena.cuda_mempool_release_threshold" => {
                    bytes(value).map(|bytes| pool.release_threshold = bytes)
                }
                "arena.cuda_mempool_bytes_to_keep_on_shrink" => {
                    bytes(value).map(|bytes| pool.keep_on_shrink = bytes)
                }
                _ => parsed.set(name, value),
            };
            set.map_err(|expected| {
                error!(
                    InvalidArgument,
                    "option {name} of the {NAME} provider is '{value}', expected {expected}"
                )
            })?;
        }
        parsed.pool = uses_pool.then_some(pool);
        Ok(parsed)
    }

    /// Sets a known option; the error says what was expected.
    fn set(&mut self, name: &str, value: &str) -> Result<(), &'static str> {
        match name {
            "device_id" => self.device_id = value.parse().map_err(|_| "the number of a device")?,
            "gpu_mem_limit" => {
                self.arena.limit = Some(bytes(value)?);
            }
            "do_copy_in_default_stream" => self.separate_copies = !switch(value)?,
            "library_path" if value.is_empty() => return Err("a folder"),
            "library_path" => self.libraries.path = Some(PathBuf::from(value)),
            "use_cublas" => self.libraries.cublas = switch(value)?,
            "use_cudnn" => self.libraries.cudnn = switch(value)?,
            "cudnn_conv_algo_search" => {
                self.libraries.convolutions.search = match value {
                    "EXHAUSTIVE" => Search::Exhaustive,
                    "HEURISTIC" => Search::Heuristic,
                    "DEFAULT" => Search::Default,
                    _ => return Err("'EXHAUSTIVE', 'HEURISTIC' or 'DEFAULT'"),
                }
            }
            "cudnn_conv_use_max_workspace" => self.libraries.convolutions.max_workspace = switch(value)?,
            "cudnn_conv1d_pad_to_nc1d" => self.libraries.convolutions.pads_to_nc1d = switch(value)?,
            "enable_cuda_graph" => self.graphs = switch(value)?,
            "prefer_nhwc" => self.prefers_channels_last = switch(value)?,
            "use_tf32" => self.tf32 = switch(value)?,
            "user_compute_stream" => self.user_stream = Some(pointer(value)?).filter(|address| *address != 0),
            _ => {
                self.arena.extend = match value {
                    "kNextPowerOfTwo" => ExtendStrategy::PowerOfTwo,
                    "kSameAsRequested" => ExtendStrategy::SameAsRequested,
                    _ => return Err("'kNextPowerOfTwo' or 'kSameAsRequested'"),
                }
            }
        }
        Ok(())
    }
}

fn bytes<T: std::str::FromStr>(value: &str) -> Result<T, &'static str> {
    value.parse().map_err(|_| "a number of bytes")
}

/// Parses a switch, in ONNX Runtime's spellings.
fn switch(value: &str) -> Result<bool, &'static str> {
    match value {
        "1" | "true" | "True" => Ok(true),
        "0" | "false" | "False" => Ok(false),
        _ => Err("0 or 1"),
    }
}

/// Parses an address, decimal or hexadecimal with a 0x prefix.
fn pointer(value: &str) -> Result<usize, &'static str> {
    let hexadecimal = value.strip_prefix("0x").or_else(|| value.strip_prefix("0X"));
    let parsed = hexadecimal.map_or_else(|| value.parse(), |digits| usize::from_str_radix(digits, 16));
    parsed.map_err(|_| "the address of a stream, decimal or with 0x before it")
}

/// Describes a device to the user.
pub(crate) fn describe(
    driver: &Driver,
    device: PhysicalDevice,
    libraries: &[LibraryReport],
) -> Result<DeviceInfo> {
    let limits = device.limits()?;
    let own = [
        ("compute capability", format!("{}.{}", limits.capability / 10, limits.capability % 10)),
        ("multiprocessors", limits.processors.to_string()),
        ("driver for CUDA", driver.version()),
    ];
    let facts = own.into_iter().chain(libraries.iter().map(|report| (report.name, report.to_text())));
    Ok(DeviceInfo {
        provider: NAME,
        name: device.name()?,
        memory_bytes: Some(device.memory()? as u64),
        facts: facts.map(|(name, value)| (name.to_owned(), value)).collect(),
    })
}
