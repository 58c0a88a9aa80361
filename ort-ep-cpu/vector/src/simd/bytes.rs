//! SIMD for 8-bit integer dot products: 32-bit lanes of four bytes each, on top of [`Simd`].
//!
//! Accumulators are exact in every implementation, so all of them produce the same bits. AVX-512
//! uses the four-way product of VNNI, which does not saturate. AVX2 and NEON widen bytes to 16 bits
//! first.

use super::{Isa, Portable, Simd};

#[cfg(target_arch = "aarch64")]
use super::Neon;
#[cfg(target_arch = "x86_64")]
use super::{Avx2, Avx512};

/// The byte operations of one instruction set, on vectors of `LANES` times four bytes.
pub trait ByteLanes: Copy + Send + Sync + 'static {
    /// The instruction set's other operations.
    type Base: Simd;

    /// Returns the instruction set's other operations.
    fn base(self) -> Self::Base;

    /// Adds to each lane four products of an unsigned and a signed byte, wrapping.
    fn dot(self, sum: Lanes<Self>, unsigned: Lanes<Self>, signed: Lanes<Self>) -> Lanes<Self>;

    /// `a * b` in each lane, wrapping.
    fn mul_i32(self, a: Lanes<Self>, b: Lanes<Self>) -> Lanes<Self>;

    /// Stores the lowest byte of each of the first `count` lanes (at most `LANES`).
    ///
    /// # Safety
    /// `to` is valid for writing `count` bytes.
    unsafe fn store_low_bytes_ptr(self, to: *mut u8, count: usize, value: Lanes<Self>);

    /// Interleaves the bytes of four vectors: group `i` holds byte `i` of each. Group `i` is in
    /// lane `i / 16 * 4 + i % 4` of vector `i % 16 / 4`.
    fn interleave_bytes(self, rows: [Lanes<Self>; 4]) -> [Lanes<Self>; 4];

    /// Requantizes four vectors to bytes: adds `zero` to each lane and saturates to the byte range,
    /// which is signed if `signed`. The bytes are in the order that
    /// [`interleave_bytes`](ByteLanes::interleave_bytes) makes groups of. `zero` must itself be
    /// such a byte.
    fn pack_interleaved(self, values: [Lanes<Self>; 4], zero: i32, signed: bool) -> Lanes<Self>;

    /// Loads the first `count` bytes (at most four times `LANES`). The others are unspecified.
    ///
    /// # Safety
    /// `from` is valid for reading `count` bytes.
    unsafe fn load_bytes_ptr(self, from: *const u8, count: usize) -> Lanes<Self>;

    /// Stores the first `count` bytes (at most four times `LANES`).
    ///
    /// # Safety
    /// `to` is valid for writing `count` bytes.
    unsafe fn store_first_bytes_ptr(self, to: *mut u8, count: usize, bytes: Lanes<Self>);

    /// Loads `count` bytes (at most four times `LANES`) from `from[at..]`. The others are
    /// unspecified.
    ///
    /// # Panics
    /// If the slice is too short, or `count` is more than a vector holds.
    #[inline(always)]
    fn load_bytes(self, from: &[u8], at: usize, count: usize) -> Lanes<Self> {
        assert!(count <= 4 * Self::Base::LANES && at <= from.len() && from.len() - at >= count);
        // SAFETY: the assertion checked that the slice holds `count` bytes from `at` on.
        unsafe { self.load_bytes_ptr(from.as_ptr().add(at), count) }
    }

    /// Stores the first `count` bytes (at most four times `LANES`) at `to[at..]`.
    ///
    /// # Panics
    /// If the slice is too short, or `count` is more than a vector holds.
    #[inline(always)]
    fn store_bytes(self, to: &mut [u8], at: usize, count: usize, bytes: Lanes<Self>) {
        assert!(count <= 4 * Self::Base::LANES && at <= to.len() && to.len() - at >= count);
        // SAFETY: the assertion checked that the slice holds `count` bytes from `at` on.
        unsafe { self.store_first_bytes_ptr(to.as_mut_ptr().add(at), count, bytes) }
    }

    /// Loads overlapping windows: lane `i` gets the four bytes from `STRIDE * i` on. `STRIDE` is 1
    /// or 2.
    ///
    /// # Safety
    /// `from` is valid for reading [`WINDOWS_REACH`] bytes.
    unsafe fn windows_ptr<const STRIDE: usize>(self, from: *const u8) -> Lanes<Self>;

    /// Like [`windows_ptr`](ByteLanes::windows_ptr), from `from[at..]`.
    ///
    /// # Panics
    /// If the slice holds fewer than [`WINDOWS_REACH`] bytes from `at` on.
    #[inline(always)]
    fn windows<const STRIDE: usize>(self, from: &[u8], at: usize) -> Lanes<Self> {
        assert!(at <= from.len() && from.len() - at >= WINDOWS_REACH);
        // SAFETY: the assertion checked that the slice holds `WINDOWS_REACH` bytes from `at` on.
        unsafe { self.windows_ptr::<STRIDE>(from.as_ptr().add(at)) }
    }

    /// Stores the lowest byte of each of the first `count` lanes (at most `LANES`) at `to[at..]`.
    ///
    /// # Panics
    /// If the slice is too short, or `count` is more than `LANES`.
    #[inline(always)]
    fn store_low_bytes(self, to: &mut [u8], at: usize, count: usize, value: Lanes<Self>) {
        assert!(count <= Self::Base::LANES && at <= to.len() && to.len() - at >= count);
        // SAFETY: the assertion checked that the slice holds `count` bytes from `at` on.
        unsafe { self.store_low_bytes_ptr(to.as_mut_ptr().add(at), count, value) }
    }

    /// Loads `count` bytes (at most `LANES`) from `from[at..]` as `f32`, sign-extended if `SIGNED`.
    /// The other lanes are unspecified.
    ///
    /// # Panics
    /// If the slice is too short.
    #[inline(always)]
    fn load_quantized<const SIGNED: bool>(self, from: &[u8], at: usize, count: usize) -> Numbers<Self> {
        let simd = self.base();
        assert!(at <= from.len() && from.len() - at >= count);
        let quantized = if count == Self::Base::LANES {
            // SAFETY: the assertion checked that the slice holds `LANES` bytes from `at` on.
            unsafe { simd.load_u8_ptr(from.as_ptr().add(at)) }
        } else {
            let mut some = [0; super::MAX_LANES];
            some[..count].copy_from_slice(&from[at..at + count]);
            // SAFETY: the array holds `MAX_LANES` bytes, and no vector has more lanes.
            unsafe { simd.load_u8_ptr(some.as_ptr()) }
        };
        simd.to_f32(match SIGNED {
            true => simd.sub_i32(simd.xor_i32(quantized, simd.splat_i32(0x80)), simd.splat_i32(0x80)),
            false => quantized,
        })
    }

    /// Stores the first `count` lanes (at most `LANES`) at `to[at..]`.
    ///
    /// # Panics
    /// If the slice is too short, or `count` is more than `LANES`.
    #[inline(always)]
    fn store_i32(self, to: &mut [i32], at: usize, count: usize, value: Lanes<Self>) {
        let simd = self.base();
        simd.store_partial(bytemuck::cast_slice_mut(to), at, count, simd.from_bits(value));
    }
}

