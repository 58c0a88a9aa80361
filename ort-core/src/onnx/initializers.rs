//! Initializers: read from the file, from external data, or taken from the caller.

use std::collections::HashSet;

use indexmap::IndexMap;

use super::build::Loader;
use super::order::for_each_subgraph;
use super::proto::tensor_proto::DataLocation;
use super::proto::{GraphProto, SparseTensorProto, TensorProto};
use super::tensor::{dense_from_proto, tensor_from_proto};
use super::warnings::WarningKind;
use crate::Result;
use crate::tensor::Tensor;

impl Loader<'_> {
    /// Reads the initializers of a graph, by name. If one is defined twice the last definition
    /// wins, as in ONNX Runtime.
    pub(super) fn read_constants(
        &mut self,
        graph: &GraphProto,
        dense: Vec<TensorProto>,
        sparse: Vec<SparseTensorProto>,
    ) -> Result<IndexMap<String, Option<Tensor>>> {
        let mut constants = IndexMap::new();
        let mut read = None;
        for proto in dense {
            let name = proto.name().to_string();
            if !self.takes_initializer(&name, constants.contains_key(&name), proto.segment.is_some())? {
                continue;
            }
            let is_external = proto.data_location() == DataLocation::External as i32;
            if let Some(given) = self.given.value(&name, proto.data_type(), &proto.dims, is_external)? {
                constants.insert(name, Some(given));
                continue;
            }
            match tensor_from_proto(proto, &mut self.external) {
                Ok(tensor) => {
                    constants.insert(name, Some(tensor));
                }
                Err(problem) if is_external && !is_read(graph, &name, &mut read) => {
                    let text = format!("its data are missing, and no node reads it: {problem}");
                    let place = || format!("initializer '{name}'");
                    self.warnings.add(WarningKind::Initializer, place, text)?;
                }
                Err(problem) => return Err(problem),
            }
        }
        for proto in sparse {
            let name = proto.values.as_ref().map_or("", |values| values.name()).to_string();
            if !self.takes_initializer(&name, constants.contains_key(&name), false)? {
                continue;
            }
            let code = proto.values.as_ref().map_or(0, |values| values.data_type());
            let tensor = match self.given.value(&name, code, &proto.dims, false)? {
                Some(given) => given,
                None => dense_from_proto(proto, &mut self.external, &mut self.folded_bytes)?,
            };
            constants.insert(name, Some(tensor));
        }
        Ok(constants)
    }

    /// Warns of an initializer that violates the standard. Returns whether it is kept: one without
    /// a name cannot have readers.
    fn takes_initializer(&mut self, name: &str, is_known: bool, is_segment: bool) -> Result<bool> {
        let problems = [
            (name.is_empty(), "it has no name, and is ignored"),
            (is_known, "it is defined twice; the last definition counts"),
            (is_segment, "it is marked as a segment of a larger tensor; the mark is ignored"),
        ];
        for (_, text) in problems.iter().filter(|(is_so, _)| *is_so) {
            self.warnings.add(WarningKind::Initializer, || format!("initializer '{name}'"), *text)?;
        }
        Ok(!name.is_empty())
    }
}

/// Returns whether a node of the graph or of its subgraphs reads a name, or a graph output bears
/// it. The set of names read is computed on first use.
fn is_read<'g>(graph: &'g GraphProto, name: &str, read: &mut Option<HashSet<&'g str>>) -> bool {
    let names = read.get_or_insert_with(|| {
        let mut names = HashSet::new();
        let mut work = vec![graph];
        while let Some(graph) = work.pop() {
            // A name that an inner graph defines itself counts, too: then missing data is an error,
            // not a warning.
            names.extend(graph.output.iter().map(|output| output.name()));
            for node in &graph.node {
                names.extend(node.input.iter().map(String::as_str));
                for_each_subgraph(node, &mut |inner| work.push(inner));
            }
        }
        names
    });
    names.contains(name)
}
