//! The threshold of least Kullback-Leibler divergence, as TensorRT chooses ranges.
//!
//! For each threshold, the distribution that ends there (with all beyond it in the last bin) is
//! compared with the same distribution over as many levels as there are codes. Each side of zero
//! has a threshold of its own, so that the result stays asymmetric. See "8-bit Inference with
//! TensorRT", GTC 2017.
//!
//! The search needs many more bins than levels. With as many bins as levels, as in
//! onnxruntime.quantization, there is a single threshold to choose from.

use super::counted::{Counted, ValueRange};
use crate::observe::Histogram;

/// What an empty bin gets, in counts, so that the logarithm exists. The others give it evenly.
const SMOOTHING: f64 = 1e-4;

/// The range for this many levels on each side of zero.
pub(super) fn range(counted: &Counted<'_>, levels: usize, is_symmetric: bool) -> ValueRange {
    let Counted { histogram, whole, .. } = counted;
    let (negative, positive) = histogram.bins();
    let is_two_sided = whole.low < 0.0 && whole.high > 0.0;
    // A side alone has all codes but that of zero.
    let levels = if is_two_sided || is_symmetric { levels } else { levels.saturating_mul(2) - 1 };
    if is_symmetric {
        let magnitudes: Vec<u64> = negative.iter().zip(positive).map(|(low, high)| low + high).collect();
        let most = threshold(histogram, &magnitudes, levels).min(whole.high.max(-whole.low));
        return ValueRange { low: whole.low.max(-most), high: whole.high.min(most) };
    }
    ValueRange {
        low: whole.low.max(-threshold(histogram, negative, levels)),
        high: whole.high.min(threshold(histogram, positive, levels)),
    }
}

/// The magnitude at which the divergence is least; of equal ones the largest.
fn threshold(histogram: &Histogram, counts: &[u64], levels: usize) -> f64 {
    let used = counts.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
    let counts: Vec<f64> = counts.iter().take(used).map(|count| *count as f64).collect();
    let mut best = (f64::INFINITY, used);
    // What lies beyond the candidate, and so would be clipped.
    let mut beyond = 0.0;
    for candidate in (levels..=used).rev() {
        let (kept, rest) = counts.split_at(candidate);
        if let Some(next) = rest.first() {
            beyond += next;
        }
        let divergence = divergence(kept, beyond, levels);
        if divergence < best.0 {
            best = (divergence, candidate);
        }
    }
    best.1 as f64 * histogram.width()
}

/// The divergence of the distribution that is merged into `levels` groups from the one that is
/// clipped behind `kept`.
fn divergence(kept: &[f64], beyond: f64, levels: usize) -> f64 {
    let mut clipped = kept.to_vec();
    if let Some(last) = clipped.last_mut() {
        *last += beyond;
    }
    let mut merged = merge(kept, levels);
    // A bin with counts beyond the threshold only is empty in the merged distribution.
    let (Some(clipped), Some(merged)) = (smoothed(&mut clipped), smoothed(&mut merged)) else {
        return f64::INFINITY;
    };
    let (all, all_merged): (f64, f64) = (clipped.iter().sum(), merged.iter().sum());
    let pairs = clipped.iter().zip(merged);
    pairs.map(|(p, q)| p / all * (p * all_merged / (*q * all)).ln()).sum()
}

/// Merges bins into groups of equal width, and spreads each group evenly over its bins that are not
/// empty. A bin across a border belongs to both groups, in proportion.
fn merge(kept: &[f64], levels: usize) -> Vec<f64> {
    let mut spread = vec![0.0; kept.len()];
    let per_group = kept.len() as f64 / levels as f64;
    for group in 0..levels {
        let (start, end) = (group as f64 * per_group, (group + 1) as f64 * per_group);
        let (first, last) = (start.floor() as usize, (end.ceil() as usize).min(kept.len()));
        // The share of a bin that is in the group.
        let share = |bin: usize| (end.min(bin as f64 + 1.0) - start.max(bin as f64)).max(0.0);
        let bins = kept.iter().enumerate().take(last).skip(first).filter(|(_, count)| **count > 0.0);
        let (mut sum, mut filled) = (0.0, 0.0);
        for (bin, count) in bins.clone() {
            sum += count * share(bin);
            filled += share(bin);
        }
        for (bin, _) in bins {
            if let Some(place) = spread.get_mut(bin) {
                *place += sum / filled * share(bin);
            }
        }
    }
    spread
}

/// Gives empty bins a little, taken evenly from the others. `None` if they have not got as much.
fn smoothed(counts: &mut [f64]) -> Option<&[f64]> {
    let empty = counts.iter().filter(|count| **count == 0.0).count();
    let filled = counts.len() - empty;
    if filled == 0 {
        return None;
    }
    let given = SMOOTHING * empty as f64 / filled as f64;
    for count in counts.iter_mut() {
        if *count == 0.0 {
            *count = SMOOTHING;
        } else if *count > given {
            *count -= given;
        } else {
            return None;
        }
    }
    Some(counts)
}
