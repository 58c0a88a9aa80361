//! Dot products of 4-bit block-quantized weights with activations quantized to 8 bits: integers
//! within a block, `f32` across blocks.
//!
//! Activations are quantized block by block: `value = scale * number`, with
//! `-127 <= number <= 127`. A weight is `(code - zero) * scale`, with the quantized weight `code`.
//! So a block contributes `scale * value_scale * (sum of code * number)` minus
//! `scale * zero * (value_scale * sum of numbers)`. The last factor is computed once for all
//! columns.
//!
//! A product `code * number` needs 12 bits. So two of them add up in 16 bits without saturation, on
//! CPUs without an instruction that adds four in 32 bits. All instruction sets keep 16 accumulators
//! in the same order, with one rounding per block, so they produce the same bits.

use super::{Isa, Simd, SimdOp, dispatch};

/// Quantized weights that are processed at once: some small blocks, or a part of a large one.
pub const UNIT: usize = 64;

/// Accumulators of a dot product.
const LANES: usize = 16;

/// Columns that share the loads of the activations.
const COLUMNS: usize = 4;

/// The prefetch distance for quantized weights and scales, in bytes. Columns are short, and those
/// of a tile are read in parallel, so they end before the hardware prefetcher has detected the
/// streams.
const AHEAD: usize = 4096;

/// Returns the blocks of `block` quantized weights in a unit, at least 1.
fn blocks_of_unit(block: usize) -> usize {
    (UNIT / block).max(1)
}

/// Some columns of weights.
#[derive(Debug, Clone, Copy)]
pub struct Columns<'a> {
    /// Quantized weights per block: a power of two and at least 16.
    pub block: usize,
    /// Blocks of a column.
    pub blocks: usize,
    /// Two quantized weights per byte, the first in the low nibble.
    pub quantized: &'a [u8],
    /// One scale per block, as the bytes of an `f32`.
    pub scales: &'a [u8],
    /// Zero points, packed like the weights, column by column. If `None`, all of them are 8.
    pub zeros: Option<&'a [u8]>,
}

/// A row of quantized activations.
#[derive(Debug, Clone, Copy)]
pub struct Side<'a> {
    /// The numbers, in the order of [`quantize`].
    pub numbers: &'a [i8],
    /// One scale per block.
    pub scales: &'a [f32],
    /// For each block, its scale times the sum of its numbers.
    pub sums: &'a [f32],
}

/// Returns the lengths of the numbers, and of the scales and sums, of a row of `blocks` blocks,
/// rounded up to whole units.
pub fn side_lens(block: usize, blocks: usize) -> [usize; 2] {
    let padded = blocks.next_multiple_of(blocks_of_unit(block));
    [padded.saturating_mul(block), padded]
}

/// Quantizes a row of activations. Within a unit, the values at even positions come first, because
/// the low nibbles of the weights do. Padding becomes 0.
///
/// # Panics
/// If the targets do not have the lengths of [`side_lens`].
pub fn quantize(
    isa: Isa,
    block: usize,
    from: &[f32],
    numbers: &mut [i8],
    scales: &mut [f32],
    sums: &mut [f32],
) {
    let lens = side_lens(block, from.len().div_ceil(block));
    assert!([numbers.len(), scales.len()] == lens && sums.len() == lens[1], "the targets hold whole units");
    numbers.fill(0);
    scales.fill(0.0);
    sums.fill(0.0);
    dispatch(isa, Quantize { block, from, numbers, scales, sums });
}

/// `quantize` checked the lengths.
struct Quantize<'a> {
    block: usize,
    from: &'a [f32],
    numbers: &'a mut [i8],
    scales: &'a mut [f32],
    sums: &'a mut [f32],
}

