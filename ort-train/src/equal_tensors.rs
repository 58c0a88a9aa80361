//! Deduplication of tensors by content, up to a transpose.
//!
//! The contents are keys of an ordered map. A matrix and its transpose have the same key, because
//! the key is in a canonical orientation. So each tensor takes O(log n) comparisons, and most
//! comparisons end at the first element.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ir::ValueId;
use ort_core::tensor::Tensor;

/// Two tensors with the same content.
pub(crate) struct Pair {
    pub(crate) first: ValueId,
    pub(crate) second: ValueId,
    /// Whether `second` is the transpose of `first`.
    pub(crate) transposed: bool,
}

/// Pairs each tensor that equals an earlier one with the first of its content. Only floats with
/// more than one element that `keep` accepts take part.
pub(crate) fn equal_pairs(candidates: &[(ValueId, Tensor)], keep: fn(&Content<'_>) -> bool) -> Vec<Pair> {
    let mut known: BTreeMap<Content<'_>, ValueId> = BTreeMap::new();
    let mut pairs = Vec::new();
    for (second, tensor) in candidates {
        let Some(content) = Content::of(tensor).filter(keep).map(Content::oriented) else { continue };
        let is_turned = content.is_turned;
        match known.entry(content) {
            Entry::Vacant(entry) => {
                entry.insert(*second);
            }
            Entry::Occupied(entry) => {
                let transposed = entry.key().is_turned != is_turned;
                pairs.push(Pair { first: *entry.get(), second: *second, transposed });
            }
        }
    }
    pairs
}

/// The content of a tensor as a map key. Equality is bitwise, and a matrix equals its transpose.
pub(crate) struct Content<'t> {
    dtype: DType,
    /// The bytes of an element.
    size: usize,
    /// The shape in canonical orientation.
    shape: Vec<usize>,
    /// Whether the canonical orientation is that of the transpose.
    is_turned: bool,
    bytes: &'t [u8],
}

impl<'t> Content<'t> {
    /// Returns `None` for types that cannot be trained, and for single elements.
    fn of(tensor: &'t Tensor) -> Option<Content<'t>> {
        let dtype = tensor.dtype();
        let size = dtype.byte_size().filter(|_| TypeSet::FLOATS.contains(dtype))?;
        let bytes = tensor.view().bytes().ok().filter(|bytes| bytes.len() > size)?;
        Some(Content { dtype, size, shape: tensor.shape().to_vec(), is_turned: false, bytes })
    }

    /// Brings the content into canonical orientation: at most as many rows as columns, and for a
    /// square matrix the orientation that is less in byte order.
    fn oriented(mut self) -> Content<'t> {
        if let &[rows, columns] = self.shape.as_slice() {
            self.is_turned = rows > columns || rows == columns && self.is_less_transposed(rows);
            self.shape.sort_unstable();
        }
        self
    }

    /// Whether any two elements differ. All are equal if the tensor equals itself shifted by one
    /// element.
    pub(crate) fn varies(&self) -> bool {
        let shifted = self.bytes.get(self.size..);
        shifted != self.bytes.get(..self.bytes.len() - self.size)
    }

    /// Whether the transpose of a square matrix is less than the matrix in byte order.
    fn is_less_transposed(&self, rows: usize) -> bool {
        // The diagonal is its own mirror image, and what is below it is compared from above.
        let places = (0..rows).flat_map(|row| (row + 1..rows).map(move |column| (row, column)));
        let mut pairs =
            places.map(|(row, column)| [column * rows + row, row * rows + column].map(|at| self.stored(at)));
        pairs.find(|[transposed, own]| transposed != own).is_some_and(|[transposed, own]| transposed < own)
    }

    /// The bytes of the element at a position in memory.
    fn stored(&self, place: usize) -> &'t [u8] {
        self.bytes.get(place * self.size..(place + 1) * self.size).unwrap_or_default()
    }

    /// The elements in canonical order.
    fn elements(&self) -> impl Iterator<Item = &'t [u8]> + '_ {
        let (rows, columns) = match self.shape.as_slice() {
            // The memory holds the other orientation: [columns, rows].
            &[rows, columns] if self.is_turned => (rows, columns),
            _ => (1, self.bytes.len() / self.size),
        };
        (0..rows).flat_map(move |row| (0..columns).map(move |column| self.stored(column * rows + row)))
    }
}

