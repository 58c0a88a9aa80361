//! `QuantizeLinear` and `DequantizeLinear`.

use std::borrow::Cow;

use half::{bf16, f16};
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ops::quant::problem::{Granularity, Quantization};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};
use parking_lot::Mutex;

use super::granularity::{Run, run_of};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::dynamic_quantize::{AffineMap, quantize};
use ort_cpu_kernel::quantized_convert::{BLOCK, decode, encode, range, read_floats};
use ort_cpu_threads::interrupt::pieces;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::elementwise::{Binary, Operand, Unary, binary_in_place, unary_in_place};
use ort_cpu_vector::simd::Isa;

cpu_kernels![
    KernelDef { op: "QuantizeLinear", make: make_quantize, ..KernelDef::BASE },
    KernelDef { op: "DequantizeLinear", unaligned: &[0], make: make_dequantize, ..KernelDef::BASE },
];

/// Scales and zero points of a tensor.
struct QuantizeScales<'a> {
    granularity: Granularity,
    scales: Cow<'a, [f32]>,
    zeros: Option<Cow<'a, [f32]>>,
}

impl<'a> QuantizeScales<'a> {
    fn new(
        options: Quantization,
        shape: &[usize],
        scale: TensorView<'a>,
        zero: Option<TensorView<'a>>,
    ) -> Result<QuantizeScales<'a>> {
        let granularity = options.granularity(shape, scale.shape())?;
        if let Some(zero) = zero {
            let fits = zero.element_count() == scale.element_count();
            ensure!(fits, InvalidArgument, "there are not as many zero points as scales");
        }
        let zeros = zero.map(read_floats).transpose()?;
        // Zero points that are all zero, as those of floats must be, are skipped.
        let zeros = zeros.filter(|zeros| pieces(zeros).flatten().any(|zero| *zero != 0.0));
        Ok(QuantizeScales { granularity, scales: read_floats(scale)?, zeros })
    }

    /// Calls `one` for each run with one scale and zero point, and `each` for runs with one for
    /// each element.
    fn walk(
        &self,
        first: usize,
        values: &mut [f32],
        mut one: impl FnMut(&mut [f32], f32, f32),
        mut each: impl FnMut(&mut [f32], &[f32], Option<&[f32]>),
    ) {
        let mut at = 0;
        while at < values.len() {
            let run = run_of(&self.granularity, first + at, values.len() - at);
            let part = &mut values[at..at + run.len()];
            match run {
                Run::One { scale, .. } => {
                    one(part, self.scales[scale], self.zeros.as_ref().map_or(0.0, |zeros| zeros[scale]));
                }
                Run::Each { len, first } => {
                    let zeros = self.zeros.as_ref().map(|zeros| &zeros[first..first + len]);
                    each(part, &self.scales[first..first + len], zeros);
                }
            }
            at += run.len();
        }
    }
}

/// Runs `task` on blocks of an output of `count` elements, and returns the first error.
fn for_each_block(
    threads: usize,
    dtype: DType,
    bytes: &mut [u8],
    count: usize,
    task: impl Fn(usize, &mut [f32], &mut [u8]) -> Result<()> + Sync,
) -> Result<()> {
    /// Blocks in one task.
    const BLOCKS: usize = 8;
    let block_bytes = dtype.byte_len(BLOCK).ok_or_else(|| error!(Fail, "{} has no bytes", dtype.name()))?;
    let failure = Mutex::new(None);
    for_each_chunk_mut(threads, bytes, block_bytes * BLOCKS, |chunk, bytes| {
        let mut values = [0.0; BLOCK];
        for (block, bytes) in bytes.chunks_mut(block_bytes).enumerate() {
            // Chunks are whole blocks of bytes, and blocks are whole bytes in every type.
            let first = (chunk * BLOCKS + block) * BLOCK;
            let len = BLOCK.min(count.saturating_sub(first));
            if let Err(error) = task(first, &mut values[..len], bytes) {
                failure.lock().get_or_insert(error);
            }
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

struct Dequantize {
    options: Quantization,
}

fn make_dequantize(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(Dequantize { options: Quantization::new(cx.attrs())? }))
}

impl Executable for Dequantize {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let isa = Isa::current();
        let x = cx.input(0)?;
        let scales = QuantizeScales::new(self.options, x.shape(), cx.input(1)?, cx.find_input(2))?;
        let (threads, output) = (cx.threads(), cx.output(0)?);
        let (dtype, count, quantized) = (output.dtype(), output.element_count(), x.bytes()?);
        for_each_block(threads, dtype, output.bytes_mut()?, count, |first, values, bytes| {
            // `first` is a multiple of a block, so it begins a byte in packed types too.
            decode(x.dtype(), quantized, first, values)?;
            scales.walk(
                first,
                values,
                |values, scale, zero| {
                    // Two steps, because an FMA would round `(x - zero) * scale` differently.
                    if zero != 0.0 {
                        unary_in_place(isa, Unary::Affine { scale: 1.0, shift: -zero }, values);
                    }
                    unary_in_place(isa, Unary::Affine { scale, shift: 0.0 }, values);
                },
                |values, scales, zeros| {
                    if let Some(zeros) = zeros {
                        binary_in_place(isa, Binary::Sub, values, Operand::Slice(zeros));
                    }
                    binary_in_place(isa, Binary::Mul, values, Operand::Slice(scales));
                },
            );
            encode(values, true, dtype, bytes)
        })
    }
}

struct Quantize {
    options: Quantization,
    saturate: bool,
    precision: Option<DType>,
}

fn make_quantize(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let precision = Quantization::division(cx.attrs())?;
    let saturate = cx.attrs().flag("saturate")?;
    Ok(Box::new(Quantize { options: Quantization::new(cx.attrs())?, saturate, precision }))
}

/// Rounds values to the type of the division.
fn round_to(precision: DType, values: &mut [f32]) {
    match precision {
        DType::F16 => values.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32()),
        DType::BF16 => values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32()),
        _ => {}
    }
}

