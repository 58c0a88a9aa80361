//! `MatMul`, `FusedMatMul` and `DequantizeMatMul`.
//!
//! Two domains have a `FusedMatMul`. They add transposed sides, a factor, addends and an
//! activation. `DequantizeMatMul` is one with a quantized right side.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use std::ops::Range;

use ort_core::dtype::{DType, Element, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, NodeView, Precision, RunCx};
use ort_core::ops::quant::problem::Quantization;
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use crate::matmul_batch::MatmulBatch;
use crate::quantized;
use crate::transposed::TransposedLhs;
use ort_cpu_gemm::generic::{self, Number, View};
use ort_cpu_gemm::{
    Batch, Cpu, Gemm, GemmError, LhsOperand, Origin, RhsOperand, RhsSource, Step, Strided, run_batch,
    workspace_len,
};
use ort_cpu_kernel::activation::activation_of;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::{via_f32, via_f32_except};
use ort_cpu_kernel::packed::is_weight;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::packed_weight::{PackedWeight, gemm_cpu};
use ort_cpu_matmul::refused;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::elementwise::Unary;

const SINGLE: TypeSet = TypeSet::of(&[DType::F32]);
const HALF: TypeSet = TypeSet::of(&[DType::F16, DType::BF16]);

/// For a constant right matrix, which is packed once.
const PACKED: KernelDef = KernelDef {
    op: "MatMul",
    types: &[("T", SINGLE.union(HALF))],
    rank: 1,
    // Packing reads the weight at any alignment.
    unaligned: &[1],
    when: has_constant_matrix,
    make: |cx| via_f32(cx, make_packed),
    ..KernelDef::BASE
};

const UNPACKED: KernelDef =
    KernelDef { rank: 0, unaligned: &[], when: |_| true, make: |cx| via_f32(cx, make_unpacked), ..PACKED };

/// `FusedMatMul` of `com.microsoft` without transposed batches. Other nodes are decomposed.
const UNPACKED_BATCH: KernelDef =
    KernelDef { domain: MICROSOFT, op: "FusedMatMul", when: keeps_batch_order, ..UNPACKED };

/// `FusedMatMul` of the runtime. Half precision accumulates in a buffer of `float`, so only `float`
/// may compute in place of the addend.
const WITH_ADDENDS: KernelDef = KernelDef { domain: RUNTIME, op: "FusedMatMul", ..UNPACKED };

/// `DequantizeMatMul`, which reads the quantized values where they are.
const DEQUANTIZE: KernelDef = KernelDef {
    domain: RUNTIME,
    op: "DequantizeMatMul",
    unaligned: &[1, 2, 3],
    make: |cx| via_f32_except(cx, &[1, 2, 3], &[], make_quantized),
    ..KernelDef::BASE
};

const QUANTIZED: TypeSet = TypeSet::SUB_BYTE_INTEGERS.union(TypeSet::of(&[DType::I8, DType::U8]));

