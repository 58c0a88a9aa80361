//! Static memory planner: offset assignment from lifetimes and sizes, before anything runs.
//!
//! It tries four strategies per lane until one reaches the lower bound, and keeps the smallest
//! result:
//!
//! - **greedy by size**, as in Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
//!   Inference" (2020, arXiv:2001.03288, algorithm 3): largest first, each into the tightest gap
//!   between those already placed that are live at the same time;
//! - **greedy by area**: the same in descending order of bytes times steps, which places long-lived
//!   intervals first;
//! - **best fit over time**: simulates the run in order with a coalescing free list;
//! - **greedy by trouble**: greedy by size, repeated a few times with the intervals first that
//!   ended above the lower bound, as in squeaky wheel optimization (Joslin and Clements, Journal of
//!   Artificial Intelligence Research 10, 1999).
//!
//! The greedy strategies compare each interval with those placed that are live at the same time. If
//! that is too much work, as in a graph of 200,000 nodes, best fit alone decides.
//!
//! No strategy is always best. Finding the optimum is NP-hard (dynamic storage allocation, Garey
//! and Johnson 1979, SR2), so [`LanePlan::lower_bound`] says how far away it can be.
//!
//! In the end [`verify`] proves by an independent sweep that no two live intervals share a byte.
//! The plan carries that [`Proof`].

#![allow(
    clippy::indexing_slicing,
    reason = "intervals are numbered here, every table has an entry for each, and `check` comes before what follows an alias"
)]

mod layout;
mod place;
mod verify;

use thiserror::Error;

use layout::Root;
pub use layout::{Alias, Interval, LanePlan, Strategy};
use verify::prove;
pub use verify::{Overlap, Proof};

/// The memory plan.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The offset of each interval in its lane's slab, in bytes.
    pub offsets: Vec<usize>,
    /// The slabs, in ascending order of lane.
    pub lanes: Vec<LanePlan>,
    /// The proof that no two live intervals overlap. Only [`verify`] and the planner
    /// create one.
    pub proof: Proof,
}

impl Plan {
    /// Returns the slab of one lane.
    pub fn lane(&self, lane: u32) -> Option<&LanePlan> {
        let index = self.lanes.binary_search_by_key(&lane, |plan| plan.lane).ok()?;
        self.lanes.get(index)
    }

    /// Returns the bytes of all slabs together.
    pub fn total_bytes(&self) -> usize {
        self.lanes.iter().fold(0, |sum, lane| sum.saturating_add(lane.bytes))
    }
}

/// The reason why intervals cannot be planned. `index` is that of the offending interval.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// It ends before it starts.
    #[error("interval {index} ends at step {last}, before it starts at step {first}")]
    Backwards {
        /// The interval.
        index: usize,
        /// Its first step.
        first: usize,
        /// Its last step.
        last: usize,
    },
    /// Its alignment is not a power of two.
    #[error("interval {index} has alignment {alignment}, which is not a power of two")]
    Alignment {
        /// The interval.
        index: usize,
        /// Its alignment.
        alignment: usize,
    },
    /// It is an invalid alias.
    #[error("interval {index} cannot be an alias of interval {of}: {reason}")]
    Alias {
        /// The interval.
        index: usize,
        /// The interval it should be part of.
        of: usize,
        /// The reason.
        reason: &'static str,
    },
    /// The sizes add up to more than the address space.
    #[error("lane {lane} needs more memory than can be addressed")]
    TooLarge {
        /// The lane.
        lane: u32,
    },
    /// The layout found is wrong. This is a bug in the planner; the layout is not used.
    #[error("the planner made an unsound layout: {0}")]
    Unsound(#[from] Overlap),
}

/// Verifies that `plan` is sound for `intervals`, in O(n log n).
///
/// # Errors
///
/// The first [`Overlap`] found.
pub fn verify(intervals: &[Interval], plan: &Plan) -> Result<Proof, Overlap> {
    prove(intervals, &plan.offsets, &plan.lanes)
}

