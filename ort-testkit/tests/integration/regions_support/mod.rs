//! Graphs written as text, devices that refuse operators, and what sessions make of them.

#![allow(dead_code, reason = "each test uses some of it")]

use std::collections::HashMap;
use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Graph, GraphBuilder};
use ort_core::session::Session;
use ort_core::spec::Registry;
use ort_core::{Error, Result, error};
use ort_ep_cpu as _;
use ort_testkit::DecomposingDevice;

/// A graph and, for each of its nodes, the name of its value in the text.
pub(crate) struct Drawn {
    pub(crate) graph: Graph,
    pub(crate) names: HashMap<String, String>,
}

/// The graph of `a = Neg x; b = Add a x`: values of one shape, and the input `x`. What has no
/// reader is an output, and so is `a!`.
pub(crate) fn draw(shape: &[&str], text: &str) -> Result<Drawn> {
    let mut builder = GraphBuilder::new("drawn");
    let mut known = HashMap::from([("x", builder.input("x", DType::F32, shape))]);
    let (mut names, mut outputs) = (HashMap::new(), Vec::new());
    for (index, line) in text.split(';').enumerate() {
        let (name, formula) = line.split_once(" = ").ok_or_else(|| unreadable(line))?;
        let (op, inputs) = formula.split_once(' ').ok_or_else(|| unreadable(line))?;
        let inputs: Vec<_> = inputs.split(' ').map(|input| known[input]).collect();
        let value = builder.node(op, &inputs, &[])?;
        outputs.retain(|(marked, output)| *marked || !inputs.contains(output));
        let plain = name.trim().trim_end_matches('!');
        outputs.push((name.ends_with('!'), value));
        known.insert(plain, value);
        names.insert(format!("{op}_{index}"), plain.to_owned());
    }
    let outputs: Vec<_> = outputs.into_iter().map(|(_, value)| value).collect();
    Ok(Drawn { graph: builder.finish(&outputs)?, names })
}

fn unreadable(text: &str) -> Error {
    error!(InvalidArgument, "'{text}' is not a value, an operator and its inputs")
}

/// A device without the operators that its provider refuses.
pub(crate) fn refusing(device: &Arc<dyn Device>, refused: &[(&str, &str)]) -> Result<Arc<dyn Device>> {
    let registry = Registry::global()?;
    let own = refused.iter().filter(|(provider, _)| *provider == device.info().provider);
    let own = own.map(|(_, op)| registry.find("", op).ok_or_else(|| unreadable(op)));
    Ok(DecomposingDevice::new(device.clone(), &own.collect::<Result<Vec<_>>>()?))
}

/// `a opaque, b cpu`, sorted.
pub(crate) fn places(session: &Session, names: &HashMap<String, String>) -> String {
    let placement = session.placement().into_iter();
    let mut places: Vec<String> =
        placement.map(|placed| format!("{} {}", names[&placed.node], placed.provider)).collect();
    places.sort();
    places.join(", ")
}

/// The number of copies between memories.
pub(crate) fn copies(session: &Session) -> usize {
    session.steps().iter().filter(|(_, op, _)| op == "Copy").count()
}