impl Quantize {
    /// Divides integers in double precision, which represents them exactly.
    fn divide_ints(scales: &QuantizeScales<'_>, ints: &[i32], first: usize, values: &mut [f32]) {
        for (at, value) in values.iter_mut().enumerate() {
            let scale = match run_of(&scales.granularity, first + at, 1) {
                Run::One { scale, .. } | Run::Each { first: scale, .. } => scale,
            };
            // An `i32` and an `f32` scale are exact in doubles, so the quotient is rounded once.
            *value = (f64::from(ints[first + at]) / f64::from(scales.scales[scale])).round_ties_even() as f32;
        }
    }
}

impl Executable for Quantize {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let isa = Isa::current();
        let (x, scale) = (cx.input(0)?, cx.input(1)?);
        let scales = QuantizeScales::new(self.options, x.shape(), scale, cx.find_input(2))?;
        let (threads, output) = (cx.threads(), cx.output(0)?);
        let (dtype, count, floats) = (output.dtype(), output.element_count(), x.bytes()?);
        // Without the attribute `precision`, the standard divides in the type of the scale.
        let precision = self.precision.unwrap_or(scale.dtype());
        // `float` cannot represent all 32-bit integers.
        let ints = match (x.dtype(), self.precision) {
            (DType::I32, None) => Some(x.as_slice::<i32>()?),
            _ => None,
        };
        let range = range(dtype);
        // One scale and 8-bit results have a loop that quantizes and stores in one pass.
        if let (DType::F32, DType::F32, DType::U8 | DType::I8, Some((least, greatest)), &[scale]) =
            (x.dtype(), precision, dtype, range, &*scales.scales)
        {
            let zero = scales.zeros.as_ref().and_then(|zeros| zeros.first()).copied().unwrap_or(0.0);
            let map = AffineMap { scale, zero, range: [least, greatest] };
            quantize(isa, threads, x.as_slice()?, map, output.bytes_mut()?);
            return Ok(());
        }
        for_each_block(threads, dtype, output.bytes_mut()?, count, |first, values, bytes| {
            if let Some(ints) = ints {
                Quantize::divide_ints(&scales, ints, first, values);
            } else {
                decode(x.dtype(), floats, first, values)?;
                round_to(precision, values);
                scales.walk(
                    first,
                    values,
                    |values, scale, _| binary_in_place(isa, Binary::Div, values, Operand::Scalar(scale)),
                    |values, scales, _| binary_in_place(isa, Binary::Div, values, Operand::Slice(scales)),
                );
                round_to(precision, values);
            }
            let Some((least, greatest)) = range else {
                // The zero point of an 8-bit float is zero. That of a narrower float is added.
                if dtype.is_packed() {
                    add_zeros(&scales, first, values);
                }
                return encode(values, self.saturate, dtype, bytes);
            };
            // The standard: `saturate(round(x / y_scale) + y_zero_point)`, with ties to even.
            unary_in_place(isa, Unary::Round, values);
            add_zeros(&scales, first, values);
            unary_in_place(isa, Unary::Clip { min: least, max: greatest }, values);
            encode(values, true, dtype, bytes)
        })
    }
}

fn add_zeros(scales: &QuantizeScales<'_>, first: usize, values: &mut [f32]) {
    let isa = Isa::current();
    if scales.zeros.is_none() {
        return;
    }
    scales.walk(
        first,
        values,
        |values, _, zero| unary_in_place(isa, Unary::Affine { scale: 1.0, shift: zero }, values),
        |values, _, zeros| {
            if let Some(zeros) = zeros {
                binary_in_place(isa, Binary::Add, values, Operand::Slice(zeros));
            }
        },
    );
}
