//! Fused operators beside the separate ones, in turn in one process: the least times of both and
//! their ratio.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::time::Instant;

use ort_core::dtype::DType;
use ort_core::ir::{Attribute, GraphBuilder, ValueId};
use ort_core::rewrite::Optimizer;
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;

/// Runs of each side.
const ROUNDS: usize = 81;

fn values(shape: &[usize], seed: usize) -> Tensor {
    let count: usize = shape.iter().product();
    let numbers: Vec<f32> = (0..count).map(|i| ((i * 7919 + seed) % 1013) as f32 / 507.0 - 1.0).collect();
    Tensor::from_slice(shape, &numbers).unwrap()
}

fn text(value: &str) -> Attribute {
    Attribute::String(value.to_string())
}

/// A graph over inputs of these shapes.
fn session(
    shapes: &[&[usize]],
    threads: usize,
    build: &dyn Fn(&mut GraphBuilder, &[ValueId]) -> ValueId,
) -> (Session, Vec<(String, Value)>) {
    let mut builder = GraphBuilder::new("bench");
    let (mut ids, mut inputs) = (Vec::new(), Vec::new());
    for (index, shape) in shapes.iter().enumerate() {
        let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        let name = format!("in{index}");
        let id = builder.input(&name, DType::F32, &sizes);
        // What a kernel reads comes from another node, as in a model.
        ids.push(builder.node("Neg", &[id], &[]).unwrap());
        inputs.push((name, values(shape, index).into()));
    }
    let result = build(&mut builder, &ids);
    // An output of the graph is memory of its own; what is timed stays in the slab.
    let result = builder.node("ReduceMax", &[result], &[("keepdims", Attribute::Int(0))]).unwrap();
    let model = Model::from_graph(builder.finish(&[result]).unwrap());
    // What is apart stays apart, and no sample is too small.
    let optimizer = Optimizer { disabled: vec!["pointwise_depthwise".to_string()], ..Optimizer::default() };
    (Session::builder(&model).threads(threads).optimizer(optimizer).build().unwrap(), inputs)
}

type Build<'a> = &'a dyn Fn(&mut GraphBuilder, &[ValueId]) -> ValueId;

fn compare(name: &str, shapes: &[&[usize]], sides: [Build<'_>; 2]) {
    for threads in [1, 2] {
        let sessions = sides.map(|build| session(shapes, threads, build));
        let empty = session(shapes, threads, &|_, ids| ids[0]);
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for ((session, inputs), times) in sessions.iter().chain([&empty]).zip(&mut times) {
                let inputs: Vec<(&str, Value)> =
                    inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
                let start = Instant::now();
                session.run(&inputs).unwrap();
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        let [fused, apart, rest] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[0]
        });
        println!(
            "{name:44} {threads} threads {fused:10.0} us fused, {apart:10.0} us apart, {:5.2} (frame {rest:.0} us)",
            apart / fused
        );
    }
}

fn matmul([m, n, k]: [usize; 3], activation: &'static str, residual: bool) {
    let (weight, bias) = (values(&[k, n], 3), values(&[n], 4));
    let op = if activation == "FastGelu" { "Gelu" } else { activation };
    let approximate = text(if activation == "FastGelu" { "tanh" } else { "none" });
    let fused = |builder: &mut GraphBuilder, ids: &[ValueId]| {
        let (weight, bias) = (builder.constant(weight.clone()), builder.constant(bias.clone()));
        let mut inputs = vec![Some(ids[0]), Some(weight), Some(bias)];
        inputs.extend(residual.then(|| Some(ids[1])));
        let attrs = [("activation", text(activation))];
        builder.add(("ort-runtime", "FusedMatMul"), &inputs, &attrs, 1, Vec::new()).unwrap()[0]
    };
    let apart = |builder: &mut GraphBuilder, ids: &[ValueId]| {
        let (weight, bias) = (builder.constant(weight.clone()), builder.constant(bias.clone()));
        let mut result = builder.node("MatMul", &[ids[0], weight], &[]).unwrap();
        result = builder.node("Add", &[result, bias], &[]).unwrap();
        if residual {
            result = builder.node("Add", &[result, ids[1]], &[]).unwrap();
        }
        match op {
            "" => result,
            "Gelu" => builder.node(op, &[result], &[("approximate", approximate.clone())]).unwrap(),
            _ => builder.node(op, &[result], &[]).unwrap(),
        }
    };
    let name = format!("MatMul {m}x{n}x{k} bias{} {activation}", if residual { " residual" } else { "" });
    let shapes: [&[usize]; 2] = [&[m, k], &[m, n]];
    compare(&name, &shapes[..1 + usize::from(residual)], [&fused, &apart]);
}

