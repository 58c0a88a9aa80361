//! Last-row logits: a graph edit that takes the last position of the hidden states before the
//! product with the vocabulary.
//!
//! A decoder's graph computes logits for every token of a prompt, and generation reads the last row
//! alone. For a vocabulary of 151,936 the rows of 4,096 tokens are 2.4 GB.

use ort_core::ir::{Attribute, Graph, GraphBuilder, Node, NodeId, ValueId, ValueType};
use ort_core::tensor::Tensor;
use ort_core::{Result, error};

/// The name of the edit for the compiled cache.
pub(crate) const EDIT: &str = "logits of the last position";

/// Products with the vocabulary: a row of the output depends on the same row of input 0 only.
const PRODUCTS: [&str; 3] = ["MatMul", "MatMulNBits", "MatMulBnb4"];

/// What may follow the product: conversions, biases and soft caps.
const ELEMENTWISE: [&str; 7] = ["Cast", "Mul", "Div", "Add", "Sub", "Tanh", "Identity"];

/// Makes the output `logits` those of the last position alone.
///
/// # Errors
///
/// There is no such output, or it is not of rank 3.
pub(crate) fn keep_last_row(graph: &mut Graph, logits: &str) -> Result<()> {
    let place = graph.outputs.iter().position(|id| &*graph.value(*id).name == logits);
    let output = place.and_then(|place| graph.outputs.get(place).copied()).ok_or_else(|| {
        let names: Vec<&str> = graph.outputs.iter().map(|id| &*graph.value(*id).name).collect();
        error!(InvalidArgument, "the model has no output '{logits}'")
            .help(ort_core::advise("outputs", logits, names))
    })?;
    if rank(graph, output) != Some(3) {
        return Err(error!(
            NotImplemented,
            "output '{logits}' is {}, expected batch, tokens and vocabulary",
            graph.value(output).ty
        )
        .help("export a decoder whose logits have three dimensions"));
    }
    let chain = chain_to_product(graph, output);
    let source = chain
        .last()
        .and_then(|(node, input)| graph.nodes.get(node.index())?.inputs.get(*input).copied().flatten());
    let rows = source.unwrap_or(output);
    let mut builder = GraphBuilder::extend(std::mem::take(graph));
    builder.set_scope("last_row");
    let index = builder.constant(Tensor::from_slice(&[1], &[-1i64])?);
    let last = builder.node("Gather", &[rows, index], &[("axis", Attribute::Int(1))])?;
    *graph = std::mem::take(builder.graph_mut());
    match chain.last() {
        Some((node, input)) => {
            let place = graph.nodes.get_mut(node.index()).and_then(|node| node.inputs.get_mut(*input));
            place.into_iter().for_each(|place| *place = Some(last));
            // The declared shapes are those of all rows.
            for (node, _) in &chain {
                let outputs = graph.nodes.get(node.index()).map(|node| node.outputs.clone());
                for id in outputs.into_iter().flatten().flatten() {
                    graph.value_mut(id).ty = ValueType::Unknown;
                }
            }
        }
        None => {
            let name = graph.value(output).name.clone();
            graph.value_mut(output).name = format!("{name} of all rows").into();
            graph.value_mut(last).name = name;
            for id in &mut graph.outputs {
                *id = if *id == output { last } else { *id };
            }
        }
    }
    Ok(())
}

/// The nodes from the logits up to the product, each with the input that holds the rows. Empty if
/// the rows cannot be taken before the product, or other nodes read them.
fn chain_to_product(graph: &Graph, output: ValueId) -> Vec<(NodeId, usize)> {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    let mut chain = Vec::new();
    let mut value = output;
    loop {
        let readers = consumers.get(value.index()).map_or(0, Vec::len);
        let as_output = graph.outputs.iter().filter(|id| **id == value).count();
        let producer = producers.get(value.index()).copied().flatten().filter(|_| readers + as_output == 1);
        let found = producer.and_then(|id| Some((id, graph.nodes.get(id.index())?)));
        let Some((id, node)) = found else { return Vec::new() };
        let is_product = PRODUCTS.contains(&node.spec.name);
        let input = if is_product { left_of_product(graph, node) } else { operand_with_rows(graph, node) };
        let next = input.and_then(|input| Some((input, node.inputs.get(input).copied().flatten()?)));
        let Some((input, next)) = next else { return Vec::new() };
        chain.push((id, input));
        if is_product {
            return chain;
        }
        value = next;
    }
}

/// Input 0 of a product, if it has rows along axis 1 and the weight is the same for all of them.
fn left_of_product(graph: &Graph, node: &Node) -> Option<usize> {
    let left = node.inputs.first().copied().flatten()?;
    let is_weight = |id: &ValueId| graph.constants.contains_key(id) || rank(graph, *id) <= Some(2);
    let others = node.inputs.iter().skip(1).flatten();
    (rank(graph, left) == Some(3) && others.into_iter().all(is_weight)).then_some(0)
}

/// The only operand that is not a constant, if it has rows along axis 1 and the constants do not.
fn operand_with_rows(graph: &Graph, node: &Node) -> Option<usize> {
    if !ELEMENTWISE.contains(&node.spec.name) {
        return None;
    }
    let mut found = None;
    for (index, id) in node.inputs.iter().enumerate() {
        let Some(id) = *id else { continue };
        let is_constant = graph.constants.contains_key(&id) && rank(graph, id) <= Some(1);
        if !is_constant && found.replace((index, id)).is_some() {
            return None;
        }
    }
    found.filter(|(_, id)| rank(graph, *id) == Some(3)).map(|(index, _)| index)
}

fn rank(graph: &Graph, id: ValueId) -> Option<usize> {
    graph.value(id).ty.shape().map(<[_]>::len)
}
