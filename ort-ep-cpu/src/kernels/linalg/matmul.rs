//! `MatMul`, and `FusedMatMul` as far as only its right side is transposed.

use ort_core::dtype::{DType, Element, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, error};

use super::product::Product;
use super::widened::widened;
use super::{PackedRight, bytes_of, is_weight, refused, scratch};
use crate::cpu_kernels;
use crate::gemm::generic::{self, Number, View};
use crate::gemm::{
    AOperand, BOperand, BSource, Batch, Cpu, Gemm, GemmError, Strided, run_batch, workspace_len,
};

const SINGLE: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

cpu_kernels![
    // A constant matrix on the right is packed.
    KernelDef {
        op: "MatMul",
        types: &[("T", SINGLE)],
        rank: 1,
        unaligned: &[1],
        when: has_constant_matrix,
        make: |cx| widened(cx, make_packed),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "MatMul",
        types: &[("T", SINGLE)],
        make: |cx| widened(cx, |_| Ok(Box::new(Plain { factor: 1.0, transposed: false }))),
        ..KernelDef::BASE
    },
    // Others are decomposed.
    KernelDef {
        domain: MICROSOFT,
        op: "FusedMatMul",
        types: &[("T", SINGLE)],
        rank: 1,
        unaligned: &[1],
        when: |node| is_plain_left(node) && has_constant_matrix(node),
        make: |cx| widened(cx, make_packed),
        ..KernelDef::BASE
    },
    KernelDef {
        domain: MICROSOFT,
        op: "FusedMatMul",
        types: &[("T", SINGLE)],
        when: is_plain_left,
        make: |cx| {
            widened(cx, |cx| {
                let (factor, transposed) = (factor(cx)?, transposes_right(cx)?);
                Ok(Box::new(Plain { factor, transposed }))
            })
        },
        ..KernelDef::BASE
    },
    KernelDef {
        op: "MatMul",
        types: &[("T", TypeSet::HIGH_PRECISION)],
        rank: -1,
        make: make_generic,
        ..KernelDef::BASE
    },
];

fn has_constant_matrix(node: &NodeView<'_>) -> bool {
    let matrix = node.constant(1).is_some_and(|tensor| matches!(tensor.shape().len(), 1 | 2));
    matrix && is_weight(node.dtype(1))
}

/// Whether a `FusedMatMul` leaves its left side and the batches as they are.
fn is_plain_left(node: &NodeView<'_>) -> bool {
    ["transA", "transBatchA", "transBatchB"].iter().all(|name| matches!(node.attrs().flag(name), Ok(false)))
}

/// What the product is multiplied with.
fn factor(cx: &CompileCx<'_>) -> Result<f32> {
    Ok(cx.attrs().find_float("alpha").unwrap_or(1.0))
}

/// Whether the last two dimensions of the right side are exchanged.
fn transposes_right(cx: &CompileCx<'_>) -> Result<bool> {
    Ok(cx.attrs().find_int("transB").unwrap_or(0) != 0)
}

fn make_packed(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (shape, strides) = match cx.constant(1).map(|view| view.shape()) {
        Some(&[k]) => ([k, 1], [1, 1]),
        Some(&[columns, k]) if transposes_right(cx)? => ([k, columns], [1, k]),
        Some(&[k, columns]) => ([k, columns], [columns, 1]),
        _ => return Err(error!(Fail, "the right side is no constant matrix")),
    };
    let factor = factor(cx)?;
    let right = PackedRight::of_input(cx, 1, shape, strides)?;
    Ok(Box::new(Packed { factor, right }))
}

/// The product with a packed matrix; all rows on the left make one product.
struct Packed {
    factor: f32,
    right: PackedRight,
}

