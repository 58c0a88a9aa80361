//! Mixed precision: the weights that become blocks, and what each of their precisions costs and
//! harms.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use half::f16;
use ort_core::dtype::DType;
use ort_core::onnx::Source;
use ort_core::onnx::proto::NodeProto;
use ort_core::tensor::{Tensor, Value};
use ort_core::{Error, ErrorKind, Result, Within};

use super::block_values::BlockValues;
use super::blocks::{self, BlockLayer};
use super::draft::subgraphs;
use super::each_graph;
use super::gptq::not_blocks;
use super::options::{BlockOptions, Mode, Quantizer};
use super::precision::{Blocks, ErrorSearch, Precision, follow, measured, share};
use super::tuned::TunedWeights;
use super::weight_reader::WeightReader;
use super::weights::{Form, Job};
use super::work::{Work, title};
use crate::mixed::{Cost, Front};
use crate::noise::Noise;

/// The weights of a model that become blocks, each with its possible precisions.
pub struct MixedWeights<'s> {
    source: &'s Source,
    work: Work,
    weights: Vec<MixedWeight>,
    /// What quantizes each weight, without its bits.
    jobs: Vec<Job>,
    /// The most bytes that a replaced weight may take.
    memory: usize,
}

/// A weight, and what its precisions cost.
#[derive(Clone, Debug, PartialEq)]
pub struct MixedWeight {
    /// The name of the constant.
    pub name: String,
    /// The nodes that read it.
    pub nodes: Vec<String>,
    /// Its precisions. The last one is its own, in floating point.
    pub precisions: Vec<Precision>,
    /// Whether its errors were measured at the outputs, by a replacement of this weight alone.
    pub is_measured: bool,
}

/// Replaces a weight, and measures the noise of the outputs. `None` if it cannot be replaced.
pub type MeasureWeight<'m> = dyn FnMut(&str, Value) -> Result<Option<Noise>> + 'm;

impl Quantizer {
    /// Lists the weights that become blocks in the mode's bits or more.
    ///
    /// # Errors
    ///
    /// The mode is another one, the model cannot be loaded, a pattern matches no node, or no weight
    /// becomes blocks.
    pub fn mixed_weights<'s>(&self, source: &'s Source) -> Result<MixedWeights<'s>> {
        let Mode::Blocks(options) = &self.mode else { return Err(not_blocks()) };
        let options = BlockOptions { tuned: TunedWeights::default(), ..options.clone() };
        let (mut work, nodes) = self.start(source)?;
        let mut found = Found::default();
        each_graph(&mut work, &nodes, &mut |work, nodes| {
            let layers = blocks::layers(work, nodes, &options, self);
            for (node, layer) in nodes.iter().zip(layers) {
                if let Some(Ok(layer)) = layer {
                    found.add(work, node, layer, &options)?;
                }
            }
            work.draft.nodes.extend_from_slice(nodes);
            Ok(())
        })?;
        let mut reads = BTreeMap::new();
        count_reads(&work.draft.nodes, &mut reads);
        let Found { mut weights, jobs, reads: own_reads, .. } = found;
        for weight in &mut weights {
            // Readers that are no layers need the float weight beside its codes.
            let is_read_by_others = reads.get(&weight.name) > own_reads.get(&weight.name);
            let own = weight.precisions.last().map_or(0, |own| own.bytes);
            let coded = weight.precisions.iter_mut().filter(|precision| precision.blocks.is_some());
            coded.filter(|_| is_read_by_others).for_each(|precision| precision.bytes += own);
        }
        if weights.is_empty() {
            let text = "no weight of the model can become blocks";
            return Err(Error::new(ErrorKind::InvalidArgument, text)
                .help("run without a bound to see why each layer stays"));
        }
        Ok(MixedWeights { source, work, weights, jobs, memory: usize::MAX })
    }

    /// Gives each weight a precision: the index of one of [`MixedWeight::precisions`].
    ///
    /// # Errors
    ///
    /// The mode is another one.
    pub fn set_precisions(&mut self, weights: &[MixedWeight], chosen: &[usize]) -> Result<()> {
        let Mode::Blocks(options) = &mut self.mode else { return Err(not_blocks()) };
        let chosen = weights.iter().zip(chosen);
        let blocks = chosen.filter_map(|(weight, chosen)| {
            Some((weight.name.clone(), weight.precisions.get(*chosen)?.blocks))
        });
        // What was tuned before is for other precisions.
        options.tuned = TunedWeights { precisions: blocks.collect(), ..TunedWeights::default() };
        Ok(())
    }
}

