//! What a calibration sees of a run.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use std::collections::BTreeMap;

use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Capture, GraphBuilder, Subgraph, ValueType};
use ort_core::rewrite::Level;
use ort_core::session::{Model, Session, SessionOptions};
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;
use ort_quant::{Calibration, Extremes, GridOptions, Observer, QuantType, RangeRule, Wanted};

fn tensor(values: &[f32], shape: &[usize]) -> Value {
    Value::Tensor(Tensor::from_slice(shape, values).unwrap())
}

/// A model, and the names of its values: `relu(x + 1)`, reshaped and concatenated with itself.
fn model() -> (Model, [String; 4]) {
    let mut builder = GraphBuilder::new("small");
    let x = builder.input("x", DType::F32, &["n", "2"]);
    let one = builder.constant(Tensor::from_slice(&[1], &[1.0_f32]).unwrap());
    let sum = builder.node("Add", &[x, one], &[]).unwrap();
    let positive = builder.node("Relu", &[sum], &[]).unwrap();
    let shape = builder.constant(Tensor::from_slice(&[1], &[-1_i64]).unwrap());
    let flat = builder.node("Reshape", &[positive, shape], &[]).unwrap();
    let both = builder.node("Concat", &[flat, flat], &[("axis", Attribute::Int(0))]).unwrap();
    let names = [sum, positive, flat, both].map(|id| builder.graph().value(id).name.to_string());
    (Model::from_graph(builder.finish(&[both]).unwrap()), names)
}

fn observed(model: &Model, samples: &[Value], session: &Session) -> BTreeMap<String, Observer> {
    let graph = model.graph();
    let names = graph.value_ids().map(|id| graph.value(id).name.to_string());
    let calibration = Calibration::new(names, Wanted { histogram: true, moments: true });
    for sample in samples {
        let seen = calibration.run(session, &[("x", sample.clone())]).unwrap();
        let plain = session.run(&[("x", sample.clone())]).unwrap();
        assert_eq!(
            seen[0].1.tensor().unwrap().bytes().unwrap(),
            plain[0].1.tensor().unwrap().bytes().unwrap()
        );
    }
    calibration.into_observers()
}

#[test]
fn inputs_and_results_are_seen_in_every_memory() {
    let (model, [sum, positive, flat, both]) = model();
    let samples = [tensor(&[-3.0, 2.0], &[1, 2]), tensor(&[0.5, -0.25, 7.0, -9.0], &[2, 2])];
    for planned in [true, false] {
        let options = SessionOptions { enable_mem_pattern: planned, ..SessionOptions::default() };
        let session = Calibration::session(Session::builder(&model).options(&options)).unwrap();
        let observers = observed(&model, &samples, &session);
        let extremes = |name: &str| observers[name].extremes().map(|Extremes { low, high }| (low, high));
        assert_eq!(extremes("x"), Some((-9.0, 7.0)));
        assert_eq!(extremes(&sum), Some((-8.0, 8.0)));
        assert_eq!(extremes(&positive), Some((0.0, 8.0)));
        assert_eq!(extremes(&flat), Some((0.0, 8.0)), "a view");
        assert_eq!(extremes(&both), Some((0.0, 8.0)), "an output");
        assert_eq!(observers[&both].counts().elements, 12);
        assert_eq!(observers["constant_1"].counts().elements, 0, "a constant");
        let options = GridOptions::new(QuantType::UInt8, false);
        let range = RangeRule::Average.range(&observers["x"], &options).unwrap().unwrap();
        assert_eq!((range.low, range.high), (-6.0, 4.5));
    }
}

#[test]
fn a_calibration_takes_no_more_memory_than_a_run() {
    let (model, _) = model();
    let session = Calibration::session(Session::builder(&model)).unwrap();
    let sample = tensor(&vec![1.0; 2 << 16], &[1 << 16, 2]);
    let plain = session.plan_for_inputs(&[("x", sample.clone())]).unwrap().peak_bytes.unwrap();
    observed(&model, std::slice::from_ref(&sample), &session);
    let held = session.memory().total();
    assert!(held <= 2 * plain + (1 << 20), "{held} of {plain}");
}

