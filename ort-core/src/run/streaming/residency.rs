//! Constant residency: which constants stay in device memory, and which pass through its window.
//!
//! A constant that does not stay is uploaded for each step that reads it. So the constants with the
//! highest upload cost per byte stay first: those that several steps read, and those so small that
//! the fixed cost of a copy outweighs their bytes. The choice depends only on sizes and readers, so
//! reports and runs make the same choice.

use std::cmp::Reverse;

/// The fixed cost of a copy, in bytes.
const COPY: usize = 64 << 10;

/// The most sizes of a window half that are tried.
const MOST_HALVES: usize = 64;

/// The upload costs of one device's constants.
pub(crate) struct Costs {
    /// The bytes of each constant, rounded up to the granule of the device's allocator.
    sizes: Vec<usize>,
    /// The steps that read each constant, as indices into `sums`.
    readers: Vec<Vec<usize>>,
    /// By step: the bytes of all constants that it reads.
    sums: Vec<usize>,
    /// The constants by upload cost per byte, the highest first.
    order: Vec<usize>,
    /// The sizes of a window half that are tried, the largest first.
    halves: Vec<usize>,
}

/// Which constants stay, and the window for the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResidencyChoice {
    /// By constant: whether it stays.
    pub(crate) keep: Vec<bool>,
    /// The bytes of those that stay.
    pub(crate) kept: usize,
    /// The bytes of a window half: the most bytes of constants that do not stay and that one step
    /// reads.
    pub(crate) half: usize,
    /// The number of halves: two, or one if a single step reads such constants, or zero if no step
    /// does.
    pub(crate) halves: usize,
    /// The bytes that each run uploads.
    pub(crate) streamed: usize,
}

impl ResidencyChoice {
    /// The bytes of the window.
    pub(crate) fn window(&self) -> usize {
        self.half.saturating_mul(self.halves)
    }

    /// All bytes of constants on the device.
    pub(crate) fn total(&self) -> usize {
        self.kept.saturating_add(self.window())
    }
}

/// A choice in progress.
struct Trial<'a> {
    costs: &'a Costs,
    chosen: ResidencyChoice,
    /// By step: the bytes of constants that do not stay and that the step reads.
    left: Vec<usize>,
}

impl Costs {
    /// The costs of constants with these sizes and readers, over `steps` steps.
    pub(crate) fn new(sizes: Vec<usize>, readers: Vec<Vec<usize>>, steps: usize) -> Costs {
        let mut sums = vec![0usize; steps];
        for (size, readers) in sizes.iter().zip(&readers) {
            for step in readers {
                sums.get_mut(*step).into_iter().for_each(|sum| *sum = sum.saturating_add(*size));
            }
        }
        // Candidates: all constants that a step reads, one constant alone, or no window.
        let mut halves: Vec<usize> = sums.iter().chain(&sizes).copied().chain([0]).collect();
        halves.sort_unstable_by_key(|bytes| Reverse(*bytes));
        halves.dedup();
        if halves.len() > MOST_HALVES {
            // There are too many, so try an even spread that includes the largest and the smallest.
            let last = halves.len() - 1;
            let spread = (0..MOST_HALVES).map(|index| index * last / (MOST_HALVES - 1));
            halves = spread.filter_map(|index| halves.get(index).copied()).collect();
        }
        let mut costs = Costs { sizes, readers, sums, order: Vec::new(), halves };
        let mut order: Vec<usize> = (0..costs.sizes.len()).collect();
        order.sort_by(|one, other| {
            // Compares the costs per byte by cross-multiplication.
            let weight = |a: usize, b: usize| costs.cost(a) as u128 * costs.size(b) as u128;
            weight(*other, *one).cmp(&weight(*one, *other)).then(one.cmp(other))
        });
        costs.order = order;
        costs
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// The bytes of all constants.
    pub(crate) fn total(&self) -> usize {
        self.sizes.iter().fold(0, |sum, size| sum.saturating_add(*size))
    }

    /// The fewest bytes of resident constants plus window over all candidate window sizes.
    pub(crate) fn least(&self) -> usize {
        let trials = self.halves.iter().map(|half| Trial::new(self, *half).chosen.total());
        trials.min().unwrap_or(0)
    }

    /// Returns the cheapest choice whose resident constants and window take at most `free` bytes.
    /// If `free` is less than [`least`](Self::least), returns the choice that takes the fewest
    /// bytes.
    pub(crate) fn choose(&self, free: usize) -> ResidencyChoice {
        let mut best: Option<(u128, ResidencyChoice)> = None;
        let mut smallest: Option<ResidencyChoice> = None;
        // With a smaller window more constants must stay, so each window size is evaluated
        // completely.
        for half in &self.halves {
            let mut trial = Trial::new(self, *half);
            if smallest.as_ref().is_none_or(|least| trial.chosen.total() < least.total()) {
                smallest = Some(trial.chosen.clone());
            }
            if trial.chosen.total() > free {
                continue;
            }
            trial.keep_within(free);
            let cost = trial.cost();
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, trial.chosen));
            }
        }
        best.map(|(_, chosen)| chosen).or(smallest).unwrap_or_default()
    }

    fn size(&self, constant: usize) -> usize {
        self.sizes.get(constant).copied().unwrap_or(0)
    }

    fn readers_of(&self, constant: usize) -> &[usize] {
        self.readers.get(constant).map_or(&[], Vec::as_slice)
    }

    /// The upload cost per run of a constant that does not stay.
    fn cost(&self, constant: usize) -> usize {
        self.size(constant).saturating_add(COPY).saturating_mul(self.readers_of(constant).len())
    }
}

