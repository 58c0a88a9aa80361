//! Portable SIMD with run-time dispatch.
//!
//! [`Simd`] is a set of vector operations. A value of a type that implements it proves that the CPU
//! has those instructions, so its operations are safe to call. Code is written once in a
//! [`SimdOp`], generic over `S: Simd`. [`dispatch`] compiles it for each instruction set and enters
//! the right copy. Everything between the entry point and the operations is `#[inline(always)]`, so
//! that the whole loop is compiled with the instruction set of the entry point. A closure cannot be
//! marked so: `cargo xtask test` fails if one with operations was not inlined. Call `dispatch` once
//! per slice, not once per vector.
//!
//! All unsafe code of the vector kernels is in this folder: entry points, loads and stores
//! ([`Simd`]), and the loops over slices that check lengths once ([`slices`]).

#![allow(
    clippy::indexing_slicing,
    reason = "lanes and blocks are counted below the constant number of lanes, and slices are cut to the shortest before the loops"
)]

pub mod attention;
pub mod blocks;
pub mod blocks_bytes;
mod byte_tile;
pub mod bytes;
pub mod isa;
mod lookup;
pub mod math;
#[cfg(test)]
mod math_tests;
#[cfg(test)]
mod operation_tests;
mod portable;
pub mod quantized_rows;
pub mod roofline;
pub mod skinny_gemm;
pub mod slices;
pub mod steps;
mod tile;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

pub use byte_tile::{interleave_three_bytes, transpose_byte_tiles};
pub use isa::Isa;
pub use lookup::lookup;
pub use portable::Portable;
pub use tile::transpose_tiles;

#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub use {avx2::Avx2, avx512::Avx512};

