//! The placement strategies. They know roots only: intervals with memory of their own.

#![allow(
    clippy::indexing_slicing,
    reason = "roots are numbered here, and every table has an entry for each root or place of the tree"
)]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::Root;
use crate::host::round_up;

/// Offsets in the order of the roots, and the end of the highest.
pub(super) struct Placement {
    pub(super) offsets: Vec<usize>,
    pub(super) bytes: usize,
}

/// Largest first, each into the tightest gap between those placed that live at the same time.
/// `None` on overflow.
pub(super) fn greedy_by_size(roots: &[Root]) -> Option<Placement> {
    greedy(roots, |root| root.bytes as u128)
}

/// As [`greedy_by_size`], but first what takes the most bytes times steps.
pub(super) fn greedy_by_area(roots: &[Root]) -> Option<Placement> {
    greedy(roots, |root| ((root.last - root.first) as u128 + 1).saturating_mul(root.bytes as u128))
}

fn greedy(roots: &[Root], rank: impl Fn(&Root) -> u128) -> Option<Placement> {
    place_in_order(roots, &ranked(roots, rank))
}

fn ranked(roots: &[Root], rank: impl Fn(&Root) -> u128) -> Vec<usize> {
    let mut order: Vec<usize> = (0..roots.len()).filter(|&index| roots[index].bytes > 0).collect();
    order.sort_by_cached_key(|&index| (Reverse(rank(&roots[index])), roots[index].first, index));
    order
}

/// How often [`greedy_by_trouble`] begins anew.
pub(super) const ROUNDS: usize = 16;

/// As [`greedy_by_size`], again and again: what ended above the lower bound goes first the next
/// time. The best of all rounds.
pub(super) fn greedy_by_trouble(roots: &[Root], lower_bound: usize) -> Option<Placement> {
    let mut order = ranked(roots, |root| root.bytes as u128);
    let mut best: Option<Placement> = None;
    for _ in 0..ROUNDS {
        let placement = place_in_order(roots, &order)?;
        let is_above =
            |index: &usize| placement.offsets[*index].saturating_add(roots[*index].bytes) > lower_bound;
        let (mut above, below): (Vec<usize>, Vec<usize>) = order.iter().copied().partition(is_above);
        let done = above.is_empty();
        above.extend(below);
        order = above;
        if best.as_ref().is_none_or(|best| placement.bytes < best.bytes) {
            best = Some(placement);
        }
        if done {
            break;
        }
    }
    best
}

/// Each into the tightest gap between those before it that live at the same time.
fn place_in_order(roots: &[Root], order: &[usize]) -> Option<Placement> {
    let mut placement = Placement { offsets: vec![0; roots.len()], bytes: 0 };
    let mut placed = Placed::new(roots);
    let mut rivals = Vec::new();
    for &index in order {
        let root = &roots[index];
        placed.collect_rivals(root, &mut rivals);
        let offset = tightest_gap(&rivals, root)?;
        let end = offset.checked_add(root.bytes)?;
        placed.insert(index, root, offset, end);
        placement.offsets[index] = offset;
        placement.bytes = placement.bytes.max(end);
    }
    Some(placement)
}

/// The start of the smallest gap that holds the root, or the end of all rivals. `rivals` ascend by
/// start.
fn tightest_gap(rivals: &[(usize, usize)], root: &Root) -> Option<usize> {
    let mut best = None;
    let mut top = 0;
    for &(start, end) in rivals {
        if start > top {
            let aligned = round_up(top, root.alignment)?;
            if aligned.checked_add(root.bytes)? <= start && best.is_none_or(|(gap, _)| start - top < gap) {
                best = Some((start - top, aligned));
            }
        }
        top = top.max(end);
    }
    match best {
        Some((_, offset)) => Some(offset),
        None => round_up(top, root.alignment),
    }
}

/// What has been placed, found again by time. Two ways to answer the same question, as each is
/// quadratic where the other is not: a tree over starts for short lives, and a list ordered by
/// offset for long ones.
struct Placed {
    /// Starts and ends of life of all roots, placed or not, each ascending: how many can overlap in
    /// time.
    firsts: Vec<usize>,
    lasts: Vec<usize>,
    /// Position in `firsts` of each root.
    position: Vec<usize>,
    /// A binary tree over positions: the latest end of life below each node, of placed roots only.
    /// The leaves begin at `leaves`.
    latest: Vec<Option<usize>>,
    leaves: usize,
    /// Start and end in memory by position.
    extent: Vec<(usize, usize)>,
    /// Everything placed, ascending by start in memory.
    by_offset: Vec<PlacedRoot>,
}

#[derive(Clone, Copy)]
struct PlacedRoot {
    start: usize,
    end: usize,
    first: usize,
    last: usize,
}

impl Placed {
    fn new(roots: &[Root]) -> Self {
        let mut order: Vec<usize> = (0..roots.len()).collect();
        order.sort_by_key(|&index| roots[index].first);
        let mut position = vec![0; roots.len()];
        for (place, &index) in order.iter().enumerate() {
            position[index] = place;
        }
        let mut lasts: Vec<usize> = roots.iter().map(|root| root.last).collect();
        lasts.sort_unstable();
        let leaves = roots.len().next_power_of_two();
        Self {
            firsts: order.iter().map(|&index| roots[index].first).collect(),
            lasts,
            position,
            latest: vec![None; 2 * leaves],
            leaves,
            extent: vec![(0, 0); roots.len()],
            by_offset: Vec::with_capacity(roots.len()),
        }
    }

