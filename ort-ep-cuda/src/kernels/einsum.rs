//! `Einsum` kernels: two operands as a batched GEMM if the subscripts allow it, otherwise one
//! reduction per result element.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::ops::Equation;
use ort_core::ops::reduce::problem::{EinsumAxes, SubscriptAxes};
use ort_core::ops::tensor::geometry::product;
use ort_core::{Result, error};
use ort_gpu::gemm::{Gemm, MatrixLayout};

use super::gemm::Product;
use super::rows::SHORT_FLOATS;
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand, Walk, strides};

/// The supported types, as for `MatMul`: integer accumulation wraps.
const PRODUCTS: TypeSet =
    SHORT_FLOATS.union(TypeSet::of(&[DType::F64, DType::I32, DType::U32, DType::I64, DType::U64]));
/// The most operands, as in `cu/einsum.cu`.
const MOST_OPERANDS: usize = 4;
/// The most batch axes of a GEMM.
const MOST_BATCHES: usize = 6;
/// From this many terms on, each reduction gets a block, provided there are fewer than [`FEW`]
/// results.
const LONG: usize = 256;
/// With at least this many results, a thread each suffices.
const FEW: usize = 1 << 14;

cuda_kernels![CudaKernel {
    workspace: Some(workspace),
    ..CudaKernel::new(
        KernelDef { op: "Einsum", types: &[("T", PRODUCTS)], when: has_few_subscripts, ..KernelDef::BASE },
        launches,
    )
}];

fn has_few_subscripts(node: &NodeView<'_>) -> bool {
    let count = node.node.inputs.len();
    let ranks: Option<Vec<usize>> = (0..count).map(|index| node.rank(index)).collect();
    let (Some(ranks), Ok(text)) = (ranks, node.attrs().string("equation")) else { return false };
    let few = |equation: Equation| equation.output.len() + equation.summed().len() <= MOST_AXES;
    count <= MOST_OPERANDS && Equation::parse(text, &ranks).is_ok_and(few)
}

fn walk(axes: &SubscriptAxes) -> Walk {
    Walk::new(&axes.sizes, &axes.steps)
}

/// An equation for concrete operands.
struct EinsumProblem<'a> {
    operands: Vec<&'a Operand>,
    axes: EinsumAxes,
}

impl<'a> EinsumProblem<'a> {
    fn new(cx: &'a OpCx<'_>) -> Result<EinsumProblem<'a>> {
        let operands = (0..cx.inputs.len()).map(|index| cx.input(index)).collect::<Result<Vec<_>>>()?;
        let shapes: Vec<&[usize]> = operands.iter().map(|operand| &*operand.shape).collect();
        let axes = EinsumAxes::new(cx.attrs, &shapes)?;
        Ok(EinsumProblem { operands, axes })
    }

    /// Expresses the equation as a batched GEMM, if there are two operands and one summed axis
    /// after merging.
    fn product(&self) -> Option<EinsumGemm> {
        let (kept, summed) = (walk(&self.axes.kept), walk(&self.axes.summed));
        let ([depth], [a_depth, b_depth]) = (&*summed.sizes, &*summed.steps) else { return None };
        let ([a_depth], [b_depth], [a, b]) = (&**a_depth, &**b_depth, &*kept.steps) else { return None };
        let axes: Vec<[i64; 2]> = a.iter().zip(b).map(|(a, b)| [*a, *b]).collect();
        // Rows and columns are the last axes along which exactly one operand moves.
        let rows = axes.iter().rposition(|[a, b]| *a != 0 && *b == 0);
        let columns = axes.iter().rposition(|[a, b]| *a == 0 && *b != 0);
        // If the second operand's axis comes first in the result, exchanged operands keep that
        // order.
        let exchanged = rows.zip(columns).is_some_and(|(rows, columns)| columns < rows);
        let sides = if exchanged { [columns, rows] } else { [rows, columns] };
        let batch = (0..axes.len()).filter(|axis| ![rows, columns].contains(&Some(*axis)));
        let order: Vec<usize> = batch.chain(sides.into_iter().flatten()).collect();
        let batches = order.len() - sides.iter().flatten().count();
        // A GEMM needs a depth and a row or column axis, and kernels walk a limited number of batch
        // axes.
        let possible = *depth > 0 && batches < order.len() && batches <= MOST_BATCHES;
        let size = |axis: &usize| kept.sizes.get(*axis).copied().unwrap_or(1);
        let side = |first: bool| {
            let own = usize::from(first == exchanged);
            let step = |axis: &usize| {
                axes.get(*axis).and_then(|steps| steps.get(own)).map_or(0, |step| *step as usize)
            };
            let along = [*a_depth, *b_depth].get(own).map_or(0, |step| *step as usize);
            let outer = sides.get(usize::from(!first)).copied().flatten();
            let (outer, outer_step) = (outer.as_ref().map_or(1, size), outer.as_ref().map_or(0, step));
            let matrix = if first {
                [(outer, outer_step), (*depth, along)]
            } else {
                [(*depth, along), (outer, outer_step)]
            };
            let of_batch = order.iter().take(batches).map(|axis| (size(axis), step(axis)));
            let (sizes, steps) = of_batch.chain(matrix).unzip();
            MatrixLayout { sizes, steps }
        };
        let (sides, sizes) = ([side(true), side(false)], order.iter().map(size).collect());
        possible.then_some(EinsumGemm { sides, exchanged, order, sizes })
    }

    /// Returns the launch with one reduction per result element.
    fn launch(&self, y: &Operand) -> Result<Launch> {
        let terms = product(&self.axes.summed.sizes);
        let mut words = Vec::new();
        for walk in [walk(&self.axes.kept), walk(&self.axes.summed)] {
            words.push(walk.sizes.len() as i64);
            let sizes: Vec<i64> = walk.sizes.iter().map(|size| *size as i64).collect();
            // Missing operands have zeros, because the structure has room for all of them.
            let none = std::iter::repeat_n(&[][..], MOST_OPERANDS - walk.steps.len().min(MOST_OPERANDS));
            for numbers in std::iter::once(&*sizes).chain(walk.steps.iter().map(Vec::as_slice)).chain(none) {
                words.extend(numbers.iter().copied().chain(std::iter::repeat(0)).take(MOST_AXES));
            }
        }
        words.push(terms as i64);
        let suffix = match y.dtype {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F64 => "f64",
            DType::I32 | DType::U32 => "i32",
            DType::I64 | DType::U64 => "i64",
            other => return Err(error!(NotImplemented, "sums of {} are not supported", other.name())),
        };
        let long = terms >= LONG && y.count() < FEW;
        let launch =
            Launch::new("einsum", format!("einsum_{}_{suffix}", if long { "blocks" } else { "each" }));
        let launch = if long { launch.grid([y.count(), 1, 1])? } else { launch.threads(y.count())? };
        let operands = (0..MOST_OPERANDS).map(|index| self.operands.get(index).copied());
        let launch = operands.fold(launch, |launch, operand| launch.find_tensor(operand)).tensor(y);
        let launch = launch.ints::<{ 2 * (1 + MOST_AXES + MOST_OPERANDS * MOST_AXES) + 1 }>(&words)?;
        if long { Ok(launch) } else { launch.uint(y.count()) }
    }
}

