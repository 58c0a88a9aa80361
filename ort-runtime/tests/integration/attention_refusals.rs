//! Attention and mixtures of experts whose sizes, lengths and places of tokens come at run time and
//! do not fit: each ends in a typed error that names what is wrong, and none in a panic.

use crate::support::numbers;
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::{DType, Error, Model, Result, Session, Tensor, Value};

/// An input: a tensor of numbers, integers, or none.
#[derive(Clone, Copy, Debug)]
enum Given {
    F(&'static [usize]),
    I(&'static [usize], &'static [i32]),
    None,
}
use Given::{F, I};

const HEADS: (&str, i64) = ("num_heads", 2);
const SHARED: (&str, i64) = ("past_present_share_buffer", 1);
const BUFFER: Given = F(&[2, 2, 2, 9, 4]);
const STEP: Given = F(&[2, 1, 8]);
const CACHE: Given = F(&[2, 2, 9, 4]);
const PACKED: [Given; 3] = [F(&[5, 8]), F(&[8, 24]), F(&[24])];

/// Runs one node, of whose inputs the graph tells no more than the ranks.
fn run(op: &str, inputs: &[Given], attrs: &[(&str, i64)], outputs: usize) -> Result<()> {
    let mut builder = GraphBuilder::new("one node");
    let (mut ids, mut values): (Vec<Option<ValueId>>, Vec<(String, Value)>) = (Vec::new(), Vec::new());
    for (index, given) in inputs.iter().enumerate() {
        let (tensor, dtype) = match given {
            F(shape) => (numbers(shape, index)?, DType::F32),
            I(shape, elements) => (Tensor::from_slice(shape, elements)?, DType::I32),
            Given::None => {
                ids.push(None);
                continue;
            }
        };
        let sizes: Vec<String> = (0..tensor.shape().len()).map(|axis| format!("x{index}_{axis}")).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        ids.push(Some(builder.input(&format!("x{index}"), dtype, &sizes)));
        values.push((format!("x{index}"), tensor.into()));
    }
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (*name, Attribute::Int(*value))).collect();
    let outputs = builder.add(("com.microsoft", op), &ids, &attrs, outputs, Vec::new())?;
    let session = Session::builder(&Model::from_graph(builder.finish(&outputs)?)).threads(2).build()?;
    let values: Vec<(&str, Value)> =
        values.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    session.run(&values).map(|_| ())
}

