//! Exact sums of floating-point numbers, in fixed point.
//!
//! Rounding makes an ordinary sum depend on the order of its terms, and so on threads and batches.
//! This sum has a bit for each power of two that a product of two float32 may have, and is rounded
//! once, when it is read. See "Fast exact summation using small and large superaccumulators",
//! arXiv:1505.05571.

/// The exponent of the lowest bit: that of the last place of the least product of two float32,
/// 2^-298 with 52 places.
const LOWEST: i32 = -352;
/// Bits of a limb that carry value. The other half holds carries and the sign.
const LIMB_BITS: i32 = 32;
/// From 2^-352 to 2^320: products of float32 are below 2^256, and 2^64 of them may be added.
const LIMBS: usize = 21;
/// Each addition adds less than 2^32 to a limb, so carries need not be handed on before these many.
const ADDITIONS: u32 = 1 << 30;

/// A sum of float32 numbers, or of products of two of them.
#[derive(Clone, Debug)]
pub(crate) struct ExactSum {
    limbs: [i64; LIMBS],
    additions: u32,
}

impl Default for ExactSum {
    fn default() -> Self {
        ExactSum { limbs: [0; LIMBS], additions: 0 }
    }
}

impl ExactSum {
    /// Adds a finite number that is a float32, or a product of two of them in float64, which is
    /// exact.
    #[inline]
    pub(crate) fn add(&mut self, number: f64) {
        let bits = number.to_bits();
        let exponent = (bits >> 52 & 0x7ff) as i32;
        // Zero. Products of float32 are never subnormal float64.
        if exponent == 0 {
            return;
        }
        let mantissa = bits & ((1 << 52) - 1) | 1 << 52;
        let lowest = exponent - 1075 - LOWEST;
        let (first, shift) = (lowest.div_euclid(LIMB_BITS), lowest.rem_euclid(LIMB_BITS));
        let shifted = u128::from(mantissa) << shift;
        let is_negative = bits >> 63 != 0;
        let places = self.limbs.iter_mut().skip(usize::try_from(first).unwrap_or(0)).take(3);
        for (place, limb) in places.enumerate() {
            let part = i64::from((shifted >> (32 * place)) as u32);
            *limb += if is_negative { -part } else { part };
        }
        self.additions += 1;
        if self.additions >= ADDITIONS {
            self.carry();
        }
    }

    /// Adds another sum.
    pub(crate) fn merge(&mut self, other: &ExactSum) {
        self.carry();
        let mut other = other.clone();
        other.carry();
        for (limb, more) in self.limbs.iter_mut().zip(other.limbs) {
            *limb += more;
        }
        self.carry();
    }

    /// The sum, rounded to float64. It depends on the numbers alone, not on their order.
    pub(crate) fn value(&self) -> f64 {
        let mut whole = self.clone();
        whole.carry();
        let is_negative = whole.limbs.last().is_some_and(|limb| *limb < 0);
        if is_negative {
            whole.limbs.iter_mut().for_each(|limb| *limb = -*limb);
            whole.carry();
        }
        let Some(top) = whole.limbs.iter().rposition(|limb| *limb != 0) else { return 0.0 };
        let first = top.saturating_sub(2);
        // Three limbs have at least 65 significant bits if lower ones are left out, so that the
        // lowest bit can stand for all of those.
        let used = whole.limbs.iter().skip(first).take(top + 1 - first).rev();
        let bits = used.fold(0_u128, |bits, limb| bits << LIMB_BITS | *limb as u128);
        let is_inexact = whole.limbs.iter().take(first).any(|limb| *limb != 0);
        let rounded = (bits | u128::from(is_inexact)) as f64;
        let sum = rounded * power_of_two(LOWEST + LIMB_BITS * first as i32);
        if is_negative { -sum } else { sum }
    }

    /// Hands carries on, so that each limb but the last is in 0..2^32. The form is unique.
    fn carry(&mut self) {
        let mut carried = 0;
        let last = LIMBS - 1;
        for (place, limb) in self.limbs.iter_mut().enumerate() {
            *limb += carried;
            carried = if place == last { 0 } else { *limb >> LIMB_BITS };
            *limb -= carried << LIMB_BITS;
        }
        self.additions = 0;
    }
}

/// A power of two in the normal range.
pub(crate) fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_does_not_depend_on_the_order() {
        let numbers = [1e38_f64, 1.0, -1e38, f64::from(f32::MIN_POSITIVE), -3.5, 1e-40_f32.into()];
        let sum = |order: &[usize]| {
            let mut sum = ExactSum::default();
            order.iter().for_each(|index| sum.add(numbers[*index]));
            sum.value()
        };
        assert_eq!(sum(&[0, 1, 2, 3, 4, 5]), -2.5);
        assert_eq!(sum(&[5, 3, 1, 0, 4, 2]), -2.5);
        assert_eq!(sum(&[3, 5]), f64::from(f32::MIN_POSITIVE) + f64::from(1e-40_f32));
        assert_eq!(sum(&[]), 0.0);
    }

    #[test]
    fn products_of_the_extremes_have_room() {
        let (most, least) = (f64::from(f32::MAX), f64::from(f32::from_bits(1)));
        let mut sum = ExactSum::default();
        for _ in 0..1000 {
            sum.add(most * most);
        }
        let mut small = ExactSum::default();
        small.add(least * least);
        assert_eq!(small.value(), least * least);
        sum.merge(&small);
        assert_eq!(sum.value(), 1000.0 * (most * most));
        for _ in 0..1000 {
            sum.add(-(most * most));
        }
        assert_eq!(sum.value(), least * least, "the small term was not lost beside the large ones");
    }
}
