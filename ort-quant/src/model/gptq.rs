//! GPTQ in a model: which values need Hessians, and the weights that are quantized with them.

use std::collections::BTreeMap;
use std::sync::Arc;

use ort_core::onnx::Source;
use ort_core::{Error, ErrorKind, Result, Within};

use super::blocks::{self, BlockProduct};
use super::each_graph;
use super::input_groups::{InputGroups, parts};
use super::options::{Mode, Quantizer};
use super::tuned::TunedWeight;
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
            for BlockProduct { input, weight, layer, .. } in blocks::products(work, nodes, options, self)? {
                let weight = (weight, layer.is_transposed);
                groups.add(input, weight, layer.scheme.blocks.k);
            }
            work.draft.nodes.extend_from_slice(nodes);
            Ok(())
        })?;
        let inputs = groups.into_groups().map(|(names, channels)| HessianInput { names, channels });
        Ok(parts(inputs.filter(|input| input.bytes() <= memory), memory, HessianInput::bytes))
    }

    /// Quantizes the weights that are multiplied with these values, and keeps the results for
    /// [`Quantizer::quantize`]. Weights without a Hessian that can be factorized get the method of
    /// the options. Returns how many weights there were.
    ///
    /// # Errors
    ///
    /// The mode is another one, or a weight cannot be read, or has NaN or infinite elements.
    pub fn gptq(&mut self, source: &Source, hessians: Hessians, options: GptqOptions) -> Result<usize> {
        Ok(self.tune(source, hessians, Some(options))?.quantized)
    }

    /// Quantizes the weights that are multiplied with these values by the method of the options,
    /// and adds a bias if their errors change the mean of the outputs by more than 1 %. Returns how
    /// many weights have one.
    ///
    /// # Errors
    ///
    /// As [`Quantizer::gptq`].
    pub fn correct_bias(&mut self, source: &Source, hessians: Hessians) -> Result<usize> {
        Ok(self.tune(source, hessians, None)?.corrected)
    }

    fn tune(&mut self, source: &Source, hessians: Hessians, gptq: Option<GptqOptions>) -> Result<Count> {
        let Mode::Blocks(mode) = &self.mode else { return Err(not_blocks()) };
        let Hessians { places, all } = hessians;
        let statistics = all_statistics(all, gptq);
        let (mut work, nodes) = self.start(source)?;
        let mut reader = WeightReader::open(source)?;
        let mut done = BTreeMap::new();
        each_graph(&mut work, &nodes, &mut |work, nodes| {
            for product in blocks::products(work, nodes, mode, self)? {
                let BlockProduct { input, weight, layer, .. } = &product;
                let form = layer.form(weight);
                let found = places.get(input).and_then(|place| statistics.get(*place));
                let found = found.and_then(Option::as_ref).filter(|_| !done.contains_key(&form));
                let Some(found) = found.filter(|found| found.channels() == layer.scheme.blocks.k) else {
                    continue;
                };
                let job = layer.job(work, weight)?;
                let tensor = reader.tensor(work, weight)?;
                let rounded = job.run_with(&tensor, found.curvature(), reader.pages(&tensor).as_ref());
                let mut rounded = rounded.within(|| format!("weight '{weight}'"))?;
                reader.release(&tensor);
                let is_corrected = !found.means.is_empty() && rounded.shift.is_significant();
                if !found.means.is_empty() && !is_corrected {
                    // It is the last one.
                    rounded.results.pop();
                }
                let label = match (gptq.is_some(), is_corrected) {
                    (true, true) => ", gptq, bias corrected",
                    (true, false) => ", gptq",
                    (false, true) => ", bias corrected",
                    (false, false) => "",
                };
                done.insert(form, TunedWeight { done: Arc::new(rounded), label, is_corrected });
            }
            work.draft.nodes.extend_from_slice(nodes);
            Ok(())
        })?;
        let corrected = done.values().filter(|tuned| tuned.is_corrected).count();
        let count = Count { quantized: done.len(), corrected };
        if let Mode::Blocks(options) = &mut self.mode {
            options.tuned.done.extend(done);
        }
        Ok(count)
    }
}

/// The weights that were tuned.
struct Count {
    quantized: usize,
    corrected: usize,
}

pub(super) fn not_blocks() -> Error {
    let text = "GPTQ, AWQ and bias correction tune weights in blocks, and the mode is another one";
    Error::new(ErrorKind::InvalidArgument, text)
}

/// What is known of the channels of an input.
struct ChannelStatistics {
    feedback: Option<Feedback>,
    /// Empty if no bias is wanted.
    means: Vec<f32>,
    /// The mean squares.
    energies: Vec<f32>,
}

impl ChannelStatistics {
    /// Those of GPTQ, or of a bias correction alone. `None` if the Hessian says nothing, or cannot
    /// be factorized.
    fn of(hessian: &Hessian, gptq: Option<GptqOptions>) -> Option<ChannelStatistics> {
        if !hessian.is_usable() {
            return None;
        }
        let corrects_bias = gptq.is_none_or(|options| options.corrects_bias);
        let feedback = match gptq {
            Some(options) if corrects_bias => Some(Feedback::of(&hessian.centered(), options)?),
            Some(options) => Some(Feedback::of(hessian, options)?),
            None => None,
        };
        let means = hessian.means().filter(|_| corrects_bias).map(|mean| mean as f32).collect();
        let rows = hessian.rows().max(1) as f64;
        let energies = hessian.diagonal().map(|energy| (energy / rows) as f32).collect();
        Some(ChannelStatistics { feedback, means, energies })
    }

    fn channels(&self) -> usize {
        self.energies.len()
    }

    fn curvature(&self) -> Curvature<'_> {
        let importance = self.feedback.as_ref().map_or(&[][..], Feedback::importance);
        let (means, energies) = (&self.means[..], &self.energies[..]);
        Curvature { importance, feedback: self.feedback.as_ref(), means, energies }
    }
}

/// The statistics of inputs, a few at a time.
fn all_statistics(hessians: Vec<Hessian>, gptq: Option<GptqOptions>) -> Vec<Option<ChannelStatistics>> {
    let mut statistics: Vec<Option<ChannelStatistics>> = hessians.iter().map(|_| None).collect();
    let elements = hessians.iter().map(|hessian| hessian.channels().pow(2)).sum();
    let threads = parallel::threads_for(elements).min(hessians.len()).max(1);
    let mut jobs: Vec<Vec<(Hessian, &mut Option<ChannelStatistics>)>> =
        (0..threads).map(|_| Vec::new()).collect();
    for (index, pair) in hessians.into_iter().zip(&mut statistics).enumerate() {
        if let Some(job) = jobs.get_mut(index % threads) {
            job.push(pair);
        }
    }
    parallel::for_each(jobs, |job| {
        // Each Hessian is freed when its factor is there.
        for (hessian, statistics) in job {
            *statistics = ChannelStatistics::of(&hessian, gptq);
        }
    });
    statistics
}
