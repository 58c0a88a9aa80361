//! Element types of weights: float32 and float16, computed with in float32.

use half::f16;
use half::slice::HalfFloatSliceExt;

mod sealed {
    pub trait Sealed {}

    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
}

/// An element type of weights and scales: `f32` or `half::f16`.
pub trait Weight: Copy + Send + Sync + sealed::Sealed {
    /// Whether it is float16.
    const IS_HALF: bool;

    /// Converts a slice to float32, into one of the same length.
    fn widen(from: &[Self], to: &mut [f32]);

    /// Converts little-endian bytes to float32. They need no alignment.
    fn widen_bytes(from: &[u8], to: &mut [f32]);

    /// Rounds a float32 to this type.
    fn narrow(value: f32) -> Self;

    /// The little-endian bytes of elements.
    fn bytes(values: &[Self]) -> Vec<u8>;

    /// Converts an element to float32.
    fn wide(self) -> f32;
}

impl Weight for f32 {
    const IS_HALF: bool = false;

    fn widen(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn widen_bytes(from: &[u8], to: &mut [f32]) {
        let (elements, _) = from.as_chunks::<4>();
        for (to, from) in to.iter_mut().zip(elements) {
            *to = f32::from_le_bytes(*from);
        }
    }

    fn narrow(value: f32) -> f32 {
        value
    }

    fn bytes(values: &[Self]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn wide(self) -> f32 {
        self
    }
}

impl Weight for f16 {
    const IS_HALF: bool = true;

    fn widen(from: &[f16], to: &mut [f32]) {
        // By the slice, because `half` looks for the CPU's instructions once a call.
        from.convert_to_f32_slice(to);
    }

    fn widen_bytes(from: &[u8], to: &mut [f32]) {
        const CHUNK: usize = 256;
        let mut halves = [f16::ZERO; CHUNK];
        let (elements, _) = from.as_chunks::<2>();
        for (to, from) in to.chunks_mut(CHUNK).zip(elements.chunks(CHUNK)) {
            for (half, from) in halves.iter_mut().zip(from) {
                *half = f16::from_le_bytes(*from);
            }
            if let Some(halves) = halves.get(..to.len()) {
                halves.convert_to_f32_slice(to);
            }
        }
    }

    fn narrow(value: f32) -> f16 {
        f16::from_f32(value)
    }

    fn bytes(values: &[Self]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn wide(self) -> f32 {
        self.to_f32()
    }
}
