//! Precisions and values that tests of GEMM, convolution and attention share.

use ort_core::ep::Precision;
use ort_cpu_vector::simd::Isa;

/// The precisions that this CPU has instructions for.
pub(crate) fn precisions() -> impl Iterator<Item = Precision> {
    let bf16 = Isa::current().has_bf16_products();
    if !bf16 {
        eprintln!("without AVX512-BF16 products in bfloat16 are not tested");
    }
    [Precision::Fp32, Precision::Bf16].into_iter().take(if bf16 { 2 } else { 1 })
}

/// Deterministic pseudo-random values of both signs for a seed.
pub(crate) fn values(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}
