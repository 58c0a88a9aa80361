//! Counter-based random numbers, and dropout with them.
//!
//! The generator is Philox4x32-10 of J. Salmon, M. Moraes, R. Dror and D. Shaw, Parallel Random
//! Numbers: As Easy as 1, 2, 3, 2011. It takes ten rounds of multiplications and exclusive ors. No
//! number depends on those drawn before, so loops may be split anywhere.

use num_traits::Float;

use crate::simd::{Isa, Simd, SimdOp, dispatch};

const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;
/// Elements whose random numbers are drawn at a time.
const BLOCK: usize = 512;

/// Returns four random words for a counter under a key.
#[inline(always)]
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut round = 0;
    while round < ROUNDS {
        let [a, b, c, d] = counter;
        let (left, right) = (u64::from(a) * MULTIPLIERS[0], u64::from(c) * MULTIPLIERS[1]);
        counter =
            [(right >> 32) as u32 ^ b ^ key[0], right as u32, (left >> 32) as u32 ^ d ^ key[1], left as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        round += 1;
    }
    counter
}

/// Which elements of a tensor are dropped.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    key: [u32; 2],
    step: u64,
    /// Random words below it drop their element.
    least: u32,
}

impl Dropout {
    /// Drops a share of `ratio` (from 0 to below 1). The seed, one of its streams, and the step
    /// determine the random numbers.
    pub fn new(ratio: f32, seed: i64, stream: i64, step: i64) -> Dropout {
        // Each of these operations is invertible, so any two streams of a seed have different keys.
        // They are the finalizer of splitmix64.
        let mut key = (seed as u64).wrapping_add((stream as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        key = (key ^ (key >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        key = (key ^ (key >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        key ^= key >> 31;
        // Rounded up, so that exactly the words below `ratio * 2^32` drop.
        let least = (f64::from(ratio) * 4_294_967_296.0).ceil() as u32;
        Dropout { key: [key as u32, (key >> 32) as u32], step: step as u64, least }
    }
}

struct Drop<'a, T> {
    rule: Dropout,
    first: u64,
    kept: T,
    data: &'a mut [T],
}

impl<T: Float> SimdOp for Drop<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Drop { rule, first, kept, data } = self;
        let step = [rule.step as u32, (rule.step >> 32) as u32];
        // One more, because the first element may be within a group of four words.
        let mut words = [[0; 4]; BLOCK / 4 + 1];
        let (mut counter, skipped) = (first / 4, (first % 4) as usize);
        for block in data.chunks_mut(BLOCK) {
            let words = &mut words[..(skipped + block.len()).div_ceil(4)];
            for (place, words) in words.iter_mut().enumerate() {
                let counter = counter + place as u64;
                *words = philox([counter as u32, (counter >> 32) as u32, step[0], step[1]], rule.key);
            }
            counter += (BLOCK / 4) as u64;
            for (x, &word) in block.iter_mut().zip(&words.as_flattened()[skipped..]) {
                *x = if word >= rule.least { *x / kept } else { T::zero() };
            }
        }
    }
}

/// Sets the elements that are dropped to 0 and divides the others by `kept`. `data` begins at
/// element `first` of a tensor.
pub fn dropout<T: Float>(isa: Isa, rule: &Dropout, first: u64, kept: T, data: &mut [T]) {
    dispatch(isa, Drop { rule: *rule, first, kept, data });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // The test vectors of Random123, the paper's library.
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let cases: [([u32; 4], [u32; 2], [u32; 4]); 3] = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (pi, [0xa409_3822, 0x299f_31d0], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter, key), expected);
        }
    }

    #[test]
    fn every_instruction_set_and_every_split_drops_the_same() {
        let rule = Dropout::new(0.3, -5, 7, 1 << 40);
        for len in (0..70).chain([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]) {
            // The counter's low word overflows within the elements.
            let first = (1 << 34) - 16;
            let given: Vec<f32> = (0..len).map(|index| index as f32 + 1.0).collect();
            let mut expected = given.clone();
            for (x, place) in expected.iter_mut().zip(first..) {
                let counter = place / 4;
                let words = philox([counter as u32, (counter >> 32) as u32, 0, 1 << 8], rule.key);
                let is_kept = f64::from(words[(place % 4) as usize]) / 4_294_967_296.0 >= f64::from(0.3f32);
                *x = if is_kept { *x / 0.7 } else { 0.0 };
            }
            for isa in Isa::available() {
                let mut whole = given.clone();
                dropout(isa, &rule, first, 0.7, &mut whole);
                assert_eq!(whole, expected, "{isa:?}, {len} elements");
                let mut split = given.clone();
                let middle = len / 2;
                let (low, high) = split.split_at_mut(middle);
                dropout(isa, &rule, first, 0.7, low);
                dropout(isa, &rule, first + middle as u64, 0.7, high);
                assert_eq!(split, expected, "{isa:?}, {len} elements in two parts");
            }
        }
    }
}
