//! Runs of a model in which some weights are replaced: what a changed weight does to the outputs.
//!
//! The weights become inputs with a default, so that one session serves all of them and a replaced
//! weight takes no more memory than itself.

use std::collections::BTreeSet;

use half::{bf16, f16};
use ort_core::dtype::{DType, Element};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_core::{Error, ErrorKind, Result};

use crate::noise::Noise;

/// Named inputs or outputs of a run.
type Named = Vec<(String, Value)>;

/// A session in which weights can be replaced, the samples that it runs on, and the outputs of the
/// original weights.
pub struct WeightProbe {
    session: Session,
    replaceable: BTreeSet<String>,
    samples: Vec<(Named, Named)>,
}

impl WeightProbe {
    /// The model with these weights as inputs that have a default. Names that are no weights of
    /// the main graph are left out: a weight of a subgraph cannot be replaced.
    pub fn model<'n>(model: &Model, weights: impl IntoIterator<Item = &'n str>) -> Model {
        let mut graph = model.graph().clone();
        for name in weights {
            let found = graph.constants.keys().copied().find(|id| &*graph.value(*id).name == name);
            if let Some(id) = found
                && let Some(tensor) = graph.constants.shift_remove(&id)
            {
                graph.inputs.push(id);
                graph.input_defaults.insert(id, tensor);
            }
        }
        Model::from_graph(graph)
    }

    /// Takes a session of [`WeightProbe::model`].
    pub fn new(session: Session) -> WeightProbe {
        let inputs = session.inputs().into_iter().filter(|input| input.has_default);
        let replaceable = inputs.map(|input| input.name).collect();
        WeightProbe { session, replaceable, samples: Vec::new() }
    }

    /// Runs a sample with the original weights, and keeps it with its outputs. Returns the bytes of
    /// the outputs.
    ///
    /// # Errors
    ///
    /// As [`Session::run`].
    pub fn add(&mut self, sample: Named) -> Result<usize> {
        let outputs = self.session.run(&borrowed(&sample))?;
        let bytes = |(_, value): &(String, Value)| value.tensor().map_or(0, Tensor::byte_count);
        let held = outputs.iter().map(bytes).sum();
        self.samples.push((sample, outputs));
        Ok(held)
    }

    /// Keeps a sample with the outputs that [`Self::noise`] compares with, in the place of those of
    /// the session.
    pub fn add_reference(&mut self, sample: Named, outputs: Named) {
        self.samples.push((sample, outputs));
    }

    /// The number of samples.
    pub fn samples(&self) -> usize {
        self.samples.len()
    }

    /// Whether a weight can be replaced.
    pub fn can_replace(&self, weight: &str) -> bool {
        self.replaceable.contains(weight)
    }

    /// The energy of all outputs of floating point over the samples, and what it changes in them to
    /// replace these weights.
    ///
    /// # Errors
    ///
    /// As [`Session::run`], or a weight has another type or shape than the original.
    pub fn noise(&self, replaced: &[(&str, Value)]) -> Result<Noise> {
        let mut noise = Noise::default();
        for (sample, before) in &self.samples {
            let mut inputs = borrowed(sample);
            inputs.extend(replaced.iter().cloned());
            for ((name, before), (_, after)) in before.iter().zip(self.session.run(&inputs)?) {
                let (Value::Tensor(before), Value::Tensor(after)) = (before, &after) else { continue };
                if before.shape() != after.shape() {
                    let (shape, other) = (before.shape(), after.shape());
                    let text = format!("output '{name}' is {shape:?}, and {other:?} with a replaced weight");
                    return Err(Error::new(ErrorKind::Fail, text).help("use --budget without --data"));
                }
                add(&mut noise, before, after)?;
            }
        }
        Ok(noise)
    }
}

fn borrowed(sample: &Named) -> Vec<(&str, Value)> {
    sample.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
}

/// Adds the elements of an output. Those that are not finite in both tensors say nothing.
fn add(noise: &mut Noise, before: &Tensor, after: &Tensor) -> Result<()> {
    match before.dtype() {
        DType::F32 => add_as::<f32>(noise, (before, after), f64::from),
        DType::F16 => add_as::<f16>(noise, (before, after), f16::to_f64),
        DType::BF16 => add_as::<bf16>(noise, (before, after), bf16::to_f64),
        DType::F64 => add_as::<f64>(noise, (before, after), |value| value),
        // The outputs of other types have no relative error.
        _ => Ok(()),
    }
}

fn add_as<T: Element>(
    noise: &mut Noise,
    (before, after): (&Tensor, &Tensor),
    wide: impl Fn(T) -> f64,
) -> Result<()> {
    let (before, after) = (before.view().to_cow::<T>()?, after.view().to_cow::<T>()?);
    for (before, after) in before.iter().zip(after.iter()) {
        let (before, after) = (wide(*before), wide(*after));
        if before.is_finite() && after.is_finite() {
            noise.signal += before * before;
            noise.error += (after - before) * (after - before);
        }
    }
    Ok(())
}
