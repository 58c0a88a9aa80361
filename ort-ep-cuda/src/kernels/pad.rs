//! Padding and cropping (`Pad`, `CenterCropPad`, `Tile`), masks and reversal (`Trilu`,
//! `ReverseSequence`), and generated tensors (`ConstantOfShape`, `EyeLike`, `Range`).

use ort_core::dtype::{CastOptions, DType, TypeSet, convert};
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::problem::{PadMode, ReverseSequence};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};
use ort_gpu::read;

use super::elements::{MOVED, by_bytes, element_bytes, few_axes, unit};
use super::{CudaKernel, MOST_AXES, cuda_kernels, elements};
use crate::launch::{Launch, OpCx, Operand};

/// The types in which `EyeLike` can store a one.
const COUNTED: TypeSet = TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool]));

const fn beyond(
    op: &'static str,
    host_inputs: &'static [usize],
    launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>,
) -> CudaKernel {
    let def = KernelDef { op, types: &[("T", MOVED)], host_inputs, when: few_axes, ..KernelDef::BASE };
    CudaKernel::new(def, launches)
}

cuda_kernels![
    beyond("Pad", &[1, 3], pad),
    beyond("CenterCropPad", &[1], pad),
    beyond("Tile", &[1], pad),
    beyond("ReverseSequence", &[], reverse_sequence),
    CudaKernel::new(
        KernelDef {
            op: "Trilu",
            types: &[("T", MOVED)],
            in_place: &[(0, 0)],
            host_inputs: &[1],
            ..KernelDef::BASE
        },
        trilu,
    ),
    CudaKernel::new(
        KernelDef { op: "ConstantOfShape", types: &[("T2", MOVED)], host_inputs: &[0], ..KernelDef::BASE },
        constant_of_shape,
    ),
    CudaKernel::new(
        KernelDef { op: "EyeLike", types: &[("T1", MOVED), ("T2", COUNTED)], ..KernelDef::BASE },
        eye_like,
    ),
    CudaKernel::new(
        KernelDef {
            op: "Range",
            types: &[("T", TypeSet::FLOATS.union(TypeSet::of(&[DType::I16, DType::I32, DType::I64])))],
            host_inputs: &[0, 1, 2],
            ..KernelDef::BASE
        },
        range,
    ),
];

fn pad(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let Some(padded) = read::padded(cx)? else { return Ok(Vec::new()) };
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let bytes = element_bytes(x.dtype)?;
    let mut padded = padded.merged();
    let (mode, mut unit) = (padded.mode, 1);
    if let Some(last) = padded.axes.last_mut().filter(|last| mode.pads_blocks() || last.is_plain()) {
        unit = elements::unit(bytes, [last.total, last.before, last.length, last.first, last.size]);
        *last = last.map(|number| number / unit);
    }
    // If everything is cropped, the first element does not exist.
    let start = if x.count() == 0 { 0 } else { padded.start() };
    // One element, zero by default. Other modes repeat elements and read no padding value.
    let padding = cx.find_input(2).filter(|_| mode == PadMode::Constant);
    let count = y.count() / unit;
    let launch = by_bytes("movement", "pad", bytes * unit).threads(count)?;
    let launch = launch.tensor(x).tensor(y).find_tensor(padding).uint(bytes)?.uint(number_of(mode))?;
    let launch = launch.uint(count)?.uint(padded.axes.len())?;
    let launch = launch.uints::<MOST_AXES>(&padded.list(|axis| axis.total))?;
    let launch = launch.uints::<MOST_AXES>(&padded.list(|axis| axis.before))?;
    let launch = launch.uints::<MOST_AXES>(&padded.list(|axis| axis.length))?;
    Ok(vec![launch.uints::<MOST_AXES>(&padded.steps())?.uint(start)?])
}

/// Returns a mode's number in `cu/movement.cu`.
fn number_of(mode: PadMode) -> usize {
    match mode {
        PadMode::Constant => 0,
        PadMode::Reflect => 1,
        PadMode::Edge => 2,
        PadMode::Wrap => 3,
    }
}

fn trilu(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let &[.., height, width] = &*y.shape else {
        return Err(error!(InvalidArgument, "Trilu needs rank 2 or more, got {:?}", y.shape));
    };
    ensure!(x.count() == y.count(), InvalidArgument, "{:?} is cut to {:?}", x.shape, y.shape);
    let diagonal = cx.find_host(1).map(integer).transpose()?.unwrap_or(0);
    let count = y.count();
    if count == 0 {
        return Ok(Vec::new());
    }
    let launch = by_bytes("movement", "trilu", element_bytes(y.dtype)?).threads(count)?;
    let launch = launch.tensor(x).tensor(y).uint(count)?.uint(height)?.uint(width)?;
    let launch = launch.int(clamped(diagonal))?.uint(cx.attrs.flag("upper")?.into())?;
    Ok(vec![launch])
}

