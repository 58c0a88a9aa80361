//! im2col over a batch: the windows of all images as the rows of one matrix. A small image alone
//! would not fill the vectors of a GEMM.

use std::ops::Range;

use smallvec::SmallVec;

use super::ConvGeometry;
use ort_cpu_gemm::{Cpu, Window};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::{WORTH_A_THREAD, for_each_row_chunk_mut};

/// Elements of windows and gradients that are written out at a time, unless a single row has more.
/// They fit in some of the caches.
const AT_ONCE: usize = 384 << 10;

/// The output rows of a batch, and how many of them are processed at a time.
#[derive(Clone, Copy)]
pub(super) struct OutputRows {
    count: usize,
    at_once: usize,
    /// Output pixels in a row.
    pub(super) len: usize,
    /// The length of a window: channels of a group times kernel positions.
    pub(super) steps: usize,
}

impl OutputRows {
    pub(super) fn of(geometry: &ConvGeometry) -> OutputRows {
        let [depth, height, len] = geometry.window.output;
        let steps = geometry.group_channels() * geometry.window.kernel_len();
        let count = geometry.batch * depth * height;
        let values = (steps + geometry.group_filters()).saturating_mul(len);
        let most = (AT_ONCE / values.max(1)).max(1);
        // Pieces of nearly equal size.
        let at_once = count.div_ceil(count.div_ceil(most).max(1)).max(1);
        OutputRows { count, at_once, len, steps }
    }

    /// Splits the rows into pieces.
    pub(super) fn pieces(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.count).step_by(self.at_once).map(move |first| first..(first + self.at_once).min(self.count))
    }

    /// Returns the maximum of `len` over all pieces. All pieces but the last have the same length.
    pub(super) fn most(self, len: impl Fn(usize) -> usize) -> usize {
        let rest = self.count % self.at_once;
        [self.at_once.min(self.count), rest]
            .map(|output_rows| if output_rows == 0 { 0 } else { len(output_rows * self.len) })
            .into_iter()
            .max()
            .unwrap_or(0)
    }

    /// Returns the elements of the windows and of the gradients of a piece.
    pub(super) fn lens(self, filters: usize) -> [usize; 2] {
        let rows = self.at_once.min(self.count) * self.len;
        [rows * self.steps, rows * filters].map(|len| len.next_multiple_of(16))
    }
}

/// Gathers the filters of a group as rows of the output pixels of all images, from pixel `first`
/// on.
pub(super) fn take_rows(
    cpu: Cpu,
    geometry: &ConvGeometry,
    (group, first): (usize, usize),
    upstream: &[f32],
    to: &mut [f32],
) {
    let (filters, places) = (geometry.group_filters(), geometry.window.output_len());
    let len = to.len() / filters;
    let least = WORTH_A_THREAD.div_ceil(len.max(1));
    for_each_row_chunk_mut(cpu.threads, to, len, least, |row, rows| {
        for (index, row_values) in rows.chunks_exact_mut(len).enumerate() {
            let filter = group * filters + row + index;
            let (mut at, mut rest) = (first, row_values);
            while !rest.is_empty() {
                let (image, place) = (at / places, at % places);
                let count = (places - place).min(rest.len());
                let (head, tail) = rest.split_at_mut(count);
                head.copy_from_slice(
                    &upstream[(image * geometry.filters + filter) * places + place..][..count],
                );
                (at, rest) = (at + count, tail);
            }
        }
    });
}

/// Scatters rows of the output pixels of all images, from pixel `first` on, to the filters of a
/// group.
pub(super) fn give_rows(
    geometry: &ConvGeometry,
    (group, first): (usize, usize),
    from: &[f32],
    output: &mut [f32],
) {
    let (filters, places) = (geometry.group_filters(), geometry.window.output_len());
    for (row, values) in from.chunks_exact((from.len() / filters).max(1)).enumerate() {
        spend(values.len() / 4);
        let (mut at, mut rest) = (first, values);
        while !rest.is_empty() {
            let (image, place) = (at / places, at % places);
            let (head, tail) = rest.split_at((places - place).min(rest.len()));
            let plane = image * geometry.filters + group * filters + row;
            output[plane * places + place..][..head.len()].copy_from_slice(head);
            (at, rest) = (at + head.len(), tail);
        }
    }
}

