//! Tests of GEMM against a reference sum in `f64`, for every instruction set of this CPU.

use std::sync::Mutex;

use ort_testkit::random_values;
use proptest::prelude::*;

use super::*;
use ort_cpu_vector::simd::quantized_rows::QuantizedType;

const ISAS: [Isa; 4] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512];

/// Rounds values to a precision, so that products are exact and only accumulation rounds.
fn rounded(precision: Precision, values: Vec<f32>) -> Vec<f32> {
    match precision {
        Precision::Fp32 => values,
        Precision::Bf16 => values.into_iter().map(|value| half::bf16::from_f32(value).to_f32()).collect(),
    }
}

fn reference(a: &Strided, b: &Strided) -> Vec<f64> {
    let mut c = vec![0.0; a.rows * b.columns];
    for row in 0..a.rows {
        for column in 0..b.columns {
            c[row * b.columns + column] = (0..a.columns)
                .map(|step| {
                    let lhs = a.values[row * a.row_stride + step * a.column_stride];
                    let rhs = b.values[step * b.row_stride + column * b.column_stride];
                    f64::from(lhs) * f64::from(rhs)
                })
                .sum();
        }
    }
    c
}

fn assert_close(found: &[f32], expected: &[f64], k: usize, what: &str) {
    let tolerance = 1e-6 * (k as f64).sqrt() + 2e-6;
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - expected).abs();
        assert!(error <= tolerance * (1.0 + expected.abs()), "{what} at {index}: {found} is not {expected}");
    }
}

#[derive(Clone, Copy, Debug)]
enum Layout {
    Rows,
    Columns,
    Gaps,
}

impl Layout {
    fn strides(self, rows: usize, columns: usize) -> [usize; 2] {
        match self {
            Layout::Rows => [columns + 3, 1],
            Layout::Columns => [1, rows + 1],
            Layout::Gaps => [columns * 2 + 1, 2],
        }
    }
}

const LAYOUTS: [Layout; 3] = [Layout::Rows, Layout::Columns, Layout::Gaps];

fn needed(shape: [usize; 2], strides: [usize; 2]) -> usize {
    shape[0] * strides[0] + shape[1] * strides[1]
}

/// Computes one GEMM with every combination of operand kinds and compares each with the reference.
fn check(shape: [usize; 3], a_layout: Layout, b_layout: Layout) {
    Cpu::precisions().for_each(|precision| check_in(precision, shape, a_layout, b_layout));
}

fn check_in(precision: Precision, shape: [usize; 3], a_layout: Layout, b_layout: Layout) {
    let [m, n, k] = shape;
    let (a_strides, b_strides) = (a_layout.strides(m, k), b_layout.strides(k, n));
    let a_values = rounded(precision, random_values(needed([m, k], a_strides), 1));
    let b_values = rounded(precision, random_values(needed([k, n], b_strides), 2));
    let a = Strided::new(&a_values, [m, k], a_strides).unwrap();
    let b = Strided::new(&b_values, [k, n], b_strides).unwrap();
    let expected = reference(&a, &b);
    for isa in ISAS {
        for threads in [1, 2] {
            let cpu = Cpu { isa, precision, ..Cpu::with_threads(threads) };
            let mut packed_lhs = vec![f32::NAN; PackedLhs::len(cpu, m, k)];
            pack_lhs(cpu, &a_values, [m, k], a_strides, &mut packed_lhs).unwrap();
            let mut packed_rhs = vec![f32::NAN; PackedRhs::len(cpu, k, n)];
            pack_rhs(cpu, &b_values, [k, n], b_strides, &mut packed_rhs).unwrap();
            let lhs =
                [LhsOperand::Plain(a), LhsOperand::Packed(PackedLhs::new(cpu, &packed_lhs, m, k).unwrap())];
            let rhs =
                [RhsOperand::Plain(b), RhsOperand::Packed(PackedRhs::new(cpu, &packed_rhs, k, n).unwrap())];
            for a in lhs {
                for b in rhs {
                    let gemm = Gemm::new(a, b);
                    let mut workspace = vec![f32::NAN; workspace_len(cpu, 1, shape, b.source())];
                    let mut c = vec![f32::NAN; m * n];
                    gemm.run(cpu, &mut c, n, &mut workspace).unwrap();
                    assert_close(&c, &expected, k, &format!("{cpu:?} {shape:?} {a_layout:?} {b_layout:?}"));
                }
            }
        }
    }
}

