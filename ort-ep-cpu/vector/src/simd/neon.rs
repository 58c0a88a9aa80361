//! NEON vectors: 128 bits, with FMA.

use std::arch::aarch64::*;

use super::Simd;
use super::bytes::ByteLanes;

/// NEON, which is part of AArch64.
#[derive(Debug, Clone, Copy)]
pub struct Neon;

/// Calls an intrinsic of this instruction set.
macro_rules! intrinsic {
    ($call:expr) => {{
        // SAFETY: NEON is part of AArch64, and the caller of a load or store guarantees its memory.
        unsafe { $call }
    }};
}

impl Simd for Neon {
    type F32 = float32x4_t;
    type I32 = int32x4_t;
    type Mask = uint32x4_t;
    const LANES: usize = 4;
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F32 {
        intrinsic!(vdupq_n_f32(value))
    }
    #[inline(always)]
    fn splat_i32(self, value: i32) -> Self::I32 {
        intrinsic!(vdupq_n_s32(value))
    }
    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> Self::F32 {
        intrinsic!(vld1q_f32(from))
    }
    #[inline(always)]
    unsafe fn load_partial_ptr(self, from: *const f32, count: usize, fill: f32) -> Self::F32 {
        intrinsic!({
            let fill = vdupq_n_f32(fill);
            match count {
                0 => fill,
                1 => vld1q_lane_f32::<0>(from, fill),
                2 => vcombine_f32(vld1_f32(from), vget_high_f32(fill)),
                3 => {
                    let two = vcombine_f32(vld1_f32(from), vget_high_f32(fill));
                    vld1q_lane_f32::<2>(from.add(2), two)
                }
                _ => vld1q_f32(from),
            }
        })
    }
    #[inline(always)]
    unsafe fn load_masked_ptr(self, from: *const f32, mask: Self::Mask) -> Self::F32 {
        intrinsic!({
            if vminvq_u32(mask) != 0 {
                return vld1q_f32(from);
            }
            let (mut set, mut lanes) = ([0_u32; 4], [0.0_f32; 4]);
            vst1q_u32(set.as_mut_ptr(), mask);
            for (lane, value) in lanes.iter_mut().enumerate().filter(|(lane, _)| set[*lane] != 0) {
                *value = from.wrapping_add(lane).read();
            }
            vld1q_f32(lanes.as_ptr())
        })
    }
    #[inline(always)]
    fn mask_of_bits(self, bits: u16) -> Self::Mask {
        intrinsic!(vtstq_u32(vdupq_n_u32(u32::from(bits)), vld1q_u32([1, 2, 4, 8].as_ptr())))
    }
    #[inline(always)]
    unsafe fn store_partial_ptr(self, to: *mut f32, count: usize, value: Self::F32) {
        intrinsic!(match count {
            0 => {}
            1 => vst1q_lane_f32::<0>(to, value),
            2 => vst1_f32(to, vget_low_f32(value)),
            3 => {
                vst1_f32(to, vget_low_f32(value));
                vst1q_lane_f32::<2>(to.add(2), value);
            }
            _ => vst1q_f32(to, value),
        })
    }
    #[inline(always)]
    fn shift_in_first(self, first: f32, a: Self::F32) -> Self::F32 {
        intrinsic!(vextq_f32::<3>(vdupq_n_f32(first), a))
    }
    #[inline(always)]
    fn shift_in_last(self, a: Self::F32, last: f32) -> Self::F32 {
        intrinsic!(vextq_f32::<1>(a, vdupq_n_f32(last)))
    }
    #[inline(always)]
    fn part_even_odd(self, low: Self::F32, high: Self::F32) -> (Self::F32, Self::F32) {
        intrinsic!((vuzp1q_f32(low, high), vuzp2q_f32(low, high)))
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, from: *const u16) -> Self::F32 {
        intrinsic!(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))))
    }
    #[inline(always)]
    unsafe fn store_f16_ptr(self, to: *mut u16, value: Self::F32) {
        intrinsic!(vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(value))))
    }
    #[inline(always)]
    unsafe fn load_u8_ptr(self, from: *const u8) -> Self::I32 {
        intrinsic!({
            let bytes = vcreate_u8(u64::from(from.cast::<u32>().read_unaligned()));
            vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))))
        })
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, value: Self::F32) {
        intrinsic!(vst1q_f32(to, value))
    }
    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(vaddq_f32(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(vsubq_f32(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(vmulq_f32(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(vdivq_f32(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        intrinsic!(vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    fn neg_mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        intrinsic!(vfmsq_f32(c, a, b))
    }
    #[inline(always)]
    fn min_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        // `FMIN` would return NaN for a NaN in either operand.
        self.select(self.lt(a, b), a, b)
    }
    #[inline(always)]
    fn max_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        self.select(self.lt(b, a), a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(vminq_f32(a, b))
    }
    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(vmaxq_f32(a, b))
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F32) -> Self::F32 {
        intrinsic!(vsqrtq_f32(a))
    }
    #[inline(always)]
    fn round_even(self, a: Self::F32) -> Self::F32 {
        intrinsic!(vrndnq_f32(a))
    }
    #[inline(always)]
    fn floor(self, a: Self::F32) -> Self::F32 {
        intrinsic!(vrndmq_f32(a))
    }
    #[inline(always)]
    fn ceil(self, a: Self::F32) -> Self::F32 {
        intrinsic!(vrndpq_f32(a))
    }
    #[inline(always)]
    fn trunc(self, a: Self::F32) -> Self::F32 {
        intrinsic!(vrndq_f32(a))
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, a: Self::F32, n: Self::F32) -> Self::F32 {
        intrinsic!({
            // Two steps keep each factor a normal number, so only the second can round or overflow.
            let n = vmaxq_f32(vdupq_n_f32(-252.0), vminq_f32(vdupq_n_f32(252.0), n));
            let n = vcvtnq_s32_f32(n);
            let first = vshrq_n_s32::<1>(n);
            let second = vsubq_s32(n, first);
            let bias = vdupq_n_s32(127);
            let first = vshlq_n_s32::<23>(vaddq_s32(first, bias));
            let second = vshlq_n_s32::<23>(vaddq_s32(second, bias));
            vmulq_f32(vmulq_f32(a, vreinterpretq_f32_s32(first)), vreinterpretq_f32_s32(second))
        })
    }
    #[inline(always)]
    fn lt(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        intrinsic!(vcltq_f32(a, b))
    }
    #[inline(always)]
    fn le(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        intrinsic!(vcleq_f32(a, b))
    }
    #[inline(always)]
    fn eq(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        intrinsic!(vceqq_f32(a, b))
    }
    #[inline(always)]
    fn is_nan(self, a: Self::F32) -> Self::Mask {
        intrinsic!(vmvnq_u32(vceqq_f32(a, a)))
    }
    #[inline(always)]
    fn select(self, mask: Self::Mask, a: Self::F32, b: Self::F32) -> Self::F32 {
        intrinsic!(vbslq_f32(mask, a, b))
    }
    #[inline(always)]
    fn horizontal_sum(self, a: Self::F32) -> f32 {
        intrinsic!(vaddv_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a))))
    }
    #[inline(always)]
    fn any(self, mask: Self::Mask) -> bool {
        intrinsic!(vmaxvq_u32(mask)) != 0
    }
    #[inline(always)]
    fn to_bits(self, a: Self::F32) -> Self::I32 {
        intrinsic!(vreinterpretq_s32_f32(a))
    }
    #[inline(always)]
    fn from_bits(self, a: Self::I32) -> Self::F32 {
        intrinsic!(vreinterpretq_f32_s32(a))
    }
    #[inline(always)]
    fn to_i32(self, a: Self::F32) -> Self::I32 {
        intrinsic!(vcvtnq_s32_f32(a))
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I32) -> Self::F32 {
        intrinsic!(vcvtq_f32_s32(a))
    }
    #[inline(always)]
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(vaddq_s32(a, b))
    }
    #[inline(always)]
    fn sub_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(vsubq_s32(a, b))
    }
    #[inline(always)]
    fn and_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(vandq_s32(a, b))
    }
    #[inline(always)]
    fn or_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(vorrq_s32(a, b))
    }
    #[inline(always)]
    fn xor_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        intrinsic!(veorq_s32(a, b))
    }
    #[inline(always)]
    fn shl_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32 {
        intrinsic!(vshlq_s32(a, vdupq_n_s32(BITS as i32)))
    }
    #[inline(always)]
    fn shr_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32 {
        // A negative count shifts to the right.
        intrinsic!(vshlq_s32(a, vdupq_n_s32(-(BITS as i32))))
    }
}

