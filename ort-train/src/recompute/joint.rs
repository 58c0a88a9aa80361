//! The steps of a training graph with the bytes they take, and what is alive when some values are computed again.

#![allow(
    clippy::indexing_slicing,
    reason = "blocks and steps are numbered by the session, and each table has an entry for each"
)]

use std::collections::HashSet;

use ort_core::ir::{Graph, Node, ValueId};
use ort_core::plan::LiveStep;
use ort_core::spec::Traits;

use super::seconds::seconds_of;

/// A training graph as memory sees it, at one binding of its sizes.
pub(crate) struct Joint<'g> {
    pub(crate) graph: &'g Graph,
    pub(crate) steps: Vec<LiveStep>,
    /// Whether each step is part of the forward pass and the loss.
    pub(crate) is_forward: Vec<bool>,
    /// The step that makes each block.
    pub(crate) maker: Vec<Option<usize>>,
    /// The bytes of each block.
    pub(crate) bytes: Vec<u64>,
    /// About how long each step takes.
    pub(crate) seconds: Vec<f64>,
    /// The blocks that may be computed again, which forward steps make and backward steps read or would read.
    pub(crate) droppable: Vec<bool>,
    /// Those of them that backward steps read.
    pub(crate) stashed: Vec<usize>,
}

/// What a choice comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// The most bytes alive at any step.
    pub(crate) peak: u64,
    /// The bytes alive beyond a target, summed over all steps.
    pub(crate) excess: f64,
    /// The time of what is computed again.
    pub(crate) seconds: f64,
}

impl<'g> Joint<'g> {
    /// The graph whose steps these are, of which `loss` is the output that the forward pass ends in.
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
            // A copy to another memory is part of what makes the value.
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
            is_stashed[*block] = droppable[*block];
        }
        let stashed = (0..count).filter(|block| is_stashed[*block]).collect();
        let seconds =
            steps.iter().map(|step| node_of(step).map_or(0.0, |node| seconds_of(node, size_of))).collect();
        Joint { graph, steps, is_forward, maker, bytes, seconds, droppable, stashed }
    }

    /// The steps of an edited graph in order: forward, then each backward step behind the clones it needs. Clones are marked.
    pub(crate) fn order(&self, dropped: &[bool]) -> Vec<(usize, bool)> {
        let mut order = Vec::with_capacity(self.steps.len());
        let mut cloned = vec![false; self.steps.len()];
        let mut stack: Vec<(usize, bool)> = Vec::new();
        for (index, step) in self.steps.iter().enumerate() {
            if !self.is_forward[index] {
                let wanted = step.reads.iter().rev().filter(|block| dropped[**block]);
                stack.extend(wanted.filter_map(|block| self.maker[*block]).map(|maker| (maker, false)));
                while let Some((maker, ready)) = stack.pop() {
                    if ready {
                        order.push((maker, true));
                    } else if !std::mem::replace(&mut cloned[maker], true) {
                        stack.push((maker, true));
                        let wanted = self.steps[maker].reads.iter().rev().filter(|block| dropped[**block]);
                        let makers = wanted.filter_map(|block| self.maker[*block]);
                        stack.extend(makers.filter(|maker| !cloned[*maker]).map(|maker| (maker, false)));
                    }
                }
            }
            order.push((index, false));
        }
        order
    }

    /// What is alive at each step where some blocks are dropped after the forward pass.
    pub(crate) fn outcome(&self, dropped: &[bool], target: u64) -> Outcome {
        let order = self.order(dropped);
        let count = self.maker.len();
        // Clones of blocks have numbers behind all others.
        let place = |step: usize, is_clone: bool, block: usize| {
            let again = dropped[block] && (is_clone || !self.is_forward[step]);
            if again { block + count } else { block }
        };
        let mut pending = vec![0u32; 2 * count];
        for &(step, is_clone) in &order {
            for &block in &self.steps[step].reads {
                pending[place(step, is_clone, block)] += 1;
            }
        }
        let mut held = vec![0u64; 2 * count];
        let mut live = 0u64;
        let mut outcome = Outcome { peak: 0, excess: 0.0, seconds: 0.0 };
        for &(step, is_clone) in &order {
            let parts = &self.steps[step];
            for &block in &parts.reads {
                pending[place(step, is_clone, block)] -= 1;
            }
            let made_at = |block: usize| if is_clone { block + count } else { block };
            for made in &parts.makes {
                let to = made_at(made.block);
                if is_clone && pending[to] == 0 {
                    continue;
                }
                let from = made.from.iter().map(|block| place(step, is_clone, *block));
                let dead = from.into_iter().find(|block| pending[*block] == 0 && held[*block] > 0);
                match dead.filter(|_| pending[to] > 0) {
                    Some(from) => held[to] = std::mem::take(&mut held[from]),
                    None => {
                        held[to] = made.bytes;
                        live += made.bytes;
                    }
                }
            }
            let alive = live + parts.scratch;
            outcome.peak = outcome.peak.max(alive);
            outcome.excess += alive.saturating_sub(target) as f64;
            outcome.seconds += if is_clone { self.seconds[step] } else { 0.0 };
            let read = parts.reads.iter().map(|block| place(step, is_clone, *block));
            for block in read.chain(parts.makes.iter().map(|made| made_at(made.block))) {
                if pending[block] == 0 {
                    live -= std::mem::take(&mut held[block]);
                }
            }
        }
        outcome
    }

    /// The time of a step without recomputation.
    pub(crate) fn all_seconds(&self) -> f64 {
        self.seconds.iter().sum()
    }
}

/// The nodes that compute a value.
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

/// Whether running a node once more gives the same bits.
fn is_repeatable(node: &Node) -> bool {
    !node.spec.traits.has(Traits::RANDOM) && node.subgraphs.is_empty()
}
