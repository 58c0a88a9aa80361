//! A batch that a memory limit cannot hold at once runs in parts: with the bits of the whole,
//! within the limit, and only where items are proved to be computed apart.

use crate::support::{self, axis, ints};
use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::plan::MemoryKind;
use ort_runtime::{
    Budget, DType, ErrorKind, Model, Result, RunOptions, Session, Tensor, TensorBuffer, Value,
};
use proptest::prelude::*;

type Inputs = Vec<(&'static str, Value)>;

/// A tensor of fractions whose sums depend on the order of their terms.
fn fractions(shape: &[usize], seed: usize) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let element = |index: usize| ((index + 1) * (seed + 7) * 7919 % 1009) as f32 / 331.0 - 1.5;
    Tensor::from_vec(shape, (0..count).map(element).collect::<Vec<f32>>())
}

fn weight(b: &mut GraphBuilder, shape: &[usize], seed: usize) -> Result<ValueId> {
    Ok(b.constant(fractions(shape, seed)?))
}

/// A convolution, a depthwise one and a pointwise one with an addend, a pool, and a classifier.
fn image_model() -> Result<Graph> {
    let mut b = GraphBuilder::new("images");
    let x = b.input("x", DType::F32, &["n", "3", "12", "12"]);
    let pads = ("pads", Attribute::Ints(vec![1, 1, 1, 1]));
    let filters = weight(&mut b, &[16, 3, 3, 3], 1)?;
    let first = b.node("Conv", &[x, filters], std::slice::from_ref(&pads))?;
    let first = b.node("Relu", &[first], &[])?;
    let filters = weight(&mut b, &[16, 1, 3, 3], 2)?;
    let apart = b.node("Conv", &[first, filters], &[pads, ("group", Attribute::Int(16))])?;
    let filters = weight(&mut b, &[16, 16, 1, 1], 3)?;
    let point = b.node("Conv", &[apart, filters], &[])?;
    let sum = b.node("Add", &[point, first], &[])?;
    let sum = b.node("HardSwish", &[sum], &[])?;
    let mean = b.node("GlobalAveragePool", &[sum], &[])?;
    let flat = b.node("Flatten", &[mean], &[])?;
    let (classes, bias) = (weight(&mut b, &[16, 10], 4)?, weight(&mut b, &[10], 5)?);
    let classes = b.node("Gemm", &[flat, classes, bias], &[])?;
    let classes = b.node("Softmax", &[classes], &axis(1))?;
    b.finish(&[classes, first])
}

/// Embedded words, one layer of attention with a mask, and a normalization.
fn text_model() -> Result<Graph> {
    let mut b = GraphBuilder::new("words");
    let words = b.input("words", DType::I64, &["n", "s"]);
    let bias = b.input("bias", DType::F32, &["n", "1", "1", "s"]);
    let table = weight(&mut b, &[20, 32], 1)?;
    let x = b.node("Gather", &[table, words], &[])?;
    let to_heads = b.constant(ints(&[0, 0, 4, 8])?);
    let turn = |order: &[i64]| [("perm", Attribute::Ints(order.to_vec()))];
    let mut heads = Vec::new();
    for (seed, order) in [(2, [0, 2, 1, 3]), (3, [0, 2, 3, 1]), (4, [0, 2, 1, 3])] {
        let by = weight(&mut b, &[32, 32], seed)?;
        let projected = b.node("MatMul", &[x, by], &[])?;
        let parts = b.node("Reshape", &[projected, to_heads], &[])?;
        heads.push(b.node("Transpose", &[parts], &turn(&order))?);
    }
    let scores = b.node("MatMul", &[heads[0], heads[1]], &[])?;
    let scores = b.node("Add", &[scores, bias], &[])?;
    let weights = b.node("Softmax", &[scores], &axis(-1))?;
    let mixed = b.node("MatMul", &[weights, heads[2]], &[])?;
    let mixed = b.node("Transpose", &[mixed], &turn(&[0, 2, 1, 3]))?;
    let shape = b.node("Shape", &[x], &[])?;
    let mixed = b.node("Reshape", &[mixed, shape], &[])?;
    let sum = b.node("Add", &[mixed, x], &[])?;
    let (scale, shift) = (weight(&mut b, &[32], 6)?, weight(&mut b, &[32], 7)?);
    let normal = b.node("LayerNormalization", &[sum, scale, shift], &[])?;
    b.finish(&[normal])
}