/// A batched GEMM. `order` lists the axes of the result as it computes them, rows and columns last.
struct EinsumGemm {
    sides: [MatrixLayout; 2],
    /// Whether the second operand is on the left.
    exchanged: bool,
    order: Vec<usize>,
    sizes: Vec<usize>,
}

impl EinsumGemm {
    /// Reserves the GEMM's result in the workspace if its axes are ordered differently from the
    /// output's.
    fn unordered(&self, cx: &OpCx<'_>, taken: &mut usize) -> Result<Option<Operand>> {
        let dtype = cx.output(0)?.dtype;
        Ok((!self.order.is_sorted()).then(|| cx.workspace(taken, dtype, &self.sizes)))
    }

    fn launches(self, cx: &OpCx<'_>, operands: &[&Operand], y: &Operand) -> Result<Vec<Launch>> {
        let [a, b] = operands else { return Err(error!(Fail, "a product of {} operands", operands.len())) };
        let unordered = self.unordered(cx, &mut 0)?;
        let operands = if self.exchanged { [*b, *a] } else { [*a, *b] };
        let product = Product::new(Gemm::new(operands, self.sides, unordered.as_ref().unwrap_or(y))?);
        let mut launches = product.launches(cx)?;
        // An `Einsum` of one operand transposes the result into the output.
        if let Some(unordered) = &unordered {
            let mut axes: Vec<(usize, usize, i64)> = Vec::new();
            for ((axis, size), step) in self.order.iter().zip(&self.sizes).zip(strides(&self.sizes)) {
                axes.push((*axis, *size, step as i64));
            }
            // Sorted by axis, the sizes are those of the output.
            axes.sort_unstable();
            let (sizes, steps) = axes.into_iter().map(|(_, size, step)| (size, step)).unzip();
            let kept = SubscriptAxes { sizes, steps: vec![steps] };
            let summed = SubscriptAxes { sizes: Vec::new(), steps: vec![Vec::new()] };
            let axes = EinsumAxes { kept, summed };
            launches.push(EinsumProblem { operands: vec![unordered], axes }.launch(y)?);
        }
        Ok(launches)
    }
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    if let Some(product) = EinsumProblem::new(cx)?.product() {
        product.unordered(cx, &mut taken)?;
    }
    Ok(taken)
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (sum, y) = (EinsumProblem::new(cx)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    match sum.product() {
        Some(product) => product.launches(cx, &sum.operands, y),
        None => Ok(vec![sum.launch(y)?]),
    }
}