fn conv(
    image: [usize; 4],
    weight: [usize; 4],
    (stride, pad): (usize, usize),
    activation: &'static str,
    add: bool,
) {
    let group = image[1] / weight[1];
    let (weights, bias) = (values(&weight, 3), values(&weight[..1], 4));
    let attrs = [
        ("strides", Attribute::Ints(vec![stride as i64; 2])),
        ("pads", Attribute::Ints(vec![pad as i64; 4])),
        ("group", Attribute::Int(group as i64)),
    ];
    let out = |axis: usize| (image[axis] + 2 * pad - weight[axis]) / stride + 1;
    let fused = |builder: &mut GraphBuilder, ids: &[ValueId]| {
        let (weights, bias) = (builder.constant(weights.clone()), builder.constant(bias.clone()));
        let mut inputs = vec![Some(ids[0]), Some(weights), Some(bias)];
        inputs.extend(add.then_some(Some(ids[ids.len() - 1])));
        let attrs = [&attrs[..], &[("activation", text(activation))]].concat();
        builder.add(("com.microsoft", "FusedConv"), &inputs, &attrs, 1, Vec::new()).unwrap()[0]
    };
    let apart = |builder: &mut GraphBuilder, ids: &[ValueId]| {
        let (weights, bias) = (builder.constant(weights.clone()), builder.constant(bias.clone()));
        let mut result = builder.node("Conv", &[ids[0], weights, bias], &attrs).unwrap();
        if add {
            result = builder.node("Add", &[result, ids[ids.len() - 1]], &[]).unwrap();
        }
        builder.node(activation, &[result], &[]).unwrap()
    };
    let result = [image[0], weight[0], out(2), out(3)];
    let name = format!("Conv {image:?} {weight:?} s{stride}{} {activation}", if add { " +Z" } else { "" });
    let shapes: [&[usize]; 2] = [&image, &result];
    compare(&name, &shapes[..1 + usize::from(add)], [&fused, &apart]);
}

/// A pointwise convolution to `filters` channels, and a depthwise one with square kernels.
fn separable(image: [usize; 4], filters: usize, (kernel, stride): (usize, usize), activation: &'static str) {
    let (pointwise, depthwise) = ([filters, image[1], 1, 1], [filters, 1, kernel, kernel]);
    let weights =
        [values(&pointwise, 3), values(&depthwise, 4), values(&[filters], 5), values(&[filters], 6)];
    let windows = [
        ("strides", Attribute::Ints(vec![stride as i64; 2])),
        ("pads", Attribute::Ints(vec![kernel as i64 / 2; 4])),
        ("group", Attribute::Int(filters as i64)),
    ];
    let params = if activation == "Swish" { vec![1.0] } else { vec![] };
    let params = Attribute::Floats(params);
    let fused = |builder: &mut GraphBuilder, ids: &[ValueId]| {
        let weights = weights.clone().map(|weight| builder.constant(weight));
        let inputs: Vec<_> = [ids[0]].into_iter().chain(weights).map(Some).collect();
        let names = ["activation", "inner_activation", "activation_params", "inner_activation_params"];
        let of_ends =
            names.into_iter().zip([text(activation), text(activation), params.clone(), params.clone()]);
        let attrs: Vec<_> = windows.iter().cloned().chain(of_ends).collect();
        builder.add(("ort-runtime", "FusedPointwiseDepthwise"), &inputs, &attrs, 1, Vec::new()).unwrap()[0]
    };
    let apart = |builder: &mut GraphBuilder, ids: &[ValueId]| {
        let [w1, w2, b1, b2] = weights.clone().map(|weight| builder.constant(weight));
        let ends = [("activation", text(activation)), ("activation_params", params.clone())];
        let between = [Some(ids[0]), Some(w1), Some(b1)];
        let between = builder.add(("com.microsoft", "FusedConv"), &between, &ends, 1, Vec::new()).unwrap()[0];
        let (inputs, attrs) = ([Some(between), Some(w2), Some(b2)], [&windows[..], &ends[..]].concat());
        builder.add(("com.microsoft", "FusedConv"), &inputs, &attrs, 1, Vec::new()).unwrap()[0]
    };
    let name = format!("{image:?} to {filters}, {kernel}x{kernel} s{stride} {activation}");
    compare(&name, &[&image], [&fused, &apart]);
}

