//! Device placement: which device runs each node.
//!
//! `lowering` decomposes nodes until some device claims each of them. `search` chooses among the
//! devices that claim a node, and `control_flow` places the bodies of control flow.

mod control_flow;
mod cost;
mod disjoint_sets;
mod lowering;
mod report;
mod scope;
mod search;

use std::sync::Arc;

use control_flow::choices;
use lowering::claim_all;
use search::{cost_in, first_choices, is_mixed, place};

use crate::ep::{Device, NodeView, guard};
use crate::ir::Graph;
use crate::{Result, error};

pub use crate::program::{Cluster, Partition, Reason};
pub(crate) use lowering::lower_all_but;
pub use lowering::{Unclaimed, unclaimed};
pub use report::NodePlacement;
pub(crate) use report::{placements, steps};
pub use scope::Scope;

/// Assigns every node of an inferred graph to a device: the first that claims it, with three
/// exceptions. Shape arithmetic prefers the host. Control flow runs where its bodies cost least. A
/// cluster of nodes moves to another device if the transfers saved outweigh the work added.
///
/// A node that no device claims is decomposed one step, and its parts are offered again. If nodes
/// are still unclaimed after that, one error lists all of them. A shared graph is copied only if
/// something in it is decomposed.
pub fn partition(graph: &mut Arc<Graph>, devices: &[Arc<dyn Device>], scope: Scope) -> Result<Partition> {
    let claimed = claim_all(graph, devices)?;
    let choices = choices(graph, devices, claimed)?;
    // With a single memory there are no transfers to save, so the first claim stands.
    Ok(match is_mixed(devices) {
        true => place(graph, devices, scope.into(), choices).partition(),
        false => first_choices(choices),
    })
}

/// Returns the estimated cost of a placement, which a session minimizes. `places` has the index of
/// a device for each node. The unit is the time in which the host reads or writes one byte.
///
/// Compare the cost only with that of another placement of the same nodes. The arithmetic of GEMMs
/// and convolutions is left out, because a session never moves those.
///
/// ```
/// # use ort_core::{Result, ep::Device, ir::Graph, placement::{Scope, placement_cost}};
/// # use std::sync::Arc;
/// fn is_cheaper_on_the_second(graph: &Graph, devices: &[Arc<dyn Device>]) -> Result<bool> {
///     let all_on = |device| placement_cost(graph, devices, Scope::Model, &vec![device; graph.nodes.len()]);
///     Ok(all_on(1)? < all_on(0)?)
/// }
/// ```
///
/// # Errors
///
/// A node has no device in `places`, or that device does not claim it.
pub fn placement_cost(
    graph: &Graph,
    devices: &[Arc<dyn Device>],
    scope: Scope,
    places: &[usize],
) -> Result<u64> {
    let unclaimed = |device: Option<usize>, place: String| {
        let problem = match device {
            Some(device) => error!(InvalidArgument, "device {device} does not claim {place}"),
            None => error!(InvalidArgument, "there is no place for {place}"),
        };
        problem.help("name a device for each node that claims it")
    };
    let mut claimed = Vec::with_capacity(graph.nodes.len());
    for (index, node) in graph.nodes.iter().enumerate() {
        let view = NodeView { graph, node };
        let mut own = devices.iter().enumerate();
        let first = own.find_map(|(device, opened)| Some((device, guard::claim(&**opened, &view).ok()?)));
        let device = places.get(index).copied();
        claimed.push(first.ok_or_else(|| unclaimed(device, node.place()))?);
    }
    let choices = choices(graph, devices, claimed)?;
    for (index, (node, own)) in graph.nodes.iter().zip(&choices).enumerate() {
        let device = places.get(index).copied();
        if !own.iter().any(|choice| Some(choice.device) == device) {
            return Err(unclaimed(device, node.place()));
        }
    }
    Ok(cost_in(graph, devices, scope, choices, places))
}
