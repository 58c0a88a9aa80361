//! What the codes of a matrix in blocks stand for.

use crate::grid::{BlockQuantizer, Scheme};
use crate::weight::Weight;

/// A quantized matrix, in the layout of `MatMulNBits`.
pub(super) struct BlockValues<'r> {
    k: usize,
    n: usize,
    block_size: usize,
    bits: usize,
    /// The blocks of a column, and the bytes of its codes and of its zero points.
    blocks: usize,
    column_bytes: usize,
    point_bytes: usize,
    codes: &'r [u8],
    /// Of each column, those of its blocks.
    scales: Vec<f32>,
    points: ZeroPoints<'r>,
}

enum ZeroPoints<'r> {
    /// Symmetric blocks have the middle of the codes.
    Middle(f32),
    /// Codes, each column from a byte on.
    Packed(&'r [u8]),
    Numbers(Vec<f32>),
}

impl<'r> BlockValues<'r> {
    /// Reads results of quantization. Zero points of [`Scheme::has_float_points`] have type `T`.
    pub(super) fn new<T: Weight>(
        scheme: &Scheme,
        codes: &'r [u8],
        scales: Vec<f32>,
        zero_points: &'r [u8],
    ) -> BlockValues<'r> {
        let BlockQuantizer { k, n, block_size, bits, is_symmetric, .. } = scheme.blocks;
        let points = if is_symmetric {
            ZeroPoints::Middle(f32::from(bits.middle()))
        } else if scheme.has_float_points() {
            ZeroPoints::Numbers(wide::<T>(zero_points))
        } else {
            ZeroPoints::Packed(zero_points)
        };
        let (bits, blocks) = (bits.stored(), k.div_ceil(block_size));
        let (column_bytes, point_bytes) = (blocks * block_size * bits / 8, (blocks * bits).div_ceil(8));
        BlockValues { k, n, block_size, bits, blocks, column_bytes, point_bytes, codes, scales, points }
    }

    /// Reads the results of a job.
    pub(super) fn of_results<T: Weight>(scheme: &Scheme, results: &'r [Vec<u8>]) -> BlockValues<'r> {
        let result = |index: usize| results.get(index).map(Vec::as_slice).unwrap_or_default();
        BlockValues::new::<T>(scheme, result(0), wide::<T>(result(1)), result(2))
    }

    /// The block of a row.
    pub(super) fn block(&self, row: usize) -> usize {
        row / self.block_size
    }

    /// The value of the weight in a row, of this block, and a column.
    #[inline]
    pub(super) fn value(&self, row: usize, block: usize, column: usize) -> f32 {
        let code = self.unpacked(self.codes, column * self.column_bytes, row);
        let grid = column * self.blocks + block;
        let scale = self.scales.get(grid).copied().unwrap_or_default();
        let point = match &self.points {
            ZeroPoints::Middle(middle) => *middle,
            ZeroPoints::Packed(points) => f32::from(self.unpacked(points, column * self.point_bytes, block)),
            ZeroPoints::Numbers(points) => points.get(grid).copied().unwrap_or_default(),
        };
        (f32::from(code) - point) * scale
    }

    /// The little-endian bytes of the matrix, `[k, n]` or, transposed, `[n, k]`.
    pub(super) fn bytes<T: Weight>(&self, is_transposed: bool) -> Vec<u8> {
        let (outer, inner) = if is_transposed { (self.n, self.k) } else { (self.k, self.n) };
        let mut bytes = Vec::with_capacity(outer * inner * size_of::<T>());
        let mut line: Vec<T> = Vec::with_capacity(inner);
        for first in 0..outer {
            line.clear();
            let place = |second: usize| if is_transposed { (second, first) } else { (first, second) };
            line.extend((0..inner).map(|second| {
                let (row, column) = place(second);
                T::narrow(self.value(row, self.block(row), column))
            }));
            bytes.extend(T::bytes(&line));
        }
        bytes
    }

    /// A code of a list that begins at a byte.
    #[inline]
    fn unpacked(&self, bytes: &[u8], start: usize, place: usize) -> u8 {
        let per_byte = 8 / self.bits;
        let byte = bytes.get(start + place / per_byte).copied().unwrap_or_default();
        // In 32 bits, because a byte cannot be shifted by 8.
        (u32::from(byte) >> (place % per_byte * self.bits) & ((1 << self.bits) - 1)) as u8
    }
}

/// Numbers as float32.
fn wide<T: Weight>(bytes: &[u8]) -> Vec<f32> {
    let mut wide = vec![0.0; bytes.len() / size_of::<T>()];
    T::widen_bytes(bytes, &mut wide);
    wide
}
