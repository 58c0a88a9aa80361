//! Interruptible fast Fourier transforms of any length.
//!
//! The crate rustfft transforms a line in one call, which takes seconds for millions of points.
//! Lines longer than [`DIRECT`] become many short transforms with a deadline check before each.
//! Composite lengths use the [four-step algorithm](https://doi.org/10.1007/BF00162341) (Bailey,
//! 1990), primes use [Bluestein's](https://doi.org/10.1109/TAU.1970.1162132) convolution with a
//! chirp (1970).

use std::sync::Arc;

use bytemuck::zeroed_vec;
use num_complex::Complex64;
use rustfft::{Fft, FftDirection, FftPlanner};

use ort_cpu_threads::interrupt::{fill, spend, spending};

/// The longest line that rustfft transforms in one call: about a millisecond of work.
const DIRECT: usize = 1 << 16;

/// Columns that are gathered at a time: two cache lines of each row.
const COLUMNS: usize = 8;

/// No machine holds a longer line, so its divisors are not searched.
const LONGEST: usize = 1 << 40;

/// Work units per point of a direct transform, and per point that is moved.
const UNITS_OF_A_TRANSFORM: usize = 16;
const UNITS_OF_A_MOVE: usize = 4;

/// The algorithm for lines of one length.
enum Strategy {
    Direct,
    /// The line is a row-major matrix.
    FourStep {
        rows: usize,
        columns: usize,
    },
    /// A cyclic convolution of this length.
    Bluestein {
        convolution: usize,
    },
}

impl Strategy {
    fn of(length: usize) -> Strategy {
        if length <= DIRECT {
            return Strategy::Direct;
        }
        // The divisor closest to the square root makes both transforms short.
        match (2..=length.isqrt()).rev().find(|&rows| length.is_multiple_of(rows)) {
            Some(rows) => Strategy::FourStep { rows, columns: length / rows },
            None => Strategy::Bluestein { convolution: smooth_from(2 * length - 1) },
        }
    }
}

/// Returns the smallest product of powers of 2 and 3 that is at least `least`.
fn smooth_from(least: usize) -> usize {
    let powers_of_3 = std::iter::successors(Some(1), |power| Some(3 * power));
    let products = powers_of_3
        .take_while(|&power| power < 3 * least)
        .map(|power| power * least.div_ceil(power).next_power_of_two());
    products.min().unwrap_or(least)
}

/// Whether a number has only small prime factors.
fn is_smooth(mut length: usize) -> bool {
    for factor in [2, 3, 5, 7, 11, 13] {
        while length > 0 && length.is_multiple_of(factor) {
            length /= factor;
        }
    }
    length <= 1
}

/// Upper bounds, in complex numbers, of what a plan holds and of what each thread needs besides its
/// line.
#[derive(Clone, Copy)]
pub(super) struct Footprint {
    pub(super) plan: usize,
    pub(super) scratch: usize,
}

impl Footprint {
    /// Bounds the plan of a length without building it.
    pub(super) fn of(length: usize) -> Footprint {
        if length > LONGEST {
            return Footprint { plan: usize::MAX, scratch: usize::MAX };
        }
        match Strategy::of(length) {
            Strategy::Direct if is_smooth(length) => Footprint { plan: 3 * length, scratch: length },
            // rustfft uses Bluestein's algorithm for large prime factors, too.
            Strategy::Direct => Footprint { plan: 10 * length, scratch: 7 * length },
            Strategy::FourStep { rows, columns } => {
                let (column, row) = (Footprint::of(rows), Footprint::of(columns));
                Footprint {
                    plan: Twiddles::count(length) + column.plan + row.plan,
                    scratch: length + COLUMNS * rows + column.scratch.max(row.scratch),
                }
            }
            Strategy::Bluestein { convolution } => {
                let inner = Footprint::of(convolution);
                Footprint { plan: length + convolution + inner.plan, scratch: convolution + inner.scratch }
            }
        }
    }
}

/// Returns exp(∓2πi · `index` / `length`), a root of unity. The exponent of the forward transform
/// is negative.
fn root(index: usize, length: usize, direction: FftDirection) -> Complex64 {
    let angle = std::f64::consts::TAU * (index as f64 / length as f64);
    Complex64::cis(match direction {
        FftDirection::Forward => -angle,
        FftDirection::Inverse => angle,
    })
}

/// All roots of unity of a length, each the product of entries of two short tables.
struct Twiddles {
    /// The low bits of an index select from `low`, the others from `high`.
    bits: u32,
    low: Vec<Complex64>,
    high: Vec<Complex64>,
}

impl Twiddles {
    fn bits(length: usize) -> u32 {
        // Half of the bits each, so that both tables are about the square root of the length.
        length.ilog2() / 2
    }

    /// Returns the number of entries of both tables.
    fn count(length: usize) -> usize {
        let bits = Twiddles::bits(length);
        (1 << bits) + (length >> bits) + 1
    }

