//! `MatMulInteger`, `QLinearMatMul`, `MatMulIntegerToFloat`, `DynamicQuantizeMatMul` and `QGemm`:
//! GEMM of 8-bit quantized values.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::MICROSOFT;

use super::codes::BYTES;
use super::gemm::Side;
use super::integer::{CodeProduct, Ending, Place};
use super::quantize::{dynamic, ranges};
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
        workspace: Some(|cx| Ok(Dynamic::new(cx)?.bytes)),
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
fn few_axes(node: &NodeView<'_>, right: usize) -> bool {
    [0, right].into_iter().all(|side| node.rank(side).is_some_and(|rank| rank <= MOST_AXES))
}

/// Returns the product of two tensors, whose matrices may be transposed.
fn product([a, b]: [&Operand; 2], transposed: [bool; 2], y: &Operand) -> Result<CodeProduct> {
    let side = |tensor: &Operand, transposed: bool, is_left: bool| {
        let mut order: Vec<usize> = (0..tensor.rank()).collect();
        if let (true, [.., first, second]) = (transposed, &mut order[..]) {
            std::mem::swap(first, second);
        }
        Side::new(tensor, &order, is_left)
    };
    let [left, right] = transposed;
    CodeProduct::new([a, b], [side(a, left, true)?, side(b, right, false)?], y)
}

impl CodeProduct {
    fn add_zeros(&mut self, left: Option<&Operand>, right: Option<&Operand>) -> Result<()> {
        self.add_of_rows(Place::LeftZero, left)?;
        self.add_of_columns(Place::RightZero, right)
    }

    fn add_scales(&mut self, left: Option<&Operand>, right: &Operand) -> Result<()> {
        self.add_of_rows(Place::LeftScale, left)?;
        self.add_of_columns(Place::RightScale, Some(right))
    }
}

fn matmul_integer(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let mut product = product([cx.input(0)?, cx.input(1)?], [false; 2], cx.output(0)?)?;
    product.add_zeros(cx.find_input(2), cx.find_input(3))?;
    product.launches(cx)
}

fn qlinear_matmul(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let product = product([cx.input(0)?, cx.input(3)?], [false; 2], cx.output(0)?)?;
    let mut product = product.ending(Ending::Codes);
    product.add_zeros(Some(cx.input(2)?), Some(cx.input(5)?))?;
    product.add_scales(Some(cx.input(1)?), cx.input(4)?)?;
    product.add_of_rows(Place::Scale, Some(cx.input(6)?))?;
    product.add_of_rows(Place::Zero, Some(cx.input(7)?))?;
    product.launches(cx)
}

fn matmul_integer_to_float(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let product = product([cx.input(0)?, cx.input(1)?], [false; 2], cx.output(0)?)?;
    let mut product = product.ending(Ending::Numbers);
    product.add_zeros(cx.find_input(4), cx.find_input(5))?;
    product.add_scales(Some(cx.input(2)?), cx.input(3)?)?;
    product.add_of_columns(Place::Addend, cx.find_input(6))?;
    product.launches(cx)
}

/// The dynamically quantized left operand, in the workspace.
struct Dynamic {
    ranges: Operand,
    scale: Operand,
    zero: Operand,
    codes: Operand,
    bytes: usize,
}

impl Dynamic {
    fn new(cx: &OpCx<'_>) -> Result<Dynamic> {
        let (a, mut bytes) = (cx.input(0)?, 0);
        Ok(Dynamic {
            ranges: ranges(cx, &mut bytes)?,
            scale: cx.workspace(&mut bytes, DType::F32, &[]),
            zero: cx.workspace(&mut bytes, DType::U8, &[]),
            codes: cx.workspace(&mut bytes, DType::U8, &a.shape),
            bytes,
        })
    }
}

fn dynamic_matmul(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (a, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let Dynamic { ranges, scale, zero, codes, .. } = Dynamic::new(cx)?;
    // Quantize the left operand over its own range, then multiply.
    let mut all = dynamic(a, &ranges, [Some(&codes), Some(&scale), Some(&zero)])?;
    let mut product = product([&codes, cx.input(1)?], [false; 2], y)?.ending(Ending::Numbers);
    product.add_zeros(Some(&zero), cx.find_input(3))?;
    product.add_scales(Some(&scale), cx.input(2)?)?;
    product.add_of_columns(Place::Addend, cx.find_input(4))?;
    all.extend(product.launches(cx)?);
    Ok(all)
}

fn qgemm(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let transposed = [cx.attrs.flag("transA")?, cx.attrs.flag("transB")?];
    let product = product([cx.input(0)?, cx.input(3)?], transposed, cx.output(0)?)?;
    let zero = cx.find_input(8);
    // Without an output zero point, the result is float.
    let mut product = product.ending(if zero.is_some() { Ending::Codes } else { Ending::Numbers });
    product.alpha = cx.attrs.float("alpha")?;
    product.add_zeros(Some(cx.input(2)?), Some(cx.input(5)?))?;
    product.add_scales(Some(cx.input(1)?), cx.input(4)?)?;
    product.add_of_rows(Place::Scale, cx.find_input(7))?;
    product.add_of_rows(Place::Zero, zero)?;
    let addend = cx.find_input(6);
    let shape = addend.map_or(&[][..], |addend| &addend.shape[..]);
    product.add(Place::Addend, addend, shape)?;
    product.launches(cx)
}
