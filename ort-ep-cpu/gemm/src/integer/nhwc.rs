//! im2col of quantized NHWC images: the windows as the rows of a matmul, without unfolding.
//!
//! A row starts at the first pixel of its window. A run of its k steps, the channels of a pixel or
//! of neighbouring ones, starts at the offset of a kernel position. The image is copied once if
//! there is padding, if bytes must be shifted to unsigned, or if channels do not fill groups of
//! four. Otherwise it is read in place.

use super::super::{Cpu, GemmError, Window};
use super::{ByteColumns, ByteRows, PackedBytes};
use crate::kernels::ByteKernel;
use ort_cpu_threads::parallel::for_each_chunk_mut;

/// The layout of an NHWC image for its windows.
#[derive(Clone, Debug)]
pub struct NhwcWindows {
    window: Window,
    channels: usize,
    /// Rows, pixels in a row, and bytes per pixel of the image that is read.
    plane: [usize; 3],
    /// Whether that image is a copy.
    is_copied: bool,
    /// The offset of each run in a window, and in a panel of filters.
    starts: Vec<[usize; 2]>,
    /// Groups of four channels in a run.
    groups: usize,
}

impl NhwcWindows {
    /// Creates the layout for the windows of an image of `channels` that `filters` read, with at
    /// most two spatial axes. The bytes of a `signed` image are shifted to unsigned.
    ///
    /// # Errors
    ///
    /// If there are three axes, or sizes overflow.
    pub fn new(
        cpu: Cpu,
        window: Window,
        (channels, signed): (usize, bool),
        filters: usize,
    ) -> Result<NhwcWindows, GemmError> {
        let is_flat =
            window.input[0] == 1 && window.kernel[0] == 1 && window.output[0] == 1 && window.pad[0] == 0;
        if !is_flat || window.stride.contains(&0) {
            return Err(GemmError::Shape("windows over planes have two axes and a stride"));
        }
        let reach = |axis: usize| {
            let last = (window.output[axis].max(1) - 1).saturating_mul(window.stride[axis]);
            let taps = (window.kernel[axis].max(1) - 1).saturating_mul(window.dilation[axis]);
            last.saturating_add(taps).saturating_add(1)
        };
        let fits = |axis: usize| window.pad[axis] == 0 && reach(axis) <= window.input[axis];
        // The image is read in place only if its bytes are unsigned, its channels fill whole
        // groups, and no window leaves it.
        let is_copied = signed || !channels.is_multiple_of(4) || !fits(1) || !fits(2);
        let groups = channels.div_ceil(4);
        let plane = match is_copied {
            true => [reach(1), reach(2), groups.saturating_mul(4)],
            false => [window.input[1], window.input[2], channels],
        };
        // Offsets into the image and into the filters must fit in pointers, which kernels add
        // without checks.
        let len = plane.iter().fold(1, |len: usize, &size| len.saturating_mul(size));
        let of_position = groups.saturating_mul(4 * ByteKernel::of(cpu.isa).packed_width(filters));
        if len.saturating_add(of_position.saturating_mul(window.kernel_len())) > isize::MAX as usize {
            return Err(GemmError::Shape("an image is too large"));
        }
        // Positions along a kernel row are adjacent in the image and in the filters, so they are
        // one run: an image of three channels has one group in a position.
        let in_run = if window.dilation[2] == 1 { window.kernel[2] } else { 1 };
        let starts = (0..window.kernel_len()).step_by(in_run.max(1)).map(|at| {
            let [y, x] =
                [at / window.kernel[2] * window.dilation[1], at % window.kernel[2] * window.dilation[2]];
            [(y * plane[1] + x) * plane[2], at * of_position]
        });
        let (starts, groups) = (starts.collect(), groups.saturating_mul(in_run));
        Ok(NhwcWindows { window, channels, plane, is_copied, starts, groups })
    }

    /// Returns the bytes of the copy, 0 if there is none.
    pub fn copy_len(&self) -> usize {
        if self.is_copied { self.plane.iter().product() } else { 0 }
    }