impl<'a> Trial<'a> {
    /// Keeps constants, the costliest first, until no step reads more than `half` bytes of the
    /// others.
    fn new(costs: &'a Costs, half: usize) -> Trial<'a> {
        let chosen = ResidencyChoice { keep: vec![false; costs.sizes.len()], ..ResidencyChoice::default() };
        let mut trial = Trial { costs, chosen, left: costs.sums.clone() };
        for constant in &costs.order {
            let readers = costs.readers_of(*constant);
            if readers.iter().any(|step| trial.left.get(*step).is_some_and(|left| *left > half)) {
                trial.keep(*constant);
            }
        }
        trial.measure();
        trial
    }

    /// Keeps as many further constants as fit beside the window.
    fn keep_within(&mut self, free: usize) {
        let mut room = free.saturating_sub(self.chosen.total());
        for constant in &self.costs.order {
            let size = self.costs.size(*constant);
            if size <= room && self.chosen.keep.get(*constant) == Some(&false) {
                room -= size;
                self.keep(*constant);
            }
        }
        self.measure();
    }

    /// Marks a constant as resident.
    fn keep(&mut self, constant: usize) {
        let size = self.costs.size(constant);
        self.chosen.keep.get_mut(constant).into_iter().for_each(|keep| *keep = true);
        self.chosen.kept = self.chosen.kept.saturating_add(size);
        for step in self.costs.readers_of(constant) {
            self.left.get_mut(*step).into_iter().for_each(|left| *left = left.saturating_sub(size));
        }
    }

    /// Computes the window for the constants that do not stay.
    fn measure(&mut self) {
        self.chosen.half = self.left.iter().copied().max().unwrap_or(0);
        self.chosen.halves = self.left.iter().filter(|left| **left > 0).count().min(2);
        self.chosen.streamed = self.left.iter().fold(0, |sum, left| sum.saturating_add(*left));
    }

    /// The upload cost of a run.
    fn cost(&self) -> u128 {
        let left = self.chosen.keep.iter().enumerate().filter(|(_, keep)| !**keep);
        left.map(|(constant, _)| self.costs.cost(constant) as u128).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KIB: usize = 1 << 10;

    fn costs(constants: &[(usize, &[usize])]) -> Costs {
        let steps = constants.iter().flat_map(|(_, readers)| readers.iter()).max().map_or(0, |step| step + 1);
        let sizes = constants.iter().map(|(size, _)| *size).collect();
        Costs::new(sizes, constants.iter().map(|(_, readers)| readers.to_vec()).collect(), steps)
    }

    /// Which constants stay, and the bytes of a window half, for some amounts of memory.
    #[test]
    fn what_costs_most_to_upload_stays_first() {
        let many: &[usize] = &[0, 1, 2];
        // constants with their readers; free bytes; what stays; bytes of a window half
        let cases: [(&[(usize, &[usize])], usize, &[bool], usize); 6] = [
            // Two of equal size: the window alone is as large as both.
            (&[(100 * KIB, &[0]), (100 * KIB, &[1])], 200 * KIB, &[true, true], 0),
            (
                &[(100 * KIB, &[0]), (100 * KIB, &[1]), (100 * KIB, &[2])],
                299 * KIB,
                &[false, false, false],
                100 * KIB,
            ),
            // A constant that several steps read comes before one that a single step reads.
            (
                &[(90 * KIB, &[0]), (90 * KIB, &[1]), (90 * KIB, &[2]), (90 * KIB, many)],
                270 * KIB,
                &[false, false, false, true],
                90 * KIB,
            ),
            // Small ones come before large ones.
            (
                &[(8000 * KIB, &[0]), (8000 * KIB, &[1]), (8000 * KIB, &[2]), (KIB, &[3])],
                16_001 * KIB,
                &[false, false, false, true],
                8000 * KIB,
            ),
            // A single large one stays, because the window would be as large as two of it.
            (
                &[(1000 * KIB, &[0]), (300 * KIB, &[1]), (300 * KIB, &[2]), (300 * KIB, &[3])],
                1600 * KIB,
                &[true, false, false, false],
                300 * KIB,
            ),
            // The caller refuses less than the least.
            (&[(5 * KIB, &[0])], 0, &[false], 5 * KIB),
        ];
        for (constants, free, keep, half) in cases {
            let chosen = costs(constants).choose(free);
            assert_eq!((chosen.keep.as_slice(), chosen.half), (keep, half), "{constants:?} in {free}");
        }
    }

    fn constants() -> impl Strategy<Value = Vec<(usize, Vec<usize>)>> {
        let readers = prop::collection::btree_set(0usize..12, 1..4);
        let constant = (1usize..4000, readers)
            .prop_map(|(units, readers)| (units * 256, readers.into_iter().collect::<Vec<usize>>()));
        prop::collection::vec(constant, 1..30)
    }

    proptest! {
        /// If the least fits, the choice fits. If all constants fit, all stay. The window holds
        /// what each step reads.
        #[test]
        fn what_stays_and_the_window_fit(constants in constants(), part in 0usize..1100) {
            let (sizes, readers): (Vec<usize>, Vec<Vec<usize>>) = constants.iter().cloned().unzip();
            let costs = Costs::new(sizes.clone(), readers.clone(), 12);
            let (least, total) = (costs.least(), costs.total());
            prop_assert!(least <= total);
            let free = total / 1000 * part;
            let chosen = costs.choose(free);
            prop_assert_eq!(&chosen, &costs.choose(free));
            prop_assert!(chosen.total() <= free.max(least), "{} in {} of at least {}", chosen.total(), free, least);
            prop_assert_eq!(free >= total, chosen.keep.iter().all(|keep| *keep) && chosen.total() <= free);
            let at_least = costs.choose(least);
            prop_assert!(at_least.total() <= least);
            let left = |step: usize| -> usize {
                let read = sizes.iter().zip(&readers).zip(&chosen.keep);
                read.filter(|((_, readers), keep)| !**keep && readers.contains(&step)).map(|((size, _), _)| size).sum()
            };
            let uploads: Vec<usize> = (0..12).map(left).filter(|bytes| *bytes > 0).collect();
            prop_assert_eq!(uploads.iter().max().copied().unwrap_or(0), chosen.half);
            prop_assert_eq!(uploads.len().min(2), chosen.halves);
            prop_assert_eq!(uploads.iter().sum::<usize>(), chosen.streamed);
            let kept = sizes.iter().zip(&chosen.keep).filter(|(_, keep)| **keep).map(|(size, _)| size).sum::<usize>();
            prop_assert_eq!(kept, chosen.kept);
        }
    }
}
