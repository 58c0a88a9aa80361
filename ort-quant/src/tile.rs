//! Grids of blocks in adjacent columns, one column per vector lane.
//!
//! A method starts with the grid that covers the range of a block. The others try more grids and
//! keep the one of least error, so that none is worse than the first by its own measure.

#![allow(clippy::indexing_slicing, reason = "an index is below TILE, the length of all lanes")]

use crate::grid::{BlockMethod, BlockQuantizer, Scheme, extend_ranges, limit, round_code};
use crate::weight::Weight;

/// The columns of a tile. Its rows are a few cache lines each, and a block of it stays in L1.
pub(crate) const TILE: usize = 64;

/// A number for each column of a tile.
pub(crate) type Lanes = [f32; TILE];

/// The grids of one block in each column of a tile.
pub(crate) struct TileGrids<T> {
    /// The scales as they are stored.
    pub(crate) stored: [T; TILE],
    scale: Lanes,
    /// The reciprocals of the scales; 0 for a scale of 0.
    inverse: Lanes,
    /// The zero points as they are stored: integers, or numbers of type `T`.
    pub(crate) zero: Lanes,
}

impl<T: Weight> TileGrids<T> {
    /// The grids for the rows of a block. `importance` says how much an error in each row counts;
    /// the same for all if it is empty. The squared error alone heeds it.
    pub(crate) fn of(scheme: &Scheme, values: &[Lanes], importance: &[f32]) -> TileGrids<T> {
        let Scheme { blocks, method } = scheme;
        let (mut low, mut high) = ([f32::INFINITY; TILE], [f32::NEG_INFINITY; TILE]);
        for row in values {
            extend_ranges(row, &mut low, &mut high);
        }
        let search = Search { blocks, values, importance, low, high };
        match method {
            BlockMethod::MinMax => search.part(1.0),
            BlockMethod::KQuant => search.k_quant(),
            BlockMethod::HalfQuadratic if !blocks.is_symmetric => search.half_quadratic(),
            // A symmetric block has no zero point to optimize.
            BlockMethod::SquaredError | BlockMethod::HalfQuadratic => search.squared_error(),
        }
    }

    fn zeros() -> TileGrids<T> {
        let zeros = [0.0; TILE];
        TileGrids { stored: [T::narrow(0.0); TILE], scale: zeros, inverse: zeros, zero: zeros }
    }

    /// Sets the grid of a column. The scale is rounded to the type in which it is stored.
    fn set(&mut self, lane: usize, scale: f32, zero: f32) {
        self.stored[lane] = T::narrow(scale);
        let stored = self.stored[lane].wide();
        self.scale[lane] = stored;
        self.inverse[lane] = if stored == 0.0 { 0.0 } else { 1.0 / stored };
        self.zero[lane] = zero;
    }

    /// The code of a value. It stays a number, because conversions take long.
    #[inline]
    fn code(&self, lane: usize, largest: f32, value: f32) -> f32 {
        round_code(limit(value * self.inverse[lane] + self.zero[lane], 0.0, largest))
    }

    /// What a code stands for.
    #[inline]
    fn value(&self, lane: usize, code: f32) -> f32 {
        (code - self.zero[lane]) * self.scale[lane]
    }

    /// The codes of a row.
    #[inline]
    pub(crate) fn encode(&self, largest: f32, values: &Lanes, codes: &mut [u8; TILE]) {
        for lane in 0..TILE {
            codes[lane] = self.code(lane, largest, values[lane]) as i32 as u8;
        }
    }

    /// What the codes of a row stand for.
    #[inline]
    pub(crate) fn decode(&self, codes: &[u8; TILE]) -> Lanes {
        let mut values = [0.0; TILE];
        for lane in 0..TILE {
            values[lane] = self.value(lane, f32::from(codes[lane]));
        }
        values
    }

    /// The codes of a row, and what they lack to its values.
    #[inline]
    pub(crate) fn round(&self, largest: f32, values: &Lanes, codes: &mut [u8; TILE]) -> Lanes {
        self.encode(largest, values, codes);
        let mut errors = *values;
        subtract(&mut errors, 1.0, &self.decode(codes));
        errors
    }

    /// The sum of the weighted squared errors of each column.
    fn errors(&self, largest: f32, values: &[Lanes], weigh: impl Fn(usize, &Lanes) -> Lanes) -> Lanes {
        let mut errors = [0.0; TILE];
        for (index, row) in values.iter().enumerate() {
            let weights = weigh(index, row);
            for lane in 0..TILE {
                let code = self.code(lane, largest, row[lane]);
                let difference = self.value(lane, code) - row[lane];
                errors[lane] += weights[lane] * (difference * difference);
            }
        }
        errors
    }

