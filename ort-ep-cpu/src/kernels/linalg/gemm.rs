//! `Gemm`, and `FusedGemm` with an activation.

use num_traits::AsPrimitive;
use ort_core::dtype::{DType, Element, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, Precision, RunCx};
use ort_core::ops::fused::activation::Activation;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use super::product::spread;
use super::widened::widened;
use super::{PackedLeft, PackedRight, bytes_of, is_weight, product_cpu, refused, scratch};
use crate::cpu_kernels;
use crate::gemm::generic::{self, Number, View};
use crate::gemm::{AOperand, BOperand, BSource, Cpu, Gemm, Step, Strided, workspace_len};
use crate::kernels::elementwise::activation::unary_of;
use crate::vector::elementwise::Unary;

const SINGLE: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

/// A constant right side is packed.
const PACKED: KernelDef = KernelDef {
    op: "Gemm",
    types: &[("T", SINGLE)],
    rank: 1,
    unaligned: &[1],
    when: |node: &NodeView<'_>| {
        is_weight(node.dtype(1)) && node.constant(1).is_some_and(|tensor| tensor.shape().len() == 2)
    },
    make: |cx| widened(cx, make_packed),
    ..KernelDef::BASE
};

const PLAIN: KernelDef =
    KernelDef { op: "Gemm", types: &[("T", SINGLE)], make: |cx| widened(cx, make_plain), ..KernelDef::BASE };

cpu_kernels![
    PACKED,
    PLAIN,
    KernelDef { domain: MICROSOFT, op: "FusedGemm", ..PACKED },
    KernelDef { domain: MICROSOFT, op: "FusedGemm", ..PLAIN },
    KernelDef {
        op: "Gemm",
        types: &[("T", TypeSet::HIGH_PRECISION)],
        rank: -1,
        make: make_generic,
        ..KernelDef::BASE
    },
];

/// The attributes.
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

    /// The sizes (rows, columns) and strides of the side at `index` as it is multiplied.
    fn side(&self, index: usize, shape: &[usize]) -> Result<([usize; 2], [usize; 2])> {
        match *shape {
            [rows, columns] if self.transposed[index] => Ok(([columns, rows], [1, columns])),
            [rows, columns] => Ok(([rows, columns], [columns, 1])),
            _ => Err(error!(InvalidArgument, "a side of shape {shape:?} is no matrix")),
        }
    }
}

fn make_plain(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(Single { options: Options::new(cx)?, precision: cx.precision, right: None }))
}

fn make_packed(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let options = Options::new(cx)?;
    let view = cx.constant(1).ok_or_else(|| error!(Fail, "the right side is no constant"))?;
    let (shape, strides) = options.side(1, view.shape())?;
    let right = Some(PackedRight::of_input(cx, 1, shape, strides)?);
    Ok(Box::new(Single { options, precision: cx.precision, right }))
}

struct Single {
    options: Options,
    precision: Precision,
    right: Option<PackedRight>,
}

impl Single {
    fn columns(&self, b: &[usize]) -> Result<usize> {
        match &self.right {
            Some(right) => Ok(right.columns),
            None => Ok(self.options.side(1, b)?.0[1]),
        }
    }
}

impl Single {
    /// Whether the left side lies column by column and is packed.
    fn packs_left(&self, shape: [usize; 3]) -> bool {
        self.options.transposed[0] && PackedLeft::pays(shape)
    }
}