fn separables() {
    let (large, small) = ([1, 16, 112, 112], [1, 24, 56, 56]);
    separable(large, 96, (3, 2), "Relu");
    separable(large, 64, (3, 2), "Relu");
    separable(large, 96, (3, 2), "Swish");
    separable(small, 144, (3, 1), "Relu");
    separable(small, 144, (3, 2), "Relu");
    separable(small, 72, (5, 2), "Relu");
    separable(small, 144, (3, 1), "Swish");
    separable([1, 40, 28, 28], 240, (5, 1), "Swish");
    separable([1, 40, 28, 28], 120, (5, 1), "Relu");
    separable([1, 32, 28, 28], 192, (3, 1), "Relu");
    separable([1, 64, 14, 14], 384, (3, 1), "Relu");
    separable([1, 112, 14, 14], 672, (5, 1), "HardSwish");
    separable([1, 160, 7, 7], 960, (3, 1), "Relu");
    separable([1, 48, 160, 160], 96, (3, 1), "HardSwish");
    separable([1, 128, 12, 80], 128, (5, 1), "HardSwish");
}

/// `FusedGemm` with the sizes, transpositions, and the addend's shape.
fn gemm([m, n, k]: [usize; 3], [trans_a, trans_b]: [bool; 2], addend: &[usize], constant: bool) {
    let matrix = |rows, columns, exchanged| if exchanged { [columns, rows] } else { [rows, columns] };
    let (a, b) = (matrix(m, k, trans_a), matrix(k, n, trans_b));
    let (weight, bias) = (values(&b, 3), values(addend, 4));
    let attrs =
        [("transA", Attribute::Int(i64::from(trans_a))), ("transB", Attribute::Int(i64::from(trans_b)))];
    let operands = |builder: &mut GraphBuilder, ids: &[ValueId]| {
        let right = if constant { builder.constant(weight.clone()) } else { ids[1] };
        [ids[0], right, builder.constant(bias.clone())]
    };
    let fused = |builder: &mut GraphBuilder, ids: &[ValueId]| {
        let inputs = operands(builder, ids).map(Some);
        let attrs = [&attrs[..], &[("activation", text("Relu"))]].concat();
        builder.add(("com.microsoft", "FusedGemm"), &inputs, &attrs, 1, Vec::new()).unwrap()[0]
    };
    let apart = |builder: &mut GraphBuilder, ids: &[ValueId]| {
        let inputs = operands(builder, ids);
        let result = builder.node("Gemm", &inputs, &attrs).unwrap();
        builder.node("Relu", &[result], &[]).unwrap()
    };
    let name = format!("Gemm {m}x{n}x{k} {trans_a} {trans_b} {addend:?} {constant}");
    let shapes: [&[usize]; 2] = [&a, &b];
    compare(&name, &shapes[..2 - usize::from(constant)], [&fused, &apart]);
}