cpu_kernels![
    PACKED,
    UNPACKED,
    KernelDef {
        domain: MICROSOFT,
        op: "FusedMatMul",
        when: |node| keeps_batch_order(node) && has_constant_matrix(node),
        ..PACKED
    },
    UNPACKED_BATCH,
    KernelDef { domain: RUNTIME, op: "FusedMatMul", types: &[("T", SINGLE)], in_place: &[(3, 0)], ..PACKED },
    KernelDef { domain: RUNTIME, op: "FusedMatMul", types: &[("T", HALF)], ..PACKED },
    KernelDef { types: &[("T", SINGLE)], in_place: &[(3, 0)], ..WITH_ADDENDS },
    KernelDef { types: &[("T", HALF)], ..WITH_ADDENDS },
    KernelDef { types: &[("T", SINGLE), ("T1", QUANTIZED)], in_place: &[(5, 0)], ..DEQUANTIZE },
    KernelDef { types: &[("T", HALF), ("T1", QUANTIZED)], ..DEQUANTIZE },
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

/// Returns whether a `FusedMatMul` of `com.microsoft` does not transpose the batches.
fn keeps_batch_order(node: &NodeView<'_>) -> bool {
    ["transBatchA", "transBatchB"].iter().all(|name| matches!(node.attrs().flag(name), Ok(false)))
}

/// The attributes of a node.
#[derive(Clone, Copy)]
struct Settings {
    /// The factor of the matmul.
    factor: f32,
    /// For each side, whether its last two dimensions are swapped.
    transposed: [bool; 2],
    activation: Option<Unary>,
}

impl Settings {
    fn new(cx: &CompileCx<'_>) -> Result<Settings> {
        let flag = |name: &str| cx.attrs().find_int(name).unwrap_or(0) != 0;
        Ok(Settings {
            factor: cx.attrs().find_float("alpha").unwrap_or(1.0),
            transposed: [flag("transA"), flag("transB")],
            activation: activation_of(cx)?,
        })
    }
}

fn make_packed(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let settings = Settings::new(cx)?;
    let (shape, strides) = match cx.constant(1).map(|view| view.shape()) {
        Some(&[k]) => ([k, 1], [1, 1]),
        Some(&[columns, k]) if settings.transposed[1] => ([k, columns], [1, k]),
        Some(&[k, columns]) => ([k, columns], [columns, 1]),
        _ => return Err(error!(Fail, "the right operand is not a constant matrix")),
    };
    let rhs = Rhs::Packed(PackedWeight::of_input(cx, 1, shape, strides)?);
    Ok(Box::new(Single::new(cx, settings, rhs)))
}

fn make_unpacked(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let settings = Settings::new(cx)?;
    Ok(Box::new(Single::new(cx, settings, Rhs::Plain)))
}

fn make_quantized(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (settings, quantization) = (Settings::new(cx)?, Quantization::new(cx.attrs())?);
    Ok(Box::new(Single::new(cx, settings, Rhs::Quantized(quantization))))
}

/// The right side of a matmul.
enum Rhs {
    /// Known only to the run.
    Plain,
    /// A constant that is packed.
    Packed(PackedWeight),
    /// Quantized values, which the GEMM dequantizes.
    Quantized(Quantization),
}

/// A `float` matmul.
struct Single {
    settings: Settings,
    precision: Precision,
    rhs: Rhs,
    /// The places of bias and residual among the inputs.
    addends: [usize; 2],
    /// Whether the residual initializes the result, rather than being added by the epilogue. If it
    /// may share memory with the result, it always initializes it. Otherwise, sharing would change
    /// the rounding.
    begins_with_residual: bool,
}

fn is_single(cx: &CompileCx<'_>) -> bool {
    cx.node.dtype(0) == Some(DType::F32)
}

/// Returns the shape of a side as it is multiplied. A vector stays as it is.
fn side(shape: &[usize], transposed: bool) -> Shape {
    let mut side = Shape::from_slice(shape);
    if let (true, [.., rows, columns]) = (transposed, side.as_mut_slice()) {
        std::mem::swap(rows, columns);
    }
    side
}

/// Returns the strides of a matrix of `[rows, columns]`, which is column-major if `transposed`.
fn strides([rows, columns]: [usize; 2], transposed: bool) -> [usize; 2] {
    if transposed { [1, rows] } else { [columns, 1] }
}

impl Single {
    fn new(cx: &CompileCx<'_>, settings: Settings, rhs: Rhs) -> Single {
        // Scales and zero points precede the addends.
        let addends = if matches!(rhs, Rhs::Quantized(_)) { [4, 5] } else { [2, 3] };
        Single { settings, precision: cx.precision, rhs, addends, begins_with_residual: is_single(cx) }
    }

    fn matmuls(&self, a: &[usize], b: &[usize]) -> Result<MatmulBatch> {
        let [lhs, rhs] = self.settings.transposed;
        let b = match &self.rhs {
            Rhs::Packed(packed) => Shape::from_slice(&[packed.k, packed.columns]),
            Rhs::Plain | Rhs::Quantized(_) => side(b, rhs),
        };
        // A vector has no dimensions to swap.
        MatmulBatch::of(&side(a, lhs && a.len() > 1), &b, !lhs)
    }

    fn is_packed(&self) -> bool {
        matches!(self.rhs, Rhs::Packed(_))
    }

    /// Returns whether the left sides are column-major and worth packing.
    fn packs_lhs(&self, matmuls: &MatmulBatch) -> bool {
        self.settings.transposed[0] && TransposedLhs::pays(matmuls.shape)
    }

    /// Returns the ranges of k that are computed one after another: a single one, unless left sides
    /// are packed part by part.
    fn parts(&self, matmuls: &MatmulBatch, lhs_count: usize) -> SmallVec<[Range<usize>; 4]> {
        let [_, _, k] = matmuls.shape;
        match self.packs_lhs(matmuls) && matches!(self.rhs, Rhs::Plain) {
            true => TransposedLhs::parts(lhs_count, matmuls.shape).collect(),
            false => SmallVec::from_iter(std::iter::once(0..k)),
        }
    }

    /// Returns the epilogue.
    fn steps<'a>(&self, cx: &RunCx<'a>, columns: usize) -> Result<SmallVec<[Step<'a>; 3]>> {
        let mut steps = SmallVec::new();
        if let Some(bias) = cx.find_input(self.addends[0]) {
            steps.push(Step::ColumnBias(bias.as_slice()?));
        }
        if let Some(residual) = cx.find_input(self.addends[1]).filter(|_| !self.begins_with_residual) {
            steps.push(Step::Residual { values: residual.as_slice()?, row_stride: columns });
        }
        steps.extend(self.settings.activation.map(Step::Activate));
        Ok(steps)
    }
}

