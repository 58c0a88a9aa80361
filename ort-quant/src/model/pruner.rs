//! Pruning of models: which layers, with which statistics of their inputs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use half::f16;
use ort_core::dtype::DType;
use ort_core::onnx::Source;
use ort_core::onnx::proto::TensorProto;
use ort_core::{Error, ErrorKind, Result, Within};

use super::draft::Part;
use super::input_groups::{InputGroups, parts};
use super::prunable::{PrunableLayer, PrunableWeight, Survey};
use super::prune_form::{PruneForm, PrunedElements, all};
use super::pruned::{OutputErrors, PruneOutcome, PrunedLayer, Pruning};
use super::select::{NodePattern, Selection};
use super::weight_reader::WeightReader;
use super::weights::{Done, Form, Job, check_finite};
use super::work::Work;
use super::{each_graph, start};
use crate::elements::{Elements, RawElements};
use crate::feedback::{Feedback, GptqOptions};
use crate::prune::{
    GroupStatistics, OutputEnergy, PruneInput, PruneMethod, PruneScope, PruneStatistics, Sparsity,
    prune_by_score, prune_with_update, removed,
};

/// How a model is pruned.
#[derive(Clone, Debug)]
pub struct Pruner {
    /// How the elements are chosen.
    pub method: PruneMethod,
    /// How many are removed.
    pub sparsity: Sparsity,
    /// If there are any, other nodes stay as they are.
    pub only: Vec<NodePattern>,
    /// Nodes that stay as they are.
    pub exclude: Vec<NodePattern>,
    /// What [`Pruner::observe`] found; nothing by default.
    pub tuning: PruneTuning,
}

/// What samples say about the weights of a model.
#[derive(Clone, Debug, Default)]
pub struct PruneTuning {
    weights: BTreeMap<String, TunedWeight>,
}

/// What samples say about a weight.
#[derive(Clone, Debug)]
struct TunedWeight {
    method: String,
    factors: Arc<[Vec<f32>]>,
    /// The pruned weight, if it takes more than factors to compute it.
    ready: Option<Arc<Done>>,
    errors: Option<OutputErrors>,
}

/// The largest group of a pattern.
const LARGEST_GROUP: usize = 64;

/// The elements of a weight, and the layers that read it.
struct Read<'r, E> {
    weight: &'r PrunableWeight,
    elements: &'r E,
    statistics: Option<&'r [GroupStatistics]>,
}

impl Pruner {
    /// The inputs of the layers that are pruned, for [`PruneCalibration`]. They come in parts, of
    /// which each needs runs of its own: the Hessians of a part and their factors take about this
    /// many bytes at most. Of inputs that need more by themselves, only the energies of their
    /// channels are observed.
    ///
    /// [`PruneCalibration`]: crate::PruneCalibration
    ///
    /// # Errors
    ///
    /// An option is invalid, the model cannot be loaded, or a pattern matches no node.
    pub fn inputs(&self, source: &Source, memory: usize) -> Result<Vec<Vec<PruneInput>>> {
        let (_, survey) = self.survey(source)?;
        let mut groups = InputGroups::default();
        for (name, weight) in &survey.weights {
            let Ok(PrunableWeight { layer, inputs, .. }) = weight else { continue };
            for input in inputs.iter().flatten() {
                groups.add(input.clone(), name.clone(), (layer.view.column_count(), layer.groups));
            }
        }
        let inputs = groups.into_groups().map(|(values, (columns, groups))| {
            let input = PruneInput { values, columns, groups, has_hessian: false };
            PruneInput { has_hessian: input.bytes() <= memory, ..input }
        });
        let bytes = |input: &PruneInput| if input.has_hessian { input.bytes() } else { 0 };
        Ok(parts(inputs, memory, bytes))
    }

