//! The factory of devices, its options, and the GPUs that it finds.

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

/// The factory of [`CudaDevice`]s: one for each GPU that the NVIDIA driver shows.
///
/// Options, under ONNX Runtime's names:
///
/// | option | value |
/// | --- | --- |
/// | `device_id` | the device's number, as `nvidia-smi` counts; without it the one that is opened |
/// | `gpu_mem_limit` | bytes of device memory that the arena holds at most; none without it |
/// | `arena_extend_strategy` | `kNextPowerOfTwo` (the default) or `kSameAsRequested` |
/// | `do_copy_in_default_stream` | `1` (the default): copies go through the compute stream; `0`: through streams of their own |
/// | `user_compute_stream` | the address of the stream that computes; without it, or where it is 0, one of the provider's own |
/// | `library_path` | the folder that has NVIDIA's libraries; without it they are looked for |
/// | `use_cublas` | `1` (the default): cuBLASLt computes products, where it is found; `0` |
/// | `arena.use_cuda_mempool` | `1`: memory comes from a pool of the driver's in the order of the compute stream, instead of the arena; `0` (the default) |
/// | `arena.cuda_mempool_release_threshold` | bytes that such a pool may hold that are free when somebody waits for the device; 0 (the default): none |
/// | `arena.cuda_mempool_bytes_to_keep_on_shrink` | bytes that a trim leaves of such a pool; 0 (the default): only what is in use |
/// | `use_cudnn` | `1` (the default): cuDNN computes convolutions, where it is found; `0` |
/// | `cudnn_conv_algo_search` | `EXHAUSTIVE` (the default), `HEURISTIC` or `DEFAULT` |
/// | `cudnn_conv_use_max_workspace` | `1` (the default): a workspace may be as large as there is memory; `0`: 32 MiB |
/// | `cudnn_conv1d_pad_to_nc1d` | `1`: a signal is an image of one line; `0` (the default): of one column |
/// | `prefer_nhwc` | `1`: convolutions and what stands between them are of images with the channels last; `0` (the default) |
/// | `enable_cuda_graph` | `1`: what runs of the same shapes ask for is captured once and replayed; `0` (the default) |
/// | `use_tf32` | `1` (the default): products and convolutions of float32 are of TF32 where the device has tensor cores for it; `0`: of float32 |
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
        // Sessions share a device, so that they share its modules and the memory that waits to be
        // used again.
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

/// ONNX Runtime's options of its CUDA provider that have no counterpart here yet.
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

/// The options that there are.
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

/// What options say of NVIDIA's libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LibraryOptions {
    /// The folder to take them from, and from nowhere else.
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

/// The options, as they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) device_id: usize,
    pub(crate) arena: ArenaConfig,
    /// The pool that takes the place of the arena.
    pub(crate) pool: Option<PoolConfig>,
    /// Whether copies between host and device go through streams of their own.
    pub(crate) separate_copies: bool,
    /// The address of the stream that computes, where it is the caller's.
    pub(crate) user_stream: Option<usize>,
    /// Whether sequences of launches that come again are CUDA graphs.
    pub(crate) graphs: bool,
    pub(crate) libraries: LibraryOptions,
    /// Whether images are to have the channels last.
    pub(crate) prefers_channels_last: bool,
    /// Whether products of float32 may be of TF32.
    pub(crate) tf32: bool,
}

impl Options {
    pub(crate) fn parse(index: usize, options: &ProviderOptions) -> Result<Options> {
        if let Some(name) = options.keys().find(|name| NOT_YET.contains(&name.as_str())) {
            return Err(error!(NotImplemented, "the {NAME} provider has no option '{name}' yet")
                .help(format!("leave this option of ONNX Runtime's out; there are {}", KNOWN.join(", "))));
        }
        check_options(NAME, options, KNOWN)?;
        // What no request fits is given back before there is more: shapes that grow from run to run
        // hold what the last one takes.
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

/// Whether something is on, in the words of ONNX Runtime.
fn switch(value: &str) -> Result<bool, &'static str> {
    match value {
        "1" | "true" | "True" => Ok(true),
        "0" | "false" | "False" => Ok(false),
        _ => Err("0 or 1"),
    }
}

/// An address, decimal or with 0x before it.
fn pointer(value: &str) -> Result<usize, &'static str> {
    let hexadecimal = value.strip_prefix("0x").or_else(|| value.strip_prefix("0X"));
    let parsed = hexadecimal.map_or_else(|| value.parse(), |digits| usize::from_str_radix(digits, 16));
    parsed.map_err(|_| "the address of a stream, decimal or with 0x before it")
}

/// What is told of a device.
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
