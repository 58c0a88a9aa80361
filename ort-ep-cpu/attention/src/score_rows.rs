//! Attention over whole rows of scores: a GEMM for the scores of a block of queries, the softmax of
//! its rows, and a GEMM with the values.

use std::ops::Range;

use ort_core::ops::nn::attention::problem::{ScoreStage, SdpaSizes};
use ort_core::{Result, ensure, error};
use ort_cpu_gemm::{Cpu, RhsSource, STEPS};
use ort_cpu_kernel::workspace::take;
use ort_cpu_matmul::real::{GemmTarget, Matrix, Real, Rhs};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::{RowBlock, StridedRows};
use ort_cpu_vector::elementwise::Unary;

use super::attention::{Attention, group};
use super::query_block::QueryBlock;
use super::rows::Rows;
use super::scores::HiddenKeys;
use super::scores::ScoreSink;

/// Queries in a block.
const ROWS: usize = 64;

/// The approximate number of scores in a block of training, which stay in the processor's cache.
const TRAINED_SCORES: usize = 1 << 15;

/// Returns the queries in a block of training, which follow from the sizes alone: each block adds
/// to the gradients of keys and values.
pub(crate) fn trained_rows(sizes: &SdpaSizes) -> usize {
    (TRAINED_SCORES / sizes.keys.max(1)).clamp(8, 256).min(sizes.queries.max(1))
}

/// Returns the elements of scratch for blocks of scores that are kept. A run may have fewer keys.
pub(crate) fn scratch_len<T: Real>(sizes: &SdpaSizes, threads: usize) -> usize {
    let tasks = Tasks::of_run(sizes, false, threads);
    let (rows, cpu) = (tasks.block.iter().product::<usize>(), tasks.inner());
    let SdpaSizes { keys, size, value_size, .. } = *sizes;
    let first = T::workspace_len(cpu, [rows, keys, size], RhsSource::Strided);
    let second = T::workspace_len(cpu, [rows, value_size, keys], RhsSource::Rows);
    // With fewer keys, a GEMM may use another blocking, which needs at most two more panels.
    let slack = 2 * 64 * STEPS * cpu.threads;
    let scores = (rows * (keys + 1)).next_multiple_of(16);
    let results = (rows * value_size).next_multiple_of(16);
    tasks.parts * (scores + results + first.max(second).next_multiple_of(16) + slack)
}

/// The split of an attention into tasks.
#[derive(Clone, Copy)]
pub(crate) struct Tasks {
    /// The heads and queries of a task.
    block: [usize; 2],
    /// Tasks that run at a time.
    parts: usize,
    threads: usize,
}

impl Tasks {
    /// Splits into blocks of up to `rows` queries.
    pub(crate) fn new(sizes: &SdpaSizes, rows: usize, threads: usize) -> Tasks {
        // Decoding: one GEMM covers all heads that share keys, with a row per head.
        let block = if sizes.queries == 1 { [group(sizes).max(1), 1] } else { [1, rows.max(1)] };
        let extents = [sizes.batch, sizes.heads, sizes.queries];
        let count = StridedRows::<u8>::block_count(extents, block);
        Tasks { block, parts: threads.min(count).max(1), threads: threads.max(1) }
    }

    /// Returns the split of a run.
    pub(crate) fn of_run(sizes: &SdpaSizes, is_trained: bool, threads: usize) -> Tasks {
        let rows = if is_trained { trained_rows(sizes) } else { sizes.queries.min(ROWS) };
        Tasks::new(sizes, rows, threads)
    }

    /// Returns the heads and queries of a task.
    pub(crate) fn block(&self) -> [usize; 2] {
        self.block
    }

    /// Returns how many tasks run at a time, each with scratch of its own.
    pub(crate) fn parts(&self) -> usize {
        self.parts
    }

    /// A lone task gives its GEMMs all threads; several tasks run in parallel on one thread each.
    /// Scores are computed in float32, whatever the session's precision.
    pub(crate) fn inner(&self) -> Cpu {
        Cpu::with_threads(if self.parts == 1 { self.threads } else { 1 })
    }
}

