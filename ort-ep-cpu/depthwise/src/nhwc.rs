//! Quantized depthwise convolution in NHWC.
//!
//! A vector of bytes holds the channels of one position. The vectors of four rows are interleaved,
//! so a dot product of four bytes covers four taps along a column of the kernel. Lanes are
//! channels, so none is idle, however small the plane.

use ort_cpu_threads::interrupt::spend;
use ort_cpu_vector::conv_window::Window;
use ort_cpu_vector::simd::bytes::{ByteLanes, ByteOp, Lanes, Numbers, dispatch_bytes};
use ort_cpu_vector::simd::{Isa, MAX_LANES, Simd};

/// The blocks of channels that are computed together. They determine the order of terms and
/// weights.
#[derive(Clone, Copy, Debug)]
pub struct ChannelBlocks {
    lanes: usize,
    channels: usize,
}

/// Queries the number of lanes of a vector.
struct LaneCount;

impl ByteOp for LaneCount {
    type Output = usize;

    #[inline(always)]
    fn run<L: ByteLanes>(self, _: L) -> usize {
        L::Base::LANES
    }
}

impl ChannelBlocks {
    /// Divides `channels` into blocks of the lanes that `isa` has.
    pub fn new(isa: Isa, channels: usize) -> ChannelBlocks {
        ChannelBlocks { lanes: dispatch_bytes(isa, LaneCount), channels }
    }

    fn width(&self) -> usize {
        4 * self.lanes
    }

    /// Returns the number of channels in whole blocks.
    #[inline]
    pub fn padded(&self) -> usize {
        // Kernels load whole vectors of terms and factors, also for the last block.
        self.channels.next_multiple_of(self.width())
    }

    /// Returns the position of a channel's term among those of all blocks.
    #[inline]
    pub fn place(&self, channel: usize) -> usize {
        let (block, within) = (channel / self.width(), channel % self.width());
        // `interleave_bytes` works within parts of 16 bytes, so four channels of each part share a
        // vector.
        block * self.width() + within % 16 / 4 * self.lanes + within / 16 * 4 + within % 4
    }

    /// Returns how many i32 the packed weights of filters with this kernel take.
    pub fn weights_len(&self, kernel: [usize; 3]) -> usize {
        self.padded().saturating_mul(kernel[1].div_ceil(4)).saturating_mul(kernel[2])
    }

    /// Packs filters: quantized values of shape `[channels, rows, columns]`, XORed with `flip`. For
    /// each block, column and four rows, the groups of all channels are adjacent. Writes the sums
    /// of the filters to their positions in `sums`.
    ///
    /// # Panics
    ///
    /// If a slice is shorter than the shape requires.
    pub fn pack(
        &self,
        quantized: &[u8],
        flip: u8,
        kernel: [usize; 3],
        weights: &mut [i32],
        sums: &mut [i32],
    ) {
        let [_, rows, columns] = kernel;
        let (groups, width) = (rows.div_ceil(4), self.width());
        weights.fill(0);
        sums.fill(0);
        for (channel, filter) in quantized.chunks_exact(rows * columns).take(self.channels).enumerate() {
            let (place, block) = (self.place(channel), channel / width);
            for column in 0..columns {
                for group in 0..groups {
                    let four = [0, 1, 2, 3].map(|at| {
                        let row = 4 * group + at;
                        // Rows that pad the group have weights of zero, so it does not matter what
                        // they read.
                        if row < rows { filter[row * columns + column] ^ flip } else { 0 }
                    });
                    let at = ((block * columns + column) * groups + group) * width + place % width;
                    weights[at] = i32::from_ne_bytes(four);
                    sums[place] += four.map(|weight| i32::from(weight as i8)).iter().sum::<i32>();
                }
            }
        }
    }
}

/// A convolution of one image.
#[derive(Clone, Copy, Debug)]
pub struct DepthwiseNhwc<'a> {
    /// The geometry of the windows.
    pub window: &'a Window,
    /// How the channels are divided.
    pub blocks: ChannelBlocks,
    /// The image, NHWC.
    pub image: &'a [u8],
    /// What the image's bytes are XORed with, and the padding value before that.
    pub of_image: [u8; 2],
    /// The packed filters.
    pub weights: &'a [i32],
    /// The term added to the accumulator of each channel, at the channel's position.
    pub terms: &'a [i32],
    /// The factor of each accumulator after that.
    pub factors: &'a [f32],
    /// Whether all factors are less than 1, so that a scaled accumulator always fits in 32 bits.
    pub is_small: bool,
    /// The zero point of the result.
    pub zero: i32,
    /// Whether the result is signed.
    pub signed: bool,
}