/// Vectors that hold up to 64 quantized values from several vectors of accumulators at once.
pub trait QuantizeLanes: ByteLanes {
    /// Requantizes `N` vectors (1 to 4) to consecutive bytes: adds `zero` to each lane and
    /// saturates to the byte range, which is signed if `signed`. `zero` must itself be such a byte.
    fn pack_quantized<const N: usize>(self, values: [Lanes<Self>; N], zero: i32, signed: bool)
    -> Lanes<Self>;

    /// Stores the bytes whose bits are set in `mask`, each at its own offset from `to`.
    ///
    /// # Safety
    /// The memory of these bytes is valid for writing. The other bytes are not accessed and need
    /// not be mapped.
    unsafe fn store_bytes_ptr(self, to: *mut u8, bytes: Lanes<Self>, mask: u64);
}

/// A vector of 32-bit lanes.
pub type Lanes<L> = <<L as ByteLanes>::Base as Simd>::I32;

/// A vector of `f32`.
pub type Numbers<L> = <<L as ByteLanes>::Base as Simd>::F32;

/// The bytes that [`ByteLanes::windows`] may read.
pub const WINDOWS_REACH: usize = 64;

/// An operation that is compiled for each instruction set.
pub trait ByteOp {
    /// The result.
    type Output;
    /// Runs the operation with the instructions that `lanes` stands for. Mark it
    /// `#[inline(always)]`.
    fn run<L: ByteLanes>(self, lanes: L) -> Self::Output;
}