impl SimdOp for Quantize<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (index, from) in self.from.chunks(self.block).enumerate() {
            let mut greatest = s.splat(0.0);
            for at in (0..from.len()).step_by(S::LANES) {
                let values = s.load_partial(from, at, (from.len() - at).min(S::LANES), 0.0);
                greatest = s.max(s.abs(values), greatest);
            }
            let greatest = s.horizontal_max(greatest);
            let scale = greatest / 127.0;
            // If all values are 0 or one is not finite, the numbers become 0, and the scale carries
            // an infinity or NaN on.
            let inverse = if scale > 0.0 && scale.is_finite() { 1.0 / scale } else { 0.0 };
            let mut sum = 0_i32;
            for at in (0..from.len()).step_by(S::LANES) {
                let count = (from.len() - at).min(S::LANES);
                let values = s.load_partial(from, at, count, 0.0);
                let rounded = s.to_array(s.round_even(s.mul(values, s.splat(inverse))));
                for (lane, rounded) in rounded.iter().enumerate().take(count) {
                    let number = *rounded as i8;
                    sum += i32::from(number);
                    let place = index * self.block + at + lane;
                    let within = place % UNIT;
                    self.numbers[place - within + within % 2 * (UNIT / 2) + within / 2] = number;
                }
            }
            self.scales[index] = scale;
            self.sums[index] = scale * sum as f32;
        }
    }
}

/// Computes `to[column * sides + side]`, the dot product of a column and a side.
///
/// # Panics
/// If lengths do not match.
pub fn multiply(isa: Isa, columns: &Columns<'_>, sides: &[Side<'_>], to: &mut [f32]) {
    let Columns { block, blocks, quantized, scales, zeros } = *columns;
    assert!(block >= 16 && block.is_power_of_two(), "a block is a power of two");
    let count = to.len() / sides.len().max(1);
    assert!(quantized.len() >= count * blocks * block / 2, "the quantized values fill their blocks");
    assert!(scales.len() >= count * blocks * 4, "each block has a scale");
    assert!(
        zeros.is_none_or(|zeros| zeros.len() >= count * blocks.div_ceil(2)),
        "each block has a zero point"
    );
    let lens = side_lens(block, blocks);
    for side in sides {
        assert!(side.numbers.len() >= lens[0], "a side has a number for each code");
        assert!(
            side.scales.len() >= lens[1] && side.sums.len() >= lens[1],
            "a side has a scale for each block"
        );
    }
    let call = Multiply { columns, sides, count, to };
    #[cfg(target_arch = "x86_64")]
    {
        let isa = isa.min(Isa::widest());
        if isa >= Isa::Avx512 && is_x86_feature_detected!("avx512vnni") {
            /// # Safety
            ///
            /// The CPU has AVX-512 F, BW, DQ, VL and VNNI, AVX2 and FMA. The slices of `call` have
            /// the lengths that `multiply` checks.
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
            unsafe fn enter(call: Multiply<'_>) {
                // SAFETY: `multiply` checked the lengths, and calls this only if it detected these
                // features.
                unsafe { call.run(x86::Vnni) }
            }
            // SAFETY: the features were detected just above.
            return unsafe { enter(call) };
        }
        if isa >= Isa::Avx2 {
            /// # Safety
            ///
            /// The CPU has AVX2 and FMA. The slices of `call` have the lengths that `multiply`
            /// checks.
            #[target_feature(enable = "avx2,fma")]
            unsafe fn enter(call: Multiply<'_>) {
                // SAFETY: `multiply` checked the lengths, and calls this only if `Isa::widest`
                // detected these features.
                unsafe { call.run(x86::Halves) }
            }
            // SAFETY: `Isa::widest` detected these features.
            return unsafe { enter(call) };
        }
    }
    let _ = isa;
    // SAFETY: the lengths were checked above, and `Plain` needs no special instructions.
    unsafe { call.run(Plain) }
}

/// Sixteen `f32` lanes, in one or more registers.
///
/// # Safety
/// All methods need a CPU with the instructions of the type. Pointers may be unaligned and must be
/// valid for what is read.
trait Sixteen: Copy {
    type F32: Copy;
    unsafe fn zero(self) -> Self::F32;
    /// Prefetches a cache line that will be read soon; any address will do.
    unsafe fn prefetch(self, _address: *const u8) {}
    /// For each four quantized weights, the sum of their products with four numbers. Reads 32 bytes
    /// of weights and 64 numbers.
    unsafe fn dots(self, quantized: *const u8, numbers: *const i8) -> Self::F32;
    /// Loads the first `count` floats and permutes them by `pattern`.
    unsafe fn spread(self, from: *const u8, count: usize, pattern: &[i32; LANES]) -> Self::F32;
    /// Loads the first `count` floats and zeros the rest.
    unsafe fn load(self, from: *const u8, count: usize) -> Self::F32;
    /// Unpacks eight bytes to 16 quantized values.
    unsafe fn unpack(self, bytes: [u8; 8]) -> Self::F32;
    unsafe fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once.
    unsafe fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The sum of all lanes, added pairwise by halves.
    unsafe fn sum(self, a: Self::F32) -> f32;
}

