//! AVX512-BF16 micro-kernel: the AVX-512 tiles over bf16 pairs, with two products per step.
//!
//! `VDPBF16PS` flushes denormal inputs and results to zero, and rounds each of its two additions to
//! nearest.

use core::arch::x86_64::*;

use super::avx512::{copies, inner, rows};
use super::pairs::MakePairs;
use super::panels;
use super::tile::{Tile, TileFunction, compute};
use super::{CopyRows, Kernel};
use ort_cpu_vector::simd::steps::Pairs;

/// Computes a register tile over bf16 pairs; see [`compute`].
///
/// # Safety
///
/// As [`compute`], with pairs of k steps as the elements of A and B. The CPU has AVX-512 F, BW, DQ,
/// VL and BF16, AVX2, FMA and F16C.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn tile<const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(call: &mut Tile) {
    // SAFETY: `tile` has the contract of `compute`, and `Kernel::of` detected the features before
    // it chose this kernel.
    unsafe { compute::<_, ROWS, VECTORS, PARTIAL>(Pairs::new_unchecked(), call) }
}

/// Computes a row of tiles over bf16 pairs; see [`panels::compute`].
///
/// # Safety
///
/// As [`panels::compute`], with pairs of k steps as the elements of A and B. The CPU has AVX-512 F,
/// BW, DQ, VL and BF16, AVX2, FMA and F16C.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn panels<const ROWS: usize, const VECTORS: usize, const PANELS: usize>(calls: &[Tile]) {
    // SAFETY: `panels` has the contract of `compute`, and `Kernel::of` detected the features before
    // it chose this kernel.
    unsafe { panels::compute::<_, ROWS, VECTORS, PANELS>(Pairs::new_unchecked(), calls) }
}

/// Returns a mask of the first `count` lanes.
#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    // A count of 16 or more selects all lanes; the shift would overflow.
    if count >= 16 { 0xFFFF } else { (1_u16 << count) - 1 }
}

/// The permutation that interleaves two vectors of bfloat16: element 0 of the first, element 0 of
/// the second, element 1 of the first, and so on.
static SIDE_BY_SIDE: [u16; 32] = {
    let mut order = [0; 32];
    let mut at = 0;
    while at < 32 {
        order[at] = (at / 2 + at % 2 * 16) as u16;
        at += 1;
    }
    order
};

/// Implements [`MakePairs::of_rows`].
///
/// # Safety
///
/// `from` holds `count` rows of `len` values, and `to` holds half as many rows, rounded up, of the
/// same length. They do not overlap.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16")]
unsafe fn pair_rows(call: &CopyRows) {
    // SAFETY: the table has 32 elements.
    let order = unsafe { _mm512_loadu_epi16(SIDE_BY_SIDE.as_ptr().cast()) };
    for row in (0..call.count).step_by(2) {
        let low = call.from.wrapping_add(row * call.from_step);
        let high = low.wrapping_add(call.from_step);
        let both = row + 1 < call.count;
        let to = call.to.wrapping_add(row / 2 * call.to_step);
        for at in (0..call.len).step_by(16) {
            let lanes = mask(call.len - at);
            // SAFETY: the caller guarantees the rows; masked lanes are not accessed.
            unsafe {
                let first = _mm512_maskz_loadu_ps(lanes, low.add(at));
                let second = _mm512_maskz_loadu_ps(if both { lanes } else { 0 }, high.wrapping_add(at));
                let halves = _mm512_cvtne2ps_pbh(second, first);
                let pairs = _mm512_permutexvar_epi16(order, std::mem::transmute::<__m512bh, __m512i>(halves));
                _mm512_mask_storeu_epi32(to.add(at).cast(), lanes, pairs);
            }
        }
    }
}

/// Implements [`MakePairs::of_neighbours`].
///
/// # Safety
///
/// `from` holds `count` rows of `len` values, and `to` holds as many rows of half the length,
/// rounded up. They do not overlap.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16")]
unsafe fn pair_neighbours(call: &CopyRows) {
    for row in 0..call.count {
        let from = call.from.wrapping_add(row * call.from_step);
        let to = call.to.wrapping_add(row * call.to_step);
        for at in (0..call.len).step_by(32) {
            let left = call.len - at;
            // SAFETY: the caller guarantees the rows; masked lanes are not accessed.
            unsafe {
                let first = _mm512_maskz_loadu_ps(mask(left), from.add(at));
                let behind = mask(left.saturating_sub(16));
                let second = _mm512_maskz_loadu_ps(behind, from.wrapping_add(at + 16));
                let halves = _mm512_cvtne2ps_pbh(second, first);
                let pairs = std::mem::transmute::<__m512bh, __m512i>(halves);
                _mm512_mask_storeu_epi32(to.add(at / 2).cast(), mask(left.div_ceil(2)), pairs);
            }
        }
    }
}

/// Panels of pairs are always packed, so none ends inside a vector and `partial` needs no functions
/// of its own.
static TILES: [TileFunction; 24] = tiles!(false, 3: 1 2 3 4 5 6 7 8);

pub(super) static KERNEL: Kernel = Kernel {
    rows: 8,
    vectors: 3,
    lanes: 16,
    whole: &TILES,
    partial: &TILES,
    add_rows: rows,
    dot: inner,
    copy_rows: copies,
    transpose: super::avx2::transpose,
    few_rows: [panels::<1, 3, 4>, panels::<2, 3, 2>],
    few_columns: None,
    pairs: Some(MakePairs { of_rows: pair_rows, of_neighbours: pair_neighbours }),
};