impl DepthwiseNhwc<'_> {
    /// Computes rows of the result, starting with row `first`.
    ///
    /// # Panics
    ///
    /// If a slice is shorter than the window requires.
    pub fn rows(&self, isa: Isa, first: usize, to: &mut [u8]) {
        dispatch_bytes(isa, Rows { conv: self, first, to });
    }

    /// Returns the number of values in a row of the result.
    pub fn row_len(&self) -> usize {
        self.window.output[2] * self.blocks.channels
    }
}

/// Result values in a band, which is computed block by block. What a band reads stays in the caches
/// for the next block.
const BAND: usize = 1 << 15;

struct Rows<'a> {
    conv: &'a DepthwiseNhwc<'a>,
    first: usize,
    to: &'a mut [u8],
}

/// One row of the result.
struct Row<'a> {
    conv: &'a DepthwiseNhwc<'a>,
    row: usize,
    to: &'a mut [u8],
}

/// A row of the image. Outside the image, `step` is 0 and one position of padding stands for the
/// row.
#[derive(Clone, Copy)]
struct TapRow<'a> {
    bytes: &'a [u8],
    first: usize,
    step: usize,
}

/// A block of channels, with what all its positions need.
struct Block<'a, L: ByteLanes> {
    lanes: L,
    first: usize,
    count: usize,
    flip: Lanes<L>,
    /// A position in the padding, XORed with `flip`.
    outside: Lanes<L>,
    weights: &'a [i32],
    terms: [Lanes<L>; 4],
    factors: [Numbers<L>; 4],
}

impl ByteOp for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: ByteLanes>(self, lanes: L) {
        let row_len = self.conv.row_len();
        // Within a band, each block of channels passes over all rows: its weights stay in
        // registers, and the band's input stays in cache for the next block.
        let rows_of_band = (BAND / row_len.max(1)).max(1);
        for (band, to) in self.to.chunks_mut(rows_of_band * row_len).enumerate() {
            let first = self.first + band * rows_of_band;
            Rows { conv: self.conv, first, to }.band(lanes);
        }
    }
}

impl Rows<'_> {
    #[inline(always)]
    fn band<L: ByteLanes>(self, lanes: L) {
        let (simd, conv) = (lanes.base(), self.conv);
        let row_len = conv.row_len();
        let (width, channels) = (4 * L::Base::LANES, conv.blocks.channels);
        let per_block = width * conv.window.kernel[1].div_ceil(4) * conv.window.kernel[2];
        let [flip, padding] = conv.of_image;
        let all = |byte: u8| simd.splat_i32(i32::from_ne_bytes([byte; 4]));
        for (block, weights) in conv.weights.chunks_exact(per_block).enumerate() {
            let first = block * width;
            let at = [0, 1, 2, 3].map(|vector| first + vector * L::Base::LANES);
            let block = Block {
                lanes,
                first,
                count: (channels - first).min(width),
                flip: all(flip),
                outside: all(flip ^ padding),
                weights,
                terms: at.map(|at| ints(lanes, conv.terms, at)),
                factors: at.map(|at| simd.load(conv.factors, at)),
            };
            let (kernel, stride) = (conv.window.kernel, conv.window.stride[2]);
            // The usual kernels have loops of their own, which load each column once instead of
            // once per tap.
            let is_three = kernel[2] == 3 && conv.window.dilation[2] == 1 && kernel[1] <= 4;
            // XOR and bounds are left out if they do nothing.
            let is_plain = flip == 0 && conv.is_small;
            let rows = self.to.chunks_exact_mut(row_len).enumerate();
            let work = conv.window.output[2] * kernel[1] * kernel[2];
            let rows = rows.map(|(at, to)| Row { conv, row: self.first + at, to });
            let rows = rows.inspect(|_| spend(work));
            let is_five = kernel[1..] == [5, 5] && conv.window.dilation[2] == 1;
            if is_five && is_plain && stride == 1 {
                rows.for_each(
                    #[inline(always)]
                    |mut row| row.scatter_five(&block),
                );
            } else if is_three && is_plain && stride <= 2 {
                let weights = [0, 1, 2].map(|tap| Row::weights(&block, tap));
                match stride {
                    1 => rows.for_each(
                        #[inline(always)]
                        |mut row| row.slide(&block, &weights),
                    ),
                    _ => rows.for_each(
                        #[inline(always)]
                        |mut row| row.slide_by_two(&block, &weights),
                    ),
                }
            } else if is_plain {
                rows.for_each(
                    #[inline(always)]
                    |mut row| row.visit::<L, true>(&block),
                );
            } else {
                rows.for_each(
                    #[inline(always)]
                    |mut row| row.visit::<L, false>(&block),
                );
            }
        }
    }
}

