//! Gradients of operators that move data, reduce or choose, against finite differences.

use crate::gradient_support::rows::{check_all, row};
use crate::support::ints;
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::{Result, Tensor};

fn resize(b: &mut GraphBuilder, x: ValueId, scales: &[f32], mode: &str) -> Result<ValueId> {
    let scales = b.constant(Tensor::from_slice(&[scales.len()], scales)?);
    let mode = [("mode", Attribute::String(mode.into()))];
    b.add(("", "Resize"), &[Some(x), None, Some(scales)], &mode, 1, vec![]).map(|y| y[0])
}

/// A list whose elements and length follow from the elements of `x`, all of which are below a
/// million.
fn at_run_time(b: &mut GraphBuilder, x: ValueId, list: Tensor) -> Result<ValueId> {
    let (flat, many) = (b.constant(ints(&[-1])?), b.constant(Tensor::scalar(1e6f64)?));
    let flat = b.node("Reshape", &[x, flat], &[])?;
    let below = b.node("Less", &[flat, many], &[])?;
    let (start, end) = (b.constant(ints(&[0])?), b.constant(ints(&[list.shape()[0] as i64])?));
    let below = b.node("Slice", &[below, start, end], &[])?;
    let list = b.constant(list);
    b.node("Compress", &[list, below], &[("axis", Attribute::Int(0))])
}

fn einsum(b: &mut GraphBuilder, x: &[ValueId], equation: &str) -> Result<ValueId> {
    b.node("Einsum", x, &[("equation", Attribute::String(equation.into()))])
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
            "slice along axes that nodes compute from constants",
            |b, x| {
                let (start, end) = (b.constant(ints(&[1])?), b.constant(ints(&[3])?));
                let axis = b.constant(Tensor::scalar(1i32)?);
                let zero = b.constant(ints(&[0])?);
                let axis = b.node("Unsqueeze", &[axis, zero], &[])?;
                let axis = b.node("Cast", &[axis], &[("to", Attribute::Int(7))])?;
                b.node("Slice", &[x[0], start, end, axis], &[])
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
            "slice of axes in order, how many only the run knows",
            |b, x| {
                let starts = at_run_time(b, x[0], ints(&[1, -4])?)?;
                let ends = at_run_time(b, x[0], ints(&[3, -1])?)?;
                b.node("Slice", &[x[0], starts, ends], &[])
            },
            &[&[4, 5]],
        ),
        row(
            "slice of the first axis alone, as only the run knows",
            |b, x| {
                let starts = at_run_time(b, x[0], Tensor::from_slice(&[1], &[1i32])?)?;
                let ends = at_run_time(b, x[0], Tensor::from_slice(&[1], &[i32::MAX])?)?;
                b.node("Slice", &[x[0], starts, ends], &[])
            },
            &[&[3, 2, 2]],
        ),
        row(
            "slice along an axis that only the run knows",
            |b, x| {
                let (starts, ends) = (b.constant(ints(&[1])?), b.constant(ints(&[4])?));
                let axes = at_run_time(b, x[0], ints(&[-1])?)?;
                b.node("Slice", &[x[0], starts, ends, axes], &[])
            },
            &[&[4, 5]],
        ),
        row(
            "slice with axes and steps that only the run knows",
            |b, x| {
                let lists: [&[i64]; 4] = [&[-1, 0], &[-100, 100], &[1, -2], &[-2, 3]];
                let mut inputs = vec![x[0]];
                for list in lists {
                    inputs.push(at_run_time(b, x[0], ints(list)?)?);
                }
                b.node("Slice", &inputs, &[])
            },
            &[&[4, 5]],
        ),
        row(
            "slice backwards without axes, how many only the run knows",
            |b, x| {
                let lists: [&[i64]; 3] = [&[3, 3], &[-100, 0], &[-1, -2]];
                let [starts, ends, steps] = lists.map(|list| at_run_time(b, x[0], ints(list)?));
                let inputs = [Some(x[0]), Some(starts?), Some(ends?), None, Some(steps?)];
                b.add(("", "Slice"), &inputs, &[], 1, vec![]).map(|y| y[0])
            },
            &[&[4, 5]],
        ),
        row(
            "slice of no axis, as only the run knows",
            |b, x| {
                let (starts, ends) = (at_run_time(b, x[0], ints(&[])?)?, at_run_time(b, x[0], ints(&[])?)?);
                b.node("Slice", &[x[0], starts, ends], &[])
            },
            &[&[2, 3]],
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
            "running sum 22",
            |b, x| {
                let axis = b.constant(Tensor::scalar(1i64)?);
                b.node(
                    "CumSum",
                    &[x[0], axis],
                    &[("exclusive", Attribute::Int(2)), ("reverse", Attribute::Int(2))],
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
        row("einsum ...d,df->...f", |b, x| einsum(b, x, "...d,df->...f"), &[&[2, 3, 2], &[2, 3]]),
        row("einsum ...ij,...jk->...ik", |b, x| einsum(b, x, "...ij,...jk->...ik"), &[&[2, 2, 3], &[3, 2]])
            .fixed(),
        row("einsum of a broadcast batch", |b, x| einsum(b, x, "...ij,...jk"), &[&[1, 2, 3], &[2, 3, 2]])
            .fixed(),
        row("einsum b...d,d->b...", |b, x| einsum(b, x, "b...d,d->b..."), &[&[2, 3, 2, 2], &[2]]).fixed(),
        row("einsum bii->bi", |b, x| einsum(b, x, "bii->bi"), &[&[2, 3, 3]]).fixed(),
        row("einsum ii", |b, x| einsum(b, x, "ii"), &[&[3, 3]]).fixed(),
        row("einsum iij,jik->k", |b, x| einsum(b, x, "iij,jik->k"), &[&[2, 2, 3], &[3, 2, 2]]).fixed(),
        row("einsum iiij->ij", |b, x| einsum(b, x, "iiij->ij"), &[&[2, 2, 2, 3]]).fixed(),
    ]);
}

#[test]
fn dropout_by_counters() {
    check_all(&[row(
        "dropout by counters",
        |b, x| {
            let ratio = b.constant(Tensor::scalar(0.4f32)?);
            let (seed, step) = (b.constant(Tensor::scalar(11i64)?), b.constant(Tensor::scalar(5i64)?));
            let inputs = [x[0], ratio, seed, step].map(Some);
            let stream = [("stream", Attribute::Int(2))];
            b.add(("ort-runtime", "CounterDropout"), &inputs, &stream, 1, vec![]).map(|y| y[0])
        },
        &[&[3, 7]],
    )]);
}
