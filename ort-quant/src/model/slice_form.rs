//! Weights of which channels are removed while the file is written.

use std::sync::Arc;

use crate::elements::Elements;
use crate::weight::Weight;

/// The indices that stay along some axes.
#[derive(Clone, Debug)]
pub(super) struct SliceForm {
    /// Before.
    pub(super) shape: Vec<usize>,
    /// By axis; the others stay whole.
    pub(super) kept: Vec<(usize, Arc<[usize]>)>,
}

impl SliceForm {
    /// The shape after.
    pub(super) fn narrow_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        for (axis, kept) in &self.kept {
            if let Some(size) = shape.get_mut(*axis) {
                *size = kept.len();
            }
        }
        shape
    }

    /// The bytes of the elements that stay.
    pub(super) fn run<E: Elements + ?Sized>(&self, elements: &E) -> Vec<u8> {
        let Some((length, outer)) = self.shape.split_last() else { return Self::row(elements, 0, 1, None) };
        // The rows along the last axis that stay. Places of all elements would outgrow the weight.
        let mut rows = vec![0];
        for (axis, size) in outer.iter().enumerate() {
            let next = |row: &usize| -> Vec<usize> {
                match self.kept_along(axis) {
                    Some(kept) => kept.iter().map(|index| row * size + index).collect(),
                    None => (0..*size).map(|index| row * size + index).collect(),
                }
            };
            rows = rows.iter().flat_map(next).collect();
        }
        let kept = self.kept_along(outer.len());
        let count = rows.len() * kept.map_or(*length, <[_]>::len);
        let mut bytes = Vec::with_capacity(count * size_of::<E::Element>());
        for row in rows {
            bytes.extend(Self::row(elements, row * length, *length, kept));
        }
        bytes
    }

    fn kept_along(&self, axis: usize) -> Option<&[usize]> {
        self.kept.iter().find(|(other, _)| *other == axis).map(|(_, kept)| &kept[..])
    }

    /// The bytes of what stays of neighbouring elements.
    fn row<E: Elements + ?Sized>(
        elements: &E,
        start: usize,
        length: usize,
        kept: Option<&[usize]>,
    ) -> Vec<u8> {
        let mut wide = vec![0.0; length];
        elements.widen(start, &mut wide);
        // Exact: the elements have been of this type.
        let narrow = |value: &f32| E::Element::narrow(*value);
        let narrow: Vec<E::Element> = match kept {
            Some(kept) => kept.iter().filter_map(|index| wide.get(*index)).map(narrow).collect(),
            None => wide.iter().map(narrow).collect(),
        };
        E::Element::bytes(&narrow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_the_elements_at_the_indices() {
        let values: Vec<f32> = (0..60_u8).map(f32::from).collect();
        for kept in [
            vec![],
            vec![(0, Arc::from([1, 2]))],
            vec![(1, Arc::from([0, 3]))],
            vec![(2, Arc::from([4]))],
            vec![(2, Arc::from([0, 1])), (0, Arc::from([0]))],
            vec![(1, Arc::from([1, 2])), (0, Arc::from([0, 2]))],
        ] {
            let form = SliceForm { shape: vec![3, 4, 5], kept: kept.clone() };
            let all = |axis: usize, size: usize| {
                let kept = kept.iter().find(|(other, _)| *other == axis);
                kept.map_or_else(|| (0..size).collect(), |(_, kept)| kept.to_vec())
            };
            let (first, second, third): (Vec<usize>, Vec<usize>, Vec<usize>) =
                (all(0, 3), all(1, 4), all(2, 5));
            let mut expected = Vec::new();
            for one in &first {
                for two in &second {
                    expected.extend(third.iter().map(|three| values[(one * 4 + two) * 5 + three]));
                }
            }
            assert_eq!(form.run(&values[..]), f32::bytes(&expected), "{kept:?}");
            assert_eq!(form.narrow_shape(), [first.len(), second.len(), third.len()]);
        }
    }
}
