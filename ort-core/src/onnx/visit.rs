//! Visitors of the tensors of a model message, wherever they are: initializers, sparse initializers
//! and attributes, in the graph, in its subgraphs and in functions.

use super::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto};
use crate::Result;

/// What is called with each tensor.
type Visit<'v> = dyn FnMut(&mut TensorProto) -> Result<()> + 'v;

/// Calls `visit` with each tensor of a model, and stops at the first error.
pub fn visit_tensors(model: &mut ModelProto, visit: &mut Visit<'_>) -> Result<()> {
    for function in &mut model.functions {
        visit_attributes(&mut function.attribute_proto, visit)?;
        visit_node_tensors(&mut function.node, visit)?;
    }
    for training in &mut model.training_info {
        let mut graphs = training.initialization.iter_mut().chain(&mut training.algorithm);
        graphs.try_for_each(|graph| visit_graph(graph, visit))?;
    }
    model.graph.iter_mut().try_for_each(|graph| visit_graph(graph, visit))
}

/// Calls `visit` with each tensor in the attributes of nodes and in their subgraphs.
pub fn visit_node_tensors(nodes: &mut [NodeProto], visit: &mut Visit<'_>) -> Result<()> {
    nodes.iter_mut().try_for_each(|node| visit_attributes(&mut node.attribute, visit))
}

fn visit_graph(graph: &mut GraphProto, visit: &mut Visit<'_>) -> Result<()> {
    graph.initializer.iter_mut().try_for_each(&mut *visit)?;
    graph.sparse_initializer.iter_mut().try_for_each(|sparse| visit_sparse(sparse, visit))?;
    visit_node_tensors(&mut graph.node, visit)
}

fn visit_sparse(sparse: &mut SparseTensorProto, visit: &mut Visit<'_>) -> Result<()> {
    sparse.values.iter_mut().chain(&mut sparse.indices).try_for_each(visit)
}

fn visit_attributes(attributes: &mut [AttributeProto], visit: &mut Visit<'_>) -> Result<()> {
    for attribute in attributes {
        attribute.t.as_deref_mut().into_iter().chain(&mut attribute.tensors).try_for_each(&mut *visit)?;
        let mut sparse =
            attribute.sparse_tensor.as_deref_mut().into_iter().chain(&mut attribute.sparse_tensors);
        sparse.try_for_each(|sparse| visit_sparse(sparse, visit))?;
        let mut graphs = attribute.g.as_deref_mut().into_iter().chain(&mut attribute.graphs);
        graphs.try_for_each(|graph| visit_graph(graph, visit))?;
    }
    Ok(())
}
