//! Quantized matmuls that scale their result.
//!
//! These are `DynamicQuantizeMatMul`, `MatMulIntegerToFloat` and `QGemm`.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error};

use crate::integer::{QuantizedInputs, QuantizedOperands, parts, zero_points};
use ort_cpu_gemm::Cpu;
use ort_cpu_gemm::integer::{Factors, Scaling, Target};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::dynamic_quantize::ByteQuantizer;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::quantized_gemm::{is_unsigned, quantized_len, scaled};

const SINGLE: TypeSet = TypeSet::of(&[DType::F32]);

cpu_kernels![
    KernelDef {
        domain: MICROSOFT,
        op: "DynamicQuantizeMatMul",
        unaligned: &[1],
        when: |node| is_matrix(node, 1) && is_list(node, 2) && is_list(node, 3),
        make: |cx| Ok(Box::new(Dynamic(QuantizedOperands::new(cx, [0, 1])?))),
        ..KernelDef::BASE
    },
    KernelDef {
        domain: MICROSOFT,
        op: "MatMulIntegerToFloat",
        types: &[("T3", SINGLE)],
        unaligned: &[1],
        when: |node| is_matrix(node, 1) && is_list(node, 3) && is_list(node, 5),
        make: |cx| Ok(Box::new(ToFloat(QuantizedOperands::new(cx, [0, 1])?))),
        ..KernelDef::BASE
    },
    KernelDef {
        domain: MICROSOFT,
        op: "QGemm",
        unaligned: &[3],
        when: |node| {
            // Only the right side may be transposed: the left one is read in place, by rows.
            let plain = matches!(node.attrs().flag("transA"), Ok(false));
            let constant = node.constant(3).is_some_and(|rhs| rhs.shape().len() == 2);
            plain && constant && is_list(node, 4) && is_list(node, 5) && has_column_bias(node)
        },
        make: make_gemm,
        ..KernelDef::BASE
    },
];

fn is_matrix(node: &NodeView<'_>, index: usize) -> bool {
    node.rank(index) == Some(2)
}

/// Returns whether an input is missing, a scalar or a vector.
fn is_list(node: &NodeView<'_>, index: usize) -> bool {
    node.input(index).is_none() || node.rank(index).is_some_and(|rank| rank < 2)
}

/// Returns whether the bias, if there is one, has one value for each column.
fn has_column_bias(node: &NodeView<'_>) -> bool {
    let rhs = node.constant(3).map(|rhs| rhs.shape());
    let transposed = node.attrs().flag("transB").unwrap_or(false);
    // `transB` makes the first dimension the columns.
    let columns = rhs.and_then(|shape| if transposed { shape.first() } else { shape.last() }).copied();
    match node.fixed_shape(6).as_deref() {
        None => node.input(6).is_none(),
        Some([len] | [1, len]) => Some(*len) == columns,
        Some(_) => false,
    }
}

/// Returns the only element of a tensor.
fn single(view: TensorView<'_>, what: &str) -> Result<f32> {
    match view.as_slice::<f32>()? {
        [one] => Ok(*one),
        other => Err(error!(InvalidArgument, "{what} has {} elements, expected 1", other.len())),
    }
}

/// Returns the only zero point of a tensor; empty if the input is missing.
fn single_zero(view: Option<TensorView<'_>>, what: &str) -> Result<Vec<i32>> {
    let zeros = zero_points(view)?;
    ensure!(
        view.is_none() || zeros.len() == 1,
        InvalidArgument,
        "{what} has {} elements, expected 1",
        zeros.len()
    );
    Ok(zeros)
}

/// Returns the scales of the columns: one for all, or one for each.
fn column_scales<'a>(view: TensorView<'a>, columns: usize) -> Result<&'a [f32]> {
    let scales = view.as_slice::<f32>()?;
    ensure!(
        scales.len() == 1 || scales.len() == columns,
        InvalidArgument,
        "got {} scales, expected one for each of the {columns} columns",
        scales.len()
    );
    Ok(scales)
}

/// Returns the bias of the columns; empty if the input is missing.
fn column_bias<'a>(view: Option<TensorView<'a>>, columns: usize) -> Result<&'a [f32]> {
    let bias = view.map(|view| view.as_slice::<f32>()).transpose()?.unwrap_or(&[]);
    let fits = bias.is_empty() || bias.len() == columns;
    ensure!(
        fits,
        InvalidArgument,
        "the bias has {} values, expected {columns}, one for each column",
        bias.len()
    );
    Ok(bias)
}

/// `DynamicQuantizeMatMul`: quantizes the left side over its whole range.
struct Dynamic(QuantizedOperands);

