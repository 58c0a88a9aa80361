//! Gradients of convolutions, pools, normalizations and losses, against finite differences.

use crate::gradient_support::rows::{check_all, row};
use crate::support::ints;
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::{Result, Tensor};

/// A gradient of a convolution in two groups, of images of 4 channels of 6 by 5 with filters of 3
/// by 2.
fn conv_gradient(b: &mut GraphBuilder, op: &str, x: &[ValueId], shape: &[i64]) -> Result<ValueId> {
    let shape = b.constant(ints(shape)?);
    let attrs = [
        ("strides", Attribute::Ints(vec![2, 1])),
        ("pads", Attribute::Ints(vec![1, 0, 0, 1])),
        ("group", Attribute::Int(2)),
    ];
    Ok(b.add(("ort-runtime", op), &[x[0], x[1], shape].map(Some), &attrs, 1, Vec::new())?[0])
}

fn same(padding: &str) -> (&'static str, Attribute) {
    ("auto_pad", Attribute::String(padding.into()))
}

#[test]
fn convolutions_and_pools() {
    check_all(&[
        row("conv", |b, x| b.node("Conv", x, &[]), &[&[2, 3, 5, 4], &[4, 3, 3, 2], &[4]]),
        row(
            "conv with strides and pads",
            |b, x| {
                b.node(
                    "Conv",
                    x,
                    &[
                        ("strides", Attribute::Ints(vec![2, 1])),
                        ("pads", Attribute::Ints(vec![1, 0, 2, 1])),
                        ("dilations", Attribute::Ints(vec![1, 2])),
                    ],
                )
            },
            &[&[2, 2, 6, 5], &[3, 2, 3, 2]],
        ),
        row(
            "conv that leaves places out",
            |b, x| b.node("Conv", x, &[("strides", Attribute::Ints(vec![3, 2]))]),
            &[&[1, 2, 6, 6], &[2, 2, 2, 3]],
        ),
        row(
            "conv in groups",
            |b, x| {
                b.node(
                    "Conv",
                    x,
                    &[("group", Attribute::Int(2)), ("pads", Attribute::Ints(vec![1, 1, 1, 1]))],
                )
            },
            &[&[2, 4, 3, 4], &[6, 2, 3, 3], &[6]],
        ),
        row(
            "depthwise conv",
            |b, x| {
                b.node(
                    "Conv",
                    x,
                    &[
                        ("group", Attribute::Int(3)),
                        ("strides", Attribute::Ints(vec![2, 2])),
                        ("pads", Attribute::Ints(vec![1, 1, 1, 1])),
                    ],
                )
            },
            &[&[2, 3, 5, 5], &[3, 1, 3, 3]],
        ),
        row(
            "conv of signals",
            |b, x| b.node("Conv", x, &[("dilations", Attribute::Ints(vec![2]))]),
            &[&[2, 2, 7], &[3, 2, 3], &[3]],
        ),
        row("conv of volumes", |b, x| b.node("Conv", x, &[]), &[&[1, 2, 3, 3, 2], &[2, 2, 2, 2, 2]]),
        row(
            "conv with equal sizes",
            |b, x| {
                b.node(
                    "Conv",
                    x,
                    &[
                        ("auto_pad", Attribute::String("SAME_LOWER".into())),
                        ("strides", Attribute::Ints(vec![2, 2])),
                    ],
                )
            },
            &[&[1, 2, 5, 4], &[2, 2, 3, 3]],
        )
        .symbolic_batch(),
        row(
            "conv with equal sizes and strides of 1",
            |b, x| {
                let attrs = [same("SAME_UPPER"), ("dilations", Attribute::Ints(vec![1, 2]))];
                b.node("Conv", x, &attrs)
            },
            &[&[2, 2, 5, 4], &[3, 2, 4, 2], &[3]],
        ),
        row(
            "transposed conv with equal sizes",
            |b, x| {
                b.node("ConvTranspose", x, &[same("SAME_UPPER"), ("strides", Attribute::Ints(vec![2, 2]))])
            },
            &[&[2, 2, 3, 2], &[2, 2, 3, 3]],
        ),
        row(
            "transposed conv with equal sizes, the odd one before",
            |b, x| {
                let (strides, extra) = (Attribute::Ints(vec![3, 2]), Attribute::Ints(vec![1, 0]));
                let attrs = [
                    same("SAME_LOWER"),
                    ("strides", strides),
                    ("output_padding", extra),
                    ("dilations", Attribute::Ints(vec![2, 1])),
                ];
                b.node("ConvTranspose", x, &attrs)
            },
            &[&[2, 2, 3, 2], &[2, 3, 3, 3], &[3]],
        ),
        row(
            "transposed conv with equal sizes and strides beyond the kernel",
            |b, x| {
                b.node("ConvTranspose", x, &[same("SAME_UPPER"), ("strides", Attribute::Ints(vec![3, 2]))])
            },
            &[&[1, 2, 3, 2], &[2, 2, 2, 1]],
        ),
        row(
            "average pool with equal sizes",
            |b, x| {
                let (kernel, strides) = (Attribute::Ints(vec![3, 2]), Attribute::Ints(vec![2, 2]));
                let attrs = [same("SAME_LOWER"), ("kernel_shape", kernel), ("strides", strides)];
                b.node("AveragePool", x, &attrs)
            },
            &[&[2, 2, 5, 4]],
        )
        .symbolic_batch(),
        row(
            "average pool with equal sizes and strides of 1",
            |b, x| {
                b.node("AveragePool", x, &[same("SAME_UPPER"), ("kernel_shape", Attribute::Ints(vec![3, 2]))])
            },
            &[&[2, 2, 4, 3]],
        ),
        row(
            "lp pool with equal sizes and strides of 1",
            |b, x| b.node("LpPool", x, &[same("SAME_UPPER"), ("kernel_shape", Attribute::Ints(vec![2, 2]))]),
            &[&[2, 2, 4, 3]],
        ),
        row(
            "transposed conv",
            |b, x| {
                b.node(
                    "ConvTranspose",
                    x,
                    &[
                        ("strides", Attribute::Ints(vec![2, 1])),
                        ("pads", Attribute::Ints(vec![1, 0, 0, 1])),
                        ("output_padding", Attribute::Ints(vec![1, 0])),
                    ],
                )
            },
            &[&[2, 3, 3, 4], &[3, 2, 3, 2], &[2]],
        ),
        row(
            "transposed conv in groups",
            |b, x| {
                b.node(
                    "ConvTranspose",
                    x,
                    &[("group", Attribute::Int(2)), ("dilations", Attribute::Ints(vec![1, 2]))],
                )
            },
            &[&[1, 4, 3, 3], &[4, 3, 2, 2]],
        ),
        row(
            "transposed conv to a size",
            |b, x| {
                b.node(
                    "ConvTranspose",
                    x,
                    &[
                        ("strides", Attribute::Ints(vec![2, 2])),
                        ("output_shape", Attribute::Ints(vec![6, 5])),
                    ],
                )
            },
            &[&[1, 2, 3, 3], &[2, 2, 3, 3]],
        )
        .fixed(),
        row(
            "conv's gradient by the image",
            |b, x| conv_gradient(b, "ConvGradInput", x, &[2, 4, 6, 5]),
            &[&[2, 2, 3, 5], &[2, 2, 3, 2]],
        ),
        row(
            "conv's gradient by the weights",
            |b, x| conv_gradient(b, "ConvGradWeights", x, &[2, 2, 3, 2]),
            &[&[2, 4, 6, 5], &[2, 2, 3, 5]],
        ),
        row(
            "max pool",
            |b, x| {
                b.node(
                    "MaxPool",
                    x,
                    &[
                        ("kernel_shape", Attribute::Ints(vec![3, 2])),
                        ("strides", Attribute::Ints(vec![2, 1])),
                        ("pads", Attribute::Ints(vec![1, 0, 1, 1])),
                    ],
                )
            },
            &[&[2, 2, 5, 4]],
        ),
        row(
            "max pool that rounds up",
            |b, x| {
                b.node(
                    "MaxPool",
                    x,
                    &[
                        ("kernel_shape", Attribute::Ints(vec![2, 2])),
                        ("strides", Attribute::Ints(vec![2, 2])),
                        ("ceil_mode", Attribute::Int(1)),
                    ],
                )
            },
            &[&[1, 2, 5, 5]],
        ),
        row(
            "average pool 00",
            |b, x| {
                b.node(
                    "AveragePool",
                    x,
                    &[
                        ("kernel_shape", Attribute::Ints(vec![3, 2])),
                        ("strides", Attribute::Ints(vec![2, 2])),
                        ("pads", Attribute::Ints(vec![1, 0, 1, 1])),
                        ("count_include_pad", Attribute::Int(0)),
                        ("ceil_mode", Attribute::Int(0)),
                    ],
                )
            },
            &[&[2, 2, 4, 4]],
        ),
        row(
            "average pool 01",
            |b, x| {
                b.node(
                    "AveragePool",
                    x,
                    &[
                        ("kernel_shape", Attribute::Ints(vec![3, 2])),
                        ("strides", Attribute::Ints(vec![2, 2])),
                        ("pads", Attribute::Ints(vec![1, 0, 1, 1])),
                        ("count_include_pad", Attribute::Int(0)),
                        ("ceil_mode", Attribute::Int(1)),
                    ],
                )
            },
            &[&[2, 2, 4, 4]],
        ),
        row(
            "average pool 10",
            |b, x| {
                b.node(
                    "AveragePool",
                    x,
                    &[
                        ("kernel_shape", Attribute::Ints(vec![3, 2])),
                        ("strides", Attribute::Ints(vec![2, 2])),
                        ("pads", Attribute::Ints(vec![1, 0, 1, 1])),
                        ("count_include_pad", Attribute::Int(1)),
                        ("ceil_mode", Attribute::Int(0)),
                    ],
                )
            },
            &[&[2, 2, 4, 4]],
        ),
        row(
            "average pool 11",
            |b, x| {
                b.node(
                    "AveragePool",
                    x,
                    &[
                        ("kernel_shape", Attribute::Ints(vec![3, 2])),
                        ("strides", Attribute::Ints(vec![2, 2])),
                        ("pads", Attribute::Ints(vec![1, 0, 1, 1])),
                        ("count_include_pad", Attribute::Int(1)),
                        ("ceil_mode", Attribute::Int(1)),
                    ],
                )
            },
            &[&[2, 2, 4, 4]],
        ),
        row(
            "LpPool 1",
            |b, x| {
                b.node(
                    "LpPool",
                    x,
                    &[
                        ("kernel_shape", Attribute::Ints(vec![2, 2])),
                        ("p", Attribute::Int(1)),
                        ("pads", Attribute::Ints(vec![1, 0, 0, 1])),
                    ],
                )
            },
            &[&[1, 2, 3, 4]],
        ),
        row(
            "GlobalLpPool 1",
            |b, x| b.node("GlobalLpPool", x, &[("p", Attribute::Int(1))]),
            &[&[2, 2, 3, 2]],
        ),
        row(
            "LpPool 2",
            |b, x| {
                b.node(
                    "LpPool",
                    x,
                    &[
                        ("kernel_shape", Attribute::Ints(vec![2, 2])),
                        ("p", Attribute::Int(2)),
                        ("pads", Attribute::Ints(vec![1, 0, 0, 1])),
                    ],
                )
            },
            &[&[1, 2, 3, 4]],
        ),
        row(
            "GlobalLpPool 2",
            |b, x| b.node("GlobalLpPool", x, &[("p", Attribute::Int(2))]),
            &[&[2, 2, 3, 2]],
        ),
        row(
            "LpPool 3",
            |b, x| {
                b.node(
                    "LpPool",
                    x,
                    &[
                        ("kernel_shape", Attribute::Ints(vec![2, 2])),
                        ("p", Attribute::Int(3)),
                        ("pads", Attribute::Ints(vec![1, 0, 0, 1])),
                    ],
                )
            },
            &[&[1, 2, 3, 4]],
        ),
        row(
            "GlobalLpPool 3",
            |b, x| b.node("GlobalLpPool", x, &[("p", Attribute::Int(3))]),
            &[&[2, 2, 3, 2]],
        ),
        row("GlobalAveragePool", |b, x| b.node("GlobalAveragePool", x, &[]), &[&[2, 3, 2, 2]]),
        row("GlobalMaxPool", |b, x| b.node("GlobalMaxPool", x, &[]), &[&[2, 3, 2, 2]]),
    ]);
}

