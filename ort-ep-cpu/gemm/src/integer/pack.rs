//! Packing of B for 8-bit GEMM: panels, together with the sums of the columns.

use super::super::kernels::{ByteKernel, column_sums};
use super::{ByteColumns, ByteRows, Cpu, GemmError};
use ort_cpu_threads::interrupt::spending;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::simd::{Isa, Simd, SimdOp, dispatch};

/// The k steps per call for which column sums are computed by multiplying with ones.
const ONES: usize = 1024;

/// A packed matrix of signed bytes, with the sum of each column.
#[derive(Clone, Copy, Debug)]
pub struct PackedBytes<'a> {
    panels: &'a [u8],
    pub(super) sums: &'a [i32],
    pub(super) k: usize,
    pub(super) columns: usize,
    /// Whether the original values were unsigned. The packed ones are then 128 smaller.
    pub(super) unsigned: bool,
    width: usize,
}

/// Returns the bytes of the panels, and of the sums.
fn lens(kernel: &ByteKernel, k: usize, columns: usize) -> [usize; 2] {
    let width = kernel.packed_width(columns);
    let wide = columns.div_ceil(width).saturating_mul(width).saturating_mul(4);
    [wide.saturating_mul(k.div_ceil(4)), wide]
}

/// Returns the bytes that a packed matrix of `k` rows takes.
pub fn packed_rhs_len(cpu: Cpu, k: usize, columns: usize) -> usize {
    let [panels, sums] = lens(ByteKernel::of(cpu.isa), k, columns);
    panels.saturating_add(sums)
}

/// Packs a matrix of shape `[k, columns]` whose element (i, j) is
/// `values[i * strides[0] + j * strides[1]]`.
///
/// # Errors
///
/// If a slice is too short.
pub fn pack_rhs(
    cpu: Cpu,
    (values, unsigned): (&[u8], bool),
    [k, columns]: [usize; 2],
    strides: [usize; 2],
    packed: &mut [u8],
) -> Result<(), GemmError> {
    super::super::matrix::check_extent("a matrix of quantized values", values.len(), [k, columns], strides)?;
    let kernel = ByteKernel::of(cpu.isa);
    let ([panels, sums], len) = (lens(kernel, k, columns), packed.len());
    let too_short = GemmError::TooShort { what: "packed quantized values", needed: panels + sums, len };
    let packed = packed.get_mut(..panels + sums).ok_or(too_short)?;
    let (panels, sums) = packed.split_at_mut(panels);
    let (width, groups) = (kernel.packed_width(columns), k.div_ceil(4));
    // The kernels multiply unsigned with signed bytes, and B is the signed side.
    let shift = if unsigned { 0x80 } else { 0 };
    let panel_len = width * groups * 4;
    for_each_chunk_mut(cpu.threads, panels, panel_len, |panel, to| {
        let first = panel * width;
        let count = (columns - first).min(width);
        for (group, to) in spending(width, to.chunks_exact_mut(4 * width)).enumerate() {
            let step = 4 * group;
            let steps = (k - step).min(4);
            // Fast path: four contiguous rows are interleaved with SIMD.
            if steps == 4 && strides[1] == 1 {
                let row = |at: usize| &values[(step + at) * strides[0] + first..][..count];
                let (done, rest) = to.split_at_mut(4 * count);
                interleave(cpu.isa, [row(0), row(1), row(2), row(3)], shift, bytemuck::cast_slice_mut(done));
                rest.fill(0);
                continue;
            }
            to.fill(0);
            for (column, four) in to.chunks_exact_mut(4).take(count).enumerate() {
                // Steps past k stay zero, so they add nothing.
                for (at, to) in four.iter_mut().take(steps).enumerate() {
                    *to = values[(step + at) * strides[0] + (first + column) * strides[1]] ^ shift;
                }
            }
        }
    });
    let sums: &mut [i32] = bytemuck::try_cast_slice_mut(sums)
        .map_err(|_| GemmError::Shape("memory for packed quantized values is not aligned"))?;
    sum_columns(kernel, panels, [width, groups], sums)
}

/// Packs the filters of a convolution, of shape `[filters, channels, positions]`, as the columns of
/// a matrix. Each kernel position has its channels in whole groups of four.
///
/// # Errors
///
/// If a slice is too short.
pub fn pack_filters_last(
    cpu: Cpu,
    (values, unsigned): (&[u8], bool),
    [filters, channels, positions]: [usize; 3],
    packed: &mut [u8],
) -> Result<(), GemmError> {
    let of_filter = channels.saturating_mul(positions);
    let needed = filters.saturating_mul(of_filter);
    if values.len() < needed {
        return Err(GemmError::TooShort { what: "filters", needed, len: values.len() });
    }
    let (kernel, groups) = (ByteKernel::of(cpu.isa), channels.div_ceil(4));
    let k = groups.saturating_mul(4).saturating_mul(positions);
    let ([panels, sums], len) = (lens(kernel, k, filters), packed.len());
    let too_short = GemmError::TooShort { what: "packed filters", needed: panels + sums, len };
    let packed = packed.get_mut(..panels + sums).ok_or(too_short)?;
    let (panels, sums) = packed.split_at_mut(panels);
    let (width, flip) = (kernel.packed_width(filters), if unsigned { 0x80 } else { 0 });
    for_each_chunk_mut(cpu.threads, panels, (width * k).max(1), |panel, to| {
        to.fill(0);
        let count = (filters - panel * width).min(width);
        for column in spending(channels * positions, 0..count) {
            let filter = &values[(panel * width + column) * of_filter..][..of_filter];
            // The order of `NhwcWindows`: all channels of a kernel position, then the next
            // position.
            let mut groups = to.chunks_exact_mut(4 * width);
            for position in 0..positions {
                let filter = &filter[position..];
                for first in (0..channels).step_by(4) {
                    let Some(to) = groups.next() else { return };
                    let to = &mut to[4 * column..][..4];
                    for (at, to) in to.iter_mut().enumerate().take(channels - first) {
                        *to = filter[(first + at) * positions] ^ flip;
                    }
                }
            }
        }
    });
    let sums: &mut [i32] = bytemuck::try_cast_slice_mut(sums)
        .map_err(|_| GemmError::Shape("memory for packed filters is not aligned"))?;
    sum_columns(kernel, panels, [width, k / 4], sums)
}

