//! State that a loop passes through unchanged is captured instead of carried, with the same
//! results.
#![allow(clippy::indexing_slicing)]

use ort_runtime::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_runtime::rewrite::{Level, Optimizer};
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};

const RULE: &str = "loop_invariant";

/// A body with the inputs that a loop provides, and its carried ones.
struct Body {
    builder: GraphBuilder,
    captures: Vec<Capture>,
    number: ValueId,
    holds: ValueId,
    carried: Vec<ValueId>,
}

impl Body {
    fn new(carried: usize, outer: &[ValueId]) -> Body {
        let mut builder = GraphBuilder::new("body");
        let number = builder.input("number", DType::I64, &[]);
        let holds = builder.input("holds", DType::Bool, &[]);
        let carried = (0..carried)
            .map(|index| builder.typed_input(&format!("carried_{index}"), ValueType::Unknown))
            .collect();
        let mut captures = Vec::new();
        for (index, &outer) in outer.iter().enumerate() {
            let inner = builder.graph_mut().add_value(format!("captured_{index}"), ValueType::Unknown);
            captures.push(Capture { outer, inner });
        }
        Body { builder, captures, number, holds, carried }
    }

    fn finish(self, outputs: &[ValueId]) -> Subgraph {
        let outputs = [&[self.holds], outputs].concat();
        Subgraph { attr: "body", graph: self.builder.finish_subgraph(&outputs), captures: self.captures }
    }
}

/// Runs a graph with the pass and without it, and compares. Returns the results and how often the
/// pass applied.
fn both(graph: &Graph, inputs: &[(&str, Value)]) -> Result<(Vec<Value>, usize)> {
    let model = Model::from_graph(graph.clone());
    let without = Optimizer { disabled: vec![RULE.into()], ..Optimizer::default() };
    let builder = || Session::builder(&model).threads(1);
    let (with, without) = (builder().build()?, builder().optimizer(without).build()?);
    let basic = builder().optimizer(Optimizer::at(Level::Basic)).build()?;
    let hits = |session: &Session| {
        session.rewrites().hits().iter().find(|(name, _)| *name == RULE).map_or(0, |(_, hits)| *hits)
    };
    assert_eq!(hits(&without), 0);
    assert_eq!(hits(&with), hits(&basic));
    let expected = without.run(inputs)?;
    for session in [&with, &basic] {
        for ((_, result), (_, expected)) in session.run(inputs)?.iter().zip(&expected) {
            assert_eq!(result.tensor()?.shape(), expected.tensor()?.shape());
            assert_eq!(floats(result)?, floats(expected)?);
        }
    }
    let values = with.run(inputs)?.into_iter().map(|(_, value)| value).collect();
    Ok((values, hits(&with)))
}

fn floats(value: &Value) -> Result<Vec<f32>> {
    value.tensor()?.to_vec()
}

fn matrix(elements: &[f32; 4]) -> Result<Value> {
    Ok(Tensor::from_slice(&[2, 2], elements)?.into())
}

/// Carries x, w and a bias: x becomes x * w + bias. w passes through an `Identity`.
fn affine(constant: bool) -> Result<Graph> {
    let mut main = GraphBuilder::new("main");
    let trips = main.input("trips", DType::I64, &[]);
    // The names are those of the body's own values.
    let x = main.input("carried_1", DType::F32, &["n", "2"]);
    let w = match constant {
        true => main.constant(Tensor::from_slice(&[2, 2], &[1.0f32, 1.0, 0.0, 1.0])?),
        false => main.input("w", DType::F32, &["2", "2"]),
    };
    let bias = main.input("bias", DType::F32, &["2"]);
    let mut body = Body::new(3, &[]);
    let [w_in, x_in, bias_in] = body.carried[..] else { panic!("three") };
    let product = body.builder.node("MatMul", &[x_in, w_in], &[])?;
    let sum = body.builder.node("Add", &[product, bias_in], &[])?;
    let w_out = body.builder.node("Identity", &[w_in], &[])?;
    let body = body.finish(&[w_out, sum, bias_in, bias_in]);
    let inputs = [Some(trips), None, Some(w), Some(x), Some(bias)];
    let outputs = main.add(("", "Loop"), &inputs, &[], 4, vec![body])?;
    // The final w is read, and both it and the final bias are outputs.
    let sum = main.node("Add", &[outputs[0], outputs[1]], &[])?;
    main.finish(&[outputs[0], outputs[1], outputs[2], outputs[3], sum])
}

