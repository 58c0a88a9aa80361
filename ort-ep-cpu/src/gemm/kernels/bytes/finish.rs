//! What happens to a tile of sums: zero points taken off, then stored as they are, as numbers or as
//! codes.

use crate::simd::Simd;
use crate::simd::bytes::{ByteLanes, Lanes, Numbers};

/// Columns of a tile that lie side by side in the result too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    /// The first column, counted from that of the tile.
    pub(super) first: usize,
    pub(super) len: usize,
    /// Its place in a row of the result.
    pub(super) to: usize,
}

/// What multiplies the sums: one number, or one for each row or column, from those of the tile on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Factors {
    One(f32),
    Rows(*const f32),
    Columns(*const f32),
}

/// Where the results of a tile go, from its first row on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Output {
    Sums(*mut i32),
    /// `sum * factor`, and what is added for each column, and what is there where `add`.
    Numbers {
        to: *mut f32,
        factors: Factors,
        bias: *const f32,
        add: bool,
    },
    /// `round(clamp(sum * factor, least, greatest)) + zero`.
    Codes {
        to: *mut u8,
        factors: Factors,
        zero: i32,
        least: f32,
        greatest: f32,
    },
}

/// What one call works on. Null pointers stand for terms that are absent; others point to those of
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
    /// Products of a number for the row and one for the column that are added.
    pub(super) outer: [(*const i32, *const i32); 2],
    pub(super) output: Output,
    /// From a row of the result to the next.
    pub(super) row_stride: usize,
}

/// A finishing function of some instruction set.
pub(super) type FinishFunction = unsafe fn(&Finish<'_>);

/// # Safety
///
/// Every pointer is valid for the rows and columns that the call names, `sums` for a vector beyond,
/// and the CPU has the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn finish<L: ByteLanes>(lanes: L, call: &Finish<'_>) {
    let has_outer = call.outer.iter().any(|(rows, _)| !rows.is_null());
    // The common cases have loops of their own, without a question for each vector.
    // SAFETY: passed on.
    unsafe {
        match (call.output, has_outer) {
            (Output::Sums(_), _) | (_, true) => rows::<L, true>(lanes, call),
            (Output::Codes { factors: Factors::Rows(factors), .. }, false) if call.column_terms.is_null() => {
                codes_of_rows(lanes, call, factors);
            }
            (Output::Codes { .. } | Output::Numbers { .. }, false) => rows::<L, false>(lanes, call),
        }
    }
}

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
                // SAFETY: passed on.
                unsafe { finish_vector::<L, OUTER>(lanes, call, row, place) };
                at += count;
            }
        }
    }
}

/// Codes with a factor for each row, and terms for rows only.
///
/// # Safety
///
/// As [`finish`].
#[inline(always)]
unsafe fn codes_of_rows<L: ByteLanes>(lanes: L, call: &Finish<'_>, factors: *const f32) {
    let Output::Codes { to, zero, least, greatest, .. } = call.output else { return };
    let simd = lanes.base();
    let (zero, least, greatest) = (simd.splat_i32(zero), simd.splat(least), simd.splat(greatest));
    for row in 0..call.rows {
        // SAFETY: the caller vouches for the pointers.
        let (term, factor, sums, to) = unsafe {
            let term = if call.row_terms.is_null() { 0 } else { *call.row_terms.add(row) };
            let (sums, to) = (call.sums.add(row * call.sums_row), to.add(row * call.row_stride));
            (simd.splat_i32(term), simd.splat(*factors.add(row)), sums, to)
        };
        for run in call.runs {
            let whole = run.len - run.len % L::Base::LANES;
            // SAFETY: the caller vouches for the result.
            unsafe {
                for at in (0..whole).step_by(L::Base::LANES) {
                    let code = code(lanes, sums.add(run.first + at), [term, zero], [factor, least, greatest]);
                    lanes.store_low_bytes_ptr(to.add(run.to + at), L::Base::LANES, code);
                }
                if whole < run.len {
                    let code =
                        code(lanes, sums.add(run.first + whole), [term, zero], [factor, least, greatest]);
                    lanes.store_low_bytes_ptr(to.add(run.to + whole), run.len - whole, code);
                }
            }
        }
    }
}

/// `round(clamp((sums + term) * factor, least, greatest)) + zero` of a vector of sums.
///
/// # Safety
///
/// `sums` is valid for a vector, and the CPU has the instructions of `L`.
#[inline(always)]
unsafe fn code<L: ByteLanes>(
    lanes: L,
    sums: *const i32,
    [term, zero]: [Lanes<L>; 2],
    [factor, least, greatest]: [Numbers<L>; 3],
) -> Lanes<L> {
    let simd = lanes.base();
    // SAFETY: the caller vouches for the sums.
    let sum = simd.to_bits(unsafe { simd.load_ptr(sums.cast()) });
    let value = simd.mul(simd.to_f32(simd.add_i32(sum, term)), factor);
    let value = simd.min_or_second(simd.max_or_second(value, least), greatest);
    simd.add_i32(simd.to_i32(value), zero)
}

/// The `count` sums of `row` from `column` on, which go to place `to` of the result's row.
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
    // SAFETY: the caller vouches for the pointers.
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
            Output::Numbers { to, factors, bias, add } => {
                let mut value = scaled(lanes, sum, factors, row, [column, count]);
                if !bias.is_null() {
                    value = simd.add(value, load(simd, bias.add(column), count));
                }
                if add {
                    value = simd.add(load(simd, to.add(place), count), value);
                }
                store(simd, to.add(place), count, value);
            }
            Output::Codes { to, factors, zero, least, greatest, .. } => {
                let value = scaled(lanes, sum, factors, row, [column, count]);
                // What is not a number becomes the least code.
                let value = simd.max_or_second(value, simd.splat(least));
                let value = simd.min_or_second(value, simd.splat(greatest));
                let code = simd.add_i32(simd.to_i32(value), simd.splat_i32(zero));
                lanes.store_low_bytes_ptr(to.add(place), count, code);
            }
        }
    }
}

/// The `count` terms from `column` on.
///
/// # Safety
///
/// As [`finish`].
#[inline(always)]
unsafe fn ints<L: ByteLanes>(lanes: L, from: *const i32, column: usize, count: usize) -> Lanes<L> {
    // SAFETY: passed on.
    unsafe { lanes.base().to_bits(load(lanes.base(), from.wrapping_add(column).cast(), count)) }
}

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
    // SAFETY: the caller vouches for the pointers.
    let factor = unsafe {
        match factors {
            Factors::One(factor) => simd.splat(factor),
            Factors::Rows(rows) => simd.splat(*rows.add(row)),
            Factors::Columns(columns) => load(simd, columns.add(column), count),
        }
    };
    simd.mul(simd.to_f32(sum), factor)
}

/// # Safety
///
/// `from` is valid for `count` values.
#[inline(always)]
unsafe fn load<S: Simd>(simd: S, from: *const f32, count: usize) -> S::F32 {
    // SAFETY: the caller vouches for the values.
    unsafe {
        match count == S::LANES {
            true => simd.load_ptr(from),
            false => simd.load_partial_ptr(from, count, 0.0),
        }
    }
}

/// # Safety
///
/// `to` is valid for `count` values.
#[inline(always)]
unsafe fn store<S: Simd>(simd: S, to: *mut f32, count: usize, value: S::F32) {
    // SAFETY: the caller vouches for the values.
    unsafe {
        match count == S::LANES {
            true => simd.store_ptr(to, value),
            false => simd.store_partial_ptr(to, count, value),
        }
    }
}
