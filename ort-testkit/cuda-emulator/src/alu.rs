//! The arithmetic of PTX instructions without memory operands (NVIDIA, "PTX ISA"): one function of
//! registers for each, of a single lane or of a whole warp.
//!
//! A register holds its value zero-extended in a `u64`.

use half::{bf16, f16};

use crate::decode::Ty;
use crate::number::{Float, Reg, Two, round32};
use crate::registers::{F1, F2, F3, F4};

/// The minimum. If one operand is NaN it is the other one, unless `nan` propagates it; of two zeros
/// it is the negative one.
fn least<T: Float>(a: T, b: T, nan: bool) -> T {
    let (x, y) = (a.wide(), b.wide());
    if x.is_nan() || y.is_nan() {
        return if x.is_nan() && y.is_nan() || nan {
            T::narrow(f64::NAN)
        } else if x.is_nan() {
            b
        } else {
            a
        };
    }
    // Of two equal values only zeros differ, by their sign.
    if x < y || x == y && x.is_sign_negative() { a } else { b }
}

fn most<T: Float>(a: T, b: T, nan: bool) -> T {
    let (x, y) = (a.wide(), b.wide());
    if x.is_nan() || y.is_nan() {
        return if x.is_nan() && y.is_nan() || nan {
            T::narrow(f64::NAN)
        } else if x.is_nan() {
            b
        } else {
            a
        };
    }
    if x > y || x == y && x.is_sign_positive() { a } else { b }
}

macro_rules! f1 {
    ($t:ty, $a:ident => $e:expr) => {
        Some(
            &(|x: u64| {
                let $a = <$t as Reg>::get(x);
                Reg::put($e)
            }) as F1,
        )
    };
}
macro_rules! f2 {
    ($t:ty, $a:ident, $b:ident => $e:expr) => {
        Some(
            &(|x: u64, y: u64| {
                let ($a, $b) = (<$t as Reg>::get(x), <$t as Reg>::get(y));
                Reg::put($e)
            }) as F2,
        )
    };
}
macro_rules! f3 {
    ($t:ty, $a:ident, $b:ident, $c:ident => $e:expr) => {
        Some(
            &(|x: u64, y: u64, z: u64| {
                let ($a, $b, $c) = (<$t as Reg>::get(x), <$t as Reg>::get(y), <$t as Reg>::get(z));
                Reg::put($e)
            }) as F3,
        )
    };
}
/// Instantiates a macro for the integer types.
macro_rules! ints {
    ($ty:expr, $m:ident, $($v:ident),+ => $e:expr) => {
        match $ty {
            Ty::B16 | Ty::U16 => $m!(u16, $($v),+ => $e),
            Ty::S16 => $m!(i16, $($v),+ => $e),
            Ty::B32 | Ty::U32 => $m!(u32, $($v),+ => $e),
            Ty::S32 => $m!(i32, $($v),+ => $e),
            Ty::B64 | Ty::U64 => $m!(u64, $($v),+ => $e),
            Ty::S64 => $m!(i64, $($v),+ => $e),
            _ => None,
        }
    };
}
/// Instantiates a macro for the floating-point types. One expression serves f32, f64, and the half
/// types, which are computed in f64.
macro_rules! floats {
    (1, $ty:expr, $a:ident => $e:expr) => {
        match $ty {
            Ty::F32 => f1!(f32, $a => $e),
            Ty::F64 => f1!(f64, $a => $e),
            Ty::F16 => f1!(f16, x => { let $a = x.wide(); f16::narrow($e) }),
            Ty::Bf16 => f1!(bf16, x => { let $a = x.wide(); bf16::narrow($e) }),
            Ty::F16x2 => f1!(Two<f16>, x => Two({ let $a = x.0.wide(); f16::narrow($e) }, { let $a = x.1.wide(); f16::narrow($e) })),
            Ty::Bf16x2 => f1!(Two<bf16>, x => Two({ let $a = x.0.wide(); bf16::narrow($e) }, { let $a = x.1.wide(); bf16::narrow($e) })),
            _ => None,
        }
    };
    (2, $ty:expr, $a:ident, $b:ident => $e:expr) => {
        match $ty {
            Ty::F32 => f2!(f32, $a, $b => $e),
            Ty::F64 => f2!(f64, $a, $b => $e),
            Ty::F16 => f2!(f16, x, y => { let ($a, $b) = (x.wide(), y.wide()); f16::narrow($e) }),
            Ty::Bf16 => f2!(bf16, x, y => { let ($a, $b) = (x.wide(), y.wide()); bf16::narrow($e) }),
            Ty::F16x2 => f2!(Two<f16>, x, y => Two(
                { let ($a, $b) = (x.0.wide(), y.0.wide()); f16::narrow($e) },
                { let ($a, $b) = (x.1.wide(), y.1.wide()); f16::narrow($e) })),
            Ty::Bf16x2 => f2!(Two<bf16>, x, y => Two(
                { let ($a, $b) = (x.0.wide(), y.0.wide()); bf16::narrow($e) },
                { let ($a, $b) = (x.1.wide(), y.1.wide()); bf16::narrow($e) })),
            _ => None,
        }
    };
}
/// Instantiates `min` and `max`, which return an operand unchanged and so need no rounding.
macro_rules! picks {
    ($ty:expr, $f:ident, $nan:literal) => {
        match $ty {
            Ty::F32 => f2!(f32, a, b => $f(a, b, $nan)),
            Ty::F64 => f2!(f64, a, b => $f(a, b, $nan)),
            Ty::F16 => f2!(f16, a, b => $f(a, b, $nan)),
            Ty::Bf16 => f2!(bf16, a, b => $f(a, b, $nan)),
            Ty::F16x2 => f2!(Two<f16>, a, b => Two($f(a.0, b.0, $nan), $f(a.1, b.1, $nan))),
            Ty::Bf16x2 => f2!(Two<bf16>, a, b => Two($f(a.0, b.0, $nan), $f(a.1, b.1, $nan))),
            _ => None,
        }
    };
}

