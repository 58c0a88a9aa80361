//! Quantized NCHW convolution with zero points.
//!
//! With one input channel per group, a filter is applied directly to its windows. All other
//! convolutions are GEMMs of packed filters with the windows of the image; see [`ByteWindows`].

use ort_cpu_depthwise::quantized::{
    PlaneTarget, QuantizedTaps, Requantize, SourcePlane, convolve_plane, plane_len,
};
use ort_cpu_gemm::integer::{Addend, ByteRows, ByteWindows, Factors, IntegerGemm, Scaling, Target, Terms};
use ort_cpu_gemm::{Activation, Cpu, GemmError, Window};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::elementwise::{Binary, Operand, binary_in_place, unary_in_place};

/// Filters packed as rows of signed bytes: for each kernel position, the channels in whole groups
/// of four.
#[derive(Clone, Copy, Debug)]
pub struct PackedFilters<'a> {
    rows: &'a [u8],
    /// A row with ones in place of the weights.
    ones: &'a [u8],
    sums: &'a [i32],
    shape: [usize; 3],
    /// Whether the original values were unsigned. The packed ones are then 128 smaller.
    unsigned: bool,
}

/// Returns the bytes of a row, and of everything packed, for filters of shape
/// `[filters, channels of a group, positions]`.
fn lens([filters, channels, positions]: [usize; 3]) -> [usize; 2] {
    let row = channels.div_ceil(4).saturating_mul(4).saturating_mul(positions);
    [row, row.saturating_mul(filters.saturating_add(1)).saturating_add(filters.saturating_mul(4))]
}

/// Returns the bytes that packed filters take.
pub fn packed_filters_len(shape: [usize; 3]) -> usize {
    lens(shape)[1]
}

/// Packs filters of shape `[filters, channels of a group, positions]`.
///
/// # Errors
///
/// If a slice is too short or not aligned.
pub fn pack_filters(
    (values, unsigned): (&[u8], bool),
    shape: [usize; 3],
    packed: &mut [u8],
) -> Result<(), GemmError> {
    let [filters, channels, positions] = shape;
    let ([row, needed], len) = (lens(shape), packed.len());
    let packed =
        packed.get_mut(..needed).ok_or(GemmError::TooShort { what: "packed filters", needed, len })?;
    let needed = filters * channels * positions;
    if values.len() < needed {
        return Err(GemmError::TooShort { what: "filters", needed, len: values.len() });
    }
    // Groups of four are padded with zeros, which add nothing to a dot product of four bytes.
    packed.fill(0);
    if needed == 0 {
        return Ok(());
    }
    let (rows, sums) = packed.split_at_mut(row * (filters + 1));
    let sums: &mut [i32] = bytemuck::try_cast_slice_mut(sums)
        .map_err(|_| GemmError::Shape("memory for packed filters is not aligned"))?;
    let (rows, ones) = rows.split_at_mut(row * filters);
    let (flip, stride) = (if unsigned { 0x80 } else { 0 }, row / positions);
    let filters = rows.chunks_exact_mut(row).zip(values.chunks_exact(channels * positions));
    for ((to, values), sum) in filters.zip(sums) {
        for (position, to) in to.chunks_exact_mut(stride).enumerate() {
            // Channels come last: the four bytes that one instruction multiplies are four channels
            // of one position.
            let values = values[position..].iter().step_by(positions);
            for (to, code) in to.iter_mut().zip(values) {
                *to = code ^ flip;
                // The sums correct for the image's zero point, so they count the shifted bytes that
                // the kernel multiplies.
                *sum = sum.wrapping_add(i32::from(*to as i8));
            }
        }
    }
    // Multiplied with a row of ones, the windows yield their own sums.
    ones.chunks_exact_mut(stride).for_each(|to| to[..channels].fill(1));
    Ok(())
}

impl<'a> PackedFilters<'a> {
    /// Wraps what [`pack_filters`] wrote.
    ///
    /// # Errors
    ///
    /// If `packed` is too short or not aligned.
    pub fn new(
        (packed, unsigned): (&'a [u8], bool),
        shape: [usize; 3],
    ) -> Result<PackedFilters<'a>, GemmError> {
        let ([row, needed], len) = (lens(shape), packed.len());
        let packed =
            packed.get(..needed).ok_or(GemmError::TooShort { what: "packed filters", needed, len })?;
        let (rows, rest) = packed.split_at(row * shape[0]);
        let (ones, sums) = rest.split_at(row);
        let sums = bytemuck::try_cast_slice(sums)
            .map_err(|_| GemmError::Shape("memory for packed filters is not aligned"))?;
        Ok(PackedFilters { rows, ones, sums, shape, unsigned })
    }
}

