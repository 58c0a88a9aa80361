//! The loop that measures the peak FLOP/s of a core.

use std::hint::black_box;

use super::{Isa, Simd, SimdOp, dispatch};

/// The number of independent accumulators. A latency of 4 cycles on 2 FMA units needs at least 8,
/// and 16 registers must also hold the two operands.
const SUMS: usize = 12;

/// Runs `12 * rounds` multiply-adds of vectors in registers, and returns the number of
/// floating-point operations: two in each lane.
pub fn multiply_adds(isa: Isa, rounds: usize) -> f64 {
    dispatch(isa, MultiplyAdds { rounds })
}

struct MultiplyAdds {
    rounds: usize,
}

impl SimdOp for MultiplyAdds {
    /// The number of floating-point operations.
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f64 {
        // `black_box` keeps the compiler from folding the loop.
        let (factor, term) = (simd.splat(black_box(0.999)), simd.splat(black_box(0.001)));
        let mut sums = [simd.splat(black_box(1.0)); SUMS];
        for _ in 0..self.rounds {
            // The sums do not depend on each other, so their multiply-adds overlap.
            for sum in &mut sums {
                *sum = simd.mul_add(*sum, factor, term);
            }
        }
        // Reading every sum keeps the compiler from dropping some of them.
        let mut all = simd.splat(0.0);
        for sum in sums {
            all = simd.add(all, sum);
        }
        black_box(simd.horizontal_sum(all));
        (2 * self.rounds * SUMS * S::LANES) as f64
    }
}