/// Instructions with one operand.
pub(crate) fn unary(name: &str, ty: Ty) -> Option<F1> {
    let b = ty.signless();
    match name {
        // Flips the sign bit, of a NaN too.
        "neg" => match ty {
            Ty::F16 | Ty::Bf16 => Some(&|x: u64| x ^ 0x8000),
            Ty::F16x2 | Ty::Bf16x2 => Some(&|x: u64| x ^ 0x8000_8000),
            Ty::F32 => Some(&|x: u64| x ^ 0x8000_0000),
            Ty::F64 => Some(&|x: u64| x ^ 1 << 63),
            _ => ints!(ty, f1, a => a.wrapping_neg_()),
        },
        "abs" => match ty {
            Ty::F16 | Ty::Bf16 => Some(&|x: u64| x & 0x7FFF),
            Ty::F16x2 | Ty::Bf16x2 => Some(&|x: u64| x & 0x7FFF_7FFF),
            Ty::F32 => Some(&|x: u64| x & 0x7FFF_FFFF),
            Ty::F64 => Some(&|x: u64| x & !(1 << 63)),
            // The absolute value of the minimum wraps to itself.
            Ty::S16 => f1!(i16, a => a.wrapping_abs()),
            Ty::S32 => f1!(i32, a => a.wrapping_abs()),
            Ty::S64 => f1!(i64, a => a.wrapping_abs()),
            _ => None,
        },
        "not" if ty == Ty::Pred => Some(&|x: u64| x ^ 1),
        "not" => ints!(b, f1, a => !a),
        "cnot" => ints!(b, f1, a => u32::from(a == 0)),
        "popc" => ints!(b, f1, a => a.count_ones()),
        "clz" => ints!(b, f1, a => a.leading_zeros()),
        "brev" => ints!(b, f1, a => a.reverse_bits()),
        "bfind" => match ty {
            // Without a bit, the subtraction wraps to 0xFFFF_FFFF, which PTX specifies for that
            // case.
            Ty::U32 => f1!(u32, a => 31u32.wrapping_sub(a.leading_zeros())),
            Ty::U64 => f1!(u64, a => 63u32.wrapping_sub(a.leading_zeros())),
            Ty::S32 => f1!(i32, a => 31u32.wrapping_sub((if a < 0 { !a } else { a }).leading_zeros())),
            Ty::S64 => f1!(i64, a => 63u32.wrapping_sub((if a < 0 { !a } else { a }).leading_zeros())),
            _ => None,
        },
        "sqrt" => floats!(1, ty, a => a.sqrt()),
        "rcp" => floats!(1, ty, a => 1.0 / a),
        // In f64 and rounded once, because `1.0 / a.sqrt()` in f32 would round twice.
        "rsqrt" if ty == Ty::F32 => f1!(f32, a => (1.0 / f64::from(a).sqrt()) as f32),
        "rsqrt" => floats!(1, ty, a => 1.0 / a.sqrt()),
        "ex2" if ty == Ty::F32 => f1!(f32, a => f64::from(a).exp2() as f32),
        "ex2" => floats!(1, ty, a => a.exp2()),
        "lg2" if ty == Ty::F32 => f1!(f32, a => f64::from(a).log2() as f32),
        "sin" if ty == Ty::F32 => f1!(f32, a => f64::from(a).sin() as f32),
        "cos" if ty == Ty::F32 => f1!(f32, a => f64::from(a).cos() as f32),
        "tanh" if ty == Ty::F32 => f1!(f32, a => f64::from(a).tanh() as f32),
        "tanh" => floats!(1, ty, a => a.tanh()),
        // `.sat` turns a NaN into +0, so the conditions must be false for it.
        "saturate" => floats!(1, ty, a => if a > 0.0 { if a > 1.0 { 1.0 } else { a } } else { 0.0 }),
        "relu" => floats!(1, ty, a => if a > 0.0 || a.is_nan() { a } else { 0.0 }),
        "flush" => {
            // `.ftz` keeps the sign of a subnormal that it flushes.
            f1!(f32, a => if a.is_subnormal() { f32::from_bits(a.to_bits() & 0x8000_0000) } else { a })
        }
        _ => None,
    }
}

