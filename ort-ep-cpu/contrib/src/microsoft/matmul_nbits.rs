//! GEMM with block-quantized weights of 2, 4 or 8 bits (`MatMulNBits`).
//!
//! Weights stay quantized in memory.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ops::linalg::problem::NBitsMatMul;
use ort_core::spec::MICROSOFT;
use ort_core::tensor::element_count;
use ort_core::{Result, ensure, error};

use super::block_product::BlockProduct;
use ort_cpu_gemm::{Blocks, Cpu, Numbers, Zeros};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::{narrow, widen};
use ort_cpu_kernel::quantized_convert::read_floats;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take, whole_lines};
use ort_cpu_matmul::refused;
use ort_cpu_vector::simd::blocks::BlockLayout;

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "MatMulNBits",
    unaligned: &[1, 2, 3, 4, 5],
    make: |cx| Ok(Box::new(MatMulNBits::new(cx)?)),
    ..KernelDef::BASE
}];

struct MatMulNBits {
    node: NBitsMatMul,
    product: BlockProduct,
    /// Whether A and the result are `f32`, so that nothing is converted.
    is_wide: bool,
}

/// The `accuracy_level` at which ONNX Runtime quantizes A to 8 bits, too.
pub(super) const ACCURACY_OF_BYTES: i64 = 4;

/// Wraps the bytes of a tensor of floats, which may be unaligned.
pub(super) fn numbers(dtype: DType, bytes: &[u8]) -> Result<Numbers<'_>> {
    match dtype {
        DType::F32 => Ok(Numbers::F32(bytes)),
        DType::F16 => Ok(Numbers::F16(bytes)),
        DType::BF16 => Ok(Numbers::BF16(bytes)),
        other => Err(error!(InvalidArgument, "scales of type {other}, expected floats")),
    }
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
        let is_wide = cx.node.dtype(0) == Some(DType::F32);
        Ok(MatMulNBits { node, product: BlockProduct { layout, rounds }, is_wide })
    }

    /// Returns the `f32` elements of A and of the result in `f32`, if they are narrower.
    fn wide_lens(&self, rows: usize) -> [usize; 2] {
        let len = |row: usize| if self.is_wide { 0 } else { whole_lines(rows.saturating_mul(row)) };
        [len(self.node.depth), len(self.node.columns)]
    }
}

impl Executable for MatMulNBits {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        // All leading dimensions of A are rows.
        let rows = element_count(shapes.input(0))? / self.node.depth;
        let [lhs, result] = self.wide_lens(rows);
        let shape = [rows, self.node.columns, self.node.depth];
        let product = self.product.scratch_len(Cpu::with_threads(shapes.threads), shape);
        bytes_of::<f32>([result, product].into_iter().fold(lhs, usize::saturating_add))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let cpu = Cpu::with_threads(cx.threads());
        let a = cx.input(0)?;
        let rows = self.node.rows(a.shape())?;
        let NBitsMatMul { depth: k, columns, .. } = self.node;
        let zeros = match cx.find_input(3) {
            None => Zeros::Middle,
            Some(zeros) if zeros.dtype() == DType::U8 => Zeros::Quantized(zeros.bytes()?),
            Some(zeros) => Zeros::Numbers(numbers(zeros.dtype(), zeros.bytes()?)?),
        };
        let scales = cx.input(2)?;
        let (quantized, scales) = (cx.input(1)?.bytes()?, numbers(scales.dtype(), scales.bytes()?)?);
        let mut blocks =
            Blocks::new(self.product.layout, [k, columns], quantized, scales, zeros).map_err(refused)?;
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
        if output.element_count() == 0 {
            return Ok(());
        }
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        if self.is_wide {
            let to = output.as_mut_slice()?;
            return self.product.run(cpu, a.as_slice()?, blocks, bias.as_deref(), (to, rest));
        }
        let [lhs, result] = self.wide_lens(rows);
        let (lhs, result) = (&mut take(&mut rest, lhs)?[..rows * k], take(&mut rest, result)?);
        widen(cpu.threads, a, lhs)?;
        let result = &mut result[..rows * columns];
        self.product.run(cpu, lhs, blocks, bias.as_deref(), (result, rest))?;
        narrow(cpu.threads, result, output)
    }
}
