//! Attention and rotary embeddings in all types: edge cases of tiles, few rows over many keys, and
//! rows that see no key. float32 cases with more of the operators' inputs are in `lines`.

use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::Attribute;
use ort_core::ops::nn::HIDDEN_IS_NAN;
use ort_core::spec::MICROSOFT;
use ort_core::tensor::Tensor;

use super::keeps_key;
use super::typed::{self, Case, Given, run};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A node with one output.
fn case(
    (domain, op): (&'static str, &'static str),
    inputs: Vec<Given>,
    attrs: &[(&'static str, i64)],
) -> Case {
    let attrs: Vec<_> = attrs.iter().map(|(name, value)| (*name, Attribute::Int(*value))).collect();
    Case { domain, ..typed::case(op, inputs, &attrs) }
}

impl Case {
    fn writes(self, outputs: usize) -> Case {
        Case { outputs, ..self }
    }

    fn with(mut self, name: &'static str, value: f32) -> Case {
        self.attrs.push((name, Attribute::Float(value)));
        self
    }
}

/// A boolean mask that hides all keys of the first query.
fn mask(queries: usize, keys: usize) -> Given {
    let values: Vec<bool> = (0..queries * keys).map(|at| at >= keys && keeps_key(at)).collect();
    Given::Is(Tensor::from_slice(&[queries, keys], &values).unwrap())
}

/// An additive mask: nothing, a little, or a value that hides a key.
fn added(keys: usize) -> Given {
    let value = |at: usize| match at % 7 {
        0 => f32::NEG_INFINITY,
        1 => -1.5,
        // Exporters write the least finite number instead of an infinity.
        2 => f32::MIN,
        _ => 0.0,
    };
    let values: Vec<f32> = (0..keys).map(value).collect();
    Given::Is(Tensor::from_slice(&[1, 1, 1, keys], &values).unwrap())
}

/// Query heads, KV heads, queries, keys, and the head sizes of keys and values.
const SIZES: [[usize; 6]; 18] = [
    [1, 1, 1, 1, 1, 1],
    // Few query rows, for which kernels split the keys.
    [2, 2, 1, 800, 64, 64],
    [2, 2, 1, 257, 64, 64],
    [4, 2, 1, 1500, 128, 128],
    [8, 1, 1, 600, 128, 64],
    [2, 2, 3, 140, 33, 35],
    [1, 1, 5, 300, 256, 200],
    // Tiles, or tensor cores.
    [2, 2, 9, 65, 64, 64],
    [3, 1, 70, 130, 40, 24],
    [2, 2, 130, 200, 128, 128],
    [2, 1, 65, 900, 80, 128],
    [2, 2, 9, 800, 64, 64],
    [1, 1, 33, 70, 17, 19],
    [6, 2, 30, 64, 16, 8],
    // So few blocks that several warps share rows, with more keys than a tile.
    [1, 1, 40, 300, 64, 48],
    [2, 1, 20, 150, 96, 112],
    [1, 1, 20, 90, 160, 200],
    [1, 1, 12, 800, 300, 40],
];

fn attention_cases(dtype: DType) -> Vec<Case> {
    const ATTENTION: (&str, &str) = ("", "Attention");
    let mut cases = Vec::new();
    for [heads, key_heads, queries, keys, size, value_size] in SIZES {
        let q = run(dtype, &[2, heads, queries, size]);
        let [k, v] = [size, value_size].map(|size| run(dtype, &[2, key_heads, keys, size]));
        let inputs = vec![q, k, v];
        let with = |rest: &[Given]| [&inputs[..], rest].concat();
        let causal = ("is_causal", 1);
        cases.push(case(ATTENTION, inputs.clone(), &[]));
        cases.push(case(ATTENTION, with(&[mask(queries, keys)]), &[]).with("softcap", 1.5));
        // As the fusion rule emits it from primitive operators: the fully masked first query is
        // NaN.
        cases.push(case(ATTENTION, with(&[mask(queries, keys)]), &[(HIDDEN_IS_NAN, 1)]));
        cases.push(case(ATTENTION, with(&[added(keys)]), &[causal]).with("scale", 0.3));
        cases.push(case(ATTENTION, with(&[run(dtype, &[2, 1, 1, keys])]), &[]));
        let past = [size, value_size].map(|size| run(dtype, &[2, key_heads, 6, size]));
        let inputs = with(&[&[Given::None], &past[..]].concat());
        // The outputs are the result, and the present keys and values.
        cases.push(case(ATTENTION, inputs.clone(), &[causal]).writes(3));
        let windows = [("left_window_size", 5), ("right_window_size", 2)];
        cases.push(case(ATTENTION, inputs, &windows));
        // The keys that count in each batch: the input `nonpad_kv_seqlen`.
        let lengths = Given::Is(Tensor::from_slice(&[2], &[keys as i64, keys as i64 / 2]).unwrap());
        cases.push(case(ATTENTION, with(&[Given::None, Given::None, Given::None, lengths]), &[causal]));
    }
    // Heads packed in the last axis, and the output of scores.
    let inputs =
        vec![run(dtype, &[2, 70, 96]), run(dtype, &[2, 90, 32]), run(dtype, &[2, 90, 32]), mask(70, 90)];
    let heads = [("q_num_heads", 6), ("kv_num_heads", 2)];
    cases.push(case(ATTENTION, inputs.clone(), &heads));
    for mode in 0..3 {
        let attrs = [&heads[..], &[("qk_matmul_output_mode", mode)]].concat();
        let case = case(ATTENTION, inputs[..3].to_vec(), &attrs).with("softcap", 2.0);
        cases.push(case.writes(4));
    }
    // Masks of integers, for few rows and for many.
    for queries in [1, 20] {
        let [q, k, v] = [queries, 90, 90].map(|rows| run(dtype, &[1, 2, rows, 32]));
        // 17 does not divide the number of keys, so the rows differ.
        let values: Vec<i64> = (0..queries * 90).map(|at| -(at as i64 * 7919 % 17 % 5)).collect();
        let mask = Given::Is(Tensor::from_slice(&[queries, 90], &values).unwrap());
        cases.push(case(ATTENTION, vec![q, k, v, mask], &[]));
    }
    // Values of another type than the keys.
    for (keys, values) in [(dtype, DType::F32), (DType::F32, dtype)] {
        let q = run(keys, &[1, 2, 20, 32]);
        let (k, v) = (run(keys, &[1, 2, 40, 32]), run(values, &[1, 2, 40, 16]));
        cases.push(case(ATTENTION, vec![q, k, v], &[]));
    }
    cases
}

fn multi_head_cases(dtype: DType) -> Vec<Case> {
    const OP: (&str, &str) = (MICROSOFT, "MultiHeadAttention");
    let mut cases = Vec::new();
    for (queries, keys, heads, size) in [(1, 300, 2, 64), (70, 70, 3, 40), (65, 130, 2, 128)] {
        let (width, attr) = (heads * size, ("num_heads", heads as i64));
        let bias = run(dtype, &[3 * width]);
        let apart = vec![
            run(dtype, &[2, queries, width]),
            run(dtype, &[2, keys, width]),
            run(dtype, &[2, keys, width]),
        ];
        cases.push(case(OP, apart.clone(), &[attr]));
        cases.push(case(
            OP,
            [&apart[..], std::slice::from_ref(&bias)].concat(),
            &[attr, ("unidirectional", 1)],
        ));
        let padding = Given::Is(Tensor::from_slice(&[2], &[keys as i32, keys as i32 / 3]).unwrap());
        let rest = [bias.clone(), padding, run(dtype, &[1, heads, queries, keys])];
        cases.push(case(OP, [&apart[..], &rest].concat(), &[attr]));
        let (ends, starts) = ([keys as i32, keys as i32 / 3], [keys as i32 / 2, 2]);
        let both = Given::Is(Tensor::from_slice(&[4], &[ends, starts].concat()).unwrap());
        let elements = |shape: &[usize]| {
            let count: usize = shape.iter().product();
            let values: Vec<i32> = (0..count).map(|at| i32::from(keeps_key(at))).collect();
            Given::Is(Tensor::from_slice(shape, &values).unwrap())
        };
        // Ends and starts of the batches, then elements with two axes and with three.
        for padding in [both, elements(&[2, keys]), elements(&[2, queries, keys])] {
            cases.push(case(OP, [&apart[..], &[Given::None, padding]].concat(), &[attr]));
        }
        let past = [run(dtype, &[2, heads, 9, size]), run(dtype, &[2, heads, 9, size])];
        let rest = [&[bias, Given::None, Given::None][..], &past].concat();
        cases.push(case(OP, [&apart[..], &rest].concat(), &[attr]).writes(3));
        // Packed as [batch, queries, heads, 3, size].
        let packed = run(dtype, &[2, queries, heads, 3, size]);
        cases.push(case(OP, vec![packed], &[attr]));
    }
    cases
}

fn group_query_cases(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (queries, past, lengths, total, size) in [
        (1, 800, [700, 30], 701, 64),
        (1, 40, [40, 12], 41, 128),
        (70, 0, [69, 40], 70, 40),
        (5, 300, [250, 90], 251, 64),
        (20, 130, [149, 149], 150, 32),
    ] {
        let [q, k, v] = [4, 2, 2].map(|heads| run(dtype, &[2, queries, heads * size]));
        let cache = if past == 0 { Given::None } else { run(dtype, &[2, 2, past, size]) };
        // ONNX Runtime's `seqlens_k` is the number of keys minus one.
        let lengths = Given::Is(Tensor::from_slice(&[2], &lengths).unwrap());
        let totals = Given::Constant(Tensor::from_slice(&[1], &[total]).unwrap());
        // Cosines and sines: [positions, size / 2].
        let angles = [run(dtype, &[900, size / 2]), run(dtype, &[900, size / 2])];
        let inputs = [&[q, k, v, cache.clone(), cache, lengths, totals][..], &angles].concat();
        let heads = [("num_heads", 4), ("kv_num_heads", 2)];
        let mut push = |attrs: &[(&'static str, i64)], rest: &[Given], softcap: f32| {
            let attrs = [&heads[..], attrs].concat();
            let inputs = [&inputs[..], rest].concat();
            cases.push(
                case((MICROSOFT, "GroupQueryAttention"), inputs, &attrs).with("softcap", softcap).writes(3),
            );
        };
        push(&[("do_rotary", 1)], &[], 0.0);
        push(&[("do_rotary", 1), ("rotary_interleaved", 1), ("local_window_size", 7)], &[], 0.0);
        push(&[("smooth_softmax", 1)], &[], 2.5);
    }
    cases
}

fn rotary_cases(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    let ids = |shape: &[usize]| {
        let count: usize = shape.iter().product();
        // Positions are below 11, the number of rows of the tables.
        let values: Vec<i64> = (0..count).map(|at| (at * 5 % 11) as i64).collect();
        Given::Is(Tensor::from_slice(shape, &values).unwrap())
    };
    for (size, half) in [(8, 4), (10, 3), (96, 48), (160, 20)] {
        for interleaved in [0, 1] {
            let angles = || run(dtype, &[11, half]);
            let width = ("rotary_embedding_dim", 2 * half as i64);
            let attrs = [("interleaved", interleaved), width, ("num_heads", 3)];
            let op = ("", "RotaryEmbedding");
            let (heads, tokens) = (run(dtype, &[2, 3, 5, size]), run(dtype, &[2, 5, 3 * size]));
            cases.push(case(op, vec![heads.clone(), angles(), angles(), ids(&[2, 5])], &attrs));
            let each = || run(dtype, &[2, 5, half]);
            cases.push(case(op, vec![tokens.clone(), each(), each()], &attrs));
            let op = (MICROSOFT, "RotaryEmbedding");
            cases.push(case(op, vec![heads, ids(&[2, 5]), angles(), angles()], &attrs));
            // One position is that of the first token. The others count up from it.
            let first = Given::Is(Tensor::from_slice(&[1], &[4i64]).unwrap());
            cases.push(case(op, vec![tokens, first, angles(), angles()], &attrs));
        }
    }
    cases
}

fn check_all(device: &Arc<dyn Device>, cases: fn(DType) -> Vec<Case>) {
    TYPES.into_iter().for_each(|dtype| typed::check_all(device, &cases(dtype)));
}

/// Checks `Attention`. Panics if a result differs.
pub fn attention(device: &Arc<dyn Device>) {
    check_all(device, attention_cases);
}

/// Checks `MultiHeadAttention`. Panics if a result differs.
pub fn multi_head_attention(device: &Arc<dyn Device>) {
    check_all(device, multi_head_cases);
}

/// Checks `GroupQueryAttention`. Panics if a result differs.
pub fn group_query_attention(device: &Arc<dyn Device>) {
    check_all(device, group_query_cases);
}

/// Checks `RotaryEmbedding`. Panics if a result differs.
pub fn rotary_embedding(device: &Arc<dyn Device>) {
    check_all(device, rotary_cases);
}

/// Checks `LinearAttention`: all update rules, shared key heads, and sizes around those of the
/// kernels.
///
/// # Panics
///
/// A result differs from the CPU's, or the device does not run a case.
pub fn linear_attention(device: &Arc<dyn Device>) {
    // Batch, time steps, heads, queries per head, and the sizes of keys and values.
    const LAYERS: [[usize; 6]; 7] = [
        [1, 1, 1, 1, 1, 1],
        [2, 5, 3, 1, 8, 17],
        [1, 4, 2, 2, 64, 16],
        [1, 3, 1, 3, 65, 5],
        [2, 2, 2, 1, 256, 3],
        [1, 2, 1, 1, 257, 6],
        [1, 0, 2, 1, 4, 4],
    ];
    let mut cases = Vec::new();
    for (index, [batch, times, heads, group, keys, values]) in LAYERS.into_iter().enumerate() {
        for (at, rule) in ["linear", "gated", "delta", "gated_delta"].into_iter().enumerate() {
            let dtype = TYPES[(index + at) % 3];
            let of_times = |width: usize| run(dtype, &[batch, times, width]);
            let given = |is_given: bool, width: usize| if is_given { of_times(width) } else { Given::None };
            let past = match (index + at) % 2 {
                // One layer keeps its state in float32, whatever the type of its tokens.
                0 => run(if index == 2 { DType::F32 } else { dtype }, &[batch, heads, keys, values]),
                _ => Given::None,
            };
            let inputs = vec![
                of_times(heads * group * keys),
                of_times(heads * keys),
                of_times(heads * values),
                past,
                given(at % 2 == 1, if index % 2 == 0 { heads } else { heads * keys }),
                given(at >= 2, if index % 3 == 0 { 1 } else { heads }),
            ];
            let attrs = [("q_num_heads", (heads * group) as i64), ("kv_num_heads", heads as i64)];
            let mut case = case(("", "LinearAttention"), inputs, &attrs).writes(2);
            case.attrs.push(("update_rule", Attribute::String(rule.to_owned())));
            // With a delta rule, errors of the state accumulate over time.
            case.tolerance *= 4.0;
            cases.push(if index % 2 == 0 { case } else { case.with("scale", 0.5) });
        }
    }
    typed::check_all(device, &cases);
}
