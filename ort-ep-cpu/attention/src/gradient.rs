//! The gradient of attention: weights are computed again, a block of queries at a time.
//!
//! With weights `P`, dropped weights `P'` and upstream gradient `dO`: `dV = P'^T dO`,
//! `dP' = dO V^T`, `dS = P' dP' - P rowsum(P' dP')`, `dQ = dS K`, `dK = dS^T Q`.
//!
//! Heads are computed independently, and each head adds its blocks in order. The number of threads
//! therefore changes no bits.

use num_traits::Float;
use ort_core::ops::nn::attention::problem::SdpaSizes;
use ort_core::{Result, ensure};
use ort_cpu_gemm::{Cpu, RhsSource};
use ort_cpu_kernel::units::{for_each_unit, part_count};
use ort_cpu_kernel::workspace::take;
use ort_cpu_matmul::real::{GemmTarget, Matrix, Real, Rhs};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::training::score_gradient;

use super::attention::Attention;
use super::compute::Compute;
use super::failure::Failure;
use super::query_block::QueryBlock;
use super::score_rows::{ScoreRows, Tasks, trained_rows, transpose};
use super::scores::HiddenKeys;
use super::scores::{ScoreSink, WeightMap};

/// The gradients by queries, keys and values, where they are wanted: each (batch, heads, rows,
/// size).
pub struct Gradients<'s, T> {
    /// By the queries.
    pub by_queries: Option<&'s mut [T]>,
    /// By the keys.
    pub by_keys: Option<&'s mut [T]>,
    /// By the values.
    pub by_values: Option<&'s mut [T]>,
}

/// Returns the elements of scratch that a training pass needs: [`Attention::run`] with
/// [`Scores::Trained`](crate::Scores::Trained), or [`Attention::gradients`] if `is_backward`.
pub fn training_scratch_len<T: Compute>(
    sizes: &SdpaSizes,
    threads: usize,
    is_backward: bool,
    drops: bool,
) -> usize {
    if is_backward {
        return part_count(threads, sizes.batch * sizes.heads) * part_len::<T>(sizes, threads, drops);
    }
    let tasks = Tasks::new(sizes, trained_rows(sizes), threads);
    let workspace = workspace_len(sizes, |rows| {
        let shapes = forward_shapes::<T>(sizes, tasks.inner(), rows);
        shapes.into_iter().max().unwrap_or(0)
    });
    tasks.parts() * (block_len(sizes) + workspace)
}

/// Returns the length of a block's matrix of scores.
fn block_len(sizes: &SdpaSizes) -> usize {
    (trained_rows(sizes) * sizes.keys).next_multiple_of(16)
}

/// Returns the workspaces of a block's GEMMs in the forward pass.
fn forward_shapes<T: Real>(sizes: &SdpaSizes, cpu: Cpu, rows: usize) -> [usize; 2] {
    let SdpaSizes { keys, size, value_size, .. } = *sizes;
    [
        T::workspace_len(cpu, [rows, keys, size], RhsSource::Strided),
        T::workspace_len(cpu, [rows, value_size, keys], RhsSource::Rows),
    ]
}

/// Returns the larger workspace of a whole block and of the last one, which may have fewer rows.
fn workspace_len(sizes: &SdpaSizes, len: impl Fn(usize) -> usize) -> usize {
    let rows = trained_rows(sizes);
    len(rows).max(len(sizes.queries % rows)).next_multiple_of(16)
}

/// Returns the scratch of a part of the backward pass.
fn part_len<T: Real>(sizes: &SdpaSizes, threads: usize, drops: bool) -> usize {
    let (SdpaSizes { keys, size, value_size, .. }, cpu) = (*sizes, head_cpu(sizes, threads));
    let workspace = workspace_len(sizes, |rows| {
        let backward = [
            T::workspace_len(cpu, [rows, keys, value_size], RhsSource::Strided),
            T::workspace_len(cpu, [keys, value_size, rows], RhsSource::Rows),
            T::workspace_len(cpu, [rows, size, keys], RhsSource::Rows),
            T::workspace_len(cpu, [keys, size, rows], RhsSource::Rows),
        ];
        forward_shapes::<T>(sizes, cpu, rows).into_iter().chain(backward).max().unwrap_or(0)
    });
    // Weights and their gradients, and a copy of the weights if some are dropped.
    (2 + usize::from(drops)) * block_len(sizes) + workspace
}

