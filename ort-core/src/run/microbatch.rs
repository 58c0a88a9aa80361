//! Micro-batching: splits a batch that the budget cannot hold at once into parts.
//!
//! The parts run one after the other, and the outputs are bit-identical to those of the whole
//! batch. A proof (`plan/batch.rs`) says that the items of the batch are independent. An input or
//! output whose items are contiguous is a zero-copy slice of the whole batch; others are copied
//! part by part.

use std::sync::Arc;

use ort_alloc::{Allocator, Category, DeviceId, HostAllocator, allocate_in};

use super::grant::{Grant, MemoryDemand, RunWork};
use super::inputs::is_on_device;
use super::inputs::{Given, fits};
use super::tables::Tables;
use super::{Executor, RunOptions};
use crate::dim::{Bindings, Symbol};
use crate::dtype::DType;
use crate::plan::{
    BatchSplit, BoundValues, GivenMemory, OutputMemory, RunPlan, SlabLimits, SlotPlan, largest_at_peak,
};
use crate::program::SlotId;
use crate::tensor::{Shape, TensorBuffer, TensorView, Value, ValueView, byte_count};
use crate::{Error, MemoryShortage, Result, ensure, error};

/// How a value stores the items of a batch.
struct Items {
    dtype: DType,
    /// The shape with all items.
    shape: Shape,
    /// The axis of the items.
    axis: usize,
    /// The number of sequences of items in memory: the product of the sizes in front of `axis`.
    outer: usize,
    /// The bytes of one item in each of these sequences.
    bytes: usize,
}

impl Items {
    /// Returns how a planned value stores `count` items along `axis`. `None` if its shape is not
    /// known, its items do not have equal sizes, or it holds strings.
    fn of(planned: &SlotPlan, axis: usize, count: usize) -> Option<Items> {
        let (dtype, shape) = (planned.dtype?, planned.shape.clone()?);
        // Only types of whole bytes: items of sub-byte types could share a byte.
        dtype.byte_size()?;
        let outer: usize = shape.get(..axis)?.iter().product();
        let all = byte_count(dtype, &shape).ok()?;
        let even = shape.get(axis)?.is_multiple_of(count) && all.is_multiple_of((outer * count).max(1));
        even.then_some(Items { dtype, shape, axis, outer, bytes: all / (outer * count).max(1) })
    }

    /// Whether the items of a part are contiguous.
    fn is_leading(&self) -> bool {
        self.outer == 1
    }

    /// The shape of a part with `size` items, if the whole batch has `count`.
    fn shape_of(&self, size: usize, count: usize) -> Shape {
        let mut shape = self.shape.clone();
        shape.get_mut(self.axis).into_iter().for_each(|extent| *extent = *extent / count * size);
        shape
    }

    /// The bytes of a part of `size` items.
    fn part_bytes(&self, size: usize) -> usize {
        self.outer.saturating_mul(self.bytes).saturating_mul(size)
    }
}

/// How the inputs and outputs of a run store the items of its batch.
struct Layout<'a> {
    /// The dimension that counts the items.
    symbol: &'a Symbol,
    count: usize,
    /// The fewest items of a part.
    least: usize,
    /// `None` for an input that all items share.
    inputs: Vec<Option<Items>>,
    outputs: Vec<Items>,
}

/// The plan of a part of `size` items.
struct Part {
    size: usize,
    plan: Arc<RunPlan>,
    bindings: Bindings,
}

/// A run that is split into parts.
pub(crate) struct Split<'a> {
    layout: &'a Layout<'a>,
    /// The items of each part, in order.
    sizes: Vec<usize>,
    /// One part for each distinct size, of which there are one or two.
    parts: Vec<Part>,
    need: MemoryDemand,
}

/// A run as it was requested: the plan of the whole batch and its bindings.
#[derive(Clone, Copy)]
pub(crate) struct RunRequest<'a> {
    pub(crate) plan: &'a RunPlan,
    pub(crate) bindings: &'a Bindings,
}

