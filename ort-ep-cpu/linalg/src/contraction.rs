//! Pairwise contraction for `Einsum`: the order in which operands are multiplied, and the matmuls.
//!
//! The sum over all subscripts at once has as many terms as the product of their sizes: `a,b,c,d->`
//! of four vectors of 4,096 elements has 2.8e14. Pairwise contraction makes that negligible.
//! Subscripts that only one operand has are summed first. The cheapest pair goes next
//! ([opt_einsum]'s greedy order), as a batch of matmuls in the type that sums are computed in.
//!
//! [opt_einsum]: https://doi.org/10.21105/joss.00753

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::ops::{Equation, Label};
use ort_core::tensor::element_count;
use ort_core::{Result, ensure, error};

use crate::subscripts::{size_of_label, sizes};
use ort_cpu_kernel::number::{Number, Wide};
use ort_cpu_threads::interrupt::{self, PIECE, Pace, in_blocks, pieces_mut, spend};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

/// By which factor pairs must reduce the multiplications to be worth their memory.
const GAIN: f64 = 8.0;

/// How many operands are candidates for the next pair. Trying all pairs of many operands would be
/// cubic in their number.
const CANDIDATES: usize = 12;

/// The fewest terms of sums that are worth a thread.
const GRAIN: usize = 1 << 14;

/// A dense intermediate tensor: its subscripts, outermost first, and its range of the workspace, in
/// elements.
#[derive(Debug, Clone)]
struct Term {
    labels: Vec<Label>,
    start: usize,
    len: usize,
}

/// The contraction of two terms. Each is transposed if its axes are out of order, then both are
/// multiplied.
#[derive(Debug)]
struct Pair {
    lhs: (Term, Term),
    rhs: (Term, Term),
    /// Batch, rows, columns and k (the summed axis).
    shape: [usize; 4],
    result: Term,
}

/// All steps of an equation for given shapes.
#[derive(Debug)]
pub(crate) struct Contraction {
    sizes: Vec<(Label, usize)>,
    /// Each operand after its own subscripts are summed.
    operands: Vec<Term>,
    pairs: Vec<Pair>,
    /// The term that becomes the output once its axes are in order.
    last: Term,
    output: Vec<Label>,
    /// The length of the workspace, in elements.
    pub(crate) len: usize,
}

/// The state of the planner: the end of the workspace, and the multiplications so far.
struct Planner<'a> {
    sizes: &'a [(Label, usize)],
    end: usize,
    cost: f64,
}

