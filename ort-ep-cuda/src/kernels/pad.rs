//! Padding and cropping (`Pad`, `CenterCropPad`, `Tile`), masks and reversal (`Trilu`,
//! `ReverseSequence`), and generated tensors (`ConstantOfShape`, `EyeLike`, `Range`).

use ort_core::dtype::{CastOptions, DType, TypeSet, convert};
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::geometry::normalize_axes;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use super::movement::{MOVED, by_bytes, element_bytes, few_axes, unit};
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand, strides};

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
    beyond("CenterCropPad", &[1], center_crop_pad),
    beyond("Tile", &[1], tile),
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

/// What surrounds the tensor, by the kernels' numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Constant = 0,
    Reflect = 1,
    Edge = 2,
    Wrap = 3,
}

/// An axis of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    /// Its size.
    total: usize,
    /// The number of elements before those of the tensor.
    before: usize,
    /// The elements of the tensor that remain after cropping by negative pads.
    length: usize,
    /// The index of the first remaining element.
    first: usize,
    /// The tensor's size along the axis.
    size: usize,
}

impl Axis {
    /// Applies pads to an axis. Negative pads crop first, and the mode then applies to the rest.
    fn padded(size: usize, (begin, end): (i64, i64), mode: Mode) -> Result<Axis> {
        let invalid = || error!(InvalidArgument, "pads {begin} and {end} are out of range for size {size}");
        let cut = |pad: i64| usize::try_from(pad.min(0).unsigned_abs()).unwrap_or(usize::MAX);
        let total = size as i128 + i128::from(begin) + i128::from(end);
        let total = usize::try_from(total).map_err(|_| invalid())?;
        let before = usize::try_from(begin.max(0)).map_err(|_| invalid())?;
        let first = cut(begin).min(size);
        let length = (size - first).saturating_sub(cut(end));
        let repeats = length > 0 || mode == Mode::Constant || total == 0;
        ensure!(repeats, InvalidArgument, "size {size} has no elements to repeat");
        Ok(Axis { total, before, length, first, size })
    }

    fn is_plain(&self) -> bool {
        self.total == self.size && self.before == 0 && self.first == 0 && self.length == self.size
    }

    /// Applies a function to all numbers of the axis.
    fn each(&self, change: impl Fn(usize) -> usize) -> Axis {
        Axis {
            total: change(self.total),
            before: change(self.before),
            length: change(self.length),
            first: change(self.first),
            size: change(self.size),
        }
    }

    /// Merges the axis with an unpadded one inside of it.
    fn around(&self, inner: &Axis) -> Axis {
        self.each(|number| number.saturating_mul(inner.size))
    }
}

/// Whether the mode pads blocks of inner elements as it pads single ones, so that an axis can be
/// merged with the axes inside of it.
fn by_blocks(mode: Mode) -> bool {
    matches!(mode, Mode::Constant | Mode::Wrap)
}

/// Merges axes as far as the mode allows.
fn joined(axes: &[Axis], mode: Mode) -> Vec<Axis> {
    let mut result: Vec<Axis> = Vec::with_capacity(axes.len());
    for axis in axes {
        match result.last_mut() {
            Some(last) if axis.is_plain() && (by_blocks(mode) || last.is_plain()) => {
                *last = last.around(axis);
            }
            _ => result.push(*axis),
        }
    }
    result
}

fn pad(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let x = cx.input(0)?;
    let mode = match cx.attrs.string("mode")? {
        "constant" => Mode::Constant,
        "reflect" => Mode::Reflect,
        "edge" => Mode::Edge,
        "wrap" => Mode::Wrap,
        other => return Err(error!(InvalidGraph, "the mode '{other}' is not known")),
    };
    let given = cx.ints(1)?;
    let axes = match cx.find_ints(3)? {
        Some(axes) => normalize_axes(&axes, x.rank())?,
        None => (0..x.rank()).collect(),
    };
    ensure!(
        given.len() == 2 * axes.len(),
        InvalidArgument,
        "{} pads are given for axes {axes:?}",
        given.len()
    );
    let (begins, ends) = given.split_at(axes.len());
    let mut pads = vec![(0, 0); x.rank()];
    for (axis, (begin, end)) in axes.iter().zip(begins.iter().zip(ends)) {
        pads.get_mut(*axis).into_iter().for_each(|pads| *pads = (*begin, *end));
    }
    padded(cx, &pads, mode, cx.find_input(2))
}

fn center_crop_pad(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, target) = (cx.input(0)?, cx.ints(1)?);
    let axes = match cx.attrs.find_ints("axes") {
        Some(axes) => normalize_axes(axes, x.rank())?,
        None => (0..x.rank()).collect(),
    };
    ensure!(
        target.len() == axes.len(),
        InvalidArgument,
        "{} sizes are given for axes {axes:?}",
        target.len()
    );
    let mut pads = vec![(0, 0); x.rank()];
    for (axis, size) in axes.iter().zip(&target) {
        // Division rounds towards zero, so the odd element is cropped or added at the end.
        let difference = size.saturating_sub(x.size(*axis) as i64);
        let half = difference / 2;
        pads.get_mut(*axis).into_iter().for_each(|pads| *pads = (half, difference - half));
    }
    padded(cx, &pads, Mode::Constant, None)
}