/// `multiply` checked the lengths.
struct Multiply<'a> {
    columns: &'a Columns<'a>,
    sides: &'a [Side<'a>],
    count: usize,
    to: &'a mut [f32],
}

impl Multiply<'_> {
    /// Computes all columns for all sides.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`, and the lengths are checked.
    #[inline(always)]
    unsafe fn run<V: Sixteen>(self, v: V) {
        let Multiply { columns, sides, count, to } = self;
        let per_unit = blocks_of_unit(columns.block);
        let mut pattern = [0; LANES];
        for (lane, place) in pattern.iter_mut().enumerate() {
            // The block of each accumulator's weights. The low nibbles of the 32 bytes fill the
            // first eight lanes and the high nibbles the others. So lane `i` of either half takes
            // four of the eight weights from `8 * i` on.
            *place = if per_unit > 1 { (lane % 8 * 8 / columns.block) as i32 } else { 0 };
        }
        let mut column = 0;
        while column < count {
            let tile = if column + COLUMNS <= count { COLUMNS } else { 1 };
            for (at, side) in sides.iter().enumerate() {
                // SAFETY: the loop keeps the tile's columns below `count`, and `multiply` checked
                // the lengths.
                unsafe {
                    if tile == COLUMNS {
                        let sums = dot::<V, COLUMNS>(v, columns, side, column, &pattern);
                        for index in 0..COLUMNS {
                            to[(column + index) * sides.len() + at] = sums[index];
                        }
                    } else {
                        to[column * sides.len() + at] = dot::<V, 1>(v, columns, side, column, &pattern)[0];
                    }
                }
            }
            column += tile;
        }
    }
}

/// Computes the dot products of `N` columns and a side.
///
/// # Safety
/// `N` columns from `first` on exist, the lengths are checked, and the CPU has the instructions of
/// `V`.
#[inline(always)]
unsafe fn dot<V: Sixteen, const N: usize>(
    v: V,
    columns: &Columns<'_>,
    side: &Side<'_>,
    first: usize,
    pattern: &[i32; LANES],
) -> [f32; N] {
    let Columns { block, blocks, quantized, scales, zeros } = *columns;
    let per_unit = blocks_of_unit(block);
    let (quantized_len, whole) = (blocks * block / 2, blocks * block / UNIT);
    // SAFETY: `multiply` checked the lengths, so units are inside the weights of their column and
    // the numbers of the side.
    unsafe {
        let mut totals = [v.zero(); N];
        for unit in 0..whole {
            let at = unit * UNIT / block;
            let of_side = v.spread(side.scales.as_ptr().add(at).cast(), per_unit, pattern);
            let numbers = side.numbers.as_ptr().add(unit * UNIT);
            for index in 0..N {
                let column = first + index;
                let quantized = quantized.as_ptr().add(column * quantized_len + unit * UNIT / 2);
                let scale = scales.as_ptr().add((column * blocks + at) * 4);
                v.prefetch(quantized.wrapping_add(AHEAD));
                if at.is_multiple_of(LANES) {
                    v.prefetch(scale.wrapping_add(AHEAD / 4));
                }
                let scale = v.spread(scale, per_unit, pattern);
                totals[index] = v.mul_add(v.dots(quantized, numbers), v.mul(scale, of_side), totals[index]);
            }
        }
        let at = whole * per_unit;
        if at < blocks && block < UNIT {
            // Blocks that do not fill a unit are copied to a zero-padded buffer.
            let of_side = v.spread(side.scales.as_ptr().add(at).cast(), per_unit, pattern);
            for index in 0..N {
                let column = first + index;
                let (mut last, mut of_last) = ([0_u8; UNIT / 2], [0_u8; 16]);
                let rest =
                    &quantized[column * quantized_len + whole * UNIT / 2..(column + 1) * quantized_len];
                last[..rest.len()].copy_from_slice(rest);
                let rest = &scales[(column * blocks + at) * 4..(column + 1) * blocks * 4];
                of_last[..rest.len()].copy_from_slice(rest);
                let scale = v.spread(of_last.as_ptr(), per_unit, pattern);
                let dots = v.dots(last.as_ptr(), side.numbers.as_ptr().add(whole * UNIT));
                totals[index] = v.mul_add(dots, v.mul(scale, of_side), totals[index]);
            }
        }
        let mut sums = [0.0; N];
        for index in 0..N {
            let column = first + index;
            let mut below = v.zero();
            for at in (0..blocks).step_by(LANES) {
                let count = (blocks - at).min(LANES);
                // Two default zero points of 8 per byte.
                let mut bytes = [0x88_u8; 8];
                if let Some(zeros) = zeros {
                    let from = &zeros[column * blocks.div_ceil(2) + at / 2..][..count.div_ceil(2)];
                    bytes[..from.len()].copy_from_slice(from);
                }
                let scale = v.load(scales.as_ptr().add((column * blocks + at) * 4), count);
                let sum = v.load(side.sums.as_ptr().add(at).cast(), count);
                below = v.mul_add(v.mul(scale, v.unpack(bytes)), sum, below);
            }
            sums[index] = v.sum(totals[index]) - v.sum(below);
        }
        sums
    }
}

