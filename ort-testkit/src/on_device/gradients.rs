//! The operators of the backward pass of training, on a device and on the CPU: losses, batch
//! normalization, dropout, attention, gradients of convolutions, and scattered updates that
//! accumulate.

use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::Attribute;
use ort_core::tensor::Tensor;

use super::keeps_key;
use super::optimizers::{FLOATS, float, own, scalar};
use super::typed::{Case, Given, case, check_all, ints, list, run, text};

fn norm_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 7] =
        [&[3, 5, 7, 2], &[300, 40], &[9, 33, 3], &[2, 3, 4100], &[1, 1, 1], &[70, 2], &[2, 0, 4]];
    for shape in shapes {
        let channels = || vec![shape[1]];
        for dtype in FLOATS {
            let mut inputs = vec![Given::Run(dtype, shape.to_vec())];
            inputs.extend((0..4).map(|_| Given::Run(dtype, channels())));
            let attrs = [("training_mode", Attribute::Int(1)), float("momentum", 0.7)];
            cases.push(Case { outputs: 3, ..case("BatchNormalization", inputs, &attrs) });
        }
        for dtype in [DType::F32, DType::F64] {
            // Sums that cancel out, with a rounding error of 1e-7 for each addend: the CPU adds a
            // thousand of them in float32, the device sixteen.
            let tolerance = if dtype == DType::F64 { 1e-12 } else { 1e-4 };
            let (x, channel) = (|| Given::Run(dtype, shape.to_vec()), || Given::Run(dtype, channels()));
            let inputs = vec![x(), channel(), channel()];
            cases.push(Case {
                outputs: 4,
                tolerance,
                ..own("BatchNormalizationStatistics", inputs, &[float("momentum", 0.7)])
            });
            let mut inputs = vec![x(), channel(), x()];
            cases.push(Case {
                outputs: 3,
                tolerance,
                ..own("BatchNormalizationGrad", inputs.clone(), &[float("epsilon", 1e-3)])
            });
            cases.push(Case { outputs: 1, tolerance, ..own("BatchNormalizationGrad", inputs.clone(), &[]) });
            inputs.extend([channel(), channel()]);
            cases.push(Case { outputs: 3, tolerance, ..own("BatchNormalizationGrad", inputs, &[]) });
        }
    }
    cases
}

/// Checks `BatchNormalization` in training, `BatchNormalizationStatistics` and
/// `BatchNormalizationGrad`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn batch_norms(device: &Arc<dyn Device>) {
    check_all(device, &norm_cases());
}

fn dropout_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        // Steps and seeds beyond 32 bits find a kernel that cuts them.
        for (shape, ratio, seed, step) in [
            (&[5, 67][..], 0.3f32, 7i64, 1i64),
            (&[4096], 0.5, -3, 1 << 40),
            (&[3], 0.999, i64::MAX, 2),
            (&[2, 2], 0.0, 0, 0),
            (&[0], 0.1, 1, 1),
            (&[], 0.25, 1, 1),
        ] {
            let inputs = vec![run(dtype, shape), scalar(ratio), scalar(seed), scalar(step)];
            for stream in [0, -5, 1 << 33] {
                let attrs = [("stream", Attribute::Int(stream))];
                // Random numbers follow from seed, step and position, so both devices drop the
                // same elements.
                cases.push(Case { tolerance: 0.0, ..own("CounterDropout", inputs.clone(), &attrs) });
            }
        }
    }
    cases
}

/// Checks `CounterDropout`.
///
/// # Panics
///
/// A bit differs, or the device does not run a case.
pub fn dropouts(device: &Arc<dyn Device>) {
    check_all(device, &dropout_cases());
}

/// Leading axes, queries, keys, and the head sizes of keys and values.
const HEADS: [(&[usize], [usize; 4]); 9] = [
    (&[], [1, 1, 1, 1]),
    (&[2, 3], [5, 7, 4, 3]),
    (&[2], [64, 64, 64, 64]),
    (&[1, 2], [65, 130, 40, 24]),
    (&[2, 1, 2], [9, 70, 17, 19]),
    (&[1], [70, 66, 128, 72]),
    (&[1], [20, 12, 200, 130]),
    (&[2], [3, 0, 4, 4]),
    (&[2], [0, 3, 4, 4]),
];

/// The number of scores above which a head counts as large.
const LARGE: usize = 2000;

/// A boolean mask. It hides all keys of the first query if `fills_rows`; otherwise every query
/// keeps the first key.
fn mask(shape: &[usize], fills_rows: bool) -> Given {
    let count = shape.iter().product();
    let keys = shape.last().copied().unwrap_or(1);
    let value = |at: usize| (at.is_multiple_of(keys) && !fills_rows) || (at >= keys && keeps_key(at));
    let values: Vec<bool> = (0..count).map(value).collect();
    Given::Is(Tensor::from_slice(shape, &values).unwrap())
}

