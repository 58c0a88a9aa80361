//! Functions of each lane along an axis, in any layout and floating-point type.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::ep::{RunCx, Unary};
use ort_core::{Result, error, for_each_type};

use crate::lane_fn::LaneFn;
use crate::layout::around_axis;
use crate::number::Real;
use ort_cpu_threads::interrupt::{self, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

/// The fewest elements that are worth a thread.
const GRAIN: usize = 1 << 13;
/// Lanes that are gathered at a time if their elements are not contiguous.
const GATHERED: usize = 16;

/// Applies `function` to each lane of input 0 along `axis` and writes output 0, which may share the
/// input's memory.
pub fn apply(cx: &mut RunCx<'_>, axis: i64, function: &impl LaneFn) -> Result<()> {
    let dtype = match cx.in_place(0) {
        Some(_) => None,
        None => Some(cx.input(0)?.dtype()),
    };
    let shape = cx.output_shape(0).ok_or_else(|| error!(Fail, "output 0 has no memory ready"))?;
    let sizes = around_axis(shape, axis)?;
    let threads = cx.threads();
    let Some(dtype) = dtype else {
        let output = cx.output(0)?;
        let dtype = output.dtype();
        return for_each_type!(dtype in FLOATS, T => {
            lanes::<T>(threads, sizes, Unary::InPlace(output.as_mut_slice()?), function);
            Ok(())
        }, else => Err(error!(NotImplemented, "lanes of {} are not supported", dtype.name())));
    };
    for_each_type!(dtype in FLOATS, T => {
        lanes::<T>(threads, sizes, cx.unary::<T>(0, 0)?, function);
        Ok(())
    }, else => Err(error!(NotImplemented, "lanes of {} are not supported", dtype.name())))
}

fn lanes<T: Real>(threads: usize, [_, len, inner]: [usize; 3], data: Unary<'_, T>, function: &impl LaneFn) {
    let (from, to) = match data {
        Unary::Apart(from, to) => (Some(from), to),
        Unary::InPlace(to) => (None, to),
    };
    let block = len * inner;
    if block == 0 {
        return;
    }
    for_each_row_chunk_mut(threads, to, block, (GRAIN / block).max(1), |first, rows| {
        if let Some(from) = from {
            let start = first * block;
            interrupt::copy(&from[start..start + rows.len()], rows);
        }
        // One buffer for all lanes of a thread; it stays empty for types with loops of their own.
        let mut scratch = Vec::new();
        for rows in rows.chunks_exact_mut(block) {
            match inner {
                1 => T::apply(function, rows, &mut scratch),
                // Some functions take all columns at once, without gathering.
                _ if T::apply_columns(function, rows, inner) => {}
                _ => gathered(rows, len, inner, function, &mut scratch),
            }
        }
    });
}

/// Gathers lanes whose elements are `inner` apart, some at a time, and applies the function.
fn gathered<T: Real>(
    block: &mut [T],
    len: usize,
    inner: usize,
    function: &impl LaneFn,
    scratch: &mut Vec<f64>,
) {
    let mut lanes = vec![T::default(); GATHERED.min(inner) * len];
    for start in (0..inner).step_by(GATHERED) {
        // Several lanes at a time, because a cache line holds adjacent elements of that many lanes.
        let width = GATHERED.min(inner - start);
        for (at, row) in spending(2 * width, block.chunks_exact(inner)).enumerate() {
            for (lane, &x) in row[start..start + width].iter().enumerate() {
                lanes[lane * len + at] = x;
            }
        }
        lanes.chunks_exact_mut(len).take(width).for_each(|lane| T::apply(function, lane, scratch));
        for (at, row) in spending(2 * width, block.chunks_exact_mut(inner)).enumerate() {
            for (lane, x) in row[start..start + width].iter_mut().enumerate() {
                *x = lanes[lane * len + at];
            }
        }
    }
}