trait Negate {
    fn wrapping_neg_(self) -> Self;
    /// All bits set, independent of the value: a literal of the macro's type.
    fn ones(self) -> Self;
}
macro_rules! negate {
    ($($t:ty)*) => { $(impl Negate for $t { fn wrapping_neg_(self) -> Self { self.wrapping_neg() }
        fn ones(self) -> Self { !0 } })* };
}
negate!(u16 i16 u32 i32 u64 i64);

/// The predicate `testp.what`.
pub(crate) fn test(what: &str, ty: Ty) -> Option<F1> {
    macro_rules! both {
        ($a:ident => $e:expr) => {
            match ty {
                Ty::F32 => f1!(f32, $a => $e),
                Ty::F64 => f1!(f64, $a => $e),
                _ => None,
            }
        };
    }
    match what {
        "finite" => both!(a => a.is_finite()),
        "infinite" => both!(a => a.is_infinite()),
        "number" => both!(a => !a.is_nan()),
        "notanumber" => both!(a => a.is_nan()),
        "normal" => both!(a => a.is_normal()),
        "subnormal" => both!(a => a.is_subnormal()),
        _ => None,
    }
}

fn directed<const M: u8>(name: &str) -> Option<F2> {
    match name {
        "add" => f2!(f32, a, b => round32(f64::from(a) + f64::from(b), M)),
        "sub" => f2!(f32, a, b => round32(f64::from(a) - f64::from(b), M)),
        "mul" => f2!(f32, a, b => round32(f64::from(a) * f64::from(b), M)),
        "div" => f2!(f32, a, b => round32(f64::from(a) / f64::from(b), M)),
        "fma" => None,
        _ => None,
    }
}

/// Instructions on two f32 with a rounding mode other than to nearest, numbered as in [`round32`].
pub(crate) fn rounded(name: &str, mode: u8) -> Option<F2> {
    match mode {
        1 => directed::<1>(name),
        2 => directed::<2>(name),
        _ => directed::<3>(name),
    }
}

/// `fma` of f32 with a rounding mode other than to nearest.
pub(crate) fn rounded_fma(mode: u8) -> Option<F3> {
    match mode {
        1 => f3!(f32, a, b, c => round32(a.wide().mul_add(b.wide(), c.wide()), 1)),
        2 => f3!(f32, a, b, c => round32(a.wide().mul_add(b.wide(), c.wide()), 2)),
        _ => f3!(f32, a, b, c => round32(a.wide().mul_add(b.wide(), c.wide()), 3)),
    }
}

