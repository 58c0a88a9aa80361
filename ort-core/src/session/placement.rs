//! Which provider runs each node of a session, and why.

use rustc_hash::FxHashSet;

use super::program::Step;
use super::{Program, Session};
use crate::ep::{NodeView, Reason, guard};
use crate::ir::ValueId;

/// Where a node runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePlacement {
    /// The node.
    pub node: String,
    /// Its operator, with the domain where that is not ONNX's own.
    pub operator: String,
    /// The provider that runs it.
    pub provider: &'static str,
    /// Why it runs there: as text, what it is by `to_string`.
    pub reason: Reason,
    /// The providers that the session prefers to that one, each with the reason why it does not run the node.
    pub refusals: Vec<(&'static str, String)>,
    /// Whether it reads nothing but the shapes of the session's inputs, and constants: its result follows from the sizes.
    pub of_shapes: bool,
}

impl Session {
    /// Where each node runs, in the order of the steps, why there, and why not on the providers that come before in the session's order. Copies
    /// between memories, which are no nodes, are left out; [`Session::steps`] has them.
    ///
    /// ```
    /// fn print(session: &ort_core::session::Session) {
    ///     for placed in session.placement() {
    ///         println!("{} ({}) on {}: {}", placed.node, placed.operator, placed.provider, placed.reason);
    ///         for (provider, why) in &placed.refusals {
    ///             println!("    not on {provider}: {why}");
    ///         }
    ///     }
    /// }
    /// ```
    pub fn placement(&self) -> Vec<NodePlacement> {
        let mut shapes = FxHashSet::default();
        self.compiled.program.steps.iter().filter_map(|step| self.placement_of(step, &mut shapes)).collect()
    }

    /// Adds the node's outputs to `shapes`, the values that follow from sizes, where they do.
    fn placement_of(&self, step: &Step, shapes: &mut FxHashSet<ValueId>) -> Option<NodePlacement> {
        let Program { graph, reasons, .. } = &self.compiled.program;
        let node = graph.nodes.get(step.node?)?;
        let reason = reasons.get(step.node?).copied().unwrap_or_default();
        let view = NodeView { graph, node };
        let before = self.compiled.devices.iter().take(step.device);
        let refusals = before.map(|device| {
            let why = guard::claim(&**device, &view).err().unwrap_or_else(|| reason.to_string());
            (device.info().provider, why)
        });
        let is_known = |value: ValueId| graph.constants.contains_key(&value) || shapes.contains(&value);
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
            provider: self.compiled.devices.get(step.device)?.info().provider,
            reason,
            refusals: refusals.collect(),
            of_shapes,
        })
    }

    /// The steps in the order in which they run, copies between memories included: (node or copied value, operator or `Copy`, provider).
    pub fn steps(&self) -> Vec<(String, String, String)> {
        let step = |step: &Step| {
            let provider = self.compiled.devices.get(step.device).map_or("", |device| device.info().provider);
            (step.name.to_string(), step.op.to_string(), provider.to_string())
        };
        self.compiled.program.steps.iter().map(step).collect()
    }
}
