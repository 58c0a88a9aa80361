//! Portable micro-kernel in plain Rust: tiles of 4 rows by 8 columns, which the compiler may
//! vectorise for its baseline target.

use super::tile::{AddRows, Tile, TileFunction, Vector, add_rows, compute, dot};
use super::{CopyRows, Kernel, copy_rows, transpose_plain};

#[derive(Clone, Copy)]
struct Four([f32; 4]);

impl Four {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Four(core::array::from_fn(|lane| f(self.0[lane], other.0[lane])))
    }
}

impl Vector for Four {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Four([value; 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees 4 readable values.
        Four(unsafe { from.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, count: usize) -> Self {
        let mut lanes = [0.0; 4];
        for (lane, value) in lanes.iter_mut().enumerate().take(count) {
            // SAFETY: the caller guarantees `count` readable values.
            *value = unsafe { *from.add(lane) };
        }
        Four(lanes)
    }
    #[inline(always)]
    unsafe fn load_even(from: *const f32, count: usize) -> Self {
        let mut lanes = [0.0_f32; 4];
        for (lane, value) in lanes.iter_mut().enumerate().take(count) {
            // SAFETY: the caller guarantees `2 * count - 1` readable values.
            *value = unsafe { *from.add(2 * lane) };
        }
        Four(lanes)
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller guarantees 4 writable values.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, count: usize) {
        for (lane, value) in self.0.iter().enumerate().take(count) {
            // SAFETY: the caller guarantees `count` writable values.
            unsafe { *to.add(lane) = *value };
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |x, y| x * y)
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // `f32::mul_add` would call the maths library on targets without an FMA instruction.
        self.zip(factor, |x, y| x * y).zip(addend, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |x, y| if x < y { y } else { x })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |x, y| if x > y { y } else { x })
    }
    #[inline(always)]
    unsafe fn prefetch(_address: *const f32) {}
}

unsafe fn tile<const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(call: &Tile) {
    // SAFETY: `tile` has the contract of `compute`, and `Four` needs no special instructions.
    unsafe { compute::<Four, ROWS, VECTORS, PARTIAL>(call) }
}

unsafe fn rows(call: &AddRows) {
    // SAFETY: `rows` has the contract of `add_rows`, and `Four` needs no special instructions.
    unsafe { add_rows::<Four>(call) }
}

unsafe fn inner(left: *const f32, right: *const f32, len: usize) -> f32 {
    // SAFETY: `inner` has the contract of `dot`, and `Four` needs no special instructions.
    unsafe { dot::<Four>(left, right, len) }
}

unsafe fn copies(call: &CopyRows) {
    // SAFETY: `copies` has the contract of `copy_rows`, and `Four` needs no special instructions.
    unsafe { copy_rows::<Four>(call) }
}

macro_rules! row {
    ($partial:literal, $($rows:literal)*) => {
        [$([tile::<$rows, 1, $partial> as TileFunction, tile::<$rows, 2, $partial>]),*]
    };
}

static WHOLE: [[TileFunction; 2]; 4] = row!(false, 1 2 3 4);
static PARTIAL: [[TileFunction; 2]; 4] = row!(true, 1 2 3 4);

pub(super) static KERNEL: Kernel = Kernel {
    rows: 4,
    vectors: 2,
    lanes: 4,
    whole: WHOLE.as_flattened(),
    partial: PARTIAL.as_flattened(),
    add_rows: rows,
    dot: inner,
    copy_rows: copies,
    transpose: transpose_plain,
    pairs: None,
};
