//! The windows of a batch of images as the rows of a matrix, one image behind the other: a small
//! image alone would not fill the vectors of a product.

use std::ops::Range;

use smallvec::SmallVec;

use super::ConvGeometry;
use crate::gemm::{Cpu, Window};
use crate::interrupt::spend;
use crate::parallel::{WORTH_A_THREAD, for_each_row_chunk_mut};

/// Values of windows and gradients that are written out at a time, unless one line has more: some
/// of the caches.
const AT_ONCE: usize = 384 << 10;

/// The lines of results of a batch, and how many of them are done at a time.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    count: usize,
    at_once: usize,
    /// Results in a line.
    pub(super) len: usize,
    /// Length of a window: channels of a group times kernel positions.
    pub(super) steps: usize,
}

impl Lines {
    pub(super) fn of(geometry: &ConvGeometry) -> Lines {
        let [depth, height, len] = geometry.window.output;
        let steps = geometry.group_channels() * geometry.window.kernel_len();
        let count = geometry.batch * depth * height;
        let values = (steps + geometry.group_filters()).saturating_mul(len);
        let most = (AT_ONCE / values.max(1)).max(1);
        let at_once = count.div_ceil(count.div_ceil(most).max(1)).max(1);
        Lines { count, at_once, len, steps }
    }

    /// The lines, cut into pieces.
    pub(super) fn pieces(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.count).step_by(self.at_once).map(move |first| first..(first + self.at_once).min(self.count))
    }

    /// The most that `len` says of any piece: all but the last are equally long.
    pub(super) fn most(self, len: impl Fn(usize) -> usize) -> usize {
        let rest = self.count % self.at_once;
        [self.at_once.min(self.count), rest]
            .map(|lines| if lines == 0 { 0 } else { len(lines * self.len) })
            .into_iter()
            .max()
            .unwrap_or(0)
    }

    /// Values of the windows and of the gradients of a piece.
    pub(super) fn lens(self, filters: usize) -> [usize; 2] {
        let rows = self.at_once.min(self.count) * self.len;
        [rows * self.steps, rows * filters].map(|len| len.next_multiple_of(16))
    }
}

/// Writes the filters of a group as rows of the places of all images, from place `first` on.
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

/// Writes rows of the places of all images, from place `first` on, to the filters of a group.
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

/// The image and the depth and height of a line of results.
fn place_of(window: &Window, line: usize) -> (usize, [usize; 2]) {
    let [depth, height, _] = window.output;
    (line / (depth * height), [line / height % depth, line % height])
}

/// Writes the windows of a group's channels as rows, from the first of line `first` on.
pub(super) fn take_windows(
    cpu: Cpu,
    geometry: &ConvGeometry,
    (group, first): (usize, usize),
    image: &[f32],
    to: &mut [f32],
) {
    let (window, channels) = (&geometry.window, geometry.group_channels());
    let line_len = window.output[2] * channels * window.kernel_len();
    let least = WORTH_A_THREAD.div_ceil(line_len.max(1));
    for_each_row_chunk_mut(cpu.threads, to, line_len, least, |line, lines| {
        for (index, windows) in lines.chunks_exact_mut(line_len).enumerate() {
            let (batch, at) = place_of(window, first + line + index);
            let len = channels * window.input_len();
            let image = &image[(batch * geometry.groups + group) * len..][..len];
            spend(line_len / 4);
            LineOfWindows::new(window, at).take(image, windows);
        }
    });
}

/// Adds windows, as [`take_windows`] orders them, to the places of the image that they were taken
/// from.
pub(super) fn add_windows(
    cpu: Cpu,
    geometry: &ConvGeometry,
    (group, lines): (usize, Range<usize>),
    windows: &[f32],
    to: &mut [f32],
) {
    let (window, channels, group_channels) = (&geometry.window, geometry.channels, geometry.group_channels());
    let (plane, taps) = (window.input_len(), window.kernel_len());
    let of_image = window.output[0] * window.output[1];
    let (steps, first) = (group_channels * taps, lines.start / of_image);
    let images = first..lines.end.div_ceil(of_image);
    let of_lines: SmallVec<[LineOfWindows<'_>; 8]> =
        (0..of_image).map(|line| LineOfWindows::new(window, place_of(window, line).1)).collect();
    let least = WORTH_A_THREAD.div_ceil((window.output_len() * taps).max(1));
    let planes = &mut to[images.start * channels * plane..images.end * channels * plane];
    for_each_row_chunk_mut(cpu.threads, planes, plane, least, |row, rows| {
        for (index, to) in rows.chunks_exact_mut(plane).enumerate() {
            let (image, channel) = (first + (row + index) / channels, (row + index) % channels);
            if channel / group_channels != group {
                continue;
            }
            let from_tap = channel % group_channels * taps;
            let range = lines.start.max(image * of_image)..lines.end.min((image + 1) * of_image);
            for line in range {
                let windows = &windows[(line - lines.start) * window.output[2] * steps + from_tap..];
                spend(window.output[2] * taps / 4);
                of_lines[line % of_image].add((windows, steps), to);
            }
        }
    });
}

/// The windows of one line of results.
struct LineOfWindows<'a> {
    window: &'a Window,
    /// Where in a channel's plane each row of the kernel begins to read; none in the padding.
    rows: SmallVec<[Option<usize>; 8]>,
}

impl<'a> LineOfWindows<'a> {
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
        LineOfWindows { window, rows: taps.map(row).collect() }
    }

    /// The kernel positions across that window `index` has in the image, and where the first of
    /// them is.
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
            1 => self.take_of::<1>(image, to),
            3 => self.take_of::<3>(image, to),
            5 => self.take_of::<5>(image, to),
            7 => self.take_of::<7>(image, to),
            _ => self.take_of::<0>(image, to),
        }
    }

    /// The same for kernels of this width, or of any where it is 0.
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

    /// Adds the windows of one channel, which begin `steps` apart, to its plane.
    fn add(&self, windows: (&[f32], usize), to: &mut [f32]) {
        match self.window.kernel[2] {
            1 => self.add_of::<1>(windows, to),
            3 => self.add_of::<3>(windows, to),
            5 => self.add_of::<5>(windows, to),
            7 => self.add_of::<7>(windows, to),
            _ => self.add_of::<0>(windows, to),
        }
    }

    /// The same for kernels of this width, or of any where it is 0.
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