    /// Takes what a calibration says about the weights, for [`Pruner::prune`]. Returns how many
    /// weights the method chooses by it; others are pruned by magnitude.
    ///
    /// # Errors
    ///
    /// A weight cannot be read, or has NaN or infinite elements.
    pub fn observe(&mut self, source: &Source, statistics: &PruneStatistics) -> Result<usize> {
        let (work, survey) = self.survey(source)?;
        let mut reader = WeightReader::open(source)?;
        let mut count = 0;
        for (name, weight) in &survey.weights {
            let Ok(weight) = weight else { continue };
            let mut inputs = weight.inputs.iter().flatten();
            let found = inputs.find_map(|(name, view)| statistics.get(name, view));
            if found.is_none() || self.tuning.weights.contains_key(name) {
                continue;
            }
            let tensor = reader.tensor(&work, name)?;
            let bytes = tensor.bytes().map(|bytes| &bytes[..]).unwrap_or_default();
            let tuned = match tensor.dtype() {
                DType::F16 => {
                    let elements = &RawElements::<f16>::new(bytes);
                    self.tuned(&Read { weight, elements, statistics: found })
                }
                _ => {
                    let elements = &RawElements::<f32>::new(bytes);
                    self.tuned(&Read { weight, elements, statistics: found })
                }
            };
            let (tuned, is_chosen) = tuned.within(|| format!("weight '{name}'"))?;
            reader.release(&tensor);
            count += usize::from(is_chosen);
            self.tuning.weights.insert(name.clone(), tuned);
        }
        Ok(count)
    }

