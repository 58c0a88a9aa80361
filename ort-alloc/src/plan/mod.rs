//! The static planner: intervals of life and their sizes to offsets, before anything runs.
//!
//! Four strategies are tried for each lane, until one reaches the lower bound, and the smallest
//! result is kept:
//!
//! - **greedy by size**, as in Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
//!   Inference" (2020, arXiv:2001.03288, algorithm 3): largest first, each into the tightest gap
//!   between those already placed that live at the same time;
//! - **greedy by area**: the same, in descending order of bytes times steps, which puts what lives
//!   long down first;
//! - **best fit over time**: a first-come simulation of the run with a free list that joins
//!   neighbours;
//! - **greedy by trouble**: greedy by size, then a few times again with those first that ended
//!   above the lower bound, as in squeaky wheel optimization (Joslin and Clements, Journal of
//!   Artificial Intelligence Research 10, 1999).
//!
//! The greedy ones compare each interval with those placed that live at the same time. Where that
//! is too much work, as in a graph of 200,000 nodes, best fit alone decides.
//!
//! None is always the smallest. Finding the optimum is NP-hard (dynamic storage allocation, Garey
//! and Johnson 1979, SR2), so [`LanePlan::lower_bound`] says how far away it can be.
//!
//! Whatever the strategies did, [`verify`] then proves by an independent sweep that no two live
//! intervals share a byte, and the plan carries that [`Proof`].

#![allow(
    clippy::indexing_slicing,
    reason = "intervals are numbered here, every table has an entry for each, and `check` comes before what follows an alias"
)]

mod place;
mod verify;

use thiserror::Error;

pub use verify::{Overlap, Proof, verify};

/// One value's need of memory: how much, from which step to which, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interval {
    /// Size in bytes; may be 0.
    pub bytes: usize,
    /// The step that writes it first.
    pub first: usize,
    /// The last step that reads it, inclusive.
    pub last: usize,
    /// The slab it belongs to. Lanes share nothing.
    pub lane: u32,
    /// A power of two that its offset is a multiple of.
    pub alignment: usize,
    /// Set where it has no memory of its own but is a part of another interval's.
    pub alias: Option<Alias>,
}

impl Default for Interval {
    /// No bytes at step 0 of lane 0, aligned to 64.
    fn default() -> Self {
        Self { bytes: 0, first: 0, last: 0, lane: 0, alignment: 64, alias: None }
    }
}

/// Storage shared with another interval: a view, or the result of an operation in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    /// Index of the other interval, which may be an alias itself.
    pub of: usize,
    /// Distance in bytes from the start of the other interval.
    pub offset: usize,
}

/// Where everything goes.
#[derive(Clone, Debug)]
pub struct Plan {
    /// For each interval, the distance in bytes from the start of its lane's slab.
    pub offsets: Vec<usize>,
    /// The slabs, in ascending order of lane.
    pub lanes: Vec<LanePlan>,
    /// That no two live intervals overlap. Only [`verify`] makes one.
    pub proof: Proof,
}

impl Plan {
    /// The slab of one lane.
    pub fn lane(&self, lane: u32) -> Option<&LanePlan> {
        let index = self.lanes.binary_search_by_key(&lane, |plan| plan.lane).ok()?;
        self.lanes.get(index)
    }

    /// Bytes of all slabs together.
    pub fn total_bytes(&self) -> usize {
        self.lanes.iter().fold(0, |sum, lane| sum.saturating_add(lane.bytes))
    }
}

/// One lane's slab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LanePlan {
    /// The lane.
    pub lane: u32,
    /// Size of the slab in bytes.
    pub bytes: usize,
    /// The alignment that the slab's start needs for all offsets to be aligned.
    pub alignment: usize,
    /// The largest sum of bytes that are live at one step, an interval and its aliases counted
    /// once: no plan is smaller.
    pub lower_bound: usize,
    /// What gave this layout.
    pub strategy: Strategy,
}

/// How a layout was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Largest first, each in the tightest gap.
    GreedyBySize,
    /// Most bytes times steps first, each in the tightest gap.
    GreedyByArea,
    /// In order of time, from a free list.
    BestFit,
    /// Largest first, then those that ended too high.
    GreedyByTrouble,
}

