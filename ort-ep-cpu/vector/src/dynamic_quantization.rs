//! Dynamic 8-bit quantization, with the exponent coded in unary.
//!
//! Small numbers keep an exponent, and large ones get more digits. See Dettmers, 8-bit
//! Approximations for Parallelism in Deep Learning, 2016. The variant without a sign is from the
//! paper of 2022.

use std::sync::OnceLock;

use ort_alloc::fork::get_or_init;

/// The number of decimal exponents, from 10^-6 to 10^0.
const EXPONENTS: i32 = 7;
/// How many low bits of a float do not select an entry. The others do, without the sign: the
/// exponent and seven bits of the fraction.
const SHIFT: u32 = 16;
/// The first entry serves 2^-23 and all smaller magnitudes, which are nearer to 0 than to any other
/// value.
const LOWEST: u32 = (127 - 23) << 7;
/// The last entry is that of 1.
const HIGHEST: u32 = 127 << 7;
const ENTRIES: usize = (HIGHEST - LOWEST + 1) as usize;

/// The 256 values of an 8-bit map in order, and a lookup table that finds the nearest one.
#[derive(Debug)]
pub struct DynamicQuantization {
    values: [f32; 256],
    /// The midpoint between each value and the next; infinity after the last.
    middles: [f32; 256],
    /// How many midpoints are below the least number of each entry, for positive and for negative
    /// numbers. No entry contains two midpoints.
    below: [[u8; ENTRIES]; 2],
}

impl DynamicQuantization {
    /// Returns the map for numbers from above -1 to 1.
    pub fn signed() -> &'static DynamicQuantization {
        static MAP: OnceLock<DynamicQuantization> = OnceLock::new();
        get_or_init(&MAP, || DynamicQuantization::new(true))
    }

    /// Returns the map for numbers from 0 to 1.
    pub fn unsigned() -> &'static DynamicQuantization {
        static MAP: OnceLock<DynamicQuantization> = OnceLock::new();
        get_or_init(&MAP, || DynamicQuantization::new(false))
    }

    fn new(signed: bool) -> DynamicQuantization {
        let mut numbers = vec![0.0, 1.0];
        for exponent in 0..EXPONENTS {
            // The midpoints of equal parts of 0.1 to 1. Without a sign there is room for twice as
            // many.
            let parts = 1u32 << (exponent + i32::from(!signed));
            for part in 0..parts {
                let fraction = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
                let number = fraction * 10f64.powi(exponent + 1 - EXPONENTS);
                numbers.push(number);
                if signed {
                    numbers.push(-number);
                }
            }
        }
        numbers.sort_by(f64::total_cmp);
        let mut values = [0.0; 256];
        for (value, number) in values.iter_mut().zip(numbers) {
            *value = number as f32;
        }
        let mut middles = [f32::INFINITY; 256];
        for (middle, pair) in middles.iter_mut().zip(values.windows(2)) {
            *middle = (pair[0] + pair[1]) / 2.0;
        }
        let count = |least: f32| middles.iter().filter(|middle| **middle < least).count() as u8;
        let entry = |index: usize, sign: u32| {
            let bits = (LOWEST + index as u32) << SHIFT;
            // The least number of a negative entry has the greatest magnitude. The first entry
            // extends to 0.
            match (sign, index) {
                (0, 0) => 0.0,
                (0, _) => f32::from_bits(bits),
                _ => -f32::from_bits(bits | 0xffff),
            }
        };
        let below = [0, 1].map(|sign| std::array::from_fn(|index| count(entry(index, sign))));
        DynamicQuantization { values, middles, below }
    }

    /// Returns the value of a quantized number.
    #[inline(always)]
    pub fn value(&self, byte: u8) -> f32 {
        self.values[usize::from(byte)]
    }

    /// Quantizes a number of magnitude up to 1 to the nearest value. Ties go to the lesser value.
    #[inline(always)]
    pub fn nearest(&self, number: f32) -> u8 {
        let magnitude = (number.to_bits() & 0x7fff_ffff) >> SHIFT;
        let entry = (magnitude.clamp(LOWEST, HIGHEST) - LOWEST) as usize;
        let below = self.below[usize::from(number < 0.0)][entry];
        below + u8::from(number > self.middles[usize::from(below)])
    }

    /// Scales numbers by their greatest magnitude, quantizes them, and returns that magnitude.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn encode(&self, numbers: &[f32], quantized: &mut [u8]) -> f32 {
        assert_eq!(numbers.len(), quantized.len(), "each number has a byte");
        // NaN must reach the caller, so it replaces any magnitude and stays.
        let scale = numbers.iter().fold(0.0, |most, x| {
            let size = x.abs();
            if size > most || size.is_nan() { size } else { most }
        });
        // Zeros would divide by zero.
        let divisor = if scale == 0.0 { 1.0 } else { scale };
        for (byte, &number) in quantized.iter_mut().zip(numbers) {
            *byte = self.nearest(number / divisor);
        }
        scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn straight(map: &DynamicQuantization, number: f32) -> u8 {
        map.middles.iter().filter(|middle| **middle < number).count() as u8
    }

    #[test]
    fn the_nearest_code_is_that_of_a_straight_search() {
        for (map, signed) in [(DynamicQuantization::signed(), true), (DynamicQuantization::unsigned(), false)]
        {
            assert!(map.values.windows(2).all(|pair| pair[0] < pair[1]), "256 different numbers in order");
            assert_eq!(map.values[255], 1.0);
            assert!(map.values.contains(&0.0));
            let near = |x: f32| [x.next_down(), x, x.next_up()];
            let special = map.values.iter().chain(&map.middles[..255]).copied().flat_map(near);
            let many = (0..=1.0f32.to_bits()).step_by(997).map(f32::from_bits);
            for number in special.chain(many).chain([0.0, f32::MIN_POSITIVE, 1e-45]) {
                for number in [number, -number].into_iter().take(if signed { 2 } else { 1 }) {
                    if number.abs() <= 1.0 && (signed || number >= 0.0) {
                        assert_eq!(map.nearest(number), straight(map, number), "{number:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn values_are_their_own_nearest() {
        for map in [DynamicQuantization::signed(), DynamicQuantization::unsigned()] {
            for index in 0..=255u8 {
                assert_eq!(map.nearest(map.value(index)), index);
            }
        }
    }

    #[test]
    fn blocks_of_zeros_and_of_nothing_have_the_scale_zero() {
        let mut quantized = [7; 3];
        assert_eq!(DynamicQuantization::signed().encode(&[0.0, -0.0, 0.0], &mut quantized), 0.0);
        assert!(quantized.iter().all(|&byte| DynamicQuantization::signed().value(byte) == 0.0));
        assert_eq!(DynamicQuantization::unsigned().encode(&[], &mut []), 0.0);
        let mut quantized = [0; 2];
        assert!(DynamicQuantization::signed().encode(&[f32::NAN, 1.0], &mut quantized).is_nan());
    }
}