#[test]
fn edges_of_every_kind() {
    let sizes = [
        [1, 1, 1],
        [8, 48, 16],
        [9, 49, 17],
        [70, 100, 33],
        [65, 17, 400],
        [1, 70, 5],
        [70, 1, 5],
        [1, 200, 33],
        [2, 200, 33],
        [300, 49, 20],
        [600, 49, 20],
    ];
    for shape in sizes {
        for a in LAYOUTS {
            for b in LAYOUTS {
                check(shape, a, b);
            }
        }
    }
}

#[test]
fn empty_products() {
    for shape in [[0, 5, 3], [5, 0, 3], [5, 3, 0]] {
        check(shape, Layout::Rows, Layout::Rows);
    }
}

#[test]
fn blocks_beyond_the_caches() {
    check([130, 500, 900], Layout::Rows, Layout::Rows);
    check([130, 500, 900], Layout::Columns, Layout::Columns);
    // B is packed here: each row is used often, or its rows compete for cache sets.
    check([520, 100, 30], Layout::Rows, Layout::Rows);
    check([20, 4096, 40], Layout::Rows, Layout::Rows);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn any_small_shape(m in 1_usize..70, n in 1_usize..70, k in 1_usize..70, a in 0_usize..3, b in 0_usize..3) {
        check([m, n, k], LAYOUTS[a], LAYOUTS[b]);
    }
}

#[test]
fn same_bits_on_any_number_of_threads() {
    let [m, n, k] = [150, 333, 777];
    let (a_values, b_values) = (random_values(m * k, 3), random_values(k * n, 4));
    for (isa, precision) in
        ISAS.into_iter().flat_map(|isa| Cpu::precisions().map(move |precision| (isa, precision)))
    {
        let run = |threads: usize| {
            let cpu = Cpu { isa, precision, ..Cpu::with_threads(threads) };
            let gemm = Gemm::new(
                LhsOperand::Plain(Strided::row_major(&a_values, m, k).unwrap()),
                RhsOperand::Plain(Strided::row_major(&b_values, k, n).unwrap()),
            );
            let mut workspace = vec![0.0; workspace_len(cpu, 1, [m, n, k], gemm.rhs.source())];
            let mut c = vec![0.0; m * n];
            gemm.run(cpu, &mut c, n, &mut workspace).unwrap();
            c.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(2));
        assert_eq!(run(1), run(3));
        assert_eq!(run(1), run(7));
    }
}

#[test]
fn few_columns_have_the_bits_of_tiles() {
    // Packed rows of 6 or 8 take another kernel for the last 1 to 4 columns.
    let rows = [8, 16, 24, 29, 61, 9, 134];
    let sizes = rows.into_iter().flat_map(|m| [2, 3, 4, 5, 49, 100].map(|n| [m, n]));
    for ([m, n], k) in sizes.flat_map(|size| [1, 7, 400].map(|k| (size, k))) {
        let (a_values, b_values) = (random_values(m * k, 5), random_values(k * n, 6));
        let (bias, residual) = (random_values(m, 7), random_values(m * n, 8));
        let steps = [
            Step::RowBias(&bias),
            Step::Residual { values: &residual, row_stride: n },
            Step::Activate(Activation::Clip { min: -0.5, max: 0.5 }),
        ];
        for isa in ISAS {
            let cpu = Cpu { isa, ..Cpu::with_threads(1) };
            let mut packed = vec![f32::NAN; PackedLhs::len(cpu, m, k)];
            pack_lhs(cpu, &a_values, [m, k], [k, 1], &mut packed).unwrap();
            let run = |lhs: LhsOperand, b_strides: [usize; 2]| {
                let rhs = RhsOperand::Plain(Strided::new(&b_values, [k, n], b_strides).unwrap());
                let gemm = Gemm { alpha: 0.75, beta: -1.5, epilogue: &steps, ..Gemm::new(lhs, rhs) };
                let mut workspace =
                    vec![f32::NAN; workspace_len_beside_ready(cpu, 1, [m, n, k], rhs.source())];
                let mut c = random_values(m * n, 9);
                gemm.run(cpu, &mut c, n, &mut workspace).unwrap();
                c.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
            };
            for b_strides in [[n, 1], [1, k]] {
                let tiles = run(LhsOperand::Plain(Strided::row_major(&a_values, m, k).unwrap()), b_strides);
                let few = run(LhsOperand::Packed(PackedLhs::new(cpu, &packed, m, k).unwrap()), b_strides);
                assert!(few == tiles, "{isa:?} {m} {n} {k} {b_strides:?}");
            }
        }
    }
}