/// Why intervals cannot be planned. `index` is that of the interval at fault.
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
    /// Its alignment is no power of two.
    #[error("interval {index} has alignment {alignment}, which is not a power of two")]
    Alignment {
        /// The interval.
        index: usize,
        /// Its alignment.
        alignment: usize,
    },
    /// It is an alias that cannot be.
    #[error("interval {index} cannot be an alias of interval {of}: {reason}")]
    Alias {
        /// The interval.
        index: usize,
        /// The interval it is to be a part of.
        of: usize,
        /// Why not.
        reason: &'static str,
    },
    /// The sizes add up to more than can be addressed.
    #[error("lane {lane} needs more memory than can be addressed")]
    TooLarge {
        /// The lane.
        lane: u32,
    },
    /// The layout that was found is wrong. This is a defect in the planner, and it is not used.
    #[error("the planner made an unsound layout: {0}")]
    Unsound(#[from] Overlap),
}

/// An interval with memory of its own, its life and alignment widened to those of all its aliases.
#[derive(Clone, Debug)]
struct Root {
    index: usize,
    bytes: usize,
    first: usize,
    last: usize,
    lane: u32,
    alignment: usize,
}

/// Gives every interval an offset such that no two that are live at the same step share a byte.
///
/// An alias lies in its target, whose life lasts as long as the alias is live. Chains of aliases
/// lead to one root.
///
/// # Errors
///
/// [`PlanError`] where an interval is malformed, an alias does not fit its target, or sizes
/// overflow.
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
    let proof = verify::prove(intervals, &offsets, &lanes)?;
    Ok(Plan { offsets, lanes, proof })
}

/// Places roots whose lower bound is given.
type Place = fn(&[Root], usize) -> Option<place::Placement>;

/// What is tried, cheapest first, until nothing is left to gain, and how often each places all
/// greedily at the most.
const STRATEGIES: [(Strategy, Place, usize); 4] = [
    (Strategy::BestFit, |roots, _| place::best_fit(roots), 0),
    (Strategy::GreedyBySize, |roots, _| place::greedy_by_size(roots), 1),
    (Strategy::GreedyByArea, |roots, _| place::greedy_by_area(roots), 1),
    (Strategy::GreedyByTrouble, place::greedy_by_trouble, place::ROUNDS),
];

/// The comparisons that a greedy strategy may take: a fraction of a second.
const MOST_GREEDY_WORK: usize = 1 << 26;

/// About how many comparisons a greedy strategy takes: the pairs of roots that live at the same
/// time, and a list of all that is moved at each insertion.
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
        if best.is_some() && greedy_work(roots).saturating_mul(rounds) > MOST_GREEDY_WORK {
            break;
        }
        // A strategy whose sums overflow has found nothing; another may.
        let Some(candidate) = place(roots, lower_bound) else {
            continue;
        };
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

/// For each interval, the one whose memory it lies in (itself where it is no alias) and the
/// distance from its start.
fn resolve(intervals: &[Interval]) -> Result<Vec<(usize, usize)>, PlanError> {
    let mut resolved: Vec<Option<(usize, usize)>> = vec![None; intervals.len()];
    let mut chain = Vec::new();
    intervals.iter().enumerate().try_for_each(|(index, interval)| check(index, interval, intervals))?;
    for (start, interval) in intervals.iter().enumerate() {
        // Walk to something known, then back along the chain: each interval is settled once.
        let mut index = start;
        let mut known = loop {
            match (resolved[index], intervals[index].alias) {
                (Some(known), _) => break known,
                (None, None) => {
                    resolved[index] = Some((index, 0));
                    break (index, 0);
                }
                (None, Some(alias)) if chain.len() < intervals.len() => {
                    chain.push((index, alias));
                    index = alias.of;
                }
                (None, Some(alias)) => {
                    return Err(PlanError::Alias {
                        index,
                        of: alias.of,
                        reason: "the aliases go in a circle",
                    });
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

/// The intervals with memory of their own, widened to their aliases.
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

/// The largest sum of live bytes over all steps; `None` on overflow.
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