#[test]
fn normalizations() {
    check_all(&[
        row("layer norm", |b, x| b.node("LayerNormalization", x, &[]), &[&[2, 3, 4], &[4], &[4]]),
        row(
            "layer norm of two axes",
            |b, x| b.node("LayerNormalization", x, &[("axis", Attribute::Int(1))]),
            &[&[2, 3, 4], &[3, 4]],
        ),
        row("rms norm", |b, x| b.node("RMSNormalization", x, &[]), &[&[2, 3, 4], &[4]]),
        row("instance norm", |b, x| b.node("InstanceNormalization", x, &[]), &[&[2, 3, 4, 2], &[3], &[3]]),
        row(
            "group norm",
            |b, x| b.node("GroupNormalization", x, &[("num_groups", Attribute::Int(2))]),
            &[&[2, 4, 3], &[4], &[4]],
        ),
        row(
            "mean and variance norm",
            |b, x| b.node("MeanVarianceNormalization", x, &[("axes", Attribute::Ints(vec![0, 2]))]),
            &[&[2, 3, 4]],
        ),
        row(
            "batch norm",
            |b, x| {
                let spread = b.node("Exp", &[x[4]], &[])?;
                b.node("BatchNormalization", &[x[0], x[1], x[2], x[3], spread], &[])
            },
            &[&[3, 2, 2], &[2], &[2], &[2], &[2]],
        ),
        row(
            "batch norm in training",
            |b, x| {
                let spread = b.constant(Tensor::from_slice(&[2], &[1.0f64, 2.0])?);
                b.add(
                    ("", "BatchNormalization"),
                    &[Some(x[0]), Some(x[1]), Some(x[2]), Some(spread), Some(spread)],
                    &[("training_mode", Attribute::Int(1))],
                    3,
                    vec![],
                )
                .map(|y| y[0])
            },
            &[&[3, 2, 4], &[2], &[2]],
        ),
        row(
            "batch norm's gradient",
            |b, x| {
                b.add(
                    ("ort-runtime", "BatchNormalizationGrad"),
                    &[x[0], x[1], x[2]].map(Some),
                    &[],
                    3,
                    vec![],
                )
                .map(|y| y[0])
            },
            &[&[2, 2, 3], &[2], &[2, 2, 3]],
        ),
        row(
            "batch norm's statistics",
            |b, x| {
                let x = [x[0], x[1], x[1]].map(Some);
                let y = b.add(("ort-runtime", "BatchNormalizationStatistics"), &x, &[], 4, vec![])?;
                b.node("Mul", &[y[0], y[1]], &[])
            },
            &[&[3, 2, 4], &[2]],
        ),
        row(
            "Lp norm 1",
            |b, x| b.node("LpNormalization", x, &[("p", Attribute::Int(1)), ("axis", Attribute::Int(1))]),
            &[&[2, 4]],
        ),
        row(
            "Lp norm 2",
            |b, x| b.node("LpNormalization", x, &[("p", Attribute::Int(2)), ("axis", Attribute::Int(1))]),
            &[&[2, 4]],
        ),
        row(
            "local response norm 3",
            |b, x| b.node("LRN", x, &[("size", Attribute::Int(3)), ("alpha", Attribute::Float(0.5))]),
            &[&[2, 4, 2, 2]],
        ),
        row(
            "local response norm 2",
            |b, x| b.node("LRN", x, &[("size", Attribute::Int(2)), ("alpha", Attribute::Float(0.5))]),
            &[&[2, 4, 2, 2]],
        ),
    ]);
}

