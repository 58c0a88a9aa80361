//! Quantized NHWC convolution, the layout that the next quantized convolution reads fastest.
//!
//! Filters are the columns of a GEMM and windows its rows; see [`NhwcWindows`]. In a depthwise
//! convolution, a filter is applied directly to its windows. Filters must be constant and have no
//! zero points here.

use ort_cpu_depthwise::nhwc::{ChannelBlocks, DepthwiseNhwc};
use ort_cpu_gemm::integer::{
    Factors, IntegerGemm, NhwcWindows, PackedBytes, Target, Terms, are_small, pack_filters_last,
    packed_rhs_len,
};
use ort_cpu_gemm::{Cpu, GemmError, Window};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

/// Quantized results that are worth a thread.
const GRAIN: usize = 1 << 14;

/// The shape of the filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterShape {
    /// The number of filters, in all groups together.
    pub filters: usize,
    /// Channels of a filter.
    pub channels: usize,
    /// The groups that channels and filters are divided into.
    pub groups: usize,
    /// Sizes of the kernel, 1 for an absent axis.
    pub kernel: [usize; 3],
}

impl FilterShape {
    /// Whether this module supports the shape: all channels are in one group, or the convolution is
    /// depthwise.
    pub fn fits(&self) -> bool {
        self.groups == 1 || self.is_depthwise()
    }

    fn is_depthwise(&self) -> bool {
        self.channels == 1 && self.groups > 1 && self.filters == self.groups
    }

    fn positions(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Returns k, with the channels padded to groups of four.
    fn steps(&self) -> usize {
        self.channels.div_ceil(4).saturating_mul(4).saturating_mul(self.positions())
    }

    /// Returns the number of terms and factors, padded to whole tiles.
    fn padded(&self, cpu: Cpu) -> usize {
        match self.is_depthwise() {
            true => ChannelBlocks::new(cpu.isa, self.filters).padded(),
            // A multiple of every kernel's panel width, so that the length does not depend on the
            // instruction set.
            false => self.filters.next_multiple_of(64),
        }
    }

    /// Returns the bytes that packed filters take.
    pub fn packed_len(&self, cpu: Cpu) -> usize {
        match self.is_depthwise() {
            true => {
                let blocks = ChannelBlocks::new(cpu.isa, self.filters);
                blocks.weights_len(self.kernel).saturating_add(blocks.padded()).saturating_mul(4)
            }
            false => packed_rhs_len(cpu, self.steps(), self.filters),
        }
    }

    /// Packs filters of shape `[filters, channels, ..kernel]`.
    ///
    /// # Errors
    ///
    /// If a slice is too short or not aligned.
    pub fn pack(
        &self,
        cpu: Cpu,
        (values, unsigned): (&[u8], bool),
        packed: &mut [u8],
    ) -> Result<(), GemmError> {
        if !self.is_depthwise() {
            // In NHWC, pixels are rows and filters are columns, so the weights are the packed B.
            let shape = [self.filters, self.channels, self.positions()];
            return pack_filters_last(cpu, (values, unsigned), shape, packed);
        }
        let blocks = ChannelBlocks::new(cpu.isa, self.filters);
        let (needed, len) = (self.filters.saturating_mul(self.positions()), values.len());
        if len < needed || self.positions() == 0 {
            return Err(GemmError::TooShort { what: "filters", needed, len });
        }
        let packed = ints_mut(packed)?;
        let (weights, len) = (blocks.weights_len(self.kernel), packed.len());
        let needed = weights + blocks.padded();
        let packed =
            packed.get_mut(..needed).ok_or(GemmError::TooShort { what: "packed filters", needed, len })?;
        let (weights, sums) = packed.split_at_mut(weights);
        // The shift turns unsigned weights into signed ones, as the kernels multiply them. The zero
        // point of such weights is 128, so it becomes 0.
        blocks.pack(values, if unsigned { 0x80 } else { 0 }, self.kernel, weights, sums);
        Ok(())
    }

    /// Returns the bytes of the requantization terms and factors of all filters.
    pub fn requantization_len(&self, cpu: Cpu) -> usize {
        self.padded(cpu).saturating_mul(8)
    }

    /// Writes, for each filter that [`pack`](Self::pack) packed, the term that is added to its
    /// accumulators and the factor that then scales them.
    ///
    /// # Errors
    ///
    /// If a slice is too short or not aligned.
    pub fn requantize(
        &self,
        cpu: Cpu,
        packed: &[u8],
        by: &Requantize<'_>,
        to: &mut [u8],
    ) -> Result<(), GemmError> {
        if !by.bias.is_empty() && by.bias.len() != self.filters {
            return Err(GemmError::Shape("a bias is not there for each filter"));
        }
        let (padded, len) = (self.padded(cpu), to.len());
        let needed = self.requantization_len(cpu);
        let to =
            to.get_mut(..needed).ok_or(GemmError::TooShort { what: "terms and factors", needed, len })?;
        // Kernels read whole tiles, including the padding.
        to.fill(0);
        // Terms and factors share one buffer, because a kernel keeps them as one packed constant.
        let (terms, factors) = ints_mut(to)?.split_at_mut(padded);
        let factors: &mut [f32] = bytemuck::cast_slice_mut(factors);
        let mut write = |filter: usize, place: usize, sum: i32| {
            let bias = by.bias.get(filter).copied().unwrap_or(0);
            // Filters have no zero points, so `sum (a - z) b` is `sum a b - z * sum b`.
            terms[place] = bias.wrapping_sub(by.image_zero.wrapping_mul(sum));
            factors[place] = (by.factor)(filter);
        };
        if self.is_depthwise() {
            let blocks = ChannelBlocks::new(cpu.isa, self.filters);
            let (_, sums) = self.depthwise(blocks, packed)?;
            (0..self.filters).map(|filter| (filter, blocks.place(filter))).for_each(|(filter, place)| {
                write(filter, place, sums[place]);
            });
        } else {
            let filters = self.columns(cpu, packed)?;
            let sums = filters.sums().iter().take(self.filters);
            sums.enumerate().for_each(|(filter, sum)| write(filter, filter, *sum));
        }
        Ok(())
    }

    /// Returns packed filters as the columns of a GEMM.
    fn columns<'a>(&self, cpu: Cpu, packed: &'a [u8]) -> Result<PackedBytes<'a>, GemmError> {
        PackedBytes::new(cpu, (packed, false), [self.steps(), self.filters])
    }

    /// Returns the packed weights of depthwise filters, and their sums.
    fn depthwise<'a>(
        &self,
        blocks: ChannelBlocks,
        packed: &'a [u8],
    ) -> Result<(&'a [i32], &'a [i32]), GemmError> {
        let weights = blocks.weights_len(self.kernel);
        let (needed, len) = (weights.saturating_add(blocks.padded()).saturating_mul(4), packed.len());
        let packed = packed.get(..needed);
        let packed = packed.ok_or(GemmError::TooShort { what: "packed filters", needed, len })?;
        let packed: &[i32] = bytemuck::try_cast_slice(packed)
            .map_err(|_| GemmError::Shape("memory of a quantized convolution is not aligned"))?;
        Ok(packed.split_at(weights))
    }
}

