//! `MatMulInteger`, `QLinearMatMul`, `MatMulIntegerToFloat`, `DynamicQuantizeMatMul` and `QGemm`:
//! GEMM of 8-bit quantized values.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::MICROSOFT;
use ort_gpu::gemm::{Gemm, GemmSide, MatrixLayout};

use super::integer::{IntegerEpilogue, QuantizedGemm, Term};
use super::quantize::{dynamic, ranges};
use super::type_tags::BYTES;
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

cuda_kernels![
    CudaKernel::new(
        KernelDef { op: "MatMulInteger", when: |node| few_axes(node, 1), ..KernelDef::BASE },
        matmul_integer
    ),
    CudaKernel::new(
        KernelDef {
            op: "QLinearMatMul",
            types: &[("T1", BYTES), ("T2", BYTES), ("T3", BYTES)],
            when: |node| few_axes(node, 3),
            ..KernelDef::BASE
        },
        qlinear_matmul
    ),
    CudaKernel::new(
        KernelDef {
            domain: MICROSOFT,
            op: "MatMulIntegerToFloat",
            when: |node| few_axes(node, 1),
            ..KernelDef::BASE
        },
        matmul_integer_to_float
    ),
    CudaKernel {
        workspace: Some(|cx| Ok(DynamicQuantization::new(cx)?.bytes)),
        ..CudaKernel::new(
            KernelDef {
                domain: MICROSOFT,
                op: "DynamicQuantizeMatMul",
                when: |node| few_axes(node, 1),
                ..KernelDef::BASE
            },
            dynamic_matmul
        )
    },
    CudaKernel::new(KernelDef { domain: MICROSOFT, op: "QGemm", ..KernelDef::BASE }, qgemm),
];

/// Whether the ranks of both operands are known and small enough.
fn few_axes(node: &NodeView<'_>, rhs: usize) -> bool {
    [0, rhs].into_iter().all(|side| node.rank(side).is_some_and(|rank| rank <= MOST_AXES))
}

/// Returns the product of two tensors, whose matrices may be transposed.
fn product([a, b]: [&Operand; 2], transposed: [bool; 2], y: &Operand) -> Result<QuantizedGemm> {
    let [lhs, rhs] = transposed;
    let layouts = [MatrixLayout::new(a, lhs, GemmSide::Lhs)?, MatrixLayout::new(b, rhs, GemmSide::Rhs)?];
    Ok(QuantizedGemm::new(Gemm::new([a, b], layouts, y)?))
}

impl QuantizedGemm {
    fn add_zeros(&mut self, lhs: Option<&Operand>, rhs: Option<&Operand>) -> Result<()> {
        self.add_of_rows(Term::LhsZero, lhs)?;
        self.add_of_columns(Term::RhsZero, rhs)
    }

    fn add_scales(&mut self, lhs: Option<&Operand>, rhs: &Operand) -> Result<()> {
        self.add_of_rows(Term::LhsScale, lhs)?;
        self.add_of_columns(Term::RhsScale, Some(rhs))
    }
}

fn matmul_integer(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let mut product = product([cx.input(0)?, cx.input(1)?], [false; 2], cx.output(0)?)?;
    product.add_zeros(cx.find_input(2), cx.find_input(3))?;
    product.launches(cx)
}

fn qlinear_matmul(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let product = product([cx.input(0)?, cx.input(3)?], [false; 2], cx.output(0)?)?;
    let mut product = product.with_epilogue(IntegerEpilogue::Quantized);
    product.add_zeros(Some(cx.input(2)?), Some(cx.input(5)?))?;
    product.add_scales(Some(cx.input(1)?), cx.input(4)?)?;
    product.add_of_rows(Term::Scale, Some(cx.input(6)?))?;
    product.add_of_rows(Term::Zero, Some(cx.input(7)?))?;
    product.launches(cx)
}

fn matmul_integer_to_float(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let product = product([cx.input(0)?, cx.input(1)?], [false; 2], cx.output(0)?)?;
    let mut product = product.with_epilogue(IntegerEpilogue::Floats);
    product.add_zeros(cx.find_input(4), cx.find_input(5))?;
    product.add_scales(Some(cx.input(2)?), cx.input(3)?)?;
    product.add_of_columns(Term::Addend, cx.find_input(6))?;
    product.launches(cx)
}

/// The dynamically quantized left operand, in the workspace.
struct DynamicQuantization {
    ranges: Operand,
    scale: Operand,
    zero: Operand,
    quantized: Operand,
    bytes: usize,
}

impl DynamicQuantization {
    fn new(cx: &OpCx<'_>) -> Result<DynamicQuantization> {
        let (a, mut bytes) = (cx.input(0)?, 0);
        Ok(DynamicQuantization {
            ranges: ranges(cx, &mut bytes)?,
            scale: cx.workspace(&mut bytes, DType::F32, &[]),
            zero: cx.workspace(&mut bytes, DType::U8, &[]),
            quantized: cx.workspace(&mut bytes, DType::U8, &a.shape),
            bytes,
        })
    }
}

fn dynamic_matmul(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (a, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let DynamicQuantization { ranges, scale, zero, quantized, .. } = DynamicQuantization::new(cx)?;
    // Quantize the left operand over its own range, then multiply.
    let mut all = dynamic(a, &ranges, [Some(&quantized), Some(&scale), Some(&zero)])?;
    let mut product =
        product([&quantized, cx.input(1)?], [false; 2], y)?.with_epilogue(IntegerEpilogue::Floats);
    product.add_zeros(Some(&zero), cx.find_input(3))?;
    product.add_scales(Some(&scale), cx.input(2)?)?;
    product.add_of_columns(Term::Addend, cx.find_input(4))?;
    all.extend(product.launches(cx)?);
    Ok(all)
}

fn qgemm(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let transposed = [cx.attrs.flag("transA")?, cx.attrs.flag("transB")?];
    let product = product([cx.input(0)?, cx.input(3)?], transposed, cx.output(0)?)?;
    let zero = cx.find_input(8);
    // Without an output zero point, the result is float.
    let mut product = product.with_epilogue(if zero.is_some() {
        IntegerEpilogue::Quantized
    } else {
        IntegerEpilogue::Floats
    });
    product.alpha = cx.attrs.float("alpha")?;
    product.add_zeros(Some(cx.input(2)?), Some(cx.input(5)?))?;
    product.add_scales(Some(cx.input(1)?), cx.input(4)?)?;
    product.add_of_rows(Term::Scale, cx.find_input(7))?;
    product.add_of_rows(Term::Zero, zero)?;
    let addend = cx.find_input(6);
    let shape = addend.map_or(&[][..], |addend| &addend.shape[..]);
    product.add(Term::Addend, addend, shape)?;
    product.launches(cx)
}
