//! Embedding bags whose rows a sequence holds, as exporters write them: losses and updates against
//! formulas.

use ort_core::Result;
use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_core::session::Model;
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;
use ort_train::{Loss, Optimizer, Trainer, TrainingOptions};

/// Which rows of the table are in the bags, and where bags begin and end.
const PLACES: [i64; 6] = [2, 0, 1, 1, 3, 2];
const STARTS: [i64; 3] = [0, 2, 3];
const ENDS: [i64; 3] = [2, 3, 6];
const TABLE: [f64; 8] = [0.5, -1.25, 2.0, 0.75, -0.5, 1.5, 0.25, -1.0];
const TARGET: [f64; 6] = [0.25, 1.5, -0.5, 1.0, 0.0, -2.0];
const RATE: f64 = 0.125;

/// What `w` is read by, and the rows that bags are slices of.
struct Bags<'b> {
    b: &'b mut GraphBuilder,
    rows: ValueId,
}

/// A way to write the sums of bags; the shape of the result, in which sums are in order.
struct Form {
    name: &'static str,
    shape: [i64; 2],
    build: fn(&mut Bags<'_>) -> Result<ValueId>,
}

const FORMS: [Form; 8] = [
    Form { name: "map, rows joined", shape: [3, 2], build: |bags| map(bags, 1, true, (0, 0)) },
    Form { name: "map, rows stacked", shape: [3, 2], build: |bags| map(bags, 0, true, (0, 1)) },
    Form { name: "map, rows side by side", shape: [1, 6], build: |bags| map(bags, 1, true, (1, 0)) },
    Form { name: "map, positions without axis", shape: [3, 2], build: |bags| map(bags, 1, false, (0, 0)) },
    Form { name: "loop that appends", shape: [3, 2], build: |bags| appended(bags, sum_of) },
    Form { name: "loop, slices without axes", shape: [3, 2], build: |bags| appended(bags, sum_without_axes) },
    Form { name: "loop, axes of the run", shape: [3, 2], build: |bags| appended(bags, sum_along_given) },
    Form { name: "map, element by element", shape: [3, 2], build: one_by_one },
];

fn ints(b: &mut GraphBuilder, numbers: &[i64]) -> Result<ValueId> {
    Ok(b.constant(Tensor::from_slice(&[numbers.len()], numbers)?))
}

/// The sum of the rows from one place to another in a body.
fn sum_of(body: &mut GraphBuilder, rows: ValueId, ends: [ValueId; 2], keeps: i64) -> Result<ValueId> {
    let (minus, zero) = (ints(body, &[-1])?, ints(body, &[0])?);
    let [start, end] = ends;
    let [start, end] =
        [body.node("Reshape", &[start, minus], &[])?, body.node("Reshape", &[end, minus], &[])?];
    let bag = body.node("Slice", &[rows, start, end, zero], &[])?;
    body.node("ReduceSum", &[bag, zero], &[("keepdims", Attribute::Int(keeps))])
}

/// A list of one whose length only the run knows.
fn hidden(body: &mut GraphBuilder, number: ValueId) -> Result<ValueId> {
    let (minus, many) = (ints(body, &[-1])?, ints(body, &[100])?);
    let list = body.node("Reshape", &[number, minus], &[])?;
    let is_below = body.node("Less", &[list, many], &[])?;
    body.node("Compress", &[list, is_below], &[("axis", Attribute::Int(0))])
}

/// [`sum_of`] with a slice of the first axes, whose number only the run knows.
fn sum_without_axes(
    body: &mut GraphBuilder,
    rows: ValueId,
    [start, end]: [ValueId; 2],
    keeps: i64,
) -> Result<ValueId> {
    let (start, end, zero) = (hidden(body, start)?, hidden(body, end)?, ints(body, &[0])?);
    let bag = body.node("Slice", &[rows, start, end], &[])?;
    body.node("ReduceSum", &[bag, zero], &[("keepdims", Attribute::Int(keeps))])
}

/// [`sum_of`] with a slice along axes and with steps that only the run knows.
fn sum_along_given(
    body: &mut GraphBuilder,
    rows: ValueId,
    [start, end]: [ValueId; 2],
    keeps: i64,
) -> Result<ValueId> {
    let (zero, one, minus) = (ints(body, &[0])?, ints(body, &[1])?, ints(body, &[-2])?);
    let inputs = [rows, hidden(body, start)?, hidden(body, end)?, hidden(body, minus)?, hidden(body, one)?];
    let bag = body.node("Slice", &inputs, &[])?;
    body.node("ReduceSum", &[bag, zero], &[("keepdims", Attribute::Int(keeps))])
}

/// A `SequenceMap` over the places where bags begin and end.
fn mapped(bags: &mut Bags<'_>, keeps: i64, keeps_axis: bool) -> Result<ValueId> {
    let split = [("keepdims", Attribute::Int(i64::from(keeps_axis)))];
    let mut sequences = Vec::new();
    for places in [STARTS, ENDS] {
        let places = ints(bags.b, &places)?;
        sequences.push(Some(bags.b.node("SplitToSequence", &[places], &split)?));
    }
    // The rows are an input of the body.
    sequences.push(Some(bags.rows));
    let mut body = GraphBuilder::extend(Graph::new("body"));
    let inner = ["start", "end", "rows"].map(|name| body.typed_input(name, ValueType::Unknown));
    let sum = sum_of(&mut body, inner[2], [inner[0], inner[1]], keeps)?;
    let body = Subgraph { attr: "body", graph: body.finish_subgraph(&[sum]), captures: Vec::new() };
    Ok(bags.b.add(("", "SequenceMap"), &sequences, &[], 1, vec![body])?[0])
}

fn map(bags: &mut Bags<'_>, keeps: i64, keeps_axis: bool, (axis, stacks): (i64, i64)) -> Result<ValueId> {
    let sums = mapped(bags, keeps, keeps_axis)?;
    let attrs = [("axis", Attribute::Int(axis)), ("new_axis", Attribute::Int(stacks))];
    bags.b.node("ConcatFromSequence", &[sums], &attrs)
}

fn one_by_one(bags: &mut Bags<'_>) -> Result<ValueId> {
    let sums = mapped(bags, 1, true)?;
    let mut rows = Vec::new();
    for place in [0i64, 1, -1] {
        let place = bags.b.constant(Tensor::scalar(place)?);
        rows.push(bags.b.node("SequenceAt", &[sums, place], &[])?);
    }
    bags.b.node("Concat", &rows, &[("axis", Attribute::Int(0))])
}

/// The sum of the rows of a bag in a body.
type SumOf = fn(&mut GraphBuilder, ValueId, [ValueId; 2], i64) -> Result<ValueId>;

/// A loop that appends a row to a sequence in each iteration.
fn appended(bags: &mut Bags<'_>, sum_of: SumOf) -> Result<ValueId> {
    let Bags { b, rows } = bags;
    let captured = [*rows, ints(b, &STARTS)?, ints(b, &ENDS)?];
    let mut body = GraphBuilder::extend(Graph::new("body"));
    let inner = ["iteration", "goes_on", "sums"].map(|name| body.typed_input(name, ValueType::Unknown));
    let mut captures = Vec::new();
    for (outer, name) in captured.into_iter().zip(["rows", "starts", "ends"]) {
        let ty = b.graph().value(outer).ty.clone();
        captures.push(Capture { outer, inner: body.graph_mut().add_value(name, ty) });
    }
    let mut ends = Vec::new();
    for capture in captures.iter().skip(1) {
        ends.push(body.node("Gather", &[capture.inner, inner[0]], &[])?);
    }
    let sum = sum_of(&mut body, captures[0].inner, [ends[0], ends[1]], 1)?;
    let more = body.node("SequenceInsert", &[inner[2], sum], &[])?;
    let body = Subgraph { attr: "body", graph: body.finish_subgraph(&[inner[1], more]), captures };
    let trips = b.constant(Tensor::scalar(3i64)?);
    let goes_on = b.constant(Tensor::from_bools(&[], &[true])?);
    let empty = b.node("SequenceEmpty", &[], &[])?;
    let sums = b.add(("", "Loop"), &[trips, goes_on, empty].map(Some), &[], 1, vec![body])?[0];
    b.node("ConcatFromSequence", &[sums], &[("axis", Attribute::Int(0))])
}

/// The loss, and the table after one step of gradient descent.
fn expected() -> (f64, Vec<f64>) {
    let bags = || STARTS.iter().zip(ENDS).map(|(start, end)| &PLACES[*start as usize..end as usize]);
    let sum = |bag: &[i64], at: usize| bag.iter().map(|row| TABLE[*row as usize * 2 + at]).sum::<f64>();
    let mut updated = TABLE.to_vec();
    let mut loss = 0.0;
    for (index, bag) in bags().enumerate() {
        for at in 0..2 {
            let error = sum(bag, at) - TARGET[index * 2 + at];
            loss += error * error / 6.0;
            for row in bag {
                updated[*row as usize * 2 + at] -= RATE * 2.0 * error / 6.0;
            }
        }
    }
    (loss, updated)
}

fn is_near(actual: &[f32], expected: &[f64]) -> bool {
    let near = |(a, e): (&f32, &f64)| (f64::from(*a) - e).abs() <= 1e-6 * e.abs().max(1.0);
    actual.len() == expected.len() && actual.iter().zip(expected).all(near)
}

#[test]
fn rows_that_a_sequence_holds_are_trained() -> Result<()> {
    let floats = |numbers: &[f64]| numbers.iter().map(|number| *number as f32).collect::<Vec<f32>>();
    let (loss, updated) = expected();
    for form in &FORMS {
        let name = form.name;
        let mut b = GraphBuilder::new(name);
        let places = b.typed_input("places", ValueType::tensor(DType::I64, Some(vec![Dim::constant(6)])));
        let table = b.graph_mut().add_constant("w", Tensor::from_slice(&[4, 2], &floats(&TABLE))?);
        let rows = b.node("Gather", &[table, places], &[])?;
        let y = (form.build)(&mut Bags { b: &mut b, rows })?;
        let model = Model::from_graph(b.finish(&[y])?);
        let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
        let trainable = vec!["w".to_string()];
        let learning_rate = RATE as f32;
        let options =
            TrainingOptions { loss: Loss::Mse, optimizer, learning_rate, trainable, ..Default::default() };
        let mut trainer = Trainer::new(&model, options)?;
        let shape = form.shape.map(|size| size as usize);
        let target: Value = Tensor::from_slice(&shape, &floats(&TARGET))?.into();
        let places: Value = Tensor::from_slice(&[6], &PLACES)?.into();
        let actual = trainer.train_step(&[("places", places.clone()), ("target", target.clone())])?;
        assert!(is_near(&[actual], &[loss]), "{name}: the loss is {actual}, expected {loss}");
        let actual: Vec<f32> = trainer.parameter("w")?.to_vec()?;
        assert!(is_near(&actual, &updated), "{name}: the table is {actual:?}, expected {updated:?}");
    }
    Ok(())
}
