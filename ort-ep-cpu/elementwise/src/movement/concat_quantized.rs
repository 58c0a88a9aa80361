//! Quantized concatenation (`QLinearConcat`).
//!
//! A 256-entry lookup table per input requantizes its values to the scale and zero point of the
//! output.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ops::tensor::geometry::normalize_axis;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, error, for_each_type};

use crate::elementwise::quantized::requantization;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::quantized_byte::{QuantizedByte, scale, zero};
use ort_cpu_threads::parallel::for_each_chunk_mut;

cpu_kernels![KernelDef { domain: MICROSOFT, op: "QLinearConcat", make, ..KernelDef::BASE }];

/// Quantized values per task.
const CHUNK: usize = 1 << 14;

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (axis, dtype) = (cx.attrs().int("axis")?, cx.node.dtype(1).unwrap_or(DType::U8));
    for_each_type!(
        dtype in [U8, I8],
        T => Ok(Box::new(move |cx: &mut RunCx<'_>| run::<T>(cx, axis))),
        else => Err(error!(NotImplemented, "quantized values of type {} are not supported", dtype.name())),
    )
}

/// One input, and how many of its values belong to each row of the output.
struct Part<'a, T> {
    values: &'a [T],
    row: usize,
    /// `None` if scale and zero point equal those of the output.
    table: Option<[T; 256]>,
}

fn run<T: QuantizedByte>(cx: &mut RunCx<'_>, axis: i64) -> Result<()> {
    let result = (scale(cx, 0)?, zero::<T>(cx, 1)?);
    let mut parts = Vec::new();
    // Each input has a tensor, a scale and a zero point.
    for first in (2..cx.input_count()).step_by(3) {
        let view = cx.input(first)?;
        let axis = normalize_axis(axis, view.rank())?;
        let own = (scale(cx, first + 1)?, zero::<T>(cx, first + 2)?);
        parts.push(Part {
            values: view.as_slice::<T>()?,
            // From the axis on, an input is contiguous in each row of the output.
            row: view.shape()[axis..].iter().product(),
            table: (own != result).then(|| requantization(own, result)),
        });
    }
    let row: usize = parts.iter().map(|part| part.row).sum();
    let threads = cx.threads();
    let out = cx.output(0)?.as_mut_slice::<T>()?;
    for_each_chunk_mut(threads, out, CHUNK, |chunk, mut rest| {
        let mut at = chunk * CHUNK;
        while !rest.is_empty() {
            // A row of 0 values means no output, so the remainder has a divisor here.
            let Some((part, first)) = part_at(&parts, at % row) else { return };
            let (piece, others) = rest.split_at_mut(rest.len().min(part.row - first));
            let from = part.values.get(at / row * part.row + first..).unwrap_or(&[]);
            match &part.table {
                None => piece.iter_mut().zip(from).for_each(|(to, value)| *to = *value),
                Some(table) => piece.iter_mut().zip(from).for_each(|(to, value)| *to = table[value.bits()]),
            }
            at += piece.len();
            rest = others;
        }
    });
    Ok(())
}

/// Returns the input that a position of an output row comes from, and the position within that
/// input's row.
fn part_at<'a, 'b, T>(parts: &'b [Part<'a, T>], mut place: usize) -> Option<(&'b Part<'a, T>, usize)> {
    for part in parts {
        if place < part.row {
            return Some((part, place));
        }
        place -= part.row;
    }
    None
}
