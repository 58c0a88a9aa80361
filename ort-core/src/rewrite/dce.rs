//! Dead-code elimination.

use super::report::Report;
use crate::ir::Graph;
use crate::spec::Traits;

/// Removes nodes without any output that is read and without other effects. Also removes constants
/// that are not read.
pub(super) fn remove_dead(graph: &mut Graph, report: &mut Report) {
    let mut needed = vec![false; graph.value_count()];
    let mut need = |id: crate::ir::ValueId| {
        if let Some(needed) = needed.get_mut(id.index()) {
            *needed = true;
        }
    };
    graph.outputs.iter().copied().for_each(&mut need);
    let mut living = vec![false; graph.nodes.len()];
    // In reverse topological order, all readers of a node are decided before it.
    for (node, living) in graph.nodes.iter().zip(&mut living).rev() {
        let is_read = |id: &crate::ir::ValueId| needed.get(id.index()).copied().unwrap_or(true);
        *living = node.spec.traits.has(Traits::EFFECTS) || node.outputs.iter().flatten().any(is_read);
        if *living {
            node.reads().for_each(|id| {
                if let Some(needed) = needed.get_mut(id.index()) {
                    *needed = true;
                }
            });
        }
    }
    let before = graph.nodes.len();
    let mut alive = living.into_iter();
    graph.nodes.retain(|_| alive.next().unwrap_or(true));
    report.unread += before - graph.nodes.len();
    graph.constants.retain(|id, _| needed.get(id.index()).copied().unwrap_or(true));
}
