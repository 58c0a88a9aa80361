//! Tests of each operation of each instruction set against its definition in scalar code.

use crate::simd::{Isa, MAX_LANES, Simd, SimdOp, dispatch, max_or_nan, min_or_nan};

/// Zeros, ties, integers, exponents, denormal and special values. Their products are exact, so that
/// FMA does not show.
const VALUES: [f32; 18] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.5,
    -1.5,
    7.25,
    -140.0,
    150.0,
    1.267_650_6e30,
    -1.267_650_6e30,
    f32::MIN_POSITIVE,
    2.24e-44,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

/// Defines `Probe`, which computes every operation on two vectors, and `DEFINITIONS`, what each
/// must yield for a lane.
macro_rules! operations {
    ($s:ident $a:ident $b:ident: $($vector:expr => $definition:expr;)+) => {
        struct Probe([[f32; MAX_LANES]; 2]);

        impl SimdOp for Probe {
            type Output = (usize, Vec<[f32; MAX_LANES]>);
            #[inline(always)]
            fn run<S: Simd>(self, $s: S) -> Self::Output {
                let [$a, $b] = self.0.map(|lanes| $s.from_array(&lanes));
                (S::LANES, vec![$($s.to_array($vector)),+])
            }
        }

        /// The operation's name, and its definition.
        type Definition = (&'static str, fn(f32, f32) -> f32);
        const DEFINITIONS: &[Definition] = &[$((stringify!($vector), $definition)),+];
    };
}

operations! { s a b:
    s.add(a, b) => |a, b| a + b;
    s.sub(a, b) => |a, b| a - b;
    s.mul(a, b) => |a, b| a * b;
    s.div(a, b) => |a, b| a / b;
    s.mul_add(a, b, a) => |a, b| a * b + a;
    s.neg_mul_add(a, b, a) => |a, b| a - a * b;
    s.min_or_second(a, b) => |a, b| if a < b { a } else { b };
    s.max_or_second(a, b) => |a, b| if a > b { a } else { b };
    s.abs(s.min(a, b)) => |a, b| min_or_nan(a, b).abs();
    s.abs(s.max(a, b)) => |a, b| max_or_nan(a, b).abs();
    s.sqrt(a) => |a, _| a.sqrt();
    s.round_even(a) => |a, _| a.round_ties_even();
    s.floor(a) => |a, _| a.floor();
    s.ceil(a) => |a, _| a.ceil();
    s.trunc(a) => |a, _| a.trunc();
    s.scale_by_power_of_two(a, exponent(s, b)) => |a, b| scaled(a, b);
    s.select(s.lt(a, b), a, s.splat(9.0)) => |a, b| if a < b { a } else { 9.0 };
    s.select(s.le(a, b), a, s.splat(9.0)) => |a, b| if a <= b { a } else { 9.0 };
    s.select(s.eq(a, b), a, s.splat(9.0)) => |a, b| if a == b { a } else { 9.0 };
    s.select(s.is_nan(a), b, s.splat(9.0)) => |a, b| if a.is_nan() { b } else { 9.0 };
    s.splat(f32::from(u8::from(s.any(s.lt(a, a))))) => |_, _| 0.0;
    s.splat(f32::from(u8::from(s.any(s.eq(s.splat(1.0), s.splat(1.0)))))) => |_, _| 1.0;
    s.abs(a) => |a, _| a.abs();
    s.neg(a) => |a, _| -a;
    s.with_sign_of(s.abs(a), b) => |a, b| a.abs().copysign(b);
    s.to_f32(s.to_i32(exponent(s, a))) => |a, _| whole(a) as f32;
    s.to_f32(s.to_bits(a)) => |a, _| a.to_bits().cast_signed() as f32;
    s.from_bits(s.add_i32(s.to_bits(a), s.to_bits(b))) => |a, b| of_bits(a, b, u32::wrapping_add);
    s.from_bits(s.sub_i32(s.to_bits(a), s.to_bits(b))) => |a, b| of_bits(a, b, u32::wrapping_sub);
    s.from_bits(s.and_i32(s.to_bits(a), s.to_bits(b))) => |a, b| of_bits(a, b, |a, b| a & b);
    s.from_bits(s.or_i32(s.to_bits(a), s.to_bits(b))) => |a, b| of_bits(a, b, |a, b| a | b);
    s.from_bits(s.xor_i32(s.to_bits(a), s.splat_i32(5))) => |a, _| of_bits(a, a, |a, _| a ^ 5);
    s.from_bits(s.shl_i32::<3>(s.to_bits(a))) => |a, _| of_bits(a, a, |a, _| a << 3);
    s.from_bits(s.shr_i32::<3>(s.to_bits(a))) => |a, _| of_bits(a, a, |a, _| (a.cast_signed() >> 3).cast_unsigned());
}

/// The nearest integer, or 0 for values that are no exponents.
fn whole(value: f32) -> i32 {
    if value.abs() <= 150.0 { value.round_ties_even() as i32 } else { 0 }
}

#[inline(always)]
fn exponent<S: Simd>(s: S, a: S::F32) -> S::F32 {
    s.select(s.le(s.abs(a), s.splat(150.0)), s.round_even(a), s.splat(0.0))
}

fn scaled(a: f32, b: f32) -> f32 {
    (f64::from(a) * 2.0_f64.powi(whole(b))) as f32
}

fn of_bits(a: f32, b: f32, operation: fn(u32, u32) -> u32) -> f32 {
    f32::from_bits(operation(a.to_bits(), b.to_bits()))
}

#[test]
fn operations_agree_with_their_definition() {
    for (start, turn) in (0..VALUES.len()).flat_map(|start| (0..VALUES.len()).map(move |turn| (start, turn)))
    {
        let lanes = |from: usize| std::array::from_fn(|lane| VALUES[(from + lane) % VALUES.len()]);
        let sides = [lanes(start), lanes(start + turn)];
        for isa in Isa::available() {
            let (count, found) = dispatch(isa, Probe(sides));
            for ((name, definition), found) in DEFINITIONS.iter().zip(found) {
                for lane in 0..count {
                    let (a, b) = (sides[0][lane], sides[1][lane]);
                    let (got, want) = (found[lane], definition(a, b));
                    let is_same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                    assert!(is_same, "{name} on {}: {got} and not {want}, of {a} and {b}", isa.name());
                }
            }
        }
    }
}

/// Different numbers for two vectors, all of them exact in half precision.
const NUMBERS: [f32; 2 * MAX_LANES] = {
    let mut numbers = [0.0; 2 * MAX_LANES];
    let mut at = 0;
    while at < numbers.len() {
        numbers[at] = 1.0 + at as f32;
        at += 1;
    }
    numbers
};

/// Moves `count` values, or those of a mask, in each way.
struct Moves(usize, u16);

impl SimdOp for Moves {
    type Output = (usize, Vec<(&'static str, [f32; MAX_LANES])>);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let (count, all) = (self.0.min(S::LANES), s.load(&NUMBERS, 0));
        let mut stored = [0.0; MAX_LANES];
        s.store_partial(&mut stored, 0, count, all);
        let (even, odd) = s.load_even_odd(&NUMBERS, 0);
        let bytes: [u8; MAX_LANES] = std::array::from_fn(|at| 255 - at as u8);
        let mut halves = [0_u16; MAX_LANES];
        // SAFETY: the arrays hold `MAX_LANES` values, and no vector is wider.
        let (masked, bytes, halves) = unsafe {
            s.store_f16_ptr(halves.as_mut_ptr(), all);
            let masked = s.load_masked_ptr(NUMBERS.as_ptr(), s.mask_of_bits(self.1));
            (masked, s.load_u8_ptr(bytes.as_ptr()), s.load_f16_ptr(halves.as_ptr()))
        };
        let moved = vec![
            ("load_partial", s.to_array(s.load_partial(&NUMBERS, 0, count, 0.0))),
            ("load_partial with a fill", s.to_array(s.load_partial(&NUMBERS, 0, count, 9.0))),
            ("store_partial", stored),
            ("load_masked", s.to_array(masked)),
            ("shift_in_first", s.to_array(s.shift_in_first(9.0, all))),
            ("shift_in_last", s.to_array(s.shift_in_last(all, 9.0))),
            ("even", s.to_array(even)),
            ("odd", s.to_array(odd)),
            ("load_u8", s.to_array(s.to_f32(bytes))),
            ("load_f16", s.to_array(halves)),
            ("horizontal_sum", [s.horizontal_sum(all); MAX_LANES]),
            ("horizontal_max", [s.horizontal_max(all); MAX_LANES]),
            ("horizontal_min", [s.horizontal_min(all); MAX_LANES]),
        ];
        (S::LANES, moved)
    }
}

/// Returns what lane `lane` of `lanes` must be after such a move.
fn moved(name: &str, lane: usize, lanes: usize, Moves(count, mask): &Moves) -> f32 {
    let number = NUMBERS[lane];
    match name {
        "load_partial" | "store_partial" => {
            if lane < *count {
                number
            } else {
                0.0
            }
        }
        "load_partial with a fill" => {
            if lane < *count {
                number
            } else {
                9.0
            }
        }
        "load_masked" => {
            if mask >> lane & 1 == 1 {
                number
            } else {
                0.0
            }
        }
        "shift_in_first" => {
            if lane == 0 {
                9.0
            } else {
                number - 1.0
            }
        }
        "shift_in_last" => {
            if lane + 1 == lanes {
                9.0
            } else {
                number + 1.0
            }
        }
        "even" => NUMBERS[2 * lane],
        "odd" => NUMBERS[2 * lane + 1],
        "load_u8" => 255.0 - lane as f32,
        "horizontal_sum" => NUMBERS[..lanes].iter().sum(),
        "horizontal_max" => NUMBERS[lanes - 1],
        "horizontal_min" => NUMBERS[0],
        _ => number,
    }
}

#[test]
fn loads_and_stores_move_the_lanes_that_they_name() {
    for (count, mask) in (0..=MAX_LANES).flat_map(|count| [0, 1, 0xA5A5, 0xFFFF].map(|mask| (count, mask))) {
        for isa in Isa::available() {
            let (lanes, found) = dispatch(isa, Moves(count, mask));
            for (name, found) in found {
                for lane in 0..lanes {
                    let want = moved(name, lane, lanes, &Moves(count, mask));
                    assert_eq!(found[lane], want, "{name} on {}: {count} {mask:#x} {lane}", isa.name());
                }
            }
        }
    }
}
