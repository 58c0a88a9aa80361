//! The ten `Reduce` operators, and `SumTo`.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure, error, for_each_type};
use smallvec::{SmallVec, smallvec};

use super::rows::{
    Combine, ExpDifference, ExpMinus, FoldInto, Greater, Lesser, Magnitude, Plus, SHORT_ROW, Same, Square,
    Times, combine, combine_rows, into_row,
};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::layout::{Layout, count, normalize_axis, offset};
use ort_cpu_kernel::number::{Number, Wide};
use ort_cpu_threads::interrupt::{PIECE, Pace, pieces, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::simd::slices::{Operand, UnaryOp, zip};

/// The fewest elements that are worth a thread.
const GRAIN: usize = 1 << 14;
/// Columns that are reduced at a time.
const TILE: usize = 256;
/// Rows that are summed in `f32` before the sum goes on in `f64`.
const ROWS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fold {
    Sum,
    Mean,
    Max,
    Min,
    Prod,
    L1,
    L2,
    LogSum,
    LogSumExp,
    SumSquare,
}

cpu_kernels![
    KernelDef { op: "ReduceSum", make: |cx| make(cx, Fold::Sum), ..KernelDef::BASE },
    KernelDef { op: "ReduceMean", make: |cx| make(cx, Fold::Mean), ..KernelDef::BASE },
    KernelDef { op: "ReduceMax", make: |cx| make(cx, Fold::Max), ..KernelDef::BASE },
    KernelDef { op: "ReduceMin", make: |cx| make(cx, Fold::Min), ..KernelDef::BASE },
    KernelDef { op: "ReduceProd", make: |cx| make(cx, Fold::Prod), ..KernelDef::BASE },
    KernelDef { op: "ReduceL1", make: |cx| make(cx, Fold::L1), ..KernelDef::BASE },
    KernelDef { op: "ReduceL2", make: |cx| make(cx, Fold::L2), ..KernelDef::BASE },
    KernelDef { op: "ReduceLogSum", make: |cx| make(cx, Fold::LogSum), ..KernelDef::BASE },
    KernelDef { op: "ReduceLogSumExp", make: |cx| make(cx, Fold::LogSumExp), ..KernelDef::BASE },
    KernelDef { op: "ReduceSumSquare", make: |cx| make(cx, Fold::SumSquare), ..KernelDef::BASE },
    KernelDef { domain: RUNTIME, op: "SumTo", make: |_| Ok(Box::new(sum_to)), ..KernelDef::BASE },
];

fn make(cx: &mut CompileCx<'_>, fold: Fold) -> Result<Box<dyn Executable>> {
    let noop = cx.attrs().flag("noop_with_empty_axes")?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| run(cx, fold, noop)))
}

fn run(cx: &mut RunCx<'_>, fold: Fold, noop: bool) -> Result<()> {
    let input = cx.input(0)?;
    let axes: Option<SmallVec<[i64; 6]>> = cx.find_input(1).map(|axes| axes.collect_ints()).transpose()?;
    let axes = axes.unwrap_or_default();
    // Without axes all are reduced, unless the node says that none are.
    let mut mask: SmallVec<[bool; 6]> = smallvec![axes.is_empty() && !noop; input.rank()];
    for axis in axes {
        mask[normalize_axis(axis, input.rank())?] = true;
    }
    fold_axes(cx, fold, &mask)
}

/// Sums over the axes along which the output's shape was broadcast.
fn sum_to(cx: &mut RunCx<'_>) -> Result<()> {
    let from = cx.input(0)?.shape();
    let to = cx.output_shape(0).ok_or_else(|| error!(Fail, "output 0 has no memory ready"))?;
    let lead = from.len().checked_sub(to.len());
    let lead = lead.ok_or_else(|| error!(InvalidArgument, "{from:?} is summed to {to:?}"))?;
    let kept = from[lead..].iter().zip(to).map(|(from, to)| from == to);
    let mask: SmallVec<[bool; 6]> = (0..lead).map(|_| true).chain(kept.map(|kept| !kept)).collect();
    let fits = from[lead..].iter().zip(to).all(|(from, to)| from == to || *to == 1);
    ensure!(fits, InvalidArgument, "shape {to:?} does not broadcast to {from:?}");
    fold_axes(cx, Fold::Sum, &mask)
}