#[test]
fn weights_are_not_carried() -> Result<()> {
    for constant in [false, true] {
        for trips in [0i64, 1, 3] {
            let mut inputs = vec![
                ("trips", Tensor::scalar(trips)?.into()),
                ("carried_1", matrix(&[1.0, 2.0, 3.0, 4.0])?),
                ("bias", Tensor::from_slice(&[2], &[10.0f32, 0.0])?.into()),
            ];
            if !constant {
                inputs.push(("w", matrix(&[1.0, 1.0, 0.0, 1.0])?));
            }
            let (results, hits) = both(&affine(constant)?, &inputs)?;
            assert_eq!(hits, 2);
            assert_eq!(floats(&results[0])?, [1.0, 1.0, 0.0, 1.0]);
            // x * w is [a, a + b].
            let expected = match trips {
                0 => [1.0, 2.0, 3.0, 4.0],
                1 => [11.0, 3.0, 13.0, 7.0],
                _ => [31.0, 35.0, 33.0, 43.0],
            };
            assert_eq!(floats(&results[1])?, expected);
            assert_eq!(floats(&results[2])?, [10.0, 0.0]);
            assert_eq!(results[3].tensor()?.shape(), [trips as usize, 2]);
            let sum: Vec<f32> = expected.iter().zip([1.0, 1.0, 0.0, 1.0]).map(|(a, b)| a + b).collect();
            assert_eq!(floats(&results[4])?, sum);
        }
    }
    Ok(())
}

/// An outer loop passes w to an inner one, which passes it through. So the outer one does, too. A
/// branch of an `If` in the inner body reads it.
#[test]
fn nested_loops_pass_values_through() -> Result<()> {
    let mut main = GraphBuilder::new("main");
    let trips = main.input("trips", DType::I64, &[]);
    let (x, w) = (main.input("x", DType::F32, &["2", "2"]), main.input("w", DType::F32, &["2", "2"]));
    let mut outer = Body::new(2, &[trips]);
    let mut inner = Body::new(2, &[]);
    let branch = |attr, op: &str| -> Result<Subgraph> {
        let mut graph = Graph::new(attr);
        let ids = [0, 1].map(|index| graph.add_value(format!("carried_{index}"), ValueType::Unknown));
        let captures =
            inner.carried.iter().zip(ids).map(|(&outer, inner)| Capture { outer, inner }).collect();
        let mut builder = GraphBuilder::extend(graph);
        let result = builder.node(op, &ids, &[])?;
        Ok(Subgraph { attr, graph: builder.finish_subgraph(&[result]), captures })
    };
    let branches = vec![branch("then_branch", "MatMul")?, branch("else_branch", "Add")?];
    let holds = inner.holds;
    let chosen = inner.builder.add(("", "If"), &[Some(holds)], &[], 1, branches)?[0];
    let w_in = inner.carried[1];
    let inner = inner.finish(&[chosen, w_in]);
    let count = outer.captures[0].inner;
    let inputs = [Some(count), None, Some(outer.carried[0]), Some(outer.carried[1])];
    let all = outer.builder.add(("", "Loop"), &inputs, &[], 2, vec![inner])?;
    let outer = outer.finish(&all);
    let outputs = main.add(("", "Loop"), &[Some(trips), None, Some(x), Some(w)], &[], 2, vec![outer])?;
    let graph = main.finish(&outputs)?;
    for trips in [0i64, 2] {
        let inputs = [
            ("trips", Tensor::scalar(trips)?.into()),
            ("x", matrix(&[1.0, 0.0, 0.0, 1.0])?),
            ("w", matrix(&[1.0, 1.0, 0.0, 1.0])?),
        ];
        let (results, hits) = both(&graph, &inputs)?;
        assert_eq!(hits, 2);
        let corner = (trips * trips) as f32;
        assert_eq!(floats(&results[0])?, [1.0, corner, 0.0, 1.0]);
        assert_eq!(floats(&results[1])?, [1.0, 1.0, 0.0, 1.0]);
    }
    Ok(())
}

