//! `TopK`, `Einsum`, bitwise operators, normalizations that are not along rows, and row
//! normalizations and softmax at the edge cases of kernels.

use std::sync::Arc;

use half::f16;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::Attribute;
use ort_core::tensor::Tensor;

use super::numbers;
use super::typed::{Case, Given, case, check_all, ints, list, run, text};

const HALVES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const INTEGERS: [DType; 8] =
    [DType::U8, DType::I8, DType::U16, DType::I16, DType::U32, DType::I32, DType::U64, DType::I64];

fn top_k(given: Given, axis: i64, k: i64, largest: i64) -> Case {
    let attrs = [("axis", Attribute::Int(axis)), ("largest", Attribute::Int(largest))];
    Case { outputs: 2, tolerance: 0.0, ..case("TopK", vec![given, ints(&[k])], &attrs) }
}

fn top_k_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Lengths that are counted, sorted within a block, and merged once and twice.
    for (len, ks) in [
        (1, &[0, 1][..]),
        (7, &[1, 3, 7]),
        (64, &[5, 64]),
        (65, &[1, 65]),
        (1000, &[10, 1000]),
        (2049, &[1, 2049]),
        (5000, &[100, 3000]),
        (20_000, &[50, 2500]),
    ] {
        for (k, largest) in ks.iter().zip([0, 1].into_iter().cycle()) {
            cases.push(top_k(run(DType::F32, &[2, len]), 1, *k, largest));
            if len <= 5000 {
                cases.push(top_k(run(DType::I64, &[2, len, 3]), 1, *k, 1 - largest));
            }
        }
    }
    for dtype in INTEGERS.into_iter().chain(HALVES).chain([DType::F64]) {
        for largest in [0, 1] {
            cases.push(top_k(run(dtype, &[3, 50, 2]), 1, 20, largest));
            cases.push(top_k(run(dtype, &[300, 4]), 0, 20, largest));
        }
    }
    let values: Vec<f32> =
        // 81 values, which fill both shapes below.
        [0.0, -0.0, f32::NAN, 1.0, f32::INFINITY, -1.0, f32::NEG_INFINITY, 1e-40, -1e-40].repeat(9);
    for shape in [vec![9, 9], vec![81]] {
        let x = Given::Is(Tensor::from_slice(&shape, &values).unwrap());
        cases.extend([0, 1].map(|largest| top_k(x.clone(), -1, shape[shape.len() - 1] as i64, largest)));
    }
    cases
}

/// Checks `TopK`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn sorts(device: &Arc<dyn Device>) {
    check_all(device, &top_k_cases());
}

fn bit_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes: [[&[usize]; 2]; 3] = [[&[300], &[300]], [&[2, 3, 1, 5], &[3, 4, 1]], [&[], &[7, 2]]];
    for dtype in INTEGERS {
        for [a, b] in shapes {
            for op in ["BitwiseAnd", "BitwiseOr", "BitwiseXor"] {
                cases.push(case(op, vec![run(dtype, a), run(dtype, b)], &[]));
            }
            for direction in ["LEFT", "RIGHT"] {
                let attrs = [("direction", text(direction))];
                cases.push(case("BitShift", vec![run(dtype, a), run(dtype, b)], &attrs));
            }
        }
        cases.push(case("BitwiseNot", vec![run(dtype, &[5, 7])], &[]));
    }
    cases.into_iter().map(|case| Case { tolerance: 0.0, ..case }).collect()
}

/// Checks the bitwise operators.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn bits(device: &Arc<dyn Device>) {
    check_all(device, &bit_cases());
}