/// Computes the sums of the columns of all panels. The 8-bit kernel multiplies the panels with
/// ones.
fn sum_columns(
    kernel: &ByteKernel,
    panels: &[u8],
    [width, groups]: [usize; 2],
    sums: &mut [i32],
) -> Result<(), GemmError> {
    let ones = [1_u8; ONES];
    sums.fill(0);
    if groups == 0 {
        return Ok(());
    }
    for (panel, sums) in panels.chunks_exact(width * groups * 4).zip(sums.chunks_exact_mut(width)) {
        for bytes in spending(width * ONES / 4, panel.chunks(width * ONES)) {
            let groups = bytes.len() / (4 * width);
            let ones = ByteRows::new(&ones, [1, groups], 0)?;
            let starts = &[[0, 0]];
            let part =
                ByteColumns { bytes, starts, groups, step: 4 * width, panel: 0, width, columns: width };
            // On the stack, for the widest panel of any kernel.
            let mut wide = [0_i32; 64];
            let part_sums = &mut wide[..width];
            column_sums(kernel, &part.check()?, &ones, part_sums);
            sums.iter_mut().zip(part_sums).for_each(|(sum, part)| *sum = sum.wrapping_add(*part));
        }
    }
    Ok(())
}

impl<'a> PackedBytes<'a> {
    /// Wraps what [`pack_rhs`] wrote for a matrix of `k` rows.
    ///
    /// # Errors
    ///
    /// If `packed` is too short or not aligned for the sums.
    pub fn new(
        cpu: Cpu,
        (packed, unsigned): (&'a [u8], bool),
        [k, columns]: [usize; 2],
    ) -> Result<PackedBytes<'a>, GemmError> {
        let kernel = ByteKernel::of(cpu.isa);
        let ([panels, sums], len) = (lens(kernel, k, columns), packed.len());
        let too_short = GemmError::TooShort { what: "packed quantized values", needed: panels + sums, len };
        let (panels, rest) = packed.split_at_checked(panels).ok_or(too_short)?;
        let sums = rest.get(..sums).ok_or(too_short)?;
        let sums = bytemuck::try_cast_slice(sums)
            .map_err(|_| GemmError::Shape("memory for packed quantized values is not aligned"))?;
        Ok(PackedBytes { panels, sums, k, columns, unsigned, width: kernel.packed_width(columns) })
    }

    /// Returns the sum of each column's bytes.
    pub fn sums(&self) -> &'a [i32] {
        self.sums
    }

    pub(super) fn operand(&self) -> ByteColumns<'a> {
        let groups = self.k.div_ceil(4);
        let step = 4 * self.width;
        ByteColumns {
            bytes: self.panels,
            // A matrix without rows has no group to start.
            starts: if groups == 0 { &[] } else { &[[0, 0]] },
            groups,
            step,
            panel: step * groups,
            width: self.width,
            columns: self.columns,
        }
    }
}

/// `to[i] = [rows[0][i] ^ flip, ..., rows[3][i] ^ flip]`.
fn interleave(isa: Isa, rows: [&[u8]; 4], flip: u8, to: &mut [[u8; 4]]) {
    dispatch(isa, Interleave { rows, flip, to });
}

/// A plain loop that the compiler vectorises for each instruction set.
struct Interleave<'a> {
    rows: [&'a [u8]; 4],
    flip: u8,
    to: &'a mut [[u8; 4]],
}

impl SimdOp for Interleave<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        interleave_bytes(self.rows, [[self.flip; 4], [0xFF; 4]], self.to);
    }
}

/// `to[i] = [(rows[0][i] ^ flips[0]) & keep[0], ..., (rows[3][i] ^ flips[3]) & keep[3]]`.
#[inline(always)]
pub(super) fn interleave_bytes(rows: [&[u8]; 4], [flips, keep]: [[u8; 4]; 2], to: &mut [[u8; 4]]) {
    let (flips, keep) = (u32::from_le_bytes(flips), u32::from_le_bytes(keep));
    let count = to.len();
    let [a, b, c, d] = rows.map(|row| &row[..count]);
    for at in 0..count {
        let [a, b, c, d] = [a, b, c, d].map(|row| u32::from(row[at]));
        to[at] = (((a | b << 8 | c << 16 | d << 24) ^ flips) & keep).to_le_bytes();
    }
}