/// A `Scan` that adds a state to each slice. Its only state goes away.
#[test]
fn scans_keep_their_slices() -> Result<()> {
    let mut main = GraphBuilder::new("main");
    let (w, x) = (main.input("w", DType::F32, &["2"]), main.input("x", DType::F32, &["n", "2"]));
    let mut builder = GraphBuilder::new("body");
    let state = builder.typed_input("state", ValueType::Unknown);
    let slice = builder.typed_input("slice", ValueType::Unknown);
    let sum = builder.node("Add", &[state, slice], &[])?;
    let body = Subgraph { attr: "body", graph: builder.finish_subgraph(&[state, sum]), captures: vec![] };
    let attrs = [("num_scan_inputs", Attribute::Int(1))];
    let outputs = main.add(("", "Scan"), &[Some(w), Some(x)], &attrs, 2, vec![body])?;
    let graph = main.finish(&outputs)?;
    for rows in [0usize, 3] {
        let x = Tensor::from_vec(&[rows, 2], (0..rows * 2).map(|at| at as f32).collect())?;
        let w = Tensor::from_slice(&[2], &[10.0f32, 20.0])?;
        let (results, hits) = both(&graph, &[("w", w.into()), ("x", x.into())])?;
        assert_eq!(hits, 1);
        assert_eq!(floats(&results[0])?, [10.0, 20.0]);
        assert_eq!(floats(&results[1])?, [10.0, 21.0, 12.0, 23.0, 14.0, 25.0][..rows * 2]);
    }
    Ok(())
}

/// Two values that change places are carried, and so is one that only the first iteration changes.
#[test]
fn what_changes_is_carried() -> Result<()> {
    let mut main = GraphBuilder::new("main");
    let trips = main.input("trips", DType::I64, &[]);
    let (a, b) = (main.input("a", DType::F32, &["2"]), main.input("b", DType::F32, &["2"]));
    let mut body = Body::new(3, &[]);
    let constant = body.builder.constant(Tensor::from_slice(&[2], &[7.0f32, 8.0])?);
    let (first, second) = (body.carried[0], body.carried[1]);
    let body = body.finish(&[second, first, constant]);
    let inputs = [Some(trips), None, Some(a), Some(b), Some(a)];
    let outputs = main.add(("", "Loop"), &inputs, &[], 3, vec![body])?;
    let graph = main.finish(&outputs)?;
    for (trips, expected) in [(0i64, [1.0f32, 3.0, 1.0]), (1, [3.0, 1.0, 7.0]), (2, [1.0, 3.0, 7.0])] {
        let vector = |first: f32| Tensor::from_slice(&[2], &[first, first + 1.0]).map(Value::from);
        let inputs = [("trips", Tensor::scalar(trips)?.into()), ("a", vector(1.0)?), ("b", vector(3.0)?)];
        let (results, hits) = both(&graph, &inputs)?;
        assert_eq!(hits, 0);
        for (result, first) in results.iter().zip(expected) {
            assert_eq!(floats(result)?, [first, first + 1.0]);
        }
    }
    Ok(())
}

/// A loop with no other result stays, so that an endless one ends at its deadline and not at once.
#[test]
fn a_loop_with_no_other_result_stays() -> Result<()> {
    let mut main = GraphBuilder::new("main");
    let (trips, x) = (main.input("trips", DType::I64, &[]), main.input("x", DType::F32, &["2"]));
    let body = Body::new(1, &[]);
    let carried = body.carried[0];
    let body = body.finish(&[carried]);
    let outputs = main.add(("", "Loop"), &[Some(trips), None, Some(x)], &[], 1, vec![body])?;
    let x = Tensor::from_slice(&[2], &[1.0f32, 2.0])?;
    let inputs = [("trips", Tensor::scalar(2i64)?.into()), ("x", x.into())];
    let (results, hits) = both(&main.finish(&outputs)?, &inputs)?;
    assert_eq!(hits, 0);
    assert_eq!(floats(&results[0])?, [1.0, 2.0]);
    Ok(())
}

