//! Outputs that are the new values of inputs, as a training step has them for parameters and
//! states: they are computed in the memory that a binding has for the input, so whoever else reads
//! the old value runs before.

use crate::ir::{Graph, ValueId};
use crate::seeded::HashMap;
use crate::{Result, advise, error};

/// An output in the memory of an input, by their positions in the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Update {
    pub(crate) input: usize,
    pub(crate) output: usize,
}

/// Finds inputs and outputs by their names.
pub(crate) fn find_updates(graph: &Graph, names: &[(String, String)]) -> Result<Vec<Update>> {
    let inputs = Names::new(graph, "input", &graph.inputs);
    let outputs = Names::new(graph, "output", &graph.outputs);
    let update = |(input, output): &(String, String)| {
        Ok(Update { input: inputs.place(input)?, output: outputs.place(output)? })
    };
    names.iter().map(update).collect()
}

/// The positions of a graph's inputs or outputs by name.
struct Names<'a> {
    kind: &'static str,
    names: Vec<&'a str>,
    places: HashMap<&'a str, usize>,
}

impl<'a> Names<'a> {
    fn new(graph: &'a Graph, kind: &'static str, ids: &[ValueId]) -> Names<'a> {
        let names: Vec<&str> = ids.iter().map(|&id| &*graph.value(id).name).collect();
        // Of equal names the first counts.
        let places = names.iter().enumerate().rev().map(|(place, name)| (*name, place)).collect();
        Names { kind, names, places }
    }

    fn place(&self, name: &str) -> Result<usize> {
        self.places.get(name).copied().ok_or_else(|| {
            let Names { kind, names, .. } = self;
            let help = advise(&format!("{kind}s"), name, names.iter().copied());
            error!(InvalidArgument, "the model has no {kind} '{name}'").help(help)
        })
    }
}
