//! Layers that are quantized or left in floating point together, for searches over them.

use std::collections::{BTreeMap, BTreeSet};

use ort_core::Result;
use ort_core::onnx::Source;

use super::options::{Mode, Quantizer};
use super::select::NodePattern;
use super::work::{Outcome, is_standard, title};

/// Layers of the model's graph that read one value. Its codes and its smoothing are theirs alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerUnit {
    /// The value.
    pub input: String,
    /// The names of the layers.
    pub layers: Vec<String>,
    /// The numbers of their nodes in the file.
    nodes: Vec<usize>,
}

impl Quantizer {
    /// The layers that the mode quantizes, in the order of the file. Those of bodies are in none.
    ///
    /// # Errors
    ///
    /// As [`Quantizer::quantize`].
    pub fn units(&self, source: &Source) -> Result<Vec<LayerUnit>> {
        let quantization = self.quantize(source)?;
        let quantized =
            quantization.layers().iter().filter(|layer| matches!(layer.outcome, Outcome::Quantized { .. }));
        let quantized: BTreeSet<&str> = quantized.map(|layer| layer.node.as_str()).collect();
        let (work, nodes) = self.start(source)?;
        let mut units: Vec<LayerUnit> = Vec::new();
        let mut places: BTreeMap<&str, usize> = BTreeMap::new();
        for (index, node) in nodes.iter().enumerate() {
            let name = title(node);
            let is_allowed = self.allows(work.place(index), node).is_ok();
            let Some(input) = node.input.first().filter(|_| is_allowed && quantized.contains(name.as_str()))
            else {
                continue;
            };
            // The first input of a Gather is its table, which others may read as well.
            let is_known = places.get(input.as_str()).filter(|_| !is_standard(node, "Gather"));
            match is_known.and_then(|place| units.get_mut(*place)) {
                Some(unit) => {
                    unit.layers.push(name);
                    unit.nodes.push(index);
                }
                None => {
                    places.insert(input, units.len());
                    units.push(LayerUnit { input: input.clone(), layers: vec![name], nodes: vec![index] });
                }
            }
        }
        Ok(units)
    }

    /// The same quantizer, which leaves these layers in floating point.
    #[must_use]
    pub fn without<'u>(&self, units: impl IntoIterator<Item = &'u LayerUnit>) -> Quantizer {
        let mut other = self.clone();
        for unit in units {
            other.exclude.extend(unit.nodes.iter().map(|node| NodePattern::Index(*node)));
            match &mut other.mode {
                Mode::Static(options) => drop(options.smoothing.remove(&unit.input)),
                Mode::Blocks(options) => drop(options.tuned.smoothing.remove(&unit.input)),
                Mode::Dynamic(_) | Mode::Half(_) => {}
            }
        }
        other
    }
}
