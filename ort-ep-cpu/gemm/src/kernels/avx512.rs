//! AVX-512 micro-kernel: tiles of 8 rows by 48 columns, with masks at the edges.

use core::arch::x86_64::*;

use super::tile::{AddRows, Tile, TileFunction, Vector, add_rows, compute, dot};
use super::{CopyRows, Kernel, copy_rows};

/// A vector of sixteen `f32`. With `PAIRS`, [`Vector::accumulate`] takes its factors as bf16 pairs,
/// which needs AVX512-BF16.
#[derive(Clone, Copy)]
pub(super) struct Zmm<const PAIRS: bool>(__m512);

#[inline(always)]
pub(super) fn mask(count: usize) -> __mmask16 {
    // A count of 16 or more selects all lanes; the shift would overflow.
    if count >= 16 { 0xFFFF } else { (1_u16 << count) - 1 }
}

impl<const PAIRS: bool> Vector for Zmm<PAIRS> {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait requires AVX-512.
        Zmm(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees 16 readable values.
        Zmm(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller guarantees `count` readable values; masked lanes are not accessed.
        Zmm(unsafe { _mm512_maskz_loadu_ps(mask(count), from) })
    }
    #[inline(always)]
    unsafe fn load_even(from: *const f32, count: usize) -> Self {
        let reach = 2 * count - 1;
        // SAFETY: the caller guarantees `reach` readable values; masked lanes are not accessed.
        unsafe {
            let low = _mm512_maskz_loadu_ps(mask(reach), from);
            let high = _mm512_maskz_loadu_ps(mask(reach.saturating_sub(16)), from.wrapping_add(16));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            Zmm(_mm512_permutex2var_ps(low, even, high))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller guarantees 16 writable values.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, count: usize) {
        // SAFETY: the caller guarantees `count` writable values; masked lanes are not accessed.
        unsafe { _mm512_mask_storeu_ps(to, mask(count), self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait requires AVX-512.
        Zmm(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the trait requires AVX-512.
        Zmm(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the trait requires AVX-512.
        Zmm(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
    }
    #[inline(always)]
    unsafe fn accumulate(self, columns: Self, factor: Self) -> Self {
        if PAIRS {
            // SAFETY: only `avx512_bf16` sets `PAIRS`, and its functions enable AVX512-BF16. The
            // transmuted types have the same size, and every bit pattern is valid in both.
            return Zmm(unsafe {
                let columns = std::mem::transmute::<__m512, __m512bh>(columns.0);
                let factor = std::mem::transmute::<__m512, __m512bh>(factor.0);
                _mm512_dpbf16_ps(self.0, columns, factor)
            });
        }
        // SAFETY: the trait requires AVX-512.
        unsafe { factor.mul_add(columns, self) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: the trait requires AVX-512. The instruction returns its second operand if either
        // is NaN.
        Zmm(unsafe { _mm512_max_ps(other.0, self.0) })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: the trait requires AVX-512. The instruction returns its second operand if either
        // is NaN.
        Zmm(unsafe { _mm512_min_ps(other.0, self.0) })
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const f32) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
}

#[target_feature(enable = "avx512f,avx512vl")]
unsafe fn tile<const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(call: &Tile) {
    // SAFETY: `tile` has the contract of `compute`, and the attribute enables AVX-512 F and VL.
    unsafe { compute::<Zmm<false>, ROWS, VECTORS, PARTIAL>(call) }
}

#[target_feature(enable = "avx512f,avx512vl")]
pub(super) unsafe fn rows(call: &AddRows) {
    // SAFETY: `rows` has the contract of `add_rows`, and the attribute enables AVX-512 F and VL.
    unsafe { add_rows::<Zmm<false>>(call) }
}

#[target_feature(enable = "avx512f,avx512vl")]
pub(super) unsafe fn inner(left: *const f32, right: *const f32, len: usize) -> f32 {
    // SAFETY: `inner` has the contract of `dot`, and the attribute enables AVX-512 F and VL.
    unsafe { dot::<Zmm<false>>(left, right, len) }
}

#[target_feature(enable = "avx512f,avx512vl")]
pub(super) unsafe fn copies(call: &CopyRows) {
    // SAFETY: `copies` has the contract of `copy_rows`, and the attribute enables AVX-512 F and VL.
    unsafe { copy_rows::<Zmm<false>>(call) }
}

macro_rules! row {
    ($partial:literal, $($rows:literal)*) => {
        [$([tile::<$rows, 1, $partial> as TileFunction, tile::<$rows, 2, $partial>, tile::<$rows, 3, $partial>]),*]
    };
}

static WHOLE: [[TileFunction; 3]; 8] = row!(false, 1 2 3 4 5 6 7 8);
static PARTIAL: [[TileFunction; 3]; 8] = row!(true, 1 2 3 4 5 6 7 8);

pub(super) static KERNEL: Kernel = Kernel {
    rows: 8,
    vectors: 3,
    lanes: 16,
    whole: WHOLE.as_flattened(),
    partial: PARTIAL.as_flattened(),
    add_rows: rows,
    dot: inner,
    copy_rows: copies,
    transpose: super::avx2::transpose,
    pairs: None,
};
