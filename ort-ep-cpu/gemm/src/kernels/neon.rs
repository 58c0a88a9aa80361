//! NEON micro-kernel: tiles of 8 rows by 12 columns. Compiled for AArch64 only; its speed has not
//! been measured.

// Whether an intrinsic is unsafe here depends on the compiler version.
#![allow(unused_unsafe)]

use core::arch::aarch64::*;

use super::tile::{AddRows, Tile, TileFunction, Vector, add_rows, compute, dot};
use super::{CopyRows, Kernel, copy_rows, transpose_plain};

#[derive(Clone, Copy)]
struct Quad(float32x4_t);

impl Vector for Quad {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: NEON is part of AArch64.
        Quad(unsafe { vdupq_n_f32(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees 4 readable values.
        Quad(unsafe { vld1q_f32(from) })
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, count: usize) -> Self {
        let mut lanes = [0.0_f32; 4];
        for (lane, value) in lanes.iter_mut().enumerate().take(count) {
            // SAFETY: the caller guarantees `count` readable values.
            *value = unsafe { *from.add(lane) };
        }
        // SAFETY: the array holds 4 values.
        Quad(unsafe { vld1q_f32(lanes.as_ptr()) })
    }
    #[inline(always)]
    unsafe fn load_even(from: *const f32, count: usize) -> Self {
        let mut lanes = [0.0_f32; 4];
        for (lane, value) in lanes.iter_mut().enumerate().take(count) {
            // SAFETY: the caller guarantees `2 * count - 1` readable values.
            *value = unsafe { *from.add(2 * lane) };
        }
        // SAFETY: the array holds 4 values.
        Quad(unsafe { vld1q_f32(lanes.as_ptr()) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller guarantees 4 writable values.
        unsafe { vst1q_f32(to, self.0) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, count: usize) {
        let mut lanes = [0.0_f32; 4];
        // SAFETY: the array holds 4 values, and the caller guarantees `count` writable ones.
        unsafe {
            vst1q_f32(lanes.as_mut_ptr(), self.0);
            for (lane, value) in lanes.iter().enumerate().take(count) {
                *to.add(lane) = *value;
            }
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: NEON is part of AArch64.
        Quad(unsafe { vaddq_f32(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: NEON is part of AArch64.
        Quad(unsafe { vmulq_f32(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: NEON is part of AArch64.
        Quad(unsafe { vfmaq_f32(addend.0, self.0, factor.0) })
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: NEON is part of AArch64. A NaN in either operand yields NaN.
        Quad(unsafe { vmaxq_f32(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: NEON is part of AArch64. A NaN in either operand yields NaN.
        Quad(unsafe { vminq_f32(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn prefetch(_address: *const f32) {}
}

unsafe fn tile<const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(call: &Tile) {
    // SAFETY: `tile` has the contract of `compute`, and NEON is part of AArch64.
    unsafe { compute::<Quad, ROWS, VECTORS, PARTIAL>(call) }
}

unsafe fn rows(call: &AddRows) {
    // SAFETY: `rows` has the contract of `add_rows`, and NEON is part of AArch64.
    unsafe { add_rows::<Quad>(call) }
}

unsafe fn inner(left: *const f32, right: *const f32, len: usize) -> f32 {
    // SAFETY: `inner` has the contract of `dot`, and NEON is part of AArch64.
    unsafe { dot::<Quad>(left, right, len) }
}

unsafe fn copies(call: &CopyRows) {
    // SAFETY: `copies` has the contract of `copy_rows`, and NEON is part of AArch64.
    unsafe { copy_rows::<Quad>(call) }
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
    lanes: 4,
    whole: WHOLE.as_flattened(),
    partial: PARTIAL.as_flattened(),
    add_rows: rows,
    dot: inner,
    copy_rows: copies,
    transpose: transpose_plain,
    pairs: None,
};
