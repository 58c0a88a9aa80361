//! Vectors of four lanes in plain Rust, for any target.

use half::f16;

use super::Simd;

/// Plain Rust, which every CPU can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Portable;

const LANES: usize = 4;

/// Whether the target has FMA without run-time detection. Elsewhere `f32::mul_add` is a slow
/// library call.
const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

#[inline(always)]
fn map<T: Copy, R>(a: [T; LANES], f: impl Fn(T) -> R) -> [R; LANES] {
    std::array::from_fn(|lane| f(a[lane]))
}

#[inline(always)]
fn zip<T: Copy, R>(a: [T; LANES], b: [T; LANES], f: impl Fn(T, T) -> R) -> [R; LANES] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

/// Returns `2^exponent` for the exponent of a normal number.
#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

impl Simd for Portable {
    type F32 = [f32; LANES];
    type I32 = [i32; LANES];
    type Mask = [bool; LANES];
    const LANES: usize = LANES;
    const REGISTERS: usize = 16;
    const IN_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F32 {
        [value; LANES]
    }
    #[inline(always)]
    fn splat_i32(self, value: i32) -> Self::I32 {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> Self::F32 {
        // SAFETY: the caller guarantees `LANES` values; the read needs no alignment.
        unsafe { from.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_partial_ptr(self, from: *const f32, count: usize, fill: f32) -> Self::F32 {
        let mut lanes = [fill; LANES];
        for (lane, value) in lanes.iter_mut().enumerate().take(count) {
            // SAFETY: the caller guarantees `count` values.
            *value = unsafe { from.add(lane).read() };
        }
        lanes
    }
    #[inline(always)]
    unsafe fn load_masked_ptr(self, from: *const f32, mask: Self::Mask) -> Self::F32 {
        let mut lanes = [0.0; LANES];
        for (lane, value) in lanes.iter_mut().enumerate().filter(|(lane, _)| mask[*lane]) {
            // SAFETY: the caller guarantees the memory of the lanes that are set.
            *value = unsafe { from.wrapping_add(lane).read() };
        }
        lanes
    }
    #[inline(always)]
    fn mask_of_bits(self, bits: u16) -> Self::Mask {
        std::array::from_fn(|lane| bits >> lane & 1 == 1)
    }
    #[inline(always)]
    fn shift_in_first(self, first: f32, a: Self::F32) -> Self::F32 {
        [first, a[0], a[1], a[2]]
    }
    #[inline(always)]
    fn shift_in_last(self, a: Self::F32, last: f32) -> Self::F32 {
        [a[1], a[2], a[3], last]
    }
    #[inline(always)]
    fn part_even_odd(self, low: Self::F32, high: Self::F32) -> (Self::F32, Self::F32) {
        let place = |index: usize| if index < LANES { low[index] } else { high[index - LANES] };
        (std::array::from_fn(|lane| place(2 * lane)), std::array::from_fn(|lane| place(2 * lane + 1)))
    }
    #[inline(always)]
    unsafe fn load_u8_ptr(self, from: *const u8) -> Self::I32 {
        // SAFETY: the caller guarantees `LANES` bytes.
        unsafe { map(from.cast::<[u8; LANES]>().read(), i32::from) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, value: Self::F32) {
        // SAFETY: the caller guarantees `LANES` values; the write needs no alignment.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn store_partial_ptr(self, to: *mut f32, count: usize, value: Self::F32) {
        for (lane, value) in value.iter().enumerate().take(count) {
            // SAFETY: the caller guarantees `count` values.
            unsafe { to.add(lane).write(*value) };
        }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, from: *const u16) -> Self::F32 {
        // SAFETY: the caller guarantees `LANES` values; the read needs no alignment.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        map(bits, |bits| f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16_ptr(self, to: *mut u16, value: Self::F32) {
        let bits = map(value, |value| f16::from_f32(value).to_bits());
        // SAFETY: the caller guarantees `LANES` values; the write needs no alignment.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(bits) }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        std::array::from_fn(|lane| {
            if FUSED { a[lane].mul_add(b[lane], c[lane]) } else { a[lane] * b[lane] + c[lane] }
        })
    }
    #[inline(always)]
    fn neg_mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        self.mul_add(map(a, |a| -a), b, c)
    }
    #[inline(always)]
    fn min_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max_or_second(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F32) -> Self::F32 {
        map(a, f32::sqrt)
    }
    #[inline(always)]
    fn round_even(self, a: Self::F32) -> Self::F32 {
        map(a, f32::round_ties_even)
    }
    #[inline(always)]
    fn floor(self, a: Self::F32) -> Self::F32 {
        map(a, f32::floor)
    }
    #[inline(always)]
    fn ceil(self, a: Self::F32) -> Self::F32 {
        map(a, f32::ceil)
    }
    #[inline(always)]
    fn trunc(self, a: Self::F32) -> Self::F32 {
        map(a, f32::trunc)
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, a: Self::F32, n: Self::F32) -> Self::F32 {
        zip(a, n, |a, n| {
            // Two steps keep each factor a normal number, so only the second can round or overflow.
            let n = n.clamp(-252.0, 252.0) as i32;
            a * power_of_two(n >> 1) * power_of_two(n - (n >> 1))
        })
    }

    #[inline(always)]
    fn lt(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        zip(a, b, |a, b| a < b)
    }
    #[inline(always)]
    fn le(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        zip(a, b, |a, b| a <= b)
    }
    #[inline(always)]
    fn eq(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        zip(a, b, |a, b| a == b)
    }
    #[inline(always)]
    fn is_nan(self, a: Self::F32) -> Self::Mask {
        map(a, f32::is_nan)
    }
    #[inline(always)]
    fn select(self, mask: Self::Mask, a: Self::F32, b: Self::F32) -> Self::F32 {
        std::array::from_fn(|lane| if mask[lane] { a[lane] } else { b[lane] })
    }
    #[inline(always)]
    fn any(self, mask: Self::Mask) -> bool {
        mask.contains(&true)
    }

    #[inline(always)]
    fn to_bits(self, a: Self::F32) -> Self::I32 {
        map(a, |a| a.to_bits() as i32)
    }
    #[inline(always)]
    fn from_bits(self, a: Self::I32) -> Self::F32 {
        map(a, |a| f32::from_bits(a as u32))
    }
    #[inline(always)]
    fn to_i32(self, a: Self::F32) -> Self::I32 {
        map(a, |a| a.round_ties_even() as i32)
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I32) -> Self::F32 {
        map(a, |a| a as f32)
    }
    #[inline(always)]
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    fn sub_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, i32::wrapping_sub)
    }
    #[inline(always)]
    fn and_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn or_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, |a, b| a | b)
    }
    #[inline(always)]
    fn xor_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, |a, b| a ^ b)
    }
    #[inline(always)]
    fn shl_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32 {
        map(a, |a| a << BITS)
    }
    #[inline(always)]
    fn shr_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32 {
        map(a, |a| a >> BITS)
    }
}
