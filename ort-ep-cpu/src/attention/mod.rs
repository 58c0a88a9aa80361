//! Scaled dot-product attention over heads that lie anywhere, without a matrix of scores.
//!
//! A task is a block of queries of one head. It takes the keys and values in blocks that stay in
//! the nearest caches, and keeps for each query the greatest score, the sum of the weights and the
//! weighted sum of the values so far; see [`simd::attention`](crate::simd::attention) for the loops
//! and for where the method comes from. A few queries (a step of decoding) go another way: the
//! cache of keys and values is read once, a row at a time.
//!
//! In [`Precision::Bf16`](crate::gemm::Precision) queries, keys, values and weights are rounded to
//! bfloat16, while scores and sums are `f32`; keys and values are then made pairs block by block. A
//! few queries are not, as reading takes longer than multiplying.
//!
//! Nothing here allocates: [`Sizes::scratch_len`] tells what to bring. A result has the same bits
//! for any number of threads, since what a query gets depends on its own keys only, in their order.

#![allow(
    clippy::indexing_slicing,
    reason = "rows are checked against their slices before the first one is read, and scratch is cut by the same sizes that it is planned with"
)]

mod task;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use half::{bf16, f16};

use task::Task;

use crate::gemm::{Cpu, Pairing};
use crate::interrupt::spend;
use crate::parallel::{LineBlock, Lines};
use crate::simd::Isa;
use crate::simd::attention::{WIDTH, dots, mix, weigh_row};
use crate::vector::convert::{f32_from_bf16, f32_from_f16};
use crate::vector::elementwise::{Unary, unary_in_place};

/// Keys in a block: the scores of a panel then stay in the first-level cache.
const KEYS: usize = 128;

/// The most panels of a task. They share what is read of keys and values.
const PANELS: usize = 4;

/// Tasks for each thread, to even out unequal work.
const TASKS_PER_THREAD: usize = 4;

/// Queries that share their keys up to which a row of keys is multiplied with each of them alone.
const FEW: usize = 4;

/// Elements of a tensor of heads.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision.
    F16(&'a [f16]),
    /// The upper half of single precision.
    BF16(&'a [bf16]),
}

impl Elements<'_> {
    fn len(&self) -> usize {
        match self {
            Elements::F32(values) => values.len(),
            Elements::F16(values) => values.len(),
            Elements::BF16(values) => values.len(),
        }
    }

    fn is_narrow(&self) -> bool {
        !matches!(self, Elements::F32(_))
    }
}

/// Rows of heads inside a slice: the distances between batches, heads and rows.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Where they lie.
    pub elements: Elements<'a>,
    /// From one batch, head and row to the next.
    pub strides: [usize; 3],
}

/// Consecutive rows of one head in single precision.
#[derive(Clone, Copy)]
struct Strip<'a> {
    values: &'a [f32],
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Whether `extents` (batches, heads, rows) rows of `size` elements lie inside the slice.
    fn holds(&self, extents: [usize; 3], size: usize) -> bool {
        if extents.contains(&0) || size == 0 {
            return true;
        }
        let along = |axis: usize| (extents[axis] - 1).checked_mul(self.strides[axis]);
        let last = (0..3).try_fold(size, |sum, axis| sum.checked_add(along(axis)?));
        last.is_some_and(|end| end <= self.elements.len())
    }

    fn at(&self, [batch, head, row]: [usize; 3]) -> usize {
        batch * self.strides[0] + head * self.strides[1] + row * self.strides[2]
    }

    /// Rows of a head: where they lie, or widened in `scratch`.
    fn strip<'s>(
        &self,
        isa: Isa,
        place: [usize; 2],
        rows: Range<usize>,
        size: usize,
        scratch: &'s mut [f32],
    ) -> Strip<'s>
    where
        'a: 's,
    {
        let first = self.at([place[0], place[1], rows.start]);
        if let Elements::F32(values) = self.elements {
            return Strip { values: &values[first..], stride: self.strides[2] };
        }
        for (index, to) in scratch.chunks_exact_mut(size.max(1)).take(rows.len()).enumerate() {
            let range = first + index * self.strides[2]..first + index * self.strides[2] + size;
            match self.elements {
                Elements::F32(_) => {}
                Elements::F16(values) => f32_from_f16(isa, &values[range], to),
                Elements::BF16(values) => f32_from_bf16(isa, &values[range], to),
            }
        }
        Strip { values: scratch, stride: size }
    }
}