#[inline(always)]
fn ints<L: ByteLanes>(lanes: L, from: &[i32], at: usize) -> Lanes<L> {
    lanes.base().to_bits(lanes.base().load(bytemuck::cast_slice(from), at))
}

impl Row<'_> {
    /// Returns the row of the image that a row of the kernel reads.
    #[inline(always)]
    fn tap_row<'l>(&self, tap: usize, first: usize, outside: &'l [u8]) -> TapRow<'l>
    where
        Self: 'l,
    {
        let (window, channels) = (self.conv.window, self.conv.blocks.channels);
        let y = (self.row * window.stride[1] + tap * window.dilation[1]).checked_sub(window.pad[1]);
        match y.filter(|y| *y < window.input[1] && tap < window.kernel[1]) {
            Some(y) => TapRow {
                bytes: self.conv.image,
                first: y * window.input[2] * channels + first,
                step: channels,
            },
            None => TapRow { bytes: outside, first: 0, step: 0 },
        }
    }

    /// Interleaves four rows of a column of the padded image.
    #[inline(always)]
    fn column<L: ByteLanes, const PLAIN: bool>(
        &self,
        block: &Block<'_, L>,
        tap_rows: &[TapRow<'_>; 4],
        has_fourth: bool,
        column: usize,
    ) -> [Lanes<L>; 4] {
        let (lanes, window) = (block.lanes, self.conv.window);
        let rows = match column.checked_sub(window.pad[2]).filter(|x| *x < window.input[2]) {
            Some(x) => {
                let load = |tap_row: &TapRow<'_>| {
                    let bytes =
                        lanes.load_bytes(tap_row.bytes, tap_row.first + x * tap_row.step, block.count);
                    if PLAIN { bytes } else { lanes.base().xor_i32(bytes, block.flip) }
                };
                let third = load(&tap_rows[2]);
                // Missing rows have weights of 0, so any bytes will do.
                [
                    load(&tap_rows[0]),
                    load(&tap_rows[1]),
                    third,
                    if has_fourth { load(&tap_rows[3]) } else { third },
                ]
            }
            // A column in the padding needs no loads: its value is the same in all rows.
            None => [block.outside; 4],
        };
        lanes.interleave_bytes(rows)
    }

    /// Accumulates the dot products of a group of taps.
    #[inline(always)]
    fn add<L: ByteLanes>(
        lanes: L,
        accumulators: [Lanes<L>; 4],
        bytes: &[Lanes<L>; 4],
        weights: &[Lanes<L>; 4],
    ) -> [Lanes<L>; 4] {
        let mut added = accumulators;
        for vector in 0..4 {
            added[vector] = lanes.dot(accumulators[vector], bytes[vector], weights[vector]);
        }
        added
    }

    /// Loads the weights of a group of taps.
    #[inline(always)]
    fn weights<L: ByteLanes>(block: &Block<'_, L>, group: usize) -> [Lanes<L>; 4] {
        [0, 1, 2, 3].map(|vector| ints(block.lanes, block.weights, (4 * group + vector) * L::Base::LANES))
    }

    #[inline(always)]
    fn store<L: ByteLanes, const PLAIN: bool>(
        &mut self,
        block: &Block<'_, L>,
        x: usize,
        accumulators: [Lanes<L>; 4],
    ) {
        let (lanes, simd, conv) = (block.lanes, block.lanes.base(), self.conv);
        // Only the upper bound is applied here: `pack_interleaved` saturates, but the conversion of
        // too large a number would yield the least integer.
        let greatest = if conv.signed { 127 - conv.zero } else { 255 - conv.zero };
        let greatest = simd.splat(greatest as f32);
        let mut quantized = accumulators;
        for vector in 0..4 {
            let value = simd.mul(simd.to_f32(accumulators[vector]), block.factors[vector]);
            // Values below the range of integers, and NaN, become the least integer.
            let value = if PLAIN { value } else { simd.min_or_second(greatest, value) };
            quantized[vector] = simd.to_i32(value);
        }
        let quantized = lanes.pack_interleaved(quantized, conv.zero, conv.signed);
        lanes.store_bytes(self.to, x * conv.blocks.channels + block.first, block.count, quantized);
    }

    /// Handles kernels three wide at stride 1: a window's last two columns are the next one's
    /// first.
    #[inline(always)]
    fn slide<L: ByteLanes>(&mut self, block: &Block<'_, L>, weights: &[[Lanes<L>; 4]; 3]) {
        let outside = [self.conv.of_image[1]; 4 * MAX_LANES];
        let tap_rows = [0, 1, 2, 3].map(|tap| self.tap_row(tap, block.first, &outside));
        let has_fourth = self.conv.window.kernel[1] == 4;
        let lanes = block.lanes;
        let mut first = self.column::<L, true>(block, &tap_rows, has_fourth, 0);
        let mut second = self.column::<L, true>(block, &tap_rows, has_fourth, 1);
        for x in 0..self.conv.window.output[2] {
            let third = self.column::<L, true>(block, &tap_rows, has_fourth, x + 2);
            let accumulators = Self::add(lanes, block.terms, &first, &weights[0]);
            let accumulators = Self::add(lanes, accumulators, &second, &weights[1]);
            let accumulators = Self::add(lanes, accumulators, &third, &weights[2]);
            self.store::<L, true>(block, x, accumulators);
            // The columns move along in registers, so each is loaded and interleaved once.
            (first, second) = (second, third);
        }
    }

    /// Handles kernels three wide at stride 2: a window's last column is the next one's first.
    #[inline(always)]
    fn slide_by_two<L: ByteLanes>(&mut self, block: &Block<'_, L>, weights: &[[Lanes<L>; 4]; 3]) {
        let outside = [self.conv.of_image[1]; 4 * MAX_LANES];
        let tap_rows = [0, 1, 2, 3].map(|tap| self.tap_row(tap, block.first, &outside));
        let has_fourth = self.conv.window.kernel[1] == 4;
        let lanes = block.lanes;
        let mut first = self.column::<L, true>(block, &tap_rows, has_fourth, 0);
        for x in 0..self.conv.window.output[2] {
            let second = self.column::<L, true>(block, &tap_rows, has_fourth, 2 * x + 1);
            let third = self.column::<L, true>(block, &tap_rows, has_fourth, 2 * x + 2);
            let accumulators = Self::add(lanes, block.terms, &first, &weights[0]);
            let accumulators = Self::add(lanes, accumulators, &second, &weights[1]);
            let accumulators = Self::add(lanes, accumulators, &third, &weights[2]);
            self.store::<L, true>(block, x, accumulators);
            first = third;
        }
    }

    /// Handles kernels of 5 by 5 at stride 1: each column is interleaved once and added to the five
    /// windows that contain it.
    #[inline(always)]
    fn scatter_five<L: ByteLanes>(&mut self, block: &Block<'_, L>) {
        let outside = [self.conv.of_image[1]; 4 * MAX_LANES];
        let taps = [0, 1, 2, 3].map(|tap| self.tap_row(tap, block.first, &outside));
        // Weights of the other three rows of this group are 0, so any bytes will do.
        let last = [self.tap_row(4, block.first, &outside); 4];
        let mut windows = [block.terms; 5];
        for column in 0..self.conv.window.output[2] + 4 {
            let four = self.column::<L, true>(block, &taps, true, column);
            let fifth = self.column::<L, true>(block, &last, false, column);
            for (tap, window) in windows.iter_mut().enumerate() {
                *window = Self::add(block.lanes, *window, &four, &Self::weights(block, 2 * tap));
                *window = Self::add(block.lanes, *window, &fifth, &Self::weights(block, 2 * tap + 1));
            }
            if let Some(x) = column.checked_sub(4) {
                self.store::<L, true>(block, x, windows[4]);
            }
            windows = [block.terms, windows[0], windows[1], windows[2], windows[3]];
        }
    }

    /// Handles any kernel, window by window.
    #[inline(always)]
    fn visit<L: ByteLanes, const PLAIN: bool>(&mut self, block: &Block<'_, L>) {
        let outside = [self.conv.of_image[1]; 4 * MAX_LANES];
        let (window, groups) = (self.conv.window, self.conv.window.kernel[1].div_ceil(4));
        for x in 0..window.output[2] {
            let mut accumulators = block.terms;
            for group in 0..groups {
                let tap_rows = [0, 1, 2, 3].map(|tap| self.tap_row(4 * group + tap, block.first, &outside));
                let has_fourth = 4 * group + 3 < window.kernel[1];
                for tap in 0..window.kernel[2] {
                    let column = x * window.stride[2] + tap * window.dilation[2];
                    let bytes = self.column::<L, PLAIN>(block, &tap_rows, has_fourth, column);
                    let weights = Self::weights(block, tap * groups + group);
                    accumulators = Self::add(block.lanes, accumulators, &bytes, &weights);
                }
            }
            self.store::<L, PLAIN>(block, x, accumulators);
        }
    }
}
