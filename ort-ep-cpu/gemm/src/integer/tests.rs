//! Tests of 8-bit GEMM against sums in `i64`, on every instruction set.

use super::*;
use ort_cpu_vector::simd::Isa;

/// Pseudo-random quantized values, including the extremes.
fn random_bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..count)
        .map(|_| match next() % 8 {
            0 => 0,
            1 => 255,
            2 => 128,
            3 => 127,
            _ => (next() >> 32) as u8,
        })
        .collect()
}

fn number(value: u8, signed: bool) -> i64 {
    if signed { i64::from(value as i8) } else { i64::from(value) }
}

/// A quantized matmul: its shape, whether operands are signed, and their zero points (one, or one
/// per row or column).
struct Case {
    shape: [usize; 3],
    signed: [bool; 2],
    zeros: [Vec<i32>; 2],
    bias: bool,
    transposed: bool,
}

impl Case {
    fn sums(&self, a: &[u8], b: &[u8], bias: &[i32]) -> Vec<i32> {
        let [rows, columns, k] = self.shape;
        let zero = |side: usize, at: usize| {
            let zeros = &self.zeros[side];
            i64::from(zeros.get(at).or(zeros.first()).copied().unwrap_or(0))
        };
        let place = |step: usize, column: usize| {
            if self.transposed { column * k + step } else { step * columns + column }
        };
        let sum = |row: usize, column: usize| -> i64 {
            let terms = (0..k).map(|step| {
                let a = number(a[row * k + step], self.signed[0]) - zero(0, row);
                a * (number(b[place(step, column)], self.signed[1]) - zero(1, column))
            });
            terms.sum::<i64>() + i64::from(bias.get(column).copied().unwrap_or(0))
        };
        (0..rows * columns).map(|at| sum(at / columns, at % columns) as i32).collect()
    }

    fn check(&self) {
        let [rows, columns, k] = self.shape;
        let (a, b) = (random_bytes(rows * k, 1 + k as u64), random_bytes(k * columns, 77 + columns as u64));
        let bias: Vec<i32> = match self.bias {
            true => (0..columns as i32).map(|column| column * 1_000_003 - 5000).collect(),
            false => Vec::new(),
        };
        let sums = self.sums(&a, &b, &bias);
        for isa in Isa::available() {
            for threads in [1, 2] {
                let cpu = Cpu { isa, ..Cpu::with_threads(threads) };
                let what = format!("{isa:?} {threads} {:?} {:?} {:?}", self.shape, self.signed, self.zeros);
                let mut packed = vec![0_u32; packed_rhs_len(cpu, k, columns) / 4];
                let packed: &mut [u8] = bytemuck::cast_slice_mut(&mut packed);
                let strides = if self.transposed { [1, k] } else { [columns, 1] };
                pack_rhs(cpu, (&b, !self.signed[1]), [k, columns], strides, packed).unwrap();
                let rhs = PackedBytes::new(cpu, (packed, !self.signed[1]), [k, columns]).unwrap();
                let lhs = QuantizedLhs { values: &a, signed: self.signed[0], rows, zeros: &self.zeros[0] };
                let matmul = QuantizedMatmul { lhs, rhs, rhs_zeros: &self.zeros[1], bias: &bias };
                let mut workspace = vec![-1; multiply_workspace_len(self.shape, self.signed[0])];
                let mut run =
                    |target: Target<'_>| multiply(cpu, &matmul, target, columns, &mut workspace).unwrap();
                let mut found = vec![7; rows * columns];
                run(Target::Accumulators(&mut found));
                assert_eq!(found, sums, "{what}");

                let factors: Vec<f32> = (0..columns).map(|column| 0.001 * (1 + column % 7) as f32).collect();
                let added: Vec<f32> = (0..columns).map(|column| column as f32 - 2.5).collect();
                let mut numbers = vec![3.0; rows * columns];
                let by_row: Vec<f32> = (0..rows).map(|row| 0.25 * row as f32 - 1.5).collect();
                let others: Vec<f32> = (0..rows * columns).map(|at| (at % 13) as f32 - 6.0).collect();
                for (addend, activation) in [
                    (Addend::Old, None),
                    (Addend::None, Some(Activation::Relu)),
                    (Addend::Matrix(&others), Some(Activation::Clip { min: -1.5, max: 6.0 })),
                    // It runs on the finished tile, not in registers.
                    (Addend::Old, Some(Activation::Abs)),
                ] {
                    numbers.fill(3.0);
                    let factors_of = Factors::Columns(&factors);
                    let (row_bias, column_bias): (&[f32], &[f32]) =
                        if activation.is_none() { (&[], &added) } else { (&by_row, &[]) };
                    let scaling = Scaling { factors: factors_of, row_bias, column_bias, addend, activation };
                    run(Target::Numbers { values: &mut numbers, scaling });
                    for (at, number) in numbers.iter().enumerate() {
                        let (row, column) = (at / columns, at % columns);
                        let bias = row_bias.get(row).or(column_bias.get(column)).unwrap();
                        let value = sums[at] as f32 * factors[column] + bias;
                        let sum = match addend {
                            Addend::None => value,
                            Addend::Old => 3.0 + value,
                            Addend::Matrix(others) => others[at] + value,
                        };
                        let expected = match activation {
                            None => sum,
                            Some(Activation::Relu) => sum.max(0.0),
                            Some(Activation::Clip { min, max }) => sum.clamp(min, max),
                            Some(_) => sum.abs(),
                        };
                        assert_eq!(*number, expected, "{what} number {at} {addend:?} {activation:?}");
                    }
                }

                for (zero, signed) in
                    [(0, false), (255, false), (3, false), (-128, true), (127, true), (-5, true)]
                {
                    let by_row: Vec<f32> = (0..rows).map(|row| 0.003 / (1 + row % 5) as f32).collect();
                    let all = [Factors::One(1.0), Factors::Columns(&factors), Factors::Rows(&by_row)];
                    for (kind, factors_of) in all.into_iter().enumerate() {
                        let mut values = vec![9; rows * columns];
                        run(Target::Quantized { values: &mut values, factors: factors_of, zero, signed });
                        for (at, value) in values.iter().enumerate() {
                            let factor = [1.0, factors[at % columns], by_row[at / columns]][kind];
                            let whole =
                                f64::from(sums[at] as f32 * factor).round_ties_even() + f64::from(zero);
                            let (least, greatest) = if signed { (-128.0, 127.0) } else { (0.0, 255.0) };
                            let expected = whole.clamp(least, greatest) as i64;
                            assert_eq!(number(*value, signed), expected, "{what} value {at} of {kind}");
                        }
                    }
                }
            }
        }
    }
}