/// The body of a loop learns the elements of integers that it was passed: here a shape.
#[test]
fn constants_are_known_in_the_body() -> Result<()> {
    let mut main = GraphBuilder::new("main");
    let trips = main.constant(Tensor::scalar(2i64)?);
    let x = main.input("x", DType::F32, &["2", "3"]);
    let shape = main.constant(Tensor::from_slice(&[2], &[3i64, 2])?);
    let mut body = Body::new(1, &[x]);
    let (captured, carried) = (body.captures[0].inner, body.carried[0]);
    let number = body.builder.node("Cast", &[body.number], &[("to", Attribute::Int(1))])?;
    let sum = body.builder.node("Add", &[captured, number], &[])?;
    let moved = body.builder.node("Reshape", &[sum, carried], &[])?;
    let body = body.finish(&[carried, moved]);
    let outputs = main.add(("", "Loop"), &[Some(trips), None, Some(shape)], &[], 2, vec![body])?;
    let graph = main.finish(&outputs[1..])?;
    let x = Tensor::from_slice(&[2, 3], &[0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0])?;
    let (results, hits) = both(&graph, &[("x", x.into())])?;
    assert_eq!(hits, 1);
    assert_eq!(results[0].tensor()?.shape(), [2, 3, 2]);
    let expected: Vec<f32> = (0..12).map(|at| (at % 6 + at / 6) as f32).collect();
    assert_eq!(floats(&results[0])?, expected);
    let plan = Session::builder(&Model::from_graph(graph)).threads(1).build()?.plan(&[])?;
    assert!(plan.peak_bytes.is_some(), "the plan knows all sizes");
    Ok(())
}

/// The copies of a large matrix in a loop do not count, because there are none.
#[test]
fn the_plan_has_no_copies() -> Result<()> {
    let mut main = GraphBuilder::new("main");
    let trips = main.constant(Tensor::scalar(100i64)?);
    let x = main.input("x", DType::F32, &["1", "256"]);
    let w = main.input("w", DType::F32, &["256", "256"]);
    let mut body = Body::new(2, &[]);
    let product = body.builder.node("MatMul", &[body.carried[0], body.carried[1]], &[])?;
    let w_in = body.carried[1];
    let body = body.finish(&[product, w_in]);
    let outputs = main.add(("", "Loop"), &[Some(trips), None, Some(x), Some(w)], &[], 2, vec![body])?;
    let model = Model::from_graph(main.finish(&outputs[..1])?);
    let matrix = 256 * 256 * size_of::<f32>();
    let peak = |optimizer: Optimizer| -> Result<usize> {
        Ok(Session::builder(&model).threads(1).optimizer(optimizer).build()?.plan(&[])?.planned_bytes)
    };
    let without = Optimizer { disabled: vec![RULE.into()], ..Optimizer::default() };
    assert!(peak(Optimizer::default())? < matrix);
    assert!(peak(without)? >= matrix);
    Ok(())
}

/// A constant that several loops read is copied once, if the model's file does not align it.
#[test]
fn loops_share_a_constant() -> Result<()> {
    const ELEMENTS: usize = 1 << 18;
    let bytes: Vec<u8> = (0..4 * ELEMENTS + 1).map(|index| if index % 4 == 0 { 63 } else { 0 }).collect();
    let held = |loops: usize| -> Result<(usize, f32)> {
        // One byte on, an element is never aligned.
        let bytes = bytes::Bytes::from(bytes.clone()).slice(1..);
        let mut main = GraphBuilder::new("main");
        let trips = main.constant(Tensor::scalar(2i64)?);
        let w = main.constant(Tensor::from_bytes(DType::F32, &[ELEMENTS], bytes)?);
        let mut x = main.input("x", DType::F32, &[]);
        for _ in 0..loops {
            let mut body = Body::new(2, &[]);
            let [x_in, w_in] = body.carried[..] else { panic!("two") };
            let sum = body.builder.node("Add", &[x_in, w_in], &[])?;
            let greatest = body.builder.node("ReduceMax", &[sum], &[("keepdims", Attribute::Int(0))])?;
            let body = body.finish(&[greatest, w_in]);
            x = main.add(("", "Loop"), &[Some(trips), None, Some(x), Some(w)], &[], 2, vec![body])?[0];
        }
        let session = Session::builder(&Model::from_graph(main.finish(&[x])?)).threads(1).build()?;
        let result = session.run(&[("x", Tensor::scalar(0f32)?.into())])?.remove(0).1;
        Ok((session.memory().weights_copied, floats(&result)?[0]))
    };
    let (one, three) = (held(1)?, held(3)?);
    assert!(three.0 < one.0 + 4 * ELEMENTS, "{} bytes of one loop, {} of three", one.0, three.0);
    // 0x3f000000 is a half, and each iteration adds it.
    assert_eq!((one.1, three.1), (1.0, 3.0));
    Ok(())
}