#[test]
fn large_matrices_are_packed_in_parts() {
    let [m, n, k] = [3, 1030, 1101];
    let (a, b) = (random_values(m * k, 10), random_values(n * k, 11));
    for (isa, b_strides) in ISAS.into_iter().flat_map(|isa| [[n, 1], [1, k]].map(|strides| (isa, strides))) {
        let cpu = Cpu { isa, ..Cpu::with_threads(2) };
        let mut packed = vec![f32::NAN; PackedRhs::len(cpu, k, n)];
        let parts = Mutex::new(Vec::new());
        let done = |part| parts.lock().unwrap().push(part);
        pack_rhs_in_parts(cpu, &b, [k, n], b_strides, &mut packed, &done).unwrap();
        let parts = parts.into_inner().unwrap();
        assert!(parts.len() > 1);
        assert_eq!((parts[0].start, parts[parts.len() - 1].end), (0, b.len()));
        assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start), "{parts:?}");
        let run = |rhs: RhsOperand| {
            let lhs = LhsOperand::Plain(Strided::row_major(&a, m, k).unwrap());
            let gemm = Gemm::new(lhs, rhs);
            let mut workspace = vec![f32::NAN; workspace_len(cpu, 1, [m, n, k], rhs.source())];
            let mut c = vec![0.0; m * n];
            gemm.run(cpu, &mut c, n, &mut workspace).unwrap();
            c.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        let plain = run(RhsOperand::Plain(Strided::new(&b, [k, n], b_strides).unwrap()));
        let from_parts = run(RhsOperand::Packed(PackedRhs::new(cpu, &packed, k, n).unwrap()));
        assert!(from_parts == plain, "{isa:?} {b_strides:?}");
    }
}

#[test]
fn bfloat16_factors_are_rounded_to_nearest_and_take_half_the_memory() {
    // Ties, which round to even, and values close to ties.
    let [m, n, k] = [19, 67, 301];
    let ties = |seed| -> Vec<f32> {
        let ends = [0x8000, 0x7FFF, 0x8001, 0];
        let numbers = random_values(m.max(n) * k, seed);
        let tie = |(at, value): (usize, f32)| f32::from_bits(value.to_bits() & 0xFFFF_0000 | ends[at % 4]);
        numbers.into_iter().enumerate().map(tie).collect()
    };
    for precision in Cpu::precisions().skip(1) {
        let cpu = Cpu { precision, ..Cpu::with_threads(1) };
        assert_eq!(PackedRhs::len(cpu, k, n), PackedRhs::len(Cpu::with_threads(1), k.div_ceil(2), n));
        assert_eq!(PackedLhs::len(cpu, m, k), PackedLhs::len(Cpu::with_threads(1), m, k.div_ceil(2)));
        let (a, b) = (ties(13), ties(14));
        let run = |a: &[f32], b: &[f32], strides: [[usize; 2]; 2], packs: bool| {
            let mut packed = vec![f32::NAN; PackedRhs::len(cpu, k, n)];
            pack_rhs(cpu, b, [k, n], strides[1], &mut packed).unwrap();
            let rhs = match packs {
                true => RhsOperand::Packed(PackedRhs::new(cpu, &packed, k, n).unwrap()),
                false => RhsOperand::Plain(Strided::new(b, [k, n], strides[1]).unwrap()),
            };
            let gemm = Gemm::new(LhsOperand::Plain(Strided::new(a, [m, k], strides[0]).unwrap()), rhs);
            let mut workspace = vec![f32::NAN; workspace_len(cpu, 1, [m, n, k], gemm.rhs.source())];
            let mut c = vec![f32::NAN; m * n];
            gemm.run(cpu, &mut c, n, &mut workspace).unwrap();
            c
        };
        for strides in [[[k, 1], [n, 1]], [[1, m], [1, k]]] {
            let expected =
                run(&rounded(precision, a.clone()), &rounded(precision, b.clone()), strides, false);
            assert!(expected == run(&a, &b, strides, false) && expected == run(&a, &b, strides, true));
            let exact = reference(
                &Strided::new(&a, [m, k], strides[0]).unwrap(),
                &Strided::new(&b, [k, n], strides[1]).unwrap(),
            );
            let error = |(found, exact): (&f32, &f64)| (f64::from(*found) - exact).abs();
            // Unlike `f64::max`, `total_cmp` keeps a NaN.
            let largest = expected.iter().zip(&exact).map(error).max_by(f64::total_cmp).unwrap();
            assert!((1e-4..0.1).contains(&largest), "{largest} is not what rounding to bfloat16 does");
        }
    }
}

