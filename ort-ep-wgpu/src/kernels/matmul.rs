//! `MatMul`, `Gemm` and their fused forms, as GEMMs with transposed operands and an epilogue.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::fused::activation::Activation;
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::{Result, ensure, error};

use super::activation::expression;
use super::elementwise::FLOATS;
use super::gemm::{Part, Product};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand, strides};
use crate::shader::MOST_AXES;

/// The element types of a GEMM. 32-bit integer sums wrap, as on the host.
pub(super) const PRODUCTS: TypeSet = FLOATS.union(TypeSet::of(&[DType::I32, DType::U32]));

const MATMUL: KernelDef =
    KernelDef { op: "MatMul", types: &[("T", PRODUCTS)], when: has_few_axes, ..KernelDef::BASE };
const FUSED_MATMUL: KernelDef = KernelDef { op: "FusedMatMul", types: &[("T", FLOATS)], ..MATMUL };

wgpu_kernels![
    WgpuKernel::new(MATMUL, matmul),
    WgpuKernel::new(KernelDef { domain: MICROSOFT, ..FUSED_MATMUL }, fused_matmul),
    WgpuKernel::new(KernelDef { domain: RUNTIME, in_place: &[(3, 0)], ..FUSED_MATMUL }, with_addends),
    WgpuKernel::new(
        KernelDef { op: "Gemm", types: &[("T", PRODUCTS)], when: has_plain_factors, ..KernelDef::BASE },
        gemm,
    ),
    WgpuKernel::new(
        KernelDef { domain: MICROSOFT, op: "FusedGemm", types: &[("T", FLOATS)], ..KernelDef::BASE },
        gemm,
    ),
];

/// Returns whether the ranks of both operands are known and at most [`MOST_AXES`].
pub(super) fn has_few_axes(node: &NodeView<'_>) -> bool {
    [0, 1].into_iter().all(|side| node.rank(side).is_some_and(|rank| rank <= MOST_AXES))
}

/// Returns whether `alpha` and `beta` are 1, or the type is a float: integers have no fractional
/// factor.
fn has_plain_factors(node: &NodeView<'_>) -> bool {
    let plain = |name| matches!(node.attrs().float(name), Ok(1.0));
    let is_float = node.dtype(0).is_some_and(|dtype| FLOATS.contains(dtype));
    is_float || (plain("alpha") && plain("beta"))
}

/// Returns the axis order of an operand. `batch` moves its first axis behind the other batch axes,
/// `matrix` swaps the last two.
fn order(rank: usize, matrix: bool, batch: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rank).collect();
    if batch && rank > 2 {
        order.get_mut(..rank - 1).into_iter().for_each(|axes| axes.rotate_left(1));
    }
    if matrix && rank > 1 {
        order.swap(rank - 1, rank - 2);
    }
    order
}

/// An operand: its sizes and strides, in the order of the GEMM.
#[derive(Debug)]
pub(super) struct Side {
    sizes: Vec<usize>,
    steps: Vec<usize>,
}

impl Side {
    /// An operand with reordered axes. A vector is a row on the left and a column on the right.
    fn new(tensor: &Operand, order: &[usize], is_left: bool) -> Result<Side> {
        let own = strides(&tensor.shape);
        let mut sizes: Vec<usize> = order.iter().map(|axis| tensor.size(*axis)).collect();
        let mut steps: Vec<usize> = order.iter().filter_map(|axis| own.get(*axis)).copied().collect();
        if sizes.len() == 1 {
            let place = if is_left { 0 } else { 1 };
            sizes.insert(place, 1);
            steps.insert(place, 0);
        }
        ensure!(
            sizes.len() >= 2,
            InvalidArgument,
            "an operand of the matrix product has rank {}",
            tensor.rank()
        );
        Ok(Side { sizes, steps })
    }

    pub(super) fn plain(tensor: &Operand, is_left: bool) -> Result<Side> {
        Side::new(tensor, &order(tensor.rank(), false, false), is_left)
    }

    pub(super) fn matrix(tensor: &Operand, transposed: bool, is_left: bool) -> Result<Side> {
        Side::new(tensor, &order(tensor.rank(), transposed, false), is_left)
    }

    fn split(&self) -> Result<(&[usize], [usize; 2], [usize; 2])> {
        match (&*self.sizes, &*self.steps) {
            ([batch @ .., rows, columns], [.., row, column]) => {
                Ok((batch, [*rows, *columns], [*row, *column]))
            }
            _ => Err(error!(Fail, "an operand of the matrix product is not a matrix")),
        }
    }

    /// Returns the strides along a batch that the operand broadcasts to.
    fn batch_steps(&self, batch: &[usize]) -> Result<Vec<usize>> {
        let own = self.sizes.len().saturating_sub(2);
        let missing = batch.len().checked_sub(own);
        let missing = missing.ok_or_else(|| error!(Fail, "an operand has more batches than the output"))?;
        let mut steps = vec![0; missing];
        steps.extend(
            self.sizes
                .iter()
                .zip(&self.steps)
                .take(own)
                .map(|(size, step)| if *size == 1 { 0 } else { *step }),
        );
        Ok(steps)
    }
}