/// Reduces the axes of the mask.
fn fold_axes(cx: &mut RunCx<'_>, fold: Fold, mask: &[bool]) -> Result<()> {
    let input = cx.input(0)?;
    let layout = Layout::new(input.shape(), mask);
    let (threads, dtype) = (cx.threads(), input.dtype());
    let output = cx.output(0)?;
    match dtype {
        // `float` has vector loops. Other types go through their accumulator type.
        DType::F32 => {
            let task = Task { fold, layout: &layout, from: input.as_slice::<f32>()?, threads };
            task.check(output.element_count())?;
            task.run_f32(output.as_mut_slice()?);
            Ok(())
        }
        DType::Bool => {
            let task = Task { fold, layout: &layout, from: input.bytes()?, threads };
            task.check(output.element_count())?;
            let to = output.bytes_mut()?;
            task.run(to);
            // The minimum of no bytes is 255, but the minimum of no booleans is true.
            to.iter_mut().for_each(|byte| *byte = (*byte).min(1));
            Ok(())
        }
        _ => for_each_type!(dtype in NUMERIC, T => {
            let task = Task { fold, layout: &layout, from: input.as_slice::<T>()?, threads };
            task.check(output.element_count())?;
            task.run(output.as_mut_slice()?);
            Ok(())
        }, else => Err(error!(NotImplemented, "reducing {}", dtype.name()))),
    }
}

struct Task<'a, T> {
    fold: Fold,
    layout: &'a Layout,
    from: &'a [T],
    threads: usize,
}

impl<T> Task<'_, T> {
    fn check(&self, outputs: usize) -> Result<()> {
        let columns = if self.layout.inner_reduced { 1 } else { self.layout.inner };
        let expected = count(&self.layout.kept) * columns;
        ensure!(outputs == expected, Fail, "{outputs} outputs for {expected} reductions");
        Ok(())
    }

    /// Returns the fewest outputs that are worth a thread.
    fn grain(&self) -> usize {
        // A thread should get a whole tile of columns.
        let least = if self.layout.inner_reduced { 1 } else { TILE };
        (GRAIN / self.layout.combined().max(1)).max(least)
    }
}

impl<T: Number> Task<'_, T> {
    fn run(&self, to: &mut [T]) {
        let combined = self.layout.combined().min(PIECE);
        for_each_row_chunk_mut(self.threads, to, 1, self.grain(), |first, piece| {
            let pace = Pace::default();
            for (index, result) in piece.iter_mut().enumerate() {
                pace.step(4 * combined);
                *result = self.one(first + index);
            }
        });
    }

    fn start(&self, index: usize) -> usize {
        match self.layout.inner_reduced {
            true => offset(&self.layout.kept, index),
            false => offset(&self.layout.kept, index / self.layout.inner) + index % self.layout.inner,
        }
    }

    fn one(&self, index: usize) -> T {
        let base = self.start(index);
        let run = if self.layout.inner_reduced { self.layout.inner } else { 1 };
        // A single run that is no longer than a piece: the loop alone.
        if self.layout.reduced.is_empty() && run <= PIECE {
            let row = &self.from[base..][..run];
            return self.reduced(|| row.iter().copied());
        }
        self.reduced(|| {
            // Runs are contiguous, so only their starts are computed from the layout.
            let runs = spending(1, 0..self.layout.runs()).map(|run| base + offset(&self.layout.reduced, run));
            runs.flat_map(move |start| pieces(&self.from[start..start + run]).flatten().copied())
        })
    }

    /// Reduces the elements of an iterator, which may be asked for twice.
    fn reduced<I: Iterator<Item = T>>(&self, elements: impl Fn() -> I) -> T {
        // NaN replaces any value, and nothing replaces NaN.
        let greatest = || elements().fold(T::LOWEST, |a, b| if a > b || a.is_nan() { a } else { b });
        let wide = match self.fold {
            Fold::Max => return greatest(),
            Fold::Min => {
                return elements().fold(T::HIGHEST, |a, b| if a < b || a.is_nan() { a } else { b });
            }
            Fold::Sum => sum(elements(), |x| x),
            Fold::Mean => sum(elements(), |x| x).divide(self.layout.combined()),
            Fold::Prod => elements().fold(T::Wide::ONE, |product, x| product.mul(x.widen())),
            Fold::L1 => sum(elements(), T::Wide::abs),
            Fold::L2 => sum(elements(), |x| x.mul(x)).real(f64::sqrt),
            Fold::LogSum => sum(elements(), |x| x).real(f64::ln),
            Fold::SumSquare => sum(elements(), |x| x.mul(x)),
            Fold::LogSumExp => {
                // The maximum keeps the powers in range. An infinite one would yield NaN, as
                // infinity minus infinity.
                let shift = finite_or_zero(greatest().to_f64());
                let sum: f64 = elements().map(|x| (x.to_f64() - shift).exp()).sum();
                return T::from_f64(sum.ln() + shift);
            }
        };
        T::narrow(wide)
    }
}