/// How to run a batch: whole, or in parts.
enum Strategy<'a> {
    Whole(MemoryDemand),
    // Boxed: every run moves a strategy, and most are whole.
    Split(Box<Split<'a>>),
}

/// The most parts of a run. A bound is needed because the sizes of empty tensors may be any number.
const MOST_PARTS: usize = 1 << 16;

/// The numbers of parts to try: small numbers one by one, then growing by a quarter, and last the
/// largest possible number. They do not depend on the budget, so that a refusal can name the limit
/// that would suffice.
fn part_counts(count: usize, least: usize) -> impl Iterator<Item = usize> {
    let most = (count / least.max(1)).min(MOST_PARTS);
    let counts = std::iter::successors(Some(2usize), |parts| Some(parts + (parts / 4).max(1)));
    counts.take_while(move |parts| *parts < most).chain((most > 1).then_some(most))
}

/// Splits `count` items into `parts` sizes that differ by at most one, the larger ones first.
fn even(count: usize, parts: usize) -> Vec<usize> {
    let parts = parts.max(1);
    (0..parts).map(|part| count / parts + usize::from(part < count % parts)).collect()
}

impl Executor {
    /// Returns how a run stores its items; `None` if the run may not be split or has too few items.
    fn items(&self, asked: RunRequest<'_>) -> Option<Layout<'_>> {
        let proof = self.compiled.batch().ok().filter(|_| self.batch_split)?;
        let count = usize::try_from(asked.bindings.get(&proof.symbol)?).ok()?;
        // Even the smallest split has two parts, each of at least `least` items.
        if count < 2 * proof.least || proof.check(asked.bindings).is_err() {
            return None;
        }
        let program = &self.compiled.program;
        let planned = |slot: &SlotId| asked.plan.slots.get(slot.index());
        let mut inputs = Vec::with_capacity(program.given.len());
        for (slot, axis) in program.given.iter().zip(&proof.inputs) {
            inputs.push(match axis {
                Some(axis) => Some(Items::of(planned(slot)?, *axis, count)?),
                None => None,
            });
        }
        let outputs = program.outputs.iter().zip(&proof.outputs);
        let outputs = outputs.map(|(slot, axis)| Items::of(planned(slot)?, *axis, count));
        let outputs = outputs.collect::<Option<Vec<Items>>>()?;
        Some(Layout { symbol: &proof.symbol, count, least: proof.least, inputs, outputs })
    }

    /// Plans the run in `parts` parts.
    fn split<'a>(&self, layout: &'a Layout<'a>, asked: RunRequest<'_>, parts: usize) -> Result<Split<'a>> {
        let sizes = even(layout.count, parts);
        // A contiguous output is computed in place, in the buffer of the whole.
        let memory = |items: &Items| {
            if items.is_leading() { OutputMemory::Given(DeviceId::HOST) } else { OutputMemory::Own }
        };
        let bound = BoundValues {
            planning: self.planning,
            inputs: vec![GivenMemory::HOST; layout.inputs.len()],
            outputs: layout.outputs.iter().map(memory).collect(),
            room: SlabLimits::ANY,
        };
        let largest = sizes.first().copied().unwrap_or(0);
        let mut split = Split { layout, sizes, parts: Vec::new(), need: MemoryDemand::default() };
        // The sizes of parts differ by one item at most, so two plans cover all of them.
        for size in [largest, layout.count / parts.max(1)] {
            if split.part(size).is_some() {
                continue;
            }
            let mut bindings = asked.bindings.clone();
            bindings.insert(layout.symbol.clone(), size as i64);
            let plan = self.plan_bound(&bindings, &bound)?;
            let mut need = MemoryDemand::of(&self.compiled.program, &plan);
            // A value of unknown size could make a part fail midway, so such a plan fits no budget.
            need.rest = if plan.has_dynamic { usize::MAX } else { need.rest };
            split.need = std::mem::take(&mut split.need).or(need);
            split.parts.push(Part { size, plan, bindings });
        }
        // The whole outputs, and the copies of inputs that are not contiguous, are held beside each
        // part.
        let kept = layout.outputs.iter().map(|items| items.part_bytes(layout.count));
        let copied = layout.inputs.iter().flatten().filter(|items| !items.is_leading());
        let copied = copied.map(|items| items.part_bytes(largest));
        split.need.rest = kept.chain(copied).fold(split.need.rest, usize::saturating_add);
        Ok(split)
    }

    /// Chooses how to run within `available` bytes.
    ///
    /// It matters more to keep all weights packed than to run the batch whole. The order is: whole
    /// with all weights packed, the fewest parts with all weights packed, whole with streamed
    /// weights, the fewest parts with streamed weights.
    fn way<'a>(
        &self,
        asked: RunRequest<'_>,
        layout: Option<&'a Layout<'a>>,
        available: usize,
    ) -> Result<Strategy<'a>> {
        let (all, window) = (self.compiled.streams.total_bytes(), self.compiled.streams.least_bytes());
        let whole = MemoryDemand::of(&self.compiled.program, asked.plan);
        let fits = |need: &MemoryDemand, packed: usize| need.total().saturating_add(packed) <= available;
        if fits(&whole, all) {
            return Ok(Strategy::Whole(whole));
        }
        // For a refusal: the smallest demand that was tried, what needs it, and the largest values.
        let largest = largest_at_peak(asked.plan, &self.compiled.program);
        let mut least = (whole.total(), "the run".to_string(), largest);
        let rounds = if all == window { &[window][..] } else { &[all, window] };
        for &packed in rounds {
            if fits(&whole, packed) {
                return Ok(Strategy::Whole(whole));
            }
            let Some(layout) = layout else { continue };
            // Splitting does not shrink the outputs. If they do not fit beside all packed weights,
            // no number of parts does.
            let outputs = layout.outputs.iter().map(|items| items.part_bytes(layout.count));
            let outputs = outputs.fold(packed, usize::saturating_add);
            if packed != window && outputs > available {
                continue;
            }
            for parts in part_counts(layout.count, layout.least) {
                let split = self.split(layout, asked, parts)?;
                if fits(&split.need, packed) {
                    return Ok(Strategy::Split(Box::new(split)));
                }
                if split.need.total() < least.0 {
                    least = (split.need.total(), split.in_words(), self.largest_of(&split));
                }
            }
        }
        let (needed, subject, largest) = least;
        let needed = needed.saturating_add(window);
        Err(self.shortage(&subject, (needed, available), largest, self.why_unsplit(asked)))
    }

    /// The largest values of a part, and all outputs at their full size.
    fn largest_of(&self, split: &Split<'_>) -> Vec<(String, usize)> {
        let part = split.parts.first();
        let mut largest =
            part.map_or_else(Vec::new, |part| largest_at_peak(&part.plan, &self.compiled.program));
        let outputs = self.compiled.program.graph.outputs.iter().zip(&split.layout.outputs);
        for (id, items) in outputs {
            let name = &*self.compiled.program.graph.value(*id).name;
            largest.retain(|(known, _)| known != name);
            largest.push((name.to_string(), items.part_bytes(split.layout.count)));
        }
        largest
    }

    /// Why a batch of several items cannot be split. `None` if it can, or if splitting is off.
    pub(crate) fn why_unsplit(&self, asked: RunRequest<'_>) -> Option<String> {
        let (symbol, why) = match self.compiled.batch() {
            Ok(proof) => (&proof.symbol, proof.check(asked.bindings).err()?),
            Err(refusal) => (refusal.symbol.as_ref()?, refusal.to_string()),
        };
        let several = asked.bindings.get(symbol).is_some_and(|count| count > 1);
        (several && self.batch_split).then(|| format!("'{symbol}' is not split: {why}"))
    }

    /// How a run would be split with `available` bytes, and what it lacks if it does not fit even
    /// in parts. Both are `None` if it would run whole.
    pub(crate) fn would_split(
        &self,
        asked: RunRequest<'_>,
        available: usize,
    ) -> (Option<BatchSplit>, Option<MemoryShortage>) {
        let layout = self.items(asked);
        match self.way(asked, layout.as_ref(), available) {
            Ok(Strategy::Whole(_)) => (None, None),
            Ok(Strategy::Split(split)) => {
                let (dim, planned_bytes) = (split.layout.symbol.to_string(), split.need.total());
                (Some(BatchSplit { dim, planned_bytes, parts: split.sizes }), None)
            }
            Err(problem) => (None, problem.shortage().cloned()),
        }
    }

    /// Runs the program on the given values, whole or in parts.
    pub(crate) fn run(
        &self,
        asked: RunRequest<'_>,
        given: &[ValueView<'_>],
        options: &RunOptions<'_>,
    ) -> Result<Vec<Value>> {
        let layout = std::cell::OnceCell::new();
        // The host cannot slice inputs in device memory.
        let can_split = !given.iter().any(is_on_device);
        let whole = MemoryDemand::of(&self.compiled.program, asked.plan);
        let packed = self.compiled.streams.total_bytes();
        let choose = |available: usize| {
            // A run that fits whole does not need the proof.
            if whole.total().saturating_add(packed) <= available {
                return Ok((whole.clone(), None));
            }
            let layout = layout.get_or_init(|| self.items(asked).filter(|_| can_split)).as_ref();
            Ok(match self.way(asked, layout, available)? {
                Strategy::Whole(need) => (need, None),
                Strategy::Split(split) => (split.need.clone(), Some(split)),
            })
        };
        let (mut grant, split) = self.grant(options, choose)?;
        let outputs = match split {
            Some(split) => self.run_parts(&split, given, &mut grant, options)?,
            None => {
                let work = RunWork { plan: asked.plan, bindings: asked.bindings, given: Given::Views(given) };
                // On an error the tables are dropped.
                let mut tables = self.kept.take_tables();
                let outputs =
                    self.frame(&mut grant, work, (&mut [], &mut tables), options, |frame, tables| {
                        frame.run(tables)
                    })?;
                self.kept.keep_tables(tables);
                outputs
            }
        };
        self.end(grant, options);
        Ok(outputs)
    }

    /// Runs the parts one after the other.
    fn run_parts(
        &self,
        split: &Split<'_>,
        given: &[ValueView<'_>],
        grant: &mut Grant<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Vec<Value>> {
        let layout = split.layout;
        tracing::info!(dim = %layout.symbol, parts = ?split.sizes, "the batch is split");
        let (budget, outputs) = (self.budget_of(grant), self.output_allocator());
        let buffer = |items: &Items, size: usize, category: Category| -> Result<TensorBuffer> {
            let memory = allocate_in(budget, category, outputs, items.part_bytes(size), 64)?;
            TensorBuffer::from_buffer(items.dtype, &items.shape_of(size, layout.count), memory)
        };
        let mut whole = Vec::with_capacity(layout.outputs.len());
        for items in &layout.outputs {
            whole.push(Some(buffer(items, layout.count, Category::Output)?));
        }
        let mut copies = Vec::with_capacity(layout.inputs.len());
        // Each copy has the size of the first part, which is the largest, and all parts reuse it.
        for items in &layout.inputs {
            copies.push(match items.as_ref().filter(|items| !items.is_leading()) {
                Some(items) => {
                    Some(buffer(items, split.sizes.first().copied().unwrap_or(0), Category::Workspace)?)
                }
                None => None,
            });
        }
        let mut memory = PartMemory { copies, whole, tables: Tables::default() };
        let mut first = 0;
        for &size in &split.sizes {
            let range = ItemRange { first, size };
            copy_inputs(layout, given, &mut memory.copies, range)?;
            self.run_part(split, range, given, &mut memory, grant, options)?;
            first += size;
            if grant.streams() {
                // Freed weights leave holes in the heap, and each part would add more.
                HostAllocator::global().trim();
            }
        }
        let whole = memory.whole.into_iter().zip(&layout.outputs).map(|(buffer, items)| {
            let buffer = buffer.ok_or_else(lost)?.part(0, &items.shape)?;
            Ok(Value::Tensor(buffer.tensor()?))
        });
        whole.collect()
    }

    /// Runs a part, and writes its outputs to their places in the whole outputs.
    fn run_part(
        &self,
        split: &Split<'_>,
        range: ItemRange,
        given: &[ValueView<'_>],
        PartMemory { copies, whole, tables }: &mut PartMemory,
        grant: &mut Grant<'_>,
        options: &RunOptions<'_>,
    ) -> Result<()> {
        let (layout, ItemRange { first, size }) = (split.layout, range);
        let part = split.part(size).ok_or_else(|| error!(Fail, "there is no plan of {size} items"))?;
        let shape = |items: &Option<Items>| items.as_ref().map(|items| items.shape_of(size, layout.count));
        let shapes: Vec<Option<Shape>> = layout.inputs.iter().map(shape).collect();
        let views = views(layout, given, copies, &shapes, range)?;
        ensure!(
            fits(&self.compiled.program, &part.plan, &views),
            Fail,
            "a part does not have its plan's shapes"
        );
        // The buffers of an I/O binding are numbered with the inputs first, then the outputs.
        let mut bound: Vec<Option<TensorBuffer>> = given.iter().map(|_| None).collect();
        for (items, buffer) in layout.outputs.iter().zip(whole.iter_mut()) {
            bound.push(match items.is_leading() {
                true => {
                    let all = buffer.take().ok_or_else(lost)?;
                    Some(all.part(items.bytes * first, &items.shape_of(size, layout.count))?)
                }
                false => None,
            });
        }
        let work = RunWork { plan: &part.plan, bindings: &part.bindings, given: Given::Views(&views) };
        let places = given.len();
        self.frame(grant, work, (&mut bound, tables), options, |frame, tables| {
            frame.run_steps(tables)?;
            for (index, (items, buffer)) in layout.outputs.iter().zip(whole.iter_mut()).enumerate() {
                if let Some(value) = frame.deliver(index, places + index, DeviceId::HOST)? {
                    let all = buffer.as_mut().ok_or_else(lost)?.bytes_mut()?;
                    let run = items.bytes * size;
                    let from = Strided { bytes: value.view().tensor()?.bytes()?, step: run, first: 0 };
                    let (step, first) = (items.bytes * layout.count, items.bytes * first);
                    copy_runs(from, Strided { bytes: all, step, first }, items.outer, run)?;
                }
            }
            Ok(())
        })?;
        // The part owned the buffers of the whole outputs; this returns them.
        for (buffer, part) in whole.iter_mut().zip(bound.into_iter().skip(places)) {
            *buffer = part.or_else(|| buffer.take());
        }
        Ok(())
    }
}

impl Split<'_> {
    fn part(&self, size: usize) -> Option<&Part> {
        self.parts.iter().find(|part| part.size == size)
    }

    /// The run in words, as the subject of a refusal.
    fn in_words(&self) -> String {
        match self.sizes.first() {
            Some(1) => "the run in parts of 1 item".to_string(),
            size => format!("the run in parts of at most {} items", size.unwrap_or(&0)),
        }
    }
}

/// The memory that the parts of a split run use in turn.
struct PartMemory {
    /// Copies of the items of inputs whose items are not contiguous; `None` for other inputs.
    copies: Vec<Option<TensorBuffer>>,
    /// The outputs of the whole batch. An entry is `None` while a part writes the output.
    whole: Vec<Option<TensorBuffer>>,
    tables: Tables,
}

/// The items of a part.
#[derive(Clone, Copy)]
struct ItemRange {
    first: usize,
    size: usize,
}

/// Strided memory: a range of bytes is read or written every `step` bytes, from byte `first` on.
struct Strided<B> {
    bytes: B,
    step: usize,
    first: usize,
}

/// Returns the inputs of a part: slices of the given values, or their copies.
fn views<'v>(
    layout: &Layout<'_>,
    given: &[ValueView<'v>],
    copies: &'v [Option<TensorBuffer>],
    shapes: &'v [Option<Shape>],
    ItemRange { first, size }: ItemRange,
) -> Result<Vec<ValueView<'v>>> {
    let mut views = Vec::with_capacity(given.len());
    for (index, value) in given.iter().enumerate() {
        let items = layout.inputs.get(index).and_then(Option::as_ref);
        let shape = shapes.get(index).and_then(Option::as_ref);
        views.push(match (items.zip(shape), copies.get(index).and_then(Option::as_ref)) {
            (None, _) => *value,
            (Some(_), Some(copy)) => ValueView::Tensor(copy.view()),
            (Some((items, shape)), None) => {
                let bytes = value.tensor()?.bytes()?.get(items.bytes * first..items.bytes * (first + size));
                let bytes = bytes.ok_or_else(|| error!(Fail, "an input has fewer items"))?;
                ValueView::Tensor(TensorView::host(items.dtype, shape, bytes))
            }
        });
    }
    Ok(views)
}

/// Gathers the items of a part of each input whose items are not contiguous.
fn copy_inputs(
    layout: &Layout<'_>,
    given: &[ValueView<'_>],
    copies: &mut [Option<TensorBuffer>],
    ItemRange { first, size }: ItemRange,
) -> Result<()> {
    for ((items, value), copy) in layout.inputs.iter().zip(given).zip(copies) {
        let (Some(items), Some(all)) = (items, copy.take()) else { continue };
        let mut part = all.part(0, &items.shape_of(size, layout.count))?;
        let run = items.bytes * size;
        let (step, first) = (items.bytes * layout.count, items.bytes * first);
        let from = Strided { bytes: value.tensor()?.bytes()?, step, first };
        copy_runs(from, Strided { bytes: part.bytes_mut()?, step: run, first: 0 }, items.outer, run)?;
        *copy = Some(part);
    }
    Ok(())
}

/// Copies `count` ranges of `len` bytes between strided memory.
fn copy_runs(from: Strided<&[u8]>, to: Strided<&mut [u8]>, count: usize, len: usize) -> Result<()> {
    for index in 0..count {
        let (start, end) = (index * from.step + from.first, index * to.step + to.first);
        let pair = from.bytes.get(start..start + len).zip(to.bytes.get_mut(end..end + len));
        let (from, to) = pair.ok_or_else(|| error!(Fail, "a part does not have its plan's size"))?;
        to.copy_from_slice(from);
    }
    Ok(())
}

fn lost() -> Error {
    error!(Fail, "the memory of an output was lost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_even_and_few() {
        // items, the fewest items of a part, the numbers of parts tried
        let cases: [(usize, usize, &[usize]); 6] = [
            (1, 1, &[]),
            (2, 1, &[2]),
            (3, 2, &[]),
            (8, 1, &[2, 3, 4, 5, 6, 7, 8]),
            (8, 2, &[2, 3, 4]),
            (20, 1, &[2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 20]),
        ];
        for (count, least, expected) in cases {
            let tried: Vec<usize> = part_counts(count, least).collect();
            assert_eq!(tried, expected, "{count} items");
            for parts in tried {
                let sizes = even(count, parts);
                assert_eq!(sizes.iter().sum::<usize>(), count);
                assert!(sizes.iter().all(|size| *size >= least), "{sizes:?}");
            }
        }
        assert_eq!(even(8, 3), [3, 3, 2]);
        assert!(part_counts(1 << 40, 1).count() < 130);
        assert_eq!(part_counts(usize::MAX, 1).last(), Some(MOST_PARTS));
    }

    #[test]
    fn runs_are_copied_between_distances() -> Result<()> {
        let mut to = [0u8; 8];
        let from = Strided { bytes: &[1, 2, 3, 4, 5, 6][..], step: 3, first: 1 };
        copy_runs(from, Strided { bytes: &mut to, step: 4, first: 2 }, 2, 2)?;
        assert_eq!(to, [0, 0, 2, 3, 0, 0, 5, 6]);
        let short = Strided { bytes: &[1, 2][..], step: 2, first: 1 };
        assert!(copy_runs(short, Strided { bytes: &mut to, step: 4, first: 2 }, 1, 2).is_err());
        Ok(())
    }
}
