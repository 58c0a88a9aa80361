//! Scaled dot-product attention over heads with arbitrary strides, without a materialised score
//! matrix (FlashAttention).
//!
//! A task is a block of queries of one head. It streams the keys and values in blocks that fit the
//! near caches. For each query it keeps the running maximum score, the running sum of weights and
//! the weighted sum of values; see [`simd::attention`](ort_cpu_vector::simd::attention) for the
//! loops and the references. A few queries (a decoding step) take another path: the KV cache is
//! read once, a row at a time.
//!
//! In [`Precision::Bf16`](ort_cpu_gemm::Precision), queries, keys, values and weights are rounded
//! to bfloat16, while scores and accumulators are `f32`. Keys and values are converted to pairs
//! block by block. The path for few queries stays in `f32`, because it is bound by reading and not
//! by multiplying.
//!
//! Nothing here allocates: the caller brings scratch of [`Sizes::scratch_len`]. A result has the
//! same bits for any number of threads, because a query depends only on its own keys, in their
//! order.

// A panic in a test merely fails the test; a panic in this code would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]
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

use ort_cpu_gemm::{Cpu, Pairing};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::{RowBlock, StridedRows};
use ort_cpu_vector::convert::{f32_from_bf16, f32_from_f16};
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::simd::attention::{WIDTH, dots, mix, weigh_row};

/// Keys in a block: the scores of a panel then stay in L1.
const KEYS: usize = 128;

/// The maximum number of panels in a task. They share the loads of keys and values.
const PANELS: usize = 4;

/// Tasks per thread, to balance uneven work.
const TASKS_PER_THREAD: usize = 4;

/// The maximum number of queries sharing keys for which each is multiplied with the keys on its
/// own.
const FEW: usize = 4;

/// The elements of a tensor of heads.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// IEEE single precision.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// bfloat16.
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

/// Rows of heads inside a slice, at fixed strides.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// The slice.
    pub elements: Elements<'a>,
    /// Strides from one batch, head and row to the next.
    pub strides: [usize; 3],
}