fn zero_points(count: usize, signed: bool) -> Vec<i32> {
    let first = if signed { -128 } else { 0 };
    (0..count as i32).map(|at| first + at * 37 % 256).collect()
}

#[test]
fn products_of_all_types_and_zero_points() {
    for shape in [[1, 1, 1], [3, 5, 7], [8, 48, 4], [9, 49, 30], [2, 130, 129], [13, 17, 64]] {
        for signed in [[false, false], [false, true], [true, false], [true, true]] {
            let [rows, columns, _] = shape;
            let extreme = |side: usize| if signed[side] { [-128, 127] } else { [0, 255] };
            for (at, zeros) in [
                [vec![], vec![]],
                [vec![extreme(0)[0]], vec![extreme(1)[1]]],
                [vec![extreme(0)[1]], vec![extreme(1)[0]]],
                [vec![5], zero_points(columns, signed[1])],
                [zero_points(rows, signed[0]), vec![-3]],
                [zero_points(rows, signed[0]), zero_points(columns, signed[1])],
            ]
            .into_iter()
            .enumerate()
            {
                Case { shape, signed, zeros, bias: at % 2 == 0, transposed: at % 3 == 0 }.check();
            }
        }
    }
}

#[test]
fn products_of_every_length() {
    for k in (0..40).chain([63, 64, 65, 255, 256, 257, 300]) {
        let zeros = [vec![131], vec![-7]];
        Case { shape: [5, 19, k], signed: [false, true], zeros, bias: true, transposed: k % 2 == 0 }.check();
    }
}

/// All values are extremes, so that accumulating pairs in 16 bits would saturate.
#[test]
fn extremes_do_not_saturate() {
    let (k, columns) = (1024, 20);
    for isa in Isa::available() {
        let cpu = Cpu { isa, ..Cpu::with_threads(1) };
        let mut packed = vec![0_u32; packed_rhs_len(cpu, k, columns) / 4];
        let packed: &mut [u8] = bytemuck::cast_slice_mut(&mut packed);
        let (a, b) = (vec![255; k], vec![0x80; k * columns]);
        pack_rhs(cpu, (&b, false), [k, columns], [columns, 1], packed).unwrap();
        let rhs = PackedBytes::new(cpu, (packed, false), [k, columns]).unwrap();
        let lhs = QuantizedLhs { values: &a, signed: false, rows: 1, zeros: &[] };
        let matmul = QuantizedMatmul { lhs, rhs, rhs_zeros: &[], bias: &[] };
        let mut workspace = vec![0; multiply_workspace_len([1, columns, k], false)];
        let mut sums = vec![0; columns];
        multiply(cpu, &matmul, Target::Accumulators(&mut sums), columns, &mut workspace).unwrap();
        assert_eq!(sums, vec![-255 * 128 * 1024; columns], "{isa:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let cpu = Cpu::with_threads(1);
    let mut packed = vec![0_u32; packed_rhs_len(cpu, 4, 4) / 4];
    let packed: &mut [u8] = bytemuck::cast_slice_mut(&mut packed);
    assert!(pack_rhs(cpu, (&[0; 15], false), [4, 4], [4, 1], packed).is_err());
    pack_rhs(cpu, (&[0; 16], false), [4, 4], [4, 1], packed).unwrap();
    let rhs = PackedBytes::new(cpu, (packed, false), [4, 4]).unwrap();
    let lhs = QuantizedLhs { values: &[0; 8], signed: false, rows: 2, zeros: &[] };
    let matmul = QuantizedMatmul { lhs, rhs, rhs_zeros: &[], bias: &[] };
    let mut workspace = vec![0; multiply_workspace_len([2, 4, 4], false)];
    let mut refused = |matmul: &QuantizedMatmul<'_>, len: usize, row_stride: usize| {
        multiply(cpu, matmul, Target::Accumulators(&mut vec![0; len]), row_stride, &mut workspace).is_err()
    };
    assert!(!refused(&matmul, 8, 4));
    assert!(refused(&matmul, 7, 4));
    assert!(refused(&matmul, 8, 3));
    assert!(refused(&QuantizedMatmul { rhs_zeros: &[1, 2, 3], ..matmul }, 8, 4));
    assert!(refused(&QuantizedMatmul { bias: &[1, 2, 3], ..matmul }, 8, 4));
    assert!(refused(&QuantizedMatmul { lhs: QuantizedLhs { values: &[0; 7], ..lhs }, ..matmul }, 8, 4));
    assert!(refused(&QuantizedMatmul { lhs: QuantizedLhs { zeros: &[1, 2, 3], ..lhs }, ..matmul }, 8, 4));
}
