//! Step scheduling: a topological order of the steps with a lower memory peak.
//!
//! A graph does not say which of several ready steps runs first, and the file's order is only one
//! of many. We try several orders ([`candidates`]), simulate the memory of each ([`footprint`]),
//! and combine the best segments of all ([`segments`]). If nothing is gained, the file's order
//! stays. Finding the best order is NP-complete (Sethi, "Complete Register Allocation Problems",
//! 1975), so the candidates are heuristics that take about linear time.
//!
//! The order is chosen once for all runs, while sizes are still symbolic. So each candidate is
//! simulated with every symbol set to each of [`SIZES`]. An order is taken only if its peak is not
//! higher at any of these sizes.

mod candidates;
mod dependencies;
mod footprint;
mod segments;

use std::collections::BTreeSet;

use dependencies::DependencyGraph;
use footprint::Footprint;

use super::resolve::{resolve, resolve_in};
use crate::dim::Bindings;
use crate::program::{Program, Step};
use crate::{Result, error};

/// A step of a schedule and its effect on memory. A block is the memory of a value; a view is in
/// the block of the value that it aliases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveStep {
    /// The index of its node in the graph; none for a copy between memories.
    pub node: Option<usize>,
    /// The blocks that it reads, each once.
    pub reads: Vec<usize>,
    /// The block of each of its outputs; none for outputs that are left out.
    pub outputs: Vec<Option<usize>>,
    /// The blocks that it allocates.
    pub makes: Vec<LiveBlock>,
    /// The scratch bytes that the step needs while it runs.
    pub scratch: u64,
}

/// A block that a step allocates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// The block's number.
    pub block: usize,
    /// The block's size in bytes.
    pub bytes: u64,
    /// The position of the output that is stored in the block.
    pub output: usize,
    /// The blocks that the output may take over in place, if no later step reads them.
    pub from: Vec<usize>,
}

/// Returns the steps of a program in their order, with the memory that they take for one binding.
/// Inputs, weights and outputs of the graph do not count, because they are live in every order.
pub(crate) fn live_steps(program: &Program, bindings: &Bindings, threads: usize) -> Vec<LiveStep> {
    let mut footprint = Footprint::new(program, bindings, threads);
    let live = |(index, step): (usize, &Step)| LiveStep {
        node: step.node,
        reads: footprint.reads.of(index).to_vec(),
        outputs: step.outputs.iter().map(|slot| slot.and_then(|slot| footprint.block_of(slot))).collect(),
        makes: footprint
            .makes
            .get_mut(index)
            .map(std::mem::take)
            .into_iter()
            .flatten()
            .map(live_block)
            .collect(),
        scratch: footprint.scratch.get(index).copied().unwrap_or(0),
    };
    program.steps.iter().enumerate().map(live).collect()
}

fn live_block(made: footprint::Allocation) -> LiveBlock {
    let footprint::Allocation { block, bytes, output, from } = made;
    LiveBlock { block, bytes, output, from: from.to_vec() }
}

/// The sizes with which orders are simulated: a single item, a small batch, a sequence.
const SIZES: [i64; 3] = [1, 16, 128];

/// A program with at most this many steps is planned in the chosen order before that order is
/// taken, so that gaps in the slab count, too. For larger programs the simulation alone decides.
const MOST_PLANNED: usize = 4096;

/// Returns an order of the steps with a lower peak, as indices into the program's steps. None if
/// the program's own order is as good.
pub(crate) fn better_order(program: &Program, threads: usize) -> Option<Vec<usize>> {
    let dependencies = DependencyGraph::new(program);
    // A chain of steps leaves nothing to choose.
    if dependencies.has_one_order() {
        return None;
    }
    let bindings = representative(program);
    let footprint: Vec<Footprint> =
        bindings.iter().map(|bindings| Footprint::new(program, bindings, threads)).collect();
    let order = search(&dependencies, &footprint)?;
    let planned = program.steps.len() <= MOST_PLANNED;
    if planned && bindings.iter().any(|bindings| is_higher(program, &order, bindings, threads)) {
        return None;
    }
    Some(order)
}

/// Returns an order in which each value that is updated in place is read before it is overwritten.
/// The order stays as close as possible to the program's own. None if the program's own order
/// already does this.
pub(crate) fn order_of_updates(program: &Program) -> Result<Option<Vec<usize>>> {
    if program.updates.is_empty() {
        return Ok(None);
    }
    let dependencies = DependencyGraph::new(program);
    let mut waits: Vec<usize> =
        (0..dependencies.len()).map(|step| dependencies.before.of(step).len()).collect();
    let ready = waits.iter().enumerate().filter(|(_, count)| **count == 0).map(|(step, _)| step);
    let mut ready: BTreeSet<usize> = ready.collect();
    let mut order = Vec::with_capacity(dependencies.len());
    // Kahn's algorithm: the first ready step is always next, which keeps to the program's order.
    while let Some(step) = ready.pop_first() {
        order.push(step);
        for &after in dependencies.after.of(step) {
            let Some(count) = waits.get_mut(after) else { continue };
            *count -= 1;
            if *count == 0 {
                ready.insert(after);
            }
        }
    }
    // Steps that still wait form a cycle: an old value is read by a step that needs the new one.
    let stuck = waits.iter().position(|count| *count > 0).and_then(|step| program.steps.get(step));
    match stuck {
        None => Ok((!order.is_sorted()).then_some(order)),
        Some(step) => {
            let why = "an input cannot be updated in its memory: its old value is read after the new one";
            Err(error!(InvalidArgument, "{why}, around {}", step.place()).help("give it memory of its own"))
        }
    }
}

/// Returns one binding for each of `SIZES`. A program without symbols needs only one.
fn representative(program: &Program) -> Vec<Bindings> {
    let given = program.given.iter().filter_map(|slot| program.slots.get(slot.index()));
    let shapes = given.filter_map(|slot| program.graph.value(slot.value).ty.shape());
    let symbols: std::collections::BTreeSet<_> = shapes.flatten().flat_map(|dim| dim.symbols()).collect();
    let count = if symbols.is_empty() { 1 } else { SIZES.len() };
    let bind = |size: &i64| {
        let mut bindings = Bindings::new();
        for symbol in &symbols {
            bindings.insert(symbol.clone(), *size);
        }
        bindings
    };
    SIZES.iter().take(count).map(bind).collect()
}

/// Combines the best segments of all candidates, then restores the given order if that costs
/// nothing.
fn search(dependencies: &DependencyGraph, footprint: &[Footprint]) -> Option<Vec<usize>> {
    let given: Vec<usize> = (0..dependencies.len()).collect();
    let mut best = given.clone();
    // Candidates are made for the largest sizes; `segments::join` compares them at all sizes.
    for candidate in candidates::all(dependencies, footprint.last()?) {
        best = segments::join(&best, &candidate, footprint);
    }
    let best = segments::restore(&best, &given, footprint);
    (best != given).then_some(best)
}

/// Whether the plan of an order has a higher peak than that of the program's own order.
fn is_higher(program: &Program, order: &[usize], bindings: &Bindings, threads: usize) -> bool {
    let schedule: Vec<&Step> = order.iter().filter_map(|index| program.steps.get(*index)).collect();
    match (resolve_in(program, schedule, bindings, threads), resolve(program, bindings, threads)) {
        (Ok(other), Ok(own)) => other.peak() > own.peak(),
        // Sizes that contradict the graph contradict it in both orders.
        _ => false,
    }
}
