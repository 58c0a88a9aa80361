//! The joint forward and backward graph as the memory planner sees it.
//!
//! It has the steps and blocks of a plan, and says which blocks may be recomputed.

#![allow(
    clippy::indexing_slicing,
    reason = "blocks and steps are numbered by the session, and each table has an entry for each"
)]

use std::collections::HashSet;

use ort_core::ir::{Graph, Node, ValueId};
use ort_core::plan::LiveStep;
use ort_core::spec::Traits;

use super::cost_model::seconds_of;
use super::simulation::{Outcome, Simulation};

/// A training graph with its memory footprint, for one binding of its symbolic dimensions.
pub(crate) struct Joint<'g> {
    pub(crate) graph: &'g Graph,
    pub(crate) steps: Vec<LiveStep>,
    /// Whether each step is part of the forward pass and the loss.
    pub(crate) is_forward: Vec<bool>,
    /// The step that produces each block.
    pub(crate) maker: Vec<Option<usize>>,
    /// The bytes of each block.
    pub(crate) bytes: Vec<u64>,
    /// The estimated time of each step.
    pub(crate) seconds: Vec<f64>,
    /// Whether each block may be recomputed: a forward step that gives the same bits again produces
    /// it.
    pub(crate) droppable: Vec<bool>,
    /// The droppable blocks that backward steps read.
    pub(crate) stashed: Vec<usize>,
    /// Whether each block is in `stashed`.
    pub(crate) is_stashed: Vec<bool>,
    simulation: Simulation,
}

impl<'g> Joint<'g> {
    /// Analyzes a graph with these steps. `loss` is the output that the forward pass ends in.
    pub(crate) fn new(
        graph: &'g Graph,
        steps: Vec<LiveStep>,
        loss: ValueId,
        size_of: &dyn Fn(ValueId) -> Option<Vec<usize>>,
    ) -> Joint<'g> {
        let forward = ancestors(graph, loss);
        let node_of = |step: &LiveStep| step.node.and_then(|node| graph.nodes.get(node));
        let count = steps.iter().flat_map(|step| step.outputs.iter().flatten().chain(&step.reads)).max();
        let count = count.map_or(0, |most| most + 1);
        let mut is_forward = Vec::with_capacity(steps.len());
        let (mut maker, mut bytes) = (vec![None; count], vec![0; count]);
        let mut droppable = vec![false; count];
        for (index, step) in steps.iter().enumerate() {
            // A transfer to another memory belongs to the pass that produced the value.
            let of_forward = |block: &usize| maker[*block].is_none_or(|maker: usize| is_forward[maker]);
            is_forward.push(match step.node {
                Some(node) => forward.contains(&node),
                None => step.reads.iter().all(of_forward),
            });
            let repeats = node_of(step).is_some_and(is_repeatable);
            for made in &step.makes {
                maker[made.block] = Some(index);
                bytes[made.block] = made.bytes;
                droppable[made.block] = is_forward[index] && repeats;
            }
        }
        let mut is_stashed = vec![false; count];
        let backward = steps.iter().zip(&is_forward).filter(|(_, forward)| !**forward);
        for block in backward.flat_map(|(step, _)| &step.reads) {
            // Inputs and random values are read by the backward pass as well, but stay whatever is
            // chosen.
            is_stashed[*block] = droppable[*block];
        }
        let stashed = (0..count).filter(|block| is_stashed[*block]).collect();
        let seconds: Vec<f64> =
            steps.iter().map(|step| node_of(step).map_or(0.0, |node| seconds_of(node, size_of))).collect();
        let simulation = Simulation::new(&steps, &is_forward, &seconds, &maker);
        Joint { graph, steps, is_forward, maker, bytes, seconds, droppable, stashed, is_stashed, simulation }
    }

    /// Simulates a step with some blocks dropped after the forward pass.
    pub(crate) fn outcome(&self, dropped: &[bool], target: u64) -> Outcome {
        self.simulation.outcome(dropped, target)
    }

    /// For each block, the forward steps whose outputs it contains, ascending: its producer, and
    /// the views of it.
    pub(crate) fn forward_steps(&self) -> Vec<Vec<usize>> {
        let mut found = vec![Vec::new(); self.maker.len()];
        for (index, step) in self.steps.iter().enumerate().filter(|(index, _)| self.is_forward[*index]) {
            step.outputs.iter().flatten().for_each(|block| found[*block].push(index));
        }
        found
    }

    /// For each block, the number of backward steps that read it.
    pub(crate) fn backward_readers(&self) -> Vec<usize> {
        let mut readers = vec![0; self.maker.len()];
        let backward = self.steps.iter().zip(&self.is_forward).filter(|(_, is_forward)| !**is_forward);
        backward.flat_map(|(step, _)| &step.reads).for_each(|block| readers[*block] += 1);
        readers
    }

    /// The estimated time of a step without recomputation.
    pub(crate) fn all_seconds(&self) -> f64 {
        self.seconds.iter().sum()
    }
}

/// Returns the nodes that a value depends on.
fn ancestors(graph: &Graph, value: ValueId) -> HashSet<usize> {
    let producers = graph.producers();
    let mut found = HashSet::new();
    let mut work = vec![value];
    while let Some(value) = work.pop() {
        let Some(producer) = producers.get(value.index()).copied().flatten() else { continue };
        if found.insert(producer.index()) {
            work.extend(graph.nodes.get(producer.index()).into_iter().flat_map(Node::reads));
        }
    }
    found
}

/// Whether running a node again produces the same bits. Control flow is never repeated.
fn is_repeatable(node: &Node) -> bool {
    !node.spec.traits.has(Traits::RANDOM) && node.subgraphs.is_empty()
}
