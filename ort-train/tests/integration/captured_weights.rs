//! Weights that only bodies of `If`, `Loop` and `Scan` read, or that an `Identity` hands on:
//! losses, updates and exports against formulas.

use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_core::onnx::proto::GraphProto;
use ort_core::onnx::{Weights, save, to_proto};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_core::{Result, dim::Dim};
use ort_ep_cpu as _;
use ort_train::{Loss, Optimizer, Trainer, TrainingOptions};

const X: [f64; 4] = [0.5, -1.25, 2.0, 0.75];
const TARGET: [f64; 4] = [0.25, 1.5, -0.5, 1.0];
const RATE: f64 = 0.0625;
/// The form whose weight is an initializer of the body alone.
const INSIDE: &str = "initializer inside the body";
/// The form whose weight a node hands on, which loading resolves to a second constant.
const COPY: &str = "copy by an Identity";

/// A model that multiplies the columns of `x[2,2]` by a function of the columns of its weight.
struct Form {
    name: &'static str,
    /// The rows of the weight.
    rows: usize,
    build: fn(&mut GraphBuilder, ValueId, &Tensor) -> Result<ValueId>,
    /// The factor of a column, and its derivative by each row.
    factor: fn(&[f64]) -> (f64, Vec<f64>),
}

const FORMS: [Form; 9] = [
    Form { name: "carried state", rows: 1, build: carried, factor: cube },
    Form { name: "scan output", rows: 1, build: scan_output, factor: powers },
    Form { name: "trip count of a shape", rows: 1, build: trips_of_shape, factor: square },
    Form { name: "gathered rows", rows: 3, build: gathered, factor: sum },
    Form { name: "branch", rows: 1, build: branch, factor: sum },
    Form { name: "branch that hands on", rows: 1, build: handed_on, factor: sum },
    Form { name: "scan", rows: 1, build: scan, factor: sum },
    Form { name: INSIDE, rows: 1, build: inside, factor: cube },
    Form { name: COPY, rows: 1, build: copied, factor: square },
];

fn cube(w: &[f64]) -> (f64, Vec<f64>) {
    (w[0].powi(3), vec![3.0 * w[0] * w[0]])
}

fn square(w: &[f64]) -> (f64, Vec<f64>) {
    (w[0] * w[0], vec![2.0 * w[0]])
}

fn powers(w: &[f64]) -> (f64, Vec<f64>) {
    (w[0] + w[0].powi(2) + w[0].powi(3), vec![1.0 + 2.0 * w[0] + 3.0 * w[0] * w[0]])
}

fn sum(w: &[f64]) -> (f64, Vec<f64>) {
    (w.iter().sum(), vec![1.0; w.len()])
}

/// A body whose constants are its own, as the loader makes those that a body captures.
struct Body(GraphBuilder);

impl Body {
    fn new() -> Body {
        Body(GraphBuilder::extend(Graph::new("body")))
    }

    fn inputs(&mut self, names: &[&str]) -> Vec<ValueId> {
        names.iter().map(|name| self.0.typed_input(name, ValueType::Unknown)).collect()
    }

    fn finish(self, attr: &'static str, outputs: &[ValueId]) -> Subgraph {
        Subgraph { attr, graph: self.0.finish_subgraph(outputs), captures: Vec::new() }
    }
}

/// A loop that multiplies what it carries by the weight; the last value and those of all
/// iterations.
fn product(b: &mut GraphBuilder, x: ValueId, w: &Tensor, trips: ValueId) -> Result<Vec<ValueId>> {
    let mut body = Body::new();
    let inner = body.inputs(&["iteration", "goes_on", "v"]);
    let weight = body.0.graph_mut().add_constant("w", w.clone());
    let next = body.0.node("Mul", &[inner[2], weight], &[])?;
    let all = body.0.node("Identity", &[next], &[])?;
    let body = body.finish("body", &[inner[1], next, all]);
    let goes_on = b.constant(Tensor::from_bools(&[], &[true])?);
    b.add(("", "Loop"), &[Some(trips), Some(goes_on), Some(x)], &[], 2, vec![body])
}

/// The weight as a constant of the main graph, of which bodies hold copies that share the memory.
fn captured(b: &mut GraphBuilder, w: &Tensor) {
    b.graph_mut().add_constant("w", w.clone());
}

fn carried(b: &mut GraphBuilder, x: ValueId, w: &Tensor) -> Result<ValueId> {
    captured(b, w);
    inside(b, x, w)
}

fn inside(b: &mut GraphBuilder, x: ValueId, w: &Tensor) -> Result<ValueId> {
    let trips = b.constant(Tensor::scalar(3i64)?);
    product(b, x, w, trips).map(|outputs| outputs[0])
}

fn scan_output(b: &mut GraphBuilder, x: ValueId, w: &Tensor) -> Result<ValueId> {
    captured(b, w);
    let trips = b.constant(Tensor::scalar(3i64)?);
    let all = product(b, x, w, trips)?[1];
    let axes = b.constant(Tensor::from_slice(&[1], &[0i64])?);
    b.node("ReduceSum", &[all, axes], &[("keepdims", Attribute::Int(0))])
}

