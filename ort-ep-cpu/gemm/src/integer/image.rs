//! im2col of quantized NCHW images without a matrix of windows.
//!
//! Four channels of a pixel are contiguous, so a vector of pixels is a vector of groups of four k
//! steps. Pixels keep their positions, with the padding around them. Window `(y, x)` is column
//! `y * pitch + x`, and a kernel position is an offset. Columns after the last window of a row are
//! computed but not stored. If the stride is not 1, pixels are sorted into planes by their
//! remainder, so that neighbours in the result are neighbours in memory.

use super::super::kernels::ByteKernel;
use super::super::{Cpu, GemmError, Window};
use super::ByteColumns;
use super::pack::interleave_bytes;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::simd::{Simd, SimdOp, dispatch};

/// Pixels per pass when interleaving strided rows.
const STRIDED: usize = 512;

/// The layout of an image of bytes for its windows.
#[derive(Clone, Debug)]
pub struct ByteWindows {
    window: Window,
    channels: usize,
    /// The remainders of (y, x) by the strides; there is a plane for each.
    phases: Vec<[usize; 2]>,
    /// Rows of a plane, and pixels in a row.
    plane: [usize; 2],
    /// The byte offset of each kernel position: in a packed filter, and in the layout.
    starts: Vec<[usize; 2]>,
    /// Bytes after the last plane that vector loads may reach.
    slack: usize,
}

impl ByteWindows {
    /// Creates the layout for the windows of an image of `channels`, with at most two spatial axes.
    ///
    /// # Errors
    ///
    /// If there are three axes, or sizes overflow.
    pub fn new(cpu: Cpu, window: Window, channels: usize) -> Result<ByteWindows, GemmError> {
        let is_flat =
            window.input[0] == 1 && window.kernel[0] == 1 && window.output[0] == 1 && window.pad[0] == 0;
        if !is_flat || window.stride.contains(&0) {
            return Err(GemmError::Shape("windows over planes have two axes and a stride"));
        }
        let (kernel, stride, dilation) = (window.kernel, window.stride, window.dilation);
        let at = |axis: usize, position: usize| position * dilation[axis];
        let mut phases: Vec<[usize; 2]> = Vec::new();
        let mut positions = Vec::with_capacity(kernel[1] * kernel[2]);
        for y in 0..kernel[1] {
            for x in 0..kernel[2] {
                let phase = [at(1, y) % stride[1], at(2, x) % stride[2]];
                let index = phases.iter().position(|known| *known == phase).unwrap_or_else(|| {
                    phases.push(phase);
                    phases.len() - 1
                });
                positions.push((index, at(1, y) / stride[1], at(2, x) / stride[2]));
            }
        }
        let reach =
            |axis: usize| window.output[axis] + at(axis, kernel[axis].saturating_sub(1)) / stride[axis];
        let plane = [reach(1), reach(2)];
        let groups = channels.div_ceil(4);
        let slack = 8 * ByteKernel::of(cpu.isa).width();
        let pixels = plane[0].saturating_mul(plane[1]);
        let all = pixels.saturating_mul(groups).saturating_mul(phases.len().max(1)).saturating_mul(4);
        if all.saturating_add(slack) > isize::MAX as usize {
            return Err(GemmError::Shape("an image is too large"));
        }
        let start = |(at, (phase, y, x)): (usize, (usize, usize, usize))| {
            [at * groups * 4, (phase * groups * pixels + y * plane[1] + x) * 4]
        };
        let starts = positions.into_iter().enumerate().map(start).collect();
        Ok(ByteWindows { window, channels, phases, plane, starts, slack })
    }

    /// Returns the bytes that the layout takes.
    pub fn copy_len(&self) -> usize {
        self.pixels() * self.groups() * self.phases.len() * 4 + self.slack
    }

    /// Returns the groups of four channels.
    pub fn groups(&self) -> usize {
        self.channels.div_ceil(4)
    }

    fn pixels(&self) -> usize {
        self.plane[0] * self.plane[1]
    }

    /// Returns the columns of a row of the layout, and how many of them are windows.
    pub fn strip(&self) -> [usize; 2] {
        let [_, height, width] = self.window.output;
        match self.plane[1] == width {
            true => [(height * width).max(1); 2],
            false => [self.plane[1], width],
        }
    }

    /// Returns the matrix of windows over what [`fill`](Self::fill) wrote.
    pub fn columns<'a>(&'a self, cpu: Cpu, bytes: &'a [u8]) -> Result<ByteColumns<'a>, GemmError> {
        let [_, height, width] = self.window.output;
        let width_of_panel = ByteKernel::of(cpu.isa).width();
        let columns = match height {
            0 => 0,
            _ => (height - 1) * self.plane[1] + width,
        };
        let step = self.pixels() * 4;
        let columns = ByteColumns {
            bytes,
            starts: &self.starts,
            groups: self.groups(),
            step,
            panel: 4 * width_of_panel,
            width: width_of_panel,
            columns,
        };
        columns.check()
    }

