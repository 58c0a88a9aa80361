//! In-place updates: outputs that are the new values of inputs.
//!
//! A training step has them for parameters and optimizer states. The output is computed in the
//! memory that is bound to the input, so all readers of the old value must run before the step that
//! computes it.

use crate::ir::{Graph, ValueId};
use crate::seeded::HashMap;
use crate::{Result, advise, error};

/// An output in the memory of an input, by their indices in the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Update {
    pub(crate) input: usize,
    pub(crate) output: usize,
}

/// Finds updates by the names of their inputs and outputs.
pub(crate) fn find_updates(graph: &Graph, names: &[(String, String)]) -> Result<Vec<Update>> {
    let inputs = Names::new(graph, "input", &graph.inputs);
    let outputs = Names::new(graph, "output", &graph.outputs);
    let update = |(input, output): &(String, String)| {
        Ok(Update { input: inputs.place(input)?, output: outputs.place(output)? })
    };
    names.iter().map(update).collect()
}

/// The indices of a graph's inputs or outputs by name.
struct Names<'a> {
    kind: &'static str,
    names: Vec<&'a str>,
    places: HashMap<&'a str, usize>,
}

impl<'a> Names<'a> {
    fn new(graph: &'a Graph, kind: &'static str, ids: &[ValueId]) -> Names<'a> {
        let names: Vec<&str> = ids.iter().map(|&id| &*graph.value(id).name).collect();
        // Reversed, so that the first of several equal names wins.
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
