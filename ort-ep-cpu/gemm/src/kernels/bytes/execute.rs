//! The 8-bit GEMM loop over panels and tiles, and its split over threads.

use std::ops::Range;

use super::super::RegisterActivation;
use super::finish::{Factors as TileFactors, Finish, Output, Run};
use super::tile::{Requantization, Tile};
use super::{ByteKernel, MAX_LANES, MAX_ROWS, MAX_WIDTH};
use crate::cpu::ROWS_PER_READ;
use crate::epilogue::in_registers;
use crate::integer::{Addend, ByteColumns, ByteRows, Factors, IntegerGemm, Target, are_small};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::Pool;
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::Isa;

/// Multiply-adds that are worth a thread of their own: waking one costs some microseconds.
const WORTH_A_THREAD: usize = 1 << 20;

/// Tasks per thread, to balance threads of unequal speed.
const TASKS_PER_THREAD: usize = 4;

/// Units of `interrupt::spend` for a row of a tile. Rows of the result are far apart, and the first
/// write to a huge page waits until all of it is zeroed.
const UNITS_OF_A_ROW: usize = 256;

/// Tiles of one call, so that deadlines are checked often enough.
const MOST_TILES: usize = 64;

/// The start of a result, for threads that write disjoint blocks of it.
#[derive(Clone, Copy)]
enum Start {
    Sums(*mut i32),
    /// The result, its addend or null, and the activations in registers and on finished tiles.
    Numbers {
        to: *mut f32,
        addend: *const f32,
        activation: RegisterActivation,
        late: Option<Unary>,
    },
    Quantized {
        to: *mut u8,
        zero: i32,
        signed: bool,
        least: f32,
        greatest: f32,
    },
}

struct Job<'a> {
    kernel: &'static ByteKernel,
    gemm: &'a IntegerGemm<'a>,
    factors: Factors<'a>,
    row_bias: &'a [f32],
    column_bias: &'a [f32],
    start: Start,
    /// Panels. The last one may be wider than the others by one vector.
    panels: usize,
    /// Whether all factors are less than 1.
    is_small: bool,
}

// SAFETY: the tasks of a job write disjoint elements of the result, because `execute` gives each
// its own tiles and panels. Everything else is only read.
unsafe impl Sync for Job<'_> {}

/// Computes the GEMM. `IntegerGemm::run` has checked that operands, terms and target hold what the
/// shape requires.
pub(crate) fn execute(
    kernel: &'static ByteKernel,
    threads: usize,
    gemm: &IntegerGemm<'_>,
    target: Target<'_>,
) {
    let (rows, columns) = (gemm.lhs.rows, gemm.rhs.columns);
    if rows == 0 || columns == 0 {
        return;
    }
    let (start, factors, [row_bias, column_bias]) = match target {
        Target::Accumulators(sums) => (Start::Sums(sums.as_mut_ptr()), Factors::One(1.0), [&[][..]; 2]),
        Target::Numbers { values, scaling } => {
            let to = values.as_mut_ptr();
            let addend = match scaling.addend {
                Addend::None => std::ptr::null(),
                Addend::Old => to.cast_const(),
                Addend::Matrix(addend) => addend.as_ptr(),
            };
            let activation = scaling.activation.map_or(Some(RegisterActivation::None), in_registers);
            let late = if activation.is_none() { scaling.activation } else { None };
            let activation = activation.unwrap_or(RegisterActivation::None);
            let start = Start::Numbers { to, addend, activation, late };
            (start, scaling.factors, [scaling.row_bias, scaling.column_bias])
        }
        Target::Quantized { values, factors, zero, signed } => {
            let (least, greatest) = if signed { (-128, 127) } else { (0, 255) };
            // Clamping before the zero point is added keeps the result in the range of bytes.
            let [least, greatest] = [least - zero, greatest - zero].map(|bound| bound as f32);
            let start = Start::Quantized { to: values.as_mut_ptr(), zero, signed, least, greatest };
            (start, factors, [&[][..]; 2])
        }
    };
    let panels = columns.div_ceil(gemm.rhs.width);
    let is_small = match factors {
        Factors::One(factor) => are_small(&[factor]),
        Factors::Rows(factors) => are_small(&factors[..rows]),
        Factors::Columns(factors) => are_small(&factors[..columns]),
    };
    let mut job = Job { kernel, gemm, factors, row_bias, column_bias, start, panels, is_small };
    // The last vector then belongs to the panel before it.
    job.panels -= usize::from(job.has_wide_end());
    let height = kernel.height(rows, 1);
    let (tiles, panels) = (rows.div_ceil(height), job.panels);
    let work = rows.max(ROWS_PER_READ).saturating_mul(columns).saturating_mul(gemm.lhs.groups * 4);
    let threads = threads.min(work / WORTH_A_THREAD + 1).max(1);
    let [row_parts, column_parts] = match threads {
        1 => [1, 1],
        _ => parts(threads * TASKS_PER_THREAD, [tiles, panels], gemm),
    };
    let part = |index: usize, parts: usize, count: usize| index * count / parts..(index + 1) * count / parts;
    Pool::global().run(threads, row_parts * column_parts, &|task| {
        let tiles = part(task / column_parts, row_parts, tiles);
        let panels = part(task % column_parts, column_parts, panels);
        // SAFETY: tasks have different tiles or panels, so they write different elements.
        // `IntegerGemm::run` checked that all are inside the slices.
        unsafe { job.run(tiles.start * height..(tiles.end * height).min(rows), panels) };
    });
}