/// Runs `op` compiled for `isa`, or for the widest instruction set below it that this CPU has.
#[inline]
pub fn dispatch_bytes<O: ByteOp>(isa: Isa, op: O) -> O::Output {
    #[cfg(target_arch = "x86_64")]
    {
        let isa = isa.min(Isa::widest());
        if isa == Isa::Avx512 && has_vnni() {
            /// # Safety
            ///
            /// The CPU has AVX-512 F, BW, DQ, VL and VNNI, AVX2, FMA and F16C.
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            unsafe fn enter<O: ByteOp>(op: O) -> O::Output {
                // SAFETY: `dispatch_bytes` calls this only after it detected these features.
                op.run(unsafe { Vnni::new_unchecked() })
            }
            // SAFETY: `Isa::widest` and `has_vnni` detected these features.
            return unsafe { enter(op) };
        }
        if isa >= Isa::Avx2 {
            /// # Safety
            ///
            /// The CPU has AVX2, FMA and F16C.
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn enter<O: ByteOp>(op: O) -> O::Output {
                // SAFETY: `dispatch_bytes` calls this only after it detected these features.
                op.run(unsafe { Avx2::new_unchecked() })
            }
            // SAFETY: `Isa::widest` detected these features.
            return unsafe { enter(op) };
        }
    }
    #[cfg(target_arch = "aarch64")]
    if isa >= Isa::Neon {
        return op.run(Neon);
    }
    // Unused on targets that have portable code only.
    let _ = isa;
    op.run(Portable)
}

/// Whether the CPU has VNNI in 512-bit vectors.
#[cfg(target_arch = "x86_64")]
pub fn has_vnni() -> bool {
    is_x86_feature_detected!("avx512vnni")
}

/// Proof that the CPU has AVX-512 F, BW, DQ, VL and VNNI.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub struct Vnni(Avx512);

#[cfg(target_arch = "x86_64")]
impl Vnni {
    /// Creates the proof without a check.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW, DQ, VL and VNNI.
    #[inline(always)]
    pub unsafe fn new_unchecked() -> Vnni {
        // SAFETY: the caller guarantees a superset of the features of `Avx512`.
        Vnni(unsafe { Avx512::new_unchecked() })
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Avx2, Avx512, ByteLanes, QuantizeLanes, Vnni};

    impl ByteLanes for Vnni {
        type Base = Avx512;