    fn insert(&mut self, index: usize, root: &Root, start: usize, end: usize) {
        let position = self.position[index];
        self.extent[position] = (start, end);
        let mut node = self.leaves + position;
        while node > 0 {
            self.latest[node] = self.latest[node].max(Some(root.last));
            node /= 2;
        }
        let place = self.by_offset.partition_point(|other| other.start < start);
        self.by_offset.insert(place, PlacedRoot { start, end, first: root.first, last: root.last });
    }

    /// Fills `rivals` with the extents of what is placed and lives at the same time, ascending by
    /// start.
    fn collect_rivals(&self, root: &Root, rivals: &mut Vec<(usize, usize)>) {
        rivals.clear();
        let started = self.firsts.partition_point(|&first| first <= root.last);
        let ended = self.lasts.partition_point(|&last| last < root.first);
        let at_most = started - ended;
        if at_most * 16 < self.by_offset.len() {
            self.descend(1, 0, self.leaves, started, root.first, rivals);
            rivals.sort_unstable();
            return;
        }
        let alive = |other: &&PlacedRoot| other.first <= root.last && root.first <= other.last;
        rivals.extend(self.by_offset.iter().filter(alive).map(|other| (other.start, other.end)));
    }

    /// Collects the placed roots at positions below `started` that live at step `first` or later.
    fn descend(
        &self,
        node: usize,
        low: usize,
        width: usize,
        started: usize,
        first: usize,
        rivals: &mut Vec<(usize, usize)>,
    ) {
        if low >= started || self.latest[node] < Some(first) {
            return;
        }
        if width == 1 {
            rivals.push(self.extent[low]);
            return;
        }
        let half = width / 2;
        self.descend(2 * node, low, half, started, first, rivals);
        self.descend(2 * node + 1, low + half, half, started, first, rivals);
    }
}

/// Walks through time and serves each root from the smallest free block that holds it, else from
/// the top. `None` on overflow.
pub(super) fn best_fit(roots: &[Root]) -> Option<Placement> {
    // Sizes in multiples of the strictest alignment keep every block aligned.
    let alignment = roots.iter().map(|root| root.alignment).max().unwrap_or(1);
    let mut starts: Vec<usize> = (0..roots.len()).filter(|&index| roots[index].bytes > 0).collect();
    let mut ends = starts.clone();
    starts.sort_by_key(|&index| (roots[index].first, Reverse(roots[index].bytes), index));
    ends.sort_by_key(|&index| roots[index].last);
    let mut ends = ends.into_iter().peekable();
    let mut placement = Placement { offsets: vec![0; roots.len()], bytes: 0 };
    let mut free = FreeList::default();
    for index in starts {
        let root = &roots[index];
        while let Some(ended) = ends.next_if(|&ended| roots[ended].last < root.first) {
            free.release(placement.offsets[ended], round_up(roots[ended].bytes, alignment)?);
        }
        let offset = free.take(round_up(root.bytes, alignment)?)?;
        placement.offsets[index] = offset;
        placement.bytes = placement.bytes.max(offset.checked_add(root.bytes)?);
    }
    Some(placement)
}

/// Free blocks below `top`, by place and by size; neighbours are always joined.
#[derive(Default)]
struct FreeList {
    by_offset: BTreeMap<usize, usize>,
    by_size: BTreeSet<(usize, usize)>,
    top: usize,
}

impl FreeList {
    fn add(&mut self, offset: usize, bytes: usize) {
        self.by_offset.insert(offset, bytes);
        self.by_size.insert((bytes, offset));
    }

    fn remove(&mut self, offset: usize, bytes: usize) {
        self.by_offset.remove(&offset);
        self.by_size.remove(&(bytes, offset));
    }

    fn take(&mut self, bytes: usize) -> Option<usize> {
        if let Some(&(size, offset)) = self.by_size.range((bytes, 0)..).next() {
            self.remove(offset, size);
            if size > bytes {
                self.add(offset + bytes, size - bytes);
            }
            return Some(offset);
        }
        // A free block that touches the top is used and grown, so that only the difference is new.
        let offset = match self.by_offset.last_key_value() {
            Some((&offset, &size)) if offset + size == self.top => {
                self.remove(offset, size);
                offset
            }
            _ => self.top,
        };
        self.top = offset.checked_add(bytes)?;
        Some(offset)
    }

    fn release(&mut self, mut offset: usize, mut bytes: usize) {
        if let Some((&next, &size)) = self.by_offset.range(offset..).next()
            && next == offset + bytes
        {
            self.remove(next, size);
            bytes += size;
        }
        if let Some((&previous, &size)) = self.by_offset.range(..offset).next_back()
            && previous + size == offset
        {
            self.remove(previous, size);
            offset = previous;
            bytes += size;
        }
        self.add(offset, bytes);
    }
}
