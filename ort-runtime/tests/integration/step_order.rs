//! The order of steps: it lowers the peak where it can, never raises it, and stays an order in
//! which the graph can run.

use std::time::{Duration, Instant};

use crate::support::{axis, branch, numbers};
use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::rewrite::Level;
use ort_runtime::{DType, Model, Result, Session};
use proptest::prelude::*;

/// One node: its kind, and which values it reads, as numbers to be taken modulo what there is.
type Choice = (u8, u16, u16);

fn session(graph: Graph) -> Result<Session> {
    Session::builder(&Model::from_graph(graph)).opt_level(Level::Disabled).threads(1).build()
}

/// The columns of a value and the value, which has `rows` rows.
type Wide = (usize, ValueId);

/// A graph of values of many sizes.
fn grow(choices: &[Choice], outputs: &[u16]) -> Result<Graph> {
    let mut builder = GraphBuilder::new("random");
    let condition = builder.input("condition", DType::Bool, &[]);
    let mut values: Vec<Wide> = vec![(8, builder.input("x", DType::F32, &["rows", "8"]))];
    for &(kind, first, second) in choices {
        let (columns, a) = values[first as usize % values.len()];
        let (others, b) = values[second as usize % values.len()];
        let sum = columns + others;
        values.push(match kind % 8 {
            0 | 1 => (columns, builder.node("Relu", &[a], &[])?),
            2 => (sum.min(512), wider(&mut builder, (a, columns), (b, others))?),
            3 => (1, builder.node("ReduceSum", &[a], &[("keepdims", Attribute::Int(1))])?),
            4 => (columns.max(4), project(&mut builder, (a, columns), columns.max(4))?),
            5 => (2, project(&mut builder, (a, columns), 2)?),
            6 => (64, project(&mut builder, (a, columns), 64)?),
            _ => {
                let then = branch("then_branch", a, |builder, value| builder.node("Relu", &[value], &[]))?;
                let otherwise =
                    branch("else_branch", b, |builder, value| builder.node("Neg", &[value], &[]))?;
                let chosen = builder.add(("", "If"), &[Some(condition)], &[], 1, vec![then, otherwise])?;
                let bounded = builder.node("Size", &[chosen[0]], &[])?;
                let bounded = builder.node("Cast", &[bounded], &[("to", Attribute::Int(1))])?;
                (columns, builder.node("Add", &[a, bounded], &[])?)
            }
        });
    }
    let mut ids: Vec<ValueId> =
        outputs.iter().map(|&index| values[index as usize % values.len()].1).collect();
    ids.extend(values.last().map(|value| value.1));
    ids.dedup();
    builder.finish(&ids)
}

/// Both beside each other, cut to a size that does not grow without end.
fn wider(builder: &mut GraphBuilder, a: (ValueId, usize), b: (ValueId, usize)) -> Result<ValueId> {
    let both = builder.node("Concat", &[a.0, b.0], &axis(1))?;
    let columns = a.1 + b.1;
    if columns <= 512 { Ok(both) } else { project(builder, (both, columns), 512) }
}

/// A matmul whose result has `to` columns.
fn project(builder: &mut GraphBuilder, (value, from): (ValueId, usize), to: usize) -> Result<ValueId> {
    let matrix = builder.constant(numbers(&[from, to], to)?);
    builder.node("MatMul", &[value, matrix], &[])
}

