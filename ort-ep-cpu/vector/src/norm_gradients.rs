//! Gradients of normalizations, row by row.
//!
//! These are plain loops that the compiler vectorizes for each instruction set. Sums have the same
//! number of partial sums on all of them, so the results are bit-identical.

use num_traits::Float;

use crate::simd::{Isa, Simd, SimdOp, dispatch};
use ort_cpu_threads::interrupt::{PIECE, pieces, pieces_mut};

/// Partial sums of each reduction.
const LANES: usize = 16;

/// Values that are summed in their own type before the sum goes on in double precision.
const BLOCK: usize = 1024;

/// Returns the sums of `(x - mean)^2`, of `(x - mean) * upstream` and of `upstream`.
///
/// # Panics
/// If the lengths differ.
pub fn deviation_sums<T: Float + Into<f64>>(isa: Isa, mean: T, x: &[T], upstream: &[T]) -> [f64; 3] {
    assert_eq!(x.len(), upstream.len(), "a gradient has its tensor's length");
    let mut sums = [0.0; 3];
    // Blocks bound the error of a sum in the tensor's own type; their results are added in double
    // precision.
    let blocks = pieces(x).flat_map(|piece| piece.chunks(BLOCK));
    for (x, upstream) in blocks.zip(upstream.chunks(BLOCK)) {
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
    type Output = [[T; LANES]; 3];
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Self::Output {
        let ((x, x_rest), (upstream, upstream_rest)) =
            (self.x.as_chunks::<LANES>(), self.upstream.as_chunks::<LANES>());
        let [mut squares, mut products, mut level] = [[T::zero(); LANES]; 3];
        let mut add = |lane: usize, x: T, upstream: T| {
            let deviation = x - self.mean;
            squares[lane] = squares[lane] + deviation * deviation;
            products[lane] = products[lane] + deviation * upstream;
            level[lane] = level[lane] + upstream;
        };
        for (x, upstream) in x.iter().zip(upstream) {
            // A fixed number of partial sums on every instruction set, so that all yield the same
            // bits.
            for lane in 0..LANES {
                add(lane, x[lane], upstream[lane]);
            }
        }
        for (lane, (x, upstream)) in x_rest.iter().zip(upstream_rest).enumerate() {
            add(lane, *x, *upstream);
        }
        [squares, products, level]
    }
}

/// Computes `to = (upstream - level - (x - mean) * slope) * factor`. `of_row` returns
/// `[mean, level, slope, factor]` of a row of `length`. Without `upstream`, `to` holds the upstream
/// gradient at first.
///
/// # Panics
/// If the lengths differ.
pub fn spread<T: Float>(
    isa: Isa,
    of_row: impl Fn(usize) -> [T; 4],
    length: usize,
    x: &[T],
    (upstream, to): (Option<&[T]>, &mut [T]),
) {
    let lengths = [x.len(), upstream.map_or(to.len(), <[T]>::len)];
    assert!(lengths == [to.len(); 2], "a gradient has its tensor's length");
    dispatch(isa, Spread { of_row, length: length.max(1), x, upstream, to });
}

struct Spread<'a, F, T> {
    of_row: F,
    length: usize,
    x: &'a [T],
    upstream: Option<&'a [T]>,
    to: &'a mut [T],
}

impl<F: Fn(usize) -> [T; 4], T: Float> SimdOp for Spread<'_, F, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        // One dispatch serves all rows, because a row may be only a few values long.
        let rows = self.to.chunks_exact_mut(self.length).zip(self.x.chunks_exact(self.length));
        for (row, (to, x)) in rows.enumerate() {
            let [mean, level, slope, factor] = (self.of_row)(row);
            let spread = |upstream: T, x: T| (upstream - level - (x - mean) * slope) * factor;
            match self.upstream {
                Some(upstream) => {
                    let upstream = &upstream[row * self.length..][..self.length];
                    let pieces = pieces_mut(to).zip(x.chunks(PIECE)).zip(upstream.chunks(PIECE));
                    for ((to, x), upstream) in pieces {
                        let all = to.iter_mut().zip(x).zip(upstream);
                        all.for_each(|((to, &x), &upstream)| *to = spread(upstream, x));
                    }
                }
                None => {
                    for (to, x) in pieces_mut(to).zip(x.chunks(PIECE)) {
                        to.iter_mut().zip(x).for_each(|(to, &x)| *to = spread(*to, x));
                    }
                }
            }
        }
    }
}
