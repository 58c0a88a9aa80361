//! Convolutions of 8-bit codes whose channels lie together, which is how the results of one are best read by the next.
//!
//! Filters are the columns of a product, windows its rows, see [`PixelWindows`]; with one filter for each channel a filter
//! meets its windows directly. Filters have no zero points here, and are constant.

use crate::gemm::integer::{
    Factors, IntegerGemm, PackedBytes, PixelWindows, Target, Terms, pack_filters_last, packed_right_len,
};
use crate::gemm::{Cpu, GemmError, Window};
use crate::parallel::for_each_row_chunk_mut;
use crate::vector::depthwise_pixels::{ChannelBlocks, DepthwisePixels};

/// Codes of a result that are worth a thread.
const GRAIN: usize = 1 << 14;

/// Filters of so many channels each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FilterShape {
    pub(crate) filters: usize,
    /// Channels of a filter.
    pub(crate) channels: usize,
    pub(crate) groups: usize,
    /// Sizes of the kernel, 1 for an axis that is not there.
    pub(crate) kernel: [usize; 3],
}

impl FilterShape {
    /// Whether there is a way here: all channels are in one group, or each has one filter.
    pub(crate) fn fits(&self) -> bool {
        self.groups == 1 || self.is_depthwise()
    }

    fn is_depthwise(&self) -> bool {
        self.channels == 1 && self.groups > 1 && self.filters == self.groups
    }