/// Instructions with two operands; `how` is `lo`, `hi`, `wide`, `NaN` or empty.
pub(crate) fn binary(name: &str, how: &str, ty: Ty) -> Option<F2> {
    let b = ty.signless();
    match name {
        "add" if ty.is_int() => ints!(b, f2, a, b => a.wrapping_add(b)),
        "sub" if ty.is_int() => ints!(b, f2, a, b => a.wrapping_sub(b)),
        "mul" if ty.is_int() && how == "lo" => ints!(b, f2, a, b => a.wrapping_mul(b)),
        "mul" if how == "hi" => match ty {
            Ty::U16 => f2!(u16, a, b => ((u32::from(a) * u32::from(b)) >> 16) as u16),
            Ty::S16 => f2!(i16, a, b => ((i32::from(a) * i32::from(b)) >> 16) as i16),
            Ty::U32 => f2!(u32, a, b => ((u64::from(a) * u64::from(b)) >> 32) as u32),
            Ty::S32 => f2!(i32, a, b => ((i64::from(a) * i64::from(b)) >> 32) as i32),
            Ty::U64 => f2!(u64, a, b => ((u128::from(a) * u128::from(b)) >> 64) as u64),
            Ty::S64 => f2!(i64, a, b => ((i128::from(a) * i128::from(b)) >> 64) as i64),
            _ => None,
        },
        "mul" if how == "wide" => match ty {
            Ty::U16 => f2!(u16, a, b => u32::from(a) * u32::from(b)),
            Ty::S16 => f2!(i16, a, b => i32::from(a) * i32::from(b)),
            Ty::U32 => f2!(u32, a, b => u64::from(a) * u64::from(b)),
            Ty::S32 => f2!(i32, a, b => i64::from(a) * i64::from(b)),
            _ => None,
        },
        "mul24" if how == "lo" => match ty {
            Ty::U32 => f2!(u32, a, b => (a & 0xFF_FFFF).wrapping_mul(b & 0xFF_FFFF)),
            Ty::S32 => f2!(i32, a, b => (a << 8 >> 8).wrapping_mul(b << 8 >> 8)),
            _ => None,
        },
        // PTX leaves the result of a division by zero unspecified.
        "div" if ty.is_int() => ints!(ty, f2, a, b => if b == 0 { a.ones() } else { a.wrapping_div(b) }),
        "rem" => ints!(ty, f2, a, b => if b == 0 { a } else { a.wrapping_rem(b) }),
        "min" if ty.is_int() => ints!(ty, f2, a, b => a.min(b)),
        "max" if ty.is_int() => ints!(ty, f2, a, b => a.max(b)),
        "and" if ty == Ty::Pred => Some(&|a: u64, b: u64| a & b),
        "or" if ty == Ty::Pred => Some(&|a: u64, b: u64| a | b),
        "xor" if ty == Ty::Pred => Some(&|a: u64, b: u64| a ^ b),
        "and" => ints!(b, f2, a, b => a & b),
        "or" => ints!(b, f2, a, b => a | b),
        "xor" => ints!(b, f2, a, b => a ^ b),
        "shl" => match b {
            // The amount is a `.u32` for every type. One above the width is clamped to it, so it
            // shifts out all bits.
            Ty::B16 => Some(&|a: u64, n: u64| if n as u32 > 15 { 0 } else { (a << n as u32) & 0xFFFF }),
            Ty::B32 => Some(&|a: u64, n: u64| if n as u32 > 31 { 0 } else { (a << n as u32) & 0xFFFF_FFFF }),
            Ty::B64 => Some(&|a: u64, n: u64| if n as u32 > 63 { 0 } else { a << n as u32 }),
            _ => None,
        },
        "shr" => match ty {
            Ty::B16 | Ty::U16 => {
                Some(&|a: u64, n: u64| if n as u32 > 15 { 0 } else { (a & 0xFFFF) >> n as u32 })
            }
            Ty::B32 | Ty::U32 => {
                Some(&|a: u64, n: u64| if n as u32 > 31 { 0 } else { (a & 0xFFFF_FFFF) >> n as u32 })
            }
            Ty::B64 | Ty::U64 => Some(&|a: u64, n: u64| if n as u32 > 63 { 0 } else { a >> n as u32 }),
            Ty::S16 => Some(&|a: u64, n: u64| (a as i16 >> (n as u32).min(15)).put()),
            Ty::S32 => Some(&|a: u64, n: u64| (a as i32 >> (n as u32).min(31)).put()),
            Ty::S64 => Some(&|a: u64, n: u64| (a as i64 >> (n as u32).min(63)).put()),
            _ => None,
        },
        "add" => floats!(2, ty, a, b => a + b),
        "sub" => floats!(2, ty, a, b => a - b),
        "mul" => floats!(2, ty, a, b => a * b),
        "div" => floats!(2, ty, a, b => a / b),
        "min" if how == "NaN" => picks!(ty, least, true),
        "max" if how == "NaN" => picks!(ty, most, true),
        "min" => picks!(ty, least, false),
        "max" => picks!(ty, most, false),
        "copysign" if ty == Ty::F32 => f2!(u32, a, b => (a & 0x8000_0000) | (b & 0x7FFF_FFFF)),
        "copysign" if ty == Ty::F64 => f2!(u64, a, b => (a & 1 << 63) | (b & !(1 << 63))),
        "pack16" => Some(&|a: u64, b: u64| (a & 0xFFFF) | (b & 0xFFFF) << 16),
        "pack32" => Some(&|a: u64, b: u64| (a & 0xFFFF_FFFF) | b << 32),
        _ => None,
    }
}

