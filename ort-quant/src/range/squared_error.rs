//! The range of least mean squared error, searched over a histogram.

use ort_core::Result;

use super::counted::{Counted, ValueRange};
use crate::integer::GridOptions;

/// Ends of the range that are tried: this many hundredths of the extreme, in steps of 2.
const LEAST_PERCENT: u8 = 20;

/// Searches the range: first both ends shrink alike, then each end alone.
pub(super) fn range(counted: &Counted<'_>, options: &GridOptions) -> Result<ValueRange> {
    let whole = counted.whole;
    let mut best = (squared_error(counted, whole, options)?, whole);
    let attempt = |range: ValueRange, best: &mut (f64, ValueRange)| -> Result<()> {
        let error = squared_error(counted, range, options)?;
        if error < best.0 {
            *best = (error, range);
        }
        Ok(())
    };
    let shares = || (LEAST_PERCENT..100).step_by(2).rev().map(|percent| f64::from(percent) / 100.0);
    for share in shares() {
        attempt(ValueRange { low: whole.low * share, high: whole.high * share }, &mut best)?;
    }
    // With a symmetric grid the wider end decides, so that there is nothing more to try.
    if options.is_symmetric {
        return Ok(best.1);
    }
    let both = best.1;
    for share in shares().chain([1.0]) {
        attempt(ValueRange { low: whole.low * share, ..both }, &mut best)?;
    }
    let low = best.1.low;
    for share in shares().chain([1.0]) {
        attempt(ValueRange { low, high: whole.high * share }, &mut best)?;
    }
    Ok(best.1)
}

/// The sum of the squared errors of all elements, if each is at the middle of its bin. Zeros are
/// exact on every grid.
pub(super) fn squared_error(counted: &Counted<'_>, range: ValueRange, options: &GridOptions) -> Result<f64> {
    let grid = options.grid(range.low, range.high)?;
    let codes = options.ty.codes();
    let (scale, zero_point) = (f64::from(grid.scale), f64::from(grid.zero_point));
    let (least, greatest) = (f64::from(codes.least), f64::from(codes.greatest));
    let (negative, positive) = counted.histogram.bins();
    let width = counted.histogram.width();
    let side = |bins: &[u64], sign: f64| -> f64 {
        let filled = bins.iter().enumerate().filter(|(_, count)| **count > 0);
        filled
            .map(|(index, count)| {
                let middle = sign * (index as f64 + 0.5) * width;
                let code = ((middle / scale).round_ties_even() + zero_point).clamp(least, greatest);
                let error = scale * (code - zero_point) - middle;
                *count as f64 * error * error
            })
            .sum()
    };
    Ok(side(negative, -1.0) + side(positive, 1.0))
}