/// The weights that were found so far.
#[derive(Default)]
struct Found {
    weights: Vec<MixedWeight>,
    jobs: Vec<Job>,
    places: BTreeMap<String, usize>,
    /// The forms of each weight: those that are written apart.
    forms: BTreeSet<(String, String)>,
    reads: BTreeMap<String, usize>,
}

impl Found {
    fn add(
        &mut self,
        work: &Work,
        node: &NodeProto,
        layer: BlockLayer,
        options: &BlockOptions,
    ) -> Result<()> {
        let Some(name) = node.input.get(layer.weight).cloned() else { return Ok(()) };
        let job = layer.job(work, &name)?;
        // A protected product has more bits than the others.
        let least = layer.scheme.blocks.bits.count().max(options.bits.count());
        // Rows of tables are read as they are: kernels have them with 4 bits or more.
        let least = if layer.is_product() { least } else { options.bits.count().max(4) };
        let mut precisions = Vec::new();
        for blocks in Blocks::choices(least, options.block_size) {
            if layer.with(blocks).refusal()?.is_none() {
                let bytes = with_blocks(&job, blocks).lengths()?.iter().sum::<usize>() as u64;
                precisions.push(Precision::new(Some(blocks), bytes));
            }
        }
        if precisions.is_empty() {
            return Ok(());
        }
        *self.reads.entry(name.clone()).or_default() += 1;
        let form = (name.clone(), format!("{} {:?}", layer.is_transposed, layer.scheme));
        let is_new = self.forms.insert(form);
        let Some(place) = self.places.get(&name) else {
            precisions.push(Precision::new(None, layer.before as u64));
            self.places.insert(name.clone(), self.weights.len());
            let nodes = vec![title(node)];
            self.weights.push(MixedWeight { name, nodes, precisions, is_measured: false });
            self.jobs.push(job);
            return Ok(());
        };
        let Some(weight) = self.weights.get_mut(*place) else { return Ok(()) };
        weight.nodes.push(title(node));
        // Only what all of its readers can have, at the bytes of all forms.
        weight.precisions.retain_mut(|known| {
            let other = precisions.iter().find(|other| other.blocks == known.blocks);
            known.bytes += other.filter(|_| is_new).map_or(0, |other| other.bytes);
            known.blocks.is_none() || other.is_some()
        });
        Ok(())
    }
}

/// Counts how often nodes and bodies read each value.
fn count_reads(nodes: &[NodeProto], reads: &mut BTreeMap<String, usize>) {
    for node in nodes {
        node.input.iter().for_each(|input| *reads.entry(input.clone()).or_default() += 1);
        for graph in subgraphs(node) {
            count_reads(&graph.node, reads);
            graph.output.iter().for_each(|output| *reads.entry(output.name().to_string()).or_default() += 1);
        }
    }
}

/// The job of a weight with these blocks.
fn with_blocks(job: &Job, blocks: Blocks) -> Job {
    let mut job = job.clone();
    if let Form::Blocks(scheme) = &mut job.form {
        *scheme = blocks.of(*scheme);
    }
    job
}

