//! From coefficients to pixels, bit-exact with libjpeg and libjpeg-turbo.
//!
//! The inverse DCT uses 13-bit constants. Chroma upsampling interpolates with alternating rounding,
//! as the standard's ImageDecoder requires. YCbCr conversion uses 16-bit constants.

use std::num::Wrapping;

/// Fractional bits of the DCT constants.
const BITS: usize = 13;
/// Extra fractional bits between the two passes.
const PASS: usize = 2;

const C_0_298631336: i32 = 2446;
const C_0_390180644: i32 = 3196;
const C_0_541196100: i32 = 4433;
const C_0_765366865: i32 = 6270;
const C_0_899976223: i32 = 7373;
const C_1_175875602: i32 = 9633;
const C_1_501321110: i32 = 12299;
const C_1_847759065: i32 = 15137;
const C_1_961570560: i32 = 16069;
const C_2_053119869: i32 = 16819;
const C_2_562915447: i32 = 20995;
const C_3_072711026: i32 = 25172;

/// Computes the 8-point inverse DCT, scaled by 2^13 and the square root of 8. Coefficients of
/// damaged files wrap around.
fn transform(input: [i32; 8]) -> [i32; 8] {
    let [i0, i1, i2, i3, i4, i5, i6, i7] = input.map(Wrapping);
    let times = |value: Wrapping<i32>, constant: i32| value * Wrapping(constant);
    // The algorithm of Loeffler, Ligtenberg and Moschytz (1989), as in libjpeg's `jidctint`.
    let z = times(i2 + i6, C_0_541196100);
    let (even2, even3) = (z - times(i6, C_1_847759065), z + times(i2, C_0_765366865));
    let (even0, even1) = ((i0 + i4) << BITS, (i0 - i4) << BITS);
    let (a, d, b, c) = (even0 + even3, even0 - even3, even1 + even2, even1 - even2);
    let z5 = times(i7 + i3 + i5 + i1, C_1_175875602);
    let z1 = -times(i7 + i1, C_0_899976223);
    let z2 = -times(i5 + i3, C_2_562915447);
    let z3 = z5 - times(i7 + i3, C_1_961570560);
    let z4 = z5 - times(i5 + i1, C_0_390180644);
    let odd0 = times(i7, C_0_298631336) + z1 + z3;
    let odd1 = times(i5, C_2_053119869) + z2 + z4;
    let odd2 = times(i3, C_3_072711026) + z2 + z3;
    let odd3 = times(i1, C_1_501321110) + z1 + z4;
    [a + odd3, b + odd2, c + odd1, d + odd0, d - odd0, c - odd1, b - odd2, a - odd3].map(|value| value.0)
}

fn descale(value: i32, bits: usize) -> i32 {
    // Rounds to nearest by adding a half before the shift.
    value.wrapping_add(1 << (bits - 1)) >> bits
}

fn transposed(rows: &[[i32; 8]; 8]) -> [[i32; 8]; 8] {
    std::array::from_fn(|column| std::array::from_fn(|row| rows[row][column]))
}

/// Dequantizes a block and returns its samples.
pub(super) fn samples(block: &[i16; 64], table: &[u16; 64]) -> [u8; 64] {
    let step = |at: usize| i32::from(block[at]).wrapping_mul(i32::from(table[at]));
    // Many blocks of a smooth image have only a DC coefficient.
    if block[1..].iter().all(|coefficient| *coefficient == 0) {
        return [sample(descale(step(0) << PASS, PASS + 3)); 64];
    }
    let rows: [[i32; 8]; 8] = std::array::from_fn(|row| std::array::from_fn(|column| step(row * 8 + column)));
    // Columns first, with two extra bits, then rows: another order would round differently.
    let columns = transposed(&rows).map(|column| transform(column).map(|value| descale(value, BITS - PASS)));
    let rows =
        transposed(&columns).map(|row| transform(row).map(|value| sample(descale(value, BITS + PASS + 3))));
    std::array::from_fn(|at| rows[at / 8][at % 8])
}

fn sample(value: i32) -> u8 {
    // Samples are centered at 128; the saturation serves damaged files.
    value.saturating_add(128).clamp(0, 255) as u8
}

