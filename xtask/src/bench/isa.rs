//! The instruction sets that the runtimes are limited to.

use clap::ValueEnum;

/// The values of `--isa`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Isa {
    /// All that the processor has.
    #[default]
    Native,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    /// The name that `ort limits` prints for it; none if nothing is limited.
    pub(super) fn name(self) -> Option<&'static str> {
        match self {
            Isa::Native => None,
            Isa::Avx2 => Some("avx2"),
            Isa::Avx512 => Some("avx512"),
        }
    }

    /// The environment variables that limit ours and oneDNN, which OpenVINO calls, and for AVX2
    /// ONNX Runtime (time_reference.py). OpenVINO's products with constant matrices take what the
    /// processor has: they are of an MLAS of its own.
    pub(super) fn variables(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Isa::Native => &[],
            Isa::Avx2 => &[("ORT_ISA", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2")],
            Isa::Avx512 => &[("ORT_ISA", "avx512"), ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")],
        }
    }
}