/// Assigns each interval an offset such that no two intervals live at the same step share a byte.
///
/// An alias is part of its target, which stays live as long as the alias. A chain of aliases leads
/// to one root.
///
/// # Errors
///
/// [`PlanError`] if an interval is malformed, an alias does not fit its target, or sizes overflow.
pub fn plan(intervals: &[Interval]) -> Result<Plan, PlanError> {
    let aliases = resolve(intervals)?;
    for (index, (interval, &(_, distance))) in intervals.iter().zip(&aliases).enumerate() {
        if let Some(Alias { of, .. }) =
            interval.alias.filter(|_| !distance.is_multiple_of(interval.alignment))
        {
            return Err(PlanError::Alias { index, of, reason: "its distance from the start is not aligned" });
        }
    }
    let mut roots = roots(intervals, &aliases);
    roots.sort_by_key(|root| root.lane);
    let mut offsets = vec![0; intervals.len()];
    let mut lanes = Vec::new();
    for members in roots.chunk_by(|left, right| left.lane == right.lane) {
        lanes.push(plan_lane(members, &mut offsets)?);
    }
    for (index, &(root, distance)) in aliases.iter().enumerate() {
        if root != index {
            offsets[index] = offsets[root] + distance;
        }
    }
    let proof = prove(intervals, &offsets, &lanes)?;
    Ok(Plan { offsets, lanes, proof })
}

/// A strategy: places roots, given their lower bound.
type Place = fn(&[Root], usize) -> Option<place::Placement>;

/// The strategies, cheapest first, and the most greedy passes that each takes.
const STRATEGIES: [(Strategy, Place, usize); 4] = [
    (Strategy::BestFit, |roots, _| place::best_fit(roots), 0),
    (Strategy::GreedyBySize, |roots, _| place::greedy_by_size(roots), 1),
    (Strategy::GreedyByArea, |roots, _| place::greedy_by_area(roots), 1),
    (Strategy::GreedyByTrouble, place::greedy_by_trouble, place::ROUNDS),
];

/// The most comparisons that a greedy strategy may take: a fraction of a second.
const MOST_GREEDY_WORK: usize = 1 << 26;

/// Estimates the comparisons of one greedy pass: the pairs of roots live at the same time, plus the
/// elements of a sorted list moved by each insertion.
fn greedy_work(roots: &[Root]) -> usize {
    let mut firsts: Vec<usize> = roots.iter().map(|root| root.first).collect();
    let mut lasts: Vec<usize> = roots.iter().map(|root| root.last).collect();
    firsts.sort_unstable();
    lasts.sort_unstable();
    let alive_with = |root: &Root| {
        let started = firsts.partition_point(|&first| first <= root.last);
        started.saturating_sub(lasts.partition_point(|&last| last < root.first))
    };
    let pairs = roots.iter().fold(0usize, |sum, root| sum.saturating_add(alive_with(root)));
    pairs.saturating_add(roots.len().saturating_mul(roots.len()) / 16)
}

fn plan_lane(roots: &[Root], offsets: &mut [usize]) -> Result<LanePlan, PlanError> {
    let lane = roots.first().map_or(0, |root| root.lane);
    let too_large = || PlanError::TooLarge { lane };
    let lower_bound = lower_bound(roots).ok_or_else(too_large)?;
    let mut best: Option<(place::Placement, Strategy)> = None;
    for (strategy, place, rounds) in STRATEGIES {
        // Best fit comes first and always runs, so skipping the others still leaves a result.
        if best.is_some() && greedy_work(roots).saturating_mul(rounds) > MOST_GREEDY_WORK {
            break;
        }
        // A strategy whose sums overflow finds nothing, but another may succeed.
        let Some(candidate) = place(roots, lower_bound) else {
            continue;
        };
        // The lower bound cannot be beaten, so the rest need not run.
        let optimal = candidate.bytes == lower_bound;
        if best.as_ref().is_none_or(|(placement, _)| candidate.bytes < placement.bytes) {
            best = Some((candidate, strategy));
        }
        if optimal {
            break;
        }
    }
    let (placement, strategy) = best.ok_or_else(too_large)?;
    if isize::try_from(placement.bytes).is_err() {
        return Err(too_large());
    }
    for (root, &offset) in roots.iter().zip(&placement.offsets) {
        offsets[root.index] = offset;
    }
    let alignment = roots.iter().map(|root| root.alignment).max().unwrap_or(1);
    Ok(LanePlan { lane, bytes: placement.bytes, alignment, lower_bound, strategy })
}