fn einsum_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let equations: [(&str, &[&[usize]]); 18] = [
        ("ij,jk->ik", &[&[5, 7], &[7, 6]]),
        ("ij,jk->ki", &[&[5, 7], &[7, 6]]),
        ("bij,bjk->bik", &[&[3, 5, 7], &[3, 7, 6]]),
        // As in attention: the matrix axes last, and between the others.
        ("bqhd,bkhd->bhqk", &[&[2, 5, 3, 8], &[2, 7, 3, 8]]),
        ("bhqk,bkhd->bqhd", &[&[2, 3, 5, 7], &[2, 7, 3, 8]]),
        ("bhqk,bkhd->dhqb", &[&[2, 3, 5, 7], &[2, 7, 3, 8]]),
        ("...ij,...jk->...ik", &[&[2, 1, 4, 5], &[3, 5, 2]]),
        ("bi,bi->b", &[&[4, 700], &[4, 700]]),
        ("i,i->", &[&[3000], &[3000]]),
        ("i,j->ij", &[&[5], &[6]]),
        ("ij->ji", &[&[5, 6]]),
        ("ii->i", &[&[5, 5]]),
        ("ij->", &[&[30, 40]]),
        ("bij,bj->bi", &[&[3, 5, 7], &[3, 7]]),
        ("ijk,jil->kl", &[&[2, 3, 4], &[3, 2, 5]]),
        ("ab,bc,cd->ad", &[&[3, 4], &[4, 5], &[5, 2]]),
        ("ab,ab,ab,b->a", &[&[3, 4], &[3, 4], &[1, 4], &[4]]),
        // A sum of no terms is 0.
        ("ij,jk->ik", &[&[5, 0], &[0, 6]]),
    ];
    for (equation, shapes) in equations {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64, DType::I32, DType::I64] {
            let inputs = shapes.iter().map(|shape| run(dtype, shape)).collect();
            cases.push(case("Einsum", inputs, &[("equation", text(equation))]));
        }
    }
    cases
}

/// Checks `Einsum`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn einsums(device: &Arc<dyn Device>) {
    check_all(device, &einsum_cases());
}

fn norm_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in HALVES {
        for size in [1, 2, 5, 40] {
            let attrs = [
                ("size", Attribute::Int(size)),
                ("alpha", Attribute::Float(0.5)),
                ("beta", Attribute::Float(0.75)),
            ];
            cases.push(case("LRN", vec![run(dtype, &[2, 9, 5, 3])], &attrs));
        }
        for (shape, axes) in [
            (&[2, 5, 7, 3][..], &[0, 2, 3][..]),
            (&[40, 6], &[0]),
            (&[6, 1, 2000], &[-1]),
            (&[3, 70, 40], &[1]),
        ] {
            let attrs = [("axes", list(axes))];
            cases.push(case("MeanVarianceNormalization", vec![run(dtype, shape)], &attrs));
        }
    }
    cases
}

fn embed_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let ids = |shape: &[usize], below: usize| {
        let count: usize = shape.iter().product();
        let values: Vec<i32> = (0..count).map(|at| (at * 7919 % below) as i32).collect();
        Given::Is(Tensor::from_slice(shape, &values).unwrap())
    };
    for (dtype, width) in [(DType::F32, 7), (DType::F32, 768), (DType::F16, 100)] {
        let tables = [run(dtype, &[50, width]), run(dtype, &[12, width]), run(dtype, &[2, width])];
        let [words, positions, segments] = tables;
        let [scale, shift] = [run(dtype, &[width]), run(dtype, &[width])];
        let none = Given::None;
        let plain = vec![
            ids(&[2, 9], 50),
            none.clone(),
            words.clone(),
            positions.clone(),
            none.clone(),
            scale.clone(),
            shift.clone(),
        ];
        let mut full = plain.clone();
        // The inputs in order: words, segments, three tables, scale, shift, mask, positions.
        full[1] = ids(&[2, 9], 2);
        full[4] = segments;
        full.extend([ids(&[2, 9], 2), ids(&[1, 9], 12)]);
        let mut other = full.clone();
        (other[1], other[7], other[8]) = (none.clone(), none, ids(&[2, 9], 12));
        for (inputs, outputs) in [(plain, 2), (full, 3), (other, 3)] {
            let case = case("EmbedLayerNormalization", inputs, &[("epsilon", Attribute::Float(1e-5))]);
            let tolerance = if dtype == DType::F16 { 8e-3 } else { case.tolerance };
            cases.push(Case { domain: "com.microsoft", outputs, tolerance, ..case });
        }
    }
    cases
}

/// Rows of about the length of vectors, warps and blocks, and longer than a block holds in
/// registers. Also enough rows that a thread processes several, of one warp and of more.
const ROWS: &[[usize; 2]] = &[
    [1, 1],
    [5, 3],
    [300, 4],
    [37, 8],
    [9, 24],
    [3, 256],
    [70, 264],
    [1100, 40],
    [70, 997],
    [5, 384],
    [2, 768],
    [90, 768],
    [2, 771],
    [3, 776],
    [17, 4088],
    [1, 4096],
    [1, 4100],
    [1, 4101],
    [1, 4104],
    [2, 8192],
    [2, 8200],
    [1, 8203],
    [1, 16_400],
    [1, 33_000],
];