    fn positions(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Steps of a sum.
    fn steps(&self) -> usize {
        self.channels.div_ceil(4).saturating_mul(4).saturating_mul(self.positions())
    }

    /// Terms and factors of the filters, in whole tiles.
    fn padded(&self, cpu: Cpu) -> usize {
        match self.is_depthwise() {
            true => ChannelBlocks::new(cpu.isa, self.filters).padded(),
            false => self.filters.next_multiple_of(64),
        }
    }

    /// Bytes that packed filters take.
    pub(crate) fn packed_len(&self, cpu: Cpu) -> usize {
        match self.is_depthwise() {
            true => {
                let blocks = ChannelBlocks::new(cpu.isa, self.filters);
                blocks.weights_len(self.kernel).saturating_add(blocks.padded()).saturating_mul(4)
            }
            false => packed_right_len(cpu, self.steps(), self.filters),
        }
    }

    /// Packs codes of shape `[filters, channels, ..kernel]`.
    ///
    /// # Errors
    ///
    /// When a slice is too short or not aligned.
    pub(crate) fn pack(
        &self,
        cpu: Cpu,
        (codes, unsigned): (&[u8], bool),
        packed: &mut [u8],
    ) -> Result<(), GemmError> {
        if !self.is_depthwise() {
            let shape = [self.filters, self.channels, self.positions()];
            return pack_filters_last(cpu, (codes, unsigned), shape, packed);
        }
        let blocks = ChannelBlocks::new(cpu.isa, self.filters);
        let (needed, len) = (self.filters.saturating_mul(self.positions()), codes.len());
        if len < needed || self.positions() == 0 {
            return Err(GemmError::TooShort { what: "filters", needed, len });
        }
        let packed = ints_mut(packed)?;
        let (weights, len) = (blocks.weights_len(self.kernel), packed.len());
        let needed = weights + blocks.padded();
        let packed =
            packed.get_mut(..needed).ok_or(GemmError::TooShort { what: "packed filters", needed, len })?;
        let (weights, sums) = packed.split_at_mut(weights);
        blocks.pack(codes, if unsigned { 0x80 } else { 0 }, self.kernel, weights, sums);
        Ok(())
    }
}

fn ints_mut(bytes: &mut [u8]) -> Result<&mut [i32], GemmError> {
    let count = bytes.len() / 4 * 4;
    bytemuck::try_cast_slice_mut(&mut bytes[..count])
        .map_err(|_| GemmError::Shape("memory of a convolution of codes is not aligned"))
}

/// A convolution of codes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PixelConv<'a> {
    /// All pixels of all images, and whether codes have a sign.
    pub(crate) image: (&'a [u8], bool),
    pub(crate) image_zero: i32,
    pub(crate) batch: usize,
    pub(crate) window: Window,
    pub(crate) shape: FilterShape,
    /// What [`FilterShape::pack`] made, and whether the codes were unsigned.
    pub(crate) filters: (&'a [u8], bool),
    /// One for each filter, or none.
    pub(crate) bias: &'a [i32],
    /// The zero point of the result, and whether its codes have a sign.
    pub(crate) zero: i32,
    pub(crate) signed: bool,
}

/// Bytes of workspace for a convolution.
///
/// # Errors
///
/// When sizes overflow.
pub(crate) fn pixel_conv_workspace_len(
    cpu: Cpu,
    window: Window,
    shape: FilterShape,
    signed: bool,
) -> Result<usize, GemmError> {
    let copy = match shape.is_depthwise() {
        true => 0,
        false => PixelWindows::new(cpu, window, (shape.channels, signed), shape.filters)?.len(),
    };
    Ok(shape.padded(cpu).saturating_mul(8).saturating_add(copy))
}

impl PixelConv<'_> {
    /// Computes all images. `factor` says what turns the sums of a filter into codes.
    ///
    /// # Errors
    ///
    /// When shapes do not go together or a slice is too short.
    pub(crate) fn run(
        &self,
        cpu: Cpu,
        factor: impl Fn(usize) -> f32,
        codes: &mut [u8],
        workspace: &mut [u8],
    ) -> Result<(), GemmError> {
        let (shape, window) = (self.shape, self.window);
        let needed = pixel_conv_workspace_len(cpu, window, shape, self.image.1)?;
        let len = workspace.len();
        if len < needed {
            return Err(GemmError::TooShort { what: "a convolution's workspace", needed, len });
        }
        let image = shape.groups * shape.channels * window.input_len();
        let result = shape.filters * window.output_len();
        let shapes_fit = shape.fits()
            && shape.kernel == window.kernel
            && (self.bias.is_empty() || self.bias.len() == shape.filters)
            && self.image.0.len() >= self.batch * image
            && codes.len() >= self.batch * result;
        if !shapes_fit {
            return Err(GemmError::Shape("the operands of a convolution of codes do not fit"));
        }
        if image == 0 || result == 0 {
            return Ok(());
        }
        let padded = shape.padded(cpu);
        let (terms, copy) = workspace.split_at_mut(8 * padded);
        let (terms, factors) = ints_mut(terms)?.split_at_mut(padded);
        let factors: &mut [f32] = bytemuck::cast_slice_mut(factors);
        let filters = (terms, factors, &factor as &dyn Fn(usize) -> f32);
        match shape.is_depthwise() {
            true => self.run_depthwise(cpu, filters, (image, result), codes),
            false => self.run_products(cpu, filters, (image, result), (codes, copy)),
        }
    }

    /// The zero point of the image's bytes, which are made unsigned.
    fn zero_of_image(&self) -> i32 {
        self.image_zero + if self.image.1 { 128 } else { 0 }
    }

    /// What is added to the sums of a filter whose weights have this sum.
    fn term(&self, filter: usize, sum: i32) -> i32 {
        let bias = self.bias.get(filter).copied().unwrap_or(0);
        bias.wrapping_sub(self.zero_of_image().wrapping_mul(sum))
    }

    fn run_products(
        &self,
        cpu: Cpu,
        (terms, factors, factor): (&mut [i32], &mut [f32], &dyn Fn(usize) -> f32),
        (image_len, result_len): (usize, usize),
        (codes, copy): (&mut [u8], &mut [u8]),
    ) -> Result<(), GemmError> {
        let shape = self.shape;
        let filters = PackedBytes::new(cpu, self.filters, [shape.steps(), shape.filters])?;
        for (filter, sum) in filters.sums().iter().take(shape.filters).enumerate() {
            (terms[filter], factors[filter]) = (self.term(filter, *sum), factor(filter));
        }
        let windows = PixelWindows::new(cpu, self.window, (shape.channels, self.image.1), shape.filters)?;
        let of_image = [if self.image.1 { 0x80 } else { 0 }, self.zero_of_image() as u8];
        let images = self.image.0.chunks_exact(image_len);
        for (image, codes) in images.zip(codes.chunks_exact_mut(result_len)).take(self.batch) {
            let gemm = IntegerGemm {
                left: windows.rows(cpu, image, of_image, copy)?,
                right: windows.columns(&filters),
                signed_left: false,
                terms: Terms { columns: terms, ..Terms::default() },
                line: [shape.filters; 2],
                row_stride: shape.filters,
            };
            let (zero, signed) = (self.zero, self.signed);
            gemm.run(cpu, Target::Codes { codes, factors: Factors::Columns(factors), zero, signed })?;
        }
        Ok(())
    }

    fn run_depthwise(
        &self,
        cpu: Cpu,
        (terms, factors, factor): (&mut [i32], &mut [f32], &dyn Fn(usize) -> f32),
        (image_len, result_len): (usize, usize),
        codes: &mut [u8],
    ) -> Result<(), GemmError> {
        let blocks = ChannelBlocks::new(cpu.isa, self.shape.filters);
        let (weights, needed) = (blocks.weights_len(self.shape.kernel), self.shape.packed_len(cpu));
        let len = self.filters.0.len();
        let packed = self.filters.0.get(..needed);
        let packed = packed.ok_or(GemmError::TooShort { what: "packed filters", needed, len })?;
        let packed: &[i32] = bytemuck::try_cast_slice(packed)
            .map_err(|_| GemmError::Shape("memory for packed filters is not aligned"))?;
        let (weights, sums) = packed.split_at(weights);
        for filter in 0..self.shape.filters {
            let place = blocks.place(filter);
            (terms[place], factors[place]) = (self.term(filter, sums[place]), factor(filter));
        }
        let is_small = (0..self.shape.filters).all(|filter| factor(filter).abs() < 1.0);
        let images = self.image.0.chunks_exact(image_len);
        for (image, codes) in images.zip(codes.chunks_exact_mut(result_len)).take(self.batch) {
            let conv = DepthwisePixels {
                window: &self.window,
                blocks,
                image,
                of_image: [if self.image.1 { 0x80 } else { 0 }, self.image_zero as u8],
                weights,
                terms,
                factors,
                is_small,
                zero: self.zero,
                signed: self.signed,
            };
            let row = conv.row_len();
            for_each_row_chunk_mut(cpu.threads, codes, row, GRAIN.div_ceil(row), |first, rows| {
                conv.rows(cpu.isa, first, rows);
            });
        }
        Ok(())
    }
}