/// Plain Rust, which every CPU can run.
#[derive(Clone, Copy)]
struct Plain;

/// Adds 16 lanes pairwise by halves.
fn sum_in_halves(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

impl Sixteen for Plain {
    type F32 = [f32; LANES];
    unsafe fn zero(self) -> Self::F32 {
        [0.0; LANES]
    }
    unsafe fn dots(self, quantized: *const u8, numbers: *const i8) -> Self::F32 {
        std::array::from_fn(|lane| {
            let (half, first) = (lane / 8, lane % 8 * 4);
            let product = |at: usize| {
                // SAFETY: the caller guarantees 32 bytes and 64 numbers.
                let (code, number) = unsafe { (*quantized.add(at), *numbers.add(half * UNIT / 2 + at)) };
                i32::from((code >> (half * 4)) & 15) * i32::from(number)
            };
            (first..first + 4).map(product).sum::<i32>() as f32
        })
    }
    unsafe fn spread(self, from: *const u8, _count: usize, pattern: &[i32; LANES]) -> Self::F32 {
        // SAFETY: the caller guarantees `count` floats, and the pattern names only those.
        pattern.map(|place| unsafe { from.cast::<f32>().add(place as usize).read_unaligned() })
    }
    unsafe fn load(self, from: *const u8, count: usize) -> Self::F32 {
        std::array::from_fn(|lane| match lane < count {
            // SAFETY: the caller guarantees `count` floats.
            true => unsafe { from.cast::<f32>().add(lane).read_unaligned() },
            false => 0.0,
        })
    }
    unsafe fn unpack(self, bytes: [u8; 8]) -> Self::F32 {
        std::array::from_fn(|lane| f32::from((bytes[lane / 2] >> (lane % 2 * 4)) & 15))
    }
    unsafe fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        std::array::from_fn(|lane| a[lane] * b[lane])
    }
    unsafe fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }
    unsafe fn sum(self, a: Self::F32) -> f32 {
        sum_in_halves(a)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The same in 512-bit registers, and in pairs of 256-bit registers.

    use std::arch::x86_64::*;

    use super::{LANES, Sixteen, sum_in_halves};

    /// Calls an intrinsic of the type's instruction set.
    macro_rules! intrinsic {
        ($call:expr) => {{
            // SAFETY: the caller guarantees the instruction set and the memory that is read.
            unsafe { $call }
        }};
    }

    /// AVX-512 with VNNI.
    #[derive(Clone, Copy)]
    pub(super) struct Vnni;

    impl Sixteen for Vnni {
        type F32 = __m512;
        #[inline(always)]
        unsafe fn zero(self) -> __m512 {
            intrinsic!(_mm512_setzero_ps())
        }
        #[inline(always)]
        unsafe fn prefetch(self, address: *const u8) {
            intrinsic!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
        }
        #[inline(always)]
        unsafe fn dots(self, quantized: *const u8, numbers: *const i8) -> __m512 {
            intrinsic!({
                let bytes = _mm256_loadu_si256(quantized.cast());
                let both =
                    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(bytes), _mm256_srli_epi16::<4>(bytes));
                let quantized = _mm512_and_si512(both, _mm512_set1_epi8(15));
                let numbers = _mm512_loadu_si512(numbers.cast());
                _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), quantized, numbers))
            })
        }
        #[inline(always)]
        unsafe fn spread(self, from: *const u8, count: usize, pattern: &[i32; LANES]) -> __m512 {
            intrinsic!(match count {
                1 => _mm512_set1_ps(from.cast::<f32>().read_unaligned()),
                _ => {
                    let floats = _mm_maskz_loadu_ps((1 << count) - 1, from.cast());
                    _mm512_permutexvar_ps(
                        _mm512_loadu_si512(pattern.as_ptr().cast()),
                        _mm512_castps128_ps512(floats),
                    )
                }
            })
        }
        #[inline(always)]
        unsafe fn load(self, from: *const u8, count: usize) -> __m512 {
            intrinsic!(_mm512_maskz_loadu_ps(((1_u32 << count) - 1) as __mmask16, from.cast()))
        }
        #[inline(always)]
        unsafe fn unpack(self, bytes: [u8; 8]) -> __m512 {
            intrinsic!({
                let [low, high] = words(bytes);
                let words = _mm512_inserti64x4::<1>(_mm512_set1_epi32(low), _mm256_set1_epi32(high));
                let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
                _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(15)))
            })
        }
        #[inline(always)]
        unsafe fn mul(self, a: __m512, b: __m512) -> __m512 {
            intrinsic!(_mm512_mul_ps(a, b))
        }
        #[inline(always)]
        unsafe fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            intrinsic!(_mm512_fmadd_ps(a, b, c))
        }
        #[inline(always)]
        unsafe fn sum(self, a: __m512) -> f32 {
            intrinsic!(sum_256(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a))))
        }
    }

    /// Returns the low and the high half of eight bytes.
    #[inline(always)]
    fn words(bytes: [u8; 8]) -> [i32; 2] {
        let all = u64::from_le_bytes(bytes);
        [all as i32, (all >> 32) as i32]
    }

    /// Adds eight lanes pairwise by halves.
    ///
    /// # Safety
    ///
    /// The CPU has AVX and SSE3.
    #[inline(always)]
    unsafe fn sum_256(a: __m256) -> f32 {
        intrinsic!({
            let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }

    /// Returns a mask of the first `count` of eight lanes.
    ///
    /// # Safety
    ///
    /// The CPU has AVX2.
    #[inline(always)]
    unsafe fn first_lanes(count: usize) -> __m256i {
        let lanes = intrinsic!(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        intrinsic!(_mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes))
    }

    /// AVX2: products of weights and numbers are added in pairs, which fit in 16 bits.
    #[derive(Clone, Copy)]
    pub(super) struct Halves;

    impl Sixteen for Halves {
        type F32 = [__m256; 2];
        #[inline(always)]
        unsafe fn zero(self) -> [__m256; 2] {
            intrinsic!([_mm256_setzero_ps(), _mm256_setzero_ps()])
        }
        #[inline(always)]
        unsafe fn prefetch(self, address: *const u8) {
            intrinsic!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
        }
        #[inline(always)]
        unsafe fn dots(self, quantized: *const u8, numbers: *const i8) -> [__m256; 2] {
            intrinsic!({
                let (bytes, mask) = (_mm256_loadu_si256(quantized.cast()), _mm256_set1_epi8(15));
                let low = _mm256_and_si256(bytes, mask);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask);
                let first = _mm256_maddubs_epi16(low, _mm256_loadu_si256(numbers.cast()));
                let second = _mm256_maddubs_epi16(high, _mm256_loadu_si256(numbers.add(32).cast()));
                let ones = _mm256_set1_epi16(1);
                [
                    _mm256_cvtepi32_ps(_mm256_madd_epi16(first, ones)),
                    _mm256_cvtepi32_ps(_mm256_madd_epi16(second, ones)),
                ]
            })
        }
        #[inline(always)]
        unsafe fn spread(self, from: *const u8, count: usize, pattern: &[i32; LANES]) -> [__m256; 2] {
            intrinsic!({
                // Both halves have the same pattern.
                let floats = self.load(from, count)[0];
                let half = _mm256_permutevar8x32_ps(floats, _mm256_loadu_si256(pattern.as_ptr().cast()));
                [half, half]
            })
        }
        #[inline(always)]
        unsafe fn load(self, from: *const u8, count: usize) -> [__m256; 2] {
            intrinsic!({
                let from = from.cast::<f32>();
                [
                    _mm256_maskload_ps(from, first_lanes(count.min(8))),
                    _mm256_maskload_ps(from.wrapping_add(8), first_lanes(count.saturating_sub(8))),
                ]
            })
        }
        #[inline(always)]
        unsafe fn unpack(self, bytes: [u8; 8]) -> [__m256; 2] {
            intrinsic!({
                let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
                let [low, high] = words(bytes);
                let mask = _mm256_set1_epi32(15);
                let low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(low), shifts), mask);
                let high = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(high), shifts), mask);
                [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
            })
        }
        #[inline(always)]
        unsafe fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            intrinsic!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
        }
        #[inline(always)]
        unsafe fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            intrinsic!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
        }
        #[inline(always)]
        unsafe fn sum(self, a: [__m256; 2]) -> f32 {
            let mut lanes = [0.0; LANES];
            intrinsic!({
                _mm256_storeu_ps(lanes.as_mut_ptr(), a[0]);
                _mm256_storeu_ps(lanes.as_mut_ptr().add(8), a[1]);
            });
            sum_in_halves(lanes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of all sizes, with and without zero points, against double-precision sums of the
    /// dequantized values. Every instruction set must produce the same bits.
    #[test]
    fn products_are_those_of_the_rounded_values() {
        for (block, blocks) in
            [(16_usize, 1_usize), (16, 7), (32, 1), (32, 5), (32, 24), (64, 3), (128, 2), (256, 1)]
        {
            let (k, count) = (blocks * block - 3, 7);
            let weights: Vec<u8> =
                (0..count * blocks * block / 2).map(|at| (at * 37 + at / 7) as u8).collect();
            let scales: Vec<f32> = (0..count * blocks).map(|at| 0.25 + (at % 9) as f32 / 8.0).collect();
            let scale_bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_ne_bytes()).collect();
            let zeros: Vec<u8> = (0..count * blocks.div_ceil(2)).map(|at| (at * 29 + 5) as u8).collect();
            let values: Vec<Vec<f32>> = (0..3)
                .map(|side| (0..k).map(|at| ((at * 13 + side * 5) % 17) as f32 * 0.37 - 3.0).collect())
                .collect();
            let lens = side_lens(block, blocks);
            let quantized: Vec<(Vec<i8>, Vec<f32>, Vec<f32>)> = values
                .iter()
                .map(|values| {
                    let mut row = (vec![1; lens[0]], vec![1.0; lens[1]], vec![1.0; lens[1]]);
                    quantize(Isa::Scalar, block, values, &mut row.0, &mut row.1, &mut row.2);
                    row
                })
                .collect();
            let sides: Vec<Side<'_>> =
                quantized.iter().map(|(numbers, scales, sums)| Side { numbers, scales, sums }).collect();
            for zeros in [None, Some(&zeros[..])] {
                let columns = Columns { block, blocks, quantized: &weights, scales: &scale_bytes, zeros };
                let expected = |column: usize, side: usize| -> f64 {
                    (0..k)
                        .map(|at| {
                            let code = (weights[column * blocks * block / 2 + at / 2] >> (at % 2 * 4)) & 15;
                            let of_block = at / block;
                            let zero = zeros.map_or(8, |zeros| {
                                (zeros[column * blocks.div_ceil(2) + of_block / 2] >> (of_block % 2 * 4)) & 15
                            });
                            let weight = (f64::from(code) - f64::from(zero))
                                * f64::from(scales[column * blocks + of_block]);
                            let step = f64::from(sides[side].scales[of_block]);
                            weight * step * (f64::from(values[side][at]) / step).round_ties_even()
                        })
                        .sum()
                };
                let mut plain = vec![0.0; count * sides.len()];
                multiply(Isa::Scalar, &columns, &sides, &mut plain);
                for (at, got) in plain.iter().enumerate() {
                    let expected = expected(at / sides.len(), at % sides.len());
                    let error = (f64::from(*got) - expected).abs();
                    assert!(error <= 1e-5 * expected.abs().max(300.0), "{block} {blocks}: {got} {expected}");
                }
                for isa in Isa::available() {
                    let mut row = (vec![1; lens[0]], vec![1.0; lens[1]], vec![1.0; lens[1]]);
                    quantize(isa, block, &values[0], &mut row.0, &mut row.1, &mut row.2);
                    assert_eq!(row, quantized[0], "{isa:?}");
                    let mut to = vec![0.0; plain.len()];
                    multiply(isa, &columns, &sides, &mut to);
                    let same = to.iter().zip(&plain).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{isa:?} {block} {blocks}");
                }
            }
        }
    }
}