impl Executable for Packed {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let (k, columns) = (self.right.k, self.right.columns);
        let rows = shapes.input(0).iter().product::<usize>() / k.max(1);
        let cpu = Cpu::with_threads(shapes.threads);
        bytes_of::<f32>(workspace_len(cpu, 1, [rows, columns, k], BSource::Packed))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let cpu = Cpu::with_threads(cx.threads());
        let workspace = scratch(cx.workspace()?)?;
        let a = cx.input(0)?;
        let (k, columns) = (self.right.k, self.right.columns);
        let last = a.shape().last().copied();
        if last != Some(k) {
            return Err(error!(InvalidArgument, "the sums of the product differ: {last:?} and {k}"));
        }
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        let rows = a.shape()[..a.rank() - 1].iter().product();
        let left = Strided::row_major(a.as_slice()?, rows, k).map_err(refused)?;
        let gemm = Gemm { alpha: self.factor, ..Gemm::new(AOperand::Plain(left), self.right.operand(cpu)?) };
        gemm.run(cpu, result, columns, workspace).map_err(refused)
    }
}

/// The product of two sides that only the run knows.
struct Plain {
    factor: f32,
    /// Whether the last two dimensions of the right side are exchanged.
    transposed: bool,
}

impl Plain {
    fn product(&self, a: &[usize], b: &[usize]) -> Result<Product> {
        match b {
            [batch @ .., columns, k] if self.transposed => {
                Product::new(a, &[batch, &[*k, *columns]].concat())
            }
            _ => Product::new(a, b),
        }
    }
}

impl Executable for Plain {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let product = self.product(shapes.input(0), shapes.input(1))?;
        let source = if self.transposed && product.shape[1] > 1 { BSource::Strided } else { BSource::Rows };
        let cpu = Cpu::with_threads(shapes.threads);
        bytes_of::<f32>(workspace_len(cpu, product.count, product.shape, source))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let cpu = Cpu::with_threads(cx.threads());
        let workspace = scratch(cx.workspace()?)?;
        let (a, b) = (cx.input(0)?, cx.input(1)?);
        let product = self.product(a.shape(), b.shape())?;
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        if result.is_empty() {
            return Ok(());
        }
        let (a, b) = (a.as_slice::<f32>()?, b.as_slice::<f32>()?);
        let [rows, columns, k] = product.shape;
        let problem = |index: usize| {
            let [left, right] = product.offsets(index);
            let left = Strided::row_major(from("the left side", a, left)?, rows, k)?;
            let strides = if self.transposed && columns > 1 { [1, k] } else { [columns, 1] };
            let right = Strided::new(from("the right side", b, right)?, [k, columns], strides)?;
            Ok(Gemm { alpha: self.factor, ..Gemm::new(AOperand::Plain(left), BOperand::Plain(right)) })
        };
        let results =
            Batch { values: result, count: product.count, row_stride: columns, batch_stride: rows * columns };
        run_batch(cpu, &problem, results, workspace).map_err(refused)
    }
}

fn from<'a, T>(what: &'static str, values: &'a [T], first: usize) -> Result<&'a [T], GemmError> {
    values.get(first..).ok_or(GemmError::TooShort { what, needed: first, len: values.len() })
}

fn make_generic(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    match cx.node.dtype(0) {
        Some(DType::F64) => Ok(Box::new(multiply::<f64>)),
        Some(DType::I32) => Ok(Box::new(multiply::<i32>)),
        Some(DType::I64) => Ok(Box::new(multiply::<i64>)),
        Some(DType::U32) => Ok(Box::new(multiply::<u32>)),
        Some(DType::U64) => Ok(Box::new(multiply::<u64>)),
        _ => Err(error!(NotImplemented, "a product of this type")),
    }
}

fn multiply<T: Element + Number>(cx: &mut RunCx<'_>) -> Result<()> {
    let cpu = Cpu::with_threads(cx.threads());
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let product = Product::new(a.shape(), b.shape())?;
    let result = cx.output(0)?.as_mut_slice::<T>()?;
    let (a, b) = (a.as_slice::<T>()?, b.as_slice::<T>()?);
    let [rows, columns, k] = product.shape;
    for (index, result) in result.chunks_mut((rows * columns).max(1)).enumerate() {
        let [left, right] = product.offsets(index);
        let left = from("the left side", a, left).and_then(|a| View::new(a, [rows, k], [k, 1]));
        let right = from("the right side", b, right).and_then(|b| View::new(b, [k, columns], [columns, 1]));
        generic::multiply(cpu, left.map_err(refused)?, right.map_err(refused)?, result).map_err(refused)?;
    }
    Ok(())
}
