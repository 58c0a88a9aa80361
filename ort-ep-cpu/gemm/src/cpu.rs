//! The configuration of a GEMM: instruction set, threads and precision.

use ort_core::ep::Precision;
use ort_cpu_vector::simd::isa::Isa;

/// The rows of A below which a GEMM takes no less time: it waits for B, which comes from L3 or DRAM
/// and not from L2. The number of threads depends on this time.
pub(crate) const ROWS_PER_READ: usize = 4;

/// What to compute with: the instruction set, the number of threads including the calling one, and
/// the precision of the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// The instruction set to use. If this CPU lacks it, the widest one below it is used.
    pub isa: Isa,
    /// The maximum number of threads.
    pub threads: usize,
    /// The precision that `f32` GEMM operands are rounded to. Without [`Isa::has_bf16_products`] it
    /// is float32.
    pub precision: Precision,
}

impl Cpu {
    /// The widest allowed instruction set, on `threads` threads, in float32.
    pub fn with_threads(threads: usize) -> Self {
        Cpu { isa: Isa::current(), threads: threads.max(1), precision: Precision::Fp32 }
    }

    /// Returns the precisions that this CPU has instructions for.
    pub fn precisions() -> impl Iterator<Item = Precision> {
        let bf16 = Isa::current().has_bf16_products();
        [Precision::Fp32, Precision::Bf16].into_iter().take(if bf16 { 2 } else { 1 })
    }

    /// Returns the same configuration with another precision.
    #[must_use]
    pub fn in_precision(self, precision: Precision) -> Self {
        Cpu { precision, ..self }
    }
}
