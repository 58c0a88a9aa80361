//! Quantization of whole tensors to float8 (E4M3FN): one scale for all elements, or one for each
//! channel.
//!
//! The type has no infinity, and its largest number is 448. The largest magnitude of a channel
//! becomes that number, so nothing saturates.

use ort_core::dtype::F8E4M3FN;

use crate::elements::{Elements, each_chunk};
use crate::noise::Noise;

/// The largest number of the type.
const LARGEST: f32 = 448.0;

/// Values of samples may be this many times smaller than those of other inputs.
const MARGIN: f32 = 2.0;

/// A tensor in float8.
pub(crate) struct Float8Codes {
    /// The scale of each channel, or the only one.
    pub(crate) scales: Vec<f32>,
    pub(crate) codes: Vec<u8>,
    /// What quantization changed.
    pub(crate) noise: Noise,
}

/// The scale of values in a range, with room for larger ones.
pub(crate) fn value_scale(low: f64, high: f64) -> f32 {
    scale(MARGIN * low.abs().max(high.abs()) as f32)
}

/// The scale with which the largest magnitude becomes the largest number. 1 for a channel of zeros.
fn scale(most: f32) -> f32 {
    let scale = most / LARGEST;
    if scale < f32::MIN_POSITIVE { 1.0 } else { scale }
}

/// Encodes finite elements. Channels have `inner` elements in a row, then comes the next one.
pub(crate) fn encode<E: Elements + ?Sized>(elements: &E, (channels, inner): (usize, usize)) -> Float8Codes {
    let (channels, inner) = (channels.max(1), inner.max(1));
    let mut largest = vec![0.0_f32; channels];
    each_of_channel(elements, (channels, inner), |channel, value| {
        if let Some(most) = largest.get_mut(channel) {
            *most = most.max(value.abs());
        }
    });
    let scales: Vec<f32> = largest.into_iter().map(scale).collect();
    let mut noise = Noise::default();
    let mut codes = Vec::with_capacity(elements.count());
    each_of_channel(elements, (channels, inner), |channel, value| {
        let scale = scales.get(channel).copied().unwrap_or(1.0);
        let code = F8E4M3FN::from_f32(value / scale, true);
        noise.add(value, code.to_f32() * scale);
        codes.push(code.0);
    });
    Float8Codes { scales, codes, noise }
}

/// Calls a function with the channel of each element, and the element.
fn each_of_channel<E: Elements + ?Sized>(
    elements: &E,
    (channels, inner): (usize, usize),
    mut look: impl FnMut(usize, f32),
) {
    let mut index = 0;
    each_chunk(elements, |values| {
        for value in values {
            look(index / inner % channels, *value);
            index += 1;
        }
    });
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn codes_are_those_of_the_reference() {
        let cases: Vec<Value> = serde_json::from_str(include_str!("../tests/data/float8.json")).unwrap();
        assert!(cases.len() > 8);
        for case in cases {
            let floats = |name: &str| -> Vec<f32> {
                let numbers = case[name].as_array().unwrap().iter();
                numbers.map(|number| number.as_f64().unwrap() as f32).collect()
            };
            let integers = |name: &str| -> Vec<usize> {
                let numbers = case[name].as_array().unwrap().iter();
                numbers.map(|number| number.as_u64().unwrap() as usize).collect()
            };
            let (shape, data) = (integers("shape"), floats("data"));
            let channels = match case["axis"].as_u64().map(|axis| axis as usize) {
                Some(axis) => (shape[axis], shape[axis + 1..].iter().product()),
                None => (1, data.len()),
            };
            let found = encode(&data[..], channels);
            let codes: Vec<usize> = found.codes.iter().map(|code| usize::from(*code)).collect();
            assert_eq!(
                (found.scales, codes),
                (floats("scales"), integers("codes")),
                "{shape:?} {channels:?}"
            );
        }
    }

    #[test]
    fn inputs_have_room_for_twice_their_range() {
        assert_eq!(value_scale(-448.0, 100.0), 2.0);
        assert_eq!(value_scale(0.0, 224.0), 1.0);
        // Nothing was seen but zeros.
        assert_eq!(value_scale(0.0, 0.0), 1.0);
    }
}
