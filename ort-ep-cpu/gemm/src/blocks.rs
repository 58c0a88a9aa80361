//! GEMM on block-quantized weights: the right operand is read in place and dequantized panel by
//! panel.

use std::ops::Range;

use half::{bf16, f16};

use super::{Cpu, GemmError};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::convert::{f32_from_bf16, f32_from_f16};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::simd::blocks::{BlockLayout, BlockRow, TILE, decode_rows, dot};
use ort_cpu_vector::simd::blocks_bytes::{Columns, Side, multiply, quantize, side_lens};
use ort_cpu_vector::simd::transpose_tiles;

/// Floats as unaligned bytes.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    /// IEEE single precision.
    F32(&'a [u8]),
    /// IEEE half precision.
    F16(&'a [u8]),
    /// bfloat16.
    BF16(&'a [u8]),
}

/// The most values that [`Numbers::read`] reads at a time, bounded by its stack buffer.
pub(super) const AT_ONCE: usize = 128;

impl Numbers<'_> {
    /// Returns the number of values.
    pub fn len(&self) -> usize {
        match self {
            Numbers::F32(bytes) => bytes.len() / 4,
            Numbers::F16(bytes) | Numbers::BF16(bytes) => bytes.len() / 2,
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the value at `index`.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn at(&self, index: usize) -> f32 {
        match self {
            Numbers::F32(bytes) => f32::from_ne_bytes(bytes.as_chunks().0[index]),
            Numbers::F16(bytes) => f16::from_ne_bytes(bytes.as_chunks().0[index]).to_f32(),
            Numbers::BF16(bytes) => bf16::from_ne_bytes(bytes.as_chunks().0[index]).to_f32(),
        }
    }

    /// Reads the values from `first` on into `to`, at most `AT_ONCE`.
    pub(super) fn read(&self, isa: Isa, first: usize, to: &mut [f32]) {
        let count = to.len();
        match self {
            Numbers::F32(bytes) => {
                bytemuck::cast_slice_mut(to).copy_from_slice(&bytes[first * 4..][..count * 4]);
            }
            Numbers::F16(bytes) => {
                let mut halves = [f16::ZERO; AT_ONCE];
                let halves = &mut halves[..count];
                bytemuck::cast_slice_mut(halves).copy_from_slice(&bytes[first * 2..][..count * 2]);
                f32_from_f16(isa, halves, to);
            }
            Numbers::BF16(bytes) => {
                let mut halves = [bf16::ZERO; AT_ONCE];
                let halves = &mut halves[..count];
                bytemuck::cast_slice_mut(halves).copy_from_slice(&bytes[first * 2..][..count * 2]);
                f32_from_bf16(isa, halves, to);
            }
        }
    }
}

/// The zero points of blocks.
#[derive(Clone, Copy, Debug)]
pub enum Zeros<'a> {
    /// The middle of the range, such as 8 for 4 bits.
    Middle,
    /// Quantized zero points, bit-packed column by column as the weights are.
    Quantized(&'a [u8]),
    /// Floating-point zero points.
    Numbers(Numbers<'a>),
}

/// Block-quantized weights of `k` rows by `columns` columns. The quantized values of a column are
/// contiguous in blocks, and so are its scales and zero points.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    quantized: &'a [u8],
    scales: Numbers<'a>,
    zeros: Zeros<'a>,
    /// The group index of each row, which selects its scale and zero point. If empty, a row's block
    /// is its group.
    groups: &'a [i32],
    layout: BlockLayout,
    pub(super) k: usize,
    pub(super) columns: usize,
}

impl<'a> Blocks<'a> {
    /// The maximum number of rows of A for which dequantizing the weights on the fly beats packing
    /// panels.
    pub const FEW: usize = FEW;

    /// Creates weights of `shape` (k, columns).
    ///
    /// # Errors
    ///
    /// If the layout is not supported, or a slice does not have the length that the shape requires.
    pub fn new(
        layout: BlockLayout,
        [k, columns]: [usize; 2],
        quantized: &'a [u8],
        scales: Numbers<'a>,
        zeros: Zeros<'a>,
    ) -> Result<Self, GemmError> {
        if !matches!(layout.bits, 2 | 4 | 8) || layout.block < 16 || !layout.block.is_power_of_two() {
            return Err(GemmError::Shape(
                "quantized values have 2, 4 or 8 bits, and blocks a power of two of at least 16",
            ));
        }
        let blocks = k.div_ceil(layout.block);
        check("block-quantized weights", product(&[columns, blocks, layout.bytes()]), quantized.len())?;
        check("the scales of blocks", product(&[columns, blocks]), scales.len())?;
        match zeros {
            Zeros::Middle => {}
            Zeros::Quantized(bytes) => {
                let row = (blocks * layout.bits).div_ceil(8);
                check("the zero points of blocks", product(&[columns, row]), bytes.len())?;
            }
            Zeros::Numbers(numbers) => {
                check("the zero points of blocks", product(&[columns, blocks]), numbers.len())?;
            }
        }
        Ok(Blocks { quantized, scales, zeros, groups: &[], layout, k, columns })
    }

    /// Returns the same weights with one group index for each of the k rows. A row then has the
    /// scale and zero point of its group instead of its block's.
    ///
    /// # Errors
    ///
    /// If there are fewer groups than rows, or a group is out of range.
    pub fn with_groups(self, groups: &'a [i32]) -> Result<Self, GemmError> {
        let blocks = self.blocks();
        if groups.len() < self.k {
            return Err(GemmError::TooShort {
                what: "the groups of rows",
                needed: self.k,
                len: groups.len(),
            });
        }
        if groups.iter().any(|group| usize::try_from(*group).map_or(true, |group| group >= blocks)) {
            return Err(GemmError::Shape("a group is outside of the blocks"));
        }
        Ok(Blocks { groups, ..self })
    }

    /// Returns k and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.k, self.columns]
    }

    /// Blocks of a column.
    fn blocks(&self) -> usize {
        self.k.div_ceil(self.layout.block)
    }

    /// The quantized values of some blocks of a column.
    fn quantized(&self, column: usize, blocks: &Range<usize>) -> &'a [u8] {
        let bytes = self.layout.bytes();
        &self.quantized[(column * self.blocks() + blocks.start) * bytes..][..blocks.len() * bytes]
    }

    /// Reads the scales and zero points of some blocks of a column.
    fn parameters(
        &self,
        isa: Isa,
        column: usize,
        blocks: &Range<usize>,
        scales: &mut [f32],
        zeros: &mut [f32],
    ) {
        let first = column * self.blocks() + blocks.start;
        self.scales.read(isa, first, scales);
        let bits = self.layout.bits;
        match self.zeros {
            Zeros::Middle => zeros.fill((1_u32 << (bits - 1)) as f32),
            Zeros::Numbers(numbers) => numbers.read(isa, first, zeros),
            // Fast path for the common case: two 4-bit zero points to a byte.
            Zeros::Quantized(bytes) if bits == 4 && blocks.start.is_multiple_of(2) => {
                let row = &bytes[column * self.blocks().div_ceil(2) + blocks.start / 2..];
                for (pair, byte) in zeros.chunks_mut(2).zip(row) {
                    pair[0] = f32::from(byte & 15);
                    if let Some(second) = pair.get_mut(1) {
                        *second = f32::from(byte >> 4);
                    }
                }
            }
            Zeros::Quantized(bytes) => {
                let row = &bytes[column * (self.blocks() * bits).div_ceil(8)..];
                let mask = ((1_u32 << bits) - 1) as u8;
                for (zero, block) in zeros.iter_mut().zip(blocks.clone()) {
                    *zero = f32::from((row[block * bits / 8] >> (block * bits % 8)) & mask);
                }
            }
        }
    }

    /// The blocks that are dequantized together: whole blocks, or parts of large ones.
    fn unit(&self) -> BlockLayout {
        BlockLayout { block: self.layout.block.min(TILE_STEPS), ..self.layout }
    }

    /// Dequantizes `steps` and `columns` (at most a panel's `width`) into a panel: k step by k
    /// step, with the columns contiguous. `steps` starts at a multiple of [`STEPS_ALIGNED`]. The
    /// panel's padding columns are left unchanged.
    pub(super) fn pack(
        &self,
        isa: Isa,
        steps: Range<usize>,
        columns: Range<usize>,
        to: &mut [f32],
        width: usize,
    ) {
        // `SIDE` columns by `TILE_STEPS` k steps are what the stack buffer of `pack_tile` holds.
        for column in columns.clone().step_by(SIDE) {
            let count = SIDE.min(columns.end - column);
            for step in steps.clone().step_by(TILE_STEPS) {
                let end = (step + TILE_STEPS).min(steps.end);
                let to = &mut to[(step - steps.start) * width + column - columns.start..];
                if self.groups.is_empty() {
                    self.pack_tile(isa, step..end, column..column + count, to, width);
                } else {
                    self.pack_grouped(step..end, column..column + count, to, width);
                }
            }
        }
    }

    fn pack_tile(&self, isa: Isa, steps: Range<usize>, columns: Range<usize>, to: &mut [f32], width: usize) {
        let (unit, block) = (self.unit(), self.layout.block);
        let units = steps.len().div_ceil(unit.block);
        let (mut scales, mut zeros) = ([[0.0; TILE_STEPS / 16]; SIDE], [[0.0; TILE_STEPS / 16]; SIDE]);
        let blocks = steps.start / block..(steps.start / block + units);
        for (at, column) in columns.clone().enumerate() {
            self.parameters(isa, column, &blocks, &mut scales[at][..units], &mut zeros[at][..units]);
        }
        let mut rows = [BlockRow { quantized: &[], scales: &[], zeros: &[] }; SIDE];
        for (at, column) in columns.clone().enumerate() {
            // A part of a large block is treated as a block of its own.
            let first = column * self.blocks() * self.layout.bytes() + steps.start * self.layout.bits / 8;
            rows[at] = BlockRow {
                quantized: &self.quantized[first..][..units * unit.bytes()],
                scales: &scales[at][..units],
                zeros: &zeros[at][..units],
            };
        }
        let mut weights = [0.0; SIDE * TILE_STEPS];
        decode_rows(isa, unit, &rows[..columns.len()], &mut weights, TILE_STEPS);
        let (places, bytes) = (unit.places(), unit.bytes());
        for index in 0..units {
            let count = unit.block.min(steps.len() - index * unit.block);
            // `decode_rows` orders a block by bit position, so each position yields every
            // `places`-th k step.
            for place in 0..places.min(count) {
                let from = &weights[index * unit.block + place * bytes..];
                let to = &mut to[(index * unit.block + place) * width..];
                let shape = (columns.len(), (count - place).div_ceil(places));
                spread(isa, shape, from, to, places * width);
            }
        }
    }

    /// Like `pack_tile`, one weight at a time, each with the scale of its group.
    fn pack_grouped(&self, steps: Range<usize>, columns: Range<usize>, to: &mut [f32], width: usize) {
        let bits = self.layout.bits;
        let mask = ((1_u32 << bits) - 1) as u8;
        for (at, column) in columns.enumerate() {
            let quantized = self.quantized(column, &(0..self.blocks()));
            for (row, step) in steps.clone().enumerate() {
                let group = self.groups[step] as usize;
                let (mut scale, mut zero) = ([0.0], [0.0]);
                self.parameters(Isa::Scalar, column, &(group..group + 1), &mut scale, &mut zero);
                let value = (quantized[step * bits / 8] >> (step * bits % 8)) & mask;
                to[row * width + at] = (f32::from(value) - zero[0]) * scale[0];
            }
        }
    }

    /// Whether [`Blocks::multiply_few`] accepts this many rows of A.
    pub fn takes(&self, rows: usize) -> bool {
        // Weights with row groups have no blocks of one scale, which the dot products need.
        (1..=FEW).contains(&rows) && self.groups.is_empty() && self.k > 0
    }

    /// Returns the length of a row of A as [`Blocks::multiply_few`] takes it.
    pub fn side_len(&self) -> usize {
        self.blocks() * self.layout.block
    }

    /// The layout of the quantized values.
    pub fn layout(&self) -> BlockLayout {
        self.layout
    }

    /// Small-M GEMM: `to[column * rows + row]` is the dot product of a row of `sides` and a column.
    /// Each row has [`Blocks::side_len`] elements in the order that
    /// [`ort_cpu_vector::simd::blocks::arrange`] produces. Each weight is read once for all rows.
    ///
    /// # Errors
    ///
    /// If there are too many rows, or a slice is too short.
    pub fn multiply_few(
        &self,
        cpu: Cpu,
        sides: &[f32],
        rows: usize,
        to: &mut [f32],
    ) -> Result<(), GemmError> {
        if !self.takes(rows) {
            return Err(GemmError::Shape("these rows are no few rows"));
        }
        check("the rows on the left", Some(rows * self.side_len()), sides.len())?;
        check("a result", Some(rows * self.columns), to.len())?;
        let least = (WORTH_A_TASK / (rows * self.k)).next_multiple_of(TILE[0]).max(TILE[0]);
        for_each_row_chunk_mut(cpu.threads, to, rows, least, |first, results| {
            for (tile, results) in results.chunks_mut(TILE[0] * rows).enumerate() {
                let column = first + tile * TILE[0];
                self.few_columns(cpu.isa, column..column + results.len() / rows, sides, results);
            }
        });
        Ok(())
    }

    /// Whether [`Blocks::multiply_few_bytes`] accepts this many rows of A.
    pub fn takes_bytes(&self, rows: usize) -> bool {
        let plain = !matches!(self.zeros, Zeros::Numbers(_)) && matches!(self.scales, Numbers::F32(_));
        self.takes(rows) && matches!(self.layout.bits, 4 | 8) && plain
    }

    /// Returns the `f32` elements of scratch per row of A that [`Blocks::multiply_few_bytes`]
    /// quantizes.
    pub fn bytes_side_len(layout: BlockLayout, k: usize) -> usize {
        let [numbers, scales] = side_lens(layout.block, k.div_ceil(layout.block));
        numbers.div_ceil(4) + 2 * scales
    }

    /// Small-M GEMM in 8 bits: `to[column * rows + row]` is the dot product of a row of `lhs` (k
    /// elements) and a column. The rows are first quantized to 8 bits, block by block. `memory`
    /// holds [`Blocks::bytes_side_len`] elements for each row.
    ///
    /// # Errors
    ///
    /// If there are too many rows, the weights are of another kind, or a slice is too short.
    pub fn multiply_few_bytes(
        &self,
        cpu: Cpu,
        lhs: &[f32],
        rows: usize,
        memory: &mut [f32],
        to: &mut [f32],
    ) -> Result<(), GemmError> {
        let (true, Numbers::F32(scales)) = (self.takes_bytes(rows), self.scales) else {
            return Err(GemmError::Shape("these rows and weights are not multiplied in 8 bits"));
        };
        let len = Blocks::bytes_side_len(self.layout, self.k);
        check("the rows on the left", Some(rows * self.k), lhs.len())?;
        check("the memory of the rows on the left", Some(rows * len), memory.len())?;
        check("a result", Some(rows * self.columns), to.len())?;
        let [numbers_len, scales_len] = side_lens(self.layout.block, self.blocks());
        let mut sides = [Side { numbers: &[], scales: &[], sums: &[] }; FEW];
        for ((side, memory), from) in
            sides.iter_mut().zip(memory.chunks_exact_mut(len)).zip(lhs.chunks(self.k))
        {
            // The scratch of a row: scales, sums, then the quantized numbers as bytes.
            let (of_blocks, numbers) = memory.split_at_mut(2 * scales_len);
            let (scales, sums) = of_blocks.split_at_mut(scales_len);
            let numbers = &mut bytemuck::cast_slice_mut(numbers)[..numbers_len];
            quantize(cpu.isa, self.layout, from, numbers, scales, sums);
            *side = Side { numbers, scales, sums };
        }
        let row = (self.blocks() * self.layout.bits).div_ceil(8);
        let least = (WORTH_A_TASK / (rows * self.k)).next_multiple_of(TILE[0]).max(TILE[0]);
        for_each_row_chunk_mut(cpu.threads, to, rows, least, |first, results| {
            let columns = Columns {
                layout: self.layout,
                blocks: self.blocks(),
                quantized: &self.quantized[first * self.blocks() * self.layout.bytes()..],
                scales: &scales[first * self.blocks() * 4..],
                zeros: match self.zeros {
                    Zeros::Quantized(zeros) => Some(&zeros[first * row..]),
                    _ => None,
                },
            };
            multiply(cpu.isa, &columns, &sides[..rows], results);
        });
        Ok(())
    }

    fn few_columns(&self, isa: Isa, columns: Range<usize>, sides: &[f32], to: &mut [f32]) {
        let (all, block, len) = (self.blocks(), self.layout.block, self.side_len());
        let rows = sides.len() / len;
        let mut accumulators = [[[0.0; TILE[1]]; TILE[0]]; FEW / TILE[1]];
        for start in (0..all).step_by(AT_ONCE) {
            let blocks = start..(start + AT_ONCE).min(all);
            let count = blocks.len();
            let (mut scales, mut zeros) = ([[0.0; AT_ONCE]; TILE[0]], [[0.0; AT_ONCE]; TILE[0]]);
            for (at, column) in columns.clone().enumerate() {
                self.parameters(isa, column, &blocks, &mut scales[at][..count], &mut zeros[at][..count]);
            }
            let weights: [BlockRow<'_>; TILE[0]] = std::array::from_fn(|at| BlockRow {
                quantized: if at < columns.len() { self.quantized(columns.start + at, &blocks) } else { &[] },
                scales: &scales[at][..count],
                zeros: &zeros[at][..count],
            });
            for (part, accumulators) in (0..rows).step_by(TILE[1]).zip(&mut accumulators) {
                let side = |row: usize| &sides[row * len + start * block..][..count * block];
                // Missing rows repeat the last one, and the slice below drops them.
                let all: [&[f32]; TILE[1]] = std::array::from_fn(|at| side((part + at).min(rows - 1)));
                dot(
                    isa,
                    self.layout,
                    &weights[..columns.len()],
                    &all[..TILE[1].min(rows - part)],
                    accumulators,
                );
            }
        }
        for (column, to) in to.chunks_mut(rows).enumerate() {
            for (row, to) in to.iter_mut().enumerate() {
                *to = accumulators[row / TILE[1]][column][row % TILE[1]];
            }
        }
    }
}

