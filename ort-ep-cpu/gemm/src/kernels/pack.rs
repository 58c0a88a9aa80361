//! Packing of A and B into panels that a micro-kernel reads front to back.

use std::ops::Range;

use super::{CopyRows, Kernel, Transpose};
use crate::Cpu;
use crate::im2col::Im2col;
use crate::operand::{Strided, Weight};
use ort_cpu_threads::parallel::{WORTH_A_THREAD, for_each_row_chunk_mut};

/// Packs the rows of A from `first` on into one panel: k step by k step, with the panel's rows
/// contiguous. Rows beyond the matrix become zeros.
pub(super) fn pack_lhs_panel<T: Weight>(
    values: &[T],
    [rows, k]: [usize; 2],
    [row_stride, step_stride]: [usize; 2],
    first: usize,
    to: &mut [f32],
) {
    let height = to.len() / k.max(1);
    if row_stride == 1 && height > 0 {
        // The rows of a k step are contiguous in A too.
        let count = rows.saturating_sub(first).min(height);
        for (step, to) in to.chunks_exact_mut(height).enumerate() {
            let from = &values[step * step_stride + first..][..count];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen());
            to[count..].fill(0.0);
        }
        return;
    }
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

/// Packs the columns of B from `first` on into one panel: k step by k step, with the panel's
/// columns contiguous. Columns beyond the matrix become zeros.
pub(super) fn pack_rhs_panel<T: Weight>(
    values: &[T],
    [k, columns]: [usize; 2],
    [row_stride, column_stride]: [usize; 2],
    first: usize,
    to: &mut [f32],
) {
    /// k steps at a time, so that strided reads of neighbouring steps hit the same cache lines.
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

/// The longest run that is copied at once, bounded by the buffer of zeros.
const LONGEST_RUN: usize = 64;

impl Kernel {
    /// Packs `steps` and `columns` (at most a panel's width) of a plain B. The padding columns of a
    /// panel are left unchanged: they only reach accumulators that are not stored.
    ///
    /// `to` must hold a panel's width times the k steps.
    pub(super) fn pack_plain(&self, b: &Strided, steps: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        let (count, width) = (steps.len(), self.width());
        debug_assert!(columns.len() <= width && to.len() >= count * width);
        debug_assert!(steps.end <= b.rows && columns.end <= b.columns);
        let from =
            b.values.as_ptr().wrapping_add(steps.start * b.row_stride + columns.start * b.column_stride);
        // SAFETY: the callers pass ranges inside the matrix, which `Strided::new` checked against
        // its slice, and a `to` of the required size.
        unsafe {
            // B is a transposed matrix: its columns are contiguous.
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

    /// im2col packing: packs `steps` and `columns` of the windows of an image. Panels have `row`
    /// columns and start `lane` elements apart; k steps within a panel are `row` elements apart.
    pub(super) fn pack_windows(
        &self,
        b: &Im2col,
        steps: Range<usize>,
        columns: Range<usize>,
        to: &mut [f32],
        [row, lane]: [usize; 2],
    ) {
        let window = &b.window;
        let positions = window.kernel_len();
        let start = split(columns.start, window.output);
        // Kernel positions are outermost, so that the valid outputs are computed once per position
        // and each run is copied for all channels.
        for at in positions_of(window.kernel) {
            let position = (at[0] * window.kernel[1] + at[1]) * window.kernel[2] + at[2];
            // The channels whose k step at this kernel position is in the range.
            let first = steps.start.saturating_sub(position).div_ceil(positions);
            let end = steps.end.saturating_sub(position).div_ceil(positions);
            if first >= end {
                continue;
            }
            let to = &mut to[(first * positions + position - steps.start) * row..];
            let inside = [window.inside(0, at[0]), window.inside(1, at[1]), window.inside(2, at[2])];
            let mut run = Run { at, inside, output: start, len: 0, offset: 0, to_step: positions * row };
            let (mut left, mut left_in_panel) = (columns.len(), row);
            while left > 0 {
                let line = window.output[2] - run.output[2];
                run.len = line.min(left).min(left_in_panel).min(LONGEST_RUN);
                self.pack_run(b, first..end, &run, to);
                (left, left_in_panel) = (left - run.len, left_in_panel - run.len);
                run.advance(window.output);
                if left_in_panel == 0 {
                    (run.offset, left_in_panel) = (run.offset + lane - row, row);
                }
            }
        }
    }

    /// Packs one run for all of `channels`, with zeros where it leaves the image.
    fn pack_run(&self, b: &Im2col, channels: Range<usize>, run: &Run, to: &mut [f32]) {
        static ZEROS: [f32; LONGEST_RUN] = [0.0; LONGEST_RUN];
        let window = &b.window;
        let [depth, height, width] = run.output;
        let within = |axis: usize| (run.inside[axis].0..run.inside[axis].1).contains(&run.output[axis]);
        // Outside the image in depth or height, the whole run is padding.
        let (first, end) = match within(0) && within(1) {
            true => run.inside[2],
            false => (0, 0),
        };
        let (first, end) = (first.clamp(width, width + run.len), end.clamp(width, width + run.len));
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
        // SAFETY: a run has at most `LONGEST_RUN` values, and the assertion above keeps it inside
        // `to`. `Window::inside` made `first..end` positions in the image, so every index is inside
        // a channel.
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

/// Consecutive outputs of one image row, at one kernel position.
struct Run {
    at: [usize; 3],
    /// The outputs along each axis that are inside the image at this kernel position.
    inside: [(usize, usize); 3],
    output: [usize; 3],
    len: usize,
    /// Where the run starts in the packed panels.
    offset: usize,
    /// Stride from a channel's row to the next channel's.
    to_step: usize,
}

impl Run {
    /// Moves on to the output after the run.
    fn advance(&mut self, output: [usize; 3]) {
        self.offset += self.len;
        self.output[2] += self.len;
        for axis in [2, 1] {
            if self.output[axis] >= output[axis] {
                self.output[axis] = 0;
                self.output[axis - 1] += 1;
            }
        }
    }
}

/// Iterates over all positions of a kernel.
fn positions_of([depth, height, width]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    (0..depth).flat_map(move |z| (0..height).flat_map(move |y| (0..width).map(move |x| [z, y, x])))
}

/// Returns the coordinates of a flat index.
fn split(index: usize, shape: [usize; 3]) -> [usize; 3] {
    let line = index / shape[2].max(1);
    [line / shape[1].max(1), line % shape[1].max(1), index % shape[2].max(1)]
}

/// Writes the whole im2col matrix, row by row.
pub(crate) fn unfold(cpu: Cpu, windows: &Im2col, to: &mut [f32]) {
    let (kernel, columns) = (Kernel::of(cpu), windows.columns());
    let steps = windows.window.kernel_len();
    if columns == 0 || steps == 0 {
        return;
    }
    let least = WORTH_A_THREAD.div_ceil(columns * steps);
    for_each_row_chunk_mut(cpu.threads, to, columns * steps, least, |channel, rows| {
        let first = channel * steps;
        let steps = first..first + rows.len() / columns;
        kernel.pack_windows(windows, steps, 0..columns, rows, [columns, columns]);
    });
}

/// Writes the transpose of `rows` by `columns` values, whose rows start `stride` apart,
/// contiguously.
///
/// Both slices must hold their matrix.
pub(crate) fn transpose(cpu: Cpu, from: &[f32], [rows, columns]: [usize; 2], stride: usize, to: &mut [f32]) {
    if rows == 0 || columns == 0 {
        return;
    }
    let (from, to) = (&from[..(rows - 1) * stride + columns], &mut to[..rows * columns]);
    let call =
        Transpose { from: from.as_ptr(), from_row: stride, to: to.as_mut_ptr(), to_row: rows, rows, columns };
    // SAFETY: both slices were cut to the size of their matrix above, and `Kernel::of` chose the
    // kernel for this CPU.
    unsafe { (Kernel::of(cpu).transpose)(&call) }
}
