//! `Gemm`, and `FusedGemm` with an activation.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use std::ops::Range;

use num_traits::AsPrimitive;
use ort_core::dtype::{DType, Element, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, Precision, RunCx};
use ort_core::ops::fused::activation::Activation;
use ort_core::spec::MICROSOFT;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use crate::matmul_batch::spread;
use crate::transposed::TransposedLhs;
use ort_cpu_gemm::generic::{self, Number, View};
use ort_cpu_gemm::{Cpu, Gemm, LhsOperand, RhsOperand, RhsSource, Step, Strided, workspace_len};
use ort_cpu_kernel::activation::unary_of;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_kernel::packed::is_weight;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::packed_weight::{PackedWeight, gemm_cpu};
use ort_cpu_matmul::refused;
use ort_cpu_threads::interrupt::{pieces_mut, spending};
use ort_cpu_vector::elementwise::Unary;

const SINGLE: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

/// For a constant right side, which is packed once.
const PACKED: KernelDef = KernelDef {
    op: "Gemm",
    types: &[("T", SINGLE)],
    rank: 1,
    // Packing reads the weight at any alignment.
    unaligned: &[1],
    when: |node: &NodeView<'_>| {
        is_weight(node.dtype(1)) && node.constant(1).is_some_and(|tensor| tensor.shape().len() == 2)
    },
    make: |cx| via_f32(cx, make_packed),
    ..KernelDef::BASE
};

const UNPACKED: KernelDef = KernelDef {
    op: "Gemm",
    types: &[("T", SINGLE)],
    make: |cx| via_f32(cx, make_unpacked),
    ..KernelDef::BASE
};

cpu_kernels![
    PACKED,
    UNPACKED,
    KernelDef { domain: MICROSOFT, op: "FusedGemm", ..PACKED },
    KernelDef { domain: MICROSOFT, op: "FusedGemm", ..UNPACKED },
    KernelDef {
        op: "Gemm",
        types: &[("T", TypeSet::HIGH_PRECISION)],
        rank: -1,
        make: make_generic,
        ..KernelDef::BASE
    },
];

/// The attributes of a node.
#[derive(Clone, Copy)]
struct Options {
    alpha: f32,
    beta: f32,
    transposed: [bool; 2],
    activation: Option<Unary>,
}

impl Options {
    fn new(cx: &CompileCx<'_>) -> Result<Options> {
        let attrs = cx.attrs();
        let activation = match attrs.find_string("activation") {
            Some(_) => Some(unary_of(&Activation::of_gemm(attrs)?)?),
            None => None,
        };
        Ok(Options {
            activation,
            alpha: attrs.float("alpha")?,
            beta: attrs.float("beta")?,
            transposed: [attrs.flag("transA")?, attrs.flag("transB")?],
        })
    }

    /// Returns the shape (rows, columns) and strides of the side at `index`, transposed if the node
    /// says so.
    fn side(&self, index: usize, shape: &[usize]) -> Result<([usize; 2], [usize; 2])> {
        match *shape {
            [rows, columns] if self.transposed[index] => Ok(([columns, rows], [1, columns])),
            [rows, columns] => Ok(([rows, columns], [columns, 1])),
            _ => Err(error!(InvalidArgument, "an operand of shape {shape:?} is not a matrix")),
        }
    }
}

fn make_unpacked(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(Single { options: Options::new(cx)?, precision: cx.precision, rhs: None }))
}

fn make_packed(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let options = Options::new(cx)?;
    let view = cx.constant(1).ok_or_else(|| error!(Fail, "the right operand is not constant"))?;
    let (shape, strides) = options.side(1, view.shape())?;
    let rhs = Some(PackedWeight::of_input(cx, 1, shape, strides)?);
    Ok(Box::new(Single { options, precision: cx.precision, rhs }))
}

struct Single {
    options: Options,
    precision: Precision,
    rhs: Option<PackedWeight>,
}

impl Single {
    fn columns(&self, b: &[usize]) -> Result<usize> {
        match &self.rhs {
            Some(rhs) => Ok(rhs.columns),
            None => Ok(self.options.side(1, b)?.0[1]),
        }
    }
}

