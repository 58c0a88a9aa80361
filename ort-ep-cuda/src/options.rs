//! The provider's options, which have ONNX Runtime's names.

use std::path::PathBuf;

use ort_alloc::{ArenaConfig, ExtendStrategy};
use ort_core::ep::{ProviderOptions, check_options};
use ort_core::{Result, error};

use crate::libraries::{ConvOptions, Search};

/// The name of the provider.
pub(crate) const NAME: &str = "cuda";

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

/// The options of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolConfig {
    /// Free bytes the pool keeps when the host synchronizes with the device.
    pub(crate) release_threshold: u64,
    /// Bytes that a trim leaves in the pool.
    pub(crate) keep_on_shrink: usize,
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
        // An option that ONNX Runtime has gets this message, rather than that of an unknown name.
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
            // As in ONNX Runtime, address 0 means that the caller has no stream.
            "user_compute_stream" => self.user_stream = Some(pointer(value)?).filter(|address| *address != 0),
            _ => {
                // `check_options` has refused unknown names, so this is `arena_extend_strategy`.
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
