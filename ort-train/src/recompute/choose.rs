//! Rematerialization search: selects the stashed values to drop.
//!
//! The goal is to fit the memory target with the least extra time. This is a local search over sets
//! of blocks with several starting points. One keeps everything. The others follow from cuts of the
//! forward pass: between two cuts, everything is recomputed from what crosses the first (Chen et
//! al. 2016, "Training Deep Nets with Sublinear Memory Cost").
//!
//! From each start, blocks are dropped or kept, in the order of bytes saved per second, until the
//! simulated peak meets the target. Then blocks that need not be dropped are kept again.

#![allow(
    clippy::indexing_slicing,
    reason = "blocks and steps are numbered by the session, and each table has an entry for each"
)]

use super::liveness::Joint;
use super::simulation::Outcome;

/// A set of blocks to recompute, with its simulated cost.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    pub(crate) dropped: Vec<bool>,
    pub(crate) outcome: Outcome,
}

impl Choice {
    /// Simulates a choice.
    pub(crate) fn of(joint: &Joint<'_>, dropped: Vec<bool>, target: u64) -> Choice {
        let outcome = joint.outcome(&dropped, target);
        Choice { dropped, outcome }
    }
}

/// Returns the fastest choice whose simulated peak is at most `target` bytes. If there is none,
/// returns the one that exceeds the target least.
pub(crate) fn cheapest(joint: &Joint<'_>, target: u64) -> Option<Choice> {
    let beginnings = beginnings(joint).into_iter();
    let found: Vec<Choice> =
        beginnings.map(|dropped| improve(joint, Choice::of(joint, dropped, target), target)).collect();
    let fitting = found.iter().filter(|choice| choice.outcome.peak <= target);
    let cheapest = fitting.min_by(|one, other| one.outcome.seconds.total_cmp(&other.outcome.seconds));
    let beyond = |choice: &&Choice| choice.outcome.peak;
    cheapest.or_else(|| found.iter().min_by_key(beyond)).cloned()
}

/// Returns the choice with the lowest simulated peak that the search finds.
pub(crate) fn least(joint: &Joint<'_>) -> Choice {
    let all = beginnings(joint).into_iter().map(|dropped| Choice::of(joint, dropped, 0));
    let mut best =
        all.min_by_key(|choice| choice.outcome.peak).unwrap_or_else(|| Choice::of(joint, none(joint), 0));
    // Each round asks for 2 % less than the last one reached.
    loop {
        let target = best.outcome.peak - best.outcome.peak / 50;
        match cheapest(joint, target) {
            Some(choice) if choice.outcome.peak < best.outcome.peak => best = choice,
            _ => return best,
        }
    }
}

/// Returns the choice that drops everything except what crosses from layer to layer.
pub(crate) fn between_cuts(joint: &Joint<'_>) -> Choice {
    Choice::of(joint, between(joint, &cuts(joint)), 0)
}

/// The empty choice.
fn none(joint: &Joint<'_>) -> Vec<bool> {
    vec![false; joint.maker.len()]
}

/// The starting points: nothing dropped, and everything between cuts at several distances.
fn beginnings(joint: &Joint<'_>) -> Vec<Vec<bool>> {
    let mut all = vec![none(joint)];
    let cuts = cuts(joint);
    let mut stride = 1;
    while stride <= cuts.len() {
        let chosen: Vec<usize> = cuts.iter().copied().skip(stride - 1).step_by(stride).collect();
        all.push(between(joint, &chosen));
        stride *= 2;
    }
    all
}

