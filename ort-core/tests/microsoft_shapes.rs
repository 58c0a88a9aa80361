//! Shape inference of operators of `com.microsoft`: symbolic shapes of outputs, and what is refused.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_core::{ErrorKind, Result};

/// An input: its type and shape as text, `float[batch, 4]`; empty where it is left out.
type Given = &'static str;
type Attrs = &'static [(&'static str, Value)];

#[derive(Clone, Copy)]
enum Value {
    Int(i64),
    Ints(&'static [i64]),
    Text(&'static str),
    Floats(&'static [f32]),
}
use Value::{Floats, Int, Ints, Text};

const HEADS: (&str, Value) = ("num_heads", Int(2));
const SHARED: (&str, Value) = ("past_present_share_buffer", Int(1));
const RELU: (&str, Value) = ("activation", Text("Relu"));

fn graph(op: &str, inputs: &[Given], attrs: Attrs, outputs: usize) -> Result<Graph> {
    let mut builder = GraphBuilder::new("one node");
    let mut ids: Vec<Option<ValueId>> = Vec::new();
    for (index, text) in inputs.iter().enumerate() {
        ids.push(text.split_once('[').map(|(dtype, sizes)| {
            let sizes: Vec<&str> = sizes.trim_end_matches(']').split(',').map(str::trim).collect();
            let sizes = if sizes == [""] { Vec::new() } else { sizes };
            let dtype = DType::from_name(dtype).expect("a type");
            builder.input(&format!("x{index}"), dtype, &sizes)
        }));
    }
    let attrs: Vec<(&str, Attribute)> = attrs
        .iter()
        .map(|(name, value)| {
            let value = match *value {
                Int(value) => Attribute::Int(value),
                Ints(values) => Attribute::Ints(values.to_vec()),
                Text(text) => Attribute::String(text.to_string()),
                Floats(values) => Attribute::Floats(values.to_vec()),
            };
            (*name, value)
        })
        .collect();
    let outputs = builder.add(("com.microsoft", op), &ids, &attrs, outputs, Vec::new())?;
    builder.finish(&outputs)
}

#[test]
fn outputs_have_symbolic_shapes() {
    let cases: &[(&str, &[Given], Attrs, &[&str])] = &[
        ("BiasGelu", &["float[b, s, 8]", "float[8]"], &[], &["float[b, s, 8]"]),
        ("FastGelu", &["float16[b, 8]"], &[], &["float16[b, 8]"]),
        (
            "FusedMatMul",
            &["float[b, h, s, 64]", "float[b, h, t, 64]"],
            &[("transB", Int(1))],
            &["float[b, h, s, t]"],
        ),
        (
            "FusedMatMul",
            &["float[k, b, h, m]", "float[b, h, k, n]"],
            &[("transA", Int(1)), ("transBatchA", Int(1))],
            &["float[b, h, m, n]"],
        ),
        ("FusedGemm", &["float[b, 4]", "float[4, n]", "float[n]"], &[RELU], &["float[b, n]"]),
        ("FusedConv", &["float[b, 3, 9, w]", "float[8, 3, 3, 3]"], &[RELU], &["float[b, 8, 7, w - 2]"]),
        (
            "SkipLayerNormalization",
            &["float[b, s, 8]", "float[1, s, 8]", "float[8]", "float[8]", "float[8]"],
            &[],
            &["float[b, s, 8]", "float[b, s, 1]", "float[b, s, 1]", "float[b, s, 8]"],
        ),
        (
            "EmbedLayerNormalization",
            &[
                "int32[b, s]",
                "int32[b, s]",
                "float[v, 8]",
                "float[p, 8]",
                "float[2, 8]",
                "float[8]",
                "float[8]",
            ],
            &[],
            &["float[b, s, 8]", "int32[b]", "float[b, s, 8]"],
        ),
        (
            "BiasSoftmax",
            &["float[b, h, s, t]", "float[b, 1, 1, t]"],
            &[("axis", Int(3)), ("is_inner_broadcast", Int(1))],
            &["float[b, h, s, t]"],
        ),
        ("BiasDropout", &["float[b, 8]", "float[8]"], &[], &["float[b, 8]", "bool[b, 8]"]),
        ("BiasSplitGelu", &["float[b, s, 8]", "float[8]"], &[], &["float[b, s, 4]"]),
        ("Inverse", &["double[b, 3, 3]"], &[], &["double[b, 3, 3]"]),
        (
            "Attention",
            &["float[b, s, 8]", "float[8, 24]", "float[24]", "int32[b, t]", "float[2, b, 2, p, 4]"],
            &[HEADS],
            &["float[b, s, 8]", "float[2, b, 2, p + s, 4]"],
        ),
        (
            "Attention",
            &["float[b, s, 8]", "float[8, 20]"],
            &[HEADS, ("qkv_hidden_sizes", Ints(&[8, 8, 4]))],
            &["float[b, s, 4]"],
        ),
        (
            "Attention",
            &["float[b, 1, 8]", "float[8, 3*h]", "", "", "float[2, b, 2, m, 4]", "", "int32[1]"],
            &[HEADS, SHARED],
            &["float[b, 1, 2*floor(h/2)]", "float[2, b, 2, m, floor(h/2)]"],
        ),
        (
            "DecoderMaskedMultiHeadAttention",
            &[
                "float[b, 1, 8]",
                "float[b, 1, 8]",
                "float[b, 1, 8]",
                "",
                "",
                "float[b, 2, m, 4]",
                "float[b, 2, m, 4]",
                "int32[1]",
            ],
            &[HEADS, SHARED],
            &["float[b, 1, 8]", "float[b, 2, m, 4]", "float[b, 2, m, 4]"],
        ),
        (
            "DecoderMaskedMultiHeadAttention",
            &["float[b, 1, 24]", "", "", "", "", "float[b, 2, p, 4]", "float[b, 2, p, 4]"],
            &[HEADS],
            &["float[b, 1, 8]", "float[b, 2, p + 1, 4]", "float[b, 2, p + 1, 4]", "float[b, 2, 1, p + 1]"],
        ),
        (
            "DecoderMaskedMultiHeadAttention",
            &["float[b, 1, 8]", "float[b, 2, k, 4]", "float[b, 2, k, 6]"],
            &[HEADS],
            &["float[b, 1, 12]"],
        ),
        (
            "PackedAttention",
            &["float16[t, 8]", "float16[8, 24]", "float16[24]", "int32[b, s]", "int32[b + 1]"],
            &[HEADS],
            &["float16[t, 8]"],
        ),
        (
            "QAttention",
            &[
                "uint8[b, s, 6]",
                "int8[6, 24]",
                "float[24]",
                "float[]",
                "float[24]",
                "",
                "uint8[]",
                "int8[24]",
                "float[2, b, 2, p, 4]",
            ],
            &[HEADS],
            &["float[b, s, 8]", "float[2, b, 2, p + s, 4]"],
        ),
        (
            "MoE",
            &["float[b, s, 8]", "float[t, e]", "float[e, 24, 8]", "", "float[e, 8, 12]"],
            &[("activation_type", Text("swiglu")), ("swiglu_fusion", Int(1))],
            &["float[b, s, 8]"],
        ),
    ];
    for (op, inputs, attrs, expected) in cases {
        let graph = graph(op, inputs, attrs, expected.len()).expect(op);
        let found: Vec<String> = graph.outputs.iter().map(|&id| graph.value(id).ty.to_string()).collect();
        assert_eq!(found, *expected, "{op} of {inputs:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    // operator, inputs, attributes, part of the message
    let cases: &[(&str, &[Given], Attrs, &str)] = &[
        ("BiasGelu", &["float[2, 4]", "float[2, 4]"], &[], "rank 2"),
        ("BiasGelu", &["float[2, 4]", "float[1]"], &[], "1"),
        ("BiasGelu", &["float[]", "float[1]"], &[], "scalar"),
        ("FastGelu", &["float[2, 4]", "float[3]"], &[], "3"),
        ("FusedMatMul", &["float[2, 3]", "float[2, 4]"], &[], "differ"),
        ("FusedMatMul", &["float[2, 3]", "float[3, 4]"], &[("transA", Int(1))], "differ"),
        ("FusedMatMul", &["float[2, 3]", "float[3, 4]"], &[("transBatchA", Int(1))], "no batch"),
        ("FusedMatMul", &["float[]", "float[3, 4]"], &[("transA", Int(1))], "rank 1 or more"),
        ("FusedGemm", &["float[2, 3]", "float[3, 4]"], &[("activation", Text("Foo"))], "'Foo' is not known"),
        (
            "FusedGemm",
            &["float[2, 3]", "float[3, 4]"],
            &[("activation", Text("LeakyRelu"))],
            "activation_alpha",
        ),
        ("FusedGemm", &["float[2, 3]", "float[3, 4]"], &[], "'activation' is missing"),
        ("FusedGemm", &["float[3]", "float[3, 4]"], &[RELU], "rank 1"),
        (
            "FusedConv",
            &["float[1, 2, 5, 5]", "float[3, 2, 3, 3]"],
            &[("activation", Text("Clip")), ("activation_params", Floats(&[1.0]))],
            "takes 2 parameters, got 1",
        ),
        ("FusedConv", &["float[1, 2, 5]", "float[3, 2, 3, 3]"], &[], "rank 3"),
        ("FusedConv", &["float[1, 2, 5]", "float[3, 2, 3]", "", "float[1, 3]"], &[], "rank 2"),
        ("FusedConv", &["float[1, 2, 5]", "float[3, 2, 3]", "", "float[1, 3, 1]"], &[], "is 1, expected 3"),
        ("SkipLayerNormalization", &["float[8]", "float[8]", "float[8]"], &[], "rank 1"),
        ("SkipLayerNormalization", &["float[2, 3, 8]", "float[2, 1, 8]", "float[8]"], &[], "does not fit"),
        ("SkipLayerNormalization", &["float[2, 3, 8]", "float[8]", "float[8]"], &[], "does not fit"),
        ("SkipLayerNormalization", &["float[3, 8]", "float[3, 8]", "float[7]"], &[], "is 7, expected 8"),
        ("SkipSimplifiedLayerNormalization", &["float[3, 8]", "float[3, 8]", "float[1, 8]"], &[], "rank 2"),
        (
            "EmbedLayerNormalization",
            &[
                "int32[2, 3]",
                "int32[1, 3]",
                "float[5, 8]",
                "float[6, 8]",
                "float[2, 8]",
                "float[8]",
                "float[8]",
            ],
            &[],
            "the batch of segment_ids is 1, expected 2",
        ),
        (
            "EmbedLayerNormalization",
            &["int32[2, 3]", "", "float[5, 8]", "float[6, 7]", "", "float[8]", "float[8]"],
            &[],
            "position_embedding is 7, expected 8",
        ),
        (
            "EmbedLayerNormalization",
            &["int32[2, 7]", "", "float[5, 8]", "float[6, 8]", "", "float[8]", "float[8]"],
            &[],
            "6 positions",
        ),
        (
            "BiasSoftmax",
            &["float[2, 4]", "float[2, 4]"],
            &[("axis", Int(2)), ("is_inner_broadcast", Int(0))],
            "out of range",
        ),
        ("BiasSoftmax", &["float[2, 4]", "float[2, 4]"], &[], "'is_inner_broadcast' is missing"),
        ("BiasDropout", &["float[2, 4]", "float[4]", "float[4]"], &[], "rank 1, expected 2"),
        ("BiasAdd", &["float[2, 3, 4]", "float[4]", "float[2, 3, 5]"], &[], "is 5, expected 4"),
        ("BiasSplitGelu", &["float[2, 3, 5]", "float[5]"], &[], "no halves"),
        ("Inverse", &["float[2, 3]"], &[], "no inverse"),
        ("Inverse", &["float[3]"], &[], "rank 2 or more"),
        ("Unique", &["float[2, 3]"], &[], "rank 2, expected 1"),
        ("Attention", &["float[2, 3, 8]", "float[8, 24]"], &[], "'num_heads' is missing"),
        ("Attention", &["float[2, 3, 8]", "float[8, 24]"], &[("num_heads", Int(0))], "num_heads is 0"),
        ("Attention", &["float[2, 3, 8]", "float[8, 24]"], &[("num_heads", Int(5))], "5 heads"),
        ("Attention", &["float[2, 3, 8]", "float[8, 25]"], &[HEADS], "width 25"),
        ("Attention", &["float[2, 3, 8]", "float[7, 24]"], &[HEADS], "is 7, expected 8"),
        ("Attention", &["float[3, 8]", "float[8, 24]"], &[HEADS], "rank 2, expected 3"),
        ("Attention", &["float[2, 3, 8]", "float[8, 24]", "float[20]"], &[HEADS], "is 20, expected 24"),
        (
            "Attention",
            &["float[2, 3, 8]", "float[8, 24]"],
            &[HEADS, ("qkv_hidden_sizes", Ints(&[8, 4, 12]))],
            "the first two equal",
        ),
        (
            "Attention",
            &["float[2, 3, 8]", "float[8, 24]"],
            &[HEADS, ("qkv_hidden_sizes", Ints(&[i64::MAX, i64::MAX, 12]))],
            "does not divide",
        ),
        (
            "Attention",
            &["float[2, 3, 8]", "float[8, 20]", "", "", "float[2, 2, 2, 5, 4]"],
            &[HEADS, ("qkv_hidden_sizes", Ints(&[8, 8, 4]))],
            "kept with keys",
        ),
        (
            "Attention",
            &["float[2, 3, 8]", "float[8, 24]", "", "", "float[2, 7, 2, 5, 4]"],
            &[HEADS],
            "is 7, expected 2",
        ),
        (
            "Attention",
            &["float[2, 3, 8]", "float[8, 24]", "", "", "float[2, 2, 2, 5, 4]"],
            &[HEADS, SHARED],
            "needs past_sequence_length",
        ),
        (
            "DecoderMaskedMultiHeadAttention",
            &["float[2, 3, 8]", "float[2, 1, 8]", "float[2, 1, 8]"],
            &[HEADS],
            "is 3, expected 1",
        ),
        ("DecoderMaskedMultiHeadAttention", &["float[2, 1, 8]", "float[2, 1, 8]"], &[HEADS], "go together"),
        (
            "DecoderMaskedMultiHeadAttention",
            &["float[2, 1, 8]", "float[2, 1, 8]", "float[2, 1, 8]"],
            &[HEADS, SHARED],
            "needs past_key",
        ),
        (
            "DecoderMaskedMultiHeadAttention",
            &["float[2, 1, 8]", "float[2, 1, 8]", "float[2, 2, 5, 4]"],
            &[HEADS],
            "ranks 3 and 4",
        ),
        (
            "DecoderMaskedMultiHeadAttention",
            &["float[2, 1, 8]", "float[2, 1, 8]", "float[2, 1, 8]", "", "", "", "", "", "", "int32[1, 2, 5]"],
            &[HEADS],
            "cache_indirection needs",
        ),
        (
            "PackedAttention",
            &["float[9, 8]", "float[8, 24]", "float[24]", "int32[2, 4]", "int32[3]"],
            &[HEADS],
            "9 tokens",
        ),
        (
            "PackedAttention",
            &["float[5, 8]", "float[8, 24]", "float[24]", "int32[2, 4]", "int32[2]"],
            &[HEADS],
            "is 2, expected 3",
        ),
        (
            "QAttention",
            &["uint8[2, 3, 8]", "uint8[8, 24]", "float[24]", "float[2]", "float[]"],
            &[HEADS],
            "input_scale is 2, expected 1",
        ),
        (
            "QAttention",
            &["uint8[2, 3, 8]", "uint8[8, 24]", "float[24]", "float[]", "float[23]"],
            &[HEADS],
            "weight_scale is 23, expected 24",
        ),
        (
            "MoE",
            &["float[5, 8]", "float[5, 4]", "float[4, 12, 8]", "", "float[4, 8, 12]"],
            &[("k", Int(5))],
            "4 experts",
        ),
        (
            "MoE",
            &["float[5, 8]", "float[5, 4]", "float[4, 12, 8]", "", "float[4, 8, 12]"],
            &[("activation_type", Text("tanh"))],
            "'tanh'",
        ),
        (
            "MoE",
            &["float[5, 8]", "float[5, 4]", "float[4, 12, 8]", "", "float[4, 8, 12]"],
            &[("activation_type", Text("swiglu"))],
            "fc3_experts_weights",
        ),
        (
            "MoE",
            &["float[5, 8]", "float[6, 4]", "float[4, 12, 8]", "", "float[4, 8, 12]"],
            &[],
            "router_probs is 6, expected 5",
        ),
        (
            "MoE",
            &["float[5, 8]", "float[5, 4]", "float[4, 12, 8]", "float[4, 11]", "float[4, 8, 12]"],
            &[],
            "fc1_experts_bias is 11, expected 12",
        ),
    ];
    for (op, inputs, attrs, part) in cases {
        let error = match graph(op, inputs, attrs, 1) {
            Ok(_) => panic!("{op} of {inputs:?} is not refused"),
            Err(error) => error,
        };
        assert_eq!(error.kind(), ErrorKind::InvalidGraph, "{op} of {inputs:?}: {error}");
        assert!(error.to_string().contains(part), "{op} of {inputs:?}: {error}");
    }
}