/// The samples of one component.
pub(super) struct Plane<'a> {
    pub(super) samples: &'a [u8],
    /// The distance between rows.
    pub(super) stride: usize,
    /// Rows and columns that belong to the image, without padding.
    pub(super) height: usize,
    pub(super) width: usize,
    /// Image rows and columns per sample.
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Plane<'_> {
    fn row(&self, row: usize) -> &[u8] {
        let start = row.min(self.height.saturating_sub(1)) * self.stride;
        self.samples.get(start..start + self.width).unwrap_or_default()
    }

    /// Upsamples row `row` of the image to full width. `sums` is scratch for a row of samples.
    pub(super) fn full_row(&self, row: usize, sums: &mut Vec<u16>, to: &mut [u8]) {
        let own = row / self.rows;
        let near = self.row(own);
        // libjpeg interpolates horizontally only if a row has more than two samples.
        let is_smooth = self.width > 2 || self.columns == 1;
        // The nearer of the rows above and below; at the edges, the row itself.
        let other =
            || if row.is_multiple_of(2) { self.row(own.saturating_sub(1)) } else { self.row(own + 1) };
        match (self.columns, self.rows) {
            (1, 1) => to.iter_mut().zip(near).for_each(|(to, sample)| *to = *sample),
            (2, 1) if is_smooth => {
                sums.clear();
                sums.extend(near.iter().map(|sample| u16::from(*sample)));
                widen(sums, [1, 2], 2, to);
            }
            (1, 2) => {
                let bias = if row.is_multiple_of(2) { 1 } else { 2 };
                for ((to, near), far) in to.iter_mut().zip(near).zip(other()) {
                    *to = ((u16::from(*near) * 3 + u16::from(*far) + bias) >> 2) as u8;
                }
            }
            (2, 2) if is_smooth => {
                sums.clear();
                sums.extend(
                    near.iter().zip(other()).map(|(near, far)| u16::from(*near) * 3 + u16::from(*far)),
                );
                widen(sums, [8, 7], 4, to);
            }
            // Other sampling factors replicate samples.
            (columns, _) => {
                for (to, sample) in to.chunks_mut(columns).zip(near) {
                    to.fill(*sample);
                }
            }
        }
    }
}

/// Doubles the columns. Each is three quarters of the nearer sum and a quarter of the other one,
/// with one rounding `bias` for the left and one for the right.
fn widen(sums: &[u16], bias: [u16; 2], shift: u32, to: &mut [u8]) {
    let last = sums.len().saturating_sub(1);
    let at = |index: usize| sums.get(index).copied().unwrap_or_default();
    for (index, to) in to.chunks_mut(2).enumerate() {
        let (left, own, right) = (at(index.saturating_sub(1)), at(index), at((index + 1).min(last)));
        for ((to, other), bias) in to.iter_mut().zip([left, right]).zip(bias) {
            // At the edges, libjpeg takes the sum four times, which is the same.
            *to = ((own * 3 + other + bias) >> shift) as u8;
        }
    }
}

const fn fixed(numerator: i64, denominator: i64) -> i32 {
    ((numerator * 65536 + denominator / 2) / denominator) as i32
}

const CR_RED: i32 = fixed(140_200, 100_000);
const CB_BLUE: i32 = fixed(177_200, 100_000);
const CR_GREEN: i32 = fixed(71_414, 100_000);
const CB_GREEN: i32 = fixed(34_414, 100_000);
const HALF: i32 = 1 << 15;

/// Converts YCbCr to RGB.
pub(super) fn rgb([y, cb, cr]: [u8; 3]) -> [u8; 3] {
    let (y, cb, cr) = (i32::from(y), i32::from(cb) - 128, i32::from(cr) - 128);
    let red = y + ((CR_RED * cr + HALF) >> 16);
    let green = y + ((-CB_GREEN * cb - CR_GREEN * cr + HALF) >> 16);
    let blue = y + ((CB_BLUE * cb + HALF) >> 16);
    [red, green, blue].map(|channel| channel.clamp(0, 255) as u8)
}

/// Multiplies an ink by black, both in 0..=255, with rounding.
pub(super) fn over_black(ink: u8, black: u8) -> u8 {
    // Division by 255, exact for all products of two bytes.
    let product = u32::from(ink) * u32::from(black) + 128;
    ((product + (product >> 8)) >> 8) as u8
}