impl MixedWeights<'_> {
    /// How often weights are replaced to find all errors, if each can be replaced.
    pub fn replacements(&self, search: ErrorSearch) -> usize {
        self.weights.iter().map(|weight| measured(&weight.precisions, search).count()).sum()
    }

    /// Limits the memory that a replaced weight may take. The errors of larger ones are not
    /// measured.
    pub fn limit_memory(&mut self, bytes: usize) {
        self.memory = bytes;
    }

    /// The weights, in the order of their first readers.
    pub fn weights(&self) -> &[MixedWeight] {
        &self.weights
    }

    /// Finds the errors of all precisions. With `measure`, weights are replaced one at a time. An
    /// error that cannot be measured is in proportion to the relative noise of the weight, as
    /// without `measure` all are.
    ///
    /// # Errors
    ///
    /// A weight cannot be read or has NaN or infinite elements, or `measure` fails.
    pub fn find_errors(
        &mut self,
        search: ErrorSearch,
        mut measure: Option<&mut MeasureWeight<'_>>,
    ) -> Result<()> {
        let mut reader = WeightReader::open(self.source)?;
        for (weight, job) in self.weights.iter_mut().zip(&self.jobs) {
            let place = || format!("weight '{}'", job.weight.name());
            let tensor = reader.tensor(&self.work, &weight.name)?;
            let pages = reader.pages(&tensor);
            let wanted: Vec<usize> = measured(&weight.precisions, search).collect();
            let mut references: Vec<Precision> = Vec::new();
            for (index, precision) in weight.precisions.iter_mut().enumerate() {
                let Some(blocks) = precision.blocks else { continue };
                let job = with_blocks(job, blocks);
                let done = job.run(&tensor, None, pages.as_ref()).within(place)?;
                precision.noise = done.noise;
                // Both of them are there while the model runs.
                let replaced_bytes = done.results.iter().map(Vec::len).sum::<usize>() + tensor.byte_count();
                let is_wanted = wanted.contains(&index) && replaced_bytes <= self.memory;
                let Some(measure) = measure.as_mut().filter(|_| is_wanted) else { continue };
                let replaced = decoded(&job, &done.results, &tensor)?;
                if let Some(noise) = measure(&weight.name, replaced.into()).within(place)? {
                    precision.error = share(noise);
                    references.push(*precision);
                }
            }
            reader.release(&tensor);
            weight.is_measured = !references.is_empty();
            follow(&mut weight.precisions, &references);
        }
        self.estimate_others();
        Ok(())
    }

    /// Estimates the errors that were not measured.
    fn estimate_others(&mut self) {
        let (mut errors, mut noises) = (0.0, 0.0);
        for precision in
            self.weights.iter().filter(|weight| weight.is_measured).flat_map(|weight| &weight.precisions)
        {
            errors += precision.error;
            noises += share(precision.noise);
        }
        let factor = if noises > 0.0 { errors / noises } else { 1.0 };
        for weight in self.weights.iter_mut().filter(|weight| !weight.is_measured) {
            weight
                .precisions
                .iter_mut()
                .for_each(|precision| precision.error = factor * share(precision.noise));
        }
    }

    /// The assignments that no other beats.
    pub fn front(&self) -> Front {
        let costs = |weight: &MixedWeight| {
            let precisions = weight.precisions.iter();
            precisions.map(|Precision { bytes, error, .. }| Cost { bytes: *bytes, error: *error }).collect()
        };
        Front::of(&self.weights.iter().map(costs).collect::<Vec<_>>())
    }
}

/// The float weight that results of quantization stand for.
fn decoded(job: &Job, results: &[Vec<u8>], original: &Tensor) -> Result<Tensor> {
    let Form::Blocks(scheme) = &job.form else { return Err(not_blocks()) };
    let bytes = match original.dtype() {
        DType::F16 => BlockValues::of_results::<f16>(scheme, results).bytes::<f16>(job.is_transposed),
        _ => BlockValues::of_results::<f32>(scheme, results).bytes::<f32>(job.is_transposed),
    };
    Tensor::from_bytes(original.dtype(), original.shape(), Bytes::from(bytes))
}
