//! The 8-bit epilogue: subtracts zero points from the accumulators of a tile, then stores them as
//! `i32`, as `f32`, or requantized.

use super::super::RegisterActivation;
use super::super::tile::end;
use ort_cpu_vector::simd::Simd;
use ort_cpu_vector::simd::bytes::{ByteLanes, Lanes, Numbers};

/// Columns of a tile that are contiguous in the result too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    /// The first column, relative to the tile.
    pub(super) first: usize,
    pub(super) len: usize,
    /// Its offset in a row of the result.
    pub(super) to: usize,
}

/// The scale of the accumulators: one number, or one per row or column starting at the tile's
/// first.
#[derive(Clone, Copy, Debug)]
pub(super) enum Factors {
    One(f32),
    Rows(*const f32),
    Columns(*const f32),
}

/// The destination of a tile, starting at its first row.
#[derive(Clone, Copy, Debug)]
pub(super) enum Output {
    Sums(*mut i32),
    /// `activation(sum * factor + bias + addend)`. The addend has the places of the result, and may
    /// be its old values.
    Numbers {
        to: *mut f32,
        factors: Factors,
        row_bias: *const f32,
        column_bias: *const f32,
        addend: *const f32,
        activation: RegisterActivation,
    },
    /// Requantized values: `round(clamp(sum * factor, least, greatest)) + zero`.
    Quantized {
        to: *mut u8,
        factors: Factors,
        zero: i32,
        least: f32,
        greatest: f32,
    },
}

/// The arguments of a finishing function. Null pointers mark absent terms; other pointers start at
/// the tile's first row or column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish<'a> {
    pub(super) sums: *const i32,
    pub(super) sums_row: usize,
    pub(super) rows: usize,
    pub(super) runs: &'a [Run],
    /// Added to each row, and to each column.
    pub(super) row_terms: *const i32,
    pub(super) column_terms: *const i32,
    /// Outer products that are added: a number for each row times one for each column.
    pub(super) outer: [(*const i32, *const i32); 2],
    pub(super) output: Output,
    /// Stride from one row of the result to the next.
    pub(super) row_stride: usize,
}

/// A finishing function of some instruction set.
pub(super) type FinishFunction = unsafe fn(&Finish<'_>);

/// Finishes a tile.
///
/// # Safety
///
/// Every pointer is valid for the rows and columns that the call names. `sums` is valid for one
/// more vector, because partial vectors are loaded whole. The CPU has the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn finish<L: ByteLanes>(lanes: L, call: &Finish<'_>) {
    let has_outer = call.outer.iter().any(|(rows, _)| !rows.is_null());
    // The common cases have specialised loops, without branches for each vector.
    // SAFETY: this function has the contract of those it calls.
    unsafe {
        match (call.output, has_outer) {
            (Output::Sums(_), _) | (_, true) => rows::<L, true>(lanes, call),
            (Output::Quantized { factors: Factors::Rows(factors), .. }, false)
                if call.column_terms.is_null() =>
            {
                requantize_rows(lanes, call, factors);
            }
            (Output::Quantized { .. } | Output::Numbers { .. }, false) => rows::<L, false>(lanes, call),
        }
    }
}

/// Finishes row by row and run by run.
///
/// # Safety
///
/// As [`finish`].
#[inline(always)]
unsafe fn rows<L: ByteLanes, const OUTER: bool>(lanes: L, call: &Finish<'_>) {
    for row in 0..call.rows {
        for run in call.runs {
            let mut at = 0;
            while at < run.len {
                let count = (run.len - at).min(L::Base::LANES);
                let place = [run.first + at, run.to + at, count];
                // SAFETY: the caller guarantees the pointers, and `place` is inside the row and the
                // run.
                unsafe { finish_vector::<L, OUTER>(lanes, call, row, place) };
                at += count;
            }
        }
    }
}

/// Requantizes with one factor and one term per row.
///
/// # Safety
///
/// As [`finish`].
#[inline(always)]
unsafe fn requantize_rows<L: ByteLanes>(lanes: L, call: &Finish<'_>, factors: *const f32) {
    let Output::Quantized { to, zero, least, greatest, .. } = call.output else { return };
    let simd = lanes.base();
    let (zero, least, greatest) = (simd.splat_i32(zero), simd.splat(least), simd.splat(greatest));
    for row in 0..call.rows {
        // SAFETY: the caller guarantees a term and a factor for each row.
        let (term, factor, sums, to) = unsafe {
            let term = if call.row_terms.is_null() { 0 } else { *call.row_terms.add(row) };
            let (sums, to) = (call.sums.add(row * call.sums_row), to.add(row * call.row_stride));
            (simd.splat_i32(term), simd.splat(*factors.add(row)), sums, to)
        };
        for run in call.runs {
            let whole = run.len - run.len % L::Base::LANES;
            // SAFETY: the caller guarantees that the result holds the columns of each run.
            unsafe {
                for at in (0..whole).step_by(L::Base::LANES) {
                    let value =
                        requantized(lanes, sums.add(run.first + at), [term, zero], [factor, least, greatest]);
                    lanes.store_low_bytes_ptr(to.add(run.to + at), L::Base::LANES, value);
                }
                if whole < run.len {
                    let value = requantized(
                        lanes,
                        sums.add(run.first + whole),
                        [term, zero],
                        [factor, least, greatest],
                    );
                    lanes.store_low_bytes_ptr(to.add(run.to + whole), run.len - whole, value);
                }
            }
        }
    }
}