    fn new(length: usize, direction: FftDirection) -> Twiddles {
        let bits = Twiddles::bits(length);
        let roots = |count: usize, step: usize| {
            (0..count).map(|index| root(index * step, length, direction)).collect()
        };
        Twiddles { bits, low: roots(1 << bits, 1), high: roots((length >> bits) + 1, 1 << bits) }
    }

    fn at(&self, index: usize) -> Complex64 {
        self.low[index & ((1 << self.bits) - 1)] * self.high[index >> self.bits]
    }
}

/// An unnormalized in-place transform for lines of one length.
pub(super) enum FftPlan {
    Direct(Arc<dyn Fft<f64>>),
    FourStep(Box<FourStep>),
    Bluestein(Box<Bluestein>),
}

impl FftPlan {
    pub(super) fn plan(length: usize, direction: FftDirection) -> FftPlan {
        FftPlan::plan_with(&mut FftPlanner::new(), length, direction)
    }

    fn plan_with(planner: &mut FftPlanner<f64>, length: usize, direction: FftDirection) -> FftPlan {
        match Strategy::of(length) {
            Strategy::Direct => FftPlan::Direct(planner.plan_fft(length, direction)),
            Strategy::FourStep { rows, columns } => FftPlan::FourStep(Box::new(FourStep {
                column: FftPlan::plan_with(planner, rows, direction),
                row: FftPlan::plan_with(planner, columns, direction),
                twiddles: Twiddles::new(length, direction),
                rows,
                columns,
            })),
            Strategy::Bluestein { convolution } => {
                let inner = FftPlan::plan_with(planner, convolution, FftDirection::Forward);
                FftPlan::Bluestein(Box::new(Bluestein::new(inner, length, convolution, direction)))
            }
        }
    }

    /// Returns the scratch elements that [`process`](FftPlan::process) needs besides the line.
    pub(super) fn scratch_len(&self) -> usize {
        match self {
            FftPlan::Direct(fft) => fft.get_inplace_scratch_len(),
            FftPlan::FourStep(plan) => {
                let inner = plan.column.scratch_len().max(plan.row.scratch_len());
                plan.rows * plan.columns + COLUMNS * plan.rows + inner
            }
            FftPlan::Bluestein(plan) => plan.filter.len() + plan.inner.scratch_len(),
        }
    }

    /// Transforms a line of the plan's length. `scratch` has at least
    /// [`scratch_len`](FftPlan::scratch_len) elements, of any values.
    pub(super) fn process(&self, line: &mut [Complex64], scratch: &mut [Complex64]) {
        match self {
            FftPlan::Direct(fft) => {
                spend(UNITS_OF_A_TRANSFORM * line.len());
                fft.process_with_scratch(line, scratch);
            }
            FftPlan::FourStep(plan) => plan.process(line, scratch),
            FftPlan::Bluestein(plan) => plan.process(line, scratch),
        }
    }
}

/// Four-step transform of a line as a matrix: transform its columns, multiply by twiddle factors,
/// transform its rows, and transpose.
pub(super) struct FourStep {
    column: FftPlan,
    row: FftPlan,
    twiddles: Twiddles,
    rows: usize,
    columns: usize,
}

impl FourStep {
    fn process(&self, line: &mut [Complex64], scratch: &mut [Complex64]) {
        let (matrix, scratch) = scratch.split_at_mut(line.len());
        let (block, scratch) = scratch.split_at_mut(COLUMNS * self.rows);
        for first in (0..self.columns).step_by(COLUMNS) {
            let width = COLUMNS.min(self.columns - first);
            self.transform_columns(line, matrix, &mut block[..width * self.rows], first, scratch);
        }
        // Rows in groups as well, so that the transpose writes whole cache lines.
        for (group, rows) in matrix.chunks_mut(COLUMNS * self.columns).enumerate() {
            for row in rows.chunks_exact_mut(self.columns) {
                self.row.process(row, scratch);
            }
            self.put_rows(rows, line, COLUMNS * group);
        }
    }

    /// Transforms the columns from `first` on that fit into `block`, where each is contiguous.
    fn transform_columns(
        &self,
        line: &[Complex64],
        matrix: &mut [Complex64],
        block: &mut [Complex64],
        first: usize,
        scratch: &mut [Complex64],
    ) {
        spend(UNITS_OF_A_MOVE * block.len());
        for (place, row) in line.chunks_exact(self.columns).enumerate() {
            for (column, value) in block.chunks_exact_mut(self.rows).zip(&row[first..]) {
                column[place] = *value;
            }
        }
        for column in block.chunks_exact_mut(self.rows) {
            self.column.process(column, scratch);
        }
        for (place, row) in matrix.chunks_exact_mut(self.columns).enumerate() {
            let columns = block.chunks_exact(self.rows).zip(&mut row[first..]);
            for (index, (column, value)) in columns.enumerate() {
                // The product of both indices is below the length, so the tables have the root.
                *value = column[place] * self.twiddles.at((first + index) * place);
            }
        }
    }

