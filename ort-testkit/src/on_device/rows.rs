//! Reductions, normalizations, softmax and attention, to within 1e-4 of the CPU's largest result.

use std::sync::Arc;

use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder, ValueType};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_core::{Result, ensure, error};

use super::cpu;

/// The tolerance relative to the largest value.
const TOLERANCE: f64 = 1e-4;
/// Lengths of the reduced axis.
const LENGTHS: [usize; 5] = [1, 7, 64, 1000, 5000];

/// An input of a node.
#[derive(Clone)]
enum RowInput {
    /// Pseudo-random numbers that another node computes.
    Run(Vec<usize>),
    Is(Tensor),
    /// A constant of the graph.
    Constant(Tensor),
    None,
}
use RowInput::{Constant, Is, Run};

/// One node, the number of its outputs, and how many of them are compared.
struct RowCase {
    domain: &'static str,
    op: &'static str,
    inputs: Vec<RowInput>,
    attrs: Vec<(&'static str, Attribute)>,
    outputs: usize,
    compared: usize,
}

fn case(op: &'static str, inputs: Vec<RowInput>, attrs: &[(&'static str, i64)]) -> RowCase {
    let attrs = attrs.iter().map(|(name, value)| (*name, Attribute::Int(*value))).collect();
    RowCase { domain: "", op, inputs, attrs, outputs: 1, compared: 4 }
}

