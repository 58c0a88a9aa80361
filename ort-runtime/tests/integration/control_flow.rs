//! Subgraphs: what they capture, carry and hand over, and when they end.

use std::time::{Duration, Instant};

use ort_runtime::dim::Dim;
use ort_runtime::dtype::DType;
use ort_runtime::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_runtime::spec::infer_graph;
use ort_runtime::{ErrorKind, Model, Result, RunOptions, Session, Tensor, Value};

/// A subgraph under construction, with what it captures.
struct Body {
    builder: GraphBuilder,
    captures: Vec<Capture>,
}

impl Body {
    /// An empty subgraph that captures `outer` values of the enclosing graph; returns the values
    /// that stand for them.
    fn new(outer: &[ValueId]) -> (Body, Vec<ValueId>) {
        let mut graph = Graph::new("body");
        let inner: Vec<ValueId> = (0..outer.len())
            .map(|index| graph.add_value(format!("captured_{index}"), ValueType::Unknown))
            .collect();
        let captures = outer.iter().zip(&inner).map(|(&outer, &inner)| Capture { outer, inner }).collect();
        (Body { builder: GraphBuilder::extend(graph), captures }, inner)
    }

    /// The inputs of a loop's body: the iteration number, the condition, and one carried value.
    fn loop_inputs(&mut self) -> [ValueId; 3] {
        [
            self.builder.input("number", DType::I64, &[]),
            self.builder.input("holds", DType::Bool, &[]),
            self.builder.typed_input("carried", ValueType::Unknown),
        ]
    }

    fn finish(self, attr: &'static str, outputs: &[ValueId]) -> Subgraph {
        Subgraph { attr, graph: self.builder.finish_subgraph(outputs), captures: self.captures }
    }
}

fn run(graph: Graph, inputs: &[(&str, Value)]) -> Result<Vec<Value>> {
    let session = Session::builder(&Model::from_graph(graph)).threads(1).build()?;
    Ok(session.run(inputs)?.into_iter().map(|(_, value)| value).collect())
}

fn floats(value: &Value) -> Result<(Vec<usize>, Vec<f32>)> {
    let tensor = value.tensor()?;
    Ok((tensor.shape().to_vec(), tensor.to_vec()?))
}

/// `if c { if c { x * y } else { y } } else { x }`: `x` is captured two levels deep, `y` is a
/// constant.
fn nested_branches() -> Result<Graph> {
    let mut main = GraphBuilder::new("main");
    let x = main.input("x", DType::F32, &["n"]);
    let condition = main.input("c", DType::Bool, &[]);
    let y = main.constant(Tensor::from_slice(&[1], &[10.0f32])?);

    let (mut then, outer) = Body::new(&[x, condition, y]);
    let (mut inner_then, inner) = Body::new(&[outer[0], outer[2]]);
    let product = inner_then.builder.node("Mul", &inner, &[])?;
    let (inner_else, inner) = Body::new(&[outer[2]]);
    let branches =
        vec![inner_then.finish("then_branch", &[product]), inner_else.finish("else_branch", &inner)];
    let chosen = then.builder.add(("", "If"), &[Some(outer[1])], &[], 1, branches)?;

    let (otherwise, outer) = Body::new(&[x]);
    let branches = vec![then.finish("then_branch", &chosen), otherwise.finish("else_branch", &outer)];
    let chosen = main.add(("", "If"), &[Some(condition)], &[], 1, branches)?;
    main.finish(&chosen)
}

#[test]
fn captures_reach_two_levels() -> Result<()> {
    let x = Tensor::from_slice(&[3], &[1.0f32, 2.0, 3.0])?;
    for (condition, expected) in [(true, [10.0, 20.0, 30.0]), (false, [1.0, 2.0, 3.0])] {
        let condition = Tensor::from_bools(&[], &[condition])?;
        let outputs = run(nested_branches()?, &[("x", x.clone().into()), ("c", condition.into())])?;
        assert_eq!(floats(&outputs[0])?, (vec![3], expected.to_vec()));
    }
    Ok(())
}