/// A quantized convolution.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedConv<'a> {
    /// All channels of all images, and whether the values are signed.
    pub image: (&'a [u8], bool),
    /// The zero point of the image.
    pub image_zero: i32,
    /// The number of images.
    pub batch: usize,
    /// The groups that channels and filters are divided into.
    pub groups: usize,
    /// The geometry of the windows.
    pub window: Window,
    /// The packed filters.
    pub filters: PackedFilters<'a>,
    /// One zero point for all filters, or one per filter.
    pub filter_zeros: &'a [i32],
    /// One bias per filter, or empty.
    pub bias: &'a [i32],
}

/// What becomes of the accumulators.
#[derive(Debug)]
pub enum ConvTarget<'a> {
    /// They are stored as they are.
    Accumulators(&'a mut [i32]),
    /// They become floats: `activation(sum * factor + bias + addend)`, with a factor per filter.
    Numbers {
        /// The result.
        values: &'a mut [f32],
        /// One factor per filter.
        factors: &'a [f32],
        /// One float per filter, or none.
        bias: &'a [f32],
        /// The addend has the shape of the result. [`Addend::Old`] requires two channels or more
        /// in a group.
        addend: Addend<'a>,
        /// The function at the end.
        activation: Option<Activation>,
    },
    /// They are requantized, with a factor per filter.
    Quantized {
        /// The quantized result.
        values: &'a mut [u8],
        /// One factor per filter.
        factors: &'a [f32],
        /// The zero point of the result.
        zero: i32,
        /// Whether the result is signed.
        signed: bool,
    },
}

/// Returns the bytes of workspace for a convolution with filters of this shape, on images of as
/// many channels per group.
///
/// # Errors
///
/// If sizes overflow.
pub fn quantized_conv_workspace_len(cpu: Cpu, window: Window, shape: [usize; 3]) -> Result<usize, GemmError> {
    // Two `i32` terms per filter, padded to a cache line.
    let terms = shape[0].saturating_mul(8).checked_next_multiple_of(64).unwrap_or(usize::MAX);
    let image = match QuantizedTaps::fits(&window) && shape[1] == 1 {
        // `run_depthwise` cuts the filters into two parts per thread, to balance threads of unequal
        // speed.
        true => plane_len(&window).saturating_mul(cpu.threads.max(1) * 2),
        false => ByteWindows::new(cpu, window, shape[1])?.copy_len(),
    };
    Ok(terms.saturating_add(image))
}

