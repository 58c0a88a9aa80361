//! Forest inference, parallel over rows.

use num_traits::AsPrimitive;
use ort_core::dtype::{DType, Element};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};
use smallvec::SmallVec;

use super::layout::{Forest, Node, Places, Trees, Values, Width};
use super::plan::{Number, Tree};
use super::shallow::ROWS;
use super::walk::{WIDTH, walk};
use super::{Aggregate, Shape};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::for_each_chunk_mut;

/// Traversal steps that are worth a second thread: about 100 microseconds.
const STEPS_FOR_THREADS: usize = 100_000;

/// Parts per thread, for load balancing.
const PARTS_PER_THREAD: usize = 4;

/// The node bytes assumed to stay in a core's private cache while blocks of rows stream by. A
/// larger forest is read again from farther away for each block, so its blocks are longer.
const CACHED_BYTES: usize = 512 << 10;

/// The rows of a block for forests that fit the cache, and for those that do not.
const BLOCK_ROWS: [usize; 2] = [256, 1024];

/// The scratch bytes of a block's rows. A block of the minimum of [`ROWS`] rows may exceed it.
const BLOCK_BYTES: usize = 1 << 20;

/// The alignment of scratch buffers.
const ALIGNMENT: usize = 64;

/// The inputs of one run.
pub(in crate::ml) struct Request<'a> {
    pub(in crate::ml) input: TensorView<'a>,
    pub(in crate::ml) shape: Shape,
    pub(in crate::ml) aggregate: Aggregate,
    pub(in crate::ml) threads: usize,
    pub(in crate::ml) workspace: &'a mut [u8],
}

/// Turns the sums of a row into its scores and returns its class. The flags say which targets have
/// a leaf weight.
pub(in crate::ml) type Finish<'a> = dyn Fn(&mut [f64], &mut [u8]) -> usize + Sync + 'a;

/// How the rows are split, and the scratch of each part.
struct Division {
    parts: usize,
    /// The rows of a part, and of a block within it. Both are multiples of [`ROWS`].
    part_rows: usize,
    block_rows: usize,
    /// The bytes of a part's scratch buffers: the sums of a block, the sums of a row, features,
    /// features with copies, arranged features, and the flags of both kinds of sums.
    sections: [usize; 7],
}

impl Division {
    fn part_bytes(&self) -> usize {
        self.sections.iter().sum()
    }
}

/// Returns the bytes of `count` groups of `each` elements, rounded up to the alignment.
fn section<T>(count: usize, each: usize) -> Result<usize> {
    let bytes = count.checked_mul(each).map(bytes_of::<T>).transpose()?;
    let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT));
    bytes.ok_or_else(|| error!(OutOfMemory, "a workspace of {count} times {each} values"))
}

impl Forest {
    /// Returns the workspace bytes of a run.
    pub(in crate::ml) fn workspace(&self, shape: Shape, threads: usize) -> Result<usize> {
        let division = match &self.0 {
            Width::Narrow(trees) => trees.divide(shape, threads)?,
            Width::Wide(trees) => trees.divide(shape, threads)?,
        };
        // The classes of all rows come first, then the parts.
        let bytes = division.part_bytes().checked_mul(division.parts);
        let classes = section::<u32>(shape.rows, 1)?;
        let bytes = bytes.and_then(|bytes| bytes.checked_add(classes));
        bytes.ok_or_else(|| error!(OutOfMemory, "the workspace of {} rows", shape.rows))
    }

    /// Writes the scores of all rows, unless `scores` is empty, and returns the rows' classes.
    pub(in crate::ml) fn run<'a, T: Element + Send>(
        &self,
        request: Request<'a>,
        scores: &mut [T],
        finish: &Finish<'_>,
    ) -> Result<&'a [u32]>
    where
        f64: AsPrimitive<T>,
    {
        match &self.0 {
            Width::Narrow(trees) => trees.run(request, scores, finish),
            Width::Wide(trees) => trees.run(request, scores, finish),
        }
    }
}

