//! Verification of plans: a sweep that shares no code with the planning strategies.

#![allow(
    clippy::indexing_slicing,
    reason = "intervals are numbered here, every table has an entry for each, and `check_place` comes before what follows an alias"
)]

use std::collections::BTreeMap;

use thiserror::Error;

use super::layout::{Interval, LanePlan};

/// Proof that a plan was verified. Every interval fits its lane and is aligned, every alias is
/// inside its target, and no two intervals live at the same step share a byte. Only
/// [`verify`](fn@super::verify) and [`plan`](super::plan) create one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    intervals: usize,
}

impl Proof {
    /// Returns the number of verified intervals.
    pub fn intervals(&self) -> usize {
        self.intervals
    }
}

/// A defect of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Overlap {
    /// Two intervals live at the same step share bytes.
    #[error("intervals {first} and {second} of lane {lane} share bytes at step {step}")]
    Shared {
        /// The index of one interval.
        first: usize,
        /// The index of the other.
        second: usize,
        /// Their lane.
        lane: u32,
        /// The first step at which they overlap.
        step: usize,
    },
    /// An interval is at an invalid place.
    #[error("interval {index} is misplaced: {reason}")]
    Misplaced {
        /// The index of the interval.
        index: usize,
        /// What is wrong with its place.
        reason: &'static str,
    },
    /// The plan is for another number of intervals.
    #[error("the plan has {offsets} offsets for {intervals} intervals")]
    Count {
        /// The number of offsets in the plan.
        offsets: usize,
        /// The number of intervals to verify.
        intervals: usize,
    },
}

pub(super) fn prove(intervals: &[Interval], offsets: &[usize], lanes: &[LanePlan]) -> Result<Proof, Overlap> {
    if offsets.len() != intervals.len() {
        return Err(Overlap::Count { offsets: offsets.len(), intervals: intervals.len() });
    }
    for (index, interval) in intervals.iter().enumerate() {
        check_place(index, interval, intervals, offsets, lanes)
            .map_err(|reason| Overlap::Misplaced { index, reason })?;
    }
    let lives = lives(intervals)?;
    sweep(intervals, offsets, &lives)?;
    Ok(Proof { intervals: intervals.len() })
}

fn check_place(
    index: usize,
    interval: &Interval,
    intervals: &[Interval],
    offsets: &[usize],
    lanes: &[LanePlan],
) -> Result<(), &'static str> {
    let offset = offsets[index];
    // `verify` also takes plans that were made elsewhere, so the sum may overflow.
    let end = offset.checked_add(interval.bytes).ok_or("its end cannot be addressed")?;
    let place =
        lanes.binary_search_by_key(&interval.lane, |lane| lane.lane).map_err(|_| "its lane is missing")?;
    if end > lanes[place].bytes {
        return Err("it ends beyond its lane");
    }
    if interval.first > interval.last {
        return Err("it ends before it starts");
    }
    if !interval.alignment.is_power_of_two() || !offset.is_multiple_of(interval.alignment) {
        return Err("its offset is not aligned");
    }
    let Some(alias) = interval.alias else {
        return Ok(());
    };
    let target = intervals.get(alias.of).ok_or("its alias target is missing")?;
    let inside = alias.offset.checked_add(interval.bytes).is_some_and(|end| end <= target.bytes);
    if target.lane != interval.lane || !inside {
        return Err("it does not fit inside its target");
    }
    // An alias is a part of its target, so the target's offset determines its own.
    match offsets[alias.of].checked_add(alias.offset) == Some(offset) {
        true => Ok(()),
        false => Err("it is not where its target is"),
    }
}

/// Returns the first and last step of each root's memory. Each alias extends the lifetime of its
/// target, outermost alias first, and gets none itself, because the target's bytes cover its own.
fn lives(intervals: &[Interval]) -> Result<Vec<Option<(usize, usize)>>, Overlap> {
    let mut lives: Vec<_> = intervals.iter().map(|interval| Some((interval.first, interval.last))).collect();
    let mut waiting = vec![0usize; intervals.len()];
    for alias in intervals.iter().filter_map(|interval| interval.alias) {
        waiting[alias.of] += 1;
    }
    let mut ready: Vec<usize> = (0..intervals.len()).filter(|&index| waiting[index] == 0).collect();
    let mut settled = 0;
    while let Some(index) = ready.pop() {
        settled += 1;
        let Some(alias) = intervals[index].alias else {
            continue;
        };
        let handed = lives[index].take();
        lives[alias.of] = lives[alias.of]
            .zip(handed)
            .map(|((first, last), (alias_first, alias_last))| (first.min(alias_first), last.max(alias_last)));
        waiting[alias.of] -= 1;
        if waiting[alias.of] == 0 {
            ready.push(alias.of);
        }
    }
    match waiting.iter().position(|&count| count > 0) {
        Some(index) if settled < intervals.len() => {
            Err(Overlap::Misplaced { index, reason: "its aliases form a cycle" })
        }
        _ => Ok(lives),
    }
}

/// Sweeps over time with the live extents of each lane. They are disjoint until an overlap is
/// found, so a new extent overlaps any of them only if it overlaps a neighbour.
fn sweep(intervals: &[Interval], offsets: &[usize], lives: &[Option<(usize, usize)>]) -> Result<(), Overlap> {
    let life = |index: usize| lives[index].unwrap_or_default();
    let mut starts: Vec<usize> =
        (0..intervals.len()).filter(|&index| intervals[index].bytes > 0 && lives[index].is_some()).collect();
    let mut ends = starts.clone();
    starts.sort_by_key(|&index| life(index).0);
    ends.sort_by_key(|&index| life(index).1);
    let mut ends = ends.into_iter().peekable();
    let mut live: BTreeMap<(u32, usize), (usize, usize)> = BTreeMap::new();
    for index in starts {
        let step = life(index).0;
        while let Some(ended) = ends.next_if(|&ended| life(ended).1 < step) {
            live.remove(&(intervals[ended].lane, offsets[ended]));
        }
        let (lane, start) = (intervals[index].lane, offsets[index]);
        let end = start + intervals[index].bytes;
        let below = live.range((lane, 0)..(lane, end)).next_back();
        if let Some((_, &(_, second))) = below.filter(|&(_, &(below_end, _))| below_end > start) {
            return Err(Overlap::Shared { first: index, second, lane, step });
        }
        live.insert((lane, start), (end, index));
    }
    Ok(())
}