/// A loop that appends a captured value to the carried one, and hands over the length before each
/// iteration.
fn growing_loop() -> Result<Graph> {
    let mut main = GraphBuilder::new("main");
    let trips = main.input("trips", DType::I64, &[]);
    let start = main.input("start", DType::F32, &["n"]);
    let item = main.input("item", DType::F32, &["1"]);
    let (mut body, captured) = Body::new(&[item]);
    let [_, holds, carried] = body.loop_inputs();
    let longer = body.builder.node("Concat", &[carried, captured[0]], &[("axis", Attribute::Int(0))])?;
    let length = body.builder.node("Shape", &[carried], &[])?;
    let body = body.finish("body", &[holds, longer, length]);
    let outputs = main.add(("", "Loop"), &[Some(trips), None, Some(start)], &[], 2, vec![body])?;
    main.finish(&outputs)
}

#[test]
fn carried_shapes_change() -> Result<()> {
    for trips in [0i64, 1, 5] {
        let inputs = [
            ("trips", Tensor::scalar(trips)?.into()),
            ("start", Tensor::from_slice(&[2], &[1.0f32, 2.0])?.into()),
            ("item", Tensor::from_slice(&[1], &[7.0f32])?.into()),
        ];
        let outputs = run(growing_loop()?, &inputs)?;
        let count = trips as usize;
        let expected: Vec<f32> = [1.0, 2.0].into_iter().chain(std::iter::repeat_n(7.0, count)).collect();
        assert_eq!(floats(&outputs[0])?, (vec![2 + count], expected));
        let lengths = outputs[1].tensor()?;
        assert_eq!(lengths.shape(), [count, 1]);
        assert_eq!(lengths.to_vec::<i64>()?, (0..trips).map(|number| number + 2).collect::<Vec<_>>());
    }
    Ok(())
}

/// A loop of four iterations that doubles what it carries, and stacks that.
fn doubling_loop() -> Result<Graph> {
    let mut main = GraphBuilder::new("main");
    let trips = main.constant(Tensor::scalar(4i64)?);
    let x = main.input("x", DType::F32, &["n"]);
    let (mut body, _) = Body::new(&[]);
    let [_, holds, carried] = body.loop_inputs();
    let doubled = body.builder.node("Add", &[carried, carried], &[])?;
    let body = body.finish("body", &[holds, doubled, doubled]);
    let outputs = main.add(("", "Loop"), &[Some(trips), None, Some(x)], &[], 2, vec![body])?;
    main.finish(&outputs)
}

/// The plan counts what the loop takes, however few bytes its values have.
#[test]
fn a_small_loop_runs_with_the_limit_that_its_refusal_names() -> Result<()> {
    let model = Model::from_graph(doubling_loop()?);
    for size in [1usize, 3, 100] {
        let inputs = [("x", Tensor::from_vec(&[size], vec![1.0f32; size])?.into())];
        let session = |limit: usize| Session::builder(&model).batch_split(false).memory_limit(limit).build();
        let run = |limit: usize| session(limit)?.run(&inputs);
        let named = |limit: usize| run(limit).err()?.shortage().map(|shortage| shortage.sufficient_limit());
        // The session is built first, and only its run knows the size.
        let building = named(1).unwrap_or(0);
        let running = named(building).unwrap_or(building);
        assert!(running > 16 * size, "{size}: {running}");
        assert_eq!(named(running), None, "{size}");
        run(running)?;
        assert!(named(running - 1).is_some(), "{size}: {running}");
    }
    Ok(())
}

#[test]
fn planned_leading_dimension_is_exact() -> Result<()> {
    let graph = doubling_loop()?;
    let stacked = graph.value(graph.outputs[1]).ty.to_string();
    assert_eq!(stacked, "float[4, n]");
    let outputs = run(graph, &[("x", Tensor::from_slice(&[2], &[1.0f32, 3.0])?.into())])?;
    assert_eq!(floats(&outputs[0])?, (vec![2], vec![16.0, 48.0]));
    assert_eq!(floats(&outputs[1])?, (vec![4, 2], vec![2.0, 6.0, 4.0, 12.0, 8.0, 24.0, 16.0, 48.0]));
    Ok(())
}