impl Executable for Dynamic {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let columns = self.0.matmuls_of(shapes)?.shape[1].next_multiple_of(16);
        let quantized = quantized_len(element_count(shapes.input(0))?);
        bytes_of::<f32>(self.0.workspace_len(shapes)?.saturating_add(quantized).saturating_add(columns))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut workspace = scratch::<f32>(cx.workspace()?)?;
        let cpu = Cpu::with_threads(cx.threads());
        let (a, b) = (cx.input(0)?, cx.find_input(1));
        let matmuls = self.0.matmuls(a.shape(), b.map_or(&[], |b| b.shape()))?;
        let (columns, values) = (matmuls.shape[1], a.as_slice::<f32>()?);
        // Bytes live in the workspace of floats, which all parts of it share.
        let quantized: &mut [u8] =
            bytemuck::cast_slice_mut(take(&mut workspace, quantized_len(values.len()))?);
        let quantized = &mut quantized[..values.len()];
        // The whole input has one scale and zero point, so the range is known only after a first
        // pass.
        let quantizer = ByteQuantizer::covering(cpu.isa, cpu.threads, values);
        quantizer.encode(cpu.isa, cpu.threads, values, quantized);
        let factors = take(&mut workspace, columns.next_multiple_of(16))?;
        // Both scales make one factor per column, so the epilogue multiplies once.
        let factors = scaled(quantizer.scale, column_scales(cx.input(2)?, columns)?, &mut factors[..columns]);
        let (zero, rhs_zeros) = ([quantizer.zero as i32], zero_points(cx.find_input(3))?);
        let bias = column_bias(cx.find_input(4), columns)?;
        let mut numbers = parts(cx.output(0)?.as_mut_slice::<f32>()?, &matmuls);
        let zeros = [&zero[..], &rhs_zeros];
        let inputs = QuantizedInputs { lhs: quantized, signed: false, matmuls: &matmuls, zeros, bias: &[] };
        self.0.run(cx, &inputs, workspace, |_| {
            let scaling = Scaling { column_bias: bias, ..Scaling::new(factors) };
            Ok(Target::Numbers { values: numbers()?, scaling })
        })
    }
}

/// `MatMulIntegerToFloat`.
struct ToFloat(QuantizedOperands);

impl Executable for ToFloat {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let columns = self.0.matmuls_of(shapes)?.shape[1].next_multiple_of(16);
        bytes_of::<f32>(self.0.workspace_len(shapes)?.saturating_add(columns))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut workspace = scratch::<f32>(cx.workspace()?)?;
        let (a, b) = (cx.input(0)?, cx.find_input(1));
        let matmuls = self.0.matmuls(a.shape(), b.map_or(&[], |b| b.shape()))?;
        let columns = matmuls.shape[1];
        let factors = take(&mut workspace, columns.next_multiple_of(16))?;
        let (scale, scales) = (single(cx.input(2)?, "a_scale")?, column_scales(cx.input(3)?, columns)?);
        let factors = scaled(scale, scales, &mut factors[..columns]);
        let zeros = [single_zero(cx.find_input(4), "a_zero_point")?, zero_points(cx.find_input(5))?];
        let bias = column_bias(cx.find_input(6), columns)?;
        let mut numbers = parts(cx.output(0)?.as_mut_slice::<f32>()?, &matmuls);
        let (lhs, zeros) = (a.bytes()?, [&zeros[0][..], &zeros[1]]);
        let inputs = QuantizedInputs { lhs, signed: !is_unsigned(a), matmuls: &matmuls, zeros, bias: &[] };
        self.0.run(cx, &inputs, workspace, |_| {
            let scaling = Scaling { column_bias: bias, ..Scaling::new(factors) };
            Ok(Target::Numbers { values: numbers()?, scaling })
        })
    }
}

/// `QGemm`, with a quantized or float result.
struct QGemm {
    sides: QuantizedOperands,
    alpha: f32,
}

fn make_gemm(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (alpha, transposed) = (cx.attrs().float("alpha")?, cx.attrs().flag("transB")?);
    Ok(Box::new(QGemm { sides: QuantizedOperands::with_rhs(cx, [0, 3], transposed)?, alpha }))
}

impl Executable for QGemm {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let columns = self.sides.matmuls_of(shapes)?.shape[1].next_multiple_of(16);
        bytes_of::<f32>(self.sides.workspace_len(shapes)?.saturating_add(columns))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut workspace = scratch::<f32>(cx.workspace()?)?;
        let a = cx.input(0)?;
        // The right side is constant and packed, so its shape comes from there.
        let matmuls = self.sides.matmuls(a.shape(), &[])?;
        let columns = matmuls.shape[1];
        let factors = take(&mut workspace, columns.next_multiple_of(16))?;
        let factors = &mut factors[..columns];
        let scale = self.alpha * single(cx.input(1)?, "a_scale")?;
        let y_scale = cx.find_input(7).map(|view| single(view, "y_scale")).transpose()?;
        // Folds alpha and all three scales into one factor, before any rounding to integers.
        let scaled = |b: f32| y_scale.map_or(scale * b, |y| scale * b / y);
        let factors = match column_scales(cx.input(4)?, columns)? {
            [one] => Factors::One(scaled(*one)),
            scales => {
                factors.iter_mut().zip(scales).for_each(|(to, b)| *to = scaled(*b));
                Factors::Columns(factors)
            }
        };
        let zeros = [single_zero(cx.find_input(2), "a_zero_point")?, zero_points(cx.find_input(5))?];
        let bias = cx.find_input(6).map(|bias| bias.to_cow::<i32>()).transpose()?.unwrap_or_default();
        let y_zero = single_zero(cx.find_input(8), "y_zero_point")?;
        let inputs = QuantizedInputs {
            lhs: a.bytes()?,
            signed: !is_unsigned(a),
            matmuls: &matmuls,
            zeros: [&zeros[0], &zeros[1]],
            bias: &bias,
        };
        let output = cx.output(0)?;
        // With a zero point, the result is quantized.
        if let Some(zero) = y_zero.first().copied() {
            let signed = output.dtype().is_signed();
            let mut quantized = parts(output.bytes_mut()?, &matmuls);
            return self.sides.run(cx, &inputs, workspace, |_| {
                Ok(Target::Quantized { values: quantized()?, factors, zero, signed })
            });
        }
        let mut numbers = parts(output.as_mut_slice::<f32>()?, &matmuls);
        self.sides.run(cx, &inputs, workspace, |_| {
            Ok(Target::Numbers { values: numbers()?, scaling: Scaling::new(factors) })
        })
    }
}
