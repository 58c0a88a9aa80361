//! The elements of a tensor, converted to float32 a few at a time.
//!
//! ONNX does not align the data of weights, so that a mapped weight is bytes. Copying all of it to
//! aligned memory would double the memory of the largest weight.

use std::marker::PhantomData;

use crate::pages::WeightPages;
use crate::weight::Weight;

/// Elements in order.
pub(crate) trait Elements: Sync {
    /// Their type.
    type Element: Weight;

    /// How many there are.
    fn count(&self) -> usize;

    /// Converts the elements from `start` on, as many as `to` has. If there are fewer, nothing is
    /// converted.
    fn widen(&self, start: usize, to: &mut [f32]);
}

impl<T: Weight> Elements for [T] {
    type Element = T;

    fn count(&self) -> usize {
        self.len()
    }

    fn widen(&self, start: usize, to: &mut [f32]) {
        if let Some(from) = self.get(start..start + to.len()) {
            T::widen(from, to);
        }
    }
}

/// Elements as the bytes of a tensor, which need no alignment.
pub(crate) struct RawElements<'b, T> {
    bytes: &'b [u8],
    pages: Option<&'b WeightPages<'b>>,
    element: PhantomData<fn() -> T>,
}

impl<'b, T: Weight> RawElements<'b, T> {
    pub(crate) fn new(bytes: &'b [u8]) -> RawElements<'b, T> {
        RawElements { bytes, pages: None, element: PhantomData }
    }

    /// Gives the pages of the bytes back while they are read.
    pub(crate) fn paged(self, pages: Option<&'b WeightPages<'b>>) -> RawElements<'b, T> {
        RawElements { pages, ..self }
    }
}

impl<T: Weight> Elements for RawElements<'_, T> {
    type Element = T;

    fn count(&self) -> usize {
        self.bytes.len() / size_of::<T>()
    }

    fn widen(&self, start: usize, to: &mut [f32]) {
        let range = start * size_of::<T>()..(start + to.len()) * size_of::<T>();
        if let Some(from) = self.bytes.get(range.clone()) {
            T::widen_bytes(from, to);
            if let Some(pages) = self.pages {
                pages.note(&range);
            }
        }
    }
}

/// Elements whose parts along an axis are multiplied by factors.
pub(crate) struct ScaledElements<'e, E> {
    pub(crate) elements: &'e E,
    /// The factor of each part.
    pub(crate) scales: &'e [f32],
    /// How many neighbouring elements share a factor.
    pub(crate) inner: usize,
}

impl<E: Elements> Elements for ScaledElements<'_, E> {
    type Element = E::Element;

    fn count(&self) -> usize {
        self.elements.count()
    }

    fn widen(&self, start: usize, to: &mut [f32]) {
        self.elements.widen(start, to);
        let (count, inner) = (self.scales.len().max(1), self.inner.max(1));
        let mut place = start;
        let mut rest = to;
        while !rest.is_empty() {
            // Up to the end of the part.
            let length = (inner - place % inner).min(rest.len());
            let (part, after) = rest.split_at_mut(length);
            let scale = self.scales.get(place / inner % count).copied().unwrap_or(1.0);
            part.iter_mut().for_each(|value| *value *= scale);
            place += length;
            rest = after;
        }
    }
}

/// Calls a function with all elements, a few at a time.
pub(crate) fn each_chunk<E: Elements + ?Sized>(elements: &E, mut look: impl FnMut(&[f32])) {
    let mut wide = [0.0_f32; 1024];
    let (most, count) = (wide.len(), elements.count());
    for start in (0..count).step_by(most) {
        if let Some(wide) = wide.get_mut(..most.min(count - start)) {
            elements.widen(start, wide);
            look(wide);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    fn widened<E: Elements + ?Sized>(elements: &E, start: usize, count: usize) -> Vec<f32> {
        let mut wide = vec![-1.0; count];
        elements.widen(start, &mut wide);
        wide
    }

    #[test]
    fn bytes_at_any_address_are_the_same_elements() {
        let values: Vec<f32> = (0..700_u16).map(|step| f32::from(step) * 0.25 - 50.0).collect();
        let halves: Vec<f16> = values.iter().map(|value| f16::from_f32(*value)).collect();
        let (mut single, mut half) = (vec![0xff], vec![0xff]);
        single.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        half.extend(halves.iter().flat_map(|value| value.to_le_bytes()));
        let single = RawElements::<f32>::new(&single[1..]);
        let half = RawElements::<f16>::new(&half[1..]);
        assert_eq!((single.count(), half.count()), (700, 700));
        for (start, count) in [(0, 700), (3, 1), (1, 513), (699, 1), (700, 0)] {
            let expected = &values[start..start + count];
            assert_eq!(widened(&single, start, count), expected);
            assert_eq!(widened(&half, start, count), expected);
            assert_eq!(widened(&values[..], start, count), expected);
            assert_eq!(widened(&halves[..], start, count), expected);
        }
        assert_eq!(widened(&single, 699, 2), [-1.0, -1.0]);
    }

    #[test]
    fn parts_have_factors() {
        let values: Vec<f32> = (0..24_u8).map(f32::from).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let elements = RawElements::<f32>::new(&bytes);
        // Shape [2, 3, 4]: along each axis, and from any element on.
        for (scales, inner) in [(&[2.0_f32, 3.0][..], 12), (&[2.0, 3.0, 5.0], 4), (&[2.0, 3.0, 5.0, 7.0], 1)]
        {
            let scaled = ScaledElements { elements: &elements, scales, inner };
            let expected: Vec<f32> =
                (0..24).map(|place| values[place] * scales[place / inner % scales.len()]).collect();
            for start in 0..24 {
                assert_eq!(widened(&scaled, start, 24 - start), expected[start..]);
            }
        }
    }
}