    /// Transposes transformed rows, which start at row `first` of the matrix, into the result.
    fn put_rows(&self, rows: &[Complex64], line: &mut [Complex64], first: usize) {
        spend(UNITS_OF_A_MOVE * rows.len());
        for (place, to) in line.chunks_exact_mut(self.rows).enumerate() {
            for (row, value) in rows.chunks_exact(self.columns).zip(&mut to[first..]) {
                *value = row[place];
            }
        }
    }
}

/// A transform as the convolution of the line with a chirp, exp(∓πi · k²/n).
pub(super) struct Bluestein {
    /// The forward transform of the convolution's length.
    inner: FftPlan,
    chirp: Vec<Complex64>,
    /// The transform of the conjugate chirp, divided by the convolution's length.
    filter: Vec<Complex64>,
}

impl Bluestein {
    fn new(inner: FftPlan, length: usize, convolution: usize, direction: FftDirection) -> Bluestein {
        // The chirp has a period of twice the length. Reducing the square first keeps the angle
        // accurate.
        let square = |place: usize| (place as u128 * place as u128 % (2 * length) as u128) as usize;
        let places = spending(UNITS_OF_A_TRANSFORM, 0..length);
        let chirp: Vec<_> = places.map(|place| root(square(place), 2 * length, direction)).collect();
        let mut filter = zeroed_vec::<Complex64>(convolution);
        for (place, value) in spending(UNITS_OF_A_MOVE, chirp.iter().enumerate()) {
            let value = value.conj() / convolution as f64;
            filter[place] = value;
            // Negative indices of a cyclic convolution wrap around to the end.
            if place > 0 {
                filter[convolution - place] = value;
            }
        }
        inner.process(&mut filter, &mut zeroed_vec(inner.scratch_len()));
        Bluestein { inner, chirp, filter }
    }

    fn process(&self, line: &mut [Complex64], scratch: &mut [Complex64]) {
        let (work, scratch) = scratch.split_at_mut(self.filter.len());
        let (head, tail) = work.split_at_mut(line.len());
        let values = line.iter().zip(&self.chirp);
        for (to, (value, chirp)) in spending(UNITS_OF_A_MOVE, head.iter_mut().zip(values)) {
            *to = value * chirp;
        }
        fill(tail, Complex64::ZERO);
        self.inner.process(work, scratch);
        // The inverse transform is the conjugate of the forward transform of the conjugate.
        for (value, filter) in spending(UNITS_OF_A_MOVE, work.iter_mut().zip(&self.filter)) {
            *value = (*value * filter).conj();
        }
        self.inner.process(work, scratch);
        let results = work.iter().zip(&self.chirp);
        for (to, (value, chirp)) in spending(UNITS_OF_A_MOVE, line.iter_mut().zip(results)) {
            *to = value.conj() * chirp;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks impulses, whose spectrum is a sum of roots of unity.
    fn check(length: usize, direction: FftDirection) {
        let impulses = [(0, 1.0), (1, -0.5), (length / 3, 2.0), (length - 1, 0.25)];
        let mut line = vec![Complex64::ZERO; length];
        for (place, value) in impulses {
            line[place] = Complex64::new(value, -value / 2.0);
        }
        let plan = FftPlan::plan(length, direction);
        assert!(plan.scratch_len() <= Footprint::of(length).scratch, "scratch of {length}");
        // Scratch may hold any values.
        let mut scratch = vec![Complex64::new(f64::NAN, 1.0); plan.scratch_len()];
        plan.process(&mut line, &mut scratch);
        for (frequency, found) in line.iter().enumerate() {
            let terms = impulses.map(|(place, value)| {
                let index = (place as u128 * frequency as u128 % length as u128) as usize;
                Complex64::new(value, -value / 2.0) * root(index, length, direction)
            });
            let expected: Complex64 = terms.iter().sum();
            let error = (found - expected).norm();
            assert!(error < 1e-12, "length {length}, frequency {frequency}: {found}, expected {expected}");
        }
    }

    #[test]
    fn long_lines_have_the_spectrum_of_impulses() {
        // A power of two, a power of three, a square, a prime, twice a prime, and a product of two
        // primes.
        for length in [1 << 17, 177_147, 263 * 263, 65_537, 2 * 65_537, 257 * 269] {
            check(length, FftDirection::Forward);
            check(length, FftDirection::Inverse);
        }
    }

    #[test]
    fn convolutions_are_as_short_as_powers_of_2_and_3_allow() {
        for (least, expected) in [(1, 1), (5, 6), (7, 8), (9, 9), (129, 144), (131_073, 139_968)] {
            assert_eq!(smooth_from(least), expected, "{least}");
        }
    }
}