/// Sums `map(x)` in the accumulator type.
fn sum<T: Number>(elements: impl Iterator<Item = T>, map: impl Fn(T::Wide) -> T::Wide) -> T::Wide {
    elements.fold(T::Wide::ZERO, |sum, x| sum.add(map(x.widen())))
}

fn finite_or_zero(x: f64) -> f64 {
    if x.is_infinite() { 0.0 } else { x }
}

impl Task<'_, f32> {
    fn run_f32(&self, to: &mut [f32]) {
        // A product for each row instead of a division; it is rounded to `f32` after.
        let share = (self.layout.combined() as f64).recip();
        match self.fold {
            Fold::Sum => self.fold(Same(), Plus, |x| x, to),
            Fold::Mean => self.fold(Same(), Plus, |x| x * share, to),
            Fold::Max => self.fold(Same(), Greater, |x| x, to),
            Fold::Min => self.fold(Same(), Lesser, |x| x, to),
            Fold::Prod => self.fold(Same(), Times, |x| x, to),
            Fold::L1 => self.fold(Magnitude(), Plus, |x| x, to),
            Fold::L2 => self.fold(Square(), Plus, f64::sqrt, to),
            Fold::LogSum => self.fold(Same(), Plus, f64::ln, to),
            Fold::SumSquare => self.fold(Square(), Plus, |x| x, to),
            Fold::LogSumExp => self.log_sum_exp(to),
        }
    }

    fn fold<M: UnaryOp + Sync, C: Combine>(
        &self,
        map: M,
        how: C,
        finish: impl Fn(f64) -> f64 + Sync,
        to: &mut [f32],
    ) {
        let isa = Isa::current();
        for_each_row_chunk_mut(self.threads, to, 1, self.grain(), |first, piece| {
            if self.layout.inner_reduced && self.layout.inner <= SHORT_ROW {
                self.for_each_tile(first, piece, |index, tile| {
                    self.fold_rows(isa, (|_| map, how), index, tile);
                    tile.iter_mut().for_each(|x| *x = finish(f64::from(*x)) as f32);
                });
            } else if self.layout.inner_reduced {
                let pace = Pace::default();
                for (index, result) in piece.iter_mut().enumerate() {
                    let runs = self.rows(first + index, self.layout.inner);
                    let total = runs.fold(f64::from(C::IDENTITY), |total, row| {
                        pace.step(row.len());
                        C::exact(total, combine(isa, map, how, row))
                    });
                    *result = finish(total) as f32;
                }
            } else {
                self.for_each_tile(first, piece, |index, tile| {
                    self.fold_tile(isa, (map, how), self.rows(index, tile.len()), tile);
                    tile.iter_mut().for_each(|x| *x = finish(f64::from(*x)) as f32);
                });
            }
        });
    }

    /// Returns the runs that are reduced for the output at `index`, each of `len` elements.
    fn rows(&self, index: usize, len: usize) -> impl Iterator<Item = &[f32]> + Clone {
        let base = self.start(index);
        (0..self.layout.runs()).map(move |run| {
            let start = base + offset(&self.layout.reduced, run);
            &self.from[start..start + len]
        })
    }

    /// Reduces short rows for the outputs of a tile from `index` on. `map_of` returns the function
    /// of a row, given what the tile holds for it.
    fn fold_rows<M: UnaryOp, C: Combine>(
        &self,
        isa: Isa,
        (map_of, how): (impl Fn(f32) -> M, C),
        index: usize,
        tile: &mut [f32],
    ) {
        // The rows of adjacent outputs follow each other.
        let width = self.layout.inner;
        let runs = spending(tile.len() * width, self.rows(index, tile.len() * width));
        if self.layout.runs() == 1 {
            runs.for_each(|rows| combine_rows(isa, (&map_of, how), width, rows, tile));
            return;
        }
        let (mut totals, mut partial) = ([f64::from(C::IDENTITY); TILE], [0f32; TILE]);
        let partial = &mut partial[..tile.len()];
        for rows in runs {
            partial.copy_from_slice(tile);
            combine_rows(isa, (&map_of, how), width, rows, partial);
            totals.iter_mut().zip(&*partial).for_each(|(total, x)| *total = C::exact(*total, f64::from(*x)));
        }
        tile.iter_mut().zip(totals).for_each(|(x, total)| *x = total as f32);
    }

    /// Splits outputs into tiles that are contiguous in the input too.
    fn for_each_tile(&self, first: usize, piece: &mut [f32], task: impl Fn(usize, &mut [f32])) {
        // The outputs of a run: its columns, or the rows of the innermost kept dimension.
        let run = match self.layout.inner_reduced {
            true => self.layout.kept.last().map_or(1, |&(size, _)| size),
            false => self.layout.inner,
        };
        let (mut index, mut rest) = (first, piece);
        while !rest.is_empty() {
            // A tile fits L1 with its totals, and ends with its run, beyond which the input is
            // elsewhere.
            let len = (run - index % run).min(TILE).min(rest.len());
            let (tile, after) = rest.split_at_mut(len);
            task(index, tile);
            (index, rest) = (index + len, after);
        }
    }

    fn fold_tile<'r, M: UnaryOp, C: Combine>(
        &self,
        isa: Isa,
        (map, how): (M, C),
        rows: impl Iterator<Item = &'r [f32]>,
        tile: &mut [f32],
    ) {
        // Rows accumulate in `f32` in the tile, which goes to these totals every `ROWS` rows.
        let mut totals = [f64::from(C::IDENTITY); TILE];
        tile.fill(C::IDENTITY);
        let mut waiting = 0;
        let mut flush = |tile: &mut [f32]| {
            for (total, x) in totals.iter_mut().zip(tile) {
                *total = C::exact(*total, f64::from(*x));
                *x = C::IDENTITY;
            }
        };
        let pace = Pace::default();
        for row in rows {
            pace.step(row.len());
            into_row(isa, FoldInto(map, how), tile, row);
            waiting += 1;
            if waiting == ROWS {
                flush(tile);
                waiting = 0;
            }
        }
        flush(tile);
        tile.iter_mut().zip(totals).for_each(|(x, total)| *x = total as f32);
    }

    fn log_sum_exp(&self, to: &mut [f32]) {
        let isa = Isa::current();
        // First the maxima, which keep the powers in range. An infinite one would yield NaN.
        self.fold(Same(), Greater, finite_or_zero, to);
        for_each_row_chunk_mut(self.threads, to, 1, self.grain(), |first, piece| {
            if self.layout.inner_reduced && self.layout.inner <= SHORT_ROW {
                self.for_each_tile(first, piece, |index, tile| {
                    let mut sums = [0f32; TILE];
                    let sums = &mut sums[..tile.len()];
                    sums.copy_from_slice(tile);
                    self.fold_rows(isa, (ExpMinus, Plus), index, sums);
                    tile.iter_mut().zip(sums).for_each(|(x, sum)| {
                        *x = (f64::from(*sum).ln() + f64::from(*x)) as f32;
                    });
                });
            } else if self.layout.inner_reduced {
                for (index, result) in piece.iter_mut().enumerate() {
                    let rows = spending(self.layout.inner, self.rows(first + index, self.layout.inner));
                    let sum: f64 = rows.map(|row| combine(isa, ExpMinus(*result), Plus, row)).sum();
                    *result = (sum.ln() + f64::from(*result)) as f32;
                }
            } else {
                self.for_each_tile(first, piece, |index, tile| {
                    // Powers are computed in vectors of single precision and added in double
                    // precision.
                    let (mut sums, mut powers) = ([0f64; TILE], [0f32; TILE]);
                    for row in spending(tile.len(), self.rows(index, tile.len())) {
                        let powers = &mut powers[..tile.len()];
                        zip(isa, ExpDifference, Operand::Slice(row), Operand::Slice(tile), powers);
                        sums.iter_mut().zip(powers).for_each(|(sum, power)| *sum += f64::from(*power));
                    }
                    tile.iter_mut().zip(sums).for_each(|(x, sum)| *x = (sum.ln() + f64::from(*x)) as f32);
                });
            }
        });
    }
}