/// Returns for each interval its root (itself if it is no alias) and its offset in that.
fn resolve(intervals: &[Interval]) -> Result<Vec<(usize, usize)>, PlanError> {
    let mut resolved: Vec<Option<(usize, usize)>> = vec![None; intervals.len()];
    let mut chain = Vec::new();
    intervals.iter().enumerate().try_for_each(|(index, interval)| check(index, interval, intervals))?;
    for (start, interval) in intervals.iter().enumerate() {
        // Walk to a resolved interval, then back along the chain, so each interval is resolved
        // once.
        let mut index = start;
        let mut known = loop {
            match (resolved[index], intervals[index].alias) {
                (Some(known), _) => break known,
                (None, None) => {
                    resolved[index] = Some((index, 0));
                    break (index, 0);
                }
                // A chain longer than the number of intervals repeats one, so there is a cycle.
                (None, Some(alias)) if chain.len() < intervals.len() => {
                    chain.push((index, alias));
                    index = alias.of;
                }
                (None, Some(alias)) => {
                    return Err(PlanError::Alias { index, of: alias.of, reason: "the aliases form a cycle" });
                }
            }
        };
        while let Some((index, alias)) = chain.pop() {
            let distance = known.1.checked_add(alias.offset);
            let too_large = PlanError::TooLarge { lane: interval.lane };
            known = (known.0, distance.ok_or(too_large)?);
            resolved[index] = Some(known);
        }
    }
    Ok(resolved.into_iter().enumerate().map(|(index, known)| known.unwrap_or((index, 0))).collect())
}

/// Checks one interval by itself and against its target.
fn check(index: usize, interval: &Interval, intervals: &[Interval]) -> Result<(), PlanError> {
    let Interval { bytes, first, last, lane, alignment, alias } = *interval;
    if first > last {
        return Err(PlanError::Backwards { index, first, last });
    }
    if !alignment.is_power_of_two() {
        return Err(PlanError::Alignment { index, alignment });
    }
    let Some(Alias { of, offset }) = alias else {
        return Ok(());
    };
    let reason = match intervals.get(of) {
        None => "there is no such interval",
        Some(target) if target.lane != lane => "it is in another lane",
        Some(target) if offset.checked_add(bytes).is_none_or(|end| end > target.bytes) => {
            "it does not fit inside"
        }
        Some(_) => return Ok(()),
    };
    Err(PlanError::Alias { index, of, reason })
}

/// Returns the intervals with their own memory, extended to cover their aliases.
fn roots(intervals: &[Interval], aliases: &[(usize, usize)]) -> Vec<Root> {
    let mut place_of = vec![usize::MAX; intervals.len()];
    let mut roots = Vec::new();
    for (index, interval) in intervals.iter().enumerate() {
        let Interval { bytes, first, last, lane, alignment, alias } = *interval;
        if alias.is_none() {
            place_of[index] = roots.len();
            roots.push(Root { index, bytes, first, last, lane, alignment });
        }
    }
    for (interval, &(root, _)) in intervals.iter().zip(aliases) {
        if let Some(root) = roots.get_mut(place_of[root]) {
            root.first = root.first.min(interval.first);
            root.last = root.last.max(interval.last);
            root.alignment = root.alignment.max(interval.alignment);
        }
    }
    roots
}

/// Returns the largest sum of live bytes over all steps, or `None` on overflow.
fn lower_bound(roots: &[Root]) -> Option<usize> {
    let mut starts: Vec<_> = roots.iter().map(|root| (root.first, root.bytes)).collect();
    let mut ends: Vec<_> = roots.iter().map(|root| (root.last, root.bytes)).collect();
    starts.sort_unstable();
    ends.sort_unstable();
    let (mut live, mut peak) = (0usize, 0);
    let mut ends = ends.into_iter().peekable();
    for (first, bytes) in starts {
        while let Some((_, ended)) = ends.next_if(|&(last, _)| last < first) {
            live -= ended;
        }
        live = live.checked_add(bytes)?;
        peak = peak.max(live);
    }
    Some(peak)
}
