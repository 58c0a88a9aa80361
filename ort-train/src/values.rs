//! Values of training graphs: the names of those that the trainer adds, and how others are found.

use std::collections::HashMap;
use std::sync::Arc;

use ort_core::ir::{Graph, Node, ValueId};
use ort_core::tensor::Tensor;
use ort_core::{Result, advise, ensure, error};

/// A statistic that the forward pass itself updates, such as the running mean of
/// `BatchNormalization`.
#[derive(Clone, Debug)]
pub(crate) struct Statistic {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    pub(crate) updated: ValueId,
}

/// The input for the loss scale, in graphs that have one.
pub(crate) const LOSS_SCALE: &str = "loss.scale";

/// The input for the random seed, in graphs with dropout.
pub(crate) const SEED: &str = "dropout.seed";

/// The input for the counter that dropout draws a step's random numbers from, in graphs with
/// dropout.
pub(crate) const COUNTER: &str = "dropout.step";

/// The mode of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Train,
    Evaluate,
}

/// Indexes the values by name. If names repeat, the first value wins.
pub(crate) fn values_by_name(graph: &Graph) -> HashMap<Arc<str>, ValueId> {
    let mut values = HashMap::with_capacity(graph.value_count());
    for id in graph.value_ids() {
        values.entry(graph.value(id).name.clone()).or_insert(id);
    }
    values
}

/// Returns the values of these names, all of which a node must compute.
pub(crate) fn named_values(graph: &Graph, names: &[String]) -> Result<Vec<ValueId>> {
    let producers = graph.producers();
    let made = |id: ValueId| producers.get(id.index()).is_some_and(Option::is_some);
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let value = graph.find_value(name).filter(|id| made(*id)).ok_or_else(|| {
            let known = graph.value_ids().filter(|id| made(*id)).map(|id| &*graph.value(id).name);
            let known: Vec<&str> = known.collect();
            error!(InvalidArgument, "no node of the model computes '{name}'")
                .help(advise("values", name, known))
        })?;
        ensure!(!found.contains(&value), InvalidArgument, "output '{name}' is asked for twice");
        found.push(value);
    }
    Ok(found)
}

/// The name of the output for the loss.
pub(crate) const LOSS: &str = "loss";

/// Whether a node is this operator of the standard domain.
pub(crate) fn is_standard(node: &Node, op: &str) -> bool {
    node.spec.domain.is_empty() && node.spec.name == op
}
