//! GEMM with weights in the 4-bit floats of bitsandbytes (`MatMulBnb4`), FP4 and NF4.
//!
//! Weights stay quantized in memory. For one row, each task dequantizes some columns and multiplies
//! them while they are in the near cache. More rows go to the general GEMM, a part of the columns
//! at a time.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::element_count;
use ort_core::{Result, ensure, error};

use ort_cpu_gemm::{Cpu, Gemm, LhsOperand, RhsOperand, RhsSource, Strided, workspace_len};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32_except;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take, whole_lines};
use ort_cpu_matmul::refused;
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::{for_each_chunk_mut, for_each_row_chunk_mut};
use ort_cpu_threads::thread_scratch::with_thread_scratch;
use ort_cpu_vector::simd::attention::dots;
use ort_cpu_vector::simd::{Isa, Simd, SimdOp, dispatch};

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "MatMulBnb4",
    types: &[("T1", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    unaligned: &[1],
    make: |cx| via_f32_except(cx, &[1], &[], make),
    ..KernelDef::BASE
}];

/// The values of the 16 codes, by `quant_type`: FP4 and NF4.
const CODES: [[f32; 16]; 2] = [
    [
        0.0,
        0.005_208_333_5,
        0.666_666_7,
        1.0,
        0.333_333_34,
        0.5,
        0.166_666_67,
        0.25,
        -0.0,
        -0.005_208_333_5,
        -0.666_666_7,
        -1.0,
        -0.333_333_34,
        -0.5,
        -0.166_666_67,
        -0.25,
    ],
    [
        -1.0,
        -0.696_192_8,
        -0.525_073_05,
        -0.394_917_5,
        -0.284_441_38,
        -0.184_773_43,
        -0.091_050_036,
        0.0,
        0.079_580_3,
        0.160_930_2,
        0.246_112_3,
        0.337_915_24,
        0.440_709_83,
        0.562_617,
        0.722_956_84,
        1.0,
    ],
];

/// The two values of each byte, the first in its high bits.
type Pairs = [[f32; 2]; 256];

static PAIRS: [Pairs; 2] = [pairs(0), pairs(1)];

const fn pairs(kind: usize) -> Pairs {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [CODES[kind][byte >> 4], CODES[kind][byte & 15]];
        byte += 1;
    }
    pairs
}

/// Columns of the result whose weights are dequantized for one GEMM.
const WIDTH: usize = 256;

/// Dequantized values that stay in the near caches.
const NEAR: usize = 1 << 13;

/// Multiply-adds that are worth a task of their own.
const WORTH_A_TASK: usize = 1 << 17;

struct MatMulBnb4 {
    /// The attributes `N` and `K`, the shape of the weights.
    shape: [usize; 2],
    block: usize,
    pairs: &'static Pairs,
    /// Whether the weights are transposed, so that `K` is the depth.
    is_transposed: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    // Inference checked the ranges of the attributes.
    let size = |name: &str| {
        let value = attrs.int(name)?;
        usize::try_from(value).map_err(|_| error!(InvalidGraph, "{name} is {value}, expected a size"))
    };
    let kind = size("quant_type")?;
    let pairs = PAIRS.get(kind);
    let pairs = pairs.ok_or_else(|| error!(InvalidGraph, "quant_type is {kind}, expected 0 or 1"))?;
    let is_transposed = attrs.flag("transB")?;
    Ok(Box::new(MatMulBnb4 {
        shape: [size("N")?, size("K")?],
        block: size("block_size")?,
        pairs,
        is_transposed,
    }))
}

/// The weights of a run: one sequence of values, in blocks of one scale that ignore rows.
#[derive(Clone, Copy)]
struct Weights<'a> {
    bytes: &'a [u8],
    scales: &'a [f32],
    block: usize,
    pairs: &'static Pairs,
}

impl Weights<'_> {
    /// Dequantizes the values from `first` on.
    fn decode(&self, isa: Isa, first: usize, to: &mut [f32]) {
        dispatch(isa, Decode { weights: self, first, to });
    }
}

struct Decode<'a> {
    weights: &'a Weights<'a>,
    first: usize,
    to: &'a mut [f32],
}

impl SimdOp for Decode<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Weights { bytes, scales, block, pairs } = *self.weights;
        let (mut at, mut rest) = (self.first, self.to);
        while !rest.is_empty() {
            // The rest of the block, or less.
            let (part, others) = rest.split_at_mut((block - at % block).min(rest.len()));
            let scale = scales[at / block];
            let (mut index, mut part) = (at, part);
            at += part.len();
            rest = others;
            // A part that starts in the middle of a byte.
            let (half, others) = std::mem::take(&mut part).split_at_mut(index % 2);
            for value in half {
                *value = pairs[bytes[index / 2] as usize][1] * scale;
                index += 1;
            }
            part = others;
            let (whole, last) = part.as_chunks_mut::<2>();
            for (values, byte) in whole.iter_mut().zip(&bytes[index / 2..]) {
                let [high, low] = pairs[*byte as usize];
                *values = [high * scale, low * scale];
            }
            if let [value] = last {
                *value = pairs[bytes[(at - 1) / 2] as usize][0] * scale;
            }
        }
    }
}