/// The cuts of the forward pass, as steps before which few bytes cross that later forward steps
/// read. A cut is a local minimum of the crossing bytes, and at most their median.
pub(super) fn cuts(joint: &Joint<'_>) -> Vec<usize> {
    let crossing = crossing(joint);
    // The median is over nodes only. Transfers between memories are many and allocate nothing.
    let is_node = |step: &usize| joint.is_forward[*step] && joint.steps[*step].node.is_some();
    let steps: Vec<usize> = (0..joint.steps.len()).filter(is_node).collect();
    let at: Vec<u64> = steps.iter().map(|step| crossing[*step]).collect();
    let mut sorted = at.clone();
    sorted.sort_unstable();
    let Some(&middle) = sorted.get(sorted.len() / 2) else { return Vec::new() };
    let mut cuts = Vec::new();
    let mut since = 0u64;
    let all: u64 = joint.stashed.iter().map(|block| joint.bytes[*block]).sum();
    for (index, &step) in steps.iter().enumerate() {
        let made = joint.steps[step].makes.iter().filter(|made| joint.droppable[made.block]);
        let before = since;
        since += made.map(|made| made.bytes).sum::<u64>();
        // The first index wraps to one that `get` does not find. A missing neighbour is no lower.
        let is_low = at[index] <= middle
            && at.get(index.wrapping_sub(1)).is_none_or(|earlier| *earlier >= at[index])
            && at.get(index + 1).is_none_or(|later| *later >= at[index]);
        // A segment needs a cut only if it keeps much more than what crosses the cut, and a
        // noticeable share of all stashed bytes.
        if is_low && at[index] > 0 && before >= 2 * at[index] && before >= all / 64 {
            cuts.push(step);
            since = 0;
        }
    }
    cuts
}

/// For each step, the droppable bytes that earlier forward steps produced and that this or later
/// forward steps read.
fn crossing(joint: &Joint<'_>) -> Vec<u64> {
    let mut last = vec![None; joint.maker.len()];
    for (index, step) in joint.steps.iter().enumerate().filter(|(index, _)| joint.is_forward[*index]) {
        step.reads.iter().for_each(|block| last[*block] = Some(index));
    }
    // A difference array over steps: its prefix sums are the crossing bytes.
    let mut change = vec![0i64; joint.steps.len() + 1];
    for (block, last) in last.iter().enumerate() {
        if let (Some(made), Some(last)) = (joint.maker[block], last)
            && joint.droppable[block]
            && made < *last
        {
            change[made + 1] += joint.bytes[block] as i64;
            change[last + 1] -= joint.bytes[block] as i64;
        }
    }
    let mut sum = 0;
    let running = change.iter().take(joint.steps.len()).map(|change| {
        sum += change;
        sum.max(0) as u64
    });
    running.collect()
}

/// Drops everything except what crosses one of the cuts.
fn between(joint: &Joint<'_>, cuts: &[usize]) -> Vec<bool> {
    let mut dropped = joint.droppable.clone();
    let mut last = vec![0; joint.maker.len()];
    for (index, step) in joint.steps.iter().enumerate().filter(|(index, _)| joint.is_forward[*index]) {
        step.reads.iter().for_each(|block| last[*block] = index);
    }
    for (block, dropped) in dropped.iter_mut().enumerate() {
        // The first cut behind the maker. What is read at or beyond it crosses it and is kept.
        let next = joint.maker[block].and_then(|made| cuts.get(cuts.partition_point(|cut| *cut <= made)));
        *dropped &= next.is_none_or(|cut| last[block] < *cut);
    }
    dropped
}

/// Toggles blocks until the target is met, then keeps blocks that need not be dropped.
fn improve(joint: &Joint<'_>, begin: Choice, target: u64) -> Choice {
    let mut choice = change_more(joint, begin, target);
    take_back(joint, &mut choice, target);
    choice
}

/// The excess bytes, summed over all steps, that a second of recomputation saves.
fn worth(before: &Outcome, after: &Outcome) -> f64 {
    // The lower bound on time keeps a free change from a division by zero.
    (before.excess - after.excess) / (after.seconds - before.seconds).max(1e-7)
}

/// The most blocks that a search toggles one by one. Each trial simulates the whole step, so
/// without a bound the search would be quadratic in the size of the model.
const MOST_ALONE: usize = 512;

/// The number of units in a search over more than [`MOST_ALONE`] blocks. It is smaller, because
/// each trial takes longer.
const UNITS: usize = 128;

/// The number of blocks per unit. If there are few blocks, each is a unit.
fn unit_size(blocks: usize) -> usize {
    if blocks <= MOST_ALONE { 1 } else { blocks.div_ceil(UNITS) }
}

