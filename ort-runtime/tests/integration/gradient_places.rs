//! Gradients of operators that place, sample or transform elements, against central finite
//! differences on the CPU.

use crate::gradient_support::rows::{check_all, row};
use crate::gradient_support::{Build, expanded, gradient};
use crate::support::{axis, ints};
use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::{DType, Result, Tensor};

type Attrs<'a> = &'a [(&'static str, Attribute)];

fn int(name: &'static str, value: i64) -> (&'static str, Attribute) {
    (name, Attribute::Int(value))
}

fn list(name: &'static str, values: &[i64]) -> (&'static str, Attribute) {
    (name, Attribute::Ints(values.to_vec()))
}

fn text(name: &'static str, value: &str) -> (&'static str, Attribute) {
    (name, Attribute::String(value.into()))
}

fn cum_prod(b: &mut GraphBuilder, x: ValueId, attrs: Attrs<'_>) -> Result<ValueId> {
    let axis = b.constant(Tensor::scalar(1i64)?);
    b.node("CumProd", &[x, axis], attrs)
}

/// A scatter in which places meet; one of what meets is zero.
fn scatter(b: &mut GraphBuilder, op: &str, x: &[ValueId], reduction: &str) -> Result<ValueId> {
    let (shape, indices): (&[usize], &[i64]) = match op {
        "ScatterElements" => (&[3, 3], &[0, 1, 2, 0, 3, 2, 1, 3, -2]),
        _ => (&[3, 1], &[2, 0, 2]),
    };
    let indices = b.constant(Tensor::from_slice(shape, indices)?);
    b.node(op, &[x[0], indices, x[1]], &[text("reduction", reduction)])
}

#[test]
fn elements_by_index() {
    check_all(&[
        row("CumProd", |b, x| cum_prod(b, x[0], &[]), &[&[2, 4, 2]]),
        row(
            "CumProd, exclusive and from the end",
            |b, x| cum_prod(b, x[0], &[int("exclusive", 1), int("reverse", 1)]),
            &[&[2, 4]],
        ),
        row("scattered products", |b, x| scatter(b, "ScatterElements", x, "mul"), &[&[4, 3], &[3, 3]]),
        row("scattered greatest", |b, x| scatter(b, "ScatterElements", x, "max"), &[&[4, 3], &[3, 3]]),
        row("scattered least", |b, x| scatter(b, "ScatterElements", x, "min"), &[&[4, 3], &[3, 3]]),
        row("rows of products", |b, x| scatter(b, "ScatterND", x, "mul"), &[&[4, 3], &[3, 3]]),
        row("rows of the greatest", |b, x| scatter(b, "ScatterND", x, "max"), &[&[4, 3], &[3, 3]]),
        row(
            "products with zeros",
            |b, x| {
                let zeros =
                    b.constant(Tensor::from_slice(&[3, 3], &[0.0f64, 1., 1., 1., 0., 1., 1., 0., 0.])?);
                let updates = b.node("Mul", &[x[1], zeros], &[])?;
                scatter(b, "ScatterElements", &[x[0], updates], "mul")
            },
            &[&[4, 3], &[3, 3]],
        ),
        row(
            "OneHot",
            |b, x| {
                let (indices, depth) = (b.constant(ints(&[1, 0, -1, 7])?), b.constant(Tensor::scalar(3i64)?));
                b.node("OneHot", &[indices, depth, x[0]], &axis(0))
            },
            &[&[2]],
        ),
        row(
            "Unique",
            |b, x| {
                let twice = b.node("Concat", &[x[0], x[0]], &axis(0))?;
                b.node("Unique", &[twice], &axis(0))
            },
            &[&[3, 2]],
        ),
        row(
            "TensorScatter",
            |b, x| {
                let starts = b.constant(ints(&[1, 3])?);
                b.node("TensorScatter", &[x[0], x[1], starts], &[text("mode", "circular")])
            },
            &[&[2, 4, 3], &[2, 2, 3]],
        ),
        row(
            "Range",
            |b, x| {
                let limit = b.constant(Tensor::scalar(9.3f64)?);
                b.node("Range", &[x[0], limit, x[1]], &[])
            },
            &[&[], &[]],
        )
        .positive(),
        row(
            "CenterCropPad",
            |b, x| {
                let sizes = b.constant(ints(&[2, 7])?);
                b.node("CenterCropPad", &[x[0], sizes], &[list("axes", &[0, 2])])
            },
            &[&[5, 2, 4]],
        ),
    ]);
}

fn col2im(b: &mut GraphBuilder, x: ValueId, attrs: Attrs<'_>) -> Result<ValueId> {
    let (image, block) = (b.constant(ints(&[3, 4])?), b.constant(ints(&[2, 2])?));
    b.node("Col2Im", &[x, image, block], attrs)
}

fn unpool(b: &mut GraphBuilder, x: ValueId, shape: Option<&[i64]>) -> Result<ValueId> {
    let indices = b.constant(Tensor::from_slice(&[1, 1, 2, 2], &[5i64, 7, 8, 15])?);
    let shape = match shape {
        None => None,
        Some(shape) => Some(b.constant(ints(shape)?)),
    };
    let attrs = [list("kernel_shape", &[2, 2]), list("strides", &[2, 2])];
    b.add(("", "MaxUnpool"), &[Some(x), Some(indices), shape], &attrs, 1, vec![]).map(|y| y[0])
}

fn affine(b: &mut GraphBuilder, x: ValueId, size: &[i64], aligned: i64) -> Result<ValueId> {
    let size = b.constant(ints(size)?);
    b.node("AffineGrid", &[x, size], &[int("align_corners", aligned)])
}

const CODES: [i8; 8] = [1, -3, 7, 20, -100, 4, 0, 9];

fn dequantized(b: &mut GraphBuilder, scale: ValueId, zero: bool, attrs: Attrs<'_>) -> Result<ValueId> {
    let codes = b.constant(Tensor::from_slice(&[2, 4], &CODES)?);
    let zero = match zero {
        true => Some(b.constant(Tensor::from_slice(&[2], &[3i8, -1])?)),
        false => None,
    };
    b.add(("", "DequantizeLinear"), &[Some(codes), Some(scale), zero], attrs, 1, vec![]).map(|y| y[0])
}

fn dequantized_list(b: &mut GraphBuilder, scale: ValueId, attrs: Attrs<'_>) -> Result<ValueId> {
    let codes = b.constant(Tensor::from_slice(&[8], &CODES)?);
    b.node("DequantizeLinear", &[codes, scale], attrs)
}

/// A matrix that has an inverse.
fn regular(b: &mut GraphBuilder, x: ValueId) -> Result<ValueId> {
    let diagonal =
        b.constant(Tensor::from_slice(&[3, 3], &[4.0f64, 0.0, 1.0, 0.0, -5.0, 0.0, 0.0, 0.0, 6.0])?);
    b.node("Add", &[x, diagonal], &[])
}

#[test]
fn images_and_matrices() {
    check_all(&[
        row("Col2Im", |b, x| col2im(b, x[0], &[]), &[&[2, 8, 6]]).fixed(),
        row(
            "Col2Im with gaps",
            |b, x| {
                let attrs =
                    [list("dilations", &[1, 2]), list("pads", &[1, 0, 0, 1]), list("strides", &[1, 2])];
                col2im(b, x[0], &attrs)
            },
            &[&[1, 4, 6]],
        )
        .fixed(),
        row("MaxUnpool", |b, x| unpool(b, x[0], None), &[&[1, 1, 2, 2]]),
        row("MaxUnpool to a shape", |b, x| unpool(b, x[0], Some(&[1, 1, 5, 6])), &[&[1, 1, 2, 2]]),
        row("AffineGrid", |b, x| affine(b, x[0], &[2, 1, 3, 4], 0), &[&[2, 2, 3]]),
        row("AffineGrid of volumes", |b, x| affine(b, x[0], &[2, 1, 2, 3, 4], 1), &[&[2, 3, 4]]),
        row("one scale", |b, x| dequantized(b, x[0], false, &[]), &[&[]]).single().fixed(),
        row("a scale for each row", |b, x| dequantized(b, x[0], true, &axis(0)), &[&[2]]).single().fixed(),
        row(
            "a scale for each block",
            |b, x| dequantized(b, x[0], false, &[int("axis", 1), int("block_size", 2)]),
            &[&[2, 2]],
        )
        .single()
        .fixed(),
        row(
            "a scale for each block, the last of which is shorter",
            |b, x| dequantized(b, x[0], false, &[int("axis", -1), int("block_size", 3)]),
            &[&[2, 2]],
        )
        .single()
        .fixed(),
        row(
            "a scale for each block of a list",
            |b, x| dequantized_list(b, x[0], &[int("axis", 0), int("block_size", 3)]),
            &[&[3]],
        )
        .single()
        .fixed(),
        row("one scale for a list", |b, x| dequantized_list(b, x[0], &axis(0)), &[&[1]]).single().fixed(),
        row("one scale of rank 2", |b, x| dequantized(b, x[0], false, &[]), &[&[1, 1]]).single().fixed(),
        row("Det", |b, x| regular(b, x[0]).and_then(|x| b.node("Det", &[x], &[])), &[&[2, 3, 3]]),
        row(
            "Inverse",
            |b, x| {
                let x = regular(b, x[0])?;
                b.add(("com.microsoft", "Inverse"), &[Some(x)], &[], 1, vec![]).map(|y| y[0])
            },
            &[&[2, 3, 3]],
        ),
        row(
            "CausalConvWithState",
            |b, x| {
                let inputs: Vec<Option<ValueId>> = x.iter().copied().map(Some).collect();
                let y =
                    b.add(("", "CausalConvWithState"), &inputs, &[text("activation", "silu")], 2, vec![])?;
                b.node("Concat", &y, &axis(2))
            },
            &[&[2, 3, 4], &[3, 1, 3], &[3], &[2, 3, 2]],
        )
        .single(),
    ]);
}

fn sampled(b: &mut GraphBuilder, x: &[ValueId], mode: &str, padding: &str, aligned: i64) -> Result<ValueId> {
    let attrs = [text("mode", mode), text("padding_mode", padding), int("align_corners", aligned)];
    b.node("GridSample", x, &attrs)
}

const IMAGE: &[&[usize]] = &[&[2, 2, 3, 4], &[2, 2, 3, 2]];

#[test]
fn images_between_pixels() {
    check_all(&[
        row("linear, zeros", |b, x| sampled(b, x, "linear", "zeros", 0), IMAGE),
        row("linear, border", |b, x| sampled(b, x, "linear", "border", 1), IMAGE),
        row("linear, reflection", |b, x| sampled(b, x, "linear", "reflection", 0), IMAGE),
        row("linear, reflection at pixels", |b, x| sampled(b, x, "linear", "reflection", 1), IMAGE),
        row("nearest, reflection", |b, x| sampled(b, x, "nearest", "reflection", 0), IMAGE),
        row("nearest, zeros", |b, x| sampled(b, x, "nearest", "zeros", 1), IMAGE),
        row("cubic, zeros", |b, x| sampled(b, x, "cubic", "zeros", 0), IMAGE),
        row("cubic, border", |b, x| sampled(b, x, "cubic", "border", 1), IMAGE),
        row("cubic, reflection", |b, x| sampled(b, x, "cubic", "reflection", 0), IMAGE),
        row("volumes", |b, x| sampled(b, x, "linear", "border", 0), &[&[1, 2, 2, 3, 2], &[1, 1, 2, 2, 3]]),
        row(
            "RoiAlign",
            |b, x| {
                let regions = [0.4f64, 0.3, 3.7, 4.6, -1.5, 0.7, 2.6, 7.5, 1.1, 1.2, 4.4, 3.3];
                let regions = b.constant(Tensor::from_slice(&[3, 4], &regions)?);
                let images = b.constant(ints(&[1, 0, 1])?);
                let attrs = [
                    int("output_height", 2),
                    int("output_width", 3),
                    int("sampling_ratio", 2),
                    ("spatial_scale", Attribute::Float(0.9)),
                ];
                b.node("RoiAlign", &[x[0], regions, images], &attrs)
            },
            &[&[2, 2, 5, 4]],
        ),
        row(
            "DeformConv",
            |b, x| {
                let attrs = [int("group", 2), int("offset_group", 2), list("pads", &[1, 0, 0, 1])];
                b.node("DeformConv", x, &attrs)
            },
            &[&[2, 4, 3, 4], &[2, 2, 2, 2], &[2, 16, 3, 4], &[2], &[2, 8, 3, 4]],
        )
        .fixed(),
    ]);
}

fn dft(b: &mut GraphBuilder, x: ValueId, length: Option<i64>, attrs: Attrs<'_>) -> Result<ValueId> {
    let length = match length {
        None => None,
        Some(length) => Some(b.constant(Tensor::scalar(length)?)),
    };
    let axis = b.constant(Tensor::scalar(1i64)?);
    b.add(("", "DFT"), &[Some(x), length, Some(axis)], attrs, 1, vec![]).map(|y| y[0])
}

#[test]
fn transforms() {
    check_all(&[
        row("complex", |b, x| dft(b, x[0], None, &[]), &[&[2, 5, 2]]),
        row("real, one side", |b, x| dft(b, x[0], None, &[int("onesided", 1)]), &[&[2, 5, 3, 1]]),
        row("inverse", |b, x| dft(b, x[0], None, &[int("inverse", 1)]), &[&[2, 6, 2]]),
        row("longer", |b, x| dft(b, x[0], Some(8), &[]), &[&[2, 5, 1]]),
        row("shorter, one side", |b, x| dft(b, x[0], Some(4), &[int("onesided", 1)]), &[&[2, 5, 1]]),
        row(
            "STFT",
            |b, x| {
                let step = b.constant(Tensor::scalar(3i64)?);
                b.node("STFT", &[x[0], step, x[1]], &[])
            },
            &[&[2, 11, 1], &[4]],
        ),
    ]);
}

#[test]
fn sequences_of_known_length() {
    check_all(&[
        row(
            "chunks",
            |b, x| {
                let size = b.constant(Tensor::scalar(2i64)?);
                let parts = b.node("SplitToSequence", &[x[0], size], &axis(1))?;
                let (last, first) = (b.constant(Tensor::scalar(-1i64)?), b.constant(Tensor::scalar(0i64)?));
                let first = b.node("SequenceAt", &[parts, first], &[])?;
                let last = b.node("SequenceAt", &[parts, last], &[])?;
                b.node("Mul", &[first, last], &[])
            },
            &[&[2, 5]],
        ),
        row(
            "rows, and a stack of them",
            |b, x| {
                let rows = b.node("SplitToSequence", x, &[int("axis", 1), int("keepdims", 0)])?;
                let (one, two) = (b.constant(Tensor::scalar(1i64)?), b.constant(Tensor::scalar(2i64)?));
                let (a, c) =
                    (b.node("SequenceAt", &[rows, one], &[])?, b.node("SequenceAt", &[rows, two], &[])?);
                let product = b.node("Mul", &[a, c], &[])?;
                let again = b.node("SequenceConstruct", &[a, product, c], &[])?;
                b.node("ConcatFromSequence", &[again], &[int("axis", 1), int("new_axis", 1)])
            },
            &[&[2, 3]],
        ),
        row(
            "an optional",
            |b, x| {
                let held = b.node("Optional", x, &[])?;
                b.node("OptionalGetElement", &[held], &[])
            },
            &[&[2, 3]],
        ),
    ]);
}

/// The gradient of a node by its first input, expanded.
fn expand_gradient_of(shape: &[&str], build: Build) -> Result<Graph> {
    let mut b = GraphBuilder::new("hostile");
    let x = b.input("x", DType::F64, shape);
    let y = build(&mut b, &[x])?;
    let loss = b.node("ReduceSum", &[y], &[("keepdims", Attribute::Int(0))])?;
    let graph = b.finish(&[loss])?;
    let name = graph.value(loss).name.to_string();
    let mut b = GraphBuilder::extend(graph);
    let gradient = gradient(&mut b, &["x"], &name, &[x])?;
    expanded(b, &gradient)
}

fn roi_align(b: &mut GraphBuilder, x: ValueId, height: i64, samples: i64) -> Result<ValueId> {
    let regions = b.constant(Tensor::from_slice(&[1, 4], &[0.0f64, 0.0, 2.0, 2.0])?);
    let images = b.constant(ints(&[0])?);
    b.node("RoiAlign", &[x, regions, images], &[int("output_height", height), int("sampling_ratio", samples)])
}

#[test]
fn hostile_sizes_take_no_memory_and_overflow_is_an_error() -> Result<()> {
    expand_gradient_of(&["1", "2", "5", "4"], |b, x| roi_align(b, x[0], 1 << 36, 4))?;
    let overflows: [(&[&str], Build); 2] = [
        (&["1", "2", "5", "4"], |b, x| roi_align(b, x[0], 1 << 36, 1 << 36)),
        (&["1", "4", "6"], |b, x| {
            let (image, block) = (b.constant(ints(&[3, 4])?), b.constant(ints(&[1 << 40, 1 << 40])?));
            b.node("Col2Im", &[x[0], image, block], &[])
        }),
    ];
    for (shape, build) in overflows {
        let problem = expand_gradient_of(shape, build).expect_err("a product of sizes overflows");
        assert!(problem.to_string().contains("overflows"), "{problem}");
    }
    Ok(())
}
