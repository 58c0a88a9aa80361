//! Range rules: from the statistics of a value to the range that its codes cover.
//!
//! Which rule is best is not knowable beforehand. Transformers have outliers that carry meaning, so
//! anything that clips harms them; convolutional networks usually gain from clipping a little.

mod counted;
mod entropy;
mod percentile;
mod squared_error;

use ort_core::{Error, ErrorKind, Result};

use self::counted::Counted;
pub use self::counted::ValueRange;
use crate::integer::GridOptions;
use crate::observe::{Observer, Wanted};

/// How a range is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RangeRule {
    /// All that was seen.
    MinMax,
    /// The means of the least and of the greatest element over the samples.
    Average,
    /// This share of the elements, such as 0.9999.
    Percentile(f64),
    /// The threshold whose codes lose the least information, by Kullback-Leibler divergence.
    Entropy,
    /// The least mean squared error.
    SquaredError,
}

impl RangeRule {
    /// The statistics that the rule needs.
    pub fn wanted(self) -> Wanted {
        let histogram = !matches!(self, RangeRule::MinMax | RangeRule::Average);
        Wanted { histogram, moments: false }
    }

    /// The range of a value, which contains 0.
    ///
    /// `options` is the grid that the range is for: whether it is symmetric matters to percentiles,
    /// and the number of codes to entropy and squared error. `None` if no element was finite.
    ///
    /// # Errors
    ///
    /// The observer lacks what the rule [needs](Self::wanted), or a percentile is not in 0.5 to 1.
    pub fn range(self, observer: &Observer, options: &GridOptions) -> Result<Option<ValueRange>> {
        let Some(extremes) = observer.extremes() else { return Ok(None) };
        let whole = ValueRange::of(extremes);
        Ok(Some(match self {
            RangeRule::MinMax => whole,
            RangeRule::Average => {
                let (low, high) = observer.mean_extremes().unwrap_or((whole.low, whole.high));
                ValueRange { low: low.min(0.0), high: high.max(0.0) }
            }
            RangeRule::Percentile(share) => {
                if !(0.5..=1.0).contains(&share) {
                    let text = format!("a percentile of {share}, expected 0.5 to 1, such as 0.9999");
                    return Err(Error::new(ErrorKind::InvalidArgument, text));
                }
                let counted = Counted::of(observer, whole)?;
                percentile::range(&counted, share, options)?
            }
            RangeRule::Entropy => {
                // A code for each level on both sides of zero.
                let levels = 1_usize << (options.ty.bits() - 1);
                entropy::range(&Counted::of(observer, whole)?, levels, options.is_symmetric)
            }
            RangeRule::SquaredError => squared_error::range(&Counted::of(observer, whole)?, options)?,
        }))
    }
}

/// The range of [`RangeRule::Entropy`] for any number of codes: `levels` on each side of zero.
///
/// # Errors
///
/// The observer lacks a histogram, or there is no level.
pub fn entropy_range(observer: &Observer, levels: usize, is_symmetric: bool) -> Result<Option<ValueRange>> {
    if levels == 0 {
        let text = "an entropy of 0 levels, expected at least 1, such as 128";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let Some(extremes) = observer.extremes() else { return Ok(None) };
    let counted = Counted::of(observer, ValueRange::of(extremes))?;
    Ok(Some(entropy::range(&counted, levels, is_symmetric)))
}