impl Ord for Content<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        let kinds = self.dtype.cmp(&other.dtype).then_with(|| self.shape.cmp(&other.shape));
        // Byte order, so that two contents that are both stored in canonical order take one
        // `memcmp`.
        kinds.then_with(|| match self.is_turned || other.is_turned {
            false => self.bytes.cmp(other.bytes),
            true => self.elements().cmp(other.elements()),
        })
    }
}

impl PartialOrd for Content<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Content<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Content<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use ort_core::dtype::{Element, native};

    fn tensor<T: Element>(shape: &[usize], elements: &[T]) -> Tensor {
        Tensor::from_slice(shape, elements).unwrap()
    }

    /// The pairs, by index into `tensors`.
    fn pairs(tensors: &[Tensor], keep: fn(&Content<'_>) -> bool) -> Vec<(u32, u32, bool)> {
        let candidates: Vec<(ValueId, Tensor)> = (0..).map(ValueId).zip(tensors.iter().cloned()).collect();
        let found = equal_pairs(&candidates, keep).into_iter();
        found.map(|pair| (pair.first.0, pair.second.0, pair.transposed)).collect()
    }

    #[test]
    fn a_matrix_is_found_as_it_is_and_transposed() {
        let wide = tensor(&[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let tall = tensor(&[3, 2], &[1.0f32, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let square = tensor(&[2, 2], &[0.0f32, 1.0, 2.0, 0.0]);
        let turned = tensor(&[2, 2], &[0.0f32, 2.0, 1.0, 0.0]);
        let symmetric = tensor(&[2, 2], &[0.0f32, 3.0, 3.0, 0.0]);
        let (row, column) = (tensor(&[1, 2], &[1.0f32, 2.0]), tensor(&[2, 1], &[1.0f32, 2.0]));
        let all = |_: &Content<'_>| true;
        for (first, second, transposed) in [
            (&wide, &wide, false),
            (&tall, &tall, false),
            (&wide, &tall, true),
            (&tall, &wide, true),
            (&square, &square, false),
            (&turned, &turned, false),
            (&square, &turned, true),
            (&turned, &square, true),
            (&symmetric, &symmetric, false),
            (&row, &column, true),
        ] {
            let found = pairs(&[first.clone(), second.clone()], all);
            assert_eq!(found, [(0, 1, transposed)], "{:?} and {:?}", first.shape(), second.shape());
        }
        let several = [square.clone(), wide, turned, tall, square];
        assert_eq!(pairs(&several, all), [(0, 2, true), (1, 3, true), (0, 4, false)]);
    }

    #[test]
    fn others_are_not_equal() {
        let numbers = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let others = [
            tensor(&[2, 3], &numbers),
            tensor(&[6], &numbers),
            tensor(&[1, 2, 3], &numbers),
            tensor(&[1, 3, 2], &numbers),
            // The same bytes with other rows, and as integers.
            tensor(&[3, 2], &numbers),
            tensor(&[2, 3], &numbers.map(f32::to_bits)),
            tensor(&[1], &[1.0f32]),
            tensor(&[1], &[1.0f32]),
        ];
        assert!(pairs(&others, |_| true).is_empty());
    }

    #[test]
    fn what_holds_one_number_does_not_vary_whatever_its_type() {
        let [single, double] = [tensor(&[4], &[1.0f32; 4]), tensor(&[4], &[1.0f64; 4])];
        let half = tensor(&[4], &[1.0f32, 1.5, 1.0, 1.5].map(native::F16::from_f32));
        let all = [single.clone(), single, double.clone(), double, half.clone(), half];
        assert_eq!(pairs(&all, |content| content.varies()), [(4, 5, false)]);
        assert_eq!(pairs(&all, |_| true).len(), 3);
    }
}
