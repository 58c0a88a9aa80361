//! The order of a program's steps, chosen so that fewer bytes are alive at once.
//!
//! A graph leaves open which of several steps that are ready runs first, and the file's order is
//! only one of many. Several orders are tried ([`candidates`]), each is simulated on the memory of
//! its steps ([`footprint`]), and the best parts of all are joined ([`segments`]); where nothing is
//! gained the file's order stays. Finding the best of all orders is NP-complete (Sethi, "Complete
//! Register Allocation Problems", 1975), so what is tried takes about linear time.
//!
//! Sizes are symbolic while the order is chosen, once for all runs. So each of [`SIZES`] in turn
//! stands for every symbol, and an order is taken only if its peak is higher at none of them.

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

/// A step of a schedule as memory sees it. Blocks are values with memory of their own; views of a
/// value are its block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveStep {
    /// The node that it runs, by its place in the graph; none for a copy between memories.
    pub node: Option<usize>,
    /// The blocks that it reads, each once.
    pub reads: Vec<usize>,
    /// The block of each of its outputs; none for those that nobody reads.
    pub outputs: Vec<Option<usize>>,
    /// What it makes.
    pub makes: Vec<LiveBlock>,
    /// Bytes that it needs while it runs.
    pub scratch: u64,
}

/// Memory that a step makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Its number.
    pub block: usize,
    /// Its bytes.
    pub bytes: u64,
    /// The output of the step that it is.
    pub output: usize,
    /// The blocks whose memory it may take over, where nobody else reads them any more.
    pub from: Vec<usize>,
}

/// The steps of a program in their order, with what they take at one binding. Inputs, weights and
/// outputs of the graph take nothing here: they are there in any order.
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

/// What stands for each symbolic size: a single one, a small batch, a sequence.
const SIZES: [i64; 3] = [1, 16, 128];

/// The steps of a program that are planned once more in the chosen order before it is taken, so
/// that gaps in the slab count, too. In larger programs the simulation alone decides.
const MOST_PLANNED: usize = 4096;

/// The places of a program's steps in an order with a lower peak; none where its own order is as
/// good.
pub(crate) fn better_order(program: &Program, threads: usize) -> Option<Vec<usize>> {
    let dependencies = DependencyGraph::new(program);
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

/// An order in which what is updated in its memory is updated last, as near to the program's own as
/// can be; none where that is such an order.
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
    let stuck = waits.iter().position(|count| *count > 0).and_then(|step| program.steps.get(step));
    match stuck {
        None => Ok((!order.is_sorted()).then_some(order)),
        Some(step) => {
            let why = "an input cannot be updated in its memory: its old value is read after the new one";
            Err(error!(InvalidArgument, "{why}, around {}", step.place()).help("give it memory of its own"))
        }
    }
}

/// One binding for each of the sizes; a program without symbols needs only one.
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

/// The best that the candidates make together, as far from the given order as it must be.
fn search(dependencies: &DependencyGraph, footprint: &[Footprint]) -> Option<Vec<usize>> {
    let given: Vec<usize> = (0..dependencies.len()).collect();
    let mut best = given.clone();
    for candidate in candidates::all(dependencies, footprint.last()?) {
        best = segments::join(&best, &candidate, footprint);
    }
    let best = segments::restore(&best, &given, footprint);
    (best != given).then_some(best)
}

/// Whether the plan of an order takes more than that of the program's own.
fn is_higher(program: &Program, order: &[usize], bindings: &Bindings, threads: usize) -> bool {
    let schedule: Vec<&Step> = order.iter().filter_map(|index| program.steps.get(*index)).collect();
    match (resolve_in(program, schedule, bindings, threads), resolve(program, bindings, threads)) {
        (Ok(other), Ok(own)) => other.peak() > own.peak(),
        // These sizes contradict the graph in either order.
        _ => false,
    }
}