/// Returns the number of parts that the tiles of rows and the panels of columns are cut into. If B
/// is the smaller operand, each thread reads all of it and has its own rows of A and of the result.
/// Then no cache line of either is shared.
fn parts(wanted: usize, [tiles, panels]: [usize; 2], gemm: &IntegerGemm<'_>) -> [usize; 2] {
    let (rows, columns, steps) = (gemm.lhs.rows, gemm.rhs.columns, 4 * gemm.lhs.groups);
    let is_rhs_smaller = columns.saturating_mul(steps) <= rows.saturating_mul(steps + columns);
    if !gemm.signed_lhs && is_rhs_smaller && tiles >= wanted {
        return [wanted, 1];
    }
    let columns = wanted.min(panels);
    [wanted.div_ceil(columns).min(tiles), columns]
}

/// Computes the sums of the first `count` columns of `rhs`, whose bytes are signed, over all k
/// steps for which `ones` holds a one.
pub(crate) fn column_sums(kernel: &ByteKernel, rhs: &ByteColumns<'_>, ones: &ByteRows<'_>, sums: &mut [i32]) {
    for (panel, to) in sums.chunks_mut(rhs.width).enumerate() {
        let mut wide = [0_i32; MAX_WIDTH];
        let vectors = to.len().div_ceil(kernel.lanes);
        let call = tile_call(ones, rhs, (0, 1), panel, &mut wide);
        // SAFETY: `ByteColumns::check` and `ByteRows::new` checked both operands against their
        // slices, and `wide` holds a row of the widest tile.
        unsafe { (kernel.unsigned_rows[vectors - 1][0])(&call) };
        to.copy_from_slice(&wide[..to.len()]);
    }
}

/// Returns the arguments for the tile of `count` rows from `row` on, at a panel.
fn tile_call(
    lhs: &ByteRows<'_>,
    rhs: &ByteColumns<'_>,
    (row, count): (usize, usize),
    panel: usize,
    sums: &mut [i32],
) -> Tile {
    let mut a = [lhs.bytes.as_ptr(); MAX_ROWS];
    lhs.starts(row).zip(a.iter_mut().take(count)).for_each(|(start, to)| *to = to.wrapping_add(start));
    Tile {
        a,
        b: rhs.bytes.as_ptr().wrapping_add(panel * rhs.panel),
        b_step: rhs.step,
        starts: rhs.starts.as_ptr(),
        runs: rhs.starts.len(),
        groups: rhs.groups,
        sums: sums.as_mut_ptr(),
        sums_row: MAX_WIDTH,
    }
}

/// Returns a pointer to the values from `first` on, or null if the list is empty.
fn behind<T>(values: &[T], first: usize) -> *const T {
    if values.is_empty() { std::ptr::null() } else { values.as_ptr().wrapping_add(first) }
}