/// Groups the blocks that may be toggled into units. The blocks of a unit save about the same bytes
/// per second of recomputation, and are either all dropped or all kept. The sort is stable, so that
/// blocks with equal rates stay in model order.
fn changing_units(joint: &Joint<'_>, dropped: &[bool]) -> Vec<Vec<usize>> {
    let candidates =
        (0..joint.maker.len()).filter(|block| joint.droppable[*block] && joint.bytes[*block] > 0);
    let mut blocks: Vec<usize> = candidates.collect();
    if blocks.len() > MOST_ALONE {
        let seconds = |block: usize| joint.maker[block].map_or(0.0, |maker| joint.seconds[maker]);
        let rate = |block: usize| joint.bytes[block] as f64 / seconds(block).max(1e-7);
        let order = |one: &usize, other: &usize| {
            dropped[*one].cmp(&dropped[*other]).then(rate(*other).total_cmp(&rate(*one)))
        };
        blocks.sort_by(order);
    }
    let size = unit_size(blocks.len());
    blocks
        .chunk_by(|one, other| dropped[*one] == dropped[*other])
        .flat_map(|part| part.chunks(size))
        .map(<[usize]>::to_vec)
        .collect()
}

/// Toggles each block of a unit between dropped and kept.
fn change(dropped: &mut [bool], unit: &[usize]) {
    unit.iter().for_each(|block| dropped[*block] ^= true);
}

/// Toggles one unit after the other until the target is met. Keeping a dropped unit may help as
/// well, because recomputation from far back keeps everything on the way alive. The gain of a
/// change falls as others are made, so only the best of the last ranking are tried again (Minoux
/// 1978, accelerated greedy). Each unit is toggled at most once.
fn change_more(joint: &Joint<'_>, mut choice: Choice, target: u64) -> Choice {
    let units = changing_units(joint, &choice.dropped).into_iter();
    let mut queue: Vec<(f64, Vec<usize>)> = units.map(|unit| (f64::INFINITY, unit)).collect();
    while choice.outcome.peak > target {
        let mut best: Option<(f64, usize, Outcome)> = None;
        queue.sort_by(|one, other| other.0.total_cmp(&one.0));
        for (place, entry) in queue.iter_mut().enumerate() {
            // The old gain is taken as an upper bound, so no later entry can be better.
            if best.as_ref().is_some_and(|(worth, ..)| *worth >= entry.0) {
                break;
            }
            // The second call restores what the first toggled.
            change(&mut choice.dropped, &entry.1);
            let after = joint.outcome(&choice.dropped, target);
            change(&mut choice.dropped, &entry.1);
            entry.0 = worth(&choice.outcome, &after);
            if entry.0 > 0.0 && best.as_ref().is_none_or(|(worth, ..)| entry.0 > *worth) {
                best = Some((entry.0, place, after));
            }
        }
        let Some((_, place, outcome)) = best else { break };
        let (_, unit) = queue.remove(place);
        change(&mut choice.dropped, &unit);
        choice.outcome = outcome;
    }
    choice
}

/// Keeps units again, the slowest to recompute first. A change is undone if it raises the peak
/// above the target (or further above it), adds excess bytes, or adds time.
fn take_back(joint: &Joint<'_>, choice: &mut Choice, target: u64) {
    // If the target is out of reach, the peak that was reached is the bound.
    let reached = choice.outcome.peak.max(target);
    let mut dropped: Vec<usize> = (0..choice.dropped.len()).filter(|block| choice.dropped[*block]).collect();
    let time = |block: &usize| joint.maker[*block].map_or(0.0, |maker| joint.seconds[maker]);
    dropped.sort_by(|one, other| time(other).total_cmp(&time(one)));
    for unit in dropped.chunks(unit_size(dropped.len())) {
        change(&mut choice.dropped, unit);
        let after = joint.outcome(&choice.dropped, target);
        let as_low = after.peak <= reached && after.excess <= choice.outcome.excess;
        match as_low && after.seconds <= choice.outcome.seconds {
            true => choice.outcome = after,
            false => change(&mut choice.dropped, unit),
        }
    }
}
