//! Packing: strips of A and B copied so that a tile reads them front to back.

use std::ops::Range;

use super::{CopyRows, Kernel, Transpose};
use crate::gemm::Cpu;
use crate::gemm::im2col::Im2col;
use crate::gemm::operand::{Strided, Weight};
use crate::parallel::for_each_row_chunk_mut;

/// Packs the rows of a left side from `first` on into one panel: step by step, the panel's rows
/// side by side, with zeros for rows beyond the matrix.
pub(in crate::gemm) fn pack_a_panel<T: Weight>(
    values: &[T],
    [rows, k]: [usize; 2],
    [row_stride, step_stride]: [usize; 2],
    first: usize,
    to: &mut [f32],
) {
    let height = to.len() / k.max(1);
    for row in 0..height {
        let inside = first + row < rows;
        for step in 0..k {
            to[step * height + row] = match inside {
                true => values[(first + row) * row_stride + step * step_stride].widen(),
                false => 0.0,
            };
        }
    }
}

/// Packs the columns of a right side from `first` on into one panel: step by step, the panel's
/// columns side by side, with zeros for columns beyond the matrix.
pub(in crate::gemm) fn pack_b_panel<T: Weight>(
    values: &[T],
    [k, columns]: [usize; 2],
    [row_stride, column_stride]: [usize; 2],
    first: usize,
    to: &mut [f32],
) {
    /// Steps taken at once, so that strided reads of neighbouring steps meet in the cache.
    const STEPS: usize = 64;
    let width = to.len() / k.max(1);
    let count = columns.saturating_sub(first).min(width);
    for start in (0..k).step_by(STEPS) {
        let end = (start + STEPS).min(k);
        if column_stride == 1 {
            for step in start..end {
                let from = &values[step * row_stride + first..][..count];
                let row = &mut to[step * width..][..width];
                row.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen());
                row[count..].fill(0.0);
            }
            continue;
        }
        for column in 0..width {
            for step in start..end {
                to[step * width + column] = match column < count {
                    true => values[step * row_stride + (first + column) * column_stride].widen(),
                    false => 0.0,
                };
            }
        }
    }
}

/// The most values copied as one run.
const LONGEST_RUN: usize = 64;

impl Kernel {
    /// Packs `steps` and `columns` (at most a panel's width) of a plain right side. What lies behind
    /// the last column of a panel is left as it was: it only reaches sums that are not stored.
    ///
    /// `to` must hold a panel's width times the steps.
    pub(super) fn pack_plain(&self, b: &Strided, steps: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        let (count, width) = (steps.len(), self.width());
        debug_assert!(columns.len() <= width && to.len() >= count * width);
        debug_assert!(steps.end <= b.rows && columns.end <= b.columns);
        let from =
            b.values.as_ptr().wrapping_add(steps.start * b.row_stride + columns.start * b.column_stride);
        // SAFETY: the callers pass ranges inside the matrix, which `Strided::new` checked against its
        // slice, and a `to` of the size asked for.
        unsafe {
            if b.row_stride == 1 && b.column_stride != 1 {
                (self.transpose)(&Transpose {
                    from,
                    from_row: b.column_stride,
                    to: to.as_mut_ptr(),
                    to_row: width,
                    rows: columns.len(),
                    columns: count,
                });
            } else {
                (self.copy_rows)(&CopyRows {
                    from,
                    from_stride: b.column_stride,
                    from_step: b.row_stride,
                    to: to.as_mut_ptr(),
                    to_step: width,
                    count,
                    len: columns.len(),
                });
            }
        }
    }

    /// Packs `steps` and `columns` of the windows of an image, steps `row` values apart.
    pub(super) fn pack_windows(
        &self,
        b: &Im2col,
        steps: Range<usize>,
        columns: Range<usize>,
        to: &mut [f32],
        row: usize,
    ) {
        let window = &b.window;
        let positions = window.kernel_len();
        for position in 0..positions.min(steps.end) {
            // Channels whose step at this position lies in the range.
            let first = steps.start.saturating_sub(position).div_ceil(positions);
            let end = (steps.end - position).div_ceil(positions);
            if first >= end {
                continue;
            }
            let channels = first..end;
            let to = &mut to[(first * positions + position - steps.start) * row..];
            let at = split(position, window.kernel);
            let mut column = columns.start;
            while column < columns.end {
                let output = split(column, window.output);
                let len = (window.output[2] - output[2]).min(columns.end - column).min(LONGEST_RUN);
                let offset = column - columns.start;
                let run = Run { at, output, len, offset, to_step: positions * row };
                self.pack_run(b, channels.clone(), &run, to);
                column += len;
            }
        }
    }

