//! GEMM with block-quantized weights of 2, 4 or 8 bits (`MatMulNBits`).
//!
//! Weights stay quantized in memory. Few rows of A go to kernels that dequantize on the fly, more
//! rows to the general GEMM.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ops::linalg::problem::NBitsMatMul;
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error};

use ort_cpu_gemm::{
    Blocks, Cpu, Gemm, LhsOperand, Numbers, RhsOperand, RhsSource, Step, Strided, Zeros, transpose,
    workspace_len,
};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::{narrow, widen};
use ort_cpu_kernel::quantized_convert::read_floats;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take, whole_lines};
use ort_cpu_matmul::refused;
use ort_cpu_vector::simd::blocks::{BlockLayout, arrange};

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "MatMulNBits",
    unaligned: &[1, 2, 3, 4, 5],
    make: |cx| Ok(Box::new(MatMulNBits::new(cx)?)),
    ..KernelDef::BASE
}];

struct MatMulNBits {
    node: NBitsMatMul,
    layout: BlockLayout,
    /// Whether A may be quantized to 8 bits, block by block.
    rounds: bool,
}

/// The `accuracy_level` at which ONNX Runtime quantizes A to 8 bits, too.
const ACCURACY_OF_BYTES: i64 = 4;

/// Wraps the bytes of a tensor of floats, which may be unaligned.
fn numbers(view: TensorView<'_>) -> Result<Numbers<'_>> {
    match view.dtype() {
        DType::F32 => Ok(Numbers::F32(view.bytes()?)),
        DType::F16 => Ok(Numbers::F16(view.bytes()?)),
        DType::BF16 => Ok(Numbers::BF16(view.bytes()?)),
        other => Err(error!(InvalidArgument, "scales of type {other}, expected floats")),
    }
}

/// The `f32` elements that each part of the workspace takes.
struct Parts {
    /// A as `f32`, if it is narrower.
    lhs: usize,
    /// A rearranged for the few-row kernels.
    arranged: usize,
    /// The result as `f32` if the output is narrower, or column-major from the few-row kernels.
    result: usize,
    /// The GEMM workspace, or the transposed result of the few-row kernels.
    gemm_workspace: usize,
}

impl MatMulNBits {
    fn new(cx: &CompileCx<'_>) -> Result<MatMulNBits> {
        ensure!(
            cx.attrs().int("weight_prepacked")? == 0,
            NotImplemented,
            "weights packed ahead for another device"
        );
        let node = NBitsMatMul::new(cx.attrs())?;
        let layout = BlockLayout { bits: node.bits, block: node.block };
        let rounds = cx.attrs().find_int("accuracy_level") == Some(ACCURACY_OF_BYTES);
        Ok(MatMulNBits { node, layout, rounds })
    }

    fn parts(&self, cpu: Cpu, rows: usize, is_wide: bool) -> Parts {
        // The few-row kernels read A in whole blocks, padded with zeros.
        let few = self.node.blocks().saturating_mul(self.node.block);
        // 8-bit values with their scales take less, except for the smallest K.
        let few = few.max(Blocks::bytes_side_len(self.layout, self.node.depth));
        let is_few = rows <= Blocks::FEW;
        let part =
            |is_used: bool, row: usize| if is_used { whole_lines(rows.saturating_mul(row)) } else { 0 };
        Parts {
            lhs: part(!is_wide, self.node.depth),
            arranged: part(is_few, few),
            result: part(!is_wide || is_few, self.node.columns),
            // The few-row kernels transpose their result into this part.
            gemm_workspace: workspace_len(
                cpu,
                1,
                [rows, self.node.columns, self.node.depth],
                RhsSource::Blocks,
            )
            .max(if is_few { rows.saturating_mul(self.node.columns) } else { 0 }),
        }
    }

    /// Multiplies a few rows of A. `result` is column-major.
    fn few(
        &self,
        cpu: Cpu,
        lhs: &[f32],
        blocks: &Blocks<'_>,
        rows: usize,
        memory: [&mut [f32]; 2],
    ) -> Result<()> {
        let [arranged, result] = memory;
        if self.rounds && blocks.takes_bytes(rows) {
            let arranged = &mut arranged[..rows * Blocks::bytes_side_len(self.layout, self.node.depth)];
            return blocks.multiply_few_bytes(cpu, lhs, rows, arranged, result).map_err(refused);
        }
        // One rearranged row of A; all of them share the layout of the blocks.
        let len = blocks.side_len();
        let arranged = &mut arranged[..rows * len];
        for (from, to) in lhs.chunks(self.node.depth).zip(arranged.chunks_mut(len)) {
            arrange(self.layout, from, to);
        }
        blocks.multiply_few(cpu, arranged, rows, result).map_err(refused)
    }
}

impl Executable for MatMulNBits {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        // All leading dimensions of A are rows.
        let rows = element_count(shapes.input(0))? / self.node.depth;
        // Types are unknown here, so reserve space for conversions.
        let parts = self.parts(Cpu::with_threads(shapes.threads), rows, false);
        let sizes = [parts.lhs, parts.arranged, parts.result, parts.gemm_workspace];
        bytes_of::<f32>(sizes.into_iter().fold(0, usize::saturating_add))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let cpu = Cpu::with_threads(cx.threads());
        let a = cx.input(0)?;
        let rows = self.node.rows(a.shape())?;
        let NBitsMatMul { depth: k, columns, .. } = self.node;
        let zeros = match cx.find_input(3) {
            None => Zeros::Middle,
            Some(zeros) if zeros.dtype() == DType::U8 => Zeros::Quantized(zeros.bytes()?),
            Some(zeros) => Zeros::Numbers(numbers(zeros)?),
        };
        let (quantized, scales) = (cx.input(1)?.bytes()?, numbers(cx.input(2)?)?);
        let mut blocks = Blocks::new(self.layout, [k, columns], quantized, scales, zeros).map_err(refused)?;
        let groups = cx.find_input(4).map(|groups| groups.to_cow::<i32>()).transpose()?;
        if let Some(groups) = &groups {
            // Each row uses the scale and zero point of its group. The operator's definition
            // subtracts the zero point before scaling; ONNX Runtime 1.31.1 ignores zero points if
            // there are groups.
            blocks = blocks.with_groups(groups).map_err(refused)?;
        }
        let bias = cx.find_input(5).map(read_floats).transpose()?;
        if let Some(bias) = &bias {
            ensure!(bias.len() == columns, InvalidArgument, "{} biases for N = {columns}", bias.len());
        }
        let output = cx.output(0)?;
        // Without rows, `chunks_mut(rows)` below would panic.
        if output.element_count() == 0 {
            return Ok(());
        }
        let is_wide = a.dtype() == DType::F32;
        let parts = self.parts(cpu, rows, is_wide);
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        let wide_lhs = take(&mut rest, parts.lhs)?;
        let lhs = match is_wide {
            true => a.as_slice::<f32>()?,
            false => {
                let lhs = &mut wide_lhs[..rows * k];
                widen(cpu.threads, a, lhs)?;
                lhs
            }
        };
        let arranged = take(&mut rest, parts.arranged)?;
        let result = take(&mut rest, parts.result)?;
        if blocks.takes(rows) {
            // [columns, rows].
            let result = &mut result[..rows * columns];
            self.few(cpu, lhs, &blocks, rows, [arranged, result])?;
            if let Some(bias) = &bias {
                for (sums, bias) in result.chunks_mut(rows).zip(bias.iter()) {
                    sums.iter_mut().for_each(|sum| *sum += bias);
                }
            }
            // One row is the same in both orders.
            if rows == 1 {
                return narrow(cpu.threads, result, output);
            }
            // The part that `parts` reserved for the GEMM workspace, which this path does not use.
            let by_rows = take(&mut rest, rows * columns)?;
            transpose(cpu, result, [columns, rows], rows, by_rows).map_err(refused)?;
            return narrow(cpu.threads, by_rows, output);
        }
        let lhs = Strided::row_major(lhs, rows, k).map_err(refused)?;
        let steps = bias.as_deref().map(|bias| [Step::ColumnBias(bias)]);
        let gemm = Gemm {
            epilogue: steps.as_ref().map_or(&[], |steps| &steps[..]),
            ..Gemm::new(LhsOperand::Plain(lhs), RhsOperand::Blocks(blocks))
        };
        if is_wide {
            return gemm.run(cpu, output.as_mut_slice()?, columns, rest).map_err(refused);
        }
        let result = &mut result[..rows * columns];
        gemm.run(cpu, result, columns, rest).map_err(refused)?;
        narrow(cpu.threads, result, output)
    }
}
