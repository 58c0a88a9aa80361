//! The time to place a graph's nodes grows as the graph does, whatever its shape.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Graph, GraphBuilder, ValueId};
use ort_core::placement::{Scope, partition};
use ort_ep_cpu as _;
use ort_testkit::{OpaqueDevice, Target};

/// A small graph's nodes, and how many times larger the large one is.
const NODES: usize = 2_000;
const GROWTH: usize = 8;
/// How much more slowly the large graph may be placed than by its size: with quadratic work it
/// would be `GROWTH`.
const SLACK: f64 = 3.0;

/// The next value of a graph from its values so far.
type Grow = fn(&mut GraphBuilder, usize, &[ValueId]) -> Result<ValueId>;

/// The operator of a node in a chain where runs of a device's nodes become longer and longer.
fn op_of_longer_runs(index: usize) -> &'static str {
    let run = index.isqrt();
    if index == run * run { "Sqrt" } else { "Neg" }
}

const CASES: &[(&str, Grow)] = &[
    ("nodes of the device and the host in turn", |builder, index, values| {
        let op = if index.is_multiple_of(2) { "Sqrt" } else { "Neg" };
        builder.node(op, &values[values.len() - 1..], &[])
    }),
    ("islands of all sizes", |builder, index, values| {
        builder.node(op_of_longer_runs(index), &values[values.len() - 1..], &[])
    }),
    ("one value read by all", |builder, index, values| {
        let op = if index.is_multiple_of(2) { "Sqrt" } else { "Neg" };
        builder.node(op, &values[values.len().min(2) - 1..][..1], &[])
    }),
    ("each value read far away", |builder, index, values| match index % 3 {
        0 => builder.node("Sqrt", &values[values.len() - 1..], &[]),
        1 => builder.node("Add", &[values[index / 2], values[index]], &[]),
        _ => builder.node("MatMul", &[values[index / 3], values[index]], &[]),
    }),
];

fn graph(count: usize, grow: Grow) -> Result<Graph> {
    let mut builder = GraphBuilder::new("large");
    let mut values = vec![builder.input("x", DType::F32, &["16", "16"])];
    for index in 0..count {
        values.push(grow(&mut builder, index, &values)?);
    }
    builder.finish(&values[values.len() - 1..])
}

/// The shortest time of several, as others may use the machine.
fn fastest(graph: Graph, tries: usize) -> Result<Duration> {
    let devices = Target::mixed(&OpaqueDevice::new(None))?.devices;
    let mut graph = Arc::new(graph);
    let mut best = Duration::MAX;
    for _ in 0..tries {
        let start = Instant::now();
        let placed = partition(&mut graph, &devices, Scope::Model)?;
        best = best.min(start.elapsed());
        assert_eq!(placed.nodes.len(), graph.nodes.len());
    }
    Ok(best)
}

#[test]
fn placing_takes_time_in_proportion_to_the_nodes() -> Result<()> {
    for (name, grow) in CASES {
        let small = fastest(graph(NODES, *grow)?, 3)?;
        let large = fastest(graph(NODES * GROWTH, *grow)?, 2)?;
        let ratio = large.as_secs_f64() / small.as_secs_f64();
        println!("{name}: {small:?} and {large:?}, {ratio:.1} times for {GROWTH} times the nodes");
        assert!(ratio < GROWTH as f64 * SLACK, "{name}: {ratio:.1} times the time");
    }
    Ok(())
}
