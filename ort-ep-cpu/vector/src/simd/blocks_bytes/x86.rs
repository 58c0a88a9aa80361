//! Dot products of block-quantized weights in 512-bit registers, and in pairs of 256-bit ones.

use std::arch::x86_64::*;

use super::sixteen::{LANES, Sixteen, sum_in_halves};

/// Calls an intrinsic of the type's instruction set.
macro_rules! intrinsic {
    ($call:expr) => {{
        // SAFETY: the caller guarantees the instruction set and the memory that is read.
        unsafe { $call }
    }};
}

/// AVX-512 with VNNI.
#[derive(Clone, Copy)]
pub(super) struct Vnni;

impl Sixteen for Vnni {
    type F32 = __m512;
    #[inline(always)]
    unsafe fn zero(self) -> __m512 {
        intrinsic!(_mm512_setzero_ps())
    }
    #[inline(always)]
    unsafe fn prefetch(self, address: *const u8) {
        intrinsic!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }
    #[inline(always)]
    unsafe fn dots_of_bytes(self, quantized: *const u8, numbers: *const i8) -> __m512 {
        intrinsic!({
            let quantized = _mm512_loadu_si512(quantized.cast());
            let numbers = _mm512_loadu_si512(numbers.cast());
            _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), quantized, numbers))
        })
    }
    #[inline(always)]
    unsafe fn dots_of_nibbles(self, quantized: *const u8, numbers: *const i8) -> __m512 {
        intrinsic!({
            let bytes = _mm256_loadu_si256(quantized.cast());
            let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(bytes), _mm256_srli_epi16::<4>(bytes));
            let quantized = _mm512_and_si512(both, _mm512_set1_epi8(15));
            let numbers = _mm512_loadu_si512(numbers.cast());
            _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), quantized, numbers))
        })
    }
    #[inline(always)]
    unsafe fn spread(self, from: *const u8, count: usize, pattern: &[i32; LANES]) -> __m512 {
        intrinsic!(match count {
            1 => _mm512_set1_ps(from.cast::<f32>().read_unaligned()),
            _ => {
                let floats = _mm_maskz_loadu_ps((1 << count) - 1, from.cast());
                _mm512_permutexvar_ps(
                    _mm512_loadu_si512(pattern.as_ptr().cast()),
                    _mm512_castps128_ps512(floats),
                )
            }
        })
    }
    #[inline(always)]
    unsafe fn load(self, from: *const u8, count: usize) -> __m512 {
        intrinsic!(_mm512_maskz_loadu_ps(((1_u32 << count) - 1) as __mmask16, from.cast()))
    }
    #[inline(always)]
    unsafe fn unpack_bytes(self, bytes: [u8; LANES]) -> __m512 {
        intrinsic!(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))))
    }
    #[inline(always)]
    unsafe fn unpack_nibbles(self, bytes: [u8; 8]) -> __m512 {
        intrinsic!({
            let [low, high] = words(bytes);
            let words = _mm512_inserti64x4::<1>(_mm512_set1_epi32(low), _mm256_set1_epi32(high));
            let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(15)))
        })
    }
    #[inline(always)]
    unsafe fn mul(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    unsafe fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsic!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    unsafe fn sum(self, a: __m512) -> f32 {
        intrinsic!(sum_256(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a))))
    }
}

/// Returns the low and the high half of eight bytes.
#[inline(always)]
fn words(bytes: [u8; 8]) -> [i32; 2] {
    let all = u64::from_le_bytes(bytes);
    [all as i32, (all >> 32) as i32]
}

/// Adds eight lanes pairwise by halves.
///
/// # Safety
///
/// The CPU has AVX and SSE3.
#[inline(always)]
unsafe fn sum_256(a: __m256) -> f32 {
    intrinsic!({
        let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    })
}

/// Returns a mask of the first `count` of eight lanes.
///
/// # Safety
///
/// The CPU has AVX2.
#[inline(always)]
unsafe fn first_lanes(count: usize) -> __m256i {
    let lanes = intrinsic!(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    intrinsic!(_mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes))
}