        #[inline(always)]
        fn base(self) -> Avx512 {
            self.0
        }
        #[inline(always)]
        fn dot(self, sum: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i {
            // SAFETY: `Vnni` exists only on CPUs with VNNI.
            unsafe { _mm512_dpbusd_epi32(sum, unsigned, signed) }
        }
        #[inline(always)]
        fn mul_i32(self, a: __m512i, b: __m512i) -> __m512i {
            // SAFETY: `Vnni` exists only on CPUs with AVX-512.
            unsafe { _mm512_mullo_epi32(a, b) }
        }
        #[inline(always)]
        unsafe fn store_low_bytes_ptr(self, to: *mut u8, count: usize, value: __m512i) {
            // SAFETY: the caller guarantees `count` bytes, and masked lanes are not accessed.
            unsafe {
                match count {
                    16 => _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(value)),
                    _ => {
                        let mask = ((1_u32 << count.min(16)) - 1) as __mmask16;
                        _mm_mask_storeu_epi8(to.cast(), mask, _mm512_cvtepi32_epi8(value));
                    }
                }
            }
        }
        #[inline(always)]
        unsafe fn windows_ptr<const STRIDE: usize>(self, from: *const u8) -> __m512i {
            // SAFETY: the caller guarantees `WINDOWS_REACH` bytes, which is a whole vector. At
            // stride 1 the first 32 suffice.
            unsafe {
                let low = STRIDE == 1;
                let bytes = match low {
                    true => _mm512_castsi256_si512(_mm256_loadu_si256(from.cast())),
                    false => _mm512_loadu_si512(from.cast()),
                };
                // Each 128-bit quarter gets the 16 bytes from its first window on.
                let step = STRIDE as i32;
                let place = |index: i32| index / 4 * step + index % 4;
                let places = _mm512_setr_epi32(
                    place(0),
                    place(1),
                    place(2),
                    place(3),
                    place(4),
                    place(5),
                    place(6),
                    place(7),
                    place(8),
                    place(9),
                    place(10),
                    place(11),
                    place(12),
                    place(13),
                    place(14),
                    place(15),
                );
                let quarters = _mm512_permutexvar_epi32(places, bytes);
                let order = _mm512_broadcast_i32x4(order::<STRIDE>());
                _mm512_shuffle_epi8(quarters, order)
            }
        }
        #[inline(always)]
        fn interleave_bytes(self, [a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
            // SAFETY: `Vnni` exists only on CPUs with AVX-512 BW.
            unsafe {
                let (low, high) = (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b));
                let (low_two, high_two) = (_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d));
                [
                    _mm512_unpacklo_epi16(low, low_two),
                    _mm512_unpackhi_epi16(low, low_two),
                    _mm512_unpacklo_epi16(high, high_two),
                    _mm512_unpackhi_epi16(high, high_two),
                ]
            }
        }
        #[inline(always)]
        fn pack_interleaved(self, [a, b, c, d]: [__m512i; 4], zero: i32, signed: bool) -> __m512i {
            // SAFETY: `Vnni` exists only on CPUs with AVX-512 BW.
            unsafe {
                // Zero points are bytes, so they fit in 16 bits, and every step saturates.
                let zero = _mm512_set1_epi16(zero as i16);
                let front = _mm512_adds_epi16(_mm512_packs_epi32(a, b), zero);
                let back = _mm512_adds_epi16(_mm512_packs_epi32(c, d), zero);
                match signed {
                    true => _mm512_packs_epi16(front, back),
                    false => _mm512_packus_epi16(front, back),
                }
            }
        }
        #[inline(always)]
        unsafe fn load_bytes_ptr(self, from: *const u8, count: usize) -> __m512i {
            // SAFETY: the caller guarantees `count` bytes, and masked ones are not accessed.
            unsafe {
                match count {
                    64.. => _mm512_loadu_si512(from.cast()),
                    _ => _mm512_maskz_loadu_epi8((1 << count) - 1, from.cast()),
                }
            }
        }
        #[inline(always)]
        unsafe fn store_first_bytes_ptr(self, to: *mut u8, count: usize, bytes: __m512i) {
            // SAFETY: the caller guarantees `count` bytes, and masked ones are not accessed.
            unsafe {
                match count {
                    64.. => _mm512_storeu_si512(to.cast(), bytes),
                    _ => _mm512_mask_storeu_epi8(to.cast(), (1 << count) - 1, bytes),
                }
            }
        }
    }

    impl QuantizeLanes for Vnni {
        #[inline(always)]
        fn pack_quantized<const N: usize>(self, values: [__m512i; N], zero: i32, signed: bool) -> __m512i {
            // SAFETY: `Vnni` exists only on CPUs with AVX-512.
            unsafe {
                let value = |at: usize| values[at.min(N - 1)];
                let bytes = self.pack_interleaved([value(0), value(1), value(2), value(3)], zero, signed);
                // Each 128-bit quarter holds four bytes of each vector.
                let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                _mm512_permutexvar_epi32(order, bytes)
            }
        }
        #[inline(always)]
        unsafe fn store_bytes_ptr(self, to: *mut u8, bytes: __m512i, mask: u64) {
            // SAFETY: the caller guarantees the bytes, and masked ones are not accessed.
            unsafe { _mm512_mask_storeu_epi8(to.cast(), mask, bytes) }
        }
    }

    /// Returns the shuffle that builds four windows from 16 bytes.
    ///
    /// # Safety
    /// The CPU has AVX2.
    #[inline(always)]
    unsafe fn order<const STRIDE: usize>() -> __m128i {
        // SAFETY: the caller guarantees AVX2.
        unsafe {
            match STRIDE {
                1 => _mm_setr_epi8(0, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5, 3, 4, 5, 6),
                _ => _mm_setr_epi8(0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7, 8, 9),
            }
        }
    }

    impl ByteLanes for Avx2 {
        type Base = Avx2;

        #[inline(always)]
        fn base(self) -> Avx2 {
            self
        }
        #[inline(always)]
        fn dot(self, sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
            // SAFETY: `Avx2` exists only on CPUs with AVX2.
            unsafe {
                // `maddubs` would saturate, so even and odd bytes are widened to 16 bits
                // separately.
                let even = _mm256_and_si256(unsigned, _mm256_set1_epi16(0xFF));
                let odd = _mm256_srli_epi16::<8>(unsigned);
                let signed_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(signed));
                let signed_odd = _mm256_srai_epi16::<8>(signed);
                let products = _mm256_add_epi32(
                    _mm256_madd_epi16(even, signed_even),
                    _mm256_madd_epi16(odd, signed_odd),
                );
                _mm256_add_epi32(sum, products)
            }
        }
        #[inline(always)]
        fn mul_i32(self, a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: `Avx2` exists only on CPUs with AVX2.
            unsafe { _mm256_mullo_epi32(a, b) }
        }
        #[inline(always)]
        unsafe fn store_low_bytes_ptr(self, to: *mut u8, count: usize, value: __m256i) {
            // SAFETY: the caller guarantees `count` bytes.
            unsafe {
                let low = _mm256_setr_epi8(
                    0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1,
                    -1, -1, -1, -1, -1, -1, -1, -1,
                );
                let halves = _mm256_shuffle_epi8(value, low);
                let (first, second) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
                let bytes = _mm_unpacklo_epi32(first, second);
                match count {
                    8 => _mm_storel_epi64(to.cast(), bytes),
                    _ => {
                        let bytes = _mm_cvtsi128_si64(bytes).to_le_bytes();
                        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, count.min(8));
                    }
                }
            }
        }
        #[inline(always)]
        unsafe fn windows_ptr<const STRIDE: usize>(self, from: *const u8) -> __m256i {
            // SAFETY: the caller guarantees `WINDOWS_REACH` bytes, of which the first 32 suffice.
            unsafe {
                let bytes = _mm256_loadu_si256(from.cast());
                let step = STRIDE as i32;
                let places = _mm256_setr_epi32(0, 1, 2, 3, step, step + 1, step + 2, step + 3);
                let halves = _mm256_permutevar8x32_epi32(bytes, places);
                _mm256_shuffle_epi8(halves, _mm256_broadcastsi128_si256(order::<STRIDE>()))
            }
        }
        #[inline(always)]
        fn interleave_bytes(self, [a, b, c, d]: [__m256i; 4]) -> [__m256i; 4] {
            // SAFETY: `Avx2` exists only on CPUs with AVX2.
            unsafe {
                let (low, high) = (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b));
                let (low_two, high_two) = (_mm256_unpacklo_epi8(c, d), _mm256_unpackhi_epi8(c, d));
                [
                    _mm256_unpacklo_epi16(low, low_two),
                    _mm256_unpackhi_epi16(low, low_two),
                    _mm256_unpacklo_epi16(high, high_two),
                    _mm256_unpackhi_epi16(high, high_two),
                ]
            }
        }
        #[inline(always)]
        fn pack_interleaved(self, [a, b, c, d]: [__m256i; 4], zero: i32, signed: bool) -> __m256i {
            // SAFETY: `Avx2` exists only on CPUs with AVX2.
            unsafe {
                // Zero points are bytes, so they fit in 16 bits, and every step saturates.
                let zero = _mm256_set1_epi16(zero as i16);
                let front = _mm256_adds_epi16(_mm256_packs_epi32(a, b), zero);
                let back = _mm256_adds_epi16(_mm256_packs_epi32(c, d), zero);
                match signed {
                    true => _mm256_packs_epi16(front, back),
                    false => _mm256_packus_epi16(front, back),
                }
            }
        }
        #[inline(always)]
        unsafe fn load_bytes_ptr(self, from: *const u8, count: usize) -> __m256i {
            // SAFETY: the caller guarantees `count` bytes; the buffer holds a vector.
            unsafe {
                if count >= 32 {
                    return _mm256_loadu_si256(from.cast());
                }
                let mut some = [0_u8; 32];
                std::ptr::copy_nonoverlapping(from, some.as_mut_ptr(), count);
                _mm256_loadu_si256(some.as_ptr().cast())
            }
        }
        #[inline(always)]
        unsafe fn store_first_bytes_ptr(self, to: *mut u8, count: usize, bytes: __m256i) {
            // SAFETY: the caller guarantees `count` bytes; the buffer holds a vector.
            unsafe {
                if count >= 32 {
                    return _mm256_storeu_si256(to.cast(), bytes);
                }
                let mut all = [0_u8; 32];
                _mm256_storeu_si256(all.as_mut_ptr().cast(), bytes);
                std::ptr::copy_nonoverlapping(all.as_ptr(), to, count);
            }
        }
    }
}