/// Operator, inputs, attributes, outputs, part of the message; empty where it is fine.
type Case = (&'static str, Vec<Given>, &'static [(&'static str, i64)], usize, &'static str);

fn shared(length: Given) -> Vec<Given> {
    let [input, weights, bias] = [F(&[2, 3, 8]), F(&[8, 24]), F(&[24])];
    vec![input, weights, bias, Given::None, BUFFER, Given::None, length]
}

fn step(rest: &[Given]) -> Vec<Given> {
    [&[STEP, STEP, STEP, Given::None, Given::None, CACHE, CACHE], rest].concat()
}

fn packed(offsets: &'static [i32], ends: Given) -> Vec<Given> {
    [&PACKED[..], &[I(&[2, 3], offsets), ends]].concat()
}

fn masked(mask: Given) -> Vec<Given> {
    vec![F(&[2, 3, 8]), F(&[8, 24]), F(&[24]), mask]
}

fn experts(router: &'static [usize], first: &'static [usize]) -> Vec<Given> {
    vec![F(&[5, 8]), F(router), F(first), F(&[4, 12]), F(&[4, 8, 12])]
}

fn cases() -> Vec<Case> {
    let (beams, length) = (I(&[1], &[2]), I(&[1], &[3]));
    let decoder = "DecoderMaskedMultiHeadAttention";
    let few_places = [&PACKED[..], &[I(&[2, 2], &[0, 1, 2, 3]), I(&[3], &[0, 2, 5])]].concat();
    vec![
        ("Attention", shared(I(&[1], &[6])), &[HEADS, SHARED], 2, ""),
        ("Attention", shared(I(&[1], &[7])), &[HEADS, SHARED], 2, "past_sequence_length is 7"),
        ("Attention", shared(I(&[1], &[-1])), &[HEADS, SHARED], 2, "past_sequence_length is -1"),
        ("Attention", shared(I(&[0], &[])), &[HEADS, SHARED], 2, "past_sequence_length"),
        ("Attention", masked(I(&[2], &[-5, 100])), &[HEADS], 1, ""),
        ("Attention", masked(I(&[4], &[9, 0, -9, 50])), &[HEADS], 1, ""),
        ("Attention", masked(I(&[5], &[1; 5])), &[HEADS], 1, "mask has shape [5]"),
        ("Attention", masked(I(&[2, 4], &[1; 8])), &[HEADS], 1, "mask has shape [2, 4]"),
        ("Attention", masked(I(&[2, 1, 2, 2], &[1; 8])), &[HEADS], 1, "mask has shape [2, 1, 2, 2]"),
        ("Attention", vec![F(&[2, 3, 8]), F(&[8, 25])], &[HEADS], 1, "2"),
        (
            "Attention",
            vec![F(&[2, 3, 8]), F(&[8, 24]), F(&[7])],
            &[HEADS],
            1,
            "the length of bias is 7, expected 24",
        ),
        (decoder, step(&[I(&[1], &[8])]), &[HEADS, SHARED], 3, ""),
        (decoder, step(&[I(&[1], &[9])]), &[HEADS, SHARED], 3, "past_sequence_length is 9"),
        (decoder, step(&[I(&[1], &[i32::MIN])]), &[HEADS, SHARED], 3, "past_sequence_length is -2147483648"),
        (decoder, step(&[length, beams, I(&[1, 2, 9], &[1; 18])]), &[HEADS, SHARED], 3, ""),
        (decoder, step(&[length, beams, I(&[1, 2, 9], &[2; 18])]), &[HEADS, SHARED], 3, "names beam 2 of 2"),
        (decoder, step(&[length, beams, I(&[1, 2, 9], &[-1; 18])]), &[HEADS, SHARED], 3, "names beam -1"),
        (decoder, step(&[length, beams, I(&[1, 3, 9], &[0; 27])]), &[HEADS, SHARED], 3, "cache_indirection"),
        (decoder, step(&[length, beams, I(&[1, 2, 2], &[0; 4])]), &[HEADS, SHARED], 3, "cache_indirection"),
        ("PackedAttention", packed(&[0, 1, 3, 4, 5, 2], I(&[3], &[0, 2, 5])), &[HEADS], 1, ""),
        ("PackedAttention", packed(&[0, 1, 3, 4, 6, 2], I(&[3], &[0, 2, 5])), &[HEADS], 1, "6"),
        (
            "PackedAttention",
            packed(&[0, 1, 3, 4, i32::MIN, 2], I(&[3], &[0, 2, 5])),
            &[HEADS],
            1,
            "-2147483648",
        ),
        ("PackedAttention", packed(&[0, 1, 3, 4, 5, 2], I(&[3], &[i32::MIN, i32::MAX, -1])), &[HEADS], 1, ""),
        ("PackedAttention", packed(&[0, 1, 3, 4, 5, 2], I(&[5], &[0; 5])), &[HEADS], 1, "2"),
        ("PackedAttention", packed(&[0, 1, 3, 4, 5, 2], I(&[0], &[])), &[HEADS], 1, "2"),
        (
            "PackedAttention",
            packed(&[0, 1, 3, 4, 5, 2], I(&[4], &[0, 2, 5, 6])),
            &[HEADS],
            1,
            "cannot be reshaped to",
        ),
        ("PackedAttention", few_places, &[HEADS], 1, "cannot be reshaped to"),
        ("MoE", experts(&[5, 4], &[4, 12, 8]), &[("k", 4)], 1, ""),
        ("MoE", experts(&[5, 4], &[4, 12, 8]), &[("k", 5)], 1, "k is 5, but there are 4 experts"),
        ("MoE", experts(&[5, 4], &[4, 12, 8]), &[("k", i64::MAX)], 1, "4 experts"),
        ("MoE", experts(&[5, 3], &[4, 12, 8]), &[], 1, "4 experts, expected 3"),
        ("MoE", experts(&[6, 4], &[4, 12, 8]), &[], 1, "router_probs has shape [6, 4]"),
        ("MoE", experts(&[5, 4], &[4, 13, 8]), &[], 1, "do not match"),
        ("MoE", experts(&[5, 4], &[4, 12, 8]), &[("use_sparse_mixer", 1)], 1, "use_sparse_mixer"),
    ]
}

#[test]
fn what_does_not_fit_at_run_time_is_refused() {
    let mut wrong = Vec::new();
    for (op, inputs, attrs, outputs, part) in cases() {
        let outcome = run(op, &inputs, attrs, outputs).map_err(|error: Error| error.to_string());
        let fits = match &outcome {
            Ok(()) => part.is_empty(),
            Err(error) => !part.is_empty() && error.contains(part) && !error.contains("panicked"),
        };
        if !fits {
            wrong.push(format!("{op} of {inputs:?} {attrs:?}: {outcome:?}\n  expected '{part}'"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
