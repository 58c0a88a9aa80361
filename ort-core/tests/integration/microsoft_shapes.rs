//! Shape inference of operators of `com.microsoft`: symbolic shapes of outputs, and what is
//! refused.

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

/// A scale.
const F: Given = "float[]";

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
        ("GatedAdd", &["float[b, s, 8]", "float[b, s, 8]", "float[b, s, 1]"], &[], &["float[b, s, 8]"]),
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
            "QLinearAdd",
            &["uint8[b, 1, 8]", F, "uint8[]", "uint8[s, 1]", F, "uint8[]", F, "uint8[]"],
            &[],
            &["uint8[b, s, 8]"],
        ),
        ("QLinearSigmoid", &["int8[b, 8]", "float[1]", "", F, "int8[]"], &[], &["int8[b, 8]"]),
        (
            "QLinearConcat",
            &[F, "int8[]", "int8[b, m, 3]", F, "int8[]", "int8[b, n, 3]", "float[1]", "int8[1]"],
            &[("axis", Int(1))],
            &["int8[b, m + n, 3]"],
        ),
        (
            "QLinearWhere",
            &["bool[s, 1]", "int8[b, 1, 8]", F, "int8[]", "int8[]", F, "int8[]", F, "int8[]"],
            &[],
            &["int8[b, s, 8]"],
        ),
        ("QLinearSoftmax", &["int8[b, 8]", F, "", F, "int8[]"], &[("opset", Int(13))], &["int8[b, 8]"]),
        (
            "QLinearAveragePool",
            &["uint8[b, h, w, 3]", F, "", F],
            &[("kernel_shape", Ints(&[2, 3])), ("channels_last", Int(1))],
            &["uint8[b, h - 1, w - 2, 3]"],
        ),
        (
            "NhwcMaxPool",
            &["uint8[b, h, w, 3]"],
            &[("kernel_shape", Ints(&[2, 3])), ("strides", Ints(&[1, 1]))],
            &["uint8[b, h - 1, w - 2, 3]"],
        ),
        (
            "QLinearGlobalAveragePool",
            &["int8[b, h, w, 3]", F, "int8[]", F, "int8[]"],
            &[("channels_last", Int(1))],
            &["int8[b, 1, 1, 3]"],
        ),
        (
            "QLinearReduceMean",
            &["int8[b, s, 3]", F, "", F],
            &[("axes", Ints(&[-1])), ("keepdims", Int(0))],
            &["int8[b, s]"],
        ),
        (
            "QLinearConv",
            &["uint8[b, h, w, 3]", F, "uint8[]", "int8[8, 3, 3, 3]", "float[8]", "int8[8]", F, "uint8[]"],
            &[("channels_last", Int(1))],
            &["uint8[b, h - 2, w - 2, 8]"],
        ),
        (
            "MatMulNBits",
            &["float[b, s, 40]", "uint8[n, 3, 8]", "float[n, 3]"],
            &[("K", Int(40)), ("N", Int(7)), ("block_size", Int(16))],
            &["float[b, s, 7]"],
        ),
        (
            "GatherBlockQuantized",
            &["uint4[v, 40]", "int64[b, s]", "float16[v, 3]"],
            &[("block_size", Int(16))],
            &["float16[b, s, 40]"],
        ),
        (
            "GatherBlockQuantized",
            &["uint8[v, 10]", "int64[b]", "float[v, 3]"],
            &[("block_size", Int(16)), ("bits", Int(2))],
            &["float[b, 40]"],
        ),
        ("DynamicQuantizeMatMul", &["float[b, s, 40]", "int8[40, n]", "float[n]"], &[], &["float[b, s, n]"]),
        (
            "MatMulIntegerToFloat",
            &["uint8[b, s, 40]", "int8[40, n]", "float16[]", "float16[n]"],
            &[],
            &["float16[b, s, n]"],
        ),
        (
            "QGemm",
            &["int8[k, m]", "float[]", "int8[]", "uint8[n, k]", "float[]", "uint8[]", "int32[n]"],
            &[("transA", Int(1)), ("transB", Int(1))],
            &["float[m, n]"],
        ),
        (
            "QGemm",
            &[
                "int8[m, k]",
                "float[]",
                "int8[]",
                "uint8[k, n]",
                "float[]",
                "uint8[]",
                "",
                "float[]",
                "int8[]",
            ],
            &[],
            &["int8[m, n]"],
        ),
        (
            "DynamicQuantizeLSTM",
            &[
                "float[t, b, 3]",
                "int8[2, 3, 32]",
                "int8[2, 8, 32]",
                "",
                "",
                "",
                "",
                "",
                "float[2]",
                "int8[2]",
                "float[2, 32]",
                "int8[2]",
            ],
            &[("direction", Text("bidirectional"))],
            &["float[t, 2, b, 8]", "float[2, b, 8]", "float[2, b, 8]"],
        ),
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
        ("GatedAdd", &["float[2, 4]", "float[2, 3]", "float[2, 1]"], &[], "a dimension of Y is 3"),
        ("GatedAdd", &["float[2, 4]", "float[2, 4]", "float[2, 4]"], &[], "last dimension of the gate is 4"),
        ("GatedAdd", &["float[2, 4]", "float[2, 4]", "float[1, 1]"], &[], "a dimension of the gate is 1"),
        ("GatedAdd", &["float[2, 4]", "float[2, 4]", "float[2]"], &[], "the gate has rank 1"),
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
            "is 7, expected 6 at most",
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
        ("BiasSplitGelu", &["float[2, 3, 5]", "float[5]"], &[], "5 is not a multiple of 2"),
        ("Inverse", &["float[2, 3]"], &[], "no inverse"),
        ("Inverse", &["float[3]"], &[], "rank 2 or more"),
        ("Unique", &["float[2, 3]"], &[], "rank 2, expected 1"),
        ("QLinearAdd", &["int8[2]", F, "", "int8[3]", F, "", F], &[], "broadcast"),
        ("QLinearMul", &["int8[2]", "float[2]", "", "int8[2]", F, "", F], &[], "input 1 has shape [2]"),
        ("QLinearLeakyRelu", &["int8[2]", F, "int8[1, 1]", F], &[], "input 2 has shape [1, 1]"),
        ("QLinearConcat", &[F, "int8[]", "int8[2]"], &[("axis", Int(0))], "1 inputs behind"),
        ("QLinearConcat", &[F, "int8[]", "uint8[2]", F, "int8[]"], &[("axis", Int(0))], "input 2 is uint8"),
        ("QLinearConcat", &[F, "int8[]", "int8[2]", F, "int8[]"], &[("axis", Int(1))], "axis 1"),
        (
            "QLinearWhere",
            &["bool[2]", "int8[3]", F, "int8[]", "int8[]", F, "int8[]", F, "int8[]"],
            &[],
            "broadcast",
        ),
        ("QLinearSoftmax", &["int8[2]", F, "", F, "int8[]"], &[], "'opset' is missing"),
        (
            "QLinearSoftmax",
            &["int8[2]", F, "", F, "int8[]"],
            &[("opset", Int(13)), ("axis", Int(1))],
            "axis 1",
        ),
        ("QLinearAveragePool", &["int8[1, 2, 5]", F, "", F], &[("kernel_shape", Ints(&[2, 2]))], "rank 3"),
        ("QLinearAveragePool", &["int8[2, 5]", F, "", F], &[("kernel_shape", Ints(&[]))], "rank 2"),
        ("QLinearGlobalAveragePool", &["int8[2]", F, "int8[]", F, "int8[]"], &[], "rank 1"),
        (
            "QLinearReduceMean",
            &["int8[2, 3]", F, "", F],
            &[("axes", Ints(&[2])), ("keepdims", Int(1))],
            "axis 2",
        ),
        (
            "QLinearConv",
            &["int8[1, 5, 5, 4]", F, "int8[]", "int8[8, 3, 3, 3]", F, "int8[]", F, "int8[]"],
            &[("channels_last", Int(1))],
            "input channels of the weight is 3, expected 4",
        ),
        (
            "MatMulNBits",
            &["float[4]", "uint8[1, 1, 8]", "float[1, 1]"],
            &[("K", Int(4)), ("N", Int(1))],
            "block_size",
        ),
        (
            "MatMulNBits",
            &["float[2, 40]", "uint8[7, 3, 9]", "float[7, 3]"],
            &[("K", Int(40)), ("N", Int(7)), ("block_size", Int(16))],
            "B has shape [7, 3, 9], expected [7, 3, 8]",
        ),
        (
            "MatMulNBits",
            &["float[2, 40]", "uint8[7, 3, 8]", "float[7, 3]", "", "int32[41]"],
            &[("K", Int(40)), ("N", Int(7)), ("block_size", Int(16))],
            "g_idx has 41",
        ),
        (
            "GatherBlockQuantized",
            &["uint4[9, 40]", "int64[2]", "float[9, 2]"],
            &[("block_size", Int(16))],
            "size 2 on axis 1, expected 3",
        ),
        (
            "GatherBlockQuantized",
            &["uint8[9, 20]", "int64[2]", "float[9, 3]", "uint8[9, 3]"],
            &[("block_size", Int(16))],
            "size 3 on axis 1, expected 2",
        ),
        (
            "GatherBlockQuantized",
            &["uint4[9, 40]", "int64[2]", "float[9, 3]"],
            &[("block_size", Int(12))],
            "is 12",
        ),
        ("DynamicQuantizeMatMul", &["float[2, 4]", "int8[5, 3]", "float[]"], &[], "differ"),
        (
            "DynamicQuantizeMatMul",
            &["float[2, 4]", "int8[4, 3]", "float[]", "", "float[4]"],
            &[],
            "length of bias is 4, expected 3",
        ),
        (
            "MatMulIntegerToFloat",
            &["int8[2, 4]", "int8[4, 3]", "float[4]", "float[]"],
            &[],
            "is 4, expected 1",
        ),
        (
            "QGemm",
            &["int8[2, 4]", "float[]", "int8[]", "int8[4, 3]", "float[]", "int8[]", "int32[4]"],
            &[],
            "a dimension of C is 4, expected 3",
        ),
        (
            "DynamicQuantizeLSTM",
            &[
                "float[t, b, 3]",
                "int8[1, 3, 32]",
                "int8[1, 8, 32]",
                "",
                "",
                "",
                "",
                "",
                "float[2]",
                "int8[1]",
                "float[1]",
                "int8[1]",
            ],
            &[],
            "input 8",
        ),
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
            "expected a multiple of the 2 heads",
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
        (
            "DecoderMaskedMultiHeadAttention",
            &["float[2, 1, 8]", "float[2, 1, 8]"],
            &[HEADS],
            "must be given together",
        ),
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
        // Where ONNX Runtime checks an attribute before it infers, its absence is a fault of the
        // graph.
        let is_of_model = matches!(error.kind(), ErrorKind::Fail | ErrorKind::InvalidGraph);
        assert!(is_of_model, "{op} of {inputs:?}: {error}");
        assert!(error.to_string().contains(part), "{op} of {inputs:?}: {error}");
    }
}