impl Planner<'_> {
    fn term(&mut self, labels: Vec<Label>) -> Result<Term> {
        let shape: Vec<usize> = labels.iter().map(|&label| size_of_label(self.sizes, label)).collect();
        let len = element_count(&shape)?;
        let start = self.end;
        self.end = start.checked_add(len).ok_or_else(|| error!(InvalidArgument, "an Einsum is too large"))?;
        // Writing an intermediate counts as much as a multiplication per element.
        self.cost += len as f64;
        Ok(Term { labels, start, len })
    }

    fn size(&self, labels: &[Label]) -> f64 {
        labels.iter().map(|&label| size_of_label(self.sizes, label) as f64).product()
    }

    /// Returns the term with its axes in this order: itself, or a copy.
    fn ordered(&mut self, term: &Term, parts: [&[Label]; 3]) -> Result<Term> {
        let labels = parts.concat();
        if labels == term.labels { Ok(term.clone()) } else { self.term(labels) }
    }

    fn pair(&mut self, lhs: Term, rhs: Term, is_needed: &dyn Fn(Label) -> bool) -> Result<Pair> {
        let both = |label: &&Label| rhs.labels.contains(label);
        let shared: Vec<Label> = lhs.labels.iter().filter(both).copied().collect();
        // A shared subscript that no later step reads is summed in this pair. Any other makes a
        // batch of matmuls.
        let (batch, summed): (Vec<Label>, Vec<Label>) = shared.iter().partition(|label| is_needed(**label));
        let own = |of: &Term| of.labels.iter().filter(|label| !shared.contains(label)).copied().collect();
        let (rows, columns): (Vec<Label>, Vec<Label>) = (own(&lhs), own(&rhs));
        let shape = [&batch, &rows, &columns, &summed].map(|labels| self.size(labels) as usize);
        self.cost += shape.iter().map(|size| *size as f64).product::<f64>();
        let lhs_to = self.ordered(&lhs, [&batch, &rows, &summed])?;
        let rhs_to = self.ordered(&rhs, [&batch, &summed, &columns])?;
        // The order in which a matmul writes. A later step transposes the term only if it needs
        // another order.
        let result = self.term([batch, rows, columns].concat())?;
        Ok(Pair { lhs: (lhs, lhs_to), rhs: (rhs, rhs_to), shape, result })
    }

    /// Returns the number of multiplications of a pair.
    fn cost_of(&self, lhs: &Term, rhs: &Term) -> f64 {
        let only_rhs: Vec<Label> =
            rhs.labels.iter().filter(|label| !lhs.labels.contains(label)).copied().collect();
        // Each subscript of either side is one loop; shared ones count once.
        self.size(&lhs.labels) * self.size(&only_rhs)
    }

    /// Returns the positions of the cheapest pair.
    fn cheapest(&self, terms: &[Term]) -> (usize, usize) {
        let count = terms.len().min(CANDIDATES);
        let pairs = (0..count).flat_map(|lhs| (lhs + 1..count).map(move |rhs| (lhs, rhs)));
        let cost = |&(lhs, rhs): &(usize, usize)| match (terms.get(lhs), terms.get(rhs)) {
            (Some(lhs), Some(rhs)) => self.cost_of(lhs, rhs),
            _ => f64::INFINITY,
        };
        pairs.min_by(|one, other| cost(one).total_cmp(&cost(other))).unwrap_or((0, 1))
    }
}

impl Contraction {
    /// Returns the steps for these shapes; none unless they are much less work than one sum over
    /// all subscripts.
    pub(crate) fn new(equation: &Equation, shapes: &[&[usize]]) -> Result<Option<Contraction>> {
        let sizes = sizes(equation, shapes)?;
        let mut planner = Planner { sizes: &sizes, end: 0, cost: 0.0 };
        let at_once: f64 = sizes.iter().map(|(_, size)| *size as f64).product();
        // Without elements there is nothing to order, and a small sum takes less time than its
        // plan.
        if at_once <= GRAIN as f64 || equation.inputs.len() < 2 {
            return Ok(None);
        }
        let mut operands = Vec::with_capacity(shapes.len());
        for (index, (labels, shape)) in equation.inputs.iter().zip(shapes).enumerate() {
            let mut kept: Vec<Label> = Vec::new();
            for (&label, &size) in labels.iter().zip(*shape) {
                let elsewhere = has_elsewhere(equation, shapes, &sizes, (index, label));
                let spans = size == size_of_label(&sizes, label);
                // An axis that is broadcast has size 1 here and is dropped.
                if spans && (elsewhere || equation.output.contains(&label)) && !kept.contains(&label) {
                    kept.push(label);
                }
            }
            planner.cost += shape.iter().map(|size| *size as f64).product::<f64>();
            operands.push(planner.term(kept)?);
        }
        let (pairs, last) = Self::order(&mut planner, operands.clone(), &equation.output)?;
        // The strided loop needs no workspace, so the plan must gain much.
        let worth = planner.cost * GAIN < at_once;
        let (len, output) = (planner.end, equation.output.clone());
        Ok(worth.then_some(Contraction { sizes, operands, pairs, last, output, len }))
    }

    fn order(planner: &mut Planner<'_>, mut terms: Vec<Term>, output: &[Label]) -> Result<(Vec<Pair>, Term)> {
        let mut pairs = Vec::with_capacity(terms.len());
        while terms.len() > 1 {
            let (lhs, rhs) = planner.cheapest(&terms);
            // The later one is removed first, so that the other's position stays valid.
            let rhs = terms.swap_remove(rhs);
            let lhs = terms.swap_remove(lhs);
            let is_needed = |label: Label| {
                output.contains(&label) || terms.iter().any(|term| term.labels.contains(&label))
            };
            let pair = planner.pair(lhs, rhs, &is_needed)?;
            terms.push(pair.result.clone());
            pairs.push(pair);
        }
        let last = terms.pop().ok_or_else(|| error!(Fail, "an Einsum without operands"))?;
        Ok((pairs, last))
    }

