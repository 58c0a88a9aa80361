//! `MatMulInteger` and `QLinearMatMul`, and the operands that all quantized matmuls share.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::tensor::{Shape, TensorView, element_count};
use ort_core::{Result, ensure, error};

use crate::matmul_batch::MatmulBatch;
use ort_cpu_gemm::Cpu;
use ort_cpu_gemm::integer::{
    Factors, PackedBytes, QuantizedLhs, QuantizedMatmul, Target, multiply, multiply_workspace_len, pack_rhs,
    packed_rhs_len,
};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::quantized_convert::{range, read_floats, write_quantized};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::quantized_gemm::{PackedQuantized, is_unsigned, quantized_len};
use ort_cpu_matmul::refused;
use ort_cpu_threads::interrupt::{pieces_mut, spending};

cpu_kernels![
    KernelDef {
        op: "MatMulInteger",
        unaligned: &[1],
        make: |cx| Ok(Box::new(MatMulInteger(QuantizedOperands::new(cx, [0, 1])?))),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "QLinearMatMul",
        types: &[
            ("T1", TypeSet::of(&[DType::I8, DType::U8])),
            ("T2", TypeSet::of(&[DType::I8, DType::U8])),
            ("T3", TypeSet::of(&[DType::I8, DType::U8])),
        ],
        unaligned: &[3],
        make: |cx| Ok(Box::new(QLinear(QuantizedOperands::new(cx, [0, 3])?))),
        ..KernelDef::BASE
    },
    // Fallback for 8-bit floats, whose accumulators are floats too.
    KernelDef { op: "QLinearMatMul", rank: -1, make: |_| Ok(Box::new(QLinearFloat)), ..KernelDef::BASE },
];

/// Reads zero points in the form that the GEMM expects: one for all, one for each row of A, or one
/// for each column of B.
pub(crate) fn zero_points(view: Option<TensorView<'_>>) -> Result<Vec<i32>> {
    let ints = view.map(|view| view.to_ints()).transpose()?.unwrap_or_default();
    let fits =
        |value: i64| i32::try_from(value).map_err(|_| error!(InvalidArgument, "a zero point of {value}"));
    ints.into_iter().map(fits).collect()
}

/// Returns the zero points of the matrix at `index` of a side. All matrices share them, or each has
/// its own.
fn of_matrix(zero: &[i32], per_matrix: usize, index: usize) -> &[i32] {
    // More zero points than one matrix takes: they are listed matrix by matrix.
    if zero.len() > per_matrix {
        zero.get(index * per_matrix..(index + 1) * per_matrix).unwrap_or(zero)
    } else {
        zero
    }
}

/// What a batch of quantized matmuls reads, besides the right side.
pub(crate) struct QuantizedInputs<'a> {
    /// The left matrices, one after another.
    pub(crate) lhs: &'a [u8],
    /// Whether they are signed.
    pub(crate) signed: bool,
    pub(crate) matmuls: &'a MatmulBatch,
    /// The zero points of both sides.
    pub(crate) zeros: [&'a [i32]; 2],
    /// Added to the accumulators of each column, or empty.
    pub(crate) bias: &'a [i32],
}

/// The two sides of quantized matmuls. A constant right matrix is packed once, others in each run.
pub(crate) struct QuantizedOperands {
    /// The indices of the two inputs.
    places: [usize; 2],
    packed: Option<(PackedQuantized, Shape)>,
}

impl QuantizedOperands {
    pub(crate) fn new(cx: &mut CompileCx<'_>, places: [usize; 2]) -> Result<QuantizedOperands> {
        QuantizedOperands::with_rhs(cx, places, false)
    }

    /// Like [`new`](Self::new). A `transposed` right side must be a constant matrix.
    pub(crate) fn with_rhs(
        cx: &mut CompileCx<'_>,
        places: [usize; 2],
        transposed: bool,
    ) -> Result<QuantizedOperands> {
        let constant = cx.constant(places[1]);
        let layout = match constant.map(|view| view.shape()) {
            // A vector on the right is a single column.
            Some(&[k]) => Some(([k, 1], [1, 1])),
            Some(&[columns, k]) if transposed => Some(([k, columns], [1, k])),
            Some(&[k, columns]) => Some(([k, columns], [columns, 1])),
            _ if transposed => return Err(error!(Fail, "the right operand is not a constant matrix")),
            _ => None,
        };
        let (Some(view), Some((shape, strides))) = (constant, layout) else {
            return Ok(QuantizedOperands { places, packed: None });
        };
        let packed = PackedQuantized::new(cx, view, 0, shape, strides)?;
        cx.consume(places[1]);
        // A vector keeps its rank, which decides the rank of the result.
        let shape = if view.rank() == 1 { &shape[..1] } else { &shape[..] };
        Ok(QuantizedOperands { places, packed: Some((packed, Shape::from_slice(shape))) })
    }

