//! Liveness simulation: the bytes alive at each step if some blocks are recomputed.
//!
//! A search tries thousands of choices, and each trial visits all steps. So the steps are stored in
//! flat arrays, and trials reuse one set of tables.

#![allow(
    clippy::indexing_slicing,
    reason = "blocks and steps are numbered by the session, and each table has an entry for each"
)]

use std::cell::RefCell;

use ort_core::plan::LiveStep;

/// The simulated cost of a choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// The peak: the most bytes alive at any step.
    pub(crate) peak: u64,
    /// The bytes alive above the target, summed over all steps.
    pub(crate) excess: f64,
    /// The estimated time of recomputation.
    pub(crate) seconds: f64,
}

/// The steps of a training graph in CSR form.
pub(super) struct Simulation {
    steps: Vec<Step>,
    /// The blocks that steps read, in step order.
    reads: Vec<u32>,
    /// The blocks that steps allocate, in step order.
    makes: Vec<Made>,
    /// The blocks that an allocated block may reuse in place.
    sources: Vec<u32>,
    /// The step that produces each block.
    makers: Vec<Option<u32>>,
    tables: RefCell<Tables>,
}

/// A range of one of the arrays.
#[derive(Clone, Copy)]
struct Span {
    begin: u32,
    end: u32,
}

impl Span {
    fn of<T>(self, items: &[T]) -> &[T] {
        &items[self.begin as usize..self.end as usize]
    }
}

/// Appends items and returns their range.
fn push<T>(items: &mut Vec<T>, more: impl Iterator<Item = T>) -> Span {
    let begin = items.len() as u32;
    items.extend(more);
    Span { begin, end: items.len() as u32 }
}

/// A step of the graph.
struct Step {
    reads: Span,
    makes: Span,
    scratch: u64,
    seconds: f64,
    is_forward: bool,
}

/// A block that a step allocates.
struct Made {
    block: u32,
    bytes: u64,
    sources: Span,
}

/// The scratch tables of a trial.
#[derive(Default)]
struct Tables {
    /// The steps of the edited graph in order, each with whether it is a clone.
    order: Vec<(u32, bool)>,
    /// Whether each step has been cloned.
    cloned: Vec<bool>,
    /// The stack of the depth-first search over clones.
    stack: Vec<(u32, bool)>,
    /// The remaining reads of each block, then of the clone of each block.
    pending: Vec<u32>,
    /// The bytes that each block and each clone holds.
    held: Vec<u64>,
}

/// The table index under which a step reads a block. It is that of the clone if the block is
/// dropped and the step reads clones. Clones follow all blocks.
fn place(dropped: &[bool], reads_clones: bool, block: u32) -> usize {
    let block = block as usize;
    if reads_clones && dropped[block] { block + dropped.len() } else { block }
}

/// The memory that is alive during a trial.
struct Memory<'t> {
    pending: &'t mut [u32],
    held: &'t mut [u64],
    live: u64,
}

impl Memory<'_> {
    /// Allocates a block. If anything reads it, it reuses the first of its sources that is dead.
    fn make(&mut self, to: usize, bytes: u64, mut sources: impl Iterator<Item = usize>) {
        // A source with bytes and without readers dies in this step.
        let dead = sources.find(|block| self.pending[*block] == 0 && self.held[*block] > 0);
        match dead.filter(|_| self.pending[to] > 0) {
            Some(from) => self.held[to] = std::mem::take(&mut self.held[from]),
            None => {
                self.held[to] = bytes;
                self.live += bytes;
            }
        }
    }

    /// Frees the blocks without remaining reads.
    fn release(&mut self, blocks: impl Iterator<Item = usize>) {
        for block in blocks {
            if self.pending[block] == 0 {
                self.live -= std::mem::take(&mut self.held[block]);
            }
        }
    }
}

impl Simulation {
    /// Flattens the steps. `is_forward` and `seconds` are per step, `makers` has the step that
    /// produces each block.
    pub(super) fn new(
        live: &[LiveStep],
        is_forward: &[bool],
        seconds: &[f64],
        makers: &[Option<usize>],
    ) -> Simulation {
        let (mut reads, mut makes, mut sources) = (Vec::new(), Vec::new(), Vec::new());
        let mut steps = Vec::with_capacity(live.len());
        for ((step, &is_forward), &seconds) in live.iter().zip(is_forward).zip(seconds) {
            let made = step.makes.iter().map(|made| Made {
                block: made.block as u32,
                bytes: made.bytes,
                sources: push(&mut sources, made.from.iter().map(|block| *block as u32)),
            });
            let makes = push(&mut makes, made);
            let reads = push(&mut reads, step.reads.iter().map(|block| *block as u32));
            steps.push(Step { reads, makes, scratch: step.scratch, seconds, is_forward });
        }
        let makers = makers.iter().map(|maker| maker.map(|step| step as u32)).collect();
        Simulation { steps, reads, makes, sources, makers, tables: RefCell::default() }
    }

