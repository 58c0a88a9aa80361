//! Validation of a data set against a training graph, before the first step: names, types and
//! shapes of arrays, and labels.

use anyhow::{Context, Result, bail, ensure};
use ort_runtime::dim::{Bindings, unify};
use ort_runtime::ir::{TensorType, ValueType};
use ort_runtime::train::{Loss, TrainingGraph};
use ort_runtime::{Model, Tensor, nearest};

use super::data::DataSet;
use crate::arrays::conversion;

/// Returns the batch size, and whether the model fixes it.
pub(super) fn batch_size(model: &Model, asked: Option<u32>, rows: usize) -> Result<(usize, bool)> {
    let inputs = model.inputs();
    let given = inputs.iter().filter(|spec| !spec.has_default);
    // A constant first dimension of any input fixes the batch size.
    let fixed = given.filter_map(|spec| Some((&spec.name, spec.ty.shape()?.first()?.as_constant()?))).next();
    let asked = asked.map(|size| size as usize);
    let Some((name, size)) = fixed else {
        return Ok((asked.unwrap_or(32).min(rows), false));
    };
    let size = usize::try_from(size).ok().filter(|size| *size > 0);
    let size = size.with_context(|| format!("input '{name}' has batches of no samples"))?;
    ensure!(
        asked.is_none_or(|asked| asked == size),
        "the model takes batches of {size} only (input '{name}'); leave --batch out, or export the model with a symbolic batch"
    );
    ensure!(
        size <= rows,
        "the model takes batches of {size} only (input '{name}'), and there are {rows} samples; export it with a symbolic batch"
    );
    Ok((size, true))
}

/// An array that the training graph takes.
struct Taken {
    name: String,
    ty: TensorType,
}

/// The arrays that the training graph takes, and the constraints on labels and targets.
pub(super) struct Fit {
    taken: Vec<Taken>,
    /// The number of classes, with cross entropy if it is constant, and the label to ignore.
    classes: Option<i64>,
    ignored: Option<i64>,
    /// Whether targets are probabilities.
    is_binary: bool,
}

impl Fit {
    /// Collects what a training graph takes.
    pub(super) fn new(training: &TrainingGraph, loss: &Loss, ignored: Option<i64>) -> Result<Fit> {
        let graph = training.graph();
        let type_of = |name: &str| graph.find_value(name).map(|id| &graph.value(id).ty);
        let mut taken = Vec::new();
        for name in training.inputs() {
            match type_of(name) {
                Some(ValueType::Tensor(ty)) => taken.push(Taken { name: name.clone(), ty: ty.clone() }),
                other => {
                    let other = other.map_or_else(|| "of no type".to_string(), ToString::to_string);
                    bail!("input '{name}' is {other}; only tensors are trained on")
                }
            }
        }
        let scores = type_of(training.output()).and_then(ValueType::shape);
        // A symbolic number of classes leaves the labels unchecked here.
        let classes = scores.and_then(|shape| shape.get(loss.class_axis(shape.len())?)?.as_constant());
        Ok(Fit { taken, classes, ignored, is_binary: *loss == Loss::BceWithLogits })
    }

    /// Rejects samples that the training graph cannot take. Returns the sizes of the symbolic
    /// dimensions for batches of `batch` samples.
    pub(super) fn check(&self, data: &DataSet, batch: usize) -> Result<Vec<(String, i64)>> {
        let path = data.path.display();
        let names = || self.taken.iter().map(|taken| taken.name.as_str());
        if let Some((name, _)) = data.arrays.iter().find(|(name, _)| names().all(|taken| taken != name)) {
            let near = nearest(name, names()).map(|near| format!("rename '{name}' to '{near}', or "));
            bail!(
                "{path} has an array '{name}' that training does not use. It needs the arrays {}; {}remove \
                 '{name}'",
                names().collect::<Vec<_>>().join(", "),
                near.unwrap_or_default()
            );
        }
        // All arrays share the bindings, so a symbol has one size across them.
        let mut bindings = Bindings::new();
        for taken in &self.taken {
            let found = data.array(&taken.name).with_context(|| {
                let found: Vec<&str> = data.arrays.iter().map(|(name, _)| name.as_str()).collect();
                format!(
                    "{path} has no array '{}' ({}); it contains {}. Add {}",
                    taken.name,
                    ValueType::Tensor(taken.ty.clone()),
                    found.join(", "),
                    taken.name
                )
            })?;
            taken.check(found, batch, &mut bindings).with_context(|| path.to_string())?;
        }
        data.check_numbers()?;
        if self.is_binary {
            let advice = "--loss bce takes probabilities, 0 to 1";
            data.check_each("target", |number| (0.0..=1.0).contains(&number), advice)?;
        }
        self.check_labels(data)?;
        let named =
            |(symbol, size): (&ort_runtime::dim::Symbol, i64)| Some((symbol.name()?.to_string(), size));
        Ok(bindings.iter().filter_map(named).collect())
    }

    /// Rejects labels outside the model's classes.
    fn check_labels(&self, data: &DataSet) -> Result<()> {
        let (Some(classes), Some(labels)) = (self.classes, data.array("labels")) else { return Ok(()) };
        let wrong = |label: &i64| !(0..classes).contains(label) && self.ignored.is_none_or(|it| it != *label);
        let numbers = labels.view().as_slice::<i64>()?;
        ensure!(
            numbers.iter().any(|label| self.ignored != Some(*label)),
            "{}: all of 'labels' are {}, which --ignore-index leaves out: there is nothing to train on",
            data.path.display(),
            self.ignored.unwrap_or_default()
        );
        if let Some((place, label)) = numbers.iter().enumerate().find(|(_, label)| wrong(label)) {
            let row = place / (labels.element_count() / data.rows).max(1);
            bail!(
                "{}: label {label} in row {row} of 'labels'; the model has the classes 0 to {}: correct the label, or ignore it with --ignore-index {label}",
                data.path.display(),
                classes - 1
            );
        }
        Ok(())
    }
}

impl Taken {
    fn check(&self, array: &Tensor, batch: usize, bindings: &mut Bindings) -> Result<()> {
        let (name, expected) = (&self.name, self.ty.dtype);
        if array.dtype() != expected {
            let found = array.dtype().name();
            let advice = conversion(name, expected).map(|numpy| match expected.is_float() {
                true => format!("; {numpy}, scaled as the model expects it"),
                false => format!("; {numpy}"),
            });
            bail!("array '{name}' is {found}, expected {}{}", expected.name(), advice.unwrap_or_default());
        }
        let Some(shape) = &self.ty.shape else { return Ok(()) };
        let ty = ValueType::Tensor(self.ty.clone());
        ensure!(
            shape.len() == array.shape().len() && !shape.is_empty(),
            "array '{name}' has shape {:?}, expected samples of {ty}: {} axes, the first of which counts samples",
            array.shape(),
            shape.len()
        );
        // The array has all samples on its first axis; the model sees one batch of them.
        let sizes = std::iter::once(batch).chain(array.shape().iter().skip(1).copied());
        for (axis, (dim, size)) in shape.iter().zip(sizes).enumerate() {
            if unify(dim, size as i64, bindings).is_err() {
                let known = bindings.to_string();
                let known = if known.is_empty() { known } else { format!(" with {known}") };
                bail!(
                    "array '{name}' has size {size} on axis {axis}{}, expected {dim}{known}: the model takes {ty}",
                    if axis == 0 { " of a batch" } else { "" },
                );
            }
        }
        Ok(())
    }
}