/// Returns the CPU configuration of GEMMs inside a head, which use threads only if there is one
/// head.
fn head_cpu(sizes: &SdpaSizes, threads: usize) -> Cpu {
    Cpu::with_threads(if sizes.batch * sizes.heads == 1 { threads } else { 1 })
}

impl<T: Compute + Float> Attention<'_, T> {
    /// Computes the gradients of [`Attention::run`] with
    /// [`Scores::Trained`](crate::Scores::Trained), from those of its result, `upstream`: (batch,
    /// heads, queries, value size). `map` is what changed the weights.
    ///
    /// # Errors
    ///
    /// If sizes do not match, rows are outside their slices, scratch is too short, or the scores
    /// are other than dot products with a mask.
    pub fn gradients(
        &self,
        threads: usize,
        upstream: &[T],
        map: Option<&WeightMap<'_, T>>,
        to: Gradients<'_, T>,
        scratch: &mut [T],
    ) -> Result<()> {
        self.check()?;
        let sizes = &self.sizes;
        let is_plain = sizes.heads == sizes.key_heads
            && self.scale == 1.0
            && self.softcap <= 0.0
            && self.sinks.is_none()
            && self.hidden != HiddenKeys::Lowered;
        ensure!(
            is_plain,
            NotImplemented,
            "the gradient of an attention with scale, softcap, sinks or groups"
        );
        let heads = sizes.batch * sizes.heads;
        ensure!(
            upstream.len() == heads * sizes.queries * sizes.value_size,
            InvalidArgument,
            "the upstream gradient has {} elements for an output of {heads} heads, {} queries and {} values",
            upstream.len(),
            sizes.queries,
            sizes.value_size
        );
        let cpu = head_cpu(sizes, threads);
        let backward = Backward { rows: ScoreRows::new(self, ScoreSink::None, cpu)?, upstream, map, cpu };
        let mut tasks = to.by_head(sizes);
        let failure = Failure::default();
        let scratch = (scratch, part_len::<T>(sizes, threads, map.is_some()));
        for_each_unit(threads, (&mut tasks, 1), scratch, |_, tasks, scratch| {
            for task in tasks {
                failure.keep(backward.run(task, scratch));
            }
        });
        failure.into_result()
    }
}

impl<'s, T> Gradients<'s, T> {
    /// Splits into the gradients of each head.
    fn by_head(self, sizes: &SdpaSizes) -> Vec<HeadGradients<'s, T>> {
        let SdpaSizes { queries, keys, size, value_size, .. } = *sizes;
        let split = |values: Option<&'s mut [T]>, len: usize| {
            values.map(|values| values.chunks_exact_mut(len.max(1)))
        };
        let mut by_queries = split(self.by_queries, queries * size);
        let mut by_keys = split(self.by_keys, keys * size);
        let mut by_values = split(self.by_values, keys * value_size);
        let task = |head| HeadGradients {
            place: [head / sizes.heads, head % sizes.heads],
            by_queries: by_queries.as_mut().and_then(Iterator::next),
            by_keys: by_keys.as_mut().and_then(Iterator::next),
            by_values: by_values.as_mut().and_then(Iterator::next),
        };
        (0..sizes.batch * sizes.heads).map(task).collect()
    }
}

/// The gradients of one head.
struct HeadGradients<'s, T> {
    /// Batch and head.
    place: [usize; 2],
    by_queries: Option<&'s mut [T]>,
    by_keys: Option<&'s mut [T]>,
    by_values: Option<&'s mut [T]>,
}

/// What all heads read.
struct Backward<'p, 'a, T: Real> {
    rows: ScoreRows<'p, 'a, T>,
    upstream: &'p [T],
    map: Option<&'p WeightMap<'p, T>>,
    cpu: Cpu,
}

/// The matrices of a block: weights, their gradients, and the weights after dropout if they differ.
struct Block<'s, T> {
    weights: &'s mut [T],
    gradients: &'s mut [T],
    dropped: Option<&'s mut [T]>,
}

