//! Quantized 8-bit types, and their scales and zero points.

use bytemuck::Pod;
use ort_core::dtype::Element;
use ort_core::ep::RunCx;
use ort_core::{Result, error};

/// An 8-bit quantized value.
pub trait QuantizedByte: Element + Pod + Send + Sync {
    /// Converts the value to `f32`.
    fn number(self) -> f32;
    /// Converts the value to `i32`.
    fn integer(self) -> i32;
    /// Returns its index in a table of all values.
    fn bits(self) -> usize;
    /// Converts a whole number, clamped to the range.
    fn nearest(number: f32) -> Self;
}

impl QuantizedByte for u8 {
    #[inline(always)]
    fn number(self) -> f32 {
        f32::from(self)
    }

    #[inline(always)]
    fn integer(self) -> i32 {
        i32::from(self)
    }

    #[inline(always)]
    fn bits(self) -> usize {
        usize::from(self)
    }

    #[inline(always)]
    fn nearest(number: f32) -> u8 {
        // `as` saturates, and maps NaN to 0.
        number as u8
    }
}

impl QuantizedByte for i8 {
    #[inline(always)]
    fn number(self) -> f32 {
        f32::from(self)
    }

    #[inline(always)]
    fn integer(self) -> i32 {
        i32::from(self)
    }

    #[inline(always)]
    fn bits(self) -> usize {
        usize::from(self as u8)
    }

    #[inline(always)]
    fn nearest(number: f32) -> i8 {
        // `as` saturates, and maps NaN to 0.
        number as i8
    }
}

/// Reads the scale at an input.
pub fn scale(cx: &RunCx<'_>, index: usize) -> Result<f32> {
    let elements = cx.input(index)?.as_slice::<f32>()?;
    elements.first().copied().ok_or_else(|| error!(InvalidArgument, "the scale at input {index} is empty"))
}

/// Reads the zero point at an input; 0 if it is missing.
pub fn zero<T: QuantizedByte>(cx: &RunCx<'_>, index: usize) -> Result<f32> {
    let Some(view) = cx.find_input(index) else { return Ok(0.0) };
    let elements = view.as_slice::<T>()?;
    let first = elements.first().map(|zero| zero.number());
    first.ok_or_else(|| error!(InvalidArgument, "the zero point at input {index} is empty"))
}