fn attention_cases(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (leading, [queries, keys, size, value_size]) in HEADS {
        // Weights and their gradients are rounded to the type before each GEMM: a few times its
        // precision. The CPU's portable code accumulates in order, with a rounding for each addend.
        let tolerance = match dtype {
            DType::F16 => 4e-3,
            DType::BF16 => 3e-2,
            _ => f64::max(1e-5, size as f64 * f64::from(f32::EPSILON)),
        };
        let shape = |rows: usize, size: usize| [leading, &[rows, size]].concat();
        let [q, k, v] = [(queries, size), (keys, size), (keys, value_size)];
        let heads = [q, k, v].map(|(rows, size)| Given::Run(dtype, shape(rows, size)));
        let upstream = Given::Run(dtype, shape(queries, value_size));
        let ones = vec![1; leading.len()];
        let all = shape(queries, keys);
        let none = Given::None;
        let drops = [scalar(0.3f32), scalar(11i64), scalar(5i64)];
        let with = |mask: &Given, drops: &[Given]| [&heads[..], std::slice::from_ref(mask), drops].concat();
        let fill = |value| vec![float("fill", value), ("stream", Attribute::Int(9))];
        let mut given = vec![
            (heads.to_vec(), Vec::new()),
            (with(&none, &drops), fill(0.0)),
            (with(&mask(&[queries, keys], true), &drops), fill(f32::MIN)),
            (with(&mask(&all, false), &[]), fill(f32::NEG_INFINITY)),
            (with(&run(dtype, &[&ones[..], &[1, keys]].concat()), &drops), fill(0.0)),
        ];
        if let Some((first, rest)) = all.split_first() {
            let shape: Vec<usize> = std::iter::once(*first).chain(rest.iter().map(|_| 1)).collect();
            given.push((with(&run(DType::F32, &shape), &[]), Vec::new()));
        }
        // An emulator is slow with many tiles, so large heads run only with the masks that differ
        // most.
        if queries * keys > LARGE {
            let chosen: &[usize] = if dtype == DType::F32 { &[0, 2, 5] } else { &[1, 2, 4] };
            given = given
                .into_iter()
                .enumerate()
                .filter(|(at, _)| chosen.contains(at))
                .map(|(_, one)| one)
                .collect();
        }
        for (inputs, attrs) in given {
            let gradients = [std::slice::from_ref(&upstream), &inputs].concat();
            let case = |op, inputs| Case { tolerance, ..own(op, inputs, &attrs) };
            cases.push(case("TrainingAttention", inputs));
            cases.push(Case { outputs: 3, ..case("TrainingAttentionGrad", gradients) });
        }
    }
    cases
}

/// Checks `TrainingAttention` and `TrainingAttentionGrad`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn attention(device: &Arc<dyn Device>) {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        check_all(device, &attention_cases(dtype));
    }
}

fn loss_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 7] =
        [&[5, 7], &[9, 16], &[40, 300], &[3, 1500], &[2, 20, 6, 7], &[2, 3, 70], &[0, 4]];
    for shape in shapes {
        let labels: Vec<usize> = [shape[0]].iter().chain(&shape[2..]).copied().collect();
        let count: usize = labels.iter().product();
        let of = |ignored: bool| {
            let label = |at: usize| {
                // -100 is PyTorch's label for elements that do not count.
                if ignored && at.is_multiple_of(3) { -100 } else { (at * 7919 % shape[1]) as i64 }
            };
            (0..count).map(label).collect::<Vec<i64>>()
        };
        let wide = Given::Is(Tensor::from_slice(&labels, &of(true)).unwrap());
        let narrow: Vec<i32> = of(false).into_iter().map(|label| label as i32).collect();
        let narrow = Given::Is(Tensor::from_slice(&labels, &narrow).unwrap());
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let x = || Given::Run(dtype, shape.to_vec());
            let weights = Given::Run(dtype, vec![shape[1]]);
            for op in ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"] {
                let outputs = if op == "SoftmaxCrossEntropyLoss" { 2 } else { 1 };
                for reduction in ["mean", "sum", "none"] {
                    let reduced = ("reduction", text(reduction));
                    let ignored = [reduced.clone(), ("ignore_index", Attribute::Int(-100))];
                    let inputs = vec![x(), wide.clone()];
                    cases.push(Case { outputs, ..case(op, inputs, &ignored) });
                    let inputs = vec![x(), narrow.clone(), weights.clone()];
                    cases.push(Case { outputs: 1, ..case(op, inputs, &[reduced]) });
                }
            }
        }
    }
    // Means of float16 divide a sum that cancels out by a sum of weights that does, too.
    cases.into_iter().map(|case| Case { tolerance: case.tolerance * 2.0, ..case }).collect()
}

/// Checks `SoftmaxCrossEntropyLoss` and `NegativeLogLikelihoodLoss`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn losses(device: &Arc<dyn Device>) {
    check_all(device, &loss_cases());
}

/// Indices with duplicates and negative ones. With `alike` all but the first few are the same.
fn indices(shape: &[usize], below: usize, alike: bool) -> Given {
    let count: usize = shape.iter().product();
    let index = |at: usize| match at {
        _ if alike && at > 5 => 1,
        _ if at % 7 == 3 => -1,
        _ => (at * 7919 % below) as i64,
    };
    let values: Vec<i64> = (0..count).map(index).collect();
    Given::Is(Tensor::from_slice(shape, &values).unwrap())
}