#[test]
fn epilogues() {
    type Formula = fn(f64) -> f64;
    let activations: [(Activation, Formula); 7] = [
        (Activation::Relu, |x| x.max(0.0)),
        (Activation::Clip { min: -0.5, max: 0.75 }, |x| x.clamp(-0.5, 0.75)),
        (Activation::LeakyRelu { alpha: 0.25 }, |x| if x < 0.0 { 0.25 * x } else { x }),
        (Activation::HardSigmoid { alpha: 0.25, beta: 0.5 }, |x| (0.25 * x + 0.5).clamp(0.0, 1.0)),
        (Activation::HardSwish, |x| x * (x / 6.0 + 0.5).clamp(0.0, 1.0)),
        (Activation::Tanh, f64::tanh),
        (Activation::Silu, |x| x / (1.0 + (-x).exp())),
    ];
    for [m, n, k] in [[1, 30, 9], [13, 1, 9], [13, 55, 9], [70, 55, 500]] {
        let (a_values, b_values) = (
            rounded(Precision::Bf16, random_values(m * k, 5)),
            rounded(Precision::Bf16, random_values(k * n, 6)),
        );
        let (rows, columns, residual) =
            (random_values(m, 7), random_values(n, 8), random_values(m * (n + 2), 9));
        let a = Strided::row_major(&a_values, m, k).unwrap();
        let b = Strided::row_major(&b_values, k, n).unwrap();
        let product = reference(&a, &b);
        for (activation, formula) in activations {
            let steps = [
                Step::RowBias(&rows),
                Step::ColumnBias(&columns),
                Step::Residual { values: &residual, row_stride: n + 2 },
                Step::Activate(activation),
                Step::Scale(2.0),
                Step::Activate(Activation::Neg),
                Step::RowBias(&rows),
                Step::ColumnBias(&columns),
                Step::Residual { values: &residual, row_stride: n + 2 },
                Step::Activate(activation),
            ];
            let before = random_values(m * n, 10);
            let expected: Vec<f64> = (0..m * n)
                .map(|index| {
                    let (row, column) = (index / n, index % n);
                    let added = f64::from(rows[row])
                        + f64::from(columns[column])
                        + f64::from(residual[row * (n + 2) + column]);
                    let sum = 0.5 * product[index] + 0.25 * f64::from(before[index]);
                    formula(-2.0 * formula(sum + added) + added)
                })
                .collect();
            for (isa, precision) in
                ISAS.into_iter().flat_map(|isa| Cpu::precisions().map(move |precision| (isa, precision)))
            {
                let cpu = Cpu { isa, precision, ..Cpu::with_threads(2) };
                let gemm = Gemm {
                    alpha: 0.5,
                    beta: 0.25,
                    epilogue: &steps,
                    ..Gemm::new(LhsOperand::Plain(a), RhsOperand::Plain(b))
                };
                let mut workspace = vec![0.0; workspace_len(cpu, 1, [m, n, k], gemm.rhs.source())];
                let mut c = before.clone();
                gemm.run(cpu, &mut c, n, &mut workspace).unwrap();
                assert_close(&c, &expected, 4 * k, &format!("{cpu:?} {activation:?}"));
            }
        }
    }
}

#[test]
fn nan_passes_through_activations() {
    for isa in ISAS {
        let cpu = Cpu { isa, ..Cpu::with_threads(1) };
        let (a, b) = ([f32::NAN; 4], [1.0; 40]);
        let steps = [Step::Activate(Activation::Relu)];
        let gemm = Gemm {
            epilogue: &steps,
            ..Gemm::new(
                LhsOperand::Plain(Strided::row_major(&a, 2, 2).unwrap()),
                RhsOperand::Plain(Strided::row_major(&b, 2, 20).unwrap()),
            )
        };
        let mut c = [0.0; 40];
        gemm.run(cpu, &mut c, 20, &mut []).unwrap();
        assert!(c.iter().all(|value| value.is_nan()), "{isa:?}");
    }
}