/// Quantized values of a column that are dequantized at a time.
pub(super) const TILE_STEPS: usize = 128;

/// k blocks start at multiples of this. Those are whole bytes and, unless a block is larger, whole
/// quantization blocks.
pub(super) const STEPS_ALIGNED: usize = TILE_STEPS;

/// Columns that are dequantized at a time.
pub(super) const SIDE: usize = 8;

/// The maximum number of rows of A for which dequantizing the weights on the fly beats packing
/// panels.
const FEW: usize = 8;

/// Multiply-adds that are worth a task of their own.
const WORTH_A_TASK: usize = 1 << 17;

fn product(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(1_usize, |product, size| product.checked_mul(*size))
}

fn check(what: &'static str, needed: Option<usize>, len: usize) -> Result<(), GemmError> {
    match needed {
        Some(needed) if needed == len => Ok(()),
        Some(needed) if needed > len => Err(GemmError::TooShort { what, needed, len }),
        _ => Err(GemmError::Shape("block-quantized weights are longer than their shape says")),
    }
}

/// Writes the transpose of a matrix of `shape` (panel columns, k steps), whose columns start
/// [`TILE_STEPS`] apart.
pub(super) fn spread(
    isa: Isa,
    (columns, steps): (usize, usize),
    from: &[f32],
    to: &mut [f32],
    stride: usize,
) {
    let (source, target) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
    let (done, done_steps) = transpose_tiles(isa, [columns, steps], source, TILE_STEPS, target, stride);
    // What the 8-by-8 tiles did not cover.
    for column in 0..columns {
        let first = if column < done { done_steps } else { 0 };
        for step in first..steps {
            to[step * stride + column] = from[column * TILE_STEPS + step];
        }
    }
}