#[test]
fn endless_loops_end_at_the_deadline() -> Result<()> {
    let mut main = GraphBuilder::new("main");
    let x = main.input("x", DType::F32, &["n"]);
    let (mut body, _) = Body::new(&[]);
    let [_, _, carried] = body.loop_inputs();
    let holds = body.builder.constant(Tensor::from_bools(&[], &[true])?);
    let next = body.builder.node("Neg", &[carried], &[])?;
    let body = body.finish("body", &[holds, next]);
    let outputs = main.add(("", "Loop"), &[None, None, Some(x)], &[], 1, vec![body])?;
    let session = Session::builder(&Model::from_graph(main.finish(&outputs)?)).threads(1).build()?;
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let options = RunOptions { deadline, ..RunOptions::default() };
    let result = session.run_with(&[("x", Tensor::from_slice(&[1], &[1.0f32])?.into())], &options);
    assert_eq!(result.err().map(|error| error.kind()), Some(ErrorKind::Cancelled));
    Ok(())
}

#[test]
fn reversed_scans_stack_backwards() -> Result<()> {
    let mut main = GraphBuilder::new("main");
    let start = main.input("start", DType::F32, &[]);
    let x = main.input("x", DType::F32, &["2", "n"]);
    let (mut body, _) = Body::new(&[]);
    let sum = body.builder.typed_input("sum", ValueType::Unknown);
    let item = body.builder.typed_input("item", ValueType::Unknown);
    let total = body.builder.node("ReduceSum", &[item], &[("keepdims", Attribute::Int(0))])?;
    let next = body.builder.node("Add", &[sum, total], &[])?;
    let body = body.finish("body", &[next, item]);
    let attrs = [
        ("num_scan_inputs", Attribute::Int(1)),
        ("scan_input_axes", Attribute::Ints(vec![1])),
        ("scan_output_axes", Attribute::Ints(vec![-1])),
        ("scan_output_directions", Attribute::Ints(vec![1])),
    ];
    let outputs = main.add(("", "Scan"), &[Some(start), Some(x)], &attrs, 2, vec![body])?;
    let graph = main.finish(&outputs)?;
    assert_eq!(graph.value(outputs[1]).ty.to_string(), "float[2, n]");
    let x = Tensor::from_slice(&[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
    let outputs = run(graph, &[("start", Tensor::scalar(100.0f32)?.into()), ("x", x.into())])?;
    assert_eq!(floats(&outputs[0])?, (vec![], vec![121.0]));
    assert_eq!(floats(&outputs[1])?, (vec![2, 3], vec![3.0, 2.0, 1.0, 6.0, 5.0, 4.0]));
    Ok(())
}

/// `relu(if rows(x) == 1 { squeeze(x) } else { x })`: the rank depends on a size.
fn branch_by_size() -> Result<Graph> {
    let mut main = GraphBuilder::new("main");
    let x = main.input("x", DType::F32, &["rows", "columns"]);
    let (zero, one) = (main.constant(Tensor::scalar(0i64)?), main.constant(Tensor::scalar(1i64)?));
    let shape = main.node("Shape", &[x], &[])?;
    let rows = main.node("Gather", &[shape, zero], &[])?;
    let single = main.node("Equal", &[rows, one], &[])?;
    let (mut then, outer) = Body::new(&[x]);
    let axes = then.builder.constant(Tensor::from_slice(&[1], &[0i64])?);
    let squeezed = then.builder.node("Squeeze", &[outer[0], axes], &[])?;
    let (otherwise, outer) = Body::new(&[x]);
    let branches = vec![then.finish("then_branch", &[squeezed]), otherwise.finish("else_branch", &outer)];
    let chosen = main.add(("", "If"), &[Some(single)], &[], 1, branches)?;
    let output = main.node("Relu", &chosen, &[])?;
    main.finish(&[output])
}

#[test]
fn branches_chosen_by_sizes_are_planned() -> Result<()> {
    for (rows, shape) in [(1usize, vec![64usize]), (2, vec![2, 64])] {
        let session = Session::builder(&Model::from_graph(branch_by_size()?)).threads(1).build()?;
        let planned = session.plan(&[("rows", rows as i64), ("columns", 64)])?.peak_bytes;
        let x = Tensor::from_slice(&[rows, 64], &vec![1.0f32; rows * 64])?;
        let outputs = session.run(&[("x", x.into())])?;
        assert_eq!(floats(&outputs[0].1)?, (shape, vec![1.0; rows * 64]));
        assert_eq!(planned, Some(session.memory().activations_peak), "{rows} rows");
    }
    Ok(())
}

#[test]
fn a_branch_that_contradicts_itself_is_an_error_only_when_it_is_taken() -> Result<()> {
    let mut main = GraphBuilder::new("main");
    let x = main.input("x", DType::F32, &["3"]);
    let condition = main.input("c", DType::Bool, &[]);
    let (mut then, outer) = Body::new(&[x]);
    let four = then.builder.constant(Tensor::from_slice(&[4], &[0.0f32; 4])?);
    let sum = then.builder.node("Add", &[outer[0], four], &[])?;
    let (otherwise, outer) = Body::new(&[x]);
    let branches = vec![then.finish("then_branch", &[sum]), otherwise.finish("else_branch", &outer)];
    let chosen = main.add(("", "If"), &[Some(condition)], &[], 1, branches)?;
    let session = Session::builder(&Model::from_graph(main.finish(&chosen)?)).threads(1).build()?;

    let inputs = |condition: bool| -> Result<[(&'static str, Value); 2]> {
        let x = Tensor::from_slice(&[3], &[1.0f32, 2.0, 3.0])?;
        Ok([("x", x.into()), ("c", Tensor::from_bools(&[], &[condition])?.into())])
    };
    let outputs = session.run(&inputs(false)?)?;
    assert_eq!(floats(&outputs[0].1)?, (vec![3], vec![1.0, 2.0, 3.0]));
    let problem = session.run(&inputs(true)?).expect_err("the branch adds three elements to four");
    assert_eq!(problem.kind(), ErrorKind::Fail);
    assert!(problem.to_string().contains("then_branch"), "{problem}");
    Ok(())
}

/// `if c { if c { x + four } else { x + four } } else { x }` is inferred with three elements, then
/// with four.
#[test]
fn a_branch_that_contradicts_itself_keeps_its_bodies() -> Result<()> {
    let mut main = GraphBuilder::new("main");
    let x = main.input("x", DType::F32, &["3"]);
    let condition = main.input("c", DType::Bool, &[]);
    let (mut then, outer) = Body::new(&[x, condition]);
    let sum = |attr: &'static str| -> Result<Subgraph> {
        let (mut body, inner) = Body::new(&outer[..1]);
        let four = body.builder.constant(Tensor::from_slice(&[4], &[0.0f32; 4])?);
        let sum = body.builder.node("Add", &[inner[0], four], &[])?;
        Ok(body.finish(attr, &[sum]))
    };
    let branches = vec![sum("then_branch")?, sum("else_branch")?];
    let chosen = then.builder.add(("", "If"), &[Some(outer[1])], &[], 1, branches)?;
    let (otherwise, outer) = Body::new(&[x]);
    let branches = vec![then.finish("then_branch", &chosen), otherwise.finish("else_branch", &outer)];
    let chosen = main.add(("", "If"), &[Some(condition)], &[], 1, branches)?;
    let mut graph = main.finish(&chosen)?;
    let then = |graph: &Graph| graph.nodes[0].subgraphs[0].graph.clone();
    assert!(then(&graph).broken.is_some());
    assert_eq!(then(&graph).nodes[0].subgraphs.len(), 2);
    graph.value_mut(x).ty = ValueType::tensor(DType::F32, Some(vec![Dim::constant(4)]));
    infer_graph(&mut graph)?;
    assert!(then(&graph).broken.is_none());
    Ok(())
}

#[test]
fn the_error_is_that_of_the_branch_that_a_constant_condition_takes() -> Result<()> {
    for (condition, taken) in [(true, 4), (false, 5)] {
        let mut main = GraphBuilder::new("main");
        let x = main.input("x", DType::F32, &["3"]);
        let condition = main.constant(Tensor::from_bools(&[], &[condition])?);
        let mut branches = Vec::new();
        for (attr, size) in [("then_branch", 4), ("else_branch", 5)] {
            let (mut branch, outer) = Body::new(&[x]);
            let other = branch.builder.constant(Tensor::from_slice(&[size], &vec![0.0f32; size])?);
            let sum = branch.builder.node("Add", &[outer[0], other], &[])?;
            branches.push(branch.finish(attr, &[sum]));
        }
        let chosen = main.add(("", "If"), &[Some(condition)], &[], 1, branches)?;
        let problem = main.finish(&chosen).expect_err("3 elements and 4, or 3 and 5");
        assert!(problem.to_string().contains(&format!("and {taken}")), "{problem}");
    }
    Ok(())
}
