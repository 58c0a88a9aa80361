//! Integer GEMM on 8-bit quantized values: `MatMulInteger`, `QLinearMatMul`, `MatMulIntegerToFloat`
//! and `QGemm`.
//!
//! Accumulators are 32-bit integers. Scales and zero points are scalars, or one for each row of the
//! left operand and each column of the right one.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};
use ort_gpu::gemm::{Gemm, GemmSide, MatrixLayout};

use super::gemm::Product;
use super::matmul::has_few_axes;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::MOST_AXES;

const BYTES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);

wgpu_kernels![
    WgpuKernel::new(KernelDef { op: "MatMulInteger", when: has_few_axes, ..KernelDef::BASE }, matmul_integer),
    WgpuKernel::new(
        KernelDef {
            op: "QLinearMatMul",
            types: &[("T1", BYTES), ("T2", BYTES), ("T3", BYTES)],
            host_inputs: &[6, 7],
            when: |node| {
                let few =
                    [0, 3].into_iter().all(|side| node.rank(side).is_some_and(|rank| rank <= MOST_AXES));
                few && is_single(node, 6) && is_single(node, 7)
            },
            ..KernelDef::BASE
        },
        qlinear_matmul,
    ),
    WgpuKernel::new(
        KernelDef { domain: MICROSOFT, op: "MatMulIntegerToFloat", when: has_few_axes, ..KernelDef::BASE },
        matmul_integer_to_float,
    ),
    WgpuKernel::new(
        KernelDef {
            domain: MICROSOFT,
            op: "QGemm",
            host_inputs: &[1, 7, 8],
            when: |node| [1, 7, 8].into_iter().all(|index| is_single(node, index)),
            ..KernelDef::BASE
        },
        qgemm,
    ),
];

/// Returns whether an input is absent or has a single element.
fn is_single(node: &NodeView<'_>, index: usize) -> bool {
    let has_one = |shape: Vec<usize>| shape.iter().all(|size| *size == 1);
    node.input(index).is_none() || node.fixed_shape(index).is_some_and(has_one)
}

/// Returns the single number of an input in host memory; `None` if the input is absent.
fn number(cx: &OpCx<'_>, index: usize) -> Result<Option<f32>> {
    let Some(view) = cx.find_host(index) else { return Ok(None) };
    match *view.to_tensor()?.to_doubles()? {
        [one] => Ok(Some(one as f32)),
        ref all => Err(error!(InvalidArgument, "input {index} has {} elements, expected 1", all.len())),
    }
}

/// Returns the product of two tensors, whose matrices may be transposed.
pub(super) fn product(cx: &OpCx<'_>, [a, b]: [&Operand; 2], transposed: [bool; 2]) -> Result<Product> {
    let [lhs, rhs] = transposed;
    let layouts = [MatrixLayout::new(a, lhs, GemmSide::Lhs)?, MatrixLayout::new(b, rhs, GemmSide::Rhs)?];
    Ok(Product::new(Gemm::new([a, b], layouts, cx.output(0)?)?))
}

impl Product {
    /// Adds scales or zero points: a scalar, or one for each row of the left operand or each
    /// column.
    fn add_scale(&mut self, name: &'static str, tensor: Option<&Operand>, of_rows: bool) -> Result<()> {
        let Some(tensor) = tensor else { return Ok(()) };
        let mut shape = tensor.shape.to_vec();
        // A single element broadcasts, whatever its rank.
        if tensor.count() == 1 {
            shape.clear();
        // One number for each row must not align with the columns.
        } else if of_rows && shape.len() == 1 {
            shape.push(1);
        }
        let strided = self.add(name, tensor, &shape)?;
        let fits = if of_rows { strided.column == 0 } else { strided.row == 0 };
        ensure!(fits, InvalidArgument, "{name} has the shape {shape:?}");
        Ok(())
    }

    pub(super) fn add_zeros(&mut self, a_zero: Option<&Operand>, b_zero: Option<&Operand>) -> Result<()> {
        self.add_scale("a_zero", a_zero, true)?;
        self.add_scale("b_zero", b_zero, false)
    }

    /// Sets the epilogue to `sum * a_scale * b_scale + bias`.
    pub(super) fn scale(
        &mut self,
        a_scale: &Operand,
        b_scale: &Operand,
        bias: Option<&Operand>,
    ) -> Result<()> {
        self.add_scale("a_scale", Some(a_scale), true)?;
        self.add_scale("b_scale", Some(b_scale), false)?;
        self.add_scale("bias", bias, false)?;
        let bias = if bias.is_some() { " + bias_value" } else { "" };
        self.result = format!("return f32(sum) * (a_scale_value * b_scale_value){bias};");
        Ok(())
    }
}

/// The epilogue that quantizes `x` with zero point `p.y_zero`.
fn rounded(dtype: DType) -> String {
    let (least, most) = if dtype == DType::I8 { (-128, 127) } else { (0, 255) };
    format!("return y_t(clamp(round(x) + p.y_zero, f32({least}), f32({most})));")
}

fn matmul_integer(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let mut product = product(cx, [cx.input(0)?, cx.input(1)?], [false; 2])?;
    product.add_zeros(cx.find_input(2), cx.find_input(3))?;
    product.dispatches(cx)
}

fn qlinear_matmul(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let y = cx.output(0)?;
    let mut product = product(cx, [cx.input(0)?, cx.input(3)?], [false; 2])?;
    product.add_zeros(Some(cx.input(2)?), Some(cx.input(5)?))?;
    product.add_scale("a_scale", Some(cx.input(1)?), true)?;
    product.add_scale("b_scale", Some(cx.input(4)?), false)?;
    product.numbers =
        vec![("y_scale", number(cx, 6)?.unwrap_or(1.0)), ("y_zero", number(cx, 7)?.unwrap_or(0.0))];
    let scaled = "let x = f32(sum) * (a_scale_value * b_scale_value / p.y_scale);\n";
    product.result = scaled.to_owned() + &rounded(y.dtype);
    product.dispatches(cx)
}

fn matmul_integer_to_float(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let mut product = product(cx, [cx.input(0)?, cx.input(1)?], [false; 2])?;
    product.add_zeros(cx.find_input(4), cx.find_input(5))?;
    product.scale(cx.input(2)?, cx.input(3)?, cx.find_input(6))?;
    product.dispatches(cx)
}

fn qgemm(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let y = cx.output(0)?;
    let transposed = [cx.attrs.flag("transA")?, cx.attrs.flag("transB")?];
    let mut product = product(cx, [cx.input(0)?, cx.input(3)?], transposed)?;
    product.add_zeros(Some(cx.input(2)?), Some(cx.input(5)?))?;
    product.add_scale("b_scale", Some(cx.input(4)?), false)?;
    let mut sum = "sum";
    if let Some(c) = cx.find_input(6) {
        product.add("c", c, &c.shape)?;
        sum = "sum + c_value";
    }
    let a_scale = number(cx, 1)?.unwrap_or(1.0);
    let scale = cx.attrs.float("alpha")? * a_scale;
    let (y_scale, y_zero) = (number(cx, 7)?, number(cx, 8)?);
    product.numbers =
        vec![("scale", scale), ("y_scale", y_scale.unwrap_or(1.0)), ("y_zero", y_zero.unwrap_or(0.0))];
    let scaled = format!("let x = f32({sum}) * (p.scale * b_scale_value / p.y_scale);\n");
    product.result = match y_zero {
        Some(_) => scaled + &rounded(y.dtype),
        None => scaled + "return x;",
    };
    product.dispatches(cx)
}
