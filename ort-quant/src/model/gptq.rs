//! GPTQ in a model: which values need Hessians, and the weights that are quantized with them.

use std::collections::BTreeMap;
use std::sync::Arc;

use ort_core::onnx::Source;
use ort_core::{Error, ErrorKind, Result, Within};

use super::blocks::{self, BlockProduct};
use super::each_graph;
use super::options::{Mode, Quantizer};
use super::weight_reader::WeightReader;
use crate::feedback::{Curvature, Feedback, GptqOptions};
use crate::hessian::{Hessian, HessianInput, Hessians};
use crate::parallel;

impl Quantizer {
    /// The inputs of products whose weights become blocks, for [`HessianCalibration`]. They come in
    /// parts, of which each needs runs of its own: the Hessians of a part and their factors take
    /// about this many bytes at most. Inputs that need more by themselves are left out.
    ///
    /// [`HessianCalibration`]: crate::HessianCalibration
    ///
    /// # Errors
    ///
    /// The mode is another one, the model cannot be loaded, or a pattern matches no node.
    pub fn hessian_inputs(&self, source: &Source, memory: usize) -> Result<Vec<Vec<HessianInput>>> {
        let Mode::Blocks(options) = &self.mode else { return Err(not_blocks()) };
        let (mut work, nodes) = self.start(source)?;
        let mut groups = InputGroups::default();
        each_graph(&mut work, &nodes, &mut |work, nodes| {
            blocks::products(work, nodes, options, self)?.iter().for_each(|product| groups.add(product));
            work.draft.nodes.extend_from_slice(nodes);
            Ok(())
        })?;
        let mut parts: Vec<Vec<HessianInput>> = Vec::new();
        let mut room = 0;
        let inputs = groups.inputs.into_iter().filter(|input| !input.names.is_empty());
        for input in inputs.filter(|input| input.bytes() <= memory) {
            if parts.is_empty() || input.bytes() > room {
                parts.push(Vec::new());
                room = memory;
            }
            room -= input.bytes();
            if let Some(part) = parts.last_mut() {
                part.push(input);
            }
        }
        Ok(parts)
    }

    /// Quantizes the weights that are multiplied with these values, and keeps the results for
    /// [`Quantizer::quantize`]. Weights without a Hessian that can be factorized get the method of
    /// the options. Returns how many weights there were.
    ///
    /// # Errors
    ///
    /// The mode is another one, or a weight cannot be read, or has NaN or infinite elements.
    pub fn gptq(&mut self, source: &Source, hessians: Hessians, options: GptqOptions) -> Result<usize> {
        let Mode::Blocks(mode) = &self.mode else { return Err(not_blocks()) };
        let Hessians { places, all } = hessians;
        let feedbacks = factorized(all, options);
        let (mut work, nodes) = self.start(source)?;
        let mut reader = WeightReader::open(source)?;
        let mut done = BTreeMap::new();
        each_graph(&mut work, &nodes, &mut |work, nodes| {
            for product in blocks::products(work, nodes, mode, self)? {
                let place = places.get(&product.input);
                let Some(Some(feedback)) = place.and_then(|place| feedbacks.get(*place)) else { continue };
                let form = product.layer.form(&product.weight);
                if feedback.order().len() != product.layer.scheme.blocks.k || done.contains_key(&form) {
                    continue;
                }
                let job = product.layer.job(work, &product.weight)?;
                let weight = reader.tensor(work, &product.weight)?;
                let curvature = Curvature { importance: feedback.importance(), feedback: Some(feedback) };
                let place = || format!("weight '{}'", product.weight);
                let rounded = job.run_with(&weight, curvature).within(place)?;
                reader.release(&weight);
                done.insert(form, Arc::new(rounded));
            }
            work.draft.nodes.extend_from_slice(nodes);
            Ok(())
        })?;
        let count = done.len();
        if let Mode::Blocks(options) = &mut self.mode {
            options.tuned.done.extend(done);
        }
        Ok(count)
    }
}

pub(super) fn not_blocks() -> Error {
    let text = "GPTQ and AWQ quantize weights in blocks, and the mode is another one";
    Error::new(ErrorKind::InvalidArgument, text)
}

/// Factorizes Hessians, a few at a time. `None` for those that cannot be.
fn factorized(hessians: Vec<Hessian>, options: GptqOptions) -> Vec<Option<Feedback>> {
    let mut feedbacks: Vec<Option<Feedback>> = hessians.iter().map(|_| None).collect();
    let elements = hessians.iter().map(|hessian| hessian.channels().pow(2)).sum();
    let threads = parallel::threads_for(elements).min(hessians.len()).max(1);
    let mut jobs: Vec<Vec<(Hessian, &mut Option<Feedback>)>> = (0..threads).map(|_| Vec::new()).collect();
    for (index, pair) in hessians.into_iter().zip(&mut feedbacks).enumerate() {
        if let Some(job) = jobs.get_mut(index % threads) {
            job.push(pair);
        }
    }
    parallel::for_each(jobs, |job| {
        // Each Hessian is freed when its factor is there.
        for (hessian, feedback) in job {
            *feedback = Feedback::of(&hessian, options);
        }
    });
    feedbacks
}

/// Inputs by the weights that they are multiplied with.
#[derive(Default)]
struct InputGroups {
    /// One that became part of another has no names.
    inputs: Vec<HessianInput>,
    of_value: BTreeMap<String, usize>,
    of_weight: BTreeMap<(String, bool), usize>,
}

impl InputGroups {
    fn add(&mut self, product: &BlockProduct) {
        let weight = (product.weight.clone(), product.layer.is_transposed);
        let (one, other) = (self.of_value.get(&product.input), self.of_weight.get(&weight));
        let place = match (one.copied(), other.copied()) {
            (Some(one), Some(other)) => self.joined(one.min(other), one.max(other)),
            (Some(place), None) | (None, Some(place)) => place,
            (None, None) => {
                let channels = product.layer.scheme.blocks.k;
                self.inputs.push(HessianInput { names: Vec::new(), channels });
                self.inputs.len() - 1
            }
        };
        self.of_weight.insert(weight, place);
        if self.of_value.insert(product.input.clone(), place).is_none()
            && let Some(input) = self.inputs.get_mut(place)
        {
            input.names.push(product.input.clone());
        }
    }

    /// Makes two groups one.
    fn joined(&mut self, into: usize, from: usize) -> usize {
        if into != from {
            let names = self.inputs.get_mut(from).map(|input| std::mem::take(&mut input.names));
            if let Some(input) = self.inputs.get_mut(into) {
                input.names.extend(names.unwrap_or_default());
            }
            let places = self.of_value.values_mut().chain(self.of_weight.values_mut());
            places.filter(|place| **place == from).for_each(|place| *place = into);
        }
        into
    }
}