/// Returns the image, and the depth and height, of an output row.
fn place_of(window: &Window, output_row: usize) -> (usize, [usize; 2]) {
    let [depth, height, _] = window.output;
    (output_row / (depth * height), [output_row / height % depth, output_row % height])
}

/// im2col: writes the windows of a group's channels as rows, starting with output row `first`.
pub(super) fn take_windows(
    cpu: Cpu,
    geometry: &ConvGeometry,
    (group, first): (usize, usize),
    image: &[f32],
    to: &mut [f32],
) {
    let (window, channels) = (&geometry.window, geometry.group_channels());
    let row_len = window.output[2] * channels * window.kernel_len();
    let least = WORTH_A_THREAD.div_ceil(row_len.max(1));
    for_each_row_chunk_mut(cpu.threads, to, row_len, least, |output_row, output_rows| {
        for (index, windows) in output_rows.chunks_exact_mut(row_len).enumerate() {
            let (batch, at) = place_of(window, first + output_row + index);
            let len = channels * window.input_len();
            let image = &image[(batch * geometry.groups + group) * len..][..len];
            spend(row_len / 4);
            RowOfWindows::new(window, at).take(image, windows);
        }
    });
}

/// col2im: adds windows, in the order of [`take_windows`], to the image elements that they were
/// read from.
pub(super) fn add_windows(
    cpu: Cpu,
    geometry: &ConvGeometry,
    (group, output_rows): (usize, Range<usize>),
    windows: &[f32],
    to: &mut [f32],
) {
    let (window, channels, group_channels) = (&geometry.window, geometry.channels, geometry.group_channels());
    let (plane, taps) = (window.input_len(), window.kernel_len());
    let of_image = window.output[0] * window.output[1];
    let (steps, first) = (group_channels * taps, output_rows.start / of_image);
    let images = first..output_rows.end.div_ceil(of_image);
    // The offsets depend only on the output row, so all images and channels share them.
    let of_rows: SmallVec<[RowOfWindows<'_>; 8]> =
        (0..of_image).map(|output_row| RowOfWindows::new(window, place_of(window, output_row).1)).collect();
    let least = WORTH_A_THREAD.div_ceil((window.output_len() * taps).max(1));
    let planes = &mut to[images.start * channels * plane..images.end * channels * plane];
    for_each_row_chunk_mut(cpu.threads, planes, plane, least, |row, rows| {
        for (index, to) in rows.chunks_exact_mut(plane).enumerate() {
            let (image, channel) = (first + (row + index) / channels, (row + index) % channels);
            // The planes of all groups are split over the threads, so those of other groups are
            // skipped.
            if channel / group_channels != group {
                continue;
            }
            let from_tap = channel % group_channels * taps;
            let range = output_rows.start.max(image * of_image)..output_rows.end.min((image + 1) * of_image);
            for output_row in range {
                let windows =
                    &windows[(output_row - output_rows.start) * window.output[2] * steps + from_tap..];
                spend(window.output[2] * taps / 4);
                of_rows[output_row % of_image].add((windows, steps), to);
            }
        }
    });
}

/// The windows of one output row.
struct RowOfWindows<'a> {
    window: &'a Window,
    /// Where each row of the kernel starts to read in a channel's plane; `None` in the padding.
    rows: SmallVec<[Option<usize>; 8]>,
}

impl<'a> RowOfWindows<'a> {
    fn new(window: &'a Window, at: [usize; 2]) -> Self {
        let place = |axis: usize, tap: usize| {
            let from = at[axis] * window.stride[axis] + tap * window.dilation[axis];
            from.checked_sub(window.pad[axis]).filter(|place| *place < window.input[axis])
        };
        let taps = (0..window.kernel[0]).flat_map(|z| (0..window.kernel[1]).map(move |y| [z, y]));
        let row = |[z, y]: [usize; 2]| {
            let (z, y) = (place(0, z)?, place(1, y)?);
            Some((z * window.input[1] + y) * window.input[2])
        };
        RowOfWindows { window, rows: taps.map(row).collect() }
    }

