//! Portable vectors with run-time dispatch.
//!
//! [`Simd`] is a set of vector operations; a value of a type that implements it proves that the CPU
//! has those instructions, so its operations are safe to call. Code is written once, generic over
//! `S: Simd`, in a [`SimdOp`], and [`dispatch`] compiles it for each instruction set and enters the
//! right copy. Everything between the entry point and the operations is `#[inline(always)]`, so
//! that the whole loop is compiled with the instruction set of the entry point; call `dispatch`
//! once per slice, not once per vector.
//!
//! All unsafe code of the vector kernels lives in this folder: entry points, loads and stores
//! ([`Simd`]), and the loops over slices that check lengths once ([`slices`], [`stencil`]).

#![allow(
    clippy::indexing_slicing,
    reason = "lanes and blocks are counted below the constant number of lanes, and slices are cut to the shortest before the loops"
)]

pub mod attention;
pub mod blocks;
pub mod blocks_bytes;
pub mod bytes;
pub mod isa;
pub mod math;
#[cfg(test)]
mod math_tests;
pub mod plane;
mod portable;
pub mod slices;
pub mod stencil;
pub mod steps;
mod tile;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

pub use isa::Isa;
pub use portable::Portable;
pub use tile::transpose_tiles;

#[cfg(target_arch = "x86_64")]
pub use {avx2::Avx2, avx512::Avx512};