fn scatter_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let add = || vec![("reduction", text("add"))];
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64] {
        for reduction in ["add", "mul", "min", "max"] {
            let attrs = [("reduction", text(reduction)), ("axis", Attribute::Int(1))];
            let inputs = vec![run(dtype, &[3, 7, 2]), indices(&[2, 9, 2], 7, false), run(dtype, &[2, 9, 2])];
            cases.push(case("ScatterElements", inputs, &attrs));
            let inputs = vec![run(dtype, &[6, 5]), indices(&[11, 1], 6, false), run(dtype, &[11, 5])];
            cases.push(case("ScatterND", inputs, &attrs[..1]));
        }
    }
    // Runs of one slot that span several windows, partial results that are merged, and updates of
    // many elements.
    for (slots, tuples, row, alike) in [
        (5, 300, 40, false),
        (3, 300, 33, true),
        (4, 100, 1, true),
        (900, 5000, 1, false),
        (7, 4500, 2, true),
    ] {
        let inputs = vec![
            run(DType::F32, &[slots, row]),
            indices(&[tuples, 1], slots, alike),
            run(DType::F32, &[tuples, row]),
        ];
        cases.push(case("ScatterND", inputs, &add()));
    }
    let inputs = vec![run(DType::F32, &[4, 3]), indices(&[0, 1], 4, false), run(DType::F32, &[0, 3])];
    cases.push(case("ScatterND", inputs, &add()));
    let inputs = vec![run(DType::F32, &[3, 4, 5]), indices(&[6, 2], 3, false), run(DType::F32, &[6, 5])];
    cases.push(case("ScatterND", inputs, &add()));
    let inputs = vec![run(DType::F32, &[70]), indices(&[200], 70, false), run(DType::F32, &[200])];
    cases.push(case("ScatterElements", inputs, &[add(), vec![("axis", Attribute::Int(0))]].concat()));
    cases
}

/// Checks `ScatterElements` and `ScatterND` with reductions.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn scatters(device: &Arc<dyn Device>) {
    check_all(device, &scatter_cases());
}

/// Image, filters, result, groups, and the strides, dilations and pads of each axis.
type Convolved = (&'static [usize], &'static [usize], &'static [usize], i64, [&'static [i64]; 3]);

const CONVOLUTIONS: [Convolved; 9] = [
    (&[2, 3, 9, 11], &[5, 3, 3, 2], &[2, 5, 9, 10], 1, [&[1, 1], &[1, 1], &[1, 0, 1, 0]]),
    (&[2, 6, 13, 12], &[66, 3, 3, 3], &[2, 66, 7, 6], 2, [&[2, 2], &[1, 1], &[1, 1, 1, 1]]),
    (&[3, 70, 5, 7], &[8, 70, 1, 1], &[3, 8, 5, 7], 1, [&[1, 1], &[1, 1], &[0, 0, 0, 0]]),
    // Windows that do not reach the end of the image.
    (&[1, 4, 10, 10], &[6, 4, 3, 3], &[1, 6, 3, 3], 1, [&[3, 3], &[1, 2], &[0, 2, 0, 2]]),
    // Many windows, which are processed in pieces.
    (&[2, 4, 40, 41], &[5, 4, 3, 3], &[2, 5, 40, 41], 1, [&[1, 1], &[1, 1], &[1, 1, 1, 1]]),
    // Depthwise.
    (&[2, 7, 9, 8], &[7, 1, 3, 3], &[2, 7, 9, 8], 7, [&[1, 1], &[1, 1], &[1, 1, 1, 1]]),
    (&[2, 3, 15, 9], &[6, 1, 5, 3], &[2, 6, 8, 5], 3, [&[2, 2], &[1, 1], &[2, 1, 2, 1]]),
    (&[2, 3, 17], &[4, 3, 4], &[2, 4, 8], 1, [&[2], &[1], &[1, 1]]),
    (&[1, 3, 5, 6, 4], &[3, 3, 2, 3, 2], &[1, 3, 5, 3, 4], 1, [&[1, 2, 1], &[1, 1, 1], &[0, 1, 0, 1, 1, 1]]),
];

fn convolution_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (image, weight, result, groups, [strides, dilations, pads]) in CONVOLUTIONS {
        let attrs = [
            ("group", Attribute::Int(groups)),
            ("strides", list(strides)),
            ("dilations", list(dilations)),
            ("pads", list(pads)),
        ];
        let sizes = |shape: &[usize]| {
            let sizes: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
            ints(&sizes)
        };
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let of = |shape: &[usize]| run(dtype, shape);
            cases.push(own("ConvGradInput", vec![of(result), of(weight), sizes(image)], &attrs));
            cases.push(own("ConvGradWeights", vec![of(image), of(result), sizes(weight)], &attrs));
        }
    }
    cases
}

/// Checks `ConvGradInput` and `ConvGradWeights`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn convolutions(device: &Arc<dyn Device>) {
    check_all(device, &convolution_cases());
}
