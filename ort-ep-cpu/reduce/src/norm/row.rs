//! Row primitives of normalizations, by element type.
//!
//! `f32` uses SIMD. All other types compute element by element in `f64`.

use half::{bf16, f16};
use ort_core::ep::Unary;

use crate::reduce::rows::{self, ExpMinus, Plus, Same, Square, SquareMinus};
use ort_cpu_kernel::number::{Number, Real};
use ort_cpu_threads::interrupt::{PIECE, pieces, pieces_mut};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_threads::thread_scratch::with_thread_scratch;
use ort_cpu_vector::norm;
use ort_cpu_vector::simd::Isa;

/// The fewest elements that are worth a thread.
const GRAIN: usize = 1 << 13;

/// What the normalizations of a row share.
#[derive(Clone, Copy)]
pub(crate) struct RowNorm<'a, T> {
    /// The term that keeps the divisor from 0.
    pub(crate) epsilon: f64,
    /// The factor of each normalized value.
    pub(crate) scale: &'a [T],
    /// The term that is added last; none for 0.
    pub(crate) bias: Option<&'a [T]>,
}

impl RowNorm<'_, f32> {
    /// Returns the normalization in vectors.
    fn vectors(&self, centers: bool) -> norm::RowNorm<'_> {
        norm::RowNorm { centers, epsilon: self.epsilon as f32, scale: Some(self.scale), bias: self.bias }
    }
}

impl<T: Real> RowNorm<'_, T> {
    /// Computes `(x - mean) * factor * scale[i] + bias[i]`.
    fn apply(&self, [mean, factor]: [f64; 2], from: &[T], to: &mut [T]) {
        for (piece, (from, to)) in from.chunks(PIECE).zip(pieces_mut(to)).enumerate() {
            let scale = &self.scale[piece * PIECE..];
            let bias = self.bias.map(|bias| &bias[piece * PIECE..]);
            for (index, ((&x, y), scale)) in from.iter().zip(to).zip(scale).enumerate() {
                let bias = bias.map_or(0.0, |bias| bias[index].to_f64());
                *y = T::from_f64((x.to_f64() - mean) * factor * scale.to_f64() + bias);
            }
        }
    }
}

/// An element type whose rows can be normalized.
pub(crate) trait Row: Real {
    /// Returns the sum.
    fn sum(_isa: Isa, row: &[Self]) -> f64 {
        pieces(row).flatten().map(|x| x.to_f64()).sum()
    }

    /// Returns the sum of the squares.
    fn sum_squares(_isa: Isa, row: &[Self]) -> f64 {
        pieces(row).flatten().map(|x| x.to_f64() * x.to_f64()).sum()
    }

    /// Returns the sum of the squared differences from `mean`.
    fn sum_squares_around(_isa: Isa, mean: f64, row: &[Self]) -> f64 {
        pieces(row).flatten().map(|x| (x.to_f64() - mean) * (x.to_f64() - mean)).sum()
    }

    /// Returns `log(sum(e^x))`.
    fn log_sum_exp(_isa: Isa, row: &[Self]) -> f64 {
        let greatest = pieces(row).flatten().fold(f64::NEG_INFINITY, |a, x| a.max(x.to_f64()));
        pieces(row).flatten().map(|x| (x.to_f64() - greatest).exp()).sum::<f64>().ln() + greatest
    }

    /// Computes `(x - mean) * factor + bias`.
    fn affine(_isa: Isa, [mean, factor, bias]: [f64; 3], from: &[Self], to: &mut [Self]) {
        for (from, to) in from.chunks(PIECE).zip(pieces_mut(to)) {
            for (&x, y) in from.iter().zip(to) {
                *y = Self::from_f64((x.to_f64() - mean) * factor + bias);
            }
        }
    }

    /// Computes `(x - mean) / sqrt(variance + epsilon) * scale[i] + bias[i]`.
    fn layer_norm(isa: Isa, norm: RowNorm<'_, Self>, from: &[Self], to: &mut [Self]) {
        let (mean, variance) = Self::moments(isa, from);
        norm.apply([mean, 1.0 / (variance + norm.epsilon).sqrt()], from, to);
    }

    /// Computes `x / sqrt(mean(x * x) + epsilon) * scale[i] + bias[i]`.
    fn rms_norm(isa: Isa, norm: RowNorm<'_, Self>, from: &[Self], to: &mut [Self]) {
        let mean_square = Self::sum_squares(isa, from) / from.len() as f64;
        norm.apply([0.0, 1.0 / (mean_square + norm.epsilon).sqrt()], from, to);
    }

    /// Returns the mean and the population's variance.
    fn moments(isa: Isa, row: &[Self]) -> (f64, f64) {
        let mean = Self::sum(isa, row) / row.len() as f64;
        // Two passes: the difference of the mean square and the squared mean cancels if the mean is
        // large.
        (mean, Self::sum_squares_around(isa, mean, row) / row.len() as f64)
    }
}

impl Row for f16 {}
impl Row for bf16 {}
impl Row for f64 {}

impl Row for f32 {
    fn sum(isa: Isa, row: &[f32]) -> f64 {
        rows::combine(isa, Same(), Plus, row)
    }

    fn sum_squares(isa: Isa, row: &[f32]) -> f64 {
        rows::combine(isa, Square(), Plus, row)
    }

    fn sum_squares_around(isa: Isa, mean: f64, row: &[f32]) -> f64 {
        // Rounding the mean adds only the square of the rounding error to the variance.
        rows::combine(isa, SquareMinus(mean as f32), Plus, row)
    }

    fn log_sum_exp(isa: Isa, row: &[f32]) -> f64 {
        let greatest = rows::greatest(isa, row);
        // The maximum keeps the powers in range; it is added back to the logarithm.
        rows::combine(isa, ExpMinus(greatest), Plus, row).ln() + f64::from(greatest)
    }

    fn affine(isa: Isa, numbers: [f64; 3], from: &[f32], to: &mut [f32]) {
        rows::affine(isa, numbers.map(|x| x as f32), from, to);
    }

    fn layer_norm(isa: Isa, norm: RowNorm<'_, f32>, from: &[f32], to: &mut [f32]) {
        norm.vectors(true).apply(isa, from, to);
    }

    fn rms_norm(isa: Isa, norm: RowNorm<'_, f32>, from: &[f32], to: &mut [f32]) {
        norm.vectors(false).apply(isa, from, to);
    }
}

/// Calls `task` with the index, the input and the output of each row. If they share memory, the
/// input is a copy of the row.
pub(crate) fn for_each_row<T: Number>(
    threads: usize,
    data: Unary<'_, T>,
    len: usize,
    task: impl Fn(usize, &[T], &mut [T]) + Sync,
) {
    let (from, to) = match data {
        Unary::Apart(from, to) => (Some(from), to),
        Unary::InPlace(to) => (None, to),
    };
    if len == 0 {
        return;
    }
    for_each_row_chunk_mut(threads, to, len, (GRAIN / len).max(1), |first, rows| {
        let rows = rows.chunks_exact_mut(len).enumerate();
        let Some(from) = from else {
            // The thread keeps the copy's memory for its next call.
            with_thread_scratch(|copy: &mut Vec<T>| {
                for (index, to) in rows {
                    copy.clear();
                    copy.reserve(len);
                    pieces(to).for_each(|piece| copy.extend_from_slice(piece));
                    task(first + index, copy, to);
                }
            });
            return;
        };
        for (index, to) in rows {
            let row = first + index;
            task(row, &from[row * len..][..len], to);
        }
    });
}
