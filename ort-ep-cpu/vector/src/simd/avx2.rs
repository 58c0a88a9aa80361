//! AVX2 vectors: 256 bits, with FMA.

use std::arch::x86_64::*;

use super::Simd;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// Creates the proof without a check.
    ///
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    #[inline(always)]
    pub unsafe fn new_unchecked() -> Avx2 {
        Avx2(())
    }
}

/// Calls an intrinsic of this instruction set.
macro_rules! intrinsic {
    ($call:expr) => {{
        // SAFETY: `Avx2` exists only on CPUs with AVX2, FMA and F16C, and the caller of a load or
        // store guarantees its memory.
        unsafe { $call }
    }};
}

impl Simd for Avx2 {
    type F32 = __m256;
    type I32 = __m256i;
    type Mask = __m256;
    const LANES: usize = 8;
    const REGISTERS: usize = 16;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F32 {
        intrinsic!(_mm256_set1_ps(value))
    }
    #[inline(always)]
    fn splat_i32(self, value: i32) -> Self::I32 {
        intrinsic!(_mm256_set1_epi32(value))
    }
    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> Self::F32 {
        intrinsic!(_mm256_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn load_partial_ptr(self, from: *const f32, count: usize, fill: f32) -> Self::F32 {
        intrinsic!({
            let mask = first_lanes(count);
            let lanes = _mm256_maskload_ps(from, mask);
            // Lanes outside the mask are already 0. Callers pass a constant, so the compiler
            // decides this.
            if fill.to_bits() == 0 {
                return lanes;
            }
            _mm256_blendv_ps(_mm256_set1_ps(fill), lanes, _mm256_castsi256_ps(mask))
        })
    }
    #[inline(always)]
    unsafe fn load_masked_ptr(self, from: *const f32, mask: Self::Mask) -> Self::F32 {
        intrinsic!(_mm256_maskload_ps(from, _mm256_castps_si256(mask)))
    }
    #[inline(always)]
    fn mask_of_bits(self, bits: u16) -> Self::Mask {
        intrinsic!({
            let places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(i32::from(bits)), places);
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, places))
        })
    }
    #[inline(always)]
    unsafe fn store_partial_ptr(self, to: *mut f32, count: usize, value: Self::F32) {
        intrinsic!(_mm256_maskstore_ps(to, first_lanes(count), value))
    }
    #[inline(always)]
    fn shift_in_first(self, first: f32, a: Self::F32) -> Self::F32 {
        intrinsic!({
            let turned = _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6));
            _mm256_blend_ps::<1>(turned, _mm256_set1_ps(first))
        })
    }
    #[inline(always)]
    fn shift_in_last(self, a: Self::F32, last: f32) -> Self::F32 {
        intrinsic!({
            let turned = _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 0));
            _mm256_blend_ps::<0x80>(turned, _mm256_set1_ps(last))
        })
    }
    #[inline(always)]
    fn part_even_odd(self, low: Self::F32, high: Self::F32) -> (Self::F32, Self::F32) {
        intrinsic!({
            // The shuffle works within 128-bit halves, so the result is then reordered in 64-bit
            // quarters.
            let even = _mm256_castps_pd(_mm256_shuffle_ps::<0b10_00_10_00>(low, high));
            let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0b11_01_11_01>(low, high));
            (
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(even)),
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(odd)),
            )
        })
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, from: *const u16) -> Self::F32 {
        intrinsic!(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())))
    }
    #[inline(always)]
    unsafe fn store_f16_ptr(self, to: *mut u16, value: Self::F32) {
        intrinsic!(_mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(value)))
    }
    #[inline(always)]
    unsafe fn load_u8_ptr(self, from: *const u8) -> Self::I32 {
        intrinsic!(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())))
    }
    #[inline(always)]
    fn prefetch(self, address: *const f32) {
        // A prefetch never faults.
        intrinsic!(_mm_prefetch::<_MM_HINT_T1>(address.cast()))
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, value: Self::F32) {
        intrinsic!(_mm256_storeu_ps(to, value))
    }
    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn neg_mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_fnmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn min_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn max_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_sqrt_ps(a))
    }
    #[inline(always)]
    fn round_even(self, a: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn floor(self, a: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_round_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn ceil(self, a: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_round_ps::<{ _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn trunc(self, a: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_round_ps::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, a: Self::F32, n: Self::F32) -> Self::F32 {
        intrinsic!({
            // Two steps keep each factor a normal number, so only the second can round or overflow.
            let n = _mm256_max_ps(_mm256_set1_ps(-252.0), _mm256_min_ps(_mm256_set1_ps(252.0), n));
            let n = _mm256_cvtps_epi32(n);
            let first = _mm256_srai_epi32::<1>(n);
            let second = _mm256_sub_epi32(n, first);
            let bias = _mm256_set1_epi32(127);
            let first = _mm256_slli_epi32::<23>(_mm256_add_epi32(first, bias));
            let second = _mm256_slli_epi32::<23>(_mm256_add_epi32(second, bias));
            _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second))
        })
    }
    #[inline(always)]
    fn lt(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        intrinsic!(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn le(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        intrinsic!(_mm256_cmp_ps::<_CMP_LE_OQ>(a, b))
    }
    #[inline(always)]
    fn eq(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        intrinsic!(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, b))
    }
    #[inline(always)]
    fn is_nan(self, a: Self::F32) -> Self::Mask {
        intrinsic!(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, a))
    }
    #[inline(always)]
    fn select(self, mask: Self::Mask, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm256_blendv_ps(b, a, mask))
    }
    #[inline(always)]
    fn horizontal_sum(self, a: Self::F32) -> f32 {
        intrinsic!({
            let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn any(self, mask: Self::Mask) -> bool {
        intrinsic!(_mm256_movemask_ps(mask)) != 0
    }
    #[inline(always)]
    fn to_bits(self, a: Self::F32) -> Self::I32 {
        intrinsic!(_mm256_castps_si256(a))
    }
    #[inline(always)]
    fn from_bits(self, a: Self::I32) -> Self::F32 {
        intrinsic!(_mm256_castsi256_ps(a))
    }
    #[inline(always)]
    fn to_i32(self, a: Self::F32) -> Self::I32 {
        intrinsic!(_mm256_cvtps_epi32(a))
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I32) -> Self::F32 {
        intrinsic!(_mm256_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(_mm256_add_epi32(a, b))
    }
    #[inline(always)]
    fn sub_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(_mm256_sub_epi32(a, b))
    }
    #[inline(always)]
    fn and_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(_mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn or_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn xor_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(_mm256_xor_si256(a, b))
    }
    #[inline(always)]
    fn shl_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32 {
        intrinsic!(_mm256_sllv_epi32(a, _mm256_set1_epi32(BITS as i32)))
    }
    #[inline(always)]
    fn shr_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32 {
        intrinsic!(_mm256_srav_epi32(a, _mm256_set1_epi32(BITS as i32)))
    }
}

/// Returns a mask of the first `count` lanes.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn first_lanes(count: usize) -> __m256i {
    let lanes = intrinsic!(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    intrinsic!(_mm256_cmpgt_epi32(_mm256_set1_epi32(count.min(8) as i32), lanes))
}