fn dot<const A: bool, const B: bool>(a: u64, b: u64, c: u64) -> u64 {
    // Only the low 32 bits of the sum are kept, so the sign of `c` does not matter.
    let mut sum = c as i64;
    for k in 0..4 {
        let (x, y) = ((a >> (8 * k)) as u8, (b >> (8 * k)) as u8);
        let x = if A { i64::from(x as i8) } else { i64::from(x) };
        let y = if B { i64::from(y as i8) } else { i64::from(y) };
        sum = sum.wrapping_add(x * y);
    }
    u64::from(sum as u32)
}

/// `dp4a`, with the signedness of each operand.
pub(crate) fn dot4(a: bool, b: bool) -> F3 {
    match (a, b) {
        (true, true) => &dot::<true, true>,
        (true, false) => &dot::<true, false>,
        (false, true) => &dot::<false, true>,
        (false, false) => &dot::<false, false>,
    }
}

fn field(a: u64, position: u64, length: u64, bits: u32, signed: bool) -> u64 {
    // PTX reads the low eight bits of the position and of the length.
    let (position, length) = ((position & 0xFF) as u32, (length & 0xFF) as u32);
    let mask = if bits == 64 { !0 } else { (1u64 << bits) - 1 };
    let a = a & mask;
    // The sign is the last bit of the field, or the top bit of the register if the field exceeds
    // it.
    let last = (position + length).saturating_sub(1).min(bits - 1);
    let sign = signed && length > 0 && a >> last & 1 != 0;
    let mut out = if position >= bits { 0 } else { a >> position };
    let kept = length.min(bits.saturating_sub(position));
    if kept < 64 {
        out &= (1u64 << kept) - 1;
        if sign {
            out |= !0u64 << kept;
        }
    }
    out & mask
}

fn insert(a: u64, b: u64, position: u64, length: u64, bits: u32) -> u64 {
    let (position, length) = ((position & 0xFF) as u32, (length & 0xFF) as u32);
    if position >= bits || length == 0 {
        return b;
    }
    let kept = length.min(bits - position);
    let mask = (if kept == 64 { !0 } else { (1u64 << kept) - 1 }) << position;
    (b & !mask) | (a << position & mask)
}