    /// The sum of the absolute errors of each column.
    fn absolute_errors(&self, largest: f32, values: &[Lanes]) -> Lanes {
        let mut errors = [0.0; TILE];
        for row in values {
            for lane in 0..TILE {
                let code = self.code(lane, largest, row[lane]);
                errors[lane] += (self.value(lane, code) - row[lane]).abs();
            }
        }
        errors
    }

    /// Takes the grids of columns whose error is below the least so far.
    fn take_better(&mut self, other: &TileGrids<T>, errors: &Lanes, least: &mut Lanes) {
        for lane in 0..TILE {
            if errors[lane] < least[lane] {
                least[lane] = errors[lane];
                self.set(lane, other.scale[lane], other.zero[lane]);
            }
        }
    }
}

/// Subtracts a multiple of a row from another.
#[inline]
pub(crate) fn subtract(row: &mut Lanes, factor: f32, other: &Lanes) {
    for lane in 0..TILE {
        row[lane] -= factor * other[lane];
    }
}

/// The search for the grids of a block.
struct Search<'v> {
    blocks: &'v BlockQuantizer,
    values: &'v [Lanes],
    importance: &'v [f32],
    low: Lanes,
    high: Lanes,
}

/// What a weighted least-squares fit of a column's values to its codes needs: sums of the weights,
/// and of their products with the code, its square, the value, and code and value.
#[derive(Clone, Copy, Default)]
struct FitSums {
    weights: f32,
    codes: f32,
    squares: f32,
    values: f32,
    products: f32,
}

/// The parameters of half-quadratic quantization, as published: the norm, the weight of the
/// auxiliary error, its growth in each round, and the rounds.
const NORM: f64 = 0.7;
const FIRST_BETA: f64 = 10.0;
const BETA_GROWTH: f64 = 1.01;
const ROUNDS: usize = 20;

