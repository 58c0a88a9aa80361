//! Which provider runs each node of a session, and why those that come before it do not.

use super::Session;
use super::program::Step;
use crate::ep::NodeView;

/// Where a node runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeClaim {
    /// The node.
    pub node: String,
    /// Its operator, with the domain where that is not ONNX's own.
    pub operator: String,
    /// The provider that runs it.
    pub provider: &'static str,
    /// The providers that the session prefers to that one, each with the reason why it does not run the node.
    pub refusals: Vec<(&'static str, String)>,
}

/// Why a device that would run a node does not.
const SHAPES: &str = "it computes shapes, whose numbers the host needs";

impl Session {
    /// Where each node runs, in the order of the steps, and why not on the providers that come before in the session's order. Copies between
    /// memories, which are no nodes, are left out.
    ///
    /// ```
    /// fn print(session: &ort_core::session::Session) {
    ///     for claim in session.claims() {
    ///         let why: Vec<String> = claim.refusals.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    ///         println!("{} ({}) on {}; {}", claim.node, claim.operator, claim.provider, why.join("; "));
    ///     }
    /// }
    /// ```
    pub fn claims(&self) -> Vec<NodeClaim> {
        self.compiled.program.steps.iter().filter_map(|step| self.claim_of(step)).collect()
    }

    fn claim_of(&self, step: &Step) -> Option<NodeClaim> {
        let graph = &self.compiled.program.graph;
        let node = graph.nodes.get(step.node?)?;
        let view = NodeView { graph, node };
        let before = self.compiled.devices.iter().take(step.device);
        let refusals = before.map(|device| {
            let why = device.claim(&view).err().unwrap_or_else(|| SHAPES.to_owned());
            (device.info().provider, why)
        });
        let domain = node.spec.domain;
        let separator = if domain.is_empty() { "" } else { "." };
        Some(NodeClaim {
            node: node.name.to_string(),
            operator: format!("{domain}{separator}{}", node.spec.name),
            provider: self.compiled.devices.get(step.device)?.info().provider,
            refusals: refusals.collect(),
        })
    }
}