fn row_norm_cases() -> Vec<Case> {
    let epsilon = [("epsilon", Attribute::Float(1e-5))];
    let mut cases = Vec::new();
    for dtype in HALVES {
        for [rows, len] in ROWS {
            let [x, row] = [run(dtype, &[*rows, *len]), run(dtype, &[*len])];
            let layer = case("LayerNormalization", vec![x.clone(), row.clone(), row.clone()], &epsilon);
            // The outputs include means, in which most of the sum cancels.
            let tolerance = layer.tolerance.max(1e-3);
            cases.push(Case { outputs: 3, tolerance, ..layer });
            cases.push(case("RMSNormalization", vec![x, row.clone()], &epsilon));
            let x = run(dtype, &[2, *rows, *len]);
            for skip in [run(dtype, &[2, *rows, *len]), run(dtype, &[*rows, *len])] {
                let inputs = vec![x.clone(), skip, row.clone(), row.clone(), row.clone()];
                let skip = case("SkipLayerNormalization", inputs, &epsilon);
                let tolerance = skip.tolerance.max(1e-3);
                cases.push(Case { domain: "com.microsoft", outputs: 4, tolerance, ..skip });
            }
        }
        // Channels of whole vectors and of other sizes, in groups of one and of several channels,
        // which a block holds whole or not.
        for spatial in [1, 7, 16, 49, 2056, 4103] {
            let [x, scale] = [run(dtype, &[2, 6, spatial]), run(dtype, &[6])];
            let inputs = vec![x, scale.clone(), scale];
            cases.push(case("InstanceNormalization", inputs.clone(), &epsilon));
            cases.push(case("GroupNormalization", inputs, &[("num_groups", Attribute::Int(2))]));
        }
        let [x, scale] = [run(dtype, &[3, 16]), run(dtype, &[16])];
        let groups = [("num_groups", Attribute::Int(2))];
        cases.push(case("GroupNormalization", vec![x, scale.clone(), scale], &groups));
    }
    // Rows whose mean is far from zero: a sum of squares that does not subtract the mean first
    // would lose the variance to cancellation.
    for [rows, len] in [[2, 384], [2, 4096], [90, 768], [17, 4088], [1, 16_400]] {
        let values: Vec<f32> = numbers(rows * len, 0).into_iter().map(|value| value + 100.0).collect();
        let x = Given::Is(Tensor::from_slice(&[rows, len], &values).unwrap());
        let row = run(DType::F32, &[len]);
        cases.push(case("LayerNormalization", vec![x, row.clone(), row], &epsilon));
    }
    cases
}

/// Functions of rows whose maximum may be anywhere in the row.
fn row_function_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in HALVES {
        for [rows, len] in ROWS {
            for op in ["Softmax", "LogSoftmax", "Hardmax", "LpNormalization"] {
                cases.push(case(op, vec![run(dtype, &[*rows, *len])], &[("axis", Attribute::Int(1))]));
            }
        }
    }
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let edges = [[0.0, 0.0], [0.0, -inf], [-inf; 2], [inf, 0.0], [nan, 1.0], [inf, nan], [-3e38, 3e38]];
    for len in [7, 8, 264, 2056, 8200, 8201] {
        // One value stands out at the end of a row, the rest is equal.
        let row = |[last, rest]: &[f32; 2]| (1..len).map(|_| *rest).chain([*last]).collect::<Vec<_>>();
        let values: Vec<f32> = edges.iter().flat_map(row).collect();
        let halves = values.iter().map(|value| f16::from_f32(*value)).collect();
        let shape = [edges.len(), len];
        let floats = (Tensor::from_slice(&shape, &values), 1e-4);
        for (x, tolerance) in [floats, (Tensor::from_vec(&shape, halves), 2e-3)] {
            let x = Given::Is(x.unwrap());
            for op in ["Softmax", "LogSoftmax", "Hardmax"] {
                let case = case(op, vec![x.clone()], &[("axis", Attribute::Int(1))]);
                cases.push(Case { tolerance, ..case });
            }
        }
    }
    cases
}

/// Checks `LRN`, `MeanVarianceNormalization` and `EmbedLayerNormalization`, and normalizations and
/// softmax of rows.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn norms(device: &Arc<dyn Device>) {
    let cases = [norm_cases(), embed_cases(), row_norm_cases(), row_function_cases()];
    check_all(device, &cases.into_iter().flatten().collect::<Vec<_>>());
}