impl Executable for Single {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let matmuls = self.matmuls(shapes.input(0), shapes.input(1))?;
        // The workspace depends on how the GEMM reads B: packed and row-major operands need the
        // least.
        let source = match &self.rhs {
            Rhs::Packed(_) => RhsSource::Packed,
            Rhs::Quantized(_) => RhsSource::Quantized,
            // With one column, a transposed side is contiguous.
            Rhs::Plain if self.settings.transposed[1] && matmuls.shape[1] > 1 => RhsSource::Strided,
            Rhs::Plain => RhsSource::Rows,
        };
        let [rows, columns, k] = matmuls.shape;
        let cpu = gemm_cpu(shapes.threads, self.precision, self.is_packed(), rows);
        // A broadcast left side is packed once, so this counts the matrices of the input.
        let lhs_count = shapes.input(0).iter().product::<usize>() / (rows * k).max(1);
        let part = |steps: Range<usize>| {
            let shape = [rows, columns, steps.len()];
            let packed = if self.packs_lhs(&matmuls) { TransposedLhs::len(cpu, lhs_count, shape) } else { 0 };
            packed.saturating_add(workspace_len(cpu, matmuls.count, shape, source))
        };
        bytes_of::<f32>(self.parts(&matmuls, lhs_count).into_iter().map(part).max().unwrap_or(0))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (a, b) = (cx.input(0)?, cx.find_input(1));
        let matmuls = self.matmuls(a.shape(), b.as_ref().map_or(&[], |b| b.shape()))?;
        let [rows, columns, k] = matmuls.shape;
        let cpu = gemm_cpu(cx.threads(), self.precision, self.is_packed(), rows);
        let workspace = scratch(cx.workspace()?)?;
        let steps = self.steps(cx, columns)?;
        let [_, residual_at] = self.addends;
        let (threads, residual) =
            (cx.threads(), cx.find_input(residual_at).filter(|_| self.begins_with_residual));
        // In place, the result already holds the residual.
        let adds = residual.is_some() || cx.in_place(0) == Some(residual_at);
        let result = cx.output(0)?.as_mut_slice::<f32>()?;
        if result.is_empty() {
            return Ok(());
        }
        if let Some(residual) = residual {
            copy_residual(threads, residual.as_slice()?, result)?;
        }
        let packed = match &self.rhs {
            Rhs::Plain => None,
            Rhs::Packed(rhs) => Some(rhs.operand(cpu)?),
            Rhs::Quantized(quantization) => {
                Some(quantized::operand(cx, *quantization, self.settings.transposed[1])?)
            }
        };
        // A packed weight is still an input if other nodes read it. It may be unaligned, so it must
        // not be viewed as a slice.
        let b = b.filter(|_| packed.is_none()).map_or(Ok(&[][..]), |b| b.as_slice::<f32>())?;
        let sides = Sides { a: a.as_slice::<f32>()?, b, packed, transposed: self.settings.transposed };
        let lhs_count = sides.a.len() / (rows * k).max(1);
        let shape = |steps: &Range<usize>| [rows, columns, steps.len()];
        for part in self.parts(&matmuls, lhs_count) {
            let mut rest = &mut *workspace;
            let lhs = match self.packs_lhs(&matmuls) {
                true => {
                    let to = take(&mut rest, TransposedLhs::len(cpu, lhs_count, shape(&part)))?;
                    Some(TransposedLhs::new(cpu, sides.a, matmuls.shape, part.clone(), to)?)
                }
                false => None,
            };
            let (is_first, is_last) = (part.start == 0, part.end == k);
            let problem = |index: usize| {
                let lhs = match lhs {
                    Some(packed) => packed.operand(cpu, matmuls.matrices(index)[0])?,
                    None => sides.lhs(&matmuls, index)?,
                };
                Ok(Gemm {
                    alpha: self.settings.factor,
                    // Ranges of k accumulate in the result. The first overwrites it, unless it
                    // holds the residual.
                    beta: if adds || !is_first { 1.0 } else { 0.0 },
                    epilogue: if is_last { &steps } else { &[] },
                    // The residual has the shape of the result, so each matmul of the batch has
                    // rows of its own.
                    origin: Origin { bias_row: 0, residual_row: index * rows },
                    ..Gemm::new(lhs, sides.rhs(&matmuls, index, &part)?)
                })
            };
            let batch_stride = rows * columns;
            let results =
                Batch { values: &mut *result, count: matmuls.count, row_stride: columns, batch_stride };
            run_batch(cpu, &problem, results, rest).map_err(refused)?;
        }
        Ok(())
    }
}