impl MatMulBnb4 {
    /// The terms of an element of the result, and its columns.
    fn depth_and_columns(&self) -> [usize; 2] {
        let [n, k] = self.shape;
        if self.is_transposed { [k, n] } else { [n, k] }
    }

    /// Returns the rows of A, given its shape.
    fn rows(&self, a: &[usize]) -> Result<usize> {
        let [depth, _] = self.depth_and_columns();
        match a.split_last() {
            Some((last, rows)) if *last == depth => element_count(rows),
            _ => Err(error!(InvalidArgument, "A has shape {a:?}, expected {depth} in its last dimension")),
        }
    }

    /// Whether each task dequantizes the columns that it multiplies.
    fn is_single(&self, rows: usize) -> bool {
        rows == 1 && self.is_transposed
    }

    /// Returns the `f32` elements of the dequantized columns and of the GEMM's workspace.
    fn parts(&self, cpu: Cpu, rows: usize) -> [usize; 2] {
        let [depth, columns] = self.depth_and_columns();
        if self.is_single(rows) {
            return [0; 2];
        }
        let width = columns.min(WIDTH);
        let gemm = |width: usize| workspace_len(cpu, 1, [rows, width, depth], RhsSource::Strided);
        // The last part of the columns may be narrower.
        let last = if columns % WIDTH == 0 { width } else { columns % WIDTH };
        [whole_lines(width.saturating_mul(depth)), gemm(width).max(gemm(last))]
    }

    fn weights<'a>(&self, bytes: &'a [u8], scales: &'a [f32]) -> Result<Weights<'a>> {
        let [n, k] = self.shape;
        let count = element_count(&[n, k])?;
        let (given, expected) =
            ([bytes.len(), scales.len()], [count.div_ceil(2), count.div_ceil(self.block)]);
        ensure!(
            given == expected,
            InvalidArgument,
            "B and absmax have {given:?} elements, expected {expected:?} for N = {n} and K = {k}"
        );
        Ok(Weights { bytes, scales, block: self.block, pairs: self.pairs })
    }

    /// Multiplies one row.
    fn run_row(&self, cpu: Cpu, lhs: &[f32], weights: &Weights<'_>, to: &mut [f32]) {
        let depth = lhs.len();
        let at_once = (NEAR / depth.max(1)).max(1);
        for_each_row_chunk_mut(cpu.threads, to, 1, (WORTH_A_TASK / depth.max(1)).max(1), |first, to| {
            with_thread_scratch(|columns: &mut Vec<f32>| {
                for (part, to) in to.chunks_mut(at_once).enumerate() {
                    spend(to.len() * depth);
                    columns.clear();
                    columns.resize(to.len() * depth, 0.0);
                    weights.decode(cpu.isa, (first + part * at_once) * depth, columns);
                    dots(cpu.isa, columns, depth, lhs, to);
                }
            });
        });
    }

    /// Dequantizes the columns from `first` on: their rows, or without `transB` their part of each
    /// row.
    fn decode_columns(&self, cpu: Cpu, weights: &Weights<'_>, first: usize, width: usize, to: &mut [f32]) {
        let [_, k] = self.shape;
        let row = if self.is_transposed { k } else { width };
        for_each_chunk_mut(cpu.threads, to, row, |index, to| {
            let start = if self.is_transposed { (first + index) * k } else { index * k + first };
            weights.decode(cpu.isa, start, to);
        });
    }
}

impl Executable for MatMulBnb4 {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let rows = self.rows(shapes.input(0))?;
        let [columns, gemm] = self.parts(Cpu::with_threads(shapes.threads), rows);
        bytes_of::<f32>(columns.saturating_add(gemm))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let cpu = Cpu::with_threads(cx.threads());
        let a = cx.input(0)?;
        let rows = self.rows(a.shape())?;
        let weights = self.weights(cx.input(1)?.bytes()?, cx.input(2)?.as_slice::<f32>()?)?;
        let (lhs, output) = (a.as_slice::<f32>()?, cx.output(0)?.as_mut_slice::<f32>()?);
        let [depth, columns] = self.depth_and_columns();
        if output.is_empty() {
            return Ok(());
        }
        if self.is_single(rows) {
            self.run_row(cpu, lhs, &weights, output);
            return Ok(());
        }
        let mut rest = scratch::<f32>(cx.workspace()?)?;
        let [decoded, _] = self.parts(cpu, rows);
        let decoded = take(&mut rest, decoded)?;
        for first in (0..columns).step_by(WIDTH) {
            let width = WIDTH.min(columns - first);
            let decoded = &mut decoded[..width * depth];
            self.decode_columns(cpu, &weights, first, width, decoded);
            let strides = if self.is_transposed { [1, depth] } else { [width, 1] };
            let lhs = Strided::row_major(lhs, rows, depth).map_err(refused)?;
            let rhs = Strided::new(decoded, [depth, width], strides).map_err(refused)?;
            let gemm = Gemm::new(LhsOperand::Plain(lhs), RhsOperand::Plain(rhs));
            gemm.run(cpu, &mut output[first..], columns, rest).map_err(refused)?;
        }
        Ok(())
    }
}
