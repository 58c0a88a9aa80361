//! `Einsum`: a batched GEMM if the subscripts of two operands allow it, else a direct sum for each
//! element of the result.

use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::{Equation, Label};
use ort_core::{Result, ensure, error};

use super::gemm::{Part, Product};
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
    let few = |equation: Equation| equation.output.len() + equation.summed().len() <= MOST_AXES;
    count <= NAMES.len() && Equation::parse(text, &ranks).is_ok_and(few)
}

/// An equation for concrete shapes: the size of each subscript, the output's first, and the stride
/// of each operand along it.
struct Sum {
    sizes: Vec<usize>,
    steps: Vec<Vec<i64>>,
    /// The number of subscripts of the output.
    outputs: usize,
}

impl Sum {
    fn new(text: &str, operands: &[&Operand]) -> Result<Sum> {
        let ranks: Vec<usize> = operands.iter().map(|operand| operand.rank()).collect();
        let equation = Equation::parse(text, &ranks)?;
        let mut labels = equation.output.clone();
        labels.extend(equation.summed());
        let mut sum = Sum { sizes: vec![1; labels.len()], steps: Vec::new(), outputs: equation.output.len() };
        for (own, operand) in equation.inputs.iter().zip(operands) {
            sum.add(&labels, own, operand)?;
        }
        Ok(sum)
    }

    /// Adds an operand with its subscripts. A repeated subscript walks along a diagonal.
    fn add(&mut self, labels: &[Label], own: &[Label], operand: &Operand) -> Result<()> {
        let mut steps = vec![0; labels.len()];
        for ((label, size), stride) in own.iter().zip(&operand.shape).zip(strides(&operand.shape)) {
            let place = labels.iter().position(|known| known == label).unwrap_or(usize::MAX);
            let (Some(known), Some(step)) = (self.sizes.get_mut(place), steps.get_mut(place)) else {
                return Err(error!(Fail, "a subscript is neither kept nor summed"));
            };
            // Size 1 broadcasts, and keeps stride 0.
            if *size == 1 {
                continue;
            }
            ensure!(
                *known == 1 || known == size,
                InvalidArgument,
                "a subscript has sizes {known} and {size}"
            );
            *known = *size;
            *step += stride as i64;
        }
        self.steps.push(steps);
        Ok(())
    }

    /// Returns it as a batched GEMM. `None` unless there are two operands, and the summed axes
    /// merge into one stride.
    fn product(&self, operands: &[&Operand], y: &Operand) -> Result<Option<Product>> {
        let ([a, b], [a_steps, b_steps]) = (operands, &*self.steps) else { return Ok(None) };
        let ((kept, summed), (a_steps, a_summed), (b_steps, b_summed)) =
            (split(&self.sizes, self.outputs), split(a_steps, self.outputs), split(b_steps, self.outputs));
        let sums = Walk::new(summed, &[a_summed.to_vec(), b_summed.to_vec()]);
        let ([depth], [[a_depth], [b_depth]]) = (&*sums.sizes, [0, 1].map(|side| steps_of(&sums, side)))
        else {
            return Ok(None);
        };
        let y_steps = strides(kept).into_iter().map(|step| step as i64).collect();
        let walk = Walk::new(kept, &[a_steps.to_vec(), b_steps.to_vec(), y_steps]);
        let axes = Axes::of(&walk);
        // Without rows and columns every matrix is a dot product, which the tiles of a GEMM would
        // waste.
        if axes.rows.is_none() && axes.columns.is_none() {
            return Ok(None);
        }
        let size = |axis: Option<usize>| axis.and_then(|axis| walk.sizes.get(axis)).copied().unwrap_or(1);
        let depths = [*a_depth, *b_depth, 0];
        let tensors = [("a", *a), ("b", *b), ("y", y)];
        let parts = tensors.into_iter().zip(depths).enumerate().map(|(index, ((name, tensor), depth))| {
            let step = |axis: usize| steps_of(&walk, index).get(axis).copied().unwrap_or(0) as usize;
            Part {
                name,
                tensor: tensor.clone(),
                batch: axes.batch.iter().map(|axis| step(*axis)).collect(),
                row: axes.rows.map_or(0, step),
                column: axes.columns.map_or(0, step),
                depth: depth as usize,
            }
        });
        Ok(Some(Product {
            batch: axes.batch.iter().map(|axis| size(Some(*axis))).collect(),
            rows: size(axes.rows),
            columns: size(axes.columns),
            depth: *depth,
            parts: parts.collect(),
            numbers: Vec::new(),
            result: "return y_t(sum);".to_owned(),
        }))
    }

    /// Returns a dispatch that sums each element of the result directly.
    fn elements(&self, cx: &OpCx<'_>, operands: &[&Operand], y: &Operand) -> Result<Dispatch> {
        let terms =
            self.sizes.iter().skip(self.outputs).fold(1, |all: usize, size| all.saturating_mul(*size));
        let all = y.count().checked_mul(terms.max(1)).filter(|all| u32::try_from(*all).is_ok());
        ensure!(all.is_some(), NotImplemented, "the sums have more than 2^32 terms");
        let walk = Walk::new(&self.sizes, &self.steps);
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

fn split<T>(all: &[T], at: usize) -> (&[T], &[T]) {
    all.split_at_checked(at).unwrap_or((all, &[]))
}

fn steps_of(walk: &Walk, tensor: usize) -> &[i64] {
    walk.steps.get(tensor).map_or(&[], Vec::as_slice)
}

/// Which axes of a result are rows and columns of its matrices.
struct Axes {
    batch: Vec<usize>,
    rows: Option<usize>,
    columns: Option<usize>,
}

impl Axes {
    /// Chooses as rows the last axis along which only the left operand moves, and as columns the
    /// last one along which only the right operand does.
    fn of(walk: &Walk) -> Axes {
        let walks =
            |tensor: usize, axis: usize| steps_of(walk, tensor).get(axis).is_some_and(|step| *step != 0);
        let rank = walk.sizes.len();
        let rows = (0..rank).rfind(|axis| walks(0, *axis) && !walks(1, *axis));
        let columns = (0..rank).rfind(|axis| walks(1, *axis) && !walks(0, *axis));
        let batch = (0..rank).filter(|axis| Some(*axis) != rows && Some(*axis) != columns).collect();
        Axes { batch, rows, columns }
    }
}

fn einsum(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let mut operands = Vec::new();
    for index in 0..cx.inputs.len() {
        operands.push(cx.input(index)?);
    }
    let (sum, y) = (Sum::new(cx.attrs.string("equation")?, &operands)?, cx.output(0)?);
    match sum.product(&operands, y)? {
        Some(product) => product.dispatches(cx),
        None => Ok(vec![sum.elements(cx, &operands, y)?]),
    }
}
