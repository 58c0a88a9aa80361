//! Offset assignment strategies. They see only roots: intervals with their own memory.

#![allow(
    clippy::indexing_slicing,
    reason = "roots are numbered here, and every table has an entry for each root or place of the tree"
)]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::layout::Root;
use crate::region::round_up;

/// The offset of each root, and the end of the highest one.
pub(super) struct Placement {
    pub(super) offsets: Vec<usize>,
    pub(super) bytes: usize,
}

/// Largest first, each into the tightest gap between those placed that are live at the same time.
/// `None` on overflow.
pub(super) fn greedy_by_size(roots: &[Root]) -> Option<Placement> {
    greedy(roots, |root| root.bytes as u128)
}

/// As [`greedy_by_size`], but in descending order of bytes times steps.
pub(super) fn greedy_by_area(roots: &[Root]) -> Option<Placement> {
    greedy(roots, |root| ((root.last - root.first) as u128 + 1).saturating_mul(root.bytes as u128))
}

fn greedy(roots: &[Root], rank: impl Fn(&Root) -> u128) -> Option<Placement> {
    place_in_order(roots, &ranked(roots, rank))
}

fn ranked(roots: &[Root], rank: impl Fn(&Root) -> u128) -> Vec<usize> {
    let mut order: Vec<usize> = (0..roots.len()).filter(|&index| roots[index].bytes > 0).collect();
    // Ties go by first step and index, so that equal inputs have equal plans.
    order.sort_by_cached_key(|&index| (Reverse(rank(&roots[index])), roots[index].first, index));
    order
}

/// The number of passes of [`greedy_by_trouble`].
pub(super) const ROUNDS: usize = 16;

/// Squeaky wheel optimization: [`greedy_by_size`] repeated, with the roots first that ended above
/// the lower bound. Returns the best pass.
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

/// Places each root in the tightest gap between earlier ones that are live at the same time.
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

/// Returns the start of the smallest gap that holds the root, or else the end of all rivals.
/// `rivals` must be sorted by start.
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

/// The placed roots, searchable by lifetime. There are two indexes, because each is quadratic where
/// the other is not: a tree over starts for short lifetimes, and a list sorted by offset for long
/// ones.
struct Placed {
    /// The first and last steps of all roots, placed or not, each sorted. They bound how many roots
    /// are live together with a given one.
    firsts: Vec<usize>,
    lasts: Vec<usize>,
    /// The position of each root in `firsts`.
    position: Vec<usize>,
    /// A binary tree over positions, whose leaves begin at `leaves`. Each node has the latest last
    /// step of the placed roots below it.
    latest: Vec<Option<usize>>,
    leaves: usize,
    /// The extent in memory, by position.
    extent: Vec<(usize, usize)>,
    /// All placed roots, sorted by start in memory.
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

    /// Fills `rivals` with the extents of the placed roots that are live at the same time, sorted
    /// by start.
    fn collect_rivals(&self, root: &Root, rivals: &mut Vec<(usize, usize)>) {
        rivals.clear();
        let started = self.firsts.partition_point(|&first| first <= root.last);
        let ended = self.lasts.partition_point(|&last| last < root.first);
        // A root that ended before this one started has started before, so nothing wraps.
        let at_most = started - ended;
        // Few rivals: query the tree and sort. Many rivals: filter the list, which is sorted
        // already.
        if at_most * 16 < self.by_offset.len() {
            self.descend(1, 0, self.leaves, started, root.first, rivals);
            rivals.sort_unstable();
            return;
        }
        let alive = |other: &&PlacedRoot| other.first <= root.last && root.first <= other.last;
        rivals.extend(self.by_offset.iter().filter(alive).map(|other| (other.start, other.end)));
    }

    /// Collects the placed roots at positions below `started` that are live at step `first` or
    /// later.
    fn descend(
        &self,
        node: usize,
        low: usize,
        width: usize,
        started: usize,
        first: usize,
        rivals: &mut Vec<(usize, usize)>,
    ) {
        // `None` is less than any step: subtrees without placed roots are skipped as well.
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

/// Simulates the run in time order: each root takes the smallest free block that fits, else memory
/// from the top. `None` on overflow.
pub(super) fn best_fit(roots: &[Root]) -> Option<Placement> {
    // Rounding sizes to the strictest alignment keeps every block aligned.
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
        // A root never ends before it starts, so the offset of one that ended is known.
        while let Some(ended) = ends.next_if(|&ended| roots[ended].last < root.first) {
            free.release(placement.offsets[ended], round_up(roots[ended].bytes, alignment)?);
        }
        let offset = free.take(round_up(root.bytes, alignment)?)?;
        placement.offsets[index] = offset;
        placement.bytes = placement.bytes.max(offset.checked_add(root.bytes)?);
    }
    Some(placement)
}

/// The free blocks below `top`, by offset and by size. Neighbours are always coalesced.
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
        // If the last free block touches the top, extend it, so that only the difference is new.
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
