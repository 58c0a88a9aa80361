//! The values in registers, and their rounding.

use half::{bf16, f16};

/// A type that a register can hold.
pub(crate) trait Reg: Copy {
    fn get(x: u64) -> Self;
    fn put(self) -> u64;
}

macro_rules! reg {
    ($($t:ty, $x:ident => $get:expr, $v:ident => $put:expr;)*) => {
        $(impl Reg for $t {
            #[inline(always)]
            fn get($x: u64) -> Self { $get }
            #[inline(always)]
            fn put(self) -> u64 { let $v = self; $put }
        })*
    };
}

/// Two packed 16-bit values.
#[derive(Clone, Copy)]
pub(crate) struct Two<T>(pub(crate) T, pub(crate) T);

impl<T: Reg> Reg for Two<T> {
    #[inline(always)]
    fn get(x: u64) -> Self {
        Two(T::get(x & 0xFFFF), T::get((x >> 16) & 0xFFFF))
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.0.put() | self.1.put() << 16
    }
}

reg! {
    u16, x => x as u16, v => u64::from(v);
    u32, x => x as u32, v => u64::from(v);
    u64, x => x, v => v;
    i16, x => x as i16, v => u64::from(v as u16);
    i32, x => x as i32, v => u64::from(v as u32);
    i64, x => x as i64, v => v as u64;
    f32, x => f32::from_bits(x as u32), v => u64::from(v.to_bits());
    f64, x => f64::from_bits(x), v => v.to_bits();
    f16, x => f16::from_bits(x as u16), v => u64::from(v.to_bits());
    bf16, x => bf16::from_bits(x as u16), v => u64::from(v.to_bits());
    bool, x => x & 1 != 0, v => u64::from(v);
}

/// A floating-point type, computed in f64.
pub(crate) trait Float: Copy {
    fn wide(self) -> f64;
    fn narrow(x: f64) -> Self;
}

/// Rounds to f32 with round-to-odd, so that rounding the result again to a narrower type equals
/// rounding `x` directly.
pub(crate) fn odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || !near.is_finite() && x.is_infinite() || x.is_nan() {
        return near;
    }
    let bits = near.to_bits();
    // Truncates, then sets the lowest bit. It stands for all bits that were cut off.
    let below = if f64::from(near).abs() > x.abs() { bits - 1 } else { bits };
    f32::from_bits(below | 1)
}

/// Rounds an integer of at most 65 bits to f64 with round-to-odd, as [`odd`] does.
pub(crate) fn odd64(x: i128) -> f64 {
    let toward_zero = round64(x, 1);
    if toward_zero as i128 == x { toward_zero } else { f64::from_bits(toward_zero.to_bits() | 1) }
}

/// Rounds an integer of at most 65 bits to f64. `mode` is 0 to nearest, 1 to zero, 2 down, 3 up.
pub(crate) fn round64(x: i128, mode: u8) -> f64 {
    let near = x as f64;
    // Exact, because `near` is an integer.
    let back = near as i128;
    let down = mode == 2 || mode == 1 && x > 0;
    let up = mode == 3 || mode == 1 && x < 0;
    if down && back > x {
        near.next_down()
    } else if up && back < x {
        near.next_up()
    } else {
        near
    }
}

impl Float for f32 {
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn narrow(x: f64) -> Self {
        x as f32
    }
}
impl Float for f64 {
    fn wide(self) -> f64 {
        self
    }
    fn narrow(x: f64) -> Self {
        x
    }
}
impl Float for f16 {
    fn wide(self) -> f64 {
        f64::from(self.to_f32())
    }
    fn narrow(x: f64) -> Self {
        f16::from_f32(odd(x))
    }
}
impl Float for bf16 {
    fn wide(self) -> f64 {
        f64::from(self.to_f32())
    }
    fn narrow(x: f64) -> Self {
        bf16::from_f32(odd(x))
    }
}

/// Rounds to f32. `mode` is 0 to nearest, 1 to zero, 2 down, 3 up.
pub(crate) fn round32(x: f64, mode: u8) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() {
        return near;
    }
    let up = f64::from(near) > x;
    match mode {
        1 if (x > 0.0) == up => toward_zero(near),
        2 if up => next(near, false),
        3 if !up => next(near, true),
        _ => near,
    }
}

fn toward_zero(x: f32) -> f32 {
    // One less is the next encoding towards zero, also from infinity.
    if x == 0.0 { x } else { f32::from_bits(x.to_bits() - 1) }
}

fn next(x: f32, up: bool) -> f32 {
    match (x == 0.0, (x > 0.0) == up) {
        (true, _) => f32::from_bits(if up { 1 } else { 0x8000_0001 }),
        (false, true) => f32::from_bits(x.to_bits() + 1),
        (false, false) => f32::from_bits(x.to_bits() - 1),
    }
}
