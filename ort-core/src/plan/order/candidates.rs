//! Candidate schedules, each made in about linear time.
//!
//! They are a depth-first order, a Sethi-Ullman order, and greedy variants that run steps early if
//! they free memory.

#![allow(
    clippy::indexing_slicing,
    reason = "steps and blocks are numbered by the program, and each table has an entry for each"
)]

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::dependencies::DependencyGraph;
use super::footprint::{Footprint, ScheduleMemory};

/// The number of steps of a chain that the eager order looks ahead.
const LOOK_AHEAD: usize = 12;

/// The look-ahead stops at a step that reads or allocates more values than this, because it would
/// take quadratic time.
const MOST_VALUES: usize = 64;

/// Returns the candidates, the simplest first.
pub(super) fn all(dependencies: &DependencyGraph, footprint: &Footprint) -> impl Iterator<Item = Vec<usize>> {
    let given: Vec<usize> = (0..dependencies.len()).collect();
    let late = depth_first(dependencies, |_| {});
    let heavy = sethi_ullman(dependencies, footprint);
    let orders = [
        eager(dependencies, footprint, &given),
        eager(dependencies, footprint, &late),
        eager(dependencies, footprint, &heavy),
    ];
    [late, heavy].into_iter().chain(orders)
}

/// Runs each step as late as its readers allow: a depth-first postorder, in which the inputs of a
/// step are computed right before it. `sort` orders the inputs of a step.
fn depth_first(dependencies: &DependencyGraph, sort: impl Fn(&mut Vec<usize>)) -> Vec<usize> {
    let mut seen = vec![false; dependencies.len()];
    let mut order = Vec::with_capacity(dependencies.len());
    // An explicit stack instead of recursion, because the depth of a graph has no bound.
    let mut stack: Vec<(usize, bool)> = Vec::new();
    let mut inputs = Vec::new();
    for sink in (0..dependencies.len()).filter(|step| dependencies.after.of(*step).is_empty()) {
        stack.push((sink, false));
        while let Some((step, done)) = stack.pop() {
            if done {
                order.push(step);
            } else if !std::mem::replace(&mut seen[step], true) {
                // The step is emitted after its inputs, which go on top of it on the stack.
                stack.push((step, true));
                inputs.clear();
                inputs.extend(dependencies.before.of(step).iter().copied().filter(|input| !seen[*input]));
                sort(&mut inputs);
                // Reversed, because the last one pushed is the first one popped.
                stack.extend(inputs.iter().rev().map(|input| (*input, false)));
            }
        }
    }
    order
}

/// Orders the inputs of a step as Sethi and Ullman order the operands of an expression (1970):
/// first those whose computation needs the most memory beyond their result. This is optimal if no
/// value is read twice and no output is in place.
fn sethi_ullman(dependencies: &DependencyGraph, footprint: &Footprint) -> Vec<usize> {
    let mut need: Vec<(u64, u64)> = Vec::with_capacity(dependencies.len());
    for step in 0..dependencies.len() {
        let mut inputs: Vec<(u64, u64)> =
            dependencies.before.of(step).iter().map(|input| need[*input]).collect();
        inputs.sort_by_key(|(peak, result)| Reverse(peak.saturating_sub(*result)));
        let (mut held, mut peak) = (0u64, 0u64);
        for (inner, result) in inputs {
            peak = peak.max(held.saturating_add(inner));
            held = held.saturating_add(result);
        }
        let made = footprint.makes[step].iter().fold(0u64, |sum, made| sum.saturating_add(made.bytes));
        let own = held.saturating_add(made).saturating_add(footprint.scratch[step]);
        need.push((peak.max(own), made));
    }
    depth_first(dependencies, |inputs| {
        inputs.sort_by_key(|input| (Reverse(need[*input].0.saturating_sub(need[*input].1)), *input));
    })
}

/// Follows the order of `base`, but runs steps that free more than they allocate as early as
/// possible.
fn eager(dependencies: &DependencyGraph, footprint: &Footprint, base: &[usize]) -> Vec<usize> {
    // A step may run early only if the peak stays within that of `base`.
    let ceiling = footprint.simulate(base).into_iter().max().unwrap_or(0);
    let mut eager = Eager::new(dependencies, footprint, base);
    let mut order = Vec::with_capacity(base.len());
    while let Some(step) = eager.next(ceiling) {
        eager.run(step);
        order.push(step);
    }
    order
}

/// The result of the look-ahead along the chain that begins with a step: the lowest net change of
/// live bytes, and the highest rise before it.
#[derive(Clone, Copy)]
struct Outlook {
    net: i128,
    rise: i128,
}

struct Eager<'a> {
    dependencies: &'a DependencyGraph,
    footprint: &'a Footprint,
    memory: ScheduleMemory<'a>,
    /// The position of each step in the base order.
    rank: Vec<usize>,
    base: &'a [usize],
    /// For each step, the number of steps that it still waits for.
    waits: Vec<usize>,
    done: Vec<bool>,
    /// Steps that can run, by rank.
    ready: BTreeSet<usize>,
    /// Ready steps whose chain frees more than it allocates, by net change and then by rank.
    gaining: BTreeSet<(i128, usize)>,
    outlook: Vec<Option<Outlook>>,
}