fn check(choices: &[Choice], outputs: &[u16]) -> Result<(), String> {
    let say = |problem: ort_runtime::Error| problem.to_string();
    let graph = grow(choices, outputs).map_err(say)?;
    let built = session(graph.clone()).map_err(say)?;
    let again = session(graph.clone()).map_err(say)?;
    if built.steps() != again.steps() {
        return Err("two sessions have two orders".into());
    }
    // Every node comes after those whose results it reads, subgraphs' captures included.
    let order: Vec<String> = built.steps().into_iter().map(|(node, ..)| node).collect();
    let place = |name: &str| order.iter().position(|node| node == name);
    let producers = graph.producers();
    for node in &graph.nodes {
        for read in node.reads().filter_map(|value| producers[value.index()]) {
            let before = &graph.nodes[read.index()].name;
            if place(before) >= place(&node.name) {
                return Err(format!("'{}' does not come after '{before}'", node.name));
            }
        }
    }
    for rows in [1, 16, 128] {
        let plan = built.plan(&[("rows", rows)]).map_err(say)?;
        if plan.planned_bytes > plan.file_order_bytes {
            return Err(format!("{} bytes, {} in file order", plan.planned_bytes, plan.file_order_bytes));
        }
        if plan.lower_bound_bytes > plan.planned_bytes {
            return Err(format!("{} bytes are fewer than the bound", plan.planned_bytes));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_order_is_valid_and_never_raises_the_peak(
        choices in prop::collection::vec(any::<Choice>(), 1..40),
        outputs in prop::collection::vec(any::<u16>(), 0..3),
    ) {
        check(&choices, &outputs).map_err(TestCaseError::fail)?;
    }
}

/// Branches that first widen a value and then reduce it, all of the first steps before all of the
/// second.
fn breadth_first(branches: usize) -> Result<Graph> {
    let mut builder = GraphBuilder::new("branches");
    let x = builder.input("x", DType::F32, &["rows", "8"]);
    let mut wide = Vec::new();
    for _ in 0..branches {
        wide.push(project(&mut builder, (x, 8), 256)?);
    }
    let mut sum = None;
    for value in wide {
        let narrow = project(&mut builder, (value, 256), 4)?;
        sum = Some(match sum {
            Some(sum) => builder.node("Add", &[sum, narrow], &[])?,
            None => narrow,
        });
    }
    builder.finish(&[sum.unwrap_or(x)])
}

#[test]
fn branches_run_one_after_the_other() -> Result<()> {
    let session = session(breadth_first(10)?)?;
    for rows in [16usize, 128, 1000] {
        let plan = session.plan(&[("rows", rows as i64)])?;
        let (wide, narrow) = (rows * 256 * 4, rows * 4 * 4);
        assert!(plan.file_order_bytes >= 10 * wide, "{}", plan.file_order_bytes);
        // One wide value at a time, the sum so far and what is added to it.
        assert!(plan.planned_bytes <= wide + 4 * narrow + (1 << 16), "{} at {rows}", plan.planned_bytes);
    }
    Ok(())
}

/// A large value that a node needs only at the end, and that stands first in the file.
#[test]
fn what_is_needed_late_is_computed_late() -> Result<()> {
    let mut builder = GraphBuilder::new("late");
    let x = builder.input("x", DType::F32, &["rows", "8"]);
    let early = project(&mut builder, (x, 8), 256)?;
    let mut value = project(&mut builder, (x, 8), 256)?;
    for _ in 0..4 {
        value = project(&mut builder, (value, 256), 256)?;
    }
    let narrow = project(&mut builder, (value, 256), 1)?;
    let sum = builder.node("Add", &[early, narrow], &[])?;
    let last = project(&mut builder, (sum, 256), 1)?;
    let session = session(builder.finish(&[last])?)?;
    let plan = session.plan(&[("rows", 128)])?;
    let wide = 128 * 256 * 4;
    assert!(plan.file_order_bytes >= 3 * wide, "{}", plan.file_order_bytes);
    assert!(plan.planned_bytes < 3 * wide, "{}", plan.planned_bytes);
    Ok(())
}

/// Where nothing is gained, the file's order stays.
#[test]
fn an_order_that_is_as_good_is_kept() -> Result<()> {
    let mut builder = GraphBuilder::new("kept");
    let x = builder.input("x", DType::F32, &["rows", "8"]);
    let names: Vec<ValueId> = (0..6).map(|_| project(&mut builder, (x, 8), 8)).collect::<Result<_>>()?;
    let joined = builder.node("Concat", &names, &axis(1))?;
    let graph = builder.finish(&[joined])?;
    let nodes: Vec<String> = graph.nodes.iter().map(|node| node.name.to_string()).collect();
    let order: Vec<String> = session(graph)?.steps().into_iter().map(|(node, ..)| node).collect();
    assert_eq!(order, nodes);
    Ok(())
}

/// Shapes on which a careless search would take quadratic time.
#[test]
fn large_graphs_are_ordered_at_once() -> Result<()> {
    const COUNT: usize = 20_000;
    let shared = |builder: &mut GraphBuilder, values: &[ValueId]| builder.node("Concat", values, &axis(1));
    for both in [false, true] {
        let mut builder = GraphBuilder::new("wide");
        let x = builder.input("x", DType::F32, &["rows", "8"]);
        let values: Vec<ValueId> =
            (0..COUNT).map(|_| builder.node("Neg", &[x], &[])).collect::<Result<_>>()?;
        let mut outputs = vec![shared(&mut builder, &values)?];
        if both {
            // Each value is read by a step of its own as well, so that many may be the last reader.
            for value in &values {
                outputs.push(builder.node("Abs", &[*value], &[])?);
            }
            outputs = vec![shared(&mut builder, &outputs)?];
        }
        let graph = builder.finish(&outputs)?;
        let start = Instant::now();
        session(graph)?;
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    }
    Ok(())
}