/// A range of rows with its outputs and scratch.
struct RowsPart<'a, V, T> {
    first: usize,
    scores: &'a mut [T],
    classes: &'a mut [u32],
    sums: &'a mut [f64],
    row: &'a mut [f64],
    values: &'a mut [V],
    copied: &'a mut [V],
    arranged: &'a mut [f32],
    seen: &'a mut [u8],
    row_seen: &'a mut [u8],
}

fn split_section(bytes: &mut [u8], len: usize) -> Result<(&mut [u8], &mut [u8])> {
    bytes.split_at_mut_checked(len).ok_or_else(|| error!(Fail, "the workspace is too small"))
}

/// Splits outputs and workspace into parts.
fn cut<'a, V: Number, T>(
    division: &Division,
    shape: Shape,
    (mut scores, mut classes): (&'a mut [T], &'a mut [u32]),
    mut workspace: &'a mut [u8],
) -> Result<SmallVec<[RowsPart<'a, V, T>; 1]>> {
    // Without a scores output, a part gets no scores.
    let targets = if scores.is_empty() { 0 } else { shape.targets };
    let mut parts = SmallVec::new();
    for first in (0..shape.rows).step_by(division.part_rows) {
        let rows = division.part_rows.min(shape.rows - first);
        let mut memory = take(&mut workspace, division.part_bytes())?;
        // All sections are whole cache lines, so two threads never write to the same one.
        let [sums, row, values, copied, arranged, seen, row_seen] = division.sections;
        parts.push(RowsPart {
            first,
            scores: take(&mut scores, rows * targets)?,
            classes: take(&mut classes, rows)?,
            sums: scratch(take(&mut memory, sums)?)?,
            row: scratch(take(&mut memory, row)?)?,
            values: scratch(take(&mut memory, values)?)?,
            copied: scratch(take(&mut memory, copied)?)?,
            arranged: scratch(take(&mut memory, arranged)?)?,
            seen: take(&mut memory, seen)?,
            row_seen: take(&mut memory, row_seen)?,
        });
    }
    Ok(parts)
}

/// A block of rows.
#[derive(Clone, Copy)]
struct Block<'a, V> {
    values: &'a [V],
    /// The elements of a row.
    features: usize,
    count: usize,
    /// Whether each row is followed by its copies without NaN.
    with_copies: bool,
}

/// The sums of a block: those of one target are adjacent, and targets are `stride` apart.
struct Sums<'a> {
    sums: &'a mut [f64],
    seen: &'a mut [u8],
    stride: usize,
    aggregate: Aggregate,
}

impl Sums<'_> {
    #[inline(always)]
    fn add(&mut self, target: u32, row: usize, weight: f64) {
        let index = target as usize * self.stride + row;
        if let (Some(sum), Some(seen)) = (self.sums.get_mut(index), self.seen.get_mut(index)) {
            self.aggregate.add(sum, seen, weight);
        }
    }
}

/// [`Values`] as slices.
#[derive(Clone, Copy)]
enum Weights<'a> {
    One(&'a [f32]),
    Many { leaves: &'a [u32], starts: &'a [u32], targets: &'a [u32], weights: &'a [f64] },
}

impl Values {
    fn weights(&self) -> Weights<'_> {
        match self {
            Values::One(values) => Weights::One(values.values()),
            Values::Many(many) => Weights::Many {
                leaves: many.leaves.values(),
                starts: many.starts.values(),
                targets: many.targets.values(),
                weights: many.weights.values(),
            },
        }
    }
}