fn microsoft(
    op: &'static str,
    inputs: Vec<RowInput>,
    attrs: &[(&'static str, i64)],
    outputs: usize,
) -> RowCase {
    RowCase { domain: "com.microsoft", outputs, ..case(op, inputs, attrs) }
}

fn ints(values: &[i64]) -> RowInput {
    Constant(Tensor::from_slice(&[values.len()], values).unwrap())
}

fn small(values: &[i32]) -> RowInput {
    Is(Tensor::from_slice(&[values.len()], values).unwrap())
}

/// Pseudo-random numbers in (-0.5, 1.5), so that long sums do not cancel.
fn numbers(shape: &[usize], seed: usize) -> Result<Tensor> {
    let mix = |index: usize| ((index * 7919 + seed * 104_729 + 17) as u32).wrapping_mul(2_654_435_761) >> 8;
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|index| mix(index) as f32 / (1 << 23) as f32 - 0.5).collect();
    Tensor::from_slice(shape, &values)
}

/// Runs a case on the device alone, twice, and on the CPU.
fn check(device: &Arc<dyn Device>, case: &RowCase) -> Result<()> {
    let mut builder = GraphBuilder::new("case");
    let (mut ids, mut values) = (Vec::new(), Vec::<(String, Value)>::new());
    for (index, given) in case.inputs.iter().enumerate() {
        let tensor = match given {
            RowInput::None => {
                ids.push(None);
                continue;
            }
            Constant(tensor) => {
                ids.push(Some(builder.constant(tensor.clone())));
                continue;
            }
            Is(tensor) => tensor.clone(),
            Run(shape) => numbers(shape, index)?,
        };
        let shape = tensor.shape().iter().map(|&size| Dim::constant(size as i64)).collect();
        let name = format!("x{index}");
        let input = builder.typed_input(&name, ValueType::tensor(tensor.dtype(), Some(shape)));
        // A kernel may write in place over a node's result, but not over a caller's input.
        ids.push(Some(match given {
            Run(_) => builder.node("Neg", &[input], &[])?,
            _ => input,
        }));
        values.push((name, tensor.into()));
    }
    let outputs = builder.add((case.domain, case.op), &ids, &case.attrs, case.outputs, Vec::new())?;
    let model = Model::from_graph(builder.finish(&outputs)?);
    let host = cpu()?;
    let expected = run(&Session::builder(&model).device(host.clone()).build()?, &values)?;
    let own = device.info().provider;
    let session = Session::builder(&model).device(device.clone()).device(host).build()?;
    let elsewhere = session.steps().into_iter().find(|(.., provider)| *provider != own);
    ensure!(elsewhere.is_none(), Fail, "{elsewhere:?} is not on the device");
    for _ in 0..2 {
        let found = run(&session, &values)?;
        let mut both = expected.iter().zip(&found).take(case.compared);
        both.try_for_each(|(expected, found)| compare(expected, found))?;
    }
    Ok(())
}

fn run(session: &Session, values: &[(String, Value)]) -> Result<Vec<Value>> {
    let values: Vec<(&str, Value)> =
        values.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    Ok(session.run(&values)?.into_iter().map(|(_, value)| value).collect())
}

fn doubles(value: &Value) -> Result<Vec<f64>> {
    let Value::Tensor(tensor) = value else { return Err(error!(Fail, "no tensor")) };
    Ok(match tensor.dtype() {
        DType::F32 => tensor.to_vec::<f32>()?.into_iter().map(f64::from).collect(),
        _ => tensor.to_vec::<i64>()?.into_iter().map(|value| value as f64).collect(),
    })
}

fn compare(expected: &Value, found: &Value) -> Result<()> {
    let (expected, found) = (doubles(expected)?, doubles(found)?);
    ensure!(expected.len() == found.len(), Fail, "{} elements, not {}", found.len(), expected.len());
    let most =
        // An infinity would make every difference acceptable.
        expected.iter().filter(|value| value.is_finite()).fold(0.0, |most: f64, value| most.max(value.abs()));
    for (place, (expected, found)) in expected.iter().zip(&found).enumerate() {
        let same = expected == found || (expected.is_nan() && found.is_nan());
        let near = same || (expected - found).abs() <= TOLERANCE * most;
        ensure!(near, Fail, "element {place} is {found}, expected {expected}; the largest is {most}");
    }
    Ok(())
}

fn check_all(device: &Arc<dyn Device>, on_host: &[&str], cases: &[RowCase]) {
    let mut problems = Vec::new();
    for case in cases {
        let checked = check(device, case);
        // The list is exact: an operator that the device runs must leave it.
        if on_host.contains(&case.op) {
            let is_left = checked.is_err_and(|problem| problem.to_string().contains("is not on the device"));
            assert!(is_left, "{} is said to be left to the host and is not", case.op);
            continue;
        }
        if let Err(problem) = checked {
            let shapes: Vec<String> = case
                .inputs
                .iter()
                .map(|given| match given {
                    Run(shape) => format!("{shape:?}"),
                    Is(tensor) | Constant(tensor) => format!("{:?}: {tensor:?}", tensor.shape()),
                    RowInput::None => "none".to_owned(),
                })
                .collect();
            problems.push(format!("{} of {}, {:?}: {problem}", case.op, shapes.join(", "), case.attrs));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Shapes with each length along axis 1: contiguous and strided, few and many.
fn shapes() -> impl Iterator<Item = Vec<usize>> {
    LENGTHS.into_iter().flat_map(|len| [vec![3, len], vec![70, len, 1], vec![2, len, 5], vec![1, len, 100]])
}

fn reductions_cases() -> Vec<RowCase> {
    let mut cases = Vec::new();
    for shape in shapes() {
        for op in
            ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceLogSumExp"]
        {
            cases.push(case(op, vec![Run(shape.clone()), ints(&[1])], &[]));
            cases.push(case(op, vec![Run(shape.clone())], &[("keepdims", 0)]));
        }
        for op in ["ArgMax", "ArgMin"] {
            cases.push(case(op, vec![Run(shape.clone())], &[("axis", 1)]));
        }
    }
    for op in ["ReduceSumSquare", "ReduceProd", "ReduceSum", "ReduceMax", "ReduceLogSumExp"] {
        let several = ints(&[0, 2]);
        cases.push(case(op, vec![Run(vec![3, 7, 64, 5]), several], &[("keepdims", 0)]));
        cases.push(case(op, vec![Run(vec![2, 40, 300]), ints(&[1, 2])], &[]));
        cases.push(case(op, vec![Run(vec![3, 0, 4]), ints(&[1])], &[]));
    }
    // Long rows that are reduced in pieces.
    for shape in [vec![100_000], vec![2, 50_000], vec![30_000, 3]] {
        cases.push(case("ReduceMean", vec![Run(shape.clone()), ints(&[0])], &[]));
        cases.push(case("ReduceMax", vec![Run(shape)], &[]));
    }
    cases
}

/// Ties and NaNs, of which the first or the last counts.
fn arg_cases() -> Vec<RowCase> {
    // The first five values have no NaN, so only the cases with more of them test it.
    let value = |at: usize| [1.0, 3.0, 3.0, -2.0, -2.0, f32::NAN, 0.0].get(at % 7).copied().unwrap_or(0.0);
    let mut cases = Vec::new();
    for (shape, ends) in [([2, 5, 1], 5), ([1, 70, 40], 7), ([2, 3000, 1], 5)] {
        let values: Vec<f32> = (0..shape.iter().product()).map(|at| value(at % ends)).collect();
        let x = Is(Tensor::from_slice(&shape, &values).unwrap());
        for (op, last) in [("ArgMax", 0), ("ArgMax", 1), ("ArgMin", 0), ("ArgMin", 1)] {
            cases.push(case(op, vec![x.clone()], &[("axis", 1), ("select_last_index", last)]));
        }
    }
    cases
}

/// 64-bit integers along rows and columns with sums beyond 32 bits, and columns that are reduced in
/// pieces.
fn integer_cases() -> Vec<RowCase> {
    let mut cases = Vec::new();
    // Float columns that are reduced in pieces.
    for op in ["ReduceMean", "ReduceL2", "ReduceMax"] {
        cases.push(case(op, vec![Run(vec![5000, 70]), ints(&[0])], &[]));
    }
    for shape in [vec![3, 5000], vec![3000, 40], vec![2, 7, 5], vec![6, 0]] {
        let count = shape.iter().product::<usize>();
        let wide: Vec<i64> = (0..count as i64).map(|at| (at * 7919 % 1013 - 500) << 30).collect();
        let x = Is(Tensor::from_slice(&shape, &wide).unwrap());
        for op in ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1"] {
            cases.push(case(op, vec![x.clone(), ints(&[0])], &[]));
            cases.push(case(op, vec![x.clone(), ints(&[1])], &[("keepdims", 0)]));
        }
        // Without axes it returns its input (ONNX, `noop_with_empty_axes`).
        cases.push(case("ReduceSum", vec![x], &[("noop_with_empty_axes", 1)]));
    }
    cases
}

fn softmaxes_cases() -> Vec<RowCase> {
    let of_shape = |shape: Vec<usize>| {
        let along = |op| case(op, vec![Run(shape.clone())], &[("axis", 1)]);
        ["Softmax", "LogSoftmax", "Hardmax", "LpNormalization"].map(along)
    };
    shapes().flat_map(of_shape).collect()
}

/// Rows with infinities, NaNs, and values that are far apart.
fn softmax_edges() -> Vec<RowCase> {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let lines = [
        [-inf, 0.0, 1.0, -inf, 2.0],
        [-inf; 5],
        [0.0, inf, 1.0, 2.0, 3.0],
        [0.0, 1.0, nan, 2.0, 3.0],
        [-3e38, 3e38, 0.0, 1.0, 2.0],
    ];
    let x = Is(Tensor::from_slice(&[5, 5], lines.as_flattened()).unwrap());
    Vec::from(["Softmax", "LogSoftmax"].map(|op| case(op, vec![x.clone()], &[("axis", 1)])))
}

fn cumulative_cases() -> Vec<RowCase> {
    let flags = |exclusive, reverse| [("exclusive", exclusive), ("reverse", reverse)];
    let mut cases = Vec::new();
    for shape in shapes() {
        for (exclusive, reverse) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            let inputs = vec![Run(shape.clone()), Constant(Tensor::from_slice(&[], &[1i64]).unwrap())];
            cases.push(case("CumSum", inputs, &flags(exclusive, reverse)));
        }
    }
    cases
}

fn norms_cases() -> Vec<RowCase> {
    let mut cases = Vec::new();
    for len in LENGTHS {
        let [x, row] = [Run(vec![2, 3, len]), Run(vec![len])];
        let layer = case("LayerNormalization", vec![x.clone(), row.clone(), row.clone()], &[]);
        cases.push(RowCase { outputs: 3, ..layer });
        cases.push(case("RMSNormalization", vec![x.clone(), row.clone()], &[]));
        cases.push(case("RMSNormalization", vec![x.clone(), Run(vec![3, 1])], &[("axis", 1)]));
        let inputs = vec![x.clone(), Run(vec![3, len]), row.clone(), row.clone(), row.clone()];
        cases.push(microsoft("SkipLayerNormalization", inputs.clone(), &[], 1));
        cases.push(microsoft("SkipLayerNormalization", inputs, &[], 4));
        let inputs = vec![x.clone(), x.clone(), row.clone()];
        cases.push(microsoft("SkipSimplifiedLayerNormalization", inputs, &[], 4));
        let [image, channels] = [Run(vec![2, 6, len]), Run(vec![6])];
        let inputs = vec![image.clone(), channels.clone(), channels.clone()];
        cases.push(case("InstanceNormalization", inputs.clone(), &[]));
        cases.push(case("GroupNormalization", inputs, &[("num_groups", 2)]));
        cases.push(case("LRN", vec![image], &[("size", 3)]));
        cases.push(case("MeanVarianceNormalization", vec![Run(vec![2, 3, len, 2])], &[]));
    }
    cases
}

fn attention_cases() -> Vec<RowCase> {
    let mut cases = Vec::new();
    for (heads, key_heads, queries, keys, size, value_size) in [
        (1, 1, 1, 1, 1, 1),
        (2, 2, 7, 7, 8, 8),
        (4, 2, 1, 64, 64, 64),
        (8, 1, 1, 1000, 40, 24),
        (2, 2, 64, 64, 64, 64),
        (6, 3, 33, 45, 20, 300),
        (1, 1, 130, 1000, 128, 16),
    ] {
        let q = Run(vec![2, heads, queries, size]);
        let k = Run(vec![2, key_heads, keys, size]);
        let v = Run(vec![2, key_heads, keys, value_size]);
        let mask = Run(vec![2, 1, queries, keys]);
        cases.push(case("Attention", vec![q.clone(), k.clone(), v.clone()], &[]));
        cases.push(case("Attention", vec![q.clone(), k.clone(), v.clone(), mask], &[("is_causal", 1)]));
        let past = [size, value_size].map(|size| Run(vec![2, key_heads, 5, size]));
        let inputs = [vec![q, k, v, RowInput::None], past.to_vec()].concat();
        cases.push(RowCase { outputs: 3, ..case("Attention", inputs.clone(), &[("is_causal", 1)]) });
        cases.push(case("Attention", inputs.clone(), &[("left_window_size", 3), ("right_window_size", 0)]));
        cases.push(RowCase { outputs: 4, ..case("Attention", inputs, &[("qk_matmul_output_mode", 3)]) });
    }
    cases
}

fn multi_head_cases() -> Vec<RowCase> {
    let mut cases = Vec::new();
    let [hidden, all] = [Run(vec![2, 7, 24]), Run(vec![72])];
    let heads = ("num_heads", 3);
    let apart = |rest: &[RowInput]| [&[hidden.clone(), hidden.clone(), hidden.clone()], rest].concat();
    let mut push = |inputs: Vec<RowInput>, attrs: &[(&'static str, i64)], outputs: usize| {
        cases.push(microsoft("MultiHeadAttention", inputs, attrs, outputs));
    };
    let causal = [heads, ("unidirectional", 1)];
    push(apart(&[]), &[heads], 1);
    push(apart(std::slice::from_ref(&all)), &causal, 3);
    push(apart(std::slice::from_ref(&all)), &[heads], 1);
    push(vec![Run(vec![2, 7, 3, 3, 8])], &[heads], 1);
    push(vec![Run(vec![2, 7, 3, 3, 8]), RowInput::None, RowInput::None, all.clone()], &causal, 3);
    push(vec![hidden.clone(), Run(vec![2, 5, 3, 2, 8])], &[heads], 1);
    push(vec![hidden.clone(), Run(vec![2, 3, 5, 8]), Run(vec![2, 3, 5, 6])], &[heads], 1);
    let elements = |shape: &[usize]| {
        let count: usize = shape.iter().product();
        let values: Vec<i32> = (0..count).map(|index| i32::from(index % 3 != 1)).collect();
        Is(Tensor::from_slice(shape, &values).unwrap())
    };
    for mask in [
        small(&[5, 7]),
        small(&[6, 3, 1, 2]),
        elements(&[2, 7]),
        elements(&[2, 7, 7]),
        elements(&[2, 1, 9, 9]),
    ] {
        push(apart(&[RowInput::None, mask.clone()]), &[heads], 1);
        push(apart(&[all.clone(), mask, Run(vec![1, 3, 7, 7])]), &[heads], 1);
    }
    let past = [Run(vec![2, 3, 4, 8]), Run(vec![2, 3, 4, 8])];
    let none = RowInput::None;
    let with_past =
        |bias: &RowInput| apart(&[&[bias.clone(), none.clone(), none.clone()], &past[..]].concat());
    push(with_past(&none), &causal, 3);
    push(with_past(&all), &[heads], 1);
    let buffers = [Run(vec![2, 3, 12, 8]), Run(vec![2, 3, 12, 8])];
    let length = Constant(Tensor::from_slice(&[1], &[5i32]).unwrap());
    let rest = [&[all.clone(), none.clone(), none.clone()], &buffers[..], &[length]].concat();
    push(apart(&rest), &causal, 1);
    cases
}

fn group_query_cases() -> Vec<RowCase> {
    let mut cases = Vec::new();
    let none = RowInput::None;
    let totals = |total: i32| Constant(Tensor::from_slice(&[1], &[total]).unwrap());
    let heads = [("num_heads", 4), ("kv_num_heads", 2)];
    let mut push = |inputs: Vec<RowInput>, attrs: &[(&'static str, i64)], outputs: usize| {
        let attrs = [&heads[..], attrs].concat();
        // If past and present share a buffer, what follows the last row is undefined.
        let compared = if matches!(&inputs[3], Run(shape) if shape[2] == 30) { 1 } else { outputs };
        let case = microsoft("GroupQueryAttention", inputs, &attrs, outputs);
        cases.push(RowCase { compared, ..case });
    };
    let angles = [Run(vec![1001, 4]), Run(vec![1001, 4])];
    for (queries, past, lengths, total) in [
        (7, 0, [6, 4], 7),
        (1, 9, [9, 5], 10),
        (1, 30, [20, 11], 21),
        (3, 30, [20, 11], 21),
        (40, 0, [39, 39], 40),
        (1, 1000, [1000, 30], 1001),
    ] {
        let q = Run(vec![2, queries, 32]);
        let [k, v] = [Run(vec![2, queries, 16]), Run(vec![2, queries, 16])];
        let past = if past == 0 { none.clone() } else { Run(vec![2, 2, past, 8]) };
        let rest = [past.clone(), past, small(&lengths), totals(total)];
        let inputs = [&[q, k, v], &rest[..]].concat();
        let packed = [&[Run(vec![2, queries, 64]), none.clone(), none.clone()], &rest[..]].concat();
        let turned = [&inputs[..], &angles].concat();
        push(inputs.clone(), &[], 3);
        push(packed, &[("local_window_size", 4)], 3);
        push(turned.clone(), &[("do_rotary", 1)], 3);
        push(turned.clone(), &[("do_rotary", 1), ("rotary_interleaved", 1)], 3);
        let sinks = [&turned[..], &[none.clone(), none.clone(), Run(vec![4])]].concat();
        push(sinks, &[("do_rotary", 1)], 3);
        push(inputs, &[("smooth_softmax", 1)], 3);
    }
    cases
}

/// Reductions. Panics if a result differs, or unless the device leaves exactly the operators
/// `on_host` to the host.
pub fn reductions(device: &Arc<dyn Device>, on_host: &[&str]) {
    check_all(device, on_host, &reductions_cases());
}

/// Cumulative sums. Panics if a result differs, or unless the device leaves exactly the operators
/// `on_host` to the host.
pub fn cumulative(device: &Arc<dyn Device>, on_host: &[&str]) {
    check_all(device, on_host, &cumulative_cases());
}

/// Ties, infinities, NaNs and wide integers. Panics if a result differs, or unless the device
/// leaves exactly the operators `on_host` to the host.
pub fn edges(device: &Arc<dyn Device>, on_host: &[&str]) {
    let cases = [arg_cases(), integer_cases(), softmax_edges()];
    cases.iter().for_each(|cases| check_all(device, on_host, cases));
}

/// `Softmax` and its like. Panics if a result differs, or unless the device leaves exactly the
/// operators `on_host` to the host.
pub fn softmax(device: &Arc<dyn Device>, on_host: &[&str]) {
    check_all(device, on_host, &softmaxes_cases());
}

/// Normalizations. Panics if a result differs, or unless the device leaves exactly the operators
/// `on_host` to the host.
pub fn norms(device: &Arc<dyn Device>, on_host: &[&str]) {
    check_all(device, on_host, &norms_cases());
}

/// `Attention`. Panics if a result differs, or unless the device leaves exactly the operators
/// `on_host` to the host.
pub fn attention(device: &Arc<dyn Device>, on_host: &[&str]) {
    check_all(device, on_host, &attention_cases());
}

/// `MultiHeadAttention`. Panics if a result differs, or unless the device leaves exactly the
/// operators `on_host` to the host.
pub fn multi_head_attention(device: &Arc<dyn Device>, on_host: &[&str]) {
    check_all(device, on_host, &multi_head_cases());
}

/// `GroupQueryAttention`. Panics if a result differs, or unless the device leaves exactly the
/// operators `on_host` to the host.
pub fn group_query_attention(device: &Arc<dyn Device>, on_host: &[&str]) {
    check_all(device, on_host, &group_query_cases());
}
