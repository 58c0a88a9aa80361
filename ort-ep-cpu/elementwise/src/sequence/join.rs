//! Splitting tensors into sequences and joining them: `SplitToSequence` and `ConcatFromSequence`.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::ir::ValueType;
use ort_core::tensor::{Shape, Tensor, TensorView, Value};
use ort_core::{Result, ensure, error};

use super::{reserve_headers, sequence, sequence_value};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{self, spending};

cpu_kernels![
    KernelDef { op: "SplitToSequence", outputs: OutputsFrom::Kernel, make: make_split, ..KernelDef::BASE },
    KernelDef {
        op: "ConcatFromSequence",
        outputs: OutputsFrom::Kernel,
        make: make_concat,
        ..KernelDef::BASE
    },
];

fn make_split(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let axis = cx.attrs().int("axis")?;
    let keep = cx.attrs().flag("keepdims")?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| split(cx, axis, keep)))
}

fn make_concat(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let axis = cx.attrs().int("axis")?;
    let new_axis = cx.attrs().flag("new_axis")?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| concat(cx, axis, new_axis)))
}

fn resolve(axis: i64, rank: usize) -> Result<usize> {
    // The axis comes from the model, and the rank of an element only from the run.
    let counted = if axis < 0 { axis.checked_add(rank as i64) } else { Some(axis) };
    let found = counted.and_then(|axis| usize::try_from(axis).ok()).filter(|&axis| axis < rank);
    found.ok_or_else(|| error!(InvalidArgument, "axis {axis} is out of range for rank {rank}"))
}

/// Returns the number of parts of an axis of `size`, before `lengths` checks them.
fn part_count(split: Option<TensorView<'_>>, size: usize) -> Result<usize> {
    let Some(split) = split else { return Ok(size) };
    // The standard: a scalar is the length of each part, a list has the length of every part.
    if split.rank() > 0 {
        return Ok(split.element_count());
    }
    let length = split.to_ints()?.first().and_then(|&length| usize::try_from(length).ok());
    Ok(length.map_or(0, |length| size.div_ceil(length.max(1))))
}

/// Returns the lengths of the parts of an axis of `size`.
fn lengths(split: Option<TensorView<'_>>, size: usize) -> Result<Vec<usize>> {
    let Some(split) = split else { return Ok(vec![1; size]) };
    let given: Option<Vec<usize>> =
        spending(1, split.to_ints()?).map(|length| usize::try_from(length).ok()).collect();
    let given = given.ok_or_else(|| error!(InvalidArgument, "a part has a negative length"))?;
    if split.rank() > 0 {
        // Hostile lengths may overflow when they are added.
        let total = given.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
        ensure!(total == Some(size), InvalidArgument, "parts of lengths {given:?} do not make up {size}");
        return Ok(given);
    }
    let length = given.first().copied().filter(|&length| length > 0);
    let length = length.ok_or_else(|| error!(InvalidArgument, "parts must not be empty"))?;
    let mut parts = vec![length; size / length];
    // The standard: the last part takes the remainder.
    if !size.is_multiple_of(length) {
        parts.push(size % length);
    }
    Ok(parts)
}

fn split(cx: &mut RunCx<'_>, axis: i64, keep: bool) -> Result<()> {
    let input = cx.input(0)?;
    let axis = resolve(axis, input.rank())?;
    // `keepdims` applies only to the default split into single elements.
    let keep = keep || cx.has_input(1);
    let size = input.shape()[axis];
    // Reserved before `lengths` allocates: a size next to a dimension of 0 may be huge.
    let _headers = reserve_headers(cx, part_count(cx.find_input(1), size)?)?;
    let parts = lengths(cx.find_input(1), size)?;
    let mut elements = Vec::with_capacity(parts.len());
    let mut start = 0;
    for length in spending(256, parts) {
        let mut shape: Shape = input.shape().into();
        shape[axis] = length;
        let part = cut(cx, &input, axis, (start, &shape))?;
        if !keep {
            shape.remove(axis);
        }
        elements.push(Value::Tensor(part.reshape(&shape)?));
        start += length;
    }
    cx.set(0, sequence_value(ValueType::tensor(input.dtype(), None), elements))
}