impl Single {
    /// Returns whether the left side is column-major and worth packing.
    fn packs_lhs(&self, shape: [usize; 3]) -> bool {
        self.options.transposed[0] && TransposedLhs::pays(shape)
    }

    /// Returns the ranges of k that are computed one after another: a single one, unless the left
    /// side is packed part by part.
    fn parts(&self, shape: [usize; 3]) -> SmallVec<[Range<usize>; 4]> {
        match self.packs_lhs(shape) && self.rhs.is_none() {
            true => TransposedLhs::parts(1, shape).collect(),
            false => SmallVec::from_iter(std::iter::once(0..shape[2])),
        }
    }

    /// Returns how the third input is added: by an epilogue step, or as the initial result times
    /// the factor that is returned.
    fn addend<'a>(
        &self,
        c: Option<&TensorView<'a>>,
        result: &mut [f32],
        [rows, columns]: [usize; 2],
    ) -> Result<(SmallVec<[Step<'a>; 2]>, f32)> {
        // A beta of 0 leaves the old result unread, so it may be uninitialized.
        let Some(c) = c else { return Ok((SmallVec::new(), 0.0)) };
        let values = c.as_slice::<f32>()?;
        // The epilogue adds values as they are, so it needs a beta of 1.
        let step = match *c.shape() {
            [n] | [1, n] if n == columns && self.options.beta == 1.0 => Step::ColumnBias(values),
            [m, n] if [m, n] == [rows, columns] && self.options.beta == 1.0 => {
                Step::Residual { values, row_stride: columns }
            }
            _ => {
                // Any other addend is broadcast to the result first, which the GEMM then scales by
                // beta.
                spread(values, c.shape(), result, &[rows, columns])?;
                return Ok((SmallVec::new(), self.options.beta));
            }
        };
        Ok((SmallVec::from_iter([step]), 0.0))
    }
}

impl Executable for Single {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let [rows, k] = self.options.side(0, shapes.input(0))?.0;
        let columns = self.columns(shapes.input(1))?;
        // With one column, a transposed side is contiguous.
        let source = match (&self.rhs, self.options.transposed[1] && columns > 1) {
            (Some(_), _) => RhsSource::Packed,
            (None, true) => RhsSource::Strided,
            (None, false) => RhsSource::Rows,
        };
        let cpu = gemm_cpu(shapes.threads, self.precision, self.rhs.is_some(), rows);
        let part = |steps: Range<usize>| {
            let shape = [rows, columns, steps.len()];
            let packed = if self.packs_lhs(shape) { TransposedLhs::len(cpu, 1, shape) } else { 0 };
            packed.saturating_add(workspace_len(cpu, 1, shape, source))
        };
        bytes_of::<f32>(self.parts([rows, columns, k]).into_iter().map(part).max().unwrap_or(0))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let workspace = scratch(cx.workspace()?)?;
        let (a, b) = (cx.input(0)?, cx.find_input(1));
        let ([rows, k], lhs_strides) = self.options.side(0, a.shape())?;
        let cpu = gemm_cpu(cx.threads(), self.precision, self.rhs.is_some(), rows);
        let packed = self.rhs.as_ref().map(|rhs| rhs.operand(cpu)).transpose()?;
        // A packed weight may still be an input, because other nodes read it.
        let b = b.filter(|_| packed.is_none());
        let columns = self.columns(b.as_ref().map_or(&[], |b| b.shape()))?;
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        let c = cx.find_input(2).filter(|_| self.options.beta != 0.0);
        let (mut steps, beta) = self.addend(c.as_ref(), result, [rows, columns])?;
        steps.extend(self.options.activation.map(Step::Activate));
        let a = a.as_slice::<f32>()?;
        for part in self.parts([rows, columns, k]) {
            let mut rest = &mut *workspace;
            let shape = [rows, columns, part.len()];
            let lhs = if self.packs_lhs([rows, columns, k]) {
                let to = take(&mut rest, TransposedLhs::len(cpu, 1, shape))?;
                TransposedLhs::new(cpu, a, [rows, columns, k], part.clone(), to)?
                    .operand(cpu, 0)
                    .map_err(refused)?
            } else {
                LhsOperand::Plain(Strided::new(a, [rows, k], lhs_strides).map_err(refused)?)
            };
            let rhs = match (packed, &b) {
                (Some(packed), _) => packed,
                (None, Some(b)) => {
                    let strides = self.options.side(1, b.shape())?.1;
                    // The rows of B that belong to this range of k.
                    let values = b.as_slice()?.get(part.start * strides[0]..).unwrap_or(&[]);
                    RhsOperand::Plain(Strided::new(values, [part.len(), columns], strides).map_err(refused)?)
                }
                (None, None) => return Err(error!(Fail, "there is no right side")),
            };
            // Only the first range scales the initial result, and only the last one runs the
            // epilogue.
            let gemm = Gemm {
                alpha: self.options.alpha,
                beta: if part.start == 0 { beta } else { 1.0 },
                epilogue: if part.end == k { &steps } else { &[] },
                ..Gemm::new(lhs, rhs)
            };
            gemm.run(cpu, result, columns, rest).map_err(refused)?;
        }
        Ok(())
    }
}