/// AVX2: products of weights and numbers are added in pairs, which fit in 16 bits.
#[derive(Clone, Copy)]
pub(super) struct Halves;

impl Sixteen for Halves {
    type F32 = [__m256; 2];
    #[inline(always)]
    unsafe fn zero(self) -> [__m256; 2] {
        intrinsic!([_mm256_setzero_ps(), _mm256_setzero_ps()])
    }
    #[inline(always)]
    unsafe fn prefetch(self, address: *const u8) {
        intrinsic!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }
    #[inline(always)]
    unsafe fn dots_of_bytes(self, quantized: *const u8, numbers: *const i8) -> [__m256; 2] {
        let mut halves = intrinsic!(self.zero());
        for (half, sums) in halves.iter_mut().enumerate() {
            intrinsic!({
                let bytes = _mm256_loadu_si256(quantized.add(half * 32).cast());
                let numbers = _mm256_loadu_si256(numbers.add(half * 32).cast());
                let mask = _mm256_set1_epi8(15);
                let low = _mm256_maddubs_epi16(_mm256_and_si256(bytes, mask), numbers);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask);
                let high = _mm256_maddubs_epi16(high, numbers);
                let low = _mm256_madd_epi16(low, _mm256_set1_epi16(1));
                let high = _mm256_madd_epi16(high, _mm256_set1_epi16(16));
                *sums = _mm256_cvtepi32_ps(_mm256_add_epi32(low, high));
            });
        }
        halves
    }
    #[inline(always)]
    unsafe fn dots_of_nibbles(self, quantized: *const u8, numbers: *const i8) -> [__m256; 2] {
        intrinsic!({
            let (bytes, mask) = (_mm256_loadu_si256(quantized.cast()), _mm256_set1_epi8(15));
            let low = _mm256_and_si256(bytes, mask);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask);
            let first = _mm256_maddubs_epi16(low, _mm256_loadu_si256(numbers.cast()));
            let second = _mm256_maddubs_epi16(high, _mm256_loadu_si256(numbers.add(32).cast()));
            let ones = _mm256_set1_epi16(1);
            [
                _mm256_cvtepi32_ps(_mm256_madd_epi16(first, ones)),
                _mm256_cvtepi32_ps(_mm256_madd_epi16(second, ones)),
            ]
        })
    }
    #[inline(always)]
    unsafe fn spread(self, from: *const u8, count: usize, pattern: &[i32; LANES]) -> [__m256; 2] {
        intrinsic!({
            let floats = self.load(from, count)[0];
            let low = _mm256_loadu_si256(pattern.as_ptr().cast());
            let high = _mm256_loadu_si256(pattern.as_ptr().add(8).cast());
            [_mm256_permutevar8x32_ps(floats, low), _mm256_permutevar8x32_ps(floats, high)]
        })
    }
    #[inline(always)]
    unsafe fn load(self, from: *const u8, count: usize) -> [__m256; 2] {
        intrinsic!({
            let from = from.cast::<f32>();
            [
                _mm256_maskload_ps(from, first_lanes(count.min(8))),
                _mm256_maskload_ps(from.wrapping_add(8), first_lanes(count.saturating_sub(8))),
            ]
        })
    }
    #[inline(always)]
    unsafe fn unpack_bytes(self, bytes: [u8; LANES]) -> [__m256; 2] {
        intrinsic!({
            let low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.as_ptr().cast()));
            let high = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.as_ptr().add(8).cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        })
    }
    #[inline(always)]
    unsafe fn unpack_nibbles(self, bytes: [u8; 8]) -> [__m256; 2] {
        intrinsic!({
            let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
            let [low, high] = words(bytes);
            let mask = _mm256_set1_epi32(15);
            let low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(low), shifts), mask);
            let high = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(high), shifts), mask);
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        })
    }
    #[inline(always)]
    unsafe fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        intrinsic!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    unsafe fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        intrinsic!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    unsafe fn sum(self, a: [__m256; 2]) -> f32 {
        let mut lanes = [0.0; LANES];
        intrinsic!({
            _mm256_storeu_ps(lanes.as_mut_ptr(), a[0]);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(8), a[1]);
        });
        sum_in_halves(lanes)
    }
}