/// Vector operations of one instruction set, on `LANES` lanes of 32 bits.
///
/// Comparisons are ordered (false where a lane is NaN), conversions round to nearest even.
// `self` is the instruction set, never the value that is converted.
#[allow(clippy::wrong_self_convention)]
pub trait Simd: Copy + Send + Sync + 'static {
    /// A vector of `LANES` f32.
    type F32: Copy;
    /// A vector of `LANES` i32.
    type I32: Copy;
    /// One truth value for each lane.
    type Mask: Copy;
    /// How many 32-bit lanes a vector has.
    const LANES: usize;

    /// All lanes `value`.
    fn splat(self, value: f32) -> Self::F32;
    /// All lanes `value`.
    fn splat_i32(self, value: i32) -> Self::I32;

    /// Loads `LANES` values, at any alignment.
    ///
    /// # Safety
    /// `from` is valid for reading `LANES` values.
    unsafe fn load_ptr(self, from: *const f32) -> Self::F32;
    /// Loads the first `count` values (at most `LANES`); the other lanes are `fill`.
    ///
    /// # Safety
    /// `from` is valid for reading `count` values.
    unsafe fn load_partial_ptr(self, from: *const f32, count: usize, fill: f32) -> Self::F32;
    /// Loads the lanes where the mask is true; the others are 0, and their places are not touched.
    ///
    /// # Safety
    /// `from` is valid for reading at the place of each lane that is true.
    unsafe fn load_masked_ptr(self, from: *const f32, mask: Self::Mask) -> Self::F32;
    /// Stores all lanes, at any alignment.
    ///
    /// # Safety
    /// `to` is valid for writing `LANES` values.
    unsafe fn store_ptr(self, to: *mut f32, value: Self::F32);
    /// Stores the first `count` lanes (at most `LANES`).
    ///
    /// # Safety
    /// `to` is valid for writing `count` values.
    unsafe fn store_partial_ptr(self, to: *mut f32, count: usize, value: Self::F32);
    /// Loads `LANES` IEEE half-precision values, given as bits.
    ///
    /// # Safety
    /// `from` is valid for reading `LANES` values.
    unsafe fn load_f16_ptr(self, from: *const u16) -> Self::F32;
    /// Rounds all lanes to IEEE half precision and stores their bits.
    ///
    /// # Safety
    /// `to` is valid for writing `LANES` values.
    unsafe fn store_f16_ptr(self, to: *mut u16, value: Self::F32);
    /// Loads `LANES` bytes, each into a lane of its own.
    ///
    /// # Safety
    /// `from` is valid for reading `LANES` bytes.
    unsafe fn load_u8_ptr(self, from: *const u8) -> Self::I32;

    /// `first`, then the lanes but the last.
    fn shift_in_first(self, first: f32, a: Self::F32) -> Self::F32;
    /// The lanes but the first, then `last`.
    fn shift_in_last(self, a: Self::F32, last: f32) -> Self::F32;
    /// The lanes at even and those at odd places of the two vectors after each other.
    fn part_even_odd(self, low: Self::F32, high: Self::F32) -> (Self::F32, Self::F32);
    /// `a + b`.
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a - b`.
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b`.
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a / b`, correctly rounded.
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once where the CPU has a fused instruction, else twice.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `c - a * b`, rounded as [`mul_add`](Simd::mul_add).
    fn neg_mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The lesser; `b` where a lane is NaN in either (what x86's `minps` does).
    fn min_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The greater; `b` where a lane is NaN in either (what x86's `maxps` does).
    fn max_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Square root, correctly rounded.
    fn sqrt(self, a: Self::F32) -> Self::F32;
    /// The nearest integer, ties to even.
    fn round_even(self, a: Self::F32) -> Self::F32;
    /// The greatest integer not above.
    fn floor(self, a: Self::F32) -> Self::F32;
    /// The least integer not below.
    fn ceil(self, a: Self::F32) -> Self::F32;
    /// The integer part.
    fn trunc(self, a: Self::F32) -> Self::F32;
    /// `a * 2^n` for an `n` of integers, rounded once in the range of denormals and infinite above
    /// the range.
    fn scale_by_power_of_two(self, a: Self::F32, n: Self::F32) -> Self::F32;

    /// `a < b`.
    fn lt(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `a <= b`.
    fn le(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `a == b`.
    fn eq(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    /// True where a lane is NaN.
    fn is_nan(self, a: Self::F32) -> Self::Mask;
    /// `a` where the mask is true, else `b`.
    fn select(self, mask: Self::Mask, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The mask whose lane `i` is true where bit `i` is set.
    fn mask_of_bits(self, bits: u16) -> Self::Mask;
    /// True if any lane is true.
    fn any(self, mask: Self::Mask) -> bool;

    /// The bits of each lane.
    fn to_bits(self, a: Self::F32) -> Self::I32;
    /// The value with these bits.
    fn from_bits(self, a: Self::I32) -> Self::F32;
    /// To the nearest i32, ties to even; lanes out of range give an unspecified value.
    fn to_i32(self, a: Self::F32) -> Self::I32;
    /// To the nearest f32.
    fn to_f32(self, a: Self::I32) -> Self::F32;
    /// `a + b`, wrapping.
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a - b`, wrapping.
    fn sub_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a & b`.
    fn and_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a | b`.
    fn or_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a ^ b`.
    fn xor_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a << BITS`.
    fn shl_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32;
    /// `a >> BITS`, keeping the sign.
    fn shr_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32;

    /// What [`decode`](Simd::decode) needs besides scale and zero point, for codes of `BITS` bits:
    /// a table of `(code - zero) * scale`, where the CPU looks such things up faster than it
    /// computes them.
    #[inline(always)]
    fn decoder<const BITS: u32>(self, scale: Self::F32, _zero: Self::F32) -> Self::F32 {
        scale
    }
    /// `(code - zero) * scale` of the lowest `BITS` bits of each lane. `table` is of
    /// [`decoder`](Simd::decoder) for this scale and zero point; lanes have no bits above the
    /// lowest 8.
    #[inline(always)]
    fn decode<const BITS: u32>(
        self,
        codes: Self::I32,
        _table: Self::F32,
        scale: Self::F32,
        zero: Self::F32,
    ) -> Self::F32 {
        let codes = if BITS == 8 { codes } else { self.and_i32(codes, self.splat_i32((1 << BITS) - 1)) };
        self.mul(self.sub(self.to_f32(codes), zero), scale)
    }

    /// The lanes as an array's first `LANES` values; the rest is 0.
    #[inline(always)]
    fn to_array(self, a: Self::F32) -> [f32; MAX_LANES] {
        let mut lanes = [0.0; MAX_LANES];
        // SAFETY: the array holds `MAX_LANES` values, and no vector is wider.
        unsafe { self.store_ptr(lanes.as_mut_ptr(), a) };
        lanes
    }
    /// The first `LANES` values of an array.
    #[inline(always)]
    fn from_array(self, lanes: &[f32; MAX_LANES]) -> Self::F32 {
        // SAFETY: the array holds `MAX_LANES` values, and no vector is wider.
        unsafe { self.load_ptr(lanes.as_ptr()) }
    }

    /// Loads `LANES` values from `from[at..]`.
    ///
    /// # Panics
    /// If the slice ends before that.
    #[inline(always)]
    fn load(self, from: &[f32], at: usize) -> Self::F32 {
        assert!(at <= from.len() && from.len() - at >= Self::LANES);
        // SAFETY: the slice holds `LANES` values from `at` on.
        unsafe { self.load_ptr(from.as_ptr().add(at)) }
    }
    /// Loads `count` values (at most `LANES`) from `from[at..]`; the other lanes are `fill`.
    ///
    /// # Panics
    /// If the slice ends before that, or `count` is more than `LANES`.
    #[inline(always)]
    fn load_partial(self, from: &[f32], at: usize, count: usize, fill: f32) -> Self::F32 {
        assert!(count <= Self::LANES && at <= from.len() && from.len() - at >= count);
        // SAFETY: the slice holds `count` values from `at` on.
        unsafe { self.load_partial_ptr(from.as_ptr().add(at), count, fill) }
    }
    /// Loads `2 * LANES` values from `from[at..]`, those at even and those at odd places.
    ///
    /// # Panics
    /// If the slice ends before that.
    #[inline(always)]
    fn load_even_odd(self, from: &[f32], at: usize) -> (Self::F32, Self::F32) {
        self.part_even_odd(self.load(from, at), self.load(from, at + Self::LANES))
    }
    /// Stores all lanes at `to[at..]`.
    ///
    /// # Panics
    /// If the slice ends before that.
    #[inline(always)]
    fn store(self, to: &mut [f32], at: usize, value: Self::F32) {
        assert!(at <= to.len() && to.len() - at >= Self::LANES);
        // SAFETY: the slice holds `LANES` values from `at` on.
        unsafe { self.store_ptr(to.as_mut_ptr().add(at), value) }
    }
    /// Stores the first `count` lanes (at most `LANES`) at `to[at..]`.
    ///
    /// # Panics
    /// If the slice ends before that, or `count` is more than `LANES`.
    #[inline(always)]
    fn store_partial(self, to: &mut [f32], at: usize, count: usize, value: Self::F32) {
        assert!(count <= Self::LANES && at <= to.len() && to.len() - at >= count);
        // SAFETY: the slice holds `count` values from `at` on.
        unsafe { self.store_partial_ptr(to.as_mut_ptr().add(at), count, value) }
    }

    /// The lesser, NaN where a lane is NaN in either.
    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        self.select(self.is_nan(a), a, self.min_or_second(a, b))
    }
    /// The greater, NaN where a lane is NaN in either.
    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        self.select(self.is_nan(a), a, self.max_or_second(a, b))
    }
    /// The magnitude.
    #[inline(always)]
    fn abs(self, a: Self::F32) -> Self::F32 {
        self.from_bits(self.and_i32(self.to_bits(a), self.splat_i32(i32::MAX)))
    }
    /// The negative, also of zeros and NaN.
    #[inline(always)]
    fn neg(self, a: Self::F32) -> Self::F32 {
        self.from_bits(self.xor_i32(self.to_bits(a), self.splat_i32(i32::MIN)))
    }
    /// `magnitude` (which is not negative) with the sign of `sign` put on.
    #[inline(always)]
    fn with_sign_of(self, magnitude: Self::F32, sign: Self::F32) -> Self::F32 {
        let sign = self.and_i32(self.to_bits(sign), self.splat_i32(i32::MIN));
        self.from_bits(self.or_i32(self.to_bits(magnitude), sign))
    }
    /// The sum of all lanes, added in halves.
    #[inline(always)]
    fn horizontal_sum(self, a: Self::F32) -> f32 {
        fold_lanes(self.to_array(a), Self::LANES, |a, b| a + b)
    }
    /// The product of all lanes.
    #[inline(always)]
    fn horizontal_product(self, a: Self::F32) -> f32 {
        fold_lanes(self.to_array(a), Self::LANES, |a, b| a * b)
    }
    /// The greatest lane, NaN if any is NaN.
    #[inline(always)]
    fn horizontal_max(self, a: Self::F32) -> f32 {
        fold_lanes(self.to_array(a), Self::LANES, max_or_nan)
    }
    /// The least lane, NaN if any is NaN.
    #[inline(always)]
    fn horizontal_min(self, a: Self::F32) -> f32 {
        fold_lanes(self.to_array(a), Self::LANES, min_or_nan)
    }
}