/// The vector operations of one instruction set, on `LANES` lanes of 32 bits.
///
/// Comparisons are ordered (false if a lane is NaN), and conversions round to nearest even.
// `self` is the instruction set, never the value that is converted.
#[allow(clippy::wrong_self_convention)]
pub trait Simd: Copy + Send + Sync + 'static {
    /// A vector of `LANES` f32.
    type F32: Copy;
    /// A vector of `LANES` i32.
    type I32: Copy;
    /// One boolean per lane.
    type Mask: Copy;
    /// The number of 32-bit lanes of a vector.
    const LANES: usize;
    /// The number of vector registers, which bounds register tiles.
    const REGISTERS: usize;
    /// Whether vectors are registers. Those of the portable implementation are arrays.
    const IN_REGISTERS: bool = true;

    /// Broadcasts `value` to all lanes.
    fn splat(self, value: f32) -> Self::F32;
    /// Broadcasts `value` to all lanes.
    fn splat_i32(self, value: i32) -> Self::I32;

    /// Loads `LANES` unaligned values.
    ///
    /// # Safety
    /// `from` is valid for reading `LANES` values.
    unsafe fn load_ptr(self, from: *const f32) -> Self::F32;
    /// Loads the first `count` lanes (at most `LANES`) and sets the others to `fill`.
    ///
    /// # Safety
    /// `from` is valid for reading `count` values.
    unsafe fn load_partial_ptr(self, from: *const f32, count: usize, fill: f32) -> Self::F32;
    /// Loads the lanes that are set in the mask. The others become 0 and their memory is not
    /// accessed.
    ///
    /// # Safety
    /// `from` is valid for reading at each lane that is set.
    unsafe fn load_masked_ptr(self, from: *const f32, mask: Self::Mask) -> Self::F32;
    /// Stores all lanes, unaligned.
    ///
    /// # Safety
    /// `to` is valid for writing `LANES` values.
    unsafe fn store_ptr(self, to: *mut f32, value: Self::F32);
    /// Stores the first `count` lanes (at most `LANES`).
    ///
    /// # Safety
    /// `to` is valid for writing `count` values.
    unsafe fn store_partial_ptr(self, to: *mut f32, count: usize, value: Self::F32);
    /// Loads `LANES` IEEE half-precision values, stored as bits.
    ///
    /// # Safety
    /// `from` is valid for reading `LANES` values.
    unsafe fn load_f16_ptr(self, from: *const u16) -> Self::F32;
    /// Rounds all lanes to IEEE half precision and stores their bits.
    ///
    /// # Safety
    /// `to` is valid for writing `LANES` values.
    unsafe fn store_f16_ptr(self, to: *mut u16, value: Self::F32);
    /// Loads `LANES` bytes and zero-extends each to a lane.
    ///
    /// # Safety
    /// `from` is valid for reading `LANES` bytes.
    unsafe fn load_u8_ptr(self, from: *const u8) -> Self::I32;
    /// Prefetches the cache line at `address`, which need not be mapped. Does nothing if the
    /// instruction set has no such hint.
    #[inline(always)]
    fn prefetch(self, _address: *const f32) {}

    /// Shifts the lanes up by one and inserts `first`.
    fn shift_in_first(self, first: f32, a: Self::F32) -> Self::F32;
    /// Shifts the lanes down by one and inserts `last`.
    fn shift_in_last(self, a: Self::F32, last: f32) -> Self::F32;
    /// Deinterleaves two consecutive vectors into the elements at even and at odd positions.
    fn part_even_odd(self, low: Self::F32, high: Self::F32) -> (Self::F32, Self::F32);
    /// `a + b`.
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a - b`.
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b`.
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a / b`, correctly rounded.
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `1 / a`, at most 1 ULP off, for `a` from 1 to 2^126, or NaN.
    #[inline(always)]
    fn reciprocal(self, a: Self::F32) -> Self::F32 {
        self.div(self.splat(1.0), a)
    }
    /// `a * b + c`, rounded once if the CPU has FMA, otherwise twice.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `c - a * b`, rounded like [`mul_add`](Simd::mul_add).
    fn neg_mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The smaller value; `b` if either lane is NaN (the semantics of x86's `minps`).
    fn min_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The larger value; `b` if either lane is NaN (the semantics of x86's `maxps`).
    fn max_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Square root, correctly rounded.
    fn sqrt(self, a: Self::F32) -> Self::F32;
    /// The nearest integer, ties to even.
    fn round_even(self, a: Self::F32) -> Self::F32;
    /// The largest integer that is not above the value.
    fn floor(self, a: Self::F32) -> Self::F32;
    /// The smallest integer that is not below the value.
    fn ceil(self, a: Self::F32) -> Self::F32;
    /// The integer part.
    fn trunc(self, a: Self::F32) -> Self::F32;
    /// `a * 2^n` for integral `n`. Denormal results are rounded once, and results above the range
    /// are infinite.
    fn scale_by_power_of_two(self, a: Self::F32, n: Self::F32) -> Self::F32;
    /// `a * 2^n` for whole `n`, if the result is a normal number.
    #[inline(always)]
    fn scale_to_normal(self, a: Self::F32, n: Self::F32) -> Self::F32 {
        self.from_bits(self.add_i32(self.to_bits(a), self.shl_i32::<23>(self.to_i32(n))))
    }
    /// `a * 2^n` for `a` from 1/2 to 2 and whole `n` up to 126. Results that are not normal numbers
    /// may be 0 instead.
    #[inline(always)]
    fn scale_or_zero(self, a: Self::F32, n: Self::F32) -> Self::F32 {
        self.select(self.lt(n, self.splat(-125.0)), self.splat(0.0), self.scale_to_normal(a, n))
    }

    /// `a < b`.
    fn lt(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `a <= b`.
    fn le(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `a == b`.
    fn eq(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    /// True if a lane is NaN.
    fn is_nan(self, a: Self::F32) -> Self::Mask;
    /// `a` if the mask is set, otherwise `b`.
    fn select(self, mask: Self::Mask, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The mask whose lane `i` is set if bit `i` is set.
    fn mask_of_bits(self, bits: u16) -> Self::Mask;
    /// True if any lane is set.
    fn any(self, mask: Self::Mask) -> bool;

    /// Reinterprets each lane's bits as `i32`.
    fn to_bits(self, a: Self::F32) -> Self::I32;
    /// Reinterprets each lane's bits as `f32`.
    fn from_bits(self, a: Self::I32) -> Self::F32;
    /// Converts to the nearest `i32`, ties to even. Lanes out of range are unspecified.
    fn to_i32(self, a: Self::F32) -> Self::I32;
    /// Converts to the nearest `f32`.
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
    /// `a >> BITS`, arithmetic.
    fn shr_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32;

    /// Returns what [`decode`](Simd::decode) needs besides scale and zero point, for quantized
    /// values of `BITS` bits. If the CPU looks values up faster than it computes them, this is the
    /// table of `(value - zero) * scale`.
    #[inline(always)]
    fn decoder<const BITS: u32>(self, scale: Self::F32, _zero: Self::F32) -> Self::F32 {
        scale
    }
    /// Dequantizes the lowest `BITS` bits of each lane: `(value - zero) * scale`. `table` must come
    /// from [`decoder`](Simd::decoder) with the same scale and zero point. Only the lowest 8 bits
    /// of a lane may be set.
    #[inline(always)]
    fn decode<const BITS: u32>(
        self,
        quantized: Self::I32,
        _table: Self::F32,
        scale: Self::F32,
        zero: Self::F32,
    ) -> Self::F32 {
        let quantized =
            if BITS == 8 { quantized } else { self.and_i32(quantized, self.splat_i32((1 << BITS) - 1)) };
        self.mul(self.sub(self.to_f32(quantized), zero), scale)
    }

    /// Returns the lanes as the first `LANES` elements of an array; the rest is 0.
    #[inline(always)]
    fn to_array(self, a: Self::F32) -> [f32; MAX_LANES] {
        let mut lanes = [0.0; MAX_LANES];
        // SAFETY: the array holds `MAX_LANES` values, and no vector is wider.
        unsafe { self.store_ptr(lanes.as_mut_ptr(), a) };
        lanes
    }
    /// Loads the first `LANES` elements of an array.
    #[inline(always)]
    fn from_array(self, lanes: &[f32; MAX_LANES]) -> Self::F32 {
        // SAFETY: the array holds `MAX_LANES` values, and no vector is wider.
        unsafe { self.load_ptr(lanes.as_ptr()) }
    }

    /// Loads `LANES` values from `from[at..]`.
    ///
    /// # Panics
    /// If the slice is too short.
    #[inline(always)]
    fn load(self, from: &[f32], at: usize) -> Self::F32 {
        assert!(at <= from.len() && from.len() - at >= Self::LANES);
        // SAFETY: the assertion checked that the slice holds `LANES` values from `at` on.
        unsafe { self.load_ptr(from.as_ptr().add(at)) }
    }
    /// Loads `count` values (at most `LANES`) from `from[at..]` and sets the other lanes to `fill`.
    ///
    /// # Panics
    /// If the slice is too short, or `count` is more than `LANES`.
    #[inline(always)]
    fn load_partial(self, from: &[f32], at: usize, count: usize, fill: f32) -> Self::F32 {
        assert!(count <= Self::LANES && at <= from.len() && from.len() - at >= count);
        // SAFETY: the assertion checked that the slice holds `count` values from `at` on.
        unsafe { self.load_partial_ptr(from.as_ptr().add(at), count, fill) }
    }
    /// Loads `2 * LANES` values from `from[at..]`, deinterleaved into even and odd positions.
    ///
    /// # Panics
    /// If the slice is too short.
    #[inline(always)]
    fn load_even_odd(self, from: &[f32], at: usize) -> (Self::F32, Self::F32) {
        self.part_even_odd(self.load(from, at), self.load(from, at + Self::LANES))
    }
    /// Stores all lanes at `to[at..]`.
    ///
    /// # Panics
    /// If the slice is too short.
    #[inline(always)]
    fn store(self, to: &mut [f32], at: usize, value: Self::F32) {
        assert!(at <= to.len() && to.len() - at >= Self::LANES);
        // SAFETY: the assertion checked that the slice holds `LANES` values from `at` on.
        unsafe { self.store_ptr(to.as_mut_ptr().add(at), value) }
    }
    /// Stores the first `count` lanes (at most `LANES`) at `to[at..]`.
    ///
    /// # Panics
    /// If the slice is too short, or `count` is more than `LANES`.
    #[inline(always)]
    fn store_partial(self, to: &mut [f32], at: usize, count: usize, value: Self::F32) {
        assert!(count <= Self::LANES && at <= to.len() && to.len() - at >= count);
        // SAFETY: the assertion checked that the slice holds `count` values from `at` on.
        unsafe { self.store_partial_ptr(to.as_mut_ptr().add(at), count, value) }
    }

    /// The smaller value; NaN if either lane is NaN.
    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        self.select(self.is_nan(a), a, self.min_or_second(a, b))
    }
    /// The larger value; NaN if either lane is NaN.
    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        self.select(self.is_nan(a), a, self.max_or_second(a, b))
    }
    /// The absolute value.
    #[inline(always)]
    fn abs(self, a: Self::F32) -> Self::F32 {
        self.from_bits(self.and_i32(self.to_bits(a), self.splat_i32(i32::MAX)))
    }
    /// The negated value; flips the sign of zeros and NaN too.
    #[inline(always)]
    fn neg(self, a: Self::F32) -> Self::F32 {
        self.from_bits(self.xor_i32(self.to_bits(a), self.splat_i32(i32::MIN)))
    }
    /// The non-negative `magnitude` with the sign of `sign`.
    #[inline(always)]
    fn with_sign_of(self, magnitude: Self::F32, sign: Self::F32) -> Self::F32 {
        let sign = self.and_i32(self.to_bits(sign), self.splat_i32(i32::MIN));
        self.from_bits(self.or_i32(self.to_bits(magnitude), sign))
    }
    /// The sum of all lanes, added pairwise by halves.
    #[inline(always)]
    fn horizontal_sum(self, a: Self::F32) -> f32 {
        fold_lanes(self.to_array(a), Self::LANES, |a, b| a + b)
    }
    /// The product of all lanes.
    #[inline(always)]
    fn horizontal_product(self, a: Self::F32) -> f32 {
        fold_lanes(self.to_array(a), Self::LANES, |a, b| a * b)
    }
    /// The largest lane; NaN if any lane is NaN.
    #[inline(always)]
    fn horizontal_max(self, a: Self::F32) -> f32 {
        fold_lanes(self.to_array(a), Self::LANES, max_or_nan)
    }
    /// The smallest lane; NaN if any lane is NaN.
    #[inline(always)]
    fn horizontal_min(self, a: Self::F32) -> f32 {
        fold_lanes(self.to_array(a), Self::LANES, min_or_nan)
    }
}

/// The lanes of the widest vector.
pub const MAX_LANES: usize = 16;

/// The values beyond the last used one that loops of whole vectors may load or store.
pub const SLACK: usize = 2 * MAX_LANES;

/// Returns the larger of two values; NaN if either is NaN.
#[inline(always)]
pub fn max_or_nan(a: f32, b: f32) -> f32 {
    if a > b || a.is_nan() { a } else { b }
}

/// Returns the smaller of two values; NaN if either is NaN.
#[inline(always)]
pub fn min_or_nan(a: f32, b: f32) -> f32 {
    if a < b || a.is_nan() { a } else { b }
}

#[inline(always)]
fn fold_lanes(mut lanes: [f32; MAX_LANES], count: usize, combine: impl Fn(f32, f32) -> f32) -> f32 {
    // Pairwise by halves, in the order of the AVX2 and AVX-512 versions.
    let mut half = count / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = combine(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// An operation that is compiled for each instruction set.
pub trait SimdOp {
    /// The result.
    type Output;
    /// Runs the operation with the instructions that `simd` stands for. Mark it
    /// `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs `op` compiled for `isa`, or for the widest instruction set of this CPU if it lacks `isa`.