    /// Lays out `image`, the planes of all channels in order. The channels' bytes are XORed with
    /// `flip`. Padding becomes `zero`, without the XOR.
    ///
    /// # Errors
    ///
    /// If a slice is too short.
    pub fn fill(
        &self,
        cpu: Cpu,
        image: &[u8],
        [flip, zero]: [u8; 2],
        to: &mut [u8],
    ) -> Result<(), GemmError> {
        let (input, planes) = (self.window.input_len(), self.groups() * self.phases.len());
        let (needed, len) = (self.channels * input, image.len());
        if len < needed {
            return Err(GemmError::TooShort { what: "an image", needed, len });
        }
        let (needed, len) = (planes * self.pixels() * 4, to.len());
        let to = to.get_mut(..needed).ok_or(GemmError::TooShort { what: "a layout", needed, len })?;
        // Small images do not pay for a parallel region.
        let threads = if needed < 1 << 15 { 1 } else { cpu.threads };
        for_each_chunk_mut(threads, to, self.pixels() * 4, |unit, plane| {
            let (phase, group) = (self.phases[unit / self.groups()], unit % self.groups());
            let channels = (self.channels - 4 * group).min(4);
            let channel = |at: usize| match at < channels {
                true => &image[(4 * group + at) * input..][..input],
                // `keep` zeroes missing channels below, so any bytes will do.
                false => &image[4 * group * input..][..input],
            };
            let present = |byte: u8| std::array::from_fn(|at| if at < channels { byte } else { 0 });
            let four = Four {
                rows: [channel(0), channel(1), channel(2), channel(3)],
                flips: present(flip),
                keep: present(0xFF),
                padding: present(zero),
            };
            let plane = bytemuck::cast_slice_mut(plane);
            dispatch(cpu.isa, FillPlane { windows: self, four, phase, plane });
        });
        Ok(())
    }
}

/// Fills one plane from four channels of an image.
struct FillPlane<'a> {
    windows: &'a ByteWindows,
    four: Four<'a>,
    phase: [usize; 2],
    plane: &'a mut [[u8; 4]],
}

impl SimdOp for FillPlane<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let FillPlane { windows, four, phase, plane } = self;
        let ([_, height, width], [_, stride_y, stride_x]) = (windows.window.input, windows.window.stride);
        let [_, pad_y, pad_x] = windows.window.pad;
        let row_len = windows.plane[1];
        // Without strides and padding, the plane is the image.
        if [stride_y, stride_x] == [1, 1] && [pad_y, pad_x] == [0, 0] && windows.plane == [height, width] {
            return four.copy(0, plane);
        }
        // The pixels of a row that are inside the image.
        let first = pad_x.saturating_sub(phase[1]).div_ceil(stride_x).min(row_len);
        let end = (width + pad_x).saturating_sub(phase[1]).div_ceil(stride_x).clamp(first, row_len);
        let mut whole = [[0_u8; 4]; STRIDED];
        for (row, to) in plane.chunks_exact_mut(row_len.max(1)).enumerate() {
            let y = (row * stride_y + phase[0]).checked_sub(pad_y).filter(|y| *y < height);
            let Some(y) = y.filter(|_| first < end) else {
                to.fill(four.padding);
                continue;
            };
            to[..first].fill(four.padding);
            to[end..].fill(four.padding);
            let from = y * width + first * stride_x + phase[1] - pad_x;
            // The usual strides are constants, so that the compiler can specialise the gather.
            match stride_x {
                1 => four.copy(from, &mut to[first..end]),
                2 => four.copy_strided::<2>(from, 2, &mut to[first..end], &mut whole),
                _ => four.copy_strided::<0>(from, stride_x, &mut to[first..end], &mut whole),
            }
        }
    }
}

/// Four channels of an image. The masks zero the missing ones.
struct Four<'a> {
    rows: [&'a [u8]; 4],
    flips: [u8; 4],
    keep: [u8; 4],
    padding: [u8; 4],
}

impl Four<'_> {
    /// Copies consecutive pixels from `first` on.
    #[inline(always)]
    fn copy(&self, first: usize, to: &mut [[u8; 4]]) {
        interleave_bytes(self.rows.map(|row| &row[first..]), [self.flips, self.keep], to);
    }

    /// Copies pixels `stride` apart; if `STRIDE` is not 0, it is that stride. All pixels in between
    /// are interleaved too: skipping groups of four is faster than skipping bytes.
    #[inline(always)]
    fn copy_strided<const STRIDE: usize>(
        &self,
        first: usize,
        stride: usize,
        to: &mut [[u8; 4]],
        whole: &mut [[u8; 4]; STRIDED],
    ) {
        let at_once = (STRIDED / stride).max(1);
        for (part, to) in to.chunks_mut(at_once).enumerate() {
            let len = ((to.len() - 1) * stride + 1).min(STRIDED);
            let whole = &mut whole[..len];
            self.copy(first + part * at_once * stride, whole);
            let Some((last, to)) = to.split_last_mut() else { return };
            // The last pixel is copied alone, because no full stride follows it.
            *last = whole[len - 1];
            if STRIDE > 0 {
                to.iter_mut().zip(whole.chunks_exact(STRIDE)).for_each(|(to, from)| *to = from[0]);
            } else {
                to.iter_mut().zip(whole.iter().step_by(stride)).for_each(|(to, from)| *to = *from);
            }
        }
    }
}