/// Clamps a diagonal to 32 bits: any beyond that lies outside of the matrix.
fn clamped(diagonal: i64) -> i64 {
    diagonal.clamp(i32::MIN.into(), i32::MAX.into())
}

fn reverse_sequence(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y, lengths) = (cx.input(0)?, cx.output(0)?, cx.input(1)?);
    let sequences = ReverseSequence::new(cx.attrs.int("time_axis")? == 0, &x.shape, lengths.count())?;
    ensure!(x.count() == y.count(), InvalidArgument, "{:?} is reversed to {:?}", x.shape, y.shape);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let bytes = element_bytes(x.dtype)?;
    let unit = unit(bytes, [sequences.run]);
    let count = y.count() / unit;
    let launch = by_bytes("movement", "reverse_sequence", bytes * unit).threads(count)?;
    let launch = launch.tensor(x).tensor(y).tensor(lengths).uint(count)?;
    let launch = launch.uint(sequences.second())?.uint(sequences.time)?.uint(sequences.run / unit)?;
    Ok(vec![launch.uint(sequences.time_first.into())?])
}

/// Returns the launch that fills a tensor with one element, given by its bytes.
pub(super) fn filled(y: &Operand, element: &[u8]) -> Result<Vec<Launch>> {
    let count = y.count();
    if count == 0 {
        return Ok(Vec::new());
    }
    let launch = by_bytes("movement", "fill", element_bytes(y.dtype)?).threads(count)?;
    Ok(vec![launch.tensor(y).uint(count)?.bytes(&bits(element))])
}

/// Returns an element's bytes as the lowest of eight.
fn bits(element: &[u8]) -> [u8; 8] {
    let mut word = [0; 8];
    word.iter_mut().zip(element).for_each(|(to, byte)| *to = *byte);
    u64::from_le_bytes(word).to_ne_bytes()
}

fn constant_of_shape(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let y = cx.output(0)?;
    let Some(value) = cx.attrs.find_tensor("value") else { return filled(y, &[]) };
    let view = value.view();
    ensure!(view.dtype() == y.dtype, InvalidGraph, "a value of type {}", view.dtype().name());
    filled(y, view.bytes()?)
}

fn eye_like(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let y = cx.output(0)?;
    let &[_, width] = &*y.shape else {
        return Err(error!(InvalidArgument, "EyeLike needs a matrix, got {:?}", y.shape));
    };
    let (count, bytes) = (y.count(), element_bytes(y.dtype)?);
    if count == 0 {
        return Ok(Vec::new());
    }
    // The bits of a one differ between types, so the conversion supplies them.
    let mut one = vec![0; bytes];
    convert(DType::F32, &1f32.to_le_bytes(), y.dtype, &mut one, 1, CastOptions::default())
        .map_err(|problem| error!(InvalidArgument, "{problem}"))?;
    let launch = by_bytes("movement", "eye", bytes).threads(count)?.tensor(y).uint(count)?;
    let launch = launch.uint(width)?.int(clamped(cx.attrs.int("k")?))?;
    Ok(vec![launch.bytes(&bits(&one))])
}

fn range(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let y = cx.output(0)?;
    let given =
        |index| cx.find_host(index).ok_or_else(|| error!(InvalidArgument, "input {index} is missing"));
    let (start, delta) = (given(0)?, given(2)?);
    let suffix = match y.dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F64 => "f64",
        DType::I16 => "i16",
        DType::I32 => "i32",
        DType::I64 => "i64",
        other => return Err(error!(NotImplemented, "a range of type {} is not supported", other.name())),
    };
    let count = y.count();
    if count == 0 {
        return Ok(Vec::new());
    }
    let launch = Launch::new("movement", format!("range_{suffix}")).threads(count)?;
    let launch = launch.tensor(y).uint(count)?;
    // Kernels take both numbers with 64 bits, whatever the type of the result.
    Ok(vec![if y.dtype.is_float() {
        launch.bytes(&float(start)?.to_ne_bytes()).bytes(&float(delta)?.to_ne_bytes())
    } else {
        launch.bytes(&integer(start)?.to_ne_bytes()).bytes(&integer(delta)?.to_ne_bytes())
    }])
}

fn integer(view: TensorView<'_>) -> Result<i64> {
    view.to_ints()?.first().copied().ok_or_else(|| error!(InvalidArgument, "a number is missing"))
}

/// Returns the single element of a float tensor.
fn float(view: TensorView<'_>) -> Result<f64> {
    let (mut bytes, one) = ([0; 8], CastOptions::default());
    convert(view.dtype(), view.bytes()?, DType::F64, &mut bytes, 1, one)
        .map_err(|problem| error!(InvalidArgument, "{problem}"))?;
    Ok(f64::from_le_bytes(bytes))
}
