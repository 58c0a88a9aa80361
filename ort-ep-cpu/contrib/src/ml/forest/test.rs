//! Node tests, each in the normal form of a list of splits.

use ort_core::{Result, error};
use smallvec::{SmallVec, smallvec};

/// How a node compares a feature with its split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ml) enum Comparison {
    LessOrEqual,
    Less,
    GreaterOrEqual,
    Greater,
    Equal,
    NotEqual,
}

impl Comparison {
    /// Parses a mode; `None` for a leaf.
    pub(in crate::ml) fn named(mode: &str) -> Result<Option<Comparison>> {
        Ok(Some(match mode {
            "BRANCH_LEQ" => Comparison::LessOrEqual,
            "BRANCH_LT" => Comparison::Less,
            "BRANCH_GTE" => Comparison::GreaterOrEqual,
            "BRANCH_GT" => Comparison::Greater,
            "BRANCH_EQ" => Comparison::Equal,
            "BRANCH_NEQ" => Comparison::NotEqual,
            "LEAF" => return Ok(None),
            other => return Err(error!(InvalidGraph, "nodes_modes has '{other}', which is not known")),
        }))
    }
}

/// A test whose answer flips at each split. It is `first` up to and including the first split, then
/// the opposite up to and including the second, and so on. All comparisons and set memberships have
/// this form, because `x < split` is `x <= split.next_down()`.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::ml) struct Test {
    pub(super) splits: SmallVec<[f64; 2]>,
    pub(super) first: bool,
    /// The answer for NaN.
    pub(super) missing: bool,
}

impl Test {
    /// Creates the test of a comparison. NaN compares as false, except that it is not equal to
    /// anything; `missing` makes the answer true.
    pub(in crate::ml) fn compare(comparison: Comparison, split: f64, missing: bool) -> Test {
        let mut test = match comparison {
            // No comparison with a NaN split holds.
            _ if split.is_nan() => Test::constant(false),
            // `>` is the opposite of `<=`, and `>=` that of `<`; `opposite` below flips the
            // answers.
            Comparison::LessOrEqual | Comparison::Greater => {
                Test { splits: smallvec![split], first: true, missing: false }
            }
            Comparison::Less | Comparison::GreaterOrEqual => Test::below(split),
            Comparison::Equal | Comparison::NotEqual => Test::member(&[split], false),
        };
        let opposite =
            matches!(comparison, Comparison::GreaterOrEqual | Comparison::Greater) && !split.is_nan();
        test.first ^= opposite || comparison == Comparison::NotEqual;
        // IEEE 754: NaN differs from everything, so `!=` is the only comparison that holds for it.
        test.missing = missing || comparison == Comparison::NotEqual;
        test
    }

    /// Tests whether a feature is one of `members`.
    pub(in crate::ml) fn member(members: &[f64], missing: bool) -> Test {
        let mut members: Vec<f64> = members.iter().copied().filter(|member| !member.is_nan()).collect();
        members.sort_by(f64::total_cmp);
        // Both zeros become one member, negative zero, and `x <= -0.0` holds for both.
        members.dedup();
        let Some(&least) = members.first() else { return Test { missing, ..Test::constant(false) } };
        // Each member is an interval of its own: above the number below it, up to itself.
        // Adjacent floats as members have an empty interval between them, which does no harm.
        let mut splits: SmallVec<[f64; 2]> =
            members.iter().flat_map(|&member| [member.next_down(), member]).collect();
        // No number is below minus infinity.
        let first = least == f64::NEG_INFINITY;
        if first {
            splits.remove(0);
        }
        Test { splits, first, missing }
    }

    fn below(split: f64) -> Test {
        match split == f64::NEG_INFINITY {
            true => Test::constant(false),
            false => Test { splits: smallvec![split.next_down()], first: true, missing: false },
        }
    }

    /// Gives the same answer for all numbers, because none is above infinity.
    fn constant(answer: bool) -> Test {
        Test { splits: smallvec![f64::INFINITY], first: answer, missing: false }
    }

    /// Returns the answer in the interval that ends with the split at `index`.
    pub(super) fn answer(&self, index: usize) -> bool {
        self.first ^ (index % 2 == 1)
    }

    /// Returns the interval whose answer NaN gets: the last one if its answer fits, because NaN
    /// goes right by default.
    pub(super) fn missing_interval(&self) -> usize {
        let last = self.splits.len();
        if self.answer(last) == self.missing { last } else { last.saturating_sub(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: [f64; 10] = [
        f64::NEG_INFINITY,
        f64::MIN,
        -1.5,
        -f64::MIN_POSITIVE,
        -0.0,
        0.0,
        1.0,
        1.0000000000000002,
        f64::MAX,
        f64::INFINITY,
    ];

    /// Evaluates the test on a feature.
    fn ask(test: &Test, x: f64) -> bool {
        match x.is_nan() {
            true => test.answer(test.missing_interval()),
            false => {
                let index = test.splits.iter().position(|split| x <= *split).unwrap_or(test.splits.len());
                test.answer(index)
            }
        }
    }

    #[test]
    fn splits_say_what_comparisons_say() {
        use Comparison::*;
        for split in NUMBERS.into_iter().chain([f64::NAN]) {
            for x in NUMBERS.into_iter().chain([f64::NAN]) {
                for missing in [false, true] {
                    let table = [
                        (LessOrEqual, x <= split),
                        (Less, x < split),
                        (GreaterOrEqual, x >= split),
                        (Greater, x > split),
                        (Equal, x == split),
                        (NotEqual, x != split),
                    ];
                    for (comparison, expected) in table {
                        let expected = expected || (missing && x.is_nan());
                        let test = Test::compare(comparison, split, missing);
                        assert_eq!(ask(&test, x), expected, "{x} {comparison:?} {split}, {missing}");
                    }
                }
            }
        }
    }

    #[test]
    fn splits_say_what_sets_say() {
        let sets: [&[f64]; 5] = [
            &[],
            &[1.0],
            &[1.0, 0.0, 1.0, -1.5],
            &[1.0000000000000002, 1.0, -0.0],
            &[f64::INFINITY, f64::NEG_INFINITY],
        ];
        for set in sets {
            for x in NUMBERS.into_iter().chain([f64::NAN]) {
                for missing in [false, true] {
                    let expected = set.contains(&x) || (missing && x.is_nan());
                    assert_eq!(ask(&Test::member(set, missing), x), expected, "{x} in {set:?}, {missing}");
                }
            }
        }
    }
}
