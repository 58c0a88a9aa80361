//! Placement report: which provider runs each node of a session, and why.

use std::sync::Arc;

use rustc_hash::FxHashSet;

use crate::ep::{Device, NodeView, guard};
use crate::ir::ValueId;
use crate::program::{Program, Reason, Step};

/// Where a node runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePlacement {
    /// The node's name.
    pub node: String,
    /// Its operator, with the domain if that is not ONNX's own.
    pub operator: String,
    /// The provider that runs it.
    pub provider: &'static str,
    /// Why it runs there; `to_string` returns the reason as text.
    pub reason: Reason,
    /// The providers that the session prefers to this one, each with the reason why it does not run
    /// the node.
    pub refusals: Vec<(&'static str, String)>,
    /// Whether the node reads only constants and the shapes of the session's inputs, so that its
    /// result follows from the sizes.
    pub of_shapes: bool,
}

/// Returns where each node runs, in the order of the steps. Transfers between memories are left
/// out.
pub(crate) fn placements(program: &Program, devices: &[Arc<dyn Device>]) -> Vec<NodePlacement> {
    let mut shapes = FxHashSet::default();
    program.steps.iter().filter_map(|step| placement_of(program, devices, step, &mut shapes)).collect()
}

/// Returns the placement of a step's node; `None` for a transfer. If the node's outputs follow from
/// sizes, adds them to `shapes`, the set of such values.
fn placement_of(
    program: &Program,
    devices: &[Arc<dyn Device>],
    step: &Step,
    shapes: &mut FxHashSet<ValueId>,
) -> Option<NodePlacement> {
    let Program { graph, reasons, .. } = program;
    let node = graph.nodes.get(step.node?)?;
    let reason = reasons.get(step.node?).copied().unwrap_or_default();
    let view = NodeView { graph, node };
    let refusals = devices.iter().take(step.device).map(|device| {
        // If the provider claims the node, the placement's reason says why it was passed over.
        let why = guard::claim(&**device, &view).err().unwrap_or_else(|| reason.to_string());
        (device.info().provider, why)
    });
    let is_known = |value: ValueId| graph.constants.contains_key(&value) || shapes.contains(&value);
    // These operators read no elements, so their input may be any value.
    let looks_at_shape = matches!((node.spec.domain, node.spec.name), ("", "Shape" | "Size"));
    let of_shapes = looks_at_shape || (node.subgraphs.is_empty() && node.reads().all(is_known));
    if of_shapes {
        shapes.extend(node.outputs.iter().flatten());
    }
    let domain = node.spec.domain;
    let separator = if domain.is_empty() { "" } else { "." };
    Some(NodePlacement {
        node: node.name.to_string(),
        operator: format!("{domain}{separator}{}", node.spec.name),
        provider: devices.get(step.device)?.info().provider,
        reason,
        refusals: refusals.collect(),
        of_shapes,
    })
}

/// Returns the steps in execution order, transfers between memories included: (node or copied
/// value, operator or `Copy`, provider).
pub(crate) fn steps(program: &Program, devices: &[Arc<dyn Device>]) -> Vec<(String, String, String)> {
    let step = |step: &Step| {
        let provider = devices.get(step.device).map_or("", |device| device.info().provider);
        (step.name.to_string(), step.op.to_string(), provider.to_string())
    };
    program.steps.iter().map(step).collect()
}