    /// Returns the sizes of the matmuls. `rhs` is not read if the right side is packed.
    pub(crate) fn matmuls(&self, lhs: &[usize], rhs: &[usize]) -> Result<MatmulBatch> {
        MatmulBatch::new(lhs, self.packed.as_ref().map_or(rhs, |(_, shape)| &shape[..]))
    }

    pub(crate) fn matmuls_of(&self, shapes: &IoShapes<'_>) -> Result<MatmulBatch> {
        self.matmuls(shapes.input(self.places[0]), shapes.input(self.places[1]))
    }

    /// Returns the workspace in values that [`run`](Self::run) needs; the left side may be signed.
    pub(crate) fn workspace_len(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let matmuls = self.matmuls_of(shapes)?;
        let [_, columns, k] = matmuls.shape;
        let cpu = Cpu::with_threads(shapes.threads);
        let packed = match self.packed {
            Some(_) => 0,
            None => quantized_len(packed_rhs_len(cpu, k, columns)),
        };
        Ok(packed.saturating_add(multiply_workspace_len(matmuls.shape, true)))
    }

    /// Computes all matmuls. `target` returns the destination of the matmul at an index; its rows
    /// are contiguous.
    pub(crate) fn run<'t>(
        &self,
        cx: &RunCx<'_>,
        inputs: &QuantizedInputs<'_>,
        workspace: &mut [f32],
        mut target: impl FnMut(usize) -> Result<Target<'t>>,
    ) -> Result<()> {
        let cpu = Cpu::with_threads(cx.threads());
        let QuantizedInputs { lhs, signed, matmuls, zeros, bias } = *inputs;
        let ([rows, columns, k], mut rest) = (matmuls.shape, workspace);
        let buffer: &mut [u8] = match self.packed {
            Some(_) => &mut [],
            None => {
                bytemuck::cast_slice_mut(take(&mut rest, quantized_len(packed_rhs_len(cpu, k, columns)))?)
            }
        };
        let workspace: &mut [i32] = bytemuck::cast_slice_mut(rest);
        let mut in_buffer = None;
        for index in 0..matmuls.count {
            // A side that is broadcast repeats its zero points as well.
            let (offsets, matrices) = (matmuls.offsets(index), matmuls.matrices(index));
            let rhs = match &self.packed {
                Some((packed, _)) => packed.operand(cpu)?,
                None => {
                    let view = cx.input(self.places[1])?;
                    let quantized = (view.bytes()?.get(offsets[1]..).unwrap_or(&[]), is_unsigned(view));
                    // A broadcast right side is packed once for consecutive matmuls.
                    if in_buffer != Some(offsets[1]) {
                        pack_rhs(cpu, quantized, [k, columns], [columns, 1], buffer).map_err(refused)?;
                        in_buffer = Some(offsets[1]);
                    }
                    PackedBytes::new(cpu, (buffer, quantized.1), [k, columns]).map_err(refused)?
                }
            };
            let quantized = lhs.get(offsets[0]..).unwrap_or(&[]);
            let lhs = QuantizedLhs {
                values: quantized,
                signed,
                rows,
                zeros: of_matrix(zeros[0], rows, matrices[0]),
            };
            let rhs_zeros = of_matrix(zeros[1], columns, matrices[1]);
            let matmul = QuantizedMatmul { lhs, rhs, rhs_zeros, bias };
            multiply(cpu, &matmul, target(index)?, columns, workspace).map_err(refused)?;
        }
        Ok(())
    }
}

/// Splits a result among the matmuls of a batch; each call returns the next part.
pub(crate) fn parts<'t, T>(
    values: &'t mut [T],
    matmuls: &MatmulBatch,
) -> impl FnMut() -> Result<&'t mut [T]> + use<'t, T> {
    // At least 1, because `chunks_mut` refuses a length of 0; such results have no elements.
    let mut parts = values.chunks_mut((matmuls.shape[0] * matmuls.shape[1]).max(1));
    move || Ok(parts.next().unwrap_or_default())
}

