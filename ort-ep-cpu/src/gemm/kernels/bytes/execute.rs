//! The loop over panels and tiles, and its split over threads.

use std::ops::Range;

use super::finish::{Factors as TileFactors, Finish, Output, Run};
use super::tile::{Coding, Tile};
use super::{ByteKernel, MAX_LANES, MAX_ROWS, MAX_WIDTH};
use crate::gemm::integer::{ByteColumns, ByteRows, Factors, IntegerGemm, Target};
use crate::parallel::Pool;

/// Multiplications worth a thread of their own: waking one costs some microseconds.
const WORTH_A_THREAD: usize = 1 << 20;

/// Tasks for each thread, to even out unequal speeds.
const TASKS_PER_THREAD: usize = 4;

/// The start of a result, for threads that write disjoint blocks of it.
#[derive(Clone, Copy)]
enum Start {
    Sums(*mut i32),
    Numbers(*mut f32, bool),
    Codes { to: *mut u8, zero: i32, signed: bool, least: f32, greatest: f32 },
}

struct Job<'a> {
    kernel: &'static ByteKernel,
    gemm: &'a IntegerGemm<'a>,
    factors: Factors<'a>,
    bias: &'a [f32],
    start: Start,
    /// Panels, the last of which may be wider than the others by a vector.
    panels: usize,
}

// SAFETY: the tasks of a job write disjoint elements of the result, see `execute`; all else is only read.
unsafe impl Sync for Job<'_> {}

/// Computes the product. The caller has checked that operands, terms and target hold what the shape says.
pub(in crate::gemm) fn execute(
    kernel: &'static ByteKernel,
    threads: usize,
    gemm: &IntegerGemm<'_>,
    target: Target<'_>,
) {
    let (rows, columns) = (gemm.left.rows, gemm.right.columns);
    if rows == 0 || columns == 0 {
        return;
    }
    let (start, factors, bias) = match target {
        Target::Sums(sums) => (Start::Sums(sums.as_mut_ptr()), Factors::One(1.0), &[][..]),
        Target::Numbers { values, factors, bias, add } => {
            (Start::Numbers(values.as_mut_ptr(), add), factors, bias)
        }
        Target::Codes { codes, factors, zero, signed } => {
            let (least, greatest) = if signed { (-128, 127) } else { (0, 255) };
            let [least, greatest] = [least - zero, greatest - zero].map(|bound| bound as f32);
            (Start::Codes { to: codes.as_mut_ptr(), zero, signed, least, greatest }, factors, &[][..])
        }
    };
    let mut job = Job { kernel, gemm, factors, bias, start, panels: columns.div_ceil(kernel.width()) };
    job.panels -= usize::from(job.has_wide_end());
    let height = kernel.height(rows, 1);
    let (tiles, panels) = (rows.div_ceil(height), job.panels);
    let work = rows.saturating_mul(columns).saturating_mul(gemm.left.groups * 4);
    let threads = threads.min(work / WORTH_A_THREAD + 1).max(1);
    let [row_parts, column_parts] = match threads {
        1 => [1, 1],
        _ => {
            let wanted = threads * TASKS_PER_THREAD;
            let columns = wanted.min(panels);
            [wanted.div_ceil(columns).min(tiles), columns]
        }
    };
    let part = |index: usize, parts: usize, count: usize| index * count / parts..(index + 1) * count / parts;
    Pool::global().run(threads, row_parts * column_parts, &|task| {
        let tiles = part(task / column_parts, row_parts, tiles);
        let panels = part(task % column_parts, column_parts, panels);
        // SAFETY: tasks have different tiles or panels, so they write different elements, and the caller has checked
        // that all lie inside the slices.
        unsafe { job.run(tiles.start * height..(tiles.end * height).min(rows), panels) };
    });
}

/// The sums of the first `count` columns of `right`, whose bytes are signed, over all steps for which `ones` has a one.
pub(in crate::gemm) fn column_sums(
    kernel: &ByteKernel,
    right: &ByteColumns<'_>,
    ones: &ByteRows<'_>,
    sums: &mut [i32],
) {
    for (panel, to) in sums.chunks_mut(kernel.width()).enumerate() {
        let mut wide = [0_i32; MAX_WIDTH];
        let vectors = to.len().div_ceil(kernel.lanes);
        let call = tile_call(ones, right, [0, panel], &mut wide);
        // SAFETY: `right` and `ones` were checked against their slices when they were made.
        unsafe { (kernel.unsigned_rows[vectors - 1])(&call) };
        to.copy_from_slice(&wide[..to.len()]);
    }
}

/// The call for the tile at a row and a panel.
fn tile_call(
    left: &ByteRows<'_>,
    right: &ByteColumns<'_>,
    [row, panel]: [usize; 2],
    sums: &mut [i32],
) -> Tile {
    Tile {
        a: left.bytes.as_ptr().wrapping_add(row * left.stride),
        a_row: left.stride,
        b: right.bytes.as_ptr().wrapping_add(panel * right.panel),
        b_step: right.step,
        offsets: right.offsets.as_ptr(),
        runs: right.offsets.len(),
        groups: right.groups,
        sums: sums.as_mut_ptr(),
        sums_row: MAX_WIDTH,
    }
}

/// The values behind the first ones, or none where the list is empty.
fn behind<T>(values: &[T], first: usize) -> *const T {
    if values.is_empty() { std::ptr::null() } else { values.as_ptr().wrapping_add(first) }
}

