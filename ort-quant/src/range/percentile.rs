//! Percentiles of a histogram.

use ort_core::Result;

use super::counted::{Counted, ValueRange};
use super::squared_error::squared_error;
use crate::integer::GridOptions;
use crate::observe::Histogram;

/// The range between the quantiles that leave out equal shares at both ends, or the quantile of
/// magnitudes on both sides if the grid is symmetric.
pub(super) fn range(counted: &Counted<'_>, share: f64, options: &GridOptions) -> Result<ValueRange> {
    let Counted { histogram, zeros, whole } = counted;
    let (negative, positive) = histogram.bins();
    let (below, above): (u64, u64) = (negative.iter().sum(), positive.iter().sum());
    let count = (below + above + zeros) as f64;
    if options.is_symmetric {
        let magnitudes: Vec<u64> = negative.iter().zip(positive).map(|(low, high)| low + high).collect();
        let most = quantile(histogram, &magnitudes, share * count - *zeros as f64);
        let most = most.min(whole.high.max(-whole.low));
        return Ok(ValueRange { low: whole.low.max(-most), high: whole.high.min(most) });
    }
    // The elements that are left out at each end.
    let outside = (1.0 - share) / 2.0 * count;
    let kept = |side: u64, bins| quantile(histogram, bins, (side as f64 - outside).max(0.0));
    let low = (-kept(below, negative)).max(whole.low);
    let high = kept(above, positive).min(whole.high);
    let cut = ValueRange { low, high };
    // A side that is rare may matter all the same, so its removal has to pay.
    let removes_side = (low == 0.0 && whole.low < 0.0) || (high == 0.0 && whole.high > 0.0);
    if removes_side {
        let kept = ValueRange {
            low: if low == 0.0 { whole.low } else { low },
            high: if high == 0.0 { whole.high } else { high },
        };
        if squared_error(counted, kept, options)? <= squared_error(counted, cut, options)? {
            return Ok(kept);
        }
    }
    Ok(cut)
}

/// The magnitude below which this many elements are, with the elements of a bin spread evenly.
fn quantile(histogram: &Histogram, bins: &[u64], count: f64) -> f64 {
    let mut before = 0.0;
    let mut end = 0;
    for (index, bin) in bins.iter().enumerate().filter(|(_, bin)| **bin > 0) {
        let bin = *bin as f64;
        if before + bin >= count {
            let part = ((count - before) / bin).max(0.0);
            // Below the first element there is nothing but 0.
            let start = if before == 0.0 && part == 0.0 { 0.0 } else { index as f64 + part };
            return start * histogram.width();
        }
        before += bin;
        end = index + 1;
    }
    end as f64 * histogram.width()
}