#[test]
fn batches_and_half_precision_weights() {
    let (count, [m, n, k]) = (5, [33, 40, 24]);
    let a_values = random_values(count * m * k, 11);
    let halves: Vec<half::f16> = random_values(k * n, 12).into_iter().map(half::f16::from_f32).collect();
    let widened: Vec<f32> = halves.iter().map(|value| value.to_f32()).collect();
    for isa in ISAS {
        let cpu = Cpu { isa, ..Cpu::with_threads(2) };
        let mut packed = vec![0.0; PackedRhs::len(cpu, k, n)];
        pack_rhs(cpu, &halves, [k, n], [n, 1], &mut packed).unwrap();
        let rhs = PackedRhs::new(cpu, &packed, k, n).unwrap();
        let lhs = |index: usize| Strided::row_major(&a_values[index * m * k..], m, k);
        let mut c = vec![0.0; count * m * n];
        let batch = Batch { values: &mut c, count, row_stride: n, batch_stride: m * n };
        run_batch(
            cpu,
            &|index| Ok(Gemm::new(LhsOperand::Plain(lhs(index)?), RhsOperand::Packed(rhs))),
            batch,
            &mut [],
        )
        .unwrap();
        for (index, c) in c.chunks(m * n).enumerate() {
            let expected = reference(&lhs(index).unwrap(), &Strided::row_major(&widened, k, n).unwrap());
            assert_close(c, &expected, k, &format!("{isa:?} product {index}"));
        }
    }
}

#[test]
fn refusals() {
    let cpu = Cpu { isa: Isa::Scalar, ..Cpu::with_threads(1) };
    let numbers = [0.0; 12];
    assert!(Strided::row_major(&numbers, 4, 4).is_err());
    let a = Strided::row_major(&numbers, 3, 4).unwrap();
    let gemm = Gemm::new(LhsOperand::Plain(a), RhsOperand::Plain(a));
    assert!(gemm.run(cpu, &mut [0.0; 12], 4, &mut []).is_err());
    let gemm = Gemm::new(LhsOperand::Plain(a), RhsOperand::Plain(a.transposed()));
    assert!(gemm.run(cpu, &mut [0.0; 8], 3, &mut [0.0; 4096]).is_err());
    assert!(gemm.run(cpu, &mut [0.0; 9], 3, &mut []).is_err());
    let steps = [Step::RowBias(&numbers[..2])];
    let gemm = Gemm { epilogue: &steps, ..gemm };
    assert!(gemm.run(cpu, &mut [0.0; 9], 3, &mut [0.0; 4096]).is_err());
}

#[test]
fn other_number_types() {
    for [m, n, k] in [[1, 1, 1], [3, 5, 7], [17, 530, 33], [4, 6, 0]] {
        for isa in ISAS {
            for b_strides in [[n, 1], [1, k]] {
                let cpu = Cpu { isa, ..Cpu::with_threads(2) };
                let a: Vec<i64> = (0..m * k).map(|index| (index as i64 * 7919) % 101 - 50).collect();
                let b: Vec<i64> = (0..k * n).map(|index| (index as i64 * 104_729) % 97 - 48).collect();
                let at = |row: usize, column: usize| -> i64 {
                    let rhs = |step: usize| b[step * b_strides[0] + column * b_strides[1]];
                    (0..k).map(|step| a[row * k + step] * rhs(step)).sum()
                };
                let expected: Vec<i64> = (0..m * n).map(|index| at(index / n, index % n)).collect();
                let mut c = vec![1; m * n];
                let view = |values| generic::View::new(values, [m, k], [k, 1]).unwrap();
                let rhs = |values| generic::View::new(values, [k, n], b_strides).unwrap();
                generic::multiply(cpu, view(&a), rhs(&b), &mut c).unwrap();
                assert_eq!(c, expected);
            }
        }
    }
}