impl Job<'_> {
    /// # Safety
    ///
    /// No other thread writes these rows and the columns of these panels, and the product was checked.
    unsafe fn run(&self, rows: Range<usize>, panels: Range<usize>) {
        let (gemm, kernel, width) = (self.gemm, self.kernel, self.kernel.width());
        let functions = if gemm.signed_left { kernel.signed_rows } else { kernel.unsigned_rows };
        let mut sums = [0_i32; MAX_ROWS * MAX_WIDTH + MAX_LANES];
        let mut of_columns = [0_i32; MAX_WIDTH];
        let mut runs = [Run::default(); MAX_WIDTH];
        for panel in panels {
            let first = panel * width;
            let rest = gemm.right.columns - first;
            let columns = if panel + 1 == self.panels { rest } else { rest.min(width) };
            let vectors = columns.div_ceil(kernel.lanes);
            let count = cut(gemm.line, first..first + columns, &mut runs);
            if let Some((_, ones)) = &gemm.terms.window_sums {
                let call = tile_call(ones, &gemm.right, [0, panel], &mut of_columns);
                let functions = kernel.signed_rows;
                // SAFETY: the operands were checked, and the kernel was chosen for this CPU.
                unsafe { (functions[vectors - 1])(&call) };
            }
            let height = kernel.height(rows.len(), vectors);
            for row in rows.clone().step_by(height) {
                let count_of_rows = height.min(rows.end - row);
                let call = tile_call(&gemm.left, &gemm.right, [row, panel], &mut sums);
                let window_sums = match &gemm.terms.window_sums {
                    Some((rows, _)) => (behind(rows, row), of_columns.as_ptr()),
                    None => (std::ptr::null(), std::ptr::null()),
                };
                let coding = self.coding(row, &runs[..count]);
                // SAFETY: the operands were checked, the kernel was chosen for this CPU, and the caller vouches for the
                // result.
                unsafe {
                    let function = (count_of_rows - 1) * kernel.vectors + vectors - 1;
                    let coded = match vectors > kernel.vectors {
                        true => kernel.coded_wide.get(count_of_rows - 1),
                        false => kernel.coded_rows.get(function),
                    };
                    if let (Some(coded), Some(coding)) = (coded, &coding) {
                        coded(&call, coding);
                        continue;
                    }
                    (functions[function])(&call);
                    (kernel.finish)(&self.finish(
                        [row, first],
                        count_of_rows,
                        (&sums, &runs[..count]),
                        window_sums,
                    ));
                }
            }
        }
    }

    /// Whether the last vector of columns, alone in a panel, goes with the panel before: one vector by itself is mostly
    /// loads. Columns that lie on behind a panel are those of windows.
    fn has_wide_end(&self) -> bool {
        let (kernel, right) = (self.kernel, &self.gemm.right);
        let last = right.columns % kernel.width();
        let is_alone = self.panels > 1 && (1..=kernel.lanes).contains(&last);
        is_alone
            && right.panel == 4 * kernel.width()
            && !kernel.coded_wide.is_empty()
            && self.coding(0, &[]).is_some()
    }

    /// How the sums of the rows from `row` on become codes at once, where the product is of this kind.
    fn coding<'r>(&self, row: usize, runs: &'r [Run]) -> Option<Coding<'r>> {
        let (gemm, terms) = (self.gemm, &self.gemm.terms);
        let by_rows = terms.columns.is_empty() && terms.outer.iter().all(|(rows, _)| rows.is_empty());
        let by_rows = by_rows && terms.window_sums.is_none() && !terms.rows.is_empty();
        match (self.start, self.factors) {
            (Start::Codes { to, zero, signed, greatest, .. }, Factors::Rows(factors))
                if gemm.signed_left && by_rows =>
            {
                Some(Coding {
                    terms: behind(terms.rows, row),
                    factors: behind(factors, row),
                    greatest,
                    zero,
                    signed,
                    runs,
                    to: to.wrapping_add(row * gemm.row_stride),
                    to_row: gemm.row_stride,
                })
            }
            _ => None,
        }
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
            Start::Numbers(to, add) => {
                Output::Numbers { to: to.wrapping_add(place), factors, bias: behind(self.bias, column), add }
            }
            Start::Codes { to, zero, least, greatest, .. } => {
                Output::Codes { to: to.wrapping_add(place), factors, zero, least, greatest }
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

/// Cuts columns into runs that lie side by side in the result: of each line of `line[0]` columns, the first `line[1]` are
/// wanted. Returns how many runs there are, at most one for each column.
fn cut([wide, wanted]: [usize; 2], columns: Range<usize>, runs: &mut [Run; MAX_WIDTH]) -> usize {
    let (mut at, mut count) = (columns.start, 0);
    while at < columns.end {
        let (line, place) = (at / wide, at % wide);
        let end = (line * wide + wanted).min(columns.end);
        if at < end {
            runs[count] = Run { first: at - columns.start, len: end - at, to: line * wanted + place };
            count += 1;
        }
        at = (line + 1) * wide;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_hold_the_wanted_columns_once() {
        for (line, columns) in
            [([5, 3], 0..48), ([5, 5], 7..40), ([1, 1], 0..48), ([60, 50], 48..96), ([3, 1], 2..50)]
        {
            let mut runs = [Run::default(); MAX_WIDTH];
            let count = cut(line, columns.clone(), &mut runs);
            let found: Vec<[usize; 2]> = runs[..count]
                .iter()
                .flat_map(|run| (0..run.len).map(|at| [run.first + at, run.to + at]))
                .collect();
            let [wide, wanted] = line;
            let expected: Vec<[usize; 2]> = columns
                .clone()
                .filter(|column| column % wide < wanted)
                .map(|column| [column - columns.start, column / wide * wanted + column % wide])
                .collect();
            assert_eq!(found, expected, "{line:?} {columns:?}");
        }
    }
}