impl Executable for Single {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let [rows, k] = self.options.side(0, shapes.input(0))?.0;
        let columns = self.columns(shapes.input(1))?;
        let source = match (&self.right, self.options.transposed[1] && columns > 1) {
            (Some(_), _) => BSource::Packed,
            (None, true) => BSource::Strided,
            (None, false) => BSource::Rows,
        };
        let cpu = product_cpu(shapes.threads, self.precision, self.right.is_some(), rows);
        let shape = [rows, columns, k];
        let packed = if self.packs_left(shape) { PackedLeft::len(cpu, 1, shape) } else { 0 };
        bytes_of::<f32>(packed.saturating_add(workspace_len(cpu, 1, shape, source)))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut workspace = scratch(cx.workspace()?)?;
        let a = cx.input(0)?;
        let (shape, strides) = self.options.side(0, a.shape())?;
        let cpu = product_cpu(cx.threads(), self.precision, self.right.is_some(), shape[0]);
        let right = match &self.right {
            Some(right) => right.operand(cpu)?,
            None => {
                let b = cx.input(1)?;
                let (shape, strides) = self.options.side(1, b.shape())?;
                BOperand::Plain(Strided::new(b.as_slice()?, shape, strides).map_err(refused)?)
            }
        };
        let ([rows, k], columns) = (shape, right.shape()[1]);
        let left = if self.packs_left([rows, columns, k]) {
            let packed = PackedLeft::new(cpu, a.as_slice()?, [rows, columns, k], &mut workspace)?;
            packed.operand(cpu, 0).map_err(refused)?
        } else {
            AOperand::Plain(Strided::new(a.as_slice()?, shape, strides).map_err(refused)?)
        };
        let mut gemm = Gemm { alpha: self.options.alpha, ..Gemm::new(left, right) };
        let c = cx.find_input(2).filter(|_| self.options.beta != 0.0);
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        let mut steps: SmallVec<[Step<'_>; 2]> = SmallVec::new();
        if let Some(c) = c {
            let values = c.as_slice::<f32>()?;
            match *c.shape() {
                [n] | [1, n] if n == columns && self.options.beta == 1.0 => {
                    steps.push(Step::ColumnBias(values));
                }
                [m, n] if [m, n] == [rows, columns] && self.options.beta == 1.0 => {
                    steps.push(Step::Residual { values, row_stride: columns });
                }
                _ => {
                    spread(values, c.shape(), result, &[rows, columns])?;
                    gemm.beta = self.options.beta;
                }
            }
        }
        steps.extend(self.options.activation.map(Step::Activate));
        gemm.epilogue = &steps;
        gemm.run(cpu, result, columns, workspace).map_err(refused)
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

/// The product of 64-bit floats or of integers. Factors other than 1 are applied in 64-bit floats.
fn multiply<T>(cx: &mut RunCx<'_>, options: Options) -> Result<()>
where
    T: Element + Number + AsPrimitive<f64>,
    f64: AsPrimitive<T>,
{
    let cpu = Cpu::with_threads(cx.threads());
    let (a, b, c) = (cx.input(0)?, cx.input(1)?, cx.find_input(2));
    let (a_shape, a_strides) = options.side(0, a.shape())?;
    let (b_shape, b_strides) = options.side(1, b.shape())?;
    ensure!(a_shape[1] == b_shape[0], InvalidArgument, "the sums of the product differ");
    let left = View::new(a.as_slice::<T>()?, a_shape, a_strides).map_err(refused)?;
    let right = View::new(b.as_slice::<T>()?, b_shape, b_strides).map_err(refused)?;
    let (rows, columns) = (a_shape[0], b_shape[1]);
    let result = cx.output(0)?.as_mut_slice::<T>()?;
    generic::multiply(cpu, left, right, result).map_err(refused)?;
    let (alpha, beta) = (f64::from(options.alpha), f64::from(options.beta));
    if alpha != 1.0 {
        result.iter_mut().for_each(|value| *value = (alpha * value.as_()).as_());
    }
    let Some(c) = c.filter(|_| beta != 0.0) else { return Ok(()) };
    let mut row = vec![T::ZERO; result.len()];
    spread(c.as_slice::<T>()?, c.shape(), &mut row, &[rows, columns])?;
    for (value, addend) in result.iter_mut().zip(row) {
        *value = match beta == 1.0 {
            true => value.add_product(addend, 1.0.as_()),
            false => (value.as_() + beta * addend.as_()).as_(),
        };
    }
    Ok(())
}
