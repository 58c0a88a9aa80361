//! Transposition of 8-by-8 tiles of 32-bit values in registers.

use super::Isa;

/// The side of a tile.
const SIDE: usize = 8;

/// Transposes the whole 8-by-8 tiles of a matrix of 32-bit values:
/// `to[column][row] = from[row][column]`.
///
/// The strides are those of the rows on each side, in values. Returns the rows and columns that
/// were transposed, both multiples of 8. They are 0 if this CPU has no fast path; the caller
/// transposes the rest.
///
/// # Panics
/// If a slice is shorter than its matrix.
pub fn transpose_tiles(
    isa: Isa,
    [rows, columns]: [usize; 2],
    from: &[[u8; 4]],
    from_stride: usize,
    to: &mut [[u8; 4]],
    to_stride: usize,
) -> (usize, usize) {
    let (rows, columns) = (rows / SIDE * SIDE, columns / SIDE * SIDE);
    if rows == 0 || columns == 0 || isa.min(Isa::widest()) < Isa::Avx2 {
        return (0, 0);
    }
    assert!((rows - 1) * from_stride + columns <= from.len(), "the source holds its matrix");
    assert!((columns - 1) * to_stride + rows <= to.len(), "the target holds its matrix");
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `Isa::widest` detected AVX2, and the assertions keep both matrices inside their
    // slices.
    unsafe {
        avx2_tiles((rows, columns), from.as_ptr().cast(), from_stride, to.as_mut_ptr().cast(), to_stride);
    }
    (rows, columns)
}

/// Transposes all tiles.
///
/// # Safety
/// The CPU has AVX2. Both matrices, whose sides are multiples of a tile, are inside their memory.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2_tiles(
    (rows, columns): (usize, usize),
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
) {
    for row in (0..rows).step_by(SIDE) {
        for column in (0..columns).step_by(SIDE) {
            // SAFETY: the tile is inside both matrices.
            unsafe {
                avx2_tile(
                    from.add(row * from_stride + column),
                    from_stride,
                    to.add(column * to_stride + row),
                    to_stride,
                );
            }
        }
    }
}

/// Transposes one tile.
///
/// # Safety
/// The CPU has AVX2. Eight rows of eight values can be read and written at these strides.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn avx2_tile(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    use std::arch::x86_64::*;
    // SAFETY: the caller guarantees eight readable rows of eight values.
    let r: [__m256; SIDE] =
        std::array::from_fn(|row| unsafe { _mm256_loadu_ps(from.add(row * from_stride)) });
    // Interleaves pairs of rows, then pairs of pairs, then the two 128-bit halves.
    let pair = |a: __m256, b: __m256| (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let four = |a: __m256, b: __m256| {
        (_mm256_shuffle_ps::<0b01_00_01_00>(a, b), _mm256_shuffle_ps::<0b11_10_11_10>(a, b))
    };
    let quarter = |r0, r1, r2, r3| {
        let (low01, high01) = pair(r0, r1);
        let (low23, high23) = pair(r2, r3);
        let (c0, c1) = four(low01, low23);
        let (c2, c3) = four(high01, high23);
        [c0, c1, c2, c3]
    };
    let top = quarter(r[0], r[1], r[2], r[3]);
    let bottom = quarter(r[4], r[5], r[6], r[7]);
    for index in 0..4 {
        let low = _mm256_permute2f128_ps::<0x20>(top[index], bottom[index]);
        let high = _mm256_permute2f128_ps::<0x31>(top[index], bottom[index]);
        // SAFETY: the caller guarantees eight writable rows of eight values.
        unsafe {
            _mm256_storeu_ps(to.add(index * to_stride), low);
            _mm256_storeu_ps(to.add((index + 4) * to_stride), high);
        }
    }
}