struct MatMulInteger(QuantizedOperands);

impl Executable for MatMulInteger {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        bytes_of::<f32>(self.0.workspace_len(shapes)?)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (a, b) = (cx.input(0)?, cx.find_input(1));
        let workspace = scratch::<f32>(cx.workspace()?)?;
        let zeros = [zero_points(cx.find_input(2))?, zero_points(cx.find_input(3))?];
        let matmuls = self.0.matmuls(a.shape(), b.map_or(&[], |b| b.shape()))?;
        let mut accumulators = parts(cx.output(0)?.as_mut_slice::<i32>()?, &matmuls);
        let (lhs, zeros) = (a.bytes()?, [&zeros[0][..], &zeros[1]]);
        let inputs = QuantizedInputs { lhs, signed: !is_unsigned(a), matmuls: &matmuls, zeros, bias: &[] };
        self.0.run(cx, &inputs, workspace, |_| Ok(Target::Accumulators(accumulators()?)))
    }
}

/// Scales or zero points of matrices: one for all, one for each row or column, or those for each
/// matrix.
struct Granularity {
    values: Vec<f32>,
    count: usize,
}

impl Granularity {
    fn new(view: TensorView<'_>, count: usize) -> Result<Granularity> {
        let values = read_floats(view)?.into_owned();
        ensure!(!values.is_empty(), InvalidArgument, "a scale has no element");
        Ok(Granularity { values, count })
    }

    fn at(&self, matrix: usize, along: usize) -> f32 {
        match self.values.len() {
            1 => self.values[0],
            // All matrices share these; the general case would only add a division.
            len if len == self.count => self.values[along],
            len => self.values[(matrix * self.count + along) % len],
        }
    }
}

/// The scales of a `QLinearMatMul`, and the zero point of its result.
struct MatmulScales {
    a: Granularity,
    b: Granularity,
    y: Granularity,
    y_zero: Granularity,
}

impl MatmulScales {
    fn new(cx: &RunCx<'_>, [rows, columns, _]: [usize; 3]) -> Result<MatmulScales> {
        Ok(MatmulScales {
            a: Granularity::new(cx.input(1)?, rows)?,
            b: Granularity::new(cx.input(4)?, columns)?,
            y: Granularity::new(cx.input(6)?, rows)?,
            y_zero: Granularity::new(cx.input(7)?, rows)?,
        })
    }

    /// Turns the accumulators of a matmul into values of the output type, still as floats.
    fn requantize(&self, matmuls: &MatmulBatch, index: usize, accumulators: &mut [f32], is_float: bool) {
        let ([_, columns, _], [lhs, rhs]) = (matmuls.shape, matmuls.matrices(index));
        for (at, value) in spending(8, accumulators).enumerate() {
            let (row, column) = (at / columns, at % columns);
            // The real scale of a product is that of both sides; the result divides by its own.
            let scale = self.a.at(lhs, row) * self.b.at(rhs, column) / self.y.at(index, row);
            let scaled = *value * scale;
            // Ties go to even before the zero point is added, because an odd one would turn them.
            *value = self.y_zero.at(index, row) + if is_float { scaled } else { scaled.round_ties_even() };
        }
    }
}

struct QLinear(QuantizedOperands);

impl QLinear {
    /// Returns whether the GEMM requantizes in its epilogue: all scales are single, or B has one
    /// for each column.
    fn is_direct(counts: [usize; 4], matmuls: &MatmulBatch) -> bool {
        let [a, b, y, y_zero] = counts;
        a == 1 && y == 1 && y_zero == 1 && (b == 1 || b == matmuls.shape[1])
    }
}

