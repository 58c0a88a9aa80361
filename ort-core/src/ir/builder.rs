//! Builds graphs by hand, for tests and for decompositions.

use std::sync::Arc;

use super::{Attribute, Attributes, Graph, Node, Subgraph, ValueId, ValueType};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::spec::{Registry, infer_graph};
use crate::tensor::Tensor;
use crate::{Result, Within, error};

/// Adds nodes one after another; each addition returns the new values.
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
    /// What the names of nodes begin with.
    scope: String,
}

impl GraphBuilder {
    /// An empty graph called `name`.
    pub fn new(name: &str) -> GraphBuilder {
        GraphBuilder { graph: Graph::new(name), scope: String::new() }
    }

    /// A builder that adds to a graph that exists.
    pub fn extend(graph: Graph) -> GraphBuilder {
        GraphBuilder { graph, scope: String::new() }
    }

    /// Has the names of the nodes that are added from now on begin with `scope/`.
    pub fn set_scope(&mut self, scope: &str) {
        self.scope = format!("{scope}/");
    }

    /// The graph as far as it is built.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The same, to change.
    pub fn graph_mut(&mut self) -> &mut Graph {
        &mut self.graph
    }

    /// An input; each dimension is a number or an expression of symbols.
    pub fn input(&mut self, name: &str, dtype: DType, shape: &[&str]) -> ValueId {
        let shape = shape.iter().map(|text| Dim::parse(text)).collect();
        self.typed_input(name, ValueType::tensor(dtype, Some(shape)))
    }

    /// An input of any type.
    pub fn typed_input(&mut self, name: &str, ty: ValueType) -> ValueId {
        let id = self.graph.add_value(name, ty);
        self.graph.inputs.push(id);
        id
    }

    /// A constant.
    pub fn constant(&mut self, tensor: Tensor) -> ValueId {
        let name = format!("constant_{}", self.graph.value_count());
        self.graph.add_constant(name, tensor)
    }

    /// A node of the standard domain with one output.
    pub fn node(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) -> Result<ValueId> {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let outputs = self.add(("", op), &inputs, attrs, 1, Vec::new())?;
        outputs.first().copied().ok_or_else(|| error!(Fail, "{op} has no output"))
    }

    /// A node of any domain with left-out inputs, several outputs, and subgraphs.
    pub fn add(
        &mut self,
        (domain, op): (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
        subgraphs: Vec<Subgraph>,
    ) -> Result<Vec<ValueId>> {
        let spec = Registry::global()?
            .find(domain, op)
            .ok_or_else(|| error!(NotImplemented, "operator {op} of domain '{domain}' is not known"))?;
        let name: Arc<str> = format!("{}{op}_{}", self.scope, self.graph.nodes.len()).into();
        let given = attrs.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
        let attrs = Attributes::new(spec, given).within(|| format!("node '{name}' ({op})"))?;
        let ids: Vec<ValueId> = (0..outputs)
            .map(|index| self.graph.add_value(format!("{name}.{index}"), ValueType::Unknown))
            .collect();
        self.graph.nodes.push(Node {
            name,
            spec,
            inputs: inputs.into(),
            outputs: ids.iter().copied().map(Some).collect(),
            attrs,
            subgraphs,
        });
        Ok(ids)
    }

    /// The graph with these outputs, sorted and inferred.
    pub fn finish(mut self, outputs: &[ValueId]) -> Result<Graph> {
        self.graph.outputs = outputs.to_vec();
        self.graph.sort()?;
        infer_graph(&mut self.graph)?;
        super::verify::verify(&self.graph)?;
        Ok(self.graph)
    }

    /// The graph as it stands, not yet inferred; for subgraphs, which are inferred with their node.
    pub fn finish_subgraph(mut self, outputs: &[ValueId]) -> Graph {
        self.graph.outputs = outputs.to_vec();
        self.graph
    }
}
