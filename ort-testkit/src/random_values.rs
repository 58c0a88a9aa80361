//! Deterministic pseudo-random numbers for unit tests.

/// Returns `len` numbers between -1 and 1, the same for the same seed.
pub fn random_values(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // The high bits of a linear congruential generator are its best.
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}