#[test]
fn losses() {
    check_all(&[
        row("mean cross entropy", |b, x| loss(b, "SoftmaxCrossEntropyLoss", x[0], "mean", true), &[&[4, 3]]),
        row(
            "sum of cross entropies",
            |b, x| loss(b, "SoftmaxCrossEntropyLoss", x[0], "sum", false),
            &[&[4, 3]],
        ),
        row("cross entropies", |b, x| loss(b, "SoftmaxCrossEntropyLoss", x[0], "none", true), &[&[4, 3]]),
        row("mean likelihood", |b, x| loss(b, "NegativeLogLikelihoodLoss", x[0], "mean", true), &[&[4, 3]]),
        row("likelihoods", |b, x| loss(b, "NegativeLogLikelihoodLoss", x[0], "none", false), &[&[4, 3]]),
    ]);
}

/// A loss of four labels, of which one is ignored, with weights or without.
fn loss(b: &mut GraphBuilder, op: &str, scores: ValueId, reduction: &str, weighted: bool) -> Result<ValueId> {
    let labels = b.constant(ints(&[2, 0, -1, 1])?);
    let weights = b.constant(Tensor::from_slice(&[3], &[0.5f64, 2.0, 1.5])?);
    let attrs = [("reduction", Attribute::String(reduction.into())), ("ignore_index", Attribute::Int(-1))];
    let inputs = [Some(scores), Some(labels), weighted.then_some(weights)];
    b.add(("", op), &inputs, &attrs, 1, vec![]).map(|y| y[0])
}