    /// Decides what becomes of each layer.
    ///
    /// # Errors
    ///
    /// An option is invalid, the model cannot be loaded, a pattern matches no node, or no layer can
    /// be pruned.
    pub fn prune<'s>(&self, source: &'s Source) -> Result<Pruning<'s>> {
        let (mut work, survey) = self.survey(source)?;
        let bytes_before = source.bytes().len() + work.draft.external_bytes();
        for (name, weight) in &survey.weights {
            if let Ok(weight) = weight {
                self.replace(&mut work, name, &weight.layer)?;
            }
        }
        let layers = self.rows(&survey);
        if !layers.iter().any(|layer| matches!(layer.outcome, PruneOutcome::Pruned { .. })) {
            return Err(nothing_to_prune(&layers));
        }
        // Every constant that was read still is, but for those that are replaced.
        work.draft.drop_unread(&BTreeSet::new());
        Ok(Pruning { source, draft: work.draft, layers, bytes_before })
    }

    /// The model in editing, with the weights of bodies in its graph, and its layers.
    fn survey(&self, source: &Source) -> Result<(Work, Survey)> {
        self.check()?;
        let selection = Selection { only: &self.only, exclude: &self.exclude };
        let (mut work, nodes) = start(source, 1, selection)?;
        let mut survey = Survey::default();
        each_graph(&mut work, &nodes, &mut |work, nodes| {
            survey.add(work, nodes, selection, self.sparsity);
            work.draft.nodes.extend_from_slice(nodes);
            Ok(())
        })?;
        survey.finish();
        Ok((work, survey))
    }

    fn check(&self) -> Result<()> {
        let wrong = match self.sparsity {
            Sparsity::Share { share, .. } if (0.0..=1.0).contains(&share) => return Ok(()),
            Sparsity::Pattern { kept, of } if 0 < kept && kept < of && of <= LARGEST_GROUP => return Ok(()),
            Sparsity::Share { share, .. } => format!("the share {share} of zeros is not between 0 and 1"),
            Sparsity::Pattern { kept, of } => {
                format!("the pattern {kept}:{of} does not keep a part of a group of up to {LARGEST_GROUP}")
            }
        };
        Err(Error::new(ErrorKind::InvalidArgument, wrong)
            .help("use a share such as 0.5 or a pattern such as 2:4"))
    }

    /// Puts the pruned weight in the place of the original, under its name.
    fn replace(&self, work: &mut Work, name: &str, layer: &PrunableLayer) -> Result<()> {
        let missing = || Error::new(ErrorKind::Fail, format!("there is no constant '{name}'"));
        let weight = work.draft.constant(name).cloned().ok_or_else(missing)?;
        let tuned = self.tuning.weights.get(name);
        let factors = tuned.map_or_else(|| Arc::from(Vec::new()), |tuned| tuned.factors.clone());
        let header = TensorProto {
            name: Some(name.to_string()),
            data_type: weight.data_type,
            dims: weight.dims.clone(),
            doc_string: weight.doc_string.clone(),
            metadata_props: weight.metadata_props.clone(),
            ..TensorProto::default()
        };
        work.draft.parts.push(Part { header, from: Some((work.draft.jobs.len(), 0)) });
        work.draft.jobs.push(Job {
            weight,
            codes: name.to_string(),
            is_transposed: false,
            shape: layer.shape.clone(),
            is_half: layer.is_half,
            has_one_point: false,
            scales: None,
            bias: None,
            importance: None,
            ready: tuned.and_then(|tuned| tuned.ready.clone()),
            form: Form::Pruned(PruneForm { view: layer.view, sparsity: self.sparsity, factors }),
        });
        work.draft.replace(name);
        Ok(())
    }

    /// The rows of the report.
    fn rows(&self, survey: &Survey) -> Vec<PrunedLayer> {
        let mut seen = BTreeSet::new();
        let rows = survey.layers.iter().map(|layer| {
            let kept = |reason: &String| PruneOutcome::Kept { reason: reason.clone() };
            let found = layer.weight.as_ref().map(|name| (name, survey.weights.get(name)));
            let outcome = match found {
                Err(reason) | Ok((_, Some(Err(reason)))) => kept(reason),
                Ok((_, None)) => kept(&"its weight is computed".to_string()),
                Ok((name, Some(Ok(weight)))) => {
                    let tuned = self.tuning.weights.get(name);
                    PruneOutcome::Pruned {
                        weight: name.clone(),
                        is_shared: !seen.insert(name),
                        method: tuned.map_or_else(|| self.untuned(weight), |tuned| tuned.method.clone()),
                        bytes: weight.layer.bytes(),
                        removed: self.removed(&weight.layer),
                        errors: tuned.and_then(|tuned| tuned.errors),
                    }
                }
            };
            let (node, operator) = (layer.node.clone(), layer.operator.clone());
            PrunedLayer { node, operator, shape: layer.shape.clone(), outcome }
        });
        rows.collect()
    }

    /// The method of a weight about which samples say nothing.
    fn untuned(&self, weight: &PrunableWeight) -> String {
        let reason = weight.inputs.iter().find_map(|input| input.as_ref().err());
        match (self.method, reason) {
            (PruneMethod::Magnitude, _) => "magnitude".to_string(),
            (_, Some(reason)) => format!("magnitude: {reason}"),
            (_, None) => NO_STATISTICS.to_string(),
        }
    }

    /// The elements that are removed.
    fn removed(&self, layer: &PrunableLayer) -> usize {
        let (rows, columns) = (layer.view.row_count(), layer.view.column_count());
        match self.sparsity {
            Sparsity::Share { share, scope: PruneScope::Layer } => removed(share, rows * columns),
            Sparsity::Share { share, scope: PruneScope::Row } => rows * removed(share, columns),
            Sparsity::Pattern { kept, of } => rows * columns / of * (of - kept),
        }
    }

    /// Prunes a weight by what samples say. The result also says whether the method chose by it.
    fn tuned<E: Elements>(&self, read: &Read<'_, E>) -> Result<(TunedWeight, bool)> {
        check_finite(read.elements)?;
        let layer = &read.weight.layer;
        let groups = read.statistics.unwrap_or_default();
        let magnitude = || {
            let mut values = all(read.elements);
            prune_by_score(&mut values, &layer.view, self.sparsity, &[]);
            values
        };
        let mut tuned = TunedWeight {
            method: "magnitude".to_string(),
            factors: Arc::from(Vec::new()),
            ready: None,
            errors: None,
        };
        let by_magnitude = magnitude();
        let mut pruned = None;
        match self.method {
            PruneMethod::Magnitude => {}
            PruneMethod::Wanda => {
                if let Some(factors) = factors(groups, layer.view.column_count()) {
                    let mut values = all(read.elements);
                    prune_by_score(&mut values, &layer.view, self.sparsity, &factors);
                    (tuned.factors, pruned) = (factors.into(), Some(values));
                }
            }
            PruneMethod::SparseGpt => {
                if let Some(values) = self.with_update(read) {
                    tuned.ready = Some(Arc::new(PrunedElements::of(read.elements, &values).into()));
                    pruned = Some(values);
                }
            }
        }
        let is_chosen = pruned.is_some() || self.method == PruneMethod::Magnitude;
        tuned.method = match (self.method, is_chosen) {
            (PruneMethod::Magnitude, _) => "magnitude",
            (PruneMethod::Wanda, true) => "wanda",
            (PruneMethod::SparseGpt, true) => "sparsegpt",
            (PruneMethod::SparseGpt, false) if groups.iter().all(|group| group.hessian.is_none()) => {
                "magnitude: its Hessian is beyond the memory limit"
            }
            (_, false) => NO_STATISTICS,
        }
        .to_string();
        let pruned = pruned.as_ref().unwrap_or(&by_magnitude);
        tuned.errors = errors(read, pruned, &by_magnitude);
        Ok((tuned, is_chosen))
    }

    /// Prunes a weight by SparseGPT. `None` without a Hessian of each group, or if no group has
    /// inputs other than zero.
    fn with_update<E: Elements>(&self, read: &Read<'_, E>) -> Option<Vec<f32>> {
        let layer = &read.weight.layer;
        let groups = read.statistics.filter(|groups| !groups.is_empty())?;
        let (rows, columns) = (layer.view.row_count() / groups.len(), layer.view.column_count());
        if groups.iter().all(|group| group.is_idle(columns)) {
            return None;
        }
        let mut values = all(read.elements);
        let mut before = 0;
        for (index, group) in groups.iter().enumerate() {
            let feedback = match group.usable_hessian(columns) {
                Some(hessian) => Feedback::of(hessian, GptqOptions::default())?,
                // What becomes of its rows makes no difference to the samples.
                None if group.is_idle(columns) => Feedback::none(columns),
                None => return None,
            };
            let mut matrix = layer.view.gather(&values, index * rows, rows);
            prune_with_update(&mut matrix, &feedback, self.sparsity, &mut before);
            layer.view.scatter(&matrix, index * rows, &mut values);
        }
        Some(values)
    }
}