    /// Simulates a training step with some blocks dropped after the forward pass.
    pub(super) fn outcome(&self, dropped: &[bool], target: u64) -> Outcome {
        let mut tables = self.tables.borrow_mut();
        self.schedule(dropped, &mut tables);
        self.count_reads(dropped, &mut tables);
        let Tables { order, pending, held, .. } = &mut *tables;
        let mut memory = Memory { pending, held, live: 0 };
        let mut outcome = Outcome { peak: 0, excess: 0.0, seconds: 0.0 };
        for &(index, is_clone) in order.iter() {
            let step = &self.steps[index as usize];
            let reads_clones = is_clone || !step.is_forward;
            let read_at = |block: &u32| place(dropped, reads_clones, *block);
            let made_at = |made: &Made| made.block as usize + if is_clone { dropped.len() } else { 0 };
            let (reads, makes) = (step.reads.of(&self.reads), step.makes.of(&self.makes));
            // `count_reads` counted each read of this order, so nothing wraps.
            reads.iter().for_each(|block| memory.pending[read_at(block)] -= 1);
            for made in makes {
                let to = made_at(made);
                // Outputs of a clone that nothing reads take no memory.
                if !is_clone || memory.pending[to] > 0 {
                    memory.make(to, made.bytes, made.sources.of(&self.sources).iter().map(read_at));
                }
            }
            let alive = memory.live + step.scratch;
            outcome.peak = outcome.peak.max(alive);
            outcome.excess += alive.saturating_sub(target) as f64;
            outcome.seconds += if is_clone { step.seconds } else { 0.0 };
            // Freed only after the peak was taken: a step's inputs and outputs are live together.
            memory.release(reads.iter().map(read_at).chain(makes.iter().map(made_at)));
        }
        outcome
    }

    /// Writes the order of the edited graph: the forward steps, then each backward step after the
    /// clones that it needs. The search is iterative, because chains of clones may be as long as
    /// the model.
    fn schedule(&self, dropped: &[bool], tables: &mut Tables) {
        let Tables { order, cloned, stack, .. } = tables;
        order.clear();
        cloned.clear();
        cloned.resize(self.steps.len(), false);
        for (index, step) in self.steps.iter().enumerate() {
            if !step.is_forward {
                stack.extend(self.dropped_makers(step, dropped).map(|maker| (maker, false)));
                while let Some((maker, ready)) = stack.pop() {
                    if ready {
                        order.push((maker, true));
                    } else if !std::mem::replace(&mut cloned[maker as usize], true) {
                        // The step comes back as ready once all steps that it reads from are in the
                        // order.
                        stack.push((maker, true));
                        let makers = self.dropped_makers(&self.steps[maker as usize], dropped);
                        stack.extend(makers.filter(|maker| !cloned[*maker as usize]).map(|it| (it, false)));
                    }
                }
            }
            order.push((index as u32, false));
        }
    }

    /// The producers of the dropped blocks that a step reads, last read first, because a stack
    /// reverses them.
    fn dropped_makers<'s>(&'s self, step: &'s Step, dropped: &'s [bool]) -> impl Iterator<Item = u32> + 's {
        let blocks = step.reads.of(&self.reads).iter().rev();
        let blocks = blocks.map(|block| *block as usize).filter(move |block| dropped[*block]);
        blocks.filter_map(move |block| self.makers[block])
    }

    /// Counts the reads of each block and clone, and resets what the previous trial held.
    fn count_reads(&self, dropped: &[bool], tables: &mut Tables) {
        let Tables { order, pending, held, .. } = tables;
        pending.clear();
        pending.resize(2 * dropped.len(), 0);
        held.clear();
        held.resize(2 * dropped.len(), 0);
        for &(index, is_clone) in order.iter() {
            let step = &self.steps[index as usize];
            for block in step.reads.of(&self.reads) {
                pending[place(dropped, is_clone || !step.is_forward, *block)] += 1;
            }
        }
    }
}