/// The requantization parameters.
pub struct Requantize<'a> {
    /// The zero point of the image's bytes, after their shift to unsigned.
    pub image_zero: i32,
    /// One bias per filter, or empty.
    pub bias: &'a [i32],
    /// Returns the scale of a filter's accumulators.
    pub factor: &'a dyn Fn(usize) -> f32,
}

/// Returns the zero point of values that may be signed, after their shift to unsigned.
pub fn unsigned_zero(zero: i32, signed: bool) -> i32 {
    zero + if signed { 128 } else { 0 }
}

fn ints_mut(bytes: &mut [u8]) -> Result<&mut [i32], GemmError> {
    let count = bytes.len() / 4 * 4;
    bytemuck::try_cast_slice_mut(&mut bytes[..count])
        .map_err(|_| GemmError::Shape("memory of a quantized convolution is not aligned"))
}

/// A quantized NHWC convolution.
#[derive(Clone, Copy, Debug)]
pub struct NhwcConv<'a> {
    /// All pixels of all images, and whether the values are signed.
    pub image: (&'a [u8], bool),
    /// The zero point of the image.
    pub image_zero: i32,
    /// The number of images.
    pub batch: usize,
    /// The geometry of the windows.
    pub window: Window,
    /// The shape of the filters.
    pub shape: FilterShape,
    /// The filters that [`FilterShape::pack`] packed.
    pub filters: &'a [u8],
    /// The terms and factors that [`FilterShape::requantize`] wrote.
    pub requantization: &'a [u8],
    /// The zero point of the result.
    pub zero: i32,
    /// Whether the result is signed.
    pub signed: bool,
}