/// A quantized matrix against the same matrix of floats: every type and order, scales of every
/// kind, few and many rows. The bits are equal.
#[test]
fn a_quantized_matrix_has_the_bits_of_its_floats() {
    let types =
        [2, 4, 8].into_iter().flat_map(|bits| [false, true].map(|signed| QuantizedType { bits, signed }));
    // The k steps and the columns of a block; 0 is all of them.
    let blocks = [[0, 0], [0, 1], [1, 0], [16, 1], [5, 1], [1, 7]];
    for (case, (dtype, block)) in types.flat_map(|dtype| blocks.map(|block| (dtype, block))).enumerate() {
        for (m, n, k) in [(1, 100, 401), (9, 49, 16), (30, 70, 400)] {
            let by_columns = case % 2 == m % 2;
            let strides = if by_columns { [1, k] } else { [n, 1] };
            let bytes: Vec<u8> =
                (0..(n * k * dtype.bits).div_ceil(8)).map(|at| (at * 37 + at / 7) as u8).collect();
            let code = |bytes: &[u8], at: usize| {
                let code = i32::from(bytes[at * dtype.bits / 8]) >> (at * dtype.bits % 8);
                let code = code & ((1 << dtype.bits) - 1);
                let is_negative = dtype.signed && code >= 1 << (dtype.bits - 1);
                if is_negative { code - (1 << dtype.bits) } else { code }
            };
            let block = [0, 1].map(|axis| if block[axis] == 0 { [k, n][axis] } else { block[axis] });
            let counts = [k.div_ceil(block[0]), n.div_ceil(block[1])];
            let count = counts[0] * counts[1];
            let scales: Vec<f32> = (0..count).map(|at| (at * 13 % 50 + 1) as f32 / 512.0).collect();
            let zeros: Vec<u8> =
                (0..(count * dtype.bits).div_ceil(8)).map(|at| (at * 29 + at / 5) as u8).collect();
            let place = |step: usize, column: usize| step / block[0] * counts[1] + column / block[1];
            let mut floats = vec![0.0; n * k];
            for (step, column) in (0..k).flat_map(|step| (0..n).map(move |column| (step, column))) {
                let at = step * strides[0] + column * strides[1];
                let place = place(step, column);
                floats[at] = (code(&bytes, at) - code(&zeros, place)) as f32 * scales[place];
            }
            let matrix = QuantizedMatrix::new(
                dtype,
                [k, n],
                &bytes,
                by_columns,
                Scales {
                    scales: Numbers::F32(bytemuck::cast_slice(&scales)),
                    zeros: Some(&zeros),
                    block,
                    strides: [counts[1], 1],
                },
            )
            .unwrap();
            let a = random_values(m * k, case as u32);
            let lhs = LhsOperand::Plain(Strided::row_major(&a, m, k).unwrap());
            for (isa, precision) in ISAS.into_iter().flat_map(|isa| Cpu::precisions().map(move |p| (isa, p)))
            {
                let cpu = Cpu { isa, precision, ..Cpu::with_threads(2) };
                let mut packed = vec![f32::NAN; PackedRhs::len(cpu, k, n)];
                pack_rhs(cpu, &floats, [k, n], strides, &mut packed).unwrap();
                let packed = RhsOperand::Packed(PackedRhs::new(cpu, &packed, k, n).unwrap());
                let [expected, found] = [packed, RhsOperand::Quantized(matrix)].map(|rhs| {
                    let mut workspace = vec![f32::NAN; workspace_len(cpu, 1, [m, n, k], rhs.source())];
                    let mut c = vec![f32::NAN; m * n];
                    Gemm::new(lhs, rhs).run(cpu, &mut c, n, &mut workspace).unwrap();
                    c
                });
                assert!(found == expected, "{cpu:?} {dtype:?} {m} {n} {k} {block:?} {by_columns}");
            }
        }
    }
}

#[test]
fn a_quantized_matrix_is_as_long_as_its_shape_says() {
    let scales = |len: usize, block: [usize; 2]| Scales {
        scales: Numbers::F32(&[0; 64][..4 * len]),
        zeros: Some(&[0; 4][..len.div_ceil(2)]),
        block,
        strides: [2, 1],
    };
    let dtype = QuantizedType { bits: 4, signed: true };
    let new = |shape, bytes, scales| QuantizedMatrix::new(dtype, shape, bytes, false, scales).is_ok();
    assert!(new([5, 2], &[0; 5], scales(6, [2, 1])));
    assert!(!new([5, 2], &[0; 4], scales(6, [2, 1])));
    assert!(!new([5, 2], &[0; 5], scales(5, [2, 1])));
    assert!(!new([5, 2], &[0; 5], scales(6, [0, 1])));
    assert!(!new([usize::MAX, 2], &[0; 5], scales(6, [2, 1])));
    assert!(new([0, 2], &[], scales(0, [2, 1])));
}
