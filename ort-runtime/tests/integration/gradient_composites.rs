//! Gradients of attention and of operators that are made of others, against central finite
//! differences on the CPU.

use crate::gradient_support::rows::{check_all, row};
use crate::support::ints;
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::{Result, Tensor};

const MICROSOFT: &str = "com.microsoft";

type Attrs<'a> = &'a [(&'static str, Attribute)];

/// The first output of a node of `com.microsoft`; inputs may be left out.
fn microsoft(b: &mut GraphBuilder, op: &str, x: &[Option<ValueId>], attrs: Attrs<'_>) -> Result<ValueId> {
    b.add((MICROSOFT, op), x, attrs, 1, vec![]).map(|y| y[0])
}

fn given(x: &[ValueId]) -> Vec<Option<ValueId>> {
    x.iter().copied().map(Some).collect()
}

fn heads(queries: i64, keys: i64) -> Vec<(&'static str, Attribute)> {
    vec![("q_num_heads", Attribute::Int(queries)), ("kv_num_heads", Attribute::Int(keys))]
}

const FOUR: &[&[usize]] = &[&[2, 2, 3, 2], &[2, 2, 4, 2], &[2, 2, 4, 3]];

#[test]
fn attention() {
    check_all(&[
        row("plain", |b, x| b.node("Attention", x, &[]), FOUR),
        row(
            "a mask that is learned",
            |b, x| b.node("Attention", x, &[("scale", Attribute::Float(0.7))]),
            &[&[2, 2, 3, 2], &[2, 2, 4, 2], &[2, 2, 4, 3], &[2, 1, 3, 4]],
        ),
        row(
            "capped scores and a mask of booleans, one query without keys",
            |b, x| {
                let seen = [true, false, true, true, false, false, false, false, true, true, false, true];
                let mask = b.constant(Tensor::from_bools(&[3, 4], &seen)?);
                b.node("Attention", &[x[0], x[1], x[2], mask], &[("softcap", Attribute::Float(1.5))])
            },
            FOUR,
        ),
        row(
            "a mask that ends before the keys",
            |b, x| {
                let mask = b.constant(Tensor::from_slice(&[3, 3], &[0.5f64; 9])?);
                b.node("Attention", &[x[0], x[1], x[2], mask], &[])
            },
            FOUR,
        ),
        row(
            "causal, behind a past, in a window",
            |b, x| {
                let inputs = [Some(x[0]), Some(x[1]), Some(x[2]), None, Some(x[3]), Some(x[4])];
                let attrs = [("is_causal", Attribute::Int(1)), ("left_window_size", Attribute::Int(2))];
                let y = b.add(("", "Attention"), &inputs, &attrs, 3, vec![])?;
                let keys = b.node("ReduceSum", &[y[1]], &[("keepdims", Attribute::Int(0))])?;
                b.node("Add", &[y[0], keys], &[])
            },
            &[&[2, 2, 3, 2], &[2, 2, 3, 2], &[2, 2, 3, 3], &[2, 2, 2, 2], &[2, 2, 2, 3]],
        ),
        row(
            "groups of heads side by side, lengths",
            |b, x| {
                let lengths = b.constant(ints(&[4, 3])?);
                let inputs = [Some(x[0]), Some(x[1]), Some(x[2]), None, None, None, Some(lengths)];
                let mut attrs = heads(4, 2);
                attrs.push(("is_causal", Attribute::Int(1)));
                b.add(("", "Attention"), &inputs, &attrs, 1, vec![]).map(|y| y[0])
            },
            &[&[2, 3, 8], &[2, 4, 4], &[2, 4, 6]],
        ),
        row(
            "a sequence without keys, which the mask, causality, a window and the lengths hide at once",
            |b, x| {
                let seen: Vec<bool> = (0..2 * 3 * 4).map(|index| index >= 3 * 4).collect();
                let mask = b.constant(Tensor::from_bools(&[2, 1, 3, 4], &seen)?);
                let lengths = b.constant(ints(&[0, 4])?);
                let inputs = [Some(x[0]), Some(x[1]), Some(x[2]), Some(mask), None, None, Some(lengths)];
                let attrs = [("is_causal", Attribute::Int(1)), ("right_window_size", Attribute::Int(0))];
                b.add(("", "Attention"), &inputs, &attrs, 1, vec![]).map(|y| y[0])
            },
            FOUR,
        )
        .single(),
        row(
            "multi-head",
            |b, x| {
                let mut inputs = given(x);
                inputs.push(Some(b.constant(Tensor::from_slice(&[2, 4], &[1i32, 1, 1, 0, 1, 1, 0, 1])?)));
                microsoft(b, "MultiHeadAttention", &inputs, &[("num_heads", Attribute::Int(2))])
            },
            &[&[2, 3, 4], &[2, 4, 4], &[2, 4, 6], &[14]],
        )
        .single(),
        row(
            "multi-head, one tensor, a bias on the scores, causal",
            |b, x| {
                let inputs = [Some(x[0]), None, None, None, None, Some(x[1])];
                let attrs = [("num_heads", Attribute::Int(2)), ("unidirectional", Attribute::Int(1))];
                microsoft(b, "MultiHeadAttention", &inputs, &attrs)
            },
            &[&[2, 3, 2, 3, 2], &[1, 2, 3, 3]],
        )
        .single(),
        row(
            "projected",
            |b, x| {
                // Small inputs, for which differences in single precision are fine enough.
                let factor = b.constant(Tensor::scalar(0.25f32)?);
                let input = b.node("Mul", &[x[0], factor], &[])?;
                let inputs = [Some(input), Some(x[1]), Some(x[2])];
                microsoft(b, "Attention", &inputs, &[("num_heads", Attribute::Int(2))])
            },
            &[&[2, 3, 4], &[4, 12], &[12]],
        )
        .single(),
    ]);
}

fn rotary(b: &mut GraphBuilder, x: &[ValueId], attrs: Attrs<'_>) -> Result<ValueId> {
    let ids = b.constant(Tensor::from_slice(&[2, 3], &[0i64, 1, 2, 3, 1, 0])?);
    b.node("RotaryEmbedding", &[x[0], x[1], x[2], ids], attrs)
}

#[test]
fn rotary_embeddings() {
    check_all(&[
        row("halves", |b, x| rotary(b, x, &[]), &[&[2, 2, 3, 4], &[4, 2], &[4, 2]]).single(),
        row(
            "pairs of a part",
            |b, x| {
                let attrs = [("interleaved", Attribute::Int(1)), ("rotary_embedding_dim", Attribute::Int(4))];
                rotary(b, x, &attrs)
            },
            &[&[2, 2, 3, 6], &[4, 2], &[4, 2]],
        )
        .single(),
        row(
            "heads side by side, no positions",
            |b, x| b.node("RotaryEmbedding", x, &[("num_heads", Attribute::Int(2))]),
            &[&[2, 3, 8], &[2, 3, 2], &[2, 3, 2]],
        )
        .single(),
        row(
            "of com.microsoft",
            |b, x| {
                let first = b.constant(ints(&[1])?);
                microsoft(b, "RotaryEmbedding", &[Some(x[0]), Some(first), Some(x[1]), Some(x[2])], &[])
            },
            &[&[2, 2, 3, 4], &[5, 2], &[5, 2]],
        )
        .single(),
    ]);
}

#[test]
fn activations_and_products() {
    check_all(&[
        row("BiasGelu", |b, x| microsoft(b, "BiasGelu", &given(x), &[]), &[&[2, 3], &[3]]),
        row("FastGelu", |b, x| microsoft(b, "FastGelu", &given(x), &[]), &[&[2, 3], &[3]]),
        row(
            "FusedMatMul",
            |b, x| {
                let attrs = [("transA", Attribute::Int(1)), ("alpha", Attribute::Float(0.5))];
                microsoft(b, "FusedMatMul", &given(x), &attrs)
            },
            &[&[2, 3, 2], &[2, 3, 4]],
        ),
        row(
            "FusedGemm",
            |b, x| {
                let attrs = [("activation", Attribute::String("Tanh".into()))];
                microsoft(b, "FusedGemm", &given(x), &attrs)
            },
            &[&[2, 3], &[3, 4], &[4]],
        ),
        row(
            "FusedConv",
            |b, x| {
                let attrs = [("activation", Attribute::String("Relu".into()))];
                microsoft(b, "FusedConv", &given(x), &attrs)
            },
            &[&[2, 2, 4, 4], &[3, 2, 2, 2], &[3]],
        ),
        row(
            "MatMulNBits",
            |b, x| {
                let codes: Vec<u8> = (0..48u8).map(|at| at.wrapping_mul(37)).collect();
                let codes = b.constant(Tensor::from_slice(&[3, 1, 16], &codes)?);
                let scales = b.constant(Tensor::from_slice(&[3, 1], &[0.1f32, -0.05, 0.2])?);
                let attrs =
                    [("K", Attribute::Int(32)), ("N", Attribute::Int(3)), ("block_size", Attribute::Int(32))];
                let inputs = [Some(x[0]), Some(codes), Some(scales), None, None, Some(x[1])];
                microsoft(b, "MatMulNBits", &inputs, &attrs)
            },
            &[&[2, 32], &[3]],
        )
        .single(),
        row("BiasAdd", |b, x| microsoft(b, "BiasAdd", &given(x), &[]), &[&[2, 3, 4], &[4], &[2, 3, 4]])
            .single(),
        row("BiasSplitGelu", |b, x| microsoft(b, "BiasSplitGelu", &given(x), &[]), &[&[2, 3, 4], &[4]])
            .single(),
    ]);
}

#[test]
fn normalizations() {
    check_all(&[
        row(
            "SkipLayerNormalization, and the sum",
            |b, x| {
                let y = b.add((MICROSOFT, "SkipLayerNormalization"), &given(x), &[], 4, vec![])?;
                b.node("Add", &[y[0], y[3]], &[])
            },
            &[&[2, 3, 4], &[2, 3, 4], &[4], &[4], &[4]],
        )
        .single(),
        row(
            "SkipSimplifiedLayerNormalization",
            |b, x| microsoft(b, "SkipSimplifiedLayerNormalization", &given(x), &[]),
            &[&[2, 3, 4], &[2, 3, 4], &[4]],
        )
        .single(),
        row(
            "SimplifiedLayerNormalization",
            |b, x| b.node("SimplifiedLayerNormalization", x, &[]),
            &[&[2, 3, 4], &[4]],
        ),
        row(
            "EmbedLayerNormalization",
            |b, x| {
                let words = b.constant(Tensor::from_slice(&[2, 3], &[0i32, 2, 1, 3, 0, 2])?);
                let segments = b.constant(Tensor::from_slice(&[2, 3], &[0i32, 0, 1, 1, 1, 0])?);
                let mut inputs = vec![Some(words), Some(segments)];
                inputs.extend(given(x));
                let y = b.add((MICROSOFT, "EmbedLayerNormalization"), &inputs, &[], 2, vec![])?;
                Ok(y[0])
            },
            &[&[4, 4], &[3, 4], &[2, 4], &[4], &[4]],
        )
        .fixed()
        .single(),
    ]);
}