/// Returns the bytes of one element of a type with whole bytes.
fn width(dtype: DType) -> Result<usize> {
    dtype.byte_size().ok_or_else(|| error!(NotImplemented, "sequences of {} tensors", dtype.name()))
}

/// Copies the part of a tensor that has `shape` and starts at `start` along an axis.
fn cut(
    cx: &RunCx<'_>,
    input: &TensorView<'_>,
    axis: usize,
    (start, shape): (usize, &[usize]),
) -> Result<Tensor> {
    let inner: usize = shape[axis + 1..].iter().product();
    let (row, part) = (input.shape()[axis] * inner, shape[axis] * inner);
    let from = start * inner;
    if let Ok(strings) = input.strings() {
        let rows = strings.chunks(row.max(1)).flat_map(|row| &row[from..from + part]);
        return cx.strings(shape, rows.cloned());
    }
    let width = width(input.dtype())?;
    let mut output = cx.allocate(input.dtype(), shape)?;
    // At least 1, because `chunks_exact` refuses a length of 0; such tensors have no bytes.
    let rows = input.bytes()?.chunks_exact((row * width).max(1));
    let parts = output.bytes_mut()?.chunks_exact_mut((part * width).max(1));
    for (row, to) in spending(4 + part * width / 16, rows.zip(parts)) {
        interrupt::copy(&row[from * width..(from + part) * width], to);
    }
    output.finish()
}

fn concat(cx: &mut RunCx<'_>, axis: i64, new_axis: bool) -> Result<()> {
    let from = sequence(cx, 0)?;
    let tensors: Vec<&Tensor> = spending(4, &from.elements).map(Value::tensor).collect::<Result<_>>()?;
    let first = tensors.first().ok_or_else(|| error!(InvalidArgument, "the sequence is empty"))?;
    let axis = resolve(axis, first.shape().len() + usize::from(new_axis))?;
    let mut shapes: Vec<Shape> = spending(8, &tensors).map(|tensor| tensor.shape().into()).collect();
    for (shape, tensor) in spending(8, shapes.iter_mut().zip(&tensors)) {
        ensure!(
            tensor.dtype() == first.dtype() && shape.len() == first.shape().len(),
            InvalidArgument,
            "a {} tensor of shape {shape:?} cannot be joined to {} of {:?}",
            tensor.dtype().name(),
            first.dtype().name(),
            first.shape()
        );
        // Stacking is concatenation of tensors with one more axis of size 1.
        if new_axis {
            shape.insert(axis, 1);
        }
    }
    let mut joined = shapes[0].clone();
    for shape in spending(8, &shapes[1..]) {
        let others = (0..joined.len()).filter(|&other| other != axis);
        for other in others {
            ensure!(
                shape[other] == joined[other],
                InvalidArgument,
                "shapes {shape:?} and {joined:?} differ beside axis {axis}"
            );
        }
        joined[axis] += shape[axis];
    }
    let inner: usize = joined[axis + 1..].iter().product();
    // An empty result has no rows to join, although its other dimensions may be huge.
    let outer: usize = if joined.contains(&0) { 0 } else { joined[..axis].iter().product() };
    if first.dtype() == DType::String {
        let texts = tensors.iter().map(|tensor| tensor.strings()).collect::<Result<Vec<_>>>()?;
        let strings = (0..outer).flat_map(|row| {
            texts.iter().zip(&shapes).flat_map(move |(texts, shape)| {
                let part = shape[axis] * inner;
                texts[row * part..(row + 1) * part].iter().cloned()
            })
        });
        let result = cx.strings(&joined, strings)?;
        return cx.set(0, result);
    }
    let width = width(first.dtype())?;
    let mut output = cx.allocate(first.dtype(), &joined)?;
    let mut rest = output.bytes_mut()?;
    for row in 0..outer {
        for (tensor, shape) in spending(8, tensors.iter().zip(&shapes)) {
            let part = shape[axis] * inner * width;
            let (to, behind) = std::mem::take(&mut rest).split_at_mut(part);
            interrupt::copy(&tensor.view().bytes()?[row * part..(row + 1) * part], to);
            rest = behind;
        }
    }
    let output = output.finish()?;
    cx.set(0, output)
}