fn copy_residual(threads: usize, residual: &[f32], result: &mut [f32]) -> Result<()> {
    /// Values in one task.
    const TASK: usize = 1 << 14;
    let (len, given) = (result.len(), residual.len());
    ensure!(given == len, InvalidArgument, "a residual of {given} values for a result of {len}");
    for_each_chunk_mut(threads, result, TASK, |chunk, to| {
        to.copy_from_slice(&residual[chunk * TASK..][..to.len()]);
    });
    Ok(())
}

/// The sides of matmuls, plain or packed.
struct Sides<'a> {
    a: &'a [f32],
    b: &'a [f32],
    packed: Option<RhsOperand<'a>>,
    transposed: [bool; 2],
}

impl<'a> Sides<'a> {
    fn lhs(&self, matmuls: &MatmulBatch, index: usize) -> Result<LhsOperand<'a>, GemmError> {
        let [rows, _, k] = matmuls.shape;
        let lhs = from("the left side", self.a, matmuls.offsets(index)[0])?;
        Ok(LhsOperand::Plain(Strided::new(lhs, [rows, k], strides([rows, k], self.transposed[0]))?))
    }

    /// Returns a range of k of a right side.
    fn rhs(
        &self,
        matmuls: &MatmulBatch,
        index: usize,
        part: &Range<usize>,
    ) -> Result<RhsOperand<'a>, GemmError> {
        let [_, columns, k] = matmuls.shape;
        if let Some(packed) = self.packed {
            return Ok(packed);
        }
        let strides = strides([k, columns], self.transposed[1] && columns > 1);
        let first = matmuls.offsets(index)[1] + part.start * strides[0];
        let rhs = from("the right side", self.b, first)?;
        Ok(RhsOperand::Plain(Strided::new(rhs, [part.len(), columns], strides)?))
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
    let matmuls = MatmulBatch::new(a.shape(), b.shape())?;
    let result = cx.output(0)?.as_mut_slice::<T>()?;
    let (a, b) = (a.as_slice::<T>()?, b.as_slice::<T>()?);
    let [rows, columns, k] = matmuls.shape;
    for (index, result) in result.chunks_mut((rows * columns).max(1)).enumerate() {
        let [lhs, rhs] = matmuls.offsets(index);
        let lhs = from("the left side", a, lhs).and_then(|a| View::new(a, [rows, k], [k, 1]));
        let rhs = from("the right side", b, rhs).and_then(|b| View::new(b, [k, columns], [columns, 1]));
        generic::multiply(cpu, lhs.map_err(refused)?, rhs.map_err(refused)?, result).map_err(refused)?;
    }
    Ok(())
}