fn trips_of_shape(b: &mut GraphBuilder, x: ValueId, w: &Tensor) -> Result<ValueId> {
    captured(b, w);
    let shape = b.node("Shape", &[x], &[])?;
    let place = b.constant(Tensor::scalar(1i64)?);
    let trips = b.node("Gather", &[shape, place], &[])?;
    product(b, x, w, trips).map(|outputs| outputs[0])
}

fn gathered(b: &mut GraphBuilder, x: ValueId, w: &Tensor) -> Result<ValueId> {
    captured(b, w);
    let mut body = Body::new();
    let inner = body.inputs(&["iteration", "goes_on", "total", "x"]);
    let table = body.0.graph_mut().add_constant("w", w.clone());
    let row = body.0.node("Gather", &[table, inner[0]], &[])?;
    let part = body.0.node("Mul", &[inner[3], row], &[])?;
    let total = body.0.node("Add", &[inner[2], part], &[])?;
    let same = body.0.node("Identity", &[inner[3]], &[])?;
    let body = body.finish("body", &[inner[1], total, same]);
    let (trips, goes_on) = (b.constant(Tensor::scalar(3i64)?), b.constant(Tensor::from_bools(&[], &[true])?));
    let zero = b.node("Sub", &[x, x], &[])?;
    let inputs = [trips, goes_on, zero, x].map(Some);
    b.add(("", "Loop"), &inputs, &[], 2, vec![body]).map(|outputs| outputs[0])
}

fn branch(b: &mut GraphBuilder, x: ValueId, w: &Tensor) -> Result<ValueId> {
    captured(b, w);
    let mut branches = Vec::new();
    for attr in ["then_branch", "else_branch"] {
        let mut body = Body::new();
        let weight = body.0.graph_mut().add_constant("w", w.clone());
        let mut value = body.0.node("Neg", &[weight], &[])?;
        if attr == "then_branch" {
            value = body.0.node("Neg", &[value], &[])?;
        }
        branches.push(body.finish(attr, &[value]));
    }
    let (total, bound) = (b.node("ReduceMax", &[x], &[("keepdims", Attribute::Int(0))])?, -100.0f32);
    let bound = b.constant(Tensor::scalar(bound)?);
    let is_above = b.node("Greater", &[total, bound], &[])?;
    let factor = b.add(("", "If"), &[Some(is_above)], &[], 1, branches)?[0];
    b.node("Mul", &[x, factor], &[])
}

/// The branch that is taken has the weight itself as its output.
fn handed_on(b: &mut GraphBuilder, x: ValueId, w: &Tensor) -> Result<ValueId> {
    captured(b, w);
    let mut branches = Vec::new();
    for (attr, op) in [("then_branch", "Identity"), ("else_branch", "Neg")] {
        let mut body = Body::new();
        let weight = body.0.graph_mut().add_constant("w", w.clone());
        let value = body.0.node(op, &[weight], &[])?;
        branches.push(body.finish(attr, &[value]));
    }
    let total = b.node("ReduceMax", &[x], &[("keepdims", Attribute::Int(0))])?;
    let bound = b.constant(Tensor::scalar(-100.0f32)?);
    let is_above = b.node("Greater", &[total, bound], &[])?;
    let factor = b.add(("", "If"), &[Some(is_above)], &[], 1, branches)?[0];
    b.node("Mul", &[x, factor], &[])
}

fn scan(b: &mut GraphBuilder, x: ValueId, w: &Tensor) -> Result<ValueId> {
    captured(b, w);
    let mut body = Body::new();
    let row = body.inputs(&["row"]);
    let weight = body.0.graph_mut().add_constant("w", w.clone());
    let flat = body.0.constant(Tensor::from_slice(&[1], &[-1i64])?);
    let weight = body.0.node("Reshape", &[weight, flat], &[])?;
    let scaled = body.0.node("Mul", &[row[0], weight], &[])?;
    let body = body.finish("body", &[scaled]);
    let attrs = [("num_scan_inputs", Attribute::Int(1))];
    b.add(("", "Scan"), &[Some(x)], &attrs, 1, vec![body]).map(|outputs| outputs[0])
}

/// Elements of both signs that are exact in float32.
fn weight(rows: usize) -> Vec<f64> {
    (0..rows * 2).map(|at| 0.75 + 0.125 * at as f64 - if at % 3 == 1 { 1.5 } else { 0.0 }).collect()
}

fn column(w: &[f64], column: usize) -> Vec<f64> {
    w.chunks(2).map(|row| row[column]).collect()
}