impl Job<'_> {
    /// Computes these rows of these panels.
    ///
    /// # Safety
    ///
    /// No other thread writes these rows and the columns of these panels, and `IntegerGemm::run`
    /// checked the job's operands and target.
    unsafe fn run(&self, rows: Range<usize>, panels: Range<usize>) {
        let (gemm, kernel, width) = (self.gemm, self.kernel, self.gemm.rhs.width);
        let (functions, requantize) = match gemm.signed_lhs {
            true => (kernel.signed_rows, kernel.requantize_signed),
            false => (kernel.unsigned_rows, kernel.requantize_unsigned),
        };
        // One spare vector, because `finish` loads partial vectors whole.
        let mut sums = [0_i32; MAX_ROWS * MAX_WIDTH + MAX_LANES];
        let mut of_columns = [0_i32; MAX_WIDTH];
        let mut runs = [Run::default(); MAX_WIDTH];
        for panel in panels {
            let first = panel * width;
            let rest = gemm.rhs.columns - first;
            let columns = if panel + 1 == self.panels { rest } else { rest.min(width) };
            let vectors = columns.div_ceil(kernel.lanes);
            let count = cut(gemm.strip, first..first + columns, &mut runs);
            if let Some((_, ones)) = &gemm.terms.window_sums {
                let call = tile_call(ones, &gemm.rhs, (0, 1), panel, &mut of_columns);
                // SAFETY: `IntegerGemm::run` checked the operands, and `ByteKernel::of` chose the
                // kernel for this CPU.
                unsafe { (kernel.signed_rows[vectors - 1][0])(&call) };
            }
            let height = kernel.height(rows.len(), vectors);
            let mut row = rows.start;
            while row < rows.end {
                let count_of_rows = height.min(rows.end - row);
                let call = tile_call(&gemm.lhs, &gemm.rhs, (row, count_of_rows), panel, &mut sums);
                let requantize =
                    requantize.get(vectors - 1).and_then(|requantize| requantize.get(count_of_rows - 1));
                let requantization = self.requantization([row, first], vectors, &runs[..count]);
                let units = count_of_rows * (UNITS_OF_A_ROW + vectors * gemm.lhs.groups / 4);
                // Requantizing in registers saves the round trip through `sums`.
                if let (Some(requantize), Some(one)) = (requantize, requantization) {
                    let tiles = self.tiles_at_once([row, rows.end], height);
                    spend(tiles * units);
                    let all = Requantization { tiles, a_step: height * gemm.lhs.stride, ..one };
                    // SAFETY: `IntegerGemm::run` checked the operands, `ByteKernel::of` chose the
                    // kernel for this CPU, and the caller guarantees that no other thread writes
                    // these tiles.
                    unsafe { requantize(&call, &all) };
                    row += tiles * height;
                    continue;
                }
                spend(units);
                let window_sums = match &gemm.terms.window_sums {
                    Some((rows, _)) => (behind(rows, row), of_columns.as_ptr()),
                    None => (std::ptr::null(), std::ptr::null()),
                };
                // SAFETY: as above, for this tile.
                unsafe {
                    (functions[vectors - 1][count_of_rows - 1])(&call);
                    (kernel.finish)(&self.finish(
                        [row, first],
                        count_of_rows,
                        (&sums, &runs[..count]),
                        window_sums,
                    ));
                    self.activate([row, count_of_rows], &runs[..count]);
                }
                row += height;
            }
        }
    }

    /// Returns the tiles of `height` rows that one call requantizes, from `row` on: a number of
    /// whole ones if all rows of A are at one stride and the filters are the columns.
    fn tiles_at_once(&self, [row, end]: [usize; 2], height: usize) -> usize {
        let repeats = !self.gemm.signed_lhs && self.gemm.lhs.is_one_strip();
        if repeats { ((end - row) / height).clamp(1, MOST_TILES) } else { 1 }
    }

    /// Applies an activation that the epilogue cannot to a finished tile, which is still in cache.
    ///
    /// # Safety
    ///
    /// As [`Job::run`], for these rows and the columns of `runs`.
    unsafe fn activate(&self, [row, rows]: [usize; 2], runs: &[Run]) {
        let Start::Numbers { to, late: Some(function), .. } = self.start else { return };
        for row in row..row + rows {
            for run in runs {
                let to = to.wrapping_add(row * self.gemm.row_stride + run.to);
                // SAFETY: the caller guarantees that the result holds these columns of the row, and
                // that no other thread uses them.
                let values = unsafe { std::slice::from_raw_parts_mut(to, run.len) };
                unary_in_place(Isa::current(), function, values);
            }
        }
    }

    /// Whether the last vector of columns, alone in a panel, joins the panel before it: a tile of a
    /// single vector mostly loads. This needs columns that continue after a panel, as those of
    /// windows do.
    fn has_wide_end(&self) -> bool {
        let (kernel, rhs) = (self.kernel, &self.gemm.rhs);
        let last = rhs.columns % rhs.width;
        let is_alone = self.panels > 1 && (1..=kernel.lanes).contains(&last);
        let follows = self.gemm.signed_lhs && rhs.panel == 4 * rhs.width;
        let has_room = kernel.signed_rows.len() > rhs.width / kernel.lanes;
        is_alone && follows && has_room
    }

    /// Returns how the accumulators from this row and column on are requantized in registers.
    /// Returns `None` unless the only terms are one term and one factor per filter.
    fn requantization<'r>(
        &self,
        [row, column]: [usize; 2],
        vectors: usize,
        runs: &'r [Run],
    ) -> Option<Requantization<'r>> {
        let (gemm, terms) = (self.gemm, &self.gemm.terms);
        let is_plain = terms.outer.iter().all(|(rows, _)| rows.is_empty()) && terms.window_sums.is_none();
        let Start::Quantized { to, zero, signed, greatest, .. } = self.start else { return None };
        let (terms, factors) = match (self.factors, gemm.signed_lhs) {
            (Factors::Rows(factors), true) if terms.columns.is_empty() && !terms.rows.is_empty() => {
                (behind(terms.rows, row), behind(factors, row))
            }
            (Factors::Columns(factors), false) if terms.rows.is_empty() => {
                let end = column + vectors * self.kernel.lanes;
                // The kernel loads whole vectors of terms and factors, so their padding must exist.
                let is_whole = terms.columns.len() >= end && factors.len() >= end;
                is_whole.then(|| (behind(terms.columns, column), behind(factors, column)))?
            }
            _ => return None,
        };
        let to = to.wrapping_add(row * gemm.row_stride);
        is_plain.then_some(Requantization {
            terms,
            factors,
            greatest,
            is_small: self.is_small,
            zero,
            signed,
            runs,
            to,
            to_row: gemm.row_stride,
            tiles: 1,
            a_step: 0,
        })
    }

    fn finish<'r>(
        &self,
        [row, column]: [usize; 2],
        rows: usize,
        (sums, runs): (&[i32], &'r [Run]),
        window_sums: (*const i32, *const i32),
    ) -> Finish<'r> {
        let terms = &self.gemm.terms;
        let place = row * self.gemm.row_stride;
        let factors = match self.factors {
            Factors::One(factor) => TileFactors::One(factor),
            Factors::Rows(factors) => TileFactors::Rows(behind(factors, row)),
            Factors::Columns(factors) => TileFactors::Columns(behind(factors, column)),
        };
        let output = match self.start {
            Start::Sums(to) => Output::Sums(to.wrapping_add(place)),
            Start::Numbers { to, addend, activation, .. } => Output::Numbers {
                to: to.wrapping_add(place),
                factors,
                row_bias: behind(self.row_bias, row),
                column_bias: behind(self.column_bias, column),
                addend: if addend.is_null() { addend } else { addend.wrapping_add(place) },
                activation,
            },
            Start::Quantized { to, zero, least, greatest, .. } => {
                Output::Quantized { to: to.wrapping_add(place), factors, zero, least, greatest }
            }
        };
        let outer = |(rows, columns): (&[i32], &[i32])| (behind(rows, row), behind(columns, column));
        let first = if window_sums.0.is_null() { outer(terms.outer[0]) } else { window_sums };
        Finish {
            sums: sums.as_ptr(),
            sums_row: MAX_WIDTH,
            rows,
            runs,
            row_terms: behind(terms.rows, row),
            column_terms: behind(terms.columns, column),
            outer: [first, outer(terms.outer[1])],
            output,
            row_stride: self.gemm.row_stride,
        }
    }
}