/// The lanes of the widest vector.
pub const MAX_LANES: usize = 16;

/// The greater of two values, NaN if either is.
#[inline(always)]
pub fn max_or_nan(a: f32, b: f32) -> f32 {
    if a > b || a.is_nan() { a } else { b }
}

/// The lesser of two values, NaN if either is.
#[inline(always)]
pub fn min_or_nan(a: f32, b: f32) -> f32 {
    if a < b || a.is_nan() { a } else { b }
}

#[inline(always)]
fn fold_lanes(mut lanes: [f32; MAX_LANES], count: usize, combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = count / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = combine(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Work that is compiled for each instruction set.
pub trait SimdOp {
    /// What it gives.
    type Output;
    /// Does the work with the instructions that `simd` stands for. Mark it `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs `op` compiled for `isa`, or for the widest instruction set of this CPU if it lacks `isa`.
#[inline]
pub fn dispatch<O: SimdOp>(isa: Isa, op: O) -> O::Output {
    #[cfg(target_arch = "x86_64")]
    match isa.min(Isa::widest()) {
        Isa::Avx512 => {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn enter<O: SimdOp>(op: O) -> O::Output {
                // SAFETY: the caller has found the CPU to have these features.
                op.run(unsafe { Avx512::new_unchecked() })
            }
            // SAFETY: `Isa::widest` has found the CPU to have these features.
            return unsafe { enter(op) };
        }
        Isa::Avx2 => {
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn enter<O: SimdOp>(op: O) -> O::Output {
                // SAFETY: the caller has found the CPU to have these features.
                op.run(unsafe { Avx2::new_unchecked() })
            }
            // SAFETY: `Isa::widest` has found the CPU to have these features.
            return unsafe { enter(op) };
        }
        Isa::Neon | Isa::Scalar => {}
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = isa;
    op.run(Portable)
}
