//! Text form of a graph, one line per node.

use std::fmt;

use super::{Attribute, Graph, ValueId};

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_indented(f, 0)
    }
}

impl Graph {
    fn write_indented(&self, f: &mut fmt::Formatter<'_>, depth: usize) -> fmt::Result {
        let indent = "  ".repeat(depth);
        let typed = |id: &ValueId| format!("%{}: {}", self.value(*id).name, self.value(*id).ty);
        let inputs: Vec<String> = self.inputs.iter().map(typed).collect();
        writeln!(f, "{indent}graph {}({}) {{", self.name, inputs.join(", "))?;
        // The elements of constants are left out, because weights may be gigabytes.
        for (id, tensor) in &self.constants {
            let shape = tensor.shape();
            writeln!(f, "{indent}  %{} = constant {}{shape:?}", self.value(*id).name, tensor.dtype().name())?;
        }
        for node in &self.nodes {
            let outputs: Vec<String> =
                node.outputs.iter().map(|id| id.as_ref().map_or("_".to_string(), typed)).collect();
            let name =
                |id: &Option<ValueId>| id.map_or("_".to_string(), |id| format!("%{}", self.value(id).name));
            let inputs: Vec<String> = node.inputs.iter().map(name).collect();
            let attrs: Vec<String> =
                node.attrs.iter().map(|(name, value)| format!("{name}={}", short(value))).collect();
            let attrs = if attrs.is_empty() { String::new() } else { format!(" {{{}}}", attrs.join(", ")) };
            writeln!(
                f,
                "{indent}  {} = {}({}){attrs}",
                outputs.join(", "),
                node.spec.name,
                inputs.join(", ")
            )?;
            for subgraph in &node.subgraphs {
                writeln!(f, "{indent}    {}:", subgraph.attr)?;
                subgraph.graph.write_indented(f, depth + 3)?;
            }
        }
        let outputs: Vec<String> = self.outputs.iter().map(typed).collect();
        writeln!(f, "{indent}  return {}", outputs.join(", "))?;
        writeln!(f, "{indent}}}")
    }
}

fn short(value: &Attribute) -> String {
    match value {
        Attribute::Int(value) => value.to_string(),
        Attribute::Float(value) => value.to_string(),
        Attribute::String(value) => format!("{value:?}"),
        Attribute::Ints(value) => format!("{value:?}"),
        Attribute::Floats(value) => format!("{value:?}"),
        Attribute::Strings(value) => format!("{value:?}"),
        Attribute::Tensor(value) => format!("{}{:?}", value.dtype().name(), value.shape()),
        Attribute::Bytes(value) => format!("{} bytes", value.len()),
        Attribute::Tensors(value) => format!("{} tensors", value.len()),
        Attribute::Sparse(value) => format!("sparse{:?}", value.shape),
        Attribute::Type(value) => value.to_string(),
    }
}
