//! `Einsum`: a batched GEMM if the subscripts of two operands allow it, else a direct sum for each
//! element of the result.

use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::Equation;
use ort_core::ops::reduce::problem::EinsumAxes;
use ort_core::ops::tensor::geometry::product;
use ort_core::{Result, ensure};
use ort_gpu::gemm::{Gemm, StridedTensor};

use super::gemm::Product;
use super::matmul::PRODUCTS;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand, Walk, strides};
use crate::shader::{Element, MOST_AXES, Shader};

/// The names of operands in shaders.
const NAMES: [&str; 4] = ["x0", "x1", "x2", "x3"];

wgpu_kernels![WgpuKernel::new(
    KernelDef { op: "Einsum", types: &[("T", PRODUCTS)], when: has_few_subscripts, ..KernelDef::BASE },
    einsum,
)];

fn has_few_subscripts(node: &NodeView<'_>) -> bool {
    let count = node.node.inputs.len();
    let ranks: Option<Vec<usize>> = (0..count).map(|index| node.rank(index)).collect();
    let (Some(ranks), Ok(text)) = (ranks, node.attrs().string("equation")) else { return false };
    // Both kinds of subscripts are the axes of one walk.
    let few = |equation: Equation| equation.output.len() + equation.summed().len() <= MOST_AXES;
    count <= NAMES.len() && Equation::parse(text, &ranks).is_ok_and(few)
}

/// An equation for concrete shapes.
struct EinsumProblem(EinsumAxes);

impl EinsumProblem {
    /// Returns it as a batched GEMM. `None` unless there are two operands, and the summed axes
    /// merge into one stride.
    fn product(&self, operands: &[&Operand], y: &Operand) -> Result<Option<Product>> {
        let ([a, b], EinsumAxes { kept, summed }) = (operands, &self.0) else { return Ok(None) };
        let sums = Walk::new(&summed.sizes, &summed.steps);
        let ([depth], [[a_depth], [b_depth]]) = (&*sums.sizes, [0, 1].map(|side| steps_of(&sums, side)))
        else {
            return Ok(None);
        };
        let mut steps = kept.steps.clone();
        // The result is the third tensor of the walk, and contiguous.
        steps.push(strides(&kept.sizes).into_iter().map(|step| step as i64).collect());
        let walk = Walk::new(&kept.sizes, &steps);
        let axes = MatrixAxes::of(&walk);
        // Without rows and columns every matrix is a dot product, which the tiles of a GEMM would
        // waste.
        if axes.rows.is_none() && axes.columns.is_none() {
            return Ok(None);
        }
        let size = |axis: Option<usize>| axis.and_then(|axis| walk.sizes.get(axis)).copied().unwrap_or(1);
        let strided = |index: usize, tensor: &Operand, depth: i64| {
            let step = |axis: usize| steps_of(&walk, index).get(axis).copied().unwrap_or(0) as usize;
            StridedTensor {
                tensor: tensor.clone(),
                batch: axes.batch.iter().map(|axis| step(*axis)).collect(),
                row: axes.rows.map_or(0, step),
                column: axes.columns.map_or(0, step),
                depth: depth as usize,
            }
        };
        Ok(Some(Product::new(Gemm {
            batch: axes.batch.iter().map(|axis| size(Some(*axis))).collect(),
            rows: size(axes.rows),
            columns: size(axes.columns),
            depth: *depth,
            lhs: strided(0, a, *a_depth),
            rhs: strided(1, b, *b_depth),
            result: strided(2, y, 0),
        })))
    }

    /// Returns a dispatch that sums each element of the result directly.
    fn elements(&self, cx: &OpCx<'_>, operands: &[&Operand], y: &Operand) -> Result<Dispatch> {
        let EinsumAxes { kept, summed } = &self.0;
        let terms = product(&summed.sizes);
        // Shaders count the terms of all sums in 32 bits.
        let all = y.count().checked_mul(terms.max(1)).filter(|all| u32::try_from(*all).is_ok());
        ensure!(all.is_some(), NotImplemented, "the sums have more than 2^32 terms");
        // The summed subscripts are the innermost.
        let sizes = [&*kept.sizes, &*summed.sizes].concat();
        let steps = kept.steps.iter().zip(&summed.steps).map(|(kept, summed)| [&**kept, &**summed].concat());
        let walk = Walk::new(&sizes, &steps.collect::<Vec<_>>());
        let mut shader = Shader::new(cx).write("y", y).walk(&walk, &NAMES).number("terms", terms);
        let mut factors = Vec::new();
        for (name, operand) in NAMES.into_iter().zip(operands) {
            shader = shader.read(name, operand);
            factors.push(format!("{name}(at_{name}(i * p.terms + k))"));
        }
        let code = format!(
            "fn element(i: u32) {{\nvar sum = {}();\n\
             for (var k = 0u; k < p.terms; k++) {{ sum += {}; }}\n\
             set_y(i, sum);\n}}\n",
            Element::of(y.dtype)?.value,
            factors.join(" * ")
        );
        shader.each(y.count(), &code)
    }
}

fn steps_of(walk: &Walk, tensor: usize) -> &[i64] {
    walk.steps.get(tensor).map_or(&[], Vec::as_slice)
}

/// Which axes of a result are rows and columns of its matrices.
struct MatrixAxes {
    batch: Vec<usize>,
    rows: Option<usize>,
    columns: Option<usize>,
}

impl MatrixAxes {
    /// Chooses as rows the last axis along which only the left operand moves, and as columns the
    /// last one along which only the right operand does.
    fn of(walk: &Walk) -> MatrixAxes {
        let walks =
            |tensor: usize, axis: usize| steps_of(walk, tensor).get(axis).is_some_and(|step| *step != 0);
        let rank = walk.sizes.len();
        let rows = (0..rank).rfind(|axis| walks(0, *axis) && !walks(1, *axis));
        let columns = (0..rank).rfind(|axis| walks(1, *axis) && !walks(0, *axis));
        let batch = (0..rank).filter(|axis| Some(*axis) != rows && Some(*axis) != columns).collect();
        MatrixAxes { batch, rows, columns }
    }
}

fn einsum(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let mut operands = Vec::new();
    for index in 0..cx.inputs.len() {
        operands.push(cx.input(index)?);
    }
    let shapes: Vec<&[usize]> = operands.iter().map(|operand| &*operand.shape).collect();
    let (sum, y) = (EinsumProblem(EinsumAxes::new(cx.attrs, &shapes)?), cx.output(0)?);
    match sum.product(&operands, y)? {
        Some(product) => product.dispatches(cx),
        None => Ok(vec![sum.elements(cx, &operands, y)?]),
    }
}