impl ByteLanes for Portable {
    type Base = Portable;

    #[inline(always)]
    fn base(self) -> Portable {
        self
    }
    #[inline(always)]
    fn dot(self, sum: Lanes<Self>, unsigned: Lanes<Self>, signed: Lanes<Self>) -> Lanes<Self> {
        std::array::from_fn(|lane| {
            let pairs = unsigned[lane].to_ne_bytes().into_iter().zip(signed[lane].to_ne_bytes());
            pairs.fold(sum[lane], |sum, (u, s)| sum.wrapping_add(i32::from(u) * i32::from(s as i8)))
        })
    }
    #[inline(always)]
    fn mul_i32(self, a: Lanes<Self>, b: Lanes<Self>) -> Lanes<Self> {
        std::array::from_fn(|lane| a[lane].wrapping_mul(b[lane]))
    }
    #[inline(always)]
    unsafe fn store_low_bytes_ptr(self, to: *mut u8, count: usize, value: Lanes<Self>) {
        for (lane, value) in value.iter().enumerate().take(count) {
            // SAFETY: the caller guarantees `count` bytes.
            unsafe { to.add(lane).write(*value as u8) };
        }
    }
    #[inline(always)]
    unsafe fn windows_ptr<const STRIDE: usize>(self, from: *const u8) -> Lanes<Self> {
        std::array::from_fn(|lane| {
            // SAFETY: the caller guarantees `WINDOWS_REACH` bytes, more than the last lane reaches.
            unsafe { from.add(STRIDE * lane).cast::<i32>().read_unaligned() }
        })
    }
    #[inline(always)]
    fn interleave_bytes(self, rows: [Lanes<Self>; 4]) -> [Lanes<Self>; 4] {
        let bytes = rows.map(|row| row.map(i32::to_ne_bytes));
        std::array::from_fn(|vector| {
            std::array::from_fn(|lane| i32::from_ne_bytes([0, 1, 2, 3].map(|row| bytes[row][vector][lane])))
        })
    }
    #[inline(always)]
    fn pack_interleaved(self, values: [Lanes<Self>; 4], zero: i32, signed: bool) -> Lanes<Self> {
        let (least, greatest) = if signed { (-128, 127) } else { (0, 255) };
        values.map(|four| {
            i32::from_ne_bytes(four.map(|value| value.saturating_add(zero).clamp(least, greatest) as u8))
        })
    }
    #[inline(always)]
    unsafe fn load_bytes_ptr(self, from: *const u8, count: usize) -> Lanes<Self> {
        std::array::from_fn(|lane| {
            // SAFETY: the caller guarantees `count` bytes.
            let byte = |at: usize| if at < count { unsafe { *from.add(at) } } else { 0 };
            i32::from_ne_bytes([0, 1, 2, 3].map(|part| byte(4 * lane + part)))
        })
    }
    #[inline(always)]
    unsafe fn store_first_bytes_ptr(self, to: *mut u8, count: usize, bytes: Lanes<Self>) {
        for (at, byte) in bytes.into_iter().flat_map(i32::to_ne_bytes).enumerate().take(count) {
            // SAFETY: the caller guarantees `count` bytes.
            unsafe { to.add(at).write(byte) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One step of each operation, with the lanes written to memory.
    struct Probe<'a>(&'a [u8; 64], &'a [u8; 64]);

    impl ByteOp for Probe<'_> {
        type Output = ([i32; 16], [i32; 16], [i32; 16], [u8; 16], usize);

        #[inline(always)]
        fn run<L: ByteLanes>(self, lanes: L) -> Self::Output {
            let (simd, count) = (lanes.base(), L::Base::LANES);
            let load = |bytes: &[u8; 64]| simd.to_bits(simd.load(bytemuck::cast_slice(&words(bytes)), 0));
            let (unsigned, signed) = (load(self.0), load(self.1));
            let (mut dot, mut one, mut two, mut low) = ([0; 16], [0; 16], [0; 16], [0; 16]);
            lanes.store_i32(&mut dot, 0, count, lanes.dot(simd.splat_i32(i32::MAX), unsigned, signed));
            lanes.store_i32(&mut one, 0, count, lanes.windows::<1>(self.0, 0));
            lanes.store_i32(&mut two, 0, count, lanes.windows::<2>(self.0, 0));
            lanes.store_low_bytes(&mut low, 0, count - 1, lanes.mul_i32(unsigned, signed));
            (dot, one, two, low, count)
        }
    }

    /// Four vectors, interleaved and then packed to bytes.
    struct Interleaved<'a>(&'a [[u8; 64]; 4], i32, bool);

    impl ByteOp for Interleaved<'_> {
        type Output = ([[i32; 16]; 4], [u8; 64], usize);

        #[inline(always)]
        fn run<L: ByteLanes>(self, lanes: L) -> Self::Output {
            let count = L::Base::LANES;
            let rows = [0, 1, 2, 3].map(|row| lanes.load_bytes(&self.0[row], 0, 4 * count));
            let groups = lanes.interleave_bytes(rows);
            let (mut found, mut quantized) = ([[0; 16]; 4], [9; 64]);
            for vector in 0..4 {
                lanes.store_i32(&mut found[vector], 0, count, groups[vector]);
            }
            // Packs the vectors in their order, and omits the last bytes.
            lanes.store_bytes(
                &mut quantized,
                0,
                4 * count - 3,
                lanes.pack_interleaved(groups, self.1, self.2),
            );
            (found, quantized, count)
        }
    }