/// Instructions with three operands.
pub(crate) fn ternary(name: &str, how: &str, ty: Ty) -> Option<F3> {
    let s = ty.signless();
    match name {
        "mad" if how == "lo" => ints!(s, f3, a, b, c => a.wrapping_mul(b).wrapping_add(c)),
        "mad" if how == "hi" => match ty {
            Ty::U32 => {
                f3!(u32, a, b, c => (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c))
            }
            Ty::S32 => {
                f3!(i32, a, b, c => (((i64::from(a) * i64::from(b)) >> 32) as i32).wrapping_add(c))
            }
            Ty::U64 => {
                f3!(u64, a, b, c => (((u128::from(a) * u128::from(b)) >> 64) as u64).wrapping_add(c))
            }
            Ty::S64 => {
                f3!(i64, a, b, c => (((i128::from(a) * i128::from(b)) >> 64) as i64).wrapping_add(c))
            }
            _ => None,
        },
        "mad" if how == "wide" => match ty {
            Ty::U16 => Some(&|a: u64, b: u64, c: u64| {
                u64::from(((a as u16 as u32) * (b as u16 as u32)).wrapping_add(c as u32))
            }),
            Ty::S16 => Some(&|a: u64, b: u64, c: u64| {
                ((a as i16 as i32) * (b as i16 as i32)).wrapping_add(c as i32).put()
            }),
            Ty::U32 => {
                Some(&|a: u64, b: u64, c: u64| ((a as u32 as u64) * (b as u32 as u64)).wrapping_add(c))
            }
            Ty::S32 => Some(&|a: u64, b: u64, c: u64| {
                ((a as i32 as i64) * (b as i32 as i64)).wrapping_add(c as i64) as u64
            }),
            _ => None,
        },
        "fma" | "mad" => match ty {
            Ty::F32 => f3!(f32, a, b, c => a.mul_add(b, c)),
            Ty::F64 => f3!(f64, a, b, c => a.mul_add(b, c)),
            // The product of two halves is exact in f64, so the sum is rounded once more at most.
            Ty::F16 => f3!(f16, a, b, c => f16::narrow(a.wide() * b.wide() + c.wide())),
            Ty::Bf16 => f3!(bf16, a, b, c => bf16::narrow(a.wide() * b.wide() + c.wide())),
            Ty::F16x2 => f3!(Two<f16>, a, b, c => Two(
                f16::narrow(a.0.wide() * b.0.wide() + c.0.wide()),
                f16::narrow(a.1.wide() * b.1.wide() + c.1.wide()))),
            Ty::Bf16x2 => f3!(Two<bf16>, a, b, c => Two(
                bf16::narrow(a.0.wide() * b.0.wide() + c.0.wide()),
                bf16::narrow(a.1.wide() * b.1.wide() + c.1.wide()))),
            _ => None,
        },
        "sad" => ints!(ty, f3, a, b, c => c.wrapping_add(a.max(b).wrapping_sub(a.min(b)))),
        "bfe" => match ty {
            Ty::U32 => Some(&|a: u64, b: u64, c: u64| field(a, b, c, 32, false)),
            Ty::S32 => Some(&|a: u64, b: u64, c: u64| field(a, b, c, 32, true)),
            Ty::U64 => Some(&|a: u64, b: u64, c: u64| field(a, b, c, 64, false)),
            Ty::S64 => Some(&|a: u64, b: u64, c: u64| field(a, b, c, 64, true)),
            _ => None,
        },
        "shf.l.wrap" => Some(&|a: u64, b: u64, c: u64| ((b << 32 | (a & 0xFFFF_FFFF)) << (c & 31)) >> 32),
        "shf.r.wrap" => {
            Some(&|a: u64, b: u64, c: u64| ((b << 32 | (a & 0xFFFF_FFFF)) >> (c & 31)) & 0xFFFF_FFFF)
        }
        "shf.l.clamp" => Some(&|a: u64, b: u64, c: u64| {
            ((b << 32 | (a & 0xFFFF_FFFF)) << u64::from(c as u32).min(32)) >> 32
        }),
        "shf.r.clamp" => Some(&|a: u64, b: u64, c: u64| {
            ((b << 32 | (a & 0xFFFF_FFFF)) >> u64::from(c as u32).min(32)) & 0xFFFF_FFFF
        }),
        "prmt" => Some(&|a: u64, b: u64, c: u64| {
            let bytes = (a & 0xFFFF_FFFF) | b << 32;
            let mut out = 0;
            for k in 0..4 {
                // The low three bits of a selector choose one of eight bytes. The fourth spreads
                // that byte's sign.
                let selector = c >> (4 * k) & 0xF;
                let mut byte = bytes >> (8 * (selector & 7)) & 0xFF;
                if selector & 8 != 0 {
                    byte = if byte & 0x80 != 0 { 0xFF } else { 0 };
                }
                out |= byte << (8 * k);
            }
            out
        }),
        "select" => Some(&|a: u64, b: u64, p: u64| if p & 1 != 0 { a } else { b }),
        _ => None,
    }
}