fn make_generic(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let options = Options::new(cx)?;
    match cx.node.dtype(0) {
        Some(DType::F64) => Ok(Box::new(move |cx: &mut RunCx<'_>| multiply::<f64>(cx, options))),
        Some(DType::I32) => Ok(Box::new(move |cx: &mut RunCx<'_>| multiply::<i32>(cx, options))),
        Some(DType::I64) => Ok(Box::new(move |cx: &mut RunCx<'_>| multiply::<i64>(cx, options))),
        Some(DType::U32) => Ok(Box::new(move |cx: &mut RunCx<'_>| multiply::<u32>(cx, options))),
        Some(DType::U64) => Ok(Box::new(move |cx: &mut RunCx<'_>| multiply::<u64>(cx, options))),
        _ => Err(error!(NotImplemented, "a product of this type")),
    }
}

/// Multiplies matrices of doubles or integers. Factors other than 1 are applied in double
/// precision.
fn multiply<T>(cx: &mut RunCx<'_>, options: Options) -> Result<()>
where
    T: Element + Number + AsPrimitive<f64>,
    f64: AsPrimitive<T>,
{
    let cpu = Cpu::with_threads(cx.threads());
    let (a, b, c) = (cx.input(0)?, cx.input(1)?, cx.find_input(2));
    let (a_shape, a_strides) = options.side(0, a.shape())?;
    let (b_shape, b_strides) = options.side(1, b.shape())?;
    ensure!(
        a_shape[1] == b_shape[0],
        InvalidArgument,
        "the inner dimensions of the matrix multiplication differ"
    );
    let lhs = View::new(a.as_slice::<T>()?, a_shape, a_strides).map_err(refused)?;
    let rhs = View::new(b.as_slice::<T>()?, b_shape, b_strides).map_err(refused)?;
    let (rows, columns) = (a_shape[0], b_shape[1]);
    let result = cx.output(0)?.as_mut_slice::<T>()?;
    // Integers wrap; factors and addends follow in a second pass.
    generic::multiply(cpu, lhs, rhs, result).map_err(refused)?;
    let (alpha, beta) = (f64::from(options.alpha), f64::from(options.beta));
    if alpha != 1.0 {
        pieces_mut(result).flatten().for_each(|value| *value = (alpha * value.as_()).as_());
    }
    let Some(c) = c.filter(|_| beta != 0.0) else { return Ok(()) };
    let mut row = vec![T::ZERO; result.len()];
    spread(c.as_slice::<T>()?, c.shape(), &mut row, &[rows, columns])?;
    for (value, addend) in spending(2, result.iter_mut().zip(row)) {
        *value = match beta == 1.0 {
            true => value.add_product(addend, 1.0.as_()),
            false => (value.as_() + beta * addend.as_()).as_(),
        };
    }
    Ok(())
}