const NO_STATISTICS: &str = "magnitude: no sample says anything about its input";

/// What the columns of each group count in Wanda: their norms over the largest. `None` without
/// norms of each group, or if all of them are zero.
fn factors(groups: &[GroupStatistics], columns: usize) -> Option<Vec<Vec<f32>>> {
    let norms: Vec<Vec<f64>> = groups.iter().map(|group| group.norms(columns)).collect::<Option<_>>()?;
    let largest = norms.iter().flatten().copied().fold(0.0, f64::max);
    let shares = |norms: Vec<f64>| norms.into_iter().map(|norm| (norm / largest) as f32).collect();
    (largest > 0.0).then(|| norms.into_iter().map(shares).collect())
}

/// The errors of the layer's outputs. `None` without usable Hessians.
fn errors<E: Elements>(read: &Read<'_, E>, pruned: &[f32], by_magnitude: &[f32]) -> Option<OutputErrors> {
    let layer = &read.weight.layer;
    let groups = read.statistics.filter(|groups| !groups.is_empty())?;
    let (rows, columns) = (layer.view.row_count() / groups.len(), layer.view.column_count());
    let original = all(read.elements);
    let (mut found, mut plain) = (OutputEnergy::default(), OutputEnergy::default());
    for (index, group) in groups.iter().enumerate() {
        // A group of which all inputs are zero adds nothing.
        let Some(hessian) = group.usable_hessian(columns) else { continue };
        let part = |values: &[f32]| layer.view.gather(values, index * rows, rows);
        let before = part(&original);
        found = found.plus(OutputEnergy::of(&before, &part(pruned), columns, hessian));
        plain = plain.plus(OutputEnergy::of(&before, &part(by_magnitude), columns, hessian));
    }
    Some(OutputErrors { pruned: found.relative()?, magnitude: plain.relative()? })
}

impl PrunableLayer {
    fn bytes(&self) -> usize {
        let size = if self.is_half { 2 } else { 4 };
        size * self.shape.iter().product::<usize>()
    }
}

fn nothing_to_prune(layers: &[PrunedLayer]) -> Error {
    let reasons = layers.iter().filter_map(|layer| match &layer.outcome {
        PruneOutcome::Kept { reason } => Some(format!("{} ({}): {reason}", layer.node, layer.operator)),
        _ => None,
    });
    let reasons: Vec<String> = reasons.take(5).collect();
    let error = Error::new(ErrorKind::InvalidArgument, "no layer of the model can be pruned");
    match reasons.is_empty() {
        true => {
            error.help("the model has no layer with a weight; functions of the model are left as they are")
        }
        false => error.help(format!("each layer stays as it is, because: {}", reasons.join("; "))),
    }
}
