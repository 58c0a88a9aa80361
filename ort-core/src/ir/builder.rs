//! Graph builder for tests and decompositions.

use super::{Attribute, Graph, Node, Subgraph, ValueId, ValueType};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::spec::{Registry, infer_graph};
use crate::tensor::Tensor;
use crate::{Result, error};

/// Builds a graph node by node. Each addition returns the new values.
///
/// ```no_run
/// use ort_core::dtype::DType;
/// use ort_core::ir::GraphBuilder;
/// let mut builder = GraphBuilder::new("sum");
/// let a = builder.input("a", DType::F32, &["batch", "4"]);
/// let b = builder.input("b", DType::F32, &["4"]);
/// let sum = builder.node("Add", &[a, b], &[])?;
/// let graph = builder.finish(&[sum])?;
/// # Ok::<(), ort_core::Error>(())
/// ```
#[derive(Debug)]
pub struct GraphBuilder {
    graph: Graph,
    /// Prefix of node names.
    scope: String,
}

impl GraphBuilder {
    /// Returns a builder of an empty graph of this name.
    pub fn new(name: &str) -> GraphBuilder {
        GraphBuilder { graph: Graph::new(name), scope: String::new() }
    }

    /// Returns a builder that extends an existing graph.
    pub fn extend(graph: Graph) -> GraphBuilder {
        GraphBuilder { graph, scope: String::new() }
    }

    /// Prefixes the names of nodes added from now on with `scope/`.
    pub fn set_scope(&mut self, scope: &str) {
        self.scope = format!("{scope}/");
    }

    /// Returns the graph built so far.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Returns the graph built so far, for changes.
    pub fn graph_mut(&mut self) -> &mut Graph {
        &mut self.graph
    }

    /// Adds a tensor input. Each dimension is a number or an expression over symbols.
    pub fn input(&mut self, name: &str, dtype: DType, shape: &[&str]) -> ValueId {
        let shape = shape.iter().map(|text| Dim::parse(text)).collect();
        self.typed_input(name, ValueType::tensor(dtype, Some(shape)))
    }

    /// Adds an input of any type.
    pub fn typed_input(&mut self, name: &str, ty: ValueType) -> ValueId {
        let id = self.graph.add_value(name, ty);
        self.graph.inputs.push(id);
        id
    }

    /// Adds a constant.
    pub fn constant(&mut self, tensor: Tensor) -> ValueId {
        let name = format!("constant_{}", self.graph.value_count());
        self.graph.add_constant(name, tensor)
    }

    /// Adds a node of the standard domain with one output.
    pub fn node(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) -> Result<ValueId> {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let outputs = self.add(("", op), &inputs, attrs, 1, Vec::new())?;
        outputs.first().copied().ok_or_else(|| error!(Fail, "{op} has no output"))
    }

    /// Adds a node of any domain, with optional inputs, several outputs, and subgraphs.
    pub fn add(
        &mut self,
        (domain, op): (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
        subgraphs: Vec<Subgraph>,
    ) -> Result<Vec<ValueId>> {
        let spec = Registry::global()?.operator(domain, op)?;
        let name = format!("{}{op}_{}", self.scope, self.graph.nodes.len());
        let (node, values) = self.graph.new_node(spec, name.into(), inputs, attrs, outputs)?;
        self.graph.nodes.push(Node { subgraphs, ..node });
        Ok(values)
    }

    /// Finishes the graph with these outputs: sorts the nodes, infers types and shapes, and
    /// verifies it.
    pub fn finish(mut self, outputs: &[ValueId]) -> Result<Graph> {
        self.graph.outputs = outputs.to_vec();
        // Inference visits nodes in order, so they are sorted first.
        self.graph.sort()?;
        infer_graph(&mut self.graph)?;
        super::verify::verify(&self.graph)?;
        Ok(self.graph)
    }

    /// Finishes a subgraph, which is neither sorted nor inferred here: inference of the enclosing
    /// node infers it.
    pub fn finish_subgraph(mut self, outputs: &[ValueId]) -> Graph {
        self.graph.outputs = outputs.to_vec();
        self.graph
    }
}
