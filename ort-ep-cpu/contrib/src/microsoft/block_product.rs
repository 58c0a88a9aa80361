//! A GEMM of `f32` rows with block-quantized weights, the core of `MatMulNBits` and `QMoE`.

use ort_core::Result;
use ort_cpu_gemm::{
    Blocks, Cpu, Gemm, LhsOperand, RhsOperand, RhsSource, Step, Strided, transpose, workspace_len,
};
use ort_cpu_kernel::workspace::{take, whole_lines};
use ort_cpu_matmul::refused;
use ort_cpu_vector::simd::blocks::{BlockLayout, arrange};

/// The GEMM of one layout of weights. Few rows go to kernels that dequantize on the fly, more rows
/// to the general GEMM.
#[derive(Clone, Copy)]
pub(super) struct BlockProduct {
    pub(super) layout: BlockLayout,
    /// Whether the rows may be quantized to 8 bits, block by block.
    pub(super) rounds: bool,
}

/// The `f32` elements that each part of the scratch takes.
struct Parts {
    /// The rows rearranged for the few-row kernels.
    arranged: usize,
    /// The column-major result of the few-row kernels.
    result: usize,
    /// The workspace of the GEMM.
    gemm: usize,
}

impl BlockProduct {
    fn parts(&self, cpu: Cpu, [rows, columns, depth]: [usize; 3]) -> Parts {
        if rows > Blocks::FEW {
            let gemm = workspace_len(cpu, 1, [rows, columns, depth], RhsSource::Blocks);
            return Parts { arranged: 0, result: 0, gemm };
        }
        // The few-row kernels read the rows in whole blocks, padded with zeros. 8-bit values with
        // their scales take less, except for the smallest depths.
        let row = depth.div_ceil(self.layout.block).saturating_mul(self.layout.block);
        let row = row.max(Blocks::bytes_side_len(self.layout, depth));
        Parts {
            arranged: whole_lines(rows.saturating_mul(row)),
            // One row is the same in both orders.
            result: if rows > 1 { whole_lines(rows.saturating_mul(columns)) } else { 0 },
            // Weights with groups of rows are not for the few-row kernels.
            gemm: workspace_len(cpu, 1, [rows, columns, depth], RhsSource::Blocks),
        }
    }

    /// Returns the `f32` elements of scratch of a product of `shape` (rows, columns, depth).
    pub(super) fn scratch_len(&self, cpu: Cpu, shape: [usize; 3]) -> usize {
        let Parts { arranged, result, gemm } = self.parts(cpu, shape);
        [result, gemm].into_iter().fold(arranged, usize::saturating_add)
    }

    /// Writes the product of rows and weights, with a bias for each column.
    pub(super) fn run(
        &self,
        cpu: Cpu,
        lhs: &[f32],
        blocks: Blocks<'_>,
        bias: Option<&[f32]>,
        (to, mut rest): (&mut [f32], &mut [f32]),
    ) -> Result<()> {
        let [depth, columns] = blocks.shape();
        let rows = lhs.len().checked_div(depth).unwrap_or(0);
        let parts = self.parts(cpu, [rows, columns, depth]);
        let (arranged, result) = (take(&mut rest, parts.arranged)?, take(&mut rest, parts.result)?);
        if !blocks.takes(rows) {
            let lhs = Strided::row_major(lhs, rows, depth).map_err(refused)?;
            let steps = bias.map(|bias| [Step::ColumnBias(bias)]);
            let gemm = Gemm {
                epilogue: steps.as_ref().map_or(&[], |steps| &steps[..]),
                ..Gemm::new(LhsOperand::Plain(lhs), RhsOperand::Blocks(blocks))
            };
            return gemm.run(cpu, to, columns, rest).map_err(refused);
        }
        if rows == 1 {
            return self.few(cpu, lhs, &blocks, bias, [arranged, to]);
        }
        let result = &mut result[..rows * columns];
        self.few(cpu, lhs, &blocks, bias, [arranged, result])?;
        transpose(cpu, result, [columns, rows], rows, to).map_err(refused)
    }

    /// Multiplies a few rows and adds the bias. `result` is column-major.
    fn few(
        &self,
        cpu: Cpu,
        lhs: &[f32],
        blocks: &Blocks<'_>,
        bias: Option<&[f32]>,
        [arranged, result]: [&mut [f32]; 2],
    ) -> Result<()> {
        let [depth, _] = blocks.shape();
        let rows = lhs.len() / depth;
        if self.rounds && blocks.takes_bytes(rows) {
            let arranged = &mut arranged[..rows * Blocks::bytes_side_len(self.layout, depth)];
            blocks.multiply_few_bytes(cpu, lhs, rows, arranged, result).map_err(refused)?;
        } else {
            // One rearranged row; all of them share the layout of the blocks.
            let len = blocks.side_len();
            let arranged = &mut arranged[..rows * len];
            for (from, to) in lhs.chunks(depth).zip(arranged.chunks_mut(len)) {
                arrange(self.layout, from, to);
            }
            blocks.multiply_few(cpu, arranged, rows, result).map_err(refused)?;
        }
        for (sums, bias) in result.chunks_mut(rows).zip(bias.unwrap_or(&[])) {
            sums.iter_mut().for_each(|sum| *sum += bias);
        }
        Ok(())
    }
}
