//! The types that attention computes in, and the choice of its loops.

use ort_core::ops::nn::attention::problem::SdpaSizes;
use ort_core::{Result, ensure, error};
use ort_cpu_gemm::Cpu;
use ort_cpu_matmul::real::Real;
use ort_cpu_threads::parallel::{RowBlock, StridedRows};

use super::attention::Attention;
use super::failure::Failure;
use super::score_rows::{self, ScoreRows, Tasks};
use super::scores::{HiddenKeys, ScoreUse, Scores};
use super::{blocks, streaming};

/// A type that attention computes in.
pub trait Compute: Real {
    /// Computes a block of queries over streamed keys, if the type has such loops.
    const STREAM: Option<StreamBlock<Self>>;
}

/// Computes a block of queries over streamed keys.
pub type StreamBlock<T> = fn(&Attention<'_, T>, Cpu, RowBlock<'_, T>, &mut [T]);

impl Compute for f32 {
    const STREAM: Option<StreamBlock<f32>> = Some(streaming::run_block);
}

impl Compute for f64 {
    const STREAM: Option<StreamBlock<f64>> = None;
}

/// Returns the elements of scratch that [`Attention::run`] needs. `keeps` says that scores are kept
/// or that keys are [`HiddenKeys::Lowered`], and `is_half` that keys or values may be in half
/// precision. A run may have fewer keys than `sizes`.
pub fn scratch_len<T: Compute>(sizes: &SdpaSizes, cpu: Cpu, keeps: bool, is_half: bool) -> usize {
    if T::STREAM.is_some() && !keeps {
        return blocks::scratch_len(sizes, cpu, is_half, [0; 2]);
    }
    score_rows::scratch_len::<T>(sizes, cpu.threads)
}

/// Returns the elements of scratch that [`Attention::run`] needs for a [`GridBias`] over a grid of
/// these rows and columns, and scores that nothing reads. `is_half` is that of [`scratch_len`].
///
/// [`GridBias`]: crate::GridBias
pub fn grid_scratch_len<T: Compute>(sizes: &SdpaSizes, cpu: Cpu, is_half: bool, grid: [usize; 2]) -> usize {
    match T::STREAM {
        Some(_) => blocks::scratch_len(sizes, cpu, is_half, grid),
        None => score_rows::scratch_len::<T>(sizes, cpu.threads),
    }
}

impl<T: Compute> Attention<'_, T> {
    /// Computes the attention into `to`, at `strides` (batch, head, query).
    ///
    /// # Errors
    ///
    /// If sizes do not match, rows are outside their slices, results overlap, or scratch is too
    /// short.
    pub fn run(
        &self,
        cpu: Cpu,
        (to, strides): (&mut [T], [usize; 3]),
        scores: Scores<'_, T>,
        scratch: &mut [T],
    ) -> Result<()> {
        self.check()?;
        let SdpaSizes { batch, heads, queries, value_size, .. } = self.sizes;
        if batch * heads * queries * value_size == 0 {
            return Ok(());
        }
        let lines = StridedRows::new(to, [batch, heads, queries], strides, value_size);
        let lines =
            lines.ok_or_else(|| error!(InvalidArgument, "results overlap, or lie outside their tensor"))?;
        match (T::STREAM, &scores) {
            (Some(stream), Scores::Unread) if self.hidden != HiddenKeys::Lowered => {
                self.run_streamed(stream, cpu, lines, scratch)
            }
            _ => self.run_rows(cpu.threads, lines, scores, scratch),
        }
    }

    /// Computes blocks of queries over streamed keys.
    fn run_streamed(
        &self,
        stream: StreamBlock<T>,
        cpu: Cpu,
        lines: StridedRows<'_, T>,
        scratch: &mut [T],
    ) -> Result<()> {
        let is_half = self.keys.elements.is_narrow() || self.values.elements.is_narrow();
        let grid = self.mask.and_then(|mask| mask.grid()).map_or([0; 2], |bias| bias.grid());
        let part_len = blocks::part_len(&self.sizes, cpu, is_half, grid);
        let is_enough = scratch.len() >= cpu.threads * part_len;
        ensure!(is_enough, Fail, "the scratch of an attention is too short");
        let block = blocks::block(&self.sizes, cpu.threads);
        lines.for_each_block(cpu.threads, block, (scratch, part_len), |block, scratch| {
            stream(self, cpu, block, scratch);
        });
        Ok(())
    }

    /// Computes blocks of queries over whole rows of scores.
    fn run_rows(
        &self,
        threads: usize,
        lines: StridedRows<'_, T>,
        scores: Scores<'_, T>,
        scratch: &mut [T],
    ) -> Result<()> {
        let SdpaSizes { batch, heads, queries, keys, .. } = self.sizes;
        let (ScoreUse { sink, is_trained }, kept) = scores.split();
        let keys = if sink.keeps() { keys } else { 0 };
        let strides = [heads * queries * keys, queries * keys, keys];
        let kept = StridedRows::new(kept, [batch, heads, queries], strides, keys);
        let kept = kept.ok_or_else(|| error!(InvalidArgument, "the scores lie outside their tensor"))?;
        let tasks = Tasks::of_run(&self.sizes, is_trained, threads);
        let (parts, block) = (tasks.parts(), tasks.block());
        // The scratch was planned for as many keys or more.
        let part_len = scratch.len() / parts / 16 * 16;
        ensure!(part_len > 0, Fail, "the scratch of an attention is too short");
        let rows = ScoreRows::new(self, sink, tasks.inner())?;
        let failure = Failure::default();
        lines.for_each_block_of_two(kept, parts, block, (scratch, part_len), |block, kept, scratch| {
            failure.keep(rows.run_block(block, kept, scratch));
        });
        failure.into_result()
    }
}