impl QuantizedConv<'_> {
    /// Computes all images.
    ///
    /// # Errors
    ///
    /// If shapes do not match or a slice is too short.
    pub fn run(&self, cpu: Cpu, mut target: ConvTarget<'_>, workspace: &mut [u8]) -> Result<(), GemmError> {
        let [filters, channels, positions] = self.filters.shape;
        let needed = quantized_conv_workspace_len(cpu, self.window, self.filters.shape)?;
        let len = workspace.len();
        if len < needed {
            return Err(GemmError::TooShort { what: "a convolution's workspace", needed, len });
        }
        let fits = |len: usize| matches!(len, 0 | 1) || len == filters;
        let (plane, input) = (self.window.output_len(), self.window.input_len());
        // A group of an image has channels and filters of its own, so it is a GEMM of its own.
        let units = self.batch * self.groups;
        let (results, factors) = match &target {
            ConvTarget::Accumulators(accumulators) => (accumulators.len(), filters),
            ConvTarget::Numbers { values, factors, .. } => (values.len(), factors.len()),
            ConvTarget::Quantized { values, factors, .. } => (values.len(), factors.len()),
        };
        let addends_fit = match &target {
            ConvTarget::Numbers { values, bias, addend, .. } => {
                let has_room = match addend {
                    Addend::None => true,
                    // The loop over planes overwrites the old values before it adds.
                    Addend::Old => channels > 1,
                    Addend::Matrix(addend) => addend.len() >= values.len(),
                };
                has_room && (bias.is_empty() || bias.len() == filters)
            }
            _ => true,
        };
        let shapes_fit = fits(self.filter_zeros.len())
            && (self.bias.is_empty() || self.bias.len() == filters)
            && self.groups > 0
            && filters.is_multiple_of(self.groups)
            && positions == self.window.kernel_len()
            && factors == filters
            && addends_fit
            && self.image.0.len() >= units * channels * input
            && results >= self.batch * filters * plane;
        if !shapes_fit {
            return Err(GemmError::Shape("the operands of a quantized convolution do not match"));
        }
        let (terms, scratch) = workspace.split_at_mut(filters.saturating_mul(8).next_multiple_of(64));
        let terms = bytemuck::try_cast_slice_mut(terms)
            .map_err(|_| GemmError::Shape("the workspace of a convolution is not aligned"))?;
        let (row_terms, rest): (&mut [i32], _) = terms.split_at_mut(filters);
        let minus_zeros = &mut rest[..filters];
        // The kernels multiply unsigned bytes of the image with signed bytes of filters. A signed
        // image is shifted by 128, and its zero point with it.
        let image_zero = self.image_zero + if self.image.1 { 128 } else { 0 };
        for filter in 0..filters {
            let zero = self.filter_zero(filter);
            let bias = self.bias.get(filter).copied().unwrap_or(0);
            let steps = (channels * positions) as i32;
            // The part of `sum (a - z)(b - y)` that does not depend on the window.
            let zeros = steps.wrapping_mul(zero).wrapping_sub(self.filters.sums[filter]);
            row_terms[filter] = bias.wrapping_add(image_zero.wrapping_mul(zeros));
            minus_zeros[filter] = -zero;
        }
        let of_image = [if self.image.1 { 0x80 } else { 0 }, image_zero as u8];
        let terms = [&*row_terms, &*minus_zeros];
        // With one channel, three of the four bytes of a group would be padding. The depthwise loop
        // fills them with neighbours along the row instead.
        if channels == 1 && QuantizedTaps::fits(&self.window) {
            return self.run_depthwise(cpu, of_image, terms, target, scratch);
        }
        let windows = ByteWindows::new(cpu, self.window, channels)?;
        for unit in 0..units {
            let image = &self.image.0[unit * channels * input..][..channels * input];
            // All GEMMs share one copy of windows in turn. The threads split each GEMM, so the copy
            // stays in cache and needs memory once.
            windows.fill(cpu, image, of_image, scratch)?;
            self.run_group(cpu, &windows, (unit, terms), &mut target, scratch)?;
        }
        Ok(())
    }

    /// Returns the zero point of a filter's packed bytes.
    fn filter_zero(&self, filter: usize) -> i32 {
        let zero = self.filter_zeros.get(filter).or(self.filter_zeros.first()).copied().unwrap_or(0);
        zero - if self.filters.unsigned { 128 } else { 0 }
    }

    /// Computes one group of one image, whose windows are in `bytes`.
    fn run_group(
        &self,
        cpu: Cpu,
        windows: &ByteWindows,
        (unit, [row_terms, minus_zeros]): (usize, [&[i32]; 2]),
        target: &mut ConvTarget<'_>,
        bytes: &[u8],
    ) -> Result<(), GemmError> {
        let [filters, _, positions] = self.filters.shape;
        let (group, of_group) = (unit % self.groups, filters / self.groups);
        let (first, plane) = (group * of_group, self.window.output_len());
        let groups = windows.groups() * positions;
        let rows = self.filters.rows.get(first * groups * 4..).unwrap_or(&[]);
        let minus_zeros = &minus_zeros[first..first + of_group];
        let has_zeros = minus_zeros.iter().any(|zero| *zero != 0);
        let ones = ByteRows::new(self.filters.ones, [1, groups], groups * 4)?;
        let gemm = IntegerGemm {
            lhs: ByteRows::new(rows, [of_group, groups], groups * 4)?,
            rhs: windows.columns(cpu, bytes)?,
            signed_lhs: true,
            terms: Terms {
                rows: &row_terms[first..first + of_group],
                // Symmetric filters need no window sums, which cost an extra row of the GEMM.
                window_sums: has_zeros.then_some((minus_zeros, ones)),
                ..Terms::default()
            },
            strip: windows.strip(),
            row_stride: plane,
        };
        let place = unit * of_group * plane;
        let target = match target {
            ConvTarget::Accumulators(accumulators) => Target::Accumulators(&mut accumulators[place..]),
            ConvTarget::Numbers { values, factors, bias, addend, activation } => Target::Numbers {
                values: &mut values[place..],
                scaling: Scaling {
                    factors: Factors::Rows(&factors[first..first + of_group]),
                    row_bias: bias.get(first..first + of_group).unwrap_or(&[]),
                    column_bias: &[],
                    addend: match addend {
                        Addend::Matrix(addend) => Addend::Matrix(&addend[place..]),
                        other => *other,
                    },
                    activation: *activation,
                },
            },
            ConvTarget::Quantized { values, factors, zero, signed } => Target::Quantized {
                values: &mut values[place..],
                factors: Factors::Rows(&factors[first..first + of_group]),
                zero: *zero,
                signed: *signed,
            },
        };
        gemm.run(cpu, target)
    }

    /// Computes one plane for each filter of each image.
    fn run_depthwise(
        &self,
        cpu: Cpu,
        of_image: [u8; 2],
        [row_terms, minus_zeros]: [&[i32]; 2],
        target: ConvTarget<'_>,
        scratch: &mut [u8],
    ) -> Result<(), GemmError> {
        let [filters, _, positions] = self.filters.shape;
        let (plane, input) = (self.window.output_len(), self.window.input_len());
        let convolve = |unit: usize, to: PlaneTarget<'_>, scratch: &mut [u8]| {
            let (image, filter) = (unit / filters, unit % filters);
            let channel = image * self.groups + filter / (filters / self.groups);
            let weights = &self.filters.rows[filter * positions * 4..][..positions * 4];
            let taps = QuantizedTaps::new(&self.window, weights, [row_terms[filter], minus_zeros[filter]]);
            let image = &self.image.0[channel * input..][..input];
            let image = SourcePlane { bytes: image, flip: of_image[0] };
            convolve_plane(cpu.isa, &self.window, image, &taps, to, scratch);
        };
        let planes = Planes { cpu, window: &self.window, count: self.batch * filters, padding: of_image[1] };
        match target {
            ConvTarget::Accumulators(accumulators) => {
                planes.for_each(accumulators, scratch, |unit, to: &mut [i32], scratch| {
                    convolve(unit, PlaneTarget::Accumulators(to), scratch);
                });
            }
            ConvTarget::Numbers { values, factors, bias, addend, activation } => {
                planes.for_each(values, scratch, |unit, to: &mut [f32], scratch| {
                    let filter = unit % filters;
                    let (factor, bias) = (factors[filter], bias.get(filter).copied().unwrap_or(0.0));
                    convolve(unit, PlaneTarget::Numbers { values: to, factor, bias }, scratch);
                    // The plane is still in cache.
                    if let Addend::Matrix(addend) = addend {
                        let addend = Operand::Slice(&addend[unit * plane..][..plane]);
                        binary_in_place(cpu.isa, Binary::Add, to, addend);
                    }
                    if let Some(function) = activation {
                        unary_in_place(cpu.isa, function, to);
                    }
                });
            }
            ConvTarget::Quantized { values, factors, zero, signed } => {
                planes.for_each(values, scratch, |unit, to: &mut [u8], scratch| {
                    let requantize = Requantize::new(factors[unit % filters], zero, signed);
                    convolve(unit, PlaneTarget::Quantized(to, requantize), scratch);
                });
            }
        }
        Ok(())
    }
}