/// Instructions with four operands: `bfi` and `lop3`.
pub(crate) fn quaternary(name: &str, ty: Ty) -> Option<F4> {
    match (name, ty.bits()) {
        ("bfi", 32) => Some(&|a: u64, b: u64, c: u64, d: u64| insert(a, b, c, d, 32) & 0xFFFF_FFFF),
        ("bfi", 64) => Some(&|a: u64, b: u64, c: u64, d: u64| insert(a, b, c, d, 64)),
        ("lop3", 32) => Some(&|a: u64, b: u64, c: u64, table: u64| {
            // Row r of the table is for the inputs whose bits form the number r, with `a` the
            // highest.
            let mut out = 0;
            for row in 0..8 {
                if table >> row & 1 != 0 {
                    out |= (if row & 4 != 0 { a } else { !a })
                        & (if row & 2 != 0 { b } else { !b })
                        & (if row & 1 != 0 { c } else { !c });
                }
            }
            out & 0xFFFF_FFFF
        }),
        _ => None,
    }
}

/// Comparisons; the `u` forms are true if an operand is NaN.
pub(crate) fn compare(how: &str, ty: Ty) -> Option<F2> {
    macro_rules! ordered {
        ($e:ident) => {
            match ty {
                Ty::F32 => f2!(f32, a, b => $e!(a, b)),
                Ty::F64 => f2!(f64, a, b => $e!(a, b)),
                Ty::F16 => f2!(f16, a, b => $e!(a, b)),
                Ty::Bf16 => f2!(bf16, a, b => $e!(a, b)),
                _ => ints!(ty, f2, a, b => $e!(a, b)),
            }
        };
    }
    macro_rules! nan {
        ($a:ident, $b:ident => $e:expr) => {
            match ty {
                Ty::F32 => f2!(f32, $a, $b => $e),
                Ty::F64 => f2!(f64, $a, $b => $e),
                Ty::F16 => f2!(f16, $a, $b => $e),
                Ty::Bf16 => f2!(bf16, $a, $b => $e),
                _ => None,
            }
        };
    }
    macro_rules! eq {
        ($a:ident, $b:ident) => {
            $a == $b
        };
    }
    macro_rules! lt {
        ($a:ident, $b:ident) => {
            $a < $b
        };
    }
    macro_rules! le {
        ($a:ident, $b:ident) => {
            $a <= $b
        };
    }
    macro_rules! gt {
        ($a:ident, $b:ident) => {
            $a > $b
        };
    }
    macro_rules! ge {
        ($a:ident, $b:ident) => {
            $a >= $b
        };
    }
    match how {
        "eq" => ordered!(eq),
        "ne" if ty.is_int() => ints!(ty, f2, a, b => a != b),
        "ne" => nan!(a, b => a != b && !a.is_nan() && !b.is_nan()),
        "lt" | "lo" => ordered!(lt),
        "le" | "ls" => ordered!(le),
        "gt" | "hi" => ordered!(gt),
        "ge" | "hs" => ordered!(ge),
        "equ" => nan!(a, b => a == b || a.is_nan() || b.is_nan()),
        "neu" => nan!(a, b => a != b),
        "ltu" => nan!(a, b => a < b || a.is_nan() || b.is_nan()),
        "leu" => nan!(a, b => a <= b || a.is_nan() || b.is_nan()),
        "gtu" => nan!(a, b => a > b || a.is_nan() || b.is_nan()),
        "geu" => nan!(a, b => a >= b || a.is_nan() || b.is_nan()),
        "num" => nan!(a, b => !a.is_nan() && !b.is_nan()),
        "nan" => nan!(a, b => a.is_nan() || b.is_nan()),
        _ => None,
    }
}