impl Executable for QLinear {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let matmuls = self.0.matmuls_of(shapes)?;
        let count = |index: usize| element_count(shapes.input(index));
        // Otherwise the accumulators are kept, and requantized one by one.
        let extra = match QLinear::is_direct([count(1)?, count(4)?, count(6)?, count(7)?], &matmuls) {
            true => matmuls.shape[1].next_multiple_of(16),
            false => element_count(shapes.output(0))?.next_multiple_of(16),
        };
        bytes_of::<f32>(self.0.workspace_len(shapes)?.saturating_add(extra))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut workspace = scratch::<f32>(cx.workspace()?)?;
        let (a, b) = (cx.input(0)?, cx.find_input(3));
        let matmuls = self.0.matmuls(a.shape(), b.map_or(&[], |b| b.shape()))?;
        let scales = MatmulScales::new(cx, matmuls.shape)?;
        let zeros = [zero_points(Some(cx.input(2)?))?, zero_points(Some(cx.input(5)?))?];
        let (lhs, zeros) = (a.bytes()?, [&zeros[0][..], &zeros[1]]);
        let inputs = QuantizedInputs { lhs, signed: !is_unsigned(a), matmuls: &matmuls, zeros, bias: &[] };
        let output = cx.output(0)?;
        let [columns, count] = [matmuls.shape[1], output.element_count()];
        let counts = [&scales.a, &scales.b, &scales.y, &scales.y_zero].map(|scale| scale.values.len());
        if QLinear::is_direct(counts, &matmuls) {
            let factors = take(&mut workspace, columns.next_multiple_of(16))?;
            let factor = |b: &f32| scales.a.values[0] * b / scales.y.values[0];
            factors.iter_mut().zip(&scales.b.values).for_each(|(to, b)| *to = factor(b));
            let factors = match &scales.b.values[..] {
                [one] => Factors::One(factor(one)),
                _ => Factors::Columns(factors),
            };
            let (zero, signed) = (scales.y_zero.values[0] as i32, output.dtype().is_signed());
            let mut quantized = parts(output.bytes_mut()?, &matmuls);
            return self.0.run(cx, &inputs, workspace, |_| {
                Ok(Target::Quantized { values: quantized()?, factors, zero, signed })
            });
        }
        let accumulators = &mut take(&mut workspace, count.next_multiple_of(16))?[..count];
        // `i32` and `f32` have the same size, so the accumulators use the memory of the floats.
        let mut ints = parts(bytemuck::cast_slice_mut(accumulators), &matmuls);
        self.0.run(cx, &inputs, workspace, |_| Ok(Target::Accumulators(ints()?)))?;
        // The iterator borrows the accumulators.
        drop(ints);
        // Converts each i32 accumulator to a float in place.
        pieces_mut(accumulators).flatten().for_each(|sum| *sum = (sum.to_bits() as i32) as f32);
        for (index, accumulators) in accumulators.chunks_mut((matmuls.shape[0] * columns).max(1)).enumerate()
        {
            scales.requantize(&matmuls, index, accumulators, false);
        }
        write_quantized(cx.threads(), accumulators, true, output)
    }
}

/// `QLinearMatMul` of 8-bit floats, by plain loops.
struct QLinearFloat;

impl Executable for QLinearFloat {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        bytes_of::<f32>(element_count(shapes.output(0))?.max(1))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let workspace = scratch::<f32>(cx.workspace()?)?;
        let (a, b) = (cx.input(0)?, cx.input(3)?);
        let matmuls = MatmulBatch::new(a.shape(), b.shape())?;
        let [rows, columns, k] = matmuls.shape;
        let scales = MatmulScales::new(cx, matmuls.shape)?;
        let (a_zero, b_zero) =
            (Granularity::new(cx.input(2)?, rows)?, Granularity::new(cx.input(5)?, columns)?);
        let (a, b) = (read_floats(a)?, read_floats(b)?);
        let output = cx.output(0)?;
        let accumulators = &mut workspace[..output.element_count()];
        let is_float = range(output.dtype()).is_none();
        for (index, accumulators) in accumulators.chunks_mut((rows * columns).max(1)).enumerate() {
            let ([lhs, rhs], matrices) = (matmuls.offsets(index), matmuls.matrices(index));
            for (at, sum) in accumulators.iter_mut().enumerate() {
                let (row, column) = (at / columns, at % columns);
                // Few models have 8-bit floats, so a plain loop in `f32` serves as their kernel.
                let terms = spending(4, 0..k).map(|step| {
                    let a = a[lhs + row * k + step] - a_zero.at(matrices[0], row);
                    a * (b[rhs + step * columns + column] - b_zero.at(matrices[1], column))
                });
                *sum = terms.sum();
            }
            scales.requantize(&matmuls, index, accumulators, is_float);
        }
        write_quantized(cx.threads(), accumulators, true, output)
    }
}
