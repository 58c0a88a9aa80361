//! Comparison of values within tolerances, for conformance tests.

use super::{MapKeys, Tensor, Value};
use crate::dtype::DType;
use crate::{Result, ensure, error};

/// The tolerated error: `|actual - expected| <= absolute + relative * |expected|`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// The error relative to the expected value.
    pub relative: f64,
    /// The absolute error.
    pub absolute: f64,
}

impl Default for Tolerance {
    /// Returns a relative tolerance of 1e-3 and an absolute one of 1e-5.
    fn default() -> Self {
        Tolerance { relative: 1e-3, absolute: 1e-5 }
    }
}

/// Checks that `actual` equals `expected` within a tolerance. The error names the first and the
/// worst difference. NaN equals NaN. Integers, booleans and strings must be equal.
///
/// ```
/// use ort_core::tensor::{Tensor, Tolerance, compare};
/// let expected = Tensor::from_slice(&[2], &[1.0f32, f32::NAN])?.into();
/// let actual = Tensor::from_slice(&[2], &[1.0005f32, f32::NAN])?.into();
/// assert!(compare(&actual, &expected, Tolerance::default()).is_ok());
/// let far = Tensor::from_slice(&[2], &[1.1f32, f32::NAN])?.into();
/// assert!(compare(&far, &expected, Tolerance::default()).is_err());
/// # Ok::<(), ort_core::Error>(())
/// ```
pub fn compare(actual: &Value, expected: &Value, tolerance: Tolerance) -> Result<()> {
    match (actual, expected) {
        (Value::Tensor(actual), Value::Tensor(expected)) => compare_tensors(actual, expected, tolerance),
        (Value::Sequence(actual), Value::Sequence(expected)) => {
            let (a, e) = (actual.elements.len(), expected.elements.len());
            ensure!(a == e, Fail, "a sequence of {a} elements, expected {e}");
            let mut pairs = actual.elements.iter().zip(&expected.elements);
            pairs.try_for_each(|(actual, expected)| compare(actual, expected, tolerance))
        }
        (Value::Optional(actual), Value::Optional(expected)) => match (&actual.element, &expected.element) {
            (None, None) => Ok(()),
            (Some(actual), Some(expected)) => compare(actual, expected, tolerance),
            _ => Err(error!(Fail, "one optional has an element, the other has none")),
        },
        // An optional with an element compares equal to the bare element.
        (Value::Optional(actual), expected) => match &actual.element {
            Some(element) => compare(element, expected, tolerance),
            None => Err(error!(Fail, "the optional is empty, expected {}", expected.kind_name())),
        },
        (actual, Value::Optional(expected)) => match &expected.element {
            Some(element) => compare(actual, element, tolerance),
            None => Err(error!(Fail, "{}, expected an empty optional", actual.kind_name())),
        },
        (Value::Map(actual), Value::Map(expected)) => {
            let same = match (&actual.keys, &expected.keys) {
                // The integer type of the keys is not compared.
                (MapKeys::Ints(_, a), MapKeys::Ints(_, e)) => a == e,
                (a, e) => a == e,
            };
            ensure!(same, Fail, "the keys of the maps differ");
            compare(&actual.values, &expected.values, tolerance)
        }
        (Value::Sparse(actual), Value::Sparse(expected)) => {
            compare_tensors(&actual.to_dense()?, &expected.to_dense()?, tolerance)
        }
        (actual, expected) => Err(error!(Fail, "{}, expected {}", actual.kind_name(), expected.kind_name())),
    }
}

fn compare_tensors(actual: &Tensor, expected: &Tensor, tolerance: Tolerance) -> Result<()> {
    let (a, e) = (actual.dtype(), expected.dtype());
    ensure!(a == e, Fail, "type {}, expected {}", a.name(), e.name());
    let (a, e) = (actual.shape(), expected.shape());
    ensure!(a == e, Fail, "shape {a:?}, expected {e:?}");
    match actual.dtype() {
        DType::String => {
            let (actual, expected) = (actual.strings()?, expected.strings()?);
            match actual.iter().zip(expected).enumerate().find(|(_, (a, e))| a != e) {
                None => Ok(()),
                Some((index, (a, e))) => Err(error!(Fail, "element {index} is {a:?}, expected {e:?}")),
            }
        }
        dtype if dtype.is_float() || dtype.is_complex() => {
            compare_numbers(&actual.to_doubles()?, &expected.to_doubles()?, tolerance)
        }
        _ => {
            let (actual, expected) = (actual.view().bytes()?, expected.view().bytes()?);
            // Compared as bytes: a conversion to doubles would merge neighbours beyond 2^53.
            let differs = actual.iter().zip(expected).position(|(a, e)| a != e);
            differs.map_or(Ok(()), |byte| {
                let count = actual.iter().zip(expected).filter(|(a, e)| a != e).count();
                Err(error!(Fail, "{count} bytes differ, the first at byte {byte}"))
            })
        }
    }
}

fn compare_numbers(actual: &[f64], expected: &[f64], tolerance: Tolerance) -> Result<()> {
    let close = |a: f64, e: f64| {
        // Equality catches infinities of one sign, whose difference is NaN.
        a == e
            || (a.is_nan() && e.is_nan())
            || (a - e).abs() <= tolerance.absolute + tolerance.relative * e.abs()
    };
    let pairs = actual.iter().copied().zip(expected.iter().copied()).enumerate();
    let far: Vec<(usize, (f64, f64))> = pairs.filter(|(_, (a, e))| !close(*a, *e)).collect();
    let Some(&(first, (a, e))) = far.first() else { return Ok(()) };
    let distance = |(_, (a, e)): &(usize, (f64, f64))| (a - e).abs();
    // `total_cmp` sorts a positive NaN last, so NaN against a number is the worst difference.
    let worst = far.iter().copied().max_by(|one, other| distance(one).total_cmp(&distance(other)));
    let (worst, (worst_a, worst_e)) = worst.unwrap_or((first, (a, e)));
    Err(error!(
        Fail,
        "{} of {} elements differ; element {first} is {a}, expected {e}; worst is element {worst}: {worst_a}, expected {worst_e}",
        far.len(),
        actual.len(),
    ))
}
