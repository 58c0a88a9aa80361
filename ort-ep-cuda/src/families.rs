//! Kernel families: the PTX of `cu/*.cu`, compressed, by name and compute capability.

use std::io::Read;

use flate2::read::GzDecoder;
use ort_core::{Result, error};

use crate::driver::WARPGROUPS;

/// The families as compressed PTX. The `all` list has versions for compute capability 7.5, 8.0 and
/// 9.0, each also for newer devices. Families of `mma` need tensor cores for floats and start at
/// 8.0. Families of `hopper` need warpgroups and exist for 9.0 alone.
macro_rules! families {
    (
        all: [$($all:literal),* $(,)?],
        mma: [$($mma:literal),* $(,)?],
        hopper: [$($hopper:literal),* $(,)?],
    ) => {
        &[
            $(($all, &[of!($all, 90), of!($all, 80), of!($all, 75)]),)*
            $(($mma, &[of!($mma, 90), of!($mma, 80)]),)*
            $(($hopper, &[of!($hopper)]),)*
        ]
    };
}
macro_rules! of {
    ($name:literal, $capability:literal) => {
        PtxVersion {
            capability: $capability,
            is_exact: false,
            ptx: include_bytes!(concat!("../ptx/", $name, "_", $capability, ".ptx.gz")),
        }
    };
    ($name:literal) => {
        PtxVersion {
            capability: WARPGROUPS,
            is_exact: true,
            ptx: include_bytes!(concat!("../ptx/", $name, "_90a.ptx.gz")),
        }
    };
}

/// Compressed PTX for one compute capability.
pub(crate) struct PtxVersion {
    capability: u32,
    /// Whether it runs on its compute capability alone, not on newer ones.
    is_exact: bool,
    pub(crate) ptx: &'static [u8],
}

impl PtxVersion {
    /// Whether a device of this compute capability runs it.
    pub(crate) fn is_for(&self, capability: u32) -> bool {
        if self.is_exact { self.capability == capability } else { self.capability <= capability }
    }
}

type KernelFamily = (&'static str, &'static [PtxVersion]);

const FAMILIES: &[KernelFamily] = families![
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
    mma: [
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

fn find(name: &str) -> Result<&'static KernelFamily> {
    let found = FAMILIES.iter().find(|(family, _)| *family == name);
    found.ok_or_else(|| error!(Fail, "there is no family of kernels '{name}'"))
}

/// Returns the versions of a family, newest first.
pub(crate) fn find_family(name: &str) -> Result<&'static [PtxVersion]> {
    Ok(find(name)?.1)
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
