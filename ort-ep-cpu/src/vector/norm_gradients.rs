//! The gradient of a normalization, row by row.
//!
//! Plain loops that the compiler vectorises for each instruction set. Sums have as many parts on all of them, so that the bits are
//! the same.

use num_traits::Float;

use crate::simd::{Isa, Simd, SimdOp, dispatch};

/// Parts of a sum.
const LANES: usize = 16;

/// Values whose sum is taken in their own type.
const BLOCK: usize = 1024;

/// The sums of `(x - mean)^2` and of `(x - mean) * upstream`.
///
/// # Panics
/// If the lengths differ.
pub fn deviation_sums<T: Float + Into<f64>>(isa: Isa, mean: T, x: &[T], upstream: &[T]) -> [f64; 2] {
    assert_eq!(x.len(), upstream.len(), "a gradient has its tensor's length");
    let mut sums = [0.0; 2];
    for (x, upstream) in x.chunks(BLOCK).zip(upstream.chunks(BLOCK)) {
        let block = dispatch(isa, Sums { mean, x, upstream });
        for (sum, parts) in sums.iter_mut().zip(block) {
            *sum += parts.into_iter().map(Into::<f64>::into).sum::<f64>();
        }
    }
    sums
}

struct Sums<'a, T> {
    mean: T,
    x: &'a [T],
    upstream: &'a [T],
}

impl<T: Float> SimdOp for Sums<'_, T> {
    type Output = [[T; LANES]; 2];
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Self::Output {
        let ((x, x_rest), (upstream, upstream_rest)) =
            (self.x.as_chunks::<LANES>(), self.upstream.as_chunks::<LANES>());
        let [mut squares, mut products] = [[T::zero(); LANES]; 2];
        let mut add = |lane: usize, x: T, upstream: T| {
            let deviation = x - self.mean;
            squares[lane] = squares[lane] + deviation * deviation;
            products[lane] = products[lane] + deviation * upstream;
        };
        for (x, upstream) in x.iter().zip(upstream) {
            for lane in 0..LANES {
                add(lane, x[lane], upstream[lane]);
            }
        }
        for (lane, (x, upstream)) in x_rest.iter().zip(upstream_rest).enumerate() {
            add(lane, *x, *upstream);
        }
        [squares, products]
    }
}

/// `to = (upstream - level - (x - mean) * slope) * factor`.
///
/// # Panics
/// If the lengths differ.
pub fn spread<T: Float>(isa: Isa, numbers: [T; 4], x: &[T], upstream: &[T], to: &mut [T]) {
    assert!([x.len(), upstream.len()] == [to.len(); 2], "a gradient has its tensor's length");
    dispatch(isa, Spread { numbers, x, upstream, to });
}

struct Spread<'a, T> {
    numbers: [T; 4],
    x: &'a [T],
    upstream: &'a [T],
    to: &'a mut [T],
}

impl<T: Float> SimdOp for Spread<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let [mean, level, slope, factor] = self.numbers;
        for ((to, &x), &upstream) in self.to.iter_mut().zip(self.x).zip(self.upstream) {
            *to = (upstream - level - (x - mean) * slope) * factor;
        }
    }
}
