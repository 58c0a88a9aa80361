//! The dependency DAG of the steps.

use rustc_hash::FxHashMap;

use crate::program::Program;

/// Lists of numbers in compressed sparse row form: all items in one vector, and where each list
/// starts.
pub(super) struct Csr {
    starts: Vec<usize>,
    items: Vec<usize>,
}

impl Csr {
    /// Returns the list at `index`; empty if there is none.
    pub(super) fn of(&self, index: usize) -> &[usize] {
        let range = self.starts.get(index).zip(self.starts.get(index + 1));
        range.and_then(|(start, end)| self.items.get(*start..*end)).unwrap_or(&[])
    }

    pub(super) fn collect<I: IntoIterator<Item = usize>>(lists: impl Iterator<Item = I>) -> Csr {
        let mut result = Csr { starts: vec![0], items: Vec::new() };
        for list in lists {
            result.items.extend(list);
            result.starts.push(result.items.len());
        }
        result
    }

    /// Returns the transpose: for each of `count` numbers, the lists that hold it, ascending.
    pub(super) fn inverted(&self, count: usize) -> Csr {
        // A counting sort: count each number, sum the counts up to starts, then fill in the lists.
        let mut starts = vec![0; count + 1];
        for &item in &self.items {
            starts.get_mut(item + 1).into_iter().for_each(|next| *next += 1);
        }
        let mut sum = 0;
        for start in &mut starts {
            sum += *start;
            *start = sum;
        }
        let mut next = starts.clone();
        let mut items = vec![0; self.items.len()];
        for list in 0..self.starts.len() - 1 {
            for &item in self.of(list) {
                let Some(place) = next.get_mut(item) else { continue };
                items.get_mut(*place).into_iter().for_each(|slot| *slot = list);
                *place += 1;
            }
        }
        Csr { starts, items }
    }
}

/// The dependency DAG of a program. A step is numbered by its index in the program.
pub(super) struct DependencyGraph {
    /// For each step, the steps that it waits for: those whose results it reads, and those that
    /// read a value that it overwrites. Each step once, in ascending order.
    pub(super) before: Csr,
    /// For each step, the steps that wait for it, each once, in ascending order.
    pub(super) after: Csr,
    count: usize,
}

impl DependencyGraph {
    pub(super) fn new(program: &Program) -> DependencyGraph {
        let mut producers = vec![None; program.slots.len()];
        for (index, step) in program.steps.iter().enumerate() {
            for slot in step.outputs.iter().flatten() {
                producers.get_mut(slot.index()).into_iter().for_each(|producer| *producer = Some(index));
            }
        }
        // In-place updates add write-after-read edges: the writer waits for all other readers of
        // the old value.
        let mut updates: FxHashMap<usize, Vec<usize>> = FxHashMap::default();
        for (writer, readers) in program.readers_before_updates() {
            updates.entry(writer).or_default().extend(readers);
        }
        let before = program.steps.iter().enumerate().map(|(index, step)| {
            let producers = step.reads().filter_map(|slot| producers.get(slot.index()).copied().flatten());
            let waits = updates.get(&index).into_iter().flatten().copied();
            let mut needed: Vec<usize> = producers.chain(waits).collect();
            needed.sort_unstable();
            needed.dedup();
            needed
        });
        let count = program.steps.len();
        let before = Csr::collect(before);
        let after = before.inverted(count);
        DependencyGraph { before, after, count }
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Whether each step depends on the one before it, so that there is only one topological order.
    pub(super) fn has_one_order(&self) -> bool {
        (1..self.count).all(|index| self.before.of(index).last() == Some(&(index - 1)))
    }
}