fn tile(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, repeats) = (cx.input(0)?, cx.ints(1)?);
    ensure!(
        repeats.len() == x.rank(),
        InvalidArgument,
        "repeats {repeats:?} do not have one value for each axis of shape {:?}",
        x.shape
    );
    let axes = x.shape.iter().zip(&repeats).map(|(size, repeat)| {
        let total = size.saturating_mul(usize::try_from(*repeat).unwrap_or(0));
        Axis { total, before: 0, length: *size, first: 0, size: *size }
    });
    extended(cx, &axes.collect::<Vec<Axis>>(), Mode::Wrap, None)
}

fn padded(cx: &OpCx<'_>, pads: &[(i64, i64)], mode: Mode, padding: Option<&Operand>) -> Result<Vec<Launch>> {
    // An empty output may have another axis of unbounded size; we do not compute with that.
    if cx.output(0)?.count() == 0 {
        return Ok(Vec::new());
    }
    let sizes = cx.input(0)?.shape.iter().zip(pads);
    let axes = sizes.map(|(size, pads)| Axis::padded(*size, *pads, mode)).collect::<Result<Vec<Axis>>>()?;
    extended(cx, &axes, mode, padding)
}

/// Returns the launch for these axes; `padding` is one element, zero by default.
fn extended(cx: &OpCx<'_>, axes: &[Axis], mode: Mode, padding: Option<&Operand>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let fits = axes.iter().map(|axis| axis.total).eq(y.shape.iter().copied());
    ensure!(
        fits,
        InvalidArgument,
        "a tensor of shape {:?} cannot be cropped or padded to shape {:?}",
        x.shape,
        y.shape
    );
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let bytes = element_bytes(x.dtype)?;
    let mut axes = joined(axes, mode);
    let mut unit = 1;
    if let Some(last) = axes.last_mut().filter(|last| by_blocks(mode) || last.is_plain()) {
        unit = self::unit(bytes, [last.total, last.before, last.length, last.first, last.size]);
        *last = last.each(|number| number / unit);
    }
    let list = |of: fn(&Axis) -> usize| axes.iter().map(of).collect::<Vec<usize>>();
    let steps = strides(&list(|axis| axis.size));
    let start = axes.iter().zip(&steps).map(|(axis, step)| axis.first.saturating_mul(*step)).sum::<usize>();
    // If everything is cropped, the first element does not exist.
    let start = if x.count() == 0 { 0 } else { start };
    // Other modes repeat elements and read no padding value.
    let padding = padding.filter(|_| mode == Mode::Constant);
    let count = y.count() / unit;
    let launch = by_bytes("movement", "pad", bytes * unit).threads(count)?;
    let launch = launch.tensor(x).tensor(y).find_tensor(padding).uint(bytes)?.uint(mode as usize)?;
    let launch = launch.uint(count)?.uint(axes.len())?.uints::<MOST_AXES>(&list(|axis| axis.total))?;
    let launch = launch.uints::<MOST_AXES>(&list(|axis| axis.before))?;
    let launch = launch.uints::<MOST_AXES>(&list(|axis| axis.length))?.uints::<MOST_AXES>(&steps)?;
    Ok(vec![launch.uint(start)?])
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
    let &[first, second, ref rest @ ..] = &*x.shape else {
        return Err(error!(InvalidArgument, "ReverseSequence needs rank 2 or more, got {:?}", x.shape));
    };
    let (time_first, run) = (cx.attrs.int("time_axis")? == 0, rest.iter().product());
    let (batch, time) = if time_first { (second, first) } else { (first, second) };
    let sequences = lengths.count();
    ensure!(
        sequences == batch,
        InvalidArgument,
        "got {sequences} lengths, expected one for each of the {batch} sequences"
    );
    ensure!(x.count() == y.count(), InvalidArgument, "{:?} is reversed to {:?}", x.shape, y.shape);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let bytes = element_bytes(x.dtype)?;
    let unit = unit(bytes, [run]);
    let count = y.count() / unit;
    let launch = by_bytes("movement", "reverse_sequence", bytes * unit).threads(count)?;
    let launch = launch.tensor(x).tensor(y).tensor(lengths).uint(count)?;
    let launch = launch.uint(second)?.uint(time)?.uint(run / unit)?.uint(time_first.into())?;
    Ok(vec![launch])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_that_stay_join_those_around_them() -> Result<()> {
        let axes = |pads: &[(i64, i64)], mode| {
            let axes = [2, 3, 4].iter().zip(pads).map(|(size, pads)| Axis::padded(*size, *pads, mode));
            Ok::<_, ort_core::Error>(joined(&axes.collect::<Result<Vec<Axis>>>()?, mode))
        };
        let one = axes(&[(1, 1), (0, 0), (0, 0)], Mode::Constant)?;
        assert_eq!(one, [Axis { total: 48, before: 12, length: 24, first: 0, size: 24 }]);
        assert_eq!(axes(&[(1, 1), (0, 0), (0, 0)], Mode::Edge)?.len(), 2);
        assert_eq!(axes(&[(0, 0), (0, 0), (1, 0)], Mode::Reflect)?.len(), 2);
        assert!(axes(&[(0, 0), (0, 0), (-5, 0)], Mode::Edge).is_err());
        Ok(())
    }
}