impl<'a> Eager<'a> {
    fn new(dependencies: &'a DependencyGraph, footprint: &'a Footprint, base: &'a [usize]) -> Eager<'a> {
        let mut rank = vec![0; base.len()];
        for (place, &step) in base.iter().enumerate() {
            rank[step] = place;
        }
        let mut eager = Eager {
            dependencies,
            footprint,
            memory: ScheduleMemory::new(footprint),
            rank,
            base,
            waits: (0..base.len()).map(|step| dependencies.before.of(step).len()).collect(),
            done: vec![false; base.len()],
            ready: BTreeSet::new(),
            gaining: BTreeSet::new(),
            outlook: vec![None; base.len()],
        };
        for step in 0..base.len() {
            if eager.waits[step] == 0 {
                eager.add(step);
            }
        }
        eager
    }

    /// Returns the step that frees the most without exceeding `ceiling`, else the next ready step
    /// of the base order.
    fn next(&self, ceiling: u64) -> Option<usize> {
        // We try only the first few, because each choice must be fast.
        for &(_, rank) in self.gaining.iter().take(4) {
            let step = self.base[rank];
            let rise = self.outlook[step].map_or(0, |outlook| outlook.rise);
            if i128::from(self.memory.live) + rise <= i128::from(ceiling) {
                return Some(step);
            }
        }
        self.ready.first().map(|rank| self.base[*rank])
    }

    /// Runs a step, and updates which steps are ready and what they free.
    fn run(&mut self, step: usize) {
        self.forget(step);
        self.ready.remove(&self.rank[step]);
        self.done[step] = true;
        self.memory.run(step);
        let (dependencies, footprint) = (self.dependencies, self.footprint);
        for &next in dependencies.after.of(step) {
            self.waits[next] -= 1;
            if self.waits[next] == 0 {
                self.add(next);
            }
        }
        // The last reader of a block frees it, so its outlook has changed.
        for &block in footprint.reads.of(step) {
            if self.memory.pending(block) == 1 {
                let last = footprint.readers.of(block).iter().copied().find(|reader| !self.done[*reader]);
                if let Some(last) = last.filter(|last| self.waits[*last] == 0) {
                    self.forget(last);
                    self.add(last);
                }
            }
        }
    }

    /// Marks a step as ready.
    fn add(&mut self, step: usize) {
        self.ready.insert(self.rank[step]);
        let outlook = self.look_ahead(step);
        if outlook.net < 0 {
            self.gaining.insert((outlook.net, self.rank[step]));
            self.outlook[step] = Some(outlook);
        }
    }

    /// Discards the outlook of a step.
    fn forget(&mut self, step: usize) {
        if let Some(outlook) = self.outlook[step].take() {
            self.gaining.remove(&(outlook.net, self.rank[step]));
        }
    }

    /// Follows the chain that begins with a step, while each step has a single dependent that waits
    /// for nothing else.
    fn look_ahead(&self, step: usize) -> Outlook {
        let mut best = Outlook { net: 0, rise: 0 };
        let (mut net, mut rise) = (0i128, 0i128);
        let (mut step, mut previous) = (step, None);
        for _ in 0..LOOK_AHEAD {
            if self.footprint.reads.of(step).len().max(self.footprint.makes[step].len()) > MOST_VALUES {
                break;
            }
            let (alive, after) = self.change(step, previous);
            rise = rise.max(net + alive);
            net += after;
            if net < best.net {
                best = Outlook { net, rise };
            }
            match self.dependencies.after.of(step) {
                [next] if self.waits[*next] == 1 => (previous, step) = (Some(step), *next),
                _ => break,
            }
        }
        best
    }

    /// Returns by how much the live bytes change while a step runs, and after it. It assumes that
    /// `previous` has just run.
    fn change(&self, step: usize, previous: Option<usize>) -> (i128, i128) {
        let held = |block: usize| {
            let from_previous = previous.and_then(|previous| {
                let mut made = self.footprint.makes[previous].iter();
                made.find(|made| made.block == block).map(|made| made.bytes)
            });
            from_previous.unwrap_or_else(|| self.memory.held(block))
        };
        // `memory` has not run `previous`, whose reads still count as pending there.
        let read_before = |block: &usize| {
            let known = previous.is_some_and(|previous| self.footprint.reads.of(previous).contains(block));
            usize::from(known)
        };
        let dies = |block: &usize| self.memory.pending(*block) == 1 + read_before(block);
        let freed = self.footprint.reads.of(step).iter().copied().filter(|block| dies(block)).map(held);
        let freed: i128 = freed.map(i128::from).sum();
        let (mut made, mut taken, mut unread) = (0i128, 0i128, 0i128);
        for output in &self.footprint.makes[step] {
            let bytes = i128::from(output.bytes);
            made += bytes;
            if self.memory.pending(output.block) == 0 {
                unread += bytes;
            } else if output.from.iter().any(|block| dies(block) && held(*block) > 0) {
                taken += bytes;
            }
        }
        let scratch = i128::from(self.footprint.scratch[step]);
        (made - taken + scratch, made - unread - freed)
    }
}
