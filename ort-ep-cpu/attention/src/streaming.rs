//! Streamed scores: the loops for few queries and for many.

use ort_cpu_gemm::Cpu;
use ort_cpu_threads::parallel::RowBlock;

use super::attention::Attention;
use super::few::{self, FEW};
use super::panels::Panels;

/// Computes a block of queries: a few one after the other, more in panels.
pub(crate) fn run_block(attention: &Attention<'_>, cpu: Cpu, block: RowBlock<'_, f32>, scratch: &mut [f32]) {
    match block.ranges[0].len() * block.ranges[1].len() <= FEW {
        true => few::run(attention, cpu.isa, block, scratch),
        false => Panels::new(attention, cpu, block).run(scratch),
    }
}