/// A recurrent layer: the batch is the second axis of what it reads, the third of what it writes.
fn recurrent_model() -> Result<Graph> {
    let mut b = GraphBuilder::new("steps");
    let x = b.input("x", DType::F32, &["5", "n", "7"]);
    let (w, r) = (weight(&mut b, &[1, 24, 7], 1)?, weight(&mut b, &[1, 24, 6], 2)?);
    let hidden = [("hidden_size", Attribute::Int(6))];
    let outputs = b.add(("", "LSTM"), &[Some(x), Some(w), Some(r)], &hidden, 3, Vec::new())?;
    let axes = b.constant(ints(&[1])?);
    let steps = b.node("Squeeze", &[outputs[0], axes], &[])?;
    b.finish(&[steps, outputs[2]])
}

/// A product with a matrix that is no constant, which a single row computes in another order.
fn unpacked_model() -> Result<Graph> {
    let mut b = GraphBuilder::new("unpacked");
    let x = b.input("x", DType::F32, &["n", "500"]);
    let y = b.input("y", DType::F32, &["500", "9"]);
    let product = b.node("MatMul", &[x, y], &[])?;
    let product = b.node("Tanh", &[product], &[])?;
    b.finish(&[product])
}

/// Products with constants whose sums are longer than a block, of many columns, a few and one.
fn packed_model() -> Result<Graph> {
    let mut b = GraphBuilder::new("packed");
    let x = b.input("x", DType::F32, &["n", "500"]);
    let mut outputs = Vec::new();
    for (seed, columns) in [70, 9, 1].into_iter().enumerate() {
        let by = weight(&mut b, &[500, columns], seed)?;
        outputs.push(b.node("MatMul", &[x, by], &[])?);
        let by = weight(&mut b, &[columns, 500], seed + 3)?;
        outputs.push(b.node("Gemm", &[x, by], &[("transB", Attribute::Int(1))])?);
    }
    let turned = b.node("Transpose", &[x], &[])?;
    let by = weight(&mut b, &[500, 40], 6)?;
    outputs.push(b.node("Gemm", &[turned, by], &[("transA", Attribute::Int(1))])?);
    b.finish(&outputs)
}

fn long_rows(n: usize) -> Result<Inputs> {
    Ok(vec![("x", fractions(&[n, 500], 3)?.into())])
}

/// Rows of a flat mask, which exporters pick by the number of the item.
fn numbered_model() -> Result<Graph> {
    let mut b = GraphBuilder::new("numbered");
    let mask = b.input("mask", DType::F32, &["n", "s"]);
    let [zero, one] = [0i64, 1].map(|value| Tensor::scalar(value).map(|value| b.constant(value)));
    let (zero, one) = (zero?, one?);
    let shape = b.node("Shape", &[mask], &[])?;
    let (count, width) = (b.node("Gather", &[shape, zero], &[])?, b.node("Gather", &[shape, one], &[])?);
    let places = b.node("Range", &[zero, count, one], &[])?;
    let axes = b.constant(ints(&[1])?);
    let places = b.node("Unsqueeze", &[places, axes], &[])?;
    let columns = b.node("Range", &[zero, width, one], &[])?;
    let begins = b.node("Mul", &[places, width], &[])?;
    let index = b.node("Add", &[columns, begins], &[])?;
    let flat = b.constant(ints(&[-1])?);
    let flat = b.node("Reshape", &[mask, flat], &[])?;
    let picked = b.node("Gather", &[flat, index], &[])?;
    let result = b.node("Softmax", &[picked], &axis(1))?;
    b.finish(&[result])
}

fn masks(n: usize) -> Result<Inputs> {
    Ok(vec![("mask", fractions(&[n, 30], 5)?.into())])
}

fn images(n: usize) -> Result<Inputs> {
    Ok(vec![("x", fractions(&[n, 3, 12, 12], 3)?.into())])
}

