//! Device code: kernel families, which the driver's JIT compiles on first launch, and rendered PTX,
//! which is compiled once per text.

use std::io::Read;
use std::sync::Arc;

use flate2::read::GzDecoder;
use ort_core::{Result, Within, error};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::driver::{Context, Function, Module};
use crate::launch::{Code, Launch};

/// The families as compressed PTX. The `all` list has versions for compute capability 7.5, 8.0 and
/// 9.0, each also for newer devices. Families of `cores` need tensor cores for floats and start at
/// 8.0. Families of `hopper` need warpgroups and exist for 9.0 alone.
macro_rules! families {
    (
        all: [$($all:literal),* $(,)?],
        cores: [$($cores:literal),* $(,)?],
        hopper: [$($hopper:literal),* $(,)?],
    ) => {
        &[
            $(($all, &[of!($all, 90), of!($all, 80), of!($all, 75)]),)*
            $(($cores, &[of!($cores, 90), of!($cores, 80)]),)*
            $(($hopper, &[of!($hopper)]),)*
        ]
    };
}
macro_rules! of {
    ($name:literal, $capability:literal) => {
        Version {
            capability: $capability,
            is_exact: false,
            ptx: include_bytes!(concat!("../ptx/", $name, "_", $capability, ".ptx.gz")),
        }
    };
    ($name:literal) => {
        Version {
            capability: WARPGROUPS,
            is_exact: true,
            ptx: include_bytes!(concat!("../ptx/", $name, "_90a.ptx.gz")),
        }
    };
}

/// Compressed PTX for one compute capability.
struct Version {
    capability: u32,
    /// Whether it runs on its compute capability alone, not on newer ones.
    is_exact: bool,
    ptx: &'static [u8],
}

impl Version {
    fn is_for(&self, capability: u32) -> bool {
        if self.is_exact { self.capability == capability } else { self.capability <= capability }
    }
}

type Family = (&'static str, &'static [Version]);

const FAMILIES: &[Family] = families![
    all: [
        "accumulate_f32",
        "accumulate_f64",
        "adafactor_f32",
        "adafactor_f64",
        "adam_8bit_f32",
        "adam_8bit_f64",
        "adam_f32",
        "adam_f64",
        "attention_join",
        "attention_rows_bf16",
        "attention_rows_f16",
        "attention_rows_f32",
        "attention_tiles_bf16",
        "attention_tiles_f16",
        "attention_tiles_f32",
        "bits",
        "conv_bf16",
        "conv_f16",
        "conv_f32",
        "conv_integer",
        "conv_pixels_bf16",
        "conv_pixels_f16",
        "conv_pixels_f32",
        "dropout",
        "einsum",
        "gather",
        "gemm_bf16",
        "gemm_f16",
        "gemm_f32",
        "gemm_f64",
        "gemm_i32",
        "gemm_i64",
        "gradients",
        "heads",
        "integer",
        "lamb_f32",
        "lamb_f64",
        "linear_attention",
        "lines",
        "local",
        "loss",
        "movement",
        "narrow",
        "nbits_2_bf16",
        "nbits_2_f16",
        "nbits_2_f32",
        "nbits_4_bf16",
        "nbits_4_f16",
        "nbits_4_f32",
        "nbits_8_bf16",
        "nbits_8_f16",
        "nbits_8_f32",
        "nbits_tiles_bf16",
        "nbits_tiles_f16",
        "nbits_tiles_f32",
        "norm",
        "pool",
        "quant",
        "recurrent",
        "reduce",
        "resize",
        "rows",
        "sample",
        "scatter",
        "select",
        "sgd_f32",
        "sgd_f64",
        "sort",
        "standard_f32",
        "standard_f64",
        "training_attention_tiles_bf16",
        "training_attention_tiles_f16",
        "training_attention_tiles_f32",
        "training_conv",
        "training_norm",
        "unique",
    ],
    cores: [
        "attention_cores_bf16",
        "attention_cores_f16",
        "conv_cores_bf16",
        "conv_cores_f16",
        "conv_cores_tf32",
        "conv_pixels_cores_bf16",
        "conv_pixels_cores_f16",
        "conv_pixels_cores_tf32",
        "gemm_tf32",
        "training_attention_cores_bf16",
        "training_attention_cores_f16",
        "training_conv_cores_bf16",
        "training_conv_cores_f16",
        "training_conv_cores_tf32",
    ],
    hopper: [
        "conv_pixels_warpgroups_bf16",
        "conv_pixels_warpgroups_f16",
        "gemm_maps_bf16",
        "gemm_maps_f16",
        "gemm_warpgroups_bf16",
        "gemm_warpgroups_f16",
    ],
];

