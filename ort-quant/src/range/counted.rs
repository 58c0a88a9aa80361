//! The elements of a value by bins, which rules search.

use ort_core::{Error, ErrorKind, Result};

use crate::observe::{Extremes, Histogram, Observer};

/// The range that codes cover. Elements outside are clipped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueRange {
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl ValueRange {
    /// The range of all elements, and 0.
    pub(super) fn of(extremes: Extremes) -> ValueRange {
        ValueRange { low: f64::from(extremes.low).min(0.0), high: f64::from(extremes.high).max(0.0) }
    }
}

impl From<Extremes> for ValueRange {
    /// The range of all elements.
    fn from(ends: Extremes) -> ValueRange {
        ValueRange { low: f64::from(ends.low), high: f64::from(ends.high) }
    }
}

/// The elements of a value, counted by bins.
pub(super) struct Counted<'o> {
    pub(super) histogram: &'o Histogram,
    /// The elements that are 0, which are in no bin.
    pub(super) zeros: u64,
    /// The range of all elements.
    pub(super) whole: ValueRange,
}

impl<'o> Counted<'o> {
    pub(super) fn of(observer: &'o Observer, whole: ValueRange) -> Result<Counted<'o>> {
        let histogram = observer.histogram().ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidArgument,
                "the range rule needs a histogram, which was not collected",
            )
        })?;
        Ok(Counted { histogram, zeros: observer.counts().zeros, whole })
    }
}
