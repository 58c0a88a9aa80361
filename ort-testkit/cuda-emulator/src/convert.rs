//! `cvt`: conversions between all types (NVIDIA, "PTX ISA").

use half::{bf16, f16};

use crate::decode::Ty;
use crate::number::{Float, Reg, odd, odd64, round32, round64};

fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(0x7FFF_FFFF) } else { x }
}

/// The types and modifiers of a `cvt`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cvt {
    pub(crate) to: Ty,
    pub(crate) from: Ty,
    /// 0 to nearest, 1 to zero, 2 down, 3 up; plus 4 if to an integral value; 8 to nearest, ties
    /// away from zero.
    pub(crate) round: u8,
    pub(crate) saturate: bool,
    pub(crate) relu: bool,
    /// Width of the destination register in bits.
    pub(crate) width: u8,
}

/// Converts the value of a register.
pub(crate) fn convert(how: Cvt, x: u64) -> u64 {
    let signed = |bits: u32| (x << (64 - bits)) as i64 >> (64 - bits);
    let out = if how.from.is_int() {
        let bits = how.from.bits();
        // 128 bits hold the signed and the unsigned range of 64-bit integers.
        let value: i128 = if how.from.is_signed() {
            i128::from(signed(bits))
        } else {
            i128::from(x << (64 - bits) >> (64 - bits))
        };
        if how.to.is_int() {
            integer(how, value)
        } else {
            let mode = how.round & 3;
            // `odd64` keeps the sticky bit, so large integers are not rounded twice.
            let wide = if how.to == Ty::F64 { round64(value, mode) } else { odd64(value) };
            from_wide(how.to, wide, mode, how)
        }
    } else {
        let value = match how.from {
            Ty::F16 => f16::get(x).wide(),
            Ty::Bf16 => bf16::get(x).wide(),
            Ty::F32 => f32::get(x).wide(),
            _ => f64::get(x),
        };
        let whole = |v: f64| match how.round & 3 {
            0 => v.round_ties_even(),
            1 => v.trunc(),
            2 => v.floor(),
            _ => v.ceil(),
        };
        if how.to.is_int() {
            integer(how, if value.is_nan() { of_nan(how) } else { whole(value) as i128 })
        } else {
            let (value, mode) = if how.round & 4 != 0 { (whole(value), 0) } else { (value, how.round & 11) };
            from_wide(how.to, value, mode, how)
        }
    };
    if how.width >= 64 { out } else { out & ((1 << how.width) - 1) }
}

/// The integer that stands for a NaN: only the highest bit, or 0 if neither side has 64 bits.
fn of_nan(how: Cvt) -> i128 {
    let bits = how.to.bits();
    match how.from == Ty::F64 || bits == 64 {
        true if how.to.is_signed() => -(1i128 << (bits - 1)),
        true => 1i128 << (bits - 1),
        false => 0,
    }
}

fn integer(how: Cvt, value: i128) -> u64 {
    let bits = how.to.bits();
    let (low, high) = if how.to.is_signed() {
        (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
    } else {
        (0, (1i128 << bits) - 1)
    };
    // Float to integer always saturates; integer to integer wraps unless `.sat` is set.
    if how.saturate || !how.from.is_int() {
        return value.clamp(low, high) as u64;
    }
    if how.to.is_signed() {
        ((value << (128 - bits)) >> (128 - bits)) as u64
    } else {
        (value & ((1i128 << bits) - 1)) as u64
    }
}

fn from_wide(to: Ty, value: f64, mode: u8, how: Cvt) -> u64 {
    let mut value = value;
    if how.relu && value <= 0.0 {
        value = 0.0;
    }
    if how.saturate {
        value = if value > 0.0 { value.min(1.0) } else { 0.0 };
    }
    match to {
        Ty::F16 if value.is_nan() => 0x7FFF,
        Ty::Bf16 if value.is_nan() => 0x7FFF,
        Ty::F16 if mode == 0 => f16::narrow(value).put(),
        Ty::Bf16 if mode == 0 => bf16::narrow(value).put(),
        Ty::F16 => toward(value, f16::narrow(value).wide(), f16::narrow(value).put(), mode),
        Ty::Bf16 => toward(value, bf16::narrow(value).wide(), bf16::narrow(value).put(), mode),
        Ty::F32 => canonical(round32(value, mode)).put(),
        // `odd` rounds f64 to f32 without losing the sticky bit, so the second rounding is correct.
        Ty::Tf32 if mode == 0 => {
            let bits = odd(value).to_bits();
            // Ties to even: half minus one of the 13 bits that are dropped, plus the lowest bit
            // that stays.
            u64::from(bits.wrapping_add(0xFFF + (bits >> 13 & 1)) & !0x1FFF)
        }
        // Ties away from zero: half of what is dropped is added to the magnitude.
        Ty::Tf32 => u64::from((value as f32).to_bits().wrapping_add(0x1000) & !0x1FFF),
        _ => value.put(),
    }
}

/// Adjusts `bits`, the encoding of `near`, which is nearest to `value`, to its neighbour if the
/// rounding mode requires it.
fn toward(value: f64, near: f64, bits: u64, mode: u8) -> u64 {
    let (smaller, larger) = (near.abs() > value.abs(), near.abs() < value.abs());
    let negative = value.is_sign_negative();
    // Consecutive encodings are neighbours in magnitude, and infinity follows the largest finite
    // number.
    match mode {
        1 if smaller => bits - 1,
        2 if negative && larger => bits + 1,
        3 if !negative && larger => bits + 1,
        2 if !negative && smaller => bits - 1,
        3 if negative && smaller => bits - 1,
        _ => bits,
    }
}
