//! Multiple-choice knapsack: the assignments of precisions that no other beats in bytes and error.
//!
//! Dynamic programming over the groups keeps the partial assignments that are not dominated, so one
//! sweep answers every budget and every bound. The front is exact while it has fewer points than
//! the memory allows. Beyond that, ranges of bytes keep the point of least error each.

/// What a choice of a group costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// The bytes that it takes.
    pub bytes: u64,
    /// The error that it adds. Errors of groups add up.
    pub error: f64,
}

/// The assignments that no other beats, from the fewest bytes to the least error.
#[derive(Clone, Debug)]
pub struct Front {
    /// For each group, the partial assignments after it.
    steps: Vec<Vec<Partial>>,
    points: Vec<Cost>,
}

/// The last choice of a partial assignment.
#[derive(Clone, Copy, Debug)]
struct Partial {
    /// The assignment of the groups before, in the previous step.
    before: u32,
    choice: u32,
}

/// The partial assignments that are kept in all, of 8 bytes each.
const MOST_PARTIALS: usize = 1 << 22;
/// Those after one group: bytes that differ by less than a 16,384th of the range are one.
const MOST_AFTER_GROUP: usize = 1 << 14;

impl Front {
    /// Finds the front of groups, of which each has one choice or more.
    pub fn of(groups: &[Vec<Cost>]) -> Front {
        let most = (MOST_PARTIALS / groups.len().max(1)).clamp(64, MOST_AFTER_GROUP);
        Front::with_at_most(groups, most)
    }

    fn with_at_most(groups: &[Vec<Cost>], most: usize) -> Front {
        let mut points = vec![Cost { bytes: 0, error: 0.0 }];
        let mut steps = Vec::with_capacity(groups.len());
        for group in groups {
            let mut reached = Vec::with_capacity(points.len() * group.len());
            for (before, point) in points.iter().enumerate() {
                for (choice, cost) in group.iter().enumerate() {
                    let sum = Cost { bytes: point.bytes + cost.bytes, error: point.error + cost.error };
                    reached.push((sum, Partial { before: before as u32, choice: choice as u32 }));
                }
            }
            // The order of the choices decides ties, because the sort is stable.
            reached.sort_by(|(one, _), (other, _)| {
                one.bytes.cmp(&other.bytes).then(one.error.total_cmp(&other.error))
            });
            let mut least = f64::INFINITY;
            reached.retain(|(cost, _)| {
                let is_better = cost.error < least;
                least = least.min(cost.error);
                is_better
            });
            let kept = thinned(reached, most);
            points = kept.iter().map(|(cost, _)| *cost).collect();
            steps.push(kept.into_iter().map(|(_, partial)| partial).collect());
        }
        Front { steps, points }
    }

    /// The costs of the assignments: bytes rise, errors fall. There is one at least.
    pub fn points(&self) -> &[Cost] {
        &self.points
    }

    /// The assignment of least error that takes at most this many bytes.
    pub fn within(&self, bytes: u64) -> Option<usize> {
        self.points.partition_point(|point| point.bytes <= bytes).checked_sub(1)
    }

    /// The assignment of fewest bytes whose error is at most this.
    pub fn below(&self, error: f64) -> Option<usize> {
        let index = self.points.partition_point(|point| point.error > error);
        (index < self.points.len()).then_some(index)
    }

    /// The choice of each group in an assignment.
    pub fn choices(&self, point: usize) -> Vec<usize> {
        let mut at = point;
        let mut choices = Vec::with_capacity(self.steps.len());
        for step in self.steps.iter().rev() {
            let Some(partial) = step.get(at) else { break };
            choices.push(partial.choice as usize);
            at = partial.before as usize;
        }
        choices.reverse();
        choices
    }
}

