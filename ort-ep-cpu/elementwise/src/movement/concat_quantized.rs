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
use ort_cpu_threads::parallel::{for_each_chunk_mut, for_each_row_chunk_mut};
use ort_cpu_vector::simd::{Isa, lookup};

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

/// Values whose lookups stay in the L1 cache.
const BUFFER: usize = 1 << 12;

/// One input, and how many of its values belong to each row of the output.
struct Part<'a> {
    values: &'a [u8],
    row: usize,
    /// `None` if scale and zero point equal those of the output.
    table: Option<[u8; 256]>,
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
            values: bytemuck::cast_slice(view.as_slice::<T>()?),
            // From the axis on, an input is contiguous in each row of the output.
            row: view.shape()[axis..].iter().product(),
            table: (own != result).then(|| bytemuck::cast(requantization::<T>(own, result))),
        });
    }
    let row: usize = parts.iter().map(|part| part.row).sum();
    let threads = cx.threads();
    let out: &mut [u8] = bytemuck::cast_slice_mut(cx.output(0)?.as_mut_slice::<T>()?);
    // Rows of channels are short. Each task then takes whole rows, and each input's part of them.
    if row <= BUFFER {
        for_each_row_chunk_mut(threads, out, row.max(1), CHUNK.div_ceil(row.max(1)), |first, rows| {
            let mut start = 0;
            for part in &parts {
                part.write_rows(first, rows, row, start);
                start += part.row;
            }
        });
        return Ok(());
    }
    for_each_chunk_mut(threads, out, CHUNK, |chunk, mut rest| {
        let mut at = chunk * CHUNK;
        while !rest.is_empty() {
            // A row of 0 values means no output, so the remainder has a divisor here.
            let Some((part, first)) = part_at(&parts, at % row) else { return };
            let (piece, others) = rest.split_at_mut(rest.len().min(part.row - first));
            piece.copy_from_slice(&part.values[at / row * part.row + first..][..piece.len()]);
            if let Some(table) = &part.table {
                lookup(Isa::current(), table, piece);
            }
            at += piece.len();
            rest = others;
        }
    });
    Ok(())
}

impl Part<'_> {
    /// Writes this input's part of `rows`, which starts `start` values after the start of a row.
    fn write_rows(&self, first: usize, rows: &mut [u8], row: usize, start: usize) {
        if self.row == 0 {
            return;
        }
        let at_once = BUFFER / self.row;
        let mut buffer = [0; BUFFER];
        let from = &self.values[first * self.row..];
        for (rows, from) in rows.chunks_mut(row * at_once).zip(from.chunks(self.row * at_once)) {
            let count = rows.len() / row * self.row;
            // The values of several rows are contiguous in the input, so one lookup serves them.
            let from = match &self.table {
                None => &from[..count],
                Some(table) => {
                    let values = &mut buffer[..count];
                    values.copy_from_slice(&from[..count]);
                    lookup(Isa::current(), table, values);
                    values
                }
            };
            for (row, from) in rows.chunks_exact_mut(row).zip(from.chunks_exact(self.row)) {
                row[start..start + self.row].copy_from_slice(from);
            }
        }
    }
}

/// Returns the input that a position of an output row comes from, and the position within that
/// input's row.
fn part_at<'a, 'b>(parts: &'b [Part<'a>], mut place: usize) -> Option<(&'b Part<'a>, usize)> {
    for part in parts {
        if place < part.row {
            return Some((part, place));
        }
        place -= part.row;
    }
    None
}
