//! AWQ in a model: inputs of products whose division folds into constants.

use std::collections::BTreeMap;
use std::sync::Arc;

use ort_core::Result;
use ort_core::onnx::Source;
use ort_core::tensor::Tensor;

use super::blocks::{self, BlockLayer, BlockProduct};
use super::gptq::not_blocks;
use super::options::{Mode, Quantizer};
use super::smoothed::Smoothed;
use super::smoothing::{folded, groups};
use super::tuned::TunedWeights;
use super::weight_reader::WeightReader;
use crate::awq::AwqSearch;
use crate::elements::{Elements, RawElements};
use crate::grid::BlockQuantizer;
use crate::hessian::Hessians;
use crate::tile::{Lanes, TILE};

/// The columns of a weight by which factors are judged.
const COLUMNS: usize = 2 * TILE;

impl Quantizer {
    /// Finds factors for the weights that are multiplied with these values, for
    /// [`Quantizer::quantize`]. An input is divided only if the constants before it can take the
    /// division. Of other inputs, the Hessian says how much errors in the rows count. Returns how
    /// many inputs are divided.
    ///
    /// # Errors
    ///
    /// The mode is another one, or a weight cannot be read.
    pub fn awq(&mut self, source: &Source, hessians: &Hessians) -> Result<usize> {
        let Mode::Blocks(options) = &self.mode else { return Err(not_blocks()) };
        // Values of bodies are not divided, as in `rewrite`.
        let (work, nodes) = self.start(source)?;
        let products = blocks::products(&work, &nodes, options, self)?;
        let products: BTreeMap<usize, BlockProduct> =
            products.into_iter().map(|product| (product.node, product)).collect();
        let mut reader = WeightReader::open(source)?;
        let mut tuned = TunedWeights::default();
        for (name, group) in groups(&work, &nodes, self) {
            let readers: Option<Vec<&BlockProduct>> =
                group.products.iter().map(|index| products.get(index)).collect();
            let hessian = hessians.get(&name).filter(|hessian| hessian.is_usable());
            let hessian = hessian.filter(|hessian| hessian.channels() == group.channels);
            let (Some(readers), Some(hessian)) = (readers, hessian) else { continue };
            let mut search = AwqSearch::new(hessian);
            if !group.constants.is_empty() {
                for product in readers {
                    let weight = reader.tensor(&work, &product.weight)?;
                    for columns in sampled(&weight, &product.layer) {
                        search.add(&product.layer.scheme, &columns);
                    }
                    reader.release(&weight);
                }
            }
            let (scales, importance) = search.best();
            tuned.importance.insert(name.clone(), importance.into());
            if let Some(scales) = scales {
                let folded = folded(&mut reader, (&work, &nodes), &group.constants, &scales)?;
                tuned.smoothing.insert(name, Smoothed { scales: Arc::from(scales), folded });
            }
        }
        let count = tuned.smoothing.len();
        if let Mode::Blocks(options) = &mut self.mode {
            options.tuned.smoothing.extend(tuned.smoothing);
            options.tuned.importance.extend(tuned.importance);
        }
        Ok(count)
    }
}

/// Columns of a float32 weight, evenly spread over it.
fn sampled(weight: &Tensor, layer: &BlockLayer) -> Vec<Vec<Lanes>> {
    let BlockQuantizer { k, n, .. } = layer.scheme.blocks;
    let elements = RawElements::<f32>::new(weight.bytes().map(|bytes| &bytes[..]).unwrap_or_default());
    let count = n.min(COLUMNS);
    let columns: Vec<usize> = (0..count).map(|index| index * n / count).collect();
    let tile = |columns: &[usize]| {
        let mut rows = vec![[0.0; TILE]; k];
        for (row, values) in rows.iter_mut().enumerate() {
            for (column, value) in columns.iter().zip(values) {
                let place = if layer.is_transposed { column * k + row } else { row * n + column };
                elements.widen(place, std::slice::from_mut(value));
            }
        }
        rows
    };
    columns.chunks(TILE).map(tile).collect()
}