    /// Packs one run for all of `channels`, with zeros where it leaves the image.
    fn pack_run(&self, b: &Im2col, channels: Range<usize>, run: &Run, to: &mut [f32]) {
        static ZEROS: [f32; LONGEST_RUN] = [0.0; LONGEST_RUN];
        let window = &b.window;
        let [depth, height, width] = run.output;
        let within = |axis: usize, index: usize| {
            let (first, end) = window.inside(axis, run.at[axis]);
            (first..end).contains(&index)
        };
        let (first, end) = window.inside(2, run.at[2]);
        let (first, end) = match within(0, depth) && within(1, height) {
            true => (first.clamp(width, width + run.len), end.clamp(width, width + run.len)),
            false => (width, width),
        };
        let (to_step, count) = (run.to_step, channels.len());
        assert!(to.len() >= (count - 1) * to_step + run.offset + run.len, "a run leaves its block");
        let to = to.as_mut_ptr().wrapping_add(run.offset);
        let zeros = |from: usize, len: usize| CopyRows {
            from: ZEROS.as_ptr(),
            from_stride: 1,
            from_step: 0,
            to: to.wrapping_add(from),
            to_step,
            count,
            len,
        };
        // SAFETY: a run is no longer than the zeros and inside its row of `to`; the values
        // between `first` and `end` meet the image, so every index below is inside a channel.
        unsafe {
            if first > width {
                (self.copy_rows)(&zeros(0, first - width));
            }
            if first < end {
                let plane = window.source(0, depth, run.at[0]) * window.input[1];
                let line = (plane + window.source(1, height, run.at[1])) * window.input[2];
                let index = channels.start * window.input_len() + line + window.source(2, first, run.at[2]);
                (self.copy_rows)(&CopyRows {
                    from: b.image.as_ptr().add(index),
                    from_stride: window.stride[2],
                    from_step: window.input_len(),
                    to: to.wrapping_add(first - width),
                    to_step,
                    count,
                    len: end - first,
                });
            }
            if end < width + run.len {
                (self.copy_rows)(&zeros(end - width, width + run.len - end));
            }
        }
    }
}

/// Consecutive outputs of one line of the image, at one kernel position.
struct Run {
    at: [usize; 3],
    output: [usize; 3],
    len: usize,
    /// Where the run starts in its row.
    offset: usize,
    /// From a channel's row to the next channel's.
    to_step: usize,
}

/// The coordinates of a flat index.
fn split(index: usize, shape: [usize; 3]) -> [usize; 3] {
    let line = index / shape[2].max(1);
    [line / shape[1].max(1), line % shape[1].max(1), index % shape[2].max(1)]
}

/// Writes the whole matrix of windows, row by row.
pub(in crate::gemm) fn unfold(cpu: Cpu, windows: &Im2col, to: &mut [f32]) {
    let (kernel, columns) = (Kernel::of(cpu.isa), windows.columns());
    let steps = windows.window.kernel_len();
    if columns == 0 || steps == 0 {
        return;
    }
    for_each_row_chunk_mut(cpu.threads, to, columns * steps, 4, |channel, rows| {
        let first = channel * steps;
        kernel.pack_windows(windows, first..first + rows.len() / columns, 0..columns, rows, columns);
    });
}

/// Writes the transpose of `rows` by `columns` values, whose rows start `stride` apart, without gaps.
///
/// Both slices must hold their matrix.
pub(in crate::gemm) fn transpose(
    cpu: Cpu,
    from: &[f32],
    [rows, columns]: [usize; 2],
    stride: usize,
    to: &mut [f32],
) {
    if rows == 0 || columns == 0 {
        return;
    }
    let (from, to) = (&from[..(rows - 1) * stride + columns], &mut to[..rows * columns]);
    let call =
        Transpose { from: from.as_ptr(), from_row: stride, to: to.as_mut_ptr(), to_row: rows, rows, columns };
    // SAFETY: both matrices lie in their slices, which were cut to size above.
    unsafe { (Kernel::of(cpu.isa).transpose)(&call) }
}