/// Requantizes a vector of accumulators:
/// `round(clamp((sums + term) * factor, least, greatest)) + zero`.
///
/// # Safety
///
/// `sums` is valid for a vector, and the CPU has the instructions of `L`.
#[inline(always)]
unsafe fn requantized<L: ByteLanes>(
    lanes: L,
    sums: *const i32,
    [term, zero]: [Lanes<L>; 2],
    [factor, least, greatest]: [Numbers<L>; 3],
) -> Lanes<L> {
    let simd = lanes.base();
    // SAFETY: the caller guarantees a vector of accumulators.
    let sum = simd.to_bits(unsafe { simd.load_ptr(sums.cast()) });
    let value = simd.mul(simd.to_f32(simd.add_i32(sum, term)), factor);
    let value = simd.min_or_second(simd.max_or_second(value, least), greatest);
    simd.add_i32(simd.to_i32(value), zero)
}

/// Finishes the `count` accumulators of `row` from `column` on, which go to offset `to` of the
/// result's row.
///
/// # Safety
///
/// As [`finish`].
#[inline(always)]
unsafe fn finish_vector<L: ByteLanes, const OUTER: bool>(
    lanes: L,
    call: &Finish<'_>,
    row: usize,
    [column, to, count]: [usize; 3],
) {
    let (simd, place) = (lanes.base(), row * call.row_stride + to);
    // SAFETY: the caller guarantees the pointers for this row and these columns.
    unsafe {
        let sums = call.sums.add(row * call.sums_row + column);
        let mut sum = simd.to_bits(simd.load_ptr(sums.cast()));
        if !call.row_terms.is_null() {
            sum = simd.add_i32(sum, simd.splat_i32(*call.row_terms.add(row)));
        }
        if !call.column_terms.is_null() {
            sum = simd.add_i32(sum, ints(lanes, call.column_terms, column, count));
        }
        if OUTER {
            for (rows, columns) in call.outer {
                if !rows.is_null() {
                    sum = simd.add_i32(
                        sum,
                        lanes.mul_i32(simd.splat_i32(*rows.add(row)), ints(lanes, columns, column, count)),
                    );
                }
            }
        }
        match call.output {
            Output::Sums(to) => store(simd, to.add(place).cast(), count, simd.from_bits(sum)),
            Output::Numbers { to, factors, row_bias, column_bias, addend, activation } => {
                let mut value = scaled(lanes, sum, factors, row, [column, count]);
                if !row_bias.is_null() {
                    value = simd.add(value, simd.splat(*row_bias.add(row)));
                }
                if !column_bias.is_null() {
                    value = simd.add(value, load(simd, column_bias.add(column), count));
                }
                if !addend.is_null() {
                    value = simd.add(load(simd, addend.add(place), count), value);
                }
                let mut values = [[value]];
                end(simd, &mut values, activation);
                let [[value]] = values;
                store(simd, to.add(place), count, value);
            }
            Output::Quantized { to, factors, zero, least, greatest, .. } => {
                let value = scaled(lanes, sum, factors, row, [column, count]);
                // `max_or_second` returns `least` for NaN, so NaN becomes the smallest quantized
                // value.
                let value = simd.max_or_second(value, simd.splat(least));
                let value = simd.min_or_second(value, simd.splat(greatest));
                let value = simd.add_i32(simd.to_i32(value), simd.splat_i32(zero));
                lanes.store_low_bytes_ptr(to.add(place), count, value);
            }
        }
    }
}

/// Loads the `count` terms from `column` on.
///
/// # Safety
///
/// As [`finish`].
#[inline(always)]
unsafe fn ints<L: ByteLanes>(lanes: L, from: *const i32, column: usize, count: usize) -> Lanes<L> {
    // SAFETY: the caller guarantees `count` terms from `column` on.
    unsafe { lanes.base().to_bits(load(lanes.base(), from.wrapping_add(column).cast(), count)) }
}

/// Scales accumulators to `f32`.
///
/// # Safety
///
/// As [`finish`].
#[inline(always)]
unsafe fn scaled<L: ByteLanes>(
    lanes: L,
    sum: Lanes<L>,
    factors: Factors,
    row: usize,
    [column, count]: [usize; 2],
) -> <L::Base as Simd>::F32 {
    let simd = lanes.base();
    // SAFETY: the caller guarantees a factor for this row or for these columns.
    let factor = unsafe {
        match factors {
            Factors::One(factor) => simd.splat(factor),
            Factors::Rows(rows) => simd.splat(*rows.add(row)),
            Factors::Columns(columns) => load(simd, columns.add(column), count),
        }
    };
    simd.mul(simd.to_f32(sum), factor)
}

/// Loads a vector or a part of one.
///
/// # Safety
///
/// `from` is valid for `count` values.
#[inline(always)]
unsafe fn load<S: Simd>(simd: S, from: *const f32, count: usize) -> S::F32 {
    // SAFETY: the caller guarantees `count` values.
    unsafe {
        match count == S::LANES {
            true => simd.load_ptr(from),
            false => simd.load_partial_ptr(from, count, 0.0),
        }
    }
}

/// Stores a vector or a part of one.
///
/// # Safety
///
/// `to` is valid for `count` values.
#[inline(always)]
unsafe fn store<S: Simd>(simd: S, to: *mut f32, count: usize, value: S::F32) {
    // SAFETY: the caller guarantees `count` values.
    unsafe {
        match count == S::LANES {
            true => simd.store_ptr(to, value),
            false => simd.store_partial_ptr(to, count, value),
        }
    }
}
