//! Transposition of bytes in registers: tiles of 16 by 16, and three interleaved planes.

use super::Isa;

/// The side of a tile.
const SIDE: usize = 16;

/// Columns of a band. Its rows and the rows that it becomes stay in the L1 cache.
#[cfg(target_arch = "x86_64")]
const BAND: usize = 64;

/// Transposes the whole 16-by-16 tiles of a matrix of bytes: `to[column][row] = from[row][column]`.
///
/// The strides are those of the rows on each side. Returns the rows and columns that were
/// transposed, both multiples of 16. They are 0 if this CPU has no fast path; the caller transposes
/// the rest.
///
/// # Panics
/// If a slice is shorter than its matrix.
pub fn transpose_byte_tiles(
    isa: Isa,
    [rows, columns]: [usize; 2],
    from: &[u8],
    from_stride: usize,
    to: &mut [u8],
    to_stride: usize,
) -> (usize, usize) {
    let (rows, columns) = (rows / SIDE * SIDE, columns / SIDE * SIDE);
    if rows == 0 || columns == 0 || isa.min(Isa::widest()) < Isa::Avx2 {
        return (0, 0);
    }
    assert!((rows - 1) * from_stride + columns <= from.len(), "the source holds its matrix");
    assert!((columns - 1) * to_stride + rows <= to.len(), "the target holds its matrix");
    #[cfg(target_arch = "x86_64")]
    for band in (0..columns).step_by(BAND) {
        let end = columns.min(band + BAND);
        for row in (0..rows).step_by(SIDE) {
            for column in (band..end).step_by(SIDE) {
                // SAFETY: `Isa::widest` detected AVX2, and the assertions keep both matrices, of
                // which this is a tile, inside their slices.
                unsafe {
                    let from = from.as_ptr().add(row * from_stride + column);
                    let to = to.as_mut_ptr().add(column * to_stride + row);
                    avx2_tile(from, from_stride, to, to_stride);
                }
            }
        }
    }
    (rows, columns)
}

/// Transposes one tile.
///
/// # Safety
/// The CPU has AVX2. 16 rows of 16 bytes can be read and written at these strides.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2_tile(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize) {
    use std::arch::x86_64::*;
    // SAFETY: the caller guarantees 16 readable rows of 16 bytes.
    let mut rows: [__m128i; SIDE] =
        std::array::from_fn(|row| unsafe { _mm_loadu_si128(from.add(row * from_stride).cast()) });
    // Each round rotates the eight bits of a byte's row and column by one, so four rounds swap the
    // two.
    for _ in 0..4 {
        let before = rows;
        for at in 0..SIDE / 2 {
            rows[2 * at] = _mm_unpacklo_epi8(before[at], before[at + SIDE / 2]);
            rows[2 * at + 1] = _mm_unpackhi_epi8(before[at], before[at + SIDE / 2]);
        }
    }
    for (row, bytes) in rows.into_iter().enumerate() {
        // SAFETY: the caller guarantees 16 writable rows of 16 bytes.
        unsafe { _mm_storeu_si128(to.add(row * to_stride).cast(), bytes) };
    }
}

/// Interleaves three planes: `to[at] = [planes[0][at], planes[1][at], planes[2][at]]`, in whole
/// groups of 16. Returns how many elements are done, 0 if this CPU has no fast path.
pub fn interleave_three_bytes(isa: Isa, planes: [&[u8]; 3], to: &mut [[u8; 3]]) -> usize {
    if isa.min(Isa::widest()) < Isa::Avx2 {
        return 0;
    }
    let shortest = planes.iter().fold(to.len(), |least, plane| least.min(plane.len()));
    let whole = shortest / SIDE * SIDE;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `Isa::widest` detected AVX2, and all four slices have `whole` elements.
    unsafe {
        avx2_threes(planes.map(<[u8]>::as_ptr), to.as_mut_ptr().cast(), whole);
    }
    whole
}

/// For each of the three vectors of 16 interleaved elements, the shuffle that takes the bytes of
/// each plane, with 0 for those of the others.
#[cfg(target_arch = "x86_64")]
const THREES: [[[u8; SIDE]; 3]; 3] = {
    let mut places = [[[0x80; SIDE]; 3]; 3];
    let mut at = 0;
    while at < 3 * SIDE {
        places[at / SIDE][at % 3][at % SIDE] = (at / 3) as u8;
        at += 1;
    }
    places
};

/// Interleaves three planes of `count` bytes, a multiple of 16.
///
/// # Safety
/// The CPU has AVX2. The planes can be read, and the result written.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2_threes(planes: [*const u8; 3], to: *mut u8, count: usize) {
    use std::arch::x86_64::*;
    // SAFETY: each shuffle has 16 bytes.
    let order =
        |vector: usize, plane: usize| unsafe { _mm_loadu_si128(THREES[vector][plane].as_ptr().cast()) };
    let order: [[__m128i; 3]; 3] =
        std::array::from_fn(|vector| std::array::from_fn(|plane| order(vector, plane)));
    for first in (0..count).step_by(SIDE) {
        // SAFETY: the caller guarantees `count` bytes of each plane.
        let bytes = planes.map(|plane| unsafe { _mm_loadu_si128(plane.add(first).cast()) });
        for (vector, order) in order.iter().enumerate() {
            let part = |plane: usize| _mm_shuffle_epi8(bytes[plane], order[plane]);
            let three = _mm_or_si128(_mm_or_si128(part(0), part(1)), part(2));
            // SAFETY: the caller guarantees three vectors for each 16 elements.
            unsafe { _mm_storeu_si128(to.add(3 * first + SIDE * vector).cast(), three) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_transposed_and_margins_left_alone() {
        for (rows, columns, from_stride, to_stride) in
            [(16, 16, 16, 16), (35, 50, 61, 40), (130, 90, 90, 130), (15, 64, 64, 15), (17, 3, 3, 17)]
        {
            let from: Vec<u8> = (0..rows * from_stride).map(|at| (at * 31 + at / 256) as u8).collect();
            for isa in Isa::available() {
                let mut to = vec![7; columns * to_stride];
                let size = [rows, columns];
                let (done_rows, done) =
                    transpose_byte_tiles(isa, size, &from, from_stride, &mut to, to_stride);
                let expected = if isa < Isa::Avx2 { [0; 2] } else { size.map(|side| side / 16 * 16) };
                assert!([done_rows, done] == expected || expected.contains(&0), "{isa:?} {size:?}");
                for (column, to) in to.chunks(to_stride).enumerate() {
                    for (row, byte) in to.iter().enumerate() {
                        let is_done = column < done && row < done_rows;
                        let expected = if is_done { from[row * from_stride + column] } else { 7 };
                        assert_eq!(*byte, expected, "{isa:?} {size:?} {row} {column}");
                    }
                }
            }
        }
    }

    #[test]
    fn three_planes_are_interleaved() {
        let planes: [Vec<u8>; 3] =
            [3, 7, 11].map(|step| (0..100).map(|at| (at * step + step) as u8).collect());
        for isa in Isa::available() {
            let mut to = [[9; 3]; 90];
            let done = interleave_three_bytes(isa, [&planes[0], &planes[1], &planes[2]], &mut to);
            assert_eq!(done, if isa < Isa::Avx2 { 0 } else { 80 }, "{isa:?}");
            for (at, to) in to.into_iter().enumerate() {
                let expected = if at < done { [0, 1, 2].map(|plane| planes[plane][at]) } else { [9; 3] };
                assert_eq!(to, expected, "{isa:?} {at}");
            }
        }
    }
}