/// At most about this many points, of equal ranges of bytes the one of least error. The first, of
/// fewest bytes, stays.
fn thinned(reached: Vec<(Cost, Partial)>, most: usize) -> Vec<(Cost, Partial)> {
    let (Some((first, _)), Some((last, _))) = (reached.first(), reached.last()) else { return reached };
    if reached.len() <= most {
        return reached;
    }
    let (start, width) = (first.bytes, (last.bytes - first.bytes).div_ceil(most as u64).max(1));
    let mut kept: Vec<(Cost, Partial)> = Vec::with_capacity(most + 1);
    for (index, point) in reached.into_iter().enumerate() {
        let range = |bytes: u64| (bytes - start) / width;
        match kept.last_mut() {
            // The first point has a range of its own.
            Some(last) if index > 1 && range(last.0.bytes) == range(point.0.bytes) => *last = point,
            _ => kept.push(point),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random numbers from 0 to 1.
    fn unit(step: u32) -> f64 {
        let mut hash = step.wrapping_mul(0x9e37_79b1);
        hash = (hash ^ hash >> 15).wrapping_mul(0x85eb_ca77);
        f64::from((hash ^ hash >> 13) >> 8) / 16_777_216.0
    }

    /// Groups whose choices have rising bytes and falling errors, as precisions have.
    fn groups(count: u32, seed: u32) -> Vec<Vec<Cost>> {
        let group = |group: u32| {
            let number = |part: u32| unit(seed * 1000 + group * 10 + part);
            let (size, scale) = (1 + (number(0) * 50.0) as u64, number(1));
            let choice = |level: u32| Cost {
                bytes: size * (u64::from(level) * 2 + 1),
                error: scale * number(2 + level) / f64::from(1 << (4 * level)),
            };
            (0..4).map(choice).collect()
        };
        (0..count).map(group).collect()
    }

    /// All assignments by counting.
    fn all(groups: &[Vec<Cost>]) -> Vec<Cost> {
        let mut sums = vec![Cost { bytes: 0, error: 0.0 }];
        for group in groups {
            let add = |sum: &Cost| {
                let sum = *sum;
                group
                    .iter()
                    .map(move |cost| Cost { bytes: sum.bytes + cost.bytes, error: sum.error + cost.error })
            };
            sums = sums.iter().flat_map(add).collect();
        }
        sums
    }

    fn sum(groups: &[Vec<Cost>], choices: &[usize]) -> Cost {
        let chosen = groups.iter().zip(choices).map(|(group, choice)| group[*choice]);
        chosen.fold(Cost { bytes: 0, error: 0.0 }, |sum, cost| Cost {
            bytes: sum.bytes + cost.bytes,
            error: sum.error + cost.error,
        })
    }

    #[test]
    fn the_front_has_the_best_of_all_assignments() {
        for seed in 0..40 {
            let groups = groups(1 + seed % 6, seed);
            let (front, all) = (Front::of(&groups), all(&groups));
            let most: u64 = all.iter().map(|cost| cost.bytes).max().unwrap_or_default();
            for budget in 0..=most {
                let fitting = all.iter().filter(|cost| cost.bytes <= budget);
                let expected = fitting.map(|cost| cost.error).min_by(f64::total_cmp);
                let found = front.within(budget);
                assert_eq!(found.map(|point| front.points()[point].error), expected, "{seed}, {budget}");
                let Some(point) = found else { continue };
                let choices = front.choices(point);
                assert_eq!(choices.len(), groups.len());
                assert_eq!(sum(&groups, &choices), front.points()[point], "{seed}, {budget}");
            }
            for bound in all.iter().map(|cost| cost.error) {
                let expected = all.iter().filter(|cost| cost.error <= bound).map(|cost| cost.bytes).min();
                let found = front.below(bound).map(|point| front.points()[point].bytes);
                assert_eq!(found, expected, "{seed}, {bound}");
            }
            let least = front.points().iter().map(|point| point.error).fold(f64::INFINITY, f64::min);
            assert_eq!(front.below(least / 2.0 - f64::MIN_POSITIVE), None);
        }
    }

    /// Each group loses at most the width of a range of bytes.
    #[test]
    fn a_thinned_front_is_close_to_the_exact_one() {
        let groups = groups(24, 7);
        let exact = Front::of(&groups);
        let (first, last) = (exact.points()[0].bytes, exact.points()[exact.points().len() - 1].bytes);
        for most in [50, 200, 800] {
            let thin = Front::with_at_most(&groups, most);
            assert!(thin.points().len() <= most + 2 && thin.points().len() < exact.points().len());
            assert_eq!(thin.points()[0], exact.points()[0]);
            let lost = (last - first).div_ceil(most as u64) * groups.len() as u64;
            for point in exact.points() {
                let found = thin.within(point.bytes + lost).map(|found| thin.points()[found].error);
                assert!(found.is_some_and(|error| error <= point.error), "{most} {point:?}: {found:?}");
            }
            for (point, cost) in thin.points().iter().enumerate() {
                assert_eq!(sum(&groups, &thin.choices(point)), *cost);
            }
        }
    }

    #[test]
    fn no_groups_take_no_bytes() {
        let front = Front::of(&[]);
        assert_eq!((front.within(0), front.below(0.0)), (Some(0), Some(0)));
        assert!(front.choices(0).is_empty());
    }
}