    #[test]
    fn vectors_interleave_and_pack_in_one_order() {
        // Values that fit in one byte, that fit in two, and larger ones, of both signs.
        let row = |step: usize| std::array::from_fn(|at| ((at * step) % 251) as u8);
        let small = [row(7), [0; 64], [0; 64], [0; 64]];
        let negative = [row(9), [255; 64], [255; 64], [255; 64]];
        for rows in [small, negative, [row(3), row(1), [0; 64], [0; 64]], [row(5), row(11), row(13), row(17)]]
        {
            for (zero, signed) in [(0, false), (200, false), (-100, true), (127, true)] {
                for isa in Isa::available() {
                    let (groups, quantized, count) = dispatch_bytes(isa, Interleaved(&rows, zero, signed));
                    for at in 0..4 * count {
                        let group = groups[at % 16 / 4][at / 16 * 4 + at % 4];
                        assert_eq!(group.to_ne_bytes(), rows.map(|row| row[at]), "{isa:?} {at}");
                        let (least, greatest) = if signed { (-128, 127) } else { (0, 255) };
                        let code = group.saturating_add(zero).clamp(least, greatest) as u8;
                        let expected = if at < 4 * count - 3 { code } else { 9 };
                        assert_eq!(quantized[at], expected, "{isa:?} {zero} {at} {group}");
                    }
                }
            }
        }
        for isa in Isa::available() {
            for count in [1, 5, 13] {
                let some = dispatch_bytes(isa, First(&small[0][..count]));
                assert_eq!(some, small[0][..count], "{isa:?}");
            }
        }
    }

