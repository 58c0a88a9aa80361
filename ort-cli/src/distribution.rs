//! Statistical checks of random outputs.
//!
//! The outputs of operators like `Bernoulli` have no fixed values to compare with. `ort test`
//! checks their type, shape and distribution instead.

use anyhow::{Result, bail};
use ort_runtime::Tensor;

/// The number of runs for an output without a seed.
const DRAWS: usize = 400;
/// The tolerance in standard deviations, for [`DRAWS`] runs per element and for the single draw of
/// a seeded model.
const MANY: f64 = 5.0;
const SINGLE: f64 = 3.0;

/// The Bernoulli check of a test case, as its file `check` describes it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Bernoulli {
    /// Whether the model sets a seed, so that every run draws the same values.
    seeded: bool,
    /// Whether ones have probability 1 - p instead of p.
    complement: bool,
}

impl Bernoulli {
    /// Parses `bernoulli [seeded] [complement]`.
    pub(crate) fn parse(text: &str) -> Result<Bernoulli> {
        let mut words = text.split_whitespace();
        if words.next() != Some("bernoulli") {
            bail!("{text:?}, expected `bernoulli [seeded] [complement]`");
        }
        let mut check = Bernoulli::default();
        for word in words {
            match word {
                "seeded" => check.seeded = true,
                "complement" => check.complement = true,
                _ => bail!("`{word}` is not known, expected `seeded` or `complement`"),
            }
        }
        Ok(check)
    }

    /// Returns the number of runs that the check needs. A seeded model runs twice, because the runs
    /// must agree.
    pub(crate) fn runs(self) -> usize {
        if self.seeded { 2 } else { DRAWS }
    }

    /// Returns why the outputs of the runs do not match the probabilities in `input`, or `None` if
    /// they do.
    pub(crate) fn problem(
        self,
        input: &Tensor,
        runs: &[Tensor],
        expected: &Tensor,
    ) -> Result<Option<String>> {
        // Type and shape are fixed even for random outputs.
        for run in runs {
            if (run.dtype(), run.shape()) != (expected.dtype(), expected.shape()) {
                let (dtype, shape) = (run.dtype().name(), run.shape());
                let (wanted, of) = (expected.dtype().name(), expected.shape());
                return Ok(Some(format!("{dtype}{shape:?}, expected {wanted}{of:?}")));
            }
        }
        let draws = runs.iter().map(Tensor::to_doubles).collect::<Result<Vec<_>, _>>()?;
        Ok(self.judge(&input.to_doubles()?, &draws))
    }

    fn judge(self, probabilities: &[f64], draws: &[Vec<f64>]) -> Option<String> {
        let chance = |p: &f64| if self.complement { 1.0 - p } else { *p };
        let chances: Vec<f64> = probabilities.iter().map(chance).collect();
        // This also rejects NaN, which is unequal to both.
        if let Some(value) = draws.iter().flatten().find(|&&value| value != 0.0 && value != 1.0) {
            return Some(format!("a draw is {value}, expected 0 or 1"));
        }
        if draws.iter().any(|draw| draw.len() != chances.len()) {
            return Some(format!("the output does not have the input's {} elements", chances.len()));
        }
        if self.seeded {
            let first = draws.first()?;
            if draws.iter().any(|draw| draw != first) {
                return Some("two runs with the same seed differ".to_string());
            }
            // The variance of a sum of independent draws is the sum of their variances, p(1 - p)
            // each.
            let variance = chances.iter().map(|p| p * (1.0 - p)).sum();
            // A seeded model has one sample per element, too few to test each. Test the number of
            // ones instead.
            return misses("the draw", first.iter().sum(), chances.iter().sum(), variance, SINGLE);
        }
        let count = draws.len() as f64;
        // The ones of an element in n draws are binomial, with mean np and variance np(1 - p).
        chances.iter().enumerate().find_map(|(place, p)| {
            let ones = draws.iter().filter_map(|draw| draw.get(place)).sum();
            let of = format!("element {place} of {count} draws");
            misses(&of, ones, count * p, count * p * (1.0 - p), MANY)
        })
    }
}

/// Returns a message if a count of ones is off its mean by more than this many standard deviations.
fn misses(of: &str, ones: f64, mean: f64, variance: f64, deviations: f64) -> Option<String> {
    // A p outside of 0 to 1 has a negative variance, and a bound of NaN would accept any count.
    let bound = deviations * variance.max(0.0).sqrt();
    ((ones - mean).abs() > bound).then(|| format!("{of}: {ones} ones, expected {mean:.1} within {bound:.1}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `count` draws of two elements, where `ones` counts the ones of each.
    fn draws(count: usize, ones: [usize; 2]) -> Vec<Vec<f64>> {
        (0..count).map(|run| ones.iter().map(|&n| f64::from(u8::from(run < n))).collect()).collect()
    }

    #[test]
    fn draws_must_fit_their_probabilities() {
        let free = Bernoulli::default();
        let complement = Bernoulli { complement: true, ..free };
        // 5 standard deviations of 400 draws are 43.3 at p = 1/4, and 50 at p = 1/2.
        let table = [
            (free, [100, 200], true),
            (free, [143, 250], true),
            (free, [144, 200], false),
            (free, [100, 251], false),
            (free, [300, 200], false),
            (free, [400, 0], false),
            (complement, [300, 200], true),
            (complement, [100, 200], false),
        ];
        for (check, ones, right) in table {
            let problem = check.judge(&[0.25, 0.5], &draws(400, ones));
            assert_eq!(problem.is_none(), right, "{check:?} {ones:?} {problem:?}");
        }
        assert!(free.judge(&[0.5], &[vec![0.5]]).is_some(), "neither 0 nor 1");
        assert!(free.judge(&[0.0], &draws(400, [1, 0])).is_some(), "the impossible");
    }

    #[test]
    fn a_seed_gives_the_same_draw_in_every_run() {
        let seeded = Bernoulli { seeded: true, ..Bernoulli::default() };
        let chances = [0.9; 10];
        let likely = vec![1.0; 10];
        let unlikely = vec![0.0; 10];
        assert_eq!(seeded.judge(&chances, &[likely.clone(), likely.clone()]), None);
        assert!(seeded.judge(&chances, &[likely, unlikely.clone()]).is_some());
        assert!(seeded.judge(&chances, &[unlikely.clone(), unlikely]).is_some());
    }

    #[test]
    fn what_a_check_says_is_read_strictly() -> Result<()> {
        let both = Bernoulli { seeded: true, complement: true };
        assert_eq!(Bernoulli::parse("bernoulli complement seeded\n")?, both);
        assert!(Bernoulli::parse("").is_err());
        assert!(Bernoulli::parse("poisson").is_err());
        assert!(Bernoulli::parse("bernoulli sometimes").is_err());
        Ok(())
    }
}
