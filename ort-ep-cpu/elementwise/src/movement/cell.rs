//! The elements that movements move: the bytes of an element, or the index of a string.

use ort_cpu_threads::interrupt::{PIECE, pieces, pieces_mut};
use ort_cpu_vector::simd::{Isa, interleave_three_bytes, transpose_byte_tiles, transpose_tiles};

/// An element that can be moved.
pub(super) trait Cell: Copy + Send + Sync + PartialEq + 'static {
    /// The padding element: zero, or the empty string.
    const ZERO: Self;

    /// Transposes part of a matrix with SIMD: `to[column][row] = from[row][column]`, each side with
    /// its own row stride. Returns how many rows and columns of the source are done; the default
    /// does none.
    fn transpose_tiles(
        _size: (usize, usize),
        (_from, _from_stride): (&[Self], usize),
        (_to, _to_stride): (&mut [Self], usize),
    ) -> (usize, usize) {
        (0, 0)
    }

    /// Interleaves the first elements of three planes with SIMD. Returns how many are done; the
    /// default does none.
    fn interleave_three(_planes: [&[Self]; 3], _to: &mut [[Self; 3]]) -> usize {
        0
    }
}

// Byte arrays have an alignment of 1, so weights that are unaligned in a file need no copy. Moves
// of them compile to the same instructions as moves of integers of their size.
macro_rules! byte_cells {
    ($($size:literal)*) => {
        $(impl Cell for [u8; $size] {
            const ZERO: Self = [0; $size];
        })*
    };
}

byte_cells!(2 8 16);

impl Cell for [u8; 1] {
    const ZERO: Self = [0];

    fn transpose_tiles(
        size: (usize, usize),
        (from, from_stride): (&[Self], usize),
        (to, to_stride): (&mut [Self], usize),
    ) -> (usize, usize) {
        let (from, to) = (from.as_flattened(), to.as_flattened_mut());
        transpose_byte_tiles(Isa::current(), [size.0, size.1], from, from_stride, to, to_stride)
    }

    fn interleave_three(planes: [&[Self]; 3], to: &mut [[Self; 3]]) -> usize {
        let planes = planes.map(|plane| plane.as_flattened());
        interleave_three_bytes(Isa::current(), planes, bytemuck::cast_slice_mut(to))
    }
}

impl Cell for [u8; 4] {
    const ZERO: Self = [0; 4];

    fn transpose_tiles(
        size: (usize, usize),
        (from, from_stride): (&[Self], usize),
        (to, to_stride): (&mut [Self], usize),
    ) -> (usize, usize) {
        transpose_tiles(Isa::current(), [size.0, size.1], from, from_stride, to, to_stride)
    }
}

/// The index of a string among all strings of a node's operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(pub(super) usize);

impl Cell for Place {
    /// An index that no string has.
    const ZERO: Self = Place(usize::MAX);
}

/// Unpacks the elements of a sub-byte tensor to one byte each. The first element is in the lowest
/// bits.
pub(super) fn unpack(bytes: &[u8], bits: u32) -> Vec<u8> {
    let mask = (1u8 << bits) - 1;
    let mut cells = Vec::with_capacity(bytes.len() * (8 / bits) as usize);
    for bytes in pieces(bytes) {
        let places = |&byte: &u8| (0..8 / bits).map(move |place| (byte >> (place * bits)) & mask);
        cells.extend(bytes.iter().flat_map(places));
    }
    cells
}

/// Packs elements, the inverse of [`unpack`]. Bits after the last element are zero.
pub(super) fn pack(cells: &[u8], bits: u32, bytes: &mut [u8]) {
    let per_byte = (8 / bits) as usize;
    for (bytes, cells) in pieces_mut(bytes).zip(cells.chunks(PIECE * per_byte)) {
        for (byte, cells) in bytes.iter_mut().zip(cells.chunks(per_byte)) {
            *byte = cells.iter().rev().fold(0, |packed, cell| (packed << bits) | cell);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_is_reversible() {
        for (bits, count) in [(4, 5), (4, 4), (2, 7), (2, 8)] {
            let cells: Vec<u8> = (0..count).map(|index| (index * 3 + 1) & ((1 << bits) - 1)).collect();
            let mut bytes = vec![0xff; (cells.len() * bits as usize).div_ceil(8)];
            pack(&cells, bits, &mut bytes);
            assert_eq!(&unpack(&bytes, bits)[..cells.len()], cells);
        }
        let mut bytes = [0; 1];
        pack(&[1, 2], 4, &mut bytes);
        assert_eq!(bytes, [0x21], "the first element is in the low bits");
    }
}