    /// Computes the output.
    pub(crate) fn run<T: Number>(
        &self,
        threads: usize,
        operands: &[(&[Label], &[usize], &[T])],
        work: &mut [T::Wide],
        to: &mut [T],
    ) -> Result<()> {
        for ((labels, shape, values), term) in operands.iter().zip(&self.operands) {
            let walk = Walk::new(&self.sizes, labels, shape, &term.labels);
            let (_, to) = split(work, &[], term)?;
            walk.sum(threads, &|place| values.get(place).map_or(T::Wide::ZERO, |value| value.widen()), to);
        }
        for pair in &self.pairs {
            for (from, ordered) in [&pair.lhs, &pair.rhs] {
                // A term that was in order already is its own copy.
                if from.start != ordered.start {
                    self.reorder(threads, (from, ordered), work)?;
                }
            }
            let (from, to) = split(work, &[&pair.lhs.1, &pair.rhs.1], &pair.result)?;
            let [lhs, rhs] = from.as_slice() else { return Err(error!(Fail, "a pair of one")) };
            multiply(threads, pair.shape, [lhs, rhs], to);
        }
        // The result is narrowed only here: intermediates keep the accumulator type.
        let walk = self.walk(&self.last, &self.output);
        let last = work.get(self.last.start..self.last.start + self.last.len);
        let last = last.ok_or_else(too_short)?;
        ensure!(last.len() == to.len(), Fail, "the result has another size");
        for_each_row_chunk_mut(threads, to, 1, GRAIN, |first, to| {
            walk.each(first, to.len(), |index, place| to[index] = T::narrow(last[place]));
        });
        Ok(())
    }

    /// Returns a walk over a term's elements in another order of its axes.
    fn walk(&self, term: &Term, order: &[Label]) -> Walk {
        let shape: Vec<usize> = term.labels.iter().map(|&label| size_of_label(&self.sizes, label)).collect();
        Walk::new(&self.sizes, &term.labels, &shape, order)
    }

    fn reorder<W: Wide>(&self, threads: usize, (from, to): (&Term, &Term), work: &mut [W]) -> Result<()> {
        let walk = self.walk(from, &to.labels);
        let (from, to) = split(work, &[from], to)?;
        let [from] = from.as_slice() else { return Err(too_short()) };
        walk.sum(threads, &|place| from[place], to);
        Ok(())
    }
}

/// Returns whether another operand than the one at `index` has a subscript in its full size. An
/// operand of size 1 is constant along the subscript, as if it did not have it.
fn has_elsewhere(
    equation: &Equation,
    shapes: &[&[usize]],
    sizes: &[(Label, usize)],
    (index, label): (usize, Label),
) -> bool {
    let size = size_of_label(sizes, label);
    let mut others = equation.inputs.iter().zip(shapes).enumerate().filter(|(other, _)| *other != index);
    others
        .any(|(_, (labels, shape))| labels.iter().zip(*shape).any(|(own, len)| *own == label && *len == size))
}

fn too_short() -> ort_core::Error {
    error!(Fail, "the workspace of an Einsum is too short")
}

/// Splits the workspace into what is read and what is written. A term begins after those that it is
/// computed from.
fn split<'w, W>(work: &'w mut [W], from: &[&Term], to: &Term) -> Result<(Vec<&'w [W]>, &'w mut [W])> {
    let (before, rest) = work.split_at_mut_checked(to.start).ok_or_else(too_short)?;
    let to = rest.get_mut(..to.len).ok_or_else(too_short)?;
    let before: &'w [W] = before;
    let parts = from.iter().map(|term| before.get(term.start..term.start + term.len));
    let parts: Option<Vec<&[W]>> = parts.collect();
    Ok((parts.ok_or_else(too_short)?, to))
}

/// Sums of the elements of a strided tensor, for each position along the axes that stay.
struct Walk {
    /// Sizes and strides of the axes that stay.
    kept: Vec<(usize, usize)>,
    /// Sizes and strides of the summed axes.
    summed: Vec<(usize, usize)>,
}