impl ByteLanes for Neon {
    type Base = Neon;

    #[inline(always)]
    fn base(self) -> Neon {
        self
    }
    #[inline(always)]
    fn dot(self, sum: int32x4_t, unsigned: int32x4_t, signed: int32x4_t) -> int32x4_t {
        intrinsic!({
            let (unsigned, signed) = (vreinterpretq_u8_s32(unsigned), vreinterpretq_s8_s32(signed));
            // A product of an unsigned and a signed byte fits in 16 bits.
            let low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(unsigned)));
            let low = vmulq_s16(low, vmovl_s8(vget_low_s8(signed)));
            let high = vreinterpretq_s16_u16(vmovl_high_u8(unsigned));
            let high = vmulq_s16(high, vmovl_high_s8(signed));
            vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
        })
    }
    #[inline(always)]
    fn mul_i32(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        intrinsic!(vmulq_s32(a, b))
    }
    #[inline(always)]
    unsafe fn store_low_bytes_ptr(self, to: *mut u8, count: usize, value: int32x4_t) {
        intrinsic!({
            let halves = vmovn_s32(value);
            let bytes = vreinterpret_u32_s8(vmovn_s16(vcombine_s16(halves, halves)));
            let bytes = vget_lane_u32::<0>(bytes);
            match count {
                4.. => to.cast::<u32>().write_unaligned(bytes),
                _ => std::ptr::copy_nonoverlapping(bytes.to_le_bytes().as_ptr(), to, count),
            }
        })
    }
    #[inline(always)]
    unsafe fn windows_ptr<const STRIDE: usize>(self, from: *const u8) -> int32x4_t {
        let order: [u8; 16] = std::array::from_fn(|at| (at / 4 * STRIDE + at % 4) as u8);
        // The caller guarantees `WINDOWS_REACH` bytes, of which the first 16 suffice.
        intrinsic!(vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(from), vld1q_u8(order.as_ptr()))))
    }
    #[inline(always)]
    fn interleave_bytes(self, rows: [int32x4_t; 4]) -> [int32x4_t; 4] {
        intrinsic!({
            let [a, b, c, d] = rows.map(|row| vreinterpretq_u8_s32(row));
            let words = |bytes: uint8x16_t| vreinterpretq_u16_u8(bytes);
            let (low, high) = (words(vzip1q_u8(a, b)), words(vzip2q_u8(a, b)));
            let (low_two, high_two) = (words(vzip1q_u8(c, d)), words(vzip2q_u8(c, d)));
            [
                vzip1q_u16(low, low_two),
                vzip2q_u16(low, low_two),
                vzip1q_u16(high, high_two),
                vzip2q_u16(high, high_two),
            ]
            .map(|groups| vreinterpretq_s32_u16(groups))
        })
    }
    #[inline(always)]
    fn pack_interleaved(self, [a, b, c, d]: [int32x4_t; 4], zero: i32, signed: bool) -> int32x4_t {
        intrinsic!({
            // Zero points are bytes, so they fit in 16 bits, and every step saturates.
            let zero = vdupq_n_s16(zero as i16);
            let front = vqaddq_s16(vqmovn_high_s32(vqmovn_s32(a), b), zero);
            let back = vqaddq_s16(vqmovn_high_s32(vqmovn_s32(c), d), zero);
            match signed {
                true => vreinterpretq_s32_s8(vqmovn_high_s16(vqmovn_s16(front), back)),
                false => vreinterpretq_s32_u8(vqmovun_high_s16(vqmovun_s16(front), back)),
            }
        })
    }
    #[inline(always)]
    unsafe fn load_bytes_ptr(self, from: *const u8, count: usize) -> int32x4_t {
        intrinsic!({
            if count >= 16 {
                return vreinterpretq_s32_u8(vld1q_u8(from));
            }
            let mut some = [0_u8; 16];
            std::ptr::copy_nonoverlapping(from, some.as_mut_ptr(), count);
            vreinterpretq_s32_u8(vld1q_u8(some.as_ptr()))
        })
    }
    #[inline(always)]
    unsafe fn store_first_bytes_ptr(self, to: *mut u8, count: usize, bytes: int32x4_t) {
        intrinsic!({
            let bytes = vreinterpretq_u8_s32(bytes);
            if count >= 16 {
                return vst1q_u8(to, bytes);
            }
            let mut all = [0_u8; 16];
            vst1q_u8(all.as_mut_ptr(), bytes);
            std::ptr::copy_nonoverlapping(all.as_ptr(), to, count);
        })
    }
}