fn sentences(n: usize) -> Result<Inputs> {
    let words = (0..n * 9).map(|index| (index * 7 % 20) as i64).collect::<Vec<i64>>();
    let bias = fractions(&[n, 1, 1, 9], 2)?;
    Ok(vec![("words", Tensor::from_vec(&[n, 9], words)?.into()), ("bias", bias.into())])
}

fn steps(n: usize) -> Result<Inputs> {
    Ok(vec![("x", fractions(&[5, n, 7], 3)?.into())])
}

fn factors(n: usize) -> Result<Inputs> {
    Ok(vec![("x", fractions(&[n, 500], 3)?.into()), ("y", fractions(&[500, 9], 4)?.into())])
}

fn bits(session: &Session, inputs: &[(&'static str, Value)]) -> Result<Vec<Vec<u8>>> {
    let outputs = session.run(inputs)?;
    outputs.iter().map(|(_, value)| Ok(value.tensor()?.view().bytes()?.to_vec())).collect()
}

/// Runs in two parts, then in three, and so on, each with a limit that is a byte too low for fewer:
/// all have the bits of the whole and keep to the limit, and what is refused at last says exactly
/// what would do. Returns the parts of the last that ran.
fn run_in_ever_more_parts(
    graph: &Graph,
    inputs: &[(&'static str, Value)],
    threads: usize,
) -> Result<Vec<usize>> {
    let model = Model::from_graph(graph.clone());
    let whole = Session::builder(&model).threads(threads).build()?;
    let expected = bits(&whole, inputs)?;
    let packed = whole.memory().packed;
    let mut enough = whole.plan_for_inputs(inputs)?.planned_bytes + packed;
    let mut parts = Vec::new();
    loop {
        let budget = Budget::new(Some(enough - 1));
        let session = Session::builder(&model).threads(threads).budget(&budget).build()?;
        let Some(split) = session.plan_for_inputs(inputs)?.batch_split else {
            let problem = session.run(inputs).expect_err("nothing less suffices");
            assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{problem}");
            assert_eq!(problem.shortage().map(|shortage| shortage.sufficient_limit()), Some(enough));
            assert_eq!(budget.peak(), packed, "nothing ran");
            return Ok(parts);
        };
        for _ in 0..2 {
            assert!(bits(&session, inputs)? == expected, "{:?} on {threads} threads\n{graph}", split.parts);
        }
        assert!(budget.peak() < enough, "{} bytes of {enough}", budget.peak());
        assert!(split.parts.len() > parts.len(), "{:?} after {parts:?}", split.parts);
        enough = split.planned_bytes + packed;
        parts = split.parts;
    }
}

#[test]
fn parts_have_the_bits_of_the_whole() -> Result<()> {
    type Case = (Result<Graph>, fn(usize) -> Result<Inputs>, &'static [usize], usize);
    let cases: [Case; 6] = [
        (image_model(), images, &[2, 5, 8], 1),
        (text_model(), sentences, &[2, 5, 8], 1),
        (recurrent_model(), steps, &[3, 8], 1),
        (unpacked_model(), factors, &[4, 7], 2),
        (numbered_model(), masks, &[2, 6], 1),
        (packed_model(), long_rows, &[2, 7], 1),
    ];
    for (graph, inputs, counts, least) in cases {
        let graph = graph?;
        for &count in counts {
            for threads in [1, 2] {
                let parts = run_in_ever_more_parts(&graph, &inputs(count)?, threads)?;
                assert_eq!(parts.iter().sum::<usize>(), count, "{graph}");
                assert!(parts.iter().all(|part| *part >= least), "{parts:?}");
                assert_eq!(parts.len(), count / least, "at last there are as many parts as may be");
            }
        }
    }
    Ok(())
}

/// Kernels one by one: the sizes of an item, of the weights, and attributes.
#[test]
fn operators_have_the_bits_of_the_whole() -> Result<()> {
    type Case = (
        &'static str,
        &'static [usize],
        &'static [&'static [usize]],
        &'static [(&'static str, &'static [i64])],
    );
    let cases: &[Case] = &[
        ("Conv", &[32, 14, 14], &[&[32, 32, 3, 3]], &[]),
        ("Conv", &[3, 30, 30], &[&[8, 3, 5, 5]], &[("strides", &[2, 2])]),
        ("Conv", &[8, 13, 13], &[&[12, 4, 3, 3]], &[("dilations", &[2, 2])]),
        ("Conv", &[24, 9, 9], &[&[24, 24, 1, 1], &[24]], &[]),
        ("Conv", &[6, 50], &[&[7, 6, 3]], &[]),
        ("ConvTranspose", &[3, 7, 7], &[&[3, 4, 3, 3]], &[("strides", &[2, 2])]),
        ("MaxPool", &[3, 19, 19], &[], &[("kernel_shape", &[3, 3])]),
        ("AveragePool", &[3, 19, 19], &[], &[("kernel_shape", &[3, 3])]),
        ("LpPool", &[3, 19, 19], &[], &[("kernel_shape", &[2, 2])]),
        ("LRN", &[9, 11, 11], &[], &[("size", &[3])]),
        ("BatchNormalization", &[5, 11, 11], &[&[5], &[5], &[5], &[5]], &[]),
        ("InstanceNormalization", &[6, 13, 7], &[&[6], &[6]], &[]),
        ("GroupNormalization", &[6, 13, 7], &[&[6], &[6]], &[("num_groups", &[3])]),
        ("LayerNormalization", &[9, 37], &[&[37], &[37]], &[]),
        ("RMSNormalization", &[9, 37], &[&[37]], &[]),
        ("LpNormalization", &[9, 37], &[], &[]),
        ("LogSoftmax", &[9, 37], &[], &[("axis", &[1])]),
        ("DepthToSpace", &[8, 7, 7], &[], &[("blocksize", &[2])]),
        ("Trilu", &[17, 17], &[], &[]),
        ("MatMul", &[13, 37], &[&[37, 19]], &[]),
    ];
    for (op, item, weights, attrs) in cases {
        let mut b = GraphBuilder::new(op);
        let sizes: Vec<String> = item.iter().map(ToString::to_string).collect();
        let shape: Vec<&str> = std::iter::once("n").chain(sizes.iter().map(String::as_str)).collect();
        let mut given = vec![b.input("x", DType::F32, &shape)];
        for (seed, shape) in weights.iter().enumerate() {
            // Variances are above 0.
            let tensor = fractions(shape, seed)?;
            let positive: Vec<f32> =
                tensor.to_vec::<f32>()?.into_iter().map(|element| element.abs() + 0.1).collect();
            let is_variance = *op == "BatchNormalization" && seed == 3;
            given.push(b.constant(if is_variance { Tensor::from_vec(shape, positive)? } else { tensor }));
        }
        let mut given_attrs: Vec<(&str, Attribute)> = Vec::new();
        for (name, values) in attrs.iter() {
            let single = ["size", "num_groups", "axis", "blocksize"].contains(name);
            given_attrs.push((
                name,
                if single { Attribute::Int(values[0]) } else { Attribute::Ints(values.to_vec()) },
            ));
        }
        if let (&"Conv", [[_, channels, ..], ..]) = (op, weights) {
            given_attrs.push(("group", Attribute::Int((item[0] / channels) as i64)));
        }
        let value = b.node(op, &given, &given_attrs)?;
        // One number for each item, so that the values before it are most of the memory.
        let axes: Vec<i64> = (1..=item.len() as i64).collect();
        let axes = b.constant(ints(&axes)?);
        let sum = b.node("ReduceSum", &[value, axes], &[("keepdims", Attribute::Int(0))])?;
        let graph = b.finish(&[sum])?;
        let shape: Vec<usize> = std::iter::once(5).chain(item.iter().copied()).collect();
        let inputs = vec![("x", fractions(&shape, 11)?.into())];
        for threads in [1, 2] {
            let parts = run_in_ever_more_parts(&graph, &inputs, threads)?;
            assert!(parts.len() > 1, "{op} {item:?} runs in {parts:?}");
        }
    }
    Ok(())
}

#[test]
fn it_may_be_switched_off_and_is_not_for_bindings() -> Result<()> {
    let model = Model::from_graph(image_model()?);
    let inputs = images(8)?;
    let whole = Session::builder(&model).threads(1).build()?;
    let enough = whole.plan_for_inputs(&inputs)?.planned_bytes + whole.memory().packed;
    let builder = Session::builder(&model).threads(1).memory_limit(enough - 1);
    assert!(builder.clone().build()?.run(&inputs).is_ok());
    let session = builder.clone().batch_split(false).build()?;
    assert_eq!(session.plan_for_inputs(&inputs)?.batch_split, None);
    let problem = session.run(&inputs).expect_err("it is not split");
    assert_eq!(problem.shortage().map(|shortage| shortage.sufficient_limit()), Some(enough));

    // The outputs are the caller's, so that the limit is for the rest.
    let outputs = [("Softmax_10.0", vec![8, 10]), ("Relu_1.0", vec![8, 16, 12, 12])];
    let session = builder.memory_limit(whole.memory().packed + 1000).build()?;
    let names: Vec<String> = session.outputs().into_iter().map(|spec| spec.name).collect();
    let mut binding = session.io_binding();
    binding.bind_input("x", inputs[0].1.clone())?;
    for (name, (_, shape)) in names.iter().zip(outputs) {
        binding.bind_output(name, TensorBuffer::new(DType::F32, &shape)?)?;
    }
    let problem =
        session.run_with_binding(&mut binding, &RunOptions::default()).expect_err("it does not fit");
    assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{problem}");
    Ok(())
}

#[test]
fn a_refusal_says_which_node_mixes_items() -> Result<()> {
    let mut b = GraphBuilder::new("mixed");
    let x = b.input("x", DType::F32, &["n", "100"]);
    let sums = b.node("Softmax", &[x], &axis(0))?;
    let sums = b.node("Transpose", &[sums], &[])?;
    let model = Model::from_graph(b.finish(&[sums])?);
    let session = Session::builder(&model).threads(1).memory_limit(5000).build()?;
    let inputs = [("x", fractions(&[10, 100], 0)?.into())];
    let report = session.plan_for_inputs(&inputs)?;
    let problem = session.run(&inputs).expect_err("it does not fit");
    for text in [report.unsplit.unwrap_or_default(), format!("{problem:?}")] {
        assert!(
            text.contains(
                "'n' is not split: node 'Softmax_0' (Softmax): it goes along the axis of the items"
            ),
            "{text}"
        );
    }
    // A single item has no parts, and the advice does not speak of any.
    let report = session.plan(&[("n", 1)])?;
    assert_eq!((report.batch_split, report.unsplit), (None, None));
    Ok(())
}

/// Products whose weights lie in a file.
fn layers() -> Result<(tempfile::TempDir, Model)> {
    let mut b = GraphBuilder::new("layers");
    let mut value = b.input("x", DType::F32, &["n", "64"]);
    for (index, sizes) in [[64, 96], [96, 200], [200, 40], [40, 8]].into_iter().enumerate() {
        let by = weight(&mut b, &sizes, index)?;
        let product = b.node("MatMul", &[value, by], &[])?;
        value = b.node("Sigmoid", &[product], &[])?;
    }
    support::mapped(&b.finish(&[value])?)
}

/// A batch is split before weights are streamed; where not even single items leave room for all
/// weights, both are done.
#[test]
fn it_comes_before_streaming() -> Result<()> {
    let (_folder, model) = layers()?;
    let inputs = vec![("x", Value::from(fractions(&[50, 64], 1)?))];
    let whole = Session::builder(&model).threads(1).build()?;
    let expected = bits(&whole, &inputs)?;
    let (all, plan) = (whole.memory().packed, whole.plan_for_inputs(&inputs)?.planned_bytes);
    let limited = |limit: usize| -> Result<(bool, usize)> {
        let budget = Budget::new(Some(limit));
        let session = Session::builder(&model).threads(1).budget(&budget).build()?;
        let report = session.plan_for_inputs(&inputs)?;
        assert_eq!(bits(&session, &inputs)?, expected, "with {limit} bytes");
        assert!(budget.peak() <= limit);
        let streamed = report.kinds.iter().find(|kind| kind.kind == MemoryKind::WeightsStreamed);
        Ok((report.batch_split.is_some(), streamed.map_or(0, |kind| kind.bytes)))
    };
    assert_eq!(limited(all + plan)?, (false, 0));
    assert_eq!(limited(all + plan - 1)?, (true, 0), "parts leave room for all weights");
    let session = Session::builder(&model).threads(1).memory_limit(1000).build()?;
    let least =
        session.run(&inputs).expect_err("too little").shortage().map(|short| short.sufficient_limit());
    let (split, streamed) = limited(least.expect("a number"))?;
    assert!(split && streamed > 0, "{streamed} bytes are streamed");
    Ok(())
}

/// One step of a random graph whose values are [n, 4, 6], or [n, 6, 4] turned.
type Choice = (u8, u16, u16);

fn grow(choices: &[Choice]) -> Result<Graph> {
    let mut b = GraphBuilder::new("random");
    let x = b.input("x", DType::F32, &["n", "4", "6"]);
    let y = b.input("y", DType::F32, &["n", "4", "6"]);
    let row = b.input("row", DType::F32, &["4", "6"]);
    let mut values = vec![x, y];
    for (index, &(kind, first, second)) in choices.iter().enumerate() {
        let of = |place: u16| values[place as usize % values.len()];
        let (a, c) = (of(first), of(second));
        let value = match kind % 12 {
            0 => b.node("Tanh", &[a], &[])?,
            1 => b.node("Add", &[a, c], &[])?,
            2 => b.node("Mul", &[a, row], &[])?,
            3 => b.node("Softmax", &[a], &axis(1 + i64::from(second % 2)))?,
            4 => {
                let by = weight(&mut b, &[6, 6], index)?;
                b.node("MatMul", &[a, by], &[])?
            }
            5 => {
                let turned = b.node("Transpose", &[c], &[("perm", Attribute::Ints(vec![0, 2, 1]))])?;
                let square = b.node("MatMul", &[a, turned], &[])?;
                b.node("MatMul", &[square, a], &[])?
            }
            6 => {
                let axes = b.constant(ints(&[1 + i64::from(second % 2)])?);
                let mean = b.node("ReduceMean", &[a, axes], &[])?;
                b.node("Sub", &[a, mean], &[])?
            }
            7 => {
                let (scale, shift) = (weight(&mut b, &[6], index)?, weight(&mut b, &[6], index + 1)?);
                b.node("LayerNormalization", &[a, scale, shift], &[])?
            }
            8 => {
                let both = b.node("Concat", &[a, c], &axis(1))?;
                let [from, to, axes] =
                    [[2], [6], [1]].map(|bound| ints(&bound).map(|bound| b.constant(bound)));
                b.node("Slice", &[both, from?, to?, axes?], &[])?
            }
            9 => {
                let flat = b.constant(ints(&[-1, 6])?);
                let rows = b.node("Reshape", &[a, flat], &[])?;
                let rows = b.node("Sigmoid", &[rows], &[])?;
                let back = b.constant(ints(&[-1, 4, 6])?);
                b.node("Reshape", &[rows, back], &[])?
            }
            10 => {
                let order = b.constant(ints(&[3, 1, 0, 2])?);
                b.node("Gather", &[a, order], &axis(1))?
            }
            _ => {
                let shape = b.node("Shape", &[a], &[])?;
                let spread = b.node("Expand", &[row, shape], &[])?;
                b.node("Max", &[a, spread], &[])?
            }
        };
        values.push(value);
    }
    let last = values[values.len() - 1];
    b.finish(&[last, values[values.len() / 2 + 1]])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_graphs_have_the_same_bits_in_parts(
        choices in prop::collection::vec(any::<Choice>(), 1..16),
        n in 2usize..10,
    ) {
        let graph = grow(&choices).expect("a graph");
        let inputs = vec![
            ("x", fractions(&[n, 4, 6], 1).expect("a tensor").into()),
            ("y", fractions(&[n, 4, 6], 2).expect("a tensor").into()),
            ("row", fractions(&[4, 6], 3).expect("a tensor").into()),
        ];
        let proof = ort_runtime::plan::batch_parallel(&graph);
        prop_assert!(proof.is_ok(), "{:?}\n{}", proof, graph);
        run_in_ever_more_parts(&graph, &inputs, 1).expect("runs in parts");
    }
}