/// An attention over whole rows of scores.
pub(crate) struct ScoreRows<'p, 'a, T: Real> {
    pub(crate) attention: &'p Attention<'a, T>,
    queries: &'p Rows<'a, T>,
    sink: ScoreSink<'p, T>,
    cpu: Cpu,
}

impl<'p, 'a, T: Real> ScoreRows<'p, 'a, T> {
    pub(crate) fn new(
        attention: &'p Attention<'a, T>,
        sink: ScoreSink<'p, T>,
        cpu: Cpu,
    ) -> Result<ScoreRows<'p, 'a, T>> {
        let Some(queries) = &attention.queries else {
            return Err(error!(InvalidArgument, "results in the place of queries need streamed scores"));
        };
        ensure!(
            !attention.keys.elements.is_narrow() && !attention.values.elements.is_narrow(),
            Fail,
            "scores over keys or values in half precision are not kept"
        );
        Ok(ScoreRows { attention, queries, sink, cpu })
    }

    /// Computes the results of a block. `kept` holds the rows of the output that keeps the scores.
    pub(crate) fn run_block(
        &self,
        mut block: RowBlock<'_, T>,
        mut kept: RowBlock<'_, T>,
        scratch: &mut [T],
    ) -> Result<()> {
        let places = QueryBlock::new(&block);
        let (rows, value_size) = (places.len(), self.attention.sizes.value_size);
        let keys = self.key_count(&places);
        let width = self.width(keys);
        let mut rest = scratch;
        let weights = &mut take(&mut rest, (rows * width).next_multiple_of(16))?[..rows * width];
        self.weigh(&places, keys, (&mut *weights, &mut *rest), Some(&mut kept))?;
        let weights = Matrix { values: &*weights, shape: [rows, keys], strides: [width, 1] };
        let values = Rhs::Plain(self.values(&places, keys)?);
        if let Some(to) = block.adjacent() {
            return T::multiply(self.cpu, weights, values, GemmTarget::write(to, value_size), rest);
        }
        let results = take(&mut rest, (rows * value_size).next_multiple_of(16))?;
        T::multiply(self.cpu, weights, values, GemmTarget::write(&mut *results, value_size), rest)?;
        for (row, result) in results.chunks_exact(value_size).take(rows).enumerate() {
            let [_, head, query] = places.at(row);
            block.row([head, query]).copy_from_slice(result);
        }
        Ok(())
    }

    /// Returns the values per row: the sink takes one more column.
    pub(crate) fn width(&self, keys: usize) -> usize {
        keys + usize::from(self.attention.sinks.is_some())
    }

    /// Returns how many keys need scores.
    pub(crate) fn key_count(&self, places: &QueryBlock) -> usize {
        if self.sink.needs_all() || self.attention.hidden == HiddenKeys::Lowered {
            return self.attention.sizes.keys;
        }
        let ends = places.queries.clone().map(|query| self.attention.span(places.batch, query).end);
        ends.max().unwrap_or(0)
    }

