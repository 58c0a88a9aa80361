//! Gradients of operators that have a rule, against finite differences: each at fixed sizes, and where the run alone knows them.
#![cfg(feature = "cpu")]

mod gradient_support;
mod support;

use gradient_support::{Build, check};
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::{Result, Tensor};
use support::ints;

/// One operator on some inputs.
struct Row {
    name: &'static str,
    build: Build,
    shapes: &'static [&'static [usize]],
    /// Whether its gradient needs sizes that are numbers.
    fixed: bool,
    /// Whether its inputs are positive.
    positive: bool,
}

const fn row(name: &'static str, build: Build, shapes: &'static [&'static [usize]]) -> Row {
    Row { name, build, shapes, fixed: false, positive: false }
}

impl Row {
    const fn fixed(mut self) -> Row {
        self.fixed = true;
        self
    }

    const fn positive(mut self) -> Row {
        self.positive = true;
        self
    }

    /// Numbers of both signs, no two alike and none near zero or another.
    fn elements(&self, index: usize) -> Vec<f64> {
        let count = self.shapes[index].iter().product::<usize>();
        let number = |at: usize| {
            let place = (at * 37 + index * 17 + 5) % 101;
            let size = 0.2 + place as f64 / 40.0 + index as f64 * 0.003;
            if place.is_multiple_of(2) || self.positive { size } else { -size }
        };
        (0..count).map(number).collect()
    }

    /// Checks with these sizes of the first input named instead of given.
    fn check(&self, named: bool) -> Result<()> {
        let sizes = self.shapes.iter().enumerate().map(|(index, shape)| {
            let size = |(axis, size): (usize, &usize)| match named && index == 0 && axis != 1 {
                true => format!("d{axis}"),
                false => size.to_string(),
            };
            shape.iter().enumerate().map(size).collect::<Vec<String>>()
        });
        let sizes: Vec<Vec<String>> = sizes.collect();
        let dims: Vec<Vec<&str>> =
            sizes.iter().map(|sizes| sizes.iter().map(String::as_str).collect()).collect();
        let dims: Vec<&[&str]> = dims.iter().map(Vec::as_slice).collect();
        let elements: Vec<Vec<f64>> = (0..self.shapes.len()).map(|index| self.elements(index)).collect();
        let given: Vec<(&[usize], &[f64])> = self
            .shapes
            .iter()
            .zip(&elements)
            .map(|(shape, elements)| (*shape, elements.as_slice()))
            .collect();
        check(self.name, self.build, &given, &dims)
    }
}

fn resize(b: &mut GraphBuilder, x: ValueId, scales: &[f32], mode: &str) -> Result<ValueId> {
    let scales = b.constant(Tensor::from_slice(&[scales.len()], scales)?);
    let mode = [("mode", Attribute::String(mode.into()))];
    b.add(("", "Resize"), &[Some(x), None, Some(scales)], &mode, 1, vec![]).map(|y| y[0])
}

fn check_all(rows: &[Row]) {
    let mut problems = Vec::new();
    for row in rows {
        for named in [false, true].into_iter().take(if row.fixed { 1 } else { 2 }) {
            if let Err(problem) = row.check(named) {
                problems.push(format!("{}{}: {problem}", row.name, if named { ", sizes named" } else { "" }));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn movement() {
    check_all(&[
        row(
            "concat",
            |b, x| b.node("Concat", x, &[("axis", Attribute::Int(1))]),
            &[&[2, 3], &[2, 1], &[2, 2]],
        )
        .fixed(),
        row(
            "concat of rows",
            |b, x| b.node("Concat", x, &[("axis", Attribute::Int(-2))]),
            &[&[2, 3], &[1, 3]],
        )
        .fixed(),
        row(
            "slice",
            |b, x| {
                let c0 = b.constant(ints(&[1, -3])?);
                let c1 = b.constant(ints(&[3, -1])?);
                let c2 = b.constant(ints(&[0, 1])?);
                b.node("Slice", &[x[0], c0, c1, c2], &[])
            },
            &[&[4, 5]],
        ),
        row(
            "slice with steps",
            |b, x| {
                let c0 = b.constant(ints(&[-1, 0])?);
                let c1 = b.constant(ints(&[-100, 100])?);
                let c2 = b.constant(ints(&[1, 0])?);
                let c3 = b.constant(ints(&[-2, 3])?);
                b.node("Slice", &[x[0], c0, c1, c2, c3], &[])
            },
            &[&[4, 5]],
        ),
        row(
            "slice of nothing",
            |b, x| {
                let c0 = b.constant(ints(&[2])?);
                let c1 = b.constant(ints(&[2])?);
                let c2 = b.constant(ints(&[0])?);
                b.node("Slice", &[x[0], c0, c1, c2], &[])
            },
            &[&[4, 2]],
        ),
        row(
            "gather rows",
            |b, x| {
                let c0 = b.constant(ints(&[2, 0, 2, -1])?);
                b.node("Gather", &[x[0], c0], &[])
            },
            &[&[4, 3]],
        ),
        row(
            "gather columns",
            |b, x| {
                let at = b.constant(Tensor::from_slice(&[2, 2], &[1i64, 0, 2, 1])?);
                b.node("Gather", &[x[0], at], &[("axis", Attribute::Int(1))])
            },
            &[&[2, 3, 2]],
        ),
        row(
            "gather elements",
            |b, x| {
                let at = b.constant(Tensor::from_slice(&[2, 2], &[1i64, 1, 0, 2])?);
                b.node("GatherElements", &[x[0], at], &[("axis", Attribute::Int(1))])
            },
            &[&[2, 3]],
        ),
        row(
            "gather by coordinates",
            |b, x| {
                let at = b.constant(Tensor::from_slice(&[2, 2], &[1i64, 1, 0, 2])?);
                b.node("GatherND", &[x[0], at], &[])
            },
            &[&[2, 3, 2]],
        ),
        row(
            "gather by coordinates of a batch",
            |b, x| {
                let at = b.constant(Tensor::from_slice(&[2, 2, 1], &[1i64, 1, 0, 2])?);
                b.node("GatherND", &[x[0], at], &[("batch_dims", Attribute::Int(1))])
            },
            &[&[2, 3, 2]],
        ),
        row(
            "scatter elements, none",
            |b, x| {
                let at = b.constant(Tensor::from_slice(&[2, 2], &[1i64, 0, 2, 1])?);
                b.node(
                    "ScatterElements",
                    &[x[0], at, x[1]],
                    &[("axis", Attribute::Int(1)), ("reduction", Attribute::String("none".into()))],
                )
            },
            &[&[2, 3], &[2, 2]],
        ),
        row(
            "scatter by coordinates, none",
            |b, x| {
                let at = b.constant(Tensor::from_slice(&[2, 1], &[2i64, 0])?);
                b.node("ScatterND", &[x[0], at, x[1]], &[("reduction", Attribute::String("none".into()))])
            },
            &[&[3, 2], &[2, 2]],
        ),
        row(
            "scatter elements, add",
            |b, x| {
                let at = b.constant(Tensor::from_slice(&[2, 2], &[1i64, 0, 2, 1])?);
                b.node(
                    "ScatterElements",
                    &[x[0], at, x[1]],
                    &[("axis", Attribute::Int(1)), ("reduction", Attribute::String("add".into()))],
                )
            },
            &[&[2, 3], &[2, 2]],
        ),
        row(
            "scatter by coordinates, add",
            |b, x| {
                let at = b.constant(Tensor::from_slice(&[2, 1], &[2i64, 0])?);
                b.node("ScatterND", &[x[0], at, x[1]], &[("reduction", Attribute::String("add".into()))])
            },
            &[&[3, 2], &[2, 2]],
        ),
        row(
            "pad, constant",
            |b, x| {
                let c0 = b.constant(ints(&[1, 2, 0, 1])?);
                b.node("Pad", &[x[0], c0], &[("mode", Attribute::String("constant".into()))])
            },
            &[&[3, 4]],
        ),
        row(
            "pad, edge",
            |b, x| {
                let c0 = b.constant(ints(&[1, 2, 0, 1])?);
                b.node("Pad", &[x[0], c0], &[("mode", Attribute::String("edge".into()))])
            },
            &[&[3, 4]],
        ),
        row(
            "pad, reflect",
            |b, x| {
                let c0 = b.constant(ints(&[1, 2, 0, 1])?);
                b.node("Pad", &[x[0], c0], &[("mode", Attribute::String("reflect".into()))])
            },
            &[&[3, 4]],
        ),
        row(
            "pad, wrap",
            |b, x| {
                let c0 = b.constant(ints(&[1, 2, 0, 1])?);
                b.node("Pad", &[x[0], c0], &[("mode", Attribute::String("wrap".into()))])
            },
            &[&[3, 4]],
        ),
        row(
            "pad and crop",
            |b, x| {
                let c0 = b.constant(ints(&[-1, 2, 1, -1])?);
                b.node("Pad", &[x[0], c0], &[])
            },
            &[&[3, 4]],
        ),
        row(
            "pad by a value along an axis",
            |b, x| {
                let pads = b.constant(ints(&[1, 2])?);
                let axes = b.constant(ints(&[1])?);
                b.add(("", "Pad"), &[Some(x[0]), Some(pads), Some(x[1]), Some(axes)], &[], 1, vec![])
                    .map(|y| y[0])
            },
            &[&[2, 3], &[]],
        ),
        row(
            "tile",
            |b, x| {
                let c0 = b.constant(ints(&[2, 3])?);
                b.node("Tile", &[x[0], c0], &[])
            },
            &[&[2, 3]],
        ),
        row(
            "depth to space, DCR",
            |b, x| {
                b.node(
                    "DepthToSpace",
                    x,
                    &[("blocksize", Attribute::Int(2)), ("mode", Attribute::String("DCR".into()))],
                )
            },
            &[&[1, 8, 2, 3]],
        ),
        row(
            "depth to space, CRD",
            |b, x| {
                b.node(
                    "DepthToSpace",
                    x,
                    &[("blocksize", Attribute::Int(2)), ("mode", Attribute::String("CRD".into()))],
                )
            },
            &[&[1, 8, 2, 3]],
        ),
        row(
            "space to depth",
            |b, x| b.node("SpaceToDepth", x, &[("blocksize", Attribute::Int(2))]),
            &[&[1, 2, 4, 2]],
        ),
        row("upper triangle", |b, x| b.node("Trilu", x, &[]), &[&[3, 4]]),
        row("lower triangle", |b, x| b.node("Trilu", x, &[("upper", Attribute::Int(0))]), &[&[2, 3, 3]]),
        row(
            "reversed sequences",
            |b, x| {
                let lens = b.constant(ints(&[3, 1])?);
                b.node("ReverseSequence", &[x[0], lens], &[])
            },
            &[&[3, 2, 2]],
        ),
        row(
            "compress",
            |b, x| {
                let keep = b.constant(Tensor::from_slice(&[3], &[true, false, true])?);
                b.node("Compress", &[x[0], keep], &[("axis", Attribute::Int(1))])
            },
            &[&[2, 3]],
        ),
        row(
            "compress of all",
            |b, x| {
                let keep = b.constant(Tensor::from_slice(&[3], &[true, false, true])?);
                b.node("Compress", &[x[0], keep], &[])
            },
            &[&[2, 3]],
        ),
        row(
            "one part of two",
            |b, x| {
                let sizes = b.constant(ints(&[1, 3])?);
                let axis = [("axis", Attribute::Int(1))];
                b.add(("", "Split"), &[Some(x[0]), Some(sizes)], &axis, 2, vec![]).map(|parts| parts[1])
            },
            &[&[2, 4]],
        ),
        row(
            "both parts",
            |b, x| {
                let halves = [("num_outputs", Attribute::Int(2))];
                let parts = b.add(("", "Split"), &[Some(x[0])], &halves, 2, vec![])?;
                b.node("Mul", &parts, &[])
            },
            &[&[4, 2]],
        )
        .fixed(),
        row("resize to twice", |b, x| resize(b, x[0], &[1.0, 1.0, 2.0, 2.0], "nearest"), &[&[1, 2, 3, 2]]),
        row("linear resize", |b, x| resize(b, x[0], &[1.0, 1.0, 1.6, 0.7], "linear"), &[&[1, 2, 3, 4]]),
        row("cubic resize", |b, x| resize(b, x[0], &[1.0, 1.0, 2.0, 1.0], "cubic"), &[&[1, 1, 4, 2]]),
        row(
            "resize to sizes",
            |b, x| {
                let sizes = b.constant(ints(&[5, 3])?);
                let attrs = [
                    ("axes", Attribute::Ints(vec![1, 0])),
                    ("mode", Attribute::String("linear".into())),
                    ("coordinate_transformation_mode", Attribute::String("align_corners".into())),
                ];
                let inputs = [Some(x[0]), None, None, Some(sizes)];
                b.add(("", "Resize"), &inputs, &attrs, 1, vec![]).map(|y| y[0])
            },
            &[&[2, 3]],
        )
        .fixed(),
    ]);
}

#[test]
fn reductions_and_choices() {
    check_all(&[
        row(
            "ReduceMax of rows",
            |b, x| {
                let c0 = b.constant(ints(&[-1])?);
                b.node("ReduceMax", &[x[0], c0], &[("keepdims", Attribute::Int(0))])
            },
            &[&[2, 3]],
        ),
        row("ReduceMax of all", |b, x| b.node("ReduceMax", x, &[]), &[&[2, 3]]),
        row(
            "ReduceMin of rows",
            |b, x| {
                let c0 = b.constant(ints(&[-1])?);
                b.node("ReduceMin", &[x[0], c0], &[("keepdims", Attribute::Int(0))])
            },
            &[&[2, 3]],
        ),
        row("ReduceMin of all", |b, x| b.node("ReduceMin", x, &[]), &[&[2, 3]]),
        row(
            "ReduceProd of rows",
            |b, x| {
                let c0 = b.constant(ints(&[-1])?);
                b.node("ReduceProd", &[x[0], c0], &[("keepdims", Attribute::Int(0))])
            },
            &[&[2, 3]],
        ),
        row("ReduceProd of all", |b, x| b.node("ReduceProd", x, &[]), &[&[2, 3]]),
        row(
            "ReduceL1 of rows",
            |b, x| {
                let c0 = b.constant(ints(&[-1])?);
                b.node("ReduceL1", &[x[0], c0], &[("keepdims", Attribute::Int(0))])
            },
            &[&[2, 3]],
        ),
        row("ReduceL1 of all", |b, x| b.node("ReduceL1", x, &[]), &[&[2, 3]]),
        row(
            "ReduceL2 of rows",
            |b, x| {
                let c0 = b.constant(ints(&[-1])?);
                b.node("ReduceL2", &[x[0], c0], &[("keepdims", Attribute::Int(0))])
            },
            &[&[2, 3]],
        ),
        row("ReduceL2 of all", |b, x| b.node("ReduceL2", x, &[]), &[&[2, 3]]),
        row(
            "ReduceSumSquare of rows",
            |b, x| {
                let c0 = b.constant(ints(&[-1])?);
                b.node("ReduceSumSquare", &[x[0], c0], &[("keepdims", Attribute::Int(0))])
            },
            &[&[2, 3]],
        ),
        row("ReduceSumSquare of all", |b, x| b.node("ReduceSumSquare", x, &[]), &[&[2, 3]]),
        row(
            "ReduceLogSumExp of rows",
            |b, x| {
                let c0 = b.constant(ints(&[-1])?);
                b.node("ReduceLogSumExp", &[x[0], c0], &[("keepdims", Attribute::Int(0))])
            },
            &[&[2, 3]],
        ),
        row("ReduceLogSumExp of all", |b, x| b.node("ReduceLogSumExp", x, &[]), &[&[2, 3]]),
        row(
            "ReduceLogSum",
            |b, x| {
                let c0 = b.constant(ints(&[0])?);
                b.node("ReduceLogSum", &[x[0], c0], &[])
            },
            &[&[2, 3]],
        )
        .positive(),
        row(
            "product with a zero",
            |b, x| {
                let mask = b.constant(Tensor::from_slice(&[2, 3], &[1.0f64, 0.0, 1.0, 0.0, 0.0, 1.0])?);
                let some = b.node("Mul", &[x[0], mask], &[])?;
                let axes = b.constant(ints(&[1])?);
                b.node("ReduceProd", &[some, axes], &[])
            },
            &[&[2, 3]],
        ),
        row(
            "running sum 00",
            |b, x| {
                let axis = b.constant(Tensor::scalar(1i64)?);
                b.node(
                    "CumSum",
                    &[x[0], axis],
                    &[("exclusive", Attribute::Int(0)), ("reverse", Attribute::Int(0))],
                )
            },
            &[&[2, 4]],
        ),
        row(
            "running sum 01",
            |b, x| {
                let axis = b.constant(Tensor::scalar(1i64)?);
                b.node(
                    "CumSum",
                    &[x[0], axis],
                    &[("exclusive", Attribute::Int(0)), ("reverse", Attribute::Int(1))],
                )
            },
            &[&[2, 4]],
        ),
        row(
            "running sum 10",
            |b, x| {
                let axis = b.constant(Tensor::scalar(1i64)?);
                b.node(
                    "CumSum",
                    &[x[0], axis],
                    &[("exclusive", Attribute::Int(1)), ("reverse", Attribute::Int(0))],
                )
            },
            &[&[2, 4]],
        ),
        row(
            "running sum 11",
            |b, x| {
                let axis = b.constant(Tensor::scalar(1i64)?);
                b.node(
                    "CumSum",
                    &[x[0], axis],
                    &[("exclusive", Attribute::Int(1)), ("reverse", Attribute::Int(1))],
                )
            },
            &[&[2, 4]],
        ),
        row(
            "greatest",
            |b, x| {
                let c0 = b.constant(ints(&[2])?);
                b.node("TopK", &[x[0], c0], &[("axis", Attribute::Int(0))])
            },
            &[&[4, 3]],
        ),
        row("maximum", |b, x| b.node("Max", x, &[]), &[&[2, 3], &[3], &[2, 1]]),
        row("minimum", |b, x| b.node("Min", x, &[]), &[&[2, 3], &[1, 3]]),
        row("clip", |b, x| b.node("Clip", x, &[]), &[&[3, 4], &[], &[]]).fixed(),
        row(
            "einsum ij,jk->ik",
            |b, x| b.node("Einsum", x, &[("equation", Attribute::String("ij,jk->ik".into()))]),
            &[&[2, 3], &[3, 2]],
        ),
        row(
            "einsum bij,bjk",
            |b, x| b.node("Einsum", x, &[("equation", Attribute::String("bij,bjk".into()))]),
            &[&[2, 2, 3], &[2, 3, 2]],
        ),
        row(
            "einsum ij->j",
            |b, x| b.node("Einsum", x, &[("equation", Attribute::String("ij->j".into()))]),
            &[&[2, 3]],
        ),
        row(
            "einsum ij,i,j->",
            |b, x| b.node("Einsum", x, &[("equation", Attribute::String("ij,i,j->".into()))]),
            &[&[2, 3], &[2], &[3]],
        ),
        row(
            "einsum ij,kl->i",
            |b, x| b.node("Einsum", x, &[("equation", Attribute::String("ij,kl->i".into()))]),
            &[&[2, 3], &[2, 2]],
        ),
    ]);
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
        .fixed(),
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