    /// Loads and stores a few bytes.
    struct First<'a>(&'a [u8]);

    impl ByteOp for First<'_> {
        type Output = Vec<u8>;

        #[inline(always)]
        fn run<L: ByteLanes>(self, lanes: L) -> Vec<u8> {
            let mut to = vec![0; self.0.len()];
            lanes.store_bytes(&mut to, 0, self.0.len(), lanes.load_bytes(self.0, 0, self.0.len()));
            to
        }
    }

    fn words(bytes: &[u8; 64]) -> [u32; 16] {
        std::array::from_fn(|at| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| bytes[4 * at + byte])))
    }

    #[test]
    fn operations_agree_with_their_definition() {
        let extremes = ([255; 64], [0x80; 64]);
        let mixed =
            (std::array::from_fn(|at| (at * 37 + 11) as u8), std::array::from_fn(|at| (at * 91 + 200) as u8));
        for (a, b) in [extremes, mixed] {
            for isa in Isa::available() {
                let (dot, one, two, low, count) = dispatch_bytes(isa, Probe(&a, &b));
                for lane in 0..count {
                    let sum: i32 =
                        (4 * lane..4 * lane + 4).map(|at| i32::from(a[at]) * i32::from(b[at] as i8)).sum();
                    assert_eq!(dot[lane], i32::MAX.wrapping_add(sum), "{isa:?} {lane}");
                    for (windows, stride) in [(&one, 1), (&two, 2)] {
                        let expected: [u8; 4] = std::array::from_fn(|byte| a[stride * lane + byte]);
                        assert_eq!(windows[lane].to_ne_bytes(), expected, "{isa:?} {lane}");
                    }
                    let product = words(&a)[lane].wrapping_mul(words(&b)[lane]) as u8;
                    assert_eq!(low[lane], if lane + 1 < count { product } else { 0 }, "{isa:?} {lane}");
                }
            }
        }
    }
}