#[inline]
pub fn dispatch<O: SimdOp>(isa: Isa, op: O) -> O::Output {
    #[cfg(target_arch = "x86_64")]
    match isa.min(Isa::widest()) {
        Isa::Avx512 => {
            /// # Safety
            ///
            /// The CPU has AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C.
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn enter<O: SimdOp>(op: O) -> O::Output {
                // SAFETY: `dispatch` calls this only if `Isa::widest` detected these features.
                op.run(unsafe { Avx512::new_unchecked() })
            }
            // SAFETY: `Isa::widest` detected these features.
            return unsafe { enter(op) };
        }
        Isa::Avx2 => {
            /// # Safety
            ///
            /// The CPU has AVX2, FMA and F16C.
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn enter<O: SimdOp>(op: O) -> O::Output {
                // SAFETY: `dispatch` calls this only if `Isa::widest` detected these features.
                op.run(unsafe { Avx2::new_unchecked() })
            }
            // SAFETY: `Isa::widest` detected these features.
            return unsafe { enter(op) };
        }
        Isa::Neon | Isa::Scalar => {}
    }
    #[cfg(target_arch = "aarch64")]
    if isa >= Isa::Neon {
        return op.run(Neon);
    }
    // Unused on targets that have portable code only.
    let _ = isa;
    op.run(Portable)
}