/// Cuts columns into runs that are contiguous in the result. Of each strip of `strip[0]` columns,
/// the first `strip[1]` are stored. Returns the number of runs, at most one per column.
fn cut([wide, wanted]: [usize; 2], columns: Range<usize>, runs: &mut [Run; MAX_WIDTH]) -> usize {
    let (mut at, mut count) = (columns.start, 0);
    while at < columns.end {
        let (strip, place) = (at / wide, at % wide);
        let end = (strip * wide + wanted).min(columns.end);
        if at < end {
            runs[count] = Run { first: at - columns.start, len: end - at, to: strip * wanted + place };
            count += 1;
        }
        at = (strip + 1) * wide;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_hold_the_wanted_columns_once() {
        for (strip, columns) in
            [([5, 3], 0..48), ([5, 5], 7..40), ([1, 1], 0..48), ([60, 50], 48..96), ([3, 1], 2..50)]
        {
            let mut runs = [Run::default(); MAX_WIDTH];
            let count = cut(strip, columns.clone(), &mut runs);
            let found: Vec<[usize; 2]> = runs[..count]
                .iter()
                .flat_map(|run| (0..run.len).map(|at| [run.first + at, run.to + at]))
                .collect();
            let [wide, wanted] = strip;
            let expected: Vec<[usize; 2]> = columns
                .clone()
                .filter(|column| column % wide < wanted)
                .map(|column| [column - columns.start, column / wide * wanted + column % wide])
                .collect();
            assert_eq!(found, expected, "{strip:?} {columns:?}");
        }
    }
}