impl Weights<'_> {
    /// Adds the weights of the leaf at a node to the sums of a row.
    #[inline(always)]
    fn add(self, tree: &Tree, at: u32, row: usize, sums: &mut Sums<'_>) {
        match self {
            Weights::One(values) => {
                if let (Some(&weight), Some(target)) = (values.get(at as usize), tree.target) {
                    sums.add(target, row, f64::from(weight));
                }
            }
            Weights::Many { leaves, starts, targets, weights } => {
                let leaf = leaves.get(at as usize).map_or(0, |&leaf| leaf as usize);
                // One start for each leaf and the total behind them, so both are there.
                let Some(&[start, end]) = starts.get(leaf..leaf + 2) else { return };
                let range = start as usize..end as usize;
                let (Some(targets), Some(weights)) = (targets.get(range.clone()), weights.get(range)) else {
                    return;
                };
                for (&target, &weight) in targets.iter().zip(weights) {
                    sums.add(target, row, weight);
                }
            }
        }
    }
}

impl<N: Node> Trees<N> {
    fn divide(&self, shape: Shape, threads: usize) -> Result<Division> {
        let Shape { rows, features, targets } = shape;
        let needed = self.features;
        ensure!(
            needed <= features,
            InvalidArgument,
            "the trees use {needed} features, the input has {features}"
        );
        let wanted = match threads > 1 && rows.saturating_mul(self.row_steps) >= STEPS_FOR_THREADS {
            true => threads * PARTS_PER_THREAD,
            false => 1,
        };
        // Whole vectors, so that only the last part has a partial one.
        let part_rows = rows.div_ceil(wanted).max(1).next_multiple_of(ROWS);
        let converted = if self.converts { features } else { 0 };
        let arranged = self.shallow.column_count();
        let copied = if self.has_copies { self.copied_len() } else { 0 };
        let row_bytes = [
            bytes_of::<f64>(targets)?,
            bytes_of::<f64>(converted)?,
            bytes_of::<f64>(copied)?,
            bytes_of::<f32>(arranged)?,
        ];
        // Starts at 1, because a forest may need no bytes and the next line divides.
        let row_bytes = row_bytes.into_iter().fold(1, usize::saturating_add);
        // The index is 1 for forests that exceed the cache.
        let most = BLOCK_ROWS[usize::from(size_of_val(self.nodes.values()) > CACHED_BYTES)];
        // Rounded down to whole vectors, but never to none.
        let most = most.min(BLOCK_BYTES / row_bytes / ROWS * ROWS).max(ROWS);
        let block_rows = part_rows.min(most);
        let sections = [
            section::<f64>(block_rows, targets)?,
            section::<f64>(1, targets)?,
            section::<N::Value>(block_rows, converted)?,
            section::<N::Value>(block_rows, copied)?,
            section::<f32>(block_rows, arranged)?,
            section::<u8>(block_rows, targets)?,
            section::<u8>(1, targets)?,
        ];
        let bytes = sections.iter().try_fold(0_usize, |sum, &bytes| sum.checked_add(bytes));
        ensure!(bytes.is_some(), OutOfMemory, "a workspace for {targets} targets and {features} features");
        Ok(Division { parts: rows.div_ceil(part_rows), part_rows, block_rows, sections })
    }