/// The oldest compute capability that kernels are compiled for.
pub(crate) const OLDEST: u32 = 75;
/// The first compute capability whose tensor cores support all types that our mma kernels use.
pub(crate) const TENSOR_CORES: u32 = 80;
/// The only compute capability with warpgroup mma: PTX for `sm_90a` does not run on newer devices.
pub(crate) const WARPGROUPS: u32 = 90;

/// The modules loaded on a device.
pub(crate) struct Modules {
    context: Arc<Context>,
    capability: u32,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    families: FxHashMap<&'static str, Arc<Module>>,
    texts: FxHashMap<Arc<str>, Arc<Module>>,
    /// The dynamic shared memory that each function is allowed.
    allowed: FxHashMap<Function, u32>,
}

/// An entry, which keeps its module loaded.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) function: Function,
    _module: Arc<Module>,
}

impl Modules {
    pub(crate) fn new(context: Arc<Context>, capability: u32) -> Modules {
        Modules { context, capability, loaded: Mutex::default() }
    }

    /// Returns the entry of a launch, or `None` for a library call.
    pub(crate) fn entry(&self, launch: &Launch) -> Result<Option<Entry>> {
        let module = match &launch.code {
            Code::Library(_) => return Ok(None),
            Code::Family(name) => self.family(name)?,
            Code::Text(text) => self.text(text)?,
        };
        let function = module.function(&launch.entry)?;
        if launch.shared > 0 {
            self.allow_shared(&module, function, launch.shared)?;
        }
        Ok(Some(Entry { function, _module: module }))
    }

    /// Raises a function's dynamic shared memory limit above the default 48 KiB. The limit never
    /// shrinks, because cached launches of other sizes still rely on it.
    fn allow_shared(&self, module: &Module, function: Function, bytes: u32) -> Result<()> {
        let mut loaded = self.loaded.lock();
        let allowed = loaded.allowed.entry(function).or_default();
        if *allowed < bytes {
            module.allow_shared(function, bytes)?;
            *allowed = bytes;
        }
        Ok(())
    }

    /// Returns how many modules are loaded.
    pub(crate) fn count(&self) -> usize {
        let loaded = self.loaded.lock();
        loaded.families.len() + loaded.texts.len()
    }

    fn family(&self, name: &'static str) -> Result<Arc<Module>> {
        // The lock is held while the driver compiles, so a second thread that wants this family
        // waits instead of compiling it twice.
        let mut loaded = self.loaded.lock();
        if let Some(module) = loaded.families.get(name) {
            return Ok(module.clone());
        }
        let (_, versions) = find(name)?;
        // Versions are listed newest first, so the first fit is the best one.
        let fitting = versions.iter().find(|version| version.is_for(self.capability));
        let version = fitting.ok_or_else(|| {
            error!(Fail, "there are no kernels '{name}' for compute capability {}", self.capability)
        })?;
        let module = self.context.load(&unpacked(version.ptx)?).within(|| format!("kernels '{name}'"))?;
        let module = Arc::new(module);
        loaded.families.insert(name, module.clone());
        Ok(module)
    }

    fn text(&self, text: &Arc<str>) -> Result<Arc<Module>> {
        let mut loaded = self.loaded.lock();
        if let Some(module) = loaded.texts.get(text) {
            return Ok(module.clone());
        }
        // The lock is held as in `family`, so that each text is compiled once.
        let module = Arc::new(self.context.load(text).within(|| "a rendered kernel".to_owned())?);
        loaded.texts.insert(text.clone(), module.clone());
        Ok(module)
    }
}

fn find(name: &str) -> Result<&'static Family> {
    let found = FAMILIES.iter().find(|(family, _)| *family == name);
    found.ok_or_else(|| error!(Fail, "there is no family of kernels '{name}'"))
}

/// Returns the family of one element type. Each type has its own family, so that only the used ones
/// are compiled.
pub(crate) fn of_type(name: &str, suffix: &str) -> Result<&'static str> {
    Ok(find(&format!("{name}_{suffix}"))?.0)
}

/// Decompresses PTX.
pub(crate) fn unpacked(bytes: &[u8]) -> Result<String> {
    let mut text = String::new();
    let read = GzDecoder::new(bytes).read_to_string(&mut text);
    read.map_err(|problem| error!(Fail, "the PTX of this build is damaged: {problem}"))?;
    Ok(text)
}

/// The error for a device that is older than any compiled kernel.
pub(crate) fn too_old(capability: u32) -> ort_core::Error {
    error!(
        EpFail,
        "the device has compute capability {}.{}, and kernels need {}.{}",
        capability / 10,
        capability % 10,
        OLDEST / 10,
        OLDEST % 10
    )
    .help("run on a GPU of the Turing generation or newer, or on another provider")
}