    /// Returns the kernel positions along the width for which window `index` is inside the image,
    /// and where the first of them reads.
    fn across(&self, index: usize) -> (Range<usize>, usize) {
        let [dilation, pad, input] =
            [self.window.dilation, self.window.pad, self.window.input].map(|of| of[2]);
        let start = index * self.window.stride[2];
        let first = if start >= pad { 0 } else { (pad - start).div_ceil(dilation) };
        let end = (input + pad).saturating_sub(start).div_ceil(dilation).min(self.window.kernel[2]);
        (first.min(end)..end, (start + first * dilation).saturating_sub(pad))
    }

    /// Writes the windows over all channels of `image`.
    fn take(&self, image: &[f32], to: &mut [f32]) {
        match self.window.kernel[2] {
            // Common widths are constants, so that the compiler can unroll the copies.
            1 => self.take_of::<1>(image, to),
            3 => self.take_of::<3>(image, to),
            5 => self.take_of::<5>(image, to),
            7 => self.take_of::<7>(image, to),
            _ => self.take_of::<0>(image, to),
        }
    }

    /// Like `take`, for kernels of width `WIDTH`, or of any width if it is 0.
    fn take_of<const WIDTH: usize>(&self, image: &[f32], to: &mut [f32]) {
        let window = self.window;
        let width = if WIDTH == 0 { window.kernel[2] } else { WIDTH };
        let (plane, taps, dilation) = (window.input_len(), window.kernel_len(), window.dilation[2]);
        let steps = image.len() / plane.max(1) * taps;
        for (index, to) in to.chunks_exact_mut(steps.max(1)).enumerate() {
            let (inside, first) = self.across(index);
            let is_run = inside.len() == width && (dilation == 1 || width == 1);
            for (plane, to) in image.chunks_exact(plane.max(1)).zip(to.chunks_exact_mut(taps)) {
                for (row, to) in self.rows.iter().zip(to.chunks_exact_mut(width)) {
                    match row {
                        Some(row) if is_run => to.copy_from_slice(&plane[row + first..][..width]),
                        Some(row) => {
                            to.fill(0.0);
                            for (at, tap) in inside.clone().enumerate() {
                                to[tap] = plane[row + first + at * dilation];
                            }
                        }
                        None => to.fill(0.0),
                    }
                }
            }
        }
    }

    /// Adds the windows of one channel, which start `steps` apart, to its plane.
    fn add(&self, windows: (&[f32], usize), to: &mut [f32]) {
        match self.window.kernel[2] {
            1 => self.add_of::<1>(windows, to),
            3 => self.add_of::<3>(windows, to),
            5 => self.add_of::<5>(windows, to),
            7 => self.add_of::<7>(windows, to),
            _ => self.add_of::<0>(windows, to),
        }
    }

    /// Like `add`, for kernels of width `WIDTH`, or of any width if it is 0.
    fn add_of<const WIDTH: usize>(&self, (windows, steps): (&[f32], usize), to: &mut [f32]) {
        let window = self.window;
        let width = if WIDTH == 0 { window.kernel[2] } else { WIDTH };
        let (taps, dilation) = (window.kernel_len(), window.dilation[2]);
        for index in 0..window.output[2] {
            let (inside, first) = self.across(index);
            let is_run = inside.len() == width && (dilation == 1 || width == 1);
            let from = &windows[index * steps..][..taps];
            for (row, from) in self.rows.iter().zip(from.chunks_exact(width)) {
                let Some(row) = row else { continue };
                if is_run {
                    to[row + first..][..width].iter_mut().zip(from).for_each(|(to, value)| *to += value);
                    continue;
                }
                for (at, tap) in inside.clone().enumerate() {
                    to[row + first + at * dilation] += from[tap];
                }
            }
        }
    }
}
