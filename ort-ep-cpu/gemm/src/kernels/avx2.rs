//! AVX2 and FMA micro-kernel: tiles of 6 rows by 16 columns, with masked loads and stores at the
//! edges.

use core::arch::x86_64::*;

use super::tile::{AddRows, Tile, TileFunction, Vector, add_rows, compute, dot};
use super::{CopyRows, Kernel, Transpose, copy_rows, transpose_plain};

#[derive(Clone, Copy)]
struct Ymm(__m256);

/// Eight set lanes, then eight clear ones. Any window of eight lanes is a mask of the first lanes.
static LANE_MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

/// Returns a mask of the first `count` lanes.
///
/// # Safety
///
/// Needs AVX.
#[inline(always)]
unsafe fn mask(count: usize) -> __m256i {
    // SAFETY: the window of eight starts at index 0 to 8, inside the table.
    unsafe { _mm256_loadu_si256(LANE_MASKS.as_ptr().add(8 - count.min(8)).cast()) }
}

impl Vector for Ymm {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait requires AVX2.
        Ymm(unsafe { _mm256_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees 8 readable values.
        Ymm(unsafe { _mm256_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller guarantees `count` readable values; masked lanes are not accessed.
        Ymm(unsafe { _mm256_maskload_ps(from, mask(count)) })
    }
    #[inline(always)]
    unsafe fn load_even(from: *const f32, count: usize) -> Self {
        let reach = 2 * count - 1;
        // SAFETY: the caller guarantees `reach` readable values; masked lanes are not accessed.
        unsafe {
            let low = _mm256_maskload_ps(from, mask(reach));
            let high = _mm256_maskload_ps(from.wrapping_add(8), mask(reach.saturating_sub(8)));
            // The shuffle works within 128-bit halves, so the even lanes come in the order low 0 2,
            // high 0 2, low 4 6, high 4 6.
            let mixed = _mm256_castps_pd(_mm256_shuffle_ps::<0x88>(low, high));
            Ymm(_mm256_castpd_ps(_mm256_permute4x64_pd::<0xD8>(mixed)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller guarantees 8 writable values.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, count: usize) {
        // SAFETY: the caller guarantees `count` writable values; masked lanes are not accessed.
        unsafe { _mm256_maskstore_ps(to, mask(count), self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait requires AVX2.
        Ymm(unsafe { _mm256_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the trait requires AVX2.
        Ymm(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the trait requires FMA.
        Ymm(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: the trait requires AVX2. The instruction returns its second operand if either is
        // NaN.
        Ymm(unsafe { _mm256_max_ps(other.0, self.0) })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: the trait requires AVX2. The instruction returns its second operand if either is
        // NaN.
        Ymm(unsafe { _mm256_min_ps(other.0, self.0) })
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const f32) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(call: &Tile) {
    // SAFETY: `tile` has the contract of `compute`, and the attribute enables AVX2 and FMA.
    unsafe { compute::<Ymm, ROWS, VECTORS, PARTIAL>(call) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn rows(call: &AddRows) {
    // SAFETY: `rows` has the contract of `add_rows`, and the attribute enables AVX2 and FMA.
    unsafe { add_rows::<Ymm>(call) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn inner(left: *const f32, right: *const f32, len: usize) -> f32 {
    // SAFETY: `inner` has the contract of `dot`, and the attribute enables AVX2 and FMA.
    unsafe { dot::<Ymm>(left, right, len) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn copies(call: &CopyRows) {
    // SAFETY: `copies` has the contract of `copy_rows`, and the attribute enables AVX2 and FMA.
    unsafe { copy_rows::<Ymm>(call) }
}

/// Transposes in squares of 8 by 8, with a scalar loop for the rest.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn transpose(call: &Transpose) {
    let (rows, columns) = (call.rows & !7, call.columns & !7);
    // SAFETY: the squares are inside the matrix, and the caller guarantees that both matrices are
    // valid.
    unsafe {
        for row in (0..rows).step_by(8) {
            for column in (0..columns).step_by(8) {
                let from = call.from.add(row * call.from_row + column);
                let to = call.to.add(column * call.to_row + row);
                transpose_square(from, call.from_row, to, call.to_row);
            }
        }
        if columns < call.columns {
            let from = call.from.add(columns);
            let to = call.to.add(columns * call.to_row);
            transpose_plain(&Transpose { from, to, columns: call.columns - columns, ..*call });
        }
        if rows < call.rows {
            let from = call.from.add(rows * call.from_row);
            let to = call.to.add(rows);
            transpose_plain(&Transpose { from, to, rows: call.rows - rows, columns, ..*call });
        }
    }
}

/// Transposes one square of 8 by 8 in registers.
///
/// # Safety
///
/// Needs AVX2, and both squares must be valid.
#[inline(always)]
unsafe fn transpose_square(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
    // SAFETY: the caller guarantees that both squares are valid.
    unsafe {
        let mut row = [_mm256_setzero_ps(); 8];
        for index in 0..8 {
            row[index] = _mm256_loadu_ps(from.add(index * from_row));
        }
        let mut pair = [_mm256_setzero_ps(); 8];
        for index in 0..4 {
            pair[2 * index] = _mm256_unpacklo_ps(row[2 * index], row[2 * index + 1]);
            pair[2 * index + 1] = _mm256_unpackhi_ps(row[2 * index], row[2 * index + 1]);
        }
        let mut quad = [_mm256_setzero_ps(); 8];
        for half in 0..2 {
            let (low, high) = (4 * half, 4 * half + 2);
            quad[low] = _mm256_shuffle_ps::<0x44>(pair[low], pair[high]);
            quad[low + 1] = _mm256_shuffle_ps::<0xEE>(pair[low], pair[high]);
            quad[low + 2] = _mm256_shuffle_ps::<0x44>(pair[low + 1], pair[high + 1]);
            quad[low + 3] = _mm256_shuffle_ps::<0xEE>(pair[low + 1], pair[high + 1]);
        }
        for index in 0..4 {
            let near = _mm256_permute2f128_ps::<0x20>(quad[index], quad[index + 4]);
            let far = _mm256_permute2f128_ps::<0x31>(quad[index], quad[index + 4]);
            _mm256_storeu_ps(to.add(index * to_row), near);
            _mm256_storeu_ps(to.add((index + 4) * to_row), far);
        }
    }
}

macro_rules! row {
    ($partial:literal, $($rows:literal)*) => {
        [$([tile::<$rows, 1, $partial> as TileFunction, tile::<$rows, 2, $partial>]),*]
    };
}

static WHOLE: [[TileFunction; 2]; 6] = row!(false, 1 2 3 4 5 6);
static PARTIAL: [[TileFunction; 2]; 6] = row!(true, 1 2 3 4 5 6);

pub(super) static KERNEL: Kernel = Kernel {
    rows: 6,
    vectors: 2,
    lanes: 8,
    whole: WHOLE.as_flattened(),
    partial: PARTIAL.as_flattened(),
    add_rows: rows,
    dot: inner,
    copy_rows: copies,
    transpose,
    pairs: None,
};
