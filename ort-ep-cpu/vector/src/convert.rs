//! Conversions of slices between number types.
//!
//! Integers are converted as ONNX's Cast does for ordinary values, towards zero. Values out of
//! range saturate and NaN becomes 0, as with Rust's `as`. ONNX leaves both undefined.

use half::{bf16, f16};

use crate::simd::slices::{halves_from_singles, singles_from_halves};
use crate::simd::{Isa, Simd, SimdOp, dispatch};

/// Widens half-precision values.
///
/// # Panics
/// If the lengths differ.
pub fn f32_from_f16(isa: Isa, from: &[f16], to: &mut [f32]) {
    singles_from_halves(isa, from, to);
}

/// Rounds to half precision, to nearest even.
///
/// # Panics
/// If the lengths differ.
pub fn f16_from_f32(isa: Isa, from: &[f32], to: &mut [f16]) {
    halves_from_singles(isa, from, to);
}

/// A plain loop that the compiler vectorizes for each instruction set.
struct Each<'a, A, B, F> {
    from: &'a [A],
    to: &'a mut [B],
    function: F,
}

impl<A: Copy, B, F: Fn(A) -> B> SimdOp for Each<'_, A, B, F> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = (self.function)(*from);
        }
    }
}

/// Computes `to[i] = function(from[i])` for any types, compiled for the instruction set.
///
/// # Panics
/// If the lengths differ.
pub fn convert<A: Copy, B>(isa: Isa, from: &[A], to: &mut [B], function: impl Fn(A) -> B) {
    assert_eq!(from.len(), to.len(), "a conversion keeps the length");
    dispatch(isa, Each { from, to, function });
}

/// Widens bfloat16 values.
///
/// # Panics
/// If the lengths differ.
pub fn f32_from_bf16(isa: Isa, from: &[bf16], to: &mut [f32]) {
    convert(
        isa,
        from,
        to,
        #[inline(always)]
        |x| f32::from_bits(u32::from(x.to_bits()) << 16),
    );
}

/// Rounds to bfloat16, to nearest even; NaN stays NaN.
///
/// # Panics
/// If the lengths differ.
pub fn bf16_from_f32(isa: Isa, from: &[f32], to: &mut [bf16]) {
    convert(
        isa,
        from,
        to,
        #[inline(always)]
        |x: f32| {
            let bits = x.to_bits();
            // Half of the last kept place, less one if that place is even, carries exactly if we
            // must round up.
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            // Rounding could carry out of a NaN's fraction, so NaNs are truncated and made quiet.
            let quiet = (bits >> 16) | 0x40;
            bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
        },
    );
}

/// Generates the conversions between f32 and the integer types.
macro_rules! integer_conversions {
    ($($integer:ident, $from_f32:ident, $to_f32:ident;)+) => {
        $(
            #[doc = concat!("f32 to ", stringify!($integer), ", towards zero and saturating.")]
            ///
            /// # Panics
            /// If the lengths differ.
            pub fn $from_f32(isa: Isa, from: &[f32], to: &mut [$integer]) {
                convert(isa, from, to, #[inline(always)] |x| x as $integer);
            }

            #[doc = concat!(stringify!($integer), " to the nearest f32.")]
            ///
            /// # Panics
            /// If the lengths differ.
            pub fn $to_f32(isa: Isa, from: &[$integer], to: &mut [f32]) {
                convert(isa, from, to, #[inline(always)] |x| x as f32);
            }
        )+
    };
}

integer_conversions! {
    i8, i8_from_f32, f32_from_i8;
    u8, u8_from_f32, f32_from_u8;
    i16, i16_from_f32, f32_from_i16;
    u16, u16_from_f32, f32_from_u16;
    i32, i32_from_f32, f32_from_i32;
    i64, i64_from_f32, f32_from_i64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_agree_with_the_half_crate_on_all_bit_patterns() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let halves: Vec<f16> = all.iter().map(|bits| f16::from_bits(*bits)).collect();
        let brains: Vec<bf16> = all.iter().map(|bits| bf16::from_bits(*bits)).collect();
        let singles: Vec<f32> =
            (0..u32::MAX).step_by(65_521).map(f32::from_bits).chain([f32::NAN, 1.0 + f32::EPSILON]).collect();
        for isa in Isa::available() {
            let mut wide = vec![0.0; all.len()];
            f32_from_f16(isa, &halves, &mut wide);
            for (got, half) in wide.iter().zip(&halves) {
                assert!(*got == half.to_f32() || (got.is_nan() && half.is_nan()), "{isa:?} {half}");
            }
            f32_from_bf16(isa, &brains, &mut wide);
            for (got, brain) in wide.iter().zip(&brains) {
                assert!(*got == brain.to_f32() || (got.is_nan() && brain.is_nan()), "{isa:?} {brain}");
            }
            let mut narrow = vec![f16::ZERO; singles.len()];
            f16_from_f32(isa, &singles, &mut narrow);
            let mut brain = vec![bf16::ZERO; singles.len()];
            bf16_from_f32(isa, &singles, &mut brain);
            for (index, x) in singles.iter().enumerate() {
                let same = narrow[index] == f16::from_f32(*x) && brain[index] == bf16::from_f32(*x);
                assert!(
                    same || (x.is_nan() && narrow[index].is_nan() && brain[index].is_nan()),
                    "{isa:?} {x}"
                );
            }
        }
    }

    #[test]
    fn integers_saturate_and_truncate() {
        let values = [0.0, -0.9, 1.5, -2.5, 127.9, 300.0, -300.0, 3e9, -3e9, 1e20, -1e20, f32::NAN];
        for isa in Isa::available() {
            for len in 0..50 {
                let from: Vec<f32> = values.iter().cycle().take(len).copied().collect();
                let (mut small, mut wide, mut back) = (vec![0_i8; len], vec![0_i64; len], vec![0.0; len]);
                i8_from_f32(isa, &from, &mut small);
                i64_from_f32(isa, &from, &mut wide);
                f32_from_i64(isa, &wide, &mut back);
                for index in 0..len {
                    assert_eq!(small[index], from[index] as i8);
                    assert_eq!(wide[index], from[index] as i64);
                    assert_eq!(back[index], (from[index] as i64) as f32);
                }
            }
        }
    }
}