/// The planes of a depthwise convolution.
struct Planes<'a> {
    cpu: Cpu,
    window: &'a Window,
    /// The planes of all images.
    count: usize,
    /// What pads an image.
    padding: u8,
}

impl Planes<'_> {
    /// Calls `convolve` with each plane, its number and its thread's scratch.
    fn for_each<T: Send>(
        &self,
        values: &mut [T],
        scratch: &mut [u8],
        convolve: impl Fn(usize, &mut [T], &mut [u8]) + Sync,
    ) {
        let (threads, count, plane) = (self.cpu.threads, self.count, self.window.output_len());
        // Each part needs a padded plane of scratch, and the workspace holds two per thread.
        let parts = if threads <= 1 { 1 } else { (threads * 2).min(count.max(1)) };
        let per_part = count.div_ceil(parts).max(1);
        let scratch = scratch.chunks_exact_mut(plane_len(self.window));
        let values = values[..count * plane].chunks_mut((per_part * plane).max(1));
        let mut parts: Vec<_> = values.zip(scratch).collect();
        for_each_chunk_mut(threads, &mut parts, 1, |part, pieces| {
            for (values, scratch) in pieces {
                scratch.fill(self.padding);
                for (at, to) in values.chunks_exact_mut(plane).enumerate() {
                    convolve(part * per_part + at, to, scratch);
                }
            }
        });
    }
}
