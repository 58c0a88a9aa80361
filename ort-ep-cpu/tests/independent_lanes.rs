//! No element of a vector function depends on its neighbours: on how many there are, on which side
//! of the last whole vector it is, nor on their values. Threads cut tensors anywhere, so that all
//! else would give bits that depend on their number.

use ort_ep_cpu::simd::Isa;
use ort_ep_cpu::vector::elementwise::{
    Binary, Operand, Unary, binary, binary_in_place, binary_in_place_swapped, mul_add, unary, unary_in_place,
};

/// Every function of one value.
const UNARY: [Unary; 40] = [
    Unary::Abs,
    Unary::Neg,
    Unary::Sign,
    Unary::Square,
    Unary::Sqrt,
    Unary::Reciprocal,
    Unary::Floor,
    Unary::Ceil,
    Unary::Round,
    Unary::Trunc,
    Unary::Exp,
    Unary::Expm1,
    Unary::Log,
    Unary::Log1p,
    Unary::Erf,
    Unary::Tanh,
    Unary::Sin,
    Unary::Cos,
    Unary::Sigmoid,
    Unary::Softplus,
    Unary::Softsign,
    Unary::Relu,
    Unary::LeakyRelu { alpha: 0.1 },
    Unary::ThresholdedRelu { alpha: 0.75 },
    Unary::Elu { alpha: 1.25 },
    Unary::Selu { alpha: 1.673_263_2, gamma: 1.050_701 },
    Unary::Celu { alpha: 0.7 },
    Unary::Clip { min: -1.5, max: 2.5 },
    Unary::HardSigmoid { alpha: 0.2, beta: 0.5 },
    Unary::HardSwish,
    Unary::Silu,
    Unary::Swish { alpha: 1.702 },
    Unary::Mish,
    Unary::Gelu,
    Unary::GeluTanh,
    Unary::Affine { scale: 1.1, shift: -0.3 },
    Unary::Affine { scale: 1.0, shift: 7.0 },
    Unary::Clip { min: f32::NEG_INFINITY, max: 0.5 },
    Unary::Celu { alpha: -2.0 },
    Unary::LeakyRelu { alpha: -3.0 },
];

const BINARY: [Binary; 8] = [
    Binary::Add,
    Binary::Sub,
    Binary::Mul,
    Binary::Div,
    Binary::Min,
    Binary::Max,
    Binary::PRelu,
    Binary::Pow,
];

/// Lengths around one, two and four of the widest vectors.
const LONGEST: usize = 67;

/// Numbers of all sizes, with special ones strewn in: zeros, infinities, NaN, denormals, the
/// largest, whole ones, and arguments that trigonometric functions reduce another way.
fn numbers(seed: u64) -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MIN_POSITIVE / 3.0,
        -f32::from_bits(1),
        f32::MAX,
        f32::MIN,
        1.0,
        2.0,
        3.0,
        -1.0,
        4096.0,
        -4095.9,
        1e6,
        88.8,
        -104.5,
        0.5,
        2.5,
    ];
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    (0..2 * LONGEST)
        .map(|_| match next() % 4 {
            0 => special[next() as usize % special.len()],
            1 => f32::from_bits((next() << 1) ^ next()),
            _ => (next() as f32 / 2.0_f32.powi(31) - 0.5) * 20.0,
        })
        .collect()
}

/// The same number, or NaN both: which NaN it is, no function says.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Checks `got`, computed together, against `alone` for each place.
fn check(what: &str, got: &[f32], alone: impl Fn(usize) -> f32) {
    for (place, got) in got.iter().enumerate() {
        let want = alone(place);
        assert!(same(*got, want), "{what}, place {place}: {got:e}, alone {want:e}");
    }
}

#[test]
fn functions_of_one_value() {
    for isa in Isa::available() {
        for function in UNARY {
            for seed in 0..3 {
                let all = numbers(seed + 17);
                let alone: Vec<f32> = all
                    .iter()
                    .map(|x| {
                        let mut result = [0.0];
                        unary(isa, function, &[*x], &mut result);
                        result[0]
                    })
                    .collect();
                for len in 1..=LONGEST {
                    let offset = (len * 7) % LONGEST;
                    let from = &all[offset..][..len];
                    let what = format!("{function:?} {isa:?} of {len}");
                    let mut to = vec![0.0; len];
                    unary(isa, function, from, &mut to);
                    check(&what, &to, |place| alone[offset + place]);
                    to.copy_from_slice(from);
                    unary_in_place(isa, function, &mut to);
                    check(&what, &to, |place| alone[offset + place]);
                }
            }
        }
    }
}

#[test]
fn functions_of_two_values() {
    let one = |isa, function, a: f32, b: f32| {
        let mut result = [0.0];
        binary(isa, function, Operand::Slice(&[a]), Operand::Slice(&[b]), &mut result);
        result[0]
    };
    for isa in Isa::available() {
        for function in BINARY {
            let (all_a, all_b) = (numbers(5), numbers(6));
            for len in 1..=LONGEST {
                let offset = (len * 11) % LONGEST;
                let (a, b) = (&all_a[offset..][..len], &all_b[offset..][..len]);
                let what = format!("{function:?} {isa:?} of {len}");
                let mut to = vec![0.0; len];
                binary(isa, function, Operand::Slice(a), Operand::Slice(b), &mut to);
                check(&what, &to, |place| one(isa, function, a[place], b[place]));
                // One number for all places is as that number at each.
                for number in [b[0], 1.0, 2.0, 3.0, -0.5] {
                    binary(isa, function, Operand::Slice(a), Operand::Scalar(number), &mut to);
                    check(&what, &to, |place| one(isa, function, a[place], number));
                    binary(isa, function, Operand::Scalar(number), Operand::Slice(b), &mut to);
                    check(&what, &to, |place| one(isa, function, number, b[place]));
                }
                to.copy_from_slice(a);
                binary_in_place(isa, function, &mut to, Operand::Slice(b));
                check(&what, &to, |place| one(isa, function, a[place], b[place]));
                to.copy_from_slice(b);
                binary_in_place_swapped(isa, function, &mut to, Operand::Slice(a));
                check(&what, &to, |place| one(isa, function, a[place], b[place]));
            }
        }
    }
}

#[test]
fn products_with_a_sum() {
    for isa in Isa::available() {
        let (a, b, c) = (numbers(1), numbers(2), numbers(3));
        for len in 1..=LONGEST {
            let mut to = vec![0.0; len];
            mul_add(isa, &a[..len], &b[..len], &c[..len], &mut to);
            check(&format!("{isa:?} of {len}"), &to, |place| {
                let mut alone = [0.0];
                mul_add(isa, &a[place..=place], &b[place..=place], &c[place..=place], &mut alone);
                alone[0]
            });
        }
    }
}
