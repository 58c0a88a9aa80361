//! `QuantizeLinear` and `DequantizeLinear`.

use ort_core::ops::quant::problem::{Granularity, Quantization};
use ort_core::{Result, ensure};

use crate::operand::OpCx;

/// Returns how the scales of a node belong to its elements.
///
/// # Errors
///
/// Scales do not fit the tensor, or zero points do not fit the scales.
pub fn granularity<L>(cx: &OpCx<'_, L>) -> Result<Granularity> {
    let (x, scale) = (cx.input(0)?, cx.input(1)?);
    let (scales, zeros) = (scale.count(), cx.find_input(2).map(|zeros| zeros.count()));
    ensure!(
        zeros.is_none_or(|zeros| zeros == scales),
        InvalidArgument,
        "there are {} zero points for {scales} scales",
        zeros.unwrap_or(0)
    );
    Quantization::new(cx.attrs)?.granularity(&x.shape, &scale.shape)
}