impl<T: Compute + Float> Backward<'_, '_, T> {
    fn run(&self, task: &mut HeadGradients<'_, T>, scratch: &mut [T]) -> Result<()> {
        let sizes = &self.rows.attention.sizes;
        let (mut rest, len, rows) = (scratch, block_len(sizes), trained_rows(sizes));
        let weights = take(&mut rest, len)?;
        let gradients = take(&mut rest, len)?;
        let mut dropped = if self.map.is_some() { Some(take(&mut rest, len)?) } else { None };
        let [batch, head] = task.place;
        for first in (0..sizes.queries).step_by(rows) {
            let queries = first..sizes.queries.min(first + rows);
            let len = queries.len() * sizes.keys;
            let places = QueryBlock { batch, heads: head..head + 1, queries };
            let mut block = Block {
                weights: &mut weights[..len],
                gradients: &mut gradients[..len],
                dropped: dropped.as_deref_mut().map(|dropped| &mut dropped[..len]),
            };
            self.weigh(&places, &mut block, rest)?;
            self.score_gradients(&places, task, &mut block, rest)?;
            self.operand_gradients(&places, task, block.gradients, rest)?;
        }
        Ok(())
    }

    /// Computes the weights of a block, before and after dropout: the gradient needs both.
    fn weigh(&self, places: &QueryBlock, block: &mut Block<'_, T>, workspace: &mut [T]) -> Result<()> {
        let keys = self.rows.attention.sizes.keys;
        self.rows.weigh(places, keys, (block.weights, workspace), None)?;
        if let (Some(map), Some(dropped)) = (self.map, &mut block.dropped) {
            dropped.copy_from_slice(block.weights);
            for (row, weights) in dropped.chunks_exact_mut(keys.max(1)).enumerate() {
                map(places.at(row), weights);
            }
        }
        Ok(())
    }

    /// Computes the gradients of a block's scores, and adds those of the values.
    fn score_gradients(
        &self,
        places: &QueryBlock,
        task: &mut HeadGradients<'_, T>,
        block: &mut Block<'_, T>,
        workspace: &mut [T],
    ) -> Result<()> {
        let attention = self.rows.attention;
        let SdpaSizes { heads, queries, keys, value_size, .. } = attention.sizes;
        let [batch, head, first] = places.at(0);
        let rows = places.len();
        let dropped: &[T] = block.dropped.as_deref().unwrap_or(block.weights);
        let start = ((batch * heads + head) * queries + first) * value_size;
        let upstream = Matrix::rows(&self.upstream[start..][..rows * value_size], rows, value_size);
        if let Some(by_values) = &mut task.by_values {
            // The first block overwrites the gradients of keys and values, later blocks add to
            // them.
            let turned = Matrix::transposed(dropped, keys, rows);
            let to = GemmTarget { values: by_values, row_stride: value_size, add: first > 0 };
            T::multiply(self.cpu, turned, Rhs::Plain(upstream), to, workspace)?;
        }
        let turned = Rhs::Plain(transpose(self.rows.values(places, keys)?));
        let to = GemmTarget::write(&mut *block.gradients, keys);
        T::multiply(self.cpu, upstream, turned, to, workspace)?;
        score_gradient(Isa::current(), keys, block.weights, dropped, block.gradients);
        if let Some(mask) = attention.mask {
            for (row, gradients) in block.gradients.chunks_exact_mut(keys.max(1)).enumerate() {
                mask.clear_gradients(places.at(row), gradients);
            }
        }
        Ok(())
    }

    /// Computes the gradients of a block's queries, and adds those of the keys.
    fn operand_gradients(
        &self,
        places: &QueryBlock,
        task: &mut HeadGradients<'_, T>,
        gradients: &[T],
        workspace: &mut [T],
    ) -> Result<()> {
        let SdpaSizes { keys, size, .. } = self.rows.attention.sizes;
        let (rows, first) = (places.len(), places.queries.start);
        if let Some(by_queries) = &mut task.by_queries {
            let by_queries = &mut by_queries[first * size..][..rows * size];
            let scores = Matrix::rows(gradients, rows, keys);
            let keys = Rhs::Plain(self.rows.keys(places, keys)?);
            T::multiply(self.cpu, scores, keys, GemmTarget::write(by_queries, size), workspace)?;
        }
        if let Some(by_keys) = &mut task.by_keys {
            let turned = Matrix::transposed(gradients, keys, rows);
            let queries = Rhs::Plain(self.rows.queries(places)?);
            let to = GemmTarget { values: by_keys, row_stride: size, add: first > 0 };
            T::multiply(self.cpu, turned, queries, to, workspace)?;
        }
        Ok(())
    }
}
