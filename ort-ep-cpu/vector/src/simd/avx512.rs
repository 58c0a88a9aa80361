//! AVX-512 vectors.

use std::arch::x86_64::*;

use super::Simd;

/// Proof that the CPU has AVX-512 F, BW, DQ and VL.
#[derive(Debug, Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// Creates the proof without a check.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW, DQ and VL.
    #[inline(always)]
    pub unsafe fn new_unchecked() -> Avx512 {
        Avx512(())
    }
}

/// Calls an intrinsic of this instruction set.
macro_rules! intrinsic {
    ($call:expr) => {{
        // SAFETY: `Avx512` exists only on CPUs with AVX-512 F, BW, DQ and VL, and the caller of a
        // load or store guarantees its memory.
        unsafe { $call }
    }};
}

impl Simd for Avx512 {
    type F32 = __m512;
    type I32 = __m512i;
    type Mask = __mmask16;
    const LANES: usize = 16;
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F32 {
        intrinsic!(_mm512_set1_ps(value))
    }
    #[inline(always)]
    fn splat_i32(self, value: i32) -> Self::I32 {
        intrinsic!(_mm512_set1_epi32(value))
    }
    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> Self::F32 {
        intrinsic!(_mm512_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn load_partial_ptr(self, from: *const f32, count: usize, fill: f32) -> Self::F32 {
        let mask = first_lanes(count);
        intrinsic!(_mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask, from))
    }
    #[inline(always)]
    unsafe fn load_masked_ptr(self, from: *const f32, mask: Self::Mask) -> Self::F32 {
        intrinsic!(_mm512_maskz_loadu_ps(mask, from))
    }
    #[inline(always)]
    fn mask_of_bits(self, bits: u16) -> Self::Mask {
        bits
    }
    #[inline(always)]
    unsafe fn store_partial_ptr(self, to: *mut f32, count: usize, value: Self::F32) {
        intrinsic!(_mm512_mask_storeu_ps(to, first_lanes(count), value))
    }
    #[inline(always)]
    fn shift_in_first(self, first: f32, a: Self::F32) -> Self::F32 {
        intrinsic!({
            let first = _mm512_castps_si512(_mm512_set1_ps(first));
            _mm512_castsi512_ps(_mm512_alignr_epi32::<15>(_mm512_castps_si512(a), first))
        })
    }
    #[inline(always)]
    fn shift_in_last(self, a: Self::F32, last: f32) -> Self::F32 {
        intrinsic!({
            let last = _mm512_castps_si512(_mm512_set1_ps(last));
            _mm512_castsi512_ps(_mm512_alignr_epi32::<1>(last, _mm512_castps_si512(a)))
        })
    }
    #[inline(always)]
    fn part_even_odd(self, low: Self::F32, high: Self::F32) -> (Self::F32, Self::F32) {
        intrinsic!({
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
            (_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high))
        })
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, from: *const u16) -> Self::F32 {
        intrinsic!(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
    }
    #[inline(always)]
    unsafe fn store_f16_ptr(self, to: *mut u16, value: Self::F32) {
        intrinsic!(_mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(value)))
    }
    #[inline(always)]
    unsafe fn load_u8_ptr(self, from: *const u8) -> Self::I32 {
        intrinsic!(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())))
    }
    #[inline(always)]
    fn decoder<const BITS: u32>(self, scale: Self::F32, zero: Self::F32) -> Self::F32 {
        intrinsic!({
            let places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            // A look-up uses the low four bits of a lane, so a 2-bit table is repeated four times.
            let quantized = if BITS == 2 { _mm512_and_si512(places, _mm512_set1_epi32(3)) } else { places };
            self.mul(self.sub(self.to_f32(quantized), zero), scale)
        })
    }
    #[inline(always)]
    fn decode<const BITS: u32>(
        self,
        quantized: Self::I32,
        table: Self::F32,
        scale: Self::F32,
        zero: Self::F32,
    ) -> Self::F32 {
        match BITS {
            8 => self.mul(self.sub(self.to_f32(quantized), zero), scale),
            _ => intrinsic!(_mm512_permutexvar_ps(quantized, table)),
        }
    }
    #[inline(always)]
    fn prefetch(self, address: *const f32) {
        // A prefetch never faults.
        intrinsic!(_mm_prefetch::<_MM_HINT_T1>(address.cast()))
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, value: Self::F32) {
        intrinsic!(_mm512_storeu_ps(to, value))
    }
    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn reciprocal(self, a: Self::F32) -> Self::F32 {
        // An estimate of 14 bits and a step of Newton's iteration take a third of a division.
        let estimate = intrinsic!(_mm512_rcp14_ps(a));
        self.mul_add(estimate, self.neg_mul_add(a, estimate, self.splat(1.0)), estimate)
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn neg_mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_fnmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn min_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn max_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_sqrt_ps(a))
    }
    #[inline(always)]
    fn round_even(self, a: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn floor(self, a: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn ceil(self, a: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn trunc(self, a: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, a: Self::F32, n: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_scalef_ps(a, n))
    }
    #[inline(always)]
    fn scale_to_normal(self, a: Self::F32, n: Self::F32) -> Self::F32 {
        self.scale_by_power_of_two(a, n)
    }
    #[inline(always)]
    fn scale_or_zero(self, a: Self::F32, n: Self::F32) -> Self::F32 {
        self.scale_by_power_of_two(a, n)
    }
    #[inline(always)]
    fn lt(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        intrinsic!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn le(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        intrinsic!(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b))
    }
    #[inline(always)]
    fn eq(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        intrinsic!(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b))
    }
    #[inline(always)]
    fn is_nan(self, a: Self::F32) -> Self::Mask {
        intrinsic!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a))
    }
    #[inline(always)]
    fn select(self, mask: Self::Mask, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(_mm512_mask_blend_ps(mask, b, a))
    }
    #[inline(always)]
    fn horizontal_sum(self, a: Self::F32) -> f32 {
        intrinsic!({
            let eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn any(self, mask: Self::Mask) -> bool {
        mask != 0
    }
    #[inline(always)]
    fn to_bits(self, a: Self::F32) -> Self::I32 {
        intrinsic!(_mm512_castps_si512(a))
    }
    #[inline(always)]
    fn from_bits(self, a: Self::I32) -> Self::F32 {
        intrinsic!(_mm512_castsi512_ps(a))
    }
    #[inline(always)]
    fn to_i32(self, a: Self::F32) -> Self::I32 {
        intrinsic!(_mm512_cvtps_epi32(a))
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I32) -> Self::F32 {
        intrinsic!(_mm512_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn sub_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(_mm512_sub_epi32(a, b))
    }
    #[inline(always)]
    fn and_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn xor_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(_mm512_xor_si512(a, b))
    }
    #[inline(always)]
    fn shl_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32 {
        intrinsic!(_mm512_slli_epi32::<BITS>(a))
    }
    #[inline(always)]
    fn shr_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32 {
        intrinsic!(_mm512_srai_epi32::<BITS>(a))
    }
}

/// Returns a mask of the first `count` lanes.
#[inline(always)]
fn first_lanes(count: usize) -> __mmask16 {
    ((1_u32 << count.min(16)) - 1) as __mmask16
}