impl Search<'_> {
    fn largest(&self) -> f32 {
        f32::from(self.blocks.bits.largest())
    }

    /// The grids of a share of the ranges.
    fn part<T: Weight>(&self, share: f32) -> TileGrids<T> {
        let mut grids = TileGrids::zeros();
        for lane in 0..TILE {
            let grid = self.blocks.grid::<T>(self.low[lane] * share, self.high[lane] * share);
            grids.set(lane, grid.scale.wide(), f32::from(grid.zero_point));
        }
        grids
    }

    /// The least squared error among parts and multiples of the ranges, from 0.6 to 1.1. The range
    /// itself wins ties.
    fn squared_error<T: Weight>(&self) -> TileGrids<T> {
        let weigh = |row: usize, _: &Lanes| [self.importance.get(row).copied().unwrap_or(1.0); TILE];
        let errors = |grids: &TileGrids<T>| grids.errors(self.largest(), self.values, weigh);
        let mut best = self.part(1.0);
        let mut least = errors(&best);
        for share in (30_u8..=55).map(|step| f32::from(step) * 0.02) {
            let part = self.part(share);
            best.take_better(&part, &errors(&part), &mut least);
        }
        best
    }

    /// The k-quants of llama.cpp: codes for several widths of a step, each with the scale and the
    /// offset that fit them best by weighted least squares. Large values weigh more.
    fn k_quant<T: Weight>(&self) -> TileGrids<T> {
        let mut squares = [0.0; TILE];
        for row in self.values {
            squares.iter_mut().zip(row).for_each(|(sum, value)| *sum += value * value);
        }
        let count = self.values.len().max(1) as f32;
        let roots = squares.map(|sum: f32| (sum / count).sqrt());
        let weigh = |_: usize, row: &Lanes| {
            let mut weights = roots;
            weights.iter_mut().zip(row).for_each(|(weight, value)| *weight += value.abs());
            weights
        };
        let mut best = self.part(1.0);
        let mut least = best.errors(self.largest(), self.values, weigh);
        for step in -10_i8..=10 {
            let fitted = self.fitted(&self.fit_sums(f32::from(step) * 0.1, weigh));
            let errors = fitted.errors(self.largest(), self.values, weigh);
            best.take_better(&fitted, &errors, &mut least);
        }
        best
    }

    /// The sums for the codes of ranges that are divided into `extra` more steps.
    fn fit_sums(&self, extra: f32, weigh: impl Fn(usize, &Lanes) -> Lanes) -> [FitSums; TILE] {
        let (largest, middle) = (self.largest(), f32::from(self.blocks.bits.middle()));
        let (mut inverse, mut offset) = ([0.0; TILE], [middle; TILE]);
        for lane in 0..TILE {
            let (low, high) = (self.low[lane].min(0.0), self.high[lane].max(0.0));
            // As in `BlockQuantizer::grid`: the extreme of a symmetric block has its least code.
            let extreme = if high > -low { high } else { low };
            let (steps, width) = match self.blocks.is_symmetric {
                true => (-(middle + extra), extreme),
                false => (largest + extra, high - low),
            };
            inverse[lane] = if width == 0.0 { 0.0 } else { steps / width };
            if !self.blocks.is_symmetric {
                offset[lane] = -low * inverse[lane];
            }
        }
        let mut sums = [FitSums::default(); TILE];
        for (index, row) in self.values.iter().enumerate() {
            let weights = weigh(index, row);
            for lane in 0..TILE {
                let (value, weight) = (row[lane], weights[lane]);
                let steps = limit(value * inverse[lane] + offset[lane], 0.0, largest);
                let code = round_code(steps);
                let sums = &mut sums[lane];
                sums.weights += weight;
                sums.codes += weight * code;
                sums.squares += weight * code * code;
                sums.values += weight * value;
                sums.products += weight * code * value;
            }
        }
        sums
    }

    /// The grids that fit codes best. A column whose codes are all equal has scale 0.
    fn fitted<T: Weight>(&self, sums: &[FitSums; TILE]) -> TileGrids<T> {
        let (largest, middle) = (self.largest(), f32::from(self.blocks.bits.middle()));
        let mut grids = TileGrids::zeros();
        for (lane, FitSums { weights, codes, squares, values, products }) in sums.iter().enumerate() {
            let mut zero = middle;
            if !self.blocks.is_symmetric {
                let determinant = weights * squares - codes * codes;
                let scale = (weights * products - codes * values) / determinant;
                let offset = (squares * values - codes * products) / determinant;
                let is_sound = determinant > 0.0 && scale > 0.0;
                if !is_sound {
                    continue;
                }
                zero = round_code(limit(-offset / scale, 0.0, largest));
            }
            // The best scale for the zero point as it is stored.
            let signal = products - zero * values;
            let energy = squares - 2.0 * zero * codes + zero * zero * weights;
            if energy > 0.0 {
                grids.set(lane, signal / energy, zero);
            }
        }
        grids
    }

    /// Half-quadratic quantization: the zero point that minimizes a norm below 1 of the errors,
    /// which hardly counts outliers, by alternating between the errors and the zero point.
    fn half_quadratic<T: Weight>(&self) -> TileGrids<T> {
        let largest = self.largest();
        let mut best = self.part(1.0);
        let mut least = best.absolute_errors(largest, self.values);
        let mut grids = TileGrids::zeros();
        for lane in 0..TILE {
            let width = self.high[lane] - self.low[lane];
            if width > 0.0 {
                let scale = T::narrow(width / largest).wide();
                let zero = if scale == 0.0 { 0.0 } else { (-self.low[lane] / scale).round_ties_even() };
                grids.set(lane, scale, T::narrow(zero).wide());
            } else {
                // All values are equal: code 1 is that value.
                grids.set(lane, self.low[lane], 0.0);
            }
        }
        let (mut beta, mut last) = (FIRST_BETA, [f32::INFINITY; TILE]);
        for _ in 0..ROUNDS {
            let errors = grids.absolute_errors(largest, self.values);
            best.take_better(&grids, &errors, &mut least);
            let zeros = self.next_zeros(&grids, beta);
            let mut is_done = true;
            for lane in 0..TILE {
                // A column whose error did not fall keeps its zero point from now on.
                if errors[lane] < last[lane] {
                    grids.zero[lane] = T::narrow(zeros[lane]).wide();
                    is_done = false;
                }
            }
            if is_done {
                break;
            }
            last = errors;
            beta *= BETA_GROWTH;
        }
        best
    }

    /// The mean of the zero points that would make each value exact, apart from the error that the
    /// norm lets it have.
    fn next_zeros<T: Weight>(&self, grids: &TileGrids<T>, beta: f64) -> Lanes {
        let largest = self.largest();
        // Smaller errors shrink to 0.
        let least = beta.powf(-1.0 / (2.0 - NORM)) as f32;
        let mut sums = [0.0; TILE];
        for row in self.values {
            for lane in 0..TILE {
                let code = grids.code(lane, largest, row[lane]);
                let error = row[lane] - grids.value(lane, code);
                let mut target = row[lane];
                if error.abs() > least {
                    let magnitude = f64::from(error.abs());
                    let kept = magnitude - magnitude.powf(NORM - 1.0) / beta;
                    target -= (kept as f32).copysign(error);
                }
                sums[lane] += code - target * grids.inverse[lane];
            }
        }
        let count = self.values.len().max(1) as f32;
        sums.map(|sum: f32| sum / count)
    }
}