/// The sizes of an attention.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Independent attentions.
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; each serves as many consecutive heads of queries.
    pub key_heads: usize,
    /// Queries of a head.
    pub queries: usize,
    /// Keys of a head.
    pub keys: usize,
    /// Elements of a query and of a key.
    pub size: usize,
    /// Elements of a value.
    pub value_size: usize,
}

impl Sizes {
    fn group(&self) -> usize {
        self.heads / self.key_heads.max(1)
    }

    /// Heads and queries of a task.
    fn block(&self, threads: usize) -> [usize; 2] {
        let group = self.group().max(1);
        if self.queries.saturating_mul(group) <= WIDTH {
            return [group, self.queries.max(1)];
        }
        let whole = self.queries.div_ceil(WIDTH);
        let wanted = (threads * TASKS_PER_THREAD).div_ceil((self.batch * self.heads).max(1));
        let panels = (whole / wanted.max(1)).clamp(1, PANELS);
        // Tasks of nearly equal size, in whole vectors.
        let tasks = whole.div_ceil(panels);
        let queries = self.queries.div_ceil(tasks).next_multiple_of(16);
        [1, queries]
    }

    /// Values of scratch that [`Attention::run`] needs, the same for any number of keys;
    /// `is_narrow` where keys or values are not of single precision.
    pub fn scratch_len(&self, cpu: Cpu, is_narrow: bool) -> usize {
        cpu.threads.max(1) * self.part_len(cpu, is_narrow)
    }

    /// Those of one thread.
    fn part_len(&self, cpu: Cpu, is_narrow: bool) -> usize {
        let [heads, queries] = self.block(cpu.threads);
        let panels = (heads * queries).div_ceil(WIDTH);
        let wide = if is_narrow { KEYS * (self.size + self.value_size) } else { 0 };
        let scores = WIDTH * KEYS.max(self.value_size).max(self.size);
        let [row, pairs] = match Pairing::of(cpu) {
            Some(_) => [self.size.div_ceil(2), self.pairs_len().iter().sum()],
            None => [self.size, 0],
        };
        panels * WIDTH * (row + self.value_size)
            + scores
            + 2 * WIDTH * KEYS
            + (wide + pairs).next_multiple_of(16)
    }

    /// Pairs of a block of keys, and of values.
    fn pairs_len(&self) -> [usize; 2] {
        [KEYS * self.size.div_ceil(2), KEYS / 2 * self.value_size]
    }
}

/// Numbers that are added to the scores; -inf hides a key.
#[derive(Clone, Copy)]
pub struct Mask<'a> {
    /// Writes them for a batch, head and query and a range of keys.
    pub write: &'a (dyn Fn([usize; 3], Range<usize>, &mut [f32]) + Sync),
    /// Whether they differ from query to query of one head.
    pub is_by_query: bool,
}

/// Why an attention was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused(&'static str);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Refused {}

/// One attention: for each query `softmax(scale * query * keys + mask) * values`, and 0 or NaN
/// where it sees no key.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// How many of what.
    pub sizes: Sizes,
    /// (batch, heads, queries), of single precision; none where the results take their place, and
    /// hold them so far.
    pub queries: Option<Rows<'a>>,
    /// (batch, key heads, keys).
    pub keys: Rows<'a>,
    /// (batch, key heads, keys).
    pub values: Rows<'a>,
    /// What products are multiplied with.
    pub scale: f32,
    /// Where above 0, scores become `softcap * tanh(score / softcap)`.
    pub softcap: f32,
    /// The keys that a query (batch, query) can see by its place.
    pub visible: &'a (dyn Fn([usize; 2]) -> Range<usize> + Sync),
    /// What is added to scores.
    pub mask: Option<Mask<'a>>,
    /// For each head the logarithm of what is added to the softmax's sum.
    pub sinks: Option<&'a [f32]>,
    /// Whether a query all of whose scores are -inf gives NaN, as the softmax of the formula does.
    /// Else it gives 0.
    pub hidden_is_nan: bool,
}