/// The loss, the weight after one step of gradient descent, and what the model then makes of `X`.
fn expected(form: &Form, w: &[f64]) -> (f64, Vec<f64>, Vec<f64>) {
    let output = |w: &[f64], at: usize| X[at] * (form.factor)(&column(w, at % 2)).0;
    let errors: Vec<f64> = (0..4).map(|at| output(w, at) - TARGET[at]).collect();
    let loss = errors.iter().map(|error| error * error).sum::<f64>() / 4.0;
    let mut updated = w.to_vec();
    for at in 0..4 {
        let partials = (form.factor)(&column(w, at % 2)).1;
        for (row, partial) in partials.iter().enumerate() {
            updated[row * 2 + at % 2] -= RATE * 2.0 * errors[at] * X[at] * partial / 4.0;
        }
    }
    let outputs = (0..4).map(|at| output(&updated, at)).collect();
    (loss, updated, outputs)
}

fn floats(numbers: &[f64]) -> Vec<f32> {
    numbers.iter().map(|number| *number as f32).collect()
}

/// As exporters write a weight that equals another one.
fn copied(b: &mut GraphBuilder, x: ValueId, w: &Tensor) -> Result<ValueId> {
    let w = b.constant(w.clone());
    let copy = b.node("Identity", &[w], &[])?;
    let product = b.node("Mul", &[x, w], &[])?;
    b.node("Mul", &[product, copy], &[])
}

fn is_near(actual: &[f32], expected: &[f64]) -> bool {
    let near = |(a, e): (&f32, &f64)| (f64::from(*a) - e).abs() <= 1e-6 * e.abs().max(1.0);
    actual.len() == expected.len() && actual.iter().zip(expected).all(near)
}

/// One step of gradient descent.
pub(crate) fn options() -> TrainingOptions {
    let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    TrainingOptions { loss: Loss::Mse, optimizer, learning_rate: RATE as f32, ..TrainingOptions::default() }
}

fn check(form: &Form, model: &Model) -> Result<()> {
    let (name, w) = (form.name, weight(form.rows));
    let (loss, updated, outputs) = expected(form, &w);
    let mut trainer = Trainer::new(model, options())?;
    let parameters = trainer.training_graph().parameters();
    assert_eq!(parameters.len(), 1, "{name}: {parameters:?}");
    let parameter = parameters[0].name.clone();
    let tensor = |numbers: &[f64]| Tensor::from_slice(&[2, 2], &floats(numbers));
    let (x, target): (Value, Value) = (tensor(&X)?.into(), tensor(&TARGET)?.into());
    let actual = trainer.train_step(&[("x", x.clone()), ("target", target)])?;
    assert!(is_near(&[actual], &[loss]), "{name}: the loss is {actual}, expected {loss}");
    let actual: Vec<f32> = trainer.parameter(&parameter)?.to_vec()?;
    assert!(is_near(&actual, &updated), "{name}: the weight is {actual:?}, expected {updated:?}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trained.onnx");
    trainer.export(&path)?;
    let exported = Model::load(&path)?;
    let shape = [form.rows as i64, 2];
    // Copies in the file would be of memory of their own, and be written again.
    let proto = to_proto(exported.graph(), exported.info())?;
    assert_eq!(holders(proto.graph.as_ref().unwrap(), &shape), 1, "{name}: the weight is there once");
    let session = Session::builder(&exported).build()?;
    let actual: Vec<f32> = session.run(&[("x", x)])?[0].1.tensor()?.to_vec()?;
    assert!(is_near(&actual, &outputs), "{name}: exported, it gives {actual:?}, expected {outputs:?}");
    Ok(())
}

/// How many initializers of a graph and of those inside it have this shape.
fn holders(graph: &GraphProto, shape: &[i64]) -> usize {
    let own = graph.initializer.iter().filter(|tensor| tensor.dims == shape).count();
    let bodies = graph.node.iter().flat_map(|node| &node.attribute).filter_map(|given| given.g.as_deref());
    own + bodies.map(|body| holders(body, shape)).sum::<usize>()
}

fn model_of(form: &Form) -> Result<Model> {
    let w = Tensor::from_slice(&[form.rows, 2], &floats(&weight(form.rows)))?;
    let mut builder = GraphBuilder::new(form.name);
    let x = builder.typed_input("x", ValueType::tensor(DType::F32, Some(vec![Dim::constant(2); 2])));
    let y = (form.build)(&mut builder, x, &w)?;
    Ok(Model::from_graph(builder.finish(&[y])?))
}

/// The models by name: each takes `x[2,2]` and trains on a `target[2,2]`.
pub(crate) fn models() -> Result<Vec<(&'static str, Model)>> {
    FORMS.iter().map(|form| Ok((form.name, model_of(form)?))).collect()
}

#[test]
fn weights_that_only_bodies_read_are_trained() -> Result<()> {
    for form in &FORMS {
        let model = model_of(form)?;
        if form.name != COPY {
            check(form, &model)?;
        }
        // As a file: bodies name the weight of the main graph, or have it as an initializer of
        // their own.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        match form.name {
            INSIDE | COPY => save(model.graph(), model.info(), &path, &Weights::Inside)?,
            _ => Trainer::new(&model, options())?.export(&path)?,
        }
        check(form, &Model::load(&path)?)?;
    }
    Ok(())
}