    /// Returns the queries of a block: rows of one head, or one of each head.
    pub(crate) fn queries(&self, places: &QueryBlock) -> Result<Matrix<'a, T>> {
        let axis = if places.heads.len() > 1 { 1 } else { 2 };
        let values = self.queries.from([places.batch, places.heads.start, places.queries.start]);
        let shape = [places.len(), self.attention.sizes.size];
        Ok(Matrix { values: full(values)?, shape, strides: [self.queries.strides[axis], 1] })
    }

    /// Returns the first `count` keys of a block, as rows.
    pub(crate) fn keys(&self, places: &QueryBlock, count: usize) -> Result<Matrix<'a, T>> {
        self.rows(&self.attention.keys, places, [count, self.attention.sizes.size])
    }

    /// Returns the first `count` values of a block, as rows.
    pub(crate) fn values(&self, places: &QueryBlock, count: usize) -> Result<Matrix<'a, T>> {
        self.rows(&self.attention.values, places, [count, self.attention.sizes.value_size])
    }

    fn rows(&self, rows: &Rows<'a, T>, places: &QueryBlock, shape: [usize; 2]) -> Result<Matrix<'a, T>> {
        let head = places.heads.start / self.attention.group();
        let values = full(rows.from([places.batch, head, 0]))?;
        Ok(Matrix { values, shape, strides: [rows.strides[2], 1] })
    }

    /// Computes the weights of a block, a row of [`ScoreRows::width`] values for each query. `kept`
    /// holds the rows of the output that keeps the scores.
    pub(crate) fn weigh(
        &self,
        places: &QueryBlock,
        keys: usize,
        (weights, workspace): (&mut [T], &mut [T]),
        mut kept: Option<&mut RowBlock<'_, T>>,
    ) -> Result<()> {
        let width = self.width(keys);
        let transposed = transpose(self.keys(places, keys)?);
        let scores = GemmTarget::write(&mut *weights, width);
        T::multiply(self.cpu, self.queries(places)?, Rhs::Plain(transposed), scores, workspace)?;
        // Without keys, a row is empty, but a row that keeps its scores is not.
        for row in 0..places.len() {
            spend(8 * keys);
            let place = places.at(row);
            let kept = kept.as_mut().map_or(&mut [][..], |kept| kept.row([place[1], place[2]]));
            self.weigh_row(place, &mut weights[row * width..][..width], keys, kept);
        }
        Ok(())
    }

    /// Turns a row of dot products into weights.
    fn weigh_row(&self, place: [usize; 3], row: &mut [T], keys: usize, kept: &mut [T]) {
        let (attention, sink) = (self.attention, &self.sink);
        let scores = &mut row[..keys];
        if attention.scale != 1.0 {
            T::scale(attention.scale, scores);
        }
        sink.take(ScoreStage::Scaled, place, (&mut *scores, 0..keys), kept);
        if attention.softcap > 0.0 {
            T::divide(scores, attention.softcap);
            T::map(Unary::Tanh, scores);
            T::scale(f64::from(attention.softcap), scores);
        }
        sink.take(ScoreStage::Capped, place, (&mut *scores, 0..keys), kept);
        let visible = attention.span(place[0], place[2]);
        let is_lowered = attention.hidden == HiddenKeys::Lowered;
        let counted = if is_lowered { 0..keys } else { visible.clone() };
        if let Some(mask) = attention.mask {
            mask.apply(place, counted.clone(), &mut scores[counted.clone()]);
        }
        if is_lowered {
            let lowest = T::from_f64(f64::from(f32::MIN));
            scores[visible.end..].iter_mut().for_each(|score| *score = *score + lowest);
        }
        sink.take(ScoreStage::Masked, place, (&mut *scores, counted.clone()), kept);
        self.softmax(place[1], row, keys, counted.clone());
        sink.take(ScoreStage::Weights, place, (&mut row[..keys], counted), kept);
    }

    /// Computes the softmax of the scores that count. All other weights are 0.
    fn softmax(&self, head: usize, row: &mut [T], keys: usize, counted: Range<usize>) {
        let hidden = T::from_f64(f64::NEG_INFINITY);
        row[..counted.start].fill(T::ZERO);
        if let Some(sinks) = self.attention.sinks {
            // The sink is one more key in the softmax, and its weight is dropped.
            row[counted.end] = sinks[head];
            T::softmax(&mut row[counted.start..=counted.end]);
            row[counted.end..].fill(T::ZERO);
            return;
        }
        row[counted.end..].fill(T::ZERO);
        if row[counted.clone()].iter().any(|score| *score != hidden) {
            T::softmax(&mut row[counted]);
        } else if self.attention.hidden == HiddenKeys::ExcludedOrNan {
            row[..keys].fill(T::from_f64(f64::NAN));
        } else {
            row[counted].fill(T::ZERO);
        }
    }
}

/// Returns the transpose of a matrix.
pub(crate) fn transpose<T>(Matrix { values, shape, strides }: Matrix<'_, T>) -> Matrix<'_, T> {
    Matrix { values, shape: [shape[1], shape[0]], strides: [strides[1], strides[0]] }
}

/// Returns values that are not in half precision, which [`ScoreRows::new`] checked.
fn full<T>(values: Option<&[T]>) -> Result<&[T]> {
    values.ok_or_else(|| error!(Fail, "rows in half precision have no values in full"))
}