impl Walk {
    /// Keeps the axes in `order`. A repeated subscript walks the diagonal, one of size 1 is
    /// broadcast.
    fn new(sizes: &[(Label, usize)], labels: &[Label], shape: &[usize], order: &[Label]) -> Walk {
        let axis = |label: Label| {
            let (mut stride, mut total) = (1, 0);
            for (&own, &size) in labels.iter().zip(shape).rev() {
                if own == label && size != 1 {
                    total += stride;
                }
                stride *= size;
            }
            (size_of_label(sizes, label), total)
        };
        let mut summed: Vec<Label> = Vec::new();
        for (&label, &size) in labels.iter().zip(shape) {
            let spans = size == size_of_label(sizes, label);
            if spans && !order.contains(&label) && !summed.contains(&label) {
                summed.push(label);
            }
        }
        Walk {
            kept: order.iter().copied().map(axis).collect(),
            summed: summed.into_iter().map(axis).collect(),
        }
    }

    /// Calls `task` for each of `count` positions, starting with the one at `first`: with its
    /// number among these, and its offset.
    fn each(&self, first: usize, count: usize, mut task: impl FnMut(usize, usize)) {
        let mut counters = vec![0; self.kept.len()];
        let (mut rest, mut place) = (first, 0);
        for (counter, (size, stride)) in counters.iter_mut().zip(&self.kept).rev() {
            *counter = rest % size.max(&1);
            rest /= size.max(&1);
            place += *counter * stride;
        }
        for index in 0..count {
            task(index, place);
            step(&mut counters, &self.kept, &mut place);
        }
    }

    fn sum<W: Wide>(&self, threads: usize, at: &(dyn Fn(usize) -> W + Sync), to: &mut [W]) {
        let terms: usize = self.summed.iter().map(|(size, _)| size).product();
        for_each_row_chunk_mut(threads, to, 1, (GRAIN / terms.max(1)).max(1), |first, to| {
            let mut counters = vec![0; self.summed.len()];
            let pace = Pace::default();
            self.each(first, to.len(), |index, place| {
                let (mut sum, mut place) = (W::ZERO, place);
                pace.step(4 * terms.min(PIECE));
                in_blocks(terms, || {
                    sum = sum.add(at(place));
                    step(&mut counters, &self.summed, &mut place);
                });
                to[index] = sum;
            });
        });
    }
}

/// Advances to the next position. After the last one, starts over.
fn step(counters: &mut [usize], axes: &[(usize, usize)], place: &mut usize) {
    for (counter, (size, stride)) in counters.iter_mut().zip(axes).rev() {
        *counter += 1;
        if *counter < *size {
            *place += stride;
            return;
        }
        *counter = 0;
        *place -= stride * (size.max(&1) - 1);
    }
}

/// Multiplies batches of `[batch, rows, k]` and `[batch, k, columns]`, a row at a time.
fn multiply<W: Wide>(threads: usize, [_, rows, columns, k]: [usize; 4], [lhs, rhs]: [&[W]; 2], to: &mut [W]) {
    let grain = (GRAIN / (columns * k).max(1)).max(1);
    for_each_row_chunk_mut(threads, to, columns, grain, |first, piece| {
        for (row, to) in piece.chunks_exact_mut(columns).enumerate() {
            let row = first + row;
            let (batch, factors) = (row / rows.max(1), lhs.get(row * k..(row + 1) * k).unwrap_or(&[]));
            let rhs = rhs.get(batch * k * columns..).unwrap_or(&[]);
            interrupt::fill(to, W::ZERO);
            let steps = (GRAIN / columns).max(1);
            for (factors, rhs) in factors.chunks(steps).zip(rhs.chunks(steps * columns)) {
                spend(rhs.len());
                for (&factor, rhs) in factors.iter().zip(rhs.chunks_exact(columns)) {
                    for (to, rhs) in pieces_mut(to).zip(rhs.chunks(PIECE)) {
                        to.iter_mut().zip(rhs).for_each(|(to, &other)| *to = to.add(factor.mul(other)));
                    }
                }
            }
        }
    });
}