    fn run<'a, T: Element + Send>(
        &self,
        request: Request<'a>,
        scores: &mut [T],
        finish: &Finish<'_>,
    ) -> Result<&'a [u32]>
    where
        f64: AsPrimitive<T>,
    {
        let Request { input, shape, aggregate, threads, workspace } = request;
        let division = self.divide(shape, threads)?;
        let (classes, workspace) = split_section(workspace, section::<u32>(shape.rows, 1)?)?;
        let classes = scratch::<u32>(classes)?.get_mut(..shape.rows);
        let classes = classes.ok_or_else(|| error!(Fail, "the workspace is too small"))?;
        let mut parts = cut::<N::Value, T>(&division, shape, (scores, &mut *classes), workspace)?;
        let work = Work { shape, block_rows: division.block_rows, aggregate, finish };
        let mut run = |read: &Read<'_, N::Value>| {
            for_each_chunk_mut(threads, &mut parts, 1, |_, parts| {
                parts.iter_mut().for_each(|part| self.run_part(part, &work, read));
            });
        };
        match self.converts {
            // Without a conversion, the rows are read from the input without a copy.
            false => run(&Read::Whole(input.as_slice()?)),
            true => {
                let dtype = input.dtype();
                for_each_type!(dtype in [F32, F16, I32, I64], E => {
                    let all = input.as_slice::<E>()?;
                    run(&Read::Part(&|start, to: &mut [N::Value]| {
                        for (to, x) in to.iter_mut().zip(all.get(start..).unwrap_or(&[])) {
                            *to = N::Value::from_single((*x).as_());
                        }
                    }));
                }, else => return Err(error!(NotImplemented, "features of {} are not supported", DType::name(dtype))));
            }
        }
        drop(parts);
        Ok(classes)
    }

    fn run_part<T: Element>(
        &self,
        part: &mut RowsPart<'_, N::Value, T>,
        work: &Work<'_>,
        read: &Read<'_, N::Value>,
    ) where
        f64: AsPrimitive<T>,
    {
        let Shape { features, targets, .. } = work.shape;
        let rows = part.classes.len();
        for start in (0..rows).step_by(work.block_rows) {
            let count = work.block_rows.min(rows - start);
            spend(4 * count);
            let at = (part.first + start) * features;
            let values = match read {
                Read::Whole(all) => all.get(at..at + count * features).unwrap_or(&[]),
                Read::Part(read) => {
                    let values = part.values.get_mut(..count * features).unwrap_or(&mut []);
                    read(at, values);
                    &*values
                }
            };
            // Sums are [targets, stride]: one target's rows are adjacent for the vectors.
            let stride = work.block_rows;
            part.sums.fill(0.0);
            part.seen.fill(0);
            let mut sums =
                Sums { sums: &mut *part.sums, seen: &mut *part.seen, stride, aggregate: work.aggregate };
            let block = Block { values, features, count, with_copies: false };
            self.sum(block, (&mut *part.copied, &mut *part.arranged), &mut sums);
            for row in 0..count {
                for target in 0..targets {
                    // Transposed, because `finish` takes the targets of one row.
                    part.row[target] = self.average(part.sums[target * stride + row], work.aggregate);
                    part.row_seen[target] = part.seen[target * stride + row];
                }
                let sums = &mut part.row[..targets];
                let class = (work.finish)(sums, &mut part.row_seen[..targets]);
                part.classes[start + row] = class as u32;
                // No range is found if the scores are not wanted.
                let to = part.scores.get_mut((start + row) * targets..(start + row + 1) * targets);
                to.unwrap_or(&mut []).iter_mut().zip(sums).for_each(|(to, score)| *to = score.as_());
            }
        }
    }

    fn average(&self, sum: f64, aggregate: Aggregate) -> f64 {
        if aggregate == Aggregate::Average { sum / self.trees.len() as f64 } else { sum }
    }

    /// Sums the leaf weights of a block of rows.
    fn sum<'a>(
        &self,
        mut block: Block<'a, N::Value>,
        (copied, arranged): (&'a mut [N::Value], &mut [f32]),
        sums: &mut Sums<'_>,
    ) {
        let weights = self.values.weights();
        // With fewer rows, only the traversals of single rows run, which read nothing arranged.
        let shallow = block.count >= WIDTH && !self.shallow.is_empty();
        if shallow {
            self.shallow.arrange((block.values, block.features), arranged, N::Value::to_single);
        }
        // Copies are needed only if the block has a NaN.
        // `arrange` comes first: it replaces NaN on its own and takes the rows without copies.
        if self.has_copies && block.values.iter().any(|x| is_missing(*x)) {
            self.copy_rows(&block, copied);
            block = Block { values: copied, features: self.copied_len(), with_copies: true, ..block };
        }
        // Too few rows to fill the traversals, so one row goes through several trees at a time.
        if block.count < WIDTH {
            (0..block.count).for_each(|row| self.row(block, row, weights, sums));
            return;
        }
        // Lanes without a row add to sums that are not read. `stride` is a multiple of `ROWS`.
        let rows = block.count.next_multiple_of(ROWS);
        for (index, tree) in self.trees.iter().enumerate() {
            spend(8 * block.count);
            if let Some(target) = tree.target.filter(|_| shallow) {
                let first = target as usize * sums.stride;
                let places =
                    sums.sums.get_mut(first..first + rows).zip(sums.seen.get_mut(first..first + rows));
                if places
                    .is_some_and(|sums_of| self.shallow.add((index, tree), arranged, sums_of, sums.aggregate))
                {
                    continue;
                }
            }
            self.rows(block, tree, weights, sums);
        }
    }

    fn copy_rows(&self, block: &Block<'_, N::Value>, to: &mut [N::Value]) {
        let rows = block.values.chunks_exact(block.features.max(1));
        for (row, to) in rows.zip(to.chunks_exact_mut(self.copied_len())) {
            copy_columns(row, to);
        }
    }

    /// Traverses one tree with all rows of a block.
    fn rows(&self, block: Block<'_, N::Value>, tree: &Tree, weights: Weights<'_>, sums: &mut Sums<'_>) {
        let nodes = (self.nodes.values(), Places::new(self.column_bits, block.with_copies));
        for first in (0..block.count).step_by(WIDTH) {
            // The last group repeats the last row to fill the width.
            let starts = std::array::from_fn(|way| (first + way).min(block.count - 1) * block.features);
            let mut at = [tree.root; WIDTH];
            walk::<N>(nodes, block.values, &starts, &mut at, tree.depth);
            for (way, &at) in at.iter().enumerate().take(block.count - first) {
                weights.add(tree, at, first + way, sums);
            }
        }
    }

    /// Traverses all trees with one row of a block.
    fn row(&self, block: Block<'_, N::Value>, row: usize, weights: Weights<'_>, sums: &mut Sums<'_>) {
        let nodes = (self.nodes.values(), Places::new(self.column_bits, block.with_copies));
        let starts = [row * block.features; WIDTH];
        spend(8 * self.trees.len());
        for trees in self.trees.chunks(WIDTH) {
            let mut at: [u32; WIDTH] = std::array::from_fn(|way| trees.get(way).map_or(0, |tree| tree.root));
            // The deepest tree decides; the others wait at their leaves.
            let depth = trees.iter().map(|tree| tree.depth).max().unwrap_or(0);
            walk::<N>(nodes, block.values, &starts, &mut at, depth);
            // In the order of the trees, like `rows`. Traversals without a tree are dropped.
            for (tree, at) in trees.iter().zip(at) {
                weights.add(tree, at, row, sums);
            }
        }
    }
}

/// Writes a row to both halves of `to`. In the second half the lowest value replaces NaN.
pub(super) fn copy_columns<T: Number>(row: &[T], to: &mut [T]) {
    let (plain, copy) = to.split_at_mut(to.len() / 2);
    for ((plain, copy), &x) in plain.iter_mut().zip(copy).zip(row) {
        *plain = x;
        *copy = if is_missing(x) { T::LEAST } else { x };
    }
}

/// Whether a feature is NaN.
#[allow(clippy::eq_op)]
fn is_missing<T: PartialEq>(x: T) -> bool {
    x != x
}

/// The source of the features.
enum Read<'a, V> {
    /// The input itself, zero-copy.
    Whole(&'a [V]),
    /// Converts elements of the input from an index on, as many as the slice takes.
    Part(&'a (dyn Fn(usize, &mut [V]) + Sync)),
}

/// What all parts of a run share.
struct Work<'a> {
    shape: Shape,
    block_rows: usize,
    aggregate: Aggregate,
    finish: &'a Finish<'a>,
}
