//! Weights that are pruned while the file is written.

use std::sync::Arc;

use crate::elements::{Elements, each_chunk};
use crate::noise::Noise;
use crate::prune::{MatrixView, Sparsity, Zeros, prune_by_score};
use crate::weight::Weight;

/// How a weight is pruned.
#[derive(Clone, Debug)]
pub(super) struct PruneForm {
    pub(super) view: MatrixView,
    pub(super) sparsity: Sparsity,
    /// What the columns count, for each group of rows; empty for magnitudes alone.
    pub(super) factors: Arc<[Vec<f32>]>,
}

/// A pruned weight.
pub(super) struct PrunedElements {
    pub(super) bytes: Vec<u8>,
    pub(super) noise: Noise,
    pub(super) zeros: Zeros,
}

impl PruneForm {
    /// Prunes elements that are finite.
    pub(super) fn run<E: Elements>(&self, elements: &E) -> PrunedElements {
        let mut values = all(elements);
        prune_by_score(&mut values, &self.view, self.sparsity, &self.factors);
        PrunedElements::of(elements, &values)
    }
}

impl PrunedElements {
    /// The result for elements that became these values.
    pub(super) fn of<E: Elements>(elements: &E, values: &[f32]) -> PrunedElements {
        let (mut noise, mut zeros) = (Noise::default(), Zeros::default());
        let mut bytes = Vec::with_capacity(values.len() * size_of::<E::Element>());
        let mut start = 0;
        each_chunk(elements, |given| {
            let values = values.get(start..start + given.len()).unwrap_or_default();
            let narrow: Vec<E::Element> = values.iter().map(|value| E::Element::narrow(*value)).collect();
            for (value, became) in given.iter().zip(&narrow) {
                noise.add(*value, became.wide());
                zeros.add(*value, became.wide());
            }
            bytes.extend(E::Element::bytes(&narrow));
            start += given.len();
        });
        PrunedElements { bytes, noise, zeros }
    }
}

/// All elements in float32.
pub(super) fn all<E: Elements>(elements: &E) -> Vec<f32> {
    let mut values = vec![0.0; elements.count()];
    elements.widen(0, &mut values);
    values
}