    /// Returns the rows of the windows of an NHWC `image`. If a copy is needed, it is written to
    /// `copy`. The channels' bytes are XORed with `flip`. Padding becomes `zero`, without the XOR.
    ///
    /// # Errors
    ///
    /// If a slice is too short.
    pub fn rows<'a>(
        &self,
        cpu: Cpu,
        image: &'a [u8],
        [flip, zero]: [u8; 2],
        copy: &'a mut [u8],
    ) -> Result<ByteRows<'a>, GemmError> {
        let (needed, len) = (self.channels * self.window.input_len(), image.len());
        if len < needed {
            return Err(GemmError::TooShort { what: "an image", needed, len });
        }
        let bytes = match self.is_copied {
            false => image,
            true => {
                let (needed, len) = (self.copy_len(), copy.len());
                let too_short = GemmError::TooShort { what: "a copy of an image", needed, len };
                let copy = copy.get_mut(..needed).ok_or(too_short)?;
                self.copy(cpu, image, [flip, zero], copy);
                copy
            }
        };
        let ([_, pixels, pixel], [_, height, width]) = (self.plane, self.window.output);
        let [_, y, x] = self.window.stride;
        let groups = self.groups * self.starts.len();
        Ok(ByteRows::in_strips(bytes, [height, width, groups], [x * pixel, y * pixels * pixel]))
    }

    fn copy(&self, cpu: Cpu, image: &[u8], [flip, zero]: [u8; 2], to: &mut [u8]) {
        let ([_, height, width], [_, pad_y, pad_x]) = (self.window.input, self.window.pad);
        let [_, pixels, pixel] = self.plane;
        let (channels, count) = (self.channels, width.min(pixels.saturating_sub(pad_x)));
        // Small images do not pay for a parallel region.
        let threads = if to.len() < 1 << 16 { 1 } else { cpu.threads };
        for_each_chunk_mut(threads, to, (pixels * pixel).max(1), |row, to| {
            let Some(y) = row.checked_sub(pad_y).filter(|y| *y < height) else {
                return to.fill(zero);
            };
            // Only the borders are filled, because the image overwrites the rest.
            let (before, rest) = to.split_at_mut((pad_x * pixel).min(to.len()));
            let (inside, behind) = rest.split_at_mut(count * pixel);
            before.fill(zero);
            behind.fill(zero);
            let from = &image[y * width * channels..][..count * channels];
            if pixel == channels {
                match flip {
                    0 => inside.copy_from_slice(from),
                    _ => inside.iter_mut().zip(from).for_each(|(to, from)| *to = from ^ flip),
                }
                return;
            }
            // RGB is the first layer of most image networks, and three bytes suit no vector copy.
            if channels == 3 {
                return copy_threes(from, flip, inside);
            }
            for (to, from) in inside.chunks_exact_mut(pixel).zip(from.chunks_exact(channels)) {
                let (to, rest) = to.split_at_mut(channels);
                to.iter_mut().zip(from).for_each(|(to, from)| *to = from ^ flip);
                rest.fill(0);
            }
        });
    }

    /// Returns the packed filters as the columns for these windows.
    pub fn columns<'a>(&'a self, filters: &PackedBytes<'a>) -> ByteColumns<'a> {
        ByteColumns { starts: &self.starts, groups: self.groups, ..filters.operand() }
    }
}

/// Copies RGB pixels of three bytes to groups of four, each with one 32-bit store.
fn copy_threes(from: &[u8], flip: u8, to: &mut [u8]) {
    let flip = u32::from_le_bytes([flip; 4]);
    let place = |four: [u8; 4]| ((u32::from_le_bytes(four) ^ flip) & 0x00FF_FFFF).to_le_bytes();
    let (to, _) = to.as_chunks_mut::<4>();
    let (pixels, _) = from.as_chunks::<3>();
    // Reading four bytes takes one byte of the next pixel, which the last pixel does not have.
    for (at, to) in to.iter_mut().enumerate() {
        *to = match from.get(3 * at..3 * at + 4) {
            Some(&[a, b, c, d]) => place([a, b, c, d]),
            _ => pixels.get(at).map_or([0; 4], |&[a, b, c]| place([a, b, c, 0])),
        };
    }
}