/// Returns the bytes of workspace for a convolution.
///
/// # Errors
///
/// If sizes overflow.
pub fn nhwc_conv_workspace_len(
    cpu: Cpu,
    window: Window,
    shape: FilterShape,
    signed: bool,
) -> Result<usize, GemmError> {
    match shape.is_depthwise() {
        true => Ok(0),
        false => Ok(NhwcWindows::new(cpu, window, (shape.channels, signed), shape.filters)?.copy_len()),
    }
}

impl NhwcConv<'_> {
    /// Computes all images.
    ///
    /// # Errors
    ///
    /// If shapes do not match or a slice is too short.
    pub fn run(&self, cpu: Cpu, values: &mut [u8], workspace: &mut [u8]) -> Result<(), GemmError> {
        let (shape, window) = (self.shape, self.window);
        let image = shape.groups * shape.channels * window.input_len();
        let result = shape.filters * window.output_len();
        let shapes_fit = shape.fits()
            && shape.kernel == window.kernel
            && self.image.0.len() >= self.batch * image
            && values.len() >= self.batch * result;
        if !shapes_fit {
            return Err(GemmError::Shape("the operands of a quantized convolution do not match"));
        }
        if image == 0 || result == 0 {
            return Ok(());
        }
        let (needed, len) = (shape.requantization_len(cpu), self.requantization.len());
        let terms = self.requantization.get(..needed);
        let terms = terms.ok_or(GemmError::TooShort { what: "terms and factors", needed, len })?;
        let terms: &[i32] = bytemuck::try_cast_slice(terms)
            .map_err(|_| GemmError::Shape("terms and factors of a convolution are not aligned"))?;
        let (terms, factors) = terms.split_at(terms.len() / 2);
        let of_filters = (terms, bytemuck::cast_slice(factors));
        match shape.is_depthwise() {
            true => self.run_depthwise(cpu, of_filters, [image, result], values),
            false => self.run_gemms(cpu, of_filters, [image, result], values, workspace),
        }
    }

    fn run_gemms(
        &self,
        cpu: Cpu,
        (terms, factors): (&[i32], &[f32]),
        [image_len, result_len]: [usize; 2],
        values: &mut [u8],
        copy: &mut [u8],
    ) -> Result<(), GemmError> {
        let (shape, signed) = (self.shape, self.image.1);
        let filters = shape.columns(cpu, self.filters)?;
        let windows = NhwcWindows::new(cpu, self.window, (shape.channels, signed), shape.filters)?;
        // The padding must count as zero, so it is the image's zero point after the same shift as
        // the image's bytes.
        let of_image = [if signed { 0x80 } else { 0 }, unsigned_zero(self.image_zero, signed) as u8];
        let images = self.image.0.chunks_exact(image_len);
        for (image, values) in images.zip(values.chunks_exact_mut(result_len)).take(self.batch) {
            let gemm = IntegerGemm {
                lhs: windows.rows(cpu, image, of_image, copy)?,
                rhs: windows.columns(&filters),
                signed_lhs: false,
                terms: Terms { columns: terms, ..Terms::default() },
                strip: [shape.filters; 2],
                row_stride: shape.filters,
            };
            let (zero, signed) = (self.zero, self.signed);
            gemm.run(cpu, Target::Quantized { values, factors: Factors::Columns(factors), zero, signed })?;
        }
        Ok(())
    }

    fn run_depthwise(
        &self,
        cpu: Cpu,
        (terms, factors): (&[i32], &[f32]),
        [image_len, result_len]: [usize; 2],
        values: &mut [u8],
    ) -> Result<(), GemmError> {
        let blocks = ChannelBlocks::new(cpu.isa, self.shape.filters);
        let (weights, _) = self.shape.depthwise(blocks, self.filters)?;
        // Known once for all rows: factors below 1 need no saturation before the conversion to
        // integers.
        let is_small = are_small(factors);
        let images = self.image.0.chunks_exact(image_len);
        for (image, values) in images.zip(values.chunks_exact_mut(result_len)).take(self.batch) {
            let conv = DepthwiseNhwc {
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
            for_each_row_chunk_mut(cpu.threads, values, row, GRAIN.div_ceil(row), |first, rows| {
                conv.rows(cpu.isa, first, rows);
            });
        }
        Ok(())
    }
}
