//! Random graphs of elementwise operators and operators that move data, run whole and node by node.

use std::collections::HashMap;

use ort_runtime::ir::{Attribute, Graph, GraphBuilder, Node, ValueId};
use ort_runtime::{DType, Result, Tensor, Value};

use crate::support::{axis, inputs_of, ints, numbers, run, session};

/// One step: which operator, and which values it reads, as numbers to be taken modulo what there
/// is.
pub(crate) type Choice = (u8, u16, u16);

/// The most elements of one value.
const LARGEST: usize = 2048;

struct Grown {
    builder: GraphBuilder,
    values: Vec<(ValueId, Vec<usize>)>,
}

impl Grown {
    fn add(&mut self, (kind, first, second): Choice) -> Result<()> {
        let (a, shape) = self.values[first as usize % self.values.len()].clone();
        let alike: Vec<ValueId> =
            self.values.iter().filter(|(_, other)| *other == shape).map(|(id, _)| *id).collect();
        let other = alike[second as usize % alike.len()];
        let rows = shape[0];
        let count: usize = shape.iter().product();
        let builder = &mut self.builder;
        let (result, shape) = match kind % 12 {
            0 => (builder.node("Neg", &[a], &[])?, shape),
            1 => (builder.node("Relu", &[a], &[])?, shape),
            2 => (builder.node("Abs", &[a], &[])?, shape),
            3 => (builder.node("Add", &[a, other], &[])?, shape),
            4 => (builder.node("Sub", &[a, other], &[])?, shape),
            5 => (builder.node("Max", &[a, other], &[])?, shape),
            6 => {
                let target = if shape.len() == 1 && count.is_multiple_of(2) {
                    vec![2, count / 2]
                } else {
                    vec![count]
                };
                let sizes: Vec<i64> = target.iter().map(|&size| size as i64).collect();
                let sizes = builder.constant(ints(&sizes)?);
                (builder.node("Reshape", &[a, sizes], &[])?, target)
            }
            7 => {
                let turned = shape.iter().rev().copied().collect();
                (builder.node("Transpose", &[a], &[])?, turned)
            }
            8 if rows > 1 => {
                let (from, to) = if second.is_multiple_of(2) { (0, rows / 2) } else { (rows / 2, rows) };
                let bound = |builder: &mut GraphBuilder, at: usize| -> Result<ValueId> {
                    Ok(builder.constant(ints(&[at as i64])?))
                };
                let (start, end) = (bound(builder, from)?, bound(builder, to)?);
                let mut part = shape.clone();
                part[0] = to - from;
                (builder.node("Slice", &[a, start, end], &[])?, part)
            }
            9 if rows.is_multiple_of(2) => {
                let parts = builder.add(("", "Split"), &[Some(a)], &axis(0), 2, Vec::new())?;
                let mut part = shape.clone();
                part[0] = rows / 2;
                self.values.push((parts[0], part.clone()));
                (parts[1], part)
            }
            10 if count * 2 <= LARGEST => {
                let mut both = shape.clone();
                both[0] *= 2;
                (builder.node("Concat", &[a, other], &axis(0))?, both)
            }
            _ => (builder.node("Identity", &[a], &[])?, shape),
        };
        self.values.push((result, shape));
        Ok(())
    }
}

fn grow(choices: &[Choice], outputs: &[u16]) -> Result<Graph> {
    let mut builder = GraphBuilder::new("random");
    let x = builder.input("x", DType::F32, &["4", "6"]);
    let y = builder.input("y", DType::F32, &["4", "6"]);
    let weight = builder.constant(numbers(&[4, 6], 9)?);
    let values = [x, y, weight].map(|id| (id, vec![4, 6])).to_vec();
    let mut grown = Grown { builder, values };
    for choice in choices {
        grown.add(*choice)?;
    }
    let mut ids: Vec<ValueId> =
        outputs.iter().map(|&index| grown.values[index as usize % grown.values.len()].0).collect();
    ids.extend(grown.values.last().map(|(id, _)| *id));
    grown.builder.finish(&ids)
}

/// Runs one node in a session of its own; its inputs are given, never constants.
fn run_node(graph: &Graph, node: &Node, known: &HashMap<ValueId, Tensor>) -> Result<Vec<Tensor>> {
    let mut builder = GraphBuilder::new("node");
    let mut ids = Vec::new();
    let mut given: Vec<(String, Value)> = Vec::new();
    for input in &node.inputs {
        ids.push(match input {
            None => None,
            Some(id) if node.spec.inputs[ids.len().min(node.spec.inputs.len() - 1)].host => {
                Some(builder.constant(known[id].clone()))
            }
            Some(id) => {
                let name = format!("input_{}", given.len());
                given.push((name.clone(), known[id].clone().into()));
                Some(builder.typed_input(&name, graph.value(*id).ty.clone()))
            }
        });
    }
    let attrs: Vec<(&str, Attribute)> =
        node.attrs.iter().map(|(name, value)| (name, value.clone())).collect();
    let operator = (node.spec.domain, node.spec.name);
    let outputs = builder.add(operator, &ids, &attrs, node.outputs.len(), Vec::new())?;
    let session = session(builder.finish(&outputs)?)?;
    let outputs = run(&session, &given)?;
    outputs.into_iter().map(|(_, value)| value.tensor().cloned()).collect()
}

fn node_by_node(graph: &Graph, inputs: &[(String, Value)]) -> Result<Vec<Tensor>> {
    let mut known: HashMap<ValueId, Tensor> =
        graph.constants.iter().map(|(id, tensor)| (*id, tensor.clone())).collect();
    for (id, (_, value)) in graph.inputs.iter().zip(inputs) {
        known.insert(*id, value.tensor()?.clone());
    }
    for node in &graph.nodes {
        let outputs = run_node(graph, node, &known)?;
        known.extend(node.outputs.iter().flatten().copied().zip(outputs));
    }
    Ok(graph.outputs.iter().map(|id| known[id].clone()).collect())
}

/// What is wrong with a run of this graph, if anything: a plan that is not what was taken, or other
/// numbers than node by node.
pub(crate) fn check(choices: &[Choice], outputs: &[u16]) -> Result<(), String> {
    let say = |problem: ort_runtime::Error| problem.to_string();
    let graph = grow(choices, outputs).map_err(say)?;
    let session = session(graph.clone()).map_err(say)?;
    let inputs = inputs_of(&session, 0).map_err(say)?;
    let planned = session.plan(&[]).map_err(say)?.peak_bytes;
    let actual = run(&session, &inputs).map_err(say)?;
    let taken = Some(session.memory().activations_peak);
    if planned != taken {
        return Err(format!("planned {planned:?} bytes, took {taken:?}\n{graph}"));
    }
    let expected = node_by_node(&graph, &inputs).map_err(say)?;
    // The slab has other contents now; a second run must not read them.
    let again = run(&session, &inputs).map_err(say)?;
    for (index, expected) in expected.iter().enumerate() {
        for outputs in [&actual, &again] {
            let actual = outputs[index].1.tensor().map_err(say)?;
            let same_shape = actual.shape() == expected.shape();
            let (actual, expected) =
                (actual.to_vec::<f32>().map_err(say)?, expected.to_vec::<f32>().map_err(say)?);
            if !same_shape || actual != expected {
                return Err(format!("output {index}: {actual:?} instead of {expected:?}\n{graph}"));
            }
        }
    }
    Ok(())
}