/// Builds the GEMM of two operands, without an epilogue.
pub(super) fn product([a, b]: [&Operand; 2], [left, right]: [Side; 2], y: &Operand) -> Result<Product> {
    let ((a_batch, [rows, depth], a_steps), (b_batch, [steps, columns], b_steps)) =
        (left.split()?, right.split()?);
    ensure!(
        depth == steps,
        InvalidArgument,
        "the inner sizes of the matrix product differ: {depth} and {steps}"
    );
    let batch = ort_core::spec::broadcast::shapes(&[a_batch, b_batch])?;
    let mut whole = batch.to_vec();
    whole.extend([rows, columns]);
    let parts = vec![
        Part {
            name: "a",
            tensor: a.clone(),
            batch: left.batch_steps(&batch)?,
            row: a_steps[0],
            column: 0,
            depth: a_steps[1],
        },
        Part {
            name: "b",
            tensor: b.clone(),
            batch: right.batch_steps(&batch)?,
            row: 0,
            column: b_steps[1],
            depth: b_steps[0],
        },
        Part::broadcast("y", y, &whole, &whole)?,
    ];
    let result = "return y_t(sum);".to_owned();
    Ok(Product { batch: batch.to_vec(), rows, columns, depth, parts, numbers: Vec::new(), result })
}

fn matmul(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    product([a, b], [Side::plain(a, true)?, Side::plain(b, false)?], cx.output(0)?)?.dispatches(cx)
}

/// `FusedMatMul` of `com.microsoft`.
fn fused_matmul(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let side = |tensor: &Operand, [matrix, batch]: [&str; 2], is_left: bool| {
        let order = order(tensor.rank(), cx.attrs.flag(matrix)?, cx.attrs.flag(batch)?);
        Side::new(tensor, &order, is_left)
    };
    let sides = [side(a, ["transA", "transBatchA"], true)?, side(b, ["transB", "transBatchB"], false)?];
    let mut product = product([a, b], sides, cx.output(0)?)?;
    product.finish(cx.attrs.float("alpha")?, None)?;
    product.dispatches(cx)
}

/// `FusedMatMul` of the runtime's domain, with bias, residual and activation.
fn with_addends(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let sides =
        [Side::matrix(a, cx.attrs.flag("transA")?, true)?, Side::matrix(b, cx.attrs.flag("transB")?, false)?];
    let mut product = product([a, b], sides, cx.output(0)?)?;
    for (index, name) in [(2, "bias"), (3, "residual")] {
        if let Some(addend) = cx.find_input(index) {
            product.add(name, addend)?;
        }
    }
    product.finish(cx.attrs.float("alpha")?, Activation::of_attributes(cx.attrs)?.as_ref())?;
    product.dispatches(cx)
}

/// `Gemm` and `FusedGemm`.
fn gemm(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (a, b, beta) = (cx.input(0)?, cx.input(1)?, cx.attrs.float("beta")?);
    let sides =
        [Side::matrix(a, cx.attrs.flag("transA")?, true)?, Side::matrix(b, cx.attrs.flag("transB")?, false)?];
    let mut product = product([a, b], sides, cx.output(0)?)?;
    // `beta` 0 leaves `c` out, even if it is NaN.
    if let Some(c) = cx.find_input(2).filter(|_| beta != 0.0) {
        product.add("c", c)?;
        product.numbers.push(("beta", beta));
    }
    let activation = match cx.attrs.find_string("activation") {
        Some(_) => Some(Activation::of_gemm(cx.attrs)?),
        None => None,
    };
    product.finish(cx.attrs.float("alpha")?, activation.as_ref())?;
    product.dispatches(cx)
}

impl Product {
    /// Returns the sizes of the batch, followed by rows and columns.
    pub(super) fn whole(&self) -> Vec<usize> {
        self.batch.iter().copied().chain([self.rows, self.columns]).collect()
    }

    /// Adds a term of the epilogue, which broadcasts to the result.
    pub(super) fn add(&mut self, name: &'static str, tensor: &Operand) -> Result<()> {
        let part = Part::broadcast(name, tensor, &tensor.shape, &self.whole())?;
        self.parts.push(part);
        Ok(())
    }

    /// Sets the epilogue to `activation(alpha * sum + terms)`; the term `c` is multiplied by
    /// `beta`.
    fn finish(&mut self, alpha: f32, activation: Option<&Activation>) -> Result<()> {
        let mut value = "sum".to_owned();
        // The shader depends on the attributes anyway, so factors of 1 are left out.
        if alpha != 1.0 {
            self.numbers.push(("alpha", alpha));
            value = "p.alpha * sum".to_owned();
        }
        for part in &self.parts {
            match part.name {
                "c" if self.numbers.contains(&("beta", 1.0)) => value += " + c_value",
                "c" => value += " + p.beta * c_value",
                "bias" => value += " + bias_value",
                "residual" => value += " + residual_value",
                _ => {}
            }
        }
        let activated = activation.map(|activation| expression(activation, "x")).transpose()?;
        let result = activated.unwrap_or_else(|| "x".to_owned());
        self.result = format!("let x = {value};\nreturn y_t({result});");
        Ok(())
    }
}