impl Attention<'_> {
    /// Writes the results where `strides` (batch, head, query) put them in `to`.
    ///
    /// # Errors
    ///
    /// When sizes do not go together, rows lie outside their slices, results overlap, or scratch is
    /// too short.
    pub fn run(
        &self,
        cpu: Cpu,
        to: &mut [f32],
        strides: [usize; 3],
        scratch: &mut [f32],
    ) -> Result<(), Refused> {
        let sizes = self.sizes;
        let Sizes { batch, heads, key_heads, queries, keys, size, value_size } = sizes;
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            return Err(Refused("heads of queries do not divide among those of keys"));
        }
        let is_inside = self.queries.is_none_or(|rows| rows.holds([batch, heads, queries], size))
            && self.keys.holds([batch, key_heads, keys], size)
            && self.values.holds([batch, key_heads, keys], value_size)
            && self.sinks.is_none_or(|sinks| sinks.len() >= heads);
        if !is_inside || self.queries.is_some_and(|rows| rows.elements.is_narrow()) {
            return Err(Refused("queries, keys or values lie outside their tensors"));
        }
        if self.queries.is_none() && size != value_size {
            return Err(Refused("results in the place of queries are not of their size"));
        }
        if batch * heads * queries * value_size == 0 {
            return Ok(());
        }
        let is_narrow = self.keys.elements.is_narrow() || self.values.elements.is_narrow();
        let part_len = sizes.part_len(cpu, is_narrow);
        if scratch.len() < cpu.threads * part_len {
            return Err(Refused("the scratch of an attention is too short"));
        }
        let lines = Lines::new(to, [batch, heads, queries], strides, value_size);
        let lines = lines.ok_or(Refused("results overlap, or lie outside their tensor"))?;
        let block = sizes.block(cpu.threads);
        let is_few = block[0] * block[1] <= FEW;
        lines.for_each_block(cpu.threads, block, (scratch, part_len), |block, scratch| match is_few {
            true => self.run_few(cpu.isa, block, scratch),
            false => Task::new(self, cpu, block).run(scratch),
        });
        Ok(())
    }

    /// What results are multiplied with in the end. The sum is 0 if all scores are -inf: a finite
    /// maximum has a weight of 1. An empty softmax gives 0 either way.
    fn final_factor(&self, sum: f32) -> f32 {
        match sum == 0.0 {
            true if self.hidden_is_nan && self.sizes.keys > 0 => f32::NAN,
            true => 0.0,
            false => 1.0 / sum,
        }
    }

    /// The keys that a query sees by its place.
    fn span(&self, batch: usize, query: usize) -> Range<usize> {
        let Range { start, end } = (self.visible)([batch, query]);
        let end = end.min(self.sizes.keys);
        start.min(end)..end
    }

    /// The values from a query on; none where the results hold them.
    fn queries_from(&self, place: [usize; 3]) -> Option<&[f32]> {
        let rows = self.queries?;
        match rows.elements {
            Elements::F32(values) => Some(&values[rows.at(place)..]),
            _ => None,
        }
    }

    /// What scores are multiplied with before they are capped.
    fn factor(&self) -> f32 {
        if self.softcap > 0.0 { self.scale / self.softcap } else { self.scale }
    }

    /// A few queries, one after the other for each block of keys.
    fn run_few(&self, isa: Isa, mut block: LineBlock<'_, f32>, scratch: &mut [f32]) {
        let Sizes { size, value_size, .. } = self.sizes;
        let (queries, rest) = scratch.split_at_mut(FEW * size);
        let (scores, rest) = rest.split_at_mut(KEYS);
        let (added, rest) = rest.split_at_mut(KEYS);
        let places = Places::new(&block);
        let count = places.len();
        let mut seen = [(f32::NEG_INFINITY, 0.0); FEW];
        let mut all = self.sizes.keys..0;
        for (line, seen) in seen.iter_mut().enumerate().take(count) {
            let [batch, head, query] = places.at(line);
            let to = &mut queries[line * size..][..size];
            match self.queries_from([batch, head, query]) {
                Some(from) => to.copy_from_slice(&from[..size]),
                None => to.copy_from_slice(block.line([head, query])),
            }
            unary_in_place(isa, Unary::Affine { scale: self.factor(), shift: 0.0 }, to);
            if let Some(sinks) = self.sinks {
                *seen = (sinks[head], 1.0);
            }
            block.line([head, query]).fill(0.0);
            let span = self.span(batch, query);
            if !span.is_empty() {
                all = all.start.min(span.start)..all.end.max(span.end);
            }
        }
        let key_head = block.ranges[0].start / self.sizes.group();
        let (wide_keys, wide_values) = rest.split_at_mut(match self.keys.elements.is_narrow() {
            true => KEYS * size,
            false => 0,
        });
        for first in (all.start / KEYS * KEYS..all.end).step_by(KEYS) {
            let rows = first..(first + KEYS).min(all.end);
            spend(rows.len() * count * (size + value_size) / 8);
            let keys = self.keys.strip(isa, [block.outer, key_head], rows.clone(), size, wide_keys);
            let values =
                self.values.strip(isa, [block.outer, key_head], rows.clone(), value_size, wide_values);
            for (line, seen) in seen.iter_mut().take(count).enumerate() {
                let place = places.at(line);
                let span = self.span(place[0], place[2]);
                let (start, end) =
                    (span.start.clamp(rows.start, rows.end), span.end.clamp(rows.start, rows.end));
                if start >= end {
                    continue;
                }
                let scores = &mut scores[..end - start];
                let keys = &keys.values[(start - first) * keys.stride..];
                let query = &queries[line * size..][..size];
                dots(isa, keys, self.keys_stride(), query, scores);
                if self.softcap > 0.0 {
                    unary_in_place(isa, Unary::Tanh, scores);
                    unary_in_place(isa, Unary::Affine { scale: self.softcap, shift: 0.0 }, scores);
                }
                if let Some(mask) = self.mask {
                    let added = &mut added[..end - start];
                    (mask.write)(place, start..end, added);
                    scores.iter_mut().zip(added).for_each(|(score, added)| *score += *added);
                }
                let factor = weigh_row(isa, scores, &mut seen.0, &mut seen.1);
                let result = block.line([place[1], place[2]]);
                mix(
                    isa,
                    &values.values[(start - first) * values.stride..],
                    values.stride,
                    scores,
                    factor,
                    result,
                );
            }
        }
        for (line, (_, sum)) in seen.iter().take(count).enumerate() {
            let [_, head, query] = places.at(line);
            let scale = self.final_factor(*sum);
            unary_in_place(isa, Unary::Affine { scale, shift: 0.0 }, block.line([head, query]));
        }
    }

    /// From one key of a strip to the next.
    fn keys_stride(&self) -> usize {
        if self.keys.elements.is_narrow() { self.sizes.size } else { self.keys.strides[2] }
    }
}

/// The batch, heads and queries of a block, as lines in the order head, query.
#[derive(Clone)]
struct Places {
    batch: usize,
    heads: Range<usize>,
    queries: Range<usize>,
}

impl Places {
    fn new(block: &LineBlock<'_, f32>) -> Places {
        let [heads, queries] = block.ranges.clone();
        Places { batch: block.outer, heads, queries }
    }

    fn len(&self) -> usize {
        self.heads.len() * self.queries.len()
    }

    fn at(&self, line: usize) -> [usize; 3] {
        let queries = self.queries.len().max(1);
        [self.batch, self.heads.start + line / queries, self.queries.start + line % queries]
    }
}