/// Consecutive rows of one head in `f32`.
#[derive(Clone, Copy)]
struct Strip<'a> {
    values: &'a [f32],
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Whether `extents` (batches, heads, rows) of rows with `size` elements are inside the slice.
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

    /// Returns rows of a head: in place, or widened to `f32` in `scratch`.
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
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / key_heads` consecutive query heads (grouped-query
    /// attention).
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

    /// Returns the heads and the queries of a task.
    fn block(&self, threads: usize) -> [usize; 2] {
        let group = self.group().max(1);
        // All query heads of a key head fit in one panel, so they share one pass over the keys.
        if self.queries.saturating_mul(group) <= WIDTH {
            return [group, self.queries.max(1)];
        }
        let whole = self.queries.div_ceil(WIDTH);
        let wanted = (threads * TASKS_PER_THREAD).div_ceil((self.batch * self.heads).max(1));
        // More panels per task share more loads of keys and values, but leave fewer tasks for the
        // threads.
        let panels = (whole / wanted.max(1)).clamp(1, PANELS);
        // Tasks of nearly equal size, in whole vectors.
        let tasks = whole.div_ceil(panels);
        let queries = self.queries.div_ceil(tasks).next_multiple_of(16);
        [1, queries]
    }

    /// Returns the `f32` elements of scratch that [`Attention::run`] needs, regardless of the
    /// number of keys. `is_narrow` says that keys or values are not `f32`.
    pub fn scratch_len(&self, cpu: Cpu, is_narrow: bool) -> usize {
        cpu.threads.max(1) * self.part_len(cpu, is_narrow)
    }

    /// The scratch of one thread.
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

    /// Returns the bf16 pairs of a block of keys, and of a block of values.
    fn pairs_len(&self) -> [usize; 2] {
        [KEYS * self.size.div_ceil(2), KEYS / 2 * self.value_size]
    }
}

/// Values added to the scores; -inf hides a key.
#[derive(Clone, Copy)]
pub struct Mask<'a> {
    /// Writes the values for a batch, head and query and a range of keys.
    pub write: &'a (dyn Fn([usize; 3], Range<usize>, &mut [f32]) + Sync),
    /// Whether they differ between the queries of one head.
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

/// One attention: `softmax(scale * query * keys + mask) * values` for each query. A query that sees
/// no key yields 0 or NaN.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// The sizes.
    pub sizes: Sizes,
    /// (batch, heads, queries), in `f32`. If `None`, the output buffer holds the queries, and the
    /// results replace them in place.
    pub queries: Option<Rows<'a>>,
    /// (batch, key heads, keys).
    pub keys: Rows<'a>,
    /// (batch, key heads, keys).
    pub values: Rows<'a>,
    /// Scales the dot products.
    pub scale: f32,
    /// If positive, scores become `softcap * tanh(score / softcap)`.
    pub softcap: f32,
    /// The keys that a query (batch, query) can see by its position.
    pub visible: &'a (dyn Fn([usize; 2]) -> Range<usize> + Sync),
    /// Added to the scores.
    pub mask: Option<Mask<'a>>,
    /// For each head, the logarithm of a term added to the softmax's sum (attention sink).
    pub sinks: Option<&'a [f32]>,
    /// Whether a query whose scores are all -inf yields NaN, as the softmax formula does. Otherwise
    /// it yields 0.
    pub hidden_is_nan: bool,
}

impl Attention<'_> {
    /// Computes the attention into `to`, at `strides` (batch, head, query).
    ///
    /// # Errors
    ///
    /// If sizes do not match, rows are outside their slices, results overlap, or scratch is too
    /// short.
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
            return Err(Refused("the number of query heads is not a multiple of the number of key heads"));
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
        let lines = StridedRows::new(to, [batch, heads, queries], strides, value_size);
        let lines = lines.ok_or(Refused("results overlap, or lie outside their tensor"))?;
        let block = sizes.block(cpu.threads);
        let is_few = block[0] * block[1] <= FEW;
        lines.for_each_block(cpu.threads, block, (scratch, part_len), |block, scratch| match is_few {
            true => self.run_few(cpu.isa, block, scratch),
            false => Task::new(self, cpu, block).run(scratch),
        });
        Ok(())
    }

    /// Returns the final scale of a result. The sum is 0 only if all scores are -inf, because a
    /// finite maximum has a weight of 1. A softmax over no keys yields 0 in either mode.
    fn final_factor(&self, sum: f32) -> f32 {
        match sum == 0.0 {
            true if self.hidden_is_nan && self.sizes.keys > 0 => f32::NAN,
            true => 0.0,
            false => 1.0 / sum,
        }
    }

    /// Returns the keys that a query sees by its position.
    fn span(&self, batch: usize, query: usize) -> Range<usize> {
        let Range { start, end } = (self.visible)([batch, query]);
        let end = end.min(self.sizes.keys);
        start.min(end)..end
    }

    /// Returns the values of the queries from one on, or `None` if the output buffer holds them.
    fn queries_from(&self, place: [usize; 3]) -> Option<&[f32]> {
        let rows = self.queries?;
        match rows.elements {
            Elements::F32(values) => Some(&values[rows.at(place)..]),
            _ => None,
        }
    }

    /// Returns the scale of the scores before the softcap.
    fn factor(&self) -> f32 {
        if self.softcap > 0.0 { self.scale / self.softcap } else { self.scale }
    }

    /// Computes a few queries, one after the other for each block of keys.
    fn run_few(&self, isa: Isa, mut block: RowBlock<'_, f32>, scratch: &mut [f32]) {
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
                None => to.copy_from_slice(block.row([head, query])),
            }
            unary_in_place(isa, Unary::Affine { scale: self.factor(), shift: 0.0 }, to);
            if let Some(sinks) = self.sinks {
                // A sink acts as a key with this score and a value of 0.
                *seen = (sinks[head], 1.0);
            }
            // The query was copied out, so its row can now accumulate the result.
            block.row([head, query]).fill(0.0);
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
        // Blocks start at multiples of `KEYS`, so that the order of a query's sums does not depend
        // on its neighbours.
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
                let result = block.row([place[1], place[2]]);
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
            unary_in_place(isa, Unary::Affine { scale, shift: 0.0 }, block.row([head, query]));
        }
    }

    /// Stride from one key of a strip to the next.
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
    fn new(block: &RowBlock<'_, f32>) -> Places {
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