/// The iterations of a loop are parts of one observation of the values in its body.
#[test]
fn values_of_subgraphs_are_seen_each_time() {
    let mut body = GraphBuilder::new("body");
    body.input("number", DType::I64, &[]);
    let holds = body.input("holds", DType::Bool, &[]);
    let carried = body.typed_input("carried", ValueType::Unknown);
    let step = body.graph_mut().add_value("step", ValueType::Unknown);
    let next = body.node("Add", &[carried, step], &[]).unwrap();
    let name = body.graph().value(next).name.to_string();
    let body = body.finish_subgraph(&[holds, next]);
    let mut builder = GraphBuilder::new("outer");
    let x = builder.input("x", DType::F32, &["1"]);
    let count = builder.constant(Tensor::scalar(3_i64).unwrap());
    let captures = vec![Capture { outer: x, inner: step }];
    let body = Subgraph { attr: "body", graph: body, captures };
    let outputs = builder.add(("", "Loop"), &[Some(count), None, Some(x)], &[], 1, vec![body]).unwrap();
    let model = Model::from_graph(builder.finish(&outputs).unwrap());
    let calibration = Calibration::new([&*name, "x", "carried"], Wanted::default());
    let session = Calibration::session(Session::builder(&model)).unwrap();
    calibration.run(&session, &[("x", tensor(&[2.0], &[1]))]).unwrap();
    let observers = calibration.into_observers();
    assert_eq!(observers[&name].extremes(), Some(Extremes { low: 4.0, high: 8.0 }));
    assert_eq!(observers[&name].mean_extremes(), Some((4.0, 8.0)));
    assert_eq!(observers["carried"].extremes(), Some(Extremes { low: 2.0, high: 6.0 }));
    assert_eq!((observers["x"].counts().elements, observers["carried"].counts().elements), (1, 3));
}

/// A memory limit splits the batch of a sample. Its parts are one observation.
#[test]
fn a_split_batch_is_one_observation() {
    let numbers = |count: usize| (0..count).map(|step| ((step * 37 % 101) as f32) - 50.0).collect::<Vec<_>>();
    let mut builder = GraphBuilder::new("wide");
    let x = builder.input("x", DType::F32, &["n", "16"]);
    let up = builder.constant(Tensor::from_slice(&[16, 1024], &numbers(16 << 10)).unwrap());
    let down = builder.constant(Tensor::from_slice(&[1024, 4], &numbers(4 << 10)).unwrap());
    let wide = builder.node("MatMul", &[x, up], &[]).unwrap();
    let name = builder.graph().value(wide).name.to_string();
    let positive = builder.node("Relu", &[wide], &[]).unwrap();
    let y = builder.node("MatMul", &[positive, down], &[]).unwrap();
    let model = Model::from_graph(builder.finish(&[y]).unwrap());
    let samples = [256, 64].map(|rows: usize| tensor(&numbers(16 * rows), &[rows, 16]));
    let whole = Calibration::session(Session::builder(&model)).unwrap();
    let limited = Calibration::session(Session::builder(&model).memory_limit(600 << 10)).unwrap();
    let plan = limited.plan_for_inputs(&[("x", samples[0].clone())]).unwrap();
    assert!(plan.batch_split.is_some(), "{:?}", plan.peak_bytes);
    let (one, parts) = (observed(&model, &samples, &whole), observed(&model, &samples, &limited));
    assert_eq!(one[&name].counts(), parts[&name].counts());
    assert_eq!(one[&name].histogram(), parts[&name].histogram());
    assert_eq!(one[&name].mean_extremes(), parts[&name].mean_extremes());
}

/// Options that a caller gives the builder, such as an optimization level, do not fuse values away.
#[test]
fn each_value_is_seen_whatever_the_options_of_the_session() {
    let mut builder = GraphBuilder::new("chain");
    let x = builder.input("x", DType::F32, &["n", "8"]);
    let weight = builder.constant(Tensor::from_slice(&[8, 8], &[0.25_f32; 64]).unwrap());
    let bias = builder.constant(Tensor::from_slice(&[8], &[1.0_f32; 8]).unwrap());
    let product = builder.node("MatMul", &[x, weight], &[]).unwrap();
    let sum = builder.node("Add", &[product, bias], &[]).unwrap();
    let positive = builder.node("Relu", &[sum], &[]).unwrap();
    let root = builder.node("Sqrt", &[positive], &[]).unwrap();
    let names = [product, sum, positive, root].map(|id| builder.graph().value(id).name.to_string());
    let model = Model::from_graph(builder.finish(&[root]).unwrap());
    let options = SessionOptions::default();
    let builders = [
        Session::builder(&model).options(&options),
        Session::builder(&model).opt_level(Level::All).options(&options),
        Session::builder(&model).options(&options).opt_level(Level::Extended),
    ];
    for builder in builders {
        let session = Calibration::session(builder).unwrap();
        let observers = observed(&model, &[tensor(&[1.0; 16], &[2, 8])], &session);
        for name in &names {
            assert_eq!(observers[name].counts().elements, 16, "{name}");
        }
    }
}