fn formula(text_of: &'static str, shapes: &[&[usize]], apart: Build<'_>) {
    let fused = |builder: &mut GraphBuilder, ids: &[ValueId]| {
        let inputs: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
        let attrs = [("formula", text(text_of))];
        builder.add(("ort-runtime", "FusedElementwise"), &inputs, &attrs, 1, Vec::new()).unwrap()[0]
    };
    let name: String = format!("{text_of} {:?}", shapes[0]).chars().take(44).collect();
    compare(&name, shapes, [&fused, apart]);
}

fn formulas() {
    for image in [[1, 64, 112, 112], [1, 160, 14, 14], [1, 960, 7, 7]] {
        let channels = [image[1], 1, 1];
        formula("mul(x0, sigmoid(x0))", &[&image], &|b, x| {
            let gate = b.node("Sigmoid", &[x[0]], &[]).unwrap();
            b.node("Mul", &[x[0], gate], &[]).unwrap()
        });
        let text = "mul(add(mul(x0, x1), x2), min(max(add(mul(add(mul(x0, x1), x2), 0.16666666666666666), 0.5), 0.0), 1.0))";
        formula(text, &[&image, &channels, &channels], &|b, x| {
            let product = b.node("Mul", &[x[0], x[1]], &[]).unwrap();
            let sum = b.node("Add", &[product, x[2]], &[]).unwrap();
            b.node("HardSwish", &[sum], &[]).unwrap()
        });
        formula("add(x0, x1)", &[&image, &image], &|b, x| b.node("Add", &[x[0], x[1]], &[]).unwrap());
    }
    let gelu = "mul(mul(add(x0, x1), 0.5), add(erf(mul(add(x0, x1), 0.7071067811865476)), 1.0))";
    formula(gelu, &[&[128, 3072], &[3072]], &|b, x| {
        let sum = b.node("Add", &[x[0], x[1]], &[]).unwrap();
        b.node("Gelu", &[sum], &[]).unwrap()
    });
}

fn main() {
    let only = std::env::args().nth(1).filter(|arg| !arg.starts_with('-')).unwrap_or_default();
    if only.is_empty() || only == "matmul" {
        matmul([128, 3072, 768], "Gelu", false);
        matmul([128, 3072, 768], "FastGelu", false);
        matmul([128, 768, 3072], "", true);
        matmul([128, 768, 768], "", true);
        matmul([1, 3072, 768], "FastGelu", false);
        matmul([1, 768, 3072], "", true);
        matmul([512, 1536, 384], "Gelu", false);
    }
    if only.is_empty() || only == "gemm" {
        gemm([128, 3072, 768], [false, true], &[3072], true);
        gemm([128, 3072, 768], [true, true], &[3072], true);
        gemm([1024, 256, 256], [true, false], &[256], true);
        gemm([128, 768, 768], [false, true], &[768], false);
        gemm([128, 768, 768], [false, false], &[768], false);
        gemm([256, 256, 256], [false, false], &[256, 256], true);
        gemm([32, 64, 64], [false, false], &[64], true);
        gemm([4, 6, 5], [false, false], &[6], true);
    }
    if only.is_empty() || only == "conv" {
        conv([1, 64, 56, 56], [256, 64, 1, 1], (1, 0), "Relu", true);
        conv([1, 256, 56, 56], [64, 256, 1, 1], (1, 0), "Relu", false);
        conv([1, 128, 28, 28], [128, 128, 3, 3], (1, 1), "Relu", false);
        conv([1, 512, 7, 7], [2048, 512, 1, 1], (1, 0), "Relu", true);
        conv([1, 3, 224, 224], [64, 3, 7, 7], (2, 3), "Relu", false);
        conv([1, 144, 56, 56], [144, 1, 3, 3], (1, 1), "HardSwish", false);
        conv([1, 240, 14, 14], [240, 1, 5, 5], (1, 2), "Sigmoid", false);
        conv([1, 40, 14, 14], [240, 40, 1, 1], (1, 0), "HardSwish", false);
        conv([1, 40, 28, 28], [240, 40, 1, 1], (1, 0), "Sigmoid", false);
    }
    if only.is_empty() || only == "separable" {
        separables();
    }
    if only.is_empty() || only == "formula" {
        formulas();
    }
}
